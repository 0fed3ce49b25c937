// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When what a log holds was placed: how old dirty data is, and what the backing device is "as of".
//!
//! A sample says: at this time everything up to this sequence was placed, and nothing behind it.
//! There are few, about a second apart, the older ones farther; what lies between two is taken to
//! be as old as the older one, so no age is told that is too low.

use crate::memory::queue_bytes;
use crate::units::{Sequence, Tick};
use alloc::collections::VecDeque;

const SAMPLE_COUNT_MAX: usize = 128;
const APART: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
struct Sample {
    through: Sequence,
    at: Tick,
    wall: u64,
}

/// Samples of one log, the oldest first.
#[derive(Debug)]
pub(crate) struct Times {
    samples: VecDeque<Sample>,
    /// Placed when it was looked last.
    placed: Sequence,
}

impl Times {
    /// No samples yet; everything up to `placed` is of an unknown age.
    pub(crate) fn new(placed: Sequence) -> Times {
        Times { samples: VecDeque::with_capacity(SAMPLE_COUNT_MAX), placed }
    }

    /// Bytes of memory they take.
    pub(crate) fn held_bytes(&self) -> u64 {
        queue_bytes(&self.samples)
    }

    pub(crate) const fn memory_bytes() -> u64 {
        (SAMPLE_COUNT_MAX * size_of::<Sample>()) as u64
    }

    /// Everything up to `placed` is placed now.
    pub(crate) fn note(&mut self, placed: Sequence, now: Tick, wall: u64) {
        if placed == self.placed {
            return;
        }
        let through = core::mem::replace(&mut self.placed, placed);
        if self.samples.back().is_some_and(|last| now.since(last.at) < APART) {
            return;
        }
        if self.samples.len() == SAMPLE_COUNT_MAX {
            // Every second one of the older half goes.
            let mut number = 0;
            self.samples.retain(|_| {
                number += 1;
                number > SAMPLE_COUNT_MAX / 2 || number % 2 == 1
            });
        }
        self.samples.push_back(Sample { through, at: now, wall });
    }

    /// Nothing behind `sequence` was placed before; `None`: not known.
    pub(crate) fn placed_since(&self, sequence: Sequence) -> Option<Tick> {
        self.before(sequence).map(|sample| sample.at)
    }

    /// Wall clock: everything placed before it is up to `sequence`; `None`: not known.
    pub(crate) fn as_of(&self, sequence: Sequence) -> Option<u64> {
        self.before(sequence).map(|sample| sample.wall)
    }

    fn before(&self, sequence: Sequence) -> Option<&Sample> {
        self.samples.iter().rev().find(|sample| sample.through <= sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn second(seconds: u64) -> Tick {
        Tick(seconds * APART)
    }

    #[test]
    fn ages_are_those_of_the_first_entry_behind() {
        let mut times = Times::new(Sequence(10));
        assert_eq!(times.placed_since(Sequence(10)), None);
        // An hour of silence is nobody's age.
        times.note(Sequence(10), second(3600), 3600);
        times.note(Sequence(12), second(3601), 3601);
        times.note(Sequence(13), second(3605), 3605);
        assert_eq!(times.placed_since(Sequence(10)), Some(second(3601)));
        assert_eq!(times.placed_since(Sequence(11)), Some(second(3601)));
        assert_eq!(times.placed_since(Sequence(12)), Some(second(3605)));
        assert_eq!(times.as_of(Sequence(9)), None);
        assert_eq!(times.as_of(Sequence(11)), Some(3601));
        assert_eq!(times.as_of(Sequence(13)), Some(3605));
    }

    #[test]
    fn many_samples_are_thinned_and_err_on_the_old_side() {
        let mut times = Times::new(Sequence(0));
        // Entry n is placed at second n.
        for n in 1..100_000 {
            times.note(Sequence(n), second(n), n);
            assert!(times.samples.len() <= SAMPLE_COUNT_MAX);
        }
        for watermark in (99_000..99_999).step_by(37) {
            let since = times.placed_since(Sequence(watermark)).expect("the first is kept");
            assert!(since <= second(watermark + 1), "{watermark}");
        }
        let last = times.placed_since(Sequence(99_998)).expect("the newest is known");
        assert_eq!(last, second(99_999));
    }
}
