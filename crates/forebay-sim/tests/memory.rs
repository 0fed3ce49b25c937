// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P9 where it was once wrong: what a crash brings back must fit as well.

use forebay_core::format::superblock::Mode;
use forebay_core::mutant::Mutants;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::exhaustive::{Scope, setup};
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::random::Random;
use forebay_sim::setup::{Island, format};
use forebay_sim::world::World;

const BLOCKS: u64 = 512;

/// A guest that zeroes blocks, each for itself, and writes some, with many requests under way.
fn world() -> World {
    let mode = Mode::WriteBack;
    let mut setup = setup(Scope { length: 0, stores_length: 0, mode, mutants: Mutants::default() });
    setup.volumes[0].size_bytes = BLOCKS * BLOCK_BYTES;
    setup.volumes[0].islands = vec![Island { start: 0, blocks: BLOCKS }];
    setup.superblock = format(16, 64 << 10, &setup.volumes, 5);
    setup.config.dirty_age = 1;
    let mut world = World::new(setup, Random::new(1));
    world.format();
    world.open(None).expect("a fresh cache");
    world
}

/// Until the process dies, or all is asked for.
fn work(world: &mut World) {
    let mut asked = 0;
    while asked < 120 && !world.memory.dead {
        if world.asked.len() < 64 {
            let op = match asked % 8 {
                7 => Op::Write { fua: false },
                _ => Op::WriteZeroes { fua: false },
            };
            let at = 2 * asked % BLOCKS * BLOCK_BYTES;
            assert!(world.ask(0, op, at, BLOCK_BYTES).expect("it is taken"));
            asked += 1;
        } else {
            world.step().expect("it goes on");
        }
    }
}

/// A batch is done and the guest zeroes as many blocks again, into a record that was begun before and
/// knows nothing of that: if the process dies now, the extents of both come back.
#[test]
fn no_crash_brings_back_more_extents_than_there_is_room_for() {
    let mut whole = world();
    let before = whole.memory.stores;
    work(&mut whole);
    let mut most = 0;
    for store in 0..whole.memory.stores - before {
        let mut world = world();
        world.memory.fuse = Some(store);
        work(&mut world);
        world.stop_by(Stop::Process, &mut Fate::Chosen(&mut Choices::default()));
        world.open(Some(Stop::Process)).expect("it is opened");
        world.put_in_order().expect("it is within its bound");
        let engine = world.engine.as_ref().expect("there is a process");
        let status = engine.status(VolumeIndex(0)).expect("it is there");
        most = most.max(status.dirty_extents);
    }
    let room = u64::from(whole.setup.config.extent_count_max);
    assert!(
        (room / 2..=room).contains(&most),
        "{most} extents came back, there is room for {room}"
    );
}
