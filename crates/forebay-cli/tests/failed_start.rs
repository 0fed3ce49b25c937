// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A start that fails leaves everything as it was: what it would have changed, a corrected start would find changed.

use crate::support::{Daemon, Scratch, forebay, wait_for};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::ffi::OsStr;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// What the cache has recorded.
fn volumes(scratch: &Scratch) -> String {
    let cache = scratch.cache();
    let done = forebay([OsStr::new("inspect"), cache.as_os_str(), OsStr::new("volumes")]);
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

fn command(scratch: &Scratch, more: &[String]) -> Command {
    let mut command = scratch.serve_command(more);
    command.arg("--state-dir").arg(scratch.path("state"));
    command
}

fn fails(scratch: &Scratch, more: &[String]) -> String {
    let (code, said) =
        Daemon::try_start(command(scratch, more), &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    said
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A disk was recorded under the name that it was given beside a mistake elsewhere, and the corrected start found a volume that it had
/// to forget first; the socket of a daemon that never served stayed.
#[test]
fn a_mistake_anywhere_records_no_volume_and_leaves_no_socket() {
    let scratch = Scratch::new("failed-start");
    scratch.format("64M");
    let disk = scratch.file("disk", 16 * MIB);
    let good = format!("v={}", disk.display());
    let missing = scratch.path("missing").display().to_string();
    let busy = scratch.path("busy.sock");
    let _other = UnixListener::bind(&busy).unwrap();
    let before = volumes(&scratch);
    let long = format!("nbd+unix:///tmp/{}", "long".repeat(30));
    let mistakes: [(&[&str], &str); 12] = [
        (&["--listen", &long], "has 125 bytes, and the path of a socket at most 107"),
        (&["--listen", &format!("nbd+unix://{missing}/nbd")], "missing/nbd: cannot be listened on"),
        (&["--listen", &format!("nbd+unix://{}", busy.display())], "another daemon listens there"),
        (
            &["--listen", "nbd://127.0.0.1:1", "--listen", "nbd://127.0.0.1:1"],
            "127.0.0.1:1: is given twice, by --listen and --listen",
        ),
        // It was called another daemon's.
        (&["--listen", &scratch.listen()], "nbd: is given twice, by --listen and --listen"),
        (
            &["--metrics", &format!("unix:{}", scratch.nbd().display())],
            "nbd: is given twice, by --listen and --metrics",
        ),
        (&["--metrics", &format!("unix:{missing}/metrics")], "missing/metrics: cannot be listened"),
        (
            &["--listen", &format!("vhost-user://{missing}.vm?volume=w")],
            "volume=w: no such volume; there are: v",
        ),
        (&["--volume", &format!("w={missing}")], "missing: "),
        (&["--volume", &format!("w={}", disk.display())], "is the backing device of volume v"),
        (&["--volume", &format!("w={}", scratch.file("empty", 0).display())], "is empty"),
        (
            &["--volume", &format!("w={},reserve=1G", scratch.file("more", MIB).display())],
            "reserve",
        ),
    ];
    for (more, expected) in mistakes {
        let more: Vec<String> =
            ["--volume", &good].iter().chain(more).map(ToString::to_string).collect();
        let Err((code, said)) =
            Daemon::try_start(command(&scratch, &more), &scratch.path("stderr"))
        else {
            panic!("{more:?} was served")
        };
        assert!(
            matches!(code, Some(1 | 2)) && said.contains(expected),
            "{more:?}: {code:?} {said}"
        );
        assert_eq!(volumes(&scratch), before, "{more:?}");
        assert_eq!(names(&scratch.sockets), [""; 0], "{more:?}");
        assert_eq!(names(&scratch.path("state")), [""; 0], "{more:?}");
    }
    // Nor does a control socket that cannot be.
    let mut wrong = Command::new(env!("CARGO_BIN_EXE_forebay"));
    wrong.args(["serve", "--attach", "none", "--volume", &good, "--cache"]).arg(scratch.cache());
    wrong.arg("--control").arg(format!("{missing}/control"));
    let (_, said) = Daemon::try_start(wrong, &scratch.path("stderr")).unwrap_err();
    assert!(said.contains("missing/control: cannot be listened on"), "{said}");
    assert_eq!(volumes(&scratch), before);
    // The disk can have any name still.
    let other = format!("w={}", disk.display());
    let daemon =
        Daemon::start(command(&scratch, &["--volume".into(), other]), &scratch.path("stderr"));
    daemon.stop("TERM");
}

/// Another cache was marked stale for a disk that then was not served at all, and dropped what it held.
#[test]
fn a_start_that_fails_marks_no_other_cache_stale() {
    let scratch = Scratch::new("failed-start-mark");
    scratch.format("64M");
    let disk = scratch.file("disk", 16 * MIB);
    let volume = ["--volume".to_owned(), format!("v={}", disk.display())];
    let start = |more: &[String]| Daemon::start(command(&scratch, more), &scratch.path("stderr"));
    let daemon = start(&volume);
    scratch.connect("v").write(MIB, &[7; 8192], true).unwrap();
    daemon.stop("TERM");
    let state = scratch.path("state");
    let marks = || {
        let text = |name: &String| std::fs::read_to_string(state.join(name)).unwrap();
        names(&state).iter().map(text).collect::<String>()
    };
    let before = marks();
    assert!(before.contains("\"stale\": null"), "{before}");
    let mut bare = Command::new(env!("CARGO_BIN_EXE_forebay"));
    bare.args(["serve", "--attach", "none", "--without-cache", "w", "--volume"]);
    bare.arg(format!("w={}", disk.display())).arg("--state-dir").arg(&state);
    bare.arg("--control").arg(scratch.control());
    bare.arg("--listen").arg(format!("nbd+unix://{}/nbd", scratch.path("missing").display()));
    let (_, said) = Daemon::try_start(bare, &scratch.path("stderr")).unwrap_err();
    assert!(said.contains("cannot be listened on"), "{said}");
    assert_eq!(marks(), before);
    let daemon = start(&[]);
    assert_eq!(scratch.connect("v").read(MIB, 8192).unwrap(), [7; 8192]);
    daemon.stop("TERM");
    assert!(fails(&scratch, &["--if-changed".into(), "x=lose-dirty".into()]).contains("no such"));
}

/// Who came in while a disk was waited for was left without an answer, and a virtual machine with that stands still. Now he finds nobody
/// and comes again.
#[test]
fn nobody_is_let_in_before_the_volumes_are_served() {
    let scratch = Scratch::new("failed-start-late");
    scratch.format("64M");
    let late = scratch.path("late");
    let volume = ["--volume".to_owned(), format!("v={}", late.display())];
    let vm = scratch.sockets.join("vm");
    let mut command = command(&scratch, &volume);
    command.args(["--device-timeout", "60s", "--listen"]);
    command.arg(format!("vhost-user://{}", vm.display()));
    let stderr = scratch.path("stderr");
    let waits = || std::fs::read_to_string(&stderr).is_ok_and(|said| said.contains("waits for "));
    let daemon = std::thread::scope(|scope| {
        let daemon = scope.spawn(|| Daemon::start(command, &stderr));
        wait_for("it waits for the disk", waits);
        assert_eq!(names(&scratch.sockets), [""; 0]);
        scratch.file("late", 16 * MIB);
        daemon.join().unwrap()
    });
    assert_eq!(names(&scratch.sockets), ["control", "nbd", "vm"]);
    daemon.stop("TERM");
}

/// What a file asks for and the cache has no room for waits, and holds up nobody.
#[test]
fn a_new_volume_that_does_not_fit_holds_up_no_other() {
    let scratch = Scratch::new("failed-start-room");
    scratch.format("64M");
    let config = |text: &str| std::fs::write(scratch.path("config"), text).unwrap();
    let volume = |name: &str, reserve: &str| {
        let disk = scratch.file(name, 16 * MIB);
        format!("[volume.{name}]\nbacking = '{}'\n{reserve}", disk.display())
    };
    let cache = format!("cache = '{}'\n", scratch.cache().display());
    config(&(cache.clone() + &volume("a", "reserve = '100%'\n")));
    let serve = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("serve").arg("--config").arg(scratch.path("config"));
        command.args(["--attach", "none", "--listen"]).arg(scratch.listen());
        command.arg("--control").arg(scratch.control());
        command.arg("--state-dir").arg(scratch.path("state"));
        Daemon::start(command, &scratch.path("stderr"))
    };
    serve().stop("TERM");
    config(&(cache + &volume("a", "reserve = '100%'\n") + &volume("b", "")));
    let daemon = serve();
    assert_eq!(scratch.volume_names(), ["a"]);
    let problems = scratch.status()["problems"].to_string();
    assert!(problems.contains("b: waits") && problems.contains("reserve"), "{problems}");
    daemon.stop("TERM");
}

/// What found no memory ended the process by a signal, or said that memory cannot be allocated, after the generation was raised.
#[test]
fn a_start_without_memory_says_how_much_it_needs() {
    let scratch = Scratch::new("no-memory");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("disk", 16 * MIB).display());
    let before = volumes(&scratch);
    let serve = command(&scratch, &["--volume".into(), volume.clone()]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -v 180000 && exec \"$0\" \"$@\""]);
    limited.arg(serve.get_program()).args(serve.get_args());
    let (code, said) = Daemon::try_start(limited, &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.contains(" MiB of memory are needed and cannot be had: "), "{last}");
    assert!(last.contains("for all else, which --memory bounds: give less there"), "{last}");
    assert_eq!(volumes(&scratch), before);
    Daemon::start(command(&scratch, &["--volume".into(), volume]), &scratch.path("stderr"))
        .stop("TERM");
}

/// It was opened, and waited for whoever would write to it, with the cache's lock and whatever signal came.
#[test]
fn a_pipe_in_the_state_directory_is_no_record_and_nobody_waits_for_it() {
    let scratch = Scratch::new("failed-start-pipe");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("disk", 16 * MIB).display());
    let args = ["--volume".to_owned(), volume];
    let start = || Daemon::start(command(&scratch, &args), &scratch.path("stderr"));
    start().stop("TERM");
    let state = scratch.path("state");
    let record = state.join(&names(&state)[0]);
    let text = std::fs::read(&record).unwrap();
    std::fs::remove_file(&record).unwrap();
    let pipe = |path: &Path| mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    pipe(&record);
    let said = fails(&scratch, &args);
    let told = "may say that a cache is stale; mend or remove it: it is no regular file";
    assert!(said.contains(told), "{said}");
    std::fs::remove_file(&record).unwrap();
    std::fs::write(&record, text).unwrap();
    start().stop("TERM");
}
