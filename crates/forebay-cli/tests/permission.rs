// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who may read what is cached, and what somebody is told who may not.

use crate::support::{Scratch, good, run, skip};
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

const NOBODY: u32 = 65534;

/// It was told that there is none, and to start one.
#[test]
fn who_may_not_see_a_daemon_hears_that() {
    let scratch = Scratch::new("not-allowed");
    let is_root = std::fs::metadata(&scratch.dir).unwrap().uid() == 0;
    if !is_root {
        return skip("permission: only root can ask as another user");
    }
    let home = scratch.sockets.join("home");
    std::fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(NOBODY), None).unwrap();
    let program = scratch.program_for_all();
    let status = |more: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("status").args(more).env("XDG_RUNTIME_DIR", &home).uid(NOBODY).gid(NOBODY);
        let done = run(&mut command);
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    let place = scratch.sockets.join("private");
    std::fs::create_dir(&place).unwrap();
    std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o700)).unwrap();
    let (code, said) = status(&["--control", place.join("control").to_str().unwrap()]);
    assert!(code == Some(1) && said.contains("permission denied; ask as root"), "{said}");

    // As a daemon of root's has it.
    let _ = std::fs::create_dir("/run/forebay");
    let mode = std::fs::metadata("/run/forebay").unwrap().mode() & 0o077;
    assert_eq!(mode, 0);
    let (code, said) = status(&[]);
    assert!(code == Some(5) && said.contains("permission is denied for /run/forebay"), "{said}");
    assert!(said.contains("start one with `forebay serve --cache CACHE`"), "{said}");
}

/// They heard what the system had said, and no more.
#[test]
fn who_may_not_open_a_file_is_told_who_may() {
    let scratch = Scratch::new("not-opened");
    if std::fs::metadata(&scratch.dir).unwrap().uid() != 0 {
        return skip("permission: only root can ask as another user");
    }
    scratch.format("64M");
    let program = scratch.program_for_all();
    let private = scratch.sockets.join("private");
    std::fs::create_dir(&private).unwrap();
    std::fs::set_permissions(&private, std::fs::Permissions::from_mode(0o755)).unwrap();
    let cache = scratch.sockets.join("cache");
    std::fs::copy(scratch.cache(), &cache).unwrap();
    let refused = |args: &[&OsStr]| {
        let mut command = Command::new(&program);
        command.args(args).env("XDG_RUNTIME_DIR", &private).uid(NOBODY).gid(NOBODY);
        let done = run(&mut command);
        assert_eq!(done.status.code(), Some(1), "{done:?}");
        String::from_utf8(done.stderr).unwrap()
    };
    let said = refused(&["check".as_ref(), cache.as_ref()]);
    let advice = "cannot open it: Permission denied (os error 13); run it as root (sudo), or as a user who may";
    assert!(said.contains(advice), "{said}");
    let new = private.join("new");
    let said = refused(&["format".as_ref(), new.as_ref(), "--size".as_ref(), "64M".as_ref()]);
    let advice =
        format!("that you may write to ({} is none), or run it as root", private.display());
    assert!(said.contains(&advice), "{said}");
}

/// It holds what guests have written.
#[test]
fn a_cache_that_is_a_file_is_its_owners_alone() {
    let scratch = Scratch::new("format-mode");
    let mut command = Command::new("sh");
    let format = "umask 022; exec \"$0\" format \"$1\" --size 64M";
    let program = env!("CARGO_BIN_EXE_forebay");
    let printed = good(command.args(["-c", format, program]).arg(scratch.cache()));
    scratch.note_cache(&printed);
    assert_eq!(std::fs::metadata(scratch.cache()).unwrap().mode() & 0o777, 0o600);
}
