// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay resize --cache-size`: the cache becomes larger or smaller while its volumes are served.
//!
//! A file is made longer before, and shorter afterwards; a block device has what it has. What
//! happens in between: `log/resize.rs` of the engine. A crash leaves the one size or the other, and a file as
//! long as the larger one: the same command once more cuts it.

use super::Daemon;
use crate::control::Reply;
use crate::memory;
use crate::units::{count, size};
use anyhow::{Context, Result, anyhow, bail};
use forebay::io::DeviceKind;
use forebay_core::engine::CacheHealth;
use forebay_core::format::resize::Unfit;
use forebay_core::format::superblock::Superblock;
use forebay_core::limits::{CACHE_BYTES_MIN, SEGMENTS_RESERVED};
use forebay_core::units::VolumeIndex;
use std::time::Instant;
use tracing::{info, warn};

/// Of what a smaller cache has, logs may have this part reserved, at most.
const RESERVED_PART: u32 = 2;

impl Daemon {
    /// Looks whether the cache can have that size (none: all that its device has), and begins.
    pub(super) fn begin_to_resize_cache(&mut self, wanted: Option<u64>) -> Result<Reply> {
        let path = self.cache_text();
        if self.cache_path.is_none() {
            bail!(
                "there is no cache to be resized: the volumes are served bare; `serve` with --cache has one"
            );
        }
        self.check_stays().with_context(|| format!("{path}: stays as large as it is"))?;
        if let Some(other) = self.server.shard.resizing() {
            bail!(
                "{path}: is being made {} already; `forebay resize --stop` ends that",
                size(other)
            );
        }
        self.check_records(&path)?;
        let shard = &mut self.server.shard;
        let found = shard.measure_cache().with_context(|| format!("{path}: cannot be measured"))?;
        let is_file = shard.cache().info().kind == DeviceKind::File;
        let before = shard.superblock().size_bytes;
        let after = wanted.unwrap_or(found);
        if after > found && !is_file {
            bail!("{path}: holds {}; make the device larger first", size(found));
        }
        if after < CACHE_BYTES_MIN {
            bail!("{path}: {} are too few; a cache needs at least 64 MiB", size(after));
        }
        if after == before {
            let mut lines = vec![format!("{path}: has {} already", size(before))];
            if is_file && wanted.is_some() && found > before {
                // A crash came between the new size and the cut.
                shard.set_cache_file_size(before).with_context(|| format!("{path}: not cut"))?;
                lines.push(format!("{path}: the file had {}, and is cut", size(found)));
            }
            return Ok(Reply::Told { lines });
        }
        let next = shard.superblock().resized(after).map_err(|why| unfit(&path, after, why))?;
        if after > before {
            // What is taken now stays, but for the map; it is the next start that has to get by.
            self.check_memory(&next, &self.asked, self.vhost_sockets, self.memory)
                .with_context(|| format!("{path}: stays as large as it is: {}", size(after)))?;
        }
        if after < before {
            self.check_smaller(&next)?;
        }
        let counts = memory::Counts {
            volumes: self.room,
            vhost_sockets: self.vhost_sockets,
            devices: self.devices,
        };
        let shard = &mut self.server.shard;
        let parts = memory::parts(&next, counts, shard.engine().config());
        let total: u64 = parts.iter().map(|part| part.1).sum();
        info!(
            "{path}: is being made {}, {} now; takes {} of memory then",
            size(after),
            size(before),
            size(total)
        );
        if after > found {
            shard.set_cache_file_size(after).map_err(|why| {
                let advice =
                    "make room on its file system (`df -h` shows it), or choose a smaller size";
                anyhow!("{path}: there is no room for {}: {why}; {advice}", size(after))
            })?;
        }
        shard.begin_to_resize(after).map_err(|why| unfit(&path, after, why))?;
        Ok(Reply::Done)
    }

    /// Looks whether the cache's device has become larger while it was served; gives how large it is, if that can be said. As of backing
    /// devices: a file's maker knows.
    pub(super) fn look_for_larger_cache(&mut self, seen: Option<u64>) -> Option<u64> {
        let path = self.cache_text();
        let shard = &mut self.server.shard;
        let info = shard.cache().info();
        let (is_block, before) = (info.kind == DeviceKind::Block, seen.unwrap_or(info.size_bytes));
        if !is_block || shard.resizing().is_some() {
            return seen;
        }
        // One that cannot be asked fails at what is asked of it, and that is told.
        let Ok(found) = shard.measure_cache() else { return seen };
        if found > before {
            let cache = size(shard.superblock().size_bytes);
            let larger = larger(&path);
            self.problems.retain(|problem| !problem.starts_with(&larger));
            self.problem(format!(
                "{larger}: {}, and the cache has {cache}; `forebay resize --cache-size max` takes all of it",
                size(found)
            ));
        }
        Some(found.max(before))
    }

    /// Whether everything that lies in what goes can leave it.
    fn check_smaller(&self, next: &Superblock) -> Result<()> {
        let path = self.cache_text();
        let superblock = self.server.shard.superblock();
        let recorded = superblock.volumes.iter().enumerate();
        let recorded: Vec<_> = recorded
            .filter_map(|(at, volume)| Some((VolumeIndex(at as u8), volume.as_ref()?)))
            .collect();
        let reserved = recorded.len() as u32 * SEGMENTS_RESERVED;
        if next.segment_count < reserved * RESERVED_PART {
            let least = u64::from(reserved * RESERVED_PART) * u64::from(next.segment_bytes);
            bail!(
                "{path}: {} are too few for {}, whose logs need {} and room for checkpoints",
                size(next.size_bytes),
                count(recorded.len() as u64, "volume"),
                size(least)
            );
        }
        let shard = &self.server.shard;
        shard
            .has_room_for_volumes(next.segment_count)
            .with_context(|| format!("{path}: stays as large as it is"))?;
        for (index, volume) in recorded {
            let status = self.server.shard.engine().status(index);
            let name = &volume.name;
            if status.is_some_and(|status| status.frozen) {
                bail!(
                    "{path}: stays as large as it is: {name} is frozen, so what its log holds cannot be moved; \
                     `forebay status` says why"
                );
            }
            if !status.is_some_and(|status| status.serving) {
                bail!(
                    "{path}: stays as large as it is: {name} waits for its backing device, so what its log holds \
                     cannot be written back"
                );
            }
        }
        Ok(())
    }

    /// Goes on with another size of the cache.
    pub(super) fn resize_cache(&mut self) {
        let shard = &mut self.server.shard;
        let Some(after) = shard.resizing() else { return };
        let before = shard.superblock().size_bytes;
        if shard.engine().health() == CacheHealth::Failed {
            shard.cancel_resize();
            return warn!("the cache stays as large as it is: its device has failed");
        }
        let begun = Instant::now();
        match shard.go_on_resizing() {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => {
                shard.cancel_resize();
                return self.problem(format!("the cache was not made {}: {error}", size(after)));
            }
        }
        let waited = begun.elapsed();
        let is_file = shard.cache().info().kind == DeviceKind::File;
        let cut = match is_file && after < before {
            true => shard.set_cache_file_size(after),
            false => Ok(()),
        };
        let path = self.cache_text();
        if let Err(error) = cut {
            self.problem(format!("{path}: cannot be cut to {}: {error}", size(after)));
        }
        self.problems.retain(|problem| !problem.starts_with(&larger(&path)));
        info!(
            "{path}: has {} now, {} before; guests waited {} ms",
            size(after),
            size(before),
            waited.as_millis()
        );
    }

    /// The cache stays as large as it is. Says what it was to become.
    pub(super) fn stop_resizing_cache(&mut self) -> Option<u64> {
        let wanted = self.server.shard.resizing()?;
        self.server.shard.cancel_resize();
        info!("{}: is not made {}", self.cache_text(), size(wanted));
        Some(wanted)
    }
}

fn larger(path: &str) -> String {
    format!("{path}: the cache device has become larger")
}

fn unfit(path: &str, after: u64, why: Unfit) -> anyhow::Error {
    let after = size(after);
    match why {
        Unfit::Same => anyhow::anyhow!("{path}: has {after} already"),
        Unfit::TooSmall => anyhow::anyhow!(
            "{path}: {after} are too few for a cache with segments of this size; choose more"
        ),
        Unfit::NoMore { needed } => anyhow::anyhow!(
            "{path}: would hold no more with {after}, since it needs room for larger checkpoints; {} are the least \
             that are worth it",
            size(needed)
        ),
        Unfit::TooClose => anyhow::anyhow!("{path}: would hold no less with {after}"),
    }
}
