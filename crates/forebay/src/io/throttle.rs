// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A slower device: limits bytes and operations in a second, and adds latency.
//!
//! Each operation gets the time at which it may start; operations start in the order of
//! submission. Time not used is not saved up: there are no bursts.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::device::{Completion, Device, Operation};
use super::layer::Layer;
use super::reactor::Reactor;

/// How slow; all zero is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// Bytes read and written in a second; 0 for no limit.
    pub bytes_per_second: u64,
    /// Operations in a second; 0 for no limit.
    pub operations_per_second: u64,
    /// Added to each operation.
    pub latency: Duration,
}

/// Changes a [`ThrottleDevice`]'s limits while it runs.
#[derive(Clone, Debug, Default)]
pub struct Throttle(Arc<Mutex<ThrottleLimits>>);

impl Throttle {
    /// A throttle with these limits.
    pub fn new(limits: ThrottleLimits) -> Throttle {
        Throttle(Arc::new(Mutex::new(limits)))
    }

    /// The limits from now on; what was submitted before keeps its time.
    pub fn set(&self, limits: ThrottleLimits) {
        *self.lock() = limits;
    }

    /// The limits now.
    pub fn get(&self) -> ThrottleLimits {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, ThrottleLimits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Held {
    operation: Operation,
    token: u64,
    start: Instant,
}

/// A device behind a [`Throttle`].
pub struct ThrottleDevice {
    inner: Box<dyn Device>,
    throttle: Throttle,
    held: VecDeque<Held>,
    /// When the bytes, and the operations, submitted so far are used up.
    bytes_free: Option<Instant>,
    operations_free: Option<Instant>,
}

impl ThrottleDevice {
    /// Puts `throttle` before `inner`.
    pub fn new(inner: Box<dyn Device>, throttle: Throttle) -> ThrottleDevice {
        let (bytes_free, operations_free) = (None, None);
        ThrottleDevice { inner, throttle, held: VecDeque::new(), bytes_free, operations_free }
    }

    /// When an operation submitted now may start.
    fn start(&mut self, operation: &Operation, now: Instant) -> Instant {
        let limits = self.throttle.get();
        let mut start = now;
        if limits.operations_per_second > 0 {
            start = start.max(self.operations_free.unwrap_or(now));
        }
        if limits.bytes_per_second > 0 && operation.transfer() > 0 {
            start = start.max(self.bytes_free.unwrap_or(now));
        }
        self.operations_free = Some(start + share(1, limits.operations_per_second));
        if operation.transfer() > 0 {
            let used = share(operation.transfer(), limits.bytes_per_second);
            self.bytes_free = Some(start + used);
            start += used; // the last byte is there when all have passed
        }
        start += limits.latency;
        // In order, even if the limits have just been loosened.
        self.held.back().map_or(start, |last| start.max(last.start))
    }

    fn start_due(&mut self, reactor: &mut Reactor, now: Instant) {
        while let Some(held) = self.held.pop_front_if(|held| held.start <= now) {
            self.inner.submit(reactor, held.operation, held.token, now);
        }
    }
}

/// How long `count` of something takes at `per_second`.
fn share(count: u64, per_second: u64) -> Duration {
    if per_second == 0 {
        return Duration::ZERO;
    }
    let nanos = u128::from(count) * 1_000_000_000 / u128::from(per_second);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Layer for ThrottleDevice {
    fn below(&self) -> &dyn Device {
        self.inner.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.inner.as_mut()
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let start = self.start(&operation, now);
        if start <= now && self.held.is_empty() {
            self.inner.submit(reactor, operation, token, now);
        } else {
            self.held.push_back(Held { operation, token, start });
        }
    }

    fn turn(&mut self, reactor: &mut Reactor, now: Instant, _: &mut Vec<Completion>) {
        self.start_due(reactor, now);
    }

    fn due(&self) -> Option<Instant> {
        self.held.front().map(|held| held.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Arena, MemoryDevice, ReactorKind};

    fn throttled(limits: ThrottleLimits) -> (ThrottleDevice, Reactor, Arena, Throttle) {
        let memory = MemoryDevice::new(1 << 20, 4096).unwrap();
        let throttle = Throttle::new(limits);
        let device = ThrottleDevice::new(Box::new(memory), throttle.clone());
        let reactor = Reactor::new(ReactorKind::Threads, 8).unwrap();
        (device, reactor, Arena::anonymous(1 << 20).unwrap(), throttle)
    }

    /// Milliseconds at which each of the operations is answered, by a clock of our own.
    fn answered_at(device: &mut ThrottleDevice, reactor: &mut Reactor, zero: Instant) -> Vec<u64> {
        let mut times = Vec::new();
        let mut done = Vec::new();
        while let Some(deadline) = device.deadline() {
            done.clear();
            device.poll(reactor, deadline, &mut done);
            let at = deadline.duration_since(zero).as_millis() as u64;
            times.extend(done.iter().map(|_| at));
        }
        times
    }

    #[test]
    fn bytes_pass_at_the_rate_that_was_set() {
        let limits = ThrottleLimits { bytes_per_second: 409_600, ..Default::default() };
        let (mut device, mut reactor, arena, throttle) = throttled(limits);
        let zero = Instant::now();
        for token in 0..4 {
            let read = Operation::Read { span: arena.span(0, 4096), offset: 0 };
            device.submit(&mut reactor, read, token, zero);
        }
        device.submit(&mut reactor, Operation::Flush, 4, zero);
        assert_eq!(answered_at(&mut device, &mut reactor, zero), [10, 20, 30, 40, 40]);
        throttle.set(ThrottleLimits::default());
        assert_eq!(throttle.get(), ThrottleLimits::default());
        device.submit(&mut reactor, Operation::Flush, 5, zero);
        assert_eq!(answered_at(&mut device, &mut reactor, zero), [0]);
    }

    #[test]
    fn operations_pass_at_the_rate_that_was_set() {
        let limits = ThrottleLimits { operations_per_second: 100, ..Default::default() };
        let (mut device, mut reactor, _arena, _) = throttled(limits);
        let zero = Instant::now();
        for token in 0..3 {
            device.submit(&mut reactor, Operation::Flush, token, zero);
        }
        assert_eq!(answered_at(&mut device, &mut reactor, zero), [0, 10, 20]);
    }

    #[test]
    fn latency_delays_but_does_not_limit() {
        let limits =
            ThrottleLimits { latency: Duration::from_millis(7), ..ThrottleLimits::default() };
        let (mut device, mut reactor, _arena, _) = throttled(limits);
        let zero = Instant::now();
        for token in 0..3 {
            device.submit(&mut reactor, Operation::Flush, token, zero);
        }
        assert_eq!(answered_at(&mut device, &mut reactor, zero), [7, 7, 7]);
    }
}
