// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device that is gone for a while, as one whose cable is loose: reads of it fail before anything has failed a write.
//! Whoever cannot read a block took it for rotten and named it lost; the names lay in the memory that outlives the process, so
//! the next opening wrote them down: those blocks gave an error, for good, of which the device had every byte. And one that is there, takes
//! flushes, and fails what is read for some moments.

use crate::support::{power_cut, read, written};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::units::VolumeIndex;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;
use std::rc::Rc;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCKS: u64 = 20;

/// Nothing of it can be read any more, and what is asked of it next, beside that, fails.
fn pull(world: &mut World) {
    for block in 0..world.cache.blocks() {
        world.cache.make_unreadable(block);
    }
    world.cache_fails_next = true;
    world.flush_fails_next = Some(false);
}

/// The process dies, and the next one finds the device in its place.
fn bring_back(world: &mut World) {
    world.stop_by(Stop::Process, &mut Fate::Chosen(&mut Choices::default()));
    world.cache.read_again();
    world.open(Some(Stop::Process)).expect("it is opened");
}

/// What the next process takes for lost, after the device was gone at the end of `before` and then `meanwhile` happened.
fn lost_by(
    mutants: Mutants,
    before: impl FnOnce(&mut World),
    meanwhile: impl FnOnce(&mut World),
) -> u64 {
    let mut world = written(mutants, BLOCKS);
    before(&mut world);
    pull(&mut world);
    meanwhile(&mut world);
    for _ in 0..400 {
        world.step().expect("it goes on");
    }
    let engine = world.engine.as_ref().expect("there is a process");
    let status = engine.status(VOLUME).expect("it is there");
    assert!(!status.backing_failing, "it has done nothing wrong");
    bring_back(&mut world);
    let engine = world.engine.as_ref().expect("there is a process");
    let lost = engine.status(VOLUME).expect("it is there").lost_blocks_now;
    for block in 0..BLOCKS * u64::from(lost == 0) {
        read(&mut world, block).unwrap_or_else(|error| panic!("{block}: {error}"));
    }
    lost
}

/// The same where something begun goes on for each of so many moments before.
fn is_not_lost_by(begin: impl Fn(&mut World)) {
    let lost = |mutants, moments| {
        let before = |world: &mut World| {
            begin(world);
            world.drain_effects().expect("it goes on");
            for _ in 0..moments {
                world.step().expect("it goes on");
            }
        };
        lost_by(mutants, before, |_| ())
    };
    for moments in 0..60 {
        assert_eq!(lost(Mutants::default(), moments), 0, "{moments}");
    }
    let loose = |moments| lost(Mutants::with(Mutant::GoneTakenForRot), moments);
    assert!((0..60).any(|moments| loose(moments) > 0), "else this shows nothing");
}

#[test]
fn what_a_batch_cannot_read_of_a_device_that_is_gone_is_not_lost() {
    is_not_lost_by(|world| {
        let engine = world.engine.as_mut().expect("there is a process");
        engine.drain(VOLUME, &mut world.memory);
    });
}

#[test]
fn what_a_scrub_cannot_read_of_a_device_that_is_gone_is_not_lost() {
    is_not_lost_by(|world| {
        let engine = world.engine.as_mut().expect("there is a process");
        engine.scrub(None, &mut world.memory).expect("none is running");
    });
}

/// Nobody but a batch names anything.
#[test]
fn what_a_guest_cannot_read_of_a_device_that_is_gone_is_not_lost() {
    let meanwhile = |world: &mut World| {
        let now = world.moment();
        for block in 0..BLOCKS {
            world.volumes[0].model.may_be_lost(block as usize, now);
            read(world, block).expect("it fails, and may");
        }
    };
    assert_eq!(lost_by(Mutants::default(), |_| (), meanwhile), 0);
}

/// What is given up for lost if a batch comes to it, and nothing can be read, for less than the patience there is, from so many moments after
/// the batch began.
fn lost_for_a_while(mutants: Mutants, moments: u64) -> u64 {
    let patience = 5_000_000;
    let mut world = written(mutants, BLOCKS);
    Rc::make_mut(&mut world.setup).config.lost_after = patience;
    power_cut(&mut world);
    world.engine.as_mut().expect("there is a process").drain(VOLUME, &mut world.memory);
    world.drain_effects().expect("it goes on");
    for _ in 0..moments {
        world.step().expect("it goes on");
    }
    world.mute_until = world.now + patience - 1;
    while !world.engine.as_ref().expect("there is a process").is_clean(VOLUME) {
        if !world.step().expect("it goes on") {
            break;
        }
    }
    let engine = world.engine.as_ref().expect("there is a process");
    engine.status(VOLUME).expect("it is there").lost_blocks_now
}

#[test]
fn what_a_batch_cannot_read_for_a_while_is_not_lost() {
    for moments in 0..60 {
        assert_eq!(lost_for_a_while(Mutants::default(), moments), 0, "{moments}");
    }
    // (The machine that compares what is drained with what was written may say it first.)
    let found = |moments| {
        let loose = Mutants::with(Mutant::UnreadTakenForRot);
        std::panic::catch_unwind(|| lost_for_a_while(loose, moments)).unwrap_or(1)
    };
    assert!((0..60).any(|moments| found(moments) > 0), "else this shows nothing");
}
