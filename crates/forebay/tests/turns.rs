// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What one turn of the loop does at most.

use crate::support::{self, Rig};
use forebay::io::{MemoryDevice, ReactorKind};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const READS: usize = 8;

/// A disk that answers many long reads at one time had nothing to do until the last of them was verified, and nor had the guest. So a turn
/// verifies about as much as one of them has; and the next turn, whose work is there already, waits for nothing.
#[test]
fn a_turn_verifies_half_a_mebibyte_and_the_next_goes_on() {
    let cache = Box::new(MemoryDevice::new(64 << 20, 512).unwrap());
    let options = support::options(ReactorKind::Auto, Config::default());
    let mut rig = Rig::new(cache, &options, READS * MIB);
    let backing = Box::new(MemoryDevice::new(64 << 20, 512).unwrap());
    let volume = rig.add("v", Mode::WriteBack, backing);
    rig.memory
        .whole()
        .copy_in(&(0..READS * MIB).map(|at| (at / MIB) as u8 + 1).collect::<Vec<_>>());
    for slot in 0..READS {
        let span = Some(rig.span(slot, MIB));
        let offset = (slot * MIB) as u64;
        rig.request(volume, Op::Write { fua: false }, offset, MIB as u64, span).unwrap();
    }
    rig.request(volume, Op::Flush, 0, 0, None).unwrap();
    rig.memory.whole().fill_zero();

    for slot in 0..READS {
        let span = Some(rig.span(slot, MIB));
        let (offset, length) = ((slot * MIB) as u64, MIB as u64);
        rig.shard.submit(volume, Op::Read, offset, length, span, slot as u64).unwrap();
    }
    let (begun, mut answered, mut turns) = (Instant::now(), 0, 0);
    while answered < READS {
        let before = answered;
        rig.turn(Duration::from_secs(60), |answer| {
            assert_eq!(answer.result, Ok(()));
            answered += 1;
        });
        assert!(answered - before <= 2, "{} answers of one turn", answered - before);
        turns += 1;
    }
    assert!(turns >= READS, "{turns} turns");
    assert!(begun.elapsed() < Duration::from_secs(60), "a turn waited with work at hand");
    for slot in 0..READS {
        let mut bytes = vec![0; MIB];
        rig.span(slot, MIB).copy_out(&mut bytes);
        assert!(bytes.iter().all(|byte| *byte == slot as u8 + 1), "read {slot}");
    }
    rig.close();
}
