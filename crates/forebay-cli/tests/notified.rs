// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a service manager is told, besides what it keeps (`fuse/manager.rs`).

use crate::support::{Daemon, Scratch};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
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
