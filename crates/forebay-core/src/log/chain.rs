// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A log: the chain of segments of one volume, and how far each part of its life has come.
//!
//! # Invariants
//!
//! - **L1** tail ≤ head; watermark ≤ durable ≤ written ≤ closed ≤ placed.
//! - **L2** Entries and the index change in the order of sequences, never of completions.
//! - **L3** Exactly the records between tail and head are the log.

use crate::effect::Token;
use crate::format::entry::{Entry, Kind};
use crate::format::record::{self, Header, ITEM_LOST, ITEMS_OF_ENTRY_MAX, Link};
use crate::format::superblock;
use crate::limits::{RECORD_ENTRIES_MAX, RECORD_ITEMS_MAX};
use crate::log::resize::Mark;
use crate::log::segment::{Segments, State};
use crate::log::times::Times;
use crate::map::extent::Position;
use crate::mutant::{Mutant, Mutants};
use crate::units::{BLOCK_SIZE, BufferId, Ordinal, SegmentId, Sequence, Tick, VolumeIndex};
use alloc::boxed::Box;
use alloc::collections::VecDeque;

/// Records of one log that may be on their way to the device.
pub const RECORDS_IN_FLIGHT_MAX: usize = 256;

/// The open segment of a log.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Which.
    pub segment: SegmentId,
    /// Where its bytes are.
    pub buffer: BufferId,
    /// Next block to fill.
    pub next_block: u16,
    /// It was taken from the reserve: guest data does not go into it while the pool is that low.
    pub reserve: bool,
}

/// The record that is being filled.
#[derive(Clone, Copy, Debug)]
pub struct OpenRecord {
    /// Its header's block.
    pub block: u16,
    /// Its first sequence.
    pub sequence: Sequence,
    /// Entries so far.
    pub entries: u16,
    /// Some of them are copies of what was read.
    pub copies: bool,
    /// When its first entry was placed.
    pub since: Tick,
    /// Guest flushes before its first entry.
    pub epoch: u64,
}

/// A record on its way to the device.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// The write.
    pub token: Token,
    /// What of it is still to be written: from which block of the buffer on, how many.
    pub rest: (u16, u16),
    /// It holds copies of what was read.
    pub copies: bool,
    /// What is written when it is done.
    pub marks: Marks,
    /// The device said so.
    pub written: bool,
}

/// What a record says about the log, true as soon as it is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Its last sequence.
    pub through: Sequence,
    /// The tail it names.
    pub tail: Ordinal,
    /// The watermark it names.
    pub watermark: Sequence,
    /// When the first entry was placed of all that become durable with it: its own, or one of a record before it.
    pub since: Tick,
    /// Bytes closed in this opening, its own included.
    pub bytes: u64,
    /// Everything at or below it is in this record or in one before.
    pub position: Position,
}

/// A list of what a record holds, for the header of the next one.
#[derive(Debug)]
pub struct Items {
    items: [u64; RECORD_ITEMS_MAX],
    count: usize,
}

impl Items {
    const fn new() -> Items {
        Items { items: [0; RECORD_ITEMS_MAX], count: 0 }
    }

    /// The items.
    pub fn as_slice(&self) -> &[u64] {
        &self.items[..self.count]
    }

    /// Whether one more extent is sure to fit.
    pub fn has_room(&self) -> bool {
        self.left() >= ITEMS_OF_ENTRY_MAX
    }

    fn left(&self) -> usize {
        RECORD_ITEMS_MAX - self.count
    }

    /// Forgets all, and takes what a record holds.
    pub fn take(&mut self, head: &[u8; BLOCK_SIZE], entry_count: u16, mutants: Mutants) {
        let marks = !mutants.is(Mutant::LostItemUnmarked);
        // A record from before they were told apart may hold more lost blocks than can be.
        if !self.fill(head, entry_count, marks) {
            self.fill(head, entry_count, false);
        }
    }

    fn fill(&mut self, head: &[u8; BLOCK_SIZE], entry_count: u16, marks: bool) -> bool {
        self.clear();
        let mut entries = (0..entry_count).filter_map(|number| record::entry(head, number).ok());
        entries.all(|entry| self.add(&entry, marks))
    }

    /// Adds what an entry holds; with `marks`, whether that is lost. Says whether there was room: our own writer closes a
    /// record before its list is full.
    #[inline]
    pub fn add(&mut self, entry: &Entry, marks: bool) -> bool {
        let (first, second) = record::items(entry.lba, entry.count, entry.kind);
        if entry.kind != Kind::Lost && second.is_none() {
            let fits = self.left() > 0;
            if fits {
                self.push(first);
            }
            return fits;
        }
        let lost = (entry.kind == Kind::Lost && marks).then_some(ITEM_LOST);
        let all = [Some(first), second, lost];
        let fits = all.iter().flatten().count() <= self.left();
        if fits {
            all.into_iter().flatten().for_each(|item| self.push(item));
        }
        fits
    }

    /// Adds one.
    #[inline]
    pub fn push(&mut self, item: u64) {
        self.items[self.count] = item;
        self.count += 1;
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.count = 0;
    }
}

/// One log.
#[derive(Debug)]
pub struct Log {
    /// The open segment.
    pub head: Option<Head>,
    /// The open record, in the head.
    pub open: Option<OpenRecord>,
    /// The open record's header as it will be written.
    pub header: Box<[u8; BLOCK_SIZE]>,
    /// What the open record holds.
    pub items: Items,
    /// What the record before holds.
    pub previous_items: Items,
    /// The last closed record.
    pub last: Link,
    /// The newest segment of the log, open or not.
    pub newest: Option<SegmentId>,
    /// The segment before the head, while it is not free.
    pub before_head: Option<SegmentId>,
    /// Ordinal the next segment gets.
    pub next_ordinal: Ordinal,
    /// Oldest segment that is not free; the retired ones come first.
    pub oldest: Option<SegmentId>,
    /// Oldest segment that is not retired.
    pub tail_segment: Option<SegmentId>,
    /// Lowest ordinal alive.
    pub tail: Ordinal,
    /// Next sequence.
    pub next_sequence: Sequence,
    /// Last sequence of an entry (not of a mere header).
    pub placed: Sequence,
    /// Last sequence of an entry that the backing device does not hold by its nature.
    pub dirtied: Sequence,
    /// Last sequence of the last closed record.
    pub closed: Sequence,
    /// Records on their way, oldest first.
    pub in_flight: VecDeque<InFlight>,
    /// What the records written so far, without a gap, say.
    pub written: Marks,
    /// What the records covered by the flush under way say.
    pub flushing: Marks,
    /// What the durable records say.
    pub durable: Marks,
    /// Someone waits for this to be durable.
    pub wanted: Sequence,
    /// The first such wish that is not met, or that one.
    pub(crate) wanted_first: Sequence,
    /// A record must be written for its marks' sake: the tail or the watermark has moved.
    pub note_wanted: bool,
    /// Everything up to it is on the backing device; `durable.watermark` is what a crash keeps.
    pub watermark: Sequence,
    /// Wall clock of the newest data on the backing device.
    pub backing_as_of: u64,
    /// When entries were placed.
    pub(crate) times: Times,
    /// Guest flushes so far.
    pub flush_epoch: u64,
    /// Those before the first entry of the last closed record.
    pub record_epoch: u64,
    /// Segments in the log, retired ones not counted.
    pub segment_count: u32,
    /// Of these the oldest, up to the first that is not known to be clean for good, and that one; none: the first of all.
    pub clean_count: u32,
    /// See there.
    pub clean_end: Option<SegmentId>,
    /// Blocks that are not on the backing device, superseded versions included.
    pub dirty_blocks: u64,
    /// Bytes closed since this opening.
    pub closed_bytes: u64,
    /// Segments in it that the cache is to lose (`resize`).
    pub going: u32,
    /// Where it ended when that was to become durable.
    pub(crate) mark: Option<Mark>,
}

impl Log {
    /// Someone waits for this to be durable, too.
    #[inline]
    pub(crate) fn want(&mut self, through: Sequence) {
        if through > self.wanted {
            if self.wanted <= self.durable.through {
                self.wanted_first = through;
            }
            self.wanted = through;
        }
    }

    /// A log that ends at sequence `through`, everything durable, and goes on at a higher one: what
    /// lies between was given to records that are void for ever.
    pub fn new(through: Sequence, next_sequence: Sequence) -> Log {
        assert!(next_sequence > through);
        let marks = Marks { through, ..Marks::default() };
        Log {
            head: None,
            open: None,
            header: Box::new([0; BLOCK_SIZE]),
            items: Items::new(),
            previous_items: Items::new(),
            last: Link::NONE,
            newest: None,
            before_head: None,
            next_ordinal: Ordinal(1),
            oldest: None,
            tail_segment: None,
            tail: Ordinal(1),
            next_sequence,
            placed: through,
            dirtied: through,
            closed: through,
            in_flight: VecDeque::with_capacity(RECORDS_IN_FLIGHT_MAX),
            written: marks,
            flushing: marks,
            durable: marks,
            wanted: through,
            wanted_first: through,
            note_wanted: false,
            watermark: Sequence(0),
            backing_as_of: 0,
            times: Times::new(through),
            flush_epoch: 0,
            record_epoch: u64::MAX,
            segment_count: 0,
            clean_count: 0,
            clean_end: None,
            dirty_blocks: 0,
            closed_bytes: 0,
            going: 0,
            mark: None,
        }
    }

    /// Whether one more entry with so many blocks (0 or 1) fits the open record, in a segment of `segment_blocks`.
    #[inline]
    pub fn has_room(&self, blocks: u16, segment_blocks: u16) -> bool {
        let (Some(head), Some(open)) = (&self.head, &self.open) else { return false };
        usize::from(open.entries) < RECORD_ENTRIES_MAX
            && self.items.has_room()
            && head.next_block + blocks <= segment_blocks
    }

    /// Every record up to this one is written.
    pub fn note_written(&mut self, marks: Marks) {
        // The flush under way, or the last one, leaves out what was written after it began.
        let waits = self.written.through > self.flushing.through;
        let since = if waits { self.written.since } else { marks.since };
        self.written = Marks { since, ..marks };
    }

    /// When the oldest entry was placed that is not durable.
    pub fn undurable_since(&self) -> Option<Tick> {
        if self.placed <= self.durable.through {
            return None;
        }
        let flushing = self.flushing.through > self.durable.through;
        let written = self.written.through > self.flushing.through;
        // In the order in which they were placed.
        flushing
            .then_some(self.flushing.since)
            .or_else(|| written.then_some(self.written.since))
            .or_else(|| self.in_flight.front().map(|record| record.marks.since))
            .or_else(|| self.open.filter(|open| open.entries > 0).map(|open| open.since))
    }

    /// Whether something in the log is not on the backing device.
    pub fn is_dirty(&self) -> bool {
        self.dirtied > self.watermark
    }

    /// Bytes closed and not durable.
    pub fn undurable_bytes(&self) -> u64 {
        self.closed_bytes - self.durable.bytes
    }

    /// Marks of a record that is closed now, whose first entry was placed then.
    pub fn marks(&self, header: &Header, position: Position, since: Tick) -> Marks {
        Marks {
            through: header.last_sequence(),
            tail: header.tail,
            watermark: header.watermark,
            since,
            bytes: self.closed_bytes,
            position,
        }
    }

    /// Where the log of this volume ends, if it has a record. Its tail may be in the superblock alone, and its last record in no log.
    pub(crate) fn end(&self, volume: VolumeIndex, segments: &Segments) -> Option<superblock::Head> {
        let last = self.last;
        let segment = (last != Link::NONE).then(|| segments.get(last.segment))?;
        let is_in_log = matches!(segment.state, State::Open | State::Sealed)
            && segment.volume == volume
            && segment.used > last.block;
        is_in_log.then_some(superblock::Head {
            link: last,
            through: self.closed,
            used: segment.used,
            ordinal: segment.ordinal,
        })
    }

    /// Notes how far it is, but for where it ends.
    pub(crate) fn note(&self, recorded: &mut superblock::Volume) {
        recorded.next_sequence = self.next_sequence;
        recorded.watermark = self.durable.watermark;
        recorded.tail = self.durable.tail.max(recorded.tail);
        recorded.backing_as_of = self.backing_as_of;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Lba;

    /// A program from before, which did not tell lost items apart, wrote records with as many as there can be: all of
    /// them are named, if not as lost.
    #[test]
    fn what_is_too_much_to_be_told_apart_is_named_all_the_same() {
        for lost in 0..=RECORD_ENTRIES_MAX {
            let mut head = [0; BLOCK_SIZE];
            for number in 0..RECORD_ENTRIES_MAX {
                let kind = if number < lost { Kind::Lost } else { Kind::Zero };
                let entry = Entry { kind, lba: Lba(number as u64), count: 1, crc: 0, slot: 0 };
                record::put_entry(&mut head, number as u16, &entry);
            }
            let mut items = Items::new();
            items.take(&head, RECORD_ENTRIES_MAX as u16, Mutants::default());
            let marks = items.as_slice().iter().filter(|item| **item == ITEM_LOST).count();
            assert_eq!(items.as_slice().len() - marks, RECORD_ENTRIES_MAX);
            let fits = RECORD_ENTRIES_MAX + lost <= RECORD_ITEMS_MAX;
            assert_eq!(marks, if fits { lost } else { 0 });
        }
    }
}
