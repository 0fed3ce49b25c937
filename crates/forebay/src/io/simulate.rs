// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device as slow as another: its bytes are the inner device's, its times a model's
//! ([`forebay_disk`]).
//!
//! Each operation is done by the inner device at once and answered when the model is done with it, or
//! when the inner device is, if that is later. The model's clock is the real one, counted from the
//! device's start, so what a busy machine loses on one operation does not add up over the next.
//!
//! Blocking reads and writes (opening, fingerprints) take the inner device's time alone.

use super::device::{Completion, Device, Operation, OperationKind};
use super::layer::Layer;
use super::reactor::Reactor;
use super::slab::Slab;
use forebay_disk::{Command, Disk, Done, Kind, Model, Nanos};
use std::time::{Duration, Instant};

/// An operation under way.
struct Flight {
    token: u64,
    /// The inner device's answer.
    answer: Option<Completion>,
    /// The model is done with it.
    is_due: bool,
}

/// A device with a model's times.
pub struct SimulatedDevice {
    inner: Box<dyn Device>,
    model: Box<dyn Disk>,
    started: Instant,
    flights: Slab<Flight>,
    due: Vec<Done>,
}

impl SimulatedDevice {
    /// Gives `inner` the times of `model`.
    pub fn new(inner: Box<dyn Device>, model: Model) -> SimulatedDevice {
        let (started, flights, due) = (Instant::now(), Slab::new(), Vec::new());
        SimulatedDevice { inner, model: model.disk(), started, flights, due }
    }

    fn nanos(&self, now: Instant) -> Nanos {
        now.saturating_duration_since(self.started).as_nanos() as Nanos
    }

    /// Takes a flight out when both the device and the model are done with it.
    fn end(&mut self, id: u32) -> Option<Completion> {
        let flight = self.flights.get_mut(id)?;
        if !flight.is_due || flight.answer.is_none() {
            return None;
        }
        let flight = self.flights.remove(id)?;
        Some(Completion { token: flight.token, ..flight.answer? })
    }
}

impl Layer for SimulatedDevice {
    fn below(&self) -> &dyn Device {
        self.inner.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.inner.as_mut()
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let kind = match operation.kind() {
            OperationKind::Read => Some(Kind::Read),
            OperationKind::Write | OperationKind::WriteZeroes => Some(Kind::Write),
            OperationKind::Flush => Some(Kind::Flush),
            // The medium has nothing to do.
            OperationKind::Discard => None,
        };
        let flight = Flight { token, answer: None, is_due: kind.is_none() };
        let id = self.flights.insert(flight);
        if let Some(kind) = kind {
            let (offset, bytes) = (operation.offset(), operation.length());
            let at = self.nanos(now);
            self.model.advance(at, &mut self.due);
            self.model.submit(at, Command { id: u64::from(id), kind, offset, bytes });
        }
        self.inner.submit(reactor, operation, u64::from(id), now);
    }

    fn answered(&mut self, answers: &mut Vec<Completion>, from: usize, _: Instant) {
        let mut kept = from;
        for at in from..answers.len() {
            let id = answers[at].token as u32;
            let flight = self.flights.get_mut(id).expect("answered once (D1)");
            flight.answer = Some(answers[at]);
            if let Some(answer) = self.end(id) {
                answers[kept] = answer;
                kept += 1;
            }
        }
        answers.truncate(kept);
    }

    fn turn(&mut self, _: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        let at = self.nanos(now);
        let mut due = std::mem::take(&mut self.due);
        self.model.advance(at, &mut due);
        for Done { id, .. } in due.drain(..) {
            let id = id as u32;
            self.flights.get_mut(id).expect("done once (M2)").is_due = true;
            done.extend(self.end(id));
        }
        self.due = due;
    }

    fn due(&self) -> Option<Instant> {
        if !self.due.is_empty() {
            return Some(self.started);
        }
        self.model.next().map(|at| self.started + Duration::from_nanos(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Arena, MemoryDevice, ReactorKind};

    /// When each operation is answered, in nanoseconds by the model's clock.
    fn answered_at(device: &mut SimulatedDevice, reactor: &mut Reactor) -> Vec<(u64, Nanos)> {
        let mut answers = Vec::new();
        let mut done = Vec::new();
        while let Some(deadline) = device.deadline() {
            device.poll(reactor, deadline, &mut done);
            let at = device.nanos(deadline);
            answers.extend(done.drain(..).map(|done| (done.token, at)));
        }
        answers
    }

    fn simulated(model: &str) -> (SimulatedDevice, Reactor, Arena) {
        let memory = MemoryDevice::new(64 << 20, 4096).unwrap();
        let device = SimulatedDevice::new(Box::new(memory), model.parse().unwrap());
        let reactor = Reactor::new(ReactorKind::Threads, 8).unwrap();
        (device, reactor, Arena::anonymous(1 << 20).unwrap())
    }

    #[test]
    fn operations_take_the_models_time_and_keep_their_bytes() {
        let (mut device, mut reactor, arena) = simulated("7200.12");
        let start = device.started;
        arena.span(0, 4096).copy_in(&[7; 4096]);
        let write = Operation::Write { span: arena.span(0, 4096), offset: 32 << 20 };
        device.submit(&mut reactor, write, 10, start);
        device.submit(&mut reactor, Operation::Flush, 11, start);
        let answers = answered_at(&mut device, &mut reactor);
        let [(10, written), (11, flushed)] = answers[..] else { panic!("{answers:?}") };
        assert!(written < 1_000_000, "a write into the disk's memory took {written} ns");
        assert!((500_000..30_000_000).contains(&flushed), "a flush took {flushed} ns");
        let later = start + Duration::from_nanos(flushed);
        let read = Operation::Read { span: arena.span(4096, 4096), offset: 32 << 20 };
        device.submit(&mut reactor, read, 12, later);
        let answers = answered_at(&mut device, &mut reactor);
        assert_eq!(answers.len(), 1);
        assert!(answers[0].1 > flushed + 1_000_000, "{answers:?} after {flushed}");
        let mut bytes = [0; 4096];
        arena.span(4096, 4096).copy_out(&mut bytes);
        assert_eq!(bytes, [7; 4096]);
    }

    #[test]
    fn what_the_model_does_not_know_is_answered_when_the_device_has_done_it() {
        let (mut device, mut reactor, arena) = simulated("gp3");
        let start = device.started;
        let discard = Operation::Discard { offset: 0, length: 1 << 20 };
        device.submit(&mut reactor, discard, 1, start);
        let read = Operation::Read { span: arena.span(0, 4096), offset: 0 };
        device.submit(&mut reactor, read, 2, start);
        let answers = answered_at(&mut device, &mut reactor);
        let [(1, discarded), (2, read)] = answers[..] else { panic!("{answers:?}") };
        assert_eq!(discarded, 0);
        assert!(read > 50_000, "{read}");
    }

    /// The model's clock goes on while nobody looks: who is told late is told late once, and all that comes after is not.
    #[test]
    fn what_is_polled_late_does_not_delay_what_comes_after() {
        // How long after the start each of two reads that were asked for at once is answered, if nobody looks before `first`.
        let answers = |first: Option<u64>| {
            let (mut device, mut reactor, arena) = simulated("7200.12");
            let start = device.started;
            for (token, place) in [(1, 0), (2, 32 << 20)] {
                let read = Operation::Read { span: arena.span(0, 4096), offset: place };
                device.submit(&mut reactor, read, token, start);
            }
            let mut done = Vec::new();
            if let Some(first) = first {
                let late = start + Duration::from_nanos(first);
                device.poll(&mut reactor, late, &mut done);
            }
            let told = done.len();
            let mut later = answered_at(&mut device, &mut reactor);
            // One more, asked for at a moment that is the same in both cases.
            let read = Operation::Read { span: arena.span(0, 4096), offset: 16 << 20 };
            device.submit(&mut reactor, read, 3, start + Duration::from_secs(1));
            later.extend(answered_at(&mut device, &mut reactor));
            (told, later)
        };
        let (told, prompt) = answers(None);
        assert_eq!((told, prompt.len()), (0, 3), "{prompt:?}");
        let [(_, first), (last, second), (3, third)] = prompt[..] else { panic!("{prompt:?}") };
        assert!(first + 1_000_000 < second, "{prompt:?}");
        // Almost as late as the second is due: the first is told now, the second when it was due all the same.
        let (told, late) = answers(Some(second - 1));
        assert_eq!((told, &late[..]), (1, &[(last, second), (3, third)][..]));
        // Later than both.
        let (told, late) = answers(Some(second + 5_000_000));
        assert_eq!((told, &late[..]), (2, &[(3, third)][..]));
    }
}
