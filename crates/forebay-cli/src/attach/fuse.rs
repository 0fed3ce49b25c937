// SPDX-License-Identifier: Apache-2.0 OR MIT
//! FUSE and loop: whether they can be used here, what is left of a killed daemon, and the beginning.

use super::attached::{chain, holders_text};
use super::{Begun, Wanted};
use anyhow::{Context, Result};
use forebay::host::loop_device::{Holder, LoopError};
use forebay::host::machine::Host;
use forebay::host::runtime_dir::RuntimeDir;
use forebay_serve::fuse::attach::FuseAttachments;
use forebay_serve::fuse::mount::{FuseMount, FuseVolume, clear_stale};
use forebay_serve::server::Server;
use std::path::Path;

/// Why it cannot be had.
pub fn obstacle() -> Option<String> {
    if !Path::new("/dev/fuse").exists() {
        return Some("/dev/fuse is missing; `modprobe fuse` adds it".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("/dev/loop-control is missing; `modprobe loop` adds it".into());
    }
    None
}

/// Clears away what a killed daemon left, mounts, and begins to attach.
pub fn begin(server: &mut Server, uuid: &str, wanted: Vec<Wanted>) -> Result<Begun> {
    let directory = RuntimeDir::open()?.path().join(format!("{uuid}.fuse"));
    let shown = directory.display();
    let held =
        clear_stale(&directory).with_context(|| format!("{shown}: cannot be cleared away"))?;
    let problems: Vec<String> = held.iter().map(stale_text).collect();
    let volumes = wanted.into_iter().map(file).collect();
    let (mount, front_end) = FuseMount::new(&directory, volumes)
        .with_context(|| format!("{shown}: cannot be mounted on"))?;
    server.add(Box::new(front_end));
    let (attachments, reports) = FuseAttachments::begin(mount).context("cannot start a thread")?;
    Ok(Begun { attachments: Box::new(attachments), reports, problems })
}

fn file(wanted: Wanted) -> FuseVolume {
    let discards_to_zero = wanted.discards && holes_read_as_zeros(&wanted.backing);
    // A file cannot be called `.` or `..`.
    let is_dots = wanted.name.bytes().all(|byte| byte == b'.');
    let name = if is_dots { format!("volume-{}", wanted.index.0) } else { wanted.name };
    FuseVolume {
        index: wanted.index,
        name,
        size_bytes: wanted.size_bytes,
        logical_block: wanted.logical_block,
        discards_to_zero,
    }
}

/// A file's do. A block device's do if the kernel can have it zero ranges by itself: only then
/// does it take a hole.
fn holes_read_as_zeros(backing: &Path) -> bool {
    let host = Host::default();
    let Some(node) = host.node_at_path(backing) else { return true };
    let zeroes = "queue/write_zeroes_max_bytes";
    let found = node.attribute(zeroes).or_else(|| node.parent()?.attribute(zeroes));
    found.is_some_and(|bytes| bytes != "0")
}

fn stale_text(error: &LoopError) -> String {
    let LoopError::StillHeld { device, holders } = error else { return chain(error) };
    let mounts: Vec<String> = holders
        .iter()
        .filter_map(|holder| match holder {
            Holder::Mount { mount_point, .. } => Some(format!("umount {}", mount_point.display())),
            _ => None,
        })
        .collect();
    let device = device.display();
    if mounts.is_empty() {
        return format!(
            "{device} of the daemon before gives errors only; close it: {}",
            holders_text(holders)
        );
    }
    format!(
        "{device} of the daemon before gives errors only; run `{}`, then mount the new device",
        mounts.join("; ")
    )
}
