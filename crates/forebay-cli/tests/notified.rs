// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a service manager is told, besides what it keeps (`fuse/manager.rs`).

use crate::support::{Daemon, Scratch, wait_for};
use crate::upgrade::upgrade;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A manager that only listens.
pub struct Manager {
    socket: UnixDatagram,
    pub path: PathBuf,
}

impl Manager {
    pub fn new(scratch: &Scratch) -> Manager {
        let path = scratch.sockets.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Manager { socket, path }
    }

    /// All that it was told until now, line by line.
    pub fn told(&self) -> Vec<String> {
        let (mut lines, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(length) = self.socket.recv(&mut bytes) {
            lines.extend(String::from_utf8_lossy(&bytes[..length]).lines().map(str::to_owned));
        }
        lines
    }
}

/// With `stop-timeout = "300s"` the unit's 180 s were over first, and the daemon was killed while it waited for who held its devices.
#[test]
fn the_manager_is_told_how_long_a_stop_may_last() {
    for (timeout, expected) in [("300s", 300 + 5 + 5 + 300 + 60), ("0s", 5 + 5 + 60 + 60)] {
        let scratch = Scratch::new("notified-stop");
        scratch.format("64M");
        let manager = Manager::new(&scratch);
        let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
        let mut command = scratch.serve_command(&["--volume", &volume, "--stop-timeout", timeout]);
        command.env("NOTIFY_SOCKET", &manager.path);
        let daemon = Daemon::start(command, &scratch.path("stderr"));
        daemon.stop("TERM");
        let told = manager.told();
        let at = told.iter().position(|line| line == "STOPPING=1").unwrap();
        let extend = format!("EXTEND_TIMEOUT_USEC={}", expected * 1_000_000);
        assert_eq!(told[at + 1], extend, "{told:?}");
    }
}

/// Its watchdog killed a daemon that took longer than that to close its cache and open it again, with all that waited for it.
#[test]
fn the_manager_is_told_how_long_going_on_as_another_program_may_last() {
    let scratch = Scratch::new("notified-upgrade");
    scratch.format("64M");
    let manager = Manager::new(&scratch);
    let volume = format!("v={}", scratch.file("backing", 16 << 20).display());
    let mut command = scratch.serve_command(&["--volume", &volume, "--stop-timeout", "300s"]);
    command.env("NOTIFY_SOCKET", &manager.path).env("WATCHDOG_USEC", "2000000");
    let daemon = Daemon::start(command, &scratch.path("stderr"));
    upgrade(&scratch, Path::new(env!("CARGO_BIN_EXE_forebay"))).unwrap();
    let told = manager.told();
    let at = told.iter().position(|line| line == "RELOADING=1").unwrap();
    let extend = |seconds: u64| format!("EXTEND_TIMEOUT_USEC={}", seconds * 1_000_000);
    assert_eq!(told[at + 1..at + 3], [extend(300 + 5 + 30 + 600), extend(600)], "{told:?}");
    // That ends with the first that the watchdog hears again.
    wait_for("it says that it lives", || manager.told().contains(&"WATCHDOG=1".to_owned()));
    daemon.stop("TERM");
}

/// With `device-timeout = "1s"` a cache that came late was given up for good: 20 starts within a minute are what systemd allows.
#[test]
fn a_start_from_a_file_waits_long_enough_for_the_manager_to_begin_it_anew() {
    let scratch = Scratch::new("notified-late");
    let manager = Manager::new(&scratch);
    let config = scratch.path("it.toml");
    let text = format!(
        "cache = '{}'\nattach = 'none'\ndevice-timeout = '10ms'\n[volume.v]\nbacking = '{}'\n",
        scratch.cache().display(),
        scratch.path("backing").display()
    );
    std::fs::write(&config, text).unwrap();
    let start = |is_managed: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("serve").arg("--config").arg(&config).env_remove("NOTIFY_SOCKET");
        if is_managed {
            command.env("NOTIFY_SOCKET", &manager.path);
        }
        let begun = Instant::now();
        let (code, said) = Daemon::try_start(command, &scratch.path("stderr")).unwrap_err();
        assert_eq!(code, Some(1), "{said}");
        (begun.elapsed(), said)
    };
    let (took, said) = start(true);
    assert!(took >= Duration::from_secs(5) && said.contains("up to 5s"), "{said}");
    // By hand it is as it was said.
    let (_, said) = start(false);
    assert!(said.contains("up to 10ms"), "{said}");
}
