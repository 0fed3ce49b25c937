// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two volumes behind one cache, and the backing device of one fails for good under load: the
//! other goes on, nothing of the failing one is lost, and when it is well again it drains. And a
//! flush that fails after writes around the log: no later one is answered as if it had not.

#![allow(clippy::unwrap_used)]

mod support;

use forebay::io::{
    FaultDevice, FaultRule, FaultWhen, Faults, FileDevice, FileOptions, OperationKind, ReactorKind,
};
use forebay::shard::{CACHE_SOURCE, backing_source};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use support::{BLOCK, Dir, Random, Rig};

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

    fn check_reads(&self, rig: &mut Rig) {
        for (block, tag) in &self.holds {
            let span = rig.memory.span(0, BLOCK as usize);
            rig.request(self.volume, Op::Read, block * BLOCK, BLOCK, Some(span)).unwrap();
            let mut word = [0; 8];
            span.copy_out(&mut word);
            assert_eq!(u64::from_le_bytes(word), *tag, "block {block}");
        }
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
    for kind in [OperationKind::Write, OperationKind::Flush] {
        fail_and_recover(kind);
    }
}

fn fail_and_recover(kind: OperationKind) {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "failing");
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
    assert_eq!(
        rig.add("good", Mode::WriteBack, device("good", BACKING_BYTES, backing_source(good))),
        good
    );
    let faults = Faults::new();
    let below = device("bad", BACKING_BYTES, backing_source(bad));
    assert_eq!(
        rig.add("bad", Mode::WriteBack, Box::new(FaultDevice::new(below, faults.clone()))),
        bad
    );
    let guest = |volume: VolumeIndex| {
        let random = Random(u64::from(volume.0));
        Guest { volume, holds: HashMap::new(), tag: 0, random }
    };
    let (mut one, mut two) = (guest(good), guest(bad));
    for _ in 0..300 {
        one.write(&mut rig);
        two.write(&mut rig);
    }
    // For good, from here on; reads go on, as they do on many a dying disk.
    faults.add(FaultRule::new(Some(kind), FaultWhen::From(0)));
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
    one.check_reads(&mut rig);
    two.check_reads(&mut rig);
    one.check_file(&dir.0.join("good"));

    faults.clear();
    rig.shard.drain(bad);
    rig.wait("the other one is drained", |shard| shard.engine().is_clean(bad));
    assert!(!rig.shard.engine().status(bad).unwrap().backing_failing);
    two.check_reads(&mut rig);
    assert!(rig.shard.close(Duration::from_secs(10)).unwrap());
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
