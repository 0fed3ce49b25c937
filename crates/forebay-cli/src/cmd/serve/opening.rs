// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening the cache, and saying what was found.

use super::Daemon;
use super::watch::Watch;
use crate::args::{IoChoice, ServeArgs};
use crate::backing;
use crate::units::size;
use anyhow::{Result, bail};
use forebay::io::ReactorKind;
use forebay::shard::{CACHE_SOURCE, Shard, ShardOptions};
use forebay_core::engine::{Acknowledge, Config, Engine};
use forebay_core::log::recovery::Damage;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_serve::server::Server;
use std::path::Path;
use std::rc::Rc;
use tracing::{info, warn};

impl Daemon {
    pub(super) fn open(cache: &Path, args: &ServeArgs) -> Result<Daemon> {
        let device = backing::open_exclusive(cache, CACHE_SOURCE, None)?;
        let (device, cache_stats) = backing::counted(device);
        let options = options(args)?;
        let found = forebay::cache::read_superblock(device.as_ref())?;
        let volumes = found.superblock.volumes.iter().flatten().count() + args.volumes.len();
        let parts = Engine::memory_parts(
            found.superblock.segment_count,
            found.superblock.segment_blocks(),
            volumes.max(1),
            &options.config,
        );
        let total: u64 = parts.iter().map(|part| part.1).sum();
        info!("takes {} of memory for {volumes} volumes", size(total));
        let shard = Shard::open(device, &options)?;
        let mut daemon = Daemon {
            server: Server::new(shard),
            cache_path: cache.to_owned(),
            cache_stats,
            volumes: Vec::new(),
            desk: Rc::default(),
            problems: Vec::new(),
            attached: None,
            watch: Watch::new(),
        };
        daemon.tell_opened();
        Ok(daemon)
    }

    /// Says what opening found.
    fn tell_opened(&mut self) {
        let opened = self.server.shard.opened().clone();
        if opened.repaired_superblock {
            warn!("one copy of the superblock was bad; it is repaired from the other");
        }
        if !opened.clean {
            warn!(
                "the last stop was not a clean one; recovered in {:.1} s, {} segments from \
                 memory",
                opened.took.as_secs_f64(),
                opened.redone_segments
            );
        }
        for damage in opened.damage {
            let text = self.damage_text(damage);
            warn!("{text}");
            if !matches!(damage, Damage::Cut { .. } | Damage::Clean { .. }) {
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

fn options(args: &ServeArgs) -> Result<ShardOptions> {
    let mut config = Config::default();
    if args.sync_after.is_zero() {
        config.acknowledge = Acknowledge::Durable;
    } else {
        config.durable_after = args.sync_after.as_nanos() as u64;
        config.close_after = config.close_after.min(config.durable_after);
    }
    // The fixed sum: buffers, window, batches and extents scale together.
    let default = 192 << 20;
    if args.memory < 48 << 20 {
        bail!("--memory {}: at least 48 MiB are needed", size(args.memory));
    }
    if args.memory < default {
        let share = |value: u64| value * args.memory / default;
        config.buffer_count = share(u64::from(config.buffer_count)).max(8) as u16;
        config.window_blocks = (share(u64::from(config.window_blocks)) as u32 / 4 * 4).max(1024);
        config.batch_blocks_max = share(u64::from(config.batch_blocks_max)).max(2048) as u32;
        config.extent_count_max = share(u64::from(config.extent_count_max)).max(1024) as u32;
    }
    let reactor = match args.io {
        IoChoice::Auto => ReactorKind::Auto,
        IoChoice::Uring => ReactorKind::Uring,
        IoChoice::Threads => ReactorKind::Threads,
    };
    Ok(ShardOptions { reactor, config, ..ShardOptions::default() })
}
