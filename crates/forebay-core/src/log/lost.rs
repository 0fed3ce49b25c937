// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was lost: dirty blocks that are not what was written. They are named in the log, and read as
//! errors, until somebody writes them again.
//!
//! # Invariants
//!
//! - **L1** No watermark passes a bad dirty block before an entry names it lost: neither one that was
//!   found bad when it was read, nor those of a record whose header rotted, which recovery knows
//!   from the next header only.
//! - **L2** What is still lost when its entry's segment is emptied is named again (C4 of `reclaim`).
//! - **L3** A block that was written later than it was lost is not lost.
//! - **L4** What is lost takes a place of the reserve only where that lets a watermark or a tail move: a
//!   batch names what it found when it is on the backing device, and nobody else names anything. So behind a
//!   backing device that is dead a log does not grow, whatever rots in it: each read finds it bad again.
//!
//! # Limits
//!
//! Lost blocks are extents like others, with room of their own ([`crate::map::extent::lost_room`]). If a batch finds more
//! than fit, it is given up and made again so small that all of its blocks could be noted; once it is
//! done the extents that it wrote are gone, and there is room again. So write-back goes on until
//! lost extents alone fill the map. Then zeros and discards answer errors, and data is taken.

use crate::engine::Engine;
use crate::format::entry::Kind;
use crate::limits::RECORD_ENTRIES_MAX;
use crate::log::append::EAGER_BLOCKS;
use crate::log::segment::Segments;
use crate::map::extent::{Extent, ExtentMap, Position};
use crate::map::index::Index;
use crate::map::slots::Slots;
use crate::mutant::Mutant;
use crate::payload::Payload;
use crate::units::{Lba, Ordinal, SegmentId, Slot, VolumeIndex};

/// Whether a bad block could be noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Noted {
    /// It is, or need not be.
    Yes,
    /// The extents are full.
    NoRoom,
    /// The log takes nothing now.
    NotNow,
}

/// Calls `visit` with every block that the log from segment `first` on holds, and its place.
pub(crate) fn each_held(
    segments: &Segments,
    slots: &Slots,
    first: Option<SegmentId>,
    mut visit: impl FnMut(Lba, Slot, Position) -> bool,
) -> bool {
    let mut next = first;
    while let Some(id) = next {
        let segment = segments.get(id);
        next = segment.next;
        // The head may hold more than its closed records. A place with nothing in it, or a header,
        // says nothing that the index agrees with.
        let open = segment.state == crate::log::segment::State::Open;
        let end = if open { segments.blocks() } else { segment.used };
        for block in 0..end {
            let slot = segments.slot(id, block);
            let Some(held) = slots.held(slot) else { continue };
            if !visit(held.lba, slot, Position::new(segment.ordinal, block)) {
                return false;
            }
        }
    }
    true
}

/// Whether data at a position over a lost extent was written after it was lost (L3).
fn ends(extent: Option<&Extent>, position: Position) -> bool {
    extent.is_some_and(|extent| extent.kind == Kind::Lost && position >= extent.position)
}

/// Forgets everything of a volume that its log holds so far, but for what was lost and not written
/// again: something clean is missing behind it (at recovery).
pub(crate) fn forget_all(
    volume: VolumeIndex,
    oldest: Option<SegmentId>,
    (index, segments, slots): (&mut Index, &Segments, &Slots),
    extents: &mut ExtentMap,
) {
    each_held(segments, slots, oldest, |lba, slot, position| {
        if index.remove(volume, lba, slot) && ends(extents.get(lba), position) {
            extents.make_room();
            extents.cut(lba);
        }
        true
    });
    extents.remove_where(|extent| extent.kind != Kind::Lost);
}

impl Engine {
    /// A dirty block is not what was written: if it is the block's newest version, reads answer an
    /// error until it is written again (L1).
    pub(crate) fn mark_lost(
        &mut self,
        volume: VolumeIndex,
        lba: Lba,
        slot: Slot,
        payload: &mut impl Payload,
    ) -> Noted {
        if self.is_newest(volume, lba, slot) {
            let state = self.volume(volume);
            // A batch of one record is sure to find room, if any that came before left it.
            let left =
                state.writeback.careful || state.extents.has_room_for(1 + RECORD_ENTRIES_MAX);
            if !left || !state.extents.has_room_over(lba, lba + 1) {
                return Noted::NoRoom;
            }
            if !self.own_room(volume, 0, payload) {
                return Noted::NotNow;
            }
            self.place_extent(volume, Kind::Lost, lba, 1, payload);
            self.volume(volume).stats.lost_blocks += 1;
        }
        Noted::Yes
    }

    /// Names what recovery found lost and no entry names, before the watermark passes it (L1).
    pub(crate) fn name_lost(&mut self, volume: VolumeIndex, payload: &mut impl Payload) -> Noted {
        let Some(ordinal) = self.volume(volume).unnamed_lost else { return Noted::Yes };
        let loose = self.config.mutants.is(Mutant::LostUnnamed);
        let noted =
            if loose { Noted::Yes } else { self.name_lost_through(volume, ordinal, payload) };
        if noted == Noted::Yes {
            self.volume(volume).unnamed_lost = None;
        }
        noted
    }

    /// Names again what is still lost and noted up to this segment (L2).
    pub(crate) fn keep_lost(
        &mut self,
        volume: VolumeIndex,
        id: SegmentId,
        payload: &mut impl Payload,
    ) -> Noted {
        let ordinal = self.segments.get(id).ordinal;
        self.name_lost_through(volume, ordinal, payload)
    }

    fn name_lost_through(
        &mut self,
        volume: VolumeIndex,
        ordinal: Ordinal,
        payload: &mut impl Payload,
    ) -> Noted {
        let none = self.volume(volume).extents.lost_len() == 0;
        if none || self.config.mutants.is(Mutant::LostForgotten) {
            return Noted::Yes;
        }
        if !self.end_written(volume, ordinal) {
            return Noted::NoRoom;
        }
        // Bounded by the extents there are. What stops it is room, and who makes room wakes it.
        let mut from = Lba(0);
        while let Some(extent) = self.old_lost(volume, ordinal, from) {
            let blocks = (extent.end - extent.start).min(u64::from(u32::MAX)) as u32;
            from = extent.start + u64::from(blocks);
            // In the place of a whole one there is always room.
            if !self.volume(volume).extents.has_room_over(extent.start, from) {
                return Noted::NoRoom;
            }
            if !self.own_room(volume, 0, payload) {
                return Noted::NotNow;
            }
            self.place_extent(volume, Kind::Lost, extent.start, blocks, payload);
        }
        Noted::Yes
    }

    /// The first lost extent from a block on that was noted up to a segment.
    fn old_lost(&mut self, volume: VolumeIndex, ordinal: Ordinal, from: Lba) -> Option<Extent> {
        let extents = &self.volume(volume).extents;
        let old =
            |extent: &&Extent| extent.kind == Kind::Lost && extent.position.ordinal() <= ordinal;
        extents.overlapping(from, Lba(u64::MAX)).find(old).copied()
    }

    /// Ends the loss of blocks that were written since (L3), where it was noted up to a segment:
    /// to be named again would make it newer than they are. Says whether there was room for that.
    fn end_written(&mut self, volume: VolumeIndex, ordinal: Ordinal) -> bool {
        let mut from = Lba(0);
        let mut long = false;
        while let Some(extent) = self.old_lost(volume, ordinal, from) {
            from = extent.end;
            if extent.end - extent.start > u64::from(EAGER_BLOCKS) {
                long = true;
                continue;
            }
            for offset in 0..extent.end - extent.start {
                let lba = extent.start + offset;
                let Some(slot) = self.index.get(volume, lba) else { continue };
                let (id, block) = self.segments.place(slot);
                let position = self.segments.position(id, block);
                if position >= extent.position && !self.volume(volume).extents.try_cut(lba) {
                    return false;
                }
            }
        }
        // Too long to ask for each block: whatever the log holds is asked instead.
        !long || {
            let Engine { index, segments, slots, volumes, .. } = self;
            let state = volumes[usize::from(volume.0)].as_deref_mut().expect("it exists");
            let first = state.log.tail_segment;
            each_held(segments, slots, first, |lba, slot, position| {
                !ends(state.extents.get(lba), position)
                    || index.get(volume, lba) != Some(slot)
                    || state.extents.try_cut(lba)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::segment::State;
    use crate::map::slots::Held;
    use alloc::vec::Vec;

    const VOLUME: VolumeIndex = VolumeIndex(0);

    /// A log of one segment of 16 blocks, of which some hold data.
    fn log(held: &[(u16, u64)]) -> (Index, Segments, Slots, SegmentId) {
        let mut segments = Segments::new(4, 16);
        let id = SegmentId(2);
        let segment = segments.get_mut(id);
        segment.become_state(State::Open);
        segment.become_state(State::Sealed);
        (segment.ordinal, segment.used) = (Ordinal(7), 16);
        let (mut index, mut slots) = (Index::new(64, 1), Slots::new(64));
        for (block, lba) in held {
            let slot = segments.slot(id, *block);
            slots.hold(slot, Held { lba: Lba(*lba), crc: 0, fill: false });
            index.insert(VOLUME, Lba(*lba), slot);
        }
        (index, segments, slots, id)
    }

    #[test]
    fn billions_of_lost_blocks_stay_lost_but_for_those_written_since() {
        let far = (1 << 39) - 1;
        let (mut index, segments, slots, id) = log(&[(2, 5), (9, 1_000_000), (11, far), (12, 3)]);
        let mut extents = ExtentMap::new(2);
        let lost = |start, end, block| Extent {
            start: Lba(start),
            end: Lba(end),
            position: Position::new(Ordinal(7), block),
            kind: Kind::Lost,
            long: true,
        };
        extents.insert(lost(4, far + 1, 8));
        extents.make_room();
        extents.insert(Extent { kind: Kind::Zero, ..lost(0, 2, 15) });
        forget_all(VOLUME, Some(id), (&mut index, &segments, &slots), &mut extents);
        // Block 5 was there before the loss, block 3 was never lost, and nothing else is kept.
        let expected = [lost(4, 1_000_000, 8), lost(1_000_001, far, 8)];
        assert!(extents.iter().eq(&expected), "{:?}", extents.iter().collect::<Vec<_>>());
        assert!(index.is_empty());
    }
}
