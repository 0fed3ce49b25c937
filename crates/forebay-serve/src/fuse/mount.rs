// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The FUSE mount of a cache: at a fixed place, so that the next daemon finds what a killed one
//! left.

pub use super::files::FuseVolume;

use super::channel::Channel;
use super::files::Files;
use super::front_end::FuseFrontEnd;
use forebay::host::loop_device::{self, LoopError};
use forebay::host::machine::Host;
use forebay::io::Bell;
use rustix::mount::{UnmountFlags, unmount};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A mounted directory.
pub struct FuseMount {
    directory: PathBuf,
    volumes: Vec<FuseVolume>,
    bell: Arc<Bell>,
}

impl FuseMount {
    /// Mounts the volumes as files in `directory`, which is made. Requests wait until the front
    /// end is part of a running server.
    pub fn new(
        directory: &Path,
        volumes: Vec<FuseVolume>,
    ) -> io::Result<(FuseMount, FuseFrontEnd)> {
        fs::DirBuilder::new().mode(0o700).recursive(true).create(directory)?;
        let bell = Arc::new(Bell::new()?);
        let channel = Channel::mount(directory)?;
        let mount = FuseMount { directory: directory.into(), volumes, bell: Arc::clone(&bell) };
        let files = Files::new(mount.volumes.clone());
        match FuseFrontEnd::new(channel, files, bell) {
            Ok(front_end) => Ok((mount, front_end)),
            Err(error) => {
                let _ = mount.abandon(); // the error is what matters
                Err(error)
            }
        }
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

    /// Whether a file the kernel names is in it.
    pub(super) fn holds(&self, file: &Path) -> bool {
        file.starts_with(&self.directory)
    }

    /// Unmounts it and removes the directory. The server must be running.
    pub(super) fn end(self) -> io::Result<()> {
        if unmount(&self.directory, UnmountFlags::empty()).is_err() {
            // Somebody looks into it: it goes when they do.
            unmount(&self.directory, UnmountFlags::DETACH)?;
        }
        fs::remove_dir(&self.directory)
    }

    /// Takes it away from under those who use it; they get errors when the process ends.
    pub(super) fn abandon(self) -> io::Result<()> {
        unmount(&self.directory, UnmountFlags::DETACH)?;
        fs::remove_dir(&self.directory)
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
