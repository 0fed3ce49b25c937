// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is written down for udev's rule of backing devices that others must leave alone.

use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, good, has, run};
use forebay_testing::skip;
use std::path::PathBuf;
use std::process::Command;

/// A machine with an `/etc` of its own, the rule in it, and a loop device that can be known again.
struct Place {
    scratch: Scratch,
    apart: Apart,
    disk: String,
}

impl Place {
    fn new(name: &str) -> Option<Place> {
        if !rustix::process::geteuid().is_root() || !has("losetup") {
            return None;
        }
        let scratch = Scratch::new(name);
        let file = scratch.file("disk", 16 << 20);
        let done = run(Command::new("losetup").args(["-f", "--show"]).arg(file));
        let disk = String::from_utf8(done.stdout).unwrap().trim().to_owned();
        if !done.status.success() {
            return None;
        }
        let (etc, run) = (scratch.path("etc"), scratch.path("run"));
        let apart = Apart::with(&[(&etc, "/etc"), (&run, "/run")]);
        let Some(apart) = apart else {
            good(Command::new("losetup").args(["-d", &disk]));
            return None;
        };
        std::fs::create_dir_all(etc.join("udev/rules.d")).unwrap();
        std::fs::write(etc.join("udev/rules.d/61-forebay.rules"), "").unwrap();
        let place = Place { scratch, apart, disk };
        for cache in ["a", "b"] {
            let mut format = place.command(&["format", "--size", "64M"]);
            place.scratch.note_cache(&good(format.arg(place.scratch.path(cache))));
        }
        Some(place)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.apart.command(env!("CARGO_BIN_EXE_forebay"));
        command.args(words).env("FOREBAY_STATE_DIR", self.scratch.path("state"));
        command
    }

    fn serve(&self, words: &[&str]) -> Daemon {
        let mut command = self.command(&["serve", "--attach", "none"]);
        command.arg("--listen").arg(self.scratch.listen());
        command.arg("--control").arg(self.scratch.control()).args(words);
        Daemon::start(command, &self.scratch.path("stderr"))
    }

    fn cache(&self, name: &str) -> String {
        self.scratch.path(name).display().to_string()
    }

    /// The files that hide it.
    fn hidden(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.scratch.path("etc/forebay/backings"));
        let mut found: Vec<PathBuf> = entries.unwrap().map(|it| it.unwrap().path()).collect();
        found.sort();
        found
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A test that failed may have a daemon on it still: then it goes with that.
        let _ = run(Command::new("losetup").args(["-d", &self.disk]));
    }
}

/// The file of a cache whose device has died hid the disk for ever: nobody could forget the volume there.
#[test]
fn a_cache_that_was_passed_hides_the_disk_no_more() {
    let Some(place) = Place::new("hide-passed") else { return skip("no loop device, or no root") };
    let volume = format!("v={}", place.disk);
    let (a, b) = (place.cache("a"), place.cache("b"));
    let mut daemon = place.serve(&["--cache", &a, "--volume", &volume]);
    place.scratch.connect("v").write(0, &[1; 4096], true).unwrap();
    daemon.kill();
    let of_a = place.hidden();
    assert_eq!(of_a.len(), 1);
    // Without a cache it stays hidden: the cache may come again.
    place.serve(&["--volume", &volume, "--without-cache", "v"]).stop("TERM");
    assert_eq!(place.hidden(), of_a);
    place.serve(&["--cache", &b, "--volume", &volume]).stop("TERM");
    let of_b = place.hidden();
    assert!(of_b.len() == 1 && of_b != of_a, "{of_b:?}");
    // It has come again, and the other one has nothing of it now.
    place.serve(&["--cache", &a, "--if-changed", "v=lose-dirty"]).stop("TERM");
    assert_eq!(place.hidden(), of_a);
    place.serve(&["--cache", &b]).stop("TERM");
    good(
        place
            .command(&["forget", "v", "--cache", &b])
            .args(["--state-dir"])
            .arg(place.scratch.path("state")),
    );
    assert_eq!(place.hidden(), Vec::<PathBuf>::new());
}
