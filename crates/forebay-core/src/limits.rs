// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every bound of the engine, and the relations between them that must hold.

use crate::units::BLOCK_SIZE;

/// Volumes one cache can hold.
pub const VOLUME_COUNT_MAX: usize = 60;
/// Blocks in one volume: 2^39 blocks of 4 KiB are 2 PiB.
pub const VOLUME_BLOCKS_MAX: u64 = 1 << 39;
/// Bytes of one volume. The last of all numbers is no block's: a slot whose 64 bits are all set is empty, and an item of a
/// record's list with that number says something else ([`crate::format::record::ITEM_LOST`]).
pub const VOLUME_BYTES_MAX: u64 = (VOLUME_BLOCKS_MAX - 1) * BLOCK_SIZE as u64;
/// Bytes of one read or write handed to the engine; a front end splits longer ones.
pub const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Blocks one such request can touch when it is not aligned.
pub const REQUEST_BLOCKS_MAX: usize = REQUEST_BYTES_MAX as usize / BLOCK_SIZE + 1;
/// Requests that may be inside the engine at once.
pub const REQUEST_COUNT_MAX: usize = 4096;
/// Smallest and largest segment, in bytes.
pub const SEGMENT_BYTES_MIN: u32 = 64 << 10;
/// Largest segment, in bytes.
pub const SEGMENT_BYTES_MAX: u32 = 4 << 20;
/// Segment size when none is asked for.
pub const SEGMENT_BYTES_DEFAULT: u32 = 512 << 10;
/// Entries in one record.
pub const RECORD_ENTRIES_MAX: usize = 127;
/// Items in the list of what the record before held; a very long extent takes two.
pub const RECORD_ITEMS_MAX: usize = 160;
/// Segments a cache can have.
pub const SEGMENT_COUNT_MAX: u32 = 1 << 25;

/// Of segments with so many blocks: the number of each slot, and what comes behind the last one, fit into 32 bits.
pub const fn segment_count_max(segment_blocks: u16) -> u32 {
    let numbered = u32::MAX / segment_blocks as u32;
    if numbered < SEGMENT_COUNT_MAX { numbered } else { SEGMENT_COUNT_MAX }
}

/// Fewest segments a cache can have.
pub const SEGMENT_COUNT_MIN: u32 = 16;
/// Smallest cache device.
pub const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Segments of each log that guest data never takes: one for what is parked, two for watermarks and the
/// like.
pub const SEGMENTS_RESERVED: u32 = 3;
/// Sequences and epochs on a device lie below this: whoever adds to one need not look
/// for an overflow. At a million a second it is reached in 146,000 years.
pub const SEQUENCE_MAX: u64 = 1 << 62;
/// The same for ordinals: positions in a log are an ordinal and a block in 64 bits.
pub const ORDINAL_MAX: u64 = 1 << 48;
/// The same for generations.
pub const GENERATION_MAX: u32 = u32::MAX - 1;
/// Blocks that one thing which nobody waits for may read or write at once on the cache device: 32 KiB. On an SSD behind
/// SATA they take as long as a guest's read of 4 KiB; more would show in what guests wait for at worst.
pub const BACKGROUND_BLOCKS: u32 = 8;
/// Reads of them, where they do not lie together.
pub const BACKGROUND_READS: u32 = 4;
/// Pages of one write of a checkpoint: fewer, since one write follows the other until all are done.
pub const CHECKPOINT_PAGES: u32 = 6;
/// Effects on devices that may be under way at once.
pub const TOKEN_COUNT_MAX: usize = 8192;
/// Of these so many are left by what guests ask for.
pub const TOKENS_KEPT: usize = 1280;
/// And of these so many by what batches read and write: who ends records and flushes takes one without looking, and all of them
/// together take less, four for each volume.
pub const TOKENS_LEFT: usize = 256;

const _: () = assert!(SEGMENT_BYTES_MIN.is_power_of_two());
const _: () = assert!(SEGMENT_BYTES_MAX as usize / BLOCK_SIZE <= u16::MAX as usize);
const _: () = assert!(RECORD_ITEMS_MAX >= RECORD_ENTRIES_MAX);
const _: () = assert!(TOKENS_LEFT > 4 * VOLUME_COUNT_MAX && TOKENS_KEPT > 4 * TOKENS_LEFT);
const _: () = assert!(TOKEN_COUNT_MAX >= 4 * (TOKENS_KEPT + REQUEST_BLOCKS_MAX));
/// Blocks of the largest segment.
pub const SEGMENT_BLOCKS_MAX: u16 = (SEGMENT_BYTES_MAX as usize / BLOCK_SIZE) as u16;
