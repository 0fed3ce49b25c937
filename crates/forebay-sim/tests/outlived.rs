// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A segment is in the log that has it now, though the record that told of its death is gone.

use crate::support::{ask, checkpoint, clean, headers, place, power_cut, settle, world_of};
use forebay_core::format::record;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::policy::reserve::Reserve;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, Ordinal, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::{Failure, World};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// What the other log writes, and has written back, until it has had every segment that the first one gave.
const ROUND: u64 = 260;
const LOST: u64 = 260;
const FUA: Op = Op::Write { fua: true };

/// The newest record of a volume: where its header is.
fn last_header(world: &World, volume: u16) -> (u64, record::Header) {
    let header = |at: &u64| {
        let address = at * BLOCK_BYTES;
        let mut bytes = *world.cache.read(*at).bytes();
        record::decode(&mut bytes, address, &world.superblock.identity()).ok()
    };
    let all = headers(world).into_iter().filter_map(|at| Some((at, header(&at)?)));
    let mine = all.filter(|(_, header)| header.volume == volume);
    mine.max_by_key(|(_, header)| header.sequence).expect("it has one")
}

/// A log whose blocks are all clean, with room for notes in its newest segment.
fn at_rest(from_checkpoint: bool, is_lost: bool, mutants: Mutants) -> World {
    let mut world = world_of(40, 400, |setup| {
        setup.config.mutants = mutants;
        setup.volumes[0].reserve = Reserve::Percent(0);
        setup.volumes.push(setup.volumes[0].clone());
    });
    world.faults_over = true;
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    let write = |world: &mut World, blocks: Range<u64>| {
        for block in blocks {
            ask(world, 0, Op::Write { fua: false }, block, 1);
            settle(world);
        }
        ask(world, 0, Op::Flush, 0, 0);
        settle(world);
    };
    write(&mut world, 0..270);
    if is_lost {
        let at = place(&world, LOST);
        world.cache.rot(at, Block::zero());
        let now = world.moment();
        world.volumes[0].model.may_be_lost(LOST as usize, now);
        world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(LOST as usize);
    }
    clean(&mut world, VolumeIndex(0));
    write(&mut world, 270..300);
    clean(&mut world, VolumeIndex(0));
    match from_checkpoint {
        true => checkpoint(&mut world),
        false => power_cut(&mut world),
    }
    write(&mut world, 0..1);
    clean(&mut world, VolumeIndex(0));
    while world.has_events() {
        world.step().expect("it goes on");
    }
    world
}

/// Another log has the segments of that one, with so many blocks in the newest of them that are not on its backing device. Then the last record goes bad
/// that told which of them the one that is at rest has no more, and the power fails.
fn opened(world: &mut World, blocks: u64) -> Result<(), Failure> {
    let other = VolumeIndex(1);
    for block in 0..ROUND {
        ask(world, 1, FUA, block, 1);
        settle(world);
        if block % 20 == 19 {
            clean(world, other);
        }
    }
    world.volumes[1].device.failed = true;
    for block in 0..blocks {
        ask(world, 1, FUA, block, 1);
        settle(world);
    }
    world.volumes[1].device.failed = false;
    let (at, header) = last_header(world, 0);
    assert!(
        header.tail > Ordinal(1)
            && world.superblock.volumes[0].as_ref().is_some_and(|it| it.tail < header.tail)
    );
    world.cache.make_unreadable(at);
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power))
}

fn read(world: &mut World, volume: usize, block: u64) -> Result<(), String> {
    world.ask(volume, Op::Read, block * BLOCK_BYTES, BLOCK_BYTES).map_err(|it| it.0)?;
    while !world.asked.is_empty() {
        world.step().map_err(|it| it.0)?;
    }
    Ok(())
}

/// The record rotted that told of a segment's death, the last of its log, and another log had the segment. That was taken for the first one's again:
/// what the other had in it was taken for lost, and the first one's map led into it.
#[test]
fn a_segment_is_who_has_it_now_though_the_record_of_its_death_is_gone() {
    for from_checkpoint in [true, false] {
        let is_whole = |blocks, mutants| {
            let all = || {
                let mut world = at_rest(from_checkpoint, false, mutants);
                opened(&mut world, blocks).map_err(|it| it.0)?;
                (0..blocks).try_for_each(|block| read(&mut world, 1, block))?;
                let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(1)));
                let status = status.expect("it is there");
                assert!(!status.frozen && status.lost_blocks_now == 0);
                (0..300).try_for_each(|block| read(&mut world, 0, block))
            };
            matches!(catch_unwind(AssertUnwindSafe(all)), Ok(Ok(())))
        };
        let broken =
            |mutants| (0..120).step_by(3).filter(|blocks| !is_whole(*blocks, mutants)).count();
        assert_eq!(broken(Mutants::default()), 0, "{from_checkpoint}");
        let counts = broken(Mutants::with(Mutant::OutlivedCounts));
        assert!(counts > 0, "{from_checkpoint}: else this shows nothing");
    }
}

/// What was lost in such a segment was named again, by the very record that told of the death. It stays lost: the backing device has what is older.
#[test]
fn what_was_lost_in_a_segment_that_died_stays_so_though_the_record_of_its_death_is_gone() {
    for (mutants, stays) in
        [(Mutants::default(), true), (Mutants::with(Mutant::OutlivedLostForgotten), false)]
    {
        let mut world = at_rest(true, true, mutants);
        opened(&mut world, 60).expect("it opens");
        let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(0)));
        eprintln!("{:?}", status.map(|it| it.lost_blocks_now));
        assert_eq!(read(&mut world, 0, LOST).is_ok(), stays);
        if stays {
            assert_eq!(status.map(|it| it.lost_blocks_now), Some(1));
            // It is named again before anything of its log goes.
            clean(&mut world, VolumeIndex(0));
            power_cut(&mut world);
            let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(0)));
            assert_eq!(status.map(|it| it.lost_blocks_now), Some(1));
        }
    }
}

/// A checkpoint had a segment that was open, and a crash found no record in it: it went back to the pool as it was, and another log took it. Who took it
/// for dead took all of its log before it for dead as well, and what that log has in its place since.
#[test]
fn a_segment_that_a_crash_left_empty_has_not_died() {
    let is_whole = |blocks: u64, mutants: Mutants| {
        let all = || {
            let mut world = world_of(20, 400, |setup| {
                setup.config.mutants = mutants;
                setup.volumes.push(setup.volumes[0].clone());
            });
            world.faults_over = true;
            Rc::make_mut(&mut world.setup).rot = u64::MAX;
            world.volumes[0].device.failed = true;
            // The same block again and again: few extents, many that are pending.
            for _ in 0..world.setup.config.extent_count_max {
                ask(&mut world, 0, Op::WriteZeroes { fua: false }, 300, 1);
                settle(&mut world);
            }
            // So many blocks that the segment may be full.
            for block in 0..blocks {
                ask(&mut world, 0, Op::Write { fua: false }, block, 1);
            }
            settle(&mut world);
            // Zeros have a new one opened, and wait for room among the extents.
            Rc::make_mut(&mut world.setup).zeros = 1;
            ask(&mut world, 0, Op::Write { fua: false }, 200, 1);
            Rc::make_mut(&mut world.setup).zeros = 0;
            checkpoint(&mut world);
            power_cut(&mut world);
            for block in 0..140 {
                ask(&mut world, 1, FUA, block, 1);
                settle(&mut world);
                if block % 20 == 19 {
                    clean(&mut world, VolumeIndex(1));
                }
            }
            for block in 0..20 {
                ask(&mut world, 0, FUA, block, 1);
                settle(&mut world);
            }
            power_cut(&mut world);
            world.volumes[0].device.failed = false;
            (0..20).try_for_each(|block| read(&mut world, 0, block))
        };
        matches!(catch_unwind(AssertUnwindSafe(all)), Ok(Ok(())))
    };
    let broken = |mutants| (0..18).filter(|blocks| !is_whole(*blocks, mutants)).count();
    assert_eq!(broken(Mutants::default()), 0);
    assert!(broken(Mutants::with(Mutant::UnusedCountsAsDead)) > 0, "else this shows nothing");
}
