// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache becomes smaller while a guest writes, and the power fails as soon as the superblock may say so.

use crate::support::{ask, clean, headers, place, power_cut, read, settle, world_of};
use forebay_core::log::resize::Stage;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::random::Random;
use forebay_sim::world::{Failure, World};
use std::rc::Rc;

const BLOCKS: u64 = 64;
const SEGMENTS: u32 = 30;
const TURNS: u64 = 40;

/// The superblock of the smaller cache names where each log ends. The guest goes on writing, so the last record is not durable yet; of what was
/// not flushed the cut leaves nothing.
fn cut_when_smaller(mutants: Mutants, turn: u64) -> Result<(), String> {
    let text = |failure: Failure| failure.0;
    let mut world = world_of(SEGMENTS, BLOCKS, |setup| setup.config.mutants = mutants);
    world.random = Random::new(turn);
    let mut random = Random::new(turn);
    let stage = |world: &World| world.engine.as_ref().and_then(|engine| engine.resize_stage());
    for lap in 0..60 {
        let block = random.below(BLOCKS);
        let op = Op::Write { fua: random.one_in(4) };
        world.ask(0, op, block * BLOCK_BYTES, BLOCK_BYTES).map_err(text)?;
        while !world.asked.is_empty() {
            world.step().map_err(text)?;
        }
        if lap == 30 {
            clean(&mut world, forebay_core::units::VolumeIndex(0));
        }
    }
    world.begin_to_resize(&mut random).map_err(text)?;
    while stage(&world).is_some_and(|stage| stage != Stage::Ready) {
        if world.asked.is_empty() {
            let block = random.below(BLOCKS);
            world
                .ask(0, Op::Write { fua: false }, block * BLOCK_BYTES, BLOCK_BYTES)
                .map_err(text)?;
        }
        world.step().map_err(text)?;
    }
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).map_err(text)?;
    (0..BLOCKS).try_for_each(|block| read(&mut world, block))
}

#[test]
fn where_a_log_ends_is_durable_before_the_superblock_says_so() {
    for turn in 0..TURNS {
        assert_eq!(cut_when_smaller(Mutants::default(), turn), Ok(()), "turn {turn}");
    }
    let loose = Mutants::with(Mutant::ResizeEndsNotDurable);
    let failed = (0..TURNS).filter(|turn| cut_when_smaller(loose, *turn).is_err()).count();
    assert!(failed > 0, "else this shows nothing");
}

/// Of a segment in a log all the records have rotted, which the next one tells of; a program from before did not keep it then, and it went with the end
/// of the cache. What is before it is found.
fn opened_without(mutants: Mutants) -> Result<(), String> {
    const LOST: u64 = 8;
    let write = |world: &mut World, volume, block| {
        ask(world, volume, Op::Write { fua: true }, block, 1);
        settle(world);
    };
    let mut world = world_of(20, BLOCKS, |setup| {
        setup.config.mutants = Mutants::with(Mutant::GapStays);
        (setup.config.dirty_age, setup.config.dirty_percent) = (1 << 60, 100);
        setup.volumes.push(setup.volumes[0].clone());
    });
    let segment =
        |world: &World, number: u64| number * 16 + world.superblock.first_segment / BLOCK_BYTES;
    // The other one has all segments but the last two.
    for turn in 0.. {
        write(&mut world, 1, turn % BLOCKS);
        if turn % 16 == 15 {
            clean(&mut world, VolumeIndex(1));
        }
        if headers(&world).last().is_some_and(|at| *at >= segment(&world, 17)) {
            break;
        }
    }
    for block in 0..=LOST {
        write(&mut world, 0, block);
    }
    let at = place(&world, LOST);
    let last = segment(&world, 19);
    assert_eq!(at, last + 1, "it is the first in the last segment");
    power_cut(&mut world);
    write(&mut world, 0, LOST + 1);
    assert!(place(&world, LOST + 1) < last);
    let now = world.moment();
    world.volumes[0].model.may_be_lost(LOST as usize, now);
    world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(LOST as usize);
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    world.cache.rot(at - 1, Block::zero());
    power_cut(&mut world);
    Rc::make_mut(&mut world.setup).segments = (19, 19);
    world.begin_to_resize(&mut Random::new(1)).map_err(|failure| failure.0)?;
    // Bounded, so that this ends if it does not.
    for _ in 0..5000 {
        if world.superblock.segment_count == 19 {
            break;
        }
        // Something happens, so that the time goes on in small steps.
        if world.asked.is_empty() {
            ask(&mut world, 1, Op::Read, 0, 1);
        }
        assert!(world.step().map_err(|failure| failure.0)?);
    }
    assert_eq!(world.superblock.segment_count, 19);
    let is_dirty = |world: &World| {
        world.engine.as_ref().is_some_and(|engine| !engine.is_clean(VolumeIndex(0)))
    };
    assert!(is_dirty(&world), "else nobody reads what is before it");
    Rc::make_mut(&mut world.setup).config.mutants = mutants;
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).map_err(|failure| failure.0)?;
    (0..LOST).try_for_each(|block| read(&mut world, block))
}

#[test]
fn a_log_does_not_end_at_a_segment_that_is_gone() {
    assert_eq!(opened_without(Mutants::default()), Ok(()));
    let failed = opened_without(Mutants::with(Mutant::GoneEndsLog));
    assert!(failed.is_err_and(|failed| failed.contains("NoVolume")), "else this shows nothing");
}
