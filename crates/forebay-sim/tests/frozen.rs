// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume of which dirty data was lost that nobody can name stays frozen (V7 of `log::recovery`).

use crate::support::{checkpoint, power_cut, rot_header, written};
use forebay_core::mutant::{Mutant, Mutants};
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
