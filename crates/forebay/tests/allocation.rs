// SPDX-License-Identifier: Apache-2.0 OR MIT
//! No memory is allocated on the I/O path: after the first laps of the log the loop answers
//! writes, reads, flushes, zeros and discards, reclaims and writes back with what it has.

#![allow(unsafe_code, clippy::unwrap_used)]

mod support;

use forebay::io::{MemoryDevice, ReactorKind};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};
use support::{BLOCK, PATIENCE, Random, Rig};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 256 << 20;
const DEPTH: usize = 64;
const BLOCKS_MAX: u64 = 64;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static TRAP: Cell<bool> = const { Cell::new(false) };
}

/// Counts what the thread of the loop allocates.
struct Counting;

fn count() {
    COUNT.with(|count| count.set(count.get() + 1));
    if TRAP.with(|trap| trap.replace(false)) {
        // The first one is shown with where it comes from.
        let before = COUNT.with(Cell::get);
        eprintln!("allocated at:\n{}", std::backtrace::Backtrace::force_capture());
        COUNT.with(|count| count.set(before));
    }
}

// SAFETY: everything is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

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

fn laps(mode: Mode) {
    let memory = |bytes| Box::new(MemoryDevice::new(bytes, 512).unwrap());
    let config = Config { close_after: 5_000_000, dirty_age: 20_000_000, ..Config::default() };
    let options = support::shared_options(ReactorKind::Threads, config);
    let bytes = DEPTH * ((BLOCKS_MAX + 1) * BLOCK) as usize;
    let mut rig = Rig::new(memory(CACHE_BYTES), &options, bytes);
    let volume = rig.add("v", mode, memory(BACKING_BYTES));
    let mut guest = Guest { random: Random(1), free: (0..DEPTH).collect(), written: 0 };
    guest.work(&mut rig, volume, 4 * CACHE_BYTES);
    TRAP.with(|trap| trap.set(true));
    let before = COUNT.with(Cell::get);
    guest.work(&mut rig, volume, 4 * CACHE_BYTES);
    let allocated = COUNT.with(Cell::get) - before;
    TRAP.with(|trap| trap.set(false));
    let status = rig.shard.engine().status(volume).unwrap();
    println!("{mode:?}: {allocated} allocations in 4 laps, {} batches", status.stats.batches);
    assert!(mode != Mode::WriteBack || status.stats.batches > 3, "no write-back was under way");
    rig.wait("all is answered", |shard| shard.engine().request_count() == 0);
    rig.close();
    assert_eq!(allocated, 0, "{mode:?}");
}

#[test]
fn write_back_allocates_nothing() {
    laps(Mode::WriteBack);
}

#[test]
fn write_through_allocates_nothing() {
    laps(Mode::WriteThrough);
}

#[test]
fn write_around_allocates_nothing() {
    laps(Mode::WriteAround);
}
