// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::super::handshake::Handshake;
use super::super::wire::{OptionReplyHeader, option, option_reply};
use super::*;

/// A server whose every word is known beforehand.
struct Canned {
    input: io::Cursor<Vec<u8>>,
}

impl Read for Canned {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.input.read(target)
    }
}

impl Write for Canned {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a client hears to a read of 1,024 bytes at 4096, its first command, if `said` is said.
fn read_reply(structured_replies: bool, said: &[u8]) -> Result<Reply, ClientError> {
    let mut bytes = Handshake::greeting().to_vec();
    if structured_replies {
        let (option, reply) = (option::STRUCTURED_REPLY, option_reply::ACK);
        bytes.extend(OptionReplyHeader { option, reply, length: 0 }.encode());
    }
    bytes.extend([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]);
    bytes.extend(said);
    let wanted = Connect {
        export: "x",
        entry: Entry::ExportName,
        structured_replies,
        base_allocation: false,
        no_zeroes: true,
    };
    let mut client = Client::connect(Canned { input: io::Cursor::new(bytes) }, &wanted)?;
    let cookie = client.send_read(ByteRange { offset: 4096, length: 1024 }, false)?;
    assert_eq!(cookie, 1);
    client.receive()
}

fn chunk(flags: u16, kind: u16, content: &[&[u8]]) -> Vec<u8> {
    let content = content.concat();
    let length = content.len() as u32;
    [&ChunkHeader { flags, kind, cookie: 1, length }.encode()[..], &content].concat()
}

fn data(flags: u16, offset: u64, length: usize) -> Vec<u8> {
    chunk(flags, chunk::OFFSET_DATA, &[&offset.to_be_bytes(), &vec![9; length]])
}

fn hole(flags: u16, offset: u64, length: u32) -> Vec<u8> {
    chunk(flags, chunk::OFFSET_HOLE, &[&offset.to_be_bytes(), &length.to_be_bytes()])
}

#[test]
fn pieces_are_put_together_in_any_order() {
    let said = [data(0, 4608, 512), hole(1, 4096, 512)].concat();
    let reply = read_reply(true, &said).unwrap();
    assert_eq!(reply.result, Ok(()));
    assert_eq!(reply.data, [[0; 512], [9; 512]].concat());
}

#[test]
fn an_error_after_data_fails_the_read_and_the_first_one_is_told() {
    let first = chunk(0, chunk::ERROR_OFFSET, &[&[0, 0, 0, 5, 0, 0], &4096u64.to_be_bytes()]);
    let second = chunk(1, chunk::ERROR, &[&[0, 0, 0, 28, 0, 1, b'x']]);
    let reply = read_reply(true, &[data(0, 4096, 1024), first, second].concat()).unwrap();
    assert_eq!(reply.result, Err(NbdError::Io));
}

#[test]
fn a_simple_read_is_followed_by_its_data_only_if_it_went_well() {
    let simple = |error| SimpleReplyHeader { error, cookie: 1 }.encode().to_vec();
    let reply = read_reply(false, &[simple(0), vec![9; 1024]].concat()).unwrap();
    assert_eq!((reply.result, reply.data), (Ok(()), vec![9; 1024]));
    let reply = read_reply(false, &simple(5)).unwrap();
    assert_eq!((reply.result, reply.data), (Err(NbdError::Io), Vec::new()));
    assert!(matches!(read_reply(false, &simple(0)), Err(ClientError::Io(_))));
}

#[test]
fn what_the_protocol_does_not_allow_is_not_taken() {
    let simple = SimpleReplyHeader { error: 0, cookie: 1 }.encode().to_vec();
    let other = SimpleReplyHeader { error: 5, cookie: 2 }.encode().to_vec();
    let done = chunk(1, chunk::NONE, &[]);
    for said in [
        simple,                                              // Chunks were agreed on.
        other,                                               // Of no command.
        done.clone(),                                        // Nothing of the range came.
        chunk(0, chunk::NONE, &[]),                          // Ends nothing.
        [data(0, 4096, 512), done.clone()].concat(),         // Half of it.
        [data(0, 4096, 512), data(1, 4500, 512)].concat(),   // One over the other.
        [hole(0, 4096, 1024), data(1, 4096, 1024)].concat(), // Twice.
        data(1, 4095, 1024),                                 // Before the range.
        data(1, 4608, 1024),                                 // Past it.
        data(1, 4096, 1025),                                 // Longer than it.
        hole(1, u64::MAX, 1024),                             // Nowhere near it.
        hole(1, 4096, u32::MAX),                             // Far too long.
        hole(0, 4096, 0),                                    // Nothing at all.
        chunk(1, chunk::OFFSET_DATA, &[&[0; 7]]),            // No whole offset.
        chunk(1, chunk::ERROR, &[&[0, 0, 0, 0, 0, 0]]),      // An error that is none.
        chunk(1, chunk::ERROR, &[&[0, 0, 0, 5, 0, 9]]),      // A text that is not there.
        chunk(1, chunk::BLOCK_STATUS, &[&[0; 12]]),          // Not what was asked.
        chunk(1, 77, &[]),                                   // Of a kind nobody knows.
        vec![0xff; 20],                                      // No magic.
    ] {
        let ended = read_reply(true, &said);
        assert!(matches!(ended, Err(ClientError::Protocol(_))), "{said:?}: {ended:?}");
    }
    assert!(matches!(read_reply(false, &done), Err(ClientError::Protocol(_))));
}

#[test]
fn a_greeting_of_another_kind_is_not_taken() {
    for greeting in [&b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\x00\x00"[..], &[0; 18]] {
        let stream = Canned { input: io::Cursor::new(greeting.to_vec()) };
        let ended = Client::connect(stream, &Connect::default());
        assert!(matches!(ended, Err(ClientError::Protocol(_))));
    }
}
