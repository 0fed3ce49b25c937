// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Plain writes: one whole block, answered when it is placed, with nothing before it and nothing in its way. Most writes of
//! most guests are.
//!
//! # Invariants
//!
//! - **P1** A write comes this way only if `op::write` would place it in the open record and answer it before it looks
//!   at anything else; then the same is placed and answered, without a row in `requests` and a turn in the queue.

use crate::effect::Effect;
use crate::engine::{Acknowledge, CacheHealth, Engine};
use crate::format::entry::Kind;
use crate::format::superblock::{Mode, Order};
use crate::mutant::Mutant;
use crate::payload::{Ingested, Payload};
use crate::request::{Op, Request};
use crate::units::{BLOCK_BYTES, Lba, VolumeIndex};
use crate::volume::Volume;

impl Engine {
    /// A request for the block there comes soon: what it looks at first is fetched. Nothing is decided, and nobody
    /// need keep his word; of what is outside the volume nothing is known.
    #[inline]
    pub fn expect(&self, volume: VolumeIndex, offset: u64, payload: &mut impl Payload) {
        if self.volume_ref(volume).is_some_and(|state| offset < state.size_bytes) {
            self.fetch_place(volume, Lba(offset / BLOCK_BYTES), payload);
        }
    }

    /// Has the index fetched where looking for a block begins.
    #[inline]
    pub(crate) fn fetch_place(&self, volume: VolumeIndex, lba: Lba, payload: &mut impl Payload) {
        let soon = self.index.begin(volume, lba);
        soon.into_iter().for_each(|soon| payload.prefetch(soon));
    }

    /// Places and answers a write if it is a plain one; says whether it was.
    pub(crate) fn write_plainly(&mut self, request: &Request, payload: &mut impl Payload) -> bool {
        let Request { volume, op, offset, length, tag } = *request;
        let whole = length == BLOCK_BYTES && offset.is_multiple_of(BLOCK_BYTES);
        let plain = |state: &Volume| {
            // Subtracted, not added: nobody has checked the range yet.
            let inside = offset < state.size_bytes && state.size_bytes - offset >= BLOCK_BYTES;
            inside && self.takes_plainly(state)
        };
        if op != (Op::Write { fua: false }) || !whole || !self.volume_ref(volume).is_some_and(plain)
        {
            return false;
        }
        let lba = Lba(offset / BLOCK_BYTES);
        let (buffer, slot) = self.next_slot(volume);
        self.fetch_place(volume, lba, payload);
        let Ingested::Stored { crc } = payload.ingest(tag, 0, buffer, slot) else {
            return false; // zeros become an extent
        };
        self.volume(volume).stats.writes += 1;
        self.place_data(volume, lba, crc, Kind::Data, payload);
        self.effects.push_back(Effect::Answer { tag, result: Ok(()) });
        true
    }

    /// Whether a write of a block finds its place and its answer at once (P1).
    fn takes_plainly(&self, state: &Volume) -> bool {
        // With dirty data and an order nothing goes around the log (Y1 of `bypass`), and runs are not followed.
        let through_log = !state.is_settled()
            && state.order != Order::Relaxed
            && !state.is_passing()
            && !self.config.mutants.is(Mutant::OrderIgnored);
        let loose = self.config.mutants.is(Mutant::PlainOverLock);
        let first = state.writes.is_empty() && (loose || state.locks.is_empty()); // W1 of `write`
        let waits = state.delay.is_felt() || state.starved || state.refused;
        let full = state.parked.full || state.extents_full || state.around.awaits;
        let answers = self.config.acknowledge == Acknowledge::Placed
            && state.mode == Mode::WriteBack
            && !state.drained;
        let fits = state.log.has_room(1, self.geometry.segment_blocks)
            && state.log.head.is_some_and(|head| !head.reserve);
        state.serving
            && self.health == CacheHealth::Healthy
            && through_log
            && first
            && !waits
            && !full
            && answers
            && fits
    }
}
