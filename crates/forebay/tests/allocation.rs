// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No memory is allocated on the I/O path: after the first laps of the log the loop answers
//! writes, reads, flushes, zeros and discards, reclaims and writes back with what it has, on memory and on files, by threads and by
//! io_uring. What front ends do besides is counted in `forebay-serve/tests/allocation.rs`.

#![allow(clippy::unwrap_used)]

mod support;

use forebay::io::{Device, FileDevice, FileOptions, MemoryDevice, Reactor, ReactorKind};
use forebay::shard::{CACHE_SOURCE, backing_source};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_testing::counting::{self, Counting};
use std::time::{Duration, Instant};
use support::{BLOCK, Dir, PATIENCE, Random, Rig};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 256 << 20;
const DEPTH: usize = 64;
const BLOCKS_MAX: u64 = 64;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Guest {
    random: Random,
    free: Vec<usize>,
    written: u64,
}

impl Guest {
    /// Keeps many requests of every kind under way until so many bytes were written.
    fn work(&mut self, rig: &mut Rig, volume: VolumeIndex, bytes: u64) {
        let until = self.written + bytes;
        let mut answered = Instant::now();
        while self.written < until {
            assert!(answered.elapsed() < PATIENCE, "no progress");
            while let Some(slot) = self.free.pop() {
                if !self.submit(slot, rig, volume) {
                    self.free.push(slot);
                    break;
                }
            }
            let free = &mut self.free;
            rig.turn(Duration::from_millis(100), |answer| {
                assert_eq!(answer.result, Ok(()));
                answered = Instant::now();
                free.push(answer.cookie as usize);
            });
        }
    }

    fn submit(&mut self, slot: usize, rig: &mut Rig, volume: VolumeIndex) -> bool {
        let slot_bytes = ((BLOCKS_MAX + 1) * BLOCK) as usize;
        let most = if self.random.below(8) == 0 { 500 } else { 16 };
        let sectors = 1 + self.random.below(most);
        let whole = self.random.below(2) == 0;
        let (offset, length) = match whole {
            true => {
                let length = sectors.next_multiple_of(8) * 512;
                (self.random.below((BACKING_BYTES - length) / BLOCK) * BLOCK, length)
            }
            false => {
                let length = sectors * 512;
                (self.random.below((BACKING_BYTES - length) / 512) * 512, length)
            }
        };
        let memory = rig.span(slot, slot_bytes);
        let (op, span, length) = match self.random.below(100) {
            0..3 => (Op::Flush, None, 0),
            3..8 => (Op::WriteZeroes { fua: false }, None, length),
            8..12 => (Op::Discard, None, length),
            12..40 => (Op::Read, Some(memory), length),
            kind => {
                memory.copy_in(&self.random.next().to_le_bytes());
                let span = memory.part(0, length as usize);
                (Op::Write { fua: kind < 45 }, Some(span), length)
            }
        };
        let offset = if length == 0 { 0 } else { offset };
        let taken = rig.shard.submit(volume, op, offset, length, span, slot as u64).is_ok();
        if taken && matches!(op, Op::Write { .. }) {
            self.written += length;
        }
        taken
    }
}

/// A file of so many bytes, or memory where there is no directory.
fn device(dir: Option<&Dir>, name: &str, bytes: u64, source: u16) -> Box<dyn Device> {
    let Some(dir) = dir else { return Box::new(MemoryDevice::new(bytes, 512).unwrap()) };
    let options = FileOptions { source, ..FileOptions::default() };
    Box::new(FileDevice::open(&dir.file(name, bytes), &options).unwrap())
}

/// So many laps of the log, and then as many in which it is counted.
fn laps(mode: Mode, kind: ReactorKind, dir: Option<&Dir>, count: u64) {
    let config = Config { close_after: 5_000_000, dirty_age: 20_000_000, ..Config::default() };
    let options = support::shared_options(kind, config);
    let bytes = DEPTH * ((BLOCKS_MAX + 1) * BLOCK) as usize;
    let mut rig = Rig::new(device(dir, "cache", CACHE_BYTES, CACHE_SOURCE), &options, bytes);
    let source = backing_source(rig.shard.free_index().unwrap());
    let volume = rig.add("v", mode, device(dir, "backing", BACKING_BYTES, source));
    assert_eq!(rig.shard.reactor.kind(), kind);
    let mut guest = Guest { random: Random(1), free: (0..DEPTH).collect(), written: 0 };
    guest.work(&mut rig, volume, count * CACHE_BYTES);
    let batches = |rig: &Rig| rig.shard.engine().status(volume).unwrap().stats.batches;
    let batches_before = batches(&rig);
    let before = counting::begin();
    guest.work(&mut rig, volume, count * CACHE_BYTES);
    let allocated = counting::end(before);
    let batches = batches(&rig) - batches_before;
    println!("{mode:?}: {allocated} allocations in {count} laps, {batches} batches");
    assert!(batches > 0, "no write-back was under way");
    rig.wait("all is answered", |shard| shard.engine().request_count() == 0);
    rig.close();
    assert_eq!(allocated, 0, "{mode:?}");
}

fn laps_in_memory(mode: Mode) {
    laps(mode, ReactorKind::Threads, None, 4);
}

/// What a disk does in an order of its own, and what the kernel is asked in another way.
fn laps_on_files(mode: Mode, kind: ReactorKind, count: u64) {
    if let Err(error) = Reactor::new(kind, 16) {
        return forebay_testing::skip(&format!("allocation: {kind:?}: {error}"));
    }
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "allocation");
    laps(mode, kind, Some(&dir), count);
}

#[test]
fn write_back_allocates_nothing() {
    laps_in_memory(Mode::WriteBack);
}

#[test]
fn write_through_allocates_nothing() {
    laps_in_memory(Mode::WriteThrough);
}

#[test]
fn write_around_allocates_nothing() {
    laps_in_memory(Mode::WriteAround);
}

#[test]
fn write_back_to_files_allocates_nothing() {
    laps_on_files(Mode::WriteBack, ReactorKind::Uring, 2);
}

#[test]
fn write_through_to_files_allocates_nothing() {
    laps_on_files(Mode::WriteThrough, ReactorKind::Uring, 1);
}

#[test]
fn write_around_to_files_allocates_nothing() {
    laps_on_files(Mode::WriteAround, ReactorKind::Uring, 1);
}

#[test]
fn write_back_to_files_by_threads_allocates_nothing() {
    laps_on_files(Mode::WriteBack, ReactorKind::Threads, 2);
}
