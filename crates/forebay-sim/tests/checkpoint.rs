// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checkpoints where they were once wrong.

use crate::support::{ask, checkpoint, headers, power_cut, settle, world_with, written};
use forebay_core::format::checkpoint::{Layout, PAGE_HEAD, address};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, VolumeIndex};
use forebay_sim::block::Block;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;
use std::panic::catch_unwind;
use std::rc::Rc;

/// Bytes of a page for each slot.
const SLOT_BYTES: usize = 9;
const WRITE: Op = Op::Write { fua: false };

/// What was asked for so far becomes durable.
fn flush(world: &mut World) {
    let waiting = world.asked.len();
    ask(world, 0, Op::Flush, 0, 0);
    while world.asked.len() > waiting {
        assert!(world.step().expect("it goes on"));
    }
}

/// A write that turned out to be zeros waits for room among the extents: the record that was opened for it
/// has no entry when a checkpoint begins, which ends the segment and gives the record up. Its sequence was
/// given up with it. Recovery takes a gap for a record that is missing: one rotten header behind it counted
/// as two, nobody could name what the first of them held, and the volume was frozen (seed 342).
#[test]
fn a_record_that_a_checkpoint_gives_up_is_not_missed_when_a_header_behind_it_rots() {
    let mut world = world_with(512, |_| ());
    flush(&mut world);
    world.volumes[0].device.failed = true;
    let room = u64::from(world.setup.config.extent_count_max);
    for at in 0..room - 1 {
        ask(&mut world, 0, Op::WriteZeroes { fua: false }, 2 * at, 1);
    }
    flush(&mut world);
    // All that is written now is zeros, and waits.
    Rc::make_mut(&mut world.setup).zeros = 1;
    ask(&mut world, 0, WRITE, 100, 1);
    Rc::make_mut(&mut world.setup).zeros = 0;
    let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(0))).expect("there");
    assert!(world.asked.len() == 1 && status.waiting == 1, "{status:?}");
    let before = headers(&world);
    checkpoint(&mut world);
    // The backing device is back, so that there is room again; two records behind the checkpoint.
    world.volumes[0].device.failed = false;
    settle(&mut world);
    world.volumes[0].device.failed = true;
    for block in [200, 201] {
        ask(&mut world, 0, WRITE, block, 1);
        flush(&mut world);
    }
    let after = headers(&world);
    let rotten = *after.iter().find(|at| !before.contains(at)).expect("there is a new record");
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    world.cache.rot(rotten, Block::zero());
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
    world.open(Some(Stop::Power)).expect("it is opened");
    assert!(world.marks.count("opened from a checkpoint") > 0);
    assert_eq!(world.marks.count("rot known") + world.marks.count("rot clean"), 1);
    let status = world.engine.as_ref().and_then(|it| it.status(VolumeIndex(0))).expect("there");
    assert!(!status.frozen, "{status:?}");
}

/// A bit rots in the page that holds the first slots' checksums. Says whether the cache is opened from that checkpoint: then a good
/// block looks bad.
fn opened_from_a_rotten_page(mutants: Mutants) -> bool {
    let mut world = written(mutants, 20);
    // What rots is this test's doing, and nothing else is.
    world.faults_over = true;
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    checkpoint(&mut world);
    let superblock = world.superblock.clone();
    let layout = Layout::of(superblock.segment_count, superblock.segment_blocks());
    for area in 0..2 {
        let at = address(&superblock, area, layout.slot_page(0)) / BLOCK_BYTES;
        let mut bytes = *world.cache.read(at).bytes();
        if bytes != [0; BLOCK_SIZE] {
            bytes[PAGE_HEAD + SLOT_BYTES + 5] ^= 1;
            world.cache.rot(at, Block::new(bytes));
        }
    }
    power_cut(&mut world);
    world.marks.count("opened from a checkpoint") > 0
}

#[test]
fn a_page_is_compared_with_its_checksum() {
    assert!(!opened_from_a_rotten_page(Mutants::default()));
    // It differs from what the log alone gives, which is compared at each opening.
    let loose = catch_unwind(|| opened_from_a_rotten_page(Mutants::with(Mutant::SkipPageChecksum)));
    assert!(loose.is_err(), "else this shows nothing");
}
