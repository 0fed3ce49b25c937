// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A whole cache that an earlier program left when it was killed: a checkpoint, several volumes, every
//! kind of entry, a tail behind the checkpoint. It must be opened for ever, and say what it said.
//!
//! The image holds the backing devices as well. What must be read follows from the lists below, which
//! are what the guests did then. `UPDATE_GOLDEN=1` makes the image if it is not there; it is never made
//! anew.

use crate::support::image::{self, Image, LINE};
use crate::support::{self, BLOCK, Dir, Rig};
use forebay::cache;
use forebay::check::{Severity, check};
use forebay::host::runtime_dir::Places;
use forebay::inspect::Inspection;
use forebay::io::{Device, FileDevice, FileOptions, MemoryDevice, ReactorKind};
use forebay::shard::{CACHE_SOURCE, backing_source};
use forebay_core::engine::Config;
use forebay_core::format::bytes::{Seed, block_checksum};
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::record::{self, Header, Link};
use forebay_core::format::superblock::{Mode, NewCache, Superblock};
use forebay_core::request::{Op, RequestError};
use forebay_core::units::{BLOCK_SIZE, Lba, Sequence, VolumeIndex};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The second one was left by a program whose checkpoints say what the last record of each log held.
const NAMES: [&str; 2] = ["v1.checkpoint.hex", "v1.checkpoint-last.hex"];
const UUID: [u8; 16] = *b"golden log    v1";
/// So many that nothing has to be written back.
const SEGMENTS: u32 = 40;
const SEGMENT_BYTES: u32 = 64 << 10;
const KEY: u64 = 0xFEDC_BA98_7654_3210;
/// Blocks of each volume but for the odd sector of the last one.
const BLOCKS: u64 = 64;
const VOLUMES: [(&str, Mode, u64); 4] = [
    ("back", Mode::WriteBack, BLOCKS * BLOCK),
    ("through", Mode::WriteThrough, BLOCKS * BLOCK),
    ("around", Mode::WriteBack, BLOCKS * BLOCK),
    ("odd", Mode::WriteBack, BLOCKS * BLOCK + 512),
];
const BACK: usize = 0;
const THROUGH: usize = 1;
const AROUND: usize = 2;
const ODD: usize = 3;

const WRITE: Op = Op::Write { fua: false };
const FUA: Op = Op::Write { fua: true };
const ZEROES: Op = Op::WriteZeroes { fua: false };

/// What was done: volume, what, first block, blocks.
type Step = (usize, Op, u64, u64);

/// In the first opening, before volume `around` became a write-around one.
const FIRST: [Step; 16] = [
    (BACK, WRITE, 0, 8),
    (BACK, WRITE, 3, 1),
    (THROUGH, WRITE, 1, 4),
    (BACK, ZEROES, 10, 4),
    (BACK, WRITE, 11, 1),
    (AROUND, WRITE, 0, 6),
    (BACK, Op::Discard, 20, 2),
    (BACK, FUA, 30, 2),
    (THROUGH, ZEROES, 6, 2),
    (ODD, WRITE, 62, 2),
    (ODD, WRITE, 5, 1),
    (BACK, WRITE, 4, 2),
    (BACK, Op::Flush, 0, 0),
    (THROUGH, Op::Discard, 2, 1),
    (ODD, ZEROES, 5, 1),
    (ODD, Op::Flush, 0, 0),
];
/// After that, up to the checkpoint.
const SECOND: [Step; 4] =
    [(AROUND, WRITE, 2, 2), (AROUND, Op::Flush, 0, 0), (BACK, WRITE, 24, 3), (BACK, FUA, 63, 1)];
/// In the second opening: behind the checkpoint.
const THIRD: [Step; 11] = [
    (BACK, WRITE, 3, 1),
    (BACK, ZEROES, 30, 1),
    (THROUGH, WRITE, 2, 3),
    (BACK, WRITE, 12, 1),
    (BACK, Op::Discard, 1, 1),
    (AROUND, WRITE, 4, 3),
    (ODD, WRITE, 0, 2),
    (BACK, WRITE, 21, 1),
    (BACK, Op::Flush, 0, 0),
    (AROUND, Op::Flush, 0, 0),
    (ODD, Op::Flush, 0, 0),
];
/// A last record of volume `back`, made by hand: kinds that nobody writes today among them.
const LAST: [(Kind, u64, u32); 10] = [
    (Kind::Data, 40, 1),
    (Kind::Void, 49, 1),
    (Kind::Parked, 41, 1),
    (Kind::Zero, 42, 2),
    (Kind::Fill, 51, 1),
    (Kind::Discard, 44, 1),
    (Kind::Marker, 0, 1),
    (Kind::Bypassed, 50, 1),
    (Kind::Lost, 47, 2),
    (Kind::Data, 5, 1),
];
/// The number of that one.
const LAST_STEP: u64 = 200;

/// What the guest wrote in a step.
fn written(volume: usize, lba: u64, step: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK_SIZE];
    block[..6].copy_from_slice(b"golden");
    block[8..11].copy_from_slice(&[volume as u8, lba as u8, step as u8]);
    block
}

/// What was on the backing devices before: every other block.
fn found(volume: usize, lba: u64) -> Vec<u8> {
    if lba.is_multiple_of(2) { written(volume, lba, 255) } else { vec![0; BLOCK_SIZE] }
}

/// What each block of a volume must read as; none: an error.
type Model = Vec<Option<Vec<u8>>>;

fn models() -> Vec<Model> {
    let model = |volume| (0..BLOCKS).map(|lba| Some(found(volume, lba))).collect();
    let mut models: Vec<Model> = (0..VOLUMES.len()).map(model).collect();
    let steps = FIRST.iter().chain(&SECOND).chain(&THIRD);
    for (step, (volume, op, first, blocks)) in steps.enumerate() {
        for lba in *first..*first + *blocks {
            models[*volume][lba as usize] = Some(match op {
                Op::Write { .. } => written(*volume, lba, step as u64),
                _ => vec![0; BLOCK_SIZE],
            });
        }
    }
    for (kind, first, count) in LAST {
        for lba in first..first + u64::from(count) {
            let content = match kind {
                Kind::Data | Kind::Parked => Some(written(BACK, lba, LAST_STEP)),
                Kind::Zero | Kind::Discard => Some(vec![0; BLOCK_SIZE]),
                Kind::Lost => None,
                Kind::Fill | Kind::Bypassed | Kind::Void | Kind::Marker => continue,
            };
            models[BACK][lba as usize] = content;
        }
    }
    models
}

fn config() -> Config {
    let never = 3_600_000_000_000;
    Config { dirty_age: never, dirty_percent: 100, buffer_count: 8, ..Config::default() }
}

fn open<D: Device + 'static>(path: &Path, mut backing: impl FnMut(usize) -> Option<Box<D>>) -> Rig {
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    let device = Box::new(FileDevice::open(path, &options).unwrap());
    let options = support::options(ReactorKind::Threads, config());
    let mut rig = Rig::open(device, &options, 1 << 20);
    for (index, (name, ..)) in VOLUMES.iter().enumerate() {
        let volume = VolumeIndex(index as u8);
        if let Some(backing) = backing(index) {
            assert_eq!(rig.shard.find(name), Some(volume));
            rig.shard.serve(volume, backing);
        }
    }
    rig
}

fn do_steps(rig: &mut Rig, steps: &[Step], from: usize) {
    for (at, (volume, op, first, blocks)) in steps.iter().enumerate() {
        let length = (blocks * BLOCK) as usize;
        let span = rig.memory.span(0, length);
        let step = (from + at) as u64;
        let bytes: Vec<u8> =
            (*first..*first + *blocks).flat_map(|lba| written(*volume, lba, step)).collect();
        span.copy_in(&bytes);
        let span = matches!(op, Op::Write { .. }).then_some(span);
        let (index, offset) = (VolumeIndex(*volume as u8), first * BLOCK);
        rig.request(index, *op, offset, length as u64, span).unwrap();
    }
}

/// An image of all that a device holds.
fn image_of(device: &dyn Device) -> Image {
    let size = device.info().size_bytes;
    let mut bytes = vec![0; (size - size % LINE as u64) as usize];
    device.read_at(0, &mut bytes).unwrap();
    let mut image = Image::default();
    image.put(0, &bytes);
    image
}

fn filled(size_bytes: u64, fill: impl FnOnce(&MemoryDevice)) -> MemoryDevice {
    let device = MemoryDevice::new(size_bytes, 512).unwrap();
    fill(&device);
    device
}

/// The smallest cache of that many segments.
fn superblock() -> Superblock {
    let mut size_bytes = u64::from(SEGMENTS) * u64::from(SEGMENT_BYTES);
    loop {
        let now = 1_700_000_000_000;
        let new = NewCache { uuid: UUID, key: KEY, size_bytes, segment_bytes: SEGMENT_BYTES, now };
        match Superblock::format(&new) {
            Ok(superblock) if superblock.segment_count >= SEGMENTS => return superblock,
            _ => size_bytes += u64::from(SEGMENT_BYTES),
        }
    }
}

/// Makes the image: as a daemon would that is killed.
fn make(dir: &Dir) -> String {
    let superblock = superblock();
    let path = dir.file("made", superblock.size_bytes);
    {
        let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
        let device = FileDevice::open(&path, &options).unwrap();
        cache::write_superblock(&device, &superblock).unwrap();
    }
    let files: Vec<PathBuf> = VOLUMES.iter().map(|(name, _, size)| dir.file(name, *size)).collect();
    let backing = |index: usize| {
        let source = backing_source(VolumeIndex(index as u8));
        let options = FileOptions { source, ..FileOptions::default() };
        Box::new(FileDevice::open(&files[index], &options).unwrap())
    };
    let mut rig = open(&path, |_| None::<Box<FileDevice>>);
    for (number, (name, mode, _)) in VOLUMES.into_iter().enumerate() {
        for lba in 0..BLOCKS {
            backing(number).write_at(lba * BLOCK, &found(number, lba)).unwrap();
        }
        rig.add(name, mode, backing(number));
    }
    do_steps(&mut rig, &FIRST, 0);
    let around = VolumeIndex(AROUND as u8);
    rig.shard.drain(around);
    rig.wait("drained", |shard| shard.engine().is_clean(around));
    rig.shard.set_mode(around, Mode::WriteAround).unwrap();
    do_steps(&mut rig, &SECOND, FIRST.len());
    rig.close();
    let mut rig = open(&path, |index| Some(backing(index)));
    do_steps(&mut rig, &THIRD, FIRST.len() + SECOND.len());
    let mut text = String::new();
    for (index, volume) in VOLUMES.iter().enumerate() {
        let image = image_of(rig.shard.backing(VolumeIndex(index as u8)).unwrap());
        text += &format!("= {}\n{}", volume.0, image.to_text());
    }
    drop(rig);
    append_last(&path);
    let options = FileOptions { source: CACHE_SOURCE, ..FileOptions::default() };
    let image = image_of(&FileDevice::open(&path, &options).unwrap());
    text + &format!("= cache {}\n{}", superblock.size_bytes, image.to_text())
}

/// Appends the last record to the log of `back`.
fn append_last(path: &Path) {
    let inspection = Inspection::open(path, &Places::found()).unwrap();
    let superblock = inspection.superblock().clone();
    let records = inspection.recover().records(VolumeIndex(BACK as u8));
    let (segment, block) = *records.last().unwrap();
    let before = inspection.record(segment, block).unwrap();
    drop(inspection);
    let at = block + before.header.blocks;
    let slots = LAST.iter().filter(|(kind, ..)| kind.has_slot()).count() as u16;
    assert!(at + slots < superblock.segment_blocks(), "the segment has room for one more record");
    let mut bytes = [0; BLOCK_SIZE];
    let mut items = Vec::new();
    for index in 0..before.header.entry_count {
        let entry = record::entry(&before.bytes, index).unwrap();
        items.push(record::items(entry.lba, entry.count, entry.kind).0);
    }
    record::put_items(&mut bytes, &items);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    let mut slot = 0;
    for (index, (kind, lba, count)) in LAST.into_iter().enumerate() {
        let mut entry = Entry { kind, lba: Lba(lba), count, crc: 0, slot: 0 };
        if kind.has_slot() {
            slot += 1;
            entry.slot = slot;
            let content = match kind {
                Kind::Fill => found(BACK, lba),
                Kind::Void => vec![0; BLOCK_SIZE],
                _ => written(BACK, lba, LAST_STEP),
            };
            let address = superblock.address(segment, at + slot);
            let seed = Seed::new(KEY, address, before.header.segment_sequence);
            entry.crc = seed.apply(block_checksum(&content));
            file.write_all_at(&content, address).unwrap();
        }
        record::put_entry(&mut bytes, index as u16, &entry);
    }
    let last = before.header.last_sequence();
    let link = Link {
        sequence: before.header.sequence,
        checksum: record::checksum(&before.bytes),
        segment,
        block,
    };
    let header = Header {
        sequence: Sequence(last.0 + 1),
        previous: link,
        blocks: slot + 1,
        entry_count: LAST.len() as u16,
        item_count: items.len() as u16,
        durable_through: last,
        ..before.header
    };
    let address = superblock.address(segment, at);
    header.encode(&mut bytes, address, superblock.uuid);
    record::seal(&mut bytes, address, &superblock.identity());
    file.write_all_at(&bytes, address).unwrap();
}

/// The image: the backing devices, and the cache in a file.
fn golden(dir: &Dir, name: &str) -> (Vec<MemoryDevice>, PathBuf) {
    if image::is_updating(name) {
        std::fs::write(image::path(name), make(dir)).unwrap();
    }
    let text = std::fs::read_to_string(image::path(name)).unwrap();
    let mut backings = Vec::new();
    let mut cache = None;
    for part in text.split("= ").skip(1) {
        let (title, lines) = part.split_once('\n').unwrap();
        let image = Image::from_text(lines);
        if let Some(size) = title.strip_prefix("cache ") {
            let path = dir.file("cache", size.parse().unwrap());
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            for (at, line) in &image.lines {
                file.write_all_at(line, *at).unwrap();
            }
            cache = Some(path);
            continue;
        }
        assert_eq!(title, VOLUMES[backings.len()].0);
        backings.push(filled(VOLUMES[backings.len()].2, |device| {
            for (at, line) in &image.lines {
                device.write_at(*at, line).unwrap();
            }
        }));
    }
    (backings, cache.unwrap())
}

fn read(rig: &mut Rig, volume: usize, lba: u64) -> Result<Vec<u8>, RequestError> {
    let span = rig.memory.span(0, BLOCK_SIZE);
    rig.request(VolumeIndex(volume as u8), Op::Read, lba * BLOCK, BLOCK, Some(span))?;
    let mut bytes = vec![0; BLOCK_SIZE];
    span.copy_out(&mut bytes);
    Ok(bytes)
}

#[test]
fn a_killed_cache_of_version_1_with_a_checkpoint_is_opened_and_says_what_it_said() {
    NAMES.iter().for_each(|name| opens(name));
}

fn opens(name: &str) {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), name);
    let (backings, path) = golden(&dir, name);

    let inspection = Inspection::open(&path, &Places::found()).unwrap();
    assert_eq!(inspection.checkpoint_is_good(), Some(true));
    let report = check(&inspection).unwrap();
    let bad: Vec<_> =
        report.findings.iter().filter(|finding| finding.severity != Severity::Note).collect();
    // What was lost is told, and nothing else is wrong.
    let lost = |finding: &&forebay::check::Finding| finding.lba == Some(47) && finding.blocks == 2;
    assert!(bad.iter().all(lost) && bad.len() <= 1, "{bad:?}");
    let recovered = inspection.recover();
    let kinds: Vec<Kind> = (0..VOLUMES.len())
        .flat_map(|volume| recovered.records(VolumeIndex(volume as u8)))
        .map(|(segment, block)| inspection.record(segment, block).unwrap())
        .flat_map(|found| {
            let entry = |index| record::entry(&found.bytes, index).unwrap().kind;
            (0..found.header.entry_count).map(entry).collect::<Vec<_>>()
        })
        .collect();
    for (kind, name, _) in Kind::ALL {
        assert!(kinds.contains(&kind), "no {name}");
    }
    drop(inspection);

    let mut backings = backings.into_iter().map(Box::new);
    let mut rig = open(&path, |_| backings.next());
    assert!(rig.shard.opened().from_checkpoint, "{:?}", rig.shard.opened());
    assert_eq!(rig.shard.opened().damage, []);
    assert_eq!(rig.shard.superblock().volumes[AROUND].as_ref().unwrap().mode, Mode::WriteAround);
    let mut models = models();
    for (volume, model) in models.iter().enumerate() {
        for (lba, expected) in model.iter().enumerate() {
            let found = read(&mut rig, volume, lba as u64);
            let name = VOLUMES[volume].0;
            assert!(found.ok() == *expected, "{name}: block {lba}");
        }
    }

    // It goes on, too: what was lost is written again, and everything reaches the backing devices.
    for lba in 47..49 {
        do_steps(&mut rig, &[(BACK, WRITE, lba, 1)], 201);
        models[BACK][lba as usize] = Some(written(BACK, lba, 201));
    }
    for (index, model) in models.iter().enumerate() {
        let volume = VolumeIndex(index as u8);
        rig.shard.drain(volume);
        rig.wait("drained", |shard| shard.engine().is_clean(volume));
        let device = rig.shard.backing(volume).unwrap();
        for (lba, expected) in model.iter().enumerate() {
            let mut bytes = vec![0; BLOCK_SIZE];
            device.read_at(lba as u64 * BLOCK, &mut bytes).unwrap();
            assert!(Some(&bytes) == expected.as_ref(), "{}: block {lba}", VOLUMES[index].0);
        }
    }
    rig.close();
}
