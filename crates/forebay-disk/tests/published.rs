// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The models against the figures that they were made for.

#[path = "../examples/support/load.rs"]
mod load;

use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, GP3, SSD_840PRO, ST3500641AS};
use forebay_disk::{Kind, Model};
use load::{Order, Pattern, closed_loop};

fn uncached(spec: Spec) -> Model {
    Model::Hdd(spec).write_cache(false)
}

#[track_caller]
fn within(percent: f64, measured: f64, published: f64) {
    let off = (measured / published - 1.0) * 100.0;
    assert!(off.abs() <= percent, "{measured:.2}, published {published}: off by {off:.1} %");
}

fn random(kind: Kind, depth: usize) -> Pattern {
    Pattern { kind, bytes: 4096, depth, order: Order::Random, count: 6_000, span: None, at: 0 }
}

#[test]
fn hard_disks_do_random_reads_and_writes_as_published() {
    let published = [
        (ST3500641AS, [65.0, 172.0, 62.0, 164.0]),
        (BARRACUDA_7200_12, [79.0, 217.0, 74.0, 196.0]),
    ];
    for (spec, rates) in published {
        let measured = |kind, depth| closed_loop(uncached(spec), random(kind, depth)).per_second();
        within(6.0, measured(Kind::Read, 1), rates[0]);
        within(6.0, measured(Kind::Read, 32), rates[1]);
        within(6.0, measured(Kind::Write, 1), rates[2]);
        within(6.0, measured(Kind::Write, 32), rates[3]);
    }
}

#[test]
fn hard_disks_stream_as_published() {
    for (spec, outer, inner) in [(ST3500641AS, 66.0, 36.0), (BARRACUDA_7200_12, 124.0, 62.0)] {
        let end = load::size_bytes(uncached(spec)) - (2 << 30);
        for (at, published) in [(0, outer), (end, inner)] {
            let (kind, order) = (Kind::Read, Order::Sequential);
            let pattern =
                Pattern { kind, bytes: 1 << 20, depth: 4, order, count: 300, span: None, at };
            within(3.0, closed_loop(uncached(spec), pattern).megabytes(), published);
            // One command at a time: the head reads on.
            let single = Pattern { depth: 1, ..pattern };
            within(3.0, closed_loop(uncached(spec), single).megabytes(), published);
        }
    }
}

#[test]
fn a_write_cache_orders_over_its_whole_window() {
    for (spec, published) in [(ST3500641AS, [235.0, 270.0]), (BARRACUDA_7200_12, [281.0, 331.0])] {
        for (cache_count, published) in [128, 256].into_iter().zip(published) {
            let model = Model::Hdd(Spec { cache_count, ..spec });
            within(5.0, closed_loop(model, random(Kind::Write, 32)).per_second(), published);
        }
    }
}

#[test]
fn sorting_gains_what_was_predicted() {
    // 4 KiB writes over the whole disk, milliseconds each: sorted one at a time, sorted 32 at a time.
    for (count, alone, deep) in [(4_096, 5.44, 2.34), (16_384, 5.35, 2.00)] {
        let sorted = |depth| {
            let (kind, order) = (Kind::Write, Order::Sorted);
            let pattern = Pattern { kind, bytes: 4096, depth, order, count, span: None, at: 0 };
            closed_loop(uncached(BARRACUDA_7200_12), pattern).millis()
        };
        within(5.0, sorted(1), alone);
        within(5.0, sorted(32), deep);
    }
}

#[test]
fn the_ssd_and_the_cloud_volume_keep_their_rates() {
    let order = Order::Sequential;
    let write = |bytes| Pattern {
        kind: Kind::Write,
        bytes,
        depth: 32,
        order,
        count: 5_000,
        span: None,
        at: 0,
    };
    let ssd = Model::Ssd(SSD_840PRO);
    within(2.0, closed_loop(ssd, write(512 << 10)).megabytes(), 268.3);
    within(2.0, closed_loop(ssd, write(4096)).megabytes(), 201.1);
    let gp3 = Model::Cloud(GP3);
    within(8.0, closed_loop(gp3, write(4096)).per_second(), 3_000.0);
    within(2.0, closed_loop(gp3, write(256 << 10)).megabytes(), 131.1);
}
