// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The front end: sockets, each for one volume and one virtual machine at a time.
//!
//! # Invariants
//!
//! - **F1** A socket has one device at a time. One who comes while another is connected is sent
//!   away; one who comes while a device ends waits until it is gone (D2 of `device.rs`).
//! - **F2** The place of a machine that the program before left is its own: nobody is taken in before it has come.

use super::blk::Disk;
use super::carried::Carried;
use super::channel::Channel;
use super::device::{Device, Names};
use crate::carried::{CarriedError, Handed};
use crate::frontend::{FrontEnd, Place};
use crate::nbd::pool::Pool;
use crate::passage::Passage;
use forebay::io::{ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::limits::REQUEST_BLOCKS_MAX;
use forebay_core::units::VolumeIndex;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
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
    pub is_connected: RefCell<Vec<bool>>,
    /// Sockets whose volumes have come since: they are behind the others from the next turn on.
    pub coming: RefCell<Vec<Socket>>,
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
    /// Where that is.
    path: String,
    device: Option<Device>,
    /// Comes when the device is gone.
    next: Option<OwnedFd>,
    /// The reactor was asked for one more.
    is_accepting: bool,
}

impl Seat {
    fn of(socket: Socket) -> Seat {
        let address = socket.listener.local_addr().ok();
        let path = address.as_ref().and_then(|it| it.as_pathname());
        let path = path.map_or_else(String::new, |path| path.display().to_string());
        Seat { socket, path, device: None, next: None, is_accepting: false }
    }

    /// The next one sits down, if there is one and the place is free.
    fn take_next(&mut self, names: Names) -> Option<&mut Device> {
        if self.device.is_some() {
            return None;
        }
        let channel = Channel::new(self.next.take()?);
        let device = Device::new(channel, names, self.socket.disk.clone(), self.socket.volume);
        Some(self.device.insert(device))
    }
}

/// The front end.
pub struct VhostFrontEnd {
    place: Place,
    sockets: Vec<Seat>,
    pool: Pool,
    watch: Rc<Watch>,
    passage: Rc<Passage>,
    /// Who is looked at first in a turn.
    first: usize,
    is_stopping: bool,
}

impl VhostFrontEnd {
    /// A front end on these sockets, at most [`SOCKET_COUNT_MAX`].
    pub fn new(sockets: Vec<Socket>) -> io::Result<VhostFrontEnd> {
        let is_connected = RefCell::new(vec![false; sockets.len()]);
        let watch = Rc::new(Watch { is_connected, ..Watch::default() });
        Ok(VhostFrontEnd {
            place: Place(0),
            sockets: sockets.into_iter().map(Seat::of).collect(),
            pool: Pool::new(POOL_BYTES)?.among(SOCKET_COUNT_MAX, REQUEST_BLOCKS_MAX),
            watch,
            passage: Rc::new(Passage::of::<Carried>()),
            first: 0,
            is_stopping: false,
        })
    }

    /// What happens, as of the last turn of the loop.
    pub fn watch(&self) -> Rc<Watch> {
        Rc::clone(&self.watch)
    }

    /// By which machines leave for the next program, and come from the one before.
    pub fn passage(&self) -> Rc<Passage> {
        Rc::clone(&self.passage)
    }

    fn name(&self, socket: usize, what: u64) -> u64 {
        user_data(self.place.source(), (socket as u64) << 16 | what)
    }

    fn accept(&mut self, at: usize, shard: &mut Shard) {
        let may = !self.is_stopping && !self.passage.is_expecting(); // F2
        if may && !self.sockets[at].is_accepting {
            self.sockets[at].is_accepting = true;
            let fd = self.sockets[at].socket.listener.as_raw_fd();
            shard.reactor.submit(ReactorOp::Accept { fd }, self.name(at, ACCEPT));
        }
    }

    fn accepted(&mut self, at: usize, result: i32, shard: &mut Shard) {
        self.sockets[at].is_accepting = false;
        if let Some(socket) = shard.reactor.accepted(result) {
            let it = &mut self.sockets[at];
            if let Some(device) = &mut it.device {
                // The end of the one before may be there, and not heard yet.
                device.hear_end(shard, &mut self.pool);
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
        if self.is_stopping {
            return;
        }
        let names = self.names(at);
        let who = self.sockets[at].next.as_ref().map(process_of).unwrap_or_default();
        let Some(device) = self.sockets[at].take_next(names) else { return };
        device.start(shard, &mut self.pool);
        self.tell(at, format!("{who} is connected"), false);
    }

    fn names(&self, at: usize) -> Names {
        Names { place: self.place, device: at as u32 }
    }

    /// Machines that the program before left go on.
    fn come(&mut self, handed: Handed, shard: &mut Shard) {
        let passage = Rc::clone(&self.passage);
        let taken = handed.take(|descriptors, carried: Carried| {
            if let Err(error) = self.take(descriptors, &carried, shard) {
                let Carried { name, socket, .. } = carried;
                passage.tell(format!(
                    "{name}: vhost-user {socket}: a virtual machine cannot go on: {error}"
                ));
            }
        });
        if let Err((count, error)) = taken {
            passage.tell(format!("virtual machines that cannot go on: {count}; {error}"));
        }
    }

    fn take(
        &mut self,
        descriptors: Vec<OwnedFd>,
        carried: &Carried,
        shard: &mut Shard,
    ) -> Result<(), CarriedError> {
        let volume = self.passage.index(carried.volume);
        let volume = volume.ok_or(CarriedError::Served("the volume is not served any more"))?;
        let at = self.sockets.iter().position(|it| it.path == carried.socket);
        let at = at.ok_or(CarriedError::Served("its socket is not listened on any more"))?;
        let names = self.names(at);
        let it = &mut self.sockets[at];
        if it.socket.volume != volume {
            return Err(CarriedError::Served("its socket is another volume's now"));
        }
        if it.device.is_some() {
            return Err(CarriedError::Served("another is connected"));
        }
        let served = (&it.socket.disk, volume);
        let device = Device::of_carried(descriptors, names, served, carried)?;
        let device = it.device.insert(device);
        let who = process_of(device.socket());
        device.start(shard, &mut self.pool);
        self.tell(at, format!("{who} stays connected"), false);
        Ok(())
    }

    /// Who is connected, and has come to rest, leaves.
    fn leave(&mut self, at: usize, shard: &mut Shard) {
        let names = self.names(at);
        let it = &mut self.sockets[at];
        // Of whom nothing was heard.
        it.take_next(names);
        if let Some(device) = &mut it.device {
            device.leave(shard);
        }
        // As long as somebody may come in it may be asked whether it has ended.
        let may_go = !it.is_accepting;
        let Some(device) = it.device.take_if(|device| may_go && device.rests()) else { return };
        let told = |why: &dyn std::fmt::Display| {
            format!("vhost-user {}: a virtual machine's connection is closed: {why}", it.path)
        };
        let Some(lasting) = self.passage.lasting(it.socket.volume) else {
            return self.passage.tell(told(&"its volume goes"));
        };
        let carried = device.into_carried(lasting, &it.path);
        let left = carried.and_then(|(fds, carried)| self.passage.add(fds, &carried));
        if let Err(error) = left {
            self.passage.tell(told(&error));
        }
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
        self.watch.is_connected.borrow_mut()[at] = device.is_open();
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

fn process_of(socket: impl AsFd) -> String {
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
            device.event(queue, what, result, shard, &mut self.pool);
        }
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (at, request) = ((answer.cookie >> 16) as usize, (answer.cookie & 0xFFFF) as usize);
        if let Some(device) = self.sockets.get_mut(at).and_then(|it| it.device.as_mut()) {
            device.answered(request, answer, shard, &mut self.pool);
        }
    }

    fn turn(&mut self, shard: &mut Shard) {
        for socket in self.watch.coming.take() {
            self.sockets.push(Seat::of(socket));
            self.watch.is_connected.borrow_mut().push(false);
        }
        if let Some(handed) = self.passage.take_coming() {
            self.come(handed, shard);
        }
        let count = self.sockets.len();
        for step in 0..count {
            let at = (self.first + step) % count;
            let size = shard.engine().volume_bytes(self.sockets[at].socket.volume);
            let it = &mut self.sockets[at];
            if let Some(device) = &mut it.device {
                if let Some(size) = size {
                    device.resize(size);
                }
                device.turn(shard, &mut self.pool);
            }
            if let Some(size) = size {
                it.socket.disk.resize(size);
            }
            self.settle(at, shard);
            self.accept(at, shard);
        }
        self.first = (self.first + 1) % count.max(1);
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        self.is_stopping = true;
        let is_leaving = self.passage.is_leaving();
        let mut is_finished = true;
        for at in 0..self.sockets.len() {
            if self.sockets[at].is_accepting {
                // In each turn, since it may come too early.
                shard.reactor.cancel(self.name(at, ACCEPT));
                // Who comes in now is not to be lost.
                is_finished &= !is_leaving;
            }
            if is_leaving {
                self.leave(at, shard);
                continue;
            }
            self.sockets[at].next = None;
            if let Some(device) = &mut self.sockets[at].device {
                device.stop(shard);
            }
        }
        let devices = || self.sockets.iter().filter_map(|it| it.device.as_ref());
        self.passage.stay(self.place, devices().filter(|it| it.is_open()).count());
        is_finished && devices().next().is_none()
    }
}
