// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What becomes of files while they are served: one that is removed, replaced, moved or cut is told, and none of it is called the plain
//! disk.

use crate::support::{self, Daemon, Scratch, wait_for};
use crate::upgrade::upgrade;
use forebay_serve::nbd::client::Client;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// What is dirty.
const AT: u64 = 50 * MIB;

/// A volume that is dirty, of a file of ones.
fn served(name: &str) -> (Scratch, Daemon, PathBuf) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backing = scratch.path("v");
    std::fs::write(&backing, vec![1; SIZE as usize]).unwrap();
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    write(&mut scratch.connect("v"), 2);
    (scratch, daemon, backing)
}

fn write(client: &mut Client<UnixStream>, byte: u8) {
    client.write(AT, &[byte; 4096], true).unwrap();
}

fn troubles(scratch: &Scratch) -> String {
    scratch.status()["volumes"][0]["troubles"].to_string()
}

fn problems(scratch: &Scratch) -> String {
    scratch.status()["problems"].to_string()
}

/// It ends with 1, and says all of that; and nothing of a plain disk.
fn fails(done: &Output, parts: &[&str]) {
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    for part in parts {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("is the plain disk"), "{said}");
}

fn byte_at(path: &Path, offset: u64) -> u8 {
    let mut byte = [0];
    File::open(path).unwrap().read_exact_at(&mut byte, offset).unwrap();
    byte[0]
}

fn cut(backing: &Path, bytes: u64) {
    OpenOptions::new().write(true).open(backing).unwrap().set_len(bytes).unwrap();
}

/// Write-back made it long again: what was missing was zeros, and the drain said that it was the plain disk.
#[test]
fn a_backing_file_that_was_cut_is_told_and_not_made_long_again() {
    let (scratch, daemon, backing) = served("gone-cut");
    cut(&backing, 32 * MIB);
    wait_for("that it is told", || troubles(&scratch) == r#"["backing_file_cut"]"#);
    let told = problems(&scratch);
    for part in
        ["has been cut to 33554432 bytes", "the volume has 67108864", "truncate -s 67108864"]
    {
        assert!(told.contains(part), "{part}: {told}");
    }
    let said = upgrade(&scratch, Path::new(env!("CARGO_BIN_EXE_forebay"))).unwrap_err();
    assert!(said.contains("not before it is as long again"), "{said}");
    let mut client = scratch.connect("v");
    assert!(client.read(40 * MIB, 4096).is_err());
    write(&mut client, 2);
    assert_eq!(client.read(AT, 4096).unwrap(), [2; 4096], "the cache has it");
    fails(&scratch.ask(&["drain"]), &["v: cannot be drained:", "has been cut to 33554432 bytes"]);
    fails(&scratch.ask(&["stop", "--drain"]), &["the daemon was not stopped", "has been cut to"]);
    let refused = || scratch.status()["volumes"][0]["backing_faults"].as_u64() > Some(0);
    wait_for("that the write is refused", refused);
    assert_eq!(std::fs::metadata(&backing).unwrap().len(), 32 * MIB);
    assert!(client.read(40 * MIB, 4096).is_err());
    // What somebody else writes there makes nothing good of it.
    let file = OpenOptions::new().write(true).open(&backing).unwrap();
    file.write_all_at(&[7; 4096], 60 * MIB).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(client.read(40 * MIB, 4096).is_err());
    assert!(problems(&scratch).contains("has been cut to 33554432 bytes"));
    // The disk is whole again, and so is the volume.
    file.write_all_at(&vec![1; 32 << 20], 32 * MIB).unwrap();
    wait_for("that all is well", || !troubles(&scratch).contains("backing_file_cut"));
    assert_eq!(client.read(40 * MIB, 4096).unwrap(), [1; 4096]);
    write(&mut client, 3);
    drop(client);
    let done = scratch.ask(&["stop", "--drain"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(daemon.ended().0, Some(0));
    assert_eq!((byte_at(&backing, AT), byte_at(&backing, 40 * MIB)), (3, 1));
}

/// Its log made it long again, and nobody heard what had become of it.
#[test]
fn a_cache_file_that_was_cut_is_told() {
    let (scratch, daemon, _) = served("gone-cache-cut");
    cut(&scratch.cache(), 2 * MIB);
    let is_told = || {
        problems(&scratch)
            .contains("cut to 2097152 bytes while it was served, and the cache has 67108864")
    };
    wait_for("that it is told", is_told);
    let mut client = scratch.connect("v");
    for at in 0..SIZE / 2 / MIB {
        client.write(at * MIB, &vec![3; 1 << 20], false).unwrap();
    }
    client.flush().unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(is_told(), "{}", problems(&scratch));
    write(&mut client, 4);
    drop(client);
    let done = scratch.ask(&["stop"]);
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(said.contains("was cut to 2097152 bytes"), "{said}");
    daemon.ended();
}

/// Of a file that was cut behind all that is dirty: the volume may go, and what it leaves is told.
#[test]
fn a_volume_may_leave_a_backing_file_that_was_cut() {
    let (scratch, daemon, backing) = served("gone-left");
    let done = scratch.ask(&["drain"]);
    assert!(done.status.success(), "{done:?}");
    cut(&backing, 52 * MIB);
    fails(&scratch.ask(&["drain"]), &["has been cut to 54525952 bytes"]);
    fails(&scratch.ask(&["detach", "v"]), &["v: detached, but", "has been cut to 54525952 bytes"]);
    assert_eq!(byte_at(&backing, AT), 2);
    daemon.stop("TERM");
}

/// All was well, as it was told, and all of the data was gone with the process.
#[test]
fn a_backing_file_that_was_removed_or_replaced_is_told_and_can_be_saved() {
    for is_replaced in [false, true] {
        let (scratch, daemon, backing) = served("gone-removed");
        match is_replaced {
            true => std::fs::rename(scratch.file("other", SIZE), &backing).unwrap(),
            false => std::fs::remove_file(&backing).unwrap(),
        }
        let what = if is_replaced { "has been replaced by another" } else { "has been removed" };
        wait_for("that it is told", || troubles(&scratch) == r#"["backing_file_gone"]"#);
        let told = problems(&scratch);
        assert!(told.contains(what) && told.contains("`forebay drain v`"), "{told}");
        fails(&scratch.ask(&["stop"]), &["the daemon was not stopped", what, "all the same"]);
        fails(&scratch.ask(&["drain"]), &["v: all of it is written back, but", what]);
        fails(&scratch.ask(&["stop", "--drain"]), &["the daemon was not stopped", what]);
        fails(&scratch.ask(&["detach", "v"]), &["v: not detached", what]);
        let (_, save) = told.split_once("`cp ").unwrap();
        let save = save.split_once(" NEW`").unwrap().0;
        let new = scratch.path("saved");
        support::good(Command::new("cp").args(save.split(' ')).arg(&new));
        assert_eq!((byte_at(&new, AT), byte_at(&new, 0)), (2, 1));
        assert_eq!(std::fs::metadata(&new).unwrap().len(), SIZE);
        support::signal(daemon.id(), "TERM");
        let (code, said) = daemon.ended();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("what the volume had is gone"), "{said}");
        assert!(!said.contains("everything is durable"), "{said}");
    }
}

#[test]
fn a_backing_file_that_was_moved_is_told_and_can_be_moved_back() {
    let (scratch, daemon, backing) = served("gone-moved");
    let away = scratch.path("away");
    std::fs::rename(&backing, &away).unwrap();
    let told = format!("which is {} now", away.display());
    fails(&scratch.ask(&["drain"]), &["v: all of it is written back, but", &told]);
    assert_eq!(troubles(&scratch), r#"["backing_file_gone"]"#);
    // A second name is none that can be told.
    let second = scratch.path("second");
    std::fs::hard_link(&away, &second).unwrap();
    std::fs::remove_file(&away).unwrap();
    fails(&scratch.ask(&["drain"]), &["that has another name (`find -inum "]);
    std::fs::rename(&second, &backing).unwrap();
    wait_for("that all is well", || troubles(&scratch) == "[]");
    // All of it is somewhere.
    std::fs::rename(&backing, &away).unwrap();
    fails(
        &scratch.ask(&["detach", "v"]),
        &["v: detached, but", "does not lead any more to the file"],
    );
    assert_eq!(byte_at(&away, AT), 2);
    daemon.stop("TERM");
}

/// Looks that had begun before the volume grew took its file for one that was cut: requests to what was new failed.
#[test]
fn a_file_that_grows_with_its_volume_is_not_cut() {
    let (scratch, daemon, backing) = served("gone-grown");
    for at in 1..=12 {
        cut(&backing, SIZE + at * MIB);
        assert!(scratch.ask(&["resize", "v"]).status.success());
        for _ in 0..7 {
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(troubles(&scratch), "[]", "grown {at} times");
        }
    }
    daemon.stop("TERM");
}

/// `stop` ended well, and said what to do with a file that was not there any more.
#[test]
fn a_cache_file_that_was_removed_is_told_and_what_it_has_is_written_back() {
    let (scratch, daemon, backing) = served("gone-cache");
    std::fs::remove_file(scratch.cache()).unwrap();
    fails(&scratch.ask(&["stop"]), &["the daemon was not stopped", "has been removed while it is"]);
    assert!(problems(&scratch).contains("what is not on the backing devices ends with the daemon"));
    let done = scratch.ask(&["stop", "--drain"]);
    assert!(done.status.success(), "{done:?}");
    assert_eq!(daemon.ended().0, Some(0));
    assert_eq!(byte_at(&backing, AT), 2);
}
