// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small world that a test steers by hand.

use forebay_core::format::superblock::Mode;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::stats::Stats;
use forebay_core::units::{BLOCK_BYTES, Lba, VolumeIndex};
use forebay_sim::block::{Block, origin};
use forebay_sim::exhaustive::{Scope, setup};
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::random::Random;
use forebay_sim::setup::{Island, Setup, format};
use forebay_sim::world::World;
use std::panic::catch_unwind;
use std::rc::Rc;

/// One volume of so many blocks, or what `change` makes of that; a fresh cache of 16 segments of 16 blocks.
pub fn world_with(blocks: u64, change: impl FnOnce(&mut Setup)) -> World {
    world_of(16, blocks, change)
}

/// The same with another number of segments.
pub fn world_of(segments: u32, blocks: u64, change: impl FnOnce(&mut Setup)) -> World {
    world_from(segments, blocks, Random::new(1), change)
}

/// A small one, with its own chance.
pub fn world_by(random: Random, change: impl FnOnce(&mut Setup)) -> World {
    world_from(16, 64, random, change)
}

fn world_from(
    segments: u32,
    blocks: u64,
    random: Random,
    change: impl FnOnce(&mut Setup),
) -> World {
    let (mode, mutants) = (Mode::WriteBack, Mutants::default());
    let mut setup = setup(Scope { length: 0, one_in: 1, stores_length: 0, mode, mutants });
    setup.volumes[0].size_bytes = blocks * BLOCK_BYTES;
    setup.volumes[0].islands = vec![Island { start: 0, blocks }];
    change(&mut setup);
    setup.superblock = format(segments, 64 << 10, &setup.volumes, 5);
    let mut world = World::new(setup, random);
    world.format();
    world.open(None).expect("a fresh cache");
    world
}

/// Tells a story that goes well, and does not with a deliberate fault.
pub fn tell_with_and_without(mutant: Mutant, story: fn(Mutants)) {
    story(Mutants::default());
    let loose = catch_unwind(|| story(Mutants::with(mutant)));
    assert!(loose.is_err(), "else this shows nothing");
}

/// Gives a request.
pub fn ask(world: &mut World, volume: usize, op: Op, block: u64, blocks: u64) {
    let (offset, length) = (block * BLOCK_BYTES, blocks * BLOCK_BYTES);
    assert!(world.ask(volume, op, offset, length).expect("it is taken"));
}

/// What is counted of the first volume.
pub fn stats(world: &World) -> Stats {
    let engine = world.engine.as_ref().expect("there is a process");
    engine.status(VolumeIndex(0)).expect("it is there").stats
}

/// Whether the log has a block of the first volume.
pub fn is_in_log(world: &World, block: u64) -> bool {
    world.engine.as_ref().is_some_and(|engine| engine.is_in_log(VolumeIndex(0), Lba(block)))
}

/// Others, of 100 to 600, are written and written back until the log does not have a block of the first volume any more.
pub fn push_out(world: &mut World, block: u64) {
    for other in 100..600 {
        if !is_in_log(world, block) {
            return;
        }
        ask(world, 0, Op::Write { fua: false }, other, 1);
        clean(world, VolumeIndex(0));
    }
    panic!("its segment was not needed");
}

/// Until all that was asked for is answered.
pub fn settle(world: &mut World) {
    while !world.asked.is_empty() {
        assert!(world.step().expect("it goes on"));
    }
}

/// Reads a block of the first volume; what it says is compared with the model, and this is what came of it.
pub fn read(world: &mut World, block: u64) -> Result<(), String> {
    world.ask(0, Op::Read, block * BLOCK_BYTES, BLOCK_BYTES).map_err(|failure| failure.0)?;
    while !world.asked.is_empty() {
        world.step().map_err(|failure| failure.0)?;
    }
    Ok(())
}

/// Blocks of the cache device with a record's header.
pub fn headers(world: &World) -> Vec<u64> {
    let first = world.superblock.first_segment / BLOCK_BYTES;
    let blocks = u64::from(world.superblock.segment_count) * 16;
    let magic = |at: &u64| world.cache.read(*at).bytes().starts_with(b"FBRECORD");
    (first..first + blocks).filter(magic).collect()
}

/// Writes these blocks, a record for each.
fn write(world: &mut World, blocks: std::ops::Range<u64>) {
    for block in blocks {
        ask(world, 0, Op::Write { fua: false }, block, 1);
        settle(world);
        ask(world, 0, Op::Flush, 0, 0);
        settle(world);
    }
}

/// A log of small records that is dirty and at rest: all of it is on the cache device and nothing in memory.
pub fn written(mutants: Mutants, blocks: u64) -> World {
    let mut world = world_with(64, |setup| setup.config.mutants = mutants);
    write(&mut world, 0..blocks);
    power_cut(&mut world);
    world
}

/// What is dirty is written back.
pub fn clean(world: &mut World, volume: VolumeIndex) {
    world.engine.as_mut().expect("there is a process").drain(volume, &mut world.memory);
    world.drain_effects().expect("it goes on");
    while !world.engine.as_ref().expect("there is a process").is_clean(volume) {
        assert!(world.step().expect("it goes on"));
    }
    let engine = world.engine.as_mut().expect("there is a process");
    engine.set_mode(volume, Mode::WriteBack, &mut world.memory);
    world.drain_effects().expect("it goes on");
}

/// A checkpoint is made, and named.
pub fn checkpoint(world: &mut World) {
    world.engine.as_mut().expect("there is a process").want_checkpoint();
    world.put_in_order().expect("it goes on");
    while !world.engine.as_ref().is_some_and(|engine| engine.is_checkpointed()) {
        assert!(world.step().expect("it goes on"));
    }
}

/// Of what was not flushed nothing is left.
pub fn power_cut(world: &mut World) {
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).expect("it is opened");
}

/// Where on the cache device a block lies: its newest version.
pub fn place(world: &World, block: u64) -> u64 {
    found(world, block).expect("it was written")
}

/// The same, if it is there: some of what is written is zeros.
pub fn found(world: &World, block: u64) -> Option<u64> {
    let first = world.superblock.first_segment / BLOCK_BYTES;
    let mut all = first..first + u64::from(world.superblock.segment_count) * 16;
    let is_it = |at: &u64| origin(&world.cache.read(*at), 0).is_some_and(|it| it.1 == block);
    all.rfind(is_it)
}

/// The header of the record rots that was written for a block. What it held is not lost.
pub fn rot_header(world: &mut World, block: u64) {
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    world.volumes[0].model.copy_damaged(block as usize);
    let at = place(world, block) - 1;
    world.cache.rot(at, Block::zero());
}
