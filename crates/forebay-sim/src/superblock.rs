// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The superblock on the cache device: two copies, each flushed before the other is written.

use crate::checkers::one_copy_is_durable;
use crate::world::World;
use forebay_core::effect::SuperblockChange;
use forebay_core::format::superblock::Superblock;
use forebay_core::mutant::Mutant;

impl World {
    /// Writes both copies of the superblock, each flushed.
    pub fn write_superblock(&mut self) {
        self.superblock.sequence += 1;
        let through = self.cache.flush_begin();
        self.write_superblock_in_part(4, through);
    }

    /// Writes the superblock with something new in it: one copy, a flush, the other, a flush; only
    /// the first `steps` of these. The flushes make durable what they must, no more: what was complete
    /// (`through`) when all that began.
    pub(crate) fn change_superblock(&mut self, change: SuperblockChange, steps: u64, through: u64) {
        change.apply(&mut self.superblock);
        self.write_superblock_in_part(steps, through);
        if steps == 4 {
            self.marks.hit(match change {
                SuperblockChange::Checkpoint { .. } => "checkpoint named",
                SuperblockChange::Marks { .. } => "marks in the superblock",
                SuperblockChange::FlushFailed { .. } => "failed flush in the superblock",
            });
        }
    }

    /// A copy is about to be written: another one is durable, unless something rotted there.
    pub(crate) fn watch_copies(&mut self, address: u64, bytes: &[u8]) {
        if self.setup.rot == 0 && self.lone_copy.is_none() {
            self.lone_copy = one_copy_is_durable::check(&self.cache, address, bytes).err();
        }
    }

    /// Whether a copy is flushed after it was written: always, but for a deliberate fault.
    pub(crate) fn flushes_copy(&self, copy: usize) -> bool {
        let skipped = [Mutant::SuperblockFirstUnflushed, Mutant::SuperblockSecondUnflushed][copy];
        !self.setup.config.mutants.is(skipped)
    }

    /// Begins to: so many of the steps.
    pub fn write_superblock_in_part(&mut self, steps: u64, through: u64) {
        let copies = Superblock::addresses(self.superblock.size_bytes);
        for (copy, address) in copies.into_iter().enumerate() {
            if steps > 2 * copy as u64 {
                let bytes = self.superblock.encode(address);
                self.watch_copies(address, &bytes);
                let pieces = crate::opening::pieces(address, &bytes);
                if steps > 2 * copy as u64 + 1 && self.flushes_copy(copy) {
                    self.cache.flush_end(through);
                    self.cache.write_durably(pieces);
                } else {
                    self.cache.write(pieces);
                }
            }
        }
    }
}
