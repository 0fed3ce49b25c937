// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest says that it will read soon: blocks that only the backing device has are copied into the cache now, each as if it
//! were missed and worth it (`op::miss`).
//!
//! # Invariants
//!
//! - **G1** It is a hint: it takes no room that a read's copies might not take (F2), and what finds none is left out.
//! - **G2** The guest has no bytes of it: it counts neither as a read nor as a miss, and ends no run of reads.

use crate::engine::Engine;
use crate::op::miss::{Miss, Why};
use crate::payload::{Payload, Place};
use crate::units::VolumeIndex;

impl Engine {
    pub(crate) fn fetch_accept(&mut self, at: u32, payload: &mut impl Payload) {
        let active = *self.active(at);
        let (volume, end) = (active.request.volume, active.first + active.blocks);
        // Keeps the request here until all of it is asked for.
        self.active(at).remaining += 1;
        let mut next = active.first;
        // Bounded: each turn goes past one block at least, of a request's.
        while next < end && self.may_fetch(volume) {
            let first = next;
            while next < end && self.is_on_backing_alone(volume, next) {
                next = next + 1;
            }
            if first < next {
                let block = (first - active.first) as u16;
                let to = Place::Request { tag: active.request.tag, block };
                let range = (first, (next - first) as u16);
                self.miss_begin(Miss::new(at, volume, range, to, Why::Wanted), payload);
            }
            next = next + 1;
        }
        self.read_part_done(at);
    }

    /// Whether copies of what is read now would be taken in.
    fn may_fetch(&self, volume: VolumeIndex) -> bool {
        let state = self.volume_ref(volume).expect("it exists");
        self.config.fill_run_max > 0 && !state.is_passing() && self.may_fill(volume)
    }
}
