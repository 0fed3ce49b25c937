// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is looked at after every event: what was placed, how far write-back has come, and whether the backing devices hold what
//! they must.

use crate::block::Block;
use crate::checkers::around_keeps_order::Reached;
use crate::checkers::watermark_is_prefix::Change;
use crate::device::Piece;
use crate::guest::Asked;
use crate::world::{Failure, Outcome, World};
use forebay_core::effect::Effect;
use forebay_core::engine::CacheHealth;
use forebay_core::format::entry::Kind;
use forebay_core::format::superblock::Order;
use forebay_core::policy::writeback::Stage;
use forebay_core::units::{Sequence, VolumeIndex};

impl World {
    /// Tells the checkers what was placed.
    pub(crate) fn take_placed(&mut self) -> Outcome {
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
            self.placed_around(volume, (kind, sequence), &cells)?;
            let floor = self.volumes[volume].floor;
            if let Some(prefix) = &mut self.volumes[volume].prefix {
                prefix.placed(Change { sequence, kind, cells, content, floor });
            }
        }
        Ok(())
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

    fn placed_around(
        &mut self,
        volume: usize,
        (kind, sequence): (Kind, Sequence),
        cells: &[usize],
    ) -> Outcome {
        let at = VolumeIndex(volume as u8);
        let watermark = self.engine.as_ref().and_then(|it| it.watermark(at)).unwrap_or_default();
        let Some(around) = self.around.get_mut(volume) else { return Ok(()) };
        let mut placed = |cell: &usize| around.placed(*cell as u64, kind, sequence, watermark);
        cells.iter().try_for_each(&mut placed).map_err(Failure)
    }

    /// A batch has changed these blocks of a backing device.
    pub(crate) fn went_back(&mut self, volume: VolumeIndex, first: u64, blocks: u64) {
        let index = usize::from(volume.0);
        let number = self.volumes[index].device.flush_begin();
        let cells = self.cells(index, first, first + blocks);
        let Some(around) = self.around.get_mut(index) else { return };
        cells.iter().for_each(|(cell, _)| around.written_back(*cell as u64, number));
    }

    /// A write around the log is asked of a backing device.
    pub(crate) fn watch_around(&mut self, effect: &Effect) -> Outcome {
        let Effect::WriteAround { volume, tag, .. } = *effect else { return Ok(()) };
        // Past a failed cache nothing comes back from it.
        if self.cache_failed {
            return Ok(());
        }
        let Asked { first, end, .. } = self.asked[&u64::from(tag)];
        let index = usize::from(volume.0);
        let engine = self.engine.as_ref().expect("there is a process");
        let reached = Reached {
            durable: self.durable.through(volume.0.into()),
            watermark: engine.watermark(volume).unwrap_or_default(),
            durable_watermark: engine.durable_watermark(volume).unwrap_or_default(),
        };
        let since = engine.around_since(tag).expect("it goes around");
        let cells = self.cells(index, first, end);
        let Some(around) = self.around.get_mut(index) else { return Ok(()) };
        let mut issued = |(cell, _): &(usize, u64)| around.issued(*cell as u64, since, reached);
        cells.iter().try_for_each(&mut issued).map_err(Failure)
    }

    /// No batch has ended too early.
    pub(crate) fn check_around(&self) -> Outcome {
        let engine = self.engine.as_ref().expect("there is a process");
        for (index, around) in self.around.iter().enumerate() {
            let watermark = engine.watermark(VolumeIndex(index as u8)).unwrap_or_default();
            around.reached(watermark).map_err(Failure)?;
        }
        Ok(())
    }

    /// What failed is remembered: of the cache device by the engine, of a backing device by what outlives the process (A3 of `op::around`).
    pub(crate) fn check_failures(&mut self) -> Outcome {
        if !self.setup.watched {
            return Ok(());
        }
        let engine = self.engine.as_ref().expect("there is a process");
        let status = |index: usize| engine.status(VolumeIndex(index as u8));
        let count = self.volumes.len();
        for (index, recorded) in self.superblock.volumes.iter().enumerate().take(count) {
            let failed = self.volumes[index].flush_failed;
            let told = recorded.as_ref().is_some_and(|recorded| recorded.flush_failed)
                || self.memory.failed_flushes & 1 << index != 0;
            if failed && !told && status(index).is_some_and(|status| status.flush_failed) {
                return Err(Failure(format!(
                    "a flush of volume {index} failed, and neither memory nor the superblock says so"
                )));
            }
        }
        if engine.health() == CacheHealth::Failed {
            let durable = (0..count).map(|index| status(index).map(|status| status.durable));
            let durable = durable.collect();
            self.durable.failed(durable).map_err(Failure)?;
        }
        Ok(())
    }

    /// A write around the log is issued, or done with these bytes.
    pub(crate) fn goes_around(&mut self, index: usize, tag: u32, done: Option<&[Piece]>) {
        let asked = &self.asked[&u64::from(tag)];
        let cells = self.cells(index, asked.first, asked.end);
        if let Some(around) = self.around.get_mut(index)
            && done.is_some()
        {
            cells.iter().for_each(|(cell, _)| around.went_around(*cell as u64));
        }
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
