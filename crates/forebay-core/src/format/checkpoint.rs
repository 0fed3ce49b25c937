// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checkpoints: the map as an image, in pages of 4,096 bytes.
//!
//! There are two areas, used in turn: a checkpoint's number tells which. Page 0 of an area says
//! what follows; then come the index, the slots, the segments, the runs, and a stream with the volumes. A
//! checkpoint counts only once the superblock names it. On disk: `docs/format.md`, "Checkpoint".
//!
//! Index and slots come in *runs*, each with a place of its own in both areas. A run of the index
//! leaves out empty cells, so it may be shorter than its place. A run of slots that has not changed
//! stays where it is, and a checkpoint names it where an earlier one wrote it.

use super::bytes::{Field, FormatError, Seed, block_checksum, get_u32, get_u64, put};
use super::record::Identity;
use super::superblock::Superblock;
use crate::limits::SEQUENCE_MAX;
use crate::map::index::{PACKED_WORDS_MAX, PAGE_CELLS, PAGE_LOAD};
use crate::map::slots;
use crate::units::{BLOCK_BYTES, BLOCK_SIZE};

/// `FBCHECKP`, as a little-endian number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FBCHECKP");
/// Bytes before a page's content.
pub const PAGE_HEAD: usize = 32;
/// Bytes of a page's content.
pub const PAGE_BYTES: usize = BLOCK_SIZE - PAGE_HEAD;
/// Words of a page of an index run, and of the table of runs.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Pages of the index in one run, at most.
const INDEX_RUN: u32 = 128;
/// Blocks of a run's place, at most: what is read at once.
pub const RUN_BLOCKS_MAX: u32 = 256;
/// Slots of one page: nine bytes each.
pub const PAGE_SLOTS: usize = 448;
/// Segments of one page: forty bytes each.
pub const PAGE_SEGMENTS: usize = 100;
/// Bytes of a segment's row.
pub const SEGMENT_BYTES: usize = 40;
const _: () = assert!(PAGE_CELLS * 8 == PAGE_BYTES);
const _: () = assert!((INDEX_RUN as usize * PACKED_WORDS_MAX).div_ceil(PAGE_WORDS) <= 256);
const _: () = assert!((slots::RUN_SLOTS_MAX as usize).div_ceil(PAGE_SLOTS) <= 256);
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
pub const HEAD_FIELDS: [Field; 7] = [
    Field { offset: 32, size: 4, name: "index_runs", meaning: "runs of the index" },
    Field { offset: 36, size: 4, name: "slot_runs", meaning: "runs of slots" },
    Field { offset: 40, size: 4, name: "segment_pages", meaning: "pages of 100 segments" },
    Field { offset: 44, size: 4, name: "run_pages", meaning: "pages of 508 runs" },
    Field { offset: 48, size: 8, name: "stream_bytes", meaning: "bytes of the stream that count" },
    Field { offset: 56, size: 8, name: "segment_sequence", meaning: "the next one when it began" },
    Field { offset: 64, size: 4, name: "stream_pages", meaning: "pages of the stream" },
];

/// What lies where in an area: all of it follows from the cache's geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Pages of the index in memory.
    pub index_pages: u32,
    /// Of them in one run; the last run may have fewer.
    pub index_run: u32,
    /// Slots of the cache.
    pub slots: u64,
    /// Of them in one run, a power of two; the last run may have fewer.
    pub slot_run: u32,
    /// Pages of segments.
    pub segment_pages: u32,
}

impl Layout {
    /// The layout for a cache of this geometry.
    pub fn of(segment_count: u32, segment_blocks: u16) -> Layout {
        let slots = u64::from(segment_count) * u64::from(segment_blocks);
        let index_pages = slots.div_ceil(PAGE_LOAD).max(1) as u32;
        Layout {
            index_pages,
            index_run: index_pages.div_ceil(4).min(INDEX_RUN),
            slots,
            slot_run: slots::run_slots(slots),
            segment_pages: u64::from(segment_count).div_ceil(PAGE_SEGMENTS as u64) as u32,
        }
    }

    /// Runs of the index.
    pub fn index_runs(&self) -> u32 {
        self.index_pages.div_ceil(self.index_run)
    }

    /// Pages of the place of a run of the index: as many as it takes when no cell is empty.
    pub fn index_run_pages(&self) -> u32 {
        (self.index_run as usize * PACKED_WORDS_MAX).div_ceil(PAGE_WORDS) as u32
    }

    /// Pages of the index in memory that a run has.
    pub fn index_pages_of(&self, run: u32) -> core::ops::Range<u32> {
        let first = run * self.index_run;
        first..self.index_pages.min(first + self.index_run)
    }

    /// Runs of slots.
    pub fn slot_runs(&self) -> u32 {
        self.slots.div_ceil(u64::from(self.slot_run)) as u32
    }

    /// Pages of a run of slots.
    pub fn slot_run_pages(&self) -> u32 {
        self.slot_run.div_ceil(PAGE_SLOTS as u32)
    }

    /// Slots that a run has.
    pub fn slots_of(&self, run: u32) -> core::ops::Range<u32> {
        let first = u64::from(run) * u64::from(self.slot_run);
        first as u32..self.slots.min(first + u64::from(self.slot_run)) as u32
    }

    /// Pages of the table of runs: eight bytes each, of the index first.
    pub fn run_pages(&self) -> u32 {
        (self.index_runs() + self.slot_runs()).div_ceil(PAGE_WORDS as u32)
    }

    /// First page of the place of a run of the index.
    pub fn index_page(&self, run: u32) -> u32 {
        1 + run * self.index_run_pages()
    }

    /// First page of the place of a run of slots.
    pub fn slot_page(&self, run: u32) -> u32 {
        self.index_page(self.index_runs()) + run * self.slot_run_pages()
    }

    /// First page of the segments.
    pub fn segment_page(&self) -> u32 {
        self.slot_page(self.slot_runs())
    }

    /// First page of the table of runs.
    pub fn run_page(&self) -> u32 {
        self.segment_page() + self.segment_pages
    }

    /// First page of the stream.
    pub fn stream_page(&self) -> u32 {
        self.run_page() + self.run_pages()
    }
}

/// Where a run of slots was written last: by which checkpoint, into which area.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written(u64);

impl Written {
    /// Never: it holds nothing.
    pub const NEVER: Written = Written(0);

    /// By this checkpoint, into this area.
    pub fn new(sequence: u64, area: u64) -> Written {
        Written(sequence << 1 | area & 1)
    }

    /// As it is on disk.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// From what is on disk.
    pub fn from_raw(raw: u64) -> Written {
        Written(raw)
    }

    /// The checkpoint.
    pub fn sequence(self) -> u64 {
        self.0 >> 1
    }

    /// The area.
    pub fn area(self) -> u64 {
        self.0 & 1
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

/// Where a page of an area lies on the cache device; a checkpoint's own area is its number's parity.
pub fn address(superblock: &Superblock, area: u64, page: u32) -> u64 {
    Areas::of(superblock).begin(area) + u64::from(page) * BLOCK_BYTES
}

/// Where the two areas lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Areas {
    /// Where the first one begins.
    pub at: u64,
    /// Bytes of each.
    pub bytes: u64,
}

impl Areas {
    /// Those of a cache.
    pub fn of(superblock: &Superblock) -> Areas {
        Areas { at: superblock.checkpoint_at, bytes: superblock.checkpoint_bytes }
    }

    /// Where one begins.
    pub fn begin(&self, area: u64) -> u64 {
        self.at + area % 2 * self.bytes
    }
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
        put(bytes, 32, &self.layout.index_runs().to_le_bytes());
        put(bytes, 36, &self.layout.slot_runs().to_le_bytes());
        put(bytes, 40, &self.layout.segment_pages.to_le_bytes());
        put(bytes, 44, &self.layout.run_pages().to_le_bytes());
        put(bytes, 48, &self.stream_bytes.to_le_bytes());
        put(bytes, 56, &self.segment_sequence.to_le_bytes());
        put(bytes, 64, &self.stream_pages.to_le_bytes());
    }

    /// Reads it from a page that was opened, and checks it against the geometry.
    pub fn decode(bytes: &[u8; BLOCK_SIZE], superblock: &Superblock) -> Result<Head, FormatError> {
        let value = |field, found: u64| Err(FormatError::Value { field, found });
        let layout = Layout::of(superblock.segment_count, superblock.segment_blocks());
        let expected = [
            (32, "index_runs", layout.index_runs()),
            (36, "slot_runs", layout.slot_runs()),
            (40, "segment_pages", layout.segment_pages),
            (44, "run_pages", layout.run_pages()),
        ];
        for (offset, field, expected) in expected {
            let found = get_u32(bytes, offset);
            if found != expected {
                return value(field, found.into());
            }
        }
        let head = Head {
            layout,
            stream_bytes: get_u64(bytes, 48),
            segment_sequence: get_u64(bytes, 56),
            stream_pages: get_u32(bytes, 64),
        };
        let room = u64::from(head.stream_pages) * PAGE_BYTES as u64;
        let pages = u64::from(layout.stream_page()) + u64::from(head.stream_pages);
        let is_longer = head.stream_pages > stream_pages_max(superblock.segment_count);
        let is_outside = pages * BLOCK_BYTES > superblock.checkpoint_bytes;
        if is_longer || is_outside || head.stream_bytes > room {
            return value("stream_bytes", head.stream_bytes);
        }
        // An opening counts on from it, and its superblock must be one that can be read.
        if head.segment_sequence >= SEQUENCE_MAX {
            return value("segment_sequence", head.segment_sequence);
        }
        super::bytes::zeros(bytes, 68, BLOCK_SIZE)?;
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
