// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who keeps the connection of a mount, and what is held, from one daemon to the next.

use super::bench::{Bench, FOREBAY, compare, source};
use super::machine::{run, stat_field, try_run};
use super::manager::Manager;
use crate::connections::broken;
use crate::support::Scratch;
use forebay_testing::{skip, wait_for};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The keeper outlives the daemon and has nothing of it but what it keeps.
#[test]
fn the_keeper_has_three_descriptors_and_a_session_of_its_own() {
    requires!("mkfs.ext4");
    let mut bench = Bench::new("keeper", 64 << 20);
    bench.serve();
    let Some(keeper) = bench.keeper() else {
        skip("the kernel's FUSE does not resend requests");
        return;
    };
    let links = || {
        let mut links: Vec<String> = fs::read_dir(format!("/proc/{keeper}/fd"))
            .unwrap()
            .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
            .map(|path| path.to_str().unwrap().split(':').next().unwrap().to_owned())
            .collect();
        links.sort();
        links
    };
    // Each of the two twice, and the lease.
    wait_for("it has the lease", || links().len() == 6);
    assert_eq!(links(), ["/dev/fuse", "/dev/fuse", "/dev/null", "socket", "socket", "socket"]);
    let session = |process: u32| stat_field(process, 3);
    assert_eq!(session(keeper), Some(keeper));
    assert_eq!(fs::read_link(format!("/proc/{keeper}/cwd")).unwrap(), Path::new("/"));
    bench.kill();
    bench.serve();
    assert_eq!(session(keeper), Some(keeper), "it is the same one");
    bench.stop();
    wait_for("it has ended", || !bench.keeper_socket().exists());
}

/// Nobody was told that a kill would not be survived any more, until an upgrade was refused.
#[test]
fn a_keeper_that_has_died_is_what_status_says() {
    requires!("mkfs.ext4");
    let mut bench = Bench::new("keeper-gone", 64 << 20);
    bench.serve();
    let Some(keeper) = bench.keeper() else {
        skip("the kernel's FUSE does not resend requests");
        return;
    };
    let control = bench.control();
    let status = || run(&[FOREBAY, "status", "--control", &control]);
    let device = bench.device.clone();
    let attached = format!("  attached: {device} (fuse)");
    let ends = ", ends with the daemon";
    let before = status();
    assert!(before.contains(&attached) && !before.contains(ends), "{before}");
    run(&["kill", "-9", &keeper.to_string()]);
    let wrong = "v: the process that keeps its block device for the next daemon has died: ";
    wait_for("it is said", || status().contains(wrong));
    assert!(status().contains(&format!("{attached}{ends}")), "{}", status());
    let said = bench.read("err");
    assert_eq!(said.matches(wrong).count(), 1, "{said}");
    assert!(said.contains("; unmount it, `forebay stop`, and serve again"), "{said}");
    let refused = try_run(&[FOREBAY, "upgrade", "--exec", FOREBAY, "--control", &control]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("fuse end with the process"), "{text}");
    run(&[FOREBAY, "stop", "--control", &control]);
    bench.wait_for_end();
    bench.serve();
    let after = status();
    assert!(after.contains("(fuse)") && !after.contains(ends) && !after.contains(wrong), "{after}");
    bench.stop();
}

/// What is left of a failed service is ended before it is started again, the keeper too.
#[test]
fn a_service_manager_that_keeps_the_connection_is_enough() {
    requires!("mkfs.ext4", "e2fsck", "bash");
    let mut bench = Bench::new("stored", 200 << 20);
    bench.manager = Some(Manager::new(bench.path("notify")));
    bench.serve();
    if bench.keeper().is_none() {
        skip("the kernel's FUSE does not resend requests");
        return;
    }
    wait_for("the connection is kept", || bench.manager.as_ref().unwrap().keeps("fuse-"));
    run(&["mkfs.ext4", "-q", &bench.device]);
    bench.mount(&bench.device, "errors=remount-ro");
    for _ in 0..3 {
        let target = bench.mount_point();
        let mut copy = Command::new("cp").args(["-r", &source(), &target]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        run(&["kill", "-9", &bench.keeper().expect("it has one").to_string()]);
        bench.kill();
        bench.serve();
        let told = bench.read("err");
        assert!(told.contains("goes on with the devices of the daemon before"), "{told}");
        assert!(copy.wait().unwrap().success());
        run(&["sync", "-f", &bench.mount_point()]);
    }
    compare(&bench);
    bench.unmount();
    run(&["e2fsck", "-f", "-n", &bench.device]);
    bench.stop();
}

/// What the manager had given for it was closed when the others were attached: it came back with another device, and its mounted one was served
/// by nobody.
#[test]
fn a_volume_whose_disk_is_late_goes_on_with_what_the_manager_keeps() {
    requires!("mkfs.ext4", "sync");
    a_disk_is_late("late", |_| ());
}

/// The manager gives that to a start alone, and an upgrade is none: the next program did not have it.
#[test]
fn a_volume_whose_disk_is_late_goes_on_behind_upgrades() {
    requires!("mkfs.ext4", "sync");
    a_disk_is_late("late-upgraded", |bench| {
        let control = bench.control();
        let upgrade =
            |to: &str| try_run(&[FOREBAY, "upgrade", "--exec", to, "--control", &control]);
        assert!(upgrade(FOREBAY).status.success());
        // This one cannot serve, and the program before goes on.
        let scratch = Scratch::new("late-upgraded");
        assert!(!upgrade(broken(&scratch).to_str().unwrap()).status.success());
        let said = bench.read("err");
        assert!(said.contains("the program before goes on"), "{said}");
    });
}

/// Its disk has not come yet when the service is started again; `then` comes before that.
fn a_disk_is_late(name: &str, then: impl FnOnce(&Bench)) {
    let mut bench = Bench::new(name, 64 << 20);
    bench.manager = Some(Manager::new(bench.path("notify")));
    fs::File::create(bench.path("more")).unwrap().set_len(64 << 20).unwrap();
    bench.more = vec!["--volume".into(), format!("w={}", bench.path("more"))];
    bench.serve();
    if bench.keeper().is_none() {
        skip("the kernel's FUSE does not resend requests");
        return;
    }
    let own = format!("fuse-{}.", bench.uuid);
    wait_for("its connection is kept", || bench.manager.as_ref().unwrap().keeps(&own));
    let out = bench.read("out");
    let device = out.lines().find_map(|line| line.strip_suffix(" w")).expect("a device").to_owned();
    run(&["mkfs.ext4", "-q", &device]);
    bench.mount(&device, "errors=remount-ro");
    let note = format!("{}/note", bench.mount_point());
    fs::write(&note, "before").unwrap();
    run(&["sync", "-f", &note]);
    bench.kill();
    // Its keeper is gone, as after the end of a service.
    let is_its = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with(&format!("{}.", bench.uuid)) && name.matches('.').count() == 2
    };
    let entries = fs::read_dir("/run/forebay").unwrap().flatten().map(|entry| entry.path());
    let is_keeper = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "keeper");
    let keeper = entries.filter(is_keeper).find(is_its).expect("its keeper");
    let (descriptor, lease) = forebay::host::keeper::take(&keeper).unwrap();
    lease.end();
    drop((descriptor, lease));

    fs::rename(bench.path("more"), bench.path("away")).unwrap();
    bench.more.clear();
    bench.serve();
    then(&bench);
    fs::rename(bench.path("away"), bench.path("more")).unwrap();
    let said = run(&[FOREBAY, "attach", "w", "--control", &bench.control()]);
    assert!(said.contains(&format!("{device} (fuse), mounted at ")), "{said}");
    assert_eq!(fs::read_to_string(&note).unwrap(), "before");
    fs::write(&note, "after").unwrap();
    run(&["sync", "-f", &note]);
    bench.unmount();
    bench.stop();
}

/// A boot without the cache: the daemon gives up and is started again, and in between the old state on the backing
/// device is nobody's to mount.
#[test]
fn a_disk_that_waits_for_its_cache_is_held_between_two_starts() {
    requires!("losetup", "bash");
    let mut bench = Bench::new("waits", 200 << 20);
    bench.manager = Some(Manager::new(bench.path("notify")));
    let disk = bench.backing_alone();
    let free = || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL;
        rustix::fs::open(&disk, flags, rustix::fs::Mode::empty())
    };
    fs::rename(bench.path("cache"), bench.path("elsewhere")).unwrap();
    assert!(free().is_ok());
    for _ in 0..2 {
        let manager = bench.manager.as_ref().unwrap();
        let given_up = manager
            .command()
            .args(["serve", "--cache", &bench.path("cache"), "--attach", "none"])
            .args(["--volume", &format!("v={disk}"), "--device-timeout", "300ms"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&given_up.stderr);
        assert!(
            !given_up.status.success() && said.contains("the cache device is not there"),
            "{said}"
        );
        assert!(manager.keeps("waits-for-its-cache"));
        assert_eq!(free().unwrap_err(), rustix::io::Errno::BUSY);
    }
    fs::rename(bench.path("elsewhere"), bench.path("cache")).unwrap();
    fs::rename(bench.path("back"), bench.path("disk")).unwrap();
    std::os::unix::fs::symlink(&disk, bench.path("back")).unwrap();
    bench.serve();
    assert!(!bench.manager.as_ref().unwrap().keeps("waits-for-its-cache"));
    bench.kill();
    bench.detach_own();

    // A loop device is known as its file, since its number is another file's the next time.
    let other = bench.path("other");
    run(&[FOREBAY, "format", &other, "--size", "64M"]);
    let file = format!("v={}", bench.path("disk"));
    let refused =
        try_run(&[FOREBAY, "serve", "--cache", &other, "--attach", "none", "--volume", &file]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("/disk: belongs to volume v of the cache"), "{said}");
}

/// Each that came and went left its mount, its keeper and three descriptors; and mounts that nobody served stayed behind an upgrade.
#[test]
fn a_detached_volume_leaves_no_mount_no_keeper_and_no_descriptor() {
    requires!();
    let mut bench = Bench::new("detached", 64 << 20);
    bench.serve();
    if bench.keeper().is_none() {
        skip("the kernel's FUSE does not resend requests");
        return;
    }
    let (daemon, control) = (bench.daemon.as_ref().unwrap().id(), bench.control());
    let uuid = bench.uuid.clone();
    let count = |place: &str| fs::read_dir(format!("/proc/{daemon}/{place}")).unwrap().count();
    let keepers = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter(|process: &u32| stat_field(*process, 1) == Some(daemon)).count()
    };
    let mounts = || {
        let all = fs::read_to_string("/proc/mounts").unwrap();
        all.lines().filter(|line| line.contains(&format!("/run/forebay/{uuid}."))).count()
    };
    let files = || {
        let all = fs::read_dir("/run/forebay").unwrap().flatten();
        all.filter(|it| it.file_name().to_string_lossy().starts_with(&format!("{uuid}."))).count()
    };
    let before = (keepers(), mounts(), files());
    let descriptors = count("fd");
    fs::File::create(bench.path("r")).unwrap().set_len(16 << 20).unwrap();
    let volume = format!("r={}", bench.path("r"));
    let attach = || run(&[FOREBAY, "attach", &volume, "--control", &control]);
    for _ in 0..3 {
        attach();
        assert_eq!(mounts(), before.1 + 1);
        run(&[FOREBAY, "detach", "r", "--control", &control]);
        assert_eq!((keepers(), mounts(), files()), before);
    }
    wait_for("their descriptors are closed", || count("fd") <= descriptors);
    attach();
    run(&[FOREBAY, "upgrade", "--exec", FOREBAY, "--control", &control]);
    run(&[FOREBAY, "detach", "r", "--control", &control]);
    assert_eq!(mounts(), before.1);
    // The last of the mount that all had at the start: there is none then, and it comes again.
    run(&[FOREBAY, "detach", "v", "--control", &control]);
    assert_eq!(mounts(), 0);
    attach();
    bench.stop();
    assert_eq!(mounts(), 0);
}
