// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening after a stop of any kind: what the log holds, read back from the cache device.
//!
//! # Terms
//!
//! The superblock names, per volume, the *head* of its log when the cache was last opened. What
//! lies before it was judged then and stands; what lies behind it counts only if this very opening
//! wrote it (same generation) and it links, record by record, to the head.
//!
//! # Invariants
//!
//! - **V1** A bad record at or below the largest `durable_through` seen is rot: its blocks are
//!   lost (or, if clean, forgotten together with everything older), what follows is kept.
//! - **V2** Above it the log is cut at the first bad record; what follows is void for ever.
//! - **V3** Payload above `durable_through` is read and checked before its record counts.
//! - **V4** Recovering twice gives the same; a crash within recovery changes nothing, since the
//!   only write is the superblock's.
//! - **V5** Sequences and segment sequences go on above everything seen, void or not.
//!
//! # Not here
//!
//! Raising the generation: [`reopen`] makes the superblock, the runtime writes it.

use crate::effect::Fault;
use crate::format::bytes::{FormatError, Seed, block_checksum};
use crate::format::entry::{Entry, Kind};
use crate::format::feature::AUTOCLEAR_KNOWN;
use crate::format::record::{self, Header, Link};
use crate::format::superblock::{Head, Superblock, Volume};
use crate::limits::VOLUME_COUNT_MAX;
use crate::log::append::EAGER_BLOCKS;
use crate::log::chain::Log;
use crate::log::image::{self, Image, ImageVolume};
use crate::log::lost;
use crate::log::segment::{Segments, State};
use crate::map::extent::{Extent, ExtentMap, Position};
use crate::map::index::Index;
use crate::map::slots::{Heading, Held, Slots};
use crate::mutant::{Mutant, Mutants};
use crate::policy::writeback::Cursor;
use crate::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, Ordinal, SegmentId, Sequence, Slot, VolumeIndex};
use crate::volume::PendingExtent;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::rc::Rc;
use alloc::vec::Vec;

/// Sequences left out at each opening, for records that were void and not seen.
const SEQUENCE_GAP: u64 = 1 << 24;
/// The same for segment sequences.
const SEGMENT_SEQUENCE_GAP: u64 = 1 << 12;

/// So many segments in a row that were not used again since a checkpoint: none behind them was.
/// More than can be open or on their way at once.
const UNUSED_RUN: usize = 256;

/// The cache device as recovery sees it: plain reads that wait.
pub trait CacheReader {
    /// Reads `bytes.len()` bytes (a multiple of 4,096) at `offset`.
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault>;
}

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
    /// A record's header rotted, and nothing says which dirty blocks it held.
    Unknown {
        /// Whose.
        volume: VolumeIndex,
        /// The segment it was in.
        segment: SegmentId,
        /// Its block in the segment.
        block: u16,
    },
    /// A record's header rotted; it held only clean blocks.
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
    pub(crate) cursor: Cursor,
    pub(crate) lost_blocks: u64,
    /// Dirty blocks nobody can name are lost: the volume must not be served as if nothing were.
    pub(crate) frozen: bool,
    pub(crate) head: Head,
}

/// What recovery found.
#[derive(Debug)]
pub struct Recovered {
    pub(crate) index: Index,
    pub(crate) slots: Slots,
    pub(crate) segments: Segments,
    pub(crate) segment_sequence: u64,
    pub(crate) volumes: Vec<Option<RecoveredVolume>>,
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
    /// Where a block is.
    pub fn find(&self, volume: VolumeIndex, lba: Lba) -> Found {
        let state = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        let extent = state.and_then(|state| state.extents.get(lba));
        Found {
            slot: self.index.get(volume, lba),
            extent: extent.map(|extent| (extent.position, extent.kind)),
        }
    }
}

impl Recovered {
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
}

impl Recovered {
    /// Where the records of a volume's log begin, oldest first; a place among them may be a hole.
    pub fn records(&self, volume: VolumeIndex) -> Vec<(SegmentId, u16)> {
        let mut all = Vec::new();
        let mut next = self.volume(volume).and_then(|volume| volume.log.oldest);
        while let Some(id) = next {
            let segment = self.segments.get(id);
            let mut block = 0;
            while block < segment.used {
                all.push((id, block));
                block += self.slots.heading(self.segments.slot(id, block)).blocks.max(1);
            }
            next = segment.next;
        }
        all
    }

    /// Whether this block of this segment is the newest one the log has for an LBA.
    pub fn is_newest(&self, volume: VolumeIndex, lba: Lba, id: SegmentId, block: u16) -> bool {
        self.index.get(volume, lba) == Some(self.segments.slot(id, block))
    }

    /// Whether reads of a block fail, because it was lost and not written since.
    pub fn is_lost(&self, volume: VolumeIndex, lba: Lba) -> bool {
        let extents = self.volume(volume).map(|volume| &volume.extents);
        let extent = extents.and_then(|extents| extents.get(lba));
        extent.is_some_and(|extent| extent.kind == Kind::Lost)
            && self.index.get(volume, lba).is_none()
    }

    /// Everything of a volume up to this sequence is on its backing device.
    pub fn watermark(&self, volume: VolumeIndex) -> Sequence {
        self.volume(volume).map_or(Sequence(0), |volume| volume.log.watermark)
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

/// A first header of a segment.
#[derive(Clone, Copy)]
struct First {
    id: SegmentId,
    header: Header,
}

/// A record that stands, or a hole where one should be.
#[derive(Clone, Copy)]
enum Step {
    Record { id: SegmentId, block: u16, header: Header, checksum: u32 },
    Hole { id: SegmentId, block: u16 },
}

struct Recovery<'a, R> {
    superblock: &'a Superblock,
    reader: &'a mut R,
    mutants: Mutants,
    /// First headers, by segment: of all, or of those that may have changed since a checkpoint.
    firsts: BTreeMap<SegmentId, First>,
    image: Option<Rc<Image>>,
    /// Segments that got records from the log, not from the checkpoint alone.
    touched: Vec<bool>,
    bytes: Vec<u8>,
    in_bytes: Option<SegmentId>,
    found: Recovered,
    extent_count_max: u32,
}

/// Reads the log of every volume: from the newest checkpoint on, or all of it where there is none
/// that stands.
pub fn recover<R: CacheReader>(
    superblock: &Superblock,
    reader: &mut R,
    extent_count_max: u32,
    mutants: Mutants,
) -> Recovered {
    let image = image::read(superblock, reader);
    if let Some(image) = image {
        let found = recover_from(superblock, reader, extent_count_max, mutants, Some(image));
        if let Some(mut found) = found {
            found.from_checkpoint = true;
            return found;
        }
    }
    recover_from(superblock, reader, extent_count_max, mutants, None)
        .expect("only a checkpoint can be found wanting")
}

fn recover_from<R: CacheReader>(
    superblock: &Superblock,
    reader: &mut R,
    extent_count_max: u32,
    mutants: Mutants,
    image: Option<Image>,
) -> Option<Recovered> {
    let blocks = superblock.segment_blocks();
    let slots = u64::from(superblock.segment_count) * u64::from(blocks);
    let mut volumes = Vec::with_capacity(VOLUME_COUNT_MAX);
    volumes.resize_with(VOLUME_COUNT_MAX, || None);
    let mut recovery = Recovery {
        superblock,
        reader,
        mutants,
        firsts: BTreeMap::new(),
        image: None,
        touched: alloc::vec![false; superblock.segment_count as usize],
        bytes: alloc::vec![0; usize::from(blocks) * BLOCK_SIZE],
        in_bytes: None,
        found: Recovered {
            index: Index::new(slots, superblock.key),
            slots: Slots::new(slots),
            segments: Segments::new(superblock.segment_count, blocks),
            segment_sequence: superblock.segment_sequence,
            volumes,
            damage: Vec::new(),
            from_checkpoint: false,
        },
        extent_count_max,
    };
    match image {
        Some(image) => recovery.use_image(image),
        None => recovery.read_firsts(),
    }
    for index in 0..superblock.volumes.len() {
        if let Some(volume) = &superblock.volumes[index] {
            let found = recovery.volume(VolumeIndex(index as u8), volume)?;
            recovery.found.volumes[index] = Some(found);
        }
    }
    if recovery.image.is_some() && !mutants.is(Mutant::CheckpointSweepSkipped) {
        recovery.sweep();
    }
    let Recovery { mut found, image, .. } = recovery;
    found.segment_sequence += SEGMENT_SEQUENCE_GAP; // V5
    let order = image.iter().flat_map(|image| {
        // The order in which they come free after the checkpoint (checkpoint::T3).
        image.free.iter().copied().chain(image.rows.iter().map(|row| row.id))
    });
    let all = (0..superblock.segment_count).map(SegmentId);
    let mut listed = alloc::vec![false; superblock.segment_count as usize];
    for id in order.chain(all) {
        let listed = &mut listed[id.0 as usize];
        if found.segments.get(id).state == State::Free && !*listed {
            *listed = true;
            found.segments.put_free(id);
        }
    }
    Some(found)
}

/// The superblock of the next opening: its generation, and where each log now ends.
pub fn reopen(superblock: &Superblock, found: &Recovered, mutants: Mutants) -> Superblock {
    let mut next = superblock.clone();
    next.sequence += 1;
    next.clean = false;
    // What this program does not know it cannot keep true.
    next.autoclear &= AUTOCLEAR_KNOWN;
    next.feature_names.retain(|name| name.mask != 3 || AUTOCLEAR_KNOWN >> name.bit & 1 == 1);
    if !mutants.is(Mutant::GenerationNotRaised) {
        next.open_generation += 1;
    }
    next.segment_sequence = found.segment_sequence;
    for (volume, found) in next.volumes.iter_mut().zip(&found.volumes) {
        if let (Some(volume), Some(found)) = (volume, found) {
            if !mutants.is(Mutant::IgnoreCut) {
                volume.head = found.head;
            }
            volume.next_sequence = found.log.next_sequence;
            volume.watermark = found.log.watermark;
            volume.tail = found.log.tail;
            volume.flush_epoch = found.log.flush_epoch;
            volume.backing_as_of = found.log.backing_as_of;
        }
    }
    next
}

impl<R: CacheReader> Recovery<'_, R> {
    fn address(&self, id: SegmentId, block: u16) -> u64 {
        self.superblock.address(id, block)
    }

    fn decode(&self, bytes: &[u8], address: u64) -> Result<(Header, u32), FormatError> {
        let mut copy: Box<[u8; BLOCK_SIZE]> = Box::new([0; BLOCK_SIZE]);
        copy.copy_from_slice(bytes);
        let identity = self.superblock.identity();
        match record::decode(&mut copy, address, &identity) {
            Err(FormatError::Checksum { .. }) if self.mutants.is(Mutant::SkipHeaderChecksum) => {
                Ok((Header::fields(&copy), record::checksum(&copy)))
            }
            Err(FormatError::Address { .. }) if self.mutants.is(Mutant::IgnoreAddress) => {
                Ok((Header::fields(&copy), record::checksum(&copy)))
            }
            other => other.map(|header| (header, record::checksum(&copy))),
        }
    }

    /// The first header of every segment: which log it was in, and where.
    fn read_firsts(&mut self) {
        let mut bytes = alloc::vec![0; BLOCK_SIZE];
        for id in (0..self.superblock.segment_count).map(SegmentId) {
            let address = self.address(id, 0);
            if self.reader.read(address, &mut bytes).is_err() {
                continue;
            }
            if let Ok((header, _)) = self.decode(&bytes, address) {
                self.add_first(First { id, header });
            }
        }
    }

    fn add_first(&mut self, first: First) {
        let sequence = &mut self.found.segment_sequence;
        *sequence = (*sequence).max(first.header.segment_sequence + 1);
        self.firsts.insert(first.id, first);
    }

    /// Puts a checkpoint in place, and looks for what came after it: in the pool it captured, from
    /// the front, then at the tails (checkpoint::T3).
    fn use_image(&mut self, mut image: Image) {
        let slots = Slots::new(0);
        self.found.slots = core::mem::replace(&mut image.slots, slots);
        let index = Index::new(1, 0);
        self.found.index = core::mem::replace(&mut image.index, index);
        let sequence = &mut self.found.segment_sequence;
        *sequence = (*sequence).max(image.segment_sequence);
        image.rows.sort_by_key(|row| (row.volume, row.ordinal));
        let since = image.segment_sequence;
        // What was in a log when it began and, as far as the copy shows, still was later.
        image.rows.retain(|row| row.sequence < since);
        self.read_firsts_of(&image.free, since, UNUSED_RUN);
        let mut known = alloc::vec![false; self.superblock.segment_count as usize];
        for id in image.free.iter().copied().chain(image.rows.iter().map(|row| row.id)) {
            known[id.0 as usize] = true;
        }
        // Retired while the checkpoint was written, or just before: used again or not.
        let all = (0..self.superblock.segment_count).map(SegmentId);
        let others: Vec<SegmentId> = all.filter(|id| !known[id.0 as usize]).collect();
        self.read_firsts_of(&others, since, usize::MAX);
        for volume in &image.volumes {
            let mine = image.rows.iter().filter(|row| row.volume == volume.index);
            let ids: Vec<SegmentId> = mine.map(|row| row.id).collect();
            self.read_firsts_of(&ids, since, UNUSED_RUN);
        }
        self.image = Some(Rc::new(image));
    }

    /// Reads first headers in this order until more than `run` segments in a row have not been
    /// used since.
    fn read_firsts_of(&mut self, ids: &[SegmentId], since: u64, run: usize) {
        let mut bytes = alloc::vec![0; BLOCK_SIZE];
        let mut unused = 0;
        for id in ids {
            let address = self.address(*id, 0);
            let header = match self.reader.read(address, &mut bytes) {
                Ok(()) => self.decode(&bytes, address).ok().map(|found| found.0),
                Err(Fault) => None,
            };
            match header {
                Some(header) => {
                    unused = if header.segment_sequence >= since { 0 } else { unused + 1 };
                    self.add_first(First { id: *id, header });
                }
                None => unused += 1,
            }
            if unused > run {
                return;
            }
        }
    }

    /// Takes out of the index what a checkpoint's pages hold of segments that are gone, or that
    /// hold something else now.
    fn sweep(&mut self) {
        let touched = &self.touched;
        let Recovered { index, slots, segments, .. } = &mut self.found;
        let taken = self.mutants.is(Mutant::CheckpointHeadersTaken);
        // A header's row looks like a block's: what was a block in an earlier life is none now.
        let mut headers =
            alloc::vec![false; segments.count() as usize * usize::from(segments.blocks())];
        for id in (0..segments.count()).map(SegmentId).filter(|id| touched[id.0 as usize]) {
            let mut block = 0;
            while block < segments.get(id).used {
                let slot = segments.slot(id, block);
                headers[slot.0 as usize] = true;
                block += slots.heading(slot).blocks.max(1);
            }
        }
        index.sweep(|volume, lba, slot| {
            if u64::from(slot.0) >= u64::from(segments.count()) * u64::from(segments.blocks()) {
                return false;
            }
            let (id, block) = segments.place(slot);
            let segment = segments.get(id);
            segment.state == State::Sealed
                && segment.volume == volume
                && block < segment.used
                && (!headers[slot.0 as usize] || taken)
                && (!touched[id.0 as usize] || slots.held(slot).is_some_and(|held| held.lba == lba))
        });
    }

    /// What the checkpoint holds of a volume, put in place: the log as it was when it began.
    fn base(&mut self, index: VolumeIndex, tail: Ordinal, out: &mut RecoveredVolume) {
        let Some(image) = self.image.clone() else { return };
        let Some(volume) = self.volume_in(&image, index) else { return };
        for row in image.rows.iter().filter(|row| row.volume == index) {
            if row.ordinal < tail || row.ordinal > volume.start.ordinal {
                continue;
            }
            let last = row.ordinal == volume.start.ordinal;
            let segment = self.found.segments.get_mut(row.id);
            segment.become_state(State::Open);
            segment.become_state(State::Sealed);
            segment.volume = index;
            segment.sequence = row.sequence;
            segment.ordinal = row.ordinal;
            segment.first_sequence = row.first_sequence;
            segment.last_sequence = if last { volume.start.through } else { row.last_sequence };
            segment.used = if last { volume.start.used } else { row.used };
            let log = &mut out.log;
            if let Some(before) = log.newest.replace(row.id) {
                self.found.segments.get_mut(before).next = Some(row.id);
            }
            log.oldest.get_or_insert(row.id);
            log.tail_segment.get_or_insert(row.id);
            log.segment_count += 1;
            log.next_ordinal = Ordinal(row.ordinal.0 + 1);
        }
        let watermark = out.log.watermark;
        out.log.last = volume.start.link;
        (out.log.closed, out.log.placed) = (volume.start.through, volume.start.through);
        out.log.dirtied = volume.dirtied;
        out.head = volume.start;
        for extent in volume.extents.iter().filter(|it| it.position.ordinal() >= tail) {
            out.extents.make_room();
            out.extents.insert(*extent);
        }
        let dirty = volume.pending.iter().filter(|pending| pending.sequence > watermark);
        out.pending_extents.extend(dirty.copied());
        let link = volume.start.link;
        self.restore_items(link, out);
    }

    /// What the last record before the checkpoint holds: the next one must say it.
    fn restore_items(&mut self, link: Link, out: &mut RecoveredVolume) {
        if link == Link::NONE {
            return;
        }
        self.load(link.segment);
        let at = usize::from(link.block) * BLOCK_SIZE;
        let mut head: Box<[u8; BLOCK_SIZE]> = Box::new([0; BLOCK_SIZE]);
        head.copy_from_slice(&self.bytes[at..at + BLOCK_SIZE]);
        let count = Header::fields(&head).entry_count;
        out.log.previous_items.clear();
        for number in 0..count.min(crate::limits::RECORD_ENTRIES_MAX as u16) {
            let Ok(entry) = record::entry(&head, number) else { continue };
            let (first, second) = record::items(entry.lba, entry.count);
            if !out.log.previous_items.has_room() {
                break;
            }
            out.log.previous_items.push(first);
            if let Some(second) = second {
                out.log.previous_items.push(second);
            }
        }
    }

    /// Whether the checkpoint has all it needs of a volume: the segments from the tail to its
    /// beginning, and a last record that can be read.
    fn image_stands(&mut self, index: VolumeIndex, tail: Ordinal) -> bool {
        let Some(image) = self.image.clone() else { return true };
        let Some(volume) = self.volume_in(&image, index) else { return true };
        let start = volume.start;
        if start == Head::NONE || start.ordinal < tail {
            return true;
        }
        if start.link.segment.0 >= self.superblock.segment_count {
            return false;
        }
        let rows = image.rows.iter().filter(|row| {
            row.volume == index && row.ordinal >= tail && row.ordinal <= start.ordinal
        });
        self.load(start.link.segment);
        let at = usize::from(start.link.block) * BLOCK_SIZE;
        let address = self.address(start.link.segment, start.link.block);
        let header = self.decode(&self.bytes[at..at + BLOCK_SIZE], address);
        rows.count() as u64 == start.ordinal.0 - tail.0 + 1
            && header.is_ok_and(|(_, checksum)| checksum == start.link.checksum)
    }

    /// Drops the extents that write-back had dropped: short ones up to the watermark. Something may
    /// have gone around the log there since, without a note.
    fn drop_clean_extents(&mut self, out: &mut RecoveredVolume) {
        let Cursor { segment: Some(id), block } = out.cursor else { return };
        if self.mutants.is(Mutant::CheckpointKeepsExtents) {
            return;
        }
        let clean = Position::new(self.found.segments.get(id).ordinal, block);
        out.extents.remove_where(|extent| {
            !extent.long && extent.kind != Kind::Lost && extent.position <= clean
        });
    }

    /// Finds where write-back goes on, and counts what is dirty.
    fn find_cursor(&mut self, out: &mut RecoveredVolume) {
        let watermark = out.log.watermark;
        (out.cursor, out.log.dirty_blocks) = (Cursor::default(), 0);
        let mut next = out.log.tail_segment;
        while let Some(id) = next {
            let segment = *self.found.segments.get(id);
            next = segment.next;
            if segment.last_sequence <= watermark {
                out.cursor = Cursor { segment: Some(id), block: segment.used };
                continue;
            }
            let mut block = 0;
            while block < segment.used {
                let heading = self.found.slots.heading(self.found.segments.slot(id, block));
                let first = segment.first_sequence.0 + u64::from(heading.sequence_offset);
                let end = block + heading.blocks.max(1);
                if first + u64::from(heading.entries) <= watermark.0 {
                    out.cursor = Cursor { segment: Some(id), block: end };
                } else {
                    let slots = (block + 1..end).map(|at| self.found.segments.slot(id, at));
                    let dirty = slots
                        .filter_map(|slot| self.found.slots.held(slot))
                        .filter(|held| !held.fill);
                    out.log.dirty_blocks += dirty.count() as u64;
                }
                block = end;
            }
        }
    }

    /// One volume: its chain, its entries, its end.
    fn volume(&mut self, index: VolumeIndex, recorded: &Volume) -> Option<RecoveredVolume> {
        let volume = &self.with_image(index, recorded);
        let behind = self.behind_head(index, volume);
        if !self.image_stands(index, behind.tail) {
            return None;
        }
        let has_image = self.image_of(index).is_some();
        self.found.damage.extend_from_slice(&behind.damage);
        let chain = self.chain(index, volume, &behind);
        let mut out = RecoveredVolume {
            log: Log::new(Sequence(0), Sequence(1)),
            extents: ExtentMap::with_lost_room(self.extent_count_max as usize),
            pending_extents: VecDeque::with_capacity(self.extent_count_max as usize),
            cursor: Cursor::default(),
            lost_blocks: 0,
            frozen: behind.unknown_end,
            head: Head::NONE,
        };
        out.log.watermark = behind.watermark;
        out.log.tail = behind.tail;
        out.log.backing_as_of = behind.backing_as_of;
        out.log.flush_epoch = behind.flush_epoch;
        self.base(index, behind.tail, &mut out);
        self.apply(index, &chain, &mut out);
        if has_image {
            self.find_cursor(&mut out);
            self.drop_clean_extents(&mut out);
        }
        // V5
        let reuse = self.mutants.is(Mutant::ReuseSequences);
        let gap = if reuse { 1 } else { SEQUENCE_GAP };
        let top = if reuse { out.log.placed } else { behind.sequence_max.max(out.log.placed) };
        let through = out.log.closed.max(out.log.watermark);
        let next = Sequence(top.0.max(through.0) + gap);
        let marks = crate::log::chain::Marks {
            through,
            tail: out.log.tail,
            watermark: out.log.watermark,
            closed_at: crate::units::Tick(0),
            bytes: 0,
        };
        let log = &mut out.log;
        log.next_sequence = next;
        (log.written, log.flushing, log.durable) = (marks, marks, marks);
        log.wanted = through;
        (log.placed, log.closed) = (through, through);
        log.next_ordinal = log.next_ordinal.max(log.tail);
        Some(out)
    }

    /// The records this opening appended behind the head it found.
    fn behind_head(&mut self, index: VolumeIndex, volume: &Volume) -> Behind {
        let mine: Vec<First> = self
            .firsts
            .values()
            .filter(|first| usize::from(first.header.volume) == usize::from(index.0))
            .filter(|first| first.header.attach_generation == volume.attach_generation)
            .copied()
            .collect();
        let mut behind = Behind {
            steps: Vec::new(),
            watermark: volume.watermark,
            tail: volume.tail.max(Ordinal(1)),
            backing_as_of: volume.backing_as_of,
            flush_epoch: volume.flush_epoch,
            sequence_max: Sequence(volume.next_sequence.0.saturating_sub(1)),
            unknown_end: false,
            damage: Vec::new(),
        };
        for first in &mine {
            behind.sequence_max = behind.sequence_max.max(first.header.last_sequence());
        }
        let generation = self.superblock.open_generation;
        let any = self.mutants.is(Mutant::IgnoreGeneration);
        let current: Vec<First> = mine
            .into_iter()
            .filter(|first| any || first.header.open_generation == generation)
            .filter(|first| first.header.ordinal > volume.head.ordinal)
            .collect();
        // Pass one: everything that could belong, with the holes between, newest segment first:
        // each names the one before it.
        let bottom = Ordinal(volume.head.ordinal.0 + 1);
        let top = current.iter().map(|first| first.header.ordinal).max();
        let mut found: Vec<(Ordinal, Vec<Step>)> = Vec::new();
        let mut tails: Vec<Ordinal> = alloc::vec![behind.tail];
        let mut named: Option<(SegmentId, u16)> = None;
        let mut ordinal = top.unwrap_or(Ordinal(0));
        // Bounded: a log has no more segments than the cache.
        for _ in 0..self.superblock.segment_count {
            if ordinal < bottom || ordinal < behind.tail {
                break;
            }
            let first = current
                .iter()
                .filter(|first| first.header.ordinal == ordinal)
                .max_by_key(|first| first.header.segment_sequence)
                .map(|first| first.id);
            let mut steps = Vec::new();
            match first.or(named.map(|(id, _)| id)) {
                Some(id) => {
                    let limit = named
                        .filter(|named| named.0 == id)
                        .map_or(self.superblock.segment_blocks(), |named| named.1);
                    self.read_segment(id, index, ordinal, generation, limit, &mut steps);
                }
                None => steps.push(Step::Hole { id: SegmentId(u32::MAX), block: 0 }),
            }
            named = steps.iter().find_map(|step| match step {
                Step::Record { header, .. } => {
                    let known = header.previous_segment.0 < self.superblock.segment_count;
                    known.then_some((header.previous_segment, header.previous_segment_used))
                }
                Step::Hole { .. } => None,
            });
            for step in &steps {
                if let Step::Record { header, .. } = step {
                    tails.push(header.tail);
                    let last = header.last_sequence();
                    behind.sequence_max = behind.sequence_max.max(last);
                }
            }
            found.push((ordinal, steps));
            ordinal = Ordinal(ordinal.0 - 1);
        }
        found.reverse();
        // Where it begins: at the highest tail that a record names which stands. Below that
        // segments may be gone; below the tail of a record that does not stand they are all there.
        tails.sort_unstable();
        tails.dedup();
        while let Some(tail) = tails.pop() {
            let first = bottom.max(tail);
            let from_first = found.iter().filter(|(ordinal, _)| *ordinal >= first);
            let steps: Vec<Step> = from_first.flat_map(|(_, steps)| steps).copied().collect();
            let judged = self.judge(index, volume, &steps, first == bottom, &behind);
            if judged.tail >= tail || tails.is_empty() {
                return judged;
            }
        }
        behind
    }

    /// All records of a segment and the holes between them; the end is where nothing more is.
    fn read_segment(
        &mut self,
        id: SegmentId,
        index: VolumeIndex,
        ordinal: Ordinal,
        generation: u32,
        limit: u16,
        steps: &mut Vec<Step>,
    ) {
        self.load(id);
        let any = self.mutants.is(Mutant::IgnoreGeneration);
        let limit = limit.min(self.superblock.segment_blocks());
        let mut block = 0;
        let mut before = Sequence(0);
        let mut hole = None;
        while block < limit {
            let at = usize::from(block) * BLOCK_SIZE;
            let address = self.address(id, block);
            let found = self.decode(&self.bytes[at..at + BLOCK_SIZE], address).ok();
            let found = found.filter(|(header, _)| {
                self.belongs(header, index, ordinal)
                    && header.sequence > before
                    && (any || header.open_generation == generation)
                    && block + header.blocks <= self.superblock.segment_blocks()
            });
            match found {
                Some((header, checksum)) => {
                    if let Some(block) = hole.take() {
                        steps.push(Step::Hole { id, block });
                    }
                    steps.push(Step::Record { id, block, header, checksum });
                    before = header.last_sequence();
                    block += header.blocks;
                }
                // Every block is looked at: a header proves itself by its address, the cache's
                // key and its segment's ordinal, which nothing a guest wrote can do.
                None => {
                    hole.get_or_insert(block);
                    block += 1;
                }
            }
        }
        if let Some(block) = hole {
            steps.push(Step::Hole { id, block });
        }
    }

    /// Whether a header is of this place in this volume's log: not of a volume that had the index
    /// before, which counted its segments from one, too.
    fn belongs(&self, header: &Header, index: VolumeIndex, ordinal: Ordinal) -> bool {
        let volume = self.superblock.volumes.get(usize::from(index.0)).and_then(Option::as_ref);
        usize::from(header.volume) == usize::from(index.0)
            && header.ordinal == ordinal
            && volume.is_some_and(|volume| header.attach_generation == volume.attach_generation)
    }

    fn load(&mut self, id: SegmentId) {
        if self.in_bytes == Some(id) {
            return;
        }
        let address = self.address(id, 0);
        self.in_bytes = Some(id);
        if self.reader.read(address, &mut self.bytes).is_ok() {
            return;
        }
        // Some of it cannot be read: the rest still can.
        for block in 0..self.superblock.segment_blocks() {
            let at = usize::from(block) * BLOCK_SIZE;
            let address = self.address(id, block);
            let bytes = &mut self.bytes[at..at + BLOCK_SIZE];
            if self.reader.read(address, bytes).is_err() {
                bytes.fill(0);
            }
        }
    }

    /// Pass two: where the log ends (V1, V2, V3). The first record links to the head, unless what
    /// was between the two has been reclaimed.
    fn judge(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        steps: &[Step],
        links_to_head: bool,
        before: &Behind,
    ) -> Behind {
        let mut behind = before.clone();
        let headers = steps.iter().filter_map(|step| match step {
            Step::Record { header, .. } => Some(header),
            Step::Hole { .. } => None,
        });
        let durable = headers.map(|header| header.durable_through).max().unwrap_or_default();
        let torn_end = self.mutants.is(Mutant::RotIsTornEnd);
        let unlinked = self.mutants.is(Mutant::IgnoreLink);
        let mut last = volume.head.link;
        let mut through = volume.head.through;
        let mut held = false;
        let mut first = !links_to_head;
        for step in steps {
            let Step::Record { id, block, header, checksum } = step else {
                held = true;
                behind.steps.push(*step);
                continue;
            };
            let linked = header.previous == last || first && !held && *block == 0;
            first = false;
            let mut cut = false;
            if (held || !linked) && !unlinked {
                // Something between the last good record and this one is missing. At or below
                // what is durable it is rot, else the end.
                let rot = durable > through && header.sequence <= Sequence(durable.0 + 1);
                let later = header.previous.sequence > last.sequence;
                cut = !rot || !later || torn_end;
                if !held {
                    behind.steps.push(Step::Hole { id: *id, block: *block });
                }
            }
            cut |= header.last_sequence() > durable
                && !self.mutants.is(Mutant::SkipPayloadCheck)
                && !self.payload_is_good(*id, *block, header);
            if cut {
                behind.damage.push(Damage::Cut { volume: index, through });
                break;
            }
            held = false;
            last = Link {
                sequence: header.sequence,
                checksum: *checksum,
                segment: *id,
                block: *block,
            };
            through = header.last_sequence();
            behind.watermark = behind.watermark.max(header.watermark);
            behind.tail = behind.tail.max(header.tail);
            behind.backing_as_of = behind.backing_as_of.max(header.backing_as_of);
            behind.flush_epoch = behind.flush_epoch.max(header.flush_epoch);
            behind.steps.push(*step);
        }
        while matches!(behind.steps.last(), Some(Step::Hole { .. })) {
            behind.steps.pop();
        }
        if durable > through {
            // What is missing was durable: the end of the log rotted. Nothing says what it held.
            let (segment, block) = (last.segment, last.block);
            behind.damage.push(Damage::Unknown { volume: index, segment, block });
            behind.unknown_end = true;
        }
        behind
    }

    fn payload_is_good(&mut self, id: SegmentId, block: u16, header: &Header) -> bool {
        self.load(id);
        let at = usize::from(block) * BLOCK_SIZE;
        let mut head = [0; BLOCK_SIZE];
        head.copy_from_slice(&self.bytes[at..at + BLOCK_SIZE]);
        (0..header.entry_count).all(|entry| match record::entry(&head, entry) {
            Ok(entry) if entry.kind.has_slot() && entry.kind != Kind::Void => {
                let block = block + entry.slot;
                let at = usize::from(block) * BLOCK_SIZE;
                let address = self.address(id, block);
                let seed = Seed::new(self.superblock.key, address, header.segment_sequence);
                seed.apply(block_checksum(&self.bytes[at..at + BLOCK_SIZE])) == entry.crc
            }
            Ok(_) => true,
            Err(_) => false,
        })
    }

    /// The whole log, tail to end: what stood when the cache was opened, then what came since.
    fn chain(&mut self, index: VolumeIndex, volume: &Volume, behind: &Behind) -> Vec<Step> {
        // What a checkpoint holds need not be read again.
        let start = self.image_of(index).map_or(Head::NONE, |volume| volume.start);
        let tail = behind.tail.max(start.ordinal);
        let mut ids = Vec::new();
        let mut ordinal = volume.head.ordinal;
        let mut next: Option<(SegmentId, u16)> =
            (volume.head != Head::NONE).then_some((volume.head.link.segment, volume.head.used));
        // From the head down: each segment names the one before it.
        while let Some((id, used)) = next.filter(|_| ordinal >= tail && ordinal.0 > 0) {
            // A log has no more segments than the cache, and each is in it once.
            if ids.len() >= self.superblock.segment_count as usize {
                break;
            }
            ids.push((id, ordinal, used.min(self.superblock.segment_blocks())));
            next = self.predecessor(index, id, ordinal);
            ordinal = Ordinal(ordinal.0 - 1);
        }
        let mut steps = Vec::new();
        if volume.head != Head::NONE && ordinal >= tail && ordinal.0 > 0 {
            // Older segments that should be there cannot be found.
            steps.push(Step::Hole { id: SegmentId(u32::MAX), block: 0 });
        }
        for (id, ordinal, used) in ids.into_iter().rev() {
            self.read_established(id, index, ordinal, used, &mut steps);
        }
        steps.extend_from_slice(&behind.steps);
        steps.retain(|step| match step {
            Step::Record { header, .. } => {
                header.ordinal >= tail && header.sequence > start.link.sequence
            }
            Step::Hole { id, block } => {
                *id != start.link.segment || *block > start.link.block || start == Head::NONE
            }
        });
        steps
    }

    /// What the checkpoint holds of a volume: of the one that is there, not of another that had
    /// its place.
    fn volume_in<'i>(&self, image: &'i Image, index: VolumeIndex) -> Option<&'i ImageVolume> {
        let recorded = self.superblock.volumes.get(usize::from(index.0))?.as_ref()?;
        image.volumes.iter().find(|volume| {
            volume.index == index && volume.attach_generation == recorded.attach_generation
        })
    }

    fn image_of(&self, index: VolumeIndex) -> Option<&ImageVolume> {
        self.volume_in(self.image.as_deref()?, index)
    }

    /// The volume with the newest end of its log that is known for sure: the superblock's, or the
    /// checkpoint's, which everything before it was durable for.
    fn with_image(&self, index: VolumeIndex, recorded: &Volume) -> Volume {
        let mut volume = recorded.clone();
        if let Some(image) = self.image_of(index) {
            if image.start.link.sequence > volume.head.link.sequence {
                volume.head = image.start;
            }
            volume.next_sequence = volume.next_sequence.max(image.next_sequence);
            volume.watermark = volume.watermark.max(image.watermark);
            volume.tail = volume.tail.max(image.tail);
            volume.flush_epoch = volume.flush_epoch.max(image.flush_epoch);
            volume.backing_as_of = volume.backing_as_of.max(image.backing_as_of);
        }
        volume
    }

    /// The segment before `id` in the log.
    fn predecessor(
        &mut self,
        index: VolumeIndex,
        id: SegmentId,
        ordinal: Ordinal,
    ) -> Option<(SegmentId, u16)> {
        let first = self.firsts.get(&id);
        let header = match first.filter(|first| self.belongs(&first.header, index, ordinal)) {
            Some(first) => Some(first.header),
            None => {
                // Its first header rotted; any other header of it says the same.
                self.load(id);
                (0..self.superblock.segment_blocks()).find_map(|block| {
                    let at = usize::from(block) * BLOCK_SIZE;
                    let address = self.address(id, block);
                    let found = self.decode(&self.bytes[at..at + BLOCK_SIZE], address).ok()?;
                    self.belongs(&found.0, index, ordinal).then_some(found.0)
                })
            }
        };
        if let Some(header) = header {
            let known = header.previous_segment.0 < self.superblock.segment_count;
            return known.then_some((header.previous_segment, header.previous_segment_used));
        }
        // Nothing of it is left: the youngest segment that claims the place before.
        let before = Ordinal(ordinal.0.checked_sub(1)?);
        self.firsts
            .values()
            .filter(|first| self.belongs(&first.header, index, before))
            .max_by_key(|first| first.header.segment_sequence)
            .map(|first| (first.id, self.superblock.segment_blocks()))
    }

    fn read_established(
        &mut self,
        id: SegmentId,
        index: VolumeIndex,
        ordinal: Ordinal,
        used: u16,
        steps: &mut Vec<Step>,
    ) {
        self.load(id);
        let mut block = 0;
        let mut before = Sequence(0);
        let mut hole = None;
        while block < used {
            let at = usize::from(block) * BLOCK_SIZE;
            let address = self.address(id, block);
            let found = self.decode(&self.bytes[at..at + BLOCK_SIZE], address).ok();
            let found = found.filter(|(header, _)| {
                self.belongs(header, index, ordinal)
                    && header.sequence > before
                    && block + header.blocks <= used
            });
            match found {
                Some((header, checksum)) => {
                    if let Some(block) = hole.take() {
                        steps.push(Step::Hole { id, block });
                    }
                    steps.push(Step::Record { id, block, header, checksum });
                    before = header.last_sequence();
                    block += header.blocks;
                }
                None => {
                    hole.get_or_insert(block);
                    block += 1;
                }
            }
        }
        if let Some(block) = hole {
            steps.push(Step::Hole { id, block });
        }
    }

    /// Applies a chain in order to index, slots, extents and segments.
    fn apply(&mut self, index: VolumeIndex, chain: &[Step], out: &mut RecoveredVolume) {
        let mut hole: Option<(SegmentId, u16)> = None;
        let mut holes = 0;
        for step in chain {
            match step {
                Step::Hole { id, block } => {
                    holes += 1;
                    hole.get_or_insert((*id, *block));
                }
                Step::Record { id, block, header, checksum } => {
                    if let Some(at) = hole.take() {
                        self.apply_hole(index, at, holes, *id, *block, header, out);
                        holes = 0;
                    }
                    self.apply_record(index, *id, *block, header, *checksum, out);
                }
            }
        }
        if let Some((segment, block)) = hole {
            // The last record of the log as it was opened: nothing says what it held.
            out.frozen = true;
            self.found.damage.push(Damage::Unknown { volume: index, segment, block });
        }
    }

    /// A record is missing: what it held is known from the next one, or is not.
    #[allow(clippy::too_many_arguments)]
    fn apply_hole(
        &mut self,
        index: VolumeIndex,
        at: (SegmentId, u16),
        holes: u32,
        id: SegmentId,
        block: u16,
        next: &Header,
        out: &mut RecoveredVolume,
    ) {
        let (segment, hole_block) = at;
        // The watermark lies at the end of a record: it is not within the one that is missing.
        let clean = next.previous.sequence <= out.log.watermark;
        let known =
            holes == 1 && next.previous.segment == segment && next.previous.block == hole_block;
        self.load(id);
        let start = usize::from(block) * BLOCK_SIZE;
        let mut head = [0; BLOCK_SIZE];
        head.copy_from_slice(&self.bytes[start..start + BLOCK_SIZE]);
        if !known {
            if clean {
                // Something clean is missing that may have been newer than anything before it.
                self.forget_all(index, out);
                self.found.damage.push(Damage::Clean { volume: index, segment, block: hole_block });
            } else {
                out.frozen = true;
                self.found.damage.push(Damage::Unknown {
                    volume: index,
                    segment,
                    block: hole_block,
                });
            }
            return;
        }
        if clean {
            self.found.damage.push(Damage::Clean { volume: index, segment, block: hole_block });
        }
        let ordinal = next.ordinal;
        let mut item = 0;
        while item < next.item_count {
            let Ok(((lba, count), taken)) = record::item(&head, item, next.item_count) else {
                break;
            };
            item += taken;
            let kind = if clean { Kind::Bypassed } else { Kind::Lost };
            let position = Position::new(ordinal, block);
            self.apply_extent(index, kind, lba, count, position, false, out);
            if !clean {
                out.lost_blocks += count;
                self.found.damage.push(Damage::Lost { volume: index, lba, count });
            }
        }
    }

    /// Forgets everything of a volume that was applied so far and is clean.
    fn forget_all(&mut self, index: VolumeIndex, out: &mut RecoveredVolume) {
        let Recovered { index: blocks, segments, slots, .. } = &mut self.found;
        lost::forget_all(index, out.log.oldest, (blocks, segments, slots), &mut out.extents);
    }

    fn apply_record(
        &mut self,
        index: VolumeIndex,
        id: SegmentId,
        block: u16,
        header: &Header,
        checksum: u32,
        out: &mut RecoveredVolume,
    ) {
        self.enter_segment(index, id, header, out);
        self.touched[id.0 as usize] = true;
        let segment = self.found.segments.get_mut(id);
        if segment.used < block {
            // A hole: for whoever goes from header to header it is a record of nothing.
            let before = segment.used;
            let heading = Heading {
                blocks: block - before,
                entries: 0,
                sequence_offset: segment.last_sequence.0.saturating_sub(segment.first_sequence.0)
                    as u32,
            };
            self.found.slots.head(self.found.segments.slot(id, before), heading);
        }
        let segment = self.found.segments.get_mut(id);
        segment.used = block + header.blocks;
        segment.last_sequence = header.last_sequence();
        let offset = header.sequence.0.saturating_sub(segment.first_sequence.0);
        let heading = Heading {
            blocks: header.blocks,
            entries: header.entry_count,
            sequence_offset: offset as u32,
        };
        self.found.slots.head(self.found.segments.slot(id, block), heading);
        self.load(id);
        let at = usize::from(block) * BLOCK_SIZE;
        let mut head: Box<[u8; BLOCK_SIZE]> = Box::new([0; BLOCK_SIZE]);
        head.copy_from_slice(&self.bytes[at..at + BLOCK_SIZE]);
        out.log.previous_items.clear();
        let mut next_block = block + 1;
        for number in 0..header.entry_count {
            let Ok(entry) = record::entry(&head, number) else { continue };
            let (first, second) = record::items(entry.lba, entry.count);
            out.log.previous_items.push(first);
            if let Some(second) = second {
                out.log.previous_items.push(second);
            }
            let sequence = Sequence(header.sequence.0 + 1 + u64::from(number));
            self.apply_entry(index, id, block, &mut next_block, sequence, entry, header, out);
        }
        let link = Link { sequence: header.sequence, checksum, segment: id, block };
        out.log.last = link;
        out.log.closed = header.last_sequence();
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
        segment.become_state(State::Open);
        segment.become_state(State::Sealed);
        for block in 0..self.superblock.segment_blocks() {
            // Of an earlier life, if a checkpoint was put in place.
            self.found.slots.void(self.found.segments.slot(id, block));
        }
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

/// What is known of the log behind the head.
#[derive(Clone)]
struct Behind {
    steps: Vec<Step>,
    watermark: Sequence,
    tail: Ordinal,
    backing_as_of: u64,
    flush_epoch: u64,
    sequence_max: Sequence,
    /// Something durable behind the last record is missing.
    unknown_end: bool,
    damage: Vec<Damage>,
}

/// Makes what a dead process left in one segment's buffer ready to be written to the segment:
/// closes the record that was open. Returns how many blocks, from the first, are to be written;
/// zero: none.
pub fn redo(superblock: &Superblock, id: SegmentId, bytes: &mut [u8]) -> u16 {
    let identity = superblock.identity();
    let mut block: u16 = 0;
    let mut life = None;
    while block < superblock.segment_blocks() {
        let at = usize::from(block) * BLOCK_SIZE;
        let address = superblock.address(id, block);
        let mut head: Box<[u8; BLOCK_SIZE]> = Box::new([0; BLOCK_SIZE]);
        head.copy_from_slice(&bytes[at..at + BLOCK_SIZE]);
        if !record::is_of(&head, address, &identity) {
            break;
        }
        let sequence = Header::fields(&head).segment_sequence;
        if *life.get_or_insert(sequence) != sequence {
            break;
        }
        let room = superblock.segment_blocks() - block;
        if let Ok(header) = record::decode(&mut head, address, &identity) {
            if header.blocks > room {
                break;
            }
            block += header.blocks;
            continue;
        }
        let closed = record::close(&mut head, address, &identity);
        if let Some(blocks) = closed.filter(|blocks| *blocks <= room) {
            bytes[at..at + BLOCK_SIZE].copy_from_slice(&head[..]);
            block += blocks;
        }
        break;
    }
    block
}

const _: () = assert!(BLOCK_BYTES == BLOCK_SIZE as u64);
