// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use crate::carried::rules::{
    has_no_byte_that_may_be_another_or_missing, is_taken_as_it_was_put_down,
};
use crate::carried::{check_file, file_header, record_header};

fn export() -> Export {
    Export {
        name: "v".to_owned(),
        size_bytes: 64 << 20,
        logical_block: LogicalBlock::Bytes512,
        read_only: false,
        description: String::new(),
        features: Features::ALL,
    }
}

fn carried() -> Carried {
    let agreed = Agreed { structured_replies: true, base_allocation: true, no_zeroes: true };
    let session = Session::new(0, &export(), agreed);
    Carried {
        volume: *b"a volume's name.",
        export_name: session.export_name.clone(),
        size_bytes: session.size_bytes,
        logical_block: session.logical_block,
        flags: session.transmission_flags(),
        agreed,
        is_closing: false,
        is_over: false,
        skip_bytes: 0,
        long_write: Some(LongWrite {
            cookie: 0x0102_0304_0506_0708,
            fua: true,
            offset: 4096,
            length: 3 << 20,
            submitted: 1 << 20,
            error: 0,
        }),
        input: b"some of it".to_vec(),
        output: vec![
            Piece::Bytes(b"head".to_vec()),
            Piece::Aside { at: 63 << 20, length: 1 << 20 },
        ],
    }
}

#[test]
fn what_is_put_down_is_what_is_taken() {
    let carried = carried();
    is_taken_as_it_was_put_down(&carried);
    let session = carried.session(3, &export()).unwrap();
    assert_eq!(session, Session::new(3, &export(), carried.agreed));
    assert!(carried.long_write.unwrap().command(&session).is_ok());
}

#[test]
fn no_byte_may_be_another_and_none_may_be_missing() {
    has_no_byte_that_may_be_another_or_missing(&carried());
}

#[test]
fn what_cannot_be_is_named() {
    let plain = || Carried { long_write: None, ..carried() };
    let long_write = carried().long_write;
    let aside = |at: u64, length: u64| Piece::Aside { at, length };
    let sent = |output: Vec<Piece>| (Carried { output, ..plain() }, "bytes to be sent");
    let cases: [(Carried, &str); 12] = [
        (Carried { size_bytes: 1000, ..plain() }, "size"),
        (Carried { skip_bytes: WRITE_SKIP_BYTES_MAX + 1, ..plain() }, "bytes to be skipped"),
        (Carried { skip_bytes: 1, long_write, ..plain() }, "bytes to be skipped"),
        (Carried { input: vec![0; INPUT_BYTES + 1], ..plain() }, "bytes received"),
        (Carried { export_name: "x".repeat(STRING_BYTES_MAX + 1), ..plain() }, "name"),
        sent(vec![Piece::Bytes(Vec::new())]),
        sent(vec![Piece::Bytes(vec![1; RING_BYTES]), Piece::Bytes(vec![1; EDGE_BYTES + 1])]),
        sent(vec![aside(0, 0)]),
        sent(vec![aside(64 << 20, 512)]),
        sent(vec![aside(u64::MAX, 512)]),
        sent(vec![aside(0, 17 << 20), aside(0, 17 << 20), aside(0, 512)]),
        sent(vec![aside(0, u64::MAX)]),
    ];
    for (carried, what) in cases {
        match Carried::decode(&carried.encode()) {
            Err(CarriedError::Field(found)) => assert_eq!(found, what),
            other => panic!("{what}: {other:?}"),
        }
    }
    let session = carried().session(0, &export()).unwrap();
    let write = carried().long_write.unwrap();
    let mut wrong = [write; 5];
    wrong[0].submitted = write.length;
    wrong[1].submitted = 100;
    wrong[2].length = 1 << 20;
    wrong[3].offset = 64 << 20;
    wrong[4].length = 33 << 20;
    for (number, write) in wrong.into_iter().enumerate() {
        assert!(matches!(write.command(&session), Err(CarriedError::Field("write"))), "{number}");
    }
}

/// C3.
#[test]
fn a_session_is_kept_or_ends() {
    let carried = carried();
    let larger = Export { size_bytes: 128 << 20, ..export() };
    assert_eq!(carried.session(0, &larger).unwrap().size_bytes, 64 << 20);
    let smaller = Export { size_bytes: 32 << 20, ..export() };
    let others = Export { logical_block: LogicalBlock::Bytes4096, ..export() };
    let read_only = Export { read_only: true, ..export() };
    let features = Features { cache: false, ..Features::ALL };
    let less = Export { features, ..export() };
    for export in [smaller, others, read_only, less.clone()] {
        assert!(matches!(carried.session(0, &export), Err(CarriedError::Served(_))), "{export:?}");
    }
    // One who was told of less goes on with that.
    let flags = Session::new(0, &less, carried.agreed).transmission_flags();
    let modest = Carried { flags, ..carried };
    assert_eq!(modest.session(0, &export()).unwrap().features, features);
}

#[test]
fn a_file_of_another_kind_or_version_is_told() {
    let header = file_header::<Carried>();
    let check = check_file::<Carried>;
    assert!(check(&header).is_ok());
    let mut other = header;
    other[11] += 1;
    let (found, own) = (Carried::VERSION + 1, Carried::VERSION);
    let told = check(&other);
    assert!(
        matches!(told, Err(CarriedError::Version { found: it, own: its, .. }) if (it, its) == (found, own))
    );
    other[0] = 0;
    assert!(matches!(check(&other), Err(CarriedError::Magic(..))));
    assert!(matches!(check(&header[..7]), Err(CarriedError::Cut)));
    let length = (Carried::BYTES_MAX as u32 + 1).to_be_bytes();
    let long = record_header::<Carried>(&[length, [0; 4]].concat());
    assert!(matches!(long, Err(CarriedError::Length(_))));
}
