// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::super::export::{Features, LogicalBlock};
use super::*;

fn exports() -> Vec<Export> {
    let disk = Export {
        name: "disk".to_owned(),
        size_bytes: 0x0001_0203_0000,
        logical_block: LogicalBlock::Bytes4096,
        read_only: false,
        description: "d!".to_owned(),
        features: Features { fast_zero: false, ..Features::ALL },
    };
    let other = Export {
        name: "ro".to_owned(),
        size_bytes: 0x1000,
        logical_block: LogicalBlock::Bytes512,
        read_only: true,
        description: String::new(),
        features: Features::NONE,
    };
    vec![disk, other]
}

/// Everything said to `input` in one piece; and that it is the same for every way of cutting it
/// in two, and byte by byte (H1).
fn converse(input: &[u8]) -> (Vec<u8>, usize, Step) {
    let whole = converse_in(&[input]);
    for at in 1..input.len() {
        let (front, back) = input.split_at(at);
        assert_eq!(converse_in(&[front, back]), whole, "cut at {at}");
    }
    let bytes: Vec<&[u8]> = input.chunks(1).collect();
    assert_eq!(converse_in(&bytes), whole);
    whole
}

fn converse_in(pieces: &[&[u8]]) -> (Vec<u8>, usize, Step) {
    let mut handshake = Handshake::new();
    let (mut out, mut held, mut consumed) = (Vec::new(), Vec::new(), 0);
    for piece in pieces {
        held.extend_from_slice(piece);
        loop {
            let (count, step) = handshake.advance(&held[consumed..], &exports(), &mut out);
            consumed += count;
            if step != Step::NeedMore {
                return (out, consumed, step);
            }
            if count == 0 {
                break;
            }
        }
    }
    (out, consumed, Step::NeedMore)
}

fn bytes(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

/// Client flags: fixed newstyle, no zeros.
const FLAGS: &[u8] = &[0, 0, 0, 3];
const REPLY: &[u8] = &[0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9];
const STRUCTURED: &[u8] = b"IHAVEOPT\x00\x00\x00\x08\x00\x00\x00\x00";
const STRUCTURED_ACK: &[u8] =
    b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00";
/// For `disk`, of which it sets or lists `base:allocation`.
const CONTEXT: &[u8] = b"\x00\x00\x00\x04disk\x00\x00\x00\x01\x00\x00\x00\x0fbase:allocation";

fn session_of(step: Step) -> Session {
    match step {
        Step::Transmit(session) => session,
        other => panic!("{other:?}"),
    }
}

/// The replies to one option, sent after flags and structured replies.
fn replies(option: u8, content: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let length = (content.len() as u32).to_be_bytes();
    let header = [b"IHAVEOPT", &[0, 0, 0, option][..], &length].concat();
    let (out, _, step) = converse(&bytes(&[FLAGS, STRUCTURED, &header, content]));
    assert_eq!(step, Step::NeedMore);
    let mut rest = out.strip_prefix(STRUCTURED_ACK).unwrap();
    let mut replies = Vec::new();
    while !rest.is_empty() {
        let header = OptionReplyHeader::decode(rest).unwrap().unwrap();
        assert_eq!(header.option, u32::from(option));
        let end = 20 + header.length as usize;
        replies.push((header.reply, rest[20..end].to_vec()));
        rest = &rest[end..];
    }
    replies
}

/// The one reply to an option that is refused.
fn refusal(option: u8, content: &[u8]) -> u32 {
    let replies = replies(option, content);
    assert_eq!(replies.len(), 1);
    replies[0].0
}

#[test]
fn the_greeting_is_the_protocols() {
    assert_eq!(&Handshake::greeting(), b"NBDMAGICIHAVEOPT\x00\x03");
}

#[test]
fn go_describes_the_export_and_begins() {
    let input = bytes(&[
        FLAGS,
        b"IHAVEOPT\x00\x00\x00\x07\x00\x00\x00\x10",
        b"\x00\x00\x00\x04disk\x00\x03\x00\x01\x00\x02\x00\x03",
        b"the rest",
    ]);
    let expected = bytes(&[
        // Size and flags: has flags, flush, FUA, trim, zeroes, multi-conn, cache; no DF, since
        // structured replies were not agreed on.
        REPLY,
        b"\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x0c",
        b"\x00\x00\x00\x00\x00\x01\x02\x03\x00\x00\x05\x6d",
        // Block sizes: 4096, 4096, 32 MiB.
        REPLY,
        b"\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x0e",
        b"\x00\x03\x00\x00\x10\x00\x00\x00\x10\x00\x02\x00\x00\x00",
        REPLY,
        b"\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x06\x00\x01disk",
        REPLY,
        b"\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x04\x00\x02d!",
        REPLY,
        b"\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x00",
    ]);
    let (out, consumed, step) = converse(&input);
    assert_eq!(out, expected);
    assert_eq!(&input[consumed..], b"the rest");
    let session = session_of(step);
    assert_eq!((session.export_index, session.export_name.as_str()), (0, "disk"));
    assert!(!session.structured_replies && !session.base_allocation);
}

#[test]
fn info_describes_and_does_not_begin() {
    let input =
        bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x06\x00\x00\x00\x08", b"\x00\x00\x00\x02ro\x00\x00"]);
    let expected = bytes(&[
        REPLY,
        b"\x00\x00\x00\x06\x00\x00\x00\x03\x00\x00\x00\x0c",
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00\x00\x03",
        REPLY,
        b"\x00\x00\x00\x06\x00\x00\x00\x03\x00\x00\x00\x0e",
        b"\x00\x03\x00\x00\x02\x00\x00\x00\x10\x00\x02\x00\x00\x00",
        REPLY,
        b"\x00\x00\x00\x06\x00\x00\x00\x01\x00\x00\x00\x00",
    ]);
    assert_eq!(converse(&input), (expected, input.len(), Step::NeedMore));
}

#[test]
fn list_names_every_export() {
    let input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x03\x00\x00\x00\x00"]);
    let expected = bytes(&[
        REPLY,
        b"\x00\x00\x00\x03\x00\x00\x00\x02\x00\x00\x00\x0a\x00\x00\x00\x04diskd!",
        REPLY,
        b"\x00\x00\x00\x03\x00\x00\x00\x02\x00\x00\x00\x06\x00\x00\x00\x02ro",
        REPLY,
        b"\x00\x00\x00\x03\x00\x00\x00\x01\x00\x00\x00\x00",
    ]);
    assert_eq!(converse(&input), (expected, input.len(), Step::NeedMore));
}

#[test]
fn export_name_answers_with_zeros_unless_they_are_not_wanted() {
    let option = b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x04disk";
    let answer = b"\x00\x00\x00\x01\x02\x03\x00\x00\x05\x6d";

    let (out, _, step) = converse(&bytes(&[FLAGS, option]));
    assert_eq!(out, answer);
    assert!(session_of(step).no_zeroes);

    let (out, _, step) = converse(&bytes(&[b"\x00\x00\x00\x01", option]));
    assert_eq!(out, bytes(&[answer, &[0; 124]]));
    assert!(!session_of(step).no_zeroes);

    // Without the fixed newstyle this option still works.
    let (out, _, step) = converse(&bytes(&[b"\x00\x00\x00\x00", option]));
    assert_eq!(out.len(), 134);
    session_of(step);
}

#[test]
fn the_empty_name_is_the_only_export_and_is_refused_where_there_are_several() {
    let old_style = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x00"]);
    let only = &exports()[1..];
    let (_, step) = Handshake::new().advance(&old_style, only, &mut Vec::new());
    assert_eq!(session_of(step).export_name, "ro");
    let (_, _, step) = converse(&old_style);
    assert_eq!(step, Step::Close(CloseReason::UnknownExport));

    let text = b"there are several exports, so name one: disk, ro".to_vec();
    let unknown = (option_reply::ERR_UNKNOWN, text);
    for (option, content) in [(6, &[0; 6][..]), (7, &[0; 6]), (9, &[0; 8]), (10, &[0; 8])] {
        assert_eq!(replies(option, content), std::slice::from_ref(&unknown), "option {option}");
    }
}

#[test]
fn structured_replies_bring_df_and_contexts() {
    let input = bytes(&[
        FLAGS,
        STRUCTURED,
        b"IHAVEOPT\x00\x00\x00\x0a\x00\x00\x00\x1f",
        CONTEXT,
        b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x04disk",
    ]);
    let expected = bytes(&[
        STRUCTURED_ACK,
        REPLY,
        b"\x00\x00\x00\x0a\x00\x00\x00\x04\x00\x00\x00\x13\x00\x00\x00\x01base:allocation",
        REPLY,
        b"\x00\x00\x00\x0a\x00\x00\x00\x01\x00\x00\x00\x00",
        b"\x00\x00\x00\x01\x02\x03\x00\x00\x05\xed",
    ]);
    let (out, _, step) = converse(&input);
    assert_eq!(out, expected);
    let session = session_of(step);
    assert!(session.structured_replies && session.base_allocation && session.features.df);
}

#[test]
fn a_context_holds_for_its_export_and_until_the_next_attempt() {
    let set = bytes(&[b"IHAVEOPT\x00\x00\x00\x0a\x00\x00\x00\x1f", CONTEXT]);
    let begin = |name: &[u8]| {
        let header = b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00";
        bytes(&[header, &[name.len() as u8], name])
    };
    let base_allocation = |middle: &[u8], name| {
        let input = bytes(&[FLAGS, STRUCTURED, &set, middle, &begin(name)]);
        session_of(converse(&input).2).base_allocation
    };
    assert!(base_allocation(b"", b"disk"));
    assert!(!base_allocation(b"", b"ro")); // H3
    let none = b"IHAVEOPT\x00\x00\x00\x0a\x00\x00\x00\x0c\x00\x00\x00\x04disk\x00\x00\x00\x00";
    assert!(!base_allocation(none, b"disk"));
    let malformed = b"IHAVEOPT\x00\x00\x00\x0a\x00\x00\x00\x00";
    assert!(!base_allocation(malformed, b"disk"));
}

#[test]
fn contexts_are_found_by_query() {
    let ask = |option, queries: &[&str]| {
        let mut content = b"\x00\x00\x00\x04disk".to_vec();
        content.extend((queries.len() as u32).to_be_bytes());
        for query in queries {
            content.extend((query.len() as u32).to_be_bytes());
            content.extend(query.as_bytes());
        }
        let replies = replies(option, &content);
        assert_eq!(replies.last(), Some(&(option_reply::ACK, Vec::new())));
        replies.len() - 1
    };
    let (list, set) = (9, 10);
    assert_eq!(ask(list, &[]), 1);
    assert_eq!(ask(list, &["base:"]), 1);
    assert_eq!(ask(list, &["base:allocation"]), 1);
    assert_eq!(ask(list, &["qemu:dirty-bitmap:", "other:thing"]), 0);
    assert_eq!(ask(set, &[]), 0);
    assert_eq!(ask(set, &["base:"]), 0);
    assert_eq!(ask(set, &["x:y", "base:allocation", "base:allocation"]), 1);
}

#[test]
fn malformed_options_are_refused_and_the_handshake_goes_on() {
    let invalid = option_reply::ERR_INVALID;
    assert_eq!(refusal(3, b"x"), invalid);
    assert_eq!(refusal(8, b"x"), invalid);
    for option in [6, 7] {
        for content in [
            &b""[..],
            b"\x00\x00\x00",
            b"\x00\x00\x00\x04dis",
            b"\x00\x00\x00\x04disk",
            b"\x00\x00\x00\x04disk\x00",
            b"\x00\x00\x00\x04disk\x00\x01",
            b"\x00\x00\x00\x04disk\x00\x01\x00",
            b"\x00\x00\x00\x04disk\x00\x00\x00\x03",
            b"\xff\xff\xff\xffdisk\x00\x00",
        ] {
            assert_eq!(refusal(option, content), invalid, "{content:?}");
        }
        assert_eq!(refusal(option, b"\x00\x00\x00\x04risk\x00\x00"), option_reply::ERR_UNKNOWN);
    }
    for option in [9, 10] {
        for cut in 0..CONTEXT.len() {
            assert_eq!(refusal(option, &CONTEXT[..cut]), invalid);
        }
        assert_eq!(refusal(option, &bytes(&[CONTEXT, b"x"])), invalid);
        let many = b"\x00\x00\x00\x04disk\xff\xff\xff\xff\x00\x00\x00\x00";
        assert_eq!(refusal(option, many), invalid);
        let unknown = b"\x00\x00\x00\x04risk\x00\x00\x00\x00";
        assert_eq!(refusal(option, unknown), option_reply::ERR_UNKNOWN);
    }
    for option in [0, 4, 5, 11, 255] {
        assert_eq!(refusal(option, b"whatever"), option_reply::ERR_UNSUP);
    }
}

#[test]
fn a_name_longer_than_the_protocol_allows_is_invalid() {
    let mut content = 4097u32.to_be_bytes().to_vec();
    content.extend([b'x'; 4097]);
    content.extend([0, 0]);
    let mut input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x06"]);
    input.extend((content.len() as u32).to_be_bytes());
    input.extend(content);
    let (out, _, _) = converse_in(&[&input]);
    let header = OptionReplyHeader::decode(&out).unwrap().unwrap();
    assert_eq!(header.reply, option_reply::ERR_INVALID);
}

#[test]
fn contexts_need_structured_replies_first() {
    let input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x0a\x00\x00\x00\x1f", CONTEXT]);
    let (out, _, step) = converse(&input);
    let header = OptionReplyHeader::decode(&out).unwrap().unwrap();
    assert_eq!((header.reply, step), (option_reply::ERR_INVALID, Step::NeedMore));
}

#[test]
fn a_long_option_is_skipped_and_a_very_long_one_ends_it() {
    let long = OPTION_BYTES_MAX + 1;
    let mut input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x06", &long.to_be_bytes()]);
    input.resize(input.len() + long as usize, b'I');
    input.extend(b"IHAVEOPT\x00\x00\x00\x02\x00\x00\x00\x00");
    let whole = converse_in(&[&input]);
    let pieces: Vec<&[u8]> = input.chunks(1000).collect();
    assert_eq!(converse_in(&pieces), whole);
    let (out, consumed, step) = whole;
    let header = OptionReplyHeader::decode(&out).unwrap().unwrap();
    assert_eq!(header.reply, option_reply::ERR_TOO_BIG);
    assert_eq!((consumed, step), (input.len(), Step::Close(CloseReason::Aborted)));

    let very_long = OPTION_SKIP_BYTES_MAX + 1;
    let input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x06", &very_long.to_be_bytes()]);
    let (out, _, step) = converse(&input);
    assert_eq!((out.len(), step), (0, Step::Close(CloseReason::OptionTooLong(very_long))));

    let input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x10\x01"]);
    assert_eq!(converse(&input).2, Step::Close(CloseReason::OptionTooLong(4097)));
}

#[test]
fn abort_is_answered_before_it_ends() {
    let input = bytes(&[FLAGS, b"IHAVEOPT\x00\x00\x00\x02\x00\x00\x00\x00more"]);
    let expected = bytes(&[REPLY, b"\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x00"]);
    let step = Step::Close(CloseReason::Aborted);
    assert_eq!(converse(&input), (expected, input.len() - 4, step));
}

#[test]
fn what_cannot_be_answered_ends_it() {
    let close = |input: &[u8]| match converse(input) {
        (out, _, Step::Close(reason)) if out.is_empty() => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(close(&[0, 0, 0, 4]), CloseReason::UnknownClientFlags(4));
    assert_eq!(close(&[0x80, 0, 0, 3]), CloseReason::UnknownClientFlags(0x8000_0003));
    let magic = u64::from_be_bytes(*b"IHAVEOPS");
    assert_eq!(close(&bytes(&[FLAGS, b"IHAVEOPSxx"])), CloseReason::BadOptionMagic(magic));
    let unknown = b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x04risk";
    assert_eq!(close(&bytes(&[FLAGS, unknown])), CloseReason::UnknownExport);
    let list = b"IHAVEOPT\x00\x00\x00\x03\x00\x00\x00\x00";
    assert_eq!(close(&bytes(&[&[0, 0, 0, 2], list])), CloseReason::NotFixedNewstyle); // H4
}

#[test]
fn a_closed_handshake_stays_closed() {
    let mut handshake = Handshake::new();
    let mut out = Vec::new();
    let closed = Step::Close(CloseReason::UnknownClientFlags(4));
    assert_eq!(handshake.advance(&[0, 0, 0, 4], &exports(), &mut out).1, closed);
    assert_eq!(handshake.advance(STRUCTURED, &exports(), &mut out), (0, closed));
}

#[test]
fn one_option_too_many_ends_it() {
    let mut input = FLAGS.to_vec();
    for _ in 0..OPTION_COUNT_MAX {
        input.extend(STRUCTURED);
    }
    let (out, _, step) = converse_in(&[&input]);
    let all = STRUCTURED_ACK.repeat(OPTION_COUNT_MAX as usize);
    assert_eq!((out, step), (all, Step::NeedMore));
    input.extend(STRUCTURED);
    let (_, _, step) = converse_in(&[&input]);
    assert_eq!(step, Step::Close(CloseReason::TooManyOptions));
}

#[test]
fn a_call_pauses_once_it_has_written_much() {
    let many = vec![Export { name: "x".repeat(4096), ..exports().remove(0) }; 10];
    let list = b"IHAVEOPT\x00\x00\x00\x03\x00\x00\x00\x00".repeat(10);
    let mut handshake = Handshake::new();
    let mut out = Vec::new();
    let (consumed, step) = handshake.advance(&bytes(&[FLAGS, &list]), &many, &mut out);
    assert_eq!((consumed, step), (4 + 2 * 16, Step::NeedMore));
    assert!(out.len() > OUTPUT_PAUSE_BYTES && out.len() < 2 * OUTPUT_PAUSE_BYTES);
}
