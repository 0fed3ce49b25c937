// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much memory a daemon takes: the parts, and a configuration that keeps within `--memory`.
//!
//! The map's parts follow from the cache's size. All others together are the *fixed sum*, which
//! `--memory` bounds: buffers, window, batches, extents and what is read ahead shrink until it holds.

use crate::attach::Kind;
use crate::control_server;
use crate::units::size;
use anyhow::{Result, bail};
use forebay::shard::Shard;
use forebay_core::engine::Config;
use forebay_core::format::superblock::Superblock;
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::op::ahead::PIECE_BLOCKS;
use forebay_serve::nbd::listen;
use std::path::Path;

/// The parts that grow with the cache and not with anything else.
const MAP: [&str; 4] = ["index", "slots and checksums", "segments", HISTORY];
/// What was missed lately: at most 64 KiB for each GiB.
const HISTORY: &str = "history of misses";

/// How many there are of what takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub volumes: usize,
    /// Sockets for virtual machines.
    pub vhost_sockets: usize,
    /// What block devices are made by.
    pub devices: Option<Kind>,
}

impl Counts {
    /// Volumes, and NBD alone.
    pub fn volumes(volumes: usize) -> Counts {
        Counts { volumes, vhost_sockets: 0, devices: None }
    }
}

/// Every part, by name, in bytes.
pub fn parts(superblock: &Superblock, counts: Counts, config: &Config) -> Vec<(&'static str, u64)> {
    let (segments, blocks) = (superblock.segment_count, superblock.segment_blocks());
    let mut parts = Shard::memory_parts(segments, blocks, counts.volumes, config);
    parts.extend(listen::memory_parts());
    parts.extend(crate::vhost::memory_parts(counts.vhost_sockets));
    parts.push(("control clients", control_server::memory_bytes()));
    parts.extend(counts.devices.map(Kind::memory_parts).unwrap_or_default());
    parts
}

/// Whether a part grows with the cache.
pub fn is_of_map(part: &str) -> bool {
    MAP.contains(&part)
}

/// Bytes of the map's parts.
fn map(parts: &[(&str, u64)], superblock: &Superblock) -> u64 {
    // A checkpoint's stream has the free segments' numbers.
    let numbers = u64::from(superblock.segment_count) * 4;
    parts.iter().filter(|part| is_of_map(part.0)).map(|part| part.1).sum::<u64>() + numbers
}

/// Bytes of all others.
fn fixed(parts: &[(&str, u64)], superblock: &Superblock) -> u64 {
    parts.iter().map(|part| part.1).sum::<u64>() - map(parts, superblock)
}

/// What `serve` takes at most where `--memory` is so much: with more volumes the parts shrink, or it refuses.
pub fn most(superblock: &Superblock, config: &Config, memory: u64) -> u64 {
    map(&parts(superblock, Counts::volumes(1), config), superblock) + memory
}

/// For so many volumes that is enough, by whatever their block devices are made.
pub fn volumes_max(superblock: &Superblock, memory: u64) -> u64 {
    let fits = |volumes: usize, devices| {
        let counts = Counts { devices, ..Counts::volumes(volumes) };
        fit(&Config::default(), 0, superblock, counts, memory).is_ok()
    };
    let kinds = [None].into_iter().chain(Kind::ALL.map(Some));
    let fit_all = |volumes: &usize| kinds.clone().all(|kind| fits(*volumes, kind));
    (1..=VOLUME_COUNT_MAX).take_while(fit_all).count() as u64
}

/// As much of `config` as fits, and room for so many extents at least: the fixed sum is at most `memory`.
pub fn fit(
    config: &Config,
    extents: u32,
    superblock: &Superblock,
    counts: Counts,
    memory: u64,
) -> Result<Config> {
    let mut least = 0;
    // A log keeps a buffer for as long as something may come into it, and some are on their way to the device. With fewer logs end
    // segments for each other's sake: they do where there is no memory for more.
    let enough = (counts.volumes as u64 + 8).min(config.buffer_count.into());
    let each = (1..=100).rev().map(|percent| (percent, enough)).chain([(1, 8)]);
    for (percent, buffers) in each {
        let share = |value: u64| value * percent / 100;
        let mut config = *config;
        config.lane_count = counts.volumes.min(VOLUME_COUNT_MAX) as u8;
        config.buffer_count = share(u64::from(config.buffer_count)).max(buffers) as u16;
        config.window_blocks = (share(u64::from(config.window_blocks)) as u32 / 4 * 4).max(1024);
        config.batch_blocks_max = share(u64::from(config.batch_blocks_max)).max(2048) as u32;
        config.ahead_blocks =
            share(u64::from(config.ahead_blocks)) as u32 / PIECE_BLOCKS * PIECE_BLOCKS;
        config.extent_count_max =
            (share(u64::from(config.extent_count_max)).max(1024) as u32).max(extents);
        least = fixed(&parts(superblock, counts, &config), superblock);
        if least <= memory {
            return Ok(config);
        }
    }
    let needed = least.next_multiple_of(1 << 20) >> 20;
    bail!(
        "--memory {}: at least {needed}M are needed (volumes: {}); give --memory {needed}M, or leave it out",
        size(memory),
        counts.volumes
    );
}

/// Refuses what there is no memory for, before any of it is taken: a list that finds none ends the process. `has_map`: the map is
/// there already.
pub fn check(
    (superblock, counts, config): (&Superblock, Counts, &Config),
    has_map: bool,
    cache: Option<&Path>,
) -> Result<()> {
    let parts = parts(superblock, counts, config);
    let (all_else, map) = (fixed(&parts, superblock), map(&parts, superblock));
    let needed = if has_map { all_else } else { all_else + map };
    if can_be_had(needed) {
        return Ok(());
    }
    let Some(cache) = cache else {
        bail!(
            "{} of memory are needed and cannot be had; give less by --memory, or have more",
            size(needed)
        );
    };
    bail!(
        "{}: {} of memory are needed and cannot be had: {} for the map, which goes with the cache's size, and {} for all else, which --memory \
         bounds: give less there, or have more memory (`ulimit -v` and vm.overcommit_memory bound it, too), or make the cache smaller where there \
         is enough (`forebay resize --cache-size`)",
        cache.display(),
        size(needed),
        size(map),
        size(all_else)
    );
}

/// Whether so much could be had at once. Nothing of it is touched.
fn can_be_had(bytes: u64) -> bool {
    let Ok(bytes) = usize::try_from(bytes) else { return false };
    let mut memory = Vec::<u8>::new();
    let had = memory.try_reserve_exact(bytes);
    // It is not left out as what nobody looks at.
    std::hint::black_box(&memory);
    had.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::format::superblock::NewCache;

    const GIB: u64 = 1 << 30;

    fn cache(size_bytes: u64, segment_bytes: u32) -> Superblock {
        made(size_bytes, segment_bytes).unwrap()
    }

    fn made(size_bytes: u64, segment_bytes: u32) -> Option<Superblock> {
        let new = NewCache { uuid: [1; 16], key: 1, size_bytes, segment_bytes, now: 0 };
        Superblock::format(&new).ok()
    }

    #[test]
    fn the_map_takes_at_most_5_mib_for_each_gib_and_the_history_64_kib() {
        for shift in 0..=4 {
            // The smallest caches have tables that are rounded up.
            for (bytes, most) in [
                (GIB / 16, 6),
                (GIB / 8, 6),
                (GIB / 4, 6),
                (GIB / 2, 6),
                (GIB, 5),
                (16 * GIB, 5),
                (256 * GIB, 5),
                (4096 * GIB, 5),
            ] {
                let segment = super::super::args::SEGMENT_BYTES_LEAST << shift;
                let Some(superblock) = made(bytes, segment) else {
                    assert!(bytes < 64 * u64::from(segment), "{bytes} bytes, shift {shift}");
                    continue;
                };
                let parts = parts(&superblock, Counts::volumes(1), &Config::default());
                let history = parts.iter().filter(|part| part.0 == HISTORY).map(|part| part.1);
                let history: u64 = history.sum();
                let map = map(&parts, &superblock) - history;
                let bound = most * (bytes >> 10);
                assert!(map <= bound, "{bytes} bytes, shift {shift}: {map} of {bound}");
                let bound = bytes >> 14;
                assert!(history <= bound, "{bytes} bytes: {history} of {bound}");
            }
        }
    }

    #[test]
    fn what_there_is_no_memory_for_is_found_before_it_is_taken() {
        let superblock = cache(64 << 20, 512 << 10);
        let all = (&superblock, Counts::volumes(1), &Config::default());
        assert!(check(all, false, None).is_ok());
        // No processor has so many addresses.
        assert!(!can_be_had(1 << 47) && !can_be_had(u64::MAX) && can_be_had(1 << 20));
    }

    #[test]
    fn each_log_has_a_buffer_and_some_are_left() {
        let superblock = cache(1024 * GIB, 512 << 10);
        for volumes in 1..=VOLUME_COUNT_MAX {
            let counts = Counts::volumes(volumes);
            let memory = if volumes <= 16 { 192 << 20 } else { 512 << 20 };
            let config = fit(&Config::default(), 0, &superblock, counts, memory).unwrap();
            let most = usize::from(Config::default().buffer_count);
            let buffers = usize::from(config.buffer_count);
            assert!(buffers >= (volumes + 8).min(most), "{volumes} volumes: {buffers}");
        }
    }

    #[test]
    fn the_fixed_sum_is_within_what_was_asked_for() {
        for segment_bytes in [256 << 10, 512 << 10, 4 << 20] {
            let superblock = cache(1024 * GIB, segment_bytes);
            let kinds = [None, Some(Kind::Ublk), Some(Kind::Nbd), Some(Kind::Fuse)];
            let each = [192 << 20, 256 << 20, 1 << 30].into_iter();
            for (memory, devices) in each.flat_map(|memory| kinds.map(|kind| (memory, kind))) {
                let counts = Counts { devices, ..Counts::volumes(1) };
                let config = fit(&Config::default(), 0, &superblock, counts, memory).unwrap();
                assert!(fixed(&parts(&superblock, counts, &config), &superblock) <= memory);
                assert!(config.buffer_count >= 8);
            }
            // What `format` says is the most is no less than what any of these takes.
            let most = most(&superblock, &Config::default(), 1 << 30);
            for volumes in [1, 7, 60] {
                let counts = Counts { devices: Some(Kind::Ublk), ..Counts::volumes(volumes) };
                let config = fit(&Config::default(), 0, &superblock, counts, 1 << 30).unwrap();
                let all: u64 = parts(&superblock, counts, &config).iter().map(|it| it.1).sum();
                assert!(all <= most, "{volumes} volumes: {all} of {most} bytes");
            }
            let full =
                fit(&Config::default(), 0, &superblock, Counts::volumes(1), 1 << 30).unwrap();
            assert_eq!(full.buffer_count, Config::default().buffer_count);
        }
        let superblock = cache(64 << 20, 512 << 10);
        let error = fit(&Config::default(), 0, &superblock, Counts::volumes(1), 32 << 20)
            .unwrap_err()
            .to_string();
        assert!(error.contains("--memory 32 MiB: at least "), "{error}");
        // The number that is told is enough, and less is not.
        let needed = error.split("at least ").nth(1).unwrap().split('M').next().unwrap();
        let needed = needed.parse::<u64>().unwrap() << 20;
        assert!(fit(&Config::default(), 0, &superblock, Counts::volumes(1), needed).is_ok());
        assert!(
            fit(&Config::default(), 0, &superblock, Counts::volumes(1), needed - (1 << 20))
                .is_err()
        );
    }
}
