// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes that wait for a backing device.

use super::*;
use crate::nbd::connection::carry::tests::{LIMIT, Program, SIZE, begun_on, fresh, many_upgrades};
use crate::nbd::wire::{SimpleReplyHeader, command};
use crate::shards::{Gate, empty, serve};
use forebay::io::{Device, MemoryDevice, ReactorKind, Throttle, ThrottleDevice, ThrottleLimits};
use forebay::shard::Shard;
use forebay_core::format::superblock::Mode;
use forebay_core::units::VolumeIndex;
use forebay_testing::Random;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A volume whose writes are answered when its device has them.
fn around(reactor: ReactorKind, backing: Box<dyn Device>) -> (Shard, VolumeIndex) {
    of(Mode::WriteAround, reactor, backing)
}

fn of(mode: Mode, reactor: ReactorKind, backing: Box<dyn Device>) -> (Shard, VolumeIndex) {
    let mut shard = empty(reactor);
    let index = serve(&mut shard, mode, backing);
    (shard, index)
}

fn gated(reactor: ReactorKind, count: usize) -> (Gate, Program, Vec<UnixStream>) {
    gated_of(Mode::WriteAround, reactor, count)
}

fn gated_of(mode: Mode, reactor: ReactorKind, count: usize) -> (Gate, Program, Vec<UnixStream>) {
    let gate = Gate::default();
    let (program, streams) = begun_on(of(mode, reactor, gate.device(SIZE)), &fresh(), count);
    (gate, program, streams)
}

fn header(command: u16, cookie: u64, offset: u64, length: u64) -> [u8; RequestHeader::BYTES] {
    let length = length as u32;
    RequestHeader { flags: 0, command, cookie, offset, length }.encode()
}

fn content() -> Vec<u8> {
    let mut random = Random(5);
    (0..SIZE / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

/// Writes of so many bytes each, from an offset on.
fn writes(content: &[u8], from: u64, each: u64, count: u64) -> Vec<u8> {
    let one = |at: u64| {
        let offset = from + at * each;
        let bytes = &content[offset as usize..(offset + each) as usize];
        [&header(command::WRITE, at, offset, each)[..], bytes].concat()
    };
    (0..count).flat_map(one).collect()
}

/// Says what the program takes.
fn say(stream: &mut UnixStream, bytes: &mut &[u8]) {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => *bytes = &bytes[count..],
            Err(error) => return assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
}

/// Turns and says until the program takes no more. It listens (N4) until so many bytes are left.
fn say_all(program: &mut Program, stream: &mut UnixStream, bytes: &mut &[u8], left: u64) {
    let mut idle = 0;
    while idle < 50 {
        let before = bytes.len();
        say(stream, bytes);
        program.turn();
        assert!(program.listens() || bytes.len() as u64 <= left, "{} are left", bytes.len());
        idle = if bytes.len() < before { 0 } else { idle + 1 };
    }
}

/// Turns, and says the rest, until so many bytes came.
fn hear(program: &mut Program, stream: &mut UnixStream, rest: &mut &[u8], bytes: u64) -> Vec<u8> {
    let (mut heard, mut some) = (Vec::new(), vec![0; 1 << 20]);
    let begun = Instant::now();
    while (heard.len() as u64) < bytes {
        assert!(begun.elapsed() < LIMIT, "{} of {bytes} bytes came", heard.len());
        say(stream, rest);
        program.turn();
        let most = some.len().min(bytes as usize - heard.len());
        match stream.read(&mut some[..most]) {
            Ok(0) => panic!("the connection goes on"),
            Ok(count) => heard.extend(&some[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
    heard
}

/// Each of so many writes is answered, once.
fn hear_answers(program: &mut Program, stream: &mut UnixStream, rest: &mut &[u8], count: u64) {
    let heard = hear(program, stream, rest, count * SimpleReplyHeader::BYTES as u64);
    let answers = heard.chunks(SimpleReplyHeader::BYTES);
    let answers = answers.map(|bytes| SimpleReplyHeader::decode(bytes).unwrap().unwrap());
    let mut cookies: Vec<u64> =
        answers.inspect(|it| assert_eq!(it.error, 0)).map(|it| it.cookie).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..count).collect::<Vec<u64>>());
}

fn is_there(program: &mut Program, stream: &mut UnixStream, offset: u64, content: &[u8]) {
    let length = content.len() as u64;
    let mut asked = &header(command::READ, 1, offset, length)[..];
    let heard = hear(program, stream, &mut asked, SimpleReplyHeader::BYTES as u64 + length);
    assert!(
        heard[..SimpleReplyHeader::BYTES] == SimpleReplyHeader { error: 0, cookie: 1 }.encode()
    );
    assert!(heard[SimpleReplyHeader::BYTES..] == *content);
}

/// What was received and not answered by the device was all that one connection could have under way: 1.2 MiB, half of what a disk
/// without a write cache needs to be written at its rate.
#[test]
fn more_is_under_way_than_a_connection_has_input() {
    let content = content();
    for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
        for (each, count) in
            [(16 * MIB, 1), (MIB, 16), (256 << 10, 64), (64 << 10, 256), (MIB + 4096, 15)]
        {
            let (gate, mut program, mut streams) = gated(reactor, 1);
            let all = writes(&content, 0, each, count);
            for _ in 0..3 {
                let mut rest = &all[..];
                say_all(&mut program, &mut streams[0], &mut rest, each * count - 8 * MIB);
                let waiting = gate.waiting();
                assert!(waiting >= 8 * MIB, "{count} of {each}: {waiting} bytes are under way");
                gate.open(true);
                hear_answers(&mut program, &mut streams[0], &mut rest, count);
                gate.open(false);
            }
            let written = &content[..(each * count) as usize];
            is_there(&mut program, &mut streams[0], 0, written);
        }
    }
}

/// Its pieces ended within blocks, so each waited until the one before it was done: 256 KiB were under way.
#[test]
fn a_long_write_that_begins_within_a_block_is_all_under_way() {
    let content = content();
    for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
        for (from, each) in [(512, 16 * MIB), (3584, 9 * MIB + 512), (1024, 8 * MIB + 3072)] {
            let (gate, mut program, mut streams) = gated(reactor, 1);
            let all = writes(&content, from, each, 1);
            let mut rest = &all[..];
            say_all(&mut program, &mut streams[0], &mut rest, each - 8 * MIB);
            let waiting = gate.waiting();
            assert!(waiting >= 8 * MIB, "{each} at {from}: {waiting} bytes are under way");
            gate.open(true);
            hear_answers(&mut program, &mut streams[0], &mut rest, 1);
            let written = from as usize..(from + each) as usize;
            is_there(&mut program, &mut streams[0], from, &content[written]);
        }
    }
}

/// Writes of two clients meet within blocks, and one of the clients ends within his: of a long write the pieces that came whole are there, in whole
/// blocks; of a short one nothing is. What the other wrote beside them stays.
#[test]
fn who_ends_within_writes_that_share_blocks_with_others_leaves_whole_pieces() {
    const FROM: u64 = 20 * MIB + 512;
    const LENGTH: u64 = 5 * MIB + 1024;
    const SHORT: u64 = 40 * MIB + 512;
    let content = content();
    for (mode, reactor) in [
        (Mode::WriteAround, ReactorKind::Auto),
        (Mode::WriteThrough, ReactorKind::Auto),
        (Mode::WriteBack, ReactorKind::Auto),
        (Mode::WriteBack, ReactorKind::Threads),
    ] {
        let (gate, mut program, mut streams) = gated_of(mode, reactor, 3);
        let (mut stays, mut ends) = (streams.remove(0), streams);
        let beside = [(FROM - 2 * MIB - 512, 2 * MIB + 512), (FROM + LENGTH, 3 * MIB - 512)];
        let mut cut = [writes(&content, FROM, LENGTH, 1), writes(&content, SHORT, MIB, 1)];
        for (stream, bytes) in std::iter::zip(&mut ends, &mut cut) {
            bytes.truncate(bytes.len() - 100);
            say_all(&mut program, stream, &mut &bytes[..], 0);
        }
        let all = beside.map(|(from, each)| writes(&content, from, each, 1));
        for bytes in &all {
            say_all(&mut program, &mut stays, &mut &bytes[..], 0);
        }
        drop(ends);
        (0..50).for_each(|_| program.turn());
        gate.open(true);
        hear(&mut program, &mut stays, &mut &[][..], 2 * SimpleReplyHeader::BYTES as u64);
        // The last piece begins with a block.
        let end = (FROM + LENGTH - 100) / BLOCK_BYTES * BLOCK_BYTES;
        let mut wanted = vec![0; SIZE as usize];
        let pieces = (FROM + LENGTH - FROM / BLOCK_BYTES * BLOCK_BYTES - 1) / (256 << 10);
        let came = FROM / BLOCK_BYTES * BLOCK_BYTES + pieces * (256 << 10);
        assert!(came <= end && came > FROM + 4 * MIB);
        for (from, length) in beside.into_iter().chain([(FROM, came - FROM)]) {
            let range = from as usize..(from + length) as usize;
            wanted[range.clone()].copy_from_slice(&content[range]);
        }
        for (from, length) in [(FROM - 3 * MIB, LENGTH + 8 * MIB), (SHORT - 512, MIB + 4096)] {
            let wanted = &wanted[from as usize..(from + length) as usize];
            is_there(&mut program, &mut stays, from, wanted);
        }
    }
}

/// A stop, or the client's end of its side, comes in the middle of a long write whose first pieces are at the device: the client was told
/// that its disk has an error. It finds that the connection has ended.
#[test]
fn a_long_write_that_never_came_whole_is_not_answered() {
    let content = content();
    for (is_stop, reactor) in [
        (false, ReactorKind::Auto),
        (true, ReactorKind::Auto),
        (false, ReactorKind::Threads),
        (true, ReactorKind::Threads),
    ] {
        let (gate, mut program, mut streams) = gated(reactor, 1);
        let all = writes(&content, 0, 4 * MIB, 1);
        let mut rest = &all[..all.len() - MIB as usize];
        say_all(&mut program, &mut streams[0], &mut rest, 0);
        assert!(rest.is_empty() && gate.waiting() >= 2 * MIB);
        let mut heard = Vec::new();
        if is_stop {
            let opens = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                gate.open(true);
            });
            program.stopped();
            opens.join().unwrap();
            streams[0].read_to_end(&mut heard).unwrap();
        } else {
            streams[0].shutdown(Shutdown::Write).unwrap();
            (0..50).for_each(|_| program.turn());
            gate.open(true);
            let begun = Instant::now();
            while let Err(error) = streams[0].read_to_end(&mut heard) {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                assert!(begun.elapsed() < LIMIT);
                program.turn();
            }
        }
        assert_eq!(heard, [0; 0], "stop: {is_stop}, {reactor:?}");
    }
}

/// What had come of its last piece was taken for commands once the pieces before it were at the device: whoever may write to a file of a
/// guest could so have anything done to its disk.
#[test]
fn what_came_of_a_broken_off_write_is_no_command() {
    const ELSEWHERE: u64 = 40 * MIB;
    for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
        let (gate, mut program, mut streams) = gated(reactor, 2);
        let mut content = content();
        let hidden = [&header(command::WRITE, 7, ELSEWHERE, 4096)[..], &[7; 4096]].concat();
        content[MIB as usize..][..hidden.len()].copy_from_slice(&hidden);
        let all = writes(&content, 0, 4 * MIB, 1);
        let mut some = &all[..RequestHeader::BYTES + MIB as usize + hidden.len()];
        let mut ends = streams.remove(0);
        say_all(&mut program, &mut ends, &mut some, 0);
        assert!(some.is_empty() && gate.waiting() == MIB, "{} bytes", gate.waiting());
        drop(ends);
        (0..50).for_each(|_| program.turn());
        gate.open(true);
        is_there(&mut program, &mut streams[0], 0, &content[..MIB as usize]);
        is_there(&mut program, &mut streams[0], ELSEWHERE, &[0; 4096]);
    }
}

/// I2: a client stops in the middle of a payload, or of a header, while the device has what came before, and the connection is in a
/// shared buffer, or has as many as it may. When the device has answered, another may read as much as there is memory for.
#[test]
fn who_stops_in_the_middle_has_nothing_of_the_shared_memory() {
    let content = content();
    for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
        for (each, count) in [(12 * MIB, 1), (MIB, 12)] {
            for missing in [100, MIB + 20, 7 * MIB + 100, 9 * MIB + 3 * 28 + 20] {
                let (gate, mut program, mut streams) = gated(reactor, 2);
                let (mut other, mut stalled) = (streams.remove(0), streams.remove(0));
                let all = writes(&content, 0, each, count);
                let mut rest = &all[..all.len() - missing as usize];
                let is_all = missing > 4 * MIB;
                say_all(&mut program, &mut stalled, &mut rest, 4 * MIB);
                assert_eq!(rest.is_empty(), is_all);
                assert!(gate.waiting() > if is_all { 11 * MIB - missing } else { 8 * MIB });
                gate.open(true);
                say_all(&mut program, &mut stalled, &mut rest, 0);
                assert!(rest.is_empty());
                let mut asked = &header(command::READ, 1, 0, 32 * MIB)[..];
                let bytes = 32 * MIB + SimpleReplyHeader::BYTES as u64;
                hear(&mut program, &mut other, &mut asked, bytes);
                let mut rest = &all[all.len() - missing as usize..];
                hear_answers(&mut program, &mut stalled, &mut rest, count);
                is_there(&mut program, &mut other, 0, &content[..(each * count) as usize]);
            }
        }
    }
}

/// Several have more to write than there is memory for, and somebody has half of that, or nearly all, for what he does not
/// receive. Nothing is lost, nobody waits for ever.
#[test]
fn where_there_is_no_memory_writes_wait_for_those_before() {
    const COUNT: u64 = 5;
    let content = content();
    let each = SIZE / COUNT / MIB * MIB;
    for deaf_bytes in [0, 16 * MIB, 32 * MIB] {
        let (gate, mut program, mut streams) = gated(ReactorKind::Auto, 1 + COUNT as usize);
        let mut deaf = streams.remove(0);
        if deaf_bytes > 0 {
            deaf.write_all(&header(command::READ, 9, 0, deaf_bytes)).unwrap();
            (0..50).for_each(|_| program.turn());
        }
        let all: Vec<Vec<u8>> =
            (0..COUNT).map(|at| writes(&content, at * each, MIB, each / MIB)).collect();
        let mut rests: Vec<&[u8]> = all.iter().map(|all| &all[..]).collect();
        for (stream, rest) in streams.iter_mut().zip(&mut rests) {
            say_all(&mut program, stream, rest, u64::MAX);
        }
        let waiting = gate.waiting();
        assert!(waiting >= COUNT * MIB, "{waiting} bytes are under way");
        gate.open(true);
        for (stream, rest) in streams.iter_mut().zip(&mut rests) {
            hear_answers(&mut program, stream, rest, each / MIB);
        }
        is_there(&mut program, &mut streams[0], 0, &content[..(16 * MIB) as usize]);
        let (half, rest) = ((each * COUNT / 2) as usize, (each * COUNT) as usize);
        is_there(&mut program, &mut streams[1], 0, &content[..half]);
        is_there(&mut program, &mut streams[2], half as u64, &content[half..rest]);
        if deaf_bytes > 0 {
            hear(
                &mut program,
                &mut deaf,
                &mut &[][..],
                deaf_bytes + SimpleReplyHeader::BYTES as u64,
            );
        }
    }
}

/// Upgrades and halves of requests, on a device that takes its time.
#[test]
fn each_request_is_done_and_answered_once_on_a_slow_device() {
    for (reactor, seed) in
        [(ReactorKind::Auto, 1), (ReactorKind::Auto, 2), (ReactorKind::Threads, 3)]
    {
        let limits = ThrottleLimits {
            bytes_per_second: 200 << 20,
            latency: Duration::from_millis(2),
            ..ThrottleLimits::default()
        };
        let below = Box::new(MemoryDevice::new(SIZE, 512).unwrap());
        let slow = ThrottleDevice::new(below, Throttle::new(limits));
        many_upgrades(around(reactor, Box::new(slow)), seed);
    }
}
