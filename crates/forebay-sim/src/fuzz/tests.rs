// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every body, by seed: what libFuzzer would find quickly is found here in every test.

use super::{checkpoint, entry, record, recovery, superblock};
use crate::random::Random;

/// Bytes that are mostly zeros and small numbers, as the fields are.
fn bytes(random: &mut Random, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for _ in 0..random.between(1, 200) {
        let at = random.below(length as u64) as usize;
        bytes[at] = *random.pick(&[1, 2, 4, 12, 127, 128, 255, 0]);
        if random.one_in(2) {
            bytes[at] = random.next() as u8;
        }
    }
    bytes
}

#[test]
fn entries_of_any_bytes() {
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        entry::fuzz_entry(&bytes(&mut random, 20));
    }
}

#[test]
fn records_of_any_bytes() {
    for seed in 0..5_000 {
        let mut random = Random::new(seed);
        let length = *random.pick(&[4096, 260, 100, 5000]);
        record::fuzz_record(&bytes(&mut random, length));
    }
}

#[test]
fn superblocks_of_any_bytes() {
    let good = crate::setup::format(16, 64 << 10, &[], 3).encode(0);
    for seed in 0..500 {
        let mut random = Random::new(seed);
        let mut bytes = bytes(&mut random, 5_000);
        if random.one_in(2) {
            // A good one with a few changes.
            let changes = std::mem::replace(&mut bytes, good.clone());
            for _ in 0..random.between(1, 4) {
                let at = random.below(changes.len() as u64) as usize;
                bytes[at % 1300] = changes[at];
            }
        }
        superblock::fuzz_superblock(&bytes);
    }
}

#[test]
fn logs_of_any_records() {
    for seed in 0..3_000_u64 {
        recovery::fuzz_recovery(&seed.to_le_bytes());
    }
}

#[test]
fn checkpoints_of_any_pages() {
    let used = (0..3_000_u64).filter(|seed| checkpoint::fuzz_checkpoint(&seed.to_le_bytes()));
    let used = used.count();
    assert!(used > 100, "{used} of 3,000 were used");
}
