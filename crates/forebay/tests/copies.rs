// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A copy of a cache (`dd`, a snapshot) on the machine where the cache itself is served. Both have one uuid, by which the memory is
//! found that a killed process leaves.

use crate::support::{self, BLOCK, Dir, Rig};
use forebay::io::{FileDevice, FileOptions, MemoryDevice, ReactorKind};
use forebay::shard::{CACHE_SOURCE, OpenError, Opening, Shard};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use std::path::Path;
use std::time::Duration;

fn open(path: &Path) -> Box<FileDevice> {
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    Box::new(FileDevice::open(path, &options).unwrap())
}

/// The copy was opened: what the one that serves had in memory was written to it, and that memory's file was replaced. If that one
/// was killed then, all was lost that it had answered and not written. The copy is refused, and not changed; when nobody serves
/// the cache it can be served as any other.
#[test]
fn a_copy_is_refused_while_the_cache_is_served() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "copies");
    let (cache, copy) = (dir.file("cache", 64 << 20), dir.file("copy", 64 << 20));
    // What is written stays in memory.
    let hour = 3_600_000_000_000;
    let config = Config { close_after: hour, durable_after: hour, ..Config::default() };
    let options = support::shared_options(ReactorKind::Threads, config);
    let mut rig = Rig::new(open(&cache), &options, 1 << 20);
    if !rig.shard.is_shared() {
        forebay_testing::skip("copies: no memory outlives a process here");
        return;
    }
    let backing = || Box::new(MemoryDevice::new(64 << 20, 512).unwrap());
    let volume = rig.add("v", Mode::WriteBack, backing());
    let span = rig.span(0, BLOCK as usize);
    span.copy_in(&[7; BLOCK as usize]);
    rig.request(volume, Op::Write { fua: false }, 0, BLOCK, Some(span)).unwrap();
    std::fs::copy(&cache, &copy).unwrap();
    let before = std::fs::read(&copy).unwrap();
    let refused = Shard::open(open(&copy), &options).err();
    assert!(matches!(refused, Some(OpenError::Copy { .. })), "{refused:?}");
    assert!(std::fs::read(&copy).unwrap() == before, "it was changed");
    // As if it was killed: what it has answered is there.
    let alone = support::options(ReactorKind::Threads, config);
    let Rig { shard, memory, .. } = &mut rig;
    let dead = std::mem::replace(shard, Shard::open(fresh(&dir), &alone).unwrap());
    drop(dead);
    let mut next = Rig::open(open(&cache), &options, 1 << 20);
    assert_eq!(next.shard.opened().redone_segments, 1);
    next.shard.serve(volume, backing());
    memory.whole().fill_zero();
    let span = next.span(0, BLOCK as usize);
    next.request(volume, Op::Read, 0, BLOCK, Some(span)).unwrap();
    let mut bytes = [0; BLOCK as usize];
    span.copy_out(&mut bytes);
    assert_eq!(bytes, [7; BLOCK as usize]);
    assert!(next.shard.close(Duration::from_secs(60)).unwrap());
    assert!(Shard::open(open(&copy), &options).is_ok());
}

/// Both had looked whether somebody served the other before either did; the second took the first one's memory away from it, and a
/// process after both could have taken what was in the one for the other's.
#[test]
fn of_a_cache_and_its_copy_that_are_opened_at_once_one_is_refused() {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "copies-at-once");
    let (cache, copy) = (dir.file("cache", 64 << 20), dir.file("copy", 64 << 20));
    let options = support::shared_options(ReactorKind::Threads, Config::default());
    let rig = Rig::new(open(&cache), &options, 1 << 20);
    if !rig.shard.is_shared() {
        forebay_testing::skip("copies: no memory outlives a process here");
        return;
    }
    rig.close();
    std::fs::copy(&cache, &copy).unwrap();
    let [one, other] = [&cache, &copy].map(|path| Opening::begin(open(path), &options).unwrap());
    let shard = one.finish().unwrap();
    let refused = other.finish().err();
    assert!(matches!(refused, Some(OpenError::Copy { .. })), "{refused:?}");
    assert!(shard.close(Duration::from_secs(60)).unwrap());
}

/// Another cache.
fn fresh(dir: &Dir) -> Box<FileDevice> {
    let device = open(&dir.file("other", 64 << 20));
    forebay::cache::format(device.as_ref(), 64 << 20, support::SEGMENT_BYTES, 1).unwrap();
    device
}
