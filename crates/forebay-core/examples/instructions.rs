// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine alone, on devices that answer at once and memory that holds nothing: what
//! `scripts/instructions` counts. `instructions write|hit|flush` works to a steady state, then runs
//! [`measured`] and prints how many requests that were.
//!
//! A write's count holds its share of everything that follows from it: records, write-back,
//! reclaim, checkpoints.

#![allow(clippy::unwrap_used)]

use forebay_core::effect::{Effect, Fault};
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::{NewCache, Superblock, Volume};
use forebay_core::log::recovery::{self, CacheReader};
use forebay_core::payload::{Ingested, Payload, Place};
use forebay_core::request::{Op, Request};
use forebay_core::units::{BLOCK_BYTES, BufferId, SegmentId, Tick, VolumeIndex};

const CACHE_BYTES: u64 = 64 << 20;
const VOLUME_BYTES: u64 = 256 << 20;
const VOLUME: VolumeIndex = VolumeIndex(0);
const LAP: u64 = CACHE_BYTES / BLOCK_BYTES;

/// Memory that holds nothing: every block has the same checksum, and none is zeros.
struct Nothing;

impl Payload for Nothing {
    fn ingest(&mut self, _: u32, _: u64, _: BufferId, _: u16) -> Ingested {
        Ingested::Stored { crc: 1 }
    }

    fn checksum(&mut self, _: Place) -> u32 {
        1
    }

    fn copy(&mut self, _: Place, _: Place, _: u16) {}

    fn zero(&mut self, _: Place, _: u16) {}

    fn put(&mut self, _: BufferId, _: u32, _: &[u8]) {}

    fn store(&mut self, _: Place, _: &[u8]) {}

    fn buffer_begin(&mut self, _: BufferId, _: SegmentId) {}

    fn buffer_end(&mut self, _: BufferId) {}
}

/// A new cache: nothing but zeros behind its superblock.
struct Zeros;

impl CacheReader for Zeros {
    fn read(&mut self, _: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        bytes.fill(0);
        Ok(())
    }
}

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
        let found = {
            let writer = recovery::Writer::MayHaveLostPower;
            recovery::recover(&superblock, &mut Zeros, 1024, writer, config.mutants)
        };
        let superblock = recovery::reopen(&superblock, &found, config.mutants);
        let mut engine = Engine::new(&superblock, found, config, Tick(0));
        let volume = Volume::empty([8; 16], "v", VOLUME_BYTES);
        engine.attach(VOLUME, &volume);
        engine.serve(VOLUME, true);
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
            let token = match effect {
                Effect::Answer { result, .. } => {
                    assert_eq!(result, Ok(()));
                    *answered = true;
                    continue;
                }
                Effect::WriteCache { token, .. }
                | Effect::ReadCache { token, .. }
                | Effect::WriteArea { token, .. }
                | Effect::WriteSuperblock { token, .. }
                | Effect::FlushCache { token, .. }
                | Effect::ReadBacking { token, .. }
                | Effect::WriteBacking { token, .. }
                | Effect::FlushBacking { token, .. } => token,
                other => unreachable!("{other:?}"),
            };
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
