// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's view of FUSE and loop: what to begin, what to say, when it is over.

use super::Wanted;
use anyhow::{Context, Result};
use forebay::host::loop_device::{Holder, LoopError};
use forebay::host::machine::Host;
use forebay::host::runtime_dir::RuntimeDir;
use forebay_core::units::VolumeIndex;
use forebay_serve::fuse::attach::{Attachments, Report};
use forebay_serve::fuse::mount::{FuseMount, FuseVolume, clear_stale};
use forebay_serve::server::Server;
use std::error::Error;
use std::path::{Path, PathBuf};

/// What is attached.
pub struct Attached {
    attachments: Attachments,
    names: Vec<(VolumeIndex, String)>,
    problems: Vec<String>,
    is_ready: bool,
    is_gone: bool,
}

impl Attached {
    /// Clears away what a killed daemon left, mounts, and begins to attach.
    pub fn begin(server: &mut Server, uuid: &str, wanted: Vec<Wanted>) -> Result<Attached> {
        let directory = RuntimeDir::open()?.path().join(format!("{uuid}.fuse"));
        let shown = directory.display();
        let held =
            clear_stale(&directory).with_context(|| format!("{shown}: cannot be cleared away"))?;
        let mut problems = Vec::new();
        for error in held {
            let text = stale_text(&error);
            tracing::warn!("{text}");
            problems.push(text);
        }
        let names = wanted.iter().map(|volume| (volume.index, volume.name.clone())).collect();
        let volumes = wanted.into_iter().map(file).collect();
        let (mount, front_end) = FuseMount::new(&directory, volumes)
            .with_context(|| format!("{shown}: cannot be mounted on"))?;
        server.add(Box::new(front_end));
        let attachments = Attachments::begin(mount).context("cannot start a thread")?;
        Ok(Attached { attachments, names, problems, is_ready: false, is_gone: false })
    }

    /// Says what happened.
    pub fn tell_news(&mut self) {
        for report in self.attachments.reports() {
            match report {
                Report::Attached { volume, device, is_direct } => {
                    println!("{} {}", device.display(), self.name(volume));
                    tracing::info!("{}: attached as {}", self.name(volume), device.display());
                    if !is_direct {
                        tracing::warn!(
                            "{}: direct I/O is refused, so each block is in memory twice",
                            device.display()
                        );
                    }
                }
                Report::Failed { volume, error } => {
                    let text = format!("{}: not attached: {}", self.name(volume), chain(&error));
                    tracing::warn!("{text}");
                    self.problems.push(text);
                }
                Report::Ready => self.is_ready = true,
                Report::Held { device, holders } => tracing::warn!(
                    "stop waits for {}: {}; a second signal ends it now",
                    device.display(),
                    holders_text(&holders)
                ),
                Report::Detached { device } => {
                    tracing::info!("{} is detached", device.display());
                }
                Report::Gone(result) => {
                    self.is_gone = true;
                    if let Err(error) = result {
                        tracing::warn!("the FUSE mount could not be removed: {error}");
                    }
                }
            }
        }
    }

    /// Each volume is attached or has failed.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// All devices and the mount are gone, or given up.
    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// What went wrong.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Begins to detach everything.
    pub fn release(&mut self) -> Result<()> {
        self.attachments.release().context("cannot start a thread")
    }

    /// Waits no more for those who hold devices.
    pub fn give_up(&self) {
        self.attachments.give_up();
    }

    /// `/dev/loop3 (fuse), mounted at /mnt`.
    pub fn text(&self, volume: VolumeIndex) -> Option<String> {
        let device = self.attachments.device(volume)?;
        let mut text = format!("{} (fuse)", device.display());
        for mount_point in mount_points(device) {
            text += &format!(", mounted at {}", mount_point.display());
        }
        Some(text)
    }

    fn name(&self, volume: VolumeIndex) -> &str {
        self.names.iter().find(|name| name.0 == volume).map_or("", |name| &name.1)
    }
}

/// Where the device and its partitions are mounted. Reads tables in memory only, no device.
fn mount_points(device: &Path) -> Vec<PathBuf> {
    let host = Host::default();
    let Some(node) = host.node_at_path(device) else { return Vec::new() };
    let mounts = host.mounts().unwrap_or_default();
    let nodes = std::iter::once(node.clone()).chain(node.partitions());
    let of = |node: forebay::host::machine::Node| host.mounts_of(&mounts, node.number);
    nodes.flat_map(of).map(|mount| mount.mount_point).collect()
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

fn holders_text(holders: &[Holder]) -> String {
    match holders {
        [] => "it is held open by something not visible here".into(),
        _ => holders.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn chain(error: &LoopError) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
