// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `status` is told.

use super::fate::Fate;
use super::health::{Patient, health};
use super::{Daemon, Served};
use crate::address::Address;
use crate::args::{mode_name, order_name, reserve_name};
use crate::attach::Attached;
use crate::memory;
use crate::status::{self, DeviceStatus, FillsRefused, Status, VolumeStatus};
use crate::why::{Bypass, Read, Why};
use anyhow::{Result, bail};
use forebay::io::{OperationKind, ReactorKind, Stats};
use forebay::shard::{Shard, uuid_text, wall_now};
use forebay_core::control::VolumeStatus as EngineStatus;
use forebay_core::engine::{Acknowledge, CacheHealth};
use forebay_core::format::superblock::Volume;
use forebay_core::op::stale::Stale;
use forebay_core::policy::bypass::Reason;
use forebay_core::policy::slices::Sharing;
use forebay_core::policy::writeback::Stage;
use forebay_core::stats::{Refusal, Stats as Counters};
use forebay_core::units::{BLOCK_BYTES, Lba, VolumeIndex};
use forebay_core::why::{Outcome, Place};

impl Daemon {
    pub(super) fn status(&self) -> Status {
        let shard = &self.server.shard;
        let superblock = shard.superblock();
        let engine = shard.engine();
        let (free, segments) = engine.free_segments();
        let config = engine.config();
        let counts = memory::Counts {
            volumes: self.room,
            vhost_sockets: self.vhost_sockets,
            devices: self.devices,
        };
        let parts = memory::parts(superblock, counts, config);
        let mut problems = self.problems.clone();
        problems.extend(self.attached.iter().flat_map(Attached::problems));
        problems.extend(self.bad_blocks());
        if engine.health() == CacheHealth::Failed {
            let what = if self.is_passed() { "it is left out" } else { "writes are refused" };
            let full = match is_full(&self.cache_stats) {
                true => " (no room on its file system: make some before that)",
                false => "",
            };
            problems.push(format!(
                "{}: the cache device failed; {what} until the daemon is restarted{full}",
                self.cache_text()
            ));
        }
        let cache = status::CacheStatus {
            uuid: uuid_text(&superblock.uuid),
            path: self.cache_text(),
            size_bytes: superblock.size_bytes,
            resizing_to_bytes: shard.resizing(),
            vacating_bytes: u64::from(engine.segments_to_vacate())
                * u64::from(superblock.segment_bytes),
            segments,
            segments_free: free,
            seconds_to_full: self.seconds_to_full(),
            health: match engine.health() {
                CacheHealth::Healthy => "healthy".into(),
                CacheHealth::Failed => "failed".into(),
            },
            io: match shard.reactor.kind() {
                ReactorKind::Threads => "threads".into(),
                _ => "io_uring".into(),
            },
            io_refusal: shard.reactor.refusal().map(str::to_owned),
            acknowledge: acknowledge_name(config.acknowledge).into(),
            scrub: self.scrub_status(),
            device: device_status(&self.cache_stats),
        };
        problems.extend(self.cache_fate.as_ref().and_then(Fate::cache_text));
        let has_cache = self.cache_path.is_some();
        let recorded = superblock.volumes.iter().enumerate();
        let indexes = recorded.filter_map(|(at, volume)| Some((at, volume.as_ref()?)));
        let volumes: Vec<VolumeStatus> = indexes
            .filter_map(|(at, recorded)| {
                let index = VolumeIndex(at as u8);
                let served = self.volumes.iter().find(|served| served.index == index);
                let mut status =
                    volume_status(shard, index, recorded, served, has_cache, &mut problems)?;
                let attached = self.attached.iter().find_map(|it| it.text(index));
                status.attached.extend(attached);
                status.sharing.shares_disk_with = self.disk_mates(index);
                status.nbd_clients = self.nbd_clients.as_ref().map_or(0, |it| it[at].get());
                for (path, is_connected) in self.machines.iter().flat_map(|it| it.of(index)) {
                    status.vhost_user_sockets.push(path);
                    status.vhost_user_clients += u32::from(is_connected);
                }
                Some(status)
            })
            .collect();
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            started_at: self.started_at,
            nbd_refused: self.nbd_refused(),
            upgrade: self.upgrade.clone(),
            // For people, where it is no text.
            config_file: self
                .config_file
                .as_ref()
                .map(|it| it.to_string_lossy().into_owned().into()),
            activity: self.activity_text(&volumes),
            cache,
            volumes,
            memory: parts
                .into_iter()
                .map(|(name, bytes)| status::MemoryPart { name: name.into(), bytes })
                .collect(),
            problems,
        }
    }

    /// Where a block is.
    pub(super) fn why(&self, name: &str, lba: u64) -> Result<Why> {
        let index = self.served(name)?;
        let engine = self.server.shard.engine();
        let (why, now) = (engine.why(index, Lba(lba)), engine.status(index));
        let (Some(why), Some(now)) = (why, now) else {
            let bytes = engine.volume_bytes(index).unwrap_or_default();
            bail!(
                "{name}: has no block {lba}; its last one is {}",
                bytes.div_ceil(BLOCK_BYTES) - 1
            );
        };
        let (place, at) = match why.place {
            Place::Buffer { segment, block } => ("memory", Some((segment.0, block))),
            Place::Cache { segment, block } => ("cache", Some((segment.0, block))),
            Place::Zeros => ("zeros", None),
            Place::Discarded => ("discarded", None),
            Place::Backing => ("backing", None),
            Place::Lost => ("lost", None),
        };
        let is_failed = engine.health() == CacheHealth::Failed;
        let has_cache = self.cache_path.is_some();
        let served = self.volumes.iter().find(|served| served.index == index);
        Ok(Why {
            name: name.into(),
            lba,
            place: place.into(),
            segment: at.map(|at| at.0),
            block: at.map(|at| at.1),
            state: match (why.parked, why.dirty) {
                (true, _) => "parked".into(),
                (false, true) => "dirty".into(),
                (false, false) => "clean".into(),
            },
            is_fill: why.fill,
            is_voided: why.voided,
            backing: served.map_or(String::new(), |it| it.backing.display().to_string()),
            mode: mode_name(now.mode).into(),
            order: order_name(now.order).into(),
            cutoff_bytes: u64::from(now.cutoff) * BLOCK_BYTES,
            bypass: why.passed.map(|passed| Bypass {
                reason: passed.reason.name().into(),
                first_lba: passed.first.0,
                blocks: passed.blocks,
                run_bytes: passed.run * BLOCK_BYTES,
                seconds_ago: self.server.shard.now().since(passed.at) as f64 / 1e9,
            }),
            read: why.missed.map(|missed| Read {
                outcome: outcome_name(missed.outcome).into(),
                first_lba: missed.first.0,
                blocks: missed.blocks,
                seconds_ago: self.server.shard.now().since(missed.at) as f64 / 1e9,
            }),
            next_read: (why.place == Place::Backing && !is_failed && has_cache).then(|| {
                match (why.room, why.full && !why.noted) {
                    (_, true) => "noted".into(),
                    (true, _) => "copied".into(),
                    (false, _) => "no_room".into(),
                }
            }),
        })
    }

    /// What it is doing, and for which volumes.
    fn activity_text(&self, volumes: &[VolumeStatus]) -> String {
        let names = |of: fn(&VolumeStatus) -> bool| {
            let names: Vec<&str> =
                volumes.iter().filter(|it| of(it)).map(|it| it.name.as_str()).collect();
            names.join(", ")
        };
        let drained = names(|volume| volume.drained && volume.is_left());
        let written = names(|volume| !volume.drained && volume.writeback != "idle");
        let mut text = self.activity.to_owned();
        for (what, names) in [("drains", drained), ("writes back", written)] {
            if !names.is_empty() {
                text += &format!("; {what} {names}");
            }
        }
        text
    }

    /// When all of the cache is dirty, if dirty data grows on.
    fn seconds_to_full(&self) -> Option<f64> {
        let growth: f64 = self.volumes.iter().map(|served| served.rates.growth).sum();
        let superblock = self.server.shard.superblock();
        let engine = self.server.shard.engine();
        let status = self.volumes.iter().filter_map(|served| engine.status(served.index));
        let dirty: u64 = status.map(|status| status.dirty_blocks * BLOCK_BYTES).sum();
        let all = u64::from(superblock.segment_count) * u64::from(superblock.segment_bytes);
        // Below a KiB a second it is noise.
        (growth > 1024.0).then(|| all.saturating_sub(dirty) as f64 / growth)
    }
}

/// When a plain write is answered.
pub(super) fn acknowledge_name(when: Acknowledge) -> &'static str {
    match when {
        Acknowledge::Placed => "placed",
        Acknowledge::Written => "written",
        Acknowledge::Durable => "durable",
    }
}

fn device_status(stats: &Stats) -> status::DeviceStatus {
    let all = stats.snapshot();
    let read = all.kind(OperationKind::Read);
    let write = all.kind(OperationKind::Write);
    let flush = all.kind(OperationKind::Flush);
    let us = |nanos: u64| nanos as f64 / 1000.0;
    status::DeviceStatus {
        reads: read.count,
        read_bytes: read.bytes,
        read_p50_us: us(read.latency.p50_ns),
        read_p99_us: us(read.latency.p99_ns),
        writes: write.count,
        write_bytes: write.bytes,
        write_p50_us: us(write.latency.p50_ns),
        write_p99_us: us(write.latency.p99_ns),
        flushes: flush.count,
        flush_p50_us: us(flush.latency.p50_ns),
        flush_p99_us: us(flush.latency.p99_ns),
        read_latency_seconds: (&read.latency).into(),
        write_latency_seconds: (&write.latency).into(),
        flush_latency_seconds: (&flush.latency).into(),
        errors: OperationKind::ALL.iter().map(|kind| all.kind(*kind).errors).sum(),
    }
}

fn fills_refused(stats: &Counters) -> FillsRefused {
    let of = |refusal: Refusal| stats.fills_refused[refusal as usize];
    FillsRefused {
        sequential: of(Refusal::Sequential),
        first_touch: of(Refusal::FirstTouch),
        no_room: of(Refusal::NoRoom),
        raced: of(Refusal::Raced),
    }
}

/// Whether the device had no room for something.
fn is_full(stats: &Stats) -> bool {
    let all = stats.snapshot();
    let errors = OperationKind::ALL.iter().filter_map(|kind| all.kind(*kind).last_error);
    errors.map(std::io::Error::from).any(|it| it.kind() == std::io::ErrorKind::StorageFull)
}

/// What a device failed the last of its writes that it failed with.
fn last_refusal(stats: &Stats) -> Option<String> {
    Some(stats.snapshot().kind(OperationKind::Write).last_error?.to_string())
}

fn volume_status(
    shard: &Shard,
    index: VolumeIndex,
    recorded: &Volume,
    served: Option<&Served>,
    has_cache: bool,
    problems: &mut Vec<String>,
) -> Option<VolumeStatus> {
    let now = shard.engine().status(index)?;
    let stats = now.stats;
    let name = &recorded.name;
    let (backing, model) = match served {
        Some(it) => (it.backing.display().to_string(), it.address.model_text()),
        None => match Address::parse(&recorded.path) {
            Ok(it) => (it.path.display().to_string(), it.model_text()),
            // As a newer program may have written it.
            Err(_) => (recorded.path.clone(), None),
        },
    };
    let written = (stats.backing_blocks_written + stats.bypassed_blocks) * BLOCK_BYTES;
    let dirty_bytes = now.dirty_blocks * BLOCK_BYTES;
    let [reads, writes] = shard.latencies(index);
    let us = |nanos: u64| nanos as f64 / 1000.0;
    let age = |at| shard.now().since(at) as f64 / 1e9;
    let cache_failed = shard.engine().health() == CacheHealth::Failed;
    let refusal = served.and_then(|served| last_refusal(&served.stats));
    let fate = served.and_then(|it| it.fate.as_ref());
    let gone = fate.and_then(|it| it.gone_text(name, has_cache));
    let cut = fate.and_then(Fate::cut_text);
    let patient = Patient { name, backing: &backing, now: &now, refusal, cache_failed, gone, cut };
    let (health, troubles) = health(&patient, problems);
    let answered = stats.hit_blocks + stats.zero_blocks;
    let requests = stats.reads + stats.writes + stats.discards;
    let ratio = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    let guest_bytes = stats.written_blocks * BLOCK_BYTES;
    let cache_bytes = stats.cache_blocks_written * BLOCK_BYTES;
    let rate = served.map_or(0.0, |served| served.rates.writeback);
    let segment_bytes = u64::from(shard.superblock().segment_bytes);
    Some(VolumeStatus {
        name: name.clone(),
        size_bytes: shard.engine().volume_bytes(index)?,
        backing,
        model,
        state: match (now.frozen, now.serving) {
            (true, _) => "frozen".into(),
            (false, true) => "serving".into(),
            (false, false) => "waiting".into(),
        },
        health: health.name().into(),
        troubles,
        mode: mode_name(now.mode).into(),
        order: order_name(now.order).into(),
        cutoff_bytes: u64::from(now.cutoff) * BLOCK_BYTES,
        weight: now.sharing.weight,
        p99_target_us: now.sharing.target.map(|target| us(target.nanos)),
        sharing: sharing(&now.sharing),
        reserve: reserve_name(now.reserve),
        reserved_bytes: segment_bytes * u64::from(now.reserved_segments),
        held_bytes: segment_bytes * u64::from(now.segments),
        drained: now.drained,
        drained_through: served.is_some_and(|served| served.is_drained(shard.engine())),
        cache_left_out: now.stale == Stale::Passing,
        dirty_bytes,
        dirty: now.dirty,
        dirty_age_seconds: now.dirty_since.map(age),
        backing_as_of: if now.dirty { now.backing_as_of } else { wall_now() },
        writeback: match now.writeback {
            Stage::Idle => "idle".into(),
            Stage::Writing => "writing".into(),
            Stage::Flushing => "flushing".into(),
            Stage::Noting => "noting".into(),
            Stage::Waiting { .. } => "waiting after a failure".into(),
        },
        writeback_bytes_per_second: rate,
        seconds_to_drained: seconds_to_drained(&now, rate),
        exposed_first_block: now.exposed.map(|exposed| exposed.start.0),
        exposed_blocks: now.exposed.map_or(0, |exposed| exposed.end - exposed.start),
        exposed_seconds: stats.exposed_nanos as f64 / 1e9,
        bypassed_writes: status::Bypassed {
            sequential: stats.bypassed[Reason::Sequential as usize],
            too_large: stats.bypassed[Reason::TooLarge as usize],
            full: stats.bypassed[Reason::Full as usize],
            cache_failed: stats.bypassed[Reason::CacheFailed as usize],
            mode: stats.bypassed[Reason::Mode as usize],
        },
        bypassed_bytes: stats.bypassed_blocks * BLOCK_BYTES,
        delayed_writes: stats.delayed_writes,
        delayed_seconds: stats.delayed_nanos as f64 / 1e9,
        delaying: now.delaying,
        undurable: now.undurable,
        undurable_age_seconds: now.undurable_since.map(age),
        hit_ratio: ratio(answered.min(stats.read_blocks), stats.read_blocks),
        without_backing_ratio: ratio(requests.saturating_sub(stats.backing_waits), requests),
        read_p50_us: us(reads.p50_ns),
        read_p99_us: us(reads.p99_ns),
        write_p50_us: us(writes.p50_ns),
        write_p99_us: us(writes.p99_ns),
        read_latency_seconds: (&reads).into(),
        write_latency_seconds: (&writes).into(),
        reads: stats.reads,
        writes: stats.writes,
        flushes: stats.flushes,
        discards: stats.discards,
        read_bytes: stats.read_blocks * BLOCK_BYTES,
        written_bytes: guest_bytes,
        hit_blocks: stats.hit_blocks,
        miss_blocks: stats.miss_blocks,
        shared_blocks: stats.shared_blocks,
        across_blocks: stats.across_blocks,
        ahead_blocks: stats.ahead_blocks,
        ahead_used_blocks: stats.ahead_used_blocks,
        ahead_void_blocks: stats.ahead_void_blocks,
        ahead_unused_blocks: stats.ahead_unused_blocks,
        ahead_faults: stats.ahead_faults,
        fill_blocks: stats.fill_blocks,
        fill_hit_blocks: stats.fill_hit_blocks,
        second_chance_blocks: stats.second_chances,
        fills_refused: fills_refused(&stats),
        cache_bytes_written: cache_bytes,
        backing_bytes_written: written,
        cache_bytes_per_written_byte: ratio(cache_bytes, guest_bytes),
        backing_bytes_per_written_byte: ratio(written, guest_bytes),
        lost_blocks: stats.lost_blocks,
        backing_file: fate.and_then(|it| it.text(name, has_cache)),
        lost_blocks_now: now.lost_blocks_now,
        parked_blocks: now.parked_blocks,
        repaired_blocks: stats.repaired_blocks,
        backing_faults: stats.backing_faults,
        attached: Vec::new(),
        nbd_clients: 0,
        vhost_user_clients: 0,
        vhost_user_sockets: Vec::new(),
        device: served.map_or_else(DeviceStatus::default, |it| device_status(&it.stats)),
    })
}

/// At this rate. What the disk refuses is written in years or never, and what it took of a batch that failed is written again.
fn seconds_to_drained(now: &EngineStatus, rate: f64) -> Option<f64> {
    let is_taken = !now.backing_failing && now.parked_blocks == 0;
    let dirty_bytes = now.dirty_blocks * BLOCK_BYTES;
    (is_taken && rate > 0.0 && dirty_bytes > 0).then(|| dirty_bytes as f64 / rate)
}

fn sharing(sharing: &Sharing) -> status::Sharing {
    let [guests, write_back] = sharing.had.map(|nanos| nanos as f64 / 1e9);
    status::Sharing {
        sliced: sharing.sliced,
        shares_disk_with: Vec::new(),
        slice_us: sharing.slice as f64 / 1e3,
        guests_seconds: guests,
        writeback_seconds: write_back,
        reads: sharing.target.map(|target| target.reads),
        late_reads: sharing.target.map(|target| target.late),
    }
}

fn outcome_name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Room => "room",
        Outcome::Again => "again",
        Outcome::Part => "part",
        Outcome::Bad => "bad",
        Outcome::Wanted => "wanted",
        Outcome::Refused(Refusal::Sequential) => "sequential",
        Outcome::Refused(Refusal::FirstTouch) => "first_touch",
        Outcome::Refused(Refusal::NoRoom) => "no_room",
        Outcome::Refused(Refusal::Raced) => "raced",
    }
}
