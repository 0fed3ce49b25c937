// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints tables: `forebay-experiment [drained|fair|misses|quiet|records|shares]...`, all without a name.

use forebay_core::format::superblock::Order;
use forebay_disk::Model;
use forebay_disk::model::{BARRACUDA_7200_12, NVME, SSD_840PRO};
use forebay_experiment::experiments::{SECOND, drained, fair, misses, quiet, records};
use std::process::ExitCode;

const NAMES: [&str; 6] = ["drained", "fair", "misses", "quiet", "records", "shares"];

fn main() -> ExitCode {
    let mut wanted: Vec<String> = std::env::args().skip(1).collect();
    if let Some(unknown) = wanted.iter().find(|name| !NAMES.contains(&name.as_str())) {
        eprintln!("{unknown}: known experiments are {}", NAMES.join(", "));
        return ExitCode::from(2);
    }
    if wanted.is_empty() {
        wanted = NAMES.map(String::from).to_vec();
    }
    for name in wanted {
        match name.as_str() {
            "drained" => print_drained(),
            "fair" => print_fair(),
            "misses" => {
                if let Err(error) = print_misses() {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            }
            "quiet" => print_quiet(),
            "records" => print_records(),
            _ => print_shares(),
        }
        println!();
    }
    ExitCode::SUCCESS
}

fn print_drained() {
    println!("64 MiB of random 4 KiB writes, 32 at a time, then drained; seconds");
    println!(
        "{:12} {:7} {:20} {:>9} {:>9} {:>9} {:>9} {:>7}",
        "disk", "over", "through", "answered", "drained", "total", "ms/block", "batch"
    );
    for row in drained::table() {
        println!(
            "{:12} {:7} {:20} {:9.2} {:9.2} {:9.2} {:9.3} {:7}",
            row.disk,
            row.span,
            row.through,
            row.answered,
            row.drained,
            row.total(),
            row.millis(drained::BLOCKS),
            row.batch_blocks
        );
    }
}

fn print_fair() {
    println!(
        "random 4 KiB readers against 32 random 4 KiB writers, cache full of dirty data; requests a second"
    );
    println!(
        "{:12} {:>7} {:>8} {:>9} {:>8} {:>9} {:>5} {:>5} {:>5} {:>5} {:>9} {:>9}",
        "disk",
        "readers",
        "r alone",
        "w alone",
        "r both",
        "w both",
        "x_r",
        "x_w",
        "F",
        "U",
        "r p99 ms",
        "w p99 ms"
    );
    for (disk, model) in fair::disks() {
        for row in fair::table(model) {
            let [reads, writes] = row.shares();
            println!(
                "{disk:12} {:7} {:8.1} {:9.1} {:8.1} {:9.1} {reads:5.2} {writes:5.2} {:5.2} {:5.2} {:9.0} {:9.0}",
                row.readers,
                row.alone[0],
                row.alone[1],
                row.together[0],
                row.together[1],
                row.fairness(),
                row.efficiency(),
                row.read_p99[1],
                row.write_p99
            );
        }
    }
}

fn print_shares() {
    println!("the same with weights of guests: shares of the device, reads over writes");
    println!(
        "{:12} {:>7} {:>6} {:>7} {:>7} {:>7} {:>5} {:>9}",
        "disk", "readers", "weight", "by time", "by rate", "x_r", "x_w", "r p99 ms"
    );
    for (disk, model, _) in fair::shared() {
        for row in fair::weighted(model) {
            println!(
                "{disk:12} {:7} {:6} {:7.2} {:7.2} {:7.2} {:5.2} {:9.0}",
                row.readers,
                row.weight,
                row.by_time(),
                row.by_rate(),
                row.device_share(),
                row.shares()[1],
                row.read_p99[1]
            );
        }
    }
    println!();
    println!(
        "the same with a target for reads, in ms; late: of reads of the device that shared it"
    );
    println!(
        "{:12} {:>7} {:>6} {:>9} {:>9} {:>6} {:>8} {:>5} {:>5}",
        "disk", "readers", "target", "alone p99", "r p99 ms", "late", "slice ms", "F", "U"
    );
    for (disk, model, targets) in fair::shared() {
        for row in fair::targeted(model, &targets) {
            println!(
                "{disk:12} {:7} {:6} {:9.1} {:9.1} {:6.3} {:8.1} {:5.2} {:5.2}",
                row.readers,
                row.target,
                row.read_p99[0],
                row.read_p99[1],
                row.late,
                row.slice,
                row.fairness(),
                row.efficiency()
            );
        }
    }
}

fn print_misses() -> Result<(), String> {
    println!(
        "blocks that reads find on the backing device only, of all that they read; as many blocks for each"
    );
    println!(
        "{:34} {:>4} {:>7} {:>7} {:>7} {:>7} {:>8} {:>9} {:>12} {:>11}",
        "workload",
        "size",
        "blocks",
        "LRU",
        "FIFO",
        "S3-FIFO",
        "forebay",
        "over LRU",
        "written/miss",
        "copied/miss"
    );
    for row in misses::table()? {
        let [lru, fifo, s3, forebay] = row.misses;
        println!(
            "{:34} {:3}% {:7} {lru:7.4} {fifo:7.4} {s3:7.4} {forebay:8.4} {:9.3} {:12.2} {:11.2}",
            row.workload,
            row.percent,
            row.blocks,
            row.over_lru(),
            row.written,
            row.copied
        );
    }
    Ok(())
}

fn print_quiet() {
    println!(
        "p50, p99 and p99.9 in ms of what guests ask of the cache while forebay uses it; the last over the quiet one's"
    );
    println!(
        "{:8} {:6} {:12} {:>7} {:>31} {:>31} {:>31}",
        "cache", "guests", "forebay", "done", "reads", "writes", "durable writes"
    );
    for (disk, model) in [("840pro", SSD_840PRO), ("nvme", NVME)] {
        for (guests, rates) in [("reads", quiet::READS), ("mixed", quiet::MIXED)] {
            let setup = quiet::setup(Model::Ssd(model));
            let rows = quiet::Doing::ALL.map(|doing| quiet::row(&setup, rates, doing, 20 * SECOND));
            for row in rows {
                print!("{disk:8} {guests:6} {:12} {:7}", row.doing.name(), row.done);
                for (class, [p50, p99, p999]) in row.latencies.into_iter().enumerate() {
                    let over = p999 / rows[0].latencies[class][2];
                    print!("  {p50:7.3} {p99:7.3} {p999:7.3} {over:5.2}");
                }
                println!();
            }
        }
    }
}

fn print_records() {
    for (name, order) in [("batch", Order::Batch), ("relaxed", Order::Relaxed)] {
        print_records_in(name, order);
        println!();
    }
}

fn print_records_in(name: &str, order: Order) {
    println!(
        "IOzone's tests on a file of twice the cache (512 MiB, cache 256 MiB), order {name}, bare rate = 1"
    );
    println!("{:16} {:>14} {:>14} {:>14}", "test", "4 KiB", "1 MiB", "16 MiB");
    let histories = [4 << 10, 1 << 20, 16 << 20]
        .map(|record| records::compare(BARRACUDA_7200_12, order, 512 << 20, record));
    for (at, test) in records::TESTS.into_iter().enumerate() {
        let ratio =
            |[bare, through]: &[records::History; 2]| bare.seconds[at] / through.seconds[at];
        let [a, b, c] = histories.each_ref().map(ratio);
        println!("{test:16} {a:14.2} {b:14.2} {c:14.2}");
    }
    let whole = |[bare, through]: &[records::History; 2]| through.total() / bare.total();
    let [a, b, c] = histories.each_ref().map(whole);
    println!(
        "{:16} {a:14.2} {b:14.2} {c:14.2}   time of the whole history, drained, over the bare disk's",
        "whole"
    );
}
