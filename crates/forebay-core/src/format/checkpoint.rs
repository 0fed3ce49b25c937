// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checkpoints: the map as an image, in pages of 4,096 bytes.
//!
//! There are two areas, used in turn: a checkpoint's number tells which. Page 0 of an area says
//! what follows; then come the index, the slots, the segments, and a stream with the volumes. A
//! checkpoint counts only once the superblock names it. On disk: `docs/format.md`, "Checkpoint".

use super::bytes::{Field, FormatError, Seed, block_checksum, get_u32, get_u64, put};
use super::record::Identity;
use super::superblock::{SUPERBLOCK_SIZE, Superblock};
use crate::map::index::{PAGE_CELLS, PAGE_LOAD};
use crate::units::{BLOCK_BYTES, BLOCK_SIZE};

/// `FBCHECKP`, as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FBCHECKP");
/// Bytes before a page's content.
pub const PAGE_HEAD: usize = 32;
/// Bytes of a page's content.
pub const PAGE_BYTES: usize = BLOCK_SIZE - PAGE_HEAD;
/// Slots of one page: nine bytes each.
pub const PAGE_SLOTS: usize = 448;
/// Segments of one page: forty bytes each.
pub const PAGE_SEGMENTS: usize = 100;
/// Bytes of a segment's row.
pub const SEGMENT_BYTES: usize = 40;
const _: () = assert!(PAGE_CELLS * 8 == PAGE_BYTES);
const _: () = assert!(PAGE_SLOTS * 9 <= PAGE_BYTES && PAGE_SEGMENTS * SEGMENT_BYTES <= PAGE_BYTES);

/// Rows of a page's head in `docs/format.md`.
pub const FIELDS: [Field; 5] = [
    Field { offset: 0, size: 8, name: "magic", meaning: "which structure of which program" },
    Field {
        offset: 8,
        size: 4,
        name: "checksum",
        meaning: "block checksum over the whole, itself as zero, seeded",
    },
    Field {
        offset: 12,
        size: 4,
        name: "page",
        meaning: "number within the area; page 0 is the head",
    },
    Field { offset: 16, size: 8, name: "checkpoint_sequence", meaning: "of the checkpoint" },
    Field { offset: 24, size: 8, name: "reserved", meaning: "zero" },
];

/// Rows of the head page's content in `docs/format.md`, from byte 32 on.
pub const HEAD_FIELDS: [Field; 6] = [
    Field {
        offset: 32,
        size: 4,
        name: "index_pages",
        meaning: "pages of 508 cells, from page 1 on",
    },
    Field { offset: 36, size: 4, name: "slot_pages", meaning: "pages of 448 slots behind them" },
    Field {
        offset: 40,
        size: 4,
        name: "segment_pages",
        meaning: "pages of 100 segments behind them",
    },
    Field { offset: 44, size: 4, name: "stream_pages", meaning: "pages of the stream behind them" },
    Field { offset: 48, size: 8, name: "stream_bytes", meaning: "bytes of the stream that count" },
    Field { offset: 56, size: 8, name: "segment_sequence", meaning: "the next one when it began" },
];

/// How many pages of what an area holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Pages of the index.
    pub index_pages: u32,
    /// Pages of slots.
    pub slot_pages: u32,
    /// Pages of segments.
    pub segment_pages: u32,
}

impl Layout {
    /// The layout for a cache of this geometry.
    pub fn of(segment_count: u32, segment_blocks: u16) -> Layout {
        let slots = u64::from(segment_count) * u64::from(segment_blocks);
        Layout {
            index_pages: slots.div_ceil(PAGE_LOAD).max(1) as u32,
            slot_pages: slots.div_ceil(PAGE_SLOTS as u64) as u32,
            segment_pages: u64::from(segment_count).div_ceil(PAGE_SEGMENTS as u64) as u32,
        }
    }

    /// Page behind the head, the index, the slots and the segments.
    pub fn stream_page(&self) -> u32 {
        1 + self.index_pages + self.slot_pages + self.segment_pages
    }
}

/// Pages that the stream may take.
pub fn stream_pages_max(segment_count: u32) -> u32 {
    // The free list, and extents: more for larger caches.
    let bytes = u64::from(segment_count) * 4 + (u64::from(segment_count) * 512).min(4 << 20);
    (bytes + (192 << 10)).div_ceil(PAGE_BYTES as u64) as u32
}

/// Bytes of one area.
pub fn area_bytes(segment_count: u32, segment_blocks: u16) -> u64 {
    let layout = Layout::of(segment_count, segment_blocks);
    u64::from(layout.stream_page() + stream_pages_max(segment_count)) * BLOCK_BYTES
}

/// Where a page of a checkpoint lies on the cache device.
pub fn address(superblock: &Superblock, sequence: u64, page: u32) -> u64 {
    area_address(superblock.checkpoint_bytes, sequence) + u64::from(page) * BLOCK_BYTES
}

/// Where the area of a checkpoint begins.
pub fn area_address(checkpoint_bytes: u64, sequence: u64) -> u64 {
    SUPERBLOCK_SIZE as u64 + sequence % 2 * checkpoint_bytes
}

/// The head page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The pages.
    pub layout: Layout,
    /// Pages of the stream.
    pub stream_pages: u32,
    /// Bytes of the stream that count.
    pub stream_bytes: u64,
    /// The next segment sequence when it began.
    pub segment_sequence: u64,
}

impl Head {
    /// Writes it into a page.
    pub fn encode(&self, bytes: &mut [u8; BLOCK_SIZE]) {
        put(bytes, 32, &self.layout.index_pages.to_le_bytes());
        put(bytes, 36, &self.layout.slot_pages.to_le_bytes());
        put(bytes, 40, &self.layout.segment_pages.to_le_bytes());
        put(bytes, 44, &self.stream_pages.to_le_bytes());
        put(bytes, 48, &self.stream_bytes.to_le_bytes());
        put(bytes, 56, &self.segment_sequence.to_le_bytes());
    }

    /// Reads it from a page that was opened, and checks it against the geometry.
    pub fn decode(bytes: &[u8; BLOCK_SIZE], superblock: &Superblock) -> Result<Head, FormatError> {
        let head = Head {
            layout: Layout {
                index_pages: get_u32(bytes, 32),
                slot_pages: get_u32(bytes, 36),
                segment_pages: get_u32(bytes, 40),
            },
            stream_pages: get_u32(bytes, 44),
            stream_bytes: get_u64(bytes, 48),
            segment_sequence: get_u64(bytes, 56),
        };
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        let layout = Layout::of(superblock.segment_count, superblock.segment_blocks());
        if head.layout != layout {
            return value("index_pages", head.layout.index_pages.into());
        }
        let room = u64::from(head.stream_pages) * PAGE_BYTES as u64;
        let pages = u64::from(layout.stream_page()) + u64::from(head.stream_pages);
        if pages * BLOCK_BYTES > superblock.checkpoint_bytes || head.stream_bytes > room {
            return value("stream_bytes", head.stream_bytes);
        }
        super::bytes::zeros(bytes, 64, BLOCK_SIZE)?;
        Ok(head)
    }
}

fn seed(identity: &Identity, address: u64, sequence: u64) -> Seed {
    Seed::new(identity.key, address, sequence)
}

/// Completes a page whose content is there.
pub fn seal(
    bytes: &mut [u8; BLOCK_SIZE],
    identity: &Identity,
    address: u64,
    sequence: u64,
    page: u32,
) {
    put(bytes, 0, &MAGIC.to_le_bytes());
    put(bytes, 8, &[0; 4]);
    put(bytes, 12, &page.to_le_bytes());
    put(bytes, 16, &sequence.to_le_bytes());
    put(bytes, 24, &[0; 8]);
    let checksum = seed(identity, address, sequence).apply(block_checksum(&bytes[..]));
    put(bytes, 8, &checksum.to_le_bytes());
}

/// Checks a page that was read from `address`.
pub fn open(
    bytes: &mut [u8; BLOCK_SIZE],
    identity: &Identity,
    address: u64,
    sequence: u64,
    page: u32,
) -> Result<(), FormatError> {
    let magic = get_u64(bytes, 0);
    if magic != MAGIC {
        return Err(FormatError::Magic { expected: MAGIC, found: magic });
    }
    let found = get_u32(bytes, 8);
    put(bytes, 8, &[0; 4]);
    let expected = seed(identity, address, sequence).apply(block_checksum(&bytes[..]));
    put(bytes, 8, &found.to_le_bytes());
    if found != expected {
        return Err(FormatError::Checksum { expected, found });
    }
    if get_u32(bytes, 12) != page || get_u64(bytes, 16) != sequence {
        return Err(FormatError::Value { field: "page", found: get_u32(bytes, 12).into() });
    }
    super::bytes::zeros(bytes, 24, PAGE_HEAD)
}
