// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Scrub: what the logs hold on the cache device is read in the background, before somebody needs it.
//!
//! It goes through each log from its tail to where the log ended when the scrub came to it, by the slot table: header by
//! header, block by block, superseded versions included. Segments that are still in memory are left out: reads and
//! write-back find them there.
//!
//! # Invariants
//!
//! - **H1** Bad is what was read twice and was wrong, or could not be read, both times. What is good is left as it is.
//! - **H2** Only a block that the backing device has is healed: its copy is forgotten (as a guest's read would do, R3),
//!   and what the backing device holds is copied again with a ticket that was taken before it was read (T1 to T3 of
//!   `log::tickets`) and where there is room for fills (F2 of `op::miss`).
//! - **H3** A bad block that only the cache has is told, if it is the block's newest version, and left as it is: it may be read again
//!   yet, and write-back finds out (R6 of `op::read::bad`). An older version nobody will read but write-back.
//! - **H4** Of a record whose header is bad every entry is in memory. If a crash could still need the header, everything is put
//!   where none does: at once into a checkpoint that begins behind a later record (whoever opens from a checkpoint reads
//!   the last header before it), and the dirty part onto the backing device. Until then the scrub has not ended.
//! - **H5** One thing is under way at a time: a read of at most [`PIECE_BLOCKS`] of the cache device, no sooner than the
//!   rate lets it, or a block from the backing device, in the foreground's turn.
//! - **H6** A segment is not given back while it is read (R2), a volume not detached.
//!
//! # Crash
//!
//! How far it had come is forgotten, and so is what the last one found: both are in memory only.
//!
//! # Not here
//!
//! When it begins by itself: the program's matter. Superblocks and checkpoints are not read: they are judged when the cache is
//! opened, have a second copy or are made anew.

use crate::effect::{Effect, Fault, Token};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::format::record::Known;
use crate::log::segment::State;
use crate::log::tickets::Ticket;
use crate::mutant::Mutant;
use crate::op::read::behind;
use crate::payload::{Payload, Place};
use crate::policy::lane::Lane;
use crate::policy::slices::Side;
use crate::units::{BLOCK_BYTES, Lba, Ordinal, SegmentId, Sequence, Slot, Tick, VolumeIndex};
use crate::volume::Volume;

/// Blocks of one read: what a guest's read waits for on a slow SSD is not more than its own time.
pub const PIECE_BLOCKS: u16 = crate::limits::BACKGROUND_BLOCKS as u16;
/// Frames it has: a piece's, and one for what is read again.
pub(crate) const FRAMES: u32 = PIECE_BLOCKS as u32 + 1;
/// Bad blocks that nothing else has, and that are kept by name.
pub const LOST_NAMED: usize = 8;
/// Effects that others may need more.
const TOKENS_KEPT: usize = 64;

/// How a scrub ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// There was none since the cache was opened.
    #[default]
    Never,
    /// It has not ended.
    Running,
    /// All was read.
    Completed,
    /// It was told to stop.
    Stopped,
    /// The cache device failed.
    Failed,
}

/// The scrub that runs, or the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How it is.
    pub outcome: Outcome,
    /// The volume that it is about; none: all.
    pub only: Option<VolumeIndex>,
    /// Wall clock, milliseconds since 1970.
    pub began_at: u64,
    /// The same; 0: it has not ended.
    pub ended_at: u64,
    /// Blocks that the logs had when it began, headers included.
    pub total_blocks: u64,
    /// Blocks that were read, good or bad.
    pub verified_blocks: u64,
    /// Bad copies of what the backing device holds: forgotten, and made anew where there was room.
    pub healed_blocks: u64,
    /// Bad blocks that nothing else has.
    pub lost_blocks: u64,
    /// Bad blocks that nobody needs any more: newer ones have replaced them.
    pub unneeded_blocks: u64,
    /// Headers of records that are bad.
    pub bad_headers: u64,
    /// Of these, how many no crash needs any more.
    pub saved_headers: u64,
    /// The first that nothing else has.
    pub lost: [Option<(VolumeIndex, Lba)>; LOST_NAMED],
}

/// Why no scrub begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// One is running.
    Running,
    /// The cache device has failed.
    Failed,
    /// The volume is not served.
    NotServed,
}

/// Blocks of a segment, in one of its lives.
#[derive(Clone, Copy, Debug)]
struct Spot {
    segment: SegmentId,
    life: u64,
    block: u16,
    /// The first header at or behind `block`.
    header: u16,
}

/// A scrub that is running.
#[derive(Clone, Copy, Debug)]
struct Run {
    volume: VolumeIndex,
    /// What is read next; none: the volume's log from its tail on.
    next: Option<Spot>,
    /// The volume's last segment.
    end: Ordinal,
    /// Not before that.
    due: Tick,
    /// What was read last, and which of it was bad.
    piece: Spot,
    bad: u32,
}
const _: () = assert!(PIECE_BLOCKS as u32 <= u32::BITS);

/// State of the scrub.
#[derive(Debug, Default)]
pub(crate) struct Scrub {
    run: Option<Run>,
    /// Runs so far: what an older one left under way is for nothing.
    number: u32,
    /// Whose log or device something of it is under way on.
    under_way: Option<VolumeIndex>,
    report: Report,
    /// Bad headers that no checkpoint has saved which is begun.
    unsaved: u64,
    /// Those that the one under way saves.
    saving: u64,
}

/// An effect of a scrub.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    number: u32,
    volume: VolumeIndex,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Read { at: Spot, blocks: u16, again: bool },
    Heal { lba: Lba, ticket: Ticket, frame: u32, begun: Tick },
}

impl Work {
    /// The backing device is asked for a block.
    pub(crate) fn begin(&mut self, token: Token, now: Tick) -> Effect {
        let What::Heal { lba, frame, begun, .. } = &mut self.what else {
            unreachable!("only the backing device is asked in turn");
        };
        *begun = now;
        let (lba, to) = (*lba, Place::Window { frame: *frame });
        Effect::ReadBacking { token, volume: self.volume, lba, blocks: 1, to }
    }
}

impl Engine {
    /// Begins a scrub of a volume's log, or of all.
    pub fn scrub(
        &mut self,
        only: Option<VolumeIndex>,
        payload: &mut impl Payload,
    ) -> Result<(), Refused> {
        if self.scrub.run.is_some() {
            return Err(Refused::Running);
        }
        if self.health == CacheHealth::Failed {
            return Err(Refused::Failed);
        }
        let wanted = |volume: &&Volume| only.is_none_or(|only| only == volume.index);
        let served = |volume: &&Volume| volume.serving;
        if only.is_some() && self.all_volumes().filter(wanted).filter(served).count() == 0 {
            return Err(Refused::NotServed);
        }
        let blocks = u64::from(self.geometry.segment_blocks);
        let segments = self.all_volumes().filter(wanted).filter(served);
        let total = segments.map(|volume| u64::from(volume.log.segment_count)).sum::<u64>();
        self.scrub.report = Report {
            outcome: Outcome::Running,
            only,
            began_at: self.wall,
            total_blocks: total * blocks,
            ..Report::default()
        };
        self.scrub.number = self.scrub.number.wrapping_add(1);
        let nowhere = Spot { segment: SegmentId(0), life: 0, block: 0, header: 0 };
        self.scrub.run = Some(Run {
            volume: only.unwrap_or(VolumeIndex(0)),
            next: None,
            end: Ordinal(0),
            due: self.now,
            piece: nowhere,
            bad: 0,
        });
        self.tick(self.now, self.wall, payload);
        Ok(())
    }

    /// Ends the scrub that is running, if there is one.
    pub fn stop_scrub(&mut self) {
        self.scrub_ends(Outcome::Stopped);
    }

    /// How the scrub that is running is, or the last one was.
    pub fn scrub_report(&self) -> &Report {
        &self.scrub.report
    }

    fn scrub_ends(&mut self, outcome: Outcome) {
        if self.scrub.run.take().is_some() {
            self.scrub.report.outcome = outcome;
            self.scrub.report.ended_at = self.wall;
        }
    }

    /// Whether something of a volume is under way for it (H6).
    pub(crate) fn is_scrubbed(&self, volume: VolumeIndex) -> bool {
        self.scrub.under_way == Some(volume)
    }

    #[inline]
    pub(crate) fn scrub_settle(&mut self) {
        if self.scrub.run.is_some() {
            self.scrub_go_on();
        }
    }

    pub(crate) fn scrub_deadline(&self) -> Option<Tick> {
        let due = self.scrub.run?.due;
        (self.scrub.under_way.is_none() && due > self.now).then_some(due)
    }

    fn scrub_go_on(&mut self) {
        // Bounded: each turn judges one of the blocks that were bad, or begins something.
        while let Some(run) = self.scrub.run.filter(|_| self.scrub.under_way.is_none()) {
            if self.health == CacheHealth::Failed {
                return self.scrub_ends(Outcome::Failed);
            }
            if self.stopping {
                return self.scrub_ends(Outcome::Stopped);
            }
            if self.tokens.room() < TOKENS_KEPT {
                return;
            }
            if run.bad != 0 {
                self.scrub_again(run);
                continue;
            }
            if run.due > self.now {
                return;
            }
            let Some((at, blocks)) = self.scrub_next() else {
                let saves = self.checkpoint.wanted || self.is_checkpointing();
                if saves && self.scrub.unsaved + self.scrub.saving > 0 {
                    return; // H4
                }
                return self.scrub_ends(Outcome::Completed);
            };
            let rate = self.config.scrub_rate.max(1);
            let cost = u64::from(blocks) * BLOCK_BYTES * 1_000_000_000 / rate;
            let run = self.scrub.run.as_mut().expect("looked");
            run.due = self.now.after(cost);
            self.scrub_read(at, blocks, false);
        }
    }

    /// What is read next, and the cursor moves behind it; none: that was all.
    fn scrub_next(&mut self) -> Option<(Spot, u16)> {
        let mut run = self.scrub.run.expect("it is running");
        // Bounded: each turn goes on by a segment or a volume. Those left out are in memory, so few.
        let found = loop {
            let log = self.volume_ref(run.volume).filter(|it| it.serving).map(|it| &it.log);
            let next = match (log, run.next) {
                (None, _) => None,
                (Some(log), None) => {
                    run.end = log.newest.map_or(Ordinal(0), |id| self.segments.get(id).ordinal);
                    self.scrub_segment(log.tail_segment)
                }
                (Some(_), Some(spot)) if self.is_there(&spot) => Some(spot),
                // It was given back, and all before it.
                (Some(log), Some(_)) => self.scrub_segment(log.tail_segment),
            };
            let next = next.filter(|it| self.segments.get(it.segment).ordinal <= run.end);
            let spot = next.and_then(|spot| self.scrub_rests(spot));
            if let Some(spot) = spot {
                let left = self.segments.get(spot.segment).used - spot.block;
                break Some((spot, left.min(PIECE_BLOCKS)));
            }
            let last = usize::from(run.volume.0) + 1 >= self.volume_end;
            if self.scrub.report.only.is_some() || last {
                break None;
            }
            (run.volume, run.next) = (VolumeIndex(run.volume.0 + 1), None);
        };
        if let Some((spot, blocks)) = found {
            let block = spot.block + blocks;
            let header = self.header_from(&spot, block);
            run.next = Some(Spot { block, header, ..spot });
        }
        self.scrub.run = Some(run);
        found
    }

    /// From a spot on, the first block of the log that is on the device and not in memory.
    fn scrub_rests(&self, mut spot: Spot) -> Option<Spot> {
        loop {
            let segment = self.segments.get(spot.segment);
            let rests = segment.state == State::Sealed && segment.buffer.is_none();
            if rests && spot.block < segment.used {
                return Some(spot);
            }
            spot = self.scrub_segment(segment.next)?;
        }
    }

    /// The first header at or behind `block`, from a spot on in the same segment.
    fn header_from(&self, spot: &Spot, block: u16) -> u16 {
        let mut header = spot.header;
        while header < block {
            let heading = self.slots.heading(self.segments.slot(spot.segment, header));
            header = heading.end(header);
        }
        header
    }

    /// The beginning of a segment.
    fn scrub_segment(&self, id: Option<SegmentId>) -> Option<Spot> {
        let segment = id?;
        Some(Spot { segment, life: self.segments.get(segment).sequence, block: 0, header: 0 })
    }

    /// Whether a segment is in its log as it was.
    fn is_there(&self, spot: &Spot) -> bool {
        if spot.segment.0 >= self.segments.total() {
            // The cache has become smaller.
            return false;
        }
        let segment = self.segments.get(spot.segment);
        let in_log = matches!(segment.state, State::Open | State::Sealed);
        in_log && segment.sequence == spot.life
    }

    fn scrub_frame(&self, again: bool) -> u32 {
        let behind = Lane::small_frames(&self.config);
        let first = crate::engine::work_frames(&self.config) - behind - FRAMES;
        if again { first + u32::from(PIECE_BLOCKS) } else { first }
    }

    fn scrub_read(&mut self, at: Spot, blocks: u16, again: bool) {
        let Spot { segment, block, .. } = at;
        self.segments.get_mut(segment).readers += 1; // H6
        let volume = self.segments.get(segment).volume;
        let token = self.scrub_token(volume, What::Read { at, blocks, again });
        let to = Place::Window { frame: self.scrub_frame(again) };
        self.effects.push_back(Effect::ReadCache { token, segment, block, blocks, to });
    }

    fn scrub_token(&mut self, volume: VolumeIndex, what: What) -> Token {
        assert!(self.scrub.under_way.is_none()); // H5
        self.scrub.under_way = Some(volume);
        let number = self.scrub.number;
        self.token(Pending::Scrub(Work { number, volume, what }))
    }

    /// The first block of a piece that was bad is read again (H1).
    fn scrub_again(&mut self, run: Run) {
        let offset = run.bad.trailing_zeros() as u16;
        let state = self.scrub.run.as_mut().expect("it is running");
        state.bad &= state.bad - 1;
        if !self.is_there(&run.piece) {
            return;
        }
        let block = run.piece.block + offset;
        let header = self.header_from(&run.piece, block);
        self.scrub_read(Spot { block, header, ..run.piece }, 1, true);
    }

    /// Something of a scrub is done.
    pub(crate) fn scrub_complete(
        &mut self,
        work: Work,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        self.scrub.under_way = None;
        let Work { number, volume, what } = work;
        let runs = self.scrub.run.is_some() && number == self.scrub.number;
        match what {
            What::Read { at, blocks, again } => {
                self.segments.get_mut(at.segment).readers -= 1;
                if !runs {
                    return;
                }
                let bad = self.scrub_verify(&at, blocks, again, result, payload);
                match again {
                    false => {
                        self.scrub.report.verified_blocks += u64::from(blocks);
                        let run = self.scrub.run.as_mut().expect("it is running");
                        (run.piece, run.bad) = (at, bad);
                    }
                    true if bad == 0 => {}
                    true if at.header == at.block => self.header_is_bad(volume, &at),
                    true => self.block_is_bad(volume, &at),
                }
            }
            What::Heal { lba, ticket, frame, begun } => {
                let now = self.now;
                let late = self.config.mutants.is(Mutant::ScrubTicketLate);
                let ticket = if late { self.tickets.take() } else { ticket };
                self.slices(volume).end(Side::Foreground, now);
                self.read_took(volume, begun, begun);
                let state = self.volume(volume);
                state.stats.backing_faults += u64::from(result.is_err());
                let from = Place::Window { frame };
                if result.is_err() || self.place_fill(volume, lba, ticket, from, payload).is_err() {
                    // It comes back as soon as somebody misses it.
                    self.history.touch(volume, lba);
                }
            }
        }
    }

    /// Which of the blocks that were read are not what was written there.
    fn scrub_verify(
        &mut self,
        at: &Spot,
        blocks: u16,
        again: bool,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) -> u32 {
        let first = Place::Window { frame: self.scrub_frame(again) };
        let mut header = at.header;
        let mut bad = 0;
        let unchecked = self.config.mutants.is(Mutant::SkipScrubChecksum);
        for offset in 0..blocks {
            let block = at.block + offset;
            let place = behind(first, offset);
            let slot = self.segments.slot(at.segment, block);
            let good = if block == header {
                header = self.slots.heading(slot).end(block);
                result.is_ok() && self.is_header(at.segment, block, place, payload)
            } else {
                // A slot that holds nothing may hold anything.
                self.slots.held(slot).is_none()
                    || result.is_ok()
                        && (unchecked || self.verify(at.segment, block, place, payload))
            };
            bad |= u32::from(!good) << offset;
        }
        bad
    }

    /// Whether a record's header was read.
    fn is_header(
        &mut self,
        id: SegmentId,
        block: u16,
        place: Place,
        payload: &mut impl Payload,
    ) -> bool {
        if self.config.mutants.is(Mutant::SkipScrubHeader) {
            return true;
        }
        let segment = self.segments.get(id);
        let heading = self.slots.heading(self.segments.slot(id, block));
        let known = Known {
            address: self.geometry.address(id, block),
            volume: segment.volume.0.into(),
            segment_sequence: segment.sequence,
            ordinal: segment.ordinal,
            sequence: Sequence(segment.first_sequence.0 + u64::from(heading.sequence_offset)),
            blocks: heading.blocks,
            entry_count: heading.entries,
        };
        payload.is_header(place, &known, &self.identity)
    }

    /// A record's header is bad: what it says is put where no crash needs it (H4).
    fn header_is_bad(&mut self, volume: VolumeIndex, at: &Spot) {
        let segment = self.segments.get(at.segment);
        let heading = self.slots.heading(self.segments.slot(at.segment, at.block));
        let first = Sequence(segment.first_sequence.0 + u64::from(heading.sequence_offset));
        let last = Sequence(first.0 + u64::from(heading.entries));
        let state = self.volume(volume);
        let is_last = state.log.last.sequence == first;
        // What the next header says of it does not tell what of it was lost.
        let dirty = last > state.log.durable.watermark || state.extents.lost_len() > 0;
        self.scrub.report.bad_headers += 1;
        if !dirty && !is_last {
            self.scrub.report.saved_headers += 1;
            return;
        }
        let early = self.config.mutants.is(Mutant::ScrubSavesTooEarly);
        let state = self.volume(volume);
        state.bad_header = state.bad_header.max(first);
        state.unsafe_through = state.unsafe_through.max(last);
        state.log.note_wanted |= is_last && !early;
        self.scrub.unsaved += 1;
        if !self.config.mutants.is(Mutant::ScrubSavesNothing) {
            self.checkpoint.wanted = true;
        }
    }

    /// Whether a checkpoint that is wanted would begin behind every header that is known to be bad, or nothing can be done about it.
    pub(crate) fn is_behind_bad_headers(&self) -> bool {
        let waits = |it: &Volume| it.ends_with_bad_header() && it.log.note_wanted;
        let stuck = self.stopping && self.segments.free_count() == 0;
        self.scrub.unsaved == 0 || stuck || !self.all_volumes().any(waits)
    }

    /// A checkpoint begins: it saves what was found bad, if that is not the last header before it.
    pub(crate) fn scrub_checkpoint_begins(&mut self) {
        let early = self.config.mutants.is(Mutant::ScrubSavesTooEarly);
        if early || !self.all_volumes().any(Volume::ends_with_bad_header) {
            self.scrub.saving += core::mem::take(&mut self.scrub.unsaved);
        }
    }

    /// It is named.
    pub(crate) fn scrub_checkpoint_named(&mut self) {
        self.scrub.report.saved_headers += core::mem::take(&mut self.scrub.saving);
    }

    /// Which block a spot holds, if that is its newest version.
    fn needed(&self, volume: VolumeIndex, at: &Spot) -> Option<(Lba, Slot)> {
        let slot = self.segments.slot(at.segment, at.block);
        let held = self.slots.held(slot).filter(|held| self.is_newest(volume, held.lba, slot));
        held.map(|held| (held.lba, slot))
    }

    /// A block is bad on the cache device (H2, H3).
    fn block_is_bad(&mut self, volume: VolumeIndex, at: &Spot) {
        let Some((lba, _)) = self.needed(volume, at) else {
            self.scrub.report.unneeded_blocks += 1;
            return;
        };
        let trusts = self.config.mutants.is(Mutant::ScrubHealsDirty);
        if self.is_dirty_slot(at.segment, at.block) && !trusts {
            let report = &mut self.scrub.report;
            report.lost_blocks += 1;
            if let Some(free) = report.lost.iter_mut().find(|it| it.is_none()) {
                *free = Some((volume, lba));
            }
            return;
        }
        if !self.forget_bad(volume, lba, at.segment, at.block) {
            return;
        }
        self.scrub.report.healed_blocks += 1;
        self.volume(volume).stats.repaired_blocks += 1;
        if self.config.fill_run_max == 0 {
            return;
        }
        let ticket = self.ticket(volume, lba, 1);
        let (frame, begun) = (self.scrub_frame(true), self.now);
        let token = self.scrub_token(volume, What::Heal { lba, ticket, frame, begun });
        self.foreground_ask(volume, token);
    }
}
