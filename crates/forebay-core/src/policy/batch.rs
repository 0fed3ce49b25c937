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
use crate::limits::RECORD_ENTRIES_MAX;
use crate::map::extent::{Extent, ExtentMap, Position};
use crate::memory::vec_bytes;
use crate::units::{Lba, Slot};
use alloc::vec::Vec;

/// Longest run of data, in blocks: 1 MiB.
pub const RUN_BLOCKS_MAX: usize = 256;

/// One dirty block of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    lba: Lba,
    position: Position,
    slot: Slot,
    fate: Fate,
}

/// What becomes of a block of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Written,
    /// It is not what was written: nothing is.
    Lost,
    /// The backing device does not take it (`parked`).
    Refused,
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
    items: Vec<Item>,
    item_count_max: usize,
    extents: ExtentMap,
    next_item: usize,
    given: Lba,
    has_lost: bool,
    next_lost: usize,
}

impl Batch {
    /// An empty batch with room for so many blocks and extents.
    pub fn new(item_count_max: usize, extent_count_max: usize) -> Batch {
        Batch {
            items: Vec::with_capacity(item_count_max),
            item_count_max,
            extents: ExtentMap::new(extent_room(extent_count_max)),
            next_item: 0,
            given: Lba(0),
            has_lost: false,
            next_lost: 0,
        }
    }

    /// Bytes of memory of a batch with this room.
    pub fn memory_bytes(item_count_max: usize, extent_count_max: usize) -> u64 {
        (item_count_max * size_of::<Item>()) as u64
            + ExtentMap::memory_bytes(extent_room(extent_count_max))
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.items) + self.extents.held_bytes()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.items.clear();
        self.extents.clear();
        (self.next_item, self.given) = (0, Lba(0));
        (self.has_lost, self.next_lost) = (false, 0);
    }

    /// Whether the blocks and extents of one more record are sure to fit.
    pub fn has_room(&self, items: usize) -> bool {
        self.items.len() + items <= self.item_count_max
    }

    /// Whether so many more extents are sure to fit.
    pub fn has_extent_room(&self, count: usize) -> bool {
        self.extents.has_room_for(count)
    }

    /// Blocks in it.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty() && self.extents.is_empty()
    }

    /// Adds a block; blocks come in log order.
    pub fn push(&mut self, lba: Lba, position: Position, slot: Slot) {
        self.items.push(Item { lba, position, slot, fate: Fate::Written });
    }

    /// Adds an extent; extents come in log order. What is older than one that went around the log is
    /// not written.
    pub fn push_extent(&mut self, extent: Extent) {
        self.extents.make_room();
        self.extents.insert(extent);
    }

    /// The blocks from the first to the last of it; none: there is nothing to write.
    pub fn bounds(&self) -> Option<(Lba, Lba)> {
        let items = self.items.first().zip(self.items.last());
        let extents = self.extents.iter().next().zip(self.extents.iter().last());
        let items = items.map(|(first, last)| (first.lba, last.lba + 1));
        let extents = extents.map(|(first, last)| (first.start, last.end));
        [items, extents]
            .into_iter()
            .flatten()
            .reduce(|(start, end), (other, other_end)| (start.min(other), end.max(other_end)))
    }

    /// Whether it holds any of `start..end`.
    pub fn overlaps(&self, start: Lba, end: Lba) -> bool {
        let at = self.items.partition_point(|item| item.lba < start);
        self.items.get(at).is_some_and(|item| item.lba < end)
            || self.extents.overlapping(start, end).next().is_some()
    }

    /// Sorts, and leaves of each block the newest version. `keep_oldest` is a deliberate fault.
    pub fn seal(&mut self, keep_oldest: bool) {
        // One number each: no two have the same place.
        let key = |item: &Item| u128::from(item.lba.0) << 64 | u128::from(item.position.raw());
        self.items.sort_unstable_by_key(key);
        let items = &mut self.items;
        let mut kept: usize = 0;
        for at in 0..items.len() {
            let item = items[at];
            if kept > 0 && items[kept - 1].lba == item.lba {
                if !keep_oldest {
                    items[kept - 1] = item;
                }
            } else {
                items[kept] = item;
                kept += 1;
            }
        }
        items.truncate(kept);
        let extents = &self.extents;
        if !extents.is_empty() {
            items.retain(|item| match extents.get(item.lba) {
                Some(extent) => item.position >= extent.position,
                None => true,
            });
            self.extents.remove_where(|extent| extent.kind == Kind::Bypassed);
        }
    }

    /// The next stretch, ascending (B1), of data at most `limit` blocks; none: all was given out.
    pub fn next_stretch(&mut self, limit: usize) -> Option<Stretch> {
        let item = self.items.get(self.next_item).copied();
        let range = self.extents.overlapping(self.given, Lba(u64::MAX)).next().copied();
        let start = range.map(|range| range.start.max(self.given));
        match (item, range, start) {
            (Some(item), _, start) if start.is_none_or(|start| item.lba <= start) => {
                Some(self.data_stretch(item.lba, limit.min(RUN_BLOCKS_MAX)))
            }
            (item, Some(range), Some(start)) => {
                // Data inside the extent that is left over is newer than it.
                let end = item.map_or(range.end, |item| item.lba.min(range.end));
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
            && self.items.get(first + blocks).is_some_and(|item| item.lba - lba == blocks as u64)
        {
            blocks += 1;
        }
        self.next_item += blocks;
        self.given = lba + blocks as u64;
        Stretch { kind: Kind::Data, lba, blocks: blocks as u64, item: first }
    }

    /// Where a block of a stretch is; none: it is lost.
    pub fn slot(&self, item: usize) -> Option<Slot> {
        let item = &self.items[item];
        (item.fate != Fate::Lost).then_some(item.slot)
    }

    /// A block turned out to be lost: nothing is written for it.
    pub fn lose(&mut self, item: usize) {
        self.items[item].fate = Fate::Lost;
        self.has_lost = true;
    }

    /// The backing device does not take a block, or is not asked to.
    pub fn refuse(&mut self, item: usize) {
        self.items[item].fate = Fate::Refused;
    }

    /// Whether it does not.
    pub fn is_refused(&self, item: usize) -> bool {
        self.items[item].fate == Fate::Refused
    }

    /// Whether a block goes to the backing device.
    pub fn is_written(&self, item: usize) -> bool {
        self.items[item].fate == Fate::Written
    }

    /// A lost block that is not named yet, and its place.
    pub fn next_lost(&mut self) -> Option<(Lba, Slot)> {
        while let Some(item) = self.items.get(self.next_lost).filter(|_| self.has_lost) {
            if item.fate == Fate::Lost {
                return Some((item.lba, item.slot));
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
        for round in 0..300 {
            let mut batch = Batch::new(4096, 300);
            let mut model = alloc::vec![None; 400];
            for step in 0..random(400) {
                let position = Position::new(Ordinal(step + 1), 0);
                if random(4) > 0 {
                    let lba = random(390);
                    batch.push(Lba(lba), position, Slot(step as u32));
                    model[lba as usize] = Some((Kind::Data, step));
                } else {
                    let (start, count) = (random(390), 1 + random(9));
                    let kind = [Kind::Zero, Kind::Discard, Kind::Bypassed][random(3) as usize];
                    let end = Lba(start + count);
                    let long = false;
                    batch.push_extent(Extent { start: Lba(start), end, position, kind, long });
                    let what = (kind != Kind::Bypassed).then_some((kind, 0));
                    model[start as usize..(start + count) as usize].fill(what);
                }
            }
            batch.seal(false);
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
