// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The queues of one device, the memory they lie in, and the region that outlives us: where chains
//! are taken and given back.
//!
//! # Invariants
//!
//! - **K1** A chain that is taken is noted in the region before anything else is done for it, and
//!   forgotten there after the used ring has it (I1 of `inflight.rs`).
//! - **K2** What was in flight when a queue starts is taken before anything new, oldest first.
//! - **K3** A queue runs if it has rings, memory and a kick; it is looked at if it is enabled and
//!   not broken.
//!
//! # Limits
//!
//! That calls on an eventfd do not wait is a flag of what the front end has open as well: it can take it away, and fill the counter of
//! an interrupt, whose next write then waits, and the loop with it. (A kick is read without waiting whatever the flag says, and no write can
//! be.) Who may connect is trusted not to.

use super::carried::{self, Ring};
use super::inflight::{QUEUE_COUNT_MAX, Region};
use super::memory::Memory;
use super::queue::{Chain, Queue, QueueError, Rings as Places, SIZE_MAX};
use super::wire::VringAddr;
use crate::carried::CarriedError;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, readlink};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Something that is signalled, or signals.
#[derive(Debug)]
pub(super) struct Event(OwnedFd);

impl Event {
    /// Only of an eventfd: calls on it do not wait (see Limits).
    pub(super) fn new(fd: OwnedFd) -> Option<Event> {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let is_eventfd =
            readlink(path, []).is_ok_and(|it| it.to_bytes() == b"anon_inode:[eventfd]");
        let flags = fcntl_getfl(&fd).ok().filter(|_| is_eventfd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK).ok()?;
        Some(Event(fd))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn ring(&self) {
        // A counter that is full is signalled as well.
        let _: Result<usize, Errno> = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn clear(&self) {
        // One that was silent stays so.
        let mut count = [0; 8];
        let parts = &mut [IoSliceMut::new(&mut count)];
        // At the current position, which it does not have.
        let read = preadv2(&self.0, parts, u64::MAX, ReadWriteFlags::NOWAIT);
        if matches!(read, Err(Errno::OPNOTSUPP | Errno::NOSYS)) {
            let _: Result<usize, Errno> = rustix::io::read(&self.0, &mut count);
        }
    }
}

/// A queue that runs.
#[derive(Debug)]
struct Running {
    queue: Queue,
    /// Heads that an earlier daemon left in flight. (K2)
    left: VecDeque<u16>,
    /// There may be chains to take.
    is_ready: bool,
    /// Something was given back since the guest was asked whether it wants to know.
    has_used: bool,
}

/// All that is known of one queue.
#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) size: u16,
    pub(super) addresses: Option<VringAddr>,
    pub(super) base: u16,
    pub(super) kick: Option<Event>,
    pub(super) call: Option<Event>,
    pub(super) error: Option<Event>,
    pub(super) is_enabled: bool,
    /// The reactor waits for a kick.
    pub(super) is_polled: bool,
    is_broken: bool,
    running: Option<Running>,
}

impl Vring {
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.is_running() && !self.is_broken && !self.is_polled && self.kick.is_some()
    }
}

#[derive(Debug, Default)]
pub(super) struct Rings {
    pub(super) vrings: Vec<Vring>,
    pub(super) memory: Option<Memory>,
    pub(super) region: Option<Region>,
    pub(super) event_idx: bool,
    /// Of what is noted in the region.
    pub(super) counter: u64,
    /// Where the next look begins, so that no queue waits for another.
    first: usize,
}

/// Bytes of memory that the queues of a device take at most.
pub(super) const fn memory_bytes() -> u64 {
    // Which heads are under way, and those that were left in flight.
    let queue = size_of::<Vring>() + SIZE_MAX as usize * (size_of::<bool>() + size_of::<u16>());
    queue as u64 * QUEUE_COUNT_MAX as u64
}

/// A chain that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) queue: usize,
    pub(super) head: u16,
}

impl Rings {
    /// A queue, known from now on; `None`: there may not be so many.
    /// Whether the front end has the guest's driver running.
    pub(super) fn listens(&self) -> bool {
        self.vrings.iter().any(|vring| vring.is_running() && vring.is_enabled)
    }

    pub(super) fn vring(&mut self, queue: u32) -> Option<&mut Vring> {
        let at = usize::try_from(queue).ok().filter(|at| *at < usize::from(QUEUE_COUNT_MAX))?;
        if self.vrings.len() <= at {
            self.vrings.resize_with(at + 1, Vring::default);
        }
        self.vrings.get_mut(at)
    }

    /// Starts a queue if all of it is there.
    pub(super) fn start(&mut self, at: usize) -> Result<(), QueueError> {
        let (Some(memory), Some(vring)) = (&self.memory, self.vrings.get_mut(at)) else {
            return Ok(());
        };
        let Some(addresses) = vring.addresses.filter(|_| vring.kick.is_some()) else {
            return Ok(());
        };
        if let Some(running) = vring.running.take() {
            vring.base = running.queue.next_available();
        }
        vring.is_broken = false;
        let places = Places {
            size: vring.size,
            descriptors: memory.guest_of_user(addresses.descriptors)?,
            available: memory.guest_of_user(addresses.available)?,
            used: memory.guest_of_user(addresses.used)?,
        };
        let mut queue = Queue::new(memory, places, self.event_idx)?;
        let mut left = VecDeque::new();
        match &self.region {
            Some(region) if region.holds(at as u16, vring.size) => {
                let (heads, counter) = region.resume(at as u16, queue.next_used())?;
                // What was taken is what was used and what is in flight.
                let taken = queue.next_used().wrapping_add(heads.len() as u16);
                queue.set_next_available(taken);
                self.counter = self.counter.max(counter);
                for head in heads {
                    queue.begin(head)?;
                    left.push_back(head);
                }
            }
            Some(_) => return Err(QueueError::Noted(vring.size)),
            None => queue.set_next_available(vring.base),
        }
        // The guest may not have been told of what was used last.
        vring.running = Some(Running { queue, left, is_ready: true, has_used: true });
        Ok(())
    }

    /// What there is of the queues, for the next program, when nothing of them is under way (C1 of
    /// `carried.rs`). Their descriptors go behind the others.
    pub(super) fn leave(&mut self, descriptors: &mut Vec<OwnedFd>) -> Vec<Ring> {
        let mut leave = |event: Option<Event>| {
            let is_there = event.is_some();
            descriptors.extend(event.map(|event| event.0));
            is_there
        };
        let vrings = std::mem::take(&mut self.vrings).into_iter();
        let rings = vrings.map(|vring| Ring {
            size: vring.size,
            base: vring.base,
            addresses: vring.addresses,
            is_enabled: vring.is_enabled,
            is_broken: vring.is_broken,
            has_kick: leave(vring.kick),
            has_call: leave(vring.call),
            has_error: leave(vring.error),
            running: vring.running.map(Running::leave),
        });
        rings.collect()
    }

    /// The queues as the program before left them, with the next descriptors. Memory and region are there.
    pub(super) fn go_on(
        &mut self,
        rings: &[Ring],
        mut next: impl FnMut() -> Result<OwnedFd, CarriedError>,
    ) -> Result<(), CarriedError> {
        for (at, ring) in rings.iter().enumerate() {
            let mut event = |is_there: bool| {
                let event = if is_there { Event::new(next()?) } else { return Ok(None) };
                event.map(Some).ok_or(CarriedError::Field("kick, call or error descriptor"))
            };
            let (kick, call, error) =
                (event(ring.has_kick)?, event(ring.has_call)?, event(ring.has_error)?);
            let running = match &ring.running {
                Some(left) => {
                    let is_noted = |it: &Region| it.holds(at as u16, left.places.size);
                    let memory = self.memory.as_ref();
                    let memory = memory.filter(|_| self.region.as_ref().is_none_or(is_noted));
                    let running = memory.and_then(|memory| Running::go_on(memory, left).ok());
                    Some(running.ok_or(CarriedError::Field("queue"))?)
                }
                None => None,
            };
            self.vrings.push(Vring {
                size: ring.size,
                addresses: ring.addresses,
                base: ring.base,
                kick,
                call,
                error,
                is_enabled: ring.is_enabled,
                is_polled: false,
                is_broken: ring.is_broken,
                running,
            });
        }
        Ok(())
    }

    /// Stops a queue: what would be taken next.
    pub(super) fn stop(&mut self, at: usize) -> u16 {
        let Some(vring) = self.vrings.get_mut(at) else { return 0 };
        if let Some(running) = vring.running.take() {
            vring.base = running.queue.next_available();
        }
        vring.kick = None;
        vring.base
    }

    /// Sets how a queue's guest is interrupted, and does it once: what was missed is missed no more.
    pub(super) fn set_call(&mut self, at: usize, call: Option<Event>) {
        let Some(vring) = self.vrings.get_mut(at) else { return };
        vring.call = call;
        if let Some(call) = vring.call.as_ref().filter(|_| vring.running.is_some()) {
            call.ring();
        }
    }

    /// Whether the guest's memory, or the region, cannot be had any more.
    pub(super) fn is_lost(&self) -> bool {
        self.memory.as_ref().is_some_and(Memory::is_lost)
            || self.region.as_ref().is_some_and(|region| region.check().is_err())
    }

    /// A queue's guest cannot be understood any more: it is left alone.
    pub(super) fn broken(&mut self, at: usize) {
        if let Some(vring) = self.vrings.get_mut(at) {
            vring.is_broken = true;
            if let Some(error) = &vring.error {
                error.ring();
            }
        }
    }

    /// A kick came, or may have been missed.
    pub(super) fn look_at(&mut self, at: usize) {
        let Some(memory) = &self.memory else { return };
        let running = self.vrings.get_mut(at).and_then(|vring| vring.running.as_mut());
        if let Some(running) = running {
            running.is_ready = true;
            // Rings that are gone are found out when they are looked at.
            let _: Result<(), QueueError> = running.queue.wake(memory);
        }
    }

    /// Takes a chain, from each queue in turn; or says which queue is broken.
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<Option<Taken>, (usize, QueueError)> {
        let Some(memory) = &self.memory else { return Ok(None) };
        let count = self.vrings.len();
        for step in 0..count {
            let at = (self.first + step) % count;
            let vring = &mut self.vrings[at];
            let is_open = vring.is_enabled && !vring.is_broken;
            let Some(running) = vring.running.as_mut().filter(|it| is_open && it.is_ready) else {
                continue;
            };
            let region = self.region.as_ref();
            match running.take(memory, region, at as u16, &mut self.counter, chain) {
                Ok(None) => {}
                Ok(Some(head)) => {
                    // A few from one queue, then the next.
                    self.first = if running.queue.next_available() % 8 == 0 { at + 1 } else { at };
                    return Ok(Some(Taken { queue: at, head }));
                }
                Err(error) => return Err((at, error)),
            }
        }
        Ok(None)
    }

    /// Gives a chain back to the guest, with so many bytes written.
    pub(super) fn give_back(&mut self, taken: Taken, length: u32) -> Result<(), QueueError> {
        let (Some(memory), Some(vring)) = (&self.memory, self.vrings.get_mut(taken.queue)) else {
            return Ok(());
        };
        let Some(running) = &mut vring.running else { return Ok(()) };
        let (queue, head) = (taken.queue as u16, taken.head);
        if let Some(region) = &self.region {
            region.using(queue, head);
            // Else what the used ring has would be done again.
            region.check()?;
        }
        running.queue.put_used(memory, head, length)?;
        if let Some(region) = &self.region {
            region.end(queue, head, running.queue.next_used()); // K1
        }
        running.has_used = true;
        Ok(())
    }

    /// Interrupts the guest for what was given back, if it wants that.
    pub(super) fn signal(&mut self) {
        let Some(memory) = &self.memory else { return };
        for vring in &mut self.vrings {
            let Some(running) = vring.running.as_mut().filter(|it| it.has_used) else { continue };
            running.has_used = false;
            // A ring that is gone is found out when it is looked at.
            if running.queue.wants_interrupt(memory) != Ok(false)
                && let Some(call) = &vring.call
            {
                call.ring();
            }
        }
    }
}

impl Running {
    fn leave(self) -> carried::Running {
        let (places, event_idx) = self.queue.places();
        carried::Running {
            places,
            event_idx,
            next_available: self.queue.next_available(),
            next_used: self.queue.next_used(),
            left: self.left.into(),
        }
    }

    fn go_on(memory: &Memory, left: &carried::Running) -> Result<Running, QueueError> {
        let indexes = [left.next_available, left.next_used];
        let mut queue = Queue::go_on(memory, left.places, left.event_idx, indexes)?;
        left.left.iter().try_for_each(|head| queue.begin(*head))?;
        let left = left.left.iter().copied().collect();
        // It is looked at, and its guest interrupted, once in any case.
        Ok(Running { queue, left, is_ready: true, has_used: true })
    }

    fn take(
        &mut self,
        memory: &Memory,
        region: Option<&Region>,
        number: u16,
        counter: &mut u64,
        chain: &mut Chain,
    ) -> Result<Option<u16>, QueueError> {
        let head = match self.left.pop_front() {
            Some(head) => head,
            None => {
                let mut head = self.queue.take(memory)?;
                if head.is_none() {
                    if self.queue.sleep(memory)? {
                        self.is_ready = false;
                        return Ok(None);
                    }
                    // It came just now.
                    head = self.queue.take(memory)?;
                }
                let Some(head) = head else { return Ok(None) };
                if let Some(region) = region {
                    region.begin(number, head, *counter);
                    region.check()?; // K1
                    *counter = counter.wrapping_add(1);
                }
                head
            }
        };
        self.queue.chain(memory, head, chain)?;
        Ok(Some(head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_testing::wait_for;
    use rustix::event::{EventfdFlags, eventfd};

    /// The flag is the description's, which the front end has open as well: the loop waited for a kick, with everybody.
    #[test]
    fn a_kick_that_is_silent_is_not_waited_for_whatever_the_front_end_does() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let theirs = fd.try_clone().expect("a copy");
        let event = Event::new(fd).expect("it is one");
        let flags = fcntl_getfl(&theirs).expect("it is open");
        fcntl_setfl(&theirs, flags - OFlags::NONBLOCK).expect("it may");
        let clears = std::thread::spawn(move || {
            event.clear();
            event.ring();
            event.clear();
            event.clear();
        });
        wait_for("the loop goes on", || clears.is_finished());
        clears.join().expect("it ends");
        fcntl_setfl(&theirs, flags | OFlags::NONBLOCK).expect("it may");
        assert_eq!(rustix::io::read(&theirs, &mut [0; 8]), Err(Errno::AGAIN), "it was read");
    }
}
