// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a cut made void stays so, wherever it lies.

use crate::support::{ask, clean, headers, settle, tell_with_and_without, world_with};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;
use std::rc::Rc;

fn write(world: &mut World, block: u64, blocks: u64) {
    ask(world, 0, Op::Write { fua: false }, block, blocks);
    settle(world);
}

fn flush(world: &mut World) {
    ask(world, 0, Op::Flush, 0, 0);
    settle(world);
}

fn power_cut(world: &mut World) {
    // Whatever was complete is there.
    let through = world.cache.flush_begin();
    world.cache.flush_end(through);
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).expect("it is opened");
}

/// What lies in a segment from `at` on is as it was before it was written last.
fn lose_write(world: &mut World, at: u64, blocks: u64, cells: std::ops::Range<usize>) {
    let now = world.moment();
    for cell in cells {
        world.volumes[0].model.may_be_lost(cell, now);
    }
    for block in at..at + blocks {
        let older = world.cache.before(block);
        world.cache.rot(block, older);
    }
}

/// The first header that was not there `before`.
fn newer(world: &World, before: &[u64]) -> u64 {
    *headers(world).iter().find(|at| !before.contains(at)).expect("something was written")
}

/// Opened again and again: each read is compared with the model, and gives an error or what was flushed.
fn check(world: &mut World, blocks: &[u64]) {
    for _ in 0..3 {
        power_cut(world);
        for block in blocks {
            assert!(world.ask(0, Op::Read, block * BLOCK_BYTES, BLOCK_BYTES).expect("it is taken"));
            settle(world);
        }
    }
}

/// Writes, without a flush, so that each of these fills the rest of a segment. Then the power fails, and
/// the first of them is torn, so that all are void.
fn cut(world: &mut World, writes: &[(u64, u64)]) {
    cut_behind(world, writes.len(), |world| {
        writes.iter().for_each(|(block, blocks)| write(world, *block, *blocks));
    });
}

/// The same where so many records come of what is asked for.
fn cut_behind(world: &mut World, records: usize, asks: impl FnOnce(&mut World)) {
    let whole = headers(world);
    asks(world);
    while headers(world).len() < whole.len() + records {
        assert!(world.step().expect("it goes on"));
    }
    let torn = newer(world, &whole);
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    world.cache.rot(torn + 1, Block::zero());
    power_cut(world);
    assert_eq!(world.marks.count("log cut"), 1);
}

/// Writes and flushes one after the other; says where the first of it went: over what is void.
fn go_on(world: &mut World, writes: &[(u64, u64)]) -> u64 {
    let before = headers(world);
    let kept: Vec<Rc<Block>> = before.iter().map(|at| world.cache.read(*at)).collect();
    for (block, blocks) in writes {
        write(world, *block, *blocks);
        flush(world);
    }
    let is_new = |(at, was): &(&u64, &Rc<Block>)| !Rc::ptr_eq(&world.cache.read(**at), was);
    let place = before.iter().zip(&kept).find(is_new);
    *place.expect("the log goes on in the place of what is void").0
}

/// The last segment of a log is torn, and its only record void. The log goes on in that segment, with a record
/// of the same size; the write of that one is lost, so the void one is there again: valid, of this place in
/// this log, and not what the next record goes on from. The first opening after knows it by its generation.
/// The second one took it for the log's own: what had been flushed was gone without a word, and what was void
/// was back.
fn a_later_write_is_lost(mutants: Mutants) {
    let mut world = world_with(128, |setup| setup.config.mutants = mutants);
    write(&mut world, 0, 15);
    flush(&mut world);
    cut(&mut world, &[(30, 15), (60, 15)]);
    let place = go_on(&mut world, &[(80, 15), (100, 1), (101, 1)]);
    lose_write(&mut world, place, 16, 80..95);
    check(&mut world, &[0, 14, 30, 80, 94, 100, 101]);
}

#[test]
fn a_void_record_does_not_come_back_where_the_write_of_a_later_one_was_lost() {
    tell_with_and_without(Mutant::VoidLifeCounts, a_later_write_is_lost);
}

/// The same where two void records lie in the place of the lost one, of which the first one's header has gone bad: nothing stands where the next record goes on
/// from, and the second void one behind that is older. It was taken for the log's own, and the volume was frozen (a seed of a history that is no more).
fn a_later_write_is_lost_over_two(mutants: Mutants) {
    let mut world = world_with(128, |setup| setup.config.mutants = mutants);
    write(&mut world, 0, 15);
    flush(&mut world);
    cut_behind(&mut world, 3, |world| {
        write(world, 30, 15);
        ask(world, 0, Op::Write { fua: true }, 60, 2);
        ask(world, 0, Op::Write { fua: false }, 70, 12);
        // The one before it is written at once.
        ask(world, 0, Op::Write { fua: false }, 90, 1);
    });
    let place = go_on(&mut world, &[(80, 15), (100, 15), (120, 1), (121, 1)]) + 16;
    lose_write(&mut world, place, 16, 100..115);
    world.cache.rot(place, Block::zero());
    check(&mut world, &[0, 14, 30, 60, 61, 70, 81, 80, 94, 100, 114, 120, 121]);
}

#[test]
fn a_void_record_behind_the_place_of_a_lost_one_does_not_come_back() {
    tell_with_and_without(Mutant::VoidLifeCounts, a_later_write_is_lost_over_two);
}

/// The same as the first, and the cut is in the middle of the segment before. How far that one belongs to the log is said by
/// each record of the segment behind it, so it is known for as long as one of those is there.
#[test]
fn where_a_log_was_cut_is_said_by_every_record_of_the_next_segment() {
    let mut world = world_with(128, |_| ());
    write(&mut world, 0, 1);
    flush(&mut world);
    cut(&mut world, &[(10, 13), (30, 15), (60, 15)]);
    let place = go_on(&mut world, &[(80, 1), (90, 13), (110, 1), (111, 1)]);
    lose_write(&mut world, place, 2, 80..81);
    check(&mut world, &[0, 10, 22, 30, 44, 80, 90, 102, 110, 111]);
}

/// And what is void is exactly as long as the record whose write was lost, so that the next one begins where it ends
/// and nothing is read over it. (Seed 37: the second opening asked it, not the younger records behind it, how far the
/// segment before belongs to the log. What was void there came back or, if it had never been written, was missing, and
/// the volume was frozen.)
#[test]
fn a_void_header_before_younger_ones_does_not_say_where_the_log_was_cut() {
    let mut world = world_with(128, |_| ());
    write(&mut world, 0, 1);
    flush(&mut world);
    cut(&mut world, &[(10, 13), (30, 1)]);
    let place = go_on(&mut world, &[(80, 1), (90, 13), (110, 1), (111, 1)]);
    lose_write(&mut world, place, 2, 80..81);
    check(&mut world, &[0, 10, 22, 30, 80, 90, 102, 110, 111]);
}

/// The log was cut in the middle of a segment, and the first record behind the cut fills all of one. It is written back, its header goes bad, and with it goes the
/// only word on how far the segment before belongs to the log: what is void there came back, in place of the blocks as they are (seed 5001978).
fn the_only_word_on_a_cut_goes_bad(mutants: Mutants) {
    let mut world = world_with(128, |setup| setup.config.mutants = mutants);
    write(&mut world, 0, 2);
    write(&mut world, 30, 2);
    flush(&mut world);
    cut_behind(&mut world, 3, |world| {
        for (block, blocks) in [(10, 2), (0, 1), (30, 1)] {
            ask(world, 0, Op::Write { fua: true }, block, blocks);
        }
    });
    let before = headers(&world);
    write(&mut world, 80, 15);
    flush(&mut world);
    let place = newer(&world, &before);
    for block in [100, 120, 121] {
        write(&mut world, block, 1);
        flush(&mut world);
    }
    clean(&mut world, VolumeIndex(0));
    world.cache.rot(place, Block::zero());
    check(&mut world, &[0, 1, 10, 30, 31, 80, 94, 100, 120, 121]);
}

#[test]
fn what_is_void_does_not_come_back_when_the_only_word_on_a_cut_goes_bad() {
    tell_with_and_without(Mutant::UnsaidEndCounts, the_only_word_on_a_cut_goes_bad);
}
