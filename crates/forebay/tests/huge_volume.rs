// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zeros and discards cost by the request and not by the byte, and memory is bounded by the cache
//! and not by the volume.

use crate::support::{self, BLOCK, Dir, PATIENCE, Random, Rig, Void};
use forebay::io::{Device, FileDevice, FileOptions, MemoryDevice, ReactorKind};
use forebay::shard::{CACHE_SOURCE, NewVolume, Shard};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::limits::{VOLUME_BYTES_MAX, VOLUME_COUNT_MAX};
use forebay_core::request::Op;
use forebay_core::units::Lba;
use rustix::time::{ClockId, clock_gettime};
use std::process::Command;
use std::time::{Duration, Instant};

const TIB: u64 = 1 << 40;
const SHORT: Duration = Duration::from_millis(10);
/// How much longer 100 TiB may take than a MiB, at most: what goes by the byte, or by the TiB, takes a hundred times as long and more.
const TIMES_MAX: u32 = 4;

/// What the shard's thread, which is this one, has had of a processor: who else wants one does not count.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn rig(cache: Box<MemoryDevice>) -> Rig {
    let options = support::shared_options(ReactorKind::Threads, Config::default());
    Rig::new(cache, &options, 1 << 20)
}

/// The last number of all is no block's (`limits.rs`): a copy of that block was taken for an empty place, and reads of it failed when it had left the
/// buffers.
#[test]
fn the_last_block_of_the_largest_volume_is_one_like_others() {
    let mut rig = rig(Box::new(MemoryDevice::new(64 << 20, 4096).unwrap()));
    let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(VOLUME_BYTES_MAX)));
    let other = rig.add("w", Mode::WriteBack, Box::new(Void::new(TIB)));
    let (span, data) = (rig.memory.span(0, 4096), rig.memory.span(8192, 1 << 19));
    data.copy_in(&vec![7; 1 << 19]);
    for _ in 0..3 {
        rig.request(volume, Op::Read, VOLUME_BYTES_MAX - 4096, 4096, Some(span)).unwrap();
        for at in 0..80 {
            let write = Op::Write { fua: false };
            rig.request(other, write, at << 20, 1 << 19, Some(data)).unwrap();
        }
        rig.request(other, Op::Flush, 0, 0, None).unwrap();
    }
}

/// It was recorded in both copies of the superblock, which nobody could read then: all volumes of the cache were lost.
#[test]
fn what_no_superblock_can_hold_of_a_volume_is_not_recorded() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "unrecordable");
    let cache = dir.file("cache", 64 << 20);
    let options = support::options(ReactorKind::Threads, Config::default());
    let open = || {
        let how = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        Box::new(FileDevice::open(&cache, &how).unwrap())
    };
    let mut rig = Rig::new(open(), &options, 1 << 20);
    let index = rig.shard.free_index().unwrap();
    let volume = |size_bytes, path: &str| NewVolume {
        name: "v".into(),
        size_bytes,
        logical_block: 512,
        mode: Mode::WriteBack,
        reserve: Default::default(),
        path: path.into(),
        fingerprint: [0; 64],
    };
    for size_bytes in [0, 1000, VOLUME_BYTES_MAX + 512, 2 << 50, u64::MAX] {
        let refused = rig.shard.add(index, &volume(size_bytes, "v")).unwrap_err().to_string();
        assert!(refused.contains("less than 2 PiB"), "{refused}");
    }
    assert!(rig.shard.add(index, &volume(TIB, &"x".repeat(511))).is_err());
    rig.shard.add(index, &volume(VOLUME_BYTES_MAX, &"x".repeat(510))).unwrap();
    rig.close();
    let next = Shard::open(open(), &options).unwrap();
    assert_eq!(next.find("v"), Some(index));
}

#[test]
fn a_hundred_tebibytes_are_discarded_and_zeroed_at_once() {
    let mut rig = rig(Box::new(MemoryDevice::new(1 << 30, 4096).unwrap()));
    let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(100 * TIB)));
    let span = rig.memory.span(0, 1 << 20);
    span.copy_in(&[7; 1 << 20]);
    for at in [0, 50 * TIB, 100 * TIB - (1 << 20)] {
        rig.request(volume, Op::Write { fua: false }, at, 1 << 20, Some(span)).unwrap();
    }
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    for op in [Op::Discard, Op::WriteZeroes { fua: false }] {
        let written = |rig: &Rig| {
            rig.shard.engine().status(volume).unwrap().stats.cache_blocks_written * BLOCK
        };
        // The shortest of some: what others do to the processor's caches counts all the same. Of the log it is a header, and
        // never more than two, since what is written back is noted in one.
        let mut spent = [Duration::MAX; 2];
        let mut log = [(u64::MAX, 0); 2];
        let is_short = |spent: [Duration; 2]| spent[1] <= SHORT.min(spent[0] * TIMES_MAX);
        for turn in 0..500 {
            if turn >= 5 && is_short(spent) {
                break;
            }
            for (at, length) in [1 << 20, 100 * TIB].into_iter().enumerate() {
                let (before, begun) = (written(&rig), processor_time());
                rig.request(volume, op, 0, length, None).unwrap();
                rig.request(volume, Op::Flush, 0, 0, None).unwrap();
                spent[at] = spent[at].min(processor_time() - begun);
                let more = written(&rig) - before;
                log[at] = (log[at].0.min(more), log[at].1.max(more));
            }
        }
        println!("{op:?} of 1 MiB and of 100 TiB, and a flush: {spent:?}, {log:?} bytes of log");
        assert!(log.iter().all(|log| log.0 == BLOCK && log.1 <= 2 * BLOCK), "{op:?}: {log:?}");
        assert!(is_short(spent), "{op:?} took {spent:?}");
        for at in [0, 50 * TIB, 100 * TIB - (1 << 20)] {
            rig.request(volume, Op::Read, at, 1 << 20, Some(span)).unwrap();
            assert!(span.is_zero(), "{op:?}: {at} does not read as zeros");
        }
    }
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    rig.close();
}

/// Who asks where the zeros are is told of some, at once, and asks again for the rest: to look for all of them took tens of milliseconds, in
/// which nobody else was served.
#[test]
fn who_asks_for_zeros_holds_up_nobody() {
    const EACH: u64 = 1 << 15;
    let mut rig = rig(Box::new(MemoryDevice::new(64 << 20, 4096).unwrap()));
    let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(TIB)));
    for at in 0..8 {
        let (at, length) = (at * 2 * EACH * BLOCK, EACH * BLOCK);
        rig.request(volume, Op::WriteZeroes { fua: false }, at, length, None).unwrap();
    }
    let (mut at, mut told, mut questions) = (0, Vec::new(), 0);
    while at < 16 * EACH {
        questions += 1;
        rig.shard.zero_runs(volume, Lba(at), 16 * EACH - at, |blocks, zero| {
            told.push((blocks, zero));
            at += blocks;
            true
        });
    }
    assert_eq!(told, [(EACH, true), (EACH, false)].repeat(8));
    assert_eq!(questions, 5, "each looks at two, and the last at the rest");
}

#[test]
fn what_does_not_grow_with_the_cache_is_within_192_mib_for_all_volumes() {
    let parts = Shard::memory_parts(2048, 128, VOLUME_COUNT_MAX, &Config::default());
    let map = ["index", "slots and checksums", "segments", "history of misses"];
    let fixed = parts.iter().filter(|part| !map.contains(&part.0)).map(|part| part.1);
    assert!(fixed.sum::<u64>() <= 192 << 20, "{parts:?}");
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// In a process of its own: what other tests of this program take meanwhile would be counted.
#[test]
fn random_zero_writes_stay_within_the_memory_bound() {
    const ALONE: &str = "FOREBAY_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return write_random_zeros();
    }
    let module = module_path!().split_once("::").unwrap().1;
    let name = format!("{module}::random_zero_writes_stay_within_the_memory_bound");
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let done = alone.args(["--exact", &name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

fn write_random_zeros() {
    const CACHE_BYTES: u64 = 1 << 30;
    const DEPTH: usize = 64;
    const WRITES: u64 = 10_000_000;
    let cache = Box::new(MemoryDevice::new(CACHE_BYTES, 4096).unwrap());
    // All of the device is resident before anything is measured: what grows later is ours.
    let touch = vec![1; 1 << 20];
    for at in (0..CACHE_BYTES).step_by(1 << 20) {
        cache.write_at(at, &touch).unwrap();
    }
    let before = resident_bytes();
    let mut rig = rig(cache);
    let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(16 * TIB)));
    let superblock = rig.shard.superblock();
    let (segments, blocks) = (superblock.segment_count, superblock.segment_blocks());
    let parts = Shard::memory_parts(segments, blocks, 1, rig.shard.engine().config());
    let engine: u64 = parts.iter().map(|part| part.1).sum();
    let span = rig.memory.span(0, BLOCK as usize);
    let mut random = Random(1);
    let (mut answered, mut under_way) = (0, 0);
    let begun = Instant::now();
    let mut last = begun;
    while answered < WRITES {
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
        assert!(last.elapsed() < PATIENCE, "no progress after {answered}");
        rig.turn(Duration::from_millis(100), |answer| {
            assert_eq!(answer.result, Ok(()));
            last = Instant::now();
            answered += 1;
            under_way -= 1;
        });
    }
    let took = begun.elapsed().as_secs_f64();
    let grown = resident_bytes().saturating_sub(before);
    // 16 MiB are the runtime's and the test's own.
    let bound = engine + (16 << 20);
    println!(
        "{WRITES} zero writes in {took:.1} s ({:.2} M/s); {} MiB resident of {} MiB",
        WRITES as f64 / took / 1e6,
        grown >> 20,
        bound >> 20
    );
    assert!(grown <= bound, "{grown} bytes resident, {bound} expected at most");
    rig.close();
}
