// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Each reason for which a write goes around the cache is counted by its name in `status --json` and in the metrics, and `forebay why` says it.

use crate::support::{Daemon, PATIENCE, Scratch, wait_for};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;
const REASONS: [&str; 5] = ["sequential", "too_large", "full", "cache_failed", "mode"];

/// A daemon that serves `v`.
struct Case {
    scratch: Scratch,
    daemon: Daemon,
}

impl Case {
    fn new(name: &str, disk_bytes: u64, volume: impl Fn(&str) -> String) -> Case {
        let scratch = Scratch::new(name);
        scratch.format("64M");
        let disk = scratch.file("disk", disk_bytes);
        let metrics = format!("unix:{}", scratch.sockets.join("metrics").display());
        let volume = volume(disk.to_str().unwrap());
        let mut command = scratch.serve_command(&["--volume", &volume, "--metrics", &metrics]);
        // A cache that fails is marked stale there.
        command.arg("--state-dir").arg(scratch.path("state"));
        let daemon = Daemon::start(command, &scratch.path("stderr"));
        Case { scratch, daemon }
    }

    /// Writes went around for this reason and no other, that of `lba` among them. Nobody writes any more.
    fn told(&self, reason: &str, lba: u64, text: &str) {
        let by = self.scratch.status()["volumes"][0]["bypassed_writes"].clone();
        let names: Vec<&String> = by.as_object().unwrap().keys().collect();
        assert_eq!(names.len(), REASONS.len(), "this test knows all reasons: {by}");
        for of in REASONS {
            assert_eq!(by[of].as_u64().unwrap() > 0, of == reason, "{by}");
        }
        // The daemon is asked once a second at most, so that what is scraped may be of before.
        wait_for("metrics as status has them", || {
            let metrics = self.metrics();
            REASONS.iter().all(|of| measured(&metrics, of) == by[of].as_f64().unwrap())
        });
        let why = self.why(lba);
        assert!(goes_around(&why, reason), "{why}");
        let said = self.scratch.ask(&["why", "v", &lba.to_string()]).stdout;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(" ago around the cache") && said.contains(text), "{said}");
    }

    fn why(&self, lba: u64) -> Value {
        let json = self.scratch.ask(&["why", "v", &lba.to_string(), "--json"]);
        serde_json::from_slice(&json.stdout).unwrap()
    }

    fn metrics(&self) -> String {
        let mut stream = UnixStream::connect(self.scratch.sockets.join("metrics")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

/// Whether `forebay why` says that what was written last went around the cache for this reason.
fn goes_around(why: &Value, reason: &str) -> bool {
    why["place"] == "backing" && why["bypass"]["reason"] == reason
}

fn measured(metrics: &str, reason: &str) -> f64 {
    let name = format!("forebay_volume_bypassed_writes_{reason}_total{{");
    let line = metrics.lines().find(|line| line.starts_with(&name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {metrics}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[test]
fn a_write_as_long_as_the_cutoff_is_too_large() {
    let case = Case::new("too-large", 64 * MIB, |disk| format!("v={disk},cutoff=128K"));
    let mut client = case.scratch.connect("v");
    client.write(8 * MIB, &[1; 256 << 10], true).unwrap();
    case.told(
        "too_large",
        8 * 256 + 3,
        "around the cache: 256 KiB at once; the cutoff is 128 KiB now",
    );
    drop(client);
    case.daemon.stop("TERM");
}

/// Small blocks, for each of which the arm moves, fill the cache: the disk takes a long write sooner than write-back makes room for it.
#[test]
fn a_write_that_the_disk_takes_before_there_is_room_goes_around_a_full_cache() {
    let mut case = Case::new("bypass-full", 256 << 30, |disk| {
        format!("v=sim+hdd:{disk}?model=7200.12&write_cache=off,cutoff=0,order=relaxed")
    });
    let is_over = Arc::new(AtomicBool::new(false));
    let write = |writer: u64| {
        let (mut client, is_over) = (case.scratch.connect("v"), is_over.clone());
        std::thread::spawn(move || {
            let mut at = writer;
            while !is_over.load(Ordering::Relaxed) {
                at = (at + 4_000_037 * 4) % (200 << 18);
                client.write(at * 4096, &[1; 4096], false).unwrap();
            }
        })
    };
    let writers: Vec<_> = (0..4).map(write).collect();
    let mut client = case.scratch.connect("v");
    let (mut at, mut lba) = (200 << 30, 0);
    // That one is counted may be another's.
    wait_for("a write around the cache", || {
        at += 2 * MIB;
        client.write(at, &[2; MIB as usize], false).unwrap();
        lba = at / 4096 + 7;
        goes_around(&case.why(lba), "full")
    });
    is_over.store(true, Ordering::Relaxed);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    client.flush().unwrap();
    case.told("full", lba, "around the cache, which was too full");
    // A batch of that takes its time.
    case.daemon.kill();
}

/// A limit on the size of files, set on the running daemon, takes the part of the failing device.
#[test]
fn a_write_behind_a_failed_cache_device_says_so() {
    let mut case = Case::new("bypass-failed", 16 * MIB, |disk| format!("v={disk}"));
    let mut client = case.scratch.connect("v");
    let pid = Pid::from_raw(case.daemon.id() as i32).unwrap();
    let limit = Rlimit { current: Some(64 << 10), maximum: None };
    prlimit(Some(pid), Resource::Fsize, limit).unwrap();
    // What is read is copied, and cannot be.
    for _ in 0..2 {
        client.read(2 * MIB, 4096).unwrap();
    }
    let failed =
        || case.scratch.status()["problems"].to_string().contains("the cache device failed");
    wait_for("the failure", failed);
    client.write(8192, &[3; 4096], true).unwrap();
    case.told("cache_failed", 2, "around the cache device, which had failed");
    // It would end with an error.
    case.daemon.kill();
}
