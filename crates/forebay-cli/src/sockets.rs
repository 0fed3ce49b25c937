// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sockets that clients come in by.
//!
//! # Invariants
//!
//! - **S1** Only a file that was bound here is removed in the end: somebody may have removed it and another daemon be listening at its
//!   path. A socket keeps its file's number from others as long as it is open, so it is closed after that.

use crate::args::Listen;
use crate::{quoted, upgrade};
use anyhow::{Context, Result, anyhow, bail};
use forebay::host::holder::LOCK_WAIT;
use forebay::host::machine::Host;
use forebay_serve::nbd::listen::Listener;
use rustix::fs::Mode;
use rustix::net::sockopt::socket_peercred;
use rustix::process::umask;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a socket's path, the zero behind it left out (unix(7)).
const PATH_BYTES_MAX: usize = 107;

/// The files that were bound here, by path: device and inode (S1).
static FILES: Mutex<BTreeMap<PathBuf, [u64; 2]>> = Mutex::new(BTreeMap::new());

fn files() -> MutexGuard<'static, BTreeMap<PathBuf, [u64; 2]>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn numbers(path: &Path) -> Option<[u64; 2]> {
    std::fs::symlink_metadata(path).ok().map(|it| [it.dev(), it.ino()])
}

/// All of them, for the next program.
pub fn bound() -> Vec<(PathBuf, [u64; 2])> {
    files().iter().map(|(path, numbers)| (path.clone(), *numbers)).collect()
}

/// What the program before has bound, and left.
pub fn were_bound(before: Vec<(PathBuf, [u64; 2])>) {
    files().extend(before);
}

/// Removes a socket's file, if it is the one that was bound here (S1).
pub fn remove(path: &Path) {
    let bound = files().remove(path);
    if bound.is_some() && bound == numbers(path) {
        // One that somebody else has removed is gone, too.
        let _ = std::fs::remove_file(path);
    }
}

/// Sockets that are files and were made here: gone with it, unless they are kept.
#[derive(Default)]
pub struct Made(Vec<PathBuf>);

impl Made {
    /// They stay.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| remove(path));
    }
}

/// Where NBD clients come in; `None`: it is not for them.
pub fn listen(listen: &Listen, made: &mut Made) -> Result<Option<Listener>> {
    match listen {
        Listen::Tcp(address) => {
            let name = format!("nbd://{address}");
            if let Some(left) = upgrade::take_socket(&name) {
                return Ok(Some(Listener::Tcp(left.into())));
            }
            Ok(Some(Listener::Tcp(bind_tcp(address, &name)?)))
        }
        Listen::Unix(path) => Ok(Some(Listener::Unix(bind(path, made)?))),
        Listen::VhostUser { .. } => Ok(None),
    }
}

/// The address of one, by which it is left to the next program, and another descriptor of it.
pub fn kept(listener: &Listener) -> Option<(String, OwnedFd)> {
    match listener {
        Listener::Tcp(socket) => {
            let address = socket.local_addr().ok()?;
            Some((format!("nbd://{address}"), socket.try_clone().ok()?.into()))
        }
        Listener::Unix(socket) => kept_unix(socket),
    }
}

/// The same of a socket that is a file.
pub fn kept_unix(socket: &UnixListener) -> Option<(String, OwnedFd)> {
    let address = socket.local_addr().ok()?;
    let path = address.as_pathname()?.display().to_string();
    Some((path, socket.try_clone().ok()?.into()))
}

/// Addresses that can be had, held for a moment.
#[derive(Default)]
pub struct Probe {
    /// Goes first: while these listen nobody takes the files for stale ones and has his own there.
    made: Made,
    unix: Vec<UnixListener>,
    tcp: Vec<TcpListener>,
}

impl Probe {
    /// Refuses what [`bind`] would refuse.
    pub fn unix(&mut self, path: &Path) -> Result<()> {
        if !upgrade::has_socket(&path.display().to_string()) {
            self.unix.push(bind_file(path)?);
            self.made.0.push(path.to_owned());
        }
        Ok(())
    }

    /// The same of a port; `name` is its address as it is given.
    pub fn tcp(&mut self, address: &SocketAddr, name: &str) -> Result<()> {
        if !upgrade::has_socket(name) {
            self.tcp.push(bind_tcp(address, name)?);
        }
        Ok(())
    }
}

/// Binds a socket that is ours alone, unless the program before left it; a stale one is taken over, a live one is refused.
pub fn bind(path: &Path, made: &mut Made) -> Result<UnixListener> {
    if let Some(left) = upgrade::take_socket(&path.display().to_string()) {
        // A program from before does not say which file it is.
        let mut files = files();
        if let (false, Some(there)) = (files.contains_key(path), numbers(path)) {
            files.insert(path.to_owned(), there);
        }
        return Ok(left.into());
    }
    let listener = bind_file(path)?;
    made.0.push(path.to_owned());
    Ok(listener)
}

/// Binds a port; `name` is its address as it is given.
pub fn bind_tcp(address: &SocketAddr, name: &str) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|why| {
        let advice = tcp_advice(address, why.kind());
        anyhow!("{name}: cannot be listened on: {why}; {advice}")
    })
}

/// Refuses a path that no socket can have.
pub fn check_path(path: &Path) -> Result<()> {
    let (shown, bytes) = (path.display(), path.as_os_str().len());
    if bytes > PATH_BYTES_MAX {
        bail!(
            "{shown}: has {bytes} bytes, and the path of a socket at most {PATH_BYTES_MAX}; choose a shorter one"
        );
    }
    Ok(())
}

fn bind_file(path: &Path) -> Result<UnixListener> {
    check_path(path)?;
    let shown = path.display();
    match bind_private(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {}
        other => return other.map_err(|why| refused_path(path, &why)),
    }
    // A process that was killed may hold its sockets for a moment longer than its locks: io_uring
    // ends what was under way after it. One that lives is not waited for.
    let begun = Instant::now();
    let refused = loop {
        let stream = match UnixStream::connect(path) {
            Ok(stream) => stream,
            Err(error) => break error,
        };
        let peer = socket_peercred(&stream).map(|it| it.pid.as_raw_pid() as u32);
        let is_living = peer.is_ok_and(|peer| Host::default().living(peer).is_some());
        if is_living || begun.elapsed() >= LOCK_WAIT {
            bail!("{shown}: another daemon listens there; choose another path or stop it");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    match refused.kind() {
        // Whoever had it has removed it.
        ErrorKind::NotFound => {}
        // Nobody listens there; whatever else is there is somebody's.
        ErrorKind::ConnectionRefused => {
            let found = std::fs::symlink_metadata(path);
            if !found.is_ok_and(|it| it.file_type().is_socket()) {
                bail!("{shown}: is there already and is no socket; choose another path");
            }
            let stale = || format!("{shown}: is stale, cannot be removed");
            std::fs::remove_file(path).with_context(stale)?;
        }
        // A socket of another kind, or one that this user may not ask.
        _ => bail!(
            "{shown}: is there already, and whether somebody has it cannot be seen: {refused}; choose another path, or \
             remove it if nobody does"
        ),
    }
    bind_private(path).map_err(|why| refused_path(path, &why))
}

fn refused_path(path: &Path, why: &io::Error) -> anyhow::Error {
    let directory = path.parent().map(quoted::shell);
    let advice = match (why.kind(), directory) {
        (ErrorKind::NotFound, Some(directory)) => {
            format!("`mkdir -p {directory}` makes its directory")
        }
        (ErrorKind::PermissionDenied, Some(directory)) => {
            format!(
                "choose one in a directory that you may write to ({directory} is none), or run it as root (sudo)"
            )
        }
        _ => "choose another path".into(),
    };
    anyhow!("{}: cannot be listened on: {why}; {advice}", path.display())
}

fn tcp_advice(address: &SocketAddr, why: ErrorKind) -> String {
    match why {
        ErrorKind::AddrInUse => format!(
            "`ss -ltnp sport = :{}` (as root) names who has it: stop that one, or choose another port",
            address.port()
        ),
        ErrorKind::PermissionDenied => "choose a port above 1023, or run it as root (sudo)".into(),
        _ => "`ip -brief address` lists the addresses that there are".into(),
    }
}

/// Nobody else may connect, not even between the binding and a change of its mode.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let before = umask(Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    umask(before);
    if let (Ok(_), Some(there)) = (&bound, numbers(path)) {
        files().insert(path.to_owned(), there);
    }
    bound
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    /// Whatever could not be connected to was taken for stale and removed, so too a socket of another kind that its program used.
    #[test]
    fn only_a_socket_that_nobody_has_is_removed() {
        let folder = std::env::temp_dir().join(format!("forebay-sockets-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        let datagrams = UnixDatagram::bind(&path).unwrap();
        let error = bind_file(&path).unwrap_err().to_string();
        assert!(error.contains("whether somebody has it cannot be seen"), "{error}");
        let sender = UnixDatagram::unbound().unwrap();
        assert_eq!(sender.send_to(b"there", &path).unwrap(), 5);
        drop(datagrams);
        // Of whatever kind: nobody has it any more.
        drop(bind_file(&path).unwrap());
        let listener = bind_file(&path).unwrap();
        let error = bind_file(&path).unwrap_err().to_string();
        assert!(error.contains("another daemon listens there"), "{error}");
        drop(listener);
        std::fs::write(folder.join("file"), "its").unwrap();
        let error = bind_file(&folder.join("file")).unwrap_err().to_string();
        assert!(error.contains("is no socket"), "{error}");
        assert_eq!(std::fs::read(folder.join("file")).unwrap(), b"its");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
