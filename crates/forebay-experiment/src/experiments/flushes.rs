// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an order costs a guest that flushes: random writes beside so many flushes a second, the cache full of dirty data.
//!
//! 32 writers of 4 KiB over four times the cache, who wait for their answers, and one who flushes at even distances (never before his last
//! flush is answered); or a flush after each write, which its writer waits for. Writers are bound by what write-back makes room for, so what
//! is acknowledged is what the order costs. The bare disk is given the same.

use super::{SECOND, bare, cached, disks};
use crate::load::WRITE;
use crate::machine::{Machine, Setup};
use crate::random::Random;
use forebay_core::format::superblock::Order;
use forebay_core::request::Op;
use forebay_core::stats::Stats;
use forebay_core::units::BLOCK_BYTES;
use forebay_disk::{Model, Nanos};
use std::collections::HashMap;

const CACHE_BYTES: u64 = 256 << 20;
const SPAN: u64 = 4 * CACHE_BYTES;
const WRITERS: u64 = 32;
/// Measured for this long, after so long.
const WARM: Nanos = 120 * SECOND;
const MEASURED: Nanos = 240 * SECOND;

/// How often the guest flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushes {
    /// Never.
    None,
    /// So many times a second.
    Each(u64),
    /// After each write.
    EachWrite,
}

impl Flushes {
    /// Those of the table.
    pub const ALL: [Flushes; 5] = [
        Flushes::None,
        Flushes::Each(1),
        Flushes::Each(10),
        Flushes::Each(100),
        Flushes::EachWrite,
    ];

    /// In words.
    pub fn name(self) -> String {
        match self {
            Flushes::None => "none".into(),
            Flushes::Each(rate) => format!("{rate} a s"),
            Flushes::EachWrite => "each write".into(),
        }
    }
}

/// What is compared: the bare disk and the three orders.
pub const THROUGH: [(&str, Option<Order>); 4] = [
    ("bare", None),
    ("batch", Some(Order::Batch)),
    ("strict", Some(Order::Strict)),
    ("relaxed", Some(Order::Relaxed)),
];

/// One row. Of a bare disk what write-back does is 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Row {
    /// Writes answered a second.
    pub acknowledged: f64,
    /// Flushes answered a second.
    pub flushed: f64,
    /// Blocks written back a second.
    pub written_back: f64,
    /// Device writes for each block acknowledged: of the cache device (records), of the backing device.
    pub writes: [f64; 2],
    /// Batches ended a second.
    pub batches: f64,
}

/// Asks until a time. Gives the writes and flushes that were answered.
fn drive(machine: &mut Machine, flushes: Flushes, seed: u64, until: Nanos) -> [u64; 2] {
    let mut random = Random::new(seed);
    let mut write = |machine: &mut Machine| {
        let offset = random.below(SPAN / BLOCK_BYTES) * BLOCK_BYTES;
        machine.submit(WRITE, offset, BLOCK_BYTES)
    };
    let distance = match flushes {
        Flushes::Each(rate) => SECOND / rate,
        Flushes::None | Flushes::EachWrite => Nanos::MAX,
    };
    let mut turn = machine.now().saturating_add(distance);
    let mut is_flushing = false;
    let mut asked: HashMap<u32, Op> = HashMap::new();
    for _ in 0..WRITERS {
        asked.insert(write(machine), WRITE);
    }
    let mut answered = [0; 2];
    while machine.now() < until || !asked.is_empty() {
        let ends = machine.now() >= until;
        if turn <= machine.now() && !is_flushing && !ends {
            asked.insert(machine.submit(Op::Flush, 0, 0), Op::Flush);
            is_flushing = true;
            turn += distance;
        }
        let next = if ends || is_flushing { Nanos::MAX } else { turn };
        let tags = machine.wait(next.min(if ends { Nanos::MAX } else { until })).to_vec();
        // A name that was answered is soon that of another request.
        let ops: Vec<Op> =
            tags.iter().map(|tag| asked.remove(tag).expect("it was asked for")).collect();
        for op in ops {
            let is_flush = op == Op::Flush;
            is_flushing &= !is_flush;
            if machine.now() > until {
                continue;
            }
            answered[usize::from(is_flush)] += 1;
            if !is_flush && flushes == Flushes::EachWrite {
                asked.insert(machine.submit(Op::Flush, 0, 0), Op::Flush);
            } else if !is_flush || flushes == Flushes::EachWrite {
                asked.insert(write(machine), WRITE);
            }
        }
    }
    answered
}

/// One row.
pub fn row(backing: Model, order: Option<Order>, flushes: Flushes) -> Row {
    let through = cached(backing, SPAN, CACHE_BYTES);
    let setup = match order {
        None => bare(backing, SPAN),
        Some(order) => Setup { order, ..through },
    };
    let mut machine = Machine::new(&setup);
    drive(&mut machine, flushes, 1, WARM);
    let before: Stats = machine.stats();
    let begun = machine.now();
    let [writes, flushed] = drive(&mut machine, flushes, 2, WARM + MEASURED);
    let after = machine.stats();
    let rate = |count: u64| count as f64 / ((machine.now() - begun) as f64 / SECOND as f64);
    let share = |count: u64| count as f64 / writes.max(1) as f64;
    Row {
        acknowledged: rate(writes),
        flushed: rate(flushed),
        written_back: rate(after.backing_blocks_written - before.backing_blocks_written),
        writes: [
            share(after.records - before.records),
            share(after.backing_writes - before.backing_writes),
        ],
        batches: rate(after.batches - before.batches),
    }
}

/// The rows of a disk and how often guests flush: as [`THROUGH`] names them.
pub fn rows(backing: Model, flushes: Flushes) -> [Row; 4] {
    THROUGH.map(|(_, order)| row(backing, order, flushes))
}

/// The table: a disk, how often guests flush, and the rows.
pub fn table() -> Vec<(&'static str, Flushes, [Row; 4])> {
    let of = |(disk, model)| Flushes::ALL.map(|flushes| (disk, flushes, rows(model, flushes)));
    disks().into_iter().flat_map(of).collect()
}
