// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What goes around the log, and what a power cut leaves of it.

mod support;

use forebay_core::format::superblock::Order;
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::block::Block;
use support::{ask, drain, place, power_cut, read, settle, world_with};

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = 7;

/// The log holds a clean version of a block, and a dirty one that is not durable. A write passes both, and is answered; the
/// power fails, and takes back the dirty version and the entry that voids the clean one. That is read, and so decided; then
/// its copy in the cache is gone, and the backing device is read. Says whether it has the same.
fn passed_over(mutants: Mutants) -> Result<(), String> {
    let mut world = world_with(64, |setup| {
        setup.config.mutants = mutants;
        setup.volumes[0].order = Order::Relaxed;
    });
    ask(&mut world, 0, Op::Write { fua: true }, BLOCK, 1);
    settle(&mut world);
    drain(&mut world);
    ask(&mut world, 0, Op::Write { fua: false }, BLOCK, 1);
    settle(&mut world);
    world.volumes[0].bypasses();
    world.engine.as_mut().expect("there is a process").set_cutoff(VOLUME, 1);
    ask(&mut world, 0, Op::Write { fua: false }, BLOCK, 1);
    settle(&mut world);
    power_cut(&mut world);
    ask(&mut world, 0, Op::Read, BLOCK, 1);
    settle(&mut world);
    let at = place(&world, BLOCK);
    world.cache.rot(at, Block::zero());
    read(&mut world, BLOCK)
}

/// Found by seed 958, before other things changed what it does.
#[test]
fn what_is_read_after_a_power_cut_is_not_replaced_by_what_went_around_the_log() {
    assert_eq!(passed_over(Mutants::default()), Ok(()));
    let loose = passed_over(Mutants::with(Mutant::PassesUndurable));
    assert!(loose.is_err(), "else this shows nothing");
}
