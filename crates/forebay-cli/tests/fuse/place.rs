// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The first volume's device is over the cache's own mount. While its disk is late, that is no other's.

use super::bench::{Bench, FOREBAY};
use super::kept::{failed, mounted, write};
use super::machine::run;
use super::manager::Manager;
use std::fs::{self, File};

/// The others were served there: all that the mounted file system did was refused, and when the disk came back the volume got a second device.
#[test]
fn the_mount_of_a_late_volume_waits_for_it() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("place") else { return };
    bench.kill();
    its_disk_is_late(bench, &note);
}

/// What the manager had given for it was closed.
#[test]
fn what_the_manager_keeps_of_the_first_volume_waits_for_it() {
    requires!("mkfs.ext4", "sync");
    let Some((mut bench, note)) = mounted("place-stored") else { return };
    bench.kill();
    bench.manager = Some(Manager::new(bench.path("notify")));
    bench.serve();
    let name = format!("fuse-{}", bench.uuid);
    forebay_testing::wait_for("it is kept", || bench.manager.as_ref().unwrap().keeps(&name));
    // Its keeper is gone, as after the end of a service.
    bench.kill();
    let (descriptor, lease) = forebay::host::keeper::take(&bench.keeper_socket()).unwrap();
    lease.end();
    drop((descriptor, lease));
    its_disk_is_late(bench, &note);
}

/// Where a link led to the volume's own device by the next start, that waited for itself.
#[test]
fn a_volume_is_not_behind_its_own_device() {
    requires!("mkfs.ext4", "sync");
    let mut bench = Bench::new("own", 64 << 20);
    let link = bench.path("link");
    std::os::unix::fs::symlink(bench.path("back"), &link).unwrap();
    let volume = format!("v={link}");
    bench.serve();
    if bench.keeper().is_none() {
        return forebay_testing::skip("the kernel's FUSE does not resend requests");
    }
    let leads_to = |target: &str| {
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(target, &link).unwrap();
    };
    leads_to(&bench.device);
    let comes = |volume: &str| {
        let attach = [FOREBAY, "attach", volume, "--control", &bench.control()];
        let said = failed(&attach);
        assert!(
            said.contains(": leads to volume v of this cache, not to what is behind it"),
            "{said}"
        );
    };
    comes(&format!("w={link}"));
    bench.kill();
    let cache = bench.path("cache");
    let serve = ["serve", "--cache", &cache, "--attach", "fuse", "--volume", &volume];
    let said = failed(&[&["timeout", "60", FOREBAY], &serve[..]].concat());
    assert!(said.contains(": leads to volume v of this cache, not to what is behind it"), "{said}");
    bench.serve();
    bench.stop();
}

fn its_disk_is_late(mut bench: Bench, note: &str) {
    let device = bench.device.clone();
    fs::rename(bench.path("back"), bench.path("away")).unwrap();
    for name in ["more", "most"] {
        File::create(bench.path(name)).unwrap().set_len(64 << 20).unwrap();
    }
    let more = format!("w={}", bench.path("more"));
    bench.serve_some(&["--device-timeout", "1s", "--volume", &more]);
    let most = format!("x={}", bench.path("most"));
    run(&[FOREBAY, "attach", &most, "--control", &bench.control()]);
    fs::rename(bench.path("away"), bench.path("back")).unwrap();
    let said = run(&[FOREBAY, "attach", "v", "--control", &bench.control()]);
    assert!(said.contains(&format!("{device} (fuse), mounted at ")), "{said}");
    write(note, "after");
    assert_eq!(fs::read_to_string(note).unwrap(), "after");
    bench.kill();
    bench.serve();
    assert_eq!(bench.device, device);
    write(note, "in the end");
    bench.unmount();
    bench.stop();
}
