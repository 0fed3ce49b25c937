// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What devices do when their time has come, or fail to.

use crate::block::Block;
use crate::device::Unflushed;
use crate::flight::Flight;
use crate::guest::Asked;
use crate::memory::behind;
use crate::random::{Random, mix};
use crate::volume::Volume;
use crate::world::World;
use forebay_core::effect::{Effect, Fault};
use forebay_core::payload::Place;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, Lba, VolumeIndex};

impl World {
    /// A device does what it was asked to.
    pub(crate) fn happen(&mut self, flight: &Flight) -> Result<(), Fault> {
        let effect = flight.effect;
        if self.random.one_in(self.setup.rot) && !self.faults_over {
            self.rot();
        }
        if self.cache_gone && flight.is_of_cache() {
            if self.setup.write_through && matches!(effect, Effect::FlushCache { .. }) {
                self.marks.hit("flush answered by a cache device that is gone");
                self.cache.flush_end(flight.through);
                return Ok(());
            }
            if !matches!(effect, Effect::ReadCache { .. }) {
                self.cache_failed("written to while it was gone");
            }
            return Err(Fault);
        }
        let asks = |to| self.mute_in_part && to == Place::Nowhere;
        if self.is_mute() && matches!(effect, Effect::ReadCache { to, .. } if !asks(to)) {
            self.unread_at = self.moment();
            // Clean copies are forgotten, which the log does not say.
            self.volumes.iter_mut().for_each(|volume| volume.clean_forgotten = true);
            return Err(Fault);
        }
        match effect {
            Effect::WriteSuperblock { change, .. } => {
                if self.flush_drops() {
                    // That of the first copy, or that of the second.
                    self.marks.hit("flush of the superblock failed");
                    let steps = *self.chance(0x51E9).pick(&[1, 3]);
                    self.change_superblock(change, steps, flight.through);
                    self.drop_unflushed(self.cache.flush_begin());
                    return Err(Fault);
                }
                self.change_superblock(change, 4, flight.through);
            }
            Effect::WriteCache { .. } | Effect::WriteArea { .. } => {
                let pieces = flight.pieces.clone().or_else(|| self.pieces(&effect));
                let mut pieces = pieces.expect("a write has bytes");
                let fails = self.cache_fails("cache write failed");
                if fails {
                    pieces.truncate(self.random.below(pieces.len() as u64 + 1) as usize);
                }
                self.cache.write(pieces);
                if fails {
                    return Err(Fault);
                }
            }
            Effect::ReadCache { segment, block, blocks, to, .. } => {
                for at in 0..blocks {
                    let address = self.cache_block(segment, block + at);
                    if self.cache.is_unreadable(address) {
                        return Err(Fault);
                    }
                    let content = self.cache.read(address);
                    self.memory.set(behind(to, at), content);
                }
            }
            Effect::FlushCache { .. } => {
                if self.flush_drops() || self.cache_fails("cache flush failed") {
                    self.drop_unflushed(flight.through);
                    return Err(Fault);
                }
                if self.cache_dropped {
                    self.marks.hit("flush answered well beside one that failed");
                }
                self.cache.flush_end(flight.through);
            }
            Effect::ReadBacking { volume, lba, blocks, to, .. } => {
                let fails = match self.is_read_ahead(&effect) {
                    true => self.ahead_fails(volume),
                    false => self.backing_fails(volume, "backing read failed"),
                };
                if fails {
                    return Err(Fault);
                }
                let early = flight.pieces.clone();
                let read =
                    early.unwrap_or_else(|| self.read_backing(usize::from(volume.0), lba, blocks));
                for (at, (_, _, content)) in (0..).zip(read) {
                    if self.memory.set_read(behind(to, at), content) {
                        self.marks.hit("read to where nobody can look");
                    }
                }
            }
            Effect::WriteAround { volume, tag, .. } if self.zeroes(tag) => {
                let Asked { first, end, .. } = self.asked[&u64::from(tag)];
                if self.write_fails(volume, (first, end)) {
                    return Err(Fault);
                }
                self.zero_around(usize::from(volume.0), tag);
            }
            Effect::WriteBacking { volume, .. } | Effect::WriteAround { volume, .. } => {
                let pieces = flight.pieces.clone().or_else(|| self.pieces(&effect));
                let mut pieces = pieces.expect("a write has bytes");
                let range = (pieces[0].0, pieces[0].0 + pieces.len() as u64);
                let fails = self.write_fails(volume, range);
                if fails {
                    // Some of it may be there all the same.
                    pieces.truncate(self.random.below(pieces.len() as u64 + 1) as usize);
                    let device = &self.volumes[usize::from(volume.0)].device;
                    pieces.retain(|piece| !device.refuses(piece.0, piece.0 + 1));
                }
                self.volumes[usize::from(volume.0)].device.write(pieces.clone());
                if fails {
                    if matches!(effect, Effect::WriteAround { .. }) {
                        self.around_fails(usize::from(volume.0), range);
                    }
                    return Err(Fault);
                }
                if let Effect::WriteAround { tag, .. } = effect {
                    self.goes_around(usize::from(volume.0), tag, Some(&pieces));
                    let state = &mut self.volumes[usize::from(volume.0)];
                    state.around_writes.push(state.device.flush_begin());
                } else {
                    self.went_back(volume, range.0, range.1 - range.0);
                }
            }
            Effect::ZeroBacking { volume, lba, blocks, .. }
                if self.write_fails(volume, (lba.0, lba.0 + blocks)) =>
            {
                return Err(Fault);
            }
            Effect::DiscardBacking { volume, lba, blocks, .. }
                if self.write_fails(volume, (lba.0, lba.0 + blocks)) =>
            {
                self.discard_fails(usize::from(volume.0), (lba.0, lba.0 + blocks));
                return Err(Fault);
            }
            Effect::ZeroBacking { volume, lba, blocks, .. } => {
                self.marks.hit("backing zeroed");
                self.zero_backing(usize::from(volume.0), lba, blocks);
                self.went_back(volume, lba.0, blocks);
            }
            Effect::DiscardBacking { volume, lba, blocks, .. } => {
                self.marks.hit("backing discarded");
                let at = volume;
                let volume = &mut self.volumes[usize::from(at.0)];
                let end = (lba.0 + blocks).min(volume.blocks());
                let mask = volume.mask(end - 1);
                volume.device.discard(lba.0, end, mask, &mut self.random);
                self.went_back(at, lba.0, blocks);
            }
            Effect::FlushBacking { volume, .. } => {
                if flight.failed {
                    return Err(Fault);
                }
                let gone = self.volumes[usize::from(volume.0)].device.failed;
                if gone && self.setup.write_through {
                    self.marks.hit("flush answered by a backing device that is gone");
                } else if self.backing_fails(volume, "backing flush failed") {
                    self.disk_flush_failed(volume, flight.through);
                    return Err(Fault);
                }
                self.fail_beside(volume);
                self.volumes[usize::from(volume.0)].flushed(flight.through);
                if let Some(around) = self.around.get_mut(usize::from(volume.0)) {
                    around.flushed(flight.through);
                }
            }
            Effect::MarkStale { volume, .. } => return self.mark_stale(usize::from(volume.0)),
            Effect::Answer { .. } => unreachable!("answers are told at once"),
        }
        Ok(())
    }

    /// Whether nothing can be read of the cache device now.
    pub(crate) fn is_mute(&self) -> bool {
        self.now < self.mute_until && !self.faults_over
    }

    /// Whether a backing device fails to do this.
    fn backing_fails(&mut self, volume: VolumeIndex, name: &'static str) -> bool {
        let failed = self.volumes[usize::from(volume.0)].device.failed;
        if !failed && (self.faults_over || !self.random.one_in(self.setup.backing_fault)) {
            return false;
        }
        self.marks.hit(name);
        let now = self.moment();
        self.volumes[usize::from(volume.0)].failed_at = now;
        true
    }

    /// Whether it fails to read what nobody asked for: that is no reason for anything that a guest asks for to fail.
    fn ahead_fails(&mut self, volume: VolumeIndex) -> bool {
        let failed = self.volumes[usize::from(volume.0)].device.failed;
        failed || !self.faults_over && self.random.one_in(self.setup.backing_fault)
    }

    /// Whether a backing device fails to change these blocks, all of them or one.
    fn write_fails(&mut self, volume: VolumeIndex, range: (u64, u64)) -> bool {
        let index = usize::from(volume.0);
        let refused = !self.faults_over && self.volumes[index].device.refuses(range.0, range.1);
        if refused {
            self.marks.hit("block refused");
            self.volumes[index].failed_at = self.moment();
        }
        let fails = refused || self.backing_fails(volume, "backing write failed");
        if fails {
            for (cell, _) in self.cells(index, range.0, range.1) {
                if let Some(prefix) = &mut self.volumes[index].prefix {
                    prefix.refused(cell);
                }
            }
        }
        fails
    }

    /// Whether the cache device fails to do this: from then on the engine appends nothing.
    fn cache_fails(&mut self, name: &'static str) -> bool {
        let clean = std::mem::take(&mut self.cache_fails_next);
        let fails = !self.faults_over && (clean || self.random.one_in(self.setup.cache_fault));
        if fails {
            if clean {
                self.marks.hit("clean cache failed");
            }
            self.cache_failed(name);
        }
        fails
    }

    fn cache_failed(&mut self, name: &'static str) {
        self.marks.hit(name);
        self.cache_failed = true;
        // What the log holds nothing of may go around it now.
        self.volumes.iter_mut().for_each(Volume::bypasses);
    }

    /// Chance of its own, so that nothing else is another.
    pub(crate) fn chance(&self, what: u64) -> Random {
        Random::new(mix(self.order ^ self.trace ^ what))
    }

    /// Whether a flush of the cache device fails and drops what it should have covered.
    fn flush_drops(&mut self) -> bool {
        let by_chance = !self.faults_over && self.chance(0xF1A5).one_in(self.setup.flush_fault);
        let fails = by_chance || self.flush_fails_next.is_some();
        if fails {
            self.cache_failed("cache flush failed");
        }
        fails
    }

    /// A flush of the cache device failed, that should have covered its writes up to this number.
    pub(crate) fn drop_unflushed(&mut self, through: u64) {
        if let Some(at_once) = self.flush_fails_next.take() {
            self.cache_dropped |= self.cache.flush_drops_all(through);
            let (first, end) = self.segment_blocks();
            let shown = self.cache.dropped_in(first, end).into_iter().filter(|_| at_once);
            shown.for_each(|block| self.cache.evict(block));
            return;
        }
        let mut random = self.chance(0xD0);
        self.cache_dropped |= self.cache.flush_drops(through, &mut random);
        self.tell(|| "the flush drops what it should have covered".into());
    }

    /// Flushes of the cache device that are under way.
    pub fn flushes_under_way(&self) -> usize {
        let flushes = |flight: &&Flight| {
            matches!(flight.effect, Effect::FlushCache { .. } | Effect::WriteSuperblock { .. })
        };
        self.flights.values().filter(flushes).count()
    }

    /// Reads of backing devices that are under way.
    pub fn backing_reads_under_way(&self) -> usize {
        let reads = |flight: &&Flight| matches!(flight.effect, Effect::ReadBacking { .. });
        self.flights.values().filter(reads).count()
    }

    /// The blocks of the cache device that segments have.
    pub(crate) fn segment_blocks(&self) -> (u64, u64) {
        let first = self.superblock.first_segment / BLOCK_BYTES;
        let count = u64::from(self.superblock.segment_count);
        (first, first + count * u64::from(self.superblock.segment_bytes) / BLOCK_BYTES)
    }

    /// What was dropped shows, in part or all of it; of segments alone: a copy of the superblock is read but once.
    pub(crate) fn evict_dropped(&mut self, what: u64) {
        let (first, end) = self.segment_blocks();
        let mut random = self.chance(what);
        let often = if self.setup.steady { 2 } else { random.below(3) };
        for block in self.cache.dropped_in(first, end) {
            if often == 0 || often == 1 && random.one_in(2) {
                self.marks.hit("what a flush dropped shows");
                self.cache.evict(block);
            }
        }
    }

    /// A flush of a backing device failed, that should have covered its writes up to this number.
    pub(crate) fn backing_flush_failed(&mut self, index: usize, through: u64) {
        let now = self.moment();
        let state = &mut self.volumes[index];
        state.flush_failed |= state.around_used;
        if let Some(prefix) = &mut state.prefix {
            prefix.around_unsure();
        }
        let fate = state.device.flush_failed(through, &mut self.random);
        if fate == Unflushed::Kept {
            return;
        }
        state.forgotten = true;
        let before = state.around_writes.len();
        state.around_writes.retain(|number| *number > through);
        if state.around_writes.len() < before {
            self.marks.hit("writes around the log dropped");
            state.untold = Some(now);
        }
        if fate == Unflushed::Gone {
            self.marks.hit("unflushed writes dropped");
            state.unflushed_dropped();
        }
    }

    /// A flush of a volume's backing device failed: what its disk has of others is dropped as well, but for what it did in this turn, of which
    /// the model knows no answer yet.
    fn disk_flush_failed(&mut self, volume: VolumeIndex, through: u64) {
        let index = usize::from(volume.0);
        for other in 0..self.volumes.len() {
            if other == index || self.hears_of_flush(index, other) {
                let through = if other == index { through } else { self.turn_began[other] };
                if other != index && !self.volumes[other].device.unflushed_blocks(0).is_empty() {
                    self.marks.hit("flush failed: of what others wrote");
                }
                self.backing_flush_failed(other, through);
                self.around_flush_fails(VolumeIndex(other as u8));
            }
        }
    }

    /// Whether a flush of one volume's device that fails takes along what is on another's.
    fn hears_of_flush(&self, index: usize, other: usize) -> bool {
        let engine = self.engine.as_ref().expect("there is a process");
        let there = engine.is_served(VolumeIndex(other as u8)) || self.late == Some(other);
        self.flushes_disk(index) && there
    }

    /// Whether a flush of a volume's device is one of the disk that all are on.
    pub(crate) fn flushes_disk(&self, index: usize) -> bool {
        self.setup.one_disk && self.setup.files & 1 << index == 0
    }

    /// A flush is about to end well. One that is under way beside it on the same disk may have failed by then, and dropped
    /// what this one was to cover.
    fn fail_beside(&mut self, volume: VolumeIndex) {
        let index = usize::from(volume.0);
        let beside = self.flights.iter().filter_map(|(order, flight)| match flight.effect {
            Effect::FlushBacking { volume: other, .. } if !flight.failed => {
                let from = usize::from(other.0);
                (from == index || self.hears_of_flush(from, index)).then_some((*order, other))
            }
            _ => None,
        });
        let Some((order, other)) = beside.min() else { return };
        if self.faults_over || self.setup.backing_fault == 0 || !self.chance(0xBE51).one_in(4) {
            return;
        }
        let through = self.turn_began[usize::from(other.0)];
        self.disk_flush_failed(other, through);
        self.flights.get_mut(&order).expect("it is under way").failed = true;
    }

    /// So did a write around the log.
    pub(crate) fn around_fails(&mut self, index: usize, (first, end): (u64, u64)) {
        let cells = self.cells(index, first, end);
        let Some(around) = self.around.get_mut(index) else { return };
        cells.iter().for_each(|(cell, _)| around.failed(*cell as u64));
    }

    /// So did a discard.
    fn discard_fails(&mut self, index: usize, (first, end): (u64, u64)) {
        let cells = self.cells(index, first, end);
        let Some(around) = self.around.get_mut(index) else { return };
        cells.iter().for_each(|(cell, _)| around.given_up(*cell as u64));
    }

    fn around_flush_fails(&mut self, volume: VolumeIndex) {
        let engine = self.engine.as_ref().expect("there is a process");
        let watermark = engine.watermark(volume).unwrap_or_default();
        let Some(around) = self.around.get_mut(usize::from(volume.0)) else { return };
        around.flush_failed(watermark);
    }

    pub(crate) fn zero_backing(&mut self, index: usize, lba: Lba, blocks: u64) {
        let volume = &mut self.volumes[index];
        let end = (lba.0 + blocks).min(volume.blocks());
        let mask = volume.mask(end - 1);
        volume.device.zero(lba.0, end, mask);
    }

    /// Whether what goes around the log is a write-zeroes: it goes past a failed cache.
    pub(crate) fn zeroes(&self, tag: u32) -> bool {
        matches!(self.asked[&u64::from(tag)].request.op, Op::WriteZeroes { .. })
    }

    /// It is done, sector by sector at its ends.
    pub(crate) fn zero_around(&mut self, index: usize, tag: u32) {
        let Asked { first, end, .. } = self.asked[&u64::from(tag)];
        let memory = self.memory.request(tag);
        let ends = [
            (first, memory.mask(0), Block::zero()),
            (end - 1, memory.mask(end - 1 - first), Block::zero()),
        ];
        self.marks.hit("zeroed past a failed cache");
        let device = &mut self.volumes[index].device;
        device.write(ends.to_vec());
        if first + 1 < end - 1 {
            device.zero(first + 1, end - 1, u8::MAX);
        }
    }
}
