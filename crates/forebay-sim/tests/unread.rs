// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the cache device could not read, and can again: a controller, a cable, a power supply. What is in the log then must not
//! come back over what the guest wrote meanwhile.

use crate::support::{
    ask, checkpoint, clean, headers, is_in_log, place, power_cut, push_out, read, settle, stats,
    world_with,
};
use forebay_core::format::superblock::Order;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::block::origin;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = 7;

/// The log holds a clean version of a block, and one of another behind it.
fn with_clean_version(mutants: Mutants) -> World {
    let mut world = world_with(64, |setup| {
        setup.config.mutants = mutants;
        setup.config.fill_run_max = 0;
        // What is damaged is this test's doing, and nothing else is.
        setup.rot = u64::MAX;
    });
    world.faults_over = true;
    for block in [BLOCK, BLOCK + 1] {
        ask(&mut world, 0, Op::Write { fua: true }, block, 1);
        settle(&mut world);
    }
    clean(&mut world, VOLUME);
    world
}

/// The block is written around the log, durably.
fn write_around(world: &mut World) {
    world.volumes[0].bypasses();
    world.engine.as_mut().expect("there is a process").set_cutoff(VOLUME, 1);
    ask(world, 0, Op::Write { fua: true }, BLOCK, 1);
    settle(world);
    assert_eq!(stats(world).bypassed_writes, 1);
}

/// The header of the block's record cannot be read at an opening. What it held is known by the next one, so the map knows nothing
/// of the block, and it is written around the log. At the next opening the header is there.
fn header_comes_back(mutants: Mutants) -> Result<(), String> {
    let mut world = with_clean_version(mutants);
    let header = place(&world, BLOCK) - 1;
    world.volumes[0].model.copy_damaged(BLOCK as usize);
    world.cache.make_unreadable(header);
    power_cut(&mut world);
    assert!(!is_in_log(&world, BLOCK));
    write_around(&mut world);
    assert!(world.cache.read_again());
    power_cut(&mut world);
    read(&mut world, BLOCK)
}

#[test]
fn a_header_that_can_be_read_again_brings_back_nothing_that_was_written_around() {
    assert_eq!(header_comes_back(Mutants::default()), Ok(()));
    let loose = header_comes_back(Mutants::with(Mutant::UnreadStaysUnread));
    assert!(loose.is_err(), "else this shows nothing");
}

/// The same of a fill, in a record that is not on the backing device as a whole: that names it as what is there, which is no entry in the log.
#[test]
fn a_fills_header_that_can_be_read_again_brings_back_nothing_that_was_written_around() {
    let mut world = world_with(600, |setup| {
        setup.volumes[0].order = Order::Relaxed;
        setup.rot = u64::MAX;
    });
    world.faults_over = true;
    let write = Op::Write { fua: true };
    // What it holds is not that of a fresh disk.
    ask(&mut world, 0, write, BLOCK, 1);
    settle(&mut world);
    clean(&mut world, VOLUME);
    push_out(&mut world, BLOCK);
    ask(&mut world, 0, write, 1, 1);
    settle(&mut world);
    let before = headers(&world);
    for _ in 0..2 {
        read(&mut world, BLOCK).unwrap();
    }
    for block in [2, 3] {
        ask(&mut world, 0, write, block, 1);
        settle(&mut world);
    }
    assert!(is_in_log(&world, BLOCK), "it was filled");
    let holds = |at: &u64| origin(&world.cache.read(at + 1), 0).is_some_and(|it| it.1 == BLOCK);
    let header = headers(&world).into_iter().find(|at| !before.contains(at) && holds(at));
    world.volumes[0].model.copy_damaged(BLOCK as usize);
    world.cache.make_unreadable(header.expect("a record of its own"));
    power_cut(&mut world);
    write_around(&mut world);
    assert!(world.cache.read_again());
    power_cut(&mut world);
    assert_eq!(read(&mut world, BLOCK), Ok(()));
}

/// The block's copy cannot be read, twice, and is forgotten; a checkpoint is written without it, and opened from. The next opening
/// knows nothing of that. The block is written around the log; then the checkpoint is not named any more, as when the cache gets
/// another size, and the power fails: all of the log is read.
fn copy_comes_back(mutants: Mutants) -> Result<(), String> {
    let mut world = with_clean_version(mutants);
    let copy = place(&world, BLOCK);
    power_cut(&mut world);
    world.volumes[0].model.copy_damaged(BLOCK as usize);
    world.cache.make_unreadable(copy);
    read(&mut world, BLOCK)?;
    assert!(!is_in_log(&world, BLOCK));
    checkpoint(&mut world);
    power_cut(&mut world);
    assert_eq!(world.marks.count("opened from a checkpoint"), 1);
    assert!(!is_in_log(&world, BLOCK));
    write_around(&mut world);
    world.superblock.checkpoint_sequence = 0;
    world.write_superblock();
    assert!(world.cache.read_again());
    power_cut(&mut world);
    read(&mut world, BLOCK)
}

#[test]
fn a_copy_that_was_forgotten_before_a_checkpoint_is_voided_after_it() {
    assert_eq!(copy_comes_back(Mutants::default()), Ok(()));
    let loose = copy_comes_back(Mutants::with(Mutant::UnreadStaysUnread));
    assert!(loose.is_err(), "else this shows nothing");
}
