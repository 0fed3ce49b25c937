// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A chain of records, applied in order to index, slots, segments and extents.

use super::gap::Gap;
use super::read::{BATCH, Step};
use super::steps::Steps;
use super::{CacheReader, Damage, Recovered, RecoveredVolume, Recovery, SEQUENCE_GAP};
use crate::format::entry::{Entry, Kind};
use crate::format::record::{self, Header, Item, Link};
use crate::format::superblock::Head;
use crate::log::append::EAGER_BLOCKS;
use crate::log::lost;
use crate::log::segment::State;
use crate::map::extent::{Extent, Position};
use crate::map::index::PartResult;
use crate::map::slots::{Heading, Held};
use crate::mutant::Mutant;
use crate::policy::writeback::Cursor;
use crate::units::{BLOCK_SIZE, Lba, Ordinal, SegmentId, Sequence, Slot, VolumeIndex};
use crate::volume::PendingExtent;
use alloc::vec::Vec;

/// A record that stands, with its header's block.
#[derive(Clone, Copy)]
struct Record<'a> {
    id: SegmentId,
    block: u16,
    header: &'a Header,
    head: &'a [u8; BLOCK_SIZE],
}

/// Records whose blocks are in the slot table and not yet in the index: at most this many, for
/// which the workers take 64 MiB. They are not more than what the engine takes when it is open.
const PLAIN_COUNT: usize = 1 << 15;

impl<R: CacheReader> Recovery<'_, R> {
    /// Applies a chain in order to index, slots, extents and segments.
    pub(super) fn apply(&mut self, index: VolumeIndex, chain: &Steps, out: &mut RecoveredVolume) {
        self.closed_generation = 0;
        self.epoch = self.epoch_before(index);
        let mut hole: Option<(SegmentId, u16)> = None;
        let mut holes = 0;
        let mut plain: Vec<(SegmentId, u16, u16)> = Vec::new();
        let mut items_known = true;
        let mut alone = [0; BLOCK_SIZE];
        let mut chain = chain.iter();
        let mut steps = Vec::with_capacity(BATCH);
        // Bounded: each turn takes some of what there is.
        loop {
            steps.clear();
            steps.extend(chain.by_ref().take(BATCH));
            if steps.is_empty() {
                break;
            }
            let records = steps.iter().filter_map(|step| match step {
                Step::Record { id, block, held: false, .. } => Some((*id, *block)),
                Step::Record { .. } | Step::Hole { .. } => None,
            });
            let bytes = self.read_blocks(&records.collect::<Vec<_>>());
            let mut heads = bytes.as_chunks::<BLOCK_SIZE>().0.iter();
            for step in &steps {
                let mut place = match step {
                    Step::Hole { id, block, .. } | Step::Record { id, block, .. } => (*id, *block),
                };
                if let Step::Record { id, block, header, checksum, held } = step {
                    let head = match held {
                        true if hole.is_none() => None,
                        // What its own header names is wanted, too.
                        true => {
                            let address = self.address(*id, *block);
                            let read = self.reader.read(address, &mut alone);
                            read.map(|()| Some(&alone)).unwrap_or(Some(&[0; BLOCK_SIZE]))
                        }
                        false => Some(heads.next().expect("each of these was read")),
                    };
                    // Read for the second time: it may not be what it was.
                    let address = self.address(*id, *block);
                    let same = head
                        .is_none_or(|head| self.decode(head, address) == Ok((*header, *checksum)));
                    if same && self.has_place(*id, *block, header) {
                        match head {
                            None => {
                                items_known = false;
                                self.enter_segment(index, *id, header, out);
                                self.note_record(*id, *block, header);
                                self.note_dirty(*id, *block, header, out);
                                plain.push((*id, *block, header.entry_count));
                                if plain.len() == PLAIN_COUNT {
                                    self.insert_plain(index, &mut plain);
                                }
                            }
                            Some(head) => {
                                items_known = true;
                                self.insert_plain(index, &mut plain);
                                let record = Record { id: *id, block: *block, header, head };
                                if let Some(at) = hole.take() {
                                    self.apply_hole(index, at, holes, &record, out);
                                    holes = 0;
                                }
                                self.enter_segment(index, *id, header, out);
                                self.note_record(*id, *block, header);
                                self.apply_record(index, &record, out);
                            }
                        }
                        self.end_record(*id, *block, header, *checksum, out);
                        continue;
                    }
                    place = (*id, *block);
                }
                holes += 1;
                hole.get_or_insert(place);
            }
            self.batch = bytes;
        }
        self.insert_plain(index, &mut plain);
        if !items_known {
            self.restore_items(out);
        }
        if let Some((segment, block)) = hole {
            // The last record of the log as it was opened: nothing says what it held.
            out.frozen = true;
            self.found.damage.push(Damage::Unknown { volume: index, segment, block });
        }
    }

    /// Points the index at the blocks of records, in order, each worker in its part of the index.
    fn insert_plain(&mut self, index: VolumeIndex, records: &mut Vec<(SegmentId, u16, u16)>) {
        let Recovered { index: table, slots, segments, .. } = &mut self.found;
        let (slots, segments) = (&*slots, &*segments);
        let workers = self.reader.workers();
        let blocks = |(id, block, entries): &(SegmentId, u16, u16)| {
            let first = segments.slot(*id, *block).0 + 1;
            let all = (first..first + u32::from(*entries)).map(Slot);
            all.filter_map(|slot| slots.held(slot).map(|held| (held.lba, slot)))
        };
        if let Some(parts) = table.parts(workers) {
            let mut results: Vec<PartResult> = Vec::new();
            results.resize_with(parts.len(), PartResult::default);
            let parts: Vec<_> = parts.into_iter().zip(&mut results).collect();
            let records = &*records;
            self.reader.share(parts, |(mut part, result)| {
                part.insert_all(index, records.iter().flat_map(blocks), R::prefetch, result);
            });
            for result in &results {
                table.join(result);
                for slot in &result.spilled {
                    if let Some(held) = slots.held(*slot) {
                        table.insert(index, held.lba, *slot);
                    }
                }
            }
        } else {
            for (lba, slot) in records.iter().flat_map(blocks) {
                table.insert(index, lba, slot);
            }
        }
        records.clear();
    }

    /// What the last record holds: the next one must say it. It has nothing but blocks, which are in the slot table; its header
    /// might not be read once more.
    fn restore_items(&self, out: &mut RecoveredVolume) {
        let Recovered { segments, slots, .. } = &self.found;
        let Link { segment, block, .. } = out.log.last;
        let end = slots.heading(segments.slot(segment, block)).end(block);
        let items = &mut out.log.previous_items;
        items.clear();
        let held = (block + 1..end).filter_map(|block| slots.held(segments.slot(segment, block)));
        for Held { lba, fill, .. } in held {
            let kind = if fill { Kind::Fill } else { Kind::Data };
            items.push(record::items(lba, 1, kind).0);
        }
    }

    /// Whether a record's place is behind all that its segment has, in this life of the segment.
    /// It is, in any log of our own making.
    fn has_place(&self, id: SegmentId, block: u16, header: &Header) -> bool {
        let segment = self.found.segments.get(id);
        segment.state == State::Free
            || segment.ordinal == header.ordinal
                && segment.sequence == header.segment_sequence
                && segment.used <= block
    }

    /// A record is missing: what it held is known from the next one, or is not.
    fn apply_hole(
        &mut self,
        index: VolumeIndex,
        at: (SegmentId, u16),
        holes: u32,
        record: &Record<'_>,
        out: &mut RecoveredVolume,
    ) {
        let (segment, hole_block) = at;
        let next = record.header;
        // What cannot be read now may be another time.
        if !self.mutants.is(Mutant::UnreadStaysUnread) {
            out.forgot = out.forgot.max(next.ordinal);
        }
        // The watermark lies at the end of a record: it is not within the one that is missing. Or it is that one's first sequence, where
        // a batch ended with a hole before it (`note_record`); which is its end as well if it held nothing.
        let within = next.item_count > 0 && !self.mutants.is(Mutant::WatermarkWithinHole);
        let first = next.previous.sequence;
        let clean = first < out.log.watermark || first == out.log.watermark && !within;
        // Sequences have no gap but between two openings, and a wide one there (less what was void and not seen): else more than one record
        // is missing. Of what lies before the first one that is there nothing is known.
        let one_opening = self.closed_generation == next.open_generation;
        let (closed, missing) = (out.log.closed.0, next.previous.sequence.0);
        let is_wide = missing.saturating_sub(closed) > SEQUENCE_GAP / 2;
        let is_wide = is_wide || self.mutants.is(Mutant::BorderHidesHole);
        let begins = !one_opening && (is_wide || out.log.newest.is_none());
        let alone = closed + 1 == missing || begins;
        // V11. Where a checkpoint begins is said by that.
        let from_start = self.closed_generation == 0;
        let said =
            one_opening || from_start || hole_block > 0 || next.ordinal <= out.log.next_ordinal;
        let loose = self.mutants.is(Mutant::UnsaidEndCounts);
        let known = holes == 1
            && alone
            && (said || !clean || loose)
            && next.previous.segment == segment
            && next.previous.block == hole_block;
        if !known && !clean {
            out.frozen = true;
            self.found.damage.push(Damage::Unknown { volume: index, segment, block: hole_block });
            return;
        }
        if !known {
            // Something clean is missing that may have been newer than anything before it.
            self.forget_all(index, out);
            if self.mutants.is(Mutant::LostItemUnread) {
                return;
            }
        }
        // The next one is in the same segment, or the first of the one behind it.
        let ordinal = Ordinal(next.ordinal.0.saturating_sub(u64::from(segment != record.id)));
        let (mut item, mut all_there) = (0, next.item_count > 0);
        while item < next.item_count {
            let Ok((Item { lba, count, backed, lost }, taken)) =
                record::item(record.head, item, next.item_count)
            else {
                all_there = false;
                break;
            };
            item += taken;
            // Of several that are missing the last one is told of, and of that is not known yet what was lost in it.
            if !known && !lost {
                continue;
            }
            // A fill is on the backing device, and so is what went around the log. What was lost is not, however clean it is.
            let is_there = (clean || backed) && !lost;
            let kind = if is_there { Kind::Bypassed } else { Kind::Lost };
            // Nothing keeps a clean segment until that is named again, but that it was lost there (C4 of `reclaim`).
            let position = match clean && lost {
                true => Position::new(ordinal, next.previous.block),
                false => Position::new(next.ordinal, record.block),
            };
            // What went around the log voids what is dirty of it: that is not written back over it (A5 of `op::around`).
            let voids = is_there && !clean;
            self.apply_extent(index, kind, lba, count, position, voids, out);
            if voids && !self.mutants.is(Mutant::HoleVoidsNothing) {
                let sequence = Sequence(next.sequence.0 - 1);
                let count = count as u32;
                out.pending_extents.push_back(PendingExtent {
                    sequence,
                    position,
                    kind,
                    lba,
                    count,
                });
            }
            if !is_there {
                all_there = false;
                out.unnamed_lost = Some(next.ordinal);
                out.lost_blocks += count;
                self.found.damage.push(Damage::Lost { volume: index, lba, count });
            }
        }
        if clean || all_there {
            self.found.damage.push(Damage::Clean { volume: index, segment, block: hole_block });
        }
    }

    /// Forgets everything of a volume that was applied so far and is clean.
    fn forget_all(&mut self, index: VolumeIndex, out: &mut RecoveredVolume) {
        let Recovered { index: blocks, segments, slots, .. } = &mut self.found;
        lost::forget_all(index, out.log.oldest, (blocks, segments, slots), &mut out.extents);
    }

    /// The flush epoch of the last record that the checkpoint has: whether the first one behind it begins another must
    /// be what it was, else a strict batch that is built again ends at the checkpoint.
    fn epoch_before(&mut self, index: VolumeIndex) -> Option<u64> {
        let loose = self.mutants.is(Mutant::RecoveryBeginsEpoch);
        let volume = self.image_of(index).filter(|_| !loose)?;
        if let Some(epoch) = volume.last.as_ref().and_then(|last| last.epoch) {
            return Some(epoch);
        }
        let last = volume.start.link;
        let address = self.address(last.segment, last.block);
        let mut head = [0; BLOCK_SIZE];
        if last == Link::NONE || self.reader.read(address, &mut head).is_err() {
            return None;
        }
        let (header, checksum) = self.decode(&head, address).ok()?;
        (checksum == last.checksum).then_some(header.flush_epoch)
    }

    /// Notes in its segment and in the slot table that there is a record, and what lies before it.
    fn note_record(&mut self, id: SegmentId, block: u16, header: &Header) {
        let segment = self.found.segments.get(id);
        let offset = |from: Sequence| from.0.saturating_sub(segment.first_sequence.0) as u32;
        let heading = Heading {
            blocks: header.blocks,
            entries: header.entry_count,
            sequence_offset: offset(header.sequence),
            begins_epoch: self.epoch.replace(header.flush_epoch) != Some(header.flush_epoch),
        };
        let before = segment.used;
        if before < block {
            // A hole: for whoever goes from header to header it is a record of nothing. A flush before it ends a
            // strict batch where the next record begins, which writes the same; if there was none, a batch that goes over
            // it must not end there when it is built again.
            let sequence_offset = offset(segment.last_sequence);
            let blocks = block - before;
            let begins_epoch = self.mutants.is(Mutant::RecoveryBeginsEpoch);
            let nothing = Heading { blocks, entries: 0, sequence_offset, begins_epoch };
            self.found.slots.head(self.found.segments.slot(id, before), nothing);
            self.void(id, before + 1..block);
        }
        self.found.slots.head(self.found.segments.slot(id, block), heading);
        let segment = self.found.segments.get_mut(id);
        segment.used = block + header.blocks;
        segment.last_sequence = header.last_sequence();
    }

    /// Blocks that hold nothing, whatever they held in an earlier life.
    fn void(&mut self, id: SegmentId, blocks: core::ops::Range<u16>) {
        for block in blocks {
            self.found.slots.void(self.found.segments.slot(id, block));
        }
    }

    /// Counts what is dirty of a record that holds nothing but blocks.
    fn note_dirty(
        &mut self,
        id: SegmentId,
        block: u16,
        header: &Header,
        out: &mut RecoveredVolume,
    ) {
        let clean = out.log.watermark.0.saturating_sub(header.sequence.0);
        for number in clean.min(header.entry_count.into()) as u16..header.entry_count {
            let slot = self.found.segments.slot(id, block + 1 + number);
            if self.found.slots.held(slot).is_some_and(|held| !held.fill) {
                out.log.dirtied = Sequence(header.sequence.0 + 1 + u64::from(number));
                out.log.dirty_blocks += 1;
            }
        }
    }

    fn apply_record(&mut self, index: VolumeIndex, record: &Record<'_>, out: &mut RecoveredVolume) {
        let Record { id, block, header, head } = *record;
        self.void(id, block + 1..block + header.blocks);
        out.log.previous_items.take(head, header.entry_count, self.mutants);
        let mut next_block = block + 1;
        for number in 0..header.entry_count {
            let Ok(entry) = record::entry(head, number) else { continue };
            let sequence = Sequence(header.sequence.0 + 1 + u64::from(number));
            self.apply_entry(index, id, block, &mut next_block, sequence, entry, header, out);
        }
    }

    /// What a record says of the log, once it has been applied.
    fn end_record(
        &mut self,
        id: SegmentId,
        block: u16,
        header: &Header,
        checksum: u32,
        out: &mut RecoveredVolume,
    ) {
        let link = Link { sequence: header.sequence, checksum, segment: id, block };
        out.log.last = link;
        out.log.closed = header.last_sequence();
        self.closed_generation = header.open_generation;
        if header.entry_count > 0 {
            out.log.placed = header.last_sequence();
        }
        if header.last_sequence() <= out.log.watermark {
            out.cursor = Cursor { segment: Some(id), block: block + header.blocks };
        }
        out.head = Head {
            link,
            through: header.last_sequence(),
            used: block + header.blocks,
            ordinal: header.ordinal,
        };
    }

    /// The first record of a segment puts the segment into the chain.
    fn enter_segment(
        &mut self,
        index: VolumeIndex,
        id: SegmentId,
        header: &Header,
        out: &mut RecoveredVolume,
    ) {
        let segment = self.found.segments.get_mut(id);
        if segment.state == State::Sealed {
            return;
        }
        let is_next = header.ordinal == out.log.next_ordinal;
        if let Some(before) = out.log.newest.filter(|_| !is_next) {
            self.gaps.push(Gap { index, before, id, header: *header, at: out.log.closed });
        }
        let segment = self.found.segments.get_mut(id);
        segment.become_state(State::Open);
        segment.become_state(State::Sealed);
        let segment = self.found.segments.get_mut(id);
        segment.volume = index;
        segment.sequence = header.segment_sequence;
        segment.ordinal = header.ordinal;
        segment.first_sequence = header.sequence;
        segment.last_sequence = header.sequence;
        let log = &mut out.log;
        if let Some(before) = log.newest.replace(id) {
            self.found.segments.get_mut(before).next = Some(id);
        }
        log.oldest.get_or_insert(id);
        log.tail_segment.get_or_insert(id);
        log.segment_count += 1;
        log.next_ordinal = Ordinal(header.ordinal.0 + 1);
    }

    #[allow(clippy::too_many_arguments)]
    fn apply_entry(
        &mut self,
        index: VolumeIndex,
        id: SegmentId,
        block: u16,
        next_block: &mut u16,
        sequence: Sequence,
        entry: Entry,
        header: &Header,
        out: &mut RecoveredVolume,
    ) {
        let dirty = sequence > out.log.watermark;
        match entry.kind {
            Kind::Data | Kind::Fill | Kind::Parked => {
                *next_block = block + entry.slot + 1;
                let slot = self.found.segments.slot(id, block + entry.slot);
                let fill = entry.kind == Kind::Fill;
                self.found.slots.hold(slot, Held { lba: entry.lba, crc: entry.crc, fill });
                self.found.index.insert(index, entry.lba, slot);
                if !fill && dirty {
                    out.log.dirtied = sequence;
                    out.log.dirty_blocks += 1;
                }
            }
            Kind::Void => {
                *next_block = block + entry.slot + 1;
                self.found.slots.void(self.found.segments.slot(id, block + entry.slot));
            }
            Kind::Zero | Kind::Discard | Kind::Bypassed | Kind::Lost => {
                if self.mutants.is(Mutant::ExtentsForgotten) {
                    return;
                }
                let position = Position::new(header.ordinal, *next_block);
                let (lba, count) = (entry.lba, u64::from(entry.count));
                self.apply_extent(index, entry.kind, lba, count, position, dirty, out);
                if dirty && matches!(entry.kind, Kind::Zero | Kind::Discard) {
                    out.log.dirtied = sequence;
                }
                if dirty && entry.kind != Kind::Lost {
                    out.pending_extents.push_back(PendingExtent {
                        sequence,
                        position,
                        kind: entry.kind,
                        lba,
                        count: entry.count,
                    });
                }
            }
            Kind::Marker => {}
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn apply_extent(
        &mut self,
        index: VolumeIndex,
        kind: Kind,
        lba: Lba,
        count: u64,
        position: Position,
        dirty: bool,
        out: &mut RecoveredVolume,
    ) {
        let small = count <= u64::from(EAGER_BLOCKS);
        if small {
            for offset in 0..count {
                if let Some(slot) = self.found.index.get(index, lba + offset) {
                    self.found.index.remove(index, lba + offset, slot);
                }
            }
        }
        out.extents.make_room();
        let extent = Extent { start: lba, end: lba + count, position, kind, long: !small };
        if small && !dirty && kind != Kind::Lost {
            out.extents.erase(extent.start, extent.end);
        } else {
            out.extents.insert(extent);
        }
    }
}
