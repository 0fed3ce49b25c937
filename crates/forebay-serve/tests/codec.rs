// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Client against server, over a pair of Unix sockets.
#![allow(clippy::unwrap_used)] // All of it is tests.

#[path = "support/ram_server.rs"]
mod ram_server;

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use forebay_serve::nbd::client::{Client, ClientError, Connect, Entry, Zeroes};
use forebay_serve::nbd::error::{CloseReason, NbdError};
use forebay_serve::nbd::export::{Export, Features, LogicalBlock};
use forebay_serve::nbd::reply::{ByteRange, StatusExtent};
use forebay_serve::nbd::wire::{
    TRANSFER_BYTES_MAX, command, command_flag, option, option_reply, transmission_flag,
};
use ram_server::{RamDisk, serve};

const SIZE: u64 = 1 << 20;

type Served = JoinHandle<Option<CloseReason>>;

fn exports() -> Vec<Export> {
    let export = |name: &str, logical_block, read_only| Export {
        name: name.to_owned(),
        size_bytes: SIZE,
        logical_block,
        read_only,
        description: format!("the {name} one"),
        features: Features::ALL,
    };
    vec![
        export("fine", LogicalBlock::Bytes512, false),
        export("coarse", LogicalBlock::Bytes4096, false),
        export("frozen", LogicalBlock::Bytes512, true),
    ]
}

fn server() -> (UnixStream, Served) {
    server_of(exports())
}

fn server_of(exports: Vec<Export>) -> (UnixStream, Served) {
    let (near, mut far) = UnixStream::pair().unwrap();
    let served = thread::spawn(move || {
        let disks: Vec<_> = exports.iter().map(|export| RamDisk::new(export.size_bytes)).collect();
        serve(&mut far, &exports, &disks).unwrap()
    });
    (near, served)
}

/// Who names none is served the only one.
fn connect(wanted: &Connect<'_>) -> (Client<UnixStream>, Served) {
    let mut exports = exports();
    exports.truncate(if wanted.export.is_empty() { 1 } else { exports.len() });
    let (stream, served) = server_of(exports);
    (Client::connect(stream, wanted).unwrap(), served)
}

fn finish(client: Client<UnixStream>, served: Served) {
    let stream = client.disconnect().unwrap();
    assert_eq!(served.join().unwrap(), None);
    drop(stream);
}

fn failure<T: std::fmt::Debug>(result: Result<T, ClientError>) -> NbdError {
    match result {
        Err(ClientError::Failed(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Every way into transmission.
fn ways() -> Vec<Connect<'static>> {
    let mut ways = Vec::new();
    for entry in [Entry::Go, Entry::ExportName] {
        for structured_replies in [false, true] {
            for no_zeroes in [false, true] {
                let base_allocation = structured_replies;
                let export = "";
                let way = Connect { export, entry, structured_replies, base_allocation, no_zeroes };
                ways.push(way);
            }
        }
    }
    ways
}

#[test]
fn a_disk_works_whichever_way_it_was_reached() {
    for way in ways() {
        let (mut client, served) = connect(&way);
        assert_eq!(client.facts().size_bytes, SIZE);
        assert_eq!(client.structured_replies(), way.structured_replies);
        assert_eq!(client.base_allocation(), way.base_allocation);
        let df = client.facts().flags & transmission_flag::SEND_DF != 0;
        assert_eq!(df, way.structured_replies);

        client.write(4096, &[0xa5; 8192], false).unwrap();
        client.write(0x20000, &[0x5a; 512], true).unwrap();
        client.flush().unwrap();
        client.cache(0, 4096).unwrap();
        let read = client.read(0, 16384).unwrap();
        assert!(read[..4096].iter().all(|byte| *byte == 0));
        assert!(read[4096..12288].iter().all(|byte| *byte == 0xa5));
        assert!(read[12288..].iter().all(|byte| *byte == 0));
        client.trim(4096, 4096, false).unwrap();
        client.write_zeroes(8192, 512, Zeroes { no_hole: true, ..Zeroes::default() }).unwrap();
        let read = client.read(4096, 8192).unwrap();
        assert!(read[..4608].iter().all(|byte| *byte == 0));
        assert!(read[4608..].iter().all(|byte| *byte == 0xa5));
        assert_eq!(client.read(0x20000, 512).unwrap(), [0x5a; 512]);
        finish(client, served);
    }
}

#[test]
fn exports_are_listed_and_described() {
    let (stream, served) = server();
    let listed = Client::list(stream).unwrap();
    let names: Vec<_> = listed.iter().map(|export| export.name.as_str()).collect();
    assert_eq!(names, ["fine", "coarse", "frozen"]);
    assert_eq!(listed[1].description, "the coarse one");
    assert_eq!(served.join().unwrap(), Some(CloseReason::Aborted));

    let (stream, served) = server();
    let wanted = Connect { export: "coarse", ..Connect::default() };
    let facts = Client::describe(stream, &wanted).unwrap();
    let sizes = facts.block_sizes.unwrap();
    assert_eq!((sizes.minimum, sizes.preferred, sizes.maximum), (4096, 4096, 32 << 20));
    assert_eq!(facts.name.as_deref(), Some("coarse"));
    assert_eq!(facts.description.as_deref(), Some("the coarse one"));
    assert_eq!(served.join().unwrap(), Some(CloseReason::Aborted));
}

#[test]
fn an_export_that_does_not_exist_is_refused() {
    let (stream, served) = server();
    let wanted = Connect { export: "none", ..Connect::default() };
    match Client::connect(stream, &wanted) {
        Err(ClientError::Refused { option: option::GO, reply, .. }) => {
            assert_eq!(reply, option_reply::ERR_UNKNOWN);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(served.join().unwrap(), None);

    let (stream, served) = server();
    let wanted = Connect { entry: Entry::ExportName, ..wanted };
    assert!(matches!(Client::connect(stream, &wanted), Err(ClientError::Io(_))));
    assert_eq!(served.join().unwrap(), Some(CloseReason::UnknownExport));
}

#[test]
fn block_status_says_what_is_stored() {
    let (mut client, served) = connect(&Connect::default());
    client.write(8192, &[1; 4096], false).unwrap();
    client.write(16384, &[1; 4096], false).unwrap();
    let extent = |length, flags| StatusExtent { length, flags };
    let expected = [extent(4096, 3), extent(4096, 0), extent(4096, 3), extent(2048, 0)];
    assert_eq!(client.block_status(4096, 14336, false).unwrap(), expected);
    assert_eq!(client.block_status(4096, 14336, true).unwrap(), expected[..1]);
    client.write_zeroes(8192, 4096, Zeroes::default()).unwrap();
    let whole = client.block_status(0, SIZE as u32, false).unwrap();
    assert_eq!(whole[0], extent(16384, 3));
    finish(client, served);
}

#[test]
fn what_is_refused_is_answered_and_the_connection_goes_on() {
    for structured_replies in [false, true] {
        let wanted = Connect { export: "coarse", structured_replies, ..Connect::default() };
        let (mut client, served) = connect(&wanted);
        assert_eq!(failure(client.read(512, 4096)), NbdError::Invalid);
        assert_eq!(failure(client.read(SIZE, 4096)), NbdError::Invalid);
        assert_eq!(failure(client.write(512, &[1; 512], false)), NbdError::Invalid);
        assert_eq!(failure(client.write(SIZE, &[1; 8192], false)), NbdError::NoSpace);
        let too_long = vec![1; TRANSFER_BYTES_MAX as usize + 1];
        assert_eq!(failure(client.write(0, &too_long, false)), NbdError::Invalid);
        assert_eq!(failure(client.read(0, TRANSFER_BYTES_MAX + 4096)), NbdError::Invalid);
        let impossible = Zeroes { no_hole: true, fast_zero: true, ..Zeroes::default() };
        assert_eq!(failure(client.write_zeroes(0, 4096, impossible)), NbdError::NotSupported);

        let range = ByteRange { offset: 0, length: 4096 };
        for (command, flags) in [(8, 0), (999, 0), (command::READ, 1 << 9)] {
            let cookie = client.send(command, flags, range, &[]).unwrap();
            let reply = client.receive().unwrap();
            assert_eq!((reply.cookie, reply.result), (cookie, Err(NbdError::Invalid)));
        }
        assert_eq!(client.read(0, 4096).unwrap(), [0; 4096]);
        finish(client, served);
    }
}

#[test]
fn a_read_only_export_is_only_read() {
    let (mut client, served) = connect(&Connect { export: "frozen", ..Connect::default() });
    let flags = client.facts().flags;
    assert!(flags & transmission_flag::READ_ONLY != 0);
    assert!(flags & (transmission_flag::SEND_TRIM | transmission_flag::SEND_WRITE_ZEROES) == 0);
    assert_eq!(failure(client.write(0, &[1; 512], false)), NbdError::NotPermitted);
    assert_eq!(failure(client.trim(0, 512, false)), NbdError::NotPermitted);
    assert_eq!(failure(client.write_zeroes(0, 512, Zeroes::default())), NbdError::NotPermitted);
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
    finish(client, served);
}

#[test]
fn many_commands_may_be_under_way() {
    for structured_replies in [false, true] {
        let (mut client, served) = connect(&Connect { structured_replies, ..Connect::default() });
        let mut expected = BTreeMap::new();
        for round in 0..8u64 {
            for index in 0..8u64 {
                let fill = (round * 8 + index) as u8;
                let offset = fill as u64 * 4096;
                let cookie = client.send_write(offset, &[fill; 4096], index == 0).unwrap();
                expected.insert(cookie, Vec::new());
                let cookie = client.send_read(ByteRange { offset, length: 4096 }, false).unwrap();
                expected.insert(cookie, vec![fill; 4096]);
            }
            let cookie = client.send_flush().unwrap();
            expected.insert(cookie, Vec::new());
            assert_eq!(client.in_flight_count(), 17);
            while client.in_flight_count() > 0 {
                let reply = client.receive().unwrap();
                assert_eq!(reply.result, Ok(()));
                assert_eq!(expected.remove(&reply.cookie), Some(reply.data));
            }
        }
        assert!(expected.is_empty());
        finish(client, served);
    }
}

#[test]
fn a_reply_that_comes_while_another_is_waited_for_is_kept() {
    let (mut client, served) = connect(&Connect::default());
    let first = client.send_write(0, &[7; 512], false).unwrap();
    assert_eq!(client.read(0, 512).unwrap(), [7; 512]);
    assert_eq!(client.in_flight_count(), 1);
    assert_eq!(client.receive().unwrap().cookie, first);
    assert!(matches!(client.receive(), Err(ClientError::Io(_))));
    finish(client, served);
}

#[test]
fn df_gets_one_piece() {
    let (mut client, served) = connect(&Connect::default());
    client.write(4096, &[1; 4096], false).unwrap();
    let range = ByteRange { offset: 0, length: 12288 };
    client.send_read(range, true).unwrap();
    client.send(command::READ, command_flag::FUA, range, &[]).unwrap();
    let whole = client.receive().unwrap();
    let pieces = client.receive().unwrap();
    assert_eq!(whole.data, pieces.data);
    finish(client, served);
}

#[test]
fn bytes_that_are_no_request_end_the_connection() {
    use std::io::Write;

    let (mut client, served) = connect(&Connect::default());
    client.stream().write_all(&[0xff; 28]).unwrap();
    assert_eq!(served.join().unwrap(), Some(CloseReason::BadRequestMagic(u32::MAX)));
}
