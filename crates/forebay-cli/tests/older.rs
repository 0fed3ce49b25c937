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
        let text = "this cache is older than it was when v was served last until ";
        assert!(code == Some(1) && said.contains(text), "{said}");
        assert!(said.contains("v=keep-dirty or v=lose-dirty"), "{said}");
        let drained = forebay(["drain", "--cache", &scratch.cache().display().to_string()]);
        let said = String::from_utf8_lossy(&drained.stderr).into_owned();
        assert!(!drained.status.success() && said.contains(text), "{said}");
    }
    assert_eq!(second_mib(&backing), 2);

    // What was decided is not forgotten by a start that fails behind the opening, nor taken for a choice of the next one.
    let taken = format!("nbd+unix://{}/none/s", scratch.path("x").display());
    let (_, said) = start(&["--if-changed", "v=lose-dirty", "--listen", &taken]).unwrap_err();
    assert!(!said.contains("is older than"), "{said}");
    let (code, said) = start(&[]).unwrap_err();
    let text = "it was served with a later state of this cache since ";
    assert!(code == Some(1) && said.contains(text), "{said}");
    assert_eq!(second_mib(&backing), 2);

    let daemon = start(&["--if-changed", "v=lose-dirty"]).unwrap();
    assert!(daemon.said().contains(text), "{}", daemon.said());
    assert_eq!(scratch.connect("v").read(MIB, 4096).unwrap(), [2; 4096]);
    daemon.stop("TERM");
    // It is the one that counts from now on.
    scratch.serve::<&str>(&[]).stop("TERM");
}

/// The later one, when the older one was served in its place.
#[test]
fn what_was_the_cache_before_an_older_copy_took_its_place_is_none_any_more() {
    let (scratch, backing, copy) = copied("older-fork", true);
    let later = scratch.path("later");
    std::fs::copy(scratch.cache(), &later).unwrap();
    put_back(&scratch, &copy);
    let daemon = scratch.serve(&["--if-changed", "v=lose-dirty"]);
    scratch.connect("v").write(MIB, &[3; 4096], true).unwrap();
    assert!(scratch.ask(&["drain"]).status.success());
    daemon.stop("TERM");
    put_back(&scratch, &later);
    let daemon = scratch.serve::<&str>(&[]);
    assert!(daemon.said().contains("starts empty"), "{}", daemon.said());
    assert_eq!(scratch.connect("v").read(MIB, 4096).unwrap(), [3; 4096]);
    daemon.stop("TERM");
    assert_eq!(second_mib(&backing), 3);
}

/// A snapshot of the last opening has its generation.
#[test]
fn a_copy_that_was_made_while_the_cache_was_served_is_older_than_its_stop() {
    let scratch = Scratch::new("older-live");
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    let mut client = scratch.connect("v");
    client.write(MIB, &[1; 4096], true).unwrap();
    let copy = scratch.path("copy");
    std::fs::copy(scratch.cache(), &copy).unwrap();
    client.write(MIB, &[2; 4096], true).unwrap();
    drop(client);
    assert!(scratch.ask(&["drain"]).status.success());
    daemon.stop("TERM");
    put_back(&scratch, &copy);
    let refused = Daemon::try_start(scratch.serve_command::<&str>(&[]), &scratch.path("stderr"));
    let (code, said) = refused.unwrap_err();
    assert!(code == Some(1) && said.contains("this cache is older than it was"), "{said}");
    assert_eq!(second_mib(&backing), 2);
    // Giving up another volume, or looking whether it may be erased, makes it no younger.
    let cache = scratch.cache().display().to_string();
    for command in [&["format", &cache, "--force"][..], &["forget", "--cache", &cache, "w"]] {
        assert!(!forebay(command.to_vec()).status.success());
        let start = scratch.serve_command::<&str>(&[]);
        let (code, said) = Daemon::try_start(start, &scratch.path("stderr")).unwrap_err();
        assert!(code == Some(1) && said.contains("later state of this cache"), "{said}");
    }
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
