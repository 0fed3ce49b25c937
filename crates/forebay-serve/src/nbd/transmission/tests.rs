// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::super::export::{Agreed, Export, Features, LogicalBlock};
use super::*;

const SIZE: u64 = 1 << 30;

fn session() -> Session {
    session_of(LogicalBlock::Bytes4096, false, Features::ALL)
}

fn session_of(logical_block: LogicalBlock, read_only: bool, features: Features) -> Session {
    let export = Export {
        name: "a".to_owned(),
        size_bytes: SIZE,
        logical_block,
        read_only,
        description: String::new(),
        features,
    };
    let agreed = Agreed { structured_replies: true, base_allocation: true, no_zeroes: true };
    Session::new(0, &export, agreed)
}

fn ask(session: &Session, command: u16, flags: u16, offset: u64, length: u32) -> Decoded {
    let header = RequestHeader { flags, command, cookie: 77, offset, length };
    decode(session, &header.encode())
}

fn kind_of(decoded: Decoded) -> Kind {
    match decoded {
        Decoded::Command(command) => command.kind,
        other => panic!("{other:?}"),
    }
}

fn error_of(decoded: Decoded) -> NbdError {
    match decoded {
        Decoded::Refuse { cookie: 77, error, .. } => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_command_comes_through_with_its_flags() {
    let session = session();
    let kind = |command, flags| kind_of(ask(&session, command, flags, 4096, 8192));
    assert_eq!(kind(command::READ, 0), Kind::Read { df: false });
    assert_eq!(kind(command::READ, flag::DF | flag::FUA), Kind::Read { df: true });
    assert_eq!(kind(command::WRITE, 0), Kind::Write { fua: false });
    assert_eq!(kind(command::WRITE, flag::FUA), Kind::Write { fua: true });
    assert_eq!(kind(command::TRIM, flag::FUA), Kind::Trim { fua: true });
    assert_eq!(kind(command::CACHE, 0), Kind::Cache);
    assert_eq!(kind(command::BLOCK_STATUS, flag::REQ_ONE), Kind::BlockStatus { req_one: true });
    let zeroes = flag::FUA | flag::NO_HOLE | flag::FAST_ZERO;
    assert_eq!(
        kind(command::WRITE_ZEROES, zeroes),
        Kind::WriteZeroes { fua: true, no_hole: true, fast_zero: true }
    );

    let write = ask(&session, command::WRITE, 0, 4096, 8192);
    let expected =
        Command { cookie: 77, kind: Kind::Write { fua: false }, offset: 4096, length: 8192 };
    assert_eq!(write, Decoded::Command(expected));
    assert_eq!(expected.payload_bytes(), 8192);
}

#[test]
fn flush_and_disconnect_ignore_their_range() {
    for command in [command::FLUSH, command::DISCONNECT] {
        let Decoded::Command(command) = ask(&session(), command, 0, u64::MAX, 3) else { panic!() };
        assert_eq!((command.offset, command.length, command.payload_bytes()), (0, 0, 0));
    }
    assert_eq!(kind_of(ask(&session(), command::DISCONNECT, 0xffff, 0, 0)), Kind::Disconnect);
}

#[test]
fn flags_that_do_not_belong_are_invalid() {
    let session = session();
    for (command, flags) in [
        (command::READ, flag::NO_HOLE),
        (command::READ, flag::REQ_ONE),
        (command::WRITE, flag::DF),
        (command::WRITE, flag::FAST_ZERO),
        (command::FLUSH, flag::DF),
        (command::TRIM, flag::NO_HOLE),
        (command::CACHE, flag::REQ_ONE),
        (command::WRITE_ZEROES, flag::DF),
        (command::BLOCK_STATUS, flag::DF),
        (command::READ, 1 << 5),
        (command::READ, 1 << 15),
        (8, 0),
        (u16::MAX, 0),
    ] {
        assert_eq!(error_of(ask(&session, command, flags, 0, 4096)), NbdError::Invalid);
    }
}

#[test]
fn what_was_not_offered_is_invalid() {
    let session = Session {
        base_allocation: false,
        ..session_of(LogicalBlock::Bytes512, false, Features::NONE)
    };
    for (command, flags) in [
        (command::READ, flag::DF),
        (command::READ, flag::FUA),
        (command::WRITE, flag::FUA),
        (command::FLUSH, 0),
        (command::TRIM, 0),
        (command::CACHE, 0),
        (command::WRITE_ZEROES, 0),
        (command::BLOCK_STATUS, 0),
    ] {
        assert_eq!(error_of(ask(&session, command, flags, 0, 4096)), NbdError::Invalid);
    }
    let features = Features { fast_zero: false, ..Features::ALL };
    let session = session_of(LogicalBlock::Bytes512, false, features);
    let fast = ask(&session, command::WRITE_ZEROES, flag::FAST_ZERO, 0, 4096);
    assert_eq!(error_of(fast), NbdError::Invalid);
}

#[test]
fn a_read_only_export_refuses_what_changes_it() {
    let session = session_of(LogicalBlock::Bytes512, true, Features::ALL);
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        assert_eq!(error_of(ask(&session, command, 0, 0, 512)), NbdError::NotPermitted);
        // Also where the range is wrong.
        assert_eq!(error_of(ask(&session, command, 0, 1, 0)), NbdError::NotPermitted);
    }
    assert_eq!(kind_of(ask(&session, command::READ, 0, 0, 512)), Kind::Read { df: false });
    assert_eq!(kind_of(ask(&session, command::FLUSH, 0, 0, 0)), Kind::Flush);
}

#[test]
fn ranges_end_where_the_export_ends() {
    let session = session();
    let past = |command, offset, length| error_of(ask(&session, command, 0, offset, length));
    for command in [command::READ, command::WRITE, command::TRIM, command::CACHE] {
        kind_of(ask(&session, command, 0, SIZE - 4096, 4096));
    }
    for command in [command::WRITE, command::WRITE_ZEROES] {
        assert_eq!(past(command, SIZE, 4096), NbdError::NoSpace);
        assert_eq!(past(command, SIZE - 4096, 8192), NbdError::NoSpace);
        assert_eq!(past(command, u64::MAX - 4095, 8192), NbdError::NoSpace);
    }
    for command in [command::READ, command::TRIM, command::CACHE, command::BLOCK_STATUS] {
        assert_eq!(past(command, SIZE, 4096), NbdError::Invalid);
        assert_eq!(past(command, u64::MAX - 4095, 8192), NbdError::Invalid);
    }
}

#[test]
fn ranges_are_aligned_and_not_empty() {
    let coarse = session();
    let fine = session_of(LogicalBlock::Bytes512, false, Features::ALL);
    for command in [
        command::READ,
        command::WRITE,
        command::TRIM,
        command::WRITE_ZEROES,
        command::CACHE,
        command::BLOCK_STATUS,
    ] {
        for (offset, length) in [(512, 4096), (4096, 512), (4096, 0), (4095, 4097)] {
            assert_eq!(error_of(ask(&coarse, command, 0, offset, length)), NbdError::Invalid);
        }
        kind_of(ask(&fine, command, 0, 512, 512));
        assert_eq!(error_of(ask(&fine, command, 0, 1, 512)), NbdError::Invalid);
    }
}

#[test]
fn only_what_carries_data_is_bounded_in_length() {
    let session = session();
    let long = TRANSFER_BYTES_MAX + 4096;
    for command in [command::READ, command::WRITE] {
        kind_of(ask(&session, command, 0, 0, TRANSFER_BYTES_MAX));
        assert_eq!(error_of(ask(&session, command, 0, 0, long)), NbdError::Invalid);
    }
    for command in [command::TRIM, command::WRITE_ZEROES, command::CACHE, command::BLOCK_STATUS] {
        kind_of(ask(&session, command, 0, 0, long));
    }
}

#[test]
fn the_payload_of_a_refused_write_is_skipped_or_the_connection_closed() {
    let session = session();
    let skip = |length| match ask(&session, command::WRITE, 0, 1, length) {
        Decoded::Refuse { skip_bytes, .. } => Ok(skip_bytes),
        Decoded::Close(reason) => Err(reason),
        other => panic!("{other:?}"),
    };
    assert_eq!(skip(17), Ok(17));
    assert_eq!(skip(WRITE_SKIP_BYTES_MAX), Ok(WRITE_SKIP_BYTES_MAX));
    let too_long = WRITE_SKIP_BYTES_MAX + 1;
    assert_eq!(skip(too_long), Err(CloseReason::WriteTooLong(too_long)));
    // Nothing but a write has a payload.
    let read = ask(&session, command::READ, 0, 1, u32::MAX);
    assert!(matches!(read, Decoded::Refuse { skip_bytes: 0, .. }));
}

#[test]
fn a_refused_read_is_answered_in_the_form_agreed_on() {
    let form_of = |session: &Session, command| match ask(session, command, 0, 1, 1) {
        Decoded::Refuse { form, .. } => form,
        other => panic!("{other:?}"),
    };
    let structured = session();
    assert_eq!(form_of(&structured, command::READ), ReplyForm::Structured);
    assert_eq!(form_of(&structured, command::BLOCK_STATUS), ReplyForm::Structured);
    assert_eq!(form_of(&structured, command::WRITE), ReplyForm::Simple);
    let simple = Session { structured_replies: false, base_allocation: false, ..session() };
    assert_eq!(form_of(&simple, command::READ), ReplyForm::Simple);
    assert_eq!(form_of(&simple, command::BLOCK_STATUS), ReplyForm::Simple);
}

#[test]
fn a_short_header_needs_more_and_a_wrong_one_closes() {
    let header =
        RequestHeader { flags: 0, command: command::READ, cookie: 1, offset: 0, length: 4096 };
    let bytes = header.encode();
    for cut in 0..bytes.len() {
        assert_eq!(decode(&session(), &bytes[..cut]), Decoded::NeedMore);
    }
    let closed = decode(&session(), &[0x25, 0x60, 0x95, 0x14]);
    assert_eq!(closed, Decoded::Close(CloseReason::BadRequestMagic(0x2560_9514)));
}
