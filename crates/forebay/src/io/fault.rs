// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device that fails on purpose, for tests and drills.
//!
//! An operation that is made to fail does not reach the device below. Operations are counted by
//! kind from the first; blocking use (`read_at`, `write_at`, `sync`) counts as read, write, flush.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::device::{Completion, Device, DeviceError, Operation, OperationKind};
use super::layer::{Layer, Use};
use super::reactor::Reactor;

/// Which operations of a kind fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultWhen {
    /// The n-th one and no other; the first is 1.
    Nth(u64),
    /// The n-th and all after it.
    From(u64),
    /// Those that touch any of these bytes, as if a sector were bad.
    Over {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// So many of a million, chosen by a seed.
    Rate {
        /// How many of a million.
        per_million: u32,
        /// The same seed chooses the same operations.
        seed: u64,
    },
}

/// One reason to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Of which kind; `None` for any, counted together.
    pub kind: Option<OperationKind>,
    /// Which of them.
    pub when: FaultWhen,
    /// What the answer is.
    pub error: DeviceError,
}

impl FaultRule {
    /// Fails with EIO.
    pub const fn new(kind: Option<OperationKind>, when: FaultWhen) -> FaultRule {
        FaultRule { kind, when, error: DeviceError::IO }
    }
}

/// Sets a [`FaultDevice`]'s rules while it runs.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<Plan>>);

#[derive(Debug, Default)]
struct Plan {
    rules: Vec<FaultRule>,
    counts: [u64; OperationKind::ALL.len()],
    failed: u64,
}

impl Faults {
    /// No faults yet.
    pub fn new() -> Faults {
        Faults::default()
    }

    /// Adds a rule. Counting goes on from where it is ([`Faults::count`]).
    pub fn add(&self, rule: FaultRule) {
        self.with(|plan| plan.rules.push(rule));
    }

    /// The device is well again: no rules. What was counted stays.
    pub fn clear(&self) {
        self.with(|plan| plan.rules.clear());
    }

    /// How many operations there were; of any kind for `None`.
    pub fn count(&self, kind: Option<OperationKind>) -> u64 {
        self.with(|plan| plan.count(kind))
    }

    /// How many were made to fail.
    pub fn failed(&self) -> u64 {
        self.with(|plan| plan.failed)
    }

    fn judge(&self, operation: Use) -> Result<(), DeviceError> {
        self.with(|plan| plan.judge(operation))
    }

    fn with<T>(&self, change: impl FnOnce(&mut Plan) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Plan {
    fn count(&self, kind: Option<OperationKind>) -> u64 {
        match kind {
            Some(kind) => self.counts[kind.index()],
            None => self.counts.iter().sum(),
        }
    }

    fn judge(&mut self, operation: Use) -> Result<(), DeviceError> {
        let Use { kind, offset: from, length: bytes } = operation;
        self.counts[kind.index()] += 1;
        let hits = |rule: &&FaultRule| {
            let ordinal = self.count(rule.kind);
            let strikes = match rule.when {
                FaultWhen::Nth(nth) => ordinal == nth,
                FaultWhen::From(nth) => ordinal >= nth,
                FaultWhen::Over { offset, length } => {
                    from < offset + length && offset < from + bytes
                }
                FaultWhen::Rate { per_million, seed } => {
                    mixed(seed, ordinal) % 1_000_000 < u64::from(per_million)
                }
            };
            strikes && rule.kind.is_none_or(|wanted| wanted == kind)
        };
        let Some(rule) = self.rules.iter().find(hits).copied() else { return Ok(()) };
        self.failed += 1;
        Err(rule.error)
    }
}

/// splitmix64 at place `ordinal` of the sequence that begins with `seed`.
const fn mixed(seed: u64, ordinal: u64) -> u64 {
    let mut z = seed.wrapping_add(ordinal.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A device behind [`Faults`].
pub struct FaultDevice {
    inner: Box<dyn Device>,
    faults: Faults,
    failed: Vec<Completion>,
    since: Option<Instant>,
}

impl FaultDevice {
    /// Puts `faults` before `inner`.
    pub fn new(inner: Box<dyn Device>, faults: Faults) -> FaultDevice {
        FaultDevice { inner, faults, failed: Vec::new(), since: None }
    }
}

impl Layer for FaultDevice {
    fn below(&self) -> &dyn Device {
        self.inner.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.inner.as_mut()
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let (offset, length) = (operation.offset(), operation.length());
        match self.faults.judge(Use { kind: operation.kind(), offset, length }) {
            Ok(()) => self.inner.submit(reactor, operation, token, now),
            Err(error) => {
                self.failed.push(Completion { token, result: Err(error) });
                self.since.get_or_insert(now);
            }
        }
    }

    fn turn(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
        self.since = None;
        done.append(&mut self.failed);
    }

    fn due(&self) -> Option<Instant> {
        self.since
    }

    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        self.faults.judge(use_of)?;
        run()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Arena, MemoryDevice, ReactorKind};

    fn failing(faults: &Faults) -> (FaultDevice, Reactor, Arena) {
        let memory = MemoryDevice::new(1 << 16, 4096).unwrap();
        let device = FaultDevice::new(Box::new(memory), faults.clone());
        let reactor = Reactor::new(ReactorKind::Threads, 8).unwrap();
        (device, reactor, Arena::anonymous(4096).unwrap())
    }

    fn answers(device: &mut FaultDevice, reactor: &mut Reactor, ops: &[Operation]) -> Vec<bool> {
        let now = Instant::now();
        let mut done = Vec::new();
        ops.iter()
            .map(|operation| {
                done.clear();
                device.submit(reactor, *operation, 1, now);
                assert!(device.deadline().is_some());
                device.poll(reactor, now, &mut done);
                assert_eq!(done.len(), 1);
                assert_eq!(device.deadline(), None);
                done[0].result.is_ok()
            })
            .collect()
    }

    #[test]
    fn the_nth_of_a_kind_fails_and_did_not_happen() {
        let faults = Faults::new();
        let (mut device, mut reactor, arena) = failing(&faults);
        faults.add(FaultRule::new(Some(OperationKind::Write), FaultWhen::Nth(2)));
        arena.whole().copy_in(b"x");
        let write = |offset| Operation::Write { span: arena.whole(), offset };
        let ops = [write(0), Operation::Flush, write(4096), write(8192)];
        assert_eq!(answers(&mut device, &mut reactor, &ops), [true, true, false, true]);
        let mut byte = [0];
        device.read_at(4096, &mut byte).unwrap();
        assert_eq!(byte, [0]);
        assert_eq!((faults.failed(), faults.count(Some(OperationKind::Write))), (1, 3));
        assert_eq!(faults.count(None), 5);
    }

    #[test]
    fn a_bad_sector_fails_whatever_touches_it() {
        let faults = Faults::new();
        let (mut device, mut reactor, arena) = failing(&faults);
        let when = FaultWhen::Over { offset: 4096, length: 512 };
        faults.add(FaultRule::new(Some(OperationKind::Write), when));
        let write = |offset| Operation::Write { span: arena.whole(), offset };
        let read = Operation::Read { span: arena.whole(), offset: 4096 };
        let ops = [write(0), write(4096), write(8192), write(512), read, Operation::Flush];
        let answers = answers(&mut device, &mut reactor, &ops);
        assert_eq!(answers, [true, false, true, false, true, true]);
        assert!(device.write_at(4000, &[0; 97]).is_err() && device.write_at(0, &[0; 9]).is_ok());
    }

    #[test]
    fn from_one_on_fails_until_cleared() {
        let faults = Faults::new();
        let (mut device, mut reactor, _arena) = failing(&faults);
        let error = DeviceError::new(libc::ENOSPC);
        let when = FaultWhen::From(2);
        faults.add(FaultRule { kind: Some(OperationKind::Flush), when, error });
        let ops = [Operation::Flush; 3];
        assert_eq!(answers(&mut device, &mut reactor, &ops), [true, false, false]);
        assert_eq!(device.sync().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        faults.clear();
        assert_eq!(answers(&mut device, &mut reactor, &ops), [true, true, true]);
    }

    #[test]
    fn a_rate_hits_the_same_operations_for_the_same_seed() {
        let run = |seed| {
            let faults = Faults::new();
            let (mut device, mut reactor, _arena) = failing(&faults);
            faults.add(FaultRule::new(None, FaultWhen::Rate { per_million: 250_000, seed }));
            answers(&mut device, &mut reactor, &[Operation::Flush; 400])
        };
        let first = run(7);
        assert_eq!(first, run(7));
        assert_ne!(first, run(8));
        let failed = first.iter().filter(|ok| !**ok).count();
        assert!((60..140).contains(&failed), "{failed} of 400");
    }
}
