// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long reads of what is in the cache in part: here a block, there a block, as a database or a file system that writes in 4 KiB leaves them.
//!
//! Each record is read once, in an order of chance, and the bare disk reads the same.

use super::{GIB, bare, cached, disks};
use crate::load::{Ask, WRITE, run, shared};
use crate::machine::Machine;
use crate::random::Random;
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;
use forebay_disk::Model;

const VOLUME_BYTES: u64 = 16 * GIB;
/// Nothing leaves it.
const CACHE_BYTES: u64 = 2 * GIB;

/// One row. Records a second: of the bare disk, of forebay.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The backing device.
    pub disk: &'static str,
    /// Bytes of a record.
    pub record: u64,
    /// Of a hundred blocks so many are in the cache.
    pub percent: u64,
    /// So many records at once.
    pub depth: usize,
    /// Records a second.
    pub rates: [f64; 2],
}

impl Row {
    /// To the bare disk.
    pub fn ratio(&self) -> f64 {
        self.rates[1] / self.rates[0]
    }
}

/// One row, of so many records.
pub fn row(
    (disk, backing): (&'static str, Model),
    record: u64,
    percent: u64,
    depth: usize,
    count: u64,
) -> Row {
    let mut random = Random::new(9);
    let places = random.some(VOLUME_BYTES / record, count);
    let records: Vec<u64> = places.into_iter().map(|place| place * record).collect();
    let reads = || {
        let ask = |offset: &u64| Ask { op: Op::Read, offset: *offset, length: record };
        shared(0, depth, records.iter().map(ask).collect())
    };
    let block = |at| Ask { op: WRITE, offset: at, length: BLOCK_BYTES };
    let blocks = records.iter().flat_map(|at| (*at..at + record).step_by(BLOCK_BYTES as usize));
    let written = blocks.filter(|_| random.below(100) < percent).map(block).collect();

    let mut machine = Machine::new(&cached(backing, VOLUME_BYTES, CACHE_BYTES));
    run(&mut machine, shared(0, 32, written), u64::MAX);
    machine.drain();
    machine.undrain();
    let through = run(&mut machine, reads(), u64::MAX).rate(0);
    let alone = run(&mut Machine::new(&bare(backing, VOLUME_BYTES)), reads(), u64::MAX).rate(0);
    Row { disk, record, percent, depth, rates: [alone, through] }
}

/// The table.
pub fn table() -> Vec<Row> {
    let mut rows = Vec::new();
    for disk in disks() {
        for record in [64 << 10, 256 << 10, 1 << 20] {
            for percent in [5, 25, 50, 75, 95] {
                rows.extend([1, 32].map(|depth| row(disk, record, percent, depth, 1000)));
            }
        }
    }
    rows
}
