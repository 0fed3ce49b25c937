// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A copy of a cache, made before that was served on. It was served without a word, and put what it held over newer data.

use crate::support::{Daemon, Scratch, forebay};
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;

/// A volume with 1 at its second MiB, in a copy of the cache; then 2 is written there, and drained.
fn copied(name: &str, is_dirty: bool) -> (Scratch, PathBuf, PathBuf) {
    let scratch = Scratch::new(name);
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let volume = format!("v={}", backing.display());
    let write = |byte, drain| {
        let daemon = scratch.serve(&["--volume", &volume]);
        scratch.connect("v").write(MIB, &[byte; 4096], true).unwrap();
        if drain {
            assert!(scratch.ask(&["drain"]).status.success());
            // As after a drain that is over; it is cached still.
            assert!(scratch.ask(&["set", "v", "mode=write-back"]).status.success());
        }
        daemon.stop("TERM");
    };
    write(1, !is_dirty);
    let copy = scratch.path("copy");
    std::fs::copy(scratch.cache(), &copy).unwrap();
    write(2, true);
    (scratch, backing, copy)
}

fn second_mib(backing: &Path) -> u8 {
    std::fs::read(backing).unwrap()[MIB as usize]
}

fn put_back(scratch: &Scratch, copy: &Path) {
    std::fs::copy(copy, scratch.cache()).unwrap();
}

#[test]
fn what_is_dirty_in_an_older_copy_is_not_put_over_newer_data_unasked() {
    let (scratch, backing, copy) = copied("older-dirty", true);
    put_back(&scratch, &copy);
    let start =
        |more: &[&str]| Daemon::try_start(scratch.serve_command(more), &scratch.path("stderr"));
    // However often: a refusal makes it no younger.
    for _ in 0..4 {
        let (code, said) = start(&[]).unwrap_err();
        let text = "this cache is older than it was when v was served last (";
        assert!(code == Some(1) && said.contains(text), "{said}");
        assert!(said.contains("v=keep-dirty or v=lose-dirty"), "{said}");
        let drained = forebay(["drain", "--cache", &scratch.cache().display().to_string()]);
        let said = String::from_utf8_lossy(&drained.stderr).into_owned();
        assert!(!drained.status.success() && said.contains(text), "{said}");
    }
    assert_eq!(second_mib(&backing), 2);

    let daemon = start(&["--if-changed", "v=lose-dirty"]).unwrap();
    assert!(daemon.said().contains("was served with a later state of this cache"));
    assert_eq!(scratch.connect("v").read(MIB, 4096).unwrap(), [2; 4096]);
    daemon.stop("TERM");
    // It is the one that counts from now on.
    scratch.serve::<&str>(&[]).stop("TERM");
}

#[test]
fn what_is_dirty_in_an_older_copy_is_kept_if_that_is_asked_for() {
    let (scratch, backing, copy) = copied("older-kept", true);
    put_back(&scratch, &copy);
    let daemon = scratch.serve(&["--if-changed", "v=keep-dirty"]);
    assert_eq!(scratch.connect("v").read(MIB, 4096).unwrap(), [1; 4096]);
    daemon.stop("TERM");
    scratch.serve::<&str>(&[]).stop("TERM");
    let drained = forebay(["drain", "--cache", &scratch.cache().display().to_string()]);
    assert!(drained.status.success(), "{drained:?}");
    assert_eq!(second_mib(&backing), 1);
}

#[test]
fn an_older_copy_with_nothing_dirty_starts_empty() {
    let (scratch, backing, copy) = copied("older-clean", false);
    put_back(&scratch, &copy);
    let daemon = scratch.serve::<&str>(&[]);
    assert!(daemon.said().contains("starts empty"), "{}", daemon.said());
    assert_eq!(scratch.connect("v").read(MIB, 4096).unwrap(), [2; 4096]);
    // A volume that goes and comes is not older than itself.
    assert!(scratch.ask(&["detach", "v"]).status.success());
    let attached = scratch.ask(&["attach", &format!("v={}", backing.display())]);
    assert!(attached.status.success(), "{attached:?}");
    let told = daemon.said().matches("starts empty").count();
    assert_eq!(told, 1, "{}", daemon.said());
    daemon.stop("TERM");
    assert_eq!(second_mib(&backing), 2);
}
