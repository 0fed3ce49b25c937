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
//! - **V6** Where the process died alone ([`Writer`]) nothing is torn: all that is there counts as
//!   durable, so what is bad is rot.
//! - **V4** Recovering twice gives the same; a crash within recovery changes nothing, since all that is written
//!   is what is there already (V9), and the superblock.
//! - **V9** A record above `durable_through` that counts is written again, as it was read, and flushed before anything
//!   rests on it. A device whose flush failed may show what no later flush covers, and which goes with the power. Only where the
//!   process died alone is a flush enough: none was under way, and none had failed.
//! - **V10** A log that ends before the place that the memory of the process before names ([`latch_dropped`]) has lost
//!   what it held: the next flush of its volume is not answered well.
//! - **V7** A volume that was found frozen stays so, whatever becomes of the records that showed it: a
//!   checkpoint or the next head lies behind them.
//! - **V8** Before the head, too, a record counts only if the one behind it links to it, and a header only if its
//!   segment has none of a younger life: what a cut made void may lie in the place of a record whose write was lost,
//!   valid but for that. Whoever had a segment before the one that has it now had given it back, though no record tells so any more.
//! - **V11** Where nothing is left of the segment behind an opening's border, nobody says how far the log goes in the one before it, which may end with
//!   what is void: if all of it is clean it is forgotten with everything older. (What is dirty counts.)
//! - **V12** A segment that is missing between two that are there keeps its place (`gap`).
//! - **V5** Sequences and segment sequences go on above everything seen, void or not.
//!
//! # Not here
//!
//! Raising the generation: [`reopen`] makes the superblock, the runtime writes it.

mod apply;
mod base;
mod end;
mod found;
mod gap;
mod read;
mod redo;
mod source;
mod steps;

pub use found::{Damage, Found, Recovered, RecoveredVolume};
pub use redo::redo;
pub use source::{CacheReader, STRETCH_BLOCKS_MAX, Stretch};

use crate::format::feature::AUTOCLEAR_KNOWN;
use crate::format::record::Link;
use crate::format::superblock::{Head, Superblock, Volume};
use crate::limits::VOLUME_COUNT_MAX;
use crate::log::image::{self, Image};
use crate::log::segment::{Segments, State};
use crate::map::index::Index;
use crate::map::slots::Slots;
use crate::mutant::{Mutant, Mutants};
use crate::units::{BLOCK_SIZE, Ordinal, SegmentId, Sequence, VolumeIndex};
use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use alloc::vec::Vec;
pub(crate) use base::UNUSED_RUN;
use end::Behind;
use gap::Gap;
use read::{First, Step, TOGETHER, Wanted};
use steps::Steps;

/// Sequences left out at each opening, for records that were void and not seen.
pub(crate) const SEQUENCE_GAP: u64 = 1 << 24;
/// The same for segment sequences.
pub(crate) const SEGMENT_SEQUENCE_GAP: u64 = 1 << 12;

/// How the process that wrote the log came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// Power may have failed, or nothing is known: the end of the log may be torn.
    MayHaveLostPower,
    /// It died alone, and what it left in its buffers has been written ([`redo`]): every record
    /// that was begun is there, whole. No flush of the cache device was under way when it died, and none had failed: else
    /// nobody can say what the device has dropped.
    DiedAlone,
}

/// A volume whose log has been found and not been applied.
struct Begun {
    index: VolumeIndex,
    chain: Steps,
    /// The newest sequence seen, void or not.
    sequence_max: Sequence,
    out: RecoveredVolume,
}

struct Recovery<'a, R> {
    superblock: &'a Superblock,
    reader: &'a mut R,
    writer: Writer,
    mutants: Mutants,
    /// First headers, by segment: of all, or of those that may have changed since a checkpoint.
    firsts: BTreeMap<SegmentId, First>,
    image: Option<Rc<Image>>,
    /// Lives of segments, up to these, whose records are not the log's own (V8).
    void: BTreeMap<SegmentId, u64>,
    /// A whole segment: `in_bytes`.
    bytes: Vec<u8>,
    /// Headers read together.
    batch: Vec<u8>,
    in_bytes: Option<SegmentId>,
    /// Blocks of that segment, from one to another, that are to be written again (V9).
    unflushed: Option<(SegmentId, u16, u16)>,
    found: Recovered,
    extent_count_max: u32,
    /// The opening of the newest record that was applied.
    closed_generation: u32,
    /// Flush epoch of the record before, if that is known.
    epoch: Option<u64>,
    /// Where segments are missing.
    gaps: Vec<Gap>,
}

/// Reads the log of every volume: from the newest checkpoint on, or all of it where there is none
/// that stands.
pub fn recover<R: CacheReader>(
    superblock: &Superblock,
    reader: &mut R,
    extent_count_max: u32,
    writer: Writer,
    mutants: Mutants,
) -> Recovered {
    let image = image::read(superblock, reader, mutants).and_then(|image| {
        let slots = image::read_slots(superblock, &image, reader, mutants)?;
        reader.will_take_cells(Index::cell_count(image::slot_count(superblock)));
        Some((image, slots))
    });
    if image.is_some() {
        let found = recover_from(superblock, reader, extent_count_max, writer, mutants, image);
        if let Some(mut found) = found {
            found.from_checkpoint = true;
            return found;
        }
    }
    recover_from(superblock, reader, extent_count_max, writer, mutants, None)
        .expect("only a checkpoint can be found wanting")
}

fn recover_from<R: CacheReader>(
    superblock: &Superblock,
    reader: &mut R,
    extent_count_max: u32,
    writer: Writer,
    mutants: Mutants,
    image: Option<(Image, Slots)>,
) -> Option<Recovered> {
    let blocks = superblock.segment_blocks();
    let (image, slots) = image.unzip();
    // A checkpoint's index is read last.
    let (index, slots) = match slots {
        Some(slots) => (Index::new(1, superblock.key), slots),
        None => {
            let count = u64::from(superblock.segment_count) * u64::from(blocks);
            let cells = reader.cells(Index::cell_count(count));
            let slots = Slots::void_over(reader.rows(count as usize));
            (Index::over(count, superblock.key, cells), slots)
        }
    };
    let mut volumes = Vec::with_capacity(VOLUME_COUNT_MAX);
    volumes.resize_with(VOLUME_COUNT_MAX, || None);
    let mut recovery = Recovery {
        superblock,
        reader,
        writer,
        mutants,
        firsts: BTreeMap::new(),
        image: None,
        void: BTreeMap::new(),
        bytes: alloc::vec![0; usize::from(blocks) * BLOCK_SIZE],
        batch: Vec::new(),
        in_bytes: None,
        unflushed: None,
        found: Recovered {
            index,
            slots,
            segments: Segments::new(superblock.segment_count, blocks),
            segment_sequence: superblock.segment_sequence,
            volumes,
            slot_runs: Vec::new(),
            damage: Vec::new(),
            from_checkpoint: false,
        },
        extent_count_max,
        closed_generation: 0,
        epoch: None,
        gaps: Vec::new(),
    };
    match image {
        Some(image) => recovery.use_image(image),
        None => recovery.read_firsts(),
    }
    let mut begun = Vec::new();
    for (index, volume) in superblock.volumes.iter().enumerate() {
        if let Some(volume) = volume {
            begun.push(recovery.begin_volume(VolumeIndex(index as u8), volume)?);
        }
    }
    if recovery.image.is_some() {
        recovery.read_index()?;
    }
    for volume in begun {
        let index = usize::from(volume.index.0);
        recovery.found.volumes[index] = Some(recovery.end_volume(volume));
    }
    // Behind all volumes: what a log has for sure is not taken for another's.
    recovery.fill_gaps();
    let Recovery { mut found, image, .. } = recovery;
    found.end_written();
    if let Some(image) = &image {
        found.slot_runs.clone_from(&image.slot_runs);
    }
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
    next.says_size_again = true; // a cache from before does not
    // What this program does not know it cannot keep true.
    next.autoclear &= AUTOCLEAR_KNOWN;
    next.feature_names.retain(|name| name.mask != 3 || AUTOCLEAR_KNOWN >> name.bit & 1 == 1);
    if !mutants.is(Mutant::GenerationNotRaised) {
        next.open_generation += 1;
    }
    next.segment_sequence = found.segment_sequence;
    // Read by the log alone: segments are taken in another order than the checkpoint has, which whoever can read it would go by (T3 of `checkpoint`).
    if !found.goes_by_checkpoint() && !mutants.is(Mutant::UnreadCheckpointStays) {
        next.checkpoint_sequence = 0;
    }
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
            volume.frozen = found.frozen && !mutants.is(Mutant::FrozenForgotten); // V7
        }
    }
    next
}

/// Up to where a log had come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogEnd {
    /// Of the volume: another one that gets its place is not meant.
    pub attach_generation: u32,
    /// Last sequence of what a guest has written; 0: nothing.
    pub through: Sequence,
}

/// Notes as failed the flushes of volumes whose log ends before its place in `ends` (V10): what is missing was answered,
/// and its guest may live. Says of how many.
pub fn latch_dropped(
    superblock: &mut Superblock,
    found: &Recovered,
    ends: &[LogEnd],
    mutants: Mutants,
) -> usize {
    let mut count = 0;
    for (at, (volume, end)) in superblock.volumes.iter_mut().zip(ends).enumerate() {
        let Some(volume) = volume else { continue };
        let meant = end.attach_generation == volume.attach_generation;
        let is_short = found.end_of(VolumeIndex(at as u8)) < end.through;
        if meant && is_short && !mutants.is(Mutant::DropUnlatched) {
            volume.flush_failed = true;
            count += 1;
        }
    }
    count
}

/// Up to where logs must come for nothing to be missing, for the opening after one that found so much and fails, or that ends while it flushes
/// that; and what was known before it. Where it found nothing out, no end that can be found is enough.
pub fn ends_found(
    superblock: &Superblock,
    found: Option<&Recovered>,
    before: &[LogEnd],
) -> Vec<LogEnd> {
    let volumes = superblock.volumes.iter().zip(before).enumerate();
    let end = |(at, (volume, before)): (usize, (&Option<Volume>, &LogEnd))| {
        let attach_generation = volume.as_ref().map_or(0, |volume| volume.attach_generation);
        let now = match found {
            Some(found) => found.written_end_of(VolumeIndex(at as u8)),
            None => Sequence(u64::MAX),
        };
        let meant = before.attach_generation == attach_generation;
        let through = if meant { now.max(before.through) } else { now };
        LogEnd { attach_generation, through }
    };
    volumes.map(end).collect()
}

impl<R: CacheReader> Recovery<'_, R> {
    /// One volume: its chain, its end, and what a checkpoint holds of it.
    fn begin_volume(&mut self, index: VolumeIndex, recorded: &Volume) -> Option<Begun> {
        let volume = &self.with_image(index, recorded);
        let behind = self.behind_head(index, volume);
        let mut out = RecoveredVolume::empty(self.extent_count_max);
        if !self.image_stands(index, behind.tail, &mut out) {
            return None;
        }
        self.found.damage.extend_from_slice(&behind.damage);
        let chain = self.chain(index, volume, &behind);
        out.clean = self.superblock.clean;
        out.frozen = behind.unknown_end || recorded.frozen; // V7
        out.log.watermark = behind.watermark;
        // The tail itself moves only when what was lost before it has been named again (C4 of `reclaim`).
        let before = self.image_of(index).map_or(recorded.tail, |it| recorded.tail.max(it.tail));
        out.log.tail = behind.told_tail(before);
        out.log.backing_as_of = behind.backing_as_of;
        out.log.flush_epoch = behind.flush_epoch;
        self.base(index, behind.tail, &mut out);
        Some(Begun { index, chain, sequence_max: behind.sequence_max, out })
    }

    /// The rest: what came since the checkpoint, or all of the log.
    fn end_volume(&mut self, begun: Begun) -> RecoveredVolume {
        let Begun { index, chain, sequence_max, mut out } = begun;
        self.apply(index, &chain, &mut out);
        if self.image_of(index).is_some() {
            self.find_cursor(&mut out);
            self.find_unnamed(&mut out);
            self.drop_clean_extents(&mut out);
        }
        // V5
        let reuse = self.mutants.is(Mutant::ReuseSequences);
        let gap = if reuse { 1 } else { SEQUENCE_GAP };
        let top = if reuse { out.log.placed } else { sequence_max.max(out.log.placed) };
        let through = out.log.closed.max(out.log.watermark);
        out.end(Sequence(top.0.max(through.0) + gap));
        out
    }

    /// The whole log, tail to end: what stood when the cache was opened, then what came since.
    fn chain(&mut self, index: VolumeIndex, volume: &Volume, behind: &Behind) -> Steps {
        // What a checkpoint holds need not be read again.
        let start = self.image_of(index).map_or(Head::NONE, |volume| volume.start);
        let tail = behind.tail.max(start.ordinal);
        let is_wanted = |step: &Step| match step {
            Step::Record { header, .. } => {
                header.ordinal >= tail && header.sequence > start.link.sequence
            }
            // By its place in the log, not by its segment alone, which may have been used again.
            Step::Hole { ordinal, block, .. } => {
                *ordinal > start.ordinal
                    || *ordinal == start.ordinal && *block > start.link.block
                    || start == Head::NONE
            }
        };
        let (whole, stood) = self.stood(index, volume, tail);
        let stood = whole.into_iter().chain(stood.iter().flat_map(Steps::iter));
        stood.chain(behind.steps.iter()).filter(is_wanted).collect()
    }

    /// What stood when the cache was opened: from the tail to the head that the superblock names; and before it a hole, if older segments
    /// should be there and cannot be found.
    fn stood(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        tail: Ordinal,
    ) -> (Option<Step>, Vec<Steps>) {
        // Bounded: each turn but the last gives up a life of a segment.
        loop {
            let (wanted, whole) = self.down_from_head(index, volume, tail);
            let mut read = Vec::with_capacity(wanted.len());
            for wanted in wanted.chunks(TOGETHER) {
                read.extend(self.read_segments(index, wanted));
            }
            let void = unlinked(volume.head.link, &wanted, &read);
            if let Some((wanted, life)) = void.or_else(|| self.outlived(index, &wanted, &read))
                && !self.mutants.is(Mutant::VoidLifeCounts)
            {
                self.give_up(index, wanted, life);
                continue;
            }
            let before = |first: &Wanted| Ordinal(first.ordinal.0 - 1);
            let ordinal = wanted.first().map_or(volume.head.ordinal, before);
            let hole = Step::Hole { ordinal, id: SegmentId(u32::MAX), block: 0 };
            return ((!whole).then_some(hole), read);
        }
    }

    /// The segments from the tail to the head, and whether they are all.
    fn down_from_head(
        &mut self,
        index: VolumeIndex,
        volume: &Volume,
        tail: Ordinal,
    ) -> (Vec<Wanted>, bool) {
        let mut ids = Vec::new();
        let mut ordinal = volume.head.ordinal;
        let mut next: Option<(SegmentId, Option<u16>)> = (volume.head != Head::NONE)
            .then_some((volume.head.link.segment, Some(volume.head.used)));
        // From the head down: each segment names the one before it.
        while let Some((id, used)) = next.filter(|_| ordinal >= tail && ordinal.0 > 0) {
            // A log has no more segments than the cache, and each is in it once.
            if ids.len() >= self.superblock.segment_count as usize {
                break;
            }
            ids.push((id, ordinal, used));
            next = self.predecessor(index, id, ordinal);
            ordinal = Ordinal(ordinal.0 - 1);
        }
        let whole = volume.head == Head::NONE || ordinal < tail || ordinal.0 == 0;
        let wanted = |(id, ordinal, used)| Wanted { id, ordinal, used, generation: None };
        (ids.into_iter().rev().map(wanted).collect(), whole)
    }
}

/// The newest segment with another record in the place of the one that the log goes on from, or an older one behind it, and the
/// life that is of. A slot is written once in a life of its segment, so none of that life is the log's own
/// (V8). Lives rise from segment to segment: if the header that links is the older one, it is the void one.
fn unlinked(head: Link, wanted: &[Wanted], read: &[Steps]) -> Option<(Wanted, u64)> {
    let mut link = Some((head, None));
    for (wanted, steps) in wanted.iter().zip(read).rev() {
        for step in steps.iter() {
            let Step::Record { id, block, header, checksum, .. } = &step else { continue };
            let place = *block..*block + header.blocks;
            // Sequences rise within a life: what lies behind the link and is older is of another one.
            let behind = |link: &Link| *block > link.block && header.sequence < link.sequence;
            let covers =
                |link: &Link| link.segment == *id && (place.contains(&link.block) || behind(link));
            let Some((link, by)) = link.filter(|(link, _)| covers(link)) else { continue };
            let found = Link {
                sequence: header.sequence,
                checksum: *checksum,
                segment: *id,
                block: *block,
            };
            if found != link {
                let older = by.filter(|(_, life)| *life < header.segment_sequence);
                return Some(older.unwrap_or((*wanted, header.segment_sequence)));
            }
        }
        link = match steps.first() {
            Some(Step::Record { block: 0, header, .. }) => {
                Some((header.previous, Some((*wanted, header.segment_sequence))))
            }
            _ => None,
        };
    }
    None
}
