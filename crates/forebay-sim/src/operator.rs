// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an operator does while the guest works: checkpoints, modes, drains, volumes that come and
//! go.

use crate::checkers::watermark_is_prefix::Prefix;
use crate::random::Random;
use crate::run::{WAIT_MAX, drain_all, drain_one, overwrites_more, stays_dirty};
use crate::setup::{CUTOFFS, ORDERS, RESERVES, TARGETS, WEIGHTS};
use crate::world::{Failure, Outcome, World};
use forebay_core::format::superblock::{Head, Mode, Order, Superblock};
use forebay_core::policy::reserve::{Reserve, resolve};
use forebay_core::policy::scrub::{Outcome as Ending, Refused, Report};
use forebay_core::units::{Ordinal, Sequence, VolumeIndex};

impl World {
    /// Does one thing.
    pub fn operate(&mut self) -> Outcome {
        let index = self.random.below(self.volumes.len() as u64) as usize;
        if self.late == Some(index) {
            return self.serve_late();
        }
        if !self.volumes[index].attached {
            return self.attach(index);
        }
        if overwrites_more(self) && !stays_dirty(self, index) {
            return self.change_mode(index, Mode::WriteBack);
        }
        // By a chance of its own: all else is what it was.
        let mut shares = Random::new(self.order ^ 0x5A_4E5);
        if shares.one_in(4) {
            self.change_shares(index, &mut shares)?;
        }
        if shares.one_in(4) {
            self.change_reserve(index, *shares.pick(&RESERVES))?;
        }
        let mut sizes = Random::new(self.order ^ 0x517E5);
        if sizes.one_in(4) {
            self.begin_to_resize(&mut sizes)?;
        }
        match self.random.below(7) {
            0 | 1 => {
                self.marks.hit("checkpoint at a moment of chance");
                self.engine.as_mut().expect("there is a process").want_checkpoint();
                self.put_in_order()
            }
            2 if self.random.one_in(2) => self.change_order(index),
            2 | 3 => {
                let modes = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround];
                let mode = *self.random.pick(&modes);
                self.change_mode(index, mode)
            }
            4 => {
                self.marks.hit("drain in mid-run");
                let engine = self.engine.as_mut().expect("there is a process");
                engine.drain(VolumeIndex(index as u8), &mut self.memory);
                self.drain_effects()
            }
            6 if self.volumes[index].growing.is_none() => self.begin_to_grow(index),
            _ if self.attached().len() > 1 && self.random.one_in(2) => self.detach(index),
            _ => self.drain_all_and_compare(),
        }
    }

    /// The log is read and healed in the background, from now on or no longer.
    pub fn scrub(&mut self) -> Outcome {
        self.rot_before_scrub();
        let only = self.random.below(2 * self.volumes.len() as u64) as usize;
        let only = (only < self.volumes.len()).then_some(VolumeIndex(only as u8));
        let engine = self.engine.as_mut().expect("there is a process");
        if engine.scrub(only, &mut self.memory) == Err(Refused::Running) && self.random.one_in(8) {
            self.marks.hit("scrub stopped");
            engine.stop_scrub();
        }
        self.drain_effects()
    }

    /// Marks what a scrub has come to.
    pub(crate) fn watch_scrub(&mut self) {
        let report = self.engine.as_ref().expect("there is a process").scrub_report();
        if self.scrubbed == *report {
            return;
        }
        let report = *report;
        let before = std::mem::replace(&mut self.scrubbed, report);
        let before = if before.began_at == report.began_at { before } else { Report::default() };
        let counts = [
            ("scrub healed a block", before.healed_blocks, report.healed_blocks),
            ("scrub found a lost block", before.lost_blocks, report.lost_blocks),
            ("scrub found a block nobody needs", before.unneeded_blocks, report.unneeded_blocks),
            ("scrub found a bad header", before.bad_headers, report.bad_headers),
            ("scrub saved what a bad header held", before.saved_headers, report.saved_headers),
        ];
        for (name, before, now) in counts {
            if now > before {
                self.marks.add(name, now - before);
                self.tell(|| name.into());
            }
        }
        if report.outcome == Ending::Completed && before.outcome != Ending::Completed {
            self.marks.hit("scrub completed");
        }
    }

    /// A volume leaves the cache in mid-run: drained, then without a trace. Its backing device is the plain
    /// disk, and the others get its segments.
    pub fn detach(&mut self, index: usize) -> Outcome {
        let fails = self.volumes.iter().any(|volume| volume.device.failed);
        // What was lost is not to be forgotten.
        if self.cache_failed || fails || self.setup.rot > 0 {
            return Ok(());
        }
        self.cancel_growth(index)?;
        drain_one(self, index)?;
        if self.cache_failed || self.volumes[index].flush_failed {
            return Ok(());
        }
        let at = VolumeIndex(index as u8);
        self.engine.as_mut().expect("there is a process").serve(at, false);
        let begun = self.now;
        while !self.engine.as_ref().is_some_and(|engine| engine.may_detach(at)) {
            if self.cache_failed || !self.step()? || self.now - begun > WAIT_MAX {
                // A failed cache keeps what it has.
                self.engine.as_mut().expect("there is a process").serve(at, true);
                return Ok(());
            }
        }
        self.marks.hit("volume detached in mid-run");
        let engine = self.engine.as_ref().expect("there is a process");
        let watermark = engine.durable_watermark(at).expect("it is attached");
        self.memory.lives.detach(at, watermark).map_err(Failure)?;
        self.superblock.volumes[index] = None;
        self.write_superblock();
        let engine = self.engine.as_mut().expect("there is a process");
        engine.detach(at, &mut self.memory);
        self.volumes[index].attached = false;
        self.around.get_mut(index).map(std::mem::take);
        self.drain_effects()
    }

    /// From the next write on a volume takes writes differently.
    pub(crate) fn change_mode(&mut self, index: usize, mode: Mode) -> Outcome {
        let before = self.volumes[index].mode;
        if mode != before {
            self.marks.hit("mode changed in mid-run");
        }
        let volume = &mut self.volumes[index];
        volume.mode = mode;
        volume.mode_changes += 1;
        if volume.may_bypass() {
            volume.bypasses();
        }
        if let Some(recorded) = &mut self.superblock.volumes[index] {
            (recorded.mode, recorded.drained) = (mode, false);
        }
        self.write_superblock();
        let engine = self.engine.as_mut().expect("there is a process");
        engine.set_mode(VolumeIndex(index as u8), mode, &mut self.memory);
        self.drain_effects()
    }

    /// From the next batch on a lost cache leaves something else, and other writes go around the log.
    fn change_order(&mut self, index: usize) -> Outcome {
        let (order, cutoff) = (*self.random.pick(&ORDERS), *self.random.pick(&CUTOFFS));
        self.marks.hit("order changed in mid-run");
        self.set_order(index, order, cutoff)
    }

    /// The same, of the operator's choice.
    pub fn set_order(&mut self, index: usize, order: Order, cutoff: u32) -> Outcome {
        let engine = self.engine.as_mut().expect("there is a process");
        let at = VolumeIndex(index as u8);
        let volume = &mut self.volumes[index];
        if volume.order != order {
            volume.order_since = engine.placed(at);
        }
        (volume.order, volume.cutoff) = (order, cutoff);
        if volume.may_bypass() {
            volume.bypasses();
        }
        if let Some(recorded) = &mut self.superblock.volumes[index] {
            (recorded.order, recorded.cutoff) = (order, cutoff);
        }
        engine.set_cutoff(at, cutoff);
        engine.set_order(at, order, &mut self.memory);
        self.write_superblock();
        self.drain_effects()
    }

    /// From now on guests have another share of the backing device.
    fn change_shares(&mut self, index: usize, random: &mut Random) -> Outcome {
        let shares = (*random.pick(&WEIGHTS), *random.pick(&TARGETS));
        self.marks.hit("shares changed in mid-run");
        self.volumes[index].shares = shares;
        if let Some(recorded) = &mut self.superblock.volumes[index] {
            (recorded.weight, recorded.p99_target) = shares;
        }
        let at = VolumeIndex(index as u8);
        let engine = self.engine.as_mut().expect("there is a process");
        engine.set_weight(at, shares.0);
        engine.set_p99_target(at, shares.1);
        self.write_superblock();
        self.drain_effects()
    }

    /// From now on a volume has another part of the cache for itself, if there is room for it.
    pub fn change_reserve(&mut self, index: usize, reserve: Reserve) -> Outcome {
        if !self.reserves_fit(index, reserve) {
            self.marks.hit("reservation refused");
            return Ok(());
        }
        self.marks.hit("reservation changed in mid-run");
        self.volumes[index].reserve = reserve;
        if let Some(recorded) = &mut self.superblock.volumes[index] {
            recorded.reserve = reserve;
        }
        let engine = self.engine.as_mut().expect("there is a process");
        engine.set_reserve(VolumeIndex(index as u8), reserve, &mut self.memory);
        self.write_superblock();
        self.drain_effects()
    }

    /// Whether a volume may have that, too, if it is attached.
    fn reserves_fit(&self, index: usize, reserve: Reserve) -> bool {
        let others = self.recorded().filter(|other| *other != index);
        let all: Vec<_> =
            others.map(|other| self.volumes[other].reserve).chain([reserve]).collect();
        let count = |size| self.superblock.resized(size).map_or(u32::MAX, |it| it.segment_count);
        let then = self.resizing.map_or(u32::MAX, count);
        self.has_room_for(&all, then.min(self.superblock.segment_count))
    }

    /// Whether all that is attached may keep what it has in a cache of so many segments.
    pub(crate) fn reserves_fit_into(&self, segments: u32) -> bool {
        let all: Vec<_> = self.recorded().map(|index| self.volumes[index].reserve).collect();
        self.has_room_for(&all, segments)
    }

    fn has_room_for(&self, all: &[Reserve], segments: u32) -> bool {
        let blocks = self.superblock.segment_blocks();
        resolve(segments, blocks, all.iter().copied()).check().is_ok()
    }

    /// A volume that is served has of the cache what the operator gave it.
    pub(crate) fn check_reserve(&self, index: usize) {
        let engine = self.engine.as_ref().expect("there is a process");
        let status = engine.status(VolumeIndex(index as u8)).expect("it is attached");
        assert_eq!(status.reserve, self.volumes[index].reserve, "volume {index}: reservation");
    }

    /// A volume that is about to be served is on the disk that all are on.
    pub(crate) fn join_disk(&mut self, index: usize) {
        if !self.setup.one_disk {
            return;
        }
        let whole = self.flushes_disk(index);
        let engine = self.engine.as_mut().expect("there is a process");
        if whole {
            engine.flushes_disk(VolumeIndex(index as u8));
        }
        let other = (0..self.volumes.len())
            .find(|other| *other != index && engine.is_served(VolumeIndex(*other as u8)));
        if let Some(other) = other {
            engine.share_disk(VolumeIndex(index as u8), VolumeIndex(other as u8));
        }
    }

    /// A volume that is served has the shares that the operator gave it.
    pub(crate) fn check_shares(&self, index: usize) {
        let engine = self.engine.as_ref().expect("there is a process");
        let status = engine.status(VolumeIndex(index as u8)).expect("it is attached");
        let target = status.sharing.target.map_or(0, |target| target.nanos / 1_000);
        let found = (status.sharing.weight, target as u32);
        assert_eq!(found, self.volumes[index].shares, "volume {index}: shares");
    }

    /// Every volume's backing device alone is the disk then. The cache holds nothing that is not
    /// there: now and then it fails at once.
    fn drain_all_and_compare(&mut self) -> Outcome {
        if self.cache_failed || self.volumes.iter().any(|volume| volume.device.failed) {
            return Ok(());
        }
        drain_all(self)?;
        self.marks.hit("drained and compared in mid-run");
        if self.random.one_in(4) {
            self.cache_fails_next = true;
        }
        for index in self.attached() {
            if self.random.one_in(2) {
                let mode = self.volumes[index].mode;
                self.change_mode(index, mode)?;
            }
        }
        Ok(())
    }

    /// A volume joins the cache.
    pub fn attach(&mut self, index: usize) -> Outcome {
        if !self.reserves_fit(index, self.volumes[index].reserve) {
            // It would be refused. The operator gives up what is reserved.
            for other in self.attached() {
                self.change_reserve(other, Reserve::Share)?;
            }
            self.volumes[index].reserve = Reserve::Share;
        }
        self.marks.hit("volume attached in mid-run");
        let mut recorded =
            self.setup.superblock.volumes[index].clone().expect("the setup has every volume");
        recorded.attach_generation = (self.superblock.sequence + 1) as u32;
        recorded.size_bytes = self.volumes[index].size_bytes;
        recorded.mode = self.volumes[index].mode;
        (recorded.order, recorded.cutoff) = (self.volumes[index].order, self.volumes[index].cutoff);
        (recorded.weight, recorded.p99_target) = self.volumes[index].shares;
        recorded.reserve = self.volumes[index].reserve;
        self.superblock.volumes[index] = Some(recorded.clone());
        self.write_superblock();
        let at = VolumeIndex(index as u8);
        let engine = self.engine.as_mut().expect("there is a process");
        engine.attach(at, &recorded);
        self.join_disk(index);
        let engine = self.engine.as_mut().expect("there is a process");
        engine.serve(at, true);
        let volume = &mut self.volumes[index];
        volume.attached = true;
        (volume.closed, volume.floor, volume.order_since) = (None, Sequence(0), Sequence(0));
        if volume.prefix.is_some() {
            let found = |cell| {
                let lba = volume.lba(cell);
                let (now, later) = (volume.device.read(lba), volume.device.durable(lba));
                let stays = now.tags() == later.tags() && volume.device.is_settled(lba);
                stays.then(|| *now.tags())
            };
            volume.prefix = Some(Prefix::new((0..volume.cells()).map(found)));
        }
        Ok(())
    }

    /// At a clean stop: a volume with nothing dirty leaves the cache.
    pub(crate) fn forget_volume(&mut self, superblock: &mut Superblock, index: usize) {
        self.marks.hit("volume forgotten");
        superblock.volumes[index] = None;
        self.volumes[index].attached = false;
        self.volumes[index].untold = None;
    }

    /// Before a volume with nothing dirty is served: what the cache holds of it is dropped, as when
    /// its backing device was changed by others.
    pub(crate) fn forget_data(&mut self, index: usize) {
        self.marks.hit("volume's data forgotten");
        self.around.get_mut(index).map(std::mem::take);
        self.volumes[index].closed = None;
        self.volumes[index].floor = Sequence(0);
        self.volumes[index].order_since = Sequence(0);
        let generation = (self.superblock.sequence + 1) as u32;
        if let Some(recorded) = &mut self.superblock.volumes[index] {
            recorded.attach_generation = generation;
            recorded.head = Head::NONE;
            recorded.watermark = Sequence(0);
            recorded.tail = Ordinal(1);
            recorded.frozen = false;
        }
        self.write_superblock();
        let recorded = self.superblock.volumes[index].clone().expect("it is attached");
        let engine = self.engine.as_mut().expect("there is a process");
        engine.forget_data(VolumeIndex(index as u8), &recorded, &mut self.memory);
    }
}
