// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The experiments, each a question and a table.

pub mod ahead;
pub mod cliff;
pub mod drained;
pub mod fair;
pub mod flushes;
pub mod misses;
pub mod one_disk;
pub mod parts;
pub mod quiet;
pub mod quotas;
pub mod reads;
pub mod records;
pub mod write_cache;

use crate::machine::Setup;
use forebay_core::engine::Config;
use forebay_core::format::superblock::{Mode, Order};
use forebay_disk::hdd::Spec;
use forebay_disk::model::{BARRACUDA_7200_12, GP3, NVME, ST3500641AS};
use forebay_disk::{Model, Nanos};

/// A second.
pub const SECOND: Nanos = 1_000_000_000;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// One behind a network and two hard disks, by name.
pub fn disks() -> [(&'static str, Model); 3] {
    [
        ("gp3", Model::Cloud(GP3)),
        ("st3500641as", ordered(ST3500641AS)),
        ("7200.12", ordered(BARRACUDA_7200_12)),
    ]
}

/// A hard disk that serves one command after the other, in the order in which they come.
pub fn unordered(spec: Spec) -> Model {
    Model::Hdd(Spec { queue_depth: 1, cache_count: 0, ..spec })
}

/// A hard disk with its queue, its write cache off.
pub fn ordered(spec: Spec) -> Model {
    Model::Hdd(spec).write_cache(false)
}

/// forebay before a disk: a cache on NVMe, all else as it is by default.
pub fn cached(backing: Model, volume_bytes: u64, cache_bytes: u64) -> Setup {
    let cache = Some((Model::Ssd(NVME), cache_bytes));
    let (mode, order) = (Mode::WriteBack, Order::Batch);
    let (weight, p99_target, config) = (1, 0, Config::default());
    let (volumes, one_disk) = (1, true);
    Setup {
        backing,
        volume_bytes,
        volumes,
        one_disk,
        cache,
        mode,
        order,
        weight,
        p99_target,
        config,
    }
}

/// The disk alone.
pub fn bare(backing: Model, volume_bytes: u64) -> Setup {
    Setup { cache: None, ..cached(backing, volume_bytes, 0) }
}
