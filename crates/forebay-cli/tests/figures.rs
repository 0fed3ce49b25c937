// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The figures of `status --json`, beside what was really done.

use crate::support::model::content;
use crate::support::{Daemon, Scratch, wait_for};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// A cache of 64 MiB.
fn serve(name: &str) -> (Scratch, Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backing = scratch.file("backing", 200 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    (scratch, daemon)
}

/// From now on the daemon writes no byte of a file at this offset or behind it. The cache lies before 80 MiB.
fn limit(daemon: &Daemon, bytes: Option<u64>) {
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

fn volume(scratch: &Scratch) -> Value {
    scratch.status()["volumes"][0].take()
}

fn count(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("no {name} in {value}"))
}

#[test]
fn shares_of_reads_are_those_of_where_they_were_answered() {
    let (scratch, daemon) = serve("figures-reads");
    let mut client = scratch.connect("v");
    for at in 0..6 {
        client.write(100 * MIB + at * BLOCK, &content(1, at, BLOCK), false).unwrap();
    }
    client.write_zeroes(110 * MIB, BLOCK as u32, Default::default()).unwrap();
    assert!(volume(&scratch)["hit_ratio"].is_null(), "nothing was read");
    let mut read = |at: u64| drop(client.read(at, BLOCK as u32).unwrap());
    // Written: six. Zeros: one. Elsewhere: three, far from one another.
    (0..6).for_each(|at| read(100 * MIB + at * BLOCK));
    read(110 * MIB);
    [10, 45, 70].into_iter().for_each(|at| read(at * MIB));
    let it = volume(&scratch);
    assert_eq!((count(&it, "reads"), count(&it, "read_bytes")), (10, 10 * BLOCK));
    assert_eq!((count(&it, "hit_blocks"), count(&it, "miss_blocks")), (6, 3));
    assert_eq!(it["hit_ratio"], 0.7, "{it}");
    assert_eq!(count(&it["device"], "reads"), 3, "{it}");
    // Seven writes and ten reads.
    assert_eq!(it["without_backing_ratio"].as_f64(), Some(14.0 / 17.0), "{it}");
    // What was missed is there now.
    [10, 45, 70].into_iter().for_each(|at| read(at * MIB));
    let it = volume(&scratch);
    assert_eq!(it["hit_ratio"].as_f64(), Some(10.0 / 13.0), "{it}");
    assert_eq!(it["without_backing_ratio"].as_f64(), Some(17.0 / 20.0), "{it}");
    assert_eq!(count(&it["device"], "reads"), 3, "{it}");
    drop(client);
    daemon.stop("TERM");
}

#[test]
fn bytes_are_those_that_devices_were_given() {
    let (scratch, daemon) = serve("figures-bytes");
    limit(&daemon, Some(80 * MIB));
    let mut client = scratch.connect("v");
    let before = scratch.status();
    let blocks = 100;
    for at in 0..blocks {
        // No two adjoin.
        client.write(100 * MIB + 2 * at * BLOCK, &content(1, at, BLOCK), false).unwrap();
    }
    client.flush().unwrap();
    let after = scratch.status();
    let it = &after["volumes"][0];
    assert_eq!(
        (count(it, "written_bytes"), count(it, "dirty_bytes")),
        (blocks * BLOCK, blocks * BLOCK)
    );
    let logged = count(it, "cache_bytes_written");
    assert_eq!(
        it["cache_bytes_per_written_byte"].as_f64(),
        Some(logged as f64 / (blocks * BLOCK) as f64)
    );
    // Each block, and a header. All of it was given to the device, which is given superblocks and
    // checkpoints besides.
    assert!(logged >= (blocks + 1) * BLOCK, "{it}");
    let given = |status: &Value| count(&status["cache"]["device"], "write_bytes");
    assert!(given(&after) - given(&before) >= logged, "{after}");
    assert_eq!((count(it, "backing_bytes_written"), count(&it["device"], "write_bytes")), (0, 0));
    limit(&daemon, None);
    drop(client);
    assert!(scratch.ask(&["drain"]).status.success());
    let it = volume(&scratch);
    // Each of them, once: what was refused before is no byte that was written.
    assert_eq!(count(&it, "backing_bytes_written"), blocks * BLOCK, "{it}");
    assert_eq!(it["backing_bytes_per_written_byte"], 1.0, "{it}");
    assert_eq!((count(&it, "dirty_bytes"), &it["dirty"]), (0, &false.into()), "{it}");
    let file = std::fs::read(scratch.path("backing")).unwrap();
    let written = file.chunks(BLOCK as usize).filter(|block| block.iter().any(|byte| *byte != 0));
    assert_eq!(written.count() as u64, blocks);
    daemon.stop("TERM");
}

#[test]
fn times_are_of_what_grows_and_not_of_what_is_refused() {
    let (scratch, daemon) = serve("figures-times");
    limit(&daemon, Some(80 * MIB));
    let times = || {
        let status = scratch.status();
        let of = |value: &Value| value.as_f64();
        let volume = &status["volumes"][0];
        (of(&status["cache"]["seconds_to_full"]), of(&volume["seconds_to_drained"]), status)
    };
    let (full, drained, status) = times();
    assert_eq!((full, drained), (None, None), "nothing is dirty: {status}");
    // Dirty data grows, since none of it can be written back.
    let mut client = scratch.connect("v");
    let mut full = None;
    for at in 100..120 {
        client.write(at * MIB, &content(1, at, MIB), false).unwrap();
        full = full.or(times().0);
    }
    wait_for("a time to full", || {
        full = full.or(times().0);
        full.is_some()
    });
    assert!(full > Some(0.0), "{full:?}");
    // What is refused is no rate.
    let problems = || scratch.status()["problems"].to_string();
    wait_for("a refusal", || problems().contains("refuses to be written"));
    let (_, drained, status) = times();
    let it = &status["volumes"][0];
    assert_eq!((drained, &it["writeback_bytes_per_second"]), (None, &0.0.into()), "{status}");
    // The disk takes a part of the batch, and refuses what lies behind that: there is a rate, and what is written now is written again and
    // again. `status` said when that would be done.
    client.write(180 * MIB, &content(1, 180, MIB), false).unwrap();
    limit(&daemon, Some(150 * MIB));
    let mut drain = scratch.drain_command().spawn().unwrap();
    wait_for("a rate, and a refusal", || {
        let (_, drained, status) = times();
        let it = &status["volumes"][0];
        let is_refused = it["troubles"][0] == "backing_refuses_to_be_written";
        assert!(!is_refused || drained.is_none(), "{status}");
        is_refused && it["writeback_bytes_per_second"].as_f64() > Some(0.0)
    });
    limit(&daemon, None);
    drop(client);
    assert!(drain.wait().unwrap().success());
    let (_, drained, status) = times();
    assert_eq!(drained, None, "{status}");
    daemon.stop("TERM");
}

#[test]
fn the_time_to_drained_is_that_of_what_is_left_at_its_rate() {
    const SIZE: u64 = 256 << 30;
    let scratch = Scratch::new("figures-drained");
    scratch.format("64M");
    let backing = scratch.file("backing", SIZE);
    // So slow that what is dirty stays so for a while.
    let disk = format!("v=sim+hdd:{}?model=7200.12", backing.display());
    let mut daemon = scratch.serve(&["--volume", &disk]);
    let mut client = scratch.connect("v");
    for at in 0..2000 {
        client.write(at * (SIZE / 2048), &content(1, at, BLOCK), false).unwrap();
    }
    let mut drain = scratch.drain_command().spawn().unwrap();
    wait_for("a rate", || {
        let it = volume(&scratch);
        let (dirty, rate) = (count(&it, "dirty_bytes"), it["writeback_bytes_per_second"].as_f64());
        let expected = rate.filter(|rate| *rate > 0.0 && dirty > 0).map(|rate| dirty as f64 / rate);
        let drained = it["seconds_to_drained"].as_f64();
        let same = |a: f64, b: f64| (a - b).abs() <= b * 1e-9;
        assert!(drained.zip(expected).is_none_or(|(a, b)| same(a, b)), "{it}");
        assert_eq!(drained.is_some(), expected.is_some(), "{it}");
        drained.is_some()
    });
    daemon.kill();
    assert!(!drain.wait().unwrap().success(), "it was not done");
}
