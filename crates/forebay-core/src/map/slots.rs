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
}

/// Bytes of a slot's row.
pub const ROW_BYTES: usize = 9;

impl Slots {
    /// A table for `count` slots, all void.
    pub fn new(count: u64) -> Slots {
        let void = [255, 255, 255, 255, 255, 0, 0, 0, 0];
        Slots { rows: alloc::vec![void; count as usize] }
    }

    /// Bytes of memory a table for `count` slots takes.
    pub fn memory_bytes(count: u64) -> u64 {
        count * ROW_BYTES as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.rows)
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
        let raw = u64::from(heading.blocks) | u64::from(heading.entries) << 16;
        self.put(slot, raw, heading.sequence_offset);
    }

    /// What a record's header says.
    #[inline]
    pub fn heading(&self, slot: Slot) -> Heading {
        let (raw, sequence_offset) = self.raw(slot);
        Heading { blocks: raw as u16, entries: (raw >> 16) as u16, sequence_offset }
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

    /// Puts a slot's bytes back, from a checkpoint.
    pub fn set_row(&mut self, slot: Slot, row: &[u8]) {
        self.rows[slot.0 as usize].copy_from_slice(row);
    }

    #[inline]
    fn put(&mut self, slot: Slot, raw: u64, crc: u32) {
        let row = &mut self.rows[slot.0 as usize];
        row[..5].copy_from_slice(&raw.to_le_bytes()[..5]);
        row[5..].copy_from_slice(&crc.to_le_bytes());
    }

    #[inline]
    fn raw(&self, slot: Slot) -> (u64, u32) {
        let row = &self.rows[slot.0 as usize];
        let mut wide = [0; 8];
        wide[..5].copy_from_slice(&row[..5]);
        (u64::from_le_bytes(wide), u32::from_le_bytes([row[5], row[6], row[7], row[8]]))
    }
}
