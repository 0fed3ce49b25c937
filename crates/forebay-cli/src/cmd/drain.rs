// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay drain`: writes everything back and keeps it so.

use crate::args::DrainArgs;
use crate::control::{self, Request};
use crate::progress::Line;
use crate::quoted;
use crate::say::tell;
use crate::status::{Status, VolumeStatus};
use crate::units::{count, size};
use anyhow::{Result, bail};
use forebay_core::units::BLOCK_BYTES;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

pub fn run(args: &DrainArgs) -> Result<ExitCode> {
    if let Some(cache) = &args.cache {
        let state_dir = args.state_dir.as_deref();
        return super::serve::drain_offline(cache, args.name.as_deref(), state_dir);
    }
    let socket = control::find(args.control.as_deref())?;
    let name = args.name.as_deref();
    watch(&socket, name)?;
    let name = name.unwrap_or("NAME");
    tell(format_args!(
        "kept so, at later starts too, until `forebay set {name} mode=write-back`\n"
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Has the daemon drain, and shows how far it is until it is done. Ending this ends nothing.
pub fn watch(socket: &Path, name: Option<&str>) -> Result<()> {
    watch_until(socket, name, Progress::new(), || false).map(drop)
}

/// The same of a volume that nobody uses, to the last of it, or until `is_ended`; says whether it is done.
pub fn watch_to_the_last(socket: &Path, name: &str, is_ended: impl Fn() -> bool) -> Result<bool> {
    watch_until(socket, Some(name), Progress { to_the_last: true, ..Progress::new() }, is_ended)
}

fn watch_until(
    socket: &Path,
    name: Option<&str>,
    mut progress: Progress,
    is_ended: impl Fn() -> bool,
) -> Result<bool> {
    control::ask(socket, &Request::Drain { name: name.map(str::to_owned) })?;
    loop {
        if progress.show(&control::status_again(socket)?, name)? {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(200));
        if is_ended() {
            return Ok(false);
        }
    }
}

/// What is said of a volume all of which was written back, where only the cache knows that so many blocks are lost. `check` is refused
/// as long as the cache is served.
pub fn drained_but_for(lost: u64, is_served: bool) -> String {
    let stop = if is_served { "`forebay stop`, then " } else { "" };
    let (are, them, they_are, they_give) = match lost {
        1 => ("is", "it", "it is", "it gives"),
        _ => ("are", "them", "they are", "they give"),
    };
    format!(
        "drained but for {} that {are} lost: reads of {them} fail until {they_are} written again; without the cache \
         {they_give} old data; {stop}`forebay check` says where",
        count(lost, "block")
    )
}

/// Why a volume cannot be drained whose file was cut. Where it is only to go, it may if nothing is dirty.
fn cut_off(volume: &VolumeStatus, to_the_last: bool) -> Option<String> {
    let may_go = to_the_last && !volume.has("too_many_blocks_refused");
    let is_cut = volume.has("backing_file_cut") && !may_go;
    let text = volume.backing_file.as_deref().filter(|_| is_cut)?;
    Some(format!("{}: cannot be drained: {text}", volume.name))
}

/// What to do with a volume that nothing here can be said of.
pub fn serve_first(cache: &Path, name: &str) -> String {
    format!(
        "if its disk has another name now, `forebay serve --cache {0} --volume {name}=BACKING` serves it; if it was changed by others, \
         `forebay serve --cache {0} --if-changed {name}=keep-dirty` (or {name}=lose-dirty) says what counts; then `forebay drain \
         {name}` drains it",
        quoted::shell(cache)
    )
}

/// How far draining is.
pub struct Progress {
    line: Line,
    first: Option<u64>,
    /// Volumes that are kept clean: all that there were at the first look, and more since.
    drained: Option<BTreeSet<String>>,
    /// That of nobody's daemon.
    cache: Option<PathBuf>,
    /// It goes on as long as anything is dirty.
    to_the_last: bool,
}

impl Progress {
    pub fn new() -> Progress {
        Progress { line: Line::new(), first: None, drained: None, cache: None, to_the_last: false }
    }

    /// Of a cache that nobody serves, so that there is no daemon to be asked.
    pub fn of_cache(cache: &Path) -> Progress {
        Progress { cache: Some(cache.to_owned()), ..Progress::new() }
    }

    fn asks(&self) -> &'static str {
        if self.cache.is_some() { "the log above" } else { "`forebay status`" }
    }

    /// Behind a volume that is not served.
    fn why(&self, name: &str) -> String {
        let advice = self.cache.as_deref().map(|cache| format!("; {}", serve_first(cache, name)));
        format!("{} says why{}", self.asks(), advice.unwrap_or_default())
    }

    /// One that was kept clean, and is not now.
    fn no_more(&mut self, volumes: &[&VolumeStatus]) -> Option<String> {
        let is_first = self.drained.is_none();
        let known = self.drained.get_or_insert_default();
        let kept = volumes.iter().filter(|volume| is_first || volume.drained);
        known.extend(kept.map(|volume| volume.name.clone()));
        let mut others = volumes.iter().filter(|volume| !volume.drained);
        others.find_map(|volume| known.get(&volume.name)).cloned()
    }

    /// Shows how far the volumes are; says whether they are drained.
    pub fn show(&mut self, status: &Status, name: Option<&str>) -> Result<bool> {
        let mine = |volume: &&VolumeStatus| name.is_none_or(|name| name == volume.name);
        let (volumes, others): (Vec<&VolumeStatus>, Vec<&VolumeStatus>) =
            status.volumes.iter().filter(mine).partition(|volume| volume.state == "serving");
        // Its dirty data may come and go for ever.
        if let Some(name) = self.no_more(&volumes) {
            self.line.end()?;
            bail!(
                "{name}: is not drained any more: it was given a mode; `forebay drain {name}` begins again"
            );
        }
        // One that came since then, and was not told to be drained.
        let known = self.drained.get_or_insert_default();
        let (volumes, came): (Vec<&VolumeStatus>, Vec<&VolumeStatus>) =
            volumes.into_iter().partition(|volume| known.contains(&volume.name));
        let dirty: u64 = volumes.iter().map(|volume| volume.dirty_bytes).sum();
        let to_the_last = self.to_the_last;
        let is_left =
            |volume: &VolumeStatus| if to_the_last { volume.dirty } else { volume.is_left() };
        if status.cache.health == "failed"
            && let Some(volume) = volumes.iter().find(|volume| is_left(volume))
        {
            self.line.end()?;
            bail!(
                "{}: cannot be drained: the cache device has failed; {} says what is wrong",
                volume.name,
                self.asks()
            );
        }
        if let Some(text) = volumes.iter().find_map(|volume| cut_off(volume, to_the_last)) {
            self.line.end()?;
            bail!(text);
        }
        if volumes.iter().all(|volume| !is_left(volume)) {
            self.line.end()?;
            let (volumes, misplaced): (Vec<&VolumeStatus>, Vec<&VolumeStatus>) =
                volumes.into_iter().partition(|volume| !volume.has("backing_file_gone"));
            let (whole, lacking): (Vec<&VolumeStatus>, Vec<&VolumeStatus>) =
                volumes.iter().partition(|volume| volume.lost_blocks_now == 0);
            // One that was cut is told by who goes on with it.
            for VolumeStatus { name, backing, .. } in
                whole.into_iter().filter(|volume| volume.backing_file.is_none())
            {
                let text = format!("{name}: drained; {backing} is the plain disk");
                tell(format_args!("{}\n", quoted::line(&text)))?;
            }
            if let Some(volume) = came.iter().find(|volume| volume.dirty) {
                bail!(
                    "{0}: came meanwhile, and is not drained: `forebay drain {0}` drains it",
                    volume.name
                );
            }
            if !lacking.is_empty() {
                let text = |it: &&VolumeStatus| {
                    format!(
                        "{}: {}",
                        it.name,
                        drained_but_for(it.lost_blocks_now, self.cache.is_none())
                    )
                };
                bail!(lacking.iter().map(text).collect::<Vec<_>>().join("; "));
            }
            // What can be drained is. The rest is not to be overlooked.
            let left = |volume: &&&VolumeStatus| volume.dirty || volume.state == "frozen";
            if let Some(volume) = others.iter().find(left) {
                bail!(
                    "{}: cannot be drained while it is {}; {}",
                    volume.name,
                    volume.state,
                    self.why(&volume.name)
                );
            }
            // One that is only to go is told by who lets it go.
            if !misplaced.is_empty() && !to_the_last {
                let text = |it: &&VolumeStatus| {
                    let text = it.backing_file.as_deref().unwrap_or_default();
                    format!("{}: all of it is written back, but {text}", it.name)
                };
                bail!(misplaced.iter().map(text).collect::<Vec<_>>().join("; "));
            }
            return Ok(true);
        }
        // The rest may be written in years or never: whoever drains must hear so.
        let refused = |volume: &&&VolumeStatus| {
            let parked = volume.parked_blocks * BLOCK_BYTES;
            parked > 0 && parked == volume.dirty_bytes
        };
        if volumes.iter().all(|volume| !is_left(volume) || refused(&volume))
            && let Some(volume) = volumes.iter().find(refused)
        {
            self.line.end()?;
            bail!(
                "{}: drained but for {} that {} refuses: kept in the cache and tried again; {} says where{}",
                volume.name,
                count(volume.parked_blocks, "block"),
                volume.backing,
                self.asks(),
                volume.backing_file.as_ref().map_or_else(String::new, |text| format!("; {text}"))
            );
        }
        // Guests may go on writing what it waits for.
        let first = self.first.unwrap_or(dirty).max(dirty);
        self.first = Some(first);
        let Progress { line, .. } = self;
        let rate = line.rate(first.saturating_sub(dirty), dirty);
        let waits = volumes.iter().find_map(|it| waits_for(it)).unwrap_or_default();
        line.show(|| format!("{} of {} left, {rate}{waits}", size(dirty), size(first)))?;
        Ok(false)
    }
}
/// What keeps a volume from being drained, for now.
fn waits_for(volume: &VolumeStatus) -> Option<String> {
    let VolumeStatus { name, backing, .. } = volume;
    match volume.parked_blocks {
        0 if volume.has("blocks_unread") => Some(format!(
            "; {name} waits half a minute for blocks that cannot be read from the cache device"
        )),
        0 if volume.has("backing_refuses_to_be_written") => {
            Some(format!("; {backing} refuses to be written: `forebay status` says why"))
        }
        0 => None,
        parked => Some(format!("; {backing} refuses {}", count(parked, "block"))),
    }
}
