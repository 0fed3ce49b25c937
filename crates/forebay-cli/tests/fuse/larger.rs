// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache device that becomes larger while it is served.

use super::machine::run;
use super::undo::Loop;
use crate::support::{Scratch, forebay, wait_for};

const MIB: u64 = 1 << 20;

#[test]
fn a_cache_device_that_has_grown_is_told_and_can_be_had() {
    requires!("losetup");
    let scratch = Scratch::new("cache-grown");
    let file = scratch.file("fast", 64 * MIB);
    let device = Loop::over(&file);
    let done = forebay(["format", &device.0]);
    assert!(done.status.success(), "{done:?}");
    let volume = format!("v={}", scratch.file("v", 16 * MIB).display());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["serve", "--cache", &device.0, "--volume", &volume, "--attach", "none"]);
    command.args(["--listen", &scratch.listen(), "--control"]).arg(scratch.control());
    let daemon = crate::support::Daemon::start(command, &scratch.path("stderr"));
    scratch.connect("v").write(0, &[7; 8192], true).unwrap();
    let problems = || scratch.status()["problems"].to_string();
    assert_eq!(problems(), "[]");
    for size in [80, 96] {
        std::fs::File::options().write(true).open(&file).unwrap().set_len(size * MIB).unwrap();
        run(&["losetup", "-c", &device.0]);
        let told = format!("{}: the cache device has become larger: {size} MiB, ", device.0);
        wait_for("it is told", || problems().contains(&told));
        assert_eq!(problems().matches("has become larger").count(), 1, "{}", problems());
    }
    let made = scratch.ask(&["resize", "--cache-size", "max"]);
    assert!(made.status.success(), "{made:?}");
    assert_eq!(problems(), "[]");
    assert_eq!(scratch.status()["cache"]["size_bytes"], 96 * MIB);
    assert_eq!(scratch.connect("v").read(0, 8192).unwrap(), [7; 8192]);
    daemon.stop("TERM");
}
