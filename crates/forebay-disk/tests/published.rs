// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The models against the figures that they were made for.

#[path = "../examples/support/load.rs"]
mod load;

use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, GP3, NVME, SSD_840PRO, ST3500641AS};
use forebay_disk::{Command, Kind, Model, cloud};
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

fn stream(kind: Kind, bytes: u64) -> Pattern {
    let order = Order::Sequential;
    Pattern { kind, bytes, depth: 32, order, count: 20_000, span: None, at: 0 }
}

#[test]
fn ssds_keep_their_rates() {
    use Kind::{Read, Write};
    let old = Model::Ssd(SSD_840PRO);
    for kind in [Read, Write] {
        within(2.0, closed_loop(old, stream(kind, 512 << 10)).megabytes(), 268.3);
        within(2.0, closed_loop(old, random(kind, 32)).megabytes(), 201.1);
    }
    within(1.0, closed_loop(old, random(Read, 1)).per_second(), 12_440.0);
    within(1.0, closed_loop(old, random(Write, 1)).per_second(), 22_040.0);
    let new = Model::Ssd(NVME);
    within(1.0, closed_loop(new, stream(Read, 1 << 20)).megabytes(), 3_000.0);
    within(1.0, closed_loop(new, stream(Write, 1 << 20)).megabytes(), 2_000.0);
    within(1.0, closed_loop(new, random(Read, 1)).per_second(), 13_820.0);
    within(1.0, closed_loop(new, random(Read, 32)).per_second(), 422_800.0);
    within(1.0, closed_loop(new, random(Write, 1)).per_second(), 55_400.0);
    within(1.0, closed_loop(new, random(Write, 32)).per_second(), 328_100.0);
}

/// When each of some commands is done that come at once, in this order: writes of 4 KiB and flushes.
fn done_of(model: Model, kinds: &[Kind]) -> Vec<u64> {
    let mut disk = model.disk();
    for (id, kind) in kinds.iter().enumerate() {
        let bytes = if *kind == Kind::Flush { 0 } else { 4096 };
        disk.submit(0, Command { id: id as u64, kind: *kind, offset: id as u64 * bytes, bytes });
    }
    let mut done = Vec::new();
    disk.advance(u64::MAX, &mut done);
    done.sort_by_key(|done| done.id);
    done.iter().map(|done| done.at).collect()
}

/// A flush takes its own time, from when all that came before it is done: another flush as well.
#[test]
fn a_flush_costs_an_ssd_its_time_after_what_came_before() {
    use Kind::{Flush, Write};
    for (spec, cost, flushed) in [(SSD_840PRO, 2_000_000, 489.0), (NVME, 30_000, 20_800.0)] {
        let model = Model::Ssd(spec);
        assert_eq!(done_of(model, &[Flush]), [cost]);
        assert_eq!(done_of(model, &[Flush, Flush]), [cost, 2 * cost]);
        let all = [[Write; 32].as_slice(), &[Flush]].concat();
        let done = done_of(model, &all);
        assert_eq!(done[32], done[31] + cost, "the 32 writes before it are done");
        within(1.0, load::flushed_writes(model), flushed);
    }
}

/// Half of all requests that find the volume idle take less than 0.8 ms, one in a hundred more than 4 ms: reads, writes, and flushes.
#[test]
fn a_cloud_volume_takes_what_it_takes_whatever_it_is_asked() {
    for kind in [Kind::Read, Kind::Write, Kind::Flush] {
        // 100 ms apart: none waits for another.
        let took = load::services(Model::Cloud(GP3), kind, 40_000, 100_000_000);
        within(2.0, took[took.len() / 2] as f64, 800_000.0);
        within(5.0, took[took.len() / 100 * 99] as f64, 4_000_000.0);
    }
    // One that waits for each has 1 / mean of them; the mean of a log-normal is more than its median.
    within(2.0, closed_loop(Model::Cloud(GP3), random(Kind::Read, 1)).per_second(), 983.0);
}

/// Operations and bytes a second are bounded each by itself, and which of them is less decides.
#[test]
fn a_cloud_volume_has_two_bounds() {
    let gp3 = Model::Cloud(GP3);
    for kind in [Kind::Read, Kind::Write] {
        within(1.0, closed_loop(gp3, stream(kind, 4096)).per_second(), 3_000.0);
        within(1.0, closed_loop(gp3, stream(kind, 32 << 10)).per_second(), 3_000.0);
        // From 42.7 KiB on it is bytes.
        within(1.0, closed_loop(gp3, stream(kind, 64 << 10)).megabytes(), 131.07);
        within(1.0, closed_loop(gp3, stream(kind, 256 << 10)).megabytes(), 131.07);
        within(1.0, closed_loop(gp3, stream(kind, 1 << 20)).megabytes(), 131.07);
    }
    // Without a bound of bytes it shows that more than 256 KiB are several operations.
    let wide = Model::Cloud(cloud::Spec { bytes: 1 << 40, ..GP3 });
    within(1.0, closed_loop(wide, stream(Kind::Read, 256 << 10)).per_second(), 3_000.0);
    within(1.0, closed_loop(wide, stream(Kind::Read, 1 << 20)).per_second(), 750.0);
}

/// A volume that was idle has a tenth of a second's operations and bytes at once, however long it was; then it has its rate.
#[test]
fn a_cloud_volume_saves_up_for_a_tenth_of_a_second() {
    // All take the same, so that when each was let go can be told.
    let even = Model::Cloud(cloud::Spec { p99: GP3.median, ..GP3 });
    let late = |idle, bytes, count| {
        let mut disk = even.disk();
        for id in 0..count {
            disk.submit(idle, Command { id, kind: Kind::Read, offset: 0, bytes });
        }
        let mut done = Vec::new();
        disk.advance(u64::MAX, &mut done);
        done.sort_by_key(|done| done.at);
        let at_once = done.iter().filter(|done| done.at - idle <= GP3.median + 1_000).count();
        (at_once as f64, (done[done.len() - 1].at - idle - GP3.median) as f64)
    };
    const SECOND: u64 = 1_000_000_000;
    for idle in [SECOND / 10, SECOND, 1_000 * SECOND] {
        let (at_once, last) = late(idle, 4096, 3_300);
        within(1.0, at_once, 300.0);
        within(1.0, last, 1e9);
        // 12.5 MiB are 50 times 256 KiB.
        let (at_once, last) = late(idle, 256 << 10, 550);
        within(1.0, at_once, 50.0);
        within(1.0, last, 1e9);
    }
    // What has just begun has saved nothing.
    let (at_once, last) = late(0, 4096, 3_000);
    assert!(at_once <= 1.0, "{at_once}");
    within(1.0, last, 1e9);
}
