// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seeing what has changed, twice a second, and telling it in the log.

use super::scrub::bad_block_text;
use super::{Daemon, fate};
use crate::attach::Attached;
use crate::cmd::drain::drained_but_for;
use crate::log::Limiter;
use crate::units::{count, size};
use forebay::io::{KindStats, OperationKind, Stats};
use forebay_core::engine::CacheHealth;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use forebay_serve::nbd::listen::{AGREE_MAX, CONNECTION_COUNT_MAX};
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};

const EVERY: Duration = Duration::from_millis(500);
const SIZES_EVERY: Duration = Duration::from_secs(10);

/// What may happen again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// Somebody was sent away: too many files are open.
    OpenFiles,
    /// An NBD client that had said too little made room for another.
    Silent,
    /// One was sent away, for nobody did.
    Places,
    /// The cache device failed an operation.
    Cache,
    /// A backing device did.
    Backing(VolumeIndex),
    /// A volume's backing device does not take what is written back, or does again.
    Failing(VolumeIndex),
    Lost(VolumeIndex),
    /// A guest's read failed, for what it reads is bad on the cache device and nowhere else.
    Bad(VolumeIndex),
    Repaired(VolumeIndex),
}

/// What was seen last.
pub(super) struct Watch {
    limiter: Limiter<Cause>,
    next: Instant,
    /// When devices are asked how large they are.
    sizes: Instant,
    /// When files are looked at.
    files: Instant,
    /// How large the cache's device was.
    cache_bytes: Option<u64>,
    /// Who was sent away until now.
    sent_away: u64,
    /// NBD connections that made room until now.
    silent: u64,
    /// Those that found no place until now.
    refused: u64,
    cache: Device,
    is_failed: bool,
    volumes: Vec<Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Device {
    errors: [u64; OperationKind::ALL.len()],
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    backing: Device,
    is_failing: bool,
    parked: u64,
    is_parked_full: bool,
    is_draining: bool,
    lost: u64,
    bad: u64,
    repaired: u64,
    batches: u64,
}

impl Watch {
    pub(super) fn new() -> Watch {
        Watch {
            limiter: Limiter::new(),
            next: Instant::now(),
            sizes: Instant::now() + SIZES_EVERY,
            files: Instant::now() + fate::EVERY,
            cache_bytes: None,
            sent_away: 0,
            silent: 0,
            refused: 0,
            cache: Device::default(),
            is_failed: false,
            volumes: Vec::new(),
        }
    }

    fn warn(&mut self, cause: Cause, text: String, count: u64, now: Instant) {
        if let Some(line) = self.limiter.tell(cause, text, count, now) {
            warn!("{line}");
        }
    }
}

impl Daemon {
    /// A drain of a volume was asked for.
    pub(super) fn watch_drain(&mut self, at: usize) {
        let served = &self.volumes[at];
        let Some(status) = self.server.shard.engine().status(served.index) else { return };
        info!("{}: drains: {} to go", served.name, size(status.dirty_blocks * BLOCK_BYTES));
        self.watch.volumes.resize_with(self.volumes.len(), Seen::default);
        self.watch.volumes[at].is_draining = true;
    }

    /// A volume is gone.
    pub(super) fn watch_left(&mut self, at: usize) {
        if at < self.watch.volumes.len() {
            self.watch.volumes.remove(at);
        }
    }

    /// Tells what was not told for having been told before: nobody watches any more.
    pub(super) fn watch_ends(&mut self) {
        self.watch.next = Instant::now();
        self.watch();
        for (_, line) in self.watch.limiter.due(Instant::now() + Duration::from_secs(60)) {
            warn!("{line}");
        }
    }

    /// Looks whether anything has changed, if it is time.
    pub(super) fn watch(&mut self) {
        let now = Instant::now();
        if now < self.watch.next {
            return;
        }
        self.watch.next = now + EVERY;
        self.watch_cache(now);
        let sent_away = self.server.shard.reactor.sent_away();
        let news = sent_away - std::mem::replace(&mut self.watch.sent_away, sent_away);
        if news > 0 {
            let text = "connections are closed at once: the daemon may have no more open files (`ulimit -n`, LimitNOFILE=)";
            self.watch.warn(Cause::OpenFiles, text.into(), news, now);
        }
        let silent = self.nbd_silent.as_ref().map_or(0, |it| it.get());
        let news = silent - std::mem::replace(&mut self.watch.silent, silent);
        if news > 0 {
            let text = format!(
                "an NBD connection is closed: it had agreed on nothing for {AGREE_MAX:?}, and all {CONNECTION_COUNT_MAX} places were taken"
            );
            self.watch.warn(Cause::Silent, text, news, now);
        }
        let refused = self.nbd_refused();
        let news = refused - std::mem::replace(&mut self.watch.refused, refused);
        if news > 0 {
            let text = format!(
                "an NBD connection is closed as it comes: all {CONNECTION_COUNT_MAX} places are taken; end clients that nobody needs (`forebay \
                 status` says how many each volume has)"
            );
            self.watch.warn(Cause::Places, text, news, now);
        }
        let passages = [self.passage.clone(), self.machines_passage(), self.devices_passage()];
        let passages = passages.into_iter().flatten();
        passages.flat_map(|passage| passage.told()).for_each(|text| warn!("{text}"));
        self.attached.iter_mut().for_each(Attached::watch_keeper);
        self.attached.iter_mut().for_each(Attached::watch_devices);
        // First: what is drained may not be the plain disk.
        if now >= self.watch.files {
            self.watch.files = now + fate::EVERY;
            self.begin_looks();
        }
        self.hear_of_files();
        for at in 0..self.volumes.len() {
            self.watch_volume(at, now);
        }
        if now >= self.watch.sizes {
            self.watch.sizes = now + SIZES_EVERY;
            (0..self.volumes.len()).for_each(|at| self.look_for_growth(at));
            self.watch.cache_bytes = self.look_for_larger_cache(self.watch.cache_bytes);
        }
        for (_, line) in self.watch.limiter.due(now) {
            warn!("{line}");
        }
    }

    /// NBD connections that found no place until now.
    pub(super) fn nbd_refused(&self) -> u64 {
        self.nbd_refused.as_ref().map_or(0, |it| it.get())
    }

    fn watch_cache(&mut self, now: Instant) {
        let path = self.cache_text();
        if let Some((text, count)) = self.watch.cache.news(&self.cache_stats) {
            self.watch.warn(Cause::Cache, format!("{path}: {text}"), count, now);
        }
        let is_failed = self.server.shard.engine().health() == CacheHealth::Failed;
        if is_failed && !self.watch.is_failed {
            error!(
                "{path}: the cache device has failed: of volumes that are not on their backing devices writes and \
                 flushes are refused, reads go on; nothing that was answered is lost; restart the daemon when the \
                 device is well"
            );
        }
        self.watch.is_failed = is_failed;
    }

    fn watch_volume(&mut self, at: usize, now: Instant) {
        let served = &self.volumes[at];
        let (index, name) = (served.index, &served.name);
        let Some(status) = self.server.shard.engine().status(index) else { return };
        let backing = served.backing.display();
        let written = status.stats.backing_blocks_written * BLOCK_BYTES;
        self.watch.volumes.resize_with(self.volumes.len(), Seen::default);
        let mut seen = self.watch.volumes[at];
        if let Some((text, count)) = seen.backing.news(&served.stats) {
            let text = format!("{name}: {backing}: {text}");
            self.watch.warn(Cause::Backing(index), text, count, now);
        }
        if status.backing_failing != seen.is_failing {
            let text = match status.backing_failing {
                true => format!(
                    "{name}: degraded: {backing} does not take what is written back; {} of dirty \
                     data is kept and tried again",
                    size(status.dirty_blocks * BLOCK_BYTES)
                ),
                false => format!("{name}: healthy again: {backing} takes what is written back"),
            };
            self.watch.warn(Cause::Failing(index), text, 1, now);
        }
        let parked = status.parked_blocks;
        if (parked > 0) != (seen.parked > 0) || status.parked_full != seen.is_parked_full {
            let text = match (status.parked_first, status.parked_full) {
                (_, true) => format!(
                    "{name}: failed: {backing} refuses more blocks than can be set aside; writes \
                     answer errors until it takes some of them"
                ),
                (Some(first), false) => format!(
                    "{name}: degraded: {backing} refuses {}, the first at byte {}: kept in the cache and \
                     tried again",
                    count(parked, "block"),
                    first.0 * BLOCK_BYTES
                ),
                (None, false) => format!("{name}: {backing} refuses no block any more"),
            };
            self.watch.warn(Cause::Failing(index), text, 1, now);
        }
        let lost = status.stats.lost_blocks.saturating_sub(seen.lost);
        if lost > 0 {
            let text = format!(
                "{name}: lost {}, bad on the cache device: reads there fail until it is written again; \
                 `forebay stop`, then `forebay check` says where",
                count(lost, "dirty block")
            );
            self.watch.warn(Cause::Lost(index), text, 1, now);
        }
        let bad = status.stats.bad_blocks_read - seen.bad;
        // Of a device that has failed nothing is bad.
        let is_failed = self.server.shard.engine().health() == CacheHealth::Failed;
        let bad_read = status.bad_read.filter(|_| bad > 0 && !is_failed);
        if let Some(lba) = bad_read {
            let text = format!("{name}: a read failed: {}", bad_block_text(lba));
            self.watch.warn(Cause::Bad(index), text, bad, now);
        }
        let repaired = status.stats.repaired_blocks.saturating_sub(seen.repaired);
        if repaired > 0 {
            let text = format!(
                "{name}: {}, bad on the cache device, read from {backing} instead",
                count(repaired, "clean block")
            );
            self.watch.warn(Cause::Repaired(index), text, 1, now);
        }
        // It may have been given a mode meanwhile.
        seen.is_draining &= status.drained;
        if seen.is_draining && self.volumes[at].is_drained(self.server.shard.engine()) {
            seen.is_draining = false;
            let fate = self.volumes[at].fate.as_ref();
            match status.lost_blocks_now {
                // That is told.
                0 if fate.is_some_and(|it| it.text(name, true).is_some()) => {
                    warn!("{name}: drained, but {backing} is not the plain disk");
                }
                0 => info!(
                    "{name}: drained: {backing} is the plain disk, and is kept so until `forebay set {name} mode=write-back`"
                ),
                lost => warn!("{name}: {}", drained_but_for(lost, true)),
            }
        }
        let batches = status.stats.batches - seen.batches;
        if batches > 0 {
            debug!("{name}: {} written back", count(batches, "batch"));
        }
        let dirty = status.dirty_blocks * BLOCK_BYTES;
        seen.is_failing = status.backing_failing;
        seen.parked = parked;
        seen.is_parked_full = status.parked_full;
        seen.lost = status.stats.lost_blocks;
        seen.bad = status.stats.bad_blocks_read;
        seen.repaired = status.stats.repaired_blocks;
        seen.batches = status.stats.batches;
        bad_read.into_iter().for_each(|lba| self.note_bad_read(index, lba));
        self.watch.volumes[at] = seen;
        self.volumes[at].rates.sample(now, written, dirty);
    }
}

impl Device {
    /// What the device failed since the last time, and how often.
    fn news(&mut self, stats: &Stats) -> Option<(String, u64)> {
        let all = stats.snapshot();
        let mut text = None;
        let mut count = 0;
        for kind in OperationKind::ALL {
            let KindStats { errors, last_error, .. } = all.kind(kind);
            let new = errors - std::mem::replace(&mut self.errors[kind.index()], errors);
            if let Some(error) = last_error.filter(|_| new > 0) {
                count += new;
                text = Some(format!("a {} failed: {error}", kind.name()));
            }
        }
        Some((text?, count))
    }
}
