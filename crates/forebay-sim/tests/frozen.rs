// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume of which dirty data was lost that nobody can name stays frozen (V7 of `log::recovery`).

use crate::support::{
    ask, checkpoint, power_cut, read, rot_header, settle, tell_with_and_without, world_with,
    written,
};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);

fn is_frozen(world: &World) -> bool {
    world.engine.as_ref().expect("there is a process").is_frozen(VOLUME)
}

/// Two headers in a row rot, and the next opening finds that. Then a checkpoint is named, behind which nobody looks at them
/// any more. Says whether the volume is frozen at the opening after that.
fn frozen_behind_a_checkpoint(mutants: Mutants) -> bool {
    let mut world = written(mutants, 20);
    // What rots is this test's doing, and nothing else is.
    world.faults_over = true;
    world.volumes[0].device.failed = true;
    rot_header(&mut world, 8);
    rot_header(&mut world, 9);
    power_cut(&mut world);
    assert!(is_frozen(&world));
    checkpoint(&mut world);
    power_cut(&mut world);
    assert_eq!(world.marks.count("opened from a checkpoint"), 1);
    is_frozen(&world)
}

#[test]
fn a_frozen_volume_stays_so_behind_a_checkpoint() {
    assert!(frozen_behind_a_checkpoint(Mutants::default()));
    let loose = frozen_behind_a_checkpoint(Mutants::with(Mutant::FrozenForgotten));
    assert!(!loose, "else this shows nothing");
}

/// A block is written, and others, and then again by the last record of a segment. One more record begins another one, and the power fails: the next
/// opening begins a segment of its own. Then the header of that one rots, or the one before it as well.
fn behind_a_border(mutants: Mutants, both: bool) {
    let mut world = world_with(64, |setup| setup.config.mutants = mutants);
    world.faults_over = true;
    world.volumes[0].device.failed = true;
    let write = |world: &mut World, block| {
        ask(world, 0, Op::Write { fua: true }, block, 1);
        settle(world);
    };
    for block in [7, 1, 2, 3, 4, 5, 6, 7, 8] {
        write(&mut world, block);
    }
    power_cut(&mut world);
    write(&mut world, 9);
    write(&mut world, 10);
    rot_header(&mut world, 8);
    if both {
        rot_header(&mut world, 7);
    }
    power_cut(&mut world);
    assert_eq!(is_frozen(&world), both);
    if !both {
        assert_eq!(read(&mut world, 7), Ok(()));
    }
}

/// Where the second of two bad headers in a row was the last record before an opening, the two were taken for one: what the next record says the second
/// held was lost, and what the first held was as if it had never been written. Reads gave what was older. Sequences tell: they have a wide gap
/// between two openings, and none within one.
#[test]
fn two_bad_headers_before_the_border_of_an_opening_are_not_taken_for_one() {
    behind_a_border(Mutants::default(), false);
    tell_with_and_without(Mutant::BorderHidesHole, |mutants| behind_a_border(mutants, true));
}
