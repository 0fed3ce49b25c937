// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flush: everything acknowledged before it becomes durable. FUA is "this write, then wait as a
//! flush waits".

use crate::effect::{Effect, Fault};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::mutant::Mutant;
use crate::op::around::Around;
use crate::payload::Payload;
use crate::request::RequestError;
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
            return self.answer(at, Err(RequestError::Io)); // A3
        }
        let state = self.volume(volume);
        // A write that went around the log is covered by a flush of the backing device.
        if state.around.unflushed || state.around.flushing {
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
        state.log.wanted = state.log.wanted.max(sequence);
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
        self.effects.push_back(Effect::FlushBacking { token, volume });
    }

    /// A flush of the backing device failed, whoever wanted it: what was written since the last good
    /// one may be dropped, and no later flush would say so (A3, K5).
    pub(crate) fn backing_flush_failed(&mut self, volume: VolumeIndex) {
        if !self.config.mutants.is(Mutant::BatchOutlivesFailedFlush) {
            self.writeback_spoil(volume);
        }
        let state = &mut self.volume(volume).around;
        let around = state.unflushed || state.flushing || state.under_way > 0;
        state.lost |= around;
    }

    pub(crate) fn around_flushed(
        &mut self,
        volume: VolumeIndex,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        if result.is_err() {
            self.backing_flush_failed(volume);
        }
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
                self.answer(at, Err(RequestError::Io));
            } else {
                let sequence = self.active(at).sequence;
                self.wait_durable(at, sequence);
            }
        }
    }
}
