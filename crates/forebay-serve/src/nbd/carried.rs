// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection on its way to the next program that this process executes: what there is of it beside its
//! socket, as bytes.
//!
//! # Invariants
//!
//! - **C1** Only what is at rest is carried (`Connection::is_at_rest`): nothing of it is with the engine or with the
//!   reactor. So each request is in one place. It was answered, and what is not sent of its answer is in `output`, but for
//!   what was read: of that there is where it is in the volume, and the next program reads it (A3 of `connection/aside.rs`). Or
//!   nothing of it was done, and as much of it as came is in `input`. Of a long write the first `submitted` bytes were
//!   done, and `input` begins with the byte behind them.
//! - **C2** One program at a time has a connection: whoever hands it over does not touch its socket again, and
//!   whoever takes it does so when nothing brings back the program before (G6 of the program's `upgrade.rs`).
//! - **C3** A session goes on exactly as its client was told, or it ends.
//! - **C4** The bytes are believed nothing: a checksum, a bound before memory is taken for anything, and a long write
//!   is judged by the session as if its header came from the client.
//!
//! # As bytes
//!
//! `crate::carried` has the file. A record is what [its `encode`] puts down, and has one descriptor, the socket.
//!
//! # Limits
//!
//! What a connection may have at all: [`INPUT_BYTES`] received, [`RING_BYTES`] of small things to be sent and
//! [`EDGE_BYTES`] of what was read, and to be read for it no more than all connections together ([`POOL_BYTES`]).
//!
//! # Not here
//!
//! Bringing a connection to rest and setting one going: `connection/carry.rs`. The file, and the sockets: `crate::carried`.

use super::connection::INPUT_BYTES;
use super::export::{Agreed, Export, Features, LogicalBlock, Session};
use super::listen::POOL_BYTES;
use super::output::{EDGE_BYTES, RING_BYTES};
use super::transmission::{Command, Decoded, Kind, WRITE_SKIP_BYTES_MAX, decode};
use super::wire::{
    RequestHeader, STRING_BYTES_MAX, command, command_flag, transmission_flag as flag,
};
use crate::bytes::Reader;
use crate::carried::{CarriedError, Record, put};
use forebay_core::limits::REQUEST_BYTES_MAX;

/// Bits of the byte that says what a connection agreed on and how far it is.
mod state {
    pub(super) const STRUCTURED_REPLIES: u8 = 1 << 0;
    pub(super) const BASE_ALLOCATION: u8 = 1 << 1;
    pub(super) const NO_ZEROES: u8 = 1 << 2;
    pub(super) const CLOSING: u8 = 1 << 3;
    pub(super) const OVER: u8 = 1 << 4;
    pub(super) const ALL: u8 = (1 << 5) - 1;
}
/// Instead of the length of a piece of output: where it is in the volume, and how long it is (8 bytes each).
const ASIDE: u32 = u32::MAX;

/// A write that goes to the engine piece by piece, as far as it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongWrite {
    /// Comes back in the reply.
    pub cookie: u64,
    /// Durable before its answer.
    pub fua: bool,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// Of them done.
    pub submitted: u32,
    /// The code of the error that its answer will say; 0: none so far.
    pub error: u32,
}

/// Bytes to be sent; not none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These.
    Bytes(Vec<u8>),
    /// What is in the volume.
    Aside {
        /// The first of them.
        at: u64,
        /// How many.
        length: u64,
    },
}

/// A connection at rest (C1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The volume's lasting name.
    pub volume: [u8; 16],
    /// What the client was told: the export's name,
    pub export_name: String,
    /// its bytes,
    pub size_bytes: u64,
    /// its smallest unit,
    pub logical_block: LogicalBlock,
    /// and what it can do: bits of [`super::wire::transmission_flag`].
    pub flags: u16,
    /// What else was agreed on.
    pub agreed: Agreed,
    /// Nothing more comes: what is there is finished.
    pub is_closing: bool,
    /// The client has said so, or something that cannot be understood.
    pub is_over: bool,
    /// Bytes of a refused write that are still to be thrown away.
    pub skip_bytes: u32,
    /// A write in the middle of its pieces.
    pub long_write: Option<LongWrite>,
    /// Received and not taken.
    pub input: Vec<u8>,
    /// Not sent.
    pub output: Vec<Piece>,
}

impl Record for Carried {
    const KIND: &'static str = "NBD connection";
    /// `FBNBDCON`.
    const MAGIC: u64 = 0x4642_4e42_4443_4f4e;
    const VERSION: u32 = 2;
    /// What it may hold, and a length for each piece of it.
    const BYTES_MAX: usize = INPUT_BYTES + RING_BYTES + EDGE_BYTES + STRING_BYTES_MAX + (1 << 20);

    /// Its socket.
    fn descriptor_count(&self) -> usize {
        1
    }

    fn encode(&self) -> Vec<u8> {
        let is = |on: bool, bit: u8| if on { bit } else { 0 };
        let state = is(self.agreed.structured_replies, state::STRUCTURED_REPLIES)
            | is(self.agreed.base_allocation, state::BASE_ALLOCATION)
            | is(self.agreed.no_zeroes, state::NO_ZEROES)
            | is(self.is_closing, state::CLOSING)
            | is(self.is_over, state::OVER);
        let mut out = self.volume.to_vec();
        put(&mut out, self.export_name.as_bytes());
        out.extend(self.size_bytes.to_be_bytes());
        out.extend(self.logical_block.bytes().to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend([state, u8::from(self.long_write.is_some())]);
        out.extend(self.skip_bytes.to_be_bytes());
        if let Some(write) = self.long_write {
            out.extend(write.header().encode());
            out.extend(write.submitted.to_be_bytes());
            out.extend(write.error.to_be_bytes());
        }
        put(&mut out, &self.input);
        out.extend((self.output.len() as u32).to_be_bytes());
        for piece in &self.output {
            match piece {
                Piece::Bytes(bytes) => put(&mut out, bytes),
                Piece::Aside { at, length } => {
                    out.extend(ASIDE.to_be_bytes());
                    out.extend(at.to_be_bytes());
                    out.extend(length.to_be_bytes());
                }
            }
        }
        out
    }

    /// C4.
    fn decode(bytes: &[u8]) -> Result<Carried, CarriedError> {
        let mut reader = Reader::new(bytes);
        let volume = reader.bytes(16).ok_or(CarriedError::Cut)?;
        let name = reader.string().ok_or(CarriedError::Cut)?;
        let size_bytes = reader.u64().ok_or(CarriedError::Cut)?;
        let logical_block = match reader.u32().ok_or(CarriedError::Cut)? {
            512 => LogicalBlock::Bytes512,
            4096 => LogicalBlock::Bytes4096,
            _ => return Err(CarriedError::Field("logical block")),
        };
        let flags = reader.u16().ok_or(CarriedError::Cut)?;
        let [state, has_long_write] = reader.u16().ok_or(CarriedError::Cut)?.to_be_bytes();
        let skip_bytes = reader.u32().ok_or(CarriedError::Cut)?;
        if state & !state::ALL != 0 || has_long_write > 1 {
            return Err(CarriedError::Field("state"));
        }
        let is = |bit: u8| state & bit != 0;
        if size_bytes % u64::from(logical_block.bytes()) != 0 {
            return Err(CarriedError::Field("size"));
        }
        if skip_bytes > WRITE_SKIP_BYTES_MAX || skip_bytes > 0 && has_long_write == 1 {
            return Err(CarriedError::Field("bytes to be skipped"));
        }
        let long_write =
            if has_long_write == 1 { Some(LongWrite::decode(&mut reader)?) } else { None };
        let input = reader.string().ok_or(CarriedError::Cut)?;
        if input.len() > INPUT_BYTES {
            return Err(CarriedError::Field("bytes received"));
        }
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let export_name = text(name).filter(|name| name.len() <= STRING_BYTES_MAX);
        let carried = Carried {
            volume: volume.try_into().map_err(|_| CarriedError::Cut)?,
            export_name: export_name.ok_or(CarriedError::Field("name"))?,
            size_bytes,
            logical_block,
            flags,
            agreed: Agreed {
                structured_replies: is(state::STRUCTURED_REPLIES),
                base_allocation: is(state::BASE_ALLOCATION),
                no_zeroes: is(state::NO_ZEROES),
            },
            is_closing: is(state::CLOSING),
            is_over: is(state::OVER),
            skip_bytes,
            long_write,
            input: input.to_vec(),
            output: output(&mut reader, size_bytes)?,
        };
        if reader.rest().is_empty() { Ok(carried) } else { Err(CarriedError::Cut) }
    }
}

impl Carried {
    /// The session as the client was told, if what is served now can keep it (C3).
    pub(super) fn session(&self, index: usize, export: &Export) -> Result<Session, CarriedError> {
        self.as_told(Session::new(index, export, self.agreed))
    }

    /// The same of one that is made of what is served now.
    pub(super) fn as_told(&self, mut session: Session) -> Result<Session, CarriedError> {
        let offered = session.transmission_flags();
        if self.logical_block != session.logical_block {
            return Err(CarriedError::Served("the volume has other blocks now"));
        }
        if self.size_bytes > session.size_bytes {
            return Err(CarriedError::Served("the volume is smaller now"));
        }
        let fixed = flag::HAS_FLAGS | flag::READ_ONLY;
        if self.flags & !offered != 0 || (self.flags ^ offered) & fixed != 0 {
            return Err(CarriedError::Served("its client was told of what is not offered now"));
        }
        if self.agreed != session.agreed() {
            return Err(CarriedError::Field("agreement"));
        }
        session.features = Features::of_flags(self.flags);
        session.size_bytes = self.size_bytes;
        Ok(session)
    }
}

impl LongWrite {
    fn header(&self) -> RequestHeader {
        let flags = if self.fua { command_flag::FUA } else { 0 };
        let LongWrite { cookie, offset, length, .. } = *self;
        RequestHeader { flags, command: command::WRITE, cookie, offset, length }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<LongWrite, CarriedError> {
        let bytes = reader.bytes(RequestHeader::BYTES).ok_or(CarriedError::Cut)?;
        let header = RequestHeader::decode(bytes).and_then(Result::ok);
        let submitted = reader.u32().ok_or(CarriedError::Cut)?;
        let error = reader.u32().ok_or(CarriedError::Cut)?;
        let is_write =
            |it: &RequestHeader| it.command == command::WRITE && it.flags & !command_flag::FUA == 0;
        let header = header.filter(is_write).ok_or(CarriedError::Field("write"))?;
        let RequestHeader { cookie, offset, length, .. } = header;
        let fua = header.flags & command_flag::FUA != 0;
        Ok(LongWrite { cookie, fua, offset, length, submitted, error })
    }

    /// The command, as the session judges it (C4).
    pub(super) fn command(&self, session: &Session) -> Result<Command, CarriedError> {
        let block = session.logical_block.bytes();
        let is_long = u64::from(self.length) > REQUEST_BYTES_MAX;
        let is_underway = self.submitted < self.length && self.submitted.is_multiple_of(block);
        match decode(session, &self.header().encode()) {
            Decoded::Command(command @ Command { kind: Kind::Write { .. }, .. })
                if is_long && is_underway =>
            {
                Ok(command)
            }
            _ => Err(CarriedError::Field("write")),
        }
    }
}

fn output(reader: &mut Reader<'_>, size_bytes: u64) -> Result<Vec<Piece>, CarriedError> {
    let count = reader.u32().ok_or(CarriedError::Cut)?;
    let (mut pieces, mut here, mut aside) = (Vec::new(), 0, 0);
    // Bounded by the record: each piece takes some of it.
    for _ in 0..count {
        let length = reader.u32().ok_or(CarriedError::Cut)?;
        let (piece, is_good) = if length == ASIDE {
            let at = reader.u64().ok_or(CarriedError::Cut)?;
            let length = reader.u64().ok_or(CarriedError::Cut)?;
            let end = at.checked_add(length).filter(|end| length > 0 && *end <= size_bytes);
            aside = length.saturating_add(aside);
            (Piece::Aside { at, length }, end.is_some() && aside <= POOL_BYTES as u64)
        } else {
            let bytes = reader.bytes(length as usize).ok_or(CarriedError::Cut)?;
            here += bytes.len();
            let is_good = !bytes.is_empty() && here <= RING_BYTES + EDGE_BYTES;
            (Piece::Bytes(bytes.to_vec()), is_good)
        };
        if !is_good {
            return Err(CarriedError::Field("bytes to be sent"));
        }
        pieces.push(piece);
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests;
