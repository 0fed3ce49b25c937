// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulation on every push: some hundred seeds, twice the same, and faults that must be found.

use forebay_core::mutant::{ALL, Mutant, Mutants};
use forebay_sim::each::each;
use forebay_sim::marks::Marks;
use forebay_sim::mutants::hunt;
use forebay_sim::run::{run, run_with};
use std::thread::available_parallelism;

#[test]
fn seeds_pass_and_come_past_every_mark() {
    let mut marks = Marks::default();
    let jobs = available_parallelism().map_or(1, usize::from);
    each(
        0..250,
        jobs,
        |seed| run_with(seed, Mutants::default(), |setup| setup.comes_again = true),
        |seed, outcome| match outcome {
            Some(Ok(report)) => {
                // What is worth being called a run.
                assert_eq!(report.lacks(), Vec::<&str>::new(), "seed {seed}");
                marks.merge(&report.marks);
            }
            Some(Err(failure)) => {
                panic!("cargo run -p forebay-sim -- --seed {seed}\n{}", failure.0)
            }
            None => panic!("cargo run -p forebay-sim -- --seed {seed}\npanicked"),
        },
    );
    assert_eq!(marks.missing(), Vec::<&str>::new(), "nobody came past these");
}

#[test]
fn the_same_seed_does_the_same() {
    for seed in 1..4 {
        let first = run(seed, Mutants::default()).expect("it passes");
        assert_eq!(Ok(first), run(seed, Mutants::default()).map_err(|failure| failure.0));
    }
}

/// Long runs failed on these, which the simulator itself had wrong: a write was lost of the newest segment's first record, since an older
/// volume of the same index had records of higher segments (6170); and a volume gave of what it has reserved to the growth of one that had a
/// single segment, which is as good as a write (6639).
#[test]
fn what_nobody_can_tell_is_not_done_and_what_waits_is_known() {
    for seed in [6170, 6639] {
        run(seed, Mutants::default()).expect("it passes");
    }
}

#[test]
fn faults_that_any_run_should_find_are_found() {
    for mutant in [Mutant::SkipCacheFlush, Mutant::EdgeNotLocked, Mutant::ReclaimDirty] {
        assert!(hunt(mutant, 10, &|_| ()).is_some(), "{mutant:?}");
    }
}

/// The power seldom fails in the millisecond in which these show: what the engine did is compared instead
/// (`checkers/rests_on_what_is_durable.rs`).
#[test]
fn what_rests_on_a_flush_that_has_not_been_is_found_without_a_power_cut() {
    use Mutant::{CheckpointUnflushed, FreeBeforeTailDurable, MarksBeforeDurable};
    for mutant in [CheckpointUnflushed, FreeBeforeTailDurable, MarksBeforeDurable] {
        assert!(hunt(mutant, 100, &|_| ()).is_some(), "{mutant:?}");
    }
}

#[test]
fn the_table_of_mutants_has_each_and_no_other() {
    let table = include_str!("../../../docs/mutants.md");
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let named: Vec<Mutant> =
        rows.map(|name| *ALL.iter().find(|it| format!("{it:?}") == name).expect(name)).collect();
    assert_eq!(named, ALL, "docs/mutants.md, in the order of the code");
}
