// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cache becomes larger or smaller while it is served.
//!
//! What is new of a larger cache comes to the pool. Of a smaller one the segments that go are emptied first: they
//! are not given out any more, what is dirty in front of their ends is written back, tails go past them. Then
//! the superblock gets the new size, which the runtime writes (`format::pair`), and the tables theirs.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | – | holding | [`Engine::begin_to_resize`] |
//! | holding | ready | larger: no checkpoint is under way |
//! | holding | unnaming | smaller: no checkpoint is under way |
//! | unnaming | vacating | [`Engine::vacate`]: no checkpoint is named |
//! | vacating | settling | the segments that go are free |
//! | settling | marking | nothing is noted in the superblock |
//! | marking | ready | where each log ended then is durable, and none of them in what goes |
//! | ready | – | [`Engine::resize`] |
//! | all | – | [`Engine::cancel_resize`] |
//!
//! # Invariants
//!
//! - **Z1** While the superblock may say another size than the engine knows, no checkpoint is under way and
//!   nothing is noted in the superblock.
//! - **Z2** No checkpoint of another size is named: where its parts lie follows from the size.
//! - **Z3** A segment that is new is used only after both copies of a superblock that has it are durable.
//! - **Z4** When the superblock says a smaller size, no log has a segment that is gone, that is durable, and
//!   every head that it names lies in what stays.
//! - **Z5** Segments are left out of the pool only while no checkpoint is named, and none begins before they are back or gone: those of a
//!   log that are free and left out lie in front of others that are used again (`checkpoint::T3`).
//!
//! # Crash
//!
//! The superblock has the one size or the other, whole. Until the next checkpoint an opening reads the log. What
//! was emptied in vain is only not in the cache any more. The second copy of a smaller size may lie on the checkpoint that
//! the superblock of the larger one still names: that one cannot be used then, and the log is read.

use crate::engine::{CacheHealth, Engine};
use crate::format::record::Link;
use crate::format::superblock::{Head, Superblock};
use crate::log::checkpoint::Checkpointer;
use crate::log::image;
use crate::log::segment::State;
use crate::map::slots::ROW_BYTES;
use crate::mutant::Mutant;
use crate::payload::Payload;
use crate::policy::history::History;
use crate::units::{SegmentId, VolumeIndex};
use alloc::vec::Vec;

/// How far a change of size has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A checkpoint ends, and no other begins.
    Holding,
    /// The runtime writes a superblock that names no checkpoint.
    Unnaming,
    /// The segments that go are emptied.
    Vacating,
    /// What is noted in the superblock ends.
    Settling,
    /// Where logs end becomes durable.
    Marking,
    /// The runtime may write the new size.
    Ready,
}

/// A change of size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resizing {
    segment_count: u32,
    stage: Stage,
}

/// Where a log ended, to be named by the superblock when that is durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    head: Head,
    flush_epoch: u64,
}

impl Engine {
    /// The cache is to have so many segments.
    pub fn begin_to_resize(&mut self, segment_count: u32) {
        assert!(self.resizing.is_none() && segment_count != self.segments.total());
        self.checkpoint.held = true;
        self.resizing = Some(Resizing { segment_count, stage: Stage::Holding });
    }

    /// How far that is; none: nothing is to be changed.
    pub fn resize_stage(&self) -> Option<Stage> {
        self.resizing.map(|it| it.stage)
    }

    /// Segments that are still to be emptied.
    pub fn segments_to_vacate(&self) -> u32 {
        self.segments.left()
    }

    /// Whether the runtime may write the superblock now, with no checkpoint named or with the new size (Z1).
    pub fn may_resize(&self) -> bool {
        matches!(self.resize_stage(), Some(Stage::Unnaming | Stage::Ready))
            && self.health == CacheHealth::Healthy
            && !self.is_checkpointing()
            && !self.superblock_busy
    }

    /// The superblock, durable, names no checkpoint: what goes may be left out of the pool (Z5).
    pub fn vacate(&mut self, payload: &mut impl Payload) {
        let Some(resizing) = &mut self.resizing else { return };
        assert_eq!(resizing.stage, Stage::Unnaming);
        resizing.stage = Stage::Vacating;
        let limit = resizing.segment_count;
        self.segments.set_limit(limit);
        for id in (limit..self.segments.total()).map(SegmentId) {
            let segment = *self.segments.get(id);
            if matches!(segment.state, State::Open | State::Sealed) {
                self.volume(segment.volume).log.going += 1;
            }
        }
        self.reserves_settle();
        self.put_in_order(payload);
    }

    /// The cache stays as large as it is.
    pub fn cancel_resize(&mut self, payload: &mut impl Payload) {
        if self.resizing.take().is_none() {
            return;
        }
        // None may be named.
        self.want_checkpoint();
        self.segments.set_limit(self.segments.total());
        for state in self.volumes.iter_mut().flatten() {
            (state.log.going, state.log.mark) = (0, None);
        }
        self.reserves_settle();
        self.checkpoint.held = false;
        self.put_in_order(payload);
    }

    pub(crate) fn resize_settle(&mut self, payload: &mut impl Payload) {
        let Some(Resizing { segment_count, stage }) = self.resizing else { return };
        if self.health == CacheHealth::Failed {
            return;
        }
        let rests = !self.is_checkpointing() && !self.superblock_busy;
        let next = match stage {
            Stage::Holding if rests && segment_count > self.segments.total() => Stage::Ready,
            Stage::Holding if rests => Stage::Unnaming,
            Stage::Vacating if self.segments.left() == 0 => Stage::Settling,
            Stage::Vacating => {
                for index in 0..self.volume_end {
                    self.leave_newest(VolumeIndex(index as u8), segment_count, payload);
                }
                return;
            }
            Stage::Settling if rests => {
                self.mark_ends(payload);
                Stage::Marking
            }
            Stage::Marking if self.ends_are_durable() => match self.ends_stay(segment_count) {
                true => Stage::Ready,
                false => Stage::Settling,
            },
            _ => return,
        };
        self.resizing = Some(Resizing { segment_count, stage: next });
    }

    /// A log whose newest segment goes, or that ends in one that has gone, goes on in another.
    fn leave_newest(&mut self, index: VolumeIndex, limit: u32, payload: &mut impl Payload) {
        let Some(state) = self.volume_ref(index) else { return };
        let log = &state.log;
        if log.newest.is_none_or(|id| id.0 < limit) {
            return;
        }
        if log.open.is_some_and(|open| open.entries > 0) {
            self.close_record(index, payload);
        }
        let head = self.volume(index).log.head;
        let log = &mut self.volumes[usize::from(index.0)].as_deref_mut().expect("looked").log;
        log.note_wanted = true;
        // A segment in a log has a record: the note, then.
        if let Some(head) = head.filter(|head| self.segments.get(head.segment).used > 0) {
            assert!(head.segment.0 >= limit);
            if let Some(open) = log.open.take() {
                log.next_sequence = open.sequence;
            }
            self.seal_segment(index, payload);
        }
    }

    /// Ends each log's segment, and notes where (Z4).
    fn mark_ends(&mut self, payload: &mut impl Payload) {
        self.end_segments(payload);
        for state in self.volumes.iter_mut().flatten() {
            let log = &mut state.log;
            log.mark = None;
            let Some(head) = log.end(state.index, &self.segments) else { continue };
            log.mark = Some(Mark { head, flush_epoch: log.flush_epoch });
            log.want(log.closed);
        }
    }

    fn ends_are_durable(&self) -> bool {
        let early = self.config.mutants.is(Mutant::ResizeEndsNotDurable);
        let marks = |mark: Mark| mark.head.through;
        self.all_volumes().all(|state| {
            let log = &state.log;
            log.mark.map(marks).is_none_or(|through| log.durable.through >= through) || early
        })
    }

    /// Whether all of them lie in what stays; a log that ends elsewhere is to go on.
    fn ends_stay(&mut self, limit: u32) -> bool {
        let mut all = true;
        for state in self.volumes.iter_mut().flatten() {
            let log = &mut state.log;
            let stays = |mark: Mark| mark.head.link.segment.0 < limit;
            if log.last != Link::NONE && !log.mark.is_some_and(stays) {
                log.note_wanted = true;
                all = false;
            }
        }
        all
    }

    /// Notes in the superblock of another size where each log ended (Z4).
    pub fn note_ends(&self, superblock: &mut Superblock) {
        superblock.segment_sequence = superblock.segment_sequence.max(self.segment_sequence);
        for state in self.all_volumes() {
            let recorded = superblock.volumes.get_mut(usize::from(state.index.0));
            let (Some(Some(recorded)), Some(mark)) = (recorded, state.log.mark) else { continue };
            recorded.head = mark.head;
            recorded.flush_epoch = mark.flush_epoch;
            state.log.note(recorded);
        }
    }

    /// A write of the superblock has failed outside of the engine: nothing is appended any more.
    pub fn cache_has_failed(&mut self) {
        self.fail_cache();
    }

    /// The cache has the size that `superblock` says, whose copies are durable (Z3). `cells` and `rows` are memory
    /// for the tables, all zero, as many as [`crate::log::handover::Tables::counts`] says.
    pub fn resize(
        &mut self,
        superblock: &Superblock,
        cells: Vec<u64>,
        rows: Vec<[u8; ROW_BYTES]>,
        payload: &mut impl Payload,
    ) {
        assert!(self.may_resize() && superblock.checkpoint_sequence == 0); // Z1, Z2
        let slots = image::slot_count(superblock);
        let before = u64::from(self.segments.total());
        let room = self.checkpoint.stream_room();
        let more = u64::from(superblock.segment_count).saturating_sub(before) * 4;
        self.index = self.index.resized(slots, cells);
        self.slots = self.slots.resized(rows);
        self.segments = self.segments.resized(superblock.segment_count);
        self.history = History::new(slots);
        let mut checkpoint = Checkpointer::new(superblock, Vec::new());
        // The fixed sum of memory stays what it was; the next opening takes all there may be.
        checkpoint.limit_stream(room + more as usize);
        checkpoint.sequence = checkpoint.sequence.max(self.checkpoint.sequence);
        checkpoint.count = self.checkpoint.count;
        self.checkpoint = checkpoint;
        self.cancel_resize(payload);
    }
}
