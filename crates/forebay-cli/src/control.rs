// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Speaking to a daemon: one JSON line each way on its control socket.

use crate::NoDaemon;
use crate::status::Status;
use crate::why::Why;
use anyhow::{Context, Result, anyhow, bail};
use forebay::host::runtime_dir::RuntimeDir;
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Error, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long nobody may answer while a daemon goes on as another program, and how often it is asked meanwhile.
const ABSENT_MAX: Duration = Duration::from_secs(10);
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// How long what is answered at once is waited for. A daemon may take ten seconds for a turn of its loop, while it waits for a state directory
/// that is silent; what takes this long has come to a halt.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// The same where one daemon of several must not hold up what is meant for others.
const SILENT_MAX: Duration = Duration::from_secs(10);

/// Where the control sockets of root's daemons are.
const ROOTS: &str = "/run/forebay";

/// How the answer begins when the daemon has no place for one more: asked again later, it is heard.
pub const BUSY: &str = "busy: ";

/// The daemon is there and has no place for one more.
#[derive(Debug)]
struct Busy(String);

impl std::fmt::Display for Busy {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Busy {}

/// A daemon is there and does not answer: exit code 5, as where there is none.
#[derive(Debug)]
pub struct Silent(String);

impl std::fmt::Display for Silent {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for Silent {}

/// What can be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Request {
    Status,
    Stop {
        drain: bool,
    },
    Drain {
        name: Option<String>,
    },
    /// Begins a scrub; one that runs already is as good. Or ends it.
    Scrub {
        name: Option<String>,
        stop: bool,
    },
    Upgrade {
        executable: PathBuf,
        /// How it lays out a map that is handed over, if it says so.
        #[serde(default)]
        layout: Option<String>,
        /// How long it may take to try it, if less than usual.
        #[serde(default)]
        limit: Option<Duration>,
    },
    /// `NAME=BACKING[,...]` as on the command line, its paths absolute, or `NAME` alone.
    Attach {
        volume: String,
        if_changed: Option<String>,
        /// It is served although another cache may hold newer data.
        #[serde(default)]
        without_cache: bool,
    },
    /// The volume is drained.
    Detach {
        name: String,
    },
    /// As large as its backing device.
    Resize {
        name: String,
    },
    /// The cache: so many bytes, or all that its device has.
    ResizeCache {
        size_bytes: Option<u64>,
    },
    /// It stays as large as it is.
    StopResizing,
    Set {
        name: String,
        settings: Vec<String>,
    },
    Why {
        name: String,
        lba: u64,
    },
}

impl Request {
    /// It is answered when it is done, which may take as long as it takes.
    fn is_long(&self) -> bool {
        matches!(
            self,
            Request::Upgrade { .. }
                | Request::Attach { .. }
                | Request::Detach { .. }
                | Request::Resize { .. }
        )
    }

    /// It is a question, and changes nothing.
    fn is_question(&self) -> bool {
        matches!(self, Request::Status | Request::Why { .. })
    }
}

/// What is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub enum Reply {
    Status(Box<Status>),
    Done,
    Why(Box<Why>),
    /// Done, and what a user should see.
    Told {
        lines: Vec<String>,
    },
    Error {
        text: String,
    },
}

/// Sockets of running daemons, found in the runtime directory: named by what is served, so that those where guests come in, which
/// may lie beside them, are not taken for daemons.
fn sockets() -> Result<Vec<PathBuf>> {
    let dir = RuntimeDir::open()?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir.path())? {
        let path = entry?.path();
        if is_control(&path) && is_listened_at(&path) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Whether a daemon is there, which nobody waits for. One that is silent, with as many who wait for it as there may be, is.
pub fn is_listened_at(path: &Path) -> bool {
    connect_now(path).map_or_else(|error| error == Errno::AGAIN, |_| true)
}

/// A connection that nobody is waited for.
fn connect_now(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The process that listens at a socket, as the kernel has it. A daemon stays the same one when it goes on as another program.
pub fn process_at(path: &Path) -> Option<u32> {
    let peer = socket_peercred(connect_now(path).ok()?).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// The same, and those of these that somebody listens at.
pub fn listening(more: impl Iterator<Item = PathBuf>) -> Result<BTreeSet<PathBuf>> {
    let more = more.filter(|path| is_listened_at(path));
    Ok(sockets()?.into_iter().chain(more).collect())
}

/// Whether a daemon names its socket so: `UUID.sock`.
fn is_control(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_suffix(".sock").is_some_and(|uuid| {
        let is_of_one = |(at, byte): (usize, u8)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        };
        uuid.len() == 36 && uuid.bytes().enumerate().all(is_of_one)
    })
}

/// Whether root may have a daemon of which this user is told nothing.
fn may_not_see_roots() -> bool {
    let denied = |error: &Error| error.kind() == ErrorKind::PermissionDenied;
    std::fs::read_dir(ROOTS).is_err_and(|error| denied(&error))
}

/// The daemon's socket: the one given, or the only one there is.
pub fn find(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let mut found = sockets()?;
    match found.len() {
        0 if may_not_see_roots() => Err(NoDaemon(format!(
            "no daemon of this user is running, and root's may not be seen: permission is denied for {ROOTS}; ask as root \
             (sudo), or start one with `forebay serve --cache CACHE`"
        ))
        .into()),
        0 => Err(NoDaemon(
            "no daemon is running, or it still waits for its devices, as its log says; start one with `forebay serve --cache CACHE`, or \
             `systemctl start forebay@NAME` where it is a service".into(),
        )
        .into()),
        1 => Ok(found.remove(0)),
        _ => {
            let list: Vec<String> =
                found.iter().map(|path| format!("--control {}", path.display())).collect();
            bail!("several daemons are running; choose one: {}", list.join(" | "))
        }
    }
}

/// The socket of the daemon that is this process.
pub fn find_process(process: u32) -> Result<PathBuf> {
    // The others are not asked: one that does not answer would keep this one from being found.
    let its_own = sockets()?.into_iter().filter(|socket| process_at(socket) == Some(process));
    let mut found: Vec<PathBuf> = its_own.collect();
    if found.len() > 1 {
        // Without a cache each program has another socket, and the one before may not have closed its own yet.
        found.sort_by_key(|socket| status_within(socket, ASK_AGAIN).is_err());
    }
    found.into_iter().next().ok_or_else(|| {
        let text = format!("process {process} answers on no control socket in the usual place");
        NoDaemon(text + "; if it has one elsewhere, give --control").into()
    })
}

/// Asks, and waits for the answer, if it is one that takes its time: of a daemon that answers what is answered at once.
pub fn ask(socket: &Path, request: &Request) -> Result<Reply> {
    let limit = match request.is_long() {
        true => {
            status(socket)?;
            None
        }
        false => Some(ANSWER_MAX),
    };
    ask_first(socket, request, limit).map(|(reply, _)| reply)
}

/// How a daemon was stopped.
#[derive(Debug)]
pub struct Stopped {
    /// What has become of its files, as it said before it ended.
    pub warned: Vec<String>,
    /// What a user should know of the end. None: it did not say.
    pub ended: Option<Vec<String>>,
}

/// Asks the daemon to stop, which has just answered something else, and waits until it says how that ended, with what a user should know. One
/// from before may not say it. One that goes away without an answer may be on its way to another program: as long as its process is there,
/// that is asked.
pub fn stop(socket: &Path, drain: bool, process: u32) -> Result<Stopped> {
    let (mut socket, process_dir) = (socket.to_owned(), PathBuf::from(format!("/proc/{process}")));
    // Bounded by the life of the process.
    let (first, mut more) = loop {
        match ask_first(&socket, &Request::Stop { drain }, None) {
            Err(error) if is_for_now(&error) && process_dir.exists() => {
                std::thread::sleep(ASK_AGAIN);
                // Without a cache each program has another socket.
                socket = find_process(process).unwrap_or(socket);
            }
            asked => break asked?,
        }
    };
    let warned = match first {
        Reply::Told { lines } => lines,
        _ => Vec::new(),
    };
    let mut answer = String::new();
    // One that is killed says nothing.
    let _ = more.read_line(&mut answer);
    match serde_json::from_str(&answer) {
        Ok(Reply::Error { text }) => bail!(text),
        Ok(Reply::Told { lines }) => Ok(Stopped { warned, ended: Some(lines) }),
        Ok(_) => Ok(Stopped { warned, ended: Some(Vec::new()) }),
        Err(_) => Ok(Stopped { warned, ended: None }),
    }
}

/// The first answer, if it comes within `limit`, and where others may come from.
fn ask_first(
    socket: &Path,
    request: &Request,
    limit: Option<Duration>,
) -> Result<(Reply, BufReader<UnixStream>)> {
    let shown = socket.display();
    let silent = |process: Option<u32>, is_asked: bool| {
        let process = process.map_or(String::new(), |it| format!(", process {it},"));
        let later = match is_asked && !request.is_question() {
            true => "; it does what it was asked for if it goes on",
            false => "",
        };
        Silent(format!(
            "{shown}: the daemon there{process} does not answer; its log may say what it waits for{later}"
        ))
    };
    let begun = Instant::now();
    let connected = match limit {
        Some(limit) => loop {
            match connect_now(socket) {
                // As many wait for it as there may be.
                Err(Errno::AGAIN) if begun.elapsed() < limit => std::thread::sleep(ASK_AGAIN),
                Err(Errno::AGAIN) => return Err(silent(None, false).into()),
                Ok(stream) => {
                    let stream = UnixStream::from(stream);
                    stream.set_nonblocking(false)?;
                    break Ok(stream);
                }
                Err(error) => break Err(error.into()),
            }
        },
        None => UnixStream::connect(socket),
    };
    let mut stream = connected.map_err(|error| {
        match error.kind() {
            // One may be there and serve.
            ErrorKind::PermissionDenied => {
                anyhow!(
                    "{shown}: permission denied; ask as root or the user that the daemon runs as"
                )
            }
            _ => NoDaemon(format!(
                "{shown}: no daemon answers there: {error}; leave --control out to find the one that runs, or start one with \
                 `forebay serve --cache CACHE`"
            ))
            .into(),
        }
    })?;
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    // One that ends resets whom it has not heard, and may leave an answer unfinished.
    let went = |why: &str| {
        NoDaemon(format!(
            "the daemon went away before it answered{why}; its log says why, and `forebay status` whether one runs again"
        ))
    };
    // One that is busy answers before it is asked, and hears nothing.
    let sent = stream.write_all(line.as_bytes());
    let (mut stream, mut answer) = (BufReader::new(stream), String::new());
    let read = stream.read_line(&mut answer);
    if !answer.ends_with('\n') {
        let error = sent.err().or(read.err());
        if error.as_ref().is_some_and(|error| error.kind() == ErrorKind::WouldBlock) {
            return Err(silent(process_at(socket), true).into());
        }
        return Err(went(&error.map_or(String::new(), |error| format!(": {error}"))).into());
    }
    match serde_json::from_str(&answer).context("the daemon's answer is not understood")? {
        Reply::Error { text } if text.starts_with(BUSY) => Err(Busy(text).into()),
        Reply::Error { text } => bail!(text),
        reply => Ok((reply, stream)),
    }
}

/// As [`ask`], of whoever serves: where a daemon goes on as another program nobody answers for a moment, and one may be busy. For what
/// may be asked twice.
pub fn ask_again(socket: &Path, request: &Request) -> Result<Reply> {
    let begun = Instant::now();
    loop {
        match ask(socket, request) {
            Err(error) if is_for_now(&error) && begun.elapsed() < ABSENT_MAX => {
                std::thread::sleep(ASK_AGAIN);
            }
            reply => return reply,
        }
    }
}

/// Whether a daemon may answer in a moment.
fn is_for_now(error: &anyhow::Error) -> bool {
    error.is::<NoDaemon>() || error.is::<Busy>()
}

/// Asks how things are.
pub fn status(socket: &Path) -> Result<Status> {
    of(ask(socket, &Request::Status)?)
}

/// The same of whoever serves ([`ask_again`]).
pub fn status_again(socket: &Path) -> Result<Status> {
    of(ask_again(socket, &Request::Status)?)
}

/// The same, of one that may not answer at all, which is an error then.
pub fn status_within(socket: &Path, limit: Duration) -> Result<Status> {
    of(ask_first(socket, &Request::Status, Some(limit))?.0)
}

/// How each of these is, of whoever serves ([`ask_again`]). One that does not answer holds up none.
pub fn status_of_each(sockets: BTreeSet<PathBuf>) -> Vec<Result<Status>> {
    let ask = |socket: PathBuf| {
        let begun = Instant::now();
        loop {
            match status_within(&socket, SILENT_MAX) {
                Err(error) if is_for_now(&error) && begun.elapsed() < ABSENT_MAX => {
                    std::thread::sleep(ASK_AGAIN);
                }
                status => return status,
            }
        }
    };
    sockets.into_iter().map(ask).collect()
}

fn of(reply: Reply) -> Result<Status> {
    match reply {
        Reply::Status(status) => Ok(*status),
        _ => bail!("the daemon answered something else than its status"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    /// A guest's socket beside it, where the README has it, was taken for a second daemon, and nobody knew which was meant.
    #[test]
    fn a_socket_for_guests_is_no_daemon() {
        assert!(is_control(Path::new("/run/forebay/d30a7c1e-0b1f-4c62-9a57-0123456789ab.sock")));
        for path in ["/run/forebay/data.sock", "/run/forebay/data.vm", "/run/forebay/.sock", "/"] {
            assert!(!is_control(Path::new(path)), "{path}");
        }
    }

    /// How a stop ended is the second line; a daemon that is killed, or of before, says none.
    #[test]
    fn a_stop_hears_how_it_ended() {
        let folder = std::env::temp_dir().join(format!("forebay-stops-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let bad = "{\"reply\":\"error\",\"text\":\"not durable\"}\n";
        let told = "{\"reply\":\"told\",\"lines\":[\"v: 8 KiB\"]}\n";
        let cases = [
            ("", "None"),
            ("{\"reply\":\"done\"}\n", "Some([])"),
            (told, "Some([\"v: 8 KiB\"])"),
            (bad, "not durable"),
        ];
        for (second, expected) in cases {
            let socket = folder.join("control");
            let listener = UnixListener::bind(&socket).unwrap();
            let daemon = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
                write!(stream, "{{\"reply\":\"done\"}}\n{second}").unwrap();
            });
            let told = stop(&socket, false, 0)
                .map_or_else(|it| it.to_string(), |it| format!("{:?}", it.ended));
            daemon.join().unwrap();
            assert_eq!(told, expected);
            std::fs::remove_file(socket).unwrap();
        }
        std::fs::remove_dir(folder).unwrap();
    }

    /// It had come to a daemon on its way to another program, and ended with 5; that program served on.
    #[test]
    fn a_stop_that_is_not_heard_is_asked_again_while_the_process_lives() {
        let folder = std::env::temp_dir().join(format!("forebay-unheard-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("control");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = std::thread::spawn(move || {
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
            write!(stream, "{{\"reply\":\"done\"}}\n{{\"reply\":\"done\"}}\n").unwrap();
        });
        assert_eq!(stop(&socket, false, std::process::id()).unwrap().ended, Some(vec![]));
        daemon.join().unwrap();
        // And nobody is asked who is not there.
        let error = stop(&socket, false, u32::MAX).unwrap_err();
        assert!(error.is::<NoDaemon>(), "{error:#}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// `status --watch` ended with 1 and not with 5 when the daemon's end came in the middle of a question, and who asks again over an
    /// upgrade did not.
    #[test]
    fn a_daemon_that_ends_while_it_is_asked_is_none() {
        let folder = std::env::temp_dir().join(format!("forebay-ends-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for answer in [None, Some(""), Some("{\"reply\"")] {
            let socket = folder.join("control");
            let listener = UnixListener::bind(&socket).unwrap();
            let daemon = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                // What it has not read when it ends is a reset to the one who asks.
                let Some(answer) = answer else {
                    std::thread::sleep(Duration::from_millis(50));
                    return;
                };
                stream.read_exact(&mut [0]).unwrap();
                while stream.read(&mut [0; 64]).unwrap() == 64 {}
                stream.write_all(answer.as_bytes()).unwrap();
            });
            let error = ask(&socket, &Request::Status).unwrap_err();
            daemon.join().unwrap();
            assert!(error.is::<NoDaemon>(), "{answer:?}: {error:#}");
            std::fs::remove_file(socket).unwrap();
        }
        std::fs::remove_dir(folder).unwrap();
    }
}
