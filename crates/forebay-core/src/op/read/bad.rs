// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blocks of the cache device that are not what was written there, or cannot be read: found by a guest's read.
//!
//! # Invariants
//!
//! - **R3** A bad clean block is read from the backing device; a bad dirty block fails alone.
//! - **R4** What the backing device has stands for a bad block only as long as that is the block's newest version.
//!   While it was read twice, a batch may have found it bad as well, named it lost and moved the watermark past it; or
//!   it was overwritten, and the watermark passed it unwritten. Then what is newest by now is read, or fails. The same while blocks behind it
//!   were read twice: what is bad is read from the backing device when all of a stretch is known to be.
//! - **R5** Of a piece one read of the cache device is under way at a time: its bad blocks are read again one after the
//!   other. A device that fails all that it is asked at once finds as many reads under way as before, not one for each block.
//! - **R6** A read names nothing lost: a device that is gone or out of order for a while has lost nothing, and what is named stays
//!   an error when it is well again. Write-back finds out (K4 of `policy::writeback`), and until then each read looks anew. That one has failed is told
//!   (`VolumeStatus::bad_read`).

use super::{Piece, Source, behind};
use crate::effect::Fault;
use crate::engine::Engine;
use crate::limits::TOKENS_KEPT;
use crate::op::miss::{Miss, Why};
use crate::payload::{Payload, Place};
use crate::request::RequestError;
use crate::units::{Lba, SegmentId, VolumeIndex};

/// How far a piece has come of which a block is read for the second time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Again {
    /// That block; what is before it is done.
    at: u16,
    /// But for so many right before it, which were bad twice: they are to be read again.
    bad: u16,
    /// The first read failed: what is behind it was not read.
    unread: bool,
}

/// Blocks of a piece that were bad twice, from one on.
fn repair(piece: &Piece, from: u16, blocks: u16) -> Miss {
    let Piece { request, volume, lba, to, .. } = *piece;
    let why = if matches!(to, Place::Request { .. }) { Why::Repair } else { Why::Edge };
    Miss::new(request, volume, (lba + u64::from(from), blocks), behind(to, from), why)
}

impl Engine {
    /// Goes on behind so many blocks of a piece that are as they should be. Says whether one is read for the second time.
    #[cold]
    pub(super) fn read_on(
        &mut self,
        piece: Piece,
        well: u16,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) -> bool {
        let Source::Cache { segment, block } = piece.source else {
            unreachable!("only the cache device is verified");
        };
        let second = piece.again.map(|again| again.at);
        let fresh = Again { at: well, bad: 0, unread: result.is_err() };
        let mut again = piece.again.unwrap_or(fresh);
        while again.at < piece.blocks {
            let at = again.at;
            // If nothing was read there is nothing to look at.
            let unread = if second == Some(at) { result.is_err() } else { again.unread };
            let place = behind(piece.to, at);
            let held = match unread {
                false => self.verified(segment, block + at, place, payload),
                true => None,
            };
            match held {
                Some(held) => {
                    self.volume(piece.volume).stats.fill_hit_blocks += u64::from(held.fill);
                    self.read_repair(&piece, &mut again, payload);
                }
                None if second != Some(at) => {
                    let piece = Piece { again: Some(again), ..piece };
                    self.read_cache(piece, (segment, block + at), 1, place, payload); // R5
                    return true;
                }
                None if self.is_repaired(&piece, &again, payload) => again.bad += 1,
                None => self.read_repair(&piece, &mut again, payload),
            }
            again.at += 1;
        }
        self.read_repair(&piece, &mut again, payload);
        false
    }

    /// One block of a piece is not what was written there, twice (R3). Says whether it is to be read from where its newest version is; else it
    /// has failed, or is being read.
    fn is_repaired(&mut self, piece: &Piece, again: &Again, payload: &mut impl Payload) -> bool {
        let Source::Cache { segment, block } = piece.source else {
            unreachable!("only the cache device is verified");
        };
        let (block, lba) = (block + again.at, piece.lba + u64::from(again.at));
        let slot = self.segments.slot(segment, block);
        let is_newest = self.is_newest(piece.volume, lba, slot);
        if is_newest && self.is_dirty_slot(segment, block) {
            self.fail(piece.request, RequestError::Io); // R6
            let state = self.volume(piece.volume);
            state.stats.bad_blocks_read += 1;
            state.bad_read = Some(lba);
            return false;
        }
        let stats = &mut self.volume(piece.volume).stats;
        stats.repaired_blocks += u64::from(is_newest);
        // It is counted where it is read.
        stats.hit_blocks -= u64::from(matches!(piece.to, Place::Request { .. }));
        if is_newest && !self.forget_bad(piece.volume, lba, segment, block) {
            // With no room to forget it, it is found bad again by the next read. The backing device has it, now.
            match self.has_tokens_for(1) {
                true => self.miss_begin(repair(piece, again.at, 1), payload),
                false => self.fail(piece.request, RequestError::Io),
            }
            return false;
        }
        true
    }

    /// Has the blocks that were bad twice read from where their newest versions are, up to where a piece has come.
    fn read_repair(&mut self, piece: &Piece, again: &mut Again, payload: &mut impl Payload) {
        let blocks = core::mem::take(&mut again.bad);
        if blocks == 0 {
            return;
        }
        if !self.has_tokens_for(blocks) {
            // The cache device fails many more at once. Whoever reads it again misses it.
            return self.fail(piece.request, RequestError::Io);
        }
        self.read_again(repair(piece, again.at - blocks, blocks), payload); // R4
    }

    /// Whether what goes wrong may take so many tokens more than what goes well.
    fn has_tokens_for(&self, count: u16) -> bool {
        self.token_room() >= TOKENS_KEPT / 2 + usize::from(count)
    }

    /// A copy of what the backing device has is bad: from now on the block is read from there. Says whether
    /// that was the block's newest version, and whether there was room to cut an extent in two.
    pub(crate) fn forget_bad(
        &mut self,
        volume: VolumeIndex,
        lba: Lba,
        segment: SegmentId,
        block: u16,
    ) -> bool {
        let slot = self.segments.slot(segment, block);
        if !self.volume(volume).extents.has_room() || !self.index.remove(volume, lba, slot) {
            return false;
        }
        self.checkpoint_forgets();
        // The backing device's version is the newest now: an older extent must not come forth.
        let position = self.segments.position(segment, block);
        let state = self.volume(volume);
        state.forgot = state.forgot.max(position.ordinal());
        if state.extents.get(lba).is_some_and(|extent| extent.position <= position) {
            state.extents.cut(lba);
        }
        true
    }
}
