// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients who ask what is stored where.

use super::carry::tests::{LIMIT, SIZE, begun_with, fresh};
use crate::nbd::export::Agreed;
use crate::nbd::wire::{ChunkHeader, RequestHeader, SimpleReplyHeader, command};
use forebay::io::ReactorKind;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::Instant;

fn ask(command: u16, cookie: u64, length: u64) -> [u8; RequestHeader::BYTES] {
    RequestHeader { flags: 0, command, cookie, offset: 0, length: length as u32 }.encode()
}

/// All of a client's questions were answered in one turn of the loop, however much of the map each looks at: nobody else had a turn meanwhile.
#[test]
fn questions_about_zeros_hold_up_nobody() {
    const COUNT: usize = 2000;
    let agreed = Agreed { structured_replies: true, base_allocation: true, ..Agreed::default() };
    let carried = crate::nbd::carried::Carried { agreed, ..fresh() };
    let (mut program, mut streams) = begun_with(ReactorKind::Auto, &carried, 2);
    let [asker, other] = &mut streams[..] else { unreachable!() };
    let begun = Instant::now();
    asker.write_all(&ask(command::WRITE_ZEROES, 0, SIZE)).unwrap();
    let mut heard = vec![0; SimpleReplyHeader::BYTES];
    loop {
        program.turn();
        match asker.read_exact(&mut heard) {
            Ok(()) => break,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(begun.elapsed() < LIMIT);
    }
    let questions = (0..COUNT as u64).flat_map(|at| ask(command::BLOCK_STATUS, at, SIZE));
    asker.write_all(&questions.collect::<Vec<u8>>()).unwrap();
    // Nothing of its own brings another turn.
    asker.shutdown(Shutdown::Write).unwrap();

    let each = ChunkHeader::BYTES + 4 + 8;
    let (mut replies, mut most, mut turns) = (Vec::<u8>::new(), 0, 0);
    let mut bytes = vec![0; COUNT * each];
    other.write_all(&ask(command::FLUSH, 1, 0)).unwrap();
    let mut is_other_answered = None;
    while replies.len() < COUNT * each {
        program.wait();
        turns += 1;
        let before = replies.len();
        match asker.read(&mut bytes) {
            Ok(count) => replies.extend(&bytes[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        most = most.max((replies.len() - before) / each);
        if is_other_answered.is_none() && other.read(&mut heard).is_ok() {
            is_other_answered = Some(turns);
        }
        assert!(begun.elapsed() < LIMIT, "{} of {COUNT} in {turns} turns", replies.len() / each);
    }
    assert_eq!(replies.len(), COUNT * each);
    assert!(most < COUNT / 50, "{most} in one turn");
    assert!(is_other_answered.is_some_and(|turns| turns < 20), "{is_other_answered:?}");
}
