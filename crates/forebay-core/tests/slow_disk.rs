// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A backing device that takes its time, and now and then all of it: how long guests wait meanwhile, and when it is over.

use crate::support;
use forebay_core::blank::{Nothing, VOLUME};
use forebay_core::effect::{Effect, Token};
use forebay_core::engine::{Config, Engine};
use forebay_core::request::{Op, Request};
use forebay_core::units::{BLOCK_BYTES, Tick};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;
/// A write of the backing device where nothing else is said, and 4 KiB that it zeroes by writing them: 150 MB/s.
const WRITE_NANOS: u64 = 5 * MILLISECOND;
const ZERO_NANOS: u64 = BLOCK_BYTES * 1000 / 150;
const WRITE: Op = Op::Write { fua: false };

/// An engine, its clock, and a disk.
struct Rig {
    engine: Engine,
    under_way: BTreeMap<(u64, u32), (Token, Effect)>,
    now: u64,
    number: u32,
    answered: BTreeMap<u32, u64>,
    /// What a write of the backing device takes.
    write_nanos: u64,
    /// It does nothing before then.
    stands_until: u64,
    /// What it zeroed: when that began, blocks.
    zeroed: Vec<(u64, u64)>,
}

impl Rig {
    fn new(volume_bytes: u64, cache_bytes: u64) -> Rig {
        let config = Config { buffer_count: 16, ahead_blocks: 0, ..Config::default() };
        Rig {
            engine: support::chosen(1, volume_bytes, cache_bytes, 512 << 10, config),
            under_way: BTreeMap::new(),
            now: SECOND,
            number: 0,
            answered: BTreeMap::new(),
            write_nanos: WRITE_NANOS,
            stands_until: 0,
            zeroed: Vec::new(),
        }
    }

    /// A disk in the engine's eyes: reads that take as long as seeks do.
    fn is_slow(&mut self) {
        for at in 0..50 {
            let tag = self.ask(Op::Read, at * 7919 % 60_000 * MIB, BLOCK_BYTES);
            self.waits(tag, SECOND);
        }
        assert!(self.engine.status(VOLUME).unwrap().sharing.sliced);
    }

    fn ask(&mut self, op: Op, offset: u64, length: u64) -> u32 {
        self.tick();
        self.number += 1;
        let request = Request { volume: VOLUME, op, offset, length, tag: self.number };
        self.engine.submit(request, &mut Nothing).unwrap();
        self.take();
        request.tag
    }

    fn tick(&mut self) {
        self.engine.tick(Tick(self.now), self.now / MILLISECOND, &mut Nothing);
        self.take();
    }

    fn take(&mut self) {
        while let Some(effect) = self.engine.next_effect() {
            if let Effect::Answer { tag, .. } = effect {
                self.answered.insert(tag, self.now);
            }
            let Some(token) = effect.token() else { continue };
            let begins = match effect {
                Effect::WriteCache { .. }
                | Effect::FlushCache { .. }
                | Effect::ReadCache { .. } => 0,
                _ => self.stands_until,
            };
            let takes = match effect {
                Effect::ReadBacking { .. } => 10 * MILLISECOND,
                Effect::ZeroBacking { blocks, .. } => {
                    self.zeroed.push((self.now, blocks));
                    blocks * ZERO_NANOS
                }
                Effect::WriteBacking { .. } => self.write_nanos,
                _ => MILLISECOND,
            };
            self.number += 1;
            self.under_way.insert((self.now.max(begins) + takes, self.number), (token, effect));
        }
    }

    /// Time goes on to what happens next, but not beyond `end`; says whether anything happened.
    fn step(&mut self, end: u64) -> bool {
        let due = self.engine.deadline().map_or(u64::MAX, |due| due.0.max(self.now));
        let done = self.under_way.first_key_value().map_or(u64::MAX, |it| it.0.0);
        self.now = due.min(done).min(end);
        if due.min(done) > end {
            return false;
        }
        if done <= self.now {
            let (_, (token, _)) = self.under_way.pop_first().unwrap();
            self.engine.clock(Tick(self.now), self.now / MILLISECOND);
            self.engine.completed(token, Ok(()), &mut Nothing);
        }
        self.tick();
        true
    }

    fn until(&mut self, end: u64) {
        while self.step(end) {}
    }

    /// How long from now on a request waits, at most so long.
    fn waits(&mut self, tag: u32, most: u64) -> u64 {
        let asked = self.now;
        while !self.answered.contains_key(&tag) && self.step(asked + most) {}
        self.answered.get(&tag).map_or(most, |at| at - asked)
    }
}

/// A disk that has to write zeros was told to do so with all of a request at once: a guest that zeroed 100 GiB, as `blkdiscard -z`
/// does, kept everybody from reading for nine minutes.
#[test]
fn a_long_range_is_zeroed_in_pieces_and_reads_go_between_them() {
    let mut rig = Rig::new(1024 * GIB, GIB);
    rig.is_slow();
    // The first batch of an opening takes all there is.
    rig.ask(WRITE, 0, BLOCK_BYTES);
    rig.until(rig.now + 60 * SECOND);
    for at in 0..100 {
        rig.ask(Op::WriteZeroes { fua: false }, (200 + at) * GIB, GIB);
        // In records of their own: what is in one is in one batch.
        rig.until(rig.now + 1_100 * MILLISECOND);
    }
    let mut longest = 0;
    for at in 0..300 {
        let tag = rig.ask(Op::Read, (777 + at) * MIB, BLOCK_BYTES);
        longest = longest.max(rig.waits(tag, 1000 * SECOND));
        rig.until(rig.now + 300 * MILLISECOND);
    }
    assert!(rig.zeroed.len() > 100, "it is being zeroed: {}", rig.zeroed.len());
    // One slice of write-back, and one piece.
    assert!(longest < SECOND, "{} ms", longest / MILLISECOND);
    rig.until(rig.now + 2000 * SECOND);
    let blocks = rig.zeroed.iter().map(|it| it.1).sum::<u64>();
    assert_eq!(blocks, 100 * GIB / BLOCK_BYTES, "all of it, once");
    // Pieces become as long as fits the disk, and a batch ends before it has taken minutes.
    assert!(rig.zeroed.len() < 10_000, "{} pieces", rig.zeroed.len());
    let batches = rig.engine.status(VOLUME).unwrap().stats.batches - 1;
    assert!((10..100).contains(&batches), "{batches} batches");
}

/// How long a write of 1 MiB waits that is asked for at the end of an outage of `seconds`, in a cache that is so full that writes are
/// delayed; of that, how long after it was over.
fn outage(seconds: u64, written_before: u64) -> (u64, u64) {
    let mut rig = Rig::new(1024 * GIB, 4 * GIB);
    rig.write_nanos = 100 * MILLISECOND;
    let mut next = 0u64;
    let mut write = |rig: &mut Rig, blocks: u64| {
        next += 1;
        rig.ask(WRITE, next * 7919 % 1_000_000 * MIB, blocks * BLOCK_BYTES)
    };
    let status = |rig: &Rig| rig.engine.status(VOLUME).unwrap();
    while !status(&rig).delaying || status(&rig).waiting == 0 {
        for _ in 0..64 {
            write(&mut rig, 1);
        }
        rig.until(rig.now + 4 * MILLISECOND);
    }
    // What a batch takes is known, and one has begun.
    let (mut batches, mut before) = (u64::MAX, 0);
    loop {
        rig.until(rig.now + 50 * MILLISECOND);
        for _ in status(&rig).waiting..32 {
            write(&mut rig, 1);
        }
        let stats = status(&rig).stats;
        if stats.batches >= 8 && batches == u64::MAX {
            batches = stats.batches;
        }
        if stats.batches <= batches {
            before = stats.backing_blocks_written;
        } else if stats.backing_blocks_written > before + written_before {
            break;
        }
    }
    let over = rig.now + seconds * SECOND;
    rig.stands_until = over;
    while status(&rig).waiting > 0 && rig.now < over {
        rig.until(rig.now + 50 * MILLISECOND);
    }
    let mut longest = (0, 0);
    while rig.now < over {
        let asked = rig.now;
        let tag = write(&mut rig, 256);
        let waited = rig.waits(tag, 7200 * SECOND);
        longest = longest.max((waited, (asked + waited).saturating_sub(over)));
        rig.until(rig.now + SECOND);
    }
    longest
}

/// A network volume that does not answer for some minutes makes writers wait, and they went on waiting for as long again when it was
/// back: what a write costs was counted from a batch that had stood all the time, and was owed to the end.
#[test]
fn nobody_pays_for_an_outage_once_it_is_over() {
    for (seconds, written_before) in [(30, 100), (300, 100), (300, 2000)] {
        let (waited, after) = outage(seconds, written_before);
        let text = format!("{seconds} s, {written_before}: {waited}, {after} behind it");
        assert!(after < 5 * SECOND, "{text}");
        assert!(waited < 15 * SECOND, "{text}");
    }
}
