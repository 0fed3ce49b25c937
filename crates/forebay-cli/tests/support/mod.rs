// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the tests of the program share: a place for files, the program itself, a random sequence.
//!
//! # Invariants
//!
//! - **T1** Only processes that a test started itself are ended, by their id.
//! - **T2** Nothing is left behind: no process, no file, no shared memory.
//! - **T3** A daemon of whose devices a test does not say how they are driven is driven as `FOREBAY_TEST_IO` says: all tests can so be run
//!   with `--io threads`.

#![allow(dead_code, unused_imports, unreachable_pub, clippy::unwrap_used)]

pub mod apart;
pub mod load;
pub mod model;
pub mod silence;
pub mod terminal;

pub use forebay_testing::{PATIENCE, Random, has, skip, wait_for};

use forebay_serve::nbd::client::{Client, ClientError, Connect};

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// Directories of one test: one for data, where direct I/O works, and one with a short name for
/// sockets.
#[derive(Debug)]
pub struct Scratch {
    pub dir: PathBuf,
    pub sockets: PathBuf,
    uuids: Mutex<Vec<String>>,
}

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let own = format!("{name}-{}-{number}", std::process::id());
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(&own);
        let sockets = std::env::temp_dir().join(format!("fb-{own}"));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::create_dir_all(&sockets).unwrap();
        Scratch { dir, sockets, uuids: Mutex::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    pub fn control(&self) -> PathBuf {
        self.sockets.join("control")
    }

    pub fn nbd(&self) -> PathBuf {
        self.sockets.join("nbd")
    }

    /// `--listen` for the NBD socket.
    pub fn listen(&self) -> String {
        format!("nbd+unix://{}", self.nbd().display())
    }

    /// What other programs call a volume.
    pub fn uri(&self, volume: &str) -> String {
        format!("nbd+unix:///{volume}?socket={}", self.nbd().display())
    }

    /// A sparse file.
    pub fn file(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    /// Formats the cache.
    pub fn format(&self, size: &str) {
        let done = forebay([
            OsStr::new("format"),
            self.cache().as_os_str(),
            OsStr::new("--size"),
            OsStr::new(size),
        ]);
        assert!(done.status.success(), "{done:?}");
        self.note_cache(&String::from_utf8_lossy(&done.stdout));
    }

    /// A copy of the program where anybody can execute it. Written by another process: what other tests start would have a descriptor
    /// of ours for a moment, and nobody executes what is open for writing.
    pub fn program_for_all(&self) -> PathBuf {
        let program = self.sockets.join("forebay");
        if !program.exists() {
            good(Command::new("cp").arg(env!("CARGO_BIN_EXE_forebay")).arg(&program));
        }
        program
    }

    /// Remembers which cache `format` has made, to remove its shared memory in the end.
    pub fn note_cache(&self, printed: &str) {
        let line = printed.lines().find_map(|line| line.strip_prefix("cache ")).unwrap();
        self.uuids.lock().unwrap().push(line.split(' ').next().unwrap().to_owned());
    }

    /// Serves the cache with the NBD and control sockets of this place.
    pub fn serve<S: AsRef<OsStr>>(&self, more: &[S]) -> Daemon {
        Daemon::start(self.serve_command(more), &self.path("stderr"))
    }

    /// As [`Scratch::serve`], not started yet.
    pub fn serve_command<S: AsRef<OsStr>>(&self, more: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("serve").arg("--cache").arg(self.cache());
        command.arg("--listen").arg(self.listen());
        command.arg("--control").arg(self.control()).arg("--attach").arg("none");
        command.args(more);
        command
    }

    /// A client of a volume.
    pub fn connect(&self, volume: &str) -> Client<UnixStream> {
        self.try_connect(volume).unwrap()
    }

    /// The same, if the daemon has room for one more.
    pub fn try_connect(&self, volume: &str) -> Result<Client<UnixStream>, ClientError> {
        let stream = UnixStream::connect(self.nbd()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client::connect(stream, &Connect { export: volume, ..Connect::default() })
    }

    /// `forebay COMMAND --control …`
    pub fn ask(&self, command: &[&str]) -> Output {
        let control = self.control();
        forebay(command.iter().map(OsStr::new).chain([OsStr::new("--control"), control.as_ref()]))
    }

    /// `drain`, not started yet.
    pub fn drain_command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("drain").arg("--control").arg(self.control());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// `status --json`.
    pub fn status(&self) -> serde_json::Value {
        let done = self.ask(&["status", "--json"]);
        assert!(done.status.success(), "{done:?}");
        serde_json::from_slice(&done.stdout).unwrap()
    }

    /// The volumes that it tells.
    pub fn volume_names(&self) -> Vec<String> {
        let status = self.status();
        let volumes = status["volumes"].as_array().unwrap().iter();
        volumes.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let user = std::fs::metadata(&self.dir).map(|it| std::os::unix::fs::MetadataExt::uid(&it));
        let mut places = vec![PathBuf::from("/run/forebay")];
        places.extend(user.map(|user| PathBuf::from(format!("/dev/shm/forebay-{user}"))));
        for uuid in self.uuids.lock().unwrap().iter() {
            for place in &places {
                let _ = std::fs::remove_file(place.join(format!("{uuid}.buffers")));
            }
        }
        // What a failed test leaves is looked at by hand.
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
        let _ = std::fs::remove_dir_all(&self.sockets);
    }
}

/// What a command has to be told of the state directory of these tests, with a space before.
pub fn state_option() -> String {
    let state = std::env::var("FOREBAY_STATE_DIR").unwrap_or_default();
    if state.is_empty() { state } else { format!(" --state-dir {state}") }
}

/// Runs the program to its end.
pub fn forebay<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    run(Command::new(env!("CARGO_BIN_EXE_forebay")).args(args))
}

/// Runs a command to its end, which is waited for with patience.
pub fn run(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let id = child.id();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = sender.send(child.wait_with_output());
    });
    match receiver.recv_timeout(PATIENCE) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            signal(id, "KILL");
            panic!("{command:?} does not end");
        }
    }
}

/// What a command has said when it has ended, if it does.
pub fn ended(mut command: Child) -> Option<Output> {
    let begun = Instant::now();
    while command.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            command.kill().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(command.wait_with_output().unwrap())
}

/// Runs a command that must succeed and gives what it printed.
pub fn good(command: &mut Command) -> String {
    let done = run(command);
    let error = String::from_utf8_lossy(&done.stderr);
    let out = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{command:?}: {:?}\n{out}\n{error}", done.status);
    out.into_owned()
}

/// Sends a signal to a process that this test has started (T1).
pub fn signal(id: u32, name: &str) {
    let done = Command::new("kill").args(["-s", name, &id.to_string()]).status();
    assert!(done.unwrap().success());
}

/// Stops a process for now, all of its threads but those of its ring, which are the kernel's own. The signal alone takes its time on
/// a busy machine.
pub fn pause(id: u32) {
    signal(id, "STOP");
    let tasks = || std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
    let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        let (name, rest) = stat.rsplit_once(") ").unwrap_or_default();
        rest.is_empty() || rest.starts_with('T') || name.contains("(iou-")
    };
    wait_for("all of it is stopped", || tasks().all(is_stopped));
}

/// Lets a `serve` have its devices driven as the whole suite is to have it (T3).
pub fn driven(command: &mut Command) {
    let Some(io) = std::env::var_os("FOREBAY_TEST_IO") else { return };
    let has = |word: &str| command.get_args().any(|it| it == word);
    if has("serve") && !has("--io") {
        command.arg("--io").arg(io);
    }
}

/// A running `forebay serve`; ended when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// What it printed up to `ready`.
    pub lines: Vec<String>,
    /// What it prints after that.
    later: Mutex<mpsc::Receiver<String>>,
    stderr: PathBuf,
    /// From its start until it was ready.
    pub took: Duration,
}

impl Daemon {
    /// Starts it and waits until it is ready.
    pub fn start(command: Command, stderr: &Path) -> Daemon {
        match Daemon::try_start(command, stderr) {
            Ok(daemon) => daemon,
            Err((code, text)) => panic!("serve ended with {code:?}: {text}"),
        }
    }

    /// Starts it and kills it when it has come so far as it comes in this time.
    pub fn start_and_kill(mut command: Command, after: Duration) {
        driven(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(after);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Starts it and waits until it can be asked, ready or not.
    pub fn begin(command: Command, stderr: &Path) -> Daemon {
        Daemon::start_until(command, stderr, |line| line.starts_with("control: ")).unwrap()
    }

    /// Starts it; if it ends without being ready, gives its exit code and what it said.
    pub fn try_start(command: Command, stderr: &Path) -> Result<Daemon, (Option<i32>, String)> {
        Daemon::start_until(command, stderr, |line| line == "ready")
    }

    fn start_until(
        mut command: Command,
        stderr: &Path,
        is_enough: impl Fn(&str) -> bool,
    ) -> Result<Daemon, (Option<i32>, String)> {
        let begun = Instant::now();
        driven(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(File::create(stderr).unwrap());
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                // Nobody may be listening any more; the pipe must not fill for that.
                let _ = sender.send(line);
            }
        });
        let mut lines = Vec::new();
        loop {
            match receiver.recv_timeout(PATIENCE) {
                Ok(line) if is_enough(&line) => break,
                Ok(line) => lines.push(line),
                Err(error) => {
                    if error == mpsc::RecvTimeoutError::Timeout {
                        let _ = child.kill();
                    }
                    let code = child.wait().unwrap().code();
                    return Err((code, std::fs::read_to_string(stderr).unwrap()));
                }
            }
        }
        let (stderr, took) = (stderr.to_owned(), begun.elapsed());
        Ok(Daemon { child, lines, later: Mutex::new(receiver), stderr, took })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it prints next after [`Daemon::lines`], if it does so within this time.
    pub fn next_line(&self, within: Duration) -> Option<String> {
        self.later.lock().unwrap().recv_timeout(within).ok()
    }

    /// What it said on stderr until now.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap()
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// kill -9.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "it ended before it was killed: {}", self.said());
    }

    /// Waits for its end; gives the exit code and all it said on stderr.
    pub fn ended(mut self) -> (Option<i32>, String) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), self.said());
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end: {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it by a signal, which must be a clean stop.
    pub fn stop(self, name: &str) -> String {
        signal(self.id(), name);
        let (code, said) = self.ended();
        assert_eq!(code, Some(0), "{said}");
        said
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Ended already, or ended now.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
