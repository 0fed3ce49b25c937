// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stops, and who holds a device meanwhile.

use super::bench::{Bench, FOREBAY};
use super::machine::{run, try_run};
use super::verify::Verify;
use forebay_testing::{skip, wait_for};
use std::fs::{self, File};

#[test]
fn stop_waits_for_those_it_names_and_serves_them() {
    requires!("mkfs.ext4");
    let mut bench = Bench::new("stop", 64 << 20);
    bench.serve();
    run(&["mkfs.ext4", "-q", &bench.device]);
    bench.mount(&bench.device, "defaults");
    bench.signal("-TERM");
    let holder = format!("{}: mounted at {} (ext4)", bench.device, bench.mount_point());
    wait_for("the holder is named", || bench.read("err").contains(&holder));
    let file = format!("{}/later", bench.mount_point());
    fs::write(&file, "written while stopping").unwrap();
    run(&["sync", "-f", &bench.mount_point()]);
    let status = run(&[FOREBAY, "status", "--control", &bench.control()]);
    assert!(status.contains("(fuse), mounted at"), "{status}");
    bench.unmount();
    bench.wait_for_end();
    assert_eq!(bench.loops(), Vec::<String>::new());
    bench.serve();
    bench.mount(&bench.device, "ro");
    assert_eq!(fs::read_to_string(&file).unwrap(), "written while stopping");
    bench.unmount();
    // A second signal does not wait.
    let device = File::open(&bench.device).unwrap();
    let holder = format!("open in process {}", std::process::id());
    bench.signal("-TERM");
    wait_for("the holder is named", || bench.read("err").contains(&holder));
    bench.signal("-TERM");
    bench.wait_for_end();
    if bench.keeper_socket().exists() {
        // It waits for the next daemon.
        bench.serve();
        drop(device);
    } else {
        assert!(!bench.fuse_directory().exists());
        drop(device);
        bench.serve();
    }
    bench.stop();
}

/// Whom a stop waited for was taken for who stood against that detach, and not named.
#[test]
fn a_stop_names_those_it_waits_for_after_a_volume_was_detached() {
    requires!();
    let mut bench = Bench::new("stop-detached", 64 << 20);
    File::create(bench.path("other")).unwrap().set_len(16 << 20).unwrap();
    bench.more = ["--volume".to_owned(), format!("w={}", bench.path("other"))].into();
    bench.serve();
    run(&[FOREBAY, "detach", "w", "--control", &bench.control()]);
    let held = File::open(&bench.device).unwrap();
    bench.signal("-TERM");
    let named = format!("stop waits for {}: open in process {}", bench.device, std::process::id());
    wait_for("the holder is named", || bench.read("err").contains(&named));
    drop(held);
    bench.wait_for_end();
}

/// Nobody gives a second signal: a service manager, for one.
#[test]
fn a_stop_ends_by_itself_when_its_time_is_over_and_leaves_nothing_undurable() {
    requires!("dd", "cmp");
    let mut bench = Bench::new("stop-timeout", 64 << 20);
    bench.more = ["--stop-timeout", "1s"].map(str::to_owned).into();
    bench.serve();
    let (data, device) = (bench.path("data"), format!("of={}", bench.device));
    run(&["dd", "if=/dev/urandom", &format!("of={data}"), "bs=64k", "count=16"]);
    let from = format!("if={data}");
    run(&["dd", &from, &device, "bs=64k", "conv=fsync,notrunc"]);
    let held = File::open(&bench.device).unwrap();
    bench.signal("-TERM");
    bench.wait_for_end();
    let told = bench.read("err");
    assert!(told.contains("still held after 1s (--stop-timeout)"), "{told}");
    assert!(told.contains("everything is durable"), "{told}");
    // It need not be waited for if nobody holds anything.
    if bench.keeper_socket().exists() {
        bench.serve();
        drop(held);
    } else {
        drop(held);
        bench.serve();
    }
    bench.stop();
    assert!(!bench.read("err").contains("still held"), "{}", bench.read("err"));
    bench.serve();
    run(&["cmp", "-n", "1048576", &data, &bench.device.clone()]);
    bench.stop();
}

/// A stop that does not wait leaves the device to the next daemon.
#[test]
fn a_device_that_is_held_over_a_stop_is_there_again_after_it() {
    requires!("mkfs.ext4", "e2fsck");
    let mut bench = Bench::new("held", 200 << 20);
    bench.serve();
    if bench.keeper().is_none() {
        skip("the kernel's FUSE does not resend requests");
        return;
    }
    let device = bench.device.clone();
    run(&["mkfs.ext4", "-q", &device]);
    bench.mount(&device, "defaults");
    let verify = Verify::begin(&bench);
    bench.signal("-TERM");
    wait_for("the holder is named", || {
        bench.read("err").contains(&format!("mounted at {}", bench.mount_point()))
    });
    bench.signal("-TERM");
    bench.wait_for_end();
    bench.serve();
    assert_eq!(bench.device, device);
    verify.end();
    bench.unmount();
    run(&["e2fsck", "-f", "-n", &device]);
    bench.stop();
}

/// Who holds a device over a stop is served as before: past a cache that fails meanwhile, too. His writes waited for the mark until the end
/// of the stop's patience. And an upgrade then is no second stop.
#[test]
fn a_stop_that_waits_serves_past_a_cache_that_fails() {
    requires!();
    let mut bench = Bench::new("stop-fails", 64 << 20);
    bench.serve();
    let (device, control) = (bench.device.clone(), bench.control());
    let (to, from) = (format!("of={device}"), format!("if={device}"));
    let write = ["dd", "if=/dev/urandom", &to, "bs=4096", "count=1", "conv=fsync,notrunc"];
    run(&write);
    run(&[FOREBAY, "drain", "--control", &control]);
    let held = File::open(&device).unwrap();
    bench.signal("-TERM");
    wait_for("the holder is named", || bench.read("err").contains("stop waits for "));
    // Its log lies behind that.
    let daemon = bench.daemon.as_ref().unwrap().id().to_string();
    run(&["prlimit", "--pid", &daemon, "--fsize=65536"]);
    for _ in 0..2 {
        let read = ["dd", &from, "of=/dev/null", "bs=4096", "skip=512", "count=1", "iflag=direct"];
        run(&read);
    }
    let has_failed = || bench.read("err").contains("the cache device has failed");
    wait_for("the cache fails", has_failed);
    run(&write);
    let upgrade = try_run(&[FOREBAY, "upgrade", "--exec", FOREBAY, "--control", &control]);
    let said = String::from_utf8_lossy(&upgrade.stderr).into_owned();
    assert!(said.contains("the daemon is being stopped"), "{said}");
    drop(held);
    wait_for("the daemon has ended", || {
        bench.daemon.as_mut().unwrap().try_wait().unwrap().is_some()
    });
    let said = bench.read("err");
    assert!(said.contains("v: the cache is left out") && said.contains("is detached"), "{said}");
}
