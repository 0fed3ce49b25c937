// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client and many programs, one after the other: whatever it has said and heard when one leaves it to the next, each request
//! is done once and answered once.

use crate::carried::{Handed, file_header};
use crate::nbd::carried::{Carried, Piece};
use crate::nbd::export::{Agreed, Export, Session};
use crate::nbd::listen::{self, Exports, NbdFrontEnd};
use crate::nbd::wire::{RequestHeader, SimpleReplyHeader, command};
use crate::passage::{Lasting, Passage};
use crate::server::Server;
use crate::shards::shard;
use forebay::io::ReactorKind;
use forebay::shard::Shard;
use forebay_core::units::VolumeIndex;
use forebay_testing::Random;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

pub(in crate::nbd::connection) const SIZE: u64 = 64 << 20;
/// So much of the volume has one request under way at most.
pub(in crate::nbd::connection) const PLACE: u64 = 4 << 20;
pub(in crate::nbd::connection) const LIMIT: Duration = Duration::from_secs(60);

/// What a program has.
pub(in crate::nbd::connection) struct Program {
    server: Server,
    passage: Rc<Passage>,
    lasting: Lasting,
}

impl Program {
    fn new(shard: Shard, index: VolumeIndex) -> Program {
        let exports: Exports = Rc::new(RefCell::new(vec![(export(), index)]));
        let front_end = NbdFrontEnd::new(Vec::new(), exports).unwrap();
        let passage = front_end.passage();
        let mut server = Server::new(shard);
        server.add(Box::new(front_end)).unwrap();
        Program { server, passage, lasting: vec![(index, [9; 16])] }
    }

    pub(in crate::nbd::connection) fn turn(&mut self) {
        self.server.turn(Some(Duration::ZERO)).unwrap();
    }

    /// Waits for something to happen.
    pub(in crate::nbd::connection) fn wait(&mut self) {
        self.server.turn(Some(LIMIT)).unwrap();
    }

    /// Whether a client that says more brings the next turn, or that comes at once.
    pub(in crate::nbd::connection) fn listens(&self) -> bool {
        let shard = &self.server.shard;
        shard.has_answers() || shard.reactor.in_flight() > 0
    }

    /// It ends, and none goes on.
    pub(in crate::nbd::connection) fn stopped(self) {
        let (unfinished, shard) = self.server.stop(LIMIT).unwrap();
        drop((shard, unfinished)); // L1
    }

    /// Another program goes on. Gives how many connections it was left.
    fn upgraded(self) -> (Program, usize) {
        let Program { server, passage, lasting } = self;
        passage.leave(lasting.clone()).unwrap();
        let (_unfinished, shard) = server.stop(LIMIT).unwrap();
        let left = passage.left();
        assert_eq!(passage.told(), [""; 0]);
        let mut next = Program::new(shard, lasting[0].0);
        let count = left.as_ref().map_or(0, |left| left.count);
        next.passage.come(left, lasting.clone());
        // Each turns once, before it is asked for anything.
        next.turn();
        assert_eq!(next.passage.told(), [""; 0]);
        (next, count)
    }
}

fn export() -> Export {
    listen::export("v", SIZE, 512)
}

/// One that has said and heard nothing since its handshake.
pub(in crate::nbd) fn fresh() -> Carried {
    let session = Session::new(0, &export(), Agreed::default());
    Carried {
        volume: [9; 16],
        export_name: "v".into(),
        size_bytes: SIZE,
        logical_block: session.logical_block,
        flags: session.transmission_flags(),
        agreed: Agreed::default(),
        is_closing: false,
        is_over: false,
        skip_bytes: 0,
        long_write: None,
        input: Vec::new(),
        output: Vec::new(),
    }
}

/// A program that was left this connection, and its other end.
fn begun(reactor: ReactorKind, carried: &Carried) -> (Program, UnixStream) {
    let (program, mut theirs) = begun_with(reactor, carried, 1);
    (program, theirs.remove(0))
}

/// The same with several such.
pub(in crate::nbd::connection) fn begun_with(
    reactor: ReactorKind,
    carried: &Carried,
    count: usize,
) -> (Program, Vec<UnixStream>) {
    begun_on(shard(reactor, SIZE), carried, count)
}

/// The same with this volume.
pub(in crate::nbd::connection) fn begun_on(
    (shard, index): (Shard, VolumeIndex),
    carried: &Carried,
    count: usize,
) -> (Program, Vec<UnixStream>) {
    let mut program = Program::new(shard, index);
    let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let mut handed = Handed::new(&file_header::<Carried>()).unwrap();
    let streams = (0..count).map(|_| {
        let (ours, theirs): (OwnedFd, OwnedFd) = socketpair(unix, stream, flags, None).unwrap();
        handed.add(vec![ours], carried).unwrap();
        UnixStream::from(theirs)
    });
    let streams = streams.collect();
    program.passage.come(Some(handed), program.lasting.clone());
    program.turn();
    (program, streams)
}

#[derive(Clone, Copy)]
struct Asked {
    command: u16,
    offset: u64,
    length: u64,
}

/// A client that says things by halves and hears them by halves.
pub(in crate::nbd::connection) struct Client {
    stream: UnixStream,
    random: Random,
    cookie: u64,
    /// To be sent, and what was heard of replies.
    out: Vec<u8>,
    heard: Vec<u8>,
    asked: BTreeMap<u64, Asked>,
    /// What is there.
    volume: Vec<u8>,
    /// The places that it asks for, and whether for most of them.
    pub(in crate::nbd::connection) places: Range<u64>,
    pub(in crate::nbd::connection) is_greedy: bool,
    pub(in crate::nbd::connection) answered: u64,
}

impl Client {
    pub(in crate::nbd::connection) fn new(stream: UnixStream, seed: u64) -> Client {
        let (out, heard, asked) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (random, volume) = (Random(seed), vec![0; SIZE as usize]);
        let (places, is_greedy) = (0..SIZE / PLACE, false);
        Client {
            stream,
            random,
            cookie: 0,
            out,
            heard,
            asked,
            volume,
            places,
            is_greedy,
            answered: 0,
        }
    }

    pub(in crate::nbd::connection) fn ask(&mut self) {
        let Range { start, end } = self.places;
        let place = start + self.random.below(end - start);
        if self.asked.values().any(|it| it.offset / PLACE == place) {
            return;
        }
        let offset = place * PLACE + self.random.below(64) * 512;
        let is_long = self.random.below(3) == 0 || self.is_greedy;
        let most = if is_long { PLACE - (64 << 9) } else { 64 << 10 };
        let length = match self.is_greedy {
            true => most - self.random.below(256) * 512,
            false => (1 + self.random.below(most / 512)) * 512,
        };
        let reads_of_ten = if self.is_greedy { 8 } else { 5 };
        let reads = self.random.below(10) < reads_of_ten;
        let command = if reads { command::READ } else { command::WRITE };
        let cookie = self.cookie;
        self.cookie += 1;
        let header = RequestHeader { flags: 0, command, cookie, offset, length: length as u32 };
        self.out.extend(header.encode());
        if command == command::WRITE {
            let first = self.random.next();
            let content = (0..length / 8).flat_map(|at| (first ^ at << 32).to_le_bytes());
            let from = self.out.len();
            self.out.extend(content);
            let target = &mut self.volume[offset as usize..(offset + length) as usize];
            target.copy_from_slice(&self.out[from..]);
        }
        self.asked.insert(cookie, Asked { command, offset, length });
    }

    /// Sends so many bytes at most.
    pub(in crate::nbd::connection) fn say(&mut self, most: usize) {
        match self.stream.write(&self.out[..self.out.len().min(most)]) {
            Ok(bytes) => drop(self.out.drain(..bytes)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }

    /// Receives so many bytes at most.
    pub(in crate::nbd::connection) fn hear(&mut self, most: usize) {
        let mut bytes = vec![0; most];
        match self.stream.read(&mut bytes) {
            Ok(count) => {
                assert!(count > 0, "the connection goes on");
                self.heard.extend(&bytes[..count]);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        while self.take_reply() {}
    }

    /// All is answered, and nothing else was heard.
    pub(in crate::nbd::connection) fn is_done(&self) -> bool {
        self.asked.is_empty() && self.out.is_empty() && self.heard.is_empty()
    }

    fn take_reply(&mut self) -> bool {
        let Some(header) = SimpleReplyHeader::decode(&self.heard) else { return false };
        let SimpleReplyHeader { cookie, error } = header.expect("a reply begins here");
        let asked = *self.asked.get(&cookie).expect("asked for, and not answered before");
        assert_eq!(error, 0);
        let bytes = if asked.command == command::READ { asked.length as usize } else { 0 };
        let (head, from) = (SimpleReplyHeader::BYTES, asked.offset as usize);
        let Some(found) = self.heard.get(head..head + bytes) else { return false };
        assert!(found == &self.volume[from..from + bytes], "what was written there");
        self.heard.drain(..head + bytes);
        self.asked.remove(&cookie);
        self.answered += 1;
        true
    }
}

/// Upgrades at any moment of what a client says and hears.
pub(in crate::nbd::connection) fn many_upgrades(volume: (Shard, VolumeIndex), seed: u64) {
    let (mut program, mut theirs) = begun_on(volume, &fresh(), 1);
    let mut client = Client::new(theirs.remove(0), seed);
    let mut upgrades = 0;
    for _ in 0..400 {
        match client.random.below(8) {
            0..2 => client.ask(),
            2..4 => {
                let most = [40, 5000, 3 << 20][client.random.below(3) as usize];
                let most = 1 + client.random.below(most) as usize;
                client.say(most);
            }
            4 => {
                let most = [20, 100_000, 4 << 20][client.random.below(3) as usize];
                let most = 1 + client.random.below(most) as usize;
                client.hear(most);
            }
            5..7 => program.turn(),
            _ => {
                let (next, count) = program.upgraded();
                assert_eq!(count, 1, "the connection is left");
                program = next;
                upgrades += 1;
            }
        }
    }
    // Bounded: what is left gets shorter with each round but for what devices take.
    let begun = std::time::Instant::now();
    while !(client.asked.is_empty() && client.out.is_empty()) {
        assert!(begun.elapsed() < LIMIT, "{} are not answered", client.asked.len());
        client.say(1 << 20);
        program.turn();
        client.hear(1 << 20);
    }
    assert!(client.heard.is_empty(), "and nothing else is heard");
    assert!(upgrades > 10 && client.answered > 10, "{upgrades}, {}", client.answered);
}

#[test]
fn each_request_is_done_and_answered_once_whenever_it_is_carried() {
    for seed in 0..8 {
        many_upgrades(shard(ReactorKind::Auto, SIZE), seed);
    }
}

#[test]
fn the_same_without_io_uring() {
    for seed in 100..104 {
        many_upgrades(shard(ReactorKind::Threads, SIZE), seed);
    }
}

/// A reactor that waits for a client to send, or to receive, does not any more when it leaves.
#[test]
fn who_is_waited_for_is_carried_at_once() {
    for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
        let bytes = vec![0; 8 << 20];
        let output = vec![Piece::Aside { at: 512, length: bytes.len() as u64 }];
        let (mut program, mut theirs) = begun(reactor, &Carried { output, ..fresh() });
        for _ in 0..5 {
            // It receives, and its socket is full.
            (0..10).for_each(|_| program.turn());
            let (next, count) = program.upgraded();
            assert_eq!(count, 1);
            program = next;
        }
        let mut found: Vec<u8> = Vec::new();
        let begun = std::time::Instant::now();
        while found.len() < bytes.len() {
            assert!(begun.elapsed() < LIMIT, "{} bytes came", found.len());
            program.turn();
            let mut some = vec![0; 1 << 20];
            if let Ok(count) = theirs.read(&mut some) {
                found.extend(&some[..count]);
            }
        }
        assert!(found == bytes);
    }
}

/// One that has ended and has answers to come hears them from the next program, and then the end. (A send to it is with a
/// thread of the kernel's, which says that it was interrupted.)
#[test]
fn who_has_ended_is_heard_out() {
    let (mut program, mut theirs) = begun(ReactorKind::Auto, &fresh());
    let length = 4 << 20;
    let read = RequestHeader { flags: 0, command: command::READ, cookie: 1, offset: 0, length };
    let end = RequestHeader { command: command::DISCONNECT, length: 0, ..read };
    theirs.write_all(&[read.encode(), end.encode()].concat()).unwrap();
    (0..10).for_each(|_| program.turn());
    let (mut program, count) = program.upgraded();
    assert_eq!(count, 1);
    let (mut found, mut some) = (0, vec![0; 1 << 20]);
    let begun = std::time::Instant::now();
    loop {
        assert!(begun.elapsed() < LIMIT, "{found} bytes came");
        program.turn();
        match theirs.read(&mut some) {
            Ok(0) => break,
            Ok(count) => found += count,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
    assert_eq!(found, SimpleReplyHeader::BYTES + length as usize);
    let (_, count) = program.upgraded();
    assert_eq!(count, 0, "it is gone");
}
