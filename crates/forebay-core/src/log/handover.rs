// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache handed from one process to the next, while nothing of it is under way.
//!
//! The large tables (the index's cells, the slots' rows) are arrays of plain numbers. They stay where
//! they are, in memory that both processes see. What is small goes along as a message: the superblock
//! as a clean stop would write it, where each log ends, its extents, the pool, and which runs of slots
//! no checkpoint holds yet. The new process goes on from there as from an opening, and raises the
//! generation as every opening does.
//!
//! # Invariants
//!
//! - **N1** A message fits one opening of one cache, in the state its superblock has on the device, and
//!   one way to lay out tables: whatever differs, there is no hand-over, and an opening reads the log.
//! - **N2** It is made only when all that is placed is durable and nothing is under way.
//! - **N3** A run of slots that has changed since the checkpoint that is named counts as changed in the
//!   new process (`checkpoint::T4` goes on to hold).
//! - **N4** Segments are in the pool in the order in which they were (`checkpoint::T3`).
//!
//! # Crash
//!
//! Nothing was written for it. Until the new process writes its superblock, any other opening finds the
//! log as a killed process leaves it.
//!
//! # Not here
//!
//! The memory, and that a message is used once: the runtime.

use crate::engine::{CacheHealth, Engine};
use crate::format::bytes::crc32c;
use crate::format::checkpoint::Written;
use crate::format::entry::Kind;
use crate::format::record::Link;
use crate::format::superblock::{Head, SUPERBLOCK_SIZE, Superblock};
use crate::limits::{RECORD_ITEMS_MAX, VOLUME_COUNT_MAX};
use crate::log::image::{self, ImageVolume, Row};
use crate::log::recovery::{Recovered, RecoveredVolume, SEGMENT_SEQUENCE_GAP, SEQUENCE_GAP};
use crate::log::segment::{Segments, State};
use crate::map::extent::{Extent, Position};
use crate::map::index::Index;
use crate::map::slots::{ROW_BYTES, Slots};
use crate::mutant::{Mutant, Mutants};
use crate::payload::Payload;
use crate::policy::writeback::Cursor;
use crate::units::{Lba, Ordinal, SegmentId, Sequence, VolumeIndex};
use crate::volume::{PendingExtent, Volume};
use alloc::vec::Vec;

/// How tables and message are laid out, what a cell's place means included. Whoever changes any of it
/// changes this number: two programs that have it alike may hand over to each other. (A test compares
/// what a table looks like with what it did.)
pub const LAYOUT: u32 = 1;
/// `FBHANDED`, as a little-endian number.
const MAGIC: u64 = u64::from_le_bytes(*b"FBHANDED");

/// The large tables, as they are in memory.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The index's cells.
    pub cells: Vec<u64>,
    /// The slots' rows.
    pub rows: Vec<[u8; ROW_BYTES]>,
}

impl Tables {
    /// How many cells and rows a cache has.
    pub fn counts(superblock: &Superblock) -> (usize, usize) {
        let slots = image::slot_count(superblock);
        (Index::cell_count(slots), slots as usize)
    }
}

impl Engine {
    /// The first step of a hand-over: no batch and no checkpoint begins any more.
    pub fn prepare_hand_over(&mut self) {
        self.stopping = true;
    }

    /// Whether what is long has ended: batches and checkpoints.
    pub fn is_prepared(&self) -> bool {
        let idle = |volume: &Volume| volume.writeback.is_idle();
        !self.is_checkpointing() && self.all_volumes().all(idle)
    }

    /// The last step, when no request comes any more: ends each log's segment and wants everything
    /// durable. To be asked again if what was under way has opened another.
    pub fn end_logs(&mut self, payload: &mut impl Payload) {
        self.end_segments(payload);
        self.sync(payload);
    }

    /// Whether it can be handed over now (N2).
    pub fn may_hand_over(&self) -> bool {
        // A segment that holds nothing yet is as good as free.
        let ended = |volume: &Volume| match volume.log.head {
            Some(head) => {
                let placed = volume.log.open.is_some_and(|open| open.entries > 0);
                self.segments.get(head.segment).used == 0 && !placed
            }
            None => true,
        };
        self.health == CacheHealth::Healthy
            && self.is_quiet()
            && !self.is_checkpointing()
            && self.all_volumes().all(ended)
    }

    /// The index's cells and the slots' rows.
    pub fn tables(&self) -> (&[u64], &[[u8; ROW_BYTES]]) {
        (self.index.cells(), self.slots.all())
    }

    /// What is not in the tables. `superblock` is the one on the device.
    pub fn hand_over(&self, superblock: &Superblock) -> Vec<u8> {
        assert!(self.may_hand_over(), "something is under way"); // N2
        let mut superblock = superblock.clone();
        self.note_heads(&mut superblock);
        let mut out = Out(Vec::new());
        out.put(MAGIC);
        out.put(LAYOUT.into());
        out.0.extend_from_slice(&superblock.encode(0));
        out.put(self.segment_sequence);
        out.put(self.index.len());
        let overflow = self.index.overflow();
        out.put(overflow.len() as u64);
        for (key, slot) in overflow {
            out.put(*key);
            out.put(u64::from(*slot));
        }
        let forgotten = self.config.mutants.is(Mutant::HandOverRunChangeForgotten);
        for (run, written) in (0..).zip(self.checkpoint.named()) {
            out.put(written.raw());
            // One that was copied for a checkpoint which was given up counts as well.
            let changed = self.slots.has_changed(run) || self.checkpoint.was_copied(run);
            out.put(u64::from(changed && !forgotten)); // N3
        }
        let ids = || (0..self.segments.count()).map(SegmentId);
        let alive = |id: &SegmentId| self.segments.get(*id).state == State::Sealed;
        out.put(ids().filter(alive).count() as u64);
        for id in ids().filter(alive) {
            let segment = self.segments.get(id);
            out.put(id.0.into());
            out.put(u64::from(segment.volume.0) << 16 | u64::from(segment.used));
            out.put(segment.sequence);
            out.put(segment.ordinal.0);
            out.put(segment.first_sequence.0);
            out.put(segment.last_sequence.0);
        }
        out.put(self.segments.free().len() as u64);
        self.segments.free().iter().for_each(|id| out.put(id.0.into()));
        out.put(self.all_volumes().count() as u64);
        self.all_volumes().for_each(|volume| out.volume(volume, &self.segments));
        let checksum = crc32c(&out.0);
        out.put(checksum.into());
        out.0
    }
}

/// What was handed over, if it fits what the cache device says (N1): the superblock as the process
/// before would have written it, and the cache.
pub fn take_over(
    on_device: &Superblock,
    message: &[u8],
    tables: Tables,
    extent_count_max: u32,
    mutants: Mutants,
) -> Option<(Superblock, Recovered)> {
    let (all, checksum) = message.split_last_chunk::<8>()?;
    if u64::from_le_bytes(*checksum) != u64::from(crc32c(all)) {
        return None;
    }
    let mut from = In(all);
    if from.take()? != MAGIC || from.take()? != u64::from(LAYOUT) {
        return None;
    }
    let mut bytes = from.bytes(SUPERBLOCK_SIZE)?.to_vec();
    let superblock = Superblock::decode(&mut bytes, 0).ok()?;
    let same = |one: &Superblock| {
        let geometry = (one.segment_count, one.segment_bytes, one.first_segment, one.size_bytes);
        let opening = (one.open_generation, one.sequence, one.checkpoint_sequence);
        (one.uuid, one.key, geometry, opening)
    };
    if same(&superblock) != same(on_device) || superblock.clean {
        return None;
    }
    let segment_sequence = from.take()?;
    let used = from.take()?;
    let overflow = from.list(|from| Some((from.take()?, from.narrow()?)))?;
    let index = Index::taken(
        image::slot_count(&superblock),
        superblock.key,
        tables.cells,
        used,
        &overflow,
    )?;
    let mut slots = Slots::taken(image::slot_count(&superblock), tables.rows)?;
    let mut slot_runs = Vec::with_capacity(slots.run_count() as usize);
    for run in 0..slots.run_count() {
        slot_runs.push(Written::from_raw(from.take()?));
        slots.note_changed(run, from.take()? != 0); // N3
    }
    let mut rows = from.list(In::row)?;
    let free = from.list(|from| from.narrow().map(SegmentId))?;
    let volumes = from.list(In::volume)?;
    let count = superblock.segment_count;
    if !from.0.is_empty()
        || rows.iter().any(|row| row.id.0 >= count || !row.is_sound(&superblock))
        || free.iter().any(|id| id.0 >= count)
        || !volumes.iter().all(|volume| volume.image.is_sound(&superblock))
    {
        return None;
    }
    let segments = Segments::new(count, superblock.segment_blocks());
    let mut recovered = Recovered {
        index,
        slots,
        segments,
        segment_sequence: segment_sequence + SEGMENT_SEQUENCE_GAP,
        volumes: Vec::with_capacity(VOLUME_COUNT_MAX),
        slot_runs,
        damage: Vec::new(),
        from_checkpoint: false,
    };
    recovered.volumes.resize_with(VOLUME_COUNT_MAX, || None);
    rows.sort_by_key(|row| (row.volume, row.ordinal));
    for volume in volumes {
        let at = usize::from(volume.image.index.0);
        let recorded = superblock.volumes.get(at)?.as_ref()?;
        if recorded.attach_generation != volume.image.attach_generation {
            return None;
        }
        let found = volume.found(&rows, &mut recovered, extent_count_max, mutants)?;
        *recovered.volumes.get_mut(at)? = Some(found);
    }
    // N4; what had been emptied and waited for its tail to be durable comes last, as the superblock of
    // this opening says that tail.
    let mut listed = alloc::vec![false; count as usize];
    for id in free.into_iter().chain((0..count).map(SegmentId)) {
        let listed = listed.get_mut(id.0 as usize)?;
        if recovered.segments.get(id).state == State::Free && !*listed {
            *listed = true;
            recovered.segments.put_free(id);
        }
    }
    Some((superblock, recovered))
}

/// A volume as it was handed over: as a checkpoint has it, and what an opening finds out.
struct Handed {
    image: ImageVolume,
    items: Vec<u64>,
    dirty_blocks: u64,
    cursor: Cursor,
    unnamed_lost: Option<Ordinal>,
    frozen: bool,
}

impl Handed {
    fn found(
        self,
        rows: &[Row],
        recovered: &mut Recovered,
        extent_count_max: u32,
        mutants: Mutants,
    ) -> Option<RecoveredVolume> {
        let Handed { image, items, dirty_blocks, cursor, unnamed_lost, frozen } = self;
        let mut out = RecoveredVolume::empty(extent_count_max);
        (out.unnamed_lost, out.frozen) = (unnamed_lost, frozen);
        out.log.watermark = image.watermark;
        out.log.tail = image.tail;
        out.log.backing_as_of = image.backing_as_of;
        out.log.flush_epoch = image.flush_epoch;
        let mine = rows.iter().filter(|row| row.volume == image.index);
        let count = mine.clone().count() as u64;
        let whole = match image.start {
            Head::NONE => count == 0,
            start => {
                let from = start.ordinal.0.checked_sub(count)?;
                count == 0 || mine.clone().zip(from + 1..).all(|(row, it)| row.ordinal.0 == it)
            }
        };
        if !whole || count > 0 && mine.clone().next()?.ordinal < image.tail {
            return None;
        }
        mine.for_each(|row| recovered.chain(&mut out, row));
        out.log.last = image.start.link;
        out.head = image.start;
        (out.log.closed, out.log.placed) = (image.start.through, image.start.through);
        out.log.dirtied = image.dirtied;
        for extent in &image.extents {
            out.extents.make_room();
            out.extents.insert(*extent);
        }
        out.pending_extents.extend(image.pending.iter().copied());
        if items.len() > RECORD_ITEMS_MAX {
            return None;
        }
        items.into_iter().for_each(|item| out.log.previous_items.push(item));
        out.cursor = cursor;
        out.log.dirty_blocks = dirty_blocks;
        let top = image.next_sequence.max(image.start.through).max(image.watermark);
        out.end(Sequence(
            top.0 + if mutants.is(Mutant::ReuseSequences) { 1 } else { SEQUENCE_GAP },
        ));
        Some(out)
    }
}

/// Numbers, one after the other.
struct Out(Vec<u8>);

impl Out {
    fn put(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn volume(&mut self, volume: &Volume, segments: &Segments) {
        let log = &volume.log;
        self.put(u64::from(volume.index.0));
        self.put(u64::from(volume.attach_generation));
        self.put(log.last.sequence.0);
        self.put(u64::from(log.last.checksum));
        self.put(u64::from(log.last.segment.0));
        self.put(u64::from(log.last.block));
        let (used, ordinal) = match log.last {
            Link::NONE => (0, 0),
            last => {
                let segment = segments.get(last.segment);
                (segment.used, segment.ordinal.0)
            }
        };
        self.put(log.closed.0);
        self.put(used.into());
        self.put(ordinal);
        self.put(log.next_sequence.0);
        self.put(log.watermark.0);
        self.put(log.tail.0);
        self.put(log.flush_epoch);
        self.put(log.backing_as_of);
        self.put(log.dirtied.0);
        self.put(volume.extents.len() as u64);
        for extent in volume.extents.iter() {
            self.put(extent.start.0);
            self.put(extent.end.0);
            self.put(extent.position.raw());
            self.put(u64::from(extent.kind as u8) << 1 | u64::from(extent.long));
        }
        self.put(volume.pending_extents.len() as u64);
        for pending in &volume.pending_extents {
            self.put(pending.sequence.0);
            self.put(pending.position.raw());
            self.put(u64::from(pending.kind as u8));
            self.put(pending.lba.0);
            self.put(pending.count.into());
        }
        let items = log.previous_items.as_slice();
        self.put(items.len() as u64);
        items.iter().for_each(|item| self.put(*item));
        self.put(log.dirty_blocks);
        let cursor = volume.writeback.cursor;
        self.put(cursor.segment.map_or(u64::MAX, |id| id.0.into()));
        self.put(cursor.block.into());
        self.put(volume.unnamed_lost.map_or(u64::MAX, |ordinal| ordinal.0));
        self.put(volume.frozen.into());
    }
}

/// The same, taken off from the front.
struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(first)
    }

    fn take(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.bytes(8)?.first_chunk()?))
    }

    fn narrow(&mut self) -> Option<u32> {
        u32::try_from(self.take()?).ok()
    }

    /// Its length, then so many.
    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.take()?;
        // Each takes a number at least.
        if count > (self.0.len() / 8) as u64 {
            return None;
        }
        (0..count).map(|_| item(self)).collect()
    }

    fn row(&mut self) -> Option<Row> {
        let id = SegmentId(self.narrow()?);
        let both = self.narrow()?;
        Some(Row {
            id,
            volume: VolumeIndex(u8::try_from(both >> 16).ok()?),
            used: both as u16,
            sequence: self.take()?,
            ordinal: Ordinal(self.take()?),
            first_sequence: Sequence(self.take()?),
            last_sequence: Sequence(self.take()?),
        })
    }

    fn volume(&mut self) -> Option<Handed> {
        let index = VolumeIndex(u8::try_from(self.take()?).ok()?);
        let attach_generation = self.narrow()?;
        let link = Link {
            sequence: Sequence(self.take()?),
            checksum: self.narrow()?,
            segment: SegmentId(self.narrow()?),
            block: u16::try_from(self.take()?).ok()?,
        };
        let through = Sequence(self.take()?);
        let used = u16::try_from(self.take()?).ok()?;
        let ordinal = Ordinal(self.take()?);
        let start = match link {
            Link::NONE => Head::NONE,
            link => Head { link, through, used, ordinal },
        };
        let image = ImageVolume {
            index,
            attach_generation,
            start,
            next_sequence: Sequence(self.take()?),
            watermark: Sequence(self.take()?),
            tail: Ordinal(self.take()?),
            flush_epoch: self.take()?,
            backing_as_of: self.take()?,
            dirtied: Sequence(self.take()?),
            extents: self.list(In::extent)?,
            pending: self.list(In::pending)?,
        };
        let items = self.list(In::take)?;
        let dirty_blocks = self.take()?;
        let segment = match self.take()? {
            u64::MAX => None,
            id => Some(SegmentId(u32::try_from(id).ok()?)),
        };
        let cursor = Cursor { segment, block: u16::try_from(self.take()?).ok()? };
        let unnamed_lost = Some(self.take()?).filter(|it| *it != u64::MAX).map(Ordinal);
        let frozen = self.take()? != 0;
        Some(Handed { image, items, dirty_blocks, cursor, unnamed_lost, frozen })
    }

    fn extent(&mut self) -> Option<Extent> {
        let (start, end) = (Lba(self.take()?), Lba(self.take()?));
        let position = Position::from_raw(self.take()?);
        let raw = self.take()?;
        let kind = Kind::decode(u8::try_from(raw >> 1).ok()?)?;
        Some(Extent { start, end, position, kind, long: raw & 1 == 1 })
    }

    fn pending(&mut self) -> Option<PendingExtent> {
        Some(PendingExtent {
            sequence: Sequence(self.take()?),
            position: Position::from_raw(self.take()?),
            kind: Kind::decode(u8::try_from(self.take()?).ok()?)?,
            lba: Lba(self.take()?),
            count: self.narrow()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::slots::Held;
    use crate::units::Slot;

    /// A program that takes this for its own must find each key where this one has put it. If this
    /// fails, [`LAYOUT`] is to be another number, and then the numbers here.
    #[test]
    fn a_layout_of_this_number_looks_like_this() {
        let count = 5000;
        let mut index = Index::new(count, 0x0123_4567_89ab);
        let mut slots = Slots::new(count);
        for number in 0..3000_u32 {
            let (volume, lba) = (VolumeIndex((number % 3) as u8), Lba(u64::from(number) * 977));
            index.insert(volume, lba, Slot(number));
            slots.hold(Slot(number), Held { lba, crc: number ^ 0x55aa, fill: number % 2 == 0 });
        }
        index.remove(VolumeIndex(0), Lba(0), Slot(0));
        assert!(index.is_in_pages());
        let cells: Vec<u8> = index.cells().iter().flat_map(|cell| cell.to_le_bytes()).collect();
        let rows = slots.all().as_flattened();
        let told = (LAYOUT, SUPERBLOCK_SIZE, crc32c(&cells), crc32c(rows));
        assert_eq!(told, (1, 65536, 2_097_298_583, 1_599_943_976));
    }
}
