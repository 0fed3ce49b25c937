// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume as the engine holds it: its log, its extents, who waits for what.

use crate::engine::Config;
use crate::format::entry::Kind;
use crate::format::superblock::{self, Mode, Order};
use crate::limits::REQUEST_COUNT_MAX;
use crate::log::chain::{InFlight, Log, RECORDS_IN_FLIGHT_MAX};
use crate::log::recovery::RecoveredVolume;
use crate::log::times::Times;
use crate::map::extent::{Extent, ExtentMap, Position, lost_room};
use crate::memory::{queue_bytes, vec_bytes};
use crate::mutant::Mutant;
use crate::op::around::AroundState;
use crate::op::grow::Growing;
use crate::op::stale::Stale;
use crate::policy::delay::Delay;
use crate::policy::parked::Parked;
use crate::policy::reserve::{RESERVED_MIN, Reserve};
use crate::policy::slices::Slices;
use crate::policy::target::Target;
use crate::policy::writeback::{Exposed, Writeback};
use crate::stats::Stats;
use crate::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, Ordinal, Sequence, Tick, VolumeIndex};
use crate::why::{MISSED_MAX, Missed};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Ranges of one volume that may be locked at once.
pub(crate) const LOCK_COUNT_MAX: usize = 256;

/// A range that one request has for itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lock {
    pub(crate) owner: u32,
    pub(crate) start: Lba,
    pub(crate) end: Lba,
}

/// An extent that no batch has taken yet, in log order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingExtent {
    pub(crate) sequence: Sequence,
    pub(crate) position: Position,
    pub(crate) kind: Kind,
    pub(crate) lba: Lba,
    pub(crate) count: u32,
}

impl PendingExtent {
    /// As a map holds it.
    pub(crate) fn extent(&self) -> Extent {
        let Self { position, kind, lba, count, .. } = *self;
        Extent { start: lba, end: lba + u64::from(count), position, kind, long: false }
    }
}

/// Someone who waits for a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiter {
    pub(crate) sequence: Sequence,
    pub(crate) request: u32,
}

/// A volume.
#[derive(Debug)]
pub struct Volume {
    pub(crate) index: VolumeIndex,
    pub(crate) attach_generation: u32,
    pub(crate) size_bytes: u64,
    /// Its backing device has more bytes than it.
    pub(crate) growing: Option<Growing>,
    pub(crate) mode: Mode,
    pub(crate) order: Order,
    /// Blocks of a run of writes that may go around the log; 0: none does.
    pub(crate) cutoff: u32,
    /// What it is to have of the cache, and what that comes to, in segments.
    pub(crate) reserve: Reserve,
    pub(crate) reserved: u32,
    /// Segments that it gave up for its own sake.
    pub(crate) given_to_itself: u64,
    /// Segments that it took of what is kept for notes.
    pub(crate) from_kept: u64,
    /// The last dirty block that was bad when a guest's request read it (R6 of `op::read::bad`).
    pub(crate) bad_read: Option<Lba>,
    /// Kept clean, as write-through, until write-back is asked for again.
    pub(crate) drained: bool,
    /// Its backing device is there and requests are taken.
    pub(crate) serving: bool,
    /// Dirty blocks nobody can name are lost.
    pub(crate) frozen: bool,
    pub(crate) log: Log,
    pub(crate) extents: ExtentMap,
    /// Up to here blocks are lost that no entry names yet (`log::lost`, L1).
    pub(crate) unnamed_lost: Option<crate::units::Ordinal>,
    pub(crate) pending_extents: VecDeque<PendingExtent>,
    /// Extents whose batch is done, but not the watermark that says so: a crash now would bring them
    /// back, to those that are pending by then.
    pub(crate) noting_extents: usize,
    /// Requests that change something and are not placed yet, in order.
    pub(crate) writes: VecDeque<u32>,
    pub(crate) locks: Vec<Lock>,
    pub(crate) durable_waiters: VecDeque<Waiter>,
    pub(crate) written_waiters: VecDeque<Waiter>,
    pub(crate) through_waiters: VecDeque<Waiter>,
    /// A request found no room in the log.
    pub(crate) starved: bool,
    /// It found none because the volume may not have another segment now.
    pub(crate) refused: bool,
    /// What its last batch found lost could not be named: there was no segment for that at all.
    pub(crate) lacks: bool,
    /// Of the extents there was no room for one more: reclaiming segments ends some.
    pub(crate) extents_full: bool,
    /// As of this change of the extents the tail cannot be emptied: what is lost in it finds no room (C5 of `log::reclaim`).
    pub(crate) tail_held: Option<u64>,
    /// Up to here the log may hold clean blocks that the map has forgotten, and that a crash may bring back; 0: none.
    pub(crate) forgot: Ordinal,
    pub(crate) around: AroundState,
    /// What became of the last blocks that reads missed, for whoever asks why.
    pub(crate) missed: VecDeque<Missed>,
    pub(crate) stale: Stale,
    pub(crate) writeback: Writeback,
    pub(crate) parked: Parked,
    /// The newest record whose header a scrub found bad; what is to be written back for it.
    pub(crate) bad_header: Sequence,
    pub(crate) unsafe_through: Sequence,
    /// Whose `slices` are those of the disk that it is on (`policy::disk`).
    pub(crate) disk: VolumeIndex,
    /// A flush of its backing device is one of all that is on that disk (`policy::flushes`).
    pub(crate) flushes_disk: bool,
    /// It had its backing device: it is known on which disk that is.
    pub(crate) given: bool,
    pub(crate) slices: Slices,
    pub(crate) weight: u8,
    pub(crate) target: Option<Target>,
    pub(crate) delay: Delay,
    /// Second chances under way.
    pub(crate) chances: u32,
    /// Ordinal of the segment whose second chances were given last.
    pub(crate) chanced: crate::units::Ordinal,
    pub(crate) stats: Stats,
}

impl Volume {
    pub(crate) fn new(
        index: VolumeIndex,
        recorded: &superblock::Volume,
        found: RecoveredVolume,
        config: &Config,
        segment_blocks: u16,
        now: Tick,
    ) -> Volume {
        let mut found = found;
        // A guest may have flushed and written nothing since.
        found.log.flush_epoch += 1;
        // What was found is older than this opening.
        found.log.times = Times::new(found.log.placed);
        Volume {
            index,
            attach_generation: recorded.attach_generation,
            size_bytes: recorded.size_bytes,
            growing: None,
            mode: recorded.mode,
            order: recorded.order,
            cutoff: recorded.cutoff,
            reserve: recorded.reserve,
            reserved: RESERVED_MIN,
            given_to_itself: 0,
            from_kept: 0,
            bad_read: None,
            drained: recorded.drained,
            serving: false,
            frozen: found.frozen,
            log: found.log,
            extents: found.extents,
            unnamed_lost: found.unnamed_lost,
            pending_extents: found.pending_extents,
            noting_extents: 0,
            writes: VecDeque::with_capacity(REQUEST_COUNT_MAX),
            locks: Vec::with_capacity(LOCK_COUNT_MAX),
            durable_waiters: VecDeque::with_capacity(REQUEST_COUNT_MAX),
            written_waiters: VecDeque::with_capacity(REQUEST_COUNT_MAX),
            through_waiters: VecDeque::with_capacity(REQUEST_COUNT_MAX),
            starved: false,
            refused: false,
            lacks: false,
            extents_full: false,
            tail_held: None,
            forgot: found.forgot,
            around: AroundState::new(!found.clean, recorded.flush_failed),
            missed: VecDeque::with_capacity(MISSED_MAX),
            stale: Stale::No,
            writeback: Writeback::new(found.cursor, now),
            parked: Parked::new(segment_blocks),
            bad_header: Sequence(0),
            unsafe_through: Sequence(0),
            disk: index,
            flushes_disk: false,
            given: false,
            slices: Slices::new(index, now),
            weight: recorded.weight,
            target: None,
            delay: Delay::default(),
            chances: 0,
            chanced: crate::units::Ordinal(0),
            stats: Stats { repaired_blocks: 0, lost_blocks: found.lost_blocks, ..Stats::default() },
        }
        .with_room(config, now)
        .with_shares(recorded)
    }

    /// Whether a scrub found the header of the last record bad.
    pub(crate) fn ends_with_bad_header(&self) -> bool {
        self.bad_header > Sequence(0) && self.log.last.sequence <= self.bad_header
    }

    fn with_room(mut self, config: &Config, now: Tick) -> Volume {
        if self.log.is_dirty() {
            // The first batch takes all it can hold, and so covers it; with strict it may end earlier, and with less memory than
            // there was before.
            let less = config.batch_blocks_max < config.batch_blocks_most
                && !config.mutants.is(Mutant::LessMemoryUntold);
            let first = self.order == Order::Batch && !less;
            let through = if first { Sequence(0) } else { self.log.placed };
            self.writeback.exposed = Some(Exposed::all(self.blocks(), now, through));
        }
        let room = config.extent_count_max as usize;
        self.extents = self.extents.refit(room);
        // Recovery may have taken more.
        self.pending_extents.shrink_to(room);
        self.pending_extents.reserve_exact(room.saturating_sub(self.pending_extents.len()));
        self
    }

    fn with_shares(mut self, recorded: &superblock::Volume) -> Volume {
        let nanos = u64::from(recorded.p99_target) * 1_000;
        let slice = self.slices.slice_nanos();
        self.target = (nanos > 0).then(|| Target::new(nanos, slice));
        let slice = self.target.map(|target| target.slice);
        self.slices.set_shares(self.weight, slice);
        self
    }

    pub(crate) fn memory_bytes(config: &Config) -> u64 {
        let extents = config.extent_count_max as usize;
        ExtentMap::memory_bytes(extents + lost_room(extents))
            + (extents * size_of::<PendingExtent>()) as u64
            + (REQUEST_COUNT_MAX * (3 * size_of::<Waiter>() + size_of::<u32>())) as u64
            + AroundState::memory_bytes()
            + (MISSED_MAX * size_of::<Missed>()) as u64
            + (LOCK_COUNT_MAX * size_of::<Lock>()) as u64
            + Slices::memory_bytes()
            + (RECORDS_IN_FLIGHT_MAX * size_of::<InFlight>()) as u64
            + Times::memory_bytes()
            + Parked::memory_bytes()
            + (size_of::<Volume>() + BLOCK_SIZE) as u64
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        let waiters = [&self.durable_waiters, &self.written_waiters, &self.through_waiters];
        self.extents.held_bytes()
            + self.slices.held_bytes()
            + queue_bytes(&self.pending_extents)
            + waiters.into_iter().map(queue_bytes).sum::<u64>()
            + queue_bytes(&self.writes)
            + self.around.held_bytes()
            + queue_bytes(&self.missed)
            + vec_bytes(&self.locks)
            + queue_bytes(&self.log.in_flight)
            + self.log.times.held_bytes()
            + self.parked.held_bytes()
            + (size_of::<Volume>() + self.log.header.len()) as u64
    }

    /// Whether its writes are answered only when they are on the backing device.
    pub(crate) fn is_through(&self) -> bool {
        self.drained || self.mode != Mode::WriteBack
    }

    /// Whether somebody waits until something of it is on the backing device.
    pub(crate) fn is_waited_for(&self) -> bool {
        !self.through_waiters.is_empty()
            || self.drained && self.log.is_dirty()
            || self.settles_to_grow()
            || self.log.going > 0
    }

    /// Blocks, a last one that is not whole included.
    pub(crate) fn blocks(&self) -> u64 {
        self.size_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Whether the log may hold clean blocks that the map has forgotten: up to the next durable record whose tail is behind them.
    pub(crate) fn has_forgotten(&self) -> bool {
        self.forgot > Ordinal(0) && self.forgot >= self.log.durable.tail
    }

    /// Whether blocks of it are lost, named or not.
    pub(crate) fn has_lost(&self) -> bool {
        self.extents.lost_len() > 0 || self.unnamed_lost.is_some()
    }

    /// What other requests have of `start..end` for themselves.
    pub(crate) fn locks_of_others(
        &self,
        start: Lba,
        end: Lba,
        owner: u32,
    ) -> impl Iterator<Item = &Lock> {
        let is_in = move |lock: &&Lock| lock.owner != owner && lock.start < end && start < lock.end;
        self.locks.iter().filter(is_in)
    }

    /// Whether another request has any of `start..end` for itself.
    pub(crate) fn is_locked(&self, start: Lba, end: Lba, owner: u32) -> bool {
        self.locks_of_others(start, end, owner).next().is_some()
    }

    pub(crate) fn has_lock(&self, owner: u32) -> bool {
        self.locks.iter().any(|lock| lock.owner == owner)
    }

    pub(crate) fn unlock(&mut self, owner: u32) {
        self.locks.retain(|lock| lock.owner != owner);
    }
}
