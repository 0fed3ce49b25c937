// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay set`: settings of a volume that is served.

use crate::args::SetArgs;
use crate::control::{self, Reply, Request};
use anyhow::{Context, Result};
use std::process::ExitCode;

pub fn run(args: &SetArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    let (name, settings) = (args.name.clone(), args.settings.clone());
    let reply = control::ask(&socket, &Request::Set { name, settings })?;
    let status = control::status(&socket)?;
    let volume = status.volumes.iter().find(|volume| volume.name == args.name);
    out!("{}: {}", args.name, volume.context("the volume went away")?.settings_text());
    if let Reply::Told { lines } = reply {
        lines.iter().for_each(|line| out!("{line}"));
    }
    Ok(ExitCode::SUCCESS)
}
