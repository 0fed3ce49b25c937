// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What recovery asks of whoever runs it: bytes of the cache device, memory, and hands.
//!
//! The engine has no thread and no read that does not wait. What could go
//! on at once is put so that a runtime may do it at once: pure functions on parts of a table that do not
//! overlap, and places named before they are read. What a runtime leaves out is done here, one
//! after the other, with the same result.

use crate::effect::Fault;
use crate::map::slots::ROW_BYTES;
use crate::units::{BLOCK_BYTES, BLOCK_SIZE};
use alloc::vec::Vec;

/// Blocks of a stretch, at most.
pub const STRETCH_BLOCKS_MAX: u32 = crate::format::checkpoint::RUN_BLOCKS_MAX;

/// Blocks in a row on the cache device, and how much of a table they fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Where they begin.
    pub offset: u64,
    /// How many there are: at most [`STRETCH_BLOCKS_MAX`]. None: that much of the table is left as it is.
    pub blocks: u32,
    /// Elements of the table.
    pub items: usize,
}

/// The cache device as recovery sees it: plain reads that wait.
pub trait CacheReader {
    /// Reads `bytes.len()` bytes (a multiple of 4,096) at `offset`.
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Reads as many places as there are offsets, each an equal part of `bytes`, in any order and
    /// best at once. What cannot be read is zeros.
    fn read_each(&mut self, offsets: &[u64], bytes: &mut [u8]) {
        let length = bytes.len() / offsets.len().max(1);
        for (offset, part) in offsets.iter().zip(bytes.chunks_exact_mut(length.max(1))) {
            if self.read(*offset, part).is_err() {
                part.fill(0);
            }
        }
    }

    /// These places, each `length` bytes long, will be asked for by [`CacheReader::read_each`] after those
    /// that are asked for next.
    fn will_read(&mut self, offsets: &[u64], length: usize) {
        let _ = (offsets, length);
    }

    /// Reads stretches and gives each, by its number, with its part of `target` to `put`, in any
    /// order, and on several threads at once. Returns the sum of what `put` says; none if it said
    /// none of any. A block that cannot be read is zeros.
    fn fill<T: Send>(
        &mut self,
        stretches: &[Stretch],
        mut target: &mut [T],
        put: impl Fn(usize, &mut [[u8; BLOCK_SIZE]], &mut [T]) -> Option<u64> + Sync,
    ) -> Option<u64> {
        let mut blocks = alloc::vec![[0; BLOCK_SIZE]; STRETCH_BLOCKS_MAX as usize];
        let mut sum = 0;
        for (number, stretch) in stretches.iter().enumerate() {
            let part = target.split_off_mut(..stretch.items)?;
            let blocks = &mut blocks[..stretch.blocks as usize];
            if self.read(stretch.offset, blocks.as_flattened_mut()).is_err() {
                // Some of it cannot be read: the rest still can.
                for (block, offset) in
                    blocks.iter_mut().zip((stretch.offset..).step_by(BLOCK_BYTES as usize))
                {
                    if self.read(offset, block).is_err() {
                        block.fill(0);
                    }
                }
            }
            if stretch.blocks > 0 {
                sum += put(number, blocks, part)?;
            }
        }
        Some(sum)
    }

    /// Writes again what was just read here (V9): it may be there only until the power fails, or until memory is
    /// short. Whoever goes on from what is recovered flushes it before he writes anything else. Who only looks does nothing.
    fn rewrite(&mut self, offset: u64, bytes: &[u8]) {
        let _ = (offset, bytes);
    }

    /// So many cells will be asked for ([`CacheReader::cells`]) after some other reads: their memory can be made ready meanwhile.
    fn will_take_cells(&mut self, count: usize) {
        let _ = count;
    }

    /// Memory for the index: so many zeros.
    fn cells(&mut self, count: usize) -> Vec<u64> {
        alloc::vec![0; count]
    }

    /// Memory for the slots: so many zeros.
    fn rows(&mut self, count: usize) -> Vec<[u8; ROW_BYTES]> {
        alloc::vec![[0; ROW_BYTES]; count]
    }

    /// How many parts work is best cut into for [`CacheReader::share`].
    fn workers(&self) -> usize {
        1
    }

    /// Has what `soon` begins with brought near, without waiting for it.
    fn prefetch<T>(soon: &T) {
        let _ = soon;
    }

    /// Does some work for each part, in any order, and best at once.
    fn share<T: Send>(&mut self, parts: Vec<T>, work: impl Fn(T) + Sync) {
        parts.into_iter().for_each(work);
    }
}
