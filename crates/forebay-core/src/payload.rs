// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The runtime's memory, as far as the engine may see it.
//!
//! The engine never holds a guest's bytes. It says which block goes where, and learns a checksum
//! and whether a block is all zeros. The runtime implements [`Payload`] over real memory, the
//! simulator over its own.

use crate::format::entry::Kind;
use crate::format::record::{Identity, Known};
use crate::units::{BufferId, Lba, Sequence, VolumeIndex};

/// A block-sized place in the runtime's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Block `block` of a segment buffer (block 0 of a segment holds its first record's header).
    Buffer {
        /// The buffer.
        buffer: BufferId,
        /// Block within the segment.
        block: u16,
    },
    /// Block `block` of a request's memory: the block that holds byte `offset` is block 0, so
    /// that an unaligned request's memory begins inside its block 0.
    Request {
        /// [`crate::request::Request::tag`].
        tag: u32,
        /// Block within the request.
        block: u16,
    },
    /// What an unaligned write's first (0) or last (1) block held before.
    Edge {
        /// [`crate::request::Request::tag`].
        tag: u32,
        /// 0: the request's first block, 1: its last.
        edge: u8,
    },
    /// Frame `frame` of the write-back window.
    Window {
        /// Index of a block in the window.
        frame: u32,
    },
    /// One block that nobody looks at: what is read is asked for to see whether it can be read. Several reads may go there at once.
    Nowhere,
}

/// What [`Payload::ingest`] found in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingested {
    /// The block is all zeros; nothing was stored.
    Zero,
    /// The block was stored, and this is its checksum.
    Stored {
        /// `format::bytes::block_checksum` of the 4,096 bytes, without any seed.
        crc: u32,
    },
    /// The guest's bytes cannot be had: the request fails, and what of it is placed stays.
    Failed,
}

/// An entry that was given its sequence: for whoever compares the engine with what it should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Whose.
    pub volume: VolumeIndex,
    /// Its sequence.
    pub sequence: Sequence,
    /// What it is.
    pub kind: Kind,
    /// First block.
    pub lba: Lba,
    /// Blocks.
    pub count: u32,
    /// For data, where it lies.
    pub at: Place,
}

/// What the engine may do with memory. All of it happens at once, inside the call.
pub trait Payload {
    /// Stores block `block` of the write request `tag` in the segment buffer, unless it is all
    /// zeros. Where the request covers a block only in part (its first or last), the rest comes
    /// from the request's [`Place::Edge`], which the engine has had read before.
    fn ingest(&mut self, tag: u32, block: u64, buffer: BufferId, at: u16) -> Ingested;

    /// `format::bytes::block_checksum` of the block at `place`.
    fn checksum(&mut self, place: Place) -> u32;

    /// Whether the block at `place` is the header of a record that is known: [`Known::is`].
    fn is_header(&mut self, place: Place, known: &Known, identity: &Identity) -> bool;

    /// Copies `blocks` consecutive blocks.
    fn copy(&mut self, from: Place, to: Place, blocks: u16);

    /// Fills `blocks` consecutive blocks with zeros.
    fn zero(&mut self, place: Place, blocks: u16);

    /// Stores metadata in a segment buffer, `offset` bytes after its start. The store is complete,
    /// as another process would see it, before any later call to `put` has an effect.
    fn put(&mut self, buffer: BufferId, offset: u32, bytes: &[u8]);

    /// Stores metadata at a place that is not a segment buffer's.
    fn store(&mut self, place: Place, bytes: &[u8]);

    /// A buffer begins to hold a segment: from now on it must survive the process.
    fn buffer_begin(&mut self, buffer: BufferId, segment: crate::units::SegmentId);

    /// Everything in the buffer has been written to the cache device.
    fn buffer_end(&mut self, buffer: BufferId);

    /// A flush of a backing device failed that the guest is to hear of (A3 of `op::around`). It outlives the process, as segment
    /// buffers do: the superblock says it some time later.
    fn flush_failed(&mut self, _volume: VolumeIndex) {}

    /// Whether what a backing device reads to a place goes, or may go, where this process cannot look. Asked before the read is, and the same
    /// until it is done.
    fn is_apart(&self, _place: Place) -> bool {
        false
    }

    /// The engine will look at this soon: a cache line to be fetched. It need not do anything.
    #[inline(always)]
    fn prefetch<T>(&mut self, _soon: &T) {}

    /// An entry is being placed. Only simulators listen.
    #[inline(always)]
    fn placed(&mut self, _entry: &Placed) {}
}
