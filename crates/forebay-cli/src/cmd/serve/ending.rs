// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end: everything durable, and what is not on which disk.
//!
//! # Invariants
//!
//! - **E1** Before it ends a stop looks at each backing device, so that the next start can tell whether others have changed it; threads do that, all at once,
//!   and one that does not answer is waited for for [`ANSWER_ALL_MAX`]. What it holds is not noted then: what is recorded is what it was served
//!   with, which device it is and no more (I2 of `host/identity.rs`), so the next start refuses no such device, and does not see a change. Nor is it flushed: if that
//!   was wanted, the stop is no clean one, as with a device that is not there.

use super::devices::GIVE_UP_MAX;
use super::searching::ANSWER_ALL_MAX;
use super::stale::LastNotes;
use super::{Daemon, Served};
use crate::asking::Asking;
use crate::units::{clock, size};
use crate::{backing, quoted, sockets};
use anyhow::{Result, anyhow, bail};
use forebay::io::Device;
use forebay::shard::Shard;
use forebay_core::engine::CacheHealth;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long front ends are waited for. Nobody is told of what is inside by then: it is done, or given up where it waits for a batch.
pub(super) const FRONT_ENDS: Duration = Duration::from_secs(5);
/// How long everything may take to become durable, at least: however short devices are waited for (`--stop-timeout`).
pub(in crate::cmd) const DURABLE: Duration = Duration::from_secs(60);

/// What is written in the end, devices that do not answer (E1), and what nobody has counted; and how long a drained volume has for what its guests were waiting for.
const REST: Duration = Duration::from_secs(30);

/// What the service manager is told of a stop: that it has begun, and how long it may last. It kills what takes longer than its own
/// `TimeoutStopSec`, which knows nothing of `limit` (`--stop-timeout`).
pub(super) fn stopping(limit: Duration) -> String {
    let release = limit.saturating_add(GIVE_UP_MAX);
    let close = limit.max(DURABLE).saturating_add(FRONT_ENDS + REST + REST);
    format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}", release.saturating_add(close).as_micros())
}

/// A start opens a cache in seconds, after a crash too; what takes longer than this has come to a halt.
const START: Duration = Duration::from_secs(600);

/// What the service manager is told of the way to another program, on which its watchdog (`WatchdogSec`) hears nothing: how long that may last, be
/// it that the cache is closed for it.
pub(super) fn going_on(limit: Duration) -> String {
    let close = limit.max(DURABLE).saturating_add(FRONT_ENDS + REST);
    format!("RELOADING=1\nEXTEND_TIMEOUT_USEC={}", close.saturating_add(START).as_micros())
}

/// The same, by the program that has begun.
pub(super) fn begins() -> String {
    format!("EXTEND_TIMEOUT_USEC={}", START.as_micros())
}

impl Daemon {
    /// Stops taking work, makes everything durable, and says what is not on which disk. An error where that could not be done.
    pub(super) fn end(
        mut self,
        limit: Duration,
        control: &Path,
        sockets: impl Iterator<Item = PathBuf>,
    ) -> Result<Vec<String>> {
        // The one who asked to stop hears that it was understood.
        self.server.turn(Some(Duration::ZERO))?;
        self.watch_ends();
        let listening = std::mem::take(&mut self.sockets);
        let closed = self.close(limit);
        for path in sockets.chain([control.to_owned()]) {
            sockets::remove(&path);
        }
        drop(listening); // S1 of `sockets.rs`
        closed
    }

    /// The same, of one that does not serve.
    pub(super) fn close(self, limit: Duration) -> Result<Vec<String>> {
        let (cache, notes) = (self.cache_text(), self.last_notes());
        let cache_gone = self.cache_gone();
        let health = self.server.shard.engine().health();
        let (is_passed, is_bare) = (self.is_passed(), self.cache_path.is_none());
        let Daemon { server, volumes, .. } = self;
        let engine = server.shard.engine();
        let drained = volumes.iter().filter(|it| it.is_drained(engine)).map(|it| it.index);
        let drained: Vec<VolumeIndex> = drained.collect();
        // As above.
        let (_unfinished, mut shard) = server.stop(FRONT_ENDS)?;
        shard.settle(&drained, REST)?;
        let Closed { clean, undurable, left, is_lost } =
            close_shard(shard, &volumes, (&cache, cache_gone), notes, limit)?;
        match undurable {
            _ if health == CacheHealth::Failed => bail!(
                "{cache}: the cache device failed while it was served, and {} since; what was \
                 answered before is there, some of it perhaps in the memory of this machine only: serve it again \
                 before the machine goes down, and it is recovered",
                if is_passed { "was left out" } else { "writes were refused" }
            ),
            // Nothing is recorded that the next start could see to.
            None if is_bare && !clean => bail!(
                "not everything is durable: a backing device that is not there, or does not answer, could not be flushed"
            ),
            None if is_lost => bail!(left.join("; ")),
            None => Ok(left),
            Some(Undurable::Cache) if is_bare => {
                bail!("not everything is durable: requests to a backing device did not end")
            }
            Some(why) => bail!("{cache}: {}", why.text()),
        }
    }
}

/// How a cache was closed.
pub(super) struct Closed {
    clean: bool,
    pub(super) undurable: Option<Undurable>,
    /// What is not on which disk.
    left: Vec<String>,
    /// Of that something is nowhere: its file has no name any more.
    is_lost: bool,
}

/// Why a stop was no clean one.
pub(super) enum Undurable {
    /// What the cache device was to take it did not.
    Cache,
    /// What went around the cache.
    Backing,
}

impl Undurable {
    pub(super) fn text(&self) -> &'static str {
        match self {
            Undurable::Cache => {
                "not everything is durable: what was answered and not flushed is in the memory of this machine only; \
                 serve it again before the machine goes down, and it is recovered"
            }
            Undurable::Backing => {
                "not everything is durable: a backing device could not be flushed, so what was written to it since its \
                 last flush may be lost; guests hear of it at their next flush when it is served again"
            }
        }
    }
}

pub(super) fn close_shard(
    mut shard: Shard,
    volumes: &[Served],
    (cache, cache_gone): (&str, Option<(String, bool)>),
    mut notes: LastNotes,
    limit: Duration,
) -> Result<Closed> {
    // Only then is a fingerprint of what a backing device goes on with: a batch may have been under way.
    let quiet = shard.quiesce(limit.max(DURABLE))?;
    if quiet {
        note_fingerprints(&mut shard, volumes, &mut notes);
    }
    let (plain, is_nowhere) = cache_gone.unwrap_or_else(|| {
        let cache = quoted::shell(Path::new(cache));
        (format!("To get it plain: forebay drain --cache {cache}{}", notes.option()), false)
    });
    let mut left = not_written_back(&shard, volumes, &plain);
    let fates = volumes.iter().filter_map(|it| it.fate.as_ref()?.ended_text(&it.name));
    let gone: Vec<String> = fates.collect();
    let is_lost = is_nowhere && !left.is_empty() || !gone.is_empty();
    left.extend(gone);
    notes.look(shard.engine());
    let (clean, undurable) = match quiet && shard.engine().health() != CacheHealth::Failed {
        false => (false, Some(Undurable::Cache)),
        true => {
            let clean = shard.finish()?;
            (clean, (!clean && has_unflushed(&shard)).then_some(Undurable::Backing))
        }
    };
    if clean {
        notes.write(shard.superblock());
    }
    left.iter().for_each(|text| warn!("{text}"));
    // From here on others may have the devices, and write down what they do with them.
    drop(shard);
    if clean {
        // What is lost was told.
        if !is_lost {
            info!("stopped: everything is durable");
        }
    } else if undurable.is_none() {
        info!(
            "a backing device that is not there, or does not answer, could not be flushed; where there is a cache the next start sees to that"
        );
    } else {
        warn!("not everything could be made durable; the next start recovers what it can");
    }
    Ok(Closed { clean, undurable, left, is_lost })
}

/// Notes what the backing devices hold, of those that say it (E1).
fn note_fingerprints(shard: &mut Shard, volumes: &[Served], notes: &mut LastNotes) {
    let begin = |device: &dyn Device, path: &Path| {
        Asking::begin("look", backing::fingerprint_apart(device, path)?)
    };
    let looks = volumes
        .iter()
        .filter_map(|served| Some((served, begin(shard.backing(served.index)?, &served.backing))));
    let (looks, begun) = (looks.collect::<Vec<_>>(), Instant::now());
    for (served, look) in looks {
        let left = ANSWER_ALL_MAX.saturating_sub(begun.elapsed());
        let found = match look {
            Ok(look) if !look.wait(left) => {
                // Its thread has it (T1 of `asking`), and to close a file may be to wait for an answer.
                std::mem::forget(shard.take_backing(served.index));
                let shown = served.backing.display();
                Err(anyhow!(
                    "{shown}: did not answer, and is not waited for: the kernel may keep this process until it does"
                ))
            }
            look => look.and_then(Asking::result),
        };
        match found {
            Ok((found, written_at)) => {
                notes.note_written(served.index, written_at);
                shard.note(served.index, |volume| volume.fingerprint = found.encode());
            }
            // The others are closed all the same.
            Err(error) => warn!(
                "{}: {error:#}; if others change it, the next start does not see that",
                served.name
            ),
        }
    }
}

/// What is not on which disk: of those, too, that wait for theirs. `plain`: how that is to be had.
fn not_written_back(shard: &Shard, served: &[Served], plain: &str) -> Vec<String> {
    let mut left = Vec::new();
    for (at, recorded) in shard.superblock().volumes.iter().enumerate() {
        let index = VolumeIndex(at as u8);
        let Some(recorded) = recorded else { continue };
        let Some(status) = shard.engine().status(index).filter(|it| it.dirty) else { continue };
        let served = served.iter().find(|served| served.index == index);
        let backing = match served {
            Some(served) => served.backing.display().to_string(),
            None => recorded.path.clone(),
        };
        left.push(format!(
            "{}: {} not yet on {backing}, whose content is of {}. Do not mount {backing}. {plain}",
            recorded.name,
            size(status.dirty_blocks * BLOCK_BYTES),
            clock(status.backing_as_of)
        ));
    }
    left
}

/// Whether the flush of a backing device failed that is there. One that is waited for cannot be flushed: the next start knows, and
/// that is no failed stop.
fn has_unflushed(shard: &Shard) -> bool {
    let mut recorded = shard.superblock().volumes.iter().enumerate();
    recorded.any(|(index, volume)| {
        let is_there = shard.backing(VolumeIndex(index as u8)).is_some();
        is_there && volume.as_ref().is_some_and(|volume| volume.flush_failed)
    })
}
