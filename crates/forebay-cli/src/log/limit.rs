// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What happens again and again is told once a minute, with a count.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(60);

/// Who has been told of what. It remembers one line for each cause.
#[derive(Debug)]
pub struct Limiter<Cause> {
    told: BTreeMap<Cause, Told>,
}

#[derive(Debug)]
struct Told {
    at: Instant,
    /// Not told since then.
    more: u64,
    last: String,
}

impl<Cause: Ord + Copy> Limiter<Cause> {
    pub fn new() -> Limiter<Cause> {
        Limiter { told: BTreeMap::new() }
    }

    /// Something happened `count` times: gives the line back if it is to be told now.
    pub fn tell(&mut self, cause: Cause, text: String, count: u64, now: Instant) -> Option<String> {
        if let Some(told) = self.told.get_mut(&cause) {
            told.more += count;
            told.last = text;
            return None;
        }
        let told = Told { at: now, more: count.saturating_sub(1), last: text.clone() };
        self.told.insert(cause, told);
        Some(text)
    }

    /// Lines for what happened again, each once its minute is over.
    pub fn due(&mut self, now: Instant) -> Vec<(Cause, String)> {
        let mut lines = Vec::new();
        self.told.retain(|cause, told| {
            if now.saturating_duration_since(told.at) < WINDOW {
                return true;
            }
            if told.more == 0 {
                return false;
            }
            lines.push((*cause, format!("{} ({} more in the last minute)", told.last, told.more)));
            (told.at, told.more) = (now, 0);
            true
        });
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_cause_is_told_once_a_minute_with_a_count() {
        let zero = Instant::now();
        let at = |seconds| zero + Duration::from_secs(seconds);
        let mut limiter = Limiter::new();
        let mut tell =
            |cause, text: &str, seconds| limiter.tell(cause, text.into(), 1, at(seconds));
        assert_eq!(tell(1, "bad", 0), Some("bad".into()));
        // Another cause is told for itself.
        assert_eq!(tell(2, "worse", 1), Some("worse".into()));
        for second in 1..=17 {
            assert_eq!(tell(1, &format!("bad {second}"), second), None);
        }
        assert_eq!(limiter.due(at(59)), []);
        let line = "bad 17 (17 more in the last minute)".to_owned();
        assert_eq!(limiter.due(at(60)), [(1, line)]);
        // It is quiet, so nothing more comes, and the next is told at once.
        assert_eq!(limiter.due(at(119)), []);
        assert_eq!(limiter.due(at(120)), []);
        assert_eq!(limiter.tell(1, "bad again".into(), 1, at(121)), Some("bad again".into()));
    }

    #[test]
    fn many_at_once_are_one_line_and_a_count() {
        let zero = Instant::now();
        let mut limiter = Limiter::new();
        assert_eq!(limiter.tell("x", "bad".into(), 5, zero), Some("bad".into()));
        let line = "bad (4 more in the last minute)".to_owned();
        assert_eq!(limiter.due(zero + WINDOW), [("x", line)]);
    }

    #[test]
    fn what_goes_on_is_told_every_minute() {
        let zero = Instant::now();
        let mut limiter = Limiter::new();
        let mut lines = 0;
        for second in 0..600 {
            let now = zero + Duration::from_secs(second);
            lines += limiter.due(now).len();
            lines += usize::from(limiter.tell(0, "bad".into(), 1, now).is_some());
        }
        assert_eq!(lines, 10);
    }
}
