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

const UUID: [u8; 16] = [1; 16];

/// A front end to which something happens when it is at rest.
struct Disturbed {
    front_end: NbdDeviceFrontEnd,
    disturb: Disturbance,
}

type Disturbance = Rc<RefCell<Option<Box<dyn FnOnce()>>>>;

impl FrontEnd for Disturbed {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.front_end.start(place, shard);
    }

    fn event(&mut self, shard: &mut Shard, user_data: u64, result: i32) {
        self.front_end.event(shard, user_data, result);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        self.front_end.answer(shard, answer);
    }

    fn turn(&mut self, shard: &mut Shard) {
        self.front_end.turn(shard);
    }

    fn is_over(&self) -> bool {
        self.front_end.is_over()
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        let mut connections = self.front_end.slots[0].connections.iter().flatten();
        if connections.all(Connection::is_at_rest)
            && let Some(disturb) = self.disturb.take()
        {
            disturb();
        }
        self.front_end.stop(shard)
    }
}

/// A volume whose device has so many connections; the kernel's ends of them.
struct Rig {
    server: Server,
    index: VolumeIndex,
    kernels: Vec<UnixStream>,
    ordered: Receiver<Order>,
    passage: Rc<Passage>,
    disturb: Disturbance,
    /// What the thread has that makes devices.
    worker: Option<(Sender<Arrival>, Arc<Bell>)>,
}

fn rig(connections: usize) -> Rig {
    rig_on(connections, shard(ReactorKind::Auto, SIZE))
}

fn rig_on(connections: usize, shard: (Shard, VolumeIndex)) -> Rig {
    let mut rig = program(connections, shard, false);
    rig.connect(connections);
    rig.turns();
    rig
}

/// One that has no connections yet; those of a program before are expected, or not.
fn program(connections: usize, (shard, index): (Shard, VolumeIndex), is_expected: bool) -> Rig {
    let volume =
        DeviceVolume { index, uuid: UUID, size_bytes: SIZE, logical_block: 512, lends: false };
    let bell = Arc::new(Bell::new().unwrap());
    let (arrive, arrivals) = channel();
    let (orders, ordered) = channel();
    let session = session(&volume, connections);
    let slots = vec![Slot { volume: index, session, connections: Vec::new(), is_expected }];
    let passage = Rc::new(super::super::attach::passage());
    let (rings, way) = (Arc::clone(&bell), Rc::clone(&passage));
    let front_end = NbdDeviceFrontEnd::new(slots, rings, arrivals, orders, way).unwrap();
    let mut server = Server::new(shard);
    let disturb = Disturbance::default();
    server.add(Box::new(Disturbed { front_end, disturb: Rc::clone(&disturb) })).unwrap();
    let (kernels, worker) = (Vec::new(), Some((arrive, bell)));
    Rig { server, index, kernels, ordered, passage, disturb, worker }
}

impl Rig {
    /// Another program goes on, which has so many connections for what it makes. What was left to it, as the test changes that.
    fn upgraded(
        self,
        connections: usize,
        is_expected: bool,
        change: impl FnOnce(Option<Handed>) -> Option<Handed>,
    ) -> Rig {
        let lasting = vec![(self.index, UUID)];
        self.passage.leave(lasting.clone()).unwrap();
        let (_unfinished, shard) = self.server.stop(forebay_testing::PATIENCE).unwrap();
        assert!(self.ordered.try_recv().is_err(), "nothing is lost by that");
        let left = change(self.passage.left());
        let mut next = program(connections, (shard, self.index), is_expected);
        next.kernels = self.kernels;
        self.passage.told().into_iter().for_each(|text| next.passage.tell(text));
        next.passage.come(left, lasting);
        next.turns();
        next
    }

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

/// Whatever had come of a request, or not, when one program left it to the next: it is answered once, and nothing is lost or sent
/// again. The number that a device has connections of stays, whatever the next program makes others with.
#[test]
fn over_an_upgrade_a_device_keeps_its_connections() {
    for (count, others) in [(1, 3), (3, 1)] {
        let mut rig = rig(count);
        for at in 0..count {
            rig.ask(at, command::WRITE, 1, &[7; 200]);
        }
        rig.turns();
        for round in 0..4 {
            let last = count - 1;
            // The rest of it, and a half of the next, before anybody looks.
            rig.kernels[last].write_all(&[7; 312]).unwrap();
            rig.ask(last, command::WRITE, 2 + round, &[7; 200]);
            rig = rig.upgraded(others, true, |left| {
                let left = left.unwrap();
                assert_eq!((left.count, left.descriptors.len()), (1, count));
                let expected = super::super::carried::Expected::of(&left);
                assert!(expected.has(UUID) && !expected.has([2; 16]));
                Some(left)
            });
            assert_eq!(rig.answered(last).unwrap(), 16, "one answer");
            for at in 0..last {
                let error = rig.answered(at).unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "it is not all there yet");
            }
        }
        for at in 0..count {
            rig.kernels[at].write_all(&[7; 312]).unwrap();
            rig.turns();
            assert_eq!(rig.answered(at).unwrap(), 16);
        }
        assert!(rig.ordered.try_recv().is_err(), "nothing was lost");
        assert_eq!(rig.passage.told(), [""; 0]);
        rig.ask(0, command::READ, 9, &[]);
        rig.turns();
        assert_eq!(rig.answered(0).unwrap(), 16 + 512);
        // And they are lost as ever.
        rig.kernels[0].shutdown(std::net::Shutdown::Both).unwrap();
        rig.turns();
        assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
    }
}

/// What comes on the others might be a second copy (D4): the next program takes the device over.
#[test]
fn where_a_connection_is_dead_none_goes_along() {
    // Before they rest, or when they do.
    for is_late in [false, true] {
        let mut rig = rig(2);
        rig.ask(0, command::WRITE, 1, &[1; 200]);
        rig.turns();
        let dying = rig.kernels[0].try_clone().unwrap();
        let die = move || dying.shutdown(std::net::Shutdown::Both).unwrap();
        match is_late {
            false => die(),
            true => drop(rig.disturb.replace(Some(Box::new(die)))),
        }
        rig.ask(1, command::WRITE, 1, &[1; 200]);
        let mut rig = rig.upgraded(2, false, |left| {
            assert!(left.is_none());
            left
        });
        assert!(!matches!(rig.answered(1), Ok(1..)), "no answer");
        rig.kernels[1].write_all(b"to nobody").unwrap_err();
        assert!(rig.ordered.try_recv().is_err());
        let text = "a kernel NBD device loses its connections, and is taken over as after a kill: the \
                    kernel has ended one (D4)";
        assert_eq!(rig.passage.told(), vec![text; usize::from(is_late)]);
    }
}

/// Somebody took the device away, or the kernel took its connections for dead, while the next program began; it served others, and failed.
/// The program before did what it had of the first copies, over what was written since.
#[test]
fn what_the_kernel_has_ended_meanwhile_is_not_done() {
    let rig = rig(1);
    let (mut kernel, dying) =
        (rig.kernels[0].try_clone().unwrap(), rig.kernels[0].try_clone().unwrap());
    // Once it rests, all of it is only received, and not even that.
    rig.disturb.replace(Some(Box::new(move || {
        let header =
            RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset: 0, length: 512 };
        kernel.write_all(&[&header.encode()[..], &[1; 512]].concat()).unwrap();
    })));
    let mut rig = rig.upgraded(1, true, |left| {
        dying.shutdown(std::net::Shutdown::Both).unwrap();
        left
    });
    assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
    let text =
        "a kernel NBD device is taken over as after a kill: the kernel has ended its connections";
    assert_eq!(rig.passage.told(), [text]);
    rig.connect(1);
    rig.ask(0, command::READ, 3, &[]);
    rig.turns();
    let mut bytes = [0xFF; 16 + 512];
    rig.kernels[0].read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[16..], [0; 512], "nothing was written");
}

/// It was told of what is so of several connections, which it has not: each upgrade took that for a change, and its connection away.
#[test]
fn a_device_with_one_connection_keeps_it_where_others_have_several() {
    let mut rig = program(3, shard(ReactorKind::Auto, SIZE), false);
    rig.connect(1);
    rig.turns();
    for round in 0..3 {
        rig = rig.upgraded(3, true, |left| left);
        rig.ask(0, command::WRITE, round, &[1; 512]);
        rig.turns();
        assert_eq!(rig.answered(0).unwrap(), 16);
        assert_eq!(rig.passage.told(), [""; 0]);
    }
}

#[test]
fn what_was_expected_and_does_not_come_is_lost() {
    let text = "kernel NBD devices that are taken over as after a kill: 1; ";
    let is_cut = |left: &mut Handed| {
        let end = left.message.metadata().unwrap().len();
        left.message.set_len(end - 4).unwrap();
    };
    let lacks_one = |left: &mut Handed| drop(left.descriptors.pop());
    for change in [&is_cut as &dyn Fn(&mut Handed), &lacks_one] {
        let rig = rig(2);
        let mut rig = rig.upgraded(2, true, |left| {
            let mut left = left.unwrap();
            change(&mut left);
            Some(left)
        });
        assert!(matches!(rig.ordered.try_recv(), Ok(Order::Lost(0))));
        assert!(rig.ordered.try_recv().is_err());
        let told = rig.passage.told();
        assert!(told.len() == 1 && told[0].starts_with(text), "{told:?}");
        assert_eq!((rig.answered(0).unwrap(), rig.answered(1).unwrap()), (0, 0));
        // Others in their place.
        rig.connect(2);
        rig.ask(1, command::WRITE, 1, &[1; 512]);
        rig.turns();
        assert_eq!(rig.answered(1).unwrap(), 16);
    }
}

/// Its device was gone when the next program looked, and is made anew.
#[test]
fn what_nobody_expects_is_closed() {
    let rig = rig(1);
    let mut rig = rig.upgraded(1, false, |left| left);
    let text =
        "a kernel NBD device is taken over as after a kill: the volume has no device any more";
    assert_eq!(rig.passage.told(), [text]);
    assert_eq!(rig.answered(0).unwrap(), 0);
    assert!(rig.ordered.try_recv().is_err());
}
