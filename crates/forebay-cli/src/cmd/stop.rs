// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay stop`: asks the daemon to end, waits until it has, and says whether everything is durable and what is not on which disk.

use crate::args::StopArgs;
use crate::control::{self, Stopped};
use crate::quoted;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const POLL: Duration = Duration::from_millis(20);

pub fn run(args: &StopArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    if args.drain {
        super::drain::watch(&socket, None).context("the daemon was not stopped")?;
    }
    // Whoever listens and goes away may be on its way to another program.
    let status = match control::is_listened_at(&socket) {
        true => control::status_again(&socket)?,
        false => control::status(&socket)?,
    };
    let process = PathBuf::from(format!("/proc/{}", status.pid));
    let Stopped { warned, ended } = control::stop(&socket, args.drain, status.pid)?;
    warned.iter().for_each(|line| out!("{}", quoted::line(line)));
    while control::is_listened_at(&socket) {
        std::thread::sleep(POLL);
    }
    // Nobody answers any more, but what is in memory is still on its way: the socket goes last.
    while socket.exists() && process.exists() {
        std::thread::sleep(POLL);
    }
    // It removes that last of all, unless it was killed.
    let Some(lines) = ended else {
        if !socket.exists() {
            return Ok(if warned.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        bail!(
            "the daemon was ended before everything was durable; serve again before the machine goes down, and what was \
             answered is recovered"
        );
    };
    lines.iter().for_each(|line| out!("{}", quoted::line(line)));
    // What was asked for is plain disks.
    let is_short = !warned.is_empty() || args.drain && !lines.is_empty();
    Ok(if is_short { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
