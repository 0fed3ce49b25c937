// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sharing a slow backing device: time slices for guests and for write-back, so that neither starves.
//!
//! A disk with a queue serves what is near its head. Thirty-two sorted writes are always nearer than the one
//! read of a guest, so in one queue the read waits for ever, and fewer writes in flight do not help
//! (`docs/decisions/0013-time-slices.md` has the figures). So only one side at a time has anything under
//! way: the guests' *foreground*, reads and writes around the log, or *write-back*. A volume behind a network that
//! lets so many operations a second through is shared in the same way: whose turn it is has all of them
//! (`docs/decisions/0020-shares.md`).
//!
//! # Invariants
//!
//! - **S1** While the device is slow, nothing of one side begins while something of the other is under way.
//! - **S2** A side that has nothing to do does not keep its turn; the foreground keeps it [`PAUSE`] longer, since
//!   a reader that has one request at a time sends the next when it has its answer.
//! - **S3** A side whose slice is used up begins nothing while the other has something to do. What one slice took
//!   too long is taken from the side's next ones. So while both always have something to do the foreground has
//!   [`Slices::ratio`] times as much of the time as write-back, and neither waits longer than one slice of the other
//!   and what is under way at its end.
//! - **S4** What waits in the foreground begins in the order in which it came, and nothing passes it.
//! - **S5** On a device that is fast nothing waits, but for S6. One that turned slow, fast and slow again is called fast less and
//!   less often: it is fast only as long as one side has it alone.
//! - **S6** With order relaxed, while no write waits for room in the log and nobody for what is dirty to be written back (write-through, a
//!   drain, a cache or a volume that changes its size), write-back has one part in a hundred of the time and guests the
//!   rest: what they do goes at the speed of the bare device. A turn that takes longer than its slice is paid for with the next ones,
//!   which are left out. As soon as somebody waits both have their shares again.
//!
//! - **S7** Volumes on one disk have one schedule: the foreground is all their guests', write-back all their batches'. A batch that wants
//!   to write is asked in each turn of write-back, whoever's batch began the turn. While guests wait only one batch goes on in a turn, the
//!   next one in the next: two in so short a time would seek between their volumes.
//! - **S8** A batch that was told to wait is asked again when nobody takes turns any more, because the disk turned fast or what gave way does
//!   not: no turn will come for it.
//!
//! # Terms
//!
//! The disk's *weight* is what the foreground has of the time for each part of write-back's, at least: the highest of its volumes'
//! (`policy::disk`). While much of the pool is free it is four.

use crate::effect::{Effect, Token};
use crate::engine::{Active, Engine, Pending};
use crate::format::superblock::Order;
use crate::limits::{TOKEN_COUNT_MAX, VOLUME_COUNT_MAX};
use crate::memory::queue_bytes;
use crate::payload::Payload;
use crate::policy::target::Target;
use crate::policy::writeback::Stage;
use crate::request::Op;
use crate::units::{Tick, VolumeIndex};
use alloc::collections::VecDeque;

/// How long the foreground keeps its turn although it has nothing to do, in nanoseconds.
const PAUSE: u64 = 2_000_000;
/// A device is slow if reads take longer than this, in nanoseconds ...
const SLOW_ABOVE: u64 = 4_000_000;
/// ... until they take less than this.
const FAST_BELOW: u64 = 500_000;
/// But one that was fast for less than this is slow for longer the next time, twice each time, in nanoseconds ...
const SLOW_MIN: u64 = 1_000_000_000;
/// ... up to this.
const SLOW_MAX: u64 = 256_000_000_000;
/// Without a target a slice is as long as so many reads.
const SLICE_READS: u64 = 16;
/// But not shorter, in nanoseconds.
const SLICE_MIN: u64 = 10_000_000;
/// Nor longer. Of what a slice took too long no more is owed. So a slice is the longer the more reads wait in the device's queue: at the end
/// of each the queue runs empty, and that costs the more the deeper it is.
const SLICE_MAX: u64 = 125_000_000;
/// Of so many reads the duration is averaged (exponentially).
const AVERAGED: u64 = 16;
/// While others want the disk nothing is read ahead for so many times as long as the last time took: a queue prefers what goes on
/// where the last one ended, and would leave the others waiting.
const AHEAD_RESTS: u64 = 3;
/// How long others are thought to want the disk, in nanoseconds: one who reads, thinks and reads again is to wait for what is read
/// ahead of another once, not each time.
const OTHERS_STAY: u64 = 1_000_000_000;
/// The share of write-back's slice that it has of a foreground slice, in percent, while much of the pool is free.
const WRITE_BACK_LEAST: u64 = 25;
/// What the foreground has of the time while write-back gives way, in percent of what that has.
const RATIO_YIELDING: i64 = 10_000;

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

/// How a backing device is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// It is slow: by slices.
    pub sliced: bool,
    /// Time of guests for each part of write-back's, at least, as it was set.
    pub weight: u8,
    /// Nanoseconds of a slice of write-back's.
    pub slice: u64,
    /// Nanoseconds that guests, and that write-back had of the device while the other side waited.
    pub had: [u64; 2],
    /// For reads.
    pub target: Option<Target>,
    /// Volumes on the disk.
    pub volumes: u32,
}

/// Some of the volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Set(u64);

const _: () = assert!(VOLUME_COUNT_MAX <= 64);

impl Set {
    fn of(volume: VolumeIndex) -> Set {
        Set(1 << volume.0)
    }

    fn is_empty(self) -> bool {
        self.0 == 0
    }

    fn has(self, volume: VolumeIndex) -> bool {
        self.0 & Set::of(volume).0 != 0
    }

    fn insert(&mut self, volume: VolumeIndex) {
        self.0 |= Set::of(volume).0;
    }

    fn remove(&mut self, volume: VolumeIndex) {
        self.0 &= !Set::of(volume).0;
    }

    fn keep(&mut self, of: Set) {
        self.0 &= of.0;
    }

    /// The next one of them, in turn; there is one.
    fn after(self, volume: VolumeIndex) -> VolumeIndex {
        let behind = self.0 & !(u64::MAX >> (63 - u32::from(volume.0)));
        let next = if behind > 0 { behind } else { self.0 };
        VolumeIndex(next.trailing_zeros() as u8)
    }

    fn is_within(self, other: Set) -> bool {
        self.0 & !other.0 == 0
    }

    fn count(self) -> u32 {
        self.0.count_ones()
    }
}

/// Whose turn it is on one disk.
#[derive(Debug)]
pub(crate) struct Slices {
    turn: Side,
    begun: Tick,
    /// What each side has left of its slices, in nanoseconds; below zero if it took too long.
    budget: [i64; 2],
    under_way: [u32; 2],
    /// Of the foreground's, under way or waiting, those that nobody asked for (`op::ahead`).
    ahead: u32,
    /// While others want the disk nothing is read ahead before this.
    ahead_rests: Tick,
    /// Until then others may want the disk.
    others_until: Tick,
    /// Foreground effects that were not begun yet.
    waiting: VecDeque<Token>,
    /// The volumes on the disk; those whose batch has writes that were not begun yet; of these, those that were asked in
    /// this turn; those that give way (S6).
    members: Set,
    wants: Set,
    asked: Set,
    yields: Set,
    /// Whose batch was told to wait when it was asked last.
    refused: Set,
    /// Whose batch has this turn of write-back, or had the last one.
    chosen: VolumeIndex,
    /// When the foreground had something under way last.
    foreground_last: Tick,
    /// Average time of a read, in nanoseconds.
    read_time: u64,
    /// What the device took for one of the foreground's on average, in nanoseconds, and when the last one ended.
    cost: u64,
    ended: Tick,
    is_slow: bool,
    /// When it became slow, or fast.
    since: Tick,
    /// For how long it stays slow, in nanoseconds (S5).
    slow_for: u64,
    /// Write-back's share against the foreground's, in percent, as the pool wants it.
    pool_share: u64,
    weight: u8,
    /// How long slices are to be for the sake of a target, in nanoseconds.
    target_slice: Option<u64>,
    /// Since when in this turn the other side waits.
    contested: Option<Tick>,
    had: [u64; 2],
    /// Write-back has next to nothing of the time, however fast the device is (S6).
    gives_way: bool,
}

impl Slices {
    /// The slices of a disk that nothing is known of, with one volume.
    pub(crate) fn new(volume: VolumeIndex, now: Tick) -> Slices {
        Slices::over(VecDeque::with_capacity(TOKEN_COUNT_MAX), volume, now)
    }

    fn over(waiting: VecDeque<Token>, volume: VolumeIndex, now: Tick) -> Slices {
        Slices {
            turn: Side::Foreground,
            begun: now,
            budget: [0; 2],
            under_way: [0; 2],
            ahead: 0,
            ahead_rests: now,
            others_until: now,
            waiting,
            members: Set::of(volume),
            wants: Set::default(),
            asked: Set::default(),
            yields: Set::default(),
            refused: Set::default(),
            chosen: volume,
            foreground_last: now,
            read_time: 0,
            cost: 0,
            ended: now,
            is_slow: false,
            since: now,
            slow_for: SLOW_MIN,
            pool_share: 100,
            weight: 1,
            target_slice: None,
            contested: None,
            had: [0; 2],
            gives_way: false,
        }
    }

    /// None, in the place of some that are elsewhere for a moment.
    pub(crate) fn none() -> Slices {
        Slices::over(VecDeque::new(), VolumeIndex(0), Tick(0))
    }

    /// Bytes of memory that they take.
    pub(crate) const fn memory_bytes() -> u64 {
        (TOKEN_COUNT_MAX * size_of::<Token>()) as u64
    }

    /// Bytes of memory beside itself.
    pub(crate) fn held_bytes(&self) -> u64 {
        queue_bytes(&self.waiting)
    }

    /// How the disk is shared, as one of its volumes sees it.
    pub(crate) fn sharing(&self, weight: u8, target: Option<Target>) -> Sharing {
        let Slices { is_slow, had, members, .. } = *self;
        let volumes = members.count();
        Sharing { sliced: is_slow, weight, slice: self.slice() as u64, had, target, volumes }
    }

    /// What its volumes want: the highest weight, and the shortest slice that a target asks for.
    pub(crate) fn set_shares(&mut self, weight: u8, target_slice: Option<u64>) {
        assert!(weight >= 1);
        (self.weight, self.target_slice) = (weight, target_slice);
    }

    /// How long a slice is.
    pub(crate) fn slice_nanos(&self) -> u64 {
        self.slice() as u64
    }

    /// Nothing of the disk is under way or waits.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.under_way == [0; 2] && self.waiting.is_empty() && self.wants.is_empty()
    }

    /// A volume is on the disk, too.
    pub(crate) fn join(&mut self, volume: VolumeIndex) {
        self.members.insert(volume);
    }

    /// One of which nothing is under way is not any more.
    pub(crate) fn leave(&mut self, volume: VolumeIndex, now: Tick) {
        self.batch_wants(volume, false, now);
        self.members.remove(volume);
        self.yields.remove(volume);
    }

    /// A volume's batch has, or has no more, writes to begin.
    pub(crate) fn batch_wants(&mut self, volume: VolumeIndex, wants: bool, now: Tick) {
        match wants {
            true => self.wants.insert(volume),
            false => self.wants.remove(volume),
        }
        self.asked.keep(self.wants);
        self.refused.keep(self.wants);
        if !self.wants.has(self.chosen) && !self.wants.is_empty() {
            self.chosen = self.wants.after(self.chosen);
            self.asked.remove(self.chosen);
        }
        if self.turn == Side::Foreground {
            if !self.wants.is_empty() && self.is_shared() {
                self.contested.get_or_insert(now);
            } else {
                self.charge(now);
            }
        }
    }

    /// Whether a volume's batch was not asked yet in this turn of write-back (S7).
    fn is_left_out(&self, volume: VolumeIndex) -> bool {
        self.members.count() > 1 && self.wants.has(volume) && !self.asked.has(volume)
    }

    /// How much of the pool of segments is in use, in percent: write-back's share rises from 30 to 60.
    pub(crate) fn pool_used(&mut self, percent: u64) {
        let part = percent.clamp(30, 60) - 30;
        self.pool_share = WRITE_BACK_LEAST + (100 - WRITE_BACK_LEAST) * part / 30;
    }

    /// The foreground waits for nothing that write-back does: that has next to nothing of the time (`yields`), or
    /// its share again, at once.
    fn give_way(&mut self, volume: VolumeIndex, yields: bool) {
        match yields {
            true => self.yields.insert(volume),
            false => self.yields.remove(volume),
        }
        // What another volume's guests wait for is not given way to.
        let who = if self.wants.is_empty() { self.members } else { self.wants };
        let yields = who.is_within(self.yields);
        let changes = self.gives_way != yields;
        self.gives_way = yields;
        if changes && self.turn == Side::Foreground {
            // It is as long as if it had begun like this: who waits every now and then does not make it longer (S3).
            let slice = self.slice() * self.ratio() / 100;
            let left = &mut self.budget[Side::Foreground as usize];
            *left = if yields { slice.max(*left) } else { slice.min(*left) };
        }
    }

    /// Something is asked for that nobody asked for.
    pub(crate) fn ahead_begins(&mut self) {
        self.ahead += 1;
    }

    /// It has ended.
    pub(crate) fn ahead_ended(&mut self, begun: Tick, now: Tick) {
        self.ahead -= 1;
        self.ahead_rests = now.after(AHEAD_RESTS * now.since(begun));
    }

    /// Whether something may be read ahead while others want the disk.
    pub(crate) fn ahead_may(&self, now: Tick) -> bool {
        self.ahead == 0 && now >= self.ahead_rests
    }

    /// Whether somebody wants the disk beside one whose own reads are at most so many: other guests, now or lately, or write-back,
    /// unless it gives way.
    pub(crate) fn is_crowded(&mut self, own: u32, now: Tick) -> bool {
        if !self.has_one_alone(own) {
            self.others_until = now.after(OTHERS_STAY);
        }
        now < self.others_until || !self.wants.is_empty() && !self.gives_way
    }

    /// Whether no guest asks for anything beside one whose own reads are so many.
    pub(crate) fn has_one_alone(&self, own: u32) -> bool {
        let guests = self.under_way[Side::Foreground as usize] + self.waiting.len() as u32;
        guests <= self.ahead.saturating_add(own)
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
        if self.turn == Side::WriteBack {
            self.contested.get_or_insert(now);
        }
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
    #[inline]
    pub(crate) fn may_write_back(&mut self, volume: VolumeIndex, now: Tick) -> bool {
        let may = self.may(Side::WriteBack, now);
        if self.turn == Side::WriteBack {
            self.asked.insert(volume);
        }
        let may = may && (self.chosen == volume || self.waiting.is_empty());
        match may {
            true => self.refused.remove(volume),
            false => self.refused.insert(volume),
        }
        may
    }

    /// Whether a volume's batch was told to wait, and nobody takes turns any more; tells once.
    fn take_released(&mut self, volume: VolumeIndex) -> bool {
        let released = !self.is_shared() && self.refused.has(volume);
        if released {
            self.refused.remove(volume);
        }
        released
    }

    /// What a read of the device takes, in nanoseconds; 0: not known.
    pub(crate) fn read_time(&self) -> u64 {
        self.read_time
    }

    /// What one more read or write in the foreground costs the device, in nanoseconds; 0: not known.
    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// Something of a side begins, which may.
    pub(crate) fn begin(&mut self, side: Side) {
        assert!(!self.is_shared() || self.under_way[side.other() as usize] == 0); // S1
        self.under_way[side as usize] += 1;
    }

    /// Something of a side has ended.
    pub(crate) fn end(&mut self, side: Side, now: Tick) {
        self.under_way[side as usize] -= 1;
        if side == Side::Foreground {
            self.foreground_last = now;
        }
    }

    /// A read that was asked for, and begun, has ended now. Says whether it shared the disk: a target counts those.
    pub(crate) fn read_took(&mut self, asked: Tick, begun: Tick, now: Tick) -> bool {
        let nanos = now.since(begun);
        self.costs(nanos, now);
        self.took(nanos, now);
        self.is_slow && (!self.wants.is_empty() || begun > asked)
    }

    /// The device took this long for something of the foreground: it may be slow now, or fast.
    fn took(&mut self, nanos: u64, now: Tick) {
        self.read_time = (self.read_time * (AVERAGED - 1) + nanos) / AVERAGED;
        let lasted = now.since(self.since);
        if !self.is_slow && self.read_time > SLOW_ABOVE {
            let relapsed = lasted < self.slow_for;
            self.slow_for = if relapsed { (self.slow_for * 2).min(SLOW_MAX) } else { SLOW_MIN };
            (self.is_slow, self.since) = (true, now);
            (self.turn, self.begun) = (Side::Foreground, now);
            self.budget = [self.slice() * self.ratio() / 100, 0];
            self.contested = (!self.wants.is_empty()).then_some(now);
        } else if self.is_slow && self.read_time <= FAST_BELOW && lasted >= self.slow_for {
            self.charge(now);
            (self.is_slow, self.since) = (false, now);
        }
    }

    /// A write around the log took this long from its beginning, with so many others as are under way.
    pub(crate) fn write_took(&mut self, nanos: u64, now: Tick) {
        let others = u64::from(self.under_way[Side::Foreground as usize]);
        self.costs(nanos, now);
        self.took(nanos / (others + 1), now);
    }

    /// Something of the foreground has ended, so long after it began. What it cost began when the one before it ended:
    /// others had the device until then.
    fn costs(&mut self, nanos: u64, now: Tick) {
        let nanos = nanos.min(now.since(self.ended));
        self.ended = now;
        self.cost = (self.cost * (AVERAGED - 1) + nanos) / AVERAGED;
    }

    /// Nanoseconds that write-back has in turn.
    fn slice(&self) -> i64 {
        let reads = || (self.read_time * SLICE_READS).clamp(SLICE_MIN, SLICE_MAX);
        self.target_slice.unwrap_or_else(reads) as i64
    }

    /// What the foreground has of the time, in percent of what write-back has.
    fn ratio(&self) -> i64 {
        match self.gives_way {
            true => RATIO_YIELDING,
            false => (u64::from(self.weight) * 100).max(10_000 / self.pool_share) as i64,
        }
    }

    /// When time alone changes whose turn it is.
    pub(crate) fn deadline(&self, now: Tick) -> Option<Tick> {
        if !self.is_shared() {
            return (!self.refused.is_empty()).then_some(now); // S8
        }
        let alone = self.members.count() == 1;
        if !alone && self.turn == Side::WriteBack && self.asked != self.wants {
            return Some(now); // S7
        }
        if !self.is_contested() {
            return None;
        }
        if self.turn == Side::WriteBack && !self.has_work(Side::WriteBack, now) {
            return Some(now); // S2
        }
        let used_up = self.begun.after(self.budget[self.turn as usize].max(0) as u64);
        let pause = self.foreground_last.after(PAUSE);
        let pauses = self.turn == Side::Foreground && self.under_way[0] == 0;
        let due = if pauses { used_up.min(pause) } else { used_up };
        // What is over waits for what is under way, if anything is.
        (due > now || self.under_way == [0; 2]).then_some(due.max(now))
    }

    #[inline]
    fn may(&mut self, side: Side, now: Tick) -> bool {
        if !self.is_shared() {
            return true; // S5
        }
        let other = side.other();
        let wanted = side == Side::Foreground || self.has_work(Side::Foreground, now);
        if wanted && self.owes() && self.is_used_up(now) {
            self.skip(now);
        }
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
            Side::WriteBack => !self.wants.is_empty(),
            Side::Foreground => {
                let pauses = self.turn == side && now.since(self.foreground_last) < PAUSE;
                !self.waiting.is_empty() || pauses
            }
        }
    }

    /// Whether write-back, which waits and gives way, has had all of its next slice already.
    fn owes(&self) -> bool {
        let left = self.budget[Side::WriteBack as usize] + self.slice();
        self.gives_way && self.turn == Side::Foreground && self.is_contested() && left <= 0
    }

    /// That slice is none: the foreground has the turn behind it at once (S6).
    fn skip(&mut self, now: Tick) {
        let (slice, ratio) = (self.slice(), self.ratio());
        let [foreground, write_back] = &mut self.budget;
        let left = *foreground - now.since(self.begun) as i64;
        *foreground = left.clamp(-(SLICE_MAX as i64), 0) + slice * ratio / 100;
        *write_back += slice;
        self.begun = now;
    }

    fn switch(&mut self, now: Tick) {
        self.charge(now);
        let ending = self.turn as usize;
        let left = self.budget[ending] - now.since(self.begun) as i64;
        // What was not used is not saved; what was overdrawn is owed.
        self.budget[ending] = left.clamp(-(SLICE_MAX as i64), 0);
        self.turn = self.turn.other();
        self.begun = now;
        let slice = self.slice();
        self.budget[self.turn as usize] += match self.turn {
            Side::Foreground => slice * self.ratio() / 100,
            Side::WriteBack => slice,
        };
        self.asked = Set::default();
        if self.turn == Side::WriteBack && !self.wants.is_empty() {
            self.chosen = self.wants.after(self.chosen);
        }
        self.contested = self.is_contested().then_some(now);
    }

    /// Whether the side waits whose turn it is not.
    fn is_contested(&self) -> bool {
        match self.turn {
            Side::Foreground => !self.wants.is_empty(),
            Side::WriteBack => !self.waiting.is_empty(),
        }
    }

    /// Notes what a side had of the time while the other waited.
    fn charge(&mut self, now: Tick) {
        if let Some(since) = self.contested.take() {
            self.had[self.turn as usize] += now.since(since);
        }
    }
}

impl Engine {
    /// A foreground effect, named by its token, begins now or when its turn comes.
    pub(crate) fn foreground_ask(&mut self, volume: VolumeIndex, token: Token) {
        let now = self.now;
        if self.slices(volume).ask(token, now) {
            self.foreground_begin(token);
        } else {
            self.volume(volume).stats.turn_waits += 1;
        }
    }

    /// Begins what may begin.
    #[inline]
    pub(crate) fn slices_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let state = self.volume(volume);
        // Who only waits to pass the log waits for nothing of write-back's; who waits for a batch does, though his write is placed.
        let yields = state.order == Order::Relaxed
            && (state.writes.is_empty() || state.around.awaits)
            && !state.is_waited_for();
        let slices = self.slices(volume);
        slices.give_way(volume, yields);
        let released = slices.take_released(volume); // S8
        if released || slices.is_shared() || !slices.waiting.is_empty() {
            self.slices_go_on(volume, released, payload);
        }
    }

    fn slices_go_on(&mut self, volume: VolumeIndex, released: bool, payload: &mut impl Payload) {
        let (now, count) = (self.now, self.segments.count());
        let used = u64::from(count - self.segments.free_count()) * 100 / u64::from(count.max(1));
        self.slices(volume).pool_used(used);
        // Whichever volumes of the disk they are of (S4).
        while let Some(token) = self.slices(volume).next_waiting(now) {
            self.foreground_begin(token);
        }
        // A turn that came with time, or with another volume's batch, not with a completion.
        let stage = self.volume(volume).writeback.stage;
        let writes = stage == Stage::Writing || self.mends(volume);
        let slices = self.slices(volume);
        debug_assert!(
            writes || !slices.wants.has(volume),
            "only a batch that is written wants to write"
        );
        if !writes {
            return;
        }
        let comes = slices.turn == Side::Foreground && slices.wants.has(volume);
        let asked = released || comes || slices.is_left_out(volume);
        if asked && slices.may_write_back(volume, now) {
            match self.volume(volume).writeback.lane.filter(|_| stage != Stage::Writing) {
                Some(lane) => self.writeback_flushed(volume, lane, payload), // it mends
                None => self.writeback_go_on(volume, payload),
            }
        }
    }

    pub(crate) fn foreground_begin(&mut self, token: Token) {
        let now = self.now;
        let pending = self.tokens.get_mut(token.0).expect("it was not begun");
        let effect = match pending {
            Pending::Miss(miss) => miss.begin(token, now),
            Pending::Scrub(work) => work.begin(token, now),
            Pending::Around { request, since } => {
                *since = now;
                let active = self.requests.get(*request).expect("it is in the engine");
                let Active { request, first: lba, blocks, .. } = *active;
                let volume = request.volume;
                match request.op {
                    Op::Discard => Effect::DiscardBacking { token, volume, lba, blocks },
                    _ => Effect::WriteAround { token, volume, tag: request.tag },
                }
            }
            other => unreachable!("{other:?} is not of the foreground"),
        };
        self.effects.push_back(effect);
    }
}

#[cfg(test)]
mod tests;
