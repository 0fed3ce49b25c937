// SPDX-License-Identifier: Apache-2.0 OR MIT
//! forebay keeps the right blocks: no more misses than LRU, but where the same blocks are written again and again.

use forebay_experiment::experiments::misses::{self, Row};
use forebay_experiment::workload::{Mix, zipf};

/// Where reads alone decide, or scan: no more misses than LRU, at any size, and few blocks are copied.
#[test]
fn it_misses_no_more_than_lru() {
    let mix = Mix { blocks: 20_000, skew: 0.9, writes: 0, scan: 0 };
    for (name, mix) in [("zipf", mix), ("scan", Mix { scan: 11, ..mix })] {
        let asks = zipf(mix, 100_000);
        for percent in misses::PERCENTS {
            let row = misses::row(name, &asks, percent);
            assert!(row.over_lru() <= 1.0, "{row:?}");
            assert!(row.copied <= 0.5, "{row:?}");
        }
    }
}

/// A row of bench/results/experiments.txt: no machine's own arithmetic has a say in a digit.
#[test]
fn the_digits_are_the_same_on_every_machine() {
    let (name, mix) = misses::mixes()[1];
    let row = misses::row(name, &zipf(mix, 500_000), 1);
    let digits = row.misses.map(|it| format!("{it:.4}"));
    assert_eq!((name, row.blocks), ("zipf 1.0", 411));
    assert_eq!(digits, ["0.5443", "0.5878", "0.4433", "0.5014"], "{row:?}");
}

/// A guest's own disk: the trace of `FOREBAY_TRACE` (0.999, 0.958, 0.893, 0.813), or one that is made up like it (1.000, 0.980, 0.947, 0.948).
#[test]
fn it_misses_no_more_than_lru_on_a_trace() {
    let (name, asks) = misses::traced().expect("FOREBAY_TRACE is a trace, if it is there");
    println!("{name}: {} requests", asks.len());
    for percent in misses::PERCENTS {
        let row = misses::row(&name, &asks, percent);
        // A hundredth of what is touched is too little for any choice: all are the same there.
        let bound = if percent == 1 { 1.002 } else { 1.0 };
        assert!(row.over_lru() <= bound, "{row:?}");
    }
}

/// What is written again and again is in a log more than once: it may cost some misses, not many.
#[test]
fn writes_to_the_same_blocks_cost_few_misses() {
    let mix = Mix { blocks: 20_000, skew: 0.9, writes: 30, scan: 0 };
    let asks = zipf(mix, 100_000);
    let rows = misses::PERCENTS.map(|percent| misses::row("writes", &asks, percent));
    assert!(rows.iter().all(|row: &Row| row.over_lru() <= 1.2), "{rows:?}");
}
