// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bodies for fuzzing: any bytes in, and a panic only where a promise was broken.
//!
//! The first bytes choose how the rest is cut into pieces and what is served, so the same input
//! always does the same.

use crate::carried::{Record, check_file, record_header};
use std::io::{self, Read, Write};

use super::carried::Carried;
use super::client::{Client, ClientError, Connect, Entry};
use super::device::carried::CarriedDevice;
use super::error::NbdError;
use super::export::{Agreed, Export, Features, LogicalBlock, Session};
use super::handshake::{self, Handshake, Step};
use super::reply::{
    ByteRange, REPLY_HEAD_BYTES_MAX, ReplyHead, STATUS_REPLY_BYTES_MAX, StatusExtent, StatusReply,
};
use super::transmission::{Command, Decoded, Kind, WRITE_SKIP_BYTES_MAX, decode};
use super::wire::{RequestHeader, TRANSFER_BYTES_MAX};
use crate::bytes::Reader;

/// A client that says anything to the handshake: it ends the same way however the bytes are cut
/// up (H1), and each call is bounded in what it writes (H2).
pub fn fuzz_handshake(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let choice = reader.u64().unwrap_or_default();
    let mut cuts = choice.to_be_bytes().into_iter().cycle();
    let exports = exports();

    let whole = converse(reader.rest(), &exports, || usize::MAX);
    let pieces =
        converse(reader.rest(), &exports, || 1 + usize::from(cuts.next().unwrap_or(0) % 40));
    assert_eq!(whole, pieces);
}

/// A client that says anything after the handshake: what comes through keeps T1 to T4, and every
/// reply fits the room it is promised to need.
pub fn fuzz_transmission(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let choice = reader.u64().unwrap_or_default();
    let session = session(choice);
    let mut out = Vec::with_capacity(STATUS_REPLY_BYTES_MAX);
    let mut rest = reader.rest();
    // Each turn takes a header, so the input bounds the loop.
    loop {
        let skip = match decode(&session, rest) {
            Decoded::NeedMore => {
                assert!(rest.len() < RequestHeader::BYTES);
                return;
            }
            Decoded::Close(_) => return,
            Decoded::Refuse { cookie, error, form, skip_bytes } => {
                assert!(skip_bytes <= WRITE_SKIP_BYTES_MAX);
                let head = ReplyHead::failure(form, cookie, error);
                assert!(head.as_bytes().len() <= REPLY_HEAD_BYTES_MAX);
                skip_bytes
            }
            Decoded::Command(command) => {
                check_command(&session, &command);
                answer(&session, &command, choice, &mut out);
                command.payload_bytes()
            }
        };
        for cut in 0..RequestHeader::BYTES {
            // The magic may be wrong before the header is whole, but here it was right.
            assert_eq!(decode(&session, rest.get(..cut).unwrap_or_default()), Decoded::NeedMore);
        }
        let taken = RequestHeader::BYTES + skip as usize;
        rest = rest.get(taken..).unwrap_or_default();
    }
}

/// Any bytes for a connection that the program before left: what can be taken is put down in the same bytes, and goes on
/// with what is served or not at all (C3, C4).
pub fn fuzz_carried(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let choice = reader.u64().unwrap_or_default();
    let record = reader.rest();
    let _ = (check_file::<Carried>(record), record_header::<Carried>(record));
    if let Ok(device) = CarriedDevice::decode(record) {
        assert_eq!(device.encode(), record);
    }
    let Ok(carried) = Carried::decode(record) else { return };
    assert_eq!(carried.encode(), record);
    let [export, other] = exports();
    let export = if choice & 1 == 0 { export } else { other };
    let Ok(session) = carried.session(0, &export) else { return };
    assert_eq!(session.transmission_flags(), carried.flags);
    assert!(session.size_bytes <= export.size_bytes);
    if let Some(write) = carried.long_write
        && let Ok(command) = write.command(&session)
    {
        check_command(&session, &command);
        assert!(write.submitted < command.length);
    }
}

/// A server that says anything to our client: the client ends, and holds no more than it asked
/// for.
pub fn fuzz_client(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    let choice = reader.u64().unwrap_or_default();
    let wanted = Connect {
        export: "a",
        entry: if choice & 1 == 0 { Entry::Go } else { Entry::ExportName },
        structured_replies: choice & 2 == 0,
        base_allocation: choice & 4 == 0,
        no_zeroes: choice & 8 == 0,
    };
    if choice & 16 != 0 {
        let _ = Client::list(Canned { input: reader.rest() });
        return;
    }
    let _ = client_session(Canned { input: reader.rest() }, &wanted);
}

fn client_session(stream: Canned<'_>, wanted: &Connect<'_>) -> Result<(), ClientError> {
    let mut client = Client::connect(stream, wanted)?;
    let range = ByteRange { offset: 4096, length: 8192 };
    client.send_read(range, false)?;
    client.send_block_status(range, false)?;
    client.send_flush()?;
    client.send_read(range, true)?;
    for _ in 0..4 {
        let reply = client.receive()?;
        assert!(reply.data.len() <= range.length as usize);
    }
    assert_eq!(client.in_flight_count(), 0);
    Ok(())
}

/// Everything a handshake says to `input` when it comes in pieces of the given lengths.
fn converse(
    input: &[u8],
    exports: &[Export],
    mut piece: impl FnMut() -> usize,
) -> (Vec<u8>, usize, Step) {
    let mut handshake = Handshake::new();
    let mut out = Vec::new();
    let (mut consumed, mut received) = (0usize, 0usize);
    loop {
        let before = out.len();
        let seen = input.get(consumed..received).unwrap_or_default();
        let (count, step) = handshake.advance(seen, exports, &mut out);
        let list_bytes = 64 * exports.len();
        assert!(out.len() - before <= handshake::OUTPUT_PAUSE_BYTES + list_bytes + 1024);
        consumed += count;
        assert!(consumed <= received);
        if step != Step::NeedMore || (count == 0 && received == input.len()) {
            return (out, consumed, step);
        }
        if count == 0 {
            received = received.saturating_add(piece()).min(input.len());
        }
    }
}

fn check_command(session: &Session, command: &Command) {
    let block = u64::from(session.logical_block.bytes());
    let length = u64::from(command.length);
    match command.kind {
        Kind::Flush | Kind::Disconnect => assert_eq!((command.offset, length), (0, 0)),
        _ => {
            assert!(length > 0);
            assert!(command.offset + length <= session.size_bytes);
            assert!(command.offset.is_multiple_of(block) && length.is_multiple_of(block));
        }
    }
    let features = session.features;
    match command.kind {
        Kind::Read { df } => {
            assert!(command.length <= TRANSFER_BYTES_MAX);
            assert!(!df || features.df);
        }
        Kind::Write { fua } => {
            assert!(command.length <= TRANSFER_BYTES_MAX);
            assert!(!session.read_only && (!fua || features.fua));
        }
        Kind::Flush => assert!(features.flush),
        Kind::Trim { fua } => assert!(features.trim && (!fua || features.fua)),
        Kind::WriteZeroes { fua, fast_zero, .. } => {
            assert!(features.write_zeroes && (!fua || features.fua));
            assert!(!fast_zero || features.fast_zero);
        }
        Kind::BlockStatus { .. } => assert!(session.base_allocation),
        Kind::Cache => assert!(features.cache),
        Kind::Disconnect => {}
    }
}

fn answer(session: &Session, command: &Command, choice: u64, out: &mut Vec<u8>) {
    let cookie = command.cookie;
    let text = "a text that is as long as anyone would make it, and then a little longer: ööö";
    let heads = [
        ReplyHead::read(session, command),
        ReplyHead::done(cookie),
        ReplyHead::error_offset(cookie, false, NbdError::Io, text, command.offset),
        ReplyHead::failure(command.reply_form(session), cookie, NbdError::Io),
    ];
    assert!(heads.iter().all(|head| head.as_bytes().len() <= REPLY_HEAD_BYTES_MAX));

    if !matches!(command.kind, Kind::BlockStatus { .. }) {
        return;
    }
    out.clear();
    let mut reply = StatusReply::start(command, out);
    for at in 0..2000 {
        let bits = (choice ^ cookie).rotate_left(at);
        let extent = StatusExtent { length: bits as u32 & 0x3fff, flags: (bits >> 32) as u32 & 3 };
        if !reply.push(extent) {
            break;
        }
    }
    reply.finish();
    assert!(out.len() <= STATUS_REPLY_BYTES_MAX);
}

fn exports() -> [Export; 2] {
    let export = Export {
        name: "a".to_owned(),
        size_bytes: 1 << 30,
        logical_block: LogicalBlock::Bytes512,
        read_only: false,
        description: "the first".to_owned(),
        features: Features::ALL,
    };
    let other = Export {
        name: "bb".to_owned(),
        logical_block: LogicalBlock::Bytes4096,
        read_only: true,
        description: String::new(),
        features: Features::NONE,
        ..export.clone()
    };
    [export, other]
}

fn session(choice: u64) -> Session {
    let bit = |index: u32| choice >> index & 1 != 0;
    let export = Export {
        name: "a".to_owned(),
        size_bytes: if bit(0) { 1 << 20 } else { u64::MAX },
        logical_block: if bit(1) { LogicalBlock::Bytes512 } else { LogicalBlock::Bytes4096 },
        read_only: bit(2) && bit(3),
        description: String::new(),
        features: Features {
            flush: !bit(4),
            fua: !bit(5),
            trim: !bit(6),
            write_zeroes: !bit(7),
            fast_zero: !bit(8),
            cache: !bit(9),
            df: !bit(10),
            multi_conn: !bit(11),
        },
    };
    let agreed =
        Agreed { structured_replies: !bit(12), base_allocation: !bit(13), no_zeroes: !bit(14) };
    Session::new(0, &export, agreed)
}

/// A peer whose every word is known beforehand, and who does not listen.
struct Canned<'a> {
    input: &'a [u8],
}

impl Read for Canned<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.input.read(target)
    }
}

impl Write for Canned<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::carried::{LongWrite, Piece};
    use super::super::wire::{
        ChunkHeader, OptionHeader, OptionReplyHeader, SimpleReplyHeader, chunk, command, option,
        option_reply,
    };
    use super::*;
    use forebay_testing::Random;

    const ROUNDS: u64 = 4000;

    fn option_bytes(option: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = OptionHeader { option, length: content.len() as u32 }.encode().to_vec();
        bytes.extend(content);
        bytes
    }

    fn valid_handshake(random: &mut Random) -> Vec<u8> {
        let mut bytes = (random.below(4) as u32).to_be_bytes().to_vec();
        let context = b"\0\0\0\x01a\0\0\0\x01\0\0\0\x0fbase:allocation";
        for _ in 0..random.below(70) {
            bytes.extend(match random.below(8) {
                0 => option_bytes(option::LIST, b""),
                1 => option_bytes(option::STRUCTURED_REPLY, b""),
                2 => option_bytes(option::LIST_META_CONTEXT, context),
                3 => option_bytes(option::SET_META_CONTEXT, context),
                4 => option_bytes(option::STARTTLS, b""),
                5 => option_bytes(option::INFO, b"\0\0\0\x02bb\0\x02\0\x03\0\x01"),
                6 => option_bytes(99, &vec![7; random.below(70_000) as usize]),
                _ => option_bytes(option::INFO, b"\0\0\0\0\0\0"),
            });
        }
        bytes.extend(match random.below(3) {
            0 => option_bytes(option::GO, b"\0\0\0\x01a\0\0"),
            1 => option_bytes(option::EXPORT_NAME, b"bb"),
            _ => option_bytes(option::ABORT, b""),
        });
        bytes
    }

    fn valid_transmission(random: &mut Random) -> Vec<u8> {
        let mut bytes = Vec::new();
        for cookie in 0..20 {
            let command = random.below(9) as u16;
            let length = random.below(8) as u32 * 512;
            let flags = if random.below(2) == 0 { 0 } else { random.below(32) as u16 };
            let offset = random.below(1 << 12) * 512;
            let header = RequestHeader { flags, command, cookie, offset, length };
            bytes.extend(header.encode());
            if command == command::WRITE {
                bytes.resize(bytes.len() + length as usize, 0x5a);
            }
        }
        bytes
    }

    fn valid_server(choice: u64) -> Vec<u8> {
        let mut bytes = Handshake::greeting().to_vec();
        let mut reply = |option, reply, content: &[u8]| {
            let length = content.len() as u32;
            bytes.extend(OptionReplyHeader { option, reply, length }.encode());
            bytes.extend(content);
        };
        if choice & 16 != 0 {
            reply(option::LIST, option_reply::SERVER, b"\0\0\0\x01atext");
            reply(option::LIST, option_reply::ACK, b"");
            reply(option::ABORT, option_reply::ACK, b"");
            return bytes;
        }
        if choice & 2 == 0 {
            reply(option::STRUCTURED_REPLY, option_reply::ACK, b"");
            if choice & 4 == 0 {
                let context = b"\0\0\0\x01base:allocation";
                reply(option::SET_META_CONTEXT, option_reply::META_CONTEXT, context);
                reply(option::SET_META_CONTEXT, option_reply::ACK, b"");
            }
        }
        if choice & 1 == 0 {
            reply(option::GO, option_reply::INFO, &[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]);
            reply(option::GO, option_reply::ACK, b"");
        } else {
            bytes.extend([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]);
            bytes.extend(vec![0; if choice & 8 == 0 { 0 } else { 124 }]);
        }
        if choice & 2 == 0 {
            let mut chunk = |cookie, flags, kind, content: &[u8]| {
                let length = content.len() as u32;
                bytes.extend(ChunkHeader { flags, kind, cookie, length }.encode());
                bytes.extend(content);
            };
            chunk(1, 0, chunk::OFFSET_HOLE, &[0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0x10, 0]);
            chunk(2, 1, chunk::BLOCK_STATUS, &[0, 0, 0, 1, 0, 0, 0x20, 0, 0, 0, 0, 3]);
            let mut data = vec![0, 0, 0, 0, 0, 0, 0x10, 0];
            data.resize(8 + 4096, 1);
            chunk(1, 0, chunk::OFFSET_DATA, &data);
            chunk(1, 1, chunk::NONE, b"");
            chunk(4, 1, chunk::ERROR, &[0, 0, 0, 5, 0, 1, b'x']);
        } else {
            bytes.extend(SimpleReplyHeader { error: 0, cookie: 1 }.encode());
            bytes.resize(bytes.len() + 8192, 1);
            bytes.extend(SimpleReplyHeader { error: 22, cookie: 2 }.encode());
            bytes.extend(SimpleReplyHeader { error: 5, cookie: 4 }.encode());
        }
        bytes.extend(SimpleReplyHeader { error: 0, cookie: 3 }.encode());
        bytes
    }

    /// A few bytes changed, cut out or doubled.
    fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
        for _ in 0..random.below(5) {
            if bytes.is_empty() {
                return;
            }
            // Near the start as often as anywhere: that is where the lengths are.
            let bound = if random.below(2) == 0 { bytes.len().min(64) } else { bytes.len() };
            let at = random.below(bound as u64) as usize;
            match random.below(4) {
                0 => bytes[at] = random.next() as u8,
                1 => bytes[at] ^= 1 << random.below(8),
                2 => bytes.truncate(at),
                _ => {
                    let tail = bytes[at..].to_vec();
                    bytes.extend(tail);
                }
            }
        }
    }

    fn with_choice(choice: u64, bytes: &[u8]) -> Vec<u8> {
        [&choice.to_be_bytes(), bytes].concat()
    }

    #[test]
    fn any_bytes_leave_the_handshake_standing() {
        let mut random = Random(1);
        for _ in 0..ROUNDS / 4 {
            let mut bytes = valid_handshake(&mut random);
            mutate(&mut bytes, &mut random);
            fuzz_handshake(&with_choice(random.next(), &bytes));
        }
    }

    #[test]
    fn any_bytes_leave_the_transmission_standing() {
        let mut random = Random(2);
        for _ in 0..ROUNDS {
            let mut bytes = valid_transmission(&mut random);
            mutate(&mut bytes, &mut random);
            fuzz_transmission(&with_choice(random.next(), &bytes));
        }
    }

    #[test]
    fn any_bytes_leave_the_client_standing() {
        let mut random = Random(3);
        for _ in 0..ROUNDS {
            let choice = random.next();
            let mut bytes = valid_server(choice);
            mutate(&mut bytes, &mut random);
            fuzz_client(&with_choice(choice, &bytes));
        }
    }

    #[test]
    fn the_valid_server_is_valid() {
        for choice in 0..16 {
            let wanted = Connect {
                export: "a",
                entry: if choice & 1 == 0 { Entry::Go } else { Entry::ExportName },
                structured_replies: choice & 2 == 0,
                base_allocation: choice & 4 == 0,
                no_zeroes: choice & 8 == 0,
            };
            let bytes = valid_server(choice);
            let ended = client_session(Canned { input: &bytes }, &wanted);
            // Without a context the block status chunk has nothing to belong to.
            assert_eq!(ended.is_ok(), choice & 6 != 4, "{choice}: {ended:?}");
        }
        let listed = Client::list(Canned { input: &valid_server(16) });
        assert_eq!(listed.unwrap().len(), 1);
    }

    #[test]
    fn pure_noise_is_survived_too() {
        let mut random = Random(4);
        for _ in 0..ROUNDS {
            let length = random.below(300);
            let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
            fuzz_handshake(&bytes);
            fuzz_transmission(&bytes);
            fuzz_client(&bytes);
            fuzz_carried(&bytes);
        }
    }

    /// A connection in the middle of what its session allows.
    fn valid_carried(choice: u64, random: &mut Random) -> Carried {
        let [export, other] = exports();
        let export = if choice & 1 == 0 { export } else { other };
        let structured_replies = random.below(2) == 0;
        let base_allocation = structured_replies && random.below(2) == 0;
        let agreed = Agreed { structured_replies, base_allocation, no_zeroes: true };
        let session = Session::new(0, &export, agreed);
        let mut some = |most: u64| vec![random.below(256) as u8; random.below(most) as usize];
        let (input, piece) = (some(100), [vec![1], some(50)].concat());
        let pieces = (0..random.below(4)).map(|at| match random.below(2) {
            0 => Piece::Bytes(piece.clone()),
            _ => Piece::Aside { at: at << 12, length: 4096 },
        });
        let output = pieces.collect();
        let long = random.below(2) == 0;
        let long_write = LongWrite {
            cookie: random.next(),
            fua: random.below(2) == 0,
            offset: random.below(1 << 10) << 12,
            length: (random.below(40) as u32) << 20,
            submitted: (random.below(20) as u32) << 18,
            error: random.below(2) as u32 * 5,
        };
        Carried {
            volume: [random.next() as u8; 16],
            export_name: export.name,
            size_bytes: session.size_bytes,
            logical_block: session.logical_block,
            flags: session.transmission_flags(),
            agreed,
            is_closing: random.below(4) == 0,
            is_over: random.below(4) == 0,
            skip_bytes: if long { 0 } else { random.below(1 << 20) as u32 },
            long_write: long.then_some(long_write),
            input,
            output,
        }
    }

    #[test]
    fn any_bytes_leave_what_is_carried_standing() {
        let mut random = Random(5);
        let mut taken = 0;
        for _ in 0..ROUNDS {
            let choice = random.next();
            let carried = valid_carried(choice, &mut random);
            let mut bytes = carried.encode();
            assert_eq!(Carried::decode(&bytes).unwrap(), carried);
            let whole = with_choice(choice, &bytes);
            fuzz_carried(&whole);
            mutate(&mut bytes, &mut random);
            taken += usize::from(Carried::decode(&bytes).is_ok());
            fuzz_carried(&with_choice(choice, &bytes));
        }
        assert!(taken > 0, "some of what is changed is taken");
    }
}
