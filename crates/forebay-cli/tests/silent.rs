// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backing devices that do not answer, and what does not wait for them (of those that come late: `late.rs`).

use crate::late::of_file_by;
use crate::support::apart::Apart;
use crate::support::silence::{LOOKUP, OPEN, READ, Silence};
use crate::support::{Daemon, Scratch, signal, skip, wait_for};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// A cache, and the file system of a disk that falls silent.
struct Rig {
    apart: Apart,
    scratch: Scratch,
}

impl Rig {
    fn new(name: &str) -> Option<Rig> {
        Rig::with(Scratch::new(name), &[])
    }

    /// With a folder in each of these places.
    fn with(scratch: Scratch, places: &[(&Path, &str)]) -> Option<Rig> {
        let Some(apart) = Apart::with(places) else {
            skip("no mount namespace of its own");
            return None;
        };
        scratch.format("64M");
        Some(Rig { apart, scratch })
    }

    /// The disk `place/disk`, which says nothing to that.
    fn silence(&self, place: &str, unanswered: u32) -> Option<(Silence<'_>, PathBuf)> {
        let place = self.scratch.path(place);
        std::fs::create_dir(&place).unwrap();
        let silence = Silence::begin(&self.apart, &place, unanswered);
        if silence.is_none() {
            skip("no FUSE");
        }
        Some((silence?, place.join("disk")))
    }

    fn problems(&self) -> String {
        self.scratch.status()["problems"].to_string()
    }

    fn serve(&self, volumes: &[(&str, &Path)]) -> Daemon {
        let volumes: Vec<_> = volumes.iter().map(|(name, path)| (*name, *path, "")).collect();
        let mut command = self.apart.command(env!("CARGO_BIN_EXE_forebay"));
        // Such a disk is known by a number that the kernel gives to others later: what a test left that failed is not to be found.
        command.env("FOREBAY_STATE_DIR", self.scratch.path("state"));
        of_file_by(command, &self.scratch, &volumes)
    }
}

/// It waited for that without end, and the cache was not marked as cleanly stopped.
#[test]
fn a_stop_waits_for_no_disk_that_fell_silent() {
    let Some(rig) = Rig::new("silent-stop") else { return };
    let Some((mut silence, c)) = rig.silence("silent", READ) else { return };
    silence.answers();
    let a = rig.scratch.file("a", 16 * MIB);
    let volumes = [("c", &*c), ("a", &*a)];
    let daemon = rig.serve(&volumes);
    assert_eq!(rig.scratch.volume_names(), ["c", "a"]);
    rig.scratch.connect("a").write(MIB, &[b'a'; 4096], true).unwrap();
    silence.falls_silent();
    let done = rig.scratch.ask(&["stop"]);
    assert!(done.status.success(), "{done:?}");
    silence.wait_until_asked();
    silence.answers();
    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    let text = format!("c: {}: did not answer, and is not waited for", c.display());
    assert!(said.contains(&text) && said.contains("stopped: everything is durable"), "{said}");

    // What the other holds is noted, and nothing of this one is refused.
    let disk = File::options().write(true).open(&a).unwrap();
    disk.write_all_at(&[9; 4096], 0).unwrap();
    let daemon = rig.serve(&volumes);
    assert_eq!(rig.scratch.connect("c").read(MIB, 4096).unwrap(), [0; 4096]);
    let problems = rig.problems();
    assert!(problems.contains("a: ") && problems.contains("was changed by others"), "{problems}");
    let said = daemon.stop("TERM");
    assert!(!said.contains("the last stop was not a clean one"), "{said}");
}

/// All disks are read for an identity, each for half a minute. That was taken for the silence of the volume's own, so that a dead disk, which is
/// nobody's, could end the start.
#[test]
fn a_dead_disk_that_is_nobodys_is_not_the_silence_of_a_volume() {
    let scratch = Scratch::new("silent-other");
    // The only disk that this machine has, by its name for the kernel, which has `!` for `/`.
    let (disks, place) = (scratch.path("disks"), scratch.path("other"));
    let name = format!("..{}!disk", place.to_str().unwrap().replace('/', "!"));
    std::fs::create_dir_all(disks.join(&name)).unwrap();
    std::fs::write(disks.join(&name).join("dev"), "259:1048575").unwrap();
    std::fs::write(disks.join(&name).join("size"), "32768").unwrap();
    let Some(rig) = Rig::with(scratch, &[(&disks, "/sys/class/block")]) else { return };
    let Some((mut silence, _)) = rig.silence("other", OPEN) else { return };
    let a = rig.scratch.file("a", 16 * MIB);
    let daemon = rig.serve(&[("c", Path::new("UUID=none-such")), ("a", &a)]);
    silence.wait_until_asked();
    let (said, problems) = (daemon.said(), rig.problems());
    silence.answers();
    daemon.stop("TERM");
    let text = "c: waits for its backing device: UUID=none-such, the backing device of c, up to 3600s: it is not there";
    assert!(problems.contains(text), "{problems}");
    assert!(!said.contains("the backing device of c: it does not answer"), "{said}");
}

/// The first thread looked whether it was there, and waited for it without a word, whatever signal came.
#[test]
fn a_start_names_the_disk_that_does_not_answer_of_a_volume_that_is_served_bare() {
    let Some(rig) = Rig::new("silent-bare") else { return };
    let Some((silence, c)) = rig.silence("silent", LOOKUP) else { return };
    let a = rig.scratch.file("a", 16 * MIB);
    let mut command = rig.apart.command(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", "--attach=none", "--listen", &rig.scratch.listen(), "--control"]);
    command.arg(rig.scratch.control());
    for (name, path) in [("c", &c), ("a", &a)] {
        command.args(["--volume", &format!("{name}={}", path.display())]);
    }
    command.env("FOREBAY_STATE_DIR", rig.scratch.path("state"));
    let file = rig.scratch.path("stderr");
    let mut daemon = command.stderr(File::create(&file).unwrap()).spawn().unwrap();
    let said = || std::fs::read_to_string(&file).unwrap();
    let what = format!("{}, the backing device of c", c.display());
    wait_for("it says so", || {
        said().contains(&format!("waits for {what}, up to 60s: it does not"))
    });
    signal(daemon.id(), "TERM");
    // Who types a volume means it.
    wait_for("it ends", || said().contains(&format!("forebay: {what}: it does not answer")));
    drop(silence); // also of one that did not say so: its wait ends with this
    assert_eq!(daemon.wait().unwrap().code(), Some(1), "{}", said());
}
