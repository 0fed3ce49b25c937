// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes come and go, and then the daemon goes on as another program: that serves what is served, not what the
//! command line named once.

use crate::connections::lost;
use crate::support::{Daemon, Scratch, wait_for};
use crate::upgrade::{program, upgrade};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

fn volume(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}

fn ask(scratch: &Scratch, words: &[&str]) {
    let done = scratch.ask(words);
    assert!(done.status.success(), "{words:?}: {done:?}");
}

fn fill(scratch: &Scratch, name: &str, letter: u8) {
    scratch.connect(name).write(0, &[letter; 8192], true).unwrap();
    wait_for("no client", || {
        let status = scratch.status();
        status["volumes"].as_array().unwrap().iter().all(|volume| volume["nbd_clients"] == 0)
    });
}

fn assert_is(scratch: &Scratch, name: &str, letter: u8) {
    assert_eq!(scratch.connect(name).read(0, 8192).unwrap(), [letter; 8192], "{name}");
}

/// The next program was started with the volume that had left, could not serve, and nor could the one before: with a volume that is named
/// by `--if-changed` and is in no cache, nothing was served any more.
#[test]
fn what_has_left_does_not_come_back_with_an_upgrade_nor_end_it() {
    let scratch = Scratch::new("upgrade-left");
    scratch.format("64M");
    let (a, b) = (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB));
    let (a, b) = (volume("a", &a), volume("b", &b));
    scratch.serve(&["--volume", &a, "--volume", &b]).stop("TERM");
    let given = [
        "--volume",
        &a,
        &format!("--volume={b}"),
        "--if-changed",
        "b=keep-dirty",
        "--without-cache=b",
    ];
    let daemon = scratch.serve(&given);
    fill(&scratch, "a", 1);
    ask(&scratch, &["detach", "b"]);
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    assert_eq!(scratch.volume_names(), ["a"]);
    assert_is(&scratch, "a", 1);
    // The program before goes on with what it served as well.
    let next = lost(&scratch);
    let told = upgrade(&scratch, &next).unwrap_err();
    assert!(told.contains("was not upgraded"), "{told}");
    assert_eq!(scratch.volume_names(), ["a"]);
    daemon.stop("TERM");
}

/// It came back from another disk, which the next program looked for where the first had been: neither it nor the one before served the volume
/// then.
#[test]
fn what_came_back_from_another_disk_is_served_from_that_after_an_upgrade() {
    let scratch = Scratch::new("upgrade-moved");
    scratch.format("64M");
    let (a, b, other) =
        (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB), scratch.file("other", 32 * MIB));
    let daemon = scratch.serve(&["--volume", &volume("a", &a), "--volume", &volume("b", &b)]);
    fill(&scratch, "a", 1);
    ask(&scratch, &["detach", "b"]);
    ask(&scratch, &["attach", &volume("b", &other)]);
    fill(&scratch, "b", 2);
    let mut stays = scratch.connect("b");
    for _ in 0..2 {
        let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
        assert!(told.contains("by a hand-over"), "{told}");
        assert_eq!(scratch.status()["problems"].to_string(), "[]");
        assert_is(&scratch, "a", 1);
        assert_eq!(stays.read(0, 8192).unwrap(), [2; 8192]);
    }
    drop(stays);
    ask(&scratch, &["drain"]);
    assert_eq!(std::fs::read(&other).unwrap()[..8192], [2; 8192]);
    assert_eq!(std::fs::read(&b).unwrap()[..8192], [0; 8192]);
    daemon.stop("TERM");
}

/// The same by a file, which is read anew: what it says by then decides, and what cannot be is refused before anything is touched.
#[test]
fn a_file_that_names_another_disk_is_refused_before_anything_is_touched() {
    let scratch = Scratch::new("upgrade-file");
    scratch.format("64M");
    let (a, b, other) =
        (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB), scratch.file("other", 32 * MIB));
    let file = scratch.path("data.toml");
    let write = |b: &Path, more: &str| {
        let text = format!(
            "cache = '{}'\nattach = 'none'\nlisten = '{}'\ncontrol = '{}'\n[volume.a]\nbacking = '{}'\n[volume.b]\nbacking = '{}'\n{more}",
            scratch.cache().display(),
            scratch.listen(),
            scratch.control().display(),
            a.display(),
            b.display()
        );
        std::fs::write(&file, text).unwrap();
    };
    write(&b, "");
    let mut command = Command::new(FOREBAY);
    command.args(["serve", "--config"]).arg(&file);
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    ask(&scratch, &["detach", "b"]);
    ask(&scratch, &["attach", &volume("b", &other)]);
    fill(&scratch, "b", 2);
    let begun = scratch.status()["started_at"].clone();
    let refused = |expected: &str| {
        let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap_err();
        assert!(told.contains(expected), "{told}");
        assert_eq!(scratch.status()["started_at"], begun);
    };
    let from = format!("the volume is served from {}", other.display());
    refused(&from);
    write(&scratch.path("gone"), "");
    refused(&format!("b: {} is not there, and {from}", scratch.path("gone").display()));
    write(&other, "logical_block = 4096\n");
    refused("b: logical_block=4096: it has blocks of 512 bytes");
    // Nobody can serve: the program before goes on with the settings that it had, but for the volume's.
    write(&other, "");
    let told = upgrade(
        &scratch,
        &program(&scratch, "spoils", ":", &format!("echo x >{}", file.display())),
    )
    .unwrap_err();
    assert!(told.contains("was not upgraded"), "{told}");
    assert_is(&scratch, "b", 2);
    write(&other, "");
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("it took"), "{told}");
    assert_is(&scratch, "b", 2);
    assert_eq!(scratch.status()["problems"].to_string(), "[]");
    daemon.stop("TERM");
}

/// Nothing records what is served bare, so what had been attached since was not served any more.
#[test]
fn what_came_to_a_bare_daemon_goes_along() {
    let scratch = Scratch::new("upgrade-bare");
    let (a, b) = (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB));
    let mut command = Command::new(FOREBAY);
    command.args(["serve", "--attach", "none", "--volume", &volume("a", &a)]);
    command.arg("--listen").arg(scratch.listen()).arg("--control").arg(scratch.control());
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    ask(&scratch, &["attach", &volume("b", &b)]);
    fill(&scratch, "b", 2);
    for _ in 0..2 {
        upgrade(&scratch, Path::new(FOREBAY)).unwrap();
        assert_is(&scratch, "b", 2);
    }
    wait_for("no client", || scratch.status()["volumes"][1]["nbd_clients"] == 0);
    ask(&scratch, &["detach", "b"]);
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert_eq!(scratch.volume_names(), ["a"]);
    daemon.stop("TERM");
}

/// Its disk goes when the daemon has looked. That it is not served any more was told by its log alone.
pub(crate) fn assert_ends_waiting(scratch: &Scratch, b: &Path, away: &Path) {
    let moves = format!("[ -e {1} ] || mv {0} {1}", b.display(), away.display());
    let told = upgrade(scratch, &program(scratch, "moves", ":", &moves)).unwrap_err();
    let expected = "which does not serve all that was served: b: waits for its backing device: ";
    assert!(told.contains(expected), "{told}");
}

/// A volume that the next program had to leave waiting ended the one after that.
#[test]
fn a_volume_that_waits_ends_no_upgrade() {
    let scratch = Scratch::new("upgrade-waits");
    scratch.format("64M");
    let (a, b, away) =
        (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB), scratch.path("away"));
    let daemon = scratch.serve(&["--volume", &volume("a", &a), "--volume", &volume("b", &b)]);
    fill(&scratch, "b", 2);
    let waits =
        || scratch.status()["problems"].to_string().contains("b: waits for its backing device");
    assert_ends_waiting(&scratch, &b, &away);
    assert!(waits());
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(waits());
    std::fs::rename(&away, &b).unwrap();
    ask(&scratch, &["attach", "b"]);
    assert_is(&scratch, "b", 2);
    daemon.stop("TERM");
}

/// What the file says of a volume that waited for its disk was not heeded when that came.
#[test]
fn a_volume_that_waited_comes_as_it_was_asked_for() {
    let scratch = Scratch::new("upgrade-asked");
    scratch.format("64M");
    let (a, b, away) =
        (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB), scratch.path("away"));
    let file = scratch.path("data.toml");
    let text = format!(
        "cache = '{}'\nattach = 'none'\nlisten = '{}'\ncontrol = '{}'\ndevice-timeout = '0s'\n[volume.a]\nbacking = '{}'\n\
         [volume.b]\nbacking = '{}'\nweight = 7\n",
        scratch.cache().display(),
        scratch.listen(),
        scratch.control().display(),
        a.display(),
        b.display()
    );
    std::fs::write(&file, text).unwrap();
    let serve = || {
        let mut command = Command::new(FOREBAY);
        command.args(["serve", "--config"]).arg(&file);
        Daemon::start(command, &scratch.path("stderr"))
    };
    scratch.serve(&["--volume", &volume("a", &a), "--volume", &volume("b", &b)]).stop("TERM");
    std::fs::rename(&b, &away).unwrap();
    let daemon = serve();
    assert!(scratch.status()["problems"].to_string().contains("b: waits for its backing device"));
    std::fs::rename(&away, &b).unwrap();
    ask(&scratch, &["attach", "b"]);
    assert_eq!(scratch.status()["volumes"][1]["weight"], 7);
    daemon.stop("TERM");
}

/// Nothing records what is served bare: one that waited was forgotten by the upgrade after that.
#[test]
fn a_volume_that_waits_for_a_bare_daemon_is_known_behind_upgrades() {
    let scratch = Scratch::new("upgrade-bare-waits");
    let (a, b, away) =
        (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB), scratch.path("away"));
    let mut command = Command::new(FOREBAY);
    command.args(["serve", "--attach", "none", "--volume", &volume("a", &a)]);
    command.args(["--volume", &volume("b", &b), "--listen"]).arg(scratch.listen());
    command.arg("--control").arg(scratch.control());
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    fill(&scratch, "b", 2);
    let waits = || {
        assert_eq!(scratch.volume_names(), ["a"]);
        assert!(scratch.status()["problems"].to_string().contains("b: waits for its backing"));
    };
    assert_ends_waiting(&scratch, &b, &away);
    waits();
    upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    waits();
    std::fs::rename(&away, &b).unwrap();
    ask(&scratch, &["attach", "b"]);
    assert_is(&scratch, "b", 2);
    daemon.stop("TERM");
}
