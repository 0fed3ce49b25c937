// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes that go around the log, to a volume with nothing dirty.
//!
//! # Invariants
//!
//! - **A1** If the log holds an older version, an entry that voids it is durable before the
//!   backing device is written: no crash can bring the older version back.
//! - **A2** While it is under way nobody else writes these blocks.
//! - **A3** A flush of the backing device that fails while such writes are not flushed is latched:
//!   the device may have dropped them, and would answer the next flush well. They are not in the
//!   log, so no flush of this volume is answered well until it is opened again.

use crate::effect::Fault;
use crate::engine::{Acknowledge, Active, Engine, Pending};
use crate::format::entry::Kind;
use crate::payload::Payload;
use crate::policy::slices::Side;
use crate::request::{Op, RequestError};
use crate::units::VolumeIndex;
use crate::volume::{Lock, Waiter};

impl Engine {
    /// Begins; says whether there was room for what it needs.
    pub(crate) fn around_begin(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        payload: &mut impl Payload,
    ) -> bool {
        let active = *self.active(at);
        let end = active.first + active.blocks;
        // What the index forgot and the log still holds would come back after a crash.
        let state = self.volume(volume);
        let forgotten = state.forgot || state.log.tail > state.log.durable.tail;
        let cached = forgotten
            || (0..active.blocks)
                .any(|block| self.index.get(volume, active.first + block).is_some())
            || self.volume(volume).extents.overlapping(active.first, end).next().is_some();
        if cached && !self.extent_room(volume, payload) {
            return false;
        }
        self.tickets.void(volume, active.first, active.blocks);
        let lock = Lock { owner: at, start: active.first, end }; // A2
        self.volume(volume).locks.push(lock);
        let stats = &mut self.volume(volume).stats;
        stats.bypassed_writes += 1;
        stats.bypassed_blocks += active.blocks;
        stats.written_blocks += active.blocks;
        if !cached {
            self.around_issue(at);
            return true;
        }
        self.place_extent(volume, Kind::Bypassed, active.first, active.blocks as u32, payload);
        let state = self.volume(volume);
        let sequence = state.log.placed;
        state.log.wanted = state.log.wanted.max(sequence);
        state.durable_waiters.push_back(Waiter { sequence, request: at });
        self.active(at).remaining = 1; // A1: tells `durable` that the write comes next.
        true
    }

    pub(crate) fn around_issue(&mut self, at: u32) {
        self.active(at).backing_waited = true;
        let request = self.active(at).request;
        let state = self.volume(request.volume);
        state.around_used = true;
        state.around_under_way += 1;
        let token = self.token(Pending::Around { request: at });
        self.foreground_ask(request.volume, token);
    }

    pub(crate) fn around_complete(&mut self, at: u32, result: Result<(), Fault>) {
        let now = self.now;
        let Active { request, first, blocks, .. } = *self.active(at);
        self.tickets.void(request.volume, first, blocks);
        let state = self.volume(request.volume);
        state.slices.end(Side::Foreground, now);
        state.unlock(at);
        state.around_under_way -= 1;
        state.around_unflushed = true;
        if result.is_err() {
            state.stats.backing_faults += 1;
            return self.answer(at, Err(RequestError::Io));
        }
        let durable = self.config.acknowledge == Acknowledge::Durable;
        if durable || request.op == (Op::Write { fua: true }) {
            self.flush_accept(at);
        } else {
            self.answer(at, Ok(()));
        }
    }
}
