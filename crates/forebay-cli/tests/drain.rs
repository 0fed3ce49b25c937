// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay drain` as people see it: a line that is rewritten on a terminal, plain lines elsewhere;
//! whoever ends it ends nothing else.
//!
//! The drain is held up by a limit on the size of files, set on the daemon, for as long as the
//! test wants to look.

use crate::support;
use crate::support::load::{Habits, work};
use crate::support::model::{Model, content};
use crate::support::terminal::{Terminal, is_running};
use crate::support::{Daemon, Scratch, ended, wait_for};
use forebay_testing::requires;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;
const AT: u64 = 100 * MIB;

fn limit(daemon: &Daemon, bytes: Option<u64>) {
    let pid = Pid::from_raw(daemon.id() as i32).unwrap();
    prlimit(Some(pid), Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
}

/// A daemon whose volume is dirty where its backing file cannot be written.
fn held_up(scratch: &Scratch) -> (Daemon, PathBuf) {
    scratch.format("64M");
    let backing = scratch.file("backing", 128 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    scratch.connect("v").write(AT, &content(1, AT, MIB), true).unwrap();
    limit(&daemon, Some(80 * MIB));
    (daemon, backing)
}

/// The daemon drains on by itself, and the backing file has it all.
fn ends_well(scratch: &Scratch, daemon: Daemon, backing: &PathBuf) {
    limit(&daemon, None);
    wait_for("the drain", || scratch.status()["volumes"][0]["dirty"] == false);
    assert_eq!(scratch.status()["volumes"][0]["drained"], true);
    daemon.stop("TERM");
    let found = std::fs::read(backing).unwrap();
    assert!(found[AT as usize..][..MIB as usize] == content(1, AT, MIB));
}

#[test]
fn on_a_terminal_one_line_is_rewritten_and_an_interrupt_ends_nothing_else() {
    requires!("script");
    let scratch = Scratch::new("drain-tty");
    let (daemon, backing) = held_up(&scratch);
    let drain = Terminal::start(&scratch, &scratch.drain_command());
    wait_for("a rewritten line", || drain.shown().matches("\r\x1b[K").count() >= 3);
    let shown = drain.shown();
    assert!(shown.contains("\r\x1b[K1 MiB of 1 MiB left, 0 B/s, no estimate yet"), "{shown:?}");
    assert!(!shown.contains('\n'), "it goes on in one line: {shown:?}");
    drain.signal("INT");
    assert_ne!(drain.ended().0, Some(0), "an interrupt is no success");
    // Nor does a terminal that goes away.
    let drain = Terminal::start(&scratch, &scratch.drain_command());
    wait_for("a line", || drain.shown().contains("left, 0 B/s"));
    let process = drain.process();
    drop(drain);
    wait_for("its end", || !is_running(process));
    assert_eq!(scratch.status()["volumes"][0]["drained"], true);
    ends_well(&scratch, daemon, &backing);
}

/// It was watched for ever.
#[test]
fn a_drain_that_somebody_ends_is_not_watched_any_more() {
    let scratch = Scratch::new("drain-ended");
    let (daemon, backing) = held_up(&scratch);
    for words in [&["drain"][..], &["stop", "--drain"]] {
        let mut watching = Command::new(env!("CARGO_BIN_EXE_forebay"));
        watching.args(words).arg("--control").arg(scratch.control());
        watching.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut watching = watching.spawn().unwrap();
        // When it has seen it.
        let mut line = [0; 1];
        std::io::Read::read_exact(watching.stdout.as_mut().unwrap(), &mut line).unwrap();
        let done = scratch.ask(&["set", "v", "mode=write-back"]);
        assert!(done.status.success(), "{done:?}");
        let done = watching.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{words:?}: {said}");
        assert!(said.contains("v: is not drained any more: it was given a mode"), "{said}");
    }
    let mut drain = scratch.drain_command().spawn().unwrap();
    wait_for("the drain", || scratch.status()["volumes"][0]["drained"] == true);
    ends_well(&scratch, daemon, &backing);
    drain.wait().unwrap();
}

/// It ended with an error that looked like the disk's.
#[test]
fn a_detach_that_can_say_nothing_gives_the_mode_back_before_it_ends() {
    let scratch = Scratch::new("drain-unheard");
    let (daemon, backing) = held_up(&scratch);
    let detach = |stdout: Stdio| {
        let mut detach = Command::new(env!("CARGO_BIN_EXE_forebay"));
        detach.args(["detach", "v", "--control"]).arg(scratch.control()).stdout(stdout);
        let done = detach.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(scratch.status()["volumes"][0]["drained"], false, "{done:?}");
        done
    };
    let done = detach(File::options().write(true).open("/dev/full").unwrap().into());
    let told = String::from_utf8_lossy(&done.stderr);
    assert!(told.starts_with("forebay: stdout cannot be written: No space left"), "{told}");
    let (_, closed) = std::io::pipe().unwrap();
    let done = detach(closed.into());
    assert!(done.stderr.is_empty() && done.status.code().is_none(), "{done:?}");
    let mut drain = scratch.drain_command().spawn().unwrap();
    wait_for("the drain", || scratch.status()["volumes"][0]["drained"] == true);
    ends_well(&scratch, daemon, &backing);
    drain.wait().unwrap();
}

/// One volume can be written back, the other one not yet.
#[test]
fn an_estimate_is_what_the_rest_takes_and_who_ends_the_drain_stops_nothing() {
    let scratch = Scratch::new("drain-eta");
    scratch.format("64M");
    let volume = |name| format!("{name}={}", scratch.file(name, 200 * MIB).display());
    let daemon = scratch.serve(&["--volume", &volume("v"), "--volume", &volume("w")]);
    // The cache file lies before it, all that is written behind it.
    limit(&daemon, Some(80 * MIB));
    let written = [("v", 90 * MIB, 8), ("w", 160 * MIB, 4)];
    for (name, first, count) in written {
        let mut client = scratch.connect(name);
        for at in (first..).step_by(MIB as usize).take(count) {
            client.write(at, &content(1, at, MIB), false).unwrap();
        }
    }
    let seen = scratch.path("seen");
    let mut drain = scratch.drain_command();
    let mut drain = drain.stdout(File::create(&seen).unwrap()).spawn().unwrap();
    let text = || std::fs::read_to_string(&seen).unwrap();
    wait_for("a line", || text().lines().count() >= 1);
    assert_eq!(text().lines().next(), Some("12 MiB of 12 MiB left, 0 B/s, no estimate yet"));
    limit(&daemon, Some(140 * MIB));
    wait_for("an estimate", || text().contains(" s left; "));
    let shown = text();
    // `LEFT of ALL left, RATE/s, SECONDS s left`, and what it waits for
    let line = shown.lines().find(|line| line.contains(" s left; ")).unwrap();
    let (line, waits) = line.split_once("; ").unwrap();
    let refused =
        format!("{} refuses to be written: `forebay status` says why", scratch.path("w").display());
    assert_eq!(waits, refused);
    let (rate, seconds) = line
        .strip_prefix("4 MiB of 12 MiB left, ")
        .and_then(|rest| rest.strip_suffix(" s left")?.split_once("/s, "))
        .unwrap_or_else(|| panic!("{line}"));
    let expected = 4.0 * MIB as f64 / bytes(rate);
    // Both are rounded.
    let seconds: f64 = seconds.parse().unwrap();
    assert!((seconds - expected).abs() <= 0.5 + 0.06 * expected, "{line}");
    // He has seen enough.
    support::signal(drain.id(), "INT");
    assert!(!drain.wait().unwrap().success());
    limit(&daemon, None);
    for (at, (name, _, _)) in written.into_iter().enumerate() {
        wait_for("the drain", || scratch.status()["volumes"][at]["dirty"] == false);
        assert_eq!(
            scratch.status()["volumes"][at]["drained"],
            true,
            "{name}: nobody took that back"
        );
    }
    daemon.stop("TERM");
    for (name, first, count) in written {
        let found = std::fs::read(scratch.path(name)).unwrap();
        for at in (first..).step_by(MIB as usize).take(count) {
            assert!(found[at as usize..][..MIB as usize] == content(1, at, MIB), "{name}: {at}");
        }
    }
}

/// What `size` has shown.
fn bytes(text: &str) -> f64 {
    let (number, unit) = text.split_once(' ').unwrap();
    let power = ["B", "KiB", "MiB", "GiB"].iter().position(|it| *it == unit).unwrap();
    number.parse::<f64>().unwrap() * 1024f64.powi(power as i32)
}

#[test]
fn elsewhere_lines_are_plain_and_the_end_is_said() {
    let scratch = Scratch::new("drain-plain");
    let (daemon, backing) = held_up(&scratch);
    let seen = scratch.path("seen");
    let mut drain = scratch.drain_command();
    let mut drain = drain.stdout(File::create(&seen).unwrap()).spawn().unwrap();
    let text = || std::fs::read_to_string(&seen).unwrap();
    wait_for("a line", || text().lines().count() >= 1);
    // Of one that was tried often meanwhile it says that its disk refuses it.
    let begins = |line: &str| line.starts_with("1 MiB of 1 MiB left, 0 B/s, no estimate yet");
    assert!(text().lines().next().is_some_and(begins), "{}", text());
    limit(&daemon, None);
    assert!(drain.wait().unwrap().success());
    let shown = text();
    let last = [
        &format!("v: drained; {} is the plain disk", backing.display()),
        "kept so, at later starts too, until `forebay set NAME mode=write-back`",
    ];
    assert!(shown.lines().collect::<Vec<_>>().ends_with(&last), "{shown}");
    assert!(!shown.contains(['\r', '\x1b']), "{shown:?}");
    ends_well(&scratch, daemon, &backing);
}

/// A refused block is parked, behind the watermark, and no more when a guest writes it again: the disk has neither version until the new one
/// was tried. That was told as drained.
#[test]
fn a_refused_block_that_is_written_again_is_not_drained() {
    let scratch = Scratch::new("drain-refused");
    scratch.format("64M");
    let backing = scratch.file("backing", 128 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    let mut client = scratch.connect("v");
    // A block that is refused, and others, so that not all of a batch is.
    client.write(AT, &content(1, AT, 4096), true).unwrap();
    client.write(MIB, &content(2, MIB, MIB), true).unwrap();
    limit(&daemon, Some(80 * MIB));
    let mut drain = scratch.drain_command().arg("v").stderr(Stdio::null()).spawn().unwrap();
    let volume = || scratch.status()["volumes"][0].clone();
    wait_for("a block to be refused", || volume()["parked_blocks"] == 1);
    for tag in 3..300 {
        // Nobody waits for the answer: it comes when the disk has it, or has refused it.
        client.send_write(AT, &content(tag, AT, 4096), false).unwrap();
        let told = volume();
        assert!(told["dirty"] == true && told["drained_through"] == false, "{told}");
    }
    let ended = drain.try_wait().unwrap();
    assert!(ended.is_none_or(|it| !it.success()), "{ended:?}");
    assert!(!daemon.said().contains("v: drained: "), "{}", daemon.said());
    let _ = drain.kill();
    drain.wait().unwrap();
}

/// Guests that write to a simulated disk, and what happens to it meanwhile.
struct Busy {
    scratch: Scratch,
    daemon: Daemon,
    backing: PathBuf,
    model: Mutex<Model>,
}

impl Busy {
    const HABITS: Habits = Habits { size_bytes: 16 * MIB, hot_bytes: 4 * MIB, depth: 8 };

    fn new(name: &str) -> Busy {
        let scratch = Scratch::new(name);
        scratch.format("64M");
        let backing = scratch.file("backing", Busy::HABITS.size_bytes);
        let volume = format!("v=sim+hdd:{}?model=7200.12", backing.display());
        let daemon = scratch.serve(&["--volume", &volume]);
        let model = Mutex::new(Model::new(Busy::HABITS.size_bytes));
        Busy { scratch, daemon, backing, model }
    }

    /// They write until this is over, or the daemon is.
    fn meanwhile<T>(&self, then: impl FnOnce() -> T) -> T {
        let Busy { scratch, model, .. } = self;
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 1..4 {
                let mut client = scratch.connect("v");
                let enough = |_: &Model| over.load(Ordering::Relaxed);
                scope.spawn(move || work(&mut client, model, &Busy::HABITS, seed, enough).unwrap());
            }
            wait_for("work", || model.lock().unwrap().answered > 300);
            let done = then();
            over.store(true, Ordering::Relaxed);
            done
        })
    }

    /// What was answered is on the disk, without any more being done.
    fn compare_backing(&self) {
        let mut model = self.model.lock().unwrap();
        model.compare(0, &std::fs::read(&self.backing).unwrap()).unwrap();
    }
}

/// While guests write to a drained volume something is always on its way to the disk, and dirty: what they wait for. That is not what the
/// drain is to wait for, which would not end as long as they write.
#[test]
fn a_drain_ends_while_guests_write() {
    let busy = Busy::new("drain-busy");
    let drained = busy.meanwhile(|| ended(busy.scratch.drain_command().arg("v").spawn().unwrap()));
    let done = drained.expect("the drain had not ended");
    assert!(done.status.success(), "{done:?}");
    busy.compare_backing();
    wait_for("the log to say so", || busy.daemon.said().contains("v: drained: "));
}

/// What guests were still waiting for when they were cut off is nobody's newer version: the disk is plain, as it was asked for.
#[test]
fn a_stop_that_drains_leaves_the_plain_disk_though_guests_write() {
    let busy = Busy::new("drain-stop-busy");
    let done = busy.meanwhile(|| busy.scratch.ask(&["stop", "--drain"]));
    assert!(done.status.success(), "{done:?}");
    busy.model.lock().unwrap().crash();
    busy.compare_backing();
    let (code, said) = busy.daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(!told.contains("not yet on") && !said.contains("not yet on"), "{told}{said}");
}
