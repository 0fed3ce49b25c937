// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening the cache, and saying what was found.

use super::Daemon;
use super::awaited::Awaited;
use super::coming::Silent;
use super::devices::uuid_of_bare;
use super::fate::Fate;
use super::watch::Watch;
use crate::args::{IoChoice, SEGMENT_BYTES_LEAST, ServeArgs, VolumeSpec};
use crate::asking::Asking;
use crate::attach::left::{self, Known};
use crate::attach::{Kind, NbdDevices};
use crate::late::{ANSWER_MAX, Patience};
use crate::older::Older;
use crate::state_dir::StateDir;
use crate::units::{count, size};
use crate::{backing, memory, open_files, upgrade};
use anyhow::{Context, Result};
use forebay::cache::Found;
use forebay::host::named::Named;
use forebay::host::notify::watchdog_interval;
use forebay::io::{Device, MemoryDevice, OperationKind, ReactorKind, Stats};
use forebay::shard::{CACHE_SOURCE, Opening, ShardOptions, uuid_text, wall_now};
use forebay_core::engine::{Acknowledge, Config};
use forebay_core::format::superblock::Superblock;
use forebay_core::limits::CACHE_BYTES_MIN;
use forebay_core::log::recovery::Damage;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_serve::server::Server;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;
use tracing::{info, warn};

/// So many volumes can be attached while the daemon runs, besides those that it began with, or as many as there is
/// memory for: it is taken at the start.
const SPARE_VOLUMES: usize = 2;

/// A cache that is open for us alone, and what it says of itself. Nothing is changed yet.
pub(super) struct Opened {
    /// None where volumes are served bare.
    path: Option<PathBuf>,
    device: Box<dyn Device>,
    stats: Stats,
    found: Found,
    /// What was looked for and has not answered.
    silent: Vec<Silent>,
}

impl Opened {
    pub(super) fn open(path: Option<PathBuf>) -> Result<Opened> {
        let device: Box<dyn Device> = match &path {
            Some(path) => {
                Box::new(match backing::take_left(upgrade::CACHE, path, CACHE_SOURCE, None)? {
                    Some(device) => device,
                    None => backing::open_exclusive(path, CACHE_SOURCE, None)?,
                })
            }
            None => Box::new(no_cache()?),
        };
        let (device, stats) = backing::counted(device);
        let found = forebay::cache::read_superblock(device.as_ref())?;
        Ok(Opened { path, device, stats, found, silent: Vec::new() })
    }

    /// Refuses it while a device waits for the next daemon.
    pub(super) fn check_none_left(&self) -> Result<()> {
        left::check_none(&self.found.superblock, None)
    }

    /// Its identity.
    pub(super) fn uuid(&self) -> String {
        uuid_text(&self.found.superblock.uuid)
    }

    /// The volumes that may have a device already.
    pub(super) fn volumes(&mut self, args: &ServeArgs) -> Vec<Known> {
        if self.path.is_some() {
            return left::recorded(&self.found.superblock);
        }
        let begin = |spec: &VolumeSpec| {
            let path = spec.backing.path.clone();
            Asking::begin("look", move || Patience::none().find(&path, "backing device").ok())
        };
        let looks: Vec<_> = args.volumes.iter().map(|spec| (spec, begin(spec))).collect();
        let begun = Instant::now();
        let of = |(spec, look): (&VolumeSpec, Result<Asking<Option<PathBuf>>>)| {
            let path = &spec.backing.path;
            let is_path = matches!(Named::parse(path), Ok(Named::Path(_)));
            let limit = ANSWER_MAX.saturating_sub(begun.elapsed());
            let found = match look.ok()? {
                // It may have been served. Others are not held up for it (B1 of `searching`).
                look if is_path && !look.wait(limit) => {
                    self.silent.push(Silent::new(Some(path.clone()), look));
                    path.clone()
                }
                // One that is not there yet is none that was.
                look => look.end().ok()??,
            };
            Some(Known { name: spec.name.clone(), uuid: uuid_of_bare(&found) })
        };
        looks.into_iter().filter_map(of).collect()
    }
}

impl Daemon {
    /// `devices`: what volumes will be attached by.
    pub(super) fn open(cache: Opened, args: &ServeArgs, devices: Option<Kind>) -> Result<Daemon> {
        // Before anything is changed: where it cannot be looked at nothing is served.
        let state_dir = StateDir::open(args.state_dir.as_deref())?;
        let mut options = options(args);
        let Opened { path: cache, device, stats: cache_stats, found, silent } = cache;
        let handed = upgrade::take_cache();
        let older = match &handed {
            // Nobody else had it meanwhile.
            Some(_) => Older::default(),
            None => Older::find(state_dir.as_ref().ok(), &found.superblock)?,
        };
        if cache.is_none() {
            // Nothing is ever in it, so nothing has to outlive the process.
            (options.shared, options.lasting) = (false, false);
        }
        let volumes = volume_count(&found.superblock, &args.volumes);
        let vhost_sockets = crate::vhost::socket_count(args);
        open_files::check(memory::Counts { volumes, vhost_sockets, devices }, args)?;
        let wanted = options.config;
        let fit = |spare: usize| {
            let volumes = volumes + spare;
            let counts = memory::Counts { volumes, vhost_sockets, devices };
            let config = memory::fit(&wanted, 0, &found.superblock, counts, args.memory)?;
            anyhow::Ok((counts, config))
        };
        let spared = (1..=SPARE_VOLUMES).rev().find_map(|spare| fit(spare).ok());
        let (counts, config) = spared.map_or_else(|| fit(0), Ok)?;
        let room = counts.volumes;
        options.config = config;
        let tell = |config: &Config| {
            let parts = memory::parts(&found.superblock, counts, config);
            let total: u64 = parts.iter().map(|part| part.1).sum();
            info!("takes {} of memory for at most {}", size(total), count(room as u64, "volume"));
            let is_of_map = |part: &(&str, u64)| memory::is_of_map(part.0);
            let (map, rest): (Vec<_>, Vec<_>) = parts.into_iter().partition(is_of_map);
            for (of, parts) in [("the map", map), ("all else", rest)] {
                let bytes = parts.iter().map(|part: &(&str, u64)| part.1).sum();
                let parts: Vec<String> =
                    parts.iter().map(|(name, bytes)| format!("{name} {}", size(*bytes))).collect();
                info!("memory for {of}: {}: {}", size(bytes), parts.join(", "));
            }
        };
        tell(&options.config);
        let needs = (&found.superblock, counts, &options.config);
        memory::check(needs, handed.is_some(), cache.as_deref())?;
        let mut opening = Opening::go_on(device, &options, handed)?;
        let extents = opening.config().extent_count_max;
        if extents > options.config.extent_count_max {
            let fitted = memory::fit(&wanted, extents, &found.superblock, counts, args.memory);
            let ranges = count(extents.into(), "zeroed, discarded or lost range");
            let text = format!("the log holds {ranges}");
            let config = fitted.with_context(|| text.clone())?;
            warn!("{text}");
            tell(&config);
            opening.set_config(config);
        }
        older.decide(&mut opening, args)?;
        let shard = opening.finish()?;
        let cache_fate = cache.as_ref().and_then(|path| Fate::of(shard.cache(), path));
        let mut daemon = Daemon {
            server: Server::new(shard),
            cache_fate,
            cache_path: cache,
            cache_stats,
            volumes: Vec::new(),
            desk: Rc::default(),
            problems: Vec::new(),
            devices,
            left: Vec::new(),
            nbd_devices: NbdDevices::new(args.nbd_connections.into()),
            attached: Vec::new(),
            awaited: Awaited::default(),
            coming: None,
            slow: Vec::new(),
            silent,
            leaving: None,
            growing: None,
            exports: Rc::default(),
            listen: args.listen.clone(),
            room,
            memory: args.memory,
            is_serving: false,
            is_ready: false,
            is_ending: false,
            asked: args.volumes.clone(),
            came: Vec::new(),
            gone: Vec::new(),
            config_file: args.config_file(),
            state_dir: None,
            marking: Vec::new(),
            notes: super::noting::Notes::default(),
            watch: Watch::new(),
            scrubs: super::scrub::Scrubs::new(args.scrub_every),
            activity: "opens the cache",
            upgrade: None,
            sockets: Vec::new(),
            trial: None,
            upgrading: None,
            signals: None,
            watchdog: watchdog_interval().map(|interval| (interval, Instant::now())),
            started_at: wall_now(),
            nbd_clients: None,
            nbd_silent: None,
            nbd_refused: None,
            passage: None,
            vhost_sockets,
            machines: None,
            machines_waiting: Vec::new(),
        };
        daemon.tell_opened();
        daemon.use_state_dir(state_dir);
        Ok(daemon)
    }

    /// Refuses what the next start on a cache with that superblock would not have memory enough for.
    pub(super) fn check_memory(
        &self,
        superblock: &Superblock,
        asked: &[VolumeSpec],
        vhost_sockets: usize,
        memory: u64,
    ) -> Result<()> {
        let volumes = volume_count(superblock, asked);
        let counts = memory::Counts { volumes, vhost_sockets, devices: self.devices };
        // The log may hold as many as there is room for now.
        let extents = self.server.shard.engine().config().extent_count_max;
        memory::fit(&Config::default(), extents, superblock, counts, memory).map(drop)
    }

    /// Says what opening found.
    fn tell_opened(&mut self) {
        let opened = self.server.shard.opened().clone();
        if opened.repaired_superblock {
            warn!("one copy of the superblock was bad; it is repaired from the other");
        }
        let read = self.cache_stats.snapshot().kind(OperationKind::Read).bytes;
        let took = opened.took.as_secs_f64();
        if opened.handed_over {
            info!(
                "the program before handed the cache over in {took:.3} s; {read} bytes were read of it"
            );
            self.upgrade = Some("by a hand-over".into());
        } else if let Some(why) = opened.not_taken.or_else(upgrade::why_not_left) {
            let text = format!("by stop and recovery, because {why}");
            info!("goes on {text}; {took:.3} s, {read} bytes were read of the cache");
            self.upgrade = Some(text);
        }
        if !opened.clean && !opened.handed_over {
            warn!(
                "the last stop was not a clean one; recovered in {:.1} s, {} from memory",
                opened.took.as_secs_f64(),
                count(opened.redone_segments as u64, "segment")
            );
        }
        if !opened.not_left.is_empty() && !opened.handed_over {
            let looked: Vec<String> =
                opened.not_left.iter().map(|path| path.display().to_string()).collect();
            let looked = looked.join(", ");
            match self.server.shard.engine().config().acknowledge {
                Acknowledge::Placed | Acknowledge::Durable => warn!(
                    "what the process before had in memory was not found: what it answered and no flush covered may be lost. It was looked \
                     for in {looked}; all who open this cache need the same XDG_RUNTIME_DIR"
                ),
                // Nor had that one, most likely.
                Acknowledge::Written => info!(
                    "there is no memory here that outlives a process (it was looked for in {looked}): if the process before had some, what it \
                     answered and no flush covered may be lost; without it nothing is answered before the cache device has it"
                ),
            }
        }
        if opened.rewritten_bytes > 0 {
            let bytes = size(opened.rewritten_bytes);
            info!("{bytes} of the logs' ends were written again: they may not have been durable");
        }
        if opened.dropped_ends > 0 {
            let volumes = count(opened.dropped_ends as u64, "volume");
            warn!(
                "the cache device has lost the end of the log of {volumes}, which was answered and not flushed: flushes answer \
                 errors there until the guest was told and serve is started again"
            );
        }
        for damage in opened.damage {
            let text = self.damage_text(damage);
            warn!("{text}");
            // What is lost is told as long as it is (`health`).
            if matches!(damage, Damage::Unknown { .. }) {
                self.problems.push(text);
            }
        }
    }

    fn damage_text(&self, damage: Damage) -> String {
        let name = |index: VolumeIndex| {
            self.recorded(index).map_or_else(String::new, |volume| volume.name.clone())
        };
        match damage {
            Damage::Lost { volume, lba, count } => format!(
                "{}: {} at byte {} were dirty and their record rotted; reads there fail until they \
                 are written",
                name(volume),
                size(count * BLOCK_BYTES),
                lba.bytes()
            ),
            Damage::Replaced { volume, lba, count } => format!(
                "{}: {} at byte {} were dirty and their record rotted; they were overwritten since, so \
                 nothing of that is lost",
                name(volume),
                size(count * BLOCK_BYTES),
                lba.bytes()
            ),
            Damage::Unknown { volume, segment, block } => format!(
                "{}: a dirty record rotted (segment {}, block {block}) and nothing says what it \
                 held; the volume is frozen, see `forebay check`",
                name(volume),
                segment.0
            ),
            Damage::Clean { volume, segment, block } => format!(
                "{}: a clean record rotted (segment {}, block {block}); nothing is lost",
                name(volume),
                segment.0
            ),
            Damage::Cut { volume, through } => {
                format!("{}: the log ends at sequence {}", name(volume), through.0)
            }
        }
    }
}

/// So many volumes there are to be, those that are recorded and those that are asked for: memory is taken for one at least.
fn volume_count(superblock: &Superblock, asked: &[VolumeSpec]) -> usize {
    let recorded = || superblock.volumes.iter().flatten();
    let is_new = |wanted: &&VolumeSpec| recorded().all(|volume| volume.name != wanted.name);
    (recorded().count() + asked.iter().filter(is_new).count()).max(1)
}

/// What stands for the cache where volumes are served bare: the log is empty and stays so, since all of them are
/// write-around.
fn no_cache() -> Result<MemoryDevice> {
    let device = MemoryDevice::new(CACHE_BYTES_MIN, 4096).context("cannot take memory")?;
    forebay::cache::format(&device, CACHE_BYTES_MIN, SEGMENT_BYTES_LEAST, wall_now())?;
    Ok(device)
}

fn options(args: &ServeArgs) -> ShardOptions {
    let mut config = Config::default();
    if args.cache.is_none() {
        // Bare is bare.
        (config.ahead_blocks, config.fill_run_max) = (0, 0);
    }
    if args.sync_after.is_zero() {
        config.acknowledge = Acknowledge::Durable;
    } else {
        config.durable_after = args.sync_after.as_nanos() as u64;
        config.close_after = config.close_after.min(config.durable_after);
    }
    config.scrub_rate = args.scrub_rate;
    let reactor = match args.io {
        IoChoice::Auto => ReactorKind::Auto,
        IoChoice::Uring => ReactorKind::Uring,
        IoChoice::Threads => ReactorKind::Threads,
    };
    ShardOptions { reactor, config, lasting: true, marks_stale: true, ..ShardOptions::default() }
}
