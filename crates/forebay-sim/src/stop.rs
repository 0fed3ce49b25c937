// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The machine stops: what becomes of what was under way.

use crate::checkers::lost_stays_lost::Lost;
use crate::device::Piece;
use crate::fate::Fate;
use crate::flight::Flight;
use crate::model::Stop;
use crate::random::{Random, mix};
use crate::volume::Volume;
use crate::world::World;
use forebay_core::effect::Effect;
use forebay_core::policy::bypass::Reason;
use forebay_core::stats::Refusal;
use forebay_core::units::{BLOCK_BYTES, Lba, Sequence, VolumeIndex};

impl World {
    /// The machine stops here and now; what is in flight may have happened.
    pub fn stop(&mut self, stop: Stop) {
        self.stop_by(stop, &mut Fate::Chance);
    }

    /// The same, and who decides what is left.
    pub fn stop_by(&mut self, stop: Stop, fate: &mut Fate) {
        self.tell(|| format!("stop {stop:?}"));
        // Nothing that is wrong with it now goes on.
        let _ = self.take_placed();
        self.count();
        // Who writes the superblock for the engine does not write it for anybody else meanwhile.
        let names = |flight: &Flight| matches!(flight.effect, Effect::WriteSuperblock { .. });
        let is_naming = self.flights.values().any(names);
        let flushes = self.flights.values().filter(|flight| flight.flushes_cache());
        let flushed = flushes.map(|flight| flight.through).max();
        self.cache_unsure = self.cache_failed || flushed.is_some();
        self.ended.clear();
        if let Some(engine) = &self.engine {
            self.ended = vec![Sequence(0); self.volumes.len()];
            for (volume, end) in engine.log_ends() {
                self.ended[usize::from(volume.0)] = end.through;
            }
        }
        let mut orders: Vec<u64> = self.flights.keys().copied().collect();
        orders.sort_unstable();
        let mut cache = Vec::new();
        let mut backing: Vec<Vec<Vec<Piece>>> = vec![Vec::new(); self.volumes.len()];
        for order in orders {
            let flight = self.flights.remove(&order).expect("listed");
            let pieces = flight.pieces.clone().or_else(|| self.pieces(&flight.effect));
            match flight.effect {
                _ if self.cache_gone && flight.is_of_cache() => {}
                Effect::WriteCache { .. } | Effect::WriteArea { .. } => cache.extend(pieces),
                Effect::WriteSuperblock { change, .. } => {
                    let steps = match fate {
                        Fate::Chance => self.random.below(5),
                        Fate::Chosen(choices) => choices.below(5),
                    };
                    self.change_superblock(change, steps, flight.through);
                }
                Effect::WriteAround { volume, tag, .. }
                    if self.zeroes(tag) && self.happened(fate) =>
                {
                    self.zero_around(usize::from(volume.0), tag);
                }
                Effect::WriteBacking { volume, .. } | Effect::WriteAround { volume, .. } => {
                    backing[usize::from(volume.0)].extend(pieces);
                }
                Effect::ZeroBacking { volume, lba, blocks, .. } if self.happened(fate) => {
                    self.zero_backing(usize::from(volume.0), lba, blocks);
                }
                Effect::MarkStale { volume, .. } if self.happened(fate) => {
                    let _ = self.mark_stale(usize::from(volume.0));
                }
                Effect::DiscardBacking { .. } if self.happened(fate) => {
                    let _ = self.happen(&flight);
                }
                _ => {}
            }
        }
        if !is_naming {
            let mut random = Random::new(mix(self.order ^ self.trace ^ 0x6121));
            if !self.stop_growing(&mut random) {
                self.stop_resizing(&mut random);
            }
        }
        (self.marked, self.healing, self.ahead) = (None, None, None);
        self.events.clear();
        // The next process is heard.
        self.is_ending = false;
        self.keep_unanswered();
        self.note_lost();
        self.engine = None;
        (self.cache_failed, self.cache_fails_next) = (false, false);
        self.cache_gone = false;
        self.volumes.iter_mut().for_each(|volume| volume.passing_since = None);
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0x4EAD));
        if !self.setup.steady && random.one_in(2) && self.cache.read_again() {
            // A cable, a controller: it was not the medium.
            self.marks.hit("unreadable blocks can be read again");
        }
        match stop {
            Stop::Process => {
                let mut chance = self.chance(0xDEAD);
                let fails = self.setup.flush_fault > 0 && chance.one_in(2);
                if let Some(through) = flushed
                    && (fails || self.flush_fails_next.is_some())
                {
                    self.marks.hit("flush failed that nobody heard of");
                    self.drop_unflushed(through);
                }
                self.cache.process_killed(cache, fate, &mut self.random);
                for (volume, writes) in self.volumes.iter_mut().zip(backing) {
                    volume.device.process_killed(writes, fate, &mut self.random);
                }
                self.evict_dropped(0xE01);
            }
            Stop::Power => {
                let first = self.superblock.first_segment / BLOCK_BYTES;
                // Of segments alone: a copy of the superblock that shows later is taken away by the opening after that.
                let count = u64::from(self.superblock.segment_count);
                let behind = first + count * u64::from(self.superblock.segment_bytes) / BLOCK_BYTES;
                let mut unsure = self.cache.unflushed_blocks(first);
                unsure.retain(|block| *block < behind);
                self.cache.power_cut(cache, fate, &mut self.random);
                if !self.setup.steady && !unsure.is_empty() && self.random.one_in(3) {
                    // It may be there, but it does not show before the next opening is over.
                    self.marks.hit("block comes back after opening");
                    let block = *self.random.pick(&unsure);
                    self.tell(|| format!("segment block {} shows later", block - first));
                    self.cache.make_shy(Some(block));
                }
                for (volume, writes) in self.volumes.iter_mut().zip(backing) {
                    volume.device.power_cut(writes, fate, &mut self.random);
                }
            }
        }
    }

    /// What is lost now stays so.
    fn note_lost(&mut self) {
        let heeds = self.setup.watched && !self.cache_failed;
        let Some(engine) = self.engine.as_ref().filter(|_| heeds) else { return };
        let of = |(index, volume): (usize, &Volume)| {
            let attach_generation = self.superblock.volumes[index].as_ref()?.attach_generation;
            let among = (0..volume.cells()).map(|cell| Lba(volume.lba(cell)));
            Some(Lost::of(engine, (VolumeIndex(index as u8), attach_generation), among))
        };
        self.lost = self.volumes.iter().enumerate().filter_map(of).collect();
    }

    /// What the engine counted becomes marks.
    pub(crate) fn count(&mut self) {
        for volume in &mut self.volumes {
            if let Some(prefix) = &mut volume.prefix {
                let (overwritten, written) = prefix.take_parked_counts();
                self.marks.add("parked block overwritten", overwritten);
                self.marks.add("parked block written", written);
            }
        }
        let devices = self.volumes.iter_mut().map(|volume| &mut volume.device);
        for device in devices.chain([&mut self.cache]) {
            self.marks.merge(&std::mem::take(&mut device.marks));
        }
        let Some(engine) = &self.engine else { return };
        for index in 0..self.volumes.len() {
            let Some(status) = engine.status(VolumeIndex(index as u8)) else { continue };
            let (stats, had) = (status.stats, status.sharing.had);
            let (reads, late) = status.sharing.target.map_or((0, 0), |it| (it.reads, it.late));
            let counts = [
                ("around the log", stats.bypassed_writes),
                ("around the log: sequential", stats.bypassed[Reason::Sequential as usize]),
                ("around the log: too large", stats.bypassed[Reason::TooLarge as usize]),
                ("around the log: full", stats.bypassed[Reason::Full as usize]),
                ("around the log: cache failed", stats.bypassed[Reason::CacheFailed as usize]),
                ("around the log: mode", stats.bypassed[Reason::Mode as usize]),
                ("block lost", stats.lost_blocks),
                ("block placed", stats.written_blocks),
                ("block repaired", stats.repaired_blocks),
                ("block written back", stats.backing_blocks_written),
                ("fill placed", stats.fill_blocks),
                ("fill read", stats.fill_hit_blocks),
                ("fill refused: sequential", stats.fills_refused[Refusal::Sequential as usize]),
                ("fill refused: first touch", stats.fills_refused[Refusal::FirstTouch as usize]),
                ("fill refused: no room", stats.fills_refused[Refusal::NoRoom as usize]),
                ("fill refused: raced", stats.fills_refused[Refusal::Raced as usize]),
                ("foreground waited its turn", stats.turn_waits),
                (
                    "a slow disk shared by volumes",
                    u64::from(status.sharing.volumes > 1 && had[0] > 0),
                ),
                ("guests had a slow device while write-back waited", u64::from(had[0] > 0)),
                ("write-back had a slow device while guests waited", u64::from(had[1] > 0)),
                ("read in time for a target", reads - late),
                ("read too late for a target", late),
                ("write delayed", stats.delayed_writes),
                ("miss shared", stats.shared_blocks),
                ("read across a hole", stats.across_blocks),
                ("read ahead", stats.ahead_blocks),
                ("read ahead: used", stats.ahead_used_blocks),
                ("read ahead: void", stats.ahead_void_blocks),
                ("read ahead: unused", stats.ahead_unused_blocks),
                ("read ahead: failed", stats.ahead_faults),
                ("second chance", stats.second_chances),
                ("segment reclaimed", stats.reclaimed_segments),
                ("zero block", stats.zeroed_blocks),
            ];
            for (name, times) in counts {
                self.marks.add(name, times);
            }
        }
    }

    fn happened(&mut self, fate: &mut Fate) -> bool {
        match fate {
            Fate::Chance => self.random.one_in(2),
            Fate::Chosen(choices) => choices.below(2) == 1,
        }
    }

    /// Tells the models what became of the machine: how it stopped, and whether the power failed
    /// while it was started again, when what went around the log was still not flushed.
    pub fn models_stopped(&mut self, stop: Stop, power_failed: bool) {
        let now = self.moment();
        for volume in &mut self.volumes {
            volume.flush_failed = false;
            // Only a clean stop tells the next process that nothing waits for a flush.
            volume.around_used = true;
            if volume.forgotten {
                // No flush that was answered since covers it.
                volume.unflushed_dropped();
            }
            if self.cache_dropped {
                // Whatever no flush has covered may be gone.
                volume.model.unflushed_dropped();
            }
            let around = power_failed && volume.model.around;
            volume.model.stopped(if around { Stop::Power } else { stop }, now);
        }
        self.cache_dropped = false;
        self.moment();
    }
}
