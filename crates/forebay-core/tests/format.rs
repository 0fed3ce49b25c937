// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The format: what is written is read back, and nothing that is not right is taken for right.

use forebay_core::format::bytes::{FormatError, crc32c};
use forebay_core::format::checkpoint::{self, Head as CheckpointHead, Layout};
use forebay_core::format::entry::{ENTRY_SIZE, Entry, Kind};
use forebay_core::format::feature::FeatureName;
use forebay_core::format::record::{self, Header, ITEM_LOST, Identity, Link};
use forebay_core::format::superblock::{
    CUTOFF_DEFAULT, CUTOFF_MAX, Head, Mode, NewCache, Order, SUPERBLOCK_SIZE, Superblock, Volume,
    WEIGHT_MAX,
};
use forebay_core::limits::*;
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::*;

type Block = [u8; BLOCK_SIZE];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ x >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

const IDENTITY: Identity = Identity { uuid: [9; 16], key: 0x1234_5678_9ABC_DEF0 };

fn superblock(random: &mut Random) -> Superblock {
    let new = NewCache {
        uuid: IDENTITY.uuid,
        key: random.next(),
        size_bytes: CACHE_BYTES_MIN + random.below(1 << 40),
        segment_bytes: SEGMENT_BYTES_MIN << random.below(7),
        now: random.next(),
    };
    let mut superblock = Superblock::format(&new).unwrap();
    superblock.sequence = random.below(SEQUENCE_MAX);
    superblock.open_generation = random.below(u64::from(GENERATION_MAX)) as u32;
    superblock.clean = random.below(2) == 0;
    superblock.compat = random.next();
    superblock.autoclear = random.next();
    superblock.segment_sequence = random.below(SEQUENCE_MAX);
    superblock.says_size_again = random.below(4) > 0;
    superblock.written_at = random.next();
    for _ in 0..random.below(4) {
        let (mask, bit) = (1 + random.below(3) as u8, random.below(64) as u8);
        superblock.feature_names.push(FeatureName::new(mask, bit, "überfähig"));
    }
    for index in 0..VOLUME_COUNT_MAX {
        if random.below(3) == 0 {
            superblock.volumes[index] = Some(volume(random, &superblock));
        }
    }
    superblock
}

fn volume(random: &mut Random, superblock: &Superblock) -> Volume {
    let mut fingerprint = [0; 64];
    fingerprint.iter_mut().for_each(|byte| *byte = random.next() as u8);
    let mut head = Head::NONE;
    if random.below(2) == 0 {
        let used = 1 + random.below(u64::from(superblock.segment_blocks())) as u16;
        let sequence = 1 + random.below(SEQUENCE_MAX / 2);
        head = Head {
            link: Link {
                sequence: Sequence(sequence),
                checksum: random.next() as u32,
                segment: SegmentId(random.below(u64::from(superblock.segment_count)) as u32),
                block: random.below(u64::from(used)) as u16,
            },
            through: Sequence(sequence + random.below(128)),
            used,
            ordinal: Ordinal(1 + random.below(ORDINAL_MAX - 1)),
        };
    }
    Volume {
        uuid: [1 + random.below(255) as u8; 16],
        mode: [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround][random.below(3) as usize],
        order: [Order::Batch, Order::Strict, Order::Relaxed][random.below(3) as usize],
        cutoff: [0, CUTOFF_DEFAULT, random.next() as u32 & CUTOFF_MAX, CUTOFF_MAX]
            [random.below(4) as usize],
        weight: 1 + random.below(u64::from(WEIGHT_MAX)) as u8,
        p99_target: [0, random.next() as u32][random.below(2) as usize],
        reserve: [
            Reserve::Share,
            Reserve::Percent(random.below(101) as u8),
            Reserve::Blocks(random.next()),
        ][random.below(3) as usize],
        drained: random.below(2) == 0,
        frozen: random.below(2) == 0,
        flush_failed: random.below(2) == 0,
        attach_generation: random.next() as u32,
        size_bytes: 512 * (1 + random.below(1 << 41)),
        logical_block: [512, 4096][random.below(2) as usize],
        name: "n".repeat(1 + random.below(64) as usize),
        fingerprint,
        head,
        next_sequence: Sequence(random.below(SEQUENCE_MAX)),
        watermark: Sequence(random.below(SEQUENCE_MAX)),
        tail: Ordinal(random.below(ORDINAL_MAX)),
        flush_epoch: random.below(SEQUENCE_MAX),
        backing_as_of: random.next(),
        path: "ä".repeat(random.below(256) as usize),
    }
}

fn entry(random: &mut Random, slots: &mut u16) -> Entry {
    let kind = Kind::ALL[random.below(9) as usize].0;
    let (count, crc, slot) = if kind.has_slot() {
        *slots += 1;
        (1, random.next() as u32, *slots)
    } else {
        (1 + (random.next() >> random.below(31)).min(u64::from(u32::MAX - 1)) as u32, 0, 0)
    };
    let lba = Lba(random.below(VOLUME_BLOCKS_MAX - u64::from(count) + 1));
    Entry { kind, lba, count, crc, slot }
}

/// A record, its address, and the items it was made with.
fn record(random: &mut Random) -> (Block, u64, Header, Vec<Entry>, Vec<u64>) {
    let mut bytes = [0; BLOCK_SIZE];
    let (mut slots, mut entries, mut needed) = (0, Vec::new(), 0);
    for index in 0..random.below(RECORD_ENTRIES_MAX as u64 + 1) as u16 {
        let entry = entry(random, &mut slots);
        needed += 1 + usize::from(record::items(entry.lba, entry.count, entry.kind).1.is_some());
        if needed > RECORD_ITEMS_MAX {
            slots -= u16::from(entry.kind.has_slot());
            break;
        }
        record::put_entry(&mut bytes, index, &entry);
        entries.push(entry);
    }
    let mut items = Vec::new();
    for _ in 0..random.below(80) {
        let count = 1 + (random.next() >> random.below(32)) as u32 / 2;
        let lba = Lba(random.below(VOLUME_BLOCKS_MAX - u64::from(count)));
        let kind = if random.below(4) == 0 { Kind::Fill } else { Kind::Data };
        let (first, second) = record::items(lba, count, kind);
        items.push(first);
        items.extend(second);
    }
    record::put_items(&mut bytes, &items);
    let sequence = 2 + random.below(SEQUENCE_MAX - 2);
    let durable_through = random.below(sequence);
    let ordinal = 1 + random.below(ORDINAL_MAX - 1);
    let header = Header {
        sequence: Sequence(sequence),
        previous: Link {
            sequence: Sequence(random.below(sequence)),
            checksum: random.next() as u32,
            segment: SegmentId(random.next() as u32),
            block: random.below(u64::from(SEGMENT_BLOCKS_MAX)) as u16,
        },
        open_generation: random.below(u64::from(GENERATION_MAX)) as u32,
        volume: random.below(VOLUME_COUNT_MAX as u64) as u16,
        attach_generation: random.next() as u32,
        segment_sequence: random.below(SEQUENCE_MAX),
        ordinal: Ordinal(ordinal),
        previous_segment: SegmentId(random.next() as u32),
        previous_segment_used: random.below(u64::from(SEGMENT_BLOCKS_MAX) + 1) as u16,
        blocks: slots + 1,
        entry_count: entries.len() as u16,
        item_count: items.len() as u16,
        durable_through: Sequence(durable_through),
        tail: Ordinal(random.below(ordinal + 1)),
        watermark: Sequence(random.below(durable_through + 1)),
        flush_epoch: random.below(SEQUENCE_MAX),
        written_at: random.next(),
        backing_as_of: random.next(),
    };
    let address = BLOCK_BYTES * random.below(1 << 40);
    header.encode(&mut bytes, address, IDENTITY.uuid);
    record::seal(&mut bytes, address, &IDENTITY);
    (bytes, address, header, entries, items)
}

fn reseal(bytes: &mut [u8]) {
    bytes[24..28].fill(0);
    let checksum = crc32c(&bytes[..SUPERBLOCK_SIZE]);
    bytes[24..28].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn superblocks_are_read_as_they_were_written() {
    for seed in 0..200 {
        let superblock = superblock(&mut Random(seed));
        for address in Superblock::addresses(superblock.size_bytes) {
            let mut bytes = superblock.encode(address);
            assert_eq!(Superblock::decode(&mut bytes, address).as_ref(), Ok(&superblock));
            assert_eq!(bytes, superblock.encode(address), "decoding changes nothing");
        }
    }
}

#[test]
fn records_are_read_as_they_were_written() {
    for seed in 0..2000 {
        let (mut bytes, address, header, entries, items) = record(&mut Random(seed));
        assert_eq!(record::decode(&mut bytes, address, &IDENTITY), Ok(header), "seed {seed}");
        for (index, entry) in entries.iter().enumerate() {
            assert_eq!(record::entry(&bytes, index as u16), Ok(*entry));
        }
        let (mut at, mut again) = (0, Vec::new());
        while at < header.item_count {
            let (item, taken) = record::item(&bytes, at, header.item_count).unwrap();
            let kind = if item.backed { Kind::Fill } else { Kind::Data };
            let (first, second) = record::items(item.lba, item.count as u32, kind);
            again.push(first);
            again.extend(second);
            at += taken;
        }
        assert_eq!(again, items);
    }
}

#[test]
fn every_changed_byte_of_a_superblock_is_noticed() {
    let superblock = superblock(&mut Random(1));
    let mut bytes = superblock.encode(0);
    for at in 0..bytes.len() {
        for change in [0xFF, 1 << (at % 8)] {
            bytes[at] ^= change;
            assert!(Superblock::decode(&mut bytes, 0).is_err(), "byte {at}, {change:#x}");
            bytes[at] ^= change;
        }
    }
}

#[test]
fn every_changed_byte_of_a_record_header_is_noticed() {
    for seed in 0..8 {
        let (mut bytes, address, ..) = record(&mut Random(seed));
        for at in 0..bytes.len() {
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                let found = record::decode(&mut bytes, address, &IDENTITY);
                assert!(found.is_err(), "byte {at}, bit {bit}");
                bytes[at] ^= 1 << bit;
            }
        }
    }
}

#[test]
fn every_cut_length_of_a_superblock_is_refused() {
    let bytes = superblock(&mut Random(2)).encode(0);
    for length in 0..SUPERBLOCK_SIZE {
        let found = Superblock::decode(&mut bytes[..length].to_vec(), 0);
        assert_eq!(found, Err(FormatError::Short { expected: SUPERBLOCK_SIZE, found: length }));
    }
    // A cut on the medium reads as zeros, or as what was there before.
    for length in (0..SUPERBLOCK_SIZE).step_by(512) {
        for rest in [0, 0xA5] {
            let mut cut = bytes.clone();
            cut[length..].fill(rest);
            assert!(cut == bytes || Superblock::decode(&mut cut, 0).is_err(), "{length}");
        }
    }
}

#[test]
fn every_torn_sector_of_a_record_header_is_noticed() {
    let (bytes, address, ..) = record(&mut Random(3));
    let (older, ..) = record(&mut Random(4));
    for subset in 1..255u32 {
        let mut torn = bytes;
        for sector in (0..8).filter(|sector| subset >> sector & 1 == 1) {
            torn[sector * 512..][..512].copy_from_slice(&older[sector * 512..][..512]);
        }
        let whole = torn == bytes;
        assert!(whole || record::decode(&mut torn, address, &IDENTITY).is_err(), "{subset:b}");
    }
}

#[test]
fn every_cut_length_of_a_record_header_is_noticed() {
    // It is read as a whole block: a cut shows as zeros, or as what was there before.
    let (bytes, address, ..) = record(&mut Random(7));
    let (older, ..) = record(&mut Random(8));
    for rest in [[0; BLOCK_SIZE], [0xA5; BLOCK_SIZE], older] {
        for length in 0..BLOCK_SIZE {
            let mut cut = bytes;
            cut[length..].copy_from_slice(&rest[length..]);
            assert!(
                cut == bytes || record::decode(&mut cut, address, &IDENTITY).is_err(),
                "{length}"
            );
        }
    }
}

/// A checkpoint's head page, complete, and the superblock it fits.
fn checkpoint_page() -> (Superblock, [u8; BLOCK_SIZE]) {
    let mut superblock = superblock(&mut Random(9));
    let layout = Layout::of(superblock.segment_count, superblock.segment_blocks());
    superblock.checkpoint_bytes = (u64::from(layout.stream_page()) + 9) * BLOCK_BYTES;
    let head = CheckpointHead {
        layout,
        stream_pages: 7,
        stream_bytes: 6 * 4000 + 5,
        segment_sequence: 1 << 40,
    };
    let mut bytes = [0; BLOCK_SIZE];
    head.encode(&mut bytes);
    checkpoint::seal(&mut bytes, &IDENTITY, 1 << 21, 99, 0);
    assert_eq!(CheckpointHead::decode(&bytes, &superblock), Ok(head));
    (superblock, bytes)
}

#[test]
fn every_changed_byte_of_a_checkpoint_page_is_noticed() {
    let (_, mut bytes) = checkpoint_page();
    let open = |bytes: &mut _| checkpoint::open(bytes, &IDENTITY, 1 << 21, 99, 0);
    assert_eq!(open(&mut bytes), Ok(()));
    for at in 0..bytes.len() {
        for bit in 0..8 {
            bytes[at] ^= 1 << bit;
            assert!(open(&mut bytes).is_err(), "byte {at}, bit {bit}");
            bytes[at] ^= 1 << bit;
        }
    }
    assert_eq!(open(&mut bytes), Ok(()), "and it is as it was");
    // Neither is it another's, of another place, of another checkpoint, or another page of the same.
    let key = Identity { key: 1, ..IDENTITY };
    assert!(checkpoint::open(&mut bytes, &key, 1 << 21, 99, 0).is_err());
    for (address, sequence, page) in [(1 << 22, 99, 0), (1 << 21, 98, 0), (1 << 21, 99, 1)] {
        assert!(checkpoint::open(&mut bytes, &IDENTITY, address, sequence, page).is_err());
    }
}

#[test]
fn every_cut_length_of_a_checkpoint_page_is_noticed() {
    let (_, bytes) = checkpoint_page();
    for rest in [0, 0xA5] {
        for length in 0..BLOCK_SIZE {
            let mut cut = bytes;
            cut[length..].fill(rest);
            let opened = checkpoint::open(&mut cut, &IDENTITY, 1 << 21, 99, 0);
            assert!(cut == bytes || opened.is_err(), "{length}, {rest}");
        }
    }
}

#[test]
fn a_checkpoint_head_that_does_not_fit_its_cache_is_refused() {
    // Its checksum is right: whoever wrote it was wrong, or it is of a cache of another size.
    let (superblock, bytes) = checkpoint_page();
    let numbers = [32, 36, 40, 44].map(|at| (at, 4)).into_iter().chain([(48, 8), (64, 4)]);
    for (at, length) in numbers {
        let mut other = bytes;
        other[at..at + length].fill(0xFF);
        let found = CheckpointHead::decode(&other, &superblock);
        assert!(matches!(found, Err(FormatError::Value { .. })), "field at {at}: {found:?}");
    }
    for at in 68..BLOCK_SIZE {
        let mut other = bytes;
        other[at] ^= 1;
        assert!(CheckpointHead::decode(&other, &superblock).is_err(), "byte {at} is not zero");
    }
}

#[test]
fn what_was_written_for_another_place_or_cache_is_refused() {
    let superblock = superblock(&mut Random(5));
    let other = Superblock::addresses(superblock.size_bytes)[1];
    let found = Superblock::decode(&mut superblock.encode(other), 0);
    assert_eq!(found, Err(FormatError::Address { expected: 0, found: other }));

    let (mut bytes, address, ..) = record(&mut Random(6));
    // The seed differs with the place and the key, so the checksum says it before the field does.
    let at_other = record::decode(&mut bytes, address + BLOCK_BYTES, &IDENTITY);
    assert!(matches!(at_other, Err(FormatError::Checksum { .. })));
    let key = Identity { key: 1, ..IDENTITY };
    let found = record::decode(&mut bytes, address, &key);
    assert!(matches!(found, Err(FormatError::Checksum { .. })));
    let uuid = Identity { uuid: [8; 16], ..IDENTITY };
    assert_eq!(record::decode(&mut bytes, address, &uuid), Err(FormatError::Uuid));
    record::seal(&mut bytes, address + BLOCK_BYTES, &IDENTITY);
    let found = record::decode(&mut bytes, address + BLOCK_BYTES, &IDENTITY);
    assert_eq!(
        found,
        Err(FormatError::Address { expected: address + BLOCK_BYTES, found: address })
    );
}

/// A field's new value and what must be said of it.
type Wrong = (usize, &'static [u8], &'static str);

const MAX8: &[u8] = &[0xFF; 8];
const MAX4: &[u8] = &[0xFF; 4];
const MAX2: &[u8] = &[0xFF; 2];

fn name_of(error: FormatError) -> String {
    match error {
        FormatError::Value { field, .. } => field.into(),
        FormatError::Reserved { offset } => format!("reserved {offset}"),
        FormatError::Type { .. } => "type".into(),
        FormatError::Version { .. } => "version".into(),
        FormatError::Magic { .. } => "magic".into(),
        other => other.to_string(),
    }
}

#[test]
fn every_impossible_value_of_a_superblock_is_refused_by_name() {
    let mut random = Random(7);
    let mut good = superblock(&mut random);
    good.says_size_again = true;
    good.feature_names = vec![FeatureName::new(2, 3, "known")];
    let mut first = volume(&mut random, &good);
    first.head = Head {
        link: Link { sequence: Sequence(5), checksum: 1, segment: SegmentId(3), block: 2 },
        through: Sequence(9),
        used: 6,
        ordinal: Ordinal(4),
    };
    first.name = "first".into();
    first.reserve = Reserve::Share;
    first.path = "/dev/sdb".into();
    good.volumes[0] = Some(first);
    good.volumes[1] = None;
    let wrong: [Wrong; 69] = [
        (0, b"FOREBAYX", "magic"),
        (8, &[2], "type"),
        (10, &[2], "version"),
        (12, &[1], "size"),
        (12, MAX4, "size"),
        (28, &[1], "reserved 28"),
        (32, &[0; 16], "uuid"),
        (48, MAX8, "sequence"),
        (56, MAX4, "open_generation"),
        (60, &[2], "clean"),
        (104, &[0; 4], "segment_bytes"),
        (104, &[1, 0, 1, 0], "segment_bytes"),
        (104, &[0, 128, 0, 0], "segment_bytes"),
        (104, &[0, 0, 128, 0], "segment_bytes"),
        (108, &[15, 0, 0, 0], "segment_count"),
        (108, MAX4, "segment_count"),
        (112, MAX8, "first_segment"),
        (112, &[0; 8], "checkpoint_bytes"),
        (96, &[0; 8], "size_again"),
        (120, &[13], "block_shift"),
        (122, &[12], "atomic_shift"),
        (124, &[2], "member_count"),
        (126, &[1], "member_index"),
        (128, MAX8, "checkpoint_bytes"),
        (128, &[1], "checkpoint_bytes"),
        (136, MAX8, "checkpoint_sequence"),
        (144, MAX8, "segment_sequence"),
        (168, &[1], "checkpoint_at"),
        (64, &[1], "checkpoint_at"),
        (176, &[1], "reserved 176"),
        (192, &[4], "feature_mask"),
        (193, &[64], "feature_bit"),
        (194, &[0xFF], "feature_name"),
        (194, &[0], "feature_name"),
        (1216, &[1], "reserved 1216"),
        (4095, &[1], "reserved 4095"),
        (65_519, &[1], "reserved 65519"),
        (65_520, MAX8, "size_again"),
        (65_528, MAX4, "size_again_checksum"),
        (65_535, &[1], "reserved 65535"),
        (4096 + 16, &[0], "mode"),
        (4096 + 16, &[4], "mode"),
        (4096 + 17, &[0], "order"),
        (4096 + 17, &[4], "order"),
        (4096 + 18, &[8], "flags"),
        (4096 + 24, &[0; 8], "volume_bytes"),
        (4096 + 24, &[1], "volume_bytes"),
        (4096 + 32, &[0, 4, 0, 0], "logical_block"),
        (4096 + 36, &[1], "shard"),
        (4096 + 38, &[2], "shard_count"),
        (4096 + 40, &[0], "name"),
        (4096 + 168, &[0; 8], "head_sequence"),
        (4096 + 180, MAX4, "head_segment"),
        (4096 + 184, &[6], "head_block"),
        (4096 + 186, MAX2, "head_used"),
        (4096 + 192, &[0], "head_ordinal"),
        (4096 + 192, MAX8, "head_ordinal"),
        (4096 + 200, MAX8, "next_sequence"),
        (4096 + 208, MAX8, "sb_watermark"),
        (4096 + 216, MAX8, "sb_tail"),
        (4096 + 240, &[4], "head_through"),
        (4096 + 256, MAX2, "path_length"),
        (4096 + 772, &[16], "weight"),
        (4096 + 772, MAX2, "weight"),
        (4096 + 773, &[3], "reserve_kind"),
        (4096 + 774, &[1], "reserved 4870"),
        (4096 + 780, &[1], "reserved 4876"),
        (4096 + 784, &[101], "reserve"),
        (4096 + 792, &[1], "reserved 4888"),
    ];
    for (at, value, expected) in wrong {
        let mut bytes = good.encode(0);
        bytes[at..at + value.len()].copy_from_slice(value);
        reseal(&mut bytes);
        let found = Superblock::decode(&mut bytes, 0).map(|_| ()).map_err(name_of);
        assert_eq!(found, Err(expected.to_owned()), "{value:x?} at {at}");
    }
    // A place without a volume holds nothing.
    let mut bytes = good.encode(0);
    bytes[4096 + 1024 + 500] = 1;
    reseal(&mut bytes);
    assert!(matches!(Superblock::decode(&mut bytes, 0), Err(FormatError::Reserved { .. })));
}

#[test]
fn an_unknown_feature_is_refused_by_its_name() {
    let mut superblock = superblock(&mut Random(8));
    superblock.incompat = 1 << 5 | 1 << 9 | 1 << 60;
    superblock.feature_names = vec![
        FeatureName::new(2, 5, "compat, which is not asked for"),
        FeatureName::new(1, 5, "zstd"),
        FeatureName::new(1, 9, "mirror"),
        FeatureName::new(1, 60, "third"),
    ];
    let error = Superblock::decode(&mut superblock.encode(0), 0).unwrap_err().to_string();
    assert!(error.contains("`zstd`, `mirror` and others"), "{error}");
    superblock.feature_names.clear();
    let error = Superblock::decode(&mut superblock.encode(0), 0).unwrap_err().to_string();
    assert!(error.contains("0x1000000000000220"), "{error}");
}

#[test]
fn every_impossible_value_of_a_record_is_refused_by_name() {
    let mut good = [0; BLOCK_SIZE];
    let data = |lba, slot| Entry { kind: Kind::Data, lba: Lba(lba), count: 1, crc: 7, slot };
    record::put_entry(&mut good, 0, &data(5, 1));
    let zero = Entry { kind: Kind::Zero, lba: Lba(9), count: 1 << 25, crc: 0, slot: 0 };
    record::put_entry(&mut good, 1, &zero);
    record::put_entry(&mut good, 2, &data(6, 2));
    record::put_items(&mut good, &[3 | 2 << 40, 4 | record::ITEM_COUNT_WIDE << 40, 1 << 25]);
    let header = Header {
        sequence: Sequence(100),
        previous: Link { sequence: Sequence(90), checksum: 1, segment: SegmentId(1), block: 3 },
        open_generation: 2,
        volume: 1,
        attach_generation: 3,
        segment_sequence: 11,
        ordinal: Ordinal(12),
        previous_segment: SegmentId(1),
        previous_segment_used: 16,
        blocks: 3,
        entry_count: 3,
        item_count: 3,
        durable_through: Sequence(80),
        tail: Ordinal(2),
        watermark: Sequence(70),
        flush_epoch: 1,
        written_at: 2,
        backing_as_of: 3,
    };
    let address = 1 << 20;
    header.encode(&mut good, address, IDENTITY.uuid);
    record::seal(&mut good, address, &IDENTITY);
    assert_eq!(record::decode(&mut good.clone(), address, &IDENTITY), Ok(header));
    let (entry, item) = (192, 2736);
    let wrong: [Wrong; 47] = [
        (0, b"FBRECORX", "magic"),
        (8, &[1], "type"),
        (10, &[2], "version"),
        (12, &[0, 0, 1, 0], "size"),
        (28, &[1], "reserved 28"),
        (48, MAX8, "sequence"),
        (48, &[90], "previous_sequence"),
        (56, &[100], "previous_sequence"),
        (68, MAX2, "previous_block"),
        (70, &[1], "reserved 70"),
        (76, MAX4, "open_generation"),
        (80, &[60], "volume"),
        (82, &[1], "reserved 82"),
        (88, MAX8, "segment_sequence"),
        (96, MAX8, "ordinal"),
        (96, &[1], "tail"),
        (108, MAX2, "previous_segment_used"),
        (110, &[0], "blocks"),
        (110, &[2], "blocks"),
        (110, &[4], "blocks"),
        (110, MAX2, "blocks"),
        (112, &[128], "entry_count"),
        (112, MAX2, "entry_count"),
        (112, &[2], "reserved 232"),
        (114, &[161], "item_count"),
        (114, &[2], "reserved 2755"),
        (116, &[1], "reserved 116"),
        (120, &[100], "durable_through"),
        (128, &[13], "tail"),
        (136, &[81], "watermark"),
        (144, MAX8, "flush_epoch"),
        (168, &[1], "reserved 168"),
        (252, &[1], "reserved 252"),
        (2732, &[1], "reserved 2732"),
        (2760, &[1], "reserved 2760"),
        (4095, &[1], "reserved 4095"),
        (entry, &[0xFF; 6], "lba"),
        (entry + 6, &[9], "kind"),
        (entry + 7, &[254], "sector_mask"),
        (entry + 12, &[2], "count"),
        (entry + 16, &[1], "codec"),
        (entry + 17, &[1], "stored_length"),
        (entry + 18, &[0], "slot"),
        (entry + 18, &[2], "slot"),
        (entry + ENTRY_SIZE + 8, &[1], "crc"),
        (entry + ENTRY_SIZE + 12, &[0; 4], "count"),
        (item + 5, &[0; 3], "items"),
    ];
    for (at, value, expected) in wrong {
        let mut bytes = good;
        bytes[at..at + value.len()].copy_from_slice(value);
        record::seal(&mut bytes, address, &IDENTITY);
        let found = record::decode(&mut bytes, address, &IDENTITY).map(|_| ()).map_err(name_of);
        assert_eq!(found, Err(expected.to_owned()), "{value:x?} at {at}");
    }
    // Items: an extent past any volume, a wide count that is none, none at all behind the mark.
    for (at, value) in [
        (item, (1u64 << 39).to_le_bytes()),
        (item + 16, u64::MAX.to_le_bytes()),
        (item + 16, 5u64.to_le_bytes()),
        (item + 16, (1u64 << 32).to_le_bytes()),
    ] {
        let mut bytes = good;
        bytes[at..at + 8].copy_from_slice(&value);
        record::seal(&mut bytes, address, &IDENTITY);
        let found = record::decode(&mut bytes, address, &IDENTITY).map_err(name_of);
        assert_eq!(found.map(|_| ()), Err("items".to_owned()), "{value:x?}");
    }
    let mut bytes = good;
    bytes[114] = 2;
    bytes[item + 16..item + 24].fill(0);
    record::seal(&mut bytes, address, &IDENTITY);
    let found = record::decode(&mut bytes, address, &IDENTITY).map_err(name_of);
    assert_eq!(found.map(|_| ()), Err("items".to_owned()));
}

#[test]
fn a_record_whose_items_the_next_could_not_hold_is_refused() {
    let mut bytes = [0; BLOCK_SIZE];
    for index in 0..RECORD_ENTRIES_MAX as u16 {
        let lba = Lba(u64::from(index) << 30);
        let entry = Entry { kind: Kind::Zero, lba, count: 1 << 29, crc: 0, slot: 0 };
        record::put_entry(&mut bytes, index, &entry);
    }
    let (_, address, header, ..) = record(&mut Random(9));
    let entry_count = RECORD_ENTRIES_MAX as u16;
    let header = Header { blocks: 1, entry_count, item_count: 0, ..header };
    header.encode(&mut bytes, address, IDENTITY.uuid);
    record::seal(&mut bytes, address, &IDENTITY);
    let found = record::decode(&mut bytes, address, &IDENTITY).map_err(name_of);
    assert_eq!(found.map(|_| ()), Err("entry_count".to_owned()));
}

#[test]
fn an_open_record_is_closed_or_refused_whatever_was_left_of_it() {
    for seed in 0..500 {
        let mut random = Random(seed);
        let (mut bytes, address, header, ..) = record(&mut random);
        bytes[24..28].fill(0);
        bytes[110..112].fill(0);
        let closed = record::close(&mut bytes, address, &IDENTITY);
        assert_eq!(closed, (header.entry_count > 0).then_some(header.blocks), "seed {seed}");
        // Anything else that lies there is no reason to panic, and what is taken is valid.
        for _ in 0..20 {
            let mut bytes = bytes;
            for _ in 0..=random.below(8) {
                bytes[random.below(BLOCK_SIZE as u64) as usize] = random.next() as u8;
            }
            if record::close(&mut bytes, address, &IDENTITY).is_some() {
                assert!(record::decode(&mut bytes, address, &IDENTITY).is_ok());
            }
        }
    }
}

#[test]
fn an_item_says_that_what_it_names_was_lost() {
    let mut bytes = [0; BLOCK_SIZE];
    let (plain, _) = record::items(Lba(5), 3, Kind::Lost);
    let (first, second) = record::items(Lba(7), u32::MAX, Kind::Lost);
    record::put_items(&mut bytes, &[plain, plain, ITEM_LOST, first, second.unwrap(), ITEM_LOST]);
    let read = |at, count| record::item(&bytes, at, count).unwrap();
    let item = |lba, count, lost| record::Item { lba: Lba(lba), count, backed: false, lost };
    assert_eq!(read(0, 6), (item(5, 3, false), 1));
    assert_eq!(read(1, 6), (item(5, 3, true), 2));
    assert_eq!(read(1, 2), (item(5, 3, false), 1), "what is behind the list says nothing");
    assert_eq!(read(3, 6), (item(7, u32::MAX.into(), true), 3));
    // For whoever does not know it, it is the copy of a block that no volume has.
    let alone =
        record::Item { lba: Lba(VOLUME_BLOCKS_MAX - 1), count: 1, backed: true, lost: false };
    assert_eq!(read(2, 3), (alone, 1));
}

/// Caches of 16 TiB and more had more slots than have numbers, or just as many: then the last of them were in no checkpoint.
#[test]
fn the_number_of_each_slot_and_of_the_end_fits_into_32_bits() {
    const TIB: u64 = 1 << 40;
    for (tib, segment_bytes) in [(17, 512 << 10), (17, 1 << 20), (24, 4 << 20), (400, 4 << 20)] {
        let new = NewCache { uuid: [1; 16], key: 1, size_bytes: tib * TIB, segment_bytes, now: 0 };
        let superblock = Superblock::format(&new).unwrap();
        let slots = |count: u32| u64::from(count) * u64::from(superblock.segment_blocks());
        let count = superblock.segment_count;
        assert!(u32::try_from(slots(count)).is_ok(), "{tib} TiB, {segment_bytes}");
        assert!(u32::try_from(slots(count + 1)).is_err(), "as many as can be");
        let larger = superblock.resized((tib + 1) * TIB);
        assert!(larger.is_err(), "it would have no more segments: {larger:?}");
        let mut more = superblock.clone();
        more.segment_count += 1;
        more.size_bytes += 8 << 20;
        let mut bytes = more.encode(0);
        let error = Superblock::decode(&mut bytes, 0).unwrap_err();
        assert_eq!(name_of(error), "segment_count");
    }
}
