// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Never slower than the bare disk: IOzone's thirteen tests on a file of twice the cache, without a page cache.
//!
//! One test after the other on the same file, one record under way at a time, as IOzone does it, or as many as a disk's
//! queue takes, each test of writes ended by a flush. What the cache has not written back is drained once, in the end, and counted for the whole
//! history.

use super::{MIB, SECOND, bare, cached, ordered};
use crate::load::{Ask, WRITE, Worker, run, shared};
use crate::machine::{Machine, Setup};
use crate::random::Random;
use forebay_core::format::superblock::Order;
use forebay_core::request::Op;
use forebay_disk::Nanos;
use forebay_disk::hdd::Spec;

/// The tests, in IOzone's order.
pub const TESTS: [&str; 13] = [
    "write",
    "rewrite",
    "read",
    "reread",
    "random read",
    "random write",
    "backward read",
    "record rewrite",
    "stride read",
    "fwrite",
    "frewrite",
    "fread",
    "freread",
];

/// Seconds that each test took, and the final drain.
#[derive(Clone, Debug)]
pub struct History {
    /// By test.
    pub seconds: [f64; 13],
    /// Writing the rest back.
    pub drained: f64,
}

impl History {
    /// From the first request to everything on the disk.
    pub fn total(&self) -> f64 {
        self.seconds.iter().sum::<f64>() + self.drained
    }
}

/// Of each test, the bare disk's time over forebay's.
pub fn rates([bare, through]: &[History; 2]) -> [f64; 13] {
    std::array::from_fn(|at| bare.seconds[at] / through.seconds[at])
}

/// Records of a file, in the order of a test.
fn order(test: &str, count: u64) -> Vec<u64> {
    let mut random = Random::new(13);
    match test {
        "random read" | "random write" => (0..count).map(|_| random.below(count)).collect(),
        "backward read" => (0..count).rev().collect(),
        "record rewrite" => vec![count / 2; count as usize],
        // Every seventeenth record, then from the start again, one further.
        "stride read" => (0..17).flat_map(|from| (from..count).step_by(17)).collect(),
        _ => (0..count).collect(),
    }
}

/// What is in the cache when a test begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// What the tests before left.
    AsItIs,
    /// As much dirty data as random writes of 4 KiB behind the file make in a minute.
    Full,
    /// All of its space is dirty: so much was written behind the file, on a new machine for each test, that the next write
    /// would wait for write-back.
    Brim,
    /// The same of the file itself: each other block of it, by chance.
    BrimOfFile,
}

/// Writers fill the cache for as long.
const FILL: Nanos = 60 * SECOND;

fn fill(machine: &mut Machine, file_bytes: u64) {
    let writer = |seed| {
        let mut random = Random::new(seed);
        let blocks = file_bytes / 4096;
        let next = move || {
            let offset = file_bytes + random.below(blocks) * 4096;
            Some(Ask { op: WRITE, offset, length: 4096 })
        };
        Worker { class: 0, next: Box::new(next) }
    };
    let until = machine.now() + FILL;
    run(machine, (0..32).map(writer).collect(), until);
}

/// What makes a cache full: random blocks of a half of so many bytes, each once, and of the other half a MiB at a time.
fn filling(first: u64, bytes: u64) -> impl Iterator<Item = Ask> {
    let places = move |length: u64, seed| {
        let order = Random::new(seed).order(bytes / 2 / length);
        order.into_iter().map(move |place| Ask {
            op: WRITE,
            offset: first + place * length,
            length,
        })
    };
    let rest = places(MIB, 6).map(move |ask| Ask { offset: ask.offset + bytes / 2, ..ask });
    // No more blocks than come in before writers are delayed: then each request waits as long as any other.
    places(4096, 5).take((bytes / 4096 / 4) as usize).chain(rest)
}

/// A machine with the cache full of dirty data, since nothing was written back: the next write would wait. With `until`, the
/// request that would is not made; gives its number.
fn brim(setup: &Setup, first: u64, bytes: u64, until: usize) -> (Machine, usize) {
    let mut machine = Machine::new(&Setup { order: Order::Batch, ..*setup });
    machine.hold();
    let mut answered = until;
    for (at, Ask { op, offset, length }) in filling(first, bytes).take(until).enumerate() {
        machine.submit(op, offset, length);
        // Nothing but room takes so long.
        let patience = machine.now() + SECOND;
        if machine.step(patience).is_none() {
            answered = at;
            break;
        }
    }
    machine.set_order(setup.order);
    machine.let_go();
    (machine, answered)
}

fn history(setup: &Setup, load: Load) -> History {
    let Load { start, depth, file_bytes, record_bytes, .. } = load;
    let first = if start == Start::BrimOfFile { 0 } else { file_bytes };
    let brims = matches!(start, Start::Brim | Start::BrimOfFile);
    let room =
        (brims && setup.cache.is_some()).then(|| brim(setup, first, file_bytes, usize::MAX).1);
    let mut machine = Machine::new(setup);
    let mut seconds = [0.0; 13];
    for (test, seconds) in TESTS.into_iter().zip(&mut seconds) {
        if brims {
            machine = Machine::new(setup);
        }
        if let Some(room) = room {
            machine = brim(setup, first, file_bytes, room).0;
        }
        let op = if test.contains("write") { WRITE } else { Op::Read };
        let record = |at: u64| Ask { op, offset: at * record_bytes, length: record_bytes };
        let asks = order(test, file_bytes / record_bytes).into_iter().map(record).collect();
        if start == Start::Full && setup.cache.is_some() {
            fill(&mut machine, file_bytes);
        }
        *seconds = run(&mut machine, shared(0, depth, asks), Nanos::MAX).seconds();
        if op == WRITE {
            let flush = vec![Ask { op: Op::Flush, offset: 0, length: 0 }];
            *seconds += run(&mut machine, shared(0, 1, flush), Nanos::MAX).seconds();
        }
    }
    let drained = machine.drain() as f64 / SECOND as f64;
    History { seconds, drained }
}

/// What part of the cache is dirty when the tests begin with all of its space dirty.
pub fn brim_share(spec: Spec, file_bytes: u64) -> f64 {
    let setup = cached(ordered(spec), 2 * file_bytes, file_bytes / 2);
    let (machine, _) = brim(&setup, file_bytes, file_bytes, usize::MAX);
    machine.dirty_bytes() as f64 / (file_bytes / 2) as f64
}

/// What is asked, and how.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What is in the cache before.
    pub start: Start,
    /// So many records at once.
    pub depth: usize,
    /// Twice the cache.
    pub file_bytes: u64,
    /// Of a record.
    pub record_bytes: u64,
    /// The order is relaxed, not batch.
    pub relaxed: bool,
}

/// The bare disk's history, and forebay's.
pub fn compare(spec: Spec, load: Load) -> [History; 2] {
    let disk = ordered(spec);
    let order = if load.relaxed { Order::Relaxed } else { Order::Batch };
    // Behind the file there is as much again.
    let volume = 2 * load.file_bytes;
    let through = cached(disk, volume, (load.file_bytes / 2).max(64 * MIB));
    [bare(disk, volume), Setup { order, ..through }].map(|setup| history(&setup, load))
}
