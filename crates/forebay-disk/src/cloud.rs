// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cloud volume: so many operations and so many bytes a second, saved up for a little while, and a
//! service time that has nothing to do with place. A flush costs a round trip.

use crate::ssd::take_due;
use crate::{Command, Disk, Done, Kind, Nanos};

/// What a volume is like. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Operations a second.
    pub operations: u64,
    /// Bytes a second.
    pub bytes: u64,
    /// A command counts as one operation for each of these bytes.
    pub operation_bytes: u64,
    /// For how long unused operations and bytes are saved.
    pub saved: Nanos,
    /// Service time: half of all take less.
    pub median: Nanos,
    /// Service time: one in a hundred takes longer.
    pub p99: Nanos,
    /// For the service times.
    pub seed: u64,
}

/// A cloud volume.
#[derive(Debug)]
pub struct Cloud {
    spec: Spec,
    /// Theoretical arrival times: when the operations, and the bytes, used so far are paid for.
    operations_paid: Nanos,
    bytes_paid: Nanos,
    /// When the writes that came are done.
    written: Nanos,
    random: u64,
    under_way: Vec<Done>,
}

impl Cloud {
    /// A volume that has saved nothing yet: it does from time 0 on.
    pub fn new(spec: Spec) -> Cloud {
        let random = spec.seed;
        let (operations_paid, bytes_paid, written) = (0, 0, 0);
        Cloud { spec, operations_paid, bytes_paid, written, random, under_way: Vec::new() }
    }

    /// A number of (0, 1] (splitmix64).
    fn chance(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.random;
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        ((x >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Log-normal, by Box and Muller.
    fn service(&mut self) -> Nanos {
        let (u, v) = (self.chance(), self.chance());
        let normal = libm::sqrt(-2.0 * libm::log(u)) * libm::cos(2.0 * core::f64::consts::PI * v);
        // 2.326 deviations above the median is the 99th percentile.
        let (median, p99) = (self.spec.median as f64, self.spec.p99 as f64);
        let deviation = libm::log(p99 / median) / 2.326;
        (median * libm::exp(deviation * normal)) as Nanos
    }
}

/// Takes `cost` from a bucket that saves for `saved`; returns when it may go on (GCRA).
fn pay(paid: &mut Nanos, now: Nanos, cost: Nanos, saved: Nanos) -> Nanos {
    *paid = (*paid).max(now.saturating_sub(saved)) + cost;
    now.max(*paid)
}

impl Disk for Cloud {
    fn submit(&mut self, now: Nanos, command: Command) {
        let service = self.service();
        if command.kind == Kind::Flush {
            let at = now.max(self.written) + service;
            self.under_way.push(Done { id: command.id, at });
            return;
        }
        let spec = self.spec;
        let operations = command.bytes.div_ceil(spec.operation_bytes).max(1);
        let per_second =
            |count: u64, rate: u64| (u128::from(count) * 1_000_000_000 / u128::from(rate)) as Nanos;
        let cost = per_second(operations, spec.operations);
        let start = pay(&mut self.operations_paid, now, cost, spec.saved);
        let cost = per_second(command.bytes, spec.bytes);
        let start = start.max(pay(&mut self.bytes_paid, now, cost, spec.saved));
        let at = start + service;
        if command.kind == Kind::Write {
            self.written = self.written.max(at);
        }
        self.under_way.push(Done { id: command.id, at });
    }

    fn next(&self) -> Option<Nanos> {
        self.under_way.iter().map(|done| done.at).min()
    }

    fn advance(&mut self, now: Nanos, done: &mut Vec<Done>) {
        take_due(&mut self.under_way, now, done);
    }
}
