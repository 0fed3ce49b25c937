// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the engine wants done. The runtime does it, and reports each [`Token`] back exactly once.

use crate::format::superblock::Superblock;
use crate::payload::Place;
use crate::request::RequestError;
use crate::units::{BufferId, Lba, Ordinal, SegmentId, Sequence, VolumeIndex};

/// Names one effect under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u32);

/// A device failed to do an effect. The engine decides what follows (`docs/faults.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// What is new in a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockChange {
    /// A newer checkpoint.
    Checkpoint {
        /// Its number.
        sequence: u64,
    },
    /// How far a log has come, where it has no segment for a record that says so.
    Marks {
        /// Whose.
        volume: VolumeIndex,
        /// Everything up to it is on the backing device.
        watermark: Sequence,
        /// Lowest ordinal still alive.
        tail: Ordinal,
        /// Wall clock of the newest data on the backing device.
        backing_as_of: u64,
    },
    /// A flush of a backing device failed, and its guest has not been told.
    FlushFailed {
        /// Whose.
        volume: VolumeIndex,
    },
}

impl SuperblockChange {
    /// Makes the change in memory.
    pub fn apply(&self, superblock: &mut Superblock) {
        superblock.sequence += 1;
        match *self {
            SuperblockChange::Checkpoint { sequence } => superblock.checkpoint_sequence = sequence,
            SuperblockChange::Marks { volume, watermark, tail, backing_as_of } => {
                if let Some(Some(recorded)) = superblock.volumes.get_mut(usize::from(volume.0)) {
                    recorded.watermark = watermark;
                    recorded.tail = tail;
                    recorded.backing_as_of = backing_as_of;
                }
            }
            SuperblockChange::FlushFailed { volume } => {
                if let Some(Some(recorded)) = superblock.volumes.get_mut(usize::from(volume.0)) {
                    recorded.flush_failed = true;
                }
            }
        }
    }
}

/// One thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Write `blocks` blocks of a buffer, from block `block` on, to the same blocks of `segment`
    /// on the cache device: one device write. It is a record, or a part of one that holds copies alone: its
    /// parts are written one after the other.
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
    /// Change the superblock, and write it: both copies, each flushed. One at a time.
    WriteSuperblock {
        /// Report with this.
        token: Token,
        /// What is new in it.
        change: SuperblockChange,
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
    /// Do what a guest's write, or write-zeroes, asks on the backing device, byte for byte.
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
    /// Write down, outside of the cache device and for good, that the cache is stale for a volume since the attach
    /// generation that it has: whoever opens the cache again drops what it holds of the volume. A fault: it cannot be.
    MarkStale {
        /// Report with this.
        token: Token,
        /// Which.
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

impl Effect {
    /// What it is reported back with; an answer is not.
    pub fn token(&self) -> Option<Token> {
        match *self {
            Effect::Answer { .. } => None,
            Effect::WriteCache { token, .. }
            | Effect::ReadCache { token, .. }
            | Effect::WriteArea { token, .. }
            | Effect::WriteSuperblock { token, .. }
            | Effect::FlushCache { token }
            | Effect::ReadBacking { token, .. }
            | Effect::WriteBacking { token, .. }
            | Effect::WriteAround { token, .. }
            | Effect::ZeroBacking { token, .. }
            | Effect::DiscardBacking { token, .. }
            | Effect::FlushBacking { token, .. }
            | Effect::MarkStale { token, .. } => Some(token),
        }
    }
}
