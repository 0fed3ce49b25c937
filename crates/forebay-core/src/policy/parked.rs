// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parked blocks: dirty blocks that a backing device refuses to take while it takes others.
//!
//! One bad sector must not hold back a volume's whole log. After [`TRIES`] tries of a batch the writes
//! that are refused are halved until single blocks are left; these are appended again at the head,
//! as dirty as they were, and the rest of the batch is done.
//!
//! # Invariants
//!
//! - **Q1** Before the watermark passes a refused block an entry behind it holds the block again, unless
//!   something newer was placed for it. The entry comes before the record that says the watermark, so
//!   whoever finds the one finds the other: in the log, in a checkpoint (T1), in the superblock (D4).
//! - **Q2** Only a block's newest version is parked: an older one would supersede it.
//! - **Q3** Nothing is parked before the backing device did something well in the same try: a device
//!   that fails altogether makes its volume wait, as it ever did.
//! - **Q4** No more blocks are parked than one segment takes, and none in the last two segments of the
//!   reserve: what crashes left of batches that parked could else take all of it. If more are refused
//!   the volume takes no writes (they answer errors) until a batch is done; reads go on.
//! - **Q5** A write that is answered when it is on the backing device answers an error if a block of
//!   it is parked.
//!
//! Which blocks are parked is known in memory only: in the log they are dirty data like any other, and
//! after an opening they are tried, and found refused, again.
//!
//! # States
//!
//! | a parked block | until | by |
//! |---|---|---|
//! | is kept: batches append it again without trying it | its pause is over | `writeback_write_run`, `parked_due` |
//! | is tried with the next batch | it is refused again: the pause doubles | `writeback_refused` |
//! | is written | its batch is done: dirty no more | `writeback_took` |
//! | is overwritten, zeroed, given up or lost | the new version is tried in its turn | `place_data`, `place_extent` |
//!
//! # Crash
//!
//! Between an entry and the watermark the log holds a block twice, both dirty and alike. The batch is
//! built again; of the two the newer one counts, as ever.

use crate::engine::Engine;
use crate::format::entry::Kind;
use crate::memory::vec_bytes;
use crate::mutant::Mutant;
use crate::op::read::Source;
use crate::payload::{Payload, Place};
use crate::policy::lane::{Part, Run};
use crate::policy::writeback::Cursor;
use crate::request::RequestError;
use crate::units::{Lba, Slot, Tick, VolumeIndex};
use crate::volume::Volume;
use alloc::vec::Vec;

/// Tries of a batch before what is refused is parked.
pub const TRIES: u32 = 8;
/// Writes, but for those of blocks that are parked, that may be refused before the first that is not: then no
/// more are halved, and if none of the other runs is taken either the device works not at all.
pub const PROBES_MAX: u32 = 32;
/// So many of them are tried as they come, the longest parts first. Then one at a time, each time half of the
/// last: where every second block is refused only single blocks are taken, and halving everything before them
/// takes more tries than there are.
pub const PROBES_WIDE: u32 = 16;
/// Parts of refused writes that may wait to be tried.
pub const PARTS_MAX: usize = 1024;
/// Parked blocks of a volume, however large its segments are.
const COUNT_MAX: usize = 126;
/// A refused block is tried again after so many times `retry_after`, at first and at last.
const PAUSE_FIRST: u64 = 8;
const PAUSE_LAST: u64 = 64;

/// The parked blocks of a volume.
#[derive(Debug)]
pub struct Parked {
    /// In order.
    blocks: Vec<Lba>,
    /// All that is parked was placed since then; while it is, the log has it again and again, and what is there is never old.
    since: Tick,
    count_max: usize,
    /// Tries in a row in which the backing device refused something.
    pub(crate) tries: u32,
    /// They are tried again then.
    pub(crate) due: Tick,
    pause: u64,
    /// More were refused than may be parked (Q4).
    pub(crate) full: bool,
}

impl Parked {
    /// None yet; `segment_blocks` bounds how many there may be.
    pub(crate) fn new(segment_blocks: u16) -> Parked {
        let count_max = usize::from(segment_blocks.saturating_sub(2)).min(COUNT_MAX);
        Parked {
            blocks: Vec::with_capacity(count_max),
            since: Tick(0),
            count_max,
            tries: 0,
            due: Tick(0),
            pause: 0,
            full: false,
        }
    }

    /// Bytes of memory at most.
    pub(crate) fn memory_bytes() -> u64 {
        (COUNT_MAX * size_of::<Lba>()) as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.blocks)
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The first of them.
    pub(crate) fn first(&self) -> Option<Lba> {
        self.blocks.first().copied()
    }

    pub(crate) fn contains(&self, lba: Lba) -> bool {
        self.blocks.binary_search(&lba).is_ok()
    }

    /// Whether any of `start..end` is.
    pub(crate) fn overlaps(&self, start: Lba, end: Lba) -> bool {
        let at = self.blocks.partition_point(|lba| *lba < start);
        self.blocks.get(at).is_some_and(|lba| *lba < end)
    }

    /// Whether one more may be parked, or is already (Q4).
    pub(crate) fn has_room(&self, lba: Lba) -> bool {
        self.blocks.len() < self.count_max || self.contains(lba)
    }

    /// Nothing of it was placed before.
    pub(crate) fn since(&self) -> Option<Tick> {
        (!self.is_empty()).then_some(self.since)
    }

    /// A block is parked that was not placed before `since`; there is room.
    pub(crate) fn insert(&mut self, lba: Lba, since: Tick) {
        assert!(self.has_room(lba));
        self.since = self.since().unwrap_or(since);
        if let Err(at) = self.blocks.binary_search(&lba) {
            self.blocks.insert(at, lba);
        }
    }

    /// Something else was placed for these blocks, or they are written.
    pub(crate) fn remove(&mut self, start: Lba, end: Lba) {
        self.blocks.retain(|lba| *lba < start || *lba >= end);
    }

    /// What was tried was refused, whether it is known or new: the pause grows.
    pub(crate) fn put_off(&mut self, now: Tick, retry_after: u64) {
        let first = retry_after.saturating_mul(PAUSE_FIRST);
        let last = retry_after.saturating_mul(PAUSE_LAST);
        self.pause = self.pause.saturating_mul(2).clamp(first, last);
        self.due = now.after(self.pause);
    }

    /// A batch is done, and nothing of it was refused.
    pub(crate) fn all_taken(&mut self) {
        self.tries = 0;
        if self.blocks.is_empty() {
            (self.pause, self.due) = (0, Tick(0));
        }
    }
}

impl Volume {
    /// Nothing that is dirty was placed before.
    pub(crate) fn dirty_since(&self) -> Option<Tick> {
        if !self.log.is_dirty() {
            return None;
        }
        let placed = self.log.times.placed_since(self.log.watermark);
        // Behind the watermark there may be copies of what was read, far older than what is dirty.
        let placed = placed.or(self.writeback.dirty_since).max(self.writeback.dirty_from);
        placed.into_iter().chain(self.parked.since()).min()
    }

    /// Whether all that is dirty is parked.
    pub(crate) fn is_only_parked(&self) -> bool {
        !self.parked.is_empty()
            && self.log.dirty_blocks == self.parked.len() as u64
            && self.pending_extents.iter().all(|it| it.kind == Kind::Bypassed)
    }
}

impl Engine {
    /// When what is parked has its next batch, if nothing else is dirty: to be tried or, where a write was refused a segment meanwhile, to be
    /// placed again, since it may lie in one segment instead of two then.
    pub(super) fn parked_due(&self, volume: &Volume) -> Tick {
        let due = volume.parked.due;
        let again = volume.writeback.begun.after(self.config.retry_after);
        if volume.refused { due.min(again) } else { due }
    }

    /// The backing device took a part of a run.
    #[inline]
    pub(crate) fn writeback_took(&mut self, volume: VolumeIndex, lane: usize, part: Part) {
        let state = &mut self.lanes[lane];
        let stretch = state.run(part.run).stretch;
        state.works |= stretch.kind != Kind::Discard;
        let parked = &self.volume_ref(volume).expect("it exists").parked;
        if parked.is_empty() {
            return;
        }
        let first = stretch.lba + part.from;
        if stretch.kind != Kind::Data || !parked.overlaps(first, first + part.blocks) {
            return;
        }
        for at in part.from..part.from + part.blocks {
            let slot = self.lanes[lane].batch.slot(stretch.item + at as usize);
            let lba = stretch.lba + at;
            // If the batch holds an older copy of it, this one is still to be written.
            if slot.is_some_and(|slot| self.is_newest(volume, lba, slot)) {
                self.volume(volume).parked.remove(lba, lba + 1);
            }
        }
    }

    /// The backing device refused a part of a run: the batch is given up, or halves are tried until
    /// single blocks are left.
    pub(crate) fn writeback_refused(&mut self, volume: VolumeIndex, lane: usize, part: Part) {
        let (now, retry_after) = (self.now, self.config.retry_after);
        let Part { run: number, from, blocks } = part;
        let state = &mut self.lanes[lane];
        let stretch = state.run(number).stretch;
        let known = &self.volumes[usize::from(volume.0)].as_deref().expect("it exists").parked;
        state.refusals += 1;
        state.probes += u32::from(blocks > 1 || !known.contains(stretch.lba + from));
        if !state.parking || state.failed {
            state.failed = true;
            return;
        }
        if stretch.kind == Kind::Discard {
            // What the guest gave up may stay as it is.
            return;
        }
        if blocks > 1 {
            let half = blocks / 2;
            state.run(number).remaining += 2;
            state.parts.push_back(Part { run: number, from, blocks: half });
            state.parts.push_back(Part { run: number, from: from + half, blocks: blocks - half });
            state.failed |= state.parts.len() + 2 > PARTS_MAX;
            return;
        }
        state.run(number).refused = true;
        if stretch.kind == Kind::Data {
            state.batch.refuse(stretch.item + from as usize);
        } else {
            state.zeros.push(stretch.lba + from);
            state.failed |= state.zeros.len() == PARTS_MAX;
        }
        if !core::mem::replace(&mut state.put_off, true) {
            self.volume(volume).parked.put_off(now, retry_after);
        }
    }

    /// Parks the refused blocks of a run that is done otherwise; says whether all of them are.
    pub(super) fn park_run(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        run: Run,
        payload: &mut impl Payload,
    ) -> bool {
        let stretch = run.stretch;
        let end = stretch.lba + stretch.blocks;
        if self.lanes[lane].failed {
            return false;
        }
        if stretch.kind != Kind::Data {
            if !self.lanes[lane].works {
                return self.wait_for_success(volume, lane);
            }
            while let Some(lba) = self.lanes[lane].zeros.last().copied() {
                // They may be of a run behind this one.
                if !(stretch.lba <= lba && lba < end) {
                    let zeros = &mut self.lanes[lane].zeros;
                    let Some(at) = zeros.iter().position(|it| stretch.lba <= *it && *it < end)
                    else {
                        return true;
                    };
                    let last = zeros.len() - 1;
                    zeros.swap(at, last);
                    continue;
                }
                self.lanes[lane].zeros.pop();
                if !self.park(volume, lane, lba, None, payload) {
                    return false;
                }
            }
            return true;
        }
        for at in 0..stretch.blocks {
            let (item, lba) = (stretch.item + at as usize, stretch.lba + at);
            let batch = &self.lanes[lane].batch;
            let Some(slot) = batch.slot(item).filter(|_| batch.is_refused(item)) else { continue };
            let known = self.volume(volume).parked.contains(lba);
            if !known && !self.lanes[lane].works {
                return self.wait_for_success(volume, lane);
            }
            let frame = run.frame + at as u32;
            if !self.park(volume, lane, lba, Some((slot, frame)), payload) {
                return false;
            }
        }
        true
    }

    /// Nothing was written yet: another run may be, or else the device is asked (Q3).
    fn wait_for_success(&mut self, volume: VolumeIndex, lane: usize) -> bool {
        if self.lanes[lane].under_way == 0 {
            self.writeback_probe(volume, lane);
        }
        false
    }

    /// Appends a block again that the backing device refused, from its slot and frame or, for none,
    /// as zeros.
    fn park(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        lba: Lba,
        from: Option<(Slot, u32)>,
        payload: &mut impl Payload,
    ) -> bool {
        let newest = match from {
            Some((slot, _)) => self.is_newest(volume, lba, slot),
            None => self.locate(volume, lba) == Source::Zero && !self.is_behind_batch(volume, lba),
        };
        let stale = self.config.mutants.is(Mutant::ParkedStale);
        if !newest && !stale || self.config.mutants.is(Mutant::ParkedForgotten) {
            return true; // Q2
        }
        if !self.volume(volume).parked.has_room(lba) || !self.may_park(volume) {
            self.lanes[lane].failed = true;
            self.refuse_writes(volume);
            return false;
        }
        if !self.own_room(volume, 1, payload) {
            self.lanes[lane].failed = true;
            return false;
        }
        let (buffer, block) = self.next_slot(volume);
        let to = Place::Buffer { buffer, block };
        match from {
            Some((_, frame)) => payload.copy(Place::Window { frame }, to, 1),
            None => payload.zero(to, 1),
        }
        let crc = payload.checksum(to);
        self.place_data(volume, lba, crc, Kind::Parked, payload); // Q1
        true
    }

    /// Whether the newest extent over a block lies behind the batch under way: its own batch is to try it.
    fn is_behind_batch(&self, volume: VolumeIndex, lba: Lba) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        let Cursor { segment: Some(id), block } = state.writeback.end_cursor else { return false };
        let end = self.segments.position(id, block);
        state.extents.get(lba).is_some_and(|extent| extent.position > end)
    }

    /// More is refused than may be parked: whoever waits for the backing device hears so (Q4).
    fn refuse_writes(&mut self, volume: VolumeIndex) {
        self.volume(volume).parked.full = true;
        self.fail_through_waiters(volume, RequestError::Io);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_its_end_and_begins_anew_when_nothing_is_parked() {
        let mut parked = Parked::new(16);
        parked.insert(Lba(7), Tick(0));
        let pauses: Vec<u64> = (0..5)
            .map(|_| {
                parked.put_off(Tick(100), 10);
                parked.due.0 - 100
            })
            .collect();
        assert_eq!(pauses, [80, 160, 320, 640, 640]);
        parked.all_taken();
        assert_eq!(parked.due, Tick(740));
        parked.remove(Lba(0), Lba(8));
        parked.all_taken();
        assert_eq!(parked.due, Tick(0));
        parked.put_off(Tick(0), 10);
        assert_eq!(parked.due, Tick(80));
    }

    #[test]
    fn one_segment_takes_all_of_them() {
        let mut parked = Parked::new(16);
        (0..14).rev().for_each(|lba| parked.insert(Lba(2 * lba), Tick(0)));
        assert!(!parked.has_room(Lba(1)) && parked.has_room(Lba(2)));
        parked.insert(Lba(2), Tick(0));
        assert_eq!((parked.len(), parked.first()), (14, Some(Lba(0))));
        assert!(parked.overlaps(Lba(25), Lba(27)) && !parked.overlaps(Lba(27), Lba(90)));
        parked.remove(Lba(4), Lba(9));
        assert_eq!(parked.len(), 11);
        assert!(!parked.contains(Lba(8)) && parked.contains(Lba(10)));
    }
}
