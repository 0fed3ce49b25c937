// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was missed lately: a block that is read once is not worth a place in the log, one that is read again
//! before long is.
//!
//! Not ids but eight bits of a hash each are kept, in sets of 16, as many as a quarter of the cache has blocks:
//! 64 MiB for each TiB of it. In its set the oldest gives its place, so that all of it is about a queue. One block in
//! 16 is taken for one that was there: it comes in at its first touch, which does no harm.
//!
//! # Invariants
//!
//! - **G1** What was noted is found until 16 others were noted in its set.

use crate::units::{Lba, VolumeIndex};
use alloc::boxed::Box;

/// Blocks noted in one set: a byte each.
const WAYS: u64 = size_of::<u128>() as u64;
/// Of so many blocks of the cache one is noted.
const SHARE: u64 = 4;

/// What was missed lately.
#[derive(Debug)]
pub(crate) struct History {
    sets: Box<[u128]>,
}

impl History {
    /// For a cache of so many slots.
    pub(crate) fn new(slots: u64) -> History {
        History { sets: alloc::vec![0; set_count(slots) as usize].into() }
    }

    /// Bytes of memory for a cache of so many slots.
    pub(crate) fn memory_bytes(slots: u64) -> u64 {
        set_count(slots) * WAYS
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        size_of_val(&*self.sets) as u64
    }

    /// Notes a block; says whether it was there.
    pub(crate) fn touch(&mut self, volume: VolumeIndex, lba: Lba) -> bool {
        let (set, mark) = self.place(volume, lba);
        let set = &mut self.sets[set];
        if set.to_le_bytes().contains(&mark) {
            return true;
        }
        *set = *set << 8 | u128::from(mark);
        false
    }

    /// Whether a block is taken for one that was noted.
    pub(crate) fn has(&self, volume: VolumeIndex, lba: Lba) -> bool {
        let (set, mark) = self.place(volume, lba);
        self.sets[set].to_le_bytes().contains(&mark)
    }

    /// In which set a block is noted, and by which mark.
    fn place(&self, volume: VolumeIndex, lba: Lba) -> (usize, u8) {
        let key = lba.0 | u64::from(volume.0) << 40;
        let mut mixed = key.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 31).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 32;
        let set = ((u128::from(mixed) * self.sets.len() as u128) >> 64) as usize;
        // Nothing was noted where there is a zero.
        (set, mixed as u8 | u8::from(mixed as u8 == 0))
    }
}

fn set_count(slots: u64) -> u64 {
    (slots / SHARE).div_ceil(WAYS).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: VolumeIndex = VolumeIndex(0);
    const B: VolumeIndex = VolumeIndex(1);

    #[test]
    fn a_block_is_known_the_second_time() {
        let mut history = History::new(1 << 20);
        let fresh = (0..1000).filter(|lba| !history.touch(A, Lba(*lba))).count();
        assert!(fresh > 990, "{fresh} of 1000 were new");
        assert!((0..1000).all(|lba| history.has(A, Lba(lba))), "G1");
        assert!((0..1000).all(|lba| history.touch(A, Lba(lba))), "G1");
        let known = (1000..2000).filter(|lba| history.has(A, Lba(*lba))).count();
        assert!(known < 10, "{known} of 1000 others, and looking notes nothing");
        let fresh = (0..1000).filter(|lba| !history.touch(B, Lba(*lba))).count();
        assert!(fresh > 990, "another volume's");
    }

    #[test]
    fn what_was_missed_long_ago_is_forgotten() {
        let slots = 1 << 16;
        let mut history = History::new(slots);
        // Eight times as many as it holds, at even distances.
        for lba in 0..2 * slots {
            history.touch(A, Lba(lba * 64));
        }
        let known = (0..1000).filter(|lba| history.touch(A, Lba(lba * 64))).count();
        assert!(known < 150, "{known} of 1000 are still known");
        let last = 2 * slots - 2000;
        let known = (last..last + 1000).filter(|lba| history.touch(A, Lba(lba * 64))).count();
        assert!(known > 990, "{known} of the 1000 last are known");
    }

    #[test]
    fn a_tebibyte_takes_64_mebibytes() {
        assert_eq!(History::memory_bytes(1 << 28), 64 << 20);
        let history = History::new(1 << 20);
        assert_eq!(history.held_bytes(), History::memory_bytes(1 << 20));
        assert_eq!(History::new(1).held_bytes(), 16);
    }
}
