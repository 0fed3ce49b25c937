// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading a checkpoint back into place: first what is small ([`read`]), which tells where its runs
//! lie and where the log goes on; then the slots, over which the log's own rows are put; at last, when it is known which
//! segments were used again, the index without them.
//!
//! Nothing of it is believed before its checksum is right; if any page is bad, all of it is left
//! alone and the log is read instead.

use crate::format::FormatError;
use crate::format::checkpoint::{
    self, Head, Layout, PAGE_BYTES, PAGE_HEAD, PAGE_SEGMENTS, PAGE_SLOTS, PAGE_WORDS,
    SEGMENT_BYTES, Written,
};
use crate::format::entry::Kind;
use crate::format::record::{self, Link};
use crate::format::superblock::{self, Superblock};
use crate::limits::{
    ORDINAL_MAX, RECORD_ITEMS_MAX, SEQUENCE_MAX, VOLUME_BLOCKS_MAX, VOLUME_COUNT_MAX,
};
use crate::log::recovery::{CacheReader, Stretch};
use crate::map::extent::{Extent, Position};
use crate::map::index::{Index, MAP_WORDS, PACKED_WORDS_MAX, PAGE_CELLS};
use crate::map::slots::{self, Slots};
use crate::mutant::{Mutant, Mutants};
use crate::units::{BLOCK_SIZE, Lba, Ordinal, SegmentId, Sequence, Slot, VolumeIndex};
use crate::volume::PendingExtent;
use alloc::vec::Vec;

/// Beside a volume's index: its map lacks clean blocks that the log has. (A program from before takes no such checkpoint.)
pub(crate) const FORGOT: u64 = 1 << 8;
/// Pages of one read.
const RUN_PAGES: u32 = 256;
/// Reads that are under way at once.
const RUNS: u32 = 2;

/// A segment that was in a log when its row was copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) id: SegmentId,
    pub(crate) volume: VolumeIndex,
    pub(crate) used: u16,
    pub(crate) sequence: u64,
    pub(crate) ordinal: Ordinal,
    pub(crate) first_sequence: Sequence,
    pub(crate) last_sequence: Sequence,
}

impl Row {
    /// Whether all of it can be: a right checksum says that it is what was written, no more.
    pub(crate) fn is_sound(&self, superblock: &Superblock) -> bool {
        self.used <= superblock.segment_blocks()
            && self.sequence < SEQUENCE_MAX
            && self.ordinal.0 < ORDINAL_MAX
            && self.first_sequence <= self.last_sequence
            && self.last_sequence.0 < SEQUENCE_MAX
    }
}

/// A volume as the checkpoint captured it.
#[derive(Debug)]
pub(crate) struct ImageVolume {
    pub(crate) index: VolumeIndex,
    /// The map lacks clean blocks that the log has.
    pub(crate) forgot: bool,
    pub(crate) attach_generation: u32,
    /// Where its log ended.
    pub(crate) start: superblock::Head,
    pub(crate) next_sequence: Sequence,
    pub(crate) watermark: Sequence,
    pub(crate) tail: Ordinal,
    /// Below it segments have been used again, as recovery finds out: they were given back, whatever record told so.
    pub(crate) outlived: Ordinal,
    pub(crate) flush_epoch: u64,
    pub(crate) backing_as_of: u64,
    pub(crate) dirtied: Sequence,
    pub(crate) extents: Vec<Extent>,
    pub(crate) pending: Vec<PendingExtent>,
    /// What the header of its last record says; none: a program from before captured it.
    pub(crate) last: Option<LastRecord>,
}

/// What must be known of the last record before a checkpoint, so that nobody needs its header.
#[derive(Debug)]
pub(crate) struct LastRecord {
    /// Its flush epoch, if that was known.
    pub(crate) epoch: Option<u64>,
    /// What it holds, as the next one's header says it.
    pub(crate) items: Vec<u64>,
}

impl ImageVolume {
    pub(crate) fn is_sound(&self, superblock: &Superblock) -> bool {
        let start = &self.start;
        let sequences = [start.link.sequence, start.through, self.next_sequence, self.watermark];
        let positions = self.pending.iter().map(|pending| pending.position);
        let mut positions = self.extents.iter().map(|extent| extent.position).chain(positions);
        sequences.iter().chain([&self.dirtied]).all(|it| it.0 < SEQUENCE_MAX)
            && start.ordinal.0 < ORDINAL_MAX
            && self.tail.0 < ORDINAL_MAX
            && self.flush_epoch < SEQUENCE_MAX
            && superblock.check_head(start).is_ok()
            && self.last.as_ref().is_none_or(|last| record::are_items(&last.items))
            && self
                .extents
                .iter()
                .all(|extent| extent.start < extent.end && extent.end.0 <= VOLUME_BLOCKS_MAX)
            && positions.all(|position| position.ordinal().0 < ORDINAL_MAX)
            && self.pending.iter().all(|pending| {
                let end = pending.lba.0.saturating_add(pending.count.into());
                pending.sequence.0 < SEQUENCE_MAX && end <= VOLUME_BLOCKS_MAX
            })
    }
}

/// A checkpoint, but for its index and slots.
#[derive(Debug)]
pub(crate) struct Image {
    layout: Layout,
    /// Pages of each run of the index.
    index_runs: Vec<u32>,
    /// Where each run of slots is.
    pub(crate) slot_runs: Vec<Written>,
    pub(crate) rows: Vec<Row>,
    pub(crate) volumes: Vec<ImageVolume>,
    /// The free pool, in its order.
    pub(crate) free: Vec<SegmentId>,
    /// The next segment sequence when it began.
    pub(crate) segment_sequence: u64,
}

/// Reads what is small of the checkpoint that the superblock names; none: there is none, or it is
/// damaged.
pub(crate) fn read<R: CacheReader>(
    superblock: &Superblock,
    reader: &mut R,
    mutants: Mutants,
) -> Option<Image> {
    if superblock.checkpoint_sequence == 0 {
        return None;
    }
    let mut pages = Pages::new(superblock, reader, mutants);
    let head = Head::decode(pages.page(0)?, superblock).ok()?;
    let layout = head.layout;
    pages.total = layout.stream_page() + head.stream_pages;
    let mut number = layout.segment_page();
    let mut rows = Vec::with_capacity(superblock.segment_count as usize);
    for page in 0..layout.segment_pages {
        let first = page * PAGE_SEGMENTS as u32;
        let bytes = pages.page(number)?;
        let raws = bytes[PAGE_HEAD..].as_chunks::<SEGMENT_BYTES>().0.iter().take(PAGE_SEGMENTS);
        let ids = (first..superblock.segment_count).map(SegmentId);
        for row in ids.zip(raws).filter_map(|(id, raw)| row(id, raw)) {
            if !row.is_sound(superblock) {
                return None;
            }
            rows.push(row);
        }
        number += 1;
    }
    let run_count = layout.index_runs() + layout.slot_runs();
    let mut runs = Vec::with_capacity(run_count as usize);
    for page in 0..layout.run_pages() {
        let words = pages.page(number)?[PAGE_HEAD..].as_chunks::<8>().0.iter();
        let left = run_count as usize - page as usize * PAGE_WORDS;
        runs.extend(words.take(left).map(|word| u64::from_le_bytes(*word)));
        number += 1;
    }
    let slot_runs = runs.split_off(layout.index_runs() as usize);
    let room = u64::from(layout.index_run_pages());
    if runs.iter().any(|pages| *pages == 0 || *pages > room) {
        return None;
    }
    let index_runs = runs.into_iter().map(|pages| pages as u32).collect();
    let slot_runs: Vec<Written> = slot_runs.into_iter().map(Written::from_raw).collect();
    if slot_runs.iter().any(|run| run.sequence() > superblock.checkpoint_sequence) {
        return None;
    }
    let mut stream = Vec::with_capacity(head.stream_bytes as usize);
    for _ in 0..head.stream_pages {
        stream.extend_from_slice(&pages.page(number)?[PAGE_HEAD..PAGE_HEAD + PAGE_BYTES]);
        number += 1;
    }
    stream.truncate(head.stream_bytes as usize);
    let mut stream = Stream { bytes: &stream };
    let count = stream.u32().filter(|count| *count as usize <= VOLUME_COUNT_MAX)?;
    let mut volumes = Vec::new();
    for _ in 0..count {
        volumes.push(stream.volume()?);
    }
    let mut free = Vec::new();
    for _ in 0..stream.u32()? {
        free.push(SegmentId(stream.u32().filter(|id| *id < superblock.segment_count)?));
    }
    // A program from before ends here.
    if !stream.bytes.is_empty() {
        for volume in &mut volumes {
            volume.last = Some(stream.last_record()?);
        }
    }
    if !volumes.iter().all(|volume| volume.is_sound(superblock)) {
        return None;
    }
    let segment_sequence = head.segment_sequence;
    Some(Image { layout, index_runs, slot_runs, rows, volumes, free, segment_sequence })
}

/// Reads its slots.
pub(crate) fn read_slots<R: CacheReader>(
    superblock: &Superblock,
    image: &Image,
    reader: &mut R,
    mutants: Mutants,
) -> Option<Slots> {
    let mut slots = Slots::of(reader.rows(slot_count(superblock) as usize));
    let layout = &image.layout;
    let stretches: Vec<Stretch> = (0..)
        .zip(&image.slot_runs)
        .map(|(number, run)| {
            let items = layout.slots_of(number).len();
            let blocks = if *run == Written::NEVER { 0 } else { items.div_ceil(PAGE_SLOTS) as u32 };
            let offset = checkpoint::address(superblock, run.area(), layout.slot_page(number));
            Stretch { offset, blocks, items }
        })
        .collect();
    reader.fill(&stretches, slots.rows_mut(), |number, pages, rows| {
        let run = image.slot_runs[number];
        let parts = rows.chunks_mut(PAGE_SLOTS).zip(pages);
        for (page, (rows, bytes)) in (layout.slot_page(number as u32)..).zip(parts) {
            open(superblock, run, page, bytes, mutants)?;
            slots::put_rows(rows, &bytes[PAGE_HEAD..]);
        }
        Some(0)
    })?;
    Some(slots)
}

/// Reads its index, but the cells of slots that `keep` does not want.
pub(crate) fn read_index<R: CacheReader>(
    superblock: &Superblock,
    image: &Image,
    reader: &mut R,
    mutants: Mutants,
    keep: impl Fn(Slot) -> bool + Sync,
) -> Option<Index> {
    let slots = slot_count(superblock);
    let cells = reader.cells(Index::cell_count(slots));
    let mut index = Index::over(slots, superblock.key, cells);
    let shape = index.shape();
    let (layout, own) = (&image.layout, own(superblock));
    let stretches: Vec<Stretch> = (0..)
        .zip(&image.index_runs)
        .map(|(number, blocks)| Stretch {
            offset: checkpoint::address(superblock, own.area(), layout.index_page(number)),
            blocks: *blocks,
            items: layout.index_pages_of(number).len() * PAGE_CELLS,
        })
        .collect();
    let used = reader.fill(&stretches, index.cells_mut(), |number, pages, cells| {
        for (page, bytes) in (layout.index_page(number as u32)..).zip(pages.iter_mut()) {
            open(superblock, own, page, bytes, mutants)?;
        }
        let mut words = Words { pages, at: 0 };
        let mut packed = [0; PACKED_WORDS_MAX];
        let mut all = 0;
        for cells in cells.chunks_mut(PAGE_CELLS) {
            let (map, used) = packed.split_first_chunk_mut::<MAP_WORDS>()?;
            words.take(map)?;
            let count: u32 = map.iter().map(|word| word.count_ones()).sum();
            let used = used.get_mut(..count as usize)?;
            words.take(used)?;
            all += shape.put_page(cells, map, used, &keep)?;
        }
        Some(all)
    })?;
    index.count(used);
    Some(index)
}

/// The words of a run, from the front.
struct Words<'a> {
    pages: &'a [[u8; BLOCK_SIZE]],
    at: usize,
}

impl Words<'_> {
    fn take(&mut self, mut words: &mut [u64]) -> Option<()> {
        while !words.is_empty() {
            let content = &self.pages.get(self.at / PAGE_WORDS)?[PAGE_HEAD..];
            let content = &content.as_chunks::<8>().0[self.at % PAGE_WORDS..];
            let count = content.len().min(words.len());
            for (word, raw) in words.split_off_mut(..count)?.iter_mut().zip(content) {
                *word = u64::from_le_bytes(*raw);
            }
            self.at += count;
        }
        Some(())
    }
}

/// How this checkpoint's own pages were written.
fn own(superblock: &Superblock) -> Written {
    Written::new(superblock.checkpoint_sequence, superblock.checkpoint_sequence)
}

pub(crate) fn slot_count(superblock: &Superblock) -> u64 {
    u64::from(superblock.segment_count) * u64::from(superblock.segment_blocks())
}

/// Checks a page.
fn open(
    superblock: &Superblock,
    by: Written,
    page: u32,
    bytes: &mut [u8; BLOCK_SIZE],
    mutants: Mutants,
) -> Option<()> {
    let address = checkpoint::address(superblock, by.area(), page);
    match checkpoint::open(bytes, &superblock.identity(), address, by.sequence(), page) {
        Err(FormatError::Checksum { .. }) if mutants.is(Mutant::SkipPageChecksum) => Some(()),
        other => other.ok(),
    }
}

/// A segment that was in a log, as [`Engine::fill_segment`](crate::engine::Engine::fill_segment) wrote it.
pub(crate) fn row(id: SegmentId, raw: &[u8; SEGMENT_BYTES]) -> Option<Row> {
    (raw[0] == 1).then(|| Row {
        id,
        volume: VolumeIndex(raw[1]),
        used: u16::from_le_bytes([raw[2], raw[3]]),
        sequence: u64_at(raw, 8),
        ordinal: Ordinal(u64_at(raw, 16)),
        first_sequence: Sequence(u64_at(raw, 24)),
        last_sequence: Sequence(u64_at(raw, 32)),
    })
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    crate::format::bytes::get_u64(bytes, at)
}

/// Pages, read in long runs and checked one by one.
struct Pages<'a, R> {
    superblock: &'a Superblock,
    reader: &'a mut R,
    bytes: Vec<u8>,
    first: u32,
    count: u32,
    total: u32,
    mutants: Mutants,
}

impl<'a, R: CacheReader> Pages<'a, R> {
    fn new(superblock: &'a Superblock, reader: &'a mut R, mutants: Mutants) -> Pages<'a, R> {
        Pages { superblock, reader, bytes: Vec::new(), first: 0, count: 0, total: 1, mutants }
    }

    fn page(&mut self, number: u32) -> Option<&[u8; BLOCK_SIZE]> {
        if number < self.first || number >= self.first + self.count {
            self.read(number);
        }
        let at = (number - self.first) as usize * BLOCK_SIZE;
        let page = self.bytes.get_mut(at..)?.first_chunk_mut::<BLOCK_SIZE>()?;
        open(self.superblock, own(self.superblock), number, page, self.mutants)?;
        Some(page)
    }

    /// Reads pages from this one on: whole runs at once, or what is left.
    fn read(&mut self, number: u32) {
        let (run, offsets) = self.runs(number);
        (self.first, self.count) = (number, run * offsets.len() as u32);
        let ahead = self.first + self.count;
        if ahead < self.total {
            let (run, offsets) = self.runs(ahead);
            self.reader.will_read(&offsets, run as usize * BLOCK_SIZE);
        }
        self.bytes.resize(self.count as usize * BLOCK_SIZE, 0);
        self.reader.read_each(&offsets, &mut self.bytes);
    }

    /// How long each read is, and where they begin.
    fn runs(&self, number: u32) -> (u32, Vec<u64>) {
        let left = self.total - number;
        let runs = (left / RUN_PAGES).min(RUNS);
        let run = if runs == 0 { left } else { RUN_PAGES };
        let area = own(self.superblock).area();
        let at = |at| checkpoint::address(self.superblock, area, number + at * run);
        (run, (0..runs.max(1)).map(at).collect())
    }
}

/// What was captured, taken off from the front.
pub(crate) struct Stream<'a> {
    pub(crate) bytes: &'a [u8],
}

impl Stream<'_> {
    pub(crate) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.bytes.split_first_chunk::<N>()?;
        self.bytes = rest;
        Some(*first)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn kind(&mut self) -> Option<Kind> {
        Kind::decode(self.take::<1>()?[0])
    }

    /// A number that takes more room than it needs.
    pub(crate) fn narrow<T: TryFrom<u64>>(&mut self) -> Option<T> {
        self.u64()?.try_into().ok()
    }

    /// A volume's last record, as `capture_last` of [`super::checkpoint`] wrote it.
    fn last_record(&mut self) -> Option<LastRecord> {
        let epoch = Some(self.u64()?).filter(|epoch| *epoch != u64::MAX);
        let count = self.u64().filter(|count| *count <= RECORD_ITEMS_MAX as u64)?;
        let items = (0..count).map(|_| self.u64()).collect::<Option<_>>()?;
        Some(LastRecord { epoch, items })
    }

    /// A volume, as [`Engine::capture_volume`](crate::engine::Engine::capture_volume) wrote it.
    pub(crate) fn volume(&mut self) -> Option<ImageVolume> {
        let index = self.u64()?;
        let forgot = index & FORGOT != 0;
        let index = VolumeIndex(u8::try_from(index & !FORGOT).ok()?);
        let attach_generation = self.narrow()?;
        let link = Link {
            sequence: Sequence(self.u64()?),
            checksum: self.narrow()?,
            segment: SegmentId(self.narrow()?),
            block: self.narrow()?,
        };
        let through = Sequence(self.u64()?);
        let used = self.narrow()?;
        let ordinal = Ordinal(self.u64()?);
        let start = match link {
            Link::NONE => superblock::Head::NONE,
            link => superblock::Head { link, through, used, ordinal },
        };
        let mut volume = ImageVolume {
            index,
            forgot,
            attach_generation,
            start,
            next_sequence: Sequence(self.u64()?),
            watermark: Sequence(self.u64()?),
            tail: Ordinal(self.u64()?),
            outlived: Ordinal(0),
            flush_epoch: self.u64()?,
            backing_as_of: self.u64()?,
            dirtied: Sequence(self.u64()?),
            extents: Vec::new(),
            pending: Vec::new(),
            last: None,
        };
        let (extents, pending) = (self.u64()?, self.u64()?);
        for _ in 0..extents {
            volume.extents.push(Extent {
                start: Lba(self.u64()?),
                end: Lba(self.u64()?),
                position: Position::from_raw(self.u64()?),
                kind: self.kind()?,
                long: self.take::<1>()?[0] == 1,
            });
        }
        for _ in 0..pending {
            volume.pending.push(PendingExtent {
                sequence: Sequence(self.u64()?),
                position: Position::from_raw(self.u64()?),
                kind: self.kind()?,
                lba: Lba(self.u64()?),
                count: self.u32()?,
            });
        }
        Some(volume)
    }
}
