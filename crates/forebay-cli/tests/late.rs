// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backing devices that come while other volumes are served, or do not come.

use crate::notified::Manager;
use crate::support::apart::Apart;
use crate::support::silence::{LOOKUP, OPEN, Silence};
use crate::support::{Daemon, PATIENCE, Scratch, forebay, signal, skip, wait_for};
use crate::upgrade::upgrade;
use crate::upgrade_volumes::assert_ends_waiting;
use std::fs::File;
use std::os::unix::fs::FileExt;
#[cfg(feature = "vhost")]
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Longer than a test.
const LONG: [&str; 2] = ["--device-timeout", "3600s"];

fn volume(name: &str, path: &Path) -> String {
    format!("{name}={}", path.display())
}

/// A cache with the volumes `a` and `b`, with 4 KiB of their letter at 1 MiB that are not on their disks. That of `b` is away.
struct Rig {
    scratch: Scratch,
    manager: Manager,
    b: PathBuf,
    away: PathBuf,
}

impl Rig {
    fn new(name: &str) -> Rig {
        let scratch = Scratch::new(name);
        scratch.format("64M");
        let (a, b) = (scratch.file("a", 16 * MIB), scratch.file("b", 16 * MIB));
        let (manager, away) = (Manager::new(&scratch), scratch.path("away"));
        let daemon = scratch.serve(&["--volume", &volume("a", &a), "--volume", &volume("b", &b)]);
        for name in ["a", "b"] {
            scratch.connect(name).write(MIB, &[name.as_bytes()[0]; 4096], true).unwrap();
        }
        daemon.stop("TERM");
        std::fs::rename(&b, &away).unwrap();
        Rig { scratch, manager, b, away }
    }

    /// What was recorded is served, and what is missing is waited for.
    fn serve(&self, more: &[&str]) -> Daemon {
        let mut command = self.scratch.serve_command(&[&LONG, more].concat());
        command.env("NOTIFY_SOCKET", &self.manager.path);
        Daemon::begin(command, &self.scratch.path("stderr"))
    }

    fn state(&self, name: &str) -> String {
        let status = self.scratch.status();
        let volumes = status["volumes"].as_array().unwrap();
        let it = volumes.iter().find(|it| it["name"] == name).unwrap();
        it["state"].as_str().unwrap().to_owned()
    }

    fn problems(&self) -> String {
        self.scratch.status()["problems"].to_string()
    }

    fn comes(&self) {
        std::fs::rename(&self.away, &self.b).unwrap();
    }

    fn is_there(&self, name: &str) {
        let letter = name.as_bytes()[0];
        assert_eq!(self.scratch.connect(name).read(MIB, 4096).unwrap(), [letter; 4096]);
    }
}

/// Says `ready` now, after these lines.
fn ready(daemon: &Daemon) -> Vec<String> {
    let mut lines = Vec::new();
    loop {
        match daemon.next_line(PATIENCE) {
            Some(line) if line == "ready" => return lines,
            Some(line) => lines.push(line),
            None => panic!("it is not ready: {}", daemon.said()),
        }
    }
}

/// All waited for the last one, as long as `--device-timeout` said.
#[test]
fn a_missing_disk_holds_up_its_own_volume_alone() {
    let rig = Rig::new("late");
    let mut daemon = rig.serve(&[]);
    rig.is_there("a");
    assert_eq!((rig.state("a"), rig.state("b")), ("serving".into(), "waiting".into()));
    let waits = format!(
        "b: waits for its backing device: {}, the backing device of b, up to 3600s: it is not there",
        rig.b.display()
    );
    assert!(rig.problems().contains(&waits), "{}", rig.problems());
    assert!(rig.scratch.try_connect("b").is_err());
    // Who is started behind it finds all, and what closes the wait is not asked for meanwhile.
    assert_eq!(daemon.next_line(Duration::ZERO), None);
    let told = rig.manager.told();
    assert!(!told.contains(&"READY=1".to_owned()), "{told:?}");
    assert!(told.iter().any(|line| line.starts_with("STATUS=serves a; b: waits for")), "{told:?}");
    let error = upgrade(&rig.scratch, Path::new(env!("CARGO_BIN_EXE_forebay"))).unwrap_err();
    assert!(error.contains("its start waits for a backing device"), "{error}");
    let done = rig.scratch.ask(&["drain", "b"]);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("is served when that comes"), "{said}");

    rig.comes();
    assert_eq!(ready(&daemon), [rig.scratch.uri("b")]);
    rig.is_there("b");
    assert_eq!(rig.problems(), "[]");
    let told = rig.manager.told();
    let told: Vec<&str> = told.iter().map(String::as_str).collect();
    assert_eq!(told, ["STATUS=serves a, b", "READY=1"]);
    assert!(daemon.is_running());
    daemon.stop("TERM");
}

#[test]
fn where_none_is_there_the_first_that_comes_is_served() {
    let rig = Rig::new("late-none");
    let (a, gone) = (rig.scratch.path("a"), rig.scratch.path("gone"));
    std::fs::rename(&a, &gone).unwrap();
    let comes = std::thread::spawn({
        let (socket, stderr) = (rig.scratch.control(), rig.scratch.path("stderr"));
        move || {
            wait_for("it waits", || {
                let said = std::fs::read_to_string(&stderr).unwrap_or_default();
                said.contains("the backing device of a, up to 3600s")
                    && said.contains("the backing device of b, up to 3600s")
            });
            assert!(!socket.exists());
            std::fs::rename(gone, a).unwrap();
        }
    });
    let daemon = rig.serve(&[]);
    comes.join().unwrap();
    rig.is_there("a");
    assert_eq!(rig.state("b"), "waiting");
    rig.comes();
    ready(&daemon);
    rig.is_there("b");
    daemon.stop("TERM");
}

/// As at any start, and with what was said of it at this one.
#[test]
fn a_late_disk_that_others_have_changed_is_refused_or_taken_as_was_said() {
    let rig = Rig::new("late-changed");
    let file = std::fs::File::options().write(true).open(&rig.away).unwrap();
    file.write_all_at(&[9; 4096], 0).unwrap();
    file.sync_all().unwrap();
    let daemon = rig.serve(&[]);
    rig.comes();
    ready(&daemon);
    assert_eq!(rig.state("b"), "waiting");
    let waits = "b: waits for its backing device: ";
    let said = rig.problems();
    assert!(said.contains(waits) && said.contains("was changed by others since"), "{said}");
    assert_eq!(said.matches(waits).count(), 1, "{said}");
    daemon.stop("TERM");

    std::fs::rename(&rig.b, &rig.away).unwrap();
    let daemon = rig.serve(&["--if-changed", "b=lose-dirty"]);
    rig.comes();
    ready(&daemon);
    let mut b = rig.scratch.connect("b");
    assert_eq!(
        (b.read(MIB, 4096).unwrap(), b.read(0, 4096).unwrap()),
        ([0; 4096].into(), [9; 4096].into())
    );
    rig.is_there("a");
    daemon.stop("TERM");
}

#[test]
fn who_attaches_it_by_hand_ends_the_wait() {
    let rig = Rig::new("late-hand");
    let daemon = rig.serve(&[]);
    let done = rig.scratch.ask(&["attach", "b"]);
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert_eq!(daemon.next_line(Duration::ZERO), None);
    let done = rig.scratch.ask(&["attach", &volume("b", &rig.away)]);
    assert!(done.status.success(), "{done:?}");
    ready(&daemon);
    rig.is_there("b");
    daemon.stop("TERM");
}

#[test]
fn a_stop_waits_for_no_disk() {
    let rig = Rig::new("late-stop");
    let said = rig.serve(&[]).stop("TERM");
    assert!(said.contains("b: 4 KiB not yet on "), "{said}");
    rig.manager.told();
    // A manager that was never told that it serves would begin it anew.
    let daemon = rig.serve(&[]);
    let done = rig.scratch.ask(&["stop"]);
    assert!(done.status.success(), "{done:?}");
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    let told = rig.manager.told();
    let place = |what: &str| told.iter().position(|line| line == what).unwrap();
    assert!(place("READY=1") < place("STOPPING=1"), "{told:?}");
}

/// It waited for nobody's disk any more, and what came was for `forebay attach`.
#[test]
fn the_next_program_waits_for_it_while_guests_go_on() {
    let rig = Rig::new("late-upgrade");
    rig.comes();
    let daemon = rig.serve(&[]);
    ready(&daemon);
    let mut a = rig.scratch.connect("a");
    assert_ends_waiting(&rig.scratch, &rig.b, &rig.away);
    // Its socket holds so much and no more.
    rig.manager.told();
    assert_eq!(a.read(MIB, 4096).unwrap(), [b'a'; 4096]);
    assert_eq!(rig.state("b"), "waiting");
    // A second one while it waits.
    upgrade(&rig.scratch, Path::new(env!("CARGO_BIN_EXE_forebay"))).unwrap();
    rig.comes();
    wait_for("b", || rig.state("b") == "serving");
    rig.is_there("b");
    assert_eq!(a.read(MIB, 4096).unwrap(), [b'a'; 4096]);
    daemon.stop("TERM");
}

/// With volumes of a file: name, backing device, what else it says of them.
fn of_file(scratch: &Scratch, volumes: &[(&str, &Path, &str)]) -> Daemon {
    of_file_by(std::process::Command::new(env!("CARGO_BIN_EXE_forebay")), scratch, volumes)
}

/// The same, of that program.
pub fn of_file_by(
    mut command: std::process::Command,
    scratch: &Scratch,
    volumes: &[(&str, &Path, &str)],
) -> Daemon {
    let mut text = format!(
        "cache = '{}'\nattach = 'none'\nlisten = '{}'\ncontrol = '{}'\ndevice-timeout = '3600s'\n",
        scratch.cache().display(),
        scratch.listen(),
        scratch.control().display(),
    );
    for (name, path, more) in volumes {
        text += &format!("[volume.{name}]\nbacking = '{}'\n{more}\n", path.display());
    }
    let file = scratch.path("it.toml");
    std::fs::write(&file, text).unwrap();
    command.args(["serve", "--config"]).arg(&file);
    Daemon::begin(command, &scratch.path("stderr"))
}

/// A start keeps what is recorded where the file asks for more than there is; who came later was not served for it.
#[test]
fn what_a_file_asks_for_without_room_keeps_no_late_volume_away() {
    let rig = Rig::new("late-reserve");
    let (a, reserve) = (rig.scratch.path("a"), "reserve = '60%'");
    let daemon = of_file(&rig.scratch, &[("a", &a, reserve), ("b", &rig.b, reserve)]);
    assert_eq!(rig.state("b"), "waiting");
    rig.comes();
    ready(&daemon);
    assert_eq!(rig.state("b"), "serving");
    assert!(rig.problems().contains("has no room"), "{}", rig.problems());
    daemon.stop("TERM");
}

/// All waited behind one that did not answer when it was looked for, for ever, and for a minute behind one that did not when it was opened.
#[test]
fn a_late_disk_that_does_not_answer_holds_up_its_own_volume_alone() {
    for unanswered in [LOOKUP, OPEN] {
        let rig = Rig::new("late-silent");
        let Some(apart) = Apart::with(&[]) else {
            return skip("no mount namespace of its own");
        };
        let (a, place) = (rig.scratch.path("a"), rig.scratch.path("silent"));
        std::fs::create_dir(&place).unwrap();
        let volumes = [("a", &*a, ""), ("c", &*place.join("c"), ""), ("b", &*rig.b, "")];
        let command = apart.command(env!("CARGO_BIN_EXE_forebay"));
        let daemon = of_file_by(command, &rig.scratch, &volumes);
        let Some(silence) = Silence::begin(&apart, &place, unanswered) else {
            return skip("no FUSE");
        };
        silence.wait_until_asked();
        rig.comes();
        wait_for("b is served", || rig.state("b") == "serving");
        assert!(rig.problems().contains("the backing device of c, up to 3600s: it is not there"));
        rig.is_there("a");
        rig.is_there("b");
        if unanswered == LOOKUP {
            // Whatever becomes of its volume, no program is executed while the thread cannot end.
            let other = volume("c", &rig.scratch.file("other", 16 * MIB));
            let done = rig.scratch.ask(&["attach", &other]);
            assert!(done.status.success(), "{done:?}");
            ready(&daemon);
            let program = Path::new(env!("CARGO_BIN_EXE_forebay"));
            let error = upgrade(&rig.scratch, program).unwrap_err();
            assert!(error.contains("a device does not answer that was looked at"), "{error}");
            drop(silence);
            // The file names another disk than it has now.
            let refused = || upgrade(&rig.scratch, program).unwrap_err();
            wait_for("it is over", || refused().contains("an upgrade changes no disk"));
            daemon.stop("TERM");
            continue;
        }
        // It has been put aside.
        rig.is_there("b");
        std::thread::sleep(Duration::from_secs(1));
        // The kernel keeps the process as long as a thread of it waits there. All else of it has ended: the next one serves.
        let done = rig.scratch.ask(&["stop"]);
        assert!(done.status.success(), "{done:?}");
        let text = format!("{}: did not answer, and is not waited for", place.join("c").display());
        assert!(daemon.said().contains(&text), "{}", daemon.said());
        let next = rig.scratch.serve(&["--device-timeout", "0s"]);
        rig.is_there("a");
        rig.is_there("b");
        next.stop("TERM");
        drop(silence);
        assert_eq!(daemon.ended().0, Some(0));
    }
}

/// Nobody was served before it answered: neither one that could not be opened, nor one that could not even be seen.
#[test]
fn a_disk_that_does_not_answer_at_the_start_holds_up_its_own_volume_alone() {
    let rig = Rig::new("silent-start");
    rig.comes();
    let Some(apart) = Apart::with(&[]) else {
        return skip("no mount namespace of its own");
    };
    let of = |name: &str, unanswered: u32| {
        let place = rig.scratch.path(name);
        std::fs::create_dir(&place).unwrap();
        Silence::begin(&apart, &place, unanswered)
    };
    let (Some(mut opened), Some(seen)) = (of("opened", OPEN), of("seen", LOOKUP)) else {
        return skip("no FUSE");
    };
    let disk = |name: &str| rig.scratch.path(name).join("disk");
    let (c, d, a) = (disk("opened"), disk("seen"), rig.scratch.path("a"));
    let volumes = [("c", &*c, ""), ("a", &*a, ""), ("d", &*d, ""), ("b", &*rig.b, "")];
    // It is waited for while the disks are held, of which one does not answer.
    let (cache, away) = (rig.scratch.cache(), rig.scratch.path("cache-away"));
    std::fs::rename(&cache, &away).unwrap();
    let daemon = std::thread::scope(|scope| {
        scope.spawn(|| {
            seen.wait_until_asked();
            std::fs::rename(&away, &cache).unwrap();
        });
        let mut command = apart.command(env!("CARGO_BIN_EXE_forebay"));
        // As in `silent.rs`.
        command.env("FOREBAY_STATE_DIR", rig.scratch.path("state"));
        of_file_by(command, &rig.scratch, &volumes)
    });
    assert_eq!(rig.scratch.volume_names(), ["a", "b"]);
    for (name, path) in [("c", &c), ("d", &d)] {
        let text = format!(
            "{name}: waits for its backing device: {}, the backing device of {name}: it does not answer",
            path.display()
        );
        assert!(rig.problems().contains(&text), "{}", rig.problems());
    }
    rig.is_there("a");
    rig.is_there("b");
    // It is another disk that comes by hand, and one at a time.
    let other = volume("e", &rig.scratch.file("other", 16 * MIB));
    let done = rig.scratch.ask(&["attach", &other]);
    assert!(done.status.success(), "{done:?}");
    opened.answers();
    wait_for("c is served", || rig.scratch.volume_names().contains(&"c".to_owned()));
    assert_eq!(rig.scratch.connect("c").read(MIB, 4096).unwrap(), [0; 4096]);
    // What was silent and is not there is waited for like any other.
    drop(seen);
    wait_for("d is awaited", || rig.problems().contains("it is not there; the others are served"));
    assert!(!rig.problems().contains("c: waits"), "{}", rig.problems());
    // The dead mount is above the directory, and in the daemon's namespace.
    let place = rig.scratch.path("seen");
    assert!(apart.command("umount").arg("-l").arg(&place).status().unwrap().success());
    std::fs::File::create(&d).unwrap().set_len(16 * MIB).unwrap();
    ready(&daemon);
    assert!(rig.scratch.volume_names().contains(&"d".to_owned()), "{}", rig.problems());
    daemon.stop("TERM");
}

/// Nothing said what a start waited for, and no signal but the one that cannot be caught ended it.
#[test]
fn a_cache_that_does_not_answer_is_named_and_a_signal_ends_the_start() {
    for stops in [false, true] {
        let scratch = Scratch::new("silent-cache");
        let Some(apart) = Apart::with(&[]) else {
            return skip("no mount namespace of its own");
        };
        let place = scratch.path("silent");
        std::fs::create_dir(&place).unwrap();
        let Some(mut silence) = Silence::begin(&apart, &place, OPEN) else {
            return skip("no FUSE");
        };
        let cache = place.join("cache");
        let mut command = apart.command(env!("CARGO_BIN_EXE_forebay"));
        command.args(["serve", "--attach=none", "--cache"]).arg(&cache);
        command.args(["--volume", &volume("a", &scratch.file("a", 16 * MIB))]);
        let file = scratch.path("stderr");
        let mut daemon = command.stderr(File::create(&file).unwrap()).spawn().unwrap();
        let said = || std::fs::read_to_string(&file).unwrap();
        let text = format!("waits for {}, the cache device, for ", cache.display());
        wait_for("it says so", || said().contains(&text));
        if stops {
            signal(daemon.id(), "TERM");
            wait_for("it ends", || said().contains("a signal came while it was being opened"));
        } else {
            silence.answers();
            wait_for("it goes on", || said().contains("forebay: "));
        }
        drop(silence);
        assert_eq!(daemon.wait().unwrap().code(), Some(i32::from(!stops)), "{}", said());
    }
}

/// New ones, as a file has them: the second finds the first there.
#[test]
fn two_that_wait_for_one_disk_do_not_both_get_it() {
    let scratch = Scratch::new("late-twice");
    scratch.format("64M");
    let (a, away) = (scratch.file("a", 16 * MIB), scratch.file("away", 16 * MIB));
    let (disk, link) = (scratch.path("disk"), scratch.path("link"));
    std::os::unix::fs::symlink(&disk, &link).unwrap();
    let daemon = of_file(&scratch, &[("a", &a, ""), ("b", &disk, ""), ("c", &link, "")]);
    assert_eq!(scratch.volume_names(), ["a"]);
    std::fs::rename(away, &disk).unwrap();
    ready(&daemon);
    // It may have come between the looks for the two.
    let names = scratch.volume_names();
    let (has, waits) = if names[1] == "b" { ("b", "c") } else { ("c", "b") };
    assert_eq!(names, ["a", has]);
    let problems = scratch.status()["problems"].to_string();
    let refused = format!("{waits}: waits for its backing device: ");
    let by = format!("is the backing device of volume {has}");
    assert!(problems.contains(&refused) && problems.contains(&by), "{problems}");
    daemon.stop("TERM");
}

/// Who types a volume means it.
#[test]
fn a_volume_that_is_typed_is_waited_for_before_anything_is_served() {
    let rig = Rig::new("late-typed");
    let typo = volume("typo", &rig.scratch.path("typo"));
    let command = rig.scratch.serve_command(&["--volume", &typo, "--device-timeout", "300ms"]);
    let (code, said) = Daemon::try_start(command, &rig.scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1));
    assert!(said.contains("the backing device of typo is not there; it was waited for"), "{said}");
    assert!(!said.contains(" served: "), "{said}");
    let cache = rig.scratch.cache();
    let done = forebay(["inspect", cache.to_str().unwrap(), "volumes"]);
    assert!(!String::from_utf8_lossy(&done.stdout).contains("typo"), "{done:?}");
}

/// It was never listened on.
#[cfg(feature = "vhost")]
#[test]
fn a_virtual_machine_finds_the_socket_of_a_late_volume() {
    let rig = Rig::new("late-vhost");
    let socket = |name: &str| rig.scratch.sockets.join(name);
    let listen = |name: &str| format!("vhost-user://{}?volume={name}", socket(name).display());
    let daemon = rig.serve(&["--listen", &listen("a"), "--listen", &listen("b")]);
    UnixStream::connect(socket("a")).unwrap();
    assert!(!socket("b").exists());
    assert!(rig.problems().contains("b: not listened for on "), "{}", rig.problems());
    rig.comes();
    let lines = ready(&daemon);
    assert!(lines.len() == 2 && lines[1].starts_with("vhost-user b: "), "{lines:?}");
    let _machine = UnixStream::connect(socket("b")).unwrap();
    let is_connected = || rig.scratch.status()["volumes"][1]["vhost_user_clients"] == 1;
    wait_for("the machine", is_connected);
    assert_eq!(rig.problems(), "[]");
    daemon.stop("TERM");
    assert!(!socket("b").exists());
}

/// It was served already, and its socket never listened on.
#[cfg(feature = "vhost")]
#[test]
fn what_a_volume_could_not_have_when_it_came_it_has_when_it_is_asked_for_again() {
    let rig = Rig::new("late-half");
    let socket = rig.scratch.sockets.join("b");
    let daemon = rig.serve(&["--listen", &format!("vhost-user://{}?volume=b", socket.display())]);
    // Something else is in its place.
    std::fs::create_dir(&socket).unwrap();
    rig.comes();
    ready(&daemon);
    rig.is_there("b");
    let why = format!("b: not listened for: {}", socket.display());
    assert_eq!(rig.problems().matches(&why).count(), 1, "{}", rig.problems());
    let attach = || {
        let done = rig.scratch.ask(&["attach", "b"]);
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let (code, said) = attach();
    assert!(code == Some(1) && said.contains(&why), "{said}");
    assert_eq!(rig.problems().matches(&why).count(), 1, "{}", rig.problems());
    std::fs::remove_dir(&socket).unwrap();
    let (code, said) = attach();
    assert_eq!(code, Some(0), "{said}");
    let _machine = UnixStream::connect(&socket).unwrap();
    assert_eq!(rig.problems(), "[]");
    let (code, said) = attach();
    assert!(code == Some(1) && said.contains("b: is served already"), "{said}");
    daemon.stop("TERM");
    assert!(!socket.exists());
}
