// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's NBD client: whether it can be used here, and the beginning.

use super::attached::chain;
use super::{Begun, Wanted};
use anyhow::{Context, Result};
use forebay_serve::attach::DeviceVolume;
use forebay_serve::nbd::device::attach;
use forebay_serve::nbd::device::control::Control;
use forebay_serve::server::Server;

/// Why it cannot be had.
pub fn obstacle() -> Option<String> {
    Control::open().err().map(|error| chain(&error))
}

/// Begins to connect the devices, or to take over those of a daemon that is gone.
pub fn begin(server: &mut Server, wanted: &[Wanted], connections: usize) -> Result<Begun> {
    let volumes: Vec<DeviceVolume> = wanted.iter().map(Wanted::device_volume).collect();
    let (attachments, front_end, reports) =
        attach::begin(Control::open()?, &volumes, connections).context("cannot start")?;
    server.add(Box::new(front_end))?;
    Ok(Begun { attachments: Box::new(attachments), reports, problems: Vec::new() })
}
