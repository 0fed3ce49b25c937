// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices that a daemon before has left: they wait for the next one, and go on with what they were made by or not at all.
//!
//! # Invariants
//!
//! - **A1** A device that waits is no other's: where a volume has one, the cache is served by that kind or not at all. What else could be
//!   had by now, or what is asked for since, does not count as long as it is there.
//! - **A2** The kernel may hold what was written to such a device and what was read of it, and goes on with both. So nobody drains, forgets or
//!   formats behind its back, and no other disk comes behind it unless somebody says that what was written counts.

use super::{Kind, attached};
use crate::args::{Attach, IfChanged};
use anyhow::{Result, bail};
use forebay::host::runtime_dir::Places;
use forebay::shard::uuid_text;
use forebay_core::format::superblock::Superblock;
use std::fmt;
use std::path::PathBuf;

/// A volume that may have a device.
pub struct Known {
    pub name: String,
    /// What it is known by in the next process as well.
    pub uuid: [u8; 16],
}

/// A device that waits for the next daemon, or for the next program of this one.
#[derive(Debug)]
pub struct LeftDevice {
    pub kind: Kind,
    pub device: PathBuf,
    pub volume: String,
}

impl fmt::Display for LeftDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, device, volume } = self;
        write!(out, "volume {volume} has {}", attached::device_text(device, *kind))
    }
}

/// The volumes that a cache has recorded.
pub fn recorded(superblock: &Superblock) -> Vec<Known> {
    let volumes = superblock.volumes.iter().flatten();
    volumes.map(|it| Known { name: it.name.clone(), uuid: it.uuid }).collect()
}

/// Refuses what is done to a cache that nobody serves while a volume of it, or the one of that name, has a device (A2).
pub fn check_none(superblock: &Superblock, name: Option<&str>) -> Result<()> {
    match of_cache(superblock)?.iter().find(|it| name.is_none_or(|name| it.volume == name)) {
        Some(first) => bail!(
            "{first}, left by a daemon that was killed: the kernel may hold what the cache has not got yet, and would write it \
             later; serve the cache again, unmount that device, and stop the daemon (`forebay stop`, with --drain to drain it), or reboot if that may be lost; \
             nothing was changed"
        ),
        None => Ok(()),
    }
}

/// The device of one volume, if it is there still.
pub fn of_volume(superblock: &Superblock, name: &str) -> Result<Option<LeftDevice>> {
    Ok(of_cache(superblock)?.into_iter().find(|it| it.volume == name))
}

fn of_cache(superblock: &Superblock) -> Result<Vec<LeftDevice>> {
    find(&uuid_text(&superblock.uuid), &recorded(superblock))
}

impl LeftDevice {
    /// Refuses another disk, or one that others have changed, behind it (A2).
    pub fn check_change(&self, what: &str, if_changed: Option<IfChanged>) -> Result<()> {
        let Self { volume, .. } = self;
        match if_changed {
            Some(IfChanged::KeepDirty) => Ok(()),
            Some(IfChanged::LoseDirty) => bail!(
                "{self}, left by a daemon that was killed, and its backing device was changed ({what}): lose-dirty gives up what the \
                 cache holds, but not what the kernel holds, which it would write over that change; take that device away first (a \
                 reboot does)"
            ),
            None => bail!(
                "{self}, left by a daemon that was killed, and its backing device was changed ({what}): what the kernel holds is of \
                 that disk as it was, and would be written over it as it is now; put the disk back as it was, take that device away (a \
                 reboot does), or give --if-changed {volume}=keep-dirty (`forebay attach`: keep-dirty alone) if what was written to the device \
                 counts"
            ),
        }
    }
}

/// All that are there. `cache`: its identity. Those of others than root end with their daemon.
pub(super) fn find(cache: &str, volumes: &[Known]) -> Result<Vec<LeftDevice>> {
    let mut all = Vec::new();
    if Places::found().user_id != 0 {
        return Ok(all);
    }
    for kind in Kind::ALL {
        let left = kind.left(cache, volumes)?.into_iter();
        all.extend(left.map(|(volume, device)| LeftDevice { kind, device, volume }));
    }
    Ok(all)
}

/// Those of volumes, each asked for by what its volume is known by.
pub(super) fn of_each(
    volumes: &[Known],
    mut device: impl FnMut(&[u8; 16]) -> Result<Option<PathBuf>>,
) -> Result<Vec<(String, PathBuf)>> {
    let of = |volume: &Known| Ok(device(&volume.uuid)?.map(|it| (volume.name.clone(), it)));
    volumes.iter().map(of).filter_map(Result::transpose).collect()
}

/// What all go on by, if there are any; refuses what they could not go on by (A1).
pub fn kept(wanted: Attach, left: &[LeftDevice]) -> Result<Option<Kind>> {
    let Some(first) = left.first() else { return Ok(None) };
    let asked = Kind::asked(wanted);
    if wanted == Attach::Auto {
        let Some(other) = left.iter().find(|it| it.kind != first.kind) else {
            return Ok(Some(first.kind));
        };
        bail!(
            "{first}, and {other}: they cannot be served together; name the kind that goes on with --attach (nobody serves the others \
             any more)"
        );
    }
    // Who has several, and names one, has been told.
    if left.iter().any(|it| asked == Some(it.kind)) {
        return Ok(asked);
    }
    bail!(
        "--attach {}: {first}, which nobody would serve any more; leave attach at {} until a stop has taken that device away",
        asked.map_or("none", Kind::name),
        first.kind.name()
    )
}
