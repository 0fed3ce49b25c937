// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many seeds at once: no run knows of another.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

/// Does something for each seed, so many at once, and hands over what came of each in their order; none: it panicked.
pub fn each<T: Send>(
    seeds: Range<u64>,
    jobs: usize,
    work: impl Fn(u64) -> T + Sync,
    mut done: impl FnMut(u64, Option<T>),
) {
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            let sender = sender.clone();
            let (next, work) = (&next, &work);
            scope.spawn(move || {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let outcome = catch_unwind(AssertUnwindSafe(|| work(seed))).ok();
                    if sender.send((seed, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut ahead = BTreeMap::new();
        let mut turn = seeds.start;
        for (seed, outcome) in receiver {
            ahead.insert(seed, outcome);
            while let Some(outcome) = ahead.remove(&turn) {
                done(turn, outcome);
                turn += 1;
            }
        }
    });
}
