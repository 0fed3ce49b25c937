// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is looked at after every event: what was placed, how far write-back has come, and whether the backing devices hold what
//! they must.

use crate::block::Block;
use crate::checkers::watermark_is_prefix::Change;
use crate::device::Piece;
use crate::world::{Failure, Outcome, World};
use forebay_core::format::entry::Kind;
use forebay_core::format::superblock::Order;
use forebay_core::policy::writeback::Stage;
use forebay_core::units::VolumeIndex;

impl World {
    /// Tells the checkers what was placed.
    pub(crate) fn take_placed(&mut self) {
        for (entry, content) in std::mem::take(&mut self.memory.placed) {
            let volume = usize::from(entry.volume.0);
            let end = entry.lba.0 + u64::from(entry.count);
            let cells: Vec<usize> =
                self.cells(volume, entry.lba.0, end).iter().map(|cell| cell.0).collect();
            let (sequence, kind) = (entry.sequence, entry.kind);
            if kind == Kind::Parked {
                self.tell(|| format!("parked {entry:?}"));
                self.marks.hit("block parked");
            }
            self.count_overwritten(volume, kind, &cells);
            let floor = self.volumes[volume].floor;
            if let Some(prefix) = &mut self.volumes[volume].prefix {
                prefix.placed(Change { sequence, kind, cells, content, floor });
            }
        }
    }

    /// Of data that guests wrote, how much was superseded before write-back came to it.
    fn count_overwritten(&mut self, volume: usize, kind: Kind, cells: &[usize]) {
        if !matches!(kind, Kind::Data | Kind::Zero | Kind::Discard) {
            return;
        }
        for cell in cells {
            let dirty =
                std::mem::replace(&mut self.volumes[volume].dirty[*cell], kind == Kind::Data);
            if dirty {
                self.marks.hit("dirty block overwritten");
            }
            if kind == Kind::Data {
                self.marks.hit("dirty block");
            }
        }
    }

    /// Where a watermark has become durable, the backing device is compared with the log up to it.
    pub(crate) fn check_watermarks(&mut self) -> Outcome {
        for index in 0..self.volumes.len() {
            let engine = self.engine.as_ref().expect("there is a process");
            let watermark = engine.durable_watermark(VolumeIndex(index as u8));
            let state = &mut self.volumes[index];
            let (Some(prefix), Some(watermark)) = (&mut state.prefix, watermark) else { continue };
            if !prefix.advance(watermark) {
                continue;
            }
            let state = &self.volumes[index];
            let (strict, since) = (state.order == Order::Strict, state.order_since);
            self.marks.hit("watermark checked");
            if since > watermark {
                self.marks.hit("watermark checked before what another order placed");
            }
            let prefix = state.prefix.as_ref().expect("looked");
            for cell in 0..state.cells() {
                let lba = state.lba(cell);
                let mask = state.mask(lba);
                // One that a crash broke off may have gone further.
                let compare = |content: &Block| match strict {
                    true => prefix.compare_strict(cell, content, mask, since),
                    false if since > watermark => {
                        prefix.compare_changed(cell, content, mask, since)
                    }
                    false => prefix.compare(cell, content, mask),
                };
                compare(&state.device.read(lba)).map_err(Failure)?;
                if !prefix.is_unflushed(cell) {
                    compare(&state.device.durable(lba)).map_err(Failure)?;
                }
            }
        }
        Ok(())
    }

    /// A write around the log is issued, or done with these bytes.
    pub(crate) fn goes_around(&mut self, index: usize, tag: u32, done: Option<&[Piece]>) {
        let asked = &self.asked[&u64::from(tag)];
        let cells = self.cells(index, asked.first, asked.end);
        let Some(prefix) = &mut self.volumes[index].prefix else { return };
        for (cell, lba) in cells {
            let piece = done.map(|pieces| pieces.iter().find(|piece| piece.0 == lba));
            prefix.around(cell, piece.flatten().map(|piece| (piece.1, &piece.2)));
        }
    }

    /// Marks where write-back of each volume has come to, and what became of the cache device.
    pub(crate) fn watch(&mut self) {
        let engine = self.engine.as_ref().expect("there is a process");
        for index in 0..self.volumes.len() {
            let Some(status) = engine.status(VolumeIndex(index as u8)) else { continue };
            let seen = (status.writeback, status.drained, status.frozen);
            let before = self.volumes[index].seen.replace(seen);
            if before == Some(seen) {
                continue;
            }
            // A7: a batch of this order begins behind a flush of what went around the log.
            let begins = status.writeback == Stage::Writing
                && !matches!(before, Some((Stage::Writing | Stage::Flushing, ..)));
            if let Some(prefix) = &mut self.volumes[index].prefix
                && begins
                && status.order == Order::Batch
                && !status.flush_failed
            {
                prefix.around_flushed();
            }
            self.marks.hit(match status.writeback {
                Stage::Idle => "write-back idle",
                Stage::Writing => "write-back writing",
                Stage::Flushing => "write-back flushing",
                Stage::Noting => "write-back noting",
                Stage::Waiting { .. } => "write-back waiting",
            });
            if status.drained {
                self.marks.hit("volume drained");
            }
            if status.frozen {
                self.marks.hit("volume frozen");
            }
        }
    }
}
