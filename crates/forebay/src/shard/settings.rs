// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What volumes are set to: the engine goes by it at once, and the superblock has it before that is answered.

use super::{OpenError, Shard};
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::policy::reserve::{self, Reserve, SEGMENTS_EACH_MIN};
use forebay_core::units::VolumeIndex;

impl Shard {
    /// Changes how a volume takes writes.
    pub fn set_mode(&mut self, volume: VolumeIndex, mode: Mode) -> Result<(), OpenError> {
        self.engine.set_mode(volume, mode, &mut self.memory);
        self.run_effects();
        self.record(volume, |volume| {
            volume.mode = mode;
            volume.drained = false;
        })
    }

    /// Changes what a lost cache leaves of a volume.
    pub fn set_order(&mut self, volume: VolumeIndex, order: Order) -> Result<(), OpenError> {
        self.engine.set_order(volume, order, &mut self.memory);
        self.run_effects();
        self.record(volume, |volume| volume.order = order)
    }

    /// Changes from how many blocks on a run of writes may go around the log; 0: never.
    pub fn set_cutoff(&mut self, volume: VolumeIndex, cutoff: u32) -> Result<(), OpenError> {
        self.engine.set_cutoff(volume, cutoff);
        self.record(volume, |volume| volume.cutoff = cutoff)
    }

    /// Changes what guests have of a slow backing device for each part of write-back's: 1 to 16.
    pub fn set_weight(&mut self, volume: VolumeIndex, weight: u8) -> Result<(), OpenError> {
        self.engine.set_weight(volume, weight);
        self.record(volume, |volume| volume.weight = weight)
    }

    /// Changes what 99 of 100 reads of a slow backing device may take, in microseconds; 0: nothing is asked.
    pub fn set_p99_target(&mut self, volume: VolumeIndex, micros: u32) -> Result<(), OpenError> {
        self.engine.set_p99_target(volume, micros);
        self.record(volume, |volume| volume.p99_target = micros)
    }

    /// Changes what volumes have of the cache for themselves: of all of them, or of none if there is no room for that.
    pub fn set_reserves(&mut self, asked: &[(VolumeIndex, Reserve)]) -> Result<(), OpenError> {
        self.check_reserves(self.reserves(asked))?;
        for (index, reserve) in asked {
            self.engine.set_reserve(*index, *reserve, &mut self.memory);
            self.note(*index, |volume| volume.reserve = *reserve);
        }
        self.write_superblock()
    }

    /// Whether a cache of so many segments has room for its volumes, and for what they have for themselves. One that becomes larger may have too many
    /// still.
    pub fn has_room_for_volumes(&self, segments: u32) -> Result<(), OpenError> {
        if segments < self.superblock.segment_count {
            self.check_count(self.reserves(&[]).count() as u32, segments)?;
        }
        self.check_reserves_of(self.reserves(&[]), segments)
    }

    /// What volumes have, or will if it is asked for.
    pub(super) fn reserves<'a>(
        &'a self,
        asked: &'a [(VolumeIndex, Reserve)],
    ) -> impl Iterator<Item = Reserve> + Clone + 'a {
        let volumes = self.superblock.volumes.iter().enumerate();
        volumes.filter_map(move |(at, volume)| {
            let asked = asked.iter().rfind(|(index, _)| usize::from(index.0) == at);
            volume.as_ref().map(|volume| asked.map_or(volume.reserve, |(_, reserve)| *reserve))
        })
    }

    /// Whether so many volumes can all go on in a cache of so many segments.
    pub(super) fn check_count(&self, volumes: u32, segments: u32) -> Result<(), OpenError> {
        if u64::from(volumes) * u64::from(SEGMENTS_EACH_MIN) <= u64::from(segments) {
            return Ok(());
        }
        let segment_bytes = self.superblock.segment_bytes;
        Err(OpenError::TooSmallForVolumes { volumes, segments, segment_bytes })
    }

    pub(super) fn check_reserves(
        &self,
        all: impl Iterator<Item = Reserve> + Clone,
    ) -> Result<(), OpenError> {
        self.check_reserves_of(all, self.segments_to_stay())
    }

    /// Segments of the cache, or those that it is to have if they are fewer.
    pub(super) fn segments_to_stay(&self) -> u32 {
        let count = |size| self.superblock.resized(size).ok().map(|next| next.segment_count);
        let now = self.superblock.segment_count;
        self.resizing.and_then(count).unwrap_or(now).min(now)
    }

    fn check_reserves_of(
        &self,
        all: impl Iterator<Item = Reserve> + Clone,
        segments: u32,
    ) -> Result<(), OpenError> {
        let blocks = self.superblock.segment_blocks();
        let bytes = |segments: u32| u64::from(segments) * u64::from(self.superblock.segment_bytes);
        reserve::resolve(segments, blocks, all).check().map_err(|it| OpenError::Overbooked {
            wanted_bytes: bytes(it.wanted),
            usable_bytes: bytes(it.usable),
        })
    }
}
