// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A process that does nothing but hold a descriptor, for the daemon that comes after a killed one.
//!
//! What the kernel closes with the last descriptor stays when the daemon dies, if another process has
//! one, too. The daemon starts the keeper with the descriptor and a listening socket ([`start`]), and the
//! next daemon gets a copy of it from there ([`take`]). Whoever got one has a *lease*, a connection to
//! the keeper: by its end the keeper knows that the daemon has died.
//!
//! # Invariants
//!
//! - **E1** The keeper has the descriptor, the socket and nothing else of the daemon's open: no lock, no
//!   terminal, no device. So it is a new program, which begins by closing everything else.
//! - **E2** Only the user it runs as gets the descriptor.
//! - **E3** It ends: when the holder of the lease says so, when there is nothing left to hold, and
//!   [`KEEP`] after the last daemon died.
//! - **E4** Who ends it sees it end, and then its socket is gone: the next keeper may have the same place at once.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a descriptor is held for the next daemon.
pub const KEEP: Duration = Duration::from_secs(600);
/// While there is no daemon, how often it is looked whether there is still something to hold.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long the keeper may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// What the keeper sends with the descriptor, and what it is sent at the end.
const HERE: u8 = b'H';
const END: u8 = b'E';

/// A connection to the keeper. When it is dropped, the keeper holds the descriptor for the next.
#[derive(Debug)]
pub struct Lease {
    stream: UnixStream,
    /// The keeper, if this process has started it.
    keeper: Mutex<Option<Child>>,
}

impl Lease {
    /// Whether the keeper is there: it says nothing unasked, so what comes from it is its end.
    pub fn is_kept(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut polled, Some(&now)), Ok(0))
    }

    /// There is no next: the keeper ends, and its socket is gone (E4).
    pub fn end(&self) {
        // A keeper that is gone holds nothing.
        let _ = (&self.stream).write_all(&[END]);
        if !matches!((&self.stream).read(&mut [0]), Ok(0)) {
            // It does not answer, so it is not waited for.
            return;
        }
        if let Some(mut keeper) = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            let _ = keeper.wait();
        }
    }
}

impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Starts `program`, which is to call [`keep`] with its standard input and output, and takes the
/// lease. A socket that is at `path` is replaced.
pub fn start(mut program: Command, path: &Path, descriptor: OwnedFd) -> io::Result<Lease> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    program.current_dir("/").env_clear();
    program.stdin(Stdio::from(descriptor)).stdout(Stdio::from(OwnedFd::from(listener)));
    program.stderr(Stdio::null());
    let child = program.spawn()?;
    // Its own copies are closed with the command, so a keeper that fails is seen by `take`.
    drop(program);
    let (_, lease) = take(path)?;
    Ok(Lease { keeper: Mutex::new(Some(child)), ..lease })
}

/// Asks the keeper at `path` for the descriptor.
pub fn take(path: &Path) -> io::Result<(OwnedFd, Lease)> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    match descriptor {
        Some(descriptor) if received.bytes == 1 && byte == [HERE] => {
            Ok((descriptor, Lease { stream, keeper: Mutex::default() }))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the keeper gave no descriptor")),
    }
}

/// The keeper's whole life (E3), but for the end of the connection that it gives back: that is dropped when the socket
/// is gone (E4). `is_gone`: there is nothing left to hold.
pub fn keep(
    kept: &OwnedFd,
    listener: &UnixListener,
    limit: Duration,
    is_gone: impl Fn(&OwnedFd) -> bool,
) -> io::Result<Option<UnixStream>> {
    listener.set_nonblocking(true)?;
    let mut lease: Option<UnixStream> = None;
    let mut alone_since = Instant::now();
    loop {
        if lease.is_none() && (is_gone(kept) || alone_since.elapsed() > limit) {
            return Ok(None);
        }
        let (comes, ends) = wait(listener, lease.as_ref())?;
        if ends && let Some(stream) = &mut lease {
            let mut byte = [0];
            if matches!(stream.read(&mut byte), Ok(1)) && byte == [END] {
                return Ok(lease);
            }
            lease = None;
            alone_since = Instant::now();
        }
        if comes
            && let Ok((stream, _)) = listener.accept()
            && give(&stream, kept.as_fd()).is_ok()
        {
            // Who could ask has the cache's lock: the one before is dead.
            lease = Some(stream);
        }
    }
}

/// Whether somebody comes, and whether the holder of the lease has something to say or is gone.
fn wait(listener: &UnixListener, lease: Option<&UnixStream>) -> io::Result<(bool, bool)> {
    let events = PollFlags::IN;
    let mut polled = vec![PollFd::new(listener, events)];
    polled.extend(lease.map(|stream| PollFd::new(stream, events)));
    let second = Timespec { tv_sec: LOOK_AGAIN.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut polled, lease.is_none().then_some(&second)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let has = |at: usize| polled.get(at).is_some_and(|it| !it.revents().is_empty());
    Ok((has(0), has(1)))
}

fn give(stream: &UnixStream, kept: BorrowedFd<'_>) -> io::Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied)); // E2
    }
    stream.set_nonblocking(false)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [kept];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(stream, &[IoSlice::new(&[HERE])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Kept {
        path: std::path::PathBuf,
        is_gone: Arc<AtomicBool>,
        thread: std::thread::JoinHandle<io::Result<()>>,
    }

    fn kept(name: &str, limit: Duration) -> Kept {
        let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let is_gone = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_gone);
        let thread = std::thread::spawn(move || {
            let held = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            keep(&held, &listener, limit, |_| told.load(Ordering::Relaxed)).map(drop)
        });
        Kept { path, is_gone, thread }
    }

    impl Kept {
        fn ended(self) {
            self.thread.join().unwrap().unwrap();
            std::fs::remove_file(self.path).unwrap();
        }
    }

    #[test]
    fn the_descriptor_is_given_to_one_after_the_other_until_one_says_that_it_is_over() {
        let kept = kept("keep", KEEP);
        let device = std::fs::metadata("/dev/null").unwrap().rdev();
        for _ in 0..3 {
            let (descriptor, lease) = take(&kept.path).unwrap();
            let found = std::fs::File::from(descriptor).metadata().unwrap();
            assert_eq!(found.rdev(), device);
            assert!(lease.is_kept());
            drop(lease);
        }
        let (_, dying) = take(&kept.path).unwrap();
        let (_, next) = take(&kept.path).unwrap();
        drop(dying);
        next.end();
        kept.ended();
        assert!(!next.is_kept());
    }

    #[test]
    fn the_keeper_ends_when_it_holds_nothing_and_when_nobody_comes() {
        let gone = kept("gone", KEEP);
        let lease = take(&gone.path).unwrap().1;
        gone.is_gone.store(true, Ordering::Relaxed);
        drop(lease);
        gone.ended();
        let alone = kept("alone", Duration::ZERO);
        alone.ended();
    }
}
