// SPDX-License-Identifier: Apache-2.0 OR MIT
//! May we use this path as a cache device or a backing device?
//!
//! Two questions are answered before a byte is read for caching: is the device or file free
//! ([`check_free`]), and is neither of cache and backing device on top of the other
//! ([`related`]). Every refusal names the holder, so that the next step is plain.
//!
//! # Invariants
//!
//! - **G1** What is mounted, swapped on, or part of something else, is refused: the path itself,
//!   each of its partitions, and the whole disk when the path is a partition.
//! - **G2** A block device that nothing visible holds is still refused when the kernel does not
//!   grant an exclusive open. That is how mounts in other namespaces, ZFS pools, external
//!   journals and a second forebay are found.
//! - **G3** Nothing is opened for writing.
//!
//! # Limits
//!
//! The answer is of the moment. Whoever goes on to use a block device keeps it open with `O_EXCL`
//! (a file: locked), and that is what makes the answer last. A regular file that a program merely
//! has open is not refused; [`super::loop_device::openers`] names such programs.

use super::loop_device::same_file;
use super::machine::{DeviceNumber, Host, Link, LoopBinding, Mount, Node, Target, TargetError};
use crate::advice::of_path;
use rustix::fs::{Mode, OFlags};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why a path is not ours to use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// Not a block device or file, or not to be examined.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A table of the kernel's cannot be read, so nothing can be ruled out.
    #[error("{path}: cannot be read, so it is unknown what is in use; is it mounted here?")]
    Unreadable {
        /// Of the table.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The device is not in sysfs, so nothing can be ruled out.
    #[error(
        "{path}: device {number} is not in {sys}, so its users are unknown; is sysfs mounted here?"
    )]
    Unknown {
        /// As given.
        path: PathBuf,
        /// Its number.
        number: DeviceNumber,
        /// Where it was looked for.
        sys: PathBuf,
    },
    /// It, a partition of it, or the disk it is on, is mounted.
    #[error("{path}: {device} is mounted at {mount_point} ({kind}); unmount it first")]
    Mounted {
        /// As given.
        path: PathBuf,
        /// What is mounted.
        device: PathBuf,
        /// Where.
        mount_point: PathBuf,
        /// The file system.
        kind: String,
    },
    /// It is one of the devices of a mounted btrfs file system.
    #[error("{path}: {device} belongs to a mounted btrfs file system; unmount it first")]
    BtrfsMember {
        /// As given.
        path: PathBuf,
        /// Which device.
        device: PathBuf,
    },
    /// It, a partition of it, or the disk it is on, is swap space.
    #[error("{path}: {device} is in use as swap; run `swapoff {device}` first")]
    Swap {
        /// As given.
        path: PathBuf,
        /// What is swapped on.
        device: PathBuf,
    },
    /// An array, a volume group, a mapping … is made of it.
    #[error("{path}: {device} is part of {holder}; take that apart or use it instead")]
    Held {
        /// As given.
        path: PathBuf,
        /// Which device.
        device: PathBuf,
        /// The holder as a person would name it.
        holder: String,
        /// The holder's name in the kernel.
        holder_name: String,
    },
    /// It, a partition of it, or the disk it is on, is behind an active loop device. The loop
    /// driver is no holder to the kernel, and it does not open exclusively.
    #[error(
        "{path}: {device} is behind /dev/{loop_name}{}; {}",
        mounted_text(.mount_points),
        if .mount_points.is_empty() { "detach it first" } else { "unmount and detach it first" }
    )]
    LoopBacked {
        /// As given.
        path: PathBuf,
        /// What is behind the loop device.
        device: PathBuf,
        /// `loop3`.
        loop_name: String,
        /// Where that, or a partition of it, is mounted.
        mount_points: Vec<PathBuf>,
    },
    /// The kernel does not grant an exclusive open.
    #[error(
        "{path}: in exclusive use by something not visible here (another mount namespace, ZFS, \
         another forebay); stop that first"
    )]
    Busy {
        /// As given.
        path: PathBuf,
    },
    /// The device cannot be opened at all.
    #[error("{path}: cannot be opened for reading: {why}; {}", of_path(why))]
    Open {
        /// As given.
        path: PathBuf,
        /// Why. It is said above, so it is no source, which would be told once more.
        why: io::Error,
    },
}

/// How two paths are not two separate stores.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Relation {
    /// The same block device, or the same file.
    Same,
    /// `upper` rests on `lower`.
    RestsOn {
        /// The path on top.
        upper: PathBuf,
        /// The path underneath.
        lower: PathBuf,
        /// The last link of the chain between them.
        through: Link,
    },
}

impl fmt::Display for Relation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::RestsOn { upper, lower, through } = self else {
            return out.write_str("both paths lead to the same device or file");
        };
        let (upper, lower) = (upper.display(), lower.display());
        match through {
            Link::PartitionOf => write!(out, "{upper} is, or rests on, a partition of {lower}"),
            Link::MadeOf => write!(out, "{upper} is, or rests on, a device made of {lower}"),
            Link::LoopOf => write!(out, "{upper} is, or rests on, a loop device over {lower}"),
            Link::FileOn(mount_point) => {
                let mount_point = mount_point.display();
                write!(
                    out,
                    "{upper} is on the file system that {lower} has mounted at {mount_point}"
                )
            }
        }
    }
}

/// Refuses what somebody uses, on the machine we run on. See the module for what is looked at.
pub fn check_free(path: &Path) -> Result<(), GuardError> {
    let target = Target::of(path)?;
    Host::default().check_free(&target)?;
    match target {
        Target::Block { path, .. } => check_exclusive(path),
        Target::File { .. } => Ok(()),
    }
}

/// Whether one path rests on the other, on the machine we run on; `None` when they are separate.
/// Two partitions of one disk, or two volumes of one group, are separate.
pub fn related(a: &Path, b: &Path) -> Result<Option<Relation>, GuardError> {
    Host::default().related(&Target::of(a)?, &Target::of(b)?)
}

impl Host {
    /// [`check_free`](check_free()) without the exclusive open, which only a real device can be
    /// asked for.
    pub fn check_free(&self, target: &Target) -> Result<(), GuardError> {
        let view = View::of(self)?;
        match target {
            Target::Block { path, number } => {
                let node = self.node(*number).ok_or_else(|| GuardError::Unknown {
                    path: path.clone(),
                    number: *number,
                    sys: self.sys.clone(),
                })?;
                let parent = node.parent();
                let partitions = node.partitions();
                for node in std::iter::once(&node).chain(&partitions).chain(&parent) {
                    view.check_node(path, node)?; // G1
                }
                Ok(())
            }
            Target::File { path, .. } => view.check_file(target, path),
        }
    }

    /// [`related`](related()) of two targets of this machine.
    pub fn related(&self, a: &Target, b: &Target) -> Result<Option<Relation>, GuardError> {
        if a.is_same(b) {
            return Ok(Some(Relation::Same));
        }
        for (upper, lower) in [(a, b), (b, a)] {
            let beneath = self
                .beneath(upper)
                .map_err(|source| unreadable(self.proc.join("self/mountinfo"), source))?;
            if let Some(found) = beneath.into_iter().find(|below| below.target.is_same(lower)) {
                return Ok(Some(Relation::RestsOn {
                    upper: upper.path().to_owned(),
                    lower: lower.path().to_owned(),
                    through: found.through,
                }));
            }
        }
        Ok(None)
    }
}

/// The kernel's tables, read once for one check.
struct View<'a> {
    host: &'a Host,
    mounts: Vec<Mount>,
    swaps: Vec<PathBuf>,
    loops: Vec<LoopBinding>,
    btrfs: Vec<Vec<Node>>,
}

impl<'a> View<'a> {
    fn of(host: &'a Host) -> Result<Self, GuardError> {
        let mounts =
            host.mounts().map_err(|source| unreadable(host.proc.join("self/mountinfo"), source))?;
        let swaps = host.swaps().map_err(|source| unreadable(host.proc.join("swaps"), source))?;
        let devices = host.sys.join("block");
        // An unreadable /sys/block would look like a machine without loop devices.
        std::fs::read_dir(&devices).map_err(|source| unreadable(devices, source))?;
        Ok(Self {
            host,
            mounts,
            swaps: swaps.into_iter().map(|swap| swap.path).collect(),
            loops: host.loops(),
            btrfs: host.btrfs_members(),
        })
    }

    fn check_node(&self, path: &Path, node: &Node) -> Result<(), GuardError> {
        let path = path.to_owned();
        let device = node.path();
        if let Some(mount) = self.host.mounts_of(&self.mounts, node.number).into_iter().next() {
            let Mount { mount_point, kind, .. } = mount;
            return Err(GuardError::Mounted { path, device, mount_point, kind });
        }
        if self.btrfs.iter().flatten().any(|member| member.number == node.number) {
            return Err(GuardError::BtrfsMember { path, device });
        }
        let is_node = |swap: &PathBuf| {
            self.host.node_at_path(swap).is_some_and(|other| other.number == node.number)
        };
        if self.swaps.iter().any(is_node) {
            return Err(GuardError::Swap { path, device });
        }
        if let Some(holder) = node.holders().into_iter().next() {
            let (holder, holder_name) = (holder.described(), holder.name);
            return Err(GuardError::Held { path, device, holder, holder_name });
        }
        let is_behind = |found: &&LoopBinding| {
            !self.is_out_of_reach(&found.backing_file, None)
                && self
                    .host
                    .node_at_path(&found.backing_file)
                    .is_some_and(|other| other.number == node.number)
        };
        match self.loops.iter().find(is_behind) {
            Some(binding) => Err(self.behind(path, device, binding)),
            None => Ok(()),
        }
    }

    fn check_file(&self, target: &Target, path: &Path) -> Result<(), GuardError> {
        if let Some(swap) = self.swaps.iter().find(|swap| same_file(target, swap)) {
            return Err(GuardError::Swap { path: path.to_owned(), device: swap.clone() });
        }
        let on = match target {
            Target::File { on, .. } => Some(*on),
            Target::Block { .. } => None,
        };
        let is_it = |found: &&LoopBinding| match self.is_out_of_reach(&found.backing_file, on) {
            true => found.backing_file == path,
            false => same_file(target, &found.backing_file),
        };
        match self.loops.iter().find(is_it) {
            Some(binding) => Err(self.behind(path.to_owned(), path.to_owned(), binding)),
            None => Ok(()),
        }
    }

    /// Whether a file is on a FUSE file system that what we look for is not on. Nobody may look at it, not
    /// even with `stat`: whose process does not answer would have us wait for ever, and if that was a killed
    /// daemon of ours, for ourselves.
    fn is_out_of_reach(&self, file: &Path, wanted_on: Option<DeviceNumber>) -> bool {
        let over = self.mounts.iter().filter(|mount| file.starts_with(&mount.mount_point));
        let mount = over.max_by_key(|mount| mount.mount_point.as_os_str().len());
        mount.is_some_and(|mount| {
            let is_ours = mount.mount_source == "forebay";
            mount.kind.starts_with("fuse") && (is_ours || Some(mount.number) != wanted_on)
        })
    }

    fn behind(&self, path: PathBuf, device: PathBuf, binding: &LoopBinding) -> GuardError {
        let mut mount_points = Vec::new();
        for node in std::iter::once(binding.node.clone()).chain(binding.node.partitions()) {
            let mounts = self.host.mounts_of(&self.mounts, node.number);
            mount_points.extend(mounts.into_iter().map(|mount| mount.mount_point));
        }
        let loop_name = binding.node.name.clone();
        GuardError::LoopBacked { path, device, loop_name, mount_points }
    }
}

fn check_exclusive(path: PathBuf) -> Result<(), GuardError> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC; // G3
    match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::BUSY) => Err(GuardError::Busy { path }), // G2
        Err(error) => Err(GuardError::Open { path, why: error.into() }),
    }
}

fn unreadable(path: PathBuf, source: io::Error) -> GuardError {
    GuardError::Unreadable { path, source }
}

fn mounted_text(mount_points: &[PathBuf]) -> String {
    if mount_points.is_empty() {
        return String::new();
    }
    let points: Vec<String> =
        mount_points.iter().map(|point| point.display().to_string()).collect();
    format!(" (mounted at {})", points.join(", "))
}

#[cfg(test)]
mod tests;
