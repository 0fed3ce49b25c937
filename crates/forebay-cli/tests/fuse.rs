// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The program with FUSE and loop devices, under file systems and tools that others wrote.
//!
//! Needs root, `/dev/fuse` and loop devices; without them each test says `SKIP` and why.
#![cfg(feature = "fuse")]
// All of it is tests, helpers too.
#![allow(clippy::unwrap_used)]

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::fs::{self, File};
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");
const WAIT_MAX: Duration = Duration::from_secs(30);

/// What stands against running on this machine.
fn obstacle(programs: &[&str]) -> Option<String> {
    if forebay::host::runtime_dir::Places::found().user_id != 0 {
        return Some("not root".into());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Some(format!("no {device}"));
        }
    }
    for program in programs {
        let found = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
            .iter()
            .any(|directory| Path::new(directory).join(program).exists());
        if !found {
            return Some(format!("no {program}"));
        }
    }
    None
}

fn has_file_system(kind: &str) -> bool {
    let _ = Command::new("modprobe").arg(kind).stderr(Stdio::null()).status();
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    known.lines().any(|line| line.split_whitespace().last() == Some(kind))
}

macro_rules! requires {
    ($($program:expr),*) => {
        if let Some(why) = obstacle(&[$($program),*]) {
            println!("SKIP {why}");
            return;
        }
    };
}

/// A command that cannot hang.
fn try_run(words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "40"]).args(words).stdin(Stdio::null());
    command.output().expect("`timeout` is there")
}

fn run(words: &[&str]) -> String {
    let output = try_run(words);
    let error = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{words:?}: {}: {error}{text}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < WAIT_MAX, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Everything a test makes, taken away at its end however it ends.
struct Bench {
    root: PathBuf,
    daemon: Option<Child>,
    uuid: String,
    device: String,
    /// What comes behind the backing device in `--volume`.
    options: String,
    /// Loop devices of the test itself.
    own: Vec<String>,
    manager: Option<Manager>,
}

/// What a service manager does for a service: it hears of it, and keeps one descriptor for its next start.
struct Manager {
    path: String,
    kept: Arc<Mutex<Option<(String, OwnedFd)>>>,
}

impl Manager {
    fn new(path: String) -> Manager {
        let socket = UnixDatagram::bind(&path).unwrap();
        let kept = Arc::default();
        let manager = Manager { path, kept: Arc::clone(&kept) };
        std::thread::spawn(move || {
            loop {
                Manager::hear(&socket, &kept);
            }
        });
        manager
    }

    /// The start of a service: its environment, and what is kept as descriptor 3.
    fn command(&self) -> Command {
        let kept = self.kept.lock().unwrap();
        let Some((name, kept)) = &*kept else {
            let mut command = Command::new(FOREBAY);
            command.env("NOTIFY_SOCKET", &self.path).stdin(Stdio::null());
            return command;
        };
        let mut command = Command::new("bash");
        let given = "exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"";
        command.args(["-c", given, "bash", FOREBAY]).stdin(kept.try_clone().unwrap());
        command.env("NOTIFY_SOCKET", &self.path).env("LISTEN_FDNAMES", name);
        command
    }

    /// One message. What it has for a barrier is closed when this is done.
    fn hear(socket: &UnixDatagram, kept: &Mutex<Option<(String, OwnedFd)>>) {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut text = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let heard = recvmsg(socket, &mut text, &mut control, flags).unwrap().bytes;
        let text = String::from_utf8_lossy(&bytes[..heard]).into_owned();
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        let says = |wanted: &str| text.lines().any(|line| line == wanted);
        let mut kept = kept.lock().unwrap();
        for message in control.drain() {
            let RecvAncillaryMessage::ScmRights(mut descriptors) = message else { continue };
            if says("FDSTORE=1") {
                *kept = Some((name.unwrap().to_owned(), descriptors.next().unwrap()));
            }
        }
        if says("FDSTOREREMOVE=1") {
            assert_eq!(kept.take().expect("it keeps one").0, name.unwrap());
        }
    }

    fn keeps(&self, name: &str) -> bool {
        self.kept.lock().unwrap().as_ref().is_some_and(|(it, _)| it.starts_with(name))
    }
}

impl Bench {
    fn new(name: &str, size_bytes: u64) -> Bench {
        Bench::with_cache(name, size_bytes, "128M")
    }

    fn with_cache(name: &str, size_bytes: u64, cache_size: &str) -> Bench {
        let memory = Path::new("/dev/shm");
        let above = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
        let root = above.join(format!("forebay-fuse-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("mnt")).unwrap();
        let (uuid, device, options) = (String::new(), String::new(), String::new());
        let (own, manager) = (Vec::new(), None);
        let bench = Bench { root, daemon: None, uuid, device, options, own, manager };
        File::create(bench.path("back")).unwrap().set_len(size_bytes).unwrap();
        run(&[FOREBAY, "format", &bench.path("cache"), "--size", cache_size]);
        bench
    }

    fn path(&self, name: &str) -> String {
        self.root.join(name).to_str().unwrap().to_owned()
    }

    fn mount_point(&self) -> String {
        self.path("mnt")
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Serves until `ready`, and learns the device.
    fn serve(&mut self) {
        let (out, err) = (self.path("out"), self.path("err"));
        let mut command = Command::new(FOREBAY);
        command.stdin(Stdio::null());
        let daemon = self
            .manager
            .as_ref()
            .map_or(command, Manager::command)
            .args(["serve", "--cache", &self.path("cache"), "--attach", "fuse"])
            .args(["--volume", &format!("v={}{}", self.path("back"), self.options)])
            .stdout(File::create(out).unwrap())
            .stderr(File::create(err).unwrap())
            .spawn()
            .unwrap();
        self.daemon = Some(daemon);
        wait_until("the daemon is ready", || {
            let ended = self.daemon.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.read("err"));
            self.read("out").lines().any(|line| line == "ready")
        });
        let out = self.read("out");
        let device = out.lines().find_map(|line| line.strip_suffix(" v")).expect("a device line");
        assert!(device.starts_with("/dev/loop"), "{out}");
        self.device = device.into();
        let control = out.lines().find_map(|line| line.strip_prefix("control: ")).unwrap();
        self.uuid = Path::new(control).file_stem().unwrap().to_str().unwrap().into();
    }

    fn signal(&self, name: &str) {
        let process_id = self.daemon.as_ref().expect("it runs").id().to_string();
        run(&["kill", name, &process_id]);
    }

    fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    fn wait_for_end(&mut self) {
        wait_until("the daemon has ended", || {
            self.daemon.as_mut().unwrap().try_wait().unwrap().is_some()
        });
        let status = self.daemon.take().unwrap().wait().unwrap();
        assert!(status.success(), "{status}: {}", self.read("err"));
    }

    fn stop(&mut self) {
        self.signal("-TERM");
        self.wait_for_end();
        assert!(!self.fuse_directory().exists());
        assert_eq!(self.loops(), Vec::<String>::new());
    }

    fn fuse_directory(&self) -> PathBuf {
        Path::new("/run/forebay").join(format!("{}.fuse", self.uuid))
    }

    fn keeper_socket(&self) -> PathBuf {
        Path::new("/run/forebay").join(format!("{}.keeper", self.uuid))
    }

    /// The process that keeps the mount's connection, a child of the daemon that made it.
    fn keeper(&self) -> Option<u32> {
        let daemon = self.daemon.as_ref().expect("it runs").id();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let mut numbers =
            processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        numbers.find(|process| stat_field(*process, 1) == Some(daemon))
    }

    fn control(&self) -> String {
        format!("/run/forebay/{}.sock", self.uuid)
    }

    fn drain_and_stop(&mut self) {
        run(&[FOREBAY, "drain", "--control", &self.control()]);
        self.stop();
    }

    /// Loop devices over files of the cache's mount or of this test.
    fn loops(&self) -> Vec<String> {
        forebay::host::machine::Host::default()
            .loops()
            .into_iter()
            .filter(|it| {
                it.backing_file.starts_with(self.fuse_directory())
                    || it.backing_file.starts_with(&self.root)
            })
            .map(|it| format!("/dev/{}", it.node.name))
            .collect()
    }

    fn mount(&self, device: &str, options: &str) {
        run(&["mount", "-o", options, device, &self.mount_point()]);
    }

    fn unmount(&self) {
        run(&["umount", &self.mount_point()]);
    }

    /// A loop device over the backing file alone.
    fn backing_alone(&mut self) -> String {
        let device = run(&["losetup", "-f", "--show", "-P", &self.path("back")]);
        self.own.push(device.trim().into());
        device.trim().into()
    }

    fn detach_own(&mut self) {
        for device in std::mem::take(&mut self.own) {
            run(&["losetup", "-d", &device]);
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon said:\n{}", self.read("err"));
        }
        try_run(&["umount", "-l", &self.mount_point()]);
        if let Some(mut daemon) = self.daemon.take() {
            // Best effort: it may have ended by itself.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // What waits for a daemon would wait for ever.
        if let Ok((_, lease)) = forebay::host::keeper::take(&self.keeper_socket()) {
            lease.end();
        }
        for device in self.loops() {
            try_run(&["losetup", "-d", &device]);
        }
        if !self.uuid.is_empty() {
            let directory = self.fuse_directory();
            try_run(&["umount", "-l", directory.to_str().unwrap()]);
            let _ = fs::remove_dir(directory);
            let _ = fs::remove_file(self.control());
            let _ = fs::remove_file(self.keeper_socket());
            let _ = fs::remove_file(format!("/run/forebay/{}.buffers", self.uuid));
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn source() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_str().unwrap().to_owned()
}

fn compare(bench: &Bench) {
    run(&["diff", "-r", &source(), &format!("{}/crates", bench.mount_point())]);
}

/// A load on a mounted file system that verifies what it wrote, again and again until told to end.
struct Verify {
    child: Child,
    errors: String,
    enough: String,
}

impl Verify {
    fn begin(bench: &Bench) -> Verify {
        let (file, enough) = (format!("{}/fio", bench.mount_point()), bench.path("enough"));
        let errors = bench.path("fio.err");
        let script = format!(
            "until [ -e {enough} ]; do timeout -s KILL 120 fio --name=v --filename={file} --direct=1 --ioengine=libaio \
             --iodepth=16 --rw=randwrite --bs=4k --size=8m --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_state_save=0 \
             --output={errors}.out >/dev/null 2>>{errors} || exit; done"
        );
        let mut command = Command::new("bash");
        command.args(["-c", &script]).stdin(Stdio::null());
        Verify { child: command.spawn().unwrap(), errors, enough }
    }

    fn still_works(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}: {}", self.said());
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    fn end(mut self) {
        File::create(&self.enough).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.said());
        assert_eq!(self.said(), "");
        fs::remove_file(&self.enough).unwrap();
    }
}

/// How often the daemon is killed under each file system.
fn kill_count() -> u32 {
    std::env::var("FOREBAY_KILLS").map_or(5, |text| text.parse().expect("a number"))
}

/// mkfs, a load, kill -9 again and again with nothing unmounted, fsck, compare; drained, the
/// backing device alone.
fn file_system_survives(kind: &str, make: &[&str], check: &[&str]) {
    if !has_file_system(kind) {
        println!("SKIP the kernel has no {kind}");
        return;
    }
    let mut bench = Bench::new(kind, 400 << 20);
    bench.serve();
    if bench.read("err").contains("will not outlive this process") {
        println!("SKIP the kernel's FUSE does not resend requests");
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
    wait_until("the keeper has ended", || !bench.keeper_socket().exists());
    let device = bench.backing_alone();
    run(&[check, &[&device]].concat());
    bench.mount(&device, "ro");
    compare(&bench);
    bench.unmount();
    bench.detach_own();
}

/// Without its keeper a device is lost with the daemon; what was on it is not.
#[test]
fn a_kill_of_daemon_and_keeper_is_survived_by_a_new_mount() {
    requires!("mkfs.ext4", "e2fsck");
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

/// What is left of a failed service is ended before it is started again, the keeper too.
#[test]
fn a_service_manager_that_keeps_the_connection_is_enough() {
    requires!("mkfs.ext4", "e2fsck", "bash");
    let mut bench = Bench::new("stored", 200 << 20);
    bench.manager = Some(Manager::new(bench.path("notify")));
    bench.serve();
    if bench.keeper().is_none() {
        println!("SKIP the kernel's FUSE does not resend requests");
        return;
    }
    wait_until("the connection is kept", || bench.manager.as_ref().unwrap().keeps("fuse-"));
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

/// The keeper outlives the daemon and has nothing of it but what it keeps.
#[test]
fn the_keeper_has_three_descriptors_and_a_session_of_its_own() {
    requires!("mkfs.ext4");
    let mut bench = Bench::new("keeper", 64 << 20);
    bench.serve();
    let Some(keeper) = bench.keeper() else {
        println!("SKIP the kernel's FUSE does not resend requests");
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
    wait_until("it has the lease", || links().len() == 6);
    assert_eq!(links(), ["/dev/fuse", "/dev/fuse", "/dev/null", "socket", "socket", "socket"]);
    let session = |process: u32| stat_field(process, 3);
    assert_eq!(session(keeper), Some(keeper));
    assert_eq!(fs::read_link(format!("/proc/{keeper}/cwd")).unwrap(), Path::new("/"));
    bench.kill();
    bench.serve();
    assert_eq!(session(keeper), Some(keeper), "it is the same one");
    bench.stop();
    wait_until("it has ended", || !bench.keeper_socket().exists());
}

/// A stop that does not wait leaves the device to the next daemon.
#[test]
fn a_device_that_is_held_over_a_stop_is_there_again_after_it() {
    requires!("mkfs.ext4", "e2fsck");
    let mut bench = Bench::new("held", 200 << 20);
    bench.serve();
    if bench.keeper().is_none() {
        println!("SKIP the kernel's FUSE does not resend requests");
        return;
    }
    let device = bench.device.clone();
    run(&["mkfs.ext4", "-q", &device]);
    bench.mount(&device, "defaults");
    let verify = Verify::begin(&bench);
    bench.signal("-TERM");
    wait_until("the holder is named", || {
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

/// Of `/proc/PID/stat`, the number so many behind the state.
fn stat_field(process: u32, at: usize) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(at)?.parse().ok()
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
    file_system_survives("btrfs", &["mkfs.btrfs", "-q"], &["btrfs", "check", "--readonly"]);
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
    // The kernel sees behind the volume what it sees on the backing device.
    assert_eq!(found, known);
    match found[..] {
        [] => println!("SKIP the kernel knows no GPT (CONFIG_EFI_PARTITION)"),
        _ => assert_eq!(found[0], (16 << 20) / 512),
    }
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
                command.args(["-s", "KILL", "40", "dd", "bs=4M", "count=1", "conv=notrunc", flag]);
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
fn stop_waits_for_those_it_names_and_serves_them() {
    requires!("mkfs.ext4");
    let mut bench = Bench::new("stop", 64 << 20);
    bench.serve();
    run(&["mkfs.ext4", "-q", &bench.device]);
    bench.mount(&bench.device, "defaults");
    bench.signal("-TERM");
    let holder = format!("{}: mounted at {} (ext4)", bench.device, bench.mount_point());
    wait_until("the holder is named", || bench.read("err").contains(&holder));
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
    wait_until("the holder is named", || bench.read("err").contains(&holder));
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
    wait_until("the holder is named", || bench.read("err").contains("stop waits for "));
    // Its log lies behind that.
    let daemon = bench.daemon.as_ref().unwrap().id().to_string();
    run(&["prlimit", "--pid", &daemon, "--fsize=65536"]);
    for _ in 0..2 {
        let read = ["dd", &from, "of=/dev/null", "bs=4096", "skip=512", "count=1", "iflag=direct"];
        run(&read);
    }
    let has_failed = || bench.read("err").contains("the cache device has failed");
    wait_until("the cache fails", has_failed);
    run(&write);
    let upgrade = try_run(&[FOREBAY, "upgrade", "--exec", FOREBAY, "--control", &control]);
    let said = String::from_utf8_lossy(&upgrade.stderr).into_owned();
    assert!(said.contains("the daemon is being stopped"), "{said}");
    drop(held);
    wait_until("the daemon has ended", || {
        bench.daemon.as_mut().unwrap().try_wait().unwrap().is_some()
    });
    let said = bench.read("err");
    assert!(said.contains("v: the cache is left out") && said.contains("is detached"), "{said}");
}

/// Who detached ours and made another device of its number lost that at the next stop.
#[test]
fn a_loop_device_that_is_somebody_elses_by_now_is_left_alone() {
    requires!("losetup");
    let mut bench = Bench::new("others", 64 << 20);
    bench.serve();
    let (device, other) = (bench.device.clone(), bench.path("other"));
    File::create(&other).unwrap().set_len(1 << 20).unwrap();
    run(&["losetup", "-d", &device]);
    let taken = try_run(&["losetup", &device, &other]);
    if !taken.status.success() {
        println!("SKIP {device} was taken by a test beside this one");
        return;
    }
    bench.own.push(device.clone());
    bench.signal("-TERM");
    bench.wait_for_end();
    let shown = run(&["losetup", "-n", "-O", "BACK-FILE", &device]);
    assert_eq!(shown.trim(), other);
    bench.detach_own();
}

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
        run(&["sync"]);
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

fn status(bench: &Bench) -> serde_json::Value {
    let text = run(&[FOREBAY, "status", "--json", "--control", &bench.control()]);
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["volumes"][0].clone()
}

/// Files are written, flushed, renamed and removed until `ends`.
fn churn(directory: PathBuf, ends: &std::sync::atomic::AtomicBool) {
    let mut round = 0usize;
    while !ends.load(std::sync::atomic::Ordering::Relaxed) {
        let (new, kept) = (directory.join("new"), directory.join(format!("{}", round % 13)));
        let bytes = vec![round as u8; 4096 + round * 7919 % (768 << 10)];
        fs::write(&new, bytes).unwrap();
        if !round.is_multiple_of(3) {
            File::open(&new).unwrap().sync_all().unwrap();
        }
        fs::rename(new, kept).unwrap();
        if round.is_multiple_of(5) {
            let _ = fs::remove_file(directory.join(format!("{}", round * 3 % 13)));
        }
        round += 1;
    }
}

/// The cache is thrown away at moments of chance under a file system: what the backing device alone holds is
/// repaired as after a power cut, without a question: always with `strict`; with `batch` where no batch was in
/// flight, else the daemon names the blocks.
fn a_lost_cache(order: &str) {
    requires!("mkfs.ext4", "e2fsck");
    let moments = std::env::var("FOREBAY_LOST").ok().and_then(|it| it.parse().ok()).unwrap_or(5);
    let mut bench = Bench::new(&format!("lost-{order}"), 64 << 20);
    bench.options = format!(",order={order}");
    bench.serve();
    run(&["mkfs.ext4", "-q", "-F", &bench.device]);
    run(&[FOREBAY, "drain", "--control", &bench.control()]);
    run(&[FOREBAY, "set", "v", "mode=write-back", "--control", &bench.control()]);
    bench.mount(&bench.device, "defaults");
    let ends = std::sync::atomic::AtomicBool::new(false);
    let (mut between, mut within) = (0, 0);
    std::thread::scope(|scope| {
        let directory = PathBuf::from(bench.mount_point());
        scope.spawn(|| churn(directory, &ends));
        let begun = Instant::now();
        while between < moments && begun.elapsed() < moments * WAIT_MAX {
            std::thread::sleep(Duration::from_millis(37 * u64::from(1 + (between + within) % 7)));
            let before = status(&bench);
            bench.signal("-STOP");
            fs::copy(bench.path("back"), bench.path("alone")).unwrap();
            bench.signal("-CONT");
            let after = status(&bench);
            let is_quiet = after["exposed_first_block"].is_null()
                && before["exposed_seconds"] == after["exposed_seconds"];
            within += u32::from(!is_quiet);
            if !is_quiet && order == "batch" {
                continue;
            }
            between += 1;
            let checked = try_run(&["e2fsck", "-fp", &bench.path("alone")]);
            let text = String::from_utf8_lossy(&checked.stdout).into_owned();
            let clean = checked.status.code().is_some_and(|code| code <= 1);
            if !clean {
                ends.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            assert!(clean, "{order}, moment {between}: {text}");
        }
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let written = status(&bench)["backing_bytes_written"].as_u64().unwrap();
    bench.unmount();
    bench.drain_and_stop();
    println!(
        "{order}: {between} moments looked at, {within} within a batch; {written} bytes were written back"
    );
    assert!(between >= moments, "{between} moments");
    assert!(written > 0, "nothing was ever written back");
}

#[test]
fn a_file_system_is_whole_without_its_cache_at_any_moment_if_order_is_strict() {
    a_lost_cache("strict");
}

#[test]
fn a_file_system_is_whole_without_its_cache_between_batches() {
    a_lost_cache("batch");
}

/// A field of `/proc/PID/status` in KiB.
fn memory_kib(process: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    value.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

/// A volume's size costs neither memory nor, where it is discarded or zeroed, time.
#[test]
fn a_volume_of_sixteen_tebibytes_is_formatted_and_discarded_within_the_memory_told() {
    requires!("mkfs.ext4", "mkfs.xfs", "blkdiscard");
    let mut bench = Bench::with_cache("huge", 16 << 40, "1G");
    bench.serve();
    let daemon = bench.daemon.as_ref().unwrap().id();
    // Each within the time that any command of these tests has.
    run(&["mkfs.ext4", "-q", &bench.device]);
    run(&["blkdiscard", &bench.device]);
    run(&["mkfs.xfs", "-q", "-f", &bench.device]);
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
