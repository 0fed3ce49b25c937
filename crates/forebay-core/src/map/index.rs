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
/// Words of a page in a checkpoint, at most: a bit for each cell, and the cells that are not empty.
pub const PACKED_WORDS_MAX: usize = MAP_WORDS + PAGE_CELLS;
/// Words of the bits.
pub(crate) const MAP_WORDS: usize = PAGE_CELLS.div_ceil(64);
const _: () = assert!(!PAGE_CELLS.is_multiple_of(64));
/// Of a page's cells, this many are in use when the cache is full, on average.
pub(crate) const PAGE_LOAD: u64 = 406;
/// Keys that found their page full. At a load of 0.8 that is one page in millions.
const OVERFLOW_MAX: usize = 4096;

/// Pages that fit a near cache together.
const GROUP_PAGES: usize = 64;
/// Cells of a key are asked for when so many others are still to be put into theirs.
const AHEAD: usize = 16;
/// Cells of a cache line. A full index's probes go through two or three.
const LINE_CELLS: usize = 8;
const PROBED_LINES: usize = 3;

const KEY_BITS: u32 = 48;
const KEY_MASK: u64 = (1 << KEY_BITS) - 1;
const _: () = assert!((PAGE_CELLS as u64) < 1 << (64 - KEY_BITS), "a rest times the cells fits");
const USED: u64 = 1 << 63;
const REFERENCED: u64 = 1 << 62;
const FLAGS: u64 = USED | REFERENCED;

/// The index.
#[derive(Debug)]
pub struct Index {
    cells: Vec<u64>,
    shape: Shape,
    overflow: Vec<(u64, u32)>,
    used: u64,
}

/// What tells where keys belong: the same for each page and whoever works on it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    page_count: u64,
    rest_bits: u32,
    salt: u64,
}

/// Where a key belongs.
#[derive(Clone, Copy)]
struct Home {
    page: usize,
    rest: u64,
}

/// What became of a key that was put into its page.
enum Put {
    Added,
    Replaced(Slot),
    /// The page has neither the key nor room for it.
    Full,
}

impl Index {
    /// An empty index for a cache of `slots` slots; `key` keeps guests from choosing collisions.
    pub fn new(slots: u64, key: u64) -> Index {
        Index::over(slots, key, alloc::vec![0; Index::cell_count(slots)])
    }

    /// An empty index in memory that is there: [`Index::cell_count`] cells, all zero.
    pub(crate) fn over(slots: u64, key: u64, cells: Vec<u64>) -> Index {
        let page_count = slots.div_ceil(PAGE_LOAD).max(1);
        let rest_bits = KEY_BITS - page_count.ilog2();
        assert!(slots < 1 << (62 - rest_bits), "a slot number fits a cell");
        assert_eq!(cells.len(), Index::cell_count(slots));
        let shape = Shape { page_count, rest_bits, salt: key & KEY_MASK };
        Index { cells, shape, overflow: Vec::with_capacity(OVERFLOW_MAX), used: 0 }
    }

    /// The index that another process had: its cells, and the keys that found their page full.
    pub(crate) fn taken(
        slots: u64,
        key: u64,
        cells: Vec<u64>,
        used: u64,
        overflow: &[(u64, u32)],
    ) -> Option<Index> {
        if cells.len() != Index::cell_count(slots) || overflow.len() > OVERFLOW_MAX || used > slots
        {
            return None;
        }
        let mut index = Index::over(slots, key, cells);
        index.overflow.extend_from_slice(overflow);
        index.used = used;
        Some(index)
    }

    /// Cells of an index for `slots` slots.
    pub(crate) fn cell_count(slots: u64) -> usize {
        slots.div_ceil(PAGE_LOAD).max(1) as usize * PAGE_CELLS
    }

    /// All cells.
    pub(crate) fn cells(&self) -> &[u64] {
        &self.cells
    }

    /// Keys that found their page full, and their slots.
    pub(crate) fn overflow(&self) -> &[(u64, u32)] {
        &self.overflow
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

    /// Where looking for a block begins, and where it soon comes to, for
    /// [`crate::payload::Payload::prefetch`]: in a full index probes go through two or three lines.
    #[inline]
    pub fn begin(&self, volume: VolumeIndex, lba: Lba) -> [&u64; PROBED_LINES] {
        let home = self.shape.home(volume, lba);
        let at = home.page * PAGE_CELLS + self.shape.start(home.rest);
        let last = self.cells.len() - 1;
        core::array::from_fn(|line| &self.cells[(at + line * LINE_CELLS).min(last)])
    }

    /// The slot of a block.
    pub fn get(&self, volume: VolumeIndex, lba: Lba) -> Option<Slot> {
        let home = self.shape.home(volume, lba);
        match self.find(home) {
            Some(at) => Some(self.shape.slot(self.cells[at])),
            None if self.overflow.is_empty() => None,
            None => {
                let key = key(volume, lba);
                self.overflow.iter().find(|cell| cell.0 == key).map(|cell| Slot(cell.1))
            }
        }
    }

    /// The slot of a block, for a reader: sets its reference bit.
    pub fn read(&mut self, volume: VolumeIndex, lba: Lba) -> Option<Slot> {
        match self.find(self.shape.home(volume, lba)) {
            Some(at) => {
                self.cells[at] |= REFERENCED;
                Some(self.shape.slot(self.cells[at]))
            }
            None => self.get(volume, lba),
        }
    }

    /// Points a block at a slot; returns the slot it pointed at before.
    pub fn insert(&mut self, volume: VolumeIndex, lba: Lba, slot: Slot) -> Option<Slot> {
        let home = self.shape.home(volume, lba);
        let base = home.page * PAGE_CELLS;
        let page = &mut self.cells[base..base + PAGE_CELLS];
        if self.overflow.is_empty() {
            match self.shape.put(page, home.rest, slot) {
                Put::Replaced(before) => return Some(before),
                Put::Added => {
                    self.used += 1;
                    return None;
                }
                Put::Full => {}
            }
        } else {
            let (at, found) = self.shape.probe(page, home.rest);
            if let Some(at) = at.filter(|_| found) {
                let before = self.shape.slot(page[at]);
                page[at] = self.shape.cell(home.rest, slot);
                return Some(before);
            }
            let key = key(volume, lba);
            if let Some(found) = self.overflow.iter_mut().find(|cell| cell.0 == key) {
                return Some(Slot(core::mem::replace(&mut found.1, slot.0)));
            }
            if let Some(at) = at {
                page[at] = self.shape.cell(home.rest, slot);
                self.used += 1;
                return None;
            }
        }
        self.used += 1;
        assert!(self.overflow.len() < OVERFLOW_MAX, "the index's overflow is full");
        self.overflow.push((key(volume, lba), slot.0));
        None
    }

    /// Forgets a block if it points at `slot`; says whether it did.
    pub fn remove(&mut self, volume: VolumeIndex, lba: Lba, slot: Slot) -> bool {
        let home = self.shape.home(volume, lba);
        if let Some(at) = self.find(home) {
            if self.shape.slot(self.cells[at]) != slot {
                return false;
            }
            let base = home.page * PAGE_CELLS;
            self.shape.close_gap(&mut self.cells[base..base + PAGE_CELLS], at - base);
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
        let cell = self.find(self.shape.home(volume, lba)).map(|at| self.cells[at]);
        cell.is_some_and(|cell| cell & REFERENCED != 0 && self.shape.slot(cell) == slot)
    }

    /// The same index for a cache of another size, in memory that is there: [`Index::cell_count`] cells, all zero.
    /// Keys keep their order from page to page, so both tables are gone through from the front.
    pub(crate) fn resized(&self, slots: u64, cells: Vec<u64>) -> Index {
        assert!(self.used <= slots); // I3
        let mut next = Index::over(slots, self.shape.salt, cells);
        for (page, cells) in self.cells.chunks(PAGE_CELLS).enumerate() {
            for cell in cells.iter().filter(|cell| **cell != 0) {
                let hash = self.shape.hash(Home { page, rest: self.shape.rest(*cell) });
                next.put_hash(hash, self.shape.slot(*cell), *cell & REFERENCED);
            }
        }
        for (key, slot) in &self.overflow {
            next.put_hash(mix(key ^ self.shape.salt), Slot(*slot), 0);
        }
        next
    }

    /// Puts a key in place that is not there, by its hash.
    fn put_hash(&mut self, hash: u64, slot: Slot, referenced: u64) {
        let home = self.shape.home_of(hash);
        let base = home.page * PAGE_CELLS;
        let page = &mut self.cells[base..base + PAGE_CELLS];
        self.used += 1;
        match self.shape.probe(page, home.rest) {
            (Some(at), found) => {
                debug_assert!(!found, "a key is there once"); // I1
                page[at] = self.shape.cell(home.rest, slot) | referenced;
            }
            (None, _) => {
                assert!(self.overflow.len() < OVERFLOW_MAX, "the index's overflow is full");
                self.overflow.push((unmix(hash) ^ self.shape.salt, slot.0));
            }
        }
    }

    /// Pages of the table.
    pub fn page_count(&self) -> u32 {
        self.shape.page_count as u32
    }

    /// A page as a checkpoint has it, and how many words that are: which cells are not empty, bit by
    /// bit, then those cells.
    pub(crate) fn pack_page(&self, page: u32, words: &mut [u64; PACKED_WORDS_MAX]) -> usize {
        let base = page as usize * PAGE_CELLS;
        let cells = &self.cells[base..base + PAGE_CELLS];
        let (map, used) = words.split_first_chunk_mut::<MAP_WORDS>().expect("it is longer");
        let mut end = 0;
        for (map, cells) in map.iter_mut().zip(cells.chunks(64)) {
            *map = 0;
            // As many as there are cells: an empty one is overwritten by the next, or does not count.
            let used = &mut used[end..];
            let mut count = 0;
            for (bit, cell) in cells.iter().enumerate() {
                used[count] = *cell;
                *map |= u64::from(*cell != 0) << bit;
                count += usize::from(*cell != 0);
            }
            end += count;
        }
        MAP_WORDS + end
    }

    /// Whether every key found room in its page: a checkpoint holds pages only.
    pub fn is_in_pages(&self) -> bool {
        self.overflow.is_empty()
    }

    /// What tells where keys belong.
    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// All cells, page by page: to be filled from a checkpoint, [`Shape::put_page`] each. Then
    /// [`Index::count`].
    pub(crate) fn cells_mut(&mut self) -> &mut [u64] {
        &mut self.cells
    }

    /// Says how many keys there are, after all pages were put in place.
    pub(crate) fn count(&mut self, used: u64) {
        self.used = used;
    }

    /// The table in so many parts, each for a worker of its own; none while keys are out of their
    /// pages, where nobody but the whole index finds them.
    pub(crate) fn parts(&mut self, count: usize) -> Option<Vec<Part<'_>>> {
        if !self.overflow.is_empty() {
            return None;
        }
        let pages = (self.shape.page_count as usize).div_ceil(count.max(1));
        let shape = self.shape;
        let parts = self.cells.chunks_mut(pages * PAGE_CELLS).enumerate();
        Some(parts.map(|(at, cells)| Part { shape, first: at * pages, cells }).collect())
    }

    /// Takes note of what a worker did to a part of the table; who had it do so inserts what it
    /// spilled.
    pub(crate) fn join(&mut self, result: &PartResult) {
        self.used += result.added;
    }

    #[inline]
    fn find(&self, home: Home) -> Option<usize> {
        let base = home.page * PAGE_CELLS;
        let (at, found) = self.shape.probe(&self.cells[base..base + PAGE_CELLS], home.rest);
        at.filter(|_| found).map(|at| base + at)
    }
}

/// Pages of an index that one worker changes: of all keys it takes those that belong there.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    shape: Shape,
    /// Its first page.
    first: usize,
    cells: &'a mut [u64],
}

/// What a worker has to tell of its part.
#[derive(Debug, Default)]
pub(crate) struct PartResult {
    added: u64,
    /// Slots whose keys found their page full, in order.
    pub(crate) spilled: Vec<Slot>,
}

impl Part<'_> {
    /// Points blocks at slots, in order; those that belong to other parts are theirs. `prefetch` has a cell
    /// brought near.
    ///
    /// Each key is somewhere else, and that is a miss of every cache and of the TLB. So they are
    /// first put in the order of groups of pages (and in a group in the order they had), and their cells are asked
    /// for some keys ahead.
    pub(crate) fn insert_all(
        &mut self,
        volume: VolumeIndex,
        all: impl Iterator<Item = (Lba, Slot)> + Clone,
        prefetch: impl Fn(&u64),
        result: &mut PartResult,
    ) {
        let groups = (self.cells.len() / PAGE_CELLS).div_ceil(GROUP_PAGES);
        // Where each group's keys begin: at first how many the group before has.
        let mut begins = alloc::vec![0_usize; groups + 1];
        all.clone().for_each(|(lba, _)| {
            if let Some(home) = self.home(volume, lba) {
                begins[home.page / GROUP_PAGES + 1] += 1;
            }
        });
        for group in 0..groups {
            begins[group + 1] += begins[group];
        }
        let mut sorted = alloc::vec![(0_u32, 0_u64); begins[groups]];
        all.for_each(|(lba, slot)| {
            if let Some(home) = self.home(volume, lba) {
                let next = &mut begins[home.page / GROUP_PAGES];
                sorted[*next] = (home.page as u32, self.shape.cell(home.rest, slot));
                *next += 1;
            }
        });
        for (at, (page, cell)) in sorted.iter().enumerate() {
            if let Some((page, cell)) = sorted.get(at + AHEAD) {
                let base = *page as usize * PAGE_CELLS;
                let start = self.shape.start(self.shape.rest(*cell));
                for line in 0..PROBED_LINES {
                    prefetch(&self.cells[base + (start + line * LINE_CELLS).min(PAGE_CELLS - 1)]);
                }
            }
            let base = *page as usize * PAGE_CELLS;
            let (rest, slot) = (self.shape.rest(*cell), self.shape.slot(*cell));
            match self.shape.put(&mut self.cells[base..base + PAGE_CELLS], rest, slot) {
                Put::Added => result.added += 1,
                Put::Replaced(_) => {}
                Put::Full => result.spilled.push(slot),
            }
        }
    }

    /// Where a key belongs, its page counted within the part; none: in another part.
    #[inline]
    fn home(&self, volume: VolumeIndex, lba: Lba) -> Option<Home> {
        let Home { page, rest } = self.shape.home(volume, lba);
        let page = page.checked_sub(self.first)?;
        (page < self.cells.len() / PAGE_CELLS).then_some(Home { page, rest })
    }
}

impl Shape {
    /// Puts a page's cells back in place, from a checkpoint: `map` says which cells are not empty, and
    /// `used` what they hold, as many as it has bits. Those whose slot `keep` does not want are left
    /// out. Returns how many are left; none: this is no page. All cells are empty before.
    pub(crate) fn put_page(
        &self,
        page: &mut [u64],
        map: &[u64; MAP_WORDS],
        mut used: &[u64],
        keep: impl Fn(Slot) -> bool,
    ) -> Option<u64> {
        if map[MAP_WORDS - 1] >> (PAGE_CELLS % 64) != 0 {
            return None;
        }
        let count = used.len() as u64;
        let mut unwanted = false;
        for (word, cells) in map.iter().zip(page.chunks_mut(64)) {
            let mut left = *word;
            for cell in used.split_off(..word.count_ones() as usize)? {
                cells[left.trailing_zeros() as usize] = *cell;
                unwanted |= *cell == 0 || !keep(self.slot(*cell));
                left &= left - 1;
            }
        }
        if !unwanted {
            return Some(count);
        }
        self.sweep(page, keep);
        Some(page.iter().filter(|cell| **cell != 0).count() as u64)
    }

    fn sweep(&self, page: &mut [u64], keep: impl Fn(Slot) -> bool) {
        let mut at = 0;
        while at < page.len() {
            let cell = page[at];
            if cell == 0 || keep(self.slot(cell)) {
                at += 1;
            } else {
                // Another cell may have moved here: it is looked at next. One that wrapped round
                // from the page's end is looked at again there, or was before.
                self.close_gap(page, at);
            }
        }
    }

    #[inline]
    fn home(&self, volume: VolumeIndex, lba: Lba) -> Home {
        self.home_of(mix(key(volume, lba) ^ self.salt))
    }

    #[inline]
    fn home_of(&self, hash: u64) -> Home {
        let wide = u128::from(hash) * u128::from(self.page_count);
        let page = (wide >> KEY_BITS) as usize;
        // Keys of one page have products that differ by at least `page_count`: what is left after
        // dropping that many low bits still tells them apart.
        let rest = (wide as u64 & KEY_MASK) >> (KEY_BITS - self.rest_bits);
        Home { page, rest }
    }

    /// The one hash that belongs there: the first whose product is not below what is known of it.
    fn hash(&self, home: Home) -> u64 {
        let low = home.rest << (KEY_BITS - self.rest_bits);
        let wide = (home.page as u128) << KEY_BITS | u128::from(low);
        wide.div_ceil(u128::from(self.page_count)) as u64
    }

    #[inline]
    fn start(&self, rest: u64) -> usize {
        ((rest * PAGE_CELLS as u64) >> self.rest_bits) as usize
    }

    #[inline]
    fn slot(&self, cell: u64) -> Slot {
        Slot(((cell & !FLAGS) >> self.rest_bits) as u32)
    }

    #[inline]
    fn rest(&self, cell: u64) -> u64 {
        cell & ((1 << self.rest_bits) - 1)
    }

    #[inline]
    fn cell(&self, rest: u64, slot: Slot) -> u64 {
        USED | u64::from(slot.0) << self.rest_bits | rest
    }

    /// Puts a key into its page.
    #[inline]
    fn put(&self, page: &mut [u64], rest: u64, slot: Slot) -> Put {
        let (at, found) = self.probe(page, rest);
        let Some(at) = at else { return Put::Full };
        let before = core::mem::replace(&mut page[at], self.cell(rest, slot));
        if found { Put::Replaced(self.slot(before)) } else { Put::Added }
    }

    /// The cell of a key within its page, or else the empty one where it would go, if there is
    /// one; and whether it is the key's.
    #[inline]
    fn probe(&self, page: &[u64], rest: u64) -> (Option<usize>, bool) {
        let rest_mask = (1 << self.rest_bits) - 1;
        let start = self.start(rest);
        for (at, cell) in page.iter().enumerate().skip(start) {
            if *cell == 0 || cell & rest_mask == rest {
                return (Some(at), *cell != 0);
            }
        }
        for (at, cell) in page[..start].iter().enumerate() {
            if *cell == 0 || cell & rest_mask == rest {
                return (Some(at), *cell != 0);
            }
        }
        (None, false)
    }

    /// Moves later cells of the probe sequence back over the cell at `gap` (I2).
    ///
    /// Whether one moves cannot be foretold, so there is no branch for it: it is put into the gap in any
    /// case, which stays the gap if the cell does not move, and is overwritten.
    fn close_gap(&self, page: &mut [u64], mut gap: usize) {
        let rest_mask = (1 << self.rest_bits) - 1;
        let page = page.first_chunk_mut::<PAGE_CELLS>().expect("a page is so long");
        let mut at = gap;
        for _ in 0..PAGE_CELLS - 1 {
            at = next(at);
            let cell = page[at];
            if cell == 0 {
                break;
            }
            let home = self.start(cell & rest_mask);
            // It stays if its home lies behind the gap, up to its cell: of the three two hold, wherever the page's end is.
            let stays = u8::from(gap < home) + u8::from(home <= at) + u8::from(at < gap) == 2;
            let moves = !stays;
            page[gap] = cell;
            gap = core::hint::select_unpredictable(moves, at, gap);
        }
        page[gap] = 0;
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
#[inline]
fn mix(key: u64) -> u64 {
    stir(key, MIX)
}

/// Inverses of [`MIX`], the last first.
const UNMIX: [u64; 2] = [0x05A0_9058_81E9, 0x44C9_3A86_55A9];
const _: () = assert!(MIX[0].wrapping_mul(UNMIX[1]) & KEY_MASK == 1);
const _: () = assert!(MIX[1].wrapping_mul(UNMIX[0]) & KEY_MASK == 1);

/// What [`mix`] makes this of.
fn unmix(mixed: u64) -> u64 {
    stir(mixed, UNMIX)
}

/// Each shift is its own inverse: they are half of the bits, or more.
#[inline]
fn stir(mut x: u64, by: [u64; 2]) -> u64 {
    x ^= x >> 24;
    x = x.wrapping_mul(by[0]) & KEY_MASK;
    x ^= x >> 25;
    x = x.wrapping_mul(by[1]) & KEY_MASK;
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
    fn another_size_has_the_same_keys_and_knows_which_were_read() {
        let (mut state, key) = (0x9E37_79B9, 0x1234_5678_9abc);
        for (before, after) in [(1, 900), (5_000, 5_200), (5_000, 90_000), (90_000, 30_011)] {
            let mut index = Index::new(before, key);
            let mut model = BTreeMap::new();
            for slot in 0..before.min(after) as u32 {
                let (volume, lba) = (VolumeIndex((slot % 60) as u8), Lba(random(&mut state) >> 25));
                index.insert(volume, lba, Slot(slot));
                if slot % 3 == 0 {
                    index.read(volume, lba);
                }
                model.insert((volume.0, lba), slot);
            }
            let next = index.resized(after, alloc::vec![0; Index::cell_count(after)]);
            assert_eq!(next.len(), model.len() as u64);
            for ((volume, lba), slot) in &model {
                let volume = VolumeIndex(*volume);
                assert_eq!(next.get(volume, *lba), Some(Slot(*slot)));
                assert_eq!(next.is_referenced(volume, *lba, Slot(*slot)), slot % 3 == 0);
            }
            assert_eq!(next.get(VolumeIndex(63), Lba(7)), None);
            let any = random(&mut state) & KEY_MASK;
            assert_eq!(unmix(mix(any)), any);
        }
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
    fn pages_put_back_lack_what_is_not_wanted_and_nothing_else() {
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
            let (cells, shape) = (index.cells.clone(), index.shape());
            let pages: alloc::vec::Vec<_> = (0..index.page_count())
                .map(|page| {
                    let mut words = [0; PACKED_WORDS_MAX];
                    let end = index.pack_page(page, &mut words);
                    (words, end)
                })
                .collect();
            let put = |index: &mut Index, keep: fn(Slot) -> bool| {
                index.cells.fill(0);
                let all = index.cells_mut().chunks_mut(PAGE_CELLS).zip(&pages);
                let used = all.map(|(page, (words, end))| {
                    let (map, used) = words[..*end].split_first_chunk().expect("the bits");
                    shape.put_page(page, map, used, keep).expect("it is a page")
                });
                let used = used.sum();
                index.count(used);
            };
            put(&mut index, |_| true);
            assert_eq!(index.cells, cells);
            assert_eq!(index.len(), keys.len() as u64);
            put(&mut index, |slot| slot.0 % 3 != 1);
            keys.retain(|_, slot| slot.0 % 3 != 1);
            assert_eq!(index.len(), keys.len() as u64);
            assert!(keys.iter().all(|(key, slot)| index.get(key.0, key.1) == Some(*slot)));
        }
    }

    #[test]
    fn a_full_page_is_packed_and_bits_without_a_cell_are_refused() {
        let mut index = Index::new(1, 5);
        for lba in 0..PAGE_CELLS as u64 {
            index.insert(VolumeIndex(0), Lba(lba), Slot(lba as u32));
        }
        let mut words = [0; PACKED_WORDS_MAX];
        assert_eq!(index.pack_page(0, &mut words), PACKED_WORDS_MAX);
        let (map, used) = words.split_first_chunk_mut().expect("the bits");
        let (shape, mut page) = (index.shape(), [0; PAGE_CELLS]);
        let used: &[u64] = used;
        assert_eq!(shape.put_page(&mut page, map, used, |_| true), Some(PAGE_CELLS as u64));
        assert_eq!(page[..], index.cells[..]);
        map[7] |= 1 << 60;
        assert_eq!(shape.put_page(&mut page, map, used, |_| true), None, "there is no such cell");
        map[7] &= !(1 << 60);
        map[0] = 0;
        assert!(shape.put_page(&mut page, map, &used[..5], |_| true).is_none(), "too few cells");
        // A cell that is said not to be empty and is holds nothing.
        let (mut page, mut map) = ([0; PAGE_CELLS], [0; MAP_WORDS]);
        map[1] = 1;
        assert_eq!(shape.put_page(&mut page, &map, &[0], |_| true), Some(0));
    }

    #[test]
    fn workers_on_parts_make_the_index_that_one_alone_makes() {
        // The last holds more keys than its pages: some are put aside.
        for (slots, keys) in [(10, 10), (100_000, 100_000), (1, PAGE_CELLS as u64 + 100)] {
            let all: alloc::vec::Vec<(Lba, Slot)> = {
                let mut seed = 4711 + slots;
                let lba = |_| Lba(random(&mut seed) % keys);
                let lbas: alloc::vec::Vec<Lba> = match slots {
                    1 => (0..keys).chain(keys - 200..keys).map(Lba).collect(),
                    _ => (0..2 * keys).map(lba).collect(),
                };
                lbas.into_iter().zip((0..).map(Slot)).collect()
            };
            let mut alone = Index::new(slots, 99);
            for (lba, slot) in &all {
                alone.insert(VolumeIndex(3), *lba, *slot);
            }
            for count in [1, 2, 5] {
                let mut index = Index::new(slots, 99);
                let parts = index.parts(count).expect("nothing is out of its page");
                let mut results = alloc::vec::Vec::new();
                for mut part in parts {
                    let mut result = PartResult::default();
                    for some in all.chunks(all.len() / 3) {
                        part.insert_all(VolumeIndex(3), some.iter().copied(), |_| {}, &mut result);
                    }
                    results.push(result);
                }
                for result in &results {
                    index.join(result);
                    for slot in &result.spilled {
                        index.insert(VolumeIndex(3), all[slot.0 as usize].0, *slot);
                    }
                }
                assert_eq!(index.len(), alone.len());
                for (lba, _) in &all {
                    let found = index.get(VolumeIndex(3), *lba);
                    assert_eq!(found, alone.get(VolumeIndex(3), *lba));
                }
            }
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
