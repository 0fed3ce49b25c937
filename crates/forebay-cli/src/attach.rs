// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--attach`: which kernel block device is made of each volume, and why not another.

use crate::args::Attach;
use anyhow::{Result, bail};
use forebay_core::units::VolumeIndex;
use std::path::{Path, PathBuf};

#[cfg(feature = "fuse")]
mod fuse;
#[cfg(feature = "fuse")]
pub use fuse::Attached;

#[cfg(not(feature = "fuse"))]
mod none;
#[cfg(not(feature = "fuse"))]
pub use none::Attached;

/// A volume to be attached.
#[cfg_attr(not(feature = "fuse"), allow(dead_code))]
pub struct Wanted {
    pub index: VolumeIndex,
    pub name: String,
    pub size_bytes: u64,
    pub logical_block: u32,
    pub backing: PathBuf,
    /// Whether the backing device takes discards.
    pub discards: bool,
}

/// Whether FUSE and loop devices are used. Says so, and what stands against the rest.
pub fn choose(wanted: Attach) -> Result<bool> {
    if wanted == Attach::None {
        return Ok(false);
    }
    match (obstacle(), wanted) {
        (None, Attach::Auto) => {
            tracing::info!(
                "attaches volumes by FUSE and loop devices; ublk and nbd are not in this \
                 version"
            );
            Ok(true)
        }
        (None, _) => Ok(true),
        (Some(why), Attach::Fuse) => bail!("--attach fuse: {why}"),
        (Some(why), _) => {
            tracing::info!("attaches no volume, serves NBD only: {why}");
            Ok(false)
        }
    }
}

fn obstacle() -> Option<&'static str> {
    if !cfg!(feature = "fuse") {
        return Some("this program was built without the feature `fuse`");
    }
    if forebay::host::runtime_dir::Places::found().user_id != 0 {
        return Some("not root; run by root it would add a block device, /dev/loopN, per volume");
    }
    if !Path::new("/dev/fuse").exists() {
        return Some("/dev/fuse is missing; `modprobe fuse` adds it");
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("/dev/loop-control is missing; `modprobe loop` adds it");
    }
    None
}

/// What keeps a process alive that the kernel waits for. Before the first thread.
pub fn protect() {
    let failed = forebay::host::protect::protect();
    let failed: Vec<String> =
        failed.iter().map(|failed| format!("{failed} ({})", failed.source)).collect();
    if !failed.is_empty() {
        tracing::warn!("when memory is short: {}", failed.join("; "));
    }
}
