// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A kernel that is a socket: what is read of it, and how much is under way.

use super::*;
use crate::fuse::files::FuseVolume;
use crate::nbd::listen::NbdFrontEnd;
use crate::server::Server;
use crate::shards::{self, Gate};
use forebay::io::ReactorKind;
use forebay_core::format::superblock::Mode;
use forebay_testing::Random;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

const SIZE: u64 = 16 << 20;
const READ: u32 = 15;
const WRITE: u32 = 16;
/// As long as a socket's message may be.
const EACH: u64 = 128 << 10;

/// The kernel's end.
struct Kernel(OwnedFd);

impl Kernel {
    /// Asks for bytes at an offset, or gives some; false: not now.
    fn ask(&self, what: u32, node: u64, offset: u64, bytes: &[u8]) -> bool {
        let given = if what == WRITE { bytes } else { &[] };
        let mut said = Vec::new();
        said.extend((80 + given.len() as u32).to_ne_bytes());
        said.extend(what.to_ne_bytes());
        said.extend(offset.to_ne_bytes()); // what it is known by
        said.extend(node.to_ne_bytes());
        said.extend([0; 16 + 8]);
        said.extend(offset.to_ne_bytes());
        said.extend((bytes.len() as u32).to_ne_bytes());
        said.extend([0; 20]);
        said.extend(given);
        match rustix::io::write(&self.0, &said) {
            Ok(count) => count == said.len(),
            Err(error) => {
                assert!(matches!(error, Errno::AGAIN | Errno::NOBUFS), "{error}");
                false
            }
        }
    }

    /// The next reply: of what, and its bytes.
    fn reply(&self) -> Option<(u64, Vec<u8>)> {
        let mut reply = vec![0; EACH as usize + 4096];
        let count = rustix::io::read(&self.0, &mut reply).ok()?;
        assert_eq!(reply[4..8], [0; 4], "no error");
        let offset = u64::from_ne_bytes(reply[8..16].try_into().unwrap());
        Some((offset, reply[16..count].to_vec()))
    }
}

/// A volume on a device behind a gate.
fn gated(gate: &Gate, reactor: ReactorKind) -> (Server, Kernel, u64) {
    let mut shard = shards::empty(reactor);
    let index = shards::serve(&mut shard, Mode::WriteAround, gate.device(SIZE));
    let (name, uuid) = ("v".to_owned(), [7; 16]);
    let volume =
        FuseVolume { index, uuid, name, size_bytes: SIZE, logical_block: 512, discards: true };
    let node = volume.node();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let bell = Arc::new(Bell::new().unwrap());
    let files = Files::new(vec![volume]);
    let front_end = FuseFrontEnd::new(Channel::of(ours), files, bell, true).unwrap();
    let mut server = Server::new(shard);
    server.add(Box::new(front_end)).unwrap();
    (server, Kernel(theirs), node)
}

fn turn(server: &mut Server) {
    server.turn(Some(Duration::ZERO)).unwrap();
}

#[test]
fn front_ends_of_one_loop_have_the_same_memory_one_beside_and_after_the_other() {
    let (first, second) = (shared_pool().unwrap(), shared_pool().unwrap());
    assert!(Rc::ptr_eq(&first, &second));
    let (run, _) = first.borrow_mut().take_share(0, REQUEST_BLOCKS).unwrap();
    let pool = Rc::as_ptr(&first);
    drop(first);
    second.borrow_mut().give(run);
    drop(second);
    assert_eq!(Rc::as_ptr(&shared_pool().unwrap()), pool);
}

/// Two thirds of 4 MiB were all that a device could have under way, and a disk wrote, and read, a quarter less than by itself. Where there are no NBD
/// clients to have memory of it is still so.
#[test]
fn more_is_under_way_at_a_slow_device_than_there_is_memory_of_fuse() {
    let mut random = Random(7);
    let content: Vec<u8> = (0..SIZE / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    let part = |at: u64| &content[(at * EACH) as usize..][..EACH as usize];
    let count = SIZE / EACH;
    for (reactor, has_clients) in
        [(ReactorKind::Auto, false), (ReactorKind::Auto, true), (ReactorKind::Threads, true)]
    {
        let clients = has_clients.then(|| NbdFrontEnd::new(Vec::new(), Rc::default()).unwrap());
        let gate = Gate::default();
        let (mut server, kernel, node) = gated(&gate, reactor);
        for _ in 0..3 {
            let (mut said, mut idle) = (0, 0);
            while idle < 50 {
                let is_taken = said < count && kernel.ask(WRITE, node, said * EACH, part(said));
                said += u64::from(is_taken);
                turn(&mut server);
                idle = if is_taken { 0 } else { idle + 1 };
            }
            let (waiting, most) = (gate.waiting(), POOL_BYTES as u64);
            let is_as_wanted = if has_clients { waiting > 2 * most } else { waiting < most };
            assert!(is_as_wanted, "{waiting} bytes are under way; clients: {has_clients}");
            gate.open(true);
            let mut answered = 0;
            forebay_testing::wait_for("all is written", || {
                said += u64::from(said < count && kernel.ask(WRITE, node, said * EACH, part(said)));
                turn(&mut server);
                answered += std::iter::from_fn(|| kernel.reply()).count() as u64;
                answered == count
            });
            gate.open(false);
        }
        for at in 0..count {
            assert!(kernel.ask(READ, node, at * EACH, part(at)));
            let mut reply = None;
            forebay_testing::wait_for("it is read", || {
                turn(&mut server);
                reply = kernel.reply();
                reply.is_some()
            });
            assert!(reply.unwrap() == (at * EACH, part(at).to_vec()), "{at}");
        }
        drop(clients);
    }
}
