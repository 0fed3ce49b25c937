// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening the cache as a runtime does it, with crashes at every step.
//!
//! In this order: the newest whole superblock is read, the other copy repaired; what a killed process left in its buffers is
//! written; the log is recovered, what of it may not be durable written again, and all of that flushed; the superblock of the
//! next opening goes to one copy, flush, the other, flush; only then does an engine run.

use crate::block::Block;
use crate::checkers::around_keeps_order::Around;
use crate::checkers::memory_is_bounded::Bound;
use crate::checkers::reservations_are_kept::Reservations;
use crate::checkers::rests_on_what_is_durable::Durable;
use crate::checkers::{checkpoint_is_derived, recovery_is_repeatable};
use crate::device::Piece;
use crate::fate::Fate;
use crate::model::Stop;
use crate::random::{Random, mix};
use crate::setup::BATCHES;
use crate::world::{Failure, World};
use forebay_core::effect::Fault;
use forebay_core::engine::{Acknowledge, Engine, window_frames};
use forebay_core::format::checkpoint;
use forebay_core::format::pair::{self, Pair, ReadCopy, Step};
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::log::recovery::{
    CacheReader, Damage, LogEnd, Recovered, Writer, ends_found, latch_dropped, recover, redo,
    reopen,
};
use forebay_core::mutant::Mutant;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, SegmentId, Tick, VolumeIndex};
use std::collections::BTreeMap;

pub(crate) struct Reader<'a>(pub(crate) &'a crate::device::Device);

impl ReadCopy for Reader<'_> {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        CacheReader::read(self, address, bytes).is_ok()
    }
}

impl CacheReader for Reader<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        assert!(offset.is_multiple_of(BLOCK_BYTES) && bytes.len().is_multiple_of(BLOCK_SIZE));
        for (at, block) in bytes.as_chunks_mut::<BLOCK_SIZE>().0.iter_mut().enumerate() {
            let address = offset / BLOCK_BYTES + at as u64;
            if self.0.is_unreadable(address) {
                return Err(Fault);
            }
            block.copy_from_slice(self.0.read(address).bytes());
        }
        Ok(())
    }

    /// One after the other, but in parts.
    fn workers(&self) -> usize {
        3
    }
}

/// Reads for an opening, which writes again what may not be durable. What was dropped may show while it reads.
struct Anew<'a> {
    device: &'a mut crate::device::Device,
    /// Reads until it does, and what.
    evicts: Option<(u64, Vec<u64>)>,
    /// How often each block was.
    rewritten: BTreeMap<u64, u32>,
}

impl CacheReader for Anew<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        if let Some((left, blocks)) = &mut self.evicts {
            *left = left.saturating_sub(1);
            if *left == 0 {
                blocks.drain(..).for_each(|block| self.device.evict(block));
            }
        }
        CacheReader::read(&mut Reader(self.device), offset, bytes)
    }

    fn rewrite(&mut self, offset: u64, bytes: &[u8]) {
        for block in offset / BLOCK_BYTES..(offset + bytes.len() as u64) / BLOCK_BYTES {
            *self.rewritten.entry(block).or_default() += 1;
        }
        self.device.write(pieces(offset, bytes));
    }

    fn workers(&self) -> usize {
        3
    }
}

/// A crash within an opening.
struct Crashed(Stop);

/// What one attempt needs.
struct Attempt {
    /// What the killed process left.
    held: Vec<(SegmentId, Vec<u8>)>,
    failed_flushes: u64,
    ends: Vec<LogEnd>,
    /// Device operations until it crashes.
    fuse: Option<u64>,
    /// What it left is durable.
    flushed: bool,
    /// It crashed while the device was flushed.
    flushing: bool,
    /// How it ended.
    writer: Writer,
}

/// Blocks of a superblock's copy.
const COPY_BLOCKS: u64 = SUPERBLOCK_SIZE as u64 / BLOCK_BYTES;

impl World {
    /// Writes the superblock of a fresh cache.
    pub fn format(&mut self) {
        let superblock = self.superblock.clone();
        for address in Superblock::addresses(superblock.size_bytes) {
            let bytes = superblock.encode(address);
            self.cache.write(pieces(address, &bytes));
        }
        let through = self.cache.flush_begin();
        self.cache.flush_end(through);
    }

    /// Opens the cache after `stop` (none: after a clean one), crashing within now and then.
    pub fn open(&mut self, stop: Option<Stop>) -> Result<(), Failure> {
        let outlives = self.setup.config.acknowledge == Acknowledge::Placed;
        let mut stop = stop;
        let (mut held, mut failed_flushes) = (Vec::new(), 0);
        let mut writer = Writer::MayHaveLostPower;
        let mut power_failed = false;
        let mut ends = Vec::new();
        if stop == Some(Stop::Process) && outlives {
            (held, failed_flushes) = (self.memory.held(), self.memory.failed_flushes);
            ends.clone_from(&self.memory.ends);
            if !self.cache_unsure {
                writer = Writer::DiedAlone;
            }
        }
        if self.random.one_in(self.setup.rot.min(4)) && !self.faults_over {
            self.rot_what_is_twice();
        }
        let by_chance = stop.is_some() && !self.setup.steady;
        let mut crashes = if by_chance { self.random.below(3) } else { 0 };
        // Once in each run at least: no opening does less than five things.
        let mut at_once = by_chance && self.marks.crashes_within() == 0;
        loop {
            let fuse = (crashes > 0 || at_once).then(|| {
                crashes = crashes.saturating_sub(1);
                self.random.below(if std::mem::take(&mut at_once) { 5 } else { 16 })
            });
            let mut attempt = Attempt {
                held: held.clone(),
                failed_flushes,
                ends: ends.clone(),
                fuse,
                flushed: false,
                flushing: false,
                writer,
            };
            match self.open_attempt(&mut attempt)? {
                Ok(recovered) => {
                    self.cache.make_shy(None);
                    self.powered = false;
                    self.check_damage(&recovered)?;
                    self.check_lost(&recovered)?;
                    if stop == Some(Stop::Process) && outlives && !power_failed && !self.memory.dead
                    {
                        self.check_ends(&recovered)?;
                    }
                    if let Some(stop) = stop {
                        self.models_stopped(stop, power_failed);
                    }
                    // It died in the moment in which it heard of it.
                    let unheard = self.memory.dead || !outlives;
                    self.note_untold(
                        stop == Some(Stop::Power) || power_failed || stop.is_some() && unheard,
                    );
                    self.choose_again(stop, power_failed);
                    let mut random = self.chance(0x509A);
                    if random.one_in(2) {
                        self.suppose_rot(&mut random)?;
                    }
                    return self.start(recovered);
                }
                Err(Crashed(Stop::Process)) => {
                    self.marks.hit("killed while opening");
                    if attempt.flushing && !self.powered {
                        writer = Writer::MayHaveLostPower;
                    }
                    ends = attempt.ends;
                    self.evict_dropped(0xE02);
                }
                Err(Crashed(Stop::Power)) => {
                    self.marks.hit("power cut while opening");
                    power_failed = true;
                    if !attempt.flushed {
                        // What the process left, here or in the device, was not durable yet.
                        stop = Some(Stop::Power);
                    }
                    held.clear();
                    ends.clear();
                    (writer, failed_flushes) = (Writer::MayHaveLostPower, 0);
                }
            }
        }
    }

    /// A log that ends before its place has lost what was answered: flushes of its volume say so (V10).
    fn check_ends(&mut self, recovered: &Recovered) -> Result<(), Failure> {
        for index in self.attached() {
            let of = VolumeIndex(index as u8);
            let ended = self.ended.get(index).copied().unwrap_or_default();
            let recorded = self.superblock.volumes[index].as_ref();
            let told = recorded.is_some_and(|recorded| recorded.flush_failed);
            let found = recovered.end_of(of);
            if found >= ended {
                continue;
            }
            if !told {
                return Err(Failure(format!(
                    "the log of {of:?} ended at {ended:?} and now does at {found:?}: its flushes will be answered well"
                )));
            }
            self.marks.hit("log's end dropped, and its flushes fail");
        }
        Ok(())
    }

    /// A block of one copy of the superblock rots, or cannot be read, while the other copy is whole; or a page of the
    /// checkpoint.
    fn rot_what_is_twice(&mut self) {
        let addresses = Superblock::addresses(self.superblock.size_bytes);
        let copies = addresses.map(|address| {
            let mut bytes = vec![0; SUPERBLOCK_SIZE];
            CacheReader::read(&mut Reader(&self.cache), address, &mut bytes).ok()?;
            Superblock::decode(&mut bytes, address).ok()
        });
        let [Some(first), Some(second)] = copies else { return };
        if first != second {
            return;
        }
        let address = if self.random.one_in(2) {
            let copy = *self.random.pick(&addresses);
            let is_larger = self.cache.blocks() * BLOCK_BYTES > first.size_bytes;
            self.marks.hit(match copy == 0 && is_larger {
                true => "superblock copy rotted that says where the other is",
                false => "superblock copy rotted",
            });
            // Those that say where the other copy is, above all.
            let any = self.random.below(COPY_BLOCKS);
            let block = *self.random.pick(&[0, COPY_BLOCKS - 1, any]);
            let address = copy + block * BLOCK_BYTES;
            if self.random.one_in(3) {
                self.marks.hit("superblock block unreadable");
                self.cache.make_unreadable(address / BLOCK_BYTES);
                return;
            }
            address
        } else if first.checkpoint_sequence > 0 {
            self.marks.hit("checkpoint page rotted");
            // Runs of slots may be in either area.
            let layout = checkpoint::Layout::of(first.segment_count, first.segment_blocks());
            let number = self.random.below(u64::from(layout.stream_page()) + 1) as u32;
            checkpoint::address(&first, self.random.below(2), number)
        } else {
            return;
        };
        let mut bytes = *self.cache.read(address / BLOCK_BYTES).bytes();
        if self.random.one_in(4) {
            bytes.fill(self.random.next() as u8);
        } else {
            let (any, bit) = (self.random.below(4096) as usize, self.random.below(8));
            // Most of a page says nothing.
            let says: Vec<usize> = (0..BLOCK_SIZE).filter(|at| bytes[*at] != 0).collect();
            let mut random = self.chance(0x9A6E);
            let says = (!says.is_empty() && random.one_in(2)).then(|| *random.pick(&says));
            bytes[says.unwrap_or(any)] ^= 1 << bit;
        }
        self.cache.rot(address / BLOCK_BYTES, Block::new(bytes));
    }

    /// What the superblock says of flushes that failed. Only a stop that takes memory along may come before it does.
    pub(crate) fn note_untold(&mut self, may_lack: bool) {
        for (volume, recorded) in self.volumes.iter_mut().zip(&self.superblock.volumes) {
            let noted = recorded.as_ref().is_some_and(|recorded| recorded.flush_failed);
            volume.flush_failed = noted;
            volume.untold = volume.untold.filter(|_| noted || !may_lack);
            if noted {
                self.marks.hit("failed flush remembered");
            }
        }
    }

    /// What was lost is lost still.
    fn check_lost(&mut self, recovered: &Recovered) -> Result<(), Failure> {
        for lost in std::mem::take(&mut self.lost) {
            let recorded = self.superblock.volumes[lost.index()].as_ref();
            let now = recorded.map(|volume| volume.attach_generation);
            lost.check(recovered, now).map_err(Failure)?;
        }
        Ok(())
    }

    /// Where nothing rotted and no write failed, nothing is damaged; and whatever rotted, nothing old is written over what is newer.
    fn check_damage(&self, recovered: &Recovered) -> Result<(), Failure> {
        for index in 0..self.volumes.len() {
            if let Some(lba) = recovered.unvoided(VolumeIndex(index as u8)) {
                return Err(Failure(format!(
                    "volume {index}: what is dirty of {lba:?} would be written over what went around the log"
                )));
            }
        }
        let whole = self.setup.cache_is_sound();
        let cut = |damage: &Damage| matches!(damage, Damage::Cut { .. });
        if whole && !recovered.damage.iter().all(cut) {
            return Err(Failure(format!("damaged, and nothing rotted: {:?}", recovered.damage)));
        }
        Ok(())
    }

    /// What a rotten header held is told to be lost where reads fail, and to be overwritten where they do not.
    fn check_told(&self, recovered: &Recovered) -> Result<(), Failure> {
        for damage in &recovered.damage {
            let (index, first, count, told_lost) = match *damage {
                Damage::Lost { volume, lba, count } => (volume, lba, count, true),
                Damage::Replaced { volume, lba, count } => (volume, lba, count, false),
                _ => continue,
            };
            let volume = &self.volumes[usize::from(index.0)];
            let mut all = (0..volume.cells()).map(|cell| Lba(volume.lba(cell)));
            let differs = |lba: &Lba| {
                (first..first + count).contains(lba) && recovered.is_lost(index, *lba) != told_lost
            };
            if let Some(lba) = all.find(differs) {
                return Err(Failure(format!(
                    "{lba:?} is lost or not, and told otherwise: {damage:?}"
                )));
            }
        }
        Ok(())
    }

    /// As many blocks count as lost as are: of what rotten headers held, and at all.
    fn check_count(
        engine: &Engine,
        index: usize,
        (found, now, has_room): (u64, u64, bool),
    ) -> Result<(), Failure> {
        let Some(status) = engine.status(VolumeIndex(index as u8)) else { return Ok(()) };
        let counted = (status.stats.lost_blocks, status.lost_blocks_now);
        if counted.0 != found || counted.1 < now || has_room && counted.1 > now {
            return Err(Failure(format!(
                "volume {index} has lost {found} blocks with headers, and {now} are lost; it counts {counted:?}"
            )));
        }
        Ok(())
    }

    pub(crate) fn start(&mut self, recovered: Recovered) -> Result<(), Failure> {
        self.tell(|| format!("opened, damage {:?}", recovered.damage));
        self.check_told(&recovered)?;
        let lost = |index: usize| {
            let volume = VolumeIndex(index as u8);
            let found = recovered.damage.iter().filter_map(|damage| match damage {
                Damage::Lost { volume: of, count, .. } if *of == volume => Some(*count),
                _ => None,
            });
            let now = recovered.lost(volume).into_iter().map(|range| range.1);
            (found.sum::<u64>(), now.sum::<u64>(), recovered.has_extent_room(volume))
        };
        let lost: Vec<(u64, u64, bool)> = (0..self.volumes.len()).map(lost).collect();
        self.found_lost = None;
        for damage in &recovered.damage {
            if let Damage::Lost { volume, .. } = damage {
                self.found_lost = Some(usize::from(volume.0));
            }
            self.marks.hit(match damage {
                Damage::Cut { .. } => "log cut",
                Damage::Lost { .. } => "rot known",
                Damage::Replaced { .. } => "rot known, and overwritten since",
                Damage::Unknown { .. } => "rot unknown",
                Damage::Clean { .. } => "rot clean",
            });
        }
        self.open_grown();
        self.resizing = None;
        let mut config = self.setup.config;
        if self.setup.batches_vary {
            let mut chosen = Random::new(mix(self.order ^ self.trace ^ 0xC0F1));
            self.marks.hit("opened with more or less memory for batches");
            config.batch_blocks_max = *chosen.pick(&BATCHES);
        }
        let room = recovered.extents_fitting(config.extent_count_max);
        if room > config.extent_count_max {
            // As `serve` does: that much is told, then taken.
            self.marks.hit("more room for extents");
            config.extent_count_max = room;
        }
        self.bound = Bound::new(&self.superblock, self.volumes.len(), &config);
        self.memory.restart(window_frames(&config));
        let engine = Engine::new(&self.superblock, recovered, config, Tick(self.now));
        for (index, lost) in lost.into_iter().enumerate() {
            let volume = VolumeIndex(index as u8);
            self.volumes[index].closed = None;
            World::check_count(&engine, index, lost)?;
            if let (Some(prefix), Some(status)) =
                (&mut self.volumes[index].prefix, engine.status(volume))
            {
                // A batch may have been under way: nothing is compared until the next is done.
                prefix.cut(status.durable);
                prefix.advance(status.watermark);
                if config.batch_blocks_max < config.batch_blocks_most {
                    let since = &mut self.volumes[index].order_since;
                    *since = status.placed.max(*since);
                }
            }
        }
        self.engine = Some(engine);
        self.reservations = Reservations::default();
        self.durable = Durable::default();
        let watched = if self.setup.watched { self.volumes.len() } else { 0 };
        self.around = vec![Around::default(); watched];
        if let Some(index) = self.late.take() {
            self.volumes[index].attached = true;
        }
        let late = self.choose_late();
        for index in self.attached() {
            let volume = VolumeIndex(index as u8);
            let clean = self.engine.as_ref().is_some_and(|engine| engine.is_clean(volume));
            // What is damaged in the log would come back as what the backing device held before.
            let whole = self.setup.rot == 0;
            let forgets = self.setup.operator > 0 && self.random.one_in(4);
            self.meet_mark(index)?;
            if clean && whole && (self.evicts || forgets) {
                self.forget_data(index);
            }
            if late == Some(index) {
                self.marks.hit("backing device late");
                self.volumes[index].attached = false;
                self.late = late;
                continue;
            }
            self.forget_clean(index);
            self.join_disk(index);
            self.engine.as_mut().expect("just made").serve(volume, true);
            self.check_shares(index);
            self.check_reserve(index);
        }
        self.evicts = false;
        self.evict_dropped(0xE04);
        self.attached().into_iter().try_for_each(|index| self.serve_again(index))
    }

    fn open_attempt(
        &mut self,
        attempt: &mut Attempt,
    ) -> Result<Result<Recovered, Crashed>, Failure> {
        let mut superblock = match self.read_superblock(attempt)? {
            Ok(superblock) => superblock,
            Err(crashed) => return Ok(Err(crashed)),
        };
        self.tell(|| format!("opening generation {}", superblock.open_generation));
        if attempt.failed_flushes > 0 {
            self.marks.hit("failed flush found in memory");
        }
        // Before the first copy is replaced, the second is durable (R5 of `format::pair`).
        let [_, second] = Superblock::addresses(superblock.size_bytes);
        let bytes = superblock.encode(second);
        let mutants = self.setup.config.mutants;
        if !mutants.is(Mutant::SuperblockSecondNotRenewed)
            && let Err(crashed) = self.open_copy(attempt, second, &bytes)
        {
            return Ok(Err(crashed));
        }
        superblock.note_failed_flushes(attempt.failed_flushes);
        let held = attempt.held.clone();
        for (segment, mut bytes) in held {
            let blocks = redo(&superblock, segment, &mut bytes, mutants);
            self.tell(|| format!("redo {segment:?} {blocks} blocks"));
            if blocks == 0 {
                continue;
            }
            self.marks.hit("redo");
            let address = superblock.address(segment, 0);
            let bytes = &bytes[..usize::from(blocks) * BLOCK_SIZE];
            if let Err(crashed) = self.open_write(attempt, pieces(address, bytes)) {
                return Ok(Err(crashed));
            }
        }
        let recovered = self.recover_anew(&superblock, attempt.writer);
        if !mutants.is(Mutant::OpeningEndsUnnoted) {
            attempt.ends = ends_found(&superblock, Some(&recovered), &attempt.ends);
        }
        if !mutants.is(Mutant::OpeningUnflushed)
            && let Err(crashed) = self.open_flush(attempt)
        {
            return Ok(Err(crashed));
        }
        attempt.flushed = true;
        latch_dropped(&mut superblock, &recovered, &attempt.ends, mutants);
        let next = reopen(&superblock, &recovered, mutants);
        let named = next.checkpoint_sequence > 0;
        if self.setup.watched && named && !recovered.from_checkpoint {
            // T3 of `log::checkpoint`: from now on segments are taken in another order than it has.
            return Err(Failure("a checkpoint that was not used is named still".into()));
        }
        let again = self.recover(&next, Writer::MayHaveLostPower);
        recovery_is_repeatable::compare(&self.volumes, &recovered, &again).map_err(Failure)?;
        self.same_without_checkpoint(&superblock, &recovered, attempt.writer)?;
        for (copy, address) in Superblock::addresses(next.size_bytes).into_iter().enumerate() {
            let bytes = next.encode(address);
            if let Err(crashed) = self.open_copy(attempt, address, &bytes) {
                return Ok(Err(crashed));
            }
            if self.flushes_copy(copy)
                && let Err(crashed) = self.open_flush(attempt)
            {
                return Ok(Err(crashed));
            }
        }
        superblock = next;
        self.superblock = superblock;
        Ok(Ok(recovered))
    }

    /// A checkpoint is derived data: the log alone gives the same map.
    pub(crate) fn same_without_checkpoint(
        &mut self,
        superblock: &Superblock,
        recovered: &Recovered,
        writer: Writer,
    ) -> Result<(), Failure> {
        if !recovered.from_checkpoint {
            // Where nothing rots and all is written, the checkpoint that is named is whole, unless the superblock of another size
            // was to lie there.
            let whole = self.setup.cache_is_sound();
            let overwritten = superblock.checkpoint_sequence == self.overwritten_checkpoint;
            if overwritten && superblock.checkpoint_sequence > 0 {
                self.marks.hit("checkpoint overwritten by the superblock of another size");
            } else if whole && superblock.checkpoint_sequence > 0 {
                return Err(Failure("the checkpoint that is named cannot be used".into()));
            }
            return Ok(());
        }
        self.marks.hit("opened from a checkpoint");
        let mut bare = superblock.clone();
        bare.checkpoint_sequence = 0;
        let whole = self.recover(&bare, writer);
        checkpoint_is_derived::compare(&self.volumes, recovered, &whole).map_err(Failure)?;
        match self.setup.watched && self.setup.cache_is_sound() {
            true => checkpoint_is_derived::compare_epochs(recovered, &whole).map_err(Failure),
            false => Ok(()),
        }
    }

    /// Recovers, and writes again what may not be durable.
    fn recover_anew(&mut self, superblock: &Superblock, writer: Writer) -> Recovered {
        let (config, room) = (self.setup.config, self.setup.config.extent_count_max);
        let (first, end) = self.segment_blocks();
        let dropped = self.cache.dropped_in(first, end);
        let mut random = self.chance(0xE03);
        let evicts = !dropped.is_empty() && !self.setup.steady && random.one_in(2);
        let evicts = evicts.then(|| (random.between(1, 60), dropped));
        let mut reader = Anew { device: &mut self.cache, evicts, rewritten: BTreeMap::new() };
        let recovered = recover(superblock, &mut reader, room, writer, config.mutants);
        self.rewritten_most = reader.rewritten.values().copied().max().unwrap_or(0);
        if self.rewritten_most > 0 {
            self.marks.hit("log's end written again");
        }
        recovered
    }

    pub(crate) fn recover(&mut self, superblock: &Superblock, writer: Writer) -> Recovered {
        let config = self.setup.config;
        let room = config.extent_count_max;
        recover(superblock, &mut Reader(&self.cache), room, writer, config.mutants)
    }

    /// The newest whole copy; the other is repaired.
    fn read_superblock(
        &mut self,
        attempt: &mut Attempt,
    ) -> Result<Result<Superblock, Crashed>, Failure> {
        let device_bytes = self.cache.blocks() * BLOCK_BYTES;
        let mutants = self.setup.config.mutants;
        let pair = Pair::read(device_bytes, &mut Reader(&self.cache), mutants);
        let Some(newest) = pair.newest().cloned() else {
            return Err(Failure("both copies of the superblock are bad".into()));
        };
        let good = [pair.first, pair.second].map(|copy| copy.as_ref() == Ok(&newest));
        if good != [true; 2] {
            self.marks.hit("superblock repaired");
        }
        let leftover = pair::leftover(&newest, device_bytes, &mut Reader(&self.cache));
        if leftover.is_some() {
            self.marks.hit("copy of another size taken away");
        }
        for step in pair::repairs(&newest, good, leftover, mutants) {
            let done = match step {
                Step::Write(at) => self.open_copy(attempt, at, &newest.encode(at)),
                Step::Flush => self.open_flush(attempt),
                Step::Wipe(at) => self.open_copy(attempt, at, &[0; BLOCK_SIZE]),
            };
            if let Err(crashed) = done {
                return Ok(Err(crashed));
            }
        }
        Ok(Ok(newest))
    }

    fn open_copy(
        &mut self,
        attempt: &mut Attempt,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), Crashed> {
        self.watch_copies(address, bytes);
        self.open_write(attempt, pieces(address, bytes))
    }

    fn open_write(&mut self, attempt: &mut Attempt, pieces: Vec<Piece>) -> Result<(), Crashed> {
        if let Some(crashed) = self.crash_now(attempt) {
            let writes = vec![pieces];
            match crashed.0 {
                Stop::Process => {
                    self.cache.process_killed(writes, &mut Fate::Chance, &mut self.random);
                }
                Stop::Power => self.power_cut(writes),
            }
            return Err(crashed);
        }
        self.cache.write(pieces);
        Ok(())
    }

    fn open_flush(&mut self, attempt: &mut Attempt) -> Result<(), Crashed> {
        if let Some(crashed) = self.crash_now(attempt) {
            match crashed.0 {
                Stop::Power => self.power_cut(Vec::new()),
                Stop::Process => attempt.flushing = true,
            }
            return Err(crashed);
        }
        let through = self.cache.flush_begin();
        if self.flush_fails_next.is_some() {
            // And it ends before it hears of that.
            self.drop_unflushed(through);
            attempt.flushing = true;
            return Err(Crashed(Stop::Process));
        }
        self.cache.flush_end(through);
        Ok(())
    }

    fn power_cut(&mut self, writes: Vec<Vec<Piece>>) {
        self.cache.power_cut(writes, &mut Fate::Chance, &mut self.random);
        for volume in &mut self.volumes {
            volume.device.power_cut(Vec::new(), &mut Fate::Chance, &mut self.random);
        }
    }

    fn crash_now(&mut self, attempt: &mut Attempt) -> Option<Crashed> {
        let fuse = attempt.fuse.as_mut()?;
        if *fuse > 0 {
            *fuse -= 1;
            return None;
        }
        attempt.fuse = None;
        let power = self.random.one_in(2) && !self.powered;
        Some(Crashed(if power { Stop::Power } else { Stop::Process }))
    }
}

/// Bytes as blocks at an address.
pub fn pieces(address: u64, bytes: &[u8]) -> Vec<Piece> {
    let first = address / BLOCK_BYTES;
    let blocks = (first..).zip(bytes.as_chunks::<BLOCK_SIZE>().0);
    blocks.map(|(at, block)| (at, u8::MAX, Block::of(block))).collect()
}
