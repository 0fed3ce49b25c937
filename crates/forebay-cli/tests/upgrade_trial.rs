// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The next program is tried before the daemon becomes it: one that cannot run leaves it, and all who are connected, as they were.

use crate::late::of_file_by;
use crate::support::apart::Apart;
use crate::support::silence::{LOOKUP, Silence};
use crate::support::{Daemon, Scratch, good, skip, wait_for};
use crate::upgrade::upgrade;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

fn serve(name: &str) -> (Scratch, Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 1 << 20).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    (scratch, daemon)
}

/// A program that does this, and no more.
fn script(scratch: &Scratch, name: &str, does: &str) -> PathBuf {
    let path = scratch.path(name);
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\"";
    good(Command::new("sh").args(["-c", write]).arg(&path).arg(does));
    path
}

/// What one says that fails only in a rehearsal, or not at all.
fn in_rehearsal(does: &str) -> String {
    format!("[ \"$1\" != rehearse ] || {{ {does}; }}\nexec {FOREBAY} \"$@\"")
}

/// The daemon became them: it ended with those that end at once, and one that ends well was taken for a daemon that had been stopped.
#[test]
fn a_program_that_cannot_run_is_refused_and_nobody_notices() {
    let (scratch, daemon) = serve("trial-refused");
    let mut client = scratch.connect("v");
    let before = scratch.status()["started_at"].clone();
    let refused = [
        ("fails", "echo no such library >&2; exit 127".to_owned(), "127: no such library"),
        ("ends", "exit 1".into(), "`--version` ended with exit status: 1, and it said nothing"),
        ("other", "echo something 1".into(), "is no forebay"),
        ("illegal", "kill -ILL $$".into(), "ended with signal: 4 (SIGILL)"),
        ("starts", in_rehearsal("kill -SEGV $$"), "`rehearse` ended with signal: 11 (SIGSEGV)"),
        ("panics", in_rehearsal("echo panicked >&2; exit 101"), "exit status: 101: panicked"),
        ("silent", in_rehearsal("exit 0"), "is no forebay"),
    ];
    for (name, does, why) in &refused {
        let said = upgrade(&scratch, &script(&scratch, name, does)).unwrap_err();
        assert!(said.contains(why), "{name}: {said}");
        client.write(0, &[1; 4096], true).unwrap();
        assert_eq!(scratch.status()["started_at"], before, "{name}: it is the same program");
    }
    let text = scratch.path("text");
    std::fs::write(&text, "no program").unwrap();
    good(Command::new("chmod").arg("755").arg(&text));
    let said = upgrade(&scratch, &text).unwrap_err();
    assert!(said.contains("cannot be run: Exec format error"), "{said}");
    let said = daemon.said();
    assert!(said.contains("not upgraded: the daemon goes on as it is: "), "{said}");
    assert!(!said.contains("goes on as another") && !said.contains("the program before goes on"));

    // One from before knows of no rehearsal.
    let older = script(&scratch, "older", &in_rehearsal("exit 2"));
    let told = upgrade(&scratch, &older).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    client.write(0, &[2; 4096], true).unwrap();
    daemon.stop("TERM");
}

/// It had half a minute for each question, whatever was given.
#[test]
fn a_program_that_hangs_is_tried_as_long_as_the_timeout_says() {
    let (scratch, daemon) = serve("trial-hangs");
    let before = scratch.status()["started_at"].clone();
    let hang =
        |question: &str| format!("[ \"$1\" != {question} ] || sleep 1000\nexec {FOREBAY} \"$@\"");
    for question in ["--version", "layout", "rehearse"] {
        let program = script(&scratch, question.trim_matches('-'), &hang(question));
        let begun = Instant::now();
        let program = program.to_str().unwrap();
        let done = scratch.ask(&["upgrade", "--exec", program, "--timeout", "2s"]);
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{question}: {said}");
        let told = format!(
            "the daemon goes on as it is: {program}: was tried with `{question}`, did not end within 2 s, and was killed"
        );
        assert!(said.contains(&told), "{question}: {said}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{question}: {:?}", begun.elapsed());
    }
    assert_eq!(scratch.status()["started_at"], before);
    daemon.stop("TERM");
}

/// A command line that the next program does not understand.
#[test]
fn a_rehearsal_has_the_words_that_the_program_will_have() {
    let (scratch, daemon) = serve("trial-words");
    let note = scratch.path("note");
    let does = format!("echo \"$@\" >{}", note.display());
    upgrade(&scratch, &script(&scratch, "notes", &in_rehearsal(&does))).unwrap();
    let words = std::fs::read(format!("/proc/{}/cmdline", daemon.id())).unwrap();
    let words = words.split(|byte| *byte == 0).skip(1).map(String::from_utf8_lossy);
    let words = words.collect::<Vec<_>>().join(" ");
    let noted = std::fs::read_to_string(&note).unwrap();
    assert_eq!(noted.trim(), format!("rehearse {words}").trim());
    daemon.stop("TERM");
}

/// Guests and commands do not wait for a program that takes its time.
#[test]
fn while_a_program_is_tried_all_goes_on() {
    let (scratch, daemon) = serve("trial-meanwhile");
    let (begun, go) = (scratch.path("begun"), scratch.path("go"));
    let waits = format!(
        "touch {}; until [ -e {} ]; do sleep 0.05; done; exit 1",
        begun.display(),
        go.display()
    );
    let slow = script(&scratch, "slow", &in_rehearsal(&waits));
    let mut client = scratch.connect("v");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| upgrade(&scratch, &slow));
        wait_for("it is tried", || begun.exists());
        for _ in 0..100 {
            client.write(0, &[3; 4096], true).unwrap();
        }
        assert_eq!(scratch.status()["activity"], "serves");
        let second = upgrade(&scratch, Path::new(FOREBAY)).unwrap_err();
        assert!(second.contains("is being tried for another upgrade"), "{second}");
        std::fs::write(&go, "").unwrap();
        let said = asked.join().unwrap().unwrap_err();
        assert!(said.contains("a rehearsal of its start ended with exit status: 1"), "{said}");
    });
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    client.write(0, &[4; 4096], true).unwrap();
    daemon.stop("TERM");
}

/// All stood still as long as a disk did not answer that the file names by then.
#[test]
fn while_a_disk_does_not_answer_that_the_next_program_is_to_have_all_goes_on() {
    let scratch = Scratch::new("trial-silent");
    scratch.format("64M");
    let Some(apart) = Apart::with(&[]) else { return skip("no mount namespace of its own") };
    let (disk, place) = (scratch.file("disk", 16 << 20), scratch.path("silent"));
    std::fs::create_dir(&place).unwrap();
    let daemon = of_file_by(apart.command(FOREBAY), &scratch, &[("v", &disk, "")]);
    let file = scratch.path("it.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let other = place.join("disk");
    let text = text.replace(disk.to_str().unwrap(), other.to_str().unwrap());
    std::fs::write(&file, text).unwrap();
    let Some(silence) = Silence::begin(&apart, &place, LOOKUP) else { return skip("no FUSE") };
    let mut client = scratch.connect("v");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| upgrade(&scratch, Path::new(FOREBAY)));
        silence.wait_until_asked();
        for _ in 0..100 {
            client.write(0, &[3; 4096], true).unwrap();
        }
        assert_eq!(scratch.status()["activity"], "serves");
        assert!(!asked.is_finished());
        drop(silence);
        let said = asked.join().unwrap().unwrap_err();
        assert!(said.contains("is not there, and the volume is served from"), "{said}");
    });
    client.write(0, &[4; 4096], true).unwrap();
    daemon.stop("TERM");
}

/// Whoever waits is told.
#[test]
fn a_stop_while_a_program_is_tried_is_a_stop() {
    let (scratch, daemon) = serve("trial-stopped");
    let begun = scratch.path("begun");
    let waits = format!("touch {}; sleep 5; exit 1", begun.display());
    let slow = script(&scratch, "slow", &in_rehearsal(&waits));
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| upgrade(&scratch, &slow));
        wait_for("it is tried", || begun.exists());
        let stopped = scratch.ask(&["stop"]);
        assert!(stopped.status.success(), "{stopped:?}");
        let said = asked.join().unwrap().unwrap_err();
        assert!(said.contains("not upgraded: the daemon is being stopped"), "{said}");
    });
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
}
