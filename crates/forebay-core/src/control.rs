// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an operator may ask of the engine: volumes come and go, drain, stop, tell how it is.

use crate::engine::{Active, CacheHealth, Engine};
use crate::format::entry::Kind;
use crate::format::superblock::{self, Head, Mode, Order, Superblock};
use crate::log::chain::Log;
use crate::log::recovery::RecoveredVolume;
use crate::log::segment::State;
use crate::map::extent::ExtentMap;
use crate::mutant::Mutant;
use crate::op::around::{Around, AroundState};
use crate::op::stale::Stale;
use crate::payload::Payload;
use crate::policy::reserve::Reserve;
use crate::policy::slices::Sharing;
use crate::policy::writeback::{Cursor, Exposed, Stage};
use crate::request::RequestError;
use crate::stats::Stats;
use crate::units::{BLOCK_BYTES, Lba, Ordinal, SegmentId, Sequence, Tick, VolumeIndex};
use crate::volume::Volume;
use alloc::boxed::Box;
use alloc::collections::VecDeque;

/// How a volume is.
#[derive(Clone, Copy, Debug)]
pub struct VolumeStatus {
    /// Requests are taken.
    pub serving: bool,
    /// Dirty blocks nobody can name are lost: it must not be served.
    pub frozen: bool,
    /// How it takes writes.
    pub mode: Mode,
    /// What a lost cache leaves.
    pub order: Order,
    /// Blocks of a run of writes that may go around the log; 0: none does.
    pub cutoff: u32,
    /// How the backing device is shared between guests and write-back.
    pub sharing: Sharing,
    /// Where the backing device may be a mixture of two states, if it may anywhere.
    pub exposed: Option<Exposed>,
    /// Kept clean.
    pub drained: bool,
    /// Blocks not on the backing device, superseded versions included.
    pub dirty_blocks: u64,
    /// Extents not on the backing device.
    pub dirty_extents: u64,
    /// Anything at all is not on the backing device.
    pub dirty: bool,
    /// When the oldest data that is not on the backing device was placed, if it was in this opening;
    /// else when the cache was opened.
    pub dirty_since: Option<Tick>,
    /// Wall clock of the newest data on the backing device; 0: never written.
    pub backing_as_of: u64,
    /// What write-back is doing.
    pub writeback: Stage,
    /// The backing device failed when it was written last.
    pub backing_failing: bool,
    /// Blocks that the backing device refuses: kept in the log, tried again (`policy::parked`).
    pub parked_blocks: u64,
    /// The first of them.
    pub parked_first: Option<Lba>,
    /// It refuses more than may be parked: writes answer errors until it takes them.
    pub parked_full: bool,
    /// A flush of the backing device failed that should have covered writes around the log: flushes
    /// answer errors until the volume is opened again.
    pub flush_failed: bool,
    /// Whether it is served past a failed cache.
    pub stale: Stale,
    /// Blocks that are lost now: their newest version rotted while it was dirty, and reads of them fail.
    pub lost_blocks_now: u64,
    /// The last dirty block that was bad when a guest's request read it (R6).
    pub bad_read: Option<Lba>,
    /// A batch has found blocks that cannot be read, and tries them again before it takes them for lost.
    pub in_doubt: bool,
    /// They have all the room there is for ranges: zeroing, discards and writes around the log are refused.
    pub lost_full: bool,
    /// What its last batch found lost could not be named: there was no segment for that at all. Others give one if they can.
    pub lacks: bool,
    /// Segments its log has.
    pub segments: u32,
    /// What it is to have of the cache, whatever the others do.
    pub reserve: Reserve,
    /// What that comes to.
    pub reserved_segments: u32,
    /// Of its segments those that could not be given to others at once.
    pub pinned_segments: u32,
    /// Segments that it gave up for its own sake.
    pub given_to_itself: u64,
    /// Segments that it took of what is kept for notes.
    pub from_kept: u64,
    /// Something placed is not durable yet.
    pub undurable: bool,
    /// When the oldest of that was placed; early by a second at most.
    pub undurable_since: Option<Tick>,
    /// Requests that wait for room in the log.
    pub waiting: usize,
    /// Writers pay for room now (`policy::delay`).
    pub delaying: bool,
    /// Last sequence of an entry.
    pub placed: Sequence,
    /// Everything up to it is durable.
    pub durable: Sequence,
    /// Everything up to it is on the backing device.
    pub watermark: Sequence,
    /// Counters.
    pub stats: Stats,
}

impl Engine {
    /// Adds a volume with an empty log at a free place. The superblock that names it is durable.
    pub fn attach(&mut self, index: VolumeIndex, recorded: &superblock::Volume) {
        assert!(self.volumes[usize::from(index.0)].is_none());
        self.tickets.void_all();
        let next = Sequence(recorded.next_sequence.0.max(1));
        // It ends at 0, as its head in the superblock says: a header that called more than that
        // durable would make a torn first record look like a rotten one.
        let mut log = Log::new(Sequence(0), next);
        log.backing_as_of = recorded.backing_as_of;
        let found = RecoveredVolume {
            log,
            extents: ExtentMap::with_lost_room(self.config.extent_count_max as usize),
            pending_extents: VecDeque::new(),
            cursor: Cursor::default(),
            // Where one is served without a cache, and so around it, each start adds it, and the process before may have been killed: what that
            // answered, a flush of this one covers. (Of one that is recorded the superblock tells, A3 of `op/around`.)
            clean: recorded.mode != Mode::WriteAround,
            lost_blocks: 0,
            unnamed_lost: None,
            frozen: false,
            forgot: Ordinal(0),
            head: Head::NONE,
            captured: Sequence(0),
        };
        let volume = Volume::new(
            index,
            recorded,
            found,
            &self.config,
            self.geometry.segment_blocks,
            self.now,
        );
        self.volumes[usize::from(index.0)] = Some(Box::new(volume));
        self.volume_end = self.volume_end.max(usize::from(index.0) + 1);
        self.reserves_settle();
    }

    /// Drops everything the log holds of a volume that is not served: it goes on with an empty
    /// log. It may be forgotten, and the superblock that names its new attach generation is durable.
    pub fn forget_data(
        &mut self,
        index: VolumeIndex,
        recorded: &superblock::Volume,
        payload: &mut impl Payload,
    ) {
        assert!(self.may_forget(index));
        let state = self.volume(index);
        let next_sequence = state.log.next_sequence;
        let AroundState { unflushed, lost, told, noted, .. } = state.around;
        self.end_log(index, payload);
        let mut recorded = recorded.clone();
        recorded.next_sequence = next_sequence;
        self.attach(index, &recorded);
        // The log is empty, and the backing device what it was.
        let around = &mut self.volume(index).around;
        (around.unflushed, around.lost) = (unflushed, lost);
        (around.told, around.noted) = (told, noted);
    }

    /// Whether a volume that is not served can be detached: nothing of it is dirty, all of it is durable, no block is lost, which only
    /// its log tells, and it may be forgotten.
    pub fn may_detach(&self, index: VolumeIndex) -> bool {
        let durable = |state: &Volume| state.log.placed <= state.log.durable.through;
        self.is_clean(index)
            && self.volume_ref(index).is_some_and(|state| durable(state) && !state.has_lost())
            && self.may_forget(index)
    }

    /// Whether what the log holds of a volume that is not served can be dropped: nothing of it is asked for or under way,
    /// and no checkpoint is being written, which would name it. While others are served its log is not at rest: what is
    /// clean of it is given to them, which is noted in it.
    pub fn may_forget(&self, index: VolumeIndex) -> bool {
        let Some(state) = self.volume_ref(index) else { return false };
        let log = &state.log;
        let is_at_rest = log.in_flight.is_empty()
            && log.open.is_none_or(|open| open.entries == 0)
            && state.writeback.stage == Stage::Idle
            && state.growing.is_none()
            && state.chances == 0
            && !self.is_scrubbed(index)
            && !self.ahead.is_reading(index)
            && !state.around.flushing;
        let is_asked = self.requests.iter().any(|active| active.request.volume == index);
        !state.serving
            && is_at_rest
            && !is_asked
            && !self.superblock_busy
            && !self.is_checkpointing()
            && self.health == CacheHealth::Healthy
    }

    /// Ends a volume: its segments go to the pool. It may be detached, and the superblock that does not
    /// name it is durable.
    pub fn detach(&mut self, index: VolumeIndex, payload: &mut impl Payload) {
        assert!(self.may_detach(index));
        self.end_log(index, payload);
        self.put_in_order(payload);
    }

    /// Gives all segments of a log to the pool, oldest first (T3 in `log/checkpoint.rs`), and ends the
    /// volume.
    fn end_log(&mut self, index: VolumeIndex, payload: &mut impl Payload) {
        let log = &mut self.volume(index).log;
        log.open = None;
        if log.head.is_some() {
            self.seal_segment(index, payload);
        }
        let mut id = self.volume(index).log.oldest;
        while let Some(at) = id {
            id = self.segments.get(at).next;
            if self.segments.get(at).state == State::Sealed {
                self.retire(index, at, |_| ());
            }
            let segment = self.segments.get_mut(at);
            segment.become_state(State::Free);
            self.retired -= 1;
            segment.next = None;
            self.segments.put_free(at);
        }
        self.ahead_void(index);
        self.ahead.streams.forget(index);
        self.reads.forget(index);
        self.writes.forget(index);
        self.leave_disk(index);
        self.volumes[usize::from(index.0)] = None;
        self.reserves_settle();
    }

    /// Begins or ends taking requests: the backing device is there, or is not.
    pub fn serve(&mut self, volume: VolumeIndex, serving: bool) {
        self.tickets.void_all();
        let state = self.volume(volume);
        state.serving = serving && !state.frozen;
        state.given |= serving;
    }

    /// Whether requests to a volume are taken.
    pub fn is_served(&self, volume: VolumeIndex) -> bool {
        self.volume_ref(volume).is_some_and(|state| state.serving)
    }

    /// Whether dirty data of the volume was lost that nobody can name: it is not served.
    pub fn is_frozen(&self, volume: VolumeIndex) -> bool {
        self.volume_ref(volume).is_some_and(|state| state.frozen)
    }

    /// Changes how a volume takes writes, from the next one on.
    pub fn set_mode(&mut self, volume: VolumeIndex, mode: Mode, payload: &mut impl Payload) {
        let state = self.volume(volume);
        state.mode = mode;
        state.drained = false;
        self.put_in_order(payload);
    }

    /// Changes what a lost cache leaves, from the next batch and the next write on.
    pub fn set_order(&mut self, volume: VolumeIndex, order: Order, payload: &mut impl Payload) {
        let now = self.now;
        let state = self.volume(volume);
        let (placed, built) = (state.log.placed, state.writeback.lane.is_some());
        if let Some(exposed) = &mut state.writeback.exposed
            && !built
            && order != state.order
        {
            // What was broken off in the order before may be built again with an earlier end.
            exposed.through = exposed.through.max(placed);
        }
        let relaxed = state.order == Order::Relaxed && order != Order::Relaxed;
        if relaxed && (state.log.is_dirty() || state.around.over_dirty > 0) {
            // Writes have passed what is dirty: the backing device is ahead of it wherever they were, until all that was there then is
            // written back.
            let all = Exposed::all(state.blocks(), now, placed);
            state.writeback.exposed = Some(all.with(state.writeback.exposed));
        }
        state.order = order;
        self.put_in_order(payload);
    }

    /// Changes from which length on a run of writes may go around the log; 0: never.
    pub fn set_cutoff(&mut self, volume: VolumeIndex, cutoff: u32) {
        self.volume(volume).cutoff = cutoff;
    }

    /// Whether writes may have gone around the log that no flush of the backing device covers: they want one
    /// before a stop is called clean.
    pub fn wants_backing_flush(&self, volume: VolumeIndex) -> bool {
        let wants = self.volume_ref(volume).is_some_and(|state| state.around.unflushed);
        wants && !self.config.mutants.is(Mutant::StopUnflushed)
    }

    /// Whether what changes the volume is answered only when its backing device has it.
    pub fn waits_for_backing(&self, volume: VolumeIndex) -> bool {
        self.is_through(volume) || self.volume_ref(volume).is_some_and(Volume::is_passing)
    }

    /// Writes everything back and keeps the volume clean, as write-through.
    pub fn drain(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        self.volume(volume).drained = true;
        self.put_in_order(payload);
    }

    /// Whether nothing is dirty, and that is durable.
    pub fn is_clean(&self, volume: VolumeIndex) -> bool {
        self.volume_ref(volume).is_some_and(Volume::is_settled)
    }

    /// Everything up to it is on the backing device.
    pub fn watermark(&self, volume: VolumeIndex) -> Option<Sequence> {
        self.volume_ref(volume).map(|state| state.log.watermark)
    }

    /// Everything up to it is on the backing device, and a crash does not forget that.
    pub fn durable_watermark(&self, volume: VolumeIndex) -> Option<Sequence> {
        self.volume_ref(volume).map(|state| state.log.durable.watermark)
    }

    /// What was placed when a write's turn came to go around the log, its own entry over what is clean included.
    pub fn around_since(&self, tag: u32) -> Option<Sequence> {
        let goes = |active: &&Active| matches!(active.around, Around::Writing(_));
        let active = self.requests.iter().filter(goes).find(|it| it.request.tag == tag)?;
        Some(active.sequence)
    }

    /// The last sequence that was placed.
    pub fn placed(&self, volume: VolumeIndex) -> Sequence {
        self.volume_ref(volume).map_or(Sequence(0), |state| state.log.placed)
    }

    /// Wants everything placed so far durable: the first step of a stop.
    pub fn sync(&mut self, payload: &mut impl Payload) {
        for state in self.volumes.iter_mut().flatten() {
            state.log.want(state.log.placed);
        }
        self.put_in_order(payload);
    }

    /// Ends write-back after the batch under way: the second step of a stop.
    pub fn stop_writeback(&mut self) {
        self.stopping = true;
    }

    /// Nobody hears of requests any more, the last step of a stop: no batch begins, so those that wait for one, or for the room that
    /// it would make, are given up. What of them was placed stays. All others are done.
    pub fn give_up_writes(&mut self, payload: &mut impl Payload) {
        self.gives_up = true;
        for index in 0..self.volumes.len() {
            if self.volumes[index].is_some() {
                self.fail_through_waiters(VolumeIndex(index as u8), RequestError::Closing);
            }
        }
        self.put_in_order(payload);
    }

    /// No request comes any more: batches begin still, as long as there are requests inside, which may wait for one.
    pub fn answer_the_rest(&mut self, payload: &mut impl Payload) {
        self.answers_the_rest = true;
        self.put_in_order(payload);
    }

    /// The next program goes on with the same guests: that one has been told of a failed flush and the cache is stopped does not
    /// mean that anybody has seen to it (A3 of `op::around`).
    pub fn keep_flush_failures(&mut self) {
        self.volumes.iter_mut().flatten().for_each(|state| state.around.told = false);
    }

    /// Whether no request is inside, nothing is under way and everything is durable.
    pub fn is_quiet(&self) -> bool {
        let quiet = |state: &Volume| {
            state.log.placed <= state.log.durable.through
                && state.log.in_flight.is_empty()
                && state.writeback.is_idle()
        };
        let idle = self.requests.is_empty() && self.tokens.is_empty() && self.effects.is_empty();
        idle && (self.health == CacheHealth::Failed
            || self.volumes.iter().flatten().all(|state| quiet(state)))
    }

    /// Requests inside the engine.
    pub fn request_count(&self) -> usize {
        self.requests.len()
    }

    /// Notes in a superblock where each log ends: for a clean stop, when [`Engine::is_quiet`].
    pub fn note_heads(&self, superblock: &mut Superblock) {
        superblock.segment_sequence = superblock.segment_sequence.max(self.segment_sequence);
        for state in self.volumes.iter().flatten() {
            let Some(Some(recorded)) = superblock.volumes.get_mut(usize::from(state.index.0))
            else {
                continue;
            };
            let log = &state.log;
            recorded.mode = state.mode;
            (recorded.order, recorded.cutoff) = (state.order, state.cutoff);
            recorded.weight = state.weight;
            recorded.p99_target = state.p99_target();
            recorded.reserve = state.reserve;
            recorded.drained = state.drained;
            recorded.frozen = state.frozen;
            let unnoted = self.config.mutants.is(Mutant::FlushFailureUnnoted);
            recorded.flush_failed = state.around.lost && !state.around.told && !unnoted; // A3
            log.note(recorded);
            recorded.flush_epoch = log.flush_epoch;
            if let Some(end) = log.end(state.index, &self.segments) {
                recorded.head = end;
            }
        }
    }

    /// Whether a block of a segment is a record's header.
    pub fn is_heading(&self, segment: SegmentId, block: u16) -> bool {
        let mut header = 0;
        while header < block {
            let slot = self.segments.slot(segment, header);
            header = self.slots.heading(slot).end(header);
        }
        header == block
    }

    /// State of the cache device.
    pub fn health(&self) -> CacheHealth {
        self.health
    }

    /// Segments in the pool, and in all.
    pub fn free_segments(&self) -> (u32, u32) {
        (self.segments.free_count(), self.segments.count())
    }

    /// How a volume is.
    pub fn status(&self, volume: VolumeIndex) -> Option<VolumeStatus> {
        let state = self.volume_ref(volume)?;
        let log = &state.log;
        Some(VolumeStatus {
            serving: state.serving,
            frozen: state.frozen,
            mode: state.mode,
            order: state.order,
            cutoff: state.cutoff,
            sharing: self.slices_of(state).sharing(state.weight, state.target),
            exposed: state.writeback.exposed,
            drained: state.drained,
            dirty_blocks: log.dirty_blocks,
            dirty_extents: state
                .pending_extents
                .iter()
                .filter(|it| it.kind != Kind::Bypassed)
                .count() as u64,
            dirty: log.is_dirty(),
            dirty_since: state.dirty_since(),
            backing_as_of: log.backing_as_of,
            writeback: state.writeback.stage,
            backing_failing: state.writeback.failing,
            parked_blocks: state.parked.len() as u64,
            parked_first: state.parked.first(),
            parked_full: state.parked.full,
            flush_failed: state.around.lost,
            stale: state.stale,
            lost_blocks_now: state.extents.lost_blocks(),
            bad_read: state.bad_read,
            in_doubt: self.is_in_doubt(state),
            lost_full: state.writeback.stuck || state.extents.is_all_lost(),
            lacks: state.lacks,
            segments: log.segment_count,
            reserve: state.reserve,
            reserved_segments: state.reserved,
            pinned_segments: state.pinned(),
            given_to_itself: state.given_to_itself,
            from_kept: state.from_kept,
            undurable: log.placed > log.durable.through,
            undurable_since: (log.placed > log.durable.through)
                .then(|| log.times.placed_since(log.durable.through))
                .flatten(),
            waiting: state.writes.len(),
            delaying: state.delay.is_felt(),
            placed: log.placed,
            durable: log.durable.through,
            watermark: log.watermark,
            stats: Stats {
                exposed_nanos: state.stats.exposed_nanos
                    + state.writeback.exposed.map_or(0, |it| self.now.since(it.since)),
                ..state.stats
            },
        })
    }

    /// Bytes of a volume.
    pub fn volume_bytes(&self, volume: VolumeIndex) -> Option<u64> {
        self.volume_ref(volume).map(|state| state.size_bytes)
    }

    /// Whether the log says what a block reads as.
    pub fn is_in_log(&self, volume: VolumeIndex, lba: Lba) -> bool {
        self.index.get(volume, lba).is_some()
            || self.volume_ref(volume).is_some_and(|state| state.extents.get(lba).is_some())
    }

    /// What a range would read as without looking at data: runs of (blocks, reads as zeros), until `run` wants no more or so much was
    /// looked at that others would wait for it. One run is told in any case. Gives how many blocks and runs it looked at.
    pub fn zero_runs(
        &mut self,
        volume: VolumeIndex,
        first: crate::units::Lba,
        blocks: u64,
        mut run: impl FnMut(u64, bool) -> bool,
    ) -> u64 {
        let state = self.volume_ref(volume).expect("it exists");
        let end = first + blocks;
        let (mut at, mut looked) = (first, 0);
        while at < end && looked < LOOK_MAX {
            let extent = state.extents.overlapping(at, end).next().filter(|_| !state.is_passing());
            let (to, zero) = match extent.copied() {
                None => (end, false),
                Some(extent) if extent.start > at => (extent.start.min(end), false),
                // Data may have been written over it; only short extents are looked through.
                Some(extent) => {
                    let blocks = extent.end - extent.start;
                    let is_short = blocks <= LOOK_MAX;
                    looked += if is_short { blocks } else { 0 };
                    (extent.end.min(end), is_short && self.is_all_zero(volume, &extent))
                }
            };
            looked += 1;
            if !run(to - at, zero) {
                break;
            }
            at = to;
        }
        looked
    }

    fn is_all_zero(&self, volume: VolumeIndex, extent: &crate::map::extent::Extent) -> bool {
        use crate::format::entry::Kind;
        matches!(extent.kind, Kind::Zero | Kind::Discard)
            && (0..extent.end - extent.start)
                .all(|at| self.index.get(volume, extent.start + at).is_none())
    }

    pub(crate) fn put_in_order(&mut self, payload: &mut impl Payload) {
        self.tick(self.now, self.wall, payload);
    }
}

/// Blocks of extents of zeros that one question looks at: some milliseconds.
const LOOK_MAX: u64 = 1 << 16;

const _: () = assert!(BLOCK_BYTES == 4096);
