// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two volumes behind one cache, and the backing device of one fails for good under load: the
//! other goes on, nothing of the failing one is lost, and when it is well again it drains. One that
//! refuses single blocks takes the others: those are kept, tried again, and hold back nothing. And a
//! flush that fails after writes around the log: no later one is answered as if it had not. And one
//! that takes all and can be read no more.

use crate::support::{self, BLOCK, Dir, PATIENCE, Random, Rig, Void};
use forebay::cache::read_superblock;
use forebay::host::machine::DeviceNumber;
use forebay::io::{
    DeviceKind, FaultDevice, FaultRule, FaultWhen, Faults, FileDevice, FileError, FileOptions,
    OperationKind, ReactorKind,
};
use forebay::shard::{CACHE_SOURCE, backing_source};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::{Lba, VolumeIndex};
use forebay_core::why::Place;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const CACHE_BYTES: u64 = 128 << 20;
const BACKING_BYTES: u64 = 96 << 20;
const WRITE: u64 = 4 * BLOCK;

/// A volume and what was written to it and answered.
struct Guest {
    volume: VolumeIndex,
    holds: HashMap<u64, u64>,
    tag: u64,
    random: Random,
}

impl Guest {
    fn write(&mut self, rig: &mut Rig) {
        let first = self.random.below(BACKING_BYTES / WRITE) * (WRITE / BLOCK);
        let span = rig.memory.span(0, WRITE as usize);
        let mut tags = Vec::new();
        for block in first..first + WRITE / BLOCK {
            self.tag += 1;
            span.skip(((block - first) * BLOCK) as usize).copy_in(&self.tag.to_le_bytes());
            tags.push((block, self.tag));
        }
        let fua = self.tag % 16 == 4;
        let op = Op::Write { fua };
        rig.request(self.volume, op, first * BLOCK, WRITE, Some(span)).unwrap();
        self.holds.extend(tags);
    }

    /// Where the backing device gives nothing any more, what a batch brought there before may have left the cache.
    fn check_reads(&self, rig: &mut Rig, is_gone: bool) {
        let mut found = 0;
        for (block, tag) in &self.holds {
            let place = rig.shard.engine().why(self.volume, Lba(*block)).unwrap().place;
            let span = rig.memory.span(0, BLOCK as usize);
            let read = rig.request(self.volume, Op::Read, block * BLOCK, BLOCK, Some(span));
            if is_gone && place == Place::Backing {
                read.unwrap_err();
                continue;
            }
            read.unwrap();
            found += 1;
            let mut word = [0; 8];
            span.copy_out(&mut word);
            assert_eq!(u64::from_le_bytes(word), *tag, "block {block}");
        }
        assert!(found > 0);
    }

    fn check_file(&self, path: &Path) {
        let file = std::fs::File::open(path).unwrap();
        for (block, tag) in &self.holds {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, block * BLOCK).unwrap();
            assert_eq!(u64::from_le_bytes(word), *tag, "block {block}");
        }
    }
}

#[test]
fn one_backing_fails_for_good_and_the_other_goes_on() {
    for kind in [Some(OperationKind::Write), Some(OperationKind::Flush), None] {
        fail_and_recover(kind);
    }
}

/// Two volumes with data, the backing device of the second one at the mercy of `faults`.
fn two_guests(dir: &Dir, faults: &Faults) -> (Rig, Guest, Guest) {
    let device = |name, bytes, source| {
        let options = FileOptions { source, ..FileOptions::default() };
        Box::new(FileDevice::open(&dir.file(name, bytes), &options).unwrap())
    };
    let second = Duration::from_secs(1).as_nanos() as u64;
    let config = Config {
        close_after: second / 50,
        dirty_age: second / 20,
        retry_after: second / 20,
        ..Config::default()
    };
    let options = support::shared_options(ReactorKind::Auto, config);
    let mut rig = Rig::new(device("cache", CACHE_BYTES, CACHE_SOURCE), &options, 1 << 20);
    let (good, bad) = (VolumeIndex(0), VolumeIndex(1));
    let backing = device("good", BACKING_BYTES, backing_source(good));
    assert_eq!(rig.add("good", Mode::WriteBack, backing), good);
    let below = device("bad", BACKING_BYTES, backing_source(bad));
    let backing = Box::new(FaultDevice::new(below, faults.clone()));
    assert_eq!(rig.add("bad", Mode::WriteBack, backing), bad);
    let guest = |volume: VolumeIndex| {
        let random = Random(u64::from(volume.0));
        Guest { volume, holds: HashMap::new(), tag: 0, random }
    };
    let (mut one, mut two) = (guest(good), guest(bad));
    for _ in 0..300 {
        one.write(&mut rig);
        two.write(&mut rig);
    }
    (rig, one, two)
}

/// `None`: it does nothing any more.
fn fail_and_recover(kind: Option<OperationKind>) {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failing");
    let faults = Faults::new();
    let (mut rig, mut one, mut two) = two_guests(&dir, &faults);
    let (good, bad) = (one.volume, two.volume);
    // For good, from here on. Where reads go on they do as on many a dying disk.
    faults.add(FaultRule::new(kind, FaultWhen::From(0)));
    let batches = rig.shard.engine().status(good).unwrap().stats.batches;
    let mut written = 0;
    while written < 600 || faults.failed() < 3 {
        one.write(&mut rig);
        // Not more than the log of the failing volume holds.
        if written < 600 {
            two.write(&mut rig);
        }
        written += 1;
        assert!(written < 200_000, "write-back is not tried again");
    }
    rig.shard.drain(good);
    rig.wait("the good one is clean", |shard| shard.engine().is_clean(good));
    let state = rig.shard.engine().status(good).unwrap();
    assert!(state.stats.batches > batches && !state.backing_failing, "{state:?}");
    let state = rig.shard.engine().status(bad).unwrap();
    assert!(state.backing_failing && state.dirty && state.stats.backing_faults >= 1, "{state:?}");
    assert_eq!(state.stats.lost_blocks, 0);
    one.check_reads(&mut rig, false);
    two.check_reads(&mut rig, kind.is_none());
    // What was never written is only on the device.
    let unwritten = (0..BACKING_BYTES / BLOCK).find(|block| !two.holds.contains_key(block));
    for _ in 0..3 {
        let span = rig.memory.span(0, BLOCK as usize);
        let at = unwritten.unwrap() * BLOCK;
        let read = rig.request(bad, Op::Read, at, BLOCK, Some(span));
        assert_eq!(read.is_err(), kind.is_none(), "{kind:?}: {read:?}");
    }
    one.check_file(&dir.0.join("good"));

    faults.clear();
    rig.shard.drain(bad);
    rig.wait("the other one is drained", |shard| shard.engine().is_clean(bad));
    assert!(!rig.shard.engine().status(bad).unwrap().backing_failing);
    two.check_reads(&mut rig, false);
    rig.close();
    two.check_file(&dir.0.join("bad"));
}

/// A disk that takes everything and gives nothing: who asks for what only it has is told so, and nothing else stands still.
#[test]
fn reads_alone_fail_and_writes_and_write_back_go_on() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "unreadable");
    let faults = Faults::new();
    let (mut rig, mut one, mut two) = two_guests(&dir, &faults);
    let (good, bad) = (one.volume, two.volume);
    // Its neighbour on the right is on the disk alone.
    let next = |two: &Guest| {
        let last = (0..BACKING_BYTES / BLOCK - 1)
            .find(|block| two.holds.contains_key(block) && !two.holds.contains_key(&(block + 1)));
        last.unwrap() + 1
    };
    faults.add(FaultRule::new(Some(OperationKind::Read), FaultWhen::From(0)));
    for round in 0..3 {
        let (first, failed) = (next(&two), faults.failed());
        let span = rig.memory.span(0, 2 * BLOCK as usize);
        let block = Some(span.part(0, BLOCK as usize));
        // Alone; behind a block that the cache has; and an edge that would have to be read for a part of a block.
        assert_eq!(rig.request(bad, Op::Read, first * BLOCK, BLOCK, block), Err(RequestError::Io));
        let both = rig.request(bad, Op::Read, (first - 1) * BLOCK, 2 * BLOCK, Some(span));
        assert_eq!(both, Err(RequestError::Io));
        let write = Op::Write { fua: round == 0 };
        let part = Some(span.part(0, 512));
        assert_eq!(rig.request(bad, write, first * BLOCK, 512, part), Err(RequestError::Io));
        assert!(faults.failed() >= failed + 3, "nobody asked the disk");
        rig.request(good, Op::Read, first * BLOCK, BLOCK, block).unwrap();
        for _ in 0..100 {
            one.write(&mut rig);
            two.write(&mut rig);
        }
        one.check_reads(&mut rig, false);
        two.check_reads(&mut rig, true);
        rig.request(bad, Op::Flush, 0, 0, None).unwrap();
    }
    for guest in [&one, &two] {
        rig.shard.drain(guest.volume);
        rig.wait("it is clean", |shard| shard.engine().is_clean(guest.volume));
    }
    two.check_file(&dir.0.join("bad"));
    let state = rig.shard.engine().status(bad).unwrap();
    assert!(state.stats.backing_faults >= 6 && !state.backing_failing, "{state:?}");
    assert_eq!((state.stats.lost_blocks, state.parked_blocks), (0, 0));
    let state = rig.shard.engine().status(good).unwrap();
    assert_eq!(state.stats.backing_faults, 0, "{state:?}");

    faults.clear();
    let first = next(&two);
    let span = rig.memory.span(0, BLOCK as usize);
    rig.request(bad, Op::Read, first * BLOCK, BLOCK, Some(span)).unwrap();
    let mut found = vec![1; BLOCK as usize];
    span.copy_out(&mut found);
    assert!(found.iter().all(|byte| *byte == 0), "a write that failed has left something");
    let part = span.part(0, 512);
    part.copy_in(&[9; 512]);
    rig.request(bad, Op::Write { fua: false }, first * BLOCK, 512, Some(part)).unwrap();
    rig.request(bad, Op::Read, first * BLOCK, BLOCK, Some(span)).unwrap();
    span.copy_out(&mut found);
    assert!(found[..512] == [9; 512] && found[512..].iter().all(|byte| *byte == 0));
    one.check_reads(&mut rig, false);
    two.check_reads(&mut rig, false);
    rig.close();
    one.check_file(&dir.0.join("good"));
    two.check_file(&dir.0.join("bad"));
}

#[test]
fn no_flush_is_answered_well_after_one_that_failed_over_writes_around_the_log() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-flush");
    let file = |name, bytes, source| {
        let options = FileOptions { source, ..FileOptions::default() };
        Box::new(FileDevice::open(&dir.file(name, bytes), &options).unwrap())
    };
    let options = support::options(ReactorKind::Auto, Config::default());
    let mut rig = Rig::new(file("cache", CACHE_BYTES, CACHE_SOURCE), &options, 1 << 20);
    let volume = VolumeIndex(0);
    let faults = Faults::new();
    let below = file("backing", BACKING_BYTES, backing_source(volume));
    let device = Box::new(FaultDevice::new(below, faults.clone()));
    assert_eq!(rig.add("around", Mode::WriteAround, device), volume);
    let mut guest = Guest { volume, holds: HashMap::new(), tag: 0, random: Random(1) };
    guest.write(&mut rig);
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    assert!(!rig.shard.engine().status(volume).unwrap().flush_failed);

    guest.write(&mut rig);
    let next = faults.count(Some(OperationKind::Flush)) + 1;
    faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::Nth(next)));
    rig.request(volume, Op::Flush, 0, 0, None).unwrap_err();
    assert_eq!(faults.failed(), 1);
    // The device is well again, but it may have dropped what it should have flushed.
    for _ in 0..3 {
        rig.request(volume, Op::Flush, 0, 0, None).unwrap_err();
    }
    let span = rig.memory.span(0, WRITE as usize);
    rig.request(volume, Op::Write { fua: true }, 0, WRITE, Some(span)).unwrap_err();
    // What promises nothing goes on, and what is there can be read.
    rig.request(volume, Op::Write { fua: false }, WRITE, WRITE, Some(span)).unwrap();
    rig.request(volume, Op::Read, WRITE, WRITE, Some(span)).unwrap();
    assert!(rig.shard.engine().status(volume).unwrap().flush_failed);
    assert_eq!(faults.failed(), 1);
}

/// A volume whose writes go around the log, behind a device whose next flush can be made to fail.
struct Around {
    dir: Dir,
    faults: Faults,
}

impl Around {
    fn new(name: &str) -> (Around, Rig) {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), name);
        dir.file("cache", CACHE_BYTES);
        dir.file("backing", BACKING_BYTES);
        let case = Around { dir, faults: Faults::new() };
        let mut rig = Rig::new(case.device("cache", CACHE_SOURCE), &case.options(), 1 << 20);
        assert_eq!(rig.add("around", Mode::WriteAround, case.backing()), VolumeIndex(0));
        (case, rig)
    }

    fn options(&self) -> forebay::shard::ShardOptions {
        support::options(ReactorKind::Auto, Config::default())
    }

    fn device(&self, name: &str, source: u16) -> Box<dyn forebay::io::Device> {
        let (path, options) =
            (self.dir.0.join(name), FileOptions { source, ..FileOptions::default() });
        // The kernel lets go of what a dead ring had open some time after.
        let mut opened = FileDevice::open(&path, &options);
        forebay_testing::wait_for("the device is free", || {
            if opened.as_ref().is_err_and(FileError::is_busy) {
                opened = FileDevice::open(&path, &options);
            }
            !opened.as_ref().is_err_and(FileError::is_busy)
        });
        Box::new(opened.unwrap())
    }

    fn backing(&self) -> Box<dyn forebay::io::Device> {
        let below = self.device("backing", backing_source(VolumeIndex(0)));
        Box::new(FaultDevice::new(below, self.faults.clone()))
    }

    fn open(&self) -> Rig {
        let mut rig = Rig::open(self.device("cache", CACHE_SOURCE), &self.options(), 1 << 20);
        rig.shard.serve(VolumeIndex(0), self.backing());
        rig
    }

    /// The next flush of the backing device fails, and none after it.
    fn fail_next_flush(&self) {
        let next = self.faults.count(Some(OperationKind::Flush)) + 1;
        self.faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::Nth(next)));
    }
}

fn write(rig: &mut Rig, block: u64) {
    let span = rig.memory.span(0, WRITE as usize);
    let op = Op::Write { fua: false };
    rig.request(VolumeIndex(0), op, block * BLOCK, WRITE, Some(span)).unwrap();
}

fn flush(rig: &mut Rig) -> Result<(), RequestError> {
    rig.request(VolumeIndex(0), Op::Flush, 0, 0, None)
}

fn close(rig: Rig) -> bool {
    rig.shard.close(PATIENCE).unwrap()
}

/// The flush at the stop failed, and may have dropped what the guest had written around the log. Nobody had told the
/// guest when it asked the next process for a flush, which the device answered well.
#[test]
fn a_flush_that_failed_at_a_stop_is_remembered_until_the_guest_was_told() {
    let (case, mut rig) = Around::new("failed-stop");
    write(&mut rig, 0);
    case.fail_next_flush();
    assert!(!close(rig));
    assert_eq!(case.faults.failed(), 1);
    // A stop between changes nothing.
    assert!(close(case.open()));
    let mut rig = case.open();
    assert!(rig.shard.engine().status(VolumeIndex(0)).unwrap().flush_failed);
    flush(&mut rig).unwrap_err();
    flush(&mut rig).unwrap_err();
    assert!(close(rig));
    // Whoever starts it again knows.
    let mut rig = case.open();
    flush(&mut rig).unwrap();
    assert!(!rig.shard.engine().status(VolumeIndex(0)).unwrap().flush_failed);
    assert!(close(rig));
}

/// Two partitions of a disk hold what went around the log, and at the stop the disk cannot be flushed. It says so to whom it is asked for, and may
/// have dropped what the other has: the next process took that for safe. A file is flushed by itself.
#[test]
fn what_a_disk_drops_at_a_stop_is_noted_for_all_that_are_on_it() {
    // Which fails, what they are, and of which the next process hears. The first is flushed first.
    let cases = [
        (0, DeviceKind::Block, [true, true]),
        (1, DeviceKind::Block, [false, true]),
        (0, DeviceKind::File, [true, false]),
    ];
    for (fails, kind, expected) in cases {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-disk");
        let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        let cache = FileDevice::open(&dir.file("cache", CACHE_BYTES), &options).unwrap();
        let options = support::options(ReactorKind::Auto, Config::default());
        let mut rig = Rig::new(Box::new(cache), &options, 1 << 20);
        let faults = Faults::new();
        for at in 0..2 {
            let below = Box::new(Void::new(BACKING_BYTES).of(kind));
            let rules = if at == fails { faults.clone() } else { Faults::new() };
            let disk = Some(DeviceNumber::from_raw(0x801));
            let backing = Box::new(FaultDevice::new(below, rules));
            let volume = rig.add_on("v", Mode::WriteAround, backing, disk);
            put_tag(&mut rig, volume, 0, 1).unwrap();
        }
        faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::From(0)));
        assert!(!rig.shard.close(PATIENCE).unwrap());
        let cache = FileDevice::open(&dir.0.join("cache"), &FileOptions::default()).unwrap();
        let found = read_superblock(&cache).unwrap().superblock;
        let told = [0, 1].map(|at| found.volumes[at].as_ref().unwrap().flush_failed);
        assert_eq!((told, found.clean), (expected, false), "{kind:?}, volume {fails} fails");
    }
}

fn cache_at(path: &Path) -> Box<FileDevice> {
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    Box::new(FileDevice::open(path, &options).unwrap())
}

/// A process dies with writes around the log that nobody flushed; the next one waits for that volume's device, in vain, and is stopped. That was a
/// clean stop, and the one after it answered the guest's flush without one of the device.
#[test]
fn a_stop_that_cannot_flush_what_a_dead_process_wrote_is_no_clean_one() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-late");
    let path = dir.file("cache", CACHE_BYTES);
    let cache = || cache_at(&path);
    let options = support::shared_options(ReactorKind::Auto, Config::default());
    let mut rig = Rig::new(cache(), &options, 1 << 20);
    let volume = rig.add("v", Mode::WriteAround, Box::new(Void::new(BACKING_BYTES)));
    put_tag(&mut rig, volume, 0, 1).unwrap();
    drop(rig);
    let rig = Rig::open(cache(), &options, 1 << 20);
    assert!(!rig.shard.close(PATIENCE).unwrap());
    let mut rig = Rig::open(cache(), &options, 1 << 20);
    let faults = Faults::new();
    faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::From(0)));
    let below = Box::new(Void::new(BACKING_BYTES));
    rig.shard.serve(volume, Box::new(FaultDevice::new(below, faults.clone())));
    flush(&mut rig).unwrap_err();
    assert_eq!(faults.failed(), 1, "the device was asked");
}

/// The same of two partitions of a disk, of which one is there at the stop and cannot be flushed: the disk may have dropped what the other has, too. That
/// one's guest heard nothing of it.
#[test]
fn what_a_disk_drops_at_a_stop_is_noted_for_those_that_are_waited_for() {
    for there in [0, 1] {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failed-waiting");
        let path = dir.file("cache", CACHE_BYTES);
        let cache = || cache_at(&path);
        let options = support::shared_options(ReactorKind::Auto, Config::default());
        let mut rig = Rig::new(cache(), &options, 1 << 20);
        let part = || Void::new(BACKING_BYTES).of(DeviceKind::Block);
        let volumes = ["v", "w"].map(|name| rig.add(name, Mode::WriteAround, Box::new(part())));
        for volume in volumes {
            put_tag(&mut rig, volume, 0, 1).unwrap();
        }
        drop(rig);
        let mut rig = Rig::open(cache(), &options, 1 << 20);
        let faults = Faults::new();
        faults.add(FaultRule::new(Some(OperationKind::Flush), FaultWhen::From(0)));
        rig.shard.serve(volumes[there], Box::new(FaultDevice::new(Box::new(part()), faults)));
        assert!(!rig.shard.close(PATIENCE).unwrap());
        let found = read_superblock(cache().as_ref()).unwrap().superblock;
        let told = [0, 1].map(|at| found.volumes[at].as_ref().unwrap().flush_failed);
        assert_eq!((told, found.clean), ([true, true], false), "volume {there} is there");
    }
}

/// It is noted when it happens: a process that is killed forgets nothing of it.
#[test]
fn a_flush_that_failed_is_remembered_by_who_comes_after_a_kill() {
    let (case, mut rig) = Around::new("failed-kill");
    write(&mut rig, 0);
    case.fail_next_flush();
    flush(&mut rig).unwrap_err();
    rig.wait("it is noted", |shard| {
        let found = read_superblock(shard.cache()).unwrap();
        let is_noted = found.superblock.volumes[0].as_ref().unwrap().flush_failed;
        is_noted && found.copies[0] == found.copies[1]
    });
    drop(rig);
    let mut rig = case.open();
    flush(&mut rig).unwrap_err();
    assert!(close(rig));
    flush(&mut case.open()).unwrap();
}

/// From now on so many blocks of a backing device cannot be written, and all others can.
fn go_bad(faults: &Faults, bad: u64) {
    faults.clear();
    for at in 0..bad {
        let when = FaultWhen::Over { offset: (3 + 2 * at) * BLOCK, length: 512 };
        for kind in [OperationKind::Write, OperationKind::WriteZeroes] {
            faults.add(FaultRule::new(Some(kind), when));
        }
    }
}

/// A volume before a backing device that does nothing yet.
fn parking(dir: &Dir, mode: Mode) -> (Rig, VolumeIndex, Faults) {
    let device = |name, bytes, source| {
        let options = FileOptions { source, ..FileOptions::default() };
        Box::new(FileDevice::open(&dir.file(name, bytes), &options).unwrap())
    };
    let milli = 1_000_000;
    let config = Config {
        close_after: 20 * milli,
        durable_after: 50 * milli,
        dirty_age: 50 * milli,
        retry_after: 5 * milli,
        ..Config::default()
    };
    let options = support::options(ReactorKind::Auto, config);
    let mut rig = Rig::new(device("cache", CACHE_BYTES, CACHE_SOURCE), &options, 1 << 20);
    let faults = Faults::new();
    faults.add(FaultRule::new(None, FaultWhen::From(0)));
    let below = device("backing", BACKING_BYTES, backing_source(VolumeIndex(0)));
    let volume = rig.add("v", mode, Box::new(FaultDevice::new(below, faults.clone())));
    (rig, volume, faults)
}

fn tag_of(rig: &mut Rig, volume: VolumeIndex, block: u64) -> u64 {
    let span = rig.memory.span(0, BLOCK as usize);
    rig.request(volume, Op::Read, block * BLOCK, BLOCK, Some(span)).unwrap();
    let mut word = [0; 8];
    span.copy_out(&mut word);
    u64::from_le_bytes(word)
}

fn put_tag(rig: &mut Rig, volume: VolumeIndex, block: u64, tag: u64) -> Result<(), RequestError> {
    let span = rig.memory.span(0, BLOCK as usize);
    span.copy_in(&tag.to_le_bytes());
    rig.request(volume, Op::Write { fua: false }, block * BLOCK, BLOCK, Some(span))
}

#[test]
fn one_refused_block_is_kept_and_the_rest_of_the_volume_drains() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "parked");
    let (mut rig, volume, faults) = parking(&dir, Mode::WriteBack);
    for block in 0..600 {
        put_tag(&mut rig, volume, block, block + 1).unwrap();
    }
    // The second bad block is to be zeros.
    rig.request(volume, Op::WriteZeroes { fua: false }, 4 * BLOCK, 8 * BLOCK, None).unwrap();
    go_bad(&faults, 2);
    rig.shard.drain(volume);
    let parked = |shard: &forebay::shard::Shard| {
        let state = shard.engine().status(volume).unwrap();
        state.parked_blocks == 2 && state.dirty_blocks == 2 && state.dirty_extents == 0
    };
    rig.wait("all but the bad blocks are written", parked);
    let state = rig.shard.engine().status(volume).unwrap();
    assert_eq!((state.parked_first, state.parked_full), (Some(Lba(3)), false), "{state:?}");
    assert!(!state.backing_failing && !rig.shard.engine().is_clean(volume));
    let file = std::fs::File::open(dir.0.join("backing")).unwrap();
    let on_disk = |block: u64| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, block * BLOCK).unwrap();
        u64::from_le_bytes(word)
    };
    let expected = |block: u64| if (4..12).contains(&block) { 0 } else { block + 1 };
    for block in (0..600).filter(|block| *block != 3) {
        assert_eq!(on_disk(block), expected(block));
    }
    assert_eq!(on_disk(3), 0);
    // They are tried again, and appended again: seldom.
    let again = state.stats.parked_blocks;
    rig.wait("they are tried again", |shard| {
        shard.engine().status(volume).unwrap().stats.parked_blocks >= again + 4
    });
    for block in 0..600 {
        assert_eq!(tag_of(&mut rig, volume, block), expected(block));
    }
    // A volume that was drained answers what the backing device has; and what it has not, with an error.
    put_tag(&mut rig, volume, 700, 7).unwrap();
    assert_eq!(on_disk(700), 7);
    assert_eq!(put_tag(&mut rig, volume, 3, 33), Err(RequestError::Io));
    // Nobody closes it for the drain's sake: what is parked is in the log.
    drop(rig);
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    let cache = Box::new(FileDevice::open(&dir.0.join("cache"), &options).unwrap());
    let soon = 50_000_000;
    let config = Config { dirty_age: soon, retry_after: soon / 10, ..Config::default() };
    let mut rig = Rig::open(cache, &support::options(ReactorKind::Auto, config), 1 << 20);
    let options = FileOptions { source: backing_source(volume), ..FileOptions::default() };
    let below = Box::new(FileDevice::open(&dir.0.join("backing"), &options).unwrap());
    rig.shard.serve(volume, Box::new(FaultDevice::new(below, faults.clone())));
    rig.shard.drain(volume);
    rig.wait("they are found refused again", parked);
    assert_eq!(tag_of(&mut rig, volume, 3), 33);
    faults.clear();
    rig.wait("all is written", |shard| shard.engine().is_clean(volume));
    assert_eq!(rig.shard.engine().status(volume).unwrap().parked_blocks, 0);
    assert_eq!((on_disk(3), on_disk(5)), (33, 0));
    rig.close();
}

/// No half of the one long write is taken, nor a half of that: only single blocks are. Halving everything came
/// to no success within the tries that say whether a device works at all, so nothing was ever parked.
#[test]
fn every_second_block_of_a_long_write_is_refused() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "parked-comb");
    let (mut rig, volume, faults) = parking(&dir, Mode::WriteBack);
    for block in 3..203 {
        put_tag(&mut rig, volume, block, block + 1).unwrap();
    }
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    go_bad(&faults, 100);
    let parked = |shard: &forebay::shard::Shard| {
        let state = shard.engine().status(volume).unwrap();
        state.parked_blocks == 100 && state.dirty_blocks == 100
    };
    rig.wait("all but the bad blocks are written", parked);
    // Tried again, they say nothing of the device.
    let again = rig.shard.engine().status(volume).unwrap().stats.parked_blocks;
    put_tag(&mut rig, volume, 700, 7).unwrap();
    rig.wait("they are tried again, and others are written", |shard| {
        let state = shard.engine().status(volume).unwrap();
        state.stats.parked_blocks >= again + 300 && parked(shard)
    });
    faults.clear();
    rig.wait("all is written", |shard| shard.engine().is_clean(volume));
    rig.close();
}

#[test]
fn a_volume_that_refuses_too_many_blocks_takes_no_writes_until_it_is_well() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "parked-full");
    let (mut rig, volume, faults) = parking(&dir, Mode::WriteBack);
    for block in 0..600 {
        put_tag(&mut rig, volume, block, block + 1).unwrap();
    }
    go_bad(&faults, 200);
    rig.wait("too many", |shard| shard.engine().status(volume).unwrap().parked_full);
    assert_eq!(put_tag(&mut rig, volume, 900, 9), Err(RequestError::Io));
    for block in 0..600 {
        assert_eq!(tag_of(&mut rig, volume, block), block + 1);
    }
    let state = rig.shard.engine().status(volume).unwrap();
    assert!(state.parked_full && state.dirty && state.parked_blocks > 100, "{state:?}");
    faults.clear();
    rig.wait("well", |shard| !shard.engine().status(volume).unwrap().parked_full);
    put_tag(&mut rig, volume, 900, 9).unwrap();
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    rig.close();
}

/// A device without a volatile cache has nothing to flush, so the kernel answers that by itself when the device is gone: a volume of which little is
/// written took it for one that refuses some blocks, and after 126 of them its guests had errors.
#[test]
fn a_volume_whose_device_is_gone_and_answers_flushes_takes_writes_until_it_is_back() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "gone-backing");
    let (mut rig, volume, faults) = parking(&dir, Mode::WriteBack);
    faults.clear();
    for kind in [OperationKind::Read, OperationKind::Write] {
        faults.add(FaultRule::new(Some(kind), FaultWhen::From(0)));
    }
    let tries =
        |shard: &forebay::shard::Shard| shard.engine().status(volume).unwrap().stats.backing_writes;
    for block in 0..300 {
        put_tag(&mut rig, volume, block * 7, block + 1).unwrap();
        // Some of them in each batch.
        if block % 6 == 0 {
            let before = tries(&rig.shard);
            rig.wait("a try", |shard| tries(shard) > before);
        }
    }
    let state = rig.shard.engine().status(volume).unwrap();
    assert!(!state.parked_full && state.parked_blocks == 0, "{state:?}");
    faults.clear();
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    for block in 0..300 {
        assert_eq!(tag_of(&mut rig, volume, block * 7), block + 1);
    }
    rig.close();
}

/// What is asked to see whether a device does anything may be bad itself: a drain never ended.
#[test]
fn a_device_whose_first_block_is_bad_is_not_gone() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "bad-first");
    let (mut rig, volume, faults) = parking(&dir, Mode::WriteBack);
    faults.clear();
    for kind in [OperationKind::Read, OperationKind::Write] {
        let when = FaultWhen::Over { offset: 0, length: BLOCK };
        faults.add(FaultRule::new(Some(kind), when));
    }
    put_tag(&mut rig, volume, 0, 1).unwrap();
    rig.wait("parked", |shard| shard.engine().status(volume).unwrap().parked_blocks == 1);
    assert_eq!(tag_of(&mut rig, volume, 0), 1);
    faults.clear();
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    rig.close();
}
