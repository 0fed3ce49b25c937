// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Odd operations on a block device: by way of memory, and of a place, that O_DIRECT takes (F5).
//!
//! They go piece by piece. A piece whose first or last unit is not all the operation's is read before it is written; no other write is
//! under way meanwhile (F1).

use std::io;
use std::os::fd::AsRawFd;

use super::{FileDevice, Flight, Verdict, is_write, left};
use crate::io::buffer::{Arena, Span};
use crate::io::device::{DeviceError, Operation};
use crate::io::reactor::ReactorOp;
use crate::io::sys;

/// Bytes of a bounce buffer, which is the longest piece.
const BOUNCE_BYTES: usize = 1 << 20;

/// Whole units of a device, and which of their bytes are the operation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
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
    /// The first piece of `length` bytes from `offset` on.
    fn of(offset: u64, length: u64, unit: u64) -> Piece {
        let start = offset / unit * unit;
        let end = (offset + length).next_multiple_of(unit).min(start + BOUNCE_BYTES as u64);
        let bytes = (end - offset).min(length) as usize;
        let head = (offset - start) as usize;
        Piece { start, length: (end - start) as usize, head, bytes }
    }

    /// Whether its units have bytes that are not the operation's.
    const fn is_ragged(&self) -> bool {
        self.bytes < self.length
    }

    /// How many of the operation's bytes are through when the kernel says that so many of all are.
    fn through(&self, all: usize) -> usize {
        all.saturating_sub(self.head).min(self.bytes)
    }
}

/// The buffers of the one odd read that is under way, and of the one odd write.
#[derive(Debug, Default)]
pub(super) struct Bounces {
    read: Option<Arena>,
    write: Option<Arena>,
}

impl Bounces {
    fn of(&mut self, flight: &Flight) -> io::Result<Span> {
        let arena = if is_write(flight) { &mut self.write } else { &mut self.read };
        if arena.is_none() {
            *arena = Some(Arena::reserved(BOUNCE_BYTES)?);
        }
        Ok(arena.as_ref().expect("made just above").whole())
    }
}

impl FileDevice {
    fn piece(&self, flight: &Flight) -> Piece {
        let (offset, length) = left(flight);
        Piece::of(offset, length, self.offset_align)
    }

    /// The next step of an operation that bounces.
    pub(super) fn step_bounced(&mut self, flight: &Flight) -> io::Result<ReactorOp> {
        let piece = self.piece(flight);
        let whole = self.bounces.of(flight)?.part(0, piece.length);
        let own = whole.part(piece.head, piece.bytes);
        let (fd, offset) = (self.main.as_raw_fd(), piece.start);
        if !is_write(flight) || piece.is_ragged() && !flight.filled {
            return Ok(ReactorOp::Read { fd, span: whole, offset });
        }
        match flight.operation {
            Operation::Write { span, .. } => {
                own.copy_from(span.part(flight.through as usize, piece.bytes));
            }
            _ => own.fill_zero(),
        }
        Ok(ReactorOp::Write { fd, span: whole, offset })
    }

    /// A step of it has moved so many bytes.
    pub(super) fn advance_bounced(&mut self, index: u32, moved: usize) -> Verdict {
        let flight = self.flights.get_mut(index).expect("an operation under way");
        let at = *flight;
        let piece = self.piece(&at);
        let flight = self.flights.get_mut(index).expect("an operation under way");
        if is_write(&at) && piece.is_ragged() && !at.filled {
            flight.filled = true;
            // A device that ends within a unit has none.
            return if moved == piece.length {
                Verdict::Again
            } else {
                Verdict::Done(Err(DeviceError::IO))
            };
        }
        flight.filled = false;
        let bytes = piece.through(moved);
        if bytes == 0 {
            return Verdict::Done(Err(DeviceError::IO));
        }
        if let Operation::Read { span, .. } = at.operation {
            let bounce = self.bounces.of(&at).expect("the read went there");
            span.part(at.through as usize, bytes).copy_from(bounce.part(piece.head, bytes));
        }
        self.advance(index, bytes as u64)
    }

    /// As `read_at`, by way of memory that O_DIRECT takes.
    pub(super) fn read_bounced(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.each_piece(offset, bytes.len(), |piece, whole, at| {
            let moved = moved(|| sys::pread(self.main.as_raw_fd(), whole, piece.start))?;
            let through = piece.through(moved);
            whole.part(piece.head, through).copy_out(&mut bytes[at..at + through]);
            Ok(through)
        })
    }

    /// As `write_at`, likewise.
    pub(super) fn write_bounced(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let fd = self.main.as_raw_fd();
        self.each_piece(offset, bytes.len(), |piece, whole, at| {
            if piece.is_ragged() && moved(|| sys::pread(fd, whole, piece.start))? < whole.len() {
                return Ok(0);
            }
            whole.part(piece.head, piece.bytes).copy_in(&bytes[at..at + piece.bytes]);
            Ok(piece.through(moved(|| sys::pwrite(fd, whole, piece.start))?))
        })
    }

    /// `run` for each piece of a range: its memory and which byte of the range its first is; says how many are through.
    fn each_piece(
        &self,
        offset: u64,
        length: usize,
        mut run: impl FnMut(&Piece, Span, usize) -> io::Result<usize>,
    ) -> io::Result<()> {
        let first = Piece::of(offset, length as u64, self.offset_align);
        let bounce = Arena::reserved(first.length)?;
        let mut through = 0;
        while through < length {
            let rest = (length - through) as u64;
            let piece = Piece::of(offset + through as u64, rest, self.offset_align);
            match run(&piece, bounce.span(0, piece.length), through)? {
                0 => return Err(DeviceError::IO.into()),
                bytes => through += bytes,
            }
        }
        Ok(())
    }
}

/// What the kernel says, asked again when a signal came between.
fn moved(ask: impl Fn() -> i32) -> io::Result<usize> {
    loop {
        match ask() {
            result if result >= 0 => return Ok(result as usize),
            error if error == -libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(-error)),
        }
    }
}
