// SPDX-License-Identifier: Apache-2.0 OR MIT
//! All that an administrator can do, in any order, while guests work on three volumes, with a kill now and then in the middle of it.
//!
//! Nothing that was answered may be missing, no request fails, what is told of a volume stays true: a detached one's backing file holds it
//! all, and so does every one's when all is drained; `check` finds nothing wrong with what a kill leaves. What was done is told when
//! something fails, and the seed begins it again; guests and kills fall differently each time. `FOREBAY_MIXTURE=SECONDS` goes on for so
//! long, from `FOREBAY_MIXTURE_SEED` on.

use crate::support::load::{Habits, work};
use crate::support::model::{CHUNK, Model, SECTOR};
use crate::support::{Daemon, PATIENCE, Random, Scratch, ended, forebay, signal, wait_for};
use forebay_serve::nbd::client::Client;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");
const NAMES: [&str; 3] = ["a", "b", "c"];
const HABITS: Habits = Habits { size_bytes: 48 << 20, hot_bytes: 10 << 20, depth: 8 };
const GUESTS_EACH: usize = 2;
const CACHE_SIZES: [&str; 3] = ["64M", "80M", "112M"];
/// Of one seed, without `FOREBAY_MIXTURE`.
const ROUNDS: u64 = 30;

#[test]
fn what_an_administrator_does_in_any_order_loses_nothing() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("FOREBAY_MIXTURE_SEED").unwrap_or(1);
    let until =
        number("FOREBAY_MIXTURE").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut counts = Counts::default();
    for seed in first.. {
        let io = if seed.is_multiple_of(4) { "threads" } else { "uring" };
        let mut life = Life::new(seed, io);
        for _ in 0..ROUNDS {
            life.round(&mut counts);
        }
        life.end();
        if until.is_none_or(|until| Instant::now() > until) {
            println!("seeds {first} to {seed}: {counts:?}");
            return;
        }
    }
}

/// What was done, for whoever wants to know whether anything was.
#[derive(Debug, Default)]
struct Counts {
    rounds: u64,
    kills: u64,
    stops: u64,
    upgrades: u64,
    detached: u64,
    changes: u64,
}

struct Volume {
    name: &'static str,
    backing: PathBuf,
    model: Mutex<Model>,
    is_attached: bool,
}

impl Volume {
    /// The plain disk holds it all.
    fn compare_backing(&self, when: &str) {
        let file = File::open(&self.backing).unwrap();
        let mut model = self.model.lock().unwrap();
        let mut bytes = vec![0; 1 << 20];
        for offset in (0..HABITS.size_bytes).step_by(bytes.len()) {
            file.read_exact_at(&mut bytes, offset).unwrap();
            if let Err(error) = model.compare(offset, &bytes) {
                panic!("{}, on its backing file, {when}: {error}", self.name);
            }
        }
    }
}

struct Life {
    scratch: Scratch,
    io: &'static str,
    daemon: Option<Daemon>,
    volumes: Vec<Volume>,
    random: Random,
    /// What was done so far.
    story: Vec<String>,
}

/// Tells the story of what has failed.
impl Drop for Life {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = self.daemon.as_ref().map(Daemon::said).unwrap_or_default();
            // Straight out: captured output of a test that is one of many is cut.
            let _ = writeln!(std::io::stderr(), "{}\nit said:\n{said}", self.story.join("\n"));
        }
    }
}

/// A command, and whether it may be refused.
struct Wish {
    words: Vec<String>,
    may_fail: bool,
    /// The volume that nobody may use meanwhile.
    alone: Option<usize>,
}

impl Wish {
    fn of(words: &[&str]) -> Wish {
        Wish { words: words.iter().map(|it| (*it).into()).collect(), may_fail: false, alone: None }
    }

    fn may_fail(self) -> Wish {
        Wish { may_fail: true, ..self }
    }
}

impl Life {
    fn new(seed: u64, io: &'static str) -> Life {
        let scratch = Scratch::new("mixture");
        scratch.format(CACHE_SIZES[0]);
        let volume = |name: &&'static str| Volume {
            name,
            backing: scratch.file(&format!("backing-{name}"), HABITS.size_bytes),
            model: Mutex::new(Model::new(HABITS.size_bytes)),
            is_attached: true,
        };
        let volumes: Vec<_> = NAMES.iter().map(volume).collect();
        let story = vec![format!("seed {seed}, {io}")];
        let mut life = Life { scratch, io, daemon: None, volumes, random: Random(seed), story };
        let named: Vec<_> =
            life.volumes.iter().map(|it| format!("{}={}", it.name, it.backing.display())).collect();
        let mut args = vec!["--io", life.io];
        args.extend(named.iter().flat_map(|it| ["--volume", it]));
        life.daemon = Some(life.scratch.serve(&args));
        life
    }

    fn told(&mut self, what: impl Into<String>) {
        self.story.push(what.into());
    }

    fn start(&mut self) {
        if self.random.below(4) == 0 {
            let after = Duration::from_millis(self.random.below(150));
            self.told(format!("killed {after:?} behind a start"));
            let command = self.scratch.serve_command(&["--io", self.io]);
            Daemon::start_and_kill(command, after);
        }
        self.told("started");
        self.daemon = Some(self.scratch.serve(&["--io", self.io]));
        self.look_who_is_there();
        self.compare("behind a start");
    }

    /// A kill may fall before or behind the end of what was done: what is there then counts.
    fn look_who_is_there(&mut self) {
        let names = self.scratch.volume_names();
        for at in 0..self.volumes.len() {
            let is_there = names.iter().any(|name| name == self.volumes[at].name);
            if self.volumes[at].is_attached && !is_there {
                self.volumes[at].compare_backing("detached and killed");
            }
            self.volumes[at].is_attached = is_there;
        }
    }

    fn round(&mut self, counts: &mut Counts) {
        counts.rounds += 1;
        match self.random.below(10) {
            0 => self.stop(counts),
            1..4 => self.kill(counts),
            _ => {
                let wish = self.wish();
                self.under_load(&wish, None, counts);
            }
        }
        self.compare("behind a round");
        let problems = self.scratch.status()["problems"].clone();
        // A backing file that was made longer before a kill came.
        let is_wrong =
            |it: &&serde_json::Value| !it.as_str().unwrap().contains("has become larger");
        let wrong: Vec<_> = problems.as_array().unwrap().iter().filter(is_wrong).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    fn any_volume(&mut self) -> usize {
        self.random.below(self.volumes.len() as u64) as usize
    }

    /// One thing an administrator may want.
    fn wish(&mut self) -> Wish {
        let at = self.any_volume();
        let name = self.volumes[at].name;
        if !self.volumes[at].is_attached {
            let named = format!("{name}={}", self.volumes[at].backing.display());
            return Wish::of(&["attach", &named]);
        }
        let lba = self.random.below(HABITS.size_bytes / 4096).to_string();
        let pick =
            |random: &mut Random, of: &[&'static str]| of[random.below(of.len() as u64) as usize];
        match self.random.below(16) {
            0 | 1 => {
                let of = [
                    "mode=write-back",
                    "mode=write-back",
                    "mode=write-through",
                    "mode=write-around",
                ];
                Wish::of(&["set", name, pick(&mut self.random, &of)])
            }
            2 | 3 => {
                let of = ["order=batch", "order=strict", "order=relaxed"];
                Wish::of(&["set", name, pick(&mut self.random, &of)])
            }
            4 => {
                let of = ["cutoff=0", "cutoff=64K", "cutoff=4M", "weight=1", "weight=9"];
                let more = ["p99_target=20ms", "p99_target=0", "weight=3", "cutoff=1M"];
                let (one, other) = (pick(&mut self.random, &of), pick(&mut self.random, &more));
                match one.split('=').next() == other.split('=').next() {
                    true => Wish::of(&["set", name, one]),
                    false => Wish::of(&["set", name, one, other]),
                }
            }
            5 => {
                let of = ["reserve=4M", "reserve=12M", "reserve=10%", "reserve=default"];
                // What others have reserved may leave no room for it.
                Wish::of(&["set", name, pick(&mut self.random, &of)]).may_fail()
            }
            6 => Wish::of(&["drain", name]),
            7 => Wish::of(&["drain"]),
            8 => Wish::of(&["scrub"]),
            9 => Wish::of(&["scrub", name]),
            10 => {
                // Guests stay in what there was at first.
                let file = OpenOptions::new().write(true).open(&self.volumes[at].backing).unwrap();
                file.set_len(file.metadata().unwrap().len() + (1 << 20)).unwrap();
                Wish::of(&["resize", name])
            }
            11 | 12 => {
                let size = pick(&mut self.random, &CACHE_SIZES);
                // Reservations may not fit into less.
                Wish::of(&["resize", "--cache-size", size]).may_fail()
            }
            13 => Wish { alone: Some(at), ..Wish::of(&["detach", name]) },
            14 => Wish::of(&["upgrade", "--exec", FOREBAY]),
            _ => match self.random.below(2) {
                0 => Wish::of(&["why", name, &lba]),
                _ => Wish::of(&["status"]),
            },
        }
    }

    fn begin(&self, wish: &Wish) -> Child {
        let mut command = Command::new(FOREBAY);
        command.args(&wish.words).arg("--control").arg(self.scratch.control());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Guests work, and in the middle of it this is done. With `kill` the daemon is killed so much later, or before.
    fn under_load(&mut self, wish: &Wish, kill: Option<Duration>, counts: &mut Counts) {
        self.told(match kill {
            None => wish.words.join(" "),
            Some(after) => format!("{}, and a kill {after:?} later", wish.words.join(" ")),
        });
        let ending = self.random.below(6) == 0 && kill.is_none();
        let used: Vec<usize> = (0..self.volumes.len())
            .filter(|at| self.volumes[*at].is_attached && wish.alone != Some(*at))
            .collect();
        if let Some(at) = wish.alone {
            let name = self.volumes[at].name;
            let clients = || self.volume_status(name)["nbd_clients"].clone();
            wait_for("nobody uses it", || clients() == 0);
        }
        let mut guests: Vec<(usize, Client<UnixStream>, u64)> = Vec::new();
        for at in used.into_iter().flat_map(|at| [at; GUESTS_EACH]) {
            guests.push((at, self.scratch.connect(self.volumes[at].name), self.random.next()));
        }
        let some = 10 + self.random.below(300);
        let answered = |volumes: &[Volume]| -> u64 {
            volumes.iter().map(|it| it.model.lock().unwrap().answered).sum()
        };
        let before = answered(&self.volumes);
        let (over, volumes) = (&AtomicBool::new(false), &self.volumes);
        let daemon = self.daemon.as_ref().unwrap().id();
        let done = std::thread::scope(|scope| {
            let workers: Vec<_> = guests
                .iter_mut()
                .map(|(at, client, seed)| {
                    let (model, seed) = (&volumes[*at].model, *seed);
                    let enough = |_: &Model| over.load(Ordering::Relaxed);
                    scope.spawn(move || work(client, model, &HABITS, seed, enough))
                })
                .collect();
            let begun = Instant::now();
            while answered(volumes) < before + some && !workers.is_empty() {
                assert!(begun.elapsed() < PATIENCE, "no progress");
                std::thread::sleep(Duration::from_micros(200));
            }
            let command = self.begin(wish);
            if let Some(after) = kill {
                std::thread::sleep(after);
                signal(daemon, "KILL");
            } else if ending {
                std::thread::sleep(Duration::from_millis(some / 4));
                // Gone by itself meanwhile, or it is asked to go.
                let id = command.id().to_string();
                let _ = Command::new("kill").args(["-s", "INT", &id]).output();
            }
            let done = ended(command);
            over.store(true, Ordering::Relaxed);
            for worker in workers {
                worker.join().unwrap().unwrap();
            }
            done.unwrap_or_else(|| panic!("{:?} does not end", wish.words))
        });
        counts.changes += answered(&self.volumes) - before;
        if kill.is_some() {
            counts.kills += 1;
            let mut daemon = self.daemon.take().unwrap();
            daemon.kill();
        } else {
            for (at, client, _) in &mut guests {
                let name = self.volumes[*at].name;
                client.flush().unwrap_or_else(|error| panic!("a guest of {name}: {error}"));
            }
        }
        drop(guests);
        self.volumes.iter().for_each(|it| it.model.lock().unwrap().crash());
        // Who was cut off says what it likes.
        if kill.is_none() && !ending {
            let text = String::from_utf8_lossy(&[&done.stdout[..], &done.stderr[..]].concat())
                .into_owned();
            self.told(format!("  {:?}: {}", done.status.code(), text.trim().replace('\n', " | ")));
            let is_well = done.status.success() || wish.may_fail;
            assert!(is_well, "{}: {text}", wish.words.join(" "));
            counts.upgrades += u64::from(wish.words[0] == "upgrade");
        }
        if kill.is_none() {
            self.settle(wish, ending, counts);
        }
    }

    /// What was done is looked at, or ended if it is not to go on.
    fn settle(&mut self, wish: &Wish, is_ended: bool, counts: &mut Counts) {
        match wish.words[0].as_str() {
            "resize" if is_ended => {
                // None is under way if it had ended by itself.
                let _ = self.scratch.ask(&["resize", "--stop"]);
            }
            "scrub" if is_ended => {
                let _ = self.scratch.ask(&["scrub", "--stop"]);
            }
            "attach" | "detach" => {
                let had = self.volumes.iter().filter(|it| it.is_attached).count();
                self.look_who_is_there();
                let has = self.volumes.iter().filter(|it| it.is_attached).count();
                counts.detached += u64::from(has < had);
                assert!(is_ended || has != had, "nobody came or went");
            }
            _ => {}
        }
        if is_ended {
            self.told("  which was ended");
        }
    }

    fn volume_status(&self, name: &str) -> serde_json::Value {
        let status = self.scratch.status();
        let volumes = status["volumes"].as_array().unwrap().clone();
        volumes.into_iter().find(|it| it["name"] == name).unwrap_or_default()
    }

    fn kill(&mut self, counts: &mut Counts) {
        let wish = self.wish();
        let after = match self.random.below(3) {
            0 => Duration::from_micros(self.random.below(3000)),
            1 => Duration::from_millis(self.random.below(40)),
            _ => Duration::from_millis(self.random.below(400)),
        };
        self.under_load(&wish, Some(after), counts);
        if self.random.below(3) == 0 {
            self.check();
        }
        self.start();
    }

    /// Nobody serves: what the cache holds is sound.
    fn check(&mut self) {
        let done = forebay([OsStr::new("check"), self.scratch.cache().as_ref()]);
        assert!(done.status.success(), "{done:?}");
        self.told("checked");
    }

    fn stop(&mut self, counts: &mut Counts) {
        counts.stops += 1;
        let daemon = self.daemon.take().unwrap();
        let how = self.random.below(3);
        let is_drained = how > 0;
        if how == 1 {
            self.told("stop --drain");
            let done = self.scratch.ask(&["stop", "--drain"]);
            assert!(done.status.success(), "{done:?}");
            let (code, said) = daemon.ended();
            assert_eq!(code, Some(0), "{said}");
        } else {
            self.told("stopped by a signal");
            daemon.stop("TERM");
        }
        self.check();
        if how == 2 {
            self.told("drain --cache");
            let cache = self.scratch.cache();
            let done = forebay([OsStr::new("drain"), OsStr::new("--cache"), cache.as_ref()]);
            assert!(done.status.success(), "{done:?}");
        }
        for volume in self.volumes.iter().filter(|it| is_drained && it.is_attached) {
            volume.compare_backing("drained");
        }
        self.start();
    }

    fn compare(&mut self, when: &str) {
        let stride = if self.random.below(8) == 0 { 1 } else { 16 };
        for volume in self.volumes.iter().filter(|it| it.is_attached) {
            let mut client = self.scratch.connect(volume.name);
            let mut model = volume.model.lock().unwrap();
            for chunk in model.take_suspects(stride) {
                let offset = chunk * CHUNK * SECTOR as u64;
                let bytes = client.read(offset, CHUNK as u32 * SECTOR as u32).unwrap();
                if let Err(error) = model.compare(offset, &bytes) {
                    panic!("{}, {when}: {error}", volume.name);
                }
            }
        }
    }

    /// In the end each disk is the plain disk.
    fn end(mut self) {
        let daemon = self.daemon.take().unwrap();
        let done = self.scratch.ask(&["stop", "--drain"]);
        assert!(done.status.success(), "{done:?}");
        let (code, said) = daemon.ended();
        assert_eq!(code, Some(0), "{said}");
        self.volumes.iter().for_each(|it| it.compare_backing("in the end"));
        for name in self.volumes.iter().filter(|it| it.is_attached).map(|it| it.name) {
            let cache = self.scratch.cache();
            let words =
                [OsStr::new("forget"), OsStr::new("--cache"), cache.as_ref(), name.as_ref()];
            let done = forebay(words);
            assert!(done.status.success(), "{done:?}");
        }
    }
}
