// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cliff: an hour of random writes, half as many again as write-back drains, and what the guest has each second
//! when the cache is full.
//!
//! 32 workers over four times the cache. How fast it drains is measured first, with workers that ask as soon as they
//! are answered; then they ask at 1.5 times that rate, on the bare disk as well.

use super::{SECOND, bare, cached, ordered};
use crate::load::{WRITE, Worker, run, run_at};
use crate::machine::{Machine, Setup};
use crate::tally::Tally;
use forebay_core::format::superblock::Order;
use forebay_disk::Nanos;
use forebay_disk::hdd::Spec;

const CACHE_BYTES: u64 = 256 << 20;
const SPAN: u64 = 4 * CACHE_BYTES;
const WORKERS: u64 = 32;
/// In seconds.
pub const HOUR: usize = 3600;

/// One hour, or part of it.
#[derive(Clone, Debug)]
pub struct Course {
    /// Writes a second that were asked for.
    pub asked: f64,
    /// Writes answered in each second.
    pub seconds: Vec<u64>,
    /// Latencies in milliseconds: half of all, 99 %, 99.9 %, the longest.
    pub latencies: [f64; 4],
    /// When the cache was full: the first second in which a tenth fewer were answered than asked.
    pub filled: usize,
    /// Writes that went around the log.
    pub around: u64,
}

impl Course {
    fn new(tally: &Tally, length: usize, asked: f64, around: u64) -> Course {
        let class = &tally.classes[0];
        let mut seconds = class.seconds.clone();
        seconds.resize(length, 0);
        let latencies = [0.5, 0.99, 0.999, 1.0].map(|share| class.percentile(share));
        let full = |count: &u64| (*count as f64) < 0.9 * asked;
        let filled = seconds.iter().position(full).unwrap_or(length);
        Course { asked, seconds, latencies, filled, around }
    }

    /// Writes a second from the second on in which the cache was full.
    pub fn rate(&self) -> f64 {
        let after = &self.seconds[self.filled.min(self.seconds.len() - 1)..];
        after.iter().sum::<u64>() as f64 / after.len() as f64
    }

    /// The worst second from then on.
    pub fn least(&self) -> u64 {
        self.seconds[self.filled.min(self.seconds.len() - 1)..].iter().copied().min().unwrap_or(0)
    }

    /// The worst of every ten seconds, and when these begin.
    pub fn worst(&self) -> Vec<(f64, f64)> {
        let least = |ten: &[u64]| ten.iter().copied().min().unwrap_or(0) as f64;
        self.seconds
            .chunks(10)
            .enumerate()
            .map(|(at, ten)| (10.0 * at as f64, least(ten)))
            .collect()
    }
}

fn workers(bytes: u64) -> Vec<Worker> {
    (0..WORKERS).map(|seed| Worker::random(0, WRITE, SPAN, bytes, seed)).collect()
}

/// The setups: bare, batch, relaxed.
fn setups(spec: Spec) -> [Setup; 3] {
    let through = cached(ordered(spec), SPAN, CACHE_BYTES);
    let relaxed = Setup { order: Order::Relaxed, ..through };
    [bare(ordered(spec), SPAN), through, relaxed]
}

/// The courses of so many seconds, of writes of so many bytes: bare, batch, relaxed.
pub fn courses(spec: Spec, bytes: u64, length: usize) -> [Course; 3] {
    let [_, through, _] = setups(spec);
    let mut machine = Machine::new(&through);
    let fill = 120 * SECOND;
    run(&mut machine, workers(bytes), fill);
    let drain = run(&mut machine, workers(bytes), fill + 240 * SECOND).rate(0);
    let asked = 1.5 * drain;
    setups(spec).map(|setup| {
        let mut machine = Machine::new(&setup);
        let distance = (SECOND as f64 / asked) as Nanos;
        let tally = run_at(&mut machine, workers(bytes), length as Nanos * SECOND, distance);
        Course::new(&tally, length, asked, machine.stats().bypassed_writes)
    })
}
