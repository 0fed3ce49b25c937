// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long a slice may be so that guests' reads are answered in time: `p99_target`.
//!
//! A read that comes while write-back has its turn waits for the end of it, so the longer the slices, the longer the
//! slowest reads take. The target says what 99 of 100 may take. Each read that is in time makes slices a little longer,
//! each that is late makes them 99 times as much shorter: they stay as they are when one in a hundred is late.
//!
//! # Invariants
//!
//! - **G1** A slice is never shorter than [`SLICE_MIN`] and [`SLICE_READS_MIN`] reads, nor longer than [`SLICE_MAX`]: what
//!   waits for its turn must be able to begin in it, or all of the time goes into changing turns. So a target that the
//!   device cannot hold costs no more than one that it can.
//! - **G2** Only reads that shared the device count: what reads take while nothing is written back says nothing.

/// Shorter slices than this would be spent on waiting for what is under way, in nanoseconds.
pub(crate) const SLICE_MIN: u64 = 5_000_000;
/// Nor shorter than so many reads take by themselves.
const SLICE_READS_MIN: u64 = 3;
/// But where so many take longer than this, many wait in the device's own queue, and this is enough.
const SLICE_MIN_MAX: u64 = 100_000_000;
/// Longer ones gain nothing.
pub(crate) const SLICE_MAX: u64 = 200_000_000;
/// A read in time makes slices longer by one part in so many.
const STEP: u64 = 4096;

/// A target for guests' reads, and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// What 99 of 100 reads of the backing device may take, waiting included, in nanoseconds.
    pub nanos: u64,
    /// How long slices are for that, in nanoseconds.
    pub slice: u64,
    /// Reads that counted.
    pub reads: u64,
    /// Of these, those that took longer.
    pub late: u64,
}

impl Target {
    /// A target, from slices of some length on.
    pub(crate) fn new(nanos: u64, slice: u64) -> Target {
        Target { nanos, slice: slice.clamp(SLICE_MIN, SLICE_MAX), reads: 0, late: 0 }
    }

    /// A read that shared the device (G2) took so long since it was asked for, while reads take `read_time` since they began.
    pub(crate) fn read_took(&mut self, nanos: u64, read_time: u64) {
        let step = self.slice / STEP;
        let late = nanos > self.nanos;
        self.reads += 1;
        self.late += u64::from(late);
        let slice = if late { self.slice - 99 * step } else { self.slice + step };
        let least = (SLICE_READS_MIN * read_time).clamp(SLICE_MIN, SLICE_MIN_MAX);
        self.slice = slice.clamp(least, SLICE_MAX); // G1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: u64 = 1_000_000;

    #[test]
    fn slices_are_as_long_as_one_read_in_a_hundred_is_late() {
        let mut target = Target::new(50 * MILLI, 100 * MILLI);
        // A read waits for what is left of a slice, evenly, in one case of ten.
        let mut chance = 0;
        for _ in 0..200_000 {
            chance = (chance + 7) % 1_000;
            let waits = if chance < 100 { target.slice * chance / 100 } else { 0 };
            target.read_took(waits, MILLI);
        }
        // One in ten waits; of these one in ten is to be late.
        let (low, high) = (50 * MILLI, 62 * MILLI);
        assert!((low..=high).contains(&target.slice), "{target:?}");
        assert!(target.late * 80 <= target.reads, "{target:?}");
    }

    #[test]
    fn what_cannot_be_held_ends_at_the_shortest_slice() {
        let mut target = Target::new(MILLI, 100 * MILLI);
        (0..1_000).for_each(|_| target.read_took(2 * MILLI, MILLI));
        assert_eq!(target.slice, SLICE_MIN);
        target.read_took(30 * MILLI, 20 * MILLI);
        assert_eq!(target.slice, 60 * MILLI, "three reads");
        (0..1_000_000).for_each(|_| target.read_took(MILLI, MILLI));
        assert_eq!(target.slice, SLICE_MAX);
    }
}
