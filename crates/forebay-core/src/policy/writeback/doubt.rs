// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a batch could not read of the cache device: whether it is lost (K4).
//!
//! [`Doubt`] says how far that is. It begins when all else of the batch is on the backing device, flushed, and the watermark does not move
//! before it is over. What newer versions have replaced meanwhile is waited for as well: the backing device goes from one state of the guest's to the next.

use super::{What, Work};
use crate::effect::{Effect, Fault};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::mutant::Mutant;
use crate::payload::{Payload, Place};
use crate::policy::lane::Doubt;
use crate::policy::slices::Side;
use crate::units::{SegmentId, Slot, VolumeIndex};
use crate::volume::Volume;

impl Engine {
    /// Whether a batch has found what cannot be read, and does not know yet whether it is lost.
    pub(crate) fn is_in_doubt(&self, volume: &Volume) -> bool {
        let lane = volume.writeback.lane.map(|lane| &self.lanes[lane]);
        lane.is_some_and(|lane| lane.batch.has_lost() && lane.doubt != Doubt::Over)
    }

    /// Whether that is all that its batch waits for.
    pub(crate) fn is_finding(&self, volume: &Volume) -> bool {
        let doubt = volume.writeback.lane.map(|lane| self.lanes[lane].doubt);
        doubt.is_some_and(|doubt| !matches!(doubt, Doubt::No | Doubt::Over))
    }

    /// Whether it is still being found out what of the batch is lost. Nothing of the batch is under way.
    pub(super) fn is_finding_out(&mut self, volume: VolumeIndex, lane: usize) -> bool {
        let trusts = self.config.mutants.is(Mutant::GoneTakenForRot);
        let at_once = self.config.mutants.is(Mutant::UnreadTakenForRot);
        let state = &mut self.lanes[lane];
        if state.failed || state.doubt == Doubt::Over || !state.batch.has_lost() || trusts {
            return false;
        }
        if self.stopping || self.health == CacheHealth::Failed {
            // Who stops does not wait for it: the next opening begins anew.
            (state.failed, state.broken_off, state.doubt) = (true, true, Doubt::No);
            return false;
        }
        if state.doubt == Doubt::No {
            (state.doubt, state.doubts_since) = (Doubt::Asked, self.now);
            self.flush_to_ask(volume, lane);
            return true;
        }
        if matches!(state.doubt, Doubt::Asked | Doubt::Waits) {
            state.doubt = Doubt::Waits;
            if self.now < state.doubted.after(self.config.lost_after) && !at_once {
                return true;
            }
            state.doubt = Doubt::AskedAgain;
            self.ask_cache(volume, lane);
            return true;
        }
        if state.doubt == Doubt::AskedAgain {
            state.doubt = Doubt::Looks;
        }
        if self.lanes[lane].doubt == Doubt::Looks {
            if let Some(item) = self.lanes[lane].mends {
                return self.mend(volume, lane, item);
            }
            let state = &mut self.lanes[lane];
            let next = state.batch.lost_from(state.looked).filter(|_| !at_once);
            if let Some((item, slot)) = next {
                return self.look(volume, lane, (item, slot));
            }
            if core::mem::take(&mut state.mended) {
                self.flush_batch(volume, lane);
                return true;
            }
            if state.batch.lost_from(0).is_some() {
                self.lanes[lane].doubt = Doubt::AskedBehind;
                self.ask_cache(volume, lane);
                return true;
            }
        }
        // The backing device took no part in it.
        let state = &mut self.lanes[lane];
        state.doubt = Doubt::Over;
        let waited = self.now.since(state.doubts_since);
        let writeback = &mut self.volume(volume).writeback;
        writeback.begun = writeback.begun.after(waited);
        false
    }

    /// Whether a batch waits for its turn to write what could be read after all.
    pub(crate) fn mends(&self, volume: VolumeIndex) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        state.writeback.lane.is_some_and(|lane| self.lanes[lane].mends.is_some())
    }

    /// Asks the cache device whether it is there (K4): so long behind the first that it could not read, it reads something else, or has failed.
    fn ask_cache(&mut self, volume: VolumeIndex, lane: usize) {
        match self.config.mutants.is(Mutant::FlushTakenForLife) {
            true => self.flush_to_ask(volume, lane),
            false => self.touch_cache(volume, lane, 0),
        }
    }

    fn touch_cache(&mut self, volume: VolumeIndex, lane: usize, place: usize) {
        self.lanes[lane].under_way += 1;
        let (segment, block) = self.segments.used_places()[place];
        let what = What::TouchCache { place };
        let token = self.token(Pending::Writeback(Work { volume, what }));
        let to = Place::Nowhere;
        self.effects.push_back(Effect::ReadCache { token, segment, block, blocks: 1, to });
    }

    fn flush_to_ask(&mut self, volume: VolumeIndex, lane: usize) {
        self.lanes[lane].under_way += 1;
        let token = self.token(Pending::Writeback(Work { volume, what: What::AskCache }));
        self.effects.push_back(Effect::FlushCache { token });
    }

    /// The cache device has read one of those places, or not.
    pub(super) fn touched_cache(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        place: usize,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let next = place + 1;
        match result {
            Ok(()) => self.flush_to_ask(volume, lane),
            Err(Fault) if next < self.segments.used_places().len() => {
                self.touch_cache(volume, lane, next);
            }
            Err(Fault) => {
                self.fail_cache();
                self.cache_silent(volume, lane, payload);
            }
        }
    }

    /// It is not there, and nothing is named: the backing device has done nothing wrong.
    pub(super) fn cache_silent(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        payload: &mut impl Payload,
    ) {
        let state = &mut self.lanes[lane];
        (state.failed, state.broken_off) = (true, true);
        self.writeback_flushed(volume, lane, payload);
    }

    fn look(&mut self, volume: VolumeIndex, lane: usize, (item, slot): (usize, Slot)) -> bool {
        let state = &mut self.lanes[lane];
        state.under_way += 1;
        let to = Place::Window { frame: state.frame_base };
        let (segment, block) = self.segments.place(slot);
        self.segments.get_mut(segment).readers += 1;
        let what = What::Look { item, segment, block };
        let token = self.token(Pending::Writeback(Work { volume, what }));
        self.effects.push_back(Effect::ReadCache { token, segment, block, blocks: 1, to });
        true
    }

    /// A block was looked at once more.
    pub(super) fn looked(
        &mut self,
        lane: usize,
        (item, segment, block): (usize, SegmentId, u16),
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        self.segments.get_mut(segment).readers -= 1;
        let place = Place::Window { frame: self.lanes[lane].frame_base };
        let good = result.is_ok() && self.verify(segment, block, place, payload);
        let state = &mut self.lanes[lane];
        state.looked = item + 1;
        state.mends = good.then_some(item);
    }

    /// Writes what could be read after all, when it is write-back's turn.
    fn mend(&mut self, volume: VolumeIndex, lane: usize, item: usize) -> bool {
        let now = self.now;
        let ignored = self.config.mutants.is(Mutant::TurnIgnored);
        self.slices(volume).batch_wants(volume, true, now);
        if !self.slices(volume).may_write_back(volume, now) && !ignored {
            return true;
        }
        self.slices(volume).batch_wants(volume, false, now);
        let state = &mut self.lanes[lane];
        state.mends = None;
        state.under_way += 1;
        let (lba, from) = (state.batch.lba(item), Place::Window { frame: state.frame_base });
        self.slices(volume).begin(Side::WriteBack);
        self.volume(volume).stats.backing_writes += 1;
        let token = self.token(Pending::Writeback(Work { volume, what: What::Mend { item } }));
        self.effects.push_back(Effect::WriteBacking { token, volume, lba, blocks: 1, from });
        true
    }

    pub(super) fn mended(
        &mut self,
        volume: VolumeIndex,
        lane: usize,
        item: usize,
        result: Result<(), Fault>,
    ) {
        let now = self.now;
        self.slices(volume).end(Side::WriteBack, now);
        let state = &mut self.lanes[lane];
        if result.is_ok() {
            state.batch.mend(item);
            state.mended = true;
            self.volume(volume).stats.backing_blocks_written += 1;
        } else {
            state.failed = true;
        }
    }
}
