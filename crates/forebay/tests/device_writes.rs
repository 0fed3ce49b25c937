// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much goes to the devices, and in what pieces: bytes to the cache device per byte of
//! payload, writes to the backing device per run of adjacent dirty blocks, and the size of the
//! pieces that long requests are split into. All of it is counted, none of it is timed.

use crate::support::{self, BLOCK, PATIENCE, Random, Rig, Void};
use forebay::io::{
    Device, Layer, MemoryDevice, Operation, OperationKind, Reactor, ReactorKind, Use,
};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const SLOTS: usize = 64;

/// What a device was asked for: the kind, the first byte, how many.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<(OperationKind, u64, u64)>>>);

impl Asked {
    fn push(&self, kind: OperationKind, offset: u64, length: u64) {
        self.0.lock().unwrap().push((kind, offset, length));
    }

    /// All since the last call.
    fn take(&self) -> Vec<(OperationKind, u64, u64)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    fn lengths(&self, wanted: OperationKind) -> Vec<u64> {
        let all = self.take().into_iter();
        all.filter(|asked| asked.0 == wanted).map(|asked| asked.2).collect()
    }

    fn memory(&self, bytes: u64) -> Box<Asking> {
        self.device(Box::new(MemoryDevice::new(bytes, 4096).unwrap()))
    }

    fn device(&self, inner: Box<dyn Device>) -> Box<Asking> {
        Box::new(Asking { inner, asked: self.clone() })
    }
}

/// A device that notes what it is asked for.
struct Asking {
    inner: Box<dyn Device>,
    asked: Asked,
}

impl Layer for Asking {
    fn below(&self) -> &dyn Device {
        self.inner.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.inner.as_mut()
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        self.asked.push(operation.kind(), operation.offset(), operation.length());
        self.inner.submit(reactor, operation, token, now);
    }

    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        if use_of.kind != OperationKind::Read {
            self.asked.push(use_of.kind, use_of.offset, use_of.length);
        }
        run()
    }
}

/// Nothing is closed or made durable because of the time: what is counted does not depend on how
/// fast the machine is.
fn timeless() -> Config {
    let never = u64::MAX / 4;
    Config { close_after: never, durable_after: never, dirty_age: never, ..Config::default() }
}

fn rig(cache: Box<dyn Device>, config: Config, memory: usize) -> Rig {
    Rig::new(cache, &support::shared_options(ReactorKind::Threads, config), memory)
}

/// Asks for all of `requests`, many at a time.
fn work(
    rig: &mut Rig,
    volume: VolumeIndex,
    op: Op,
    length: u64,
    mut offsets: impl Iterator<Item = u64>,
) {
    let mut free: Vec<usize> = (0..rig.memory.len() / length as usize).take(SLOTS).collect();
    let slots = free.len();
    let mut next = offsets.next();
    let mut answered = Instant::now();
    while next.is_some() || free.len() < slots {
        while let Some(offset) = next {
            let Some(slot) = free.pop() else { break };
            let span = rig.memory.span(slot * length as usize, length as usize);
            if rig.shard.submit(volume, op, offset, length, Some(span), slot as u64).is_err() {
                free.push(slot);
                break;
            }
            next = offsets.next();
        }
        rig.turn(Duration::from_millis(100), |answer| {
            assert_eq!(answer.result, Ok(()));
            answered = Instant::now();
            free.push(answer.cookie as usize);
        });
        let status = || format!("{:?}", rig.shard.engine().status(volume));
        assert!(answered.elapsed() < PATIENCE, "nothing is answered: {}", status());
    }
}

fn fill(rig: &Rig) {
    let mut random = Random(3);
    for place in (0..rig.memory.len()).step_by(4096) {
        rig.memory.span(place, 8).copy_in(&(random.next() | 1).to_le_bytes()); // not zeros
    }
}

const LAP_CACHE: u64 = 128 * MIB;
const LAPS: u64 = 3;

/// Bytes to the cache device for each byte of payload, over three laps after the first one: all of
/// them, and those of checkpoints.
fn amplification(flush_each: bool) -> (f64, f64) {
    let asked = Asked::default();
    let mut rig = rig(asked.memory(LAP_CACHE), timeless(), SLOTS * BLOCK as usize);
    fill(&rig);
    let backing = Box::new(Void::new(GIB));
    let volume = rig.add("v", Mode::WriteBack, backing);
    let mut random = Random(1);
    let mut lap = |rig: &mut Rig, count: u64| {
        let offsets = (0..count * LAP_CACHE / BLOCK).map(|_| random.below(GIB / BLOCK) * BLOCK);
        if !flush_each {
            return work(rig, volume, Op::Write { fua: false }, BLOCK, offsets);
        }
        // A flushed write takes two blocks of log: half as many are as many laps.
        for offset in offsets.step_by(2) {
            let span = rig.memory.span(0, BLOCK as usize);
            let write = Op::Write { fua: false };
            rig.request(volume, write, offset, BLOCK, Some(span)).unwrap();
            rig.request(volume, Op::Flush, 0, 0, None).unwrap();
        }
    };
    lap(&mut rig, 1);
    let read = |rig: &Rig| {
        let status = rig.shard.engine().status(volume).unwrap().stats;
        let bytes: u64 = asked.lengths(OperationKind::Write).iter().sum();
        (bytes, status.cache_blocks_written, status.written_blocks)
    };
    let before = read(&rig);
    lap(&mut rig, LAPS);
    let after = read(&rig);
    let payload = ((after.2 - before.2) * BLOCK) as f64;
    let log = ((after.1 - before.1) * BLOCK) as f64;
    assert!(log >= (LAPS * LAP_CACHE) as f64 * 0.97, "{log} bytes are no {LAPS} laps");
    assert!(rig.shard.engine().checkpoint_count() > 0, "no checkpoint was written");
    rig.close();
    (after.0 as f64 / payload, log / payload)
}

#[test]
fn the_log_takes_little_more_than_its_payload() {
    let (all, log) = amplification(false);
    println!(
        "bytes to the cache device per byte of 4 KiB random writes: {log:.4} without checkpoints, {all:.4} with"
    );
    assert!((1.0..=1.01).contains(&log), "{log}");
    assert!(all >= log && all <= 1.06, "{all}");
}

#[test]
fn a_flush_after_each_write_doubles_it() {
    let (all, log) = amplification(true);
    println!(
        "bytes to the cache device per byte, a flush after each 4 KiB: {log:.4} without checkpoints, {all:.4} with"
    );
    assert!((1.9..=2.05).contains(&log), "{log}");
    assert!(all <= 2.05 * 1.05, "{all}");
}

#[test]
fn write_back_writes_each_run_once_and_ascending() {
    const WRITES: u64 = 64 * MIB / BLOCK;
    const BACKING: u64 = 8 * GIB;
    let asked = Asked::default();
    let cache = Box::new(MemoryDevice::new(512 * MIB, 4096).unwrap());
    let mut rig = rig(cache, timeless(), SLOTS * BLOCK as usize);
    fill(&rig);
    let volume = rig.add("v", Mode::WriteBack, asked.device(Box::new(Void::new(BACKING))));
    let mut random = Random(9);
    let blocks: Vec<u64> = (0..WRITES).map(|_| random.below(BACKING / BLOCK)).collect();
    work(
        &mut rig,
        volume,
        Op::Write { fua: false },
        BLOCK,
        blocks.iter().map(|block| block * BLOCK),
    );
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    let early = rig.shard.engine().status(volume).unwrap().stats.batches;
    assert_eq!(early, 0, "write-back began before all was dirty");
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    let status = rig.shard.engine().status(volume).unwrap().stats;

    // Batches end with a flush of the backing device.
    let mut batches: Vec<Vec<(u64, u64)>> = vec![Vec::new()];
    for (kind, offset, length) in asked.take() {
        match kind {
            OperationKind::Flush => batches.push(Vec::new()),
            _ => batches.last_mut().unwrap().push((offset, length)),
        }
    }
    batches.retain(|batch| !batch.is_empty());
    // Which blocks a batch holds is the log's order: so many writes each, oldest first.
    let (mut writes, mut runs) = (0, 0);
    let mut from = 0;
    for batch in &batches {
        let mut end = 0;
        let mut held = BTreeSet::new();
        for (offset, length) in batch {
            assert!(*offset >= end, "a write at {offset} after one that ends at {end}");
            end = offset + length;
            held.extend(offset / BLOCK..end / BLOCK);
        }
        // The log's writes, in order, as long as this batch explains them.
        while from < blocks.len() && held.contains(&blocks[from]) {
            from += 1;
        }
        writes += batch.len();
        runs += held.iter().filter(|block| !held.contains(&block.wrapping_sub(1))).count();
    }
    assert_eq!(from, blocks.len(), "the batches hold every write, in the log's order");
    println!(
        "{WRITES} random writes drained: {writes} device writes for {runs} runs in {} batches",
        batches.len()
    );
    assert_eq!(batches.len() as u64, status.batches);
    assert!(writes as f64 <= 1.02 * runs as f64, "{writes} for {runs}");
    rig.close();
}

#[test]
fn a_cache_device_that_is_behind_is_no_reason_to_write_back() {
    let backing = Asked::default();
    // Eight buffers are taken faster than they are written.
    let config = Config { buffer_count: 8, ..timeless() };
    let cache = Box::new(MemoryDevice::new(512 * MIB, 4096).unwrap());
    let mut rig = rig(cache, config, 16 << 20);
    fill(&rig);
    let volume = rig.add("v", Mode::WriteBack, backing.device(Box::new(Void::new(GIB))));
    work(&mut rig, volume, Op::Write { fua: false }, MIB, (0..64).map(|at| at * MIB));
    assert!(backing.lengths(OperationKind::Write).is_empty(), "an eighth of the cache is dirty");
    rig.close();
}

#[test]
fn long_requests_stay_long_at_the_devices() {
    const WORK: u64 = 64 * MIB;
    const LEAST: u64 = 128 << 10;
    let (cache, backing) = (Asked::default(), Asked::default());
    let mut rig = rig(cache.memory(512 * MIB), timeless(), 16 << 20);
    fill(&rig);
    let volume = rig.add("v", Mode::WriteBack, backing.memory(GIB));
    let long = |first: u64| (0..WORK / MIB).map(move |at| first + at * MIB);
    let check = |name: &str, lengths: &[u64]| {
        let (least, all) = (lengths.iter().min().unwrap(), lengths.iter().sum::<u64>());
        println!("{name}: {all} bytes in {} pieces of at least {least}", lengths.len());
        assert!(all >= WORK, "{name}: {all} bytes");
        assert!(*least >= LEAST, "{name}: {least}");
    };
    cache.take();
    work(&mut rig, volume, Op::Write { fua: false }, MIB, long(0));
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    // Below the segments lie checkpoints; the last record ends where the work does.
    let first_segment = rig.shard.superblock().first_segment;
    let log = cache.take().into_iter().filter(|asked| asked.1 >= first_segment);
    let mut lengths: Vec<u64> =
        log.filter(|asked| asked.0 == OperationKind::Write).map(|asked| asked.2).collect();
    let last = lengths.pop().unwrap();
    lengths[0] += last;
    check("1 MiB writes at the cache device", &lengths);
    work(&mut rig, volume, Op::Read, MIB, long(0));
    // A segment ends where it ends: what is cut there may be short, but no read is cut elsewhere.
    let lengths = cache.lengths(OperationKind::Read);
    println!(
        "1 MiB reads at the cache device: {} pieces for {} reads, the shortest of {} bytes",
        lengths.len(),
        WORK / MIB,
        lengths.iter().min().unwrap()
    );
    let ends = WORK / BLOCK / 127 + 1;
    assert!(lengths.len() as u64 <= WORK / MIB + ends, "{} pieces", lengths.len());
    // The newest segment is still in memory.
    assert!(lengths.iter().sum::<u64>() > WORK - MIB);
    work(&mut rig, volume, Op::Read, MIB, long(512 * MIB));
    check("1 MiB reads at the backing device", &backing.lengths(OperationKind::Read));
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    check("writes to the backing device", &backing.lengths(OperationKind::Write));
    rig.close();
}
