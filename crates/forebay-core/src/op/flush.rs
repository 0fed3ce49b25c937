// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flush: everything acknowledged before it becomes durable. FUA is "this write, then wait as a
//! flush waits".

use crate::effect::{Effect, Fault, SuperblockChange};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::mutant::Mutant;
use crate::op::around::Around;
use crate::payload::Payload;
use crate::request::{Op, Request, RequestError};
use crate::units::{Sequence, VolumeIndex};
use crate::volume::Waiter;

impl Engine {
    pub(crate) fn flush_accept(&mut self, at: u32) {
        let volume = self.active(at).request.volume;
        let state = self.volume(volume);
        state.stats.flushes += 1;
        state.log.flush_epoch += 1;
        let placed = state.log.placed;
        if state.around.lost && !self.config.mutants.is(Mutant::FlushFailureForgotten) {
            return self.around_tell(at); // A3
        }
        // A write that went around the log is covered by a flush of the backing device.
        let skips = self.config.mutants.is(Mutant::FlushSkipsBacking);
        let state = self.volume(volume);
        if (state.around.unflushed || state.around.flushing) && !skips {
            self.active(at).sequence = placed;
            self.active(at).around = Around::No;
            return self.around_flush_for(at);
        }
        self.wait_durable(at, placed);
    }

    /// Answers the request when everything up to `sequence` is durable.
    pub(crate) fn wait_durable(&mut self, at: u32, sequence: Sequence) {
        let lie = self.config.mutants.is(Mutant::AnswerFuaAtOnce);
        let failed = self.health == CacheHealth::Failed;
        let volume = self.active(at).request.volume;
        let state = self.volume(volume);
        if state.log.durable.through >= sequence || lie && !failed {
            return self.answer(at, Ok(()));
        }
        if failed {
            // What is placed and not durable may be copies of what was read.
            let settled = self.volume(volume).is_settled();
            return self.answer(at, if settled { Ok(()) } else { Err(RequestError::Io) });
        }
        state.log.want(sequence);
        state.durable_waiters.push_back(Waiter { sequence, request: at });
    }

    /// Flushes the backing device for those who wait for that: one flush at a time.
    pub(crate) fn around_flush(&mut self, volume: VolumeIndex) {
        let now = self.tickets.take();
        let state = &mut self.volume(volume).around;
        if state.flushing {
            return;
        }
        state.flush_begun = now;
        state.flushing = true;
        state.unflushed = false;
        state.flushes += 1;
        let token = self.token(Pending::AroundFlush { volume });
        self.flush_backing(volume, token);
    }

    /// A flush of the backing device failed, whoever wanted it: what was written since the last good
    /// one may be dropped, and no later flush would say so (A3, K5).
    pub(crate) fn backing_flush_failed(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        if !self.config.mutants.is(Mutant::BatchOutlivesFailedFlush) {
            self.writeback_spoil(volume);
        }
        self.ahead_void(volume); // J2
        let state = &mut self.volume(volume).around;
        let around = state.unflushed || state.flushing || state.under_way > 0;
        state.lost |= around;
        // Of what is dropped now nobody was told before.
        state.told &= !around;
        if around && !self.config.mutants.is(Mutant::FlushFailureDiesWithProcess) {
            payload.flush_failed(volume);
        }
    }

    /// The guest learns that a flush failed, if it asked for one: an error of a write says nothing of those before it.
    fn around_tell(&mut self, at: u32) {
        let Request { volume, op, .. } = self.active(at).request;
        self.volume(volume).around.told |= op == Op::Flush;
        self.answer(at, Err(RequestError::Io));
    }

    /// Has a failed flush noted in the superblock, lest a process after this one answers the next one well (A3).
    pub(crate) fn flush_failure_settle(&mut self, volume: VolumeIndex) {
        let around = &self.volume(volume).around;
        if !around.lost || around.noted {
            return;
        }
        let failed = self.health == CacheHealth::Failed;
        if failed || self.superblock_busy || self.config.mutants.is(Mutant::FlushFailureUnnoted) {
            return;
        }
        self.volume(volume).around.noted = true;
        self.superblock_busy = true;
        let token = self.token(Pending::FlushFailed);
        let change = SuperblockChange::FlushFailed { volume };
        self.effects.push_back(Effect::WriteSuperblock { token, change });
    }

    pub(crate) fn flush_failure_noted(&mut self, result: Result<(), Fault>) {
        self.superblock_busy = false;
        if result.is_err() {
            self.fail_cache();
        }
    }

    pub(crate) fn around_flushed(
        &mut self,
        volume: VolumeIndex,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        self.backing_flushed(volume, result, payload);
        let forget = self.config.mutants.is(Mutant::FlushFailureForgotten);
        let state = &mut self.volume(volume).around;
        state.flushing = false;
        // Another flush may have been told of the failure instead of this one.
        let failed = result.is_err() || state.lost && !forget;
        state.unflushed |= failed;
        if !failed {
            state.flushed = state.flush_begun;
        }
        let done = state.flushes;
        // In the order in which they came, so by the flush that covers them.
        while let Some(waiter) = self.volume(volume).around.waiters.front().copied() {
            if waiter.flush > done && !failed {
                return self.around_flush(volume);
            }
            self.volume(volume).around.waiters.pop_front();
            let at = waiter.request;
            if self.active(at).around == Around::Flushing {
                self.around_over_dirty(at, !failed, payload);
            } else if failed {
                self.around_tell(at);
            } else {
                let sequence = self.active(at).sequence;
                self.wait_durable(at, sequence);
            }
        }
    }
}
