// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that a process took and did not answer come again to the next one.

use crate::support::{ask, read, settle, world_with};
use forebay_core::format::superblock::Order;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::setup::Setup;
use forebay_sim::world::World;

const FIRST: u64 = 8;
const BLOCKS: u64 = 4;

fn world(change: impl FnOnce(&mut Setup)) -> World {
    world_with(64, |setup| {
        setup.comes_again = true;
        change(setup);
    })
}

fn kill(world: &mut World) {
    world.stop_by(Stop::Process, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Process)).expect("it is opened");
}

fn power_cut(world: &mut World) {
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).expect("it is opened");
}

/// What is to come again does, all of it, and is answered.
fn give_all_again(world: &mut World) {
    while !world.unanswered.is_empty() {
        assert!(world.give_again(None).expect("it goes on"), "there is room");
    }
    settle(world);
}

fn read_all(world: &mut World) -> Result<(), String> {
    (FIRST - 1..=FIRST + BLOCKS).try_for_each(|block| read(world, block))
}

fn write(world: &mut World, block: u64) {
    ask(world, 0, Op::Write { fua: false }, block, 1);
    settle(world);
}

/// The process dies at a store of a write of four blocks, which comes again while a newer one of one of its blocks is under way or
/// answered. After its answer another block of it is written again. Whatever stops the machine then, nothing of the first
/// copy comes back. Says what the write found of its first copy: (nothing, a part, all).
fn again(op: Op, store: u64, newer_first: bool, mutants: Mutants) -> Result<[bool; 3], String> {
    let mut world = world(|setup| setup.config.mutants = mutants);
    for block in FIRST - 1..=FIRST + BLOCKS {
        write(&mut world, block);
    }
    world.memory.fuse = Some(store);
    ask(&mut world, 0, op, FIRST, BLOCKS);
    while !world.memory.dead && world.has_events() {
        world.step().map_err(|failure| failure.0)?;
    }
    let kept = world.asked.len();
    kill(&mut world);
    assert_eq!(world.unanswered.len(), kept, "who was answered does not come again");
    if newer_first {
        ask(&mut world, 0, Op::Write { fua: false }, FIRST + 1, 1);
    }
    give_all_again(&mut world);
    // It is done now, if it was not before.
    read_all(&mut world)?;
    write(&mut world, FIRST + 2);
    read_all(&mut world)?;
    for _ in 0..2 {
        kill(&mut world);
        assert!(world.unanswered.is_empty(), "it was answered");
        read_all(&mut world)?;
    }
    ask(&mut world, 0, Op::Flush, 0, 0);
    settle(&mut world);
    power_cut(&mut world);
    read_all(&mut world)?;
    let part = world.marks.count("came again: a part of the first copy is there") > 0;
    let all = world.marks.count("came again: the first copy is there") > 0;
    Ok([!part && !all, part, all])
}

/// At each store of each kind of change.
fn at_each_store(mutants: Mutants) -> Result<[bool; 3], String> {
    let mut found = [false; 3];
    let ops = [
        Op::Write { fua: false },
        Op::Write { fua: true },
        Op::WriteZeroes { fua: false },
        Op::Discard,
    ];
    for op in ops {
        for store in 0..24 {
            for newer_first in [false, true] {
                let what = again(op, store, newer_first, mutants)
                    .map_err(|text| format!("{op:?}, killed at store {store}: {text}"))?;
                found = core::array::from_fn(|at| found[at] || what[at]);
            }
        }
    }
    Ok(found)
}

#[test]
fn a_first_copy_does_not_come_back_over_what_was_written_since() {
    let found = at_each_store(Mutants::default()).expect("nothing old is read");
    assert_eq!(found, [true; 3], "nothing, a part, all of it was done before");
}

#[test]
fn a_write_of_which_the_beginning_was_done_is_done_again() {
    let found = at_each_store(Mutants::with(Mutant::AgainTakenForDone));
    assert!(found.is_err(), "its other blocks are as they were");
}

/// A FUA write and a flush that come again are answered when what they cover is durable, and not because they once were under way.
#[test]
fn what_comes_again_is_durable_when_it_is_answered() {
    for steps in 0..4 {
        let mut world = world(|_| ());
        write(&mut world, FIRST);
        ask(&mut world, 0, Op::Write { fua: true }, FIRST + 1, 2);
        ask(&mut world, 0, Op::Flush, 0, 0);
        for _ in 0..steps {
            world.step().expect("it goes on");
        }
        let kept = world.asked.len();
        kill(&mut world);
        assert_eq!(world.unanswered.len(), kept);
        give_all_again(&mut world);
        // Of what was not flushed nothing is left.
        power_cut(&mut world);
        read_all(&mut world).expect("what the answers said");
    }
}

/// The same around the log: the backing device may have the first copy, and what is written later goes through the log.
#[test]
fn what_went_around_the_log_comes_again() {
    for (steps, newer_around) in [(0, false), (0, true), (3, false), (3, true)] {
        let mut world = world(|setup| setup.volumes[0].order = Order::Relaxed);
        world.volumes[0].bypasses();
        let cutoff = |world: &mut World, blocks| {
            let engine = world.engine.as_mut().expect("there is a process");
            engine.set_cutoff(VolumeIndex(0), blocks);
        };
        write(&mut world, FIRST);
        cutoff(&mut world, 1);
        ask(&mut world, 0, Op::Write { fua: false }, FIRST, BLOCKS);
        for _ in 0..steps {
            world.step().expect("it goes on");
        }
        kill(&mut world);
        cutoff(&mut world, 1);
        give_all_again(&mut world);
        cutoff(&mut world, u32::from(newer_around));
        write(&mut world, FIRST + 1);
        read_all(&mut world).expect("the newest");
        kill(&mut world);
        read_all(&mut world).expect("the newest, after a kill");
        ask(&mut world, 0, Op::Flush, 0, 0);
        settle(&mut world);
        power_cut(&mut world);
        read_all(&mut world).expect("what was flushed");
    }
}

/// Two processes die under the same request, and the second had answered a newer one over it.
#[test]
fn a_request_may_come_a_third_time() {
    let mut world = world(|_| ());
    for block in FIRST..FIRST + BLOCKS {
        write(&mut world, block);
    }
    ask(&mut world, 0, Op::Write { fua: true }, FIRST, BLOCKS);
    kill(&mut world);
    write(&mut world, FIRST + 1);
    assert!(world.give_again(None).expect("it goes on"));
    kill(&mut world);
    assert_eq!(world.unanswered.len(), 1);
    write(&mut world, FIRST + 3);
    give_all_again(&mut world);
    assert_eq!(world.marks.count("came again: a second time"), 1);
    read_all(&mut world).expect("what it says, above all that was answered before it came");
}
