// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The last header before a checkpoint is compared with the one that the checkpoint names.

mod support;

use forebay_core::effect::Fault;
use forebay_core::format::record;
use forebay_core::log::recovery::{CacheReader, Recovered, Writer, recover};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, VolumeIndex};
use forebay_sim::device::Device;
use forebay_sim::world::World;
use support::{ask, checkpoint, place, settle, world_with};

const LAST: u64 = 6;

/// A device on which a block is another one when it has been read so often.
struct Changing<'a> {
    device: &'a Device,
    block: u64,
    reads_left: u64,
    then: [u8; BLOCK_SIZE],
}

impl CacheReader for Changing<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        for (at, block) in (offset / BLOCK_BYTES..).zip(bytes.as_chunks_mut::<BLOCK_SIZE>().0) {
            let changes = at == self.block && self.reads_left == 0;
            self.reads_left -= u64::from(at == self.block && !changes);
            match changes {
                true => *block = self.then,
                false => *block = *self.device.read(at).bytes(),
            }
        }
        Ok(())
    }
}

/// A log of a small record for each block. The last one nothing calls durable yet.
fn written() -> World {
    let mut world = world_with(64, |_| ());
    for block in 0..=LAST {
        for (op, blocks) in [(Op::Write { fua: false }, 1), (Op::Flush, 0)] {
            ask(&mut world, 0, op, if blocks > 0 { block } else { 0 }, blocks);
            settle(&mut world);
        }
    }
    world
}

/// What is recovered if the header before a block is another one after so many reads.
fn recovered(
    world: &World,
    block: u64,
    reads_left: u64,
    then: [u8; BLOCK_SIZE],
    mutants: Mutants,
) -> Recovered {
    let block = place(world, block) - 1;
    let mut reader = Changing { device: &world.cache, block, reads_left, then };
    let room = world.setup.config.extent_count_max;
    recover(&world.superblock, &mut reader, room, Writer::MayHaveLostPower, mutants)
}

/// In the place of the last header before a checkpoint there is another one, which is whole: what the next record would say of it is not what
/// the log held.
#[test]
fn a_checkpoint_stands_if_the_last_header_before_it_is_the_one_it_names() {
    let mut world = written();
    checkpoint(&mut world);
    let at = place(&world, LAST) - 1;
    let mut then = *world.cache.read(at).bytes();
    let mut entry = record::entry(&then, 0).expect("it has one");
    entry.lba = Lba(LAST + 1);
    record::put_entry(&mut then, 0, &entry);
    record::seal(&mut then, at * BLOCK_BYTES, &world.superblock.identity());
    let stands =
        |reads_left, mutants| recovered(&world, LAST, reads_left, then, mutants).from_checkpoint;
    assert!(stands(u64::MAX, Mutants::default()));
    assert!(!stands(0, Mutants::default()));
    assert!(stands(0, Mutants::with(Mutant::SkipLastHeader)), "else this shows nothing");
}

/// The last header is read again and again while a log is recovered, and each time may be the first that fails. Either that is told, or
/// the next record can say what this one holds: else, if it rots, nobody knows of its block.
#[test]
fn what_the_last_record_holds_is_known_whichever_read_of_it_fails() {
    for named in [true, false] {
        let mut world = written();
        if named {
            checkpoint(&mut world);
        }
        let volume = VolumeIndex(0);
        let recovered = |reads| recovered(&world, LAST, reads, [0; BLOCK_SIZE], Mutants::default());
        let whole = recovered(u64::MAX);
        let (items, mut known) = (whole.last_items(volume).to_vec(), 0);
        assert!(!items.is_empty());
        for reads in 0..8 {
            let found = recovered(reads);
            let is_there = found.newest(volume, Lba(LAST)).is_some() && found.damage.is_empty();
            assert!(!is_there || found.last_items(volume) == items, "{reads} reads, {named}");
            known += u64::from(is_there);
        }
        assert!((1..8).contains(&known), "{known}");
    }
}
