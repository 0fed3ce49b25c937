// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is done with a cache that nobody serves, by its path alone, heeds the state directory of the file in `/etc/forebay` that
//! names the cache.

use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, good, run};
use forebay_testing::skip;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// A machine whose `/etc`, `/run` and usual state directory are a test's own.
struct Place {
    scratch: Scratch,
    apart: Apart,
    disk: PathBuf,
}

impl Place {
    fn new(name: &str) -> Option<Place> {
        let scratch = Scratch::new(name);
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let (etc, run) = (scratch.path("etc"), scratch.path("run"));
        let apart = Apart::with(&[(&etc, "/etc"), (&run, "/run")])?;
        std::fs::create_dir(scratch.path("etc/forebay")).unwrap();
        for cache in ["a", "b"] {
            let path = scratch.path(cache);
            let done = good(&mut command_in(&apart, &scratch, &["format", "--size", "64M"], &path));
            scratch.note_cache(&done);
        }
        let disk = scratch.file("disk", 16 * MIB);
        Some(Place { scratch, apart, disk })
    }

    fn file(&self, name: &str, cache: &str, more: &str) {
        let text = format!(
            "cache = '{}'\nattach = 'none'\nlisten = '{}'\ncontrol = '{}'\nstate-dir = '{}'\n{more}\n[volume.v]\nbacking = '{}'\n",
            self.scratch.path(cache).display(),
            self.scratch.listen(),
            self.scratch.control().display(),
            self.state().display(),
            self.disk.display()
        );
        std::fs::write(self.scratch.path("etc/forebay").join(name), text).unwrap();
    }

    fn state(&self) -> PathBuf {
        self.scratch.path("state")
    }

    fn serve(&self, more: &[&str]) -> Daemon {
        let mut command = self.command(&["serve", "data"]);
        command.args(more);
        Daemon::start(command, &self.scratch.path("stderr"))
    }

    fn command(&self, words: &[&str]) -> Command {
        forebay_in(&self.apart, &self.scratch, words)
    }

    /// Of a cache that nobody serves: how it ended, and what it said.
    fn offline(&self, words: &[&str], cache: &str) -> (Option<i32>, String) {
        let path = self.scratch.path(cache);
        let done = run(&mut command_in(&self.apart, &self.scratch, words, &path));
        let said = [done.stdout, done.stderr].concat();
        (done.status.code(), String::from_utf8(said).unwrap())
    }

    fn write(&self, byte: u8) {
        self.scratch.connect("v").write(MIB, &[byte; 4096], true).unwrap();
    }

    fn on_disk(&self) -> u8 {
        let mut bytes = [0; 1];
        std::fs::File::open(&self.disk).unwrap().read_exact_at(&mut bytes, MIB).unwrap();
        bytes[0]
    }

    fn removal(&self) -> (Option<i32>, String) {
        let done = run(&mut self.command(&["removal"]));
        (done.status.code(), String::from_utf8([done.stdout, done.stderr].concat()).unwrap())
    }
}

fn forebay_in(apart: &Apart, scratch: &Scratch, words: &[&str]) -> Command {
    let mut command = apart.command(env!("CARGO_BIN_EXE_forebay"));
    command
        .args(words)
        .env_remove("XDG_RUNTIME_DIR")
        .env("FOREBAY_STATE_DIR", scratch.path("usual"));
    command
}

fn command_in(apart: &Apart, scratch: &Scratch, words: &[&str], cache: &Path) -> Command {
    let mut command = forebay_in(apart, scratch, words);
    if words[0] != "format" {
        command.arg("--cache");
    }
    command.arg(cache);
    command
}

/// The log said `forebay drain --cache A`, which looked into the usual directory, found no mark there, and wrote what A held over what the
/// disk had got since without it.
#[test]
fn a_stale_cache_is_not_drained_over_its_disk() {
    let Some(place) = Place::new("state-stale") else { return skip("no mount namespace") };
    place.file("data.toml", "a", "");
    let daemon = place.serve(&[]);
    place.write(1);
    let said = daemon.stop("TERM");
    let hint = format!(
        "drain --cache {} --state-dir {}",
        place.scratch.path("a").display(),
        place.state().display()
    );
    assert!(said.contains(&hint), "{said}");
    std::fs::rename(place.scratch.path("etc/forebay/data.toml"), place.scratch.path("of-a"))
        .unwrap();
    place.file("data.toml", "b", "");
    let daemon = place.serve(&["--without-cache", "v"]);
    place.write(2);
    assert_eq!(
        run(&mut place.command(&["drain", "--control", place.scratch.control().to_str().unwrap()]))
            .status
            .code(),
        Some(0)
    );
    daemon.stop("TERM");
    assert_eq!(place.on_disk(), 2);
    // The file names the cache by another path.
    std::os::unix::fs::symlink(place.scratch.path("a"), place.scratch.path("link")).unwrap();
    place.file("data.toml", "link", "");
    let (code, said) = place.offline(&["drain"], "a");
    assert_eq!(place.on_disk(), 2, "{code:?}: {said}");
    assert_eq!(code, Some(1), "{said}");
}

#[test]
fn the_package_lets_go_after_a_drain_and_a_forget_by_the_path_alone() {
    let Some(place) = Place::new("state-removal") else { return skip("no mount namespace") };
    place.file("data.toml", "a", "");
    let daemon = place.serve(&[]);
    place.write(1);
    daemon.stop("TERM");
    let (code, said) = place.removal();
    let hint = format!("a --state-dir {}\n", place.state().display());
    assert!(code == Some(1) && said.contains(&hint), "{said}");
    let (code, said) = place.offline(&["drain"], "a");
    assert_eq!((code, place.on_disk()), (Some(0), 1), "{said}");
    assert_eq!(place.removal(), (Some(0), String::new()));
    let records = || std::fs::read_dir(place.state()).unwrap().count();
    assert_eq!(records(), 1);
    let (code, said) = place.offline(&["forget", "v"], "a");
    assert_eq!((code, records()), (Some(0), 0), "{said}");
    // So does a `format`.
    let daemon = place.serve(&[]);
    daemon.stop("TERM");
    assert_eq!(records(), 1);
    let (code, said) = place.offline(&["format", "--force"], "a");
    assert_eq!((code, records()), (Some(0), 0), "{said}");
    place.scratch.note_cache(&said);
    assert!(!place.scratch.path("usual").exists(), "nobody asked for it");
}

/// A mistake in a file switched off all that its state directory has against a removal.
#[test]
fn a_file_with_a_mistake_keeps_the_package() {
    let Some(place) = Place::new("state-typo") else { return skip("no mount namespace") };
    place.file("data.toml", "a", "");
    assert_eq!(place.removal(), (Some(0), String::new()));
    let daemon = place.serve(&[]);
    place.write(1);
    daemon.stop("TERM");
    place.file("data.toml", "a", "atach = 'none'");
    let (code, said) = place.removal();
    assert_eq!(code, Some(1), "{said}");
    for part in [
        "/etc/forebay/data.toml: what it serves is not known",
        "atach is not known here; did you mean attach?",
    ] {
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn a_file_that_may_name_the_cache_is_not_passed_over() {
    let Some(place) = Place::new("state-mistake") else { return skip("no mount namespace") };
    place.file("data.toml", "a", "");
    let daemon = place.serve(&[]);
    place.write(1);
    daemon.stop("TERM");
    // A mistake in the file of another cache is nothing to this one.
    place.file("data.toml", "a", "atach = 'none'");
    place.file("other.toml", "b", "atach = 'none'");
    for words in [&["drain"][..], &["forget", "v"], &["format", "--force"]] {
        let (code, said) = place.offline(words, "a");
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("data.toml") && said.contains("or give --state-dir"), "{said}");
    }
    std::fs::write(place.scratch.path("etc/forebay/data.toml"), "cache = ").unwrap();
    assert_eq!(place.offline(&["drain"], "a").0, Some(2));
    assert_eq!(place.on_disk(), 0);
    place.file("data.toml", "a", "");
    // Two that do not agree.
    let text = format!("cache = '{}'\n", place.scratch.path("a").display());
    std::fs::write(place.scratch.path("etc/forebay/more.toml"), text).unwrap();
    let (code, said) = place.offline(&["drain"], "a");
    assert!(code == Some(1) && said.contains("with different state directories: "), "{said}");
    std::fs::remove_file(place.scratch.path("etc/forebay/more.toml")).unwrap();
    let (code, said) = place.offline(&["drain"], "a");
    assert_eq!((code, place.on_disk()), (Some(0), 1), "{said}");
    // What is said wins, and the file is not looked at.
    place.file("data.toml", "a", "atach = 'none'");
    let state = place.state();
    let (code, said) = place.offline(&["drain", "--state-dir", state.to_str().unwrap()], "a");
    assert_eq!(code, Some(0), "{said}");
}
