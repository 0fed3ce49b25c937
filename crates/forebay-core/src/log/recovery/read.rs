// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading headers: the first of each segment, and all of some segments.
//!
//! Headers are read many at a time: a device answers many small reads at once in hardly more time
//! than one. And they are read once: what a record holds goes into the slot table when its header is seen, whatever
//! comes of the record. Rows of blocks that are in no log mean nothing.

use super::steps::Steps;
use super::{CacheReader, Recovery};
use crate::format::bytes::FormatError;
use crate::format::entry::Kind;
use crate::format::record::{self, Header, Link};
use crate::limits::RECORD_ENTRIES_MAX;
use crate::map::slots::Held;
use crate::mutant::Mutant;
use crate::units::{BLOCK_SIZE, Ordinal, SegmentId, Sequence, VolumeIndex};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// Headers that are read at once.
pub(super) const BATCH: usize = 256;
/// Segments whose headers are read together: those of one half while those of the other are looked at.
pub(super) const TOGETHER: usize = 2 * BATCH;

/// Segments without a first header that are searched for another, of those that look as if they
/// had never been used. Unused segments are taken in the order of their numbers, so that the newest
/// one of each log is among the first of them.
const BLIND_SEARCHED: usize = 64;

/// The first header of a segment that can be read.
#[derive(Clone, Copy)]
pub(super) struct First {
    pub(super) id: SegmentId,
    block: u16,
    pub(super) header: Header,
    pub(super) checksum: u32,
    held: bool,
}

/// A record that stands, or a hole where one should be.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// `held`: it has nothing but blocks, and they are in the slot table.
    Record {
        id: SegmentId,
        block: u16,
        header: Header,
        checksum: u32,
        held: bool,
    },
    Hole {
        ordinal: Ordinal,
        id: SegmentId,
        block: u16,
    },
}

/// A segment whose records are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) id: SegmentId,
    pub(super) ordinal: Ordinal,
    /// Blocks of it that belong to the log; none: nobody says.
    pub(super) used: Option<u16>,
    /// Only records of this opening count; none: of any.
    pub(super) generation: Option<u32>,
}

/// How far the records of a segment have been read.
struct Progress {
    wanted: Wanted,
    /// Where to stop.
    end: u16,
    block: u16,
    before: Sequence,
    /// The life of the segment that its records are of, once one was seen.
    life: Option<u64>,
    steps: Steps,
}

impl Progress {
    const fn is_open(&self) -> bool {
        self.block < self.end
    }

    /// Where the next header is.
    const fn place(&self) -> (SegmentId, u16) {
        (self.wanted.id, self.block)
    }
}

impl<R: CacheReader> Recovery<'_, R> {
    pub(super) fn address(&self, id: SegmentId, block: u16) -> u64 {
        self.superblock.address(id, block)
    }

    pub(super) fn decode(&self, bytes: &[u8], address: u64) -> Result<(Header, u32), FormatError> {
        let mut copy: Box<[u8; BLOCK_SIZE]> = Box::new([0; BLOCK_SIZE]);
        copy.copy_from_slice(bytes);
        self.decode_there(&mut copy, address)
    }

    /// The same without a copy, for the many: the bytes are as they were afterwards.
    fn decode_there(
        &self,
        bytes: &mut [u8; BLOCK_SIZE],
        address: u64,
    ) -> Result<(Header, u32), FormatError> {
        let identity = self.superblock.identity();
        let anywhere = self.mutants.is(Mutant::IgnoreAddress);
        let address = if anywhere { record::claimed_address(bytes) } else { address };
        match record::decode(bytes, address, &identity) {
            Err(FormatError::Checksum { .. }) if self.mutants.is(Mutant::SkipHeaderChecksum) => {
                Ok((Header::fields(bytes), record::checksum(bytes)))
            }
            other => other.map(|header| (header, record::checksum(bytes))),
        }
    }

    /// Says which blocks will be read after the next ones.
    pub(super) fn will_read(&mut self, places: impl Iterator<Item = (SegmentId, u16)>) {
        let offsets: Vec<u64> =
            places.map(|(id, block)| self.superblock.address(id, block)).collect();
        if !offsets.is_empty() {
            self.reader.will_read(&offsets, BLOCK_SIZE);
        }
    }

    /// Reads these blocks, at most [`BATCH`]; one that cannot be read is zeros, and so no header.
    /// The memory is to be given back.
    pub(super) fn read_blocks(&mut self, places: &[(SegmentId, u16)]) -> Vec<u8> {
        let mut bytes = core::mem::take(&mut self.batch);
        bytes.resize(places.len() * BLOCK_SIZE, 0);
        let at = |place: &(SegmentId, u16)| self.superblock.address(place.0, place.1);
        let offsets: Vec<u64> = places.iter().map(at).collect();
        self.reader.read_each(&offsets, &mut bytes);
        bytes
    }

    /// The first header of every segment: which log it was in, and where.
    pub(super) fn read_firsts(&mut self) {
        let all: Vec<SegmentId> = (0..self.superblock.segment_count).map(SegmentId).collect();
        self.read_firsts_of(&all, 0, usize::MAX);
    }

    /// Reads first headers in this order until more than `run` segments in a row have not been
    /// used since.
    pub(super) fn read_firsts_of(&mut self, ids: &[SegmentId], since: u64, run: usize) {
        let mut unused = 0;
        let mut blind = Vec::new();
        let mut unwritten = 0;
        let mut batches = ids.chunks(BATCH).peekable();
        'all: while let Some(ids) = batches.next() {
            let places: Vec<(SegmentId, u16)> = ids.iter().map(|id| (*id, 0)).collect();
            self.will_read(batches.peek().into_iter().copied().flatten().map(|id| (*id, 0)));
            let mut bytes = self.read_blocks(&places);
            for (id, bytes) in ids.iter().zip(bytes.as_chunks_mut::<BLOCK_SIZE>().0) {
                let address = self.address(*id, 0);
                match self.decode_there(bytes, address) {
                    Ok((header, checksum)) => {
                        let used = header.segment_sequence >= since;
                        unused = if used { 0 } else { unused + 1 };
                        let held = used && self.hold(*id, 0, &header, bytes);
                        self.add_first(First { id: *id, block: 0, header, checksum, held });
                    }
                    Err(_) => {
                        unused += 1;
                        let ours = record::is_of(bytes, address, &self.superblock.identity());
                        unwritten += usize::from(!ours);
                        if ours || unwritten <= BLIND_SEARCHED {
                            blind.push(*id);
                        }
                    }
                }
                if unused > run {
                    break 'all;
                }
            }
            self.batch = bytes;
        }
        // The newest segment of a log is named by nobody: if its first header rotted, the next one
        // in it tells of it.
        for id in blind {
            let found = self.any_header(id, 1, |_, _| true);
            if let Some(first) = found {
                self.add_first(first);
            }
        }
    }

    /// The first header of a segment, from a block on, that can be read and is wanted.
    fn any_header(
        &mut self,
        id: SegmentId,
        from: u16,
        wanted: impl Fn(&Self, &Header) -> bool,
    ) -> Option<First> {
        if !self.is_there(id) {
            return None;
        }
        self.load(id);
        (from..self.superblock.segment_blocks()).find_map(|block| {
            let at = usize::from(block) * BLOCK_SIZE;
            let address = self.address(id, block);
            let found = self.decode(&self.bytes[at..at + BLOCK_SIZE], address).ok();
            let (header, checksum) = found.filter(|(header, _)| wanted(self, header))?;
            Some(First { id, block, header, checksum, held: false })
        })
    }

    fn add_first(&mut self, first: First) {
        let sequence = &mut self.found.segment_sequence;
        *sequence = (*sequence).max(first.header.segment_sequence + 1);
        self.firsts.insert(first.id, first);
    }

    /// All records of these segments of a volume, and the holes between them: headers found by the
    /// length of the record before, and by looking at every block where that leads to none.
    ///
    /// That is safe: a header proves itself by its address, the cache's key and its segment's
    /// ordinal, which nothing a guest wrote can do. Where a log was cut the ordinal comes again, maybe
    /// in the same segment: what the cut left of it is of an older life, and void (V2).
    pub(super) fn read_segments(&mut self, index: VolumeIndex, all: &[Wanted]) -> Vec<Steps> {
        let begin = |wanted: &Wanted| {
            let there = self.is_there(wanted.id);
            let blocks = if there { self.superblock.segment_blocks() } else { 0 };
            let hole = Step::Hole { ordinal: wanted.ordinal, id: wanted.id, block: 0 };
            Progress {
                wanted: *wanted,
                end: wanted.used.unwrap_or(u16::MAX).min(blocks),
                block: 0,
                before: Sequence(0),
                life: None,
                steps: (!there).then_some(hole).into_iter().collect(),
            }
        };
        let mut all: Vec<Progress> = all.iter().map(begin).collect();
        for progress in &mut all {
            let first = self.firsts.get(&progress.wanted.id).filter(|first| first.block == 0);
            if let Some(first) =
                first.copied().filter(|first| self.fits(index, progress, &first.header))
            {
                take(progress, first.header, first.checksum, first.held);
            }
        }
        // One half is on its way while the other is looked at.
        let half = all.len().div_ceil(2).max(1);
        let mut halves = all.chunks_mut(half);
        let mut now = halves.next().unwrap_or_default();
        let mut then = halves.next().unwrap_or_default();
        while now.iter().chain(&*then).any(Progress::is_open) {
            self.will_read(then.iter().filter(|it| it.is_open()).map(Progress::place));
            self.read_next(index, now);
            core::mem::swap(&mut now, &mut then);
        }
        all.into_iter().map(|progress| progress.steps.shrunk()).collect()
    }

    /// Reads the next header of each.
    fn read_next(&mut self, index: VolumeIndex, all: &mut [Progress]) {
        let mut open: Vec<&mut Progress> = all.iter_mut().filter(|it| it.is_open()).collect();
        let places: Vec<(SegmentId, u16)> = open.iter().map(|it| it.place()).collect();
        if places.is_empty() {
            return;
        }
        let mut bytes = self.read_blocks(&places);
        for (progress, bytes) in open.iter_mut().zip(bytes.as_chunks_mut::<BLOCK_SIZE>().0) {
            let (id, block) = progress.place();
            match self.decode_there(bytes, self.address(id, block)) {
                Ok((header, checksum))
                    if self.fits(index, progress, &header)
                        && progress.life.is_none_or(|it| it == header.segment_sequence) =>
                {
                    let held = self.hold(id, block, &header, bytes);
                    take(progress, header, checksum, held);
                }
                _ => self.search(index, progress),
            }
        }
        self.batch = bytes;
    }

    /// Whether a header can be the next record of a segment.
    fn fits(&self, index: VolumeIndex, progress: &Progress, header: &Header) -> bool {
        self.may_be(index, &progress.wanted, header)
            && header.sequence > progress.before
            && progress.block + header.blocks <= progress.end
    }

    fn may_be(&self, index: VolumeIndex, wanted: &Wanted, header: &Header) -> bool {
        let any = self.mutants.is(Mutant::IgnoreGeneration);
        self.belongs(header, index, wanted.ordinal)
            && !self.is_void(wanted.id, header)
            && !self.is_outlived(wanted.id, header.segment_sequence)
            && wanted.generation.is_none_or(|it| any || header.open_generation == it)
    }

    /// Puts what a record holds into the slot table; says whether that is all there is to it.
    fn hold(
        &mut self,
        id: SegmentId,
        block: u16,
        header: &Header,
        head: &[u8; BLOCK_SIZE],
    ) -> bool {
        if header.blocks > self.superblock.segment_blocks() - block
            || usize::from(header.entry_count) > RECORD_ENTRIES_MAX
            || header.blocks != header.entry_count + 1
        {
            return false;
        }
        for number in 0..header.entry_count {
            let entry = match record::entry(head, number) {
                Ok(entry) if entry.slot == number + 1 && entry.kind != Kind::Void => entry,
                Ok(_) | Err(_) => return false,
            };
            let fill = entry.kind == Kind::Fill;
            let slot = self.found.segments.slot(id, block + entry.slot);
            self.found.slots.hold(slot, Held { lba: entry.lba, crc: entry.crc, fill });
        }
        true
    }

    /// Looks at every block from here on; from the start if there is a younger life behind.
    fn search(&mut self, index: VolumeIndex, progress: &mut Progress) {
        let Wanted { id, ordinal, .. } = progress.wanted;
        self.load(id);
        let life = self.youngest_life(index, progress);
        if life > progress.life {
            progress.steps = Steps::default();
            (progress.block, progress.before, progress.life) = (0, Sequence(0), life);
        }
        let mut hole = None;
        while progress.block < progress.end {
            let at = usize::from(progress.block) * BLOCK_SIZE;
            let address = self.address(id, progress.block);
            match self.decode(&self.bytes[at..at + BLOCK_SIZE], address) {
                Ok((header, checksum))
                    if self.fits(index, progress, &header)
                        && progress.life == Some(header.segment_sequence) =>
                {
                    if let Some(block) = hole.take() {
                        progress.steps.push(Step::Hole { ordinal, id, block });
                    }
                    // Rare: it is read again.
                    take(progress, header, checksum, false);
                }
                _ => {
                    hole.get_or_insert(progress.block);
                    progress.block += 1;
                }
            }
        }
        // Where nobody says how far the log goes in it, nothing is missing at its end.
        if let Some(block) = hole.filter(|_| progress.wanted.used.is_some()) {
            progress.steps.push(Step::Hole { ordinal, id, block });
        }
    }

    /// The youngest life of the loaded segment that has a record which could be wanted.
    fn youngest_life(&self, index: VolumeIndex, progress: &Progress) -> Option<u64> {
        let blocks = self.bytes.as_chunks::<BLOCK_SIZE>().0.iter().take(progress.end.into());
        let lives = (0..).zip(blocks).filter_map(|(block, bytes)| {
            let (header, _) = self.decode(bytes, self.address(progress.wanted.id, block)).ok()?;
            let may = self.may_be(index, &progress.wanted, &header)
                && block + header.blocks <= progress.end;
            may.then_some(header.segment_sequence)
        });
        lives.max()
    }

    /// Whether a header is of this place in this volume's log: not of a volume that had the index
    /// before, which counted its segments from one, too.
    pub(super) fn belongs(&self, header: &Header, index: VolumeIndex, ordinal: Ordinal) -> bool {
        let volume = self.superblock.volumes.get(usize::from(index.0)).and_then(Option::as_ref);
        usize::from(header.volume) == usize::from(index.0)
            && header.ordinal == ordinal
            && volume.is_some_and(|volume| header.attach_generation == volume.attach_generation)
    }

    /// Whether a header is of a life of its segment that is known not to be the log's (V8).
    fn is_void(&self, id: SegmentId, header: &Header) -> bool {
        self.void.get(&id).is_some_and(|life| header.segment_sequence <= *life)
    }

    /// Whether a segment has been used again since that life of it. It had been given back before, so nothing of that life is in a
    /// log, whoever's it was (S6 of `log/segment`).
    pub(super) fn is_outlived(&self, id: SegmentId, life: u64) -> bool {
        let younger = |first: &First| first.header.segment_sequence > life;
        !self.mutants.is(Mutant::OutlivedCounts) && self.firsts.get(&id).is_some_and(younger)
    }

    /// Looks no more at what is of this life of a segment, or of one before (V8).
    pub(super) fn give_up(&mut self, index: VolumeIndex, wanted: Wanted, life: u64) {
        let Wanted { id, ordinal, .. } = wanted;
        self.void.insert(id, life);
        if !self.firsts.get(&id).is_some_and(|first| self.is_void(id, &first.header)) {
            return;
        }
        self.firsts.remove(&id);
        if let Some(first) = self.own_header(index, id, ordinal) {
            self.firsts.insert(id, first);
        }
    }

    /// A header of this place in this volume's log: the first one of its segment or, if that rotted, another.
    fn own_header(&mut self, index: VolumeIndex, id: SegmentId, ordinal: Ordinal) -> Option<First> {
        let own = |this: &Self, header: &Header| {
            this.belongs(header, index, ordinal)
                && !this.is_void(id, header)
                && !this.is_outlived(id, header.segment_sequence)
        };
        let first = self.firsts.get(&id).filter(|first| own(self, &first.header)).copied();
        first.or_else(|| self.any_header(id, 0, own))
    }

    /// A segment that has records of a younger life than the header that told what is before it, and the life
    /// of that one. It lies in the place of a header whose write was lost, and is void, with what it tells (V8).
    pub(super) fn outlived(
        &mut self,
        index: VolumeIndex,
        wanted: &[Wanted],
        read: &[Steps],
    ) -> Option<(Wanted, u64)> {
        let headless = |steps: &Steps| matches!(steps.first(), Some(Step::Hole { .. }));
        let mut all = wanted.iter().zip(read).filter(|(_, steps)| headless(steps));
        all.find_map(|(wanted, steps)| {
            let life = steps.iter().find_map(|step| match step {
                Step::Record { header, .. } => Some(header.segment_sequence),
                Step::Hole { .. } => None,
            })?;
            let told = self.own_header(index, wanted.id, wanted.ordinal)?.header.segment_sequence;
            (told < life).then_some((*wanted, told))
        })
    }

    /// Reads a whole segment into `bytes`.
    pub(super) fn load(&mut self, id: SegmentId) {
        if self.in_bytes == Some(id) {
            return;
        }
        self.rewrite_unflushed();
        let address = self.address(id, 0);
        self.in_bytes = Some(id);
        if self.reader.read(address, &mut self.bytes).is_ok() {
            return;
        }
        // Some of it cannot be read: the rest still can.
        for block in 0..self.superblock.segment_blocks() {
            let at = usize::from(block) * BLOCK_SIZE;
            let address = self.address(id, block);
            let bytes = &mut self.bytes[at..at + BLOCK_SIZE];
            if self.reader.read(address, bytes).is_err() {
                bytes.fill(0);
            }
        }
    }

    /// These blocks of the loaded segment stand, and may not be durable (V9).
    pub(super) fn note_unflushed(&mut self, id: SegmentId, block: u16, blocks: u16) {
        assert_eq!(self.in_bytes, Some(id), "it was just looked at");
        match &mut self.unflushed {
            Some((segment, _, end)) if *segment == id && *end == block => *end += blocks,
            _ => {
                self.rewrite_unflushed();
                self.unflushed = Some((id, block, block + blocks));
            }
        }
    }

    /// Writes them again: before another segment is loaded, and at last.
    pub(super) fn rewrite_unflushed(&mut self) {
        let Some((id, first, end)) = self.unflushed.take() else { return };
        if self.mutants.is(Mutant::UnflushedNotRewritten) {
            return;
        }
        let address = self.address(id, first);
        let bytes = usize::from(first) * BLOCK_SIZE..usize::from(end) * BLOCK_SIZE;
        self.reader.rewrite(address, &self.bytes[bytes]);
    }

    /// The segment before `id` in the log, and how much of it belongs to the log, if that is said.
    pub(super) fn predecessor(
        &mut self,
        index: VolumeIndex,
        id: SegmentId,
        ordinal: Ordinal,
    ) -> Option<(SegmentId, Option<u16>)> {
        // Any header of it says the same.
        if let Some(own) = self.own_header(index, id, ordinal) {
            return self.names(&own.header);
        }
        // Nothing of it is left: the youngest segment that claims the place before.
        let before = Ordinal(ordinal.0.checked_sub(1)?);
        self.firsts
            .values()
            .filter(|first| self.belongs(&first.header, index, before))
            .max_by_key(|first| first.header.segment_sequence)
            .map(|first| (first.id, None))
    }

    /// The segment before, as a header names it, and how much of it belongs to the log. It may be gone with a part of the cache: of a
    /// log that has lost all the records in it, which nobody kept it for.
    pub(super) fn names(&self, header: &Header) -> Option<(SegmentId, Option<u16>)> {
        let before = header.previous_segment;
        let begins = match self.mutants.is(Mutant::GoneEndsLog) {
            true => !self.is_there(before),
            false => before == Link::NONE.segment,
        };
        (!begins).then_some((before, Some(header.previous_segment_used)))
    }

    /// Whether the cache has such a segment.
    pub(super) fn is_there(&self, id: SegmentId) -> bool {
        id.0 < self.superblock.segment_count
    }
}

fn take(progress: &mut Progress, header: Header, checksum: u32, held: bool) {
    let (id, block) = (progress.wanted.id, progress.block);
    progress.steps.push(Step::Record { id, block, header, checksum, held });
    progress.before = header.last_sequence();
    progress.life = Some(header.segment_sequence);
    progress.block += header.blocks;
}
