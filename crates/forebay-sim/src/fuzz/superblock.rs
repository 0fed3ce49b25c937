// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Superblocks: what is read is written as the same bytes.

use super::padded;
use forebay_core::format::bytes::crc32c;
use forebay_core::format::superblock::{MAGIC, SUPERBLOCK_SIZE, Superblock};
use forebay_core::units::{BLOCK_BYTES, SegmentId};

/// A copy at address zero that is anything.
pub fn fuzz_superblock(input: &[u8]) {
    let _ = Superblock::decode(&mut input.to_vec(), 0);
    let mut bytes = padded(input, SUPERBLOCK_SIZE);
    check(&mut bytes.clone());
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..16].copy_from_slice(&[1, 0, 1, 0, 0, 0, 1, 0]);
    bytes[16..32].fill(0);
    let checksum = crc32c(&bytes);
    bytes[24..28].copy_from_slice(&checksum.to_le_bytes());
    check(&mut bytes);
}

fn check(bytes: &mut [u8]) {
    let Ok(superblock) = Superblock::decode(bytes, 0) else { return };
    let last = SegmentId(superblock.segment_count - 1);
    let end = superblock.address(last, superblock.segment_blocks() - 1) + BLOCK_BYTES;
    assert!(end <= Superblock::addresses(superblock.size_bytes)[1]);
    let again = superblock.encode(0);
    // Names may leave rows between them free: they are written without.
    let decoded = Superblock::decode(&mut again.clone(), 0);
    assert_eq!(decoded.as_ref(), Ok(&superblock));
}
