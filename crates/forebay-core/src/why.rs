// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a block is and, as far as that is remembered, why it is there, or is not in the log.
//!
//! Of a volume the last [`PASSED_MAX`] requests that went around the log are remembered, and what became of the last
//! [`MISSED_MAX`] ranges that reads missed; of what was reclaimed, nothing.

use crate::engine::Engine;
use crate::format::entry::Kind;
use crate::policy::bypass::{Reason, Version};
use crate::stats::Refusal;
use crate::units::{Lba, SegmentId, Tick, VolumeIndex};
use alloc::collections::VecDeque;

/// Requests that went around the log of a volume, or ranges of such that went on, that are remembered.
pub const PASSED_MAX: usize = 64;

/// A request that went around the log, or several that went on where one before them ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// First block.
    pub first: Lba,
    /// Blocks.
    pub blocks: u64,
    /// Why.
    pub reason: Reason,
    /// Blocks of the run of writes that it ended; 0: nobody counted.
    pub run: u64,
    /// When.
    pub at: Tick,
}

/// So many of the newest may be what the next one goes on with: several streams at once, each with several requests under way.
const GOES_ON_WITH: usize = 8;

/// Notes a request that goes around the log: one that goes on where another ended, for the same reason, is one with it.
pub(crate) fn pass(list: &mut VecDeque<Passed>, new: Passed) {
    let goes_on =
        |old: &&mut Passed| old.reason == new.reason && old.first + old.blocks == new.first;
    if let Some(old) = list.iter_mut().rev().take(GOES_ON_WITH).find(goes_on) {
        *old = Passed { first: old.first, blocks: old.blocks + new.blocks, ..new };
        return;
    }
    remember(list, PASSED_MAX, new);
}

/// One more, in the place of the oldest if there are as many as there may be.
fn remember<T>(list: &mut VecDeque<T>, most: usize, new: T) {
    if list.len() == most {
        list.pop_front();
    }
    list.push_back(new);
}

/// Ranges of a volume that reads missed and that are remembered.
pub const MISSED_MAX: usize = 256;

/// What became of a block that a guest's read missed, or that it said it would read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Copied: there was room.
    Room,
    /// Copied: it was missed before, and not long ago.
    Again,
    /// Copied: the read covered a part of it.
    Part,
    /// Copied: it was bad in the cache.
    Bad,
    /// Copied: the guest said that it would read it.
    Wanted,
    /// Not copied.
    Refused(Refusal),
}

/// Adjacent blocks that were missed one after the other, and of which the same became.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missed {
    /// First block.
    pub first: Lba,
    /// Blocks.
    pub blocks: u32,
    /// What became of them.
    pub outcome: Outcome,
    /// When, of the last of them.
    pub at: Tick,
}

/// Notes what became of a block.
pub(crate) fn note(list: &mut VecDeque<Missed>, first: Lba, outcome: Outcome, at: Tick) {
    if let Some(last) = list.back_mut()
        && last.outcome == outcome
        && last.first + u64::from(last.blocks) == first
        && last.blocks < u32::MAX
    {
        (last.blocks, last.at) = (last.blocks + 1, at);
        return;
    }
    remember(list, MISSED_MAX, Missed { first, blocks: 1, outcome, at });
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the buffer of a segment, in memory.
    Buffer {
        /// Which segment.
        segment: SegmentId,
        /// Block within it.
        block: u16,
    },
    /// On the cache device.
    Cache {
        /// Which segment.
        segment: SegmentId,
        /// Block within it.
        block: u16,
    },
    /// In no place: the log says that it reads as zeros.
    Zeros,
    /// In no place: the guest gave it up.
    Discarded,
    /// On the backing device alone.
    Backing,
    /// Nowhere: its newest contents were lost.
    Lost,
}

/// What is known of a block.
#[derive(Clone, Copy, Debug)]
pub struct Why {
    /// Where it is.
    pub place: Place,
    /// What is there is not on the backing device.
    pub dirty: bool,
    /// The backing device refuses it.
    pub parked: bool,
    /// It is a copy of what the backing device held when it was made.
    pub fill: bool,
    /// An entry in the log says that a write of it went around the log.
    pub voided: bool,
    /// The last remembered write of it that went around the log.
    pub passed: Option<Passed>,
    /// What became of it when a read missed it last, if that is remembered.
    pub missed: Option<Missed>,
    /// A read that misses it now is taken for one that comes again.
    pub noted: bool,
    /// Something would have to leave for a copy of it.
    pub full: bool,
    /// There is room for copies of what is read, which writes will not want soon.
    pub room: bool,
}

impl Engine {
    /// Where a block is and why, if the volume has such a block. Looking is no reading: nothing is kept longer for
    /// it.
    pub fn why(&self, volume: VolumeIndex, lba: Lba) -> Option<Why> {
        let state = self.volume_ref(volume).filter(|state| lba.0 < state.blocks())?;
        let logged = !state.is_passing();
        let slot = self.newest_slot(state, lba).filter(|_| logged);
        let kind = state.extents.get(lba).map(|extent| extent.kind).filter(|_| logged);
        let place = match (slot.map(|slot| self.segments.place(slot)), kind) {
            (Some((segment, block)), _) if self.segments.get(segment).buffer.is_some() => {
                Place::Buffer { segment, block }
            }
            (Some((segment, block)), _) => Place::Cache { segment, block },
            (None, Some(Kind::Zero)) => Place::Zeros,
            (None, Some(Kind::Discard)) => Place::Discarded,
            (None, Some(Kind::Lost)) => Place::Lost,
            (None, _) => Place::Backing,
        };
        let was_missed = |it: &&Missed| it.first <= lba && lba < it.first + u64::from(it.blocks);
        let covers = |passed: &&Passed| passed.first <= lba && lba < passed.first + passed.blocks;
        Some(Why {
            place,
            dirty: matches!(self.version(state, lba), Version::Dirty { .. })
                && place != Place::Backing,
            parked: state.parked.contains(lba),
            fill: slot.and_then(|slot| self.slots.held(slot)).is_some_and(|held| held.fill),
            voided: place == Place::Backing && kind == Some(Kind::Bypassed),
            passed: state.around.passed.iter().rev().find(covers).copied(),
            missed: state.missed.iter().rev().find(was_missed).copied(),
            noted: self.history.has(volume, lba),
            full: self.cache_is_full(volume),
            room: self.may_fill(volume),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn adjacent_blocks_of_one_outcome_are_one_range_and_the_oldest_ranges_go() {
        let mut list = VecDeque::with_capacity(MISSED_MAX);
        let room = list.capacity();
        let first = Outcome::Refused(Refusal::FirstTouch);
        for lba in 0..8 {
            note(&mut list, Lba(100 + lba), first, Tick(lba));
        }
        assert_eq!(list, [Missed { first: Lba(100), blocks: 8, outcome: first, at: Tick(7) }]);
        note(&mut list, Lba(108), Outcome::Room, Tick(8));
        note(&mut list, Lba(110), Outcome::Room, Tick(9));
        assert_eq!(list.len(), 3, "another outcome, and a gap");
        for lba in 0..MISSED_MAX as u64 {
            note(&mut list, Lba(1000 + 2 * lba), Outcome::Again, Tick(10));
        }
        assert_eq!((list.len(), list.capacity()), (MISSED_MAX, room));
        assert_eq!(list[0].first, Lba(1000));
    }

    #[test]
    fn requests_around_the_log_that_go_on_are_one_stretch_and_the_oldest_stretches_go() {
        let mut list = VecDeque::with_capacity(PASSED_MAX);
        let passed = |first, run, reason| Passed {
            first: Lba(first),
            blocks: 64,
            reason,
            run,
            at: Tick(run),
        };
        // Two streams, one request of each in turn.
        for at in 0..100 {
            pass(&mut list, passed(64 * at, at, Reason::Sequential));
            pass(&mut list, passed((1 << 20) + 64 * at, at, Reason::Sequential));
        }
        let all: Vec<_> = list.iter().map(|it| (it.first.0, it.blocks, it.run)).collect();
        assert_eq!(all, [(0, 6400, 99), (1 << 20, 6400, 99)]);
        pass(&mut list, passed(6400, 1, Reason::Full));
        assert_eq!(list.len(), 3, "another reason");
        for at in 0..PASSED_MAX as u64 {
            pass(&mut list, passed((1 << 30) + 128 * at, 0, Reason::Mode));
        }
        assert_eq!((list.len(), list[0].first), (PASSED_MAX, Lba(1 << 30)));
    }
}
