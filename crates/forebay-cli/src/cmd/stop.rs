// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay stop`: asks the daemon to end, and waits until it has.

use crate::args::StopArgs;
use crate::control::{self, Request};
use anyhow::Result;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

pub fn run(args: &StopArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    if args.drain {
        super::drain::watch(&socket, None)?;
    }
    control::ask(&socket, &Request::Stop { drain: args.drain })?;
    while UnixStream::connect(&socket).is_ok() {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(ExitCode::SUCCESS)
}
