// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hard disk with its write cache on: does forebay lose anything by it, or the bare disk gain more than forebay does?
//!
//! All other experiments have it off, so that no write is answered before it is on the disk. With it on the disk answers a write that is in
//! its memory, puts the 128 that it holds in an order, and pays for it at a flush. Each load ends with a flush, and then everything is
//! drained, so both have done the same in the end.

use super::{MIB, SECOND, bare, cached};
use crate::load::{Ask, WRITE, run, shared};
use crate::machine::{Machine, Setup};
use crate::random::Random;
use forebay_core::format::superblock::Order;
use forebay_core::request::Op;
use forebay_disk::hdd::{Hdd, Spec};
use forebay_disk::{Model, Nanos};

const CACHE_BYTES: u64 = 256 * MIB;

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Blocks of 4 KiB, so many of them, at random places of the whole disk.
    Random(u64),
    /// Records of 1 MiB, so many of them, one behind the other.
    Sequential(u64),
}

impl Load {
    fn asks(self, size_bytes: u64) -> Vec<Ask> {
        let ask = |offset, length| Ask { op: WRITE, offset, length };
        match self {
            Load::Random(count) => {
                let places = Random::new(64).some(size_bytes / 4096, count);
                places.into_iter().map(|place| ask(place * 4096, 4096)).collect()
            }
            Load::Sequential(count) => (0..count).map(|at| ask(at * MIB, MIB)).collect(),
        }
    }

    /// As it stands in a table.
    pub fn name(self) -> String {
        match self {
            Load::Random(count) => format!("{} MiB at random in 4 KiB", count * 4096 / MIB),
            Load::Sequential(count) => format!("{count} MiB in order in 1 MiB"),
        }
    }
}

/// Seconds of one way.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// Until the last write and its flush are answered.
    pub answered: f64,
    /// From then until everything is on the disk.
    pub drained: f64,
}

impl Took {
    /// In all.
    pub fn total(&self) -> f64 {
        self.answered + self.drained
    }
}

/// One row: bare, batch, relaxed.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// What is written.
    pub load: Load,
    /// So many requests at once.
    pub depth: usize,
    /// The disk's own write cache is on.
    pub write_cache: bool,
    /// Through what.
    pub took: [Took; 3],
}

impl Row {
    /// Rates until all is answered, over the bare disk's: batch, relaxed.
    pub fn rates(&self) -> [f64; 2] {
        let [bare, batch, relaxed] = self.took;
        [batch, relaxed].map(|it| bare.answered / it.answered)
    }

    /// Times until everything is on the disk, over the bare disk's: batch, relaxed.
    pub fn wholes(&self) -> [f64; 2] {
        let [bare, batch, relaxed] = self.took;
        [batch, relaxed].map(|it| it.total() / bare.total())
    }
}

fn measure(setup: &Setup, depth: usize, asks: Vec<Ask>) -> Took {
    let mut machine = Machine::new(setup);
    let written = run(&mut machine, shared(0, depth, asks), Nanos::MAX);
    let flush = vec![Ask { op: Op::Flush, offset: 0, length: 0 }];
    let flushed = run(&mut machine, shared(0, 1, flush), Nanos::MAX);
    let drained = machine.drain() as f64 / SECOND as f64;
    Took { answered: written.seconds() + flushed.seconds(), drained }
}

/// One row.
pub fn row(spec: Spec, load: Load, depth: usize, write_cache: bool) -> Row {
    let model = Model::Hdd(spec).write_cache(write_cache);
    let size = Hdd::new(spec).size_bytes() / 4096 * 4096;
    let batch = cached(model, size, CACHE_BYTES);
    let setups = [bare(model, size), batch, Setup { order: Order::Relaxed, ..batch }];
    let took = setups.map(|setup| measure(&setup, depth, load.asks(size)));
    Row { load, depth, write_cache, took }
}

/// The table of a disk.
pub fn table(spec: Spec) -> Vec<Row> {
    let mut rows = Vec::new();
    // What the cache holds, and more than it holds.
    for load in [Load::Random(16_384), Load::Random(131_072), Load::Sequential(1024)] {
        for depth in [1, 32] {
            rows.extend([false, true].map(|write_cache| row(spec, load, depth, write_cache)));
        }
    }
    rows
}
