// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What guests of the cache notice of what forebay does on the cache device for itself. Virtual time: the same digits
//! on every machine, so they may be asserted.

use forebay_core::units::BLOCK_BYTES;
use forebay_disk::Model;
use forebay_disk::model::{BARRACUDA_7200_12, NVME, SSD_840PRO};
use forebay_experiment::experiments::quiet::{Doing, MIXED, READS, Row, row, setup};
use forebay_experiment::experiments::{SECOND, cached, ordered};
use forebay_experiment::load::{Ask, WRITE, run, shared};
use forebay_experiment::machine::{Machine, Setup};

const TIME: u64 = 20 * SECOND;

/// p99.9 of cached reads while forebay does this, over that of a quiet cache.
fn over_quiet(setup: &Setup, doing: Doing) -> f64 {
    let p999 = |row: Row| row.latencies[0][2];
    let row_of = |doing| row(setup, READS, doing, TIME);
    let busy = row_of(doing);
    assert!(busy.done > 0, "{doing:?}: {busy:?}");
    p999(busy) / p999(row_of(Doing::Nothing))
}

#[test]
fn cached_reads_take_at_most_twice_as_long_at_worst() {
    for spec in [SSD_840PRO, NVME] {
        let setup = setup(Model::Ssd(spec));
        for doing in [Doing::Scrub, Doing::WriteBack, Doing::Fills, Doing::Checkpoint] {
            let ratio = over_quiet(&setup, doing);
            assert!(ratio <= 2.0, "{doing:?}: {ratio:.2}");
        }
    }
}

/// The same where guests write, too: their reads, and their writes that wait until they are durable.
#[test]
fn nor_do_reads_and_durable_writes_beside_writes() {
    for spec in [SSD_840PRO, NVME] {
        let setup = setup(Model::Ssd(spec));
        let quiet = row(&setup, MIXED, Doing::Nothing, TIME);
        for doing in
            [Doing::Scrub, Doing::WriteBack, Doing::Reclaim, Doing::Fills, Doing::Checkpoint]
        {
            let busy = row(&setup, MIXED, doing, TIME);
            assert!(busy.done > 0, "{busy:?}");
            for class in [0, 2] {
                let ratio = busy.latencies[class][2] / quiet.latencies[class][2];
                assert!(ratio <= 2.0, "{doing:?}, class {class}: {ratio:.2}");
            }
        }
    }
}

/// The bound bites: with pages of 128 KiB it is more.
#[test]
fn a_checkpoint_in_larger_writes_would_show() {
    let mut setup = setup(Model::Ssd(SSD_840PRO));
    setup.config.checkpoint_frames = 32;
    assert!(over_quiet(&setup, Doing::Checkpoint) > 4.0);
}

/// Scrubs read as much a second as they may, and no more.
#[test]
fn a_scrub_keeps_to_its_rate() {
    const MIB: u64 = 1 << 20;
    for rate in [4 * MIB, 16 * MIB, 64 * MIB] {
        let mut setup = cached(ordered(BARRACUDA_7200_12), 1024 * MIB, 512 * MIB);
        setup.config.scrub_rate = rate;
        let mut machine = Machine::new(&setup);
        let ask = |at| Ask { op: WRITE, offset: at * MIB, length: MIB };
        run(&mut machine, shared(0, 4, (0..384).map(ask).collect()), u64::MAX);
        machine.drain();
        machine.scrub();
        let mut read_after = |seconds| {
            machine.idle(machine.now() + seconds * SECOND);
            machine.scrubbed_blocks() * BLOCK_BYTES
        };
        let before = read_after(1);
        let read = (read_after(3) - before) as f64 / 3.0 / rate as f64;
        assert!((0.95..=1.01).contains(&read), "{read:.3} of {} MiB a second", rate / MIB);
    }
}
