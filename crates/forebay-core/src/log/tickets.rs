// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tickets: who copies what was read into the log must know that nothing newer came meanwhile.
//!
//! Two copies are made: of what a guest missed and read from the backing device (a *fill*, `op::miss`), and of what
//! leaves the log at its tail and was read lately (a *second chance*, `log::reclaim`). Both reads take time, and while
//! one is under way the block may be written, written back, and gone from the log again. So the index cannot tell;
//! time can: all that changes a block is counted, and its count noted for the region that the block lies in. A ticket is
//! the count when the read began.
//!
//! # Invariants
//!
//! - **T1** A copy is placed only if, since its read began, no entry but a fill was placed for its block, and no write
//!   around the log of it began or ended: whatever index and log say by then.
//! - **T2** A read that begins while a write around the log of one of its blocks waits or is under way has no ticket:
//!   nobody knows which of the two it finds.
//! - **T3** A block is not copied while the backing device may still lose it: after a write around the log, until the device was
//!   flushed. Else a power cut would leave two versions, and which one is read would depend on what is cached.
//!
//! Several regions share a count, by hash: a ticket may be void for nothing, never good for nothing.

use crate::units::{Lba, VolumeIndex};
use alloc::boxed::Box;

/// Blocks of a region: 64 KiB.
const REGION_BITS: u32 = 4;
const CELL_BITS: u32 = 14;
const CELLS: usize = 1 << CELL_BITS;
/// What is longer voids all tickets.
const LONG_BLOCKS: u64 = 1024;

/// What had changed when a read began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    /// Good for nothing.
    pub(crate) const VOID: Ticket = Ticket(0);
}

/// The count of changes, and when each region changed last.
#[derive(Debug)]
pub(crate) struct Tickets {
    changed: Box<[u64; CELLS]>,
    count: u64,
    /// Tickets before it are void.
    floor: u64,
}

impl Tickets {
    pub(crate) fn new() -> Tickets {
        let changed = alloc::vec![0; CELLS].into_boxed_slice();
        Tickets { changed: changed.try_into().expect("so many"), count: 1, floor: 0 }
    }

    /// Bytes of memory they take.
    pub(crate) const fn memory_bytes() -> u64 {
        (CELLS * size_of::<u64>()) as u64
    }

    /// A ticket for a read that begins now.
    #[inline]
    pub(crate) fn take(&self) -> Ticket {
        Ticket(self.count)
    }

    /// These blocks change: tickets for them are void (T1).
    #[inline]
    pub(crate) fn void(&mut self, volume: VolumeIndex, lba: Lba, blocks: u64) {
        self.count += 1;
        let (first, last) = (lba.0 >> REGION_BITS, (lba.0 + blocks - 1) >> REGION_BITS);
        self.changed[cell(volume, first)] = self.count;
        if first < last {
            self.void_long(volume, (first + 1, last), blocks);
        }
    }

    fn void_long(&mut self, volume: VolumeIndex, (first, last): (u64, u64), blocks: u64) {
        if blocks > LONG_BLOCKS {
            self.floor = self.count;
            return;
        }
        for region in first..=last {
            self.changed[cell(volume, region)] = self.count;
        }
    }

    /// Everything may have changed.
    pub(crate) fn void_all(&mut self) {
        self.count += 1;
        self.floor = self.count;
    }

    /// Whether nothing of these blocks changed since a ticket was taken.
    pub(crate) fn hold(&self, ticket: Ticket, volume: VolumeIndex, lba: Lba, blocks: u64) -> bool {
        let (first, last) = (lba.0 >> REGION_BITS, (lba.0 + blocks - 1) >> REGION_BITS);
        ticket.0 > 0
            && self.floor <= ticket.0
            && (first..=last).all(|region| self.changed[cell(volume, region)] <= ticket.0)
    }
}

#[inline]
fn cell(volume: VolumeIndex, region: u64) -> usize {
    let key = region | u64::from(volume.0) << 40;
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - CELL_BITS)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: VolumeIndex = VolumeIndex(0);
    const B: VolumeIndex = VolumeIndex(1);

    #[test]
    fn a_change_voids_the_tickets_taken_before_it() {
        let mut tickets = Tickets::new();
        let before = tickets.take();
        assert!(tickets.hold(before, A, Lba(100), 8));
        tickets.void(A, Lba(104), 1);
        assert!(!tickets.hold(before, A, Lba(100), 8));
        assert!(!tickets.hold(before, A, Lba(104), 1));
        assert!(tickets.hold(before, B, Lba(100), 8), "another volume's");
        assert!(tickets.hold(before, A, Lba(4000), 8), "another region");
        assert!(tickets.hold(tickets.take(), A, Lba(104), 1), "it was taken afterwards");
        assert!(!tickets.hold(Ticket::VOID, A, Lba(4000), 1));
    }

    /// Of ranges of all lengths each block is void, and tickets far away are not unless it is long.
    #[test]
    fn all_of_a_range_is_voided() {
        for blocks in [1, 2, 15, 16, 17, 100, LONG_BLOCKS, LONG_BLOCKS + 1, 1 << 39] {
            for start in [0, 1, 15, 16, 1000] {
                let mut tickets = Tickets::new();
                let before = tickets.take();
                tickets.void(A, Lba(start), blocks);
                for at in (0..blocks.min(3000)).chain([blocks - 1]) {
                    assert!(!tickets.hold(before, A, Lba(start + at), 1), "{start} {blocks} {at}");
                }
                assert_eq!(tickets.hold(before, B, Lba(7), 1), blocks <= LONG_BLOCKS);
            }
        }
    }

    #[test]
    fn a_reader_of_several_regions_needs_all_of_them() {
        let mut tickets = Tickets::new();
        let before = tickets.take();
        tickets.void(A, Lba(200), 1);
        assert!(!tickets.hold(before, A, Lba(0), 256));
        assert!(tickets.hold(before, A, Lba(0), 192));
        tickets.void_all();
        assert!(!tickets.hold(before, A, Lba(0), 192));
        assert!(tickets.hold(tickets.take(), A, Lba(0), 192));
    }
}
