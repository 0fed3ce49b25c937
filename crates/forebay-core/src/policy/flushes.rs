// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Flushes of backing devices, in the order in which they are asked for: one of a disk at a time.
//!
//! A disk that cannot make durable what it took says so to the flush that it is doing, and may drop all of it: what is on one of its
//! partitions and on another, what a batch wrote and what went around the log. The next flush says nothing of that.
//!
//! # Invariants
//!
//! - **F1** Of a backing device one flush is under way at a time, and of two volumes on a disk only one's, if either has a block device: else
//!   one would be answered well that came behind one that failed, of which nobody has heard yet. So where volumes of a disk are files and partitions
//!   the one's flush waits for the other's.
//! - **F2** A failed flush of a block device is heard by every volume on its disk, and by those that wait for theirs, which may be on
//!   it and have writes around the log from a process that died. That of a file is its own: it may fail for
//!   what its file system has of this file alone, again and again, and no other volume would come to the end of a batch.

use crate::effect::{Effect, Fault, Token};
use crate::engine::Engine;
use crate::limits::VOLUME_COUNT_MAX;
use crate::memory::queue_bytes;
use crate::mutant::Mutant;
use crate::payload::Payload;
use crate::units::VolumeIndex;
use alloc::collections::VecDeque;

/// Flushes that a volume may ask for at once: for what went around the log, for a batch, and whether the device does anything.
const OF_A_VOLUME: usize = 3;

/// A flush of a volume's backing device.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    volume: VolumeIndex,
    token: Token,
    under_way: bool,
}

/// All that are asked for and not answered.
#[derive(Debug)]
pub(crate) struct Flushes {
    wanted: VecDeque<Wanted>,
}

impl Flushes {
    pub(crate) fn new() -> Flushes {
        Flushes { wanted: VecDeque::with_capacity(OF_A_VOLUME * VOLUME_COUNT_MAX) }
    }

    /// Bytes of memory beside itself.
    pub(crate) const fn memory_bytes() -> u64 {
        (OF_A_VOLUME * VOLUME_COUNT_MAX * size_of::<Wanted>()) as u64
    }

    /// Bytes of memory it takes beside itself.
    pub(crate) fn held_bytes(&self) -> u64 {
        queue_bytes(&self.wanted)
    }
}

impl Engine {
    /// A flush of a volume's backing device is one of the whole disk: that is no file.
    pub fn flushes_disk(&mut self, volume: VolumeIndex) {
        self.volume(volume).flushes_disk = true;
    }

    /// Flushes a backing device, when it is its turn.
    pub(crate) fn flush_backing(&mut self, volume: VolumeIndex, token: Token) {
        self.flushes.wanted.push_back(Wanted { volume, token, under_way: false });
        self.issue_flushes();
    }

    /// A flush of a volume's backing device has ended: all that it tells something hear of it.
    pub(crate) fn backing_flushed(
        &mut self,
        volume: VolumeIndex,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let ended = |it: &Wanted| it.volume == volume && it.under_way;
        let at = self.flushes.wanted.iter().position(ended).expect("it was under way");
        self.flushes.wanted.remove(at);
        if result.is_err() {
            self.flush_failed(volume, payload);
        }
        self.issue_flushes();
    }

    fn issue_flushes(&mut self) {
        // Bounded: each once.
        for at in 0..self.flushes.wanted.len() {
            let Wanted { volume, token, under_way } = self.flushes.wanted[at];
            let before = self.flushes.wanted.iter().take(at);
            let together = self.config.mutants.is(Mutant::FlushesTogether);
            let waits = before.into_iter().any(|it| self.are_of_one(it.volume, volume)); // F1
            if !under_way && (!waits || together) {
                self.flushes.wanted[at].under_way = true;
                self.effects.push_back(Effect::FlushBacking { token, volume });
            }
        }
    }

    /// Whether what a flush of one volume's backing device says may be said of what the other's has.
    fn are_of_one(&self, one: VolumeIndex, other: VolumeIndex) -> bool {
        let [a, b] = [one, other].map(|it| self.volume_ref(it).expect("it exists"));
        one == other || a.disk == b.disk && (a.flushes_disk || b.flushes_disk)
    }

    fn flush_failed(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let state = self.volume(volume);
        let (disk, whole) = (state.disk, state.flushes_disk);
        let alone = !whole || self.config.mutants.is(Mutant::FlushFailsForOne);
        for at in 0..self.volume_end {
            let at = VolumeIndex(at as u8);
            let on_it = self.volume_ref(at).is_some_and(|it| it.disk == disk || !it.given);
            if at == volume || on_it && !alone {
                self.backing_flush_failed(at, payload); // F2
            }
        }
    }
}
