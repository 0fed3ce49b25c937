// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads: from the buffers, the cache device (verified), the backing device, or nothing at all.
//!
//! # Invariants
//!
//! - **R1** A block read from the cache device is answered only if its checksum is right.
//! - **R2** A segment with a read under way is not reused.
//!
//! What the cache does not have is read by `op::miss`; `bad` is what becomes of blocks that are not what was written (R3 to R6).

mod bad;

use crate::effect::{Effect, Fault};
use crate::engine::{Active, Engine, Pending};
use crate::format::bytes::Seed;
use crate::format::entry::Kind;
use crate::map::slots::Held;
use crate::mutant::Mutant;
use crate::op::miss::{Miss, NOBODY, Why};
use crate::payload::{Payload, Place};
use crate::request::{Op, RequestError};
use crate::units::{BLOCK_BYTES, BufferId, Lba, SegmentId, Slot, VolumeIndex};
use crate::volume::Volume;

/// Of a request of many blocks the place in the index is fetched of the one so far ahead of that which is looked for.
const FETCHED_AHEAD: u16 = 8;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Memory { buffer: BufferId, block: u16 },
    Cache { segment: SegmentId, block: u16 },
    Backing,
    Zero,
    Lost,
}

impl Source {
    /// Where the next block is, if the two can be read as one.
    #[inline]
    fn next(self) -> Source {
        match self {
            Source::Memory { buffer, block } => Source::Memory { buffer, block: block + 1 },
            Source::Cache { segment, block } => Source::Cache { segment, block: block + 1 },
            other => other,
        }
    }
}

/// A part of a request that is being read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) request: u32,
    volume: VolumeIndex,
    lba: Lba,
    blocks: u16,
    to: Place,
    source: Source,
    again: Option<bad::Again>,
}

/// The place `blocks` blocks behind.
#[inline]
pub(crate) fn behind(place: Place, blocks: u16) -> Place {
    match place {
        Place::Buffer { buffer, block } => Place::Buffer { buffer, block: block + blocks },
        Place::Request { tag, block } => Place::Request { tag, block: block + blocks },
        Place::Window { frame } => Place::Window { frame: frame + u32::from(blocks) },
        Place::Edge { .. } | Place::Nowhere => {
            assert_eq!(blocks, 0, "it is one block");
            place
        }
    }
}

impl Engine {
    pub(crate) fn read_accept(&mut self, at: u32, payload: &mut impl Payload) {
        let active = *self.requests.get(at).expect("just accepted");
        let volume = active.request.volume;
        let stats = &mut self.volume(volume).stats;
        stats.reads += 1;
        stats.read_blocks += active.blocks;
        let to = Place::Request { tag: active.request.tag, block: 0 };
        self.read_issue(at, volume, active.first, active.blocks as u16, to, payload);
        if self.active(at).stream.is_some() {
            self.ahead_begin(at);
        }
        self.read_finish(at);
    }

    /// Reads `blocks` blocks from wherever they are; what can be had at once is there on return.
    pub(crate) fn read_issue(
        &mut self,
        at: u32,
        volume: VolumeIndex,
        first: Lba,
        blocks: u16,
        to: Place,
        payload: &mut impl Payload,
    ) {
        self.read_parts(at, volume, (first, blocks), to, None, payload);
    }

    /// The same of what was looked for before, and was not read. It may be elsewhere by now (R4 of `bad`, F6 of `op::miss`).
    pub(crate) fn read_again(&mut self, miss: Miss, payload: &mut impl Payload) {
        let Miss { request, volume, lba, blocks, to, why, .. } = miss;
        let fault =
            if why == Why::Repair { Mutant::RepairOverNewer } else { Mutant::FailedOverNewer };
        if self.config.mutants.is(fault) {
            return self.miss_begin(Miss { next: NOBODY, ..miss }, payload);
        }
        self.read_parts(request, volume, (lba, blocks), to, Some(why), payload);
    }

    /// Of what is missing it is known why it is read, or is found out.
    fn read_parts(
        &mut self,
        at: u32,
        volume: VolumeIndex,
        (first, blocks): (Lba, u16),
        to: Place,
        mut why: Option<Why>,
        payload: &mut impl Payload,
    ) {
        if self.volume(volume).is_passing() && !self.config.mutants.is(Mutant::PassedStillRead) {
            let why = why.unwrap_or_else(|| self.why_read(at));
            return self.miss_begin(Miss::new(at, volume, (first, blocks), to, why), payload); // X3 of `op/stale`
        }
        let mut done = 0;
        while done < blocks {
            let source = self.locate(volume, first + u64::from(done));
            let mut run = 1;
            let mut last = source;
            while done + run < blocks {
                if blocks - done - run > FETCHED_AHEAD {
                    let soon = u64::from(done + run + FETCHED_AHEAD);
                    self.fetch_place(volume, first + soon, payload);
                }
                let next = self.locate(volume, first + u64::from(done + run));
                if next != last.next() {
                    break;
                }
                last = next;
                run += 1;
            }
            let (lba, part) = (first + u64::from(done), behind(to, done));
            if source == Source::Backing {
                let why = *why.get_or_insert_with(|| self.why_read(at));
                let miss = Miss::new(at, volume, (lba, run), part, why);
                match self.across(miss, blocks - done, payload) {
                    Some(miss) => {
                        self.across_begin(miss);
                        run = miss.blocks;
                    }
                    None => self.miss_begin(miss, payload),
                }
            } else {
                let piece =
                    Piece { request: at, volume, lba, blocks: run, to: part, source, again: None };
                self.read_piece(piece, payload);
            }
            done += run;
        }
    }

    /// Why a request reads from the backing device.
    #[cold]
    fn why_read(&mut self, at: u32) -> Why {
        let request = self.active(at).request;
        if request.op != Op::Read {
            return Why::Edge;
        }
        // In whole blocks, counted from the one where it begins: one that goes on where this one ends,
        // within a block, is seen to go on.
        let begin = Lba(request.offset / BLOCK_BYTES);
        let blocks = (request.offset + request.length) / BLOCK_BYTES - begin.0;
        let run = self.reads.touch(request.volume, begin, blocks);
        let Active { first, blocks, stream, .. } = *self.active(at);
        // What passes the log is not looked for there, nor before it is asked for.
        if self.ahead.is_on() && stream.is_none() && !self.volume(request.volume).is_passing() {
            self.active(at).stream = Some(self.ahead.streams.touch(request.volume, first, blocks));
        }
        if run > self.config.fill_run_max.into() { Why::Run } else { Why::Read }
    }

    fn read_piece(&mut self, piece: Piece, payload: &mut impl Payload) {
        let Piece { volume, blocks, to, .. } = piece;
        // What a write covers in part the guest does not read.
        let counts = matches!(to, Place::Request { .. });
        let read = if counts { u64::from(blocks) } else { 0 };
        match piece.source {
            Source::Zero => {
                self.volume(volume).stats.zero_blocks += read;
                payload.zero(to, blocks);
            }
            Source::Memory { buffer, block } => {
                self.volume(volume).stats.hit_blocks += read;
                payload.copy(Place::Buffer { buffer, block }, to, blocks);
            }
            Source::Lost => self.fail(piece.request, RequestError::Io),
            Source::Cache { segment, block } => {
                self.volume(volume).stats.hit_blocks += read;
                self.active(piece.request).remaining += 1;
                self.read_cache(piece, (segment, block), blocks, to, payload);
            }
            Source::Backing => unreachable!("it is a miss"),
        }
    }

    /// Has blocks of a piece read from the cache device.
    fn read_cache(
        &mut self,
        piece: Piece,
        (segment, block): (SegmentId, u16),
        blocks: u16,
        to: Place,
        payload: &mut impl Payload,
    ) {
        self.segments.get_mut(segment).readers += 1; // R2
        payload.prefetch(self.slots.row(self.segments.slot(segment, block)));
        let token = self.token(Pending::Read(piece));
        self.effects.push_back(Effect::ReadCache { token, segment, block, blocks, to });
    }

    /// A piece was read, or a block of it for the second time.
    pub(crate) fn read_complete(
        &mut self,
        piece: Piece,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let Source::Cache { segment, block } = piece.source else {
            unreachable!("all else is read at once, or is a miss");
        };
        let (mut well, mut fills) = (0, 0);
        if piece.again.is_none() && result.is_ok() {
            // Nearly always all of it.
            while well < piece.blocks
                && let Some(held) =
                    self.verified(segment, block + well, behind(piece.to, well), payload)
            {
                fills += u64::from(held.fill);
                well += 1;
            }
        }
        let goes_on = well < piece.blocks && self.read_on(piece, well, result, payload);
        self.volume(piece.volume).stats.fill_hit_blocks += fills;
        self.segments.get_mut(segment).readers -= 1;
        if !goes_on {
            self.read_part_done(piece.request);
        }
    }

    /// A part of a request was read.
    #[inline]
    pub(crate) fn read_part_done(&mut self, request: u32) {
        self.active(request).remaining -= 1;
        self.read_finish(request);
    }

    /// Whether the block that was read from `segment`, `block` is what was written there (R1).
    pub(crate) fn verify(
        &mut self,
        segment: SegmentId,
        block: u16,
        place: Place,
        payload: &mut impl Payload,
    ) -> bool {
        self.verified(segment, block, place, payload).is_some()
    }

    /// What the slot holds, if that is what was read.
    #[inline]
    fn verified(
        &mut self,
        segment: SegmentId,
        block: u16,
        place: Place,
        payload: &mut impl Payload,
    ) -> Option<Held> {
        let held = self.slots.held(self.segments.slot(segment, block));
        let seed = self.seed(segment, block);
        let unchecked = self.config.mutants.is(Mutant::SkipReadChecksum);
        held.filter(|held| unchecked || seed.apply(payload.checksum(place)) == held.crc)
    }

    /// The seed of a block's checksum in the present life of its segment.
    #[inline]
    pub(crate) fn seed(&self, segment: SegmentId, block: u16) -> Seed {
        let address = self.geometry.address(segment, block);
        Seed::new(self.identity.key, address, self.segments.get(segment).sequence)
    }

    /// The slot that holds a block's newest version; none if an extent is newer, or nothing holds it.
    pub(crate) fn newest_slot(&self, state: &Volume, lba: Lba) -> Option<Slot> {
        let slot = self.index.get(state.index, lba)?;
        let (id, block) = self.segments.place(slot);
        let position = self.segments.position(id, block);
        let over = state.extents.get(lba).is_some_and(|extent| extent.position > position);
        (!over).then_some(slot)
    }

    /// Whether a slot holds the newest version of a block.
    pub(crate) fn is_newest(&self, volume: VolumeIndex, lba: Lba, slot: Slot) -> bool {
        self.newest_slot(self.volume_ref(volume).expect("it exists"), lba) == Some(slot)
    }

    /// After pieces were issued or completed: goes on if none is left.
    #[inline]
    fn read_finish(&mut self, at: u32) {
        let active = self.active(at);
        if active.remaining > 0 {
            return;
        }
        let result = active.failed.map_or(Ok(()), Err);
        match active.request.op {
            Op::Read | Op::Fetch => self.answer(at, result),
            _ => self.edges_done(at, result),
        }
    }

    /// Where a block is now. Of data and extent the one placed later counts.
    #[inline]
    pub(crate) fn locate(&mut self, volume: VolumeIndex, lba: Lba) -> Source {
        let slot = self.index.read(volume, lba);
        let mutants = self.config.mutants;
        let Engine { volumes, segments, .. } = self;
        let extents = &volumes[usize::from(volume.0)].as_deref().expect("it exists").extents;
        let extent = if extents.is_empty() { None } else { extents.get(lba) };
        if let Some(slot) = slot {
            let (id, block) = segments.place(slot);
            let position = segments.position(id, block);
            let segment = segments.get_mut(id);
            segment.was_read = true;
            let newer = match extent {
                None => true,
                Some(_) if mutants.is(Mutant::DataAlwaysWins) => true,
                Some(_) if mutants.is(Mutant::ExtentAlwaysWins) => false,
                Some(extent) => position >= extent.position,
            };
            if newer {
                return match segment.buffer {
                    Some(buffer) => Source::Memory { buffer, block },
                    None => Source::Cache { segment: id, block },
                };
            }
        }
        match extent.map(|extent| extent.kind) {
            Some(Kind::Zero | Kind::Discard) => Source::Zero,
            Some(Kind::Lost) => Source::Lost,
            _ => Source::Backing,
        }
    }

    /// Whether what a slot holds is not on the backing device.
    pub(crate) fn is_dirty_slot(&self, id: SegmentId, block: u16) -> bool {
        let segment = self.segments.get(id);
        let Some(volume) = self.volume_ref(segment.volume) else { return true };
        let fill = self.slots.held(self.segments.slot(id, block)).is_some_and(|held| held.fill);
        if fill || segment.last_sequence <= volume.log.watermark {
            return false;
        }
        // The watermark lies at a record's end: dirty if this block's record is behind it.
        let mut header = 0;
        loop {
            let heading = self.slots.heading(self.segments.slot(id, header));
            if block < header + heading.blocks {
                let first = segment.first_sequence.0 + u64::from(heading.sequence_offset);
                return first > volume.log.watermark.0;
            }
            header += heading.blocks;
        }
    }

    #[inline]
    pub(crate) fn active(&mut self, at: u32) -> &mut crate::engine::Active {
        self.requests.get_mut(at).expect("the request is in the engine")
    }

    pub(crate) fn fail(&mut self, at: u32, error: RequestError) {
        self.active(at).failed = Some(error);
    }
}
