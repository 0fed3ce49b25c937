// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Misses: blocks that are read from the backing device, and the copies of them that enter the log.
//!
//! A copy is an entry of the kind *fill*: clean from the start, never written back. It is made from the
//! request's memory when the device has answered, so nobody waits for it. Which block is worth it is decided here:
//!
//! | a block | enters |
//! |---|---|
//! | of a request that belongs to a run longer than `fill_run_max` | never: a disk is good at runs |
//! | while the cache is not full, or the volume has less than is reserved for it | at once |
//! | that the request reads only in part, as its first or last | at once: who wants the rest of it comes soon |
//! | that was bad in the cache | at once |
//! | that the guest said it would read (`op::fetch`) | at once |
//! | that was missed before, and not long ago (`policy::history`) | now |
//! | any other | not yet |
//!
//! # Invariants
//!
//! - **F1** A fill enters with a ticket that holds (T1–T3 of `log::tickets`).
//! - **F2** A fill takes no room that a guest's write may want soon: not while the pool is low, nor the last buffers, nor
//!   while any write waits; and nothing dirty is written back because of it.
//! - **F3** While a block is being read from the backing device, and nothing changed it, whoever misses it waits for
//!   that read.
//! - **F4** Who waits for another's read has its bytes before the other is answered, and fails if the other fails.
//! - **F5** What may be read to where nobody can look (`Payload::is_apart`) is read for its own request alone: nobody waits for it, and none of it
//!   enters the log.
//! - **F6** What is to be read again, since the read that it waited for failed, is looked for again: something newer may have been placed since it was
//!   found missing, over which no ticket that is taken now would keep a copy from being laid.

use crate::effect::{Effect, Fault, Token};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::format::entry::Kind;
use crate::limits::TOKEN_COUNT_MAX;
use crate::log::chain::RECORDS_IN_FLIGHT_MAX;
use crate::log::tickets::Ticket;
use crate::mutant::Mutant;
use crate::op::across::Holes;
use crate::op::around::AroundState;
use crate::op::read::behind;
use crate::payload::{Payload, Place};
use crate::policy::slices::Side;
use crate::request::RequestError;
use crate::stats::Refusal;
use crate::units::{BLOCK_BYTES, Lba, Tick, VolumeIndex};
use crate::why::{self, Outcome};

/// Reads of backing devices that others may wait for. Those beyond are read for one reader each.
pub(crate) const SHARED_MAX: usize = 256;

pub(crate) const NOBODY: u32 = u32::MAX;

/// Why its blocks are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// A guest reads them.
    Read,
    /// A guest reads them, in the course of a long run.
    Run,
    /// They were bad in the cache.
    Repair,
    /// A guest said that it will read them (`op::fetch`).
    Wanted,
    /// A write covers them in part.
    Edge,
    /// Nobody asked for them yet (`op::ahead`).
    Ahead,
}

/// A part of a request that is read from the backing device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Miss {
    pub(crate) request: u32,
    pub(crate) volume: VolumeIndex,
    pub(crate) lba: Lba,
    pub(crate) blocks: u16,
    /// Those of them that are holes (`op::across`).
    pub(crate) holes: Holes,
    pub(crate) to: Place,
    pub(crate) why: Why,
    pub(crate) ticket: Ticket,
    /// The token of the next one that waits for the same read.
    pub(crate) next: u32,
    /// When it was found missing.
    pub(crate) asked: Tick,
    /// When the device was asked.
    pub(crate) begun: Tick,
}

/// A read of a backing device that others may wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    pub(crate) token: Token,
    pub(crate) volume: VolumeIndex,
    lba: Lba,
    blocks: u16,
    ticket: Ticket,
}

impl Shared {
    /// Whether it reads any of `start..end`.
    pub(crate) fn overlaps(&self, volume: VolumeIndex, start: Lba, end: Lba) -> bool {
        self.volume == volume && self.lba < end && start < self.lba + u64::from(self.blocks)
    }
}

impl Miss {
    pub(crate) fn new(
        request: u32,
        volume: VolumeIndex,
        (lba, blocks): (Lba, u16),
        to: Place,
        why: Why,
    ) -> Miss {
        let (ticket, next) = (Ticket::VOID, NOBODY);
        let (asked, begun) = (Tick(0), Tick(0));
        Miss {
            request,
            volume,
            lba,
            blocks,
            holes: Holes::NONE,
            to,
            why,
            ticket,
            next,
            asked,
            begun,
        }
    }

    /// The device is asked for it.
    pub(crate) fn begin(&mut self, token: Token, now: Tick) -> Effect {
        self.begun = now;
        let Miss { volume, lba, blocks, to, .. } = *self;
        Effect::ReadBacking { token, volume, lba, blocks, to }
    }

    /// Whether it counts as blocks that a guest missed.
    fn is_guests(&self) -> bool {
        matches!(self.why, Why::Read | Why::Run | Why::Repair)
    }

    /// A part of it, without a hole.
    pub(crate) fn part(&self, from: u16, blocks: u16) -> Miss {
        let (lba, to) = (self.lba + u64::from(from), behind(self.to, from));
        Miss { lba, blocks, holes: Holes::NONE, to, ..*self }
    }
}

impl Engine {
    /// Has blocks read from the backing device, each by whoever reads it already (F3).
    pub(crate) fn miss_begin(&mut self, miss: Miss, payload: &mut impl Payload) {
        if miss.is_guests() {
            self.volume(miss.volume).stats.miss_blocks += u64::from(miss.blocks);
        }
        let mut from = 0;
        while from < miss.blocks {
            let rest = miss.part(from, miss.blocks - from);
            let (ahead, blocks) = self.ahead_find(&rest);
            let rest = rest.part(0, blocks);
            if let Some(piece) = ahead {
                self.ahead_give(piece, rest, payload);
                from += blocks;
                continue;
            }
            let (shared, blocks) = self.find_shared(&rest);
            let part = rest.part(0, blocks);
            let active = self.active(miss.request);
            active.remaining += 1;
            active.backing_waited |= miss.why != Why::Wanted; // G2 of `fetch`
            match shared {
                Some(token) => self.wait_for(token, part),
                None => {
                    self.active(miss.request).backing_reads += 1;
                    self.miss_issue(part, payload);
                }
            }
            from += blocks;
        }
    }

    pub(crate) fn miss_issue(&mut self, miss: Miss, payload: &impl Payload) {
        let ticket = self.ticket(miss.volume, miss.lba, miss.blocks);
        let token = match self.is_apart(&miss, payload) {
            true => self.miss_ask(miss, ticket), // F5
            false => self.miss_share(miss, ticket),
        };
        self.foreground_ask(miss.volume, token);
    }

    pub(crate) fn is_apart(&self, miss: &Miss, payload: &impl Payload) -> bool {
        payload.is_apart(miss.to) && !self.config.mutants.is(Mutant::ApartNotHeeded)
    }

    /// A read of the backing device is asked for, with this ticket.
    fn miss_ask(&mut self, mut miss: Miss, ticket: Ticket) -> Token {
        (miss.ticket, miss.asked) = (ticket, self.now);
        self.token(Pending::Miss(miss))
    }

    /// The same, and others may wait for it.
    pub(crate) fn miss_share(&mut self, miss: Miss, ticket: Ticket) -> Token {
        let token = self.miss_ask(miss, ticket);
        for (Miss { volume, lba, blocks, .. }, is_hole) in miss.stretches() {
            if self.shared.len() == SHARED_MAX {
                break;
            }
            if !is_hole || self.config.mutants.is(Mutant::HolesShared) {
                self.shared.push(Shared { token, volume, lba, blocks, ticket });
            }
        }
        token
    }

    /// A ticket for a read that begins now.
    pub(crate) fn ticket(&mut self, volume: VolumeIndex, lba: Lba, blocks: u16) -> Ticket {
        let state = self.volume_ref(volume).expect("it exists");
        let end = lba + u64::from(blocks);
        // A write around the log has its lock before it begins.
        let ignored = self.config.mutants.is(Mutant::TicketWhileLocked);
        if !ignored && state.is_locked(lba, end, NOBODY) {
            return Ticket::VOID; // T2
        }
        self.tickets.take()
    }

    /// Of a miss: how many blocks, from its first on, someone reads already, or nobody does.
    fn find_shared(&self, miss: &Miss) -> (Option<Token>, u16) {
        let end = miss.lba + u64::from(miss.blocks);
        let mut alone = miss.blocks;
        for shared in &self.shared {
            let shared_end = shared.lba + u64::from(shared.blocks);
            let (from, to) = (shared.lba.max(miss.lba), shared_end.min(end));
            if shared.volume != miss.volume || from >= to {
                continue;
            }
            let blocks = to - from;
            if !self.tickets.hold(shared.ticket, miss.volume, from, blocks)
                && !self.config.mutants.is(Mutant::SharedStale)
            {
                continue;
            }
            if from == miss.lba {
                return (Some(shared.token), blocks as u16);
            }
            alone = alone.min((from - miss.lba) as u16);
        }
        (None, alone)
    }

    /// A miss waits for a read that is under way.
    fn wait_for(&mut self, first: Token, mut miss: Miss) {
        let stats = &mut self.volume(miss.volume).stats;
        stats.shared_blocks += u64::from(miss.blocks);
        let Some(Pending::Miss(leader)) = self.tokens.get(first.0).copied() else {
            unreachable!("it is under way");
        };
        (miss.ticket, miss.next) = (leader.ticket, leader.next);
        let token = self.token(Pending::Miss(miss));
        let Some(Pending::Miss(leader)) = self.tokens.get_mut(first.0) else {
            unreachable!("it was just there");
        };
        leader.next = token.0;
    }

    /// The backing device has answered.
    pub(crate) fn miss_complete(
        &mut self,
        token: Token,
        miss: Miss,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        if miss.why == Why::Ahead {
            return self.ahead_complete(token, miss, result, payload);
        }
        let now = self.now;
        self.slices(miss.volume).end(Side::Foreground, now);
        self.read_took(miss.volume, miss.asked, miss.begun);
        self.shared.retain(|shared| shared.token != token);
        let is_across = !miss.holes.is_none();
        if result.is_err() && is_across {
            return self.across_failed(&miss, payload);
        }
        let state = self.volume(miss.volume);
        state.stats.backing_faults += u64::from(result.is_err());
        self.miss_ends(&miss, result, payload);
        let mut next = miss.next;
        while let Some(waiting) = self.next_waiting(&mut next) {
            if result.is_ok() {
                let from = behind(miss.to, (waiting.lba - miss.lba) as u16);
                payload.copy(from, waiting.to, waiting.blocks); // F4
            }
            self.miss_ends(&waiting, result, payload);
            self.read_part_done(waiting.request);
        }
        if is_across {
            self.across_holes(&miss, payload);
        }
        self.read_part_done(miss.request);
    }

    /// What a read was to bring that failed is read by itself (F6).
    pub(crate) fn miss_again(&mut self, miss: Miss, payload: &mut impl Payload) {
        if miss.is_guests() {
            let stats = &mut self.volume(miss.volume).stats;
            stats.miss_blocks -= u64::from(miss.blocks); // counted once more where it is read
        }
        // A hint is not worth it.
        if miss.why != Why::Wanted {
            self.read_again(miss, payload);
        }
    }

    /// The next of those that wait for a read: it does no more.
    pub(crate) fn next_waiting(&mut self, next: &mut u32) -> Option<Miss> {
        if *next == NOBODY {
            return None;
        }
        let Some(Pending::Miss(waiting)) = self.tokens.remove(*next) else {
            unreachable!("it waits for this");
        };
        *next = waiting.next;
        Some(waiting)
    }

    fn miss_ends(&mut self, miss: &Miss, result: Result<(), Fault>, payload: &mut impl Payload) {
        match result {
            Ok(()) => self.fill(miss, payload),
            Err(_) => self.fail(miss.request, RequestError::Io),
        }
    }

    /// Copies into the log what is worth it.
    pub(crate) fn fill(&mut self, miss: &Miss, payload: &mut impl Payload) {
        let apart = self.is_apart(miss, payload); // F5
        if miss.why == Why::Edge || self.config.fill_run_max == 0 || apart {
            return;
        }
        let full = self.cache_is_full(miss.volume);
        let whole = self.config.mutants.is(Mutant::HolesFilled);
        for at in (0..miss.blocks).filter(|at| whole || !miss.holes.has(*at)) {
            let part = miss.part(at, 1);
            let (outcome, now) = (self.fill_block(&part, full, payload), self.now);
            let state = self.volume(miss.volume);
            if let Err(refusal) = outcome {
                state.stats.fills_refused[refusal as usize] += 1;
            }
            why::note(&mut state.missed, part.lba, outcome.unwrap_or_else(Outcome::Refused), now);
        }
    }

    fn fill_block(
        &mut self,
        miss: &Miss,
        full: bool,
        payload: &mut impl Payload,
    ) -> Result<Outcome, Refusal> {
        let Miss { request, volume, lba, to, why, ticket, .. } = *miss;
        let outcome = if why == Why::Repair {
            Outcome::Bad
        } else if why == Why::Wanted {
            Outcome::Wanted
        } else if self.is_read_in_part(request, lba) {
            Outcome::Part
        } else if why == Why::Run {
            return Err(Refusal::Sequential);
        } else if !full {
            Outcome::Room
        } else if self.history.touch(volume, lba) {
            Outcome::Again
        } else {
            return Err(Refusal::FirstTouch);
        };
        self.place_fill(volume, lba, ticket, to, payload).map(|()| outcome)
    }

    /// Places a copy of a block that was read from the backing device with a ticket (F1, F2).
    pub(crate) fn place_fill(
        &mut self,
        volume: VolumeIndex,
        lba: Lba,
        ticket: Ticket,
        from: Place,
        payload: &mut impl Payload,
    ) -> Result<(), Refusal> {
        let ignored = self.config.mutants.is(Mutant::FillTicketIgnored);
        if !self.ticket_holds(ticket, volume, lba) && !ignored || self.backing_may_lose(volume, lba)
        {
            return Err(Refusal::Raced); // F1
        }
        if self.index.get(volume, lba).is_some() {
            // Another reader's fill.
            return Ok(());
        }
        if !self.may_fill(volume) || !self.room(volume, 1, payload) {
            return Err(Refusal::NoRoom);
        }
        let (buffer, block) = self.next_slot(volume);
        let copy = Place::Buffer { buffer, block };
        payload.copy(from, copy, 1);
        // Of the copy: the request's memory may be the guest's own.
        let crc = payload.checksum(copy);
        self.place_data(volume, lba, crc, Kind::Fill, payload);
        self.volume(volume).stats.fill_blocks += 1;
        Ok(())
    }

    /// Whether a guest's read covers this block only in part.
    fn is_read_in_part(&mut self, request: u32, lba: Lba) -> bool {
        let active = self.active(request);
        let (start, first, last) =
            (active.request.offset, active.first, active.first + (active.blocks - 1));
        let end = start + active.request.length;
        lba == first && !start.is_multiple_of(BLOCK_BYTES)
            || lba == last && !end.is_multiple_of(BLOCK_BYTES)
    }

    /// Whether a copy of a block may be placed that was read with this ticket (T1).
    pub(crate) fn ticket_holds(&self, ticket: Ticket, volume: VolumeIndex, lba: Lba) -> bool {
        self.tickets.hold(ticket, volume, lba, 1) || self.config.mutants.is(Mutant::TicketIgnored)
    }

    /// Whether the backing device may lose what it has of a block: it was written around the log and
    /// not flushed (T3).
    fn backing_may_lose(&mut self, volume: VolumeIndex, lba: Lba) -> bool {
        let unsure = !self.config.mutants.is(Mutant::FillUnflushed);
        let state = self.volume_ref(volume).expect("it exists");
        let AroundState { unflushed, flushing, under_way, lost, flushed, .. } = state.around;
        if !unflushed && !flushing && under_way == 0 && !lost {
            return false;
        }
        let known = flushed != Ticket::VOID;
        let flushed = self.tickets.hold(flushed, volume, lba, 1);
        if !known && !lost {
            // What a process before this one left is not known: once, it is flushed for this.
            self.around_flush(volume);
        }
        !flushed && unsure
    }

    /// Whether there is room that no write will want soon (F2).
    pub(crate) fn may_fill(&self, volume: VolumeIndex) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        let writes_wait = !state.writes.is_empty() || state.starved || state.extents_full;
        let stuck = state.writeback.failing || state.parked.full || self.stopping;
        let busy = state.log.in_flight.len() * 2 >= RECORDS_IN_FLIGHT_MAX
            || self.buffers.len() <= usize::from(self.config.buffer_count / 16 + 1)
            || self.tokens.room() * 2 < TOKEN_COUNT_MAX;
        let failed = self.health == CacheHealth::Failed;
        !(writes_wait || stuck || busy || failed) && self.pool_has_room_for_fills(volume)
    }

    /// Whether something has to leave for what enters, and it is not what others were lent.
    pub(crate) fn cache_is_full(&self, volume: VolumeIndex) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        state.log.segment_count >= state.reserved
            && self.segments.free_count() <= self.kept_segments() + 2 * self.pool_margin()
    }
}
