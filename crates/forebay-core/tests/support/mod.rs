// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An engine with several volumes over a new cache, for tests of what it does with much at once.

use forebay_core::blank;
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::{NewCache, Superblock, Volume};
use forebay_core::units::VolumeIndex;

/// Volumes of so many bytes each, all served, over a cache of so many bytes in segments of so many, with so many buffers.
pub fn engine(
    volumes: u8,
    volume_bytes: u64,
    size_bytes: u64,
    segment_bytes: u32,
    buffer_count: u16,
) -> Engine {
    let config = Config { buffer_count, lane_count: volumes, ..Config::default() };
    chosen(volumes, volume_bytes, size_bytes, segment_bytes, config)
}

/// The same, with all that can be chosen.
pub fn chosen(
    volumes: u8,
    volume_bytes: u64,
    size_bytes: u64,
    segment_bytes: u32,
    config: Config,
) -> Engine {
    let key = 0x1234_5678_9ABC_DEF0;
    let new = NewCache { uuid: [7; 16], key, size_bytes, segment_bytes, now: 1 };
    let superblock = Superblock::format(&new).unwrap();
    let volume = |index: u8| Volume::empty([index; 16], "v", volume_bytes);
    let mut engine = blank::engine(&superblock, config, &volume(0));
    for index in 1..volumes {
        engine.attach(VolumeIndex(index), &volume(index));
        engine.serve(VolumeIndex(index), true);
    }
    engine
}
