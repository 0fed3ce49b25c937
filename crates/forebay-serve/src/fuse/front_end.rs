// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The loop's side of the FUSE mount: requests go to the engine, answers to the kernel.
//!
//! The loop's thread reads requests itself, as long as there are some; when there is none it asks
//! the reactor to say when there is.
//!
//! A request is read into a run of memory as long as the longest. The part it needs until its
//! answer stays with it, the rest goes back; so a write's bytes go to the log from where the kernel
//! put them, and a read's come from there. Only when memory is short are they moved.
//!
//! # Invariants
//!
//! - **C1** The loop sleeps only if requests were looked for and there was none, or none could be
//!   taken until one is answered; the next request, or the answer, wakes it.
//! - **C2** Slots and memory taken come back with the answer, once.
//! - **C3** Each request is answered once, but for those that want no answer. Those that are never
//!   taken are failed by the kernel when the connection is dropped, or come to the next process.
//! - **C4** What requests are read to is in memory before. The kernel does not wait for a page of
//!   a process that is being killed: it would fail the request in the middle of being read.
//! - **C5** All front ends of a loop share memory, so volumes that come and go take no more of it. Who has no request to
//!   read has none of it but for what waits for its answer.
//! - **C6** Each mount has its share of that memory (M1 and M4 of `nbd/pool.rs`), so requests that a device does not answer keep nobody
//!   from reading his of another mount. One who has none may read to what is kept back, and leaves that as soon as there is room
//!   elsewhere for what his request needs.

use super::channel::{Channel, Received, TRANSFER_BYTES_MAX};
use super::files::{Ask, Back, Files, Verdict};
use super::wire::{self, HEAD_BYTES_MAX, Malformed, WRITE_HEAD_BYTES};
use crate::ear::Ear;
use crate::frontend::{FrontEnd, Place};
use crate::nbd::beside::Memory;
use crate::nbd::pool::{Kept, Pool, Run, Shared, shared_by_loop};
use forebay::io::{Bell, ReactorOp, Span, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::BLOCK_BYTES;
use rustix::io::Errno;
use std::cell::RefCell;
use std::io;
use std::sync::Arc;

/// Requests that are not answered.
const PLACE_COUNT: usize = 512;
/// Most requests taken in one turn: the answers to them go out before the next are read.
const RECEIVE_COUNT_MAX: usize = 8;
const BLOCK: usize = BLOCK_BYTES as usize;
/// Of a request's memory: a block that ends with its head, so that payload begins with a block.
const REQUEST_BLOCKS: usize = 1 + TRANSFER_BYTES_MAX as usize / BLOCK;
/// Bytes for the payload of all; as much of it as one request takes is kept for who has none. One mount alone has two thirds, and where that is not
/// enough for a slow device it has what NBD clients leave besides (`nbd/beside.rs`).
const POOL_BYTES: usize = 4 << 20;
/// Reactor operations.
const BELL: u64 = 0;
const READABLE: u64 = 1;

/// Bytes of memory that the devices take, by part.
pub fn memory_parts() -> [(&'static str, u64); 1] {
    [("FUSE requests", POOL_BYTES as u64)]
}

thread_local! {
    /// C5.
    static KEPT: Kept<Pool> = const { RefCell::new(None) };
}

fn shared_pool() -> io::Result<Shared<Pool>> {
    let make = || Ok(Pool::present(POOL_BYTES)?.among(VOLUME_COUNT_MAX, REQUEST_BLOCKS)); // C4
    shared_by_loop(&KEPT, make)
}

/// A request that the engine answers.
struct Pending {
    unique: u64,
    ask: Ask,
    memory: Option<(Run, Span)>,
}

/// The front end.
pub struct FuseFrontEnd {
    place: Place,
    ear: Ear,
    /// `None`: it was unmounted.
    channel: Option<Channel>,
    files: Files,
    memory: Memory,
    /// In it: the first of its volumes (C6).
    owner: u32,
    /// Where the next request is read to.
    room: Option<(Run, Span)>,
    /// Not taken by the engine yet.
    held: Option<Pending>,
    under_way: Vec<Option<Pending>>,
    free: Vec<usize>,
    /// The reactor was asked to say when there is a request.
    is_listening: bool,
    is_closing: bool,
    /// What is not answered in the end, the next process is asked.
    is_kept: bool,
}

impl FuseFrontEnd {
    pub(super) fn new(
        channel: Channel,
        files: Files,
        bell: Arc<Bell>,
        is_kept: bool,
    ) -> io::Result<FuseFrontEnd> {
        let mut under_way = Vec::new();
        under_way.resize_with(PLACE_COUNT, || None);
        Ok(FuseFrontEnd {
            place: Place(0),
            ear: Ear::new(bell),
            channel: Some(channel),
            owner: files.first_volume().0.into(),
            files,
            memory: Memory::new(shared_pool()?),
            room: None,
            held: None,
            under_way,
            free: (0..PLACE_COUNT).rev().collect(),
            is_listening: false,
            is_closing: false,
            is_kept,
        })
    }

    fn listen(&mut self, shard: &mut Shard) {
        if let Some(channel) = &self.channel {
            let fd = channel.fd();
            let name = user_data(self.place.source(), READABLE);
            shard.reactor.submit(ReactorOp::PollIn { fd }, name);
            self.is_listening = true;
        }
    }

    /// Whether it was unmounted, and those who rang the bell are gone.
    fn is_left(&self) -> bool {
        self.channel.is_none() && self.ear.is_alone()
    }

    /// Hands over what is held; false: the engine has no room.
    fn submit_held(&mut self, shard: &mut Shard) -> bool {
        let Some(pending) = self.held.take() else { return true };
        let Some(slot) = self.free.pop() else {
            self.held = Some(pending);
            return false;
        };
        let Ask { volume, op, offset, length, .. } = pending.ask;
        let span = pending.memory.map(|memory| memory.1);
        let cookie = self.place.cookie(slot as u64);
        if shard.submit(volume, op, offset, length, span, cookie).is_err() {
            self.free.push(slot);
            self.held = Some(pending);
            return false;
        }
        self.under_way[slot] = Some(pending);
        true
    }

    /// Looks for a request; `None`: there is no memory for one now.
    fn receive(&mut self, shard: &Shard) -> Option<Received> {
        let Some(channel) = &self.channel else { return Some(Received::Over) };
        if self.room.is_none() {
            let room = self.memory.take_share(self.owner, REQUEST_BLOCKS);
            let is_beside = room.is_none() && !shard.has_answers();
            let mut beside = || self.memory.take_present_beside(self.owner, REQUEST_BLOCKS); // C4
            self.room = if is_beside { beside() } else { room };
        }
        let (_, span) = self.room?;
        let span = span.skip(BLOCK - WRITE_HEAD_BYTES);
        let received = channel.receive(span);
        if let Received::Request(length) = received {
            let mut head = [0; HEAD_BYTES_MAX];
            let head = &mut head[..length.min(HEAD_BYTES_MAX)];
            span.part(0, head.len()).copy_out(head);
            self.judge(head, length);
        }
        Some(received)
    }

    /// Answers a request, or holds it for the engine.
    fn judge(&mut self, head: &[u8], length: usize) {
        let Some(channel) = &self.channel else { return };
        let request = match wire::decode(head, length) {
            Ok(request) => request,
            Err(Malformed { unique: Some(unique) }) => return channel.refuse(unique, Errno::INVAL),
            Err(Malformed { unique: None }) => return,
        };
        match self.files.judge(&request) {
            Verdict::Reply(bytes) => channel.reply(request.unique, &bytes),
            Verdict::Refuse(error) => channel.refuse(request.unique, error),
            Verdict::Silence => {}
            Verdict::Ask(ask) => {
                let memory = self.keep(&ask);
                self.held = Some(Pending { unique: request.unique, ask, memory });
            }
        }
    }

    /// Of the memory that a request was read to, what it needs until it is answered.
    fn keep(&mut self, ask: &Ask) -> Option<(Run, Span)> {
        let skip = (ask.offset % BLOCK_BYTES) as usize;
        let length = ask.length as usize;
        let (from, blocks) = match ask.op {
            Op::Write { .. } => (BLOCK, 1 + length.div_ceil(BLOCK)),
            Op::Read => (0, (skip + length).div_ceil(BLOCK)),
            _ => return None,
        };
        let (run, span) = self.room.take().expect("it was read to there");
        let bytes = if from > 0 { length } else { blocks * BLOCK };
        let kept = (self.memory.cut(self.owner, run, blocks), span.part(from, bytes));
        // C6
        let moved = self.memory.take_instead(kept.0);
        let Some((run, span)) = moved else { return Some(kept) };
        let span = span.part(from, bytes);
        if from > 0 {
            span.copy_from(kept.1);
        }
        self.memory.give(self.owner, kept.0);
        Some((run, span))
    }

    /// Takes requests as long as there are some, a few each turn.
    fn take_requests(&mut self, shard: &mut Shard) {
        let mut has_yielded = false;
        for _ in 0..RECEIVE_COUNT_MAX {
            if !self.submit_held(shard) {
                return;
            }
            match self.receive(shard) {
                Some(Received::Request(_)) => {}
                Some(Received::Nothing) if shard.has_answers() => return,
                Some(Received::Nothing) if has_yielded => break,
                Some(Received::Nothing) => {
                    // Going to sleep and being woken costs more than this, and the kernel may only
                    // lack a processor to bring more.
                    std::thread::yield_now();
                    has_yielded = true;
                }
                Some(Received::Over) => {
                    self.channel = None;
                    return;
                }
                None => return,
            }
        }
        if self.submit_held(shard) && !shard.has_answers() {
            self.listen(shard);
        }
    }

    fn release(&mut self, pending: &Pending) {
        if let Some((run, _)) = pending.memory {
            self.memory.give(self.owner, run);
        }
    }
}

impl FrontEnd for FuseFrontEnd {
    fn start(&mut self, place: Place, shard: &mut Shard) {
        self.place = place;
        self.ear.listen(place, BELL, shard);
        self.listen(shard);
    }

    fn event(&mut self, shard: &mut Shard, name: u64, _: i32) {
        if name == user_data(self.place.source(), READABLE) {
            self.is_listening = false;
        } else {
            self.ear.heard(self.place, BELL, shard);
        }
    }

    fn answer(&mut self, _: &mut Shard, answer: Answer) {
        let slot = answer.cookie as usize;
        let pending = self.under_way[slot].take().expect("answered once"); // C2
        self.free.push(slot);
        if let Some(channel) = &self.channel {
            match (answer.result, pending.ask.back) {
                (Err(error), _) => channel.refuse(pending.unique, errno(error)),
                (Ok(()), Back::Written(bytes)) => {
                    channel.reply(pending.unique, &wire::write_reply(bytes));
                }
                (Ok(()), Back::Bytes { skip, length }) => {
                    let (_, span) = pending.memory.expect("a read has memory");
                    channel.reply_span(pending.unique, span.part(skip, length));
                }
                (Ok(()), Back::Empty) => channel.reply(pending.unique, &[]),
            }
        }
        self.release(&pending);
    }

    fn turn(&mut self, shard: &mut Shard) {
        if self.is_left() {
            self.ear.close(self.place, BELL, shard);
        }
        self.files.resize(|volume| shard.engine().volume_bytes(volume));
        if self.is_listening || self.is_closing {
            return;
        }
        self.take_requests(shard);
        // C5
        if let Some((run, _)) = self.room.take() {
            self.memory.give(self.owner, run);
        }
    }

    fn is_over(&self) -> bool {
        let is_idle = self.held.is_none() && self.free.len() == PLACE_COUNT;
        self.is_left() && !self.ear.is_listening() && !self.is_listening && is_idle
    }

    fn stop(&mut self, shard: &mut Shard) -> bool {
        if !self.is_closing && self.is_listening {
            shard.reactor.cancel(user_data(self.place.source(), READABLE));
        }
        self.is_closing = true;
        if let Some(pending) = self.held.take() {
            if let Some(channel) = &self.channel
                && !self.is_kept
            {
                channel.refuse(pending.unique, errno(RequestError::Closing));
            }
            self.release(&pending);
        }
        !self.is_listening && self.free.len() == PLACE_COUNT
    }
}

/// What the kernel is told.
fn errno(error: RequestError) -> Errno {
    match error {
        RequestError::Io => Errno::IO,
        RequestError::Invalid => Errno::INVAL,
        RequestError::ReadOnly => Errno::ROFS,
        RequestError::NoVolume => Errno::NXIO,
        RequestError::Closing => Errno::SHUTDOWN,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
