// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A lane: the memory one batch of write-back works in. Its runs go from reading to written in ascending
//! order; their blocks pass through frames, a ring of its own in the write-back window.
//!
//! # Invariants
//!
//! - **N1** No two lanes that are taken have a frame in common. The window is divided evenly among as many lanes as
//!   there are volumes, and [`WINDOW_PARTS_MAX`] at most; where that changed meanwhile, a part waits for those that still have some
//!   of its frames. Behind the window are smaller parts, for when none of it is left: one less than there are lanes, since one has
//!   what is not left.
//! - **N2** Who asked first has what is left first (`Writeback::asks_since`), and nobody waits longer than [`PATIENCE`] for a part of
//!   the window: so no backing device, slow or silent, keeps another volume from being written back. There are as many
//!   lanes as volumes (`Config::lane_count`).

use crate::engine::{Config, work_frames};
use crate::format::entry::Kind;
use crate::limits::{BACKGROUND_BLOCKS, BACKGROUND_READS};
use crate::memory::{queue_bytes, vec_bytes};
use crate::policy::batch::{Batch, Stretch};
use crate::policy::parked::PARTS_MAX;
use crate::units::{Lba, Tick};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Parts of the window.
pub(crate) const WINDOW_PARTS_MAX: usize = 4;
/// Frames of a part behind it: two runs of a quarter of the longest.
const SMALL_FRAMES: u32 = 128;
/// So long a volume waits for a part of the window, in nanoseconds, unless somebody waits for it.
pub(super) const PATIENCE: u64 = 1_000_000_000;
/// With fewer blocks that are there and not yet written the backing device is about to have nothing to write.
const READ_LEAST: u32 = 256;
/// A device that ends no write for longer stands, in nanoseconds: disks that are at work do not.
const STAND: u64 = 2_000_000_000;
/// Runs of one batch that may be under way at once.
const RUN_COUNT_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunState {
    Reading,
    Writing,
    Done,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) stretch: Stretch,
    pub(super) frame: u32,
    pub(super) frames: u32,
    pub(super) state: RunState,
    /// Blocks that are still to come from the cache, then writes under way or waiting to be.
    pub(super) remaining: u16,
    /// Some of its blocks are refused.
    pub(super) refused: bool,
}

/// Runs of a batch, by number: those that are not done, one behind the other.
#[derive(Debug)]
pub(super) struct Runs {
    rows: Box<[Run; RUN_COUNT_MAX]>,
    /// Number of the first.
    front: u32,
    /// Number of the next that comes.
    behind: u32,
}

const _: () = assert!(RUN_COUNT_MAX.is_power_of_two(), "numbers may begin at zero again");

impl Runs {
    fn new() -> Runs {
        let stretch = Stretch { kind: Kind::Void, lba: Lba(0), blocks: 0, item: 0 };
        let state = RunState::Done;
        let none = Run { stretch, frame: 0, frames: 0, state, remaining: 0, refused: false };
        let rows = alloc::vec![none; RUN_COUNT_MAX].into_boxed_slice();
        Runs { rows: rows.try_into().expect("so many"), front: 0, behind: 0 }
    }

    /// Takes all out; the next one is number 0.
    pub(super) fn clear(&mut self) {
        (self.front, self.behind) = (0, 0);
    }

    pub(super) fn len(&self) -> usize {
        self.behind.wrapping_sub(self.front) as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.front == self.behind
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() == RUN_COUNT_MAX
    }

    /// Puts one behind all others.
    pub(super) fn push(&mut self, run: Run) {
        assert!(!self.is_full());
        self.rows[self.behind as usize % RUN_COUNT_MAX] = run;
        self.behind = self.behind.wrapping_add(1);
    }

    /// The first.
    pub(super) fn front(&self) -> Option<&Run> {
        self.get(self.front)
    }

    /// Takes the first out.
    pub(super) fn pop(&mut self) {
        assert!(!self.is_empty());
        self.front = self.front.wrapping_add(1);
    }

    /// The run with this number, if it is here.
    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&Run> {
        let here = (number.wrapping_sub(self.front) as usize) < self.len();
        here.then(|| &self.rows[number as usize % RUN_COUNT_MAX])
    }

    /// The run with this number, which is here.
    #[inline]
    pub(super) fn at(&mut self, number: u32) -> &mut Run {
        assert!(self.get(number).is_some());
        &mut self.rows[number as usize % RUN_COUNT_MAX]
    }
}

/// A part of a run that is one write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(super) run: u32,
    /// Blocks from the run's first.
    pub(super) from: u64,
    pub(super) blocks: u64,
}

/// Memory for one batch.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(super) taken: bool,
    pub(super) batch: Batch,
    pub(super) runs: Runs,
    /// Number of the next run to be written.
    pub(super) next_write: u32,
    /// Blocks of it that are zeroed or discarded, or are being so.
    pub(super) next_piece: u64,
    /// Number of the run whose blocks are read next, and how many of them are asked for.
    pub(super) next_read: u32,
    pub(super) next_read_block: u16,
    /// Blocks being read from the cache device.
    pub(super) reading: u32,
    /// Blocks that are there and not yet written.
    pub(super) read: u32,
    pub(super) frame_base: u32,
    pub(super) frame_count: u32,
    pub(super) frame_next: u32,
    pub(super) frames_used: u32,
    /// Effects under way.
    pub(super) under_way: u32,
    pub(super) writes_under_way: u16,
    /// While writes are under way: when the last one ended, or the first began.
    pub(super) moved: Tick,
    /// For so long, in nanoseconds, no write ended though some were under way, but for [`STAND`] each time: an outage says nothing of
    /// what the device takes for a write.
    pub(super) stood: u64,
    pub(super) given_out: bool,
    /// Blocks of the batch that are written.
    pub(super) written: u64,
    /// Completions the engine had seen when it went on last: without another one it cannot.
    pub(super) seen: u64,
    /// It is given up as soon as nothing of it is under way.
    pub(super) failed: bool,
    /// What is refused is halved, and parked in the end.
    pub(super) parking: bool,
    /// Parked blocks are tried, too.
    pub(super) trying: bool,
    /// Parts of refused writes, to be tried next.
    pub(super) parts: VecDeque<Part>,
    /// Blocks of refused zeros.
    pub(super) zeros: Vec<Lba>,
    /// Something was written or, where nothing else was, the device was flushed.
    pub(super) works: bool,
    /// Writes that were refused.
    pub(super) refusals: u32,
    /// Those that say something of the device: of what was not parked already.
    pub(super) probes: u32,
    /// It has put off the next try.
    pub(super) put_off: bool,
    /// Because not all that was found lost could be noted.
    pub(super) crowded: bool,
    /// Because nobody waits to see what of it can be read, or the cache device has failed: no fault of the backing device.
    pub(super) broken_off: bool,
    pub(super) doubt: Doubt,
    /// When a block could not be read last.
    pub(super) doubted: Tick,
    /// Since when all of it is written but for what could not be read.
    pub(super) doubts_since: Tick,
    /// What could not be read was looked at once more, up to this block of the batch.
    pub(super) looked: usize,
    /// This one could be read then: it is to be written, ...
    pub(super) mends: Option<usize>,
    /// ... and such ones were, since the backing device was flushed.
    pub(super) mended: bool,
}

/// How far it is found out whether what could not be read is lost (K4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// It has not begun: all else is still being written.
    No,
    /// The cache device is flushed: most that are gone fail that.
    Asked,
    /// It has time.
    Waits,
    /// The cache device is asked whether it is there, ...
    AskedAgain,
    /// ... what was bad is read once more, one block after the other, and what is good then is written, ...
    Looks,
    /// ... and it is asked behind that.
    AskedBehind,
    /// What is still marked lost is.
    Over,
}

impl Lane {
    pub(crate) fn new(config: &Config) -> Lane {
        Lane {
            taken: false,
            batch: Batch::new(Lane::items(config), config.extent_count_max as usize),
            runs: Runs::new(),
            next_write: 0,
            next_piece: 0,
            next_read: 0,
            next_read_block: 0,
            reading: 0,
            read: 0,
            frame_base: 0,
            frame_count: 0,
            frame_next: 0,
            frames_used: 0,
            under_way: 0,
            writes_under_way: 0,
            moved: Tick(0),
            stood: 0,
            given_out: false,
            written: 0,
            seen: 0,
            failed: false,
            crowded: false,
            broken_off: false,
            doubt: Doubt::No,
            doubted: Tick(0),
            doubts_since: Tick(0),
            looked: 0,
            mends: None,
            mended: false,
            parking: false,
            trying: false,
            parts: VecDeque::with_capacity(PARTS_MAX),
            zeros: Vec::with_capacity(PARTS_MAX),
            works: false,
            refusals: 0,
            probes: 0,
            put_off: false,
        }
    }

    /// A lane that nobody has, behind `before` others for those who asked before: with a part of the window or, if it `may` be so,
    /// with a small one (N1, N2).
    pub(super) fn find(
        lanes: &mut [Lane],
        volumes: usize,
        config: &Config,
        before: usize,
        may_be_small: bool,
    ) -> Option<usize> {
        let at = lanes.iter().enumerate().filter(|(_, lane)| !lane.taken).nth(before)?.0;
        let parts = volumes.clamp(1, WINDOW_PARTS_MAX) as u32;
        let count = config.window_blocks / parts;
        let small = || {
            let first = work_frames(config) - Lane::small_frames(config);
            let mut free = free_parts(lanes, first, small_count(config), SMALL_FRAMES);
            free.next().filter(|_| may_be_small)
        };
        let frames = free_parts(lanes, 0, parts, count).nth(before).or_else(small)?;
        (lanes[at].frame_base, lanes[at].frame_count) = frames;
        Some(at)
    }

    /// A write begins.
    pub(super) fn write_begins(&mut self, now: Tick) {
        if self.writes_under_way == 0 {
            self.moved = now;
        }
        self.under_way += 1;
        self.writes_under_way += 1;
    }

    /// A write ends.
    pub(super) fn write_ends(&mut self, now: Tick) {
        self.stood = self.has_stood(now);
        self.moved = now;
        self.writes_under_way -= 1;
    }

    /// For how long the device did nothing of its batch, in nanoseconds.
    pub(super) fn has_stood(&self, now: Tick) -> u64 {
        let stands = if self.writes_under_way > 0 { now.since(self.moved) } else { 0 };
        self.stood + stands.saturating_sub(STAND)
    }

    /// Whether it is taken and has any of so many frames.
    fn has_of(&self, base: u32, count: u32) -> bool {
        let behind = self.frame_base + self.frame_count;
        self.taken && self.frame_base < base + count && base < behind
    }

    /// Whether a write around the log may pass what its batch holds of `start..end`: nothing has to be found out, or was refused.
    pub(crate) fn may_pass(&self, start: Lba, end: Lba) -> bool {
        let calm = !self.failed && self.doubt == Doubt::No && self.refusals == 0;
        calm && self.batch.may_pass(start, end)
    }

    /// Whether a run is being written that has any of `start..end`.
    pub(super) fn is_writing(&self, start: Lba, end: Lba) -> bool {
        let runs = (0..self.runs.len() as u32).map(|at| self.runs.front.wrapping_add(at));
        let writes = |run: &Run| {
            let Stretch { lba, blocks, .. } = run.stretch;
            run.state == RunState::Writing && lba < end && start < lba + blocks
        };
        runs.filter_map(|number| self.runs.get(number)).any(writes)
    }

    /// Lanes there are.
    pub(crate) fn count(config: &Config) -> usize {
        usize::from(config.lane_count).max(1)
    }

    /// Frames behind the window that only lanes use: the last of [`work_frames`].
    pub(crate) fn small_frames(config: &Config) -> u32 {
        small_count(config) * SMALL_FRAMES
    }

    pub(crate) fn memory_bytes(config: &Config) -> u64 {
        let items = Lane::items(config);
        let lane = size_of::<Lane>() + RUN_COUNT_MAX * size_of::<Run>();
        let parts = PARTS_MAX * (size_of::<Part>() + size_of::<Lba>());
        let batch = Batch::memory_bytes(items, config.extent_count_max as usize);
        let sort_room = (items * size_of::<u64>()) as u64;
        Lane::count(config) as u64 * (batch + (lane + parts) as u64) + sort_room
    }

    /// Blocks that a batch has room for.
    pub(crate) const fn items(config: &Config) -> usize {
        config.batch_blocks_max as usize + crate::limits::RECORD_ENTRIES_MAX
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        let parts = queue_bytes(&self.parts) + vec_bytes(&self.zeros);
        size_of::<Lane>() as u64
            + self.batch.held_bytes()
            + size_of_val(&*self.runs.rows) as u64
            + parts
    }

    /// Blocks of its batch that are written, and all of them.
    pub(super) fn progress(&self) -> (u64, u64) {
        let all = self.batch.len() as u64;
        let done = self.given_out && self.runs.is_empty();
        (if done { all } else { self.written.min(all) }, all)
    }

    #[inline]
    pub(super) fn run(&mut self, number: u32) -> &mut Run {
        self.runs.at(number)
    }

    /// The run of which blocks are to be read next.
    #[inline]
    pub(super) fn unread(&mut self) -> Option<&Run> {
        if self.runs.behind.wrapping_sub(self.next_read) as usize > self.runs.len() {
            // What needs no reading was written before its turn came.
            (self.next_read, self.next_read_block) = (self.runs.front, 0);
        }
        while self.runs.get(self.next_read)?.stretch.kind != Kind::Data {
            (self.next_read, self.next_read_block) = (self.next_read.wrapping_add(1), 0);
        }
        self.runs.get(self.next_read)
    }

    /// Blocks that may be read from the cache device now: few at once, since guests wait behind them; more while
    /// the backing device is about to have nothing to write.
    #[inline]
    pub(super) fn may_read(&self) -> u32 {
        let reads = self.under_way - u32::from(self.writes_under_way);
        let (blocks, count) = match self.read < (self.frame_count / 4).min(READ_LEAST) {
            true => (8 * BACKGROUND_BLOCKS, 8 * BACKGROUND_READS),
            false => (BACKGROUND_BLOCKS, BACKGROUND_READS),
        };
        let left = if reads < count { blocks.saturating_sub(self.reading) } else { 0 };
        left.min(BACKGROUND_BLOCKS)
    }

    /// Consecutive frames, given back in the order they were taken.
    pub(super) fn take_frames(&mut self, blocks: u32) -> Option<(u32, u32)> {
        let left = self.frame_count - self.frame_next;
        // While few are in use it begins again early: what was used last is in near caches still.
        // So many are left then, until the oldest is written.
        let few = (self.frame_count / 8).max(2 * blocks);
        let oldest = self.runs.front().map_or(self.frame_next, |run| run.frame - self.frame_base);
        let early = self.frames_used < few && oldest >= few && self.frame_next >= oldest;
        let (skip, at) = if blocks <= left && !early { (0, self.frame_next) } else { (left, 0) };
        if self.frames_used + skip + blocks > self.frame_count {
            return None;
        }
        self.frames_used += skip + blocks;
        self.frame_next = at + blocks;
        Some((self.frame_base + at, skip + blocks))
    }
}

/// Those of so many parts of so many frames each that no lane has any frame of: where they begin, and how many frames it is.
fn free_parts(
    lanes: &[Lane],
    first: u32,
    parts: u32,
    count: u32,
) -> impl Iterator<Item = (u32, u32)> {
    let all = (0..parts).map(move |part| (first + part * count, count));
    all.filter(|(base, count)| !lanes.iter().any(|lane| lane.has_of(*base, *count)))
}

fn small_count(config: &Config) -> u32 {
    Lane::count(config) as u32 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs come and are done in turn, many of them under way or few: no frame is in two of them, and while few are,
    /// the same few frames are used again.
    #[test]
    fn no_two_runs_have_a_frame_in_common() {
        let mut lane = Lane::new(&Config::default());
        let mut seed = 5_u64;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as u32 % below
        };
        for (base, count, most) in [(0, 4096, 200), (77, 4096, 4096), (9, 1024, 900), (0, 256, 256)]
        {
            (lane.frame_base, lane.frame_count) = (base, count);
            (lane.frame_next, lane.frames_used) = (0, 0);
            lane.runs.clear();
            let (limit, mut highest) = (256.min(count / 2), 0);
            for step in 0..100_000 {
                let wanted = if random(3) == 0 { 1 + random(limit) } else { 1 };
                let at_once = lane.frames_used + wanted <= most && !lane.runs.is_full();
                let taken = if at_once { lane.take_frames(limit) } else { None };
                let Some((frame, frames)) = taken else {
                    // So few are left in the end that the longest fits.
                    assert!(!at_once || lane.frames_used > 0);
                    if let Some(run) = lane.runs.front().copied() {
                        lane.runs.pop();
                        lane.frames_used -= run.frames;
                    }
                    continue;
                };
                lane.frame_next -= limit - wanted;
                lane.frames_used -= limit - wanted;
                assert!(base <= frame && frame + wanted <= base + count);
                let (front, behind) = (lane.runs.front, lane.runs.behind);
                for number in front..behind {
                    let Run { frame: other, stretch, .. } = *lane.runs.at(number);
                    let end = other + stretch.blocks as u32;
                    assert!(frame + wanted <= other || end <= frame, "step {step}");
                }
                if step > 1000 {
                    highest = highest.max(frame + wanted - base);
                }
                let stretch =
                    Stretch { kind: Kind::Data, lba: Lba(0), blocks: u64::from(wanted), item: 0 };
                let (state, remaining, refused) = (RunState::Reading, 0, false);
                let frames = frames - (limit - wanted);
                lane.runs.push(Run { stretch, frame, frames, state, remaining, refused });
            }
            if most == 200 {
                assert!(highest < 1024, "{highest} of {count} frames were used for {most} at once");
            }
        }
    }
}
