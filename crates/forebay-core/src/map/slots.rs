// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What each slot of the cache device holds: nine bytes in memory for each.
//!
//! This is the record headers' content kept in memory, superseded versions included, so that
//! write-back and reclaim follow the log and never the index. A header's own block is a slot too:
//! it says how its record goes on.

use crate::memory::vec_bytes;
use crate::units::{Lba, Slot};
use alloc::vec::Vec;

const LBA_BITS: u32 = 39;
const FILL: u64 = 1 << LBA_BITS;
const VOID: u64 = (1 << 40) - 1;
/// Of a heading.
const BEGINS_EPOCH: u64 = 1 << 32;
const _: () = assert!(crate::limits::VOLUME_BLOCKS_MAX == 1 << LBA_BITS);

/// What a slot that is not a header holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Which block.
    pub lba: Lba,
    /// Seeded checksum.
    pub crc: u32,
    /// A copy of what the backing device holds, not something a guest wrote.
    pub fill: bool,
}

/// What a header's slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heading {
    /// Blocks of the record, header included.
    pub blocks: u16,
    /// Entries of the record.
    pub entries: u16,
    /// Its sequence, less its segment's first.
    pub sequence_offset: u32,
    /// Between the record before it and its first entry the guest flushed.
    pub begins_epoch: bool,
}

impl Heading {
    /// Where the record behind it begins, if this one begins at `block`.
    pub fn end(&self, block: u16) -> u16 {
        block.saturating_add(self.blocks.max(1))
    }
}

/// The table.
#[derive(Debug)]
pub struct Slots {
    /// Five bytes of block, four of checksum, as a checkpoint holds them: whoever wants one wants
    /// the other, and a table this large is a cache miss.
    rows: Vec<[u8; ROW_BYTES]>,
    /// Which runs have changed since a checkpoint copied them last.
    changed: Vec<bool>,
    /// A slot's number without so many low bits is its run's.
    run_shift: u32,
}

/// Bytes of a slot's row.
pub const ROW_BYTES: usize = 9;
const VOID_ROW: [u8; ROW_BYTES] = [255, 255, 255, 255, 255, 0, 0, 0, 0];
/// Slots of a run, at most: what is copied to a checkpoint, or left out of it, together.
pub const RUN_SLOTS_MAX: u32 = 1 << 16;

/// Slots of each run of a table of `count` slots, the last one perhaps excepted: a power of two.
pub fn run_slots(count: u64) -> u32 {
    (count / 16).next_power_of_two().clamp(64, RUN_SLOTS_MAX.into()) as u32
}

fn run_count(count: u64) -> u64 {
    count.div_ceil(run_slots(count).into())
}

impl Slots {
    /// A table for `count` slots, all void.
    pub fn new(count: u64) -> Slots {
        Slots::of(alloc::vec![VOID_ROW; count as usize])
    }

    /// The same in memory that is there.
    pub(crate) fn void_over(mut rows: Vec<[u8; ROW_BYTES]>) -> Slots {
        rows.fill(VOID_ROW);
        Slots::of(rows)
    }

    /// The table that another process had; what has changed is yet to be noted.
    pub(crate) fn taken(count: u64, rows: Vec<[u8; ROW_BYTES]>) -> Option<Slots> {
        (rows.len() as u64 == count).then(|| Slots::of(rows))
    }

    /// All rows.
    pub(crate) fn all(&self) -> &[[u8; ROW_BYTES]] {
        &self.rows
    }

    /// Runs there are.
    pub(crate) fn run_count(&self) -> u32 {
        self.changed.len() as u32
    }

    /// A table with these rows: all there are, or to be put in place from a checkpoint ([`put_rows`]).
    pub(crate) fn of(rows: Vec<[u8; ROW_BYTES]>) -> Slots {
        let count = rows.len() as u64;
        let changed = alloc::vec![false; run_count(count) as usize];
        Slots { rows, changed, run_shift: run_slots(count).trailing_zeros() }
    }

    /// The same for a cache of another size, in memory that is there: what was in slots that are in both, and
    /// every run as changed.
    pub(crate) fn resized(&self, rows: Vec<[u8; ROW_BYTES]>) -> Slots {
        let mut next = Slots::void_over(rows);
        let both = next.rows.len().min(self.rows.len());
        next.rows[..both].copy_from_slice(&self.rows[..both]);
        next.changed.fill(true);
        next
    }

    /// Whether a run has changed since it was noted last: since it was made, or put in place from a
    /// checkpoint, if never.
    pub(crate) fn has_changed(&self, run: u32) -> bool {
        self.changed[run as usize]
    }

    /// Notes whether a run has changed: not, as of now; or that the copy of it does not count.
    pub(crate) fn note_changed(&mut self, run: u32, changed: bool) {
        self.changed[run as usize] = changed;
    }

    /// Runs that have changed.
    pub(crate) fn changed_count(&self) -> usize {
        self.changed.iter().filter(|changed| **changed).count()
    }

    /// All rows, to be put in place.
    pub(crate) fn rows_mut(&mut self) -> &mut [[u8; ROW_BYTES]] {
        &mut self.rows
    }

    /// Bytes of memory a table for `count` slots takes.
    pub fn memory_bytes(count: u64) -> u64 {
        count * ROW_BYTES as u64 + run_count(count)
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.rows) + vec_bytes(&self.changed)
    }

    /// Notes what a slot holds.
    #[inline]
    pub fn hold(&mut self, slot: Slot, held: Held) {
        let fill = if held.fill { FILL } else { 0 };
        self.put(slot, held.lba.0 | fill, held.crc);
    }

    /// Notes that a slot holds nothing.
    pub fn void(&mut self, slot: Slot) {
        let crc = self.raw(slot).1;
        self.put(slot, VOID, crc);
    }

    /// What a slot holds.
    #[inline]
    pub fn held(&self, slot: Slot) -> Option<Held> {
        let (raw, crc) = self.raw(slot);
        (raw != VOID).then_some(Held { lba: Lba(raw & (FILL - 1)), crc, fill: raw & FILL != 0 })
    }

    /// Notes that a slot is a record's header.
    pub fn head(&mut self, slot: Slot, heading: Heading) {
        let epoch = if heading.begins_epoch { BEGINS_EPOCH } else { 0 };
        let raw = u64::from(heading.blocks) | u64::from(heading.entries) << 16 | epoch;
        self.put(slot, raw, heading.sequence_offset);
    }

    /// What a record's header says.
    #[inline]
    pub fn heading(&self, slot: Slot) -> Heading {
        let (raw, sequence_offset) = self.raw(slot);
        let begins_epoch = raw & BEGINS_EPOCH != 0;
        Heading { blocks: raw as u16, entries: (raw >> 16) as u16, sequence_offset, begins_epoch }
    }

    /// The bytes of a slot.
    #[inline]
    pub fn row(&self, slot: Slot) -> &[u8; ROW_BYTES] {
        &self.rows[slot.0 as usize]
    }

    /// The bytes of some slots, for a checkpoint.
    pub fn rows(&self, slots: core::ops::Range<u32>) -> &[u8] {
        self.rows[slots.start as usize..slots.end as usize].as_flattened()
    }

    /// Of these slots, in a row, how many hold a block that a guest wrote.
    pub(crate) fn written(&self, slots: core::ops::Range<u32>) -> u64 {
        let rows = &self.rows[slots.start as usize..slots.end as usize];
        // The highest bit of a block says that it is a fill, or that there is none.
        rows.iter().map(|row| u64::from(row[4] >> 7 ^ 1)).sum()
    }

    #[inline]
    fn put(&mut self, slot: Slot, raw: u64, crc: u32) {
        let row = &mut self.rows[slot.0 as usize];
        row[..5].copy_from_slice(&raw.to_le_bytes()[..5]);
        row[5..].copy_from_slice(&crc.to_le_bytes());
        self.changed[(slot.0 >> self.run_shift) as usize] = true;
    }

    #[inline]
    fn raw(&self, slot: Slot) -> (u64, u32) {
        let row = &self.rows[slot.0 as usize];
        let mut wide = [0; 8];
        wide[..5].copy_from_slice(&row[..5]);
        (u64::from_le_bytes(wide), u32::from_le_bytes([row[5], row[6], row[7], row[8]]))
    }
}

/// Puts rows back in place, from the content of a checkpoint's page.
pub(crate) fn put_rows(rows: &mut [[u8; ROW_BYTES]], content: &[u8]) {
    let rows = rows.as_flattened_mut();
    rows.copy_from_slice(&content[..rows.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guests_wrote_is_told_from_fills_and_nothing() {
        let mut slots = Slots::new(6);
        for (slot, lba, fill) in [(1, 0, false), (2, FILL - 1, false), (3, 7, true), (5, 9, false)]
        {
            slots.hold(Slot(slot), Held { lba: Lba(lba), crc: u32::MAX, fill });
        }
        assert_eq!(slots.written(0..6), 3);
        assert_eq!(slots.written(3..5), 0);
        slots.void(Slot(1));
        assert_eq!(slots.written(0..2), 0);
        let mut other = Slots::of(alloc::vec![[0; ROW_BYTES]; 6]);
        put_rows(other.rows_mut(), slots.rows(0..6));
        assert_eq!(other.rows, slots.rows);
        assert_eq!(other.held(Slot(0)), None);
    }
}
