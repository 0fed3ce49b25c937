// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client that stalls in the middle of a write, or does not receive what it has asked for, harms nobody else, and leaves
//! nothing behind.

use crate::support::model::{SECTOR, content, tag_of};
use crate::support::{Daemon, PATIENCE, Random, Scratch, wait_for};
use forebay_serve::nbd::client::Client;
use forebay_serve::nbd::listen::CONNECTION_COUNT_MAX;
use forebay_serve::nbd::reply::ByteRange;
use forebay_serve::nbd::wire::{RequestHeader, command};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const STALLED: u64 = 64;
/// Of what is timed: others may have the processor. A daemon that waits for the stalled does so each time.
const TRIES: usize = 20;

fn serve(name: &str) -> (Scratch, Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("256M");
    let backing = scratch.file("backing", 512 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    (scratch, daemon)
}

/// A client, as soon as the daemon has seen that those before are gone: it takes so many at once.
fn connect(scratch: &Scratch) -> Client<UnixStream> {
    let mut client = None;
    wait_for("room for a client", || {
        client = scratch.try_connect("v").ok();
        client.is_some()
    });
    client.unwrap()
}

/// Sends the first `bytes` bytes of a write of `length`, header included, and no more.
fn stall(scratch: &Scratch, offset: u64, length: u64, tag: u64, bytes: usize) -> UnixStream {
    let mut client = scratch.connect("v");
    let mut all = write_header(offset, length);
    all.extend(content(tag, offset, length));
    client.stream().write_all(&all[..bytes.min(all.len() - 1)]).unwrap();
    client.stream().try_clone().unwrap()
}

fn write_header(offset: u64, length: u64) -> Vec<u8> {
    let length = length as u32;
    let header = RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset, length };
    header.encode().to_vec()
}

#[test]
fn nothing_after_a_disconnect_is_done() {
    let (scratch, daemon) = serve("disconnect");
    for round in 0..20 {
        let mut client = scratch.connect("v");
        // All of it comes with one receive: a write with FUA, the end, and what must not be.
        let header = |command, offset, flags| {
            let length = if command == command::WRITE { 4096 } else { 0 };
            RequestHeader { flags, command, cookie: 1, offset, length }.encode().to_vec()
        };
        let mut all = header(command::WRITE, 0, 1);
        all.extend([round + 1; 4096]);
        all.extend(header(command::DISCONNECT, 0, 0));
        for at in 1..4 {
            all.extend(header(command::WRITE, at * 4096, 0));
            all.extend([0xEE; 4096]);
        }
        client.stream().write_all(&all).unwrap();
        let mut rest = Vec::new();
        client.stream().read_to_end(&mut rest).unwrap();
        assert_eq!(rest.len(), 16, "one answer: {rest:?}");
        let found = scratch.connect("v").read(0, 16384).unwrap();
        assert!(found[..4096].iter().all(|byte| *byte == round + 1));
        assert!(found[4096..].iter().all(|byte| *byte == 0), "round {round}");
    }
    daemon.stop("TERM");
}

/// Byte counts of each class: in the header, at its end, in and around sectors, blocks, the
/// pieces of the socket, and just before the end; the rest by chance.
fn stall_after() -> Vec<usize> {
    let header = RequestHeader::BYTES;
    let payload = MIB as usize;
    let mut all: Vec<usize> = vec![1, 4, header - 1, header, header + 1];
    for at in [512, 4096, 65_536, 131_072, 212_992, 262_144, 524_288, payload - 4096, payload] {
        all.extend([header + at - 1, header + at, header + at + 1]);
    }
    let mut random = Random(64);
    while all.len() < STALLED as usize {
        all.push(1 + random.below((header + payload - 1) as u64) as usize);
    }
    all
}

/// p99 of 4 KiB writes, each with a flush behind it.
fn p99(scratch: &Scratch, random: &mut Random) -> Duration {
    const ROUNDS: usize = 600;
    let mut client = scratch.connect("v");
    let mut took = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let offset = random.below(16384) * 4096;
        let bytes = content(9, offset, 4096);
        let begun = Instant::now();
        client.write(offset, &bytes, false).unwrap();
        client.flush().unwrap();
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    took[ROUNDS * 99 / 100]
}

#[test]
fn stalled_writers_slow_nobody_and_leave_no_part_of_a_write() {
    let (scratch, daemon) = serve("stall");
    // Where the stalled ones write, there is something already.
    let base = 256 * MIB;
    let mut client = scratch.connect("v");
    for number in 0..STALLED {
        let offset = base + number * MIB;
        client.write(offset, &content(1, offset, MIB), false).unwrap();
    }
    let mut random = Random(3);
    p99(&scratch, &mut random);
    let mut stalled = Vec::new();
    for attempt in 1..=TRIES {
        let alone = p99(&scratch, &mut random);
        for (number, bytes) in stall_after().into_iter().enumerate() {
            stalled.push(stall(&scratch, base + number as u64 * MIB, MIB, 2, bytes));
        }
        assert_eq!(stalled.len() as u64, STALLED);
        let beside = p99(&scratch, &mut random);
        println!("p99 of write and flush: {alone:?} alone, {beside:?} beside {STALLED} stalled");
        stalled.clear();
        if beside < 2 * alone {
            break;
        }
        assert!(attempt < TRIES, "{beside:?} beside stalled clients, {alone:?} without");
    }
    for number in 0..STALLED {
        let offset = base + number * MIB;
        let found = client.read(offset, MIB as u32).unwrap();
        assert!(
            found == content(1, offset, MIB),
            "part of a write that never ended is at {offset}"
        );
    }
    daemon.stop("TERM");
}

/// A write breaks off after each byte count that there is, 64 at once, while another client writes: with `FOREBAY_STALLS=1` (`make soak`). Else after one
/// in 4,099, a prime, so that they are of all classes of counts.
#[test]
fn a_write_that_breaks_off_after_any_byte_leaves_no_part() {
    let step = std::env::var("FOREBAY_STALLS").map_or(4_099, |it| it.parse().expect("a number"));
    let (scratch, daemon) = serve("broken-off");
    let offsets: Vec<u64> = (0..STALLED).map(|number| (256 + number) * MIB).collect();
    let mut client = scratch.connect("v");
    for offset in &offsets {
        client.write(*offset, &content(1, *offset, MIB), false).unwrap();
    }
    let never: Vec<Vec<u8>> = offsets
        .iter()
        .map(|offset| [write_header(*offset, MIB), content(2, *offset, MIB)].concat())
        .collect();
    // None of them changes what is there, so one look at the end is enough; more of them tell sooner.
    let look = |client: &mut Client<UnixStream>, from: usize| {
        for offset in &offsets {
            let found = client.read(*offset, MIB as u32).unwrap();
            let is_whole = found == content(1, *offset, MIB);
            assert!(
                is_whole,
                "part of a write is at {offset}, broken off after {from} bytes or fewer"
            );
        }
    };
    let counts: Vec<usize> = (1..never[0].len()).step_by(step).collect();
    let mut longest = Duration::ZERO;
    for (round, some) in counts.chunks(STALLED as usize).enumerate() {
        let broken_off: Vec<_> = std::iter::zip(some, &never)
            .map(|(count, all)| {
                let mut client = connect(&scratch);
                client.stream().write_all(&all[..*count]).unwrap();
                client
            })
            .collect();
        let begun = Instant::now();
        client.write(0, &content(3, 0, 4096), false).unwrap();
        client.flush().unwrap();
        longest = longest.max(begun.elapsed());
        drop(broken_off);
        if round % 1_000 == 999 {
            look(&mut client, some[0]);
        }
    }
    look(&mut client, MIB as usize);
    println!("{} broken off; a write and flush beside took {longest:?} at most", counts.len());
    daemon.stop("TERM");
}

#[test]
fn a_client_that_goes_on_after_a_stall_gets_its_write() {
    let (scratch, daemon) = serve("resume");
    let mut all = write_header(MIB, MIB);
    all.extend(content(5, MIB, MIB));
    let mut client = scratch.connect("v");
    for part in all.chunks(91_000) {
        client.stream().write_all(part).unwrap();
        // Somebody else is served meanwhile.
        scratch.connect("v").flush().unwrap();
    }
    let mut reply = [0; 16];
    client.stream().read_exact(&mut reply).unwrap();
    assert_eq!(reply[4..8], [0; 4], "an error");
    let found = scratch.connect("v").read(MIB, MIB as u32).unwrap();
    assert!(found == content(5, MIB, MIB));
    daemon.stop("TERM");
}

#[test]
fn broken_off_long_writes_use_up_no_connection() {
    // It gives up on its clients after five seconds.
    let is_quick = |_| stop_after_broken_off_writes() < Duration::from_secs(4);
    assert!((0..TRIES).any(is_quick), "the stop waited for the dead");
}

/// How long the stop takes.
fn stop_after_broken_off_writes() -> Duration {
    let (scratch, daemon) = serve("dropped");
    let length = 4 * MIB;
    let mut client = scratch.connect("v");
    client.write(0, &content(1, 0, length), false).unwrap();
    // More of them than there may be connections.
    for number in 0..100 {
        drop(stall(&scratch, 0, length, 2, 30 + number * 41_943));
    }
    let mut later = scratch.connect("v");
    let found = later.read(0, length as u32).unwrap();
    for (number, sector) in found.chunks_exact(SECTOR).enumerate() {
        let tag = tag_of(number as u64, sector);
        assert!(matches!(tag, Some(1 | 2)), "sector {number} is torn: {tag:?}");
    }
    let begun = Instant::now();
    drop((client, later));
    daemon.stop("TERM");
    begun.elapsed()
}

/// They kept everybody else out for ever, and nothing said so.
#[test]
fn who_agrees_on_nothing_makes_room_for_those_who_do() {
    let (scratch, daemon) = serve("silent");
    let mut good = scratch.connect("v");
    good.write(0, &[5; 4096], true).unwrap();
    let connect = |at| {
        let mut socket = UnixStream::connect(scratch.nbd()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        // The client's flags, and the beginning of an option.
        socket.write_all(&[0, 0, 0, 3, b'I', b'H', b'A'][..at % 8]).unwrap();
        socket
    };
    let silent: Vec<UnixStream> = (1..CONNECTION_COUNT_MAX).map(connect).collect();
    let more: Vec<_> = (0..5).map(|_| self::connect(&scratch)).collect();
    for mut client in more {
        assert_eq!(client.read(0, 4096).unwrap(), [5; 4096]);
    }
    // Not one more than were needed, and who had agreed is none of them.
    let ended = silent.iter().take_while(|it| {
        let read = it.set_nonblocking(true).and_then(|()| (&mut &**it).read(&mut [0; 64]));
        !read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    });
    assert_eq!(ended.count(), 5);
    assert_eq!(good.read(0, 4096).unwrap(), [5; 4096]);
    let told = "had agreed on nothing for 10s, and all 68 places were taken";
    wait_for("it is told", || daemon.said().contains(told));
    assert_eq!(daemon.said().matches(told).count(), 1);
    drop((silent, good));
    daemon.stop("TERM");
}

/// It saw the end in the middle of its handshake, and nothing said why.
#[test]
fn who_finds_all_places_taken_is_sent_away_and_that_is_told() {
    let scratch = Scratch::new("stall-places");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 64 * MIB).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    assert_eq!(scratch.status()["nbd_refused"], 0);
    let mut clients: Vec<_> = (0..CONNECTION_COUNT_MAX).map(|_| self::connect(&scratch)).collect();
    for _ in 0..3 {
        assert!(scratch.try_connect("v").is_err());
    }
    let told = "an NBD connection is closed as it comes: all 68 places are taken";
    wait_for("it is told", || daemon.said().contains(told));
    let status = scratch.status();
    assert_eq!(status["nbd_refused"], 3);
    assert_eq!(status["volumes"][0]["nbd_clients"], CONNECTION_COUNT_MAX);
    let text = scratch.ask(&["status"]).stdout;
    let text = String::from_utf8_lossy(&text);
    let line = "NBD connections closed when they came, since all places were taken: 3";
    assert!(text.contains(line), "{text}");
    // One that ends makes room.
    drop(clients.pop());
    wait_for("there is room", || scratch.try_connect("v").is_ok());
    drop(clients);
    let said = daemon.stop("TERM");
    assert_eq!(
        said.lines().filter(|line| line.contains(told) && !line.contains("more in")).count(),
        1,
        "{said}"
    );
}

/// p99 of reads, and the longest of all.
fn reads(scratch: &Scratch, random: &mut Random, length: u32) -> [Duration; 2] {
    const ROUNDS: usize = 300;
    let mut client = scratch.connect("v");
    let mut took = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let offset = random.below(64) * MIB;
        let begun = Instant::now();
        let found = client.read(offset, length).unwrap();
        took.push(begun.elapsed());
        assert!(found == content(1, offset, length.into()), "what is at {offset}");
    }
    took.sort_unstable();
    [took[ROUNDS * 99 / 100], took[ROUNDS - 1]]
}

fn receive_all(client: &mut Client<UnixStream>, asked: &[(u64, u64)]) {
    for _ in asked {
        let reply = client.receive().unwrap();
        assert_eq!(reply.result, Ok(()));
        let (_, at) = asked.iter().find(|(cookie, _)| *cookie == reply.cookie).unwrap();
        assert!(reply.data == content(1, *at, MIB), "what is at {at}");
    }
    assert_eq!(client.in_flight_count(), 0);
}

/// Each of them asks for more than there is memory for. Whoever reads beside them, as little or as much as one may, is answered
/// as if he were alone; and when they receive, they find every byte.
#[test]
fn stalled_readers_slow_nobody_and_miss_nothing() {
    const ASKED: u64 = 48;
    let (scratch, daemon) = serve("stall-read");
    let mut client = scratch.connect("v");
    for offset in (0..96).map(|at| at * MIB) {
        client.write(offset, &content(1, offset, MIB), false).unwrap();
    }
    let mut random = Random(5);
    for count in [8, STALLED as usize] {
        for length in [4096, MIB as u32] {
            reads(&scratch, &mut random, length);
            for attempt in 1..=TRIES {
                let [alone, _] = reads(&scratch, &mut random, length);
                let mut stalled: Vec<_> =
                    (0..count).map(|_| (scratch.connect("v"), Vec::new())).collect();
                for (client, asked) in &mut stalled {
                    for offset in (0..ASKED).map(|at| at * MIB) {
                        let range = ByteRange { offset, length: MIB as u32 };
                        asked.push((client.send_read(range, false).unwrap(), offset));
                    }
                }
                let [beside, longest] = reads(&scratch, &mut random, length);
                println!(
                    "p99 of reads of {length}: {alone:?} alone, {beside:?} beside {count} who do not receive; at most {longest:?}"
                );
                let found = client.read(0, 32 << 20).unwrap();
                assert!(found == content(1, 0, 32 << 20));
                if attempt == 1 {
                    std::thread::scope(|scope| {
                        for (client, asked) in &mut stalled {
                            scope.spawn(|| receive_all(client, asked));
                        }
                    });
                }
                if beside < 2 * alone {
                    break;
                }
                assert!(attempt < TRIES, "{beside:?} beside stalled clients, {alone:?} without");
            }
        }
    }
    daemon.stop("TERM");
}

/// Answers that need no device, answers that fit into the ring of replies and answers that do not,
/// more of each than there is room for: nothing may wait for an event that does not come.
#[test]
fn a_client_that_receives_late_gets_every_answer() {
    const COMMANDS: u64 = 40_000; // their headers fit into what the server takes in
    let (scratch, daemon) = serve("late");
    let mut client = scratch.connect("v");
    client.write(0, &content(1, 0, MIB), false).unwrap();
    for number in 0..COMMANDS {
        let length = if number % 1000 == 7 { MIB as u32 } else { 4096 };
        let sent = match number % 10 {
            7 => client.send_read(ByteRange { offset: 0, length }, false),
            8 => client.send_read(ByteRange { offset: 1, length }, false),
            _ => client.send_cache(ByteRange { offset: 0, length }),
        };
        sent.unwrap();
    }
    let expected = content(1, 0, MIB);
    let (mut reads, mut refused) = (0, 0);
    for _ in 0..COMMANDS {
        let reply = client.receive().unwrap();
        refused += u64::from(reply.result.is_err());
        reads += u64::from(!reply.data.is_empty());
        assert!(reply.data == expected[..reply.data.len()], "{} bytes differ", reply.data.len());
    }
    assert_eq!((reads, refused), (COMMANDS / 10, COMMANDS / 10));
    daemon.stop("TERM");
}
