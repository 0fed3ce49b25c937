// SPDX-License-Identifier: Apache-2.0 OR MIT
//! All short histories, in every mode; and faults that they must find.

use forebay_core::format::superblock::Mode;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_sim::exhaustive::{Count, Scope, explore};
use forebay_sim::world::Failure;
use std::panic::catch_unwind;

fn all_of_two_steps(mode: Mode, mutants: Mutants) -> Result<Count, Failure> {
    explore(Scope { length: 2, one_in: 1, stores_length: 2, mode, mutants })
}

#[test]
fn every_history_of_two_steps_survives_every_stop() {
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
        match all_of_two_steps(mode, Mutants::default()) {
            Ok(count) => {
                println!("{mode:?}: {count:?}");
                assert_eq!(count.histories, 20 + 20 * 20);
                assert!(count.states > 1_000, "{count:?}");
            }
            Err(failure) => panic!("{mode:?}: {}", failure.0),
        }
    }
}

#[test]
fn faults_that_two_steps_show_are_found() {
    for mutant in [
        Mutant::SkipCacheFlush,
        Mutant::AnswerFlushBeforeRecords,
        Mutant::AnswerFuaAtOnce,
        Mutant::SkipBackingFlush,
        Mutant::WatermarkBeforeBackingFlush,
        Mutant::BatchKeepsOldest,
        Mutant::SkipPayloadCheck,
        Mutant::IgnoreCut,
        Mutant::ExtentsForgotten,
        Mutant::ExtentAlwaysWins,
        Mutant::IndexNotUpdated,
    ] {
        let outcome = catch_unwind(|| all_of_two_steps(Mode::WriteBack, Mutants::with(mutant)));
        assert!(!matches!(outcome, Ok(Ok(_))), "{mutant:?}");
    }
}
