// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes that come and go while checkpoints are written.

use forebay_core::format::superblock::Mode;
use forebay_core::mutant::Mutants;
use forebay_core::request::Op;
use forebay_core::units::BLOCK_BYTES;
use forebay_sim::exhaustive::{Scope, setup};
use forebay_sim::random::Random;
use forebay_sim::setup::format;
use forebay_sim::world::World;

fn world() -> World {
    let mode = Mode::WriteBack;
    let mut setup =
        setup(Scope { length: 0, one_in: 1, stores_length: 0, mode, mutants: Mutants::default() });
    let second = setup.volumes[0].clone();
    setup.volumes.truncate(1);
    setup.volumes.push(second);
    setup.superblock = format(16, 64 << 10, &setup.volumes, 5);
    let mut world = World::new(setup, Random::new(1));
    world.format();
    world.open(None).expect("a fresh cache");
    world
}

fn ask(world: &mut World, volume: usize, op: Op, bytes: u64) {
    assert!(world.ask(volume, op, 0, bytes).expect("it is taken"));
    while !world.asked.is_empty() {
        assert!(world.step().expect("it goes on"));
    }
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
        let mut world = world();
        ask(&mut world, 0, Op::Write { fua: true }, BLOCK_BYTES);
        ask(&mut world, 1, Op::Write { fua: true }, BLOCK_BYTES);
        begin_checkpoint(&mut world);
        assert!(checkpoint_ends(&mut world));
        world.detach(0).expect("it goes on");
        assert!(!world.volumes[0].attached);
        ask(&mut world, 1, Op::Write { fua: true }, BLOCK_BYTES);
        begin_checkpoint(&mut world);
        // Placed while pages are copied, so that the naming waits for it.
        assert!(world.ask(1, Op::Write { fua: false }, 0, BLOCK_BYTES).expect("it is taken"));
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
