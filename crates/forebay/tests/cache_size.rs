// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cache is given another size beside guests who commit: between any two looks a flush of the cache device had ended and the next one had
//! begun, and the new size waited for a moment without one for ever.

use crate::support::{self, Dir, Rig, Void, options};
use forebay::cache;
use forebay::io::{
    Completion, Device, FileDevice, FileOptions, Layer, MemoryDevice, Operation, Reactor,
    ReactorKind,
};
use forebay::shard::{CACHE_SOURCE, ShardOptions};
use forebay_core::engine::{CacheHealth, Config};
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GUESTS: u64 = 4;

/// A device whose flushes take a while.
struct Slow {
    below: MemoryDevice,
    flushes: Vec<(u64, Instant)>,
}

impl Layer for Slow {
    fn below(&self) -> &dyn Device {
        &self.below
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        &mut self.below
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        match operation {
            Operation::Flush => self.flushes.push((token, now + Duration::from_millis(2))),
            _ => self.below.submit(reactor, operation, token, now),
        }
    }

    fn turn(&mut self, _: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        self.flushes.retain(|(token, at)| {
            let is_due = *at <= now;
            done.extend(is_due.then_some(Completion { token: *token, result: Ok(()) }));
            !is_due
        });
    }

    fn due(&self) -> Option<Instant> {
        self.flushes.iter().map(|flush| flush.1).min()
    }
}

fn commit(rig: &mut Rig, volume: VolumeIndex, guest: u64, block: u64) {
    let span = rig.span(guest as usize, 4096);
    rig.shard
        .submit(volume, Op::Write { fua: true }, block % 100_000 * 4096, 4096, Some(span), guest)
        .unwrap();
}

#[test]
fn a_cache_is_given_another_size_beside_guests_who_commit() {
    for (from, to) in [(256 * MIB, 384 * MIB), (384 * MIB, 256 * MIB)] {
        let memory = MemoryDevice::new(384 * MIB, 4096).unwrap();
        cache::format(&memory, from, support::SEGMENT_BYTES, 1).unwrap();
        let device = Box::new(Slow { below: memory, flushes: Vec::new() });
        let options = options(ReactorKind::Threads, Config::default());
        let mut rig = Rig::open(device, &options, MIB as usize);
        let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(1 << 30)));
        // One behind the other, so that one of them waits whenever a flush ends.
        for guest in 0..GUESTS {
            commit(&mut rig, volume, guest, guest);
            rig.turn(Duration::from_micros(700), |_| ());
        }
        rig.shard.begin_to_resize(to).unwrap();
        let (begun, mut answers, mut count) = (Instant::now(), Vec::new(), 0);
        while !rig.shard.go_on_resizing().unwrap() {
            assert!(begun.elapsed() < support::PATIENCE, "{count} were answered meanwhile");
            rig.turn(Duration::from_millis(10), |answer| answers.push(answer));
            for answer in answers.drain(..) {
                answer.result.unwrap();
                count += 1;
                commit(&mut rig, volume, answer.cookie, count * 7919);
            }
        }
    }
}

/// In a process of its own, which has no more memory than it has by then.
///
/// The daemon was ended, and its guests with it: whoever asks for more than there is hears of it instead.
#[test]
fn a_size_whose_map_there_is_no_memory_for_is_refused_and_guests_go_on() {
    const ALONE: &str = "FOREBAY_TEST_NO_MEMORY";
    if std::env::var_os(ALONE).is_some() {
        return resize_without_memory();
    }
    let module = module_path!().split_once("::").unwrap().1;
    let name =
        format!("{module}::a_size_whose_map_there_is_no_memory_for_is_refused_and_guests_go_on");
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let done = alone.args(["--exact", &name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    let end = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.contains("1 passed"), "{said}{end}");
}

fn resize_without_memory() {
    let dir = Dir::new(std::env::temp_dir(), "fb-no-memory");
    let path = dir.file("cache", 64 << 30);
    let file = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    let open = || Box::new(FileDevice::open(&path, &file).unwrap());
    for lasting in [false, true] {
        cache::format(open().as_ref(), 96 * MIB, support::SEGMENT_BYTES, 1).unwrap();
        let options = options(ReactorKind::Threads, Config::default());
        let options = ShardOptions { lasting, ..options };
        let mut rig = Rig::open(open(), &options, MIB as usize);
        let volume = rig.add("v", Mode::WriteBack, Box::new(Void::new(1 << 30)));
        let write = |rig: &mut Rig| {
            let span = rig.span(0, 4096);
            rig.request(volume, Op::Write { fua: true }, 0, 4096, Some(span)).unwrap();
        };
        write(&mut rig);
        rig.shard.begin_to_resize(64 << 30).unwrap();
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let before = getrlimit(Resource::As);
        let limit = Rlimit { current: Some(pages * 4096 + 50 * MIB), ..before };
        setrlimit(Resource::As, limit).unwrap();
        let begun = Instant::now();
        let error = loop {
            assert!(begun.elapsed() < support::PATIENCE);
            match rig.shard.go_on_resizing() {
                Ok(is_done) => assert!(!is_done),
                Err(error) => break error.to_string(),
            }
            rig.turn(Duration::from_millis(10), |_| ());
        };
        assert!(error.starts_with("take memory for the map of another size"), "{error}");
        rig.shard.cancel_resize();
        write(&mut rig);
        assert_eq!(rig.shard.superblock().size_bytes, 96 * MIB);
        assert_eq!(rig.shard.engine().health(), CacheHealth::Healthy);
        setrlimit(Resource::As, before).unwrap();
        rig.close();
    }
}
