// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices that a daemon before has left: they wait for the next one, and go on with what they were made by or not at all.
//!
//! # Invariants
//!
//! - **A1** A device that waits is no other's: where a volume has one, the cache is served by that kind or not at all. What else could be
//!   had by now, or what is asked for since, does not count as long as it is there.

use super::{Kind, attached};
use crate::args::Attach;
use anyhow::{Result, bail};
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

/// All that are there. `cache`: its identity.
pub(super) fn find(cache: &str, volumes: &[Known]) -> Result<Vec<LeftDevice>> {
    let mut all = Vec::new();
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
