// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads: what the cache holds is read as fast as the cache device reads, what it does not hold as fast as from the
//! bare disk.
//!
//! Random blocks of 4 KiB: first of half of the cache, all of which is in it, then of 64 GiB.

use super::{GIB, MIB, SECOND, bare, cached, ordered};
use crate::load::{Ask, Worker, run, shared};
use crate::machine::{Machine, Setup};
use crate::random::Random;
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;
use forebay_disk::Model;
use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, NVME, SSD_840PRO, ST3500641AS};

const CACHE_BYTES: u64 = 256 * MIB;
const HALF: u64 = CACHE_BYTES / 2;
const VOLUME_BYTES: u64 = 64 * GIB;

/// One row. Reads a second: of the device alone, of forebay.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The backing device.
    pub disk: &'static str,
    /// The cache device.
    pub cache: &'static str,
    /// So many at once.
    pub depth: u64,
    /// Of what is in the cache.
    pub warm: [f64; 2],
    /// Of what is not.
    pub cold: [f64; 2],
}

fn rate(machine: &mut Machine, span: u64, depth: u64, nanos: u64) -> f64 {
    let workers = (0..depth).map(|at| Worker::random(0, Op::Read, span, BLOCK_BYTES, at));
    let until = machine.now() + nanos;
    run(machine, workers.collect(), until).rate(0)
}

/// One row; uncached reads are measured for so many seconds.
pub fn row(
    (disk, spec): (&'static str, Spec),
    (cache, model): (&'static str, Model),
    depth: u64,
    seconds: u64,
) -> Row {
    let backing = ordered(spec);
    let setup = Setup { cache: Some((model, CACHE_BYTES)), ..cached(backing, VOLUME_BYTES, 0) };
    let mut machine = Machine::new(&setup);
    // Each block once, at places of chance: a cache that is not full takes it at once.
    let ask = |at| Ask { op: Op::Read, offset: at * BLOCK_BYTES, length: BLOCK_BYTES };
    let asks = Random::new(1).order(HALF / BLOCK_BYTES).into_iter().map(ask).collect();
    run(&mut machine, shared(0, 32, asks), u64::MAX);
    let missed = machine.stats().miss_blocks;
    let warm = rate(&mut machine, HALF, depth, SECOND / 4);
    assert_eq!(machine.stats().miss_blocks, missed, "all of it is in the cache");
    let fast = rate(&mut Machine::new(&bare(model, HALF)), HALF, depth, SECOND / 4);
    let cold = rate(&mut machine, VOLUME_BYTES, depth, seconds * SECOND);
    let slow = Machine::new(&bare(backing, VOLUME_BYTES));
    let slow = rate(&mut { slow }, VOLUME_BYTES, depth, seconds * SECOND);
    Row { disk, cache, depth, warm: [fast, warm], cold: [slow, cold] }
}

/// The table.
pub fn table() -> Vec<Row> {
    let mut rows = Vec::new();
    for disk in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        for cache in [("840pro", Model::Ssd(SSD_840PRO)), ("nvme", Model::Ssd(NVME))] {
            rows.extend([1, 4, 32].map(|depth| row(disk, cache, depth, 120)));
        }
    }
    rows
}
