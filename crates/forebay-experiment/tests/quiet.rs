// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What guests of the cache notice of what forebay does on the cache device for itself. Virtual time: the same digits
//! on every machine, so they may be asserted.

use forebay_disk::Model;
use forebay_disk::model::{NVME, SSD_840PRO};
use forebay_experiment::experiments::SECOND;
use forebay_experiment::experiments::quiet::{Doing, MIXED, READS, Row, row, setup};
use forebay_experiment::machine::Setup;

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
