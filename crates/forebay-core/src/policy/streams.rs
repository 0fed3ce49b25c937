// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Streams: requests that go on where an earlier one ended.
//!
//! A disk is good at long runs, and a cache is soon full of what is read or written once from one end to the
//! other. Whoever decides what enters the cache asks here how long the run is that a request belongs to.
//!
//! # Invariants
//!
//! - **T1** A run is found again if fewer than [`WAYS`] other runs ended in its set since: of 128 streams that take
//!   turns all but about one in a thousand are, whatever their places.
//! - **T2** A run's length is the sum of its requests, without a gap and without a block counted twice.
//! - **T3** The table is as large as it was made, and a touch looks at [`WAYS`] places twice.

use crate::units::{Lba, VolumeIndex};
use alloc::boxed::Box;

const SETS: usize = 64;
/// Runs that one set holds.
const WAYS: usize = 8;

/// Where a run ended.
#[derive(Clone, Copy, Debug)]
struct End {
    /// Volume and the block behind the run, and never 0 where there is a run.
    key: u64,
    /// Blocks of the run.
    blocks: u32,
    /// The touch that made it so long.
    touched: u32,
}

const NO_END: End = End { key: 0, blocks: 0, touched: 0 };

/// The ends of the last runs.
#[derive(Debug)]
pub struct Streams {
    sets: Box<[[End; WAYS]]>,
    touches: u32,
}

impl Default for Streams {
    fn default() -> Streams {
        Streams { sets: alloc::vec![[NO_END; WAYS]; SETS].into(), touches: 0 }
    }
}

impl Streams {
    /// Bytes of memory it takes.
    pub const fn memory_bytes() -> u64 {
        size_of::<[[End; WAYS]; SETS]>() as u64
    }

    /// A request for `blocks` blocks from `lba` on: how many blocks the run has of which it is the end.
    pub fn touch(&mut self, volume: VolumeIndex, lba: Lba, blocks: u64) -> u64 {
        self.follow(volume, lba, blocks).0
    }

    /// The same, and how many requests ago the run's last one came; 0: it begins one.
    pub fn follow(&mut self, volume: VolumeIndex, lba: Lba, blocks: u64) -> (u64, u32) {
        self.touches = self.touches.wrapping_add(1);
        let now = self.touches;
        let (mut run, mut ago) = (blocks, 0);
        let before = key(volume, lba.0);
        if let Some(end) = self.set(before).iter_mut().find(|end| end.key == before) {
            run += u64::from(end.blocks);
            ago = now.wrapping_sub(end.touched);
            *end = NO_END;
        }
        let after = key(volume, lba.0 + blocks);
        // What was touched longest ago gives its place, first of all what was never touched.
        let age = |end: &End| if end.key == 0 { u32::MAX } else { now.wrapping_sub(end.touched) };
        let set = self.set(after);
        let same = set.iter().position(|end| end.key == after);
        let oldest = || (0..WAYS).max_by_key(|way| age(&set[*way])).unwrap_or(0);
        let way = same.unwrap_or_else(oldest);
        set[way] = End { key: after, blocks: u32::try_from(run).unwrap_or(u32::MAX), touched: now };
        (run, ago)
    }

    /// Forgets the runs of a volume: another one may come to its place.
    pub fn forget(&mut self, volume: VolumeIndex) {
        let ends = self.sets.as_flattened_mut().iter_mut();
        ends.filter(|end| is_of(end.key, volume)).for_each(|end| *end = NO_END);
    }

    fn set(&mut self, key: u64) -> &mut [End; WAYS] {
        let mixed = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        &mut self.sets[(mixed >> 58) as usize]
    }
}

fn key(volume: VolumeIndex, lba: u64) -> u64 {
    (u64::from(volume.0) + 1) << 48 | lba
}

fn is_of(key: u64, volume: VolumeIndex) -> bool {
    key >> 48 == self::key(volume, 0) >> 48
}

const _: () = assert!(SETS == 1 << (64 - 58));

#[cfg(test)]
mod tests {
    use super::*;

    const A: VolumeIndex = VolumeIndex(0);
    const B: VolumeIndex = VolumeIndex(1);

    #[test]
    fn a_run_is_as_long_as_its_requests_together() {
        let mut streams = Streams::default();
        assert_eq!(streams.touch(A, Lba(100), 8), 8);
        assert_eq!(streams.touch(A, Lba(108), 1), 9);
        assert_eq!(streams.touch(A, Lba(109), 256), 265);
        assert_eq!(streams.touch(B, Lba(365), 8), 8, "another volume's");
        assert_eq!(streams.touch(A, Lba(366), 8), 8, "a block is missing");
        assert_eq!(streams.touch(A, Lba(365), 1), 266);
        assert_eq!(streams.touch(A, Lba(365), 1), 1, "that end was gone on from");
    }

    #[test]
    fn who_comes_to_a_place_goes_on_no_run_of_who_was_there() {
        let mut streams = Streams::default();
        for volume in [A, B] {
            streams.touch(volume, Lba(100), 8);
        }
        streams.forget(A);
        assert_eq!(streams.touch(A, Lba(108), 1), 1);
        assert_eq!(streams.touch(B, Lba(108), 1), 9, "another volume's stays");
    }

    #[test]
    fn a_run_that_begins_at_block_0_is_one() {
        let mut streams = Streams::default();
        assert_eq!(streams.touch(A, Lba(0), 4), 4);
        assert_eq!(streams.touch(A, Lba(4), 4), 8);
    }

    /// 128 streams that take turns, far apart and at even distances, as copies of disk images are.
    #[test]
    fn many_streams_that_take_turns_are_all_followed() {
        let mut lost = 0;
        for apart in [1 << 20, 1_000_003, 12_345_678, 1 << 30] {
            let mut streams = Streams::default();
            for round in 0..64 {
                for stream in 0..128 {
                    let run = streams.touch(A, Lba(stream * apart + round * 32), 32);
                    lost += u64::from(run != (round + 1) * 32);
                }
            }
        }
        assert!(lost <= 4 * 64 * 128 / 100, "{lost} of {} times", 4 * 64 * 128);
    }

    /// Requests here and there do not make one forget a stream soon.
    #[test]
    fn a_stream_survives_random_requests_in_between() {
        let mut streams = Streams::default();
        let (mut state, mut found) = (1u64, 0);
        for round in 0..1000 {
            found += u64::from(streams.touch(A, Lba(round), 1) > 1);
            for _ in 0..100 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                streams.touch(A, Lba(1 << 30 | state >> 36), 1);
            }
        }
        assert!(found >= 990, "{found} of 1000");
    }

    #[test]
    fn the_longest_run_has_a_length() {
        let mut streams = Streams::default();
        streams.touch(A, Lba(0), u64::from(u32::MAX) - 1);
        let run = streams.touch(A, Lba(u64::from(u32::MAX) - 1), 8);
        assert_eq!(run, u64::from(u32::MAX) + 7);
        assert!(streams.touch(A, Lba(u64::from(u32::MAX) + 7), 8) > u64::from(u32::MAX));
    }
}
