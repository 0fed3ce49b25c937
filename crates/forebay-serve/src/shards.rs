// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shards for tests of front ends: all of it in memory.

use forebay::cache::format;
use forebay::io::{Device, MemoryDevice, ReactorKind};
use forebay::shard::{NewVolume, Shard, ShardOptions};
use forebay_core::format::superblock::Mode;
use forebay_core::units::VolumeIndex;

const CACHE_BYTES: u64 = 128 << 20;

/// With a volume of so many bytes.
pub(crate) fn shard(reactor: ReactorKind, size_bytes: u64) -> (Shard, VolumeIndex) {
    let mut shard = empty(reactor);
    let backing = Box::new(MemoryDevice::new(size_bytes, 512).unwrap());
    let index = serve(&mut shard, Mode::WriteBack, backing);
    (shard, index)
}

/// Without any.
pub(crate) fn empty(reactor: ReactorKind) -> Shard {
    of(CACHE_BYTES, ShardOptions { reactor, ..ShardOptions::default() })
}

/// The same, with a cache of so many bytes.
pub(crate) fn of(cache_bytes: u64, options: ShardOptions) -> Shard {
    let device = MemoryDevice::new(cache_bytes, 4096).unwrap();
    format(&device, cache_bytes, 512 << 10, 1).unwrap();
    Shard::open(Box::new(device), &ShardOptions { shared: false, ..options }).unwrap()
}

/// One more volume, on this device.
pub(crate) fn serve(shard: &mut Shard, mode: Mode, backing: Box<dyn Device>) -> VolumeIndex {
    let index = shard.free_index().unwrap();
    let new = NewVolume {
        name: format!("v{}", index.0),
        size_bytes: backing.info().size_bytes,
        logical_block: 512,
        mode,
        reserve: Default::default(),
        path: "memory".into(),
        fingerprint: [0; 64],
    };
    shard.add(index, &new).unwrap();
    shard.serve(index, backing);
    index
}
