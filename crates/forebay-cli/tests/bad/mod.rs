// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Running the real program on real files.

#![allow(unreachable_pub, dead_code)]

use crate::support;
use forebay_serve::nbd::client::{Client, Connect};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory of this test alone, removed when it ends.
pub struct Place {
    pub path: PathBuf,
}

impl Place {
    pub fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        let run = path.join("run");
        std::fs::create_dir(&run).unwrap();
        set_mode(&run, 0o700);
        Place { path }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.at(name).to_str().unwrap().to_owned()
    }

    /// A file of so many bytes, all zero.
    pub fn file(&self, name: &str, bytes: u64) -> String {
        std::fs::File::create(self.at(name)).unwrap().set_len(bytes).unwrap();
        self.text(name)
    }

    /// A formatted cache.
    pub fn cache(&self) -> String {
        let cache = self.text("cache");
        let done = self.run(&["format", &cache, "--size", "64M", "--segment-size", "256K"]);
        assert_eq!(done.code, 0, "{}", done.stderr);
        cache
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.env("XDG_RUNTIME_DIR", self.at("run")).stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Done {
        Done::new(&support::run(self.command().args(args)))
    }

    /// What a run prints for programs.
    pub fn json(&self, args: &[&str]) -> serde_json::Value {
        let done = self.run(args);
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"))
    }

    /// A daemon that is ready.
    pub fn serve(&self, args: &[&str]) -> Daemon {
        let socket = self.at("nbd");
        let listen = format!("nbd+unix://{}", socket.display());
        let control = self.at("control");
        let mut command = self.command();
        command.args(["serve", "--attach", "none", "--listen", &listen, "--control"]);
        command.arg(&control).args(args);
        let daemon = support::Daemon::start(command, &self.at("stderr"));
        Daemon { daemon, socket, control }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// What became of a run.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    pub fn new(output: &Output) -> Done {
        Done {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// It ended with this code, and the last line on stderr has the form of an error (what: why; what to do) and says this.
    pub fn refused(&self, code: i32, says: &str) {
        assert_eq!(self.code, code, "{self:?}");
        let last = self.stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("forebay: "), "{self:?}");
        assert!(last.contains(says), "expected '{says}' in {self:?}");
        assert!(last.contains("; "), "it does not say what to do: {self:?}");
    }
}

/// A daemon that runs until it is told to stop, or dropped.
pub struct Daemon {
    daemon: support::Daemon,
    socket: PathBuf,
    control: PathBuf,
}

impl Daemon {
    pub fn client(&self, volume: &str) -> Client<UnixStream> {
        let stream = UnixStream::connect(&self.socket).unwrap();
        Client::connect(stream, &Connect { export: volume, ..Connect::default() }).unwrap()
    }

    /// Ends at once, as a crash does.
    pub fn kill(mut self) -> String {
        self.daemon.kill();
        self.daemon.said()
    }

    /// Ends cleanly; returns what it said on stderr.
    pub fn stop(self, place: &Place) -> String {
        let control = self.control.to_str().unwrap().to_owned();
        let done = place.run(&["stop", "--control", &control]);
        assert_eq!(done.code, 0, "{done:?}");
        let (code, said) = self.daemon.ended();
        assert_eq!(code, Some(0), "{said}");
        said
    }
}

pub fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Changes bytes of a file.
pub fn patch(path: &str, offset: u64, change: impl FnOnce(&mut [u8]), length: usize) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    change(&mut bytes);
    file.write_all_at(&bytes, offset).unwrap();
    file.sync_all().unwrap();
}
