// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block device itself: its sectors, its partitions, requests of any length, and its number.

use super::bench::{Bench, FOREBAY};
use super::machine::{run, try_run};
use forebay_testing::wait_for;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Stdio};

#[test]
fn sectors_tail_discards_and_zeroes_are_exact() {
    requires!("blkdiscard", "mkfs.ext4", "fstrim");
    let size_bytes = (48 << 20) + 512;
    let mut bench = Bench::new("tail", size_bytes);
    bench.serve();
    let device = File::options().read(true).write(true).open(&bench.device).unwrap();
    let read = |at: u64, length: usize| {
        run(&["blockdev", "--flushbufs", &bench.device]);
        let mut bytes = vec![9; length];
        device.read_exact_at(&mut bytes, at).unwrap();
        bytes
    };
    assert_eq!(run(&["blockdev", "--getsize64", &bench.device]).trim(), size_bytes.to_string());
    device.write_all_at(&[7; 512], size_bytes - 512).unwrap();
    device.write_all_at(&[5; 3 * 512], 4096 + 512).unwrap();
    device.write_all_at(&[6; 1 << 20], 8 << 20).unwrap();
    device.sync_all().unwrap();
    assert_eq!(read(size_bytes - 512, 512), [7; 512]);
    assert_eq!(read(4096 + 512, 1536), [5; 1536]);
    assert_eq!(read(4096, 512), [0; 512]);
    // Zeroes with sector edges, then a hole of whole blocks.
    let zero = ["blkdiscard", "-z", "-o", "8389120", "-l", "1024", &bench.device];
    run(&zero);
    assert_eq!(read((8 << 20) + 512, 1024), [0; 1024]);
    assert_eq!(read(8 << 20, 512), [6; 512]);
    assert_eq!(read((8 << 20) + 1536, 512), [6; 512]);
    run(&["blkdiscard", "-o", "8392704", "-l", "8192", &bench.device]);
    assert_eq!(read((8 << 20) + 4096, 8192), vec![0; 8192]);
    assert_eq!(read((8 << 20) + 3584, 512), [6; 512]);
    drop(device);
    bench.drain_and_stop();
    let mut backing = Vec::new();
    File::open(bench.path("back")).unwrap().read_to_end(&mut backing).unwrap();
    assert_eq!(backing.len() as u64, size_bytes);
    assert_eq!(backing[backing.len() - 512..], [7; 512]);
    assert_eq!(backing[(8 << 20) + 4096..][..8192], vec![0; 8192]);
    assert_eq!(backing[4608..][..1536], [5; 1536]);
    bench.serve();
    run(&["mkfs.ext4", "-q", "-F", &bench.device]);
    bench.mount(&bench.device, "defaults");
    run(&["fstrim", &bench.mount_point()]);
    bench.unmount();
    bench.stop();
}

/// The loop driver asks for a hole where a file system wants zeros. On a file that has none each was left undone, and once it had
/// left the cache the old content was there again. It is asked for no holes now.
#[test]
fn zeros_are_written_where_the_backing_file_has_no_holes() {
    requires!("mount", "fallocate");
    let mut bench = Bench::new("no-holes", 48 << 20);
    let old = vec![0x55; 48 << 20];
    let mounted = Mounted::ramfs(&bench.path("plain"));
    fs::write(bench.path("plain/back"), &old).unwrap();
    fs::remove_file(bench.path("back")).unwrap();
    std::os::unix::fs::symlink(bench.path("plain/back"), bench.path("back")).unwrap();
    bench.serve();
    let end = (8 << 20).to_string();
    run(&["blkdiscard", "-z", "-o", "4096", "-l", &end, &bench.device]);
    for refused in [
        &["fallocate", "--punch-hole", "-l", &end, &bench.device][..],
        &["blkdiscard", &bench.device],
    ] {
        assert!(!try_run(refused).status.success(), "it gives no room back");
    }
    bench.drain_and_stop();
    let found = fs::read(bench.path("plain/back")).unwrap();
    let (zeros, rest) = found[4096..].split_at(8 << 20);
    assert!(zeros.iter().all(|byte| *byte == 0));
    assert!(found[..4096] == old[..4096] && *rest == old[4096 + (8 << 20)..]);
    drop(mounted);
}

/// The loop driver asks for a hole where its users discard and where they zero: it is zeros, and yet gives room back.
#[test]
fn a_sparse_file_gets_its_room_back_from_a_discard() {
    requires!("blkdiscard");
    let mut bench = Bench::new("room", 64 << 20);
    bench.serve();
    let device = File::options().write(true).open(&bench.device).unwrap();
    device.write_all_at(&vec![7; 16 << 20], 16 << 20).unwrap();
    device.sync_all().unwrap();
    drop(device);
    bench.drain_and_stop();
    let back = bench.path("back");
    let room = || fs::metadata(&back).unwrap().blocks() * 512;
    let written = room();
    assert!(written >= 16 << 20, "{written} bytes");
    bench.serve();
    run(&["blkdiscard", "-o", "16777216", "-l", "12582912", &bench.device]);
    bench.drain_and_stop();
    let bytes = fs::read(&back).unwrap();
    let (zeros, data) = bytes[16 << 20..32 << 20].split_at(12 << 20);
    assert!(zeros.iter().all(|byte| *byte == 0) && data.iter().all(|byte| *byte == 7));
    assert!(room() + (12 << 20) <= written, "{} bytes of {written}", room());
}

/// A file system of its own.
struct Mounted(String);

impl Mounted {
    fn ramfs(at: &str) -> Mounted {
        fs::create_dir(at).unwrap();
        run(&["mount", "-t", "ramfs", "none", at]);
        Mounted(at.into())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = try_run(&["umount", &self.0]);
    }
}

/// More at once than there is memory for, and than the kernel hands over at once.
#[test]
fn many_long_requests_at_once_are_all_done_and_right() {
    requires!("dd", "cmp");
    const PIECE_COUNT: u64 = 24;
    let mut bench = Bench::new("many", PIECE_COUNT * (4 << 20));
    bench.serve();
    let (pattern, back) = (bench.path("pattern"), bench.path("read"));
    let all = format!("count={}", PIECE_COUNT * 4);
    run(&["dd", "if=/dev/urandom", &format!("of={pattern}"), "bs=1M", &all]);
    let at_once = |from: &str, to: &str, flag: &str| {
        let pieces: Vec<Child> = (0..PIECE_COUNT)
            .map(|at| {
                let mut command = Command::new("timeout");
                command.args(["-s", "KILL", "120", "dd", "bs=4M", "count=1", "conv=notrunc", flag]);
                command.args([format!("if={from}"), format!("of={to}")]);
                command.args([format!("skip={at}"), format!("seek={at}")]);
                command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
            })
            .collect();
        for mut piece in pieces {
            assert!(piece.wait().unwrap().success());
        }
    };
    at_once(&pattern, &bench.device, "oflag=direct");
    at_once(&bench.device, &back, "iflag=direct");
    run(&["cmp", &pattern, &back]);
    // The file is read through the page cache, at any place.
    let file = bench.fuse_directory().join("v");
    run(&["cmp", &pattern, file.to_str().unwrap()]);
    let odd = ["-n", "123457", "-i", "4097:4097"];
    run(&[&["cmp"], &odd[..], &[&pattern, file.to_str().unwrap()]].concat());
    bench.stop();
}

#[test]
fn partitions_are_seen_when_a_volume_is_attached() {
    requires!("sgdisk", "losetup");
    let mut bench = Bench::new("gpt", 64 << 20);
    bench.serve();
    run(&["sgdisk", "-n", "1:2048:+16M", "-n", "2:0:0", &bench.device]);
    bench.drain_and_stop();
    let plain = bench.backing_alone();
    let known = partition_sizes(&plain);
    bench.detach_own();
    bench.serve();
    let found = partition_sizes(&bench.device);
    assert!(run(&["sgdisk", "-p", &bench.device]).contains("16.0 MiB"));
    bench.stop();
    // The kernel sees behind the volume what it sees on the backing device: nothing, if it knows no GPT (CONFIG_EFI_PARTITION). That of
    // the guest machine does (`fuse.sh`).
    assert_eq!(found, known);
    assert!(found.first().is_none_or(|sectors| *sectors == (16 << 20) / 512), "{found:?}");
}

/// Sectors of the partitions that the kernel has found.
fn partition_sizes(device: &str) -> Vec<u64> {
    let name = device.strip_prefix("/dev/").unwrap();
    let size = |part: &str| {
        let size = fs::read_to_string(format!("/sys/class/block/{name}{part}/size")).ok()?;
        size.trim().parse().ok()
    };
    ["p1", "p2"].into_iter().filter_map(size).collect()
}

/// Serves, and has the number of the volume's loop device be another file's. Gives it.
fn taken_by(bench: &mut Bench, other: &str) -> String {
    // A test beside this one may be given the number.
    let device = (0..20).find_map(|_| {
        bench.serve();
        let device = bench.device.clone();
        run(&["losetup", "-d", &device]);
        if try_run(&["losetup", &device, other]).status.success() {
            return Some(device);
        }
        bench.signal("-TERM");
        bench.wait_for_end();
        None
    });
    let device = device.expect("a number that nobody else takes");
    bench.own.push(device.clone());
    device
}

/// Who detached ours and made another device of its number lost that at the next stop.
#[test]
fn a_loop_device_that_is_somebody_elses_by_now_is_left_alone() {
    requires!("losetup");
    let mut bench = Bench::new("others", 64 << 20);
    let other = bench.path("other");
    File::create(&other).unwrap().set_len(1 << 20).unwrap();
    let device = taken_by(&mut bench, &other);
    bench.signal("-TERM");
    bench.wait_for_end();
    let shown = run(&["losetup", "-n", "-O", "BACK-FILE", &device]);
    assert_eq!(shown.trim(), other);
    bench.detach_own();
}

/// `status` told the stranger's mount as the volume's, and `detach` was refused because of it.
#[test]
fn a_loop_device_that_is_somebody_elses_by_now_is_none_of_the_volume() {
    requires!("losetup", "mkfs.ext4");
    let mut bench = Bench::new("taken", 64 << 20);
    let other = bench.path("other");
    File::create(&other).unwrap().set_len(64 << 20).unwrap();
    run(&["mkfs.ext4", "-q", &other]);
    let device = taken_by(&mut bench, &other);
    bench.mount(&device, "rw");
    let control = bench.control();
    let status = || run(&[FOREBAY, "status", "--control", &control]);
    wait_for("that it is told", || status().contains("v: somebody has detached its loop device"));
    assert!(!status().contains("mounted at"), "{}", status());
    let detached = run(&[FOREBAY, "detach", "v", "--control", &control]);
    assert!(detached.contains("v: detached; "), "{detached}");
    let volume = format!("v={}", bench.path("back"));
    run(&[FOREBAY, "attach", &volume, "--control", &control]);
    wait_for("its own device", || status().contains("/dev/loop"));
    assert!(!status().contains("mounted at"), "{}", status());
    bench.unmount();
    bench.signal("-TERM");
    bench.wait_for_end();
    bench.detach_own();
}

/// Such a disk can be opened for writing, so guests were answered what could never be written back.
#[test]
fn a_read_only_disk_is_no_backing_device_and_no_cache() {
    requires!("losetup");
    let mut bench = Bench::new("read-only", 64 << 20);
    let device = run(&["losetup", "-r", "-f", "--show", &bench.path("back")]).trim().to_owned();
    bench.own.push(device.clone());
    let (cache, volume) = (bench.path("cache"), format!("v={device}"));
    let serve = [FOREBAY, "serve", "--cache", &cache, "--attach", "none", "--volume", &volume];
    for words in [&[&["timeout", "20"], &serve[..]].concat()[..], &[FOREBAY, "format", &device]] {
        let done = try_run(words);
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("{device}: is a read-only block device")), "{said}");
    }
    bench.detach_own();
}
