// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Recovery: a cache full of headers with right checksums and any contents is read to the end.

use crate::device::Discard;
use crate::random::Random;
use crate::setup::{VolumeSetup, format};
use forebay_core::effect::Fault;
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::record::{self, Header, Link};
use forebay_core::format::superblock::{Head, Mode, Order, Superblock};
use forebay_core::log::recovery::{CacheReader, Writer, recover, reopen};
use forebay_core::mutant::Mutants;
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::{
    BLOCK_BYTES, BLOCK_SIZE, Lba, Ordinal, SegmentId, Sequence, VolumeIndex,
};
use std::collections::HashMap;

const SEGMENTS: u32 = 16;
const SEGMENT_BLOCKS: u64 = 16;

/// A device of which only some blocks were written.
#[derive(Default)]
pub(super) struct Sparse(pub(super) HashMap<u64, [u8; BLOCK_SIZE]>);

impl CacheReader for Sparse {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        for (at, block) in bytes.as_chunks_mut::<BLOCK_SIZE>().0.iter_mut().enumerate() {
            let address = offset + at as u64 * BLOCK_BYTES;
            *block = self.0.get(&address).copied().unwrap_or([0; BLOCK_SIZE]);
        }
        Ok(())
    }
}

/// A log of any headers: it is read without a panic, twice with the same result, and the
/// superblock of the next opening is one.
pub fn fuzz_recovery(input: &[u8]) {
    let seed = input.iter().fold(0_u64, |seed, byte| {
        seed.wrapping_mul(0x100_0000_01B3).wrapping_add(u64::from(*byte) + 1)
    });
    let mut random = Random::new(seed);
    let mut superblock = superblock_of_two();
    let mut blocks = Sparse::default();
    let mut links = Vec::new();
    for _ in 0..random.between(1, 40) {
        let link = put_record(&mut random, &superblock, &mut blocks, &links);
        links.push(link);
    }
    for volume in superblock.volumes.iter_mut().flatten() {
        if random.one_in(2) {
            let (link, ordinal) = *random.pick(&links);
            let used = random.between(u64::from(link.block) + 1, SEGMENT_BLOCKS) as u16;
            volume.head = Head { link, through: link.sequence, used, ordinal };
        }
        volume.tail = Ordinal(random.below(6));
        volume.watermark = Sequence(random.below(500));
    }
    let config_room = 64;
    let writer = *random.pick(&[Writer::MayHaveLostPower, Writer::DiedAlone]);
    let first = recover(&superblock, &mut blocks, config_room, writer, Mutants::default());
    let again = recover(&superblock, &mut blocks, config_room, writer, Mutants::default());
    assert_eq!(first.damage, again.damage); // V4
    for volume in [VolumeIndex(0), VolumeIndex(1)] {
        for lba in 0..64 {
            assert_eq!(first.find(volume, Lba(lba)), again.find(volume, Lba(lba))); // V4
        }
        let _ = first.records(volume);
    }
    let next = reopen(&superblock, &first, Mutants::default());
    assert_eq!(Superblock::decode(&mut next.encode(0), 0), Ok(next));
}

/// A small cache of two volumes.
pub(super) fn superblock_of_two() -> Superblock {
    let volume = || VolumeSetup {
        order: Order::Batch,
        cutoff: 0,
        weight: 1,
        p99_target: 0,
        reserve: Reserve::Share,
        slow: 1,
        size_bytes: 1 << 30,
        islands: Vec::new(),
        mode: Mode::WriteBack,
        discard: Discard::Zeros,
    };
    let mut superblock = format(SEGMENTS, 64 << 10, &[volume(), volume()], 5);
    superblock.open_generation = 3;
    superblock
}

/// A valid header somewhere; mostly one that fits to another.
pub(super) fn put_record(
    random: &mut Random,
    superblock: &Superblock,
    blocks: &mut Sparse,
    links: &[(Link, Ordinal)],
) -> (Link, Ordinal) {
    let none = (Link::NONE, Ordinal(0));
    let before = if links.is_empty() || random.one_in(4) { none } else { *random.pick(links) };
    let (mut segment, mut block) = (SegmentId(random.below(SEGMENTS.into()) as u32), 0);
    if random.one_in(3) {
        block = random.below(SEGMENT_BLOCKS - 1) as u16;
    }
    let mut ordinal = Ordinal(before.1.0 + 1);
    if before.0 != Link::NONE && random.one_in(2) && before.0.block < 14 {
        (segment, block, ordinal) = (before.0.segment, before.0.block + 1, before.1);
    }
    let mut bytes = [0; BLOCK_SIZE];
    let (mut slots, count) = (0, random.below(6) as u16);
    for index in 0..count {
        let kind = Kind::ALL[random.below(9) as usize].0;
        let lba = Lba(random.below(64));
        let has_slot = kind.has_slot();
        slots += u16::from(has_slot);
        let slot = if has_slot { slots } else { 0 };
        let bits = random.below(20);
        let length = if has_slot { 1 } else { 1 + random.below(1 << bits) as u32 };
        record::put_entry(&mut bytes, index, &Entry { kind, lba, count: length, crc: 0, slot });
    }
    let items: Vec<u64> = (0..random.below(5))
        .map(|_| {
            let kind = if random.one_in(4) { Kind::Fill } else { Kind::Data };
            record::items(Lba(random.below(64)), random.between(1, 300) as u32, kind).0
        })
        .collect();
    record::put_items(&mut bytes, &items);
    let sequence = Sequence(before.0.sequence.0 + random.between(1, 9));
    let durable_through = Sequence(random.below(sequence.0));
    let header = Header {
        sequence,
        previous: before.0,
        open_generation: *random.pick(&[3, 3, 3, 2]),
        volume: random.below(2) as u16,
        attach_generation: *random.pick(&[1, 1, 1, 0]),
        segment_sequence: random.below(20),
        ordinal,
        previous_segment: *random.pick(&[before.0.segment, SegmentId(3), SegmentId(u32::MAX)]),
        previous_segment_used: *random.pick(&[before.0.block + 1, 16, 1024, 0]),
        blocks: slots + 1,
        entry_count: count,
        item_count: items.len() as u16,
        durable_through,
        tail: Ordinal(random.below(ordinal.0 + 1)),
        watermark: Sequence(random.below(durable_through.0 + 1)),
        flush_epoch: 0,
        written_at: 0,
        backing_as_of: 0,
    };
    let address = superblock.address(segment, block);
    header.encode(&mut bytes, address, superblock.uuid);
    let checksum = record::seal(&mut bytes, address, &superblock.identity());
    blocks.0.insert(address, bytes);
    (Link { sequence, checksum, segment, block }, ordinal)
}
