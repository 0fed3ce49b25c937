// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was lost reads as an error, and never as what the backing device has in its place.

use crate::support::{
    ask, clean, headers, place, power_cut, read, settle, tell_with_and_without, world_of,
    world_with, written,
};
use forebay_core::control::VolumeStatus;
use forebay_core::format::entry::Kind;
use forebay_core::format::record;
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::policy::reserve::Reserve;
use forebay_core::policy::writeback::Stage;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;
use std::rc::Rc;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = 7;
/// Blocks of a record that fills a segment.
const FULL: u64 = 15;

/// Events in which all is written back, and more.
const MOMENTS: u64 = 120;

/// Dirty blocks, of which one is bad on the cache device; they are being written back, for so many events so far.
fn written_back_for(moments: u64) -> World {
    written_back_with(Mutants::default(), moments)
}

fn written_back_with(mutants: Mutants, moments: u64) -> World {
    let mut world = written(mutants, 20);
    let at = place(&world, BLOCK);
    world.cache.make_unreadable(at);
    let now = world.moment();
    world.volumes[0].model.may_be_lost(BLOCK as usize, now);
    world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(BLOCK as usize);
    let engine = world.engine.as_mut().expect("there is a process");
    engine.drain(VOLUME, &mut world.memory);
    world.drain_effects().expect("it goes on");
    for _ in 0..moments {
        world.step().expect("it goes on");
    }
    world
}

fn is_clean(world: &World) -> bool {
    world.engine.as_ref().expect("there is a process").is_clean(VOLUME)
}

/// A guest reads a bad dirty block, and reads it again to be sure. Meanwhile a batch that has found it bad as well is
/// flushed, names it lost and moves the watermark: by that the block looked clean, and the guest got what the
/// backing device had, which is older than what it had flushed (seed 961).
#[test]
fn a_block_that_is_named_lost_while_it_is_read_is_not_read_from_the_backing_device() {
    for moments in 0..MOMENTS {
        let mut world = written_back_for(moments);
        let before = is_clean(&world);
        // What is read is compared with what was written: it may fail, and be nothing older.
        ask(&mut world, 0, Op::Read, BLOCK, 1);
        settle(&mut world);
        assert!(moments > 0 || !before, "it began while all was dirty");
        assert!(moments + 1 < MOMENTS || before, "and went on until nothing was");
    }
}

/// Only the cache knows which blocks are lost: its volume is not detached before they are written again, though all of it is clean. Who
/// asks for that looked before its last batch was done.
#[test]
fn a_volume_of_which_blocks_are_lost_is_not_detached() {
    let mut world = written_back_for(MOMENTS);
    let may_detach = |world: &World| world.engine.as_ref().expect("it lives").may_detach(VOLUME);
    let serve = |world: &mut World, is_served| {
        world.engine.as_mut().expect("it lives").serve(VOLUME, is_served);
    };
    assert!(is_clean(&world));
    is_lost(&mut world, BLOCK);
    serve(&mut world, false);
    assert!(!may_detach(&world));
    serve(&mut world, true);
    write(&mut world, BLOCK, 1);
    while !is_clean(&world) {
        assert!(world.step().expect("it goes on"));
    }
    settle(&mut world);
    serve(&mut world, false);
    assert!(may_detach(&world));
}

/// The same, and the block is written again while it is read: no batch names what nobody needs any more, and the
/// watermark passes the bad version all the same.
#[test]
fn a_bad_block_that_is_overwritten_while_it_is_read_gives_what_is_new_or_fails() {
    for moments in 0..MOMENTS {
        for later in 0..3 {
            let mut world = written_back_for(moments);
            ask(&mut world, 0, Op::Read, BLOCK, 1);
            for _ in 0..later {
                world.step().expect("it goes on");
            }
            assert!(
                world
                    .ask(0, Op::Write { fua: false }, BLOCK * BLOCK_BYTES, BLOCK_BYTES)
                    .expect("what was read is not older than what was written")
            );
            settle(&mut world);
        }
    }
}

fn write(world: &mut World, block: u64, blocks: u64) {
    for (op, block, blocks) in [(Op::Write { fua: false }, block, blocks), (Op::Flush, 0, 0)] {
        ask(world, 0, op, block, blocks);
        settle(world);
    }
}

fn until(world: &mut World, stage: Stage) {
    let now = |world: &World| world.engine.as_ref().and_then(|it| it.status(VOLUME));
    while now(world).expect("it is attached").writeback != stage {
        assert!(world.step().expect("it goes on"));
    }
}

/// The block is named as lost, and reads of it fail: what the backing device has is older.
fn is_lost(world: &mut World, block: u64) {
    let status = world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("it is attached");
    assert_eq!((status.lost_blocks_now, status.frozen), (1, false));
    ask(world, 0, Op::Read, block, 1);
    settle(world);
}

/// The last record of a segment has a rotten header, and all before it is on the backing device. So the segment looked
/// clean, and the pool got it back. But what was lost is told by the next record alone, and only as long as the log begins
/// before the rotten one: with the tail behind it, and nothing yet that names what was lost, the next opening found
/// nothing damaged, and the block was what the backing device had (seed 866).
fn a_rotten_end(mutants: Mutants) {
    let mut world = world_with(300, |setup| {
        (setup.config.dirty_age, setup.config.mutants) = (10_000_000, mutants);
    });
    for block in 0..7 {
        write(&mut world, block, 1);
    }
    until(&mut world, Stage::Flushing);
    // Newer than on the backing device: the last that there is room for in the segment. The watermark before it is
    // noted in the next one.
    write(&mut world, 0, 1);
    until(&mut world, Stage::Idle);
    write(&mut world, 10, 1);
    let at = place(&world, 0) - 1;
    let first = headers(&world)[0];
    assert_eq!((at - first, headers(&world).len()), (14, 10), "{:?}", headers(&world));
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    let now = world.moment();
    world.volumes[0].model.may_be_lost(0, now);
    world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(0);
    world.cache.rot(at, Block::zero());
    power_cut(&mut world);
    assert_eq!(world.marks.count("rot known"), 1);
    is_lost(&mut world, 0);

    // Nothing is written back, so nothing is named, and the pool wants segments.
    write(&mut world, 20, FULL);
    world.volumes[0].device.failed = true;
    for turn in 1..9 {
        write(&mut world, 20 + FULL * turn, FULL);
    }
    let (free, _) = world.engine.as_ref().expect("there is a process").free_segments();
    assert!(free < 8, "{free} segments are free");
    power_cut(&mut world);
    world.volumes[0].device.failed = false;
    is_lost(&mut world, 0);

    // Now it is named, and the segment goes.
    clean(&mut world, VOLUME);
    write(&mut world, 170, FULL);
    let status = world.engine.as_ref().and_then(|it| it.status(VOLUME)).expect("it is attached");
    assert!(status.stats.reclaimed_segments > 0);
    power_cut(&mut world);
    is_lost(&mut world, 0);
}

#[test]
fn the_tail_does_not_pass_a_rotten_header_before_what_it_held_is_named() {
    tell_with_and_without(Mutant::RottenEndNotDirty, a_rotten_end);
}

/// The header of the record that names a block as lost.
fn naming(world: &World) -> u64 {
    let names = |at: &u64| {
        let mut bytes = *world.cache.read(*at).bytes();
        let identity = world.superblock.identity();
        let header = record::decode(&mut bytes, at * BLOCK_BYTES, &identity).expect("it is whole");
        let mut entries = (0..header.entry_count).map(|number| record::entry(&bytes, number));
        entries.any(|entry| entry.expect("it is whole").kind == Kind::Lost)
    };
    let all = headers(world);
    let mut naming = all.into_iter().filter(names);
    let first = naming.next().expect("it is named");
    assert_eq!(naming.next(), None, "and once");
    first
}

/// A block was named lost and the watermark passed that. Then the header that names it rots, of which the list in the
/// next one said what it held, and not that it was lost: so it was taken for a block that the backing device has, and read
/// as what is there, which is older.
#[test]
fn a_block_stays_lost_when_the_header_that_names_it_rots() {
    for mutant in [None, Some(Mutant::LostItemUnmarked)] {
        let mutants = mutant.map_or(Mutants::default(), Mutants::with);
        let mut world = written_back_with(mutants, MOMENTS);
        assert!(is_clean(&world));
        let engine = world.engine.as_mut().expect("there is a process");
        engine.set_mode(VOLUME, Mode::WriteBack, &mut world.memory);
        for block in 30..34 {
            write(&mut world, block, 1);
        }
        let at = naming(&world);
        Rc::make_mut(&mut world.setup).rot = u64::MAX;
        world.cache.rot(at, Block::zero());
        power_cut(&mut world);
        if mutant.is_some() {
            assert!(read(&mut world, BLOCK).is_err(), "what is older is read");
            continue;
        }
        is_lost(&mut world, BLOCK);
        // Twice round the log: it is named again before its segment goes.
        for turn in 0..40 {
            write(&mut world, 20 + turn % 20, FULL);
        }
        let status = world.engine.as_ref().and_then(|it| it.status(VOLUME));
        assert!(status.expect("it is attached").stats.reclaimed_segments > 16);
        power_cut(&mut world);
        is_lost(&mut world, BLOCK);
    }
}

/// Blocks of a range of zeros that is lost as a whole.
const LOST: u64 = 1200;

fn status(world: &World, volume: usize) -> VolumeStatus {
    let engine = world.engine.as_ref().expect("there is a process");
    engine.status(VolumeIndex(volume as u8)).expect("it is attached")
}

/// Writes a block; says whether it was answered, or waits for what does not come.
fn is_written(world: &mut World, volume: usize, block: u64) -> bool {
    ask(world, volume, Op::Write { fua: false }, block, 1);
    for _ in 0..300 {
        if world.asked.is_empty() || !world.step().expect("it goes on") {
            break;
        }
    }
    world.asked.is_empty()
}

/// Two volumes before a cache of 32 segments. Of the first one a long range is lost, and so many blocks of it were written since, apart,
/// that there is no room to tell of each of them that it is not lost any more. So what names the range must stay in its log.
fn with_a_tail_that_is_held(mutants: Mutants) -> World {
    let mut world = world_of(32, LOST + 200, |setup| {
        setup.config.mutants = mutants;
        setup.config.dirty_percent = 100;
        setup.config.buffer_count = 16;
        setup.volumes.push(setup.volumes[0].clone());
        setup.volumes[0].reserve = Reserve::Percent(0);
    });
    ask(&mut world, 0, Op::WriteZeroes { fua: true }, 0, LOST);
    settle(&mut world);
    write(&mut world, LOST, 1);
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    let now = world.moment();
    for block in 0..LOST as usize {
        world.volumes[0].model.may_be_lost(block, now);
        world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(block);
    }
    let at = headers(&world)[0];
    world.cache.rot(at, Block::zero());
    power_cut(&mut world);
    assert_eq!(status(&world, 0).lost_blocks_now, LOST);
    clean(&mut world, VOLUME);
    // From block 1 on each makes two ranges of one, as long as there is room.
    let mut block = 1;
    while status(&world, 0).lost_blocks_now == LOST - block / 2 {
        assert!(is_written(&mut world, 0, block));
        block += 2;
    }
    clean(&mut world, VOLUME);
    world
}

/// The oldest clean segment was always the next one to be emptied, and this one could not be: when the pool was used up writes of both
/// volumes waited for it, although the second one had clean segments enough.
#[test]
fn others_give_while_a_tail_is_held_by_what_is_lost() {
    let mut world = with_a_tail_that_is_held(Mutants::default());
    for block in 0..LOST {
        assert!(is_written(&mut world, 1, block), "{block}");
    }
    let held = status(&world, 0);
    assert!(held.segments > held.reserved_segments + 10, "{held:?}");
    assert!(status(&world, 1).stats.reclaimed_segments > 32);
    // Nothing is lost of what is written again, and the log goes on.
    for block in 0..LOST {
        assert!(is_written(&mut world, 0, block), "{block}");
    }
    assert_eq!(status(&world, 0).lost_blocks_now, 0);
    let reclaimed = status(&world, 0).stats.reclaimed_segments;
    for block in 0..LOST {
        assert!(is_written(&mut world, 1, block), "{block}");
    }
    assert!(status(&world, 0).stats.reclaimed_segments > reclaimed);

    let mut world = with_a_tail_that_is_held(Mutants::with(Mutant::WaitsForHeldTail));
    let waits = (0..LOST).any(|block| !is_written(&mut world, 1, block));
    assert!(waits, "else this shows nothing");
}

/// The header before that one rots as well: below the watermark all is forgotten then that came before, and so was what the second of them had named lost,
/// though the record behind it says so.
#[test]
fn a_block_stays_lost_when_two_headers_rot_and_the_second_names_it() {
    for mutants in [Mutants::default(), Mutants::with(Mutant::LostItemUnread)] {
        let mut world = written_back_with(mutants, MOMENTS);
        assert!(is_clean(&world));
        let engine = world.engine.as_mut().expect("there is a process");
        engine.set_mode(VOLUME, Mode::WriteBack, &mut world.memory);
        for block in 30..34 {
            write(&mut world, block, 1);
        }
        clean(&mut world, VOLUME);
        write(&mut world, 34, 1);
        let at = naming(&world);
        let before =
            headers(&world).into_iter().rfind(|header| *header < at).expect("there is one");
        Rc::make_mut(&mut world.setup).rot = u64::MAX;
        world.cache.rot(before, Block::zero());
        world.cache.rot(at, Block::zero());
        power_cut(&mut world);
        if mutants.is(Mutant::LostItemUnread) {
            assert!(read(&mut world, BLOCK).is_err(), "what is older is read");
            continue;
        }
        is_lost(&mut world, BLOCK);
        power_cut(&mut world);
        is_lost(&mut world, BLOCK);
    }
}

/// The first record of a segment cannot be read, and with strict a batch ends there: so the watermark is where the record behind it begins. That
/// one goes bad while it is dirty, and was taken for clean: its block was what the backing device had.
#[test]
fn a_record_is_dirty_that_begins_where_the_watermark_lies() {
    let is_stale = |mutants, moments| {
        let mut world = world_with(300, |setup| {
            (setup.config.dirty_age, setup.config.mutants) = (1_000_000_000, mutants);
            setup.volumes[0].order = Order::Strict;
        });
        for block in 0..20 {
            write(&mut world, block, 1);
        }
        let first = headers(&world)[0];
        // Of a segment of 16 blocks.
        let is_first = |block: &u64| (place(&world, *block) - 1 - first).is_multiple_of(16);
        let hidden = (8..12).find(is_first).expect("one is the first of a segment");
        let at = place(&world, hidden) - 1;
        let header = world.cache.read(at);
        Rc::make_mut(&mut world.setup).rot = u64::MAX;
        let now = world.moment();
        for block in [hidden, hidden + 1] {
            world.volumes[0].model.may_be_lost(block as usize, now);
            world.volumes[0].prefix.as_mut().expect("nothing goes around").damaged(block as usize);
        }
        world.cache.rot(at, Block::zero());
        power_cut(&mut world);
        let engine = world.engine.as_mut().expect("there is a process");
        engine.drain(VOLUME, &mut world.memory);
        world.drain_effects().expect("it goes on");
        for _ in 0..moments {
            world.step().expect("it goes on");
        }
        // The first one was only not to be read, and the one behind it is bad now.
        world.cache.rot(at, Block::of(header.bytes()));
        let at = place(&world, hidden + 1) - 1;
        world.cache.rot(at, Block::zero());
        world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
        match world.open(Some(Stop::Power)) {
            Ok(()) => read(&mut world, hidden + 1).is_err(),
            Err(_) => true,
        }
    };
    let count = |mutants| (0..400).filter(|moments| is_stale(mutants, *moments)).count();
    assert_eq!(count(Mutants::default()), 0);
    assert!(count(Mutants::with(Mutant::WatermarkWithinHole)) > 0, "else this shows nothing");
}
