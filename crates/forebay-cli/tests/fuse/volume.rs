// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes with devices come and go.

use super::bench::{Bench, FOREBAY};
use super::machine::{run, try_run};
use std::fs::{self, File};

/// A volume comes, gets a device of its own, is used, outlives the daemon and goes, while another one is
/// mounted.
#[test]
fn volumes_with_devices_come_and_go() {
    requires!("mkfs.ext4", "mount", "umount", "losetup");
    let mut bench = Bench::new("come", 64 << 20);
    bench.serve();
    let device = bench.device.clone();
    run(&["mkfs.ext4", "-q", &device]);
    bench.mount(&device, "defaults");
    fs::write(format!("{}/stays", bench.mount_point()), "stays").unwrap();
    File::create(bench.path("more")).unwrap().set_len(64 << 20).unwrap();
    let volume = format!("w={}", bench.path("more"));
    let said = run(&[FOREBAY, "attach", &volume, "--control", &bench.control()]);
    let more = said.lines().find_map(|line| line.strip_suffix(" (fuse)")).expect("a device");
    assert!(more.starts_with("/dev/loop") && more != device, "{said}");
    let more = more.to_owned();
    run(&["mkfs.ext4", "-q", &more]);
    let place = bench.path("place");
    fs::create_dir(&place).unwrap();
    run(&["mount", &more, &place]);
    fs::write(format!("{place}/goes"), "goes").unwrap();

    let refused = try_run(&[FOREBAY, "detach", "w", "--control", &bench.control()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("w: not detached: ") && said.contains(&place), "{said}");
    assert!(said.contains("; unmount it first"), "{said}");
    let told = String::from_utf8_lossy(&refused.stdout);
    assert!(!told.contains("drained"), "nothing is written back for nothing: {told}");
    assert_eq!(fs::read_to_string(format!("{place}/goes")).unwrap(), "goes");
    if !bench.read("err").contains("will not outlive this process") {
        bench.kill();
        bench.serve();
        assert_eq!(fs::read_to_string(format!("{place}/goes")).unwrap(), "goes");
        fs::write(format!("{place}/after"), "after").unwrap();
        // Not all of the machine.
        run(&["sync", "-f", &place]);
    }
    run(&["umount", &place]);
    let said = run(&[FOREBAY, "detach", "w", "--control", &bench.control()]);
    assert!(said.contains("w: detached; "), "{said}");
    // The plain disk.
    run(&["mount", "-o", "loop,ro", &bench.path("more"), &place]);
    let found = fs::read_to_string(format!("{place}/goes"));
    run(&["umount", &place]);
    assert_eq!(found.unwrap(), "goes");
    assert_eq!(fs::read_to_string(format!("{}/stays", bench.mount_point())).unwrap(), "stays");
    bench.unmount();
    bench.stop();
    let left = fs::read_dir("/run/forebay").unwrap().flatten();
    let mut left = left.map(|entry| entry.file_name().to_str().unwrap_or_default().to_owned());
    assert_eq!(left.find(|name| name.starts_with(&bench.uuid)), None);
}
