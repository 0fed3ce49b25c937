// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much of a volume write-back zeroes or discards at once. A guest may zero all of a disk with one request, and a disk that
//! cannot do so by itself has it written: that takes minutes, and nobody else gets at the disk until it ends (S1 of `slices`).
//!
//! # Invariants
//!
//! - **Z1** What is under way of one kind, zeros or discards, takes [`AIM`] by what was seen of the device, or is one piece of
//!   [`PIECE_MIN`]. Of a device of which nothing was seen it is [`PIECE_FIRST`].
//! - **Z2** Only what was at least half of what might have been under way makes pieces longer, each time [`GROWS`] times at most.

use crate::units::Tick;

/// What pieces under way should take together, in nanoseconds.
pub(crate) const AIM: u64 = 100_000_000;
/// Blocks of one.
pub(crate) const PIECE_FIRST: u64 = 1024;
const PIECE_MIN: u64 = 64;
const PIECE_MAX: u64 = 1 << 28;
/// Fewer say what one operation takes, and not what a block does.
const TELLS: u64 = 256;
const GROWS: u64 = 4;

/// Zeros, or discards, of one volume.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Blocks that may be under way.
    most: u64,
    /// Blocks that are.
    under_way: u64,
    /// Blocks done since something was under way always, and since when that is.
    done: u64,
    begun: Tick,
    /// Something of it failed: what it took says nothing.
    failed: bool,
}

impl Pieces {
    pub(crate) fn new() -> Pieces {
        Pieces { most: PIECE_FIRST, under_way: 0, done: 0, begun: Tick(0), failed: false }
    }

    /// How many blocks of so many may be given to the device now (Z1).
    pub(crate) fn next(&self, blocks: u64) -> Option<u64> {
        match self.under_way {
            0 => Some(blocks.min(self.most)),
            under_way => (under_way.saturating_add(blocks) <= self.most).then_some(blocks),
        }
    }

    /// What so many blocks take, in nanoseconds.
    pub(crate) fn takes(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(AIM / PIECE_MIN) / (self.most / PIECE_MIN)
    }

    /// So many are given to it.
    pub(crate) fn begin(&mut self, blocks: u64, now: Tick) {
        if self.under_way == 0 {
            (self.begun, self.done, self.failed) = (now, 0, false);
        }
        self.under_way += blocks;
    }

    /// So many are done, or refused; whether what they took tells anything.
    pub(crate) fn end(&mut self, blocks: u64, tells: bool, now: Tick) {
        self.under_way -= blocks;
        self.done += blocks;
        self.failed |= !tells;
        if self.under_way > 0 || self.failed || self.done < TELLS.min(self.most) {
            return;
        }
        let took = now.since(self.begun).max(1);
        let aimed = u128::from(self.done) * u128::from(AIM) / u128::from(took);
        let aimed = u64::try_from(aimed).unwrap_or(u64::MAX).clamp(PIECE_MIN, PIECE_MAX);
        if aimed < self.most || self.done >= self.most / 2 {
            self.most = aimed.min(GROWS * self.most); // Z2
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives it a range as long as can be, of which a block takes so long, and says how long the pieces became.
    fn last_of(pieces: &mut Pieces, rounds: u32, nanos: u64) -> u64 {
        let mut now = Tick(1);
        (0..rounds).fold(0, |_, _| {
            let blocks = pieces.next(u64::MAX).expect("nothing is under way");
            pieces.begin(blocks, now);
            assert_eq!(pieces.next(u64::MAX), None, "the rest waits");
            now = now.after(blocks * nanos);
            pieces.end(blocks, true, now);
            blocks
        })
    }

    #[test]
    fn pieces_take_a_tenth_of_a_second_whatever_the_device() {
        let mut pieces = Pieces::new();
        // 150 MB/s.
        assert_eq!(last_of(&mut pieces, 10, 27_300), 3_663);
        assert!((AIM * 98 / 100..=AIM * 102 / 100).contains(&pieces.takes(3_663)));
        // 100 KB/s; then it does nothing but note it.
        assert_eq!(last_of(&mut pieces, 3, 40_000_000), PIECE_MIN);
        assert_eq!(last_of(&mut pieces, 20, 0), PIECE_MAX);
    }

    #[test]
    fn short_ones_go_side_by_side_and_say_little() {
        let mut pieces = Pieces::new();
        for _ in 0..PIECE_FIRST / 8 {
            assert_eq!(pieces.next(8), Some(8));
            pieces.begin(8, Tick(0));
        }
        assert_eq!(pieces.next(8), None);
        // One that failed at once was not fast.
        (1..PIECE_FIRST / 8).for_each(|at| pieces.end(8, at > 1, Tick(1)));
        pieces.end(8, true, Tick(1));
        assert_eq!(pieces.next(u64::MAX), Some(PIECE_FIRST));
        pieces.begin(8, Tick(0));
        pieces.end(8, true, Tick(1));
        assert_eq!(pieces.next(u64::MAX), Some(PIECE_FIRST));
    }
}
