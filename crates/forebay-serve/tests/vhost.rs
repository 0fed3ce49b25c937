// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtual machines of the test's own drive a disk: every request, and everything that no driver
//! should say.

#![cfg(feature = "vhost")]
#![allow(clippy::unwrap_used)]

use forebay::cache;
use forebay::io::{Completion, Layer, Operation, Reactor};
use forebay::io::{Device, MemoryDevice, ReactorKind};
use forebay::shard::{NewVolume, Shard, ShardOptions};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::units::VolumeIndex;
use forebay_serve::server::Server;
use forebay_serve::vhost::blk::{Disk, feature};
use forebay_serve::vhost::driver::{DATA_BYTES, Data, Done, Link, Machine, kind};
use forebay_serve::vhost::front_end::{Socket, VhostFrontEnd};
use forebay_serve::vhost::wire::request;
use forebay_testing::{Dir, PATIENCE, Random, wait_for};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SIZE: u64 = 16 << 20;
const SILENT_SIZE: u64 = 64 << 20;

/// While it is shut, a device does not answer; and how many bytes of writes wait for it.
#[derive(Clone, Default)]
struct Gate(Arc<AtomicBool>, Arc<AtomicU64>);

struct Silent {
    below: Box<dyn Device>,
    gate: Gate,
    held: Vec<(Operation, u64)>,
}

impl Layer for Silent {
    fn below(&self) -> &dyn Device {
        self.below.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.below.as_mut()
    }

    fn pass(&mut self, _: &mut Reactor, operation: Operation, token: u64, _: Instant) {
        if let Operation::Write { span, .. } = operation {
            self.gate.1.fetch_add(span.len() as u64, Ordering::Relaxed);
        }
        self.held.push((operation, token));
    }

    fn due(&self) -> Option<Instant> {
        let is_open = !self.gate.0.load(Ordering::Relaxed);
        (is_open && !self.held.is_empty()).then(Instant::now)
    }

    fn turn(&mut self, reactor: &mut Reactor, now: Instant, _: &mut Vec<Completion>) {
        if !self.gate.0.load(Ordering::Relaxed) {
            for (operation, token) in self.held.drain(..) {
                self.below.submit(reactor, operation, token, now);
            }
        }
    }
}

/// A daemon in a thread. Of two volumes the second is on a device that answers when it is let.
struct Daemon {
    path: PathBuf,
    silent_path: PathBuf,
    gate: Gate,
    stops: Arc<AtomicBool>,
    news: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
    _dir: Dir,
}

impl Daemon {
    fn start(name: &str, logical_block: u32) -> Daemon {
        let dir = Dir::new(std::env::temp_dir(), &format!("fb-{name}"));
        let [path, silent_path] = ["v", "silent"].map(|name| dir.0.join(name));
        let listeners = [&path, &silent_path].map(|path| UnixListener::bind(path).unwrap());
        let gate = Gate::default();
        let stops = Arc::new(AtomicBool::new(false));
        let news = Arc::new(Mutex::new(Vec::new()));
        let (its_stops, its_news) = (Arc::clone(&stops), Arc::clone(&news));
        let its_gate = gate.clone();
        let thread = std::thread::spawn(move || {
            let mut shard = shard();
            let backing: Box<dyn Device> =
                Box::new(MemoryDevice::new(SIZE, logical_block).unwrap());
            let volume = serve(&mut shard, logical_block, Mode::WriteBack, backing);
            let backing = Box::new(MemoryDevice::new(SILENT_SIZE, 512).unwrap());
            let backing = Box::new(Silent { below: backing, gate: its_gate, held: Vec::new() });
            let silent = serve(&mut shard, 512, Mode::WriteAround, backing);
            let disk = Disk::new("a-disk", SIZE, logical_block);
            let silent_disk = Disk::new("silent", SILENT_SIZE, 512);
            let sockets = std::iter::zip(listeners, [(volume, disk), (silent, silent_disk)])
                .map(|(listener, (volume, disk))| Socket { listener, volume, disk })
                .collect();
            let front_end = VhostFrontEnd::new(sockets).unwrap();
            let watch = front_end.watch();
            let mut server = Server::new(shard);
            server.add(Box::new(front_end)).unwrap();
            while !its_stops.load(Ordering::Relaxed) {
                server.turn(Some(Duration::from_millis(20))).unwrap();
                let told = watch.news.borrow_mut().drain(..).map(|it| it.text).collect::<Vec<_>>();
                its_news.lock().unwrap().extend(told);
            }
            let (_unfinished, shard) = server.stop(PATIENCE).unwrap();
            assert!(shard.close(PATIENCE).unwrap());
        });
        let thread = Some(thread);
        Daemon { path, silent_path, gate, stops, news, thread, _dir: dir }
    }

    fn connect(&self, machine: &mut Machine) -> Link {
        machine.connect(&self.path, PATIENCE).unwrap()
    }

    fn told(&self, text: &str) -> bool {
        self.news.lock().unwrap().iter().any(|told| told.contains(text))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

fn shard() -> Shard {
    let device = MemoryDevice::new(64 << 20, 4096).unwrap();
    cache::format(&device, 64 << 20, 512 << 10, 1).unwrap();
    let options = ShardOptions {
        reactor: ReactorKind::Auto,
        config: Config::default(),
        shared: false,
        ..ShardOptions::default()
    };
    Shard::open(Box::new(device), &options).unwrap()
}

fn serve(
    shard: &mut Shard,
    logical_block: u32,
    mode: Mode,
    backing: Box<dyn Device>,
) -> VolumeIndex {
    let volume = shard.free_index().unwrap();
    let new = NewVolume {
        name: format!("disk-{}", volume.0),
        size_bytes: backing.info().size_bytes,
        logical_block,
        mode,
        reserve: Default::default(),
        path: format!("memory {}", volume.0),
        fingerprint: [volume.0; 64],
    };
    shard.add(volume, &new).unwrap();
    shard.serve(volume, backing);
    volume
}

/// The next answer.
fn answer(machine: &mut Machine, queue: usize) -> Done {
    loop {
        if let Some(done) = machine.used(queue).unwrap() {
            return done;
        }
        assert!(machine.wait(queue, PATIENCE), "no answer, no interrupt");
    }
}

/// One request, to its end.
fn ask(machine: &mut Machine, kind: u32, sector: u64, data: Data<'_>) -> Done {
    let slot = machine.free(0)[0];
    machine.offer(0, slot, kind, sector, data);
    let done = answer(machine, 0);
    assert_eq!(done.slot, slot);
    done
}

fn written(machine: &mut Machine, sector: u64, bytes: &[u8]) {
    let done = ask(machine, kind::OUT, sector, Data::Out(bytes));
    assert_eq!((done.status, done.length), (0, 1));
}

fn read(machine: &mut Machine, sector: u64, length: usize) -> Vec<u8> {
    let done = ask(machine, kind::IN, sector, Data::In(length));
    assert_eq!((done.status, done.length), (0, length as u32 + 1));
    done.bytes
}

/// A discard's or write-zeroes' range.
fn range(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..length).map(|_| random.next() as u8 | 1).collect()
}

#[test]
fn every_request_is_done() {
    let daemon = Daemon::start("vhost-all", 512);
    for (features, is_indirect) in [
        (feature::ALL, false),
        (feature::ALL, true),
        (feature::ALL & !feature::EVENT_IDX, true),
        (feature::VERSION_1 | feature::PROTOCOL, false),
    ] {
        let mut machine = Machine::new(1, 64).unwrap();
        (machine.features, machine.is_indirect) = (features, is_indirect);
        let mut link = daemon.connect(&mut machine);
        for (sector, length) in [(0, 4096), (3, 512), (9, 8192), (8, DATA_BYTES), (32_760, 4096)] {
            let bytes = pattern(sector + length as u64, length);
            written(&mut machine, sector, &bytes);
            assert!(read(&mut machine, sector, length) == bytes, "{sector} {length}");
        }
        assert_eq!(ask(&mut machine, kind::FLUSH, 0, Data::Out(&[])).status, 0);
        let id = ask(&mut machine, kind::GET_ID, 0, Data::In(20));
        assert_eq!((id.status, &id.bytes[..6], id.length), (0, &b"a-disk"[..], 21));
        let ranges = [range(8, 1, 1), range(16, 2, 0)].concat();
        assert_eq!(ask(&mut machine, kind::WRITE_ZEROES, 0, Data::Out(&ranges)).status, 0);
        assert_eq!(read(&mut machine, 8, 512), [0; 512]);
        assert!(read(&mut machine, 9, 512).iter().all(|byte| *byte != 0));
        assert_eq!(read(&mut machine, 16, 1024), [0; 1024]);
        assert_eq!(ask(&mut machine, kind::DISCARD, 0, Data::Out(&range(24, 8, 0))).status, 0);
        assert_eq!(read(&mut machine, 24, 4096), [0; 4096]);
        let config = link.config(0, 60).unwrap();
        assert_eq!(config[..8], (SIZE / 512).to_le_bytes());
        assert_eq!((config[32], config[40]), (1, 16));
        drop(link);
    }
}

/// Longer than the engine takes at once, and on no block's edge: in pieces, each copied to its place.
#[test]
fn a_long_request_is_done_in_pieces() {
    let daemon = Daemon::start("vhost-long", 512);
    let mut machine = Machine::new(1, 256).unwrap();
    let _link = daemon.connect(&mut machine);
    let length = (2 << 20) + 300 * 512;
    let data = machine.slot_at(0, 1) + 17;
    let bytes = pattern(5, length);
    machine.memory.write(data, &bytes).unwrap();
    machine.offer_at(0, 0, (kind::OUT, 3), (data, length), false);
    assert_eq!(answer(&mut machine, 0).status, 0);
    for at in [0, 1 << 20, 2 << 20] {
        let there = read(&mut machine, 3 + at as u64 / 512, 8192);
        assert!(there == bytes[at..at + 8192], "at {at}");
    }
    machine.memory.write(data, &vec![0; length]).unwrap();
    machine.offer_at(0, 0, (kind::IN, 3), (data, length), true);
    let done = answer(&mut machine, 0);
    assert_eq!((done.status, done.length), (0, length as u32 + 1));
    let mut back = vec![0; length];
    machine.memory.read(data, &mut back).unwrap();
    assert!(back == bytes);
    // Half of it lies behind the guest's memory.
    let outside = machine.slot_at(0, 63) + 60_000;
    machine.offer_at(0, 0, (kind::IN, 3), (outside, length), true);
    assert_eq!(answer(&mut machine, 0).status, 1);
    machine.offer_at(0, 0, (kind::OUT, 3), (outside, length), false);
    assert_eq!(answer(&mut machine, 0).status, 1);
}

/// More is asked of a device that does not answer than there is memory for. Another machine goes on meanwhile, with long requests
/// and short ones; and in the end every request has its answer.
#[test]
fn a_device_that_does_not_answer_holds_up_no_other_machine() {
    const LONG: usize = 1 << 20;
    const ASKED: u64 = 40;
    let daemon = Daemon::start("vhost-silent", 512);
    daemon.gate.0.store(true, Ordering::Relaxed);
    let mut waits = Machine::new(1, 256).unwrap();
    let _link = waits.connect(&daemon.silent_path, PATIENCE).unwrap();
    for slot in 0..ASKED as u16 {
        let data = waits.slot_at(0, ASKED as u16) + 4096;
        let sector = u64::from(slot) * (LONG as u64 / 512);
        waits.offer_at(0, slot, (kind::IN, sector), (data, LONG), true);
    }
    waits.kick(0);
    let mut machine = Machine::new(1, 256).unwrap();
    let _its_link = daemon.connect(&mut machine);
    let data = machine.slot_at(0, 2) + 17;
    for round in 0..8 {
        let bytes = pattern(round, LONG);
        machine.memory.write(data, &bytes).unwrap();
        machine.offer_at(0, 0, (kind::OUT, 3), (data, LONG), false);
        assert_eq!(answer(&mut machine, 0).status, 0);
        assert!(read(&mut machine, 3 + 8, 8192) == bytes[8 * 512..][..8192]);
    }
    assert!(waits.used(0).unwrap().is_none(), "its device has answered");
    daemon.gate.0.store(false, Ordering::Relaxed);
    for _ in 0..ASKED {
        assert_eq!(answer(&mut waits, 0).status, 0);
    }
}

/// One queue of one machine has as much under way as a disk needs.
#[test]
fn sixteen_mib_are_under_way_at_a_slow_device() {
    const LONG: usize = 1 << 20;
    const ASKED: u16 = 32;
    let daemon = Daemon::start("vhost-slow", 512);
    daemon.gate.0.store(true, Ordering::Relaxed);
    let mut machine = Machine::new(1, 256).unwrap();
    let _link = machine.connect(&daemon.silent_path, PATIENCE).unwrap();
    let data = machine.slot_at(0, ASKED) + 4096;
    let bytes = pattern(1, LONG);
    machine.memory.write(data, &bytes).unwrap();
    for slot in 0..ASKED {
        // Two requests share no block.
        let sector = u64::from(slot) * (LONG as u64 / 512 + 8) + 1;
        machine.offer_at(0, slot, (kind::OUT, sector), (data, LONG), false);
    }
    machine.kick(0);
    let waiting = || daemon.gate.1.load(Ordering::Relaxed);
    wait_for("16 MiB are under way", || waiting() >= 16 << 20);
    daemon.gate.0.store(false, Ordering::Relaxed);
    for _ in 0..ASKED {
        assert_eq!(answer(&mut machine, 0).status, 0);
    }
}

#[test]
fn a_driver_that_begins_anew_is_served_anew() {
    let daemon = Daemon::start("vhost-anew", 512);
    let mut machine = Machine::new(2, 64).unwrap();
    let mut link = daemon.connect(&mut machine);
    for round in 0..5u8 {
        for _ in 0..70 {
            written(&mut machine, 0, &[round; 512]);
        }
        assert_eq!(link.stop_queue(0).unwrap(), 70);
        assert_eq!(link.stop_queue(1).unwrap(), 0);
        machine.reset();
        machine.start(&mut link).unwrap();
    }
    assert_eq!(read(&mut machine, 0, 512), [4; 512]);
}

#[test]
fn what_no_driver_should_ask_for_fails_alone() {
    let daemon = Daemon::start("vhost-bad", 4096);
    let mut machine = Machine::new(1, 64).unwrap();
    let _link = daemon.connect(&mut machine);
    let block = pattern(1, 4096);
    written(&mut machine, 8, &block);
    let status = |machine: &mut Machine, kind, sector, data: Data<'_>| {
        ask(machine, kind, sector, data).status
    };
    assert_eq!(status(&mut machine, kind::OUT, 1, Data::Out(&block)), 1, "not on a block");
    assert_eq!(status(&mut machine, kind::OUT, 8, Data::Out(&block[..512])), 1, "half a block");
    assert_eq!(status(&mut machine, kind::OUT, SIZE / 512, Data::Out(&block)), 1, "past the end");
    assert_eq!(status(&mut machine, kind::IN, u64::MAX, Data::In(4096)), 1, "far past the end");
    assert_eq!(status(&mut machine, kind::IN, 8, Data::Out(&block)), 1, "no room");
    assert_eq!(status(&mut machine, kind::OUT, 8, Data::In(4096)), 1, "nothing to write");
    assert_eq!(status(&mut machine, 77, 0, Data::Out(&[])), 2, "of the future");
    let unmaps = range(8, 8, 1);
    assert_eq!(status(&mut machine, kind::DISCARD, 0, Data::Out(&unmaps)), 2, "unknown flag");
    assert_eq!(status(&mut machine, kind::DISCARD, 0, Data::Out(&unmaps[..15])), 1, "cut");
    assert_eq!(status(&mut machine, kind::GET_ID, 0, Data::In(8)), 1, "no room for the name");
    assert!(read(&mut machine, 8, 4096) == block);
}

/// A broken queue is left alone; another goes on, and the same after it was set up again.
#[test]
fn a_chain_that_cannot_be_understood_breaks_its_queue_alone() {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    let daemon = Daemon::start("vhost-chains", 512);
    // What the first descriptors are, and what is told.
    type Chain<'a> = (&'a [(u64, u32, u16, u16)], &'a str);
    let far = u64::MAX - 3;
    let cases: &[Chain<'_>] = &[
        (&[(0, 16, NEXT, 200)], "a number out of range"),
        (&[(0, 16, NEXT, 0)], "too long, or is a loop"),
        (&[(0, 16, NEXT, 1), (64, 1, WRITE | NEXT, 2), (0, 16, 0, 0)], "bytes to read behind"),
        (&[(0, 16, 0, 0)], "no byte for its status"),
        (&[(0, 0, NEXT, 1), (64, 1, WRITE, 0)], "a descriptor without bytes"),
        (&[(0, u32::MAX, NEXT, 1), (64, u32::MAX, WRITE, 0)], "more than 4 GiB"),
        (&[(0, 17, INDIRECT, 0)], "bad indirect table"),
        (&[(0, 0, INDIRECT, 0)], "bad indirect table"),
        (&[(0, 16 * 1025, INDIRECT, 0)], "bad indirect table"),
        (&[(0, 32, INDIRECT | NEXT, 1)], "bad indirect table"),
        (&[(far, 32, INDIRECT, 1)], "bad indirect table"),
    ];
    for (number, (chain, text)) in cases.iter().enumerate() {
        let mut machine = Machine::new(2, 64).unwrap();
        let mut link = daemon.connect(&mut machine);
        let slot = machine.slot_at(0, 0);
        for (at, it) in chain.iter().enumerate() {
            let address = if it.0 == far { far } else { slot + it.0 };
            machine.put_descriptor(machine.table_at(0), at as u16, (address, it.1, it.2), it.3);
        }
        machine.offer_head(0, 0);
        wait_for(text, || daemon.told(text));
        machine.offer(1, 0, kind::FLUSH, 0, Data::Out(&[]));
        assert_eq!(answer(&mut machine, 1).status, 0, "case {number}: the other queue");
        // As a driver does that resets its device.
        assert_eq!(link.stop_queue(1).unwrap(), 1);
        daemon.news.lock().unwrap().clear();
    }
    let mut machine = Machine::new(1, 64).unwrap();
    let _link = daemon.connect(&mut machine);
    machine.offer_head(0, 64);
    wait_for("a head out of range", || daemon.told("a number out of range"));
}

#[test]
fn a_head_that_is_offered_twice_breaks_the_queue() {
    let daemon = Daemon::start("vhost-twice", 512);
    let mut machine = Machine::new(1, 64).unwrap();
    let _link = daemon.connect(&mut machine);
    let first = machine.free(0)[0];
    machine.offer(0, first, kind::OUT, 0, Data::Out(&[1; 4096]));
    // Until it is answered it is under way; this asks for so much that some are still in.
    for _ in 0..40 {
        machine.offer_head(0, first * 4);
    }
    machine.kick(0);
    wait_for("a broken queue", || {
        daemon.told("is offered again") || daemon.told("more than it has")
    });
}

#[test]
fn many_requests_on_many_queues_are_answered_once_each() {
    const QUEUES: usize = 4;
    let daemon = Daemon::start("vhost-many", 512);
    for event_idx in [true, false] {
        let mut machine = Machine::new(QUEUES as u16, 128).unwrap();
        if !event_idx {
            machine.features &= !feature::EVENT_IDX;
        }
        let _link = daemon.connect(&mut machine);
        let mut random = Random(7);
        let (mut answers, mut waits) = (0, 0);
        // More than 65,536 answers in all: every index wraps around in its queue's turn.
        let (mut offered, all) = ([0u64; QUEUES], 20_000);
        while answers < all * QUEUES as u64 {
            for (queue, offered) in offered.iter_mut().enumerate() {
                for slot in machine.free(queue) {
                    if *offered < all {
                        *offered += 1;
                        let sector = random.below(1000);
                        machine.offer(queue, slot, kind::IN, sector, Data::In(512));
                    }
                }
            }
            for queue in 0..QUEUES {
                let mut had = 0;
                while let Some(done) = machine.used(queue).unwrap() {
                    assert_eq!((done.status, done.length), (0, 513));
                    (answers, had) = (answers + 1, had + 1);
                }
                let is_owed = machine.free(queue).len() < 32;
                if had == 0 && is_owed {
                    waits += 1;
                    assert!(machine.wait(queue, PATIENCE), "queue {queue}: no interrupt came");
                }
            }
        }
        (0..QUEUES).for_each(|queue| machine.take_interrupts(queue));
        let interrupts = machine.interrupts;
        println!(
            "event idx {event_idx}: {answers} answers, {waits} waits, {interrupts} interrupts"
        );
        // With event indexes one for each that was asked for, and for the first answer and the first index of each queue.
        assert!(!event_idx || interrupts <= waits + 2 * QUEUES as u64);
        assert!(interrupts < answers);
    }
}

/// It looks at the used ring until its answer is there, and wants no interrupts: it says so by the index it stopped at, or by a flag.
#[test]
fn a_driver_that_looks_by_itself_is_not_interrupted() {
    const ANSWERS: u64 = 300;
    let daemon = Daemon::start("vhost-looks", 512);
    for event_idx in [true, false] {
        let mut machine = Machine::new(1, 64).unwrap();
        if !event_idx {
            machine.features &= !feature::EVENT_IDX;
            let flags_at = machine.table_at(0) + 64 * 16;
            machine.memory.store(1u16, flags_at, Ordering::Relaxed).unwrap();
        }
        let _link = daemon.connect(&mut machine);
        for _ in 0..ANSWERS {
            machine.offer(0, 0, kind::GET_ID, 0, Data::In(20));
            let begun = Instant::now();
            while machine.used(0).unwrap().is_none() {
                assert!(begun.elapsed() < PATIENCE, "no answer");
                std::thread::yield_now();
            }
        }
        machine.take_interrupts(0);
        // The first answer is told in any case, and now and then one that comes while the driver says how far it has looked.
        let few = ANSWERS / 10;
        assert!(machine.interrupts < few, "event idx {event_idx}: {}", machine.interrupts);
    }
}

/// One queue alone, so that its 16-bit indexes wrap.
#[test]
fn indexes_wrap() {
    let daemon = Daemon::start("vhost-wrap", 512);
    let mut machine = Machine::new(1, 256).unwrap();
    let link = daemon.connect(&mut machine);
    let mut answers = 0u32;
    while answers < 70_000 {
        for slot in machine.free(0) {
            machine.offer(0, slot, kind::GET_ID, 0, Data::In(20));
        }
        let before = answers;
        while machine.used(0).unwrap().is_some() {
            answers += 1;
        }
        if answers == before {
            assert!(machine.wait(0, PATIENCE), "no interrupt after {answers}");
        }
    }
    drop(link);
    // And go on where they are.
    let mut link = daemon.connect(&mut machine);
    while machine.free(0).len() < 64 {
        answer(&mut machine, 0);
    }
    written(&mut machine, 0, &[5; 512]);
    link.stop_queue(0).unwrap();
}

/// Its file was cut short, or its file system is full: the daemon was ended by SIGBUS, and after each restart again, since what is in flight
/// is taken first. No byte of a write that could not be copied whole may reach the volume.
#[test]
fn a_machine_whose_memory_cannot_be_had_ends_alone_and_its_requests_wait() {
    let daemon = Daemon::start("lost", 512);
    let mut other = Machine::new(1, 16).unwrap();
    let _other = other.connect(&daemon.silent_path, PATIENCE).unwrap();
    let mut machine = Machine::new(1, 16).unwrap();
    let mut look = Machine::new(1, 16).unwrap();
    let mut link = daemon.connect(&mut machine);
    let mut holds = pattern(1, 8192);
    written(&mut machine, 8, &holds);
    let data = machine.slot_at(0, 3) + 4096;
    for (round, asked) in (2..).zip([kind::OUT, kind::IN, kind::OUT]) {
        // The first half of it is there.
        machine.cut(Some(data + 4096)).unwrap();
        machine.offer_at(0, 0, (asked, 8), (data, 8192), asked == kind::IN);
        wait_for("its end", || daemon.told("the guest's memory cannot be had"));
        assert!(link.number(request::GET_FEATURES).is_err());
        daemon.news.lock().unwrap().clear();
        assert_eq!(machine.used(0), Ok(None), "nobody has answered");
        written(&mut other, 8, &holds);
        assert!(read(&mut other, 8, 8192) == holds);
        {
            let _looks = daemon.connect(&mut look);
            assert!(read(&mut look, 8, 8192) == holds, "nothing of it is there");
        }
        // What was in flight is done when there is room again.
        wait_for("the place is free", || daemon.told("disconnected"));
        machine.cut(None).unwrap();
        let new = pattern(round, 8192);
        machine.memory.write(data, &new).unwrap();
        link = daemon.connect(&mut machine);
        assert_eq!(answer(&mut machine, 0).status, 0);
        if asked == kind::OUT {
            holds = new;
        } else {
            let mut bytes = vec![0; 8192];
            machine.memory.read(data, &mut bytes).unwrap();
            assert!(bytes == holds);
        }
        assert!(read(&mut machine, 8, 8192) == holds);
        daemon.news.lock().unwrap().clear();
    }
    // Also the queues, of one who asks for nothing.
    machine.cut(Some(machine.table_at(0))).unwrap();
    machine.kick(0);
    wait_for("its end", || daemon.told("the guest's memory cannot be had"));
    assert!(!daemon.told("is left alone"));
    written(&mut other, 8, &holds);
    assert!(read(&mut other, 8, 8192) == holds);
}

#[test]
fn a_second_machine_is_sent_away_and_the_first_goes_on() {
    let daemon = Daemon::start("vhost-second", 512);
    let mut machine = Machine::new(1, 64).unwrap();
    let link = daemon.connect(&mut machine);
    let mut second = Machine::new(1, 64).unwrap();
    assert!(second.connect(&daemon.path, PATIENCE).is_err());
    wait_for("a word of it", || daemon.told("was sent away: another is connected"));
    written(&mut machine, 0, &[3; 512]);
    drop(link);
    let _link = daemon.connect(&mut second);
    assert_eq!(read(&mut second, 0, 512), [3; 512]);
}

/// The guest's choice of a write cache outlives the connection.
#[test]
fn a_write_cache_that_was_given_up_stays_so() {
    let daemon = Daemon::start("vhost-wce", 512);
    let mut machine = Machine::new(1, 64).unwrap();
    let mut link = daemon.connect(&mut machine);
    link.set_writeback(false).unwrap();
    assert_eq!(link.config(32, 1).unwrap(), [0]);
    written(&mut machine, 0, &[3; 512]);
    drop(link);
    let mut link = daemon.connect(&mut machine);
    assert_eq!(link.config(32, 1).unwrap(), [0]);
    link.set_writeback(true).unwrap();
    drop(link);
    assert_eq!(daemon.connect(&mut machine).config(32, 1).unwrap(), [1]);
    // And the start of a driver, with a region that knows nothing of it.
    let mut link = daemon.connect(&mut machine);
    link.set_writeback(false).unwrap();
    link.stop_queue(0).unwrap();
    machine.reset();
    machine.start(&mut link).unwrap();
    drop(link);
    assert_eq!(daemon.connect(&mut machine).config(32, 1).unwrap(), [0]);
    // Another machine has its own.
    let mut other = Machine::new(1, 64).unwrap();
    assert_eq!(daemon.connect(&mut other).config(32, 1).unwrap(), [1]);
}

#[test]
fn bad_words_end_the_connection_and_nothing_else() {
    let daemon = Daemon::start("vhost-words", 512);
    let patience = PATIENCE;
    let cases: &[(u32, &[u8])] = &[
        (99, &[]),
        (request::SET_FEATURES, &[0; 7]),
        (request::SET_FEATURES, &[0xff; 8]),
        (request::SET_VRING_NUM, &[0, 0, 0, 0, 3, 0, 0, 0]),
        (request::SET_VRING_NUM, &[200, 0, 0, 0, 64, 0, 0, 0]),
        (request::SET_VRING_KICK, &[0, 1, 0, 0, 0, 0, 0, 0]),
        (request::SET_MEM_TABLE, &[1, 0, 0, 0, 0, 0, 0, 0]),
        (request::SET_MEM_TABLE, &[0; 8]),
        (request::SET_INFLIGHT_FD, &[0; 24]),
        (request::GET_INFLIGHT_FD, &[0xff; 24]),
        (request::SET_CONFIG, &[0; 13]),
    ];
    for (request, body) in cases {
        let mut link = Link::new(&daemon.path, patience).unwrap();
        link.send(*request, false, body, &[]).unwrap();
        if *request == request::SET_MEM_TABLE && body == &[0; 8] {
            // No memory at all: allowed, and of no use.
            continue;
        }
        assert!(link.answer(*request).is_err(), "{request} {body:?}");
    }
    let mut machine = Machine::new(1, 64).unwrap();
    let _link = daemon.connect(&mut machine);
    written(&mut machine, 0, &[9; 512]);
}
