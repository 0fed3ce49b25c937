// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay detach`: a volume is written back, and leaves the daemon and its cache.

use super::drain::Progress;
use crate::args::DetachArgs;
use crate::control::{self, Reply, Request};
use crate::status::VolumeStatus;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const POLL: Duration = Duration::from_millis(100);

pub fn run(args: &DetachArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    let before = volume(&socket, &args.name)?;
    if before.state == "serving" {
        drain(&socket, &before)?;
    }
    let detached = control::ask(&socket, &Request::Detach { name: args.name.clone() });
    let reply = match detached {
        Ok(reply) => reply,
        Err(error) => {
            give_back(&socket, &before)?;
            return Err(error);
        }
    };
    if let Reply::Told { lines } = reply {
        lines.iter().for_each(|line| println!("{line}"));
    }
    Ok(ExitCode::SUCCESS)
}

fn volume(socket: &Path, name: &str) -> Result<VolumeStatus> {
    let volumes = control::status(socket)?.volumes;
    volumes
        .into_iter()
        .find(|volume| volume.name == name)
        .with_context(|| format!("{name}: no such volume; `forebay status` lists them"))
}

/// Until all of it is on its backing device. A signal ends that, and the volume is as it was.
fn drain(socket: &Path, before: &VolumeStatus) -> Result<()> {
    let is_ended = Arc::<AtomicBool>::default();
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&is_ended))
            .context("cannot catch signals")?;
    }
    let name = Some(before.name.clone());
    control::ask(socket, &Request::Drain { name })?;
    let mut progress = Progress::new();
    loop {
        match progress.show(&control::status(socket)?, Some(&before.name)) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => {
                give_back(socket, before)?;
                return Err(error);
            }
        }
        std::thread::sleep(POLL);
        if is_ended.load(Ordering::Relaxed) {
            give_back(socket, before)?;
            bail!("{}: not detached: it was ended before all was written back", before.name);
        }
    }
}

/// What was drained for this only takes writes again as it did.
fn give_back(socket: &Path, before: &VolumeStatus) -> Result<()> {
    if !before.drained && before.state == "serving" {
        let (name, mode) = (before.name.clone(), before.mode.clone());
        control::ask(socket, &Request::SetMode { name, mode })?;
    }
    Ok(())
}
