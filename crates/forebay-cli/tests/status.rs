// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay status` says what an operator asks.

use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, wait_for};
use serde_json::Value;
use std::time::Instant;

const MIB: u64 = 1 << 20;

fn volume(scratch: &Scratch, name: &str) -> String {
    format!("{name}={}", scratch.file(name, 32 * MIB).display())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn ages_and_shares_are_those_of_what_was_done() {
    let scratch = Scratch::new("status-ages");
    scratch.format("64M");
    let daemon = scratch.serve(&["--volume", &volume(&scratch, "v")]);
    let clean = scratch.status();
    assert_eq!(clean["activity"], "serves");
    let it = &clean["volumes"][0];
    assert_eq!((&it["health"], &it["nbd_clients"]), (&"healthy".into(), &0.into()));
    for name in ["dirty_age_seconds", "undurable_age_seconds", "without_backing_ratio"] {
        assert!(it[name].is_null(), "{name}: {it}");
    }
    let mut client = scratch.connect("v");
    let begun = Instant::now();
    for at in 0..3 {
        client.write(at * 4096, &[1; 4096], false).unwrap();
    }
    let dirty = scratch.status();
    let most = begun.elapsed().as_secs_f64() + 1.0;
    let it = &dirty["volumes"][0];
    assert_eq!(it["nbd_clients"], 1);
    let (age, undurable) = (number(&it["dirty_age_seconds"]), number(&it["undurable_age_seconds"]));
    assert!((0.0..=most).contains(&age) && (0.0..=most).contains(&undurable), "{most}: {it}");
    assert_eq!(number(&it["without_backing_ratio"]), 1.0);
    // One read of what only the backing device has, of four requests.
    client.read(16 * MIB, 4096).unwrap();
    assert_eq!(number(&scratch.status()["volumes"][0]["without_backing_ratio"]), 0.75);
    client.flush().unwrap();
    let flushed = scratch.status();
    let it = &flushed["volumes"][0];
    assert!(it["undurable_age_seconds"].is_null(), "{it}");
    assert!(number(&it["dirty_age_seconds"]) >= age, "{it}");
    // A header and three blocks, at least.
    assert!(number(&it["cache_bytes_per_written_byte"]) >= 4.0 / 3.0, "{it}");
    assert_eq!(number(&it["backing_bytes_per_written_byte"]), 0.0);
    drop(client);
    assert!(scratch.ask(&["drain"]).status.success());
    let drained = scratch.status();
    let it = &drained["volumes"][0];
    assert!(it["dirty_age_seconds"].is_null() && it["seconds_to_drained"].is_null(), "{it}");
    assert_eq!(number(&it["backing_bytes_per_written_byte"]), 1.0);
    let human = String::from_utf8(scratch.ask(&["status"]).stdout).unwrap();
    for text in [
        "serves",
        "healthy",
        "75.0 % answered without the backing device",
        "a plain write is answered when placed",
        "NBD connections",
        "nothing is wrong",
    ] {
        assert!(human.contains(text), "no '{text}' in: {human}");
    }
    wait_for("the client's end", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
    daemon.stop("TERM");
}

/// Somebody looks on while a client writes; his end is his own, and the daemon's is his.
#[test]
fn who_watches_sees_changes_and_is_told_of_the_end() {
    let scratch = Scratch::new("status-watch");
    scratch.format("64M");
    let daemon = scratch.serve(&["--volume", &volume(&scratch, "v")]);
    let watch = |more: &[&str], seen: &std::path::Path| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["status", "--watch", "--control"]).arg(scratch.control()).args(more);
        let file = std::fs::File::create(seen).unwrap();
        let nothing = std::process::Stdio::null();
        command.stdin(nothing).stdout(file).stderr(std::process::Stdio::null()).spawn().unwrap()
    };
    let (screens, lines) = (scratch.path("screens"), scratch.path("lines"));
    let (mut people, mut program) = (watch(&[], &screens), watch(&["--json"], &lines));
    let text = |path| std::fs::read_to_string(path).unwrap();
    // Each screen begins with a clear one.
    let shown =
        || text(&screens).split("\x1b[H\x1b[2J").skip(1).map(str::to_owned).collect::<Vec<_>>();
    let told = || -> Vec<Value> {
        let text = text(&lines);
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    wait_for("what is there first", || !shown().is_empty() && !told().is_empty());
    assert_eq!(told()[0]["volumes"][0]["writes"], 0);
    scratch.connect("v").write(0, &[1; 4096], true).unwrap();
    wait_for("the write", || {
        let last = told().pop().unwrap();
        last["volumes"][0]["writes"] == 1 && last["volumes"][0]["written_bytes"] == 4096
    });
    wait_for("a second screen", || shown().len() >= 3);
    assert!(shown()[..2].iter().all(|it| it.contains("v: 32 MiB, serving")), "{:?}", shown());
    crate::support::signal(people.id(), "TERM");
    assert!(!people.wait().unwrap().success());
    assert_eq!(scratch.status()["activity"], "serves", "he has ended nothing else");
    daemon.stop("TERM");
    assert_eq!(program.wait().unwrap().code(), Some(5), "no daemon any more");
}

#[test]
fn a_volume_without_its_backing_device_is_shown_as_waiting() {
    let scratch = Scratch::new("status-waiting");
    scratch.format("64M");
    let both = ["--volume", &volume(&scratch, "v"), "--volume", &volume(&scratch, "w")];
    let daemon = scratch.serve(&both);
    for name in ["v", "w"] {
        scratch.connect(name).write(0, &[1; 4096], true).unwrap();
    }
    daemon.stop("TERM");
    std::fs::rename(scratch.path("w"), scratch.path("elsewhere")).unwrap();
    let daemon = scratch.serve::<&str>(&[]);
    let status = scratch.status();
    let states: Vec<_> = (0..2).map(|at| &status["volumes"][at]).collect();
    assert_eq!((&states[0]["name"], &states[0]["state"]), (&"v".into(), &"serving".into()));
    assert_eq!((&states[1]["name"], &states[1]["state"]), (&"w".into(), &"waiting".into()));
    assert_eq!(states[1]["health"], "degraded");
    assert!(status["problems"][0].as_str().unwrap().contains("w: waits for its backing device"));
    assert!(daemon.said().contains(" WARN w: waits for its backing device"), "{}", daemon.said());
    // What can be drained is, and that the rest is not is no success.
    let done = scratch.ask(&["drain"]);
    let (out, said) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert!(out.contains("v: drained; ") && !out.contains("w: drained"), "{out}");
    assert!(said.contains("w: cannot be drained while it is waiting"), "{said}");
    let done = scratch.ask(&["stop", "--drain"]);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(said.starts_with("forebay: the daemon was not stopped: w: cannot be"), "{said}");
    // Its disk is no safer to mount because it is not here.
    let said = daemon.stop("TERM");
    assert!(said.contains("w: 4 KiB not yet on "), "{said}");
    assert!(!said.contains("v: 4 KiB not yet on "), "{said}");
}

#[test]
fn every_part_of_the_memory_is_told_before_it_is_taken_and_bounded() {
    let scratch = Scratch::new("status-memory");
    scratch.format("64M");
    let volume = volume(&scratch, "v");
    let daemon = scratch.serve(&["--volume", &volume]);
    let status = scratch.status();
    let parts = status["memory"].as_array().unwrap();
    let of = |name: &str| {
        let part = parts.iter().find(|part| part["name"] == name);
        part.unwrap_or_else(|| panic!("no {name} in {parts:?}"))["bytes"].as_u64().unwrap()
    };
    let map = of("index") + of("slots and checksums") + of("segments") + of("history of misses");
    let all: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert!(all - map <= 192 * MIB, "{parts:?}");
    for name in ["NBD connections", "NBD transfers", "unaligned edges", "checkpoint stream"] {
        assert!(of(name) > 0);
        assert!(daemon.said().contains(name), "{}", daemon.said());
    }
    let resident = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
    let resident = resident.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let resident: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(resident << 10 <= all + 16 * MIB, "{resident} KiB resident of {all} bytes");
    daemon.stop("TERM");
    let args = ["--volume", &volume, "--memory", "64M"];
    let refused = Daemon::try_start(scratch.serve_command(&args), &scratch.path("stderr"));
    let (code, said) = refused.unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("--memory 64 MiB: at least "), "{said}");
}

/// Each of them took addresses that were never used again: 128 KiB who asked, 1.4 MiB an NBD client. Scraped once a second, the daemon grew by
/// 10 GiB a day, as far as can be seen from outside; where memory is not overcommitted, it became deaf.
#[test]
fn whoever_comes_and_goes_leaves_no_memory_behind() {
    let scratch = Scratch::new("status-grows");
    scratch.format("64M");
    let daemon = scratch.serve(&["--volume", &volume(&scratch, "v")]);
    let come_and_go = || {
        for at in 0..40 {
            scratch.status();
            scratch.connect("v").write(at * 4096, &[1; 4096], false).unwrap();
        }
        wait_for("no client", || scratch.status()["volumes"][0]["nbd_clients"] == 0);
        let text = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
    };
    // Of some that come at once, more or fewer are there at once.
    let grown: Vec<u64> = (0..8).map(|_| come_and_go()).collect();
    assert!(
        grown.windows(2).any(|pair| pair[1] < pair[0] + 2048),
        "KiB, each time more: {grown:?}"
    );
    daemon.stop("TERM");
}

/// What is in the buffers of a process that has died is lost then: a write is answered when the device has it, and `status` says so.
#[test]
fn without_shared_memory_a_write_is_answered_when_it_is_written() {
    let scratch = Scratch::new("status-unshared");
    scratch.format("64M");
    let volume = volume(&scratch, "v");
    // Folders of a disk where memory file systems are.
    let (shm, run) = (scratch.path("shm"), scratch.path("run"));
    let Some(apart) = Apart::with(&[(&shm, "/dev/shm"), (&run, "/run")]) else {
        return crate::support::skip("no mount namespace of its own");
    };
    let serve = scratch.serve_command(&["--volume", &volume]);
    let mut inside = apart.command(serve.get_program());
    inside.args(serve.get_args());
    let mut daemon = Daemon::start(inside, &scratch.path("stderr"));
    let status = scratch.status();
    assert_eq!(status["cache"]["acknowledge"], "written", "{status}");
    let human = String::from_utf8(scratch.ask(&["status"]).stdout).unwrap();
    assert!(human.contains("a plain write is answered when written"), "{human}");
    let mut client = scratch.connect("v");
    for at in 0..200 {
        client.write(at * 4096, &[at as u8 + 1; 4096], false).unwrap();
    }
    daemon.kill();
    drop(client);
    let daemon = scratch.serve(&["--volume", &volume]);
    assert_eq!(scratch.status()["cache"]["acknowledge"], "placed");
    let mut client = scratch.connect("v");
    for at in 0..200 {
        assert!(client.read(at * 4096, 4096).unwrap() == [at as u8 + 1; 4096], "block {at}");
    }
    drop(client);
    daemon.stop("TERM");
}

/// The control socket is its user's alone; with two daemons a command that names none tells which there are.
#[test]
fn two_daemons_are_listed_and_their_sockets_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("status-two");
    // Its own /run, so that no other daemon is there.
    let runtime = scratch.sockets.join("runtime");
    let Some(apart) = Apart::with(&[(&runtime, "/run")]) else {
        return crate::support::skip("no mount namespace of its own");
    };
    let inside = |args: &[&std::ffi::OsStr]| {
        let mut command = apart.command(env!("CARGO_BIN_EXE_forebay"));
        command.args(args);
        command
    };
    let os = std::ffi::OsStr::new;
    let daemons: Vec<Daemon> = ["a", "b"]
        .iter()
        .map(|name| {
            let cache = scratch.path(&format!("cache-{name}"));
            let done =
                crate::support::forebay([os("format"), cache.as_ref(), os("--size"), os("64M")]);
            scratch.note_cache(&String::from_utf8_lossy(&done.stdout));
            let volume = volume(&scratch, name);
            let args = ["serve", "--attach", "none", "--volume", &volume, "--cache"].map(os);
            Daemon::start(inside(&[&args[..], &[cache.as_ref()]].concat()), &scratch.path(name))
        })
        .collect();
    let sockets: Vec<_> = std::fs::read_dir(runtime.join("forebay"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|it| it == "sock"))
        .collect();
    assert_eq!(sockets.len(), 2, "{sockets:?}");
    for path in &sockets {
        let mode = std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", path.display());
    }
    let done = inside(&[os("status")]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{said}");
    for path in &sockets {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(said.contains(name), "no {name} in: {said}");
        let one = [os("status"), os("--control"), path.as_ref()];
        assert!(crate::support::forebay(one).status.success());
    }
    for daemon in daemons {
        daemon.stop("TERM");
    }
}

/// A name looked like a line of ours: a volume's problem, or what the log says of another.
#[test]
fn a_path_with_a_line_in_it_is_told_in_one() {
    let scratch = Scratch::new("status-line");
    scratch.format("64M");
    let name = "disk\nPROBLEM: none is\n\u{1b}[2J";
    let volume = format!("v={}", scratch.file(name, 16 << 20).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    scratch.connect("v").write(0, &[7; 4096], true).unwrap();
    let mut said = Vec::new();
    for words in [&["status"][..], &["drain"], &["stop"]] {
        let done = scratch.ask(words);
        said.push(String::from_utf8([done.stdout, done.stderr].concat()).unwrap());
    }
    assert!(said[0].contains(r"disk\nPROBLEM: none is\n\u{1b}[2J"), "{said:?}");
    assert!(said[1].contains(r"disk\nPROBLEM: none is\n\u{1b}[2J"), "{said:?}");
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains(r"disk\nPROBLEM: none is"), "{log}");
    said.push(log);
    let refused = scratch.file(&format!("{name}2"), 0);
    let refused = scratch.serve_command(&["--volume", &format!("v={}", refused.display())]);
    said.push(Daemon::try_start(refused, &scratch.path("stderr2")).unwrap_err().1);
    for said in said {
        assert!(
            !said.contains('\u{1b}') && !said.lines().any(|it| it.starts_with("PROBLEM: none")),
            "{said}"
        );
    }
}
