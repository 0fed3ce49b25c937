// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The bytes of the kernel's FUSE protocol, as far as a directory of volumes needs them.
//!
//! Pure: bytes to requests, replies to bytes. The kernel is trusted more than a network, yet nothing
//! it sends is believed: what is too short or contradicts itself is [`Malformed`].
//!
//! # Terms
//!
//! Numbers are in the machine's own byte order. `unique` names a request in its reply.
//!
//! # Limits
//!
//! Protocol 7.23 (Linux 3.15) or newer; we speak [`MINOR`]. A request that we do not know is
//! [`Call::Unknown`], which the kernel takes `ENOSYS` for and then asks no more.

use crate::native::{u32_at, u64_at};

/// Of every request.
const HEADER_BYTES: usize = 40;
/// In front of a write's bytes: the header, and what is said of them.
pub(super) const WRITE_HEAD_BYTES: usize = HEADER_BYTES + 40;
/// Of a request, at most so much is decoded; only a write's bytes lie behind it.
pub(super) const HEAD_BYTES_MAX: usize = 512;
/// In front of a reply's bytes.
pub(super) const REPLY_HEAD_BYTES: usize = 16;
/// The directory.
pub(super) const ROOT: u64 = 1;

const MAJOR: u32 = 7;
/// The newest protocol whose fields we know.
const MINOR: u32 = 31;
const MINOR_MIN: u32 = 23;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;
const RELEASEDIR: u32 = 29;
const DESTROY: u32 = 38;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;

const ASYNC_READ: u32 = 1 << 0;
const BIG_WRITES: u32 = 1 << 5;
/// Without it the loop device waits for each request; an old kernel does.
const ASYNC_DIO: u32 = 1 << 15;
const MAX_PAGES: u32 = 1 << 22;
/// The offer has a second word of flags.
const INIT_EXT: u32 = 1 << 30;
/// Of the second word: the kernel hands out again what was not answered, when it is told to.
const HAS_RESEND: u32 = 1 << 7;
/// A notice to the kernel, and its code.
const RESEND: i32 = 7;

const SETATTR_SIZE: u32 = 1 << 3;
const O_DSYNC: u32 = 0o10000;
const KERNEL_PAGE_BYTES: u32 = 4096;
/// Nothing about a file changes while it is mounted but its size, and who tells the loop device of that asks for it.
const VALID_SECONDS: u64 = 24 * 3600;
const SECTOR_BYTES: u64 = 512;
const BLOCK_BYTES: u32 = 4096;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request<'a> {
    /// Its name.
    pub(super) unique: u64,
    /// The file or directory it is about.
    pub(super) node: u64,
    /// What is asked.
    pub(super) call: Call<'a>,
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call<'a> {
    Init(Init),
    Lookup {
        name: &'a [u8],
    },
    Attributes,
    /// Changing attributes; only the size means anything to us.
    Change {
        size: Option<u64>,
    },
    /// A file or directory.
    Open,
    Read {
        offset: u64,
        size: u32,
    },
    /// Its bytes are behind [`WRITE_HEAD_BYTES`].
    Write {
        offset: u64,
        size: u32,
        durable: bool,
    },
    List {
        offset: u64,
        size: u32,
    },
    Fsync,
    Fallocate {
        offset: u64,
        length: u64,
        mode: u32,
    },
    Space,
    /// Ends of something; there is nothing to do, but an answer is waited for.
    Done,
    /// No answer is waited for.
    Forget,
    Unknown,
}

/// What the kernel offers at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Init {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    more_flags: u32,
}

impl Init {
    /// Whether the kernel knows [`resend`].
    pub(super) fn resends(self) -> bool {
        self.more_flags & HAS_RESEND != 0
    }
}

/// Asks the kernel for everything again that was read and not answered. Such a request has the
/// highest bit of its name set, and so must its reply.
pub(super) fn resend() -> [u8; REPLY_HEAD_BYTES] {
    let mut notice = [0; REPLY_HEAD_BYTES]; // of no request: its name is 0
    notice[0..4].copy_from_slice(&(REPLY_HEAD_BYTES as u32).to_ne_bytes());
    notice[4..8].copy_from_slice(&RESEND.to_ne_bytes());
    notice
}

/// Not a request; with a name, it can be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed {
    pub(super) unique: Option<u64>,
}

/// Decodes a request of `length` bytes that begins with `head`: all of it, or its first
/// [`HEAD_BYTES_MAX`] bytes.
pub(super) fn decode(head: &[u8], length: usize) -> Result<Request<'_>, Malformed> {
    let nameless = Malformed { unique: None };
    let unique = u64_at(head, 8).ok_or(nameless)?;
    let malformed = Malformed { unique: Some(unique) };
    let (header, body) = head.split_at_checked(HEADER_BYTES).ok_or(nameless)?;
    if u32_at(header, 0).and_then(|it| usize::try_from(it).ok()) != Some(length) {
        return Err(malformed);
    }
    let opcode = u32_at(header, 4).ok_or(malformed)?;
    let node = u64_at(header, 16).ok_or(malformed)?;
    let call = call(opcode, body, length).ok_or(malformed)?;
    Ok(Request { unique, node, call })
}

fn call(opcode: u32, body: &[u8], length: usize) -> Option<Call<'_>> {
    let u32_of = |at| u32_at(body, at);
    let u64_of = |at| u64_at(body, at);
    Some(match opcode {
        INIT => Call::Init(Init {
            major: u32_of(0)?,
            minor: u32_of(4)?,
            max_readahead: u32_of(8)?,
            flags: u32_of(12)?,
            more_flags: match u32_of(12)? & INIT_EXT {
                0 => 0,
                _ => u32_of(16)?,
            },
        }),
        LOOKUP => {
            // A name that is too long for the head has no end in it, and is nobody's.
            Call::Lookup { name: body.split(|byte| *byte == 0).next()? }
        }
        GETATTR => Call::Attributes,
        SETATTR => {
            let has_size = u32_of(0)? & SETATTR_SIZE != 0;
            Call::Change { size: if has_size { Some(u64_of(16)?) } else { None } }
        }
        OPEN | OPENDIR => Call::Open,
        READ => Call::Read { offset: u64_of(8)?, size: u32_of(16)? },
        WRITE => {
            let size = u32_of(16)?;
            let durable = u32_of(32)? & O_DSYNC != 0;
            if length.checked_sub(WRITE_HEAD_BYTES)? != usize::try_from(size).ok()? {
                return None;
            }
            Call::Write { offset: u64_of(8)?, size, durable }
        }
        READDIR => Call::List { offset: u64_of(8)?, size: u32_of(16)? },
        FSYNC => Call::Fsync,
        FALLOCATE => Call::Fallocate { offset: u64_of(8)?, length: u64_of(16)?, mode: u32_of(24)? },
        STATFS => Call::Space,
        RELEASE | RELEASEDIR | FLUSH | DESTROY => Call::Done,
        FORGET | BATCH_FORGET => Call::Forget,
        _ => Call::Unknown,
    })
}

/// The head of a reply with so many bytes; `errno` is 0 or positive.
pub(super) fn reply_head(unique: u64, errno: i32, bytes: usize) -> [u8; REPLY_HEAD_BYTES] {
    assert!(errno >= 0);
    let length = u32::try_from(REPLY_HEAD_BYTES + bytes).expect("a reply is at most 1 MiB long");
    let mut head = [0; REPLY_HEAD_BYTES];
    head[0..4].copy_from_slice(&length.to_ne_bytes());
    head[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    head[8..16].copy_from_slice(&unique.to_ne_bytes());
    head
}

/// What we take of the kernel's offer; `None`: it is too old.
pub(super) fn init_reply(offer: Init, transfer_bytes_max: u32, background: u16) -> Option<Vec<u8>> {
    let wanted = ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES;
    if offer.major != MAJOR || offer.minor < MINOR_MIN {
        return None;
    }
    let pages = u16::try_from(transfer_bytes_max / KERNEL_PAGE_BYTES).expect("a few hundred");
    let mut body = Vec::with_capacity(64);
    for word in [MAJOR, offer.minor.min(MINOR), offer.max_readahead, offer.flags & wanted] {
        body.extend(word.to_ne_bytes());
    }
    // Above the second the kernel holds back.
    for half in [background, background / 4 * 3] {
        body.extend(half.to_ne_bytes());
    }
    body.extend(transfer_bytes_max.to_ne_bytes());
    body.extend(1u32.to_ne_bytes()); // times in nanoseconds
    body.extend(pages.to_ne_bytes());
    body.resize(64, 0);
    Some(body)
}

/// What a file or directory is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes {
    pub(super) node: u64,
    pub(super) size_bytes: u64,
    /// Kind and permissions, as `stat(2)` has them.
    pub(super) mode: u32,
    /// Seconds since 1970, for all times there are.
    pub(super) since: u64,
}

impl Attributes {
    fn encode_to(self, body: &mut Vec<u8>) {
        let start = body.len();
        let (size, since) = (self.size_bytes, self.since);
        for word in [self.node, size, size / SECTOR_BYTES, since, since, since] {
            body.extend(word.to_ne_bytes());
        }
        let (links, user, group, device) = (1, 0, 0, 0);
        // In front: the nanoseconds of three times.
        for word in [0, 0, 0, self.mode, links, user, group, device, BLOCK_BYTES, 0] {
            body.extend(word.to_ne_bytes());
        }
        assert_eq!(body.len() - start, 88);
    }

    pub(super) fn reply(self) -> Vec<u8> {
        let mut body = Vec::with_capacity(104);
        body.extend(VALID_SECONDS.to_ne_bytes());
        body.extend([0; 8]); // its nanoseconds
        self.encode_to(&mut body);
        body
    }

    /// The reply to a lookup.
    pub(super) fn entry_reply(self) -> Vec<u8> {
        let generation = 0;
        let mut body = Vec::with_capacity(128);
        for word in [self.node, generation, VALID_SECONDS, VALID_SECONDS] {
            body.extend(word.to_ne_bytes());
        }
        body.extend([0; 8]); // their nanoseconds
        self.encode_to(&mut body);
        body
    }
}

/// The reply to an open: no handle is needed, and nothing special about the file.
pub(super) fn open_reply() -> [u8; 16] {
    [0; 16]
}

/// The reply to a write.
pub(super) fn write_reply(size: u32) -> [u8; 8] {
    let mut body = [0; 8];
    body[0..4].copy_from_slice(&size.to_ne_bytes());
    body
}

/// The reply to the question for space: nothing but names' length and the unit.
pub(super) fn space_reply() -> [u8; 80] {
    let mut body = [0; 80];
    body[40..44].copy_from_slice(&BLOCK_BYTES.to_ne_bytes());
    body[44..48].copy_from_slice(&255u32.to_ne_bytes());
    body
}

/// One line of a directory: false if there is no room for it within `size`. `next` is where a
/// listing goes on behind it.
pub(super) fn list_line(
    body: &mut Vec<u8>,
    size: u32,
    attributes: Attributes,
    next: u64,
    name: &str,
) -> bool {
    let length = (24 + name.len()).next_multiple_of(8);
    if body.len() + length > size as usize {
        return false;
    }
    let end = body.len() + length;
    body.extend(attributes.node.to_ne_bytes());
    body.extend(next.to_ne_bytes());
    body.extend((name.len() as u32).to_ne_bytes());
    body.extend((attributes.mode >> 12).to_ne_bytes());
    body.extend(name.as_bytes());
    body.resize(end, 0);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((40 + body.len() as u32).to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(77u64.to_ne_bytes());
        bytes.extend(node.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(body);
        bytes
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Two halves as they lie in memory.
    fn pair(first: u32, second: u32) -> u64 {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&first.to_ne_bytes());
        bytes[4..].copy_from_slice(&second.to_ne_bytes());
        u64::from_ne_bytes(bytes)
    }

    fn samples() -> Vec<(Vec<u8>, Call<'static>)> {
        let mut write = words(&[0, 8192, pair(4096, 0), 0, pair(O_DSYNC, 0)]);
        write.extend([9; 4096]);
        let allocate = words(&[0, 4096, 8192, pair(3, 0)]);
        let size = words(&[pair(SETATTR_SIZE, 0), 0, 512, 0, 0, 0, 0, 0, 0, 0, 0]);
        let init = [pair(7, 45), pair(1 << 17, u32::MAX), pair(HAS_RESEND, 0)];
        let old = [pair(7, 23), pair(1 << 17, ASYNC_DIO)];
        vec![
            (request(LOOKUP, 1, b"data\0"), Call::Lookup { name: b"data" }),
            (request(GETATTR, 2, &[0; 16]), Call::Attributes),
            (request(SETATTR, 2, &size), Call::Change { size: Some(512) }),
            (request(SETATTR, 2, &[0; 88]), Call::Change { size: None }),
            (request(OPEN, 2, &[0; 8]), Call::Open),
            (
                request(READ, 2, &words(&[0, 4096, pair(512, 0), 0, 0])),
                Call::Read { offset: 4096, size: 512 },
            ),
            (request(WRITE, 2, &write), Call::Write { offset: 8192, size: 4096, durable: true }),
            (
                request(READDIR, 1, &words(&[0, 2, pair(4096, 0), 0, 0])),
                Call::List { offset: 2, size: 4096 },
            ),
            (request(FSYNC, 2, &[0; 16]), Call::Fsync),
            (
                request(FALLOCATE, 2, &allocate),
                Call::Fallocate { offset: 4096, length: 8192, mode: 3 },
            ),
            (request(STATFS, 1, &[]), Call::Space),
            (request(RELEASE, 2, &[0; 24]), Call::Done),
            (request(FORGET, 2, &[0; 8]), Call::Forget),
            (request(36, 2, &[0; 8]), Call::Unknown),
            (
                request(INIT, 0, &words(&init)),
                Call::Init(Init {
                    major: 7,
                    minor: 45,
                    max_readahead: 1 << 17,
                    flags: u32::MAX,
                    more_flags: HAS_RESEND,
                }),
            ),
            (
                request(INIT, 0, &words(&old)),
                Call::Init(Init {
                    major: 7,
                    minor: 23,
                    max_readahead: 1 << 17,
                    flags: ASYNC_DIO,
                    more_flags: 0,
                }),
            ),
        ]
    }

    #[test]
    fn each_request_is_understood() {
        for (bytes, call) in samples() {
            let head = &bytes[..bytes.len().min(HEAD_BYTES_MAX)];
            let node = u64_at(&bytes, 16).unwrap();
            assert_eq!(decode(head, bytes.len()), Ok(Request { unique: 77, node, call }));
        }
    }

    #[test]
    fn request_cut_short_is_malformed_wherever_it_is_cut() {
        for (bytes, call) in samples() {
            for length in 0..bytes.len() {
                let head = &bytes[..length.min(HEAD_BYTES_MAX)];
                // The length it says is not what came.
                let unique = (length >= 40).then_some(77);
                assert_eq!(decode(head, length).unwrap_err().unique, unique, "{call:?}");
                if length < 40 {
                    continue;
                }
                // And if it says what came, a field is missing, or it is no field of ours.
                let mut said = bytes[..length].to_vec();
                said[0..4].copy_from_slice(&(length as u32).to_ne_bytes());
                let _ = decode(&said[..length.min(HEAD_BYTES_MAX)], length);
                if matches!(call, Call::Write { .. }) {
                    assert!(decode(&said[..length.min(HEAD_BYTES_MAX)], length).is_err());
                }
            }
        }
    }

    #[test]
    fn any_bytes_give_a_request_or_an_error() {
        let mut random = forebay_testing::Random(4711);
        let mut below = |end: usize| random.below(end as u64) as usize;
        let samples = samples();
        for _ in 0..200_000 {
            let mut bytes = samples[below(samples.len())].0.clone();
            for _ in 0..below(6) {
                let at = below(bytes.len().min(HEAD_BYTES_MAX));
                bytes[at] = below(256) as u8;
            }
            let length = if below(4) == 0 { below(600) } else { bytes.len() };
            let head = &bytes[..length.min(bytes.len()).min(HEAD_BYTES_MAX)];
            if let Ok(Request { call: Call::Write { size, .. }, .. }) = decode(head, length) {
                assert_eq!(WRITE_HEAD_BYTES + size as usize, length);
            }
        }
    }

    #[test]
    fn kernel_gets_no_flag_that_it_did_not_offer() {
        let flags = ASYNC_DIO | 1 << 31;
        let offer = Init { major: 7, minor: 45, max_readahead: 4096, flags, more_flags: 0 };
        assert!(!offer.resends());
        assert!(Init { more_flags: HAS_RESEND | 1, ..offer }.resends());
        let body = init_reply(offer, 1 << 20, 256).unwrap();
        assert_eq!(body.len(), 64);
        assert_eq!(u32_at(&body, 4), Some(31));
        assert_eq!(u32_at(&body, 12), Some(ASYNC_DIO));
        assert_eq!(u32_at(&body, 20), Some(1 << 20));
        assert_eq!(body[28..30], 256u16.to_ne_bytes());
        assert_eq!(init_reply(Init { minor: 22, ..offer }, 1 << 20, 256), None);
        assert_eq!(init_reply(Init { major: 8, ..offer }, 1 << 20, 256), None);
    }

    #[test]
    fn listing_ends_where_its_room_ends() {
        let attributes = Attributes { node: 2, size_bytes: 0, mode: 0o100_600, since: 0 };
        let mut body = Vec::new();
        assert!(list_line(&mut body, 63, attributes, 1, "v"));
        assert_eq!(body.len(), 32);
        assert_eq!(u32_at(&body, 20), Some(8)); // a regular file
        assert!(!list_line(&mut body, 63, attributes, 2, "w"));
        assert_eq!(body.len(), 32);
    }

    #[test]
    fn replies_are_as_long_as_the_kernel_wants_them() {
        let attributes = Attributes { node: 2, size_bytes: 512, mode: 0o100_600, since: 0 };
        assert_eq!(attributes.reply().len(), 104);
        assert_eq!(attributes.entry_reply().len(), 128);
        let head = reply_head(5, 2, 8);
        assert_eq!(u32_at(&head, 0), Some(24));
        assert_eq!(u32_at(&head, 4), Some(-2i32 as u32));
        assert_eq!(u64_at(&head, 8), Some(5));
        assert_eq!((u32_at(&resend(), 0), u32_at(&resend(), 4)), (Some(16), Some(7)));
        assert_eq!(u64_at(&resend(), 8), Some(0));
    }
}
