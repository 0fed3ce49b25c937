// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Units: one type for each thing that is counted, so that two of them cannot be mixed up.

use core::ops::{Add, Sub};

/// Bytes in a block, the unit of mapping.
pub const BLOCK_SIZE: usize = 4096;
/// [`BLOCK_SIZE`] as a 64-bit number, for arithmetic on device offsets.
pub const BLOCK_BYTES: u64 = BLOCK_SIZE as u64;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);
    };
}

unit!(/// Index of a block within a volume; never a byte offset.
    Lba(u64));
unit!(/// Index of a volume in the cache's superblock.
    VolumeIndex(u8));
unit!(/// Index of a segment on the cache device.
    SegmentId(u32));
unit!(/// Index of a block on the cache device counted from the first segment's first block.
    Slot(u32));
unit!(/// Orders records and entries within one log: rises strictly, is never reused.
    Sequence(u64));
unit!(/// Place of a segment in its log: the tail has the lowest, the head the highest.
    Ordinal(u64));
unit!(/// Index of a segment-sized buffer in the memory that outlives the process.
    BufferId(u16));
unit!(/// Time in nanoseconds; its zero is the runtime's choice, it never goes back.
    Tick(u64));

impl Lba {
    /// The block's first byte within the volume.
    pub const fn bytes(self) -> u64 {
        self.0 * BLOCK_BYTES
    }
}

impl Add<u64> for Lba {
    type Output = Lba;
    fn add(self, blocks: u64) -> Lba {
        Lba(self.0 + blocks)
    }
}

impl Sub<Lba> for Lba {
    type Output = u64;
    fn sub(self, other: Lba) -> u64 {
        self.0 - other.0
    }
}

impl Tick {
    /// A time `millis` milliseconds after zero.
    pub const fn from_millis(millis: u64) -> Tick {
        Tick(millis * 1_000_000)
    }

    /// Nanoseconds from `earlier` to `self`, zero if `earlier` is the later one.
    pub const fn since(self, earlier: Tick) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The time `nanos` nanoseconds later.
    pub const fn after(self, nanos: u64) -> Tick {
        Tick(self.0.saturating_add(nanos))
    }
}
