// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A flush of the cache device fails, and the device drops what it should have covered: it says so once, later flushes succeed.

use crate::support::{
    ask, clean, headers, power_cut, read, rot_header, settle, tell_with_and_without, world_of,
    world_with,
};
use forebay_core::engine::CacheHealth;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::model::Stop;
use forebay_sim::world::World;
use std::panic::catch_unwind;

const VOLUME: VolumeIndex = VolumeIndex(0);
/// They fill some segments, which no memory holds then.
const BLOCKS: u64 = 40;
const WRITE: Op = Op::Write { fua: false };

/// A block that is flushed, then so many that are written and not flushed.
fn written(mutants: Mutants, blocks: u64) -> World {
    let mut world = world_with(300, |setup| setup.config.mutants = mutants);
    ask(&mut world, 0, Op::Write { fua: true }, 0, 1);
    settle(&mut world);
    for block in 1..=blocks {
        ask(&mut world, 0, WRITE, block, 1);
        settle(&mut world);
    }
    world
}

/// The guest flushes, the device fails that and drops all that it should have covered, at once or so that it shows later.
fn flush_fails(world: &mut World, at_once: bool) {
    world.flush_fails_next = Some(at_once);
    ask(world, 0, Op::Flush, 0, 0);
    settle(world);
    let engine = world.engine.as_ref().expect("there is a process");
    assert_eq!(engine.health(), CacheHealth::Failed);
}

fn read_all(world: &mut World) -> Result<(), String> {
    (0..=BLOCKS).try_for_each(|block| read(world, block))
}

fn until_it_flushes(world: &mut World) {
    while world.flushes_under_way() == 0 {
        assert!(world.step().expect("it goes on"));
    }
}

fn killed(world: &mut World) {
    world.stop(Stop::Process);
    world.open(Some(Stop::Process)).expect("it is opened");
}

fn latched(world: &World) -> bool {
    let engine = world.engine.as_ref().expect("there is a process");
    engine.status(VOLUME).expect("it is there").flush_failed
}

/// What a failed flush has dropped can still be read. The next process reads it, goes on from it, and flushes: that is answered well,
/// since nothing waits to be written. Then the power fails. The superblock said that the log goes on where nothing was.
fn relied_on(mutants: Mutants) -> Result<(), String> {
    let mut world = written(mutants, BLOCKS);
    flush_fails(&mut world, false);
    killed(&mut world);
    assert!(!latched(&world), "all of it was found");
    read_all(&mut world)?;
    ask(&mut world, 0, Op::Flush, 0, 0);
    settle(&mut world);
    power_cut(&mut world);
    read_all(&mut world)
}

#[test]
fn what_a_failed_flush_left_readable_is_written_again_before_anything_rests_on_it() {
    assert_eq!(relied_on(Mutants::default()), Ok(()));
    let loose = catch_unwind(|| relied_on(Mutants::with(Mutant::UnflushedNotRewritten)));
    assert!(!matches!(loose, Ok(Ok(()))), "else this shows nothing");
}

/// Segments that the device had taken, and that no memory held any more, are gone with the failed flush: the log ends before them, and
/// nothing in it says that there was more. The guest lives; its flush is not answered well.
#[test]
fn a_log_whose_end_was_dropped_without_a_trace_answers_no_flush_well() {
    for (mutants, latches) in
        [(Mutants::default(), true), (Mutants::with(Mutant::DropUnlatched), false)]
    {
        let mut world = written(mutants, BLOCKS);
        flush_fails(&mut world, true);
        // As if it had died when the last segment was full and no other was begun.
        world.memory.forget_buffers();
        world.stop(Stop::Process);
        let opened = world.open(Some(Stop::Process));
        assert_eq!(opened.is_ok(), latches, "{opened:?}");
        if latches {
            assert!(latched(&world));
            ask(&mut world, 0, Op::Flush, 0, 0);
            settle(&mut world);
            assert_eq!(read(&mut world, 0), Ok(()), "what was flushed before is there");
        }
    }
}

/// Segments that no memory holds any more were found whole, since the process had died alone. The opening flushes them, the device fails that and
/// drops them, and the opening is killed before it hears of it. The next one finds a log that ends before them, and nobody else knows of them.
#[test]
fn what_is_dropped_at_an_opening_that_is_killed_is_told_to_be_lost() {
    for (mutants, latches) in
        [(Mutants::default(), true), (Mutants::with(Mutant::OpeningEndsUnnoted), false)]
    {
        let mut world = written(mutants, BLOCKS);
        world.memory.forget_buffers();
        world.stop(Stop::Process);
        world.flush_fails_next = Some(true);
        let opened = world.open(Some(Stop::Process));
        assert_eq!(opened.is_ok(), latches, "{opened:?}");
        if latches {
            assert!(latched(&world));
            ask(&mut world, 0, Op::Flush, 0, 0);
            settle(&mut world);
            assert_eq!(read(&mut world, 0), Ok(()), "what was flushed before is there");
        }
    }
}

/// All of a log was flushed, which no header in it says, and the process is killed while the cache device is flushed for others: whoever comes then cannot tell
/// what that flush dropped from what has rotted. The log ends where a header is bad; what was behind it had been flushed, and guests' flushes say so. Only
/// what was not durable counted for that.
#[test]
fn a_log_that_rots_where_nobody_says_that_it_was_flushed_answers_no_flush_well() {
    let mut world = written(Mutants::default(), BLOCKS);
    ask(&mut world, 0, Op::Flush, 0, 0);
    settle(&mut world);
    world.engine.as_mut().expect("there is a process").want_checkpoint();
    world.put_in_order().expect("it goes on");
    until_it_flushes(&mut world);
    rot_header(&mut world, 10);
    killed(&mut world);
    assert!(latched(&world));
}

/// The process was killed while its flush was under way, and nobody heard that it failed.
#[test]
fn a_flush_that_nobody_heard_of_is_not_trusted() {
    for at_once in [false, true] {
        let mut world = written(Mutants::default(), BLOCKS);
        ask(&mut world, 0, Op::Flush, 0, 0);
        until_it_flushes(&mut world);
        world.flush_fails_next = Some(at_once);
        killed(&mut world);
        assert_eq!(read_all(&mut world), Ok(()));
        assert_eq!(latched(&world), at_once, "what was dropped at once is not there");
        ask(&mut world, 0, Op::Flush, 0, 0);
        settle(&mut world);
        power_cut(&mut world);
        assert_eq!(read_all(&mut world), Ok(()));
    }
}

/// A flush of the log and one of a checkpoint, or of the superblock, are under way. One fails and drops what both should have covered; the
/// other is answered well. Says whether that has made anything durable, where it came to that.
fn counts_beside(mutants: Mutants, moments: u64) -> Option<bool> {
    let mut world = written(mutants, 5);
    world.engine.as_mut().expect("there is a process").want_checkpoint();
    for _ in 0..moments {
        if !world.step().expect("it goes on") {
            break;
        }
    }
    ask(&mut world, 0, Op::Write { fua: true }, 9, 1);
    while world.flushes_under_way() < 2 {
        if world.asked.is_empty() {
            return None;
        }
        world.step().expect("it goes on");
    }
    let durable = |world: &World| {
        let status = world.engine.as_ref().and_then(|it| it.status(VOLUME));
        status.expect("it is there").durable
    };
    let before = durable(&world);
    world.flush_fails_next = Some(false);
    while world.flushes_under_way() > 0 {
        world.step().expect("it goes on");
    }
    Some(durable(&world) > before)
}

#[test]
fn a_flush_that_is_answered_well_beside_one_that_failed_does_not_count() {
    let all = |mutants| (0..60).filter_map(move |moments| counts_beside(mutants, moments));
    assert!(all(Mutants::default()).all(|counts| !counts));
    assert!(
        all(Mutants::with(Mutant::FlushHeardAlone)).any(|counts| counts),
        "else this shows nothing"
    );
}

/// What is written again lies where it lay.
#[test]
fn what_is_written_again_is_what_was_there() {
    let mut world = written(Mutants::default(), BLOCKS);
    flush_fails(&mut world, false);
    let before = headers(&world);
    killed(&mut world);
    let is_there = |at: &u64| world.cache.durable(*at).bytes().starts_with(b"FBRECORD");
    let lost = before.iter().filter(|at| !is_there(at));
    assert_eq!(lost.count(), 0, "of {} records, {BLOCK_BYTES} bytes each at least", before.len());
}

/// What guests read was copied into the log, in segments that no memory holds any more, and is flushed with a checkpoint when a guest
/// writes: that rests on the copies. The device drops them, and the process is killed before it hears of it.
fn rests_on_copies(mutants: Mutants) {
    let mut world = written(mutants, 0);
    for block in 100..100 + BLOCKS {
        ask(&mut world, 0, Op::Read, block, 1);
        settle(&mut world);
    }
    world.engine.as_mut().expect("there is a process").want_checkpoint();
    world.put_in_order().expect("it goes on");
    until_it_flushes(&mut world);
    ask(&mut world, 0, WRITE, 9, 1);
    assert!(world.asked.is_empty() && world.flushes_under_way() > 0, "it is answered meanwhile");
    world.flush_fails_next = Some(true);
    killed(&mut world);
    assert!(latched(&world));
}

#[test]
fn what_rests_on_copies_that_a_flush_drops_is_told_to_be_lost() {
    tell_with_and_without(Mutant::EndNotedOnce, rests_on_copies);
}

/// All is clean and the log has gone round; what is written takes a segment of that each time it needs one, and nobody flushes. Then the power
/// fails, and of a record in the middle nothing is left: those behind it name tails none of which stands.
#[test]
fn what_may_not_be_durable_is_written_again_twice_at_most() {
    let mut world = world_of(320, 6000, |_| ());
    for block in 0..4500 {
        ask(&mut world, 0, WRITE, block, 1);
        settle(&mut world);
    }
    clean(&mut world, VOLUME);
    ask(&mut world, 0, Op::Write { fua: true }, 0, 1);
    settle(&mut world);
    // A flush is always under way that comes too late for what was written meanwhile.
    for block in 4500.. {
        ask(&mut world, 0, WRITE, block, 1);
        if block % 40 == 0 {
            settle(&mut world);
        }
        if world.cache.unflushed_count() > 14 {
            break;
        }
    }
    let all = headers(&world);
    let written = world.cache.unflushed_blocks(0);
    let records: Vec<u64> = written.into_iter().filter(|block| all.contains(block)).collect();
    world.stop(Stop::Process);
    world.cache.rot(records[records.len() / 2], Block::zero());
    world.open(Some(Stop::Power)).expect("it is opened");
    assert!((1..=2).contains(&world.rewritten_most), "{} times", world.rewritten_most);
}
