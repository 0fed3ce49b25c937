// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nobody starves: random readers against random writers, the cache blown out.
//!
//! Readers at depth 1, 4 and 16 and 32 writers, each of 4 KiB, over four times the cache, which is full of dirty
//! data when the measurement begins. x is a side's rate over its rate alone; F = 2·min(x_r, x_w) is 1 if each gets
//! half, U = x_r + x_w is 1 if nothing is lost by sharing.

use super::{SECOND, cached, ordered};
use crate::load::{WRITE, Worker, run};
use crate::machine::Machine;
use forebay_core::request::Op;
use forebay_disk::hdd::Spec;

const CACHE_BYTES: u64 = 256 << 20;
const SPAN: u64 = 4 * CACHE_BYTES;
/// Measured for this long, after so long.
const WARM: u64 = 120 * SECOND;
const MEASURED: u64 = 240 * SECOND;

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Readers.
    pub readers: usize,
    /// Reads and writes a second, alone.
    pub alone: [f64; 2],
    /// Reads and writes a second, together.
    pub together: [f64; 2],
    /// Of reads, together, in milliseconds.
    pub read_p99: f64,
    /// Of writes, together, in milliseconds.
    pub write_p99: f64,
}

impl Row {
    /// Shares of reads and writes.
    pub fn shares(&self) -> [f64; 2] {
        [self.together[0] / self.alone[0], self.together[1] / self.alone[1]]
    }

    /// F.
    pub fn fairness(&self) -> f64 {
        let [reads, writes] = self.shares();
        2.0 * reads.min(writes)
    }

    /// U.
    pub fn efficiency(&self) -> f64 {
        self.shares().iter().sum()
    }
}

fn workers(class: usize, op: Op, count: usize) -> impl Iterator<Item = Worker> {
    (0..count).map(move |at| Worker::random(class, op, SPAN, 4096, (class * 1_000 + at) as u64))
}

fn measure(spec: Spec, readers: usize, writers: usize) -> ([f64; 2], [f64; 2]) {
    let mut setup = cached(ordered(spec), SPAN, CACHE_BYTES);
    // The question is how the disk is shared: readers who find more and more in the cache do not share it.
    setup.config.fill_run_max = 0;
    let mut machine = Machine::new(&setup);
    let all = || {
        let idle = Worker { class: 1, next: Box::new(|| None) };
        workers(0, Op::Read, readers).chain(workers(1, WRITE, writers)).chain([idle]).collect()
    };
    run(&mut machine, all(), WARM);
    let tally = run(&mut machine, all(), WARM + MEASURED);
    let p99 = [0, 1].map(|class| tally.classes[class].percentile(0.99));
    ([tally.rate(0), tally.rate(1)], p99)
}

/// The table of a disk.
pub fn table(spec: Spec) -> Vec<Row> {
    const WRITERS: usize = 32;
    let (writes_alone, _) = measure(spec, 0, WRITERS);
    let row = |readers| {
        let (reads_alone, _) = measure(spec, readers, 0);
        let (together, [read_p99, write_p99]) = measure(spec, readers, WRITERS);
        let alone = [reads_alone[0], writes_alone[1]];
        Row { readers, alone, together, read_p99, write_p99 }
    };
    [1, 4, 16].map(row).to_vec()
}
