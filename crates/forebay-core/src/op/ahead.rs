// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading ahead: what a guest will ask for next, by `policy::ahead`, is read from the backing device before it does.
//!
//! It lies in memory that nothing else uses, [`Config::ahead_blocks`](crate::engine::Config::ahead_blocks) of it, in *pieces* of up to [`PIECE_BLOCKS`], until a
//! guest reads it. So it takes nothing's place in the cache; what a guest has read of it enters as any block that it
//! missed would (`op::miss`).
//!
//! # Invariants
//!
//! - **J1** A piece holds only blocks that were on the backing device alone when its read began, and is given to a guest only
//!   where its ticket holds (T1, T2 of `log::tickets`): nothing changed these blocks since. What is in the log is read
//!   from there, as always.
//! - **J2** A flush of the backing device that fails voids what was read ahead of its volume: the device may have dropped what
//!   a piece holds.
//! - **J3** A guest that misses a block that is being read ahead waits for that read (F3 of `op::miss`). If it fails, the guest's own
//!   read is begun: no fault of a read that nobody asked for is told to anybody, or counted as the device's.
//! - **J4** What a guest asked for is begun first. While anybody else wants the disk little is read ahead, a quarter of the
//!   time at most, and only of runs forward, which others gain by, too; write-back has its turns as if guests had asked.
//! - **J5** A piece stays until it was read, or is void; for the sake of another one it goes only if nobody has read of it for
//!   [`STAYS`].
//!
//! # States of a piece
//!
//! | from | to | when |
//! |---|---|---|
//! | free | reading | its read is begun, or waits for its turn |
//! | reading | ready | the device has answered |
//! | ready, reading | free | all of it was read; it is void; it failed; its place is wanted (J5); its volume ends |

use crate::effect::{Fault, Token};
use crate::engine::{Engine, Pending, work_frames};
use crate::format::entry::Kind;
use crate::limits::{REQUEST_BLOCKS_MAX, TOKENS_KEPT};
use crate::log::tickets::Ticket;
use crate::memory::vec_bytes;
use crate::mutant::Mutant;
use crate::op::miss::{Miss, NOBODY, SHARED_MAX, Why};
use crate::op::read::behind;
use crate::payload::{Payload, Place};
use crate::policy::ahead::{Most, StreamId, Streams};
use crate::policy::slices::Side;
use crate::units::{Lba, Tick, VolumeIndex};
use alloc::vec::Vec;

/// Blocks of a piece, at most: 256 KiB.
pub const PIECE_BLOCKS: u32 = 64;
/// How long a piece stays that nobody reads of, if others want its place, in nanoseconds.
const STAYS: u64 = 200_000_000;

const _: () = assert!(PIECE_BLOCKS <= u64::BITS);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Reading,
    Ready,
}

/// Why a piece is free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// All of it was read.
    Used,
    /// Something changed it.
    Void,
    /// Nobody came for it.
    Unused,
    /// It could not be read.
    Failed,
}

/// Blocks that are read ahead.
#[derive(Clone, Copy, Debug)]
struct Piece {
    state: State,
    volume: VolumeIndex,
    lba: Lba,
    blocks: u16,
    ticket: Ticket,
    stream: StreamId,
    /// Which of them a guest has read.
    used: u64,
    /// When it was begun, or read of last.
    touched: Tick,
}

impl Piece {
    fn end(&self) -> Lba {
        self.lba + u64::from(self.blocks)
    }

    /// The part of a range that it has.
    fn overlap(&self, volume: VolumeIndex, start: Lba, end: Lba) -> Option<(Lba, Lba)> {
        let (from, to) = (self.lba.max(start), self.end().min(end));
        (self.state != State::Free && self.volume == volume && from < to).then_some((from, to))
    }

    fn is_used(&self) -> bool {
        self.used.count_ones() == u32::from(self.blocks)
    }
}

/// What is read ahead, and for whom.
#[derive(Debug)]
pub(crate) struct Ahead {
    pub(crate) streams: Streams,
    pieces: Vec<Piece>,
    /// Pieces that are not free.
    held: u32,
    /// A copy was placed while a request came.
    filled: bool,
}

impl Ahead {
    /// With memory for so many blocks.
    pub(crate) fn new(blocks: u32) -> Ahead {
        let (volume, ticket) = (VolumeIndex(0), Ticket::VOID);
        let free = Piece {
            state: State::Free,
            volume,
            lba: Lba(0),
            blocks: 0,
            ticket,
            stream: StreamId::NONE,
            used: 0,
            touched: Tick(0),
        };
        let pieces = alloc::vec![free; (blocks / PIECE_BLOCKS) as usize];
        Ahead { streams: Streams::default(), pieces, held: 0, filled: false }
    }

    /// Bytes of memory it takes beside the blocks.
    pub(crate) const fn memory_bytes(blocks: u32) -> u64 {
        (blocks / PIECE_BLOCKS) as u64 * size_of::<Piece>() as u64
    }

    /// Bytes of memory beside itself.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.pieces)
    }

    /// Whether anything is read ahead at all.
    pub(crate) fn is_on(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Whether a volume's backing device is being read.
    pub(crate) fn is_reading(&self, volume: VolumeIndex) -> bool {
        self.pieces.iter().any(|piece| piece.state == State::Reading && piece.volume == volume)
    }

    /// Whether any of `start..end` was read, or is.
    pub(crate) fn overlaps(&self, volume: VolumeIndex, start: Lba, end: Lba) -> bool {
        self.held > 0 && self.pieces.iter().any(|it| it.overlap(volume, start, end).is_some())
    }

    /// Whether copies were placed since this was asked last.
    pub(crate) fn take_filled(&mut self) -> bool {
        core::mem::take(&mut self.filled)
    }

    /// The first part of a range that no piece has.
    fn uncovered(&self, volume: VolumeIndex, mut start: Lba, mut end: Lba) -> (Lba, Lba) {
        // Bounded: each piece moves the start once.
        while let Some(part) = self
            .pieces
            .iter()
            .find_map(|piece| piece.overlap(volume, start, end).filter(|part| part.0 == start))
        {
            start = part.1;
        }
        for piece in &self.pieces {
            if let Some(part) = piece.overlap(volume, start, end) {
                end = part.0;
            }
        }
        (start, end)
    }
}

impl Engine {
    /// A guest's read came and what it misses is asked for: what it will read next is read ahead.
    pub(crate) fn ahead_begin(&mut self, at: u32) {
        let active = *self.active(at);
        let Some(stream) = active.stream else { return };
        let volume = active.request.volume;
        let blocks = self.ahead.pieces.len() as u64 * u64::from(PIECE_BLOCKS) / 2;
        let now = self.now;
        // What one read was split into is not told apart from what others want.
        let alone = self.ahead.streams.is_alone(stream);
        let own = if alone { active.backing_reads } else { u32::MAX };
        let slices = self.slices(volume);
        let crowded = slices.is_crowded(own, now);
        if crowded && !slices.ahead_may(now) {
            return; // J4
        }
        let most = Most { blocks, crowded };
        let Some(window) = self.ahead.streams.window(stream, most) else { return };
        let end = Lba(self.volume(volume).blocks());
        for (first, behind) in window.ranges() {
            if !self.ahead_range(volume, stream, (first, behind.min(end))) {
                return;
            }
        }
    }

    /// Begins to read what of a range is on the backing device alone; says whether there was room.
    fn ahead_range(
        &mut self,
        volume: VolumeIndex,
        stream: StreamId,
        (mut at, end): (Lba, Lba),
    ) -> bool {
        // Bounded: each turn goes past one block at least, of a window's.
        while at < end {
            let most = end.min(at + u64::from(PIECE_BLOCKS));
            let (first, behind) = self.ahead.uncovered(volume, at, most);
            let mut last = first;
            while last < behind && self.is_on_backing_alone(volume, last) {
                last = last + 1;
            }
            if first < last && !self.ahead_piece(volume, stream, (first, last)) {
                return false;
            }
            at = if last < behind { last + 1 } else { last.max(first) };
        }
        true
    }

    /// Whether a block is nowhere else (J1). Who asks does not read it.
    pub(crate) fn is_on_backing_alone(&self, volume: VolumeIndex, lba: Lba) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        let extent = state.extents.get(lba).map(|extent| extent.kind);
        let elsewhere = matches!(extent, Some(Kind::Zero | Kind::Discard | Kind::Lost));
        !elsewhere && self.newest_slot(state, lba).is_none()
    }

    fn ahead_piece(
        &mut self,
        volume: VolumeIndex,
        stream: StreamId,
        (lba, end): (Lba, Lba),
    ) -> bool {
        let has_room = self.shared.len() < SHARED_MAX
            && self.tokens.room() > 2 * (REQUEST_BLOCKS_MAX + TOKENS_KEPT);
        let Some(row) = self.ahead_room().filter(|_| has_room) else { return false };
        let (blocks, now) = ((end - lba) as u16, self.now);
        let ticket = self.ticket(volume, lba, blocks);
        if ticket == Ticket::VOID {
            return true; // T2
        }
        let to = Place::Window { frame: work_frames(&self.config) + row as u32 * PIECE_BLOCKS };
        let miss = Miss::new(NOBODY, volume, (lba, blocks), to, Why::Ahead);
        let (state, used, touched) = (State::Reading, 0, now);
        self.ahead.pieces[row] =
            Piece { state, volume, lba, blocks, ticket, stream, used, touched };
        self.ahead.held += 1;
        self.volume(volume).stats.ahead_blocks += u64::from(blocks);
        let token = self.miss_share(miss, ticket);
        let slices = self.slices(volume);
        slices.ahead_begins();
        if slices.ask(token, now) {
            self.foreground_begin(token);
        }
        true
    }

    /// A free piece.
    fn ahead_room(&mut self) -> Option<usize> {
        let (pieces, now) = (&self.ahead.pieces, self.now);
        let free = pieces.iter().position(|piece| piece.state == State::Free);
        if free.is_some() {
            return free;
        }
        let ready = pieces.iter().enumerate().filter(|(_, piece)| piece.state == State::Ready);
        let (row, oldest) = ready.min_by_key(|(_, piece)| piece.touched)?;
        if now.since(oldest.touched) < STAYS {
            return None; // J5
        }
        let void = !self.ahead_holds(row, oldest.lba, oldest.end());
        self.ahead_free(row, if void { Gone::Void } else { Gone::Unused });
        Some(row)
    }

    /// Whether nothing changed a part of a piece since its read began (J1).
    fn ahead_holds(&self, row: usize, first: Lba, end: Lba) -> bool {
        let Piece { ticket, volume, .. } = self.ahead.pieces[row];
        self.tickets.hold(ticket, volume, first, end - first)
            || self.config.mutants.is(Mutant::ReadAheadNotVoided)
    }

    /// Of a miss: how many blocks, from its first on, a piece has, or none has.
    pub(crate) fn ahead_find(&mut self, miss: &Miss) -> (Option<usize>, u16) {
        let end = miss.lba + u64::from(miss.blocks);
        let mut alone = miss.blocks;
        if self.ahead.held == 0 {
            return (None, alone);
        }
        for row in 0..self.ahead.pieces.len() {
            let piece = self.ahead.pieces[row];
            let Some((from, to)) = piece.overlap(miss.volume, miss.lba, end) else { continue };
            if piece.state != State::Ready {
                continue;
            }
            if !self.ahead_holds(row, from, to) {
                self.ahead_free(row, Gone::Void);
            } else if from == miss.lba {
                return (Some(row), (to - from) as u16);
            } else {
                alone = alone.min((from - miss.lba) as u16);
            }
        }
        (None, alone)
    }

    /// A guest that misses blocks has them from a piece, now.
    pub(crate) fn ahead_give(&mut self, row: usize, mut miss: Miss, payload: &mut impl Payload) {
        miss.ticket = self.ahead.pieces[row].ticket;
        self.ahead_copy(row, &miss, payload);
        self.ahead.filled = true;
        if self.ahead.pieces[row].is_used() {
            self.ahead_free(row, Gone::Used);
        }
    }

    fn ahead_copy(&mut self, row: usize, miss: &Miss, payload: &mut impl Payload) {
        let now = self.now;
        let piece = &mut self.ahead.pieces[row];
        let from = (miss.lba - piece.lba) as u16;
        let bits = u64::MAX >> (u64::BITS - u32::from(miss.blocks)) << from;
        let fresh = (bits & !piece.used).count_ones();
        piece.used |= bits;
        piece.touched = now;
        self.volume(miss.volume).stats.ahead_used_blocks += u64::from(fresh);
        let frame = work_frames(&self.config) + row as u32 * PIECE_BLOCKS;
        payload.copy(behind(Place::Window { frame }, from), miss.to, miss.blocks);
        self.fill(miss, payload);
    }

    /// The backing device has answered a read that nobody asked for; some may wait for it by now.
    pub(crate) fn ahead_complete(
        &mut self,
        token: Token,
        miss: Miss,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let now = self.now;
        let slices = self.slices(miss.volume);
        slices.end(Side::Foreground, now);
        slices.ahead_ended(miss.begun, now);
        slices.read_took(miss.asked, miss.begun, now);
        self.shared.retain(|shared| shared.token != token);
        let Place::Window { frame } = miss.to else { unreachable!("it has a piece's memory") };
        let row = ((frame - work_frames(&self.config)) / PIECE_BLOCKS) as usize;
        self.ahead.pieces[row].state = State::Ready;
        if result.is_err() {
            // First: who reads it himself must not find it.
            self.ahead_free(row, Gone::Failed);
        }
        let mut next = miss.next;
        while let Some(waiting) = self.next_waiting(&mut next) {
            match result {
                Ok(()) => self.ahead_copy(row, &waiting, payload), // F4
                Err(_) => self.miss_again(waiting, payload),       // J3
            }
            self.read_part_done(waiting.request);
        }
        let piece = self.ahead.pieces[row];
        if result.is_err() {
            return;
        }
        if piece.is_used() {
            self.ahead_free(row, Gone::Used);
        } else if !self.ahead_holds(row, piece.lba, piece.end()) {
            self.ahead_free(row, Gone::Void);
        }
    }

    fn ahead_free(&mut self, row: usize, gone: Gone) {
        let piece = self.ahead.pieces[row];
        assert_eq!(piece.state, State::Ready);
        self.ahead.pieces[row].state = State::Free;
        self.ahead.held -= 1;
        let unused = u64::from(piece.blocks) - u64::from(piece.used.count_ones());
        let stats = &mut self.volume(piece.volume).stats;
        match gone {
            Gone::Used => self.ahead.streams.was_used(piece.volume),
            Gone::Failed => stats.ahead_faults += 1,
            Gone::Void => stats.ahead_void_blocks += unused,
            Gone::Unused => {
                stats.ahead_unused_blocks += unused;
                self.ahead.streams.was_unused(piece.volume, piece.stream); // U3
            }
        }
    }

    /// All that was read ahead of a volume is void (J2), or is not wanted any more.
    pub(crate) fn ahead_void(&mut self, volume: VolumeIndex) {
        for row in 0..self.ahead.pieces.len() {
            let piece = &mut self.ahead.pieces[row];
            if piece.volume != volume || piece.state == State::Free {
                continue;
            }
            piece.ticket = Ticket::VOID;
            if piece.state == State::Ready {
                self.ahead_free(row, Gone::Void);
            }
        }
        // Those that are being read: nobody waits for them any more.
        let Engine { shared, tokens, .. } = self;
        shared.retain(|shared| {
            let of = tokens.get(shared.token.0);
            let ahead = matches!(of, Some(Pending::Miss(miss)) if miss.why == Why::Ahead);
            !(ahead && shared.volume == volume)
        });
    }
}
