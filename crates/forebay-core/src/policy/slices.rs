// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sharing a slow backing device: time slices for guests and for write-back, so that neither starves.
//!
//! A disk with a queue serves what is near its head. Thirty-two sorted writes are always nearer than the one
//! read of a guest, so in one queue the read waits for ever, and fewer writes in flight do not help
//! (`docs/decisions/0013-time-slices.md` has the figures). So only one side at a time has anything under
//! way: the guests' *foreground*, reads and writes around the log, or *write-back*.
//!
//! # Invariants
//!
//! - **S1** While the device is slow, nothing of one side begins while something of the other is under way.
//! - **S2** A side that has nothing to do does not keep its turn; the foreground keeps it [`PAUSE`] longer, since
//!   a reader that has one request at a time sends the next when it has its answer.
//! - **S3** A side whose slice is used up begins nothing while the other has something to do. What one slice took
//!   too long is taken from the side's next one.
//! - **S4** What waits in the foreground begins in the order in which it came, and nothing passes it.
//! - **S5** On a device that is fast nothing waits, but for S6.
//! - **S6** With order relaxed, while no write waits for the log, write-back has one part in a hundred of the time and guests the
//!   rest: what they do goes at the speed of the bare device. As soon as one waits both have their shares again.

use crate::effect::{Effect, Token};
use crate::engine::{Engine, Pending};
use crate::format::superblock::Order;
use crate::limits::TOKEN_COUNT_MAX;
use crate::memory::queue_bytes;
use crate::payload::Payload;
use crate::policy::writeback::Stage;
use crate::units::{Tick, VolumeIndex};
use alloc::collections::VecDeque;

/// How long the foreground keeps its turn although it has nothing to do, in nanoseconds.
const PAUSE: u64 = 2_000_000;
/// A device is slow if reads take longer than this, in nanoseconds ...
const SLOW_ABOVE: u64 = 4_000_000;
/// ... until they take less than this.
const FAST_BELOW: u64 = 500_000;
/// A slice is as long as so many reads.
const SLICE_READS: u64 = 16;
/// But not shorter, in nanoseconds.
const SLICE_MIN: u64 = 10_000_000;
/// Nor longer.
const SLICE_MAX: u64 = 100_000_000;
/// Of so many reads the duration is averaged (exponentially).
const AVERAGED: u64 = 16;
/// The share of write-back's slice that it has of a foreground slice, in percent, while much of the pool is free.
const WEIGHT_LEAST: u64 = 25;
/// The same while it gives way.
const WEIGHT_YIELDING: u64 = 1;

/// Who uses a backing device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Guests.
    Foreground,
    /// Batches.
    WriteBack,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Foreground => Side::WriteBack,
            Side::WriteBack => Side::Foreground,
        }
    }
}

/// Whose turn it is on one backing device.
#[derive(Debug)]
pub(crate) struct Slices {
    turn: Side,
    begun: Tick,
    /// What each side has left of its slices, in nanoseconds; below zero if it took too long.
    budget: [i64; 2],
    under_way: [u32; 2],
    /// Foreground effects that were not begun yet.
    waiting: VecDeque<Token>,
    /// A batch has writes that were not begun yet.
    batch_wants: bool,
    /// When the foreground had something under way last.
    foreground_last: Tick,
    /// Average time of a read, in nanoseconds.
    read_time: u64,
    is_slow: bool,
    /// Write-back's weight against the foreground's, in percent.
    weight: u64,
    /// Write-back has next to nothing of the time, however fast the device is (S6).
    gives_way: bool,
}

impl Slices {
    /// The slices of a device that nothing is known of.
    pub(crate) fn new(now: Tick) -> Slices {
        Slices {
            turn: Side::Foreground,
            begun: now,
            budget: [0; 2],
            under_way: [0; 2],
            waiting: VecDeque::with_capacity(TOKEN_COUNT_MAX),
            batch_wants: false,
            foreground_last: now,
            read_time: 0,
            is_slow: false,
            weight: 100,
            gives_way: false,
        }
    }

    /// Bytes of memory that they take.
    pub(crate) const fn memory_bytes() -> u64 {
        (TOKEN_COUNT_MAX * size_of::<Token>()) as u64
    }

    /// Bytes of memory beside itself.
    pub(crate) fn held_bytes(&self) -> u64 {
        queue_bytes(&self.waiting)
    }

    /// A batch has, or has no more, writes to begin.
    pub(crate) fn batch_wants(&mut self, wants: bool) {
        self.batch_wants = wants;
    }

    /// How much of the pool of segments is in use, in percent: write-back's weight rises from 30 to 60.
    pub(crate) fn pool_used(&mut self, percent: u64) {
        let part = percent.clamp(30, 60) - 30;
        self.weight = WEIGHT_LEAST + (100 - WEIGHT_LEAST) * part / 30;
    }

    /// The foreground waits for nothing that write-back does: that has next to nothing of the time (`yields`), or
    /// its share again, at once.
    fn give_way(&mut self, yields: bool, now: Tick) {
        if self.gives_way && !yields && self.turn == Side::Foreground {
            let usual = now.since(self.begun) as i64 + self.slice() * 100 / WEIGHT_LEAST as i64;
            let left = &mut self.budget[Side::Foreground as usize];
            *left = usual.min(*left);
        }
        self.gives_way = yields;
    }

    /// Whether the two sides take turns.
    fn is_shared(&self) -> bool {
        self.is_slow || self.gives_way
    }

    /// Something of the foreground is to be begun: true if it may be now, else it waits.
    pub(crate) fn ask(&mut self, token: Token, now: Tick) -> bool {
        if self.waiting.is_empty() && self.may(Side::Foreground, now) {
            self.begin(Side::Foreground);
            return true;
        }
        self.waiting.push_back(token);
        false
    }

    /// The next foreground effect that may be begun now (S4).
    pub(crate) fn next_waiting(&mut self, now: Tick) -> Option<Token> {
        if self.waiting.is_empty() || !self.may(Side::Foreground, now) {
            return None;
        }
        self.begin(Side::Foreground);
        self.waiting.pop_front()
    }

    /// Whether write-back may begin a write now; it says so with [`Slices::begin`] if it does.
    pub(crate) fn may_write_back(&mut self, now: Tick) -> bool {
        self.may(Side::WriteBack, now)
    }

    /// What a read of the device takes, in nanoseconds; 0: not known.
    pub(crate) fn read_time(&self) -> u64 {
        self.read_time
    }

    /// Something of a side begins.
    pub(crate) fn begin(&mut self, side: Side) {
        self.under_way[side as usize] += 1;
    }

    /// Something of a side has ended.
    pub(crate) fn end(&mut self, side: Side, now: Tick) {
        self.under_way[side as usize] -= 1;
        if side == Side::Foreground {
            self.foreground_last = now;
        }
    }

    /// A read took this long from its beginning.
    pub(crate) fn read_took(&mut self, nanos: u64, now: Tick) {
        self.read_time = (self.read_time * (AVERAGED - 1) + nanos) / AVERAGED;
        let limit = if self.is_slow { FAST_BELOW } else { SLOW_ABOVE };
        let was_slow = core::mem::replace(&mut self.is_slow, self.read_time > limit);
        if self.is_slow && !was_slow {
            (self.turn, self.begun) = (Side::Foreground, now);
            self.budget = [self.slice(), 0];
        }
    }

    /// A write around the log took this long from its beginning, with so many others as are under way.
    pub(crate) fn write_took(&mut self, nanos: u64, now: Tick) {
        let others = u64::from(self.under_way[Side::Foreground as usize]);
        self.read_took(nanos / (others + 1), now);
    }

    fn slice(&self) -> i64 {
        (self.read_time * SLICE_READS).clamp(SLICE_MIN, SLICE_MAX) as i64
    }

    /// When time alone changes whose turn it is.
    pub(crate) fn deadline(&self, now: Tick) -> Option<Tick> {
        let waits = match self.turn {
            Side::Foreground => self.batch_wants,
            Side::WriteBack => !self.waiting.is_empty(),
        };
        if !self.is_shared() || !waits {
            return None;
        }
        let used_up = self.begun.after(self.budget[self.turn as usize].max(0) as u64);
        let pause = self.foreground_last.after(PAUSE);
        let pauses = self.turn == Side::Foreground && self.under_way[0] == 0;
        let due = if pauses { used_up.min(pause) } else { used_up };
        // What is over waits for what is under way, if anything is.
        (due > now || self.under_way == [0; 2]).then_some(due.max(now))
    }

    fn may(&mut self, side: Side, now: Tick) -> bool {
        if !self.is_shared() {
            return true; // S5
        }
        let other = side.other();
        if self.turn == side {
            let must_yield = self.is_used_up(now) && self.has_work(other, now);
            return self.under_way[other as usize] == 0 && !must_yield; // S1, S3
        }
        let keeps = self.has_work(other, now) && !self.is_used_up(now);
        if self.under_way[other as usize] > 0 || keeps {
            return false;
        }
        self.switch(now);
        true
    }

    fn is_used_up(&self, now: Tick) -> bool {
        now.since(self.begun) as i64 >= self.budget[self.turn as usize]
    }

    /// Whether a side would use its turn (S2).
    fn has_work(&self, side: Side, now: Tick) -> bool {
        if self.under_way[side as usize] > 0 {
            return true;
        }
        match side {
            Side::WriteBack => self.batch_wants,
            Side::Foreground => {
                let pauses = self.turn == side && now.since(self.foreground_last) < PAUSE;
                !self.waiting.is_empty() || pauses
            }
        }
    }

    fn switch(&mut self, now: Tick) {
        let slice = self.slice();
        let ending = self.turn as usize;
        let left = self.budget[ending] - now.since(self.begun) as i64;
        // What was not used is not saved; what was overdrawn is owed, within a slice.
        self.budget[ending] = left.clamp(-slice, 0);
        self.turn = self.turn.other();
        self.begun = now;
        let quantum = match self.turn {
            Side::Foreground if self.gives_way => slice * 100 / WEIGHT_YIELDING as i64,
            Side::Foreground => slice * 100 / self.weight as i64,
            Side::WriteBack => slice,
        };
        self.budget[self.turn as usize] += quantum;
    }
}

impl Engine {
    /// A foreground effect, named by its token, begins now or when its turn comes.
    pub(crate) fn foreground_ask(&mut self, volume: VolumeIndex, token: Token) {
        let now = self.now;
        if self.volume(volume).slices.ask(token, now) {
            self.foreground_begin(volume, token);
        } else {
            self.volume(volume).stats.turn_waits += 1;
        }
    }

    /// Begins what may begin.
    #[inline]
    pub(crate) fn slices_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let now = self.now;
        let state = self.volume(volume);
        let yields = state.order == Order::Relaxed && state.writes.is_empty();
        state.slices.give_way(yields, now);
        if state.slices.is_shared() || !state.slices.waiting.is_empty() {
            self.slices_go_on(volume, payload);
        }
    }

    fn slices_go_on(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let (now, count) = (self.now, self.segments.count());
        let used = u64::from(count - self.segments.free_count()) * 100 / u64::from(count.max(1));
        let state = self.volume(volume);
        state.slices.pool_used(used);
        while let Some(token) = self.volume(volume).slices.next_waiting(now) {
            self.foreground_begin(volume, token);
        }
        // A turn that came with time, not with a completion.
        let state = self.volume(volume);
        if state.slices.batch_wants
            && state.slices.turn == Side::Foreground
            && state.writeback.stage == Stage::Writing
            && state.slices.may_write_back(now)
        {
            self.writeback_go_on(volume, payload);
        }
    }

    fn foreground_begin(&mut self, volume: VolumeIndex, token: Token) {
        let now = self.now;
        let pending = self.tokens.get_mut(token.0).expect("it was not begun");
        let effect = match pending {
            Pending::Miss(miss) => miss.begin(token, now),
            Pending::Around { request, since } => {
                *since = now;
                let tag = self.requests.get(*request).expect("it is in the engine").request.tag;
                Effect::WriteAround { token, volume, tag }
            }
            other => unreachable!("{other:?} is not of the foreground"),
        };
        self.effects.push_back(effect);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: u64 = 1_000_000;

    fn slow() -> Slices {
        let mut slices = Slices::new(Tick(0));
        (0..64).for_each(|_| slices.read_took(10 * MILLI, Tick(0)));
        assert!(slices.is_slow);
        slices
    }

    fn at(millis: u64) -> Tick {
        Tick(millis * MILLI)
    }

    #[test]
    fn on_a_fast_device_nothing_waits() {
        let mut slices = Slices::new(Tick(0));
        (0..64).for_each(|_| slices.read_took(MILLI, Tick(0)));
        slices.batch_wants(true);
        for _ in 0..4 {
            assert!(slices.may_write_back(at(1)));
            slices.begin(Side::WriteBack);
            assert!(slices.ask(Token(1), at(1)));
        }
        assert_eq!(slices.deadline(at(1)), None);
    }

    #[test]
    fn a_device_is_slow_by_what_reads_take_and_stays_so_for_a_while() {
        let mut slices = slow();
        (0..64).for_each(|_| slices.read_took(MILLI, Tick(0)));
        assert!(slices.is_slow, "reads are quick because nothing else is under way");
        (0..64).for_each(|_| slices.read_took(MILLI / 10, Tick(0)));
        assert!(!slices.is_slow);
    }

    #[test]
    fn one_side_begins_when_all_of_the_other_has_ended() {
        let mut slices = slow();
        assert!(slices.ask(Token(1), at(1)));
        slices.batch_wants(true);
        assert!(!slices.may_write_back(at(1)), "a read is under way");
        slices.end(Side::Foreground, at(9));
        assert!(!slices.may_write_back(at(10)), "the reader may send the next one");
        assert_eq!(slices.deadline(at(10)), Some(at(11)));
        assert!(slices.may_write_back(at(11)));
        slices.begin(Side::WriteBack);
        assert!(!slices.ask(Token(2), at(12)), "a write is under way");
        assert!(!slices.ask(Token(3), at(12)));
        slices.batch_wants(false);
        slices.end(Side::WriteBack, at(15));
        assert_eq!(slices.next_waiting(at(15)), Some(Token(2)));
        assert_eq!(slices.next_waiting(at(15)), Some(Token(3)));
        assert_eq!(slices.next_waiting(at(15)), None);
    }

    /// Both always have something to do, of 10 ms each: neither has much more of the time.
    #[test]
    fn two_busy_sides_have_the_same_time() {
        let mut slices = slow();
        slices.batch_wants(true);
        let (mut now, mut time) = (0, [0u64; 2]);
        while now < 10_000 {
            for _ in 0..2 {
                slices.ask(Token(7), at(now));
            }
            let side = if slices.may_write_back(at(now)) {
                slices.begin(Side::WriteBack);
                Side::WriteBack
            } else {
                if slices.under_way[0] == 0 {
                    slices.next_waiting(at(now)).expect("one of them may");
                }
                Side::Foreground
            };
            now += 10;
            time[side as usize] += 10;
            while slices.under_way[side as usize] > 0 {
                slices.end(side, at(now));
            }
            slices.waiting.truncate(8);
        }
        let [foreground, write_back] = time;
        assert!(foreground.abs_diff(write_back) <= 200, "{time:?}");
    }

    #[test]
    fn what_a_slice_took_too_long_is_taken_from_the_next() {
        let mut slices = slow();
        slices.batch_wants(true);
        assert!(slices.may_write_back(at(5)), "nothing was asked");
        slices.begin(Side::WriteBack);
        assert!(!slices.ask(Token(1), at(6)));
        // A slice of 100 ms, and 60 ms until the disk has done what it was given.
        slices.end(Side::WriteBack, at(165));
        assert!(!slices.may_write_back(at(165)));
        assert_eq!(slices.next_waiting(at(165)), Some(Token(1)));
        slices.end(Side::Foreground, at(265));
        slices.ask(Token(2), at(265));
        assert!(slices.may_write_back(at(265)));
        slices.begin(Side::WriteBack);
        assert!(slices.may_write_back(at(304)));
        assert!(!slices.may_write_back(at(305)), "40 ms are left of it");
    }

    #[test]
    fn write_back_has_less_of_the_time_while_the_pool_is_free() {
        let mut slices = slow();
        for (used, weight) in [(0, 25), (30, 25), (45, 62), (60, 100), (100, 100)] {
            slices.pool_used(used);
            assert_eq!(slices.weight, weight, "{used} % in use");
        }
    }
}
