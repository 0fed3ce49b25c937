// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cache device goes away, as one whose cable is loose, and is back as it was when the next process opens it: whatever was
//! taken for lost meanwhile is not.

use crate::model::Stop;
use crate::run::{operation, restart};
use crate::world::{Outcome, World};

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
