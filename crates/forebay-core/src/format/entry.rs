// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entries: 20 bytes of metadata that say what a slot or an extent holds.

use super::bytes::{Field, FormatError, array, get_u16, get_u32};
use crate::limits::VOLUME_BLOCKS_MAX;
use crate::units::Lba;

/// Bytes of an entry.
pub const ENTRY_SIZE: usize = 20;

/// Rows of the table in `docs/format.md`.
pub const FIELDS: [Field; 8] = [
    Field { offset: 0, size: 6, name: "lba", meaning: "first block within the volume" },
    Field { offset: 6, size: 1, name: "kind", meaning: "see the kinds" },
    Field { offset: 7, size: 1, name: "sector_mask", meaning: "kinds with a slot: 255; others: 0" },
    Field {
        offset: 8,
        size: 4,
        name: "crc",
        meaning: "seeded checksum of the block; kinds without a slot: 0",
    },
    Field { offset: 12, size: 4, name: "count", meaning: "blocks; kinds with a slot: 1" },
    Field { offset: 16, size: 1, name: "codec", meaning: "0: stored as it is" },
    Field { offset: 17, size: 1, name: "stored_length", meaning: "0" },
    Field {
        offset: 18,
        size: 2,
        name: "slot",
        meaning: "block in the record; kinds without one: 0",
    },
];

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A slot that was not filled.
    Void = 0,
    /// A block the guest wrote.
    Data = 1,
    /// A copy of a block that is equal to the backing device's: a second chance, a read fill.
    Fill = 2,
    /// Blocks that read as zeros.
    Zero = 3,
    /// Blocks the guest gave up.
    Discard = 4,
    /// Blocks that a write reached on the backing device by another way: older entries are void.
    Bypassed = 5,
    /// Blocks whose newest contents were lost: reads answer an error until they are written.
    Lost = 6,
    /// A block the backing device refused: kept here, tried again.
    Parked = 7,
    /// A note for recovery, no block.
    Marker = 8,
}

impl Kind {
    /// All of them, with their names and what an entry of each says: a table of `docs/format.md`.
    pub const ALL: [(Kind, &'static str, &'static str); 9] = [
        (Kind::Void, "void", "a slot that was not filled"),
        (Kind::Data, "data", "a block the guest wrote"),
        (Kind::Fill, "fill", "a copy of what the backing device holds: never dirty"),
        (Kind::Zero, "zero", "blocks that read as zeros"),
        (Kind::Discard, "discard", "blocks the guest gave up: they read as zeros"),
        (Kind::Bypassed, "bypassed", "blocks to be read from the backing device: never dirty"),
        (Kind::Lost, "lost", "blocks whose newest contents were lost: reads fail"),
        (Kind::Parked, "parked", "a block the backing device refused: kept, tried again"),
        (Kind::Marker, "marker", "a note for recovery"),
    ];

    pub(crate) fn decode(byte: u8) -> Option<Kind> {
        // Millions of entries are read when a cache is opened.
        const KINDS: [Kind; Kind::ALL.len()] = {
            let mut kinds = [Kind::Void; Kind::ALL.len()];
            let mut at = 0;
            while at < kinds.len() {
                kinds[at] = Kind::ALL[at].0;
                assert!(kinds[at] as usize == at);
                at += 1;
            }
            kinds
        };
        KINDS.get(usize::from(byte)).copied()
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Kind::ALL[self as usize].1
    }

    /// Whether the backing device may lack what an entry of this kind says.
    pub const fn is_dirty(self) -> bool {
        matches!(self, Kind::Data | Kind::Parked | Kind::Zero | Kind::Discard)
    }

    /// Whether an entry of this kind has a slot.
    pub const fn has_slot(self) -> bool {
        matches!(self, Kind::Data | Kind::Fill | Kind::Parked | Kind::Void)
    }
}

/// One entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it says.
    pub kind: Kind,
    /// First block.
    pub lba: Lba,
    /// Blocks; one for kinds with a slot.
    pub count: u32,
    /// Seeded checksum of the block; zero for kinds without a slot.
    pub crc: u32,
    /// Block within the record (its header is block 0); zero for kinds without a slot.
    pub slot: u16,
}

impl Entry {
    /// The entry's bytes. Inlined, as whole words: who writes them somewhere must not have to wait until they
    /// are in memory, behind a block that is being copied there.
    #[inline]
    pub fn encode(&self) -> [u8; ENTRY_SIZE] {
        assert!(self.lba.0 + u64::from(self.count) <= VOLUME_BLOCKS_MAX, "entry past any volume");
        assert_eq!(self.kind.has_slot(), self.slot != 0, "a slot where there is none");
        assert!(self.kind.has_slot() || self.crc == 0, "a checksum of nothing");
        assert!(self.count == 1 || !self.kind.has_slot() && self.count > 0, "blocks it has not");
        let mask = if self.kind.has_slot() { 255 } else { 0 };
        let first = self.lba.0 | (self.kind as u64) << 48 | mask << 56;
        let second = u64::from(self.crc) | u64::from(self.count) << 32;
        let third = u32::from(self.slot) << 16;
        let mut bytes = [0; ENTRY_SIZE];
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..16].copy_from_slice(&second.to_le_bytes());
        bytes[16..].copy_from_slice(&third.to_le_bytes());
        bytes
    }

    /// What the bytes say.
    pub fn decode(bytes: &[u8; ENTRY_SIZE]) -> Result<Entry, FormatError> {
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        let Some(kind) = Kind::decode(bytes[6]) else {
            return value("kind", bytes[6].into());
        };
        let mut wide = [0; 8];
        wide[..6].copy_from_slice(&array::<6>(bytes, 0));
        let entry = Entry {
            kind,
            lba: Lba(u64::from_le_bytes(wide)),
            crc: get_u32(bytes, 8),
            count: get_u32(bytes, 12),
            slot: get_u16(bytes, 18),
        };
        if entry.lba.0 + u64::from(entry.count) > VOLUME_BLOCKS_MAX {
            return value("lba", entry.lba.0);
        }
        if !kind.has_slot() && entry.crc != 0 {
            return value("crc", entry.crc.into());
        }
        let mask = if kind.has_slot() { 255 } else { 0 };
        if bytes[7] != mask {
            return value("sector_mask", bytes[7].into());
        }
        if bytes[16] != 0 {
            return value("codec", bytes[16].into());
        }
        if bytes[17] != 0 {
            return value("stored_length", bytes[17].into());
        }
        if kind.has_slot() != (entry.slot != 0) {
            return value("slot", entry.slot.into());
        }
        if kind.has_slot() && entry.count != 1 || entry.count == 0 {
            return value("count", entry.count.into());
        }
        Ok(entry)
    }
}
