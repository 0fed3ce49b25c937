// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes whose bytes did not come with them: they are read from a file of the kernel's, here one of the test's own.

use crate::support::{self, BLOCK, Dir, PATIENCE, Rig};
use forebay::elsewhere::{Bytes, Elsewhere};
use forebay::io::{MemoryDevice, ReactorKind};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const WRITE: Op = Op::Write { fua: false };
const SLOT: usize = 64 << 10;
/// The file holds so many bytes, all different from their neighbours' and from 0.
const HELD: u64 = 64 << 10;

struct Guest {
    rig: Rig,
    file: File,
    held: Vec<u8>,
    _dir: Dir,
}

impl Guest {
    fn new(name: &str, mode: Mode) -> (Guest, VolumeIndex) {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), name);
        let held: Vec<u8> = (0..HELD).map(|at| (at % 251 + 1) as u8).collect();
        let path = dir.file("held", 0);
        let file = File::options().read(true).write(true).open(path).unwrap();
        file.write_all_at(&held, 0).unwrap();
        let hour = 3_600_000_000_000;
        let config = Config { close_after: hour, durable_after: hour, ..Config::default() };
        let options = support::shared_options(ReactorKind::Threads, config);
        let cache = Box::new(MemoryDevice::new(64 << 20, 4096).unwrap());
        let mut rig = Rig::new(cache, &options, 2 * SLOT);
        let volume = rig.add("v", mode, Box::new(MemoryDevice::new(64 << 20, 512).unwrap()));
        (Guest { rig, file, held, _dir: dir }, volume)
    }

    /// Its memory holds nothing of it.
    fn write(
        &mut self,
        volume: VolumeIndex,
        (offset, length): (u64, u64),
        from: u64,
    ) -> Result<(), RequestError> {
        let span = self.rig.span(0, SLOT);
        span.copy_in(&[0xEE; SLOT]);
        let elsewhere = Some(Elsewhere { file: self.file.as_raw_fd(), offset: from });
        let bytes = Bytes { span: Some(span), elsewhere, registered: None };
        self.rig.shard.submit_from(volume, WRITE, offset, length, bytes, 1).unwrap();
        let (begun, mut result) = (Instant::now(), None);
        while result.is_none() {
            assert!(begun.elapsed() < PATIENCE, "it is not answered");
            self.rig.turn(Duration::from_millis(100), |answer| result = Some(answer.result));
        }
        result.unwrap()
    }

    fn read(&mut self, volume: VolumeIndex, offset: u64, length: u64) -> Vec<u8> {
        let span = self.rig.span(1, SLOT);
        self.rig.request(volume, Op::Read, offset, length, Some(span)).unwrap();
        let mut bytes = vec![0; SLOT];
        span.copy_out(&mut bytes);
        bytes.drain(..(offset % BLOCK) as usize);
        bytes.truncate(length as usize);
        bytes
    }

    fn memory_is_untouched(&self) -> bool {
        let mut bytes = [0; SLOT];
        self.rig.span(0, SLOT).copy_out(&mut bytes);
        bytes.iter().all(|byte| *byte == 0xEE)
    }
}

#[test]
fn a_block_is_copied_once_straight_to_the_log() {
    let (mut guest, volume) = Guest::new("elsewhere-block", Mode::WriteBack);
    // The second finds the log dirty, and is a plain one.
    for (at, from) in [(0, 4096), (3, 512)] {
        guest.write(volume, (at * BLOCK, BLOCK), from).unwrap();
        assert!(guest.memory_is_untouched());
        let expected = guest.held[from as usize..][..BLOCK as usize].to_vec();
        assert_eq!(guest.read(volume, at * BLOCK, BLOCK), expected);
    }
    let zeros = guest.held.len() as u64;
    guest.file.set_len(zeros + BLOCK).unwrap();
    guest.write(volume, (3 * BLOCK, BLOCK), zeros).unwrap();
    assert_eq!(guest.read(volume, 3 * BLOCK, BLOCK), vec![0; BLOCK as usize]);
    let stats = guest.rig.shard.engine().status(volume).unwrap().stats;
    assert_eq!(stats.zeroed_blocks, 1);
    guest.rig.close();
}

#[test]
fn what_is_longer_or_not_of_whole_blocks_arrives_as_well() {
    let (mut guest, volume) = Guest::new("elsewhere-long", Mode::WriteBack);
    for (offset, length, from) in
        [(0, 5 * BLOCK, 512), (512, 1024, 0), (7 * BLOCK - 512, BLOCK, 8192)]
    {
        guest.write(volume, (offset, length), from).unwrap();
        let expected = guest.held[from as usize..][..length as usize].to_vec();
        assert_eq!(guest.read(volume, offset, length), expected);
    }
    guest.rig.close();
}

#[test]
fn what_goes_around_the_log_arrives_on_the_backing_device() {
    let (mut guest, volume) = Guest::new("elsewhere-around", Mode::WriteAround);
    guest.write(volume, (8 * BLOCK, 2 * BLOCK), 512).unwrap();
    let mut bytes = vec![0; 2 * BLOCK as usize];
    guest.rig.shard.backing(volume).unwrap().read_at(8 * BLOCK, &mut bytes).unwrap();
    assert_eq!(bytes, guest.held[512..][..bytes.len()]);
    guest.rig.close();
}

#[test]
fn a_write_whose_bytes_cannot_be_had_fails_alone() {
    for (name, mode) in [("elsewhere-back", Mode::WriteBack), ("elsewhere-past", Mode::WriteAround)]
    {
        let (mut guest, volume) = Guest::new(name, mode);
        guest.write(volume, (0, BLOCK), 0).unwrap();
        // The file ends in the middle of it, or before it.
        for (offset, length, from) in [
            (0, BLOCK, HELD - 512),
            (0, 3 * BLOCK, HELD - BLOCK),
            (512, 1024, HELD),
            (0, BLOCK, HELD),
        ] {
            let failed = guest.write(volume, (offset, length), from);
            assert_eq!(failed, Err(RequestError::Io));
        }
        assert_eq!(guest.read(volume, 0, BLOCK), guest.held[..BLOCK as usize]);
        guest.write(volume, (0, BLOCK), BLOCK).unwrap();
        assert_eq!(guest.read(volume, 0, BLOCK), guest.held[BLOCK as usize..][..BLOCK as usize]);
        guest.rig.request(volume, Op::Flush, 0, 0, None).unwrap();
        guest.rig.close();
    }
}
