// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A batch begins: where it ends, and what of the log it holds.

use super::{BATCH_BLOCKS_AFTER_OPENING, BATCH_TIME, Cursor, Exposed, Stage};
use crate::engine::Engine;
use crate::format::entry::Kind;
use crate::format::superblock::Order;
use crate::log::lost::Noted;
use crate::map::slots::Heading;
use crate::mutant::Mutant;
use crate::op::around::AroundState;
use crate::payload::Payload;
use crate::policy::lane::{Doubt, Lane, PATIENCE};
use crate::policy::parked::TRIES;
use crate::units::{SegmentId, Sequence, Tick, VolumeIndex};
use crate::volume::Volume;

/// A record of the log.
struct Record {
    segment: SegmentId,
    block: u16,
    heading: Heading,
    last: Sequence,
    /// Behind it.
    next: Cursor,
}

impl Engine {
    pub(super) fn writeback_begin(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let writeback = &mut self.volume(volume).writeback;
        writeback.passing = false;
        let asked = writeback.asks_since.take().unwrap_or(self.now);
        let state = self.volume_ref(volume).expect("it exists");
        let waited_for = self.answers_the_rest && !self.requests.is_empty();
        let stops = self.stopping && !waited_for;
        if !state.serving || stops || self.health == crate::engine::CacheHealth::Failed {
            return;
        }
        let log = &state.log;
        let clean = !log.is_dirty() && log.durable.through <= log.watermark;
        if clean && state.unnamed_lost.is_none() {
            return;
        }
        let clean = !state.log.is_dirty();
        if clean && state.writeback.passed < log.durable.through {
            self.pass_clean(volume);
        }
        let state = self.volume_ref(volume).expect("it exists");
        if !self.writeback_wanted(state) {
            self.volume(volume).around.held = false;
            return;
        }
        if clean {
            if self.name_lost(volume, payload) != Noted::Yes {
                return;
            }
            // Entries that the backing device holds by their nature need no batch.
            let state = self.volume_ref(volume).expect("it exists");
            let log = &state.log;
            let (through, watermark) = (log.durable.through, log.watermark);
            // A note in a segment that is not the newest one pins it as any entry would.
            let pinned = log.clean_end.or(log.tail_segment).filter(|id| log.newest != Some(*id));
            let held = pinned.is_some_and(|id| self.segments.get(id).last_sequence > watermark);
            let state = self.volume(volume);
            if through > watermark && (state.log.placed > watermark || held) {
                state.log.watermark = through;
                state.log.note_wanted = true;
                self.skip_cursor(volume, through);
                self.drop_pending(volume, through);
            }
            return;
        }
        if state.is_only_parked() && self.now < self.parked_due(state) {
            return;
        }
        let Some(lane) = self.find_lane(volume, asked) else { return };
        if !self.may_build(volume) {
            return; // It does not lose its turn.
        }
        if !self.writeback_build(volume, lane) {
            if self.volume(volume).writeback.passing {
                return;
            }
            self.volume(volume).writeback.asks_since = None;
            // All that is dirty is not durable yet.
            let log = &mut self.volume(volume).log;
            if log.wanted <= log.durable.through {
                log.want(log.placed);
            }
            return;
        }
        let now = self.now;
        self.lanes[lane].taken = true;
        let state = self.volume(volume);
        state.writeback.asks_since = None;
        state.writeback.stage = Stage::Writing;
        state.writeback.lane = Some(lane);
        state.writeback.begun = now;
        state.writeback.runs_before = state.stats.batch_runs;
        self.writeback_go_on(volume, payload);
    }

    /// A lane for a batch of a volume that has waited for one since it `asked` (N2 of `lane`), and does until that begins.
    fn find_lane(&mut self, volume: VolumeIndex, asked: Tick) -> Option<usize> {
        let before = self.lanes_asked_before(volume, asked);
        let state = self.volume_ref(volume).expect("it exists");
        let hurries = state.is_waited_for() || self.now.since(asked) >= PATIENCE;
        let volumes = self.all_volumes().count();
        let Engine { lanes, config, .. } = self;
        let found = Lane::find(lanes, volumes, config, before, hurries);
        if found.is_none() {
            self.lane_left |=
                before > 0 && Lane::find(lanes, volumes, config, 0, hurries).is_some();
        }
        self.volume(volume).writeback.asks_since = Some(asked);
        found
    }

    /// How many volumes asked for a lane before this one did, and could begin now. Of what asks at once the first is the one with the
    /// lowest number.
    fn lanes_asked_before(&self, volume: VolumeIndex, asked: Tick) -> usize {
        let before = |other: &&Volume| {
            let around = &other.around;
            let since = other.writeback.asks_since.filter(|_| !around.flushing && !around.held);
            since.is_some_and(|since| (since, other.index) < (asked, volume))
        };
        self.all_volumes().filter(before).count()
    }

    /// While nothing is dirty the cursor follows the log: else the first batch after hours of reads would look at
    /// all that they copied. The watermark stays where it is, and with it what a crash leaves of entries: those count on.
    fn pass_clean(&mut self, volume: VolumeIndex) {
        let through = self.volume(volume).log.durable.through;
        self.volume(volume).writeback.passed = through;
        self.skip_cursor(volume, through);
    }

    /// Whether what goes around the log lets a batch be built (A5 to A7 of `around`).
    fn may_build(&mut self, volume: VolumeIndex) -> bool {
        let early = self.config.mutants.is(Mutant::BatchBeforeFlush);
        let mixed = self.config.mutants.is(Mutant::BatchWhileOverDirty);
        let state = self.volume(volume);
        let AroundState { lost, unflushed, flushing, over_dirty, .. } = state.around;
        if state.order == Order::Batch && !lost && !early && (unflushed || flushing) {
            if unflushed {
                self.around_flush(volume);
            }
            return false;
        }
        state.around.held = over_dirty > 0 && !mixed;
        !state.around.held
    }

    /// Moves the cursor to the end of the last record that ends at or before `through`.
    fn skip_cursor(&mut self, volume: VolumeIndex, through: Sequence) {
        let mut cursor = self.volume(volume).writeback.cursor;
        while let Some(record) = self.record_at(volume, cursor) {
            if record.last > through {
                break;
            }
            cursor = record.next;
        }
        self.volume(volume).writeback.cursor = cursor;
    }

    /// The record at a cursor.
    fn record_at(&self, volume: VolumeIndex, cursor: Cursor) -> Option<Record> {
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

    /// Builds a batch from the cursor on (K1); says whether there is anything to write.
    fn writeback_build(&mut self, volume: VolumeIndex, lane: usize) -> bool {
        let log = &self.volume_ref(volume).expect("it exists").log;
        let beyond = self.config.mutants.is(Mutant::BatchBeyondDurable);
        let durable = if beyond { log.closed } else { log.durable.through };
        let space = self.batch_space(volume);
        let state = self.volume_ref(volume).expect("it exists");
        let watermark = state.log.watermark;
        let mut cursor = state.writeback.cursor;
        let begins_at = self.log_at(state, cursor);
        // The first one covers what a crash broke off, every other what was given up (K7).
        let first = state.writeback.batch_cap == BATCH_BLOCKS_AFTER_OPENING;
        let space = if first { u64::MAX } else { space };
        let short = self.config.mutants.is(Mutant::BatchShortOfGivenUp);
        let given_up = state.writeback.exposed.filter(|_| !short);
        let begun = given_up.map_or(watermark, |exposed| exposed.through);
        let cap = state.writeback.batch_cap.min(self.config.batch_blocks_max) as usize;
        let mut end = watermark;
        let mut extent_at = 0;
        let spans = self.config.mutants.is(Mutant::StrictSpansFlush);
        let strict = state.order == Order::Strict && !spans; // K6
        let safe = if state.writeback.careful { state.extents.room() / 2 } else { usize::MAX };
        self.lanes[lane].batch.clear();
        // Bounded by the batch's room, and by so many blocks of its range that are fills. Those before the first that is
        // dirty do not count, whether what went around the log left entries among them or not: a batch that a crash broke off may have begun
        // behind them (`pass_clean`), and the one that is built again must not end earlier (`BATCH_BLOCKS_AFTER_OPENING`).
        let mut fills_left = 4 * self.config.batch_blocks_max;
        let (mut ahead_left, begin, mut passing) = (fills_left, cursor, false);
        let mut zeroing = 0u64;
        let begins = self.config.mutants.is(Mutant::EntryBeginsBatch);
        while let Some(record) = self.record_at(volume, cursor) {
            let Record { segment: id, block, heading, last, next } = record;
            let blocks = heading.blocks;
            let segment = u64::from(self.geometry.segment_blocks);
            let behind = self.segments.get(id).ordinal.0 * segment + u64::from(next.block);
            let batch = &self.lanes[lane].batch;
            let epoch_ends = strict && heading.begins_epoch && !batch.is_empty();
            if last > durable
                || epoch_ends
                || !batch.has_room(usize::from(blocks))
                || batch.len() >= cap && !batch.is_empty()
                || behind - begins_at > space && last > begun && !batch.is_empty()
                || fills_left < u32::from(blocks) && end > watermark
                || batch.len() + usize::from(blocks) > safe && !batch.is_empty()
                || zeroing >= BATCH_TIME && last > begun && !first
            {
                break;
            }
            if batch.is_empty() && ahead_left < u32::from(blocks) && cursor != begin {
                passing = true;
                break;
            }
            let state = self.volumes[usize::from(volume.0)].as_deref().expect("it exists");
            let batch = &mut self.lanes[lane].batch;
            let extents = state.pending_extents.iter().skip(extent_at);
            let count = extents.clone().take_while(|extent| extent.sequence <= last).count();
            if !batch.has_extent_room(count) {
                break;
            }
            for at in block + 1..block + blocks {
                let slot = self.segments.slot(id, at);
                match self.slots.held(slot) {
                    Some(held) if !held.fill => batch.push(held.lba, slot),
                    _ if batch.is_empty() => ahead_left = ahead_left.saturating_sub(1),
                    _ => fills_left = fills_left.saturating_sub(1),
                }
            }
            for extent in extents.take(count) {
                // There is nothing yet that it would keep from being written: like a fill.
                if extent.kind == Kind::Bypassed && batch.is_empty() && !begins {
                    continue;
                }
                batch.push_extent(extent.extent());
                zeroing = zeroing.saturating_add(state.writeback.takes(extent));
            }
            extent_at += count;
            end = last;
            cursor = next;
        }
        if passing {
            let writeback = &mut self.volume(volume).writeback;
            (writeback.cursor, writeback.passing) = (cursor, true);
            return false;
        }
        // What newer entries void is not written, either (A5 of `around`).
        let raw_blocks = self.lanes[lane].batch.len() as u32;
        if !self.config.mutants.is(Mutant::VoidedWrittenBack) {
            let state = self.volumes[usize::from(volume.0)].as_deref().expect("it exists");
            let batch = &mut self.lanes[lane].batch;
            let newer = state.pending_extents.iter().skip(extent_at);
            for entry in newer.filter(|entry| entry.kind == Kind::Bypassed) {
                batch.push_extent(entry.extent());
            }
        }
        let keep_oldest = self.config.mutants.is(Mutant::BatchKeepsOldest);
        let lane_index = lane;
        let lane = &mut self.lanes[lane];
        let segments = &self.segments;
        lane.batch.seal(&mut self.sort_room, keep_oldest, |slot| {
            let (id, block) = segments.place(slot);
            segments.position(id, block)
        });
        let bounds = lane.batch.bounds();
        lane.runs.clear();
        (lane.next_write, lane.next_piece) = (0, 0);
        (lane.frame_next, lane.frames_used) = (0, 0);
        (lane.next_read, lane.next_read_block, lane.read) = (0, 0, 0);
        (lane.given_out, lane.failed, lane.crowded) = (false, false, false);
        (lane.broken_off, lane.doubt, lane.looked) = (false, Doubt::No, 0);
        (lane.mends, lane.mended) = (None, false);
        (lane.written, lane.stood) = (0, 0);
        assert!(lane.under_way == 0, "a lane is free only when nothing of it is under way");
        lane.parts.clear();
        lane.zeros.clear();
        (lane.works, lane.refusals, lane.probes, lane.put_off) = (false, 0, 0, false);
        let now = self.now;
        let parked = &self.volume(volume).parked;
        let parking = parked.tries >= TRIES || !parked.is_empty();
        let trying = now >= parked.due;
        let lane = &mut self.lanes[lane_index];
        (lane.parking, lane.trying) = (parking, trying);
        let state = self.volume(volume);
        if let Some((first, behind)) = bounds {
            let exposed = Exposed { start: first, end: behind, since: now, through: end };
            state.writeback.exposed = Some(exposed.with(state.writeback.exposed));
        }
        state.writeback.end = end;
        state.writeback.end_cursor = cursor;
        state.writeback.batch_blocks = raw_blocks;
        end > state.log.watermark
    }
}
