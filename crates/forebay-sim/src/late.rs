// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backing devices that come late: the cache knows the volume, others are served and want its room, and when its device is
//! there what the cache holds of it may have to be dropped, in the middle of all that.

use crate::random::{Random, mix};
use crate::run::{WAIT_MAX, stuck};
use crate::world::{Failure, Outcome, World};
use forebay_core::units::VolumeIndex;

impl World {
    /// At an opening: which volume's device is not there yet.
    pub(crate) fn choose_late(&self) -> Option<usize> {
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0x1A7E));
        let attached = self.attached();
        let wanted = !self.setup.steady && !self.faults_over && random.one_in(4);
        (wanted && attached.len() > 1).then(|| *random.pick(&attached))
    }

    /// It is there.
    pub(crate) fn serve_late(&mut self) -> Outcome {
        let Some(index) = self.late else { return Ok(()) };
        let volume = VolumeIndex(index as u8);
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0x1A7F));
        let clean = self.engine.as_ref().is_some_and(|engine| engine.is_clean(volume));
        if !self.cache_failed && clean && self.setup.rot == 0 && random.one_in(2) {
            self.forget_late(index)?;
        } else if !self.cache_failed {
            self.forget_clean(index);
        }
        // Until here it hears of flushes as one whose disk nobody knows.
        self.late = None;
        self.volumes[index].attached = true;
        self.join_disk(index);
        self.engine.as_mut().expect("there is a process").serve(volume, true);
        self.serve_again(index)
    }

    /// What the cache holds of it is dropped, when nothing of its log is under way.
    fn forget_late(&mut self, index: usize) -> Outcome {
        let (volume, begun) = (VolumeIndex(index as u8), self.now);
        while !self.engine.as_ref().is_some_and(|engine| engine.may_forget(volume)) {
            if self.cache_failed {
                return Ok(());
            }
            if !self.step()? || self.now - begun > WAIT_MAX {
                return Err(Failure(format!("a log does not come to rest: {}", stuck(self).0)));
            }
        }
        self.marks.hit("late volume's data forgotten");
        self.forget_data(index);
        Ok(())
    }
}
