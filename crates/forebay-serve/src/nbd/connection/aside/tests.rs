// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients who ask for more than there is memory for, and who receive late, slowly, or not at all.

use super::MARK;
use crate::nbd::connection::carry::tests::{
    Client, LIMIT, PLACE, Program, SIZE, begun_with, fresh,
};
use crate::nbd::wire::{RequestHeader, SimpleReplyHeader, command};
use forebay::io::ReactorKind;
use forebay_testing::Random;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

fn read(cookie: u64, offset: u64, length: u64) -> [u8; RequestHeader::BYTES] {
    let length = length as u32;
    RequestHeader { flags: 0, command: command::READ, cookie, offset, length }.encode()
}

/// Takes what is there, up to so many bytes.
fn take(stream: &mut UnixStream, most: usize, heard: &mut Vec<u8>) {
    let mut bytes = vec![0; most];
    match stream.read(&mut bytes) {
        Ok(0) => panic!("the connection goes on"),
        Ok(count) => heard.extend(&bytes[..count]),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
    }
}

/// Turns, and takes, until the client has all the bytes.
fn hear_out(program: &mut Program, stream: &mut UnixStream, bytes: u64, heard: &mut Vec<u8>) {
    let begun = Instant::now();
    while (heard.len() as u64) < bytes {
        assert!(begun.elapsed() < LIMIT, "{} of {bytes} bytes came", heard.len());
        program.turn();
        take(stream, (bytes as usize - heard.len()).min(1 << 20), heard);
    }
}

fn content() -> Vec<u8> {
    let mut random = Random(12);
    (0..SIZE / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

fn fill(program: &mut Program, stream: &mut UnixStream, content: &[u8]) {
    for offset in (0..SIZE).step_by(1 << 20) {
        let (command, length) = (command::WRITE, 1 << 20);
        let header = RequestHeader { flags: 0, command, cookie: 0, offset, length }.encode();
        let bytes = &content[offset as usize..][..1 << 20];
        let (mut all, mut heard) = ([&header[..], bytes].concat(), Vec::new());
        while heard.len() < SimpleReplyHeader::BYTES {
            match stream.write(&all) {
                Ok(count) => drop(all.drain(..count)),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
            program.turn();
            take(stream, SimpleReplyHeader::BYTES, &mut heard);
        }
    }
}

/// Of so many who do not receive, each has asked for eight times as much as this. Another, who asks for as much as one may and
/// for a little, is answered; and then they are, every byte.
fn those_who_do_not_receive(reactor: ReactorKind, count: usize, length: u64) {
    let (mut program, mut streams) = begun_with(reactor, &fresh(), 1 + count);
    let content = content();
    let mut reader = streams.remove(0);
    fill(&mut program, &mut reader, &content);
    // A sector off, so that they begin in the middle of a block.
    let offsets: Vec<u64> = (0..8).map(|at| at * (SIZE / 8) + 512).collect();
    for deaf in &mut streams {
        let asked = offsets.iter().flat_map(|offset| read(*offset, *offset, length));
        deaf.write_all(&asked.collect::<Vec<u8>>()).unwrap();
    }
    (0..50).for_each(|_| program.turn());
    for (offset, length) in [(0, 32 << 20), (4096, 64 << 10), (SIZE - (32 << 20), 32 << 20)] {
        let mut heard = Vec::new();
        reader.write_all(&read(7, offset, length)).unwrap();
        hear_out(&mut program, &mut reader, 16 + length, &mut heard);
        assert!(heard[..16] == SimpleReplyHeader { error: 0, cookie: 7 }.encode());
        assert!(heard[16..] == content[offset as usize..][..length as usize]);
    }
    for deaf in &mut streams {
        let (mut missing, mut heard) = (offsets.clone(), Vec::new());
        hear_out(&mut program, deaf, 8 * (16 + length), &mut heard);
        for reply in heard.chunks_exact(16 + length as usize) {
            let head = SimpleReplyHeader::decode(reply).unwrap().unwrap();
            assert_eq!(head.error, 0);
            missing.retain(|offset| *offset != head.cookie);
            assert!(reply[16..] == content[head.cookie as usize..][..length as usize]);
        }
        assert!(missing.is_empty(), "{missing:?}");
    }
}

#[test]
fn those_who_do_not_receive_hold_up_nobody_and_miss_nothing() {
    for reactor in [ReactorKind::Auto, ReactorKind::Threads] {
        for (count, length) in [(1, 4 << 20), (8, 1 << 20), (8, 7 << 20), (60, 300 << 10)] {
            those_who_do_not_receive(reactor, count, length);
        }
    }
}

/// Whoever is not heard, or heard by halves: what he asks for is done once and answered once.
fn greedy_clients(reactor: ReactorKind, seed: u64) {
    const COUNT: u64 = 4;
    let (mut program, streams) = begun_with(reactor, &fresh(), COUNT as usize);
    let mut random = Random(seed);
    let each = SIZE / PLACE / COUNT;
    let mut clients = Vec::new();
    for (at, stream) in (0..).zip(streams) {
        let mut client = Client::new(stream, seed << 8 | at);
        (client.places, client.is_greedy) = (at * each..(at + 1) * each, true);
        clients.push(client);
    }
    for _ in 0..2000 {
        let client = &mut clients[random.below(COUNT) as usize];
        match random.below(8) {
            0..2 => client.ask(),
            2..4 => client.say(1 + random.below(3 << 20) as usize),
            4 => {
                let most = [20, 5000, 300_000, 4 << 20][random.below(4) as usize];
                client.hear(1 + random.below(most) as usize);
            }
            _ => program.turn(),
        }
    }
    let begun = Instant::now();
    while !clients.iter().all(Client::is_done) {
        assert!(begun.elapsed() < LIMIT, "not all is answered");
        for client in &mut clients {
            client.say(1 << 20);
            client.hear(1 << 20);
        }
        program.turn();
    }
    let answered: u64 = clients.iter().map(|client| client.answered).sum();
    assert!(answered > 10, "{answered} answers");
}

#[test]
fn each_request_is_done_and_answered_once_whatever_is_put_aside() {
    for seed in 0..8 {
        let reactor = if seed < 6 { ReactorKind::Auto } else { ReactorKind::Threads };
        greedy_clients(reactor, seed);
    }
    let count = MARK.with(|it| it.get());
    assert!(count > 8, "{count} times something was put aside");
}

/// A client whose reads have half of the memory and are not received, and another.
fn beside_who_does_not_receive() -> (Program, UnixStream, UnixStream) {
    let (mut program, mut streams) = begun_with(ReactorKind::Auto, &fresh(), 2);
    let (mut other, mut deaf) = (streams.remove(0), streams.remove(0));
    fill(&mut program, &mut other, &content());
    deaf.write_all(&read(1, 0, 32 << 20)).unwrap();
    (0..50).for_each(|_| program.turn());
    (program, other, deaf)
}

fn ask(command: u16, length: u64) -> [u8; RequestHeader::BYTES] {
    let length = length as u32;
    RequestHeader { flags: 0, command, cookie: 9, offset: 0, length }.encode()
}

/// Memory was asked for as much as was to be cached, and only a piece of that taken: where it was more than there is at all, nobody gave
/// way, and all that was asked for behind it waited as well.
#[test]
fn caching_more_than_there_is_memory_for_waits_no_longer_than_a_read() {
    for length in [32 << 20, SIZE] {
        let (mut program, mut other, _deaf) = beside_who_does_not_receive();
        let all = [ask(command::CACHE, length), ask(command::FLUSH, 0)].concat();
        other.write_all(&all).unwrap();
        hear_out(&mut program, &mut other, 2 * SimpleReplyHeader::BYTES as u64, &mut Vec::new());
    }
}

/// It ended its side behind what it had asked for: what waited for memory then was forgotten with the connection, without a word.
#[test]
fn what_waits_for_memory_is_done_although_its_client_sends_no_more() {
    for length in [4 << 20, 64 << 10] {
        let (mut program, mut other, _deaf) = beside_who_does_not_receive();
        let (asked, end) = (read(2, 0, length), ask(command::DISCONNECT, 0));
        other.write_all(&[asked, asked, end].concat()).unwrap();
        other.shutdown(std::net::Shutdown::Write).unwrap();
        hear_out(&mut program, &mut other, 2 * (16 + length), &mut Vec::new());
    }
}
