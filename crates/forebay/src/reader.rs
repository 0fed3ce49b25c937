// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading a cache device for recovery: many small reads at once, and long runs ahead of their use.
//!
//! # Invariants
//!
//! - No read is under way when the reader is gone: its memory and the reactor are free again.

use crate::io::{Arena, Completion, Device, Operation, Reactor};
use forebay_core::effect::Fault;
use forebay_core::log::recovery::CacheReader;
use std::io;
use std::time::{Duration, Instant};

/// Bytes that are read at once, at most; twice of it is taken.
const HALF: usize = 8 << 20;

/// A reader of a device that nobody else uses meanwhile.
pub struct Reader<'a> {
    device: &'a mut dyn Device,
    reactor: &'a mut Reactor,
    memory: Arena,
    /// Which half the next reads go to.
    half: usize,
    /// A run that was begun before anybody asked: where it starts, and its parts' length.
    ahead: Option<(u64, usize)>,
    /// Reads under way, and which parts have failed.
    under_way: usize,
    failed: Vec<bool>,
    done: Vec<Completion>,
    events: Vec<(u64, i32)>,
}

impl<'a> Reader<'a> {
    /// A reader over this device, by this reactor.
    pub fn new(device: &'a mut dyn Device, reactor: &'a mut Reactor) -> io::Result<Reader<'a>> {
        Ok(Reader {
            device,
            reactor,
            memory: Arena::reserved(2 * HALF)?,
            half: 0,
            ahead: None,
            under_way: 0,
            failed: Vec::new(),
            done: Vec::new(),
            events: Vec::new(),
        })
    }

    fn begin(&mut self, offsets: impl Iterator<Item = u64>, part: usize) {
        let now = Instant::now();
        self.failed.clear();
        for (at, offset) in offsets.enumerate() {
            let span = self.memory.span(self.half * HALF + at * part, part);
            let read = Operation::Read { span, offset };
            self.device.submit(self.reactor, read, at as u64, now);
            self.failed.push(false);
            self.under_way += 1;
        }
    }

    /// Waits until all that was begun is there.
    fn wait(&mut self) {
        while self.under_way > 0 {
            self.device.poll(self.reactor, Instant::now(), &mut self.done);
            if self.done.is_empty() {
                let deadline = self.device.deadline();
                let timeout = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                // An error of the ring itself is as good as no answer yet: R1 brings each.
                if self.reactor.wait(timeout, &mut self.events).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let now = Instant::now();
                for (user_data, result) in self.events.drain(..) {
                    self.device.event(self.reactor, user_data, result, now, &mut self.done);
                }
            }
            for answer in self.done.drain(..) {
                self.under_way -= 1;
                self.failed[answer.token as usize] = answer.result.is_err();
            }
        }
    }

    fn read_half(&mut self, offsets: &[u64], part: usize, bytes: &mut [u8]) {
        let first = offsets[0];
        let run = (offsets.iter().enumerate()).all(|(at, it)| *it == first + (at * part) as u64)
            && bytes.len() == HALF;
        // What was read ahead is taken if it is this.
        let taken = self.ahead.take() == Some((first, part)) && run;
        self.wait();
        if !taken {
            self.begin(offsets.iter().copied(), part);
            self.wait();
        }
        let source = self.memory.span(self.half * HALF, bytes.len());
        let failed = core::mem::take(&mut self.failed);
        let next = first + HALF as u64;
        if run && self.device.info().holds(next, HALF as u64) {
            // The other half is filled while this one is being used.
            self.half = 1 - self.half;
            self.begin((0..offsets.len()).map(|at| next + (at * part) as u64), part);
            let _ = self.reactor.wait(Some(Duration::ZERO), &mut self.events);
            self.ahead = Some((next, part));
        }
        source.copy_out(bytes);
        for (at, _) in failed.iter().enumerate().filter(|(_, failed)| **failed) {
            bytes[at * part..(at + 1) * part].fill(0);
        }
    }
}

impl CacheReader for Reader<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.device.read_at(offset, bytes).map_err(|_| Fault)
    }

    fn read_each(&mut self, offsets: &[u64], bytes: &mut [u8]) {
        let Some(part) = bytes.len().checked_div(offsets.len()) else { return };
        let at_once = HALF / part;
        for (offsets, bytes) in offsets.chunks(at_once).zip(bytes.chunks_mut(at_once * part)) {
            self.read_half(offsets, part, bytes);
        }
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{
        FaultDevice, FaultRule, FaultWhen, Faults, MemoryDevice, OperationKind, ReactorKind,
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
    fn a_run_is_read_ahead_and_a_jump_is_no_harm() {
        let mut device = device(40 << 20);
        let mut reactor = Reactor::new(ReactorKind::Auto, 64).expect("a reactor");
        let mut reader = Reader::new(&mut device, &mut reactor).expect("memory");
        let mut bytes = vec![0; HALF];
        for start in [0, HALF, 2 * HALF, 0, 3 * HALF, 4 * HALF, HALF] {
            let parts: Vec<u64> = (0..8).map(|at| (start + at * (HALF / 8)) as u64).collect();
            reader.read_each(&parts, &mut bytes);
            for (at, block) in bytes.chunks_exact(4096).enumerate() {
                assert_eq!(block[0], ((start / 4096) + at) as u8, "block {at} of {start}");
            }
        }
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
