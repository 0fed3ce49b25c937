// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flush: everything acknowledged before it becomes durable. FUA is "this write, then wait as a
//! flush waits".

use crate::effect::{Effect, Fault};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::mutant::Mutant;
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
        if state.around_lost && !self.config.mutants.is(Mutant::FlushFailureForgotten) {
            return self.answer(at, Err(RequestError::Io)); // A3
        }
        let state = self.volume(volume);
        // A write that went around the log is covered by a flush of the backing device.
        if state.around_unflushed || state.around_flushing {
            state.around_waiters.push_back(at);
            self.active(at).sequence = placed;
            self.around_flush(volume);
            return;
        }
        self.wait_durable(at, placed);
    }

    /// Answers the request when everything up to `sequence` is durable.
    pub(crate) fn wait_durable(&mut self, at: u32, sequence: Sequence) {
        if self.health == CacheHealth::Failed {
            return self.answer(at, Err(RequestError::Io));
        }
        let lie = self.config.mutants.is(Mutant::AnswerFuaAtOnce);
        let volume = self.active(at).request.volume;
        let state = self.volume(volume);
        if state.log.durable.through >= sequence || lie {
            return self.answer(at, Ok(()));
        }
        state.log.wanted = state.log.wanted.max(sequence);
        state.durable_waiters.push_back(Waiter { sequence, request: at });
    }

    pub(crate) fn around_flush(&mut self, volume: VolumeIndex) {
        let now = self.tickets.take();
        let state = self.volume(volume);
        if state.around_flushing {
            return;
        }
        state.around_flush_begun = now;
        state.around_flushing = true;
        state.around_unflushed = false;
        let token = self.token(Pending::AroundFlush { volume });
        self.effects.push_back(Effect::FlushBacking { token, volume });
    }

    /// A flush of the backing device failed, whoever wanted it: what was written since the last good
    /// one may be dropped, and no later flush would say so (A3, K5).
    pub(crate) fn backing_flush_failed(&mut self, volume: VolumeIndex) {
        if !self.config.mutants.is(Mutant::BatchOutlivesFailedFlush) {
            self.writeback_spoil(volume);
        }
        let state = self.volume(volume);
        let around = state.around_unflushed || state.around_flushing || state.around_under_way > 0;
        state.around_lost |= state.around_used && around;
    }

    pub(crate) fn around_flushed(&mut self, volume: VolumeIndex, result: Result<(), Fault>) {
        if result.is_err() {
            self.backing_flush_failed(volume);
        }
        let forget = self.config.mutants.is(Mutant::FlushFailureForgotten);
        let state = self.volume(volume);
        state.around_flushing = false;
        let late = state.around_unflushed;
        // Another flush may have been told of the failure instead of this one.
        let failed = result.is_err() || state.around_lost && !forget;
        if !failed {
            state.around_flushed = state.around_flush_begun;
        }
        let waiters = state.around_waiters.len();
        for _ in 0..waiters {
            let state = self.volume(volume);
            let at = state.around_waiters.pop_front().expect("counted");
            if failed {
                state.around_unflushed = true;
                self.answer(at, Err(RequestError::Io));
            } else if late {
                // It may have come after a write that this flush did not cover.
                state.around_waiters.push_back(at);
            } else {
                let sequence = self.active(at).sequence;
                self.wait_durable(at, sequence);
            }
        }
        if late && !failed && waiters > 0 {
            self.around_flush(volume);
        }
    }
}
