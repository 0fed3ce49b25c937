// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Moments that chance alone seldom comes to, and that tell much: the guest and the operator do what leads there, and the
//! machine stops there, or somebody writes just then.
//!
//! Each is reached by what any guest, operator and device may do, and nothing more is compared there than elsewhere. Whether one
//! is sought is a chance of its own.

use crate::flight::Done;
use crate::model::Stop;
use crate::random::{Random, mix};
use crate::run::{drain_one, operation, read_all, restart, settle_volume, stays_dirty};
use crate::world::{Failure, Outcome, World};
use forebay_core::effect::{Effect, SuperblockChange};
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::log::resize::Stage;
use forebay_core::op::grow::Growth;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, Lba, VolumeIndex};
use forebay_core::why::Place;

/// A chance that leaves the run's own as it is.
fn chance(world: &World, of: u64) -> Random {
    Random::new(mix(world.order ^ world.trace ^ of))
}

/// Goes on until a volume that grows may do so, or may have.
fn await_growth(world: &mut World) -> Outcome {
    let attached = world.attached();
    let index = *world.random.pick(&attached);
    let size_bytes = world.volumes[index].size_bytes;
    if world.random.one_in(2) {
        // The log has something of the last block.
        world.ask(index, Op::Write { fua: false }, size_bytes - 512, 512)?;
    }
    if world.volumes[index].growing.is_none() {
        world.begin_to_grow(index)?;
    }
    let at = VolumeIndex(index as u8);
    // Bounded: what is dirty may not be written back so soon.
    for _ in 0..300 {
        let growth = world.engine.as_ref().and_then(|engine| engine.growth(at));
        if growth == Some(Growth::Ready) {
            break;
        }
        if !world.random.one_in(2) || !operation(world)? {
            world.step()?;
        }
    }
    let more = *world.random.pick(&[0, 0, 4, 60]);
    for _ in 0..more {
        world.step()?;
    }
    Ok(())
}

/// Goes on until the cache may have another size. Says whether the machine is to stop then and there: what the new size rests on has
/// just become durable, if it has.
fn await_resize(world: &mut World, random: &mut Random) -> Result<bool, Failure> {
    world.begin_to_resize(random)?;
    // Bounded: what is dirty may not be written back so soon.
    for _ in 0..600 {
        let stage = world.engine.as_ref().and_then(|engine| engine.resize_stage());
        if stage == Some(Stage::Ready) && random.one_in(2) {
            world.marks.hit("stopped as soon as the cache may have another size");
            return Ok(true);
        }
        if matches!(stage, None | Some(Stage::Ready)) {
            break;
        }
        if !world.random.one_in(2) || !operation(world)? {
            world.step()?;
        }
    }
    Ok(false)
}

/// Goes on, now and then, until a device has just done something that is rarely done: the machine
/// then stops between that and what follows from it.
pub(crate) fn await_moment(world: &mut World) -> Outcome {
    if world.random.one_in(2) {
        return Ok(());
    }
    if world.setup.operator > 0 && world.random.one_in(4) && !world.cache_failed {
        return await_growth(world);
    }
    let mut random = chance(world, 0x517E6);
    if world.setup.operator > 0 && random.one_in(4) && await_resize(world, &mut random)? {
        return Ok(());
    }
    let wanted = *world.random.pick(&Done::RARE);
    // Bounded: not each of them comes in each run.
    for _ in 0..300 {
        if !world.random.one_in(2) || !operation(world)? {
            world.step()?;
            if world.done == Some(wanted) {
                world.marks.hit("stopped behind what is rare");
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Before the power fails, now and then: something is done that rests on what the cut may undo. Says whether it was.
pub(crate) fn await_what_a_cut_undoes(world: &mut World) -> Result<bool, Failure> {
    let mut random = chance(world, 0xC07);
    if world.setup.operator == 0 || world.cache_failed || random.one_in(3) {
        return Ok(false);
    }
    if random.one_in(4) {
        return await_resize(world, &mut random);
    }
    // With that order nobody compares at watermarks: nothing else is said less of by what is done here.
    let fit = |index: &usize| {
        let volume = &world.volumes[*index];
        let well = !volume.device.failed && !volume.flush_failed;
        let relaxed = volume.order == Order::Relaxed && volume.prefix.is_none();
        well && relaxed && volume.growing.is_none() && stays_dirty(world, *index)
    };
    let fit: Vec<usize> = world.attached().into_iter().filter(fit).collect();
    if fit.is_empty() {
        return Ok(false);
    }
    let index = *random.pick(&fit);
    match random.one_in(2) {
        true => pass_over(world, index, &mut random),
        false => cancel_growth(world, index, &mut random),
    }
}

/// Whether the log has a clean version of a block.
fn is_clean_in_log(world: &World, index: usize, lba: u64) -> bool {
    let engine = world.engine.as_ref().expect("there is a process");
    let why = engine.why(VolumeIndex(index as u8), Lba(lba));
    let held = |place| matches!(place, Place::Buffer { .. } | Place::Cache { .. });
    why.is_some_and(|why| held(why.place) && !why.dirty)
}

/// A write through the log is answered.
fn write(world: &mut World, index: usize, (lba, bytes): (u64, u64)) -> Result<bool, Failure> {
    let asked = ask(world, index, 0, (lba, bytes))?;
    settle_volume(world, index)?;
    Ok(asked && !world.cache_failed)
}

/// A write goes around the log, and may have come to its device.
fn write_around(
    world: &mut World,
    index: usize,
    at: (u64, u64),
    random: &mut Random,
) -> Result<bool, Failure> {
    let asked = ask(world, index, 1, at)?;
    for _ in 0..*random.pick(&[0, 1, 2, 4, 8]) {
        world.step()?;
    }
    Ok(asked && !world.cache_failed)
}

/// Writes of so many blocks and more go around the log; this is one.
fn ask(
    world: &mut World,
    index: usize,
    cutoff: u32,
    (lba, bytes): (u64, u64),
) -> Result<bool, Failure> {
    let engine = world.engine.as_mut().expect("there is a process");
    engine.set_cutoff(VolumeIndex(index as u8), cutoff);
    world.ask(index, Op::Write { fua: false }, lba * BLOCK_BYTES, bytes)
}

/// The log has a clean version of a block, then a dirty one that is not durable, then a write goes around both.
fn pass_over(world: &mut World, index: usize, random: &mut Random) -> Result<bool, Failure> {
    settle_volume(world, index)?;
    let volume = &world.volumes[index];
    let from = random.below(volume.cells() as u64) as usize;
    let all = (0..volume.cells()).map(|at| volume.lba((from + at) % volume.cells()));
    let whole = |lba: &u64| (lba + 1) * BLOCK_BYTES <= volume.size_bytes;
    let clean = all.filter(whole).find(|lba| is_clean_in_log(world, index, *lba));
    let Some(lba) = clean.filter(|_| !world.cache_failed) else { return Ok(false) };
    let at = (lba, BLOCK_BYTES);
    let written = write(world, index, at)? && write_around(world, index, at, random)?;
    if written {
        world.marks.hit("stopped behind a write over what is not durable");
    }
    Ok(written)
}

/// The last block is there in part and its version in the log clean; an entry voids that, for the volume is to grow; it does not,
/// and the block is written around the log.
fn cancel_growth(world: &mut World, index: usize, random: &mut Random) -> Result<bool, Failure> {
    let (size_bytes, at) = (world.volumes[index].size_bytes, VolumeIndex(index as u8));
    let (last, part) = (size_bytes / BLOCK_BYTES, size_bytes % BLOCK_BYTES);
    if part == 0 || world.setup.rot > 0 {
        return Ok(false);
    }
    settle_volume(world, index)?;
    if world.cache_failed || !write(world, index, (last, part))? {
        return Ok(false);
    }
    drain_one(world, index)?;
    if world.cache_failed || world.volumes[index].flush_failed {
        return Ok(false);
    }
    world.change_mode(index, Mode::WriteBack)?;
    // Until a power cut finds it clean, too.
    for _ in 0..100 {
        world.step()?;
    }
    if world.cache_failed || !is_clean_in_log(world, index, last) {
        return Ok(false);
    }
    world.begin_to_grow(index)?;
    let growth = world.engine.as_ref().and_then(|engine| engine.growth(at));
    let voids = matches!(growth, Some(Growth::Voiding(_)));
    world.cancel_growth(index)?;
    let written = voids && write_around(world, index, (last, part), random)?;
    if written {
        world.marks.hit("stopped behind a write over what was to grow");
    }
    Ok(written)
}

/// After an opening that found blocks lost: they are named when all is written back, and the machine stops. What was known from the
/// log alone is known from that name now.
pub(crate) fn name_and_stop(world: &mut World) -> Outcome {
    let Some(index) = world.found_lost.take() else { return Ok(()) };
    let mut random = chance(world, 0x7057);
    let volume = &world.volumes[index];
    let frozen = |world: &World| {
        let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(index as u8)));
        status.is_none_or(|status| status.frozen)
    };
    let well = !volume.device.failed && !volume.flush_failed && volume.attached;
    if world.cache_failed || !well || frozen(world) || random.one_in(3) {
        return Ok(());
    }
    drain_one(world, index)?;
    if world.cache_failed || world.volumes[index].flush_failed {
        return Ok(());
    }
    world.marks.hit("stopped when what was lost was named");
    let stop = *random.pick(&[Stop::Process, Stop::Power]);
    restart(world, stop)
}

/// Marks that lie in the superblock rest on entries of the log: that name what is lost again, or hold again what was
/// refused. Once in a run the power fails when such marks have just been written. Says whether it did.
pub(crate) fn rests_on_the_superblock(world: &mut World) -> Result<bool, Failure> {
    let Some(volume) = world.marked.take() else { return Ok(false) };
    let status = world.engine.as_ref().and_then(|it| it.status(volume));
    let rests = status.is_some_and(|it| it.lost_blocks_now > 0 || it.parked_blocks > 0);
    if !rests || world.cache_failed || world.cut_at_marks {
        return Ok(false);
    }
    if !chance(world, 0x3A6C).one_in(2) {
        return Ok(false);
    }
    world.cut_at_marks = true;
    world.marks.hit("stopped when marks were in the superblock");
    world.stop(Stop::Power);
    world.open(Some(Stop::Power))?;
    name_and_stop(world)?;
    read_all(world)?;
    Ok(true)
}

/// While a block is read from the backing device to be healed the guest writes it, more often than not: what was read is old then.
pub(crate) fn write_what_is_healed(world: &mut World) -> Outcome {
    let Some((index, lba)) = world.healing.take() else { return Ok(()) };
    let mut random = chance(world, 0x4EA1);
    let volume = &world.volumes[index];
    let whole = volume.cell(lba).is_some() && (lba + 1) * BLOCK_BYTES <= volume.size_bytes;
    if !whole || !volume.attached || random.one_in(3) {
        return Ok(());
    }
    world.marks.hit("written while it was healed");
    let op = *random.pick(&[Op::Write { fua: false }, Op::WriteZeroes { fua: false }, Op::Discard]);
    world.ask(index, op, lba * BLOCK_BYTES, BLOCK_BYTES).map(|_| ())
}

impl World {
    /// Notes what one of these waits for: it was issued.
    pub(crate) fn note_issued(&mut self, effect: &Effect) {
        if let Effect::ReadBacking {
            volume,
            lba,
            blocks,
            to: forebay_core::payload::Place::Window { .. },
            ..
        } = effect
        {
            let index = usize::from(volume.0);
            match self.is_read_ahead(effect) {
                true => self.ahead = Some((index, lba.0, lba.0 + u64::from(*blocks))),
                false => self.healing = Some((index, lba.0)),
            }
        }
    }

    /// It is done.
    pub(crate) fn note_done(&mut self, effect: &Effect) {
        self.healing = None;
        if let Effect::WriteSuperblock { change: SuperblockChange::Marks { volume, .. }, .. } =
            effect
        {
            self.marked = Some(*volume);
        }
    }
}
