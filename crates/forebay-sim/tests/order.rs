// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The order of a volume is changed around a crash.

use crate::support::{
    ask, clean, headers, place, power_cut, read, settle, stats, tell_with_and_without, world_with,
};
use forebay_core::format::superblock::Order;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::policy::writeback::Stage;
use forebay_core::request::Op;
use forebay_core::units::{Lba, Sequence, VolumeIndex};
use forebay_sim::block::{Block, Tags};
use forebay_sim::model::Stop;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);

fn change(world: &mut World, order: Order) {
    world.set_order(0, order, 0).expect("it goes on");
}

fn backing(world: &World) -> Tags {
    *world.volumes[0].device.read(1).tags()
}

/// The durable watermark, whether all is written back, and whether block 1 is named as one that may be of two states.
fn look(world: &World) -> (Sequence, bool, bool) {
    let engine = world.engine.as_ref().expect("there is a process");
    let status = engine.status(VOLUME).expect("it is attached");
    let named = status.exposed.is_some_and(|it| it.start <= Lba(1) && it.end > Lba(1));
    let watermark = engine.durable_watermark(VOLUME).expect("it is served");
    (watermark, engine.is_clean(VOLUME), named)
}

/// A batch of order batch goes over a guest's flush, and the process dies when the backing device has all of it. With
/// strict the batch that is built again ends at that flush: the watermark then moves to a state older than one of the
/// device's blocks. The log holds that block, so nothing is lost; without the cache the device is a mixture, and until
/// the second batch is done `status` says so, whatever the order is by then.
///
/// The simulator took it for a batch that lacks a block where the order was batch again when the first one was
/// done (seed 323), and `status` did not name the block where the order was changed between the opening and the batch.
fn a_batch_ends_earlier(order_changes: impl Fn(&mut World, bool), back: bool) {
    let mut world = world_with(2, |setup| {
        (setup.config.close_after, setup.config.durable_after) = (1_000_000, 1_000_000);
    });
    for block in 0..2 {
        ask(&mut world, 0, Op::Write { fua: false }, block, 1);
        settle(&mut world);
        ask(&mut world, 0, Op::Flush, 0, 0);
        settle(&mut world);
    }
    let found = backing(&world);
    let stage = |world: &World| {
        world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("attached").writeback
    };
    while stage(&world) != Stage::Flushing {
        assert!(world.step().expect("it goes on"));
    }
    let newest = backing(&world);
    assert_ne!(found, newest, "the batch was written");
    order_changes(&mut world, false);
    world.stop(Stop::Process);
    world.open(Some(Stop::Process)).expect("it is opened");
    order_changes(&mut world, true);
    world.put_in_order().expect("it goes on");
    let (begin, ..) = look(&world);
    while look(&world).0 == begin {
        assert!(look(&world).2 && backing(&world) == newest);
        if back && stage(&world) == Stage::Flushing {
            change(&mut world, Order::Batch);
        }
        assert!(world.step().expect("it goes on"), "each watermark is compared on the way");
    }
    let (_, clean, named) = look(&world);
    assert!(!clean && named, "the first of two batches is done: clean {clean}, named {named}");
    while !look(&world).1 {
        assert!(world.step().expect("it goes on"));
    }
    assert!(!look(&world).2);
    assert_eq!(backing(&world), newest);
}

#[test]
fn a_batch_that_strict_ends_earlier_is_named_if_the_order_was_changed_before_the_crash() {
    let before = |world: &mut World, opened: bool| {
        if !opened {
            change(world, Order::Strict);
        }
    };
    a_batch_ends_earlier(before, false);
    a_batch_ends_earlier(before, true);
}

#[test]
fn a_batch_that_strict_ends_earlier_is_named_if_the_order_was_changed_after_the_crash() {
    let after = |world: &mut World, opened: bool| {
        if opened {
            change(world, Order::Strict);
        }
    };
    a_batch_ends_earlier(after, false);
    a_batch_ends_earlier(after, true);
}

/// With strict blocks 0 to 2 are in a record each, no flush of the guest between them, and a batch takes them all; `between` comes
/// after the first. When the backing device has all of the batch the power fails, and the header of the second record is bad
/// if it rots. The batch that is built again must not end before that one did, or the device is ahead of the watermark.
fn a_strict_batch_is_built_again(
    mutants: Mutants,
    between: impl Fn(&mut World),
    rots: bool,
) -> Result<(), String> {
    let mut world = world_with(4, |setup| {
        setup.config.mutants = mutants;
        setup.volumes[0].order = Order::Strict;
        setup.config.close_after = 1_000_000;
        setup.config.durable_after = 1_000_000;
        setup.config.dirty_age = 1_000_000_000;
        setup.rot = u64::from(rots) * u64::MAX;
    });
    ask(&mut world, 0, Op::Write { fua: true }, 0, 3);
    settle(&mut world);
    clean(&mut world, VOLUME);
    let status = |world: &World| {
        world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("it is attached")
    };
    for block in 0..3 {
        let records = status(&world).stats.records;
        ask(&mut world, 0, Op::Write { fua: false }, block, 1);
        while status(&world).stats.records == records {
            assert!(world.step().expect("it goes on"));
        }
        if block == 0 {
            between(&mut world);
        }
    }
    while status(&world).writeback != Stage::Noting {
        assert!(world.step().expect("it goes on"));
    }
    let newest = backing(&world);
    if rots {
        let at = place(&world, 1);
        let header =
            headers(&world).into_iter().rfind(|header| *header < at).expect("there is one");
        world.cache.rot(header, Block::zero());
        let now = world.moment();
        world.volumes[0].model.may_be_lost(1, now);
        world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(1);
    }
    power_cut(&mut world);
    world.put_in_order().map_err(|failure| failure.0)?;
    let (begin, ..) = look(&world);
    while look(&world).0 == begin {
        assert!(world.step().map_err(|failure| failure.0)?);
    }
    assert_eq!(backing(&world), newest);
    let covers = look(&world).1;
    if covers { Ok(()) } else { Err("the device is ahead of the watermark".into()) }
}

/// Seed 536, where a record of copies was written in parts and so all came to other moments.
#[test]
fn a_strict_batch_goes_over_a_record_whose_header_rotted() {
    let built = |mutants| a_strict_batch_is_built_again(mutants, |_| (), true);
    assert_eq!(built(Mutants::default()), Ok(()));
    assert!(built(Mutants::with(Mutant::RecoveryBeginsEpoch)).is_err(), "else this shows nothing");
}

#[test]
fn a_strict_batch_goes_over_a_checkpoint() {
    let checkpoint = |world: &mut World| {
        let engine =
            |world: &World| world.engine.as_ref().expect("there is a process").checkpoint_count();
        let count = engine(world);
        world.engine.as_mut().expect("there is a process").want_checkpoint();
        world.put_in_order().expect("it goes on");
        while engine(world) == count {
            assert!(world.step().expect("it goes on"));
        }
    };
    let built = |mutants| a_strict_batch_is_built_again(mutants, checkpoint, false);
    assert_eq!(built(Mutants::default()), Ok(()));
    assert!(built(Mutants::with(Mutant::RecoveryBeginsEpoch)).is_err(), "else this shows nothing");
}

/// With relaxed writes pass what is dirty, so that the backing device is a mixture wherever they were. When the order was changed to batch
/// `status` said that it is what it was at its last batch.
#[test]
fn what_relaxed_left_is_named_until_it_is_written_back() {
    let mut world = world_with(64, |setup| setup.volumes[0].order = Order::Relaxed);
    ask(&mut world, 0, Op::Write { fua: true }, 1, 1);
    settle(&mut world);
    assert!(!look(&world).2, "no batch is under way");
    change(&mut world, Order::Batch);
    assert!(look(&world).2);
    clean(&mut world, VOLUME);
    assert!(!look(&world).2);
    // Where nothing is dirty there is nothing to name.
    change(&mut world, Order::Relaxed);
    change(&mut world, Order::Strict);
    assert!(!look(&world).2);
}

/// A write has gone around the log over what was clean, and more has been copied since than a batch looks at; write-back has passed all of that, since nothing was
/// dirty. Then a block is written, and the process dies when the backing device has it. The batch that is built again begins at the entry: what follows
/// counted, so it ended before the block that the first one had written. The device was ahead of the watermark from then on, and `status` called it a state that the
/// volume had gone through (seed 6000726).
fn a_batch_is_built_again_from_an_entry(mutants: Mutants) {
    let mut world = world_with(200, |setup| {
        setup.config.mutants = mutants;
        (setup.config.close_after, setup.config.durable_after) = (1_000_000, 1_000_000);
    });
    let flush = |world: &mut World| {
        settle(world);
        ask(world, 0, Op::Flush, 0, 0);
        settle(world);
    };
    let cutoff = |world: &mut World, blocks| {
        world.engine.as_mut().expect("there is a process").set_cutoff(VOLUME, blocks);
    };
    ask(&mut world, 0, Op::Write { fua: true }, 1, 1);
    settle(&mut world);
    clean(&mut world, VOLUME);
    world.volumes[0].bypasses();
    cutoff(&mut world, 1);
    ask(&mut world, 0, Op::Write { fua: false }, 1, 1);
    flush(&mut world);
    assert_eq!(stats(&world).bypassed_writes, 1);
    cutoff(&mut world, 0);
    // Apart, lest they be a run, which is not copied.
    for at in 0..100 {
        read(&mut world, 10 + at * 37 % 190).expect("it is read");
    }
    flush(&mut world);
    assert!(stats(&world).fill_blocks > 64, "{}", stats(&world).fill_blocks);
    while world.step().expect("it goes on") {}
    ask(&mut world, 0, Op::Write { fua: false }, 5, 1);
    flush(&mut world);
    let stage = |world: &World| {
        world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("attached").writeback
    };
    while stage(&world) != Stage::Flushing {
        assert!(world.step().expect("it goes on"));
    }
    world.stop(Stop::Process);
    world.open(Some(Stop::Process)).expect("it is opened");
    world.put_in_order().expect("it goes on");
    let begin = look(&world).0;
    while look(&world).0 == begin {
        assert!(world.step().expect("it goes on"), "each watermark is compared on the way");
    }
    assert!(look(&world).1, "the first batch covers all");
}

#[test]
fn a_batch_that_is_built_again_looks_past_what_is_clean() {
    tell_with_and_without(Mutant::EntryBeginsBatch, a_batch_is_built_again_from_an_entry);
}
