// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes come, get their backing devices, and go.

use super::{NewVolume, OpenError, Shard, system, wall_now};
use crate::cache;
use crate::host::machine::DeviceNumber;
use crate::io::{Device, DeviceKind};
use crate::latency::Latency;
use forebay_core::engine::{CacheHealth, Engine};
use forebay_core::format::superblock::{Head, PATH_MAX, Volume};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::{Ordinal, Sequence, VolumeIndex};
use std::io;
use std::time::{Duration, Instant};

/// How long what is under way of a log may take.
const REST: Duration = Duration::from_secs(60);

impl Shard {
    /// The index of a recorded volume.
    pub fn find(&self, name: &str) -> Option<VolumeIndex> {
        let named = |volume: &Option<Volume>| volume.as_ref().is_some_and(|it| it.name == name);
        let at = self.superblock.volumes.iter().position(named)?;
        Some(VolumeIndex(at as u8))
    }

    /// A free place for a new volume, where none was detached from in this opening.
    pub fn free_index(&self) -> Result<VolumeIndex, OpenError> {
        let recorded = self.superblock.volumes.iter().flatten().count();
        self.free_indexes().next().ok_or(match recorded {
            VOLUME_COUNT_MAX => OpenError::TooManyVolumes,
            _ => OpenError::PlacesInUse { recorded },
        })
    }

    /// All of them.
    pub fn free_indexes(&self) -> impl Iterator<Item = VolumeIndex> {
        let places = self.superblock.volumes.iter().zip(&self.had).enumerate();
        let free = places.filter(|(_, (volume, had))| volume.is_none() && !**had);
        free.map(|(at, _)| VolumeIndex(at as u8))
    }

    /// Whether a cache has room for new volumes and what they are to have for themselves, once those that are known have what
    /// is asked for.
    pub fn check_room(
        &self,
        asked: &[(VolumeIndex, Reserve)],
        new: &[Reserve],
    ) -> Result<(), OpenError> {
        // What is recorded is served as it is.
        if asked.is_empty() && new.is_empty() {
            return Ok(());
        }
        let all = self.reserves(asked).chain(new.iter().copied());
        if !new.is_empty() {
            self.check_count(all.clone().count() as u32, self.segments_to_stay())?;
        }
        self.check_reserves(all)
    }

    /// Records a new volume, with an empty log.
    pub fn add(&mut self, index: VolumeIndex, volume: &NewVolume) -> Result<(), OpenError> {
        if !Volume::may_have(volume.size_bytes) || volume.path.len() > PATH_MAX {
            let (size_bytes, path_bytes) = (volume.size_bytes, volume.path.len());
            return Err(OpenError::Unrecordable { size_bytes, path_bytes });
        }
        self.check_room(&[], &[volume.reserve])?;
        let mut uuid = [0; 16];
        cache::fill_random(&mut uuid).map_err(system("take random bytes"))?;
        let recorded = Volume {
            mode: volume.mode,
            reserve: volume.reserve,
            attach_generation: (self.superblock.sequence + 1) as u32,
            logical_block: volume.logical_block,
            fingerprint: volume.fingerprint,
            backing_as_of: wall_now(),
            path: volume.path.clone(),
            ..Volume::empty(uuid, &volume.name, volume.size_bytes)
        };
        self.superblock.volumes[usize::from(index.0)] = Some(recorded.clone());
        if let Err(error) = self.write_superblock() {
            // The engine does not know of it.
            self.superblock.volumes[usize::from(index.0)] = None;
            return Err(error);
        }
        self.engine.attach(index, &recorded);
        Ok(())
    }

    /// Changes what is recorded of a volume.
    pub fn record(
        &mut self,
        index: VolumeIndex,
        change: impl FnOnce(&mut Volume),
    ) -> Result<(), OpenError> {
        self.note(index, change);
        self.write_superblock()
    }

    /// Changes what will be recorded of a volume at the next write of the superblock.
    pub fn note(&mut self, index: VolumeIndex, change: impl FnOnce(&mut Volume)) {
        if let Some(Some(volume)) = self.superblock.volumes.get_mut(usize::from(index.0)) {
            change(volume);
        }
    }

    /// Drops everything the cache holds of a volume that is not served, dirty data included: it starts empty. What is under way of
    /// its log, where others are served, is waited for.
    pub fn forget_data(&mut self, index: VolumeIndex) -> Result<(), OpenError> {
        let begun = Instant::now();
        while !self.rests(|engine| engine.may_forget(index))? {
            if begun.elapsed() > REST || self.engine.health() == CacheHealth::Failed {
                return Err(system("end what is under way")(io::ErrorKind::TimedOut.into()));
            }
            self.turn_for_itself(Some(Duration::from_millis(100)))?;
        }
        let generation = (self.superblock.sequence + 1) as u32;
        self.note(index, |volume| {
            volume.attach_generation = generation;
            volume.head = Head::NONE;
            volume.watermark = Sequence(0);
            volume.tail = Ordinal(1);
            volume.frozen = false;
        });
        self.write_superblock()?;
        let recorded = self.superblock.volumes[usize::from(index.0)].clone();
        if let Some(recorded) = recorded {
            self.engine.forget_data(index, &recorded, &mut self.memory);
        }
        Ok(())
    }

    /// Drops what the map has of a volume that is on its backing device, or was once: that was written without this
    /// cache. What is dirty stays. It is not served.
    pub fn forget_clean(&mut self, index: VolumeIndex) {
        self.engine.forget_clean(index);
    }

    /// Takes a volume out of the cache, whatever it holds. It is not served.
    pub fn forget(&mut self, index: VolumeIndex) -> Result<(), OpenError> {
        let recorded = self.superblock.volumes[usize::from(index.0)].take();
        let written = self.write_superblock();
        if written.is_err() {
            // One copy may say so already.
            self.superblock.volumes[usize::from(index.0)] = recorded;
        }
        written
    }

    /// Ends the serving of a volume that is on its backing device, and takes it out of the cache. Says
    /// whether that is done: it is not while something of it is under way. Its device is given back then.
    pub fn detach(&mut self, index: VolumeIndex) -> Result<bool, OpenError> {
        self.engine.serve(index, false);
        if !self.rests(|engine| engine.may_detach(index))? {
            return Ok(false);
        }
        self.forget(index)?;
        self.had[usize::from(index.0)] = true;
        self.engine.detach(index, &mut self.memory);
        self.backings[usize::from(index.0)] = None;
        self.latencies[usize::from(index.0)] = None;
        self.disks[usize::from(index.0)] = None;
        self.run_effects();
        Ok(true)
    }

    /// Whether a log is at rest, and stays so until the superblock is written: what is waited for before that takes turns of the loop, in
    /// each of which a log may go on, and what it notes in the superblock would come to stand beside what is noted for its new beginning.
    fn rests(&mut self, may: impl Fn(&Engine) -> bool) -> Result<bool, OpenError> {
        if may(&self.engine) {
            self.end_flushes()?;
        }
        Ok(may(&self.engine))
    }

    /// Takes requests to a volume again whose detaching was begun.
    pub fn serve_again(&mut self, index: VolumeIndex) {
        self.engine.serve(index, true);
    }

    /// As [`Shard::serve`], of a volume whose backing device is on a disk that others may be on, too: they share its time.
    pub fn serve_on(
        &mut self,
        index: VolumeIndex,
        device: Box<dyn Device>,
        disk: Option<DeviceNumber>,
    ) {
        self.disks[usize::from(index.0)] = disk;
        let other = self.on_same_disk(index).next();
        if let Some(other) = other {
            self.engine.share_disk(index, other);
        }
        self.serve(index, device);
    }

    /// The other volumes that are on a volume's disk.
    pub fn on_same_disk(&self, index: VolumeIndex) -> impl Iterator<Item = VolumeIndex> {
        let disk = self.disks[usize::from(index.0)];
        let is_on = move |at: &usize| {
            *at != usize::from(index.0) && disk.is_some() && self.disks[*at] == disk
        };
        (0..VOLUME_COUNT_MAX).filter(is_on).map(|at| VolumeIndex(at as u8))
    }

    /// Gives a volume its backing device, opened with [`backing_source`], and serves it.
    pub fn serve(&mut self, index: VolumeIndex, device: Box<dyn Device>) {
        if device.info().kind == DeviceKind::Block {
            self.engine.flushes_disk(index);
        }
        self.backings[usize::from(index.0)] = Some(device);
        self.latencies[usize::from(index.0)] = Some([Latency::new(), Latency::new()]);
        self.engine.serve(index, true);
    }
}
