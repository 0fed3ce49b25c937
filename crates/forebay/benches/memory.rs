// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the library costs in CPU, on one thread and on devices that are memory: 4 KiB random
//! writes over at least three laps of the log, and verified read hits, each against what nobody
//! can do without. `cargo bench -p forebay --bench memory`.
//!
//! The cache device copies; its copies are timed and shown apart. The backing device is a disk of
//! zeros that takes everything, so writing back costs what reading, checking and sorting cost.

#![allow(clippy::unwrap_used)]

#[path = "../tests/support/mod.rs"]
mod rig;
mod support;

use forebay::io::{
    Arena, Completion, Device, DeviceInfo, MemoryDevice, Operation, Reactor, ReactorKind,
};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::policy::writeback::Stage;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use rig::{BLOCK, Random, Rig, Void};
use serde_json::json;
use std::collections::VecDeque;
use std::hint::black_box;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{Median, bound, record, rounds, row, thread_cpu_ns};

const GIB: u64 = 1 << 30;
/// The log is this long; its map is larger than an L2 cache of today.
const CACHE_BYTES: u64 = GIB;
const LAPS: u64 = 3;
const DEPTH: usize = 32;
/// Blocks that the guest writes from: an L2 cache holds them.
const SOURCE_BLOCKS: usize = 64;
/// So many requests are at hand, as with a server that has received several.
const AHEAD: u64 = 4;
/// The segment buffers are this large together; copies go round in them.
const RING_BYTES: usize = 32 << 20;
const READS: u64 = 1 << 20;

/// Memory that copies, how long the copying took, and how often the clock was read twice for that.
struct Timed {
    inner: MemoryDevice,
    nanos: Arc<AtomicU64>,
    times: Arc<AtomicU64>,
}

impl Device for Timed {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn submit(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        self.inner.submit(reactor, operation, token, now);
    }

    fn event(&mut self, _: &mut Reactor, _: u64, _: i32, _: Instant, _: &mut Vec<Completion>) {}

    fn poll(&mut self, reactor: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        if self.inner.deadline().is_none() {
            return;
        }
        let begun = thread_cpu_ns();
        self.inner.poll(reactor, now, done);
        self.nanos.fetch_add(thread_cpu_ns() - begun, Ordering::Relaxed);
        self.times.fetch_add(1, Ordering::Relaxed);
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}

/// What no cache can do without, in nanoseconds of CPU.
struct Floor {
    source: Arena,
    ring: Arena,
    table: Vec<u64>,
    device: Option<Arena>,
    at: usize,
}

impl Floor {
    /// `map_bytes`: how large the table is.
    fn new(map_bytes: u64) -> Floor {
        let source = Arena::anonymous(SOURCE_BLOCKS * BLOCK as usize).unwrap();
        fill_random(&source);
        // A cycle through all of the table in random order: each access needs the one before.
        let count = (map_bytes / 8) as usize;
        let mut table: Vec<u64> = (0..count as u64).collect();
        let mut random = Random(7);
        for at in (1..count).rev() {
            table.swap(at, random.below(at as u64) as usize);
        }
        Floor { source, ring: Arena::anonymous(RING_BYTES).unwrap(), table, device: None, at: 0 }
    }

    /// A memcpy from hot memory to the next place of the ring.
    fn copy(&mut self, count: u64) -> f64 {
        let blocks = RING_BYTES / BLOCK as usize;
        per(count, |turn| {
            let from = self.source.span(turn as usize % SOURCE_BLOCKS * 4096, 4096);
            self.ring.span(turn as usize % blocks * 4096, 4096).copy_from(from);
        })
    }

    /// The checksum of a block that the L2 cache holds.
    fn checksum(&self, count: u64) -> f64 {
        per(count, |turn| {
            let from = self.source.span(turn as usize % SOURCE_BLOCKS * 4096, 4096);
            black_box(from.block_checksum());
        })
    }

    /// An access whose place the one before tells.
    fn access(&mut self, count: u64) -> f64 {
        let mut at = self.at;
        let nanos = per(count, |_| at = self.table[at] as usize);
        self.at = black_box(at);
        nanos
    }

    /// A memcpy from a random place of memory as large as the cache device.
    fn read(&mut self, count: u64) -> f64 {
        let device = self.device.as_ref().unwrap();
        let mut random = Random(count);
        per(count, |turn| {
            let from = device.span((random.below(CACHE_BYTES / BLOCK) * BLOCK) as usize, 4096);
            self.source.span(turn as usize % SOURCE_BLOCKS * 4096, 4096).copy_from(from);
        })
    }
}

fn per(count: u64, mut each: impl FnMut(u64)) -> f64 {
    let begun = thread_cpu_ns();
    (0..count).for_each(&mut each);
    (thread_cpu_ns() - begun) as f64 / count as f64
}

fn fill_random(arena: &Arena) {
    let mut random = Random(3);
    for place in (0..arena.len()).step_by(8) {
        arena.span(place, 8).copy_in(&random.next().to_le_bytes());
    }
}

/// A shard, a volume, and how long the cache device copied.
struct Side {
    name: &'static str,
    rig: Rig,
    volume: VolumeIndex,
    blocks: u64,
    copying: Arc<AtomicU64>,
    times: Arc<AtomicU64>,
    random: Random,
    /// CPU nanoseconds of reading the clock of CPU time, which is a system call.
    clock: f64,
}

/// CPU nanoseconds of one request, without those of reading the clock.
#[derive(Clone, Copy)]
struct Cost {
    all: f64,
    copying: f64,
}

impl Side {
    fn new(name: &'static str, volume_bytes: u64) -> Side {
        let inner = MemoryDevice::new(CACHE_BYTES, 4096).unwrap();
        let zeros = vec![0; 1 << 20];
        for offset in (0..CACHE_BYTES).step_by(1 << 20) {
            inner.write_at(offset, &zeros).unwrap(); // takes the page now
        }
        let (copying, times) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let device = Timed { inner, nanos: copying.clone(), times: times.clone() };
        let options = rig::shared_options(ReactorKind::Auto, Config::default());
        let mut rig = Rig::new(Box::new(device), &options, SOURCE_BLOCKS * BLOCK as usize);
        fill_random(&rig.memory);
        let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(volume_bytes)));
        let clock = per(1 << 16, |_| _ = black_box(thread_cpu_ns()));
        let blocks = volume_bytes / BLOCK;
        Side { name, rig, volume, blocks, copying, times, random: Random(1), clock }
    }

    /// So many requests, [`DEPTH`] at a time; `choose` gives the block.
    fn run(&mut self, op: Op, count: u64, choose: impl Fn(&mut Random) -> u64) -> Cost {
        self.run_turns(op, count, choose, |_| ())
    }

    /// The same; `ended` is called behind each turn of the loop.
    fn run_turns(
        &mut self,
        op: Op,
        count: u64,
        choose: impl Fn(&mut Random) -> u64,
        mut ended: impl FnMut(&Side),
    ) -> Cost {
        let (cpu, copied) = (thread_cpu_ns(), self.copying.load(Ordering::Relaxed));
        let times = self.times.load(Ordering::Relaxed);
        let (mut asked, mut answered) = (0, 0);
        let mut coming = VecDeque::with_capacity(AHEAD as usize);
        while answered < count {
            while asked < count.min(answered + DEPTH as u64) {
                while (coming.len() as u64) < AHEAD.min(count - asked) {
                    let offset = choose(&mut self.random) * BLOCK;
                    self.rig.shard.expect(self.volume, offset);
                    coming.push_back(offset);
                }
                let offset = coming.front().unwrap();
                let block = asked as usize % SOURCE_BLOCKS;
                let span = Some(self.rig.memory.span(block * 4096, 4096));
                if self.rig.shard.submit(self.volume, op, *offset, BLOCK, span, 0).is_err() {
                    break;
                }
                coming.pop_front();
                asked += 1;
            }
            self.rig.turn(Duration::from_millis(100), |answer| {
                assert_eq!(answer.result, Ok(()));
                answered += 1;
            });
            ended(self);
        }
        let copying = self.copying.load(Ordering::Relaxed) - copied;
        // Of each two readings one lies between the moments that are read, the other outside.
        let clock = (self.times.load(Ordering::Relaxed) - times) as f64 * self.clock;
        Cost {
            all: ((thread_cpu_ns() - cpu) as f64 - 2.0 * clock) / count as f64,
            copying: (copying as f64 - clock) / count as f64,
        }
    }

    fn write_laps(&mut self, laps: u64) -> Cost {
        self.write_turns(laps, |_| ())
    }

    fn write_turns(&mut self, laps: u64, ended: impl FnMut(&Side)) -> Cost {
        let blocks = self.blocks;
        let op = Op::Write { fua: false };
        self.run_turns(op, laps * CACHE_BYTES / BLOCK, |random| random.below(blocks), ended)
    }

    /// How long the turns of the loop are, each with [`DEPTH`] writes: for as long whoever comes waits. CPU microseconds without the
    /// device's copies, and whether a batch began in it, the longest first.
    fn turns(&mut self, laps: u64) -> Vec<(f64, bool)> {
        let mut turns = Vec::with_capacity((2 * laps * CACHE_BYTES / BLOCK) as usize / DEPTH);
        let now = |side: &Side| {
            let stage = side.rig.shard.engine().status(side.volume).unwrap().writeback;
            (thread_cpu_ns(), side.copying.load(Ordering::Relaxed), stage == Stage::Writing)
        };
        let mut before = now(self);
        self.write_turns(laps, |side| {
            let (cpu, copying, writing) = now(side);
            let own = (cpu - before.0) as f64 - (copying - before.1) as f64;
            turns.push((own / 1e3, writing && !before.2));
            before = (cpu, copying, writing);
        });
        turns.sort_by(|one, other| other.0.total_cmp(&one.0));
        turns
    }
}

fn main() -> std::process::ExitCode {
    let rounds = rounds();
    let mut sides = [Side::new("256 GiB", 256 * GIB), Side::new("4 GiB", 4 * GIB)];
    // Reads: a volume that the cache holds as a whole, in the log and not in buffers.
    let mut hits = Side::new("hits", GIB / 2);
    let map_bytes: u64 = {
        let superblock = sides[0].rig.shard.superblock();
        let (segments, blocks) = (superblock.segment_count, superblock.segment_blocks());
        let config = *sides[0].rig.shard.engine().config();
        let parts = forebay_core::engine::Engine::memory_parts(segments, blocks, 1, &config);
        parts[..3].iter().map(|part| part.1).sum()
    };
    let mut floor = Floor::new(map_bytes);
    let device = Arena::anonymous(CACHE_BYTES as usize).unwrap();
    fill_random(&device);
    floor.device = Some(device);
    for side in &mut sides {
        side.write_laps(1);
    }
    let held = GIB / 2 / BLOCK;
    let write = Op::Write { fua: false };
    let next = std::cell::Cell::new(0);
    hits.run(write, held, |_| next.replace(next.get() + 1));
    hits.rig.request(hits.volume, Op::Flush, 0, 0, None).unwrap();
    hits.run(Op::Read, READS / 4, |random| random.below(held));

    let (mut copy, mut sum, mut access, mut read) = (vec![], vec![], vec![], vec![]);
    let mut costs = [vec![], vec![]];
    let mut reads = vec![];
    for _ in 0..rounds {
        copy.push(floor.copy(READS / 2));
        sum.push(floor.checksum(READS / 2));
        access.push(floor.access(READS));
        for (side, costs) in sides.iter_mut().zip(&mut costs) {
            costs.push(side.write_laps(LAPS));
        }
        read.push(floor.read(READS / 2));
        reads.push(hits.run(Op::Read, READS, |random| random.below(held)));
    }

    let ns = |values: &[f64]| Median::of(values.iter().copied());
    println!("4 KiB in memory, one thread, CPU time; medians of {rounds} interleaved rounds");
    row("memcpy of 4 KiB into a ring of 32 MiB", "ns", ns(&copy));
    row("checksum of a hot block", "ns", ns(&sum));
    row(&format!("dependent access in {} MiB", map_bytes >> 20), "ns", ns(&access));
    println!("  reading the clock, taken off below: {:.0} ns", sides[0].clock);
    let mut result = json!({
        "cache_bytes": CACHE_BYTES, "laps": LAPS, "map_bytes": map_bytes,
        "memcpy_ns": ns(&copy).json(), "checksum_ns": ns(&sum).json(),
        "access_ns": ns(&access).json(), "clock_ns": sides[0].clock,
    });
    for (side, costs) in sides.iter().zip(&costs) {
        let all = Median::of(costs.iter().map(|cost| cost.all));
        let copying = Median::of(costs.iter().map(|cost| cost.copying));
        let own = Median::of(costs.iter().map(|cost| cost.all - cost.copying));
        let ratio = Median::of(
            (0..rounds)
                .map(|at| (costs[at].all - costs[at].copying) / (copy[at] + sum[at] + access[at])),
        );
        println!("writes over {}, {LAPS} laps of {} GiB:", side.name, CACHE_BYTES / GIB);
        row("all", "ns", all);
        row("of that, copies of the cache device", "ns", copying);
        row("the library's part", "ns", own);
        println!("  {:<46} {:>10.2} M/s", "rate, the device's copies left out", 1e3 / own.median);
        row("ratio to memcpy + checksum + access", "", ratio);
        bound("", ratio.median, ratio.median <= 2.0, "<= 2");
        let stats = side.rig.shard.engine().status(side.volume).unwrap().stats;
        println!("  batches {}", stats.batches);
        result[side.name] = json!({
            "all_ns": all.json(), "device_ns": copying.json(), "own_ns": own.json(),
            "ratio": ratio.json(), "aim": 2.0,
        });
    }
    let all = Median::of(reads.iter().map(|cost| cost.all));
    let ceiling = Median::of((0..rounds).map(|at| read[at] + sum[at] + access[at]));
    let share = Median::of((0..rounds).map(|at| (read[at] + sum[at] + access[at]) / reads[at].all));
    println!("verified read hits, the device's copy included:");
    row("memcpy from a random place of the device", "ns", ns(&read));
    row("all", "ns", all);
    row("ceiling's time: memcpy + checksum + access", "ns", ceiling);
    row("rate in parts of the ceiling", "", share);
    bound("", share.median, share.median >= 0.6, ">= 0.6");
    result["reads"] = json!({
        "memcpy_ns": ns(&read).json(), "all_ns": all.json(), "ceiling_ns": ceiling.json(),
        "share": share.json(), "aim": 0.6,
    });
    let turns = sides[1].turns(LAPS);
    let at = |part: f64| turns[(turns.len() as f64 * part) as usize].0;
    let batches = turns.iter().filter(|turn| turn.1).count();
    println!("turns of the loop, {DEPTH} writes over {} in each, of one run:", sides[1].name);
    println!(
        "  half take no more than {:.0} us, 99.9 % no more than {:.0}, the longest {:.0}; {batches} of {} began a batch, of the longest {batches} {}",
        at(0.5),
        at(0.001),
        at(0.0),
        turns.len(),
        turns[..batches].iter().filter(|turn| turn.1).count(),
    );
    result["turns_us"] =
        json!({ "p50": at(0.5), "p99.9": at(0.001), "most": at(0.0), "count": turns.len() });
    record("memory", "memory-4k", "memory that copies; backing of zeros", rounds, result);
    for side in sides {
        assert!(side.rig.shard.close(Duration::from_secs(30)).unwrap());
    }
    support::end()
}
