// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Replies, as far as they are not the guest's own bytes.
//!
//! Everything that fits in a small array is a [`ReplyHead`], which lives on the stack: send it,
//! and after [`ReplyHead::offset_data`] or the simple reply to a read send the payload from
//! wherever it lies. Block status is of no fixed length; [`StatusReply`] appends it to a buffer
//! that all connections share.

use super::error::NbdError;
use super::export::Session;
use super::transmission::{Command, Kind, ReplyForm};
use super::wire::{BASE_ALLOCATION_ID, ChunkHeader, SimpleReplyHeader, chunk};
use crate::bytes::Writer;

/// Bytes of a [`ReplyHead`].
pub const REPLY_HEAD_BYTES_MAX: usize = 128;
/// Bytes of the text of an error; what is longer is cut.
pub const ERROR_TEXT_BYTES_MAX: usize = 80;
/// Descriptors of one block status reply. A client asks again for what is missing.
pub const STATUS_DESCRIPTORS_MAX: usize = 1024;
/// A buffer with so much room takes every block status reply without growing.
pub const STATUS_REPLY_BYTES_MAX: usize = STATUS_HEAD_BYTES + 8 * STATUS_DESCRIPTORS_MAX;

const STATUS_HEAD_BYTES: usize = ChunkHeader::BYTES + 4;
const STATUS_LENGTH_AT: usize = ChunkHeader::BYTES - 4;

// Header, code, length of the text, the text, and the offset.
const _: () =
    assert!(ChunkHeader::BYTES + 4 + 2 + ERROR_TEXT_BYTES_MAX + 8 <= REPLY_HEAD_BYTES_MAX);

/// The start, and but for a payload the whole, of a reply or chunk.
#[derive(Clone, Copy, Debug)]
pub struct ReplyHead {
    bytes: [u8; REPLY_HEAD_BYTES_MAX],
    length: usize,
}

impl ReplyHead {
    /// A simple reply. After a successful read its data follows.
    pub fn simple(cookie: u64, result: Result<(), NbdError>) -> Self {
        let error = result.map_or_else(NbdError::code, |()| 0);
        Self::of(Writer::new().bytes(&SimpleReplyHeader { error, cookie }.encode()))
    }

    /// The front of a chunk with `payload_bytes` of data, which follow.
    pub fn offset_data(cookie: u64, done: bool, range: ByteRange) -> Self {
        let ByteRange { offset, length } = range;
        let head = head(cookie, done, chunk::OFFSET_DATA, 8 + length);
        Self::of(Writer::new().bytes(&head).u64(offset))
    }

    /// A chunk that says a range is zeros.
    pub fn offset_hole(cookie: u64, done: bool, range: ByteRange) -> Self {
        let head = head(cookie, done, chunk::OFFSET_HOLE, 12);
        Self::of(Writer::new().bytes(&head).u64(range.offset).u32(range.length))
    }

    /// The end of a structured reply whose chunks said nothing about the end.
    pub fn done(cookie: u64) -> Self {
        Self::of(Writer::new().bytes(&head(cookie, true, chunk::NONE, 0)))
    }

    /// A chunk with an error that concerns the whole request.
    pub fn error_chunk(cookie: u64, done: bool, error: NbdError, text: &str) -> Self {
        let text = error_text(text);
        let head = head(cookie, done, chunk::ERROR, 6 + text.len() as u32);
        let writer = Writer::new().bytes(&head).u32(error.code());
        Self::of(writer.u16(text.len() as u16).bytes(text))
    }

    /// A chunk with an error at `offset`: what a content chunk sent before holds from there on
    /// is not to be believed.
    pub fn error_offset(cookie: u64, done: bool, error: NbdError, text: &str, offset: u64) -> Self {
        let text = error_text(text);
        let head = head(cookie, done, chunk::ERROR_OFFSET, 14 + text.len() as u32);
        let writer = Writer::new().bytes(&head).u32(error.code());
        Self::of(writer.u16(text.len() as u16).bytes(text).u64(offset))
    }

    /// The whole reply to a command that failed, in the form it has to have.
    pub fn failure(form: ReplyForm, cookie: u64, error: NbdError) -> Self {
        match form {
            ReplyForm::Simple => Self::simple(cookie, Err(error)),
            ReplyForm::Structured => Self::error_chunk(cookie, true, error, ""),
        }
    }

    /// What comes before the data of a read that succeeded as a whole; nothing comes after, so
    /// the data must be there already.
    pub fn read(session: &Session, command: &Command) -> Self {
        let Command { cookie, offset, length, .. } = *command;
        match command.reply_form(session) {
            ReplyForm::Simple => Self::simple(cookie, Ok(())),
            ReplyForm::Structured => Self::offset_data(cookie, true, ByteRange { offset, length }),
        }
    }

    /// What to send.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    fn of(writer: Writer<REPLY_HEAD_BYTES_MAX>) -> Self {
        let (bytes, length) = writer.finish_short();
        Self { bytes, length }
    }
}

/// A range of the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

/// One descriptor of a block status: what so many bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusExtent {
    /// Bytes.
    pub length: u32,
    /// Bits of [`super::wire::allocation`].
    pub flags: u32,
}

/// Writes the reply to one block status command, extent by extent.
///
/// Neighbours with the same flags become one descriptor; what reaches past the request is cut;
/// after the first descriptor of a `req_one`, or [`STATUS_DESCRIPTORS_MAX`], the rest is not
/// wanted.
#[derive(Debug)]
pub struct StatusReply<'a> {
    out: &'a mut Vec<u8>,
    started_at: usize,
    /// Bytes of the request that no descriptor covers yet.
    left: u32,
    descriptors_max: usize,
    descriptors_count: usize,
    last: Option<StatusExtent>,
}

impl<'a> StatusReply<'a> {
    /// Begins the reply to `command` at the end of `out`.
    pub fn start(command: &Command, out: &'a mut Vec<u8>) -> Self {
        let req_one = matches!(command.kind, Kind::BlockStatus { req_one: true });
        let started_at = out.len();
        // The length is put right at the end.
        out.extend_from_slice(&head(command.cookie, true, chunk::BLOCK_STATUS, 0));
        out.extend_from_slice(&BASE_ALLOCATION_ID.to_be_bytes());
        Self {
            out,
            started_at,
            left: command.length,
            descriptors_max: if req_one { 1 } else { STATUS_DESCRIPTORS_MAX },
            descriptors_count: 0,
            last: None,
        }
    }

    /// Says what the next bytes are, in multiples of the logical block; false once nothing more
    /// is wanted.
    pub fn push(&mut self, extent: StatusExtent) -> bool {
        let length = extent.length.min(self.left);
        if length == 0 {
            return self.left > 0;
        }
        match &mut self.last {
            Some(last) if last.flags == extent.flags => last.length += length,
            Some(_) if self.descriptors_count + 1 == self.descriptors_max => {
                // Whatever else is pushed comes after a gap now, and must not be joined.
                self.left = 0;
                return false;
            }
            _ => {
                self.write_last();
                self.last = Some(StatusExtent { length, ..extent });
            }
        }
        self.left -= length;
        self.left > 0
    }

    /// Ends the reply. A reply without a descriptor is not allowed: if nothing was pushed, the
    /// whole range counts as data, which is always true enough.
    pub fn finish(mut self) {
        if self.last.is_none() {
            self.last = Some(StatusExtent { length: self.left, flags: 0 });
        }
        self.write_last();
        let length = 4 + 8 * self.descriptors_count as u32;
        let at = self.started_at + STATUS_LENGTH_AT;
        let target = self.out.get_mut(at..at + 4).expect("start wrote the header");
        target.copy_from_slice(&length.to_be_bytes());
    }

    fn write_last(&mut self) {
        if let Some(StatusExtent { length, flags }) = self.last.take() {
            self.out.extend_from_slice(&length.to_be_bytes());
            self.out.extend_from_slice(&flags.to_be_bytes());
            self.descriptors_count += 1;
        }
        assert!(self.descriptors_count <= self.descriptors_max);
    }
}

fn head(cookie: u64, done: bool, kind: u16, length: u32) -> [u8; ChunkHeader::BYTES] {
    let flags = if done { chunk::FLAG_DONE } else { 0 };
    ChunkHeader { flags, kind, cookie, length }.encode()
}

fn error_text(text: &str) -> &[u8] {
    let end = text.floor_char_boundary(ERROR_TEXT_BYTES_MAX);
    text.as_bytes().get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::wire::CHUNK_MAGIC;
    use super::*;

    const COOKIE: u64 = 0x0807_0605_0403_0201;
    const COOKIE_BYTES: [u8; 8] = [8, 7, 6, 5, 4, 3, 2, 1];

    fn chunk_bytes(flags: u8, kind: [u8; 2], content: &[u8]) -> Vec<u8> {
        let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, flags]);
        bytes.extend(kind);
        bytes.extend(COOKIE_BYTES);
        bytes.extend((content.len() as u32).to_be_bytes());
        bytes.extend(content);
        bytes
    }

    fn status(length: u32, req_one: bool) -> Command {
        Command { cookie: COOKIE, kind: Kind::BlockStatus { req_one }, offset: 0, length }
    }

    #[test]
    fn heads_are_as_the_protocol_writes_them() {
        let mut simple = vec![0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5];
        simple.extend(COOKIE_BYTES);
        assert_eq!(ReplyHead::simple(COOKIE, Err(NbdError::Io)).as_bytes(), simple);

        let range = ByteRange { offset: 0x1000, length: 0x200 };
        // The length counts the data that follows.
        let mut data = chunk_bytes(1, [0, 1], &[0, 0, 0, 0, 0, 0, 0x10, 0]);
        data[16..20].copy_from_slice(&[0, 0, 2, 8]);
        assert_eq!(ReplyHead::offset_data(COOKIE, true, range).as_bytes(), data);

        let hole = chunk_bytes(0, [0, 2], &[0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0]);
        assert_eq!(ReplyHead::offset_hole(COOKIE, false, range).as_bytes(), hole);
        assert_eq!(ReplyHead::done(COOKIE).as_bytes(), chunk_bytes(1, [0, 0], &[]));

        let error = chunk_bytes(1, [0x80, 1], &[0, 0, 0, 22, 0, 2, b'n', b'o']);
        let head = ReplyHead::error_chunk(COOKIE, true, NbdError::Invalid, "no");
        assert_eq!(head.as_bytes(), error);

        let content = [0, 0, 0, 5, 0, 1, b'x', 0, 0, 0, 0, 0, 0, 0x30, 0];
        let head = ReplyHead::error_offset(COOKIE, false, NbdError::Io, "x", 0x3000);
        assert_eq!(head.as_bytes(), chunk_bytes(0, [0x80, 2], &content));
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let head = ReplyHead::error_offset(1, true, NbdError::Io, &"ö€".repeat(90), 1);
        assert!(head.as_bytes().len() <= REPLY_HEAD_BYTES_MAX);
        let text = error_text(
            "a234567890123456789012345678901234567890123456789012345678901234567890123456789€",
        );
        assert_eq!(text.len(), 79);
    }

    #[test]
    fn neighbours_with_the_same_flags_are_one_descriptor() {
        let mut out = vec![0xff];
        let mut reply = StatusReply::start(&status(0x3000, false), &mut out);
        assert!(reply.push(StatusExtent { length: 0x1000, flags: 3 }));
        assert!(reply.push(StatusExtent { length: 0x800, flags: 3 }));
        assert!(!reply.push(StatusExtent { length: 0x8000, flags: 0 }));
        assert!(!reply.push(StatusExtent { length: 0x8000, flags: 3 }));
        reply.finish();
        let content = [0, 0, 0, 1, 0, 0, 0x18, 0, 0, 0, 0, 3, 0, 0, 0x18, 0, 0, 0, 0, 0];
        assert_eq!(out[0], 0xff);
        assert_eq!(out[1..], chunk_bytes(1, [0, 5], &content));
    }

    #[test]
    fn req_one_gets_one_descriptor_and_an_empty_reply_gets_one_too() {
        let mut out = Vec::new();
        let mut reply = StatusReply::start(&status(0x3000, true), &mut out);
        assert!(reply.push(StatusExtent { length: 0x1000, flags: 3 }));
        assert!(!reply.push(StatusExtent { length: 0x1000, flags: 0 }));
        reply.finish();
        assert_eq!(out, chunk_bytes(1, [0, 5], &[0, 0, 0, 1, 0, 0, 0x10, 0, 0, 0, 0, 3]));

        out.clear();
        StatusReply::start(&status(0x3000, false), &mut out).finish();
        assert_eq!(out, chunk_bytes(1, [0, 5], &[0, 0, 0, 1, 0, 0, 0x30, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn descriptors_are_bounded() {
        let mut out = Vec::with_capacity(STATUS_REPLY_BYTES_MAX);
        let mut reply = StatusReply::start(&status(u32::MAX, false), &mut out);
        let mut flags = 0;
        while reply.push(StatusExtent { length: 512, flags }) {
            flags ^= 3;
        }
        reply.finish();
        assert_eq!(out.len(), STATUS_REPLY_BYTES_MAX);
        assert_eq!(out.capacity(), STATUS_REPLY_BYTES_MAX);
    }
}
