// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A connection on its way to the next program that this process executes: what there is of it beside its
//! socket, as bytes.
//!
//! # Invariants
//!
//! - **C1** Only what is at rest is carried (`Connection::is_at_rest`): nothing of it is with the engine or with the
//!   reactor. So each request is in one place. It was answered, and what is not sent of its answer is in `output`; or
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
//! Big-endian. The file: [`MAGIC`], [`VERSION`], then for each socket, in their order, the length of its record
//! (4 bytes), the record's CRC32C (4 bytes), the record. A record is what [`Carried::encode`] puts down; lists and
//! texts begin with their length (4 bytes). Another meaning of any of it is another [`VERSION`].
//!
//! # Limits
//!
//! What a connection may have at all: [`INPUT_BYTES`] received, [`RING_BYTES`] of small things to be sent, and of
//! what was read for it no more than all connections together ([`POOL_BYTES`]).
//!
//! # Not here
//!
//! Bringing a connection to rest and setting one going: `connection/carry.rs`. Sockets: [`super::passage`].

use super::bytes::Reader;
use super::connection::INPUT_BYTES;
use super::export::{Agreed, Export, Features, LogicalBlock, Session};
use super::listen::POOL_BYTES;
use super::output::RING_BYTES;
use super::transmission::{Command, Decoded, Kind, WRITE_SKIP_BYTES_MAX, decode};
use super::wire::{
    RequestHeader, STRING_BYTES_MAX, command, command_flag, transmission_flag as flag,
};
use forebay_core::format::bytes::crc32c;
use forebay_core::limits::REQUEST_BYTES_MAX;
use std::io;

/// How a file of carried connections begins: `FBNBDCON`.
pub const MAGIC: u64 = 0x4642_4e42_4443_4f4e;
/// What the bytes mean.
pub const VERSION: u32 = 1;
/// Bytes before the first record, and before each.
pub(super) const FILE_HEADER_BYTES: usize = 12;
pub(super) const RECORD_HEADER_BYTES: usize = 8;
/// Bytes of one record at most: what it may hold, and a length for each piece of it.
pub(super) const RECORD_BYTES_MAX: usize =
    INPUT_BYTES + RING_BYTES + POOL_BYTES + STRING_BYTES_MAX + (1 << 20);

/// Bits of the byte that says what a connection agreed on and how far it is.
mod state {
    pub(super) const STRUCTURED_REPLIES: u8 = 1 << 0;
    pub(super) const BASE_ALLOCATION: u8 = 1 << 1;
    pub(super) const NO_ZEROES: u8 = 1 << 2;
    pub(super) const CLOSING: u8 = 1 << 3;
    pub(super) const OVER: u8 = 1 << 4;
    pub(super) const ALL: u8 = (1 << 5) - 1;
}
/// In the length of a piece of output: its bytes lay in the memory of reads.
const OF_READS: u32 = 1 << 31;

/// Why connections, or one, cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CarriedError {
    /// The file cannot be read.
    #[error("what was left of it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The file is no such file.
    #[error("what was left of it begins with {0:#018x}, not as connections do")]
    Magic(u64),
    /// The program before puts it down in another way.
    #[error(
        "the program before leaves connections in version {0}, this one takes version {VERSION}"
    )]
    Version(u32),
    /// A record is longer than one can be, or than the file.
    #[error("what was left of it would be {0} bytes long")]
    Length(u64),
    /// A record is not what was put down.
    #[error("what was left of it has another checksum")]
    Checksum,
    /// A record ends early, or does not end.
    #[error("what was left of it has no end where it should")]
    Cut,
    /// A field holds what it cannot hold.
    #[error("what was left of it holds no possible {0}")]
    Field(&'static str),
    /// What is served now is not what the client was told (C3).
    #[error("{0}")]
    Served(&'static str),
}

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

/// Bytes to be sent that lie together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// They lay in the memory of reads, else in the connection's own.
    pub of_reads: bool,
    /// The bytes; not none.
    pub bytes: Vec<u8>,
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

impl Carried {
    /// As bytes, with their header.
    pub(super) fn encode(&self) -> Vec<u8> {
        let is = |on: bool, bit: u8| if on { bit } else { 0 };
        let state = is(self.agreed.structured_replies, state::STRUCTURED_REPLIES)
            | is(self.agreed.base_allocation, state::BASE_ALLOCATION)
            | is(self.agreed.no_zeroes, state::NO_ZEROES)
            | is(self.is_closing, state::CLOSING)
            | is(self.is_over, state::OVER);
        let mut out = vec![0; RECORD_HEADER_BYTES];
        out.extend(self.volume);
        put(&mut out, self.export_name.as_bytes(), 0);
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
        put(&mut out, &self.input, 0);
        out.extend((self.output.len() as u32).to_be_bytes());
        for piece in &self.output {
            put(&mut out, &piece.bytes, if piece.of_reads { OF_READS } else { 0 });
        }
        assert!(out.len() - RECORD_HEADER_BYTES <= RECORD_BYTES_MAX);
        let (length, checksum) = (out.len() - RECORD_HEADER_BYTES, crc32c(&out[8..]));
        out[..4].copy_from_slice(&(length as u32).to_be_bytes());
        out[4..8].copy_from_slice(&checksum.to_be_bytes());
        out
    }

    /// What a record holds (C4). Nothing in it is longer than the record.
    pub fn decode(bytes: &[u8]) -> Result<Carried, CarriedError> {
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
            output: output(&mut reader)?,
        };
        if reader.rest().is_empty() { Ok(carried) } else { Err(CarriedError::Cut) }
    }

    /// The session as the client was told, if what is served now can keep it (C3).
    pub(super) fn session(&self, index: usize, export: &Export) -> Result<Session, CarriedError> {
        let mut session = Session::new(index, export, self.agreed);
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
        if self.agreed.base_allocation != session.base_allocation {
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

/// A length, marked, and so many bytes.
fn put(out: &mut Vec<u8>, bytes: &[u8], mark: u32) {
    out.extend((bytes.len() as u32 | mark).to_be_bytes());
    out.extend(bytes);
}

fn output(reader: &mut Reader<'_>) -> Result<Vec<Piece>, CarriedError> {
    let count = reader.u32().ok_or(CarriedError::Cut)?;
    let (mut pieces, mut small, mut of_reads) = (Vec::new(), 0, 0);
    // Bounded by the record: no piece is empty.
    for _ in 0..count {
        let marked = reader.u32().ok_or(CarriedError::Cut)?;
        let bytes = reader.bytes((marked & !OF_READS) as usize).ok_or(CarriedError::Cut)?;
        let piece = Piece { of_reads: marked & OF_READS != 0, bytes: bytes.to_vec() };
        let sum = if piece.of_reads { &mut of_reads } else { &mut small };
        *sum += bytes.len();
        if bytes.is_empty() || small > RING_BYTES || of_reads > POOL_BYTES {
            return Err(CarriedError::Field("bytes to be sent"));
        }
        pieces.push(piece);
    }
    Ok(pieces)
}

/// How a file of them begins.
pub(super) fn file_header() -> [u8; FILE_HEADER_BYTES] {
    let mut bytes = [0; FILE_HEADER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_be_bytes());
    bytes[8..].copy_from_slice(&VERSION.to_be_bytes());
    bytes
}

/// Whether a file begins as one of them.
pub(super) fn check_file(header: &[u8]) -> Result<(), CarriedError> {
    let mut reader = Reader::new(header);
    let magic = reader.u64().ok_or(CarriedError::Cut)?;
    let version = reader.u32().ok_or(CarriedError::Cut)?;
    match (magic, version) {
        (MAGIC, VERSION) => Ok(()),
        (MAGIC, version) => Err(CarriedError::Version(version)),
        (magic, _) => Err(CarriedError::Magic(magic)),
    }
}

/// The length and the checksum of a record, from what is before it.
pub(super) fn record_header(header: &[u8]) -> Result<(usize, u32), CarriedError> {
    let mut reader = Reader::new(header);
    let length = reader.u32().ok_or(CarriedError::Cut)?;
    let checksum = reader.u32().ok_or(CarriedError::Cut)?;
    if length as usize > RECORD_BYTES_MAX {
        return Err(CarriedError::Length(length.into()));
    }
    Ok((length as usize, checksum))
}

/// A record whose bytes are those that were put down.
pub(super) fn checked(record: &[u8], checksum: u32) -> Result<Carried, CarriedError> {
    if crc32c(record) != checksum {
        return Err(CarriedError::Checksum);
    }
    Carried::decode(record)
}

#[cfg(test)]
mod tests;
