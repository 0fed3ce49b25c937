// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache becomes smaller while a guest writes, and the power fails as soon as the superblock may say so.

mod support;

use forebay_core::log::resize::Stage;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::random::Random;
use forebay_sim::world::Failure;
use support::{clean, read, world_of};

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
    let stage = |world: &forebay_sim::world::World| {
        world.engine.as_ref().and_then(|engine| engine.resize_stage())
    };
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
