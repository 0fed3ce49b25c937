// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes with devices come and go.

use super::bench::{Bench, FOREBAY};
use super::machine::{run, try_run};
use forebay_testing::wait_for;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

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

/// Those who were served waited for the driver, or for the keeper of a mount, of a volume that came: here for one that is silent.
#[test]
fn nobody_waits_for_what_is_prepared_for_a_volume_that_comes() {
    requires!("dd");
    let mut bench = Bench::new("prepared", 64 << 20);
    let (more, away) = (bench.path("more"), bench.path("away"));
    File::create(&more).unwrap().set_len(64 << 20).unwrap();
    bench.more = vec!["--volume".into(), format!("w={more}")];
    bench.serve();
    let places = || fs::read_dir("/run/forebay").unwrap().flatten();
    let mut names = places().filter_map(|entry| entry.file_name().into_string().ok());
    let its_own = format!("{}.", bench.uuid);
    let is_of_w = |name: &String| name.starts_with(&its_own) && name.matches('.').count() == 2;
    let place = names.find(|name| is_of_w(name) && name.ends_with(".fuse")).expect("its mount");
    let keeper = Path::new("/run/forebay").join(place.replace(".fuse", ".keeper"));
    bench.stop();
    bench.more.clear();
    fs::rename(&more, &away).unwrap();
    bench.serve();
    fs::rename(&away, &more).unwrap();
    let listener = UnixListener::bind(&keeper).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut attach = Command::new(FOREBAY);
    attach.args(["attach", "w", "--control", &bench.control()]);
    let attach = attach.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut asked = None;
    wait_for("the keeper is asked", || {
        asked = listener.accept().ok();
        asked.is_some()
    });
    let (mut asked, _) = asked.unwrap();
    asked.set_nonblocking(true).unwrap();
    let target = format!("of={}", bench.device);
    run(&["dd", "if=/dev/zero", &target, "bs=4k", "count=2", "oflag=direct", "status=none"]);
    let waits = asked.read(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(waits, Err(ErrorKind::WouldBlock), "it is waited for still");
    drop((asked, listener));
    let done = attach.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains(" (fuse)"), "{done:?}");
    run(&[FOREBAY, "detach", "w", "--control", &bench.control()]);
    bench.stop();
}
