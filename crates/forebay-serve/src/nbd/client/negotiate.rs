// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client's side of the handshake.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};

use super::{Client, ClientError, read_vec};
use crate::bytes::Reader;
use crate::nbd::wire::{
    BASE_ALLOCATION, OPTION_MAGIC, OptionHeader, OptionReplyHeader, SERVER_MAGIC, handshake_flag,
    info, option, option_reply,
};

/// Bytes of one reply of the server.
const REPLY_BYTES_MAX: u32 = 64 << 10;
/// Replies to one option; a server has no more exports than that.
const REPLY_COUNT_MAX: usize = 64 << 10;

/// What a connection should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect<'a> {
    /// Name of the export; empty for the only one.
    pub export: &'a str,
    /// How to begin transmission.
    pub entry: Entry,
    /// Ask for structured replies; go on without if the server has none.
    pub structured_replies: bool,
    /// Ask for `base:allocation`, which needs structured replies.
    pub base_allocation: bool,
    /// Ask for no zeros after [`Entry::ExportName`].
    pub no_zeroes: bool,
}

impl Default for Connect<'_> {
    /// Everything, of the only export.
    fn default() -> Self {
        Self {
            export: "",
            entry: Entry::Go,
            structured_replies: true,
            base_allocation: true,
            no_zeroes: true,
        }
    }
}

/// How transmission begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// `NBD_OPT_GO`.
    Go,
    /// `NBD_OPT_EXPORT_NAME`.
    ExportName,
}

/// What a server says about an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportFacts {
    /// Bytes.
    pub size_bytes: u64,
    /// Bits of [`crate::nbd::wire::transmission_flag`].
    pub flags: u16,
    /// What lengths it takes.
    pub block_sizes: Option<BlockSizes>,
    /// Its own name for the export.
    pub name: Option<String>,
    /// Free text.
    pub description: Option<String>,
}

/// What lengths a server takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Of which everything is a multiple.
    pub minimum: u32,
    /// Which goes best.
    pub preferred: u32,
    /// Which nothing may exceed that carries data.
    pub maximum: u32,
}

/// One line of the list of exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    /// What to ask for.
    pub name: String,
    /// Free text.
    pub description: String,
}

pub(super) fn connect<S: Read + Write>(
    stream: S,
    wanted: &Connect<'_>,
) -> Result<Client<S>, ClientError> {
    let mut negotiation = Negotiation::start(stream, wanted.no_zeroes)?;
    let structured_replies = wanted.structured_replies && negotiation.structured_replies()?;
    let base_allocation_id = if structured_replies && wanted.base_allocation {
        negotiation.base_allocation(wanted.export)?
    } else {
        None
    };
    let facts = match wanted.entry {
        Entry::Go => negotiation.facts(option::GO, wanted.export)?,
        Entry::ExportName => negotiation.export_name(wanted.export)?,
    };
    Ok(Client {
        stream: negotiation.stream,
        facts,
        structured_replies,
        base_allocation_id,
        cookie_next: 1,
        pending: BTreeMap::new(),
        ready: VecDeque::new(),
    })
}

pub(super) fn list<S: Read + Write>(stream: S) -> Result<Vec<ListedExport>, ClientError> {
    let mut negotiation = Negotiation::start(stream, true)?;
    let mut listed = Vec::new();
    for content in negotiation.ask(option::LIST, &[], option_reply::SERVER)? {
        let mut reader = Reader::new(&content);
        let name = reader.string().ok_or(ClientError::Protocol("a name without an end"))?;
        listed.push(ListedExport { name: text(name), description: text(reader.rest()) });
    }
    negotiation.abort()?;
    Ok(listed)
}

pub(super) fn describe<S: Read + Write>(
    stream: S,
    wanted: &Connect<'_>,
) -> Result<ExportFacts, ClientError> {
    let mut negotiation = Negotiation::start(stream, true)?;
    if wanted.structured_replies {
        negotiation.structured_replies()?;
    }
    let facts = negotiation.facts(option::INFO, wanted.export)?;
    negotiation.abort()?;
    Ok(facts)
}

struct Negotiation<S> {
    stream: S,
    /// Both sides agreed that no zeros follow the answer to `EXPORT_NAME`.
    no_zeroes: bool,
}

impl<S: Read + Write> Negotiation<S> {
    fn start(mut stream: S, no_zeroes: bool) -> Result<Self, ClientError> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        let mut reader = Reader::new(&greeting);
        if reader.u64() != Some(SERVER_MAGIC) || reader.u64() != Some(OPTION_MAGIC) {
            return Err(ClientError::Protocol("not the greeting of a newstyle server"));
        }
        let offered = reader.u16().unwrap_or_default();
        if offered & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(ClientError::Protocol("a server without the fixed newstyle"));
        }
        let no_zeroes = no_zeroes && offered & handshake_flag::NO_ZEROES != 0;
        let zeroes_flag = if no_zeroes { handshake_flag::NO_ZEROES } else { 0 };
        let flags = u32::from(handshake_flag::FIXED_NEWSTYLE | zeroes_flag);
        stream.write_all(&flags.to_be_bytes())?;
        Ok(Self { stream, no_zeroes })
    }

    fn structured_replies(&mut self) -> Result<bool, ClientError> {
        match self.ask(option::STRUCTURED_REPLY, &[], option_reply::ACK) {
            Ok(_) => Ok(true),
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The number of the context, if the server has it.
    fn base_allocation(&mut self, export: &str) -> Result<Option<u32>, ClientError> {
        let mut content = string(export);
        content.extend(1u32.to_be_bytes());
        content.extend(string(BASE_ALLOCATION));
        let contexts =
            match self.ask(option::SET_META_CONTEXT, &content, option_reply::META_CONTEXT) {
                Ok(contexts) => contexts,
                Err(ClientError::Refused { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
        for context in contexts {
            let mut reader = Reader::new(&context);
            let id = reader.u32().ok_or(ClientError::Protocol("a context without a number"))?;
            if reader.rest() == BASE_ALLOCATION.as_bytes() {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    fn facts(&mut self, option: u32, export: &str) -> Result<ExportFacts, ClientError> {
        let wanted = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE];
        let mut content = string(export);
        content.extend((wanted.len() as u16).to_be_bytes());
        content.extend(wanted.into_iter().flat_map(u16::to_be_bytes));
        let mut facts = ExportFacts::default();
        let mut export_seen = false;
        for fact in self.ask(option, &content, option_reply::INFO)? {
            let seen = take_fact(&mut facts, &fact);
            export_seen |= seen.ok_or(ClientError::Protocol("a fact that is too short"))?;
        }
        if !export_seen {
            return Err(ClientError::Protocol("nothing said about the size of the export"));
        }
        Ok(facts)
    }

    fn export_name(&mut self, export: &str) -> Result<ExportFacts, ClientError> {
        self.send(option::EXPORT_NAME, export.as_bytes())?;
        let mut answer = [0; 10];
        self.stream.read_exact(&mut answer)?;
        if !self.no_zeroes {
            self.stream.read_exact(&mut [0; 124])?;
        }
        let mut reader = Reader::new(&answer);
        Ok(ExportFacts {
            size_bytes: reader.u64().unwrap_or_default(),
            flags: reader.u16().unwrap_or_default(),
            ..ExportFacts::default()
        })
    }

    fn abort(&mut self) -> Result<(), ClientError> {
        // A server may close without a word, and the client wants nothing more from it.
        match self.ask(option::ABORT, &[], option_reply::ACK) {
            Ok(_) | Err(ClientError::Io(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn send(&mut self, option: u32, content: &[u8]) -> Result<(), ClientError> {
        let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "an option beyond 4 GiB");
        let length = u32::try_from(content.len()).map_err(|_| too_long())?;
        self.stream.write_all(&OptionHeader { option, length }.encode())?;
        self.stream.write_all(content)?;
        self.stream.flush()?;
        Ok(())
    }

    /// Sends an option and collects the replies of the `expected` kind up to the last one.
    fn ask(
        &mut self,
        option: u32,
        content: &[u8],
        expected: u32,
    ) -> Result<Vec<Vec<u8>>, ClientError> {
        self.send(option, content)?;
        let mut collected = Vec::new();
        for _ in 0..REPLY_COUNT_MAX {
            let mut bytes = [0; OptionReplyHeader::BYTES];
            self.stream.read_exact(&mut bytes)?;
            let header = OptionReplyHeader::decode(&bytes).and_then(Result::ok);
            let header = header.ok_or(ClientError::Protocol("not a reply to an option"))?;
            if header.option != option || header.length > REPLY_BYTES_MAX {
                return Err(ClientError::Protocol("a reply to another option, or too long"));
            }
            let content = read_vec(&mut self.stream, header.length)?;
            match header.reply {
                option_reply::ACK => return Ok(collected),
                reply if reply & option_reply::ERROR != 0 => {
                    return Err(ClientError::Refused { option, reply, text: text(&content) });
                }
                reply if reply == expected => collected.push(content),
                _ => return Err(ClientError::Protocol("a reply of an unexpected kind")),
            }
        }
        Err(ClientError::Protocol("more replies than there can be"))
    }
}

/// Whether it was the fact about size and flags; `None` if it was malformed.
fn take_fact(facts: &mut ExportFacts, fact: &[u8]) -> Option<bool> {
    let mut reader = Reader::new(fact);
    match reader.u16()? {
        info::EXPORT => {
            facts.size_bytes = reader.u64()?;
            facts.flags = reader.u16()?;
            return Some(true);
        }
        info::NAME => facts.name = Some(text(reader.rest())),
        info::DESCRIPTION => facts.description = Some(text(reader.rest())),
        info::BLOCK_SIZE => {
            facts.block_sizes = Some(BlockSizes {
                minimum: reader.u32()?,
                preferred: reader.u32()?,
                maximum: reader.u32()?,
            });
        }
        _ => {} // A fact of a later protocol.
    }
    Some(false)
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
