// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reactor's io_uring back end.
//!
//! Operations are kept in a table. What the kernel gets as user data is the place in the table
//! and a generation, so that a late cancel cannot hit the next user of the place. Operations wait
//! in `queue`, of any length, and enter the submission queue inside a wait, or when enough bytes to be written wait
//! there to keep a device busy: whoever has much to copy before its next wait does not keep the device from what is ready.
//! Completions that do not fit into the completion queue are kept by the kernel (`IORING_FEAT_NODROP`, which
//! we insist on).
//!
//! The ring is made disabled and enabled at the first wait, because that is what binds it to a
//! thread: a reactor may be made on one thread and used on another.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};

use super::accepted::{Accepted, PAUSE, is_to_pause};
use super::buffer::Span;
use super::reactor::{DROP_WAIT_MAX, ReactorOp};
use super::registered::{DRIVERS_BUFFERS, DRIVERS_BUFFERS_AT};
use super::slab::{ROOM, Slab};
use super::sys::{TRANSFER_BYTES_MAX, WRITE_OUT};

/// User data of what nobody waits for: cancel requests.
const NOBODY: u64 = u64::MAX;
/// Most arenas' pieces that are registered; the kernel takes at most 1 GiB in one. What is behind them is for drivers (G2).
const REGISTERED_MAX: u32 = DRIVERS_BUFFERS_AT as u32;
/// Bytes to be written that do not wait for the next wait.
const EARLY_BYTES: usize = 1 << 20;
#[derive(Debug)]
struct Row {
    op: ReactorOp,
    user_data: u64,
    generation: u32,
    /// In `queue`, so the kernel does not know it.
    waiting: bool,
    step: Step,
    /// It is not to go on: the kernel may be done with it before it hears that.
    cancelled: bool,
}

/// What the kernel is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The operation itself.
    Itself,
    /// To poll for readiness, the operation itself comes after.
    Poll,
    /// To wait, and then the same (T3 of `accepted.rs`).
    Pause,
}

/// Read when it is submitted.
static PAUSE_LENGTH: types::Timespec = types::Timespec::new().nsec(PAUSE.as_nanos() as u32);

#[derive(Clone, Copy, Debug)]
enum Queued {
    Row(u64),
    Cancel(u64),
}

pub(crate) struct UringReactor {
    ring: ManuallyDrop<IoUring>,
    enabled: bool,
    rows: Slab<Row>,
    generation: u32,
    queue: VecDeque<Queued>,
    /// Bytes of writes that came into the queue since the kernel was last entered.
    queued_bytes: usize,
    /// Answers that need no kernel: cancelled before they were submitted.
    ready: Vec<(u64, i32)>,
    /// Registered memory: first address and length; the place in the list is the kernel's index.
    registered: Vec<(usize, usize)>,
    /// Places of the table of registered memory; 0: there is none.
    places: u32,
    /// New connections that nobody has taken yet.
    pub(crate) accepted: Accepted,
}

impl std::fmt::Debug for UringReactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringReactor").field("rows", &self.rows.len()).finish_non_exhaustive()
    }
}

impl UringReactor {
    pub(crate) fn new(entries: u32) -> io::Result<UringReactor> {
        let completions = (entries * 4).clamp(1024, 65_536);
        let modern = IoUring::builder()
            .dontfork()
            .setup_clamp()
            .setup_cqsize(completions)
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_defer_taskrun()
            .setup_submit_all()
            .build(entries);
        let (ring, enabled) = match modern {
            Ok(ring) => (ring, false),
            // Linux before 6.1 does not know these flags.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let mut plain = IoUring::builder();
                (plain.dontfork().setup_clamp().setup_cqsize(completions).build(entries)?, true)
            }
            Err(error) => return Err(error),
        };
        let params = ring.params();
        if !(params.is_feature_nodrop() && params.is_feature_ext_arg()) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is before 5.11"));
        }
        Ok(UringReactor {
            ring: ManuallyDrop::new(ring),
            enabled,
            rows: Slab::new(),
            generation: 0,
            queue: VecDeque::with_capacity(ROOM),
            queued_bytes: 0,
            ready: Vec::new(),
            registered: Vec::new(),
            places: 0,
            accepted: Accepted::new(),
        })
    }

    pub(crate) fn register(&mut self, span: Span) -> bool {
        if self.places == 0 {
            // Older kernels want all of a table in one piece, and may have none of that size; nor have they drivers that use it.
            let sizes = [REGISTERED_MAX + u32::from(DRIVERS_BUFFERS), REGISTERED_MAX];
            let registers =
                |places: &u32| self.ring.submitter().register_buffers_sparse(*places).is_ok();
            self.places = sizes.into_iter().find(registers).unwrap_or(0);
        }
        let mut complete = self.places > 0;
        for start in (0..span.len()).step_by(TRANSFER_BYTES_MAX) {
            let piece = span.part(start, (span.len() - start).min(TRANSFER_BYTES_MAX));
            complete = complete && self.register_piece(piece);
        }
        complete
    }

    /// Whether drivers have places in the table of registered memory.
    pub(crate) const fn has_drivers_buffers(&self) -> bool {
        self.places > REGISTERED_MAX
    }

    fn register_piece(&mut self, piece: Span) -> bool {
        let index = self.registered.len() as u32;
        if index >= REGISTERED_MAX {
            return false;
        }
        let vector = libc::iovec { iov_base: piece.pointer().cast(), iov_len: piece.len() };
        // SAFETY: a span is mapped memory (B1); the kernel pins it, whatever happens to the arena.
        let result =
            unsafe { self.ring.submitter().register_buffers_update(index, &[vector], None) };
        if result.is_ok() {
            self.registered.push((piece.pointer() as usize, piece.len()));
        }
        result.is_ok()
    }

    pub(crate) fn submit(&mut self, op: ReactorOp, user_data: u64) {
        self.generation = self.generation.wrapping_add(1) & 0x7fff_ffff; // never NOBODY
        let generation = self.generation;
        let (waiting, step, cancelled) = (true, Step::Itself, false);
        let row = Row { op, user_data, generation, waiting, step, cancelled };
        let index = self.rows.insert(row);
        let key = (u64::from(generation) << 32) | u64::from(index);
        self.queue.push_back(Queued::Row(key));
        // Writes come with work for whoever submits them; reads come together, and are best submitted so.
        let write_bytes = match op {
            ReactorOp::Write { span, .. } => span.len(),
            ReactorOp::WriteRegistered { buffer, .. } => buffer.len() as usize,
            _ => 0,
        };
        if write_bytes > 0 {
            self.queued_bytes += write_bytes;
            if self.queued_bytes >= EARLY_BYTES && self.enabled {
                self.fill();
                // What is wrong with the ring the next wait says.
                let _ = self.enter(false, None);
            }
        }
    }

    pub(crate) fn cancel(&mut self, user_data: u64) {
        let found: Vec<(u32, u64, bool)> = self
            .rows
            .iter()
            .filter(|(_, row)| row.user_data == user_data)
            .map(|(index, row)| {
                (index, (u64::from(row.generation) << 32) | u64::from(index), row.waiting)
            })
            .collect();
        for (index, key, waiting) in found {
            if waiting {
                self.queue.retain(|queued| !matches!(queued, Queued::Row(row) if *row == key));
                self.rows.remove(index);
                self.ready.push((user_data, -libc::ECANCELED));
            } else {
                if let Some(row) = self.rows.get_mut(index) {
                    row.cancelled = true;
                }
                self.queue.push_back(Queued::Cancel(key));
            }
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.rows.len() + self.ready.len()
    }

    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        done: &mut Vec<(u64, i32)>,
    ) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        let before = done.len();
        done.append(&mut self.ready);
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut left = timeout;
        // Bounded by the timeout; without one, by the first completion or signal.
        loop {
            self.fill();
            self.reap(done);
            let nothing = done.len() == before && self.queue.is_empty();
            let entered = self.enter(nothing && left != Some(Duration::ZERO), left)?;
            self.reap(done);
            if done.len() > before || entered == Entered::Over {
                left = Some(Duration::ZERO);
            }
            // A full queue, and polls or retries that were found just now, are submitted as well.
            let more = !self.queue.is_empty() || !self.ring.submission().is_empty();
            if left == Some(Duration::ZERO) && !more {
                return Ok(());
            }
            if let Some(end) = end
                && left != Some(Duration::ZERO)
            {
                left = Some(end.saturating_duration_since(Instant::now()));
            }
        }
    }

    /// Moves what is queued into the submission queue, as far as there is room.
    fn fill(&mut self) {
        while let Some(queued) = self.queue.front().copied() {
            if !self.push(queued) {
                return;
            }
            self.queue.pop_front();
            if let Queued::Row(key) = queued
                && let Some(row) = self.rows.get_mut(key as u32)
            {
                row.waiting = false;
            }
        }
    }

    /// False if the submission queue is full.
    fn push(&mut self, queued: Queued) -> bool {
        let entry = match queued {
            Queued::Cancel(key) => opcode::AsyncCancel::new(key).build().user_data(NOBODY),
            Queued::Row(key) => {
                let row = self.rows.get_mut(key as u32).expect("a queued row is in the table");
                let entry = match row.step {
                    Step::Itself => entry_of(row.op, &self.registered),
                    Step::Poll => poll_of(row.op),
                    Step::Pause => opcode::Timeout::new(&raw const PAUSE_LENGTH).build(),
                };
                entry.user_data(key)
            }
        };
        // SAFETY: the descriptor and the span stay valid until the answer (reactor's contract; B1),
        // and the entry points at nothing else: the address in a driver's buffer is none of ours, and
        // the kernel takes it for one of that buffer alone.
        unsafe { self.ring.submission().push(&entry) }.is_ok()
    }

    /// One system call at most: submits the queue, and waits for one completion if `want`.
    fn enter(&mut self, want: bool, timeout: Option<Duration>) -> io::Result<Entered> {
        self.queued_bytes = 0;
        let (submitter, submission, _) = self.ring.split();
        let idle = submission.is_empty() && !submission.taskrun() && !submission.cq_overflow();
        if idle && !want {
            return Ok(Entered::Looked);
        }
        let result = match timeout {
            Some(timeout) if want => {
                let timespec = types::Timespec::from(timeout);
                submitter.submit_with_args(1, &types::SubmitArgs::new().timespec(&timespec))
            }
            _ => submitter.submit_and_wait(usize::from(want)),
        };
        match result {
            Ok(_) => Ok(Entered::Looked),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR) => Ok(Entered::Over),
                // Completions must be read, or memory found, before the kernel takes more.
                Some(libc::EBUSY | libc::EAGAIN) => Ok(Entered::Looked),
                _ => Err(error),
            },
        }
    }

    fn reap(&mut self, done: &mut Vec<(u64, i32)>) {
        // At most a full completion queue in one go.
        for _ in 0..self.ring.params().cq_entries() {
            let Some(completion) = self.ring.completion().next() else { return };
            let key = completion.user_data();
            if key == NOBODY {
                continue;
            }
            let mut result = completion.result();
            let index = key as u32;
            let row = self.rows.get_mut(index).expect("the kernel answers once");
            assert_eq!(u64::from(row.generation), key >> 32); // R1
            if let (ReactorOp::Accept { fd }, Step::Itself) = (row.op, row.step) {
                result = self.accepted.take(fd, result);
            }
            let next = match row.step {
                // A non-blocking socket: the kernel does not wait for it by itself everywhere.
                Step::Itself if result == -libc::EAGAIN => Some(Step::Poll),
                Step::Itself if is_to_pause(row.op, result) => Some(Step::Pause),
                Step::Poll if result >= 0 => Some(Step::Itself),
                Step::Pause if result == -libc::ETIME => Some(Step::Itself),
                _ => None,
            };
            if next.is_some() && row.cancelled {
                result = -libc::ECANCELED;
            } else if let Some(next) = next.filter(|_| is_socket(row.op)) {
                row.step = next;
                row.waiting = true;
                self.queue.push_back(Queued::Row(key));
                continue;
            }
            let row = self.rows.remove(index).expect("found just above");
            done.push((row.user_data, result));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entered {
    Looked,
    /// The time is over, or a signal came.
    Over,
}

impl Drop for UringReactor {
    /// Waits for the disk operations (R3); what waits for a peer is ended by closing the ring. One in which a driver has commands is left open:
    /// were it closed here, a worker of the kernel would cancel those commands while the end of this thread does, and ublk before Linux 6.15 ends one
    /// for both: the kernel frees what is freed already (`docs/decisions/0010-ublk.md`). It is closed by [`close_left_rings`], or when the process executes
    /// another program.
    fn drop(&mut self) {
        self.wait_for_disks();
        // SAFETY: nobody uses it any more.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if self.rows.iter().any(|(_, row)| matches!(row.op, ReactorOp::Command { .. })) {
            LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
        }
    }
}

/// Rings in which a driver has commands of threads that used them.
static LEFT: Mutex<Vec<IoUring>> = Mutex::new(Vec::new());

/// Closes them, when those threads have ended: the drivers have their commands back then, also if the process does not end, since a thread is stuck.
pub fn close_left_rings() {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

impl UringReactor {
    fn wait_for_disks(&mut self) {
        let end = Instant::now() + DROP_WAIT_MAX;
        let mut done = Vec::new();
        // What never reached the kernel never will.
        while let Some(queued) = self.queue.pop_front() {
            if let Queued::Row(key) = queued {
                self.rows.remove(key as u32);
            }
        }
        while self.rows.iter().any(|(_, row)| is_disk(row.op)) && Instant::now() < end {
            if self.wait(Some(Duration::from_secs(1)), &mut done).is_err() {
                return;
            }
            done.clear();
        }
    }
}

fn is_socket(op: ReactorOp) -> bool {
    matches!(op, ReactorOp::Recv { .. } | ReactorOp::Send { .. } | ReactorOp::Accept { .. })
}

fn is_disk(op: ReactorOp) -> bool {
    matches!(
        op,
        ReactorOp::Read { .. }
            | ReactorOp::Write { .. }
            | ReactorOp::ReadRegistered { .. }
            | ReactorOp::WriteRegistered { .. }
            | ReactorOp::Fsync { .. }
            | ReactorOp::WriteOut { .. }
            | ReactorOp::Fallocate { .. }
    )
}

/// The readiness a socket operation needs.
fn poll_of(op: ReactorOp) -> squeue::Entry {
    let (fd, events) = match op {
        ReactorOp::Send { fd, .. } => (fd, libc::POLLOUT),
        ReactorOp::Recv { fd, .. } | ReactorOp::Accept { fd } | ReactorOp::PollIn { fd } => {
            (fd, libc::POLLIN)
        }
        _ => unreachable!("only sockets are polled"),
    };
    opcode::PollAdd::new(types::Fd(fd), events as u32).build()
}

fn entry_of(op: ReactorOp, registered: &[(usize, usize)]) -> squeue::Entry {
    let length = |span: Span| span.len().min(TRANSFER_BYTES_MAX) as u32;
    match op {
        ReactorOp::Nop => opcode::Nop::new().build(),
        ReactorOp::Read { fd, span, offset } => match fixed(span, registered) {
            Some(index) => {
                opcode::ReadFixed::new(types::Fd(fd), span.pointer(), length(span), index)
                    .offset(offset)
                    .build()
            }
            None => opcode::Read::new(types::Fd(fd), span.pointer(), length(span))
                .offset(offset)
                .build(),
        },
        ReactorOp::Write { fd, span, offset } => match fixed(span, registered) {
            Some(index) => {
                opcode::WriteFixed::new(types::Fd(fd), span.pointer(), length(span), index)
                    .offset(offset)
                    .build()
            }
            None => opcode::Write::new(types::Fd(fd), span.pointer(), length(span))
                .offset(offset)
                .build(),
        },
        // Of such a buffer the address is where in it the bytes begin.
        ReactorOp::ReadRegistered { fd, buffer, offset } => {
            let begin = std::ptr::without_provenance_mut(buffer.from() as usize);
            opcode::ReadFixed::new(types::Fd(fd), begin, buffer.len(), buffer.place())
                .offset(offset)
                .build()
        }
        ReactorOp::WriteRegistered { fd, buffer, offset } => {
            let begin = std::ptr::without_provenance(buffer.from() as usize);
            opcode::WriteFixed::new(types::Fd(fd), begin, buffer.len(), buffer.place())
                .offset(offset)
                .build()
        }
        ReactorOp::Fsync { fd, datasync } => {
            let flags =
                if datasync { types::FsyncFlags::DATASYNC } else { types::FsyncFlags::empty() };
            opcode::Fsync::new(types::Fd(fd)).flags(flags).build()
        }
        ReactorOp::WriteOut { fd, offset, length } => {
            opcode::SyncFileRange::new(types::Fd(fd), length)
                .offset(offset)
                .flags(WRITE_OUT)
                .build()
        }
        ReactorOp::Fallocate { fd, mode, offset, length } => {
            opcode::Fallocate::new(types::Fd(fd), length).offset(offset).mode(mode).build()
        }
        ReactorOp::Recv { fd, span } => {
            opcode::Recv::new(types::Fd(fd), span.pointer(), length(span)).build()
        }
        ReactorOp::Send { fd, span } => {
            opcode::Send::new(types::Fd(fd), span.pointer(), length(span))
                .flags(libc::MSG_NOSIGNAL)
                .build()
        }
        ReactorOp::Accept { fd } => accept_entry(fd),
        ReactorOp::PollIn { .. } => poll_of(op),
        ReactorOp::Command { fd, command, address, bytes } => {
            opcode::UringCmd16::new(types::Fd(fd), command).addr(Some(address)).cmd(bytes).build()
        }
    }
}

fn accept_entry(fd: RawFd) -> squeue::Entry {
    opcode::Accept::new(types::Fd(fd), std::ptr::null_mut(), std::ptr::null_mut())
        .flags(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)
        .build()
}

/// The registered memory that a span lies in.
fn fixed(span: Span, registered: &[(usize, usize)]) -> Option<u16> {
    let start = span.pointer() as usize;
    let inside = |&(first, length): &(usize, usize)| {
        start >= first && start - first < length && span.len() <= length - (start - first)
    };
    registered.iter().position(inside).map(|index| index as u16)
}
