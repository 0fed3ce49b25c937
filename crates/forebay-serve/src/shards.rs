// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shard for tests of front ends: one volume, all of it in memory.

use forebay::cache::format;
use forebay::io::{MemoryDevice, ReactorKind};
use forebay::shard::{NewVolume, Shard, ShardOptions};
use forebay_core::format::superblock::Mode;
use forebay_core::units::VolumeIndex;

const CACHE_BYTES: u64 = 128 << 20;

/// With a volume of so many bytes.
pub(crate) fn shard(reactor: ReactorKind, size_bytes: u64) -> (Shard, VolumeIndex) {
    let device = MemoryDevice::new(CACHE_BYTES, 4096).unwrap();
    format(&device, CACHE_BYTES, 512 << 10, 1).unwrap();
    let options = ShardOptions { shared: false, reactor, ..ShardOptions::default() };
    let mut shard = Shard::open(Box::new(device), &options).unwrap();
    let index = shard.free_index().unwrap();
    let new = NewVolume {
        name: "v".into(),
        size_bytes,
        logical_block: 512,
        mode: Mode::WriteBack,
        reserve: Default::default(),
        path: "memory".into(),
        fingerprint: [0; 64],
    };
    shard.add(index, &new).unwrap();
    shard.serve(index, Box::new(MemoryDevice::new(size_bytes, 512).unwrap()));
    (shard, index)
}
