// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One machine and many programs, one after the other: whatever it has offered, said and heard when one leaves it to the next,
//! each request is done once and answered once, on one connection.

use crate::passage::{Lasting, Passage};
use crate::server::Server;
use crate::shards::shard;
use crate::vhost::blk::{Disk, feature};
use crate::vhost::channel::send;
use crate::vhost::driver::{Data, Link, Machine, kind};
use crate::vhost::front_end::{Socket, VhostFrontEnd, Watch};
use crate::vhost::wire::{Header, request};
use forebay::io::ReactorKind;
use forebay::shard::Shard;
use forebay_testing::{Dir, PATIENCE, Random};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

const SIZE: u64 = 64 << 20;
/// What one slot writes to and reads.
const PLACE: u64 = 32 << 10;
const QUEUES: usize = 2;
const QUEUE_SIZE: u16 = 256;

struct Program {
    server: Server,
    watch: Rc<Watch>,
    passage: Rc<Passage>,
    lasting: Lasting,
    listener: UnixListener,
}

impl Program {
    fn start(reactor: ReactorKind, listener: UnixListener) -> Program {
        let (shard, index) = shard(reactor, SIZE);
        Program::new(shard, vec![(index, [9; 16])], listener, false)
    }

    fn new(shard: Shard, lasting: Lasting, listener: UnixListener, expects: bool) -> Program {
        let disk = Disk::new("v", SIZE, 512);
        let its = listener.try_clone().unwrap();
        let socket = Socket { listener: its, volume: lasting[0].0, disk };
        let front_end = VhostFrontEnd::new(vec![socket]).unwrap();
        let (watch, passage) = (front_end.watch(), front_end.passage());
        if expects {
            passage.expect();
        }
        let mut server = Server::new(shard);
        server.add(Box::new(front_end)).unwrap();
        Program { server, watch, passage, lasting, listener }
    }

    fn turn(&mut self) {
        self.server.turn(Some(Duration::from_micros(200))).unwrap();
    }

    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Program) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < PATIENCE, "{what}");
            self.turn();
        }
    }

    fn told(&self, text: &str) -> bool {
        self.watch.news.borrow().iter().any(|news| news.text.contains(text))
    }

    /// Somebody else does something that waits for us.
    fn while_turning<T: Send>(&mut self, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let acting = scope.spawn(act);
            while !acting.is_finished() {
                self.turn();
            }
            acting.join().unwrap()
        })
    }

    /// Another program goes on, to which so many are left. It turns before they come, and once behind that.
    fn upgraded(self, count: usize) -> Program {
        let next = self.left_to_next(count);
        assert_eq!(next.watch.is_connected.borrow()[0], count == 1);
        next
    }

    fn left_to_next(self, count: usize) -> Program {
        let Program { server, passage, lasting, listener, .. } = self;
        passage.leave(lasting.clone()).unwrap();
        let (_unfinished, shard) = server.stop(PATIENCE).unwrap();
        let left = passage.left();
        assert_eq!(passage.told(), [""; 0]);
        assert_eq!(left.as_ref().map_or(0, |left| left.count), count);
        let mut next = Program::new(shard, lasting.clone(), listener, true);
        next.turn();
        next.passage.come(left, lasting);
        next.turn();
        assert_eq!(next.passage.told(), [""; 0]);
        next
    }
}

/// A machine, and what its disk holds.
struct Guest {
    machine: Machine,
    random: Random,
    /// By queue and slot: what a write will have put there, or `None` for a read.
    asked: BTreeMap<(usize, u16), Option<u8>>,
    holds: BTreeMap<(usize, u16), u8>,
    answered: u64,
}

impl Guest {
    fn new(seed: u64) -> Guest {
        let mut machine = Machine::new(QUEUES as u16, QUEUE_SIZE).unwrap();
        machine.is_indirect = seed.is_multiple_of(2);
        if seed % 4 >= 2 {
            machine.features &= !feature::EVENT_IDX;
        }
        let (asked, holds) = (BTreeMap::new(), BTreeMap::new());
        Guest { machine, random: Random(seed), asked, holds, answered: 0 }
    }

    fn connect(&mut self, program: &mut Program, path: &Path) -> Link {
        program.while_turning(|| self.machine.connect(path, PATIENCE).unwrap())
    }

    fn offer(&mut self, most: u64) {
        for queue in 0..QUEUES {
            let free = self.machine.free(queue);
            let count = self.random.below(most.min(free.len() as u64) + 1);
            for slot in free.into_iter().take(count as usize) {
                self.offer_one(queue, slot);
            }
        }
    }

    fn offer_one(&mut self, queue: usize, slot: u16) {
        let place = queue as u64 * 64 + u64::from(slot);
        let sector = place * PLACE / 512;
        let asked = match self.random.below(8) {
            0..5 => {
                let byte = self.random.next() as u8 | 1;
                let bytes = [byte; PLACE as usize];
                self.machine.offer(queue, slot, kind::OUT, sector, Data::Out(&bytes));
                Some(byte)
            }
            5 => {
                let count = (PLACE as u32 / 512).to_le_bytes();
                let range = [&sector.to_le_bytes()[..], &count, &[0; 4]].concat();
                self.machine.offer(queue, slot, kind::WRITE_ZEROES, 0, Data::Out(&range));
                Some(0)
            }
            _ => {
                self.machine.offer(queue, slot, kind::IN, sector, Data::In(PLACE as usize));
                None
            }
        };
        assert!(self.asked.insert((queue, slot), asked).is_none());
    }

    fn collect(&mut self) {
        for queue in 0..QUEUES {
            while let Some(done) = self.machine.used(queue).unwrap() {
                let place = (queue, done.slot);
                assert_eq!(done.status, 0);
                self.answered += 1;
                match self.asked.remove(&place).expect("answered once") {
                    Some(byte) => drop(self.holds.insert(place, byte)),
                    None => {
                        let holds = self.holds.get(&place).copied().unwrap_or(0);
                        assert!(done.bytes.iter().all(|byte| *byte == holds), "{place:?}");
                    }
                }
            }
        }
    }

    fn finish(&mut self, program: &mut Program) {
        program.until("all is answered", |_| {
            self.collect();
            self.asked.is_empty()
        });
    }

    /// All of it is read again.
    fn compare(&mut self, program: &mut Program) {
        self.finish(program);
        for queue in 0..QUEUES {
            for slot in self.machine.free(queue) {
                let sector = (queue as u64 * 64 + u64::from(slot)) * PLACE / 512;
                self.machine.offer(queue, slot, kind::IN, sector, Data::In(PLACE as usize));
                self.asked.insert((queue, slot), None);
            }
        }
        self.finish(program);
    }
}

fn place(name: &str) -> (Dir, PathBuf, UnixListener) {
    let dir = Dir::new(std::env::temp_dir(), name);
    let path = dir.0.join("vm");
    let listener = UnixListener::bind(&path).unwrap();
    (dir, path, listener)
}

const REACTORS: [ReactorKind; 2] = [ReactorKind::Auto, ReactorKind::Threads];

#[test]
fn whatever_is_under_way_is_done_once_and_answered_once() {
    let (mut answers, mut left, mut waited) = (0, 0, 0);
    for seed in 0..16 {
        let (_dir, path, listener) = place("fb-carry");
        let mut program = Program::start(REACTORS[seed as usize % 2], listener);
        let mut guest = Guest::new(seed);
        let mut link = guest.connect(&mut program, &path);
        for _ in 0..12 {
            for _ in 0..guest.random.below(6) {
                guest.offer(64);
                program.turn();
                guest.collect();
            }
            // Nobody has looked at these.
            guest.offer(64);
            left += guest.asked.len();
            program = program.upgraded(1);
            guest.collect();
            waited += guest.asked.len();
        }
        // It takes interrupts as before.
        guest.finish(&mut program);
        guest.offer_one(1, 0);
        let Guest { machine, .. } = &mut guest;
        assert!(program.while_turning(|| machine.wait(1, PATIENCE)));
        guest.compare(&mut program);
        let config = program.while_turning(|| link.config(0, 8).unwrap());
        assert_eq!(config, (SIZE / 512).to_le_bytes());
        assert!(!program.told("disconnected") && !program.told("is connected"));
        answers += guest.answered;
    }
    println!("{answers} answers, {left} under way when a program left, {waited} taken by the next");
    assert!(left > 1000 && waited > 100);
}

/// A message of which a part came, with its descriptor or without, is obeyed once when it is whole.
#[test]
fn a_message_in_halves_is_heard_as_one() {
    let body = 0u64.to_le_bytes();
    let header = Header { request: request::SET_VRING_CALL, needs_reply: true, size: 8 };
    let message = [&header.encode()[..], &body].concat();
    for cut in 1..message.len() {
        let (_dir, path, listener) = place("fb-carry-halves");
        let mut program = Program::start(ReactorKind::Auto, listener);
        let mut guest = Guest::new(1);
        let mut link = guest.connect(&mut program, &path);
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        send(link.socket.as_fd(), &message[..cut], Some(call.as_fd())).unwrap();
        if cut % 3 > 0 {
            program.turn();
            program.turn();
        }
        program = program.upgraded(1).upgraded(1);
        send(link.socket.as_fd(), &message[cut..], None).unwrap();
        let (told, _) = program.while_turning(|| link.answer(request::SET_VRING_CALL).unwrap());
        assert_eq!(told, [0; 8], "acknowledged");
        // The one that was given is used from now on.
        assert!(rustix::io::read(&call, &mut [0; 8]).is_ok(), "cut at {cut}");
        guest.offer_one(0, 0);
        guest.finish(&mut program);
        program.until("an interrupt", |_| rustix::io::read(&call, &mut [0; 8]).is_ok());
        guest.compare(&mut program);
    }
}

/// It waits for requests under way, and so does the program that leaves.
#[test]
fn a_message_that_waits_for_rest_is_obeyed_by_the_next() {
    for turns in 0..4 {
        let (_dir, path, listener) = place("fb-carry-rest");
        let mut program = Program::start(ReactorKind::Auto, listener);
        let mut guest = Guest::new(3);
        let mut link = guest.connect(&mut program, &path);
        guest.compare(&mut program);
        guest.offer(64);
        program.turn();
        let state = [0; 8];
        link.send(request::GET_VRING_BASE, false, &state, &[]).unwrap();
        (0..turns).for_each(|_| program.turn());
        program = program.upgraded(1);
        let (body, _) = program.while_turning(|| link.answer(request::GET_VRING_BASE).unwrap());
        guest.collect();
        let taken = guest.machine.next_used(0);
        assert_eq!(body[4..6], taken.to_le_bytes(), "what was taken was given back");
        // As a driver that begins anew.
        program.while_turning(|| link.stop_queue(1).unwrap());
        guest.collect();
        guest.machine.reset();
        guest.asked.clear();
        guest.holds.clear();
        program = program.upgraded(1);
        let machine = &mut guest.machine;
        program.while_turning(|| machine.start(&mut link).unwrap());
        for slot in guest.machine.free(0) {
            let sector = u64::from(slot) * PLACE / 512;
            let bytes = [7; PLACE as usize];
            guest.machine.offer(0, slot, kind::OUT, sector, Data::Out(&bytes));
            guest.asked.insert((0, slot), Some(7));
        }
        program = program.upgraded(1);
        guest.finish(&mut program);
    }
}

/// At every step of its way in, and before it has said anything.
#[test]
fn whoever_has_agreed_on_little_goes_on_as_well() {
    let (_dir, path, listener) = place("fb-carry-little");
    let mut program = Program::start(ReactorKind::Auto, listener);
    let mut link = Link::new(&path, PATIENCE).unwrap();
    // Nobody has taken it in.
    program = program.upgraded(0);
    program.until("it is taken in", |it| it.told("is connected"));
    program = program.upgraded(1);
    let mut guest = Guest::new(4);
    let machine = &guest.machine;
    program.while_turning(|| machine.agree(&mut link).unwrap());
    program = program.upgraded(1);
    let machine = &mut guest.machine;
    program.while_turning(|| machine.prepare(&mut link).unwrap());
    guest.offer(64);
    program.turn();
    program = program.upgraded(1);
    (0..5).for_each(|_| program.turn());
    assert_eq!(guest.machine.used(0), Ok(None), "it is not enabled yet");
    let machine = &guest.machine;
    program.while_turning(|| machine.enable(&mut link).unwrap());
    guest.compare(&mut program);
}

/// What a connection that ended left in flight goes along twice: noted in the region, and known to the program.
#[test]
fn what_an_earlier_connection_had_in_flight_is_still_the_first() {
    for upgrades in 0..3 {
        let (_dir, path, listener) = place("fb-carry-left");
        let mut program = Program::start(ReactorKind::Auto, listener);
        let mut guest = Guest::new(4);
        let link = guest.connect(&mut program, &path);
        guest.compare(&mut program);
        // Reads of what is not in the cache are under way when the connection ends.
        for slot in guest.machine.free(0) {
            guest.machine.offer(0, slot, kind::IN, u64::from(slot) * PLACE / 512, Data::In(512));
            guest.asked.insert((0, slot), None);
        }
        program.turn();
        drop(link);
        program.until("the end is heard", |it| !it.watch.is_connected.borrow()[0]);
        guest.collect();
        let in_flight = guest.asked.len();
        assert!(in_flight > 0, "all was answered before the end");
        let mut link = Link::new(&path, PATIENCE).unwrap();
        let machine = &mut guest.machine;
        program.while_turning(|| {
            machine.agree(&mut link).unwrap();
            machine.prepare(&mut link).unwrap();
        });
        for _ in 0..upgrades {
            program = program.upgraded(1);
        }
        assert_eq!(guest.machine.used(0), Ok(None), "it is not enabled yet");
        let machine = &guest.machine;
        program.while_turning(|| machine.enable(&mut link).unwrap());
        guest.compare(&mut program);
    }
}

#[test]
fn a_queue_that_is_left_alone_stays_so_until_its_driver_begins_anew() {
    let (_dir, path, listener) = place("fb-carry-broken");
    let mut program = Program::start(ReactorKind::Auto, listener);
    let mut guest = Guest::new(4);
    let mut link = guest.connect(&mut program, &path);
    guest.machine.offer_head(0, 9999);
    program.until("a broken queue", |it| it.told("queue 0 is left alone"));
    program = program.upgraded(1);
    guest.machine.offer(0, 0, kind::FLUSH, 0, Data::Out(&[]));
    guest.machine.kick(0);
    guest.offer_one(1, 0);
    guest.finish(&mut program);
    (0..5).for_each(|_| program.turn());
    assert_eq!(guest.machine.used(0), Ok(None));
    program = program.upgraded(1);
    for queue in 0..QUEUES {
        program.while_turning(|| link.stop_queue(queue).unwrap());
    }
    guest.machine.reset();
    let machine = &mut guest.machine;
    program.while_turning(|| machine.start(&mut link).unwrap());
    guest.compare(&mut program);
}

/// F2: whoever comes meanwhile does not get its place, and whose end comes meanwhile gives it up.
#[test]
fn its_place_is_its_own_until_it_ends() {
    let (_dir, path, listener) = place("fb-carry-place");
    let mut program = Program::start(ReactorKind::Auto, listener);
    let mut guest = Guest::new(4);
    let link = guest.connect(&mut program, &path);
    let passage = Rc::clone(&program.passage);
    passage.leave(program.lasting.clone()).unwrap();
    let Program { server, lasting, listener, .. } = program;
    let (_unfinished, shard) = server.stop(PATIENCE).unwrap();
    let mut other = Link::new(&path, PATIENCE).unwrap();
    let mut program = Program::new(shard, lasting.clone(), listener, true);
    (0..5).for_each(|_| program.turn());
    assert!(!program.told("is connected"));
    program.passage.come(passage.left(), lasting);
    program.until("a word of it", |it| it.told("was sent away: another is connected"));
    assert!(other.number(request::GET_FEATURES).is_err());
    guest.offer(64);
    guest.compare(&mut program);
    // It ends, and the next program hears of it: another may have its place.
    drop(link);
    program = program.left_to_next(1);
    program.until("its end", |it| it.told("disconnected"));
    let _link = guest.connect(&mut program, &path);
    guest.compare(&mut program);
}

/// What is served now is not what it was told of: it is closed, and that is told.
#[test]
fn who_cannot_be_taken_is_closed_and_that_is_said() {
    type Change = fn(&mut Lasting, &mut String);
    let cases: [(Change, &str); 2] = [
        (|lasting, _| lasting[0].1 = [8; 16], "the volume is not served any more"),
        (|_, path| path.push('2'), "its socket is not listened on any more"),
    ];
    for (change, why) in cases {
        let (dir, path, listener) = place("fb-carry-closed");
        let mut program = Program::start(ReactorKind::Auto, listener);
        let mut guest = Guest::new(4);
        let mut link = guest.connect(&mut program, &path);
        guest.offer(64);
        let Program { server, passage, lasting, .. } = program;
        passage.leave(lasting.clone()).unwrap();
        let (_unfinished, shard) = server.stop(PATIENCE).unwrap();
        let left = passage.left();
        let (mut lasting, mut name) = (lasting, "vm".to_owned());
        change(&mut lasting, &mut name);
        let path = dir.0.join(name);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let mut program = Program::new(shard, lasting.clone(), listener, true);
        program.passage.come(left, lasting);
        program.turn();
        let told = program.passage.told();
        assert!(told.len() == 1 && told[0].contains(why), "{told:?}");
        assert!(program.while_turning(|| link.number(request::GET_FEATURES)).is_err());
        // It connects again, as after a kill.
        let _link = guest.connect(&mut program, &path);
        guest.compare(&mut program);
    }
}
