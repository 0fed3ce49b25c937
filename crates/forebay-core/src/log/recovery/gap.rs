// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A segment of which no record can be read, between two that are there, keeps its place in the log: it holds nothing, and nobody
//! else has it before the tail has passed it. So ordinals are without a gap, by which a checkpoint or what a process hands over is
//! known to be whole (V12).

use super::{CacheReader, Recovered, Recovery};
use crate::format::record::Header;
use crate::log::segment::State;
use crate::map::slots::Heading;
use crate::mutant::Mutant;
use crate::units::{Ordinal, SegmentId, Sequence, VolumeIndex};

/// The first record of a segment that is not the next one of its log.
#[derive(Debug)]
pub(super) struct Gap {
    pub(super) index: VolumeIndex,
    /// The segment before, in the chain.
    pub(super) before: SegmentId,
    /// The record's.
    pub(super) id: SegmentId,
    pub(super) header: Header,
    /// Where the log ended before it.
    pub(super) at: Sequence,
}

impl<R: CacheReader> Recovery<'_, R> {
    /// Fills the gaps of one segment: the record behind it names it. Of more than one in a row nobody knows which the others were.
    pub(super) fn fill_gaps(&mut self) {
        if self.mutants.is(Mutant::GapStays) {
            return;
        }
        for gap in core::mem::take(&mut self.gaps) {
            let _ = self.fill(&gap);
        }
    }

    fn fill(&mut self, gap: &Gap) -> Option<()> {
        let Gap { index, before, id, header, at } = gap;
        let (missing, used) = (header.previous_segment, header.previous_segment_used);
        let Recovered { segments, slots, volumes, .. } = &mut self.found;
        let ordinal = Ordinal(header.ordinal.0.checked_sub(1)?);
        let is_one = segments.get(*before).ordinal.0 + 1 == ordinal.0;
        let fits = missing.0 < segments.total() && (1..=segments.blocks()).contains(&used);
        if !is_one || !fits || segments.get(missing).state != State::Free {
            return None;
        }
        let volume = volumes.get_mut(usize::from(index.0))?.as_mut()?;
        let segment = segments.get_mut(missing);
        segment.become_state(State::Open);
        segment.become_state(State::Sealed);
        (segment.volume, segment.ordinal) = (*index, ordinal);
        // Not below what it was: should its records be read later, they must not look like those of a younger life (`outlived`).
        segment.sequence = header.segment_sequence.checked_sub(1)?;
        (segment.first_sequence, segment.last_sequence) = (*at, *at);
        (segment.used, segment.next) = (used, Some(*id));
        segments.get_mut(*before).next = Some(missing);
        volume.log.segment_count += 1;
        // A record of nothing, for whoever goes from header to header.
        let nothing = Heading { blocks: used, entries: 0, sequence_offset: 0, begins_epoch: false };
        slots.head(segments.slot(missing, 0), nothing);
        (1..used).for_each(|block| slots.void(segments.slot(missing, block)));
        Some(())
    }
}
