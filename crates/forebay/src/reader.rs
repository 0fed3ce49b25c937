// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading a cache device for recovery: many small reads at once, and what comes next ahead of its
//! use; a checkpoint's pages checked and put in place by several threads while others are read.
//!
//! # Invariants
//!
//! - **O1** Nothing is under way when the reader is gone: its memory and the reactor are free again.
//! - **O2** A piece of `fill`'s memory is either being read into, or waits to be put in place, or is
//!   being put in place by one thread, or is free.
#![allow(unsafe_code)]

use crate::ingest;
use crate::io::lasting;
use crate::io::{Arena, Completion, Device, Operation, Reactor, Span};
use crate::populating::Populating;
use forebay_core::effect::Fault;
use forebay_core::log::recovery::{CacheReader, STRETCH_BLOCKS_MAX, Stretch};
use forebay_core::map::slots::ROW_BYTES;
use forebay_core::units::BLOCK_SIZE;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that are read at once by `read_each`, at most; as much is read ahead.
const HALF: usize = 2 << 20;
/// Bytes of the longest read of `fill`, and how many reads are under way or being put in place.
const PIECE: usize = STRETCH_BLOCKS_MAX as usize * BLOCK_SIZE;
const PIECES: usize = 24;
/// Threads that put pages in place, this one included. It is work for the memory: more are hardly
/// faster.
const WORKERS_MAX: usize = 4;

/// A reader of a device that nobody else uses meanwhile.
pub struct Reader<'a> {
    device: &'a mut dyn Device,
    reactor: &'a mut Reactor,
    halves: [Arena; 2],
    pieces: Arena,
    /// Which half the next reads go to.
    half: usize,
    /// What was begun before anybody asked for it, in the half that is next.
    ahead: Option<(Vec<u64>, usize)>,
    /// What is to be begun after the next reads.
    next: Option<(Vec<u64>, usize)>,
    /// Reads under way, by half, then those of `fill`; and which have failed.
    under_way: [usize; 3],
    failed: [Vec<u32>; 3],
    /// Reads of `fill` that are done.
    filled: Vec<u32>,
    workers: usize,
    /// The map is to last, and where it does.
    lasting: bool,
    files: [Option<File>; 2],
    /// The index's memory before it is asked for, being made ready.
    cells: Option<Populating<u64>>,
    done: Vec<Completion>,
    events: Vec<(u64, i32)>,
    /// Bytes that were written again, and why that failed.
    rewritten: u64,
    refused: Option<io::Error>,
    /// Why the last of `rewrite` and `read` failed.
    error: Option<io::Error>,
}

/// The index in `under_way` and `failed` of the reads of `fill`.
const FILL: usize = 2;

impl<'a> Reader<'a> {
    /// A reader over this device, by this reactor.
    pub fn new(device: &'a mut dyn Device, reactor: &'a mut Reactor) -> io::Result<Reader<'a>> {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Reader {
            device,
            reactor,
            halves: [Arena::reserved(HALF)?, Arena::reserved(HALF)?],
            pieces: Arena::reserved(PIECES * PIECE)?,
            half: 0,
            ahead: None,
            next: None,
            under_way: [0; 3],
            failed: [const { Vec::new() }; 3],
            filled: Vec::new(),
            workers: workers.min(WORKERS_MAX),
            lasting: false,
            files: [None, None],
            cells: None,
            done: Vec::new(),
            events: Vec::new(),
            rewritten: 0,
            refused: None,
            error: None,
        })
    }

    /// Takes the map's memory from where the next program of this process can have it.
    pub fn lasting(mut self, lasting: bool) -> Reader<'a> {
        self.lasting = lasting;
        self
    }

    /// How many bytes were written again, or why some could not be.
    pub fn rewritten(&mut self) -> io::Result<u64> {
        self.refused.take().map_or(Ok(self.rewritten), Err)
    }

    /// Where the index's cells and the slots' rows lie, if they last.
    pub fn into_files(mut self) -> [Option<File>; 2] {
        std::mem::take(&mut self.files)
    }

    fn begin(&mut self, of: usize, at: u32, operation: Operation) {
        let token = (of as u64) << 32 | u64::from(at);
        self.device.submit(self.reactor, operation, token, Instant::now());
        self.under_way[of] += 1;
    }

    fn begin_each(&mut self, half: usize, offsets: &[u64], part: usize) {
        self.failed[half].clear();
        for (at, offset) in offsets.iter().enumerate() {
            let span = self.halves[half].span(at * part, part);
            self.begin(half, at as u32, Operation::Read { span, offset: *offset });
        }
    }

    /// Sees to what is done: waits for the first of it if it is to.
    fn turn(&mut self, wait: bool) {
        self.device.poll(self.reactor, Instant::now(), &mut self.done);
        let deadline = self.device.deadline();
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = if wait && self.done.is_empty() { left } else { Some(Duration::ZERO) };
        // An error of the ring itself is as good as no answer yet: R1 brings each.
        if self.reactor.wait(timeout, &mut self.events).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let now = Instant::now();
        for (user_data, result) in self.events.drain(..) {
            self.device.event(self.reactor, user_data, result, now, &mut self.done);
        }
        for answer in self.done.drain(..) {
            let (of, at) = ((answer.token >> 32) as usize, answer.token as u32);
            self.under_way[of] -= 1;
            if let Err(error) = answer.result {
                self.failed[of].push(at);
                // What was read ahead and failed is told when it is wanted.
                if of == FILL {
                    self.error = Some(error.into());
                }
            }
            if of == FILL {
                self.filled.push(at);
            }
        }
    }

    /// Waits until all reads of one kind are done.
    fn wait(&mut self, of: usize) {
        while self.under_way[of] > 0 {
            self.turn(true);
        }
    }

    fn read_half(&mut self, offsets: &[u64], part: usize, bytes: &mut [u8]) {
        let half = self.half;
        // What was read ahead is taken if it is this.
        let ahead = self.ahead.take();
        if ahead.is_none_or(|ahead| ahead.0 != offsets || ahead.1 != part) {
            self.wait(half);
            self.begin_each(half, offsets, part);
        }
        if let Some((offsets, part)) = self.next.take() {
            // The other half is filled while this one is being used.
            self.wait(1 - half);
            self.begin_each(1 - half, &offsets, part);
            (self.ahead, self.half) = (Some((offsets, part)), 1 - half);
        }
        self.wait(half);
        self.halves[half].span(0, bytes.len()).copy_out(bytes);
        for at in self.failed[half].drain(..) {
            bytes[at as usize * part..][..part].fill(0);
        }
        // What was begun meanwhile goes to the kernel now, not when it is asked for.
        self.turn(false);
    }

    fn new_cells(&mut self, count: usize) -> Vec<u64> {
        if !self.lasting {
            return vec![0; count];
        }
        let (list, file) = lasting::zeros(count);
        self.files[0] = file;
        list
    }

    /// The blocks of a piece that could not be read as a whole: what can be of them.
    fn read_blocks(&self, offset: u64, span: Span) {
        let mut bytes = [0; BLOCK_SIZE];
        for at in (0..span.len()).step_by(BLOCK_SIZE) {
            if self.device.read_at(offset + at as u64, &mut bytes).is_err() {
                bytes.fill(0);
            }
            span.part(at, BLOCK_SIZE).copy_in(&bytes);
        }
    }
}

/// A stretch that was read into a piece, and where it goes.
struct Job<'t, T> {
    piece: u32,
    number: usize,
    span: Span,
    target: &'t mut [T],
}

/// What the threads of a `fill` share.
struct Work<'t, T> {
    jobs: VecDeque<Job<'t, T>>,
    free: Vec<u32>,
    /// What `put` says of the pages so far; none: of one it said none.
    sum: Option<u64>,
    is_over: bool,
}

struct Shared<'t, T> {
    work: Mutex<Work<'t, T>>,
    /// There is a job, or it is over.
    job: Condvar,
    /// A piece is free.
    free: Condvar,
}

impl<'t, T> Shared<'t, T> {
    fn lock(&self) -> MutexGuard<'_, Work<'t, T>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts one stretch in place.
    fn run(
        &self,
        job: Job<'t, T>,
        put: &impl Fn(usize, &mut [[u8; BLOCK_SIZE]], &mut [T]) -> Option<u64>,
    ) {
        // SAFETY: the read into it is done, and nobody else has it until it is free again (O2).
        let bytes = unsafe { job.span.as_mut_slice() };
        let sum = put(job.number, bytes.as_chunks_mut().0, job.target);
        let mut work = self.lock();
        work.sum = work.sum.zip(sum).map(|(all, more)| all + more);
        work.free.push(job.piece);
        self.free.notify_one();
    }

    /// Puts pieces in place until it is over.
    fn serve(&self, put: &impl Fn(usize, &mut [[u8; BLOCK_SIZE]], &mut [T]) -> Option<u64>) {
        let mut work = self.lock();
        loop {
            if let Some(job) = work.jobs.pop_front() {
                drop(work);
                self.run(job, put);
                work = self.lock();
            } else if work.is_over {
                return;
            } else {
                work = self.job.wait(work).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// Ends the threads of a `fill`, however it ends.
struct Over<'s, 't, T>(&'s Shared<'t, T>);

impl<T> Drop for Over<'_, '_, T> {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.job.notify_all();
    }
}

impl CacheReader for Reader<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        if bytes.len() > PIECES * PIECE || !bytes.len().is_multiple_of(BLOCK_SIZE) {
            return self.device.read_at(offset, bytes).map_err(|_| Fault);
        }
        // By way of memory that a device can fill by itself: a list's own would be filled by way of the page cache,
        // with more than was asked for.
        let span = self.pieces.span(0, bytes.len());
        self.failed[FILL].clear();
        self.begin(FILL, 0, Operation::Read { span, offset });
        self.wait(FILL);
        self.filled.clear();
        span.copy_out(bytes);
        if self.failed[FILL].is_empty() { Ok(()) } else { Err(Fault) }
    }

    fn rewrite(&mut self, offset: u64, bytes: &[u8]) {
        // From memory that a device can take by itself: a list's own would go by way of the page cache, and be flushed at once.
        for (offset, bytes) in (offset..).step_by(PIECES * PIECE).zip(bytes.chunks(PIECES * PIECE))
        {
            if self.refused.is_some() {
                return;
            }
            let span = self.pieces.span(0, bytes.len());
            span.copy_in(bytes);
            self.failed[FILL].clear();
            self.begin(FILL, 0, Operation::Write { span, offset });
            self.wait(FILL);
            self.filled.clear();
            match self.failed[FILL].pop() {
                None => self.rewritten += bytes.len() as u64,
                Some(_) => self.refused = self.error.take(),
            }
        }
    }

    fn will_take_cells(&mut self, count: usize) {
        // With one processor somebody else would have to wait for it.
        if self.workers > 1 {
            let cells = self.new_cells(count);
            self.cells = Some(Populating::new(cells));
        }
    }

    fn cells(&mut self, count: usize) -> Vec<u64> {
        let ready = self.cells.take().map(Populating::end);
        ready.filter(|cells| cells.len() == count).unwrap_or_else(|| self.new_cells(count))
    }

    fn rows(&mut self, count: usize) -> Vec<[u8; ROW_BYTES]> {
        if !self.lasting {
            return vec![[0; ROW_BYTES]; count];
        }
        let (list, file) = lasting::zeros(count);
        self.files[1] = file;
        list
    }

    fn read_each(&mut self, offsets: &[u64], bytes: &mut [u8]) {
        let Some(part) = bytes.len().checked_div(offsets.len()) else { return };
        let at_once = HALF / part;
        for (offsets, bytes) in offsets.chunks(at_once).zip(bytes.chunks_mut(at_once * part)) {
            self.read_half(offsets, part, bytes);
        }
    }

    fn will_read(&mut self, offsets: &[u64], length: usize) {
        if offsets.len() * length <= HALF {
            self.next = Some((offsets.to_vec(), length));
        }
    }

    fn fill<T: Send>(
        &mut self,
        stretches: &[Stretch],
        mut target: &mut [T],
        put: impl Fn(usize, &mut [[u8; BLOCK_SIZE]], &mut [T]) -> Option<u64> + Sync,
    ) -> Option<u64> {
        let mut wanted = Vec::with_capacity(stretches.len());
        for (number, stretch) in stretches.iter().enumerate() {
            let part = target.split_off_mut(..stretch.items)?;
            if stretch.blocks > 0 {
                wanted.push((number, part));
            }
        }
        let mut wanted = wanted.into_iter();
        let shared = Shared {
            work: Mutex::new(Work {
                jobs: VecDeque::new(),
                free: (0..PIECES as u32).collect(),
                sum: Some(0),
                is_over: false,
            }),
            job: Condvar::new(),
            free: Condvar::new(),
        };
        self.filled.clear();
        self.failed[FILL].clear();
        std::thread::scope(|scope| {
            let over = Over(&shared);
            for _ in 1..self.workers {
                scope.spawn(|| shared.serve(&put));
            }
            let mut reading: Vec<Option<Job<'_, T>>> = Vec::new();
            reading.resize_with(PIECES, || None);
            let mut is_wanted = true;
            loop {
                let mut work = shared.lock();
                // A bad page spoils all: nothing more is read.
                is_wanted &= work.sum.is_some();
                let free = if is_wanted { core::mem::take(&mut work.free) } else { Vec::new() };
                drop(work);
                for piece in free {
                    let Some((number, target)) = wanted.next() else {
                        is_wanted = false;
                        break;
                    };
                    let Stretch { offset, blocks, .. } = stretches[number];
                    let length = blocks as usize * BLOCK_SIZE;
                    let span = self.pieces.span(piece as usize * PIECE, length);
                    self.begin(FILL, piece, Operation::Read { span, offset });
                    reading[piece as usize] = Some(Job { piece, number, span, target });
                }
                let work = shared.lock();
                if self.under_way[FILL] == 0 && work.jobs.is_empty() {
                    if !is_wanted {
                        break;
                    }
                    // All is in other hands.
                    if work.free.is_empty() {
                        drop(shared.free.wait(work).unwrap_or_else(PoisonError::into_inner));
                    }
                    continue;
                }
                let is_idle = work.jobs.is_empty();
                drop(work);
                if self.under_way[FILL] > 0 {
                    self.turn(is_idle);
                }
                for piece in core::mem::take(&mut self.filled) {
                    let Some(job) = reading[piece as usize].take() else { continue };
                    if self.failed[FILL].contains(&piece) {
                        self.failed[FILL].retain(|failed| *failed != piece);
                        self.read_blocks(stretches[job.number].offset, job.span);
                    }
                    shared.lock().jobs.push_back(job);
                    shared.job.notify_one();
                }
                // This thread puts pages in place as well.
                let job = shared.lock().jobs.pop_front();
                if let Some(job) = job {
                    shared.run(job, &put);
                }
            }
            drop(over);
        });
        shared.lock().sum
    }

    fn workers(&self) -> usize {
        self.workers
    }

    #[inline]
    fn prefetch<T>(soon: &T) {
        ingest::prefetch(soon);
    }

    fn share<T: Send>(&mut self, parts: Vec<T>, work: impl Fn(T) + Sync) {
        let mut parts = parts.into_iter();
        let mine = parts.next();
        std::thread::scope(|scope| {
            for part in parts {
                scope.spawn(|| work(part));
            }
            mine.map(&work);
        });
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        for of in 0..self.under_way.len() {
            self.wait(of); // O1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{
        DeviceError, FaultDevice, FaultRule, FaultWhen, Faults, Layer, MemoryDevice, OperationKind,
        ReactorKind,
    };

    fn device(bytes: usize) -> MemoryDevice {
        let device = MemoryDevice::new(bytes as u64, 4096).expect("there is memory");
        for block in 0..bytes / 4096 {
            device.write_at(block as u64 * 4096, &[block as u8; 4096]).expect("it takes writes");
        }
        device
    }

    #[test]
    fn places_in_any_order_are_read_into_their_parts() {
        let mut device = device(4 << 20);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        let places: Vec<u64> = [7, 3, 900, 0].map(|block| block * 4096).into();
        let mut bytes = vec![0; 4 * 4096];
        reader.read_each(&places, &mut bytes);
        let found: Vec<u8> = bytes.chunks_exact(4096).map(|part| part[9]).collect();
        assert_eq!(found, [7, 3, 132, 0]);
    }

    #[test]
    fn what_was_named_is_read_ahead_and_a_jump_is_no_harm() {
        let mut device = device(40 << 20);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        let mut bytes = vec![0; HALF];
        let starts = [0, HALF, 2 * HALF, 0, 3 * HALF, 4 * HALF, HALF];
        let named = [HALF, 2 * HALF, 3 * HALF, 3 * HALF, HALF, HALF, 0];
        let places = |start| (0..8).map(|at| (start + at * (HALF / 8)) as u64).collect::<Vec<_>>();
        for (start, named) in starts.into_iter().zip(named) {
            reader.will_read(&places(named), HALF / 8);
            reader.read_each(&places(start), &mut bytes);
            for (at, block) in bytes.chunks_exact(4096).enumerate() {
                assert_eq!(block[0], ((start / 4096) + at) as u8, "block {at} of {start}");
            }
        }
    }

    #[test]
    fn stretches_are_put_in_place_by_any_number_of_threads() {
        let faults = Faults::new();
        // A stretch and a block of it cannot be read.
        faults.add(FaultRule::new(Some(OperationKind::Read), FaultWhen::Nth(3)));
        faults.add(FaultRule::new(Some(OperationKind::Read), FaultWhen::Nth(50)));
        let mut device = FaultDevice::new(Box::new(device(64 << 20)), faults);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        // Of all lengths, anywhere, with gaps; every seventh leaves its part of the table alone.
        let stretches: Vec<Stretch> = (0..90)
            .map(|number: u32| {
                let blocks = if number % 7 == 6 { 0 } else { 100 + number * 7 % 157 };
                let at = u64::from(number * 5077 % 16_000);
                Stretch { offset: at * 4096, blocks, items: number as usize % 5 * 3 }
            })
            .collect();
        let items: usize = stretches.iter().map(|stretch| stretch.items).sum();
        for workers in [1, 2, 4] {
            reader.workers = workers;
            let mut target = vec![u32::MAX; items];
            let unread = Mutex::new(0);
            let put = |number: usize, pages: &mut [[u8; BLOCK_SIZE]], target: &mut [u32]| {
                let Stretch { offset, blocks, items } = stretches[number];
                assert_eq!((pages.len(), target.len()), (blocks as usize, items));
                for (page, block) in pages.iter().zip((offset / 4096)..) {
                    if *page != [block as u8; BLOCK_SIZE] {
                        assert_eq!(*page, [0; BLOCK_SIZE]);
                        *unread.lock().expect("no panic") += 1;
                    }
                }
                target.fill(number as u32);
                Some(number as u64)
            };
            let sum = reader.fill(&stretches, &mut target, put);
            let read = |(_, stretch): &(usize, &Stretch)| stretch.blocks > 0;
            let expected = stretches.iter().enumerate().filter(read);
            assert_eq!(sum, Some(expected.map(|(number, _)| number as u64).sum()));
            let expected = stretches.iter().enumerate().flat_map(|(number, stretch)| {
                let value = if stretch.blocks > 0 { number as u32 } else { u32::MAX };
                std::iter::repeat_n(value, stretch.items)
            });
            assert!(target.iter().copied().eq(expected));
            let unread = unread.into_inner().expect("no panic");
            assert_eq!(unread, usize::from(workers == 1), "only the second fault is seen, once");
            let put =
                |number, _: &mut [[u8; BLOCK_SIZE]], _: &mut [u32]| (number != 50).then_some(1);
            assert_eq!(reader.fill(&stretches, &mut target, put), None);
        }
    }

    #[test]
    fn work_is_done_once_for_each_part() {
        let mut device = device(1 << 20);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        let mut parts = [0; 9];
        reader.share(parts.iter_mut().collect(), |part| *part += 1);
        assert_eq!(parts, [1; 9]);
        reader.share(Vec::<u8>::new(), |_| unreachable!("there is none"));
    }

    #[test]
    fn what_is_written_again_is_there_or_the_device_says_why_not() {
        let faults = Faults::new();
        faults.add(FaultRule::new(Some(OperationKind::Write), FaultWhen::Nth(2)));
        let mut device = FaultDevice::new(Box::new(device(1 << 20)), faults);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        reader.rewrite(8192, &[77; 3 * 4096]);
        assert_eq!(reader.rewritten().expect("it was written"), 3 * 4096);
        let mut bytes = vec![0; 5 * 4096];
        reader.read(4096, &mut bytes).expect("it can be read");
        let found: Vec<u8> = bytes.chunks_exact(4096).map(|part| part[4095]).collect();
        assert_eq!(found, [1, 77, 77, 77, 5]);
        reader.rewrite(0, &[78; 4096]);
        reader.rewrite(4096, &[79; 4096]);
        assert!(reader.rewritten().is_err(), "nothing is believed after one that was refused");
        reader.read(4096, &mut bytes[..4096]).expect("it can be read");
        assert_eq!(bytes[0], 1, "nor written");
    }

    /// Refuses writes, and gives the errors of reads it was told of behind that.
    struct Refuses {
        below: MemoryDevice,
        fails_from: u64,
        reads: Vec<u64>,
        writes: Vec<u64>,
    }

    impl Layer for Refuses {
        fn below(&self) -> &dyn Device {
            &self.below
        }

        fn below_mut(&mut self) -> &mut dyn Device {
            &mut self.below
        }

        fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
            match operation {
                Operation::Write { .. } => self.writes.push(token),
                Operation::Read { offset, .. } if offset >= self.fails_from => {
                    self.reads.push(token);
                }
                _ => self.below.submit(reactor, operation, token, now),
            }
        }

        fn turn(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
            let Some(write) = self.writes.pop() else { return };
            let answer = |token, error| Completion { token, result: Err(error) };
            done.push(answer(write, DeviceError::READ_ONLY));
            done.extend(self.reads.drain(..).map(|read| answer(read, DeviceError::IO)));
        }
    }

    /// What was read ahead fails in the same turn.
    #[test]
    fn a_write_that_is_refused_is_told_by_its_own_error() {
        let (reads, writes) = (Vec::new(), Vec::new());
        let below = device(1 << 20);
        let mut device = Refuses { below, fails_from: 512 << 10, reads, writes };
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        let mut bytes = vec![0; 4096];
        reader.will_read(&[512 << 10], 4096);
        reader.read_each(&[4096], &mut bytes);
        assert_eq!(bytes, [1; 4096]);
        reader.rewrite(0, &[78; 4096]);
        let error = reader.rewritten().expect_err("it was refused");
        assert_eq!(error.raw_os_error(), Some(DeviceError::READ_ONLY.errno));
    }

    #[test]
    fn what_cannot_be_read_is_zeros() {
        let faults = Faults::new();
        faults.add(FaultRule::new(Some(OperationKind::Read), FaultWhen::Nth(2)));
        let mut device = FaultDevice::new(Box::new(device(1 << 20)), faults);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        let mut bytes = vec![9; 3 * 4096];
        reader.read_each(&[4096, 8192, 12288], &mut bytes);
        let found: Vec<u8> = bytes.chunks_exact(4096).map(|part| part[9]).collect();
        assert_eq!(found, [1, 0, 3]);
    }
}
