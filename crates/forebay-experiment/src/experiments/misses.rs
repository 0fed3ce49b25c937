// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which blocks are worth keeping: the share of the blocks read that have to come from the backing device, beside
//! LRU, FIFO and S3-FIFO of as many blocks.
//!
//! forebay's log has as many blocks as the others have, and beside them what it always keeps free (`Instant::new` adds it). What it holds
//! twice, an older version of a block that was written again, counts against it. What that costs is told by an LRU that holds such
//! versions, too.

use crate::caches::{Cache, Fifo, LoggedLru, Lru, S3Fifo};
use crate::instant::Instant;
use crate::workload::{Ask, Mix, footprint, like_a_trace, trace, zipf};
use forebay_core::request::Op;
use std::path::PathBuf;

/// Sizes of the cache, in percent of the blocks that are touched at all.
pub const PERCENTS: [u64; 4] = [1, 5, 10, 20];

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    /// Of what.
    pub workload: String,
    /// Of the blocks touched at all, so many fit the cache.
    pub percent: u64,
    /// Blocks that fit.
    pub blocks: u64,
    /// Misses of each block read: LRU, FIFO, S3-FIFO, forebay.
    pub misses: [f64; 4],
    /// Of LRU over as many blocks of log, older versions included.
    pub logged: f64,
    /// Blocks to the cache device for each miss, all that guests write included.
    pub written: f64,
    /// The same without what guests write: copies of what was missed, and second chances.
    pub copied: f64,
}

impl Row {
    /// forebay's misses for each of LRU's.
    pub fn over_lru(&self) -> f64 {
        self.misses[3] / self.misses[0]
    }

    /// The same for each of an LRU's that holds older versions, too.
    pub fn over_logged(&self) -> f64 {
        self.misses[3] / self.logged
    }
}

/// What `FOREBAY_TRACE` names, or something like it.
pub fn traced() -> Result<(String, Vec<Ask>), String> {
    match std::env::var_os("FOREBAY_TRACE") {
        Some(path) => Ok(("trace".into(), trace(&PathBuf::from(path))?)),
        None => Ok(("made up, FOREBAY_TRACE is not set".into(), like_a_trace(112_000))),
    }
}

/// Mixes.
pub fn mixes() -> [(&'static str, Mix); 5] {
    let mix = Mix { blocks: 50_000, skew: 0.9, writes: 0, scan: 0 };
    [
        ("zipf 0.8", Mix { skew: 0.8, ..mix }),
        ("zipf 1.0", Mix { skew: 1.0, ..mix }),
        ("zipf 0.9, scan", Mix { scan: 11, ..mix }),
        ("zipf 0.9, 30 % writes, scan", Mix { scan: 11, writes: 30, ..mix }),
        ("zipf 0.9, 30 % writes", Mix { writes: 30, ..mix }),
    ]
}

/// The table.
pub fn table() -> Result<Vec<Row>, String> {
    let (name, asks) = traced()?;
    let mut rows: Vec<Row> = PERCENTS.map(|percent| row(&name, &asks, percent)).into();
    for (name, mix) in mixes() {
        let asks = zipf(mix, 500_000);
        rows.extend(PERCENTS.map(|percent| row(name, &asks, percent)));
    }
    Ok(rows)
}

/// One row of it.
pub fn row(workload: &str, asks: &[Ask], percent: u64) -> Row {
    let blocks = (footprint(asks) * percent / 100).max(1);
    let capacity = blocks as usize;
    let mut others: [Box<dyn Cache>; 3] = [
        Box::new(Lru::new(capacity)),
        Box::new(Fifo::new(capacity)),
        Box::new(S3Fifo::new(capacity)),
    ];
    let [lru, fifo, s3] =
        others.each_mut().map(|cache| misses_of(asks, |block, _| cache.touch(block)));
    let mut logged = LoggedLru::new(capacity);
    let logged = misses_of(asks, |block, write| logged.touch(block, write));
    let (forebay, written, copied) = misses_of_forebay(blocks, asks);
    let (workload, misses) = (workload.to_string(), [lru, fifo, s3, forebay]);
    Row { workload, percent, blocks, misses, logged, written, copied }
}

fn misses_of(asks: &[Ask], mut touch: impl FnMut(u64, bool) -> bool) -> f64 {
    let (mut read, mut missed) = (0u64, 0u64);
    for ask in asks {
        for block in ask.blocks() {
            let hit = touch(block, ask.write);
            read += u64::from(!ask.write);
            missed += u64::from(!ask.write && !hit);
        }
    }
    missed as f64 / read as f64
}

fn misses_of_forebay(blocks: u64, asks: &[Ask]) -> (f64, f64, f64) {
    let end = asks.iter().map(|ask| ask.blocks().end).max().unwrap_or(1);
    let mut engine = Instant::new(blocks, end * 4096);
    for ask in asks {
        let op = if ask.write { Op::Write { fua: false } } else { Op::Read };
        engine.ask(ask.at, op, ask.offset, ask.length);
    }
    let stats = engine.stats();
    let misses = stats.miss_blocks.max(1) as f64;
    let copied = (stats.fill_blocks + stats.second_chances) as f64;
    let ratio = stats.miss_blocks as f64 / stats.read_blocks as f64;
    (ratio, stats.cache_blocks_written as f64 / misses, copied / misses)
}
