// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes that go around the log. Which do, and in which of three orders ([`How`]), `policy/bypass` decides.
//!
//! # Terms
//!
//! The *entry* of such a write (kind `Bypassed`) voids every older version of its blocks: they are to be read from
//! the backing device.
//!
//! # Invariants
//!
//! - **A1** Over clean versions the entry is durable before the backing device is written: no crash can bring them
//!   back. The record that holds it says the watermark, so what counts as clean is clean after that crash, too.
//! - **A2** While it is under way nobody else writes these blocks, and nothing that is read for them enters the log. But two such writes may
//!   have a block together in which the one ends and the other begins: each writes its own bytes of it, none reads it, neither is over dirty versions, and the first is being written
//!   when the other comes, so what it voids is void for good. Where a guest's blocks are not ours each would wait for the one before.
//! - **A3** A flush of the backing device that fails while such writes are not flushed is latched:
//!   the device may have dropped them, and would answer the next flush well. They are not in the
//!   log, so no flush of this volume is answered well until it is opened again, by whoever knows: the superblock says that
//!   it failed until a flush of the guest was answered with an error and the stop after that was a clean one. Until the superblock
//!   does, memory that outlives the process says it (`Payload::flush_failed`).
//! - **A4** Over dirty versions (relaxed), which are durable (Y5 of `bypass`), the backing device is written and flushed, then
//!   the entry is placed, then the write is answered. A crash before that finds the dirty version, which the guest may
//!   have flushed, and writes it back over this one; a crash after it needs nothing but the backing device.
//! - **A5** What an entry voids is never written back: a batch leaves it out, whether the entry is in its range or
//!   behind it. The watermark that passes such a version is said by a record behind the entry: where the one is
//!   found after a crash, so is the other.
//! - **A6** No batch is built, and none ends, while a write over dirty versions has not got its entry; while a batch waits for
//!   that, such writes wait or go through the log. What one passes of the batch under way, if it may (`bypass`), is not written back from then on,
//!   and what of it is being written is written first. So the flush with which the batch ends, and the watermark that takes the
//!   version for clean, come behind the write, its flush and its entry: a crash before that finds the dirty version above the watermark, as without a batch.
//!   A write that fails has the batch given up, which left out a version that nothing voids.
//! - **A7** With order batch no batch writes anything before what went around the log is flushed: it is older. Unless
//!   such a flush failed: then the guest has been told that it may be gone (A3).
//! - **A8** A write that the backing device refuses, unless the volume is write-around, or whose entry finds no
//!   room, goes through the log after all.
//! - **A9** A write that needs no entry is not written before the one that came before it, if that waits for its entry: a disk takes longer
//!   for a run with holes, and then for what belongs there.
//!
//! # States
//!
//! | a write | until | then |
//! |---|---|---|
//! | `EntryFirst`: its entry is placed, or it has none and waits for another's (A9) | that is durable | it is written |
//! | `Behind`: a batch is writing some of its blocks (A6) | that is done | it is written |
//! | `Writing` | the backing device has it | it is answered, or flushed |
//! | `Flushing` (over dirty versions) | a flush that was issued after it is done | its entry is placed, it is answered |
//! | `Logged` | | it is placed in the log like any write (A8) |

use crate::effect::{Fault, Token};
use crate::engine::{Acknowledge, Engine, Pending};
use crate::format::entry::Kind;
use crate::format::superblock::Mode;
use crate::limits::REQUEST_COUNT_MAX;
use crate::log::tickets::Ticket;
use crate::memory::queue_bytes;
use crate::mutant::Mutant;
use crate::payload::Payload;
use crate::policy::bypass::{How, Reason};
use crate::policy::slices::Side;
use crate::request::{Op, RequestError};
use crate::units::{Sequence, Tick, VolumeIndex};
use crate::volume::{Lock, Waiter};
use crate::why::{self, PASSED_MAX, Passed};
use alloc::collections::VecDeque;

/// Where a write stands on its way around the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Around {
    No,
    /// The token is that of the write to come: there is one when its turn comes.
    EntryFirst(Token),
    /// The same.
    Behind(Token),
    Writing(How),
    Flushing,
    Logged,
}

/// Someone who waits for a flush of the backing device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlushWaiter {
    pub(crate) request: u32,
    /// The flush that covers him, by number.
    pub(crate) flush: u64,
}

/// What a volume knows of writes around its log.
#[derive(Debug)]
pub(crate) struct AroundState {
    /// Some may have reached the backing device since the last flush of that: in this opening, or before
    /// it unless the last one ended with a clean stop.
    pub(crate) unflushed: bool,
    /// Those that reached it in this opening.
    pub(crate) done: u64,
    /// Those that are not done.
    pub(crate) under_way: u32,
    /// Those over dirty versions whose entry is not placed (A6).
    pub(crate) over_dirty: u32,
    /// Of these, those that wait for what a batch is writing.
    pub(crate) behind: u32,
    /// No such one begins: a batch waits to be built, or to end (A6).
    pub(crate) held: bool,
    /// The next write waits, but not for room in the log: until what it passes is durable (Y5 of `bypass`), or until one
    /// before it that goes around has ended (A2).
    pub(crate) awaits: bool,
    /// A flush that should have covered such writes failed: none is answered well any more.
    pub(crate) lost: bool,
    /// A flush of the guest was answered with an error since.
    pub(crate) told: bool,
    /// The superblock says it.
    pub(crate) noted: bool,
    pub(crate) flushing: bool,
    /// What changed since then may still be lost by the backing device (T3 of `log::tickets`).
    pub(crate) flushed: Ticket,
    /// The same as soon as the flush under way has ended well.
    pub(crate) flush_begun: Ticket,
    /// Flushes of the backing device begun for these writes.
    pub(crate) flushes: u64,
    pub(crate) waiters: VecDeque<FlushWaiter>,
    /// The last of these writes, for whoever asks why.
    pub(crate) passed: VecDeque<Passed>,
}

impl AroundState {
    /// `lost`: the superblock says that a flush failed before this opening, and that the guest does not know.
    pub(crate) fn new(unflushed: bool, lost: bool) -> AroundState {
        AroundState {
            unflushed: unflushed || lost,
            done: 0,
            under_way: 0,
            over_dirty: 0,
            behind: 0,
            held: false,
            awaits: false,
            lost,
            told: false,
            noted: lost,
            flushing: false,
            flushed: Ticket::VOID,
            flush_begun: Ticket::VOID,
            flushes: 0,
            waiters: VecDeque::with_capacity(REQUEST_COUNT_MAX),
            passed: VecDeque::with_capacity(PASSED_MAX),
        }
    }

    /// Bytes of memory beside itself.
    pub(crate) const fn memory_bytes() -> u64 {
        (REQUEST_COUNT_MAX * size_of::<FlushWaiter>() + PASSED_MAX * size_of::<Passed>()) as u64
    }

    /// Bytes of memory it takes beside itself.
    pub(crate) fn held_bytes(&self) -> u64 {
        queue_bytes(&self.waiters) + queue_bytes(&self.passed)
    }
}

impl Engine {
    /// Begins; says whether there was room for what it needs.
    pub(crate) fn around_begin(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        (reason, how): (Reason, How),
        payload: &mut impl Payload,
    ) -> bool {
        let active = *self.active(at);
        let end = active.first + active.blocks;
        let passes = how == How::EntryLast && self.batch_holds(volume, active.first, end);
        // Over what a batch holds, too: without one that would be given up (A6).
        if (how == How::EntryFirst || passes) && !self.extent_room(volume, payload) {
            return false;
        }
        if passes {
            self.batch_passed(volume, active.first, end);
        }
        self.tickets.void(volume, active.first, active.blocks); // A2
        let (first, blocks, run, now) = (active.first, active.blocks, active.run, self.now);
        let free = self.config.mutants.is(Mutant::AroundNotLocked);
        self.active(at).reason = reason;
        let state = self.volume(volume);
        why::pass(&mut state.around.passed, Passed { first, blocks, reason, run, at: now });
        if !free {
            state.locks.push(Lock { owner: at, start: active.first, end }); // A2
        }
        state.around.over_dirty += u32::from(how == How::EntryLast);
        let token = self.token(Pending::Around { request: at, since: now });
        let late = self.config.mutants.is(Mutant::EntryAfterWrite);
        let waits = match how {
            How::EntryFirst if !late => {
                self.around_void(at, payload);
                let log = &mut self.volume(volume).log;
                log.want(log.placed);
                Some(log.placed)
            }
            How::Alone => self.entry_waits(volume), // A9
            _ => None,
        };
        self.active(at).sequence = self.volume(volume).log.placed;
        if passes && self.is_written_back(volume, active.first, end) {
            self.active(at).around = Around::Behind(token);
            self.volume(volume).around.behind += 1;
            return true;
        }
        let Some(sequence) = waits else {
            self.around_issue(at, how, token);
            return true;
        };
        let state = self.volume(volume);
        state.durable_waiters.push_back(Waiter { sequence, request: at });
        self.active(at).around = Around::EntryFirst(token); // A1: tells `durable` that the write comes next.
        true
    }

    /// Whether those who have a write's blocks for themselves are all writes around the log that it only meets in a block, if it goes around as well (A2).
    pub(crate) fn only_meets(&self, volume: VolumeIndex, at: u32) -> bool {
        let bytes = |at: u32| {
            let active = self.requests.get(at)?;
            let request = &active.request;
            Some((active, request.offset, request.offset + request.length))
        };
        let Some((write, first, end)) = bytes(at) else { return false };
        let meets = |lock: &Lock| {
            bytes(lock.owner).is_some_and(|(other, from, to)| {
                let waits = matches!(other.around, Around::EntryFirst(_));
                let is_written =
                    matches!(other.around, Around::Writing(How::Alone | How::EntryFirst))
                        || waits && self.config.mutants.is(Mutant::MeetsWhatWaits);
                is_written && (to <= first || end <= from)
            })
        };
        let state = self.volume_ref(volume).expect("it exists");
        state.locks_of_others(write.first, write.first + write.blocks, at).all(meets)
    }

    /// What the last of the volume's writes around the log waits for, if it is its entry.
    fn entry_waits(&self, volume: VolumeIndex) -> Option<Sequence> {
        let waiter = self.volume_ref(volume)?.durable_waiters.back()?;
        let around = self.requests.get(waiter.request)?.around;
        matches!(around, Around::EntryFirst(_)).then_some(waiter.sequence)
    }

    /// Places the entry; there is room.
    fn around_void(&mut self, at: u32, payload: &mut impl Payload) {
        let active = *self.active(at);
        let (volume, count) = (active.request.volume, active.blocks as u32);
        self.place_extent(volume, Kind::Bypassed, active.first, count, payload);
        self.active(at).sequence = self.volume(volume).log.placed;
    }

    /// A write of a batch has ended, or the batch: what waited for it is written (A6).
    pub(crate) fn around_behind(&mut self, volume: VolumeIndex) {
        let mut at = 0;
        while self.volume(volume).around.behind > 0
            && let Some(Lock { owner, start, end }) = self.volume(volume).locks.get(at).copied()
        {
            at += 1;
            let around = self.requests.get(owner).map(|active| active.around);
            if let Some(Around::Behind(token)) = around
                && !self.is_written_back(volume, start, end)
            {
                self.volume(volume).around.behind -= 1;
                self.around_issue(owner, How::EntryLast, token);
            }
        }
    }

    pub(crate) fn around_issue(&mut self, at: u32, how: How, token: Token) {
        let active = self.active(at);
        active.backing_waited = true;
        active.around = Around::Writing(how);
        let volume = active.request.volume;
        self.volume(volume).around.under_way += 1;
        self.foreground_ask(volume, token);
    }

    pub(crate) fn around_complete(
        &mut self,
        at: u32,
        since: Tick,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let now = self.now;
        let active = *self.active(at);
        let volume = active.request.volume;
        let Around::Writing(how) = active.around else { unreachable!("it was being written") };
        // From here on the lock keeps tickets away (T2), to its end.
        self.tickets.void(volume, active.first, active.blocks); // A2
        let slices = self.slices(volume);
        slices.end(Side::Foreground, now);
        slices.write_took(now.since(since), now);
        let state = self.volume(volume);
        state.around.under_way -= 1;
        state.around.unflushed = true;
        state.around.done += 1;
        if result.is_err() {
            state.stats.backing_faults += 1;
            let told = state.mode == Mode::WriteAround;
            return self.around_failed(at, told);
        }
        if how == How::EntryLast {
            self.active(at).around = Around::Flushing; // A4
            if self.config.mutants.is(Mutant::EntryBeforeFlush) {
                return self.around_over_dirty(at, true, payload);
            }
            return self.around_flush_for(at);
        }
        let late = how == How::EntryFirst && self.config.mutants.is(Mutant::EntryAfterWrite);
        if late && self.extent_room(volume, payload) {
            self.around_void(at, payload);
        }
        self.around_answer(at);
    }

    fn around_answer(&mut self, at: u32) {
        self.around_counts(at);
        let active = *self.active(at);
        self.volume(active.request.volume).unlock(at);
        let durable = self.config.acknowledge == Acknowledge::Durable;
        let fua =
            matches!(active.request.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true });
        if durable || fua {
            self.flush_accept(at);
        } else {
            self.answer(at, Ok(()));
        }
    }

    /// The cache device failed before the entry was durable. It waits for its turn again: if all of the volume is on the backing
    /// device it may pass the cache (`stale`).
    pub(crate) fn around_again(&mut self, at: u32, token: Token) {
        self.tokens.remove(token.0);
        self.active(at).around = Around::No;
        self.around_leave(at);
    }

    /// It was not written, or nothing says that it was: through the log (A8), or the guest is told.
    fn around_failed(&mut self, at: u32, told: bool) {
        let active = *self.active(at);
        let over_dirty =
            matches!(active.around, Around::Writing(How::EntryLast) | Around::Flushing);
        let volume = active.request.volume;
        let state = self.volume(volume);
        state.around.over_dirty -= u32::from(over_dirty);
        if over_dirty {
            self.batch_unpassed(volume, active.first, active.first + active.blocks); // A6
        }
        let state = self.volume(volume);
        if told {
            state.unlock(at);
            return self.answer(at, Err(RequestError::Io));
        }
        self.around_leave(at);
        self.active(at).around = Around::Logged;
    }

    /// It comes before all that came after it: nobody has its place meanwhile.
    fn around_leave(&mut self, at: u32) {
        let active = *self.active(at);
        let state = self.volume(active.request.volume);
        state.unlock(at);
        state.writes.push_front(at);
    }

    /// It has gone around the log: not before, since what fails goes through it (A8).
    fn around_counts(&mut self, at: u32) {
        let active = *self.active(at);
        let stats = &mut self.volume(active.request.volume).stats;
        stats.bypassed[active.reason as usize] += 1;
        stats.bypassed_writes += 1;
        stats.bypassed_blocks += active.blocks;
        let writes = matches!(active.request.op, Op::Write { .. });
        stats.written_blocks += if writes { active.blocks } else { 0 };
    }

    /// The backing device was flushed after a write over dirty versions: they are void now (A4).
    pub(crate) fn around_over_dirty(&mut self, at: u32, flushed: bool, payload: &mut impl Payload) {
        let volume = self.active(at).request.volume;
        if !flushed || !self.extent_room(volume, payload) {
            return self.around_failed(at, false);
        }
        self.around_void(at, payload);
        self.around_counts(at);
        let fua = self.active(at).request.op == (Op::Write { fua: true });
        let state = self.volume(volume);
        state.around.over_dirty -= 1;
        if fua {
            state.log.flush_epoch += 1;
        }
        state.unlock(at);
        // The backing device has it for good: the rest is the entry's way, as of any write.
        self.write_wait(volume, at, false, fua, self.config.acknowledge);
    }

    /// The request waits for a flush of the backing device that is issued from now on.
    pub(crate) fn around_flush_for(&mut self, at: u32) {
        let volume = self.active(at).request.volume;
        let counts = self.config.mutants.is(Mutant::FlushUnderWayCounts);
        let state = &mut self.volume(volume).around;
        // The one under way is enough if nothing was written since it was issued.
        let flush = state.flushes + u64::from(state.unflushed && !counts || !state.flushing);
        state.waiters.push_back(FlushWaiter { request: at, flush });
        self.around_flush(volume);
    }
}
