// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device that fails while nothing is dirty is left out, and what it holds is never served again; nor is what a
//! cache holds of a disk that was served without it.
//!
//! A limit on the size of files, set on the running daemon, takes the part of the failing device.

use crate::support;
use crate::support::{Daemon, Scratch, good, run, signal, wait_for};
use forebay_serve::nbd::client::{ClientError, Zeroes};
use forebay_serve::nbd::error::NbdError;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// From now on the daemon writes no byte of a file at this offset or behind it.
fn limit(daemon: &Daemon, bytes: Option<u64>) {
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

/// A place of its own for marks.
struct Place {
    scratch: Scratch,
    disk: PathBuf,
}

impl Place {
    fn new(name: &str) -> Place {
        let scratch = Scratch::new(name);
        scratch.format("64M");
        let disk = scratch.file("disk", 16 * MIB);
        Place { scratch, disk }
    }

    fn state(&self) -> PathBuf {
        self.scratch.path("state")
    }

    fn with_state(&self, mut command: Command) -> Command {
        command.arg("--state-dir").arg(self.state());
        command
    }

    fn serve(&self, more: &[&str]) -> Daemon {
        let command = self.with_state(self.scratch.serve_command(more));
        Daemon::start(command, &self.scratch.path("stderr"))
    }

    fn serve_first(&self) -> Daemon {
        self.serve(&["--volume", &format!("v={}", self.disk.display())])
    }

    fn bare_command(&self, more: &[&str]) -> Command {
        self.command_of(&[&["--volume", &format!("w={}", self.disk.display())], more].concat())
    }

    /// Without the cache.
    fn command_of(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["serve", "--attach", "none", "--listen"]).arg(self.scratch.listen());
        command.arg("--control").arg(self.scratch.control()).args(more);
        self.with_state(command)
    }

    fn read(&self, volume: &str, at: u64) -> u8 {
        let found = self.scratch.connect(volume).read(at, 4096).unwrap();
        assert_eq!(found, [found[0]; 4096]);
        found[0]
    }

    fn write(&self, volume: &str, at: u64, byte: u8) {
        self.scratch.connect(volume).write(at, &[byte; 4096], true).unwrap();
    }

    fn on_disk(&self, at: u64) -> u8 {
        let mut bytes = [0; 4096];
        File::open(&self.disk).unwrap().read_exact_at(&mut bytes, at).unwrap();
        bytes[0]
    }

    fn drain(&self) {
        assert!(self.scratch.ask(&["drain"]).status.success());
    }

    /// What is done with a cache that nobody serves.
    fn offline(&self, words: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(words).arg("--cache").arg(self.scratch.cache());
        good(&mut self.with_state(command));
    }

    fn problems(&self) -> String {
        self.scratch.status()["problems"].to_string()
    }

    /// All is drained, block 0 is in the cache, and the cache device fails: copies of what is read cannot be written.
    fn fail_cache(&self, daemon: &Daemon) {
        self.write("v", 0, 1);
        self.drain();
        // The log lies behind it, what is written of the disk before it.
        limit(daemon, Some(64 << 10));
        // Twice: what is missed for the second time enters, at once while the cache is not full.
        for _ in 0..2 {
            self.read("v", 2 * MIB);
        }
        wait_for("the failure", || self.problems().contains("the cache device failed"));
        assert_eq!(self.scratch.status()["volumes"][0]["dirty"], false);
    }
}

#[test]
fn a_cache_that_fails_clean_is_left_out_and_its_old_data_is_never_served() {
    for end in ["TERM", "KILL"] {
        let place = Place::new("stale-failed");
        let daemon = place.serve_first();
        place.fail_cache(&daemon);
        assert_eq!(place.read("v", 0), 1);
        // The cache holds block 0, and cannot be told that it is old.
        place.write("v", 0, 2);
        assert_eq!((place.read("v", 0), place.on_disk(0)), (2, 2));
        let mut client = place.scratch.connect("v");
        let fast = Zeroes { fast_zero: true, ..Zeroes::default() };
        let refused = client.write_zeroes(4096, 4096, fast).unwrap_err();
        assert!(matches!(refused, ClientError::Failed(NbdError::NotSupported)), "{refused}");
        client.write_zeroes(4096, 4096, Zeroes::default()).unwrap();
        client.trim(8192, 4096, false).unwrap();
        client.flush().unwrap();
        drop(client);
        let status = place.scratch.status();
        let volume = &status["volumes"][0];
        assert_eq!(
            (&volume["cache_left_out"], &volume["health"]),
            (&true.into(), &"degraded".into())
        );
        assert!(place.problems().contains("v: the cache is left out"), "{}", place.problems());
        signal(daemon.id(), end);
        let (code, said) = daemon.ended();
        if end == "TERM" {
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains("and was left out since"), "{said}");
        }
        assert!(said.contains("the cache is marked stale"), "{said}");
        // The device is well again, and has all that it had.
        let daemon = place.serve(&[]);
        assert!(
            daemon.said().contains("was written when the cache had failed"),
            "{}",
            daemon.said()
        );
        assert_eq!(place.read("v", 0), 2);
        place.write("v", 0, 3);
        daemon.stop("TERM");
        // The mark is over: what the cache holds now stays.
        let daemon = place.serve(&[]);
        assert!(!daemon.said().contains("starts empty"), "{}", daemon.said());
        assert_eq!(place.read("v", 0), 3);
        daemon.stop("TERM");
    }
}

/// Without a place for the mark nothing may be written: a restart would not know that the cache is old.
#[test]
fn a_failed_cache_that_cannot_be_marked_is_not_passed() {
    let place = Place::new("stale-unmarked");
    let daemon = place.serve_first();
    place.fail_cache(&daemon);
    // No name in it can be made, not even by root.
    std::fs::remove_dir_all(place.state()).unwrap();
    std::fs::write(place.state(), "").unwrap();
    place.scratch.connect("v").write(0, &[2; 4096], true).unwrap_err();
    assert_eq!((place.read("v", 0), place.on_disk(0)), (1, 1));
    // What it holds nothing of needs no mark.
    place.write("v", 16384, 5);
    assert!(place.problems().contains("v: the cache cannot be left out"), "{}", place.problems());
    signal(daemon.id(), "TERM");
    let (_, said) = daemon.ended();
    assert!(said.contains("cannot be marked stale"), "{said}");
    std::fs::remove_file(place.state()).unwrap();
    let daemon = place.serve(&[]);
    assert_eq!((place.read("v", 0), place.read("v", 16384)), (1, 5));
    daemon.stop("TERM");
}

#[test]
fn a_drained_disk_that_is_served_bare_makes_its_cache_stale() {
    let place = Place::new("stale-bare");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    place.drain();
    daemon.stop("TERM");
    let bare = Daemon::start(place.bare_command(&[]), &place.scratch.path("stderr"));
    assert!(bare.said().contains("is stale from now on"), "{}", bare.said());
    place.write("w", 0, 2);
    bare.stop("TERM");
    let daemon = place.serve(&[]);
    assert!(daemon.said().contains("was served without this cache"), "{}", daemon.said());
    assert_eq!(place.read("v", 0), 2);
    daemon.stop("TERM");
}

#[test]
fn a_disk_whose_newest_data_is_on_a_cache_is_not_served_bare_unasked() {
    let place = Place::new("stale-dirty");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    place.drain();
    assert!(place.scratch.ask(&["set", "v", "mode=write-back"]).status.success());
    place.write("v", 4096, 1);
    daemon.stop("TERM");
    let said = refused(place.bare_command(&[]));
    for part in ["belongs to volume v", "drain --cache /", "--without-cache w"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    let said = refused(place.bare_command(&["--without-cache", "x"]));
    assert!(said.contains("--without-cache x: no such volume"), "{said}");
    let bare =
        Daemon::start(place.bare_command(&["--without-cache", "w"]), &place.scratch.path("stderr"));
    assert_eq!(place.read("w", 4096), 0);
    place.write("w", 0, 2);
    bare.stop("TERM");
    // Whoever replaced a cache for good would have had to say so at each start, where no file can say it.
    let bare = Daemon::start(place.bare_command(&[]), &place.scratch.path("stderr"));
    assert!(!bare.said().contains("is stale from now on"), "it is already: {}", bare.said());
    place.write("w", 4096, 3);
    bare.stop("TERM");
    // What is dirty waits for the operator.
    let said = refused(place.with_state(place.scratch.serve_command::<&str>(&[])));
    assert!(
        said.contains("was served without this cache") && said.contains("v=keep-dirty"),
        "{said}"
    );
    // Kept: it wins, and what is clean is dropped nevertheless, now and at the next starts, which ask no more.
    let mut daemon = place.serve(&["--if-changed", "v=keep-dirty"]);
    assert_eq!((place.read("v", 0), place.read("v", 4096)), (2, 1));
    daemon.kill();
    for end in ["KILL", "TERM"] {
        let daemon = place.serve(&[]);
        assert_eq!((place.read("v", 0), place.read("v", 4096)), (2, 1));
        signal(daemon.id(), end);
        daemon.ended();
    }
    // Until the disk is another again: by others, unseen or seen. What is kept is not passed unasked.
    let said = refused(place.bare_command(&[]));
    assert!(said.contains("belongs to volume v"), "{said}");
    let bare = ["--without-cache", "w"];
    let bare = Daemon::start(place.bare_command(&bare), &place.scratch.path("stderr"));
    assert!(bare.said().contains("is stale from now on"), "{}", bare.said());
    bare.stop("TERM");
    let said = refused(place.with_state(place.scratch.serve_command::<&str>(&[])));
    assert!(said.contains("v=keep-dirty"), "{said}");
    place.serve(&["--if-changed", "v=keep-dirty"]).stop("TERM");
    place.serve(&[]).stop("TERM");
    let disk = File::options().write(true).open(&place.disk).unwrap();
    disk.write_all_at(&[9; 4096], 8192).unwrap();
    let said = refused(place.with_state(place.scratch.serve_command::<&str>(&[])));
    assert!(said.contains("its first or last MiB was written to"), "{said}");
    let daemon = place.serve(&["--if-changed", "v=lose-dirty"]);
    assert_eq!((place.read("v", 0), place.read("v", 4096)), (2, 3));
    daemon.stop("TERM");
}

/// It was told to serve the disk with the cache that was just refusing it.
#[test]
fn a_cache_that_was_made_anew_unseen_is_not_named_as_what_has_newer_data() {
    let place = Place::new("stale-anew");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    daemon.stop("TERM");
    std::fs::remove_file(place.scratch.cache()).unwrap();
    place.scratch.format("64M");
    let again = ["--volume", &format!("v={}", place.disk.display())];
    let said = refused(place.with_state(place.scratch.serve_command(&again)));
    assert!(said.contains("this cache is at that path now; if that one is gone, `serve"), "{said}");
    assert!(!said.contains("serve it with"), "{said}");
    place.serve(&[&again[..], &["--without-cache", "v"]].concat()).stop("TERM");
}

#[test]
fn a_forgotten_volume_is_anybodys() {
    let place = Place::new("stale-forgotten");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    place.drain();
    daemon.stop("TERM");
    assert_eq!(names(&place.state()), 1);
    place.offline(&["forget", "v"]);
    assert_eq!(names(&place.state()), 0);
    let bare = Daemon::start(place.bare_command(&[]), &place.scratch.path("stderr"));
    assert!(!bare.said().contains("is stale"), "{}", bare.said());
    bare.stop("TERM");
}

/// Each would know nothing of what the other writes: what the first one has is old then, and was served all the same.
#[test]
fn two_volumes_of_one_cache_on_one_disk_are_as_those_of_two_caches() {
    let place = Place::new("stale-two");
    let at = 2 * MIB; // Not where a disk is looked at to know it again.
    let daemon = place.serve_first();
    place.write("v", at, 1);
    daemon.stop("TERM");
    let other = ["--volume", &format!("w={}", place.disk.display())];
    let said = refused(place.with_state(place.scratch.serve_command(&other)));
    assert!(said.contains("belongs to volume v of this cache, which may hold newer"), "{said}");
    let daemon = place.serve(&[]);
    place.drain();
    daemon.stop("TERM");
    // Clean or not, another name is a mistake: the one that is recorded would wait for its own disk.
    let said = refused(place.with_state(place.scratch.serve_command(&other)));
    let instead =
        "belongs to volume v of this cache: serve it as v, or drain and forget that first";
    assert!(said.contains(instead), "{said}");
    let daemon = place.serve(&[&other[..], &["--without-cache", "w"]].concat());
    assert!(daemon.said().contains("volume v of this cache, which is stale"), "{}", daemon.said());
    assert!(place.problems().contains("is the backing device of volume w"), "{}", place.problems());
    place.write("w", at, 2);
    place.drain();
    daemon.stop("TERM");
    place.offline(&["forget", "w"]);
    let daemon = place.serve(&[]);
    assert_eq!(place.read("v", at), 2);
    daemon.stop("TERM");
}

/// What is asked for when the daemon starts is for that start; a disk that comes later is asked about by itself.
#[test]
fn a_disk_whose_newest_data_is_on_a_cache_does_not_come_unasked() {
    let place = Place::new("stale-attach");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    daemon.stop("TERM");
    let other = place.scratch.file("other", 16 * MIB);
    let bare = place.command_of(&["--volume", &format!("x={}", other.display())]);
    let bare = Daemon::start(bare, &place.scratch.path("stderr"));
    let attach = |more: &[&str]| {
        let volume = format!("w={}", place.disk.display());
        let done = place.scratch.ask(&[&["attach", &volume], more].concat());
        (done.status.success(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let (done, said) = attach(&[]);
    assert!(!done && said.contains("belongs to volume v"), "{said}");
    assert_eq!(attach(&["--without-cache"]), (true, String::new()));
    assert!(bare.said().contains("is stale from now on"), "{}", bare.said());
    place.write("w", 0, 2);
    assert!(place.scratch.ask(&["detach", "w"]).status.success());
    assert_eq!(attach(&[]), (true, String::new()), "what the cache has is given up already");
    bare.stop("TERM");
    let said = refused(place.with_state(place.scratch.serve_command::<&str>(&[])));
    assert!(said.contains("was served without this cache"), "{said}");
}

/// The mark was there before the last look at the disk: the cache dropped all that it had, for nothing.
#[test]
fn a_cache_is_not_stale_for_a_disk_that_was_refused_after_all() {
    let place = Place::new("stale-refused");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    place.drain();
    daemon.stop("TERM");
    let volume = format!("w={},mode=write-back", place.disk.display());
    let said = refused(place.command_of(&["--volume", &volume]));
    assert!(said.contains("mode=write-back needs a cache"), "{said}");
    let is_kept = || {
        let daemon = place.serve(&[]);
        let said = daemon.said();
        assert!(!said.contains("served without") && !said.contains("starts empty"), "{said}");
        daemon.stop("TERM");
    };
    is_kept();
    // And a recorded volume of another cache, whose disk is shorter now.
    let second = place.scratch.path("second");
    let done = support::forebay(["format", "--size", "64M", second.to_str().unwrap()]);
    place.scratch.note_cache(&String::from_utf8_lossy(&done.stdout));
    let serve_second =
        |more: &[&str]| place.command_of(&[&["--cache", second.to_str().unwrap()], more].concat());
    let volume = format!("w={},mode=write-through", place.disk.display());
    let daemon = Daemon::start(serve_second(&["--volume", &volume]), &place.scratch.path("stderr"));
    daemon.stop("TERM");
    let daemon = place.serve(&[]);
    assert!(daemon.said().contains("served without this cache"), "{}", daemon.said());
    place.drain();
    daemon.stop("TERM");
    let disk = File::options().write(true).open(&place.disk).unwrap();
    let left = disk.metadata().unwrap().modified().unwrap();
    disk.set_len(8 * MIB).unwrap();
    let said = refused(serve_second(&[]));
    assert!(said.contains("it was cut, or is another disk"), "{said}");
    disk.set_len(16 * MIB).unwrap();
    // However long that took: it is as it was.
    disk.set_modified(left).unwrap();
    is_kept();
}

/// Whoever made a new cache over an old one was refused the disks of the old one, which nobody could serve any more.
#[test]
fn a_cache_that_is_made_anew_leaves_nothing_written_down() {
    let place = Place::new("stale-format");
    place.serve_first().kill();
    assert_eq!(names(&place.state()), 1);
    let mut format = Command::new(env!("CARGO_BIN_EXE_forebay"));
    format.args(["format", "--force"]).arg(place.scratch.cache());
    place.scratch.note_cache(&good(&mut place.with_state(format)));
    assert_eq!(names(&place.state()), 0);
    place.serve_first().stop("TERM");
}

/// What is clean would be there again at the next start, which sees no change then.
#[test]
fn dirty_data_is_not_kept_over_a_change_that_cannot_be_written_down() {
    let place = Place::new("stale-keep");
    let daemon = place.serve_first();
    place.write("v", MIB, 1);
    daemon.stop("TERM");
    let disk = File::options().write(true).open(&place.disk).unwrap();
    disk.write_all_at(&[9; 4096], 0).unwrap();
    // Nothing can be made there, and nothing can be there.
    let more = ["--if-changed", "v=keep-dirty", "--state-dir", "/dev/null/state"];
    let said = refused(place.scratch.serve_command(&more));
    assert!(said.contains("it takes a state directory"), "{said}");
    let daemon = place.serve(&more[..2]);
    assert_eq!((place.read("v", 0), place.read("v", MIB)), (9, 1));
    daemon.stop("TERM");
}

/// A mark may be in it.
#[test]
fn nothing_is_served_beside_a_state_directory_that_cannot_be_looked_at() {
    let place = Place::new("stale-unknown");
    std::fs::write(place.state(), "").unwrap();
    let volume = format!("v={}", place.disk.display());
    let command = place.scratch.serve_command(&["--volume", &volume]);
    let said = refused(place.with_state(command));
    assert!(said.contains("cannot be the state directory"), "{said}");
}

/// Who waits for the disk has it as soon as it is free. What was written down for the last stop after that was written over
/// his mark.
#[test]
fn what_is_written_down_at_the_end_is_there_before_others_have_the_disk() {
    let place = Place::new("stale-end");
    let daemon = place.serve_first();
    place.write("v", 0, 1);
    place.drain();
    let record = std::fs::read_dir(place.state()).unwrap().next().unwrap().unwrap().file_name();
    // Who writes it waits for somebody who reads.
    let new = place.state().join(format!(".{}.new", record.display()));
    good(Command::new("mkfifo").arg(&new));
    signal(daemon.id(), "TERM");
    let disk = File::open(&place.disk).unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        assert!(disk.try_lock().is_err(), "the disk is free, and nothing is written down");
        std::thread::sleep(Duration::from_millis(10));
    }
    let _reader = File::options().read(true).write(true).open(&new).unwrap();
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    // It cannot be made durable there: that is where it was.
    assert!(said.contains("cannot be written"), "{said}");
    // What its ring had open is let go of a moment after its end.
    wait_for("the disk to be free", || disk.try_lock().is_ok());
}

fn refused(mut command: Command) -> String {
    let done = run(&mut command);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{said}");
    said
}

fn names(path: &Path) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// The disk's own superblock may be in the cache alone: nothing on the disk says that it is somebody's.
#[test]
fn a_disk_that_belongs_to_a_cache_is_not_formatted_unless_told_to() {
    let place = Place::new("stale-format");
    place.scratch.file("disk", 64 * MIB);
    let format = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("format").arg(&place.disk).args(more);
        run(&mut place.with_state(command))
    };
    let refused = |more: &[&str], says: &[&str]| {
        let done = format(more);
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{done:?}");
        for says in says {
            assert!(said.contains(says), "{says}: {said}");
        }
    };
    let mut daemon = place.serve_first();
    place.write("v", 0, 7);
    daemon.kill();
    let cache = place.scratch.cache();
    let cache = cache.to_str().unwrap();
    let named = ["belongs to volume v of the cache ", cache, "which may hold newer data"];
    refused(&[], &named);
    refused(&["--force"], &named);
    refused(&["--force"], &["give --force and --lose-dirty"]);
    // All of it is on the disk now, whose it still is.
    place.offline(&["drain"]);
    refused(&[], &["belongs to volume v of the cache ", "`forebay forget --cache", "give --force"]);
    assert_eq!(place.on_disk(0), 7);
    // Dirty again, and given up: then the cache must not be served with what it holds of that disk.
    let mut daemon = place.serve_first();
    assert!(place.scratch.ask(&["set", "v", "mode=write-back"]).status.success());
    place.write("v", 0, 8);
    daemon.kill();
    refused(&["--force"], &named);
    let marked = || {
        let records = std::fs::read_dir(place.state()).unwrap();
        let mut texts = records.map(|it| std::fs::read_to_string(it.unwrap().path()).unwrap());
        texts.all(|it| it.contains("\"changed\""))
    };
    refused(&["--force", "--lose-dirty", "--segment-size", "4M"], &["too few for a cache"]);
    assert!(!marked(), "nothing was erased");
    let done = format(&["--force", "--lose-dirty"]);
    assert!(done.status.success(), "{done:?}");
    place.scratch.note_cache(&String::from_utf8_lossy(&done.stdout));
    assert!(marked(), "the cache is not stale");
    // That was given up: it is asked for once.
    let done = format(&["--force"]);
    assert!(done.status.success(), "{done:?}");
    place.scratch.note_cache(&String::from_utf8_lossy(&done.stdout));
}
