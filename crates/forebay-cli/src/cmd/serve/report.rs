// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `status` is told.

use super::{Daemon, Served};
use crate::args::mode_name;
use crate::status::{self, Status};
use forebay::io::{OperationKind, ReactorKind, Stats};
use forebay::shard::{Shard, uuid_text, wall_now};
use forebay_core::engine::{Acknowledge, CacheHealth, Engine};
use forebay_core::policy::writeback::Stage;
use forebay_core::units::BLOCK_BYTES;
use std::time::Instant;

impl Daemon {
    pub(super) fn status(&mut self) -> Status {
        let shard = &self.server.shard;
        let superblock = shard.superblock();
        let engine = shard.engine();
        let (free, segments) = engine.free_segments();
        let config = engine.config();
        let parts =
            Engine::memory_parts(segments, superblock.segment_blocks(), self.volumes.len(), config);
        let mut problems = self.problems.clone();
        problems.extend(self.attached.iter().flat_map(|it| it.problems().to_vec()));
        if engine.health() == CacheHealth::Failed {
            problems.push(format!(
                "{}: the cache device failed; writes are refused until the daemon is restarted",
                self.cache_path.display()
            ));
        }
        let cache = status::CacheStatus {
            uuid: uuid_text(&superblock.uuid),
            path: self.cache_path.display().to_string(),
            size_bytes: superblock.size_bytes,
            segments,
            segments_free: free,
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
            device: device_status(&self.cache_stats),
        };
        let mut volumes = Vec::new();
        for served in &mut self.volumes {
            let mut status = volume_status(&self.server.shard, served, &mut problems);
            if let (Some(status), Some(attached)) = (&mut status, &self.attached) {
                status.attached.extend(attached.text(served.index));
            }
            volumes.extend(status);
        }
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            cache,
            volumes,
            memory: parts
                .into_iter()
                .map(|(name, bytes)| status::MemoryPart { name: name.into(), bytes })
                .collect(),
            problems,
        }
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

fn volume_status(
    shard: &Shard,
    served: &mut Served,
    problems: &mut Vec<String>,
) -> Option<status::VolumeStatus> {
    let now = shard.engine().status(served.index)?;
    let stats = now.stats;
    let written = stats.backing_blocks_written * BLOCK_BYTES;
    let since = served.rate.0.elapsed().as_secs_f64();
    if since >= 1.0 {
        let rate = written.saturating_sub(served.rate.1) as f64 / since;
        served.rate = (Instant::now(), written, rate);
    }
    let dirty_bytes = now.dirty_blocks * BLOCK_BYTES;
    let [reads, writes] = shard.latencies(served.index);
    let us = |nanos: u64| nanos as f64 / 1000.0;
    if now.backing_failing {
        problems.push(format!(
            "{}: {} refuses to be written; dirty data is kept and tried again",
            served.name,
            served.backing.display()
        ));
    }
    if stats.lost_blocks > 0 {
        problems.push(format!(
            "{}: {} blocks were lost on the cache device; reads there fail until they are written",
            served.name, stats.lost_blocks
        ));
    }
    let answered = stats.hit_blocks + stats.zero_blocks;
    Some(status::VolumeStatus {
        name: served.name.clone(),
        size_bytes: shard.engine().volume_bytes(served.index)?,
        backing: served.backing.display().to_string(),
        state: match (now.frozen, now.serving) {
            (true, _) => "frozen".into(),
            (false, true) => "serving".into(),
            (false, false) => "waiting".into(),
        },
        mode: mode_name(now.mode).into(),
        drained: now.drained,
        dirty_bytes,
        dirty: now.dirty,
        dirty_age_seconds: now.dirty_since.map(|at| shard.now().since(at) as f64 / 1e9),
        backing_as_of: if now.dirty { now.backing_as_of } else { wall_now() },
        writeback: match now.writeback {
            Stage::Idle => "idle".into(),
            Stage::Writing => "writing".into(),
            Stage::Flushing => "flushing".into(),
            Stage::Noting => "noting".into(),
            Stage::Waiting { .. } => "waiting after a failure".into(),
        },
        writeback_bytes_per_second: served.rate.2,
        seconds_to_drained: (served.rate.2 > 0.0 && dirty_bytes > 0)
            .then(|| dirty_bytes as f64 / served.rate.2),
        undurable: now.undurable,
        hit_ratio: (stats.read_blocks > 0)
            .then(|| answered as f64 / stats.read_blocks.max(answered) as f64),
        read_p50_us: us(reads.p50_ns),
        read_p99_us: us(reads.p99_ns),
        write_p50_us: us(writes.p50_ns),
        write_p99_us: us(writes.p99_ns),
        read_latency_seconds: (&reads).into(),
        write_latency_seconds: (&writes).into(),
        reads: stats.reads,
        writes: stats.writes,
        flushes: stats.flushes,
        read_bytes: stats.read_blocks * BLOCK_BYTES,
        written_bytes: stats.written_blocks * BLOCK_BYTES,
        cache_bytes_written: stats.cache_blocks_written * BLOCK_BYTES,
        backing_bytes_written: written,
        lost_blocks: stats.lost_blocks,
        repaired_blocks: stats.repaired_blocks,
        backing_faults: stats.backing_faults,
        attached: Vec::new(),
        device: device_status(&served.stats),
    })
}
