// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Media that are read-only or full: a named state, nothing lost.
//!
//! Each is a tmpfs in a mount namespace that ends with the daemon, so this needs root.

use crate::support;
use crate::support::model::content;
use crate::support::{Daemon, Scratch, good, run, signal, wait_for};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// Whether file systems can be mounted in a namespace of one's own; says why not.
fn can_mount() -> bool {
    let can = support::has("unshare")
        && support::has("nsenter")
        && run(Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"]))
            .status
            .success();
    if !can {
        support::skip(&format!("{}: no mount namespace (needs root)", module_path!()));
    }
    can
}

/// The daemon, with a tmpfs mounted at `at` and prepared by a script first.
fn serve_on(scratch: &Scratch, at: &Path, prepare: &str, args: &[&str]) -> Command {
    std::fs::create_dir_all(at).unwrap();
    let serve = scratch.serve_command(args);
    let script = format!("cd '{}' && {prepare} && cd / && exec \"$@\"", at.display());
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-c"]);
    let mount = format!("mount -t tmpfs -o size=16M none '{}' && {script}", at.display());
    command.arg(mount).arg("sh").arg(serve.get_program()).args(serve.get_args());
    command
}

/// The same, the cache being `file` there.
fn serve_copy_on(scratch: &Scratch, at: &Path, prepare: &str, backing: &Path) -> Command {
    let volume = format!("v={}", backing.display());
    let command = serve_on(scratch, at, prepare, &["--volume", &volume]);
    let mut args: Vec<_> = command.get_args().map(|it| it.to_owned()).collect();
    let cache = args.iter().position(|arg| arg == scratch.cache().as_os_str()).unwrap();
    args[cache] = at.join("file").into();
    let mut command = Command::new("unshare");
    command.args(args);
    command
}

#[test]
fn read_only_media_are_refused_by_name() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("read-only");
    scratch.format("64M");
    let media = scratch.path("media");
    let read_only = format!("truncate -s 64M file && mount -o remount,ro '{}'", media.display());
    let on_media = format!("v={}", media.join("file").display());
    let command = serve_on(&scratch, &media, &read_only, &["--volume", &on_media]);
    let (code, said) = Daemon::try_start(command, &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.starts_with("forebay: ") && last.contains("Read-only file system"), "{said}");
    assert!(last.contains("media/file"), "{said}");
    // And the cache.
    let backing = scratch.file("backing", 16 * MIB);
    let copied = format!("cp --sparse=always ../cache file && {}", &read_only[24..]);
    let other = Scratch::new("read-only-cache");
    let command = serve_copy_on(&scratch, &media, &copied, &backing);
    let (code, said) = Daemon::try_start(command, &other.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
    assert!(said.lines().last().unwrap().contains("Read-only file system"), "{said}");
    // Neither was harmed.
    scratch.serve(&["--volume", &format!("v={}", backing.display())]).stop("TERM");
}

#[test]
fn a_full_file_system_under_the_backing_file_is_named_and_loses_nothing() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("full-tmpfs");
    scratch.format("64M");
    let media = scratch.path("media");
    let volume = format!("v={}", media.join("file").display());
    let command = serve_on(&scratch, &media, "truncate -s 64M file", &["--volume", &volume]);
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    let bytes = content(3, 0, 24 * MIB);
    for (at, piece) in bytes.chunks(MIB as usize).enumerate() {
        client.write(at as u64 * MIB, piece, false).unwrap();
    }
    client.flush().unwrap();
    let mut drain = scratch.drain_command().spawn().unwrap();
    wait_for("a refusal", || scratch.status()["volumes"][0]["health"] == "degraded");
    wait_for("the log", || daemon.said().contains("No space left on device"));
    for at in 0..24 {
        let found = client.read(at * MIB, MIB as u32).unwrap();
        assert!(found == bytes[(at * MIB) as usize..][..MIB as usize], "{at}");
    }
    assert!(drain.try_wait().unwrap().is_none());
    let id = daemon.id().to_string();
    let larger = ["-t", &id, "-m", "mount", "-o", "remount,size=64M"];
    good(Command::new("nsenter").args(larger).arg(&media));
    assert!(drain.wait().unwrap().success());
    let there = format!("/proc/{id}/root{}", media.join("file").display());
    assert!(std::fs::read(there).unwrap()[..bytes.len()] == bytes);
    assert_eq!(scratch.status()["volumes"][0]["health"], "healthy");
    daemon.stop("TERM");
}

/// A file that `truncate` made has no room: guests' writes failed later, and what a killed daemon had answered could not be put back.
#[test]
fn a_cache_file_takes_its_room_when_it_is_formatted_and_a_full_file_system_is_named() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("full-cache");
    let media = scratch.path("media");
    std::fs::create_dir_all(&media).unwrap();
    let forebay = env!("CARGO_BIN_EXE_forebay");
    let on_media = |size: &str, script: &str| {
        let script = format!("mount -t tmpfs -o size={size} none . && {{ {script}; }}");
        let mut command = Command::new("unshare");
        command.args(["-m", "--propagation", "private", "sh", "-c", &script]).current_dir(&media);
        command
    };
    let sparse =
        format!("truncate -s 64M cache; '{forebay}' format cache; echo $?; stat -c %b,%s cache");
    let done = run(&mut on_media("16M", &format!("cd '{}'; {sparse}", media.display())));
    let (out, said) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(said.contains("cache: there is no room for it: No space left on device"), "{said}");
    assert_eq!(said.matches("No space left").count(), 1, "{said}");
    assert!(out.ends_with(&format!("1\n0,{}\n", 64 * MIB)), "nothing of it was taken: {out}");
    // A hole that somebody makes in a cache, on a file system that is full then.
    scratch.format("64M");
    let backing = scratch.file("backing", 16 * MIB);
    let mut daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    scratch.connect("v").write(0, &content(5, 0, 64 << 10), false).unwrap();
    daemon.kill();
    let script = format!(
        "cd '{0}'; cp --sparse=always ../cache cache; for at in 0 1023; do dd if=../cache of=cache bs=64K count=1 \
         skip=$at seek=$at conv=notrunc status=none; done; head -c 32M /dev/zero >fill; '{forebay}' serve --cache cache --attach none \
         --control '{1}'",
        media.display(),
        scratch.control().display()
    );
    let done = run(&mut on_media("1M", &script));
    let said = String::from_utf8_lossy(&done.stderr);
    let says = "cache: cannot be written with what a killed process left in memory: No space left on device (os error 28); \
                make room on its file system, then serve it again";
    assert!(said.contains(says), "{said}");
    assert_eq!(said.matches("No space left on device").count(), 2, "once of `head`: {said}");
}

#[test]
fn a_full_file_system_under_the_cache_is_what_status_says() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new("full-under-cache");
    scratch.format("64M");
    let (media, backing) = (scratch.path("media"), scratch.file("backing", 64 * MIB));
    let sparse = "cp --sparse=always ../cache file";
    let command = serve_copy_on(&scratch, &media, sparse, &backing);
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    let mut client = scratch.connect("v");
    for at in 0..24 {
        if client.write(at * MIB, &content(3, at * MIB, MIB), true).is_err() {
            break;
        }
    }
    let says = "the cache device failed; writes are refused until the daemon is restarted (no room on its file system: make some before that)";
    wait_for("its name", || scratch.status()["problems"].to_string().contains(says));
    drop(client);
    signal(daemon.id(), "TERM");
    assert_eq!(daemon.ended().0, Some(1));
}
