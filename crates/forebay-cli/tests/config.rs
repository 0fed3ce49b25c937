// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Configuration files: checked, shown, and served from.

use crate::support::{Daemon, Scratch, forebay};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MIB: u64 = 1 << 20;

fn config(action: &str, paths: &[&Path]) -> Output {
    let paths = paths.iter().map(|path| path.as_os_str());
    forebay([OsStr::new("config"), OsStr::new(action)].into_iter().chain(paths))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A file for the cache and sockets of this place.
fn file(scratch: &Scratch, name: &str, more: &str) -> PathBuf {
    let path = scratch.path(name);
    let text = format!(
        "cache = '{}'\nlisten = '{}'\ncontrol = '{}'\nattach = 'none'\n{more}",
        scratch.cache().display(),
        scratch.listen(),
        scratch.control().display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

fn serve_command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("serve").arg("--config").arg(config);
    command
}

#[test]
fn example_in_the_package_is_good() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/example.toml");
    let done = config("check", &[&example]);
    assert!(done.status.success(), "{}", text(&done.stderr));
}

#[test]
fn check_tells_each_mistake_with_its_place_and_exit_code_2() {
    let scratch = Scratch::new("config-check");
    let bad = file(&scratch, "bad.toml", "memry = '1G'\n[volume.v]\nbacking = '/b'\nmode = 'x'\n");
    let good = file(&scratch, "good.toml", "[volume.v]\nbacking = '/b'\n");
    let twin = file(&scratch, "twin.toml", "[volume.w]\nbacking = '/b'\n");
    let done = config("check", &[&good]);
    assert_eq!(text(&done.stdout), format!("{}: good\n", good.display()));
    assert!(done.status.success());

    let done = config("check", &[&bad, &good]);
    assert_eq!(done.status.code(), Some(2));
    let said = text(&done.stderr);
    let path = bad.display();
    assert!(
        said.contains(&format!(
            "forebay: {path}:5:1: memry is not known here; did you mean memory?\n"
        )),
        "{said}"
    );
    assert!(said.contains(&format!("forebay: {path}:8:8: mode=x: write-back, ")), "{said}");
    assert!(text(&done.stdout).contains("good.toml: good"), "the others are looked at, too");

    let done = config("check", &[&good, &twin]);
    assert_eq!(done.status.code(), Some(2));
    let said = text(&done.stderr);
    assert!(said.contains("twin.toml: device /b is that of "), "{said}");

    // What `serve` says of it is the same.
    let (code, said) = Daemon::try_start(serve_command(&bad), &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(2));
    assert!(said.contains(":5:1: memry is not known here"), "{said}");
}

#[test]
fn a_file_is_served_and_one_missing_device_does_not_hold_the_others() {
    let scratch = Scratch::new("config-serve");
    scratch.format("64M");
    let one = scratch.file("one", 16 * MIB);
    let two = scratch.file("two", 16 * MIB);
    let volumes = format!(
        "device-timeout = '1s'\n[volume.one]\nbacking = '{}'\n[volume.two]\nbacking = '{}'\nmode = 'write-through'\n",
        one.display(),
        two.display()
    );
    let path = file(&scratch, "it.toml", &volumes);
    let shown = text(&config("show", &[&path]).stdout);
    assert!(
        shown.contains("device-timeout = \"1s\"\n")
            && shown.contains("memory = \"192M\"  # the default"),
        "{shown}"
    );

    let daemon = Daemon::start(serve_command(&path), &scratch.path("stderr"));
    assert_eq!(scratch.status()["volumes"][1]["mode"], "write-through");
    scratch.connect("one").write(MIB, &[7; 4096], true).unwrap();
    daemon.stop("TERM");

    std::fs::rename(&two, scratch.path("away")).unwrap();
    let daemon = Daemon::start(serve_command(&path), &scratch.path("stderr"));
    assert_eq!(scratch.connect("one").read(MIB, 4096).unwrap(), [7; 4096]);
    let problems = scratch.status()["problems"].to_string();
    assert!(problems.contains("two: waits for its backing device"), "{problems}");
    assert!(
        problems.contains("the backing device of two is not there; it was waited for"),
        "{problems}"
    );
    let said = daemon.stop("TERM");
    assert!(said.contains("two, the backing device of two, up to 1s: it is not there"), "{said}");

    // Without a file somebody means what is typed.
    let spec = format!("two={}", two.display());
    let command = scratch.serve_command(&["--volume", &spec]);
    let (code, said) = Daemon::try_start(command, &scratch.path("stderr")).unwrap_err();
    assert_eq!(code, Some(1), "{said}");
}
