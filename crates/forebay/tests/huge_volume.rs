// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zeros and discards cost by the request and not by the byte, and memory is bounded by the cache
//! and not by the volume.

#![allow(clippy::unwrap_used)]

mod support;

use forebay::io::{
    Completion, Device, DeviceInfo, DeviceKind, MemoryDevice, Operation, Reactor, ReactorKind,
};
use forebay::shard::Shard;
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use std::io;
use std::time::{Duration, Instant};
use support::{BLOCK, Random, Rig};

const TIB: u64 = 1 << 40;

/// A disk of any size that holds zeros and forgets what it is told.
struct Void {
    info: DeviceInfo,
    done: Vec<Completion>,
    since: Option<Instant>,
}

impl Void {
    fn new(size_bytes: u64) -> Box<Void> {
        let info = DeviceInfo {
            name: "void".into(),
            size_bytes,
            logical_block: 512,
            kind: DeviceKind::Memory,
            volatile_cache: false,
            discards: true,
            direct: true,
            read_only: false,
        };
        Box::new(Void { info, done: Vec::new(), since: None })
    }
}

impl Device for Void {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        assert!(self.info.holds(operation.offset(), operation.length()), "{operation:?}");
        if let Operation::Read { span, .. } = operation {
            span.fill_zero();
        }
        self.done.push(Completion { token, result: Ok(()) });
        self.since.get_or_insert(now);
    }

    fn event(&mut self, _: &mut Reactor, _: u64, _: i32, _: Instant, _: &mut Vec<Completion>) {}

    fn poll(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
        self.since = None;
        done.append(&mut self.done);
    }

    fn deadline(&self) -> Option<Instant> {
        self.since
    }

    fn read_at(&self, _: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

fn rig(cache_bytes: u64) -> Rig {
    let cache = Box::new(MemoryDevice::new(cache_bytes, 4096).unwrap());
    let options = support::shared_options(ReactorKind::Threads, Config::default());
    Rig::new(cache, &options, 1 << 20)
}

#[test]
fn a_hundred_tebibytes_are_discarded_and_zeroed_at_once() {
    let mut rig = rig(1 << 30);
    let volume = rig.add("v", Mode::WriteBack, Void::new(100 * TIB));
    let span = rig.memory.span(0, 1 << 20);
    span.copy_in(&[7; 1 << 20]);
    for at in [0, 50 * TIB, 100 * TIB - (1 << 20)] {
        rig.request(volume, Op::Write { fua: false }, at, 1 << 20, Some(span)).unwrap();
    }
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    for op in [Op::Discard, Op::WriteZeroes { fua: false }] {
        // The shortest of a few: another process may have the processor for a while.
        let written = |rig: &Rig| {
            rig.shard.engine().status(volume).unwrap().stats.cache_blocks_written * BLOCK
        };
        let mut best = (Duration::MAX, 0);
        for _ in 0..5 {
            let (before, begun) = (written(&rig), Instant::now());
            rig.request(volume, op, 0, 100 * TIB, None).unwrap();
            rig.request(volume, Op::Flush, 0, 0, None).unwrap();
            best = (best.0.min(begun.elapsed()), best.1.max(written(&rig) - before));
        }
        println!("{op:?} of 100 TiB and a flush: {:?}, {} bytes of log", best.0, best.1);
        assert!(best.1 <= 8 << 10, "{op:?} took {} bytes of log", best.1);
        assert!(best.0 <= Duration::from_millis(10), "{op:?} took {:?}", best.0);
        for at in [0, 50 * TIB, 100 * TIB - (1 << 20)] {
            rig.request(volume, Op::Read, at, 1 << 20, Some(span)).unwrap();
            assert!(span.is_zero(), "{op:?}: {at} does not read as zeros");
        }
    }
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    assert!(rig.shard.close(Duration::from_secs(10)).unwrap());
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn random_zero_writes_stay_within_the_memory_bound() {
    const CACHE_BYTES: u64 = 256 << 20;
    const DEPTH: usize = 64;
    let writes: u64 = match std::env::var("FOREBAY_ZERO_WRITES") {
        Ok(count) => count.parse().unwrap(),
        Err(_) => 1_000_000,
    };
    let before = resident_bytes();
    let mut rig = rig(CACHE_BYTES);
    let volume = rig.add("v", Mode::WriteBack, Void::new(16 * TIB));
    let superblock = rig.shard.superblock();
    let (segments, blocks) = (superblock.segment_count, superblock.segment_blocks());
    let parts = Shard::memory_parts(segments, blocks, 1, rig.shard.engine().config());
    let engine: u64 = parts.iter().map(|part| part.1).sum();
    let span = rig.memory.span(0, BLOCK as usize);
    let mut random = Random(1);
    let (mut answered, mut under_way) = (0, 0);
    let begun = Instant::now();
    while answered < writes {
        while under_way < DEPTH {
            let offset = random.below(16 * TIB / BLOCK) * BLOCK;
            // Half of them as data that is all zeros.
            let taken = match random.below(2) {
                0 => {
                    rig.shard.submit(volume, Op::WriteZeroes { fua: false }, offset, BLOCK, None, 0)
                }
                _ => {
                    let op = Op::Write { fua: false };
                    rig.shard.submit(volume, op, offset, BLOCK, Some(span), 0)
                }
            };
            if taken.is_err() {
                break;
            }
            under_way += 1;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "{answered} in two minutes");
        rig.turn(Duration::from_millis(100), |answer| {
            assert_eq!(answer.result, Ok(()));
            answered += 1;
            under_way -= 1;
        });
    }
    let took = begun.elapsed().as_secs_f64();
    let grown = resident_bytes().saturating_sub(before);
    // The cache device is memory here, too; 16 MiB are the test's own.
    let bound = engine + CACHE_BYTES + (16 << 20);
    println!(
        "{writes} zero writes in {took:.1} s ({:.2} M/s); {} MiB resident of {} MiB",
        writes as f64 / took / 1e6,
        grown >> 20,
        bound >> 20
    );
    assert!(grown <= bound, "{grown} bytes resident, {bound} expected at most");
    assert!(rig.shard.close(Duration::from_secs(30)).unwrap());
}
