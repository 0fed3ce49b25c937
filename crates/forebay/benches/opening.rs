// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening after a crash, of caches full of 4 KiB entries: 1, 4 and 16 GiB, and 1 TiB where there
//! is room. `cargo bench -p forebay --bench opening [-- GIB ...]`. With `OPENING_FILE=path` the
//! file is kept, and used again if it is there (entries are then not known, and 0).
//!
//! The process died in the middle of a checkpoint, with a tail behind the last whole one that is as
//! long as the budget allows: the worst moment. Files are sparse (`support/filler.rs`); the page
//! cache is emptied of them before each. A hole reads faster than a device, so the time that counts is the
//! CPU time of the thread that opens and the bytes at 2 GB/s, one after the other as if nothing went on at once. The file is also
//! slowed down to 2 GB/s: on a faster one (in /dev/shm) `seconds` is what opening takes.
//!
//! Memory for the map is taken and given back before each: where this is a virtual machine its
//! host has then backed it, which costs ten times what the machine's own kernel does.

#![allow(clippy::unwrap_used)]

#[path = "support/filler.rs"]
mod filler;
mod support;

use filler::Filler;
use forebay::io::{
    Device, FileDevice, FileOptions, Layer, Operation, OperationKind, Reactor, ReactorKind,
    Throttle, ThrottleDevice, ThrottleLimits, Use,
};
use forebay::shard::{Shard, ShardOptions};
use forebay_core::engine::Config;
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use support::{Median, bound, process_cpu_ns, record, rounds, thread_cpu_ns};

const GIB: u64 = 1 << 30;
const SCALE_BYTES_PER_SECOND: f64 = 2e9;
/// Free room that the largest case wants: on the disk, and in memory.
const ROOM: u64 = 12 * GIB;
const MEMORY: u64 = 8 * GIB;
/// How full it is before the tail comes, which must fit in as well.
fn percent(gib: u64) -> u64 {
    if gib < 4 { 70 } else { 85 }
}

/// What was read.
#[derive(Default)]
struct Reads {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Reads {
    fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

struct Counting {
    inner: FileDevice,
    reads: Arc<Reads>,
}

impl Layer for Counting {
    fn below(&self) -> &dyn Device {
        &self.inner
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        &mut self.inner
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        if let Operation::Read { span, .. } = operation {
            self.reads.add(span.len() as u64);
        }
        self.inner.submit(reactor, operation, token, now);
    }

    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        if use_of.kind == OperationKind::Read {
            self.reads.add(use_of.length);
        }
        run()
    }
}

fn device(path: &Path) -> (Counting, Arc<Reads>) {
    let reads = Arc::new(Reads::default());
    let inner = FileDevice::open(path, &FileOptions::default()).unwrap();
    (Counting { inner, reads: reads.clone() }, reads)
}

struct Opening {
    seconds: f64,
    cpu: f64,
    /// Of all threads.
    cpu_all: f64,
    scaled: f64,
    bytes: u64,
    count: u64,
}

fn open(path: &Path) -> Opening {
    let options = ShardOptions {
        reactor: ReactorKind::Auto,
        config: Config::default(),
        shared: false,
        ..ShardOptions::default()
    };
    let (device, reads) = device(path);
    let limits =
        ThrottleLimits { bytes_per_second: SCALE_BYTES_PER_SECOND as u64, ..Default::default() };
    let device = ThrottleDevice::new(Box::new(device), Throttle::new(limits));
    let (begun, cpu, cpu_all) = (Instant::now(), thread_cpu_ns(), process_cpu_ns());
    let shard = Shard::open(Box::new(device), &options).unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    let cpu = (thread_cpu_ns() - cpu) as f64 / 1e9;
    let cpu_all = (process_cpu_ns() - cpu_all) as f64 / 1e9;
    assert!(shard.opened().from_checkpoint, "the checkpoint was not used");
    assert!(shard.opened().damage.is_empty() && !shard.opened().clean);
    let bytes = reads.bytes.load(Ordering::Relaxed);
    let scaled = cpu + bytes as f64 / SCALE_BYTES_PER_SECOND;
    Opening { seconds, cpu, cpu_all, scaled, bytes, count: reads.count.load(Ordering::Relaxed) }
}

/// Bytes a second, reading the last whole checkpoint from the front.
fn sequential_rate(path: &Path) -> f64 {
    let (device, _) = device(path);
    let superblock = forebay::cache::read_superblock(&device).unwrap().superblock;
    let start =
        forebay_core::format::checkpoint::address(&superblock, superblock.checkpoint_sequence, 0);
    let bytes = superblock.checkpoint_bytes.min(GIB) / (1 << 20) * (1 << 20);
    let begun = Instant::now();
    let mut target = vec![0; 1 << 20];
    for at in (0..bytes).step_by(1 << 20) {
        device.read_at(start + at, &mut target).unwrap();
    }
    bytes as f64 / begun.elapsed().as_secs_f64()
}

/// What the kernel keeps of the file in memory goes.
fn forget_pages(file: &File) {
    file.sync_all().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn free_disk(folder: &Path) -> u64 {
    let found = rustix::fs::statvfs(folder).unwrap();
    found.f_bavail * found.f_frsize
}

fn free_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Touches memory and gives it back.
fn warm_memory(bytes: u64) {
    let mut memory = vec![0_u8; bytes as usize];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    std::hint::black_box(&memory);
}

/// The file is gone when this is.
struct Gone(PathBuf);

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn main() {
    let asked: Vec<u64> = std::env::args().filter_map(|text| text.parse().ok()).collect();
    let sizes = if asked.is_empty() { vec![1, 4, 16, 1024] } else { asked };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    println!("opening after a crash in the middle of a checkpoint (medians)");
    println!(
        "  {:>8} {:>12} {:>12} {:>10} {:>9} {:>9} {:>9} {:>10} {:>12}",
        "cache",
        "entries",
        "in the tail",
        "read MiB",
        "seconds",
        "CPU s",
        "of all",
        "file GB/s",
        "at 2 GB/s"
    );
    for gib in sizes {
        if gib >= 1024 && (free_disk(&folder) < ROOM || free_memory() < MEMORY) {
            println!(
                "SKIP opening of {gib} GiB: {} GiB of disk and {} GiB of memory are free, {} and {} are needed",
                free_disk(&folder) / GIB,
                free_memory() / GIB,
                ROOM / GIB,
                MEMORY / GIB
            );
            continue;
        }
        let kept = std::env::var_os("OPENING_FILE").map(PathBuf::from);
        let made = folder.join(format!("opening-{}", std::process::id()));
        let (path, _gone, (filled, tail)) = match kept {
            Some(path) if path.exists() => (path, None, (0, 0)),
            Some(path) => (path.clone(), None, Filler::new(&path, gib * GIB).fill(percent(gib))),
            None => {
                let gone = Gone(made.clone());
                (made.clone(), Some(gone), Filler::new(&made, gib * GIB).fill(percent(gib)))
            }
        };
        // Each opening moves the superblock on; both copies are put back.
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let addresses = Superblock::addresses(gib * GIB);
        let copies = addresses.map(|address| {
            let mut bytes = vec![0; SUPERBLOCK_SIZE];
            file.read_exact_at(&mut bytes, address).unwrap();
            bytes
        });
        let rounds = if gib >= 1024 { rounds().min(3) } else { rounds() };
        let mut openings = Vec::new();
        let mut rates = Vec::new();
        for _ in 0..rounds {
            for (address, bytes) in addresses.iter().zip(&copies) {
                file.write_all_at(bytes, *address).unwrap();
            }
            forget_pages(&file);
            warm_memory((gib * 6) << 20);
            openings.push(open(&path));
            forget_pages(&file);
            rates.push(sequential_rate(&path));
        }
        for (address, bytes) in addresses.iter().zip(&copies) {
            file.write_all_at(bytes, *address).unwrap();
        }
        let of = |value: fn(&Opening) -> f64| Median::of(openings.iter().map(value));
        let (seconds, cpu, scaled) = (of(|it| it.seconds), of(|it| it.cpu), of(|it| it.scaled));
        let cpu_all = of(|it| it.cpu_all);
        let rate = Median::of(rates);
        let read = openings[0].bytes;
        println!(
            "  {gib:>4} GiB {:>12} {tail:>12} {:>10} {:>9.3} {:>9.3} {:>9.3} {:>10.2} {:>11.3}s",
            filled + tail,
            read >> 20,
            seconds.median,
            cpu.median,
            cpu_all.median,
            rate.median / 1e9,
            scaled.median
        );
        if gib >= 1024 {
            bound("1 TiB at 2 GB/s", scaled.median, scaled.median <= 5.0, "<= 5 s");
        }
        record(
            "opening",
            &format!("opening-{gib}GiB"),
            "a sparse file, direct",
            rounds,
            json!({
                "entries": filled + tail, "tail_entries": tail, "read_bytes": read,
                "reads": openings[0].count, "seconds": seconds.json(), "cpu_s": cpu.json(),
                "cpu_all_s": cpu_all.json(),
                "file_bytes_per_second": rate.json(), "scaled_s": scaled.json(), "aim_s": 5.0,
            }),
        );
    }
}
