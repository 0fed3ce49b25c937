// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of a volume without data in the log: zeros, discards, and what was lost.
//!
//! Extents do not overlap: a newer one cuts or replaces older ones. Whether a block's data or the
//! extent over it is newer is told by their [`Position`]s in the log; nothing needs to be cut when
//! data is written over an extent, because older always dies first.
//!
//! # Invariants
//!
//! E1 to E4 are those of the list they are kept in (`chunks`).
//!
//! - **E5** Neighbours that touch and are alike in all else are one extent.
//! - **E6** There are never more than the map was made for: who inserts asks for room first. One
//!   more extent takes two at most, since it may split another.

use super::chunks::Chunks;
use crate::format::entry::Kind;
use crate::limits::RECORD_ENTRIES_MAX;
use crate::units::{Lba, Ordinal};

/// A place in a log: data at a position not below an extent's was placed after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(u64);

impl Position {
    /// Block `block` of the segment with this ordinal.
    pub const fn new(ordinal: Ordinal, block: u16) -> Position {
        Position(ordinal.0 << 16 | block as u64)
    }

    /// As it is stored.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// From what was stored.
    pub const fn from_raw(raw: u64) -> Position {
        Position(raw)
    }

    /// The segment's ordinal.
    pub const fn ordinal(self) -> Ordinal {
        Ordinal(self.0 >> 16)
    }
}

/// A range of blocks, when it was placed, and how it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block.
    pub start: Lba,
    /// Block after the last.
    pub end: Lba,
    /// Where it was placed.
    pub position: Position,
    /// Zero, discard, bypassed or lost.
    pub kind: Kind,
    /// It is, or was a part of, one so long that older data stays in the index under it.
    pub long: bool,
}

impl Extent {
    /// What fills unused memory.
    pub(super) const VOID: Extent =
        Extent { start: Lba(0), end: Lba(0), position: Position(0), kind: Kind::Void, long: false };
}

/// Room that only lost blocks may take, beside so many extents: a batch that finds a bad block must
/// be able to name it, or it would never end, nor the extents that it should write. By default eight
/// mebibytes may rot, each block by itself, while guests fill the rest; at the least, four records.
pub fn lost_room(count_max: usize) -> usize {
    (count_max / 8).max(4 * RECORD_ENTRIES_MAX)
}

/// Extents by LBA, at most as many as it was made for.
#[derive(Debug)]
pub struct ExtentMap {
    list: Chunks,
    count_max: usize,
    /// Of them, those that only lost blocks may take.
    lost_room: usize,
    changes: u64,
}

impl ExtentMap {
    /// An empty map with room for `count_max` extents, and for lost blocks beside them.
    pub fn with_lost_room(count_max: usize) -> ExtentMap {
        let lost_room = lost_room(count_max);
        ExtentMap { lost_room, ..ExtentMap::new(count_max + lost_room) }
    }

    /// An empty map with room for `count_max` extents.
    pub fn new(count_max: usize) -> ExtentMap {
        ExtentMap { list: Chunks::new(count_max), count_max, lost_room: 0, changes: 0 }
    }

    /// Bytes of memory of a map with this room.
    pub fn memory_bytes(count_max: usize) -> u64 {
        Chunks::memory_bytes(count_max)
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.list.held_bytes()
    }

    /// Extents there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.len() == 0
    }

    /// As long as it is the same, no extent has come, gone or changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Extents there are of lost blocks.
    pub fn lost_len(&self) -> usize {
        self.list.lost()
    }

    /// Blocks that are lost.
    pub fn lost_blocks(&self) -> u64 {
        if self.lost_len() == 0 {
            return 0;
        }
        let lost = self.iter().filter(|extent| extent.kind == Kind::Lost);
        lost.map(|extent| extent.end - extent.start).sum()
    }

    /// Whether one more extent is sure to fit: it may split another in two.
    pub fn has_room(&self) -> bool {
        self.has_room_for(1)
    }

    /// Whether so many more are sure to fit.
    pub fn has_room_for(&self, count: usize) -> bool {
        self.list.len() + 2 * count <= self.count_max
    }

    /// Extents that there is room for; one more may take two.
    pub fn room(&self) -> usize {
        self.count_max - self.list.len()
    }

    /// Whether one over exactly this range would fit.
    pub fn has_room_over(&self, start: Lba, end: Lba) -> bool {
        let mut whole = 0;
        let mut parts = 0;
        // Two of them make the room that one takes at most.
        for extent in self.overlapping(start, end).take(4) {
            let sides = usize::from(extent.start < start) + usize::from(extent.end > end);
            whole += usize::from(sides == 0);
            parts += sides.saturating_sub(1);
        }
        self.list.len() + parts < self.count_max + whole
    }

    /// Whether there is none but of lost blocks, and no room for any other.
    pub fn is_all_lost(&self) -> bool {
        self.list.lost() == self.list.len() && !self.has_guest_room()
    }

    /// Whether one more is sure to fit and leaves the room for lost blocks.
    pub fn has_guest_room(&self) -> bool {
        self.list.len() + 2 + self.lost_room <= self.count_max
    }

    /// Makes sure that one more extent fits, even past the limit (at recovery).
    pub fn make_room(&mut self) {
        self.make_room_for(1);
    }

    /// The least that a map can be made for, so that it holds what this one does and guests' extents take
    /// no room of lost blocks: at least `count_max`.
    pub fn fitting(&self, count_max: usize) -> usize {
        let (all, guests) = (self.len(), self.len() - self.lost_len());
        let fits = |room: &usize| room + lost_room(*room) >= all;
        // Beside n extents there is room for an eighth of n, and for some hundreds at least.
        let least = (all / 9 * 8).min(all.saturating_sub(lost_room(0)));
        let room = (least..).find(fits).expect("there is room in what is as large itself");
        count_max.max(guests).max(room)
    }

    /// The same extents in a map made for so many: what recovery took beside that is given back.
    pub(crate) fn refit(self, count_max: usize) -> ExtentMap {
        let mut map = ExtentMap::with_lost_room(count_max);
        assert!(self.len() <= map.count_max, "as `fitting` says");
        self.iter().for_each(|extent| map.insert(*extent));
        map
    }

    /// Makes sure that so many more extents fit, even past the limit (at recovery).
    pub fn make_room_for(&mut self, count: usize) {
        self.count_max = self.count_max.max(self.list.len() + 2 * count);
        self.list.grow(self.count_max);
    }

    /// The extent over a block.
    pub fn get(&self, lba: Lba) -> Option<&Extent> {
        self.list.get(self.list.seek(lba)).filter(|extent| extent.start <= lba)
    }

    /// The extents that touch `start..end`, in order.
    pub fn overlapping(&self, start: Lba, end: Lba) -> impl Iterator<Item = &Extent> {
        let from = self.list.seek(start);
        self.list.iter_from(from).take_while(move |extent| extent.start < end)
    }

    /// All extents, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.list.iter_from(self.list.seek(Lba(0)))
    }

    /// Puts an extent over whatever was there. Panics if there is no room for one more.
    pub fn insert(&mut self, new: Extent) {
        assert!(new.start < new.end);
        self.changes += 1;
        let mut at = self.list.seek(new.start);
        if self.list.get(at).is_some_and(|extent| extent.start < new.end) {
            self.erase(new.start, new.end);
            at = self.list.seek(new.start);
        }
        // Neighbours placed with no data in between are one.
        let right = self.list.get(at).copied().filter(|right| joins(&new, right));
        let before = self.list.before(at);
        let left = before.and_then(|before| self.list.get(before)).copied();
        match (before.zip(left).filter(|left| joins(&left.1, &new)), right) {
            (None, None) => {
                assert!(self.len() < self.count_max, "the caller looked for room");
                self.list.insert(at, new);
            }
            (None, Some(right)) => self.list.set_bounds(at, new.start, right.end),
            (Some((before, left)), None) => self.list.set_bounds(before, left.start, new.end),
            (Some((before, left)), Some(right)) => {
                self.list.set_bounds(before, left.start, right.end);
                self.list.remove(at, self.list.next(at));
            }
        }
    }

    /// Takes a range out of whatever extents are over it. Panics if that splits one in two and
    /// there is no room for one more.
    pub fn erase(&mut self, start: Lba, end: Lba) {
        let mut from = self.list.seek(start);
        let Some(first) = self.list.get(from).copied().filter(|first| first.start < end) else {
            return;
        };
        self.changes += 1;
        if first.start < start {
            self.list.set_bounds(from, first.start, start);
            from = self.list.next(from);
            if first.end > end {
                assert!(self.len() < self.count_max, "the caller looked for room");
                return self.list.insert(from, Extent { start: end, ..first });
            }
        }
        let to = self.list.seek(end);
        if let Some(last) = self.list.get(to).copied().filter(|last| last.start < end) {
            self.list.set_bounds(to, end, last.end);
        }
        self.list.remove(from, to);
    }

    /// Takes one block out of the extent over it, as [`ExtentMap::erase`] does.
    pub fn cut(&mut self, lba: Lba) {
        self.erase(lba, lba + 1);
    }

    /// Takes one block out, if there is room for what that leaves; says whether there was.
    pub fn try_cut(&mut self, lba: Lba) -> bool {
        let inside = |extent: &Extent| extent.start < lba && lba + 1 < extent.end;
        if self.len() == self.count_max && self.get(lba).is_some_and(inside) {
            return false;
        }
        self.cut(lba);
        true
    }

    /// Drops every extent that `drop` says, keeping the order.
    pub fn remove_where(&mut self, mut drop: impl FnMut(&Extent) -> bool) {
        let before = self.list.len();
        self.list.retain(|extent| !drop(extent));
        self.changes += u64::from(self.list.len() != before);
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.remove_where(|_| true);
    }

    /// Looks at every invariant.
    #[cfg(test)]
    fn check_invariants(&self) {
        self.list.check_invariants();
        assert!(self.len() <= self.count_max, "E6");
        let mut last: Option<&Extent> = None;
        for extent in self.iter() {
            assert!(!last.is_some_and(|last| joins(last, extent)), "E5: {last:?}, {extent:?}");
            last = Some(extent);
        }
    }
}

fn joins(left: &Extent, right: &Extent) -> bool {
    left.end == right.start
        && left.kind == right.kind
        && left.position == right.position
        && left.long == right.long
}

#[cfg(test)]
mod tests;
