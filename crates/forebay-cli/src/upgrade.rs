// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Going on as another program: the daemon has closed its cache and left its block devices to the kernel,
//! and executes the program, which opens the one and takes the others over.
//!
//! # Invariants
//!
//! - **G1** Only what survives is left: a daemon with devices that do not outlive their process
//!   refuses (`Daemon::check_upgrade`).
//! - **G2** The program before stays open until the new one serves, and is executed again if that cannot
//!   serve, whatever has become of its file.
//!
//! # Crash
//!
//! As everywhere: the next start recovers.

use anyhow::{Context, Error, Result, anyhow};
use forebay::host::inherited::inherited;
use rustix::fs::{Mode, OFlags};
use std::convert::Infallible;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Tells the new program where the one before it is (G2).
const BEFORE: &str = "FOREBAY_UPGRADED_FROM";
/// Tells the program before why it goes on.
const WHY_NOT: &str = "FOREBAY_NOT_UPGRADED";
const OPEN_FILES: &str = "/proc/self/fd/";
/// In the text that says that the program before goes on.
pub const FELL_BACK: &str = "was not upgraded";

/// Executes the new program with this one's arguments. Gives why not, if neither it nor this program can
/// be executed.
pub fn execute(executable: &Path) -> Result<Infallible> {
    // Not closed when the program is executed, and there even if its file has been replaced.
    let this = rustix::fs::open("/proc/self/exe", OFlags::RDONLY, Mode::empty())
        .context("/proc/self/exe: cannot be opened")?;
    let before = format!("{OPEN_FILES}{}", this.as_raw_fd());
    let error = again(executable).env(BEFORE, &before).env_remove(WHY_NOT).exec();
    let error = anyhow!(error).context(format!("{}: cannot be executed", executable.display()));
    go_back(&before, &error)
}

/// The program that executed this one, until this one serves.
pub struct Before(OwnedFd);

impl Before {
    /// If there was one. To be asked once, first of all.
    pub fn left() -> Option<Before> {
        let number = std::env::var(BEFORE).ok()?.strip_prefix(OPEN_FILES)?.parse().ok()?;
        inherited(number).map(Before)
    }

    /// It goes on, for this program cannot serve. Gives why not, if that fails.
    pub fn go_on(&self, error: &Error) -> Error {
        match go_back(&format!("{OPEN_FILES}{}", self.0.as_raw_fd()), error) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }
}

fn go_back(before: &str, error: &Error) -> Result<Infallible> {
    eprintln!("forebay: the upgrade failed, the program before goes on: {error:#}");
    let failed =
        again(Path::new(before)).env(WHY_NOT, format!("{error:#}")).env_remove(BEFORE).exec();
    Err(anyhow!(failed).context("the program before cannot be executed either"))
}

fn again(executable: &Path) -> Command {
    let mut command = Command::new(executable);
    command.args(std::env::args_os().skip(1));
    command
}

/// Why this program goes on instead of a newer one, if so.
pub fn why_not() -> Option<String> {
    let why = std::env::var(WHY_NOT).ok()?;
    Some(format!("this program {FELL_BACK}: {why}"))
}
