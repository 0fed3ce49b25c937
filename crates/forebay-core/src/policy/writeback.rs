// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Write-back: copying what is dirty to the backing device, batch by batch, in log order.
//!
//! # Invariants
//!
//! - **K1** A batch ends at or before what is durable.
//! - **K2** In this order: the batch's writes, a flush of the backing device, the watermark
//!   durable, the first write of the next batch.
//! - **K3** No two writes to one backing device that overlap are in flight.
//! - **K4** A block is verified before it is written back; a bad one is lost, and named when the rest
//!   of its batch is on the backing device, before the watermark moves. A cache device that is gone, or out of order for a while, reads
//!   nothing and has lost nothing: so what is bad is looked at once more, `lost_after` later, and before and behind that the device must read
//!   something else, or has failed, and flush well. (A flush alone says nothing: the kernel answers that for a device without a volatile cache, gone
//!   or not.)
//!   What can be read then is written, and the backing device flushed again.
//! - **K5** A batch during which any flush of its backing device failed is written again, all of it.
//! - **K6** With order strict a batch holds nothing of two flush epochs: it ends where the guest flushed.
//! - **K7** A batch that follows one that was given up ends where that did, or later: else the backing device would be
//!   ahead of the watermark when this one is done. But for lost blocks that have no room (`careful`).
//!
//! # States
//!
//! | from     | to       | when |
//! |----------|----------|------|
//! | idle     | writing  | there is reason to, and a lane is free |
//! | writing  | flushing | every run is written |
//! | flushing | noting   | the backing device says it is durable |
//! | noting   | idle     | the watermark is durable |
//! | writing  | writing  | some blocks are refused, try after try: they are parked (`parked`), the rest is written |
//! | writing, flushing | waiting | the backing device failed, or what was found lost could not be named: the batch is given up, to be built again |
//! | waiting  | idle     | after `retry_after` |
//!
//! # Crash
//!
//! The batch in flight is written again; nothing else is (P5).
//!
//! `begin` and `end` are a batch's beginning and end, `doubt` is about what it could not read, this file what is between them.

mod begin;
mod doubt;
mod end;

use crate::effect::{Effect, Fault};
use crate::engine::{Engine, Pending};
use crate::format::entry::Kind;
use crate::limits::TOKENS_LEFT;
use crate::mutant::Mutant;
use crate::op::read::behind;
use crate::payload::{Payload, Place};
use crate::policy::batch::{RUN_BLOCKS_MAX, Stretch};
use crate::policy::lane::{Doubt, PATIENCE, Part, Run, RunState};
use crate::policy::parked::{PROBES_MAX, PROBES_WIDE};
use crate::policy::pieces::Pieces;
use crate::policy::slices::Side;
use crate::units::{Lba, SegmentId, Sequence, Tick, VolumeIndex};
use crate::volume::{PendingExtent, Volume};

/// What a batch should take, in nanoseconds (P4). Where the device is shared with readers, less makes
/// batches smaller, hence less dense, hence slower, and so on.
const BATCH_TIME: u64 = 45_000_000_000;
/// Blocks of a first batch, before anything is known of the device's speed.
const BATCH_BLOCKS_FIRST: u32 = 4096;
/// The first batch after an opening takes all it can hold: it covers whatever batch was under way
/// before, so that the backing device is not left ahead of the watermark. Where that one may have held more (`batch_blocks_most`),
/// what it may have written counts as exposed until all is written back that was there.
const BATCH_BLOCKS_AFTER_OPENING: u32 = u32::MAX;
const BATCH_BLOCKS_MIN: u32 = 512;

/// Where a batch begins or ends: at a record's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The segment; none: the log's first.
    pub segment: Option<SegmentId>,
    /// The block.
    pub block: u16,
}

/// What write-back of a volume is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Nothing.
    Idle,
    /// Writing a batch.
    Writing,
    /// Flushing the backing device.
    Flushing,
    /// Making the watermark durable.
    Noting,
    /// Waiting after a failure of the backing device.
    Waiting {
        /// Until then.
        until: Tick,
    },
}

/// Write-back of one volume.
#[derive(Debug)]
pub struct Writeback {
    pub(crate) stage: Stage,
    pub(crate) cursor: Cursor,
    /// What is durable up to here is not before the cursor, if nothing was dirty then.
    passed: Sequence,
    pub(crate) lane: Option<usize>,
    /// It has waited for a lane since then (N2 of `lane`).
    pub(crate) asks_since: Option<Tick>,
    /// While a batch is written, and if one was given up or broken off: between which blocks the backing
    /// device may hold more than the watermark says, and the end of the last batch that wrote there.
    pub(crate) exposed: Option<Exposed>,
    /// Where the batch ends.
    end: Sequence,
    pub(super) end_cursor: Cursor,
    pub(super) begun: Tick,
    /// Blocks of its range, superseded ones included.
    batch_blocks: u32,
    batch_cap: u32,
    /// Runs of all batches before it.
    runs_before: u64,
    pub(crate) pace: Option<Pace>,
    /// Since when something is dirty that no batch has had yet.
    pub(crate) dirty_since: Option<Tick>,
    /// Since when there was always something dirty.
    pub(crate) dirty_from: Option<Tick>,
    /// The last thing the backing device was told failed.
    pub(crate) failing: bool,
    /// No batch holds more than what could be noted if all of it were lost, but for one record.
    pub(crate) careful: bool,
    /// The cursor passes what is clean, and has not come to what is dirty yet.
    pub(crate) passing: bool,
    /// Not even one record could be written back: lost blocks have all the room there is.
    pub(crate) stuck: bool,
    zeros: Pieces,
    discards: Pieces,
}

impl Writeback {
    /// Whether nothing of a batch is under way on the backing device.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.is_idle() || self.stage == Stage::Noting
    }

    /// Whether no batch is under way.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Idle | Stage::Waiting { .. })
    }

    pub(crate) fn new(cursor: Cursor, _now: Tick) -> Writeback {
        Writeback {
            stage: Stage::Idle,
            cursor,
            passed: Sequence(0),
            lane: None,
            asks_since: None,
            exposed: None,
            end: Sequence(0),
            end_cursor: cursor,
            begun: Tick(0),
            batch_blocks: 0,
            batch_cap: BATCH_BLOCKS_AFTER_OPENING,
            runs_before: 0,
            pace: None,
            dirty_since: None,
            dirty_from: None,
            failing: false,
            careful: false,
            passing: false,
            stuck: false,
            zeros: Pieces::new(),
            discards: Pieces::new(),
        }
    }

    /// What an extent takes, in nanoseconds.
    fn takes(&self, extent: &PendingExtent) -> u64 {
        let blocks = extent.count.into();
        match extent.kind {
            Kind::Zero => self.zeros.takes(blocks),
            Kind::Discard => self.discards.takes(blocks),
            _ => 0,
        }
    }

    /// How much of that kind may be under way.
    fn pieces(&mut self, kind: Kind) -> &mut Pieces {
        if kind == Kind::Zero { &mut self.zeros } else { &mut self.discards }
    }
}

/// What the last batch took, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// For each run of adjacent blocks that it wrote.
    pub(crate) run: u64,
    /// For each block of log, headers, superseded ones and copies of what was read included: so fast room is made.
    pub(crate) space: u64,
}

/// Where and since when the backing device may be a mixture of two states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// First block.
    pub start: Lba,
    /// Block after the last.
    pub end: Lba,
    /// Since then.
    pub since: Tick,
    /// Until a batch ends there or behind it.
    pub(crate) through: Sequence,
}

impl Exposed {
    /// All of a volume: a batch may have been broken off when the cache was opened, up to `through`.
    pub(crate) fn all(blocks: u64, now: Tick, through: Sequence) -> Exposed {
        Exposed { start: Lba(0), end: Lba(blocks), since: now, through }
    }

    /// This and what was exposed before.
    pub(crate) fn with(self, before: Option<Exposed>) -> Exposed {
        let Some(before) = before else { return self };
        Exposed {
            start: before.start.min(self.start),
            end: before.end.max(self.end),
            since: before.since,
            through: before.through.max(self.through),
        }
    }
}

/// An effect of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    volume: VolumeIndex,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Read {
        run: u32,
        offset: u16,
        segment: SegmentId,
        block: u16,
        blocks: u16,
        again: bool,
    },
    Write {
        part: Part,
    },
    /// It covers so many of the writes that went around the log.
    Flush {
        around: u64,
    },
    /// A block of the backing device is read to see whether that does anything at all: nobody need do anything for a flush where nothing is to
    /// be flushed, so one that is gone may answer that.
    Touch {
        /// Which of three.
        place: usize,
    },
    /// A flush that asks the same, of one that reads.
    Probe,
    /// A block that could not be read is, once more.
    Look {
        item: usize,
        segment: SegmentId,
        block: u16,
    },
    /// It could be, and is written.
    Mend {
        item: usize,
    },
    /// A block of the cache device is read for the same reason, ...
    TouchCache {
        /// Which of some.
        place: usize,
    },
    /// ... and then it is flushed.
    AskCache,
}

/// What is known of a block's segment and slot is fetched so many reads before its own.
const READ_SOON: usize = 8;

impl Engine {
    /// Goes on with the volume's write-back as far as it can.
    pub(crate) fn writeback_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let (now, wall) = (self.now, self.wall);
        let state = self.volume(volume);
        state.log.times.note(state.log.placed, now, wall);
        let writeback = &mut state.writeback;
        if state.log.is_dirty() {
            writeback.dirty_since.get_or_insert(now);
            writeback.dirty_from.get_or_insert(now);
        } else {
            (writeback.dirty_since, writeback.dirty_from) = (None, None);
        }
        match state.writeback.stage {
            Stage::Idle => self.writeback_begin(volume, payload),
            Stage::Writing => {
                let lane = state.writeback.lane.expect("a batch has a lane");
                let seen = core::mem::replace(&mut self.lanes[lane].seen, self.completions);
                // What it waits for comes with a completion, whosever it is.
                if seen != self.completions {
                    self.writeback_go_on(volume, payload);
                }
            }
            Stage::Flushing => {
                let lane = state.writeback.lane.expect("a batch has a lane");
                if self.lanes[lane].under_way == 0 {
                    self.writeback_flushed(volume, lane, payload); // K4
                    if self.lanes[lane].failed {
                        self.writeback_go_on(volume, payload);
                    }
                }
            }
            Stage::Noting => {
                let loose = self.config.mutants.is(Mutant::WatermarkNotDurableBeforeNextBatch);
                let state = self.volume(volume);
                if state.log.durable.watermark >= state.writeback.end || loose {
                    state.writeback.stage = Stage::Idle;
                    self.writeback_begin(volume, payload);
                }
            }
            Stage::Waiting { until } => {
                if now >= until {
                    self.volume(volume).writeback.stage = Stage::Idle;
                    self.writeback_begin(volume, payload);
                }
            }
        }
    }

    /// A volume with so many dirty blocks is written back.
    #[inline]
    pub(crate) fn dirty_limit(&self) -> u64 {
        let percent = u32::from(self.config.dirty_percent);
        let clean_segments = u64::from(percent * self.segments.count()) / 100;
        (clean_segments + 1) * u64::from(self.geometry.segment_blocks)
    }

    fn writeback_wanted(&self, volume: &Volume) -> bool {
        let extents = volume.pending_extents.len() as u64;
        volume.is_through()
            // Also if it has another mode by now.
            || !volume.through_waiters.is_empty()
            || volume.starved
            || volume.settles_to_grow()
            || volume.log.going > 0
            || volume.unsafe_through > volume.log.watermark
            || extents * 2 > u64::from(self.config.extent_count_max)
            || volume.log.dirty_blocks >= self.dirty_limit()
            || volume.delay.is_felt()
            || volume
                .writeback
                .dirty_since
                .is_some_and(|since| self.now.since(since) >= self.config.dirty_age)
            // What is clean only needs to be told so.
            // Who holds no more than is reserved for it would give nothing.
            || self.gives(volume)
                && if volume.log.is_dirty() { self.pool_is_low() } else { self.pool_wants_notes() }
    }

    pub(crate) fn writeback_go_on(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let lane = self.volume(volume).writeback.lane.expect("a batch has a lane");
        if self.lanes[lane].failed {
            let now = self.now;
            self.slices(volume).batch_wants(volume, false, now);
            if self.lanes[lane].under_way == 0 && self.writeback_give_up(volume, lane) {
                self.writeback_begin(volume, payload);
            }
            return;
        }
        // Bounded: each turn ends a run, which may give frames back for the next one.
        loop {
            self.writeback_read_ahead(lane, payload);
            self.writeback_read(volume, lane, payload);
            self.writeback_write(volume, lane);
            let lane_state = &self.lanes[lane];
            let before = lane_state.runs.len();
            while let Some(run) = self.lanes[lane].runs.front().copied()
                && run.state == RunState::Done
                && (!run.refused || self.park_run(volume, lane, run, payload))
            {
                let lane_state = &mut self.lanes[lane];
                lane_state.runs.pop();
                lane_state.written += if run.frames > 0 { run.stretch.blocks } else { 0 };
                lane_state.frames_used -= run.frames;
                if run.stretch.kind == Kind::Data {
                    lane_state.read -= run.stretch.blocks as u32;
                }
            }
            let lane_state = &self.lanes[lane];
            if lane_state.failed {
                if lane_state.under_way == 0 && self.writeback_give_up(volume, lane) {
                    self.writeback_begin(volume, payload);
                }
                return;
            }
            if lane_state.given_out && lane_state.runs.is_empty() {
                // The device is being asked still whether it does anything, and has done all meanwhile.
                if lane_state.under_way > 0 {
                    return;
                }
                if self.writeback_is_passed(volume) {
                    return;
                }
                return self.writeback_flush(volume, lane, payload);
            }
            if lane_state.runs.len() == before {
                return;
            }
        }
    }

    /// Takes stretches as long as there is room.
    fn writeback_read_ahead(&mut self, lane: usize, payload: &mut impl Payload) {
        loop {
            let room = self.token_room();
            let state = &mut self.lanes[lane];
            if state.given_out || state.runs.is_full() || room < 1024 {
                return;
            }
            // The longest stretch there can be must fit before one is taken.
            let longest = RUN_BLOCKS_MAX as u32;
            let Some((frame, frames)) = state.take_frames(longest.min(state.frame_count / 2))
            else {
                return;
            };
            let limit = longest.min(state.frame_count / 2);
            let Some(stretch) = state.batch.next_stretch(limit as usize) else {
                state.given_out = true;
                state.frames_used -= frames;
                return;
            };
            // What it does not need goes back.
            let blocks = if stretch.kind == Kind::Data { stretch.blocks as u32 } else { 0 };
            let spare = limit - blocks;
            for at in 0..blocks as usize {
                payload.prefetch(state.batch.place(stretch.item + at));
            }
            state.frames_used -= spare;
            state.frame_next -= spare;
            let run = Run {
                stretch,
                frame,
                frames: frames - spare,
                state: RunState::Reading,
                remaining: blocks as u16,
                refused: false,
            };
            state.runs.push(run);
        }
    }

    /// Has the blocks of runs read from the cache, in order, as many at once as may be.
    fn writeback_read(&mut self, volume: VolumeIndex, lane: usize, payload: &mut impl Payload) {
        loop {
            let room = self.token_room();
            let Engine { lanes, segments, slots, .. } = self;
            let state = &mut lanes[lane];
            let left = state.may_read();
            if left == 0 || room <= TOKENS_LEFT {
                return;
            }
            let Some(Run { stretch, frame, .. }) = state.unread().copied() else { return };
            let (number, offset) = (state.next_read, state.next_read_block);
            let blocks = stretch.blocks as u16;
            let most = blocks.min(offset + left as u16);
            let slot_at = |at: u16| state.batch.slot(stretch.item + usize::from(at));
            let (segment, block) = segments.place(slot_at(offset).expect("not lost yet"));
            let mut count = 1;
            while offset + count < most
                && slot_at(offset + count).map(|slot| segments.place(slot))
                    == Some((segment, block + count))
            {
                count += 1;
            }
            if let Some(slot) = state.batch.later(stretch.item + usize::from(offset) + READ_SOON) {
                payload.prefetch(segments.row(slot));
                payload.prefetch(slots.row(slot));
            }
            let to = Place::Window { frame: frame + u32::from(offset) };
            state.next_read_block = offset + count;
            if offset + count == blocks {
                (state.next_read, state.next_read_block) = (number.wrapping_add(1), 0);
            }
            match segments.get(segment).buffer {
                Some(buffer) => {
                    payload.copy(Place::Buffer { buffer, block }, to, count);
                    state.read += u32::from(count);
                    state.run(number).remaining -= count;
                }
                None => {
                    let what = What::Read {
                        run: number,
                        offset,
                        segment,
                        block,
                        blocks: count,
                        again: false,
                    };
                    self.writeback_read_piece(volume, lane, what, to);
                }
            }
        }
    }

    fn writeback_read_piece(&mut self, volume: VolumeIndex, lane: usize, what: What, to: Place) {
        let What::Read { segment, block, blocks, .. } = what else {
            unreachable!("a read");
        };
        self.segments.get_mut(segment).readers += 1;
        self.lanes[lane].under_way += 1;
        self.lanes[lane].reading += u32::from(blocks);
        let token = self.token(Pending::Writeback(Work { volume, what }));
        self.effects.push_back(Effect::ReadCache { token, segment, block, blocks, to });
    }

    /// Writes the runs that are ready, in order.
    fn writeback_write(&mut self, volume: VolumeIndex, lane: usize) {
        let (limit, now) = (self.config.backing_in_flight, self.now);
        let ignored = self.config.mutants.is(Mutant::TurnIgnored);
        self.slices(volume).batch_wants(volume, true, now);
        loop {
            // A run of which blocks are lost may be half as many writes.
            let room = self.token_room() > TOKENS_LEFT + RUN_BLOCKS_MAX / 2;
            let state = &mut self.lanes[lane];
            let number = state.next_write;
            if state.writes_under_way >= limit || !room {
                return;
            }
            let under_way = u32::from(state.writes_under_way);
            let held = !state.works && state.probes > PROBES_MAX;
            let wide = state.works || state.probes + under_way < PROBES_WIDE;
            if !state.parts.is_empty() && (wide || !held && under_way == 0) {
                if !self.slices(volume).may_write_back(volume, now) && !ignored {
                    return;
                }
                let parts = &mut self.lanes[lane].parts;
                let part = if wide { parts.pop_front() } else { parts.pop_back() };
                self.writeback_write_part(volume, lane, part.expect("there is one"));
                continue;
            }
            let Some(run) = state.runs.get(number).copied() else {
                // Q3 of `parked`
                state.failed |= held && state.writes_under_way == 0 && !state.parts.is_empty();
                return;
            };
            // What remains of zeros that are being written is not to come from the cache.
            let is_read = run.remaining == 0 || run.state == RunState::Writing;
            if !is_read || !self.slices(volume).may_write_back(volume, now) && !ignored {
                return;
            }
            if run.stretch.kind != Kind::Data {
                if !self.writeback_write_piece(volume, lane, number, run) {
                    return;
                }
                continue;
            }
            let state = &mut self.lanes[lane];
            state.next_write = number.wrapping_add(1);
            self.volume(volume).stats.batch_runs += 1;
            self.writeback_write_run(volume, lane, number, run);
        }
    }

    /// Has as much zeroed or discarded of a run as may be now (Z1 of `pieces`); says whether that is anything.
    fn writeback_write_piece(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        number: u32,
        run: Run,
    ) -> bool {
        let Stretch { kind, blocks, .. } = run.stretch;
        let from = self.lanes[lane].next_piece;
        let state = self.volume(volume);
        let Some(piece) = state.writeback.pieces(kind).next(blocks - from) else { return false };
        state.stats.batch_runs += u64::from(from == 0);
        let state = &mut self.lanes[lane];
        state.next_piece = from + piece;
        if state.next_piece == blocks {
            (state.next_write, state.next_piece) = (number.wrapping_add(1), 0);
        }
        let run = state.run(number);
        run.state = RunState::Writing;
        run.remaining += 1;
        self.writeback_write_part(volume, lane, Part { run: number, from, blocks: piece });
        true
    }

    fn writeback_write_run(&mut self, volume: VolumeIndex, lane: usize, number: u32, run: Run) {
        let Stretch { lba, blocks, item, .. } = run.stretch;
        let parked = &self.volumes[usize::from(volume.0)].as_deref().expect("it exists").parked;
        let state = &mut self.lanes[lane];
        state.run(number).state = RunState::Writing;
        if parked.is_empty() && state.batch.is_whole() {
            state.run(number).remaining += 1;
            return self.writeback_write_part(volume, lane, Part { run: number, from: 0, blocks });
        }
        if !state.trying && parked.overlaps(lba, lba + blocks) {
            for at in (0..blocks).filter(|at| parked.contains(lba + *at)) {
                if state.batch.is_written(item + at as usize) {
                    state.batch.refuse(item + at as usize);
                    state.run(number).refused = true;
                }
            }
        }
        // One write, unless a block in between was lost or is not tried now.
        let mut from = 0;
        while from < blocks {
            let goes = |at: u64| self.lanes[lane].batch.is_written(item + at as usize);
            let mut to = from;
            while to < blocks && goes(to) {
                to += 1;
            }
            if to > from {
                self.lanes[lane].run(number).remaining += 1;
                let part = Part { run: number, from, blocks: to - from };
                self.writeback_write_part(volume, lane, part);
            }
            from = to + 1;
        }
        if self.lanes[lane].run(number).remaining == 0 {
            self.lanes[lane].run(number).state = RunState::Done;
        }
    }

    fn writeback_write_part(&mut self, volume: VolumeIndex, lane: usize, part: Part) {
        let Part { run, from, blocks } = part;
        let now = self.now;
        let state = &mut self.lanes[lane];
        state.write_begins(now);
        let Run { stretch, frame, .. } = *state.run(run);
        let lba = stretch.lba + from;
        self.slices(volume).begin(Side::WriteBack);
        if stretch.kind != Kind::Data {
            self.volume(volume).writeback.pieces(stretch.kind).begin(blocks, now);
        }
        let token = self.token(Pending::Writeback(Work { volume, what: What::Write { part } }));
        let effect = match stretch.kind {
            Kind::Data => {
                let stats = &mut self.volume(volume).stats;
                stats.backing_writes += 1;
                let from = behind(Place::Window { frame }, from as u16);
                Effect::WriteBacking { token, volume, lba, blocks: blocks as u16, from }
            }
            Kind::Zero => Effect::ZeroBacking { token, volume, lba, blocks },
            _ => Effect::DiscardBacking { token, volume, lba, blocks },
        };
        self.effects.push_back(effect);
    }

    pub(crate) fn writeback_complete(
        &mut self,
        work: Work,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let volume = work.volume;
        let lane = self.volume(volume).writeback.lane.expect("a batch has a lane");
        self.lanes[lane].under_way -= 1;
        match work.what {
            What::Read { .. } => self.writeback_was_read(volume, lane, work.what, result, payload),
            What::Write { part } => {
                let now = self.now;
                self.slices(volume).end(Side::WriteBack, now);
                self.lanes[lane].write_ends(now);
                let kind = self.lanes[lane].run(part.run).stretch.kind;
                let state = self.volume(volume);
                if kind != Kind::Data {
                    // A refused discard counts as one that is done (`writeback_refused`).
                    let tells = result.is_ok() || kind == Kind::Discard;
                    state.writeback.pieces(kind).end(part.blocks, tells, now);
                } else if result.is_ok() {
                    state.stats.backing_blocks_written += part.blocks;
                }
                let counts = self.config.mutants.is(Mutant::RefusedWriteCounts);
                match result.is_ok() || counts {
                    true => self.writeback_took(volume, lane, part),
                    false => self.writeback_refused(volume, lane, part),
                }
                // Of zeros there may be more to come.
                let is_given = part.run != self.lanes[lane].next_write;
                let run = self.lanes[lane].run(part.run);
                run.remaining -= 1;
                if run.remaining == 0 && is_given {
                    run.state = RunState::Done;
                    self.around_behind(volume);
                }
            }
            What::Look { item, segment, block } => {
                self.looked(lane, (item, segment, block), result, payload);
                self.writeback_flushed(volume, lane, payload);
            }
            What::Mend { item } => {
                self.mended(volume, lane, item, result);
                self.writeback_flushed(volume, lane, payload);
            }
            What::AskCache => match self.counts(result) {
                true => self.writeback_flushed(volume, lane, payload),
                false => self.cache_silent(volume, lane, payload),
            },
            What::TouchCache { place } => {
                self.touched_cache(volume, lane, place, result, payload);
            }
            // It has written something meanwhile.
            What::Touch { .. } if self.lanes[lane].works => {}
            What::Touch { place } => match result {
                Ok(()) => self.flush_to_probe(volume, lane),
                // That block may be bad itself.
                Err(Fault) if place < 2 => self.touch_backing(volume, lane, place + 1),
                Err(Fault) => self.lanes[lane].failed = true,
            },
            What::Probe => {
                self.backing_flushed(volume, result, payload);
                self.lanes[lane].works = result.is_ok();
                self.lanes[lane].failed |= result.is_err();
            }
            What::Flush { around } => {
                let counts = self.config.mutants.is(Mutant::FailedBackingFlushCounts);
                let result = if counts { Ok(()) } else { result };
                self.backing_flushed(volume, result, payload);
                if result.is_ok() {
                    let state = &mut self.volume(volume).around;
                    state.unflushed &= state.done > around;
                }
                self.lanes[lane].failed |= result.is_err();
                self.writeback_flushed(volume, lane, payload);
            }
        }
    }

    /// Blocks for a run have come from the cache (K4).
    fn writeback_was_read(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        what: What,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let What::Read { run, offset, segment, block, blocks, again } = what else {
            unreachable!("a read");
        };
        let now = self.now;
        let frame = self.lanes[lane].run(run).frame;
        self.lanes[lane].reading -= u32::from(blocks);
        for at in 0..blocks {
            let place = Place::Window { frame: frame + u32::from(offset + at) };
            let unchecked = self.config.mutants.is(Mutant::SkipWritebackChecksum);
            let good =
                result.is_ok() && (unchecked || self.verify(segment, block + at, place, payload));
            let (offset, block) = (offset + at, block + at);
            // Where no more may be under way it is taken for bad at first, and looked at once more later (K4).
            if !good && !again && self.token_room() > TOKENS_LEFT {
                let what = What::Read { run, offset, segment, block, blocks: 1, again: true };
                self.writeback_read_piece(volume, lane, what, place);
                continue;
            }
            let state = &mut self.lanes[lane];
            state.read += 1;
            state.run(run).remaining -= 1;
            if !good {
                let stretch = state.run(run).stretch;
                state.batch.lose(stretch.item + usize::from(offset));
                state.doubted = now;
            }
        }
        self.segments.get_mut(segment).readers -= 1;
    }

    pub(crate) fn writeback_deadline(&self, volume: &Volume) -> Option<Tick> {
        match volume.writeback.stage {
            Stage::Waiting { until } => Some(until),
            Stage::Flushing => {
                let lane = &self.lanes[volume.writeback.lane?];
                let patience = if self.stopping { 0 } else { self.config.lost_after };
                // When it is its turn to write, the device's other users say.
                let waits = lane.under_way == 0 && (lane.doubt == Doubt::Waits || self.stopping);
                waits.then(|| lane.doubted.after(patience))
            }
            Stage::Idle if volume.writeback.passing => Some(self.now),
            Stage::Idle if volume.serving => {
                let due = volume.writeback.dirty_since?.after(self.config.dirty_age);
                let again = (!volume.parked.is_empty()).then(|| self.parked_due(volume));
                let lane = volume.writeback.asks_since.map(|since| since.after(PATIENCE));
                // Past that time it waits for something else than time.
                let due = [Some(due), again, lane].into_iter().flatten();
                due.filter(|due| *due > self.now && !self.stopping).min()
            }
            _ => None,
        }
    }
}
