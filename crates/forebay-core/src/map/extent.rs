// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ranges of a volume without data in the log: zeros, discards, and what was lost.
//!
//! Extents do not overlap: a newer one cuts or replaces older ones. Whether a block's data or the
//! extent over it is newer is told by their [`Position`]s in the log; nothing needs to be cut when
//! data is written over an extent, because older always dies first.

use crate::format::entry::Kind;
use crate::units::{Lba, Ordinal};
use alloc::vec::Vec;

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

/// Room that only lost blocks may take: a batch that finds a bad block must be able to name it, or
/// it would never end, nor the extents that it should write.
pub const LOST_ROOM: usize = 64;

/// Extents by LBA, at most as many as it was made for.
#[derive(Debug)]
pub struct ExtentMap {
    extents: Vec<Extent>,
    count_max: usize,
}

impl ExtentMap {
    /// An empty map with room for `count_max` extents, and for lost blocks beside them.
    pub fn with_lost_room(count_max: usize) -> ExtentMap {
        ExtentMap::new(count_max + LOST_ROOM)
    }

    /// Whether one more is sure to fit and leaves the room for lost blocks.
    pub fn has_guest_room(&self) -> bool {
        self.extents.len() + 2 + LOST_ROOM <= self.count_max
    }

    /// An empty map with room for `count_max` extents.
    pub fn new(count_max: usize) -> ExtentMap {
        ExtentMap { extents: Vec::with_capacity(count_max), count_max }
    }

    /// Bytes of memory of a map with this room.
    pub fn memory_bytes(count_max: usize) -> u64 {
        (count_max * size_of::<Extent>()) as u64
    }

    /// Extents there are.
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Whether one more extent is sure to fit: it may split another in two.
    pub fn has_room(&self) -> bool {
        self.extents.len() + 2 <= self.count_max
    }

    /// The extent over a block.
    pub fn get(&self, lba: Lba) -> Option<&Extent> {
        let at = self.first_ending_after(lba);
        self.extents.get(at).filter(|extent| extent.start <= lba)
    }

    /// The extents that touch `start..end`, in order.
    pub fn overlapping(&self, start: Lba, end: Lba) -> impl Iterator<Item = &Extent> {
        self.extents[self.first_ending_after(start)..]
            .iter()
            .take_while(move |extent| extent.start < end)
    }

    /// All extents, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.extents.iter()
    }

    /// Puts an extent over whatever was there.
    pub fn insert(&mut self, new: Extent) {
        assert!(new.start < new.end);
        assert!(self.has_room(), "the caller looked for room");
        let mut from = self.first_ending_after(new.start);
        let mut to = from;
        while to < self.extents.len() && self.extents[to].start < new.end {
            to += 1;
        }
        let mut new = new;
        let mut left = None;
        let mut right = None;
        if from < to {
            let (first, last) = (self.extents[from], self.extents[to - 1]);
            left = (first.start < new.start).then_some(Extent { end: new.start, ..first });
            right = (last.end > new.end).then_some(Extent { start: new.end, ..last });
        }
        // Neighbours placed with no data in between are one.
        if left.is_none() && from > 0 {
            left = Some(self.extents[from - 1]).filter(|left| joins(left, &new));
            from -= usize::from(left.is_some());
        }
        if right.is_none() && to < self.extents.len() {
            right = Some(self.extents[to]).filter(|right| joins(&new, right));
            to += usize::from(right.is_some());
        }
        if let Some(joined) = left.filter(|left| joins(left, &new)) {
            new.start = joined.start;
            left = None;
        }
        if let Some(joined) = right.filter(|right| joins(&new, right)) {
            new.end = joined.end;
            right = None;
        }
        self.replace(from, to, [left, Some(new), right]);
    }

    /// Makes sure that one more extent fits, even past the limit (at recovery).
    pub fn make_room(&mut self) {
        self.count_max = self.count_max.max(self.extents.len() + 2);
    }

    /// Takes a range out of whatever extents are over it.
    pub fn erase(&mut self, start: Lba, end: Lba) {
        let kind = Kind::Void;
        let position = Position::default();
        self.insert(Extent { start, end, position, kind, long: false });
        self.remove_where(|extent| extent.kind == Kind::Void);
    }

    /// Takes one block out of the extent over it.
    pub fn cut(&mut self, lba: Lba) {
        let at = self.first_ending_after(lba);
        let Some(extent) = self.extents.get(at).copied().filter(|extent| extent.start <= lba)
        else {
            return;
        };
        let left = Extent { end: lba, ..extent };
        let right = Extent { start: lba + 1, ..extent };
        let whole = |piece: Extent| (piece.start < piece.end).then_some(piece);
        self.replace(at, at + 1, [whole(left), whole(right), None]);
    }

    /// Puts pieces in the place of `from..to`. `Vec::splice` would take memory for that.
    fn replace(&mut self, from: usize, to: usize, pieces: [Option<Extent>; 3]) {
        let (length, new) = (self.extents.len(), pieces.iter().flatten().count());
        let end = from + new;
        if end > to {
            let filler = self.extents.first().copied().or(pieces[1]).or(pieces[0]);
            self.extents.resize(length + end - to, filler.expect("there are pieces"));
            self.extents.copy_within(to..length, end);
        } else {
            self.extents.copy_within(to.., end);
            self.extents.truncate(length - (to - end));
        }
        for (place, piece) in self.extents[from..end].iter_mut().zip(pieces.iter().flatten()) {
            *place = *piece;
        }
    }

    /// Drops every extent that `drop` says, keeping the order.
    pub fn remove_where(&mut self, mut drop: impl FnMut(&Extent) -> bool) {
        self.extents.retain(|extent| !drop(extent));
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.extents.clear();
    }

    fn first_ending_after(&self, lba: Lba) -> usize {
        self.extents.partition_point(|extent| extent.end <= lba)
    }
}

fn joins(left: &Extent, right: &Extent) -> bool {
    left.end == right.start
        && left.kind == right.kind
        && left.position == right.position
        && left.long == right.long
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_a_vector_of_blocks_under_random_inserts() {
        let mut map = ExtentMap::new(512);
        let mut model: Vec<Option<(Position, Kind)>> = alloc::vec![None; 200];
        let mut seed = 99u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for step in 0..20_000u64 {
            let start = random(190);
            let end = start + 1 + random(10);
            let position = Position::new(Ordinal(step / 3), 0);
            let kind = if random(2) == 0 { Kind::Zero } else { Kind::Discard };
            let long = false;
            map.insert(Extent { start: Lba(start), end: Lba(end), position, kind, long });
            model[start as usize..end as usize].fill(Some((position, kind)));
            for (lba, expected) in model.iter().enumerate() {
                let found = map.get(Lba(lba as u64)).map(|extent| (extent.position, extent.kind));
                assert_eq!(found, *expected, "step {step}, block {lba}");
            }
            if step % 1000 == 999 {
                let old = Ordinal(step / 3 - 20);
                map.remove_where(|extent| extent.position.ordinal() < old);
                for cell in &mut model {
                    *cell = cell.filter(|cell| cell.0.ordinal() >= old);
                }
            }
        }
    }
}
