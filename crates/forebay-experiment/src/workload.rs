// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What guests ask for, request by request: a trace, or something made up.

use crate::random::Random;
use std::collections::HashSet;
use std::path::Path;

/// A read or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// When, in nanoseconds.
    pub at: u64,
    /// A write.
    pub write: bool,
    /// Where, in bytes.
    pub offset: u64,
    /// How much, in bytes.
    pub length: u64,
}

impl Ask {
    /// The blocks that it touches.
    pub fn blocks(&self) -> core::ops::Range<u64> {
        self.offset / 4096..(self.offset + self.length).div_ceil(4096)
    }
}

/// Blocks that are touched at all.
pub fn footprint(asks: &[Ask]) -> u64 {
    asks.iter().flat_map(Ask::blocks).collect::<HashSet<_>>().len() as u64
}

/// A trace: lines of `version,time in seconds,operation,bytes,sector`, where `28` reads and `2a` writes.
pub fn trace(path: &Path) -> Result<Vec<Ask>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut asks = Vec::new();
    let mut first = None;
    for (number, line) in text.lines().enumerate().skip(1) {
        let wrong = || format!("{}: line {} is not of a trace", path.display(), number + 1);
        let fields: Vec<&str> = line.split(',').collect();
        let [_, time, op, length, sector] = fields[..] else { return Err(wrong()) };
        let field = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        let time = field(time)?;
        let since = time - *first.get_or_insert(time);
        let write = match op {
            "28" => false,
            "2a" => true,
            _ => return Err(wrong()),
        };
        // The trace has whole seconds: requests of one second come one after the other.
        let at = (since * 1_000_000_000).max(asks.last().map_or(0, |ask: &Ask| ask.at + 1));
        asks.push(Ask { at, write, offset: field(sector)? * 512, length: field(length)? });
    }
    Ok(asks)
}

/// A disk with partitions that begin at sector 63, so nothing is aligned: files read from one end to the other in pieces of
/// 64 KiB, some of them again later; small reads, most of which come back soon; and more writes than reads, many of them to
/// where files are.
pub fn like_a_trace(count: usize) -> Vec<Ask> {
    const FILE: u64 = 4 << 20;
    const FILES: u64 = 200;
    let mut random = Random::new(2);
    let mut asks: Vec<Ask> = Vec::new();
    let mut lately: Vec<u64> = Vec::new();
    let push = |asks: &mut Vec<Ask>, write, offset: u64, length| {
        asks.push(Ask {
            at: asks.len() as u64 * 60_000_000,
            write,
            offset: offset + 63 * 512,
            length,
        });
    };
    while asks.len() < count {
        match random.below(40) {
            0 => {
                // The first files more often than the last.
                let file = random.below(FILES) * random.below(FILES) / FILES;
                let write = random.below(3) == 0;
                let pieces = FILE >> 16;
                (0..pieces)
                    .for_each(|at| push(&mut asks, write, file * FILE + (at << 16), 64 << 10));
            }
            1..15 => {
                let again = !lately.is_empty() && random.below(10) < 7;
                let place = match again {
                    true => lately[random.below(lately.len() as u64) as usize],
                    false => FILES * FILE + random.below(1 << 15) * 8192,
                };
                lately.push(place);
                if lately.len() > 4000 {
                    lately.swap_remove(random.below(4000) as usize);
                }
                push(&mut asks, false, place, 8192);
            }
            _ => {
                let place = FILES * FILE + random.below(1 << 11) * 65_536 + random.below(16) * 512;
                push(&mut asks, true, place, 512 << random.below(5));
            }
        }
    }
    asks.truncate(count);
    asks
}

/// What is mixed.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Blocks, of which the n-th most popular is asked for in proportion to n to the power of minus `skew`.
    pub blocks: usize,
    /// See there.
    pub skew: f64,
    /// Of these requests, percent write.
    pub writes: u64,
    /// Between two of them, on the average, this share of a piece of 32 KiB of a scan, in percent.
    pub scan: u64,
}

/// Requests of 4 KiB to popular and less popular blocks, and a scan that goes round over as much elsewhere.
pub fn zipf(mix: Mix, count: usize) -> Vec<Ask> {
    let mut random = Random::new(7);
    let mut sum = 0.0;
    let ends: Vec<f64> = (1..=mix.blocks)
        .map(|rank| {
            sum += (rank as f64).powf(-mix.skew);
            sum
        })
        .collect();
    let places = random.order(mix.blocks as u64);
    let mut asks = Vec::with_capacity(count);
    let mut scanned = 0;
    while asks.len() < count {
        let at = asks.len() as u64 * 1_000_000;
        if random.below(100) < mix.scan {
            let offset = (mix.blocks as u64 * 2 + scanned) * 4096;
            asks.push(Ask { at, write: false, offset, length: 32 << 10 });
            scanned = (scanned + 8) % mix.blocks as u64;
            continue;
        }
        let draw = random.below(1 << 53) as f64 / (1u64 << 53) as f64 * sum;
        let rank = ends.partition_point(|end| *end < draw).min(mix.blocks - 1);
        let write = random.below(100) < mix.writes;
        asks.push(Ask { at, write, offset: places[rank] * 4096, length: 4096 });
    }
    asks
}
