// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One NBD connection: its input, its commands under way, its output.
//!
//! Many requests come with one receive, many replies go with one send. Both are tried by a call
//! that does not wait; only when there is nothing, or no room, does the reactor wait for it.
//! A write is handed to the engine only when its payload is there, so a client that stalls in the
//! middle of one holds nothing but its own connection. Writes above [`REQUEST_BYTES_MAX`] are
//! handed over in pieces.
//!
//! # Invariants
//!
//! - **N1** The payload of a write stays where it was received until the engine has answered: the device may read it all that time. What
//!   comes meanwhile goes elsewhere (`input`), so that the input is no bound of what is under way.
//! - **N2** A command is answered once, after all its pieces are. One that never came whole is not: to who asked, the connection ended.
//! - **N3** A connection is gone only when nothing of it is under way, and nothing is left to do of what was received whole: a client may
//!   end behind what it has asked for.
//! - **N4** When its turn ends it waits for input, unless it takes none or another turn is sure to
//!   come: the reactor, the engine or an answer brings it. So a call that does not wait must not be
//!   what another command waits for.
//! - **N5** Who does not receive, or does not send on, ends up with nothing of the memory that all share (`aside`, and I2 of `input`).

mod aside;
pub(in crate::nbd) mod carry;
mod input;
mod status;
#[cfg(test)]
mod tests;

use super::error::{CloseReason, NbdError};
use super::export::{Export, Session};
use super::handshake::{Handshake, INPUT_BYTES_MAX, Step};
use super::output::{Found, Output};
use super::pool::{Pool, Run};
use super::reply::ReplyHead;
use super::transmission::{Command, Decoded, Kind, ReplyForm, decode};
use super::wire::{RequestHeader, SimpleReplyHeader, TRANSFER_BYTES_MAX};
use forebay::io::{Arena, ReactorOp, Span};
use forebay::shard::Shard;
use forebay_core::limits::REQUEST_BYTES_MAX;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::{BLOCK_BYTES, Tick, VolumeIndex};
use input::{Input, Payload};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Commands of one connection that may be under way.
const COMMAND_COUNT_MAX: usize = 256;
/// A buffer of input.
pub(super) const INPUT_BYTES: usize = (1 << 20) + (192 << 10);
/// A write above [`REQUEST_BYTES_MAX`] goes to the engine in pieces of this size at most, and so does what is read again.
const PIECE_BYTES: u64 = 256 << 10;
const _: () = assert!(INPUT_BYTES > INPUT_BYTES_MAX);

/// What an operation of a connection is for: the low byte of its number.
pub(super) const RECEIVE: u64 = 1;
pub(super) const SEND: u64 = 2;

#[derive(Clone, Copy, Debug)]
struct UnderWay {
    command: Command,
    form: ReplyForm,
    /// Bytes handed to the engine.
    submitted: u64,
    /// All pieces are.
    is_submitted: bool,
    /// Of a short write.
    payload: Option<Payload>,
    /// Pieces the engine has not answered.
    pieces: u32,
    error: Option<NbdError>,
    memory: Option<(Run, Span)>,
    then: Then,
}

/// What follows once all pieces are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Answer,
    Flush,
    /// The payload never came whole: nobody is answered (N2).
    Nothing,
}

impl UnderWay {
    fn new(command: Command, form: ReplyForm) -> UnderWay {
        UnderWay {
            command,
            form,
            submitted: 0,
            is_submitted: false,
            payload: None,
            pieces: 0,
            error: None,
            memory: None,
            then: Then::Answer,
        }
    }

    /// Handed to the engine piece by piece, as its payload comes in.
    fn is_long_write(&self) -> bool {
        matches!(self.command.kind, Kind::Write { .. })
            && u64::from(self.command.length) > REQUEST_BYTES_MAX
    }

    /// Of a long write, the bytes that are not handed to the engine, and those of them that are the next piece. It ends with a block: two pieces that
    /// share one would wait for each other, and each have its old content read.
    fn next_piece(&self) -> (u64, u64) {
        let left = u64::from(self.command.length) - self.submitted;
        let at = self.command.offset + self.submitted;
        (left, left.min(PIECE_BYTES - at % BLOCK_BYTES))
    }

    /// What is to be cached goes piece by piece through the memory of one.
    fn waits_for_memory(&self) -> bool {
        self.command.kind == Kind::Cache && self.pieces > 0
    }
}

enum Phase {
    Handshake { handshake: Box<Handshake>, since: Tick },
    Transmission { session: Box<Session>, volume: VolumeIndex },
}

/// How connections name their operations to reactor and engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    pub(super) place: crate::frontend::Place,
    pub(super) connection: u32,
    /// Whose its memory is, in the pool.
    pub(super) owner: u32,
}

impl Names {
    fn reactor(self, what: u64) -> u64 {
        forebay::io::user_data(self.place.source(), u64::from(self.connection) << 8 | what)
    }

    /// Of a command, or of a piece of a write whose payload is in that buffer.
    fn engine(self, slot: usize, buffer: usize) -> u64 {
        let number = (buffer as u64) << SLOT_BITS | slot as u64;
        self.place.cookie(u64::from(self.connection) << 16 | number)
    }
}

/// Bits of such a number that are the command's: one more than commands is what is read again.
const SLOT_BITS: u32 = 9;
const _: () =
    assert!(aside::AGAIN < 1 << SLOT_BITS && input::BUFFER_COUNT <= 1 << (16 - SLOT_BITS));

const fn of_number(number: usize) -> (usize, usize) {
    (number & ((1 << SLOT_BITS) - 1), number >> SLOT_BITS)
}

/// Whether a call that does not wait had to leave it to the reactor.
fn is_not_ready(result: i32) -> bool {
    const AGAIN: i32 = -Errno::AGAIN.raw_os_error();
    const INTERRUPTED: i32 = -Errno::INTR.raw_os_error();
    matches!(result, AGAIN | INTERRUPTED)
}

/// Whether nothing was sent or received because it was called off: what a thread of the kernel's was at says that it was
/// interrupted.
fn is_called_off(result: i32) -> bool {
    const CANCELED: i32 = -Errno::CANCELED.raw_os_error();
    result == CANCELED || is_not_ready(result)
}

/// Whether nobody has the other end of a socket any more, or nothing more comes from there than what is to be read.
pub(super) fn is_hung_up(socket: &OwnedFd) -> bool {
    let mut events = [PollFd::new(socket, PollFlags::IN | PollFlags::RDHUP)];
    let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    match poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(_) => events[0].revents().intersects(ended),
        Err(_) => true,
    }
}

/// Memory of a connection, for the next one when it is gone: addresses that were given up are never used again
/// (B1 of `io/buffer.rs`).
pub(super) struct Room {
    input: Arena,
    ring: Arena,
}

impl Room {
    pub(super) fn new() -> io::Result<Room> {
        Ok(Room { input: Arena::reserved(INPUT_BYTES)?, ring: Output::room()? })
    }
}

/// One connection.
pub(super) struct Connection {
    socket: OwnedFd,
    names: Names,
    phase: Phase,
    input: Input,
    /// The reactor waits for input: it receives it, or only says that it is there.
    is_receiving: bool,
    is_told_only: bool,
    skip_bytes: u32,
    under_way: Vec<Option<UnderWay>>,
    free: Vec<usize>,
    /// A long write whose payload is still coming.
    streaming: Option<usize>,
    /// Commands of which the engine did not take every piece yet.
    unfinished: Vec<usize>,
    output: Output,
    /// What was put aside and is being read again: memory, and what of that it will fill.
    again: Option<(Run, Span, u64)>,
    /// Blocks looked at in this turn, for its questions (`status`).
    looked: u64,
    /// What was received goes on in a later turn: there was no memory, no room, or it has looked enough.
    is_held_back: bool,
    /// It wants memory that others have; since when, without having had any since.
    is_waiting: bool,
    waiting_since: Option<Tick>,
    /// What is being sent has been called off, to be put aside; and has ever been.
    is_recalled: bool,
    was_recalled: bool,
    is_closing: bool,
    is_broken: bool,
    /// What was put aside cannot be read any more (A3).
    is_unreadable: bool,
    /// The client has said that it ends, or something that cannot be understood, or broke off: what comes after
    /// that is no command any more.
    is_over: bool,
    /// It is brought to rest, to be carried to the next program (`carry`).
    is_resting: bool,
}

impl Connection {
    /// One whose client has yet to say what it wants.
    pub(super) fn new(socket: OwnedFd, names: Names, room: Room, now: Tick) -> Connection {
        let phase = Phase::Handshake { handshake: Box::default(), since: now };
        let mut connection = Connection::at(socket, names, room, phase);
        let _ = connection.output.push(&Handshake::greeting());
        connection
    }

    /// What it had, when it is gone.
    pub(super) fn into_room(self, pool: &mut Pool) -> Room {
        assert!(self.is_gone());
        Room { input: self.input.into_own(pool), ring: self.output.into_room() }
    }

    /// One behind the handshake, which was done in another way.
    pub(super) fn transmitting(
        socket: OwnedFd,
        names: Names,
        room: Room,
        session: Session,
        volume: VolumeIndex,
    ) -> Connection {
        let phase = Phase::Transmission { session: Box::new(session), volume };
        Connection::at(socket, names, room, phase)
    }

    /// The volume has so many bytes now, and the other side will know.
    pub(super) fn resize(&mut self, size_bytes: u64) {
        if let Phase::Transmission { session, .. } = &mut self.phase {
            session.resize(size_bytes);
        }
    }

    fn at(socket: OwnedFd, names: Names, room: Room, phase: Phase) -> Connection {
        Connection {
            socket,
            names,
            phase,
            input: Input::new(room.input),
            is_receiving: false,
            is_told_only: false,
            skip_bytes: 0,
            under_way: vec![None; COMMAND_COUNT_MAX],
            free: (0..COMMAND_COUNT_MAX).rev().collect(),
            streaming: None,
            unfinished: Vec::with_capacity(COMMAND_COUNT_MAX),
            output: Output::new(room.ring),
            again: None,
            looked: 0,
            is_held_back: false,
            is_waiting: false,
            waiting_since: None,
            is_recalled: false,
            was_recalled: false,
            is_closing: false,
            is_broken: false,
            is_unreadable: false,
            is_over: false,
            is_resting: false,
        }
    }

    /// Bytes of memory one takes at most.
    pub(super) const fn memory_bytes() -> u64 {
        let slot = size_of::<Option<UnderWay>>() + 2 * size_of::<usize>();
        (INPUT_BYTES + Input::TABLE_BYTES + Output::MEMORY_BYTES + COMMAND_COUNT_MAX * slot) as u64
    }

    /// Nothing of it is under way, and nothing will be (N3).
    pub(super) fn is_gone(&self) -> bool {
        (self.is_closing || self.is_broken)
            && self.under_way.len() == self.free.len()
            && !self.is_receiving
            && !self.output.is_sending
            && self.again.is_none()
            && (self.is_broken || !self.is_held_back)
            && (self.is_broken || self.output.is_empty())
    }

    /// It takes nothing new.
    pub(super) fn is_ending(&self) -> bool {
        self.is_closing || self.is_broken
    }

    /// The other side has ended it, whatever is still to be read of it.
    pub(super) fn is_hung_up(&self) -> bool {
        is_hung_up(&self.socket)
    }

    /// The volume it is connected to.
    pub(super) fn volume(&self) -> Option<VolumeIndex> {
        match self.phase {
            Phase::Transmission { volume, .. } => Some(volume),
            Phase::Handshake { .. } => None,
        }
    }

    /// Since when it has agreed on nothing, unless it is broken already.
    pub(super) fn agreeing_since(&self) -> Option<Tick> {
        match self.phase {
            Phase::Handshake { since, .. } if !self.is_broken => Some(since),
            _ => None,
        }
    }

    /// Ends it: nothing more is received, what is under way is finished.
    pub(super) fn close(&mut self, shard: &mut Shard) {
        if !self.is_closing {
            self.is_closing = true;
            self.stop_receiving(shard);
        }
    }

    fn stop_receiving(&mut self, shard: &mut Shard) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Read);
        if self.is_receiving {
            shard.reactor.cancel(self.names.reactor(RECEIVE));
        }
    }

    /// Ends it at once: what it has yet to be told it is not told.
    pub(super) fn broken(&mut self, shard: &mut Shard, pool: &mut Pool) {
        self.is_broken = true;
        if !self.output.is_sending {
            self.output.clear(pool);
        }
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.stop_receiving(shard);
    }

    pub(super) fn received(
        &mut self,
        result: i32,
        exports: &[(Export, VolumeIndex)],
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        self.is_receiving = false;
        let is_told_only = std::mem::take(&mut self.is_told_only);
        if !(is_told_only || self.is_resting && is_called_off(result)) {
            self.note_received(result);
        }
        self.take(exports, shard, pool);
    }

    fn note_received(&mut self, result: i32) {
        match usize::try_from(result) {
            Ok(bytes) if bytes > 0 => self.input.received(bytes),
            // The client is gone; what it asked for is done all the same.
            _ => self.is_closing = true,
        }
    }

    pub(super) fn sent(&mut self, result: i32, shard: &mut Shard, pool: &mut Pool) {
        self.output.is_sending = false;
        let is_recalled = std::mem::take(&mut self.is_recalled);
        let may_be_called_off = (self.is_resting || self.was_recalled) && !self.is_broken;
        match usize::try_from(result) {
            Ok(bytes) if bytes > 0 && !self.is_broken => self.output.sent(bytes, pool),
            _ if may_be_called_off && is_called_off(result) => {}
            _ => {
                self.broken(shard, pool);
                self.output.clear(pool);
            }
        }
        if is_recalled {
            // A1
            let is_there = self.output.put_aside(pool);
            assert!(!is_there, "nothing is being sent");
        }
    }

    /// Once in each turn of the loop, after the answers: sends, receives what is there, and takes
    /// it. Replies go out before more is received, so that the client has something to do meanwhile.
    pub(super) fn turn(
        &mut self,
        exports: &[(Export, VolumeIndex)],
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        self.turn_among(|| true, exports, shard, pool);
    }

    /// The same for one of several connections of a client. What comes is taken only if those beside it are sound; else it
    /// is as if the client had ended before.
    pub(super) fn turn_among(
        &mut self,
        are_sound: impl FnOnce() -> bool,
        exports: &[(Export, VolumeIndex)],
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        self.is_waiting = false;
        self.looked = 0;
        // Before others are tried that want its memory; and all answers that were there have been given.
        self.input.come_back(pool);
        self.go_on_elsewhere(pool);
        self.take(exports, shard, pool);
        self.go_on_sending(shard, pool);
        if self.receive_now(are_sound, shard) {
            self.take(exports, shard, pool);
        }
        if self.has_looked_enough() {
            shard.turn_again();
        }
        // With answers there the next turn comes at once, and looks again.
        if !shard.has_answers() {
            self.go_on_sending(shard, pool);
            self.go_on_receiving(shard, pool);
        }
        self.give_up_streaming();
        self.note_waiting(shard);
    }

    /// Takes input, and tries again what found no room.
    fn take(&mut self, exports: &[(Export, VolumeIndex)], shard: &mut Shard, pool: &mut Pool) {
        self.try_unfinished(shard);
        // Bounded by the input: each turn takes some of it.
        while !self.is_broken && self.unfinished.is_empty() && self.take_input(exports, shard, pool)
        {
        }
    }

    /// Ends a long write of which not all came before the connection ended (N3): the pieces that came are
    /// written, the rest never will be, and what came of it is no command. In a stop its client is there, and would take an error for its disk's.
    fn give_up_streaming(&mut self) {
        let Some(slot) = self.streaming else { return };
        if self.is_receiving || !(self.is_closing || self.is_broken) {
            return;
        }
        let state = self.under_way[slot].as_mut().expect("under way");
        let (_, bytes) = state.next_piece();
        if !self.is_broken && self.input.available() as u64 >= bytes {
            return;
        }
        (self.streaming, self.is_over) = (None, true);
        state.is_submitted = true;
        state.then = Then::Nothing;
        if state.pieces == 0 {
            self.end(slot);
        }
    }

    /// Sends: what is gathered at once, the rest when the reactor waits. What frees memory that
    /// commands wait for goes the reactor's way, because its result brings a turn.
    fn go_on_sending(&mut self, shard: &mut Shard, pool: &mut Pool) {
        // Bounded: every round sends something.
        while !self.output.is_sending && !self.is_broken {
            let Some(span) = self.output.front() else { return self.read_again(shard, pool) };
            if self.is_resting || self.output.has_room() && self.output.front_is_gathered() {
                let result = shard.reactor.send_now(self.socket.as_fd(), span);
                if !is_not_ready(result) {
                    self.sent(result, shard, pool);
                    continue;
                }
                if self.is_resting {
                    return;
                }
            }
            self.output.is_sending = true;
            let fd = self.socket.as_raw_fd();
            shard.reactor.submit(ReactorOp::Send { fd, span }, self.names.reactor(SEND));
        }
    }

    /// Receives what is there, if anything; says whether it did. The end of the connection is
    /// noted as well.
    fn receive_now(&mut self, are_sound: impl FnOnce() -> bool, shard: &Shard) -> bool {
        let Some(span) = self.input_room() else { return false };
        let result = shard.reactor.receive_now(self.socket.as_fd(), span);
        if is_not_ready(result) {
            return false;
        }
        self.note_received(if are_sound() { result } else { 0 });
        true
    }

    fn go_on_receiving(&mut self, shard: &mut Shard, pool: &mut Pool) {
        self.go_on_elsewhere(pool);
        let Some(span) = self.input_room() else { return };
        let fd = self.socket.as_raw_fd();
        (self.is_receiving, self.is_told_only) = (true, !self.input.is_own());
        let op = match self.is_told_only {
            true => ReactorOp::PollIn { fd }, // I2
            false => ReactorOp::Recv { fd, span },
        };
        shard.reactor.submit(op, self.names.reactor(RECEIVE));
    }

    fn may_receive(&self) -> bool {
        !(self.is_receiving || self.is_closing || self.is_broken || self.is_resting)
    }

    /// Another buffer if this one is full of payload that waits, unless what is to be taken next is there: that waits for something else.
    fn go_on_elsewhere(&mut self, pool: &mut Pool) {
        if self.may_receive() && !self.is_held_back && self.unfinished.is_empty() {
            self.input.go_on(pool);
        }
    }

    /// Where the next bytes go, if any may come now.
    fn input_room(&mut self) -> Option<Span> {
        if self.may_receive() { self.input.room() } else { None }
    }

    /// Takes one thing off the input; says whether it did.
    fn take_input(
        &mut self,
        exports: &[(Export, VolumeIndex)],
        shard: &mut Shard,
        pool: &mut Pool,
    ) -> bool {
        if self.is_resting {
            return false;
        }
        self.is_held_back = false;
        if self.is_over || self.input.available() == 0 {
            return false;
        }
        if !self.output.has_room() {
            return self.hold_back();
        }
        if self.skip_bytes > 0 {
            let bytes = self.input.available().min(self.skip_bytes as usize);
            self.skip_bytes -= bytes as u32;
            self.input.take(bytes);
            return true;
        }
        match &self.phase {
            Phase::Handshake { .. } => self.take_handshake(exports, shard),
            Phase::Transmission { .. } if self.streaming.is_some() => self.take_piece(shard),
            Phase::Transmission { .. } => self.take_command(shard, pool),
        }
    }

    /// What is next goes on later, also if its client ends meanwhile: all of it was received.
    fn hold_back(&mut self) -> bool {
        self.is_held_back = true;
        false
    }

    fn take_handshake(&mut self, exports: &[(Export, VolumeIndex)], shard: &mut Shard) -> bool {
        let Phase::Handshake { handshake, .. } = &mut self.phase else { return false };
        let mut input = vec![0; self.input.available().min(INPUT_BYTES_MAX)];
        self.input.front(0, input.len()).copy_out(&mut input);
        let offered: Vec<Export> = exports.iter().map(|export| export.0.clone()).collect();
        let mut out = Vec::new();
        let (consumed, step) = handshake.advance(&input, &offered, &mut out);
        self.input.take(consumed);
        let room = self.output.push(&out);
        match step {
            Step::NeedMore if room => {}
            Step::Transmit(session) if room => {
                let volume = exports[session.export_index].1;
                self.phase = Phase::Transmission { session: Box::new(session), volume };
            }
            _ => {
                self.is_over = true;
                self.close(shard);
            }
        }
        consumed > 0 && !self.is_closing
    }

    fn take_command(&mut self, shard: &mut Shard, pool: &mut Pool) -> bool {
        let Phase::Transmission { session, .. } = &self.phase else { return false };
        if self.input.available() < RequestHeader::BYTES {
            return false;
        }
        if self.free.is_empty() {
            return self.hold_back();
        }
        let mut header = [0; RequestHeader::BYTES];
        self.input.front(0, RequestHeader::BYTES).copy_out(&mut header);
        match decode(session, &header) {
            Decoded::NeedMore => false,
            Decoded::Close(reason) => self.end_session(reason, shard),
            Decoded::Refuse { cookie, error, form, skip_bytes } => {
                self.input.take(RequestHeader::BYTES);
                self.skip_bytes = skip_bytes;
                self.push_head(&ReplyHead::failure(form, cookie, error), shard, pool);
                true
            }
            Decoded::Command(command) => {
                let form = command.reply_form(session);
                self.begin(command, form, shard, pool)
            }
        }
    }

    fn end_session(&mut self, _: CloseReason, shard: &mut Shard) -> bool {
        self.is_over = true;
        self.close(shard);
        false
    }

    fn begin(
        &mut self,
        command: Command,
        form: ReplyForm,
        shard: &mut Shard,
        pool: &mut Pool,
    ) -> bool {
        let mut begun = UnderWay::new(command, form);
        match command.kind {
            Kind::Disconnect => {
                self.input.take(RequestHeader::BYTES);
                self.is_over = true;
                self.close(shard);
                return false;
            }
            Kind::BlockStatus { .. } if self.has_looked_enough() => return self.hold_back(),
            Kind::BlockStatus { .. } => {
                self.input.take(RequestHeader::BYTES);
                self.block_status(&command, shard, pool);
                return true;
            }
            // All of it or none: a client that breaks off leaves no part of a write behind.
            Kind::Write { .. }
                if u64::from(command.length) <= REQUEST_BYTES_MAX
                    && self.input.available() < RequestHeader::BYTES + command.length as usize =>
            {
                return false;
            }
            Kind::Read { .. } | Kind::Cache => {
                if self.output.has_aside() {
                    return self.hold_back(); // A2
                }
                let first = command.offset / BLOCK_BYTES;
                let end = (command.offset + u64::from(command.length)).div_ceil(BLOCK_BYTES);
                let mut blocks = (end - first) as usize;
                let owner = self.names.owner;
                let memory = if command.kind == Kind::Cache {
                    // All of it goes through the memory of one piece, which reads of others may want. It is a hint: of what is
                    // longer than any read the rest is left out.
                    begun.command.length = command.length.min(TRANSFER_BYTES_MAX);
                    blocks = blocks.min((REQUEST_BYTES_MAX / BLOCK_BYTES) as usize);
                    pool.take_spare(owner, blocks)
                } else {
                    pool.take_share(owner, blocks)
                };
                if memory.is_none() {
                    self.is_waiting |= pool.others_have(owner, blocks);
                    return self.hold_back();
                }
                self.waiting_since = None;
                begun.memory = memory;
            }
            // In the log zeros are one entry. Nobody knows how long the backing device takes for them.
            Kind::WriteZeroes { fast_zero: true, .. } if self.waits_for_backing(shard) => {
                self.input.take(RequestHeader::BYTES);
                let refusal = ReplyHead::failure(form, command.cookie, NbdError::NotSupported);
                self.push_head(&refusal, shard, pool);
                return true;
            }
            Kind::Trim { fua: true } => begun.then = Then::Flush,
            _ => {}
        }
        self.input.take(RequestHeader::BYTES);
        let slot = self.free.pop().expect("looked");
        let is_write = matches!(command.kind, Kind::Write { .. });
        if is_write && !begun.is_long_write() {
            let payload = self.input.payload(command.length as usize);
            self.input.wait(payload.buffer);
            self.input.take(command.length as usize);
            begun.payload = Some(payload);
        }
        self.under_way[slot] = Some(begun);
        if is_write && begun.is_long_write() {
            self.streaming = Some(slot);
        } else {
            self.expect_next(shard);
            self.submit_rest(slot, shard);
        }
        true
    }

    fn waits_for_backing(&self, shard: &Shard) -> bool {
        let Phase::Transmission { volume, .. } = self.phase else { return false };
        shard.engine().waits_for_backing(volume)
    }

    /// What the next command is about is fetched while this one is done.
    fn expect_next(&self, shard: &mut Shard) {
        let Phase::Transmission { volume, .. } = self.phase else { return };
        if self.input.available() >= RequestHeader::BYTES {
            let mut offset = [0; 8];
            self.input.front(RequestHeader::OFFSET_AT, 8).copy_out(&mut offset);
            shard.expect(volume, u64::from_be_bytes(offset));
        }
    }

    /// Hands the next piece of a long write to the engine when its payload is there.
    fn take_piece(&mut self, shard: &mut Shard) -> bool {
        let slot = self.streaming.expect("looked");
        let state = self.under_way[slot].as_ref().expect("under way");
        let (left, bytes) = state.next_piece();
        if (self.input.available() as u64) < bytes || !self.submit_piece(slot, shard) {
            return false;
        }
        self.input.take(bytes as usize);
        if left == bytes {
            self.streaming = None;
        }
        true
    }

    /// Hands over every piece of a command that the engine takes.
    fn submit_rest(&mut self, slot: usize, shard: &mut Shard) {
        let goes_on = |state: &UnderWay| !state.is_submitted && !state.waits_for_memory();
        while self.under_way[slot].as_ref().is_some_and(goes_on) {
            if !self.submit_piece(slot, shard) {
                return self.unfinished.push(slot);
            }
        }
    }

    fn try_unfinished(&mut self, shard: &mut Shard) {
        for _ in 0..self.unfinished.len() {
            let slot = self.unfinished.remove(0);
            self.submit_rest(slot, shard);
            if self.unfinished.contains(&slot) {
                return;
            }
        }
    }

    fn submit_piece(&mut self, slot: usize, shard: &mut Shard) -> bool {
        let Phase::Transmission { volume, .. } = self.phase else { return false };
        let state = self.under_way[slot].as_ref().expect("under way");
        let command = state.command;
        let (total, done) = (u64::from(command.length), state.submitted);
        let offset = command.offset + done;
        let rest = total - done;
        let mut buffer = 0;
        let (op, length, span) = match command.kind {
            Kind::Read { .. } => {
                let length = rest.min(REQUEST_BYTES_MAX - offset % BLOCK_BYTES);
                let (_, memory) = state.memory.expect("a read has memory");
                let blocks = offset / BLOCK_BYTES - command.offset / BLOCK_BYTES;
                (Op::Read, length, Some(memory.skip((blocks * BLOCK_BYTES) as usize)))
            }
            Kind::Cache => {
                let length = rest.min(REQUEST_BYTES_MAX - offset % BLOCK_BYTES);
                (Op::Fetch, length, state.memory.map(|(_, memory)| memory))
            }
            Kind::Write { fua } => {
                let length = if state.is_long_write() { state.next_piece().1 } else { rest };
                // A short one's is known; of a long one the next piece is at the front.
                let payload = state.payload.unwrap_or_else(|| self.input.payload(length as usize));
                buffer = payload.buffer;
                (Op::Write { fua }, length, Some(payload.span))
            }
            Kind::Trim { .. } => (Op::Discard, rest, None),
            Kind::WriteZeroes { fua, .. } => (Op::WriteZeroes { fua }, rest, None),
            _ => (Op::Flush, 0, None),
        };
        let cookie = self.names.engine(slot, buffer);
        if shard.submit(volume, op, offset, length, span, cookie).is_err() {
            return false;
        }
        let state = self.under_way[slot].as_mut().expect("under way");
        state.submitted += length;
        state.is_submitted = state.submitted >= total;
        state.pieces += 1;
        if op == Op::Flush {
            state.then = Then::Answer;
        }
        if state.is_long_write() {
            self.input.wait(buffer);
        }
        true
    }

    /// The engine has answered a piece.
    pub(super) fn answered(
        &mut self,
        number: usize,
        result: Result<(), RequestError>,
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        let (slot, buffer) = of_number(number);
        if slot == aside::AGAIN {
            return self.answered_again(result, shard, pool);
        }
        let state = self.under_way[slot].as_mut().expect("under way");
        state.pieces -= 1;
        if matches!(state.command.kind, Kind::Write { .. }) {
            self.input.answered(buffer, pool);
        }
        if let Err(error) = result {
            state.error.get_or_insert(NbdError::from(error));
        }
        let caches = state.command.kind == Kind::Cache;
        let is_over = state.error.is_some() || self.is_closing || self.is_broken;
        if caches && !state.is_submitted && !is_over {
            return self.submit_rest(slot, shard);
        }
        if state.pieces > 0 || !state.is_submitted && !caches {
            return;
        }
        if state.then == Then::Nothing {
            return self.end(slot);
        }
        if caches && let Some((run, _)) = state.memory.take() {
            pool.give(run);
        }
        if state.then == Then::Flush && state.error.is_none() {
            // A trim with FUA: durable before its answer.
            state.command.kind = Kind::Flush;
            state.command.length = 0;
            (state.submitted, state.is_submitted) = (0, false);
            return self.submit_rest(slot, shard);
        }
        if state.error.is_none() && state.memory.is_none() {
            // Most answers are nothing but that it is done.
            let cookie = state.command.cookie;
            self.end(slot);
            return self.push_bytes(&SimpleReplyHeader { error: 0, cookie }.encode(), shard, pool);
        }
        let state = *state;
        self.end(slot);
        self.reply(&state, shard, pool);
    }

    /// A command is not under way any more.
    fn end(&mut self, slot: usize) {
        self.under_way[slot] = None;
        self.free.push(slot);
    }

    fn reply(&mut self, state: &UnderWay, shard: &mut Shard, pool: &mut Pool) {
        let cookie = state.command.cookie;
        let Phase::Transmission { session, .. } = &self.phase else { return };
        let (head, data) = match (state.error, state.memory) {
            (Some(error), memory) => {
                if let Some((run, _)) = memory {
                    pool.give(run);
                }
                (ReplyHead::failure(state.form, cookie, error), None)
            }
            (None, Some(memory)) => (ReplyHead::read(session, &state.command), Some(memory)),
            (None, None) => (ReplyHead::simple(cookie, Ok(())), None),
        };
        self.push_head(&head, shard, pool);
        let Some((run, span)) = data else { return };
        let skip = (state.command.offset % BLOCK_BYTES) as usize;
        let bytes = span.part(skip, state.command.length as usize);
        let copied =
            self.is_broken || self.output.may_copy(bytes.len()) && self.output.push_copy(bytes);
        if copied {
            pool.give(run);
        } else {
            let (at, since) = (state.command.offset, shard.now());
            self.output.push_found(Found { span: bytes, run, at, since });
        }
    }

    fn push_head(&mut self, head: &ReplyHead, shard: &mut Shard, pool: &mut Pool) {
        self.push_bytes(head.as_bytes(), shard, pool);
    }

    fn push_bytes(&mut self, bytes: &[u8], shard: &mut Shard, pool: &mut Pool) {
        if !self.is_broken && !self.output.push(bytes) {
            self.broken(shard, pool);
        }
    }
}
