// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NBD front end: listeners, and the connections that came in by them.
//!
//! # Limits
//!
//! [`CONNECTION_COUNT_MAX`] connections. When all places are taken and one more comes, the oldest that has agreed on nothing for
//! [`AGREE_MAX`] makes room; where none has, the one that comes is closed. A connection that has agreed on an export is nobody's place but its own.

use super::carried::Carried;
use super::connection::{Connection, Names, RECEIVE, Room, SEND};
use super::export::{Export, Features, LogicalBlock};
use super::pool::{Pool, Shared};
use super::reply::STATUS_REPLY_BYTES_MAX;
use crate::carried::{CarriedError, Handed};
use crate::frontend::{FrontEnd, Place};
use crate::passage::Passage;
use forebay::io::{ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::units::{Tick, VolumeIndex};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::time::Duration;

/// Connections at once, over all listeners.
pub const CONNECTION_COUNT_MAX: usize = 68;
/// How long one may agree on nothing while others want its place.
pub const AGREE_MAX: Duration = Duration::from_secs(10);
/// Bytes for what is read, and for writes that wait, over all connections, and for block devices what those leave (`beside.rs`); the longest read is
/// 32 MiB and a block.
pub(super) const POOL_BYTES: usize = 34 << 20;
const _: () = assert!(POOL_BYTES >= super::wire::TRANSFER_BYTES_MAX as usize + 4096);
const ACCEPT: u64 = 0;

/// Where clients come in.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP port; only on loopback, since there is no TLS.
    Tcp(TcpListener),
}

impl Listener {
    fn fd(&self) -> RawFd {
        match self {
            Listener::Unix(listener) => listener.as_raw_fd(),
            Listener::Tcp(listener) => listener.as_raw_fd(),
        }
    }
}

/// How many connections each volume has, by its index.
pub type Counts = Rc<[Cell<u32>; VOLUME_COUNT_MAX]>;

/// The exports, shared with whoever attaches volumes.
pub type Exports = Rc<RefCell<Vec<(Export, VolumeIndex)>>>;

/// Bytes of memory the front end takes at most, by part.
pub fn memory_parts() -> [(&'static str, u64); 2] {
    let connections = CONNECTION_COUNT_MAX as u64 * Connection::memory_bytes();
    let transfers = (POOL_BYTES + STATUS_REPLY_BYTES_MAX) as u64;
    [("NBD connections", connections), ("NBD transfers", transfers)]
}

/// An export of a volume, with everything the protocol offers.
pub fn export(name: &str, size_bytes: u64, logical_block: u32) -> Export {
    Export {
        name: name.to_owned(),
        size_bytes,
        logical_block: match logical_block {
            4096 => LogicalBlock::Bytes4096,
            _ => LogicalBlock::Bytes512,
        },
        read_only: false,
        description: String::new(),
        features: Features::ALL,
    }
}

/// The front end.
pub struct NbdFrontEnd {
    place: Place,
    listeners: Vec<Listener>,
    exports: Exports,
    connections: Vec<Option<Connection>>,
    /// For each that there has been at once, the volume it counts for.
    counted: Vec<Option<VolumeIndex>>,
    /// Of connections that are gone.
    rooms: Vec<Room>,
    pool: Shared<Pool>,
    counts: Counts,
    /// Who came when all places were taken, and for each of whom another goes.
    coming: VecDeque<OwnedFd>,
    /// How many made room.
    silent_count: Rc<Cell<u64>>,
    /// How many came for whom nobody did.
    refused_count: Rc<Cell<u64>>,
    passage: Rc<Passage>,
    /// Listeners that take the next client.
    accepting_count: usize,
    /// They take no more.
    is_held: bool,
    is_stopping: bool,
}

impl NbdFrontEnd {
    /// A front end on these listeners.
    pub fn new(listeners: Vec<Listener>, exports: Exports) -> io::Result<NbdFrontEnd> {
        let mut connections = Vec::new();
        connections.resize_with(CONNECTION_COUNT_MAX, || None);
        let pool = Rc::new(RefCell::new(Pool::shared(POOL_BYTES, CONNECTION_COUNT_MAX)?));
        #[cfg(any(feature = "fuse", feature = "ublk"))]
        super::beside::lend(&pool);
        let place = Place(0);
        let counts = Rc::new(std::array::from_fn(|_| Cell::new(0)));
        let is_stopping = false;
        let rooms = Vec::with_capacity(CONNECTION_COUNT_MAX);
        Ok(NbdFrontEnd {
            place,
            listeners,
            exports,
            connections,
            counted: Vec::with_capacity(CONNECTION_COUNT_MAX),
            rooms,
            pool,
            counts,
            coming: VecDeque::new(),
            silent_count: Rc::default(),
            refused_count: Rc::default(),
            passage: Rc::new(Passage::of::<Carried>()),
            accepting_count: 0,
            is_held: false,
            is_stopping,
        })
    }

    fn names(&self, at: usize) -> Names {
        Names { place: self.place, connection: at as u32, owner: at as u32 }
    }

    fn accept(&mut self, listener: usize, shard: &mut Shard) {
        if self.is_stopping || self.is_held {
            return;
        }
        self.accepting_count += 1;
        let fd = self.listeners[listener].fd();
        let number = (listener as u64) << 8 | ACCEPT;
        let source = self.place.source();
        shard.reactor.submit(ReactorOp::Accept { fd }, user_data(source, number));
    }

    fn accepted(&mut self, listener: usize, result: i32, shard: &mut Shard) {
        self.accepting_count -= 1;
        if let Some(socket) = shard.reactor.accepted(result) {
            if matches!(self.listeners[listener], Listener::Tcp(_)) {
                // Replies are gathered here already.
                let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
            }
            self.connect(socket, shard);
        }
        self.accept(listener, shard);
    }

    /// A connection for which there is no room is closed at once: its client sees the end.
    fn connect(&mut self, socket: OwnedFd, shard: &mut Shard) {
        // Who came before has what is free.
        self.let_in(shard.now());
        if self.connections.iter().all(Option::is_some) && !self.make_room(shard) {
            self.refused_count.set(self.refused_count.get() + 1);
            return;
        }
        self.coming.push_back(socket);
        self.let_in(shard.now());
    }

    /// Those who wait have the places that are free.
    fn let_in(&mut self, now: Tick) {
        while !self.coming.is_empty()
            && let Some(at) = self.connections.iter().position(Option::is_none)
            && let Some(socket) = self.coming.pop_front()
        {
            let names = self.names(at);
            // No memory for one more: its client sees the end, too.
            let room = self.rooms.pop().map_or_else(Room::new, Ok);
            self.connections[at] = room.ok().map(|room| Connection::new(socket, names, room, now));
            self.counted.resize(self.counted.len().max(at + 1), None);
        }
    }

    /// The oldest that has agreed on nothing for long goes, if there is one. Its place is free when nothing of it is under way.
    fn make_room(&mut self, shard: &mut Shard) -> bool {
        let now = shard.now();
        let silent = |it: &&mut Connection| {
            it.agreeing_since().is_some_and(|since| now.since(since) >= AGREE_MAX.as_nanos() as u64)
        };
        let silent = self.connections.iter_mut().flatten().filter(silent);
        let Some(oldest) = silent.min_by_key(|it| it.agreeing_since().map(|since| since.0)) else {
            return false;
        };
        oldest.broken(shard, &mut self.pool.borrow_mut());
        self.silent_count.set(self.silent_count.get() + 1);
        true
    }

    fn sweep(&mut self, at: usize) {
        if let Some(gone) = self.connections[at].take_if(|connection| connection.is_gone()) {
            if let Some(name) = gone.unreadable() {
                let text = "an NBD connection is closed: what it had yet to receive cannot be read any more";
                self.passage.tell(format!("{name}: {text}"));
            }
            self.rooms.push(gone.into_room(&mut self.pool.borrow_mut()));
        }
    }

    fn turn_one(&mut self, at: usize, shard: &mut Shard) {
        if let Some(connection) = &mut self.connections[at] {
            connection.turn(&self.exports.borrow(), shard, &mut self.pool.borrow_mut());
            self.sweep(at);
        }
    }

    fn is_waiting(&self, at: usize) -> bool {
        self.connections[at].as_ref().is_some_and(Connection::is_waiting)
    }

    /// Where so many wait for memory of reads, the others give back what their clients do not receive (A1 and A4 of
    /// `connection/aside.rs`). The loop turns often enough for that if it waits for half a second at most.
    fn make_way(&mut self, waiting: usize, shard: &mut Shard) {
        if waiting == 0 {
            self.pool.borrow_mut().put_first(None);
            return;
        }
        let (now, pool) = (shard.now(), self.pool.borrow());
        let connections = self.connections.iter().enumerate();
        let overdue =
            connections.filter_map(|(at, it)| Some((it.as_ref()?.overdue_since(now, &pool)?, at)));
        let first = overdue.min().map(|(_, at)| at as u32);
        drop(pool);
        let mut may_go_on = self.pool.borrow_mut().put_first(first);
        for connection in self.connections.iter_mut().flatten() {
            if waiting > usize::from(connection.is_waiting()) {
                may_go_on |= connection.give_way(now, shard, &mut self.pool.borrow_mut());
            }
        }
        for at in 0..self.connections.len() {
            if may_go_on && self.is_waiting(at) {
                self.turn_one(at, shard);
            }
        }
    }

    fn accept_no_more(&self, shard: &mut Shard) {
        for listener in 0..self.listeners.len() {
            let number = (listener as u64) << 8 | ACCEPT;
            shard.reactor.cancel(user_data(self.place.source(), number));
        }
    }

    /// Whoever may still agree on an export is counted, and nobody else comes in.
    fn hold(&mut self, shard: &mut Shard) {
        if !std::mem::replace(&mut self.is_held, true) {
            self.accept_no_more(shard);
        }
        let connections = self.connections.iter().flatten();
        let agreeing = connections.filter(|it| it.volume().is_none() && !it.is_ending()).count();
        self.passage.note_agreeing(self.accepting_count + agreeing);
    }

    /// By which connections leave for the next program, and come from the one before.
    pub fn passage(&self) -> Rc<Passage> {
        Rc::clone(&self.passage)
    }

    /// Connections that the program before left go on.
    fn come(&mut self, handed: Handed) {
        let passage = Rc::clone(&self.passage);
        let taken = handed.take(|mut sockets, carried: Carried| {
            let Some(socket) = sockets.pop() else { return };
            if let Err(error) = self.take(socket, &carried) {
                let name = &carried.export_name;
                passage.tell(format!("{name}: an NBD connection cannot go on: {error}"));
            }
        });
        if let Err((count, error)) = taken {
            passage.tell(format!("NBD connections that cannot go on: {count}; {error}"));
        }
    }

    fn take(&mut self, socket: OwnedFd, carried: &Carried) -> Result<(), CarriedError> {
        let exports = self.exports.borrow();
        let volume = self.passage.index(carried.volume);
        let index = exports.iter().position(|export| Some(export.1) == volume);
        let index = index.ok_or(CarriedError::Served("the volume is not served any more"))?;
        let (export, volume) = &exports[index];
        let session = (carried.session(index, export)?, *volume);
        let free = self.connections.iter().position(Option::is_none);
        let at = free.ok_or(CarriedError::Served("there are too many connections"))?;
        let names = self.names(at);
        let room = self.rooms.pop().map_or_else(Room::new, Ok)?;
        let connection = Connection::of_carried(socket, names, room, session, carried)?;
        self.connections[at] = Some(connection);
        self.counted.resize(self.counted.len().max(at + 1), None);
        Ok(())
    }

    /// What is at rest leaves.
    fn carry(&mut self, at: usize) {
        let Some(connection) = self.connections[at].take_if(|it| it.is_at_rest()) else { return };
        let volume = connection.volume().expect("only transmissions rest");
        let Some(lasting) = self.passage.lasting(volume) else {
            return self.passage.tell("an NBD connection is closed: its volume goes".into());
        };
        let (socket, carried) = connection.into_carried(lasting, &mut self.pool.borrow_mut());
        if let Err(error) = self.passage.add(vec![socket], &carried) {
            let name = &carried.export_name;
            self.passage.tell(format!("{name}: an NBD connection is closed: {error}"));
        }
    }

    /// How many connections that had agreed on nothing for long made room for others.
    pub fn silent_count(&self) -> Rc<Cell<u64>> {
        Rc::clone(&self.silent_count)
    }

    /// How many were closed when they came, since all places were taken.
    pub fn refused_count(&self) -> Rc<Cell<u64>> {
        Rc::clone(&self.refused_count)
    }

    /// Connections to each volume, as of the last turn of the loop.
    pub fn counts(&self) -> Counts {
        Rc::clone(&self.counts)
    }
}

impl FrontEnd for NbdFrontEnd {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        for listener in 0..self.listeners.len() {
            self.accept(listener, shard);
        }
    }

    fn event(&mut self, shard: &mut Shard, user_data: u64, result: i32) {
        let number = user_data & ((1 << 48) - 1);
        let (at, what) = ((number >> 8) as usize, number & 0xFF);
        if what == ACCEPT {
            return self.accepted(at, result, shard);
        }
        let Some(Some(connection)) = self.connections.get_mut(at) else { return };
        let exports = self.exports.borrow();
        match what {
            RECEIVE => connection.received(result, &exports, shard, &mut self.pool.borrow_mut()),
            SEND => connection.sent(result, shard, &mut self.pool.borrow_mut()),
            _ => {}
        }
        drop(exports);
        self.sweep(at);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (at, number) = ((answer.cookie >> 16) as usize, (answer.cookie & 0xFFFF) as usize);
        let Some(Some(connection)) = self.connections.get_mut(at) else { return };
        connection.answered(number, answer.result, shard, &mut self.pool.borrow_mut());
    }

    fn turn(&mut self, shard: &mut Shard) {
        if let Some(handed) = self.passage.take_coming() {
            self.come(handed);
        }
        self.let_in(shard.now());
        let mut waiting = 0;
        for at in 0..self.counted.len() {
            self.turn_one(at, shard);
            waiting += usize::from(self.is_waiting(at));
            let volume = self.connections[at].as_ref().and_then(Connection::volume);
            let before = std::mem::replace(&mut self.counted[at], volume);
            if before != volume {
                let count = |of: VolumeIndex| &self.counts[usize::from(of.0)];
                before.into_iter().for_each(|of| count(of).set(count(of).get() - 1));
                volume.into_iter().for_each(|of| count(of).set(count(of).get() + 1));
            }
        }
        self.make_way(waiting, shard);
        if self.passage.is_held() {
            self.hold(shard);
        }
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        if !self.is_stopping {
            self.is_stopping = true;
            self.coming.clear();
            self.accept_no_more(shard);
        }
        let mut handshakes = 0;
        for at in 0..self.connections.len() {
            match &mut self.connections[at] {
                Some(connection) if self.passage.is_leaving() => {
                    let is_agreed = connection.volume().is_some() || connection.is_ending();
                    handshakes += usize::from(!is_agreed);
                    connection.rest(shard, &mut self.pool.borrow_mut());
                }
                Some(connection) => connection.close(shard),
                None => {}
            }
            self.sweep(at);
            self.carry(at);
        }
        if handshakes > 0 {
            let text = "they had agreed on nothing yet";
            self.passage.tell(format!("NBD connections that cannot go on: {handshakes}; {text}"));
        }
        let count = self.connections.iter().flatten().count();
        self.passage.stay(self.place, count);
        count == 0
    }
}
