// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop's side of ublk devices: requests go to the engine, answers to the kernel.
//!
//! Each tag of a device is either *fetched* (the kernel has it and will complete it with a
//! request), *waiting* (for memory, or for room in the engine), or *asked* (in the engine). Its answer
//! fetches the next request in the same command.
//!
//! # Invariants
//!
//! - **C1** Each tag is in one of the three states, and counted in its device's `fetched` or `asked`
//!   if it is in that; a device whose tags have all come back is let go of (its stop waits for that).
//! - **C2** Requests of a device are asked in the order in which they were taken. One that waits lets none of its device pass, and all
//!   of others: each has its share of the memory (M1 and M4 of `nbd/pool.rs`), and one is asked of each in turn.
//! - **C3** After [`FrontEnd::stop`] nothing is asked any more; what was not asked is never committed
//!   (U1).
//! - **C4** Nothing is allocated after the start.
//! - **C5** All front ends of a loop share the memory for bytes, so volumes that come and go take no more of it. Where a device is slow they have of
//!   that of NBD clients besides (`nbd/beside.rs`).
//! - **C6** It is over when each device is let go of, nobody makes or ends devices of it any more, and it hears no bell.

use super::queue::Queue;
use super::request::{Ask, failed};
use super::wire;
use super::{KEPT_BLOCKS, POOL_BYTES, QUEUE_DEPTH};
use crate::ear::Ear;
use crate::frontend::{FrontEnd, Place};
use crate::nbd::beside::Memory;
use crate::nbd::pool::{Kept, Pool, Run, Shared, shared_by_loop};
use forebay::elsewhere::Bytes;
use forebay::io::{Bell, ReactorOp, Registered, Span, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The reactor operation that is no tag's.
const BELL: u64 = 1 << 40;

thread_local! {
    /// C5.
    static KEPT: Kept<Pool> = const { RefCell::new(None) };
}

fn shared_pool() -> io::Result<Shared<Pool>> {
    shared_by_loop(&KEPT, || Ok(Pool::new(POOL_BYTES)?.among(VOLUME_COUNT_MAX, KEPT_BLOCKS)))
}

/// A request and, if bytes go with it, its memory.
#[derive(Clone, Copy)]
struct Pending {
    ask: Ask,
    /// No run: the buffer of its tag.
    memory: Option<(Option<Run>, Span)>,
    lent: Option<Registered>,
}

/// A device that is served.
pub(super) struct Device {
    queue: Queue,
    volume: VolumeIndex,
    pending: Vec<Option<Pending>>,
    /// Tags whose requests are not asked yet, the oldest first (C2).
    waiting: VecDeque<u16>,
    fetched: u16,
    asked: u16,
    is_let_go: Arc<AtomicBool>,
}

impl Device {
    /// The device, and what becomes true when its driver's file is closed.
    pub(super) fn new(queue: Queue, volume: VolumeIndex) -> (Device, Arc<AtomicBool>) {
        let is_let_go = Arc::<AtomicBool>::default();
        let pending = vec![None; usize::from(queue.depth())];
        let told = Arc::clone(&is_let_go);
        let waiting = VecDeque::with_capacity(pending.len());
        (Device { queue, volume, pending, waiting, fetched: 0, asked: 0, is_let_go }, told)
    }
}

/// The front end.
pub struct UblkFrontEnd {
    place: Place,
    ear: Ear,
    /// `None`: it was let go of.
    devices: Vec<Option<Device>>,
    /// Of which device a request is asked next.
    next: usize,
    memory: Memory,
    is_closing: bool,
}

const fn number_of(device: u16, tag: u16) -> u64 {
    (device as u64) << 16 | tag as u64
}

fn of_number(number: u64) -> (u16, u16) {
    ((number >> 16) as u16, number as u16)
}

impl UblkFrontEnd {
    pub(super) fn new(devices: Vec<Device>, bell: Arc<Bell>) -> io::Result<UblkFrontEnd> {
        Ok(UblkFrontEnd {
            place: Place(0),
            ear: Ear::new(bell),
            devices: devices.into_iter().map(Some).collect(),
            next: 0,
            memory: Memory::new(shared_pool()?),
            is_closing: false,
        })
    }

    /// Gives a tag to the kernel, with the answer to the request before.
    fn command(&mut self, command: u32, device: u16, tag: u16, result: i32, shard: &mut Shard) {
        let name = user_data(self.place.source(), number_of(device, tag));
        let Some(device) = &mut self.devices[usize::from(device)] else { return };
        device.fetched += 1;
        let (fd, address) = (device.queue.fd(), device.queue.fetch_address(tag));
        let bytes = wire::answer(tag, result, device.queue.address(tag));
        shard.reactor.submit(ReactorOp::Command { fd, command, address, bytes }, name);
    }

    fn commit(&mut self, device: u16, tag: u16, result: i32, shard: &mut Shard) {
        self.command(wire::COMMIT_AND_FETCH, device, tag, result, shard);
    }

    /// A fetch has ended: with a request, or because the device ends.
    fn fetched(&mut self, at: u16, tag: u16, result: i32, shard: &mut Shard) {
        let Some(device) = &mut self.devices[usize::from(at)] else { return };
        device.fetched -= 1;
        if result < 0 {
            return self.let_go_if_over(at);
        }
        let size_bytes = shard.engine().volume_bytes(device.volume).unwrap_or(0);
        let room = device.queue.buffer(tag).map_or(u64::MAX, |it| it.len() as u64 - BLOCK_BYTES);
        let descriptor = device.queue.descriptor(tag);
        match Ask::of(descriptor, size_bytes) {
            // Longer than was agreed on.
            Ok(ask) if ask.carries_bytes() && ask.length > room => {
                self.commit(at, tag, -Errno::INVAL.raw_os_error(), shard);
            }
            Ok(ask) => {
                shard.expect(device.volume, ask.offset); // while its bytes are fetched
                let lent = device.queue.lent(tag, &descriptor, ask.length);
                let lent = lent.filter(|_| ask.carries_bytes());
                device.pending[usize::from(tag)] = Some(Pending { ask, memory: None, lent });
                device.waiting.push_back(tag);
            }
            Err(error) => self.commit(at, tag, -error.raw_os_error(), shard),
        }
    }

    fn free_memory(&mut self, volume: VolumeIndex, pending: &Pending) {
        if let Some((Some(run), _)) = pending.memory {
            self.memory.give(volume.0.into(), run);
        }
    }

    /// The kernel has given all tags back (C1).
    fn let_go_if_over(&mut self, at: u16) {
        let Some(device) = &mut self.devices[usize::from(at)] else { return };
        if device.fetched == 0 && device.asked == 0 && device.waiting.is_empty() {
            let is_let_go = Arc::clone(&device.is_let_go);
            self.devices[usize::from(at)] = None;
            is_let_go.store(true, Ordering::Release);
        }
    }

    /// Whether nothing comes any more (C6).
    fn is_left(&self) -> bool {
        self.ear.is_alone() && self.devices.iter().all(Option::is_none)
    }

    /// Asks what waits, as far as there is room: one request of each device in turn (C2).
    fn advance(&mut self, shard: &mut Shard) {
        let mut without = 0;
        // Bounded: what waits becomes less, or one more device in a row has nothing that can be asked.
        while !self.is_closing && without < self.devices.len() {
            let at = self.next;
            self.next = (at + 1) % self.devices.len();
            without = if self.ask_first(at, shard) { 0 } else { without + 1 };
        }
    }

    /// False: nothing waits, or there is no room now.
    fn ask_first(&mut self, at: usize, shard: &mut Shard) -> bool {
        let Some(device) = &mut self.devices[at] else { return false };
        let Some(&tag) = device.waiting.front() else { return false };
        let pending = device.pending[usize::from(tag)].as_mut().expect("it waits"); // C1
        let Ask { op, offset, length } = pending.ask;
        if pending.ask.carries_bytes() && pending.memory.is_none() {
            let bytes = (offset % BLOCK_BYTES + length).next_multiple_of(BLOCK_BYTES) as usize;
            let memory = match device.queue.buffer(tag) {
                Some(buffer) => (None, buffer.part(0, bytes)),
                None => {
                    let (owner, blocks) =
                        (u32::from(device.volume.0), bytes / BLOCK_BYTES as usize);
                    let taken = match self.memory.take_share(owner, blocks) {
                        None if !shard.has_answers() => self.memory.take_beside(owner, blocks),
                        taken => taken,
                    };
                    let Some((run, span)) = taken else { return false };
                    (Some(run), span)
                }
            };
            pending.memory = Some(memory);
        }
        let span = pending.memory.map(|memory| memory.1);
        let is_write = matches!(op, Op::Write { .. });
        let elsewhere = is_write.then(|| device.queue.elsewhere(tag)).flatten();
        let bytes = Bytes { span, elsewhere, registered: pending.lent };
        let cookie = self.place.cookie(number_of(at as u16, tag));
        if shard.submit_from(device.volume, op, offset, length, bytes, cookie).is_err() {
            return false;
        }
        device.waiting.pop_front();
        device.asked += 1;
        true
    }
}

impl FrontEnd for UblkFrontEnd {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        self.ear.listen(place, BELL, shard);
        for at in 0..self.devices.len() as u16 {
            let depth = self.devices[usize::from(at)].as_ref().map_or(0, |it| it.queue.depth());
            for tag in 0..depth {
                self.command(wire::FETCH, at, tag, 0, shard);
            }
        }
    }

    fn event(&mut self, shard: &mut Shard, name: u64, result: i32) {
        let number = name & (user_data(1, 0) - 1);
        if number == BELL {
            return self.ear.heard(self.place, BELL, shard);
        }
        let (at, tag) = of_number(number);
        self.fetched(at, tag, result, shard);
        self.advance(shard);
    }

    fn answer(&mut self, shard: &mut Shard, answer: Answer) {
        let (at, tag) = of_number(answer.cookie);
        let Some(device) = &mut self.devices[usize::from(at)] else { return };
        let pending = device.pending[usize::from(tag)].take().expect("answered once"); // U1
        device.asked -= 1;
        let Ask { op, offset, length } = pending.ask;
        let result = match (answer.result, op, pending.memory) {
            (Err(error), ..) => failed(error),
            (Ok(()), Op::Read, Some((_, span))) if !answer.is_straight => {
                let bytes = span.part((offset % BLOCK_BYTES) as usize, length as usize);
                match device.queue.give_bytes(tag, bytes) {
                    Ok(()) => pending.ask.done(),
                    Err(error) => -error.raw_os_error(),
                }
            }
            (Ok(()), ..) => pending.ask.done(),
        };
        let volume = device.volume;
        self.free_memory(volume, &pending);
        self.commit(at, tag, result, shard);
        self.advance(shard);
    }

    fn turn(&mut self, shard: &mut Shard) {
        self.advance(shard);
        if self.is_left() {
            self.ear.close(self.place, BELL, shard);
        }
    }

    fn is_over(&self) -> bool {
        self.is_left() && !self.ear.is_listening()
    }

    fn stop(&mut self, _: &mut Shard) -> bool {
        self.is_closing = true; // C3
        self.devices.iter().flatten().all(|device| device.asked == 0)
    }
}

impl Drop for UblkFrontEnd {
    /// Until this thread has ended the kernel may still write what guests send to the memory of tags that it has: that stays.
    fn drop(&mut self) {
        let devices = self.devices.iter_mut().flatten().filter(|device| device.fetched > 0);
        devices.for_each(|device| device.queue.leave_buffers());
    }
}

const _: () = assert!(number_of(u16::MAX, QUEUE_DEPTH) < BELL);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
