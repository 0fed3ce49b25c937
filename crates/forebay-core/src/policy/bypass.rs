// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bypass: which writes go around the log, to the backing device. Here and nowhere else it is decided;
//! `op/around` does it.
//!
//! # Invariants
//!
//! - **Y1** With `order` batch or strict a write goes around only while nothing of its volume is dirty, and a
//!   crash would not find anything dirty: what is on the backing device is then older than this write.
//! - **Y2** With relaxed it may pass what is dirty. Which versions of its blocks the log holds says how
//!   ([`How`]); where some are dirty and others clean it does not.
//! - **Y3** What is lost is written through the log alone: nothing may come back for it, not of the other sectors
//!   of a block, and not if this write fails or a crash comes before it.
//! - **Y4** What covers a block in part does not pass a dirty version of it: the rest of that is needed.
//! - **Y5** Nor does anything pass a dirty version that is not durable: a power cut may undo that one and the entry, and
//!   bring back a clean version below it, which the backing device does not have any more. Who waits for room in the log
//!   has it made durable, and passes it then.
//! - **Y6** An entry that voids what is older counts before it is durable: it lies over dirty versions that are
//!   durable (Y5), and those a power cut may bring back, since they are written back again. Over clean ones nobody else
//!   writes until it is durable (A2 of `around`, G2 of `grow`). Not before the process's own death leaves it, and not
//!   on a failed cache device.

use crate::engine::{Acknowledge, Active, CacheHealth, Engine};
use crate::format::entry::Kind;
use crate::format::superblock::{Mode, Order};
use crate::map::extent::Position;
use crate::mutant::Mutant;
use crate::op::around::Around;
use crate::policy::writeback::{Pace, Stage};
use crate::request::Op;
use crate::units::{BLOCK_BYTES, Lba, VolumeIndex};
use crate::volume::Volume;

/// A run of fewer requests than this may be one by chance: writes to random places of a range of a few hundred times their
/// length often go on where one of the last ones ended ...
const CHANCE_REQUESTS: u64 = 16;
/// ... but hardly where one of so few did.
const CHANCE_AGO: u32 = 2;

/// This part of the cutoff, and so many requests, say that a run is one, where writers are held to what write-back
/// takes.
const RUN_TELLS: u64 = 8;
const RUN_REQUESTS: u64 = 32;

/// Before a batch has shown what write-back takes for a block, a device is thought to take so many, or a run of so many, sooner.
const LARGE_BLOCKS: u64 = 16;

/// Whether a run may be one by chance, that a request of `blocks` blocks ends, so many requests after the one before it.
pub(crate) fn is_chance(run: u64, ago: u32, blocks: u64) -> bool {
    ago > CHANCE_AGO && run < CHANCE_REQUESTS * blocks
}

/// Why a write goes around the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The run of writes that it ends is as long as the volume's cutoff.
    Sequential,
    /// It is as long as the cutoff by itself.
    TooLarge,
    /// The cache is full of dirty data, and the backing device takes it sooner than write-back makes room.
    Full,
    /// The cache device failed, and holds no version of it, or none that counts (`op/stale`).
    CacheFailed,
    /// The volume is write-around.
    Mode,
}

impl Reason {
    /// All of them, with the names by which they are counted.
    pub const ALL: [(Reason, &'static str); 5] = [
        (Reason::Sequential, "sequential"),
        (Reason::TooLarge, "too_large"),
        (Reason::Full, "full"),
        (Reason::CacheFailed, "cache_failed"),
        (Reason::Mode, "mode"),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Reason::ALL[self as usize].1
    }
}

/// In which order a write around the log and the entry that voids older versions become durable (the rules
/// are those of `op/around`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// The log holds no version: no entry.
    Alone,
    /// It holds clean ones: the entry is durable first.
    EntryFirst,
    /// It holds dirty ones: the backing device has the write for good first.
    EntryLast,
}

/// Why a write that has a reason to goes through the log all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Through {
    /// What it would pass may be undone by a power cut: until it is durable (Y5).
    Undurable,
    /// The batch under way holds some of its blocks, and cannot let them go now (A6 of `around`).
    Taken,
    /// A batch waits for those before it (A6).
    Held,
    /// Something else.
    Other,
}

/// What the log holds of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// None that the maps know.
    None,
    /// None that counts: an entry voids all.
    Void,
    Clean,
    /// And whether a power cut finds it.
    Dirty {
        durable: bool,
    },
    Lost,
}

impl Engine {
    /// Whether a write goes around the log, why and how.
    pub(crate) fn bypass(&self, volume: VolumeIndex, at: u32) -> Option<(Reason, How)> {
        let active = self.requests.get(at).expect("the request is in the engine");
        let state = self.volume_ref(volume).expect("it exists");
        if !self.may_lock(state) {
            return None;
        }
        if state.is_passing() {
            return Some((Reason::CacheFailed, How::Alone)); // X3 of `op/stale`
        }
        if !matches!(active.request.op, Op::Write { .. }) {
            return None;
        }
        let reason = self.bypass_reason(state, active)?;
        let ignored = self.config.mutants.is(Mutant::OrderIgnored);
        if state.order != Order::Relaxed && !state.is_settled() && !ignored {
            return None; // Y1
        }
        let how = self.bypass_how(state, active).ok()?;
        let failed = self.health == CacheHealth::Failed;
        (how == How::Alone || !failed).then_some((reason, how))
    }

    /// Whether a write that has a reason to go around the log waits for one of those that do, of which there are as many as may be.
    /// While much is dirty the log would take it no sooner, and have it written back.
    pub(crate) fn bypass_waits(&self, volume: VolumeIndex, at: u32) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        !self.may_lock(state) && self.bypass_presses(state, at)
    }

    /// Whether a write would go around the log but for the batch under way. It is not delayed: the device would take it now, and
    /// if it waited, write-back had the device.
    pub(crate) fn bypass_taken(&self, volume: VolumeIndex, at: u32) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        let how = |active| self.bypass_how(state, active);
        self.bypass_presses(state, at)
            && self.requests.get(at).map(how) == Some(Err(Through::Taken))
    }

    /// Whether a write has a reason to go around the log while others pay for room there, with relaxed.
    fn bypass_presses(&self, state: &Volume, at: u32) -> bool {
        let active = self.requests.get(at).expect("the request is in the engine");
        state.order == Order::Relaxed
            && state.delay.is_felt()
            && matches!(active.request.op, Op::Write { .. })
            && self.bypass_reason(state, active).is_some()
    }

    /// Whether and how a write that waits for room in the log goes around it: with relaxed, if the device would take
    /// it while it waits. `lacks_room`: it waits for a batch, not only for its turn.
    pub(crate) fn bypass_full(
        &mut self,
        volume: VolumeIndex,
        at: u32,
        lacks_room: bool,
    ) -> Option<How> {
        let active = self.requests.get(at).expect("the request is in the engine");
        let state = self.volume_ref(volume).expect("it exists");
        let write = matches!(active.request.op, Op::Write { .. });
        let fresh = active.around == Around::No && self.may_lock(state);
        if state.order != Order::Relaxed || !write || !fresh || self.health == CacheHealth::Failed {
            return None;
        }
        let sooner = match state.writeback.pace {
            // What runs of a sorted batch take, several times, or what the device took for one in the foreground. Not what the
            // log costs at this moment: where writes go around write-back has next to no time (S6), and it would cost that for ever.
            Some(Pace { run, space, .. }) => {
                let direct = (4 * run).max(self.slices_of(state).cost());
                active.blocks.saturating_mul(space) > direct
            }
            // Nobody knows when there will be room: the first batch is as long as can be. Scattered small blocks it sorts.
            None => lacks_room && self.run_seen(state, active) >= LARGE_BLOCKS,
        };
        if !sooner {
            return None;
        }
        let how = self.bypass_how(state, active);
        let state = self.volume(volume);
        if how == Err(Through::Undurable) {
            state.log.want(state.log.placed); // Y5
            state.around.awaits = true;
        }
        // What is held is let go when those have ended.
        state.around.awaits |= how == Err(Through::Held) && state.around.over_dirty > 0;
        how.ok()
    }

    /// The run that the next write is of, as far as it has come in: those behind it in the queue may go on where it ends.
    fn run_seen(&self, state: &Volume, next: &Active) -> u64 {
        let behind = state.writes.iter().take(LARGE_BLOCKS as usize);
        let is_of = |active: &&Active| {
            let end = active.first + active.blocks;
            next.first < end && end.0.saturating_sub(active.run) <= next.first.0
        };
        let runs = behind.filter_map(|at| self.requests.get(*at)).filter(is_of);
        runs.map(|active| active.run).max().unwrap_or(0).max(next.blocks)
    }

    fn bypass_reason(&self, state: &Volume, active: &Active) -> Option<Reason> {
        let cutoff = u64::from(state.cutoff);
        if self.health == CacheHealth::Failed {
            Some(Reason::CacheFailed)
        } else if state.mode == Mode::WriteAround {
            Some(Reason::Mode)
        } else if cutoff > 0 && active.blocks >= cutoff {
            Some(Reason::TooLarge)
        } else if cutoff > 0
            && active.run >= run_wanted(state, active)
            && !self.is_slower_around(state, active)
        {
            Some(Reason::Sequential)
        } else {
            None
        }
    }

    /// Whether a run, if it is one by chance, is let go through the log: where writers are held to what write-back takes, and
    /// the device took longer for what it was asked for lately.
    fn is_slower_around(&self, state: &Volume, active: &Active) -> bool {
        let Some(pace) = state.writeback.pace else { return false };
        let through = active.blocks.saturating_mul(pace.space);
        active.chance && state.delay.is_felt() && self.slices_of(state).cost() > through
    }

    fn bypass_how(&self, state: &Volume, active: &Active) -> Result<How, Through> {
        let end = active.first + active.blocks;
        let (mut clean, mut dirty, mut none, mut unsure) = (false, false, false, false);
        for block in 0..active.blocks {
            match self.version(state, active.first + block) {
                Version::None => none = true,
                // A header behind which something clean may be that nothing names may be read again (`forgot`).
                Version::Void => clean |= state.has_forgotten(),
                Version::Clean => clean = true,
                Version::Dirty { durable } => {
                    dirty = true;
                    unsure |= !durable && !self.config.mutants.is(Mutant::PassesUndurable);
                }
                Version::Lost => return Err(Through::Other), // Y3
            }
        }
        let log = &state.log;
        // What the maps forgot and the log still holds would come back after a crash: up to the next durable
        // record that names a higher tail, or watermark.
        let noting = log.watermark > log.durable.watermark && state.noting_extents > 0;
        clean |= none && (state.has_forgotten() || log.tail > log.durable.tail || noting);
        match (clean, dirty) {
            (false, false) => Ok(How::Alone),
            (true, false) => Ok(How::EntryFirst),
            _ if self.config.mutants.is(Mutant::DirtyEntryFirst) => Ok(How::EntryFirst),
            (true, true) => Err(Through::Other), // Y2
            (false, true) => {
                let bytes = active.request.offset | active.request.length;
                let whole = bytes.is_multiple_of(BLOCK_BYTES); // Y4
                let lane = state.writeback.lane.map(|lane| &self.lanes[lane]);
                // Once a batch has shown what it takes its end is near enough, and a flush for each write costs more.
                let first = state.writeback.pace.is_none();
                let writes = first && state.writeback.stage == Stage::Writing;
                let taken = lane.is_some_and(|lane| {
                    lane.batch.overlaps(active.first, end)
                        && !(writes && lane.may_pass(active.first, end))
                });
                match whole {
                    false => Err(Through::Other),
                    // No flush of the device is answered well any more: it would be written twice (A8 of `around`).
                    true if state.around.lost => Err(Through::Other),
                    true if state.around.held => Err(Through::Held),
                    true if taken => Err(Through::Taken),
                    true if unsure => Err(Through::Undurable),
                    true => Ok(How::EntryLast),
                }
            }
        }
    }

    /// The newest version of a block that the log holds.
    pub(crate) fn version(&self, state: &Volume, lba: Lba) -> Version {
        let clean_to = self.clean_to(state);
        let dirty = |position| Version::Dirty { durable: position <= state.log.durable.position };
        if let Some(slot) = self.newest_slot(state, lba) {
            let (id, block) = self.segments.place(slot);
            let fill = self.slots.held(slot).is_some_and(|held| held.fill);
            let position = self.segments.position(id, block);
            return if fill || position <= clean_to { Version::Clean } else { dirty(position) };
        }
        let Some(extent) = state.extents.get(lba) else { return Version::None };
        match extent.kind {
            Kind::Lost => Version::Lost,
            Kind::Bypassed if self.is_void(state, extent.position) => Version::Void,
            _ if extent.position <= clean_to => Version::Clean,
            _ => dirty(extent.position),
        }
    }

    /// Whether an entry of a write around the log counts (Y6).
    fn is_void(&self, state: &Volume, entry: Position) -> bool {
        let log = &state.log;
        // What dies with the process, or never comes to a failed device, takes the entry with it.
        let kept = match self.config.acknowledge {
            Acknowledge::Written => entry <= log.written.position,
            Acknowledge::Placed | Acknowledge::Durable => true,
        };
        let early = self.config.mutants.is(Mutant::VoidsTooEarly);
        entry <= log.durable.position || kept && self.health == CacheHealth::Healthy || early
    }

    /// What lies at or below it in the volume's log is on the backing device.
    pub(crate) fn clean_to(&self, state: &Volume) -> Position {
        let cursor = state.writeback.cursor;
        let id = cursor.segment.or(state.log.tail_segment);
        id.map_or(Position::default(), |id| self.segments.position(id, cursor.block))
    }
}

/// So many blocks of a run go through the log before it goes around. Where writers pay for each, a part of them say
/// that it is one: if these are many requests.
fn run_wanted(state: &Volume, active: &Active) -> u64 {
    let cutoff = u64::from(state.cutoff);
    if state.order != Order::Relaxed || !state.delay.is_felt() {
        return cutoff;
    }
    cutoff.min((cutoff / RUN_TELLS).max(RUN_REQUESTS * active.blocks))
}

impl Volume {
    /// Whether nothing is dirty, and a crash would find nothing dirty.
    pub(crate) fn is_settled(&self) -> bool {
        !self.log.is_dirty() && self.log.durable.watermark >= self.log.dirtied
    }

    /// Whether it matters how long the run is that a write ends.
    pub(crate) fn follows_runs(&self) -> bool {
        self.cutoff > 0 && (self.order == Order::Relaxed || self.is_settled())
    }
}
