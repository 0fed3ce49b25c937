// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What another `attach` is asked for means for a device that is mounted: it goes on with what it was made by, or nothing is begun.

use super::bench::{Bench, FOREBAY};
use super::machine::{run, try_run};
use crate::support::{Daemon, Scratch};
use crate::upgrade::program;
use forebay_testing::skip;
use std::fs;
use std::path::Path;
use std::process::Command;

pub fn failed(words: &[&str]) -> String {
    let done = try_run(words);
    assert!(!done.status.success(), "{done:?}");
    String::from_utf8_lossy(&done.stderr).into_owned()
}

/// A volume whose device outlives its daemon, mounted, and a file on it; none: the kernel does not do that.
pub fn mounted(name: &str) -> Option<(Bench, String)> {
    let mut bench = Bench::new(name, 64 << 20);
    bench.serve();
    if bench.keeper().is_none() {
        skip("the kernel's FUSE does not resend requests");
        return None;
    }
    run(&["mkfs.ext4", "-q", &bench.device]);
    bench.mount(&bench.device, "errors=remount-ro");
    let note = format!("{}/note", bench.mount_point());
    Some((bench, note))
}

pub fn write(note: &str, text: &str) {
    fs::write(note, text).unwrap();
    run(&["sync", "-f", note]);
}

/// The next program made what it was told to make or found to be the best, and nobody served what was mounted.
#[test]
fn a_mounted_device_is_left_to_no_other_kind() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("kept") else { return };
    let goes_on = |text| write(&note, text);
    goes_on("one");
    bench.kill();
    let has = format!(
        "--attach none: volume v has {} (fuse), mounted at {}, which nobody would serve any more; leave attach at fuse",
        bench.device,
        bench.mount_point()
    );
    let (cache, control) = (bench.path("cache"), bench.control());
    let volume = format!("v={}", bench.path("back"));
    let none = [FOREBAY, "serve", "--cache", &cache, "--volume", &volume, "--attach", "none"];
    let said = failed(&none);
    assert!(said.contains(&has), "{said}");

    let file = bench.path("file.toml");
    let asks_for = |kind: &str| {
        let back = bench.path("back");
        let text =
            format!("cache = '{cache}'\nattach = '{kind}'\n[volume.v]\nbacking = '{back}'\n");
        fs::write(&file, text).unwrap();
    };
    asks_for("auto");
    let mut command = Command::new(FOREBAY);
    command.args(["serve", "--config", &file]);
    let daemon = Daemon::start(command, Path::new(&bench.path("err")));
    let said = daemon.said();
    assert!(said.contains("attaches volumes by fuse, as the daemon before has"), "{said}");
    goes_on("two");
    asks_for("none");
    let upgrade = [FOREBAY, "upgrade", "--exec", FOREBAY, "--control", &control];
    let said = failed(&upgrade);
    assert!(said.contains(&has), "{said}");
    assert!(!daemon.said().contains("goes on as"), "nothing is begun");
    goes_on("three");
    asks_for("auto");
    run(&upgrade);
    goes_on("four");
    bench.unmount();
    daemon.stop("TERM");
    assert_eq!(bench.loops(), Vec::<String>::new());
}

/// The next program had nothing to go on with: what was mounted gave errors from then on.
#[test]
fn a_daemon_whose_keeper_is_gone_does_not_go_on_as_another_program() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("kept-no-keeper") else { return };
    write(&note, "one");
    run(&["kill", "-9", &bench.keeper().expect("it has one").to_string()]);
    let said = failed(&[FOREBAY, "upgrade", "--exec", FOREBAY, "--control", &bench.control()]);
    assert!(said.contains("block devices by fuse end with the process"), "{said}");
    write(&note, "two");
    bench.unmount();
    bench.stop();
}

/// Somebody took a device's node away, and puts it back in the end.
struct Away(String);

impl Drop for Away {
    fn drop(&mut self) {
        let _ = fs::rename(format!("{}.away", self.0), &self.0);
    }
}

/// The next program counted as one that serves, and the one before was gone: nobody served what was mounted.
#[test]
fn a_program_that_cannot_have_a_mounted_device_is_not_gone_on_with() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("kept-upgrade") else { return };
    write(&note, "one");
    let scratch = Scratch::new("kept-upgrade");
    let away = Away(bench.device.clone());
    let takes_away = format!("mv {0} {0}.away", bench.device);
    let next = program(&scratch, "next", ":", &takes_away);
    let upgrade =
        [FOREBAY, "upgrade", "--exec", next.to_str().unwrap(), "--control", &bench.control()];
    let said = failed(&upgrade);
    assert!(said.contains("this program was not upgraded: ") && said.contains("v: not attached: "));
    drop(away);
    bench.kill();
    bench.serve();
    assert_eq!(fs::read_to_string(&note).unwrap(), "one");
    write(&note, "two");
    bench.unmount();
    bench.stop();
}
