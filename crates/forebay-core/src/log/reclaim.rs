// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The tail of a log: emptying its oldest segment, so that the pool gets it back.
//!
//! # Invariants
//!
//! - **C1** Only a clean segment is emptied: everything in it is at or below the durable watermark.
//! - **C2** Older always dies first: segments are emptied in the order of their log. Of several logs the one that has the oldest gives,
//!   if it holds more than is reserved for it (G1 of `policy::reserve`).
//! - **C3** A block that is appended again (a second chance) enters only with a ticket that holds
//!   (T1 of `log::tickets`).
//! - **C4** What was lost is appended again, never forgotten (`lost`): nothing leaves while recovery found what no record
//!   names but the one behind it. That one tells what a record held whose header rotted, and only while this is in the log.
//! - **C5** A tail in which something is lost that finds no room to be noted again is none that could be emptied until an extent of
//!   its volume changes: others give meanwhile, and nobody waits for it.

use crate::effect::{Effect, Fault};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::format::entry::Kind;
use crate::log::lost::Noted;
use crate::log::segment::State;
use crate::log::tickets::Ticket;
use crate::map::extent::Position;
use crate::mutant::Mutant;
use crate::payload::{Payload, Place};
use crate::policy::writeback::Cursor;
use crate::units::{Lba, Ordinal, SegmentId, Slot, VolumeIndex};
use crate::volume::Volume;

/// Second chances that may be under way at once.
pub const CHANCE_COUNT_MAX: usize = 32;
/// Of a segment's blocks, at most this share (one in so many) gets a second chance.
const CHANCE_SHARE: u16 = 4;

/// Blocks whose places in the index are fetched before they are needed.
const LOOK_AHEAD: u16 = 8;

/// A clean block that was read since it was placed, on its way from the tail to the head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chance {
    volume: VolumeIndex,
    lba: Lba,
    segment: SegmentId,
    block: u16,
    frame: u32,
    ticket: Ticket,
}

impl Engine {
    /// Empties the volume's tail while the pool is low and this tail is the oldest of those who give; for its own sake, while
    /// its extents fill their map, or a write of it waits and nobody gives.
    pub(crate) fn reclaim_settle(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        // Bounded: each turn retires one of at most so many segments. Several at once, if any: each time a
        // record ends early to note it.
        for turn in 0..8 {
            // Emptying segments ends no loss.
            let state = self.volume(volume);
            let full = state.extents_full;
            let extents_full = full && !state.extents.is_all_lost();
            if !full && self.reclaimable(volume).is_none() {
                return;
            }
            let gives = self.gives(self.volume_ref(volume).expect("it exists")); // G1
            let wanted = gives && self.pool_wants_segments(turn > 0);
            let goes = self.volume(volume).log.going > 0;
            let own = extents_full || goes || self.gives_to_itself(volume);
            if !(wanted || own) || self.health == CacheHealth::Failed {
                return;
            }
            let Some(id) = self.reclaimable(volume) else {
                return self.make_reclaimable(volume, payload);
            };
            let sequence = self.segments.get(id).sequence;
            let older = |other: &Volume| {
                let tail = self.reclaimable(other.index).filter(|_| self.has_clean_tail(other));
                tail.is_some_and(|id| self.segments.get(id).sequence < sequence)
            };
            if !own && self.all_volumes().any(older) {
                return;
            }
            let loose = self.config.mutants.is(Mutant::RottenEndNotDirty);
            if !self.chances_given(volume, id, payload) {
                return;
            }
            let mut noted = self.keep_lost(volume, id, payload);
            if noted == Noted::Yes && !loose {
                noted = self.name_lost(volume, payload);
            }
            if noted != Noted::Yes {
                let state = self.volume(volume);
                if noted == Noted::NoRoom {
                    state.tail_held = Some(state.extents.changes()); // C5
                }
                return;
            }
            self.retire(volume, id, |soon| payload.prefetch(soon));
            let state = self.volume(volume);
            state.given_to_itself += u64::from(own);
            state.extents_full &= !state.extents.has_room();
        }
    }

    /// The extents that fill the map may all be in the head: then a log goes on in a new segment.
    fn make_reclaimable(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let state = self.volume(volume);
        let log = &state.log;
        if !state.extents_full || log.newest != log.tail_segment || log.is_dirty() {
            return;
        }
        if log.open.is_some() {
            self.close_record(volume, payload);
        }
        if self.volume(volume).log.head.is_some() {
            self.seal_segment(volume, payload);
        }
        self.volume(volume).log.note_wanted = true;
    }

    /// The volume's oldest segment, if it could be emptied now (C1, C2, C5).
    pub(crate) fn reclaimable(&self, volume: VolumeIndex) -> Option<SegmentId> {
        let state = self.volume_ref(volume)?;
        let log = &state.log;
        let id = log.tail_segment?;
        let segment = self.segments.get(id);
        let dirty = segment.last_sequence > log.durable.watermark
            && !self.config.mutants.is(Mutant::ReclaimDirty);
        let read = segment.readers > 0 && !self.config.mutants.is(Mutant::IgnoreReaders);
        let busy = read || segment.writes > 0 || segment.buffer.is_some();
        // The newest segment stays: a log goes on from it.
        let newest = log.newest == Some(id);
        let held = state.tail_held == Some(state.extents.changes())
            && !self.config.mutants.is(Mutant::WaitsForHeldTail);
        (segment.state == State::Sealed && !dirty && !busy && !newest && !held).then_some(id)
    }

    /// Reads what deserves a second chance; says whether all of it is through.
    fn chances_given(
        &mut self,
        volume: VolumeIndex,
        id: SegmentId,
        payload: &mut impl Payload,
    ) -> bool {
        if self.volume(volume).chances > 0 {
            return false;
        }
        let ordinal = self.segments.get(id).ordinal;
        if self.volume(volume).chanced == ordinal || self.volume(volume).starved {
            return true;
        }
        self.volume(volume).chanced = ordinal;
        if !self.segments.get(id).was_read {
            return true;
        }
        let mut left = (self.geometry.segment_blocks / CHANCE_SHARE).max(1);
        let used = self.segments.get(id).used;
        let mut header = 0;
        for block in 0..used {
            let slot = self.segments.slot(id, block);
            if block == header {
                header += self.slots.heading(slot).blocks;
                continue;
            }
            if block + LOOK_AHEAD < header
                && let Some(held) = self.slots.held(Slot(slot.0 + u32::from(LOOK_AHEAD)))
            {
                self.index
                    .begin(volume, held.lba)
                    .into_iter()
                    .for_each(|soon| payload.prefetch(soon));
            }
            let Some(held) = self.slots.held(slot) else { continue };
            let lba = held.lba;
            if !self.index.is_referenced(volume, lba, slot) {
                continue;
            }
            if self.is_under_extent(volume, lba, ordinal, block) {
                continue;
            }
            let Some(frame) = self.chance_frames.pop_if(|_| left > 0) else {
                // It goes, and comes back as soon as somebody misses it.
                self.history.touch(volume, lba);
                continue;
            };
            left -= 1;
            self.volume(volume).chances += 1;
            self.segments.get_mut(id).readers += 1;
            let ticket = self.tickets.take();
            let chance = Chance { volume, lba, segment: id, block, frame, ticket };
            let token = self.token(Pending::Chance(chance));
            let to = Place::Window { frame };
            self.effects.push_back(Effect::ReadCache { token, segment: id, block, blocks: 1, to });
        }
        self.volume(volume).chances == 0
    }

    fn is_under_extent(
        &mut self,
        volume: VolumeIndex,
        lba: Lba,
        ordinal: Ordinal,
        block: u16,
    ) -> bool {
        let position = Position::new(ordinal, block);
        self.volume(volume).extents.get(lba).is_some_and(|extent| extent.position > position)
    }

    /// A block was read for its second chance: it enters if its ticket still holds (C3).
    pub(crate) fn chance_complete(
        &mut self,
        chance: Chance,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let Chance { volume, lba, segment, block, frame, ticket } = chance;
        self.segments.get_mut(segment).readers -= 1;
        self.chance_frames.push(frame);
        let from = Place::Window { frame };
        self.volume(volume).chances -= 1;
        let valid = self.ticket_holds(ticket, volume, lba);
        let unchecked = self.config.mutants.is(Mutant::SkipChanceChecksum);
        let good =
            valid && result.is_ok() && (unchecked || self.verify(segment, block, from, payload));
        if !good || !self.room(volume, 1, payload) {
            return;
        }
        let (buffer, at) = self.next_slot(volume);
        payload.copy(from, Place::Buffer { buffer, block: at }, 1);
        let crc = payload.checksum(from);
        self.place_data(volume, lba, crc, Kind::Fill, payload);
        self.volume(volume).stats.second_chances += 1;
    }

    /// Forgets everything in the segment, and moves the tail behind it. `soon` is told which
    /// places of the index are looked at next.
    pub(crate) fn retire(
        &mut self,
        volume: VolumeIndex,
        id: SegmentId,
        mut soon: impl FnMut(&u64),
    ) {
        let segment = *self.segments.get(id);
        let mut header = 0;
        while header < segment.used {
            let heading = self.slots.heading(self.segments.slot(id, header));
            let end = header + heading.blocks;
            for block in header + 1..end {
                let slot = self.segments.slot(id, block);
                if block + LOOK_AHEAD < end
                    && let Some(held) = self.slots.held(Slot(slot.0 + u32::from(LOOK_AHEAD)))
                {
                    self.index.begin(volume, held.lba).into_iter().for_each(&mut soon);
                }
                if let Some(held) = self.slots.held(slot) {
                    self.index.remove(volume, held.lba, slot);
                }
            }
            header += heading.blocks;
        }
        let segment = self.segments.get_mut(id);
        segment.become_state(State::Retired);
        self.retired += 1;
        let (ordinal, next) = (segment.ordinal, segment.next);
        let goes = id.0 >= self.segments.count();
        let state = self.volume(volume);
        // Write-back goes on at the next segment: this one may soon be in another log.
        if state.writeback.cursor.segment == Some(id) {
            state.writeback.cursor = Cursor { segment: next, block: 0 };
        }
        state.extents.remove_where(|extent| extent.position.ordinal() <= ordinal);
        state.log.tail_segment = next;
        state.log.tail = Ordinal(ordinal.0 + 1);
        state.log.segment_count -= 1;
        if state.log.clean_count == 0 {
            state.log.clean_end = None;
        }
        state.log.clean_count = state.log.clean_count.saturating_sub(1);
        state.log.going -= u32::from(goes);
        state.log.note_wanted = true;
        state.stats.reclaimed_segments += 1;
    }
}
