// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices whose driver's file is any file: what is asked of the engine, and in which order.

use super::*;
use crate::nbd::listen::NbdFrontEnd;
use crate::server::Server;
use crate::shards;
use forebay::io::{MemoryDevice, ReactorKind, Throttle, ThrottleDevice, ThrottleLimits};
use forebay::shard::ShardOptions;
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_testing::{PATIENCE, Random, counting};
use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

const SIZE: u64 = 64 << 20;
/// A device that takes so long is as good as one that does not answer.
const SILENT: Duration = Duration::from_secs(1 << 20);

/// A volume that is not cached, on a device that answers so late.
fn serve(shard: &mut Shard, latency: Duration) -> VolumeIndex {
    let throttle = Throttle::new(ThrottleLimits { latency, ..ThrottleLimits::default() });
    let memory = Box::new(MemoryDevice::new(SIZE, 512).unwrap());
    shards::serve(shard, Mode::WriteAround, Box::new(ThrottleDevice::new(memory, throttle)))
}

/// The kernel has all tags of the device, and each has the same read when it comes back.
fn device(name: &str, volume: VolumeIndex, sectors: u32) -> Device {
    let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
    let file =
        File::options().create(true).truncate(true).write(true).read(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    for tag in 0..u64::from(QUEUE_DEPTH) {
        // A read is operation 0; at the first sector.
        let at = tag * wire::DESCRIPTOR_BYTES as u64;
        file.write_all_at(&sectors.to_ne_bytes(), at + 4).unwrap();
    }
    std::fs::remove_file(path).unwrap();
    let queue = Queue::map(file, QUEUE_DEPTH, None).unwrap();
    Device { fetched: QUEUE_DEPTH, ..Device::new(queue, volume).0 }
}

fn asked(front_end: &UblkFrontEnd) -> Vec<u16> {
    front_end.devices.iter().flatten().map(|device| device.asked).collect()
}

/// Four requests of 1 MiB on a device that did not answer had all of the memory, and the oldest of them let none of other
/// devices pass.
#[test]
fn a_device_whose_volume_does_not_answer_holds_up_no_other() {
    let mut shard = shards::empty(ReactorKind::Auto);
    let silent = serve(&mut shard, SILENT);
    let others = [0, 1].map(|_| serve(&mut shard, Duration::ZERO));
    let devices = vec![
        device("silent", silent, 2048),
        device("long", others[0], 2048),
        device("short", others[1], 8),
    ];
    let mut front_end = UblkFrontEnd::new(devices, Arc::new(Bell::new().unwrap())).unwrap();
    for at in 0..3 {
        for tag in 0..QUEUE_DEPTH {
            front_end.fetched(at, tag, 0, &mut shard);
        }
    }
    front_end.advance(&mut shard);
    let [silent, long, short] = asked(&front_end)[..] else { panic!("three devices") };
    assert!(silent > 0 && silent < QUEUE_DEPTH, "{silent} are asked");
    assert!(long > 0 && short > 0, "{long} and {short} are asked");
    let waiting = front_end.devices[0].as_ref().unwrap().waiting.front().copied();
    assert_eq!(waiting, Some(silent), "in the order in which they came");
    // Each that is answered makes room for the next, until none is left of those that can be answered.
    let (mut answers, mut done) = (Vec::new(), [0; 3]);
    forebay_testing::wait_for("the others are answered", || {
        shard.turn(Some(Duration::from_millis(10)), &mut Vec::new()).unwrap();
        shard.take_answers(&mut answers);
        for answer in answers.drain(..) {
            let (_, number) = Place::of_cookie(answer.cookie);
            done[usize::from(of_number(number).0)] += 1;
            front_end.given_back(number);
        }
        front_end.advance(&mut shard);
        done[1..] == [QUEUE_DEPTH, QUEUE_DEPTH]
    });
    assert_eq!((done[0], &asked(&front_end)[1..]), (0, &[0, 0][..]));
}

/// Two requests of 1 MiB were all that a device could have under way, half of what a disk needs. And what it has of NBD clients' memory keeps no other
/// device from going on.
#[test]
fn more_is_under_way_at_a_slow_device_than_there_is_memory_of_ublk() {
    let _clients = NbdFrontEnd::new(Vec::new(), Rc::default()).unwrap();
    let mut shard = shards::empty(ReactorKind::Auto);
    let silent = [0, 1].map(|_| serve(&mut shard, SILENT));
    let other = serve(&mut shard, Duration::ZERO);
    let devices = vec![
        device("one", silent[0], 2048),
        device("two", silent[1], 2048),
        device("other", other, 2048),
    ];
    let mut front_end = UblkFrontEnd::new(devices, Arc::new(Bell::new().unwrap())).unwrap();
    for at in [0, 1] {
        for tag in 0..QUEUE_DEPTH {
            front_end.fetched(at, tag, 0, &mut shard);
        }
        front_end.advance(&mut shard);
    }
    let [one, two, _] = asked(&front_end)[..] else { panic!("three devices") };
    assert!(one >= 12 && two >= 4, "{one} and {two} MiB are asked");
    let mut answers = Vec::new();
    for tag in 0..QUEUE_DEPTH {
        front_end.fetched(2, tag, 0, &mut shard);
        front_end.advance(&mut shard);
        forebay_testing::wait_for("it is answered", || {
            shard.turn(Some(Duration::from_millis(10)), &mut Vec::new()).unwrap();
            shard.take_answers(&mut answers);
            !answers.is_empty()
        });
        for answer in answers.drain(..) {
            let (_, number) = Place::of_cookie(answer.cookie);
            assert_eq!(of_number(number), (2, tag));
            front_end.given_back(number);
        }
    }
    assert_eq!(asked(&front_end), [one, two, 0]);
}

/// It stayed with its bell for as long as the daemon lived. The driver gives each tag back, as any other file does that knows no such command.
#[test]
fn a_front_end_whose_devices_are_let_go_of_is_over_when_nobody_works_for_it() {
    let (shard, volume) = shards::shard(ReactorKind::Auto, SIZE);
    let mut server = Server::new(shard);
    let (bell, its) = (Arc::new(Bell::new().unwrap()), device("over", volume, 8));
    let is_let_go = Arc::clone(&its.is_let_go);
    let its = Device { fetched: 0, ..its };
    let front_end = UblkFrontEnd::new(vec![its], Arc::clone(&bell)).unwrap();
    server.add(Box::new(front_end)).unwrap();
    let turn = |server: &mut Server| server.turn(Some(Duration::from_millis(1))).unwrap();
    forebay_testing::wait_for("the tags are back", || {
        turn(&mut server);
        is_let_go.load(Ordering::Acquire)
    });
    for _ in 0..10 {
        bell.ring();
        turn(&mut server);
        assert_eq!(server.front_end_count(), 1, "somebody may make or end a device of it");
    }
    drop(bell);
    forebay_testing::wait_for("it is over", || {
        turn(&mut server);
        server.front_end_count() == 0
    });
}

/// Volumes that come and go take no more memory than those that stay (U3).
#[test]
fn front_ends_of_one_loop_have_the_same_memory_one_beside_and_after_the_other() {
    let front_end = || UblkFrontEnd::new(Vec::new(), Arc::new(Bell::new().unwrap())).unwrap();
    let (first, second) = (front_end(), front_end());
    assert!(std::rc::Rc::ptr_eq(first.memory.of_kind(), second.memory.of_kind()));
    let pool = std::rc::Rc::as_ptr(first.memory.of_kind());
    drop((first, second));
    assert_eq!(std::rc::Rc::as_ptr(front_end().memory.of_kind()), pool);
}

/// A driver that has the next request for each tag that it is given: a file that knows no command answers at once.
struct Driver {
    front_end: UblkFrontEnd,
    file: File,
    random: Random,
    written: Rc<Cell<u64>>,
}

impl Driver {
    const BYTES_MAX: u64 = 150 << 10;

    /// The front end of one device, the bytes of its writes, and how many are written. `buffer_bytes`: the kernel copies.
    fn new(volume: VolumeIndex, buffer_bytes: Option<u32>) -> (Driver, Rc<Cell<u64>>) {
        let dir = forebay_testing::Dir::new(std::env::temp_dir(), "forebay-driver");
        let path = dir.file("ublkc0", 4096);
        let file = File::options().write(true).read(true).open(path).unwrap();
        let queue = Queue::map(file.try_clone().unwrap(), QUEUE_DEPTH, buffer_bytes).unwrap();
        let mut random = Random(3);
        let mut bytes = vec![0; Driver::BYTES_MAX as usize];
        for tag in 0..QUEUE_DEPTH {
            bytes.fill_with(|| random.next() as u8);
            match queue.buffer(tag) {
                Some(buffer) => buffer.part(0, bytes.len()).copy_in(&bytes),
                None => file.write_all_at(&bytes, wire::bytes_at(tag)).unwrap(),
            }
        }
        let device = Device::new(queue, volume).0;
        let front_end = UblkFrontEnd::new(vec![device], Arc::new(Bell::new().unwrap())).unwrap();
        let written = Rc::<Cell<u64>>::default();
        (Driver { front_end, file, random, written: Rc::clone(&written) }, written)
    }

    /// Any request in whole sectors.
    fn describe(&mut self, tag: u16) {
        let random = &mut self.random;
        let sectors = 1 + random.below(Driver::BYTES_MAX / 512);
        let sector = random.below(SIZE / 512 - sectors);
        let fua = if random.below(16) == 0 { 1 << 13 } else { 0 };
        let word: u32 = match random.below(100) {
            0..3 => 2,
            3..6 => 3,
            6..9 => 5 | fua,
            9..40 => 0,
            _ => {
                self.written.set(self.written.get() + sectors * 512);
                1 | fua
            }
        };
        let mut bytes = [0; wire::DESCRIPTOR_BYTES];
        bytes[..4].copy_from_slice(&word.to_ne_bytes());
        bytes[4..8].copy_from_slice(&(sectors as u32).to_ne_bytes());
        bytes[8..16].copy_from_slice(&sector.to_ne_bytes());
        self.file.write_all_at(&bytes, u64::from(tag) * bytes.len() as u64).unwrap();
    }
}

impl FrontEnd for Driver {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.front_end.start(place, shard);
    }

    fn event(&mut self, shard: &mut Shard, name: u64, result: i32) {
        let number = name & (user_data(1, 0) - 1);
        if number == BELL {
            return self.front_end.event(shard, name, result);
        }
        self.describe(of_number(number).1);
        self.front_end.event(shard, name, 0);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        assert_eq!(answer.result, Ok(()));
        self.front_end.answer(shard, answer);
    }

    fn turn(&mut self, shard: &mut Shard) {
        self.front_end.turn(shard);
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        self.front_end.stop(shard)
    }
}

/// C4, as `tests/allocation.rs` has it of front ends that need no driver.
#[test]
fn a_ublk_device_allocates_nothing() {
    const CACHE_BYTES: u64 = 64 << 20;
    for buffer_bytes in [None, Some(Driver::BYTES_MAX as u32)] {
        let config = Config { close_after: 5_000_000, dirty_age: 20_000_000, ..Config::default() };
        let mut shard = shards::of(CACHE_BYTES, ShardOptions { config, ..ShardOptions::default() });
        let memory = Box::new(MemoryDevice::new(SIZE, 512).unwrap());
        let volume = shards::serve(&mut shard, Mode::WriteBack, memory);
        let (driver, written) = Driver::new(volume, buffer_bytes);
        let mut server = Server::new(shard);
        server.add(Box::new(driver)).unwrap();
        let mut write = || {
            let until = written.get() + 2 * CACHE_BYTES;
            while written.get() < until {
                server.turn(Some(Duration::from_millis(20))).unwrap();
            }
            server.shard.engine().status(volume).unwrap().stats.batches
        };
        let batches = write();
        let begun = counting::begin();
        let batches = write() - batches;
        let allocated = counting::end(begun);
        println!("ublk, {buffer_bytes:?}: {allocated} allocations in 2 laps, {batches} batches");
        assert!(batches > 0, "no write-back was under way");
        assert_eq!(allocated, 0);
        let (_unfinished, shard) = server.stop(PATIENCE).unwrap();
        assert!(shard.close(PATIENCE).unwrap());
    }
}

impl UblkFrontEnd {
    /// As an answer does, but that the kernel hears nothing of it.
    fn given_back(&mut self, number: u64) {
        let (at, tag) = of_number(number);
        let device = self.devices[usize::from(at)].as_mut().unwrap();
        let pending = device.pending[usize::from(tag)].take().unwrap();
        device.asked -= 1;
        let volume = device.volume;
        self.free_memory(volume, &pending);
    }
}
