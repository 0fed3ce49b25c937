// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints tables, and draws the pictures that belong to them.

use clap::{Parser, ValueEnum};
use forebay_disk::Model;
use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, NVME, SSD_840PRO, ST3500641AS};
use forebay_experiment::experiments::records::Load;
use forebay_experiment::experiments::{
    SECOND, ahead, cliff, disks, drained, fair, flushes, misses, one_disk, parts, quiet, quotas,
    reads, records, write_cache,
};
use forebay_experiment::floors::Floors;
use forebay_experiment::plot::{self, Frame};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What forebay does for a modelled disk, in virtual time: the digits are the same on every machine.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Which tables; all without a name
    tables: Vec<Table>,
    /// Draw the pictures that belong to them into this folder
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Compare the tables with their floors, and fail if one is missed that is not known to be
    #[arg(long)]
    check: bool,
    /// Virtual time that the cliff takes
    #[arg(long, default_value_t = cliff::HOUR)]
    seconds: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Table {
    /// Reading ahead of guests that ask for one thing at a time
    Ahead,
    /// Random writes for long, faster than the disk takes them
    Cliff,
    /// Random writes that are drained, sorted
    Drained,
    /// Readers against writers
    Fair,
    /// What the orders cost a guest that flushes
    Flushes,
    /// Misses of the read cache beside LRU, FIFO and S3-FIFO (FOREBAY_TRACE names a trace of a disk)
    Misses,
    /// Volumes that share a disk
    OneDisk,
    /// What guests notice of work in the background
    Quiet,
    /// What a reservation is worth beside a busy volume
    Quotas,
    /// Long reads of what is in the cache in part
    Parts,
    /// Reads of what is in the cache and of what is not
    Reads,
    /// IOzone's tests
    Records,
    /// Weights and targets of volumes
    Shares,
    /// Readers against writers of other sizes, on a volume behind a network
    Sizes,
    /// Writes to disks whose write cache is on or off
    WriteCache,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match print(&arguments) {
        Ok(floors) if arguments.check => verdict(&floors),
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// On stderr: the tables are kept as they are.
fn verdict(floors: &Floors) -> ExitCode {
    let Floors { count, missed, known } = floors;
    for text in known {
        eprintln!("missed, as is known: {text}");
    }
    for text in missed {
        eprintln!("MISSED: {text}");
    }
    eprintln!("{count} floors, {} missed, {} more known to be", missed.len(), known.len());
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print(arguments: &Arguments) -> Result<Floors, Box<dyn Error>> {
    let Arguments { tables, plots, seconds, .. } = arguments;
    let tables = if tables.is_empty() { Table::value_variants() } else { tables };
    let mut floors = Floors::default();
    let it = &mut floors;
    for table in tables {
        match table {
            Table::Ahead => print_ahead(it),
            Table::Cliff => print_cliff(plots.as_deref(), *seconds, it)?,
            Table::Drained => print_drained(it),
            Table::Fair => print_fair(plots.as_deref(), it)?,
            Table::Flushes => print_flushes(it),
            Table::Misses => print_misses(it)?,
            Table::OneDisk => print_one_disk(it),
            Table::Quiet => print_quiet(it),
            Table::Quotas => print_quotas(it),
            Table::Parts => print_parts(it),
            Table::Reads => print_reads(it),
            Table::Records => print_records(it),
            Table::Shares => print_shares(it),
            Table::Sizes => print_sizes(it),
            Table::WriteCache => print_write_cache(it),
        }
        println!();
    }
    Ok(floors)
}

fn print_ahead(floors: &mut Floors) {
    println!("one who reads a file that is not in the cache, one record at a time; MiB a second");
    println!(
        "{:12} {:8} {:>5} {:>8} {:>8} {:>8} {:>7}",
        "disk", "way", "KiB", "bare", "forebay", "without", "/ bare"
    );
    for (disk, model) in disks() {
        for way in ahead::WAYS {
            for record in ahead::RECORDS {
                let rates = ahead::rates(model, way, record);
                floors.ahead(disk, way, record, rates);
                let [bare, through, without] = rates;
                println!(
                    "{disk:12} {:8} {:5} {bare:8.1} {through:8.1} {without:8.1} {:7.2}",
                    format!("{way:?}").to_lowercase(),
                    record >> 10,
                    through / bare
                );
            }
        }
    }
    println!();
    println!(
        "the same beside one who reads random 4 KiB: MiB a second of the one, reads a second of the other and their p99 in ms"
    );
    println!(
        "{:12} {:8} {:>5} {:>28} {:>28} {:>28}",
        "disk", "way", "KiB", "bare", "forebay", "without"
    );
    for (disk, model) in disks() {
        for way in ahead::WAYS {
            for record in ahead::RECORDS {
                print!("{disk:12} {:8} {:5}", format!("{way:?}").to_lowercase(), record >> 10);
                let sides = ahead::beside(model, way, record);
                floors.beside(disk, way, record, &sides);
                for ahead::Beside { rate, random, p99 } in sides {
                    print!("   {rate:8.1} {random:8.1} {p99:7.1}");
                }
                println!();
            }
        }
    }
}

/// What the courses of the cliff are called.
const THROUGH: [&str; 3] = ["bare", "batch", "relaxed"];

fn print_cliff(
    plots: Option<&Path>,
    seconds: usize,
    floors: &mut Floors,
) -> Result<(), Box<dyn Error>> {
    println!(
        "{seconds} s of random writes, 32 at a time, over four times the cache (256 MiB), 1.5 times as many as drain; a second"
    );
    println!(
        "{:12} {:>7} {:8} {:>8} {:>7} {:>8} {:>7} {:>8} {:>8} {:>9} {:>8} {:>7}",
        "disk",
        "KiB",
        "through",
        "asked",
        "full at",
        "then",
        "least",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "max ms",
        "around"
    );
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        for bytes in [4 << 10, 64 << 10, 1 << 20] {
            let courses = cliff::courses(spec, bytes, seconds);
            floors.cliff(&format!("{disk}, writes of {} KiB for long", bytes >> 10), &courses);
            for (through, course) in THROUGH.into_iter().zip(&courses) {
                let [half, p99, p999, longest] = course.latencies;
                println!(
                    "{disk:12} {:7} {through:8} {:8.0} {:7} {:8.0} {:7} {half:8.1} {p99:8.1} {p999:9.1} {longest:8.1} {:7}",
                    bytes >> 10,
                    course.asked,
                    course.filled,
                    course.rate(),
                    course.least(),
                    course.around
                );
            }
            if let Some(folder) = plots {
                plot_cliff(folder, disk, bytes >> 10, &courses)?;
            }
        }
    }
    Ok(())
}

fn plot_cliff(
    folder: &Path,
    disk: &str,
    kib: u64,
    courses: &[cliff::Course],
) -> Result<(), Box<dyn Error>> {
    let title = format!(
        "{disk}: random writes of {kib} KiB at 1.5 x the drain rate; the worst second of every ten"
    );
    let y = "writes answered in the worst second of every ten";
    let frame = Frame { title: &title, x: "time (s)", y };
    let lines: Vec<plot::Line> = THROUGH
        .iter()
        .zip(courses)
        .map(|(through, course)| ((*through).into(), course.worst()))
        .collect();
    plot::lines(&folder.join(format!("cliff-{disk}-{kib}k.svg")), frame, &lines)?;
    let title = format!("{disk}: how long random writes of {kib} KiB took at 1.5 x the drain rate");
    let frame = Frame { title: &title, x: "so many writes took no longer", y: "latency (ms)" };
    let groups: Vec<(String, Vec<f64>)> = ["50 %", "99 %", "99.9 %"]
        .into_iter()
        .enumerate()
        .map(|(at, share)| (share.into(), courses.iter().map(|it| it.latencies[at]).collect()))
        .collect();
    plot::bars(&folder.join(format!("cliff-latency-{disk}-{kib}k.svg")), frame, &THROUGH, &groups)
}

fn print_quotas(floors: &mut Floors) {
    println!(
        "a volume with popular blocks beside another that asks for {} times as much; cache of a quarter of its blocks",
        quotas::BUSY
    );
    println!(
        "{:8} {:>8} {:>9} {:>9} {:>11} {:>9}",
        "other", "reserve", "has", "hits", "alone, hits", "other has"
    );
    for row in quotas::table() {
        floors.quotas(&row);
        println!(
            "{:8} {:>8} {:7.1} % {:7.1} % {:9.1} % {:7.1} %",
            row.other,
            row.reserve,
            row.has[0] * 100.0,
            row.hits * 100.0,
            row.alone * 100.0,
            row.has[1] * 100.0
        );
    }
}

fn print_drained(floors: &mut Floors) {
    println!("64 MiB of random 4 KiB writes, 32 at a time, then drained; seconds");
    println!(
        "{:12} {:7} {:20} {:>9} {:>9} {:>9} {:>9} {:>7}",
        "disk", "over", "through", "answered", "drained", "total", "ms/block", "batch"
    );
    let print = |row: &drained::Row, blocks: u64| {
        println!(
            "{:12} {:7} {:20} {:9.2} {:9.2} {:9.2} {:9.3} {:7}",
            row.disk,
            row.span,
            row.through,
            row.answered,
            row.drained,
            row.total(),
            row.millis(blocks),
            row.batch_blocks
        );
    };
    for rows in drained::table() {
        rows.iter().for_each(|row| print(row, drained::BLOCKS));
        floors.drained(&rows);
    }
    println!();
    println!(
        "the same of 131,072 writes to random places of a file of twice the cache (512 MiB, cache 256 MiB)"
    );
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        let rows = drained::of_file(disk, spec);
        rows.iter().for_each(|row| print(row, drained::FILE_BYTES / 4096));
        floors.file_drained(&rows);
    }
}

/// Hard disks and volumes behind a network each by themselves: what they take differs by ten times.
fn plot_fair(folder: &Path, rows: &[(&str, fair::Bare, fair::Row)]) -> Result<(), Box<dyn Error>> {
    for (suffix, is_cloud) in [("", false), ("-gp3", true)] {
        let rows = || rows.iter().filter(|(disk, ..)| disk.starts_with("gp3") == is_cloud);
        let group = |disk: &str, readers| match readers {
            1 => format!("{disk}, 1 reader"),
            _ => format!("{disk}, {readers} readers"),
        };
        let frame = Frame {
            title: "Random readers against 32 random writers: what each side keeps of its rate alone",
            x: "disk, readers (each has one read under way)",
            y: "rate / rate alone",
        };
        let share = |(disk, bare, row): &(&str, fair::Bare, fair::Row)| {
            let ([a, c], [b, d]) = (bare.sides.shares(), row.sides.shares());
            (group(disk, row.readers), vec![a, b, c, d])
        };
        let names = ["reads, bare disk", "reads, forebay", "writes, bare disk", "writes, forebay"];
        let groups: Vec<_> = rows().map(share).collect();
        plot::bars(&folder.join(format!("fair{suffix}.svg")), frame, &names, &groups)?;
        let frame = Frame {
            title: "Random readers against 32 random writers: how long reads take",
            y: "latency of reads (ms)",
            ..frame
        };
        let latency = |(disk, bare, row): &(&str, fair::Bare, fair::Row)| {
            let ([a, c], b, d) = (bare.read_latencies, row.read_p50, row.read_p99[1]);
            (group(disk, row.readers), vec![a, b, c, d])
        };
        let names = ["p50, bare disk", "p50, forebay", "p99, bare disk", "p99, forebay"];
        let groups: Vec<_> = rows().map(latency).collect();
        plot::bars(&folder.join(format!("fair-latency{suffix}.svg")), frame, &names, &groups)?;
    }
    Ok(())
}

fn print_fair(plots: Option<&Path>, floors: &mut Floors) -> Result<(), Box<dyn Error>> {
    let mut rows = Vec::new();
    println!(
        "random 4 KiB readers against 32 random 4 KiB writers, cache full of dirty data; requests a second"
    );
    println!(
        "by device: x_r of the reads that the disk answers; copies: what is read is copied into the cache; bare: the disk alone, the same workers"
    );
    println!(
        "{:12} {:7} {:>7} {:>8} {:>9} {:>8} {:>9} {:>5} {:>5} {:>5} {:>5} {:>8} {:>8} {:>9}  {:>9} {:>5} {:>5} {:>12} {:>5}",
        "disk",
        "through",
        "readers",
        "r alone",
        "w alone",
        "r both",
        "w both",
        "x_r",
        "x_w",
        "F",
        "U",
        "r p50 ms",
        "r p99 ms",
        "w p99 ms",
        "by device",
        "F",
        "U",
        "longest r ms",
        "alone"
    );
    let print = |disk, through, readers, sides: &fair::Sides, [p50, p99]: [f64; 2]| {
        let [reads, writes] = sides.shares();
        print!(
            "{disk:12} {through:7} {readers:7} {} {reads:5.2} {writes:5.2} {:5.2} {:5.2} {p50:8.1} {p99:8.0}",
            sides.rates(),
            sides.fairness(),
            sides.efficiency(),
        );
    };
    for (disk, model) in fair::disks() {
        let bare = fair::bare_table(model);
        for row in &bare {
            print(disk, "bare", row.readers, &row.sides, row.read_latencies);
            println!();
        }
        for (through, copies) in [("forebay", false), ("copies", true)] {
            for (row, bare) in fair::table(model, copies).into_iter().zip(&bare) {
                print(disk, through, row.readers, &row.sides, [row.read_p50, row.read_p99[1]]);
                let [shared, used] = row.by_device();
                let reads = row.device_share();
                let [alone, longest] = row.read_longest;
                println!(
                    " {:9.0}  {reads:9.2} {shared:5.2} {used:5.2} {longest:12.0} {alone:5.0}",
                    row.write_p99
                );
                floors.fair(disk, &row);
                if !copies {
                    rows.push((disk, *bare, row));
                }
            }
        }
    }
    plots.map_or(Ok(()), |folder| plot_fair(folder, &rows))
}

fn print_flushes(floors: &mut Floors) {
    println!(
        "32 random 4 KiB writers and a guest's flushes, cache full of dirty data; a second, and device writes for each block acknowledged"
    );
    println!(
        "{:12} {:10} {:8} {:>8} {:>8} {:>8} {:>12} {:>8} {:>10} {:>12}",
        "disk",
        "flushes",
        "through",
        "acked",
        "/ bare",
        "flushed",
        "written back",
        "batches",
        "cache wr.",
        "backing wr."
    );
    for (disk, often, rows) in flushes::table() {
        let flushes = often.name();
        for ((through, _), row) in flushes::THROUGH.into_iter().zip(&rows) {
            let flushes::Row { acknowledged, flushed, written_back, writes, batches } = row;
            let [cache, backing] = writes;
            println!(
                "{disk:12} {flushes:10} {through:8} {acknowledged:8.1} {:8.2} {flushed:8.2} {written_back:12.1} {batches:8.2} {cache:10.3} {backing:12.3}",
                acknowledged / rows[0].acknowledged
            );
        }
        floors.flushes(disk, often, &rows);
    }
}

fn print_one_disk(floors: &mut Floors) {
    println!(
        "two volumes on one disk, random 4 KiB readers against 32 random 4 KiB writers, cache full of dirty data"
    );
    println!(
        "{:12} {:6} {:>7} {:9} {:>8} {:>9} {:>8} {:>9} {:>5} {:>5} {:>9}",
        "disk",
        "load",
        "readers",
        "schedule",
        "r alone",
        "w alone",
        "r both",
        "w both",
        "F",
        "U",
        "r p99 ms"
    );
    for (disk, model) in fair::disks().into_iter().take(2) {
        for row in one_disk::table(model) {
            floors.one_disk(disk, &row);
            println!(
                "{disk:12} {:6} {:7} {:9} {} {:5.2} {:5.2} {:9.0}",
                format!("{:?}", row.load).to_lowercase(),
                row.readers,
                if row.one_disk { "one" } else { "two" },
                row.sides.rates(),
                row.sides.fairness(),
                row.sides.efficiency(),
                row.read_p99
            );
        }
    }
}

fn print_shares(floors: &mut Floors) {
    println!("the same with weights of guests: shares of the device, reads over writes");
    println!(
        "{:12} {:>7} {:>6} {:>7} {:>7} {:>7} {:>5} {:>9}",
        "disk", "readers", "weight", "by time", "by rate", "x_r", "x_w", "r p99 ms"
    );
    for (disk, model, _) in fair::shared() {
        for row in fair::weighted(model) {
            floors.weight(disk, &row);
            println!(
                "{disk:12} {:7} {:6} {:7.2} {:7.2} {:7.2} {:5.2} {:9.0}",
                row.readers,
                row.weight,
                row.by_time(),
                row.by_rate(),
                row.device_share(),
                row.sides.shares()[1],
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
            floors.target(disk, &row);
            println!(
                "{disk:12} {:7} {:6} {:9.1} {:9.1} {:6.3} {:8.1} {:5.2} {:5.2}",
                row.readers,
                row.target,
                row.read_p99[0],
                row.read_p99[1],
                row.late,
                row.slice,
                row.sides.fairness(),
                row.sides.efficiency()
            );
        }
    }
}

fn print_sizes(floors: &mut Floors) {
    println!("the same on gp3 by what a read and a write ask for, in KiB");
    println!(
        "{:>5} {:>5} {:>7} {:>8} {:>9} {:>8} {:>9} {:>5} {:>5} {:>5} {:>5} {:>9}",
        "read",
        "write",
        "readers",
        "r alone",
        "w alone",
        "r both",
        "w both",
        "x_r",
        "x_w",
        "F",
        "U",
        "r p99 ms"
    );
    for ([read, write], row) in fair::sized() {
        floors.sized([read, write], &row);
        let [reads, writes] = row.sides.shares();
        println!(
            "{:5} {:5} {:7} {} {reads:5.2} {writes:5.2} {:5.2} {:5.2} {:9.0}",
            read >> 10,
            write >> 10,
            row.readers,
            row.sides.rates(),
            row.sides.fairness(),
            row.sides.efficiency(),
            row.read_p99[1]
        );
    }
}

fn print_write_cache(floors: &mut Floors) {
    println!(
        "writes to the whole of a disk whose write cache is off or on, flushed at the end, then drained; cache 256 MiB"
    );
    println!(
        "seconds until they are answered and until all is on the disk; rate: that of answers over the bare disk's; whole: the time of all over the bare disk's"
    );
    println!(
        "{:12} {:11} {:26} {:>5} {:>8} {:>9} {:>8} {:>8} {:>6} {:>9} {:>8} {:>8} {:>6}",
        "disk",
        "write cache",
        "writes",
        "depth",
        "bare",
        "batch",
        "all",
        "rate",
        "whole",
        "relaxed",
        "all",
        "rate",
        "whole"
    );
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        for row in write_cache::table(spec) {
            let [bare, through @ ..] = row.took;
            print!(
                "{disk:12} {:11} {:26} {:5} {:8.2}",
                if row.write_cache { "on" } else { "off" },
                row.load.name(),
                row.depth,
                bare.total()
            );
            for (it, (rate, whole)) in through.iter().zip(row.rates().iter().zip(row.wholes())) {
                print!(" {:9.2} {:8.2} {rate:8.2} {whole:6.3}", it.answered, it.total());
            }
            println!();
            floors.write_cache(disk, &row);
        }
    }
}

fn print_misses(floors: &mut Floors) -> Result<(), String> {
    println!(
        "blocks that reads find on the backing device only, of all that they read; as many blocks for each"
    );
    println!(
        "{:34} {:>4} {:>7} {:>7} {:>7} {:>7} {:>8} {:>9} {:>8} {:>9} {:>12} {:>11}",
        "workload",
        "size",
        "blocks",
        "LRU",
        "FIFO",
        "S3-FIFO",
        "forebay",
        "over LRU",
        "LRU, log",
        "over that",
        "written/miss",
        "copied/miss"
    );
    for row in misses::table()? {
        floors.misses(&row);
        let [lru, fifo, s3, forebay] = row.misses;
        println!(
            "{:34} {:3}% {:7} {lru:7.4} {fifo:7.4} {s3:7.4} {forebay:8.4} {:9.3} {:8.4} {:9.3} {:12.2} {:11.2}",
            row.workload,
            row.percent,
            row.blocks,
            row.over_lru(),
            row.logged,
            row.over_logged(),
            row.written,
            row.copied
        );
    }
    Ok(())
}

fn print_quiet(floors: &mut Floors) {
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
            floors.quiet(&format!("{disk}, {guests}"), &rows);
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

fn print_parts(floors: &mut Floors) {
    println!(
        "records read once, of which so many blocks in a hundred are in the cache, here and there; records a second"
    );
    println!(
        "{:12} {:>5} {:>9} {:>5} {:>9} {:>9} {:>6}",
        "disk", "KiB", "in cache", "depth", "bare", "forebay", "ratio"
    );
    for row in parts::table() {
        let parts::Row { disk, record, percent, depth, rates: [bare, through] } = row;
        println!(
            "{disk:12} {:5} {percent:7} % {depth:5} {bare:9.1} {through:9.1} {:6.2}",
            record >> 10,
            row.ratio()
        );
        floors.parts(&row);
    }
}

fn print_reads(floors: &mut Floors) {
    println!(
        "random 4 KiB reads a second: of half of the cache (128 MiB), warm, beside the cache device alone; of 64 GiB, beside the bare disk"
    );
    println!(
        "{:12} {:7} {:>5} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6}",
        "disk", "cache", "depth", "device", "warm", "ratio", "bare", "uncached", "ratio"
    );
    for row in reads::table() {
        let reads::Row { disk, cache, depth, warm: [device, warm], cold: [bare, cold] } = row;
        println!(
            "{disk:12} {cache:7} {depth:5} {device:9.0} {warm:9.0} {:6.3} {bare:9.1} {cold:9.1} {:6.3}",
            warm / device,
            cold / bare
        );
        floors.reads(&row);
    }
}

fn print_records(floors: &mut Floors) {
    use records::Start::{AsItIs, Brim, BrimOfFile, Full};
    for (disk, spec) in [("st3500641as", ST3500641AS), ("7200.12", BARRACUDA_7200_12)] {
        for depth in [1, 32] {
            for (name, relaxed, start) in [
                ("batch", false, AsItIs),
                ("relaxed", true, AsItIs),
                ("relaxed, the cache filled with dirty data before each", true, Full),
                ("relaxed, all of the cache dirty before each", true, Brim),
                ("relaxed, all of the cache dirty with the file before each", true, BrimOfFile),
            ] {
                let load = Load { start, depth, file_bytes: 512 << 20, record_bytes: 0, relaxed };
                print_records_in(disk, spec, name, load, floors);
            }
        }
    }
}

fn print_records_in(disk: &str, spec: Spec, name: &str, load: Load, floors: &mut Floors) {
    let depth = load.depth;
    println!(
        "IOzone's tests on {disk}, a file of twice the cache (512 MiB, cache 256 MiB), {depth} at a time, order {name}, bare rate = 1"
    );
    println!("{:16} {:>14} {:>14} {:>14}", "test", "4 KiB", "1 MiB", "16 MiB");
    let histories = [4 << 10, 1 << 20, 16 << 20].map(|record_bytes| {
        let load = Load { record_bytes, ..load };
        let histories = records::compare(spec, load);
        floors.records(&format!("{disk}, {depth} at a time, {name}"), load, &histories);
        histories
    });
    let rates = histories.each_ref().map(records::rates);
    for (at, test) in records::TESTS.into_iter().enumerate() {
        let [a, b, c] = rates.map(|rates| rates[at]);
        println!("{test:16} {a:14.3} {b:14.3} {c:14.3}");
    }
    if load.start == records::Start::AsItIs {
        let whole = |[bare, through]: &[records::History; 2]| through.total() / bare.total();
        let [a, b, c] = histories.each_ref().map(whole);
        println!(
            "{:16} {a:14.3} {b:14.3} {c:14.3}   time of the whole history, drained, over the bare disk's",
            "whole"
        );
    }
    println!();
}
