// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The models' figures beside the published ones: `cargo run --release -p forebay-disk --example figures`. `bench/experiments` prints them
//! before its tables; `tests/published.rs` holds the models to them.

#[path = "support/load.rs"]
mod load;

use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, GP3, NVME, SSD_840PRO, ST3500641AS};
use forebay_disk::{Kind, Model};
use load::{Order, Pattern, closed_loop, flushed_writes, services, size_bytes};

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

/// What nobody has published: in brackets, what the model was given.
fn assumed(name: &str, what: &str, measured: f64, given: f64) {
    println!("{name:12} {what:42} {measured:10.3} {:>10}", format!("({given})"));
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
            [
                [Some(5.31), Some(5.66), Some(3.37)],
                [Some(5.16), Some(5.44), Some(2.34)],
                [Some(5.12), Some(5.35), Some(2.00)],
                [Some(5.14), Some(5.22), Some(1.68)],
            ],
        ),
        (
            "1 %",
            Some(5_300_000_000),
            [
                [Some(1.90), None, Some(1.77)],
                [Some(1.87), None, Some(1.44)],
                [Some(1.84), None, Some(1.18)],
                [Some(1.87), None, Some(0.66)],
            ],
        ),
    ];
    for (span_name, span, published) in spans {
        for (count, published) in [512, 4096, 16_384, 65_536].into_iter().zip(published) {
            let took = |order, depth| {
                let kind = Kind::Write;
                closed_loop(bare, Pattern { kind, bytes: 4096, depth, order, count, span, at: 0 })
                    .millis()
            };
            let cells = [(Order::Random, 32), (Order::Sorted, 1), (Order::Sorted, 32)];
            print!("{span_name:12} {count:6}");
            for ((order, depth), published) in cells.into_iter().zip(published) {
                let published = published.map_or("-".into(), |it| format!("{it:.2}"));
                print!("   {:5.2} {:6}", took(order, depth), format!("({published})"));
            }
            println!();
        }
    }
    println!();
    ssds();
    println!();
    cloud_volume();
}

fn deep(bytes: u64, order: Order, kind: Kind) -> Pattern {
    Pattern { kind, bytes, depth: 32, order, count: 20_000, span: None, at: 0 }
}

fn megabytes(name: &str, what: &str, model: Model, pattern: Pattern, published: Option<f64>) {
    row(name, what, closed_loop(model, pattern).megabytes(), published);
}

fn operations(name: &str, what: &str, model: Model, pattern: Pattern, published: Option<f64>) {
    row(name, what, closed_loop(model, pattern).per_second(), published);
}

fn ssds() {
    let each = [
        ("840pro", SSD_840PRO, 512 << 10, [268.3, 268.3], Some(201.1)),
        ("nvme", NVME, 1 << 20, [3_000.0, 2_000.0], None),
    ];
    for (name, spec, bytes, [reads, writes], small) in each {
        let model = Model::Ssd(spec);
        let long = |what: &str| format!("{} KiB {what}, MB/s", bytes >> 10);
        let along = |kind| deep(bytes, Order::Sequential, kind);
        megabytes(name, &long("reads"), model, along(Kind::Read), Some(reads));
        megabytes(name, &long("writes"), model, along(Kind::Write), Some(writes));
        let at_random = |kind| deep(4096, Order::Random, kind);
        megabytes(name, "4 KiB random reads QD 32, MB/s", model, at_random(Kind::Read), small);
        megabytes(name, "4 KiB random writes QD 32, MB/s", model, at_random(Kind::Write), small);
        operations(name, "4 KiB random reads QD 1, IOPS", model, random(Kind::Read, 1), None);
        operations(name, "4 KiB random writes QD 1, IOPS", model, random(Kind::Write, 1), None);
        row(name, "the same, each flushed, IOPS", flushed_writes(model), None);
        let flush = services(model, Kind::Flush, 1, 0)[0];
        assumed(name, "a flush, ms", flush as f64 / 1e6, spec.flush as f64 / 1e6);
    }
}

fn cloud_volume() {
    let gp3 = Model::Cloud(GP3);
    let along = deep(256 << 10, Order::Sequential, Kind::Write);
    operations(
        "gp3",
        "4 KiB random writes QD 32, IOPS",
        gp3,
        random(Kind::Write, 32),
        Some(3000.0),
    );
    megabytes("gp3", "256 KiB writes QD 32, MB/s", gp3, along, Some(131.0));
    operations("gp3", "4 KiB random reads QD 1, IOPS", gp3, random(Kind::Read, 1), None);
    // 100 ms apart none waits for another.
    let took = services(gp3, Kind::Read, 40_000, 100_000_000);
    let [half, p99] = [took[20_000], took[39_600]].map(|it| it as f64 / 1e6);
    assumed("gp3", "4 KiB reads, median, ms", half, GP3.median as f64 / 1e6);
    assumed("gp3", "4 KiB reads, p99, ms", p99, GP3.p99 as f64 / 1e6);
}
