// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device that fails, loses what was not flushed (a reset, a plug), and is there again when the program that served it is
//! gone. The machine never stopped; but it is not only the program that died.

use crate::support::{self, BLOCK, Dir, Rig};
use forebay::check::{Finding, Severity, check};
use forebay::host::runtime_dir::Places;
use forebay::inspect::Inspection;
use forebay::io::{
    Completion, Device, DeviceError, FaultDevice, FaultRule, FaultWhen, Faults, FileDevice,
    FileOptions, Layer, MemoryDevice, Operation, OperationKind, Reactor, ReactorKind, Use,
};
use forebay::shard::{CACHE_SOURCE, Shard, ShardOptions, backing_source};
use forebay_core::engine::{CacheHealth, Config};
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn open(path: &Path) -> Box<dyn Device> {
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    Box::new(FileDevice::open(path, &options).unwrap())
}

fn write(rig: &mut Rig, volume: VolumeIndex, first: u64, blocks: u64, byte: u8) {
    let span = rig.span(0, (blocks * BLOCK) as usize);
    span.copy_in(&vec![byte; (blocks * BLOCK) as usize]);
    let op = Op::Write { fua: false };
    rig.request(volume, op, first * BLOCK, blocks * BLOCK, Some(span)).unwrap();
}

/// The program is killed: what it had in memory is there, and it closes nothing.
fn die(rig: &mut Rig, dir: &Dir) {
    let other = open(&dir.file("other", 64 << 20));
    forebay::cache::format(other.as_ref(), 64 << 20, support::SEGMENT_BYTES, 1).unwrap();
    let alone = support::options(ReactorKind::Threads, Config::default());
    drop(std::mem::replace(&mut rig.shard, Shard::open(other, &alone).unwrap()));
}

fn first_byte(rig: &mut Rig, volume: VolumeIndex, block: u64) -> Result<u8, RequestError> {
    let span = rig.span(0, BLOCK as usize);
    rig.request(volume, Op::Read, block * BLOCK, BLOCK, Some(span))?;
    let mut bytes = [0; BLOCK as usize];
    span.copy_out(&mut bytes);
    Ok(bytes[0])
}

/// What was missing then was taken for rot, since a program that dies alone leaves everything whole: more than one record in a row
/// that nobody can name. The volume was frozen for good, with all that had been flushed, and a restart of the machine in the place
/// of the program's would have kept that. Now the log ends where something is missing. The guest may live: its next flush does not
/// succeed as if what was lost were there.
#[test]
fn a_cache_that_failed_and_lost_what_was_not_flushed_keeps_what_was() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-cache");
    let cache = dir.file("cache", 64 << 20);
    let hour = 3_600_000_000_000;
    let config = Config {
        close_after: hour,
        durable_after: hour,
        durable_bytes: u64::MAX,
        dirty_age: hour,
        ..Config::default()
    };
    let options = support::shared_options(ReactorKind::Threads, config);
    let faults = Faults::new();
    let device = Box::new(FaultDevice::new(open(&cache), faults.clone()));
    let mut rig = Rig::new(device, &options, 1 << 20);
    if !rig.shard.is_shared() {
        forebay_testing::skip("failed_cache: no memory outlives a process here");
        return;
    }
    let backing = || Box::new(MemoryDevice::new(64 << 20, 512).unwrap());
    let volume = rig.add("v", Mode::WriteBack, backing());
    write(&mut rig, volume, 0, 10, 7);
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    let flushed = std::fs::read(&cache).unwrap();
    // Three segments and more, of which the device has all but the last.
    for turn in 0..10 {
        write(&mut rig, volume, 100 + turn * 50, 50, 8);
    }
    for _ in 0..20 {
        rig.turn(Duration::from_millis(10), |_| {});
    }
    faults.add(FaultRule::new(Some(OperationKind::Write), FaultWhen::From(1)));
    let failed = rig.request(volume, Op::Flush, 0, 0, None);
    assert_eq!(failed, Err(RequestError::Io));
    assert_eq!(rig.shard.engine().health(), CacheHealth::Failed);
    // The program is killed, and the device is as it was when it was flushed last.
    die(&mut rig, &dir);
    std::fs::write(&cache, &flushed).unwrap();
    let mut next = Rig::open(open(&cache), &options, 1 << 20);
    assert!(!next.shard.engine().is_frozen(volume), "{:?}", next.shard.opened());
    next.shard.serve(volume, backing());
    for block in 0..10 {
        assert_eq!(first_byte(&mut next, volume, block), Ok(7));
    }
    assert_eq!(first_byte(&mut next, volume, 100), Ok(0), "it was never flushed");
    let flush = |rig: &mut Rig| rig.request(volume, Op::Flush, 0, 0, None);
    assert_eq!(flush(&mut next), Err(RequestError::Io), "what it should cover is lost");
    assert!(next.shard.close(Duration::from_secs(60)).unwrap());
    // The guest knows, and the operator has started it again.
    let mut last = Rig::open(open(&cache), &options, 1 << 20);
    last.shard.serve(volume, backing());
    assert_eq!(flush(&mut last), Ok(()));
    assert_eq!(first_byte(&mut last, volume, 3), Ok(7));
    assert!(last.shard.close(Duration::from_secs(60)).unwrap());
}

/// A volume that lacks something on its backing device takes no writes behind a failed cache, since nothing may pass what waits. With
/// relaxed they pass one another anyway: what the log holds nothing of is written, of all else nothing.
#[test]
fn behind_a_failed_cache_a_dirty_volume_takes_only_what_its_order_lets_pass() {
    for (order, passes) in [(Order::Batch, false), (Order::Strict, false), (Order::Relaxed, true)] {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-order");
        let (cache, disk) = (dir.file("cache", 64 << 20), dir.file("disk", 64 << 20));
        let hour = 3_600_000_000_000;
        let config = Config { dirty_age: hour, ..Config::default() };
        let options = support::options(ReactorKind::Threads, config);
        let faults = Faults::new();
        let device = Box::new(FaultDevice::new(open(&cache), faults.clone()));
        let mut rig = Rig::new(device, &options, 1 << 20);
        let backing = || {
            let source = backing_source(VolumeIndex(0));
            let options = FileOptions { source, ..FileOptions::default() };
            Box::new(FileDevice::open(&disk, &options).unwrap())
        };
        let volume = rig.add("v", Mode::WriteBack, backing());
        rig.shard.set_order(volume, order).unwrap();
        write(&mut rig, volume, 0, 10, 7);
        flush(&mut rig, volume).unwrap();
        faults.add(FaultRule::new(Some(OperationKind::Write), FaultWhen::From(0)));
        let span = rig.span(0, BLOCK as usize);
        let ask = |rig: &mut Rig, op, block: u64| {
            span.copy_in(&[8; BLOCK as usize]);
            rig.request(volume, op, block * BLOCK, BLOCK, Some(span))
        };
        let plain = Op::Write { fua: false };
        assert_eq!(ask(&mut rig, plain, 20), Err(RequestError::Io), "{order:?}: the first to fail");
        assert_eq!(rig.shard.engine().health(), CacheHealth::Failed);
        assert_eq!(ask(&mut rig, plain, 0), Err(RequestError::Io), "{order:?}: a dirty block");
        for op in [Op::WriteZeroes { fua: false }, Op::Discard] {
            let done = rig.request(volume, op, 100 * BLOCK, BLOCK, None);
            assert_eq!(done, Err(RequestError::Io), "{order:?}: {op:?}");
        }
        assert_eq!(ask(&mut rig, plain, 100).is_ok(), passes, "{order:?}: nobody wrote it before");
        assert_eq!(flush(&mut rig, volume), Err(RequestError::Io), "{order:?}");
        let expected = if passes { 8 } else { 0 };
        assert_eq!(first_byte(&mut rig, volume, 100), Ok(expected), "{order:?}");
        drop(rig);
        let mut next = Rig::open(open(&cache), &options, 1 << 20);
        next.shard.serve(volume, backing());
        for (block, byte) in [(0, 7), (9, 7), (100, expected)] {
            assert_eq!(first_byte(&mut next, volume, block), Ok(byte), "{order:?}: block {block}");
        }
        next.close();
    }
}

/// What a page cache does before a file: writes are read at once and durable when flushed. A flush that fails drops what it should have
/// covered, says so once, and the next one succeeds.
#[derive(Default)]
struct Pages {
    durable: Vec<u8>,
    dirty: Vec<(u64, u64)>,
    /// The next flush fails; what it drops reads as before at once, or until it is evicted.
    fails: Option<AtOnce>,
    /// No flush is answered any more.
    hangs: bool,
    under_way: usize,
    most_under_way: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct AtOnce(bool);

type Shared = Arc<Mutex<Pages>>;

struct Paged {
    file: Box<dyn Device>,
    pages: Shared,
    flights: HashMap<u64, (OperationKind, u64, u64)>,
    failed: Vec<Completion>,
    since: Option<Instant>,
}

impl Paged {
    fn open(path: &Path, pages: &Shared) -> Box<dyn Device> {
        let (file, pages) = (open(path), Arc::clone(pages));
        let flights = HashMap::new();
        Box::new(Paged { file, pages, flights, failed: Vec::new(), since: None })
    }

    fn flush(&self) -> Result<(), DeviceError> {
        let mut pages = self.pages.lock().unwrap();
        let pages = &mut *pages;
        let fails = pages.fails.take();
        for (offset, length) in pages.dirty.drain(..) {
            let durable = &mut pages.durable[offset as usize..][..length as usize];
            match fails {
                None => self.file.read_at(offset, durable).unwrap(),
                Some(AtOnce(true)) => self.file.write_at(offset, durable).unwrap(),
                Some(AtOnce(false)) => {}
            }
        }
        fails.map_or(Ok(()), |_| Err(DeviceError::IO))
    }
}

impl Layer for Paged {
    fn below(&self) -> &dyn Device {
        self.file.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.file.as_mut()
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let (kind, offset, length) = (operation.kind(), operation.offset(), operation.length());
        if kind == OperationKind::Flush {
            let mut pages = self.pages.lock().unwrap();
            pages.under_way += 1;
            pages.most_under_way = pages.most_under_way.max(pages.under_way);
            if pages.hangs {
                return;
            }
            drop(pages);
            if let Err(error) = self.flush() {
                self.failed.push(Completion { token, result: Err(error) });
                self.since.get_or_insert(now);
                return;
            }
        }
        self.flights.insert(token, (kind, offset, length));
        self.file.submit(reactor, operation, token, now);
    }

    fn answered(&mut self, answers: &mut Vec<Completion>, from: usize, _: Instant) {
        for answer in &answers[from..] {
            let (kind, offset, length) = self.flights.remove(&answer.token).unwrap();
            let mut pages = self.pages.lock().unwrap();
            match kind {
                OperationKind::Write => pages.dirty.push((offset, length)),
                OperationKind::Flush => pages.under_way -= 1,
                _ => {}
            }
        }
    }

    fn turn(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
        self.since = None;
        self.pages.lock().unwrap().under_way -= self.failed.len();
        done.append(&mut self.failed);
    }

    fn due(&self) -> Option<Instant> {
        self.since
    }

    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        if use_of.kind == OperationKind::Flush {
            assert_eq!(self.pages.lock().unwrap().under_way, 0, "another is under way");
            self.flush()?;
        }
        run()?;
        if use_of.kind == OperationKind::Write {
            self.pages.lock().unwrap().dirty.push((use_of.offset, use_of.length));
        }
        Ok(())
    }
}

/// A cache on a file behind such pages, with a volume, that processes serve one after the other.
struct Place {
    cache: std::path::PathBuf,
    pages: Shared,
    backing: Box<dyn Fn() -> Box<dyn Device>>,
    options: ShardOptions,
    dir: Dir,
}

/// Blocks that are written and not flushed: three segments and more.
const UNFLUSHED: std::ops::Range<u64> = 100..600;

impl Place {
    /// Ten blocks are flushed, and many more written. None: no memory outlives a process here.
    fn written(name: &str) -> Option<(Place, Rig, VolumeIndex)> {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), name);
        let cache = dir.file("cache", 64 << 20);
        let hour = 3_600_000_000_000;
        let config = Config {
            close_after: hour,
            durable_after: hour,
            durable_bytes: u64::MAX,
            dirty_age: hour,
            ..Config::default()
        };
        let options = support::shared_options(ReactorKind::Threads, config);
        let pages = Shared::default();
        pages.lock().unwrap().durable = vec![0; 64 << 20];
        let mut rig = Rig::new(Paged::open(&cache, &pages), &options, 1 << 20);
        if !rig.shard.is_shared() {
            forebay_testing::skip("failed_cache: no memory outlives a process here");
            return None;
        }
        let backing = || -> Box<dyn Device> { Box::new(MemoryDevice::new(64 << 20, 512).unwrap()) };
        let volume = rig.add("v", Mode::WriteBack, backing());
        write(&mut rig, volume, 0, 10, 7);
        rig.request(volume, Op::Flush, 0, 0, None).unwrap();
        for first in UNFLUSHED.step_by(50) {
            write(&mut rig, volume, first, 50, 8);
        }
        for _ in 0..20 {
            rig.turn(Duration::from_millis(10), |_| {});
        }
        let backing = Box::new(backing);
        Some((Place { cache, pages, backing, options, dir }, rig, volume))
    }

    /// The process is killed; its memory stays as long as `rig` does.
    fn kill(&self, rig: &mut Rig) {
        let alone = support::options(ReactorKind::Threads, self.options.config);
        let other = open(&self.dir.file("other", 64 << 20));
        forebay::cache::format(other.as_ref(), 64 << 20, support::SEGMENT_BYTES, 1).unwrap();
        let other = forebay::shard::Shard::open(other, &alone).unwrap();
        drop(std::mem::replace(&mut rig.shard, other));
        (self.pages.lock().unwrap().under_way, self.pages.lock().unwrap().hangs) = (0, false);
    }

    fn next(&self, volume: VolumeIndex) -> Rig {
        let mut next = Rig::open(Paged::open(&self.cache, &self.pages), &self.options, 1 << 20);
        next.shard.serve(volume, (self.backing)());
        next
    }

    /// Volumes of which a check says that the end of their log is gone.
    fn lost_ends(&self) -> usize {
        let inspection = Inspection::open(&self.cache, &Places::found()).unwrap();
        let report = check(&inspection).unwrap();
        let lost = |finding: &&Finding| finding.rule == "V10";
        let lost: Vec<&Finding> = report.findings.iter().filter(lost).collect();
        assert!(lost.iter().all(|it| it.severity == Severity::Dirty && it.volume.is_some()));
        lost.len()
    }

    /// What no flush covered is gone, and memory with it.
    fn power_cut(&self, rig: Rig) {
        drop(rig);
        let mut pages = self.pages.lock().unwrap();
        pages.dirty.clear();
        std::fs::write(&self.cache, &pages.durable).unwrap();
    }
}

fn flush(rig: &mut Rig, volume: VolumeIndex) -> Result<(), RequestError> {
    rig.request(volume, Op::Flush, 0, 0, None)
}

fn all_there(rig: &mut Rig, volume: VolumeIndex) {
    for (blocks, byte) in [(0..10, 7), (UNFLUSHED, 8)] {
        for block in blocks {
            assert_eq!(first_byte(rig, volume, block), Ok(byte), "block {block}");
        }
    }
}

/// The kernel had marked the pages clean: they were read, called durable, flushed again, and were gone with the power.
#[test]
fn what_a_failed_flush_left_in_the_page_cache_is_written_again() {
    let Some((place, mut rig, volume)) = Place::written("failed-flush") else { return };
    place.pages.lock().unwrap().fails = Some(AtOnce(false));
    assert_eq!(flush(&mut rig, volume), Err(RequestError::Io));
    assert_eq!(flush(&mut rig, volume), Err(RequestError::Io), "the device would flush again");
    assert_eq!(rig.shard.engine().health(), CacheHealth::Failed);
    place.kill(&mut rig);
    assert_eq!(place.lost_ends(), 0);
    let mut next = place.next(volume);
    assert!(next.shard.opened().rewritten_bytes > 0 && next.shard.opened().dropped_ends == 0);
    assert_eq!(flush(&mut next, volume), Ok(()), "nothing is lost");
    place.power_cut(next);
    drop(rig);
    let mut last = place.next(volume);
    all_there(&mut last, volume);
    assert_eq!(flush(&mut last, volume), Ok(()));
    assert!(last.shard.close(Duration::from_secs(60)).unwrap());
}

/// Nothing in the log says that it went on.
#[test]
fn a_log_whose_end_a_failed_flush_dropped_answers_no_flush_well() {
    let Some((place, mut rig, volume)) = Place::written("dropped-end") else { return };
    place.pages.lock().unwrap().fails = Some(AtOnce(true));
    assert_eq!(flush(&mut rig, volume), Err(RequestError::Io));
    // As if its last segment had been full, and no other begun: no buffer holds any.
    let buffers = rig.buffers();
    let count = u64::from(place.options.config.buffer_count) * 4;
    std::fs::File::options()
        .write(true)
        .open(&buffers)
        .unwrap()
        .write_all_at(&vec![0; count as usize], 4096)
        .unwrap();
    place.kill(&mut rig);
    assert_eq!(place.lost_ends(), 1, "a check says so before");
    let mut next = place.next(volume);
    assert_eq!(next.shard.opened().dropped_ends, 1, "{:?}", next.shard.opened());
    assert!(!next.shard.engine().is_frozen(volume));
    assert_eq!(first_byte(&mut next, volume, 3), Ok(7));
    assert_eq!(flush(&mut next, volume), Err(RequestError::Io));
    assert!(next.shard.close(Duration::from_secs(60)).unwrap());
    let mut last = place.next(volume);
    assert_eq!(flush(&mut last, volume), Ok(()), "the guest was told, and it was started again");
    assert!(last.shard.close(Duration::from_secs(60)).unwrap());
}

/// What was dropped at once is missing, and a flush says so; what was not is made durable. `rigs`: of the process that is gone, and of the
/// next one.
fn is_believed_unless_dropped(place: &Place, rigs: (Rig, Rig), volume: VolumeIndex, at_once: bool) {
    let (gone, mut next) = rigs;
    assert_eq!(flush(&mut next, volume).is_ok(), !at_once);
    place.power_cut(next);
    drop(gone);
    let mut last = place.next(volume);
    match at_once {
        false => all_there(&mut last, volume),
        true => assert_eq!(first_byte(&mut last, volume, 3), Ok(7)),
    }
}

/// A device that does not answer a flush, and a process that is killed for it: nobody hears that the flush fails.
#[test]
fn a_flush_that_was_under_way_at_a_death_is_not_trusted() {
    for at_once in [false, true] {
        let Some((place, mut rig, volume)) = Place::written("hung-flush") else { return };
        place.pages.lock().unwrap().hangs = true;
        rig.shard.submit(volume, Op::Flush, 0, 0, None, 1).unwrap();
        for _ in 0..20 {
            rig.turn(Duration::from_millis(10), |_| {});
        }
        place.kill(&mut rig);
        place.pages.lock().unwrap().fails = Some(AtOnce(at_once));
        // It fails as its process ends.
        let _ = Paged::open(&place.cache, &place.pages).sync();
        let next = place.next(volume);
        let opened = next.shard.opened().clone();
        assert_eq!((opened.rewritten_bytes > 0, opened.dropped_ends), (!at_once, at_once.into()));
        is_believed_unless_dropped(&place, (rig, next), volume, at_once);
    }
}

/// The same without any of that: what the device was given it has, and nothing is written a second time.
#[test]
fn after_a_mere_kill_nothing_is_written_again() {
    let Some((place, mut rig, volume)) = Place::written("mere-kill") else { return };
    place.kill(&mut rig);
    let mut next = place.next(volume);
    let opened = next.shard.opened();
    assert!(opened.redone_segments > 0 && opened.rewritten_bytes == 0, "{opened:?}");
    all_there(&mut next, volume);
    place.power_cut(next);
    drop(rig);
    let mut last = place.next(volume);
    all_there(&mut last, volume);
}

/// The flush of an opening fails: it serves nothing. The next opening must not take for whole what is left.
#[test]
fn an_opening_whose_flush_fails_is_not_forgotten() {
    for at_once in [false, true] {
        let Some((place, mut rig, volume)) = Place::written("failed-opening") else { return };
        place.kill(&mut rig);
        place.pages.lock().unwrap().fails = Some(AtOnce(at_once));
        let failed =
            forebay::shard::Shard::open(Paged::open(&place.cache, &place.pages), &place.options);
        assert!(failed.is_err());
        let next = place.next(volume);
        assert!(next.shard.opened().cache_failed);
        assert!(!next.shard.engine().is_frozen(volume));
        is_believed_unless_dropped(&place, (rig, next), volume, at_once);
    }
}

/// A guest flushes while an operator changes settings, which the superblock says: two flushes under way at once are never seen.
#[test]
fn one_flush_of_the_cache_device_is_under_way_at_a_time() {
    let Some((place, mut rig, volume)) = Place::written("one-flush") else { return };
    for turn in 0..30 {
        write(&mut rig, volume, turn, 1, 9);
        rig.shard.submit(volume, Op::Flush, 0, 0, None, 1).unwrap();
        let mut answers = 0;
        while place.pages.lock().unwrap().under_way == 0 && answers == 0 {
            rig.turn(Duration::from_millis(1), |_| answers += 1);
        }
        rig.shard.set_weight(volume, 1 + turn as u8 % 16).unwrap();
        while answers == 0 {
            rig.turn(Duration::from_millis(10), |answer| {
                assert_eq!(answer.result, Ok(()));
                answers += 1;
            });
        }
    }
    assert_eq!(place.pages.lock().unwrap().most_under_way, 1);
    assert!(rig.shard.close(Duration::from_secs(60)).unwrap());
}

/// The flush behind a new size tells of writes before it, too: once it was taken for a matter of the size alone, and the next flush, which
/// says nothing of what was lost already, was answered to the guest.
#[test]
fn a_flush_that_fails_behind_a_new_size_is_heard_of_by_guests() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-size");
    let cache = dir.file("cache", 64 << 20);
    let options = support::shared_options(ReactorKind::Auto, Config::default());
    let faults = Faults::new();
    let device = Box::new(FaultDevice::new(open(&cache), faults.clone()));
    let mut rig = Rig::new(device, &options, 1 << 20);
    let backing = Box::new(MemoryDevice::new(64 << 20, 512).unwrap());
    let volume = rig.add("v", Mode::WriteBack, backing);
    write(&mut rig, volume, 0, 10, 7);
    faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::From(0)));
    let error = rig.shard.set_cache_file_size(80 << 20).unwrap_err();
    assert!(error.to_string().contains("make the size of the cache's file durable"), "{error}");
    faults.clear();
    assert_eq!(rig.shard.engine().health(), CacheHealth::Failed);
    assert!(rig.request(volume, Op::Flush, 0, 0, None).is_err());
}

/// A device without a volatile cache has nothing to flush, so the kernel answers that by itself when the device is gone: that was taken for a sign
/// of life, and all that could not be read meanwhile was given up for lost, by names that the next opening wrote down.
#[test]
fn what_a_device_that_is_gone_and_answers_flushes_cannot_read_is_not_lost() {
    const BLOCKS: u64 = 1024;
    let hour = 3_600_000_000_000;
    let lost_after = 500_000_000;
    let config = Config {
        buffer_count: 8,
        dirty_age: hour,
        dirty_percent: 100,
        retry_after: 100_000_000,
        lost_after,
        ..Config::default()
    };
    let options = support::shared_options(ReactorKind::Auto, config);
    for answers in [false, true] {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "gone");
        let cache = dir.file("cache", 64 << 20);
        let faults = Faults::new();
        let device = Box::new(FaultDevice::new(open(&cache), faults.clone()));
        let mut rig = Rig::new(device, &options, 1 << 20);
        if !rig.shard.is_shared() {
            forebay_testing::skip("failed_cache: no memory outlives a process here");
            return;
        }
        let backing = || Box::new(MemoryDevice::new(64 << 20, 512).unwrap());
        let volume = rig.add("v", Mode::WriteBack, backing());
        (0..BLOCKS).step_by(256).for_each(|first| write(&mut rig, volume, first, 256, 7));
        flush(&mut rig, volume).unwrap();
        // Whatever is open is written and durable: nothing but write-back asks the device for anything.
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            rig.turn(Duration::from_millis(50), |_| {});
        }
        let mut fails = vec![OperationKind::Read, OperationKind::Write];
        fails.extend((!answers).then_some(OperationKind::Flush));
        let rule = |kind| FaultRule::new(Some(kind), FaultWhen::From(0));
        fails.into_iter().for_each(|kind| faults.add(rule(kind)));
        rig.shard.drain(volume);
        let until = Instant::now() + 4 * Duration::from_nanos(lost_after);
        while Instant::now() < until {
            rig.turn(Duration::from_millis(50), |_| {});
        }
        assert_eq!(rig.shard.engine().health(), CacheHealth::Failed);
        die(&mut rig, &dir);
        faults.clear();
        let mut next = Rig::open(open(&cache), &options, 1 << 20);
        next.shard.serve(volume, backing());
        let good = (0..BLOCKS).filter(|block| first_byte(&mut next, volume, *block) == Ok(7));
        assert_eq!(good.count() as u64, BLOCKS, "flushes answered: {answers}");
        next.close();
    }
}
