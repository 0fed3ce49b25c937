// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Growing: the backing device of a volume has more bytes at its end than before.
//!
//! The volume's last block may be there in part: of 4096·n + 512 bytes the log's block n has 512 from the guest, and zeros
//! behind them that nobody wrote. With the new size the rest of that block is the volume's as well, and the backing device
//! has it: so no version of block n may be left in the log by then. Every other block is as it was.
//!
//! # Invariants
//!
//! - **G1** When a superblock says the new size, the block that was there in part is on the backing device, and
//!   an entry (kind `Bypassed`) that voids every version of it is durable: it is read from the backing device.
//! - **G2** From that entry to the end of the growth nobody places that block: it is locked, and no discard that came
//!   before takes it for a whole one. Nor before the entry is durable, if the growth is cancelled (Y6 of `bypass`).
//! - **G3** Requests reach beyond the old end only after both copies of the superblock say the new size: whatever is
//!   placed there is found again.
//! - **G4** What was read with the old end in mind is shared with nobody and copied nowhere afterwards.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | none | settling | [`Engine::begin_to_grow`]; whole blocks: ready at once |
//! | settling | voiding | the block's newest version is on the backing device, nobody has it; its entry is placed |
//! | voiding | ready | the entry is durable |
//! | ready | none | the superblock says the new size: [`Engine::grow`] |
//! | any but voiding | none | [`Engine::cancel_growth`] |
//! | voiding | none | the same, as soon as the entry is durable |
//! | settling, voiding | none | the cache device has failed |
//!
//! # Crash
//!
//! Before the superblock: the old size, and the last block on the backing device. After it: the new size, and the same.

use crate::engine::{CacheHealth, Engine};
use crate::format::entry::Kind;
use crate::mutant::Mutant;
use crate::payload::Payload;
use crate::policy::bypass::Version;
use crate::request::Op;
use crate::units::{BLOCK_BYTES, Lba, Sequence, VolumeIndex};
use crate::volume::{LOCK_COUNT_MAX, Lock, Volume};

/// Whose lock it is: no request's.
const OWNER: u32 = u32::MAX - 1;

/// How far the growth of a volume has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// What the log has of the last block is written back.
    Settling,
    /// The entry that voids it is to be durable up to here.
    Voiding(Sequence),
    /// The superblock may say the new size.
    Ready,
}

/// A volume that grows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growing {
    size_bytes: u64,
    stage: Growth,
    /// It ends when the entry is durable.
    cancelled: bool,
}

impl Engine {
    /// The backing device of a volume has so many bytes now, which is more than the volume has.
    pub fn begin_to_grow(
        &mut self,
        volume: VolumeIndex,
        size_bytes: u64,
        payload: &mut impl Payload,
    ) {
        let state = self.volume(volume);
        assert!(state.growing.is_none_or(|it| it.cancelled) && size_bytes > state.size_bytes);
        let whole = state.size_bytes.is_multiple_of(BLOCK_BYTES);
        let fresh = if whole { Growth::Ready } else { Growth::Settling };
        let stage = state.growing.map_or(fresh, |cancelled| cancelled.stage);
        state.growing = Some(Growing { size_bytes, stage, cancelled: false });
        self.put_in_order(payload);
    }

    /// How far a growth has come that was begun and not cancelled.
    pub fn growth(&self, volume: VolumeIndex) -> Option<Growth> {
        self.volume_ref(volume)?.growing.filter(|it| !it.cancelled).map(|it| it.stage)
    }

    /// The size that a superblock may say now, if a growth is ready.
    pub fn may_grow_to(&self, volume: VolumeIndex) -> Option<u64> {
        let growing = self.volume_ref(volume)?.growing?;
        (growing.stage == Growth::Ready).then_some(growing.size_bytes)
    }

    /// The volume is larger from now on. Its growth is ready, and both copies of the superblock say the new size (G3).
    pub fn grow(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let state = self.volume(volume);
        let growing = state.growing.take().expect("its growth was begun");
        assert!(growing.stage == Growth::Ready);
        state.size_bytes = growing.size_bytes;
        state.unlock(OWNER);
        self.tickets.void_all(); // G4
        self.put_in_order(payload);
    }

    /// The volume stays as large as it is.
    pub fn cancel_growth(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let forgets = self.config.mutants.is(Mutant::GrownUnlockedEarly);
        let state = self.volume(volume);
        state.growing = state
            .growing
            .filter(|it| matches!(it.stage, Growth::Voiding(_)) && !forgets)
            .map(|it| Growing { cancelled: true, ..it });
        if state.growing.is_none() {
            state.unlock(OWNER);
        }
        self.put_in_order(payload);
    }

    /// Goes on with a growth as far as it can.
    pub(crate) fn growth_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let failed = self.health == CacheHealth::Failed;
        let state = self.volume(volume);
        let Some(growing) = state.growing else { return };
        if failed && growing.stage != Growth::Ready {
            // Its entry never becomes durable. What is ready may have been told to the superblock already.
            return self.growth_ends(volume, payload);
        }
        if failed && state.has_lock(OWNER) {
            // What is ready may wait for ever to be recorded. Nothing is placed for the block any more, and the entry that voids
            // what was is durable.
            state.unlock(OWNER);
            return self.write_settle(volume, payload);
        }
        let stage = match growing.stage {
            Growth::Settling => self.void_last(volume, payload),
            Growth::Voiding(entry) if state.log.durable.through >= entry => Growth::Ready,
            stage => stage,
        };
        self.volume(volume).growing = Some(Growing { stage, ..growing });
        if growing.cancelled && stage == Growth::Ready {
            self.growth_ends(volume, payload);
        }
    }

    /// Who waits for the last block has it now.
    fn growth_ends(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let state = self.volume(volume);
        state.growing = None;
        state.unlock(OWNER);
        self.write_settle(volume, payload);
    }

    /// Voids what the log has of the last block, if it may (G1, G2).
    fn void_last(&mut self, volume: VolumeIndex, payload: &mut impl Payload) -> Growth {
        let state = self.volume_ref(volume).expect("it exists");
        let last = state.last();
        // What is lost stays so until it is written; what is dirty is being written back.
        let stays = matches!(self.version(state, last), Version::Dirty { .. } | Version::Lost);
        let taken = state.is_locked(last, last + 1, OWNER) || state.locks.len() >= LOCK_COUNT_MAX;
        if self.config.mutants.is(Mutant::GrownTailKept) {
            return Growth::Ready;
        }
        if stays || taken || self.is_discarded(state, last) || !self.extent_room(volume, payload) {
            return Growth::Settling;
        }
        self.place_extent(volume, Kind::Bypassed, last, 1, payload);
        let state = self.volume(volume);
        state.locks.push(Lock { owner: OWNER, start: last, end: last + 1 });
        let entry = state.log.placed;
        state.log.want(entry);
        match self.config.mutants.is(Mutant::GrownBeforeEntryDurable) {
            true => Growth::Ready,
            false => Growth::Voiding(entry),
        }
    }

    /// Whether a discard waits that takes the last block for a whole one (G2). Everything else that comes to it
    /// finds the lock.
    fn is_discarded(&self, state: &Volume, last: Lba) -> bool {
        state
            .writes
            .iter()
            .filter_map(|at| self.requests.get(*at))
            .any(|active| active.request.op == Op::Discard && active.first + active.blocks > last)
    }
}

impl Volume {
    /// The last block.
    fn last(&self) -> Lba {
        Lba(self.blocks() - 1)
    }

    /// Whether a growth waits until what is dirty is written back.
    pub(crate) fn settles_to_grow(&self) -> bool {
        self.growing.is_some_and(|growing| growing.stage == Growth::Settling)
    }
}
