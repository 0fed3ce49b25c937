// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two volumes on one disk: does anybody starve whose neighbour is written back?
//!
//! As in [`super::fair`], but readers and writers each have a volume of their own, side by side on the disk: or both
//! volumes have both. The engine knows that it is one disk, or takes each volume for a disk.

use super::cached;
use super::fair::{CACHE_BYTES, MEASURED, Sides, WARM, WRITERS};
use crate::load::{Ask, WRITE, Worker, run};
use crate::machine::{Machine, Setup};
use crate::random::Random;
use forebay_core::request::Op;
use forebay_disk::Model;

const SPAN: u64 = 2 * CACHE_BYTES;

/// Who does what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// One volume is read, the other is written.
    Apart,
    /// Both volumes are read and written.
    Mixed,
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Readers in all.
    pub readers: usize,
    /// Who does what.
    pub load: Load,
    /// The engine knows that it is one disk.
    pub one_disk: bool,
    /// Reads and writes.
    pub sides: Sides,
    /// Of reads, together, in milliseconds.
    pub read_p99: f64,
}

/// Random places of one of the volumes.
fn worker(class: usize, op: Op, volume: u64, seed: u64) -> Worker {
    let mut random = Random::new(seed);
    let mut place = move || volume * SPAN + random.below(SPAN / 4096) * 4096;
    Worker { class, next: Box::new(move || Some(Ask { op, offset: place(), length: 4096 })) }
}

fn workers(class: usize, op: Op, count: usize, load: Load) -> impl Iterator<Item = Worker> {
    (0..count).map(move |at| {
        let volume = match load {
            Load::Apart => class,
            Load::Mixed => at % 2,
        };
        worker(class, op, volume as u64, (class * 1_000 + at) as u64)
    })
}

fn measure(
    backing: Model,
    load: Load,
    one_disk: bool,
    [readers, writers]: [usize; 2],
) -> ([f64; 2], f64) {
    let one = cached(backing, SPAN, CACHE_BYTES);
    let mut setup = Setup { volumes: 2, one_disk, ..one };
    setup.config.fill_run_max = 0;
    let mut machine = Machine::new(&setup);
    let all = || {
        let idle = Worker { class: 1, next: Box::new(|| None) };
        let reads = workers(0, Op::Read, readers, load);
        reads.chain(workers(1, WRITE, writers, load)).chain([idle]).collect()
    };
    run(&mut machine, all(), WARM);
    let tally = run(&mut machine, all(), WARM + MEASURED);
    ([tally.rate(0), tally.rate(1)], tally.classes[0].percentile(0.99))
}

/// The rows of a disk: each load with one reader, 4 and 16 (mixed: 2, 4 and 16), first as if there were two disks.
pub fn table(backing: Model) -> Vec<Row> {
    let mut rows = Vec::new();
    for (load, counts) in [(Load::Apart, [1, 4, 16]), (Load::Mixed, [2, 4, 16])] {
        let writes = measure(backing, load, true, [0, WRITERS]).0[1];
        for readers in counts {
            let reads = measure(backing, load, true, [readers, 0]).0[0];
            let together = |one_disk| together(backing, load, one_disk, readers, [reads, writes]);
            rows.extend([false, true].map(together));
        }
    }
    rows
}

/// One row with the engine knowing.
pub fn row(backing: Model, load: Load, readers: usize) -> Row {
    let writes = measure(backing, load, true, [0, WRITERS]).0[1];
    let reads = measure(backing, load, true, [readers, 0]).0[0];
    together(backing, load, true, readers, [reads, writes])
}

fn together(backing: Model, load: Load, one_disk: bool, readers: usize, alone: [f64; 2]) -> Row {
    let (together, read_p99) = measure(backing, load, one_disk, [readers, WRITERS]);
    Row { readers, load, one_disk, sides: Sides { alone, together }, read_p99 }
}
