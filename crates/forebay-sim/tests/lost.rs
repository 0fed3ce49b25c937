// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was lost reads as an error, and never as what the backing device has in its place.

mod support;

use forebay_core::mutant::Mutants;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_sim::world::World;
use support::{ask, place, settle, written};

const VOLUME: VolumeIndex = VolumeIndex(0);
const BLOCK: u64 = 7;

/// Events in which all is written back, and more.
const MOMENTS: u64 = 120;

/// Dirty blocks, of which one is bad on the cache device; they are being written back, for so many events so far.
fn written_back_for(moments: u64) -> World {
    let mut world = written(Mutants::default(), 20);
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
