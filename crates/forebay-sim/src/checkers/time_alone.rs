// SPDX-License-Identifier: Apache-2.0 OR MIT
//! While a request waits and no device is asked for anything, it waits for time alone: for a guest's pause, a writer's delay, or a
//! device that failed to be tried again. That is short; a longer wait is for something that has happened already.

use crate::run::stuck;
use crate::world::World;
use forebay_core::limits::SEGMENTS_RESERVED;
use forebay_core::units::VolumeIndex;

/// What a slice is kept for without anything to do (`policy/slices.rs`).
const PAUSE: u64 = 2_000_000;

/// Nothing happens before `at`.
pub fn check(world: &World, at: u64) -> Result<(), String> {
    let idle = at.saturating_sub(world.now);
    let config = &world.setup.config;
    let most = PAUSE.max(config.retry_after).max(config.lost_after);
    let gone = world.cache_failed || world.cache_gone || world.now < world.mute_until;
    if idle <= most || !world.flights.is_empty() || world.is_ending || gone {
        return Ok(());
    }
    let waits = world.asked.values().any(|asked| {
        let of = asked.request.volume;
        let volume = &world.volumes[usize::from(of.0)];
        // The superblock is written as the simulator pleases.
        !volume.device.failed && volume.growing.is_none() && !waits_for_parked(world, of)
    });
    if waits {
        return Err(format!("no device does anything for {idle} ns: {}", stuck(world).0));
    }
    Ok(())
}

/// Blocks that a device refuses are tried again later and later (`policy/parked.rs`). What waits for the room of a log that is full of them, its own
/// or another's that had more than its part when crash came upon crash, waits for that.
fn waits_for_parked(world: &World, volume: VolumeIndex) -> bool {
    let Some(engine) = world.engine.as_ref() else { return false };
    let status = |index| engine.status(VolumeIndex(index as u8));
    let parks = |index| status(index).is_some_and(|it| it.parked_blocks > 0 || it.parked_full);
    let kept = SEGMENTS_RESERVED as usize * world.volumes.len();
    parks(usize::from(volume.0))
        || engine.free_segments().0 as usize <= kept && (0..world.volumes.len()).any(parks)
}
