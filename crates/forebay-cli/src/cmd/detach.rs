// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay detach`: a volume is written back, and leaves the daemon and its cache.

use super::drain::watch_to_the_last;
use crate::args::DetachArgs;
use crate::control::{self, Reply, Request};
use crate::quoted;
use crate::status::{Status, VolumeStatus};
use crate::units::count;
use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub fn run(args: &DetachArgs) -> Result<ExitCode> {
    let socket = control::find(args.control.as_deref())?;
    let status = control::status(&socket)?;
    let before = volume(&status, &args.name)?;
    // Told before anything is written back; the daemon looks again.
    if let Some(device) = before.attached.iter().find(|device| device.contains(", mounted at ")) {
        bail!("{}: not detached: {device}; unmount it first", args.name);
    }
    let machine = before.vhost_user_sockets.first().map(String::as_str);
    if let Some(text) = in_use(&args.name, before.nbd_clients, machine) {
        bail!(text);
    }
    // What is served bare has nothing to be written back, and waits for nobody.
    let drains = before.state == "serving" && !status.cache.is_none();
    let drained = if drains { drain(&socket, before) } else { Ok(()) };
    let detached = drained.and_then(|()| detach(&socket, &args.name));
    // Why it was not detached is what matters.
    if detached.is_err()
        && drains
        && !before.drained
        && let Err(error) = give_back(&socket, before)
    {
        err!(
            "forebay: {}: stays drained, until `forebay set {0} mode={1}`: {error:#}",
            args.name,
            before.mode
        );
    }
    // What was asked for is a plain disk.
    let plain = format!("{}: detached; {} is the plain disk", args.name, before.backing);
    let Reply::Told { lines } = detached? else { return Ok(ExitCode::SUCCESS) };
    lines.iter().for_each(|line| out!("{}", quoted::line(line)));
    Ok(if lines.contains(&plain) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What stands against it that somebody has the volume.
pub fn in_use(name: &str, nbd_clients: u32, machine: Option<&str>) -> Option<String> {
    if let Some(path) = machine {
        return Some(format!(
            "{name}: is the disk of a virtual machine by {path}; serve again without that"
        ));
    }
    let clients = || count(nbd_clients.into(), "NBD client");
    (nbd_clients > 0).then(|| format!("{name}: has {}; end them first", clients()))
}

fn volume<'s>(status: &'s Status, name: &str) -> Result<&'s VolumeStatus> {
    let found = status.volumes.iter().find(|volume| volume.name == name);
    found.with_context(|| format!("{name}: no such volume; `forebay status` lists them"))
}

/// Until all of it is on its backing device, or a signal comes, or nobody can be shown how far it is.
fn drain(socket: &Path, before: &VolumeStatus) -> Result<()> {
    let is_ended = Arc::<AtomicBool>::default();
    let hang_up = (!is_hang_up_ignored()).then_some(SIGHUP);
    for signal in [SIGTERM, SIGINT].into_iter().chain(hang_up) {
        signal_hook::flag::register(signal, Arc::clone(&is_ended))
            .context("cannot catch signals")?;
    }
    let done = watch_to_the_last(socket, &before.name, || is_ended.load(Ordering::Relaxed));
    if !done.with_context(|| format!("{}: not detached", before.name))? {
        bail!(
            "{0}: not detached: it was ended before all was written back; `forebay detach {0}` goes on with it",
            before.name
        );
    }
    Ok(())
}

/// Who runs it by `nohup` wants it to go on when his terminal is gone.
fn is_hang_up_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (SIGHUP - 1) != 0)
}

/// A daemon that is about to go on as another program leaves it to that one.
fn detach(socket: &Path, name: &str) -> Result<Reply> {
    control::ask_again(socket, &Request::Detach { name: name.to_owned() })
}

/// What was drained for this only takes writes again as it did.
fn give_back(socket: &Path, before: &VolumeStatus) -> Result<()> {
    let settings = vec![format!("mode={}", before.mode)];
    control::ask_again(socket, &Request::Set { name: before.name.clone(), settings }).map(drop)
}
