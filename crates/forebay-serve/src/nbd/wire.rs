// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The numbers of the protocol, and the fixed-size headers that carry them.
//!
//! Everything is big-endian. `encode` returns a fixed array; `decode` takes one and checks
//! nothing but the magic, because what a field may hold depends on the session.

use crate::bytes::{Reader, Writer};

/// First eight bytes a server sends: `NBDMAGIC`.
pub const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of a newstyle server, and the start of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// What the server says of itself, and (same bits) what the client answers.
pub mod handshake_flag {
    /// The fixed newstyle: unknown options get an answer instead of a closed connection.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The answer to `NBD_OPT_EXPORT_NAME` ends without its 124 zeros.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// What the server says of an export.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export takes no writes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_CMD_TRIM` is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` is understood.
    pub const SEND_DF: u16 = 1 << 7;
    /// Several connections see one coherent disk: a flush on one holds for all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// What a client may ask during the handshake.
pub mod option {
    /// Enter transmission; the old way, which has no answer for an error.
    pub const EXPORT_NAME: u32 = 1;
    /// Give up politely.
    pub const ABORT: u32 = 2;
    /// Name the exports.
    pub const LIST: u32 = 3;
    /// Encrypt from here on.
    pub const STARTTLS: u32 = 5;
    /// Describe one export.
    pub const INFO: u32 = 6;
    /// Describe one export and enter transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name the metadata contexts of one export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts of one export.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// What the server answers to an option.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of the list.
    pub const SERVER: u32 = 2;
    /// One fact about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The option's content is malformed or comes at the wrong time.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Facts about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The name the server calls it by.
    pub const NAME: u16 = 1;
    /// Free text.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, best and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What a client may ask of an export.
pub mod command {
    /// Read bytes.
    pub const READ: u16 = 0;
    /// Write bytes.
    pub const WRITE: u16 = 1;
    /// Close politely.
    pub const DISCONNECT: u16 = 2;
    /// Everything answered before becomes durable.
    pub const FLUSH: u16 = 3;
    /// The range is given up.
    pub const TRIM: u16 = 4;
    /// The range will be read soon.
    pub const CACHE: u16 = 5;
    /// The range reads as zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Say what the range holds.
    pub const BLOCK_STATUS: u16 = 7;
}

/// How a client wants a command done.
pub mod command_flag {
    /// Durable before its answer.
    pub const FUA: u16 = 1 << 0;
    /// Zeros must take up space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The answer to a read has one content chunk.
    pub const DF: u16 = 1 << 2;
    /// The answer to a block status has one descriptor.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Rather fail than write zeros slowly.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Kinds of chunk in a structured reply.
pub mod chunk {
    /// Flag of the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Nothing; only useful with [`FLAG_DONE`].
    pub const NONE: u16 = 0;
    /// An offset and bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset and a count of zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// A context and descriptors.
    pub const BLOCK_STATUS: u16 = 5;
    /// Set in every error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error and a text.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error, a text and where.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Flags of a descriptor of the context `base:allocation`.
pub mod allocation {
    /// Nothing is stored for the range.
    pub const HOLE: u32 = 1 << 0;
    /// The range reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// The one metadata context served.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The number it has in block status chunks, once chosen.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Bytes of one read or write; announced as the largest block.
pub const TRANSFER_BYTES_MAX: u32 = 32 << 20;
/// The block size announced as the best.
pub const PREFERRED_BLOCK_BYTES: u32 = 4096;
/// Bytes of an export's name or description, by the protocol.
pub const STRING_BYTES_MAX: usize = 4096;

/// The header of an option; its content follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// One of [`option`].
    pub option: u32,
    /// Bytes that follow.
    pub length: u32,
}

impl OptionHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 16;

    /// As it goes to the server.
    pub fn encode(self) -> [u8; Self::BYTES] {
        Writer::new().u64(OPTION_MAGIC).u32(self.option).u32(self.length).finish()
    }

    /// `None` if more bytes are needed; the error is the magic that was there instead.
    pub fn decode(bytes: &[u8]) -> Option<Result<Self, u64>> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u64()?;
        if magic != OPTION_MAGIC {
            return Some(Err(magic));
        }
        Some(Ok(Self { option: reader.u32()?, length: reader.u32()? }))
    }
}

/// The header of a reply to an option; its content follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option it answers.
    pub option: u32,
    /// One of [`option_reply`].
    pub reply: u32,
    /// Bytes that follow.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 20;

    /// As it goes to the client.
    pub fn encode(self) -> [u8; Self::BYTES] {
        Writer::new()
            .u64(OPTION_REPLY_MAGIC)
            .u32(self.option)
            .u32(self.reply)
            .u32(self.length)
            .finish()
    }

    /// `None` if more bytes are needed; the error is the magic that was there instead.
    pub fn decode(bytes: &[u8]) -> Option<Result<Self, u64>> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u64()?;
        if magic != OPTION_REPLY_MAGIC {
            return Some(Err(magic));
        }
        Some(Ok(Self { option: reader.u32()?, reply: reader.u32()?, length: reader.u32()? }))
    }
}

/// The header of a request; the bytes of a write follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Bits of [`command_flag`].
    pub flags: u16,
    /// One of [`command`].
    pub command: u16,
    /// Chosen by the client, comes back in the reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range.
    pub length: u32,
}

impl RequestHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 28;
    /// Where `offset` is in them.
    pub const OFFSET_AT: usize = 16;

    /// As it goes to the server.
    pub fn encode(self) -> [u8; Self::BYTES] {
        Writer::new()
            .u32(REQUEST_MAGIC)
            .u16(self.flags)
            .u16(self.command)
            .u64(self.cookie)
            .u64(self.offset)
            .u32(self.length)
            .finish()
    }

    /// `None` if more bytes are needed; the error is the magic that was there instead.
    pub fn decode(bytes: &[u8]) -> Option<Result<Self, u32>> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32()?;
        if magic != REQUEST_MAGIC {
            return Some(Err(magic));
        }
        Some(Ok(Self {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            length: reader.u32()?,
        }))
    }
}

/// A simple reply; the bytes of a successful read follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReplyHeader {
    /// Zero, or the code of an [`NbdError`](super::error::NbdError).
    pub error: u32,
    /// The request's.
    pub cookie: u64,
}

impl SimpleReplyHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 16;

    /// As it goes to the client.
    pub fn encode(self) -> [u8; Self::BYTES] {
        Writer::new().u32(SIMPLE_REPLY_MAGIC).u32(self.error).u64(self.cookie).finish()
    }

    /// `None` if more bytes are needed; the error is the magic that was there instead.
    pub fn decode(bytes: &[u8]) -> Option<Result<Self, u32>> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32()?;
        if magic != SIMPLE_REPLY_MAGIC {
            return Some(Err(magic));
        }
        Some(Ok(Self { error: reader.u32()?, cookie: reader.u64()? }))
    }
}

/// The header of one chunk of a structured reply; its content follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// [`chunk::FLAG_DONE`] in the last one.
    pub flags: u16,
    /// One of [`chunk`].
    pub kind: u16,
    /// The request's.
    pub cookie: u64,
    /// Bytes that follow.
    pub length: u32,
}

impl ChunkHeader {
    /// Bytes on the wire.
    pub const BYTES: usize = 20;

    /// As it goes to the client.
    pub fn encode(self) -> [u8; Self::BYTES] {
        Writer::new()
            .u32(CHUNK_MAGIC)
            .u16(self.flags)
            .u16(self.kind)
            .u64(self.cookie)
            .u32(self.length)
            .finish()
    }

    /// `None` if more bytes are needed; the error is the magic that was there instead.
    pub fn decode(bytes: &[u8]) -> Option<Result<Self, u32>> {
        let mut reader = Reader::new(bytes);
        let magic = reader.u32()?;
        if magic != CHUNK_MAGIC {
            return Some(Err(magic));
        }
        Some(Ok(Self {
            flags: reader.u16()?,
            kind: reader.u16()?,
            cookie: reader.u64()?,
            length: reader.u32()?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magics_spell_what_the_protocol_says() {
        assert_eq!(&SERVER_MAGIC.to_be_bytes(), b"NBDMAGIC");
        assert_eq!(&OPTION_MAGIC.to_be_bytes(), b"IHAVEOPT");
    }

    #[test]
    fn headers_survive_the_round_trip_and_need_every_byte() {
        let request = RequestHeader {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1112_1314_1516_1718,
            length: 0x2122_2324,
        };
        let bytes = request.encode();
        assert_eq!(
            bytes,
            [
                0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14,
                0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24
            ]
        );
        assert_eq!(RequestHeader::decode(&bytes), Some(Ok(request)));
        for length in 0..bytes.len() {
            assert_eq!(RequestHeader::decode(&bytes[..length]), None);
        }

        let option = OptionHeader { option: option::GO, length: 6 };
        assert_eq!(OptionHeader::decode(&option.encode()), Some(Ok(option)));
        let reply = OptionReplyHeader { option: 7, reply: option_reply::ACK, length: 0 };
        assert_eq!(OptionReplyHeader::decode(&reply.encode()), Some(Ok(reply)));
        let simple = SimpleReplyHeader { error: 5, cookie: 9 };
        assert_eq!(SimpleReplyHeader::decode(&simple.encode()), Some(Ok(simple)));
        let header = ChunkHeader { flags: 1, kind: chunk::ERROR, cookie: 3, length: 6 };
        assert_eq!(ChunkHeader::decode(&header.encode()), Some(Ok(header)));
    }

    #[test]
    fn a_wrong_magic_is_reported_as_it_was() {
        assert_eq!(RequestHeader::decode(&[0; 4]), Some(Err(0)));
        assert_eq!(ChunkHeader::decode(&SIMPLE_REPLY_MAGIC.to_be_bytes()), Some(Err(0x6744_6698)));
        assert_eq!(OptionHeader::decode(b"IHAVEOPS"), Some(Err(0x4948_4156_454f_5053)));
    }
}
