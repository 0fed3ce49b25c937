// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Everything that changes a volume: writes, write-zeroes, discards.
//!
//! They are placed in the order they came, each as far as there is room. A request that covers a
//! block in part first has that block's old content read, and holds the block until it is placed.
//!
//! # Invariants
//!
//! - **W1** Between reading a block's old content for a partial write and placing the merged block
//!   nobody else places that block.
//! - **W2** A write is answered well only after all of it is placed.
//! - **W3** One whose bytes cannot be had fails. What of it was placed before stays, as on a disk that fails in the middle of a write; nobody
//!   waits for the rest.

use crate::engine::{Acknowledge, CacheHealth, Engine};
use crate::format::entry::Kind;
use crate::format::superblock::Order;
use crate::mutant::Mutant;
use crate::op::around::Around;
use crate::payload::{Ingested, Payload, Place};
use crate::policy::bypass::{How, Reason, is_chance};
use crate::policy::writeback::Stage;
use crate::request::{Op, RequestError};
use crate::units::{BLOCK_BYTES, Lba, VolumeIndex};
use crate::volume::{LOCK_COUNT_MAX, Lock, Volume, Waiter};

/// Which of a request's blocks it covers only in part.
#[derive(Clone, Copy, Debug, Default)]
struct Edges {
    first: bool,
    last: bool,
}

/// What becomes of a write after the cache device failed.
enum Past {
    Goes,
    Waits,
    Refused,
}

impl Engine {
    pub(crate) fn write_accept(&mut self, at: u32) {
        let active = *self.active(at);
        let volume = active.request.volume;
        if !matches!(active.request.op, Op::Write { .. }) {
            self.volume(volume).stats.discards += 1;
        } else {
            let state = self.volume(volume);
            state.stats.writes += 1;
            if state.follows_runs() {
                let (run, ago) = self.writes.follow(volume, active.first, active.blocks);
                self.active(at).run = run;
                self.active(at).chance = is_chance(run, ago, active.blocks);
            }
        }
        if active.request.op == Op::Discard {
            // Only whole blocks are given up; the volume's last block is whole if it is all there, and is to stay so.
            let state = self.volume(volume);
            let end = active.request.offset + active.request.length;
            let is_all = end == state.size_bytes && state.growing.is_none();
            let whole_end = if is_all { state.blocks() } else { end / BLOCK_BYTES };
            let first = active.request.offset.div_ceil(BLOCK_BYTES);
            if first >= whole_end {
                return self.answer(at, Ok(()));
            }
            let active = self.active(at);
            active.first = Lba(first);
            active.blocks = whole_end - first;
        }
        self.volume(volume).writes.push_back(at);
    }

    /// Places what can be placed, as the first step of settling; says whether no other step has
    /// anything to do because of it.
    pub(crate) fn write_quietly(
        &mut self,
        volume: VolumeIndex,
        payload: &mut impl Payload,
    ) -> bool {
        let Some(state) = self.volume_ref(volume) else { return false };
        let (closed, extents) = (state.log.closed, state.pending_extents.len());
        self.write_settle(volume, payload);
        let state = self.volume(volume);
        state.log.closed == closed
            && state.pending_extents.len() == extents
            && self.is_quiet_behind(volume)
    }

    /// Whether no step but placing has anything to do because of what was placed, in the record that was open before.
    #[inline]
    pub(crate) fn is_quiet_behind(&mut self, volume: VolumeIndex) -> bool {
        let (now, wall) = (self.now, self.wall);
        let placed = self.config.acknowledge == Acknowledge::Placed;
        let through = self.is_through(volume);
        let state = self.volume(volume);
        state.log.times.note(state.log.placed, now, wall);
        let log = &state.log;
        let waits = !state.writes.is_empty() || state.starved || state.extents_full || through;
        let closes = log.wanted > log.closed || log.note_wanted || !placed;
        let (dirty, idle) = (log.dirty_blocks, state.writeback.stage == Stage::Idle);
        let begins = state.writeback.dirty_since.is_none();
        !(waits || closes || begins || idle && dirty >= self.dirty_limit())
    }

    /// Places what can be placed.
    pub(crate) fn write_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let state = self.volume(volume);
        (state.starved, state.around.awaits, state.refused) = (false, false, false);
        state.extents_full &= !state.extents.has_guest_room();
        // Bounded: each turn takes a request off the queue or stops.
        while let Some(at) = self.volume(volume).writes.front().copied() {
            if self.health == CacheHealth::Failed {
                match self.write_past_failed(volume, at, payload) {
                    Past::Goes => continue,
                    Past::Waits => break,
                    Past::Refused => {}
                }
            }
            if self.health == CacheHealth::Failed || self.volume(volume).parked.full {
                self.write_fails(volume, at, RequestError::Io);
                continue;
            }
            if !self.active(at).edges_read {
                let active = *self.active(at);
                let end = active.first + active.blocks;
                let locked = self.volume(volume).is_locked(active.first, end, at);
                let logged = active.around == Around::Logged;
                let meets = || {
                    let how = || self.bypass(volume, at).map(|it| it.1);
                    !logged
                        && self.only_meets(volume, at)
                        && how().is_some_and(|it| it != How::EntryLast)
                };
                if locked && !meets() {
                    self.volume(volume).around.awaits = true;
                    break;
                }
                if !logged && self.bypass_waits(volume, at) {
                    self.volume(volume).around.awaits = true;
                    break;
                }
                if !logged && let Some(how) = self.bypass(volume, at) {
                    self.volume(volume).extents_full = false; // `extent_room` says it of this one
                    if !self.around_begin(volume, at, how, payload) {
                        if self.write_refused(volume, at) || self.write_given_up(volume, at) {
                            continue;
                        }
                        self.write_starves(volume);
                        break;
                    }
                    self.volume(volume).writes.pop_front();
                    continue;
                }
                let held = !self.bypass_taken(volume, at) && self.delay_holds(volume);
                // Where a part of it found room all of it would wait for the rest.
                let lacks = self.lacks_room(volume, at);
                if (held || lacks) && self.write_past_full(volume, at, lacks, payload) {
                    continue;
                }
                // What is to pass soon takes no part of the room, nor waits for the rest of it.
                if held || lacks && self.volume(volume).around.awaits {
                    if self.write_given_up(volume, at) {
                        continue;
                    }
                    break;
                }
                let edges = self.edges(at);
                if edges.first || edges.last {
                    if !self.may_lock(self.volume_ref(volume).expect("it exists")) {
                        break;
                    }
                    self.volume(volume).writes.pop_front();
                    self.edges_begin(at, edges, payload);
                    continue;
                }
                self.active(at).edges_read = true;
            }
            self.volume(volume).extents_full = false; // `extent_room` says it of this one
            if !self.write_place(volume, at, payload) {
                if let Some(error) = self.active(at).failed {
                    self.write_fails(volume, at, error); // W3
                    continue;
                }
                if self.write_refused(volume, at) {
                    continue;
                }
                if self.write_past_full(volume, at, true, payload) {
                    continue;
                }
                if self.write_given_up(volume, at) {
                    continue;
                }
                self.write_starves(volume);
                break;
            }
            self.volume(volume).writes.pop_front();
            self.write_placed(volume, at);
        }
    }

    /// The next write, or its entry, found no room.
    fn write_starves(&mut self, volume: VolumeIndex) {
        let starved = !self.lacks_buffer(volume);
        self.volume(volume).starved |= starved;
    }

    /// Whether it may have a segment, and there is no buffer for it. Buffers come back by themselves (P4 of `log::append`): writing
    /// back would only take the cache device from those who wait for it.
    fn lacks_buffer(&self, volume: VolumeIndex) -> bool {
        self.buffers.is_empty() && self.volume_ref(volume).is_some_and(|state| !state.refused)
    }

    /// Gives up a request that waits for room which no batch makes any more, or for a buffer; says whether it did.
    fn write_given_up(&mut self, volume: VolumeIndex, at: u32) -> bool {
        if self.gives_up {
            self.write_fails(volume, at, RequestError::Closing);
        }
        self.gives_up
    }

    /// The first in the queue is answered with an error.
    fn write_fails(&mut self, volume: VolumeIndex, at: u32, error: RequestError) {
        let state = self.volume(volume);
        state.writes.pop_front();
        state.unlock(at);
        self.answer(at, Err(error));
    }

    /// Whoever waits for the backing device hears an error.
    pub(crate) fn fail_through_waiters(&mut self, volume: VolumeIndex, error: RequestError) {
        while let Some(waiter) = self.volume(volume).through_waiters.pop_front() {
            self.answer(waiter.request, Err(error));
        }
    }

    /// Refuses a request that waits for room for an extent, if lost blocks have it all: nobody makes
    /// room then, and what is behind it may be what ends their loss.
    fn write_refused(&mut self, volume: VolumeIndex, at: u32) -> bool {
        let state = self.volume(volume);
        let stuck = state.writeback.stuck || state.extents.is_all_lost();
        if !state.extents_full || !stuck {
            return false;
        }
        state.extents_full = false;
        self.write_fails(volume, at, RequestError::Io);
        true
    }

    /// Whether the log has no room for all of a write before something is written back.
    fn lacks_room(&mut self, volume: VolumeIndex, at: u32) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        if state.order != Order::Relaxed || !state.delay.is_felt() {
            return false;
        }
        // What is left then is hardly enough for all of it, and nobody knows when there will be more.
        let full = state.delay.is_full() && state.writeback.pace.is_none();
        let blocks = self.active(at).blocks;
        full || !self.log_holds_more(volume, blocks)
    }

    /// The log has no room, and the backing device takes a write sooner than write-back makes some.
    fn write_past_full(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        lacks_room: bool,
        payload: &mut impl Payload,
    ) -> bool {
        let Edges { first, last } = self.edges(at);
        let begun = first || last || self.active(at).placed > 0 || self.lacks_buffer(volume);
        let how = (!begun).then(|| self.bypass_full(volume, at, lacks_room)).flatten();
        let Some(how) = how else {
            return false;
        };
        let began = self.around_begin(volume, at, (Reason::Full, how), payload);
        if began {
            self.volume(volume).writes.pop_front();
        }
        began
    }

    /// The cache device failed: what needs nothing of it, or passes it, goes on.
    fn write_past_failed(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        payload: &mut impl Payload,
    ) -> Past {
        let active = *self.active(at);
        if active.placed > 0 || active.around == Around::Logged {
            return Past::Refused;
        }
        if active.edges_read {
            // Around the log nothing is needed of them.
            self.volume(volume).unlock(at);
            self.active(at).edges_read = false;
        }
        let state = self.volume_ref(volume).expect("it exists");
        let locked = state.is_locked(active.first, active.first + active.blocks, at);
        if locked || !self.may_lock(state) {
            return Past::Waits;
        }
        let Some(how) = self.bypass(volume, at) else {
            let waits = self.stale_ask(volume);
            return if waits { Past::Waits } else { Past::Refused };
        };
        self.volume(volume).writes.pop_front();
        let began = self.around_begin(volume, at, how, payload);
        assert!(began, "it needs no entry");
        Past::Goes
    }

    /// Whether a write may have a range for itself while devices do something for it. What it waits for ends with a completion.
    pub(crate) fn may_lock(&self, state: &Volume) -> bool {
        state.locks.len() < LOCK_COUNT_MAX && self.has_token_room(1)
    }

    fn edges(&mut self, at: u32) -> Edges {
        let active = self.active(at);
        if active.request.op == Op::Discard {
            return Edges::default();
        }
        let end = active.request.offset + active.request.length;
        let (head, tail) = (active.request.offset % BLOCK_BYTES, end % BLOCK_BYTES);
        let single = active.blocks == 1;
        Edges { first: head != 0 || single && tail != 0, last: !single && tail != 0 }
    }

    /// Locks the request's blocks, and has the old content of its edges read (W1).
    fn edges_begin(&mut self, at: u32, edges: Edges, payload: &mut impl Payload) {
        let active = *self.active(at);
        let (volume, tag) = (active.request.volume, active.request.tag);
        let last = active.first + (active.blocks - 1);
        let wanted = [(edges.first, active.first, 0), (edges.last, last, 1)];
        if !self.config.mutants.is(Mutant::EdgeNotLocked) {
            // All of it, not only the edges: what this request covers as a whole may be the edge
            // of a later one, which must not be read before this one is placed.
            let lock = Lock { owner: at, start: active.first, end: last + 1 };
            self.volume(volume).locks.push(lock);
        }
        // Keeps the request here until both are issued.
        self.active(at).remaining += 1;
        for (_, lba, edge) in wanted.into_iter().filter(|edge| edge.0) {
            let to = Place::Edge { tag, edge };
            if self.is_all_there_is(at, lba) {
                payload.zero(to, 1);
            } else {
                self.read_issue(at, volume, lba, 1, to, payload);
            }
        }
        self.active(at).remaining -= 1;
        if self.active(at).remaining == 0 {
            let result = self.active(at).failed.map_or(Ok(()), Err);
            self.edges_done(at, result);
        }
    }

    /// Whether a request writes all that there is of the volume's last block, which may end within it: what it held may be lost, or
    /// not be readable, and is not needed.
    fn is_all_there_is(&self, at: u32, lba: Lba) -> bool {
        let request = self.requests.get(at).expect("it is under way").request;
        let state = self.volume_ref(request.volume).expect("it exists");
        let to_end = request.offset + request.length == state.size_bytes;
        to_end
            && request.offset <= lba.bytes()
            && lba.0 + 1 == state.blocks()
            && state.growing.is_none()
    }

    pub(crate) fn edges_done(&mut self, at: u32, result: Result<(), RequestError>) {
        let volume = self.active(at).request.volume;
        match result {
            Ok(()) => {
                self.active(at).edges_read = true;
                self.volume(volume).writes.push_front(at);
            }
            Err(_) => {
                self.volume(volume).unlock(at);
                self.answer(at, result);
            }
        }
    }

    /// Places as much of a request as there is room for; says whether that was all.
    fn write_place(&mut self, volume: VolumeIndex, at: u32, payload: &mut impl Payload) -> bool {
        let active = *self.active(at);
        let placed = match active.request.op {
            Op::Write { .. } => self.place_payload(volume, at, payload),
            Op::WriteZeroes { .. } => self.place_zeroes(volume, at, payload),
            Op::Discard => self.place_range(volume, at, Kind::Discard, active.blocks, payload),
            Op::Read | Op::Fetch | Op::Flush => unreachable!("they change nothing"),
        };
        self.active(at).placed == active.blocks && placed
    }

    fn place_payload(&mut self, volume: VolumeIndex, at: u32, payload: &mut impl Payload) -> bool {
        let Engine { requests, .. } = self;
        let active = *requests.get(at).expect("in the engine");
        let mut block = active.placed;
        let mut zeros = 0;
        let mut room = true;
        while block + zeros < active.blocks {
            if self.may_stay_empty(volume) || !self.room(volume, 1, payload) {
                room = false;
                break;
            }
            let (buffer, slot) = self.next_slot(volume);
            let index = block + zeros;
            self.fetch_place(volume, active.first + index, payload);
            match payload.ingest(active.request.tag, index, buffer, slot) {
                Ingested::Zero if self.config.mutants.is(Mutant::ZeroBlockDropped) => block += 1,
                Ingested::Zero => zeros += 1,
                Ingested::Failed => {
                    self.fail(at, RequestError::Io); // W3
                    room = false;
                    break;
                }
                Ingested::Stored { crc } => {
                    if zeros > 0 {
                        // The zeros before it come first; they may close the record, so the
                        // block is taken in again afterwards.
                        if !self.place_zero_run(volume, active.first + block, zeros, payload) {
                            zeros = 0;
                            room = false;
                            break;
                        }
                        block += zeros;
                        zeros = 0;
                        continue;
                    }
                    if block == 0 && self.seems_done(volume, active.first, crc) {
                        block = active.blocks; // a mutant's
                        break;
                    }
                    self.place_data(volume, active.first + block, crc, Kind::Data, payload);
                    block += 1;
                }
            }
        }
        if zeros > 0 && self.place_zero_run(volume, active.first + block, zeros, payload) {
            block += zeros;
        }
        let sequence = self.volume(volume).log.placed;
        let active = self.active(at);
        active.placed = block;
        active.sequence = sequence;
        room && block == active.blocks
    }

    /// Whether a block of zeros would leave a head empty that has the last buffer, for there is no room for its extent. Others would wait for that buffer
    /// until there is: an empty head cannot be ended for them (P4 of `log::append`).
    fn may_stay_empty(&mut self, volume: VolumeIndex) -> bool {
        self.buffers.len() < 2
            && self.volume(volume).log.head.is_none()
            && !self.config.mutants.is(Mutant::EmptyHeadStays)
            && !self.has_extent_room(volume)
    }

    /// A mutant takes a write whose first block the log holds for one that came again and was done.
    fn seems_done(&self, volume: VolumeIndex, first: Lba, crc: u32) -> bool {
        if !self.config.mutants.is(Mutant::AgainTakenForDone) {
            return false;
        }
        let newest = self.newest_slot(self.volume_ref(volume).expect("it exists"), first);
        newest.is_some_and(|slot| {
            let (segment, block) = self.segments.place(slot);
            let crc = self.seed(segment, block).apply(crc);
            self.slots.held(slot).is_some_and(|held| held.crc == crc)
        })
    }

    fn place_zero_run(
        &mut self,
        volume: VolumeIndex,
        lba: Lba,
        blocks: u64,
        payload: &mut impl Payload,
    ) -> bool {
        if !self.extent_room(volume, payload) {
            return false;
        }
        self.volume(volume).stats.zeroed_blocks += blocks;
        self.place_extent(volume, Kind::Zero, lba, blocks as u32, payload);
        true
    }

    /// A write-zeroes: its partial blocks as data, the rest as extents.
    fn place_zeroes(&mut self, volume: VolumeIndex, at: u32, payload: &mut impl Payload) -> bool {
        let edges = self.edges(at);
        let active = *self.active(at);
        let tag = active.request.tag;
        if edges.first && active.placed == 0 && !self.place_edge(volume, at, tag, 0, payload) {
            return false;
        }
        let inner_end = active.blocks - u64::from(edges.last);
        if !self.place_range(volume, at, Kind::Zero, inner_end, payload) {
            return false;
        }
        !edges.last || self.place_edge(volume, at, tag, active.blocks - 1, payload)
    }

    fn place_edge(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        tag: u32,
        block: u64,
        payload: &mut impl Payload,
    ) -> bool {
        // Room for the extent first: a head that is taken in vain stays empty.
        if !self.has_extent_room(volume) || !self.room(volume, 1, payload) {
            return false;
        }
        let lba = self.active(at).first + block;
        let (buffer, slot) = self.next_slot(volume);
        match payload.ingest(tag, block, buffer, slot) {
            Ingested::Zero => self.place_extent(volume, Kind::Zero, lba, 1, payload),
            Ingested::Stored { crc } => self.place_data(volume, lba, crc, Kind::Data, payload),
            Ingested::Failed => {
                self.fail(at, RequestError::Io); // W3
                return false;
            }
        }
        let sequence = self.volume(volume).log.placed;
        let active = self.active(at);
        active.placed = block + 1;
        active.sequence = sequence;
        true
    }

    /// Places extents up to the request's block `end`; one entry says at most 2^32 - 1 blocks.
    fn place_range(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        kind: Kind,
        end: u64,
        payload: &mut impl Payload,
    ) -> bool {
        while self.active(at).placed < end {
            if !self.extent_room(volume, payload) {
                return false;
            }
            let active = *self.active(at);
            let blocks = (end - active.placed).min(u64::from(u32::MAX)) as u32;
            self.place_extent(volume, kind, active.first + active.placed, blocks, payload);
            let sequence = self.volume(volume).log.placed;
            let active = self.active(at);
            active.placed += u64::from(blocks);
            active.sequence = sequence;
        }
        true
    }

    /// All of it is placed: answers, or says what it waits for (W2).
    fn write_placed(&mut self, volume: VolumeIndex, at: u32) {
        self.volume(volume).unlock(at);
        let through = self.is_through(volume);
        let acknowledge = self.config.acknowledge;
        let (Op::Write { fua } | Op::WriteZeroes { fua }) = self.active(at).request.op else {
            return self.write_wait(volume, at, through, false, acknowledge);
        };
        if fua {
            self.volume(volume).log.flush_epoch += 1;
        }
        let (came, now) = (self.active(at).came, self.now);
        let state = self.volume(volume);
        if state.delay.has_held(came) {
            state.stats.delayed_writes += 1;
            state.stats.delayed_nanos += now.since(came);
        }
        self.write_wait(volume, at, through, fua, acknowledge);
    }

    pub(crate) fn write_wait(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        through: bool,
        fua: bool,
        acknowledge: Acknowledge,
    ) {
        let sequence = self.active(at).sequence;
        let waiter = Waiter { sequence, request: at };
        if through && self.gives_up {
            return self.answer(at, Err(RequestError::Closing));
        }
        if through {
            self.active(at).backing_waited = true;
            // What a batch has written back is durable in the log before.
            let state = self.volume(volume);
            state.log.want(sequence);
            return state.through_waiters.push_back(waiter);
        }
        if fua || acknowledge == Acknowledge::Durable {
            return self.wait_durable(at, sequence);
        }
        match acknowledge {
            Acknowledge::Written if self.volume(volume).log.written.through < sequence => {
                self.volume(volume).written_waiters.push_back(waiter);
            }
            _ => self.answer(at, Ok(())),
        }
    }
}
