// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The superblock is written while the other copy is not durable, and the power fails: none of the two may be left.

use crate::support::world_by;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_sim::model::Stop;
use forebay_sim::random::Random;
use forebay_sim::world::World;
use std::rc::Rc;

/// As many cuts by chance, each of which leaves other sectors: of a hundred one takes both copies.
const CUTS: u64 = 1000;

fn world(seed: u64, mutants: Mutants) -> World {
    world_by(Random::new(seed), |setup| setup.config.mutants = mutants)
}

/// It has something new, and not in its first sector alone: a copy of it may be torn.
fn change(world: &mut World) {
    world.superblock.sequence += 1;
    let volume = world.superblock.volumes[0].as_mut();
    volume.expect("there is one").flush_epoch += 1;
}

/// Cuts that leave no superblock.
fn lost(mutants: Mutants, opened: impl Fn(World, u64) -> bool) -> u64 {
    (0..CUTS).filter(|seed| !opened(world(*seed, mutants), *seed)).count() as u64
}

/// The superblock is written, and written again; the power fails while its first copy is.
fn cut_in_the_next_write(mut world: World, _: u64) -> bool {
    change(&mut world);
    world.write_superblock();
    change(&mut world);
    let through = world.cache.flush_begin();
    world.write_superblock_in_part(1, through);
    world.stop(Stop::Power);
    world.open(Some(Stop::Power)).is_ok()
}

#[test]
fn the_second_copy_is_durable_before_the_first_is_written_again() {
    assert_eq!(lost(Mutants::default(), cut_in_the_next_write), 0);
    let loose = Mutants::with(Mutant::SuperblockSecondUnflushed);
    assert!(lost(loose, cut_in_the_next_write) > 0, "else this shows nothing");
}

/// The flush behind the second copy fails, which nobody hears, since the process is killed. The device has dropped some of the copy,
/// and shows all of it. The power fails somewhere in the next opening.
fn cut_in_the_next_opening(mut world: World, seed: u64) -> bool {
    change(&mut world);
    let through = world.cache.flush_begin();
    world.write_superblock_in_part(3, through);
    let through = world.cache.flush_begin();
    world.cache.flush_drops(through, &mut Random::new(seed));
    world.stop(Stop::Process);
    world.cache_unsure = true;
    Rc::make_mut(&mut world.setup).steady = false; // by chance there is a crash within
    world.open(Some(Stop::Process)).is_ok()
}

#[test]
fn the_second_copy_is_written_again_before_an_opening_replaces_the_first() {
    assert_eq!(lost(Mutants::default(), cut_in_the_next_opening), 0);
    let loose = Mutants::with(Mutant::SuperblockSecondNotRenewed);
    assert!(lost(loose, cut_in_the_next_opening) > 0, "else this shows nothing");
}
