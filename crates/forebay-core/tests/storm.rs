// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An engine of real size under as much as it takes, over devices that fail and rot as they like: it goes on, and answers all that it
//! was asked. (What it answers the simulator compares, on small caches and with few requests.)

use crate::support;
use forebay_core::effect::{Effect, Fault, Token};
use forebay_core::engine::{CacheHealth, Engine};
use forebay_core::format::record::{Identity, Known};
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::payload::{Ingested, Payload, Place};
use forebay_core::request::{Op, Request};
use forebay_core::units::{BufferId, SegmentId, Tick, VolumeIndex};

const MIB: u64 = 1 << 20;
const VOLUMES: u8 = 5;
const VOLUME_BYTES: u64 = 64 * MIB + 512;

/// Chance, from one number.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn one_in(&mut self, times: u64) -> bool {
        times > 0 && self.below(times) == 0
    }
}

/// Memory that holds nothing, of which some reads as zeros and some as if it had rotted; and some bytes of guests cannot be had.
struct Rotting {
    random: Random,
    rot: u64,
    missing: u64,
}

impl Payload for Rotting {
    fn ingest(&mut self, _: u32, _: u64, _: BufferId, _: u16) -> Ingested {
        if self.random.one_in(self.missing) {
            return Ingested::Failed;
        }
        match self.random.one_in(50) {
            true => Ingested::Zero,
            false => Ingested::Stored { crc: 1 },
        }
    }

    fn checksum(&mut self, place: Place) -> u32 {
        let rots = !matches!(place, Place::Buffer { .. }) && self.random.one_in(self.rot);
        1 + u32::from(rots)
    }

    fn is_header(&mut self, _: Place, _: &Known, _: &Identity) -> bool {
        !self.random.one_in(self.rot)
    }

    fn copy(&mut self, _: Place, _: Place, _: u16) {}

    fn zero(&mut self, _: Place, _: u16) {}

    fn put(&mut self, _: BufferId, _: u32, _: &[u8]) {}

    fn store(&mut self, _: Place, _: &[u8]) {}

    fn buffer_begin(&mut self, _: BufferId, _: SegmentId) {}

    fn buffer_end(&mut self, _: BufferId) {}
}

/// One in so many effects of each kind fails; zero: none.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    cache_read: u64,
    cache_write: u64,
    backing_read: u64,
    backing_write: u64,
    backing_flush: u64,
    mark: u64,
    payload: u64,
}

struct Storm {
    engine: Engine,
    memory: Rotting,
    random: Random,
    under_way: Vec<(Token, Effect)>,
    faults: Faults,
    asked: u32,
    answered: u32,
    /// How many of these not well.
    failed: u32,
    now: u64,
}

impl Storm {
    fn new(seed: u64, faults: Faults, rot: u64) -> Storm {
        let engine = support::engine(VOLUMES, VOLUME_BYTES, 64 * MIB, 256 << 10, 12);
        let memory = Rotting { random: Random(seed ^ 0xF00D), rot, missing: faults.payload };
        let random = Random(seed);
        let under_way = Vec::new();
        let (asked, answered, failed, now) = (0, 0, 0, 0);
        Storm { engine, memory, random, under_way, faults, asked, answered, failed, now }
    }

    fn take(&mut self) {
        while let Some(effect) = self.engine.next_effect() {
            match (effect, effect.token()) {
                (_, Some(token)) => self.under_way.push((token, effect)),
                (Effect::Answer { result, .. }, None) => {
                    self.answered += 1;
                    self.failed += u32::from(result.is_err());
                }
                (_, None) => unreachable!("all else is reported back"),
            }
        }
    }

    /// Asks until the engine takes no more, or for so many.
    fn ask(&mut self, count: u64) {
        for _ in 0..count {
            let volume = VolumeIndex(self.random.below(VOLUMES.into()) as u8);
            let fua = self.random.one_in(20);
            let op = match self.random.below(20) {
                0 => Op::Flush,
                1 => Op::Discard,
                2 => Op::WriteZeroes { fua },
                3..12 => Op::Read,
                _ => Op::Write { fua },
            };
            let most = match self.random.below(4) {
                0 => 2048,
                1 => 256,
                _ => 8,
            };
            let mut sectors = 1 + self.random.below(most);
            let mut offset = self.random.below(VOLUME_BYTES / 512 - most);
            if self.random.one_in(2) {
                (offset, sectors) = (offset / 8 * 8, sectors.next_multiple_of(8));
            }
            let length = if op == Op::Flush { 0 } else { sectors * 512 };
            let request = Request { volume, op, offset: offset * 512, length, tag: self.asked };
            let taken = self.engine.submit(request, &mut self.memory).is_ok();
            self.take();
            if !taken {
                return;
            }
            self.asked += 1;
        }
    }

    fn fails(&mut self, effect: &Effect) -> bool {
        let Faults {
            cache_read,
            cache_write,
            backing_read,
            backing_write,
            backing_flush,
            mark,
            ..
        } = self.faults;
        let one_in = match effect {
            Effect::ReadCache { .. } => cache_read,
            Effect::WriteCache { .. }
            | Effect::WriteArea { .. }
            | Effect::WriteSuperblock { .. }
            | Effect::FlushCache { .. } => cache_write,
            Effect::ReadBacking { .. } => backing_read,
            Effect::WriteBacking { .. }
            | Effect::WriteAround { .. }
            | Effect::ZeroBacking { .. }
            | Effect::DiscardBacking { .. } => backing_write,
            Effect::FlushBacking { .. } => backing_flush,
            Effect::MarkStale { .. } => mark,
            Effect::Answer { .. } => 0,
        };
        self.random.one_in(one_in)
    }

    /// Devices have done so many in a hundred of what they were asked.
    fn turn(&mut self, percent: u64) {
        self.now += self.random.below(20_000_000);
        self.engine.clock(Tick(self.now), self.now / 1_000_000);
        for (token, effect) in std::mem::take(&mut self.under_way) {
            if self.random.below(100) >= percent {
                self.under_way.push((token, effect));
                continue;
            }
            let result = if self.fails(&effect) { Err(Fault) } else { Ok(()) };
            self.engine.completed(token, result, &mut self.memory);
        }
        self.engine.tick(Tick(self.now), self.now / 1_000_000, &mut self.memory);
        self.take();
    }

    fn operate(&mut self) {
        let volume = VolumeIndex(self.random.below(VOLUMES.into()) as u8);
        let modes = [Mode::WriteBack, Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround];
        let orders = [Order::Batch, Order::Strict, Order::Relaxed];
        let (mode, order) = (self.random.below(4), self.random.below(3));
        match self.random.below(8) {
            0 => self.engine.set_mode(volume, modes[mode as usize], &mut self.memory),
            1 => self.engine.set_order(volume, orders[order as usize], &mut self.memory),
            2 => self.engine.set_cutoff(volume, [0, 1, 64, 256][mode as usize]),
            3 => self.engine.drain(volume, &mut self.memory),
            4 => self.engine.want_checkpoint(),
            5 => {
                let _ = self.engine.scrub(None, &mut self.memory);
            }
            6 if self.engine.growth(volume).is_none() => {
                self.engine.begin_to_grow(volume, VOLUME_BYTES + 512, &mut self.memory);
            }
            _ => self.engine.cancel_growth(volume, &mut self.memory),
        }
        self.take();
    }

    /// Nothing fails any more, and all is answered in the end.
    fn ends(&mut self) {
        (self.faults, self.memory.rot, self.memory.missing) = (Faults::default(), 0, 0);
        for turn in 0..20_000 {
            if self.answered == self.asked {
                return;
            }
            self.now += if turn % 16 == 0 { 1_000_000_000 } else { 0 };
            self.turn(100);
        }
        let status = |index| self.engine.status(VolumeIndex(index));
        let status: Vec<_> = (0..VOLUMES).map(status).collect();
        panic!("{} of {} answered; {status:?}", self.answered, self.asked);
    }
}

fn storm(seeds: u64, rot: u64, faults: Faults) {
    for seed in 0..seeds {
        let mut storm = Storm::new(seed, faults, rot);
        for _ in 0..300 {
            let count = [4, 100, 5000][storm.random.below(3) as usize];
            storm.ask(count);
            if storm.random.one_in(10) {
                storm.operate();
            }
            let percent = [5, 50, 100][storm.random.below(3) as usize];
            storm.turn(percent);
        }
        storm.ends();
        let faulty = storm.engine.health() == CacheHealth::Failed;
        assert!(faults.cache_write > 0 || !faulty);
        assert!(faults.payload == 0 || storm.failed > 0);
    }
}

const SEEDS: u64 = 2;

#[test]
fn well() {
    storm(SEEDS, 0, Faults::default());
}

#[test]
fn over_a_cache_device_that_rots() {
    storm(SEEDS, 300, Faults { cache_read: 20, ..Faults::default() });
}

#[test]
fn over_a_cache_device_that_dies() {
    storm(4 * SEEDS, 0, Faults { cache_write: 4000, cache_read: 2, mark: 4, ..Faults::default() });
}

#[test]
fn over_backing_devices_that_fail() {
    let faults =
        Faults { backing_read: 100, backing_write: 100, backing_flush: 20, ..Faults::default() };
    storm(SEEDS, 0, faults);
}

#[test]
fn over_devices_that_all_fail() {
    let faults = Faults {
        cache_read: 10,
        cache_write: 20_000,
        backing_read: 10,
        backing_write: 10,
        backing_flush: 5,
        mark: 2,
        payload: 2000,
    };
    storm(SEEDS, 100, faults);
}

#[test]
fn with_guests_whose_bytes_cannot_be_had() {
    storm(SEEDS, 0, Faults { payload: 200, ..Faults::default() });
}
