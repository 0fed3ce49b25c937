// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What recovery found, and questions to it.

use crate::format::checkpoint::Written;
use crate::format::entry::Kind;
use crate::format::record::Header;
use crate::format::superblock::Head;
use crate::log::append::EAGER_BLOCKS;
use crate::log::chain::{Log, Marks};
use crate::log::image::Row;
use crate::log::lost::each_held;
use crate::log::segment::{Segments, State};
use crate::map::extent::{Extent, ExtentMap, Position};
use crate::map::index::Index;
use crate::map::slots::{Held, Slots};
use crate::policy::writeback::Cursor;
use crate::units::{Lba, Ordinal, SegmentId, Sequence, Slot, Tick, VolumeIndex};
use crate::volume::PendingExtent;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

/// What was found damaged. Nothing else is affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// A record's header rotted; these blocks were dirty and are lost.
    Lost {
        /// Whose.
        volume: VolumeIndex,
        /// First block.
        lba: Lba,
        /// Blocks.
        count: u64,
    },
    /// A record's header rotted; these blocks were dirty, and were overwritten by what later records hold: nobody reads them.
    Replaced {
        /// Whose.
        volume: VolumeIndex,
        /// First block.
        lba: Lba,
        /// Blocks.
        count: u64,
    },
    /// A record's header rotted, and nothing says which dirty blocks it held.
    Unknown {
        /// Whose.
        volume: VolumeIndex,
        /// The segment it was in.
        segment: SegmentId,
        /// Its block in the segment.
        block: u16,
    },
    /// A record's header rotted; all that it held is on the backing device.
    Clean {
        /// Whose.
        volume: VolumeIndex,
        /// The segment it was in.
        segment: SegmentId,
        /// Its block in the segment.
        block: u16,
    },
    /// The log was cut: what followed had not become durable.
    Cut {
        /// Whose.
        volume: VolumeIndex,
        /// Last sequence that stands.
        through: Sequence,
    },
}

/// A volume as recovery found it.
#[derive(Debug)]
pub struct RecoveredVolume {
    pub(crate) log: Log,
    pub(crate) extents: ExtentMap,
    pub(crate) pending_extents: VecDeque<PendingExtent>,
    /// The last stop was a clean one: nothing of the backing device waits for a flush.
    pub(crate) clean: bool,
    pub(crate) cursor: Cursor,
    pub(crate) lost_blocks: u64,
    /// Up to here blocks are lost that no entry names, because the header that held them rotted.
    pub(crate) unnamed_lost: Option<Ordinal>,
    /// Dirty blocks nobody can name are lost: the volume must not be served as if nothing were.
    pub(crate) frozen: bool,
    /// Up to here the log may hold clean blocks that the index lacks, and that another opening may find: they could not be read
    /// now, or not before; 0: none.
    pub(crate) forgot: Ordinal,
    pub(crate) head: Head,
    /// Up to here it was found in the checkpoint; 0: none was used.
    pub(crate) captured: Sequence,
}

impl RecoveredVolume {
    /// A volume whose log holds nothing.
    pub(crate) fn empty(extent_count_max: u32) -> RecoveredVolume {
        RecoveredVolume {
            log: Log::new(Sequence(0), Sequence(1)),
            extents: ExtentMap::with_lost_room(extent_count_max as usize),
            pending_extents: VecDeque::with_capacity(extent_count_max as usize),
            clean: false,
            cursor: Cursor::default(),
            lost_blocks: 0,
            unnamed_lost: None,
            frozen: false,
            forgot: Ordinal(0),
            head: Head::NONE,
            captured: Sequence(0),
        }
    }

    /// Everything of its log is there and durable; it goes on at this sequence.
    pub(crate) fn end(&mut self, next: Sequence) {
        let log = &mut self.log;
        let through = log.closed.max(log.watermark);
        let marks = Marks {
            through,
            tail: log.tail,
            watermark: log.watermark,
            since: Tick(0),
            bytes: 0,
            position: Position::new(self.head.ordinal, self.head.used),
        };
        log.next_sequence = next;
        (log.written, log.flushing, log.durable) = (marks, marks, marks);
        log.wanted = through;
        (log.placed, log.closed) = (through, through);
        log.next_ordinal = log.next_ordinal.max(log.tail);
    }
}

/// What recovery found.
#[derive(Debug)]
pub struct Recovered {
    pub(crate) index: Index,
    pub(crate) slots: Slots,
    pub(crate) segments: Segments,
    pub(crate) segment_sequence: u64,
    pub(crate) volumes: Vec<Option<RecoveredVolume>>,
    /// Where the checkpoint that was used has each run of slots; empty: none was used.
    pub(crate) slot_runs: Vec<Written>,
    /// What was damaged.
    pub damage: Vec<Damage>,
    /// A checkpoint was used.
    pub from_checkpoint: bool,
}

/// Where recovery found a block: what two recoveries of the same bytes must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The slot of its newest version.
    pub slot: Option<Slot>,
    /// The newest extent over it.
    pub extent: Option<(Position, Kind)>,
}

impl Recovered {
    /// Puts a segment at the end of a volume's log, as it was copied.
    pub(crate) fn chain(&mut self, volume: &mut RecoveredVolume, row: &Row) {
        let segment = self.segments.get_mut(row.id);
        segment.become_state(State::Open);
        segment.become_state(State::Sealed);
        segment.volume = row.volume;
        segment.sequence = row.sequence;
        segment.ordinal = row.ordinal;
        segment.first_sequence = row.first_sequence;
        segment.last_sequence = row.last_sequence;
        segment.used = row.used;
        let log = &mut volume.log;
        if let Some(before) = log.newest.replace(row.id) {
            self.segments.get_mut(before).next = Some(row.id);
        }
        log.oldest.get_or_insert(row.id);
        log.tail_segment.get_or_insert(row.id);
        log.segment_count += 1;
        log.next_ordinal = Ordinal(row.ordinal.0 + 1);
    }

    /// Whether segments are taken in the order of the checkpoint that the superblock names.
    pub(crate) fn goes_by_checkpoint(&self) -> bool {
        !self.slot_runs.is_empty()
    }

    /// Where a block is.
    pub fn find(&self, volume: VolumeIndex, lba: Lba) -> Found {
        let state = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        let extent = state.and_then(|state| state.extents.get(lba));
        Found {
            slot: self.index.get(volume, lba),
            extent: extent.map(|extent| (extent.position, extent.kind)),
        }
    }

    /// The slot that a read of the block would use, what it should hold, and the life of its
    /// segment; none: it has no data in the log, or an extent over it is newer.
    pub fn newest(&self, volume: VolumeIndex, lba: Lba) -> Option<(Slot, Option<Held>, u64)> {
        let found = self.find(volume, lba);
        let slot = found.slot?;
        let (id, block) = self.segments.place(slot);
        let segment = self.segments.get(id);
        let position = Position::new(segment.ordinal, block);
        let newer = found.extent.is_none_or(|(extent, _)| position >= extent);
        newer.then(|| (slot, self.slots.held(slot), segment.sequence))
    }

    /// Whether the record that has a slot is on the backing device.
    pub fn is_passed(&self, volume: VolumeIndex, slot: Slot) -> bool {
        let (id, block) = self.segments.place(slot);
        self.has_passed(volume, self.segments.position(id, block))
    }

    /// Whether the record that lies there in a volume's log is on the backing device, or lay there before the log's tail.
    pub fn has_passed(&self, volume: VolumeIndex, position: Position) -> bool {
        let begins = |(id, block): &(SegmentId, u16)| self.segments.position(*id, *block);
        let records = self.records(volume);
        let mut before = records.into_iter().rev().filter(|it| begins(it) <= position);
        before.next().is_none_or(|it| self.sequence_at(it) < self.watermark(volume))
    }

    /// The sequence of the record that begins there.
    pub fn sequence_at(&self, (id, block): (SegmentId, u16)) -> Sequence {
        let offset = self.slots.heading(self.segments.slot(id, block)).sequence_offset;
        Sequence(self.segments.get(id).first_sequence.0 + u64::from(offset))
    }

    /// Where the records of a volume's log begin, oldest first; a place among them may be a hole.
    pub fn records(&self, volume: VolumeIndex) -> Vec<(SegmentId, u16)> {
        let mut all = Vec::new();
        let mut next = self.volume(volume).and_then(|volume| volume.log.oldest);
        while let Some(id) = next {
            let segment = self.segments.get(id);
            let mut block = 0;
            while block < segment.used {
                all.push((id, block));
                block = self.slots.heading(self.segments.slot(id, block)).end(block);
            }
            next = segment.next;
        }
        all
    }

    /// Whether the record that begins there is the one with this header: not a hole, and not what an earlier life of the segment left.
    pub fn is_record(&self, id: SegmentId, block: u16, header: &Header) -> bool {
        self.life(id) == header.segment_sequence && self.sequence_at((id, block)) == header.sequence
    }

    /// The life of a segment, which is in the seed of its blocks' checksums.
    pub fn life(&self, id: SegmentId) -> u64 {
        self.segments.get(id).sequence
    }

    /// The blocks of the record that begins there, and what each should hold. A checkpoint has that of records whose headers rotted
    /// before it.
    pub fn held_by(&self, id: SegmentId, begin: u16) -> impl Iterator<Item = (u16, Held)> + '_ {
        let end = self.slots.heading(self.segments.slot(id, begin)).end(begin);
        let held = move |block| self.slots.held(self.segments.slot(id, block));
        (begin + 1..end.min(self.segments.get(id).used))
            .filter_map(move |block| held(block).map(|held| (block, held)))
    }

    /// A block whose newest version is on the backing device, with an older one in the log that a batch would write over it: nothing pending voids
    /// that (A5 of `op::around`). There is none.
    pub fn unvoided(&self, volume: VolumeIndex) -> Option<Lba> {
        let state = self.volume(volume).filter(|state| !state.frozen)?;
        let would_be_written = |at: &(SegmentId, u16)| self.sequence_at(*at) > state.log.watermark;
        let records = self.records(volume).into_iter().filter(would_be_written);
        let mut dirty = records.flat_map(|(id, begin)| {
            let written = self.held_by(id, begin).filter(|(_, held)| !held.fill);
            written.map(move |(block, held)| (held.lba, self.segments.position(id, block)))
        });
        dirty.find_map(|(lba, position)| {
            let found = self.find(volume, lba);
            let is_sent = self.newest(volume, lba).is_none()
                // What was forgotten since the record that is read was clean.
                && found.extent.map_or(state.forgot == Ordinal(0), |(_, kind)| kind == Kind::Bypassed);
            let mut pending = state.pending_extents.iter().map(PendingExtent::extent);
            let voided =
                pending.any(|it| it.position > position && it.start <= lba && lba < it.end);
            (is_sent && !voided).then_some(lba)
        })
    }

    /// Whether a guest flushed between the record that begins there and the one before it.
    pub fn begins_epoch(&self, id: SegmentId, block: u16) -> bool {
        self.slots.heading(self.segments.slot(id, block)).begins_epoch
    }

    /// Whether this block of this segment is the newest one the log has for an LBA.
    pub fn is_newest(&self, volume: VolumeIndex, lba: Lba, id: SegmentId, block: u16) -> bool {
        self.index.get(volume, lba) == Some(self.segments.slot(id, block))
    }

    /// Whether reads of a block fail, because it was lost and not written since.
    pub fn is_lost(&self, volume: VolumeIndex, lba: Lba) -> bool {
        let extents = self.volume(volume).map(|volume| &volume.extents);
        let extent = extents.and_then(|extents| extents.get(lba));
        extent.is_some_and(|extent| extent.kind == Kind::Lost) && self.newest(volume, lba).is_none()
    }

    /// Ranges of blocks whose reads fail, because they were lost and not written since: in order, none touching the next.
    pub fn lost(&self, volume: VolumeIndex) -> Vec<(Lba, u64)> {
        let mut ranges: Vec<(Lba, u64)> = Vec::new();
        let Some(state) = self.volume(volume) else { return ranges };
        let written = self.written_since_lost(volume);
        let mut written = written.iter().peekable();
        for extent in state.extents.iter().filter(|extent| extent.kind == Kind::Lost) {
            let mut from = extent.start;
            while let Some(&lba) = written.next_if(|lba| **lba < extent.end) {
                push(&mut ranges, from, lba);
                from = lba + 1;
            }
            push(&mut ranges, from, extent.end);
        }
        ranges
    }

    /// Ends the loss of what was written since (L3 of `log::lost`), for the whole log is known now, and tells it apart in what was
    /// damaged.
    pub(super) fn end_written(&mut self) {
        for at in 0..self.volumes.len() {
            let written = self.written_since_lost(VolumeIndex(at as u8));
            if let Some(state) = &mut self.volumes[at] {
                for lba in written {
                    // It is over anyway; without room it is seen to be when its segment is emptied.
                    state.extents.try_cut(lba);
                }
            }
        }
        let mut lost: BTreeMap<VolumeIndex, Vec<(Lba, u64)>> = BTreeMap::new();
        for found in core::mem::take(&mut self.damage) {
            let Damage::Lost { volume, lba, count } = found else {
                self.damage.push(found);
                continue;
            };
            let lost = lost.entry(volume).or_insert_with(|| self.lost(volume));
            for (lba, count, is_lost) in divided(lba, count, lost) {
                if is_lost {
                    self.damage.push(Damage::Lost { volume, lba, count });
                    continue;
                }
                match self.damage.last_mut() {
                    Some(Damage::Replaced { volume: of, lba: first, count: before })
                        if *of == volume && *first + *before == lba =>
                    {
                        *before += count;
                    }
                    _ => self.damage.push(Damage::Replaced { volume, lba, count }),
                }
                if let Some(Some(state)) = self.volumes.get_mut(usize::from(volume.0)) {
                    state.lost_blocks = state.lost_blocks.saturating_sub(count);
                }
            }
        }
    }

    /// Whether its ranges have room for another one: without, a lost one may go on over a block that was written since.
    pub fn has_extent_room(&self, volume: VolumeIndex) -> bool {
        self.volume(volume).is_none_or(|state| state.extents.room() > 0)
    }

    /// Blocks under lost extents that have newer data, in order.
    fn written_since_lost(&self, volume: VolumeIndex) -> Vec<Lba> {
        let Some(state) = self.volume(volume).filter(|state| state.extents.lost_len() > 0) else {
            return Vec::new();
        };
        let (index, extents) = (&self.index, &state.extents);
        let is_long = |it: &Extent| it.end - it.start > u64::from(EAGER_BLOCKS);
        let lost = || extents.iter().filter(|it| it.kind == Kind::Lost);
        let short = lost().filter(|it| !is_long(it)).flat_map(|it| (it.start.0..it.end.0).map(Lba));
        let mut written: Vec<Lba> =
            short.filter(|lba| self.newest(volume, *lba).is_some()).collect();
        // Too long to ask for each block: whatever the log holds is asked instead.
        if lost().any(is_long) {
            let is_newer = |it: &Extent, position| {
                it.kind == Kind::Lost && is_long(it) && position >= it.position
            };
            each_held(&self.segments, &self.slots, state.log.oldest, |lba, slot, position| {
                if extents.get(lba).is_some_and(|it| is_newer(it, position))
                    && index.get(volume, lba) == Some(slot)
                {
                    written.push(lba);
                }
                true
            });
        }
        written.sort_unstable();
        written
    }

    /// What the last record of a volume's log holds, as items of the next one's header.
    pub fn last_items(&self, volume: VolumeIndex) -> &[u64] {
        self.volume(volume).map_or(&[], |volume| volume.log.previous_items.as_slice())
    }

    /// The last sequence of a volume's log, or of what is on its backing device.
    pub fn end_of(&self, volume: VolumeIndex) -> Sequence {
        self.volume(volume).map_or(Sequence(0), |volume| volume.log.closed)
    }

    /// Up to here the log was not read: the checkpoint that was used has it; 0: none was.
    pub fn captured(&self, volume: VolumeIndex) -> Sequence {
        self.volume(volume).map_or(Sequence(0), |volume| volume.captured)
    }

    /// The last sequence of what a guest has written; 0: nothing.
    pub(crate) fn written_end_of(&self, volume: VolumeIndex) -> Sequence {
        self.volume(volume).map_or(Sequence(0), |volume| volume.log.dirtied)
    }

    /// Everything of a volume up to this sequence is on its backing device.
    pub fn watermark(&self, volume: VolumeIndex) -> Sequence {
        self.volume(volume).map_or(Sequence(0), |volume| volume.log.watermark)
    }

    /// What the engine's `extent_count_max` must be to hold what was found, at least `count_max`. More may be
    /// found lost behind rotten headers than was ever placed, and the last process may have had more room.
    pub fn extents_fitting(&self, count_max: u32) -> u32 {
        let volumes = self.volumes.iter().flatten();
        let room = volumes.fold(count_max as usize, |room, volume| {
            volume.extents.fitting(room).max(volume.pending_extents.len())
        });
        u32::try_from(room).unwrap_or(u32::MAX)
    }

    /// Whether dirty blocks of a volume were lost that nobody can name, now or at an opening before.
    pub fn is_frozen(&self, volume: VolumeIndex) -> bool {
        self.volume(volume).is_some_and(|volume| volume.frozen)
    }

    /// Whether something of a volume is not on its backing device.
    pub fn is_dirty(&self, volume: VolumeIndex) -> bool {
        self.volume(volume).is_some_and(|volume| volume.log.is_dirty())
    }

    /// Blocks of a volume that are not on its backing device, superseded versions included.
    pub fn dirty_blocks(&self, volume: VolumeIndex) -> u64 {
        self.volume(volume).map_or(0, |volume| volume.log.dirty_blocks)
    }

    /// Segments of a volume's log, oldest first.
    pub fn segments(&self, volume: VolumeIndex) -> Vec<SegmentId> {
        let mut ids: Vec<SegmentId> = self.records(volume).iter().map(|place| place.0).collect();
        ids.dedup();
        ids
    }

    fn volume(&self, volume: VolumeIndex) -> Option<&RecoveredVolume> {
        self.volumes.get(usize::from(volume.0))?.as_ref()
    }
}

/// The parts of a range, in order, and whether each is in one of these others, which are in order and apart.
fn divided(lba: Lba, count: u64, others: &[(Lba, u64)]) -> Vec<(Lba, u64, bool)> {
    let (mut from, end) = (lba, lba + count);
    let mut parts = Vec::new();
    let before = others.partition_point(|(first, count)| *first + *count <= lba);
    for (first, count) in others[before..].iter().take_while(|it| it.0 < end) {
        let (start, stop) = ((*first).max(lba), (*first + *count).min(end));
        if from < start {
            parts.push((from, start - from, false));
        }
        parts.push((start, stop - start, true));
        from = stop;
    }
    if from < end {
        parts.push((from, end - from, false));
    }
    parts
}

/// Puts `start..end` behind what is there, if anything is in it.
fn push(ranges: &mut Vec<(Lba, u64)>, start: Lba, end: Lba) {
    match ranges.last_mut() {
        _ if start >= end => {}
        Some((first, count)) if *first + *count == start => *count += end - start,
        _ => ranges.push((start, end - start)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_divided_where_others_begin_and_end() {
        let divided = |lba, count, others: &[(u64, u64)]| {
            let others: Vec<_> = others.iter().map(|it| (Lba(it.0), it.1)).collect();
            let parts = divided(Lba(lba), count, &others).into_iter();
            parts.map(|(lba, count, is_in)| (lba.0, count, is_in)).collect::<Vec<_>>()
        };
        assert_eq!(divided(5, 10, &[]), [(5, 10, false)]);
        assert_eq!(divided(5, 10, &[(0, 5), (15, 2)]), [(5, 10, false)]);
        assert_eq!(divided(5, 10, &[(0, 40)]), [(5, 10, true)]);
        assert_eq!(divided(5, 10, &[(5, 10)]), [(5, 10, true)]);
        assert_eq!(
            divided(5, 10, &[(0, 6), (14, 9)]),
            [(5, 1, true), (6, 8, false), (14, 1, true)]
        );
        assert_eq!(divided(5, 3, &[(6, 1)]), [(5, 1, false), (6, 1, true), (7, 1, false)]);
    }
}
