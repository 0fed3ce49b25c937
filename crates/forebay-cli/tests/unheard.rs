// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nobody reads what the program says, or no byte of it can be written.

use crate::support::{Scratch, driven, wait_for};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");
const SIGPIPE: i32 = 13;

/// A daemon, ended when dropped.
struct Unheard(Child);

impl Drop for Unheard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is written there meets nobody.
fn closed_pipe() -> Stdio {
    let (_, writer) = std::io::pipe().unwrap();
    writer.into()
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// It panicked: at its first line, at the next setting, or as the program of an upgrade, and then nothing served any more.
#[test]
fn a_daemon_goes_on_when_nothing_it_says_can_be_written() {
    for place in [closed_pipe, full] {
        let scratch = Scratch::new("unheard");
        scratch.format("64M");
        let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
        let mut command = scratch.serve_command(&["--volume", &volume]);
        driven(&mut command);
        command.stdin(Stdio::null()).stdout(place()).stderr(place());
        let mut daemon = Unheard(command.spawn().unwrap());
        let mut serves = || {
            let ended = daemon.0.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}");
            scratch.ask(&["status"]).status.success()
        };
        wait_for("it serves", &mut serves);
        let good = |command: &[&str]| {
            let done = scratch.ask(command);
            assert!(done.status.success(), "{done:?}");
        };
        good(&["set", "v", "mode=write-through"]);
        good(&["upgrade", "--exec", FOREBAY]);
        wait_for("it serves", &mut serves);
        good(&["set", "v", "mode=write-back"]);
        good(&["stop"]);
        wait_for("its end", || daemon.0.try_wait().unwrap().is_some());
        assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_command_whose_reader_has_gone_ends_quietly_and_one_that_cannot_write_says_so() {
    let scratch = Scratch::new("unheard-command");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let (cache, control) = (scratch.cache(), scratch.control());
    let (cache, control) = (cache.to_str().unwrap(), control.to_str().unwrap());
    let said_to = |stdout: Stdio, command: &[&str]| -> Output {
        let mut program = Command::new(FOREBAY);
        program.args(command).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
        program.spawn().unwrap().wait_with_output().unwrap()
    };
    let check = |command: &[&str]| {
        let quiet = said_to(closed_pipe(), command);
        assert_eq!(quiet.status.signal(), Some(SIGPIPE), "{command:?}: {quiet:?}");
        assert!(quiet.stderr.is_empty(), "{command:?}: {quiet:?}");
        let full = said_to(full(), command);
        let told = String::from_utf8_lossy(&full.stderr);
        assert_eq!(full.status.code(), Some(1), "{command:?}: {told}");
        assert!(told.starts_with("forebay: stdout cannot be written: No space left"), "{told}");
    };
    check(&["status", "--control", control]);
    check(&["status", "--json", "--control", control]);
    check(&["set", "v", "mode=write-through", "--control", control]);
    check(&["drain", "--control", control]);
    check(&["scrub", "--control", control]);
    check(&["stop", "--drain", "--control", control]);
    daemon.stop("TERM");
    // Its log is on stderr.
    let closes = said_to(closed_pipe(), &["drain", "--cache", cache]);
    let told = String::from_utf8_lossy(&closes.stderr);
    assert!(
        closes.status.signal() == Some(SIGPIPE) && told.ends_with("everything is durable\n"),
        "{told}"
    );
    check(&["check", cache]);
    check(&["inspect", cache, "superblock"]);
}
