// SPDX-License-Identifier: Apache-2.0 OR MIT
//! ublk: whether it can be used here, and the beginning.

use super::attached::chain;
use super::left::{self, Known};
use super::{Begun, Rest, Wanted};
use crate::names;
use anyhow::{Context, Result};
use forebay_serve::attach::DeviceVolume;
use forebay_serve::ublk::attach;
use forebay_serve::ublk::control::Control;
use std::path::{Path, PathBuf};

/// Why it cannot be had.
pub fn obstacle() -> Option<String> {
    if !Path::new("/dev/ublk-control").exists() {
        return Some("/dev/ublk-control is missing; `modprobe ublk_drv` adds it".into());
    }
    Control::open().err().map(|error| chain(&error))
}

/// The devices of volumes that wait for the next daemon. Where the driver cannot be asked nobody can take one over: those that are there
/// as it was written down are in the way all the same (A1 of `left`).
pub fn left(cache: &str, volumes: &[Known]) -> Result<Vec<(String, PathBuf)>> {
    if obstacle().is_some() {
        return Ok(names::all_of(cache, "ublkb"));
    }
    let mut control = Control::open()?;
    left::of_each(volumes, |uuid| Ok(attach::left(&mut control, uuid)?))
}

/// Makes the devices, or takes over those of a daemon that is gone; then begins to start them.
pub fn prepare(wanted: &[Wanted]) -> Result<Rest> {
    let volumes: Vec<DeviceVolume> = wanted.iter().map(Wanted::device_volume).collect();
    let ready = attach::prepare(Control::open()?, volumes);
    Ok(Box::new(move |server, _| {
        let (attachments, front_end, reports) = attach::begin(ready).context("cannot start")?;
        server.add(Box::new(front_end))?;
        Ok(Begun { attachments: Box::new(attachments), reports, problems: Vec::new() })
    }))
}
