// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The messages of vhost-user as bytes: what a front end (QEMU) says, and what it is answered.
//!
//! Written against `docs/interop/vhost-user.rst` of QEMU. Numbers are in the machine's own order,
//! which is little-endian on every machine that we are built for; nothing is done that depends on
//! it elsewhere.
//!
//! # Invariants
//!
//! - **M1** Any bytes decode to a message or to an error; no length in them is believed before it
//!   is compared with [`BODY_BYTES_MAX`] and with what the message needs.
//! - **M2** A message comes with exactly the descriptors it needs, or it is an error.

/// Bytes of the head of each message.
pub const HEADER_BYTES: usize = 12;
/// No message that we know is longer behind its head.
pub const BODY_BYTES_MAX: usize = 512;
/// Descriptors that may come with one message.
pub const FD_COUNT_MAX: usize = 8;
/// Bytes of configuration that may be asked for.
pub const CONFIG_BYTES_MAX: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEEDS_REPLY: u32 = 1 << 3;
/// A configuration is set because the guest's driver wrote it, not for a migration.
const SET_CONFIG_BY_DRIVER: u32 = 0;

use self::request as r;

/// The numbers of requests.
pub mod request {
    #![allow(missing_docs)]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// Of the other direction: the configuration space has changed.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// Feature bits of the protocol.
pub mod protocol {
    #![allow(missing_docs)]
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// What we offer.
    pub const ALL: u64 = MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD;
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Its version is not 1, or it is an answer.
    #[error("a message of version {0}, or an answer where a message was due")]
    Flags(u32),
    /// Longer than any we know.
    #[error("a message of {0} bytes")]
    Long(u32),
    /// Shorter or longer than its kind.
    #[error("message {0} has the wrong length")]
    Length(u32),
    /// More or fewer descriptors than its kind has.
    #[error("message {request} came with {count} descriptors")]
    Descriptors {
        /// Its kind.
        request: u32,
        /// How many came.
        count: usize,
    },
    /// Some did not arrive.
    #[error(
        "descriptors of a message were lost: there are more than {FD_COUNT_MAX}, or the daemon may have no more open files \
         (`ulimit -n`, LimitNOFILE=)"
    )]
    Cut,
    /// A value that no message of its kind may hold.
    #[error("message {0} holds a value out of range")]
    Value(u32),
    /// Not one of ours.
    #[error("message {0} is not known")]
    Unknown(u32),
}

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// One of [`request`].
    pub request: u32,
    /// An acknowledgement is wanted; counts only if that was agreed on.
    pub needs_reply: bool,
    /// Bytes behind it, at most [`BODY_BYTES_MAX`].
    pub size: usize,
}

impl Header {
    /// Of a front end.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let mut reader = Reader(bytes);
        let (request, flags, size) = (reader.u32(), reader.u32(), reader.u32());
        let (Some(request), Some(flags), Some(size)) = (request, flags, size) else {
            return Err(WireError::Long(0));
        };
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(WireError::Flags(flags));
        }
        if size as usize > BODY_BYTES_MAX {
            return Err(WireError::Long(size));
        }
        Ok(Header { request, needs_reply: flags & NEEDS_REPLY != 0, size: size as usize })
    }

    /// As a front end says it.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let flags = VERSION | if self.needs_reply { NEEDS_REPLY } else { 0 };
        head(self.request, flags, self.size)
    }
}

fn head(request: u32, flags: u32, size: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&request.to_le_bytes());
    bytes[4..8].copy_from_slice(&flags.to_le_bytes());
    bytes[8..].copy_from_slice(&(size as u32).to_le_bytes());
    bytes
}

/// An answer.
pub fn reply(request: u32, body: &[u8]) -> Vec<u8> {
    [&head(request, VERSION | REPLY, body.len())[..], body].concat()
}

/// The back end's own message that the configuration space has changed.
pub fn config_changed() -> [u8; HEADER_BYTES] {
    head(request::BACKEND_CONFIG_CHANGE, VERSION, 0)
}

/// A part of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// First address as the guest knows it.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// First address as the front end knows it; rings are told in these.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}

/// Where the parts of a ring are, as addresses of the front end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VringAddr {
    /// Its queue.
    pub queue: u32,
    /// Whatever; only dirty logging, which we do not offer, is there.
    pub flags: u32,
    /// The table of descriptors.
    pub descriptors: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub available: u64,
}

/// A region for what is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inflight {
    /// Its bytes.
    pub size: u64,
    /// Where it begins in its file.
    pub offset: u64,
    /// Queues it has room for.
    pub queue_count: u16,
    /// Entries of each.
    pub queue_size: u16,
}

impl Inflight {
    /// As bytes.
    pub fn encode(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..18].copy_from_slice(&self.queue_count.to_le_bytes());
        bytes[18..20].copy_from_slice(&self.queue_size.to_le_bytes());
        bytes
    }

    fn decode(reader: &mut Reader<'_>) -> Option<Inflight> {
        let inflight = Inflight {
            size: reader.u64()?,
            offset: reader.u64()?,
            queue_count: reader.u16()?,
            queue_size: reader.u16()?,
        };
        // Some pad it to a multiple of eight, some do not.
        let padding = reader.0.len();
        reader.take(if padding == 4 { 4 } else { 0 })?;
        Some(inflight)
    }
}

/// A part of the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigPart {
    /// Where it begins.
    pub offset: u32,
    /// Its bytes, at most [`CONFIG_BYTES_MAX`].
    pub size: u32,
}

/// What a front end wants. `has_fd`: a descriptor came with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// One at a time, on the stack.
#[allow(missing_docs, clippy::large_enum_variant)]
pub enum Message<'a> {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable { regions: [Region; FD_COUNT_MAX], count: usize },
    SetVringNum { queue: u32, size: u32 },
    SetVringAddr(VringAddr),
    SetVringBase { queue: u32, base: u32 },
    GetVringBase { queue: u32 },
    SetVringKick { queue: u8, has_fd: bool },
    SetVringCall { queue: u8, has_fd: bool },
    SetVringErr { queue: u8, has_fd: bool },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable { queue: u32, enable: bool },
    SetBackendReqFd,
    GetConfig(ConfigPart),
    SetConfig { part: ConfigPart, by_driver: bool, bytes: &'a [u8] },
    GetInflightFd(Inflight),
    SetInflightFd(Inflight),
}

impl Message<'_> {
    /// Rings or memory change: nothing may be under way.
    pub fn needs_rest(&self) -> bool {
        matches!(
            self,
            Self::SetFeatures(_)
                | Self::ResetOwner
                | Self::SetMemTable { .. }
                | Self::SetVringNum { .. }
                | Self::SetVringAddr(_)
                | Self::SetVringBase { .. }
                | Self::GetVringBase { .. }
                | Self::SetVringKick { .. }
                | Self::SetInflightFd(_)
        )
    }
}

/// What the body of a message says; `fd_count` descriptors came with it.
pub fn decode(request: u32, body: &[u8], fd_count: usize) -> Result<Message<'_>, WireError> {
    let mut reader = Reader(body);
    let wrong_length = WireError::Length(request);
    let (message, wanted) = match request {
        r::GET_FEATURES => (Some(Message::GetFeatures), 0),
        r::SET_FEATURES => (reader.u64().map(Message::SetFeatures), 0),
        r::SET_OWNER => (Some(Message::SetOwner), 0),
        r::RESET_OWNER => (Some(Message::ResetOwner), 0),
        r::SET_MEM_TABLE => {
            let (regions, count) = mem_table(&mut reader).ok_or(wrong_length)?;
            (Some(Message::SetMemTable { regions, count }), count)
        }
        r::SET_VRING_NUM => {
            (reader.state().map(|(queue, size)| Message::SetVringNum { queue, size }), 0)
        }
        r::SET_VRING_ADDR => (vring_addr(&mut reader).map(Message::SetVringAddr), 0),
        r::SET_VRING_BASE => {
            (reader.state().map(|(queue, base)| Message::SetVringBase { queue, base }), 0)
        }
        r::GET_VRING_BASE => (reader.state().map(|(queue, _)| Message::GetVringBase { queue }), 0),
        r::SET_VRING_KICK | r::SET_VRING_CALL | r::SET_VRING_ERR => {
            let value = reader.u64().ok_or(wrong_length)?;
            if value >> 9 != 0 {
                return Err(WireError::Value(request));
            }
            let (queue, has_fd) = (value as u8, value & 1 << 8 == 0);
            let message = match request {
                r::SET_VRING_KICK => Message::SetVringKick { queue, has_fd },
                r::SET_VRING_CALL => Message::SetVringCall { queue, has_fd },
                _ => Message::SetVringErr { queue, has_fd },
            };
            (Some(message), usize::from(has_fd))
        }
        r::GET_PROTOCOL_FEATURES => (Some(Message::GetProtocolFeatures), 0),
        r::SET_PROTOCOL_FEATURES => (reader.u64().map(Message::SetProtocolFeatures), 0),
        r::GET_QUEUE_NUM => (Some(Message::GetQueueNum), 0),
        r::SET_VRING_ENABLE => {
            let (queue, enable) = reader.state().ok_or(wrong_length)?;
            // SPDK's initiator has said the queue's size here.
            (Some(Message::SetVringEnable { queue, enable: enable != 0 }), 0)
        }
        r::SET_BACKEND_REQ_FD => {
            // Some say a number with it, which means nothing.
            let _ = reader.take(body.len().min(8));
            (Some(Message::SetBackendReqFd), 1)
        }
        r::GET_CONFIG | r::SET_CONFIG => (config(request, &mut reader)?, 0),
        r::GET_INFLIGHT_FD => (Inflight::decode(&mut reader).map(Message::GetInflightFd), 0),
        r::SET_INFLIGHT_FD => (Inflight::decode(&mut reader).map(Message::SetInflightFd), 1),
        _ => return Err(WireError::Unknown(request)),
    };
    let message = message.ok_or(wrong_length)?;
    if !reader.0.is_empty() {
        return Err(wrong_length);
    }
    if fd_count != wanted {
        return Err(WireError::Descriptors { request, count: fd_count }); // M2
    }
    Ok(message)
}

fn mem_table(reader: &mut Reader<'_>) -> Option<([Region; FD_COUNT_MAX], usize)> {
    let (count, _) = reader.state()?;
    let count = usize::try_from(count).ok().filter(|count| *count <= FD_COUNT_MAX)?;
    let mut regions = [Region::default(); FD_COUNT_MAX];
    for region in regions.iter_mut().take(count) {
        let (guest, size) = (reader.u64()?, reader.u64()?);
        *region = Region { guest, size, user: reader.u64()?, offset: reader.u64()? };
    }
    Some((regions, count))
}

fn vring_addr(reader: &mut Reader<'_>) -> Option<VringAddr> {
    let (queue, flags) = reader.state()?;
    let (descriptors, used, available) = (reader.u64()?, reader.u64()?, reader.u64()?);
    // Of dirty logging.
    reader.u64()?;
    Some(VringAddr { queue, flags, descriptors, used, available })
}

fn config<'a>(request: u32, reader: &mut Reader<'a>) -> Result<Option<Message<'a>>, WireError> {
    let head = (reader.u32(), reader.u32(), reader.u32());
    let (Some(offset), Some(size), Some(flags)) = head else { return Ok(None) };
    if size as usize > CONFIG_BYTES_MAX || offset as usize > CONFIG_BYTES_MAX {
        return Err(WireError::Value(request));
    }
    // One who asks leaves room for the answer.
    let Some(bytes) = reader.take(size as usize) else { return Ok(None) };
    let part = ConfigPart { offset, size };
    Ok(Some(match request {
        request::GET_CONFIG => Message::GetConfig(part),
        _ => Message::SetConfig { part, by_driver: flags == SET_CONFIG_BY_DRIVER, bytes },
    }))
}

/// Takes numbers off the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A queue's number and a number.
    fn state(&mut self) -> Option<(u32, u32)> {
        Some((self.u32()?, self.u32()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_of_version_1_and_of_bounded_length() {
        let header = Header { request: request::GET_CONFIG, needs_reply: true, size: 72 };
        assert_eq!(Header::decode(&header.encode()), Ok(header));
        let with = |flags, size| Header::decode(&head(1, flags, size));
        assert!(with(1, BODY_BYTES_MAX).is_ok());
        assert_eq!(with(1, BODY_BYTES_MAX + 1), Err(WireError::Long(513)));
        assert_eq!(with(2, 0), Err(WireError::Flags(2)));
        assert_eq!(with(1 | REPLY, 0), Err(WireError::Flags(5)));
    }

    #[test]
    fn a_message_has_its_length_and_its_descriptors() {
        let eight = 5u64.to_le_bytes();
        assert_eq!(decode(request::SET_FEATURES, &eight, 0), Ok(Message::SetFeatures(5)));
        assert_eq!(decode(request::SET_FEATURES, &eight[..7], 0), Err(WireError::Length(2)));
        assert_eq!(decode(request::SET_FEATURES, &[0; 9], 0), Err(WireError::Length(2)));
        let error = WireError::Descriptors { request: 2, count: 1 };
        assert_eq!(decode(request::SET_FEATURES, &eight, 1), Err(error));
        let (with, without) = (3u64.to_le_bytes(), 0x103u64.to_le_bytes());
        let kick = decode(request::SET_VRING_KICK, &with, 1);
        assert_eq!(kick, Ok(Message::SetVringKick { queue: 3, has_fd: true }));
        let kick = decode(request::SET_VRING_KICK, &without, 0);
        assert_eq!(kick, Ok(Message::SetVringKick { queue: 3, has_fd: false }));
        assert!(decode(request::SET_VRING_KICK, &with, 0).is_err());
        assert_eq!(decode(99, &[], 0), Err(WireError::Unknown(99)));
    }

    #[test]
    fn a_memory_table_has_at_most_eight_regions_and_a_descriptor_for_each() {
        let mut body = 2u64.to_le_bytes().to_vec();
        for number in 1..=8u64 {
            body.extend(number.to_le_bytes());
        }
        let Ok(Message::SetMemTable { regions, count: 2 }) = decode(5, &body, 2) else { panic!() };
        assert_eq!(regions[1], Region { guest: 5, size: 6, user: 7, offset: 8 });
        assert!(decode(5, &body, 1).is_err());
        let nine = [&9u64.to_le_bytes()[..], &[0; 32 * 9]].concat();
        assert_eq!(decode(5, &nine, 8), Err(WireError::Length(5)));
    }

    #[test]
    fn a_part_of_the_configuration_lies_within_it() {
        let part = |offset: u32, size: u32, bytes: usize| {
            let mut body = [offset.to_le_bytes(), size.to_le_bytes(), [0; 4]].concat();
            body.resize(12 + bytes, 7);
            body
        };
        let ask = decode(request::GET_CONFIG, &part(0, 60, 60), 0).map(|it| it.needs_rest());
        assert_eq!(ask, Ok(false));
        assert!(decode(request::GET_CONFIG, &part(0, 60, 59), 0).is_err());
        assert!(decode(request::GET_CONFIG, &part(0, u32::MAX, 59), 0).is_err());
        assert!(decode(request::GET_CONFIG, &part(u32::MAX, 1, 1), 0).is_err());
        let body = part(32, 1, 1);
        let part = ConfigPart { offset: 32, size: 1 };
        let set = Message::SetConfig { part, by_driver: true, bytes: &[7] };
        assert_eq!(decode(request::SET_CONFIG, &body, 0), Ok(set));
    }
}
