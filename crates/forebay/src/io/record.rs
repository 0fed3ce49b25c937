// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device that remembers the order of what happened, for tests of promises about durability.
//!
//! Writes (zeroing and discards as well) and flushes are recorded when they are submitted to the
//! device below and when it answers. A test adds marks, say at each answer to its guest, and asks
//! which writes no flush had covered by then.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::device::{Completion, Device, Operation, OperationKind};
use super::layer::{Layer, Use};
use super::reactor::Reactor;
use super::slab::Slab;

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// An operation went to the device. Its place in the record is the operation's name.
    Submit {
        /// Which device, as given to [`RecordDevice::new`].
        device: u16,
        /// A write or a flush.
        kind: OperationKind,
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// The device answered.
    Complete {
        /// Place in the record of what it answered.
        submitted: usize,
        /// Whether it succeeded.
        good: bool,
    },
    /// The test's own mark.
    Mark(u64),
}

/// What happened, in order; shared by the devices of a test.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Mutex<Vec<Recorded>>>);

impl Recorder {
    /// Nothing recorded yet.
    pub fn new() -> Recorder {
        Recorder::default()
    }

    /// Puts the test's own mark into the record and gives its place.
    pub fn mark(&self, mark: u64) -> usize {
        self.push(Recorded::Mark(mark))
    }

    /// All that happened.
    pub fn all(&self) -> Vec<Recorded> {
        self.with(|all| all.clone())
    }

    /// The writes to `device` submitted before place `end` that were not durable there: places of
    /// those that no flush covered which was submitted after their answer and answered, well,
    /// before `end`.
    pub fn not_durable(&self, device: u16, end: usize) -> Vec<usize> {
        self.with(|all| not_durable(&all[..end.min(all.len())], device))
    }

    fn push(&self, recorded: Recorded) -> usize {
        self.with(|all| {
            all.push(recorded);
            all.len() - 1
        })
    }

    fn with<T>(&self, change: impl FnOnce(&mut Vec<Recorded>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn not_durable(all: &[Recorded], wanted: u16) -> Vec<usize> {
    let mut answered = vec![None; all.len()];
    for (place, recorded) in all.iter().enumerate() {
        if let Recorded::Complete { submitted, good: true } = *recorded {
            answered[submitted] = Some(place);
        }
    }
    let of = |flushes: bool| {
        all.iter().enumerate().filter_map(move |(place, recorded)| match *recorded {
            Recorded::Submit { device, kind, .. }
                if device == wanted && (kind == OperationKind::Flush) == flushes =>
            {
                Some(place)
            }
            _ => None,
        })
    };
    let last_flush = of(true).filter(|place| answered[*place].is_some()).max();
    of(false)
        .filter(|write| match (answered[*write], last_flush) {
            (Some(answer), Some(flush)) => answer > flush,
            _ => true,
        })
        .collect()
}

#[derive(Debug)]
struct Flight {
    token: u64,
    place: Option<usize>,
}

/// A device whose writes and flushes go into a [`Recorder`].
pub struct RecordDevice {
    inner: Box<dyn Device>,
    recorder: Recorder,
    device: u16,
    flights: Slab<Flight>,
}

impl RecordDevice {
    /// Records `inner` under the number `device`.
    pub fn new(inner: Box<dyn Device>, recorder: Recorder, device: u16) -> RecordDevice {
        RecordDevice { inner, recorder, device, flights: Slab::new() }
    }

    fn begin(&self, kind: OperationKind, offset: u64, length: u64) -> Option<usize> {
        let device = self.device;
        (kind != OperationKind::Read)
            .then(|| self.recorder.push(Recorded::Submit { device, kind, offset, length }))
    }

    fn end(&self, place: Option<usize>, good: bool) {
        if let Some(submitted) = place {
            self.recorder.push(Recorded::Complete { submitted, good });
        }
    }
}

impl Layer for RecordDevice {
    fn below(&self) -> &dyn Device {
        self.inner.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.inner.as_mut()
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let place = self.begin(operation.kind(), operation.offset(), operation.length());
        let own = self.flights.insert(Flight { token, place });
        self.inner.submit(reactor, operation, u64::from(own), now);
    }

    /// Records the answers and gives them their own tokens back.
    fn answered(&mut self, answers: &mut Vec<Completion>, from: usize, _: Instant) {
        for answer in &mut answers[from..] {
            let flight = self.flights.remove(answer.token as u32).expect("answered once (D1)");
            answer.token = flight.token;
            self.end(flight.place, answer.result.is_ok());
        }
    }

    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        let place = self.begin(use_of.kind, use_of.offset, use_of.length);
        let result = run();
        self.end(place, result.is_ok());
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Arena, MemoryDevice, ReactorKind};

    #[test]
    fn a_write_is_durable_after_a_flush_that_began_after_its_answer() {
        let recorder = Recorder::new();
        let memory = MemoryDevice::new(1 << 16, 4096).unwrap();
        let mut device = RecordDevice::new(Box::new(memory), recorder.clone(), 3);
        let mut reactor = Reactor::new(ReactorKind::Threads, 8).unwrap();
        let arena = Arena::anonymous(4096).unwrap();
        let now = Instant::now();
        let mut done = Vec::new();
        let write = |offset| Operation::Write { span: arena.whole(), offset };

        device.submit(&mut reactor, write(4096), 9, now); // place 0
        device.submit(&mut reactor, Operation::Flush, 9, now); // place 1, too early for the write
        device.poll(&mut reactor, now, &mut done); // places 2 and 3
        assert_eq!(done.len(), 2);
        assert!(done.iter().all(|done| done.token == 9));
        let answer = recorder.mark(1);
        assert_eq!(recorder.not_durable(3, answer), [0]);

        device.submit(&mut reactor, Operation::Flush, 9, now);
        assert_eq!(recorder.not_durable(3, usize::MAX), [0]);
        device.poll(&mut reactor, now, &mut done);
        let answer = recorder.mark(2);
        assert!(recorder.not_durable(3, answer).is_empty());
        assert_eq!(recorder.not_durable(3, 5), [0], "as it was at the first mark");
        device.write_at(0, &[1]).unwrap();
        assert_eq!(recorder.not_durable(3, usize::MAX), [8]);
        device.sync().unwrap();
        assert!(recorder.not_durable(3, usize::MAX).is_empty());
        let submit =
            Recorded::Submit { device: 3, kind: OperationKind::Write, offset: 4096, length: 4096 };
        assert_eq!(recorder.all()[0], submit);
    }
}
