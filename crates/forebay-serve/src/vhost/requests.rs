// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The requests of one device: from a chain to the engine and back, piece by piece.
//!
//! Payload is copied between the guest's memory and our own, and only ours is given to the engine:
//! a guest may change what it offers while we look at it. A request longer than
//! [`REQUEST_BYTES_MAX`] goes on in pieces, one at a time, so each holds one piece of memory.
//!
//! # Invariants
//!
//! - **A1** Each chain that is taken is given back once, with a status, unless its device ends
//!   first: then the guest's memory is not touched any more, and the next daemon finds the chain
//!   in flight. So it is with all of a device whose memory, or region, cannot be had any more.
//! - **A2** A piece is the engine's from `submit` to the answer: its memory is neither read, nor
//!   written, nor given to another.
//! - **A3** Requests go to the engine in the order in which they were taken; one that finds no room
//!   holds up those behind it, and none of another device: each has its share of the memory (M1 and M4 of `nbd/pool.rs`).
//! - **A4** Without a write cache (the guest has chosen so, or knows none) a write is answered when
//!   it is durable.
//! - **A5** A write goes to the engine only if all of its bytes are the guest's: what was copied from memory that cannot be had any more
//!   is zeros of no one.

use super::blk::{Ask, Disk, HEADER_BYTES, RANGE_BYTES, RANGE_COUNT_MAX, Range, Status};
use super::queue::{Chain, DESCRIPTOR_COUNT_MAX, QueueError, Segment};
use super::rings::{Rings, Taken};
use crate::lend::{lend, lend_to_fill};
use crate::nbd::pool::{Pool, Run};
use forebay::io::Span;
use forebay::shard::Shard;
use forebay_core::limits::REQUEST_BYTES_MAX;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::collections::VecDeque;

/// Requests of a device that may be taken at once; more wait in their queues.
pub(super) const REQUEST_COUNT_MAX: usize = 256;

/// Bytes of memory that a device's requests take.
pub(super) const fn memory_bytes() -> u64 {
    let chain = DESCRIPTOR_COUNT_MAX * size_of::<Segment>();
    let ranges = RANGE_COUNT_MAX * size_of::<Range>();
    (REQUEST_COUNT_MAX * (size_of::<Request>() + chain + ranges + 3 * size_of::<usize>())) as u64
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    #[default]
    Flush,
    Discard,
    WriteZeroes,
}

#[derive(Debug)]
struct Request {
    taken: Option<Taken>,
    chain: Chain,
    kind: Kind,
    /// What is still to be done, one after the other; one for a read or write, none for a flush.
    ranges: Vec<Range>,
    /// Which of them, and how much of it is done.
    at: usize,
    done: u64,
    /// Memory of the piece, and for a write its bytes are there already.
    memory: Option<(Run, Span)>,
    /// Bytes of the piece that the engine has.
    piece: u64,
    is_inside: bool,
}

/// Where things are.
pub(super) struct Around<'a> {
    pub(super) rings: &'a mut Rings,
    pub(super) disk: &'a Disk,
    pub(super) volume: VolumeIndex,
    /// Names requests to the engine: their place is added.
    pub(super) cookie: u64,
    pub(super) device: u32,
    pub(super) writes_through: bool,
    pub(super) shard: &'a mut Shard,
    pub(super) pool: &'a mut Pool,
}

#[derive(Debug)]
pub(super) struct Requests {
    all: Vec<Request>,
    free: Vec<usize>,
    /// Have something for the engine, in order. (A3)
    waiting: VecDeque<usize>,
}

impl Requests {
    pub(super) fn new() -> Requests {
        let request = || Request {
            taken: None,
            chain: Chain::with_room(),
            kind: Kind::Flush,
            ranges: Vec::with_capacity(RANGE_COUNT_MAX),
            at: 0,
            done: 0,
            memory: None,
            piece: 0,
            is_inside: false,
        };
        Requests {
            all: (0..REQUEST_COUNT_MAX).map(|_| request()).collect(),
            free: (0..REQUEST_COUNT_MAX).rev().collect(),
            waiting: VecDeque::with_capacity(REQUEST_COUNT_MAX),
        }
    }

    /// Nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == REQUEST_COUNT_MAX
    }

    /// Takes at most `count` chains and hands over what the engine takes. Gives how many it took;
    /// or says which queue is broken.
    pub(super) fn run(
        &mut self,
        around: &mut Around<'_>,
        count: usize,
    ) -> Result<usize, (usize, QueueError)> {
        for taken in 0..count {
            if !self.hand_over(around) {
                return Ok(taken);
            }
            let Some(&at) = self.free.last() else { return Ok(taken) };
            let request = &mut self.all[at];
            let Some(found) = around.rings.take(&mut request.chain)? else { return Ok(taken) };
            self.free.pop();
            request.taken = Some(found);
            self.begin(at, around).map_err(|error| (found.queue, error))?;
        }
        self.hand_over(around);
        Ok(count)
    }

    /// Hands over what waits; false: the engine, or memory, has no room.
    pub(super) fn hand_over(&mut self, around: &mut Around<'_>) -> bool {
        while let Some(&at) = self.waiting.front() {
            match self.all[at].hand_over(at, around) {
                Ok(true) => {}
                Ok(false) => return false,
                // Its addresses are not there.
                Err(status) => self.finish(at, status, around),
            }
            self.waiting.pop_front();
        }
        true
    }

    fn begin(&mut self, at: usize, around: &mut Around<'_>) -> Result<(), QueueError> {
        let request = &mut self.all[at];
        let (readable, writable) = (request.chain.length(false), request.chain.length(true));
        let Some(writable) = writable.checked_sub(1) else {
            self.release(at, around);
            return Err(QueueError::NoStatus);
        };
        match request.judge(readable, writable, around) {
            Ok(true) => self.waiting.push_back(at),
            Ok(false) => self.finish(at, Status::Ok, around),
            Err(status) => self.finish(at, status, around),
        }
        Ok(())
    }

    /// The engine has answered a piece. `is_over`: the guest's memory is not to be touched.
    pub(super) fn answered(
        &mut self,
        at: usize,
        result: Result<(), RequestError>,
        around: &mut Around<'_>,
        is_over: bool,
    ) {
        let request = &mut self.all[at];
        request.is_inside = false;
        if is_over {
            return self.release(at, around); // A1
        }
        let status = match result {
            Ok(()) => request.piece_done(around),
            Err(_) => Err(Status::IoError),
        };
        if let Some((run, _)) = request.memory.take() {
            around.pool.give(run);
        }
        match status {
            Ok(true) => self.finish(at, Status::Ok, around),
            Ok(false) => self.waiting.push_back(at),
            Err(status) => self.finish(at, status, around),
        }
    }

    /// Forgets what the engine does not have: the guest's memory is not to be touched any more.
    pub(super) fn give_up(&mut self, around: &mut Around<'_>) {
        while let Some(at) = self.waiting.pop_front() {
            self.release(at, around);
        }
    }

    fn finish(&mut self, at: usize, status: Status, around: &mut Around<'_>) {
        let request = &self.all[at];
        // Its end is near, and another daemon finds the chain in flight (A1).
        let taken = request.taken.filter(|_| !around.rings.is_lost());
        if let Some(taken) = taken {
            let written = request.give_status(status, around);
            match around.rings.give_back(taken, written) {
                // The device ends soon.
                Ok(()) | Err(QueueError::Lost) => {}
                Err(_) => around.rings.broken(taken.queue),
            }
        }
        self.release(at, around);
    }

    fn release(&mut self, at: usize, around: &mut Around<'_>) {
        let request = &mut self.all[at];
        if let Some((run, _)) = request.memory.take() {
            around.pool.give(run);
        }
        request.taken = None;
        self.free.push(at);
    }
}

impl Request {
    /// What its head asks for; false: it is done already.
    fn judge(
        &mut self,
        readable: u64,
        writable: u64,
        around: &mut Around<'_>,
    ) -> Result<bool, Status> {
        self.ranges.clear();
        (self.at, self.done, self.piece) = (0, 0, 0);
        let guest = around.rings.memory.as_ref().ok_or(Status::IoError)?;
        let mut head = [0; HEADER_BYTES as usize];
        let data = readable.checked_sub(HEADER_BYTES).ok_or(Status::IoError)?;
        self.chain.read(guest, 0, &mut head).map_err(|_| Status::IoError)?;
        let (kind, count) = match around.disk.judge(&head, data, writable)? {
            Ask::Read(range) => {
                self.ranges.push(range);
                (Kind::Read, 0)
            }
            Ask::Write(range) => {
                self.ranges.push(range);
                (Kind::Write, 0)
            }
            Ask::Flush => (Kind::Flush, 0),
            Ask::Discard(count) => (Kind::Discard, count),
            Ask::WriteZeroes(count) => (Kind::WriteZeroes, count),
            Ask::GetId => {
                let id = around.disk.id();
                self.chain.write(guest, 0, &id).map_err(|_| Status::IoError)?;
                self.done = id.len() as u64;
                self.kind = Kind::Read;
                return Ok(false);
            }
        };
        self.kind = kind;
        for number in 0..count as u64 {
            let mut bytes = [0; RANGE_BYTES as usize];
            let at = HEADER_BYTES + number * RANGE_BYTES;
            self.chain.read(guest, at, &mut bytes).map_err(|_| Status::IoError)?;
            self.ranges.push(around.disk.decode_range(&bytes, kind == Kind::WriteZeroes)?);
        }
        Ok(true)
    }

    /// Hands its next piece to the engine; false: there is no room.
    fn hand_over(&mut self, at: usize, around: &mut Around<'_>) -> Result<bool, Status> {
        let range = self.ranges.get(self.at).copied().unwrap_or(Range { offset: 0, length: 0 });
        let (offset, rest) = (range.offset + self.done, range.length - self.done);
        let fua = around.writes_through; // A4
        let (op, length) = match self.kind {
            Kind::Read => (Op::Read, rest.min(REQUEST_BYTES_MAX - offset % BLOCK_BYTES)),
            Kind::Write => (Op::Write { fua }, rest.min(REQUEST_BYTES_MAX)),
            Kind::Flush => (Op::Flush, 0),
            Kind::Discard => (Op::Discard, rest),
            Kind::WriteZeroes => (Op::WriteZeroes { fua }, rest),
        };
        if matches!(self.kind, Kind::Read | Kind::Write) && self.memory.is_none() {
            let blocks = (offset % BLOCK_BYTES + length).div_ceil(BLOCK_BYTES) as usize;
            let Some(memory) = around.pool.take_share(around.device, blocks) else {
                return Ok(false);
            };
            self.memory = Some(memory);
            if self.kind == Kind::Write {
                around.shard.expect(around.volume, offset);
                self.fetch(memory.1.part(0, length as usize), around)?;
            }
        }
        let span = self.memory.map(|(_, span)| match self.kind {
            Kind::Write => span.part(0, length as usize),
            _ => span,
        });
        let cookie = around.cookie + at as u64;
        if around.shard.submit(around.volume, op, offset, length, span, cookie).is_err() {
            return Ok(false);
        }
        (self.piece, self.is_inside) = (length, true);
        Ok(true)
    }

    /// Copies a write's piece from the guest.
    fn fetch(&self, span: Span, around: &Around<'_>) -> Result<(), Status> {
        let guest = around.rings.memory.as_ref().ok_or(Status::IoError)?;
        let from = HEADER_BYTES + self.done;
        let copied = lend_to_fill(span, |bytes| self.chain.read(guest, from, bytes));
        copied.map_err(|_| Status::IoError) // A5
    }

    /// A piece is done; says whether that was the last.
    fn piece_done(&mut self, around: &Around<'_>) -> Result<bool, Status> {
        let Some(range) = self.ranges.get(self.at).copied() else { return Ok(true) };
        if let (Kind::Read, Some((_, span))) = (self.kind, self.memory) {
            let guest = around.rings.memory.as_ref().ok_or(Status::IoError)?;
            let skip = ((range.offset + self.done) % BLOCK_BYTES) as usize;
            let read = span.part(skip, self.piece as usize);
            let copied = lend(read, |bytes| self.chain.write(guest, self.done, bytes));
            copied.map_err(|_| Status::IoError)?;
        }
        self.done += self.piece;
        if self.done < range.length {
            return Ok(false);
        }
        if self.at + 1 < self.ranges.len() {
            (self.at, self.done) = (self.at + 1, 0);
            return Ok(false);
        }
        Ok(true)
    }

    /// Writes the status behind all other bytes; how many were written in all.
    fn give_status(&self, status: Status, around: &Around<'_>) -> u32 {
        let Some(guest) = &around.rings.memory else { return 0 };
        let last = self.chain.length(true) - 1;
        // If the byte is not there, nobody will miss it.
        let written = self.chain.write(guest, last, &[status as u8]).is_ok();
        let data = if self.kind == Kind::Read && status == Status::Ok { self.done } else { 0 };
        // A chain has at most 4 GiB in all.
        data as u32 + u32::from(written)
    }
}
