// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program is killed again and again under load: nothing that was answered may be missing.
//!
//! The cache is a quarter of the volume and is kept from kill to kill, so its log wraps while
//! write-back goes on. After the last kill nobody serves: the cache is drained, and the backing
//! file alone must hold it all. Now and then the program is killed while it starts.

use crate::support;
use crate::support::apart::Apart;
use crate::support::load::{Habits, work};
use crate::support::model::{CHUNK, Model, SECTOR};
use crate::support::{Daemon, Random, Scratch, forebay, good, skip};
use crate::upgrade::upgrade;
use std::ffi::OsStr;
use std::os::unix::fs::{FileExt, MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const KILLS: u64 = 24;
const GUESTS: u64 = 4;
const CACHE: &str = "64M";
const HABITS: Habits = Habits { size_bytes: 256 << 20, hot_bytes: 24 << 20, depth: 16 };

#[test]
fn a_kill_loses_nothing_acknowledged_with_io_uring() {
    if refuses_io_uring() {
        return support::skip("kill: the kernel refuses io_uring");
    }
    kill_again_and_again("uring", 1);
}

#[test]
fn a_kill_loses_nothing_acknowledged_with_threads() {
    kill_again_and_again("threads", 2);
}

fn refuses_io_uring() -> bool {
    let kind = forebay::io::ReactorKind::Uring;
    forebay::io::Reactor::new(kind, 8).is_err()
}

fn kill_again_and_again(io: &str, seed: u64) {
    let scratch = Scratch::new(&format!("kill-{io}"));
    scratch.format(CACHE);
    let backing = scratch.file("backing", HABITS.size_bytes);
    let volume = format!("v={}", backing.display());
    let model = Mutex::new(Model::new(HABITS.size_bytes));
    let mut random = Random(seed);
    let begun = Instant::now();
    let mut slowest = Duration::ZERO;
    for round in 0..KILLS {
        let mut args = vec!["--io", io];
        if round == 0 {
            args.extend(["--volume", &volume]);
        }
        if round % 3 == 2 {
            // Killed while it recovers; what it was recovering must outlive that, too.
            let after = Duration::from_millis(random.below(200));
            Daemon::start_and_kill(scratch.serve_command(&args), after);
        }
        let mut daemon = scratch.serve(&args);
        slowest = slowest.max(daemon.took);
        compare_after_crash(&scratch, &model, round);
        load_and_kill(&scratch, &mut daemon, &model, &mut random);
        model.lock().unwrap().crash();
    }
    let model = model.into_inner().unwrap();
    println!(
        "{io}: {KILLS} kills in {:.1} s, {} changes, {} MiB; slowest start {:.2} s",
        begun.elapsed().as_secs_f64(),
        model.answered,
        model.answered_bytes >> 20,
        slowest.as_secs_f64()
    );
    assert!(model.answered_bytes > 3 * (64 << 20), "the log did not wrap");
    let cache = scratch.cache();
    let done = forebay([OsStr::new("drain"), OsStr::new("--cache"), cache.as_ref()]);
    assert!(done.status.success(), "{done:?}");
    compare_backing(&backing, model);
}

/// Guests work until the seed says kill; they are in the middle of it then.
fn load_and_kill(
    scratch: &Scratch,
    daemon: &mut Daemon,
    model: &Mutex<Model>,
    random: &mut Random,
) {
    let answered = model.lock().unwrap().answered;
    let until = answered + 20 + random.below(2000);
    let more = Duration::from_micros(random.below(3000));
    // Connected before anybody is killed.
    let guests: Vec<_> = (0..GUESTS).map(|_| (scratch.connect("v"), random.next())).collect();
    let killed = Mutex::new(false);
    std::thread::scope(|scope| {
        let guests: Vec<_> = guests
            .into_iter()
            .map(|(mut client, seed)| {
                let killed = &killed;
                scope.spawn(move || {
                    work(&mut client, model, &HABITS, seed, |_| *killed.lock().unwrap())
                })
            })
            .collect();
        let begun = Instant::now();
        while model.lock().unwrap().answered < until {
            assert!(begun.elapsed() < support::PATIENCE, "no progress: {}", daemon.said());
            if guests.iter().any(|guest| guest.is_finished()) {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(more);
        daemon.kill();
        *killed.lock().unwrap() = true;
        for guest in guests {
            guest.join().unwrap().unwrap();
        }
    });
}

fn compare_after_crash(scratch: &Scratch, model: &Mutex<Model>, round: u64) {
    let mut model = model.lock().unwrap();
    let stride = if round % 8 == 7 { 1 } else { 16 };
    let mut client = scratch.connect("v");
    for chunk in model.take_suspects(stride) {
        let offset = chunk * CHUNK * SECTOR as u64;
        let bytes = client.read(offset, CHUNK as u32 * SECTOR as u32).unwrap();
        if let Err(error) = model.compare(offset, &bytes) {
            panic!("after kill {round}: {error}");
        }
    }
}

fn compare_backing(backing: &std::path::Path, mut model: Model) {
    let file = std::fs::File::open(backing).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for offset in (0..HABITS.size_bytes).step_by(bytes.len()) {
        file.read_exact_at(&mut bytes, offset).unwrap();
        if let Err(error) = model.compare(offset, &bytes) {
            panic!("on the drained backing file: {error}");
        }
    }
}

const NOBODY: u32 = 65534;

/// A place for a user's daemon and what it has.
struct Users {
    scratch: Scratch,
    backing: PathBuf,
    /// On a memory file system, and nobody's but its own.
    runtime: PathBuf,
}

impl Users {
    /// None where it cannot be had.
    fn new(name: &str) -> Option<Users> {
        let scratch = Scratch::new(name);
        if std::fs::metadata(&scratch.dir).unwrap().uid() != 0 || !Path::new("/dev/shm").exists() {
            skip("kill: only root can serve as another user");
            return None;
        }
        scratch.format("64M");
        let backing = scratch.file("backing", 1 << 20);
        let runtime = PathBuf::from(format!("/dev/shm/fb-{name}-{}", std::process::id()));
        std::fs::create_dir(&runtime).unwrap();
        let cache = scratch.cache();
        for path in [&scratch.dir, &scratch.sockets, &runtime, &cache, &backing] {
            chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        Some(Users { scratch, backing, runtime })
    }

    /// `runtime`: none for the directory that there always is.
    fn serve(&self, runtime: Option<&Path>) -> Daemon {
        let named =
            self.scratch.serve_command(&["--volume", &format!("v={}", self.backing.display())]);
        let mut command = Command::new(self.scratch.program_for_all());
        command.args(named.get_args()).arg("--state-dir").arg(self.scratch.path("state"));
        command.args(["--sync-after", "1h"]).env_remove("XDG_RUNTIME_DIR");
        command.envs(runtime.map(|path| ("XDG_RUNTIME_DIR", path)));
        command.uid(NOBODY).gid(NOBODY);
        Daemon::start(command, &self.scratch.path("stderr"))
    }
}

impl Drop for Users {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.runtime);
    }
}

/// What was answered and not yet written was lost by the death of the process alone: root looked in its own directory and nowhere else.
#[test]
fn what_a_users_process_left_in_memory_is_found_by_root() {
    let Some(it) = Users::new("kill-user") else { return };
    let mut daemon = it.serve(None);
    it.scratch.connect("v").write(0, &[7; 4096], false).unwrap();
    daemon.kill();
    let cache = it.scratch.cache();
    let mut drain = Command::new(env!("CARGO_BIN_EXE_forebay"));
    drain.arg("drain").arg("--cache").arg(cache).arg("--state-dir").arg(it.scratch.path("state"));
    let done = support::run(&mut drain);
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    assert!(!said.contains("was not found"), "{said}");
    assert_eq!(std::fs::read(&it.backing).unwrap()[..4096], [7; 4096], "{said}");
}

#[test]
fn who_does_not_find_what_a_process_left_in_memory_says_so() {
    let Some(it) = Users::new("kill-away") else { return };
    let mut daemon = it.serve(Some(&it.runtime));
    it.scratch.connect("v").write(0, &[7; 4096], false).unwrap();
    daemon.kill();
    let daemon = it.serve(None);
    let said = daemon.said();
    let shared = format!("/dev/shm/forebay-{NOBODY}");
    assert!(said.contains("had in memory was not found") && said.contains(&shared), "{said}");
    drop(daemon.stop("HUP"));
    // After a clean stop nothing is missing.
    let daemon = it.serve(Some(&it.runtime));
    assert!(!daemon.said().contains("was not found"), "{}", daemon.said());
    daemon.stop("TERM");
}

/// A start that had no room for its memory had written everything back before, and the next one said that something may be lost.
#[test]
fn a_start_that_ended_before_it_served_is_no_loss() {
    let scratch = Scratch::new("kill-opening");
    scratch.format("64M");
    let (shm, run) = (scratch.path("shm"), scratch.path("run"));
    let Some(apart) = Apart::with(&[(&shm, "/dev/shm"), (&run, "/run")]) else {
        return skip("kill: no mount namespace of its own");
    };
    let inside = |program: &str, args: &[&str]| {
        good(apart.command(program).args(args));
    };
    inside("mount", &["-t", "tmpfs", "-o", "size=25M", "none", "/dev/shm"]);
    let volume = format!("v={}", scratch.file("backing", 32 << 20).display());
    let serve = || {
        let named = scratch.serve_command(&["--volume", &volume, "--sync-after", "1h"]);
        let mut command = apart.command(named.get_program());
        command.args(named.get_args()).env_remove("XDG_RUNTIME_DIR");
        command
    };
    let mut daemon = Daemon::start(serve(), &scratch.path("stderr"));
    let bytes = support::model::content(1, 0, 6 << 20);
    scratch.connect("v").write(0, &bytes, false).unwrap();
    daemon.kill();
    let fill = "dd if=/dev/zero of=/dev/shm/fill bs=64k 2>/dev/null; test -s /dev/shm/fill";
    inside("sh", &["-c", fill]);
    for _ in 0..2 {
        let refused = support::run(&mut serve());
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("take shared memory"), "{said}");
        assert!(!said.contains("was not found"), "{said}");
    }
    inside("rm", &["/dev/shm/fill"]);
    let daemon = Daemon::start(serve(), &scratch.path("stderr"));
    assert!(!daemon.said().contains("was not found"), "{}", daemon.said());
    assert!(scratch.connect("v").read(0, 6 << 20).unwrap() == bytes);
    daemon.stop("TERM");
}

#[test]
fn a_terminal_that_hangs_up_is_a_clean_stop_unless_that_is_ignored() {
    let scratch = Scratch::new("hang-up");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 1 << 20).display());
    let daemon = scratch.serve(&["--volume", &volume]);
    assert!(daemon.stop("HUP").contains("stopped: everything is durable"));
    let command = scratch.serve_command(&["--volume", &volume]);
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(command.get_program());
    nohup.args(command.get_args());
    let daemon = Daemon::start(nohup, &scratch.path("stderr"));
    // Nothing of it is heard: who catches a signal does not ignore it.
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
    let mask = |field| status.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim();
    let is_hangup = |mask| u64::from_str_radix(mask, 16).unwrap() & 1 == 1;
    assert!(is_hangup(mask("SigIgn:")) && !is_hangup(mask("SigCgt:")), "{status}");
    daemon.stop("TERM");
}

/// How long its block devices are waited for was also how long everything had to become durable: with 0 no stop was a clean one.
#[test]
fn who_waits_for_no_device_still_stops_with_everything_durable() {
    let scratch = Scratch::new("stop-at-once");
    scratch.format("64M");
    let volume = format!("v={}", scratch.file("backing", 1 << 20).display());
    let daemon = scratch.serve(&["--volume", &volume, "--stop-timeout", "0"]);
    scratch.connect("v").write(0, &[7; 4096], false).unwrap();
    let said = upgrade(&scratch, Path::new(env!("CARGO_BIN_EXE_forebay"))).unwrap();
    assert!(said.contains("by a hand-over"), "{said}");
    scratch.connect("v").write(4096, &[8; 4096], false).unwrap();
    let said = daemon.stop("TERM");
    assert!(said.contains("stopped: everything is durable"), "{said}");
}
