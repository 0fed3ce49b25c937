// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generic netlink, as far as the kernel's NBD driver needs it: messages of attributes.
//!
//! Numbers are in the machine's own byte order; everything begins at a multiple of four. What comes
//! is decoded, never believed: cut or contradictory bytes end what is read of them.

use crate::native::{u16_at, u32_at};
use std::os::fd::RawFd;

/// The family that knows the others, and its one question.
pub(super) const CONTROL: u16 = 16;
pub(super) const GET_FAMILY: u8 = 3;
pub(super) const FAMILY_ID: u16 = 1;
pub(super) const FAMILY_NAME: u16 = 2;
/// The highest of the family's attributes.
pub(super) const FAMILY_ATTRIBUTE_MAX: u16 = 5;

/// Commands of the family `nbd`.
pub(super) const CONNECT: u8 = 1;
pub(super) const DISCONNECT: u8 = 2;
pub(super) const RECONFIGURE: u8 = 3;

/// Attributes of the family `nbd`.
pub(super) const INDEX: u16 = 1;
pub(super) const SIZE_BYTES: u16 = 2;
pub(super) const BLOCK_SIZE_BYTES: u16 = 3;
pub(super) const TIMEOUT_SECONDS: u16 = 4;
pub(super) const SERVER_FLAGS: u16 = 5;
pub(super) const SOCKETS: u16 = 7;
pub(super) const DEAD_CONNECTION_SECONDS: u16 = 8;
pub(super) const BACKEND_IDENTIFIER: u16 = 10;
/// Inside [`SOCKETS`], and inside each of those.
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;

const HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
const REQUEST: u16 = 1;
const ACKNOWLEDGE: u16 = 4;
const KIND_ERROR: u16 = 2;
const KIND_FIRST_FAMILY: u16 = 16;
/// Of an attribute's kind, the bits that say what is inside.
const KIND_FLAGS: u16 = 0xC000;

/// Attributes on their way to the kernel.
#[derive(Debug, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).expect("a short one");
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn text(self, kind: u16, text: &str) -> Self {
        self.bytes(kind, &[text.as_bytes(), &[0]].concat())
    }

    pub(super) fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(super) fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// The sockets by which a device is served.
    pub(super) fn sockets(self, sockets: impl Iterator<Item = RawFd>) -> Self {
        let items = sockets.fold(Attributes::default(), |items, fd| {
            let socket = Attributes::default().bytes(SOCKET_FD, &fd.to_ne_bytes());
            items.bytes(SOCKET_ITEM, &socket.0)
        });
        self.bytes(SOCKETS, &items.0)
    }
}

/// A request that wants to hear that it was done.
pub(super) fn request(family: u16, command: u8, sequence: u32, attributes: Attributes) -> Vec<u8> {
    let length = (HEADER_BYTES + GENERIC_HEADER_BYTES + attributes.0.len()) as u32;
    let (version, reserved) = (1, [0; 2]);
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(family.to_ne_bytes());
    bytes.extend((REQUEST | ACKNOWLEDGE).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]); // whose answer it is: the kernel knows by the socket
    bytes.extend([command, version]);
    bytes.extend(reserved);
    bytes.extend(attributes.0);
    bytes
}

/// What the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message<'a> {
    /// It is over: done, or the errno.
    End { sequence: u32, errno: i32 },
    /// Attributes.
    Answer { sequence: u32, attributes: &'a [u8] },
    /// Something else.
    Other,
}

/// The messages of one datagram.
pub(super) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32_at(bytes, 0)?).ok()?;
        let message = bytes.get(..length).filter(|it| it.len() >= HEADER_BYTES)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        let (kind, sequence) = (u16_at(message, 4)?, u32_at(message, 8)?);
        let body = &message[HEADER_BYTES..];
        Some(match (kind, u32_at(body, 0)) {
            (KIND_ERROR, Some(code)) => {
                Message::End { sequence, errno: code.cast_signed().wrapping_neg() }
            }
            (KIND_FIRST_FAMILY.., Some(_)) => {
                Message::Answer { sequence, attributes: &body[GENERIC_HEADER_BYTES..] }
            }
            _ => Message::Other,
        })
    })
}

/// The value of the first attribute of a kind.
pub(super) fn value(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16_at(attributes, 0)?);
        let kind = u16_at(attributes, 2)? & !KIND_FLAGS;
        let value = attributes.get(ATTRIBUTE_HEADER_BYTES..length)?;
        if kind == wanted {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_what_the_kernel_reads() {
        let attributes = Attributes::default().u32(INDEX, 3).sockets([7, 9].into_iter());
        let attributes = attributes.text(BACKEND_IDENTIFIER, "a");
        let bytes = request(0x21, RECONFIGURE, 5, attributes);
        #[rustfmt::skip]
        let expected = [
            64, 0, 0, 0, 0x21, 0, 5, 0, 5, 0, 0, 0, 0, 0, 0, 0, // length, family, flags, sequence
            3, 1, 0, 0, // command, version
            8, 0, 1, 0, 3, 0, 0, 0, // index
            28, 0, 7, 0, 12, 0, 1, 0, 8, 0, 1, 0, 7, 0, 0, 0, // sockets: item: number
            12, 0, 1, 0, 8, 0, 1, 0, 9, 0, 0, 0,
            6, 0, 10, 0, b'a', 0, 0, 0, // identifier, padded
        ];
        assert_eq!(bytes, expected);
    }

    fn answer(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let length = (HEADER_BYTES + body.len()) as u32;
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 2]);
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn an_answer_its_attributes_and_its_end_are_found() {
        let attributes = Attributes::default().text(FAMILY_NAME, "nbd").bytes(FAMILY_ID, &[9, 1]);
        let mut bytes = answer(16, 4, &[&[1, 2, 0, 0], &attributes.0[..]].concat());
        bytes.extend(answer(2, 4, &(-17i32).to_ne_bytes()));
        bytes.extend(answer(3, 4, &[]));
        let found: Vec<Message<'_>> = messages(&bytes).collect();
        let Message::Answer { sequence: 4, attributes } = found[0] else { panic!("{found:?}") };
        assert_eq!(value(attributes, FAMILY_ID).and_then(|it| u16_at(it, 0)), Some(0x109));
        assert_eq!(value(attributes, 77), None);
        assert_eq!(found[1..], [Message::End { sequence: 4, errno: 17 }, Message::Other]);
    }

    #[test]
    fn any_bytes_come_to_an_end() {
        let attributes = Attributes::default().text(FAMILY_NAME, "nbd").u32(INDEX, 3);
        let mut good = answer(30, 4, &[&[1, 2, 0, 0], &attributes.0[..]].concat());
        good.extend(answer(2, 4, &[0; 20]));
        for cut in 0..good.len() {
            let count = messages(&good[..cut]).count();
            assert!(count < 2, "{cut}: {count}");
        }
        let mut state = 4711u64;
        for _ in 0..200_000 {
            let mut bytes = good.clone();
            for _ in 0..3 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 40) as usize % bytes.len();
                bytes[at] = (state >> 32) as u8;
            }
            for message in messages(&bytes).take(bytes.len()) {
                if let Message::Answer { attributes, .. } = message {
                    let _ = value(attributes, INDEX);
                }
            }
        }
    }
}
