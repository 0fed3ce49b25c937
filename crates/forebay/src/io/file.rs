// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Regular files and block devices.
//!
//! Two descriptors lead to the same file: one with O_DIRECT, and a buffered one for what O_DIRECT
//! cannot take, which is an offset, a length or memory that is not aligned. Such an operation is
//! called *odd*. Where O_DIRECT is refused there is one, buffered, and nothing is odd. What is odd goes by way of *bounce
//! buffers* that O_DIRECT takes; the buffered descriptor is for what has no such way (the end of a file within a unit).
//!
//! # Invariants
//!
//! - **F1** While a write is under way that writes what lies beside its bytes as well, no other write is: it could put its neighbour's old
//!   bytes back. The page cache writes whole pages, and a bounce buffer whole units.
//! - **F2** A write through the page cache is answered when its pages have been written, so the page cache holds
//!   nothing that a direct read would miss. Nothing is flushed for that: what a flush says is for all that was written before, and those who
//!   must hear of it are those who asked for one (A3 of `op/around`, K5 of `policy/writeback`).
//! - **F3** The lock belongs to the open file that does the I/O: it lasts as long as anything that
//!   was started through it, even past the end of the process. What writes by the second has a lock of another kind, which is let go of before
//!   the first: who opens it for its own use needs the one, and that nobody has the other.
//! - **F4** Bytes that their owner may change while they are written, since nobody has copied them, go only to where that harms nothing but
//!   them: not to a device that wants them to stay as they are (it has checksums or parity made of them), and not where nobody can tell.
//! - **F5** Where there is O_DIRECT, nothing that is read, or written back beside a write, comes from the page cache if it can be had otherwise. What
//!   another program (a probe for file systems, say) reads while a direct write is under way may be from before that write. Most file systems drop it
//!   when the write ends; a block device keeps it for as long as anybody has it open, if the write is io_uring's. So what a block device's page cache
//!   has is dropped when it is opened and closed, too: whoever mounts it next reads through that.
//!
//! The device outlives its operations: it is dropped when all are answered, or after the reactor.
//!
//! # Not here
//!
//! Creating files and choosing their size: who formats. Finding path and options: the program.

mod bounce;
mod open;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Instant;

use rustix::fs::{Advice, fadvise};

use bounce::{Aligned, BOUNCE_BYTES, Bounces, Piece};
pub use open::{FileError, FileOptions};

use super::buffer::{Arena, Span};
use super::device::{
    Completion, Device, DeviceError, DeviceInfo, DeviceKind, Operation, OperationKind, index_of,
    user_data,
};
use super::reactor::{Reactor, ReactorOp};
use super::slab::Slab;
use super::sys;
use crate::host::allocate;

/// Discards and zeroing go to the kernel in such pieces, so that none holds the file for long.
const RANGE_BYTES_MAX: u64 = 64 << 30;
/// The same of a block device, which may write every block of it.
const BLOCK_RANGE_BYTES_MAX: u64 = 1 << 30;
/// More than this is not written at once: a device may take all that it is given, and answer all of it together, at
/// the end. If that were every buffer there is, it would have nothing to do while they are filled anew.
const WRITE_BYTES_MAX: u64 = 16 << 20;
/// Zeros are written in such pieces where the kernel cannot zero by itself.
const FILL_BYTES: usize = 1 << 20;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// How a range is made zero, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ZeroWay {
    Range,
    Punch,
    Fill,
}

/// How an operation's bytes go, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Direct,
    Bounced,
    /// By the buffered descriptor.
    Cached,
}

/// An operation under way.
#[derive(Clone, Copy, Debug)]
struct Flight {
    operation: Operation,
    token: u64,
    /// Bytes that are through.
    through: u64,
    way: Way,
    /// The bytes of a write through the page cache are with the kernel, and are being written out (F2).
    syncing: bool,
    /// The bounce buffer it has.
    bounce: Option<u8>,
    /// That has what lies beside its bytes.
    filled: bool,
    /// There was no memory for the last step.
    starved: bool,
    zero_way: ZeroWay,
}

/// A regular file or a block device.
#[derive(Debug)]
pub struct FileDevice {
    info: DeviceInfo,
    /// The second descriptor, there if `info.direct`. It is closed first (F3).
    buffered: Option<File>,
    /// O_DIRECT if `info.direct`; holds the lock (F3).
    main: File,
    /// What O_DIRECT wants of offsets and lengths, and of memory.
    offset_align: u64,
    memory_align: usize,
    /// Nobody below sums or compares bytes while they are written (F4).
    takes_changing: bool,
    source: u16,
    flights: Slab<Flight>,
    /// Writes that others must end before (F1, [`WRITE_BYTES_MAX`]), in order.
    waiting: VecDeque<u32>,
    /// Writes of any kind at the kernel.
    writers: usize,
    /// What they have to write.
    write_bytes: u64,
    /// One of them must be the only one, and is (F1).
    alone: bool,
    /// Answers that need no kernel.
    ready: Vec<Completion>,
    since: Option<Instant>,
    zero_way: ZeroWay,
    /// It knows of discards. A block device that does not may take the kernel's call all the same, and write zeros.
    asks_discards: bool,
    zeros: Option<Arena>,
    bounces: Bounces,
    /// Nobody else writes to it.
    is_ours: bool,
    /// Where it was cut while it was open ([`Device::note_end`]). What is at the kernel by then is not taken back.
    cut: Option<u64>,
}

impl FileDevice {
    /// From now on what is zeroed gives its room back where it can, as the loop driver has it of a file. Else a file keeps its room.
    pub fn zero_by_holes(&mut self) {
        self.zero_way = ZeroWay::Punch;
    }

    /// Whether the range reaches behind the end of a file that was cut.
    fn is_cut_off(&self, offset: u64, length: u64) -> bool {
        length > 0 && self.cut.is_some_and(|end| offset + length > end)
    }

    fn fd(&self, way: Way) -> RawFd {
        match &self.buffered {
            Some(buffered) if way == Way::Cached => buffered.as_raw_fd(),
            _ => self.main.as_raw_fd(),
        }
    }

    fn aligned(&self, address: usize, offset: u64, length: u64) -> bool {
        !self.info.direct
            || (address.is_multiple_of(self.memory_align)
                && offset.is_multiple_of(self.offset_align)
                && length.is_multiple_of(self.offset_align))
    }

    /// Whether a range's units are whole ones, and fit into a bounce buffer.
    fn has_units(&self, end: u64) -> bool {
        end.next_multiple_of(self.offset_align) <= self.info.size_bytes
            && self.offset_align <= BOUNCE_BYTES as u64
    }

    /// How what is odd of an operation goes. Nobody can copy a driver's buffers.
    fn odd_way(&self, flight: &Flight) -> Way {
        match flight.operation {
            Operation::ReadRegistered { .. } | Operation::WriteRegistered { .. } => Way::Cached,
            operation if self.has_units(operation.offset() + operation.length()) => Way::Bounced,
            _ => Way::Cached,
        }
    }

    /// Drops what the page cache has of a block device, unless it is just being used (F5).
    fn drop_cached(&self) {
        if self.is_ours && self.info.kind == DeviceKind::Block {
            let _ = fadvise(&self.main, 0, None, Advice::DontNeed);
        }
    }

    /// Whether what is left of an operation cannot go straight.
    fn is_odd(&self, flight: &Flight) -> bool {
        let (offset, length) = left(flight);
        match flight.operation {
            Operation::Read { span, .. } | Operation::Write { span, .. } => {
                !self.aligned(span.skip(flight.through as usize).pointer() as usize, offset, length)
            }
            // What such memory is like the kernel will say.
            Operation::ReadRegistered { .. } | Operation::WriteRegistered { .. } => {
                !self.aligned(0, offset, length)
            }
            Operation::WriteZeroes { .. } => {
                flight.zero_way == ZeroWay::Fill && !self.aligned(0, offset, length)
            }
            Operation::Flush | Operation::Discard { .. } => false,
        }
    }

    /// Starts an operation, or puts it behind the writes it must wait for (F1).
    fn start(&mut self, reactor: &mut Reactor, index: u32) {
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        if !is_write(&flight) {
            self.issue(reactor, index);
        } else if self.waiting.is_empty() && self.may_write(&flight) {
            self.start_write(reactor, index, &flight);
        } else {
            self.waiting.push_back(index);
        }
    }

    /// Whether a write writes what lies beside its bytes, too (F1).
    fn is_alone(&self, flight: &Flight) -> bool {
        let (offset, length) = left(flight);
        match flight.way {
            Way::Direct => false,
            Way::Bounced => !(offset | length).is_multiple_of(self.offset_align),
            Way::Cached => true,
        }
    }

    fn may_write(&self, flight: &Flight) -> bool {
        self.writers == 0
            || !self.alone
                && !self.is_alone(flight)
                && self.write_bytes + write_bytes(flight) <= WRITE_BYTES_MAX
    }

    fn start_write(&mut self, reactor: &mut Reactor, index: u32, flight: &Flight) {
        assert!(self.may_write(flight)); // F1
        self.writers += 1;
        self.write_bytes += write_bytes(flight);
        self.alone = self.is_alone(flight);
        self.issue(reactor, index);
    }

    /// A write has left the kernel.
    fn end_write(&mut self, flight: &Flight) {
        assert!(self.writers > 0);
        self.writers -= 1;
        self.write_bytes -= write_bytes(flight);
        self.alone = false;
    }

    /// Starts what waits and need not any more.
    fn settle(&mut self, reactor: &mut Reactor) {
        while let Some(index) = self.bounces.next() {
            self.issue(reactor, index);
        }
        while let Some(index) = self.waiting.front().copied() {
            let flight = *self.flights.get_mut(index).expect("a waiting write is under way");
            if !self.may_write(&flight) {
                return;
            }
            self.waiting.pop_front();
            self.start_write(reactor, index, &flight);
        }
    }

    /// Hands the next step of an operation to the reactor.
    fn issue(&mut self, reactor: &mut Reactor, index: u32) {
        let flight = self.flights.get_mut(index).expect("an operation under way");
        if flight.way == Way::Bounced && flight.bounce.is_none() {
            flight.bounce = self.bounces.take(index);
            if flight.bounce.is_none() {
                return;
            }
        }
        let flight = *flight;
        let op = self.step(&flight).unwrap_or_else(|_| {
            self.flights.get_mut(index).expect("an operation under way").starved = true;
            ReactorOp::Nop
        });
        reactor.submit(op, user_data(self.source, u64::from(index)));
    }

    fn step(&mut self, flight: &Flight) -> io::Result<ReactorOp> {
        if let Some(bounce) = flight.bounce {
            return self.step_bounced(flight, bounce);
        }
        let fd = self.fd(flight.way);
        if flight.way == Way::Cached && !flight.syncing {
            self.drop_cached();
        }
        let (offset, length) = left(flight);
        let transfer = length.min(sys::TRANSFER_BYTES_MAX as u64) as usize;
        let range = self.range_of(flight);
        Ok(match flight.operation {
            _ if flight.syncing => {
                let (offset, length) = left(&Flight { through: 0, ..*flight });
                ReactorOp::WriteOut { fd, offset, length: up_to(length) }
            }
            Operation::Read { span, .. } => {
                let span = span.part(flight.through as usize, transfer);
                ReactorOp::Read { fd, span, offset }
            }
            Operation::Write { span, .. } => {
                let span = span.part(flight.through as usize, transfer);
                ReactorOp::Write { fd, span, offset }
            }
            Operation::ReadRegistered { buffer, .. } => {
                let buffer = buffer.part(flight.through as u32, transfer as u32);
                ReactorOp::ReadRegistered { fd, buffer, offset }
            }
            Operation::WriteRegistered { buffer, .. } => {
                let buffer = buffer.part(flight.through as u32, transfer as u32);
                ReactorOp::WriteRegistered { fd, buffer, offset }
            }
            Operation::Flush => ReactorOp::Fsync { fd, datasync: true },
            Operation::Discard { .. } => {
                ReactorOp::Fallocate { fd, mode: PUNCH, offset, length: range }
            }
            Operation::WriteZeroes { .. } => match flight.zero_way {
                ZeroWay::Range => ReactorOp::Fallocate { fd, mode: ZERO, offset, length: range },
                ZeroWay::Punch => ReactorOp::Fallocate { fd, mode: PUNCH, offset, length: range },
                ZeroWay::Fill => ReactorOp::Write { fd, span: self.zero_span(length)?, offset },
            },
        })
    }

    /// How long the piece is that goes to fallocate.
    fn range_of(&self, flight: &Flight) -> u64 {
        let most = match self.info.kind {
            DeviceKind::Block => BLOCK_RANGE_BYTES_MAX,
            _ => RANGE_BYTES_MAX,
        };
        left(flight).1.min(most)
    }

    /// Zeros to write, at most `length` of them.
    fn zero_span(&mut self, length: u64) -> io::Result<Span> {
        let zeros = made(&mut self.zeros, FILL_BYTES)?;
        Ok(zeros.span(0, length.min(FILL_BYTES as u64) as usize))
    }

    /// What the kernel's answer to the last step means.
    fn judge(&mut self, index: u32, result: i32) -> Verdict {
        let info_direct = self.info.direct;
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        let is_flush = flight.operation == Operation::Flush;
        // A flush is never tried again: what it should have said may have been said to the first.
        if (result == -libc::EINTR || result == -libc::EAGAIN) && !is_flush {
            return Verdict::Again;
        }
        if flight.starved {
            return Verdict::end(-libc::ENOMEM);
        }
        if flight.syncing || is_flush {
            return Verdict::end(result);
        }
        match flight.operation {
            Operation::Discard { .. } if is_refusal(result) => {
                self.info.discards = false;
                Verdict::Done(Ok(()))
            }
            Operation::WriteZeroes { .. }
                if is_refusal(result) && flight.zero_way != ZeroWay::Fill =>
            {
                self.refuse_zero_way(index, result);
                Verdict::Again
            }
            Operation::Discard { .. } if result >= 0 => self.advance(index, self.range_of(&flight)),
            Operation::WriteZeroes { .. } if result >= 0 && flight.zero_way != ZeroWay::Fill => {
                self.advance(index, self.range_of(&flight))
            }
            // The file wants more alignment than it said.
            _ if result == -libc::EINVAL && info_direct && flight.way < Way::Cached => {
                let is_direct = flight.way == Way::Direct;
                Verdict::By(if is_direct { self.odd_way(&flight) } else { Way::Cached })
            }
            // The file ended before its recorded size, or takes nothing.
            _ if result == 0 => Verdict::Done(Err(DeviceError::IO)),
            _ if result < 0 => Verdict::end(result),
            _ => match flight.bounce {
                Some(bounce) => self.advance_bounced(index, bounce, result as usize),
                None => self.advance(index, u64::from(result.unsigned_abs())),
            },
        }
    }

    /// Another `bytes` of an operation are through.
    fn advance(&mut self, index: u32, bytes: u64) -> Verdict {
        let flight = self.flights.get_mut(index).expect("an operation under way");
        flight.through += bytes;
        assert!(flight.through <= flight.operation.length());
        if flight.through < flight.operation.length() {
            return Verdict::Again;
        }
        if flight.way == Way::Cached && is_write(flight) {
            flight.syncing = true; // F2
            return Verdict::Again;
        }
        Verdict::Done(Ok(()))
    }

    /// Goes on to the next way of zeroing, for good if the kernel does not know this one.
    fn refuse_zero_way(&mut self, index: u32, result: i32) {
        let flight = self.flights.get_mut(index).expect("an operation under way");
        let next = match flight.zero_way {
            ZeroWay::Range => ZeroWay::Punch,
            ZeroWay::Punch | ZeroWay::Fill => ZeroWay::Fill,
        };
        flight.zero_way = next;
        if matches!(-result, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV) {
            self.zero_way = self.zero_way.max(next);
        }
    }

    /// Goes on after a step that did not end the operation: as before, or by a way that is less good, this one at best.
    fn go_on(&mut self, reactor: &mut Reactor, index: u32, best: Way) {
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        let odd_way = if self.is_odd(&flight) { self.odd_way(&flight) } else { Way::Direct };
        let way = flight.way.max(best).max(odd_way);
        if way == flight.way {
            self.issue(reactor, index);
            return;
        }
        if let Some(bounce) = flight.bounce {
            self.bounces.give_back(bounce);
        }
        let changed = Flight { way, bounce: None, filled: false, ..flight };
        *self.flights.get_mut(index).expect("an operation under way") = changed;
        // A write waits, before all others, until it may go this way (F1).
        if is_write(&flight) {
            self.end_write(&flight);
            self.waiting.push_front(index);
        } else {
            self.issue(reactor, index);
        }
    }

    /// Where a discard may reach: whole aligned units, because the rest is only advice anyway.
    fn trimmed(&self, operation: Operation) -> Operation {
        let Operation::Discard { offset, length } = operation else { return operation };
        let unit = self.offset_align.max(u64::from(self.info.logical_block));
        let end = (offset + length) / unit * unit;
        let offset = offset.next_multiple_of(unit).min(end);
        Operation::Discard { offset, length: end - offset }
    }

    /// Calls `step` with the best way and with how many bytes are through, until all are; it moves some and waits. Says whether some went
    /// through the page cache.
    fn blocking(
        &self,
        address: usize,
        offset: u64,
        length: usize,
        mut step: impl FnMut(Way, usize) -> i32,
    ) -> io::Result<bool> {
        let (mut least, mut is_cached, mut through) = (Way::Direct, false, 0);
        while through < length {
            let (at, rest) = (offset + through as u64, (length - through) as u64);
            let way = if self.aligned(address + through, at, rest) {
                Way::Direct
            } else if self.has_units(Piece::of(at, rest, self.offset_align).end()) {
                Way::Bounced
            } else {
                Way::Cached
            };
            let way = way.max(least);
            if way == Way::Cached {
                is_cached = true;
                self.drop_cached();
            }
            match step(way, through) {
                0 => return Err(DeviceError::IO.into()), // the file ended early
                moved if moved > 0 => through += moved as usize,
                error if error == -libc::EINTR => {}
                // It wants more alignment than it said.
                error if error == -libc::EINVAL && self.info.direct && way < Way::Cached => {
                    least = if way == Way::Direct { Way::Bounced } else { Way::Cached };
                }
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
        Ok(is_cached)
    }

    fn answer(&mut self, token: u64, result: Result<(), DeviceError>, now: Instant) {
        self.ready.push(Completion { token, result });
        self.since.get_or_insert(now);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The same step again, or the next.
    Again,
    /// The rest by this way.
    By(Way),
    Done(Result<(), DeviceError>),
}

impl Verdict {
    const fn end(result: i32) -> Verdict {
        Verdict::Done(if result < 0 { Err(DeviceError::new(-result)) } else { Ok(()) })
    }
}

/// Memory that is made when it is first wanted.
fn made(arena: &mut Option<Arena>, length: usize) -> io::Result<&Arena> {
    if arena.is_none() {
        *arena = Some(Arena::reserved(length)?);
    }
    Ok(arena.as_ref().expect("made just above"))
}

/// The part of an operation that is not through: first byte and length.
const fn left(flight: &Flight) -> (u64, u64) {
    let operation = &flight.operation;
    (operation.offset() + flight.through, operation.length() - flight.through)
}

/// A length for `sync_file_range`: 0 is all to the file's end.
fn up_to(length: u64) -> u32 {
    u32::try_from(length).unwrap_or(0)
}

const fn is_write(flight: &Flight) -> bool {
    !matches!(flight.operation.kind(), OperationKind::Read | OperationKind::Flush)
}

/// What counts for [`WRITE_BYTES_MAX`]: all of a write, until it is through.
const fn write_bytes(flight: &Flight) -> u64 {
    match flight.operation.kind() {
        OperationKind::Write => flight.operation.length(),
        _ => 0,
    }
}

/// "Not like this", as opposed to "the device is broken".
const fn is_refusal(result: i32) -> bool {
    matches!(
        -result,
        libc::EOPNOTSUPP
            | libc::ENOSYS
            | libc::ENODEV
            | libc::ENOTTY
            | libc::EINVAL
            | libc::EPERM
            | libc::EFBIG
            | libc::ENOSPC
    )
}

impl Device for FileDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.main.as_fd())
    }

    fn takes_registered(&self) -> bool {
        self.takes_changing
    }

    fn submit(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        if let Err(error) = self.info.check(&operation) {
            return self.answer(token, Err(error), now);
        }
        if self.is_cut_off(operation.offset(), operation.length()) {
            return self.answer(token, Err(DeviceError::IO), now);
        }
        let operation = self.trimmed(operation);
        let flush = operation == Operation::Flush;
        if operation.kind() == OperationKind::Discard && !self.asks_discards {
            return self.answer(token, Ok(()), now);
        }
        if (operation.length() == 0 && !flush) || (flush && self.info.read_only) {
            return self.answer(token, Ok(()), now);
        }
        let zero_way = self.zero_way;
        let mut flight = Flight {
            operation,
            token,
            through: 0,
            way: Way::Direct,
            syncing: false,
            bounce: None,
            filled: false,
            starved: false,
            zero_way,
        };
        if self.is_odd(&flight) {
            flight.way = self.odd_way(&flight);
        }
        let index = self.flights.insert(flight);
        self.start(reactor, index);
    }

    fn event(
        &mut self,
        reactor: &mut Reactor,
        user_data: u64,
        result: i32,
        _now: Instant,
        done: &mut Vec<Completion>,
    ) {
        let index = index_of(user_data) as u32;
        match self.judge(index, result) {
            Verdict::Again => self.go_on(reactor, index, Way::Direct),
            Verdict::By(way) => self.go_on(reactor, index, way),
            Verdict::Done(result) => {
                let flight = self.flights.remove(index).expect("an operation under way"); // D1
                if is_write(&flight) {
                    self.end_write(&flight);
                }
                if let Some(bounce) = flight.bounce {
                    self.bounces.give_back(bounce);
                }
                done.push(Completion { token: flight.token, result });
            }
        }
        self.settle(reactor);
    }

    fn poll(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
        self.since = None;
        done.append(&mut self.ready);
    }

    fn deadline(&self) -> Option<Instant> {
        self.since
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        if !self.info.holds(offset, bytes.len() as u64) {
            return Err(DeviceError::RANGE.into());
        }
        let mut bounce = Aligned::default();
        let address = bytes.as_ptr().addr();
        let is_cached = self.blocking(address, offset, bytes.len(), |way, through| {
            let (at, rest) = (offset + through as u64, &mut bytes[through..]);
            match way {
                Way::Bounced => self.read_piece(&mut bounce, at, rest),
                Way::Direct | Way::Cached => sys::pread_slice(self.fd(way), rest, at),
            }
        });
        is_cached.map(drop)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if !self.info.holds(offset, bytes.len() as u64) {
            return Err(DeviceError::RANGE.into());
        }
        if self.info.read_only {
            return Err(DeviceError::READ_ONLY.into());
        }
        if self.is_cut_off(offset, bytes.len() as u64) {
            return Err(DeviceError::IO.into());
        }
        let mut bounce = Aligned::default();
        let address = bytes.as_ptr().addr();
        let is_cached = self.blocking(address, offset, bytes.len(), |way, through| {
            let (at, rest) = (offset + through as u64, &bytes[through..]);
            match way {
                Way::Bounced => self.write_piece(&mut bounce, at, rest),
                Way::Direct | Way::Cached => sys::pwrite_slice(self.fd(way), rest, at),
            }
        })?;
        if is_cached {
            let written = sys::write_out(self.main.as_raw_fd(), offset, up_to(bytes.len() as u64)); // F2
            sys::checked(written)?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if self.info.read_only {
            return Ok(());
        }
        sys::checked(sys::fsync(self.main.as_raw_fd(), true)).map(drop)
    }

    fn measure(&mut self) -> io::Result<u64> {
        let size = open::size_of_file(&self.main, self.info.kind)?;
        self.info.size_bytes = self.info.size_bytes.max(size);
        Ok(size)
    }

    fn note_end(&mut self, end: Option<u64>) {
        self.cut = end;
    }

    fn set_size(&mut self, size_bytes: u64) -> io::Result<()> {
        if self.info.kind != DeviceKind::File {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let before = open::size_of_file(&self.main, self.info.kind)?;
        let made = match size_bytes >= before {
            true => allocate(&self.main, size_bytes),
            false => self.main.set_len(size_bytes),
        };
        if let Err(error) = made {
            if size_bytes > before {
                // Nothing is left of room that was not all there.
                let _ = self.main.set_len(before);
            }
            return Err(error);
        }
        self.info.size_bytes = size_bytes;
        Ok(())
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        self.drop_cached();
    }
}
