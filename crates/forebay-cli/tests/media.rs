// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Media that are read-only or full: a named state, nothing lost.
//!
//! Each is a tmpfs in a mount namespace that ends with the daemon, so this needs root.

use crate::support;
use crate::support::model::content;
use crate::support::{Daemon, Scratch, good, run, wait_for};
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
    let mut command = serve_on(&scratch, &media, &copied, &[]);
    command = {
        let mut args: Vec<_> = command.get_args().map(|it| it.to_owned()).collect();
        let at = args.iter().position(|arg| arg == scratch.cache().as_os_str()).unwrap();
        args[at] = media.join("file").into();
        args.extend(["--volume".into(), format!("v={}", backing.display()).into()]);
        let mut command = Command::new("unshare");
        command.args(args);
        command
    };
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
