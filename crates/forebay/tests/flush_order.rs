// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The devices are really flushed, and at the right time.
//!
//! - An answered FLUSH, and an answered write or write-zeroes with FUA: the records that hold what they cover are
//!   written; then the cache device is flushed; then the answer. With write-through and write-around, where the answer says
//!   that the backing device has it: what they cover is written there; then that is flushed; then the answer.
//! - A discard with FUA is a discard, and a FLUSH when that is answered: so it is asked for here, as front ends do.
//! - A record whose watermark passes an entry: what the entry says is on the backing device; then
//!   that is flushed; then the record is written.
//! - A copy of the superblock: the other one is written; then the cache device is flushed; then this one is written.
//!
//! Blocks are known by a tag in their first bytes, so what a record covers is seen in the bytes
//! that reach the device and not believed.

use crate::support::{self, BLOCK, Dir, PATIENCE, Random, Rig};
use forebay::io::{
    Device, FileDevice, FileOptions, Layer, MemoryDevice, Operation, OperationKind, Reactor,
    ReactorKind, RecordDevice, Recorded, Recorder, Span,
};
use forebay::shard::{CACHE_SOURCE, ShardOptions, backing_source};
use forebay_core::engine::Config;
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::record::{self, Header};
use forebay_core::format::superblock::{Mode, Order, SUPERBLOCK_SIZE, Superblock};
use forebay_core::request::Op;
use forebay_core::units::VolumeIndex;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CACHE: u16 = 1;
const BACKING: u16 = 2;
const CACHE_BYTES: u64 = 64 << 20;
const BACKING_BYTES: u64 = 128 << 20;
const BLOCKS_MAX: u64 = 16;
const DEPTH: usize = 32;

/// What a device was told to write; `submitted` is its place in the record.
struct Seen {
    submitted: usize,
    what: What,
}

enum What {
    /// A record: its entries, with the tags of those that have a block.
    Record { header: Header, entries: Vec<(Entry, u64)> },
    /// Blocks on the backing device.
    Blocks { first: u64, tags: Vec<u64> },
    /// A part of a copy of the superblock.
    Copy { address: u64 },
    /// Blocks on the backing device that were zeroed or given up.
    Gone { first: u64, count: u64 },
}

/// Looks into what is written, above a [`RecordDevice`].
struct Tap {
    inner: RecordDevice,
    device: u16,
    recorder: Recorder,
    seen: Arc<Mutex<Vec<Seen>>>,
}

fn first_word(block: &[u8]) -> u64 {
    u64::from_le_bytes(block[..8].try_into().unwrap())
}

/// What a write holds; none: a checkpoint's pages.
fn look(device: u16, span: Span, offset: u64) -> Option<What> {
    let mut bytes = vec![0; span.len()];
    span.copy_out(&mut bytes);
    let blocks: Vec<&[u8]> = bytes.chunks(BLOCK as usize).collect();
    if device == BACKING {
        let tags = blocks.iter().map(|block| first_word(block)).collect();
        return Some(What::Blocks { first: offset / BLOCK, tags });
    }
    let is_in = |address: &u64| (*address..*address + SUPERBLOCK_SIZE as u64).contains(&offset);
    if let Some(address) = Superblock::addresses(CACHE_BYTES).into_iter().find(is_in) {
        return Some(What::Copy { address });
    }
    if first_word(blocks[0]) != record::MAGIC {
        return None;
    }
    let head = blocks[0].try_into().unwrap();
    let header = Header::fields(head);
    assert_eq!(usize::from(header.blocks), blocks.len(), "one device write per record");
    let entries = (0..header.entry_count)
        .map(|index| {
            let entry = record::entry(head, index).unwrap();
            (entry, first_word(blocks[usize::from(entry.slot)]))
        })
        .collect();
    Some(What::Record { header, entries })
}

impl Layer for Tap {
    fn below(&self) -> &dyn Device {
        &self.inner
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        &mut self.inner
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        let what = match operation {
            Operation::Write { span, offset } => look(self.device, span, offset),
            Operation::Discard { offset, length } | Operation::WriteZeroes { offset, length } => {
                Some(What::Gone { first: offset / BLOCK, count: length / BLOCK })
            }
            _ => None,
        };
        if let Some(what) = what {
            let submitted = self.recorder.mark(0) + 1;
            self.seen.lock().unwrap().push(Seen { submitted, what });
        }
        self.inner.submit(reactor, operation, token, now);
    }
}

/// An answer that promises durability: its place, and what it covers.
struct Promise {
    place: usize,
    covered: Vec<Covered>,
}

/// What a request changed.
#[derive(Clone, Copy, Debug)]
enum Covered {
    Tag(u64),
    /// Zeros, or nothing any more, that were asked for at this place.
    Gone {
        asked: usize,
        first: u64,
        count: u64,
    },
}

/// What happened, in a form that can be asked.
struct History {
    answered: HashMap<usize, usize>,
    /// Flushes that went well: where submitted, where answered.
    flushes: HashMap<u16, Vec<(usize, usize)>>,
}

impl History {
    fn new(all: &[Recorded]) -> History {
        let mut answered = HashMap::new();
        for (place, recorded) in all.iter().enumerate() {
            if let Recorded::Complete { submitted, good } = *recorded {
                assert!(good);
                answered.insert(submitted, place);
            }
        }
        let mut flushes: HashMap<u16, Vec<(usize, usize)>> = HashMap::new();
        for (place, recorded) in all.iter().enumerate() {
            if let Recorded::Submit { device, kind: OperationKind::Flush, .. } = *recorded
                && let Some(end) = answered.get(&place)
            {
                flushes.entry(device).or_default().push((place, *end));
            }
        }
        History { answered, flushes }
    }

    /// Whether what was submitted there was written, then flushed, before `end`.
    fn is_durable(&self, device: u16, submitted: usize, end: usize) -> bool {
        let Some(written) = self.answered.get(&submitted) else { return false };
        let flushes = self.flushes.get(&device).map_or(&[][..], Vec::as_slice);
        flushes.iter().any(|(begin, done)| begin > written && *done < end)
    }
}

/// What a guest asks for, and in which order it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestKind {
    /// Zeros and discards, too, by batches: they are in the log, and nothing goes around it meanwhile.
    Batches,
    /// The same where writes go around what is in the log.
    Relaxed,
    /// Nothing is in the log, so that all that may goes around it.
    WritesAlone,
}

/// A guest with many requests under way, never two on the same blocks.
struct Guest {
    random: Random,
    tag: u64,
    under_way: Vec<Option<Request>>,
    busy: HashSet<u64>,
    acknowledged: Vec<Covered>,
    /// Whether it asks for zeros and discards, too.
    empties: bool,
    promises: Vec<Promise>,
}

#[derive(Clone)]
struct Request {
    blocks: std::ops::Range<u64>,
    /// Of its own blocks, or that they are gone.
    changes: Vec<Covered>,
    /// What its answer promises.
    covered: Option<Vec<Covered>>,
    /// A flush of this comes next.
    then_flush: bool,
}

impl Guest {
    fn submit(&mut self, slot: usize, rig: &mut Rig, volume: VolumeIndex, recorder: &Recorder) {
        let count = 1 + self.random.below(BLOCKS_MAX);
        let first = self.random.below(BACKING_BYTES / BLOCK - count);
        let blocks = first..first + count;
        if blocks.clone().any(|block| self.busy.contains(&block)) {
            return;
        }
        let (offset, length) = (first * BLOCK, count * BLOCK);
        let mut request = Request { blocks, changes: Vec::new(), covered: None, then_flush: false };
        let gone = Covered::Gone { asked: recorder.mark(0), first, count };
        let kind = match self.random.below(100) {
            kind @ 6..17 if !self.empties => kind + 17,
            kind => kind,
        };
        let (op, span) = match kind {
            0..6 => {
                request.covered = Some(self.acknowledged.clone());
                request.blocks = 0..0;
                (Op::Flush, None)
            }
            kind @ 6..13 => {
                let fua = kind < 9;
                request.changes.push(gone);
                request.covered = fua.then(|| vec![gone]);
                (Op::WriteZeroes { fua }, None)
            }
            kind @ 13..17 => {
                request.changes.push(gone);
                request.then_flush = kind < 15;
                (Op::Discard, None)
            }
            kind => {
                let whole = rig.span(slot, (BLOCKS_MAX * BLOCK) as usize);
                for block in 0..count {
                    self.tag += 1;
                    request.changes.push(Covered::Tag(self.tag));
                    whole.skip((block * BLOCK) as usize).copy_in(&self.tag.to_le_bytes());
                }
                let fua = kind < 23;
                request.covered = fua.then(|| request.changes.clone());
                (Op::Write { fua }, Some(whole.part(0, length as usize)))
            }
        };
        let (offset, length) = if op == Op::Flush { (0, 0) } else { (offset, length) };
        if rig.shard.submit(volume, op, offset, length, span, slot as u64).is_ok() {
            self.busy.extend(request.blocks.clone());
            self.under_way[slot] = Some(request);
        }
    }

    fn answered(&mut self, slot: usize, rig: &mut Rig, volume: VolumeIndex, recorder: &Recorder) {
        let request = self.under_way[slot].take().unwrap();
        if request.then_flush {
            let covered = Some(request.changes.clone());
            let flush = Request { blocks: 0..0, changes: Vec::new(), covered, then_flush: false };
            rig.shard.submit(volume, Op::Flush, 0, 0, None, slot as u64).unwrap();
            self.under_way[slot] = Some(flush);
        }
        let place = recorder.mark(1);
        for block in request.blocks {
            self.busy.remove(&block);
        }
        self.acknowledged.extend(request.changes);
        if let Some(covered) = request.covered {
            self.promises.push(Promise { place, covered });
        }
        // What an earlier promise covers need not be looked at again and again.
        if self.acknowledged.len() > 4096 {
            self.acknowledged.drain(..2048);
        }
    }
}

fn run(
    cache: Box<dyn Device>,
    backing: Box<dyn Device>,
    options: &ShardOptions,
    (mode, kind): (Mode, GuestKind),
    requests: usize,
) -> usize {
    let recorder = Recorder::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let tap = |inner, device| {
        let inner = RecordDevice::new(inner, recorder.clone(), device);
        Box::new(Tap { inner, device, recorder: recorder.clone(), seen: Arc::clone(&seen) })
    };
    let mut rig = Rig::new(tap(cache, CACHE), options, DEPTH * (BLOCKS_MAX * BLOCK) as usize);
    let volume = rig.add("v", mode, tap(backing, BACKING));
    if kind == GuestKind::Relaxed {
        rig.shard.set_order(volume, Order::Relaxed).unwrap();
    }
    let mut guest = Guest {
        random: Random(requests as u64),
        tag: 0,
        under_way: vec![None; DEPTH],
        busy: HashSet::new(),
        acknowledged: Vec::new(),
        empties: kind != GuestKind::WritesAlone,
        promises: Vec::new(),
    };
    let mut answered = 0;
    let mut last = Instant::now();
    while answered < requests {
        assert!(last.elapsed() < PATIENCE, "no progress");
        for slot in 0..DEPTH {
            if guest.under_way[slot].is_none() {
                guest.submit(slot, &mut rig, volume, &recorder);
            }
        }
        let mut slots = Vec::new();
        rig.turn(Duration::from_millis(100), |answer| {
            answer.result.unwrap();
            last = Instant::now();
            slots.push(answer.cookie as usize);
        });
        for slot in slots {
            guest.answered(slot, &mut rig, volume, &recorder);
            answered += 1;
        }
    }
    rig.shard.drain(volume);
    rig.wait("drained", |shard| shard.engine().is_clean(volume));
    let around = rig.shard.engine().status(volume).unwrap().stats.bypassed_writes as usize;
    rig.close();
    let history = History::new(&recorder.all());
    let seen = seen.lock().unwrap();
    let gone = check_promises(&history, &seen, &guest.promises, mode);
    assert!(gone > 100 || !guest.empties, "hardly a promise of zeros and discards");
    let raised = check_watermarks(&history, &seen);
    let turns = check_copies(&history, &seen);
    assert!(guest.promises.len() > requests / 20, "hardly a promise");
    match kind {
        GuestKind::Batches => assert!(turns > 2, "hardly a checkpoint was named"),
        GuestKind::Relaxed => assert!(around > requests / 10, "{around} writes around the log"),
        GuestKind::WritesAlone => assert!(around > requests / 2, "{around} writes around the log"),
    }
    assert!(raised > 3 || kind == GuestKind::WritesAlone, "hardly any write-back");
    raised
}

/// Where what a promise covers is written, by what it is.
#[derive(Default)]
struct Written {
    tags: HashMap<u64, Vec<usize>>,
    /// By block.
    gone: HashMap<u64, Vec<usize>>,
}

impl Written {
    fn on(device: u16, seen: &[Seen]) -> Written {
        let mut written = Written::default();
        for it in seen {
            match &it.what {
                What::Record { entries, .. } if device == CACHE => {
                    for (entry, tag) in entries {
                        match entry.kind {
                            Kind::Data => written.tag(*tag, it.submitted),
                            Kind::Zero | Kind::Discard => {
                                written.gone(entry.lba.0, entry.count.into(), it.submitted);
                            }
                            _ => {}
                        }
                    }
                }
                What::Blocks { tags, .. } if device == BACKING => {
                    tags.iter().for_each(|tag| written.tag(*tag, it.submitted));
                }
                What::Gone { first, count } if device == BACKING => {
                    written.gone(*first, *count, it.submitted);
                }
                _ => {}
            }
        }
        written
    }

    fn tag(&mut self, tag: u64, submitted: usize) {
        self.tags.entry(tag).or_default().push(submitted);
    }

    fn gone(&mut self, first: u64, count: u64, submitted: usize) {
        for block in first..first + count {
            self.gone.entry(block).or_default().push(submitted);
        }
    }

    /// Places where each of its blocks was written.
    fn of(&self, covered: Covered) -> Vec<Vec<usize>> {
        let found = |all: Option<&Vec<usize>>, from: usize| {
            all.into_iter().flatten().copied().filter(|at| *at > from).collect()
        };
        match covered {
            Covered::Tag(tag) => vec![found(self.tags.get(&tag), 0)],
            Covered::Gone { asked, first, count } => {
                (first..first + count).map(|block| found(self.gone.get(&block), asked)).collect()
            }
        }
    }
}

/// Gives how many of zeros and discards there were.
fn check_promises(history: &History, seen: &[Seen], promises: &[Promise], mode: Mode) -> usize {
    let device = if mode == Mode::WriteBack { CACHE } else { BACKING };
    let written = Written::on(device, seen);
    let mut gone = 0;
    for promise in promises {
        for covered in &promise.covered {
            gone += usize::from(matches!(covered, Covered::Gone { .. }));
            for places in written.of(*covered) {
                assert!(
                    places.iter().any(|at| history.is_durable(device, *at, promise.place)),
                    "{mode:?}: {covered:?} was not durable on device {device} when a flush or FUA was \
                     answered at {}: {places:?}",
                    promise.place
                );
            }
        }
    }
    gone
}

/// Gives how often the other copy was written.
fn check_copies(history: &History, seen: &[Seen]) -> usize {
    let copies = seen.iter().filter_map(|it| match it.what {
        What::Copy { address } => Some((address, it.submitted)),
        _ => None,
    });
    let (mut newest, mut parts, mut turns) = (0, Vec::new(), 0);
    for (address, submitted) in copies {
        if address != newest {
            for part in parts.drain(..) {
                assert!(
                    history.is_durable(CACHE, part, submitted),
                    "the copy at {newest} was not durable when that at {address} was written"
                );
            }
            (newest, turns) = (address, turns + 1);
        }
        parts.push(submitted);
    }
    turns
}

/// Gives how often a watermark was raised.
fn check_watermarks(history: &History, seen: &[Seen]) -> usize {
    // What came to each block of the backing device: where submitted, and its tag, 0 for zeros.
    let mut came: HashMap<u64, Vec<(usize, u64)>> = HashMap::new();
    for it in seen {
        match &it.what {
            What::Blocks { first, tags } => {
                for (block, tag) in (*first..).zip(tags) {
                    came.entry(block).or_default().push((it.submitted, *tag));
                }
            }
            What::Gone { first, count } => {
                for block in *first..first + count {
                    came.entry(block).or_default().push((it.submitted, 0));
                }
            }
            What::Record { .. } | What::Copy { .. } => {}
        }
    }
    let mut placed: Vec<(u64, usize, Entry, u64)> = Vec::new();
    let mut records: Vec<(u64, usize)> = Vec::new();
    for it in seen {
        let What::Record { header, entries } = &it.what else { continue };
        records.push((header.watermark.0, it.submitted));
        for (number, (entry, tag)) in entries.iter().enumerate() {
            placed.push((header.sequence.0 + 1 + number as u64, it.submitted, *entry, *tag));
        }
    }
    placed.sort_by_key(|it| it.0);
    let (mut passed, mut watermark, mut raised) = (0, 0, 0);
    for (new, place) in records {
        if new <= watermark {
            continue;
        }
        (watermark, raised) = (new, raised + 1);
        while let Some((sequence, at, entry, tag)) = placed.get(passed) {
            if *sequence > watermark {
                break;
            }
            passed += 1;
            if !matches!(entry.kind, Kind::Data | Kind::Zero | Kind::Discard) {
                continue;
            }
            for block in entry.lba.0..entry.lba.0 + u64::from(entry.count) {
                // This version, or a newer one, which came later in any case.
                let good = |(to, found): &(usize, u64)| {
                    let newer = *found == 0 || entry.kind != Kind::Data || found >= tag;
                    newer && to > at && history.is_durable(BACKING, *to, place)
                };
                assert!(
                    came.get(&block).is_some_and(|all| all.iter().any(good)),
                    "block {block} (sequence {sequence}, tag {tag}) was not durable on the \
                     backing device when a record with watermark {watermark} was written at {place}"
                );
            }
        }
    }
    raised
}

fn config() -> Config {
    // Records and batches come often.
    Config {
        close_after: 20_000_000,
        dirty_percent: 10,
        dirty_age: 50_000_000,
        ..Config::default()
    }
}

#[test]
fn flushes_come_in_order_on_memory() {
    for shared in [true, false] {
        let options = support::options(ReactorKind::Threads, config());
        let options = ShardOptions { shared, ..options };
        let memory = |bytes| Box::new(MemoryDevice::new(bytes, 512).unwrap());
        let (cache, backing) = (memory(CACHE_BYTES), memory(BACKING_BYTES));
        let raised = run(cache, backing, &options, (Mode::WriteBack, GuestKind::Batches), 12_000);
        println!("shared {shared}: {raised} watermarks");
    }
}

#[test]
fn flushes_come_in_order_on_files() {
    for kind in [ReactorKind::Threads, ReactorKind::Auto] {
        let raised = run_on_files(kind, (Mode::WriteBack, GuestKind::Batches), 6_000);
        println!("{kind:?}: {raised} watermarks");
    }
}

/// What is answered there is on the backing device, and what was flushed is there for good.
#[test]
fn the_backing_device_is_flushed_before_the_answer_where_writes_go_to_it() {
    let (through, around) = (Mode::WriteThrough, Mode::WriteAround);
    for case in [
        (through, GuestKind::Batches),
        (around, GuestKind::Batches),
        (around, GuestKind::Relaxed),
        (around, GuestKind::WritesAlone),
    ] {
        let options = support::options(ReactorKind::Threads, config());
        let memory = |bytes| Box::new(MemoryDevice::new(bytes, 512).unwrap());
        let raised = run(memory(CACHE_BYTES), memory(BACKING_BYTES), &options, case, 6_000);
        println!("{case:?}: {raised} watermarks");
        run_on_files(ReactorKind::Auto, case, 3_000);
    }
}

fn run_on_files(kind: ReactorKind, case: (Mode, GuestKind), requests: usize) -> usize {
    let dir = Dir::new(env!("CARGO_TARGET_TMPDIR"), "flush-order");
    let open = |name, bytes, source| {
        let options = FileOptions { source, ..FileOptions::default() };
        let path = dir.file(name, bytes);
        Box::new(FileDevice::open(&path, &options).unwrap())
    };
    let cache = open("cache", CACHE_BYTES, CACHE_SOURCE);
    let backing = open("backing", BACKING_BYTES, backing_source(VolumeIndex(0)));
    run(cache, backing, &support::shared_options(kind, config()), case, requests)
}
