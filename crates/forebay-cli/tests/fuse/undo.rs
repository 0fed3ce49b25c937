// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The way back: the lines of the README are run as they stand, with the devices and the folder of the test in the place of theirs.

use super::bench::{FOREBAY, source};
use super::machine::run;
use crate::support::apart::Apart;
use crate::support::{Daemon, Scratch, good, run as run_command};
use forebay_testing::skip;
use std::path::{Path, PathBuf};

/// A loop device over a file, taken away when dropped.
pub(super) struct Loop(pub(super) String);

impl Loop {
    pub(super) fn over(file: &Path) -> Loop {
        Loop(run(&["losetup", "-f", "--show", file.to_str().unwrap()]).trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        super::machine::try_run(&["losetup", "-d", &self.0]);
    }
}

/// What keeps the mount of a daemon that was killed ends with the test.
struct Keepers(PathBuf);

impl Drop for Keepers {
    fn drop(&mut self) {
        for entry in std::fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|it| it == "keeper")
                && let Ok((_, lease)) = forebay::host::keeper::take(&entry.path())
            {
                lease.end();
            }
        }
    }
}

/// The lines of the README's block below a heading.
fn lines_below(heading: &str) -> String {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let (_, below) = readme.split_once(&format!("\n## {heading}\n")).expect("the heading");
    let (block, _) = below.trim_start().strip_prefix("```\n").unwrap().split_once("```").unwrap();
    block.to_owned()
}

#[test]
fn the_lines_of_the_readme_undo_everything() {
    requires!("mkfs.ext4", "e2fsck", "losetup", "blkdiscard");
    let scratch = Scratch::new("undo");
    let runtime = scratch.sockets.join("run");
    let Some(apart) = Apart::with(&[(&runtime, "/run")]) else {
        return skip("no mount namespace of its own");
    };
    let _keepers = Keepers(runtime.join("forebay"));
    let (cache, disk) = (scratch.file("cache", 128 << 20), scratch.file("disk", 200 << 20));
    let (cache, disk) = (Loop::over(&cache), Loop::over(&disk));
    let folder = scratch.path("mnt");
    std::fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    let inside = |words: &[&str]| good(apart.command(words[0]).args(&words[1..]));
    scratch.note_cache(&inside(&[FOREBAY, "format", &cache.0]));
    let mut serve = apart.command(FOREBAY);
    serve.args(["serve", "--attach", "fuse", "--cache", &cache.0]);
    serve.args(["--volume", &format!("data={}", disk.0)]);
    let daemon = Daemon::start(serve, &scratch.path("stderr"));
    let device =
        daemon.lines.iter().find_map(|line| line.strip_suffix(" data")).unwrap().to_owned();
    inside(&["mkfs.ext4", "-q", &device]);
    inside(&["mount", &device, folder]);
    inside(&["cp", "-r", &source(), folder]);

    let places = [("/mnt/data", folder), ("/dev/sdb", &disk.0), ("/dev/nvme0n1p4", &cache.0)];
    let mut lines = lines_below("Undo");
    for (theirs, ours) in places {
        assert!(lines.contains(theirs), "no {theirs} in the README: {lines}");
        lines = lines.replace(theirs, ours);
    }
    let folder_of_program = Path::new(FOREBAY).parent().unwrap().display();
    let path = format!("{folder_of_program}:{}", std::env::var("PATH").unwrap());
    good(apart.command("sh").args(["-eux", "-c", &lines]).env("PATH", path));

    let (code, said) = daemon.ended();
    assert_eq!(code, Some(0), "{said}");
    let mounts = inside(&["cat", "/proc/mounts"]);
    assert!(mounts.contains(&format!("{} {folder} ext4", disk.0)), "{mounts}");
    inside(&["diff", "-r", &source(), &format!("{folder}/crates")]);
    inside(&["umount", folder]);
    inside(&["e2fsck", "-f", "-n", &disk.0]);
    // Nothing knows any more that it was a cache.
    let checked = run_command(apart.command(FOREBAY).args(["check", &cache.0]));
    assert_eq!(checked.status.code(), Some(1), "{checked:?}");
    scratch.note_cache(&inside(&[FOREBAY, "format", &cache.0]));
}
