// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What one process knows and the next one must.

use crate::support::{ask, clean, power_cut, read, settle, world_with};
use forebay_core::format::superblock::Order;
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::handover::hand_over;
use forebay_sim::random::Random;
use std::rc::Rc;

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = 7;

/// The log has a clean version of a block that the map has forgotten. The cache is handed over, and the next process writes the
/// block around the log: it took the log for one without a version of it, and placed no entry that voids the one there is. The
/// power failed, the log was read, and the block was what it had been before. Says whether the cache was handed over.
fn forgotten_and_handed_over(seed: u64) -> bool {
    let mut world = world_with(64, |setup| setup.volumes[0].order = Order::Relaxed);
    ask(&mut world, 0, Op::Write { fua: true }, BLOCK, 1);
    settle(&mut world);
    clean(&mut world, VOLUME);
    while world.has_events() {
        world.step().expect("it goes on");
    }
    // Nothing else is forgotten by chance.
    Rc::make_mut(&mut world.setup).rot = u64::MAX;
    let engine = world.engine.as_mut().expect("there is a process");
    assert!(engine.is_clean(VOLUME) && engine.is_in_log(VOLUME, forebay_core::units::Lba(BLOCK)));
    engine.serve(VOLUME, false);
    engine.forget_clean(VOLUME);
    engine.serve(VOLUME, true);
    world.random = Random::new(seed);
    hand_over(&mut world).expect("it is taken, or the next process reads the log");
    if world.marks.count("handed over") == 0 {
        return false;
    }
    world.volumes[0].bypasses();
    world.engine.as_mut().expect("there is a process").set_cutoff(VOLUME, 1);
    for op in [Op::Write { fua: false }, Op::Flush] {
        let blocks = u64::from(op != Op::Flush);
        ask(&mut world, 0, op, BLOCK * blocks, blocks);
        settle(&mut world);
    }
    let status = world.engine.as_ref().and_then(|engine| engine.status(VOLUME));
    assert_eq!(status.expect("it is there").stats.bypassed_writes, 1);
    power_cut(&mut world);
    read(&mut world, BLOCK).expect("what was written last");
    true
}

#[test]
fn what_the_map_has_forgotten_does_not_come_back_after_a_hand_over() {
    let handed = (0..16).filter(|seed| forgotten_and_handed_over(*seed)).count();
    assert!(handed >= 8, "{handed}");
}
