// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests do not wait for the machine's own disk, while the daemon becomes another program, or while another volume comes: what is
//! written down there is written by a thread.

use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, good, has, run, skip, wait_for};
use crate::upgrade::upgrade;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// A state directory on a file system of its own, which does not take anything while it is frozen.
struct State<'a> {
    apart: &'a Apart,
    mount: PathBuf,
    /// In it, as `/var/lib/forebay` is in `/`.
    place: PathBuf,
}

impl<'a> State<'a> {
    /// None: it cannot be had here.
    fn new(apart: &'a Apart, scratch: &Scratch) -> Option<State<'a>> {
        let (image, mount) = (scratch.file("state.img", 16 << 20), scratch.path("state"));
        good(Command::new("mkfs.ext4").arg("-qF").arg(&image));
        std::fs::create_dir(&mount).unwrap();
        let mut mounts = apart.command("mount");
        mounts.args(["-o", "loop"]).args([&image, &mount]).stderr(Stdio::null());
        let place = mount.join("lib").join("forebay");
        mounts.status().is_ok_and(|it| it.success()).then_some(State { apart, mount, place })
    }

    fn freeze(&self) -> Frozen<'_> {
        good(self.apart.command("fsfreeze").arg("-f").arg(&self.mount));
        Frozen(self)
    }

    /// A daemon with a volume `v` and this state directory.
    fn serve(&self, scratch: &Scratch) -> Daemon {
        let volume = format!("v={}", scratch.file("backing", 1 << 20).display());
        let mut serve = self.apart.command(FOREBAY);
        let given = scratch.serve_command(&["--volume", &volume]);
        serve.args(given.get_args()).arg("--state-dir").arg(&self.place);
        Daemon::start(serve, &scratch.path("stderr"))
    }

    /// What is written down of a volume.
    fn record(&self, volume: &str) -> Option<serde_json::Value> {
        // It is seen there alone.
        let mut cat = self.apart.command("sh");
        let said = good(
            cat.args(["-c", "for it in \"$0\"/*.*; do tr -d '\\n' <\"$it\"; echo; done"])
                .arg(&self.place),
        );
        let records = said.lines().map(|line| serde_json::from_str(line).unwrap());
        let mut records = records.filter(|it: &serde_json::Value| it["name"] == volume);
        records.next()
    }

    fn generation(&self) -> u64 {
        self.record("v").unwrap()["generation"].as_u64().unwrap()
    }
}

/// As long as it is there: nobody could end who waits for it.
struct Frozen<'a>(&'a State<'a>);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let State { apart, mount, .. } = self.0;
        let _ = run(apart.command("fsfreeze").arg("-u").arg(mount));
    }
}

/// A cache, and a place where file systems can be mounted and frozen; none: that was told.
fn set_up(name: &str) -> Option<(Scratch, Apart)> {
    if !has("mkfs.ext4") || !has("fsfreeze") {
        skip("no mkfs.ext4 or no fsfreeze");
        return None;
    }
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let apart = Apart::with(&[]);
    if apart.is_none() {
        skip("no mount namespace of its own");
    }
    Some((scratch, apart?))
}

/// The next program waited for it with all guests: as long as an installation that had just been made took to reach the disk.
#[test]
fn guests_do_not_wait_for_the_state_directory_in_an_upgrade() {
    let Some((scratch, apart)) = set_up("upgrade-notes") else { return };
    let Some(state) = State::new(&apart, &scratch) else { return skip("no file system by loop") };
    let daemon = state.serve(&scratch);
    let mut client = scratch.connect("v");
    let first = state.generation();

    let frozen = state.freeze();
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    for at in 0..100 {
        client.write(at % 16 * 4096, &[1; 4096], true).unwrap();
    }
    assert_eq!(state.generation(), first, "it is not written yet");
    // A thread that waits for it would be waited for by the kernel, and guests with it.
    let said = upgrade(&scratch, Path::new(FOREBAY)).unwrap_err();
    assert!(
        said.contains("the state directory (--state-dir), or /etc/forebay, does not"),
        "{said}"
    );
    // All guests would wait with who wants to have something written there.
    let other = format!("w={}", scratch.file("other", 1 << 20).display());
    let refused = scratch.ask(&["attach", &other]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("w: not attached: the state directory (--state-dir), or /etc"), "{said}");
    client.write(0, &[2; 4096], true).unwrap();
    let is_told = || scratch.status()["problems"].to_string().contains("does not answer");
    wait_for("status tells it", is_told);

    drop(frozen);
    wait_for("it is written", || state.generation() == first + 1 && !is_told());
    let told = upgrade(&scratch, Path::new(FOREBAY)).unwrap();
    assert!(told.contains("by a hand-over"), "{told}");
    wait_for("it is written again", || state.generation() == first + 2);
    client.write(0, &[3; 4096], true).unwrap();
    daemon.stop("TERM");
}

/// They waited for what is written down of another volume, as long as that took.
#[test]
fn guests_do_not_wait_for_the_state_directory_while_another_volume_comes() {
    let Some((scratch, apart)) = set_up("attach-notes") else { return };
    let Some(state) = State::new(&apart, &scratch) else { return skip("no file system by loop") };
    let daemon = state.serve(&scratch);
    let mut client = scratch.connect("v");
    let attach = |name: &str| {
        let mut command = Command::new(FOREBAY);
        let volume = format!("{name}={}", scratch.file(name, 1 << 20).display());
        command.args(["attach", &volume, "--control"]).arg(scratch.control());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let problems = || scratch.status()["problems"].to_string();

    let frozen = state.freeze();
    let mut attaching = attach("w");
    wait_for("it is being written", || is_writing(&daemon));
    for at in 0..100 {
        client.write(at % 16 * 4096, &[1; 4096], true).unwrap();
    }
    assert!(attaching.try_wait().unwrap().is_none(), "it is not served before that is written");
    drop(frozen);
    let output = attaching.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(state.record("w").is_some_and(|it| it["dirty"] == true));
    assert_eq!(problems(), "[]");

    // It takes too long: the volume is served, and that it is not written down is told until it is.
    let frozen = state.freeze();
    let output = attach("x").wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(problems().contains("x: the state directory"), "{}", problems());
    scratch.connect("x").write(0, &[2; 4096], true).unwrap();
    drop(frozen);
    wait_for("it is written", || problems() == "[]");
    assert!(state.record("x").is_some_and(|it| it["dirty"] == true));
    daemon.stop("TERM");
}

/// Whether a thread of it has something to write down.
fn is_writing(daemon: &Daemon) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    tasks.flatten().any(|task| name(task).is_ok_and(|it| it == "notes\n"))
}
