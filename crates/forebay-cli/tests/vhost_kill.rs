// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program is killed again and again under the disk of a virtual machine. The machine connects
//! again and goes on: every request that was in flight is answered, once, and no write that was
//! answered is missing.

use crate::support::model::{CHUNK, Model, SECTOR, Sent, content, tag_of};
use crate::support::{Daemon, PATIENCE, Random, Scratch, forebay, wait_for};
use forebay_serve::vhost::blk::feature;
use forebay_serve::vhost::driver::{DATA_BYTES, Data, Done, Link, Machine, kind};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const KILLS: u64 = 24;
const QUEUES: usize = 2;
pub const SIZE_BYTES: u64 = 192 << 20;
const HOT_BYTES: u64 = 16 << 20;

/// What was asked for with one request.
pub enum Asked {
    Change(Sent),
    Read(u64),
    Flush,
}

/// A guest: what it has under way, and what its disk may hold.
pub struct Guest {
    pub machine: Machine,
    pub model: Model,
    pub random: Random,
    pub asked: BTreeMap<(usize, u16), Asked>,
    pub answered: u64,
}

impl Guest {
    pub fn new(seed: u64) -> Guest {
        Guest {
            machine: Machine::new(QUEUES as u16, 64).unwrap(),
            model: Model::new(SIZE_BYTES),
            random: Random(seed),
            asked: BTreeMap::new(),
            answered: 0,
        }
    }

    /// Until so many more are answered.
    pub fn work(&mut self, count: u64) {
        let until = self.answered + count;
        while self.answered < until {
            self.step();
        }
    }

    pub fn step(&mut self) {
        self.offer();
        if !self.collect() {
            self.machine.wait(0, Duration::from_millis(1));
        }
    }

    /// Offers a request in every free slot.
    pub fn offer(&mut self) {
        for queue in 0..QUEUES {
            for slot in self.machine.free(queue) {
                let asked = self.offer_one(queue, slot);
                assert!(self.asked.insert((queue, slot), asked).is_none());
            }
        }
    }

    fn offer_one(&mut self, queue: usize, slot: u16) -> Asked {
        let most = if self.random.below(5) == 0 { DATA_BYTES / SECTOR } else { 32 } as u64;
        let count = 1 + self.random.below(most);
        let reach = if self.random.below(4) > 0 { HOT_BYTES } else { SIZE_BYTES };
        let sector = self.random.below(reach / SECTOR as u64 - count + 1);
        let (offset, length) = (sector * SECTOR as u64, count * SECTOR as u64);
        let range = || {
            let count = (count as u32).to_le_bytes();
            [&sector.to_le_bytes()[..], &count, &[0; 4]].concat()
        };
        let machine = &mut self.machine;
        match self.random.below(100) {
            0..70 => {
                let tag = self.model.tag();
                let sent = self.model.send(tag, false, offset, length);
                let bytes = content(tag, offset, length);
                machine.offer(queue, slot, kind::OUT, sector, Data::Out(&bytes));
                Asked::Change(sent)
            }
            70..78 => {
                let sent = self.model.send(0, false, offset, length);
                machine.offer(queue, slot, kind::WRITE_ZEROES, 0, Data::Out(&range()));
                Asked::Change(sent)
            }
            78..82 => {
                let sent = self.model.send(0, true, offset, length);
                machine.offer(queue, slot, kind::DISCARD, 0, Data::Out(&range()));
                Asked::Change(sent)
            }
            82..97 => {
                machine.offer(queue, slot, kind::IN, sector, Data::In(length as usize));
                Asked::Read(sector)
            }
            _ => {
                machine.offer(queue, slot, kind::FLUSH, 0, Data::Out(&[]));
                Asked::Flush
            }
        }
    }

    /// Takes what is answered; says whether anything was.
    pub fn collect(&mut self) -> bool {
        let before = self.answered;
        for queue in 0..QUEUES {
            while let Some(done) = self.machine.used(queue).unwrap() {
                let Done { slot, status, bytes, .. } = done;
                assert_eq!(status, 0, "a request failed");
                self.answered += 1;
                match self.asked.remove(&(queue, slot)).expect("answered once") {
                    Asked::Change(sent) => self.model.answer(&sent),
                    Asked::Read(sector) => {
                        for (at, bytes) in (sector..).zip(bytes.chunks_exact(SECTOR)) {
                            assert!(tag_of(at, bytes).is_some(), "sector {at}: no whole write");
                        }
                    }
                    Asked::Flush => {}
                }
            }
        }
        self.answered > before
    }

    /// Until nothing is under way.
    pub fn finish(&mut self) {
        let begun = Instant::now();
        while !self.asked.is_empty() {
            assert!(begun.elapsed() < PATIENCE, "{} requests are never answered", self.asked.len());
            if !self.collect() {
                let queue = self.asked.keys().next().unwrap().0;
                self.machine.wait(queue, Duration::from_millis(200));
            }
        }
    }
}

#[test]
fn a_kill_under_a_virtual_machine_loses_nothing_and_answers_once() {
    let scratch = Scratch::new("vhost-kill");
    scratch.format("64M");
    let backing = scratch.file("backing", SIZE_BYTES);
    let socket: PathBuf = scratch.sockets.join("vm");
    let listen = format!("vhost-user://{}", socket.display());
    let volume = format!("v={}", backing.display());
    let args = ["--volume", &volume, "--listen", &listen];
    let mut guest = Guest::new(3);
    let (mut left, mut slowest) = (0, Duration::ZERO);
    for round in 0..KILLS {
        let mut daemon = scratch.serve(&args);
        let _link = connect(&mut guest.machine, &socket);
        let begun = Instant::now();
        guest.machine.is_indirect = round % 2 == 1;
        guest.finish();
        slowest = slowest.max(begun.elapsed());
        compare(&scratch, &mut guest.model, round);
        let count = 100 + guest.random.below(1500);
        guest.work(count);
        guest.offer();
        std::thread::sleep(Duration::from_micros(guest.random.below(2000)));
        daemon.kill();
        guest.collect();
        left += guest.asked.len();
    }
    let answered = guest.answered;
    println!("{KILLS} kills, {answered} answers, {left} left in flight, done again in {slowest:?}");
    assert!(left as u64 > KILLS, "too little was in flight");
    let daemon = scratch.serve(&args);
    let link = connect(&mut guest.machine, &socket);
    guest.finish();
    let status = scratch.status();
    assert_eq!(status["volumes"][0]["vhost_user_clients"], 1);
    assert_eq!(status["problems"].as_array().unwrap().len(), 0, "{status}");
    drop(link);
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    assert!(!socket.exists(), "the socket is removed");
    compare_file(&backing, &mut guest.model);
}

/// Drained, it alone holds all of it.
pub fn compare_file(backing: &Path, model: &mut Model) {
    let file = std::fs::File::open(backing).unwrap();
    let mut bytes = vec![0; 1 << 20];
    for offset in (0..SIZE_BYTES).step_by(bytes.len()) {
        file.read_exact_at(&mut bytes, offset).unwrap();
        model.compare(offset, &bytes).unwrap();
    }
}

pub fn connect(machine: &mut Machine, socket: &Path) -> Link {
    machine.connect(socket, PATIENCE).unwrap()
}

pub fn compare(scratch: &Scratch, model: &mut Model, round: u64) {
    let mut client = scratch.connect("v");
    for chunk in model.take_suspects(if round % 8 == 7 { 1 } else { 16 }) {
        let offset = chunk * CHUNK * SECTOR as u64;
        let bytes = client.read(offset, CHUNK as u32 * SECTOR as u32).unwrap();
        model.compare(offset, &bytes).unwrap_or_else(|error| panic!("round {round}: {error}"));
    }
}

/// `stop` with a machine connected: what it has under way is answered, the connection ends, and the
/// next daemon goes on with what is offered meanwhile.
#[test]
fn a_stop_leaves_the_machine_waiting_for_the_next_daemon() {
    let scratch = Scratch::new("vhost-stop");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 << 20);
    let socket = scratch.sockets.join("vm");
    let listen = format!("vhost-user://{}?volume=v", socket.display());
    let volume = format!("v={}", backing.display());
    let args = ["--volume", &volume, "--listen", &listen];
    let mut machine = Machine::new(1, 64).unwrap();
    let daemon = scratch.serve(&args);
    let mode = std::fs::metadata(&socket).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
    let mut link = connect(&mut machine, &socket);
    machine.offer(0, 0, kind::OUT, 8, Data::Out(&[7; 4096]));
    assert!(scratch.ask(&["stop"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    assert!(link.number(1).is_err(), "the connection has ended");
    machine.offer(0, 1, kind::OUT, 16, Data::Out(&[8; 4096]));
    let _daemon = scratch.serve(&args);
    let _link = connect(&mut machine, &socket);
    let mut answered = Vec::new();
    while answered.len() < 2 {
        match machine.used(0).unwrap() {
            Some(done) => answered.push((done.slot, done.status)),
            None => assert!(machine.wait(0, PATIENCE)),
        }
    }
    assert_eq!(answered, [(0, 0), (1, 0)]);
}

/// Without a cache: what is answered is on the device, and a kill takes nothing.
#[test]
fn a_machines_disk_without_a_cache_is_its_device() {
    let scratch = Scratch::new("vhost-bare");
    let disk = scratch.file("disk", 16 << 20);
    let socket = scratch.sockets.join("vm");
    let serve = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["serve", "--attach", "none", "--volume", &format!("v={}", disk.display())]);
        command.args(["--listen", &format!("vhost-user://{}", socket.display()), "--control"]);
        command.arg(scratch.control());
        Daemon::start(command, &scratch.path("stderr"))
    };
    let on_disk = |at: u64, length: usize| {
        let mut bytes = vec![0; length];
        std::fs::File::open(&disk).unwrap().read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    let ask = |machine: &mut Machine, kind, sector, data: Data<'_>| {
        machine.offer(0, 0, kind, sector, data);
        loop {
            if let Some(done) = machine.used(0).unwrap() {
                assert_eq!(done.status, 0);
                return done.bytes;
            }
            assert!(machine.wait(0, PATIENCE), "no answer");
        }
    };
    let mut machine = Machine::new(1, 64).unwrap();
    let mut daemon = serve();
    let link = connect(&mut machine, &socket);
    ask(&mut machine, kind::OUT, 3, Data::Out(&[7; 5 * SECTOR]));
    assert_eq!(on_disk(2 * 512, 7 * 512), [&[0; 512][..], &[7; 5 * 512], &[0; 512]].concat());
    daemon.kill();
    drop(link);
    let _daemon = serve();
    let _link = connect(&mut machine, &socket);
    assert_eq!(ask(&mut machine, kind::IN, 3, Data::In(5 * SECTOR)), [7; 5 * SECTOR]);
    let zeros = [&3u64.to_le_bytes()[..], &5u32.to_le_bytes(), &[0; 4]].concat();
    ask(&mut machine, kind::WRITE_ZEROES, 0, Data::Out(&zeros));
    ask(&mut machine, kind::FLUSH, 0, Data::Out(&[]));
    assert_eq!(on_disk(3 * 512, 5 * 512), [0; 5 * 512]);
    let status = scratch.status();
    let it = &status["volumes"][0];
    assert_eq!((&it["mode"], &it["discards"]), (&"write-around".into(), &1.into()));
}

/// A driver that knows no flushes, or has given up the write cache, is answered when it is durable.
#[test]
fn writes_of_a_guest_without_a_write_cache_are_durable() {
    let scratch = Scratch::new("vhost-durable");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 << 20);
    let socket = scratch.sockets.join("vm");
    let listen = format!("vhost-user://{}", socket.display());
    let volume = format!("v={}", backing.display());
    let _daemon = scratch.serve(&["--volume", &volume, "--listen", &listen, "--sync-after", "10m"]);
    let write = |machine: &mut Machine, kind| {
        machine.offer(0, 0, kind, 8, Data::Out(&[7; 4096]));
        while machine.used(0).unwrap().is_none() {
            assert!(machine.wait(0, PATIENCE));
        }
        scratch.status()["volumes"][0]["undurable"].as_bool().unwrap()
    };
    let mut machine = Machine::new(1, 64).unwrap();
    let mut link = connect(&mut machine, &socket);
    assert!(write(&mut machine, kind::OUT), "a write cache");
    assert!(!write(&mut machine, kind::FLUSH));
    assert!(write(&mut machine, kind::OUT));
    link.set_writeback(false).unwrap();
    assert!(!write(&mut machine, kind::OUT), "given up");
    drop(link);
    let _link = connect(&mut machine, &socket);
    assert!(!write(&mut machine, kind::OUT), "and not forgotten");
    let mut old = Machine::new(1, 64).unwrap();
    old.features &= !(feature::FLUSH | feature::CONFIG_WCE);
    drop(_link);
    let _link = connect(&mut old, &socket);
    assert!(!write(&mut old, kind::OUT), "never known");
}

/// Two lines each time: a disk could be filled with them.
#[test]
fn who_comes_and_goes_all_the_time_fills_no_log() {
    let scratch = Scratch::new("vhost-flood");
    scratch.format("64M");
    let socket = scratch.sockets.join("vm");
    let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
    let listen = format!("vhost-user://{}", socket.display());
    let daemon = scratch.serve(&["--volume", &volume, "--listen", &listen]);
    for _ in 0..20 {
        drop(std::os::unix::net::UnixStream::connect(&socket).unwrap());
        wait_for("its end", || scratch.status()["volumes"][0]["vhost_user_clients"] == 0);
    }
    let said = daemon.stop("TERM");
    let comes = format!(": process {} is connected", std::process::id());
    assert_eq!(said.matches(&comes).count(), 1, "{said}");
    assert!(said.matches("disconnected").count() <= 1, "{said}");
}

#[test]
fn a_socket_that_names_no_volume_is_refused() {
    let scratch = Scratch::new("vhost-names");
    scratch.format("64M");
    let volumes: Vec<String> = ["a", "b"]
        .iter()
        .map(|name| format!("{name}={}", scratch.file(name, 16 << 20).display()))
        .collect();
    let serve = |listen: &str| {
        let mut command =
            scratch.serve_command(&["--volume", &volumes[0], "--volume", &volumes[1]]);
        let done = command.arg("--listen").arg(listen).output().unwrap();
        assert!(!done.status.success());
        String::from_utf8_lossy(&done.stderr).into_owned()
    };
    let socket = format!("vhost-user://{}", scratch.sockets.join("vm").display());
    let said = serve(&socket);
    assert!(said.contains("which volume?") && said.contains("(a, b)"), "{said}");
    let said = serve(&format!("{socket}?volume=c"));
    assert!(said.contains("no such volume; there are: a, b"), "{said}");
    let done = forebay([OsStr::new("serve"), OsStr::new("--listen"), OsStr::new("vhost-user://x")]);
    assert_eq!(done.status.code(), Some(2));
}
