// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cache becomes larger or smaller while the guest works, wherever the machine stops on the way.

use crate::checkers::memory_is_bounded::Bound;
use crate::opening::{Reader, pieces};
use crate::random::{Random, mix};
use crate::world::{Failure, Outcome, World};
use forebay_core::format::checkpoint::Areas;
use forebay_core::format::pair::{self, Step};
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::log::handover::Tables;
use forebay_core::log::resize::Stage;
use forebay_core::map::slots::ROW_BYTES;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, VolumeIndex};
use std::cmp::Ordering;

impl World {
    /// The cache is to have another number of segments, if that can be.
    pub fn begin_to_resize(&mut self, random: &mut Random) -> Outcome {
        if self.resizing.is_some() || self.cache_failed {
            return Ok(());
        }
        let now = self.superblock.segment_count;
        let (least, most) = self.setup.segments;
        let wanted = random.between(least.into(), most.into()) as u32;
        if wanted < now && !self.may_be_emptied() {
            return Ok(());
        }
        let Some(size_bytes) = self.size_for(wanted) else { return Ok(()) };
        let next = self.next_superblock(size_bytes);
        if !self.reserves_fit_into(next.segment_count) {
            self.marks.hit("too small for what is reserved");
            return Ok(());
        }
        self.tell(|| format!("from {now} to {} segments", next.segment_count));
        self.cache.grow(self.cache.blocks().max(size_bytes / BLOCK_BYTES), Vec::new());
        self.resizing = Some(size_bytes);
        let engine = self.engine.as_mut().expect("there is a process");
        engine.begin_to_resize(next.segment_count);
        self.put_in_order()
    }

    /// Whether every log can be written back: else its segments are not to be had.
    fn may_be_emptied(&self) -> bool {
        let engine = self.engine.as_ref().expect("there is a process");
        self.volumes.iter().enumerate().all(|(index, volume)| {
            let frozen = engine.status(VolumeIndex(index as u8)).is_some_and(|it| it.frozen);
            !volume.device.failed && !frozen && self.late != Some(index)
        })
    }

    /// The size nearest to this one with so many segments, or some that lie between that and now.
    fn size_for(&self, wanted: u32) -> Option<u64> {
        let (now, step) = (self.superblock.size_bytes, u64::from(self.superblock.segment_bytes));
        let count = |size: u64| self.superblock.resized(size).map_or(0, |it| it.segment_count);
        let (least, most) = self.setup.segments;
        let (low, high) = match wanted.cmp(&self.superblock.segment_count) {
            Ordering::Less => (least, wanted),
            Ordering::Equal => return None,
            Ordering::Greater => (wanted, most),
        };
        let size = |at: u64| match wanted < self.superblock.segment_count {
            true => now.saturating_sub(at * step),
            false => now + at * step,
        };
        (1..2 * u64::from(most)).map(size).find(|size| (low..=high).contains(&count(*size)))
    }

    /// The superblock gets the new size when that may be. Says whether something was done.
    pub(crate) fn go_on_resizing(&mut self, alone: bool) -> Result<bool, Failure> {
        let Some(size_bytes) = self.resizing else { return Ok(false) };
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0x6122));
        let engine = self.engine.as_ref().expect("there is a process");
        let (stage, ready) = (engine.resize_stage(), engine.may_resize());
        if self.memory.dead || self.cache_failed {
            return Ok(false);
        }
        let smaller = size_bytes < self.superblock.size_bytes;
        if random.one_in(1500) || ready && random.one_in(300) || smaller && !self.may_be_emptied() {
            self.marks.hit("cache stays as large as it is");
            self.cancel_resize()?;
            return Ok(true);
        }
        if !ready || !(alone || random.one_in(30)) {
            return Ok(false);
        }
        if stage == Some(Stage::Unnaming) {
            self.superblock.checkpoint_sequence = 0;
            self.write_superblock();
            self.engine.as_mut().expect("there is a process").vacate(&mut self.memory);
            self.drain_effects()?;
            return Ok(true);
        }
        let next = self.next_superblock(size_bytes);
        if self.setup.watched {
            self.durable.ends(&next).map_err(Failure)?;
        }
        self.do_steps(&next, usize::MAX);
        let device_bytes = self.cache.blocks() * BLOCK_BYTES;
        if pair::leftover(&next, device_bytes, &mut Reader(&self.cache)).is_some() {
            return Err(Failure(
                "the cache has its size, and a copy of another one is left".into(),
            ));
        }
        let (cells, rows) = Tables::counts(&next);
        let config = *self.engine.as_ref().expect("there is a process").config();
        self.bound = Bound::new(&next, self.volumes.len(), &config);
        let moved = next.checkpoint_at != self.superblock.checkpoint_at;
        self.marks.hit(match (smaller, moved) {
            (false, false) => "cache grown: checkpoints where they were",
            (false, true) => "cache grown: checkpoints elsewhere",
            (true, false) => "cache shrunk: checkpoints where they were",
            (true, true) => "cache shrunk: checkpoints elsewhere",
        });
        self.tell(|| format!("the cache has {} segments", next.segment_count));
        self.superblock = next;
        self.resizing = None;
        let engine = self.engine.as_mut().expect("there is a process");
        let (cells, rows) = (vec![0; cells], vec![[0; ROW_BYTES]; rows]);
        engine.resize(&self.superblock, cells, rows, &mut self.memory);
        self.drain_effects()?;
        Ok(true)
    }

    /// The cache stays as large as it is.
    pub(crate) fn cancel_resize(&mut self) -> Outcome {
        if self.resizing.take().is_none() {
            return Ok(());
        }
        self.engine.as_mut().expect("there is a process").cancel_resize(&mut self.memory);
        self.drain_effects()
    }

    fn next_superblock(&self, size_bytes: u64) -> Superblock {
        let mut next =
            self.superblock.resized(size_bytes).expect("it was looked whether it can be");
        next.sequence += 1;
        self.engine.as_ref().expect("there is a process").note_ends(&mut next);
        next
    }

    /// The first `count` of the steps to another size.
    fn do_steps(&mut self, next: &Superblock, count: usize) {
        let steps = pair::steps(&self.superblock, next, self.setup.config.mutants);
        for step in steps.into_iter().take(count) {
            match step {
                Step::Write(address) => {
                    let bytes = next.encode(address);
                    self.watch_copies(address, &bytes);
                    self.cache.write(pieces(address, &bytes));
                }
                Step::Wipe(address) => {
                    self.watch_copies(address, &[0; BLOCK_SIZE]);
                    self.cache.write(pieces(address, &[0; BLOCK_SIZE]));
                }
                Step::Flush => {
                    let through = self.cache.flush_begin();
                    self.cache.flush_end(through);
                }
            }
        }
    }

    /// The machine stops while the superblock may be being written with another size in it.
    pub(crate) fn stop_resizing(&mut self, random: &mut Random) {
        let Some(size_bytes) = self.resizing.take() else { return };
        let Some(engine) = self.engine.as_ref().filter(|engine| engine.may_resize()) else {
            return;
        };
        if self.memory.dead || random.one_in(8) {
            return;
        }
        if engine.resize_stage() == Some(Stage::Unnaming) {
            self.superblock.checkpoint_sequence = 0;
            self.superblock.sequence += 1;
            let through = self.cache.flush_begin();
            return self.write_superblock_in_part(random.below(5), through);
        }
        self.marks.hit("stopped while the cache's size was written");
        let next = self.next_superblock(size_bytes);
        let count = 1 + random.below(5) as usize;
        let second = Superblock::addresses(next.size_bytes)[1];
        let Areas { at, bytes } = Areas::of(&self.superblock);
        // It may begin in front of them.
        if second < at + 2 * bytes && at < second + SUPERBLOCK_SIZE as u64 {
            self.overwritten_checkpoint = self.superblock.checkpoint_sequence;
        }
        self.do_steps(&next, count);
    }
}
