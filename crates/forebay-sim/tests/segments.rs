// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Segments as long as `format` makes them. Seeds have such of 64 KiB, in which the log goes round soon; the longest record of data has
//! 15 blocks there, and no write of a record is as long as it is on a real cache.

use forebay_core::mutant::Mutants;
use forebay_sim::each::each;
use forebay_sim::flight::FULL_RECORD;
use forebay_sim::marks::Marks;
use forebay_sim::run::run_with;
use std::thread::available_parallelism;

/// Some runs that pass, of each a crash and a crash while opening, and records of 127 blocks in one of them at least.
fn runs_pass(segment_bytes: u32, seeds: std::ops::Range<u64>) {
    let mut marks = Marks::default();
    each(
        seeds,
        available_parallelism().map_or(1, usize::from),
        |seed| {
            run_with(seed, Mutants::default(), |setup| {
                setup.comes_again = true;
                setup.enlarge(segment_bytes);
            })
        },
        |seed, outcome| match outcome {
            Some(Ok(report)) => {
                let crashes = report.marks.crashes() > 0 && report.marks.crashes_within() > 0;
                assert!(crashes, "seed {seed}");
                marks.merge(&report.marks);
            }
            Some(Err(failure)) => panic!("seed {seed}: {}", failure.0),
            None => panic!("seed {seed} panicked"),
        },
    );
    assert!(marks.count(FULL_RECORD) > 0);
}

/// The usual ones: a segment is one full record.
#[test]
fn segments_of_512_kib_that_one_full_record_fills() {
    runs_pass(512 << 10, 0..24);
}

/// Full records follow each other in one segment.
#[test]
fn segments_of_1_mib_with_full_records_one_behind_the_other() {
    runs_pass(1 << 20, 8..14);
}
