// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Numbers that look like chance and are the same in every run (splitmix64).

use std::collections::HashSet;

/// A generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        ((u128::from(x) * u128::from(bound)) >> 64) as u64
    }

    /// So many numbers below `bound`, each once, in an order of chance.
    pub fn some(&mut self, bound: u64, count: u64) -> Vec<u64> {
        let mut taken = HashSet::new();
        let all = std::iter::repeat_with(|| self.below(bound)).filter(|it| taken.insert(*it));
        all.take(count as usize).collect()
    }

    /// All numbers below `count`, in an order of chance.
    pub fn order(&mut self, count: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..count).collect();
        for at in (1..all.len()).rev() {
            all.swap(at, self.below(at as u64 + 1) as usize);
        }
        all
    }
}
