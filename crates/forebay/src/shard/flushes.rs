// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flushes of the cache device, one at a time (D5 of `log/durable.rs`).
//!
//! A kernel tells of what it could not write once, to one of those who wait: of two flushes under way at once one may be
//! answered well for what the other has heard to be lost. So nobody's flush begins before the one under way has ended; all
//! who have come meanwhile share the next one.

use forebay_core::effect::Fault;
use forebay_core::limits::VOLUME_COUNT_MAX;

/// Who may want one at once: the engine's logs, its checkpoint, the superblock, and a batch of each volume.
const ASKERS: usize = 3 + VOLUME_COUNT_MAX;

/// Who waits for a flush.
#[derive(Debug)]
pub(super) struct Flushes {
    is_running: bool,
    /// For these, ...
    under_way: Vec<u64>,
    /// ... and the next one for these.
    waiting: Vec<u64>,
}

impl Flushes {
    pub(super) fn new() -> Flushes {
        let list = || Vec::with_capacity(ASKERS);
        Flushes { is_running: false, under_way: list(), waiting: list() }
    }

    /// Somebody wants a flush; says whether one is to be begun for it now.
    pub(super) fn ask(&mut self, token: u64) -> bool {
        self.waiting.push(token);
        self.begin()
    }

    /// Whether one is to be begun now, for all who wait.
    pub(super) fn begin(&mut self) -> bool {
        let begins = !self.is_running && !self.waiting.is_empty();
        if begins {
            self.is_running = true;
            std::mem::swap(&mut self.under_way, &mut self.waiting);
        }
        begins
    }

    /// The one under way has ended: takes one of those who hear of it, until there is none. Of a failed one those hear, too, who
    /// wait for the next: what it should have covered is not covered by that.
    pub(super) fn heard(&mut self, result: Result<(), Fault>) -> Option<u64> {
        let mut next = self.under_way.pop();
        if result.is_err() {
            next = next.or_else(|| self.waiting.pop());
        }
        self.is_running = next.is_some();
        next
    }

    pub(super) const fn is_running(&self) -> bool {
        self.is_running
    }

    /// Whether none is under way, and none is wanted.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_running && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(flushes: &mut Flushes, result: Result<(), Fault>) -> Vec<u64> {
        let mut heard: Vec<u64> = std::iter::from_fn(|| flushes.heard(result)).collect();
        heard.sort_unstable();
        heard
    }

    #[test]
    fn one_is_under_way_and_who_comes_meanwhile_shares_the_next() {
        let mut flushes = Flushes::new();
        assert!(flushes.ask(1));
        assert!(!flushes.ask(2) && !flushes.ask(3));
        assert_eq!(all(&mut flushes, Ok(())), [1]);
        assert!(flushes.begin() && !flushes.begin());
        assert_eq!(all(&mut flushes, Ok(())), [2, 3]);
        assert!(!flushes.begin() && flushes.is_idle());
    }

    #[test]
    fn a_failure_is_heard_by_all_who_wait() {
        let mut flushes = Flushes::new();
        assert!(flushes.ask(1) && !flushes.ask(2));
        assert_eq!(all(&mut flushes, Err(Fault)), [1, 2]);
        assert!(!flushes.begin() && flushes.is_idle());
    }
}
