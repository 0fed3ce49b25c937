// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What has to be read from the backing device after all, since something else failed, and is written meanwhile (R4 of `op::read::bad`, F6 of `op::miss`).
//!
//! Both were found by seed 679 and by looking for more of its kind: an older version was read from the backing device with a ticket of after the
//! write, entered the log as a copy, and was the newest there.

use crate::support::{
    ask, clean, found, is_in_log, place, power_cut, read, settle, stats, world_of, world_with,
};
use forebay_core::format::superblock::Order;
use forebay_core::map::extent::lost_room;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);

/// Zeros are placed without a block in the log: only where the block is looked for says that they are there.
fn zero(world: &mut World, block: u64) {
    ask(world, 0, Op::WriteZeroes { fua: false }, block, 1);
}

fn make_bad(world: &mut World) {
    for block in 0..2 {
        let at = place(world, block);
        world.cache.make_unreadable(at);
    }
}

/// Of blocks 0 and 1 the cache has clean versions, which are bad.
fn with_bad_ones(mutants: Mutants) -> Result<World, String> {
    let mut world = world_with(64, |setup| {
        setup.config.mutants = mutants;
        setup.config.fill_run_max = 64;
    });
    ask(&mut world, 0, Op::Write { fua: false }, 0, 2);
    settle(&mut world);
    clean(&mut world, VOLUME);
    power_cut(&mut world);
    // The first copy has the backing device flushed: it is not known what went to it before.
    read(&mut world, 40)?;
    while world.has_events() {
        world.step().map_err(|failure| failure.0)?;
    }
    make_bad(&mut world);
    Ok(world)
}

/// Two clean blocks of the cache device are bad. While the second is read once more zeros are written over the first.
fn repaired_over_zeros(mutants: Mutants) -> Result<(), String> {
    let mut world = with_bad_ones(mutants)?;
    ask(&mut world, 0, Op::Read, 0, 2);
    while is_in_log(&world, 0) {
        assert!(world.step().map_err(|failure| failure.0)?, "it goes on");
    }
    assert!(is_in_log(&world, 1), "it is being read once more");
    zero(&mut world, 0);
    settle(&mut world);
    read(&mut world, 0)
}

/// A guest waits for what is read ahead, and writes zeros over it; then that read fails.
fn failed_over_zeros(mutants: Mutants) -> Result<(), String> {
    let mut world = world_with(600, |setup| {
        setup.config.mutants = mutants;
        setup.config.ahead_blocks = 256;
        setup.config.fill_run_max = 64;
        setup.volumes[0].order = Order::Relaxed;
    });
    for block in 0..3 {
        read(&mut world, block)?;
    }
    world.volumes[0].device.failed = true;
    ask(&mut world, 0, Op::Read, 3, 1);
    zero(&mut world, 3);
    assert_eq!((stats(&world).shared_blocks, stats(&world).ahead_faults), (1, 0));
    while stats(&world).ahead_faults == 0 {
        assert!(world.step().map_err(|failure| failure.0)?, "it goes on");
    }
    world.volumes[0].device.failed = false;
    settle(&mut world);
    read(&mut world, 3)
}

/// To forget a block takes room for an extent more, and lost blocks have it all. It is read from the backing device all the same, and not looked
/// for in the cache again and again.
#[test]
fn what_is_bad_and_cannot_be_forgotten_is_read_from_the_backing_device() {
    let mut world = world_of(128, 4000, |setup| setup.config.fill_run_max = 0);
    let room = world.setup.config.extent_count_max as usize;
    let lost = room + lost_room(room);
    ask(&mut world, 0, Op::Write { fua: false }, 0, 2);
    settle(&mut world);
    clean(&mut world, VOLUME);
    // All of it stays dirty.
    world.volumes[0].device.failed = true;
    let dirty = || (100..).step_by(2).take(lost + 100);
    for block in dirty() {
        ask(&mut world, 0, Op::Write { fua: false }, block, 1);
    }
    ask(&mut world, 0, Op::Flush, 0, 0);
    settle(&mut world);
    world.volumes[0].device.failed = false;
    let now = world.moment();
    for block in dirty() {
        if let Some(at) = found(&world, block) {
            world.volumes[0].model.may_be_lost(block as usize, now);
            world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(block as usize);
            world.cache.make_unreadable(at);
        }
    }
    make_bad(&mut world);
    world.engine.as_mut().expect("there is a process").drain(VOLUME, &mut world.memory);
    world.drain_effects().expect("it goes on");
    // As far as there is room.
    while world.has_events() {
        world.step().expect("it goes on");
    }
    let before = stats(&world).repaired_blocks;
    ask(&mut world, 0, Op::Read, 0, 2);
    for _ in 0..100 {
        world.step().expect("it goes on");
    }
    assert!(world.asked.is_empty(), "it is not answered");
    assert!(is_in_log(&world, 0) && is_in_log(&world, 1), "there was room to forget them");
    assert_eq!(stats(&world).repaired_blocks, before + 2);
}

#[test]
fn a_repair_brings_nothing_back_that_was_written_over() {
    assert_eq!(repaired_over_zeros(Mutants::default()), Ok(()));
    let loose = repaired_over_zeros(Mutants::with(Mutant::RepairOverNewer));
    assert!(loose.is_err(), "else this shows nothing");
}

#[test]
fn what_is_read_again_brings_nothing_back_that_was_written_over() {
    assert_eq!(failed_over_zeros(Mutants::default()), Ok(()));
    let loose = failed_over_zeros(Mutants::with(Mutant::FailedOverNewer));
    assert!(loose.is_err(), "else this shows nothing");
}
