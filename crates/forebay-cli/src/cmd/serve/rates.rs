// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How fast a volume is written back, and how fast dirty data grows: averages over some seconds.

use std::time::Instant;

/// Older than this counts for little, in seconds.
const MEMORY: f64 = 5.0;

/// Bytes in a second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    last: Option<(Instant, u64, u64)>,
    /// Written to the backing device.
    pub(super) writeback: f64,
    /// By which dirty data grows; negative if it shrinks.
    pub(super) growth: f64,
}

impl Rates {
    /// So many bytes were written back until now, and so many are dirty.
    pub(super) fn sample(&mut self, now: Instant, written: u64, dirty: u64) {
        let Some((at, written_before, dirty_before)) = self.last.replace((now, written, dirty))
        else {
            return;
        };
        let seconds = now.saturating_duration_since(at).as_secs_f64().max(1e-3);
        let weight = 1.0 - (-seconds / MEMORY).exp();
        let writeback = written.saturating_sub(written_before) as f64 / seconds;
        let growth = (dirty as f64 - dirty_before as f64) / seconds;
        self.writeback += weight * (writeback - self.writeback);
        self.growth += weight * (growth - self.growth);
        // What is left of long ago is nothing.
        if self.writeback < 1.0 {
            self.writeback = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rates_follow_what_happens_and_forget_it() {
        let zero = Instant::now();
        let mut rates = Rates::default();
        // A megabyte a second is written back while two are written.
        for half in 0..60 {
            let now = zero + Duration::from_millis(500 * half);
            rates.sample(now, half * 500_000, half * 500_000);
        }
        assert!((rates.writeback - 1e6).abs() < 1e4, "{rates:?}");
        assert!((rates.growth - 1e6).abs() < 1e4, "{rates:?}");
        for half in 60..300 {
            rates.sample(zero + Duration::from_millis(500 * half), 59 * 500_000, 59 * 500_000);
        }
        assert_eq!(rates.writeback, 0.0);
        assert!(rates.growth.abs() < 1.0, "{rates:?}");
    }
}
