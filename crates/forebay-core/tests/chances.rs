// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Second chances at the tail: what was read is appended again, but no more than a quarter of each segment.

use crate::support;
use forebay_core::blank::{Nothing, VOLUME};
use forebay_core::effect::Effect;
use forebay_core::engine::Engine;
use forebay_core::request::{Op, Request};
use forebay_core::stats::Stats;
use forebay_core::units::{BLOCK_BYTES, Tick};

const SEGMENT_BYTES: u32 = 64 << 10;
/// Of a segment's 16 blocks; fewer than may be under way at once.
const QUARTER: u64 = 4;

/// One request, over devices that take no time.
fn ask(engine: &mut Engine, second: u64, op: Op, lba: u64) {
    engine.tick(Tick(second * 1_000_000_000), second * 1_000, &mut Nothing);
    let request =
        Request { volume: VOLUME, op, offset: lba * BLOCK_BYTES, length: BLOCK_BYTES, tag: 1 };
    engine.submit(request, &mut Nothing).unwrap();
    let mut answered = false;
    while let Some(effect) = engine.next_effect() {
        if let Effect::Answer { result, .. } = effect {
            result.unwrap();
            answered = true;
        }
        if let Some(token) = effect.token() {
            engine.complete(token, Ok(()), &mut Nothing);
        }
    }
    assert!(answered, "nothing takes time");
}

fn stats(engine: &Engine) -> Stats {
    engine.status(VOLUME).unwrap().stats
}

/// The log goes round several times, and all that is in it was read: each segment keeps a quarter, so that writing on frees the rest.
#[test]
fn a_quarter_of_a_segment_gets_a_second_chance() {
    let mut engine = support::engine(1, 1 << 30, 8 << 20, SEGMENT_BYTES, 16);
    for lba in 0..20_000 {
        ask(&mut engine, lba, Op::Write { fua: false }, lba);
        ask(&mut engine, lba, Op::Read, lba.saturating_sub(100));
        let Stats { second_chances, reclaimed_segments, .. } = stats(&engine);
        // The oldest one's may be through before it is empty.
        assert!(
            second_chances <= QUARTER * (reclaimed_segments + 1),
            "{second_chances} chances from {reclaimed_segments} segments"
        );
    }
    let Stats { second_chances, reclaimed_segments, miss_blocks, .. } = stats(&engine);
    assert!(reclaimed_segments > 1_000, "{reclaimed_segments}");
    assert_eq!(miss_blocks, 0, "what is read is in the log");
    // All of it deserved one, so each segment gives what it may.
    let least = (QUARTER - 1) * reclaimed_segments;
    assert!(second_chances > least, "{second_chances} chances from {reclaimed_segments} segments");
}
