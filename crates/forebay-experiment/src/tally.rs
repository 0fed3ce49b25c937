// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a load has measured: requests, bytes and latencies, by class, and second by second.

use forebay_disk::Nanos;

const SECOND: Nanos = 1_000_000_000;

/// Of one class.
#[derive(Clone, Debug, Default)]
pub struct Class {
    /// Requests answered.
    pub count: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Nanoseconds each took, sorted when the load has ended.
    pub latencies: Vec<Nanos>,
    /// Requests answered in each second.
    pub seconds: Vec<u64>,
}

impl Class {
    /// The latency that this share of requests does not exceed, in milliseconds.
    pub fn percentile(&self, share: f64) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        let at = (last as f64 * share).round() as usize;
        self.latencies.get(at).map_or(0.0, |nanos| *nanos as f64 / 1e6)
    }
}

/// Of a load.
#[derive(Clone, Debug)]
pub struct Tally {
    begun: Nanos,
    ended: Nanos,
    /// By class.
    pub classes: Vec<Class>,
}

impl Tally {
    pub(crate) fn new(begun: Nanos, classes: usize) -> Tally {
        Tally { begun, ended: begun, classes: vec![Class::default(); classes] }
    }

    pub(crate) fn add(&mut self, class: usize, bytes: u64, since: Nanos, now: Nanos) {
        let second = ((now - self.begun) / SECOND) as usize;
        let class = &mut self.classes[class];
        class.count += 1;
        class.bytes += bytes;
        class.latencies.push(now - since);
        if class.seconds.len() <= second {
            class.seconds.resize(second + 1, 0);
        }
        class.seconds[second] += 1;
    }

    pub(crate) fn end(&mut self, now: Nanos) {
        self.ended = now;
        for class in &mut self.classes {
            class.latencies.sort_unstable();
        }
    }

    /// How long it took, in seconds.
    pub fn seconds(&self) -> f64 {
        (self.ended - self.begun) as f64 / 1e9
    }

    /// Requests of a class a second.
    pub fn rate(&self, class: usize) -> f64 {
        self.classes[class].count as f64 / self.seconds()
    }
}
