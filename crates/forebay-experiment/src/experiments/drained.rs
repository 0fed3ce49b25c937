// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sorted write-back: 64 MiB of random 4 KiB writes, 32 at a time, and then everything on the disk.
//!
//! In 2014 Akira Hayakawa measured this for dm-writeboost on a hard disk, with a file of 64 MiB: 86 s on the plain
//! disk, 61, 37 and 27 s through batches of 4, 32 and 128 segments
//! (akiradeveloper.hatenadiary.com/entry/2014/05/13/205918). Here also spread over more of the disk, and as IOzone writes to random
//! places of a file of twice the cache.

use super::{GIB, MIB, SECOND, bare, cached, ordered, unordered};
use crate::load::{Ask, WRITE, run, shared};
use crate::machine::{Machine, Setup};
use crate::random::Random;
use forebay_core::request::Op;
use forebay_disk::hdd::{Hdd, Spec};
use forebay_disk::model::{BARRACUDA_7200_12, ST3500641AS};
use forebay_disk::{Model, Nanos};

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    /// The disk.
    pub disk: &'static str,
    /// Over how much of it.
    pub span: &'static str,
    /// Through what.
    pub through: &'static str,
    /// Until the last write and its flush are answered, in seconds.
    pub answered: f64,
    /// From then until everything is on the disk, in seconds.
    pub drained: f64,
    /// Blocks that a batch had, on the average.
    pub batch_blocks: u64,
}

impl Row {
    /// In all, in seconds.
    pub fn total(&self) -> f64 {
        self.answered + self.drained
    }

    /// Milliseconds of the disk's time for each block.
    pub fn millis(&self, blocks: u64) -> f64 {
        self.total() * 1e3 / blocks as f64
    }
}

/// Blocks that are written.
pub const BLOCKS: u64 = 64 * MIB / 4096;

/// So many places of the span, each once, in an order of chance.
fn asks(span: u64) -> Vec<Ask> {
    let mut random = Random::new(64);
    let blocks = span / 4096;
    let places = match blocks {
        BLOCKS => random.order(BLOCKS),
        _ => random.some(blocks, BLOCKS),
    };
    places.into_iter().map(|place| Ask { op: WRITE, offset: place * 4096, length: 4096 }).collect()
}

fn measure(setup: &Setup, depth: usize, asks: Vec<Ask>) -> (f64, f64, u64) {
    let mut machine = Machine::new(setup);
    let written = run(&mut machine, shared(0, depth, asks), Nanos::MAX);
    let flush = vec![Ask { op: Op::Flush, offset: 0, length: 0 }];
    let flushed = run(&mut machine, shared(0, 1, flush), Nanos::MAX);
    let drained = machine.drain() as f64 / SECOND as f64;
    let stats = machine.stats();
    let batch_blocks = stats.backing_blocks_written.checked_div(stats.batches).unwrap_or(0);
    (written.seconds() + flushed.seconds(), drained, batch_blocks)
}

/// The table.
pub fn table() -> Vec<[Row; 3]> {
    let mut rows = Vec::new();
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        let size = Hdd::new(spec).size_bytes();
        let spans = [("64 MiB", 64 * MIB), ("1 %", size / 100), ("10 %", size / 10), ("all", size)];
        for (span_name, span) in spans {
            rows.push(of_span(disk, spec, span_name, span));
        }
    }
    rows
}

/// The rows of a disk and a span.
pub fn of_span(disk: &'static str, spec: Spec, span_name: &'static str, span: u64) -> [Row; 3] {
    let volume = span.next_multiple_of(4096);
    let row = |through, setup: Setup| {
        let (answered, drained, batch_blocks) = measure(&setup, 32, asks(span));
        Row { disk, span: span_name, through, answered, drained, batch_blocks }
    };
    let deep: Model = ordered(spec);
    [
        row("bare, no reordering", bare(unordered(spec), volume)),
        row("bare, NCQ-32", bare(deep, volume)),
        row("forebay", cached(deep, volume, GIB)),
    ]
}

/// Bytes of the file.
pub const FILE_BYTES: u64 = 512 * MIB;

/// As many writes of 4 KiB to random places of a file of twice the cache as it has blocks: the bare disk one at a time and with its
/// queue, forebay the same.
pub fn of_file(disk: &'static str, spec: Spec) -> [Row; 4] {
    let count = FILE_BYTES / 4096;
    let mut random = Random::new(13);
    let ask = |_| Ask { op: WRITE, offset: random.below(count) * 4096, length: 4096 };
    let asks: Vec<Ask> = (0..count).map(ask).collect();
    let [alone, through] =
        [bare(ordered(spec), FILE_BYTES), cached(ordered(spec), FILE_BYTES, FILE_BYTES / 2)];
    let row = |through, setup: &Setup, depth| {
        let (answered, drained, batch_blocks) = measure(setup, depth, asks.clone());
        Row { disk, span: "file", through, answered, drained, batch_blocks }
    };
    [
        row("bare, 1 at a time", &alone, 1),
        row("bare, NCQ-32", &alone, 32),
        row("forebay, 1 at a time", &through, 1),
        row("forebay, 32 at once", &through, 32),
    ]
}
