// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From placed to durable: records are written, the cache device is flushed, waiters answered.
//!
//! One flush of the cache device covers every log: all who wait are one group commit.
//!
//! # Invariants
//!
//! - **D1** A flush covers only records whose writes were complete when it was issued.
//! - **D2** Who waits for a sequence is answered only after a flush that covers it.
//! - **D3** A failed write or flush is never tried again: the log is closed for appends.
//! - **D4** Marks that lie in the superblock rest on nothing that is not durable: entries that name
//!   again what a segment held before the tail passes it, for one.
//! - **D5** From a failed flush on no other one counts, however it ends: the device tells of what it drops once, and not
//!   always to the one who should have covered it. A flush that ended well before has counted, so whoever runs the engine has only one of
//!   the cache device under way at a time, the superblock's included, or tells all of them that overlap of a failure.
//! - **D6** What was placed is on its way to the device `close_after` later and wanted durable `durable_after` later, whatever is placed
//!   after it; and what is wanted durable is flushed when it is written, whatever is wanted after it: beside a guest that the device cannot keep up
//!   with, the newest wish is never written.

use crate::effect::{Effect, Fault, SuperblockChange, Token};
use crate::engine::{Acknowledge, CacheHealth, Engine, Pending};
use crate::log::recovery::LogEnd;
use crate::log::segment::State;
use crate::mutant::Mutant;
use crate::op::around::Around;
use crate::payload::Payload;
use crate::policy::bypass::How;
use crate::request::RequestError;
use crate::units::{Ordinal, SegmentId, Sequence, Tick, VolumeIndex};
use crate::volume::Volume;

/// Marks on their way into the superblock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    volume: VolumeIndex,
    attach_generation: u32,
    watermark: Sequence,
    tail: Ordinal,
}

impl Engine {
    /// Closes the open record if someone waits for it or its time has come.
    pub(crate) fn durable_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        if self.health == CacheHealth::Failed {
            return;
        }
        let now = self.now;
        let Engine { config, volumes, .. } = self;
        let state = volumes[usize::from(volume.0)].as_deref_mut().expect("the volume exists");
        // Once: what is placed while that flush is under way waits for the next one.
        let asked = state.log.wanted > state.log.durable.through;
        let old = |since| now.since(since) >= config.durable_after;
        if !asked
            && (state.log.undurable_bytes() >= config.durable_bytes
                || state.log.undurable_since().is_some_and(old))
        {
            state.log.want(state.log.placed);
        }
        let log = &mut state.log;
        let open = log.open.filter(|open| open.entries > 0);
        let due = open.is_some_and(|open| {
            log.wanted > log.closed
                || now.since(open.since) >= config.close_after
                || config.acknowledge != Acknowledge::Placed && log.in_flight.is_empty()
        });
        if due || open.is_some() && log.note_wanted {
            self.close_record(volume, payload);
        } else if open.is_none() && self.volume(volume).log.note_wanted {
            self.write_note(volume, payload);
        }
    }

    /// Writes a record of nothing but marks, and wants it durable.
    fn write_note(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let free = self.segments.free_count();
        let stays = self.config.mutants.is(Mutant::BadHeaderStaysLast);
        let (kept, state) = (self.config.free_segments_kept, self.volume(volume));
        // What fills the extents lies in the newest segment: only another one makes it reclaimable. And what a bad header held is safe
        // behind another one only (H4 of `policy::scrub`): the superblock has no word for that.
        let only = state.extents_full && state.log.newest == state.log.tail_segment;
        let goes_on = only || state.ends_with_bad_header() && !stays;
        let few = free == 0 || free <= kept && !goes_on;
        let log = &state.log;
        let (open, head) = (log.open.is_some(), log.head.is_some());
        if open || (head || !few) && self.note_room(volume, payload) {
            self.close_record(volume, payload);
        } else if few {
            self.note_in_superblock(volume);
        }
    }

    /// The pool is empty, and only what a note would say can give segments back: the superblock
    /// takes it.
    fn note_in_superblock(&mut self, volume: VolumeIndex) {
        let loose = self.config.mutants.is(Mutant::MarksBeforeDurable);
        let log = &mut self.volume(volume).log;
        if log.durable.through < log.closed && !loose {
            log.want(log.closed); // D4
            return;
        }
        let news = log.watermark > log.durable.watermark || log.tail > log.durable.tail;
        if self.superblock_busy || !news {
            return;
        }
        let state = self.volume(volume);
        let log = &mut state.log;
        log.note_wanted = false;
        let (watermark, tail, backing_as_of) = (log.watermark, log.tail, log.backing_as_of);
        let attach_generation = state.attach_generation;
        self.superblock_busy = true;
        let token =
            self.token(Pending::Marks(Marks { volume, attach_generation, watermark, tail }));
        let change = SuperblockChange::Marks { volume, watermark, tail, backing_as_of };
        self.effects.push_back(Effect::WriteSuperblock { token, change });
    }

    pub(crate) fn marks_noted(&mut self, noted: Marks, result: Result<(), Fault>) {
        self.superblock_busy = false;
        if !self.counts(result) {
            return;
        }
        // The volume may have been forgotten meanwhile.
        let Marks { volume, attach_generation, watermark, tail } = noted;
        let Some(state) = self.volumes[usize::from(volume.0)].as_deref_mut() else { return };
        if state.attach_generation != attach_generation {
            return;
        }
        let log = &mut state.log;
        for marks in [&mut log.written, &mut log.flushing, &mut log.durable] {
            marks.watermark = marks.watermark.max(watermark);
            marks.tail = marks.tail.max(tail);
        }
        self.note_clean(volume);
        self.free_retired(volume);
    }

    pub(crate) fn record_written(
        &mut self,
        token: Token,
        volume: VolumeIndex,
        segment: SegmentId,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        self.segments.get_mut(segment).writes -= 1;
        if result.is_err() && !self.config.mutants.is(Mutant::FailedWriteCounts) {
            return self.fail_cache();
        }
        if self.health == CacheHealth::Failed {
            // The buffer is kept: it may be all there is of a record whose write failed.
            return;
        }
        if self.write_rest(volume, segment, token) {
            return;
        }
        self.release_buffer(segment, payload);
        let log = &mut self.volume(volume).log;
        // A record that is written and waits for one before it has a token that was used again.
        let mut waiting = log.in_flight.iter_mut().filter(|record| !record.written);
        if let Some(record) = waiting.find(|record| record.token == token) {
            record.written = true;
        }
        while let Some(record) = log.in_flight.front().filter(|record| record.written) {
            let marks = record.marks;
            log.note_written(marks);
            log.in_flight.pop_front();
        }
        let through = log.written.through;
        while let Some(waiter) = self.volume(volume).written_waiters.front().copied() {
            if waiter.sequence > through {
                break;
            }
            self.volume(volume).written_waiters.pop_front();
            self.answer(waiter.request, Ok(()));
        }
    }

    /// Starts a flush of the cache device if that would help somebody.
    pub(crate) fn flush_settle(&mut self) {
        if self.flush_running || self.health == CacheHealth::Failed {
            return;
        }
        if !self.all_volumes().any(|volume| flush_helps(volume, &self.config.mutants)) {
            return;
        }
        for volume in self.volumes[..self.volume_end].iter_mut().flatten() {
            volume.log.flushing = volume.log.written; // D1
            if self.config.mutants.is(Mutant::AnswerFlushBeforeRecords) {
                volume.log.flushing.through = volume.log.closed;
            }
        }
        self.flush_running = true;
        let token = self.token(Pending::CacheFlush);
        if self.config.mutants.is(Mutant::SkipCacheFlush) {
            self.tokens.remove(token.0);
            return self.cache_flushed(Ok(()));
        }
        self.effects.push_back(Effect::FlushCache { token });
    }

    pub(crate) fn cache_flushed(&mut self, result: Result<(), Fault>) {
        self.flush_running = false;
        if !self.counts(result) {
            return;
        }
        let later = self.config.mutants.is(Mutant::FlushCoversLater);
        for index in 0..self.volume_end {
            if let Some(state) = self.volumes[index].as_deref_mut() {
                let log = &mut state.log;
                log.durable = if later { log.written } else { log.flushing };
                if log.wanted_first <= log.durable.through {
                    log.wanted_first = log.wanted;
                }
                self.answer_durable(VolumeIndex(index as u8)); // D2
                self.note_clean(VolumeIndex(index as u8));
                self.free_retired(VolumeIndex(index as u8));
            }
        }
    }

    fn answer_durable(&mut self, volume: VolumeIndex) {
        loop {
            let state = self.volume(volume);
            let through = state.log.durable.through;
            let Some(waiter) = state.durable_waiters.front().copied() else { return };
            if waiter.sequence > through {
                return;
            }
            state.durable_waiters.pop_front();
            if let Around::EntryFirst(token) = self.active(waiter.request).around {
                self.around_issue(waiter.request, How::EntryFirst, token);
            } else {
                self.answer(waiter.request, Ok(()));
            }
        }
    }

    /// Frees the segments whose death is durable (S6).
    fn free_retired(&mut self, volume: VolumeIndex) {
        loop {
            let early = self.config.mutants.is(Mutant::FreeBeforeTailDurable);
            let log = &self.volume(volume).log;
            let limit = if early { log.tail } else { log.durable.tail };
            let Some(id) = log.oldest else { return };
            let segment = self.segments.get_mut(id);
            if segment.state != State::Retired || segment.ordinal >= limit {
                return;
            }
            segment.become_state(State::Free);
            self.retired -= 1;
            let next = segment.next.take();
            self.segments.put_free(id);
            let log = &mut self.volume(volume).log;
            log.oldest = next;
            if log.before_head == Some(id) {
                log.before_head = None;
            }
        }
    }

    /// Whether a flush, or a write of the superblock, which is flushed, makes anything durable (D5).
    pub(crate) fn counts(&mut self, result: Result<(), Fault>) -> bool {
        if self.config.mutants.is(Mutant::FailedFlushCounts) {
            return true;
        }
        if result.is_err() {
            self.fail_cache();
        }
        let alone = self.config.mutants.is(Mutant::FlushHeardAlone);
        result.is_ok() && (self.health == CacheHealth::Healthy || alone)
    }

    /// Up to where each log has come that holds what a guest has written, to be noted in memory
    /// that outlives the process: when a flush of the cache device is begun, after each step while one is under way, before what
    /// the step answers is told, and when one has failed (V10 of `log::recovery`). What is durable, or on its backing device, counts as well: as long as no
    /// record says so, whoever finds something bad in it ends the log there, and older versions count again.
    pub fn log_ends(&self) -> impl Iterator<Item = (VolumeIndex, LogEnd)> {
        self.all_volumes().map(|state| {
            let through = state.log.dirtied;
            (state.index, LogEnd { attach_generation: state.attach_generation, through })
        })
    }

    /// The cache device failed: whoever needs it hears so, nothing is appended any more (D3).
    pub(crate) fn fail_cache(&mut self) {
        if self.health == CacheHealth::Failed {
            return;
        }
        self.health = CacheHealth::Failed;
        for index in 0..self.volumes.len() {
            let Some(state) = self.volumes[index].as_deref_mut() else { continue };
            // What is placed and not durable may be copies of what was read.
            let durable = if state.is_settled() { Ok(()) } else { Err(RequestError::Io) };
            let waiting = [
                (core::mem::take(&mut state.durable_waiters), durable),
                (core::mem::take(&mut state.written_waiters), Err(RequestError::Io)),
                (core::mem::take(&mut state.through_waiters), Err(RequestError::Io)),
            ];
            for (waiters, result) in &waiting {
                for waiter in waiters {
                    match self.active(waiter.request).around {
                        Around::EntryFirst(token) => self.around_again(waiter.request, token),
                        _ => self.answer(waiter.request, *result),
                    }
                }
            }
        }
    }

    /// When something of this volume is due.
    pub(crate) fn volume_deadline(&self, volume: &Volume) -> Option<Tick> {
        let slices = self.slices_of(volume).deadline(self.now);
        if self.health == CacheHealth::Failed {
            return slices; // guests' reads go on
        }
        let open = volume.log.open.filter(|open| open.entries > 0);
        let close = open.map(|open| open.since.after(self.config.close_after));
        let wanted = volume.log.wanted > volume.log.durable.through;
        let durable = volume.log.undurable_since().filter(|_| !wanted);
        let durable = durable.map(|since| since.after(self.config.durable_after));
        let writeback = self.writeback_deadline(volume);
        let delay = volume.delay.deadline(self.now).filter(|_| !volume.writes.is_empty());
        [close, durable, writeback, slices, delay].into_iter().flatten().min()
    }
}

fn flush_helps(volume: &Volume, mutants: &crate::mutant::Mutants) -> bool {
    let log = &volume.log;
    let written =
        if mutants.is(Mutant::AnswerFlushBeforeRecords) { log.closed } else { log.written.through };
    if written <= log.durable.through {
        return false;
    }
    let waiter = volume.durable_waiters.front().is_some_and(|waiter| waiter.sequence <= written);
    waiter || log.wanted > log.durable.through && log.wanted_first <= written
}
