// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that earlier programs wrote must be read for ever, field by field.
//!
//! An image is text: per line an offset and up to 64 bytes, what is zero left out. To add one for a
//! new version or feature: `UPDATE_GOLDEN=1`; none is ever changed.

#![allow(clippy::unwrap_used)]

use forebay_core::effect::Fault;
use forebay_core::format::bytes::{Seed, block_checksum};
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::feature::FeatureName;
use forebay_core::format::record::{self, Header, Link};
use forebay_core::format::superblock::{Head, Mode, NewCache, SUPERBLOCK_SIZE, Superblock, Volume};
use forebay_core::log::recovery::{CacheReader, Writer, recover};
use forebay_core::mutant::Mutants;
use forebay_core::units::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

const LINE: usize = 64;
const UUID: [u8; 16] = *b"golden image v1\0";
const KEY: u64 = 0x0123_4567_89AB_CDEF;

/// A device of which only what is not zero is kept, in lines.
#[derive(Default, PartialEq, Eq)]
struct Image {
    lines: BTreeMap<u64, [u8; LINE]>,
}

impl Image {
    fn put(&mut self, offset: u64, bytes: &[u8]) {
        for (at, line) in bytes.as_chunks::<LINE>().0.iter().enumerate() {
            if line != &[0; LINE] {
                self.lines.insert(offset + (at * LINE) as u64, *line);
            }
        }
    }

    fn get(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for (at, line) in self.lines.range(offset..offset + length as u64) {
            bytes[(at - offset) as usize..][..LINE].copy_from_slice(line);
        }
        bytes
    }

    fn to_text(&self) -> String {
        let hex = |line: &[u8; LINE]| -> String {
            line.iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let line = |(at, line): (&u64, &[u8; LINE])| format!("{at:x} {}\n", hex(line));
        self.lines.iter().map(line).collect()
    }

    fn from_text(text: &str) -> Image {
        let mut image = Image::default();
        for line in text.lines() {
            let (at, hex) = line.split_once(' ').unwrap();
            let byte = |at: usize| u8::from_str_radix(&hex[at * 2..at * 2 + 2], 16).unwrap();
            let line = std::array::from_fn(byte);
            image.lines.insert(u64::from_str_radix(at, 16).unwrap(), line);
        }
        image
    }
}

impl CacheReader for Image {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        bytes.copy_from_slice(&self.get(offset, bytes.len()));
        Ok(())
    }
}

fn superblock() -> Superblock {
    let new = NewCache {
        uuid: UUID,
        key: KEY,
        size_bytes: 64 << 20,
        segment_bytes: 64 << 10,
        now: 1_700_000_000_000,
    };
    let mut superblock = Superblock::format(&new).unwrap();
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
        drained: true,
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
            items.push(record::items(entry.lba, entry.count).0);
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
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() && !path.exists() {
        std::fs::write(&path, made().to_text()).unwrap();
    }
    Image::from_text(&std::fs::read_to_string(&path).unwrap())
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
