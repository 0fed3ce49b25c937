// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end: everything durable, and what is not on which disk.

use super::stale::LastNotes;
use super::{Daemon, Served};
use crate::attach::{self, Attached};
use crate::units::{clock, count, size};
use crate::upgrade::{CACHE, Disk, Left};
use crate::{backing, config, upgrade};
use anyhow::{Context, Result, bail};
use forebay::shard::Shard;
use forebay_core::engine::CacheHealth;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_serve::carried::Handed;
use forebay_serve::passage::Passage;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::{info, warn};

/// How long front ends are waited for. Nobody is told of what is inside by then: it is done, or given up where it waits for a batch.
const FRONT_ENDS: Duration = Duration::from_secs(5);
/// How long the last requests and flushes may take before a hand-over is given up.
const REST: Duration = Duration::from_secs(10);
/// How long everything may take to become durable, at least: however short devices are waited for (`--stop-timeout`).
pub(in crate::cmd) const DURABLE: Duration = Duration::from_secs(60);

impl Daemon {
    /// Whether this daemon can go on as that program.
    pub(super) fn check_upgrade(&self, executable: &Path) -> Result<()> {
        let shown = executable.display();
        let found = executable.metadata().with_context(|| format!("{shown}: cannot be read"))?;
        let may_run = found.permissions().mode() & 0o111 != 0;
        if !(executable.is_absolute() && found.is_file() && may_run) {
            bail!("{shown}: expected the absolute path of a program");
        }
        if self.is_ending {
            bail!("the daemon is being stopped");
        }
        // Who waits for that would never be answered.
        if let Some(coming) = &self.coming {
            bail!("{}: is being attached; upgrade after that", coming.name());
        }
        if let Some(leaving) = &self.leaving {
            bail!("{}: is being detached; upgrade after that", leaving.name());
        }
        // The kernel waits for answers meanwhile, and a thread for the kernel.
        if self.attached.iter().any(Attached::is_resizing) {
            bail!("a block device is being made larger; upgrade after that");
        }
        // A program is executed when all threads of the one before have ended.
        if self.silent.iter().any(|thread| !thread.is_finished()) {
            bail!("a backing device that was to be attached does not answer");
        }
        if self.server.shard.resizing().is_some() {
            bail!("the cache is being given another size; `forebay resize --stop` ends that");
        }
        for disk in self.disks() {
            disk.0.check(disk.1)?;
        }
        // What this program does not understand the next one may; if not, that refuses.
        if let Ok(wanted) = config::next_attach() {
            let left: Vec<_> = self.attached.iter().flat_map(Attached::left).collect();
            attach::left::kept(wanted, &left)?;
        }
        match self.attached.iter().find(|attached| !attached.outlive()) {
            Some(attached) => bail!(
                "block devices by {} end with the process (those of --attach ublk do not where root serves); use \
                 `forebay stop`, and serve with the new program",
                attached.kind().name()
            ),
            None => Ok(()),
        }
    }

    /// What is served from what, with where it is found.
    fn disks(&self) -> impl Iterator<Item = (Disk, &Path)> {
        let shard = &self.server.shard;
        let cache = self.cache_path.as_deref();
        let cache =
            cache.and_then(|path| Some((Disk::of(CACHE, shard.cache().descriptor()?)?, path)));
        let volumes = self.volumes.iter().filter_map(|served| {
            let open = shard.backing(served.index)?.descriptor()?;
            Some((Disk::of(&served.name, open)?, served.backing.as_path()))
        });
        cache.into_iter().chain(volumes)
    }

    /// What stands against leaving the map to a program with this layout.
    pub(super) fn against_hand_over(&self, layout: Option<String>) -> Option<String> {
        let health = self.server.shard.engine().health();
        match layout {
            _ if self.cache_path.is_none() => Some("there is no cache".into()),
            _ if health == CacheHealth::Failed => Some("the cache device has failed".into()),
            None => Some("the new program knows of no hand-over".into()),
            Some(layout) if layout != upgrade::layout() => {
                let own = upgrade::layout();
                Some(format!("the new program lays out the map otherwise ({layout}, not {own})"))
            }
            Some(_) => None,
        }
    }

    /// Stops taking work and leaves all there is to the next program; or closes the cache as ever, says why, and leaves clients'
    /// connections alone.
    pub(super) fn leave_to_next(
        mut self,
        against: Option<String>,
        limit: Duration,
        sockets: impl Iterator<Item = PathBuf>,
    ) -> Result<(Left, Option<String>)> {
        // The one who asked hears that it was understood.
        self.server.turn(Some(Duration::ZERO))?;
        self.watch_ends();
        let disks = self.disks().map(|disk| disk.0).collect();
        let sockets_left = std::mem::take(&mut self.sockets);
        let mut left = Left { sockets: sockets_left, disks, ..Left::default() };
        let (cache, notes) = (self.cache_text(), self.last_notes());
        let lasting = self.lasting_uuids();
        let machines = self.machines_passage();
        let Daemon { mut server, volumes, passage, nbd_devices, .. } = self;
        let devices = nbd_devices.passage;
        for passage in passage.iter().chain(&machines).chain([&devices]) {
            if let Err(error) = passage.leave(lasting.clone()) {
                let kind = passage.kind();
                warn!("{kind}s are closed: they cannot be left to the next program: {error}");
            }
        }
        server.shard.answer_the_rest();
        // Dropped at the end of all this (L1 in `server.rs`).
        let (_unfinished, mut shard) = server.stop(FRONT_ENDS)?;
        left.guests.connections = passage.and_then(|it| left_by(&it));
        left.guests.machines = machines.and_then(|it| left_by(&it));
        left.guests.nbd_devices = left_by(&devices);
        shard.keep_flush_failures();
        let against = match against {
            Some(against) => against,
            None => match shard.hand_over(REST) {
                Ok(None) => "what is under way does not end".to_owned(),
                Err(error) => error.to_string(),
                Ok(Some(handed)) => {
                    left.cache = Some(handed);
                    let indexes = volumes.iter().map(|served| served.index);
                    let backings = indexes.filter_map(|index| shard.backing(index));
                    for device in backings.chain([shard.cache()]) {
                        // What is not left is opened again.
                        let file = device.descriptor().map(|fd| fd.try_clone_to_owned());
                        left.devices.extend(file.and_then(Result::ok));
                    }
                    for path in sockets {
                        if left.sockets.iter().all(|(kept, _)| Path::new(kept) != path) {
                            let _ = std::fs::remove_file(path);
                        }
                    }
                    // The process goes on as another program: nothing is to be put in order. Above all not the ring: that ends
                    // with this program, when the thread that served by it is gone (`super::run`).
                    std::mem::forget(shard);
                    return Ok((left, None));
                }
            },
        };
        // The next program recovers what was not made durable.
        let closed = close_shard(shard, &volumes, &cache, notes, limit)?;
        closed.undurable.iter().for_each(|why| warn!("{}", why.text()));
        left.sockets.clear();
        sockets.for_each(|path| drop(std::fs::remove_file(path)));
        Ok((left, Some(against)))
    }

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
        let closed = self.close(limit);
        for path in sockets.chain([control.to_owned()]) {
            // A socket that somebody else has removed is gone, too.
            let _ = std::fs::remove_file(path);
        }
        closed
    }

    /// The same, of one that does not serve.
    pub(super) fn close(self, limit: Duration) -> Result<Vec<String>> {
        let (cache, notes) = (self.cache_text(), self.last_notes());
        let health = self.server.shard.engine().health();
        let (is_passed, is_bare) = (self.is_passed(), self.cache_path.is_none());
        let Daemon { server, volumes, .. } = self;
        // As above.
        let (_unfinished, shard) = server.stop(FRONT_ENDS)?;
        let Closed { undurable, left } = close_shard(shard, &volumes, &cache, notes, limit)?;
        match undurable {
            _ if health == CacheHealth::Failed => bail!(
                "{cache}: the cache device failed while it was served, and {} since; what was \
                 answered before is there, some of it perhaps in the memory of this machine only: serve it again \
                 before the machine goes down, and it is recovered",
                if is_passed { "was left out" } else { "writes were refused" }
            ),
            None => Ok(left),
            Some(Undurable::Cache) if is_bare => {
                bail!("not everything is durable: requests to a backing device did not end")
            }
            Some(why) => bail!("{cache}: {}", why.text()),
        }
    }
}

/// How a cache was closed.
struct Closed {
    undurable: Option<Undurable>,
    /// What is not on which disk.
    left: Vec<String>,
}

/// Why a stop was no clean one.
enum Undurable {
    /// What the cache device was to take it did not.
    Cache,
    /// What went around the cache.
    Backing,
}

impl Undurable {
    fn text(&self) -> &'static str {
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

/// Who goes along, which is told as well.
fn left_by(passage: &Passage) -> Option<Handed> {
    let left = passage.left();
    passage.told().into_iter().for_each(|text| warn!("{text}"));
    if let Some(left) = &left {
        info!("{} left to the next program", count(left.count as u64, passage.kind()));
    }
    left
}

fn close_shard(
    mut shard: Shard,
    volumes: &[Served],
    cache: &str,
    mut notes: LastNotes,
    limit: Duration,
) -> Result<Closed> {
    // Only then is a fingerprint of what a backing device goes on with: a batch may have been under way.
    let quiet = shard.quiesce(limit.max(DURABLE))?;
    for served in volumes {
        let Some(device) = shard.backing(served.index).filter(|_| quiet) else { continue };
        match backing::fingerprint(device, &served.backing) {
            Ok(found) => shard.note(served.index, |volume| volume.fingerprint = found.encode()),
            // The others are closed all the same.
            Err(error) => warn!(
                "{}: {error:#}; if others change it, the next start does not see that",
                served.name
            ),
        }
    }
    let left = not_written_back(&shard, volumes, cache);
    notes.look(shard.engine());
    let (clean, undurable) = match quiet && shard.engine().health() != CacheHealth::Failed {
        false => (false, Some(Undurable::Cache)),
        true => {
            let clean = shard.finish()?;
            (clean, (!clean && has_unflushed(&shard)).then_some(Undurable::Backing))
        }
    };
    if clean {
        notes.write();
    }
    // From here on others may have the devices, and write down what they do with them.
    drop(shard);
    left.iter().for_each(|text| warn!("{text}"));
    if clean {
        info!("stopped: everything is durable");
    } else if undurable.is_none() {
        info!(
            "stopped: a backing device that is not there could not be flushed; the next start sees to that"
        );
    } else {
        warn!("not everything could be made durable; the next start recovers what it can");
    }
    Ok(Closed { undurable, left })
}

/// What is not on which disk: of those, too, that wait for theirs.
fn not_written_back(shard: &Shard, served: &[Served], cache: &str) -> Vec<String> {
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
            "{}: {} not yet on {backing}, whose content is of {}. Do not mount {backing}. To get it plain: forebay \
             drain --cache {cache}",
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
