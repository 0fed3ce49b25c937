// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Headers of records rot. One of them alone is no more than its own blocks: the record behind it
//! says which those were. Two in a row are dirty blocks that nobody can name, and then the volume is
//! frozen, and stays so however often the cache is opened and closed.

use crate::support::{self, BLOCK, Dir, Rig};
use forebay::io::{FileDevice, FileOptions, MemoryDevice, ReactorKind};
use forebay::shard::CACHE_SOURCE;
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::log::recovery::Damage;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 64 << 20;
const VOLUME: VolumeIndex = VolumeIndex(0);

struct Case {
    path: PathBuf,
    _dir: Dir,
}

impl Case {
    /// A cache whose log holds this many records, each of one dirty block: record `n` block `n`.
    fn new(name: &str, records: u64) -> (Case, Rig) {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), name);
        let case = Case { path: dir.file("cache", CACHE_BYTES), _dir: dir };
        let mut rig = Rig::new(case.device(), &case.options(), 1 << 20);
        let volume = rig.add("v", Mode::WriteBack, backing());
        assert_eq!(volume, VOLUME);
        for block in 0..records {
            write(&mut rig, block);
        }
        (case, rig)
    }

    fn device(&self) -> Box<FileDevice> {
        let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        Box::new(FileDevice::open(&self.path, &options).unwrap())
    }

    fn options(&self) -> forebay::shard::ShardOptions {
        let config = Config { dirty_age: 3_600_000_000_000, ..Config::default() };
        support::options(ReactorKind::Threads, config)
    }

    fn open(&self) -> Rig {
        let mut rig = Rig::open(self.device(), &self.options(), 1 << 20);
        rig.shard.serve(VOLUME, backing());
        rig
    }

    /// Record number `at` of the log: its header is not one any more.
    fn rot(&self, at: usize) {
        let bytes = std::fs::read(&self.path).unwrap();
        let mut headers = bytes.chunks(BLOCK as usize).enumerate();
        let header = headers.by_ref().filter(|block| block.1.starts_with(b"FBRECORD")).nth(at);
        let offset = header.unwrap().0 as u64 * BLOCK + 512;
        let file = std::fs::OpenOptions::new().write(true).open(&self.path).unwrap();
        file.write_all_at(&[0xA5; 64], offset).unwrap();
    }
}

fn backing() -> Box<MemoryDevice> {
    Box::new(MemoryDevice::new(BACKING_BYTES, 4096).unwrap())
}

/// A record of its own.
fn write(rig: &mut Rig, block: u64) {
    let span = rig.memory.span(0, BLOCK as usize);
    span.copy_in(&(block + 1).to_le_bytes());
    rig.request(VOLUME, Op::Write { fua: false }, block * BLOCK, BLOCK, Some(span)).unwrap();
    rig.request(VOLUME, Op::Flush, 0, 0, None).unwrap();
}

fn read(rig: &mut Rig, block: u64) -> Result<u64, RequestError> {
    let span = rig.memory.span(0, BLOCK as usize);
    rig.request(VOLUME, Op::Read, block * BLOCK, BLOCK, Some(span))?;
    let mut number = [0; 8];
    span.copy_out(&mut number);
    Ok(u64::from_le_bytes(number))
}

fn is_frozen(rig: &Rig) -> bool {
    let status = rig.shard.engine().status(VOLUME).unwrap();
    assert!(!(status.frozen && status.serving));
    status.frozen
}

#[test]
fn a_frozen_volume_stays_frozen_however_often_it_is_opened() {
    for close in [false, true] {
        let (case, rig) = Case::new("twice", 6);
        drop(rig);
        case.rot(2);
        case.rot(3);
        for round in 0..4 {
            let rig = case.open();
            let damage = &rig.shard.opened().damage;
            assert!(is_frozen(&rig), "closed: {close}, opening {round}, {damage:?}");
            if close {
                rig.close();
            }
        }
    }
}

#[test]
fn a_frozen_volume_takes_writes_again_when_its_data_is_given_up() {
    let (case, rig) = Case::new("given-up", 6);
    drop(rig);
    case.rot(2);
    case.rot(3);
    let mut rig = Rig::open(case.device(), &case.options(), 1 << 20);
    assert!(is_frozen(&rig));
    rig.shard.forget_data(VOLUME).unwrap();
    drop(rig);
    let mut rig = case.open();
    assert!(!is_frozen(&rig));
    write(&mut rig, 2);
    assert_eq!((read(&mut rig, 2), read(&mut rig, 0)), (Ok(3), Ok(0)));
    rig.close();
}

#[test]
fn a_header_that_rots_alone_costs_its_own_blocks_and_freezes_nothing() {
    let (case, rig) = Case::new("alone", 6);
    drop(rig);
    case.rot(2);
    let mut rig = case.open();
    let lost = Damage::Lost { volume: VOLUME, lba: forebay_core::units::Lba(2), count: 1 };
    assert_eq!(rig.shard.opened().damage, [lost]);
    assert!(!is_frozen(&rig));
    for block in 0..6 {
        let expected = if block == 2 { Err(RequestError::Io) } else { Ok(block + 1) };
        assert_eq!(read(&mut rig, block), expected, "block {block}");
    }
    rig.close();
}
