// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writing a checkpoint: the map as an image, page by page, in the background.
//!
//! A checkpoint *begins* when every log has no open record. What is small is captured then: where
//! each log ends, its extents, the order of the free pool. Index, slots and segments are copied
//! afterwards, each page as it is when its turn comes. That is enough: opening puts the image in
//! place and applies every record behind the beginning in order, so what a page holds too early
//! is put there again, and what it holds of segments that have been used again is swept out.
//!
//! Slots change where the log is appended to, and nowhere else: of a large cache's few runs have
//! changed since the last checkpoint. Those are written, each into that of its two places that is
//! not named; the others are named where they are.
//!
//! # Invariants
//!
//! - **T1** A checkpoint is named only when its pages and every record placed before its last page
//!   was copied are durable; those of nothing but marks, too: the next record links to the one that it names as the last, and the
//!   superblock names that for the end of the log once a cache was opened by it, whatever becomes of the checkpoint.
//! - **T2** Nothing that the checkpoint refers to which the superblock names is written: not its
//!   area but for the places of runs of slots that it has in the other one, nor those.
//! - **T4** What a checkpoint refers to of a run of slots is the run as it was when its turn came:
//!   a run has not changed since it was copied, or is noted as changed before the next is named.
//! - **T3** Segments are taken from the pool in its order: opening finds what came after a
//!   checkpoint at the front of the pool that it captured.
//! - **T5** While pages are copied nothing leaves the map but by what a record says: else some pages have it and what was captured has not, or
//!   the other way round, and the checkpoint is given up.
//! - **T6** What it holds needs no header before its beginning: not even the last one's, which the next record is to repeat.
//!
//! # Not here
//!
//! Reading it back: [`super::image`].

use crate::effect::{Effect, Fault, SuperblockChange};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::format::checkpoint::{
    self, Areas, Head, Layout, PAGE_BYTES, PAGE_HEAD, PAGE_SEGMENTS, PAGE_SLOTS, PAGE_WORDS,
    SEGMENT_BYTES, Written,
};
use crate::format::superblock::{self, SUPERBLOCK_SIZE, Superblock};
use crate::log::chain::Log;
use crate::log::image;
use crate::log::segment::State;
use crate::map::extent::Extent;
use crate::map::index::{MAP_WORDS, PACKED_WORDS_MAX};
use crate::memory::vec_bytes;
use crate::mutant::{Mutant, Mutants};
use crate::payload::{Payload, Place};
use crate::units::{BLOCK_BYTES, BLOCK_SIZE, SegmentId, Sequence, VolumeIndex};
use crate::volume::{PendingExtent, Volume};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// A checkpoint begins when this many times its size has been written to the cache since the last:
/// with the headers, one block in 128, that is less than six parts of a hundred of the payload.
const WRITTEN_PER_CHECKPOINT: u64 = 21;
/// And so many blocks, or a quarter of the cache's: what that adds to an opening is little (2,100
/// headers, a quarter of a million entries), and each checkpoint ends a segment early.
const WRITTEN_LEAST: u64 = (1 << 30) / BLOCK_BYTES;
/// Or so many records, however small: opening reads the header of each.
const RECORDS_LEAST: u64 = 1 << 14;
/// Naming it writes both copies of the superblock.
const NAMING_BLOCKS: u64 = 2 * SUPERBLOCK_SIZE as u64 / BLOCK_BYTES;

/// How far a checkpoint has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Idle,
    /// Writing pages, from [`Checkpointer::next`] on.
    Pages {
        in_flight: bool,
    },
    /// Its pages and the records before its end are being made durable.
    Flushing {
        in_flight: bool,
    },
    /// The superblock is being written, or something else is noted in it first.
    Naming {
        in_flight: bool,
    },
}

/// What pages are written next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Pages of this run of the index.
    Index {
        run: u32,
        page: u32,
    },
    /// Pages of this run of slots, if it is written at all.
    Slots {
        run: u32,
        page: u32,
    },
    /// What has a page of its own from here on: segments, the table of runs, the stream.
    Rest {
        page: u32,
    },
    /// The head.
    Head,
    Nothing,
}

/// Pages of the index, packed, on their way into pages of a run.
struct Packed {
    words: [u64; PACKED_WORDS_MAX],
    /// Which of them are still to be written.
    at: usize,
    end: usize,
    /// The page of the index that is packed next.
    page: u32,
}

impl core::fmt::Debug for Packed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "page {}, words {} of {}", self.page, self.at, self.end)
    }
}

/// The checkpoint that is being written, and what is known of the last one.
#[derive(Debug)]
pub(crate) struct Checkpointer {
    /// Blocks of records that are too few for a checkpoint, whatever it takes.
    least: u64,
    /// Blocks that each takes, cells and slots left out.
    fixed: u64,
    next: Next,
    packed: Box<Packed>,
    /// Pages of each run of the index, as far as they are written.
    index_runs: Vec<u32>,
    /// Where the checkpoint that is named has each run of slots.
    named_runs: Vec<Written>,
    /// Where the one that is being written has it, if it has been copied anew.
    copied_runs: Vec<Option<Written>>,
    pub(crate) stage: Stage,
    /// Number of the last checkpoint that was begun or named.
    pub(crate) sequence: u64,
    /// That of the one that the superblock names; 0: none.
    named: u64,
    pub(crate) areas: Areas,
    /// Begin as soon as possible.
    pub(crate) wanted: bool,
    /// None begins: the cache is to have another size.
    pub(crate) held: bool,
    /// The one that is being written was wanted, ...
    asked: bool,
    /// ... and is of two moments (T5).
    spoiled: bool,
    head: Head,
    stream: Vec<u8>,
    /// For each volume what must be durable before it is named.
    ends: Vec<Sequence>,
    /// Where pages are made; taken only while one is.
    page: Option<Box<[u8; BLOCK_SIZE]>>,
    /// Blocks written to the cache as records since the last one began.
    written: u64,
    /// In so many records.
    records: u64,
    pub(crate) count: u64,
}

impl Checkpointer {
    pub(crate) fn new(superblock: &Superblock, slot_runs: Vec<Written>) -> Self {
        let segment_count = superblock.segment_count;
        let layout = Layout::of(segment_count, superblock.segment_blocks());
        let mut named_runs = slot_runs;
        named_runs.resize(layout.slot_runs() as usize, Written::NEVER);
        let stream_max = checkpoint::stream_pages_max(segment_count) as usize * PAGE_BYTES;
        Checkpointer {
            least: WRITTEN_LEAST.min(layout.slots / 4),
            fixed: u64::from(layout.index_pages) * MAP_WORDS as u64 / PAGE_WORDS as u64
                + u64::from(layout.index_runs())
                + u64::from(1 + layout.segment_pages + layout.run_pages())
                + NAMING_BLOCKS,
            next: Next::Nothing,
            packed: Box::new(Packed { words: [0; PACKED_WORDS_MAX], at: 0, end: 0, page: 0 }),
            index_runs: alloc::vec![0; layout.index_runs() as usize],
            named_runs,
            copied_runs: alloc::vec![None; layout.slot_runs() as usize],
            stage: Stage::Idle,
            sequence: match superblock.checkpoint_sequence {
                // Above every one that was named: each was a change of the superblock.
                0 => superblock.sequence,
                named => named,
            },
            named: superblock.checkpoint_sequence,
            areas: Areas::of(superblock),
            wanted: false,
            held: false,
            asked: false,
            spoiled: false,
            head: Head { layout, stream_pages: 0, stream_bytes: 0, segment_sequence: 0 },
            stream: Vec::with_capacity(stream_max),
            ends: alloc::vec![Sequence(0); crate::limits::VOLUME_COUNT_MAX],
            page: Some(Box::new([0; BLOCK_SIZE])),
            written: 0,
            records: 0,
            count: 0,
        }
    }

    /// A record of so many blocks is being written.
    pub(crate) fn note_record(&mut self, blocks: u16) {
        self.written += u64::from(blocks);
        self.records += 1;
    }

    pub(crate) fn memory_bytes(segment_count: u32, segment_blocks: u16) -> u64 {
        let layout = Layout::of(segment_count, segment_blocks);
        let runs = layout.index_runs() as usize * size_of::<u32>()
            + layout.slot_runs() as usize * (size_of::<Written>() + size_of::<Option<Written>>());
        let ends = crate::limits::VOLUME_COUNT_MAX * size_of::<Sequence>();
        u64::from(checkpoint::stream_pages_max(segment_count)) * PAGE_BYTES as u64
            + (ends + runs + BLOCK_SIZE + size_of::<Packed>()) as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        let page = self.page.as_ref().map_or(0, |page| page.len() as u64);
        let runs = vec_bytes(&self.index_runs)
            + vec_bytes(&self.named_runs)
            + vec_bytes(&self.copied_runs)
            + size_of::<Packed>() as u64;
        vec_bytes(&self.stream) + vec_bytes(&self.ends) + page + runs
    }

    /// Bytes that may be captured.
    pub(crate) fn stream_room(&self) -> usize {
        self.stream.capacity()
    }

    /// Takes memory for so many at most, before the first is captured.
    pub(crate) fn limit_stream(&mut self, bytes: usize) {
        if bytes < self.stream.capacity() {
            self.stream = Vec::with_capacity(bytes);
        }
    }

    /// Where the checkpoint that is named has each run of slots.
    pub(crate) fn named(&self) -> &[Written] {
        &self.named_runs
    }

    /// Whether a run of slots was copied for a checkpoint that is not named.
    pub(crate) fn was_copied(&self, run: u32) -> bool {
        self.copied_runs[run as usize].is_some()
    }

    /// Where the checkpoint that is being written has a run of slots.
    fn slot_run(&self, run: u32) -> Written {
        self.copied_runs[run as usize].unwrap_or(self.named_runs[run as usize])
    }

    /// Where a run of slots goes when it is copied: not where it is named (T2).
    fn slot_run_target(&self, run: u32, mutants: Mutants) -> Written {
        let other = u64::from(!mutants.is(Mutant::CheckpointRunInPlace));
        match self.named_runs[run as usize] {
            Written::NEVER => Written::new(self.sequence, self.sequence),
            named => Written::new(self.sequence, named.area() ^ other),
        }
    }
}

impl Engine {
    /// Wants a checkpoint soon, whatever has been written since the last.
    pub fn want_checkpoint(&mut self) {
        self.checkpoint.wanted = true;
    }

    /// Whether no checkpoint is wanted or under way.
    pub fn is_checkpointed(&self) -> bool {
        self.checkpoint.stage == Stage::Idle && !self.checkpoint.wanted
            || self.health == CacheHealth::Failed
    }

    /// Something left the map of which no record tells (T5).
    pub(crate) fn checkpoint_forgets(&mut self) {
        let copying = matches!(self.checkpoint.stage, Stage::Pages { .. });
        self.checkpoint.spoiled |=
            copying && !self.config.mutants.is(Mutant::CheckpointOfTwoMoments);
    }

    /// Whether one is being written.
    pub(crate) fn is_checkpointing(&self) -> bool {
        self.checkpoint.stage != Stage::Idle
    }

    /// Checkpoints completed since the cache was opened.
    pub fn checkpoint_count(&self) -> u64 {
        self.checkpoint.count
    }

    pub(crate) fn checkpoint_settle(&mut self, payload: &mut impl Payload) {
        if self.health == CacheHealth::Failed {
            return;
        }
        if self.checkpoint.spoiled && self.checkpoint.stage == (Stage::Pages { in_flight: false }) {
            // The next one begins at once: nothing else may happen that it could begin after.
            self.checkpoint.stage = Stage::Idle;
            self.checkpoint.wanted |= self.checkpoint.asked;
        }
        match self.checkpoint.stage {
            Stage::Idle if self.checkpoint.held => {}
            Stage::Idle => {
                let wanted = self.checkpoint.wanted && self.is_behind_bad_headers();
                let due = !self.stopping && self.checkpoint_is_due();
                if (wanted || due) && self.tokens.room() > 256 {
                    self.checkpoint_begin(payload);
                }
            }
            Stage::Pages { in_flight: false } => self.checkpoint_pages(payload),
            Stage::Flushing { in_flight: false } => self.checkpoint_flush(),
            Stage::Naming { in_flight: false } => self.checkpoint_name(),
            Stage::Pages { .. } | Stage::Flushing { .. } | Stage::Naming { .. } => {}
        }
    }

    /// Whether enough has been written as records for what a checkpoint would take now.
    fn checkpoint_is_due(&self) -> bool {
        // Asked after each event: what decides most often is asked first.
        let &Checkpointer { least, fixed, ref head, written, records, .. } = &self.checkpoint;
        if written < least && records < RECORDS_LEAST {
            return false;
        }
        let known = self.index.len() / PAGE_WORDS as u64 + fixed + u64::from(head.stream_pages);
        written >= known * WRITTEN_PER_CHECKPOINT && {
            let changed = self.slots.changed_count() as u64;
            let size = known + changed * u64::from(head.layout.slot_run_pages());
            written >= size * WRITTEN_PER_CHECKPOINT
        }
    }

    /// Ends each log's record and segment.
    pub(crate) fn end_segments(&mut self, payload: &mut impl Payload) {
        for index in 0..self.volumes.len() {
            let volume = VolumeIndex(index as u8);
            if self.volumes[index].is_some() {
                // What lies behind the beginning is whole segments.
                self.end_segment(volume, payload);
            }
        }
    }

    /// Captures what is small; from here on everything else is copied as it comes.
    fn checkpoint_begin(&mut self, payload: &mut impl Payload) {
        self.end_segments(payload);
        self.checkpoint.asked = core::mem::take(&mut self.checkpoint.wanted);
        self.checkpoint.spoiled = false;
        (self.checkpoint.written, self.checkpoint.records) = (0, 0);
        if !self.index.is_in_pages() {
            return;
        }
        let mut stream = core::mem::take(&mut self.checkpoint.stream);
        stream.clear();
        let fits = self.capture(&mut stream);
        let bytes = stream.len();
        self.checkpoint.stream = stream;
        let pages = u64::from(self.checkpoint.head.layout.stream_page())
            + bytes.div_ceil(PAGE_BYTES) as u64;
        // The area was laid out by whoever made the cache: maybe for another program's checkpoints.
        if !fits || pages * BLOCK_BYTES > self.checkpoint.areas.bytes {
            return;
        }
        self.scrub_checkpoint_begins();
        self.checkpoint.sequence += 1;
        // T2: the other area. One was given up perhaps, so the last number need not be the named one's.
        let Checkpointer { sequence, named, ref areas, .. } = self.checkpoint;
        let same = self.config.mutants.is(Mutant::CheckpointInPlace);
        if named != 0 && (areas.begin(sequence) == areas.begin(named)) != same {
            self.checkpoint.sequence += 1;
        }
        self.checkpoint.head.stream_pages = bytes.div_ceil(PAGE_BYTES) as u32;
        self.checkpoint.head.stream_bytes = bytes as u64;
        self.checkpoint.head.segment_sequence = self.segment_sequence;
        // One that was given up is as if it had not been (T4).
        for run in 0..self.checkpoint.head.layout.slot_runs() {
            if self.checkpoint.copied_runs[run as usize].take().is_some() {
                self.slots.note_changed(run, true);
            }
        }
        self.checkpoint.next = Next::Index { run: 0, page: 0 };
        let packed = &mut self.checkpoint.packed;
        (packed.page, packed.at, packed.end) = (0, 0, 0);
        self.checkpoint.stage = Stage::Pages { in_flight: false };
        self.checkpoint_pages(payload);
    }

    /// Volumes, then the free pool in its order. Says whether it fits.
    fn capture(&self, stream: &mut Vec<u8>) -> bool {
        let limit = stream.capacity();
        let volumes = self.volumes.iter().flatten();
        let extents: usize = volumes
            .clone()
            .map(|volume| 256 + 33 * volume.extents.len() + 29 * volume.pending_extents.len())
            .sum();
        let free = self.segments.free().len() * 4 + 4;
        if extents + free + 8 > limit {
            return false;
        }
        stream.extend_from_slice(&(volumes.clone().count() as u32).to_le_bytes());
        for volume in volumes {
            self.capture_volume(volume, stream);
        }
        stream.extend_from_slice(&(self.segments.free().len() as u32).to_le_bytes());
        for id in self.segments.free() {
            stream.extend_from_slice(&id.0.to_le_bytes());
        }
        // What follows can be left out: then the headers themselves must be there.
        let volumes = self.volumes.iter().flatten();
        let items: usize =
            volumes.clone().map(|volume| volume.log.previous_items.as_slice().len()).sum();
        let bytes = volumes.clone().count() * 16 + items * 8;
        let mutants = &self.config.mutants;
        // A scrub that saves too early does harm only where there is no room for it.
        let none =
            mutants.is(Mutant::LastRecordUncaptured) || mutants.is(Mutant::ScrubSavesTooEarly);
        if stream.len() + bytes <= limit && !none {
            volumes.for_each(|volume| capture_last(&volume.log, stream));
        }
        true
    }

    /// A volume, as [`super::image::Stream::volume`] reads it.
    pub(crate) fn capture_volume(&self, volume: &Volume, stream: &mut Vec<u8>) {
        let log = &volume.log;
        // Of a log of which nothing could be read none is there: what was its end is in no segment of it.
        let end = log.end(volume.index, &self.segments).unwrap_or(superblock::Head::NONE);
        let mut put = |value: u64| stream.extend_from_slice(&value.to_le_bytes());
        put(u64::from(volume.index.0) | if volume.has_forgotten() { image::FORGOT } else { 0 });
        put(u64::from(volume.attach_generation));
        put(end.link.sequence.0);
        put(u64::from(end.link.checksum));
        put(u64::from(end.link.segment.0));
        put(u64::from(end.link.block));
        put(end.through.0);
        put(u64::from(end.used));
        put(end.ordinal.0);
        put(log.next_sequence.0);
        // As in memory: both are true already, whatever the log says of them later.
        put(log.watermark.0);
        // The one that is told may be lower: segments before the oldest have been used again.
        let oldest = log.tail_segment.map(|id| self.segments.get(id).ordinal);
        put(oldest.unwrap_or(log.tail).0);
        put(log.flush_epoch);
        put(log.backing_as_of);
        put(log.dirtied.0);
        put(volume.extents.len() as u64);
        put(volume.pending_extents.len() as u64);
        for extent in volume.extents.iter() {
            put_extent(stream, extent);
        }
        for pending in &volume.pending_extents {
            put_pending(stream, pending);
        }
    }

    /// Copies the next pages to the stage and has them written.
    fn checkpoint_pages(&mut self, payload: &mut impl Payload) {
        if !self.index.is_in_pages() {
            self.checkpoint.stage = Stage::Idle;
            return;
        }
        let Some((area, first)) = self.checkpoint_next() else {
            for (end, volume) in self.checkpoint.ends.iter_mut().zip(&mut self.volumes) {
                // A volume that comes to this place before the naming is in no page.
                *end = Sequence(0);
                if let Some(volume) = volume {
                    // T1: the last record may be one of nothing but marks.
                    let log = &mut volume.log;
                    let loose = self.config.mutants.is(Mutant::CheckpointEndNotDurable);
                    *end = if loose { log.placed } else { log.placed.max(log.closed) };
                    log.want(*end);
                }
            }
            self.checkpoint.stage = Stage::Flushing { in_flight: false };
            return self.checkpoint_flush();
        };
        let sequence = self.checkpoint.sequence;
        let area = self.checkpoint.areas.begin(area);
        let at = |number: u32| area + u64::from(number) * BLOCK_BYTES;
        let frame = self.config.window_blocks + crate::log::reclaim::CHANCE_COUNT_MAX as u32;
        let mut page = self.checkpoint.page.take().expect("it is put back below");
        let mut number = first;
        loop {
            page.fill(0);
            self.fill_page(number, &mut page);
            checkpoint::seal(&mut page, &self.identity, at(number), sequence, number);
            payload.store(Place::Window { frame: frame + number - first }, &page[..]);
            number += 1;
            // What follows may lie elsewhere: then it is another write.
            if number - first == self.config.checkpoint_frames
                || self.checkpoint_next().map(|(area, number)| {
                    self.checkpoint.areas.begin(area) + u64::from(number) * BLOCK_BYTES
                }) != Some(at(number))
            {
                break;
            }
        }
        self.checkpoint.page = Some(page);
        self.checkpoint.stage = Stage::Pages { in_flight: true };
        let token = self.token(Pending::CheckpointPages);
        self.effects.push_back(Effect::WriteArea {
            token,
            address: at(first),
            blocks: (number - first) as u16,
            from: Place::Window { frame },
        });
    }

    /// The area and the number of the page that is copied next; none: there is none.
    fn checkpoint_next(&mut self) -> Option<(u64, u32)> {
        let Checkpointer { head: Head { layout, stream_pages, .. }, sequence, .. } =
            self.checkpoint;
        let end = layout.stream_page() + stream_pages;
        loop {
            let next = match self.checkpoint.next {
                Next::Index { run, .. } if run == layout.index_runs() => {
                    Next::Slots { run: 0, page: 0 }
                }
                Next::Index { run, page } => {
                    let packed = &self.checkpoint.packed;
                    if packed.at < packed.end || packed.page < layout.index_pages_of(run).end {
                        return Some((sequence, layout.index_page(run) + page));
                    }
                    self.checkpoint.index_runs[run as usize] = page;
                    Next::Index { run: run + 1, page: 0 }
                }
                Next::Slots { run, .. } if run == layout.slot_runs() => {
                    Next::Rest { page: layout.segment_page() }
                }
                Next::Slots { run, page: 0 } if !self.slots.has_changed(run) => {
                    Next::Slots { run: run + 1, page: 0 }
                }
                Next::Slots { run, page } => {
                    let slots = layout.slots_of(run).len();
                    if (page as usize) < slots.div_ceil(PAGE_SLOTS) {
                        let area = self.checkpoint.slot_run_target(run, self.config.mutants).area();
                        return Some((area, layout.slot_page(run) + page));
                    }
                    Next::Slots { run: run + 1, page: 0 }
                }
                Next::Rest { page } if page < end => return Some((sequence, page)),
                Next::Rest { .. } => Next::Head,
                Next::Head => return Some((sequence, 0)),
                Next::Nothing => return None,
            };
            self.checkpoint.next = next;
        }
    }

    /// Copies what [`Engine::checkpoint_next`] said, and goes on to the next.
    fn fill_page(&mut self, number: u32, page: &mut [u8; BLOCK_SIZE]) {
        let Head { layout, .. } = self.checkpoint.head;
        let content = &mut page[PAGE_HEAD..];
        self.checkpoint.next = match self.checkpoint.next {
            Next::Index { run, page } => {
                let packed = &mut self.checkpoint.packed;
                let mut room = content.as_chunks_mut::<8>().0;
                while !room.is_empty() {
                    if packed.at == packed.end {
                        if packed.page == layout.index_pages_of(run).end {
                            break;
                        }
                        packed.end = self.index.pack_page(packed.page, &mut packed.words);
                        (packed.at, packed.page) = (0, packed.page + 1);
                    }
                    let words = &packed.words[packed.at..packed.end];
                    let count = words.len().min(room.len());
                    let (now, later) = room.split_at_mut(count);
                    for (bytes, word) in now.iter_mut().zip(words) {
                        *bytes = word.to_le_bytes();
                    }
                    packed.at += count;
                    room = later;
                }
                Next::Index { run, page: page + 1 }
            }
            Next::Slots { run, page } => {
                if page == 0 {
                    let target = self.checkpoint.slot_run_target(run, self.config.mutants);
                    self.checkpoint.copied_runs[run as usize] = Some(target);
                    self.slots.note_changed(run, false); // T4: before it is copied
                }
                let slots = layout.slots_of(run);
                let first = slots.start + page * PAGE_SLOTS as u32;
                let rows = self.slots.rows(first..slots.end.min(first + PAGE_SLOTS as u32));
                content[..rows.len()].copy_from_slice(rows);
                Next::Slots { run, page: page + 1 }
            }
            Next::Rest { page } if page < layout.run_page() => {
                self.fill_segments(page - layout.segment_page(), content);
                Next::Rest { page: page + 1 }
            }
            Next::Rest { page } if page < layout.stream_page() => {
                let first = (page - layout.run_page()) * PAGE_WORDS as u32;
                let count = layout.index_runs() + layout.slot_runs();
                for (run, bytes) in (first..count).zip(content.as_chunks_mut::<8>().0) {
                    let word = match run.checked_sub(layout.index_runs()) {
                        None => self.checkpoint.index_runs[run as usize].into(),
                        Some(run) => self.checkpoint.slot_run(run).raw(),
                    };
                    *bytes = word.to_le_bytes();
                }
                Next::Rest { page: page + 1 }
            }
            Next::Rest { page } => {
                let from = (page - layout.stream_page()) as usize * PAGE_BYTES;
                let bytes = &self.checkpoint.stream[from..];
                let bytes = &bytes[..bytes.len().min(PAGE_BYTES)];
                content[..bytes.len()].copy_from_slice(bytes);
                Next::Rest { page: page + 1 }
            }
            Next::Head | Next::Nothing => {
                assert_eq!(number, 0, "the head's page");
                self.checkpoint.head.encode(page);
                Next::Nothing
            }
        };
    }

    fn fill_segments(&self, page: u32, content: &mut [u8]) {
        let first = page * PAGE_SEGMENTS as u32;
        let end = self.segments.total().min(first + PAGE_SEGMENTS as u32);
        let ids = (first..end).map(SegmentId);
        for (bytes, id) in content.chunks_exact_mut(SEGMENT_BYTES).zip(ids) {
            self.fill_segment(id, bytes);
        }
    }

    /// A segment, as [`super::image::row`] reads it.
    pub(crate) fn fill_segment(&self, id: SegmentId, bytes: &mut [u8]) {
        let segment = self.segments.get(id);
        let alive = matches!(segment.state, State::Open | State::Sealed);
        bytes[0] = u8::from(alive);
        bytes[1] = segment.volume.0;
        bytes[2..4].copy_from_slice(&segment.used.to_le_bytes());
        bytes[8..16].copy_from_slice(&segment.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&segment.ordinal.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&segment.first_sequence.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&segment.last_sequence.0.to_le_bytes());
    }

    pub(crate) fn checkpoint_written(&mut self, result: Result<(), Fault>) {
        if result.is_err() {
            return self.fail_cache();
        }
        if let Stage::Pages { in_flight } = &mut self.checkpoint.stage {
            *in_flight = false;
        }
    }

    /// Flushes once every record before the end is written (T1).
    fn checkpoint_flush(&mut self) {
        let volumes = self.checkpoint.ends.iter().zip(&self.volumes);
        let written = |(end, volume): (&Sequence, &Option<Box<Volume>>)| {
            volume.as_ref().is_none_or(|volume| volume.log.durable.through >= *end)
        };
        let early = self.config.mutants.is(Mutant::CheckpointNotDurable);
        if !early && !volumes.into_iter().all(written) {
            return;
        }
        if self.config.mutants.is(Mutant::CheckpointUnflushed) {
            return self.checkpoint_flushed(Ok(()));
        }
        self.checkpoint.stage = Stage::Flushing { in_flight: true };
        let token = self.token(Pending::CheckpointFlush);
        self.effects.push_back(Effect::FlushCache { token });
    }

    pub(crate) fn checkpoint_flushed(&mut self, result: Result<(), Fault>) {
        if !self.counts(result) {
            return;
        }
        self.checkpoint.stage = Stage::Naming { in_flight: false };
        self.checkpoint_name();
    }

    fn checkpoint_name(&mut self) {
        if self.superblock_busy {
            return;
        }
        self.superblock_busy = true;
        self.checkpoint.stage = Stage::Naming { in_flight: true };
        let token = self.token(Pending::CheckpointName);
        let change = SuperblockChange::Checkpoint { sequence: self.checkpoint.sequence };
        self.effects.push_back(Effect::WriteSuperblock { token, change });
    }

    pub(crate) fn checkpoint_named(&mut self, result: Result<(), Fault>) {
        self.superblock_busy = false;
        if !self.counts(result) {
            return;
        }
        let forget = self.config.mutants.is(Mutant::CheckpointRunChangeForgotten);
        let Checkpointer { named_runs, copied_runs, .. } = &mut self.checkpoint;
        for (run, (named, copied)) in (0..).zip(named_runs.iter_mut().zip(copied_runs)) {
            if let Some(copied) = copied.take() {
                *named = copied;
                if forget {
                    self.slots.note_changed(run, false);
                }
            }
        }
        self.checkpoint.named = self.checkpoint.sequence;
        self.checkpoint.stage = Stage::Idle;
        self.checkpoint.count += 1;
        self.scrub_checkpoint_named();
    }
}

/// What the header of a log's last record says, as [`super::image::Stream::last_record`] reads it.
fn capture_last(log: &Log, stream: &mut Vec<u8>) {
    // Not known of one that this opening found: as no epoch is.
    stream.extend_from_slice(&log.record_epoch.to_le_bytes());
    let items = log.previous_items.as_slice();
    stream.extend_from_slice(&(items.len() as u64).to_le_bytes());
    items.iter().for_each(|item| stream.extend_from_slice(&item.to_le_bytes()));
}

fn put_extent(stream: &mut Vec<u8>, extent: &Extent) {
    stream.extend_from_slice(&extent.start.0.to_le_bytes());
    stream.extend_from_slice(&extent.end.0.to_le_bytes());
    stream.extend_from_slice(&extent.position.raw().to_le_bytes());
    stream.push(extent.kind as u8);
    stream.push(u8::from(extent.long));
}

fn put_pending(stream: &mut Vec<u8>, pending: &PendingExtent) {
    stream.extend_from_slice(&pending.sequence.0.to_le_bytes());
    stream.extend_from_slice(&pending.position.raw().to_le_bytes());
    stream.push(pending.kind as u8);
    stream.extend_from_slice(&pending.lba.0.to_le_bytes());
    stream.extend_from_slice(&pending.count.to_le_bytes());
}
