// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device that fails, loses what was not flushed (a reset, a plug), and is there again when the program that served it is
//! gone. The machine never stopped; but it is not only the program that died.

#![allow(clippy::unwrap_used)]

mod support;

use forebay::io::{
    Device, FaultDevice, FaultRule, FaultWhen, Faults, FileDevice, FileOptions, MemoryDevice,
    OperationKind, ReactorKind,
};
use forebay::shard::CACHE_SOURCE;
use forebay_core::engine::{CacheHealth, Config};
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use std::path::Path;
use std::time::Duration;
use support::{BLOCK, Dir, Rig};

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
        println!("skipped: no memory outlives a process here");
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
    let alone = support::options(ReactorKind::Threads, config);
    let other = open(&dir.file("other", 64 << 20));
    forebay::cache::format(other.as_ref(), 64 << 20, support::SEGMENT_BYTES, 1).unwrap();
    drop(std::mem::replace(&mut rig.shard, forebay::shard::Shard::open(other, &alone).unwrap()));
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
