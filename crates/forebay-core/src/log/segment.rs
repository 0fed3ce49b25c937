// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Segments: the pieces a log is made of.
//!
//! A segment is a fixed run of blocks on the cache device that is written once from front to back,
//! then only read until everything in it is dead, then used again, by whichever log needs one.
//!
//! # Invariants
//!
//! - **S1** At most one segment per log is open.
//! - **S2** A slot is written at most once between two openings of its segment.
//! - **S3** Segment sequences rise strictly over the whole cache, ordinals within a log.
//! - **S5** A free segment has no slot in the index, no reader and no buffer.
//! - **S6** A segment becomes free only after a record that names a higher tail is durable.
//!
//! # States
//!
//! | from    | to      | by                | needs |
//! |---------|---------|-------------------|-------|
//! | free    | open    | `append::open_segment` | a sequence above every other (S3) |
//! | open    | sealed  | `append::seal_segment` | no open record |
//! | sealed  | retired | `reclaim`         | clean, no live slot, no reader |
//! | retired | free    | `durable`         | a durable tail above it (S6) |

use crate::map::extent::Position;
use crate::memory::{queue_bytes, vec_bytes};
use crate::units::{BufferId, Ordinal, SegmentId, Sequence, Slot, VolumeIndex};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// What a segment is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In the pool.
    Free,
    /// The head of a log.
    Open,
    /// Full, or closed by recovery.
    Sealed,
    /// Emptied; waits for a durable tail above it.
    Retired,
}

/// One segment.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// What it is doing.
    pub state: State,
    /// Whose log it is in.
    pub volume: VolumeIndex,
    /// Number of this life.
    pub sequence: u64,
    /// Place in the log.
    pub ordinal: Ordinal,
    /// Sequence of its first record.
    pub first_sequence: Sequence,
    /// Last sequence in it.
    pub last_sequence: Sequence,
    /// The next segment of the log.
    pub next: Option<SegmentId>,
    /// Blocks that belong to the log.
    pub used: u16,
    /// Reads of the cache device under way.
    pub readers: u16,
    /// Record writes under way.
    pub writes: u16,
    /// Where its bytes are in memory, while some are not on the device.
    pub buffer: Option<BufferId>,
    /// A block of it may have been read since it was opened.
    pub was_read: bool,
}

impl Segment {
    const FREE: Segment = Segment {
        state: State::Free,
        volume: VolumeIndex(0),
        sequence: 0,
        ordinal: Ordinal(0),
        first_sequence: Sequence(0),
        last_sequence: Sequence(0),
        next: None,
        used: 0,
        readers: 0,
        writes: 0,
        buffer: None,
        // Unless it is opened now, nobody knows.
        was_read: true,
    };

    /// Changes the state; every legal change is a row of the table above.
    pub fn become_state(&mut self, to: State) {
        let legal = matches!(
            (self.state, to),
            (State::Free, State::Open)
                | (State::Open, State::Sealed)
                | (State::Sealed, State::Retired)
                | (State::Retired, State::Free)
        );
        assert!(legal, "a segment cannot go from {:?} to {to:?}", self.state);
        if to == State::Free || to == State::Retired {
            assert!(self.readers == 0 && self.writes == 0 && self.buffer.is_none()); // S5
        }
        self.state = to;
    }
}

/// All segments of the cache, and which are free.
#[derive(Debug)]
pub struct Segments {
    all: Vec<Segment>,
    free: VecDeque<SegmentId>,
    blocks: u16,
    /// 2^64 by `blocks`, rounded up: slots are divided often, and a multiplication is several times quicker.
    by_blocks: u64,
    /// Those from here on come to no pool: the cache is to lose them.
    limit: u32,
    /// Of these, how many are not free.
    left: u32,
}

impl Segments {
    /// `count` segments of `blocks` blocks, none of them in the pool yet.
    pub fn new(count: u32, blocks: u16) -> Segments {
        assert!(blocks > 1, "a header and a block");
        Segments {
            all: alloc::vec![Segment::FREE; count as usize],
            free: VecDeque::with_capacity(count as usize),
            blocks,
            by_blocks: u64::MAX / u64::from(blocks) + 1,
            limit: count,
            left: 0,
        }
    }

    /// The same for a cache of another size: what is new is in the pool, behind all others; what is gone was
    /// free.
    pub(crate) fn resized(&self, count: u32) -> Segments {
        let mut next = Segments::new(count, self.blocks);
        let both = next.all.len().min(self.all.len());
        next.all[..both].copy_from_slice(&self.all[..both]);
        assert!(self.all[both..].iter().all(|it| it.state == State::Free));
        next.free.extend(self.free.iter().filter(|id| id.0 < count));
        (self.total()..count).for_each(|id| next.put_free(SegmentId(id)));
        next
    }

    /// Bytes of memory for `count` segments.
    pub fn memory_bytes(count: u32) -> u64 {
        u64::from(count) * (size_of::<Segment>() + size_of::<SegmentId>()) as u64
    }

    /// Bytes of memory they take.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.all) + queue_bytes(&self.free)
    }

    /// Blocks of a segment.
    #[inline]
    pub fn blocks(&self) -> u16 {
        self.blocks
    }

    /// Segments that may be used.
    #[inline]
    pub fn count(&self) -> u32 {
        self.limit
    }

    /// Segments there are.
    #[inline]
    pub fn total(&self) -> u32 {
        self.all.len() as u32
    }

    /// Those that the cache is to lose and that are not free.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Only so many may be used from now on. Those that may again come last.
    pub(crate) fn set_limit(&mut self, limit: u32) {
        let before = core::mem::replace(&mut self.limit, limit);
        self.free.retain(|id| id.0 < limit);
        let is_free = |id: &u32| self.all[*id as usize].state == State::Free;
        self.free.extend((before..limit).filter(is_free).map(SegmentId));
        self.left = (limit..self.all.len() as u32).filter(|id| !is_free(id)).count() as u32;
    }

    /// Segments in the pool.
    #[inline]
    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// The pool, in the order in which segments are taken from it.
    pub fn free(&self) -> &VecDeque<SegmentId> {
        &self.free
    }

    /// A segment.
    #[inline]
    pub fn get(&self, id: SegmentId) -> &Segment {
        &self.all[id.0 as usize]
    }

    /// Blocks that hold something, most of them far from each other: what is read there comes from the medium.
    pub(crate) fn used_places(&self) -> [(SegmentId, u16); 4] {
        let is_used = |segment: &Segment| segment.state == State::Sealed;
        let last = self.all.len() - 1;
        let first = self.all.iter().position(is_used).unwrap_or(0);
        let ends = [first, self.all.iter().rposition(is_used).unwrap_or(last)];
        let [first, last] = ends.map(|at| SegmentId(at as u32));
        let middle = self.blocks / 2;
        [(first, 0), (last, 0), (first, middle), (last, middle)]
    }

    /// A segment, to be changed.
    #[inline]
    pub fn get_mut(&mut self, id: SegmentId) -> &mut Segment {
        &mut self.all[id.0 as usize]
    }

    /// Takes the segment that has been free longest.
    pub fn take_free(&mut self) -> Option<SegmentId> {
        self.free.pop_front()
    }

    /// Puts a segment into the pool.
    pub fn put_free(&mut self, id: SegmentId) {
        assert!(self.get(id).state == State::Free);
        if id.0 >= self.limit {
            self.left -= 1;
            return;
        }
        self.free.push_back(id);
    }

    /// The slot of a segment's block.
    #[inline]
    pub fn slot(&self, id: SegmentId, block: u16) -> Slot {
        assert!(block < self.blocks);
        Slot(id.0 * u32::from(self.blocks) + u32::from(block))
    }

    /// How far along in its log a segment's block is.
    #[inline]
    pub(crate) fn position(&self, id: SegmentId, block: u16) -> Position {
        Position::new(self.get(id).ordinal, block)
    }

    /// Where it is noted what the segment of a slot is doing, for [`crate::payload::Payload::prefetch`].
    #[inline]
    pub(crate) fn row(&self, slot: Slot) -> &Segment {
        self.get(self.place(slot).0)
    }

    /// The segment and block of a slot.
    #[inline]
    pub fn place(&self, slot: Slot) -> (SegmentId, u16) {
        // What rounding adds is less than one part in 2^32 of a segment for any slot: the same as division.
        let id = ((u128::from(slot.0) * u128::from(self.by_blocks)) >> 64) as u32;
        (SegmentId(id), (slot.0 - id * u32::from(self.blocks)) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slots_segment_is_what_division_gives() {
        for blocks in [2, 3, 127, 128, 129, 511, 1000, 4096, 16_384, u16::MAX - 1, u16::MAX] {
            let segments = Segments::new(1, blocks);
            let last = u32::MAX / u32::from(blocks);
            let mut seed = 7_u64;
            let any = (0..1000).map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 33) as u32 % last
            });
            for id in [0, 1, last - 1, last].into_iter().chain(any) {
                for block in [0, 1, blocks - 1] {
                    let slot = u64::from(id) * u64::from(blocks) + u64::from(block);
                    if let Ok(slot) = u32::try_from(slot) {
                        assert_eq!(segments.place(Slot(slot)), (SegmentId(id), block));
                    }
                }
            }
        }
    }
}
