// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one place where the loop waits: operations go in, results come out.
//!
//! A [`Reactor`] belongs to one thread from its first [`Reactor::wait`] on. It has two back ends
//! that behave alike: io_uring, and a few worker threads with `poll(2)` where io_uring is refused
//! (the usual container, `kernel.io_uring_disabled`).
//!
//! # Invariants
//!
//! - **R1** Every operation submitted is answered exactly once, by a later [`Reactor::wait`].
//! - **R2** No operation reaches the kernel before [`Reactor::wait`], which submits all of them at
//!   once. What ends in `_now` is no operation but a call that does not wait.
//! - **R3** A reactor dropped on its thread has no disk operation under way: it waits for them, for a minute at most: a disk that never answers
//!   is given up, and nothing of an operation is touched any more.
//!
//! The descriptor and the span of an operation stay valid until it is answered; the submitter
//! keeps this. Operations are not ordered among themselves, so a socket has at most one receive
//! and one send under way.
//!
//! # Limits
//!
//! One operation transfers at most 1 GiB; a longer span is answered short. With threads, at most
//! `RLIMIT_NOFILE` socket operations wait at a time, because `poll(2)` takes no more.
//!
//! # Not here
//!
//! Short reads and writes are given as they are: continuing them is the device's work.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use super::buffer::{Arena, Span};
use super::registered::Registered;
use super::sys;
use super::threads::ThreadsReactor;
use super::uring::UringReactor;

/// How long a drop waits for disk operations before it gives up on the disk.
pub(super) const DROP_WAIT_MAX: Duration = Duration::from_secs(60);

/// Which back end, wished for or in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReactorKind {
    /// io_uring if the kernel lets us, else threads.
    Auto,
    /// io_uring.
    Uring,
    /// Worker threads for files, `poll(2)` for sockets.
    Threads,
}

/// One thing the kernel shall do. Its result is what the system call would return, or minus errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReactorOp {
    /// Nothing; answered 0.
    Nop,
    /// Read from a file.
    Read {
        /// The file.
        fd: RawFd,
        /// Where the bytes go.
        span: Span,
        /// Where they are.
        offset: u64,
    },
    /// Write to a file.
    Write {
        /// The file.
        fd: RawFd,
        /// Where the bytes are.
        span: Span,
        /// Where they go.
        offset: u64,
    },
    /// Read from a file to a buffer that a driver has put into the ring's table ([`Reactor::has_drivers_buffers`]).
    ReadRegistered {
        /// The file.
        fd: RawFd,
        /// Where the bytes go.
        buffer: Registered,
        /// Where they are.
        offset: u64,
    },
    /// Write to a file from such a buffer.
    WriteRegistered {
        /// The file.
        fd: RawFd,
        /// Where the bytes are.
        buffer: Registered,
        /// Where they go.
        offset: u64,
    },
    /// Make what was written to a file durable.
    Fsync {
        /// The file.
        fd: RawFd,
        /// Leave out metadata that reading does not need.
        datasync: bool,
    },
    /// Has what a file's page cache holds of a range written, and waits for that: `sync_file_range(2)`. No device is flushed.
    WriteOut {
        /// The file.
        fd: RawFd,
        /// First byte.
        offset: u64,
        /// How many; 0: all to its end.
        length: u32,
    },
    /// `fallocate(2)`.
    Fallocate {
        /// The file.
        fd: RawFd,
        /// `FALLOC_FL_*`.
        mode: i32,
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// Receive what is there from a socket, at least one byte; 0 at its end.
    Recv {
        /// The socket.
        fd: RawFd,
        /// Where the bytes go.
        span: Span,
    },
    /// Send to a socket, at least one byte.
    Send {
        /// The socket.
        fd: RawFd,
        /// Where the bytes are.
        span: Span,
    },
    /// Accept a connection. The result is a new descriptor, non-blocking and closed on exec, to
    /// be fetched with [`Reactor::accepted`]. The listener becomes non-blocking. `-ECONNABORTED`: somebody was sent away,
    /// since there was no descriptor; as long as not even that can be done it goes on waiting.
    Accept {
        /// The listener.
        fd: RawFd,
    },
    /// Wait until a descriptor can be read. The result is `revents`.
    PollIn {
        /// The descriptor.
        fd: RawFd,
    },
    /// A driver's own command on its file (`IORING_OP_URING_CMD`). With threads there is no such
    /// thing: `-EOPNOTSUPP`.
    Command {
        /// The driver's file.
        fd: RawFd,
        /// Which command.
        command: u32,
        /// The entry's own address, of which some drivers make something else; 0: none.
        address: u64,
        /// What it says.
        bytes: [u8; 16],
    },
}

/// Operations go in, results come out.
#[derive(Debug)]
pub struct Reactor {
    back_end: BackEnd,
    refusal: Option<String>,
}

#[derive(Debug)]
enum BackEnd {
    Uring(Box<UringReactor>),
    Threads(ThreadsReactor),
}

impl Reactor {
    /// A reactor that submits up to `entries` operations in one system call. More may be
    /// submitted at once, and any number may be under way.
    pub fn new(kind: ReactorKind, entries: u32) -> io::Result<Reactor> {
        let entries = entries.clamp(1, 32_768);
        let mut refusal = None;
        if kind != ReactorKind::Threads {
            match UringReactor::new(entries) {
                Ok(uring) => {
                    let back_end = BackEnd::Uring(Box::new(uring));
                    return Ok(Reactor { back_end, refusal });
                }
                Err(error) if kind == ReactorKind::Uring => return Err(error),
                Err(error) => refusal = Some(format!("io_uring refused: {error}")),
            }
        }
        Ok(Reactor { back_end: BackEnd::Threads(ThreadsReactor::new()?), refusal })
    }

    /// The back end in use, never [`ReactorKind::Auto`].
    pub const fn kind(&self) -> ReactorKind {
        match self.back_end {
            BackEnd::Uring(_) => ReactorKind::Uring,
            BackEnd::Threads(_) => ReactorKind::Threads,
        }
    }

    /// Why [`ReactorKind::Auto`] came to be threads.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Makes operations on an arena's spans cheaper if the kernel can (registered buffers). True
    /// if it does; nothing else depends on it.
    pub fn register_arena(&mut self, arena: &Arena) -> bool {
        match &mut self.back_end {
            BackEnd::Uring(uring) => uring.register(arena.whole()),
            BackEnd::Threads(_) => false,
        }
    }

    /// Whether drivers may put memory of the kernel's into the ring's table, from [`super::DRIVERS_BUFFERS_AT`] on: with io_uring, once an
    /// arena was registered. With threads [`ReactorOp::ReadRegistered`] and its like are answered `-EOPNOTSUPP`.
    pub const fn has_drivers_buffers(&self) -> bool {
        match &self.back_end {
            BackEnd::Uring(uring) => uring.has_drivers_buffers(),
            BackEnd::Threads(_) => false,
        }
    }

    /// Takes an operation, to be answered with `user_data`.
    pub fn submit(&mut self, op: ReactorOp, user_data: u64) {
        match &mut self.back_end {
            BackEnd::Uring(uring) => uring.submit(op, user_data),
            BackEnd::Threads(threads) => threads.submit(op, user_data),
        }
    }

    /// Receives from a socket at once, without waiting: as the result of a [`ReactorOp::Recv`], or
    /// `-EAGAIN`. Not while a receive of the socket is under way.
    pub fn receive_now(&self, fd: BorrowedFd<'_>, span: Span) -> i32 {
        sys::recv(fd.as_raw_fd(), span)
    }

    /// Sends to a socket at once, without waiting: as the result of a [`ReactorOp::Send`], or
    /// `-EAGAIN`. Not while a send to the socket is under way.
    pub fn send_now(&self, fd: BorrowedFd<'_>, span: Span) -> i32 {
        sys::send(fd.as_raw_fd(), span)
    }

    /// Tries to end the operations submitted with `user_data` early; they are then answered
    /// `-ECANCELED`. One that cannot be ended is answered as if nobody had asked.
    pub fn cancel(&mut self, user_data: u64) {
        match &mut self.back_end {
            BackEnd::Uring(uring) => uring.cancel(user_data),
            BackEnd::Threads(threads) => threads.cancel(user_data),
        }
    }

    /// Submits all that was taken and appends `(user_data, result)` of what is done, waiting for
    /// the first of them for at most `timeout`: zero looks only, `None` waits without an end.
    /// Gives how many were appended; none if the time is over or a signal came.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        done: &mut Vec<(u64, i32)>,
    ) -> io::Result<usize> {
        let before = done.len();
        match &mut self.back_end {
            BackEnd::Uring(uring) => uring.wait(timeout, done)?,
            BackEnd::Threads(threads) => threads.wait(timeout, done)?,
        }
        Ok(done.len() - before)
    }

    /// The connection that the result of an accept names; `None` for any other number. What is
    /// not fetched is closed with the reactor.
    pub fn accepted(&mut self, result: i32) -> Option<OwnedFd> {
        match &mut self.back_end {
            BackEnd::Uring(uring) => uring.accepted.fetch(result),
            BackEnd::Threads(threads) => threads.accepted.fetch(result),
        }
    }

    /// Connections that were sent away so far because the process may not have one more open file.
    pub fn sent_away(&self) -> u64 {
        match &self.back_end {
            BackEnd::Uring(uring) => uring.accepted.sent_away(),
            BackEnd::Threads(threads) => threads.accepted.sent_away(),
        }
    }

    /// How many operations are not answered yet.
    pub fn in_flight(&self) -> usize {
        match &self.back_end {
            BackEnd::Uring(uring) => uring.in_flight(),
            BackEnd::Threads(threads) => threads.in_flight(),
        }
    }
}

#[cfg(test)]
mod tests;
