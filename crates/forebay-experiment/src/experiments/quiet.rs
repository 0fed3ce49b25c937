// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much of the cache device is left for guests while forebay uses it for itself.
//!
//! Guests read blocks that the cache holds, and in half of the runs write as well, at moments of chance that depend on
//! nothing (a Poisson process). How long that takes is compared with a run in which forebay does nothing of its own:
//! while it writes back, reclaims, writes checkpoints one after the other, scrubs without a pause, or copies what
//! other guests miss. The backing device is one that is fast enough to keep the cache device busy.

use super::{SECOND, cached};
use crate::load::{Ask, WRITE, Worker, run};
use crate::machine::{Machine, Setup};
use crate::random::Random;
use crate::tally::Tally;
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;
use forebay_disk::model::GP3;
use forebay_disk::{Model, Nanos};
use std::collections::HashMap;

const MIB: u64 = 1 << 20;
const CACHE_BYTES: u64 = 1 << 30;
const VOLUME_BYTES: u64 = 4 << 30;
/// What guests read and write: the newest that the log holds when the measurement begins.
const HOT_BYTES: u64 = 64 * MIB;
/// Where it is.
const HOT_AT: u64 = 3 << 30;
/// Dirty data elsewhere, for write-back.
const DIRTY_BYTES: u64 = 128 * MIB;
const DIRTY_AT: u64 = 2 << 30;

/// What no log holds.
const COLD_BYTES: u64 = 1 << 30;
const COLD_AT: u64 = 1 << 30;

/// Requests of guests a second: reads, plain writes, and writes that wait until they are durable.
pub const READS: [u64; 3] = [5_000, 0, 0];
/// As many reads, and writes.
pub const MIXED: [u64; 3] = [5_000, 1_000, 50];

/// A checkpoint begins so often, and what comes while it is written counts. One after the other they would
/// end segments faster than guests fill them.
const CHECKPOINT_EVERY: Nanos = SECOND / 50;
/// Requests that do not count.
const OTHERS: usize = 3;

/// What forebay does for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Nothing.
    Nothing,
    /// It reads what it holds.
    Scrub,
    /// It writes its map.
    Checkpoint,
    /// It copies dirty data to the backing device.
    WriteBack,
    /// It gives segments back, and appends again what was read in them.
    Reclaim,
    /// It copies what other guests read from the backing device.
    Fills,
}

impl Doing {
    /// All of it.
    pub const ALL: [Doing; 6] = [
        Doing::Nothing,
        Doing::Scrub,
        Doing::Checkpoint,
        Doing::WriteBack,
        Doing::Reclaim,
        Doing::Fills,
    ];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Doing::Nothing => "quiet",
            Doing::Scrub => "scrub",
            Doing::Checkpoint => "checkpoints",
            Doing::WriteBack => "write-back",
            Doing::Reclaim => "reclaim",
            Doing::Fills => "fills",
        }
    }
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// What forebay did.
    pub doing: Doing,
    /// p50, p99 and p99.9 in milliseconds of reads, writes and durable writes.
    pub latencies: [[f64; 3]; 3],
    /// How much of it was done: blocks scrubbed, checkpoints, blocks written back, segments, fills.
    pub done: u64,
}

/// Requests at moments of chance.
struct Arrivals {
    random: Random,
    /// For each class the time between two, and when the next one comes.
    classes: [(Nanos, Nanos); 3],
}

impl Arrivals {
    fn new(rates: [u64; 3], now: Nanos) -> Arrivals {
        let mut random = Random::new(17);
        let classes = rates.map(|rate| match SECOND.checked_div(rate) {
            Some(mean) => (mean, now + exponential(&mut random, mean)),
            None => (0, Nanos::MAX),
        });
        Arrivals { random, classes }
    }

    fn next(&self) -> Nanos {
        self.classes.iter().map(|class| class.1).min().expect("there are three")
    }

    fn take(&mut self) -> (usize, u64) {
        let next = self.next();
        let class =
            self.classes.iter().position(|class| class.1 == next).expect("it is one of them");
        let (mean, at) = self.classes[class];
        self.classes[class].1 = at + exponential(&mut self.random, mean);
        (class, HOT_AT + self.random.below(HOT_BYTES / BLOCK_BYTES) * BLOCK_BYTES)
    }
}

/// A time of this mean: geometric in steps, and even within one, which is near an exponential one and asks no library.
fn exponential(random: &mut Random, mean: Nanos) -> Nanos {
    // With a chance of 15/16 each to go on there are 15 on average; the last, half of one, makes it 31 halves.
    let mut steps = 0;
    while random.below(16) != 0 {
        steps += 1;
    }
    let step = mean * 2 / 31;
    steps * step + random.below(step + 1)
}

/// Runs the load of `rates` for so long; `also` gives what others ask for, told how much of theirs is under way.
/// What is asked for while `counts` says so counts.
fn measure(
    machine: &mut Machine,
    rates: [u64; 3],
    nanos: Nanos,
    mut also: impl FnMut(&mut Machine, usize),
    counts: impl Fn(&Machine) -> bool,
) -> Tally {
    let begun = machine.now();
    let mut arrivals = Arrivals::new(rates, begun);
    let mut tally = Tally::new(begun, OTHERS + 1);
    let mut asked: HashMap<u32, (usize, Nanos)> = HashMap::new();
    while machine.now() < begun + nanos || !asked.is_empty() {
        if machine.now() < begun + nanos {
            also(machine, machine.under_way() - asked.len());
            while arrivals.next() <= machine.now() {
                let (class, offset) = arrivals.take();
                let op = [Op::Read, WRITE, Op::Write { fua: true }][class];
                let tag = machine.submit(op, offset, BLOCK_BYTES);
                let class = if counts(machine) { class } else { OTHERS };
                asked.insert(tag, (class, machine.now()));
            }
        }
        let until = arrivals.next().min(begun + nanos).max(machine.now() + 1);
        let answered = machine.wait(until).to_vec();
        for tag in answered {
            if let Some((class, since)) = asked.remove(&tag) {
                tally.add(class, BLOCK_BYTES, since, machine.now());
            }
        }
    }
    tally.end(machine.now());
    tally
}

/// Writes or reads a range, 64 KiB at a time.
fn pass(machine: &mut Machine, op: Op, from: u64, bytes: u64) {
    let asks = (0..bytes / (64 << 10)).map(move |at| Ask {
        op,
        offset: from + at * (64 << 10),
        length: 64 << 10,
    });
    run(machine, vec![Worker::through(0, asks)], Nanos::MAX);
}

/// A cache of this kind, with nothing that begins by itself.
pub fn setup(cache: Model) -> Setup {
    let mut setup = cached(Model::Cloud(GP3), VOLUME_BYTES, CACHE_BYTES);
    setup.cache = Some((cache, CACHE_BYTES));
    setup.config.dirty_age = 10_000 * SECOND;
    setup.config.dirty_percent = 100;
    setup
}

/// A machine whose log holds what is to be: old data, clean; some that is dirty; last the hot data.
fn prepared(setup: &Setup, doing: Doing) -> Machine {
    let mut setup = *setup;
    if doing == Doing::WriteBack {
        setup.config.dirty_age = 25 * SECOND;
    }
    let mut machine = Machine::new(&setup);
    let cold = if doing == Doing::Reclaim { CACHE_BYTES } else { CACHE_BYTES / 4 };
    pass(&mut machine, WRITE, 0, cold);
    machine.drain();
    machine.undrain();
    if doing == Doing::Reclaim {
        // What was read gets a second chance.
        pass(&mut machine, Op::Read, 0, cold);
    }
    if doing == Doing::WriteBack {
        let places = Random::new(3).order(4 * DIRTY_BYTES / BLOCK_BYTES);
        let asks = places.into_iter().take((DIRTY_BYTES / BLOCK_BYTES) as usize).map(|at| Ask {
            op: WRITE,
            offset: DIRTY_AT + at * BLOCK_BYTES,
            length: BLOCK_BYTES,
        });
        run(&mut machine, vec![Worker::through(0, asks)], Nanos::MAX);
    }
    pass(&mut machine, WRITE, HOT_AT, HOT_BYTES);
    // Until all of it rests on the device, and a checkpoint is written.
    machine.want_checkpoint();
    let now = machine.now();
    machine.idle(now + 20 * SECOND);
    machine
}

/// What one thing that forebay does costs the guests.
pub fn row(setup: &Setup, rates: [u64; 3], doing: Doing, nanos: Nanos) -> Row {
    let mut machine = prepared(setup, doing);
    let before = progress(&machine, doing);
    let mut random = Random::new(5);
    let mut next = machine.now();
    let also = |machine: &mut Machine, others: usize| match doing {
        Doing::Scrub => machine.scrub(),
        Doing::Checkpoint if machine.now() >= next => {
            next = machine.now() + CHECKPOINT_EVERY;
            machine.want_checkpoint();
        }
        Doing::Checkpoint => {}
        Doing::Fills => {
            // 16 at a time, each of a block that nobody has read yet.
            for _ in others..16 {
                let place = COLD_AT + random.below(COLD_BYTES / BLOCK_BYTES) * BLOCK_BYTES;
                machine.submit(Op::Read, place, BLOCK_BYTES);
            }
        }
        Doing::Nothing | Doing::WriteBack | Doing::Reclaim => {}
    };
    let during = |machine: &Machine| doing != Doing::Checkpoint || machine.is_checkpointing();
    let tally = measure(&mut machine, rates, nanos, also, during);
    let latencies = [0, 1, 2]
        .map(|class| [0.5, 0.99, 0.999].map(|share| tally.classes[class].percentile(share)));
    Row { doing, latencies, done: progress(&machine, doing) - before }
}

fn progress(machine: &Machine, doing: Doing) -> u64 {
    let stats = machine.stats();
    match doing {
        Doing::Nothing => 0,
        Doing::Scrub => machine.scrubbed_blocks(),
        Doing::Checkpoint => machine.checkpoint_count(),
        Doing::WriteBack => stats.backing_blocks_written,
        Doing::Reclaim => stats.reclaimed_segments,
        Doing::Fills => stats.fill_blocks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_mean_that_they_are_to_have() {
        let (mut random, mean, count) = (Random::new(3), 1_000_000, 200_000);
        let sum: Nanos = (0..count).map(|_| exponential(&mut random, mean)).sum();
        assert!((sum / count).abs_diff(mean) < mean / 100, "{}", sum / count);
    }
}
