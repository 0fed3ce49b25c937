// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel, as far as it matters which connection a request comes on.

use super::super::attach::session;
use super::*;
use crate::attach::DeviceVolume;
use crate::nbd::wire::{RequestHeader, command};
use crate::server::Server;
use crate::shards::{self, shard};
use forebay::io::{MemoryDevice, ReactorKind, Throttle, ThrottleDevice, ThrottleLimits};
use forebay_core::format::superblock::Mode;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::Duration;

const SIZE: u64 = 16 << 20;

/// A volume whose device has so many connections; the kernel's ends of them.
struct Rig {
    server: Server,
    kernels: Vec<UnixStream>,
    ordered: Receiver<Order>,
    /// What the thread has that makes devices.
    worker: Option<(Sender<Arrival>, Arc<Bell>)>,
}

fn rig(connections: usize) -> Rig {
    rig_on(connections, shard(ReactorKind::Auto, SIZE))
}

fn rig_on(connections: usize, (shard, index): (Shard, VolumeIndex)) -> Rig {
    let volume =
        DeviceVolume { index, uuid: [1; 16], size_bytes: SIZE, logical_block: 512, lends: false };
    let bell = Arc::new(Bell::new().unwrap());
    let (arrive, arrivals) = channel();
    let (orders, ordered) = channel();
    let session = session(&volume, connections);
    let slots = vec![Slot { volume: index, session, connections: Vec::new() }];
    let front_end = NbdDeviceFrontEnd::new(slots, Arc::clone(&bell), arrivals, orders).unwrap();
    let mut server = Server::new(shard);
    server.add(Box::new(front_end)).unwrap();
    let mut rig = Rig { server, kernels: Vec::new(), ordered, worker: Some((arrive, bell)) };
    rig.connect(connections);
    rig.turns();
    rig
}

impl Rig {
    fn connect(&mut self, connections: usize) {
        let pair = |_| {
            let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
            rustix::net::socketpair(unix, stream, SocketFlags::CLOEXEC, None).unwrap()
        };
        let (sockets, kernels): (Vec<OwnedFd>, Vec<OwnedFd>) = (0..connections).map(pair).unzip();
        let (arrive, bell) = self.worker.as_ref().unwrap();
        arrive.send(Arrival { slot: 0, sockets }).unwrap();
        bell.ring();
        self.kernels = kernels.into_iter().map(UnixStream::from).collect();
        self.kernels.iter().for_each(|it| it.set_nonblocking(true).unwrap());
    }

    fn is_over(&self) -> bool {
        self.server.front_end_count() == 0
    }

    fn turns(&mut self) {
        for _ in 0..50 {
            self.server.turn(Some(Duration::from_millis(1))).unwrap();
        }
    }

    fn ask(&mut self, at: usize, kind: u16, cookie: u64, bytes: &[u8]) {
        let length = if kind == command::FLUSH { 0 } else { 512 };
        let header = RequestHeader { flags: 0, command: kind, cookie, offset: 0, length };
        self.kernels[at].write_all(&header.encode()).unwrap();
        self.kernels[at].write_all(bytes).unwrap();
    }

    /// What has been answered on a connection: so many bytes, or its end.
    fn answered(&mut self, at: usize) -> std::io::Result<usize> {
        self.kernels[at].read(&mut [0; 4096])
    }
}

/// It stayed with its memory and its bell for as long as the daemon lived.
#[test]
fn it_is_over_when_its_connections_and_who_makes_them_are_gone() {
    let mut rig = rig(2);
    rig.kernels.clear();
    rig.turns();
    assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
    assert!(!rig.is_over(), "others may come");
    // They are on their way when the last who could bring some is gone: a device that is left to the next process keeps them.
    rig.connect(2);
    let (arrive, bell) = rig.worker.take().unwrap();
    drop(arrive);
    rig.turns();
    rig.ask(1, command::WRITE, 1, &[1; 512]);
    rig.turns();
    assert_eq!(rig.answered(1).unwrap(), 16);
    assert!(!rig.is_over(), "they are served");
    rig.kernels.clear();
    bell.ring();
    rig.turns();
    assert!(!rig.is_over(), "a thread apart has the bell, and would not close it");
    drop(bell);
    rig.turns();
    assert!(rig.is_over());
    assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
    assert!(rig.ordered.try_recv().is_err(), "nobody is there any more who would order anything");
    rig.turns();
}

/// The engine's answer finds it, however late that comes.
#[test]
fn it_is_not_over_while_a_request_of_it_is_inside() {
    let mut shard = shards::empty(ReactorKind::Auto);
    let limits =
        ThrottleLimits { latency: Duration::from_millis(300), ..ThrottleLimits::default() };
    let memory = Box::new(MemoryDevice::new(SIZE, 512).unwrap());
    let device = Box::new(ThrottleDevice::new(memory, Throttle::new(limits)));
    let index = shards::serve(&mut shard, Mode::WriteAround, device);
    let mut rig = rig_on(1, (shard, index));
    let free = || shared_memory().unwrap().borrow().pool.free_count();
    let all = free();
    rig.ask(0, command::READ, 1, &[]);
    forebay_testing::wait_for("it has its memory", || {
        rig.server.turn(Some(Duration::from_millis(1))).unwrap();
        free() < all
    });
    rig.kernels.clear();
    rig.worker = None;
    forebay_testing::wait_for("it is over", || {
        rig.server.turn(Some(Duration::from_millis(1))).unwrap();
        rig.is_over()
    });
    assert_eq!(free(), all, "its answer gave it back");
}

/// The pool of each took 34 MiB of addresses, and each connection's room its own (F1).
#[test]
fn volumes_that_come_and_go_have_the_memory_of_those_before() {
    let rooms = || shared_memory().unwrap().borrow().rooms.len();
    let memory = std::rc::Rc::as_ptr(&shared_memory().unwrap());
    for _ in 0..3 {
        let mut rig = rig(3);
        assert_eq!(rooms(), 0);
        rig.kernels.clear();
        rig.worker = None;
        rig.turns();
        assert!(rig.is_over());
        assert_eq!((rooms(), std::rc::Rc::as_ptr(&shared_memory().unwrap())), (3, memory));
    }
}

#[test]
fn each_connection_has_its_answers() {
    let mut rig = rig(3);
    for at in [2, 0, 1] {
        rig.ask(at, command::WRITE, at as u64, &[at as u8; 512]);
        rig.turns();
        assert_eq!(rig.answered(at).unwrap(), 16);
        rig.ask(at, command::FLUSH, 7, &[]);
        rig.turns();
        assert_eq!(rig.answered(at).unwrap(), 16);
    }
    assert!(rig.ordered.try_recv().is_err(), "nothing was lost");
}

/// The kernel took a connection for dead on which a write was still to be read, and sent it again on the other one. Answered there,
/// it could be overwritten, and then the first copy would be read (D4).
#[test]
fn a_second_copy_is_not_taken_while_the_first_may_still_come() {
    let mut rig = rig(2);
    rig.ask(0, command::WRITE, 1, &[1; 512]);
    rig.kernels[0].shutdown(std::net::Shutdown::Both).unwrap();
    rig.ask(1, command::WRITE, 1, &[1; 512]);
    rig.turns();
    assert_eq!(rig.answered(1).unwrap(), 0, "the end, and no answer");
    assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
    assert!(rig.ordered.try_recv().is_err(), "once for all connections");
}

/// What came before a connection was dead is no second copy: it is finished, and the device's connections end together.
#[test]
fn connections_end_together_when_what_they_have_is_done() {
    let mut rig = rig(2);
    rig.ask(1, command::WRITE, 1, &[1; 512]);
    rig.turns();
    rig.kernels[0].shutdown(std::net::Shutdown::Both).unwrap();
    rig.turns();
    assert_eq!(rig.answered(1).unwrap(), 16);
    assert_eq!(rig.answered(1).unwrap(), 0);
    assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
}
