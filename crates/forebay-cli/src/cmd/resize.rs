// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay resize`: a volume becomes as large as its backing device is now.

use crate::args::ResizeArgs;
use crate::control::{self, Reply, Request};
use anyhow::Result;
use std::process::ExitCode;

pub fn run(args: &ResizeArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    if let Reply::Told { lines } =
        control::ask(&socket, &Request::Resize { name: args.name.clone() })?
    {
        lines.iter().for_each(|line| println!("{line}"));
    }
    Ok(ExitCode::SUCCESS)
}
