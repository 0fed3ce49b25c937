// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `status` tells: made by the daemon, shown by the client. The names are stable.

/// What is said among the problems of a volume that waits begins so.
pub fn waits_text(name: &str) -> String {
    format!("{name}: waits for its backing device: ")
}

#[cfg(test)]
mod page;
mod text;

use forebay::latency::{BUCKET_NANOS, LatencySummary};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Everything.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Of the daemon's program.
    pub version: String,
    pub pid: u32,
    /// Milliseconds since 1970.
    pub started_at: u64,
    /// What the daemon is doing now, in words.
    pub activity: String,
    pub cache: CacheStatus,
    pub volumes: Vec<VolumeStatus>,
    pub memory: Vec<MemoryPart>,
    /// What is wrong, in words; empty: nothing.
    pub problems: Vec<String>,
    /// NBD connections that were closed when they came, since all places were taken.
    #[serde(default)]
    pub nbd_refused: u64,
    /// How the daemon has come from the program before, if it was upgraded.
    #[serde(default)]
    pub upgrade: Option<String>,
    /// The file that has its settings, if one has.
    #[serde(default)]
    pub config_file: Option<PathBuf>,
}

/// What a daemon does from when it is upgraded.
pub const GOES_ON: &str = "goes on as another program";

/// What stands for the path of a cache where volumes are served bare.
pub const NO_DEVICE: &str = "no device";

impl CacheStatus {
    /// Volumes are served bare.
    pub fn is_none(&self) -> bool {
        self.path == NO_DEVICE
    }
}

/// The cache, and its device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Its identity, as `format` has printed it.
    pub uuid: String,
    /// The cache device, or `no device` where volumes are served bare.
    pub path: String,
    pub size_bytes: u64,
    /// What it is to have, if it is being made larger or smaller.
    #[serde(default)]
    pub resizing_to_bytes: Option<u64>,
    /// Of the part that goes then, what logs still have.
    #[serde(default)]
    pub vacating_bytes: u64,
    pub segments: u32,
    pub segments_free: u32,
    /// Until all of it is dirty, if dirty data goes on growing as it does.
    pub seconds_to_full: Option<f64>,
    /// `healthy`, or `failed` (the cache device did).
    pub health: String,
    /// How devices are driven: `io_uring` or `threads`.
    pub io: String,
    /// Why not by io_uring, if it was asked for and refused.
    pub io_refusal: Option<String>,
    /// When a plain write is answered: `placed`, `written` or `durable`.
    pub acknowledge: String,
    pub scrub: ScrubStatus,
    pub device: DeviceStatus,
}

/// The scrub that runs, or the last one since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// `never`, `running`, `completed`, `stopped`, `failed` (the cache device did).
    pub state: String,
    /// The volume, if it is about one alone.
    pub volume: Option<String>,
    /// Milliseconds since 1970; 0: never.
    pub began_at: u64,
    /// The same; 0: it has not ended.
    pub ended_at: u64,
    /// What the logs held when it began, and what was read of it.
    pub total_bytes: u64,
    pub verified_bytes: u64,
    /// Bad copies of what the backing device has: forgotten, and copied again where there was room.
    pub healed_blocks: u64,
    /// Bad blocks that nothing else has.
    pub lost_blocks: u64,
    /// The first of them: `VOLUME LBA`.
    pub lost: Vec<String>,
    /// Bad blocks that newer ones have replaced.
    pub unneeded_blocks: u64,
    /// Bad headers of records, and how many of them no crash needs any more.
    pub bad_headers: u64,
    pub saved_headers: u64,
}

/// One device's own figures: the cache's are `cache.device`, a backing device's `volumes[].device`, whose metrics begin with
/// `forebay_volume_device_`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DeviceStatus {
    pub reads: u64,
    pub read_bytes: u64,
    pub read_p50_us: f64,
    pub read_p99_us: f64,
    pub writes: u64,
    pub write_bytes: u64,
    pub write_p50_us: f64,
    pub write_p99_us: f64,
    pub flushes: u64,
    pub flush_p50_us: f64,
    pub flush_p99_us: f64,
    pub read_latency_seconds: Latency,
    pub write_latency_seconds: Latency,
    pub flush_latency_seconds: Latency,
    pub errors: u64,
}

/// How long things took, since the daemon started.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    /// How many there were.
    pub count: u64,
    /// Seconds in all, to two digits.
    pub sum: f64,
    /// Upper ends, in seconds, and how many took at most so long but longer than the end before.
    /// Those of `count` that are in none took longer than the last.
    pub buckets: Vec<(f64, u64)>,
}

impl From<&LatencySummary> for Latency {
    fn from(summary: &LatencySummary) -> Latency {
        let ends = BUCKET_NANOS.iter().map(|nanos| *nanos as f64 / 1e9);
        Latency {
            count: summary.count,
            sum: summary.sum_ns as f64 / 1e9,
            buckets: ends.zip(summary.buckets).collect(),
        }
    }
}

/// Each volume that is recorded, in the order of the cache's list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// As it is known to guests and commands.
    pub name: String,
    pub size_bytes: u64,
    /// Its backing device.
    pub backing: String,
    /// Whose times that has, where they are simulated.
    #[serde(default)]
    pub model: Option<String>,
    /// `serving`, `waiting` (no backing device), `frozen`.
    pub state: String,
    /// `healthy`, `degraded` (works, and something is wrong), `failed` (writes are refused).
    pub health: String,
    /// What is the matter with it, by the names of `docs/faults.md`.
    #[serde(default)]
    pub troubles: Vec<String>,
    /// `write-back`, `write-through` or `write-around`.
    pub mode: String,
    /// `batch`, `strict` or `relaxed`.
    pub order: String,
    /// Runs of writes of at least so many bytes may go around the log; 0: none.
    pub cutoff_bytes: u64,
    /// Of guests on a slow backing device, against write-back.
    pub weight: u8,
    /// What 99 of 100 reads of it may take.
    pub p99_target_us: Option<f64>,
    /// What came of these two.
    pub sharing: Sharing,
    /// What it is to have of the cache for itself, as it was asked for.
    pub reserve: String,
    pub reserved_bytes: u64,
    /// What it has of the cache.
    pub held_bytes: u64,
    pub drained: bool,
    /// It is drained, and all that was answered before it was told so is on the backing device. What is written since is answered when it is
    /// there, so something may be dirty for as long as it is written to. Never said while a block is refused or lost; where one was since,
    /// only when nothing is dirty. A daemon from before does not say it.
    #[serde(default)]
    pub drained_through: bool,
    /// The cache failed and is left out: the volume is its backing device.
    pub cache_left_out: bool,
    pub dirty_bytes: u64,
    pub dirty: bool,
    /// Of the oldest data that is not on the backing device; since the cache was opened, at least.
    pub dirty_age_seconds: Option<f64>,
    /// Milliseconds since 1970: the backing device holds what was written before.
    pub backing_as_of: u64,
    /// What write-back does now: `idle`, `writing`, `flushing`, `noting` (in the cache what is written back) or `waiting after a failure`.
    pub writeback: String,
    pub writeback_bytes_per_second: f64,
    pub seconds_to_drained: Option<f64>,
    /// While the cache is lost now, between which blocks of 4096 bytes the backing device would be a mixture of
    /// two states.
    pub exposed_first_block: Option<u64>,
    pub exposed_blocks: u64,
    /// How long there was such a range, in all.
    pub exposed_seconds: f64,
    /// Writes that went around the log, by reason.
    pub bypassed_writes: Bypassed,
    pub bypassed_bytes: u64,
    /// Writes that were held back because much of the log is dirty, and how long they took until they were placed, in
    /// all.
    pub delayed_writes: u64,
    pub delayed_seconds: f64,
    /// What is dirty costs writers now.
    pub delaying: bool,
    pub undurable: bool,
    /// Of the oldest write that a power cut would take.
    pub undurable_age_seconds: Option<f64>,
    /// Share of the blocks read that the cache answered.
    pub hit_ratio: Option<f64>,
    /// Share of the requests that did not wait for the backing device.
    pub without_backing_ratio: Option<f64>,
    pub read_p50_us: f64,
    pub read_p99_us: f64,
    pub write_p50_us: f64,
    pub write_p99_us: f64,
    pub read_latency_seconds: Latency,
    pub write_latency_seconds: Latency,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Discards and write-zeroes.
    pub discards: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Blocks that reads found in the log, that they had to read from the backing device, and of these the
    /// ones that another request was reading already.
    pub hit_blocks: u64,
    pub miss_blocks: u64,
    pub shared_blocks: u64,
    /// Blocks in the log that were read from the backing device as well, with what is on both sides of them: one read in the place of two.
    pub across_blocks: u64,
    /// Blocks read before a guest asked for them; of these, those that a guest read, those that changed before that, and those that
    /// had to give their place away; and reads of them that failed.
    pub ahead_blocks: u64,
    pub ahead_used_blocks: u64,
    pub ahead_void_blocks: u64,
    pub ahead_unused_blocks: u64,
    pub ahead_faults: u64,
    /// Blocks copied into the log because they were read, and reads of such copies and of second chances.
    pub fill_blocks: u64,
    pub fill_hit_blocks: u64,
    /// Blocks that were read lately when their place in the log was taken back, and got a new one.
    pub second_chance_blocks: u64,
    /// Missed blocks that were not copied, by reason.
    pub fills_refused: FillsRefused,
    pub cache_bytes_written: u64,
    pub backing_bytes_written: u64,
    /// The same for each byte that guests wrote.
    pub cache_bytes_per_written_byte: Option<f64>,
    pub backing_bytes_per_written_byte: Option<f64>,
    /// What has become of its backing file while it is served, and what to do: it was removed, replaced, moved or cut. Such a file is
    /// not the plain disk when all is written back.
    #[serde(default)]
    pub backing_file: Option<String>,
    pub lost_blocks: u64,
    #[serde(default)]
    pub lost_blocks_now: u64,
    /// Dirty blocks that the backing device refuses: kept, and tried again now and then.
    pub parked_blocks: u64,
    pub repaired_blocks: u64,
    pub backing_faults: u64,
    /// Kernel block devices made of it, and by what.
    pub attached: Vec<String>,
    /// NBD connections.
    pub nbd_clients: u32,
    /// Virtual machines that are connected.
    pub vhost_user_clients: u32,
    /// Where they come in.
    pub vhost_user_sockets: Vec<String>,
    pub device: DeviceStatus,
}

impl VolumeStatus {
    /// Whether it has a trouble of that name.
    pub fn has(&self, trouble: &str) -> bool {
        self.troubles.iter().any(|it| it == trouble)
    }

    /// Whether a drain is not done yet.
    pub fn is_left(&self) -> bool {
        self.dirty && !self.drained_through
    }
}

/// Why blocks that were missed were not copied into the log.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct FillsRefused {
    pub sequential: u64,
    pub first_touch: u64,
    pub no_room: u64,
    pub raced: u64,
}

/// How a slow backing device is shared between guests and write-back.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sharing {
    /// It is slow: each has it in turn.
    pub sliced: bool,
    /// Volumes on the same disk: they share it as one.
    pub shares_disk_with: Vec<String>,
    /// How long write-back has it, then.
    pub slice_us: f64,
    /// How long guests, and write-back had it while the other waited.
    pub guests_seconds: f64,
    pub writeback_seconds: f64,
    /// With a target: reads that shared the device since it was set, and those that took longer.
    pub reads: Option<u64>,
    pub late_reads: Option<u64>,
}

/// Writes that went around the log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Bypassed {
    /// The run was as long as the cutoff.
    pub sequential: u64,
    /// One write was as long as the cutoff.
    pub too_large: u64,
    /// The cache was too full.
    pub full: u64,
    /// The cache device had failed.
    pub cache_failed: u64,
    /// Write-around.
    pub mode: u64,
}

/// Memory that is taken at the start, by part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemoryPart {
    /// What it is for.
    pub name: String,
    pub bytes: u64,
}
