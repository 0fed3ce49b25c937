// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests: from bytes to commands that are known to be good.
//!
//! [`decode`] looks at one header and either returns a [`Command`] that every layer below can
//! take as it is, or says which error to answer, or that the connection cannot go on.
//!
//! # Invariants
//!
//! - **T1** The range of a command lies inside the export, is aligned to its logical block and,
//!   except for a flush or a disconnect, is not empty.
//! - **T2** A command was offered to the client, and so was each of its flags.
//! - **T3** Neither a read nor a write is longer than [`TRANSFER_BYTES_MAX`].
//! - **T4** After a refusal the next header begins right behind the bytes to be skipped.
//!
//! # Which error
//!
//! The first that applies, from top to bottom:
//!
//! | what is wrong                                   | answer     |
//! |-------------------------------------------------|------------|
//! | a command or flag unknown or not offered        | EINVAL     |
//! | a write, trim or zeroing of a read-only export  | EPERM      |
//! | an empty range                                  | EINVAL     |
//! | a read or write longer than the largest block   | EINVAL     |
//! | a range that is not aligned                     | EINVAL     |
//! | a write or zeroing past the end                 | ENOSPC     |
//! | anything else past the end                      | EINVAL     |
//!
//! # Limits
//!
//! [`TRANSFER_BYTES_MAX`]; a write that is refused is skipped up to [`WRITE_SKIP_BYTES_MAX`].
//! What carries no data may be as long as its 32 bits allow: the protocol asks clients for less
//! in some cases, but nothing here needs it.

use super::error::{CloseReason, NbdError};
use super::export::Session;
use super::wire::{RequestHeader, TRANSFER_BYTES_MAX, command, command_flag as flag};

/// Bytes of a refused write that are skipped before it is cheaper to close.
pub const WRITE_SKIP_BYTES_MAX: u32 = 64 << 20;

/// One request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Comes back in the reply. Chosen by the client, so it may not be unique.
    pub cookie: u64,
    /// What is asked for.
    pub kind: Kind,
    /// First byte.
    pub offset: u64,
    /// Bytes; zero for a flush and a disconnect.
    pub length: u32,
}

impl Command {
    /// Bytes that follow the header on the connection.
    pub fn payload_bytes(&self) -> u32 {
        if matches!(self.kind, Kind::Write { .. }) { self.length } else { 0 }
    }

    /// How this command has to be answered.
    pub fn reply_form(&self, session: &Session) -> ReplyForm {
        let chunks = matches!(self.kind, Kind::Read { .. } | Kind::BlockStatus { .. });
        ReplyForm::of(session, chunks)
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Read bytes.
    Read {
        /// Answer with at most one content chunk.
        df: bool,
    },
    /// Write the bytes that follow the header.
    Write {
        /// Durable before its answer.
        fua: bool,
    },
    /// Everything answered before becomes durable.
    Flush,
    /// The range is given up.
    Trim {
        /// Durable before its answer.
        fua: bool,
    },
    /// The range reads as zeros from now on.
    WriteZeroes {
        /// Durable before its answer.
        fua: bool,
        /// The zeros must take up space.
        no_hole: bool,
        /// Answer ENOTSUP unless it is faster than writing them.
        fast_zero: bool,
    },
    /// Say what the range holds.
    BlockStatus {
        /// With one descriptor.
        req_one: bool,
    },
    /// The range will be read soon.
    Cache,
    /// Answer what is under way, then close; this has no answer.
    Disconnect,
}

/// In which of its two forms a reply has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyForm {
    /// Sixteen bytes, and after a successful read its data.
    Simple,
    /// Chunks. Once structured replies are agreed on, a read must be answered so, errors
    /// included; block status has no other form.
    Structured,
}

impl ReplyForm {
    fn of(session: &Session, chunks: bool) -> Self {
        if chunks && session.structured_replies { Self::Structured } else { Self::Simple }
    }
}

/// What the front of the input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Less than a header.
    NeedMore,
    /// A header ([`RequestHeader::BYTES`]) with a good command. The payload of a write follows.
    Command(Command),
    /// A header ([`RequestHeader::BYTES`]) with a command to be answered with an error.
    Refuse {
        /// The request's.
        cookie: u64,
        /// What to answer.
        error: NbdError,
        /// How to answer.
        form: ReplyForm,
        /// Bytes behind the header to be thrown away.
        skip_bytes: u32,
    },
    /// The connection cannot go on.
    Close(CloseReason),
}

/// Looks at the header at the front of `input`. Consumes nothing: the caller knows from the
/// answer how much it took.
pub fn decode(session: &Session, input: &[u8]) -> Decoded {
    let header = match RequestHeader::decode(input) {
        None => return Decoded::NeedMore,
        Some(Ok(header)) => header,
        Some(Err(magic)) => return Decoded::Close(CloseReason::BadRequestMagic(magic)),
    };
    let checked = kind(session, header).and_then(|kind| check(session, header, kind));
    match checked {
        Ok(command) => Decoded::Command(command),
        Err(error) => refuse(session, header, error),
    }
}

fn refuse(session: &Session, header: RequestHeader, error: NbdError) -> Decoded {
    let skip_bytes = if header.command == command::WRITE { header.length } else { 0 };
    if skip_bytes > WRITE_SKIP_BYTES_MAX {
        return Decoded::Close(CloseReason::WriteTooLong(skip_bytes));
    }
    let chunks = matches!(header.command, command::READ | command::BLOCK_STATUS);
    let form = ReplyForm::of(session, chunks);
    Decoded::Refuse { cookie: header.cookie, error, form, skip_bytes } // T4
}

/// The command and its flags, if they were offered (T2).
fn kind(session: &Session, header: RequestHeader) -> Result<Kind, NbdError> {
    let features = session.features;
    let has = |bit: u16| header.flags & bit != 0;
    let offered = |on: bool, bits: u16| if on { bits } else { 0 };
    // FUA is no error on any command once it is offered; where nothing is written it means nothing.
    let fua = offered(features.fua, flag::FUA);
    let (known, flags, kind) = match header.command {
        command::READ => (true, offered(features.df, flag::DF), Kind::Read { df: has(flag::DF) }),
        command::WRITE => (true, 0, Kind::Write { fua: has(flag::FUA) }),
        command::DISCONNECT => (true, 0, Kind::Disconnect),
        command::FLUSH => (features.flush, 0, Kind::Flush),
        command::TRIM => {
            (features.trim || session.read_only, 0, Kind::Trim { fua: has(flag::FUA) })
        }
        command::CACHE => (features.cache, 0, Kind::Cache),
        command::WRITE_ZEROES => (
            features.write_zeroes || session.read_only,
            flag::NO_HOLE | offered(features.fast_zero, flag::FAST_ZERO),
            Kind::WriteZeroes {
                fua: has(flag::FUA),
                no_hole: has(flag::NO_HOLE),
                fast_zero: has(flag::FAST_ZERO),
            },
        ),
        command::BLOCK_STATUS => (
            session.base_allocation,
            flag::REQ_ONE,
            Kind::BlockStatus { req_one: has(flag::REQ_ONE) },
        ),
        _ => return Err(NbdError::Invalid),
    };
    // Whoever disconnects is let go, whatever else the header says.
    let flags_good = header.flags & !(flags | fua) == 0 || kind == Kind::Disconnect;
    if known && flags_good { Ok(kind) } else { Err(NbdError::Invalid) }
}

/// The range, if the export has it (T1, T3).
fn check(session: &Session, header: RequestHeader, kind: Kind) -> Result<Command, NbdError> {
    let RequestHeader { cookie, offset, length, .. } = header;
    if matches!(kind, Kind::Flush | Kind::Disconnect) {
        // Both should be zero; some clients' are not, and they mean nothing.
        return Ok(Command { cookie, kind, offset: 0, length: 0 });
    }
    let writes = matches!(kind, Kind::Write { .. } | Kind::WriteZeroes { .. });
    if session.read_only && (writes || matches!(kind, Kind::Trim { .. })) {
        return Err(NbdError::NotPermitted);
    }
    if length == 0 {
        return Err(NbdError::Invalid);
    }
    let transfers = matches!(kind, Kind::Read { .. } | Kind::Write { .. });
    if transfers && length > TRANSFER_BYTES_MAX {
        return Err(NbdError::Invalid);
    }
    let block = session.logical_block.bytes();
    if !offset.is_multiple_of(u64::from(block)) || !length.is_multiple_of(block) {
        return Err(NbdError::Invalid);
    }
    let inside = offset.checked_add(u64::from(length)).is_some_and(|end| end <= session.size_bytes);
    if !inside {
        return Err(if writes { NbdError::NoSpace } else { NbdError::Invalid });
    }
    Ok(Command { cookie, kind, offset, length })
}

#[cfg(test)]
mod tests;
