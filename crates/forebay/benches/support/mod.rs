// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What every bench needs: CPU time, medians with their spread, and a line in `bench/results`.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};

/// As the program has it.
#[global_allocator]
static HEAP: forebay::io::Heap = forebay::io::Heap;

/// Interleaved rounds of a bench; `ROUNDS` in the environment says otherwise.
pub fn rounds() -> usize {
    std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(7)
}

/// Nanoseconds this thread has had the processor: others on the machine do not count.
pub fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds that all threads of this process have had the processor.
pub fn process_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Seconds that the kernel has had the processor in this process's name, to a hundredth.
pub fn process_system_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name of the program, in brackets, may hold anything.
    let (_, after) = text.rsplit_once(") ").unwrap();
    after.split(' ').nth(12).unwrap().parse::<f64>().unwrap() / 100.0
}

/// The middle of some measurements, and how far they spread.
#[derive(Clone, Copy, Debug)]
pub struct Median {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Median {
    pub fn of(values: impl IntoIterator<Item = f64>) -> Median {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let median = (values[(count - 1) / 2] + values[count / 2]) / 2.0;
        Median { median, least: values[0], most: values[count - 1] }
    }

    pub fn json(self) -> Value {
        json!({ "median": self.median, "least": self.least, "most": self.most })
    }
}

/// One line of a table: name, median, spread.
pub fn row(name: &str, unit: &str, value: Median) {
    println!(
        "  {name:<46} {:>10.2} {unit:<6} ({:.2} to {:.2})",
        value.median, value.least, value.most
    );
}

/// Something that binds does not hold.
static MISSED: AtomicBool = AtomicBool::new(false);

/// A ratio that binds: prints whether it holds, which [`end`] tells whoever started the bench.
pub fn bound(name: &str, value: f64, is_good: bool, wanted: &str) {
    println!(
        "  {name:<46} {value:>10.3} {wanted:<10} {}",
        if is_good { "holds" } else { "MISSED" }
    );
    MISSED.fetch_or(!is_good, Ordering::Relaxed);
}

/// How the bench ends: 1 if something that binds does not hold.
pub fn end() -> ExitCode {
    ExitCode::from(u8::from(MISSED.load(Ordering::Relaxed)))
}

/// The workspace's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn commit() -> String {
    let output = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(root()).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let head = output(&["rev-parse", "--short", "HEAD"]).unwrap_or_default();
    let changed = output(&["status", "--porcelain", "--untracked-files=no", "crates"]);
    if changed.is_some_and(|text| !text.is_empty()) { head + "+" } else { head }
}

/// Adds a line to `bench/results/FILE.jsonl`.
pub fn record(file: &str, what: &str, devices: &str, rounds: usize, result: Value) {
    let line = json!({
        "what": what,
        "commit": commit(),
        "at": forebay::shard::wall_now() / 1000,
        "kernel": rustix::system::uname().release().to_string_lossy(),
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "devices": devices,
        "rounds": rounds,
        "result": result,
    });
    let folder = root().join("bench/results");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!("{file}.jsonl"));
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
    writeln!(file, "{line}").unwrap();
}
