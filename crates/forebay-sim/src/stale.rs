// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The mark that a cache is stale for a volume, as a runtime keeps it outside of the cache: there or not, after any
//! stop, and durable once the engine has heard of it.

use crate::random::{Random, mix};
use crate::world::{Failure, Outcome, World};
use forebay_core::effect::Fault;
use forebay_core::units::VolumeIndex;

impl World {
    /// The mark is written, if there is a place for it.
    pub(crate) fn mark_stale(&mut self, index: usize) -> Result<(), Fault> {
        if self.random.one_in(6) {
            self.marks.hit("no place for a mark");
            return Err(Fault);
        }
        self.marks.hit("cache marked stale");
        let recorded = self.superblock.volumes[index].as_ref().expect("it is attached");
        let generation = recorded.attach_generation;
        let now = self.moment();
        let volume = &mut self.volumes[index];
        (volume.stale, volume.passing_since) = (Some(generation), Some(now));
        // What is changed from now on no log tells.
        volume.prefix = None;
        Ok(())
    }

    /// Before a volume is served: the cache that meets its mark drops what it holds of it. What the engine called
    /// passable was on the backing device; where rot makes some of it look dirty again the operator gives that up.
    pub(crate) fn meet_mark(&mut self, index: usize) -> Outcome {
        let Some(marked) = self.volumes[index].stale else { return Ok(()) };
        let recorded = self.superblock.volumes[index].as_ref().expect("it is attached");
        if recorded.attach_generation > marked {
            self.volumes[index].stale = None;
            return Ok(());
        }
        let volume = VolumeIndex(index as u8);
        let clean = self.engine.as_ref().is_some_and(|engine| engine.is_clean(volume));
        if !clean && self.setup.rot == 0 {
            return Err(Failure(format!(
                "volume {index}: was passed, and the cache holds dirty data"
            )));
        }
        self.marks.hit("mark met");
        self.forget_data(index);
        // The mark is taken away some time later, or not at all: the generation says that it is over.
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0x57A1E));
        if random.one_in(2) {
            self.volumes[index].stale = None;
        }
        Ok(())
    }

    /// Now and then what is clean is dropped from the map before a volume is served, as when its device was changed
    /// by others and what is dirty is to be kept: nobody sees it.
    pub(crate) fn forget_clean(&mut self, index: usize) {
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0xC1EA4));
        if self.setup.rot > 0 || !random.one_in(8) {
            return;
        }
        self.marks.hit("clean data forgotten");
        self.volumes[index].clean_forgotten = true;
        let engine = self.engine.as_mut().expect("there is a process");
        engine.forget_clean(VolumeIndex(index as u8));
    }
}
