// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs seeds: `forebay-sim --seeds N [--from K] [--seed S] [--tell S] [--mutants N]
//! [--mutant NAME] [--exhaustive LENGTH]`.

use forebay_core::format::superblock::Mode;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_sim::exhaustive::{Scope, explore};
use forebay_sim::marks::Marks;
use forebay_sim::run::run_and;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// A run of so many seeds must come past every mark.
const MARKS_FROM: u64 = 500;

fn main() -> ExitCode {
    let (mut seeds, mut from) = (100, 0);
    let mut tell = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next();
        if let ("--mutant", Some(mutant)) = (name.as_str(), &value) {
            return mutants(1000, mutant);
        }
        let value = value.and_then(|value| value.parse::<u64>().ok());
        match (name.as_str(), value) {
            ("--seeds", Some(value)) => seeds = value,
            ("--from", Some(value)) => from = value,
            ("--seed", Some(value)) => (from, seeds) = (value, 1),
            ("--mutants", Some(value)) => return mutants(value, ""),
            ("--exhaustive", Some(value)) => return exhaustive(value as usize),
            ("--tell", Some(value)) => (from, seeds, tell) = (value, 1, true),
            _ => {
                eprintln!(
                    "usage: forebay-sim --seeds N [--from K] [--seed S] [--tell S] [--mutants N] \
                     [--mutant NAME] [--exhaustive LENGTH]"
                );
                return ExitCode::from(2);
            }
        }
    }
    let begun = Instant::now();
    let mut marks = Marks::default();
    let mut failed = 0;
    for seed in from..from + seeds {
        let outcome = catch_unwind(AssertUnwindSafe(|| run_and(seed, Mutants::default(), tell)));
        match outcome {
            Ok(Ok(report)) => {
                let lacks = report.lacks();
                if !lacks.is_empty() {
                    failed += 1;
                    println!("seed {seed}: not worth being called a run, it lacks {lacks:?}");
                }
                marks.merge(&report.marks);
            }
            Ok(Err(failure)) => {
                failed += 1;
                println!("seed {seed}: {}", failure.0);
                println!("    reproduce: cargo run -p forebay-sim -- --seed {seed}");
            }
            Err(_) => {
                failed += 1;
                println!("seed {seed}: panicked");
                println!("    reproduce: cargo run -p forebay-sim -- --seed {seed}");
            }
        }
    }
    for (name, times) in marks.iter() {
        println!("{times:>10}  {name}");
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{} passed, {failed} failed in {seconds:.1} s", seeds - failed);
    let missing = if seeds >= MARKS_FROM { marks.missing() } else { Vec::new() };
    if !missing.is_empty() {
        println!("never came past: {missing:?}");
    }
    if failed == 0 && missing.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The table of deliberate faults whose name has `part` in it: who is found, by which seed, in
/// which time.
fn mutants(seeds: u64, part: &str) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = 0;
    let named = |mutant: &Mutant| format!("{mutant:?}").contains(part);
    for mutant in forebay_sim::mutants::ALL.into_iter().filter(named) {
        let (seed, seconds) = forebay_sim::mutants::hunt(mutant, seeds);
        match seed {
            Some(seed) => println!("{mutant:?} | seed {seed} | {seconds:.1} s"),
            None => {
                missed += 1;
                println!("{mutant:?} | not found in {seeds} | {seconds:.1} s");
            }
        }
    }
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Every history of write-back up to a length, and of the other modes up to one step less.
fn exhaustive(length: usize) -> ExitCode {
    let mut failed = 0;
    for mode in [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround] {
        let begun = Instant::now();
        let length = if mode == Mode::WriteBack { length } else { length.saturating_sub(1) };
        let stores_length = length.saturating_sub(1);
        let scope = Scope { length, stores_length, mode, mutants: Mutants::default() };
        match explore(scope) {
            Ok(count) => println!(
                "{mode:?}: {} histories of up to {length} steps, {} stops, {} outcomes, {} states \
                 compared in {:.1} s",
                count.histories,
                count.points,
                count.left,
                count.states,
                begun.elapsed().as_secs_f64()
            ),
            Err(failure) => {
                failed += 1;
                println!("{mode:?}: {}", failure.0);
            }
        }
    }
    println!("{} passed, {failed} failed", 3 - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
