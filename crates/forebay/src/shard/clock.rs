// SPDX-License-Identifier: Apache-2.0 OR MIT
//! When requests come and how long they take, with as few looks at the clock as will do.

use crate::latency::Latency;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use std::time::Instant;

/// The time, asked for once, and only if somebody wants it.
pub(super) struct Clock(pub(super) Option<Instant>);

impl Clock {
    pub(super) fn now(&mut self) -> Instant {
        *self.0.get_or_insert_with(Instant::now)
    }
}

/// So many requests that began alike are answered now.
pub(super) fn took(latencies: &mut [Option<[Latency; 2]>], begun: Begun, now: Instant, count: u64) {
    let nanos = now.saturating_duration_since(begun.at).as_nanos() as u64;
    if let Some([reads, writes]) = &mut latencies[usize::from(begun.volume.0)] {
        match begun.op {
            Op::Read => reads.record_many(nanos, count),
            Op::Write { .. } => writes.record_many(nanos, count),
            _ => {}
        }
    }
}

/// When requests come. Those that come together, with no turn of the loop between them, are so many at a time taken to
/// come with their first: a look at the clock costs a part in thirty of a whole write.
pub(super) struct Coming {
    pub(super) at: Instant,
    pub(super) left: u32,
}

impl Coming {
    const TOGETHER: u32 = 16;

    pub(super) fn now(&mut self) -> Instant {
        if self.left == 0 {
            (self.at, self.left) = (Instant::now(), Coming::TOGETHER);
        }
        self.left -= 1;
        self.at
    }

    /// Time has passed.
    pub(super) fn end(&mut self) {
        self.left = 0;
    }
}

/// When and how a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) at: Instant,
    pub(super) volume: VolumeIndex,
    pub(super) op: Op,
}
