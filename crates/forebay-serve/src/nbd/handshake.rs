// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The handshake: from the greeting to a session.
//!
//! The server greets, the client answers with its flags and then sends options, one after the
//! other, each answered before the next is looked at. `NBD_OPT_GO` or `NBD_OPT_EXPORT_NAME`
//! ends the handshake with a [`Session`].
//!
//! # Invariants
//!
//! - **H1** A message is taken whole or not at all, so how the input was cut into pieces makes
//!   no difference.
//! - **H2** Every call either consumes input, or ends the handshake, or needs more input.
//! - **H3** `base:allocation` holds only for the export it was chosen for, and only after
//!   structured replies were agreed on.
//! - **H4** A client without the fixed newstyle is never sent a reply to an option.
//!
//! # States
//!
//! | from   | to     | by                                                             |
//! |--------|--------|----------------------------------------------------------------|
//! | flags  | option | the client's flags                                             |
//! | option | option | an option that was answered                                    |
//! | option | skip   | an option too long to be taken, short enough to be skipped     |
//! | skip   | option | its last byte                                                  |
//! | option | ended  | `GO` or `EXPORT_NAME` for an export that exists; a reason to close |
//!
//! # Limits
//!
//! [`OPTION_BYTES_MAX`], [`OPTION_SKIP_BYTES_MAX`], [`OPTION_COUNT_MAX`]. One call answers
//! options until it has written [`OUTPUT_PAUSE_BYTES`]; only one long list can exceed that.
//!
//! # Not here
//!
//! A time limit: a client may be silent for ever, the front end decides how long it has a place (`listen`).

use super::error::CloseReason;
use super::export::{Agreed, Export, Session};
use super::wire::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, OPTION_MAGIC, OptionHeader, OptionReplyHeader,
    PREFERRED_BLOCK_BYTES, SERVER_MAGIC, STRING_BYTES_MAX, TRANSFER_BYTES_MAX, handshake_flag,
    info, option, option_reply,
};
use crate::bytes::{Reader, Writer};
use forebay_core::limits::VOLUME_COUNT_MAX;

/// Bytes of an option's content that are looked at.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Bytes of an option's content that are skipped before it is cheaper to close.
pub const OPTION_SKIP_BYTES_MAX: u32 = 1 << 20;
/// Options of one handshake: `qemu-nbd --list` asks three things about each export, and some before.
pub const OPTION_COUNT_MAX: u32 = 4 * VOLUME_COUNT_MAX as u32 + 16;
/// An input buffer of this size holds every message of a handshake.
pub const INPUT_BYTES_MAX: usize = OptionHeader::BYTES + OPTION_BYTES_MAX as usize;
/// A call that has written this much leaves the rest of the input for the next.
pub const OUTPUT_PAUSE_BYTES: usize = 64 << 10;

const CLIENT_FLAGS_BYTES: usize = 4;
const EXPORT_NAME_ZEROES: [u8; 124] = [0; 124];

/// Where a handshake stands after a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send what was written, then call again: with the rest of the input if any was consumed,
    /// else once there is more.
    NeedMore,
    /// Send what was written, then close.
    Close(CloseReason),
    /// Send what was written; what was not consumed is the first of the transmission.
    Transmit(Session),
}

/// The server's side of one handshake.
#[derive(Clone, Debug)]
pub struct Handshake {
    state: State,
    options_count: u32,
    fixed_newstyle: bool,
    no_zeroes: bool,
    structured_replies: bool,
    /// Name of the export for which `base:allocation` was chosen (H3).
    base_allocation_of: Option<String>,
}

impl Handshake {
    /// Begins: what [`Self::greeting`] returns has to be sent first.
    pub fn new() -> Self {
        Self {
            state: State::Flags,
            options_count: 0,
            fixed_newstyle: false,
            no_zeroes: false,
            structured_replies: false,
            base_allocation_of: None,
        }
    }

    /// What a server says before it has heard anything.
    pub fn greeting() -> [u8; 18] {
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        Writer::new().u64(SERVER_MAGIC).u64(OPTION_MAGIC).u16(flags).finish()
    }

    /// Takes messages from the front of `input`, appends their answers to `out`, and says how
    /// many bytes it took. The set of exports may differ from call to call. Once it has said
    /// `Close` it says nothing else; after `Transmit` it must not be called again.
    pub fn advance(
        &mut self,
        input: &[u8],
        exports: &[Export],
        out: &mut Vec<u8>,
    ) -> (usize, Step) {
        let pause = out.len().saturating_add(OUTPUT_PAUSE_BYTES);
        let mut consumed = 0;
        // Each turn consumes at least one byte or leaves (H2).
        while out.len() < pause {
            let rest = input.get(consumed..).unwrap_or_default();
            let taken = match self.state {
                State::Flags => self.take_flags(rest),
                State::Option => self.take_option(rest, exports, out),
                State::Skip(left) => self.take_skip(rest, left),
                State::Closed(reason) => Taken::Close(0, reason),
                State::Transmitting => Taken::Nothing,
            };
            match taken {
                Taken::Nothing => break,
                Taken::Bytes(count) => consumed += count,
                Taken::Close(count, reason) => {
                    self.state = State::Closed(reason);
                    return (consumed + count, Step::Close(reason));
                }
                Taken::Transmit(count, session) => {
                    self.state = State::Transmitting;
                    return (consumed + count, Step::Transmit(session));
                }
            }
        }
        (consumed, Step::NeedMore)
    }

    fn take_flags(&mut self, input: &[u8]) -> Taken {
        let Some(flags) = Reader::new(input).u32() else { return Taken::Nothing };
        let fixed_newstyle = u32::from(handshake_flag::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flag::NO_ZEROES);
        if flags & !(fixed_newstyle | no_zeroes) != 0 {
            return Taken::Close(CLIENT_FLAGS_BYTES, CloseReason::UnknownClientFlags(flags));
        }
        self.fixed_newstyle = flags & fixed_newstyle != 0;
        self.no_zeroes = flags & no_zeroes != 0;
        self.state = State::Option;
        Taken::Bytes(CLIENT_FLAGS_BYTES)
    }

    fn take_skip(&mut self, input: &[u8], left: u32) -> Taken {
        let count = input.len().min(left as usize);
        if count == 0 {
            return Taken::Nothing;
        }
        let left = left - count as u32;
        self.state = if left == 0 { State::Option } else { State::Skip(left) };
        Taken::Bytes(count)
    }

    fn take_option(&mut self, input: &[u8], exports: &[Export], out: &mut Vec<u8>) -> Taken {
        let header = match OptionHeader::decode(input) {
            None => return Taken::Nothing,
            Some(Ok(header)) => header,
            Some(Err(magic)) => return Taken::Close(0, CloseReason::BadOptionMagic(magic)),
        };
        let old_style = header.option == option::EXPORT_NAME;
        let length_max = if old_style { STRING_BYTES_MAX as u32 } else { OPTION_BYTES_MAX };
        let skipped = header.length > length_max;
        if skipped && (old_style || header.length > OPTION_SKIP_BYTES_MAX) {
            return Taken::Close(0, CloseReason::OptionTooLong(header.length));
        }
        if !old_style && !self.fixed_newstyle {
            return Taken::Close(0, CloseReason::NotFixedNewstyle); // H4
        }
        if self.options_count == OPTION_COUNT_MAX {
            return Taken::Close(0, CloseReason::TooManyOptions);
        }
        if skipped {
            self.options_count += 1;
            self.state = State::Skip(header.length);
            Answer { out, option: header.option }
                .error(option_reply::ERR_TOO_BIG, "the option is too long");
            return Taken::Bytes(OptionHeader::BYTES);
        }
        let count = OptionHeader::BYTES + header.length as usize;
        let Some(content) = input.get(OptionHeader::BYTES..count) else {
            return Taken::Nothing; // H1
        };
        self.options_count += 1;
        if old_style {
            return self.export_name(count, content, exports, out);
        }
        let answer = Answer { out, option: header.option };
        match header.option {
            option::ABORT => {
                answer.ack();
                return Taken::Close(count, CloseReason::Aborted);
            }
            option::LIST => list(content, exports, answer),
            option::INFO => {
                let _ = self.describe(content, exports, answer);
            }
            option::GO => {
                if let Some(session) = self.describe(content, exports, answer) {
                    return Taken::Transmit(count, session);
                }
            }
            option::STRUCTURED_REPLY => self.structured_reply(content, answer),
            option::LIST_META_CONTEXT => self.list_contexts(content, exports, answer),
            option::SET_META_CONTEXT => self.set_contexts(content, exports, answer),
            option::STARTTLS => answer.error(option_reply::ERR_UNSUP, "no TLS is spoken here"),
            _ => answer.error(option_reply::ERR_UNSUP, "the option is not known"),
        }
        Taken::Bytes(count)
    }

    fn export_name(
        &self,
        count: usize,
        name: &[u8],
        exports: &[Export],
        out: &mut Vec<u8>,
    ) -> Taken {
        let Some(session) = self.session(name, exports) else {
            return Taken::Close(count, CloseReason::UnknownExport);
        };
        out.extend_from_slice(&session.size_bytes.to_be_bytes());
        out.extend_from_slice(&session.transmission_flags().to_be_bytes());
        if !session.no_zeroes {
            out.extend_from_slice(&EXPORT_NAME_ZEROES);
        }
        Taken::Transmit(count, session)
    }

    /// The answer to `INFO` and `GO`; the session is what `GO` begins.
    fn describe(
        &self,
        content: &[u8],
        exports: &[Export],
        mut answer: Answer<'_>,
    ) -> Option<Session> {
        let Some((name, wanted)) = parse_info(content) else {
            answer.error(option_reply::ERR_INVALID, "the lengths inside do not fit");
            return None;
        };
        let Some(session) = self.session(name, exports) else {
            answer.error(option_reply::ERR_UNKNOWN, &Export::why_none(exports, name));
            return None;
        };
        let fact = Writer::<12>::new().u16(info::EXPORT);
        let fact = fact.u64(session.size_bytes).u16(session.transmission_flags());
        answer.reply(option_reply::INFO, &[&fact.finish()]);
        // Sent unasked as well: the protocol allows it, and a client that did not know to ask
        // may still heed it.
        let block = session.logical_block.bytes();
        let fact = Writer::<14>::new().u16(info::BLOCK_SIZE);
        let fact = fact.u32(block).u32(PREFERRED_BLOCK_BYTES).u32(TRANSFER_BYTES_MAX);
        answer.reply(option_reply::INFO, &[&fact.finish()]);
        if wants(wanted, info::NAME) {
            let name = protocol_string(&session.export_name);
            answer.reply(option_reply::INFO, &[&info::NAME.to_be_bytes(), name]);
        }
        let description = exports.get(session.export_index).map_or("", |e| &e.description);
        if wants(wanted, info::DESCRIPTION) && !description.is_empty() {
            let text = protocol_string(description);
            answer.reply(option_reply::INFO, &[&info::DESCRIPTION.to_be_bytes(), text]);
        }
        answer.ack();
        Some(session)
    }

    fn structured_reply(&mut self, content: &[u8], answer: Answer<'_>) {
        if !content.is_empty() {
            answer.error(option_reply::ERR_INVALID, "the option has no content");
            return;
        }
        self.structured_replies = true;
        answer.ack();
    }

    fn list_contexts(&self, content: &[u8], exports: &[Export], mut answer: Answer<'_>) {
        let Some((_, queries)) = self.parse_contexts(content, exports, &mut answer) else { return };
        // No query asks for all, and a namespace with nothing behind its colon for all of it.
        let everything = queries.count == 0;
        if everything || queries.any(|query| query == b"base:" || is_base_allocation(query)) {
            answer.context(0);
        }
        answer.ack();
    }

    fn set_contexts(&mut self, content: &[u8], exports: &[Export], mut answer: Answer<'_>) {
        // Each attempt replaces what was chosen before, also one that fails.
        self.base_allocation_of = None;
        let Some((export, queries)) = self.parse_contexts(content, exports, &mut answer) else {
            return;
        };
        if queries.any(is_base_allocation) {
            self.base_allocation_of = Some(export.name.clone());
            answer.context(BASE_ALLOCATION_ID);
        }
        answer.ack();
    }

    /// What both options about contexts need; if it is `None` the error has been answered.
    fn parse_contexts<'a, 'b>(
        &self,
        content: &'a [u8],
        exports: &'b [Export],
        answer: &mut Answer<'_>,
    ) -> Option<(&'b Export, Queries<'a>)> {
        let invalid = option_reply::ERR_INVALID;
        if !self.structured_replies {
            answer.reply(invalid, &[b"structured replies come first"]);
            return None;
        }
        let mut reader = Reader::new(content);
        let parsed = (|| {
            let name = reader.string().filter(|name| name.len() <= STRING_BYTES_MAX)?;
            let count = reader.u32()?;
            Queries::check(count, reader.clone()).map(|queries| (name, queries))
        })();
        let Some((name, queries)) = parsed else {
            answer.reply(invalid, &[b"the lengths inside do not fit"]);
            return None;
        };
        let found = Export::find(exports, name).and_then(|index| exports.get(index));
        let Some(export) = found else {
            let why = Export::why_none(exports, name);
            answer.reply(option_reply::ERR_UNKNOWN, &[protocol_string(&why)]);
            return None;
        };
        Some((export, queries))
    }

    fn session(&self, name: &[u8], exports: &[Export]) -> Option<Session> {
        let index = Export::find(exports, name)?;
        let export = exports.get(index)?;
        let agreed = Agreed {
            structured_replies: self.structured_replies,
            base_allocation: self.base_allocation_of.as_ref() == Some(&export.name), // H3
            no_zeroes: self.no_zeroes,
        };
        Some(Session::new(index, export, agreed))
    }
}

impl Default for Handshake {
    fn default() -> Self {
        Self::new()
    }
}

fn list(content: &[u8], exports: &[Export], mut answer: Answer<'_>) {
    if !content.is_empty() {
        answer.error(option_reply::ERR_INVALID, "the option has no content");
        return;
    }
    for export in exports {
        let name = protocol_string(&export.name);
        let length = (name.len() as u32).to_be_bytes();
        let description = protocol_string(&export.description);
        answer.reply(option_reply::SERVER, &[&length, name, description]);
    }
    answer.ack();
}

/// The name and the list of facts wanted, in pairs of bytes; `None` if malformed.
fn parse_info(content: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = Reader::new(content);
    let name = reader.string().filter(|name| name.len() <= STRING_BYTES_MAX)?;
    let count = usize::from(reader.u16()?);
    let wanted = reader.bytes(count * 2)?;
    reader.rest().is_empty().then_some((name, wanted))
}

fn wants(wanted: &[u8], fact: u16) -> bool {
    wanted.chunks_exact(2).any(|pair| pair == fact.to_be_bytes())
}

fn is_base_allocation(query: &[u8]) -> bool {
    query == BASE_ALLOCATION.as_bytes()
}

/// As much of the text as a protocol string holds, cut between characters.
fn protocol_string(text: &str) -> &[u8] {
    let end = text.floor_char_boundary(STRING_BYTES_MAX);
    text.as_bytes().get(..end).unwrap_or_default()
}

/// Queries for contexts, known to be well formed.
struct Queries<'a> {
    count: u32,
    reader: Reader<'a>,
}

impl<'a> Queries<'a> {
    /// `None` unless `reader` holds exactly `count` strings. Each takes four bytes at least, so
    /// the length of the option bounds the loop, whatever the count says.
    fn check(count: u32, reader: Reader<'a>) -> Option<Self> {
        let mut rest = reader.clone();
        for _ in 0..count {
            rest.string().filter(|query| query.len() <= STRING_BYTES_MAX)?;
        }
        rest.rest().is_empty().then_some(Self { count, reader })
    }

    fn any(&self, wanted: impl Fn(&[u8]) -> bool) -> bool {
        let mut reader = self.reader.clone();
        std::iter::from_fn(|| reader.string()).any(wanted)
    }
}

/// Writes the replies to one option.
struct Answer<'a> {
    out: &'a mut Vec<u8>,
    option: u32,
}

impl Answer<'_> {
    fn reply(&mut self, reply: u32, parts: &[&[u8]]) {
        let length = parts.iter().map(|part| part.len()).sum::<usize>() as u32;
        let header = OptionReplyHeader { option: self.option, reply, length };
        self.out.extend_from_slice(&header.encode());
        for part in parts {
            self.out.extend_from_slice(part);
        }
    }

    fn context(&mut self, id: u32) {
        let name = BASE_ALLOCATION.as_bytes();
        self.reply(option_reply::META_CONTEXT, &[&id.to_be_bytes(), name]);
    }

    fn ack(mut self) {
        self.reply(option_reply::ACK, &[]);
    }

    fn error(mut self, reply: u32, text: &str) {
        self.reply(reply, &[protocol_string(text)]);
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Flags,
    Option,
    /// So many bytes of an option's content are still to be thrown away.
    Skip(u32),
    Closed(CloseReason),
    Transmitting,
}

enum Taken {
    Nothing,
    Bytes(usize),
    Close(usize, CloseReason),
    Transmit(usize, Session),
}

#[cfg(test)]
mod tests;
