// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel, as far as it matters which connection a request comes on.

use super::super::attach::session;
use super::*;
use crate::attach::DeviceVolume;
use crate::nbd::wire::{RequestHeader, command};
use crate::server::Server;
use crate::shards::shard;
use forebay::io::ReactorKind;
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
}

fn rig(connections: usize) -> Rig {
    let (shard, index) = shard(ReactorKind::Auto, SIZE);
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
    let pair = |_| {
        let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
        rustix::net::socketpair(unix, stream, SocketFlags::CLOEXEC, None).unwrap()
    };
    let (sockets, kernels): (Vec<OwnedFd>, Vec<OwnedFd>) = (0..connections).map(pair).unzip();
    arrive.send(Arrival { slot: 0, sockets }).unwrap();
    bell.ring();
    let kernels: Vec<UnixStream> = kernels.into_iter().map(UnixStream::from).collect();
    kernels.iter().for_each(|it| it.set_nonblocking(true).unwrap());
    let mut rig = Rig { server, kernels, ordered };
    rig.turns();
    rig
}

impl Rig {
    fn turns(&mut self) {
        for _ in 0..50 {
            self.server.turn(Some(Duration::from_millis(1))).unwrap();
        }
    }

    fn ask(&mut self, at: usize, kind: u16, cookie: u64, bytes: &[u8]) {
        let length = if bytes.is_empty() { 0 } else { 512 };
        let header = RequestHeader { flags: 0, command: kind, cookie, offset: 0, length };
        self.kernels[at].write_all(&header.encode()).unwrap();
        self.kernels[at].write_all(bytes).unwrap();
    }

    /// What has been answered on a connection: so many bytes, or its end.
    fn answered(&mut self, at: usize) -> std::io::Result<usize> {
        self.kernels[at].read(&mut [0; 4096])
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
