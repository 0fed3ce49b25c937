// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay why`: where a block is, and why.

use crate::args::WhyArgs;
use crate::control::{self, Reply, Request};
use anyhow::{Result, bail};
use std::process::ExitCode;

pub fn run(args: &WhyArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    let request = Request::Why { name: args.name.clone(), lba: args.lba };
    let Reply::Why(why) = control::ask(&socket, &request)? else {
        bail!("the daemon answered something else than where the block is");
    };
    if args.json {
        out!("{}", serde_json::to_string_pretty(&why)?);
    } else {
        why.print();
    }
    Ok(ExitCode::SUCCESS)
}
