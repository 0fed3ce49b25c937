// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an opening goes by when a checkpoint is named: it is of one moment, and what came after it is found.

use crate::support::{
    ask, checkpoint, clean, headers, is_in_log, place, power_cut, push_out, read, settle, world_of,
};
use forebay_core::effect::Fault;
use forebay_core::format::checkpoint::address;
use forebay_core::format::superblock::{Order, Superblock};
use forebay_core::log::recovery::{CacheReader, Writer, recover};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::device::Device;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;
use std::rc::Rc;

const VOLUME: VolumeIndex = VolumeIndex(0);
const WRITE: Op = Op::Write { fua: false };
const FUA: Op = Op::Write { fua: true };

fn do_one(world: &mut World, op: Op, block: u64, blocks: u64) {
    ask(world, 0, op, block, blocks);
    settle(world);
}

/// Nothing fails but what the story says.
fn quiet(world: &mut World) {
    world.faults_over = true;
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
}

/// All that is under way ends.
fn rest(world: &mut World) {
    while world.has_events() {
        world.step().expect("it goes on");
    }
}

/// The machine stops, and the cache is opened again.
fn stop_and_open(world: &mut World, stop: Stop) {
    world.stop_by(stop, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(stop)).expect("it opens");
}

/// A block that is clean, in a cache whose map is written page by page; copies of what is read are not placed.
fn one_clean_block(block: u64, below: bool, mutants: Mutants) -> World {
    let mut world = world_of(512, 4000, |setup| {
        setup.config.fill_run_max = 0;
        setup.config.checkpoint_frames = 1;
        setup.config.mutants = mutants;
    });
    quiet(&mut world);
    if below {
        do_one(&mut world, Op::WriteZeroes { fua: false }, 0, 1000);
    }
    do_one(&mut world, WRITE, block, 1);
    do_one(&mut world, Op::Flush, 0, 0);
    clean(&mut world, VOLUME);
    power_cut(&mut world);
    rest(&mut world);
    read(&mut world, block).expect("it is whole");
    world
}

/// It is found bad while the pages of a checkpoint are written.
fn forget_meanwhile(world: &mut World, block: u64) {
    let engine = |world: &World| world.engine.as_ref().map(|it| it.is_checkpointed());
    world.engine.as_mut().expect("there is a process").want_checkpoint();
    world.put_in_order().expect("it goes on");
    read(world, block).expect("the backing device has it");
    assert!(!is_in_log(world, block));
    assert_eq!(engine(world), Some(false), "it is under way");
    while engine(world) == Some(false) {
        assert!(world.step().expect("it goes on"));
    }
}

/// A long run of zeros, a block written over it, all of it clean. The block rots, and is forgotten: it is on the backing device. Had a checkpoint
/// the zeros of before and the map of behind that, it would read as zeros.
#[test]
fn a_block_forgotten_while_a_checkpoint_is_written_is_not_what_was_below_it() {
    let broken = |block, stop, mutants| {
        let mut world = one_clean_block(block, true, mutants);
        let at = place(&world, block);
        world.volumes[0].model.copy_damaged(block as usize);
        world.cache.rot(at, Block::zero());
        forget_meanwhile(&mut world, block);
        stop_and_open(&mut world, stop);
        assert!(world.marks.count("opened from a checkpoint") > 0);
        read(&mut world, block).is_err()
    };
    for stop in [Stop::Power, Stop::Process] {
        let found = |mutants| (0..24).filter(|block| broken(*block, stop, mutants)).count();
        assert_eq!(found(Mutants::default()), 0, "{stop:?}");
        assert!(
            found(Mutants::with(Mutant::CheckpointOfTwoMoments)) > 0,
            "else this shows nothing"
        );
    }
}

/// The same, and the block can be read again later: what was written around the log meanwhile must have voided it.
#[test]
fn a_block_forgotten_while_a_checkpoint_is_written_does_not_come_back() {
    let comes_back = |block, mutants| {
        let mut world = one_clean_block(block, false, mutants);
        let at = place(&world, block);
        world.volumes[0].model.copy_damaged(block as usize);
        world.cache.make_unreadable(at);
        forget_meanwhile(&mut world, block);
        power_cut(&mut world);
        world.set_order(0, Order::Relaxed, 1).expect("it is set");
        do_one(&mut world, WRITE, block, 1);
        do_one(&mut world, Op::Flush, 0, 0);
        read(&mut world, block).expect("it was written");
        world.cache.read_again();
        world.superblock.checkpoint_sequence = 0;
        world.write_superblock();
        stop_and_open(&mut world, Stop::Power);
        read(&mut world, block).is_err()
    };
    for block in [7, 10, 12] {
        assert!(!comes_back(block, Mutants::default()));
        assert!(comes_back(block, Mutants::with(Mutant::CheckpointOfTwoMoments)));
    }
}

/// A checkpoint was given up. The next had the area of the one before that, which is named: until it was named itself an opening found no
/// checkpoint at all, and read the whole log.
#[test]
fn behind_a_checkpoint_that_was_given_up_the_named_one_still_stands() {
    let lost = |steps, mutants| {
        let mut world = one_clean_block(7, false, mutants);
        checkpoint(&mut world);
        let at = place(&world, 7);
        world.volumes[0].model.copy_damaged(7);
        world.cache.rot(at, Block::zero());
        world.engine.as_mut().expect("there is a process").want_checkpoint();
        world.put_in_order().expect("it goes on");
        read(&mut world, 7).expect("the backing device has it");
        for _ in 0..steps {
            world.step().expect("it goes on");
        }
        let before = world.marks.count("opened from a checkpoint");
        stop_and_open(&mut world, Stop::Power);
        world.marks.count("opened from a checkpoint") == before
    };
    assert!((0..30).all(|steps| !lost(steps, Mutants::default())));
    assert!((0..30).any(|steps| lost(steps, Mutants::with(Mutant::CheckpointInPlace))));
}

struct Plain<'a>(&'a Device);

impl CacheReader for Plain<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        for (at, block) in (offset / BLOCK_BYTES..).zip(bytes.as_chunks_mut::<BLOCK_SIZE>().0) {
            *block = *self.0.read(at).bytes();
        }
        Ok(())
    }
}

/// Whether a block is found in the log.
fn is_found(world: &World, block: u64, mutants: Mutants) -> bool {
    let room = world.setup.config.extent_count_max;
    let mut reader = Plain(&world.cache);
    let found = recover(&world.superblock, &mut reader, room, Writer::MayHaveLostPower, mutants);
    found.newest(VOLUME, Lba(block)).is_some()
}

/// An opening that cannot read the checkpoint goes by the log, and takes segments in another order than that has. Could it be read the next time,
/// what was flushed in between would be behind more unused segments than are looked at.
#[test]
fn a_checkpoint_that_could_not_be_read_once_is_not_gone_by_again() {
    let lost = |mutants| {
        let mut world = world_of(1000, 64, |setup| {
            setup.config.mutants = mutants;
            setup.volumes.push(setup.volumes[0].clone());
        });
        ask(&mut world, 1, FUA, 0, 1);
        settle(&mut world);
        do_one(&mut world, FUA, 0, 1);
        // Its segment comes last in the pool, and first by its number.
        world.detach(1).expect("it goes on");
        checkpoint(&mut world);
        quiet(&mut world);
        let named = world.superblock.checkpoint_sequence;
        assert!(named > 0);
        world.cache.make_unreadable(address(&world.superblock, named, 0) / BLOCK_BYTES);
        power_cut(&mut world);
        world.cache.read_again();
        do_one(&mut world, FUA, 5, 1);
        world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
        !is_found(&world, 5, Mutants::default())
    };
    assert!(!lost(Mutants::default()));
    assert!(lost(Mutants::with(Mutant::UnreadCheckpointStays)), "else this shows nothing");
}

/// A log of more segments than are looked at in vain, and the newest is open and empty when a checkpoint begins: a write has taken it and then waits
/// for room of another kind.
#[test]
fn what_came_into_an_empty_head_behind_a_checkpoint_is_found() {
    let mut shown = 0;
    for first in 0..18 {
        let mut world = world_of(700, 8000, |_| ());
        for block in 0..5000 {
            ask(&mut world, 0, WRITE, block, 1);
            if block % 32 == 31 {
                settle(&mut world);
            }
        }
        settle(&mut world);
        do_one(&mut world, Op::Flush, 0, 0);
        clean(&mut world, VOLUME);
        rest(&mut world);
        world.volumes[0].device.failed = true;
        // The same block again and again: few extents, many that are pending.
        for _ in 0..world.setup.config.extent_count_max {
            do_one(&mut world, Op::WriteZeroes { fua: false }, 6000, 1);
        }
        // So many blocks that the segment may be full.
        for block in 0..first {
            ask(&mut world, 0, WRITE, 7900 + block, 1);
        }
        settle(&mut world);
        // Zeros wait.
        Rc::make_mut(&mut world.setup).zeros = 1;
        ask(&mut world, 0, WRITE, 7000, 1);
        Rc::make_mut(&mut world.setup).zeros = 0;
        checkpoint(&mut world);
        world.volumes[0].device.failed = false;
        settle(&mut world);
        do_one(&mut world, FUA, 7999, 1);
        world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
        assert!(is_found(&world, 7999, Mutants::default()), "{first}");
        shown += u32::from(!is_found(&world, 7999, Mutants::with(Mutant::EmptyHeadUnread)));
    }
    assert!(shown > 0, "else this shows nothing");
}

/// A checkpoint begins before the tail, and of the log behind it nothing can be read: the volume is frozen.
fn frozen_behind_its_checkpoint() -> World {
    let mut world = world_of(20, 700, |_| ());
    quiet(&mut world);
    do_one(&mut world, WRITE, 0, 1);
    clean(&mut world, VOLUME);
    checkpoint(&mut world);
    let named = world.superblock.checkpoint_sequence;
    push_out(&mut world, 0);
    do_one(&mut world, Op::Flush, 0, 0);
    clean(&mut world, VOLUME);
    rest(&mut world);
    power_cut(&mut world);
    assert_eq!(world.superblock.checkpoint_sequence, named, "no newer one");
    for at in headers(&world) {
        world.cache.make_unreadable(at);
    }
    stop_and_open(&mut world, Stop::Power);
    let engine = world.engine.as_ref().expect("there is a process");
    assert!(engine.is_frozen(VOLUME));
    world
}

/// A clean stop notes no end of it, which would be in
/// a segment that is free, or of another log: nobody could read such a superblock.
#[test]
fn a_stop_behind_a_log_that_cannot_be_read_leaves_a_superblock_that_can() {
    let world = frozen_behind_its_checkpoint();
    let engine = world.engine.as_ref().expect("there is a process");
    let mut next = world.superblock.clone();
    engine.note_heads(&mut next);
    next.sequence += 1;
    let mut bytes = next.encode(0);
    assert_eq!(Superblock::decode(&mut bytes, 0), Ok(next));
}

/// A record of nothing but marks is on its way when a checkpoint begins, which has it for the last of its log. It was named before that record was
/// there. The power failed, and the next opening went by the checkpoint and put the end of the log where nothing is: for whoever cannot read the
/// checkpoint later what was there has rotted, and nobody can say what it held.
#[test]
fn a_checkpoint_is_not_named_before_the_marks_are_written_that_it_begins_behind() {
    let is_frozen = |blocks, mutants| {
        let mut world = world_of(20, 64, |setup| setup.config.mutants = mutants);
        quiet(&mut world);
        for block in 0..blocks {
            do_one(&mut world, FUA, block, 1);
        }
        world.engine.as_mut().expect("there is a process").drain(VOLUME, &mut world.memory);
        world.drain_effects().expect("it goes on");
        // The device is in no hurry with what says that all of it is written back.
        let late = |world: &mut World, late: bool| {
            let setup = Rc::make_mut(&mut world.setup);
            (setup.steady, setup.late) = (!late, u64::from(late));
        };
        late(&mut world, true);
        let status = |world: &World| {
            world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("it is there")
        };
        while status(&world).watermark < status(&world).placed {
            assert!(world.step().expect("it goes on"));
        }
        late(&mut world, false);
        checkpoint(&mut world);
        power_cut(&mut world);
        assert!(world.marks.count("opened from a checkpoint") > 0);
        let superblock = world.superblock.clone();
        for area in 0..2 {
            world.cache.rot(address(&superblock, area, 0) / BLOCK_BYTES, Block::zero());
        }
        power_cut(&mut world);
        assert_eq!(world.superblock.checkpoint_sequence, 0, "it could not be read");
        status(&world).frozen
    };
    for blocks in 1..20 {
        assert!(!is_frozen(blocks, Mutants::default()), "{blocks}");
        let early = is_frozen(blocks, Mutants::with(Mutant::CheckpointEndNotDurable));
        assert!(early, "{blocks}: else this shows nothing");
    }
}

/// A volume of which nothing could be read is frozen. Each checkpoint from then on told where its log had ended, which was in no segment of it: none
/// could be gone by, for any volume, until somebody gave that one up.
#[test]
fn a_checkpoint_behind_a_log_that_cannot_be_read_can_be_gone_by() {
    let mut world = frozen_behind_its_checkpoint();
    let named = world.superblock.checkpoint_sequence;
    checkpoint(&mut world);
    rest(&mut world);
    assert!(world.superblock.checkpoint_sequence > named);
    let before = world.marks.count("opened from a checkpoint");
    power_cut(&mut world);
    assert!(world.marks.count("opened from a checkpoint") > before);
    assert!(world.engine.as_ref().expect("there is a process").is_frozen(VOLUME));
}

/// Six records that fill a segment each, and one more. The header of the third can be read no more, as an opening has found.
fn a_segment_is_missing(mutants: Mutants) -> World {
    let mut world = world_of(20, 700, |setup| setup.config.mutants = mutants);
    quiet(&mut world);
    for at in 0..6 {
        do_one(&mut world, WRITE, at * 15, 15);
        do_one(&mut world, Op::Flush, 0, 0);
    }
    do_one(&mut world, FUA, 600, 1);
    power_cut(&mut world);
    for block in 30..45 {
        world.volumes[0].model.copy_damaged(block);
        world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(block);
    }
    let header = place(&world, 30) - 1;
    world.cache.rot(header, Block::zero());
    power_cut(&mut world);
    let engine = world.engine.as_ref().expect("there is a process");
    assert!(!engine.is_frozen(VOLUME), "the next header says what is lost");
    world
}

/// Its place was missing in the log from then on, so each checkpoint was taken for one that lacks something: every opening read the whole log, and what
/// a checkpoint has when the last header rots was not believed.
#[test]
fn a_checkpoint_behind_a_segment_that_is_missing_can_be_gone_by() {
    let used = |mutants| {
        let mut world = a_segment_is_missing(mutants);
        let uses = |turn: u64| {
            do_one(&mut world, FUA, 601 + turn, 1);
            checkpoint(&mut world);
            rest(&mut world);
            let before = world.marks.count("opened from a checkpoint");
            power_cut(&mut world);
            usize::from(world.marks.count("opened from a checkpoint") > before)
        };
        (0..4).map(uses).sum::<usize>()
    };
    assert_eq!(used(Mutants::default()), 4);
    assert_eq!(used(Mutants::with(Mutant::GapStays)), 0, "else this shows nothing");
}

#[test]
fn behind_a_segment_that_is_missing_a_checkpoint_has_what_the_last_header_held() {
    let is_frozen = |mutants| {
        let mut world = a_segment_is_missing(mutants);
        do_one(&mut world, FUA, 601, 1);
        power_cut(&mut world);
        checkpoint(&mut world);
        rest(&mut world);
        world.volumes[0].model.copy_damaged(601);
        let header = place(&world, 601) - 1;
        world.cache.rot(header, Block::zero());
        power_cut(&mut world);
        world.engine.as_ref().expect("there is a process").is_frozen(VOLUME)
    };
    assert!(!is_frozen(Mutants::default()));
    assert!(is_frozen(Mutants::with(Mutant::GapStays)), "else this shows nothing");
}

/// The tail comes past it like past any other, and it is used again.
#[test]
fn a_segment_that_is_missing_comes_free_when_the_tail_has_passed_it() {
    let mut world = a_segment_is_missing(Mutants::default());
    let status = |world: &World| {
        world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("it is there")
    };
    assert_eq!(status(&world).segments, 7, "with the one of nothing");
    for turn in 0..4 {
        for at in 10..40 {
            do_one(&mut world, WRITE, at * 15, 15);
        }
        do_one(&mut world, Op::Flush, 0, 0);
        clean(&mut world, VOLUME);
        rest(&mut world);
        power_cut(&mut world);
        assert!(status(&world).segments <= 20, "{turn}");
    }
    assert_eq!(status(&world).lost_blocks_now, 15, "not written since");
}
