// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The models' figures beside the published ones: `cargo run --release -p forebay-disk --example figures`

#[path = "support/load.rs"]
mod load;

use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, GP3, NVME, SSD_840PRO, ST3500641AS};
use forebay_disk::{Kind, Model};
use load::{Order, Pattern, closed_loop, size_bytes};

fn random(kind: Kind, depth: usize) -> Pattern {
    Pattern { kind, bytes: 4096, depth, order: Order::Random, count: 20_000, span: None, at: 0 }
}

fn sequential(kind: Kind, at: u64) -> Pattern {
    let order = Order::Sequential;
    Pattern { kind, bytes: 1 << 20, depth: 4, order, count: 1_000, span: None, at }
}

fn row(name: &str, what: &str, measured: f64, published: Option<f64>) {
    let published = published.map_or("-".into(), |it| format!("{it}"));
    println!("{name:12} {what:42} {measured:10.1} {published:>10}");
}

fn main() {
    println!("{:12} {:42} {:>10} {:>10}", "model", "figure", "model", "published");
    let disks = [
        ("st3500641as", ST3500641AS, [66.0, 36.0, 65.0, 172.0, 62.0, 164.0, 235.0, 270.0]),
        ("7200.12", BARRACUDA_7200_12, [124.0, 62.0, 79.0, 217.0, 74.0, 196.0, 281.0, 331.0]),
    ];
    for (name, spec, published) in disks {
        let bare = Model::Hdd(spec).write_cache(false);
        let inner = size_bytes(bare) - (2 << 30);
        let window = |cache_count| Model::Hdd(Spec { cache_count, ..spec });
        let measured = [
            ("sequential outer, MB/s", closed_loop(bare, sequential(Kind::Read, 0)).megabytes()),
            (
                "sequential inner, MB/s",
                closed_loop(bare, sequential(Kind::Read, inner)).megabytes(),
            ),
            (
                "4 KiB random reads QD 1, IOPS",
                closed_loop(bare, random(Kind::Read, 1)).per_second(),
            ),
            (
                "4 KiB random reads QD 32, IOPS",
                closed_loop(bare, random(Kind::Read, 32)).per_second(),
            ),
            (
                "4 KiB random writes QD 1, IOPS",
                closed_loop(bare, random(Kind::Write, 1)).per_second(),
            ),
            (
                "4 KiB random writes QD 32, IOPS",
                closed_loop(bare, random(Kind::Write, 32)).per_second(),
            ),
            (
                "the same, write cache of 128",
                closed_loop(window(128), random(Kind::Write, 32)).per_second(),
            ),
            (
                "the same, write cache of 256",
                closed_loop(window(256), random(Kind::Write, 32)).per_second(),
            ),
        ];
        for ((what, measured), published) in measured.into_iter().zip(published) {
            row(name, what, measured, Some(published));
        }
    }
    let bare = Model::Hdd(BARRACUDA_7200_12).write_cache(false);
    println!(
        "\n7200.12, N random 4 KiB writes, ms each: unsorted NCQ-32, sorted QD 1, sorted NCQ-32 (published)"
    );
    let spans = [
        (
            "whole disk",
            None,
            [[5.31, 5.66, 3.37], [5.16, 5.44, 2.34], [5.12, 5.35, 2.00], [5.14, 5.22, 1.68]],
        ),
        (
            "1 %",
            Some(5_300_000_000),
            [[1.90, 0.0, 1.77], [1.87, 0.0, 1.44], [1.84, 0.0, 1.18], [1.87, 0.0, 0.66]],
        ),
    ];
    for (span_name, span, published) in spans {
        for (count, published) in [512, 4096, 16_384, 65_536].into_iter().zip(published) {
            let took = |order, depth| {
                let kind = Kind::Write;
                closed_loop(bare, Pattern { kind, bytes: 4096, depth, order, count, span, at: 0 })
                    .millis()
            };
            println!(
                "{span_name:12} {count:6}   {:5.2} ({:.2})   {:5.2} ({:.2})   {:5.2} ({:.2})",
                took(Order::Random, 32),
                published[0],
                took(Order::Sorted, 1),
                published[1],
                took(Order::Sorted, 32),
                published[2]
            );
        }
    }
    println!();
    let ssd = Model::Ssd(SSD_840PRO);
    let deep = |bytes, order, kind| Pattern {
        kind,
        bytes,
        depth: 32,
        order,
        count: 20_000,
        span: None,
        at: 0,
    };
    row(
        "840pro",
        "512 KiB writes, MB/s",
        closed_loop(ssd, deep(512 << 10, Order::Sequential, Kind::Write)).megabytes(),
        Some(268.3),
    );
    row(
        "840pro",
        "4 KiB random writes QD 32, MB/s",
        closed_loop(ssd, deep(4096, Order::Random, Kind::Write)).megabytes(),
        Some(201.1),
    );
    let nvme = Model::Ssd(NVME);
    row(
        "nvme",
        "1 MiB writes, MB/s",
        closed_loop(nvme, deep(1 << 20, Order::Sequential, Kind::Write)).megabytes(),
        Some(2000.0),
    );
    row(
        "nvme",
        "4 KiB random reads QD 1, IOPS",
        closed_loop(nvme, random(Kind::Read, 1)).per_second(),
        None,
    );
    let gp3 = Model::Cloud(GP3);
    row(
        "gp3",
        "4 KiB random writes QD 32, IOPS",
        closed_loop(gp3, random(Kind::Write, 32)).per_second(),
        Some(3000.0),
    );
    row(
        "gp3",
        "256 KiB writes QD 32, MB/s",
        closed_loop(gp3, deep(256 << 10, Order::Sequential, Kind::Write)).megabytes(),
        Some(131.0),
    );
    row(
        "gp3",
        "4 KiB random reads QD 1, IOPS",
        closed_loop(gp3, random(Kind::Read, 1)).per_second(),
        None,
    );
}
