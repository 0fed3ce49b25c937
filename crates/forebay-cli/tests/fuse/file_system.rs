// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File systems stay mounted while the daemon is killed, and are whole on the backing device alone.

use super::bench::{Bench, FOREBAY, compare, source};
use super::machine::{has_file_system, memory_kib, run, stat_field};
use super::verify::Verify;
use forebay_testing::{skip, wait_for};
use std::fs;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the daemon is killed under each file system.
fn kill_count() -> u32 {
    std::env::var("FOREBAY_KILLS").map_or(5, |text| text.parse().expect("a number"))
}

/// mkfs, a load, kill -9 again and again with nothing unmounted, fsck, compare; drained, the
/// backing device alone.
fn file_system_survives(kind: &str, make: &[&str], check: &[&str]) {
    if !has_file_system(kind) {
        skip(&format!("the kernel has no {kind}"));
        return;
    }
    let mut bench = Bench::new(kind, 400 << 20);
    bench.serve();
    if bench.read("err").contains("will not outlive this process") {
        skip("the kernel's FUSE does not resend requests");
        return;
    }
    let device = bench.device.clone();
    run(&[make, &[&device]].concat());
    bench.mount(&device, "defaults");
    run(&["cp", "-r", &source(), &bench.mount_point()]);
    let status = run(&[FOREBAY, "status", "--control", &bench.control()]);
    assert!(status.contains(&format!("{device} (fuse), mounted at {}", bench.mount_point())));
    let mut verify = Verify::begin(&bench);
    for _ in 0..kill_count() {
        std::thread::sleep(Duration::from_millis(300));
        verify.still_works();
        bench.kill();
        bench.serve();
        assert_eq!(bench.device, device);
        let told = bench.read("err");
        assert!(told.contains("goes on with the devices of the daemon before"), "{told}");
    }
    verify.end();
    let fio = fs::read_to_string(bench.path("fio.err.out")).unwrap();
    assert!(fio.contains("err= 0"), "{fio}");
    compare(&bench);
    run(&["sync", "-f", &bench.mount_point()]);
    bench.unmount();
    run(&[check, &[&device]].concat());
    bench.mount(&device, "ro");
    compare(&bench);
    bench.unmount();
    bench.drain_and_stop();
    wait_for("the keeper has ended", || !bench.keeper_socket().exists());
    let device = bench.backing_alone();
    run(&[check, &[&device]].concat());
    bench.mount(&device, "ro");
    compare(&bench);
    bench.unmount();
    bench.detach_own();
}

#[test]
fn ext4_stays_mounted_over_kills_and_is_whole_on_the_backing_device() {
    requires!("mkfs.ext4", "e2fsck", "losetup", "fio");
    file_system_survives("ext4", &["mkfs.ext4", "-q"], &["e2fsck", "-f", "-n"]);
}

#[test]
fn xfs_stays_mounted_over_kills_and_is_whole_on_the_backing_device() {
    requires!("mkfs.xfs", "xfs_repair", "losetup", "fio");
    file_system_survives("xfs", &["mkfs.xfs", "-q"], &["xfs_repair", "-n"]);
}

#[test]
fn btrfs_stays_mounted_over_kills_and_is_whole_on_the_backing_device() {
    requires!("mkfs.btrfs", "btrfs", "losetup", "fio");
    let _alone = no_other_dead_mount();
    file_system_survives("btrfs", &["mkfs.btrfs", "-q"], &["btrfs", "check", "--readonly"]);
}

/// Where a mount is dead, mkfs.btrfs has no device at all: it asks each mounted loop device for its file.
static DEAD_MOUNT: Mutex<()> = Mutex::new(());

fn no_other_dead_mount() -> MutexGuard<'static, ()> {
    // Whoever failed has taken his mount away.
    DEAD_MOUNT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Without its keeper a device is lost with the daemon; what was on it is not.
#[test]
fn a_kill_of_daemon_and_keeper_is_survived_by_a_new_mount() {
    requires!("mkfs.ext4", "e2fsck");
    let _alone = no_other_dead_mount();
    let mut bench = Bench::new("unkept", 200 << 20);
    bench.serve();
    run(&["mkfs.ext4", "-q", &bench.device]);
    bench.mount(&bench.device, "defaults");
    run(&["cp", "-r", &source(), &bench.mount_point()]);
    run(&["sync", "-f", &bench.mount_point()]);
    match bench.keeper() {
        Some(keeper) => drop(run(&["kill", "-9", &keeper.to_string()])),
        None => assert!(bench.read("err").contains("will not outlive this process")),
    }
    bench.kill();
    // Served again while the dead file system is still mounted: it is named.
    bench.serve();
    let told = bench.read("err");
    assert!(told.contains(&format!("umount {}", bench.mount_point())), "{told}");
    bench.unmount();
    // Once for the journal.
    bench.mount(&bench.device, "defaults");
    bench.unmount();
    run(&["e2fsck", "-f", "-n", &bench.device]);
    bench.mount(&bench.device, "ro");
    compare(&bench);
    bench.unmount();
    bench.stop();
}

/// What the daemon was asked for, and took, until now.
#[derive(Debug)]
struct Cost {
    discards: u64,
    written_bytes: u64,
    log_bytes: u64,
    /// Of its threads, in hundredths of a second: who else wants the processor does not count.
    processor_ticks: u64,
}

impl Cost {
    fn now(bench: &Bench) -> Cost {
        let status = run(&[FOREBAY, "status", "--json", "--control", &bench.control()]);
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let of = |name: &str| status["volumes"][0][name].as_u64().unwrap();
        let daemon = bench.daemon.as_ref().unwrap().id();
        let ticks = |at| u64::from(stat_field(daemon, at).unwrap());
        Cost {
            discards: of("discards"),
            written_bytes: of("written_bytes"),
            log_bytes: of("cache_bytes_written"),
            processor_ticks: ticks(11) + ticks(12),
        }
    }

    fn until(&self, later: &Cost) -> Cost {
        Cost {
            discards: later.discards - self.discards,
            written_bytes: later.written_bytes - self.written_bytes,
            log_bytes: later.log_bytes - self.log_bytes,
            processor_ticks: later.processor_ticks - self.processor_ticks,
        }
    }
}

/// As the kernel splits them.
fn discard_bytes_max(bench: &Bench) -> u64 {
    let name = bench.device.strip_prefix("/dev/").unwrap();
    let path = format!("/sys/block/{name}/queue/discard_max_bytes");
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// A volume's size costs neither memory nor, where it is discarded or zeroed, time.
#[test]
fn a_volume_of_sixteen_tebibytes_is_formatted_and_discarded_within_the_memory_told() {
    requires!("mkfs.ext4", "mkfs.xfs", "blkdiscard");
    let mut bench = Bench::with_cache("huge", 16 << 40, "1G");
    bench.serve();
    let daemon = bench.daemon.as_ref().unwrap().id();
    // Each within the time that any command of these tests has.
    let timed = |words: &[&str]| {
        let (before, begun) = (Cost::now(&bench), Instant::now());
        run(&[words, &[bench.device.as_str()]].concat());
        let (took, told) = (begun.elapsed().as_secs_f64(), "of 16 TiB before 1 GiB of cache");
        let cost = before.until(&Cost::now(&bench));
        // Past the test harness, which would keep it to itself.
        let _ = writeln!(std::io::stderr(), "NOTE {} {told}: {took:.2} s, {cost:?}", words[0]);
        // What went by the byte would be GiB of log, and minutes of a processor; the kernel asks for discards of 4 GiB.
        assert!(cost.log_bytes <= cost.written_bytes * 5 / 4 + 4096 * cost.discards, "{cost:?}");
        assert!(cost.discards <= 2 * (16 << 40) / discard_bytes_max(&bench) + 1000, "{cost:?}");
        assert!(cost.processor_ticks <= 1000, "{cost:?}");
    };
    timed(&["mkfs.ext4", "-q"]);
    timed(&["blkdiscard"]);
    timed(&["mkfs.xfs", "-q", "-f"]);
    bench.mount(&bench.device, "nouuid");
    fs::write(bench.root.join("mnt/file"), vec![7; 3 << 20]).unwrap();
    bench.unmount();
    let status = run(&[FOREBAY, "status", "--json", "--control", &bench.control()]);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let parts = status["memory"].as_array().unwrap();
    let told: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    let most = memory_kib(daemon, "VmHWM") << 10;
    println!("{} MiB resident at most, {} MiB told", most >> 20, told >> 20);
    assert!(most <= told + (16 << 20), "{most} bytes resident of {told} told");
    bench.drain_and_stop();
    let alone = bench.backing_alone();
    bench.mount(&alone, "nouuid");
    assert_eq!(fs::read(bench.root.join("mnt/file")).unwrap(), vec![7; 3 << 20]);
    bench.unmount();
    bench.detach_own();
}
