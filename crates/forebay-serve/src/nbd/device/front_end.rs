// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop's side of the kernel's NBD devices: connections that come from the thread that makes
//! them, all of a device's at a time.
//!
//! # Invariants
//!
//! - **F1** All front ends of a loop share the memory of their connections, so volumes that come and go take no more of it.
//! - **F2** It is over when that thread has ended, and those that it began, no connection of it is left, on its way neither, and
//!   it hears no bell. A connection is gone when nothing of it is under way.

use super::attach::Order;
use super::carried::CarriedDevice;
use super::{CONNECTION_COUNT_MAX, POOL_BYTES};
use crate::carried::{CarriedError, Handed};
use crate::ear::Ear;
use crate::frontend::{FrontEnd, Place};
use crate::nbd::connection::{Connection, Names, RECEIVE, Room, SEND, is_hung_up};
use crate::nbd::export::Session;
use crate::nbd::pool::{Kept, Pool, Shared, shared_by_loop};
use crate::passage::Passage;
use forebay::io::{Bell, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::limits::{REQUEST_BLOCKS_MAX, VOLUME_COUNT_MAX};
use forebay_core::units::VolumeIndex;
use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

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
    /// The program before has left it those of its device, which have yet to come (D5).
    pub(super) is_expected: bool,
}

/// Whether a request that has just come on one connection cannot be the kernel's second copy of one that is still to be
/// read, or is under way, on these beside it (D4).
fn are_sound(others: &[Option<Connection>], except: usize) -> bool {
    let is_sound = |it: &Option<Connection>| {
        it.as_ref().is_some_and(|connection| !connection.is_ending() && !connection.is_hung_up())
    };
    others.iter().enumerate().all(|(at, it)| at == except || is_sound(it))
}

/// Whether none is gone or ending.
fn are_whole(connections: &[Option<Connection>]) -> bool {
    connections.iter().all(|it| it.as_ref().is_some_and(|it| !it.is_ending()))
}

/// Of connections.
struct Memory {
    pool: Pool,
    /// Of those that are gone.
    rooms: Vec<Room>,
}

thread_local! {
    /// F1.
    static KEPT: Kept<Memory> = const { RefCell::new(None) };
}

fn shared_memory() -> io::Result<Shared<Memory>> {
    let make = || {
        let owners = VOLUME_COUNT_MAX * CONNECTION_COUNT_MAX;
        let pool = Pool::shared(POOL_BYTES, owners)?.among(owners, REQUEST_BLOCKS_MAX);
        Ok(Memory { pool, rooms: Vec::new() })
    };
    shared_by_loop(&KEPT, make)
}

/// In the pool.
const fn owner_of(volume: VolumeIndex, at: usize) -> u32 {
    (volume.0 as usize * CONNECTION_COUNT_MAX + at) as u32
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
    ear: Ear,
    slots: Vec<Slot>,
    memory: Shared<Memory>,
    arrivals: Receiver<Arrival>,
    orders: Sender<Order>,
    /// All front ends of a loop have one.
    passage: Rc<Passage>,
    /// The thread that makes and ends its devices has ended.
    is_left: bool,
    is_stopping: bool,
}

impl NbdDeviceFrontEnd {
    pub(super) fn new(
        slots: Vec<Slot>,
        bell: Arc<Bell>,
        arrivals: Receiver<Arrival>,
        orders: Sender<Order>,
        passage: Rc<Passage>,
    ) -> io::Result<NbdDeviceFrontEnd> {
        Ok(NbdDeviceFrontEnd {
            place: Place(0),
            ear: Ear::new(bell),
            slots,
            memory: shared_memory()?,
            arrivals,
            orders,
            passage,
            is_left: false,
            is_stopping: false,
        })
    }

    fn take_arrivals(&mut self) {
        // Bounded: one of each device at a time (D2).
        loop {
            match self.arrivals.try_recv() {
                Ok(arrival) => self.take(arrival),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.is_left = true;
                    return;
                }
            }
        }
    }

    fn take(&mut self, Arrival { slot: at, sockets }: Arrival) {
        // Those before are gone (D2), unless they came from the program before, to a device that was made anew meanwhile.
        if !self.slots[at].connections.is_empty() {
            return self.lost(at);
        }
        let count = sockets.len();
        // No memory for them: they are closed, and tried again.
        let Ok(rooms) = self.rooms(count) else { return self.lost(at) };
        for (number, (socket, room)) in sockets.into_iter().zip(rooms).enumerate() {
            let names = self.names(at, number);
            let Slot { session, volume, connections, .. } = &mut self.slots[at];
            let mut session = session.clone();
            session.features.multi_conn = count > 1;
            let it = Connection::transmitting(socket, names, room, session, *volume);
            connections.push(Some(it));
        }
    }

    /// Memory for so many connections.
    fn rooms(&self, count: usize) -> io::Result<Vec<Room>> {
        let rooms = &mut self.memory.borrow_mut().rooms;
        rooms.reserve(count);
        while rooms.len() < count {
            rooms.push(Room::new()?);
        }
        Ok(rooms.split_off(rooms.len() - count))
    }

    fn names(&self, at: usize, number: usize) -> Names {
        let owner = owner_of(self.slots[at].volume, number);
        Names { place: self.place, connection: number_of(at, number), owner }
    }

    /// Devices go on with the connections that the program before left (D5).
    fn come(&mut self, handed: Handed) {
        // One that was not found was made anew, and those have come first.
        self.take_arrivals();
        let passage = Rc::clone(&self.passage);
        let taken = handed.take(|sockets, device: CarriedDevice| {
            if let Err(error) = self.go_on(sockets, &device) {
                passage.tell(format!("a kernel NBD device is taken over as after a kill: {error}"));
            }
        });
        if let Err((count, error)) = taken {
            let text = "are taken over as after a kill";
            passage.tell(format!("kernel NBD devices that {text}: {count}; {error}"));
        }
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if std::mem::take(&mut slot.is_expected) && slot.connections.is_empty() {
                self.lost(at);
            }
        }
    }

    fn go_on(&mut self, sockets: Vec<OwnedFd>, device: &CarriedDevice) -> Result<(), CarriedError> {
        // What is in them may have been sent again since, and be done, by a program that came between (D4).
        if sockets.iter().any(is_hung_up) {
            return Err(CarriedError::Served("the kernel has ended its connections"));
        }
        let volume = self.passage.index(device.volume());
        let is_it = |slot: &Slot| Some(slot.volume) == volume && slot.is_expected;
        let at = self.slots.iter().position(is_it);
        let at = at.ok_or(CarriedError::Served("the volume has no device any more"))?;
        if !self.slots[at].connections.is_empty() {
            return Err(CarriedError::Served("the volume has another device"));
        }
        let rooms = self.rooms(sockets.len())?;
        let mut connections = Vec::new();
        for (number, (socket, room)) in sockets.into_iter().zip(rooms).enumerate() {
            let (names, carried) = (self.names(at, number), &device.connections()[number]);
            let Slot { session, volume, .. } = &self.slots[at];
            let mut session = session.clone();
            // Whatever is asked for those that are made.
            session.features.multi_conn = true;
            let session = (carried.as_told(session)?, *volume);
            let it = Connection::of_carried(socket, names, room, session, carried)?;
            connections.push(Some(it));
        }
        self.slots[at].connections = connections;
        Ok(())
    }

    /// Those of a device leave together, when all are at rest.
    fn carry(&mut self, at: usize) {
        let Slot { volume, connections, .. } = &mut self.slots[at];
        let is_at_rest = |it: &Option<Connection>| it.as_ref().is_some_and(Connection::is_at_rest);
        if connections.is_empty() || !connections.iter().all(is_at_rest) {
            return;
        }
        let (connections, volume) = (std::mem::take(connections), *volume);
        let are_sound = are_sound(&connections, connections.len());
        let lasting = self.passage.lasting(volume);
        let pool = &mut self.memory.borrow_mut().pool;
        // Else they end here, and nothing of them is under way.
        let carry = |it: Connection| it.into_carried(lasting.unwrap_or_default(), pool);
        let (sockets, carried) = connections.into_iter().flatten().map(carry).unzip();
        let added = match CarriedDevice::new(carried) {
            Some(device) if are_sound && lasting.is_some() => {
                self.passage.add(sockets, &device).map_err(|error| error.to_string())
            }
            _ if are_sound => Err("its volume goes".into()),
            _ => Err("the kernel has ended one (D4)".into()),
        };
        if let Err(why) = added {
            let text =
                "a kernel NBD device loses its connections, and is taken over as after a kill";
            self.passage.tell(format!("{text}: {why}"));
        }
    }

    fn lost(&self, slot: usize) {
        // Once all is released nobody wants to know.
        let _ = self.orders.send(Order::Lost(slot));
    }

    /// A device's connections end together (D4), and others come when all are gone.
    fn sweep(&mut self, at: usize, shard: &mut Shard) {
        let connections = &mut self.slots[at].connections;
        if are_whole(connections) {
            return;
        }
        for place in connections.iter_mut() {
            place.iter_mut().for_each(|it| it.close(shard));
            if let Some(gone) = place.take_if(|it| it.is_gone()) {
                let Memory { pool, rooms } = &mut *self.memory.borrow_mut();
                rooms.push(gone.into_room(pool));
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
        self.ear.listen(place, BELL, shard);
    }

    fn event(&mut self, shard: &mut Shard, name: u64, result: i32) {
        let number = name & (user_data(1, 0) - 1);
        if number == BELL {
            self.ear.heard(self.place, BELL, shard);
            return self.take_arrivals();
        }
        let (number, what) = (number >> 8, number & 0xFF);
        let (slot, at) = of_number(number);
        let Some(connections) = self.slots.get_mut(slot).map(|it| &mut it.connections) else {
            return;
        };
        let result = if what != RECEIVE || are_sound(connections, at) { result } else { 0 };
        let Some(Some(connection)) = connections.get_mut(at) else { return };
        let mut memory = self.memory.borrow_mut();
        match what {
            RECEIVE => connection.received(result, &[], shard, &mut memory.pool),
            SEND => connection.sent(result, shard, &mut memory.pool),
            _ => {}
        }
        drop(memory);
        self.sweep(slot, shard);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (number, command) = (answer.cookie >> 16, (answer.cookie & 0xFFFF) as usize);
        let (slot, at) = of_number(number);
        let Some(slot) = self.slots.get_mut(slot) else { return };
        if let Some(Some(connection)) = slot.connections.get_mut(at) {
            let pool = &mut self.memory.borrow_mut().pool;
            connection.answered(command, answer.result, shard, pool);
        }
    }

    fn turn(&mut self, shard: &mut Shard) {
        if let Some(handed) = self.passage.take_coming() {
            self.come(handed);
        }
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
                let pool = &mut self.memory.borrow_mut().pool;
                connection.turn_among(are_sound, &[], shard, pool);
                slot.connections[number] = Some(connection);
            }
            self.sweep(at, shard);
        }
        // Else threads apart may be about to ring still (E2).
        if self.ear.is_alone() {
            self.take_arrivals();
            if self.is_left {
                self.ear.close(self.place, BELL, shard);
            }
        }
    }

    fn is_over(&self) -> bool {
        let has_none = self.slots.iter().all(|slot| slot.connections.is_empty());
        self.is_left && has_none && self.ear.is_alone() && !self.ear.is_listening()
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        self.is_stopping = true;
        for at in 0..self.slots.len() {
            let connections = &mut self.slots[at].connections;
            let leave = are_whole(connections) && self.passage.is_leaving();
            for connection in connections.iter_mut().flatten() {
                match leave {
                    true => connection.rest(shard, &mut self.memory.borrow_mut().pool),
                    false => connection.close(shard),
                }
            }
            self.sweep(at, shard);
            if leave {
                self.carry(at);
            }
        }
        let count = self.slots.iter().filter(|slot| !slot.connections.is_empty()).count();
        self.passage.stay(self.place, count);
        count == 0
    }
}

#[cfg(test)]
mod tests;
