// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon that does not answer (it waits for a disk, or was stopped) holds up nothing that is meant for another.

use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, good, pause, run, signal};
use forebay_testing::{skip, wait_for};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// Connections to a socket at which nobody takes any: as many as there may be.
fn fill(socket: &Path) -> Vec<OwnedFd> {
    let address = SocketAddrUnix::new(socket).unwrap();
    let mut found = Vec::new();
    loop {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        if connect(&client, &address).is_err() {
            return found;
        }
        found.push(client);
    }
}

/// `upgrade --process` asked each daemon whether it is the one, and waited for all that it asked before; `removal` waited for ever.
#[test]
fn a_daemon_that_does_not_answer_holds_up_no_other() {
    let scratch = Scratch::new("stopped");
    let places = [(scratch.path("etc"), "/etc"), (scratch.path("run"), "/run")];
    let places = places.each_ref().map(|(folder, place)| (folder.as_path(), *place));
    let is_root = rustix::process::geteuid().is_root();
    let Some(apart) = is_root.then(|| Apart::with(&places)).flatten() else {
        return skip("no mount namespace");
    };
    let command = |words: &[&str]| -> Command {
        let mut command = apart.command(FOREBAY);
        command.args(words).env("FOREBAY_STATE_DIR", scratch.path("state"));
        command
    };
    let serve = |name: &str| {
        let cache = scratch.path(name).display().to_string();
        scratch.note_cache(&good(&mut command(&["format", &cache, "--size", "64M"])));
        let volume = format!("v={}", scratch.file(&format!("{name}.disk"), 16 << 20).display());
        let serve = command(&["serve", "--attach", "none", "--cache", &cache, "--volume", &volume]);
        Daemon::start(serve, &scratch.path(&format!("{name}.err")))
    };
    let daemons = [serve("a"), serve("b")];
    // Whichever is asked first.
    for (silent, other) in [(0, 1), (1, 0)].map(|(a, b)| (&daemons[a], &daemons[b])) {
        pause(silent.id());
        let other = other.id().to_string();
        good(&mut command(&["upgrade", "--exec", FOREBAY, "--process", &other]));
        signal(silent.id(), "CONT");
    }
    let silent = &daemons[0];
    pause(silent.id());
    let done = run(&mut command(&["removal"]));
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let expected = format!("the daemon there, process {}, does not answer", silent.id());
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains(&expected), "{said}");
    // As many wait for it as there may be: it is there still, and nobody waits for a place.
    let line = silent.lines.iter().find_map(|line| line.strip_prefix("control: /run/")).unwrap();
    let socket = scratch.path("run").join(line);
    let clients = fill(&socket);
    assert!(!clients.is_empty());
    let done = run(&mut command(&["removal"]));
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.code() == Some(1) && said.contains("does not answer"), "{said}");
    drop(clients);
    signal(silent.id(), "CONT");
    for daemon in daemons {
        daemon.stop("TERM");
    }
}

/// Commands waited for one without end, and so did whoever watches it by them.
#[test]
fn a_command_gives_up_a_daemon_that_does_not_answer() {
    let scratch = Scratch::new("stopped-asked");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("disk", 16 << 20).display());
    let more = format!("w={}", scratch.file("more", 16 << 20).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    pause(daemon.id());
    let commands: [&[&str]; 9] = [
        &["status", "--json"],
        &["why", "v", "0"],
        &["set", "v", "weight=2"],
        &["drain"],
        &["scrub"],
        &["attach", &more],
        &["detach", "v"],
        &["stop"],
        &["upgrade", "--exec", FOREBAY],
    ];
    std::thread::scope(|scope| {
        let asked = commands.map(|words| (words, scope.spawn(|| scratch.ask(words))));
        for (words, asked) in asked {
            let done = asked.join().unwrap();
            let said = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(5), "{words:?}: {said}");
            let process = format!("process {}, does not answer", daemon.id());
            assert!(said.contains(&process), "{words:?}: {said}");
            // Who asks how things are is not told that anything comes of it, nor is who was not heard.
            let is_sent = ["set", "drain", "scrub"].contains(&words[0]);
            let is_told = said.contains("it does what it was asked for if it goes on");
            assert_eq!(is_sent, is_told, "{words:?}: {said}");
        }
    });
    signal(daemon.id(), "CONT");
    // It goes on: nothing has stopped it, and what was asked for was heard.
    wait_for("it drains", || scratch.status()["volumes"][0]["drained"] == true);
    wait_for("it is set", || scratch.status()["volumes"][0]["weight"] == 2);
    assert_eq!(scratch.volume_names(), ["v"]);
    daemon.stop("TERM");
}
