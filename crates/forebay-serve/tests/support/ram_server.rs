// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A blocking NBD server over memory: the least that makes the codec serve a disk. Shared by
//! `tests/codec.rs` and `examples/null_server.rs`.

use std::io::{self, Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_serve::nbd::error::{CloseReason, NbdError};
use forebay_serve::nbd::export::{Export, Session};
use forebay_serve::nbd::handshake::{Handshake, Step};
use forebay_serve::nbd::reply::{
    ByteRange, ReplyHead, STATUS_REPLY_BYTES_MAX, StatusExtent, StatusReply,
};
use forebay_serve::nbd::transmission::{Command, Decoded, Kind, ReplyForm, decode};
use forebay_serve::nbd::wire::{RequestHeader, allocation};

const BLOCK: usize = 4096;

/// A disk in memory that remembers which of its blocks were given up.
pub(crate) struct RamDisk {
    state: Mutex<State>,
}

struct State {
    bytes: Vec<u8>,
    stored: Vec<bool>,
}

impl RamDisk {
    /// All zeros, nothing stored.
    pub(crate) fn new(size_bytes: u64) -> Self {
        let size = usize::try_from(size_bytes).expect("a disk in memory fits in memory");
        let stored = vec![false; size.div_ceil(BLOCK)];
        Self { state: Mutex::new(State { bytes: vec![0; size], stored }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let mut state = self.state();
        state.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        state.stored[offset / BLOCK..(offset + bytes.len()).div_ceil(BLOCK)].fill(true);
    }

    fn zero(&self, offset: usize, length: usize, keep: bool) {
        let mut state = self.state();
        state.bytes[offset..offset + length].fill(0);
        if keep {
            state.stored[offset / BLOCK..(offset + length).div_ceil(BLOCK)].fill(true);
        } else {
            let (first, end) = (offset.div_ceil(BLOCK), (offset + length) / BLOCK);
            state.stored[first.min(end)..end].fill(false);
        }
    }
}

/// Serves one connection until it ends. `disks` are in the order of `exports`.
pub(crate) fn serve(
    stream: &mut (impl Read + Write),
    exports: &[Export],
    disks: &[RamDisk],
) -> io::Result<Option<CloseReason>> {
    let mut connection = Connection { stream, held: Vec::new() };
    connection.stream.write_all(&Handshake::greeting())?;
    let mut handshake = Handshake::new();
    let mut out = Vec::new();
    let session = loop {
        out.clear();
        let (consumed, step) = handshake.advance(&connection.held, exports, &mut out);
        connection.held.drain(..consumed);
        let sent = connection.stream.write_all(&out);
        if let Step::Close(reason) = step {
            return Ok(Some(reason)); // Whoever aborts may be gone before the answer.
        }
        sent?;
        match step {
            Step::Transmit(session) => break session,
            Step::NeedMore if consumed == 0 && !connection.read_more()? => return Ok(None),
            Step::NeedMore | Step::Close(_) => {}
        }
    };
    let disk = &disks[session.export_index];
    connection.transmit(&session, disk)
}

struct Connection<'a, S> {
    stream: &'a mut S,
    /// Received and not yet taken.
    held: Vec<u8>,
}

impl<S: Read + Write> Connection<'_, S> {
    fn transmit(&mut self, session: &Session, disk: &RamDisk) -> io::Result<Option<CloseReason>> {
        let mut buffer = Vec::with_capacity(STATUS_REPLY_BYTES_MAX);
        loop {
            match decode(session, &self.held) {
                Decoded::NeedMore => {
                    if !self.read_more()? {
                        return Ok(None);
                    }
                }
                Decoded::Close(reason) => return Ok(Some(reason)),
                Decoded::Refuse { cookie, error, form, skip_bytes } => {
                    self.held.drain(..RequestHeader::BYTES);
                    if self.payload(skip_bytes)?.is_none() {
                        return Ok(None);
                    }
                    self.stream.write_all(ReplyHead::failure(form, cookie, error).as_bytes())?;
                }
                Decoded::Command(Command { kind: Kind::Disconnect, .. }) => return Ok(None),
                Decoded::Command(command) => {
                    self.held.drain(..RequestHeader::BYTES);
                    let Some(payload) = self.payload(command.payload_bytes())? else {
                        return Ok(None);
                    };
                    buffer.clear();
                    answer(session, disk, &command, &payload, &mut buffer);
                    self.stream.write_all(&buffer)?;
                }
            }
        }
    }

    fn payload(&mut self, count: u32) -> io::Result<Option<Vec<u8>>> {
        while self.held.len() < count as usize {
            if !self.read_more()? {
                return Ok(None);
            }
        }
        Ok(Some(self.held.drain(..count as usize).collect()))
    }

    fn read_more(&mut self) -> io::Result<bool> {
        let mut piece = [0; 64 << 10];
        let count = self.stream.read(&mut piece)?;
        self.held.extend_from_slice(&piece[..count]);
        Ok(count > 0)
    }
}

fn answer(session: &Session, disk: &RamDisk, command: &Command, payload: &[u8], out: &mut Vec<u8>) {
    let (offset, length) = (command.offset as usize, command.length as usize);
    match command.kind {
        Kind::Read { df } => return answer_read(session, disk, command, df, out),
        Kind::BlockStatus { .. } => {
            let state = disk.state();
            let mut reply = StatusReply::start(command, out);
            let mut at = offset;
            loop {
                let next = (at / BLOCK + 1) * BLOCK;
                let hole = allocation::HOLE | allocation::ZERO;
                let flags = if state.stored[at / BLOCK] { 0 } else { hole };
                if !reply.push(StatusExtent { length: (next - at) as u32, flags }) {
                    break;
                }
                at = next;
            }
            return reply.finish();
        }
        Kind::Write { .. } => disk.write(offset, payload),
        Kind::Trim { .. } => disk.zero(offset, length, false),
        Kind::WriteZeroes { no_hole: true, fast_zero: true, .. } => {
            let head = ReplyHead::simple(command.cookie, Err(NbdError::NotSupported));
            return out.extend_from_slice(head.as_bytes());
        }
        Kind::WriteZeroes { no_hole, .. } => disk.zero(offset, length, no_hole),
        Kind::Flush | Kind::Cache | Kind::Disconnect => {}
    }
    out.extend_from_slice(ReplyHead::simple(command.cookie, Ok(())).as_bytes());
}

/// Holes as holes, unless the client wants one piece or cannot understand them.
fn answer_read(session: &Session, disk: &RamDisk, command: &Command, df: bool, out: &mut Vec<u8>) {
    let state = disk.state();
    let (start, length) = (command.offset as usize, command.length as usize);
    let end = start + length;
    if df || command.reply_form(session) == ReplyForm::Simple {
        out.extend_from_slice(ReplyHead::read(session, command).as_bytes());
        return out.extend_from_slice(&state.bytes[start..end]);
    }
    let mut at = start;
    while at < end {
        let stored = state.stored[at / BLOCK];
        let mut next = (at / BLOCK + 1) * BLOCK;
        while next < end && state.stored[next / BLOCK] == stored {
            next += BLOCK;
        }
        let next = next.min(end);
        let range = ByteRange { offset: at as u64, length: (next - at) as u32 };
        if stored {
            let head = ReplyHead::offset_data(command.cookie, next == end, range);
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(&state.bytes[at..next]);
        } else {
            let head = ReplyHead::offset_hole(command.cookie, next == end, range);
            out.extend_from_slice(head.as_bytes());
        }
        at = next;
    }
}
