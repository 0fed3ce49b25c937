// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads of the backing device across what the cache has (H1 and H2 of `op::across`).

use crate::support::{ask, push_out, read, settle, stats, world_by, world_of, world_with};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::stats::Stats;
use forebay_sim::random::Random;
use forebay_sim::setup::Island;
use forebay_sim::world::World;

const WRITE: Op = Op::Write { fua: false };

/// Of a volume of 600 blocks, of which reads bring nothing in, these are written.
fn written(mutants: Mutants, blocks: impl IntoIterator<Item = u64>) -> World {
    let mut world = world_with(600, |setup| {
        setup.config.mutants = mutants;
        setup.config.fill_run_max = 0;
    });
    for block in blocks {
        ask(&mut world, 0, WRITE, block, 1);
    }
    settle(&mut world);
    world
}

#[test]
fn a_read_of_what_is_in_the_cache_here_and_there_is_one_of_the_backing_device() {
    // Holes of one, two and sixteen blocks.
    let cached = [3, 10, 11].into_iter().chain(20..36);
    let mut world = written(Mutants::default(), cached);
    ask(&mut world, 0, Op::Read, 0, 40);
    assert_eq!(world.backing_reads_under_way(), 1);
    settle(&mut world);
    let Stats { across_blocks, miss_blocks, hit_blocks, .. } = stats(&world);
    assert_eq!((across_blocks, miss_blocks, hit_blocks), (19, 21, 19));
}

#[test]
fn a_long_hole_is_not_read_across_nor_the_cache_at_either_end() {
    let mut world = written(Mutants::default(), (0..2).chain(8..25).chain(30..32));
    ask(&mut world, 0, Op::Read, 0, 32);
    assert_eq!(world.backing_reads_under_way(), 2);
    settle(&mut world);
    assert_eq!(stats(&world).across_blocks, 0);
}

/// What the device has under a hole may be unreadable, and nobody had noticed.
#[test]
fn a_fault_under_a_hole_is_nobodys() {
    let mut world = written(Mutants::default(), [3]);
    ask(&mut world, 0, Op::Read, 0, 8);
    // Somebody waits for some of it.
    ask(&mut world, 0, Op::Read, 5, 2);
    assert_eq!(world.backing_reads_under_way(), 1);
    world.volumes[0].device.failed = true;
    while world.backing_reads_under_way() == 1 {
        assert!(world.step().expect("it goes on"));
    }
    assert_eq!(world.backing_reads_under_way(), 2, "what is on both sides of it");
    world.volumes[0].device.failed = false;
    // An error would be one that nothing excuses.
    settle(&mut world);
    let Stats { across_blocks, miss_blocks, backing_faults, .. } = stats(&world);
    assert_eq!((across_blocks, miss_blocks, backing_faults), (1, 9, 0));
}

/// Every other block is in the cache, of all that is read at once, and the backing device fails: what is read again takes a token for each block (H3).
#[test]
fn a_device_that_fails_under_many_holes_leaves_tokens_for_all() {
    let mut world = world_of(400, 8192, |setup| setup.config.fill_run_max = 0);
    for block in (0..8192).step_by(2) {
        ask(&mut world, 0, WRITE, block, 1);
    }
    settle(&mut world);
    let mut asked = 0;
    while asked < 32 && world.ask(0, Op::Read, asked << 20, 1 << 20).expect("a request") {
        asked += 1;
    }
    assert!((20..32).contains(&asked), "{asked} were taken");
    // The first came alone: its four quarters are read one beside the other.
    assert_eq!(world.backing_reads_under_way(), asked as usize + 3);
    world.volumes[0].device.failed = true;
    while !world.asked.is_empty() {
        assert!(world.step().expect("it goes on"));
    }
    assert!(stats(&world).backing_faults > 128 * (asked - 1));
}

/// While a read goes on that crosses a block, the block is written back, and leaves the cache; then somebody wants it.
fn gone_meanwhile(mutants: Mutants, seed: u64) -> Result<(), String> {
    let mut world = world_by(Random::new(seed), |setup| {
        setup.volumes[0].size_bytes = 600 * 4096;
        setup.volumes[0].islands = vec![Island { start: 0, blocks: 600 }];
        setup.config.mutants = mutants;
        setup.config.fill_run_max = 0;
        setup.steady = false;
    });
    ask(&mut world, 0, WRITE, 3, 1);
    settle(&mut world);
    world.volumes[0].device.slow = 100_000;
    ask(&mut world, 0, Op::Read, 0, 8);
    world.volumes[0].device.slow = 1;
    push_out(&mut world, 3);
    assert_eq!(world.asked.len(), 1, "it is still being read");
    read(&mut world, 3)
}

#[test]
fn nobody_waits_for_what_is_read_of_a_hole() {
    let loose = Mutants::with(Mutant::HolesShared);
    for seed in 0..4 {
        assert_eq!(gone_meanwhile(Mutants::default(), seed), Ok(()));
    }
    assert!((0..4).any(|seed| gone_meanwhile(loose, seed).is_err()), "else this shows nothing");
}
