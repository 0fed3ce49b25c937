// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Regular files and block devices.
//!
//! Two descriptors lead to the same file: one with O_DIRECT, and a buffered one for what O_DIRECT
//! cannot take, which is an offset, a length or memory that is not aligned. Such an operation is
//! called *odd*. Where O_DIRECT is refused there is one, buffered, and nothing is odd. On a block device what is
//! odd goes by way of a *bounce buffer* that O_DIRECT does take.
//!
//! # Invariants
//!
//! - **F1** While an odd write is under way no other write is. The page cache writes whole pages,
//!   so an odd write next to a direct one could put its neighbour's old bytes back.
//! - **F2** An odd write is answered when its pages are on the device, so the page cache holds
//!   nothing that a direct read would miss.
//! - **F3** The lock belongs to the open file that does the I/O: it lasts as long as anything that
//!   was started through it, even past the end of the process.
//!
//! - **F4** Bytes that their owner may change while they are written, since nobody has copied them, go only to where that harms nothing but
//!   them: not to a device that wants them to stay as they are (it has checksums or parity made of them), and not where nobody can tell.
//! - **F5** Where there is O_DIRECT, nothing that is read of a block device, or written back beside an odd write, comes from its page cache. What
//!   another program reads while a direct write is under way (a probe for file systems does) may be from before it, and the kernel, which lets
//!   file systems drop that when the write ends, keeps it there for as long as anybody has the block device open.
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

use bounce::Bounces;
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
/// More than this is not written at once: a device may take all that it is given, and answer all of it together, at
/// the end. If that were every buffer there is, it would have nothing to do while they are filled anew.
const WRITE_BYTES_MAX: u64 = 16 << 20;
/// Zeros are written in such pieces where the kernel cannot zero by itself.
const FILL_BYTES: usize = 1 << 20;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Fails, as it should where there is no memory for what it stands for.
const IMPOSSIBLE: ReactorOp = ReactorOp::Fsync { fd: -1, datasync: true };

/// How a range is made zero, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ZeroWay {
    Range,
    Punch,
    Fill,
}

/// An operation under way.
#[derive(Clone, Copy, Debug)]
struct Flight {
    operation: Operation,
    token: u64,
    /// Bytes that are through.
    through: u64,
    /// Goes through the buffered descriptor, or by way of a bounce buffer.
    odd: bool,
    /// An odd write's bytes are written, and are being made durable (F2).
    syncing: bool,
    /// The bounce buffer of an odd write has what lies beside its bytes.
    filled: bool,
    zero_way: ZeroWay,
}

/// A regular file or a block device.
#[derive(Debug)]
pub struct FileDevice {
    info: DeviceInfo,
    /// O_DIRECT if `info.direct`; holds the lock (F3).
    main: File,
    /// The second descriptor, there if `info.direct`.
    buffered: Option<File>,
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
    /// One of them is odd; then it is the only one (F1).
    odd_writer: bool,
    /// Answers that need no kernel.
    ready: Vec<Completion>,
    since: Option<Instant>,
    zero_way: ZeroWay,
    zeros: Option<Arena>,
    bounces: Bounces,
    /// The odd read that has the bounce buffer, and those that wait for it.
    bounced_read: Option<u32>,
    bounced_reads: VecDeque<u32>,
}

impl FileDevice {
    /// From now on what is zeroed gives its room back where it can, as the loop driver has it of a file. Else a file keeps its room.
    pub fn zero_by_holes(&mut self) {
        self.zero_way = ZeroWay::Punch;
    }

    fn fd(&self, odd: bool) -> RawFd {
        match &self.buffered {
            Some(buffered) if odd => buffered.as_raw_fd(),
            _ => self.main.as_raw_fd(),
        }
    }

    fn aligned(&self, address: usize, offset: u64, length: u64) -> bool {
        !self.info.direct
            || (address.is_multiple_of(self.memory_align)
                && offset.is_multiple_of(self.offset_align)
                && length.is_multiple_of(self.offset_align))
    }

    /// Whether what is left of an operation must go through the buffered descriptor.
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

    /// Whether what is odd of it goes by way of a bounce buffer (F5). Nobody can copy a driver's buffers.
    fn is_bounced(&self, flight: &Flight) -> bool {
        let registered = matches!(
            flight.operation,
            Operation::ReadRegistered { .. } | Operation::WriteRegistered { .. }
        );
        flight.odd && self.info.kind == DeviceKind::Block && !registered
    }

    /// Starts an operation, or puts it behind the writes it must wait for (F1).
    fn start(&mut self, reactor: &mut Reactor, index: u32) {
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        if !is_write(&flight) {
            self.start_read(reactor, index, &flight);
        } else if self.waiting.is_empty() && self.may_write(&flight) {
            self.start_write(reactor, index, &flight);
        } else {
            self.waiting.push_back(index);
        }
    }

    /// Starts what waits for no write, or puts it behind the reads that want the bounce buffer too.
    fn start_read(&mut self, reactor: &mut Reactor, index: u32, flight: &Flight) {
        if self.is_bounced(flight) {
            if self.bounced_read.is_some() {
                self.bounced_reads.push_back(index);
                return;
            }
            self.bounced_read = Some(index);
        }
        self.issue(reactor, index);
    }

    const fn may_write(&self, flight: &Flight) -> bool {
        self.writers == 0
            || !self.odd_writer
                && !flight.odd
                && self.write_bytes + write_bytes(flight) <= WRITE_BYTES_MAX
    }

    fn start_write(&mut self, reactor: &mut Reactor, index: u32, flight: &Flight) {
        assert!(self.may_write(flight)); // F1
        self.writers += 1;
        self.write_bytes += write_bytes(flight);
        self.odd_writer = flight.odd;
        self.issue(reactor, index);
    }

    /// A write has left the kernel.
    fn end_write(&mut self, flight: &Flight) {
        assert!(self.writers > 0);
        self.writers -= 1;
        self.write_bytes -= write_bytes(flight);
        self.odd_writer = false;
    }

    /// Starts what waits and need not any more.
    fn settle(&mut self, reactor: &mut Reactor) {
        if self.bounced_read.is_none()
            && let Some(index) = self.bounced_reads.pop_front()
        {
            self.bounced_read = Some(index);
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
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        let fd = self.fd(flight.odd);
        if self.is_bounced(&flight) {
            let op = self.step_bounced(&flight).unwrap_or(IMPOSSIBLE);
            return reactor.submit(op, user_data(self.source, u64::from(index)));
        }
        if flight.odd && self.info.kind == DeviceKind::Block {
            // F5, as far as it can be had: what the page cache holds is dropped unless it is just being used.
            let _ =
                fadvise(self.buffered.as_ref().unwrap_or(&self.main), 0, None, Advice::DontNeed);
        }
        let (offset, length) = left(&flight);
        let transfer = length.min(sys::TRANSFER_BYTES_MAX as u64) as usize;
        let range = length.min(RANGE_BYTES_MAX);
        let op = match flight.operation {
            _ if flight.syncing => ReactorOp::Fsync { fd, datasync: true },
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
                ZeroWay::Fill => match self.zero_span(length) {
                    Ok(span) => ReactorOp::Write { fd, span, offset },
                    Err(_) => IMPOSSIBLE,
                },
            },
        };
        reactor.submit(op, user_data(self.source, u64::from(index)));
    }

    /// Zeros to write, at most `length` of them.
    fn zero_span(&mut self, length: u64) -> io::Result<Span> {
        if self.zeros.is_none() {
            self.zeros = Some(Arena::reserved(FILL_BYTES)?);
        }
        let zeros = self.zeros.as_ref().expect("made just above");
        Ok(zeros.span(0, length.min(FILL_BYTES as u64) as usize))
    }

    /// What the kernel's answer to the last step means.
    fn judge(&mut self, index: u32, result: i32) -> Verdict {
        let info_direct = self.info.direct;
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        if result == -libc::EINTR || result == -libc::EAGAIN {
            return Verdict::Again;
        }
        if flight.syncing || flight.operation == Operation::Flush {
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
            Operation::Discard { .. } if result >= 0 => self.advance(index, range_of(&flight)),
            Operation::WriteZeroes { .. } if result >= 0 && flight.zero_way != ZeroWay::Fill => {
                self.advance(index, range_of(&flight))
            }
            // The file wants more alignment than it said.
            _ if result == -libc::EINVAL && info_direct && !flight.odd => Verdict::Odd,
            // The file ended before its recorded size, or takes nothing.
            _ if result == 0 => Verdict::Done(Err(DeviceError::IO)),
            _ if result < 0 => Verdict::end(result),
            _ if self.is_bounced(&flight) => self.advance_bounced(index, result as usize),
            _ => self.advance(index, u64::from(result.unsigned_abs())),
        }
    }

    /// Another `bytes` of an operation are through.
    fn advance(&mut self, index: u32, bytes: u64) -> Verdict {
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        let cached = flight.odd && is_write(&flight) && !self.is_bounced(&flight);
        let flight = self.flights.get_mut(index).expect("an operation under way");
        flight.through += bytes;
        assert!(flight.through <= flight.operation.length());
        if flight.through < flight.operation.length() {
            return Verdict::Again;
        }
        if cached {
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

    /// Goes on after a step that did not end the operation.
    fn go_on(&mut self, reactor: &mut Reactor, index: u32, odd: bool) {
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        let odd = odd || flight.odd || self.is_odd(&flight);
        if odd == flight.odd {
            self.issue(reactor, index);
            return;
        }
        // It has just become odd: a write waits, before all others, until it is alone (F1).
        let flight = self.flights.get_mut(index).expect("an operation under way");
        flight.odd = true;
        let flight = *flight;
        if is_write(&flight) {
            self.end_write(&flight);
            self.waiting.push_front(index);
        } else {
            self.start_read(reactor, index, &flight);
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

    fn answer(&mut self, token: u64, result: Result<(), DeviceError>, now: Instant) {
        self.ready.push(Completion { token, result });
        self.since.get_or_insert(now);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The same step again, or the next.
    Again,
    /// The rest through the buffered descriptor.
    Odd,
    Done(Result<(), DeviceError>),
}

impl Verdict {
    const fn end(result: i32) -> Verdict {
        Verdict::Done(if result < 0 { Err(DeviceError::new(-result)) } else { Ok(()) })
    }
}

/// The part of an operation that is not through: first byte and length.
const fn left(flight: &Flight) -> (u64, u64) {
    let operation = &flight.operation;
    (operation.offset() + flight.through, operation.length() - flight.through)
}

/// How long the piece is that `issue` hands to fallocate.
fn range_of(flight: &Flight) -> u64 {
    left(flight).1.min(RANGE_BYTES_MAX)
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
        let operation = self.trimmed(operation);
        let flush = operation == Operation::Flush;
        if (operation.length() == 0 && !flush) || (flush && self.info.read_only) {
            return self.answer(token, Ok(()), now);
        }
        let zero_way = self.zero_way;
        let (through, syncing) = (0, false);
        let mut flight =
            Flight { operation, token, through, odd: false, syncing, filled: false, zero_way };
        flight.odd = self.is_odd(&flight);
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
            Verdict::Again => self.go_on(reactor, index, false),
            Verdict::Odd => self.go_on(reactor, index, true),
            Verdict::Done(result) => {
                let flight = self.flights.remove(index).expect("an operation under way"); // D1
                if is_write(&flight) {
                    self.end_write(&flight);
                }
                self.bounced_read.take_if(|read| *read == index);
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
        let mut odd = false;
        let mut through = 0;
        while through < bytes.len() {
            let rest = &mut bytes[through..];
            let at = offset + through as u64;
            odd = odd || !self.aligned(rest.as_ptr() as usize, at, rest.len() as u64);
            if odd && self.info.kind == DeviceKind::Block {
                return self.read_bounced(at, rest); // F5
            }
            match sys::pread_slice(self.fd(odd), rest, at) {
                0 => return Err(DeviceError::IO.into()), // the file ended early
                read if read > 0 => through += read as usize,
                error if error == -libc::EINTR => {}
                error if error == -libc::EINVAL && !odd => odd = true,
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if !self.info.holds(offset, bytes.len() as u64) {
            return Err(DeviceError::RANGE.into());
        }
        if self.info.read_only {
            return Err(DeviceError::READ_ONLY.into());
        }
        let mut odd = false;
        let mut through = 0;
        while through < bytes.len() {
            let rest = &bytes[through..];
            let at = offset + through as u64;
            odd = odd || !self.aligned(rest.as_ptr() as usize, at, rest.len() as u64);
            if odd && self.info.kind == DeviceKind::Block {
                return self.write_bounced(at, rest); // F5
            }
            match sys::pwrite_slice(self.fd(odd), rest, at) {
                0 => return Err(DeviceError::IO.into()),
                written if written > 0 => through += written as usize,
                error if error == -libc::EINTR => {}
                error if error == -libc::EINVAL && !odd => odd = true,
                error => return Err(io::Error::from_raw_os_error(-error)),
            }
        }
        if odd && self.info.direct { self.sync() } else { Ok(()) } // F2
    }

    fn sync(&self) -> io::Result<()> {
        if self.info.read_only {
            return Ok(());
        }
        sys::checked(sys::fsync(self.fd(true), true)).map(drop)
    }

    fn measure(&mut self) -> io::Result<u64> {
        let size = open::size_of_file(&self.main, self.info.kind)?;
        self.info.size_bytes = self.info.size_bytes.max(size);
        Ok(size)
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
        if let Err(error) = made.and_then(|()| self.main.sync_all()) {
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
