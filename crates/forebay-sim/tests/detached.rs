// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes that come and go: while checkpoints are written, and to the place of another one.

use crate::support::{ask, read, settle, stats, world_with};
use forebay_core::format::superblock::Order;
use forebay_core::request::Op;
use forebay_sim::world::World;

fn write(world: &mut World, volume: usize) {
    ask(world, volume, Op::Write { fua: true }, 0, 1);
    settle(world);
}

fn begin_checkpoint(world: &mut World) {
    world.engine.as_mut().expect("there is a process").want_checkpoint();
    world.put_in_order().expect("it goes on");
}

/// Whether the checkpoint under way is ended.
fn checkpoint_ends(world: &mut World) -> bool {
    for _ in 0..1000 {
        let engine = world.engine.as_ref().expect("there is a process");
        if engine.is_checkpointed() {
            return true;
        }
        if !world.step().expect("it goes on") {
            return false;
        }
    }
    false
}

/// The checkpoint waited until a volume was durable up to where another one had been that was detached from its
/// place before: for ever, and with it every stop. Found by seed 92.
#[test]
fn a_checkpoint_ends_when_a_volume_comes_to_where_another_was() {
    let mut came_between = 0;
    for steps in 0..40 {
        let mut world = world_with(3, |setup| setup.volumes.push(setup.volumes[0].clone()));
        write(&mut world, 0);
        write(&mut world, 1);
        begin_checkpoint(&mut world);
        assert!(checkpoint_ends(&mut world));
        world.detach(0).expect("it goes on");
        assert!(!world.volumes[0].attached);
        write(&mut world, 1);
        begin_checkpoint(&mut world);
        // Placed while pages are copied, so that the naming waits for it.
        ask(&mut world, 1, Op::Write { fua: false }, 0, 1);
        for _ in 0..steps {
            world.step().expect("it goes on");
        }
        let engine = world.engine.as_ref().expect("there is a process");
        came_between += u32::from(!engine.is_checkpointed());
        world.attach(0).expect("it goes on");
        assert!(checkpoint_ends(&mut world), "attached after {steps} steps");
    }
    assert!(came_between > 3, "{came_between}");
}

/// A volume came to where another one had been, and its first requests were taken for the next of that one's: they were read ahead, and
/// went around the log.
#[test]
fn who_comes_to_a_place_goes_on_no_run_of_who_was_there() {
    let mut world = world_with(64, |setup| {
        setup.config.ahead_blocks = 256;
        setup.config.fill_run_max = 0;
        (setup.volumes[0].order, setup.volumes[0].cutoff) = (Order::Relaxed, 4);
        setup.volumes.push(setup.volumes[0].clone());
    });
    for first in [0, 2] {
        for block in first..first + 2 {
            read(&mut world, block).expect("as the model says");
            ask(&mut world, 0, Op::Write { fua: false }, 32 + block, 1);
            settle(&mut world);
        }
        let stats = stats(&world);
        assert_eq!((stats.ahead_blocks, stats.bypassed_writes), (0, 0), "from {first}");
        world.detach(0).expect("it goes on");
        assert!(!world.volumes[0].attached);
        world.attach(0).expect("it goes on");
    }
}
