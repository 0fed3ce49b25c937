// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What recovery asks of whoever runs it: bytes of the cache device, and hands.
//!
//! The engine has no thread and no read that does not wait. What could go
//! on at once is put so that a runtime may do it at once: pure functions on parts of a table that do not
//! overlap, and places named before they are read. What a runtime leaves out is done here, one
//! after the other, with the same result.

use crate::effect::Fault;
use crate::units::{BLOCK_BYTES, BLOCK_SIZE};
use alloc::vec::Vec;

/// Blocks of one read of [`CacheReader::fill`], where nobody knows better.
const RUN_BLOCKS: usize = 256;

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

    /// Reads a run of blocks and gives each, with its number and its part of `target`, to `put`;
    /// in any order, and on several threads at once. Returns the sum of what `put` says; none if
    /// it said none of any block. What cannot be read is zeros.
    fn fill<T: Send>(
        &mut self,
        offset: u64,
        target: &mut [T],
        part: usize,
        put: impl Fn(u32, &mut [u8; BLOCK_SIZE], &mut [T]) -> Option<u64> + Sync,
    ) -> Option<u64> {
        let mut bytes = alloc::vec![0; RUN_BLOCKS * BLOCK_SIZE];
        let (mut sum, mut number) = (0, 0);
        for target in target.chunks_mut(part * RUN_BLOCKS) {
            let at = offset + u64::from(number) * BLOCK_BYTES;
            let bytes = &mut bytes[..target.len().div_ceil(part) * BLOCK_SIZE];
            if self.read(at, bytes).is_err() {
                // Some of it cannot be read: the rest still can.
                for (block, bytes) in bytes.chunks_exact_mut(BLOCK_SIZE).enumerate() {
                    if self.read(at + block as u64 * BLOCK_BYTES, bytes).is_err() {
                        bytes.fill(0);
                    }
                }
            }
            for (bytes, target) in
                bytes.as_chunks_mut::<BLOCK_SIZE>().0.iter_mut().zip(target.chunks_mut(part))
            {
                sum += put(number, bytes, target)?;
                number += 1;
            }
        }
        Some(sum)
    }

    /// How many parts work is best cut into for [`CacheReader::share`].
    fn workers(&self) -> usize {
        1
    }

    /// Does some work for each part, in any order, and best at once.
    fn share<T: Send>(&mut self, parts: Vec<T>, work: impl Fn(T) + Sync) {
        parts.into_iter().for_each(work);
    }
}
