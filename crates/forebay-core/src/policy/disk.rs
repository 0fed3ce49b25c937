// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes on one disk: partitions of it, or files on it. They share one schedule (`slices`), one volume's: the *holder*'s.
//!
//! What does not depend on the disk stays the volume's: its weight and its target. The disk has the highest weight, so
//! that each volume's guests have at least what theirs says, and the shortest slices that a target asks for.
//!
//! # Invariants
//!
//! - **I1** The holder is on the disk itself, and is its own holder.
//! - **I2** A volume comes to a disk, and leaves it, only while nothing of it is under way there or waits.

use crate::engine::Engine;
use crate::policy::slices::Slices;
use crate::policy::target::Target;
use crate::units::{Tick, VolumeIndex};
use crate::volume::Volume;

impl Engine {
    /// The schedule of the disk that a volume is on.
    #[inline]
    pub(crate) fn slices(&mut self, volume: VolumeIndex) -> &mut Slices {
        let holder = self.volume(volume).disk;
        &mut self.volume(holder).slices
    }

    /// The same, to be looked at.
    #[inline]
    pub(crate) fn slices_of(&self, volume: &Volume) -> &Slices {
        &self.volume_ref(volume.disk).expect("the holder exists").slices
    }

    /// A volume that is not served yet is on the same disk as another one.
    pub fn share_disk(&mut self, volume: VolumeIndex, with: VolumeIndex) {
        let holder = self.volume(with).disk;
        let state = self.volume(volume);
        if volume == with || state.disk == holder {
            return;
        }
        assert!(state.disk == volume && state.slices.is_at_rest()); // I2
        assert!(self.all_volumes().all(|it| it.index == volume || it.disk != volume)); // I1
        self.volume(volume).disk = holder;
        self.slices(volume).join(volume);
        self.share_out(holder);
    }

    /// A volume of which nothing is under way ends: the others on its disk go on.
    pub(crate) fn leave_disk(&mut self, volume: VolumeIndex) {
        let (now, holder) = (self.now, self.volume(volume).disk);
        self.slices(volume).leave(volume, now);
        if holder != volume {
            self.volume(volume).disk = volume;
            return self.share_out(holder);
        }
        let heir = self.all_volumes().find(|it| it.disk == volume && it.index != volume);
        let Some(heir) = heir.map(|it| it.index) else { return };
        let idle = core::mem::replace(&mut self.volume(heir).slices, Slices::none());
        let shared = core::mem::replace(&mut self.volume(volume).slices, idle);
        self.volume(heir).slices = shared;
        for state in self.volumes.iter_mut().flatten() {
            if state.disk == volume && state.index != volume {
                state.disk = heir;
            }
        }
        self.share_out(heir);
    }

    /// What the volumes of a disk want of it has changed.
    fn share_out(&mut self, holder: VolumeIndex) {
        let on_it = || self.all_volumes().filter(|it| it.disk == holder);
        let weight = on_it().map(|it| it.weight).max().unwrap_or(1);
        let slice = on_it().filter_map(|it| it.target.map(|target| target.slice)).min();
        self.volume(holder).slices.set_shares(weight, slice);
    }

    /// Changes what guests have of a slow backing device for each part of write-back's.
    pub fn set_weight(&mut self, volume: VolumeIndex, weight: u8) {
        let state = self.volume(volume);
        state.weight = weight;
        let holder = state.disk;
        self.share_out(holder);
    }

    /// Changes what 99 of 100 reads of a slow backing device may take, in microseconds; 0: nothing is asked.
    pub fn set_p99_target(&mut self, volume: VolumeIndex, micros: u32) {
        let nanos = u64::from(micros) * 1_000;
        let slice = self.slices(volume).slice_nanos();
        let state = self.volume(volume);
        state.target = (nanos > 0).then(|| Target::new(nanos, slice));
        let holder = state.disk;
        self.share_out(holder);
    }

    /// A read of a volume's backing device, asked for and begun then, has ended now.
    pub(crate) fn read_took(&mut self, volume: VolumeIndex, asked: Tick, begun: Tick) {
        let now = self.now;
        let slices = self.slices(volume);
        let counts = slices.read_took(asked, begun, now);
        let read_time = slices.read_time();
        let state = self.volume(volume);
        if let Some(target) = &mut state.target
            && counts
        {
            target.read_took(now.since(asked), read_time);
            let holder = state.disk;
            self.share_out(holder);
        }
    }
}

impl Volume {
    /// What 99 of 100 reads may take, in microseconds; 0: nothing is asked.
    pub(crate) fn p99_target(&self) -> u32 {
        self.target.map_or(0, |target| (target.nanos / 1_000) as u32)
    }
}
