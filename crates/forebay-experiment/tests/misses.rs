// SPDX-License-Identifier: Apache-2.0 OR MIT
//! forebay keeps the right blocks: never many more misses than LRU, fewer where reads come back or scan.

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

/// A guest's own disk: the trace of `FOREBAY_TRACE`, or one that is made up, on which it is a little worse.
#[test]
fn it_misses_hardly_more_than_lru_on_a_trace() {
    let (name, asks) = misses::traced().expect("FOREBAY_TRACE is a trace, if it is there");
    println!("{name}: {} requests", asks.len());
    for percent in misses::PERCENTS {
        let row = misses::row(&name, &asks, percent);
        let bound = match (name.as_str(), percent) {
            // A hundredth of what is touched is too little for any choice: all are the same there.
            ("trace", 1) => 1.002,
            ("trace", _) => 1.0,
            // Reads that come back for a while, which LRU is made for.
            _ => 1.05,
        };
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
