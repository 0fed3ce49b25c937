// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is read ahead of a guest, and what happens to it meanwhile.

use crate::support::{ask, push_out, read, settle, stats, world_with};
use forebay_core::format::superblock::Order;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::stats::Stats;
use forebay_core::units::VolumeIndex;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);
const WRITE: Op = Op::Write { fua: false };

/// A volume that nothing of is in the cache.
fn cold(mutants: Mutants) -> World {
    world_with(600, |setup| {
        setup.config.mutants = mutants;
        setup.config.ahead_blocks = 256;
        setup.config.fill_run_max = 0;
        setup.volumes[0].order = Order::Relaxed;
    })
}

/// Blocks 0 to 2 are read, one by one: 3 and 4 are being read ahead.
fn read_three(world: &mut World) -> Result<(), String> {
    (0..3).try_for_each(|block| read(world, block))?;
    assert_eq!(stats(world).ahead_blocks, 2);
    Ok(())
}

/// The devices have nothing more to do.
fn come_to_rest(world: &mut World) {
    while world.has_events() {
        world.step().expect("it goes on");
    }
}

#[test]
fn what_was_read_ahead_is_read_from_memory() {
    let mut world = cold(Mutants::default());
    read_three(&mut world).expect("as the model says");
    come_to_rest(&mut world);
    ask(&mut world, 0, Op::Read, 3, 1);
    assert!(world.asked.is_empty(), "it is answered at once");
    let Stats { miss_blocks, backing_waits, ahead_used_blocks, .. } = stats(&world);
    assert_eq!((miss_blocks, backing_waits, ahead_used_blocks), (4, 3, 1));
}

/// A block that was read ahead is written around the log, then read.
fn written_around(mutants: Mutants) -> Result<(), String> {
    let mut world = cold(mutants);
    read_three(&mut world)?;
    come_to_rest(&mut world);
    world.volumes[0].bypasses();
    world.engine.as_mut().expect("there is a process").set_cutoff(VOLUME, 1);
    ask(&mut world, 0, WRITE, 3, 1);
    settle(&mut world);
    assert_eq!(stats(&world).bypassed_writes, 1);
    read(&mut world, 3)
}

/// A block that is being read ahead is written through the log, written back, and gone from the log again before somebody
/// reads it.
fn written_and_gone(mutants: Mutants) -> Result<(), String> {
    let mut world = cold(mutants);
    read_three(&mut world)?;
    ask(&mut world, 0, WRITE, 3, 1);
    settle(&mut world);
    come_to_rest(&mut world);
    push_out(&mut world, 3);
    read(&mut world, 3)
}

#[test]
fn what_was_read_ahead_and_written_since_is_not_brought_back() {
    for story in [written_around, written_and_gone] {
        assert_eq!(story(Mutants::default()), Ok(()));
        let loose = story(Mutants::with(Mutant::ReadAheadNotVoided));
        assert!(loose.is_err(), "else this shows nothing");
    }
}

/// Nobody is told of a fault of a read that nobody asked for.
#[test]
fn a_guest_that_waits_for_what_is_read_ahead_reads_it_himself_if_that_fails() {
    let mut world = cold(Mutants::default());
    read_three(&mut world).expect("as the model says");
    ask(&mut world, 0, Op::Read, 3, 1);
    assert_eq!(stats(&world).shared_blocks, 1);
    world.volumes[0].device.failed = true;
    while stats(&world).ahead_faults == 0 {
        assert!(world.step().expect("it goes on"));
    }
    assert_eq!(world.asked.len(), 1, "it is not answered");
    world.volumes[0].device.failed = false;
    // An error would be one that nothing excuses.
    settle(&mut world);
    assert_eq!(stats(&world).backing_faults, 0);
}

/// What is in the cache, or is zeros there, is not read ahead: the backing device has something older.
#[test]
fn only_what_is_nowhere_else_is_read_ahead() {
    let mut world = cold(Mutants::default());
    ask(&mut world, 0, WRITE, 3, 1);
    ask(&mut world, 0, Op::WriteZeroes { fua: false }, 4, 1);
    settle(&mut world);
    (0..3).try_for_each(|block| read(&mut world, block)).expect("as the model says");
    assert_eq!(stats(&world).ahead_blocks, 0);
    for block in 3..20 {
        read(&mut world, block).expect("as the model says");
    }
    assert!(stats(&world).ahead_used_blocks > 0);
}
