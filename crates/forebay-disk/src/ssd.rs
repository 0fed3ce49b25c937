// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An SSD: commands pass a link one after the other, then take a while that they share with none. A
//! flush waits for what came before it and takes its own time, which decides what `fsync` costs.

use crate::{Command, Disk, Done, Kind, Nanos};

/// What an SSD is like. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Of the link, for each command.
    pub command: Nanos,
    /// Bytes a second.
    pub read_rate: u64,
    /// Bytes a second.
    pub write_rate: u64,
    /// From the link to the answer.
    pub read_latency: Nanos,
    /// From the link to the answer.
    pub write_latency: Nanos,
    /// Of a flush.
    pub flush: Nanos,
}

/// An SSD.
#[derive(Debug)]
pub struct Ssd {
    spec: Spec,
    link_free: Nanos,
    /// When all that came is done.
    all_done: Nanos,
    under_way: Vec<Done>,
}

impl Ssd {
    /// An SSD at rest.
    pub fn new(spec: Spec) -> Ssd {
        Ssd { spec, link_free: 0, all_done: 0, under_way: Vec::new() }
    }
}

impl Disk for Ssd {
    fn submit(&mut self, now: Nanos, command: Command) {
        let spec = &self.spec;
        let (rate, latency) = match command.kind {
            Kind::Read => (spec.read_rate, spec.read_latency),
            Kind::Write => (spec.write_rate, spec.write_latency),
            Kind::Flush => {
                let at = now.max(self.all_done) + spec.flush;
                self.all_done = at;
                self.under_way.push(Done { id: command.id, at });
                return;
            }
        };
        let passes = u128::from(command.bytes) * 1_000_000_000 / u128::from(rate);
        self.link_free = self.link_free.max(now) + spec.command + passes as Nanos;
        let at = self.link_free + latency;
        self.all_done = self.all_done.max(at);
        self.under_way.push(Done { id: command.id, at });
    }

    fn next(&self) -> Option<Nanos> {
        self.under_way.iter().map(|done| done.at).min()
    }

    fn advance(&mut self, now: Nanos, done: &mut Vec<Done>) {
        take_due(&mut self.under_way, now, done);
    }
}

/// Moves what is done by now, in the order of time.
pub(crate) fn take_due(under_way: &mut Vec<Done>, now: Nanos, done: &mut Vec<Done>) {
    let from = done.len();
    let mut at = 0;
    while at < under_way.len() {
        if under_way[at].at <= now {
            done.push(under_way.swap_remove(at));
        } else {
            at += 1;
        }
    }
    done[from..].sort_by_key(|done| (done.at, done.id));
}
