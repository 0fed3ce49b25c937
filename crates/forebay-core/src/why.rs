// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a block is and, as far as that is remembered, why it is there.
//!
//! Of what went around the log the last [`PASSED_MAX`] requests of a volume are remembered; of what was reclaimed,
//! nothing.

use crate::engine::Engine;
use crate::format::entry::Kind;
use crate::policy::bypass::{Reason, Version};
use crate::units::{Lba, SegmentId, Tick, VolumeIndex};

/// Requests that went around the log of a volume and are remembered.
pub const PASSED_MAX: usize = 64;

/// A request that went around the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// First block.
    pub first: Lba,
    /// Blocks.
    pub blocks: u64,
    /// Why.
    pub reason: Reason,
    /// Blocks of the run of writes that it ended; 0: nobody counted.
    pub run: u64,
    /// When.
    pub at: Tick,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the buffer of a segment, in memory.
    Buffer {
        /// Which segment.
        segment: SegmentId,
        /// Block within it.
        block: u16,
    },
    /// On the cache device.
    Cache {
        /// Which segment.
        segment: SegmentId,
        /// Block within it.
        block: u16,
    },
    /// In no place: the log says that it reads as zeros.
    Zeros,
    /// In no place: the guest gave it up.
    Discarded,
    /// On the backing device alone.
    Backing,
    /// Nowhere: its newest contents were lost.
    Lost,
}

/// What is known of a block.
#[derive(Clone, Copy, Debug)]
pub struct Why {
    /// Where it is.
    pub place: Place,
    /// What is there is not on the backing device.
    pub dirty: bool,
    /// The backing device refuses it.
    pub parked: bool,
    /// It is a copy of what the backing device held when it was made.
    pub fill: bool,
    /// An entry in the log says that a write of it went around the log.
    pub voided: bool,
    /// The last remembered write of it that went around the log.
    pub passed: Option<Passed>,
}

impl Engine {
    /// Where a block is and why, if the volume has such a block. Looking is no reading: nothing is kept longer for
    /// it.
    pub fn why(&self, volume: VolumeIndex, lba: Lba) -> Option<Why> {
        let state = self.volume_ref(volume).filter(|state| lba.0 < state.blocks())?;
        let logged = !state.is_passing();
        let slot = self.newest_slot(state, lba).filter(|_| logged);
        let kind = state.extents.get(lba).map(|extent| extent.kind).filter(|_| logged);
        let place = match (slot.map(|slot| self.segments.place(slot)), kind) {
            (Some((segment, block)), _) if self.segments.get(segment).buffer.is_some() => {
                Place::Buffer { segment, block }
            }
            (Some((segment, block)), _) => Place::Cache { segment, block },
            (None, Some(Kind::Zero)) => Place::Zeros,
            (None, Some(Kind::Discard)) => Place::Discarded,
            (None, Some(Kind::Lost)) => Place::Lost,
            (None, _) => Place::Backing,
        };
        let covers = |passed: &&Passed| passed.first <= lba && lba < passed.first + passed.blocks;
        Some(Why {
            place,
            dirty: matches!(self.version(state, lba), Version::Dirty { .. })
                && place != Place::Backing,
            parked: state.parked.contains(lba),
            fill: slot.and_then(|slot| self.slots.held(slot)).is_some_and(|held| held.fill),
            voided: place == Place::Backing && kind == Some(Kind::Bypassed),
            passed: state.around.passed.iter().rev().find(covers).copied(),
        })
    }
}
