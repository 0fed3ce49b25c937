// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache, a backing file, a daemon that serves them by FUSE and a loop device, and a place to mount it.

use super::machine::{run, stat_field, try_run};
use super::manager::Manager;
use crate::support::{driven, pause};
use forebay_testing::wait_for;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

pub const FOREBAY: &str = env!("CARGO_BIN_EXE_forebay");

/// Everything a test makes, taken away at its end however it ends.
pub struct Bench {
    pub root: PathBuf,
    pub daemon: Option<Child>,
    pub uuid: String,
    pub device: String,
    /// What comes behind the backing device in `--volume`.
    pub options: String,
    /// What `serve` is told besides.
    pub more: Vec<String>,
    /// Loop devices of the test itself.
    pub own: Vec<String>,
    pub manager: Option<Manager>,
}

impl Bench {
    pub fn new(name: &str, size_bytes: u64) -> Bench {
        Bench::with_cache(name, size_bytes, "128M")
    }

    pub fn with_cache(name: &str, size_bytes: u64, cache_size: &str) -> Bench {
        let memory = Path::new("/dev/shm");
        let above = if memory.is_dir() { memory.into() } else { std::env::temp_dir() };
        let root = above.join(format!("forebay-fuse-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("mnt")).unwrap();
        let (uuid, device, options) = (String::new(), String::new(), String::new());
        let (more, own, manager) = (Vec::new(), Vec::new(), None);
        let bench = Bench { root, daemon: None, uuid, device, options, more, own, manager };
        File::create(bench.path("back")).unwrap().set_len(size_bytes).unwrap();
        run(&[FOREBAY, "format", &bench.path("cache"), "--size", cache_size]);
        bench
    }

    pub fn path(&self, name: &str) -> String {
        self.root.join(name).to_str().unwrap().to_owned()
    }

    pub fn mount_point(&self) -> String {
        self.path("mnt")
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Serves until `ready`, and learns the device.
    pub fn serve(&mut self) {
        let volume = format!("v={}{}", self.path("back"), self.options);
        self.serve_some(&["--volume", &volume]);
        let out = self.read("out");
        let device = out.lines().find_map(|line| line.strip_suffix(" v")).expect("a device line");
        assert!(device.starts_with("/dev/loop"), "{out}");
        self.device = device.into();
    }

    /// The same, of what is recorded and these; a disk may be late.
    pub fn serve_some(&mut self, volumes: &[&str]) {
        let (out, err) = (self.path("out"), self.path("err"));
        let mut command = Command::new(FOREBAY);
        command.stdin(Stdio::null());
        let mut command = self.manager.as_ref().map_or(command, Manager::command);
        command
            .args(["serve", "--cache", &self.path("cache"), "--attach", "fuse"])
            .args(volumes)
            .args(&self.more)
            .stdout(File::create(out).unwrap())
            .stderr(File::create(err).unwrap());
        driven(&mut command);
        self.daemon = Some(command.spawn().unwrap());
        // It has a copy of what the manager keeps.
        drop(command);
        wait_for("the daemon is ready", || {
            let ended = self.daemon.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", self.read("err"));
            self.read("out").lines().any(|line| line == "ready")
        });
        let out = self.read("out");
        let control = out.lines().find_map(|line| line.strip_prefix("control: ")).unwrap();
        self.uuid = Path::new(control).file_stem().unwrap().to_str().unwrap().into();
    }

    pub fn signal(&self, name: &str) {
        let process_id = self.daemon.as_ref().expect("it runs").id().to_string();
        run(&["kill", name, &process_id]);
    }

    /// Stops it for now.
    pub fn pause(&self) {
        pause(self.daemon.as_ref().expect("it runs").id());
    }

    pub fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("it runs");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub fn wait_for_end(&mut self) {
        wait_for("the daemon has ended", || {
            self.daemon.as_mut().unwrap().try_wait().unwrap().is_some()
        });
        let status = self.daemon.take().unwrap().wait().unwrap();
        assert!(status.success(), "{status}: {}", self.read("err"));
    }

    pub fn stop(&mut self) {
        self.signal("-TERM");
        self.wait_for_end();
        assert!(!self.fuse_directory().exists());
        assert_eq!(self.loops(), Vec::<String>::new());
    }

    pub fn fuse_directory(&self) -> PathBuf {
        Path::new("/run/forebay").join(format!("{}.fuse", self.uuid))
    }

    pub fn keeper_socket(&self) -> PathBuf {
        Path::new("/run/forebay").join(format!("{}.keeper", self.uuid))
    }

    /// The process that keeps the mount's connection, a child of the daemon that made it.
    pub fn keeper(&self) -> Option<u32> {
        let daemon = self.daemon.as_ref().expect("it runs").id();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let mut numbers =
            processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        numbers.find(|process| stat_field(*process, 1) == Some(daemon))
    }

    pub fn control(&self) -> String {
        format!("/run/forebay/{}.sock", self.uuid)
    }

    pub fn drain_and_stop(&mut self) {
        run(&[FOREBAY, "drain", "--control", &self.control()]);
        self.stop();
    }

    /// What is there of the cache and its volumes.
    fn left(&self, extension: &str) -> Vec<PathBuf> {
        let all = fs::read_dir("/run/forebay").into_iter().flatten().flatten();
        let is_its = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            !self.uuid.is_empty()
                && name.starts_with(&format!("{}.", self.uuid))
                && path.extension().is_some_and(|it| it == extension)
        };
        all.map(|entry| entry.path()).filter(is_its).collect()
    }

    /// Loop devices over files of the cache's mounts or of this test.
    pub fn loops(&self) -> Vec<String> {
        let mounts = format!("/run/forebay/{}.", self.uuid);
        forebay::host::machine::Host::default()
            .loops()
            .into_iter()
            .filter(|it| {
                let path = it.backing_file.to_string_lossy();
                path.starts_with(&mounts) || it.backing_file.starts_with(&self.root)
            })
            .map(|it| format!("/dev/{}", it.node.name))
            .collect()
    }

    pub fn mount(&self, device: &str, options: &str) {
        run(&["mount", "-o", options, device, &self.mount_point()]);
    }

    pub fn unmount(&self) {
        run(&["umount", &self.mount_point()]);
    }

    /// A loop device over the backing file alone.
    pub fn backing_alone(&mut self) -> String {
        let device = run(&["losetup", "-f", "--show", "-P", &self.path("back")]);
        self.own.push(device.trim().into());
        device.trim().into()
    }

    pub fn detach_own(&mut self) {
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
        if let Some(mut daemon) = self.daemon.take() {
            // Best effort: it may have ended by itself.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // What waits for a daemon would wait for ever as long as anyone keeps its connection, and with it whoever unmounts.
        self.manager = None;
        for keeper in self.left("keeper") {
            if let Ok((_, lease)) = forebay::host::keeper::take(&keeper) {
                lease.end();
            }
        }
        try_run(&["umount", "-l", &self.mount_point()]);
        for device in self.loops() {
            try_run(&["losetup", "-d", &device]);
        }
        for directory in self.left("fuse") {
            try_run(&["umount", "-l", directory.to_str().unwrap()]);
            let _ = fs::remove_dir(directory);
        }
        for extension in ["sock", "keeper", "buffers"] {
            self.left(extension).iter().for_each(|it| drop(fs::remove_file(it)));
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

pub fn source() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_str().unwrap().to_owned()
}

pub fn compare(bench: &Bench) {
    run(&["diff", "-r", &source(), &format!("{}/crates", bench.mount_point())]);
}
