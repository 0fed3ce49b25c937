// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes come and go while others are served, and what is recorded of them stays recorded.

use crate::support::{self, BLOCK, Dir, PATIENCE, Rig};
use forebay::cache::read_superblock;
use forebay::io::{
    Completion, Device, FaultDevice, FaultRule, FaultWhen, Faults, FileDevice, FileOptions, Layer,
    MemoryDevice, Operation, OperationKind, Reactor, ReactorKind, RecordDevice, Recorded, Recorder,
};
use forebay::shard::{CACHE_SOURCE, NewVolume, OpenError, Shard, backing_source};
use forebay_core::engine::{CacheHealth, Config};
use forebay_core::format::superblock::Mode;
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::policy::reserve::SEGMENTS_EACH_MIN;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 64 << 20;
const CACHE: u16 = 1;

fn open(path: &Path, source: u16) -> FileDevice {
    FileDevice::open(path, &FileOptions { source, ..FileOptions::default() }).unwrap()
}

fn rig(cache: Box<dyn Device>, config: Config) -> Rig {
    Rig::new(cache, &support::options(ReactorKind::Auto, config), 1 << 20)
}

fn write(rig: &mut Rig, volume: VolumeIndex, first: u64, blocks: u64, byte: u8) {
    let span = rig.span(0, (blocks * BLOCK) as usize);
    span.copy_in(&vec![byte; (blocks * BLOCK) as usize]);
    let op = Op::Write { fua: false };
    rig.request(volume, op, first * BLOCK, blocks * BLOCK, Some(span)).unwrap();
}

fn first_byte(rig: &mut Rig, volume: VolumeIndex, block: u64) -> u8 {
    let span = rig.span(0, BLOCK as usize);
    rig.request(volume, Op::Read, block * BLOCK, BLOCK, Some(span)).unwrap();
    let mut bytes = [0; BLOCK as usize];
    rig.span(0, BLOCK as usize).copy_out(&mut bytes);
    bytes[0]
}

fn detach(rig: &mut Rig, volume: VolumeIndex) {
    rig.shard.drain(volume);
    rig.wait("a drain", |shard| shard.engine().is_clean(volume));
    let mut is_detached = rig.shard.detach(volume).unwrap();
    while !is_detached {
        rig.turn(Duration::from_millis(10), |_| {});
        is_detached = rig.shard.detach(volume).unwrap();
    }
}

/// A device that holds flushes back, while it is told to.
struct SlowFlushes {
    inner: FileDevice,
    gate: Arc<Gate>,
    waiting: Vec<u64>,
}

#[derive(Default)]
struct Gate {
    until: Mutex<Option<Instant>>,
    held: AtomicUsize,
}

impl Layer for SlowFlushes {
    fn below(&self) -> &dyn Device {
        &self.inner
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        &mut self.inner
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        match operation {
            Operation::Flush => self.waiting.push(token),
            _ => self.inner.submit(reactor, operation, token, now),
        }
    }

    fn turn(&mut self, reactor: &mut Reactor, now: Instant, _: &mut Vec<Completion>) {
        if self.gate.until.lock().unwrap().is_none_or(|until| until <= now) {
            for token in self.waiting.drain(..) {
                self.inner.submit(reactor, Operation::Flush, token, now);
            }
        }
        self.gate.held.store(self.waiting.len(), Ordering::Relaxed);
    }

    fn due(&self) -> Option<Instant> {
        let is_waiting = !self.waiting.is_empty();
        is_waiting.then(|| self.gate.until.lock().unwrap().unwrap_or_else(Instant::now))
    }
}

/// A cache of which one volume has most, all of it clean, and is not served; it has given some of that to another one.
struct Pressed {
    rig: Rig,
    gate: Arc<Gate>,
    served: VolumeIndex,
    gives: VolumeIndex,
    next: u64,
}

impl Pressed {
    const BYTES: u64 = 64 * BLOCK;

    /// The one that gives is not served.
    fn new(cache: &Path, config: Config) -> Pressed {
        let backing = || Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
        let mut first = rig(Box::new(open(cache, CACHE_SOURCE)), config);
        let served = first.add("served", Mode::WriteBack, backing());
        let gives = first.add("gives", Mode::WriteBack, backing());
        for turn in 0..160 {
            write(&mut first, gives, turn * 64, 64, 7);
        }
        first.shard.drain(gives);
        first.wait("a drain", |shard| shard.engine().is_clean(gives));
        assert!(first.shard.close(PATIENCE).unwrap());
        let options = support::options(ReactorKind::Auto, config);
        let gate = Arc::<Gate>::default();
        let device = SlowFlushes {
            inner: open(cache, CACHE_SOURCE),
            gate: Arc::clone(&gate),
            waiting: Vec::new(),
        };
        let mut rig = Rig::open(Box::new(device), &options, Self::BYTES as usize);
        rig.shard.serve(served, backing());
        rig.span(0, Self::BYTES as usize).copy_in(&[3; Self::BYTES as usize]);
        let mut pressed = Pressed { rig, gate, served, gives, next: 0 };
        let before = pressed.held();
        let begun = Instant::now();
        while pressed.held() == before || pressed.rig.shard.engine().checkpoint_count() == 0 {
            assert!(begun.elapsed() < PATIENCE, "nothing is given");
            let at = pressed.next_offset();
            let span = pressed.rig.span(0, Self::BYTES as usize);
            let op = Op::Write { fua: false };
            pressed.rig.request(served, op, at, Self::BYTES, Some(span)).unwrap();
        }
        pressed
    }

    fn next_offset(&mut self) -> u64 {
        self.next += 1;
        self.next % 200 * Self::BYTES
    }

    /// Writes of the other one come, more than the pool has room for, while the cache device is being flushed.
    fn press(&mut self) {
        let served = self.served;
        self.rig.request(served, Op::Flush, 0, 0, None).unwrap();
        self.rig
            .wait("a rest", |shard| shard.engine().is_quiet() && shard.engine().is_checkpointed());
        *self.gate.until.lock().unwrap() = Some(Instant::now() + Duration::from_millis(300));
        let (block, op) = (self.rig.span(0, BLOCK as usize), Op::Write { fua: true });
        self.rig.shard.submit(served, op, 0, BLOCK, Some(block), 0).unwrap();
        let gate = Arc::clone(&self.gate);
        self.rig.wait("a flush", |_| gate.held.load(Ordering::Relaxed) > 0);
        for _ in 0..64 {
            let (at, op) = (self.next_offset(), Op::Write { fua: false });
            let span = self.rig.span(0, Self::BYTES as usize);
            self.rig.shard.submit(served, op, at, Self::BYTES, Some(span), 0).unwrap();
        }
    }

    fn held(&self) -> u32 {
        self.rig.shard.engine().status(self.gives).unwrap().segments
    }
}

/// That its log rests was looked at, and its new beginning noted; then a flush was waited for, in turns of the loop, and in one of them
/// the log gave a segment. Where that is said in the superblock, the old log's tail came to stand there beside the new log, of which
/// no segment counted at the next opening: what was flushed was gone. Else the daemon ended.
#[test]
fn a_volume_that_gives_its_room_is_forgotten_as_it_is_then() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "gives");
    let cache = dir.file("cache", CACHE_BYTES);
    // Few buffers: what comes waits for them, and is placed in later turns.
    let config = Config { free_segments_kept: 1000, buffer_count: 2, ..Config::default() };
    let mut pressed = Pressed::new(&cache, config);
    let gives = pressed.gives;
    pressed.press();
    pressed.rig.shard.forget_data(gives).unwrap();
    let found = read_superblock(pressed.rig.shard.cache()).unwrap().superblock;
    let recorded = found.volumes[usize::from(gives.0)].clone().unwrap();
    assert_eq!((recorded.watermark.0, recorded.tail.0), (0, 1));
    let backing = || Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
    let rig = &mut pressed.rig;
    rig.wait("the answers", |shard| shard.engine().request_count() == 0 && !shard.has_answers());
    rig.shard.serve(gives, backing());
    rig.shard.set_mode(gives, Mode::WriteBack).unwrap();
    write(rig, gives, 100, 1, 9);
    rig.request(gives, Op::Flush, 0, 0, None).unwrap();
    drop(pressed); // as a power cut leaves it
    let options = support::options(ReactorKind::Auto, config);
    let mut rig = Rig::open(Box::new(open(&cache, CACHE_SOURCE)), &options, 1 << 20);
    rig.shard.serve(gives, backing());
    assert_eq!(first_byte(&mut rig, gives, 100), 9);
}

#[test]
fn a_detached_volume_leaves_its_plain_disk_and_its_segments_to_others() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "detach");
    let cache = dir.file("cache", CACHE_BYTES);
    let gone = dir.file("gone", BACKING_BYTES);
    let mut rig = rig(Box::new(open(&cache, CACHE_SOURCE)), Config::default());
    let source = backing_source(VolumeIndex(0));
    let leaves = rig.add("leaves", Mode::WriteBack, Box::new(open(&gone, source)));
    let stays = Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
    let stays = rig.add("stays", Mode::WriteBack, stays);
    let free = rig.shard.engine().free_segments().0;
    for turn in 0..32 {
        write(&mut rig, leaves, turn * 64, 64, 7);
        write(&mut rig, stays, turn * 64, 64, 8);
    }
    assert!(rig.shard.engine().free_segments().0 < free - 30);
    detach(&mut rig, leaves);
    assert!(rig.shard.backing(leaves).is_none(), "its device is closed");
    assert!(rig.shard.engine().status(leaves).is_none());
    let span = rig.span(0, BLOCK as usize);
    let refused = rig.request(leaves, Op::Read, 0, BLOCK, Some(span));
    assert!(refused.is_err(), "nobody reads by its old name");
    assert_eq!(first_byte(&mut rig, stays, 100), 8);
    // Whoever still has the old name must not get another volume by it.
    assert_ne!(rig.shard.free_index().unwrap(), leaves);
    assert_eq!(std::fs::read(&gone).unwrap()[..32 * 64 * 4096], vec![7; 32 * 64 * 4096]);
    // Its segments are used again.
    for turn in 0..200 {
        write(&mut rig, stays, turn % 32 * 64, 64, turn as u8);
    }
    rig.close();
    let found = read_superblock(&open(&cache, CACHE_SOURCE)).unwrap().superblock;
    let names: Vec<&str> = found.volumes.iter().flatten().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["stays"]);
}

/// A volume whose backing device comes late, or was refused at first: others are served meanwhile, and what is clean of its log is
/// given to them, which is noted in it. When its device is there, and was changed, what the cache holds of it is dropped:
/// the log that had gone on ended the daemon.
#[test]
fn a_volume_that_waits_gives_its_room_and_can_be_forgotten_then() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "waits");
    let cache = dir.file("cache", CACHE_BYTES);
    let backing = || Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
    let mut first = rig(Box::new(open(&cache, CACHE_SOURCE)), Config::default());
    let served = first.add("served", Mode::WriteBack, backing());
    let waits = first.add("waits", Mode::WriteBack, backing());
    for turn in 0..160 {
        write(&mut first, waits, turn * 64, 64, 7);
    }
    first.shard.drain(waits);
    first.wait("a drain", |shard| shard.engine().is_clean(waits));
    assert!(first.shard.close(Duration::from_secs(60)).unwrap());
    let options = support::options(ReactorKind::Auto, Config::default());
    let mut rig = Rig::open(Box::new(open(&cache, CACHE_SOURCE)), &options, 1 << 20);
    rig.shard.serve(served, backing());
    let held = |rig: &Rig| rig.shard.engine().status(waits).unwrap().segments;
    let before = held(&rig);
    // Bounded: it gives all that is above its reservation.
    for turn in 0..2000 {
        write(&mut rig, served, turn % 200 * 64, 64, turn as u8);
        if held(&rig) < before {
            break;
        }
    }
    assert!(held(&rig) < before, "nothing was given");
    rig.shard.forget_data(waits).unwrap();
    assert_eq!(held(&rig), 0);
    rig.shard.serve(waits, backing());
    assert_eq!(first_byte(&mut rig, waits, 100), 0, "it starts empty");
    write(&mut rig, waits, 100, 1, 9);
    assert!(rig.shard.close(Duration::from_secs(60)).unwrap());
    let mut rig = Rig::open(Box::new(open(&cache, CACHE_SOURCE)), &options, 1 << 20);
    rig.shard.serve(waits, backing());
    assert_eq!(first_byte(&mut rig, waits, 100), 9);
}

/// A checkpoint is named by a superblock that is written in four steps, while the loop goes on. What was
/// recorded in between went to both copies at once, and then the second half of the older ones came over it:
/// a volume attached at that moment would have been gone at the next start.
#[test]
fn what_is_recorded_while_a_checkpoint_is_named_stays_recorded() {
    let recorder = Recorder::new();
    // Memory does what it is asked for when it is looked after: later than what is written at once.
    let device = Box::new(MemoryDevice::new(CACHE_BYTES, 4096).unwrap());
    let device = Box::new(RecordDevice::new(device, recorder.clone(), CACHE));
    let mut rig = rig(device, Config::default());
    let backing = Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
    let volume = rig.add("v", Mode::WriteBack, backing);
    let names = |rig: &Recorder| {
        let is_name = |it: &&Recorded| {
            matches!(it, Recorded::Submit { kind: OperationKind::Write, offset: 0, .. })
        };
        rig.all().iter().filter(is_name).count()
    };
    let before = names(&recorder);
    rig.span(0, 64 * BLOCK as usize).copy_in(&[1; 64 * BLOCK as usize]);
    // Bounded by what is written before a checkpoint is due.
    'writing: for turn in 0.. {
        assert!(turn < 2000, "no checkpoint is named");
        let span = rig.span(0, 64 * BLOCK as usize);
        let op = Op::Write { fua: false };
        rig.shard.submit(volume, op, turn % 64 * 64 * BLOCK, 64 * BLOCK, Some(span), 0).unwrap();
        let mut is_answered = false;
        while !is_answered {
            rig.turn(Duration::from_millis(100), |_| is_answered = true);
            if names(&recorder) > before {
                break 'writing;
            }
        }
    }
    let count = rig.shard.engine().checkpoint_count();
    assert_eq!(count, 0, "its naming is under way");
    rig.shard.record(volume, |it| it.path = "another".into()).unwrap();
    rig.wait("a checkpoint", |shard| shard.engine().checkpoint_count() > count);
    for _ in 0..10 {
        rig.turn(Duration::from_millis(1), |_| {});
    }
    let found = read_superblock(rig.shard.cache()).unwrap();
    let recorded = found.superblock.volumes[usize::from(volume.0)].clone().unwrap();
    assert_eq!(recorded.path, "another");
    assert!(found.bad_copy().is_none());
}

/// An answer that lay there, which nobody takes meanwhile, had each of its turns wait for nothing: a flush of a second was a second of a processor.
#[test]
fn who_waits_for_the_superblock_waits_without_turning_round() {
    for has_answer in [false, true] {
        let dir = Dir::new(std::env::temp_dir(), "fb-waits");
        let inner = open(&dir.file("cache", CACHE_BYTES), CACHE_SOURCE);
        let gate = Arc::<Gate>::default();
        let device = SlowFlushes { inner, gate: Arc::clone(&gate), waiting: Vec::new() };
        let mut rig = rig(Box::new(device), Config::default());
        let backing = Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
        let volume = rig.add("v", Mode::WriteBack, backing);
        let until = Instant::now() + Duration::from_secs(1);
        *gate.until.lock().unwrap() = Some(until);
        let (first, second) = (rig.span(0, BLOCK as usize), rig.span(1, BLOCK as usize));
        rig.shard.submit(volume, Op::Write { fua: true }, 0, BLOCK, Some(first), 0).unwrap();
        rig.wait("a flush", |_| gate.held.load(Ordering::Relaxed) > 0);
        if has_answer {
            rig.shard.submit(volume, Op::Read, 8 * BLOCK, BLOCK, Some(second), 1).unwrap();
        }
        let cpu = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let begun = cpu();
        rig.shard.set_weight(volume, 2).unwrap();
        let used = cpu() - begun;
        assert!(Instant::now() >= until && (!has_answer || rig.shard.has_answers()));
        assert!(used.tv_sec == 0 && used.tv_nsec < 400_000_000, "{used:?}");
    }
}

/// The flush of a superblock's copy is a flush of the cache device like any other: it may have dropped what others have written since
/// the one before, and says so once.
#[test]
fn a_superblock_that_could_not_be_written_fails_the_cache() {
    let faults = Faults::new();
    let memory = Box::new(MemoryDevice::new(CACHE_BYTES, 4096).unwrap());
    let mut rig = rig(Box::new(FaultDevice::new(memory, faults.clone())), Config::default());
    let backing = Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
    let volume = rig.add("v", Mode::WriteBack, backing);
    write(&mut rig, volume, 3, 1, 7);
    let next = faults.count(Some(OperationKind::Flush)) + 1;
    faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::Nth(next)));
    rig.shard.set_weight(volume, 3).unwrap_err();
    assert_eq!(rig.shard.engine().health(), CacheHealth::Failed);
    assert_eq!(rig.request(volume, Op::Flush, 0, 0, None), Err(RequestError::Io));
    assert_eq!(first_byte(&mut rig, volume, 3), 7);
    assert!(!rig.shard.close(PATIENCE).unwrap(), "that is no clean stop");
}

/// With one more than a third of its segments all volumes of a cache could wait for each other. That is asked of the size that it is to have,
/// if it is becoming smaller.
/// It was said to hold 60, one of which was to be forgotten, and held one.
#[test]
fn places_that_are_free_at_the_next_opening_are_told_as_such() {
    let cache = Box::new(MemoryDevice::new(CACHE_BYTES, 4096).unwrap());
    let mut rig = rig(cache, Config::default());
    let disk = || Box::new(MemoryDevice::new(BACKING_BYTES, 512).unwrap());
    rig.add("stays", Mode::WriteBack, disk());
    for _ in 1..VOLUME_COUNT_MAX {
        let leaves = rig.add("leaves", Mode::WriteBack, disk());
        detach(&mut rig, leaves);
    }
    let error = rig.shard.free_index().unwrap_err();
    assert!(matches!(error, OpenError::PlacesInUse { recorded: 1 }), "{error}");
    let text = "all 60 places of a cache are taken, 59 of them by what was detached";
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn one_volume_too_many_for_the_segments_is_refused() {
    const SEGMENT: u32 = 4 << 20;
    let new = |index: u8| NewVolume {
        name: format!("v{index}"),
        size_bytes: BACKING_BYTES,
        logical_block: 512,
        mode: Mode::WriteBack,
        reserve: Default::default(),
        path: "memory".into(),
        fingerprint: [0; 64],
    };
    let device = MemoryDevice::new(128 << 20, 4096).unwrap();
    forebay::cache::format(&device, 128 << 20, SEGMENT, 1).unwrap();
    let options = support::options(ReactorKind::Auto, Config::default());
    let mut shard = Shard::open(Box::new(device), &options).unwrap();
    let segments = shard.superblock().segment_count;
    let most = (segments / SEGMENTS_EACH_MIN) as u8;
    for index in 0..most - 1 {
        shard.add(VolumeIndex(index), &new(index)).unwrap();
    }
    let smaller = shard.superblock().size_bytes - 3 * u64::from(SEGMENT);
    shard.begin_to_resize(smaller).unwrap();
    let is_refused = |result| matches!(result, Err(OpenError::TooSmallForVolumes { .. }));
    assert!(is_refused(shard.add(VolumeIndex(most), &new(most))), "it would be too small for that");
    shard.cancel_resize();
    shard.add(VolumeIndex(most), &new(most)).unwrap();
    let error = shard.add(VolumeIndex(most + 1), &new(most + 1)).unwrap_err();
    let text = format!("a cache of {segments} segments of 4096 KiB holds at most {most} volumes");
    assert!(error.to_string().contains(&text), "{error}");
    assert!(is_refused(shard.has_room_for_volumes(u32::from(most) * SEGMENTS_EACH_MIN - 1)));
    shard.has_room_for_volumes(u32::from(most) * SEGMENTS_EACH_MIN).unwrap();
    shard.has_room_for_volumes(segments + 1).unwrap();
}
