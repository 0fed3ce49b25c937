// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A batch is built: which blocks of the log it writes, in which order. That is looked up, sorted and merged a little in each turn
//! ([`Config::build_blocks`]), since all guests wait meanwhile.
//!
//! # Invariants
//!
//! - **K8** A volume whose batch is being built has none: nothing of it is exposed, nothing that goes around the log passes it. What may not
//!   change meanwhile (`Engine::writeback_unbuild` says who does) has it thrown away; what may, the end of what is durable and what
//!   is placed behind it, is looked at again when it begins.

use super::{BATCH_BLOCKS_AFTER_OPENING, Cursor};
use crate::engine::{Config, Engine};
use crate::format::superblock::Order;
use crate::map::slots::Heading;
use crate::mutant::Mutant;
use crate::policy::sorter::Sorter;
use crate::units::{SegmentId, Sequence, Tick, VolumeIndex};

/// The batch that is being built: of one volume at a time.
#[derive(Debug)]
pub(crate) struct Builder {
    build: Option<Build>,
    sorter: Sorter,
    /// Blocks of log, then of the batch, that are looked at in one turn.
    step: u32,
}

#[derive(Clone, Copy, Debug)]
struct Build {
    volume: VolumeIndex,
    lane: usize,
    /// When it was gone on with last.
    at: Option<Tick>,
    /// All of it is collected.
    merges: bool,
    /// Behind the last record of it, with which it `ends`, and behind so many extents.
    cursor: Cursor,
    end: Sequence,
    extents: usize,
    /// Where it begins in the log, in blocks.
    begins_at: u64,
    /// Copies of what was read that its range may have.
    fills_left: u32,
    limits: Limits,
}

/// Where a batch ends at the latest.
#[derive(Clone, Copy, Debug)]
struct Limits {
    blocks: usize,
    /// Blocks of log, but not before it has come behind this sequence (K7).
    space: u64,
    begun: Sequence,
    /// With one more record than that it might not be possible to name what of it is lost.
    safe: usize,
    strict: bool,
}

/// A batch that is built and has not begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Built {
    pub(super) lane: usize,
    pub(super) end: Sequence,
    pub(super) cursor: Cursor,
    /// Extents before its end.
    pub(super) extents: usize,
    /// Blocks that it was made of.
    pub(super) blocks: u32,
}

/// What a turn of building came to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    /// There is more to do, in the next one.
    Unfinished,
    /// Nothing that is dirty is durable.
    Nothing,
    Built(Built),
}

/// A record of the log.
pub(super) struct Record {
    pub(super) segment: SegmentId,
    pub(super) block: u16,
    pub(super) heading: Heading,
    pub(super) last: Sequence,
    /// Behind it.
    pub(super) next: Cursor,
}

impl Builder {
    pub(crate) fn new(config: &Config) -> Builder {
        let (items, step) = (Builder::items(config), config.build_blocks);
        Builder { build: None, sorter: Sorter::new(items, step as usize), step }
    }

    fn items(config: &Config) -> usize {
        config.batch_blocks_max as usize + crate::limits::RECORD_ENTRIES_MAX
    }

    /// Bytes of memory of one.
    pub(crate) fn memory_bytes(config: &Config) -> u64 {
        Sorter::memory_bytes(Builder::items(config), config.build_blocks as usize)
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.sorter.held_bytes()
    }

    /// Whether nothing is being built.
    pub(super) fn is_free(&self) -> bool {
        self.build.is_none()
    }

    /// Whether it builds for this volume.
    pub(crate) fn is_for(&self, volume: VolumeIndex) -> bool {
        self.build.is_some_and(|build| build.volume == volume)
    }

    /// When it goes on: as soon as there is another turn.
    pub(super) fn deadline(&self, volume: VolumeIndex) -> Option<Tick> {
        self.build.filter(|build| build.volume == volume)?.at.map(|at| at.after(1))
    }
}

impl Engine {
    /// Throws away what is built of a batch that has not begun, if anything is (K8).
    pub(crate) fn writeback_unbuild(&mut self, volume: VolumeIndex) {
        let built = self.volume(volume).writeback.built.take().map(|built| built.lane);
        let building = self.builder.build.take_if(|build| build.volume == volume);
        if let Some(lane) = built.or(building.map(|build| build.lane)) {
            self.lanes[lane].taken = false;
            self.lane_left = true; // N2
            self.volume(volume).around.held = false;
        }
    }

    /// The record at a cursor.
    pub(super) fn record_at(&self, volume: VolumeIndex, cursor: Cursor) -> Option<Record> {
        let log = &self.volume_ref(volume)?.log;
        let mut id = cursor.segment.or(log.tail_segment)?;
        let mut block = cursor.block;
        // Two turns at most: a segment in a log has a record.
        while block >= self.segments.get(id).used {
            id = self.segments.get(id).next?;
            block = 0;
        }
        let segment = self.segments.get(id);
        let heading = self.slots.heading(self.segments.slot(id, block));
        let first = segment.first_sequence.0 + u64::from(heading.sequence_offset);
        let last = Sequence(first + u64::from(heading.entries));
        let next = Cursor { segment: Some(id), block: block + heading.blocks };
        Some(Record { segment: id, block, heading, last, next })
    }

    /// Begins to build a batch from the cursor on, in a lane that nobody has.
    pub(super) fn build_begin(&mut self, volume: VolumeIndex, lane: usize) {
        let space = self.batch_space(volume);
        let state = self.volume_ref(volume).expect("it exists");
        let watermark = state.log.watermark;
        let cursor = state.writeback.cursor;
        let begins_at = self.log_at(state, cursor);
        // The first one covers what a crash broke off, every other what was given up (K7).
        let first = state.writeback.batch_cap == BATCH_BLOCKS_AFTER_OPENING;
        let short = self.config.mutants.is(Mutant::BatchShortOfGivenUp);
        let given_up = state.writeback.exposed.filter(|_| !short);
        let spans = self.config.mutants.is(Mutant::StrictSpansFlush);
        let limits = Limits {
            blocks: state.writeback.batch_cap.min(self.config.batch_blocks_max) as usize,
            space: if first { u64::MAX } else { space },
            begun: given_up.map_or(watermark, |exposed| exposed.through),
            safe: if state.writeback.careful { state.extents.room() / 2 } else { usize::MAX },
            strict: state.order == Order::Strict && !spans, // K6
        };
        let fills_left = 4 * self.config.batch_blocks_max;
        self.lanes[lane].taken = true;
        self.lanes[lane].batch.clear();
        self.builder.sorter.clear();
        let (at, merges, end, extents) = (None, false, watermark, 0);
        self.builder.build = Some(Build {
            volume,
            lane,
            at,
            merges,
            cursor,
            end,
            extents,
            begins_at,
            fills_left,
            limits,
        });
    }

    /// Goes on with the batch that is being built. Once in a turn: a turn may have many steps.
    pub(super) fn build_go_on(&mut self) -> Turn {
        let mut build = self.builder.build.take().expect("one is being built");
        if build.at.replace(self.now) == Some(self.now) {
            self.builder.build = Some(build);
            return Turn::Unfinished;
        }
        let mut left = self.builder.step;
        if !build.merges {
            build.merges = self.collect(&mut build, &mut left);
            self.builder.sorter.sort(build.merges);
            if build.merges && build.end <= self.volume(build.volume).log.watermark {
                self.lanes[build.lane].taken = false;
                return Turn::Nothing;
            }
        }
        if !(build.merges && self.merge(build.lane, left)) {
            self.builder.build = Some(build);
            return Turn::Unfinished;
        }
        let Build { lane, end, cursor, extents, .. } = build;
        let blocks = self.lanes[lane].batch.collected() as u32;
        Turn::Built(Built { lane, end, cursor, extents, blocks })
    }

    /// Takes the next records in, so many blocks of log (K1). Says whether that is all. Bounded by the batch's room, and by so many blocks of its
    /// range that are fills. Those before the first that is dirty do not count: a batch that a crash broke off may have begun behind them (`pass_clean`),
    /// and the one that is built again must not end earlier (`BATCH_BLOCKS_AFTER_OPENING`).
    fn collect(&mut self, build: &mut Build, left: &mut u32) -> bool {
        let Build { volume, lane, .. } = *build;
        let Limits { blocks: cap, space, begun, safe, strict } = build.limits;
        let log = &self.volume_ref(volume).expect("it exists").log;
        let beyond = self.config.mutants.is(Mutant::BatchBeyondDurable);
        let durable = if beyond { log.closed } else { log.durable.through };
        let segment_blocks = u64::from(self.geometry.segment_blocks);
        if self.lanes[lane].batch.is_empty() {
            // Its segment may have been given back since.
            build.cursor = self.volume_ref(volume).expect("it exists").writeback.cursor;
        }
        while let Some(record) = self.record_at(volume, build.cursor) {
            let Record { segment: id, block, heading, last, next } = record;
            let blocks = heading.blocks;
            let behind = self.segments.get(id).ordinal.0 * segment_blocks + u64::from(next.block);
            let batch = &self.lanes[lane].batch;
            let (count, is_empty) = (batch.collected(), batch.is_empty());
            let is_full = !batch.has_room(usize::from(blocks))
                || build.fills_left < u32::from(blocks) && !is_empty
                || !is_empty
                    && (strict && heading.begins_epoch
                        || count >= cap
                        || behind - build.begins_at > space && last > begun
                        || count + usize::from(blocks) > safe);
            if last > durable || is_full {
                return true;
            }
            if *left == 0 {
                return false;
            }
            *left = left.saturating_sub(blocks.into());
            let state = self.volumes[usize::from(volume.0)].as_deref_mut().expect("it exists");
            let batch = &mut self.lanes[lane].batch;
            let extents = state.pending_extents.iter().skip(build.extents);
            let count = extents.clone().take_while(|extent| extent.sequence <= last).count();
            if !batch.has_extent_room(count) {
                return true;
            }
            for extent in extents.take(count) {
                batch.push_extent(extent.extent());
            }
            build.extents += count;
            for at in block + 1..block + blocks {
                let slot = self.segments.slot(id, at);
                match self.slots.held(slot) {
                    Some(held) if !held.fill => {
                        self.builder.sorter.push(batch.push(held.lba, slot))
                    }
                    _ if batch.is_empty() => {}
                    _ => build.fills_left = build.fills_left.saturating_sub(1),
                }
            }
            (build.end, build.cursor) = (last, next);
            if batch.is_empty() {
                // What is clean is passed for good.
                state.writeback.cursor = next;
                build.begins_at = behind;
            }
        }
        true
    }

    /// Merges so many of the blocks that were collected. Says whether that is all.
    fn merge(&mut self, lane: usize, left: u32) -> bool {
        let keep_oldest = self.config.mutants.is(Mutant::BatchKeepsOldest);
        let batch = &mut self.lanes[lane].batch;
        for _ in 0..left {
            let Some(key) = self.builder.sorter.pop() else { return true };
            batch.add(key, keep_oldest);
        }
        false
    }
}
