// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a power cut could take from a guest that flushes nothing.
//!
//! A guest writes faster than the cache device does, into a cache that is full of clean data: then segments are given up all the time, which
//! is to be noted for good. Each note moved what was waited for, so nothing was flushed until the pool ran dry: in a cache of 64 GiB 2.5 GiB
//! were not durable, where 256 MiB are promised.

use forebay_disk::Model;
use forebay_disk::model::{BARRACUDA_7200_12, NVME, SSD_840PRO};
use forebay_experiment::experiments::{SECOND, cached, ordered};
use forebay_experiment::load::WRITE;
use forebay_experiment::machine::Machine;

const MIB: u64 = 1 << 20;
const CACHE_BYTES: u64 = 8 << 30;
const SPAN: u64 = 64 << 30;
const DEPTH: usize = 64;
/// `Config::durable_bytes`.
const PROMISED: u64 = 256 * MIB;

/// Writes so much in a row.
fn write(machine: &mut Machine, first: u64, bytes: u64) {
    let mut under_way = 0;
    for at in (first..first + bytes).step_by(MIB as usize) {
        machine.submit(WRITE, at % SPAN, MIB);
        under_way += 1;
        while under_way >= DEPTH {
            under_way -= machine.step(u64::MAX).map_or(0, |answers| answers.len());
        }
    }
    while under_way > 0 {
        under_way -= machine.step(u64::MAX).map_or(0, |answers| answers.len());
    }
}

/// The most that was not durable, in bytes.
fn most_undurable(cache: Model) -> u64 {
    let mut setup = cached(ordered(BARRACUDA_7200_12), SPAN, CACHE_BYTES);
    setup.cache = Some((cache, CACHE_BYTES));
    let mut machine = Machine::new(&setup);
    // Full of what is clean.
    for round in 0..5 {
        write(&mut machine, round * 1800 * MIB, 1800 * MIB);
        machine.drain();
        machine.undrain();
        let until = machine.now() + SECOND;
        machine.idle(until);
    }
    let (begun, mut under_way, mut most) = (machine.now(), 0, 0);
    let mut at = 0;
    while machine.now() < begun + 6 * SECOND {
        while under_way < DEPTH {
            // Neighbours of nothing.
            at = (at + 7919 * MIB) % SPAN;
            machine.submit(WRITE, at, MIB);
            under_way += 1;
        }
        under_way -= machine.step(u64::MAX).map_or(0, |answers| answers.len());
        most = most.max(machine.undurable_blocks() * 4096);
    }
    most
}

#[test]
fn a_guest_that_never_flushes_has_little_to_lose_however_fast_it_writes() {
    for (name, cache) in [("nvme", Model::Ssd(NVME)), ("840pro", Model::Ssd(SSD_840PRO))] {
        let most = most_undurable(cache);
        println!("{name}: at most {} MiB were not durable", most / MIB);
        assert!(most < PROMISED, "{name}: {} MiB", most / MIB);
    }
}
