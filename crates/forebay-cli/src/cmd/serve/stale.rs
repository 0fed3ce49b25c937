// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Caches that were left out: what is written down about them, and who reads it.
//!
//! # Invariants
//!
//! - **M1** A backing device of which a cache holds something is not written without that cache before the cache is
//!   marked stale, durably (`state_dir`).
//! - **M2** What the mark says the cache holds wrongly is dropped before the volume is served with it; what may be
//!   newer waits for the operator (`volumes.rs`, `--if-changed`).
//! - **M3** That he keeps it is written down with the mark, and counts as long as the backing device is as we left it. Who
//!   serves that without the cache voids it.
//! - **M4** When a backing file was written last counts from a clean stop on until its volume is served again, however often the cache is opened meanwhile,
//!   and whatever ends that: as what the superblock says of the file does, which is taken back, durably, before anything is written to
//!   it (I2 of `host/identity.rs`). Where the cache wrote back to the file in an opening that did not know what is written down here (another machine,
//!   another state directory), it does not count. (Writes around the log are not told apart there: the volume counts as changed.)

use super::{Daemon, Served};
use crate::asking::Asking;
use crate::state_dir::{Known, Mark, Record, StateDir, Why};
use crate::{backing, hide, quoted};
use anyhow::{Context, Result, bail};
use forebay::io::Device;
use forebay::shard::{StaleWanted, uuid_text, wall_now};
use forebay_core::engine::{CacheHealth, Engine};
use forebay_core::format::superblock::{Superblock, Volume};
use forebay_core::op::stale::Stale;
use forebay_core::units::VolumeIndex;
use std::path::Path;
use tracing::{error, warn};

/// Network file systems may say when they were told of a write, which is a little later.
const WRITTEN_LATER_NANOS: u64 = 2_000_000_000;

/// A mark that is being written, on a thread: the state directory may be as slow as what has just failed.
pub(super) struct Marking {
    wanted: StaleWanted,
    name: String,
    thread: Asking<Result<()>>,
}

/// Whose a backing device is besides, with words for it.
#[derive(Default)]
pub(super) struct Others(Vec<(Record, String)>);

/// Volumes that are stale from now on: of which cache, and its name there.
#[derive(Default)]
pub(super) struct Passed(Vec<(String, String)>);

/// Records of the volumes that were served.
pub(super) struct LastNotes {
    dir: Option<StateDir>,
    records: Vec<(VolumeIndex, Record)>,
}

impl LastNotes {
    /// What the cache still has, now that nothing is under way.
    pub(super) fn look(&mut self, engine: &Engine) {
        for (index, record) in &mut self.records {
            let lost = engine.status(*index).is_none_or(|it| it.frozen || it.lost_blocks_now > 0);
            record.dirty = lost || !engine.is_clean(*index);
        }
    }

    /// When the backing file of a volume was written last.
    pub(super) fn note_written(&mut self, index: VolumeIndex, at: Option<u64>) {
        let its = self.records.iter_mut().find(|it| it.0 == index);
        its.into_iter().for_each(|(_, record)| record.written_at = at);
    }

    /// What a command that finds them has to be told.
    pub(super) fn option(&self) -> String {
        self.dir.as_ref().map_or_else(String::new, StateDir::option)
    }

    /// Everything is durable, by that superblock.
    pub(super) fn write(&mut self, superblock: &Superblock) {
        for (index, record) in &mut self.records {
            let recorded = superblock.volumes[usize::from(index.0)].as_ref();
            record.backing_as_of = recorded.map(|it| it.backing_as_of);
            (record.left_at, record.sequence) = (Some(wall_now()), superblock.sequence);
            if let Some(Err(error)) = self.dir.as_ref().map(|dir| dir.write(record)) {
                warn!("{}: {error:#}", record.name);
            }
        }
    }
}

impl Daemon {
    /// Without one, that is a problem.
    pub(super) fn use_state_dir(&mut self, found: Result<StateDir, String>) {
        match found {
            Ok(found) => self.state_dir = Some(found),
            Err(why) => self.problem(format!(
                "{why}; a cache that fails is not passed, and nobody is told of backing devices that \
                 belong to other caches"
            )),
        }
    }

    /// Whether somebody has written to a backing file since its volume was left, as far as that tells (M4). (Behind a power cut the file may
    /// have an older time.)
    pub(super) fn is_written_since(recorded: &Volume, known: &Record, device: &dyn Device) -> bool {
        let times = known.written_at.zip(device.descriptor().and_then(backing::file_written_at));
        known.is_as_left(recorded)
            && times.is_some_and(|(left, now)| now > left + WRITTEN_LATER_NANOS)
    }

    /// What is written down of a volume.
    pub(super) fn known_of(&self, volume: &str) -> Result<Option<Record>> {
        let Some(dir) = &self.state_dir else { return Ok(None) };
        dir.read(&self.cache_uuid(), volume)
    }

    /// Writes down that a volume's backing device belongs to this cache. A mark that still counts stays.
    pub(super) fn note_known(&mut self, recorded: &Volume, backing: &Path) {
        let Some(dir) = self.state_dir.clone() else { return };
        let mut record = self.record_of(recorded, backing, true);
        let handed_over = self.server.shard.opened().handed_over;
        let noted = self.known_of(&record.volume).and_then(|known| {
            let is_stale = |known: &Record| known.mark_for(recorded.attach_generation);
            record.stale = known.as_ref().and_then(is_stale);
            match known {
                Some(known) if handed_over && record.is_but_generation(&known) => {
                    self.notes.later(&record);
                    Ok(())
                }
                _ => self.write_down(move || dir.write(&record)),
            }
        });
        if let Err(error) = noted {
            self.problem(format!("{}: {error:#}", recorded.name));
        }
    }

    /// Refuses to keep what is dirty where that could not be written down (M3).
    pub(super) fn check_notes(&self, name: &str) -> Result<&StateDir> {
        self.state_dir.as_ref().with_context(|| {
            format!(
                "{name}: what is kept of the cache is not all that it holds, and the next start must know that: it \
                 takes a state directory (--state-dir)"
            )
        })
    }

    /// Writes down that the cache is stale for a volume that is about to be served, and that what is dirty is kept (M3).
    pub(super) fn note_kept(&mut self, recorded: &Volume, backing: &Path, why: Why) -> Result<()> {
        let dir = self.check_notes(&recorded.name)?.clone();
        let mut record = self.record_of(recorded, backing, true);
        record.stale = Some(Mark { is_kept: true, ..Mark::new(recorded.attach_generation, why) });
        self.write_down(move || dir.write(&record))
    }

    /// A volume has left the cache.
    pub(super) fn forget_known(&mut self, volume: &str) {
        let removed = self.state_dir.as_ref().map(|dir| dir.remove(&self.cache_uuid(), volume));
        if let Some(Err(error)) = removed {
            self.problem(format!("{error:#}"));
        }
    }

    /// Other caches that a backing device belongs to, and other volumes of this one. One that may hold newer data is passed only
    /// if that was asked for, now or when it was passed before; so is another volume of this one. The device is locked.
    /// `taken`: where volumes will be that are served before.
    pub(super) fn others(
        &self,
        backing: &Path,
        name: &str,
        without_cache: bool,
        taken: &[(String, Known)],
    ) -> Result<Others> {
        let mut others = Others::default();
        let Some(dir) = &self.state_dir else { return Ok(others) };
        let own = self.cache_uuid();
        let recorded = self.server.shard.superblock().volumes.iter().flatten();
        let recorded: Vec<(String, &str)> =
            recorded.map(|it| (uuid_text(&it.uuid), it.name.as_str())).collect();
        let shown = backing.display();
        for record in dir.of_backing(backing)? {
            let (volume, is_own) = (record.name.clone(), record.cache == own);
            let mut of =
                format!("volume {volume} of the cache {} ({})", record.cache, record.cache_path);
            let anyway = format!(
                "`serve --without-cache {name}` (or `attach --without-cache`) serves what is here, and gives up what \
                 was there"
            );
            let mut instead = match record.cache_path == self.lasting_cache_text() {
                // Formatted anew behind our back, or on another device that has this name now.
                true => format!("this cache is at that path now; if that one is gone, {anyway}"),
                false => format!(
                    "serve it with --cache {0}{1}, or `forebay drain --cache {0} {volume}{1}` first; if the cache is gone, {anyway}",
                    quoted::shell(Path::new(&record.cache_path)),
                    dir.option()
                ),
            };
            if is_own {
                match recorded.iter().find(|it| it.0 == record.volume) {
                    Some((_, known)) if *known == name => continue,
                    // It will be on another one.
                    Some((_, known)) if taken.iter().any(|it| it.0 == *known) => continue,
                    Some(_) => {}
                    None => {
                        // It has left the cache, and could not be removed then.
                        dir.remove(&record.cache, &record.volume)?;
                        continue;
                    }
                }
                of = format!("volume {volume} of this cache");
                instead = format!(
                    "serve it as {volume}, or drain and forget that first (`--without-cache {name}` gives up what that has)"
                );
            }
            // He who asked for that gave up what the cache holds, until it is served again or that is kept (M3).
            let passed =
                record.mark_for(record.attach_generation).is_some_and(|mark| !mark.is_kept);
            // Another name for the same disk is a mistake, or is said otherwise. One that is known by its name alone may be another.
            let is_other_name = is_own && record.backing.has_identity();
            if (record.dirty || is_other_name) && !without_cache && !passed {
                let newer = if record.dirty { ", which may hold newer data" } else { "" };
                bail!("{shown}: belongs to {of}{newer}: {instead}");
            }
            others.0.push((record, of));
        }
        Ok(others)
    }

    /// They are stale from now on (M1). That cannot be taken back: it comes when nothing stands against serving any more.
    pub(super) fn pass(&mut self, others: Others, backing: &Path, name: &str) -> Result<Passed> {
        let mut passed = Passed::default();
        let Some(dir) = self.state_dir.clone() else { return Ok(passed) };
        let shown = backing.display();
        for (mut record, of) in others.0 {
            let mark = record.mark_for(record.attach_generation);
            let is_new = mark.is_none_or(|mark| mark.is_kept); // M3
            if is_new {
                record.stale = Some(Mark::new(record.attach_generation, Why::ServedWithout));
            }
            passed.0.push((record.cache.clone(), record.name.clone()));
            // One that is there may not be durable yet.
            let dir = dir.clone();
            let written = self.write_down(move || dir.write(&record));
            written.with_context(|| format!("{shown}: is not served"))?;
            if is_new {
                warn!(
                    "{name}: {shown} belongs to {of}, which is stale from now on: what it holds is dropped when it \
                     is served again"
                );
            }
        }
        Ok(passed)
    }

    /// The volume that has passed these is served, and hides its backing device itself. Without a cache nobody hides it, and the cache
    /// that was passed may come again.
    pub(super) fn unhide(&self, Passed(passed): Passed, backing: &Path) {
        for (cache, volume) in passed.iter().filter(|_| self.cache_path.is_some()) {
            if let Err(error) = hide::pass(backing, cache, volume) {
                warn!("{volume}: {error:#}");
            }
        }
    }

    /// Goes on with marks that the engine wants because the cache device has failed.
    pub(super) fn mark_stale(&mut self) {
        while let Some(wanted) = self.server.shard.take_stale() {
            self.begin_marking(wanted);
        }
        while let Some(at) = self.marking.iter().position(|it| it.thread.is_over()) {
            let Marking { wanted, name, thread } = self.marking.swap_remove(at);
            let done = thread.result();
            match &done {
                Ok(()) => warn!(
                    "{name}: the cache is left out: all of the volume is on its backing device, which is read and \
                     written alone from now on; the cache is marked stale"
                ),
                Err(error) => error!(
                    "{name}: cannot be served without the cache, since that cannot be marked stale: {error:#}; \
                     writes are refused"
                ),
            }
            self.server.shard.stale_marked(wanted, done.is_ok());
        }
    }

    fn begin_marking(&mut self, wanted: StaleWanted) {
        let served = self.volumes.iter().find(|served| served.index == wanted.volume);
        let recorded = self.recorded(wanted.volume);
        let (Some(dir), Some(Served { name, backing, .. }), Some(recorded)) =
            (self.state_dir.clone(), served, recorded)
        else {
            return self.server.shard.stale_marked(wanted, false);
        };
        // X2: all of it is on the backing device.
        let mut record = self.record_of(recorded, backing, false);
        record.stale = Some(Mark::new(recorded.attach_generation, Why::CacheFailed));
        let name = name.clone();
        match Asking::begin("mark", move || dir.write(&record)) {
            Ok(thread) => self.marking.push(Marking { wanted, name, thread }),
            Err(error) => {
                error!("{name}: the cache cannot be marked stale: {error:#}; writes are refused");
                self.server.shard.stale_marked(wanted, false);
            }
        }
    }

    fn record_of(&self, recorded: &Volume, backing: &Path, dirty: bool) -> Record {
        Record {
            cache: self.cache_uuid(),
            volume: uuid_text(&recorded.uuid),
            name: recorded.name.clone(),
            cache_path: self.lasting_cache_text(),
            attach_generation: recorded.attach_generation,
            backing: Known::of(backing),
            dirty,
            stale: None,
            left_at: None,
            written_at: None,
            backing_as_of: None,
            generation: self.generation(),
            sequence: 0,
        }
    }

    /// What is to be written down after a stop that makes everything durable: a volume that is on its backing device
    /// then may be served without the cache.
    pub(super) fn last_notes(&self) -> LastNotes {
        let served = self.volumes.iter().filter(|_| self.cache_path.is_some());
        let read = |served: &Served| {
            // Not yet raised, perhaps.
            let record =
                Record { generation: self.generation(), ..self.known_of(&served.uuid).ok()?? };
            Some((served.index, record))
        };
        LastNotes { dir: self.state_dir.clone(), records: served.filter_map(read).collect() }
    }

    /// Whether a failed cache is left out of all that is served.
    pub(super) fn is_passed(&self) -> bool {
        let engine = self.server.shard.engine();
        let passes =
            |it: &Served| engine.status(it.index).is_some_and(|it| it.stale == Stale::Passing);
        engine.health() == CacheHealth::Failed && self.volumes.iter().all(passes)
    }

    /// The cache's path from the root: whoever reads it may be somewhere else.
    fn lasting_cache_text(&self) -> String {
        let path = self.cache_path.as_ref().and_then(|path| std::path::absolute(path).ok());
        path.map_or_else(|| self.cache_text(), |path| path.display().to_string())
    }

    pub(super) fn cache_uuid(&self) -> String {
        uuid_text(&self.server.shard.superblock().uuid)
    }
}
