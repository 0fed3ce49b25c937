// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon becomes another program under load: nothing that was answered may be missing, and nothing
//! of the map is read again. It is killed at any moment of that, and what it hands over is spoilt.

use crate::connections::broken;
use crate::support;
use crate::support::load::{Habits, work};
use crate::support::model::{CHUNK, Model, SECTOR};
use crate::support::{Daemon, PATIENCE, Random, Scratch, forebay, good, pause, signal, wait_for};
use forebay_serve::nbd::client::{Client, Connect};
use forebay_serve::nbd::wire::{RequestHeader, command};
use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");
const HABITS: Habits = Habits { size_bytes: 128 << 20, hot_bytes: 24 << 20, depth: 16 };
/// Both copies of the superblock, once to see what memory it takes and once to open it.
const SUPERBLOCKS: &str = "262144 bytes were read of it";

struct Rig {
    scratch: Scratch,
    backing: PathBuf,
    model: Mutex<Model>,
    random: Random,
}

impl Rig {
    fn new(name: &str, cache: &str) -> Rig {
        let scratch = Scratch::new(name);
        scratch.format(cache);
        Rig::over(scratch)
    }

    fn over(scratch: Scratch) -> Rig {
        let backing = scratch.file("backing", HABITS.size_bytes);
        let model = Mutex::new(Model::new(HABITS.size_bytes));
        Rig { scratch, backing, model, random: Random(1) }
    }

    fn serve(&self) -> Daemon {
        self.scratch.serve(&["--volume", &format!("v={}", self.backing.display())])
    }

    /// Guests work; in the middle of it this happens, and ends what they have of the daemon, if anything does.
    fn under_load<T>(&mut self, then: impl FnOnce(&Scratch, &mut Random) -> T) -> T {
        let mut guests = self.guests();
        self.under_load_of(&mut guests, then)
    }

    fn guests(&self) -> Vec<Client<UnixStream>> {
        (0..3).map(|_| self.scratch.connect("v")).collect()
    }

    /// The same with guests that are there already.
    fn under_load_of<T>(
        &mut self,
        guests: &mut [Client<UnixStream>],
        then: impl FnOnce(&Scratch, &mut Random) -> T,
    ) -> T {
        let until = self.model.lock().unwrap().answered + 20 + self.random.below(1000);
        let Rig { scratch, model, random, .. } = self;
        let (model, over) = (&*model, &AtomicBool::new(false));
        let result = std::thread::scope(|scope| {
            let guests: Vec<_> = guests
                .iter_mut()
                .map(|client| {
                    let (seed, enough) = (random.next(), |_: &Model| over.load(Ordering::Relaxed));
                    scope.spawn(move || work(client, model, &HABITS, seed, enough))
                })
                .collect();
            let begun = Instant::now();
            while model.lock().unwrap().answered < until {
                assert!(begun.elapsed() < PATIENCE, "no progress");
                std::thread::sleep(Duration::from_micros(200));
            }
            let result = then(scratch, random);
            over.store(true, Ordering::Relaxed);
            for guest in guests {
                guest.join().unwrap().unwrap();
            }
            result
        });
        self.model.lock().unwrap().crash();
        result
    }

    fn compare(&self, when: &str) {
        let mut model = self.model.lock().unwrap();
        let mut client = self.scratch.connect("v");
        for chunk in model.take_suspects(4) {
            let offset = chunk * CHUNK * SECTOR as u64;
            let bytes = client.read(offset, CHUNK as u32 * SECTOR as u32).unwrap();
            if let Err(error) = model.compare(offset, &bytes) {
                panic!("{when}: {error}");
            }
        }
    }

    /// Nobody serves: the backing file alone holds it all, in the end.
    fn drained(self) {
        let cache = self.scratch.cache();
        let done = forebay([OsStr::new("drain"), OsStr::new("--cache"), cache.as_ref()]);
        assert!(done.status.success(), "{done:?}");
        let file = std::fs::File::open(&self.backing).unwrap();
        let mut model = self.model.into_inner().unwrap();
        let mut bytes = vec![0; 1 << 20];
        for offset in (0..HABITS.size_bytes).step_by(bytes.len()) {
            file.read_exact_at(&mut bytes, offset).unwrap();
            model.compare(offset, &bytes).unwrap();
        }
    }

    fn program(&self, name: &str, when_asked: &str, before: &str) -> PathBuf {
        program(&self.scratch, name, when_asked, before)
    }
}

/// A program that does this before it goes on as the real one, when it is to serve.
pub fn program(scratch: &Scratch, name: &str, when_asked: &str, before: &str) -> PathBuf {
    let path = scratch.path(name);
    let text = format!(
        "#!/bin/sh\ncase \"$1\" in\nlayout) {when_asked} ;;\nserve) {before} ;;\nesac\nexec {FOREBAY} \"$@\"\n"
    );
    // Written by another process: what is open for writing cannot be executed, and a child of ours that is about to
    // become another program has open what we have.
    let write = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    good(Command::new("sh").args(["-c", write]).arg(&path).arg(&text));
    path
}

/// These are still connected.
fn assert_go_on(guests: &mut [Client<UnixStream>]) {
    for guest in guests {
        assert_eq!(guest.in_flight_count(), 0, "all is answered");
        guest.flush().unwrap();
    }
}

/// `forebay upgrade`: what it printed.
pub fn upgrade(scratch: &Scratch, program: &Path) -> Result<String, String> {
    let done = scratch.ask(&["upgrade", "--exec", program.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    if done.status.success() { Ok(text) } else { Err(text) }
}

#[test]
fn an_upgrade_under_load_loses_nothing_and_reads_nothing_again() {
    let mut rig = Rig::new("upgrade", "1G");
    let mut daemon = rig.serve();
    let mut handed = 0;
    let mut guests = rig.guests();
    for round in 0..9 {
        let done = rig.under_load_of(&mut guests, |it, _| upgrade(it, Path::new(FOREBAY)));
        let told = done.unwrap();
        assert!(told.contains("by a hand-over"), "{told}");
        assert_go_on(&mut guests);
        handed += 1;
        let said = daemon.said();
        assert_eq!(said.matches(SUPERBLOCKS).count(), handed, "{said}");
        assert_eq!(rig.scratch.status()["upgrade"], "by a hand-over");
        rig.compare(&format!("after upgrade {round}"));
        if round % 3 == 2 {
            // What it went on with is on the cache device as well.
            rig.under_load(|_, _| daemon.kill());
            daemon = rig.serve();
            handed = 0;
            rig.compare(&format!("killed after upgrade {round}"));
            guests = rig.guests();
        }
    }
    daemon.stop("TERM");
    rig.drained();
}

#[test]
fn a_kill_at_any_moment_of_an_upgrade_loses_nothing() {
    let mut rig = Rig::new("upgrade-kill", "256M");
    for round in 0..12 {
        let mut daemon = rig.serve();
        rig.compare(&format!("after kill {round}"));
        if round % 4 == 0 {
            // When it has been executed and has taken nothing yet.
            let dies = rig.program("dies", ":", "kill -9 $$");
            rig.under_load(|scratch, _| {
                let control = scratch.control();
                let mut upgrade = Command::new(FOREBAY);
                upgrade.arg("upgrade").arg("--exec").arg(dies).arg("--control").arg(control);
                let done = support::run(upgrade.args(["--timeout", "1s"]));
                assert!(!done.status.success());
            });
            let (code, said) = daemon.ended();
            assert!(code.is_none() && said.contains("goes on as"), "{said}");
            continue;
        }
        rig.under_load(|scratch, random| {
            let after = Duration::from_millis(random.below(150));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut upgrade = Command::new(FOREBAY);
                    upgrade.args(["upgrade", "--timeout", "1s", "--exec", FOREBAY, "--control"]);
                    support::run(upgrade.arg(scratch.control()))
                });
                std::thread::sleep(after);
                daemon.kill();
            });
        });
    }
    let daemon = rig.serve();
    rig.compare("in the end");
    daemon.stop("TERM");
    rig.drained();
}

#[test]
fn what_cannot_be_taken_is_left_and_that_is_said() {
    let mut rig = Rig::new("upgrade-left", "1G");
    let number = r#"n=$(echo "$FOREBAY_LEFT" | sed 's/.*"message":\([0-9]*\).*/\1/')"#;
    let table = r#"n=$(echo "$FOREBAY_LEFT" | sed 's/.*"tables":\[\([0-9]*\).*/\1/')"#;
    let spoil = "printf Z | dd of=/proc/$$/fd/$n bs=1 seek=4242 conv=notrunc 2>/dev/null";
    let cases = [
        ("other", "echo 0.0; exit 0", ":".to_owned(), "lays out the map otherwise (0.0"),
        ("older", "exit 2", ":".to_owned(), "knows of no hand-over"),
        ("spoilt", ":", format!("{number}; {spoil}"), "does not fit the cache"),
        ("cut", ":", format!("{table}; : > /proc/$$/fd/$n"), "cannot be read"),
        ("without", ":", "unset FOREBAY_LEFT".to_owned(), "by stop and recovery"),
    ];
    let daemon = rig.serve();
    let mut guests = rig.guests();
    for (name, when_asked, before, why) in cases {
        let program = rig.program(name, when_asked, &before);
        let told = rig.under_load_of(&mut guests, |it, _| upgrade(it, &program)).unwrap();
        assert!(told.contains("by stop and recovery") && told.contains(why), "{name}: {told}");
        rig.compare(name);
        if name == "without" {
            // Connections are told of in the same place.
            assert!(guests.iter_mut().all(|guest| guest.flush().is_err()));
        } else {
            assert_go_on(&mut guests);
        }
    }
    let told = rig.under_load(|scratch, _| upgrade(scratch, Path::new(FOREBAY))).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    daemon.stop("TERM");
    rig.drained();
}

/// The kernel may wait for ever in `execve` for what the thread that calls it has in a ring (`docs/decisions/0010-ublk.md`). That thread
/// is the next program's first, and how often it has waited goes along: who served has waited for each request.
#[test]
fn who_serves_is_not_who_executes_the_next_program() {
    const MANY: u64 = 2000;
    let rig = Rig::new("upgrade-thread", "256M");
    let daemon = rig.serve();
    let tasks = PathBuf::from(format!("/proc/{}/task", daemon.id()));
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
    let is_serving = |task: &PathBuf| read(task.join("comm")) == "serve\n";
    let serving: Vec<PathBuf> = std::fs::read_dir(tasks)
        .unwrap()
        .map(|task| task.unwrap().path())
        .filter(is_serving)
        .collect();
    let [serving] = serving.as_slice() else { panic!("{serving:?}") };
    let mut client = rig.scratch.connect("v");
    let begun = Instant::now();
    while waits(&read(serving.join("status"))) < MANY {
        assert!(begun.elapsed() < PATIENCE, "nobody waits for requests");
        client.write(0, &[1; 4096], false).unwrap();
    }
    drop(client);
    let note = rig.scratch.path("note");
    let before = format!("grep voluntary /proc/$$/status > {}", note.display());
    let told = upgrade(&rig.scratch, &rig.program("notes", ":", &before)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    let found = waits(&read(note));
    assert!(found < MANY / 2, "who executed the next program has waited {found} times");
    daemon.stop("TERM");
}

/// A daemon that is paused on its way to the program `next`: it looks for no signal and answers nobody any more. Its slow disk keeps it there.
fn on_its_way(name: &str) -> (Scratch, Daemon, Vec<Client<UnixStream>>) {
    const TRIES: usize = 10;
    let all = std::iter::repeat_with(|| try_on_its_way(name)).take(TRIES);
    all.flatten().next().expect("one that is seen on its way")
}

fn try_on_its_way(name: &str) -> Option<(Scratch, Daemon, Vec<Client<UnixStream>>)> {
    const SIZE: u64 = 256 << 30;
    let scratch = Scratch::new(name);
    scratch.format("256M");
    let disk = scratch.file("disk", SIZE);
    let volume = format!("v=sim+hdd:{}?model=7200.12", disk.display());
    let daemon = scratch.serve(&["--volume", &volume]);
    let next = program(&scratch, "next", ":", ":");
    let mut random = Random(9);
    let mut clients: Vec<_> = (0..4).map(|_| scratch.connect("v")).collect();
    for client in &mut clients {
        for cookie in 0..64 {
            let (offset, length) = (random.below(SIZE / 4096) * 4096, 4096);
            let header = RequestHeader { flags: 0, command: command::READ, cookie, offset, length };
            client.stream().write_all(&header.encode()).unwrap();
        }
    }
    let mut upgrade = Command::new(FOREBAY);
    upgrade.arg("upgrade").arg("--exec").arg(&next).arg("--control").arg(scratch.control());
    let mut upgrade = upgrade.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for("it goes", || daemon.said().contains("goes on as"));
    pause(daemon.id());
    // Who waits for the next program is not needed any more.
    upgrade.kill().unwrap();
    upgrade.wait().unwrap();
    let environment = std::fs::read(format!("/proc/{}/environ", daemon.id())).unwrap();
    let is_late = String::from_utf8_lossy(&environment).contains("FOREBAY_UPGRADED_FROM");
    (!is_late).then_some((scratch, daemon, clients))
}

/// Nobody looked for a signal behind the last turn of the loop: the next program served, and `systemctl stop` waited until it killed it.
#[test]
fn a_signal_on_the_way_ends_the_next_program() {
    let (_scratch, daemon, _clients) = on_its_way("upgrade-signalled");
    signal(daemon.id(), "TERM");
    signal(daemon.id(), "CONT");
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("stops: a signal came"), "{said}");
}

/// The same of a new program that cannot serve: the one before ends.
#[test]
fn a_signal_on_the_way_to_a_program_that_cannot_serve_ends_the_one_before() {
    let (scratch, daemon, _clients) = on_its_way("upgrade-signalled-back");
    // In the place of the one that was to be executed.
    std::fs::rename(broken(&scratch), scratch.path("next")).unwrap();
    signal(daemon.id(), "TERM");
    signal(daemon.id(), "CONT");
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("the program before goes on"), "{said}");
    assert!(said.contains("stops: a signal came"), "{said}");
}

/// Nobody answers meanwhile.
#[test]
fn a_stop_on_the_way_is_heard_by_the_next_program() {
    let (scratch, daemon, _clients) = on_its_way("upgrade-stopped");
    let mut stop = Command::new(FOREBAY);
    stop.arg("stop").arg("--control").arg(scratch.control()).stderr(Stdio::piped());
    let stop = stop.spawn().unwrap();
    let begun = PathBuf::from(format!("/proc/{}/net/unix", stop.id()));
    let control = scratch.control().display().to_string();
    // Its own end has no name, the daemon's has.
    let connected = || {
        let all = std::fs::read_to_string(&begun).unwrap();
        all.lines().filter(|line| line.ends_with(&control)).count() > 1
    };
    wait_for("somebody has come", connected);
    signal(daemon.id(), "CONT");
    let done = stop.wait_with_output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("`forebay stop` asked for it"), "{said}");
}

/// How often a thread has waited, of its `status`.
fn waits(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Two volumes that are found by links, each full of its own letter.
fn two_by_links(name: &str) -> (Scratch, [PathBuf; 2], Daemon) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let files = ["a", "b"].map(|name| scratch.file(name, 1 << 20));
    for (name, file) in ["la", "lb"].iter().zip(&files) {
        std::os::unix::fs::symlink(file, scratch.path(name)).unwrap();
    }
    let volume = |name: &str| format!("{name}={}", scratch.path(&format!("l{name}")).display());
    let daemon = scratch.serve(&["--volume", &volume("a"), "--volume", &volume("b")]);
    write_letters(&scratch);
    (scratch, files, daemon)
}

fn write_letters(scratch: &Scratch) {
    for (name, letter) in [("a", 0xaa), ("b", 0xbb)] {
        scratch.connect(name).write(0, &[letter; 1 << 20], true).unwrap();
    }
}

fn assert_letters(scratch: &Scratch, files: &[PathBuf; 2]) {
    let drained = scratch.ask(&["drain"]);
    assert!(drained.status.success(), "{drained:?}");
    assert_written(files);
}

fn assert_written(files: &[PathBuf; 2]) {
    for (file, letter) in files.iter().zip([0xaa, 0xbb]) {
        let found = std::fs::read(file).unwrap();
        assert!(found.iter().all(|byte| *byte == letter), "{}: {:x?}", file.display(), &found[..4]);
    }
}

/// What was left was matched by what the paths name, and nothing else: each volume was written to the other's disk.
#[test]
fn a_volume_keeps_its_disk_whatever_its_path_names_by_then() {
    let (scratch, files, daemon) = two_by_links("upgrade-swapped");
    let (la, lb, aside) = (scratch.path("la"), scratch.path("lb"), scratch.path("aside"));
    let swap = || {
        for (from, to) in [(&la, &aside), (&lb, &la), (&aside, &lb)] {
            std::fs::rename(from, to).unwrap();
        }
    };
    swap();
    let refused = upgrade(&scratch, Path::new(FOREBAY)).unwrap_err();
    let (a, b) = (files[0].display(), files[1].display());
    let why = format!("a: {} is {b} now, and the volume is served from {a}", la.display());
    assert!(refused.contains(&why), "{refused}");
    // They are no plain disks of these names.
    let drained = scratch.ask(&["drain"]);
    let told = String::from_utf8_lossy(&drained.stderr);
    assert!(told.contains("a: all of it is written back, but"), "{drained:?}");
    assert!(told.contains(&format!("which is {a} now")), "{told}");
    assert_written(&files);
    swap();
    write_letters(&scratch);
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    assert_letters(&scratch, &files);

    // After the daemon has looked: the next program refuses, and so does the one before, as long as it is so.
    write_letters(&scratch);
    let [la, lb, aside] = [&la, &lb, &aside].map(|path| path.display().to_string());
    let swap = format!("[ -e {aside} ] || {{ mv {la} {aside}; ln -s {b} {la}; }}");
    let error = upgrade(&scratch, &program(&scratch, "swaps", ":", &swap)).unwrap_err();
    assert!(error.contains("was not upgraded") && error.contains("a: "), "{error}");
    let problems = scratch.status()["problems"].to_string();
    assert!(problems.contains("a: waits for its backing device"), "{problems}");
    assert_eq!(scratch.connect("b").read(0, 4096).unwrap(), [0xbb; 4096]);
    let found = std::fs::read(&files[1]).unwrap();
    assert!(found.iter().all(|byte| *byte == 0xbb), "{:x?} {lb}", &found[..4]);
    daemon.stop("TERM");
}

/// `cargo test --release -p forebay-cli --test program how_long_a_write_waits -- --ignored --nocapture`
#[test]
#[ignore = "measures"]
fn how_long_a_write_waits() {
    for gib in [1, 64] {
        let scratch = Scratch::new("upgrade-stall");
        // `format` takes all of its room: 64 GiB.
        let cache = scratch.file("cache", gib << 30);
        let done = forebay([OsStr::new("format"), cache.as_ref()]);
        scratch.note_cache(&String::from_utf8_lossy(&done.stdout));
        let rig = Rig::over(scratch);
        let daemon = rig.serve();
        let old = rig.program("old", "exit 2", ":");
        let mut client = rig.scratch.connect("v");
        let mut random = Random(7);
        for _ in 0..60_000 {
            let block = random.below(HABITS.size_bytes / 4096);
            client.write(block * 4096, &[block as u8 | 1; 4096], false).unwrap();
        }
        drop(client);
        for round in 0..5 {
            for (name, program) in
                [("stop and recovery", old.as_path()), ("hand-over", Path::new(FOREBAY))]
            {
                let longest = longest_write(&rig.scratch, program);
                println!(
                    "cache {gib} GiB, round {round}, {name}: {:.1} ms",
                    longest.as_secs_f64() * 1e3
                );
            }
        }
        daemon.stop("TERM");
    }
}

/// Of writes one after the other while the daemon is upgraded; whoever is cut off connects again.
fn longest_write(scratch: &Scratch, program: &Path) -> Duration {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let (mut longest, mut at) = (Duration::ZERO, 0);
            let mut client = None;
            let mut begun = Instant::now();
            while !over.load(Ordering::Relaxed) {
                let Some(connected) = &mut client else {
                    let stream = UnixStream::connect(scratch.nbd()).ok();
                    let to = Connect { export: "v", ..Connect::default() };
                    client = stream.and_then(|stream| Client::connect(stream, &to).ok());
                    continue;
                };
                at = (at + 4096) % HABITS.size_bytes;
                match connected.write(at, &[7; 4096], false) {
                    Ok(()) => {
                        longest = longest.max(begun.elapsed());
                        begun = Instant::now();
                    }
                    Err(_) => client = None,
                }
            }
            longest
        });
        std::thread::sleep(Duration::from_millis(300));
        upgrade(scratch, program).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        over.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    })
}
