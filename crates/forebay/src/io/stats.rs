// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device that is counted: operations, bytes, errors, and how long they took.
//!
//! Time is what the loop passes in, so it is as fine as the loop's turns. Blocking use is not
//! counted.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::device::{Completion, Device, DeviceError, Operation, OperationKind};
use super::layer::{Layer, Use};
use super::reactor::Reactor;
use super::slab::Slab;
use crate::latency::{Latency, LatencySummary};

/// One kind's numbers.
#[derive(Clone, Debug)]
struct Row {
    count: u64,
    bytes: u64,
    errors: u64,
    in_flight: u64,
    last_error: Option<DeviceError>,
    latency: Latency,
}

/// One kind's numbers, as read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindStats {
    /// Operations answered, failed ones included.
    pub count: u64,
    /// Bytes of the device concerned by those that succeeded.
    pub bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Operations not yet answered.
    pub in_flight: u64,
    /// Why the last of these failed.
    pub last_error: Option<DeviceError>,
    /// How long they took.
    pub latency: LatencySummary,
}

/// A row for each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatsSnapshot {
    rows: [KindStats; OperationKind::ALL.len()],
}

impl StatsSnapshot {
    /// One kind's numbers.
    pub const fn kind(&self, kind: OperationKind) -> KindStats {
        self.rows[kind.index()]
    }
}

/// Reads a [`StatsDevice`]'s numbers, from any thread.
#[derive(Clone, Debug)]
pub struct Stats(Arc<Mutex<[Row; OperationKind::ALL.len()]>>);

impl Default for Stats {
    fn default() -> Stats {
        Stats::new()
    }
}

impl Stats {
    /// Nothing counted yet.
    pub fn new() -> Stats {
        let row = || Row {
            count: 0,
            bytes: 0,
            errors: 0,
            in_flight: 0,
            last_error: None,
            latency: Latency::new(),
        };
        Stats(Arc::new(Mutex::new(std::array::from_fn(|_| row()))))
    }

    /// Bytes of memory one takes.
    pub fn memory_bytes() -> u64 {
        OperationKind::ALL.len() as u64 * Latency::memory_bytes()
    }

    /// The numbers now.
    pub fn snapshot(&self) -> StatsSnapshot {
        let mut snapshot = StatsSnapshot::default();
        self.with(|rows| {
            for (row, read) in rows.iter().zip(&mut snapshot.rows) {
                *read = KindStats {
                    count: row.count,
                    bytes: row.bytes,
                    errors: row.errors,
                    in_flight: row.in_flight,
                    last_error: row.last_error,
                    latency: row.latency.summary(),
                };
            }
        });
        snapshot
    }

    /// Forgets everything but what is in flight.
    pub fn reset(&self) {
        self.with(|rows| {
            for row in rows {
                (row.count, row.bytes, row.errors) = (0, 0, 0);
                row.last_error = None;
                row.latency.reset();
            }
        });
    }

    fn with<T>(&self, change: impl FnOnce(&mut [Row; OperationKind::ALL.len()]) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[derive(Debug)]
struct Flight {
    kind: OperationKind,
    bytes: u64,
    token: u64,
    start: Instant,
}

/// A device whose operations are counted in [`Stats`].
pub struct StatsDevice {
    inner: Box<dyn Device>,
    stats: Stats,
    flights: Slab<Flight>,
}

impl StatsDevice {
    /// Counts `inner`'s operations in `stats`.
    pub fn new(inner: Box<dyn Device>, stats: Stats) -> StatsDevice {
        StatsDevice { inner, stats, flights: Slab::new() }
    }
}

impl Layer for StatsDevice {
    fn below(&self) -> &dyn Device {
        self.inner.as_ref()
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        self.inner.as_mut()
    }

    fn passes_registered(&self) -> bool {
        true
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let kind = operation.kind();
        let flight = Flight { kind, bytes: operation.length(), token, start: now };
        self.stats.with(|rows| rows[kind.index()].in_flight += 1);
        let own = self.flights.insert(flight);
        self.inner.submit(reactor, operation, u64::from(own), now);
    }

    /// What opening and closing do counts as well.
    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        let start = Instant::now();
        let result = run();
        let nanos = start.elapsed().as_nanos();
        self.stats.with(|rows| {
            let row = &mut rows[use_of.kind.index()];
            row.count += 1;
            match &result {
                Ok(()) => row.bytes += use_of.length,
                Err(error) => {
                    row.errors += 1;
                    let errno = error.raw_os_error();
                    row.last_error = Some(errno.map_or(DeviceError::IO, DeviceError::new));
                }
            }
            row.latency.record(u64::try_from(nanos).unwrap_or(u64::MAX));
        });
        result
    }

    /// Counts the answers and gives them their own tokens back.
    fn answered(&mut self, answers: &mut Vec<Completion>, from: usize, now: Instant) {
        let answers = &mut answers[from..];
        if answers.is_empty() {
            return;
        }
        let flights = &mut self.flights;
        self.stats.with(|rows| {
            for answer in answers {
                let flight = flights.remove(answer.token as u32).expect("answered once (D1)");
                answer.token = flight.token;
                let row = &mut rows[flight.kind.index()];
                row.in_flight -= 1;
                row.count += 1;
                match answer.result {
                    Ok(()) => row.bytes += flight.bytes,
                    Err(error) => {
                        row.errors += 1;
                        row.last_error = Some(error);
                    }
                }
                let nanos = now.saturating_duration_since(flight.start).as_nanos();
                row.latency.record(u64::try_from(nanos).unwrap_or(u64::MAX));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Arena, MemoryDevice, ReactorKind};
    use std::time::Duration;

    #[test]
    fn operations_are_counted_and_timed_by_kind() {
        let stats = Stats::new();
        let memory = MemoryDevice::new(8192, 4096).unwrap();
        let mut device = StatsDevice::new(Box::new(memory), stats.clone());
        let mut reactor = Reactor::new(ReactorKind::Threads, 8).unwrap();
        let arena = Arena::anonymous(4096).unwrap();
        let now = Instant::now();
        let read = |offset| Operation::Read { span: arena.whole(), offset };
        device.submit(&mut reactor, read(0), 77, now);
        device.submit(&mut reactor, read(8192), 77, now);
        assert_eq!(stats.snapshot().kind(OperationKind::Read).in_flight, 2);
        let mut done = Vec::new();
        device.poll(&mut reactor, now + Duration::from_millis(3), &mut done);
        assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [77, 77]);
        let read = stats.snapshot().kind(OperationKind::Read);
        assert_eq!((read.count, read.bytes, read.errors, read.in_flight), (2, 4096, 1, 0));
        assert_eq!(read.last_error, Some(DeviceError::RANGE));
        assert!((2_900_000..3_100_000).contains(&read.latency.p50_ns), "{read:?}");
        assert!(read.latency.p99_ns >= read.latency.p50_ns);
        assert_eq!(stats.snapshot().kind(OperationKind::Write), KindStats::default());
        stats.reset();
        assert_eq!(stats.snapshot(), StatsSnapshot::default());
    }
}
