// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P9 where it was once wrong: what a crash brings back must fit as well.

use crate::support::{ask, headers, read, settle, stats, world_of, world_with};
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;

const BLOCKS: u64 = 512;

/// A guest that zeroes blocks, each for itself, and writes some, with many requests under way.
fn world(room: u32) -> World {
    world_with(BLOCKS, |setup| {
        setup.config.dirty_age = 1;
        setup.config.extent_count_max = room;
    })
}

/// Until what was asked for is answered and durable.
fn make_durable(world: &mut World) {
    ask(world, 0, Op::Flush, 0, 0);
    settle(world);
}

/// Guests fill the extents with zeros that are not written back, and the header of a record of blocks
/// that lie apart rots: all of those are lost, and each is an extent. They are noted in the room that is
/// kept for lost blocks; once recovery took as much again beside them, and more than was told (seed 582).
#[test]
fn what_a_rotten_header_held_is_noted_in_the_room_that_was_told() {
    // With those for lost blocks alone they are a whole number of chunks.
    let mut world = world(52);
    // The first flush is the backing device's, too; from then on it takes nothing.
    make_durable(&mut world);
    world.volumes[0].device.failed = true;
    let room = u64::from(world.setup.config.extent_count_max);
    for at in 0..room - 2 {
        ask(&mut world, 0, Op::WriteZeroes { fua: false }, 2 * at, 1);
    }
    make_durable(&mut world);
    let before = headers(&world);
    for at in 0..8 {
        ask(&mut world, 0, Op::Write { fua: false }, 200 + 2 * at, 1);
    }
    make_durable(&mut world);
    let after = headers(&world);
    // A record behind it says what it held.
    ask(&mut world, 0, Op::Write { fua: false }, 0, 1);
    make_durable(&mut world);
    let rotten = *after.iter().find(|at| !before.contains(at)).expect("there is a new record");
    std::rc::Rc::make_mut(&mut world.setup).rot = u64::MAX;
    world.cache.rot(rotten, forebay_sim::block::Block::zero());
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).expect("it is opened");
    world.put_in_order().expect("it is within its bound");
    let engine = world.engine.as_ref().expect("there is a process");
    assert_eq!(u64::from(engine.config().extent_count_max), room);
    let status = engine.status(VolumeIndex(0)).expect("it is there");
    assert!(status.stats.lost_blocks >= 4 && !status.frozen, "{status:?}");
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
            ask(world, 0, op, 2 * asked % BLOCKS, 1);
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
    let mut whole = world(24);
    let before = whole.memory.stores;
    work(&mut whole);
    let mut most = 0;
    for store in 0..whole.memory.stores - before {
        let mut world = world(24);
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

/// Nothing is dirty, and a guest writes now and then so much at once that it goes around the log, over what it reads again: each time an
/// entry voids the copy. While nothing was dirty these entries were forgotten, and the watermark stayed where it was: after a crash all of
/// them were found, however many that were.
#[test]
fn entries_of_what_went_around_are_no_more_after_a_crash_than_before() {
    let mut world = world_of(64, BLOCKS, |setup| {
        setup.config.dirty_age = 1;
        setup.config.extent_count_max = 24;
        (setup.volumes[0].mode, setup.volumes[0].cutoff) = (Mode::WriteBack, 1);
    });
    world.volumes[0].bypasses();
    make_durable(&mut world);
    for round in 0..400 {
        let block = 2 * (round % 8);
        (0..2).for_each(|_| read(&mut world, block).expect("it is read"));
        ask(&mut world, 0, Op::Write { fua: false }, block, 1);
        settle(&mut world);
        make_durable(&mut world);
    }
    assert!(stats(&world).bypassed_writes >= 100 && stats(&world).fill_blocks >= 100);
    world.stop_by(Stop::Process, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Process)).expect("it is opened");
    let engine = world.engine.as_ref().expect("there is a process");
    assert_eq!(engine.config().extent_count_max, 24);
}
