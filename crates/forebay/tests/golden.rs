// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that earlier programs wrote must be read for ever, field by field.
//!
//! To add an image for a new version or feature: `UPDATE_GOLDEN=1`; none is ever changed.

use crate::support::image::{self, Image};
use forebay_core::format::bytes::{Seed, block_checksum};
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::feature::FeatureName;
use forebay_core::format::record::{self, Header, Link};
use forebay_core::format::superblock::{
    CUTOFF_DEFAULT, CUTOFF_MAX, Head, Mode, NewCache, Order, SUPERBLOCK_SIZE, Superblock, Volume,
    WEIGHT_MAX,
};
use forebay_core::log::recovery::{Writer, recover};
use forebay_core::mutant::Mutants;
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::*;

const UUID: [u8; 16] = *b"golden image v1\0";
const KEY: u64 = 0x0123_4567_89AB_CDEF;

fn superblock() -> Superblock {
    let new = NewCache {
        uuid: UUID,
        key: KEY,
        size_bytes: 64 << 20,
        segment_bytes: 64 << 10,
        now: 1_700_000_000_000,
    };
    let mut superblock = Superblock::format(&new).unwrap();
    superblock.says_size_again = false;
    superblock.sequence = 17;
    superblock.open_generation = 3;
    superblock.clean = false;
    superblock.compat = 1 << 40;
    superblock.feature_names = vec![FeatureName::new(2, 40, "a golden name")];
    superblock.segment_sequence = 900;
    superblock.written_at = 1_700_000_001_000;
    superblock.volumes[2] = Some(Volume {
        uuid: [0xAB; 16],
        mode: Mode::WriteThrough,
        order: Order::Batch,
        cutoff: CUTOFF_DEFAULT,
        weight: 1,
        p99_target: 0,
        reserve: Reserve::Share,
        drained: true,
        frozen: false,
        flush_failed: false,
        attach_generation: 5,
        size_bytes: (1 << 30) + 512,
        logical_block: 4096,
        name: "golden-volume".into(),
        fingerprint: [0xCD; 64],
        head: Head::NONE,
        next_sequence: Sequence(100),
        watermark: Sequence(0),
        tail: Ordinal(1),
        flush_epoch: 7,
        backing_as_of: 1_700_000_000_500,
        path: "/dev/disk/by-id/golden".into(),
    });
    superblock
}

fn content(number: u8) -> [u8; BLOCK_SIZE] {
    let mut block = [0; BLOCK_SIZE];
    block[..5].copy_from_slice(b"block");
    block[5] = number;
    block
}

const SEGMENT: SegmentId = SegmentId(4);

fn headers() -> [Header; 2] {
    let first = Header {
        sequence: Sequence(200),
        previous: Link::NONE,
        open_generation: 3,
        volume: 2,
        attach_generation: 5,
        segment_sequence: 901,
        ordinal: Ordinal(1),
        previous_segment: SegmentId(u32::MAX),
        previous_segment_used: 0,
        blocks: 3,
        entry_count: 4,
        item_count: 0,
        durable_through: Sequence(0),
        tail: Ordinal(1),
        watermark: Sequence(0),
        flush_epoch: 8,
        written_at: 1_700_000_002_000,
        backing_as_of: 1_700_000_000_500,
    };
    let second = Header {
        sequence: Sequence(205),
        blocks: 2,
        entry_count: 2,
        item_count: 4,
        durable_through: Sequence(204),
        flush_epoch: 9,
        written_at: 1_700_000_003_000,
        ..first
    };
    [first, second]
}

/// The entries of both records, without checksums, and what their blocks hold.
fn entries() -> [Vec<(Entry, Option<u8>)>; 2] {
    let entry = |kind, lba, count, slot| Entry { kind, lba: Lba(lba), count, crc: 0, slot };
    let first = vec![
        (entry(Kind::Data, 10, 1, 1), Some(1)),
        (entry(Kind::Zero, 1000, 16, 0), None),
        (entry(Kind::Data, 262_144, 1, 2), Some(2)),
        (entry(Kind::Discard, 5000, 100, 0), None),
    ];
    let second =
        vec![(entry(Kind::Data, 10, 1, 1), Some(3)), (entry(Kind::Bypassed, 5001, 1, 0), None)];
    [first, second]
}

fn made() -> Image {
    let (superblock, mut image) = (superblock(), Image::default());
    for address in Superblock::addresses(superblock.size_bytes) {
        image.put(address, &superblock.encode(address));
    }
    let (mut block, mut previous, mut items) = (0, Link::NONE, Vec::new());
    for (mut header, entries) in headers().into_iter().zip(entries()) {
        let mut bytes = [0; BLOCK_SIZE];
        record::put_items(&mut bytes, &items);
        items.clear();
        for (index, (mut entry, number)) in entries.into_iter().enumerate() {
            items.push(record::items(entry.lba, entry.count, entry.kind).0);
            if let Some(number) = number {
                let address = superblock.address(SEGMENT, block + entry.slot);
                let seed = Seed::new(KEY, address, header.segment_sequence);
                entry.crc = seed.apply(block_checksum(&content(number)));
                image.put(address, &content(number));
            }
            record::put_entry(&mut bytes, index as u16, &entry);
        }
        header.previous = previous;
        let address = superblock.address(SEGMENT, block);
        header.encode(&mut bytes, address, UUID);
        let checksum = record::seal(&mut bytes, address, &superblock.identity());
        image.put(address, &bytes);
        previous = Link { sequence: header.sequence, checksum, segment: SEGMENT, block };
        block += header.blocks;
    }
    image
}

fn golden(name: &str) -> Image {
    if image::is_updating(name) {
        std::fs::write(image::path(name), made().to_text()).unwrap();
    }
    Image::from_text(&std::fs::read_to_string(image::path(name)).unwrap())
}

#[test]
fn version_1_is_read_field_by_field() {
    let mut image = golden("v1.cache.hex");
    let expected = superblock();
    for address in Superblock::addresses(64 << 20) {
        let mut bytes = image.get(address, SUPERBLOCK_SIZE);
        assert_eq!(Superblock::decode(&mut bytes, address).as_ref(), Ok(&expected));
    }
    let (mut block, mut previous) = (0, Link::NONE);
    for (mut header, entries) in headers().into_iter().zip(entries()) {
        header.previous = previous;
        let address = expected.address(SEGMENT, block);
        let mut bytes: [u8; BLOCK_SIZE] = image.get(address, BLOCK_SIZE).try_into().unwrap();
        assert_eq!(record::decode(&mut bytes, address, &expected.identity()), Ok(header));
        for (index, (mut entry, number)) in entries.into_iter().enumerate() {
            if let Some(number) = number {
                let address = expected.address(SEGMENT, block + entry.slot);
                let found = image.get(address, BLOCK_SIZE);
                assert_eq!(found, content(number));
                let seed = Seed::new(KEY, address, header.segment_sequence);
                entry.crc = seed.apply(block_checksum(&found));
            }
            assert_eq!(record::entry(&bytes, index as u16), Ok(entry));
        }
        let checksum = record::checksum(&bytes);
        previous = Link { sequence: header.sequence, checksum, segment: SEGMENT, block };
        block += header.blocks;
    }
    let found = recover(&expected, &mut image, 64, Writer::MayHaveLostPower, Mutants::default());
    assert_eq!(found.damage, []);
    let volume = VolumeIndex(2);
    assert_eq!(found.records(volume), [(SEGMENT, 0), (SEGMENT, 3)]);
    assert!(found.is_newest(volume, Lba(10), SEGMENT, 4));
    assert!(found.is_newest(volume, Lba(262_144), SEGMENT, 2));
    assert_eq!(found.dirty_blocks(volume), 3);
}

#[test]
fn version_1_is_written_as_it_was() {
    assert!(made() == golden("v1.cache.hex"), "the bytes that are written have changed");
}

/// Volumes of every order, with cutoffs that are chosen, the same, none and the largest.
fn ordered() -> Superblock {
    let mut superblock = superblock();
    superblock.volumes[2] = None;
    let settings = [
        (Order::Batch, 0),
        (Order::Strict, 16),
        (Order::Relaxed, CUTOFF_DEFAULT),
        (Order::Relaxed, CUTOFF_MAX),
    ];
    for (index, (order, cutoff)) in settings.into_iter().enumerate() {
        let volume = Volume::empty([index as u8 + 1; 16], &format!("volume{index}"), 1 << 30);
        superblock.volumes[index] = Some(Volume { order, cutoff, ..volume });
    }
    superblock
}

/// Volumes of the least and of the largest weight, and targets.
fn weighted() -> Superblock {
    let mut superblock = superblock();
    superblock.volumes[2] = None;
    let settings = [(1, 0), (3, 50_000), (WEIGHT_MAX, u32::MAX)];
    for (index, (weight, p99_target)) in settings.into_iter().enumerate() {
        let volume = Volume::empty([index as u8 + 1; 16], &format!("volume{index}"), 1 << 30);
        superblock.volumes[index] = Some(Volume { weight, p99_target, ..volume });
    }
    superblock
}

/// Volumes with each kind of reservation, and the largest of it.
fn reserved() -> Superblock {
    let mut superblock = superblock();
    superblock.volumes[2] = None;
    let settings = [
        Reserve::Share,
        Reserve::Percent(0),
        Reserve::Percent(100),
        Reserve::Blocks(0),
        Reserve::Blocks(u64::MAX),
    ];
    for (index, reserve) in settings.into_iter().enumerate() {
        let volume = Volume::empty([index as u8 + 1; 16], &format!("volume{index}"), 1 << 30);
        superblock.volumes[index] = Some(Volume { reserve, ..volume });
    }
    superblock
}

#[test]
fn orders_and_cutoffs_are_read_and_written_as_they_were() {
    superblock_is_as_it_was("v1.order.hex", &ordered());
}

#[test]
fn weights_and_targets_are_read_and_written_as_they_were() {
    superblock_is_as_it_was("v1.weight.hex", &weighted());
}

#[test]
fn reservations_are_read_and_written_as_they_were() {
    superblock_is_as_it_was("v1.reserve.hex", &reserved());
}

#[test]
fn the_size_that_is_there_again_is_read_and_written_as_it_was() {
    superblock_is_as_it_was("v1.size.hex", &Superblock { says_size_again: true, ..superblock() });
}

fn superblock_is_as_it_was(name: &str, expected: &Superblock) {
    let mut made = Image::default();
    for address in Superblock::addresses(expected.size_bytes) {
        made.put(address, &expected.encode(address));
    }
    if image::is_updating(name) {
        std::fs::write(image::path(name), made.to_text()).unwrap();
    }
    let image = Image::from_text(&std::fs::read_to_string(image::path(name)).unwrap());
    assert!(made == image, "the bytes that are written have changed");
    for address in Superblock::addresses(expected.size_bytes) {
        let mut bytes = image.get(address, SUPERBLOCK_SIZE);
        assert_eq!(Superblock::decode(&mut bytes, address).as_ref(), Ok(expected));
    }
}

/// The numbers themselves, so that a change of both sides together is noticed.
#[test]
fn checksums_are_those_of_the_manual() {
    assert_eq!(block_checksum(b"123456789"), {
        // CRC-64/NVME's check value is 0xAE8B14860A799888.
        0xAE8B_1486_u32 ^ 0x0A79_9888
    });
    assert_eq!(forebay_core::format::bytes::crc32c(b"123456789"), 0xE306_9283);
    assert_eq!(Seed::new(0, 0, 0), Seed(0));
    let mut x = KEY ^ 3_u64.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 32).wrapping_add(5_u64.wrapping_mul(0xD6E8_FEB8_6659_FD93));
    x = (x ^ x >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    assert_eq!(Seed::new(KEY, 3 * 4096, 5), Seed((x ^ x >> 32) as u32));
}
