// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The delay of writes while much of the log is dirty: they come to meet the rate at which write-back makes room,
//! from nothing on and without a step, so that nobody ever stands before a cache that is full.
//!
//! A block of log costs its writer `pace · f(d)`: `pace` is what write-back takes for one, d how much of the log space
//! that the volume may use is dirty. f is 0 up to d₀ = 0.6, then (d − d₀) / (1 − d) up to 0.78, nearly flat from there, so that what
//! comes in does not follow each slow second of the disk, and steep from 0.9 on. At d = 0.84 as much comes in as goes out.
//!
//! Room comes when a batch ends, all of it at once (K2 of `writeback`). So that writers do not feel that, what the
//! batch under way has written counts as clean, and the room for a batch is kept out of the account: always the same,
//! since d must not jump where one batch ends and another begins. So d falls as the device writes, and
//! what is kept lasts until the batch ends (`docs/decisions/0019-write-delay.md`).
//!
//! # Invariants
//!
//! - **H1** The delay is zero while no more than d₀ is dirty, and rises without a step from there.
//! - **H2** One at a time: writes of a volume are let go in the order in which they came, each when the log space
//!   that was taken before it is paid for. What was not used is not saved. Nobody pays for what is appended again because its
//!   backing device refuses it, nor for notes while there is such: that goes on while writers wait, and they would wait for ever. Other notes
//!   are paid for: each tells of a batch, and where each write has one (`strict`, flushed one by one) they are half of the log.
//! - **H3** What is taken at once is paid for in [`DELAY_MAX`], or in twice what write-back takes for it, if that is
//!   longer. The log may be full in spite of all; then writes wait for room, as they always do.
//! - **H4** Debts below [`GRAIN`] hold nobody: on a fast backing device there is no delay worth a timer.
//! - **H5** Who waits here holds nothing: no place in the log, no range, no buffer. Flushes and reads do not wait,
//!   nor do writes that go around the log but for their turn in the queue, nor those that would but for the batch under way.
//! - **H6** A debt does not outlive its cause: nobody waits longer for what is owed than it would cost at this moment, and a device that
//!   stood for a while, and did nothing at all, has not become slower.
//!
//! # Not here
//!
//! Which writes go around the log instead: `bypass`. How write-back shares the device with guests: `slices`.

use crate::engine::Engine;
use crate::limits::RECORD_ENTRIES_MAX;
use crate::policy::writeback::{Cursor, Stage};
use crate::units::{Sequence, Tick, VolumeIndex};
use crate::volume::Volume;

/// d₀.
const BEGINS_PERCENT: u64 = 60;
/// Between these the delay changes little.
const FLAT_PERCENT: u64 = 78;
const STEEP_PERCENT: u64 = 90;
/// Longest delay of what was taken at once, in nanoseconds, but for H3.
const DELAY_MAX: u64 = 100_000_000;
/// A smaller debt holds nobody, in nanoseconds.
const GRAIN: u64 = 1_000_000;
/// A batch covers at most so many percent of the log space that its volume may use: where as much comes in as goes out (d = 0.84 of the
/// rest) 47 are dirty when it begins, and 91 when it ends.
const BATCH_PERCENT: u64 = 44;
/// A batch under way so long says what write-back takes, in nanoseconds: the last one may have been quicker.
const BATCH_TELLS: u64 = 2_000_000_000;
/// Fewer blocks of log say no more than so many times what was said before: the disk may have stood for a while.
const FEW_BLOCKS: u64 = 64;
const PACE_RISE: u64 = 8;

/// The delay of one volume's writes.
#[derive(Debug, Default)]
pub(crate) struct Delay {
    /// For each block of log, in nanoseconds; 0: none (H1).
    gap: u64,
    /// What write-back takes for one.
    pace: u64,
    /// Up to here the log is paid for.
    paid: u64,
    /// When it will be.
    next: Tick,
    /// So many blocks it is for that this is so.
    owed: u64,
    /// What was placed when the delay was looked at last.
    seen: Sequence,
    holding: bool,
    /// A write waited then.
    held: Tick,
    /// Blocks of log that the volume may use, and for which state of it that was asked.
    room: u64,
    room_of: (u64, u64),
}

impl Delay {
    /// For each block of log, with `dirty` blocks of `room` (H1).
    fn gap(pace: u64, dirty: u64, room: u64) -> u64 {
        if dirty >= room {
            return u64::MAX;
        }
        let [begins, flat, steep, full] =
            [BEGINS_PERCENT, FLAT_PERCENT, STEEP_PERCENT, 100].map(|percent| percent * room);
        let d = 100 * dirty;
        // Each part goes on where the one before it ends: f is their sum.
        let rising = d.clamp(begins, flat);
        let parts = [
            (rising - begins, full - rising),
            (3 * (d.clamp(flat, steep) - flat), full),
            (4 * d.saturating_sub(steep), full - d),
        ];
        let part =
            |(over, left): (u64, u64)| u128::from(pace) * u128::from(over) / u128::from(left);
        u64::try_from(parts.map(part).iter().sum::<u128>()).unwrap_or(u64::MAX)
    }

    /// So many blocks of log were taken (H2, H3).
    fn charge(&mut self, blocks: u64, now: Tick) {
        if self.next <= now {
            self.owed = 0;
        }
        self.owed += blocks;
        self.next = self.next.max(now).after(self.price(blocks));
    }

    /// What so many blocks cost now (H3).
    fn price(&self, blocks: u64) -> u64 {
        let longest = DELAY_MAX.max(self.pace.saturating_mul(2 * blocks));
        self.gap.saturating_mul(blocks).min(longest)
    }

    /// They cost so much from now on, and what is owed no more than that (H6).
    fn set_price(&mut self, gap: u64, pace: u64, now: Tick) {
        let falls = gap < self.gap;
        (self.gap, self.pace) = (gap, pace);
        if falls {
            self.next = self.next.min(now.after(self.price(self.owed)));
        }
    }

    /// What the log has taken is charged, whose head is there now.
    fn charge_to(&mut self, head: u64, now: Tick) {
        let taken = head.saturating_sub(self.paid);
        if taken > 0 {
            self.charge(taken, now);
            self.paid = head;
        }
    }

    /// So many blocks of log were taken by what nobody writes.
    pub(crate) fn spare(&mut self, blocks: u64) {
        self.paid += blocks;
    }

    /// Whether the next write waits.
    fn holds(&mut self, now: Tick) -> bool {
        // Both ends of H4: nobody before the debt is worth it, then all until it is paid.
        self.holding = if self.holding { now < self.next } else { now.after(GRAIN) < self.next };
        self.holding
    }

    /// What volumes may use has changed.
    pub(crate) fn forget_room(&mut self) {
        self.room_of = (0, 0);
    }

    fn end(&mut self) {
        (self.gap, self.holding, self.next, self.owed) = (0, false, Tick(0), 0);
    }

    /// When what waits may go on; past that time it waits for something else.
    pub(crate) fn deadline(&self, now: Tick) -> Option<Tick> {
        (self.holding && now < self.next).then_some(self.next)
    }

    /// Whether a write that came then had to wait.
    pub(crate) fn has_held(&self, came: Tick) -> bool {
        self.held > came
    }

    /// Whether all of the room is taken, but for what a batch needs: who waits does so for write-back, whatever that takes.
    pub(crate) fn is_full(&self) -> bool {
        self.gap == u64::MAX
    }

    /// Whether so much is dirty that writes pay for room.
    #[inline]
    pub(crate) fn is_felt(&self) -> bool {
        self.gap > 0
    }
}

/// What write-back takes for a block of log, by the last batch and by the one under way, which is so old and has written so many. That one may
/// not have had the disk yet, or stand for a moment: what it says by having done nothing is no measure (a write is charged once).
fn pace(last: Option<u64>, batch: Option<(u64, u64)>) -> u64 {
    let so_far = |(elapsed, written): (u64, u64)| elapsed / written.max(1);
    match (last, batch) {
        (Some(last), Some(batch)) if batch.0 >= BATCH_TELLS => {
            last.max(believed(last, so_far(batch), batch.1))
        }
        (Some(last), _) => last,
        (None, Some(batch)) if batch.1 > 0 => so_far(batch).min(DELAY_MAX),
        (None, _) => 0,
    }
}

/// What so many blocks that took `space` each say, after `before`.
pub(crate) fn believed(before: u64, space: u64, blocks: u64) -> u64 {
    if blocks < FEW_BLOCKS { space.min(before.max(1).saturating_mul(PACE_RISE)) } else { space }
}

impl Engine {
    /// What a block of log costs now.
    #[inline]
    pub(crate) fn delay_settle(&mut self, volume: VolumeIndex) {
        let state = self.volume(volume);
        let placed = core::mem::replace(&mut state.delay.seen, state.log.placed);
        // Reads change nothing of it.
        if state.delay.gap == 0 && placed == state.log.placed && state.writes.is_empty() {
            return;
        }
        if state.log.is_dirty() {
            let (gap, pace) = self.delay_gap(volume);
            let now = self.now;
            let head = self.log_head(volume);
            let delay = &mut self.volume(volume).delay;
            if gap == 0 {
                delay.end();
            } else if delay.gap == 0 {
                (delay.paid, delay.next) = (head, now);
            }
            delay.set_price(gap, pace, now);
        } else if state.delay.gap > 0 {
            self.volume(volume).delay.end();
        }
    }

    /// Whether the volume's next write waits (H2).
    #[inline]
    pub(crate) fn delay_holds(&mut self, volume: VolumeIndex) -> bool {
        self.volume_ref(volume).expect("it exists").delay.gap > 0 && self.delay_is_due(volume)
    }

    fn delay_is_due(&mut self, volume: VolumeIndex) -> bool {
        let (head, now) = (self.log_head(volume), self.now);
        let delay = &mut self.volume(volume).delay;
        delay.charge_to(head, now);
        let holds = delay.holds(now);
        if holds {
            delay.held = now;
        }
        holds
    }

    /// For each block of log, and what write-back takes for one.
    fn delay_gap(&mut self, volume: VolumeIndex) -> (u64, u64) {
        let (room, space) = (self.log_room(volume), self.batch_space(volume));
        let state = self.volume_ref(volume).expect("it exists");
        let (head, cursor) = (self.log_head(volume), self.log_at(state, state.writeback.cursor));
        let dirty = head.saturating_sub(cursor);
        let room = room - space.min(self.config.batch_blocks_max.into());
        if 100 * dirty <= BEGINS_PERCENT * room {
            return (0, 0);
        }
        // What waits to be read after all is no matter of the device's speed.
        let writing = matches!(state.writeback.stage, Stage::Writing | Stage::Flushing)
            && !self.is_finding(state);
        let (mut written, mut batch) = (0, None);
        if let Some(lane) = state.writeback.lane.filter(|_| writing) {
            let range = self.log_at(state, state.writeback.end_cursor).saturating_sub(cursor);
            let lane = &self.lanes[lane];
            let (done, all) = lane.progress();
            written = range * done / all.max(1);
            let elapsed = self.now.since(state.writeback.begun);
            batch = Some((elapsed.saturating_sub(lane.has_stood(self.now)), written));
        }
        let pace = pace(state.writeback.pace.map(|pace| pace.space), batch);
        // That much is dirty is said (`is_felt`) before the first batch has shown what it costs.
        (Delay::gap(pace, dirty - written, room).max(1), pace)
    }

    /// Blocks of log that one batch of the volume may cover.
    pub(crate) fn batch_space(&mut self, volume: VolumeIndex) -> u64 {
        self.log_room(volume) * BATCH_PERCENT / 100
    }

    /// Blocks of log that the volume may use: all but what is kept, and what others use or have reserved.
    fn log_room(&mut self, volume: VolumeIndex) -> u64 {
        let state = self.volume_ref(volume).expect("it exists");
        let now = (state.log.next_ordinal.0, self.log_at(state, state.writeback.cursor));
        if state.delay.room_of == now {
            return state.delay.room;
        }
        let blocks = u64::from(self.geometry.segment_blocks);
        let of_others: u64 = self
            .all_volumes()
            .filter(|other| other.index != volume)
            .map(|other| self.dirty_space(other).div_ceil(blocks).max(other.needs().into()))
            .sum();
        let count = u64::from(self.segments.count());
        let room = count.saturating_sub(u64::from(self.kept_segments()) + of_others);
        let room = room.max(state.reserved.into()).max(1) * blocks;
        let delay = &mut self.volume(volume).delay;
        (delay.room, delay.room_of) = (room, now);
        room
    }

    /// Whether so many blocks more would find room, headers counted, if nothing were written back.
    pub(crate) fn log_holds_more(&mut self, volume: VolumeIndex, blocks: u64) -> bool {
        let room = self.log_room(volume);
        let state = self.volume_ref(volume).expect("it exists");
        let record = RECORD_ENTRIES_MAX as u64;
        self.dirty_space(state) + blocks + 1 + blocks / record <= room
    }

    /// Blocks of a volume's log that are not written back.
    fn dirty_space(&self, state: &Volume) -> u64 {
        if !state.log.is_dirty() {
            return 0;
        }
        self.log_head(state.index).saturating_sub(self.log_at(state, state.writeback.cursor))
    }

    /// Where the next block of a log goes, counted in blocks from its first segment on.
    pub(crate) fn log_head(&self, volume: VolumeIndex) -> u64 {
        let log = &self.volume_ref(volume).expect("it exists").log;
        let blocks = u64::from(self.geometry.segment_blocks);
        match log.head {
            Some(head) => (log.next_ordinal.0 - 1) * blocks + u64::from(head.next_block),
            None => log.next_ordinal.0 * blocks,
        }
    }

    /// Where a cursor is, counted likewise.
    pub(crate) fn log_at(&self, state: &Volume, cursor: Cursor) -> u64 {
        let blocks = u64::from(self.geometry.segment_blocks);
        match cursor.segment.or(state.log.tail_segment) {
            Some(id) => self.segments.get(id).ordinal.0 * blocks + u64::from(cursor.block),
            None => state.log.next_ordinal.0 * blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: u64 = 1_000_000;

    /// Blocks that a disk refuses are appended again 100 times a second, in a log that is full of what is dirty: the guest who waits has one block
    /// to pay for. The debt rose faster than time went by.
    #[test]
    fn nobody_pays_for_what_nobody_writes() {
        let mut delay = Delay { gap: u64::MAX, pace: PACE, ..Delay::default() };
        let (mut head, mut now) = (1, Tick(0));
        delay.charge_to(head, now);
        assert!(delay.holds(now));
        for _ in 0..10 {
            now = now.after(10_000_000);
            head += 16;
            delay.spare(16);
            delay.charge_to(head, now);
        }
        assert!(!delay.holds(now), "{delay:?}");
    }

    #[test]
    fn the_delay_rises_from_zero_without_a_step() {
        let gap = |dirty| Delay::gap(PACE, dirty, 10_000);
        assert_eq!([gap(0), gap(5_999), gap(6_000)], [0, 0, 0], "H1");
        assert!(gap(8_400).abs_diff(PACE) < PACE / 100, "as much comes in as goes out");
        assert!(gap(7_800) > PACE * 8 / 10 && gap(9_000) < PACE * 12 / 10, "flat around it");
        for dirty in 6_000..9_200 {
            let step = gap(dirty + 1) - gap(dirty);
            assert!(step < PACE / 150, "{dirty}: {step}");
        }
        assert!(gap(9_999) > 3_000 * PACE);
        assert_eq!([gap(10_000), gap(20_000)], [u64::MAX; 2]);
    }

    /// A batch that had done nothing yet said its whole age for each block: 1 MiB was charged with minutes, and who came after it stood for as
    /// long, however fast the disk went on.
    #[test]
    fn a_batch_that_stands_says_little_of_the_pace() {
        let second = 1_000_000_000;
        assert_eq!(pace(Some(PACE), Some((second, 0))), PACE, "it has just begun");
        assert_eq!(pace(Some(PACE), Some((10 * second, 0))), PACE_RISE * PACE);
        assert_eq!(pace(Some(PACE), Some((10 * second, 63))), PACE_RISE * PACE);
        assert_eq!(pace(Some(PACE), Some((10 * second, 64))), 10 * second / 64);
        assert_eq!(pace(Some(PACE), Some((10 * second, 5_000))), 2 * PACE);
        assert_eq!(pace(Some(PACE), Some((10 * second, 50_000))), PACE);
        assert_eq!((pace(Some(PACE), None), pace(None, None)), (PACE, 0));
        assert_eq!(
            [0, 2, 20_000].map(|written| pace(None, Some((10 * second, written)))),
            [0, DELAY_MAX, 500_000]
        );
        let mut delay = Delay { pace: PACE_RISE * PACE, ..Delay::default() };
        delay.gap = Delay::gap(delay.pace, 84, 100);
        delay.charge(256, Tick(0));
        assert!(delay.next <= Tick(5 * second), "{:?}", delay.next);
    }

    #[test]
    fn writes_are_let_go_at_the_rate_that_they_are_charged() {
        let mut delay = Delay { gap: 400_000, pace: PACE, ..Delay::default() };
        let (mut now, mut blocks) = (Tick(0), 0);
        while now < Tick(1_000_000_000) {
            if delay.holds(now) {
                now = delay.deadline(now).expect("somebody waits");
                continue;
            }
            delay.charge(1, now);
            blocks += 1;
        }
        assert!((2_500..2_505).contains(&blocks), "{blocks} in a second");
        // H2: what was not used meanwhile is not saved.
        now = now.after(1_000_000_000);
        let burst = (0..100).take_while(|_| {
            let goes = !delay.holds(now);
            delay.charge(1, now);
            goes
        });
        assert!(burst.count() <= 3);
    }

    #[test]
    fn a_write_waits_for_a_tenth_of_a_second_or_twice_its_own_time() {
        let mut delay = Delay { gap: u64::MAX, pace: PACE, ..Delay::default() };
        delay.charge(1, Tick(0));
        assert!(delay.holds(Tick(0)));
        assert!(delay.holds(Tick(DELAY_MAX - 1)));
        assert!(!delay.holds(Tick(DELAY_MAX)));
        delay.charge(256, Tick(DELAY_MAX));
        assert_eq!(delay.deadline(Tick(0)), None);
        assert!(delay.holds(Tick(DELAY_MAX)));
        assert_eq!(delay.deadline(Tick(0)), Some(Tick(DELAY_MAX + 512 * PACE)), "H3");
    }

    #[test]
    fn small_debts_hold_nobody() {
        let mut delay = Delay { gap: 2_000, pace: 2_000, ..Delay::default() };
        for _ in 0..GRAIN / 2_000 {
            assert!(!delay.holds(Tick(5)));
            delay.charge(1, Tick(5));
        }
        assert!(!delay.holds(Tick(5)));
        delay.charge(1, Tick(5));
        assert!(delay.holds(Tick(5)), "H4");
        assert!(delay.holds(Tick(900_000)), "then it is paid");
    }
}
