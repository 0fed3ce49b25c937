// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The FUSE mount of a cache: at a fixed place, so that the next daemon finds what a killed one
//! left: all of it, if a keeper has the connection to the kernel ([`keeper`]).

pub use super::files::FuseVolume;

use super::channel::Channel;
use super::files::Files;
use super::front_end::FuseFrontEnd;
use forebay::host::keeper::{self, Lease};
use forebay::host::loop_device::{self, LoopError};
use forebay::host::machine::Host;
use forebay::io::Bell;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{UnmountFlags, unmount};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A mounted directory.
pub struct FuseMount {
    directory: PathBuf,
    volumes: Vec<FuseVolume>,
    bell: Arc<Bell>,
    /// Of the process that keeps the connection to the kernel, if there is one.
    lease: Option<Lease>,
}

/// Where the connection of a daemon that was killed may be.
pub struct Kept<'a> {
    /// Its keeper's socket.
    pub keeper: &'a Path,
    /// What another keeper is.
    pub program: Command,
    /// What the service manager kept.
    pub stored: Option<OwnedFd>,
}

/// Why there is no keeper.
pub type Unkept = io::Error;

/// A mount whose requests wait for a front end.
pub struct Waiting {
    mount: FuseMount,
    channel: Channel,
}

impl Waiting {
    /// The front end, on the loop's thread.
    pub fn front_end(self) -> io::Result<(FuseMount, FuseFrontEnd)> {
        let Waiting { mount, channel } = self;
        let files = Files::new(mount.volumes.clone());
        match FuseFrontEnd::new(channel, files, mount.bell(), mount.lease.is_some()) {
            Ok(front_end) => Ok((mount, front_end)),
            Err(error) => {
                let _ = mount.abandon(); // the error is what matters
                Err(error)
            }
        }
    }
}

impl FuseMount {
    /// Mounts the volumes as files in `directory`, which is made. That may wait for the kernel and the keeper; not on the loop's thread (K1
    /// in [`crate::attach`]). Requests wait until the front end is part of a running server. If the kernel can give a request to two processes, one
    /// after the other, a keeper is started, which is `program` with its socket at `keeper`, and the
    /// connection is given to `store`, too.
    pub fn mount(
        directory: &Path,
        volumes: Vec<FuseVolume>,
        keeper: &Path,
        program: Command,
        store: &dyn Fn(BorrowedFd<'_>),
    ) -> io::Result<(Waiting, Option<Unkept>)> {
        fs::DirBuilder::new().mode(0o700).recursive(true).create(directory)?;
        let (channel, resends) = Channel::mount(directory)?;
        let kept = match resends {
            true => channel.descriptor().and_then(|it| keeper::start(program, keeper, it)),
            false => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel's FUSE is older than Linux 6.9",
            )),
        };
        let (lease, unkept) = match kept {
            Ok(lease) => (Some(lease), None),
            Err(error) => (None, Some(error)),
        };
        Ok((FuseMount::with(directory, volumes, channel, lease, store)?, unkept))
    }

    /// Goes on with what a killed daemon had mounted at `directory`, if its keeper is there; or if the
    /// service manager has it, with another keeper.
    pub fn take_over(
        directory: &Path,
        volumes: Vec<FuseVolume>,
        before: Kept<'_>,
        store: &dyn Fn(BorrowedFd<'_>),
    ) -> io::Result<Option<Waiting>> {
        let (descriptor, lease) = match (keeper::take(before.keeper), before.stored) {
            (Ok(taken), _) => taken,
            (Err(_), None) => return Ok(None),
            (Err(_), Some(stored)) => {
                let lease = keeper::start(before.program, before.keeper, stored.try_clone()?)?;
                (stored, lease)
            }
        };
        let mounts = Host::default().mounts()?;
        let is_there = mounts.iter().any(|it| it.mount_point == directory && it.kind == "fuse");
        if !is_there || is_unmounted(&descriptor) {
            lease.end();
            return Ok(None);
        }
        let channel = Channel::resume(descriptor)?;
        FuseMount::with(directory, volumes, channel, Some(lease), store).map(Some)
    }

    fn with(
        directory: &Path,
        volumes: Vec<FuseVolume>,
        channel: Channel,
        lease: Option<Lease>,
        store: &dyn Fn(BorrowedFd<'_>),
    ) -> io::Result<Waiting> {
        if lease.is_some() {
            store(channel.descriptor()?.as_fd());
        }
        let bell = Arc::new(Bell::new()?);
        let mount = FuseMount { directory: directory.into(), volumes, bell, lease };
        Ok(Waiting { mount, channel })
    }

    /// The files in it.
    pub(super) fn volumes(&self) -> &[FuseVolume] {
        &self.volumes
    }

    /// Where a volume's file is.
    pub(super) fn file(&self, volume: &FuseVolume) -> PathBuf {
        self.directory.join(&volume.name)
    }

    pub(super) fn bell(&self) -> Arc<Bell> {
        Arc::clone(&self.bell)
    }

    /// Where it is.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// What a thread that ends it must keep open.
    pub(super) fn lease(&self) -> Option<BorrowedFd<'_>> {
        self.lease.as_ref().map(AsFd::as_fd)
    }

    /// By a keeper, for the next process. It may have been ended by somebody since it began.
    pub(super) fn is_kept(&self) -> bool {
        self.lease.as_ref().is_some_and(Lease::is_kept)
    }

    /// Unmounts it and removes the directory. The server must be running.
    pub(super) fn end(&self) -> io::Result<()> {
        if unmount(&self.directory, UnmountFlags::empty()).is_err() {
            // Somebody looks into it: it goes when they do.
            unmount(&self.directory, UnmountFlags::DETACH)?;
        }
        if let Some(lease) = &self.lease {
            lease.end();
        }
        fs::remove_dir(&self.directory)
    }

    /// Ends the wait for those who use it. With a keeper it stays, for the next daemon; else it is
    /// taken away from under them, and they get errors when the process ends.
    pub(super) fn abandon(self) -> io::Result<()> {
        if self.lease.is_some() {
            return Ok(());
        }
        unmount(&self.directory, UnmountFlags::DETACH)?;
        fs::remove_dir(&self.directory)
    }
}

/// Whether a connection to the kernel is one no longer.
pub fn is_unmounted(descriptor: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(descriptor, PollFlags::empty())];
    match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(_) => polled[0].revents().contains(PollFlags::ERR),
        Err(_) => true,
    }
}

/// Clears away what a killed daemon left: loop devices over files in `directory`, and the dead
/// mount. Gives what is still held; the kernel detaches it when that ends.
pub fn clear_stale(directory: &Path) -> io::Result<Vec<LoopError>> {
    let host = Host::default();
    let mut held = Vec::new();
    for stale in host.loops() {
        if stale.backing_file.starts_with(directory)
            && let Err(error) = loop_device::detach(&Path::new("/dev").join(&stale.node.name))
        {
            held.push(error);
        }
    }
    // Bounded by the mounts there were, one over the other.
    for mount in host.mounts()? {
        if mount.mount_point == directory {
            unmount(directory, UnmountFlags::DETACH)?;
        }
    }
    Ok(held)
}
