// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The reactor's portable back end: worker threads for files, `poll(2)` for sockets.
//!
//! File operations go to a pool in one batch per wait; a worker that finishes the first of several
//! rings an eventfd. Socket operations are tried, non-blocking, by the loop's own thread; those
//! not ready are parked until `poll(2)` says so. The pool starts with the first file operation, and grows with the
//! number of files: each has a few workers at once and no more, so that one that does not answer keeps no other waiting.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::accepted::{Accepted, PAUSE, is_to_pause};
use super::bell::Bell;
use super::reactor::{DROP_WAIT_MAX, ReactorOp};
use super::slab::ROOM;
use super::sys;

/// Workers for each file.
const WORKERS_EACH: usize = 4;
/// And in all: there are at most 60 volumes and a cache.
const WORKERS_MAX: usize = 256;
const DROP_PAUSE: Duration = Duration::from_millis(1);
/// They only make system calls; what locks memory locks all of their stacks.
const STACK_BYTES: usize = 128 << 10;

#[derive(Debug)]
struct Job {
    op: ReactorOp,
    user_data: u64,
}

#[derive(Debug)]
struct Shared {
    jobs: Mutex<Jobs>,
    work: Condvar,
    done: Mutex<Vec<(u64, i32)>>,
    bell: Bell,
}

#[derive(Debug)]
struct Jobs {
    queue: VecDeque<Job>,
    /// The file of each job that a worker is at.
    at_work: Vec<RawFd>,
    /// The reactor is gone: workers end after the job they are at.
    closed: bool,
}

impl Jobs {
    fn new() -> Jobs {
        let queue = VecDeque::with_capacity(ROOM);
        Jobs { queue, at_work: Vec::with_capacity(WORKERS_MAX), closed: false }
    }

    /// The first job whose file has a worker left.
    fn take(&mut self) -> Option<Job> {
        let Jobs { queue, at_work, .. } = self;
        let has_worker = |job: &Job| {
            at_work.iter().filter(|file| **file == job.op.file()).count() < WORKERS_EACH
        };
        let job = queue.iter().position(has_worker).and_then(|at| queue.remove(at))?;
        at_work.push(job.op.file());
        Some(job)
    }

    /// A job of this file has ended.
    fn end(&mut self, file: RawFd) {
        let at = self.at_work.iter().position(|it| *it == file).expect("it was taken");
        self.at_work.swap_remove(at);
    }
}

/// A socket operation that waits for its peer.
#[derive(Debug)]
struct Parked {
    op: ReactorOp,
    user_data: u64,
    /// Not tried yet, so poll need not be asked first.
    fresh: bool,
    /// Not tried before (T3 of `accepted.rs`).
    pauses_until: Option<Instant>,
}

impl Parked {
    /// Tries it; what it has come to, if it has.
    fn attempt(&mut self, accepted: &mut Accepted) -> Option<i32> {
        let result = attempt(self.op, accepted);
        let pauses = is_to_pause(self.op, result);
        self.pauses_until = pauses.then(|| Instant::now() + PAUSE);
        (result != -libc::EAGAIN && !pauses).then_some(result)
    }

    /// How long it is not to be tried.
    fn pause(&self, now: Instant) -> Option<Duration> {
        self.pauses_until.and_then(|end| end.checked_duration_since(now)).filter(|it| !it.is_zero())
    }
}

#[derive(Debug)]
pub(crate) struct ThreadsReactor {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// All that there were jobs of.
    files: Vec<RawFd>,
    /// Taken since the last wait.
    batch: Vec<Job>,
    ready: Vec<(u64, i32)>,
    parked: Vec<Parked>,
    fds: Vec<libc::pollfd>,
    /// Handed to the pool and not answered.
    at_work: usize,
    /// New connections that nobody has taken yet.
    pub(crate) accepted: Accepted,
}

impl ThreadsReactor {
    pub(crate) fn new() -> io::Result<ThreadsReactor> {
        let shared = Arc::new(Shared {
            jobs: Mutex::new(Jobs::new()),
            work: Condvar::new(),
            done: Mutex::new(Vec::new()),
            bell: Bell::new()?,
        });
        Ok(ThreadsReactor {
            shared,
            workers: Vec::new(),
            files: Vec::new(),
            batch: Vec::with_capacity(ROOM),
            ready: Vec::with_capacity(ROOM),
            parked: Vec::with_capacity(ROOM),
            fds: Vec::with_capacity(ROOM + 1),
            at_work: 0,
            accepted: Accepted::new(),
        })
    }

    pub(crate) fn submit(&mut self, op: ReactorOp, user_data: u64) {
        match op {
            ReactorOp::Nop => self.ready.push((user_data, 0)),
            ReactorOp::Command { .. }
            | ReactorOp::ReadRegistered { .. }
            | ReactorOp::WriteRegistered { .. } => {
                self.ready.push((user_data, -libc::EOPNOTSUPP));
            }
            ReactorOp::Read { .. }
            | ReactorOp::Write { .. }
            | ReactorOp::Fsync { .. }
            | ReactorOp::WriteOut { .. }
            | ReactorOp::Fallocate { .. } => self.batch.push(Job { op, user_data }),
            ReactorOp::Recv { .. }
            | ReactorOp::Send { .. }
            | ReactorOp::Accept { .. }
            | ReactorOp::PollIn { .. } => {
                self.parked.push(Parked { op, user_data, fresh: true, pauses_until: None })
            }
        }
    }

    pub(crate) fn cancel(&mut self, user_data: u64) {
        let mut cancelled = 0;
        let mut drop_it = |other: u64| {
            cancelled += usize::from(other == user_data);
            other == user_data
        };
        self.parked.retain(|parked| !drop_it(parked.user_data));
        self.batch.retain(|job| !drop_it(job.user_data));
        let mut jobs = lock(&self.shared.jobs);
        let queued = jobs.queue.len();
        jobs.queue.retain(|job| !drop_it(job.user_data));
        self.at_work -= queued - jobs.queue.len();
        drop(jobs);
        self.ready.extend((0..cancelled).map(|_| (user_data, -libc::ECANCELED)));
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.at_work + self.batch.len() + self.ready.len() + self.parked.len()
    }

    pub(crate) fn wait(
        &mut self,
        timeout: Option<Duration>,
        done: &mut Vec<(u64, i32)>,
    ) -> io::Result<()> {
        let before = done.len();
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.hand_over()?;
        done.append(&mut self.ready);
        self.try_fresh(done);
        self.collect(done);
        // Bounded by the timeout; without one, by the first completion, error or signal.
        loop {
            let left = if done.len() > before {
                Some(Duration::ZERO)
            } else {
                end.map(|end| end.saturating_duration_since(Instant::now())).or(timeout)
            };
            if left == Some(Duration::ZERO) && self.parked.is_empty() {
                return Ok(()); // nothing to ask the kernel
            }
            let pause = self.list_fds();
            let limit = [left, pause].into_iter().flatten().min();
            match sys::checked(sys::poll(&mut self.fds, limit)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.fds.first().is_some_and(|bell| bell.revents != 0) {
                // Before the list is taken: who adds to an empty list afterwards rings again.
                self.shared.bell.clear();
            }
            self.try_ready(done);
            self.collect(done);
            if done.len() > before || left == Some(Duration::ZERO) {
                return Ok(());
            }
        }
    }

    /// Gives the batch to the pool.
    fn hand_over(&mut self) -> io::Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        for job in &self.batch {
            if !self.files.contains(&job.op.file()) {
                self.files.push(job.op.file());
            }
        }
        while self.workers.len() < (WORKERS_EACH * self.files.len()).min(WORKERS_MAX) {
            let shared = Arc::clone(&self.shared);
            let name = format!("forebay-io-{}", self.workers.len());
            let worker = std::thread::Builder::new().name(name).stack_size(STACK_BYTES);
            match worker.spawn(move || work(&shared)) {
                Ok(worker) => self.workers.push(worker),
                Err(error) if self.workers.is_empty() => return Err(error),
                Err(_) => break, // fewer will do
            }
        }
        let count = self.batch.len();
        self.at_work += count;
        lock(&self.shared.jobs).queue.extend(self.batch.drain(..));
        if count == 1 {
            self.shared.work.notify_one();
        } else {
            self.shared.work.notify_all();
        }
        Ok(())
    }

    /// Takes what the pool has finished.
    fn collect(&mut self, done: &mut Vec<(u64, i32)>) {
        if self.at_work == 0 {
            return;
        }
        let mut finished = lock(&self.shared.done);
        self.at_work -= finished.len();
        done.append(&mut finished);
    }

    /// Tries the socket operations that are new, unless an older one waits for the same thing.
    fn try_fresh(&mut self, done: &mut Vec<(u64, i32)>) {
        let mut index = 0;
        while index < self.parked.len() {
            let parked = &self.parked[index];
            let (wanted, fresh, user_data) = (wish(parked.op), parked.fresh, parked.user_data);
            let older = &self.parked[..index];
            let first = fresh && older.iter().all(|older| wish(older.op) != wanted);
            self.parked[index].fresh = false;
            if first && let Some(result) = self.parked[index].attempt(&mut self.accepted) {
                self.parked.remove(index);
                done.push((user_data, result));
                continue;
            }
            index += 1;
        }
    }

    /// The bell, then one row for each parked operation. Gives how long the first pause lasts.
    fn list_fds(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let bell = libc::pollfd { fd: self.shared.bell.fd(), events: libc::POLLIN, revents: 0 };
        self.fds.clear();
        self.fds.push(bell);
        self.fds.extend(self.parked.iter().map(|parked| {
            let (fd, events) = wish(parked.op);
            // The kernel passes over a negative one.
            let fd = if parked.pause(now).is_some() { -1 } else { fd };
            libc::pollfd { fd, events, revents: 0 }
        }));
        self.parked.iter().filter_map(|parked| parked.pause(now)).min()
    }

    /// Tries the parked operations that `poll(2)` called ready, in the order of submission.
    fn try_ready(&mut self, done: &mut Vec<(u64, i32)>) {
        let mut row = 0;
        let (fds, accepted) = (&self.fds, &mut self.accepted);
        self.parked.retain_mut(|parked| {
            row += 1; // row 0 is the bell
            let revents = fds[row].revents;
            if revents == 0 {
                return true;
            }
            let result = match parked.op {
                ReactorOp::PollIn { .. } if revents & libc::POLLNVAL != 0 => Some(-libc::EBADF),
                ReactorOp::PollIn { .. } => Some(i32::from(revents)),
                _ => parked.attempt(accepted),
            };
            let Some(result) = result else { return true };
            done.push((parked.user_data, result));
            false
        });
    }
}

impl Drop for ThreadsReactor {
    /// Jobs not begun are forgotten, those at work are waited for (R3), but not for ever: a device that never answers would keep the process
    /// from its end, which ends some such calls. Its worker touches nothing else any more.
    fn drop(&mut self) {
        let mut jobs = lock(&self.shared.jobs);
        jobs.closed = true;
        jobs.queue.clear();
        drop(jobs);
        self.shared.work.notify_all();
        join_within(std::mem::take(&mut self.workers), DROP_WAIT_MAX);
    }
}

/// Leaves those alone that have not ended by then.
fn join_within(workers: Vec<JoinHandle<()>>, limit: Duration) {
    let end = Instant::now() + limit;
    while workers.iter().any(|worker| !worker.is_finished()) && Instant::now() < end {
        std::thread::sleep(DROP_PAUSE);
    }
    for worker in workers.into_iter().filter(JoinHandle::is_finished) {
        let _ = worker.join(); // a worker that panicked is at no job
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing inside the locks can leave a list half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A worker's life.
fn work(shared: &Shared) {
    sys::block_signals();
    loop {
        let mut jobs = lock(&shared.jobs);
        let job = loop {
            if jobs.closed {
                return;
            }
            match jobs.take() {
                Some(job) => break job,
                None => jobs = shared.work.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(jobs);
        let result = perform(job.op);
        let mut done = lock(&shared.done);
        done.push((job.user_data, result));
        let first = done.len() == 1;
        drop(done);
        if first {
            shared.bell.ring();
        }
        lock(&shared.jobs).end(job.op.file());
    }
}

/// A file operation, blocking.
fn perform(op: ReactorOp) -> i32 {
    match op {
        ReactorOp::Read { fd, span, offset } => sys::pread(fd, span, offset),
        ReactorOp::Write { fd, span, offset } => sys::pwrite(fd, span, offset),
        ReactorOp::Fsync { fd, datasync } => sys::fsync(fd, datasync),
        ReactorOp::WriteOut { fd, offset, length } => sys::write_out(fd, offset, length),
        ReactorOp::Fallocate { fd, mode, offset, length } => {
            sys::fallocate(fd, mode, offset, length)
        }
        _ => unreachable!("only file operations are handed to the pool"),
    }
}

/// A socket operation, not blocking: `-EAGAIN` if its peer is not ready.
fn attempt(op: ReactorOp, accepted: &mut Accepted) -> i32 {
    let result = match op {
        ReactorOp::Recv { fd, span } => sys::recv(fd, span),
        ReactorOp::Send { fd, span } => sys::send(fd, span),
        ReactorOp::Accept { fd } => match sys::set_nonblocking(fd) {
            0 => accepted.take(fd, sys::accept(fd)),
            error => error,
        },
        ReactorOp::PollIn { .. } => -libc::EAGAIN,
        _ => unreachable!("only socket operations are parked"),
    };
    if result == -libc::EINTR { -libc::EAGAIN } else { result }
}

impl ReactorOp {
    /// The file that a worker is busy with.
    fn file(&self) -> RawFd {
        match *self {
            ReactorOp::Read { fd, .. }
            | ReactorOp::Write { fd, .. }
            | ReactorOp::Fsync { fd, .. }
            | ReactorOp::WriteOut { fd, .. }
            | ReactorOp::Fallocate { fd, .. } => fd,
            _ => unreachable!("only file operations are handed to the pool"),
        }
    }
}

/// The readiness a parked operation waits for.
fn wish(op: ReactorOp) -> (RawFd, i16) {
    match op {
        ReactorOp::Send { fd, .. } => (fd, libc::POLLOUT),
        ReactorOp::Recv { fd, .. } | ReactorOp::Accept { fd } | ReactorOp::PollIn { fd } => {
            (fd, libc::POLLIN)
        }
        _ => unreachable!("only socket operations are parked"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(jobs: &mut Jobs) -> Vec<u64> {
        std::iter::from_fn(|| jobs.take()).map(|job| job.user_data).collect()
    }

    /// Whoever stopped the daemon heard nothing any more.
    #[test]
    fn a_worker_whose_file_never_answers_is_left() {
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let stuck = std::thread::spawn(move || wait.recv().unwrap_or(()));
        join_within(vec![std::thread::spawn(|| ()), stuck], Duration::from_millis(20));
        drop(end);
    }

    #[test]
    fn a_file_that_does_not_answer_keeps_no_other_waiting() {
        let mut jobs = Jobs::new();
        let ask = |jobs: &mut Jobs, fd: RawFd, user_data: u64| {
            let op = ReactorOp::Fsync { fd, datasync: true };
            jobs.queue.push_back(Job { op, user_data });
        };
        for user_data in 0..100 {
            ask(&mut jobs, 7, user_data);
        }
        ask(&mut jobs, 8, 100);
        ask(&mut jobs, 7, 101);
        ask(&mut jobs, 9, 102);
        assert_eq!(names(&mut jobs), [0, 1, 2, 3, 100, 102]);
        // Each that ends makes room for one more of its file.
        jobs.end(8);
        assert_eq!(names(&mut jobs), []);
        jobs.end(7);
        jobs.end(7);
        assert_eq!(names(&mut jobs), [4, 5]);
    }
}
