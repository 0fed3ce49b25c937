// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop's side of the kernel's NBD devices: connections that come from the thread that makes
//! them, all of a device's at a time.

use super::attach::Order;
use super::{CONNECTION_COUNT_MAX, POOL_BYTES};
use crate::frontend::{FrontEnd, Place};
use crate::nbd::connection::{Connection, Names, RECEIVE, Room, SEND};
use crate::nbd::export::Session;
use crate::nbd::pool::Pool;
use forebay::io::{Bell, ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::limits::REQUEST_BLOCKS_MAX;
use forebay_core::units::VolumeIndex;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// The reactor operation that is no connection's.
const BELL: u64 = 0;

/// The ends of sockets whose other ends the kernel has.
pub(super) struct Arrival {
    pub(super) slot: usize,
    pub(super) sockets: Vec<OwnedFd>,
}

/// A volume's place for the connections of its device.
pub(super) struct Slot {
    pub(super) volume: VolumeIndex,
    pub(super) session: Session,
    /// All those of the last arrival; those that are gone leave an empty place until all are.
    pub(super) connections: Vec<Option<Connection>>,
}

/// Whether a request that has just come on one connection cannot be the kernel's second copy of one that is still to be
/// read, or is under way, on these beside it (D4).
fn are_sound(others: &[Option<Connection>], except: usize) -> bool {
    let is_sound = |it: &Option<Connection>| {
        it.as_ref().is_some_and(|connection| !connection.is_ending() && !connection.is_hung_up())
    };
    others.iter().enumerate().all(|(at, it)| at == except || is_sound(it))
}

/// The number of a connection: its volume's place, and its own there.
const fn number_of(slot: usize, at: usize) -> u32 {
    (slot * CONNECTION_COUNT_MAX + at) as u32
}

const fn of_number(number: u64) -> (usize, usize) {
    let number = number as usize;
    (number / CONNECTION_COUNT_MAX, number % CONNECTION_COUNT_MAX)
}

/// The front end.
pub struct NbdDeviceFrontEnd {
    place: Place,
    bell: Arc<Bell>,
    slots: Vec<Slot>,
    /// Of connections that are gone.
    rooms: Vec<Room>,
    pool: Pool,
    arrivals: Receiver<Arrival>,
    orders: Sender<Order>,
    is_stopping: bool,
}

impl NbdDeviceFrontEnd {
    pub(super) fn new(
        slots: Vec<Slot>,
        bell: Arc<Bell>,
        arrivals: Receiver<Arrival>,
        orders: Sender<Order>,
    ) -> io::Result<NbdDeviceFrontEnd> {
        let owners = slots.len() * CONNECTION_COUNT_MAX;
        let pool = Pool::shared(POOL_BYTES, owners)?.among(owners, REQUEST_BLOCKS_MAX);
        let (place, rooms) = (Place(0), Vec::new());
        let is_stopping = false;
        Ok(NbdDeviceFrontEnd { place, bell, slots, rooms, pool, arrivals, orders, is_stopping })
    }

    fn hear_bell(&self, shard: &mut Shard) {
        let fd = self.bell.fd();
        shard.reactor.submit(ReactorOp::PollIn { fd }, user_data(self.place.source(), BELL));
    }

    fn take_arrivals(&mut self) {
        while let Ok(Arrival { slot: at, sockets }) = self.arrivals.try_recv() {
            assert!(self.slots[at].connections.is_empty(), "those before are gone (D2)");
            self.rooms.reserve(sockets.len());
            while self.rooms.len() < sockets.len()
                && let Ok(room) = Room::new()
            {
                self.rooms.push(room);
            }
            // No memory for them: they are closed, and tried again.
            if self.rooms.len() < sockets.len() {
                self.lost(at);
                continue;
            }
            for (number, socket) in sockets.into_iter().enumerate() {
                let Slot { session, volume, connections } = &mut self.slots[at];
                let names = Names { place: self.place, connection: number_of(at, number) };
                let (room, session) = (self.rooms.pop().expect("counted"), session.clone());
                let it = Connection::transmitting(socket, names, room, session, *volume);
                connections.push(Some(it));
            }
        }
    }

    fn lost(&self, slot: usize) {
        // Once all is released nobody wants to know.
        let _ = self.orders.send(Order::Lost(slot));
    }

    /// A device's connections end together (D4), and others come when all are gone.
    fn sweep(&mut self, at: usize, shard: &mut Shard) {
        let connections = &mut self.slots[at].connections;
        let is_ending = |it: &Option<Connection>| it.as_ref().is_none_or(Connection::is_ending);
        if !connections.iter().any(is_ending) {
            return;
        }
        for place in connections.iter_mut() {
            place.iter_mut().for_each(|it| it.close(shard));
            if let Some(gone) = place.take_if(|it| it.is_gone()) {
                self.rooms.push(gone.into_room());
            }
        }
        if connections.iter().all(Option::is_none) {
            connections.clear();
            if !self.is_stopping {
                self.lost(at);
            }
        }
    }
}

impl FrontEnd for NbdDeviceFrontEnd {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        self.hear_bell(shard);
    }

    fn event(&mut self, shard: &mut Shard, name: u64, result: i32) {
        let number = name & (user_data(1, 0) - 1);
        if number == BELL {
            self.bell.clear();
            self.take_arrivals();
            return self.hear_bell(shard);
        }
        let (number, what) = (number >> 8, number & 0xFF);
        let (slot, at) = of_number(number);
        let Some(connections) = self.slots.get_mut(slot).map(|it| &mut it.connections) else {
            return;
        };
        let result = if what != RECEIVE || are_sound(connections, at) { result } else { 0 };
        let Some(Some(connection)) = connections.get_mut(at) else { return };
        match what {
            RECEIVE => connection.received(result, &[], shard, &mut self.pool),
            SEND => connection.sent(result, shard, &mut self.pool),
            _ => {}
        }
        self.sweep(slot, shard);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (number, command) = (answer.cookie >> 16, (answer.cookie & 0xFFFF) as usize);
        let (slot, at) = of_number(number);
        let Some(slot) = self.slots.get_mut(slot) else { return };
        if let Some(Some(connection)) = slot.connections.get_mut(at) {
            connection.answered(command, answer.result, shard, &mut self.pool);
        }
    }

    fn turn(&mut self, shard: &mut Shard) {
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if let Some(size_bytes) = shard.engine().volume_bytes(slot.volume) {
                slot.session.resize(size_bytes);
            }
            for number in 0..slot.connections.len() {
                let Some(mut connection) = slot.connections[number].take() else { continue };
                connection.resize(slot.session.size_bytes);
                let others = &slot.connections;
                let are_sound = || are_sound(others, number);
                connection.turn_among(are_sound, &[], shard, &mut self.pool);
                slot.connections[number] = Some(connection);
            }
            self.sweep(at, shard);
        }
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        self.is_stopping = true;
        for at in 0..self.slots.len() {
            self.slots[at].connections.iter_mut().flatten().for_each(|it| it.close(shard));
            self.sweep(at, shard);
        }
        self.slots.iter().all(|slot| slot.connections.is_empty())
    }
}

#[cfg(test)]
mod tests;
