// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a checkpoint holds, put in place, and what it holds no more taken out.

use super::{CacheReader, Recovered, RecoveredVolume, Recovery};
use crate::format::entry::Kind;
use crate::format::superblock::{Head, Volume};
use crate::log::image::{self, Image, ImageVolume};
use crate::log::segment::State;
use crate::map::extent::Position;
use crate::map::slots::Heading;
use crate::mutant::Mutant;
use crate::policy::writeback::Cursor;
use crate::units::{BLOCK_SIZE, Ordinal, SegmentId, Slot, VolumeIndex};
use alloc::rc::Rc;
use alloc::vec::Vec;

/// So many segments in a row that were not used again since a checkpoint: none behind them was.
/// As many as can be open or on their way at once (`Config::buffer_count`).
pub(crate) const UNUSED_RUN: usize = 256;

impl<R: CacheReader> Recovery<'_, R> {
    /// Takes a checkpoint, and looks for what came after it: in the pool it captured, from the
    /// front, then at the tails (checkpoint::T3).
    pub(super) fn use_image(&mut self, mut image: Image) {
        let sequence = &mut self.found.segment_sequence;
        *sequence = (*sequence).max(image.segment_sequence);
        image.rows.sort_by_key(|row| (row.volume, row.ordinal));
        let since = image.segment_sequence;
        // What was in a log when it began and, as far as the copy shows, still was later.
        image.rows.retain(|row| row.sequence < since);
        self.read_firsts_of(&image.free, since, UNUSED_RUN);
        let mut known = alloc::vec![false; self.superblock.segment_count as usize];
        for id in image.free.iter().copied().chain(image.rows.iter().map(|row| row.id)) {
            known[id.0 as usize] = true;
        }
        // Retired while the checkpoint was written, or just before: used again or not.
        let all = (0..self.superblock.segment_count).map(SegmentId);
        let others: Vec<SegmentId> = all.filter(|id| !known[id.0 as usize]).collect();
        self.read_firsts_of(&others, since, usize::MAX);
        for volume in &image.volumes {
            let mine = image.rows.iter().filter(|row| row.volume == volume.index);
            let ids: Vec<SegmentId> = mine.map(|row| row.id).collect();
            let Some((newest, before)) = ids.split_last() else { continue };
            self.read_firsts_of(before, since, UNUSED_RUN);
            // It may have been open, and empty: what came into it since is behind the beginning, however long the log before it.
            if before.len() <= UNUSED_RUN || !self.mutants.is(Mutant::EmptyHeadUnread) {
                self.read_firsts_of(&[*newest], since, UNUSED_RUN);
            }
        }
        // The record that told of a death may not be there any more: rot of a log's last one looks like a torn end. That all of a
        // dead segment was on the backing device stands. One that was opened behind the beginning need not have died for that: a crash found
        // no record in it.
        for volume in &mut image.volumes {
            let any = self.mutants.is(Mutant::UnusedCountsAsDead);
            let has_record = |ordinal| ordinal <= volume.start.ordinal || any;
            let mine = image.rows.iter().filter(|row| row.volume == volume.index);
            let mine = mine.filter(|row| has_record(row.ordinal));
            for row in mine.filter(|row| self.is_outlived(row.id, row.sequence)) {
                volume.outlived = volume.outlived.max(Ordinal(row.ordinal.0 + 1));
                volume.watermark = volume.watermark.max(row.last_sequence);
            }
        }
        self.image = Some(Rc::new(image));
    }

    /// Puts a checkpoint's index in place, but what its pages hold of segments that are gone, or
    /// that were used again since it began. Those are free here: each was given back when its death
    /// was durable, so the tail of its log is behind it. Every record of theirs is applied after
    /// this.
    pub(super) fn read_index(&mut self) -> Option<()> {
        let segments = &self.found.segments;
        // Blocks of each segment that were in a log when the checkpoint began and still are.
        let used = |id| match segments.get(id) {
            segment if segment.state == State::Sealed => segment.used,
            _ => 0,
        };
        let used: Vec<u16> = (0..segments.total()).map(|id| used(SegmentId(id))).collect();
        // Most are wanted whole: one bit tells that of each, and all bits stay in a near cache,
        // since this is asked for each of hundreds of millions of cells.
        let blocks = segments.blocks();
        let mut whole = alloc::vec![0_u64; used.len().div_ceil(64)];
        for (id, _) in used.iter().enumerate().filter(|(_, used)| **used == blocks) {
            whole[id / 64] |= 1 << (id % 64);
        }
        assert!(blocks.is_power_of_two(), "as the superblock's check has it");
        let shift = blocks.trailing_zeros();
        let skipped = self.mutants.is(Mutant::CheckpointSweepSkipped);
        let keep = |slot: Slot| {
            let (id, block) = ((slot.0 >> shift) as usize, slot.0 & (u32::from(blocks) - 1));
            whole.get(id / 64).is_some_and(|word| word >> (id % 64) & 1 == 1)
                || used.get(id).is_some_and(|used| block < u32::from(*used))
                || skipped
        };
        let image = self.image.clone()?;
        self.found.index =
            image::read_index(self.superblock, &image, self.reader, self.mutants, keep)?;
        Some(())
    }

    /// What the checkpoint holds of a volume, put in place: the log as it was when it began.
    pub(super) fn base(&mut self, index: VolumeIndex, tail: Ordinal, out: &mut RecoveredVolume) {
        let Some(image) = self.image.clone() else { return };
        let Some(volume) = self.volume_in(&image, index) else { return };
        for row in image.rows.iter().filter(|row| row.volume == index) {
            if row.ordinal < tail || row.ordinal > volume.start.ordinal {
                continue;
            }
            let last = row.ordinal == volume.start.ordinal;
            self.found.chain(out, row);
            if last {
                let segment = self.found.segments.get_mut(row.id);
                (segment.last_sequence, segment.used) = (volume.start.through, volume.start.used);
            }
        }
        let watermark = out.log.watermark;
        out.log.last = volume.start.link;
        (out.log.closed, out.log.placed) = (volume.start.through, volume.start.through);
        out.log.dirtied = volume.dirtied;
        (out.head, out.captured) = (volume.start, volume.start.through);
        if volume.forgot && !self.mutants.is(Mutant::UnreadStaysUnread) {
            out.forgot = volume.start.ordinal;
        }
        for extent in &volume.extents {
            let (ordinal, mut extent) = (extent.position.ordinal(), *extent);
            if ordinal < tail {
                // What was lost there was named again by what told of the death, and that is not there.
                let is_kept = extent.kind == Kind::Lost && ordinal >= out.log.tail;
                if !is_kept || self.mutants.is(Mutant::OutlivedLostForgotten) {
                    continue;
                }
                extent.position = Position::new(tail, 0);
                out.unnamed_lost = out.unnamed_lost.max(Some(tail));
            }
            out.extents.make_room();
            out.extents.insert(extent);
        }
        let dirty = volume.pending.iter().filter(|pending| pending.sequence > watermark);
        out.pending_extents.extend(dirty.copied());
    }

    /// Whether the checkpoint has all it needs of a volume: the segments from the tail to its
    /// beginning, and what the last record holds, which is kept: the next one must say it (checkpoint::T6).
    pub(super) fn image_stands(
        &mut self,
        index: VolumeIndex,
        tail: Ordinal,
        out: &mut RecoveredVolume,
    ) -> bool {
        let Some(image) = self.image.clone() else { return true };
        let Some(volume) = self.volume_in(&image, index) else { return true };
        let start = volume.start;
        if start == Head::NONE || start.ordinal < tail {
            return true;
        }
        if !self.is_there(start.link.segment) {
            return false;
        }
        let rows = image.rows.iter().filter(|row| {
            row.volume == index && row.ordinal >= tail && row.ordinal <= start.ordinal
        });
        let whole = rows.count() as u64 == start.ordinal.0 - tail.0 + 1;
        if let Some(last) = &volume.last {
            last.items.iter().for_each(|item| out.log.previous_items.push(*item));
            return whole;
        }
        // A program from before has left that to the record's header.
        let address = self.address(start.link.segment, start.link.block);
        let bytes = self.read_blocks(&[(start.link.segment, start.link.block)]);
        let header = self.decode(&bytes, address);
        if let (Ok((header, _)), Some(head)) = (&header, bytes.first_chunk::<BLOCK_SIZE>()) {
            out.log.previous_items.take(head, header.entry_count, self.mutants);
        }
        self.batch = bytes;
        let unchecked = self.mutants.is(Mutant::SkipLastHeader);
        whole && header.is_ok_and(|(_, checksum)| checksum == start.link.checksum || unchecked)
    }

    /// A checkpoint holds what was lost, and not which of it no entry names: that is behind the
    /// watermark. There it is named (once more).
    pub(super) fn find_unnamed(&mut self, out: &mut RecoveredVolume) {
        let ordinal = |id| self.found.segments.get(id).ordinal;
        let clean = out.cursor.segment.map(|id| Position::new(ordinal(id), out.cursor.block));
        let lost = out.extents.iter().filter(|extent| extent.kind == Kind::Lost);
        let unnamed = lost.filter(|extent| clean.is_none_or(|clean| extent.position >= clean));
        let last = unnamed.map(|extent| extent.position.ordinal()).max();
        out.unnamed_lost = out.unnamed_lost.max(last);
    }

    /// Drops the extents that write-back had dropped: short ones up to the watermark. Something may
    /// have gone around the log there since, without a note.
    pub(super) fn drop_clean_extents(&mut self, out: &mut RecoveredVolume) {
        let Cursor { segment: Some(id), block } = out.cursor else { return };
        if self.mutants.is(Mutant::CheckpointKeepsExtents) {
            return;
        }
        let clean = self.found.segments.position(id, block);
        out.extents.remove_where(|extent| {
            !extent.long && extent.kind != Kind::Lost && extent.position <= clean
        });
    }

    /// Finds where write-back goes on, and counts what is dirty.
    pub(super) fn find_cursor(&mut self, out: &mut RecoveredVolume) {
        let watermark = out.log.watermark;
        out.cursor = Cursor::default();
        let mut dirty = 0;
        let mut whole = Vec::new();
        let mut next = out.log.tail_segment;
        while let Some(id) = next {
            let segment = *self.found.segments.get(id);
            next = segment.next;
            if segment.last_sequence <= watermark {
                out.cursor = Cursor { segment: Some(id), block: segment.used };
                continue;
            }
            if segment.first_sequence > watermark {
                whole.push(id);
                continue;
            }
            for (block, heading, end) in headings(&self.found, id) {
                let first = segment.first_sequence.0 + u64::from(heading.sequence_offset);
                if first + u64::from(heading.entries) <= watermark.0 {
                    out.cursor = Cursor { segment: Some(id), block: end };
                } else {
                    dirty += written(&self.found, id, block, end);
                }
            }
        }
        // Almost all of a log can be dirty: long to count.
        let mut counts = alloc::vec![0; self.reader.workers().max(1)];
        let parts = whole.chunks(whole.len().div_ceil(counts.len()).max(1));
        let found = &self.found;
        self.reader.share(parts.zip(&mut counts).collect(), |(ids, count): (&[_], &mut u64)| {
            let all = ids.iter().flat_map(|id| headings(found, *id).map(move |it| (*id, it)));
            *count = all.map(|(id, (block, _, end))| written(found, id, block, end)).sum();
        });
        out.log.dirty_blocks = dirty + counts.iter().sum::<u64>();
    }

    /// What the checkpoint holds of a volume: of the one that is there, not of another that had
    /// its place.
    pub(super) fn volume_in<'i>(
        &self,
        image: &'i Image,
        index: VolumeIndex,
    ) -> Option<&'i ImageVolume> {
        let recorded = self.superblock.volumes.get(usize::from(index.0))?.as_ref()?;
        image.volumes.iter().find(|volume| {
            volume.index == index && volume.attach_generation == recorded.attach_generation
        })
    }

    pub(super) fn image_of(&self, index: VolumeIndex) -> Option<&ImageVolume> {
        self.volume_in(self.image.as_deref()?, index)
    }

    /// The volume with the newest end of its log that is known for sure: the superblock's, or the
    /// checkpoint's, which everything before it was durable for.
    pub(super) fn with_image(&self, index: VolumeIndex, recorded: &Volume) -> Volume {
        let mut volume = recorded.clone();
        if let Some(image) = self.image_of(index) {
            if image.start.link.sequence > volume.head.link.sequence {
                volume.head = image.start;
            }
            volume.next_sequence = volume.next_sequence.max(image.next_sequence);
            if image.watermark > volume.watermark {
                volume.backing_as_of = image.backing_as_of;
            }
            volume.watermark = volume.watermark.max(image.watermark);
            volume.tail = volume.tail.max(image.tail).max(image.outlived);
            volume.flush_epoch = volume.flush_epoch.max(image.flush_epoch);
        }
        volume
    }
}

/// The records of a segment, as the slot table has them: where each begins, what its header says,
/// where it ends.
fn headings(found: &Recovered, id: SegmentId) -> impl Iterator<Item = (u16, Heading, u16)> {
    let used = found.segments.get(id).used;
    let mut block = 0;
    core::iter::from_fn(move || {
        let heading =
            (block < used).then(|| found.slots.heading(found.segments.slot(id, block)))?;
        let begin = block;
        block = heading.end(begin).min(used);
        Some((begin, heading, block))
    })
}

/// Blocks that a guest wrote, of those behind the header at `block`.
fn written(found: &Recovered, id: SegmentId, block: u16, end: u16) -> u64 {
    let first = found.segments.slot(id, block).0;
    found.slots.written(first + 1..first + u32::from(end - block))
}
