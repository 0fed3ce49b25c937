// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A volume that grows, and a process that dies on the way.

use crate::support::{ask, settle, world_with};
use forebay_core::op::grow::Growth;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::model::Stop;
use forebay_sim::world::World;

const VOLUME: VolumeIndex = VolumeIndex(0);
/// The last block, of which the volume has one sector.
const LAST: usize = 64;

/// What a killed process left.
struct Left {
    /// It died within a call of the engine, not between two.
    within: bool,
    /// The growth was ready.
    ready: bool,
    /// The superblock says the new size.
    grown: bool,
}

/// The last block is dirty, and the volume is to grow. The process dies at a store, or, if there are not so many, as soon as that is
/// ready. If it is, the backing device must hold what the log says, and behind the old end, if that is the volume's now, what was found there.
fn killed(writes_before: u64, store: u64) -> Left {
    let mut world = world_with(LAST as u64, |setup| {
        setup.volumes[0].size_bytes += 512;
        setup.volumes[0].islands[0].blocks += 1;
    });
    // Chance comes of what was done.
    for _ in 0..writes_before {
        ask(&mut world, 0, Op::Write { fua: false }, 0, 1);
        settle(&mut world);
    }
    let asked = world.ask(0, Op::Write { fua: true }, LAST as u64 * BLOCK_BYTES, 512);
    assert!(asked.expect("it is taken"));
    settle(&mut world);
    let size_bytes = world.volumes[0].size_bytes;
    world.begin_to_grow(0).expect("it goes on");
    world.engine.as_mut().expect("there is a process").drain(VOLUME, &mut world.memory);
    world.drain_effects().expect("it goes on");
    world.memory.fuse = Some(store);
    while !is_ready(&world) && !world.memory.dead {
        assert!(world.step().expect("it goes on"));
    }
    let (within, ready) = (world.memory.dead, is_ready(&world));
    world.stop(Stop::Process);
    world.open(Some(Stop::Process)).expect("it is opened");
    let volume = &world.volumes[0];
    let prefix = volume.prefix.as_ref().expect("its order is batch");
    let (found, mask) = (volume.device.read(LAST as u64), volume.mask(LAST as u64));
    if ready {
        assert_eq!(prefix.compare(LAST, &found, mask), Ok(()));
    }
    Left { within, ready, grown: volume.size_bytes > size_bytes }
}

fn is_ready(world: &World) -> bool {
    let engine = world.engine.as_ref().expect("there is a process");
    engine.growth(VOLUME) == Some(Growth::Ready)
}

/// Found by seed 12705, in which the simulator had it wrong: the flush of the entry that voids the last block made a growth ready, and the
/// process died at a store of the same call. The simulator wrote the new size all the same. Since nobody had looked at the engine behind that
/// flush, the checker of the backing device took the block's last version, which is older than the growth, for newer than
/// what lay behind the old end, and missed its zeros there.
#[test]
fn what_is_ready_in_the_call_in_which_the_process_dies_is_heard_by_nobody() {
    let (mut unheard, mut heard) = (0, 0);
    for writes_before in 0..12 {
        for store in 0.. {
            let left = killed(writes_before, store);
            if !left.within {
                heard += usize::from(left.ready && left.grown);
                break;
            }
            assert!(!left.grown, "{writes_before} writes, {store} stores");
            unheard += usize::from(left.ready);
        }
    }
    assert!(unheard > 0 && heard > 0, "else this shows nothing");
}
