// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads across holes: a hole is what the cache has in the midst of what a guest's read misses.
//!
//! Where single blocks of a volume are in the cache, a long read would ask the backing device for each stretch between them. A volume behind a network
//! counts what it is asked, a drive does each with the overhead of one, and without a cache it would be one read. So up to [`SPAN_BLOCKS_MAX`] blocks
//! are read as one, across holes of no more than [`HOLE_BLOCKS_MAX`].
//!
//! # Invariants
//!
//! - **H1** What the backing device has of a hole is nobody's: the hole is read from wherever its blocks are when the device has answered, to
//!   the same place and before the request is answered; nobody waits for it (F3 of `op::miss`), and none of it enters the log.
//! - **H2** No fault of such a read is told, or counted as the device's: what lies under a hole may be unreadable for years, and nobody had
//!   noticed. It is read again, without the holes; so is what others waited for.
//! - **H3** From when it is asked for until it is answered, as many tokens are left for it as it has blocks: reading all of it again in single blocks takes no more.

use crate::engine::Engine;
use crate::mutant::Mutant;
use crate::op::miss::{Miss, Why};
use crate::op::read::Source;
use crate::payload::Payload;
use crate::units::{Lba, VolumeIndex};

/// Blocks that are read as one, at most: 1 MiB, as long as a request.
const SPAN_BLOCKS_MAX: u16 = 256;
/// The same of a device that nobody else asks for anything: the holes of one are read while the next one is. A network volume counts 256 KiB as one operation.
const SPAN_BLOCKS_ALONE: u16 = 64;
/// Blocks of a hole, at most: 64 KiB, in the time of which a network volume of 3,000 operations and 125 MiB a second does 1.5 operations. A hard disk passes them while
/// it does one command.
const HOLE_BLOCKS_MAX: u16 = 16;

const WORDS: usize = SPAN_BLOCKS_MAX as usize / u64::BITS as usize;

/// Which blocks of a read are holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holes([u64; WORDS]);

impl Holes {
    pub(crate) const NONE: Holes = Holes([0; WORDS]);

    pub(crate) fn is_none(&self) -> bool {
        *self == Holes::NONE
    }

    pub(crate) fn has(&self, block: u16) -> bool {
        let (word, bit) = (usize::from(block) / 64, block % 64);
        self.0.get(word).is_some_and(|bits| bits >> bit & 1 == 1)
    }

    fn add(&mut self, block: u16) {
        self.0[usize::from(block) / 64] |= 1 << (block % 64);
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|bits| u64::from(bits.count_ones())).sum()
    }
}

impl Miss {
    /// Its blocks in parts that are a hole or have none, and which they are.
    pub(crate) fn stretches(self) -> impl Iterator<Item = (Miss, bool)> {
        let mut from = 0;
        core::iter::from_fn(move || {
            let is_hole = self.holes.has(from);
            let alike = |at: &u16| self.holes.has(*at) == is_hole;
            let blocks = match self.holes.is_none() {
                true => self.blocks - from,
                false => (from..self.blocks).take_while(alike).count() as u16,
            };
            from += blocks;
            (blocks > 0).then(|| (self.part(from - blocks, blocks), is_hole))
        })
    }
}

impl Engine {
    /// A miss and what comes behind it, of a request that has so many blocks from there on, if they are to be read as one.
    pub(crate) fn across(&mut self, miss: Miss, rest: u16, payload: &impl Payload) -> Option<Miss> {
        let is_read = matches!(miss.why, Why::Read | Why::Run);
        if !is_read || miss.blocks == rest || self.is_apart(&miss, payload) {
            return None;
        }
        let own = self.active(miss.request).backing_reads;
        let is_alone = self.slices(miss.volume).has_one_alone(own);
        let most = rest.min(if is_alone { SPAN_BLOCKS_ALONE } else { SPAN_BLOCKS_MAX });
        let (mut blocks, mut holes) = (miss.blocks, Holes::NONE);
        let mut at = blocks;
        while at < most && at - blocks <= HOLE_BLOCKS_MAX {
            if self.locate(miss.volume, miss.lba + u64::from(at)) == Source::Backing {
                (blocks..at).for_each(|hole| holes.add(hole));
                blocks = at + 1;
            }
            at += 1;
        }
        let free = !self.is_being_read(miss.volume, miss.lba, miss.lba + u64::from(blocks));
        (!holes.is_none() && free).then_some(Miss { blocks, holes, ..miss })
    }

    /// Whether any of it is read already, or was ahead.
    fn is_being_read(&self, volume: VolumeIndex, start: Lba, end: Lba) -> bool {
        self.shared.iter().any(|shared| shared.overlaps(volume, start, end))
            || self.ahead.overlaps(volume, start, end)
    }

    pub(crate) fn across_begin(&mut self, miss: Miss) {
        let across = miss.holes.count();
        let stats = &mut self.volume(miss.volume).stats;
        stats.miss_blocks += u64::from(miss.blocks) - across;
        stats.across_blocks += across;
        let active = self.active(miss.request);
        active.remaining += 1;
        active.backing_waited = true;
        active.backing_reads += 1;
        self.across_tokens += usize::from(miss.blocks); // H3
        let ticket = self.ticket(miss.volume, miss.lba, miss.blocks);
        let token = self.miss_share(miss, ticket);
        self.foreground_ask(miss.volume, token);
    }

    /// What the device has answered has holes: they are read (H1).
    pub(crate) fn across_holes(&mut self, miss: &Miss, payload: &mut impl Payload) {
        self.across_tokens -= usize::from(miss.blocks);
        if self.config.mutants.is(Mutant::HolesNotRead) {
            return;
        }
        for (part, is_hole) in miss.stretches() {
            if is_hole {
                self.read_again(part, payload);
            }
        }
    }

    /// It could not be read as one: all is read again, each stretch for itself (H2).
    pub(crate) fn across_failed(&mut self, miss: &Miss, payload: &mut impl Payload) {
        self.across_tokens -= usize::from(miss.blocks);
        for (part, is_hole) in miss.stretches() {
            match is_hole {
                true => self.read_again(part, payload),
                false => self.miss_again(part, payload),
            }
        }
        let mut next = miss.next;
        while let Some(waiting) = self.next_waiting(&mut next) {
            self.miss_again(waiting, payload);
            self.read_part_done(waiting.request);
        }
        self.read_part_done(miss.request);
    }
}
