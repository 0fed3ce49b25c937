// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A backing device served without a cache, as it is or as slow as another disk.

use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, good, skip, wait_for};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn serve(scratch: &Scratch, volume: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", "--volume", volume, "--attach", "none", "--listen"]);
    command.arg(scratch.listen()).arg("--control").arg(scratch.control());
    command
}

/// What is answered is on the device, so nothing is missing when the daemon is killed: there is no cache.
#[test]
fn a_bare_volume_is_its_device() {
    let scratch = Scratch::new("bare");
    let disk = scratch.file("disk", 16 * MIB + 512);
    let volume = format!("v={}", disk.display());
    let mut daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    client.write(MIB, &[7; 8192], false).unwrap();
    client.write(16 * MIB, &[9; 512], false).unwrap();
    client.write(3 * MIB - 512, &[5; 1024], true).unwrap();
    assert_eq!(client.read(MIB + 4096, 8192).unwrap(), [[7; 4096], [0; 4096]].concat());
    let status = scratch.status();
    let it = &status["volumes"][0];
    assert_eq!((&it["mode"], &it["dirty_bytes"]), (&"write-around".into(), &0.into()));
    assert!(it["written_bytes"].as_u64().unwrap() >= 8192, "{it}");
    daemon.kill();
    let file = std::fs::File::open(&disk).unwrap();
    let bytes = |at: u64, length: usize| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    assert_eq!(bytes(MIB, 8192), [7; 8192]);
    assert_eq!(bytes(16 * MIB, 512), [9; 512]);
    assert_eq!(bytes(3 * MIB - 1024, 2048), [[0; 512], [5; 512], [5; 512], [0; 512]].concat());
}

/// What the daemon before answered may be in the device's own cache. Without a cache nothing says that it was killed, and the next one
/// answered a flush that never came to the device.
#[test]
fn the_first_flush_behind_a_killed_daemon_is_one_of_the_device() {
    let scratch = Scratch::new("bare-flush");
    let volume = format!("v={}", scratch.file("disk", 16 * MIB).display());
    let flushes = || scratch.status()["volumes"][0]["device"]["flushes"].as_u64().unwrap();
    let mut daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
    scratch.connect("v").write(MIB, &[7; 8192], false).unwrap();
    daemon.kill();
    std::fs::remove_file(scratch.nbd()).unwrap();
    let daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    let before = flushes();
    client.flush().unwrap();
    assert_eq!(flushes(), before + 1);
    client.flush().unwrap();
    assert_eq!(flushes(), before + 1, "nothing was written since");
    daemon.stop("TERM");
}

/// Its control socket has another name after each start, since there is no cache to name it after: `upgrade` waited for the one before until
/// its time was over, and called that a failure.
#[test]
fn a_bare_daemon_is_found_again_when_it_was_upgraded() {
    let scratch = Scratch::new("bare-upgraded");
    let runtime = scratch.sockets.join("runtime");
    let Some(apart) = Apart::with(&[(&runtime, "/run")]) else {
        return skip("no mount namespace of its own");
    };
    let disk = scratch.file("disk", 16 * MIB);
    let mut command = apart.command(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", "--attach", "none", "--volume", &format!("v={}", disk.display())]);
    command.arg("--listen").arg(scratch.listen());
    let mut daemon = Daemon::start(command, &scratch.path("stderr"));
    scratch.connect("v").write(MIB, &[7; 8192], true).unwrap();
    let mut upgrade = apart.command(env!("CARGO_BIN_EXE_forebay"));
    upgrade.args(["upgrade", "--timeout", "20s", "--exec", env!("CARGO_BIN_EXE_forebay")]);
    let said = good(&mut upgrade);
    assert!(said.contains("by stop and recovery, because there is no cache"), "{said}");
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [7; 8192]);
    daemon.kill();
}

/// Copies of what was read lay in the memory that stands for the cache, and were read instead of the device.
#[test]
fn a_bare_volume_is_read_from_its_device_each_time() {
    let scratch = Scratch::new("bare-reads");
    let volume = format!("v={}", scratch.file("disk", 16 * MIB).display());
    let daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    for times in 1..=3 {
        client.read(MIB, 65536).unwrap();
        let status = scratch.status();
        let it = &status["volumes"][0];
        assert_eq!((&it["device"]["reads"], &it["hit_blocks"]), (&times.into(), &0.into()), "{it}");
    }
    let why = scratch.ask(&["why", "v", "256"]);
    let why = String::from_utf8_lossy(&why.stdout).into_owned();
    assert!(!why.contains("its next read"), "there is no cache: {why}");
    client.cache(MIB, 65536).unwrap();
    assert_eq!(scratch.status()["volumes"][0]["device"]["reads"], 3);
    daemon.stop("TERM");
}

#[test]
fn what_needs_a_cache_is_refused_without_one() {
    let scratch = Scratch::new("bare-refused");
    let disk = scratch.file("disk", MIB);
    for (volume, expected) in [
        (format!("v={},mode=write-back", disk.display()), "mode=write-back needs a cache"),
        (format!("v=sim+hdd:{}?model=floppy", disk.display()), "'floppy' is no disk model"),
    ] {
        let done = serve(&scratch, &volume).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(!done.status.success() && said.contains(expected), "{said}");
    }
    let mut none = Command::new(env!("CARGO_BIN_EXE_forebay"));
    let done = none.args(["serve", "--attach", "none"]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(2));
    assert!(said.contains("Give a cache (--cache)"), "{said}");
}

/// A disk of 7,200 turns a minute cannot read twenty far places faster than it seeks.
#[test]
fn a_simulated_disk_is_as_slow_as_its_model_and_keeps_its_bytes() {
    let scratch = Scratch::new("bare-simulated");
    let disk = scratch.file("disk", 256 << 30);
    let volume = format!("v=sim+hdd:{}?model=7200.12", disk.display());
    let daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    client.write(0, &[3; 4096], true).unwrap();
    let begun = Instant::now();
    for at in 1..=20 {
        let far = if at % 2 == 0 { 0 } else { 200 << 30 };
        assert_eq!(client.read(far + at * 4096, 4096).unwrap(), [0; 4096]);
    }
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(20 * 8), "{took:?}: faster than the arm moves");
    assert_eq!(client.read(0, 4096).unwrap(), [3; 4096]);
    drop(client);
    daemon.stop("TERM");
}

/// The cache remembers how slow its disk is to be.
#[test]
fn a_simulated_disk_stays_one_behind_a_cache() {
    let scratch = Scratch::new("bare-cached");
    scratch.format("64M");
    let disk = scratch.file("disk", 64 * MIB);
    let address = format!("sim+hdd:{}?model=st3500641as&write_cache=off", disk.display());
    let daemon = scratch.serve(&["--volume", &format!("v={address}")]);
    let mut client = scratch.connect("v");
    client.write(MIB, &[8; 4096], false).unwrap();
    drop(client);
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    assert!(std::fs::read_to_string(scratch.path("stderr")).unwrap().contains(&address));
    assert_eq!(scratch.status()["volumes"][0]["model"], "st3500641as, write cache off");
    assert!(scratch.ask(&["drain"]).status.success());
    daemon.stop("TERM");
    let mut bytes = [0; 4096];
    std::fs::File::open(&disk).unwrap().read_exact_at(&mut bytes, MIB).unwrap();
    assert_eq!(bytes, [8; 4096]);
}

/// `status` named the file alone, and who had given a volume more than the disk has measured something else than the disk.
#[test]
fn whose_times_a_disk_has_is_told_and_where_they_end() {
    let scratch = Scratch::new("bare-model");
    let of_7200_12 = 533_420_000_000;
    for (bytes, is_beyond) in [(of_7200_12 / MIB * MIB, false), (1 << 40, true)] {
        let disk = scratch.file("disk", bytes);
        let volume = format!("v=sim+hdd:{}?model=7200.12", disk.display());
        let daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
        let it = &scratch.status()["volumes"][0];
        let backing = disk.to_str().unwrap();
        assert_eq!((&it["backing"], &it["model"]), (&backing.into(), &"7200.12".into()));
        let text = String::from_utf8(scratch.ask(&["status"]).stdout).unwrap();
        let line = format!("  backing {backing}, simulated as 7200.12, as of ");
        assert!(text.contains(&line), "{text}");
        let said = daemon.stop("TERM");
        let warning = " WARN v: has 1 TiB, and the simulated disk 497 GiB: what is behind its end takes the times of its last sector";
        assert_eq!(said.contains("the simulated disk"), is_beyond, "{said}");
        assert_eq!(said.contains(warning), is_beyond, "{said}");
    }
    let plain = format!("v={}", scratch.file("plain", MIB).display());
    let daemon = Daemon::start(serve(&scratch, &plain), &scratch.path("stderr"));
    assert_eq!(scratch.status()["volumes"][0]["model"], serde_json::Value::Null);
    daemon.stop("TERM");
}

/// It was told that there is nothing to set, which it had not asked for, in the place of what was wrong.
#[test]
fn a_bare_volume_that_is_not_detached_says_why() {
    let scratch = Scratch::new("bare-detach");
    let volume = format!("v={}", scratch.file("disk", 16 * MIB).display());
    let daemon = Daemon::start(serve(&scratch, &volume), &scratch.path("stderr"));
    let client = scratch.connect("v");
    let done = scratch.ask(&["detach", "v"]);
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!((done.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("has 1 NBD client; end them first"), "{said}");
    assert_eq!(scratch.status()["volumes"][0]["drained"], false);
    drop(client);
    wait_for("it goes", || scratch.ask(&["detach", "v"]).status.success());
    daemon.stop("TERM");
}
