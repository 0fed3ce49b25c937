// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The index: from (volume, LBA) to the slot of its newest cached version.
//!
//! An open-addressed table of 8-byte cells in pages of 508. A key's page is fixed by its hash, and
//! it never leaves it: a checkpoint can copy page by page. Within a page, linear probing with
//! backward-shift deletion, so that there are no tombstones.
//!
//! A cell holds the whole key although it has room for part of it: the 48-bit key is hashed by a
//! bijection, and what the page number says already is not stored (quotienting).
//!
//! # Invariants
//!
//! - **I1** A key is in at most one cell, in its page or, if that was full, in the overflow.
//! - **I2** Between a key's home cell and its cell no cell of the page is empty.
//! - **I3** Cells in use never exceed the slots of the cache.

use crate::memory::vec_bytes;
use crate::units::{Lba, Slot, VolumeIndex};
use alloc::vec::Vec;

/// Cells in a page: 4,064 bytes, which leaves 32 for a checkpoint's page header.
pub const PAGE_CELLS: usize = 508;
/// Of a page's cells, this many are in use when the cache is full, on average.
pub(crate) const PAGE_LOAD: u64 = 406;
/// Keys that found their page full. At a load of 0.8 that is one page in millions.
const OVERFLOW_MAX: usize = 4096;

const KEY_BITS: u32 = 48;
const KEY_MASK: u64 = (1 << KEY_BITS) - 1;
const USED: u64 = 1 << 63;
const REFERENCED: u64 = 1 << 62;
const FLAGS: u64 = USED | REFERENCED;

/// The index.
#[derive(Debug)]
pub struct Index {
    cells: Vec<u64>,
    page_count: u64,
    rest_bits: u32,
    salt: u64,
    overflow: Vec<(u64, u32)>,
    used: u64,
}

/// Where a key belongs.
#[derive(Clone, Copy)]
struct Home {
    page: usize,
    rest: u64,
}

impl Index {
    /// An empty index for a cache of `slots` slots; `key` keeps guests from choosing collisions.
    pub fn new(slots: u64, key: u64) -> Index {
        let page_count = slots.div_ceil(PAGE_LOAD).max(1);
        let rest_bits = KEY_BITS - page_count.ilog2();
        assert!(slots < 1 << (62 - rest_bits), "a slot number fits a cell");
        Index {
            cells: alloc::vec![0; page_count as usize * PAGE_CELLS],
            page_count,
            rest_bits,
            salt: key & KEY_MASK,
            overflow: Vec::with_capacity(OVERFLOW_MAX),
            used: 0,
        }
    }

    /// Bytes of memory an index for `slots` slots takes.
    pub fn memory_bytes(slots: u64) -> u64 {
        slots.div_ceil(PAGE_LOAD).max(1) * (PAGE_CELLS as u64 * 8) + OVERFLOW_MAX as u64 * 16
    }

    /// Bytes of memory it takes.
    pub(crate) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.cells) + vec_bytes(&self.overflow)
    }

    /// Keys in the index.
    pub fn len(&self) -> u64 {
        self.used
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Where looking for a block begins, for [`crate::payload::Payload::prefetch`].
    #[inline]
    pub fn begin(&self, volume: VolumeIndex, lba: Lba) -> &u64 {
        let home = self.home(volume, lba);
        &self.cells[home.page * PAGE_CELLS + self.start(home.rest)]
    }

    /// The slot of a block.
    pub fn get(&self, volume: VolumeIndex, lba: Lba) -> Option<Slot> {
        let home = self.home(volume, lba);
        match self.find(home) {
            Some(at) => Some(self.slot(self.cells[at])),
            None if self.overflow.is_empty() => None,
            None => {
                let key = key(volume, lba);
                self.overflow.iter().find(|cell| cell.0 == key).map(|cell| Slot(cell.1))
            }
        }
    }

    /// The slot of a block, for a reader: sets its reference bit.
    pub fn read(&mut self, volume: VolumeIndex, lba: Lba) -> Option<Slot> {
        match self.find(self.home(volume, lba)) {
            Some(at) => {
                self.cells[at] |= REFERENCED;
                Some(self.slot(self.cells[at]))
            }
            None => self.get(volume, lba),
        }
    }

    /// Points a block at a slot; returns the slot it pointed at before.
    pub fn insert(&mut self, volume: VolumeIndex, lba: Lba, slot: Slot) -> Option<Slot> {
        let home = self.home(volume, lba);
        let cell = USED | u64::from(slot.0) << self.rest_bits | home.rest;
        let (at, found) = self.probe(home);
        if found {
            let at = at.expect("a cell that was found");
            let before = self.slot(self.cells[at]);
            self.cells[at] = cell;
            return Some(before);
        }
        if !self.overflow.is_empty() {
            let key = key(volume, lba);
            if let Some(found) = self.overflow.iter_mut().find(|cell| cell.0 == key) {
                return Some(Slot(core::mem::replace(&mut found.1, slot.0)));
            }
        }
        self.used += 1;
        if let Some(at) = at {
            self.cells[at] = cell;
            return None;
        }
        assert!(self.overflow.len() < OVERFLOW_MAX, "the index's overflow is full");
        self.overflow.push((key(volume, lba), slot.0));
        None
    }

    /// Forgets a block if it points at `slot`; says whether it did.
    pub fn remove(&mut self, volume: VolumeIndex, lba: Lba, slot: Slot) -> bool {
        let home = self.home(volume, lba);
        if let Some(at) = self.find(home) {
            if self.slot(self.cells[at]) != slot {
                return false;
            }
            self.close_gap(home.page, at - home.page * PAGE_CELLS);
            self.used -= 1;
            return true;
        }
        let key = key(volume, lba);
        let found = self.overflow.iter().position(|cell| *cell == (key, slot.0));
        if let Some(at) = found {
            self.overflow.swap_remove(at);
            self.used -= 1;
        }
        found.is_some()
    }

    /// Whether the block points at `slot` and was read since it was placed there.
    pub fn is_referenced(&self, volume: VolumeIndex, lba: Lba, slot: Slot) -> bool {
        let cell = self.find(self.home(volume, lba)).map(|at| self.cells[at]);
        cell.is_some_and(|cell| cell & REFERENCED != 0 && self.slot(cell) == slot)
    }

    /// Pages of the table.
    pub fn page_count(&self) -> u32 {
        self.page_count as u32
    }

    /// The cells of a page, for a checkpoint.
    pub fn page(&self, page: u32) -> &[u64] {
        let base = page as usize * PAGE_CELLS;
        &self.cells[base..base + PAGE_CELLS]
    }

    /// Puts a page's cells back in place, from a checkpoint, into an index without any.
    pub fn put_page(&mut self, page: u32, cells: &[[u8; 8]]) {
        let base = page as usize * PAGE_CELLS;
        for (cell, raw) in self.cells[base..base + PAGE_CELLS].iter_mut().zip(cells) {
            *cell = u64::from_le_bytes(*raw);
            self.used += u64::from(*cell != 0);
        }
    }

    /// Whether every key found room in its page: a checkpoint holds pages only.
    pub fn is_in_pages(&self) -> bool {
        self.overflow.is_empty()
    }

    /// After pages were put back: drops every cell whose slot `keep` does not want, and counts the
    /// rest.
    pub fn sweep(&mut self, mut keep: impl FnMut(Slot) -> bool) {
        self.used = self.overflow.len() as u64;
        for page in 0..self.page_count as usize {
            let base = page * PAGE_CELLS;
            let mut at = 0;
            while at < PAGE_CELLS {
                let cell = self.cells[base + at];
                if cell == 0 || keep(self.slot(cell)) {
                    at += 1;
                } else {
                    // Another cell may have moved here: it is looked at next. One that wrapped
                    // round from the page's end is looked at again there, or was before.
                    self.close_gap(page, at);
                }
            }
            let cells = self.page(page as u32).iter().filter(|cell| **cell != 0);
            self.used += cells.count() as u64;
        }
    }

    #[inline]
    fn home(&self, volume: VolumeIndex, lba: Lba) -> Home {
        let wide = u128::from(mix(key(volume, lba) ^ self.salt)) * u128::from(self.page_count);
        let page = (wide >> KEY_BITS) as usize;
        // Keys of one page have products that differ by at least `page_count`: what is left after
        // dropping that many low bits still tells them apart.
        let rest = (wide as u64 & KEY_MASK) >> (KEY_BITS - self.rest_bits);
        Home { page, rest }
    }

    #[inline]
    fn start(&self, rest: u64) -> usize {
        ((u128::from(rest) * PAGE_CELLS as u128) >> self.rest_bits) as usize
    }

    #[inline]
    fn slot(&self, cell: u64) -> Slot {
        Slot(((cell & !FLAGS) >> self.rest_bits) as u32)
    }

    #[inline]
    fn find(&self, home: Home) -> Option<usize> {
        let (at, found) = self.probe(home);
        at.filter(|_| found)
    }

    /// The cell of a key, or else the empty one where it would go, if its page has one; and whether
    /// it is the key's.
    #[inline]
    fn probe(&self, home: Home) -> (Option<usize>, bool) {
        let base = home.page * PAGE_CELLS;
        let page = &self.cells[base..base + PAGE_CELLS];
        let rest_mask = (1 << self.rest_bits) - 1;
        let start = self.start(home.rest);
        for (at, cell) in page.iter().enumerate().skip(start) {
            if *cell == 0 || cell & rest_mask == home.rest {
                return (Some(base + at), *cell != 0);
            }
        }
        for (at, cell) in page[..start].iter().enumerate() {
            if *cell == 0 || cell & rest_mask == home.rest {
                return (Some(base + at), *cell != 0);
            }
        }
        (None, false)
    }

    /// Moves later cells of the probe sequence back over the cell at `gap` (I2).
    fn close_gap(&mut self, page: usize, mut gap: usize) {
        let base = page * PAGE_CELLS;
        let rest_mask = (1 << self.rest_bits) - 1;
        let mut at = gap;
        for _ in 0..PAGE_CELLS - 1 {
            at = next(at);
            let cell = self.cells[base + at];
            if cell == 0 {
                break;
            }
            let home = self.start(cell & rest_mask);
            let distance = (at + PAGE_CELLS - home) % PAGE_CELLS;
            let gap_distance = (at + PAGE_CELLS - gap) % PAGE_CELLS;
            if distance >= gap_distance {
                self.cells[base + gap] = cell;
                gap = at;
            }
        }
        self.cells[base + gap] = 0;
    }
}

fn key(volume: VolumeIndex, lba: Lba) -> u64 {
    u64::from(volume.0) << 40 | lba.0
}

fn next(at: usize) -> usize {
    if at + 1 == PAGE_CELLS { 0 } else { at + 1 }
}

const MIX: [u64; 2] = [0x9FB2_1C65_1E99, 0xD6E8_FEB8_6659];

/// A bijection on 48 bits.
fn mix(mut x: u64) -> u64 {
    x ^= x >> 24;
    x = x.wrapping_mul(MIX[0]) & KEY_MASK;
    x ^= x >> 25;
    x = x.wrapping_mul(MIX[1]) & KEY_MASK;
    x ^ x >> 24
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;

    fn random(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[test]
    fn agrees_with_an_ordered_map_under_random_inserts_and_removals() {
        for slots in [100, 5_000, 60_000] {
            let mut index = Index::new(slots, 77);
            let mut model = BTreeMap::new();
            let mut seed = 0x1234_5678_9ABC_DEF0 + slots;
            for step in 0..200_000 {
                let volume = VolumeIndex((random(&mut seed) % 3) as u8);
                let lba = Lba(random(&mut seed) % (slots * 2));
                if !random(&mut seed).is_multiple_of(3) && (model.len() as u64) < slots {
                    let slot = Slot((step % slots) as u32);
                    assert_eq!(index.insert(volume, lba, slot), model.insert((volume, lba), slot));
                } else if let Some(slot) = model.get(&(volume, lba)).copied() {
                    assert!(!index.remove(volume, lba, Slot(slot.0 + 1)));
                    assert!(index.remove(volume, lba, slot));
                    model.remove(&(volume, lba));
                }
                assert_eq!(index.len(), model.len() as u64);
            }
            for ((volume, lba), slot) in &model {
                assert_eq!(index.get(*volume, *lba), Some(*slot));
            }
            assert_eq!(index.get(VolumeIndex(5), Lba(0)), None);
        }
    }

    #[test]
    fn a_full_page_spills_and_stays_right() {
        let mut index = Index::new(1, 0);
        for lba in 0..PAGE_CELLS as u64 + 100 {
            assert_eq!(index.insert(VolumeIndex(0), Lba(lba), Slot(lba as u32)), None);
        }
        for lba in 0..PAGE_CELLS as u64 + 100 {
            assert_eq!(index.get(VolumeIndex(0), Lba(lba)), Some(Slot(lba as u32)));
            assert!(index.remove(VolumeIndex(0), Lba(lba), Slot(lba as u32)));
        }
        assert!(index.is_empty());
    }

    #[test]
    fn a_sweep_drops_what_is_not_wanted_and_nothing_else() {
        for slots in [10, 100_000] {
            let mut index = Index::new(slots, 0x1234_5678_9ABC_DEF0);
            let mut seed = 77;
            let mut keys = BTreeMap::new();
            for slot in 0..slots {
                let volume = VolumeIndex((random(&mut seed) % 60) as u8);
                let lba = Lba(random(&mut seed) % (1 << 39));
                index.insert(volume, lba, Slot(slot as u32));
                keys.insert((volume, lba), Slot(slot as u32));
            }
            index.sweep(|slot| slot.0 % 3 != 1);
            keys.retain(|_, slot| slot.0 % 3 != 1);
            assert_eq!(index.len(), keys.len() as u64);
            assert!(keys.iter().all(|(key, slot)| index.get(key.0, key.1) == Some(*slot)));
        }
    }

    #[test]
    fn the_mix_is_a_bijection_as_far_as_we_can_see() {
        let mut seen: alloc::vec::Vec<u64> = (0..100_000).map(|x| mix(x * 7919)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 100_000);
    }
}
