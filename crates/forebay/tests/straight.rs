// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests whose bytes are a buffer of the ring as well: what goes straight to the backing device, and what is copied all the same. Of the ring
//! there is nothing here: the device plays the kernel that holds the buffers.

use crate::support::{self, BLOCK, Dir, PATIENCE, Rig};
use forebay::elsewhere::{Bytes, Elsewhere};
use forebay::io::{
    Completion, Device, DeviceError, DeviceInfo, MemoryDevice, Operation, Reactor, ReactorKind,
    Registered,
};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const WRITE: Op = Op::Write { fua: false };
const SLOT: usize = 64 << 10;

/// What the kernel holds, and moves.
#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Held>>);

#[derive(Default)]
struct Held {
    places: HashMap<u16, Vec<u8>>,
    /// How often bytes went to such a place, and from one.
    counts: [u32; 2],
}

impl Kernel {
    fn put(&self, place: u16, bytes: Vec<u8>) -> Registered {
        let length = bytes.len() as u32;
        self.0.lock().unwrap().places.insert(place, bytes);
        Registered::new(place, length)
    }

    fn bytes(&self, place: u16) -> Vec<u8> {
        self.0.lock().unwrap().places[&place].clone()
    }

    /// Reads and writes that went straight.
    fn counts(&self) -> [u32; 2] {
        self.0.lock().unwrap().counts
    }
}

struct Straight {
    memory: MemoryDevice,
    kernel: Kernel,
    takes: bool,
    done: Vec<Completion>,
}

impl Straight {
    fn move_bytes(&self, operation: Operation) -> io::Result<()> {
        let Held { places, counts } = &mut *self.kernel.0.lock().unwrap();
        let (Operation::ReadRegistered { buffer, offset }
        | Operation::WriteRegistered { buffer, offset }) = operation
        else {
            unreachable!("no other has a buffer");
        };
        let from = buffer.from() as usize;
        let bytes = &mut places.get_mut(&buffer.place()).unwrap()[from..][..buffer.len() as usize];
        let writes = matches!(operation, Operation::WriteRegistered { .. });
        counts[usize::from(writes)] += 1;
        match writes {
            true => self.memory.write_at(offset, bytes),
            false => self.memory.read_at(offset, bytes),
        }
    }
}

impl Device for Straight {
    fn info(&self) -> &DeviceInfo {
        self.memory.info()
    }

    fn takes_registered(&self) -> bool {
        self.takes
    }

    fn submit(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        match operation {
            Operation::ReadRegistered { .. } | Operation::WriteRegistered { .. } => {
                assert!(self.takes);
                let result = self.move_bytes(operation).map_err(|_| DeviceError::IO);
                self.done.push(Completion { token, result });
            }
            _ => self.memory.submit(reactor, operation, token, now),
        }
    }

    fn event(&mut self, _: &mut Reactor, _: u64, _: i32, _: Instant, _: &mut Vec<Completion>) {}

    fn poll(&mut self, reactor: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        self.memory.poll(reactor, now, done);
    }

    fn deadline(&self) -> Option<Instant> {
        let own = (!self.done.is_empty()).then(Instant::now);
        own.into_iter().chain(self.memory.deadline()).min()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read_at(offset, bytes)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory.write_at(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

struct Guest {
    rig: Rig,
    volume: VolumeIndex,
    kernel: Kernel,
    /// As the driver's: it holds what is written.
    file: File,
    _dir: Dir,
}

/// As where volumes are served bare.
fn bare() -> Config {
    Config { ahead_blocks: 0, fill_run_max: 0, ..Config::default() }
}

fn pattern(length: u64, first: u8) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8 ^ first).collect()
}

impl Guest {
    fn new(name: &str, config: Config, takes: bool) -> Guest {
        let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), name);
        let path = dir.file("driver", 0);
        let file = File::options().read(true).write(true).open(path).unwrap();
        let options = support::options(ReactorKind::Threads, config);
        let cache = Box::new(MemoryDevice::new(64 << 20, 4096).unwrap());
        let mut rig = Rig::new(cache, &options, 4 * SLOT);
        let kernel = Kernel::default();
        let memory = MemoryDevice::new(64 << 20, 512).unwrap();
        let device = Straight { memory, kernel: kernel.clone(), takes, done: Vec::new() };
        let volume = rig.add("v", Mode::WriteAround, Box::new(device));
        Guest { rig, volume, kernel, file, _dir: dir }
    }

    fn write(&mut self, offset: u64, length: u64, first: u8) {
        self.begin_write(offset, length, first);
        self.answers(1).remove(0).1.unwrap();
    }

    /// Of `pattern(length, first)`, lent at a place.
    fn begin_write(&mut self, offset: u64, length: u64, first: u8) {
        let bytes = pattern(length, first);
        self.file.write_all_at(&bytes, 0).unwrap();
        let registered = Some(self.kernel.put(7, bytes));
        let span = Some(self.rig.span(0, SLOT));
        let elsewhere = Some(Elsewhere { file: self.file.as_raw_fd(), offset: 0 });
        self.rig.span(0, SLOT).copy_in(&[0xEE; SLOT]);
        let bytes = Bytes { span, elsewhere, registered };
        self.rig.shard.submit_from(self.volume, WRITE, offset, length, bytes, 0).unwrap();
    }

    /// Begins one, lent at a place, with memory of its own.
    fn begin_read(&mut self, offset: u64, length: u64, slot: u16) {
        let registered = Some(self.kernel.put(slot, vec![0xEE; length as usize]));
        let span = self.rig.span(usize::from(slot), SLOT);
        span.copy_in(&[0xEE; SLOT]);
        let bytes = Bytes { span: Some(span), elsewhere: None, registered };
        let cookie = u64::from(slot);
        self.rig.shard.submit_from(self.volume, Op::Read, offset, length, bytes, cookie).unwrap();
    }

    /// What it gave, as a front end takes it, and whether it went straight.
    fn read(&mut self, offset: u64, length: u64) -> (Vec<u8>, bool) {
        self.begin_read(offset, length, 1);
        let (_, result, is_straight) = self.answers(1).remove(0);
        result.unwrap();
        (self.given(offset, length, 1, is_straight), is_straight)
    }

    fn given(&self, offset: u64, length: u64, slot: u16, is_straight: bool) -> Vec<u8> {
        if is_straight {
            return self.kernel.bytes(slot);
        }
        let mut bytes = vec![0; length as usize];
        let from = (offset % BLOCK) as usize;
        let span = self.rig.span(usize::from(slot), SLOT);
        span.part(from, length as usize).copy_out(&mut bytes);
        bytes
    }

    fn answers(&mut self, count: usize) -> Vec<(u64, Result<(), RequestError>, bool)> {
        let (begun, mut all) = (Instant::now(), Vec::new());
        while all.len() < count {
            assert!(begun.elapsed() < PATIENCE, "{count} are not answered");
            self.rig.turn(Duration::from_millis(100), |answer| {
                all.push((answer.cookie, answer.result, answer.is_straight));
            });
        }
        all
    }

    fn backing(&self, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.rig.shard.backing(self.volume).unwrap().read_at(offset, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn what_is_bare_goes_straight_both_ways() {
    let mut guest = Guest::new("straight-bare", bare(), true);
    for (at, length) in [(0, BLOCK), (3 * BLOCK, 5 * BLOCK), (100 * BLOCK + 512, 1536)] {
        guest.write(at, length, 3);
        assert_eq!(guest.backing(at, length), pattern(length, 3));
    }
    assert_eq!(guest.kernel.counts(), [0, 3]);
    let mut untouched = [0; SLOT];
    guest.rig.span(0, SLOT).copy_out(&mut untouched);
    assert!(untouched.iter().all(|byte| *byte == 0xEE), "nobody has copied what was written");
    assert_eq!(guest.read(3 * BLOCK, 5 * BLOCK), (pattern(5 * BLOCK, 3), true));
    // A read that covers a block in part is copied.
    assert_eq!(guest.read(100 * BLOCK + 512, 1536), (pattern(1536, 3), false));
    assert_eq!(guest.kernel.counts(), [1, 3]);
    guest.rig.close();
}

/// A zeroed range is in the log until it is written back. What is written meanwhile goes there as well, and is read from there.
#[test]
fn what_the_log_holds_is_copied() {
    let mut guest = Guest::new("straight-log", bare(), true);
    guest.write(0, 8 * BLOCK, 5);
    let zero = Op::WriteZeroes { fua: false };
    guest.rig.shard.submit(guest.volume, zero, 2 * BLOCK, BLOCK, None, 9).unwrap();
    guest.begin_write(5 * BLOCK, BLOCK, 9);
    guest.begin_read(0, 8 * BLOCK, 1);
    guest.begin_read(6 * BLOCK, 2 * BLOCK, 2);
    let mut expected = pattern(8 * BLOCK, 5);
    expected[2 * BLOCK as usize..3 * BLOCK as usize].fill(0);
    expected.splice(5 * BLOCK as usize..6 * BLOCK as usize, pattern(BLOCK, 9));
    for (cookie, result, is_straight) in guest.answers(4) {
        result.unwrap();
        assert_eq!(is_straight, cookie == 2);
    }
    assert_eq!(guest.given(0, 8 * BLOCK, 1, false), expected);
    assert_eq!(guest.given(6 * BLOCK, 2 * BLOCK, 2, true), expected[6 * BLOCK as usize..]);
    assert_eq!(guest.kernel.counts(), [1, 1]);
    // A write-around volume's requests are answered when they are there.
    assert_eq!(guest.backing(0, 8 * BLOCK), expected);
    guest.rig.close();
}

/// Who comes second would else be given what the first one's memory never had.
#[test]
fn nobody_waits_for_a_read_that_goes_straight() {
    let mut guest = Guest::new("straight-alone", bare(), true);
    guest.write(0, 4 * BLOCK, 7);
    for slot in 1..4 {
        guest.begin_read(0, 4 * BLOCK, slot);
    }
    let answers = guest.answers(3);
    assert_eq!(guest.kernel.counts(), [3, 1]);
    for (slot, result, is_straight) in answers {
        result.unwrap();
        assert_eq!(guest.given(0, 4 * BLOCK, slot as u16, is_straight), pattern(4 * BLOCK, 7));
    }
    let stats = guest.rig.shard.engine().status(guest.volume).unwrap().stats;
    assert_eq!(stats.shared_blocks, 0);
    guest.rig.close();
}

/// It waits itself for one that is copied, and has its bytes from there.
#[test]
fn what_is_being_read_to_memory_is_waited_for() {
    let mut guest = Guest::new("straight-waits", bare(), true);
    guest.write(0, 4 * BLOCK, 11);
    guest.begin_read(512, BLOCK, 1);
    guest.begin_read(0, 2 * BLOCK, 2);
    for (slot, result, is_straight) in guest.answers(2) {
        result.unwrap();
        assert!(!is_straight);
        let (offset, length) = if slot == 1 { (512, BLOCK) } else { (0, 2 * BLOCK) };
        let expected = &pattern(4 * BLOCK, 11)[offset as usize..][..length as usize];
        assert_eq!(guest.given(offset, length, slot as u16, is_straight), expected);
    }
    guest.rig.close();
}

/// With a cache a write-around volume's reads are copied into it, so they are looked at.
#[test]
fn of_a_volume_with_a_cache_only_writes_go_straight() {
    let mut guest = Guest::new("straight-cached", Config::default(), true);
    guest.write(0, 4 * BLOCK, 13);
    for _ in 0..3 {
        assert_eq!(guest.read(0, 4 * BLOCK), (pattern(4 * BLOCK, 13), false));
    }
    // Over what the cache holds, too.
    guest.write(BLOCK, BLOCK, 17);
    assert_eq!(guest.kernel.counts(), [0, 2]);
    let mut expected = pattern(4 * BLOCK, 13);
    expected.splice(BLOCK as usize..2 * BLOCK as usize, pattern(BLOCK, 17));
    assert_eq!(guest.read(0, 4 * BLOCK), (expected, false));
    guest.rig.close();
}

#[test]
fn a_device_that_takes_no_such_buffers_is_never_asked() {
    let mut guest = Guest::new("straight-none", bare(), false);
    assert!(!guest.rig.shard.may_go_straight(guest.volume));
    guest.write(0, 4 * BLOCK, 19);
    assert_eq!(guest.read(0, 4 * BLOCK), (pattern(4 * BLOCK, 19), false));
    assert_eq!(guest.kernel.counts(), [0, 0]);
    guest.rig.close();
}
