// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The last header before a checkpoint: what it says the checkpoint says as well, and where one from before does not, it is compared with the
//! one that the checkpoint names.

use crate::support::{ask, checkpoint, place, power_cut, read, rot_header, settle, world_with};
use forebay_core::effect::Fault;
use forebay_core::format::record;
use forebay_core::log::recovery::{CacheReader, Recovered, Writer, recover};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, VolumeIndex};
use forebay_sim::device::Device;
use forebay_sim::fate::{Choices, Fate};
use forebay_sim::model::Stop;
use forebay_sim::world::World;

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
fn written(mutants: Mutants) -> World {
    let mut world = world_with(64, |setup| setup.config.mutants = mutants);
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
    // As a program from before leaves it.
    let mut world = written(Mutants::with(Mutant::LastRecordUncaptured));
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
    for (named, mutants) in [
        (true, Mutants::default()),
        (true, Mutants::with(Mutant::LastRecordUncaptured)),
        (false, Mutants::default()),
    ] {
        let mut world = written(mutants);
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
        // A checkpoint that says it needs no header.
        let needs_none = named && !mutants.is(Mutant::LastRecordUncaptured);
        assert!(if needs_none { known == 8 } else { (1..8).contains(&known) }, "{known}");
    }
}

/// The last header before a checkpoint rots at rest, and the power fails. The checkpoint was not gone by then: by the log alone what that record held
/// was a torn end, or its volume was frozen.
#[test]
fn what_a_checkpoint_has_is_not_lost_with_the_last_header_before_it() {
    for (mutant, opened_before) in [
        (None, false),
        (None, true),
        (Some(Mutant::LastRecordUncaptured), false),
        (Some(Mutant::LastRecordUncaptured), true),
    ] {
        let mut world = written(mutant.map_or(Mutants::default(), Mutants::with));
        world.faults_over = true;
        checkpoint(&mut world);
        if opened_before {
            // The superblock has that record for the end of the log.
            power_cut(&mut world);
        }
        rot_header(&mut world, LAST);
        let before = world.marks.count("opened from a checkpoint");
        world.stop_by(Stop::Power, &mut Fate::Chosen(&mut Choices::default()));
        let opened = world.open(Some(Stop::Power));
        let stood = world.marks.count("opened from a checkpoint") > before;
        let is_whole = opened.is_ok() && (0..=LAST).all(|block| read(&mut world, block).is_ok());
        assert_eq!((stood, is_whole), (mutant.is_none(), mutant.is_none()), "{opened_before}");
        if mutant.is_some() {
            continue;
        }
        // The next record says what that one held: if the checkpoint is bad as well, it is known.
        ask(&mut world, 0, Op::Write { fua: true }, LAST + 1, 1);
        settle(&mut world);
        let mut by_log = world.superblock.clone();
        by_log.checkpoint_sequence = 0;
        let mut reader =
            Changing { device: &world.cache, block: 0, reads_left: 0, then: [0; BLOCK_SIZE] };
        let room = world.setup.config.extent_count_max;
        let none = Mutants::default();
        let found = recover(&by_log, &mut reader, room, Writer::MayHaveLostPower, none);
        let volume = VolumeIndex(0);
        assert!(found.is_lost(volume, Lba(LAST)) && !found.is_frozen(volume), "{:?}", found.damage);
    }
}
