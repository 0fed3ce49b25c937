// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client's side, blocking, over anything that reads and writes.
//!
//! For tests and tools. One call one command ([`Client::read`] and its kind), or pipelined:
//! `send_*` returns the cookie of a command and [`Client::receive`] the next reply, whichever it
//! belongs to. A server that breaks the protocol is an error, never a panic, and never makes the
//! client hold more than the commands under way ask for.
//!
//! # Not here
//!
//! A check of what is sent: a test has to be able to send what no server takes. Time limits:
//! set them on the stream.

mod negotiate;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};

use super::error::NbdError;
use super::reply::{ByteRange, StatusExtent};
use super::wire::{
    CHUNK_MAGIC, ChunkHeader, RequestHeader, SIMPLE_REPLY_MAGIC, SimpleReplyHeader, chunk, command,
    command_flag as flag,
};
use crate::bytes::Reader;
pub use negotiate::{BlockSizes, Connect, Entry, ExportFacts, ListedExport};

/// Bytes of a chunk beside the data of a read: block status or the text of an error.
const CHUNK_BYTES_MAX: u32 = 1 << 20;

/// Why the client gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The stream failed or ended.
    #[error("connection to the NBD server: {0}")]
    Io(#[from] io::Error),
    /// The server sent what the protocol does not allow; the connection is of no more use.
    #[error("the NBD server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server refused an option.
    #[error("the NBD server refused option {option} with {reply:#x}: {text}")]
    Refused {
        /// One of [`super::wire::option`].
        option: u32,
        /// One of [`super::wire::option_reply`].
        reply: u32,
        /// What the server said about it.
        text: String,
    },
    /// The server answered a command with an error; the connection goes on.
    #[error("the NBD server answered {0:?}")]
    Failed(NbdError),
}

/// The reply to one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What `send_*` returned.
    pub cookie: u64,
    /// How it went.
    pub result: Result<(), NbdError>,
    /// The bytes of a read; not to be believed if it failed.
    pub data: Vec<u8>,
    /// The extents of a block status.
    pub extents: Vec<StatusExtent>,
}

/// A connection in transmission.
#[derive(Debug)]
pub struct Client<S> {
    stream: S,
    facts: ExportFacts,
    structured_replies: bool,
    base_allocation_id: Option<u32>,
    cookie_next: u64,
    pending: BTreeMap<u64, Pending>,
    /// Replies that came while another was waited for.
    ready: VecDeque<Reply>,
}

impl<S: Read + Write> Client<S> {
    /// Goes through the handshake up to the transmission.
    pub fn connect(stream: S, wanted: &Connect<'_>) -> Result<Self, ClientError> {
        negotiate::connect(stream, wanted)
    }

    /// Asks for the names of all exports, and leaves.
    pub fn list(stream: S) -> Result<Vec<ListedExport>, ClientError> {
        negotiate::list(stream)
    }

    /// Asks what one export is, and leaves.
    pub fn describe(stream: S, wanted: &Connect<'_>) -> Result<ExportFacts, ClientError> {
        negotiate::describe(stream, wanted)
    }

    /// What the server said about the export.
    pub fn facts(&self) -> &ExportFacts {
        &self.facts
    }

    /// Whether reads are answered in chunks.
    pub fn structured_replies(&self) -> bool {
        self.structured_replies
    }

    /// Whether block status may be asked for.
    pub fn base_allocation(&self) -> bool {
        self.base_allocation_id.is_some()
    }

    /// The stream, to set time limits on or to cut off.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Commands sent and not yet received.
    pub fn in_flight_count(&self) -> usize {
        self.pending.len() + self.ready.len()
    }

    /// Reads a range.
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, ClientError> {
        let cookie = self.send_read(ByteRange { offset, length }, false)?;
        Ok(self.wait(cookie)?.data)
    }

    /// Writes bytes; with `fua` they are durable on return.
    pub fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<(), ClientError> {
        let cookie = self.send_write(offset, bytes, fua)?;
        self.wait(cookie).map(drop)
    }

    /// Makes everything answered before durable.
    pub fn flush(&mut self) -> Result<(), ClientError> {
        let cookie = self.send_flush()?;
        self.wait(cookie).map(drop)
    }

    /// Gives a range up.
    pub fn trim(&mut self, offset: u64, length: u32, fua: bool) -> Result<(), ClientError> {
        let cookie = self.send_trim(ByteRange { offset, length }, fua)?;
        self.wait(cookie).map(drop)
    }

    /// Makes a range read as zeros.
    pub fn write_zeroes(
        &mut self,
        offset: u64,
        length: u32,
        how: Zeroes,
    ) -> Result<(), ClientError> {
        let cookie = self.send_write_zeroes(ByteRange { offset, length }, how)?;
        self.wait(cookie).map(drop)
    }

    /// Asks what a range holds; the answer may cover less of it.
    pub fn block_status(
        &mut self,
        offset: u64,
        length: u32,
        req_one: bool,
    ) -> Result<Vec<StatusExtent>, ClientError> {
        let cookie = self.send_block_status(ByteRange { offset, length }, req_one)?;
        Ok(self.wait(cookie)?.extents)
    }

    /// Says that a range will be read soon.
    pub fn cache(&mut self, offset: u64, length: u32) -> Result<(), ClientError> {
        let cookie = self.send_cache(ByteRange { offset, length })?;
        self.wait(cookie).map(drop)
    }

    /// Sends a read; with `df` the answer must come in one piece.
    pub fn send_read(&mut self, range: ByteRange, df: bool) -> Result<u64, ClientError> {
        let flags = if df { flag::DF } else { 0 };
        self.send(command::READ, flags, range, &[])
    }

    /// Sends a write.
    pub fn send_write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> Result<u64, ClientError> {
        let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "a write beyond 4 GiB");
        let length = u32::try_from(bytes.len()).map_err(|_| too_long())?;
        self.send(command::WRITE, fua_flag(fua), ByteRange { offset, length }, bytes)
    }

    /// Sends a flush.
    pub fn send_flush(&mut self) -> Result<u64, ClientError> {
        self.send(command::FLUSH, 0, ByteRange { offset: 0, length: 0 }, &[])
    }

    /// Sends a trim.
    pub fn send_trim(&mut self, range: ByteRange, fua: bool) -> Result<u64, ClientError> {
        self.send(command::TRIM, fua_flag(fua), range, &[])
    }

    /// Sends a zeroing.
    pub fn send_write_zeroes(&mut self, range: ByteRange, how: Zeroes) -> Result<u64, ClientError> {
        let mut flags = fua_flag(how.fua);
        if how.no_hole {
            flags |= flag::NO_HOLE;
        }
        if how.fast_zero {
            flags |= flag::FAST_ZERO;
        }
        self.send(command::WRITE_ZEROES, flags, range, &[])
    }

    /// Sends a block status.
    pub fn send_block_status(
        &mut self,
        range: ByteRange,
        req_one: bool,
    ) -> Result<u64, ClientError> {
        let flags = if req_one { flag::REQ_ONE } else { 0 };
        self.send(command::BLOCK_STATUS, flags, range, &[])
    }

    /// Sends a cache.
    pub fn send_cache(&mut self, range: ByteRange) -> Result<u64, ClientError> {
        self.send(command::CACHE, 0, range, &[])
    }

    /// Sends any command with any flags, and `payload` behind it, whether or not that makes
    /// sense.
    pub fn send(
        &mut self,
        command: u16,
        flags: u16,
        range: ByteRange,
        payload: &[u8],
    ) -> Result<u64, ClientError> {
        let cookie = self.cookie_next;
        self.cookie_next += 1;
        let ByteRange { offset, length } = range;
        let header = RequestHeader { flags, command, cookie, offset, length };
        self.stream.write_all(&header.encode())?;
        self.stream.write_all(payload)?;
        self.stream.flush()?;
        if command != command::DISCONNECT {
            self.pending.insert(cookie, Pending::new(command, range));
        }
        Ok(cookie)
    }

    /// The next reply to any command under way, in the order in which the server finishes them.
    pub fn receive(&mut self) -> Result<Reply, ClientError> {
        if let Some(reply) = self.ready.pop_front() {
            return Ok(reply);
        }
        self.receive_next()
    }

    /// Says goodbye. Commands under way are answered by the server before it closes, but not
    /// received here.
    pub fn disconnect(mut self) -> Result<S, ClientError> {
        self.send(command::DISCONNECT, 0, ByteRange { offset: 0, length: 0 }, &[])?;
        Ok(self.stream)
    }

    /// Receives until the reply to `cookie` is there; its error becomes the call's.
    fn wait(&mut self, cookie: u64) -> Result<Reply, ClientError> {
        loop {
            let reply = self.receive_next()?;
            if reply.cookie == cookie {
                return match reply.result {
                    Ok(()) => Ok(reply),
                    Err(error) => Err(ClientError::Failed(error)),
                };
            }
            self.ready.push_back(reply);
        }
    }

    fn receive_next(&mut self) -> Result<Reply, ClientError> {
        if self.pending.is_empty() {
            let what = "nothing is under way";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what).into());
        }
        loop {
            let mut magic = [0; 4];
            self.stream.read_exact(&mut magic)?;
            let finished = match u32::from_be_bytes(magic) {
                SIMPLE_REPLY_MAGIC => Some(self.receive_simple(magic)?),
                CHUNK_MAGIC if self.structured_replies => self.receive_chunk(magic)?,
                CHUNK_MAGIC => return Err(ClientError::Protocol("a chunk nobody agreed on")),
                _ => return Err(ClientError::Protocol("neither a reply nor a chunk")),
            };
            if let Some(reply) = finished {
                return Ok(reply);
            }
        }
    }

    fn receive_simple(&mut self, magic: [u8; 4]) -> Result<Reply, ClientError> {
        let bytes = self.rest_of_header::<{ SimpleReplyHeader::BYTES }>(magic)?;
        let header = SimpleReplyHeader::decode(&bytes);
        let header = header.and_then(Result::ok).ok_or(ClientError::Protocol("a short reply"))?;
        let unknown = ClientError::Protocol("a reply to no command");
        let mut pending = self.pending.remove(&header.cookie).ok_or(unknown)?;
        if header.error != 0 {
            pending.error = Some(NbdError::from_code(header.error));
        }
        let chunks_only = matches!(pending.command, command::READ | command::BLOCK_STATUS);
        if chunks_only && self.structured_replies {
            return Err(ClientError::Protocol("a simple reply where chunks were agreed on"));
        }
        if pending.command == command::READ && pending.error.is_none() {
            pending.data = read_vec(&mut self.stream, pending.range.length)?;
        }
        Ok(pending.reply(header.cookie))
    }

    fn receive_chunk(&mut self, magic: [u8; 4]) -> Result<Option<Reply>, ClientError> {
        let bytes = self.rest_of_header::<{ ChunkHeader::BYTES }>(magic)?;
        let header = ChunkHeader::decode(&bytes);
        let header = header.and_then(Result::ok).ok_or(ClientError::Protocol("a short chunk"))?;
        let unknown = ClientError::Protocol("a chunk of no command's reply");
        let pending = self.pending.get_mut(&header.cookie).ok_or(unknown)?;
        let done = header.flags & chunk::FLAG_DONE != 0;
        let length_max = match header.kind {
            chunk::OFFSET_DATA => pending.range.length.saturating_add(8),
            _ => CHUNK_BYTES_MAX,
        };
        if header.length > length_max {
            return Err(ClientError::Protocol("a chunk longer than it can be"));
        }
        let content = read_vec(&mut self.stream, header.length)?;
        pending
            .take_chunk(header.kind, &content, self.base_allocation_id)
            .ok_or(ClientError::Protocol("a chunk that makes no sense"))?;
        if !done {
            return if header.kind == chunk::NONE {
                Err(ClientError::Protocol("an empty chunk that ends nothing"))
            } else {
                Ok(None)
            };
        }
        let pending = self.pending.remove(&header.cookie);
        let pending = pending.filter(Pending::is_complete);
        let incomplete = ClientError::Protocol("a reply that leaves part of the range out");
        Ok(Some(pending.ok_or(incomplete)?.reply(header.cookie)))
    }

    fn rest_of_header<const N: usize>(&mut self, magic: [u8; 4]) -> Result<[u8; N], ClientError> {
        let mut bytes = [0; N];
        let (front, rest) = bytes.split_at_mut(magic.len());
        front.copy_from_slice(&magic);
        self.stream.read_exact(rest)?;
        Ok(bytes)
    }
}

/// How zeros are to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// Durable before the answer.
    pub fua: bool,
    /// They must take up space.
    pub no_hole: bool,
    /// Rather fail than be slow.
    pub fast_zero: bool,
}

/// A command whose reply has not ended.
#[derive(Debug)]
struct Pending {
    command: u16,
    range: ByteRange,
    error: Option<NbdError>,
    data: Vec<u8>,
    /// Starts and ends, within the range, of what chunks have filled.
    filled: BTreeMap<u32, u32>,
    extents: Vec<StatusExtent>,
}

impl Pending {
    fn new(command: u16, range: ByteRange) -> Self {
        let (data, filled, extents) = (Vec::new(), BTreeMap::new(), Vec::new());
        Self { command, range, error: None, data, filled, extents }
    }

    /// `None` if this chunk has no place in this reply.
    fn take_chunk(&mut self, kind: u16, content: &[u8], context: Option<u32>) -> Option<()> {
        let mut reader = Reader::new(content);
        match kind {
            chunk::NONE => content.is_empty().then_some(()),
            chunk::OFFSET_DATA if self.command == command::READ => {
                let offset = reader.u64()?;
                let bytes = reader.rest();
                let target = self.fill(offset, u32::try_from(bytes.len()).ok()?)?;
                target.copy_from_slice(bytes);
                Some(())
            }
            chunk::OFFSET_HOLE if self.command == command::READ => {
                let (offset, length) = (reader.u64()?, reader.u32()?);
                self.fill(offset, length)?.fill(0);
                reader.rest().is_empty().then_some(())
            }
            chunk::BLOCK_STATUS if self.command == command::BLOCK_STATUS => {
                let described = Some(reader.u32()?) == context && self.extents.is_empty();
                let pairs = reader.rest().chunks_exact(8);
                if !described || pairs.len() == 0 || !pairs.remainder().is_empty() {
                    return None;
                }
                for pair in pairs {
                    let mut pair = Reader::new(pair);
                    self.extents.push(StatusExtent { length: pair.u32()?, flags: pair.u32()? });
                }
                Some(())
            }
            _ if kind & chunk::ERROR_BIT != 0 => {
                let code = reader.u32().filter(|code| *code != 0)?;
                let text_length = reader.u16()?;
                let _ = reader.bytes(usize::from(text_length))?;
                // The first error is the one told.
                self.error.get_or_insert(NbdError::from_code(code));
                Some(())
            }
            _ => None,
        }
    }

    /// The place of a piece of the range; `None` if it is not in it or has been filled before.
    fn fill(&mut self, offset: u64, length: u32) -> Option<&mut [u8]> {
        let start = u32::try_from(offset.checked_sub(self.range.offset)?).ok()?;
        let end = start.checked_add(length).filter(|end| *end <= self.range.length)?;
        let before = self.filled.range(..end).next_back();
        if length == 0 || before.is_some_and(|(_, filled_to)| *filled_to > start) {
            return None;
        }
        self.filled.insert(start, end);
        if self.data.is_empty() {
            // Of the allocator, which has zeros without writing them.
            self.data = vec![0; self.range.length as usize];
        }
        self.data.get_mut(start as usize..end as usize)
    }

    fn is_complete(&self) -> bool {
        let filled: u64 = self.filled.iter().map(|(start, end)| u64::from(end - start)).sum();
        let complete = match self.command {
            command::READ => filled == u64::from(self.range.length),
            command::BLOCK_STATUS => !self.extents.is_empty(),
            _ => true,
        };
        complete || self.error.is_some()
    }

    fn reply(self, cookie: u64) -> Reply {
        let result = self.error.map_or(Ok(()), Err);
        Reply { cookie, result, data: self.data, extents: self.extents }
    }
}

fn fua_flag(fua: bool) -> u16 {
    if fua { flag::FUA } else { 0 }
}

/// Memory grows with what has come, not with what was announced.
fn read_vec(stream: &mut impl Read, length: u32) -> Result<Vec<u8>, ClientError> {
    let mut bytes = Vec::new();
    let count = stream.by_ref().take(u64::from(length)).read_to_end(&mut bytes)?;
    if count != length as usize {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
