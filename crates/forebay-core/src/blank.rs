// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An engine over a new cache and memory that holds nothing: for experiments, and for counting instructions.

use crate::effect::Fault;
use crate::engine::{Config, Engine};
use crate::format::record::{Identity, Known};
use crate::format::superblock::{Superblock, Volume};
use crate::log::recovery::{self, CacheReader, Writer};
use crate::payload::{Ingested, Payload, Place};
use crate::units::{BufferId, SegmentId, Tick, VolumeIndex};

/// The one volume.
pub const VOLUME: VolumeIndex = VolumeIndex(0);

/// Memory that holds nothing: every block has the same checksum, none is zeros, and every header is the one that is
/// wanted.
#[derive(Clone, Copy, Debug)]
pub struct Nothing;

impl Payload for Nothing {
    fn ingest(&mut self, _: u32, _: u64, _: BufferId, _: u16) -> Ingested {
        Ingested::Stored { crc: 1 }
    }

    fn checksum(&mut self, _: Place) -> u32 {
        1
    }

    fn is_header(&mut self, _: Place, _: &Known, _: &Identity) -> bool {
        true
    }

    fn copy(&mut self, _: Place, _: Place, _: u16) {}

    fn zero(&mut self, _: Place, _: u16) {}

    fn put(&mut self, _: BufferId, _: u32, _: &[u8]) {}

    fn store(&mut self, _: Place, _: &[u8]) {}

    fn buffer_begin(&mut self, _: BufferId, _: SegmentId) {}

    fn buffer_end(&mut self, _: BufferId) {}
}

/// Nothing but zeros behind the superblock.
struct Zeros;

impl CacheReader for Zeros {
    fn read(&mut self, _: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        bytes.fill(0);
        Ok(())
    }
}

/// An engine over a cache that was just formatted, opened once, and [`VOLUME`] served.
pub fn engine(formatted: &Superblock, config: Config, volume: &Volume) -> Engine {
    let (room, writer) = (config.extent_count_max, Writer::MayHaveLostPower);
    let found = recovery::recover(formatted, &mut Zeros, room, writer, config.mutants);
    let superblock = recovery::reopen(formatted, &found, config.mutants);
    let mut engine = Engine::new(&superblock, found, config, Tick(0));
    engine.attach(VOLUME, volume);
    engine.serve(VOLUME, true);
    engine
}
