// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cache's size once more, in the last bytes of a superblock, with a checksum of its own.
//!
//! Where the device is larger than the cache, only the first copy says where the second is. Whatever hides the first
//! block of it (a sector that cannot be read, a bit of the size that has rotted) leaves the last one.
//!
//! # On disk
//!
//! `size_again` and its checksum in `docs/format.md`, section "Superblock". They take the last bytes of the last
//! volume's place, which no field of a volume has. Caches from before have zeros there.

use super::bytes::{FormatError, crc32c, get_u32, get_u64, put, zeros};
use super::superblock::{AT_SIZE_BYTES, SUPERBLOCK_SIZE, VOLUME_RESERVED, VOLUME_SIZE};
use crate::mutant::{Mutant, Mutants};

/// Bytes it takes, at the end.
pub const SIZE: usize = 16;
const AT: usize = SUPERBLOCK_SIZE - SIZE;
const AT_CHECKSUM: usize = AT + 8;
const END: usize = AT + 12;
const _: () = assert!(VOLUME_RESERVED + SIZE <= VOLUME_SIZE);

/// Writes it into a superblock.
pub(super) fn put_size(bytes: &mut [u8], size_bytes: u64) {
    put(bytes, AT, &size_bytes.to_le_bytes());
    put(bytes, AT_CHECKSUM, &crc32c(&size_bytes.to_le_bytes()).to_le_bytes());
}

/// Whether a superblock says it. If it does, it says the same.
pub(super) fn check(bytes: &[u8]) -> Result<bool, FormatError> {
    zeros(bytes, END, SUPERBLOCK_SIZE)?;
    match (get_u64(bytes, AT), get_u32(bytes, AT_CHECKSUM)) {
        (0, 0) => Ok(false),
        (again, _) if again != get_u64(bytes, AT_SIZE_BYTES) => {
            Err(FormatError::Value { field: "size_again", found: again })
        }
        (again, sum) if sum != crc32c(&again.to_le_bytes()) => {
            Err(FormatError::Value { field: "size_again_checksum", found: sum.into() })
        }
        _ => Ok(true),
    }
}

/// What the last bytes of a superblock say, whatever the others hold.
pub(super) fn read(bytes: &[u8], mutants: Mutants) -> Option<u64> {
    let again = get_u64(bytes, AT);
    let unchecked = mutants.is(Mutant::SkipSizeChecksum);
    (get_u32(bytes, AT_CHECKSUM) == crc32c(&again.to_le_bytes()) || unchecked).then_some(again)
}
