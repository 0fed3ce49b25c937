// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that cannot be written any more, as on a full disk: a named state, nothing lost, and the
//! way back. The log says so once a minute, not once a second.
//!
//! A limit on the size of files, set on the running daemon, takes the part of the full disk: what
//! lies behind it cannot be written.

use crate::support::model::content;
use crate::support::{Daemon, Scratch, signal, wait_for};
use crate::upgrade::upgrade;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// From now on the daemon writes no byte of a file at this offset or behind it.
fn limit(daemon: &Daemon, bytes: Option<u64>) {
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    // The hard limit stays, so that there is a way back.
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

fn problems(scratch: &Scratch) -> String {
    scratch.status()["problems"].to_string()
}

#[test]
fn a_full_backing_device_is_named_and_loses_nothing() {
    for io in ["uring", "threads"] {
        let scratch = Scratch::new("full-backing");
        scratch.format("64M");
        let backing = scratch.file("backing", 128 * MIB);
        let volume = format!("v={}", backing.display());
        let daemon = scratch.serve(&["--volume", &volume, "--io", io]);
        let at = 100 * MIB;
        let bytes = content(1, at, MIB);
        scratch.connect("v").write(at, &bytes, true).unwrap();
        scratch.connect("v").write(0, &bytes[..4096], true).unwrap();
        // The cache file lies before the limit.
        limit(&daemon, Some(80 * MIB));
        let mut drain = scratch.drain_command().spawn().unwrap();
        let refusal = "refuses to be written (File too large (os error 27)); dirty data is kept";
        wait_for("a refusal", || problems(&scratch).contains(refusal));
        // It is tried again each second, and told of once.
        let faults = || scratch.status()["volumes"][0]["backing_faults"].as_u64().unwrap();
        wait_for("more refusals", || faults() >= 3);
        let said = daemon.said();
        let lines = |what: &str| said.lines().filter(|line| line.contains(what)).count();
        assert_eq!(lines("a write failed: File too large"), 1, "{said}");
        assert_eq!(lines("WARN v: degraded: "), 1, "{said}");
        // What was answered is read as it was.
        assert!(scratch.connect("v").read(at, MIB as u32).unwrap() == bytes);
        assert!(drain.try_wait().unwrap().is_none(), "it cannot be drained");
        limit(&daemon, None);
        assert!(drain.wait().unwrap().success());
        wait_for("health", || daemon.said().contains("v: drained"));
        assert_eq!(problems(&scratch), "[]");
        let said = daemon.stop("TERM");
        assert!(said.contains("a write failed: File too large (os error 27) ("), "{said}");
        assert!(said.contains(" more in the last minute)"), "{said}");
        let found = std::fs::read(&backing).unwrap();
        assert!(found[at as usize..][..MIB as usize] == bytes && found[..4096] == bytes[..4096]);
    }
}

#[test]
fn a_full_cache_device_is_named_and_loses_nothing() {
    let scratch = Scratch::new("full-cache");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 128 * MIB).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let mut client = scratch.connect("v");
    let mut good = 0;
    for at in 0..8 {
        client.write(at * MIB, &content(2, at * MIB, MIB), false).unwrap();
        good = at + 1;
    }
    client.flush().unwrap();
    limit(&daemon, Some(2 * MIB));
    for at in 8..64 {
        if client.write(at * MIB, &content(2, at * MIB, MIB), false).is_err() {
            break;
        }
        good = at + 1;
    }
    client.flush().unwrap_err();
    client.write(0, &[1; 4096], false).unwrap_err();
    let named = "the cache device failed; writes are refused until the daemon is restarted";
    wait_for("the state", || problems(&scratch).contains(named));
    assert_eq!(scratch.status()["cache"]["health"], "failed");
    wait_for("the log", || daemon.said().contains("ERROR ") && daemon.said().contains("File too"));
    // What was answered can be read, now and after a restart.
    let intact = |scratch: &Scratch| {
        let mut client = scratch.connect("v");
        for at in 0..good {
            let found = client.read(at * MIB, MIB as u32).unwrap();
            assert!(found == content(2, at * MIB, MIB), "{at}");
        }
    };
    intact(&scratch);
    drop(client);
    signal(daemon.id(), "TERM");
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("not everything could be made durable"), "{said}");
    assert!(said.contains("the cache device failed while it was served"), "{said}");
    let daemon = scratch.serve::<&str>(&[]);
    intact(&scratch);
    scratch.connect("v").write(0, &[1; 4096], true).unwrap();
    assert!(scratch.ask(&["drain"]).status.success());
    daemon.stop("TERM");
}

/// Both ended with 0, and who had asked was told nothing.
#[test]
fn a_stop_that_could_not_make_everything_durable_says_so_and_it_is_recovered() {
    let scratch = Scratch::new("full-stop");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 16 * MIB).display());
    // Less than a segment, and no time at which it is written: the stop alone comes to the limit.
    let daemon = scratch.serve(&["--volume", &volume, "--sync-after", "1h"]);
    let (mut client, length) = (scratch.connect("v"), 64 << 10);
    client.write(0, &content(3, 0, length), false).unwrap();
    drop(client);
    limit(&daemon, Some(4096));
    let stopped = scratch.ask(&["stop"]);
    let told = String::from_utf8_lossy(&stopped.stderr).into_owned();
    assert_eq!(stopped.status.code(), Some(1), "{told}");
    for text in
        ["not everything is durable", "memory of this machine only", "serve it again before"]
    {
        assert!(told.contains(text), "{told}");
    }
    assert!(!scratch.control().exists());
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("not everything is durable"), "{said}");
    let daemon = scratch.serve::<&str>(&[]);
    assert!(scratch.connect("v").read(0, length as u32).unwrap() == content(3, 0, length));
    assert!(scratch.ask(&["stop"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
}

#[test]
fn the_log_tells_changes_of_state_at_the_level_asked_for() {
    let scratch = Scratch::new("log");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 16 * MIB).display());
    let life = |more: &[&str]| {
        let args = [&["--volume", &volume], more].concat();
        let daemon = scratch.serve(&args);
        scratch.connect("v").write(0, &[5; 4096], true).unwrap();
        assert!(scratch.ask(&["drain", "v"]).status.success());
        let clean = scratch.status();
        assert_eq!(clean["volumes"][0]["dirty"], false);
        daemon.stop("TERM")
    };
    let said = life(&[]);
    let mut rest = said.as_str();
    for line in [
        " INFO v: served: 16 MiB in front of ",
        " INFO started: cache ",
        " INFO v: drains: 4 KiB to go",
        " INFO stops: a signal came",
        " INFO v: drained: ",
        " INFO stopped: everything is durable",
    ] {
        // The drain may be over before the next look.
        let at = if line.contains("drained:") { said.find(line) } else { rest.find(line) };
        let at = at.unwrap_or_else(|| panic!("no '{line}' in its place in: {said}"));
        if !line.contains("drained:") {
            rest = &rest[at..];
        }
    }
    assert!(said.lines().all(|line| line.starts_with("20") && line.contains("Z ")), "{said}");
    assert!(!said.contains("DEBUG"), "{said}");
    let debug = life(&["--log-level", "debug"]);
    let batches = |line: &str| line.contains("DEBUG v: ") && line.ends_with(" written back");
    assert!(debug.lines().any(batches), "{debug}");
    assert_eq!(life(&["--log-level", "error"]), "");
}

/// A drain that was under way looked on for ever, and a second attempt to attach a volume that could not be recorded ended the daemon.
#[test]
fn behind_a_failed_cache_device_a_drain_ends_and_a_volume_may_be_attached_in_vain_twice() {
    let scratch = Scratch::new("full-drain");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 128 * MIB).display());
    let other = format!("other={}", scratch.file("other", MIB).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let at = 100 * MIB;
    scratch.connect("v").write(at, &content(4, at, MIB), true).unwrap();
    // The cache file lies before the limit, and what is to be written back behind it.
    limit(&daemon, Some(80 * MIB));
    let mut drain = scratch.drain_command();
    let drain = drain.stderr(std::process::Stdio::piped()).spawn().unwrap();
    wait_for("a refusal", || problems(&scratch).contains("refuses to be written"));
    limit(&daemon, Some(2 * MIB));
    let mut client = scratch.connect("v");
    wait_for("the failure", || {
        let _ = client.write(0, &content(5, 0, MIB), true);
        scratch.status()["cache"]["health"] == "failed"
    });
    let drained = drain.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&drained.stderr);
    assert_eq!(drained.status.code(), Some(1), "{said}");
    assert!(said.contains("v: cannot be drained: the cache device has failed"), "{said}");
    for _ in 0..2 {
        let done = scratch.ask(&["attach", &other]);
        assert_eq!(done.status.code(), Some(1), "{done:?}");
        let done = scratch.ask(&["attach", "other"]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(said.contains("other: no such volume in this cache"), "{said}");
    }
    // Nobody would serve any more if the device could not be opened again.
    let refused = upgrade(&scratch, Path::new(env!("CARGO_BIN_EXE_forebay"))).unwrap_err();
    assert!(refused.contains("the cache device has failed, and neither"), "{refused}");
    assert!(client.read(at, MIB as u32).unwrap() == content(4, at, MIB));
    drop(client);
    signal(daemon.id(), "TERM");
    assert_eq!(daemon.ended().0, Some(1));
}
