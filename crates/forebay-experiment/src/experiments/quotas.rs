// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a reservation is worth: a volume with popular blocks, beside another that would have all of the cache.

use crate::instant::{Instant, SECOND};
use crate::random::Random;
use crate::workload::{Ask, Mix, zipf};
use forebay_core::blank::VOLUME;
use forebay_core::policy::reserve::Reserve;
use forebay_core::request::Op;

/// Blocks of the volume that is looked at.
const BLOCKS: usize = 40_000;
/// Of the cache.
const CACHE: u64 = BLOCKS as u64 / 4;
/// Where the other one goes.
const OTHER: u64 = 1_000_000;
/// Requests of the other for each of the one.
pub const BUSY: usize = 8;
/// Requests until all is as it stays.
const WARM: usize = 40_000;
/// Requests that count.
const COUNTED: usize = 40_000;

/// What the other volume does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Other {
    /// Nothing.
    Rests,
    /// Reads each block twice, so that it is copied into the cache.
    Reads,
    /// Writes each block once.
    Writes,
}

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    /// What the other does.
    pub other: &'static str,
    /// What is reserved for the one.
    pub reserve: String,
    /// The same as a part of what can be reserved.
    pub reserved: f64,
    /// Parts of the cache that the one and the other had in the end.
    pub has: [f64; 2],
    /// Of the blocks that the one read, those that the cache had.
    pub hits: f64,
    /// The same while the other rests.
    pub alone: f64,
}

/// The table.
pub fn table() -> Vec<Row> {
    let alone = run(Other::Rests, Reserve::Share).hits;
    let reserves =
        [Reserve::Percent(0), Reserve::Share, Reserve::Percent(50), Reserve::Percent(90)];
    let row = |other| reserves.map(|reserve| Row { alone, ..run(other, reserve) });
    [Other::Reads, Other::Writes].into_iter().flat_map(row).collect()
}

/// One row.
pub fn run(other: Other, reserve: Reserve) -> Row {
    let mix = Mix { blocks: BLOCKS, skew: 0.9, writes: 0, scan: 0 };
    let mut random = Random::new(3);
    let mut engine = Instant::of_two(CACHE, OTHER * 4096, reserve);
    let mut before = engine.stats();
    let mut last = 0;
    for (count, Ask { at, offset, length, .. }) in zipf(mix, WARM + COUNTED).into_iter().enumerate()
    {
        if count == WARM {
            before = engine.stats();
        }
        engine.ask(at, Op::Read, offset, length);
        for turn in 0..BUSY {
            let op = match other {
                Other::Rests => continue,
                Other::Reads => Op::Read,
                Other::Writes => Op::Write { fua: false },
            };
            if other == Other::Writes || turn % 2 == 0 {
                last = random.below(OTHER) * 4096;
            }
            engine.ask_of(SECOND, at, op, last, 4096);
        }
    }
    let stats = engine.stats();
    let (read, missed) =
        (stats.read_blocks - before.read_blocks, stats.miss_blocks - before.miss_blocks);
    let part = |volume| f64::from(engine.status_of(volume).segments) / f64::from(engine.segments());
    let reserved = match reserve {
        // A quarter for both.
        Reserve::Share => 0.125,
        Reserve::Percent(percent) => f64::from(percent) / 100.0,
        Reserve::Blocks(blocks) => blocks as f64 / CACHE as f64,
    };
    Row {
        reserved,
        other: match other {
            Other::Rests => "rests",
            Other::Reads => "reads",
            Other::Writes => "writes",
        },
        reserve: match reserve {
            Reserve::Share => "default".into(),
            Reserve::Percent(percent) => format!("{percent}%"),
            Reserve::Blocks(blocks) => format!("{blocks} blocks"),
        },
        has: [part(VOLUME), part(SECOND)],
        hits: 1.0 - missed as f64 / read as f64,
        alone: 0.0,
    }
}
