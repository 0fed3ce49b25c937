// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sequential 1 MiB writes and reads through the library, against the cache file's own rate with
//! the same pieces and as many at once. What is written fits: it is on the cache device when it is
//! flushed, and nothing is written back. `cargo bench -p forebay --bench sequential [-- FOLDER]`.

#![allow(clippy::unwrap_used)]

#[path = "../tests/support/mod.rs"]
mod rig;
mod support;

use forebay::io::{
    Arena, Device, FileDevice, FileOptions, Operation, Reactor, ReactorKind, source_of,
};
use forebay::shard::CACHE_SOURCE;
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use rig::{Random, Rig, Void};
use serde_json::json;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use support::{Median, bound, record, rounds, row, thread_cpu_ns};

const MIB: u64 = 1 << 20;
const CACHE_BYTES: u64 = 4 << 30;
/// Of each round; all rounds together stay below what starts write-back.
const WORK: u64 = 128 * MIB;
const VOLUME_BYTES: u64 = 4 << 30;
const DEPTH: usize = 16;

fn file(path: &Path) -> FileDevice {
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    FileDevice::open(path, &options).unwrap()
}

/// Bytes a second of the file itself: `WORK` bytes from `start` on, and for writes a flush.
fn raw(device: &mut FileDevice, memory: &Arena, start: u64, write: bool) -> f64 {
    let mut reactor = Reactor::new(ReactorKind::Auto, 64).unwrap();
    reactor.register_arena(memory);
    let (mut results, mut done) = (Vec::new(), Vec::new());
    let (mut asked, mut answered, mut flushed) = (0, 0, !write);
    let begun = Instant::now();
    let mut free: VecDeque<usize> = (0..DEPTH).collect();
    while answered < WORK / MIB || !flushed {
        let now = Instant::now();
        while asked < WORK / MIB && !free.is_empty() {
            let slot = free.pop_front().unwrap();
            let span = memory.span(slot * MIB as usize, MIB as usize);
            let offset = start + asked * MIB;
            let operation = match write {
                true => Operation::Write { span, offset },
                false => Operation::Read { span, offset },
            };
            device.submit(&mut reactor, operation, slot as u64, now);
            asked += 1;
        }
        if answered == WORK / MIB {
            device.submit(&mut reactor, Operation::Flush, u64::MAX, now);
        }
        results.clear();
        reactor.wait(Some(Duration::from_secs(10)), &mut results).unwrap();
        for (user_data, result) in &results {
            assert_eq!(source_of(*user_data), CACHE_SOURCE);
            device.event(&mut reactor, *user_data, *result, Instant::now(), &mut done);
        }
        device.poll(&mut reactor, Instant::now(), &mut done);
        for completion in done.drain(..) {
            completion.result.unwrap();
            if completion.token == u64::MAX {
                flushed = true;
            } else {
                free.push_back(completion.token as usize);
                answered += 1;
            }
        }
    }
    WORK as f64 / begun.elapsed().as_secs_f64()
}

/// Bytes a second of the volume, and microseconds of this thread's CPU for each megabyte.
fn ours(rig: &mut Rig, volume: VolumeIndex, start: u64, write: bool) -> (f64, f64) {
    let (begun, cpu) = (Instant::now(), thread_cpu_ns());
    let (mut asked, mut answered) = (0, 0);
    let mut free: VecDeque<usize> = (0..DEPTH).collect();
    let op = if write { Op::Write { fua: false } } else { Op::Read };
    while answered < WORK / MIB {
        while asked < WORK / MIB && !free.is_empty() {
            let slot = free.pop_front().unwrap();
            let span = Some(rig.span(slot, MIB as usize));
            let offset = start + asked * MIB;
            if rig.shard.submit(volume, op, offset, MIB, span, slot as u64).is_err() {
                free.push_front(slot);
                break;
            }
            asked += 1;
        }
        rig.turn(Duration::from_secs(1), |answer| {
            assert_eq!(answer.result, Ok(()));
            free.push_back(answer.cookie as usize);
            answered += 1;
        });
    }
    if write {
        rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    }
    let cpu = (thread_cpu_ns() - cpu) as f64 / 1e3 / (WORK / MIB) as f64;
    (WORK as f64 / begun.elapsed().as_secs_f64(), cpu)
}

/// A file whose every block was written, so that writing it again allocates nothing.
fn written(path: &Path, bytes: u64) {
    use std::io::Write;
    let block = vec![1; MIB as usize];
    let mut file = std::fs::File::create(path).unwrap();
    (0..bytes / MIB).for_each(|_| file.write_all(&block).unwrap());
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn main() -> std::process::ExitCode {
    let folder = std::env::args().skip(1).find(|text| !text.starts_with('-'));
    let folder = folder.map_or(PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let rounds = rounds();
    assert!(rounds as u64 * WORK < CACHE_BYTES / 4, "what is written fits");
    let dir = folder.join(format!("sequential-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let _gone = rig::Dir(dir.clone());
    written(&dir.join("cache"), CACHE_BYTES);
    written(&dir.join("raw"), rounds as u64 * WORK);
    let mut plain = file(&dir.join("raw"));
    // However long the rounds take, nothing is written back.
    let config = Config { dirty_age: u64::MAX / 4, ..Config::default() };
    let options = rig::shared_options(ReactorKind::Auto, config);
    let bytes = DEPTH * MIB as usize;
    let mut rig = Rig::new(Box::new(file(&dir.join("cache"))), &options, bytes);
    let mut random = Random(3);
    for place in (0..bytes).step_by(8) {
        rig.memory.span(place, 8).copy_in(&random.next().to_le_bytes());
    }
    let memory = Arena::anonymous(bytes).unwrap();
    memory.whole().copy_from(rig.memory.whole());
    let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(VOLUME_BYTES)));

    let mut all = [const { Vec::new() }; 4];
    let mut cpus = [const { Vec::new() }; 4];
    for round in 0..rounds as u64 {
        let start = round * WORK;
        for (at, write) in [(0, true), (2, false)] {
            all[at].push(raw(&mut plain, &memory, start, write));
            let (rate, cpu) = ours(&mut rig, volume, start, write);
            all[at + 1].push(rate);
            cpus[at].push(cpu);
        }
    }
    println!("sequential, 1 MiB, {DEPTH} at once; medians of {rounds} interleaved rounds");
    let mut result = json!({ "work_bytes": WORK, "depth": DEPTH, "aim": 0.9 });
    for (at, name) in [(0, "writes"), (2, "reads")] {
        let mb = |values: &[f64]| Median::of(values.iter().map(|value| value / 1e6));
        let ratio = Median::of(all[at].iter().zip(&all[at + 1]).map(|(raw, ours)| ours / raw));
        row(&format!("{name}, the file itself"), "MB/s", mb(&all[at]));
        row(&format!("{name}, the volume"), "MB/s", mb(&all[at + 1]));
        let cpu = Median::of(cpus[at].iter().copied());
        row(&format!("{name}, CPU of the loop's thread for 1 MiB"), "us", cpu);
        row("ratio", "", ratio);
        bound("", ratio.median, ratio.median >= 0.9, ">= 0.9");
        result[name] = json!({
            "file_mb_s": mb(&all[at]).json(), "volume_mb_s": mb(&all[at + 1]).json(),
            "cpu_us_per_mib": cpu.json(), "ratio": ratio.json(),
        });
    }
    let status = rig.shard.engine().status(volume).unwrap().stats;
    assert_eq!(status.batches, 0, "something was written back");
    record("sequential", "sequential-1m", "a file, direct", rounds, result);
    assert!(rig.shard.close(Duration::from_secs(30)).unwrap());
    support::end()
}
