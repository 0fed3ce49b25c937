// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay resize`: a backing device that has become larger, under a volume that is used.

use crate::support;
use crate::support::{Scratch, forebay};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// With a last block that is there in part.
const OLD: u64 = 8 * MIB + 512;
const NEW: u64 = 12 * MIB + 1536;

/// The file grows, and what is new in it holds something.
fn grow(file: &Path, from: u64, to: u64) {
    let file = OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(&vec![7; (to - from) as usize], from).unwrap();
    file.sync_all().unwrap();
}

fn problems(scratch: &Scratch) -> String {
    scratch.status()["problems"].to_string()
}

#[test]
fn a_volume_that_is_used_grows_with_its_backing_device() {
    let scratch = Scratch::new("resize-used");
    scratch.format("64M");
    let backing = scratch.file("v", OLD);
    let volume = format!("v={}", backing.display());
    let mut daemon = scratch.serve(&["--volume", &volume]);
    let mut client = scratch.connect("v");
    client.write(OLD - 512, &[1; 512], false).unwrap();
    client.write(4 * MIB, &[2; 65536], false).unwrap();

    let same = scratch.ask(&["resize", "v"]);
    assert!(same.status.success(), "{same:?}");
    grow(&backing, OLD, NEW);
    let grown = scratch.ask(&["resize", "v"]);
    let said = String::from_utf8(grown.stdout.clone()).unwrap();
    assert!(
        grown.status.success() && said.contains("v: 12.0 MiB now, 8.0 MiB before"),
        "{grown:?}"
    );
    assert!(said.contains("1 NBD client will see it after connecting again"), "{said}");
    assert_eq!(scratch.status()["volumes"][0]["size_bytes"], NEW);

    // Who was connected has the volume that was agreed on.
    client.write(OLD, &[3; 512], false).unwrap_err();
    let mut client = scratch.connect("v");
    assert_eq!(client.facts().size_bytes, NEW);
    let tail = client.read(OLD - 512, 4096).unwrap();
    assert_eq!((&tail[..512], &tail[512..]), (&[1; 512][..], &[7; 3584][..]));
    client.write(NEW - 512, &[4; 512], false).unwrap();
    client.write(OLD + 512, &[5; 512], false).unwrap();

    daemon.kill();
    let daemon = scratch.serve::<&str>(&[]);
    let mut client = scratch.connect("v");
    assert_eq!(client.facts().size_bytes, NEW);
    let tail = client.read(OLD - 512, 2048).unwrap();
    assert_eq!((&tail[..512], &tail[512..1024]), (&[1; 512][..], &[7; 512][..]));
    assert_eq!((&tail[1024..1536], &tail[1536..]), (&[5; 512][..], &[7; 512][..]));
    drop(client);
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    let found = std::fs::read(&backing).unwrap();
    let mut expected = vec![0; OLD as usize];
    expected.resize(NEW as usize, 7);
    let mut put =
        |at: u64, bytes: &[u8]| expected[at as usize..][..bytes.len()].copy_from_slice(bytes);
    put(OLD - 512, &[1; 512]);
    put(4 * MIB, &[2; 65536]);
    put(NEW - 512, &[4; 512]);
    put(OLD + 512, &[5; 512]);
    assert!(found == expected);
    // The next start knows it as it is.
    let daemon = scratch.serve::<&str>(&[]);
    assert_eq!(problems(&scratch), "[]");
    daemon.stop("TERM");
}

#[test]
fn a_device_that_grew_while_nobody_served_it_is_known_and_told() {
    for ends_well in [true, false] {
        let scratch = Scratch::new("resize-between");
        scratch.format("64M");
        let backing = scratch.file("v", OLD);
        let mut daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
        scratch.connect("v").write(OLD - 512, &[1; 512], true).unwrap();
        if ends_well {
            daemon.stop("TERM");
        } else {
            daemon.kill();
        }
        grow(&backing, OLD, NEW);
        // What is dirty is for this very disk.
        let daemon = scratch.serve::<&str>(&[]);
        let found = problems(&scratch);
        assert!(
            found.contains("has become larger") && found.contains("`forebay resize v`"),
            "{found}"
        );
        let mut client = scratch.connect("v");
        assert_eq!(client.facts().size_bytes, OLD);
        assert_eq!(client.read(OLD - 512, 512).unwrap(), [1; 512]);
        drop(client);
        let grown = scratch.ask(&["resize", "v"]);
        assert!(grown.status.success(), "{grown:?}");
        assert_eq!(problems(&scratch), "[]");
        let tail = scratch.connect("v").read(OLD - 512, 4096).unwrap();
        assert_eq!((&tail[..512], &tail[512..]), (&[1; 512][..], &[7; 3584][..]));
        daemon.stop("TERM");
    }
}

#[test]
fn a_volume_does_not_shrink_and_what_would_be_lost_is_said() {
    let scratch = Scratch::new("resize-shrunk");
    scratch.format("64M");
    let backing = scratch.file("v", OLD);
    let daemon = scratch.serve(&["--volume", &format!("v={}", backing.display())]);
    scratch.connect("v").write(OLD - 65536, &[1; 65536], false).unwrap();
    OpenOptions::new().write(true).open(&backing).unwrap().set_len(4 * MIB).unwrap();
    let refused = scratch.ask(&["resize", "v"]);
    let said = String::from_utf8(refused.stderr.clone()).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    for part in
        ["does not shrink", "its last 4.0 MiB are gone", "not on it yet", "forebay detach v"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let it = &scratch.status()["volumes"][0];
    assert_eq!((&it["size_bytes"], &it["state"]), (&OLD.into(), &"serving".into()));
    // The disk is whole again, and so is the volume.
    OpenOptions::new().write(true).open(&backing).unwrap().set_len(OLD).unwrap();
    let unknown = scratch.ask(&["resize", "w"]);
    assert!(String::from_utf8(unknown.stderr).unwrap().contains("no such volume"));
    assert!(scratch.ask(&["stop", "--drain"]).status.success());
    assert_eq!(daemon.ended().0, Some(0));
    assert!(std::fs::read(&backing).unwrap()[(OLD - 65536) as usize..] == [1; 65536]);
}

#[test]
fn a_volume_that_is_served_bare_grows_too() {
    let scratch = Scratch::new("resize-bare");
    let backing = scratch.file("v", 8 * MIB);
    let (control, listen) = (scratch.control(), scratch.listen());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", "--attach", "none", "--volume"]);
    command.arg(format!("v={}", backing.display())).arg("--listen").arg(&listen);
    command.arg("--control").arg(&control);
    let daemon = support::Daemon::start(command, &scratch.path("stderr"));
    grow(&backing, 8 * MIB, NEW);
    let resized = forebay(["resize", "v", "--control", control.to_str().unwrap()]);
    assert!(resized.status.success(), "{resized:?}");
    let mut client = scratch.connect("v");
    assert_eq!(client.facts().size_bytes, NEW);
    assert_eq!(client.read(NEW - 512, 512).unwrap(), [7; 512]);
    drop(client);
    daemon.stop("TERM");
}
