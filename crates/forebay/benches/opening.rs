// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening after a crash, of caches full of 4 KiB entries: 1, 4 and 16 GiB, and 1 TiB where there
//! is room. `cargo bench -p forebay --bench opening [-- GIB ...]`. With `OPENING_FILE=path` the
//! file is kept, and used again if it is there (entries are then not known, and 0).
//!
//! The process died in the middle of a checkpoint, with a tail behind the last whole one that is as
//! long as the budget allows: the worst moment. Files are sparse (`support/filler.rs`), but what opening reads
//! of them is there; the page cache is emptied of them before each. The time that counts is the one that passes.
//! No read is answered before a device of 2 GB/s would have answered it; from a file that reads at less than that
//! opening takes longer than the aim is about.
//!
//! Memory for the map is taken and given back before each: where this is a virtual machine its
//! host has then backed it, which costs ten times what the machine's own kernel does. It is twice as much as is needed: a
//! host may take back, within seconds, a part of what is free.

#![allow(clippy::unwrap_used)]

#[path = "support/filler.rs"]
mod filler;
mod support;

use filler::Filler;
use forebay::io::{
    Arena, Completion, Device, FileDevice, FileOptions, Layer, Operation, OperationKind, Reactor,
    ReactorKind, Use,
};
use forebay::shard::{Shard, ShardOptions};
use forebay_core::engine::Config;
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{Median, bound, process_cpu_ns, process_system_s, record, rounds, thread_cpu_ns};

const GIB: u64 = 1 << 30;
/// What the aim is about.
const BYTES_PER_SECOND: f64 = 2e9;
/// Free room that the largest case wants: on the disk, and in memory.
const ROOM: u64 = 12 * GIB;
const MEMORY: u64 = 14 * GIB;
/// Reads at once when the file is measured, each of a megabyte.
const DEPTH: u64 = 16;
const MIB: u64 = 1 << 20;
/// How full it is before the tail comes, which must fit in as well.
fn percent(gib: u64) -> u64 {
    if gib < 16 { 60 } else { 85 }
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

/// Counts, and answers no sooner than a device of [`BYTES_PER_SECOND`] would that is told of all reads at once.
struct Counting {
    inner: FileDevice,
    reads: Arc<Reads>,
    /// When that device has read all it was asked for.
    free: Instant,
    /// When it answers what is under way, by token.
    due: BTreeMap<u64, Instant>,
    held: Vec<(Instant, Completion)>,
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
            let takes = Duration::from_secs_f64(span.len() as f64 / BYTES_PER_SECOND);
            self.free = self.free.max(now) + takes;
            self.due.insert(token, self.free);
        }
        self.inner.submit(reactor, operation, token, now);
    }

    fn answered(&mut self, answers: &mut Vec<Completion>, from: usize, now: Instant) {
        for answer in answers.split_off(from) {
            match self.due.remove(&answer.token) {
                Some(due) if due > now => self.held.push((due, answer)),
                _ => answers.push(answer),
            }
        }
    }

    fn turn(&mut self, _: &mut Reactor, now: Instant, done: &mut Vec<Completion>) {
        done.extend(self.held.extract_if(.., |held| held.0 <= now).map(|held| held.1));
    }

    fn due(&self) -> Option<Instant> {
        self.held.iter().map(|held| held.0).min()
    }

    fn blocking(&self, use_of: Use, run: &mut dyn FnMut() -> io::Result<()>) -> io::Result<()> {
        if use_of.kind == OperationKind::Read {
            self.reads.add(use_of.length);
        }
        run()
    }
}

fn device(path: &Path) -> FileDevice {
    FileDevice::open(path, &FileOptions::default()).unwrap()
}

struct Opening {
    seconds: f64,
    cpu: f64,
    /// Of all threads.
    cpu_all: f64,
    /// The kernel's part of that.
    system: f64,
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
    let reads = Arc::new(Reads::default());
    let device = Counting {
        inner: device(path),
        reads: reads.clone(),
        free: Instant::now(),
        due: BTreeMap::new(),
        held: Vec::new(),
    };
    let (begun, cpu, cpu_all) = (Instant::now(), thread_cpu_ns(), process_cpu_ns());
    let system = process_system_s();
    let shard = Shard::open(Box::new(device), &options).unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    let system = process_system_s() - system;
    let cpu = (thread_cpu_ns() - cpu) as f64 / 1e9;
    let cpu_all = (process_cpu_ns() - cpu_all) as f64 / 1e9;
    assert!(shard.opened().from_checkpoint, "the checkpoint was not used");
    assert!(shard.opened().damage.is_empty() && !shard.opened().clean);
    let bytes = reads.bytes.load(Ordering::Relaxed);
    Opening { seconds, cpu, cpu_all, system, bytes, count: reads.count.load(Ordering::Relaxed) }
}

/// Bytes a second, reading the last whole checkpoint from the front, as opening does: a megabyte at a time and
/// many at once.
fn file_rate(path: &Path) -> f64 {
    let mut device = device(path);
    let superblock = forebay::cache::read_superblock(&device).unwrap().superblock;
    let start =
        forebay_core::format::checkpoint::address(&superblock, superblock.checkpoint_sequence, 0);
    let count = superblock.checkpoint_bytes.min(2 * GIB) / MIB;
    let memory = Arena::anonymous((DEPTH * MIB) as usize).unwrap();
    let mut reactor = Reactor::new(ReactorKind::Auto, 64).unwrap();
    let (mut events, mut done) = (Vec::new(), Vec::new());
    let (mut asked, mut answered) = (0, 0);
    let mut free: Vec<u64> = (0..DEPTH).collect();
    let begun = Instant::now();
    while answered < count {
        while asked < count
            && let Some(part) = free.pop()
        {
            let span = memory.span((part * MIB) as usize, MIB as usize);
            let read = Operation::Read { span, offset: start + asked * MIB };
            device.submit(&mut reactor, read, part, begun);
            asked += 1;
        }
        reactor.wait(Some(Duration::from_secs(10)), &mut events).unwrap();
        for (user_data, result) in events.drain(..) {
            device.event(&mut reactor, user_data, result, begun, &mut done);
        }
        device.poll(&mut reactor, begun, &mut done);
        for completion in done.drain(..) {
            completion.result.unwrap();
            free.push(completion.token);
            answered += 1;
        }
    }
    (count * MIB) as f64 / begun.elapsed().as_secs_f64()
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

fn main() -> std::process::ExitCode {
    let asked: Vec<u64> = std::env::args().filter_map(|text| text.parse().ok()).collect();
    let sizes = if asked.is_empty() { vec![1, 4, 16, 1024] } else { asked };
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    println!("opening after a crash in the middle of a checkpoint (medians)");
    println!(
        "  {:>8} {:>12} {:>12} {:>10} {:>9} {:>9} {:>9} {:>9} {:>10}",
        "cache",
        "entries",
        "in the tail",
        "read MiB",
        "seconds",
        "CPU s",
        "of all",
        "kernel's",
        "file GB/s"
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
        let rounds = rounds();
        let mut openings = Vec::new();
        let mut rates = Vec::new();
        for _ in 0..rounds {
            for (address, bytes) in addresses.iter().zip(&copies) {
                file.write_all_at(bytes, *address).unwrap();
            }
            forget_pages(&file);
            rates.push(file_rate(&path));
            forget_pages(&file);
            warm_memory((gib * 12) << 20);
            openings.push(open(&path));
        }
        for (address, bytes) in addresses.iter().zip(&copies) {
            file.write_all_at(bytes, *address).unwrap();
        }
        let of = |value: fn(&Opening) -> f64| Median::of(openings.iter().map(value));
        let (seconds, cpu) = (of(|it| it.seconds), of(|it| it.cpu));
        let (cpu_all, system) = (of(|it| it.cpu_all), of(|it| it.system));
        let rate = Median::of(rates);
        let read = openings[0].bytes;
        println!(
            "  {gib:>4} GiB {:>12} {tail:>12} {:>10} {:>9.3} {:>9.3} {:>9.3} {:>9.3} {:>10.2}",
            filled + tail,
            read >> 20,
            seconds.median,
            cpu.median,
            cpu_all.median,
            system.median,
            rate.median / 1e9
        );
        if gib >= 1024 {
            bound("1 TiB, seconds", seconds.median, seconds.median <= 5.0, "<= 5 s");
        }
        record(
            "opening",
            &format!("opening-{gib}GiB"),
            "a sparse file, direct",
            rounds,
            json!({
                "entries": filled + tail, "tail_entries": tail, "read_bytes": read,
                "reads": openings[0].count, "seconds": seconds.json(), "cpu_s": cpu.json(),
                "cpu_all_s": cpu_all.json(), "system_s": system.json(),
                "file_bytes_per_second": rate.json(), "aim_s": 5.0,
            }),
        );
    }
    support::end()
}
