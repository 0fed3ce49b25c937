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
//! - **N5** What the map has forgotten and the log still has is known to the new process: what is written around the log there needs
//!   an entry (`Volume::forgot`).
//!
//! - **N6** A volume of which a flush failed stays so, its guest having been told or not (A3 of `op::around`): he lives,
//!   and nobody has stopped and started anything for him.
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
use crate::format::checkpoint::{SEGMENT_BYTES, Written};
use crate::format::superblock::{Head, SUPERBLOCK_SIZE, Superblock};
use crate::limits::{RECORD_ITEMS_MAX, VOLUME_COUNT_MAX};
use crate::log::image::{self, ImageVolume, Row, Stream};
use crate::log::recovery::{Recovered, RecoveredVolume, SEGMENT_SEQUENCE_GAP, SEQUENCE_GAP};
use crate::log::segment::{Segments, State};
use crate::map::index::Index;
use crate::map::slots::{ROW_BYTES, Slots};
use crate::mutant::{Mutant, Mutants};
use crate::payload::Payload;
use crate::policy::writeback::Cursor;
use crate::units::{Ordinal, SegmentId, Sequence};
use crate::volume::Volume;
use alloc::vec::Vec;

/// How tables and message are laid out, what a cell's place means included. Whoever changes any of it
/// changes this number: two programs that have it alike may hand over to each other. (A test compares
/// what a table looks like with what it did.)
pub const LAYOUT: u32 = 3;
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
        for state in self.all_volumes() {
            if let Some(Some(recorded)) = superblock.volumes.get_mut(usize::from(state.index.0)) {
                let unnoted = self.config.mutants.is(Mutant::FlushFailureUnnoted);
                recorded.flush_failed |= state.around.lost && !unnoted; // N6
            }
        }
        let mut out = Vec::new();
        put(&mut out, MAGIC);
        put(&mut out, LAYOUT.into());
        out.extend_from_slice(&superblock.encode(0));
        put(&mut out, self.segment_sequence);
        put(&mut out, self.index.len());
        let overflow = self.index.overflow();
        put(&mut out, overflow.len() as u64);
        for (key, slot) in overflow {
            put(&mut out, *key);
            put(&mut out, u64::from(*slot));
        }
        let forgotten = self.config.mutants.is(Mutant::HandOverRunChangeForgotten);
        for (run, written) in (0..).zip(self.checkpoint.named()) {
            put(&mut out, written.raw());
            // One that was copied for a checkpoint which was given up counts as well.
            let changed = self.slots.has_changed(run) || self.checkpoint.was_copied(run);
            put(&mut out, u64::from(changed && !forgotten)); // N3
        }
        let ids = || (0..self.segments.total()).map(SegmentId);
        let alive = |id: &SegmentId| self.segments.get(*id).state == State::Sealed;
        put(&mut out, ids().filter(alive).count() as u64);
        for id in ids().filter(alive) {
            put(&mut out, id.0.into());
            let mut row = [0; SEGMENT_BYTES];
            self.fill_segment(id, &mut row);
            out.extend_from_slice(&row);
        }
        put(&mut out, self.segments.free().len() as u64);
        self.segments.free().iter().for_each(|id| put(&mut out, id.0.into()));
        put(&mut out, self.all_volumes().count() as u64);
        self.all_volumes().for_each(|volume| self.hand_over_volume(volume, &mut out));
        let checksum = crc32c(&out);
        put(&mut out, checksum.into());
        out
    }

    /// As a checkpoint captures it, and what an opening finds out.
    fn hand_over_volume(&self, volume: &Volume, out: &mut Vec<u8>) {
        self.capture_volume(volume, out);
        let log = &volume.log;
        let items = log.previous_items.as_slice();
        put(out, items.len() as u64);
        items.iter().for_each(|item| put(out, *item));
        put(out, log.dirty_blocks);
        let cursor = volume.writeback.cursor;
        put(out, cursor.segment.map_or(u64::MAX, |id| id.0.into()));
        put(out, cursor.block.into());
        put(out, volume.unnamed_lost.map_or(u64::MAX, |ordinal| ordinal.0));
        put(out, volume.frozen.into());
        put(out, volume.has_forgotten().into());
    }
}

fn put(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
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
    let unchecked = mutants.is(Mutant::SkipHandOverChecksum);
    if u64::from_le_bytes(*checksum) != u64::from(crc32c(all)) && !unchecked {
        return None;
    }
    let mut from = Stream { bytes: all };
    if from.u64()? != MAGIC || from.u64()? != u64::from(LAYOUT) {
        return None;
    }
    let mut bytes = from.take::<SUPERBLOCK_SIZE>()?;
    let superblock = Superblock::decode(&mut bytes, 0).ok()?;
    let same = |one: &Superblock| {
        let geometry = (one.segment_count, one.segment_bytes, one.first_segment, one.size_bytes);
        let opening = (one.open_generation, one.sequence, one.checkpoint_sequence);
        (one.uuid, one.key, geometry, opening)
    };
    if same(&superblock) != same(on_device) || superblock.clean {
        return None;
    }
    let segment_sequence = from.u64()?;
    let used = from.u64()?;
    let overflow = list(&mut from, |from| Some((from.u64()?, from.narrow()?)))?;
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
        slot_runs.push(Written::from_raw(from.u64()?));
        slots.note_changed(run, from.u64()? != 0); // N3
    }
    let mut rows = list(&mut from, |from| {
        let id = SegmentId(from.narrow()?);
        image::row(id, &from.take()?)
    })?;
    let free = list(&mut from, |from| from.narrow().map(SegmentId))?;
    let volumes = list(&mut from, handed)?;
    let count = superblock.segment_count;
    if !from.bytes.is_empty()
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
    forgot: bool,
}

impl Handed {
    fn found(
        self,
        rows: &[Row],
        recovered: &mut Recovered,
        extent_count_max: u32,
        mutants: Mutants,
    ) -> Option<RecoveredVolume> {
        let Handed { image, items, dirty_blocks, cursor, unnamed_lost, frozen, forgot } = self;
        let mut out = RecoveredVolume::empty(extent_count_max);
        (out.unnamed_lost, out.frozen) = (unnamed_lost, frozen);
        if forgot {
            out.forgot = image.start.ordinal;
        }
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

/// Its length, then so many.
fn list<T>(from: &mut Stream<'_>, item: impl Fn(&mut Stream<'_>) -> Option<T>) -> Option<Vec<T>> {
    let count = from.u64()?;
    // Each takes a number at least.
    if count > (from.bytes.len() / 8) as u64 {
        return None;
    }
    (0..count).map(|_| item(from)).collect()
}

fn handed(from: &mut Stream<'_>) -> Option<Handed> {
    let image = from.volume()?;
    let items = list(from, |from| from.u64())?;
    let dirty_blocks = from.u64()?;
    let segment = match from.u64()? {
        u64::MAX => None,
        id => Some(SegmentId(u32::try_from(id).ok()?)),
    };
    let cursor = Cursor { segment, block: from.narrow()? };
    let unnamed_lost = Some(from.u64()?).filter(|it| *it != u64::MAX).map(Ordinal);
    let frozen = from.u64()? != 0;
    let forgot = from.u64()? != 0;
    Some(Handed { image, items, dirty_blocks, cursor, unnamed_lost, frozen, forgot })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::slots::Held;
    use crate::units::{Lba, Slot, VolumeIndex};

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
        assert_eq!(told, (3, 65536, 2_097_298_583, 1_599_943_976));
    }
}
