// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--attach auto`: it says what it takes, why nothing better, and what root would add.

use crate::bad::{Place, set_mode};
use crate::support::{Daemon, run};
use forebay_testing::skip;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// As root or as somebody else.
fn serve(place: &Place, cache: &str, user: Option<u32>) -> Result<Daemon, (Option<i32>, String)> {
    let volume = format!("v={}", place.file("backing", 8 << 20));
    let listen = format!("nbd+unix://{}", place.text("nbd"));
    let mut command = place.command();
    command.args(["serve", "--cache", cache, "--volume", &volume, "--listen", &listen]);
    command.args(["--attach", "auto", "--control", &place.text("control")]);
    // What this machine remembers of it is the user's own.
    command.env("FOREBAY_STATE_DIR", place.at("run/state"));
    if let Some(user) = user {
        set_mode(&place.path, 0o755);
        for name in [".", "run", "cache", "backing"] {
            chown(place.at(name), Some(user), Some(user)).unwrap();
        }
        command.uid(user).gid(user).current_dir("/");
    }
    Daemon::try_start(command, &place.at("stderr"))
}

#[test]
fn root_is_told_what_was_taken_and_why_nothing_better() {
    if !rustix::process::geteuid().is_root() {
        return skip("not root");
    }
    let place = Place::new("auto");
    let cache = place.cache();
    let daemon = serve(&place, &cache, None).unwrap();
    let said = daemon.said();
    let mut lines = said.lines().filter_map(|line| line.split_once(" attaches "));
    let told = lines.next().unwrap_or_else(|| panic!("{said}")).1;
    assert_eq!(lines.next(), None, "{said}");
    let kinds = [("ublk", "/dev/ublkb"), ("nbd", "/dev/nbd"), ("fuse", "/dev/loop")];
    let (taken, why_not) = match told.strip_prefix("volumes by ") {
        Some(rest) => {
            let (name, why_not) = rest.split_once("; ").unwrap_or((rest, ""));
            (kinds.iter().position(|kind| kind.0 == name), why_not)
        }
        None => (None, told.strip_prefix("no volume, serves NBD only: ").expect(told)),
    };
    // This machine may have any of them. Each that is better than the one taken has its reason.
    let better = &kinds[..taken.unwrap_or(kinds.len())];
    let reasons: Vec<&str> = why_not.split("; ").filter(|it| it.contains(": ")).collect();
    for (name, _) in better {
        let begins = format!("{name}: ");
        assert!(
            reasons.iter().any(|it| it.starts_with(&begins) && it.len() > begins.len()),
            "{told}"
        );
    }
    let device = taken.map(|taken| kinds[taken].1);
    let is_of = |line: &String| device.is_some_and(|device| line.starts_with(device));
    let devices: Vec<&String> =
        daemon.lines.iter().filter(|line| line.starts_with("/dev/")).collect();
    assert_eq!(devices.len(), usize::from(taken.is_some()), "{:?}", daemon.lines);
    assert!(devices.into_iter().all(is_of), "{told}: {:?}", daemon.lines);
    daemon.stop("TERM");
}

#[test]
fn others_have_nbd_only_and_are_told_what_root_would_add() {
    const NOBODY: u32 = 65_534;
    let user = rustix::process::geteuid().is_root().then_some(NOBODY);
    let place = Place::new("autouser");
    let cache = place.cache();
    if let Some(user) = user {
        let mut asked = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let asked = asked.arg("--version").uid(user).gid(user).current_dir("/");
        if asked.status().is_err() {
            return skip("another user may not run the program where it was built");
        }
        assert!(run(asked).status.success());
    }
    let daemon = serve(&place, &cache, user).unwrap();
    let said = daemon.said();
    let told = "attaches no volume, serves NBD only: not root; run by root it would add a block device per volume";
    assert_eq!(said.lines().filter(|line| line.ends_with(told)).count(), 1, "{said}");
    let uri = format!("nbd+unix:///v?socket={}", place.text("nbd"));
    assert!(daemon.lines.contains(&uri), "{:?}", daemon.lines);
    assert!(!daemon.lines.iter().any(|line| line.starts_with("/dev/")), "{:?}", daemon.lines);
    daemon.stop("TERM");
}
