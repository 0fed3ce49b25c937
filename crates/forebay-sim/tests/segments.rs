// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Segments as long as `format` makes them, more of them, and hardly enough for many volumes. Seeds have such of 64 KiB, in which the log goes round soon; the longest record of
//! data has 15 blocks there, and no write of a record is as long as it is on a real cache. They have 32 at most: the map is written
//! at once there, and an opening reads all headers in one go.

use forebay_core::mutant::Mutants;
use forebay_sim::each::each;
use forebay_sim::flight::FULL_RECORD;
use forebay_sim::marks::Marks;
use forebay_sim::run::run_with;
use forebay_sim::setup::Setup;
use std::thread::available_parallelism;

/// Some runs that pass, of each a crash and a crash while opening.
fn runs_pass(seeds: std::ops::Range<u64>, change: impl Fn(&mut Setup) + Sync) -> Marks {
    let mut marks = Marks::default();
    each(
        seeds,
        available_parallelism().map_or(1, usize::from),
        |seed| {
            run_with(seed, Mutants::default(), |setup| {
                setup.comes_again = true;
                change(setup);
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
    marks
}

/// Some of whose records have 127 blocks.
fn full_records(seeds: std::ops::Range<u64>, segment_bytes: u32) {
    let marks = runs_pass(seeds, |setup| setup.enlarge(segment_bytes));
    assert!(marks.count(FULL_RECORD) > 0);
}

/// The usual ones: a segment is one full record.
#[test]
fn segments_of_512_kib_that_one_full_record_fills() {
    full_records(0..24, 512 << 10);
}

/// Full records follow each other in one segment.
#[test]
fn segments_of_1_mib_with_full_records_one_behind_the_other() {
    full_records(8..14, 1 << 20);
}

/// A cache of some hundred, and volumes as large.
#[test]
fn caches_of_many_segments_whose_map_takes_many_writes() {
    let marks = runs_pass(0..6, |setup| setup.multiply());
    assert!(marks.count("checkpoint named") > 0 && marks.count("opened from a checkpoint") > 0);
}

/// Caches with as many volumes as they have room for, or nearly, and often fewer buffers than volumes. A write that was refused a segment while
/// there was no buffer either was taken for one that only waits for a buffer: nobody wrote back, or gave, what it waited for, and
/// nothing went on (1, 8, 15).
#[test]
fn caches_of_many_volumes_with_few_segments_and_buffers() {
    let marks = runs_pass(0..16, |setup| setup.crowd());
    assert!(marks.count("segment reclaimed") > 0);
}
