// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay upgrade`: the daemon goes on as another program (`crate::upgrade`), if that one, and this one after it, could serve what
//! this one does.

use super::Daemon;
use super::coming::Silent;
use super::ending::{FRONT_ENDS, close_shard};
use super::look::logical_block;
use crate::args::{ServeArgs, VolumeSpec};
use crate::attach::{self, Attached};
use crate::units::count;
use crate::upgrade::{CACHE, Disk, Left};
use crate::{config, sockets, upgrade, vhost, words};
use anyhow::{Context, Result, bail};
use forebay::host::machine::Host;
use forebay::host::named::{self, Named};
use forebay_core::engine::CacheHealth;
use forebay_serve::carried::Handed;
use forebay_serve::passage::Passage;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::{info, warn};

/// What to do about a device that does not answer: a thread is stuck with it.
const SILENT: &str = "`dmesg` may say why: upgrade when it has answered, or use `forebay stop`";

/// How long the last requests and flushes may take before a hand-over is given up.
const REST: Duration = Duration::from_secs(10);

impl Daemon {
    /// Whether this daemon can go on as that program, as far as no device is asked for that ([`Disks`]).
    pub(super) fn check_upgrade(&self, executable: &Path) -> Result<()> {
        let shown = executable.display();
        let found = executable.metadata().with_context(|| format!("{shown}: cannot be read"))?;
        let may_run = found.permissions().mode() & 0o111 != 0;
        if !(executable.is_absolute() && found.is_file() && may_run) {
            bail!("{shown}: expected the absolute path of a program");
        }
        if self.is_ending {
            bail!("the daemon is being stopped; serve with the new program when it is gone");
        }
        if !self.is_ready {
            bail!("its start waits for a backing device (`forebay status`); upgrade after that");
        }
        // Who waits for that would never be answered.
        if let Some(coming) = self.coming.iter().chain(&self.slow).next() {
            bail!("{}: is being attached; upgrade after that", coming.name());
        }
        if let Some(leaving) = &self.leaving {
            bail!("{}: is being detached; upgrade after that", leaving.name());
        }
        if let Some(growing) = &self.growing {
            bail!("{}: is being made larger; upgrade after that", growing.name());
        }
        // The kernel waits for answers meanwhile, and a thread for the kernel.
        if self.attached.iter().any(Attached::is_resizing) {
            bail!("a block device is being made larger; upgrade after that");
        }
        // A program is executed when all threads of the one before have ended.
        if !self.silent.iter().all(Silent::is_over) {
            bail!("a device that was to be attached, or its driver, does not answer; {SILENT}");
        }
        if self.awaited.is_stuck() {
            bail!("a device does not answer that was looked at for a volume that waits; {SILENT}");
        }
        if let Some(name) = named::silent().first() {
            bail!("/dev/{name} was looked at for a UUID, and does not answer; {SILENT}");
        }
        self.notes.check()?;
        if self.server.shard.resizing().is_some() {
            bail!("the cache is being given another size; `forebay resize --stop` ends that");
        }
        if self.volumes.is_empty() {
            bail!(
                "no volume is served, so nobody waits; use `forebay stop`, and serve with the new program"
            );
        }
        if self.server.shard.engine().health() == CacheHealth::Failed {
            bail!(
                "the cache device has failed, and neither the new program nor this one could serve if it cannot be opened again; \
                 use `forebay stop`, and serve with the new program"
            );
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

    /// Whether anything stands against what the next program is to serve, but for its disks.
    pub(super) fn check_next(&self, next: &ServeArgs) -> Result<()> {
        let left: Vec<_> = self.attached.iter().flat_map(Attached::left).collect();
        attach::left::kept(next.attach, &left)?;
        for spec in &next.volumes {
            if let Some(served) = self.volumes.iter().find(|served| served.name == spec.name) {
                logical_block(&spec.name, spec.logical_block, self.recorded(served.index))?;
            }
        }
        let shard = &self.server.shard;
        shard.check_room(&self.reserves_asked(&next.volumes), &[])?;
        let (_, problems) = vhost::named(next, &self.names(next))?;
        if let Some(text) = problems.into_iter().next() {
            bail!(text);
        }
        let sockets = vhost::socket_count(next);
        self.check_memory(shard.superblock(), &next.volumes, sockets, next.memory)
    }

    /// What is served from what, as it is now.
    pub(super) fn disks_now(&self) -> Disks {
        let disks = self.disks().map(|(disk, path)| (disk, path.to_owned())).collect();
        let words = self.next_words(&upgrade::words());
        Disks { disks, backings: self.backings(), words }
    }

    /// Each volume, and where it is served from.
    pub(super) fn backings(&self) -> Vec<(String, PathBuf)> {
        self.volumes.iter().map(|served| (served.name.clone(), served.backing.clone())).collect()
    }

    /// Words of this program's as the next one is to have them (`crate::words`).
    fn next_words<W: AsRef<OsStr> + Clone>(&self, given: &[W]) -> Vec<W> {
        let is_over = |option: &str, value: &str| {
            let name = name_of(value);
            let came = || self.came.iter().any(|text| name_of(text) == name);
            // One that is new, and waits, is recorded nowhere.
            self.gone.iter().any(|gone| gone == name) || option == "--volume" && came()
        };
        words::without(given, is_over)
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

    /// The command line of the next program.
    pub(super) fn words_for_next(&self) -> Vec<OsString> {
        let mut words = self.next_words(&upgrade::words());
        // Nothing records them.
        if self.cache_path.is_none() {
            words.extend(self.came.iter().flat_map(|text| ["--volume".into(), text.into()]));
        }
        words
    }

    /// The next program, and this one if that cannot serve, serve what this one does.
    fn keep_words(&self) {
        upgrade::keep_words(self.words_for_next());
        upgrade::change_settings(|settings| self.next_words(settings));
    }

    /// What stands against leaving the map to a program with this layout.
    pub(super) fn against_hand_over(&self, layout: Option<String>) -> Option<String> {
        match layout {
            _ if self.cache_path.is_none() => Some("there is no cache".into()),
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
        self.keep_words();
        let disks = self.disks().map(|disk| disk.0).collect();
        let sockets_left = std::mem::take(&mut self.sockets);
        let mut left = Left { sockets: sockets_left, disks, ..Left::default() };
        let (cache, notes) = (self.cache_text(), self.last_notes());
        let cache_gone = self.cache_gone();
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
                            sockets::remove(&path);
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
        let closed = close_shard(shard, &volumes, (&cache, cache_gone), notes, limit)?;
        closed.undurable.iter().for_each(|why| warn!("{}", why.text()));
        sockets.for_each(|path| sockets::remove(&path));
        left.sockets.clear();
        Ok((left, Some(against)))
    }
}

/// What is served from what: whether the next program would find it where it is told to. Devices, and file systems that files are on, are asked
/// for that, and may not answer: a thread does it.
pub(super) struct Disks {
    disks: Vec<(Disk, PathBuf)>,
    /// Of volumes.
    pub(super) backings: Vec<(String, PathBuf)>,
    /// Of the next program.
    words: Vec<OsString>,
}

impl Disks {
    /// Gives what the next program is told, where this one understands it.
    pub(super) fn check(&self) -> Result<Option<ServeArgs>> {
        for (disk, path) in &self.disks {
            disk.check(path)?;
        }
        let cache = self.disks.iter().find(|it| it.0.is_of(CACHE));
        if let Some((disk, path)) = cache {
            // Neither program could serve without.
            disk.check_found(path)?;
        }
        // What this program does not understand the next one may; if not, that refuses.
        let Ok(next) = config::next(self.words.clone()) else { return Ok(None) };
        next.volumes.iter().try_for_each(|spec| self.check_next(spec))?;
        if let Some((path, (disk, _))) = next.cache.as_ref().zip(cache) {
            match Named::parse(path)? {
                Named::Path(path) => disk.check_found(&path)?,
                named => {
                    let found = named.find(&Host::default())?;
                    let found = found
                        .with_context(|| format!("{named}: no device carries that identity"))?;
                    disk.check_found(&found)?;
                }
            }
        }
        for (disk, path) in self.disks.iter().filter(|it| !it.0.is_of(CACHE)) {
            // One that is named otherwise by now was looked for there.
            let is_elsewhere = |spec: &VolumeSpec| {
                let named = std::path::absolute(&spec.backing.path);
                disk.is_of(&spec.name) && named.is_ok_and(|named| named != *path)
            };
            if !next.volumes.iter().any(is_elsewhere) {
                disk.check_stays(path)?;
            }
        }
        Ok(Some(next))
    }

    /// Whether the next program would find a volume that is served where it is told to.
    fn check_next(&self, spec: &VolumeSpec) -> Result<()> {
        let Some((_, backing)) = self.backings.iter().find(|served| served.0 == spec.name) else {
            return Ok(());
        };
        let found = match Named::parse(&spec.backing.path)? {
            Named::Path(path) if !path.exists() => {
                if std::path::absolute(&path)? == *backing {
                    return Ok(());
                }
                bail!(
                    "{}: {} is not there, and the volume is served from {}; an upgrade changes no disk: name that one again",
                    spec.name,
                    path.display(),
                    backing.display()
                );
            }
            // What cannot be found by what is on it may be found by the next program.
            named => named.find(&Host::default()).ok().flatten(),
        };
        let disk = self.disks.iter().map(|disk| &disk.0).find(|disk| disk.is_of(&spec.name));
        match disk.zip(found) {
            Some((disk, found)) => Ok(disk.check(&found)?),
            None => Ok(()),
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

/// The name that what is said of a volume begins with.
pub(super) fn name_of(text: &str) -> &str {
    text.split_once('=').map_or(text, |(name, _)| name)
}
