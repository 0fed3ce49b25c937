// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the engine wants done, on its way to a device: when that will have done it, and with which bytes.

use crate::block::Block;
use crate::device::Piece;
use crate::memory::behind;
use crate::world::World;
use forebay_core::effect::{Effect, Token};
use forebay_core::limits::RECORD_ENTRIES_MAX;
use forebay_core::payload::Place;
use forebay_core::units::{BLOCK_BYTES, Lba};
use std::cmp::Reverse;
use std::rc::Rc;

/// The mark of a record that has as many blocks as there may be: no seed comes past it with segments of 64 KiB.
pub const FULL_RECORD: &str = "full record of blocks";

/// Something that will happen.
#[derive(Clone, Debug)]
pub(crate) struct Flight {
    pub(crate) token: Token,
    pub(crate) effect: Effect,
    /// Bytes of a write, if it has taken them.
    pub(crate) pieces: Option<Vec<Piece>>,
    /// What a flush will cover.
    pub(crate) through: u64,
    /// It is a flush that has failed, which nobody knows.
    pub(crate) failed: bool,
}

impl Flight {
    /// Whether a flush of the cache device is, or is part of, what happens.
    pub(crate) const fn flushes_cache(&self) -> bool {
        matches!(self.effect, Effect::FlushCache { .. } | Effect::WriteSuperblock { .. })
    }

    /// Whether it is the cache device that does it.
    pub(crate) const fn is_of_cache(&self) -> bool {
        let moves = matches!(
            self.effect,
            Effect::ReadCache { .. } | Effect::WriteCache { .. } | Effect::WriteArea { .. }
        );
        moves || self.flushes_cache()
    }
}

/// What a device has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// Records are written.
    Record,
    /// The first record of a segment is written: what was in its place is gone.
    First,
    /// The cache device is flushed.
    Flush,
    /// Pages of a checkpoint are written.
    Pages,
    /// The superblock is written.
    Superblock,
    /// Something is on a backing device.
    Backing,
    /// A backing device is flushed.
    BackingFlush,
    /// The cache is marked stale.
    Mark,
}

impl Done {
    /// All but the most frequent.
    pub const RARE: [Done; 6] = [
        Done::First,
        Done::Flush,
        Done::Pages,
        Done::Superblock,
        Done::Backing,
        Done::BackingFlush,
    ];

    pub(crate) fn of(effect: &Effect) -> Option<Done> {
        match effect {
            Effect::WriteCache { block: 0, .. } => Some(Done::First),
            Effect::WriteCache { .. } => Some(Done::Record),
            Effect::FlushCache { .. } => Some(Done::Flush),
            Effect::WriteArea { .. } => Some(Done::Pages),
            Effect::WriteSuperblock { .. } => Some(Done::Superblock),
            Effect::WriteBacking { .. }
            | Effect::WriteAround { .. }
            | Effect::ZeroBacking { .. }
            | Effect::DiscardBacking { .. } => Some(Done::Backing),
            Effect::FlushBacking { .. } => Some(Done::BackingFlush),
            Effect::MarkStale { .. } => Some(Done::Mark),
            Effect::ReadCache { .. } | Effect::ReadBacking { .. } | Effect::Answer { .. } => None,
        }
    }
}

impl World {
    pub(crate) fn issue(&mut self, effect: Effect) {
        self.tell(|| format!("issue {effect:?}"));
        self.note_issued(&effect);
        if let Effect::WriteBacking { volume, lba, blocks, .. } = effect {
            let volume = usize::from(volume.0);
            for (cell, _) in self.cells(volume, lba.0, lba.0 + u64::from(blocks)) {
                self.volumes[volume].dirty[cell] = false;
            }
        }
        if let Effect::WriteAround { volume, tag, .. } = effect {
            self.asked.get_mut(&u64::from(tag)).expect("it waits").goes_around = true;
            self.goes_around(usize::from(volume.0), tag, None);
        }
        if let Effect::WriteCache { blocks, .. } = effect
            && usize::from(blocks) > RECORD_ENTRIES_MAX
        {
            self.marks.hit(FULL_RECORD);
        }
        let micro = 1_000;
        let (token, latency) = match effect {
            Effect::WriteCache { token, .. } | Effect::WriteArea { token, .. } => {
                (token, self.random.between(20, 400) * micro)
            }
            Effect::WriteSuperblock { token, .. } => (token, self.random.between(200, 900) * micro),
            Effect::ReadCache { token, .. } => (token, self.random.between(30, 300) * micro),
            Effect::FlushCache { token } => (token, self.random.between(50, 1_000) * micro),
            Effect::ReadBacking { token, .. }
            | Effect::WriteBacking { token, .. }
            | Effect::WriteAround { token, .. } => (token, self.random.between(100, 5_000) * micro),
            Effect::ZeroBacking { token, .. } | Effect::DiscardBacking { token, .. } => {
                (token, self.random.between(100, 3_000) * micro)
            }
            Effect::FlushBacking { token, .. } => (token, self.random.between(500, 8_000) * micro),
            Effect::MarkStale { token, .. } => (token, self.random.between(500, 30_000) * micro),
            Effect::Answer { .. } => unreachable!("answers are told at once"),
        };
        let latency =
            if self.setup.steady { 100 * micro } else { latency * self.slowness(&effect) };
        let mut flight = Flight { token, effect, pieces: None, through: 0, failed: false };
        match effect {
            Effect::FlushCache { .. } | Effect::WriteSuperblock { .. } => {
                flight.through = self.cache.flush_begin();
                self.note_ends();
            }
            Effect::FlushBacking { volume, .. } => {
                flight.through = self.volumes[usize::from(volume.0)].device.flush_begin();
            }
            Effect::ReadBacking { volume, lba, blocks, .. } => {
                // What a device reads it may have read long before it says so.
                let early = !self.setup.steady && self.random.one_in(2);
                let index = usize::from(volume.0);
                flight.pieces = early.then(|| self.read_backing(index, lba, blocks));
            }
            _ if !self.setup.late_copy => flight.pieces = self.pieces(&effect),
            _ => {}
        }
        self.order += 1;
        self.events.push(Reverse((self.now + latency, self.order)));
        self.flights.insert(self.order, flight);
    }

    /// A device may be slow, or one answer late, behind many that were asked for later.
    fn slowness(&mut self, effect: &Effect) -> u64 {
        let backing = match *effect {
            Effect::ReadBacking { volume, .. }
            | Effect::WriteBacking { volume, .. }
            | Effect::WriteAround { volume, .. }
            | Effect::ZeroBacking { volume, .. }
            | Effect::DiscardBacking { volume, .. }
            | Effect::FlushBacking { volume, .. } => Some(volume),
            _ => None,
        };
        let (device, name) = match backing {
            Some(volume) => (&self.volumes[usize::from(volume.0)].device, "slow backing device"),
            None => (&self.cache, "slow cache device"),
        };
        let slow = device.slow;
        if slow > 1 {
            self.marks.hit(name);
        }
        if !self.random.one_in(self.setup.late) {
            return slow;
        }
        self.marks.hit("late answer");
        slow * 100
    }

    /// The bytes of a write, as they are now.
    pub(crate) fn pieces(&mut self, effect: &Effect) -> Option<Vec<Piece>> {
        match *effect {
            Effect::WriteCache { buffer, segment, block, blocks, .. } => {
                let address = self.superblock.address(segment, block) / BLOCK_BYTES;
                let from = Place::Buffer { buffer, block };
                Some(
                    (0..blocks)
                        .map(|at| {
                            (address + u64::from(at), u8::MAX, self.memory.get(behind(from, at)))
                        })
                        .collect(),
                )
            }
            Effect::WriteArea { address, blocks, from, .. } => {
                let first = address / BLOCK_BYTES;
                let mut content = |at| self.memory.get(behind(from, at));
                Some((0..blocks).map(|at| (first + u64::from(at), u8::MAX, content(at))).collect())
            }
            Effect::WriteBacking { volume, lba, blocks, from, .. } => {
                let index = usize::from(volume.0);
                Some(
                    (0..blocks)
                        .map(|at| {
                            let lba = lba.0 + u64::from(at);
                            let mask = self.volumes[index].mask(lba);
                            (lba, mask, self.memory.get(behind(from, at)))
                        })
                        .collect(),
                )
            }
            Effect::WriteAround { tag, .. } if !self.zeroes(tag) => {
                let first = self.asked[&u64::from(tag)].request.offset / BLOCK_BYTES;
                let memory = self.memory.request(tag);
                Some(
                    (0..memory.count)
                        .map(|at| {
                            (first + at, memory.mask(at), Rc::clone(&memory.blocks[at as usize]))
                        })
                        .collect(),
                )
            }
            _ => None,
        }
    }

    pub(crate) fn read_backing(&self, index: usize, lba: Lba, blocks: u16) -> Vec<Piece> {
        let volume = &self.volumes[index];
        let read = |lba: u64| {
            if lba >= volume.blocks() {
                return Block::zero();
            }
            Block::merge(&Block::zero(), &volume.device.read(lba), volume.mask(lba))
        };
        (0..u64::from(blocks)).map(|at| (lba.0 + at, u8::MAX, read(lba.0 + at))).collect()
    }
}
