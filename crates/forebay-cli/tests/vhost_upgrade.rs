// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program becomes another one under the disk of a virtual machine, which stays connected: every request is answered, once, and
//! no write is missing. If it cannot stay, it is closed, that is said, and it connects again as after a kill.

use crate::connections::{broken, emptied, fails, lost, spoilt};
use crate::support::{Daemon, PATIENCE, Scratch, run, wait_for};
use crate::upgrade::{program, upgrade};
use crate::vhost_kill::{Guest, SIZE_BYTES, compare, compare_file, connect};
use forebay_serve::vhost::driver::{Data, Link, Machine, kind};
use forebay_serve::vhost::wire::request;
use rustix::net::{RecvFlags, recv};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

struct Rig {
    scratch: Scratch,
    backing: PathBuf,
    socket: PathBuf,
}

impl Rig {
    fn new(name: &str) -> Rig {
        let scratch = Scratch::new(name);
        scratch.format("64M");
        Rig::over(scratch)
    }

    fn over(scratch: Scratch) -> Rig {
        let backing = scratch.file("backing", SIZE_BYTES);
        let socket = scratch.sockets.join("vm");
        Rig { scratch, backing, socket }
    }

    fn serve(&self) -> Daemon {
        let listen = format!("vhost-user://{}", self.socket.display());
        let volume = format!("v={}", self.backing.display());
        self.scratch.serve(&["--volume", &volume, "--listen", &listen])
    }

    /// The guest works meanwhile.
    fn upgrade(&self, guest: &mut Guest, program: &Path) -> Result<String, String> {
        std::thread::scope(|scope| {
            let upgrading = scope.spawn(|| upgrade(&self.scratch, program));
            while !upgrading.is_finished() {
                guest.step();
            }
            upgrading.join().unwrap()
        })
    }

    fn drained(self, daemon: Daemon, mut guest: Guest) {
        guest.finish();
        assert!(self.scratch.ask(&["stop", "--drain"]).status.success());
        assert_eq!(daemon.ended().0, Some(0));
        compare_file(&self.backing, &mut guest.model);
    }
}

/// It is connected, and its words are heard.
fn assert_goes_on(link: &mut Link) {
    assert_eq!(link.config(0, 8).unwrap(), (SIZE_BYTES / 512).to_le_bytes());
}

#[test]
fn upgrades_under_a_virtual_machine_lose_nothing_and_leave_it_connected() {
    let rig = Rig::new("vhost-upgrade");
    // The cache is closed and opened; connections go on all the same.
    let old = program(&rig.scratch, "old", "exit 2", ":");
    let mut daemon = rig.serve();
    let mut guest = Guest::new(5);
    let mut link = connect(&mut guest.machine, &rig.socket);
    let mut under_way = 0;
    for round in 0..12 {
        guest.machine.is_indirect = round % 2 == 1;
        let count = guest.random.below(1000);
        guest.work(count);
        let is_handed = round % 4 != 3;
        let next = if is_handed { Path::new(FOREBAY) } else { old.as_path() };
        let told = rig.upgrade(&mut guest, next).unwrap();
        assert_eq!(told.contains("by a hand-over"), is_handed, "{told}");
        under_way += guest.asked.len();
        guest.finish();
        assert_goes_on(&mut link);
        assert_eq!(rig.scratch.status()["volumes"][0]["vhost_user_clients"], 1);
        compare(&rig.scratch, &mut guest.model, round);
        if round % 6 == 5 {
            // What is in flight is noted as ever.
            guest.work(200);
            guest.offer();
            let said = daemon.said();
            assert_eq!(said.matches("1 virtual machine left to the next program").count(), 6);
            assert_eq!(said.matches("1 virtual machine of the program before").count(), 6);
            assert_eq!(said.matches("is connected").count(), 1, "{said}");
            assert!(!said.contains("disconnected") && !said.contains("cannot go on"), "{said}");
            daemon.kill();
            daemon = rig.serve();
            link = connect(&mut guest.machine, &rig.socket);
            guest.finish();
            compare(&rig.scratch, &mut guest.model, round);
        }
    }
    println!("{} answers, {under_way} under way behind upgrades", guest.answered);
    assert!(under_way > 100);
    rig.drained(daemon, guest);
}

/// The new one is none that can be executed, or takes the cache for none.
#[test]
fn a_failed_upgrade_leaves_it_connected_to_the_program_before() {
    let rig = Rig::new("vhost-upgrade-failed");
    let daemon = rig.serve();
    let mut guest = Guest::new(6);
    let mut link = connect(&mut guest.machine, &rig.socket);
    let (gone, broken) = (lost(&rig.scratch), broken(&rig.scratch));
    for (program, why) in [(&gone, "cannot be executed"), (&broken, "no forebay superblock")] {
        for round in 0..2 {
            lost(&rig.scratch);
            guest.work(100);
            let problems = std::thread::scope(|scope| {
                let failing = scope.spawn(|| fails(&rig.scratch, program));
                while !failing.is_finished() {
                    guest.step();
                }
                failing.join().unwrap()
            });
            assert!(problems.contains("was not upgraded") && problems.contains(why), "{problems}");
            guest.finish();
            assert_goes_on(&mut link);
            compare(&rig.scratch, &mut guest.model, round);
        }
    }
    rig.upgrade(&mut guest, Path::new(FOREBAY)).unwrap();
    assert_goes_on(&mut link);
    assert_eq!(daemon.said().matches("is connected").count(), 1);
    rig.drained(daemon, guest);
}

/// A machine that the new program cannot take is closed, and that is said if it knows of machines; what it asked for waits until it
/// is connected again.
#[test]
fn what_cannot_be_taken_is_closed_and_goes_on_as_after_a_kill() {
    let rig = Rig::new("vhost-upgrade-closed");
    let daemon = rig.serve();
    let spoil = |at: u32| spoilt("machines", at);
    let cases = [
        ("magic", spoil(3), "not as virtual machines do"),
        ("version", spoil(11), "leaves virtual machines in version 90, this one takes version 1"),
        ("length", spoil(12), "would be"),
        ("record", spoil(100), "another checksum"),
        ("cut", emptied("machines"), "cannot be read"),
        ("before", without_machines().into(), ""),
    ];
    let mut guest = Guest::new(7);
    for (round, (name, before, why)) in cases.into_iter().enumerate() {
        let mut link = connect(&mut guest.machine, &rig.socket);
        guest.work(200);
        guest.offer();
        let program = program(&rig.scratch, name, ":", &before);
        let told = upgrade(&rig.scratch, &program).unwrap();
        assert!(told.contains("by a hand-over"), "{name}: {told}");
        assert!(link.number(request::GET_FEATURES).is_err(), "{name}: the end");
        let said = daemon.said();
        let line = said.lines().rfind(|line| line.contains("cannot go on")).unwrap_or(&said);
        assert!(line.contains(why), "{name}: {line}");
        if !why.is_empty() {
            assert!(line.contains("virtual machines that cannot go on: 1; "), "{name}: {line}");
        }
        let _link = connect(&mut guest.machine, &rig.socket);
        guest.finish();
        compare(&rig.scratch, &mut guest.model, round as u64);
    }
    rig.drained(daemon, guest);
}

/// Part of a program that goes on as one that knows nothing of machines on their way.
fn without_machines() -> &'static str {
    r#"FOREBAY_LEFT=$(echo "$FOREBAY_LEFT" | sed 's/,"machines":{[^}]*}//'); export FOREBAY_LEFT"#
}

/// One after the other, so each finds the place free.
#[test]
fn whoever_comes_meanwhile_waits_and_is_not_refused() {
    let rig = Rig::new("vhost-upgrade-waits");
    let daemon = rig.serve();
    let layout = String::from_utf8(run(Command::new(FOREBAY).arg("layout")).stdout).unwrap();
    let asked = serde_json::json!({
        "command": "upgrade", "executable": FOREBAY, "layout": layout.trim()
    });
    let (count, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let coming = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let mut link = Link::new(&rig.socket, PATIENCE).unwrap();
                if let Err(error) = link.number(request::GET_FEATURES) {
                    panic!("{error}: {}", daemon.said());
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        for round in 1..=8 {
            let mut control = UnixStream::connect(rig.scratch.control()).unwrap();
            writeln!(control, "{asked}").unwrap();
            let before = count.load(Ordering::Relaxed);
            wait_for("the next program serves", || {
                let handed = "the program before handed the cache over";
                let count = count.load(Ordering::Relaxed);
                daemon.said().matches(handed).count() == round && count > before + 10
                    || coming.is_finished()
            });
        }
        over.store(true, Ordering::Relaxed);
        coming.join().unwrap();
    });
    daemon.stop("TERM");
}

/// `cargo test --release -p forebay-cli --test program how_long_a_machine_waits -- --ignored --nocapture`
#[test]
#[ignore = "measures"]
fn how_long_a_machine_waits() {
    let rig = Rig::new("vhost-upgrade-stall");
    let daemon = rig.serve();
    let old = program(&rig.scratch, "old", ":", without_machines());
    let mut machine = Machine::new(1, 64).unwrap();
    let mut link = Some(connect(&mut machine, &rig.socket));
    // As QEMU: it tries again after so long.
    let (at_once, second) = (Duration::ZERO, Duration::from_secs(1));
    for round in 0..7 {
        for (name, program, reconnect) in [
            ("connects again at once", old.as_path(), at_once),
            ("connects again, reconnect=1", old.as_path(), second),
            ("stays connected", Path::new(FOREBAY), second),
        ] {
            let longest = longest_write(&rig, &mut machine, &mut link, program, reconnect);
            println!("round {round}, {name}: {:.1} ms", longest.as_secs_f64() * 1e3);
        }
    }
    daemon.stop("TERM");
}

/// Of writes of 4 KiB, one after the other, while the daemon is upgraded.
fn longest_write(
    rig: &Rig,
    machine: &mut Machine,
    link: &mut Option<Link>,
    program: &Path,
    reconnect: Duration,
) -> Duration {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let upgrading = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            upgrade(&rig.scratch, program).unwrap();
            std::thread::sleep(Duration::from_millis(1500));
            over.store(true, Ordering::Relaxed);
        });
        let (mut longest, mut sector) = (Duration::ZERO, 0);
        while !over.load(Ordering::Relaxed) {
            sector = (sector + 8) % (SIZE_BYTES / 512);
            let begun = Instant::now();
            machine.offer(0, 0, kind::OUT, sector, Data::Out(&[7; 4096]));
            while machine.used(0).unwrap().is_none() {
                machine.wait(0, Duration::from_millis(1));
                if link.as_ref().is_some_and(has_ended) {
                    *link = None;
                    std::thread::sleep(reconnect);
                }
                if link.is_none() {
                    *link = machine.connect(&rig.socket, PATIENCE).ok();
                }
            }
            longest = longest.max(begun.elapsed());
        }
        upgrading.join().unwrap();
        longest
    })
}

fn has_ended(link: &Link) -> bool {
    let peeked = recv(&link.socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK);
    matches!(peeked, Ok((0, _)) | Err(rustix::io::Errno::CONNRESET))
}
