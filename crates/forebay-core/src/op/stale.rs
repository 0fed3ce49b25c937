// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device that failed while it held nothing that the backing device lacks: writes pass it.
//!
//! What the log holds of the blocks that they change is older from then on, and nothing can be appended that says so. So
//! before the first of them the runtime writes down, outside of the cache, that the cache is *stale* for this volume
//! since its attach generation. Whoever opens the cache again and finds that *mark* drops what it holds of the volume.
//!
//! # Invariants
//!
//! - **X1** No write passes a version that the log holds before the mark is durable.
//! - **X2** Only a volume is passed that is on its backing device, as a crash would find it, too, and of which no
//!   block is lost: the log would be needed to tell which.
//! - **X3** From the mark on nothing of the volume's log is read or written: it is its backing device.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | no | asked | a write, a write-zeroes or a discard comes that must pass the log (X2) |
//! | asked | passing | the mark is durable |
//! | asked | refused | it cannot be made so: the volume is read, and all that would pass the log fails |

use crate::effect::{Effect, Fault};
use crate::engine::{Engine, Pending};
use crate::format::entry::Kind;
use crate::log::lost::each_held;
use crate::map::extent::Extent;
use crate::mutant::Mutant;
use crate::units::{Ordinal, VolumeIndex};
use crate::volume::Volume;

/// Whether a volume is served past a failed cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stale {
    /// It is not.
    #[default]
    No,
    /// The mark is being written.
    Asked,
    /// The cache is marked stale: the volume is its backing device.
    Passing,
    /// There is no place for the mark.
    Refused,
}

impl Engine {
    /// The cache device failed, and something is to pass what it holds: says whether that waits, or is refused.
    pub(crate) fn stale_ask(&mut self, volume: VolumeIndex) -> bool {
        let loose = self.config.mutants.is(Mutant::PassesDirty);
        if !self.volume(volume).may_be_passed() && !loose {
            return false;
        }
        match self.volume(volume).stale {
            Stale::Refused => false,
            Stale::Asked | Stale::Passing => true,
            Stale::No => {
                let early = self.config.mutants.is(Mutant::PassesUnmarked);
                self.volume(volume).stale = if early { Stale::Passing } else { Stale::Asked };
                let token = self.token(Pending::Stale { volume });
                self.effects.push_back(Effect::MarkStale { token, volume });
                true
            }
        }
    }

    /// Drops what the log of a volume that is not served has copies of: its backing device was written without this
    /// cache. What is dirty stays, and wins. The log still has it all, and so has whoever opens it next.
    pub fn forget_clean(&mut self, volume: VolumeIndex) {
        self.tickets.void_all();
        self.checkpoint_forgets();
        let state = self.volume_ref(volume).expect("it exists");
        assert!(!state.serving);
        let clean_to = self.clean_to(state);
        let first = state.log.tail_segment;
        let Engine { index, segments, slots, .. } = self;
        // What is in the open record, too: copies are placed there before the volume is served.
        each_held(segments, slots, first, |lba, slot, position| {
            if position <= clean_to || slots.held(slot).is_some_and(|held| held.fill) {
                index.remove(volume, lba, slot);
            }
            true
        });
        let state = self.volume(volume);
        state.forgot = Ordinal(state.log.next_ordinal.0 - 1);
        let clean = |it: &Extent| it.kind != Kind::Lost && it.position <= clean_to;
        state.extents.remove_where(clean);
    }

    pub(crate) fn stale_marked(&mut self, volume: VolumeIndex, result: Result<(), Fault>) {
        let state = self.volume(volume);
        if state.stale == Stale::Asked {
            state.stale = if result.is_ok() { Stale::Passing } else { Stale::Refused };
        }
    }
}

impl Volume {
    /// Whether the cache is out of it.
    #[inline]
    pub(crate) fn is_passing(&self) -> bool {
        self.stale == Stale::Passing
    }

    /// Whether nothing would be missed without the log (X2).
    fn may_be_passed(&self) -> bool {
        let whole = !self.has_lost() && !self.frozen;
        // Nothing of a batch comes late, either.
        whole && self.is_settled() && self.writeback.is_at_rest()
    }
}
