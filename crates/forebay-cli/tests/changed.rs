// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A backing device that somebody changed while forebay was not looking: refused while the cache
//! holds newer data, and then as the operator chooses.

use crate::support::{Daemon, Scratch, forebay, wait_for};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

const MIB: u64 = 1 << 20;

/// A volume with `[7; 8192]` at 1 MiB that is not on its backing file, whose first block has been
/// overwritten with 9 since.
fn changed(name: &str) -> (Scratch, PathBuf) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    scratch.connect("v").write(MIB, &[7; 8192], true).unwrap();
    // Who stops it is told as well as its log.
    let stop = scratch.ask(&["stop"]);
    let (code, said) = daemon.ended();
    assert_eq!((code, stop.status.code()), (Some(0), Some(0)), "{said} {stop:?}");
    let told = String::from_utf8(stop.stdout).unwrap();
    for text in [&told, &said] {
        assert!(text.contains("v: 8 KiB not yet on "), "{text}");
    }
    let file = std::fs::File::options().write(true).open(&backing).unwrap();
    file.write_all_at(&[9; 4096], 0).unwrap();
    file.sync_all().unwrap();
    (scratch, backing)
}

fn refused(scratch: &Scratch, more: &[&str]) -> String {
    let command = scratch.serve_command(more);
    let (code, said) = Daemon::try_start(command, &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    said
}

#[test]
fn dirty_data_for_a_changed_backing_device_is_refused_with_both_ways_on() {
    let (scratch, backing) = changed("changed-refused");
    let before = std::fs::read(&backing).unwrap();
    // Opening it was a write to it, so it was always written last just now.
    let file = std::fs::File::options().write(true).open(&backing).unwrap();
    let day = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    file.set_modified(day).unwrap();
    let said = refused(&scratch, &[]);
    assert_eq!(file.metadata().unwrap().modified().unwrap(), day);
    let path = backing.display().to_string();
    for text in [
        path.as_str(),
        "was changed by others since forebay stopped (its first or last MiB was written to; left at ",
        "; written last at 2023-11-14 22:13:20 UTC",
        "and the cache holds newer data for volume v; give --if-changed v=keep-dirty",
        "give --if-changed v=keep-dirty or v=lose-dirty",
        "no volume can be served",
    ] {
        assert!(said.contains(text), "no '{text}' in: {said}");
    }
    // A refusal leaves a cache that was closed.
    let again = refused(&scratch, &[]);
    assert!(!again.contains("not a clean one"), "{again}");
    // A choice for another volume is a mistake, and none for this one.
    let said = refused(&scratch, &["--if-changed", "w=lose-dirty"]);
    assert!(said.contains("--if-changed w: no such volume in this cache"), "{said}");
    assert!(std::fs::read(&backing).unwrap() == before, "a refusal writes nothing");
    // It is still there after all that.
    let daemon = scratch.serve(&["--if-changed", "v=keep-dirty"]);
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [7; 8192]);
    daemon.stop("TERM");
}

/// It named `forebay status`, though there is no daemon to be asked.
#[test]
fn a_drain_that_nobody_serves_says_how_a_changed_disk_is_drained() {
    let (scratch, backing) = changed("changed-drain");
    let cache = scratch.cache().display().to_string();
    let serve = format!("`forebay serve --cache {cache} --if-changed v=keep-dirty`");
    for more in [&[][..], &["v"]] {
        let done = forebay([&["drain", "--cache", &cache], more].concat());
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(said.contains("was changed by others") && said.contains(&serve), "{said}");
        assert!(!said.contains("forebay status"), "{said}");
    }
    let daemon = scratch.serve(&["--if-changed", "v=keep-dirty"]);
    assert!(scratch.ask(&["drain", "v"]).status.success());
    daemon.stop("TERM");
    assert!(std::fs::read(&backing).unwrap()[MIB as usize..][..8192] == [7; 8192]);
}

#[test]
fn keep_dirty_puts_the_cached_data_over_what_was_changed() {
    let (scratch, backing) = changed("changed-keep");
    let daemon = scratch.serve(&["--if-changed", "v=keep-dirty"]);
    assert!(daemon.said().contains("; dirty data is kept"), "{}", daemon.said());
    let mut client = scratch.connect("v");
    assert_eq!(client.read(0, 4096).unwrap(), [9; 4096]);
    assert_eq!(client.read(MIB, 8192).unwrap(), [7; 8192]);
    drop(client);
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    daemon.ended();
    let found = std::fs::read(&backing).unwrap();
    assert!(found[..4096] == [9; 4096] && found[MIB as usize..][..8192] == [7; 8192]);
    // It is known again: nothing has to be chosen any more.
    scratch.serve::<&str>(&[]).stop("TERM");
}

#[test]
fn lose_dirty_starts_empty_from_the_backing_device() {
    let (scratch, backing) = changed("changed-lose");
    let before = std::fs::read(&backing).unwrap();
    let daemon = scratch.serve(&["--if-changed", "v=lose-dirty"]);
    let given_up = "; starts empty, and 8 KiB that were not yet on it are given up";
    assert!(daemon.said().contains(given_up), "{}", daemon.said());
    let mut client = scratch.connect("v");
    assert_eq!(client.read(0, 4096).unwrap(), [9; 4096]);
    assert_eq!(client.read(MIB, 8192).unwrap(), [0; 8192]);
    drop(client);
    assert_eq!(scratch.status()["volumes"][0]["dirty"], false);
    daemon.stop("TERM");
    assert!(std::fs::read(&backing).unwrap() == before);
    // What was given up does not come back.
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [0; 8192]);
    daemon.stop("TERM");
}

/// Nothing is dirty, so nobody is asked: what the disk has now is what counts, not what the cache has of it.
#[test]
fn clean_blocks_of_a_changed_backing_device_are_dropped() {
    let scratch = Scratch::new("changed-clean");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    scratch.connect("v").write(4 * MIB, &[7; 8192], true).unwrap();
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    daemon.ended();
    let file = std::fs::File::options().write(true).open(&backing).unwrap();
    let change = |at: u64, byte: u8| {
        file.write_all_at(&[byte; 8192], at).unwrap();
        file.sync_all().unwrap();
    };
    // Only the ends and the superblocks are looked at (docs/faults.md): the cache still has the block, and answers for it.
    change(4 * MIB, 8);
    let daemon = scratch.serve::<&str>(&[]);
    assert!(!daemon.said().contains("backing device changed"), "{}", daemon.said());
    assert_eq!(scratch.connect("v").read(4 * MIB, 8192).unwrap(), [7; 8192]);
    daemon.stop("TERM");
    change(0, 9);
    let daemon = scratch.serve::<&str>(&[]);
    let said = daemon.said();
    assert!(
        said.contains("v: backing device changed (") && said.contains("; starts empty"),
        "{said}"
    );
    for (at, byte) in [(0, 9), (4 * MIB, 8)] {
        assert_eq!(scratch.connect("v").read(at, 8192).unwrap(), [byte; 8192], "{at}");
    }
    // What is written from now on is cached as ever, and what was dropped does not come back.
    scratch.connect("v").write(8 * MIB, &[5; 8192], true).unwrap();
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    assert!(!daemon.said().contains("backing device changed"), "{}", daemon.said());
    for (at, byte) in [(0, 9), (4 * MIB, 8), (8 * MIB, 5)] {
        assert_eq!(scratch.connect("v").read(at, 8192).unwrap(), [byte; 8192], "{at}");
    }
    daemon.stop("TERM");
    // Another one in its place is named with the one before.
    let other = scratch.file("other", 16 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", other.display())]);
    let said = daemon.said();
    let was = format!("; it was {}); starts empty", backing.display());
    assert!(said.contains("v: backing device changed (") && said.contains(&was), "{said}");
    daemon.stop("TERM");
}

/// What the batch under way writes while the daemon stops is its own doing, and known as that: the fingerprint of the
/// backing device was once taken before the batch had ended, and the next start then refused the volume.
#[test]
fn a_stop_in_the_middle_of_a_batch_knows_its_backing_device_again() {
    const PIECE: usize = 64 << 10;
    let scratch = Scratch::new("changed-batch");
    scratch.format("64M");
    let disk = scratch.file("disk", 64 * MIB);
    let volume = format!("v=sim+hdd:{}?model=7200.12&write_cache=off", disk.display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let mut client = scratch.connect("v");
    // The end of the disk, which the fingerprint has, is written last; what begins a batch is a quarter of the cache. The
    // rest stays dirty.
    client.write(64 * MIB - PIECE as u64, &[8; PIECE], false).unwrap();
    for at in 0..320 {
        client.write(at * 3 * PIECE as u64, &[7; PIECE], false).unwrap();
    }
    drop(client);
    wait_for("a batch", || scratch.status()["volumes"][0]["writeback"] == "writing");
    let said = daemon.stop("TERM");
    assert!(said.contains(" not yet on "), "{said}");
    let mut bytes = vec![0; PIECE];
    let file = std::fs::File::open(&disk).unwrap();
    file.read_exact_at(&mut bytes, 64 * MIB - PIECE as u64).unwrap();
    assert!(bytes == [8; PIECE], "the batch was not written to its end");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.connect("v").read(319 * 3 * PIECE as u64, 4096).unwrap(), [7; 4096]);
    daemon.stop("TERM");
}

/// It was refused once. At the next start the one before had not been a clean one, and nobody looked: what the cache held lay over what
/// others had written.
#[test]
fn a_change_is_seen_until_somebody_has_decided() {
    let (scratch, backing) = changed("changed-again");
    let volume = format!("v={}", backing.display());
    for _ in 0..3 {
        let said = refused(&scratch, &["--volume", &volume]);
        assert!(said.contains("was changed by others since forebay stopped"), "{said}");
        assert!(!said.contains("not a clean one"), "{said}");
    }
    // Nor what else opens the cache and leaves it as it is.
    for (name, why) in [("x", "no such volume"), ("v", "not all of it is on its backing device")] {
        let cache = scratch.cache();
        let done = forebay(["forget", "--cache", cache.to_str().unwrap(), name]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(said.contains(why), "{said}");
        let said = refused(&scratch, &[]);
        assert!(!said.contains("not a clean one"), "{said}");
    }
    // Nor that the daemon dies while the volume waits.
    let other = scratch.file("other", 16 * MIB);
    let mut daemon = scratch.serve(&["--volume", &format!("w={}", other.display())]);
    assert_eq!(scratch.status()["volumes"][0]["state"], "waiting");
    daemon.kill();
    let said = refused(&scratch, &["--volume", &volume]);
    assert!(said.contains("was changed by others since forebay stopped"), "{said}");
    // What was served then had its own writes.
    let daemon = scratch.serve(&["--if-changed", "v=keep-dirty"]);
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [7; 8192]);
    let status = scratch.status();
    assert_eq!(status["volumes"][1]["state"], "serving", "{status}");
    daemon.stop("TERM");
}

/// One dead disk kept all volumes from a clean stop.
#[test]
fn a_disk_that_cannot_be_read_keeps_no_other_from_a_clean_stop() {
    let scratch = Scratch::new("changed-dead");
    scratch.format("64M");
    let disks = ["v", "w"].map(|name| scratch.file(name, 16 * MIB));
    let [v, w] = ["v", "w"].map(|name| format!("{name}={}", scratch.path(name).display()));
    let daemon = scratch.serve(&["--volume", &v, "--volume", &w]);
    scratch.connect("w").write(MIB, &[7; 4096], true).unwrap();
    let disk = std::fs::File::options().write(true).open(&disks[0]).unwrap();
    disk.set_len(0).unwrap();
    let said = daemon.stop("TERM");
    assert!(said.contains("v: ") && said.contains("cannot be read to recognise it"), "{said}");
    assert!(said.contains("w: 4 KiB not yet on "), "{said}");
    disk.set_len(16 * MIB).unwrap();
    let daemon = scratch.serve::<&str>(&[]);
    assert!(!daemon.said().contains("not a clean one"), "{}", daemon.said());
    assert_eq!(scratch.connect("w").read(MIB, 4096).unwrap(), [7; 4096]);
    daemon.stop("TERM");
}

/// Left out, its blocks were taken for those of its disk, and the disk for one that others had changed: who then gave up what was dirty
/// lost good data.
#[test]
fn a_volume_keeps_its_logical_blocks_and_its_data_whatever_is_said_of_them() {
    let scratch = Scratch::new("changed-blocks");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let volume = |more: &str| format!("v={}{more}", backing.display());
    let daemon = scratch.serve(&["--volume", &volume(",logical_block=4096")]);
    scratch.connect("v").write(MIB, &[7; 8192], true).unwrap();
    daemon.stop("TERM");
    // As it is, with another setting; and as it was.
    for more in ["", ",weight=2", ",logical_block=4096"] {
        let daemon = scratch.serve(&["--volume", &volume(more)]);
        assert!(!daemon.said().contains("device changed"), "{}", daemon.said());
        let mut client = scratch.connect("v");
        assert_eq!(client.read(MIB, 8192).unwrap(), [7; 8192]);
        assert!(client.read(512, 512).is_err(), "its blocks are of 4096 bytes");
        drop(client);
        daemon.stop("TERM");
    }
    let said = refused(&scratch, &["--volume", &volume(",logical_block=512")]);
    assert!(said.contains("logical_block=512: it has blocks of 4096 bytes"), "{said}");
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [7; 8192]);
    daemon.stop("TERM");
}

/// Writes to a file's middle, so much later than what it has was written.
fn write_middle(file: &Path, seconds: u64, byte: u8) {
    let file = std::fs::File::options().write(true).open(file).unwrap();
    let left = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(&[byte; 4096], 8 * MIB).unwrap();
    file.set_modified(left + Duration::from_secs(seconds)).unwrap();
}

/// A file says when it was written, wherever that was: in its middle nothing else tells.
#[test]
fn a_file_that_was_written_in_its_middle_is_a_changed_one() {
    let scratch = Scratch::new("changed-middle");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let volume = format!("v={}", backing.display());
    let write = |seconds: u64, byte: u8| write_middle(&backing, seconds, byte);
    let daemon = scratch.serve(&["--volume", &volume]);
    scratch.connect("v").write(8 * MIB, &[7; 4096], true).unwrap();
    assert!(scratch.ask(&["drain"]).status.success());
    daemon.stop("TERM");
    // Whoever has written it to be as it was is not seen.
    let daemon = scratch.serve(&["--volume", &format!("{volume},mode=write-back")]);
    assert!(!daemon.said().contains("device changed"), "{}", daemon.said());
    daemon.stop("TERM");
    write(9, 9);
    let daemon = scratch.serve(&["--volume", &volume]);
    let said = daemon.said();
    assert!(said.contains("backing device changed (the file was written to)"), "{said}");
    assert_eq!(scratch.connect("v").read(8 * MIB, 4096).unwrap(), [9; 4096], "not of the cache");
    scratch.connect("v").write(MIB, &[7; 4096], true).unwrap();
    daemon.stop("TERM");
    // What is dirty waits for the operator, however often it is tried.
    write(9, 10);
    for _ in 0..3 {
        let said = refused(&scratch, &[]);
        assert!(
            said.contains("since forebay stopped (the file was written to; left at "),
            "{said}"
        );
    }
    let daemon = scratch.serve(&["--if-changed", "v=keep-dirty"]);
    let mut client = scratch.connect("v");
    assert_eq!(client.read(MIB, 4096).unwrap(), [7; 4096]);
    assert_eq!(client.read(8 * MIB, 4096).unwrap(), [10; 4096]);
    drop(client);
    daemon.stop("TERM");
}

const TOLD: &str = "backing device changed (the file was written to)";

/// Two volumes that are clean and cached, each with `[7; 4096]` in its middle, and left; then the middle of `a` is written to by others.
fn written_after_the_stop(name: &str) -> (Scratch, PathBuf) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let [a, b] = ["a", "b"].map(|name| scratch.file(name, 16 * MIB));
    let volumes =
        [&a, &b].map(|file| format!("{}={}", file.file_name().unwrap().display(), file.display()));
    let daemon = scratch.serve(&["--volume", &volumes[0], "--volume", &volumes[1]]);
    for name in ["a", "b"] {
        scratch.connect(name).write(8 * MIB, &[7; 4096], true).unwrap();
    }
    assert!(scratch.ask(&["drain"]).status.success());
    daemon.stop("TERM");
    write_middle(&a, 9, 9);
    (scratch, a)
}

fn ends(mut daemon: Daemon, signal: &str) {
    match signal {
        "KILL" => daemon.kill(),
        _ => drop(daemon.stop(signal)),
    }
}

/// What was written down when `a` was left counts until it is served, and no longer.
fn is_told_once(scratch: &Scratch) {
    let daemon = scratch.serve::<&str>(&[]);
    assert!(daemon.said().contains(&format!("a: {TOLD}")), "{}", daemon.said());
    assert!(!daemon.said().contains("b: backing"), "{}", daemon.said());
    assert_eq!(scratch.connect("a").read(8 * MIB, 4096).unwrap(), [9; 4096], "not of the cache");
    scratch.connect("a").write(8 * MIB, &[10; 4096], true).unwrap();
    ends(daemon, "KILL");
    let daemon = scratch.serve::<&str>(&[]);
    assert!(!daemon.said().contains("device changed"), "{}", daemon.said());
    assert_eq!(scratch.connect("a").read(8 * MIB, 4096).unwrap(), [10; 4096]);
    daemon.stop("TERM");
    let daemon = scratch.serve::<&str>(&[]);
    assert!(!daemon.said().contains("device changed"), "{}", daemon.said());
    daemon.stop("TERM");
}

/// Whatever opens the cache meanwhile and does not serve the volume leaves what is known of its file: `forget` of another did not.
#[test]
fn a_file_that_was_written_is_a_changed_one_behind_a_forget_of_another() {
    let (scratch, _) = written_after_the_stop("changed-forget");
    let forgot = forebay(["forget", "--cache", scratch.cache().to_str().unwrap(), "b"]);
    assert!(forgot.status.success(), "{forgot:?}");
    is_told_once(&scratch);
}

/// It waits for its file, which is changed meanwhile; the daemon is killed, or it is another volume's alone for a whole life.
#[test]
fn a_file_that_was_written_while_it_was_waited_for_is_a_changed_one() {
    for end in ["KILL", "TERM"] {
        let (scratch, a) = written_after_the_stop(&format!("changed-waits-{end}"));
        let away = scratch.path("away");
        std::fs::rename(&a, &away).unwrap();
        for _ in 0..2 {
            let daemon = scratch.serve::<&str>(&[]);
            assert_eq!(scratch.status()["volumes"][0]["state"], "waiting");
            scratch.connect("b").write(MIB, &[8; 4096], true).unwrap();
            ends(daemon, end);
        }
        std::fs::rename(&away, &a).unwrap();
        is_told_once(&scratch);
    }
}

/// Something of it is dirty, so it waits for the operator: as long as it takes, and whatever becomes of the daemon.
#[test]
fn a_file_that_was_written_is_refused_until_he_has_answered() {
    for end in ["KILL", "TERM"] {
        let (scratch, a) = written_after_the_stop(&format!("changed-answer-{end}"));
        let daemon = scratch.serve::<&str>(&[]);
        dirties(&scratch);
        daemon.stop("TERM");
        write_middle(&a, 9, 11);
        for _ in 0..2 {
            let daemon = scratch.serve::<&str>(&[]);
            let said = daemon.said();
            assert!(
                said.contains("since forebay stopped (the file was written to; left at "),
                "{said}"
            );
            assert_eq!(scratch.status()["volumes"][0]["state"], "waiting");
            ends(daemon, end);
        }
        let daemon = scratch.serve(&["--if-changed", "a=keep-dirty"]);
        let mut client = scratch.connect("a");
        assert_eq!(client.read(8 * MIB, 4096).unwrap(), [11; 4096]);
        assert_eq!(client.read(MIB, 4096).unwrap(), [8; 4096]);
        drop(client);
        ends(daemon, "KILL");
        let daemon = scratch.serve::<&str>(&[]);
        assert_eq!(scratch.connect("a").read(MIB, 4096).unwrap(), [8; 4096]);
        daemon.stop("TERM");
    }
}

/// It was drained.
fn dirties(scratch: &Scratch) {
    let set = scratch.ask(&["set", "a", "mode=write-back"]);
    assert!(set.status.success(), "{set:?}");
    scratch.connect("a").write(MIB, &[8; 4096], true).unwrap();
}

/// A daemon that is killed before it serves has noted nothing: half of those that are killed as they start did.
#[test]
fn a_file_that_was_written_is_a_changed_one_to_who_comes_after_a_killed_start() {
    let (scratch, a) = written_after_the_stop("changed-killed");
    let start_and_kill = || {
        for round in 0..16 {
            let command = scratch.serve_command::<&str>(&[]);
            Daemon::start_and_kill(command, Duration::from_millis(10 + round * 3));
        }
    };
    start_and_kill();
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(scratch.connect("a").read(8 * MIB, 4096).unwrap(), [9; 4096], "not of the cache");
    dirties(&scratch);
    daemon.stop("TERM");
    write_middle(&a, 9, 11);
    for byte in 12..15 {
        start_and_kill();
        write_middle(&a, 9, byte);
        let said = refused(&scratch, &["--volume", &format!("a={}", a.display())]);
        assert!(said.contains("since forebay stopped (the file was written to"), "{said}");
    }
}
