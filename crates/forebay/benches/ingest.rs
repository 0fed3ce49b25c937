// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What one 4 KiB block costs in an L2 cache: zero test, checksum, copy with a checksum, a copy alone.
//! `cargo bench -p forebay --bench ingest`. The zero test is to be at least as fast as an L2 cache brings the bytes.

#![allow(clippy::unwrap_used)]

mod support;

use forebay::io::{Arena, Span};
use serde_json::json;
use std::hint::black_box;
use std::time::Instant;
use support::{Median, bound, record, rounds, row};

const BLOCK_BYTES: usize = 4096;
/// More than an L1 cache holds, and less than an L2 cache of today.
const BLOCK_COUNT: usize = 64;
const TURN_COUNT: usize = 500;
/// Each round has so many turns of each, of which the fastest counts: others on the machine only make it slower.
const TRIES: usize = 8;
/// GB/s of zeros.
const AIM: f64 = 60.0;
const ZEROS: &str = "zero test, all zeros";

/// GB/s of what is done to all blocks, one after the other.
fn rate(each: &mut dyn FnMut()) -> f64 {
    let took = (0..TRIES).map(|_| {
        let begun = Instant::now();
        (0..TURN_COUNT).for_each(|_| each());
        begun.elapsed().as_nanos() as f64
    });
    let bytes = (TURN_COUNT * BLOCK_COUNT * BLOCK_BYTES) as f64;
    bytes / took.fold(f64::MAX, f64::min)
}

/// The result is wanted.
fn used<T>(result: T) {
    let _ = black_box(result);
}

/// Blocks as those of a guest's request lie.
struct Blocks(Arena);

impl Blocks {
    fn new(bytes: &[u8]) -> Blocks {
        let arena = Arena::anonymous(bytes.len()).unwrap();
        arena.span(0, bytes.len()).copy_in(bytes);
        Blocks(arena)
    }

    fn all(&self) -> impl Iterator<Item = Span> + use<'_> {
        (0..BLOCK_COUNT).map(|at| black_box(self.0.span(at * BLOCK_BYTES, BLOCK_BYTES)))
    }
}

fn main() -> std::process::ExitCode {
    let rounds = rounds();
    let bytes: Vec<u8> = (0..BLOCK_BYTES * BLOCK_COUNT).map(|i| (i * 31 % 255) as u8 + 1).collect();
    let zeros = Blocks::new(&vec![0; bytes.len()]);
    let (full, copies) = (Blocks::new(&bytes), Blocks::new(&bytes));
    type Each<'a> = (&'static str, Box<dyn FnMut() + 'a>);
    let mut all: Vec<Each<'_>> = vec![
        (ZEROS, Box::new(|| zeros.all().for_each(|it| used(it.is_zero())))),
        ("zero test, no zeros", Box::new(|| full.all().for_each(|it| used(it.is_zero())))),
        ("block checksum", Box::new(|| full.all().for_each(|it| used(it.block_checksum())))),
        (
            "copy with a block's checksum",
            Box::new(|| {
                let pairs = copies.all().zip(full.all());
                pairs.for_each(|(to, from)| used(to.copy_block(from)));
            }),
        ),
        (
            "copy alone",
            Box::new(|| copies.all().zip(full.all()).for_each(|(to, from)| to.copy_from(from))),
        ),
    ];
    let mut rates = vec![Vec::new(); all.len()];
    for _ in 0..rounds {
        for ((_, each), rates) in all.iter_mut().zip(&mut rates) {
            rates.push(rate(each));
        }
    }
    println!("blocks of 4 KiB, {} KiB of them, {rounds} rounds", BLOCK_COUNT * 4);
    let mut result = serde_json::Map::new();
    for ((name, _), rates) in all.iter().zip(rates) {
        let median = Median::of(rates);
        row(name, "GB/s", median);
        result.insert((*name).to_owned(), median.json());
    }
    let reached = result[ZEROS]["median"].as_f64().unwrap();
    result.insert("aim".into(), json!(AIM));
    record("ingest", "ingest-4KiB", "memory in an L2 cache", rounds, result.into());
    bound("zeros are tested in L2", reached, reached >= AIM, ">= 60");
    support::end()
}
