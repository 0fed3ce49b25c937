// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Little-endian numbers at fixed places, checksums, and what can be wrong with a structure.

use crate::units::BLOCK_BYTES;

/// One row of a structure's table in `docs/format.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes from the structure's start.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// Its name, as `forebay inspect` prints it.
    pub name: &'static str,
    /// What it means.
    pub meaning: &'static str,
}

/// Why bytes read from a device are not what they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Too short to be one.
    #[error("{found} bytes are too few for this structure, {expected} are needed")]
    Short {
        /// Bytes needed.
        expected: usize,
        /// Bytes there.
        found: usize,
    },
    /// Something else is there.
    #[error("magic is {found:#018x}, expected {expected:#018x}: this is not forebay's")]
    Magic {
        /// What it should be.
        expected: u64,
        /// What it is.
        found: u64,
    },
    /// Another kind of structure.
    #[error("structure type is {found}, expected {expected}")]
    Type {
        /// What it should be.
        expected: u16,
        /// What it is.
        found: u16,
    },
    /// Written by another version.
    #[error("format version is {found}, this program knows {expected}")]
    Version {
        /// What this program knows.
        expected: u16,
        /// What it is.
        found: u16,
    },
    /// The bytes were changed after they were written, or written only in part.
    #[error("checksum is {found:#010x}, the bytes give {expected:#010x}")]
    Checksum {
        /// What the bytes give.
        expected: u32,
        /// What is written.
        found: u32,
    },
    /// It was meant for another place: a misdirected write, or a copy.
    #[error("it was written for byte {found}, but lies at byte {expected}")]
    Address {
        /// Where it lies.
        expected: u64,
        /// Where it should lie.
        found: u64,
    },
    /// It belongs to another cache.
    #[error("it belongs to another cache")]
    Uuid,
    /// A field holds what it cannot hold.
    #[error("field `{field}` holds {found}, which it cannot")]
    Value {
        /// Which.
        field: &'static str,
        /// What it holds.
        found: u64,
    },
    /// Bytes that must be zero are not: a newer program may have used them.
    #[error("reserved bytes at {offset} are not zero: a newer version may have written this")]
    Reserved {
        /// The first of them.
        offset: usize,
    },
    /// It needs a feature that this program lacks.
    #[error("it needs features this program lacks: {names} (bits {bits:#x})")]
    Incompatible {
        /// The unknown bits.
        bits: u64,
        /// Their names, as far as the superblock tells them.
        names: super::feature::Names,
    },
    /// The device would not read it.
    #[error("it cannot be read")]
    Unreadable,
}

/// What a keyed checksum is computed for: bytes that are right for one place and one life of it
/// are wrong everywhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u32);

impl Seed {
    /// The seed of what lies at `address` in the life of its segment numbered `segment_sequence`.
    pub const fn new(key: u64, address: u64, segment_sequence: u64) -> Seed {
        let mut x = key ^ (address / BLOCK_BYTES).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 32)).wrapping_add(segment_sequence.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        Seed((x ^ (x >> 32)) as u32)
    }

    /// The stored form of a checksum. (CRCs of equal lengths with different initial values differ
    /// by a constant, so this is as good as starting from the seed, and costs nothing.)
    pub const fn apply(self, crc: u32) -> u32 {
        crc ^ self.0
    }
}

/// CRC32C (Castagnoli).
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// The checksum of a block: CRC-64/NVME, its halves folded into 32 bits.
///
/// Not CRC32C: file systems seal their own blocks with CRC32C, and then every version of such a
/// block has the same CRC32C as a whole, so that a stale one would pass. See
/// `docs/decisions/0002-block-checksum.md`.
pub fn block_checksum(block: &[u8]) -> u32 {
    fold_crc(crc_fast::crc64_nvme(block))
}

/// A block's checksum, of its CRC-64/NVME.
#[inline]
pub const fn fold_crc(crc: u64) -> u32 {
    (crc ^ crc >> 32) as u32
}

pub(crate) fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(crate) fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(crate) fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// The first byte from `start` on that is not zero, as an error.
pub(crate) fn zeros(bytes: &[u8], start: usize, end: usize) -> Result<(), FormatError> {
    let bytes = &bytes[start..end];
    // Most of a header and of a superblock: many at a time.
    let (words, rest) = bytes.as_chunks::<16>();
    if words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|it| *it == 0) {
        return Ok(());
    }
    match bytes.iter().position(|byte| *byte != 0) {
        Some(at) => Err(FormatError::Reserved { offset: start + at }),
        None => Ok(()),
    }
}

/// The part every structure begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common {
    /// What the structure is.
    pub magic: u64,
    /// Which of forebay's structures.
    pub kind: u16,
    /// Its whole size in bytes.
    pub size: u32,
}

/// Bytes of [`Common`] with address, checksum, uuid and sequence.
pub const COMMON_SIZE: usize = 56;
pub(crate) const AT_ADDRESS: usize = 16;
pub(crate) const AT_CHECKSUM: usize = 24;
pub(crate) const AT_UUID: usize = 32;
pub(crate) const AT_SEQUENCE: usize = 48;

/// The rows that every structure's table begins with.
pub const COMMON_FIELDS: [Field; 9] = [
    Field { offset: 0, size: 8, name: "magic", meaning: "which structure of which program" },
    Field { offset: 8, size: 2, name: "type", meaning: "1 superblock, 2 record, 3 checkpoint" },
    Field { offset: 10, size: 2, name: "version", meaning: "1" },
    Field { offset: 12, size: 4, name: "size", meaning: "bytes of the whole structure" },
    Field { offset: 16, size: 8, name: "address", meaning: "where it lies, in bytes" },
    Field { offset: 24, size: 4, name: "checksum", meaning: "over the whole, itself as zero" },
    Field { offset: 28, size: 4, name: "flags", meaning: "zero" },
    Field { offset: 32, size: 16, name: "uuid", meaning: "of the cache" },
    Field { offset: 48, size: 8, name: "sequence", meaning: "rises from one to the next" },
];

impl Common {
    pub(crate) fn encode(&self, bytes: &mut [u8], address: u64, uuid: [u8; 16], sequence: u64) {
        put(bytes, 0, &self.magic.to_le_bytes());
        put(bytes, 8, &self.kind.to_le_bytes());
        put(bytes, 10, &super::VERSION.to_le_bytes());
        put(bytes, 12, &self.size.to_le_bytes());
        put(bytes, AT_ADDRESS, &address.to_le_bytes());
        put(bytes, AT_UUID, &uuid);
        put(bytes, AT_SEQUENCE, &sequence.to_le_bytes());
    }

    /// Computes and stores the checksum: the last thing `encode` does.
    pub(crate) fn seal(&self, bytes: &mut [u8], seed: Seed) -> u32 {
        put(bytes, AT_CHECKSUM, &[0; 4]);
        let checksum = seed.apply(crc32c(&bytes[..self.size as usize]));
        put(bytes, AT_CHECKSUM, &checksum.to_le_bytes());
        checksum
    }

    /// Checks all that can be checked without knowing which cache it is.
    pub(crate) fn check(
        &self,
        bytes: &mut [u8],
        address: u64,
        seed: Seed,
    ) -> Result<(), FormatError> {
        let size = self.size as usize;
        if bytes.len() < size {
            return Err(FormatError::Short { expected: size, found: bytes.len() });
        }
        let magic = get_u64(bytes, 0);
        if magic != self.magic {
            return Err(FormatError::Magic { expected: self.magic, found: magic });
        }
        // The version comes before the checksum: a later version may compute it otherwise.
        let version = get_u16(bytes, 10);
        if version != super::VERSION {
            return Err(FormatError::Version { expected: super::VERSION, found: version });
        }
        let found = get_u32(bytes, AT_CHECKSUM);
        put(bytes, AT_CHECKSUM, &[0; 4]);
        let expected = seed.apply(crc32c(&bytes[..size]));
        put(bytes, AT_CHECKSUM, &found.to_le_bytes());
        if found != expected {
            return Err(FormatError::Checksum { expected, found });
        }
        let kind = get_u16(bytes, 8);
        if kind != self.kind {
            return Err(FormatError::Type { expected: self.kind, found: kind });
        }
        if get_u32(bytes, 12) != self.size {
            return Err(FormatError::Value { field: "size", found: get_u32(bytes, 12).into() });
        }
        if get_u64(bytes, AT_ADDRESS) != address {
            return Err(FormatError::Address {
                expected: address,
                found: get_u64(bytes, AT_ADDRESS),
            });
        }
        zeros(bytes, 28, 32)
    }
}
