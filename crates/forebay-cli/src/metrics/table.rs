// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which numbers of the status are metrics, and what is said of them.
//!
//! A metric is called as its place in the JSON is: `volumes[].read_bytes` is
//! `forebay_volume_read_bytes`; `_us` becomes `_seconds`.

/// What kind of number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only rises while the daemon runs.
    Counter,
    /// Rises and falls; true is 1.
    Gauge,
    /// A number of them: the length of a list.
    Count,
    /// How long things took.
    Histogram,
    /// Words, as labels.
    Info,
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its place in the JSON.
    pub path: &'static str,
    pub kind: Kind,
    pub help: &'static str,
}

const fn row(path: &'static str, kind: Kind, help: &'static str) -> Row {
    Row { path, kind, help }
}

use Kind::{Count, Counter, Gauge, Histogram, Info};

/// Of the daemon, the cache and each volume.
pub const ROWS: &[Row] = &[
    row("pid", Gauge, "Process id of the daemon."),
    row("started_at", Gauge, "When the daemon started to serve (Unix time)."),
    row("problems", Count, "Things that are wrong now; `forebay status` names them."),
    row("nbd_refused", Counter, "NBD connections closed when they came: all places were taken."),
    row("memory.bytes", Gauge, "Memory taken at start, by part."),
    row("", Info, "Words about the daemon."),
    row("cache", Info, "Words about the cache."),
    row("cache.size_bytes", Gauge, "Bytes of the cache device that are used."),
    row("cache.resizing_to_bytes", Gauge, "Bytes that it is to have, if others than now."),
    row("cache.vacating_bytes", Gauge, "Of the part that goes then, what logs still have."),
    row("cache.segments", Gauge, "Segments of the cache."),
    row("cache.segments_free", Gauge, "Segments in no log."),
    row("cache.seconds_to_full", Gauge, "Until all is dirty, if dirty data goes on growing."),
    row("cache.scrub", Info, "Words about the last scrub."),
    row("cache.scrub.began_at", Gauge, "When it began (Unix time); 0: never."),
    row("cache.scrub.ended_at", Gauge, "When it ended (Unix time); 0: it has not."),
    row("cache.scrub.total_bytes", Gauge, "What the logs held when it began."),
    row("cache.scrub.verified_bytes", Gauge, "What it has read."),
    row("cache.scrub.healed_blocks", Gauge, "Bad blocks that the backing device has."),
    row("cache.scrub.lost_blocks", Gauge, "Bad blocks that nothing else has."),
    row("cache.scrub.lost", Count, "Of these, how many `forebay status` names."),
    row("cache.scrub.unneeded_blocks", Gauge, "Bad blocks that newer ones have replaced."),
    row("cache.scrub.bad_headers", Gauge, "Bad headers of records."),
    row("cache.scrub.saved_headers", Gauge, "Of these, how many no crash needs any more."),
    row("volumes", Info, "Words about the volume."),
    row("volumes.size_bytes", Gauge, "Bytes of the volume."),
    row("volumes.drained", Gauge, "Whether the volume is kept clean."),
    row(
        "volumes.drained_through",
        Gauge,
        "Whether it is kept clean, and all that was answered before is on the backing device.",
    ),
    row("volumes.dirty", Gauge, "Whether anything is not on the backing device."),
    row("volumes.dirty_bytes", Gauge, "Bytes not on the backing device, superseded ones included."),
    row(
        "volumes.dirty_age_seconds",
        Gauge,
        "Age of the oldest data not on the backing device; since the cache was opened, at least.",
    ),
    row(
        "volumes.backing_as_of",
        Gauge,
        "The backing device holds what was written before (Unix time).",
    ),
    row("volumes.writeback_bytes_per_second", Gauge, "Rate of write-back."),
    row(
        "volumes.seconds_to_drained",
        Gauge,
        "Until nothing is dirty, at this rate; not told while the backing device refuses what is written back.",
    ),
    row("volumes.cutoff_bytes", Gauge, "Runs of writes as long as this may go around the cache."),
    row(
        "volumes.weight",
        Gauge,
        "Time of guests on a slow backing device for each part of write-back's.",
    ),
    row("volumes.p99_target_us", Gauge, "What 99 % of the reads of the backing device may take."),
    row("volumes.sharing.sliced", Gauge, "Whether guests and write-back have it in turn."),
    row("volumes.sharing.slice_us", Gauge, "How long write-back has the backing device in turn."),
    row(
        "volumes.sharing.guests_seconds",
        Counter,
        "How long guests had the backing device while write-back waited.",
    ),
    row(
        "volumes.sharing.writeback_seconds",
        Counter,
        "How long write-back had the backing device while guests waited.",
    ),
    row("volumes.sharing.reads", Counter, "Reads of the backing device that the target counts."),
    row("volumes.sharing.late_reads", Counter, "Of these, those that took longer."),
    row(
        "volumes.exposed_first_block",
        Gauge,
        "First block that a lost cache would leave of two states.",
    ),
    row(
        "volumes.exposed_blocks",
        Gauge,
        "Blocks between which a lost cache would leave two states.",
    ),
    row("volumes.reserved_bytes", Gauge, "What others cannot take of the cache from it."),
    row("volumes.held_bytes", Gauge, "What it has of the cache."),
    row("volumes.exposed_seconds", Gauge, "How long there were such blocks, in all."),
    row("volumes.bypassed_writes.sequential", Counter, "Writes around the cache: long runs."),
    row(
        "volumes.bypassed_writes.too_large",
        Counter,
        "Writes around the cache: as long as the cutoff by themselves (pieces of 1 MiB at most).",
    ),
    row("volumes.bypassed_writes.full", Counter, "Writes around the cache, which was too full."),
    row("volumes.bypassed_writes.cache_failed", Counter, "Writes around the cache that failed."),
    row("volumes.bypassed_writes.mode", Counter, "Writes around the cache: write-around."),
    row("volumes.bypassed_bytes", Counter, "Bytes written around the cache."),
    row(
        "volumes.troubles",
        Count,
        "Things that are the matter with it; `status --json` names them.",
    ),
    row("volumes.cache_left_out", Gauge, "Whether the cache failed and is left out."),
    row("volumes.delaying", Gauge, "Whether what is dirty holds writers back."),
    row("volumes.delayed_writes", Counter, "Writes held back since much of the cache was dirty."),
    row("volumes.delayed_seconds", Gauge, "How long these took to be placed, in all."),
    row("volumes.undurable", Gauge, "Whether anything placed is not durable yet."),
    row("volumes.undurable_age_seconds", Gauge, "Age of the oldest write that is not durable."),
    row(
        "volumes.without_backing_ratio",
        Gauge,
        "Share of requests that did not wait for the backing device.",
    ),
    row(
        "volumes.cache_bytes_per_written_byte",
        Gauge,
        "Bytes to the cache device for each that guests wrote.",
    ),
    row(
        "volumes.backing_bytes_per_written_byte",
        Gauge,
        "Bytes to the backing device for each that guests wrote.",
    ),
    row("volumes.nbd_clients", Gauge, "NBD connections to the volume."),
    row("volumes.vhost_user_clients", Gauge, "Virtual machines connected to the volume."),
    row("volumes.vhost_user_sockets", Count, "Sockets for virtual machines."),
    row("volumes.hit_ratio", Gauge, "Share of the blocks read that the cache answered."),
    row("volumes.read_p50_us", Gauge, "Half of the guest's reads took no longer."),
    row("volumes.read_p99_us", Gauge, "99 % of the guest's reads took no longer."),
    row("volumes.write_p50_us", Gauge, "Half of the guest's writes took no longer."),
    row("volumes.write_p99_us", Gauge, "99 % of the guest's writes took no longer."),
    row("volumes.read_latency_seconds", Histogram, "How long the guest's reads took."),
    row("volumes.write_latency_seconds", Histogram, "How long the guest's writes took."),
    row("volumes.reads", Counter, "Read requests of guests."),
    row("volumes.writes", Counter, "Write requests of guests."),
    row("volumes.flushes", Counter, "Flush requests of guests."),
    row("volumes.discards", Counter, "Discard and write-zeroes requests of guests."),
    row("volumes.read_bytes", Counter, "Bytes of the blocks that guests read."),
    row(
        "volumes.written_bytes",
        Counter,
        "Bytes of the blocks that guests wrote, zeros not counted.",
    ),
    row("volumes.hit_blocks", Counter, "Blocks that reads found in the log."),
    row("volumes.miss_blocks", Counter, "Blocks that reads found on the backing device only."),
    row("volumes.shared_blocks", Counter, "Missed blocks that another request was reading."),
    row(
        "volumes.across_blocks",
        Counter,
        "Blocks in the log that were read from the backing device as well, with what is on both sides of them.",
    ),
    row("volumes.ahead_blocks", Counter, "Blocks read before a guest asked for them."),
    row("volumes.ahead_used_blocks", Counter, "Of these, those that a guest read."),
    row("volumes.ahead_void_blocks", Counter, "Of these, those that changed before that."),
    row("volumes.ahead_unused_blocks", Counter, "Of these, those that made room unread."),
    row("volumes.ahead_faults", Counter, "Reads ahead that failed."),
    row("volumes.fill_blocks", Counter, "Missed blocks that were copied into the cache."),
    row("volumes.fill_hit_blocks", Counter, "Blocks answered from copies of clean data."),
    row(
        "volumes.second_chance_blocks",
        Counter,
        "Blocks read lately, kept when their place in the log was taken back.",
    ),
    row("volumes.fills_refused.sequential", Counter, "Not copied: part of a long run."),
    row("volumes.fills_refused.first_touch", Counter, "Not copied: read for the first time."),
    row("volumes.fills_refused.no_room", Counter, "Not copied: room is kept for writes."),
    row("volumes.fills_refused.raced", Counter, "Not copied: written meanwhile."),
    row("volumes.cache_bytes_written", Counter, "Bytes written to the cache device."),
    row("volumes.backing_bytes_written", Counter, "Bytes written to the backing device."),
    row("volumes.lost_blocks", Counter, "Dirty blocks that were bad on the cache device."),
    row(
        "volumes.lost_blocks_now",
        Gauge,
        "Blocks that nothing has any more: reads of them fail until they are written again.",
    ),
    row("volumes.parked_blocks", Gauge, "Dirty blocks that the backing device refuses."),
    row("volumes.repaired_blocks", Counter, "Clean blocks that were bad on the cache device."),
    row("volumes.backing_faults", Counter, "Failures of the backing device."),
    row("volumes.attached", Count, "Kernel block devices made of the volume."),
];

/// Of a device: the cache's under `cache.device`, a volume's backing device under
/// `volumes.device`.
pub const DEVICE_ROWS: &[Row] = &[
    row("reads", Counter, "Reads of the device."),
    row("read_bytes", Counter, "Bytes read from the device."),
    row("read_p50_us", Gauge, "Half of the device's reads took no longer."),
    row("read_p99_us", Gauge, "99 % of the device's reads took no longer."),
    row("read_latency_seconds", Histogram, "How long the device's reads took."),
    row("writes", Counter, "Writes to the device."),
    row("write_bytes", Counter, "Bytes written to the device."),
    row("write_p50_us", Gauge, "Half of the device's writes took no longer."),
    row("write_p99_us", Gauge, "99 % of the device's writes took no longer."),
    row("write_latency_seconds", Histogram, "How long the device's writes took."),
    row("flushes", Counter, "Flushes of the device."),
    row("flush_p50_us", Gauge, "Half of the device's flushes took no longer."),
    row("flush_p99_us", Gauge, "99 % of the device's flushes took no longer."),
    row("flush_latency_seconds", Histogram, "How long the device's flushes took."),
    row("errors", Counter, "Operations that the device failed."),
];
