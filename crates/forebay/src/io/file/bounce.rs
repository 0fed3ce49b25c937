// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bounce buffers: memory that O_DIRECT takes, for what it does not (F5).
//!
//! An operation goes piece by piece. A piece is either whole units of the device, all the operation's, or *ragged*: one unit of which it has a
//! part. That unit is read before it is written, and no other write is under way meanwhile (F1).

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

use super::{FileDevice, Flight, Verdict, is_write, left, made};
use crate::io::buffer::{Arena, Span};
use crate::io::device::{DeviceError, Operation};
use crate::io::reactor::ReactorOp;
use crate::io::slab::ROOM;
use crate::io::sys;

/// Bytes of a buffer, which is the longest piece, and how many there are: what is odd waits for one.
pub(super) const BOUNCE_BYTES: usize = 64 << 10;
const BUFFER_COUNT: usize = 8;
/// More alignment no device wants of memory.
const PAGE_BYTES: usize = 4096;

/// Units of a device, and which of their bytes are the operation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Byte of the device at which the first unit begins.
    start: u64,
    /// Bytes of all the units.
    length: usize,
    /// Bytes before the operation's first.
    head: usize,
    /// The operation's bytes.
    bytes: usize,
}

impl Piece {
    /// The first piece of `length` bytes from `offset` on, in units of `unit` bytes, which are no more than [`BOUNCE_BYTES`].
    pub(super) fn of(offset: u64, length: u64, unit: u64) -> Piece {
        let head = offset % unit;
        let bytes = if head > 0 || length < unit {
            length.min(unit - head)
        } else {
            (length - length % unit).min(BOUNCE_BYTES as u64 / unit * unit)
        };
        let length = (head + bytes).next_multiple_of(unit) as usize;
        Piece { start: offset - head, length, head: head as usize, bytes: bytes as usize }
    }

    /// The byte of the device behind its last unit.
    pub(super) const fn end(&self) -> u64 {
        self.start + self.length as u64
    }

    const fn is_ragged(&self) -> bool {
        self.bytes < self.length
    }

    /// How many of the operation's bytes are through when so many of all are: of whole units, whole ones.
    fn through(&self, all: usize, unit: u64) -> usize {
        if self.is_ragged() {
            return all.saturating_sub(self.head).min(self.bytes);
        }
        all.min(self.bytes) / unit as usize * unit as usize
    }
}

/// The buffers of a device, made when the first is wanted.
#[derive(Debug)]
pub(super) struct Bounces {
    arena: Option<Arena>,
    /// A bit for each buffer that nobody has.
    free: u8,
    /// Operations that wait for one.
    waiting: VecDeque<u32>,
}

impl Bounces {
    pub(super) fn new() -> Bounces {
        Bounces { arena: None, free: u8::MAX, waiting: VecDeque::with_capacity(ROOM) }
    }

    /// A buffer; without one, the operation is told by [`Bounces::next`] when there is one again.
    pub(super) fn take(&mut self, index: u32) -> Option<u8> {
        if self.free == 0 {
            self.waiting.push_back(index);
            return None;
        }
        let at = self.free.trailing_zeros() as u8;
        self.free &= !(1 << at);
        Some(at)
    }

    pub(super) fn give_back(&mut self, at: u8) {
        assert!(self.free & 1 << at == 0);
        self.free |= 1 << at;
    }

    /// The first operation that waits, if there is a buffer for it.
    pub(super) fn next(&mut self) -> Option<u32> {
        if self.free == 0 { None } else { self.waiting.pop_front() }
    }

    fn span(&mut self, at: u8, length: usize) -> io::Result<Span> {
        let arena = made(&mut self.arena, BUFFER_COUNT * BOUNCE_BYTES)?;
        Ok(arena.span(usize::from(at) * BOUNCE_BYTES, length))
    }
}

impl FileDevice {
    fn piece(&self, flight: &Flight) -> Piece {
        let (offset, length) = left(flight);
        Piece::of(offset, length, self.offset_align)
    }

    /// The next step of an operation that has a buffer.
    pub(super) fn step_bounced(&mut self, flight: &Flight, at: u8) -> io::Result<ReactorOp> {
        let piece = self.piece(flight);
        let span = self.bounces.span(at, piece.length)?;
        let (fd, offset) = (self.main.as_raw_fd(), piece.start);
        if !is_write(flight) || piece.is_ragged() && !flight.filled {
            return Ok(ReactorOp::Read { fd, span, offset });
        }
        let own = span.part(piece.head, piece.bytes);
        match flight.operation {
            Operation::Write { span, .. } => {
                own.copy_from(span.part(flight.through as usize, piece.bytes));
            }
            _ => own.fill_zero(),
        }
        Ok(ReactorOp::Write { fd, span, offset })
    }

    /// A step of it has moved so many bytes.
    pub(super) fn advance_bounced(&mut self, index: u32, at: u8, moved: usize) -> Verdict {
        let flight = *self.flights.get_mut(index).expect("an operation under way");
        let piece = self.piece(&flight);
        let fills = is_write(&flight) && piece.is_ragged() && !flight.filled;
        self.flights.get_mut(index).expect("an operation under way").filled = fills;
        if fills && moved == piece.length {
            return Verdict::Again;
        }
        let bytes = if fills { 0 } else { piece.through(moved, self.offset_align) };
        if bytes == 0 {
            return Verdict::Done(Err(DeviceError::IO)); // the file ended within a unit
        }
        if let Operation::Read { span, .. } = flight.operation {
            let bounced = self.bounces.span(at, piece.length).expect("the read went there");
            let own = bounced.part(piece.head, bytes);
            span.part(flight.through as usize, bytes).copy_from(own);
        }
        self.advance(index, bytes as u64)
    }

    /// Reads the first piece of this, and waits for it; what the kernel says, but of the operation's own bytes.
    pub(super) fn read_piece(&self, bounce: &mut Aligned, offset: u64, bytes: &mut [u8]) -> i32 {
        let piece = Piece::of(offset, bytes.len() as u64, self.offset_align);
        let memory = bounce.bytes(piece.length);
        let result = sys::pread_slice(self.main.as_raw_fd(), memory, piece.start);
        if result <= 0 {
            return result;
        }
        let through = piece.through(result as usize, self.offset_align);
        bytes[..through].copy_from_slice(&memory[piece.head..][..through]);
        through as i32
    }

    /// Writes it, likewise.
    pub(super) fn write_piece(&self, bounce: &mut Aligned, offset: u64, bytes: &[u8]) -> i32 {
        let fd = self.main.as_raw_fd();
        let piece = Piece::of(offset, bytes.len() as u64, self.offset_align);
        let memory = bounce.bytes(piece.length);
        if piece.is_ragged() {
            let result = sys::pread_slice(fd, memory, piece.start);
            if result < piece.length as i32 {
                return result.min(0);
            }
        }
        memory[piece.head..][..piece.bytes].copy_from_slice(&bytes[..piece.bytes]);
        let result = sys::pwrite_slice(fd, memory, piece.start);
        if result <= 0 { result } else { piece.through(result as usize, self.offset_align) as i32 }
    }
}

/// Memory of the heap that O_DIRECT takes, for who waits for the kernel.
#[derive(Default)]
pub(super) struct Aligned(Vec<u8>);

impl Aligned {
    fn bytes(&mut self, length: usize) -> &mut [u8] {
        if self.0.len() < length + PAGE_BYTES {
            self.0 = vec![0; length + PAGE_BYTES];
        }
        let address = self.0.as_ptr().addr();
        &mut self.0[address.next_multiple_of(PAGE_BYTES) - address..][..length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_an_operation_and_only_its_edges_are_ragged() {
        for (offset, length) in
            [(0, 512), (1, 1), (511, 2), (1000, 200_000), (512, 1 << 20), (3, 509)]
        {
            let (mut at, end) = (offset, offset + length);
            let mut ragged = 0;
            while at < end {
                let piece = Piece::of(at, end - at, 512);
                assert_eq!((piece.start + piece.head as u64, piece.start % 512), (at, 0));
                assert!(piece.length.is_multiple_of(512) && piece.length <= BOUNCE_BYTES);
                assert!(piece.bytes > 0 && piece.head + piece.bytes <= piece.length);
                ragged += usize::from(piece.is_ragged());
                assert!(!piece.is_ragged() || piece.length == 512, "only one unit is read before");
                assert_eq!(piece.through(piece.length, 512), piece.bytes);
                assert_eq!(piece.through(piece.head, 512), 0);
                at += piece.bytes as u64;
            }
            assert_eq!(at, end);
            let edges = usize::from(offset % 512 > 0) + usize::from(end % 512 > 0);
            assert!(ragged <= edges.max(1) && (ragged > 0) == (edges > 0));
        }
    }

    #[test]
    fn a_buffer_is_one_operations_and_who_waits_comes_first() {
        let mut bounces = Bounces::new();
        let taken: Vec<u8> = (0..8).map(|index| bounces.take(index).unwrap()).collect();
        assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((bounces.take(8), bounces.take(9), bounces.next()), (None, None, None));
        bounces.give_back(5);
        assert_eq!(bounces.next(), Some(8));
        assert_eq!((bounces.take(8), bounces.next()), (Some(5), None));
        bounces.give_back(0);
        assert_eq!((bounces.next(), bounces.next()), (Some(9), None));
    }
}
