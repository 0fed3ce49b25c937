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

/// A disk like that of the trace we have: a job of an hour, and the same again. It reads an index in pieces of 8 KiB here and there and files from
/// one end to the other, writes others, some of them a second time, and reads most of these back, a tenth to a half of all that
/// is touched later; beside that small writes to a few places. Partitions begin at sector 63, so nothing is aligned and neighbours share a block.
pub fn like_a_trace(count: usize) -> Vec<Ask> {
    const FILE: u64 = 4 << 20;
    const PIECE: u64 = 64 << 10;
    const INDEX_PIECE: u64 = 8 << 10;
    // Files: what the job writes, what it reads, the index; and behind them what is written beside it.
    const WRITTEN: u64 = 204;
    const READ: u64 = 43;
    const INDEX: u64 = 16;
    const BESIDE: u64 = (WRITTEN + READ + INDEX) * FILE;
    let mut random = Random::new(2);
    let mut asks: Vec<Ask> = Vec::new();
    let mut push = |write, offset: u64, length| {
        let at = asks.len() as u64 * 60_000_000;
        asks.push(Ask { at, write, offset: offset + 63 * 512, length });
        if random.below(5) < 2 {
            let at = asks.len() as u64 * 60_000_000;
            let place = BESIDE + random.below(1 << 10) * 4096 + random.below(8) * 512;
            let length = 512 << random.below(4);
            asks.push(Ask { at, write: true, offset: place + 63 * 512, length });
        }
        asks.len()
    };
    let pieces = |file: u64| (0..FILE / PIECE).map(move |at| file * FILE + at * PIECE);
    let mut asked = 0;
    while asked < count {
        // The job does the same each time.
        let mut job = Random::new(5);
        for file in WRITTEN + READ..WRITTEN + READ + INDEX {
            for place in job.order(FILE / INDEX_PIECE) {
                asked = push(false, file * FILE + place * INDEX_PIECE, INDEX_PIECE);
            }
        }
        for offset in (WRITTEN..WRITTEN + READ).flat_map(pieces) {
            asked = push(false, offset, PIECE);
        }
        // When, what, and whether it is written; time is what was written for the first time.
        let mut steps: Vec<(u64, u64, bool)> = Vec::new();
        for file in 0..WRITTEN {
            steps.push((file, file, true));
            if job.below(2) == 0 {
                steps.push((file + 4 + job.below(20), file, true));
            }
            if file % 7 < 5 {
                steps.push((file + 24 + job.below(80), file, false));
            }
        }
        steps.sort_unstable();
        for (_, file, write) in steps {
            for offset in pieces(file) {
                asked = push(write, offset, PIECE);
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
            // Not the standard library's, whose last digit is the machine's affair.
            sum += libm::pow(rank as f64, -mix.skew);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// The shape is that of the trace we have, in brackets, as far as it decides which blocks are worth keeping.
    #[test]
    fn what_is_made_up_is_like_the_trace() {
        let asks = like_a_trace(112_000);
        let writes = asks.iter().filter(|ask| ask.write).count();
        assert!((66_000..=73_000).contains(&writes), "{writes} of 112,000 write (0.59)");
        let footprint = footprint(&asks);
        assert!((260_000..=280_000).contains(&footprint), "{footprint} blocks (269,210)");
        // Reads by what was touched since, at most: up to a tenth of all is touched again, a half, all, and never before.
        let mut last: HashMap<u64, u64> = HashMap::new();
        let (mut touched, mut read, mut near, mut first) = (0u64, 0u64, 0u64, 0u64);
        for ask in &asks {
            for block in ask.blocks() {
                touched += 1;
                let before = last.insert(block, touched);
                if !ask.write {
                    read += 1;
                    near += u64::from(before.is_some_and(|it| touched - it < footprint / 100));
                    first += u64::from(before.is_none());
                }
            }
        }
        let share = |part: u64| part as f64 / read as f64;
        assert!(
            (0.06..=0.10).contains(&share(near)),
            "{:.3} read again at once (0.076)",
            share(near)
        );
        assert!((0.11..=0.14).contains(&share(first)), "{:.3} never seen (0.125)", share(first));
    }
}
