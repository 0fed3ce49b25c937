// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One seed: a guest, its requests, and the machine stopping under it.

use crate::aim;
use crate::along;
use crate::gone;
use crate::marks::Marks;
use crate::model::Stop;
use crate::random::{Random, mix};
use crate::setup::{OPERATIONS, Setup};
use crate::world::{Failure, Outcome, World};
use forebay_core::engine::Acknowledge;
use forebay_core::format::superblock::{Mode, Superblock};
use forebay_core::mutant::Mutants;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};

/// Simulated nanoseconds that any wait may take while the devices work.
pub(crate) const WAIT_MAX: u64 = 600_000_000_000;

/// Crashes of every run, at least.
pub const CRASHES_MIN: u64 = 3;

/// Laps of the log in every run, at least.
pub const LAPS_MIN: u64 = 5;

/// A run ends after so many operations, whatever it has come past. (One in some ten thousand seeds needs more than 20,000.)
const OPERATIONS_MAX: u64 = 60_000;

/// One that goes on for longer than planned is restarted after so many.
const RESTART_EVERY: u64 = 500;

/// Of the dirty blocks of every run, at least so many percent are overwritten before write-back comes
/// to them.
pub const OVERWRITTEN_MIN: u64 = 50;

/// What a run that passed tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What it came past.
    pub marks: Marks,
    /// A hash of everything that happened.
    pub trace: u64,
    /// Segments of its cache at first.
    pub segments: u32,
    /// Volumes.
    pub volumes: usize,
    /// Operations of the guest.
    pub operations: u64,
    /// Of the blocks that were dirty while it went on, enough were overwritten.
    pub overwrites: bool,
}

impl Report {
    /// What it lacks of that which every run must have.
    pub fn lacks(&self) -> Vec<&'static str> {
        let count = |name| self.marks.count(name);
        let laps = count("segment reclaimed") / u64::from(self.segments);
        let wanted = [
            ("operations", self.operations >= OPERATIONS),
            ("crashes", self.marks.crashes() >= CRASHES_MIN),
            ("a crash while opening", self.marks.crashes_within() >= 1),
            ("volumes", self.volumes >= 2),
            ("a small cache", self.segments <= 32),
            ("laps of the log", laps >= LAPS_MIN),
            ("overwritten blocks", self.overwrites),
        ];
        wanted.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
    }
}

/// Runs a seed.
pub fn run(seed: u64, mutants: Mutants) -> Result<Report, Failure> {
    run_with(seed, mutants, |_| ())
}

/// Runs a seed with what `change` makes of it.
pub fn run_with(
    seed: u64,
    mutants: Mutants,
    change: impl FnOnce(&mut Setup),
) -> Result<Report, Failure> {
    let mut random = Random::new(seed);
    let mut setup = Setup::new(&mut random, mutants);
    change(&mut setup);
    let mut world = World::new(setup, random);
    world.format();
    world.open(None)?;
    let operations = guest(&mut world)?;
    // The drain has a few more that nobody is there to overwrite.
    let overwrites = !overwrites_fewer(&world, OVERWRITTEN_MIN);
    drain(&mut world)?;
    lone_copy(&mut world)?;
    world.count();
    let segments = world.setup.superblock.segment_count;
    let volumes = world.volumes.len();
    let World { marks, trace, .. } = world;
    Ok(Report { marks, trace, segments, volumes, operations, overwrites })
}

/// Whether the superblock was always written with one copy of it durable.
fn lone_copy(world: &mut World) -> Outcome {
    world.lone_copy.take().map_or(Ok(()), |text| Err(Failure(text)))
}

/// Does what the guest does; says how many operations that were.
fn guest(world: &mut World) -> Result<u64, Failure> {
    let mut stops = world.setup.stops.clone().into_iter().peekable();
    let mut done = 0;
    let mut restart_at = world.setup.operations;
    loop {
        lone_copy(world)?;
        if done >= world.setup.operations && (done >= OPERATIONS_MAX || is_worth(world)) {
            settle(world)?;
            // What waited until now counts, too.
            if done >= OPERATIONS_MAX || is_worth(world) {
                return Ok(done);
            }
        }
        if stops.peek().is_some_and(|at| *at <= done) {
            stops.next();
            stop_and_open(world, stops.len() as u64)?;
            continue;
        }
        if done >= restart_at {
            // Not yet worth being called a run: what hinders may be a device that fails, a latch, or a cutoff.
            restart_at = done + RESTART_EVERY;
            world.insists = true;
            revive(world);
            stop_and_open(world, 0)?;
            for index in world.attached() {
                if !world.cache_failed && !stays_dirty(world, index) {
                    world.change_mode(index, Mode::WriteBack)?;
                }
                // Where all goes around the log nothing is overwritten there.
                if !world.cache_failed && world.volumes[index].cutoff > 0 {
                    let order = world.volumes[index].order;
                    world.set_order(index, order, 0)?;
                }
            }
            continue;
        }
        if world.cache_failed && world.random.one_in(50) {
            restart_failed(world)?;
            continue;
        }
        if aim::rests_on_the_superblock(world)? {
            continue;
        }
        if world.setup.dies.is_some_and(|(_, at)| at == done) {
            die(world);
        }
        go_bad(world, done);
        let goes = Random::new(mix(world.order ^ 0x60E5)).one_in(world.setup.gone);
        if goes && !world.cache_failed {
            gone::goes_away(world)?;
            continue;
        }
        if Random::new(mix(world.order ^ 0x3074)).one_in(world.setup.mute) {
            gone::cannot_be_read(world)?;
        }
        if world.late.is_some() && Random::new(mix(world.order ^ 0x1A7E)).one_in(300) {
            world.serve_late()?;
        }
        make_room(world)?;
        if world.random.one_in(world.setup.operator) && !world.cache_failed {
            world.operate()?;
        }
        if world.random.one_in(world.setup.scrub) && !world.cache_failed {
            world.scrub()?;
        }
        if !world.attached().iter().any(|index| !world.volumes[*index].device.failed)
            || !has_room(world) && only_the_failed_wait(world)
        {
            // There would be nobody left to go on, or to ask anything of those who can.
            revive(world);
        }
        if waits_too_long(world) {
            return Err(stuck(world));
        }
        let room = has_room(world);
        world.give_now_and_then(room)?;
        if room {
            aim::write_what_is_healed(world)?;
        }
        if room {
            along::read_along(world)?;
        }
        let pause = world.random.one_in(world.setup.pause);
        if room && !pause && !world.random.one_in(3) {
            done += u64::from(operation(world)?);
        } else if !world.step()? && !room {
            return Err(stuck(world));
        }
    }
}

/// Whether a run has come past enough to be called one.
fn is_worth(world: &World) -> bool {
    // A little more: the last operations may be other ones.
    laps(world) >= LAPS_MIN
        && !overwrites_fewer(world, OVERWRITTEN_MIN + 1)
        && has_read_fills(world)
}

/// Whether a block was read that was copied into the log because it had been read.
fn has_read_fills(world: &World) -> bool {
    let now = |index: usize| {
        let status = world.engine.as_ref()?.status(VolumeIndex(index as u8))?;
        Some((status.stats.fill_blocks, status.stats.fill_hit_blocks))
    };
    let mut fills = (world.marks.count("fill placed"), world.marks.count("fill read"));
    for (placed, read) in (0..world.volumes.len()).filter_map(now) {
        fills = (fills.0 + placed, fills.1 + read);
    }
    // Copies want more buffers than that.
    fills.0 > 0 && fills.1 > 0 || world.setup.config.buffer_count < 6
}

/// Laps of the log: how often as many segments were used again as it had at first.
fn laps(world: &World) -> u64 {
    let now = |index: usize| {
        let status = world.engine.as_ref()?.status(VolumeIndex(index as u8))?;
        Some(status.stats.reclaimed_segments)
    };
    let running: u64 = (0..world.volumes.len()).filter_map(now).sum();
    let segments = world.setup.superblock.segment_count;
    (world.marks.count("segment reclaimed") + running) / u64::from(segments)
}

pub(crate) fn stuck(world: &World) -> Failure {
    let engine = world.engine.as_ref().expect("there is a process");
    let mut text = format!("nothing goes on, {} requests wait:", world.asked.len());
    for asked in world.asked.values().take(4) {
        text += &format!("\n    {asked:?}");
    }
    for index in 0..world.volumes.len() {
        text += &format!("\n    {:?}", engine.status(VolumeIndex(index as u8)));
    }
    text += &format!("\n    free {:?}, {:?}", engine.free_segments(), world.setup.config);
    Failure(text)
}

/// Whether the guest may ask more.
fn has_room(world: &World) -> bool {
    (world.asked.len() as u64) < world.setup.depth * world.volumes.len() as u64
}

/// What a volume with a dead backing device is asked may wait for as long as that is dead (`docs/faults.md`).
fn only_the_failed_wait(world: &World) -> bool {
    let mut asked = world.asked.values();
    asked.all(|asked| world.volumes[usize::from(asked.request.volume.0)].device.failed)
}

/// When crash came upon crash there may be no room to name what is lost (`docs/faults.md`), and a request waits for that: those come whose
/// dirty data takes the room.
fn make_room(world: &mut World) -> Outcome {
    let status = |index: usize| world.engine.as_ref()?.status(VolumeIndex(index as u8));
    let lacks = |index: usize| status(index).is_some_and(|it| it.lacks);
    let waits = world.asked.values().any(|asked| world.now - asked.since > WAIT_MAX / 4);
    if !waits || !(0..world.volumes.len()).any(lacks) {
        return Ok(());
    }
    world.marks.hit("no room to name what is lost");
    revive(world);
    world.serve_late()
}

/// Whether a request waits that should have been answered: of a volume whose backing device
/// works, whatever the others' do.
fn waits_too_long(world: &World) -> bool {
    world.asked.values().any(|asked| {
        let volume = &world.volumes[usize::from(asked.request.volume.0)];
        !volume.device.failed && world.now - asked.since.max(volume.revived_at) > WAIT_MAX
    })
}

/// A backing device fails for good, or until the machine stops.
fn die(world: &mut World) {
    let Some((index, _)) = world.setup.dies else { return };
    if world.volumes[index].attached {
        world.marks.hit("backing device failed for good");
        world.volumes[index].device.failed = true;
    }
}

/// Some blocks of a backing device refuse to be written, for a while.
fn go_bad(world: &mut World, done: u64) {
    let Some(bad) = world.setup.bad else { return };
    let volume = &mut world.volumes[bad.volume];
    if done == bad.from {
        let mut random = Random::new(bad.seed);
        for _ in 0..bad.blocks {
            let cell = random.below(volume.cells() as u64) as usize;
            volume.device.go_bad(volume.lba(cell));
        }
    } else if done >= bad.to && volume.device.heal() {
        volume.revived_at = world.now;
    }
}

fn revive(world: &mut World) {
    for volume in &mut world.volumes {
        volume.device.failed = false;
        volume.revived_at = world.now;
    }
}

/// Waits until all requests are answered that can be.
fn settle(world: &mut World) -> Outcome {
    (0..world.volumes.len()).try_for_each(|index| settle_volume(world, index))
}

/// Waits until a volume's requests are answered, if its backing device works.
pub(crate) fn settle_volume(world: &mut World, index: usize) -> Outcome {
    let begun = world.now;
    let mine = |world: &World| {
        world.asked.values().any(|asked| usize::from(asked.request.volume.0) == index)
    };
    while (mine(world) || world.is_served_again(index)) && !world.volumes[index].device.failed {
        let given = world.give_again(Some(index))?;
        if !given && !world.step()? || world.now - begun > WAIT_MAX {
            return Err(stuck(world));
        }
        make_room(world)?;
    }
    Ok(())
}

/// One operation of the guest; says whether the engine took it.
pub(crate) fn operation(world: &mut World) -> Result<bool, Failure> {
    let mut index = world.random.below(world.volumes.len() as u64) as usize;
    let rewrite = overwrites_more(world);
    for _ in 0..6 {
        if rewrite && !stays_dirty(world, index) {
            // Rather one in which something is dirty for a while.
            index = world.random.below(world.volumes.len() as u64) as usize;
        }
    }
    let setup = &world.setup;
    let of_it = |asked: &&crate::guest::Asked| usize::from(asked.request.volume.0) == index;
    let under_way = world.asked.values().filter(of_it).count() as u64;
    if !world.volumes[index].attached || under_way >= setup.depth {
        return Ok(false);
    }
    let (flush, range, unaligned, hot, size) =
        (setup.flush, setup.range, setup.unaligned, setup.hot, setup.size);
    if !(world.insists && rewrite) && world.random.one_in(flush) {
        return world.ask(index, Op::Flush, 0, 0);
    }
    let fua = world.random.one_in(20);
    let reads = !rewrite && !has_read_fills(world);
    let op = match world.random.below(10) {
        _ if world.insists && rewrite => Op::Write { fua },
        _ if world.random.one_in(range) => {
            if world.random.one_in(2) {
                Op::Discard
            } else {
                Op::WriteZeroes { fua }
            }
        }
        0..4 => Op::Read,
        4..7 if reads => Op::Read,
        _ => Op::Write { fua },
    };
    let ranged = matches!(op, Op::Discard | Op::WriteZeroes { .. });
    if ranged && world.random.one_in(8) {
        // A large one, over all islands.
        let size_bytes = world.volumes[index].size_bytes;
        let offset = world.random.below(8) * 512;
        return world.ask(index, op, offset, size_bytes - offset);
    }
    let islands = world.volumes[index].islands.clone();
    let island = *world.random.pick(&islands);
    let hot = if rewrite { hot.max(90) } else { hot };
    let is_hot = world.random.below(100) < hot;
    let blocks = if is_hot { island.blocks.min(8) } else { island.blocks };
    let mut first = island.start + world.random.below(blocks);
    let most = if world.random.one_in(200) { 256 } else { size };
    let end = if is_hot && most <= size { blocks } else { island.blocks };
    let mut count = world.random.between(1, most).min(island.start + end - first);
    let write = matches!(op, Op::Write { .. });
    if write
        && rewrite
        && let Some((dirty, blocks)) = dirty_run(world, index)
    {
        (first, count) = (dirty, count.min(blocks));
    }
    if write {
        // What was asked for just before may still wait for its place in the log.
        let last = world.volumes[index].written.replace((first, count));
        let often = if world.insists { 8 } else { 2 };
        if rewrite && !world.random.one_in(often) {
            (first, count) = last.unwrap_or((first, count));
            if world.insists {
                // Again and again.
                world.volumes[index].written = Some((first, count));
            }
        }
    }
    if op == Op::Read || write && !rewrite && world.random.below(100) < world.setup.chased {
        // Read again, or written while it may still be read.
        let again = write || reads || world.random.below(100) < world.setup.reread;
        let last = world.volumes[index].read;
        (first, count) = last.filter(|_| again).unwrap_or((first, count));
        if reads {
            count = count.min(4);
        }
        world.volumes[index].read = Some((first, count));
    }
    let mut offset = first * BLOCK_BYTES;
    let mut end = (first + count) * BLOCK_BYTES;
    if world.random.one_in(unaligned) {
        offset += world.random.below(8) * 512;
        end -= world.random.below(8) * 512;
        if end <= offset {
            end = offset + 512;
        }
    }
    end = end.min(world.volumes[index].size_bytes);
    if end <= offset {
        return Ok(false);
    }
    // Now and then it is only said that it will be read.
    let fetched = op == Op::Read && world.next_tag % 16 == 7;
    world.ask(index, if fetched { Op::Fetch } else { op }, offset, end - offset)
}

/// Whether too little of what was dirty was overwritten before write-back came to it.
pub(crate) fn overwrites_more(world: &World) -> bool {
    overwrites_fewer(world, world.setup.overwritten)
}

fn overwrites_fewer(world: &World, percent: u64) -> bool {
    let count = |name| world.marks.count(name);
    count("dirty block overwritten") * 100 < count("dirty block") * percent
}

/// Whether what is written to a volume is dirty for a while.
pub(crate) fn stays_dirty(world: &World, index: usize) -> bool {
    let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(index as u8)));
    status.is_some_and(|status| status.mode == Mode::WriteBack && !status.drained)
}

/// Blocks in a row that are dirty: the first behind one chosen by chance, and how many.
fn dirty_run(world: &mut World, index: usize) -> Option<(u64, u64)> {
    let from = world.random.below(world.volumes[index].cells() as u64) as usize;
    let volume = &world.volumes[index];
    let at = |offset: usize| (from + offset) % volume.cells();
    let first = (0..volume.cells()).map(at).find(|cell| volume.dirty[*cell])?;
    let island_end = volume
        .islands
        .iter()
        .map(|island| island.start + island.blocks)
        .find(|end| volume.lba(first) < *end)?;
    let rest = first..volume.cells();
    let run = rest.take_while(|cell| volume.dirty[*cell] && volume.lba(*cell) < island_end).count();
    Some((volume.lba(first), run as u64))
}

/// Nothing is appended to a cache that failed: a new process has to look at what is there.
pub(crate) fn restart_failed(world: &mut World) -> Outcome {
    world.marks.hit("restarted after a cache fault");
    let stop = if world.random.one_in(2) { Stop::Process } else { Stop::Power };
    restart(world, stop)
}

/// The machine stops, is started again, and all is looked at.
pub(crate) fn restart(world: &mut World, stop: Stop) -> Outcome {
    world.stop(stop);
    world.open(Some(stop))?;
    read_all(world)
}

/// The machine stops, one way or another, and is started again.
fn stop_and_open(world: &mut World, left: u64) -> Outcome {
    if world.cache_failed {
        return restart_failed(world);
    }
    world.rot_before_stop();
    let placed = world.setup.config.acknowledge == Acknowledge::Placed;
    // Three crashes at least: then there may be clean stops.
    let crash = world.marks.crashes() + left < CRASHES_MIN;
    match world.random.between(crash.into(), 6) {
        0 => {
            revive(world);
            if !world.leaves_some_inside() {
                settle(world)?;
            }
            if world.cache_failed {
                return restart_failed(world);
            }
            if world.random.one_in(3) {
                crate::handover::hand_over(world)?;
                if world.cache_failed {
                    return restart_failed(world);
                }
            } else {
                clean_stop(world)?;
                world.marks.hit("clean stop");
                world.open(None)?;
            }
        }
        kind @ (1 | 2) => {
            // The process dies somewhere within the engine, between two of its stores.
            let stores = world.random.below(200);
            world.memory.fuse = Some(stores);
            let mut left = 300;
            while !world.memory.dead && left > 0 {
                left -= 1;
                if !world.random.one_in(2) || !operation(world)? {
                    world.step()?;
                }
            }
            let stop = if kind == 1 || placed { Stop::Process } else { Stop::Power };
            world.marks.hit("killed within a call");
            world.stop(stop);
            world.open(Some(stop))?;
        }
        3 | 4 => {
            aim::await_moment(world)?;
            if world.cache_failed {
                return restart_failed(world);
            }
            world.marks.hit("killed between calls");
            world.stop(Stop::Process);
            if placed && !world.cache_unsure {
                world.rot_after_death();
            }
            world.open(Some(Stop::Process))?;
        }
        _ => {
            let aimed = aim::await_what_a_cut_undoes(world)?;
            if !aimed {
                aim::await_moment(world)?;
            }
            if world.cache_failed {
                return restart_failed(world);
            }
            world.marks.hit("power cut");
            world.stop(Stop::Power);
            world.open(Some(Stop::Power))?;
            if !aimed && world.random.one_in(2) {
                // Once more, before anything is written: what was void stays void.
                world.marks.hit("power cut twice");
                read_all(world)?;
                world.stop(Stop::Power);
                world.open(Some(Stop::Power))?;
            }
            if aimed || world.random.one_in(3) {
                evict(world)?;
            }
        }
    }
    aim::name_and_stop(world)?;
    if world.random.one_in(4) {
        return Ok(());
    }
    read_all(world)
}

/// What a power cut left was read, and so decided: it stays when everything is on the backing
/// devices and nothing of it is in the cache any more.
fn evict(world: &mut World) -> Outcome {
    let failed = world.volumes.iter().any(|volume| volume.device.failed || volume.flush_failed);
    if failed || world.cache_failed || world.setup.rot > 0 {
        return Ok(());
    }
    read_all(world)?;
    if world.cache_failed {
        return Ok(());
    }
    drain_all(world)?;
    world.evicts = true;
    world.stop(Stop::Power);
    world.open(Some(Stop::Power))?;
    world.marks.hit("evicted after a power cut");
    read_all(world)
}

/// Everything is read, and compared with the model as any read is.
pub(crate) fn read_all(world: &mut World) -> Outcome {
    for index in world.attached() {
        for island in world.volumes[index].islands.clone() {
            let mut at = island.start;
            let island_end = island.start + island.blocks;
            while at < island_end {
                let end = (at + 64).min(island_end);
                let bytes = (end * BLOCK_BYTES).min(world.volumes[index].size_bytes);
                let offset = at * BLOCK_BYTES;
                while !world.ask(index, Op::Read, offset, bytes - offset)? {
                    world.step()?;
                }
                at = end;
            }
        }
    }
    settle(world)
}

/// It comes to an end whatever is inside: what waits for a batch, or for the room that none makes any more, is given up.
fn clean_stop(world: &mut World) -> Outcome {
    let fails = world.setup.backing_fault > 0 && !world.faults_over;
    world.faults_over = true;
    let outcome = clean_stop_whole(world, fails);
    (world.faults_over, world.is_ending) = (false, false);
    outcome
}

fn clean_stop_whole(world: &mut World, fails: bool) -> Outcome {
    let begun = world.now;
    world.cancel_resize()?;
    let engine = world.engine.as_mut().expect("there is a process");
    if world.random.one_in(2) {
        engine.want_checkpoint();
    }
    engine.sync(&mut world.memory);
    engine.stop_writeback();
    engine.give_up_writes(&mut world.memory);
    world.is_ending = true;
    world.drain_effects()?;
    let quiet = |world: &World| {
        let engine = world.engine.as_ref().expect("there is a process");
        engine.is_quiet() && engine.is_checkpointed()
    };
    while !quiet(world) {
        if !world.step()? || world.now - begun > WAIT_MAX {
            return Err(Failure(format!("a stop does not end: {}", stuck(world).0)));
        }
    }
    world.count();
    let engine = world.engine.take().expect("there is a process");
    let mut superblock = world.superblock.clone();
    engine.note_heads(&mut superblock);
    superblock.sequence += 1;
    superblock.clean = true;
    let mut forgotten = vec![false; world.volumes.len()];
    for (index, forgotten) in forgotten.iter_mut().enumerate() {
        let clean = engine.is_clean(VolumeIndex(index as u8)) && world.setup.rot == 0;
        *forgotten = world.setup.operator > 0 && clean && world.random.one_in(4);
        *forgotten &= world.late != Some(index);
    }
    let mut lost = vec![false; world.volumes.len()];
    let wants = |index: usize| engine.wants_backing_flush(VolumeIndex(index as u8));
    for index in 0..world.volumes.len() {
        if !wants(index) {
            continue;
        }
        if world.late == Some(index) {
            superblock.clean = false;
            continue;
        }
        let through = world.volumes[index].device.flush_begin();
        if forgotten[index] || !fails || !world.random.one_in(3) {
            world.volumes[index].flushed(through);
            continue;
        }
        lost[index] = true;
        world.marks.hit("backing flush failed at a stop");
        world.backing_flush_failed(index, through);
        let whole = world.flushes_disk(index);
        for other in (0..lost.len()).filter(|other| whole && *other != index) {
            let later = other > index && engine.is_served(VolumeIndex(other as u8));
            if later || world.late == Some(other) {
                lost[other] = true;
                let through = world.volumes[other].device.flush_begin();
                world.backing_flush_failed(other, through);
            }
        }
    }
    // Somebody who forgets one does that after the stop, when nothing of it has failed.
    for index in (0..forgotten.len()).filter(|index| forgotten[*index] && !lost[*index]) {
        world.forget_volume(&mut superblock, index);
    }
    for (index, recorded) in superblock.volumes.iter_mut().enumerate() {
        if let Some(recorded) = recorded
            && lost.get(index) == Some(&true)
            && wants(index)
        {
            (superblock.clean, recorded.flush_failed) = (false, true);
        }
    }
    let is_clean = superblock.clean;
    for address in Superblock::addresses(superblock.size_bytes) {
        let bytes = superblock.encode(address);
        world.watch_copies(address, &bytes);
        world.cache.write(crate::opening::pieces(address, &bytes));
        let through = world.cache.flush_begin();
        world.cache.flush_end(through);
    }
    world.superblock = superblock;
    world.models_stopped(Stop::Process, false);
    for volume in &mut world.volumes {
        volume.around_used = !is_clean || volume.may_bypass();
    }
    Ok(())
}

/// At the end everything is drained: the backing device alone is the disk then (P3).
pub(crate) fn drain(world: &mut World) -> Outcome {
    world.faults_over = true;
    revive(world);
    settle(world)?;
    if world.cache_failed {
        restart_failed(world)?;
    }
    world.serve_late()?;
    acknowledge(world)?;
    // What the last stop left unanswered comes again before that.
    world
        .attached()
        .into_iter()
        .try_for_each(|index| settle_volume(world, index).and_then(|()| drain_volume(world, index)))
}

/// Where a flush failed, the guest is told, and the operator starts it again.
fn acknowledge(world: &mut World) -> Outcome {
    let failed = |index: &usize| world.volumes[*index].flush_failed;
    let failed: Vec<_> = world.attached().into_iter().filter(failed).collect();
    if failed.is_empty() {
        return Ok(());
    }
    world.marks.hit("restarted after a failed flush");
    for index in failed {
        world.ask(index, Op::Flush, 0, 0)?;
        settle_volume(world, index)?;
    }
    // What came again to a volume that came late is answered, too.
    settle(world)?;
    clean_stop(world)?;
    world.faults_over = true;
    world.open(None)
}

/// Every volume's backing device alone is the disk then.
pub(crate) fn drain_all(world: &mut World) -> Outcome {
    world.attached().into_iter().try_for_each(|index| drain_one(world, index))
}

/// This one's is, then. What it was asked for before is waited for.
pub(crate) fn drain_one(world: &mut World, index: usize) -> Outcome {
    world.faults_over = true;
    let outcome = settle_volume(world, index).and_then(|()| drain_volume(world, index));
    world.faults_over = false;
    outcome
}

/// Drains a volume that the guest leaves alone, and compares.
pub(crate) fn drain_volume(world: &mut World, index: usize) -> Outcome {
    let engine = world.engine.as_mut().expect("there is a process");
    engine.drain(VolumeIndex(index as u8), &mut world.memory);
    world.drain_effects()?;
    let begun = world.now;
    while !world.engine.as_ref().is_some_and(|engine| engine.is_clean(VolumeIndex(index as u8))) {
        if !world.step()? || world.now - begun > WAIT_MAX {
            return Err(Failure(format!("a drain does not end: {}", stuck(world).0)));
        }
    }
    world.ask(index, Op::Flush, 0, 0)?;
    settle_volume(world, index)?;
    let (made, now) = (world.moment(), world.moment());
    let volume = &mut world.volumes[index];
    if volume.flush_failed {
        // The guest was told that not all of it is there.
        return Ok(());
    }
    for cell in 0..volume.cells() {
        let lba = volume.lba(cell);
        let content = volume.device.durable(lba);
        let mask = volume.mask(lba);
        if volume.model.is_lost(cell, made) {
            continue;
        }
        volume
            .model
            .read(cell, &content, (mask, mask), made, now)
            .map_err(|text| Failure(format!("drained, but the backing device differs: {text}")))?;
    }
    Ok(())
}
