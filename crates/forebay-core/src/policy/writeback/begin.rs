// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A batch begins: when there is reason to, memory for it, and it is built.

use super::build::{Built, Turn};
use super::{Exposed, Stage};
use crate::engine::Engine;
use crate::format::entry::Kind;
use crate::format::superblock::Order;
use crate::log::lost::Noted;
use crate::mutant::Mutant;
use crate::op::around::AroundState;
use crate::payload::Payload;
use crate::policy::lane::{Doubt, Lane, PATIENCE};
use crate::policy::parked::TRIES;
use crate::units::{Sequence, Tick, VolumeIndex};
use crate::volume::Volume;

impl Engine {
    pub(super) fn writeback_begin(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let asked = self.volume(volume).writeback.asks_since.take().unwrap_or(self.now);
        if !self.may_begin(volume, payload) {
            return self.writeback_unbuild(volume);
        }
        let Some(built) = self.built(volume, asked) else { return };
        if !self.may_write(volume) {
            // It does not lose its lane.
            self.volume(volume).writeback.built = Some(built);
            return;
        }
        self.begin_built(volume, built);
        self.writeback_go_on(volume, payload);
    }

    /// Whether there is something that may be written back, and reason to.
    fn may_begin(&mut self, volume: VolumeIndex, payload: &mut impl Payload) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        let waited_for = self.answers_the_rest && !self.requests.is_empty();
        let stops = self.stopping && !waited_for;
        if !state.serving || stops || self.health == crate::engine::CacheHealth::Failed {
            return false;
        }
        let log = &state.log;
        let clean = !log.is_dirty() && log.durable.through <= log.watermark;
        if clean && state.unnamed_lost.is_none() {
            return false;
        }
        let clean = !state.log.is_dirty();
        if clean && state.writeback.passed < log.durable.through {
            self.pass_clean(volume);
        }
        let state = self.volume_ref(volume).expect("it exists");
        let begun = state.writeback.built.is_some() || self.builder.is_for(volume);
        if !begun && !self.writeback_wanted(state) {
            self.volume(volume).around.held = false;
            return false;
        }
        if clean {
            self.note_clean_entries(volume, payload);
            return false;
        }
        !(state.is_only_parked() && self.now < state.parked.due)
    }

    /// Entries that the backing device holds by their nature need no batch.
    fn note_clean_entries(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        if self.name_lost(volume, payload) != Noted::Yes {
            return;
        }
        let state = self.volume_ref(volume).expect("it exists");
        let log = &state.log;
        let (through, watermark) = (log.durable.through, log.watermark);
        // A note at the end of the oldest segment holds it as any entry would.
        let held = log.tail_segment.filter(|_| log.tail_segment != log.newest);
        let held = held.is_some_and(|id| self.segments.get(id).last_sequence > watermark);
        let state = self.volume(volume);
        if through > watermark && (state.log.placed > watermark || held) {
            state.log.watermark = through;
            state.log.note_wanted = true;
            self.skip_cursor(volume, through);
            self.drop_pending(volume, through);
        }
    }

    /// A batch of a volume that has waited for one since it `asked`, if it is built.
    fn built(&mut self, volume: VolumeIndex, asked: Tick) -> Option<Built> {
        if let Some(built) = self.volume(volume).writeback.built.take() {
            return Some(built);
        }
        if !self.builder.is_for(volume) {
            let lane = self.find_lane(volume, asked)?;
            self.build_begin(volume, lane);
        }
        match self.build_go_on() {
            Turn::Unfinished => return None,
            Turn::Built(built) => {
                let asks = |it: &Volume| it.writeback.asks_since.is_some();
                let others_ask = self.all_volumes().any(asks);
                self.lane_left |= others_ask;
                return Some(built);
            }
            Turn::Nothing => {}
        }
        self.lane_left = true;
        let log = &mut self.volume(volume).log;
        if log.wanted <= log.durable.through {
            log.wanted = log.placed;
        }
        None
    }

    /// A lane for a batch of a volume that has waited for one since it `asked` (N2 of `lane`).
    fn find_lane(&mut self, volume: VolumeIndex, asked: Tick) -> Option<usize> {
        if !self.builder.is_free() {
            self.volume(volume).writeback.asks_since = Some(asked);
            return None;
        }
        let before = self.lanes_asked_before(volume, asked);
        let state = self.volume_ref(volume).expect("it exists");
        let hurries = state.is_waited_for() || self.now.since(asked) >= PATIENCE;
        let volumes = self.all_volumes().count();
        let Engine { lanes, config, .. } = self;
        let found = Lane::find(lanes, volumes, config, before, hurries);
        if found.is_none() {
            self.lane_left |=
                before > 0 && Lane::find(lanes, volumes, config, 0, hurries).is_some();
            self.volume(volume).writeback.asks_since = Some(asked);
        }
        found
    }

    /// How many volumes asked for a lane before this one did. Of what asks at once the first is the one with the lowest number.
    fn lanes_asked_before(&self, volume: VolumeIndex, asked: Tick) -> usize {
        let before = |other: &&Volume| {
            let since = other.writeback.asks_since;
            since.is_some_and(|since| (since, other.index) < (asked, volume))
        };
        self.all_volumes().filter(before).count()
    }

    /// While nothing is dirty the cursor follows the log: else the first batch after hours of reads would look at
    /// all that they copied.
    fn pass_clean(&mut self, volume: VolumeIndex) {
        let through = self.volume(volume).log.durable.through;
        self.volume(volume).writeback.passed = through;
        self.skip_cursor(volume, through);
    }

    /// Whether what goes around the log lets a batch begin (A5 to A7 of `around`).
    fn may_write(&mut self, volume: VolumeIndex) -> bool {
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
        self.drop_pending(volume, through);
    }

    /// A batch that is built begins.
    fn begin_built(&mut self, volume: VolumeIndex, built: Built) {
        let Built { lane, end, cursor, extents, blocks } = built;
        // What newer entries void is not written, either (A5 of `around`).
        if !self.config.mutants.is(Mutant::VoidedWrittenBack) {
            let state = self.volumes[usize::from(volume.0)].as_deref().expect("it exists");
            let batch = &mut self.lanes[lane].batch;
            let newer = state.pending_extents.iter().skip(extents);
            for entry in newer.filter(|entry| entry.kind == Kind::Bypassed) {
                batch.push_extent(entry.extent());
            }
        }
        let lane_index = lane;
        let lane = &mut self.lanes[lane];
        let segments = &self.segments;
        lane.batch.seal(|slot| {
            let (id, block) = segments.place(slot);
            segments.position(id, block)
        });
        let bounds = lane.batch.bounds();
        lane.runs.clear();
        (lane.next_write, lane.frame_next, lane.frames_used) = (0, 0, 0);
        (lane.next_read, lane.next_read_block, lane.read) = (0, 0, 0);
        (lane.given_out, lane.failed, lane.crowded) = (false, false, false);
        (lane.broken_off, lane.doubt, lane.looked) = (false, Doubt::No, 0);
        (lane.mends, lane.mended) = (None, false);
        lane.written = 0;
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
            state.writeback.exposed = Some(match state.writeback.exposed {
                None => exposed,
                Some(before) => Exposed {
                    start: before.start.min(first),
                    end: before.end.max(behind),
                    since: before.since,
                    through: before.through.max(end),
                },
            });
        }
        state.writeback.end = end;
        state.writeback.end_cursor = cursor;
        state.writeback.batch_blocks = blocks;
        state.writeback.stage = Stage::Writing;
        state.writeback.lane = Some(lane_index);
        state.writeback.begun = now;
        state.writeback.runs_before = state.stats.batch_runs;
    }
}
