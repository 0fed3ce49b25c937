// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Marks: what a run must have come past, so that a rare branch is known to be taken.
//!
//! # Counted and not required
//!
//! - `volume frozen`, `rot unknown`: no seed comes past them. `rot.rs` leaves the next header in order, which says what the bad one
//!   held: without it nobody could say, the model neither, and nothing could be compared. `tests/frozen.rs`, `tests/scrub.rs` and
//!   the library's `frozen.rs` tell those stories.
//! - `came again …`, `answered when nobody heard it any more`, `ended with requests inside`: requests come again only where that is
//!   asked for (`--again`, and why: `docs/decisions/0010-ublk.md`); `tests/again.rs` comes past each kind.
//! - `handed over with a segment missing`, `checkpoint overwritten by the superblock of another size`, `more room for extents`, `backing
//!   flush failed at a stop`: 1, 44, 13 and 35 times in 6,000 seeds, so a run of 250 cannot be blamed for missing them.

use std::collections::BTreeMap;

/// What a run of many seeds must have come past.
pub const EXPECTED: &[&str] = &[
    "a slow disk shared by volumes",
    "zeroed past a failed cache",
    "cache marked stale",
    "clean data forgotten",
    "backing device late",
    "opened with more or less memory for batches",
    "late volume's data forgotten",
    "header unreadable",
    "unreadable blocks can be read again",
    "mark met",
    "no place for a mark",
    "cache shrunk: checkpoints elsewhere",
    "cache shrunk: checkpoints where they were",
    "cache grown: checkpoints elsewhere",
    "cache grown: checkpoints where they were",
    "cache stays as large as it is",
    "too small for what is reserved",
    "copy of another size taken away",
    "stopped while the cache's size was written",
    "growth cancelled",
    "larger after an opening",
    "stopped while a size was written",
    "volume grown: last block in part",
    "volume grown: whole blocks",
    "scrub completed",
    "scrub stopped",
    "scrub healed a block",
    "scrub found a lost block",
    "scrub found a block nobody needs",
    "scrub found a bad header",
    "scrub saved what a bad header held",
    "header of a fill rotted",
    "header of what went around the log rotted",
    "fill placed",
    "range fetched",
    "fill read",
    "fill refused: first touch",
    "fill refused: no room",
    "fill refused: raced",
    "fill refused: sequential",
    "miss shared",
    "read across a hole",
    "read ahead",
    "read ahead: used",
    "read ahead: void",
    "read ahead: unused",
    "read ahead: failed",
    "read ahead and written",
    "run read forward",
    "run read backward",
    "stride read",
    "raced with what is in the log",
    "raced with what is not in the log any more",
    "foreground waited its turn",
    "guests had a slow device while write-back waited",
    "write-back had a slow device while guests waited",
    "read in time for a target",
    "read too late for a target",
    "shares changed in mid-run",
    "reservation changed in mid-run",
    "reservation refused",
    "segment given to itself",
    "lent segment taken back",
    "write held back for what others have reserved",
    "write delayed",
    "around the log: sequential",
    "around the log: too large",
    "around the log: full",
    "around the log: cache failed",
    "around the log: mode",
    "cache thrown away: between batches",
    "cache thrown away: within a batch",
    "cache thrown away: strict, between batches",
    "cache thrown away: strict, within a batch",
    "block of the log written by a guest",
    "block torn between sectors",
    "checkpoint named",
    "block placed",
    "block written back",
    "device grown in mid-run",
    "dirty block",
    "dirty block overwritten",
    "evicted after a power cut",
    "flush failed: forgotten",
    "flush failed: gone",
    "flush failed: kept for the next",
    "flush failed: of what others wrote",
    "rot after a death",
    "segment of the log written by a guest",
    "several completions in a turn",
    "stopped behind what is rare",
    "stopped as soon as the cache may have another size",
    "stopped behind a write over what is not durable",
    "stopped behind a write over what was to grow",
    "stopped when marks were in the superblock",
    "stopped when what was lost was named",
    "written while it was healed",
    "unflushed writes: all survive",
    "unflushed writes: any survive",
    "unflushed writes: none survives",
    "unflushed writes: the first survive",
    "unflushed writes: torn",
    "volume drained",
    "write in flight at a death: all of it",
    "write in flight at a death: in part",
    "write in flight at a death: nothing of it",
    "write-back flushing",
    "write-back idle",
    "write-back noting",
    "write-back writing",
    "power cut twice",
    "block comes back after opening",
    "backing device failed for good",
    "checkpoint at a moment of chance",
    "clean cache failed",
    "cache device gone",
    "flush answered by a cache device that is gone",
    "flush answered by a backing device that is gone",
    "cache device unreadable for a while",
    "read to where nobody can look",
    "written to while it was gone",
    "drain in mid-run",
    "drained and compared in mid-run",
    "late answer",
    "mode changed in mid-run",
    "order changed in mid-run",
    "slow backing device",
    "slow cache device",
    "volume attached in mid-run",
    "volume detached in mid-run",
    "volume forgotten",
    "volume's data forgotten",
    "around the log",
    "backing discarded",
    "backing zeroed",
    "block lost",
    "block repaired",
    "cache block rotted",
    "header rotted",
    "header that names a lost block rotted",
    "header written astray",
    "record written astray",
    "write lost",
    "marks in the superblock",
    "rot known",
    "rot clean",
    "cache flush failed",
    "cache flush failed: dropped at once",
    "cache flush failed: nothing dropped",
    "cache flush failed: some of what is dropped shows later",
    "cache flush failed: what is dropped shows later",
    "flush of the superblock failed",
    "flush failed that nobody heard of",
    "flush answered well beside one that failed",
    "what a flush dropped shows",
    "log's end written again",
    "log's end dropped, and its flushes fail",
    "cache write failed",
    "restarted after a cache fault",
    "restarted after a failed flush",
    "cache block unreadable",
    "checkpoint page rotted",
    "clean stop",
    "given up by a stop",
    "handed over",
    "handed over and not taken",
    "opened from a checkpoint",
    "superblock copy rotted",
    "failed flush in the superblock",
    "failed flush remembered",
    "failed flush found in memory",
    "writes around the log dropped",
    "superblock copy rotted that says where the other is",
    "supposed that a header rots",
    "supposed that the last header rots",
    "supposed that two headers rot",
    "superblock block unreadable",
    "killed between calls",
    "killed while opening",
    "killed within a call",
    "log cut",
    "power cut",
    "power cut while opening",
    "redo",
    "second chance",
    "segment reclaimed",
    "superblock repaired",
    "unflushed writes dropped",
    "backing read failed",
    "backing write failed",
    "backing flush failed",
    "write-back waiting",
    "watermark checked",
    "watermark checked before what another order placed",
    "zero block",
    "block refused",
    "block parked",
    "parked block overwritten",
    "parked block written",
    "refused while too much is parked",
];

/// Counters by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    counts: BTreeMap<&'static str, u64>,
}

impl Marks {
    /// Came past `name`.
    pub fn hit(&mut self, name: &'static str) {
        self.add(name, 1);
    }

    /// Came past `name` so many times.
    pub fn add(&mut self, name: &'static str, times: u64) {
        *self.counts.entry(name).or_default() += times;
    }

    /// How often.
    pub fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// Times the machine stopped other than cleanly.
    pub fn crashes(&self) -> u64 {
        [
            "killed between calls",
            "killed within a call",
            "power cut",
            "restarted after a cache fault",
        ]
        .iter()
        .map(|name| self.count(name))
        .sum()
    }

    /// Times the machine stopped while it was opening the cache.
    pub fn crashes_within(&self) -> u64 {
        self.count("killed while opening") + self.count("power cut while opening")
    }

    /// The names that must be there and are not.
    pub fn missing(&self) -> Vec<&'static str> {
        EXPECTED.iter().copied().filter(|name| self.count(name) == 0).collect()
    }

    /// Adds another run's.
    pub fn merge(&mut self, other: &Marks) {
        for (name, times) in &other.counts {
            self.add(name, *times);
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.counts.iter().map(|(name, times)| (*name, *times))
    }
}
