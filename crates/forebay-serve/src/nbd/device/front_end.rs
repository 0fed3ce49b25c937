// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop's side of the kernel's NBD devices: connections that come from the thread that makes
//! them, one at a time for each volume.

use super::POOL_BYTES;
use super::attach::Order;
use crate::frontend::{FrontEnd, Place};
use crate::nbd::connection::{Connection, Names, RECEIVE, Room, SEND};
use crate::nbd::export::Session;
use crate::nbd::pool::Pool;
use forebay::io::{Bell, ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::units::VolumeIndex;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

/// The reactor operation that is no connection's.
const BELL: u64 = 0;

/// The end of a socket whose other end the kernel has.
pub(super) struct Arrival {
    pub(super) slot: usize,
    pub(super) socket: OwnedFd,
}

/// A volume's place for a connection.
pub(super) struct Slot {
    pub(super) volume: VolumeIndex,
    pub(super) session: Session,
    pub(super) connection: Option<Connection>,
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
        let (place, pool, rooms) = (Place(0), Pool::new(POOL_BYTES)?, Vec::new());
        let is_stopping = false;
        Ok(NbdDeviceFrontEnd { place, bell, slots, rooms, pool, arrivals, orders, is_stopping })
    }

    fn hear_bell(&self, shard: &mut Shard) {
        let fd = self.bell.fd();
        shard.reactor.submit(ReactorOp::PollIn { fd }, user_data(self.place.source(), BELL));
    }

    fn take_arrivals(&mut self) {
        while let Ok(Arrival { slot: at, socket }) = self.arrivals.try_recv() {
            let slot = &mut self.slots[at];
            assert!(slot.connection.is_none(), "the one before is gone (D2)");
            let names = Names { place: self.place, connection: at as u32 };
            let room = self.rooms.pop().map_or_else(Room::new, Ok);
            // No memory for it: it is closed, and tried again.
            let Ok(room) = room else {
                self.lost(at);
                continue;
            };
            let (session, volume) = (slot.session.clone(), slot.volume);
            let connection = Connection::transmitting(socket, names, room, session, volume);
            slot.connection = Some(connection);
        }
    }

    fn lost(&self, slot: usize) {
        // Once all is released nobody wants to know.
        let _ = self.orders.send(Order::Lost(slot));
    }

    fn sweep(&mut self, at: usize) {
        let connection = &mut self.slots[at].connection;
        if let Some(gone) = connection.take_if(|connection| connection.is_gone()) {
            self.rooms.push(gone.into_room());
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
        let (at, what) = ((number >> 8) as usize, number & 0xFF);
        let Some(slot) = self.slots.get_mut(at) else { return };
        let Some(connection) = &mut slot.connection else { return };
        match what {
            RECEIVE => connection.received(result, &[], shard, &mut self.pool),
            SEND => connection.sent(result, shard, &mut self.pool),
            _ => {}
        }
        self.sweep(at);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (at, command) = ((answer.cookie >> 16) as usize, (answer.cookie & 0xFFFF) as usize);
        if let Some(Slot { connection: Some(connection), .. }) = self.slots.get_mut(at) {
            connection.answered(command, answer.result, shard, &mut self.pool);
        }
    }

    fn turn(&mut self, shard: &mut Shard) {
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if let Some(size_bytes) = shard.engine().volume_bytes(slot.volume) {
                slot.session.resize(size_bytes);
            }
            if let Some(connection) = &mut slot.connection {
                connection.resize(slot.session.size_bytes);
                connection.turn(&[], shard, &mut self.pool);
                self.sweep(at);
            }
        }
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        self.is_stopping = true;
        for at in 0..self.slots.len() {
            if let Some(connection) = &mut self.slots[at].connection {
                connection.close(shard);
            }
            self.sweep(at);
        }
        self.slots.iter().all(|slot| slot.connection.is_none())
    }
}
