// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A batch ends: the flush, the watermark, and who waited for it; or it is given up.

use super::{
    BATCH_BLOCKS_AFTER_OPENING, BATCH_BLOCKS_FIRST, BATCH_BLOCKS_MIN, BATCH_TIME, Pace, Stage,
    What, Work,
};
use crate::effect::Effect;
use crate::engine::{Engine, Pending};
use crate::format::entry::Kind;
use crate::format::superblock::Order;
use crate::log::lost::Noted;
use crate::mutant::Mutant;
use crate::payload::{Payload, Place};
use crate::policy::delay::believed;
use crate::policy::lane::Lane;
use crate::request::RequestError;
use crate::units::{Lba, Sequence, VolumeIndex};

/// What write-back takes for a block of log is averaged over so long (exponentially), in nanoseconds.
const PACE_AVERAGED: u64 = 4_000_000_000;

/// What write-back takes for a block of log after a batch that took so long and said `space`: by itself a short one says what
/// luck the disk had. Twice as much, or half, is no luck.
fn averaged(before: u64, space: u64, took: u64) -> u64 {
    if took >= PACE_AVERAGED || space > 2 * before || before > 2 * space {
        return space;
    }
    let [before, space, took, of] = [before, space, took, PACE_AVERAGED].map(u128::from);
    ((space * took + before * (of - took)) / of) as u64
}

impl Engine {
    pub(super) fn writeback_flush(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        payload: &mut impl Payload,
    ) {
        let now = self.now;
        self.volume(volume).writeback.stage = Stage::Flushing;
        self.slices(volume).batch_wants(volume, false, now);
        let early = self.config.mutants.is(Mutant::WatermarkBeforeBackingFlush);
        if self.config.mutants.is(Mutant::SkipBackingFlush) || early {
            return self.writeback_flushed(volume, lane, payload);
        }
        self.flush_batch(volume, lane);
    }

    /// Flushes the backing device.
    pub(super) fn flush_batch(&mut self, volume: VolumeIndex, lane: usize) {
        self.lanes[lane].under_way += 1;
        let done = self.volume(volume).around.done;
        let what = What::Flush { around: done };
        let token = self.token(Pending::Writeback(Work { volume, what }));
        self.flush_backing(volume, token);
    }

    /// Asks the backing device whether it does anything at all: nothing of the batch is under way.
    pub(crate) fn writeback_probe(&mut self, volume: VolumeIndex, lane: usize) {
        match self.config.mutants.is(Mutant::FlushTakenForLife) {
            true => self.flush_to_probe(volume, lane),
            false => self.touch_backing(volume, lane, 0),
        }
    }

    /// Reads its first block (a file system's or partition table's, so there is something), one in the middle, or its last.
    pub(super) fn touch_backing(&mut self, volume: VolumeIndex, lane: usize, place: usize) {
        self.lanes[lane].under_way += 1;
        let last = self.volume(volume).blocks() - 1;
        let token = self.token(Pending::Writeback(Work { volume, what: What::Touch { place } }));
        let (lba, to) = (Lba([0, last / 2, last][place]), Place::Nowhere);
        self.effects.push_back(Effect::ReadBacking { token, volume, lba, blocks: 1, to });
    }

    pub(super) fn flush_to_probe(&mut self, volume: VolumeIndex, lane: usize) {
        self.lanes[lane].under_way += 1;
        let token = self.token(Pending::Writeback(Work { volume, what: What::Probe }));
        self.flush_backing(volume, token);
    }

    /// The backing device was flushed: the batch is done if that went well, and if all that it found
    /// lost is named (K4).
    pub(crate) fn writeback_flushed(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        payload: &mut impl Payload,
    ) {
        if self.is_finding_out(volume, lane) {
            return;
        }
        if !self.lanes[lane].failed {
            let named = self.name_batch_lost(volume, lane, payload);
            if named == Noted::Yes {
                return self.writeback_done(volume, lane);
            }
            self.lanes[lane].crowded = named == Noted::NoRoom;
            self.lanes[lane].broken_off |= named == Noted::NotNow;
        }
        self.lanes[lane].failed = true;
        self.volume(volume).writeback.stage = Stage::Writing;
    }

    /// Names what recovery and what this batch found lost.
    fn name_batch_lost(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        payload: &mut impl Payload,
    ) -> Noted {
        let mut noted = self.name_lost(volume, payload);
        while noted == Noted::Yes
            && let Some((lba, slot)) = self.lanes[lane].batch.next_lost()
        {
            noted = self.mark_lost(volume, lba, slot, payload);
            self.lanes[lane].batch.named();
        }
        let is_empty = self.segments.free_count() == 0;
        let state = self.volume(volume);
        state.lacks = noted == Noted::NotNow && is_empty && state.log.head.is_none(); // G4 of `policy::reserve`
        noted
    }

    /// The batch is on the backing device for good: the watermark may move (K2).
    fn writeback_done(&mut self, volume: VolumeIndex, lane: usize) {
        let state = self.volume_ref(volume).expect("it exists");
        let [from, to] = [state.writeback.cursor, state.writeback.end_cursor]
            .map(|cursor| self.log_at(state, cursor));
        self.leave_lane(lane);
        let all_taken = self.lanes[lane].refusals == 0;
        let (now, wall) = (self.now, self.wall);
        let stood = self.lanes[lane].has_stood(now);
        let state = self.volume(volume);
        state.parked.full = false;
        if all_taken {
            state.parked.all_taken();
        }
        let writeback = &mut state.writeback;
        writeback.lane = None;
        writeback.failing = false;
        writeback.stage = Stage::Noting;
        writeback.cursor = writeback.end_cursor;
        // A strict batch ends where the guest flushed: what is behind that has waited as long as it has.
        let strict = state.order == Order::Strict && state.log.dirtied > writeback.end;
        writeback.dirty_since = writeback
            .dirty_since
            .filter(|_| strict)
            .map(|since| state.log.times.placed_since(writeback.end).unwrap_or(since));
        writeback.careful &= !state.extents.has_guest_room();
        writeback.stuck = false;
        let took = now.since(writeback.begun).saturating_sub(stood).max(1);
        let blocks = u64::from(writeback.batch_blocks);
        if writeback.batch_cap == BATCH_BLOCKS_AFTER_OPENING {
            writeback.batch_cap = BATCH_BLOCKS_FIRST;
        }
        if blocks >= u64::from(BATCH_BLOCKS_MIN) {
            let cap = u128::from(blocks) * u128::from(BATCH_TIME) / u128::from(took);
            let cap = cap.min(u128::from(u32::MAX)) as u32;
            writeback.batch_cap =
                cap.clamp(BATCH_BLOCKS_MIN, writeback.batch_cap.saturating_mul(4));
        }
        let runs = state.stats.batch_runs - writeback.runs_before;
        if blocks > 0 && runs > 0 {
            let all = to.saturating_sub(from);
            let space = took / all.max(1);
            let space = match writeback.pace {
                Some(before) => averaged(before.space, believed(before.space, space, all), took),
                None => space,
            };
            writeback.pace = Some(Pace { run: took / runs, space });
        }
        let end = writeback.end;
        if let Some(exposed) = writeback.exposed.filter(|exposed| exposed.through <= end) {
            writeback.exposed = None;
            state.stats.exposed_nanos += now.since(exposed.since);
        }
        // What the batch did not reach may be older than the batch.
        let as_of = if end >= state.log.placed { Some(wall) } else { state.log.times.as_of(end) };
        // Not the latest of both: a clock that was wrong once would have it for ever.
        state.log.backing_as_of = as_of.unwrap_or(state.log.backing_as_of);
        state.log.watermark = end;
        state.log.note_wanted = true;
        state.log.dirty_blocks = state.log.dirty_blocks.saturating_sub(blocks);
        state.stats.batches += 1;
        self.drop_pending(volume, end);
        self.answer_through(volume);
    }

    fn answer_through(&mut self, volume: VolumeIndex) {
        loop {
            let state = self.volume(volume);
            let watermark = state.log.watermark;
            match state.through_waiters.front().copied() {
                Some(waiter) if waiter.sequence <= watermark => {
                    state.through_waiters.pop_front();
                    let active = self.active(waiter.request);
                    let (first, end) = (active.first, active.first + active.blocks);
                    // Q5
                    let parked = self.volume(volume).parked.overlaps(first, end);
                    let result = if parked { Err(RequestError::Io) } else { Ok(()) };
                    self.answer(waiter.request, result);
                }
                _ => return,
            }
        }
    }

    /// Extents up to the watermark are on the backing device: short ones need not be kept, since
    /// placing them took older data out of the index. What is left of a long one did not.
    pub(super) fn drop_pending(&mut self, volume: VolumeIndex, through: Sequence) {
        let state = self.volume(volume);
        let mut dropped = None;
        while let Some(pending) = state.pending_extents.front() {
            if pending.sequence > through {
                break;
            }
            dropped = state.pending_extents.pop_front();
            state.noting_extents += 1;
        }
        let Some(last) = dropped else { return };
        self.volume(volume).extents.remove_where(|extent| {
            extent.position <= last.position
                && !extent.long
                && matches!(extent.kind, Kind::Zero | Kind::Discard)
        });
    }

    /// Whether a write over dirty versions has not got its entry yet: it may be over what this batch holds. No more of them begin
    /// until the batch is flushed (A6 of `around`).
    pub(super) fn writeback_is_passed(&mut self, volume: VolumeIndex) -> bool {
        let early = self.config.mutants.is(Mutant::BatchEndsBeforeEntry);
        let now = self.now;
        let around = &mut self.volume(volume).around;
        around.held = around.over_dirty > 0 && !early;
        let waits = around.held;
        if waits {
            self.slices(volume).batch_wants(volume, false, now);
        }
        waits
    }

    /// Whether the batch under way holds any of `start..end`.
    pub(crate) fn batch_holds(&self, volume: VolumeIndex, start: Lba, end: Lba) -> bool {
        let lane = self.volume_ref(volume).and_then(|state| state.writeback.lane);
        lane.is_some_and(|lane| self.lanes[lane].batch.overlaps(start, end))
    }

    /// Whether it is writing any of that.
    pub(crate) fn is_written_back(&self, volume: VolumeIndex, start: Lba, end: Lba) -> bool {
        let lane = self.volume_ref(volume).and_then(|state| state.writeback.lane);
        lane.is_some_and(|lane| self.lanes[lane].is_writing(start, end))
    }

    /// A write around the log passes what the batch holds of that (A6 of `around`).
    pub(crate) fn batch_passed(&mut self, volume: VolumeIndex, start: Lba, end: Lba) {
        let lane = self.volume(volume).writeback.lane.expect("a batch has a lane");
        if !self.config.mutants.is(Mutant::PassedWrittenBack) {
            self.lanes[lane].batch.pass(start, end);
        }
    }

    /// That write failed: the batch is given up, since it left that out.
    pub(crate) fn batch_unpassed(&mut self, volume: VolumeIndex, start: Lba, end: Lba) {
        let forgets = self.config.mutants.is(Mutant::PassedForgotten);
        if self.batch_holds(volume, start, end) && !forgets {
            self.writeback_spoil(volume);
        }
    }

    /// A flush of the backing device failed: the batch under way is to be given up (K5).
    pub(crate) fn writeback_spoil(&mut self, volume: VolumeIndex) {
        if let Some(lane) = self.volume(volume).writeback.lane {
            self.lanes[lane].failed = true;
        }
    }

    /// A lane is free, and frames of the window: whoever waits for one may have looked in vain just before (N2 of `lane`).
    fn leave_lane(&mut self, lane: usize) {
        self.lanes[lane].taken = false;
        let asks = self.all_volumes().any(|other| other.writeback.asks_since.is_some());
        self.lane_left |= asks && !self.config.mutants.is(Mutant::LaneLeftUntold);
    }

    /// Nothing is lost, the batch is built again: later, or at once if a smaller one may do.
    pub(super) fn writeback_give_up(&mut self, volume: VolumeIndex, lane: usize) -> bool {
        let now = self.now;
        let soon = now.after(self.config.retry_after);
        let Lane { crowded, refusals, broken_off, .. } = self.lanes[lane];
        self.leave_lane(lane);
        self.slices(volume).batch_wants(volume, false, now);
        let state = self.volume(volume);
        state.parked.tries = state.parked.tries.saturating_add(u32::from(refusals > 0));
        let until = if state.parked.full { soon.max(state.parked.due) } else { soon };
        let at_once = crowded && !state.writeback.careful;
        state.around.held = false;
        state.writeback.lane = None;
        state.writeback.careful |= crowded;
        state.writeback.stuck = crowded && !at_once;
        state.writeback.stage = if at_once { Stage::Idle } else { Stage::Waiting { until } };
        if !crowded && !broken_off {
            state.writeback.failing = true;
            state.stats.backing_faults += 1;
        }
        self.around_behind(volume);
        at_once
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_says_more_the_longer_it_was() {
        let second = 1_000_000_000;
        assert_eq!(averaged(1_000_000, 1_500_000, second), 1_125_000, "luck");
        assert_eq!(averaged(1_000_000, 1_500_000, 4 * second), 1_500_000);
        assert_eq!(averaged(1_000_000, 3_000_000, second), 3_000_000, "no luck");
        // Two blocks, and a disk that stood for ten seconds.
        assert_eq!(averaged(1_000_000, believed(1_000_000, 5 * second, 2), 10 * second), 8_000_000);
        assert_eq!(believed(1_000_000, 5 * second, 64), 5 * second);
    }
}
