// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end of a shard: what is under way comes to rest, and the next program is given all, or the superblock notes a clean stop.

use super::{OpenError, Shard, system};
use crate::handover::{self, Handed};
use crate::host::identity::Fingerprint;
use crate::io::{Device, DeviceKind, lasting};
use forebay_core::control::VolumeStatus;
use forebay_core::engine::CacheHealth;
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::units::VolumeIndex;
use std::time::{Duration, Instant};

impl Shard {
    /// Lets what is under way end, the batch that is written back as well, and makes everything durable. Nobody hears of
    /// requests any more: what waits for more than that is given up. Whether it was done within `limit`; from then on no backing device is written to.
    pub fn quiesce(&mut self, limit: Duration) -> Result<bool, OpenError> {
        let begun = Instant::now();
        self.cancel_resize();
        self.engine.stop_writeback();
        self.engine.want_checkpoint();
        self.engine.sync(&mut self.memory);
        self.engine.give_up_writes(&mut self.memory);
        self.run_effects();
        while !(self.engine.is_quiet() && self.engine.is_checkpointed() && self.done.is_empty()) {
            if begun.elapsed() > limit {
                return Ok(false);
            }
            self.turn_unheard()?;
        }
        Ok(true)
    }

    /// A turn of which nobody hears.
    fn turn_unheard(&mut self) -> Result<(), OpenError> {
        self.free_tags.extend(self.answers.drain(..).map(|(tag, _)| tag));
        let wait = Some(Duration::from_millis(100));
        self.turn(wait, &mut Vec::new()).map_err(system("wait for the devices"))
    }

    /// Nobody asks for anything any more: what is dirty of these volumes, which are drained, is what guests were waiting for. It goes to
    /// their backing devices as far as they take it within `limit`.
    pub fn settle(&mut self, drained: &[VolumeIndex], limit: Duration) -> Result<(), OpenError> {
        let begun = Instant::now();
        while drained.iter().any(|index| self.is_unsettled(*index)) && begun.elapsed() < limit {
            self.turn_unheard()?;
        }
        Ok(())
    }

    /// Whether something is dirty that the backing device may take.
    fn is_unsettled(&self, index: VolumeIndex) -> bool {
        let status = self.engine.status(index).filter(|it| it.serving && it.dirty);
        let refuses = |it: &VolumeStatus| it.parked_blocks > 0 || it.frozen || it.backing_failing;
        self.engine.health() != CacheHealth::Failed && status.is_some_and(|it| !refuses(&it))
    }

    /// The next program goes on with the guests of this one, whether it is handed the cache or not: they are not to forget what
    /// failed (A3 in `op/around.rs`).
    pub fn keep_flush_failures(&mut self) {
        self.engine.keep_flush_failures();
    }

    /// The first step of [`Shard::hand_over`], while guests are still served: batches and checkpoints end,
    /// and no other begins.
    pub fn prepare_hand_over(&mut self) {
        self.engine.prepare_hand_over();
    }

    /// Whether they have ended.
    pub fn is_prepared(&self) -> bool {
        self.engine.is_prepared()
    }

    /// No request comes any more: those inside are answered, also if they wait for a batch.
    pub fn answer_the_rest(&mut self) {
        self.engine.answer_the_rest(&mut self.memory);
        self.run_effects();
    }

    /// Gives the cache to the next program, when no request comes any more: nothing may be done with the
    /// shard afterwards. None: it could not be brought to rest within `limit`, and can be closed as ever.
    pub fn hand_over(&mut self, limit: Duration) -> Result<Option<Handed>, OpenError> {
        let begun = Instant::now();
        self.cancel_resize();
        self.engine.prepare_hand_over();
        self.engine.end_logs(&mut self.memory);
        let mut foreign = Vec::new();
        while !(self.engine.may_hand_over() && self.done.is_empty() && self.naming.is_none()) {
            if begun.elapsed() > limit || self.engine.health() == CacheHealth::Failed {
                return Ok(None);
            }
            if self.engine.is_quiet() {
                // What was under way may have begun another segment.
                self.engine.end_logs(&mut self.memory);
            }
            foreign.clear();
            self.answers.clear();
            let wait = Some(Duration::from_millis(100));
            self.turn(wait, &mut foreign).map_err(system("wait for the devices"))?;
        }
        let message = handover::file_of(&self.engine.hand_over(&self.superblock))
            .map_err(system("take memory"))?;
        let (cells, rows) = self.engine.tables();
        let lasts = [self.files[0].is_some(), self.files[1].is_some()];
        let [cells_file, rows_file] = std::mem::take(&mut self.files);
        let table = system("take memory");
        let cells = cells_file.map_or_else(|| lasting::copied(cells), Ok).map_err(&table)?;
        let rows = rows_file.map_or_else(|| lasting::copied(rows), Ok).map_err(&table)?;
        Ok(Some(Handed { message, tables: [cells, rows], lasts }))
    }

    /// Makes everything durable and notes it in the superblock: a clean stop. Gives up after
    /// `limit`, which is then no clean stop, and loses nothing either.
    pub fn close(mut self, limit: Duration) -> Result<bool, OpenError> {
        Ok(self.quiesce(limit)? && self.finish()?)
    }

    /// Gives the backing device of a volume away, after [`Shard::quiesce`]: it does not answer, so it is not flushed, as one that is not there.
    pub fn take_backing(&mut self, index: VolumeIndex) -> Option<Box<dyn Device>> {
        self.backings[usize::from(index.0)].take()
    }

    /// Notes in the superblock that everything is durable: the end of a clean stop, after [`Shard::quiesce`]. The devices
    /// are nobody else's before the shard is dropped.
    pub fn finish(&mut self) -> Result<bool, OpenError> {
        debug_assert!(self.engine.is_quiet(), "what is under way would not be in the superblock");
        if self.engine.health() == CacheHealth::Failed {
            return Ok(false);
        }
        self.engine.note_heads(&mut self.superblock);
        let clean = self.flush_backings();
        self.superblock.clean = clean;
        self.write_superblock()?;
        if !clean {
            return Ok(false);
        }
        if let Some(path) = &self.shared_path {
            // Stale from now on in any case: the next opening raises the generation.
            let _ = std::fs::remove_file(path);
        }
        Ok(true)
    }

    /// Flushes the backing devices that still may lose what went around a log, and notes where that fails: whoever opens the cache
    /// after a clean stop need not know that there were such writes, but whoever opens it must know of those that may be lost and
    /// that the guest was not told of (A3 in `op/around.rs`). Says whether all went well: who is waited for cannot be flushed.
    fn flush_backings(&mut self) -> bool {
        let (mut lost, mut clean) = ([false; VOLUME_COUNT_MAX], true);
        for index in 0..VOLUME_COUNT_MAX {
            let at = VolumeIndex(index as u8);
            if !self.engine.wants_backing_flush(at) {
                continue;
            }
            let Some(device) = &self.backings[index] else {
                clean = false;
                continue;
            };
            if device.sync().is_err() {
                lost[index] = true;
                // So have those on its disk whose turn is still to come, and those that wait for their device (F2 in `policy/flushes.rs`).
                if device.info().kind == DeviceKind::Block {
                    let others = self.on_same_disk(at).map(|other| usize::from(other.0));
                    others.filter(|other| *other > index).for_each(|other| lost[other] = true);
                    let waiting = self.backings.iter().zip(&mut lost);
                    waiting.filter(|(it, _)| it.is_none()).for_each(|(_, lost)| *lost = true);
                }
            }
        }
        let wants = |index: usize| self.engine.wants_backing_flush(VolumeIndex(index as u8));
        for (index, recorded) in self.superblock.volumes.iter_mut().enumerate() {
            let Some(recorded) = recorded.as_mut().filter(|_| lost[index] && wants(index)) else {
                continue;
            };
            (clean, recorded.flush_failed) = (false, true);
            // What it showed it may not have: it is not to be taken for a change by others.
            if let Ok(found) = Fingerprint::decode(&recorded.fingerprint) {
                recorded.fingerprint = found.without_content().encode();
            }
        }
        clean
    }
}
