// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Marks: what a run must have come past, so that a rare branch is known to be taken.

use std::collections::BTreeMap;

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
