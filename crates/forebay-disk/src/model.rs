// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The table of models, by the names that users give.
//!
//! Where the numbers come from: seek times, turns, heads and buffers of the two hard disks are of their
//! data sheets and reviews (Seagate Barracuda 7200.9 and 7200.12); zones and tracks are fitted to their
//! sequential rates. `840pro` is a Samsung 840 Pro behind a SATA-II link (268 MB/s in 512 KiB, 201 MB/s
//! in 4 KiB). `gp3` is Amazon's volume of that name at its baseline of 3,000 operations and 125 MiB a second,
//! where more than 256 KiB count as several operations; its service times are typical, not promised.

use crate::cloud::{self, Cloud};
use crate::hdd::{self, Hdd};
use crate::ssd::{self, Ssd};
use crate::{Disk, Nanos};
use std::fmt;
use std::str::FromStr;

const MICRO: Nanos = 1_000;
const MILLI: Nanos = 1_000_000;

/// A model of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Model {
    /// A hard disk.
    Hdd(hdd::Spec),
    /// An SSD.
    Ssd(ssd::Spec),
    /// A cloud volume.
    Cloud(cloud::Spec),
}

/// Seagate Barracuda 7200.9, 500 GB.
pub const ST3500641AS: hdd::Spec = hdd::Spec {
    turn: 8_333_333,
    heads: 8,
    cylinders: 136_000,
    sectors_outer: 1200,
    sectors_inner: 660,
    seek: [800_000.0, 42_600.0, 40.0],
    head_switch: 900 * MICRO,
    overhead: 200 * MICRO,
    settle: [200_000.0, 1_000_000.0],
    settle_far_cylinders: 50_000,
    queue_depth: 32,
    age_max: 1_000 * MILLI,
    cache_count: 128,
    memory_bytes: 16 << 20,
    link_rate: 300_000_000,
};

/// Of the class of the Seagate Barracuda 7200.12, 533 GB.
pub const BARRACUDA_7200_12: hdd::Spec = hdd::Spec {
    heads: 2,
    cylinders: 310_000,
    sectors_outer: 2240,
    sectors_inner: 1120,
    seek: [800_000.0, 17_780.0, 23.5],
    head_switch: 850 * MICRO,
    overhead: 100 * MICRO,
    ..ST3500641AS
};

/// Samsung 840 Pro 256 GB behind SATA II.
pub const SSD_840PRO: ssd::Spec = ssd::Spec {
    command: 5_100,
    read_rate: 268_600_000,
    write_rate: 268_600_000,
    read_latency: 60 * MICRO,
    write_latency: 25 * MICRO,
    flush: 2 * MILLI,
};

/// An NVMe SSD of today with memory that survives power cuts.
pub const NVME: ssd::Spec = ssd::Spec {
    command: 1_000,
    read_rate: 3_000_000_000,
    write_rate: 2_000_000_000,
    read_latency: 70 * MICRO,
    write_latency: 15 * MICRO,
    flush: 30 * MICRO,
};

/// Amazon gp3 at its baseline.
pub const GP3: cloud::Spec = cloud::Spec {
    operations: 3_000,
    bytes: 125 << 20,
    operation_bytes: 256 << 10,
    saved: 100 * MILLI,
    median: 800 * MICRO,
    p99: 4 * MILLI,
    seed: 1,
};

/// The names of the models.
pub const NAMES: [&str; 5] = ["st3500641as", "7200.12", "840pro", "nvme", "gp3"];

/// No model is called so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownModel(pub String);

impl fmt::Display for UnknownModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is no disk model; known are {}", self.0, NAMES.join(", "))
    }
}

impl std::error::Error for UnknownModel {}

impl FromStr for Model {
    type Err = UnknownModel;

    fn from_str(name: &str) -> Result<Model, UnknownModel> {
        match name {
            "st3500641as" => Ok(Model::Hdd(ST3500641AS)),
            "7200.12" => Ok(Model::Hdd(BARRACUDA_7200_12)),
            "840pro" => Ok(Model::Ssd(SSD_840PRO)),
            "nvme" => Ok(Model::Ssd(NVME)),
            "gp3" => Ok(Model::Cloud(GP3)),
            _ => Err(UnknownModel(name.into())),
        }
    }
}

impl Model {
    /// With, or without, a write cache: what a hard disk can be told. Others stay as they are.
    pub fn write_cache(self, on: bool) -> Model {
        match self {
            Model::Hdd(spec) if !on => Model::Hdd(hdd::Spec { cache_count: 0, ..spec }),
            other => other,
        }
    }

    /// The bytes of a disk of this model; those of SSDs and cloud volumes take the same times wherever they lie. A hard disk that is
    /// to have more has all that is behind its end in one place, its last sector (`hdd/geometry.rs`).
    pub fn size_bytes(self) -> Option<u64> {
        match self {
            Model::Hdd(spec) => Some(Hdd::new(spec).size_bytes()),
            Model::Ssd(_) | Model::Cloud(_) => None,
        }
    }

    /// A disk of this model, at rest.
    pub fn disk(self) -> Box<dyn Disk> {
        match self {
            Model::Hdd(spec) => Box::new(Hdd::new(spec)),
            Model::Ssd(spec) => Box::new(Ssd::new(spec)),
            Model::Cloud(spec) => Box::new(Cloud::new(spec)),
        }
    }
}
