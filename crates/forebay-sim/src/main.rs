// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs seeds, hunts deliberate faults, or goes through all short histories.

use clap::Parser;
use forebay_core::format::superblock::Mode;
use forebay_core::mutant::{self, Mutant, Mutants};
use forebay_sim::each::each;
use forebay_sim::exhaustive::{Scope, explore};
use forebay_sim::marks::Marks;
use forebay_sim::mutants;
use forebay_sim::run::run_with;
use forebay_sim::setup::Setup;
use std::process::ExitCode;
use std::thread::available_parallelism;
use std::time::Instant;

/// A run of so many seeds must come past every mark.
const MARKS_FROM: u64 = 500;

/// The whole engine on simulated devices and a simulated clock: each seed is a run with crashes and faults, compared with a
/// model of a disk. Ends with the counts of what was come past, and of what failed.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// So many seeds
    #[arg(long, value_name = "N", default_value_t = 100)]
    seeds: u64,
    /// The first of them
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    from: u64,
    /// Only this seed
    #[arg(long, value_name = "SEED", group = "what")]
    seed: Option<u64>,
    /// Only this seed, and what happens in it
    #[arg(long, value_name = "SEED", group = "what")]
    tell: Option<u64>,
    /// Which of so many seeds finds each deliberate fault: a table
    #[arg(long, value_name = "N", groups = ["what", "tables"])]
    mutants: Option<u64>,
    /// The same with 1000 seeds, for those that have this in their name; a test is named only where no seed finds one
    #[arg(long, value_name = "NAME", group = "what")]
    mutant: Option<String>,
    /// Every history of so many steps, with every crash point
    #[arg(long, value_name = "STEPS", groups = ["what", "tables"])]
    exhaustive: Option<usize>,
    /// Of the longest histories, or of the deliberate faults, only one in so many; of these from the one on whose number `--from` says
    #[arg(long, value_name = "N", default_value_t = 1, requires = "tables", value_parser = clap::value_parser!(u64).range(1..))]
    one_in: u64,
    /// Segments of so many KiB, with larger requests, batches and volumes, in the place of 64 KiB
    #[arg(long, value_name = "KIB", value_parser = clap::value_parser!(u32).range(128..=4096))]
    segments: Option<u32>,
    /// Some hundred segments, with larger requests, batches and volumes, in the place of 18 to 32
    #[arg(long, conflicts_with = "segments")]
    many: bool,
    /// 8 to 20 volumes, with hardly more segments and buffers than they need, in the place of 2 or 3
    #[arg(long, conflicts_with_all = ["segments", "many"])]
    crowd: bool,
    /// So many runs at once; as many as there are processors if it is not given
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

/// What caches the seeds have.
#[derive(Clone, Copy)]
enum Shape {
    /// Of few short segments.
    Small,
    /// Of few segments of so many KiB.
    Long(u32),
    /// Of many short ones.
    Many,
    /// Of few for many volumes.
    Crowd,
}

impl Shape {
    /// What asks for it.
    fn argument(self) -> String {
        match self {
            Shape::Small => String::new(),
            Shape::Long(kib) => format!(" --segments {kib}"),
            Shape::Many => " --many".into(),
            Shape::Crowd => " --crowd".into(),
        }
    }

    /// Makes such a cache of a seed's.
    fn of(self, setup: &mut Setup) {
        match self {
            Shape::Small => {}
            Shape::Long(kib) => setup.enlarge(kib << 10),
            Shape::Many => setup.multiply(),
            Shape::Crowd => setup.crowd(),
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Arguments {
        seeds,
        from,
        seed,
        tell,
        mutants,
        mutant,
        exhaustive,
        one_in,
        segments,
        many,
        crowd,
        jobs,
    } = arguments;
    let shape = match segments {
        Some(kib) => Shape::Long(kib),
        None if many => Shape::Many,
        None if crowd => Shape::Crowd,
        None => Shape::Small,
    };
    let jobs = jobs.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
    if let Some(length) = exhaustive {
        return all_histories(length, one_in, jobs);
    }
    if let Some(name) = mutant {
        let named = |mutant: &Mutant| format!("{mutant:?}").contains(&name);
        return hunt(1000, shape, jobs, mutant::ALL.iter().copied().filter(named).collect(), false);
    }
    if let Some(seeds) = mutants {
        let some = mutant::ALL.iter().copied().skip((from % one_in) as usize);
        return hunt(seeds, shape, jobs, some.step_by(one_in as usize).collect(), true);
    }
    match seed.or(tell) {
        Some(seed) => run(seed, 1, shape, 1, tell.is_some()),
        None => run(from, seeds, shape, jobs, false),
    }
}

/// So many seeds, from one on, told of in their order. What a process left unanswered comes again to the next one.
fn run(from: u64, seeds: u64, shape: Shape, jobs: usize, tell: bool) -> ExitCode {
    let begun = Instant::now();
    let mut marks = Marks::default();
    let mut failed = 0;
    let reproduce = format!("cargo run -p forebay-sim --{}", shape.argument());
    each(
        from..from + seeds,
        jobs,
        |seed| {
            run_with(seed, Mutants::default(), |setup| {
                (setup.tell, setup.comes_again) = (tell, true);
                shape.of(setup);
            })
        },
        |seed, outcome| match outcome {
            Some(Ok(report)) => {
                // A log of long segments, or of many, or one of many logs, goes round less often in as many requests.
                let lacks = if let Shape::Small = shape { report.lacks() } else { Vec::new() };
                if !lacks.is_empty() {
                    failed += 1;
                    println!("seed {seed}: not worth being called a run, it lacks {lacks:?}");
                }
                marks.merge(&report.marks);
            }
            Some(Err(failure)) => {
                failed += 1;
                println!("seed {seed}: {}", failure.0);
                println!("    reproduce: {reproduce} --seed {seed}");
            }
            None => {
                failed += 1;
                println!("seed {seed}: panicked");
                println!("    reproduce: {reproduce} --seed {seed}");
            }
        },
    );
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

/// The table of these deliberate faults, as `docs/mutants.md` has it: by which seed each is found, or by which test. Seeds are run for
/// those too of which a test tells the story, unless `tests_will_do`.
fn hunt(seeds: u64, shape: Shape, jobs: usize, all: Vec<Mutant>, tests_will_do: bool) -> ExitCode {
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = 0;
    let by_seed = |mutant| {
        mutants::hunt(mutant, seeds, &|setup| shape.of(setup)).map(|seed| seed.to_string())
    };
    let find = |mutant| {
        let story = match shape {
            Shape::Small => mutants::story(mutant).map(|test| format!("`{test}`")),
            _ => None,
        };
        match tests_will_do {
            true => story.or_else(|| by_seed(mutant)),
            false => by_seed(mutant).or(story),
        }
    };
    println!("| mutant | first seed that fails |\n|---|---|");
    let hunted = |at| find(all[at as usize]);
    each(0..all.len() as u64, jobs, hunted, |at, found| {
        let found = found.flatten();
        missed += u64::from(found.is_none());
        let found = found.unwrap_or_else(|| format!("not found in {seeds}"));
        println!("| `{:?}` | {found} |", all[at as usize]);
    });
    println!("\n{} passed, {missed} failed", all.len() as u64 - missed);
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Every history of write-back up to a length (of the longest ones one in so many), and of the other
/// modes up to one step less.
fn all_histories(length: usize, one_in: u64, jobs: usize) -> ExitCode {
    const MODES: [Mode; 3] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround];
    let begun = Instant::now();
    let scope = |mode| {
        let back = mode == Mode::WriteBack;
        let length = if back { length } else { length.saturating_sub(1) };
        let one_in = if back { one_in } else { 1 };
        let stores_length = length.saturating_sub(1);
        Scope { length, one_in, stores_length, mode, mutants: Mutants::default() }
    };
    let mut failed = 0;
    each(
        0..3,
        jobs,
        |at| explore(scope(MODES[at as usize])),
        |at, outcome| {
            let mode = MODES[at as usize];
            let Scope { length, .. } = scope(mode);
            match outcome {
                Some(Ok(count)) => println!(
                    "{mode:?}: {} histories of up to {length} steps, {} stops, {} outcomes, {} states \
                 compared, after {:.1} s",
                    count.histories,
                    count.points,
                    count.left,
                    count.states,
                    begun.elapsed().as_secs_f64()
                ),
                Some(Err(failure)) => {
                    failed += 1;
                    println!("{mode:?}: {}", failure.0);
                }
                None => {
                    failed += 1;
                    println!("{mode:?}: panicked");
                }
            }
        },
    );
    println!("{} passed, {failed} failed", 3 - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
