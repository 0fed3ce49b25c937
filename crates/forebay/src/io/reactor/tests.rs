// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One suite for both back ends.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::*;
use crate::io::sys;
use crate::io::{Bell, DRIVERS_BUFFERS_AT};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Runs a test on each back end the machine has.
fn each(entries: u32, test: impl Fn(&mut Reactor)) {
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        match Reactor::new(kind, entries) {
            Ok(mut reactor) => {
                assert_eq!(reactor.kind(), kind);
                test(&mut reactor);
            }
            Err(error) => forebay_testing::skip(&format!("reactor: {kind:?}: {error}")),
        }
    }
}

/// A file without a name, `length` bytes long.
fn file(length: u64) -> File {
    use std::os::unix::fs::OpenOptionsExt;
    let mut how = std::fs::OpenOptions::new();
    let file = how.read(true).write(true).custom_flags(libc::O_TMPFILE).open(std::env::temp_dir());
    let file = file.expect("a temporary directory that takes O_TMPFILE");
    file.set_len(length).unwrap();
    file
}

/// Waits for `count` answers, in order of user data.
fn answers(reactor: &mut Reactor, count: usize) -> Vec<(u64, i32)> {
    let mut done = Vec::new();
    while done.len() < count {
        assert!(reactor.in_flight() > 0, "only {} answers of {count}", done.len());
        reactor.wait(Some(Duration::from_secs(20)), &mut done).unwrap();
    }
    assert_eq!(done.len(), count);
    done.sort_unstable();
    done
}

/// What there is now, without waiting.
fn look(reactor: &mut Reactor) -> Vec<(u64, i32)> {
    let mut done = Vec::new();
    reactor.wait(Some(Duration::ZERO), &mut done).unwrap();
    done
}

#[test]
fn auto_takes_a_back_end_and_says_why_not_the_other() {
    let reactor = Reactor::new(ReactorKind::Auto, 8).unwrap();
    assert_eq!(reactor.refusal().is_some(), reactor.kind() == ReactorKind::Threads);
}

#[test]
fn files_are_written_synced_and_read() {
    each(8, |reactor| {
        let file = file(0);
        let fd = file.as_raw_fd();
        let arena = Arena::anonymous(8192).unwrap();
        arena.span(0, 5).copy_in(b"water");
        let span = arena.span(0, 5);
        reactor.submit(ReactorOp::Write { fd, span, offset: 3 }, 1);
        assert_eq!(answers(reactor, 1), [(1, 5)]);
        reactor.submit(ReactorOp::Fsync { fd, datasync: true }, 2);
        reactor.submit(ReactorOp::Fsync { fd, datasync: false }, 3);
        reactor.submit(ReactorOp::Nop, 4);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        reactor.submit(ReactorOp::Fallocate { fd, mode, offset: 0, length: 4 }, 5);
        assert_eq!(answers(reactor, 4), [(2, 0), (3, 0), (4, 0), (5, 0)]);
        for (length, user_data) in [(5, 7), (0, 8)] {
            reactor.submit(ReactorOp::WriteOut { fd, offset: 3, length }, user_data);
        }
        assert_eq!(answers(reactor, 2), [(7, 0), (8, 0)]);
        let span = arena.span(4096, 100);
        reactor.submit(ReactorOp::Read { fd, span, offset: 2 }, 6);
        assert_eq!(answers(reactor, 1), [(6, 6)], "short at the end of the file");
        let mut bytes = [1; 7];
        span.copy_out(&mut bytes);
        assert_eq!(&bytes, b"\0\0ater\0");
        assert_eq!(reactor.in_flight(), 0);
    });
}

#[test]
fn a_megabyte_to_be_written_does_not_wait_for_the_wait() {
    let Ok(mut reactor) = Reactor::new(ReactorKind::Uring, 8) else {
        return forebay_testing::skip("reactor: no io_uring");
    };
    // The first wait binds the ring to the thread.
    look(&mut reactor);
    let file = file(0);
    let arena = Arena::anonymous(1 << 20).unwrap();
    let length = |file: &File| file.metadata().unwrap().len();
    let mut write = |part: usize| {
        let span = arena.span(part << 18, 1 << 18);
        let offset = (part as u64) << 18;
        reactor.submit(ReactorOp::Write { fd: file.as_raw_fd(), span, offset }, part as u64);
    };
    (0..3).for_each(&mut write);
    assert_eq!(length(&file), 0, "less than a megabyte waits");
    write(3);
    let begun = Instant::now();
    while length(&file) < 1 << 20 {
        assert!(begun.elapsed() < Duration::from_secs(20), "nobody writes");
        std::thread::yield_now();
    }
    let all = [0, 1, 2, 3].map(|part| (part, 1 << 18));
    assert_eq!(answers(&mut reactor, 4), all);
}

#[test]
fn what_is_small_does_not_happen_before_the_wait() {
    each(8, |reactor| {
        let file = file(1);
        let arena = Arena::anonymous(4096).unwrap();
        arena.whole().copy_in(b"x");
        let write = ReactorOp::Write { fd: file.as_raw_fd(), span: arena.span(0, 1), offset: 0 };
        reactor.submit(write, 1);
        reactor.submit(write, 2);
        reactor.cancel(1);
        reactor.cancel(2);
        assert_eq!(answers(reactor, 2), [(1, -libc::ECANCELED), (2, -libc::ECANCELED)]);
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [0]);
    });
}

#[test]
fn errors_are_minus_errno() {
    each(8, |reactor| {
        let arena = Arena::anonymous(4096).unwrap();
        let span = arena.whole();
        let file = file(0);
        reactor.submit(ReactorOp::Read { fd: -1, span, offset: 0 }, 1);
        reactor.submit(ReactorOp::Recv { fd: -1, span }, 2);
        reactor.submit(ReactorOp::PollIn { fd: 1_000_000 }, 3);
        reactor.submit(ReactorOp::Recv { fd: file.as_raw_fd(), span }, 4);
        let expected =
            [(1, -libc::EBADF), (2, -libc::EBADF), (3, -libc::EBADF), (4, -libc::ENOTSOCK)];
        assert_eq!(answers(reactor, 4), expected);
    });
}

#[test]
fn ten_thousand_operations_at_once_are_all_answered() {
    each(64, |reactor| {
        let file = file(0);
        let fd = file.as_raw_fd();
        let arena = Arena::anonymous(10_000 * 8).unwrap();
        for index in 0..10_000u64 {
            let span = arena.span(index as usize * 8, 8);
            span.copy_in(&index.to_le_bytes());
            reactor.submit(ReactorOp::Write { fd, span, offset: index * 8 }, index);
        }
        assert_eq!(reactor.in_flight(), 10_000);
        let done = answers(reactor, 10_000);
        assert!(done.iter().enumerate().all(|(index, done)| *done == (index as u64, 8)));
        let mut bytes = vec![0; 80_000];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let words = bytes.as_chunks::<8>().0.iter();
        assert!(words.enumerate().all(|(index, word)| u64::from_le_bytes(*word) == index as u64));
    });
}

#[test]
fn sockets_wait_for_their_peer() {
    each(8, |reactor| {
        for nonblocking in [false, true] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(nonblocking).unwrap();
            let fd = ours.as_raw_fd();
            let arena = Arena::anonymous(4096).unwrap();
            let span = arena.span(0, 100);
            reactor.submit(ReactorOp::Recv { fd, span }, 1);
            assert_eq!(look(reactor), []);
            theirs.write_all(b"hello").unwrap();
            assert_eq!(answers(reactor, 1), [(1, 5)]);
            let mut bytes = [0; 5];
            span.copy_out(&mut bytes);
            assert_eq!(&bytes, b"hello");
            reactor.submit(ReactorOp::Send { fd, span: arena.span(0, 5) }, 2);
            assert_eq!(answers(reactor, 1), [(2, 5)]);
            theirs.read_exact(&mut bytes).unwrap();
            reactor.submit(ReactorOp::Recv { fd, span }, 3);
            assert_eq!(look(reactor), []);
            drop(theirs);
            assert_eq!(answers(reactor, 1), [(3, 0)]);
            reactor.submit(ReactorOp::Send { fd, span }, 4);
            assert_eq!(answers(reactor, 1), [(4, -libc::EPIPE)], "and no signal");
        }
    });
}

#[test]
fn what_does_not_wait_says_so() {
    each(8, |reactor| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let arena = Arena::anonymous(4096).unwrap();
        let (fd, span) = (ours.as_fd(), arena.span(0, 100));
        assert_eq!(reactor.receive_now(fd, span), -libc::EAGAIN);
        theirs.write_all(b"hello").unwrap();
        assert_eq!(reactor.receive_now(fd, span), 5);
        let mut bytes = [0; 5];
        span.copy_out(&mut bytes);
        assert_eq!(&bytes, b"hello");
        assert_eq!(reactor.send_now(fd, arena.span(0, 5)), 5);
        theirs.read_exact(&mut bytes).unwrap();
        while reactor.send_now(fd, arena.whole()) > 0 {}
        assert_eq!(reactor.send_now(fd, span), -libc::EAGAIN);
        drop(theirs);
        assert_eq!(reactor.send_now(fd, span), -libc::EPIPE, "and no signal");
    });
}

#[test]
fn a_send_waits_for_room_and_may_be_short() {
    each(8, |reactor| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let fd = ours.as_raw_fd();
        let arena = Arena::anonymous(8 << 20).unwrap();
        reactor.submit(ReactorOp::Send { fd, span: arena.whole() }, 1);
        // io_uring may fill the socket's buffer and go on waiting, or answer short at once.
        let mut sent = look(reactor).first().map_or(0, |done| done.1);
        if sent > 0 {
            reactor.submit(ReactorOp::Send { fd, span: arena.whole() }, 1);
            assert_eq!(look(reactor), []);
        }
        let mut room = vec![0; 1 << 20];
        let mut received = 0;
        while reactor.in_flight() > 0 {
            theirs.set_nonblocking(true).unwrap();
            received += theirs.read(&mut room).unwrap_or(0);
            sent += look(reactor).first().map_or(0, |done| done.1);
        }
        assert!(sent > 0 && sent as usize >= received && received > 0);
    });
}

#[test]
fn connections_are_accepted_one_by_one() {
    each(8, |reactor| {
        let path = std::env::temp_dir().join(format!(
            "forebay-accept-{}-{:?}",
            std::process::id(),
            reactor.kind()
        ));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let fd = listener.as_raw_fd();
        reactor.submit(ReactorOp::Accept { fd }, 1);
        assert_eq!(look(reactor), []);
        for word in [b"one", b"two"] {
            let mut client = UnixStream::connect(&path).unwrap();
            let done = answers(reactor, 1);
            assert!(done[0].1 >= 0, "{done:?}");
            let mut server = UnixStream::from(reactor.accepted(done[0].1).unwrap());
            assert!(reactor.accepted(done[0].1).is_none(), "fetched once");
            let mut bytes = [0; 3];
            let early = server.read(&mut bytes).unwrap_err();
            assert_eq!(early.kind(), io::ErrorKind::WouldBlock, "it is non-blocking");
            client.write_all(word).unwrap();
            server.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, word);
            reactor.submit(ReactorOp::Accept { fd }, 1);
        }
        reactor.cancel(1);
        assert_eq!(answers(reactor, 1), [(1, -libc::ECANCELED)]);
        std::fs::remove_file(&path).unwrap();
    });
}

/// In a process of its own, whose table of descriptors is full.
///
/// The spare one was lost for good when another thread got hold of it: each accept was answered at once, its caller asked again at once, and
/// nobody who came was ever told.
#[test]
fn without_a_spare_descriptor_an_accept_waits_and_the_next_one_is_the_spare() {
    const ALONE: &str = "FOREBAY_TEST_DESCRIPTORS";
    if std::env::var_os(ALONE).is_some() {
        return each(8, lose_the_spare);
    }
    let module = module_path!().split_once("::").unwrap().1;
    let name = format!(
        "{module}::without_a_spare_descriptor_an_accept_waits_and_the_next_one_is_the_spare"
    );
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    let done = alone.args(["--exact", &name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

fn lose_the_spare(reactor: &mut Reactor) {
    let name = format!("forebay-spare-{}-{:?}", std::process::id(), reactor.kind());
    let path = std::env::temp_dir().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    let fd = listener.as_raw_fd();
    let mut clients = [(); 4].map(|()| UnixStream::connect(&path).unwrap());
    match &mut reactor.back_end {
        BackEnd::Uring(uring) => uring.accepted.lose_spare(),
        BackEnd::Threads(threads) => threads.accepted.lose_spare(),
    }
    let before = getrlimit(Resource::Nofile);
    // The limit is one of numbers: none below it is free.
    let free = sys::eventfd().unwrap().as_raw_fd() as u64;
    let may_have = |count| {
        let current = Some(free + count);
        setrlimit(Resource::Nofile, Rlimit { current, ..before }).unwrap();
    };
    may_have(0);
    for cancels in [true, false] {
        reactor.submit(ReactorOp::Accept { fd }, 1);
        let mut done = Vec::new();
        let cpu = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let begun = cpu();
        reactor.wait(Some(Duration::from_millis(300)), &mut done).unwrap();
        assert_eq!(done, []);
        let used = cpu() - begun;
        assert!(used.tv_sec == 0 && used.tv_nsec < 150_000_000, "it turns round: {used:?}");
        if cancels {
            reactor.cancel(1);
            assert_eq!(answers(reactor, 1), [(1, -libc::ECANCELED)]);
        }
    }
    // One is free: whoever is the first is told, and it is the spare for the next.
    may_have(1);
    assert_eq!(answers(reactor, 1), [(1, -libc::ECONNABORTED)]);
    for number in [2, 3] {
        reactor.submit(ReactorOp::Accept { fd }, number);
        assert_eq!(answers(reactor, 1), [(number, -libc::ECONNABORTED)]);
    }
    assert_eq!(reactor.sent_away(), 3);
    for client in &mut clients[..3] {
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0, "it was closed");
    }
    setrlimit(Resource::Nofile, before).unwrap();
    reactor.submit(ReactorOp::Accept { fd }, 4);
    let done = answers(reactor, 1);
    assert!(reactor.accepted(done[0].1).is_some());
    assert_eq!(reactor.sent_away(), 3);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_bell_from_another_thread_ends_the_wait() {
    each(8, |reactor| {
        let bell = Bell::new().unwrap();
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, 1);
        assert_eq!(look(reactor), []);
        std::thread::scope(|scope| {
            scope.spawn(|| bell.ring());
            let mut done = Vec::new();
            while reactor.wait(None, &mut done).unwrap() == 0 {}
            assert_eq!(done, [(1, i32::from(libc::POLLIN))]);
        });
        bell.clear();
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, 2);
        assert_eq!(look(reactor), [], "silent again");
    });
}

#[test]
fn what_waits_for_a_peer_can_be_cancelled() {
    each(8, |reactor| {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let bell = Bell::new().unwrap();
        let arena = Arena::anonymous(4096).unwrap();
        reactor.submit(ReactorOp::Recv { fd: ours.as_raw_fd(), span: arena.whole() }, 1);
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, 2);
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, 3);
        assert_eq!(look(reactor), []);
        reactor.cancel(1);
        reactor.cancel(2);
        reactor.cancel(77); // nobody
        assert_eq!(answers(reactor, 2), [(1, -libc::ECANCELED), (2, -libc::ECANCELED)]);
        assert_eq!(reactor.in_flight(), 1);
        bell.ring();
        assert_eq!(answers(reactor, 1), [(3, i32::from(libc::POLLIN))]);
    });
}

#[test]
fn a_wait_ends_when_its_time_is_over() {
    each(8, |reactor| {
        let mut done = Vec::new();
        let start = Instant::now();
        assert_eq!(reactor.wait(Some(Duration::from_millis(30)), &mut done).unwrap(), 0);
        assert!(start.elapsed() >= Duration::from_millis(30));
        // Also beside work that never ends.
        let bell = Bell::new().unwrap();
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, 1);
        let start = Instant::now();
        assert_eq!(reactor.wait(Some(Duration::from_millis(30)), &mut done).unwrap(), 0);
        assert!(start.elapsed() >= Duration::from_millis(30));
        assert_eq!(reactor.in_flight(), 1);
    });
}

#[test]
fn registered_memory_is_read_and_written_alike() {
    each(8, |reactor| {
        let file = file(0);
        let fd = file.as_raw_fd();
        let arena = Arena::anonymous(4 << 20).unwrap();
        let other = Arena::anonymous(4096).unwrap();
        let registered = reactor.register_arena(&arena);
        println!("{:?}: registered {registered}", reactor.kind());
        arena.span(1 << 20, 7).copy_in(b"inside!");
        other.whole().copy_in(b"outside");
        let span = arena.span(1 << 20, 7);
        reactor.submit(ReactorOp::Write { fd, span, offset: 0 }, 1);
        reactor.submit(ReactorOp::Write { fd, span: other.span(0, 7), offset: 7 }, 2);
        assert_eq!(answers(reactor, 2), [(1, 7), (2, 7)]);
        let span = arena.span((4 << 20) - 14, 14);
        reactor.submit(ReactorOp::Read { fd, span, offset: 0 }, 3);
        assert_eq!(answers(reactor, 1), [(3, 14)]);
        let mut bytes = [0; 14];
        span.copy_out(&mut bytes);
        assert_eq!(&bytes, b"inside!outside");
        // A second arena while the ring is in use.
        reactor.register_arena(&other);
        reactor.submit(ReactorOp::Read { fd, span: other.span(0, 7), offset: 0 }, 4);
        assert_eq!(answers(reactor, 1), [(4, 7)]);
        other.span(0, 7).copy_out(&mut bytes[..7]);
        assert_eq!(&bytes[..7], b"inside!");
    });
}

/// Drivers alone fill their places: a test cannot.
#[test]
fn a_buffer_that_no_driver_has_put_there_is_an_error() {
    each(8, |reactor| {
        let file = file(4096);
        let fd = file.as_raw_fd();
        reactor.register_arena(&Arena::anonymous(4096).unwrap());
        let buffer = Registered::new(DRIVERS_BUFFERS_AT + 5, 4096);
        reactor.submit(ReactorOp::ReadRegistered { fd, buffer, offset: 0 }, 1);
        reactor.submit(ReactorOp::WriteRegistered { fd, buffer, offset: 0 }, 2);
        let error = match reactor.has_drivers_buffers() {
            true => -libc::EFAULT,
            false => -libc::EOPNOTSUPP,
        };
        assert_eq!(answers(reactor, 2), [(1, error), (2, error)]);
    });
}

#[test]
fn a_reactor_is_made_on_one_thread_and_used_on_another() {
    each(8, |_| {});
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        let Ok(mut reactor) = Reactor::new(kind, 8) else { continue };
        reactor.submit(ReactorOp::Nop, 5);
        let there = std::thread::spawn(move || answers(&mut reactor, 1));
        assert_eq!(there.join().unwrap(), [(5, 0)]);
    }
}

#[test]
fn a_dropped_reactor_has_ended_its_writes() {
    for kind in [ReactorKind::Threads, ReactorKind::Uring] {
        let Ok(mut reactor) = Reactor::new(kind, 8) else { continue };
        let file = file(0);
        let fd = file.as_raw_fd();
        let arena = Arena::anonymous(1 << 20).unwrap();
        arena.whole().copy_in(&[7; 4096]);
        let bell = Bell::new().unwrap();
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, 1);
        reactor.submit(ReactorOp::Write { fd, span: arena.whole(), offset: 0 }, 2);
        reactor.submit(ReactorOp::Fsync { fd, datasync: true }, 3);
        look(&mut reactor);
        drop(reactor);
        // Done or, with threads, never begun; but not half done.
        let length = file.metadata().unwrap().len();
        assert!(length == 0 || length == 1 << 20, "{kind:?}: {length}");
    }
}

#[test]
fn more_answers_than_the_ring_holds_are_kept() {
    let Ok(mut reactor) = Reactor::new(ReactorKind::Uring, 8) else {
        return forebay_testing::skip("reactor: no io_uring");
    };
    let bell = Bell::new().unwrap();
    for index in 0..5_000 {
        reactor.submit(ReactorOp::PollIn { fd: bell.fd() }, index);
    }
    assert_eq!(look(&mut reactor), []);
    bell.ring();
    let done = answers(&mut reactor, 5_000);
    assert!(done.iter().enumerate().all(|(index, done)| *done == (index as u64, 1)));
}

#[test]
fn a_command_reaches_its_driver_or_is_refused() {
    // A socket's: how many bytes wait to be read.
    const SOCKET_URING_OP_SIOCINQ: u32 = 0;
    each(8, |reactor| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        near.write_all(b"water").unwrap();
        far.peek(&mut [0]).unwrap();
        let fd = far.as_raw_fd();
        let op =
            ReactorOp::Command { fd, command: SOCKET_URING_OP_SIOCINQ, address: 0, bytes: [0; 16] };
        reactor.submit(op, 1);
        match (reactor.kind(), answers(reactor, 1)[0]) {
            (ReactorKind::Uring, (1, result)) if result == -libc::EINVAL => {
                forebay_testing::skip("reactor: sockets take commands since Linux 6.7");
            }
            (ReactorKind::Uring, answer) => assert_eq!(answer, (1, 5)),
            (_, answer) => assert_eq!(answer, (1, -libc::EOPNOTSUPP)),
        }
    });
}
