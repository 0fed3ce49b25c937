// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters of a volume, by name; `blocks` are of 4,096 bytes.

use crate::policy::bypass::Reason;

/// Why a block that was missed was not copied into the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It belongs to a long run.
    Sequential,
    /// It was not missed before, or long ago.
    FirstTouch,
    /// What there is is kept for writes, or the cache device has failed.
    NoRoom,
    /// It was written meanwhile, or the backing device may still lose what it has of it.
    Raced,
}

impl Refusal {
    /// All reasons, in the order of [`Stats::fills_refused`].
    pub const ALL: [Refusal; 4] =
        [Refusal::Sequential, Refusal::FirstTouch, Refusal::NoRoom, Refusal::Raced];
}

/// What happened on a volume since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discard and write-zeroes requests.
    pub discards: u64,
    /// Blocks read by the guest.
    pub read_blocks: u64,
    /// Of these, answered from the log (memory or cache device).
    pub hit_blocks: u64,
    /// Of these, answered as zeros without any device.
    pub zero_blocks: u64,
    /// Of these, read from the backing device.
    pub miss_blocks: u64,
    /// Of those, read from it for another request.
    pub shared_blocks: u64,
    /// Blocks that the log has and that were read from the backing device as well, with what is on both sides of them.
    pub across_blocks: u64,
    /// Blocks read from the backing device before a guest asked for them.
    pub ahead_blocks: u64,
    /// Of these, those that a guest read.
    pub ahead_used_blocks: u64,
    /// Of these, those that changed before a guest read them.
    pub ahead_void_blocks: u64,
    /// Of these, those that gave their place to others before a guest read them.
    pub ahead_unused_blocks: u64,
    /// Reads ahead that failed.
    pub ahead_faults: u64,
    /// Blocks copied into the log because guests read them.
    pub fill_blocks: u64,
    /// Blocks answered from such copies.
    pub fill_hit_blocks: u64,
    /// Blocks that guests missed and that were not copied, by [`Refusal`].
    pub fills_refused: [u64; Refusal::ALL.len()],
    /// Blocks the guest wrote with data in them, or around the log.
    pub written_blocks: u64,
    /// Blocks the guest wrote that were all zeros.
    pub zeroed_blocks: u64,
    /// Blocks written to the cache device, headers included.
    pub cache_blocks_written: u64,
    /// Records written to the cache device.
    pub records: u64,
    /// Writes to the backing device.
    pub backing_writes: u64,
    /// Blocks that the backing device took of them.
    pub backing_blocks_written: u64,
    /// Batches written back.
    pub batches: u64,
    /// Maximal runs of adjacent dirty blocks in those batches.
    pub batch_runs: u64,
    /// Blocks appended again at the tail: second chances.
    pub second_chances: u64,
    /// Clean blocks whose checksum was wrong, answered from the backing device.
    pub repaired_blocks: u64,
    /// Blocks that nothing else has and that were bad when a guest's request read them, each time counted (R6).
    pub bad_blocks_read: u64,
    /// Dirty blocks that are lost: bad, and half a minute later still, or held by a bad header.
    pub lost_blocks: u64,
    /// Blocks appended again because the backing device refused them, each time counted.
    pub parked_blocks: u64,
    /// Failures of the backing device.
    pub backing_faults: u64,
    /// Reads and writes whose answer waited for the backing device.
    pub backing_waits: u64,
    /// Writes that went around the log, by `policy::bypass::Reason`.
    pub bypassed: [u64; Reason::ALL.len()],
    /// The sum of these.
    pub bypassed_writes: u64,
    /// Blocks of these.
    pub bypassed_blocks: u64,
    /// Reads and writes around the log that waited for write-back to give the backing device free.
    pub turn_waits: u64,
    /// Writes that waited for what the log space before them cost (`policy::delay`).
    pub delayed_writes: u64,
    /// How long these waited in all until they were placed, in nanoseconds.
    pub delayed_nanos: u64,
    /// Time during which the backing device may have been a mixture of two states, in nanoseconds.
    pub exposed_nanos: u64,
    /// Segments reclaimed.
    pub reclaimed_segments: u64,
}
