// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Many at once: readers of one block, and runs of writes side by side.

use crate::support;
use forebay_core::blank::{Nothing, VOLUME};
use forebay_core::effect::{Effect, Token};
use forebay_core::engine::Engine;
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::policy::bypass::Reason;
use forebay_core::request::{Op, Request};
use forebay_core::stats::Stats;

const MIB: u64 = 1 << 20;

fn stats(engine: &Engine) -> Stats {
    engine.status(VOLUME).unwrap().stats
}

/// All that is written here fits into its cache, so that nobody waits for write-back.
fn engine() -> Engine {
    support::engine(1, 64 << 30, 2048 * MIB, 512 << 10, 64)
}

fn ask(engine: &mut Engine, op: Op, offset: u64, length: u64, tag: u32) {
    let request = Request { volume: VOLUME, op, offset, length, tag };
    engine.submit(request, &mut Nothing).unwrap();
}

/// What is wanted is done at once, but for reads of the backing device. Gives those, and how many were answered.
fn settle(engine: &mut Engine) -> (Vec<Token>, usize) {
    let (mut reads, mut answers) = (Vec::new(), 0);
    while let Some(effect) = engine.next_effect() {
        let token = match effect {
            Effect::Answer { result, .. } => {
                result.unwrap();
                answers += 1;
                continue;
            }
            Effect::ReadBacking { token, .. } => {
                reads.push(token);
                continue;
            }
            Effect::MarkStale { .. } => unreachable!("no device fails"),
            Effect::WriteSuperblock { token, .. }
            | Effect::WriteCache { token, .. }
            | Effect::ReadCache { token, .. }
            | Effect::WriteArea { token, .. }
            | Effect::FlushCache { token }
            | Effect::WriteBacking { token, .. }
            | Effect::ZeroBacking { token, .. }
            | Effect::DiscardBacking { token, .. }
            | Effect::FlushBacking { token, .. }
            | Effect::WriteAround { token, .. } => token,
        };
        engine.complete(token, Ok(()), &mut Nothing);
    }
    (reads, answers)
}

#[test]
fn a_hundred_readers_of_a_block_make_one_read_of_the_device() {
    let mut engine = engine();
    for tag in 0..100 {
        ask(&mut engine, Op::Read, 4096, 4096, tag);
    }
    let (reads, answers) = settle(&mut engine);
    assert_eq!((reads.len(), answers), (1, 0));
    engine.complete(reads[0], Ok(()), &mut Nothing);
    let (reads, answers) = settle(&mut engine);
    assert_eq!((reads.len(), answers), (0, 100));
    assert_eq!(stats(&engine).shared_blocks, 99);
}

/// Writes `rounds` pieces of 64 KiB of each of so many streams in turn.
fn write_streams(engine: &mut Engine, streams: u64, rounds: u64) {
    const PIECE: u64 = 64 << 10;
    for round in 0..rounds {
        for stream in 0..streams {
            // Not at even distances.
            let begin = stream * (300 * MIB + 12_288);
            ask(engine, Op::Write { fua: false }, begin + round * PIECE, PIECE, 0);
            assert_eq!(settle(engine).1, 1);
        }
    }
}

#[test]
fn of_128_streams_each_goes_around_the_log_from_the_cutoff_on() {
    let mut engine = engine();
    engine.set_order(VOLUME, Order::Relaxed, &mut Nothing);
    // The default cutoff is 4 MiB, the 64th piece.
    write_streams(&mut engine, 128, 72);
    let around = stats(&engine).bypassed[Reason::Sequential as usize];
    assert!(around >= 128 * 9 * 99 / 100, "{around} of {}", 128 * 9);
}

#[test]
fn with_a_cutoff_of_0_no_run_goes_around() {
    let mut engine = engine();
    engine.set_order(VOLUME, Order::Relaxed, &mut Nothing);
    engine.set_cutoff(VOLUME, 0);
    write_streams(&mut engine, 1, 1024);
    assert_eq!(stats(&engine).bypassed_writes, 0);
}

/// Writes around the log that are under way; what else is wanted is done at once.
fn around(engine: &mut Engine) -> Vec<Token> {
    let mut writes = Vec::new();
    while let Some(effect) = engine.next_effect() {
        match effect {
            Effect::WriteAround { token, .. } => writes.push(token),
            Effect::Answer { result, .. } => result.unwrap(),
            Effect::WriteCache { token, .. } | Effect::FlushCache { token } => {
                engine.complete(token, Ok(()), &mut Nothing);
            }
            other => unreachable!("{other:?}"),
        }
    }
    writes
}

/// Blocks of a guest's file system that are not ours: each of its writes waited for the one before, and a disk without a cache of its own wrote
/// 7 MiB a second of the 118 that it can.
#[test]
fn writes_that_meet_in_a_block_go_around_the_log_together() {
    const PIECE: u64 = 64 << 10;
    let mut engine = engine();
    engine.set_mode(VOLUME, Mode::WriteAround, &mut Nothing);
    let write = Op::Write { fua: false };
    for at in [0, 1, 3, 2] {
        ask(&mut engine, write, 512 + at * PIECE, PIECE, at as u32);
    }
    let mut writes = around(&mut engine);
    assert_eq!(writes.len(), 4);
    // Bytes that are being written are waited for.
    ask(&mut engine, write, 4 * PIECE, PIECE, 4);
    assert!(around(&mut engine).is_empty());
    // It has them together with the one that came third, which still has the block that the fourth ends in.
    engine.complete(writes.pop().unwrap(), Ok(()), &mut Nothing);
    assert!(around(&mut engine).is_empty());
    engine.complete(writes.pop().unwrap(), Ok(()), &mut Nothing);
    assert_eq!(around(&mut engine).len(), 1);
    assert_eq!(stats(&engine).bypassed_writes, 2);
}
