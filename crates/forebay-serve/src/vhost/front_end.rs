// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The front end: sockets, each for one volume and one virtual machine at a time.
//!
//! # Invariants
//!
//! - **F1** A socket has one device at a time. One who comes while another is connected is sent
//!   away; one who comes while a device ends waits until it is gone (D2 of `device.rs`).

use super::blk::Disk;
use super::device::{Device, Names};
use super::requests::Memory;
use crate::frontend::{FrontEnd, Place};
use crate::nbd::pool::Pool;
use forebay::io::{ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::units::VolumeIndex;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::rc::Rc;

/// Sockets at most.
pub const SOCKET_COUNT_MAX: usize = 60;
/// Bytes for payload, over all devices; the longest piece is 1 MiB and a block.
const POOL_BYTES: usize = 32 << 20;
/// What nobody has asked for is forgotten beyond this.
const NEWS_COUNT_MAX: usize = 64;
const ACCEPT: u64 = 0;

/// Where a virtual machine comes in, and what it finds.
#[derive(Debug)]
pub struct Socket {
    /// Where.
    pub listener: UnixListener,
    /// The volume.
    pub volume: VolumeIndex,
    /// The disk that is made of it.
    pub disk: Disk,
}

/// Something that somebody should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// By its place in the list of sockets.
    pub socket: usize,
    /// What.
    pub text: String,
    /// It is not as it should be.
    pub is_bad: bool,
}

/// What is shared with whoever tells how things are.
#[derive(Debug, Default)]
pub struct Watch {
    /// By socket: a virtual machine is connected.
    pub is_connected: Vec<Cell<bool>>,
    /// What has happened since it was taken.
    pub news: RefCell<VecDeque<News>>,
}

/// Bytes of memory the front end takes at most, by part.
pub fn memory_parts(sockets: usize) -> [(&'static str, u64); 2] {
    let devices = sockets as u64 * Device::memory_bytes();
    [("vhost-user devices", devices), ("vhost-user payload", POOL_BYTES as u64)]
}

struct Seat {
    socket: Socket,
    device: Option<Device>,
    /// Comes when the device is gone.
    next: Option<OwnedFd>,
}

/// The front end.
pub struct VhostFrontEnd {
    place: Place,
    sockets: Vec<Seat>,
    memory: Memory,
    watch: Rc<Watch>,
    /// Who is looked at first in a turn.
    first: usize,
    is_stopping: bool,
}

impl VhostFrontEnd {
    /// A front end on these sockets, at most [`SOCKET_COUNT_MAX`].
    pub fn new(sockets: Vec<Socket>) -> io::Result<VhostFrontEnd> {
        let is_connected = sockets.iter().map(|_| Cell::new(false)).collect();
        let watch = Rc::new(Watch { is_connected, news: RefCell::default() });
        let open = |socket| Seat { socket, device: None, next: None };
        Ok(VhostFrontEnd {
            place: Place(0),
            sockets: sockets.into_iter().map(open).collect(),
            memory: Memory::new(Pool::new(POOL_BYTES)?),
            watch,
            first: 0,
            is_stopping: false,
        })
    }

    /// What happens, as of the last turn of the loop.
    pub fn watch(&self) -> Rc<Watch> {
        Rc::clone(&self.watch)
    }

    fn name(&self, socket: usize, what: u64) -> u64 {
        user_data(self.place.source(), (socket as u64) << 16 | what)
    }

    fn accept(&mut self, at: usize, shard: &mut Shard) {
        if !self.is_stopping {
            let fd = self.sockets[at].socket.listener.as_raw_fd();
            shard.reactor.submit(ReactorOp::Accept { fd }, self.name(at, ACCEPT));
        }
    }

    fn accepted(&mut self, at: usize, result: i32, shard: &mut Shard) {
        if let Some(socket) = shard.reactor.accepted(result) {
            let it = &mut self.sockets[at];
            if let Some(device) = &mut it.device {
                // The end of the one before may be there, and not heard yet.
                device.hear_end(shard, &mut self.memory);
            }
            let is_taken = it.device.as_ref().is_some_and(Device::is_open) || it.next.is_some();
            if is_taken {
                let who = process_of(&socket);
                self.tell(at, format!("{who} was sent away: another is connected"), true);
            } else {
                it.next = Some(socket);
                self.connect(at, shard);
            }
        }
        self.accept(at, shard);
    }

    fn connect(&mut self, at: usize, shard: &mut Shard) {
        let it = &mut self.sockets[at];
        if self.is_stopping || it.device.is_some() {
            return;
        }
        let Some(socket) = it.next.take() else { return };
        let who = process_of(&socket);
        let names = Names { place: self.place, device: at as u32 };
        let mut device = Device::new(socket, names, it.socket.disk.clone(), it.socket.volume);
        device.start(shard, &mut self.memory);
        it.device = Some(device);
        self.tell(at, format!("{who} is connected"), false);
    }

    fn tell(&self, socket: usize, text: String, is_bad: bool) {
        let mut news = self.watch.news.borrow_mut();
        if news.len() < NEWS_COUNT_MAX {
            news.push_back(News { socket, text, is_bad });
        }
    }

    /// After anything that may have changed a device.
    fn settle(&mut self, at: usize, shard: &mut Shard) {
        let Some(device) = &mut self.sockets[at].device else { return };
        let news = std::mem::take(&mut device.news);
        self.watch.is_connected[at].set(device.is_open());
        if device.is_gone() {
            // The size may have changed under it.
            self.sockets[at].device = None;
        }
        for told in news {
            self.tell(at, told.text, told.is_bad);
        }
        self.connect(at, shard);
    }
}

fn process_of(socket: &OwnedFd) -> String {
    match rustix::net::sockopt::socket_peercred(socket) {
        Ok(peer) => format!("process {}", peer.pid.as_raw_nonzero()),
        Err(_) => "somebody".into(),
    }
}

impl FrontEnd for VhostFrontEnd {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        for at in 0..self.sockets.len() {
            self.accept(at, shard);
        }
    }

    fn event(&mut self, shard: &mut Shard, name: u64, result: i32) {
        let number = name & ((1 << 48) - 1);
        let (at, queue, what) =
            ((number >> 16) as usize, (number >> 8) as usize & 0xFF, number & 0xFF);
        if at >= self.sockets.len() {
            return;
        }
        if what == ACCEPT {
            return self.accepted(at, result, shard);
        }
        if let Some(device) = &mut self.sockets[at].device {
            device.event(queue, what, result, shard, &mut self.memory);
        }
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (at, request) = ((answer.cookie >> 16) as usize, (answer.cookie & 0xFFFF) as usize);
        if let Some(device) = self.sockets.get_mut(at).and_then(|it| it.device.as_mut()) {
            device.answered(request, answer, shard, &mut self.memory);
        }
    }

    fn turn(&mut self, shard: &mut Shard) {
        let count = self.sockets.len();
        for step in 0..count {
            let at = (self.first + step) % count;
            let size = shard.engine().volume_bytes(self.sockets[at].socket.volume);
            let it = &mut self.sockets[at];
            if let Some(device) = &mut it.device {
                if let Some(size) = size {
                    device.resize(size);
                }
                device.turn(shard, &mut self.memory);
            }
            if let Some(size) = size {
                it.socket.disk.resize(size);
            }
            self.settle(at, shard);
        }
        self.first = (self.first + 1) % count.max(1);
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        if !self.is_stopping {
            self.is_stopping = true;
            for at in 0..self.sockets.len() {
                shard.reactor.cancel(self.name(at, ACCEPT));
            }
        }
        for it in &mut self.sockets {
            it.next = None;
            if let Some(device) = &mut it.device {
                device.stop(shard);
            }
        }
        self.sockets.iter().all(|it| it.device.is_none())
    }
}
