// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A backing device refuses a block while guests keep it busy.

use crate::support::{ask, settle, world_with};
use forebay_core::policy::writeback::Stage;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::world::World;
use std::rc::Rc;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCKS: u64 = 64;
/// The guest writes these two, and reads what is behind them.
const BAD: u64 = 0;
const GOOD: u64 = 2;
const MOMENTS: u64 = 4_000;

/// One write at a time goes to a disk that takes long to refuse a block, and a guest wants to read from it meanwhile: then that has
/// its turn first. So nothing of a batch is under way but the refused block; the device is asked whether it does anything at all; and
/// before that is answered the last write of the batch has its turn, and ends. The batch ended with that question under way, and the program
/// stopped (seed 746). Now its flush waits for that (F1 in `policy/flushes.rs`).
#[test]
fn a_batch_ends_after_the_device_has_said_whether_it_works() {
    let mut world = world_with(BLOCKS, |setup| {
        setup.config.close_after = 1_000_000;
        setup.config.durable_after = 2_000_000;
        setup.config.dirty_age = 5_000_000;
        setup.config.retry_after = 1_000_000;
        setup.config.backing_in_flight = 1;
        setup.config.fill_run_max = 0;
        setup.steady = false;
    });
    world.volumes[0].device.go_bad(BAD);
    let mut before = 0;
    for _ in 0..MOMENTS {
        let status = world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("attached");
        let refused = world.marks.count("block refused");
        let writes = status.writeback == Stage::Writing;
        before = if writes { before } else { refused };
        let tries = writes && refused == before;
        // What was asked for since the refusal, or before, is slow; what follows is not.
        world.volumes[0].device.slow = if writes && !tries { 1 } else { 100 };
        if tries && world.asked.is_empty() {
            let block = world.random.between(GOOD + 1, BLOCKS - 1);
            ask(&mut world, 0, Op::Read, block, 1);
        }
        if !status.dirty {
            for block in [BAD, GOOD] {
                ask(&mut world, 0, Op::Write { fua: false }, block, 1);
            }
        }
        world.step().expect("it goes on");
    }
    assert!(world.marks.count("block parked") > 100);
}

/// A block is discarded on the backing device, a flush of that fails, and the device refuses to discard it again: what the guest gave up may
/// stay, and the batch ends. The checker of what goes around the log took that for a batch that ended too early (seed 1329).
#[test]
fn a_discard_that_is_refused_after_a_failed_flush_keeps_no_batch_from_ending() {
    let mut world = world_with(BLOCKS, |setup| {
        setup.config.retry_after = 1_000_000;
        setup.steady = false;
        setup.watched = true;
    });
    ask(&mut world, 0, Op::Discard, BAD, 1);
    ask(&mut world, 0, Op::Write { fua: false }, GOOD, 1);
    settle(&mut world);
    let engine = world.engine.as_mut().expect("there is a process");
    engine.drain(VOLUME, &mut world.memory);
    world.drain_effects().expect("it goes on");
    let status =
        |world: &World| world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("attached");
    let discarded = |world: &World| world.marks.count("backing discarded");
    for _ in 0..MOMENTS {
        let failed = world.marks.count("backing flush failed") > 0;
        if status(&world).writeback == Stage::Flushing && !failed {
            Rc::make_mut(&mut world.setup).backing_fault = 1;
        } else if failed {
            Rc::make_mut(&mut world.setup).backing_fault = 0;
            world.volumes[0].device.go_bad(BAD);
        }
        world.step().expect("it goes on");
        if failed && !status(&world).dirty {
            assert_eq!(discarded(&world), 1);
            assert!(world.marks.count("block refused") > 0);
            return;
        }
    }
    panic!("the batch does not end");
}
