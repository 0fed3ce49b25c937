// SPDX-License-Identifier: Apache-2.0 OR MIT
//! More blocks of the cache rot than there is room to name them in: write-back makes room first, and
//! what cannot be named holds back no more than it must.

use crate::support::{self, BLOCK, Dir, Rig};
use forebay::io::{
    FaultDevice, FaultRule, FaultWhen, Faults, FileDevice, FileOptions, MemoryDevice,
    OperationKind, ReactorKind,
};
use forebay::shard::{CACHE_SOURCE, Opening};
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::Mode;
use forebay_core::map::extent::lost_room;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::{SegmentId, VolumeIndex};
use std::path::Path;
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 256 << 20;
const EXTENTS: u64 = 1024;
const ZERO_COUNT: u64 = EXTENTS - 24;
const SECOND: u64 = 1_000_000_000;
const WRITE: Op = Op::Write { fua: false };
const ZEROES: Op = Op::WriteZeroes { fua: false };

struct Case {
    rig: Rig,
    volume: VolumeIndex,
    faults: Faults,
}

/// So much data, dirty and on the cache device, each block by itself, with zeros in between that
/// nearly fill the extents; and from now on the cache device reads nothing but the first block of a segment.
fn rotten(data: u64) -> Case {
    rotten_for(data, SECOND / 5)
}

/// The same; what cannot be read for so long is lost.
fn rotten_for(data: u64, lost_after: u64) -> Case {
    let memory = |bytes| Box::new(MemoryDevice::new(bytes, 4096).unwrap());
    let config = Config {
        extent_count_max: EXTENTS as u32,
        buffer_count: 8,
        dirty_age: 3_600 * SECOND,
        dirty_percent: 100,
        retry_after: SECOND / 5,
        lost_after,
        ..Config::default()
    };
    let (faults, below) = (Faults::new(), Faults::new());
    let cache = Box::new(FaultDevice::new(memory(CACHE_BYTES), faults.clone()));
    let mut rig = Rig::new(cache, &support::options(ReactorKind::Threads, config), 1 << 20);
    let backing = Box::new(FaultDevice::new(memory(BACKING_BYTES), below.clone()));
    let volume = rig.add("v", Mode::WriteBack, backing);
    // Nothing is written back yet. The first flush is the backing device's, too.
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    below.add(FaultRule::new(None, FaultWhen::From(0)));
    let span = rig.memory.span(0, BLOCK as usize);
    for at in 0..data {
        // Not in the order of blocks: that is the one in which a batch finds them lost.
        let number = at * 1_667 % data;
        span.copy_in(&(number + 1).to_le_bytes());
        rig.request(volume, WRITE, 4 * number * BLOCK, BLOCK, Some(span)).unwrap();
        if at * ZERO_COUNT / data != (at + 1) * ZERO_COUNT / data {
            rig.request(volume, ZEROES, (4 * number + 2) * BLOCK, BLOCK, None).unwrap();
        }
    }
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    let state = rig.shard.engine().status(volume).unwrap();
    assert_eq!((state.dirty_extents, state.stats.lost_blocks), (ZERO_COUNT, 0));
    // Of a device that reads nothing nothing would be lost: it would be gone.
    let superblock = rig.shard.superblock();
    for segment in (0..superblock.segment_count).map(SegmentId) {
        let offset = superblock.address(segment, 1);
        let length = u64::from(superblock.segment_bytes) - BLOCK;
        let when = FaultWhen::Over { offset, length };
        faults.add(FaultRule::new(Some(OperationKind::Read), when));
    }
    below.clear();
    Case { rig, volume, faults }
}

/// Writes twice as much as the log holds, far away.
fn go_round(rig: &mut Rig, volume: VolumeIndex) {
    let span = rig.memory.span(0, 1 << 20);
    span.copy_in(&vec![7; 1 << 20]);
    for at in 0..(2 * CACHE_BYTES) >> 20 {
        let offset = (128 << 20) + ((at % 64) << 20);
        rig.request(volume, WRITE, offset, 1 << 20, Some(span)).unwrap();
    }
    let state = rig.shard.engine().status(volume).unwrap();
    assert!(state.stats.reclaimed_segments > 128, "{state:?}");
}

impl Case {
    fn read(&mut self, block: u64) -> Result<u64, RequestError> {
        let span = self.rig.memory.span(0, BLOCK as usize);
        self.rig.request(self.volume, Op::Read, block * BLOCK, BLOCK, Some(span))?;
        let mut number = [0; 8];
        span.copy_out(&mut number);
        Ok(u64::from_le_bytes(number))
    }

    /// Blocks of the data that cannot be read; the others must be right.
    fn lost(&mut self, data: u64) -> u64 {
        let mut lost = 0;
        for at in 0..data {
            match self.read(4 * at) {
                Ok(number) => assert_eq!(number, at + 1),
                Err(error) => {
                    assert_eq!(error, RequestError::Io);
                    lost += 1;
                }
            }
        }
        lost
    }
}

#[test]
fn write_back_makes_room_to_name_what_was_lost() {
    let data = EXTENTS + lost_room(EXTENTS as usize) as u64 - 256;
    let mut case = rotten(data);
    case.rig.shard.drain(case.volume);
    let volume = case.volume;
    case.rig.wait("drained", |shard| shard.engine().is_clean(volume));
    let state = case.rig.shard.engine().status(volume).unwrap();
    assert!(!state.backing_failing, "{state:?}");
    case.faults.clear();
    let lost = case.lost(data);
    // All but what was still in a buffer.
    assert!(lost > data - 200 && lost <= state.stats.lost_blocks, "{lost} lost, {state:?}");
    println!("{lost} of {data} lost, {} batches", state.stats.batches);
    for at in 0..data {
        assert_eq!(case.read(4 * at + 2), Ok(0));
    }
    // Twice round the log: what was lost is named again as often.
    go_round(&mut case.rig, volume);
    assert_eq!(case.lost(data), lost);
    // A block that is written again is lost no more.
    let span = case.rig.memory.span(0, BLOCK as usize);
    for at in 0..data {
        span.copy_in(&(at + 1).to_le_bytes());
        case.rig.request(volume, WRITE, 4 * at * BLOCK, BLOCK, Some(span)).unwrap();
    }
    assert_eq!(case.lost(data), 0);
    case.rig.close();
}

/// The cache device fails every read for some moments, and flushes well: what a batch could not read then it reads again.
#[test]
fn what_cannot_be_read_for_a_while_is_not_lost() {
    let data = EXTENTS;
    let mut case = rotten_for(data, 5 * SECOND);
    let volume = case.volume;
    let faults = case.rig.shard.engine().status(volume).unwrap().stats.backing_faults;
    case.rig.shard.drain(volume);
    case.rig.wait("in doubt", |shard| shard.engine().status(volume).unwrap().in_doubt);
    assert_eq!(case.read(0), Err(RequestError::Io), "nor can its guest");
    case.faults.clear();
    case.rig.wait("drained", |shard| shard.engine().is_clean(volume));
    let state = case.rig.shard.engine().status(volume).unwrap();
    assert_eq!((state.stats.lost_blocks, state.stats.backing_faults), (0, faults));
    assert_eq!(case.lost(data), 0);
    case.rig.close();
}

#[test]
fn what_cannot_be_named_holds_back_zeros_and_not_data() {
    let data = EXTENTS + lost_room(EXTENTS as usize) as u64 + 1_500;
    let mut case = rotten(data);
    let volume = case.volume;
    // Zeros wait for room until it is clear that there will be none; then they are refused.
    let refused = (0..EXTENTS).any(|at| {
        let zeroes = case.rig.request(volume, ZEROES, (4 * at + 3) * BLOCK, BLOCK, None);
        zeroes == Err(RequestError::Io)
    });
    assert!(refused);
    case.faults.clear();
    let state = case.rig.shard.engine().status(volume).unwrap();
    assert!(state.dirty && !state.backing_failing, "{state:?}");
    // Written again, nothing is lost, and all goes on.
    let span = case.rig.memory.span(0, BLOCK as usize);
    for at in 0..data {
        span.copy_in(&(at + 1).to_le_bytes());
        case.rig.request(volume, WRITE, 4 * at * BLOCK, BLOCK, Some(span)).unwrap();
    }
    case.rig.shard.drain(volume);
    case.rig.wait("drained", |shard| shard.engine().is_clean(volume));
    assert_eq!(case.lost(data), 0);
    case.rig.request(volume, ZEROES, 3 * BLOCK, BLOCK, None).unwrap();
    case.rig.close();
}

/// A process had room for many extents, filled it and died; the next one is asked to do with less. It takes
/// what it must, tells so before it goes on, and then holds no more than it told.
#[test]
fn a_log_with_more_extents_than_there_is_room_for_is_opened_with_room_for_them() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "room");
    let path = dir.file("cache", CACHE_BYTES);
    let open = || {
        let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        Box::new(FileDevice::open(&path, &options).unwrap())
    };
    let options = |extents| {
        let age = 3_600_000_000_000;
        let config = Config { extent_count_max: extents, dirty_age: age, ..Config::default() };
        support::options(ReactorKind::Threads, config)
    };
    let faults = Faults::new();
    let backing = || {
        let memory = Box::new(MemoryDevice::new(BACKING_BYTES, 4096).unwrap());
        Box::new(FaultDevice::new(memory, faults.clone()))
    };
    let mut rig = Rig::new(open(), &options(4 * EXTENTS as u32), 1 << 20);
    let volume = rig.add("v", Mode::WriteBack, backing());
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    faults.add(FaultRule::new(None, FaultWhen::From(0)));
    let count = 3 * EXTENTS;
    for at in 0..count {
        rig.request(volume, ZEROES, 2 * at * BLOCK, BLOCK, None).unwrap();
    }
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    drop(rig);

    // Whoever looks first may leave it at that: nothing has changed.
    let opening = Opening::begin(open(), &options(EXTENTS as u32)).unwrap();
    assert_eq!(u64::from(opening.config().extent_count_max), count);
    drop(opening);
    let mut rig = Rig::open(open(), &options(EXTENTS as u32), 1 << 20);
    let engine = rig.shard.engine();
    assert_eq!(u64::from(engine.config().extent_count_max), count);
    let superblock = rig.shard.superblock();
    let (segments, blocks) = (superblock.segment_count, superblock.segment_blocks());
    let told = Engine::memory_parts(segments, blocks, 1, engine.config());
    for (name, held) in engine.memory_held() {
        let told = told.iter().find(|part| part.0 == name).unwrap().1;
        assert!(held <= told, "{name}: {held} bytes held, {told} told");
    }
    rig.shard.serve(volume, backing());
    faults.clear();
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    rig.close();
    // Written back, they need no room any more.
    let opening = Opening::begin(open(), &options(EXTENTS as u32)).unwrap();
    assert_eq!(u64::from(opening.config().extent_count_max), EXTENTS);
}

/// Where record headers lie in a cache.
fn records(path: &Path) -> Vec<usize> {
    let bytes = std::fs::read(path).unwrap();
    let blocks = bytes.chunks(BLOCK as usize).enumerate();
    blocks.filter(|block| block.1.starts_with(b"FBRECORD")).map(|block| block.0).collect()
}

#[test]
fn a_long_range_that_was_lost_stays_so_around_what_was_written_since() {
    use std::os::unix::fs::FileExt;
    const FIRST: u64 = 1_000;
    const COUNT: u64 = 10_000;
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "lost");
    let path = dir.file("cache", CACHE_BYTES);
    let open = || {
        let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        Box::new(FileDevice::open(&path, &options).unwrap())
    };
    let backing = || Box::new(MemoryDevice::new(BACKING_BYTES, 4096).unwrap());
    let config = Config { dirty_age: 3_600_000_000_000, ..Config::default() };
    let options = support::options(ReactorKind::Threads, config);
    let mut rig = Rig::new(open(), &options, 1 << 20);
    let volume = rig.add("v", Mode::WriteBack, backing());
    let write = |rig: &mut Rig, block: u64| {
        let span = rig.memory.span(0, BLOCK as usize);
        span.copy_in(&block.to_le_bytes());
        rig.request(volume, WRITE, block * BLOCK, BLOCK, Some(span)).unwrap();
    };
    let read = |rig: &mut Rig, block: u64| {
        let span = rig.memory.span(0, BLOCK as usize);
        rig.request(volume, Op::Read, block * BLOCK, BLOCK, Some(span))?;
        let mut number = [0; 8];
        span.copy_out(&mut number);
        Ok(u64::from_le_bytes(number))
    };
    // One of the blocks was there before, and is still in the index under what is lost.
    write(&mut rig, FIRST + 7);
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    let before = records(&path);
    rig.request(volume, ZEROES, FIRST * BLOCK, COUNT * BLOCK, None).unwrap();
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    let rotten: Vec<usize> =
        records(&path).into_iter().filter(|block| !before.contains(block)).collect();
    write(&mut rig, 1);
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    drop(rig);
    // The header that says zero is rotten; the next one says which blocks it was about.
    assert_eq!(rotten.len(), 1);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[0xA5; 64], rotten[0] as u64 * BLOCK + 512).unwrap();
    drop(file);

    let mut rig = Rig::open(open(), &options, 1 << 20);
    rig.shard.serve(volume, backing());
    assert_eq!(rig.shard.engine().status(volume).unwrap().stats.lost_blocks, COUNT);
    let written = [FIRST + 1, FIRST + 5_000, FIRST + 5_001, FIRST + COUNT - 1];
    for block in written {
        write(&mut rig, block);
    }
    // Once more: what the log says of it is applied as it was, and taken apart when it is reclaimed.
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    drop(rig);
    let mut rig = Rig::open(open(), &options, 1 << 20);
    rig.shard.serve(volume, backing());
    let lost = [FIRST, FIRST + 7, FIRST + 2, FIRST + 4_999, FIRST + 5_002, FIRST + COUNT - 2];
    for round in 0..3 {
        for block in lost {
            assert_eq!(read(&mut rig, block), Err(RequestError::Io), "{block}, round {round}");
        }
        for block in written.into_iter().chain([1]) {
            assert_eq!(read(&mut rig, block), Ok(block), "round {round}");
        }
        assert_eq!(read(&mut rig, FIRST - 1), Ok(0));
        assert_eq!(read(&mut rig, FIRST + COUNT), Ok(0));
        go_round(&mut rig, volume);
    }
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    rig.close();
}

/// One volume's backing device is dead, and its share of the log is full of dirty data that rots, block
/// by block, over many openings. What is lost of it must not be named in segments that are kept for
/// the other volumes, since nothing would give them back.
#[test]
fn what_rots_behind_a_dead_backing_device_takes_no_segment_of_other_volumes() {
    const ROUNDS: u64 = 24;
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "dead");
    let path = dir.file("cache", CACHE_BYTES);
    let rot = Faults::new();
    let open = || {
        let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        let file = Box::new(FileDevice::open(&path, &options).unwrap());
        Box::new(FaultDevice::new(file, rot.clone()))
    };
    let memory = || Box::new(MemoryDevice::new(BACKING_BYTES, 4096).unwrap());
    let dead = || {
        let faults = Faults::new();
        faults.add(FaultRule::new(None, FaultWhen::From(0)));
        Box::new(FaultDevice::new(memory(), faults))
    };
    let soon = 20_000_000;
    let config = Config {
        buffer_count: 8,
        close_after: soon,
        durable_after: soon,
        retry_after: soon,
        ..Config::default()
    };
    let options = support::options(ReactorKind::Threads, config);
    let mut rig = Rig::new(open(), &options, 1 << 20);
    let bad = rig.add("bad", Mode::WriteBack, dead());
    let good = rig.add("good", Mode::WriteBack, memory());
    let span = rig.memory.span(0, 1 << 20);
    span.copy_in(&vec![7; 1 << 20]);
    // Until a write waits, neither for a buffer nor for its delay, which is over after a tenth of a second: when twice that is over,
    // and nothing comes of it in so many turns.
    let waits = |rig: &Rig| {
        let state = rig.shard.engine().status(bad).unwrap();
        state.waiting > 0 && !state.undurable
    };
    let (mut offset, mut is_full) = (0, false);
    while !is_full {
        rig.shard.submit(bad, WRITE, offset, 1 << 20, Some(span), offset).unwrap();
        offset += 1 << 20;
        let (mut answered, mut since, mut turns) = (false, Instant::now(), 0);
        while !answered && !is_full {
            rig.turn(Duration::from_millis(10), |_| answered = true);
            if !waits(&rig) {
                (since, turns) = (Instant::now(), 0);
            } else if since.elapsed() > Duration::from_millis(200) {
                turns += 1;
            }
            is_full = turns > 30;
        }
    }
    let (free, _) = rig.shard.engine().free_segments();
    drop(rig);
    for round in 0..ROUNDS {
        let mut rig = Rig::open(open(), &options, 1 << 20);
        rig.shard.serve(bad, dead());
        rig.shard.serve(good, memory());
        rot.add(FaultRule::new(Some(OperationKind::Read), FaultWhen::From(0)));
        let span = rig.memory.span(0, BLOCK as usize);
        let read = rig.request(bad, Op::Read, round * BLOCK, BLOCK, Some(span));
        assert_eq!(read, Err(RequestError::Io));
        rig.wait("durable", |shard| !shard.engine().status(bad).unwrap().undurable);
        rot.clear();
    }
    let mut rig = Rig::open(open(), &options, 1 << 20);
    rig.shard.serve(bad, dead());
    rig.shard.serve(good, memory());
    assert_eq!(rig.shard.engine().free_segments().0, free);
    let span = rig.memory.span(0, 1 << 20);
    for at in 0..8 {
        rig.request(good, WRITE, at << 20, 1 << 20, Some(span)).unwrap();
    }
}
