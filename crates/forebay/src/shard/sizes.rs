// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes and the cache become larger or smaller while they are served.

use super::{OpenError, Shard, system, wall_now};
use crate::cache;
use crate::io::lasting;
use forebay_core::format::resize::Unfit;
use forebay_core::log::handover::Tables;
use forebay_core::log::resize::Stage;
use forebay_core::map::slots::ROW_BYTES;
use forebay_core::units::VolumeIndex;
use std::io;

const MAP: &str = "take memory for the map of another size";

impl Shard {
    /// How large a volume's backing device is now.
    pub fn measure(&mut self, volume: VolumeIndex) -> io::Result<u64> {
        match &mut self.backings[usize::from(volume.0)] {
            Some(device) => device.measure(),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// A volume's backing device was seen to end there, before the volume does, or not to any more ([`Device::note_end`]).
    pub fn note_end(&mut self, volume: VolumeIndex, end: Option<u64>) {
        if let Some(device) = &mut self.backings[usize::from(volume.0)] {
            device.note_end(end);
        }
    }

    /// Begins to make a volume as large as its backing device, which has so many bytes. [`Shard::grow`] does it
    /// when that may be.
    pub fn begin_to_grow(&mut self, volume: VolumeIndex, size_bytes: u64) {
        self.engine.begin_to_grow(volume, size_bytes, &mut self.memory);
        self.run_effects();
    }

    /// Makes a volume larger whose growth is ready; says whether that is done. After an error the superblock may say
    /// the new size or not: the growth stays ready, and is to be tried again.
    pub fn grow(&mut self, volume: VolumeIndex) -> Result<bool, OpenError> {
        let Some(size_bytes) = self.engine.may_grow_to(volume) else { return Ok(false) };
        self.record(volume, |volume| volume.size_bytes = size_bytes)?;
        self.engine.grow(volume, &mut self.memory);
        self.run_effects();
        Ok(true)
    }

    /// A volume stays as large as it is. Says whether that can be had: not once its growth is ready.
    pub fn cancel_growth(&mut self, volume: VolumeIndex) -> bool {
        if self.engine.may_grow_to(volume).is_some() {
            return false;
        }
        self.engine.cancel_growth(volume, &mut self.memory);
        self.run_effects();
        true
    }

    /// How large the cache device is now.
    pub fn measure_cache(&mut self) -> io::Result<u64> {
        self.cache.measure()
    }

    /// Makes the file that the cache is on so many bytes long, durably. That takes a flush, and what one says is for all that was written
    /// before (D5 of `log/durable.rs`): if it fails the cache device has failed, whatever becomes of its size.
    pub fn set_cache_file_size(&mut self, size_bytes: u64) -> Result<(), OpenError> {
        self.end_flushes()?;
        self.cache.set_size(size_bytes).map_err(system("set the size of the cache's file"))?;
        self.flush_alone(|device, _| device.sync())
            .map_err(system("make the size of the cache's file durable"))
    }

    /// Begins to give the cache another size, while guests are served. [`Shard::go_on_resizing`] goes on. The
    /// device has room for both sizes until that is over.
    pub fn begin_to_resize(&mut self, size_bytes: u64) -> Result<(), Unfit> {
        let next = self.superblock.resized(size_bytes)?;
        self.engine.begin_to_resize(next.segment_count);
        self.resizing = Some(size_bytes);
        Ok(())
    }

    /// The size that the cache is to have, if it is to have another.
    pub fn resizing(&self) -> Option<u64> {
        self.resizing
    }

    /// Does what can be done now to give the cache another size; says whether it has it. Guests wait for the
    /// flushes of the superblock's copies, and while the map is put into other tables. After an error of the
    /// cache device nothing is appended any more: an opening finds the one size or the other. After one of memory it has the size of before.
    pub fn go_on_resizing(&mut self) -> Result<bool, OpenError> {
        let Some(size_bytes) = self.resizing else { return Ok(false) };
        if !self.engine.may_resize() {
            return Ok(false);
        }
        // Beside two guests that commit there is always a flush under way: it is waited for, not looked whether there is none.
        self.end_flushes()?;
        if !self.engine.may_resize() {
            return Ok(false);
        }
        if self.engine.resize_stage() == Some(Stage::Unnaming) {
            self.superblock.checkpoint_sequence = 0;
            self.write_superblock()?;
            self.engine.vacate(&mut self.memory);
            self.run_effects();
            return Ok(false);
        }
        let mut next =
            self.superblock.resized(size_bytes).expect("it was looked whether it can be");
        self.engine.note_ends(&mut next);
        let (cells, rows) = Tables::counts(&next);
        // Before anything is written: what there is no memory for is not begun.
        let cells = lasting::if_memory(cells, self.lasting).map_err(system(MAP))?;
        let rows =
            lasting::if_memory::<[u8; ROW_BYTES]>(rows, self.lasting).map_err(system(MAP))?;
        next.sequence += 1;
        next.written_at = wall_now();
        self.flush_alone(|device, superblock| cache::write_resized(device, superblock, &next))?;
        self.superblock = next;
        self.resizing = None;
        self.engine.resize(&self.superblock, cells.0, rows.0, &mut self.memory);
        self.files = [cells.1, rows.1];
        self.run_effects();
        Ok(true)
    }

    /// The cache stays as large as it is.
    pub fn cancel_resize(&mut self) {
        self.resizing = None;
        self.engine.cancel_resize(&mut self.memory);
        self.run_effects();
    }
}
