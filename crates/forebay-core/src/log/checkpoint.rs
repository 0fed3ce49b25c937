// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writing a checkpoint: the map as an image, page by page, in the background.
//!
//! A checkpoint *begins* when every log has no open record. What is small is captured then: where
//! each log ends, its extents, the order of the free pool. Index, slots and segments are copied
//! afterwards, each page as it is when its turn comes. That is enough: opening puts the image in
//! place and applies every record behind the beginning in order, so what a page holds too early
//! is put there again, and what it holds of segments that have been used again is swept out.
//!
//! # Invariants
//!
//! - **T1** A checkpoint is named only when its pages and every record placed before its last page
//!   was copied are durable.
//! - **T2** The area that the superblock names is not written.
//! - **T3** Segments are taken from the pool in its order: opening finds what came after a
//!   checkpoint at the front of the pool that it captured.
//!
//! # Not here
//!
//! Reading it back: [`super::image`].

use crate::effect::{Effect, Fault, SuperblockChange};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::format::checkpoint::{
    self, Head, Layout, PAGE_BYTES, PAGE_HEAD, PAGE_SEGMENTS, PAGE_SLOTS, SEGMENT_BYTES,
};
use crate::format::record::Link;
use crate::format::superblock::SUPERBLOCK_SIZE;
use crate::log::segment::State;
use crate::map::extent::Extent;
use crate::memory::vec_bytes;
use crate::mutant::Mutant;
use crate::payload::{Payload, Place};
use crate::units::{BLOCK_BYTES, BLOCK_SIZE, Sequence, VolumeIndex};
use crate::volume::{PendingExtent, Volume};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// A checkpoint begins when this many times its size has been written to the cache since the last:
/// with the headers, one block in 128, that is less than six parts of a hundred of the payload.
const WRITTEN_PER_CHECKPOINT: u64 = 21;
/// Naming it writes both copies of the superblock.
const NAMING_BLOCKS: u64 = 2 * SUPERBLOCK_SIZE as u64 / BLOCK_BYTES;

/// How far a checkpoint has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Idle,
    /// Writing pages from this one on.
    Pages {
        next: u32,
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

/// The checkpoint that is being written, and what is known of the last one.
#[derive(Debug)]
pub(crate) struct Checkpointer {
    pub(crate) stage: Stage,
    /// Number of the last checkpoint that was begun or named.
    pub(crate) sequence: u64,
    pub(crate) area_bytes: u64,
    /// Begin as soon as possible.
    pub(crate) wanted: bool,
    head: Head,
    stream: Vec<u8>,
    /// For each volume what must be durable before it is named.
    ends: Vec<Sequence>,
    /// Where pages are made; taken only while one is.
    page: Option<Box<[u8; BLOCK_SIZE]>>,
    /// Blocks written to the cache as records since the last one began.
    pub(crate) written: u64,
    pub(crate) count: u64,
}

impl Checkpointer {
    pub(crate) fn new(sequence: u64, area_bytes: u64, segment_count: u32, blocks: u16) -> Self {
        let layout = Layout::of(segment_count, blocks);
        let stream_max = checkpoint::stream_pages_max(segment_count) as usize * PAGE_BYTES;
        Checkpointer {
            stage: Stage::Idle,
            sequence,
            area_bytes,
            wanted: false,
            head: Head { layout, stream_pages: 0, stream_bytes: 0, segment_sequence: 0 },
            stream: Vec::with_capacity(stream_max),
            ends: alloc::vec![Sequence(0); crate::limits::VOLUME_COUNT_MAX],
            page: Some(Box::new([0; BLOCK_SIZE])),
            written: 0,
            count: 0,
        }
    }

    pub(crate) fn memory_bytes(segment_count: u32) -> u64 {
        let ends = crate::limits::VOLUME_COUNT_MAX * size_of::<Sequence>();
        u64::from(checkpoint::stream_pages_max(segment_count)) * PAGE_BYTES as u64
            + (ends + BLOCK_SIZE) as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        let page = self.page.as_ref().map_or(0, |page| page.len() as u64);
        vec_bytes(&self.stream) + vec_bytes(&self.ends) + page
    }

    fn page_count(&self) -> u32 {
        self.head.layout.stream_page() + self.head.stream_pages
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
        match self.checkpoint.stage {
            Stage::Idle => {
                let written = self.checkpoint.written;
                let size = u64::from(self.checkpoint.page_count()) + NAMING_BLOCKS;
                let due = size * WRITTEN_PER_CHECKPOINT;
                if (self.checkpoint.wanted || written >= due) && self.tokens.room() > 256 {
                    self.checkpoint_begin(payload);
                }
            }
            Stage::Pages { next, in_flight: false } => self.checkpoint_pages(next, payload),
            Stage::Flushing { in_flight: false } => self.checkpoint_flush(),
            Stage::Naming { in_flight: false } => self.checkpoint_name(),
            Stage::Pages { .. } | Stage::Flushing { .. } | Stage::Naming { .. } => {}
        }
    }

    /// Captures what is small; from here on everything else is copied as it comes.
    fn checkpoint_begin(&mut self, payload: &mut impl Payload) {
        for index in 0..self.volumes.len() {
            let volume = VolumeIndex(index as u8);
            if self.volumes[index].is_none() {
                continue;
            }
            if self.volume(volume).log.open.is_some_and(|open| open.entries > 0) {
                self.close_record(volume, payload);
            }
            // The log goes on in another segment: what lies behind the beginning is whole
            // segments. One that holds nothing yet is that other one already.
            let head = self.volume(volume).log.head;
            if head.is_some_and(|head| self.segments.get(head.segment).used > 0) {
                // A record without an entry is given up, its sequence with it: recovery takes a gap
                // for a record that is missing.
                let log = &mut self.volume(volume).log;
                if let Some(open) = log.open.take() {
                    log.next_sequence = open.sequence;
                }
                self.seal_segment(volume, payload);
            }
        }
        self.checkpoint.wanted = false;
        self.checkpoint.written = 0;
        if !self.index.is_in_pages() {
            return;
        }
        let mut stream = core::mem::take(&mut self.checkpoint.stream);
        stream.clear();
        let fits = self.capture(&mut stream);
        let bytes = stream.len();
        self.checkpoint.stream = stream;
        if !fits {
            return;
        }
        self.checkpoint.sequence += 1; // T2: the other area
        self.checkpoint.head.stream_pages = bytes.div_ceil(PAGE_BYTES) as u32;
        self.checkpoint.head.stream_bytes = bytes as u64;
        self.checkpoint.head.segment_sequence = self.segment_sequence;
        self.checkpoint.stage = Stage::Pages { next: 0, in_flight: false };
        self.checkpoint_pages(0, payload);
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
        true
    }

    fn capture_volume(&self, volume: &Volume, stream: &mut Vec<u8>) {
        let log = &volume.log;
        let (used, ordinal) = match log.last {
            Link::NONE => (0, 0),
            last => {
                let segment = self.segments.get(last.segment);
                (segment.used, segment.ordinal.0)
            }
        };
        let mut put = |value: u64| stream.extend_from_slice(&value.to_le_bytes());
        put(u64::from(volume.index.0));
        put(u64::from(volume.attach_generation));
        put(log.last.sequence.0);
        put(u64::from(log.last.checksum));
        put(u64::from(log.last.segment.0));
        put(u64::from(log.last.block));
        put(log.closed.0);
        put(u64::from(used));
        put(ordinal);
        put(log.next_sequence.0);
        // As in memory: both are true already, whatever the log says of them later.
        put(log.watermark.0);
        put(log.tail.0);
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
    fn checkpoint_pages(&mut self, first: u32, payload: &mut impl Payload) {
        let total = self.checkpoint.page_count();
        if !self.index.is_in_pages() {
            self.checkpoint.stage = Stage::Idle;
            return;
        }
        if first == total {
            for (end, volume) in self.checkpoint.ends.iter_mut().zip(&mut self.volumes) {
                if let Some(volume) = volume {
                    *end = volume.log.placed; // T1
                    volume.log.wanted = volume.log.wanted.max(volume.log.placed);
                }
            }
            self.checkpoint.stage = Stage::Flushing { in_flight: false };
            return self.checkpoint_flush();
        }
        let count = (total - first).min(self.config.checkpoint_frames);
        let sequence = self.checkpoint.sequence;
        let area = checkpoint::area_address(self.checkpoint.area_bytes, sequence);
        let frame = self.config.window_blocks + crate::log::reclaim::CHANCE_COUNT_MAX as u32;
        let mut page = self.checkpoint.page.take().expect("it is put back below");
        for number in first..first + count {
            page.fill(0);
            self.fill_page(number, &mut page);
            let address = area + u64::from(number) * BLOCK_SIZE as u64;
            checkpoint::seal(&mut page, &self.identity, address, sequence, number);
            payload.store(Place::Window { frame: frame + number - first }, &page[..]);
        }
        self.checkpoint.page = Some(page);
        self.checkpoint.stage = Stage::Pages { next: first + count, in_flight: true };
        let token = self.token(Pending::CheckpointPages);
        self.effects.push_back(Effect::WriteArea {
            token,
            address: area + u64::from(first) * BLOCK_SIZE as u64,
            blocks: count as u16,
            from: Place::Window { frame },
        });
    }

    fn fill_page(&self, number: u32, page: &mut [u8; BLOCK_SIZE]) {
        let Head { layout, .. } = self.checkpoint.head;
        let content = &mut page[PAGE_HEAD..];
        let index_at = 1;
        let slots_at = index_at + layout.index_pages;
        let segments_at = slots_at + layout.slot_pages;
        let stream_at = layout.stream_page();
        if number == 0 {
            self.checkpoint.head.encode(page);
        } else if number < slots_at {
            let cells = self.index.page(number - index_at);
            for (bytes, cell) in content.chunks_exact_mut(8).zip(cells) {
                bytes.copy_from_slice(&cell.to_le_bytes());
            }
        } else if number < segments_at {
            let first = (number - slots_at) * PAGE_SLOTS as u32;
            let end = self.segments.count() * u32::from(self.segments.blocks());
            let rows = self.slots.rows(first..end.min(first + PAGE_SLOTS as u32));
            content[..rows.len()].copy_from_slice(rows);
        } else if number < stream_at {
            let first = (number - segments_at) * PAGE_SEGMENTS as u32;
            let end = self.segments.count().min(first + PAGE_SEGMENTS as u32);
            let ids = (first..end).map(crate::units::SegmentId);
            for (bytes, id) in content.chunks_exact_mut(SEGMENT_BYTES).zip(ids) {
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
        } else {
            let from = (number - stream_at) as usize * PAGE_BYTES;
            let bytes = &self.checkpoint.stream[from..];
            let bytes = &bytes[..bytes.len().min(PAGE_BYTES)];
            content[..bytes.len()].copy_from_slice(bytes);
        }
    }

    pub(crate) fn checkpoint_written(&mut self, result: Result<(), Fault>) {
        if result.is_err() {
            return self.fail_cache();
        }
        if let Stage::Pages { in_flight, .. } = &mut self.checkpoint.stage {
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
        self.checkpoint.stage = Stage::Flushing { in_flight: true };
        let token = self.token(Pending::CheckpointFlush);
        self.effects.push_back(Effect::FlushCache { token });
    }

    pub(crate) fn checkpoint_flushed(&mut self, result: Result<(), Fault>) {
        if result.is_err() {
            return self.fail_cache();
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
        if result.is_err() {
            return self.fail_cache();
        }
        self.checkpoint.stage = Stage::Idle;
        self.checkpoint.count += 1;
    }
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
