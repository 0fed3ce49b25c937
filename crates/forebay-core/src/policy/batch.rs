// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A batch: a range of the log made into ascending runs for the backing device.
//!
//! It is built from the record headers' content (`map::slots`), never from the index: for each
//! block the newest version inside the range, even if a newer one exists behind it. So what the
//! backing device holds after a batch is a state the guest went through.
//!
//! # Invariants
//!
//! - **B1** Runs do not overlap and ascend.
//! - **B2** A block's newest version inside the range is in exactly one run; others in none.

use crate::format::entry::Kind;
use crate::limits::{RECORD_ENTRIES_MAX, VOLUME_BLOCKS_MAX};
use crate::map::extent::{Extent, ExtentMap, Position};
use crate::memory::vec_bytes;
use crate::policy::radix;
use crate::units::{Lba, Slot};
use alloc::vec::Vec;

/// Longest run of data, in blocks: 1 MiB.
pub const RUN_BLOCKS_MAX: usize = 256;

/// Low bits of a key: which block of the batch it is, in log order. The high ones are its LBA, so that keys sort
/// by block and, of one block, by age.
const NUMBER_BITS: u32 = 25;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;
const _: () = assert!(VOLUME_BLOCKS_MAX <= 1 << (64 - NUMBER_BITS));

/// What becomes of a block of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Written,
    /// It is not what was written: nothing is.
    Lost,
    /// The backing device does not take it (`parked`).
    Refused,
    /// A write around the log passes it (A6 of `around`): nothing is.
    Passed,
}

/// A stretch of adjacent blocks that are written alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Data, zero or discard.
    pub kind: Kind,
    /// First block.
    pub lba: Lba,
    /// Blocks.
    pub blocks: u64,
    /// For data: index of its first item.
    pub item: usize,
}

/// The blocks and extents of a range of the log, and how far they have been given out.
#[derive(Debug)]
pub struct Batch {
    /// Its dirty blocks: in log order, once sealed those that are written, ascending.
    keys: Vec<u64>,
    /// What becomes of each, once sealed.
    fates: Vec<Fate>,
    /// Where each is, in log order.
    slots: Vec<Slot>,
    item_count_max: usize,
    extents: ExtentMap,
    next_item: usize,
    given: Lba,
    has_lost: bool,
    next_lost: usize,
    /// Every block of it goes to the backing device, as far as is known.
    is_whole: bool,
}

impl Batch {
    /// An empty batch with room for so many blocks and extents.
    pub fn new(item_count_max: usize, extent_count_max: usize) -> Batch {
        assert!(item_count_max <= 1 << NUMBER_BITS);
        Batch {
            keys: Vec::with_capacity(item_count_max),
            fates: Vec::with_capacity(item_count_max),
            slots: Vec::with_capacity(item_count_max),
            item_count_max,
            extents: ExtentMap::new(extent_room(extent_count_max)),
            next_item: 0,
            given: Lba(0),
            has_lost: false,
            next_lost: 0,
            is_whole: true,
        }
    }

    /// Bytes of memory of a batch with this room.
    pub fn memory_bytes(item_count_max: usize, extent_count_max: usize) -> u64 {
        (item_count_max * (size_of::<u64>() + size_of::<Fate>() + size_of::<Slot>())) as u64
            + ExtentMap::memory_bytes(extent_room(extent_count_max))
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        let items = vec_bytes(&self.keys) + vec_bytes(&self.fates) + vec_bytes(&self.slots);
        items + self.extents.held_bytes()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.fates.clear();
        self.slots.clear();
        self.extents.clear();
        (self.next_item, self.given) = (0, Lba(0));
        (self.has_lost, self.next_lost, self.is_whole) = (false, 0, true);
    }

    /// Whether the blocks and extents of one more record are sure to fit.
    pub fn has_room(&self, items: usize) -> bool {
        self.keys.len() + items <= self.item_count_max
    }

    /// Whether so many more extents are sure to fit.
    pub fn has_extent_room(&self, count: usize) -> bool {
        self.extents.has_room_for(count)
    }

    /// Blocks in it.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.extents.is_empty()
    }

    /// Adds a block; blocks come in log order.
    #[inline]
    pub fn push(&mut self, lba: Lba, slot: Slot) {
        self.keys.push(lba.0 << NUMBER_BITS | self.slots.len() as u64);
        self.slots.push(slot);
    }

    /// Adds an extent; extents come in log order. What is older than one that went around the log is
    /// not written.
    pub fn push_extent(&mut self, extent: Extent) {
        self.extents.make_room();
        self.extents.insert(extent);
    }

    /// The blocks from the first to the last of it; none: there is nothing to write.
    pub fn bounds(&self) -> Option<(Lba, Lba)> {
        let items = self.keys.first().zip(self.keys.last());
        let extents = self.extents.iter().next().zip(self.extents.iter().last());
        let items = items.map(|(first, last)| (lba_of(*first), lba_of(*last) + 1));
        let extents = extents.map(|(first, last)| (first.start, last.end));
        [items, extents]
            .into_iter()
            .flatten()
            .reduce(|(start, end), (other, other_end)| (start.min(other), end.max(other_end)))
    }

    /// Whether it holds any of `start..end`.
    pub fn overlaps(&self, start: Lba, end: Lba) -> bool {
        let at = self.keys.partition_point(|key| lba_of(*key) < start);
        self.keys.get(at).is_some_and(|key| lba_of(*key) < end)
            || self.extents.overlapping(start, end).next().is_some()
    }

    /// Whether a write around the log may pass what it holds of `start..end`: blocks that are written, or would be.
    pub fn may_pass(&self, start: Lba, end: Lba) -> bool {
        let passes = |item: usize| matches!(self.fates[item], Fate::Written | Fate::Passed);
        self.items(start, end).all(passes) && self.extents.overlapping(start, end).next().is_none()
    }

    /// Nothing that it holds of `start..end` is written from now on.
    pub fn pass(&mut self, start: Lba, end: Lba) {
        for item in self.items(start, end) {
            self.fates[item] = Fate::Passed;
            self.is_whole = false;
        }
    }

    /// Its blocks in `start..end`.
    fn items(&self, start: Lba, end: Lba) -> core::ops::Range<usize> {
        let first = self.keys.partition_point(|key| lba_of(*key) < start);
        let count = self.keys[first..].partition_point(|key| lba_of(*key) < end);
        first..first + count
    }

    /// Sorts, and leaves of each block the newest version; `position` says where in the log a slot is. `keep_oldest`
    /// is a deliberate fault. `room` has room for as many blocks as this.
    pub fn seal(
        &mut self,
        room: &mut Vec<u64>,
        keep_oldest: bool,
        position: impl Fn(Slot) -> Position,
    ) {
        radix::sort(&mut self.keys, room, NUMBER_BITS);
        self.keys.dedup_by(|next, kept| {
            let is_same = lba_of(*next) == lba_of(*kept);
            if is_same && !keep_oldest {
                *kept = *next;
            }
            is_same
        });
        let Batch { keys, slots, extents, .. } = self;
        if !extents.is_empty() {
            keys.retain(|key| match extents.get(lba_of(*key)) {
                Some(extent) => position(slots[number_of(*key)]) >= extent.position,
                None => true,
            });
            extents.remove_where(|extent| extent.kind == Kind::Bypassed);
        }
        self.fates.resize(self.keys.len(), Fate::Written);
    }

    /// The next stretch, ascending (B1), of data at most `limit` blocks; none: all was given out.
    pub fn next_stretch(&mut self, limit: usize) -> Option<Stretch> {
        let item = self.keys.get(self.next_item).map(|key| lba_of(*key));
        if self.extents.is_empty() {
            return item.map(|lba| self.data_stretch(lba, limit.min(RUN_BLOCKS_MAX)));
        }
        let range = self.extents.overlapping(self.given, Lba(u64::MAX)).next().copied();
        let start = range.map(|range| range.start.max(self.given));
        match (item, range, start) {
            (Some(lba), _, start) if start.is_none_or(|start| lba <= start) => {
                Some(self.data_stretch(lba, limit.min(RUN_BLOCKS_MAX)))
            }
            (item, Some(range), Some(start)) => {
                // Data inside the extent that is left over is newer than it.
                let end = item.map_or(range.end, |lba| lba.min(range.end));
                self.given = end;
                Some(Stretch { kind: range.kind, lba: start, blocks: end - start, item: 0 })
            }
            _ => None,
        }
    }

    fn data_stretch(&mut self, lba: Lba, limit: usize) -> Stretch {
        let first = self.next_item;
        let mut blocks = 1;
        while blocks < limit
            && self.keys.get(first + blocks).is_some_and(|key| lba_of(*key) - lba == blocks as u64)
        {
            blocks += 1;
        }
        self.next_item += blocks;
        self.given = lba + blocks as u64;
        Stretch { kind: Kind::Data, lba, blocks: blocks as u64, item: first }
    }

    /// Where it is noted where a block of a stretch is, for [`crate::payload::Payload::prefetch`]: in log order, so
    /// anywhere.
    #[inline]
    pub fn place(&self, item: usize) -> &Slot {
        &self.slots[number_of(self.keys[item])]
    }

    /// Where a block is that comes after others, if there are so many.
    #[inline]
    pub fn later(&self, item: usize) -> Option<Slot> {
        self.keys.get(item).map(|key| self.slots[number_of(*key)])
    }

    /// Where a block of a stretch is; none: it is lost.
    #[inline]
    pub fn slot(&self, item: usize) -> Option<Slot> {
        (self.fates[item] != Fate::Lost).then(|| self.slots[number_of(self.keys[item])])
    }

    /// A block turned out to be lost: nothing is written for it. Of one that was passed nobody needs it.
    pub fn lose(&mut self, item: usize) {
        if self.fates[item] == Fate::Passed {
            return;
        }
        self.fates[item] = Fate::Lost;
        (self.has_lost, self.is_whole) = (true, false);
    }

    /// The backing device does not take a block, or is not asked to. One that was passed is not parked.
    pub fn refuse(&mut self, item: usize) {
        if self.fates[item] == Fate::Passed {
            return;
        }
        self.fates[item] = Fate::Refused;
        self.is_whole = false;
    }

    /// Whether it does not.
    pub fn is_refused(&self, item: usize) -> bool {
        self.fates[item] == Fate::Refused
    }

    /// Whether all of them do, as far as is known.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether a block goes to the backing device.
    #[inline]
    pub fn is_written(&self, item: usize) -> bool {
        self.fates[item] == Fate::Written
    }

    /// Whether blocks of it are lost.
    pub fn has_lost(&self) -> bool {
        self.has_lost
    }

    /// The first lost block from one on, and its place.
    pub fn lost_from(&self, item: usize) -> Option<(usize, Slot)> {
        let lost = self.fates.iter().skip(item).position(|fate| *fate == Fate::Lost);
        lost.map(|at| (item + at, self.slots[number_of(self.keys[item + at])]))
    }

    /// Which block it is.
    pub fn lba(&self, item: usize) -> Lba {
        lba_of(self.keys[item])
    }

    /// A lost block is not: it was read after all, and written.
    pub fn mend(&mut self, item: usize) {
        self.fates[item] = Fate::Written;
    }

    /// A lost block that is not named yet, and its place.
    pub fn next_lost(&mut self) -> Option<(Lba, Slot)> {
        while let Some(fate) = self.fates.get(self.next_lost).filter(|_| self.has_lost) {
            if *fate == Fate::Lost {
                let key = self.keys[self.next_lost];
                return Some((lba_of(key), self.slots[number_of(key)]));
            }
            self.next_lost += 1;
        }
        None
    }

    /// The lost block is named.
    pub fn named(&mut self) {
        self.next_lost += 1;
    }
}

#[inline]
fn lba_of(key: u64) -> Lba {
    Lba(key >> NUMBER_BITS)
}

#[inline]
fn number_of(key: u64) -> usize {
    (key & NUMBER_MASK) as usize
}

/// Extents that so many of a log make at most, and those of one record whatever the limit was when
/// it was made.
fn extent_room(extent_count_max: usize) -> usize {
    2 * extent_count_max.max(RECORD_ENTRIES_MAX) + 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Ordinal;

    #[test]
    fn stretches_ascend_and_carry_the_newest_version_of_each_block() {
        let mut seed = 5u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        let position = |step| Position::new(Ordinal(step + 1), 0);
        for round in 0..300 {
            let mut batch = Batch::new(4096, 300);
            let mut model = alloc::vec![None; 400];
            for step in 0..random(400) {
                if random(4) > 0 {
                    let lba = random(390);
                    batch.push(Lba(lba), Slot(step as u32));
                    model[lba as usize] = Some((Kind::Data, step));
                } else {
                    let (start, count) = (random(390), 1 + random(9));
                    let kind = [Kind::Zero, Kind::Discard, Kind::Bypassed][random(3) as usize];
                    let end = Lba(start + count);
                    let (long, position) = (false, position(step));
                    batch.push_extent(Extent { start: Lba(start), end, position, kind, long });
                    let what = (kind != Kind::Bypassed).then_some((kind, 0));
                    model[start as usize..(start + count) as usize].fill(what);
                }
            }
            batch.seal(&mut Vec::new(), false, |slot| position(slot.0.into()));
            let mut found = alloc::vec![None; 400];
            let mut last = Lba(0);
            while let Some(stretch) = batch.next_stretch(7) {
                assert!(stretch.lba >= last && stretch.blocks > 0, "round {round}");
                for offset in 0..stretch.blocks {
                    let what = match stretch.kind {
                        Kind::Data => {
                            let slot = batch.slot(stretch.item + offset as usize).expect("there");
                            (Kind::Data, u64::from(slot.0))
                        }
                        kind => (kind, 0),
                    };
                    found[(stretch.lba.0 + offset) as usize] = Some(what);
                }
                last = stretch.lba + stretch.blocks;
            }
            assert_eq!(found, model, "round {round}");
            let held = |at: usize| model[at].is_some().then_some(at as u64);
            let bounds = (0..400).filter_map(held).min().zip((0..400).filter_map(held).max());
            assert_eq!(batch.bounds(), bounds.map(|(first, last)| (Lba(first), Lba(last + 1))));
            let start = random(390);
            let overlaps = (start..start + 9).any(|at| model[at as usize].is_some());
            assert_eq!(batch.overlaps(Lba(start), Lba(start + 9)), overlaps, "round {round}");
        }
    }
}
