// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay attach`: one more volume for a daemon that runs.

use crate::args::AttachArgs;
use crate::control::{self, Reply, Request};
use crate::quoted;
use anyhow::Result;
use std::process::ExitCode;

pub fn run(args: &AttachArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    let (volume, if_changed) = (args.volume.clone(), args.if_changed.clone());
    let request = Request::Attach { volume, if_changed, without_cache: args.without_cache };
    if let Reply::Told { lines } = control::ask(&socket, &request)? {
        lines.iter().for_each(|line| out!("{}", quoted::line(line)));
    }
    Ok(ExitCode::SUCCESS)
}
