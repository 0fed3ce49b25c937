// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's NBD client: whether it can be used here, and the beginning.

use super::attached::chain;
use super::left::{self, Known};
use super::{Begun, Rest, Wanted};
use crate::upgrade;
use anyhow::{Context, Result};
use forebay_serve::attach::DeviceVolume;
use forebay_serve::nbd::device::attach;
use forebay_serve::nbd::device::control::Control;
use forebay_serve::passage::Passage;
use std::path::PathBuf;
use std::rc::Rc;

/// Of kernel NBD devices, whichever volumes they are of.
pub struct NbdDevices {
    /// How many connections those that are made have.
    pub connections: usize,
    /// By which their connections come from the program before, and go to the next.
    pub passage: Rc<Passage>,
}

impl NbdDevices {
    pub fn new(connections: usize) -> NbdDevices {
        NbdDevices { connections, passage: Rc::new(attach::passage()) }
    }
}

/// Why it cannot be had.
pub fn obstacle() -> Option<String> {
    Control::open().err().map(|error| chain(&error))
}

/// The devices of volumes that wait for the next daemon.
pub fn left(volumes: &[Known]) -> Result<Vec<(String, PathBuf)>> {
    left::of_each(volumes, |uuid| Ok(attach::left(uuid)?))
}

/// Begins to connect the devices, or to take over those of a daemon that is gone. The driver is waited for behind that only.
pub fn prepare(wanted: &[Wanted]) -> Result<Rest> {
    let volumes: Vec<DeviceVolume> = wanted.iter().map(Wanted::device_volume).collect();
    let control = Control::open()?;
    Ok(Box::new(move |server, devices| {
        let (connections, passage) = (devices.connections, Rc::clone(&devices.passage));
        let expected = upgrade::expected_nbd_devices();
        let begun = attach::begin(control, &volumes, connections, passage, &expected);
        let (attachments, front_end, reports) = begun.context("cannot start")?;
        server.add(Box::new(front_end))?;
        Ok(Begun { attachments: Box::new(attachments), reports, problems: Vec::new() })
    }))
}
