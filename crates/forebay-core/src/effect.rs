// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the engine wants done. The runtime does it, and reports each [`Token`] back exactly once.

use crate::payload::Place;
use crate::request::RequestError;
use crate::units::{BufferId, Lba, SegmentId, VolumeIndex};

/// Names one effect under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

/// A device failed to do an effect. The engine decides what follows (`docs/faults.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// One thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write `blocks` blocks of a buffer, from block `block` on, to the same blocks of `segment`
    /// on the cache device: one device write.
    WriteCache {
        /// Report with this.
        token: Token,
        /// Where the bytes are.
        buffer: BufferId,
        /// Where they go.
        segment: SegmentId,
        /// First block, in the buffer and in the segment.
        block: u16,
        /// How many.
        blocks: u16,
    },
    /// Read `blocks` consecutive blocks of the cache device.
    ReadCache {
        /// Report with this.
        token: Token,
        /// Where they are.
        segment: SegmentId,
        /// First block within the segment.
        block: u16,
        /// How many.
        blocks: u16,
        /// Where they go, consecutively.
        to: Place,
    },
    /// Write `blocks` consecutive blocks to the cache device, outside the segments.
    WriteArea {
        /// Report with this.
        token: Token,
        /// Where they go: bytes from the device's start.
        address: u64,
        /// How many.
        blocks: u16,
        /// Where they come from, consecutively.
        from: Place,
    },
    /// Write the superblock (both copies, each flushed) with this checkpoint's sequence.
    NameCheckpoint {
        /// Report with this.
        token: Token,
        /// The checkpoint.
        sequence: u64,
    },
    /// Everything whose write was reported before becomes durable on the cache device.
    FlushCache {
        /// Report with this.
        token: Token,
    },
    /// Read from a backing device. What lies past its end reads as zeros.
    ReadBacking {
        /// Report with this.
        token: Token,
        /// Whose backing device.
        volume: VolumeIndex,
        /// First block.
        lba: Lba,
        /// How many.
        blocks: u16,
        /// Where they go, consecutively.
        to: Place,
    },
    /// Write to a backing device. What lies past its end is not written.
    WriteBacking {
        /// Report with this.
        token: Token,
        /// Whose backing device.
        volume: VolumeIndex,
        /// First block.
        lba: Lba,
        /// How many.
        blocks: u16,
        /// Where they come from, consecutively.
        from: Place,
    },
    /// Write a guest's request to the backing device as it is, byte for byte (write-around).
    WriteAround {
        /// Report with this.
        token: Token,
        /// Whose backing device.
        volume: VolumeIndex,
        /// Which request's memory and range.
        tag: u32,
    },
    /// Make a range of a backing device read as zeros.
    ZeroBacking {
        /// Report with this.
        token: Token,
        /// Whose backing device.
        volume: VolumeIndex,
        /// First block.
        lba: Lba,
        /// How many.
        blocks: u64,
    },
    /// Tell a backing device that a range is not needed. A device that cannot reports success.
    DiscardBacking {
        /// Report with this.
        token: Token,
        /// Whose backing device.
        volume: VolumeIndex,
        /// First block.
        lba: Lba,
        /// How many.
        blocks: u64,
    },
    /// Everything whose write was reported before becomes durable on a backing device.
    FlushBacking {
        /// Report with this.
        token: Token,
        /// Whose backing device.
        volume: VolumeIndex,
    },
    /// Answer a guest's request; its tag is free again.
    Answer {
        /// [`crate::request::Request::tag`].
        tag: u32,
        /// What to tell.
        result: Result<(), RequestError>,
    },
}
