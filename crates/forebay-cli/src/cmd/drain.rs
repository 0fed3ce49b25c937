// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay drain`: writes everything back and keeps it so.

use crate::args::DrainArgs;
use crate::control::{self, Request};
use crate::status::{Status, VolumeStatus};
use crate::units::size;
use anyhow::{Result, bail};
use forebay_core::units::BLOCK_BYTES;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

pub fn run(args: &DrainArgs) -> Result<ExitCode> {
    if let Some(cache) = &args.cache {
        let state_dir = args.state_dir.as_deref();
        return super::serve::drain_offline(cache, args.name.as_deref(), state_dir);
    }
    let socket = control::find(args.control.as_deref())?;
    watch(&socket, args.name.as_deref())?;
    Ok(ExitCode::SUCCESS)
}

/// Has the daemon drain, and shows how far it is until it is done. Ending this ends nothing.
pub fn watch(socket: &Path, name: Option<&str>) -> Result<()> {
    watch_until(socket, name, || false).map(drop)
}

/// As [`watch`], or until `is_ended`; says whether it is done.
pub fn watch_until(socket: &Path, name: Option<&str>, is_ended: impl Fn() -> bool) -> Result<bool> {
    control::ask(socket, &Request::Drain { name: name.map(str::to_owned) })?;
    let mut progress = Progress::new();
    loop {
        if progress.show(&control::status(socket)?, name)? {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(200));
        if is_ended() {
            return Ok(false);
        }
    }
}

/// A progress line: rewritten on a terminal, now and then a new one elsewhere.
pub struct Progress {
    begun: Instant,
    shown: Option<Instant>,
    is_terminal: bool,
    first: Option<u64>,
}

impl Progress {
    pub fn new() -> Progress {
        let is_terminal = std::io::stdout().is_terminal();
        Progress { begun: Instant::now(), shown: None, is_terminal, first: None }
    }

    /// Shows how far the volumes are; says whether they are drained.
    pub fn show(&mut self, status: &Status, name: Option<&str>) -> Result<bool> {
        let mine = |volume: &&VolumeStatus| name.is_none_or(|name| name == volume.name);
        let (volumes, others): (Vec<&VolumeStatus>, Vec<&VolumeStatus>) =
            status.volumes.iter().filter(mine).partition(|volume| volume.state == "serving");
        let dirty: u64 = volumes.iter().map(|volume| volume.dirty_bytes).sum();
        if volumes.iter().all(|volume| !volume.dirty) {
            self.end();
            for volume in volumes {
                println!("{}: drained; {} is the plain disk", volume.name, volume.backing);
            }
            // What can be drained is. The rest is not to be overlooked.
            let left = |volume: &&&VolumeStatus| volume.dirty || volume.state == "frozen";
            if let Some(volume) = others.iter().find(left) {
                bail!(
                    "{}: cannot be drained while it is {}; `forebay status` says why",
                    volume.name,
                    volume.state
                );
            }
            return Ok(true);
        }
        // The rest may be written in years or never: whoever drains must hear so.
        let refused = |volume: &&&VolumeStatus| {
            let parked = volume.parked_blocks * BLOCK_BYTES;
            parked > 0 && parked == volume.dirty_bytes
        };
        if volumes.iter().all(|volume| !volume.dirty || refused(&volume))
            && let Some(volume) = volumes.iter().find(refused)
        {
            self.end();
            bail!(
                "{}: drained but for {} blocks that {} refuses; they are kept in the cache and tried \
                 again; `forebay status` says where",
                volume.name,
                volume.parked_blocks,
                volume.backing
            );
        }
        let first = *self.first.get_or_insert(dirty);
        let every = Duration::from_millis(if self.is_terminal { 200 } else { 5000 });
        if self.shown.is_none_or(|shown| shown.elapsed() >= every) {
            self.shown = Some(Instant::now());
            self.line(first, dirty)?;
        }
        Ok(false)
    }

    fn line(&self, first: u64, dirty: u64) -> Result<()> {
        let done = first.saturating_sub(dirty);
        let seconds = self.begun.elapsed().as_secs_f64();
        let rate = done as f64 / seconds.max(0.001);
        let eta = match rate > 0.0 {
            true => format!("{:.0} s left", dirty as f64 / rate),
            false => "no estimate yet".into(),
        };
        let line =
            format!("{} of {} left, {}/s, {eta}", size(dirty), size(first), size(rate as u64));
        if self.is_terminal {
            print!("\r\x1b[K{line}");
            std::io::stdout().flush()?;
        } else {
            println!("{line}");
        }
        Ok(())
    }

    fn end(&self) {
        if self.is_terminal && self.shown.is_some() {
            println!();
        }
    }
}
