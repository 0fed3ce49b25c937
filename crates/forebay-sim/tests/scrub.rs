// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a scrub finds, and what it saves.

use crate::support::{
    ask, clean, headers, place, power_cut, read, rot_header, settle, world_with, written,
};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::policy::scrub::{Outcome, Report};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::block::Block;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);

/// Scrubs everything; says what was found.
fn scrub(world: &mut World) -> Report {
    let engine = world.engine.as_mut().expect("there is a process");
    engine.scrub(None, &mut world.memory).expect("none is running");
    world.drain_effects().expect("it goes on");
    loop {
        let report = *world.engine.as_ref().expect("there is a process").scrub_report();
        if report.outcome != Outcome::Running {
            assert_eq!(report.outcome, Outcome::Completed);
            return report;
        }
        assert!(world.step().expect("it goes on"), "{report:?}");
    }
}

/// Reads all of it; each is compared with what was written. Nothing that the model does not call lost may fail.
fn read_all(world: &mut World) {
    for block in 0..64 {
        ask(world, 0, Op::Read, block, 1);
        settle(world);
    }
}

#[test]
fn what_is_good_stays_as_it_is() {
    let mut world = written(Mutants::default(), 20);
    let before: Vec<_> = headers(&world);
    let report = scrub(&mut world);
    assert_eq!(report.verified_blocks, 40, "a header and a block each");
    let found = (report.healed_blocks, report.lost_blocks, report.unneeded_blocks);
    assert_eq!((found, report.bad_headers), ((0, 0, 0), 0));
    assert_eq!(headers(&world), before, "nothing was appended");
    read_all(&mut world);
}

#[test]
fn a_bad_clean_block_is_copied_again_from_the_backing_device() {
    let mut world = written(Mutants::default(), 20);
    clean(&mut world, VOLUME);
    let at = place(&world, 7);
    world.cache.rot(at, Block::zero());
    let report = scrub(&mut world);
    assert_eq!((report.healed_blocks, report.lost_blocks), (1, 0));
    ask(&mut world, 0, Op::Read, 7, 1);
    settle(&mut world);
    let status = world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("it is there");
    let stats = status.stats;
    assert_eq!((stats.repaired_blocks, stats.fill_blocks), (1, 1));
    assert_eq!((stats.hit_blocks, stats.miss_blocks), (1, 0), "it is in the cache again");
    // The bad copy is superseded for good.
    assert_eq!(scrub(&mut world).unneeded_blocks, 1);
    power_cut(&mut world);
    read_all(&mut world);
}

#[test]
fn a_bad_dirty_block_is_told_before_anybody_reads_it_and_named_by_write_back() {
    let mut world = written(Mutants::default(), 20);
    let at = place(&world, 7);
    world.cache.make_unreadable(at);
    let now = world.moment();
    world.volumes[0].model.may_be_lost(7, now);
    if let Some(prefix) = &mut world.volumes[0].prefix {
        prefix.damaged(7);
    }
    let report = scrub(&mut world);
    assert_eq!((report.healed_blocks, report.lost_blocks), (0, 1));
    assert_eq!(report.lost[0].map(|(volume, lba)| (volume, lba.0)), Some((VOLUME, 7)));
    let lost = |world: &World| {
        let status = world.engine.as_ref().and_then(|it| it.status(VOLUME));
        status.expect("it is there").lost_blocks_now
    };
    assert_eq!(lost(&world), 0, "it may be readable again");
    clean(&mut world, VOLUME);
    assert_eq!(lost(&world), 1);
    read_all(&mut world);
}

/// Blocks and headers that a scrub finds bad, of one each.
fn found(mutants: Mutants) -> (u64, u64) {
    let mut world = written(mutants, 20);
    clean(&mut world, VOLUME);
    let at = place(&world, 7);
    world.cache.rot(at, Block::zero());
    rot_header(&mut world, 11);
    let report = scrub(&mut world);
    (report.healed_blocks, report.bad_headers)
}

#[test]
fn what_is_read_is_compared_with_its_checksum() {
    assert_eq!(found(Mutants::default()), (1, 1));
    assert_eq!(found(Mutants::with(Mutant::SkipScrubChecksum)), (0, 1), "else this shows nothing");
    assert_eq!(found(Mutants::with(Mutant::SkipScrubHeader)), (1, 0), "else this shows nothing");
}

/// A log whose backing device takes nothing, so that nothing of it can be written back. The header of one record
/// rots, a scrub comes by, the header of `another` one rots, the power fails. Says whether the volume is frozen.
fn rotten(mutants: Mutants, one: u64, another: Option<u64>) -> bool {
    let mut world = written(mutants, 20);
    world.volumes[0].device.failed = true;
    rot_header(&mut world, one);
    let report = scrub(&mut world);
    assert_eq!(report.bad_headers, 1);
    if let Some(another) = another {
        rot_header(&mut world, another);
    }
    power_cut(&mut world);
    world.volumes[0].device.failed = false;
    let frozen = world.engine.as_ref().expect("there is a process").is_frozen(VOLUME);
    if !frozen {
        assert_eq!(report.saved_headers, 1);
        read_all(&mut world);
    }
    frozen
}

/// Two rotten headers in a row hide which blocks they held, and the volume is frozen. A scrub that finds the first
/// puts all of it into a checkpoint, and nobody has to know what either of them said.
#[test]
fn a_header_that_rots_beside_one_that_was_scrubbed_freezes_nothing() {
    assert!(!rotten(Mutants::default(), 8, Some(9)));
    assert!(
        rotten(Mutants::with(Mutant::ScrubSavesNothing), 8, Some(9)),
        "else this shows nothing"
    );
}

/// No later header says what the last one held, and a checkpoint may have no room to say it: so a record is written behind the bad one before
/// the checkpoint begins.
#[test]
fn a_checkpoint_that_saves_the_last_header_begins_behind_another() {
    assert!(!rotten(Mutants::default(), 19, None));
    assert!(rotten(Mutants::with(Mutant::ScrubSavesTooEarly), 19, None), "else this shows nothing");
}

/// A scrub while the pool is as low as it is kept; the header of the last record of a log has rotted. Says whether it ends.
fn ends_when_low(mutants: Mutants, volumes: usize) -> bool {
    let mut world = world_with(64, |setup| {
        (setup.config.mutants, setup.config.free_segments_kept) = (mutants, 1000);
        setup.volumes.resize(volumes, setup.volumes[0].clone());
    });
    for block in 0..20 {
        ask(&mut world, 0, Op::Write { fua: true }, block, 1);
        settle(&mut world);
    }
    clean(&mut world, VOLUME);
    while world.has_events() {
        world.step().expect("it goes on");
    }
    power_cut(&mut world);
    // What was noted last.
    let at = *headers(&world).last().expect("there are some");
    assert!(at > place(&world, 19));
    world.cache.rot(at, Block::zero());
    let engine = world.engine.as_mut().expect("there is a process");
    engine.scrub(None, &mut world.memory).expect("none is running");
    world.drain_effects().expect("it goes on");
    while world.step().expect("it goes on") {}
    let report = *world.engine.as_ref().expect("there is a process").scrub_report();
    assert_eq!(report.bad_headers, 1);
    report.outcome == Outcome::Completed && report.saved_headers == 1
}

/// Only another record makes a bad last header needless, and that needs a segment. None was taken for it while the pool was low, as it is in a cache that
/// is full: the checkpoint waited until a guest wrote to that volume, the scrub for the checkpoint, and so did a stop. Nor does it wait for a volume that has
/// no record at all.
#[test]
fn the_record_behind_a_bad_last_header_has_a_segment_of_those_that_are_kept() {
    assert!(ends_when_low(Mutants::default(), 1));
    assert!(ends_when_low(Mutants::default(), 2));
    assert!(
        !ends_when_low(Mutants::with(Mutant::BadHeaderStaysLast), 1),
        "else this shows nothing"
    );
}

/// What a bad header held is on the backing device soon, even where nothing else asks for write-back.
#[test]
fn what_a_bad_header_held_is_written_back() {
    let mut world = written(Mutants::default(), 20);
    rot_header(&mut world, 8);
    scrub(&mut world);
    let clean = |world: &World| {
        world.engine.as_ref().and_then(|it| it.durable_watermark(VOLUME)).expect("it is there")
    };
    let before = clean(&world);
    while clean(&world) == before {
        assert!(world.step().expect("it goes on"), "write-back was asked for");
    }
    // Now a crash that finds no checkpoint loses nothing, either.
    world.superblock.checkpoint_sequence = 0;
    world.write_superblock();
    rot_header(&mut world, 9);
    power_cut(&mut world);
    assert!(!world.engine.as_ref().expect("there is a process").is_frozen(VOLUME));
    read_all(&mut world);
}

/// A block is bad, and is read from the backing device to be copied again. While that is under way the guest zeroes it: the
/// copy would be newer than the zeros, and old.
fn overwritten_meanwhile(mutants: Mutants) -> Result<(), String> {
    let mut world = written(mutants, 20);
    clean(&mut world, VOLUME);
    let at = place(&world, 7);
    world.cache.rot(at, Block::zero());
    let engine = world.engine.as_mut().expect("there is a process");
    engine.scrub(None, &mut world.memory).expect("none is running");
    world.drain_effects().expect("it goes on");
    let report = |world: &World| *world.engine.as_ref().expect("there is one").scrub_report();
    while report(&world).healed_blocks == 0 {
        assert!(world.step().expect("it goes on"));
    }
    ask(&mut world, 0, Op::WriteZeroes { fua: false }, 7, 1);
    while report(&world).outcome == Outcome::Running {
        assert!(world.step().expect("it goes on"));
    }
    read(&mut world, 7)
}

#[test]
fn what_is_overwritten_while_it_is_healed_is_not_brought_back() {
    assert_eq!(overwritten_meanwhile(Mutants::default()), Ok(()));
    let late = overwritten_meanwhile(Mutants::with(Mutant::ScrubTicketLate));
    assert!(late.is_err(), "else this shows nothing");
}
