// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cache device goes away, as one whose cable is loose, and is back as it was when the next process opens it; or it is there, and
//! fails what is read for a while. Whatever was taken for lost meanwhile is not.

use crate::model::Stop;
use crate::run::{operation, restart};
use crate::world::{Outcome, World};
use forebay_core::units::VolumeIndex;

/// It is gone from now on, while guests go on and write-back does what it was about to. Then the process ends.
pub(crate) fn goes_away(world: &mut World) -> Outcome {
    let mut random = world.chance(0x60E);
    world.marks.hit("cache device gone");
    world.cache_gone = true;
    for _ in 0..random.between(1, 300) {
        if random.one_in(3) && operation(world)? {
            continue;
        }
        if !world.step()? {
            break;
        }
    }
    let stop = if random.one_in(4) { Stop::Power } else { Stop::Process };
    restart(world, stop)
}

/// Nothing can be read of it for less time than that after which something is given up for lost. Then all can, and guests may expect that it
/// is. (Twice in a row would be no less than once for longer.)
pub(crate) fn cannot_be_read(world: &mut World) -> Outcome {
    let patience = world.setup.config.lost_after;
    if patience == 0 || world.now < world.mute_until.saturating_add(4 * patience) {
        return Ok(());
    }
    // What could not be read before may not have been looked at again yet.
    let engine = world.engine.as_ref().expect("there is a process");
    let doubts = |at: &usize| engine.status(VolumeIndex(*at as u8)).is_some_and(|it| it.in_doubt);
    if (0..world.volumes.len()).any(|at| doubts(&at)) {
        return Ok(());
    }
    world.marks.hit("cache device unreadable for a while");
    let until = world.now + world.chance(0x3074).between(1, patience - 1);
    world.mute_until = until;
    world.mute_in_part = world.chance(0x3075).one_in(2);
    while world.is_mute() {
        if world.random.one_in(3) && operation(world)? {
            continue;
        }
        if !world.step()? {
            break;
        }
    }
    Ok(())
}
