// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine alone, on devices that answer at once and memory that holds nothing: what
//! `scripts/instructions` counts. `instructions write|hit|flush` works to a steady state, then runs
//! [`measured`] and prints how many requests that were.
//!
//! A write's count holds its share of everything that follows from it: records, write-back,
//! reclaim, checkpoints.

#![allow(clippy::unwrap_used)]

use forebay_core::blank::{self, Nothing, VOLUME};
use forebay_core::effect::Effect;
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::{NewCache, Superblock, Volume};
use forebay_core::request::{Op, Request};
use forebay_core::units::{BLOCK_BYTES, Tick};

const CACHE_BYTES: u64 = 64 << 20;
const VOLUME_BYTES: u64 = 256 << 20;
const LAP: u64 = CACHE_BYTES / BLOCK_BYTES;

struct Bench {
    engine: Engine,
    random: u64,
    now: u64,
}

impl Bench {
    fn new() -> Bench {
        let new = NewCache {
            uuid: [7; 16],
            key: 0x1234_5678_9ABC_DEF0,
            size_bytes: CACHE_BYTES,
            segment_bytes: 512 << 10,
            now: 1,
        };
        let superblock = Superblock::format(&new).unwrap();
        let config = Config { buffer_count: 8, ..Config::default() };
        let volume = Volume::empty([8; 16], "v", VOLUME_BYTES);
        let engine = blank::engine(&superblock, config, &volume);
        Bench { engine, random: 1, now: 0 }
    }

    fn block(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) % (VOLUME_BYTES / BLOCK_BYTES)
    }

    /// One request and all that follows from it, as the shard does it: in each turn the devices
    /// answer all they were asked, then comes a tick.
    fn request(&mut self, op: Op, block: u64) {
        let length = if op == Op::Flush { 0 } else { BLOCK_BYTES };
        let request = Request { volume: VOLUME, op, offset: block * BLOCK_BYTES, length, tag: 0 };
        self.engine.submit(request, &mut Nothing).unwrap();
        let mut answered = false;
        while self.turn(&mut answered) {
            self.now += 1000;
            self.engine.tick(Tick(self.now), self.now / 1_000_000, &mut Nothing);
        }
        assert!(answered, "a device that answers at once leaves nothing to wait for");
    }

    /// Does what the engine wants; says whether a device was asked.
    fn turn(&mut self, answered: &mut bool) -> bool {
        let mut completed = false;
        while let Some(effect) = self.engine.next_effect() {
            if let Effect::Answer { result, .. } = effect {
                assert_eq!(result, Ok(()));
                *answered = true;
            }
            let Some(token) = effect.token() else { continue };
            self.engine.completed(token, Ok(()), &mut Nothing);
            completed = true;
        }
        completed
    }

    fn write(&mut self) {
        let block = self.block();
        self.request(Op::Write { fua: false }, block);
    }
}

/// What is counted.
#[inline(never)]
fn measured(bench: &mut Bench, what: &str) -> u64 {
    match what {
        "write" => {
            (0..LAP).for_each(|_| bench.write());
            LAP
        }
        "hit" => {
            // Blocks that were written first: in the log, and no longer in a buffer.
            for turn in 0..LAP / 2 {
                bench.request(Op::Read, turn % (LAP / 8));
            }
            LAP / 2
        }
        "flush" => {
            for _ in 0..LAP / 4 {
                bench.write();
                bench.request(Op::Flush, 0);
            }
            LAP / 4
        }
        other => panic!("{other}: one of write, hit, flush is counted"),
    }
}

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    let mut bench = Bench::new();
    match what.as_str() {
        "hit" => {
            (0..LAP / 8).for_each(|block| bench.request(Op::Write { fua: false }, block));
            // So many that the buffers of the first are used again.
            (0..LAP / 8).for_each(|block| {
                bench.request(Op::Write { fua: false }, LAP + block);
            });
        }
        _ => (0..3 * LAP).for_each(|_| bench.write()),
    }
    let before = bench.engine.status(VOLUME).unwrap().stats;
    let count = measured(&mut bench, &what);
    let after = bench.engine.status(VOLUME).unwrap().stats;
    if what == "hit" {
        assert_eq!(after.hit_blocks - before.hit_blocks, count, "every read is a hit");
    } else {
        assert!(after.batches > before.batches, "write-back took no part");
    }
    println!("{count}");
}
