// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints what one 4 KiB block costs: zero test, checksum, copy with checksum. `cargo run --release
//! -p forebay --example ingest_bench`. Best of several rounds over 256 KiB, which the L2 cache holds.

use std::hint::black_box;
use std::time::Instant;

use forebay::ingest;

const BLOCK_BYTES: usize = 4096;
const BLOCK_COUNT: usize = 64;
const TURN_COUNT: usize = 2_000;
const ROUND_COUNT: usize = 9;

fn measure(name: &str, mut each: impl FnMut(usize)) {
    let mut best = f64::MAX;
    for _ in 0..ROUND_COUNT {
        let start = Instant::now();
        for _ in 0..TURN_COUNT {
            (0..BLOCK_COUNT).for_each(&mut each);
        }
        let nanos = start.elapsed().as_nanos() as f64 / (TURN_COUNT * BLOCK_COUNT) as f64;
        best = best.min(nanos);
    }
    println!("{name:32} {best:8.1} ns per 4 KiB {:8.1} GB/s", BLOCK_BYTES as f64 / best);
}

fn main() {
    let zeros = vec![0u8; BLOCK_BYTES * BLOCK_COUNT];
    let full: Vec<u8> = (0..zeros.len()).map(|i| (i * 31 % 255) as u8 + 1).collect();
    let mut target = zeros.clone();
    let block = |index: usize| index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES;

    measure("is_zero, all zeros", |index| {
        black_box(ingest::is_zero(black_box(&zeros[block(index)])));
    });
    measure("is_zero, not zeros", |index| {
        black_box(ingest::is_zero(black_box(&full[block(index)])));
    });
    measure("crc32c", |index| {
        black_box(ingest::crc32c(black_box(&full[block(index)])));
    });
    measure("copy_checksum", |index| {
        let source = black_box(&full[block(index)]);
        black_box(ingest::copy_checksum(&mut target[block(index)], source));
    });
    measure("copy alone", |index| {
        target[block(index)].copy_from_slice(black_box(&full[block(index)]));
        black_box(&mut target);
    });
}
