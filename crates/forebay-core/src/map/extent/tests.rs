// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use alloc::vec::Vec;

struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % below
    }
}

type Cell = Option<(Position, Kind, bool)>;

/// A map beside one that says of each cell what is over it. Cell `i` is the blocks from `bounds[i]`
/// to `bounds[i + 1]`.
struct Pair {
    map: ExtentMap,
    cells: Vec<Cell>,
    bounds: Vec<u64>,
}

impl Pair {
    fn new(count_max: usize, bounds: Vec<u64>) -> Pair {
        let cells = alloc::vec![None; bounds.len() - 1];
        Pair { map: ExtentMap::new(count_max), cells, bounds }
    }

    fn range(&self, random: &mut Random, longest: u64) -> (usize, usize) {
        let count = self.cells.len() as u64;
        let start = random.below(count);
        // One in so many runs to an end, so that the limits are met.
        let start = if random.below(400) == 0 { 0 } else { start };
        let end = (start + 1 + random.below(longest)).min(count);
        (start as usize, if random.below(400) == 0 { count as usize } else { end as usize })
    }

    fn insert(&mut self, (start, end): (usize, usize), cell: (Position, Kind, bool)) {
        self.cells[start..end].fill(Some(cell));
        let (start, end) = (Lba(self.bounds[start]), Lba(self.bounds[end]));
        let (position, kind, long) = cell;
        self.map.insert(Extent { start, end, position, kind, long });
    }

    fn erase(&mut self, (start, end): (usize, usize)) {
        self.cells[start..end].fill(None);
        self.map.erase(Lba(self.bounds[start]), Lba(self.bounds[end]));
    }

    fn remove_older(&mut self, ordinal: Ordinal) {
        self.map.remove_where(|extent| extent.position.ordinal() < ordinal);
        for cell in &mut self.cells {
            *cell = cell.filter(|cell| cell.0.ordinal() >= ordinal);
        }
    }

    /// What the map should hold: runs of cells that are alike.
    fn expected(&self) -> Vec<Extent> {
        let mut all: Vec<Extent> = Vec::new();
        for (at, cell) in self.cells.iter().enumerate() {
            let Some((position, kind, long)) = *cell else { continue };
            let (start, end) = (Lba(self.bounds[at]), Lba(self.bounds[at + 1]));
            let new = Extent { start, end, position, kind, long };
            match all.last_mut().filter(|last| joins(last, &new)) {
                Some(last) => last.end = end,
                None => all.push(new),
            }
        }
        all
    }

    fn check(&self, random: &mut Random, what: &str) {
        self.map.check_invariants();
        let expected = self.expected();
        assert!(self.map.iter().eq(&expected), "{what}");
        assert_eq!((self.map.len(), self.map.is_empty()), (expected.len(), expected.is_empty()));
        let lost = expected.iter().filter(|extent| extent.kind == Kind::Lost).count();
        assert_eq!(self.map.lost_len(), lost, "{what}");
        for (at, cell) in self.cells.iter().enumerate() {
            let (first, last) = (self.bounds[at], self.bounds[at + 1] - 1);
            for lba in [first, first + (last - first) / 2, last] {
                let found = self.map.get(Lba(lba));
                let found = found.map(|extent| (extent.position, extent.kind, extent.long));
                assert_eq!(found, *cell, "{what}, block {lba}");
            }
        }
        let (start, end) = self.range(random, 20);
        let (start, end) = (Lba(self.bounds[start]), Lba(self.bounds[end]));
        let inside = expected.iter().filter(|extent| extent.start < end && start < extent.end);
        assert!(self.map.overlapping(start, end).eq(inside), "{what}: {start:?} to {end:?}");
    }
}

/// Cells of one block and of billions in turn, from block 0 to the last that has a number.
fn wide_bounds(cells: u64) -> Vec<u64> {
    let step = u64::MAX / (cells / 2 + 1);
    let mut bounds: Vec<u64> = (0..cells / 2).flat_map(|at| [at * step, at * step + 1]).collect();
    bounds.push(u64::MAX);
    bounds
}

#[test]
fn agrees_with_a_model_of_blocks() {
    let narrow = |cells: u64| (0..=cells).collect::<Vec<u64>>();
    let rounds = [
        // Few cells and much overlap; room to spare.
        (512, narrow(200), 10, 4_000),
        (512, wide_bounds(200), 10, 4_000),
        // Many chunks, filled to the limit again and again.
        (600, narrow(3_000), 3, 6_000),
        (600, wide_bounds(3_000), 3, 6_000),
        // Hardly any room at all.
        (2, narrow(60), 5, 2_000),
        (7, wide_bounds(60), 5, 2_000),
    ];
    for (seed, (count_max, bounds, longest, steps)) in rounds.into_iter().enumerate() {
        let mut random = Random(seed as u64 * 77 + 1);
        let mut pair = Pair::new(count_max, bounds);
        let mut full = 0;
        for step in 0..steps {
            let ordinal = step / 3;
            let position = Position::new(Ordinal(ordinal), 0);
            let kind = [Kind::Zero, Kind::Discard, Kind::Lost][random.below(3) as usize];
            let longest = if random.below(800) == 0 { 100_000 } else { longest };
            let range = pair.range(&mut random, longest);
            let has_room = pair.map.has_room();
            full += usize::from(!has_room);
            match random.below(10) {
                _ if !has_room => match random.below(3) {
                    0 => pair.remove_older(Ordinal(ordinal / 2)),
                    1 => pair.erase((0, range.1)),
                    _ => pair.erase((range.0, pair.cells.len())),
                },
                0 => pair.erase(range),
                1 if random.below(100) == 0 => pair.remove_older(Ordinal(ordinal / 4 * 3)),
                1 if random.below(300) == 0 => {
                    pair.map.clear();
                    pair.cells.fill(None);
                }
                _ => pair.insert(range, (position, kind, random.below(9) == 0)),
            }
            if step % 17 == 0 || count_max < 100 {
                pair.check(&mut random, &alloc::format!("room for {count_max}, step {step}"));
            }
        }
        assert!(full > 0 || count_max == 512, "room for {count_max}: it was never full");
    }
}

/// Every order of filling a map to its limit finds room, and what is there stays.
#[test]
fn the_pool_holds_as_many_as_it_was_made_for() {
    for count_max in [2, 3, 50, 700, 5_000] {
        for order in 0..4u64 {
            let bounds = (0..=2 * count_max as u64 + 2).collect();
            let mut pair = Pair::new(count_max, bounds);
            let mut random = Random(order);
            let mut next = 0;
            while pair.map.has_room() {
                // One cell in two, so that none joins another.
                let cell = match order {
                    0 => next,
                    1 => count_max - next,
                    2 => random.below(count_max as u64) as usize,
                    _ => next.wrapping_mul(7_919) % count_max,
                };
                next += 1;
                let position = Position::new(Ordinal(next as u64), 0);
                pair.insert((2 * cell, 2 * cell + 1), (position, Kind::Zero, false));
            }
            pair.check(&mut random, &alloc::format!("order {order}, room for {count_max}"));
            assert!(pair.map.len() + 2 > count_max);
        }
    }
}

/// The worst a guest can do at the limit: one extent over many, then many again in one place.
#[test]
fn at_the_limit_places_may_thin_out_and_fill_again() {
    let count_max = 2_000;
    let mut pair = Pair::new(count_max, (0..=2 * count_max as u64).collect());
    let mut random = Random(3);
    for step in 0..60_000u64 {
        let position = Position::new(Ordinal(step), 0);
        let cell = (position, Kind::Zero, false);
        if pair.map.has_room() {
            // Fills a narrow range in the middle, from either side.
            let at = 2 * (random.below(count_max as u64 / 4) + count_max as u64 / 4 * (step % 4));
            pair.insert((at as usize, at as usize + 1), cell);
        } else {
            let start = random.below(2 * count_max as u64 - 101) as usize;
            pair.insert_wide((start, start + 100), cell);
        }
        if step % 1_000 == 0 {
            pair.check(&mut random, &alloc::format!("step {step}"));
        }
    }
}

impl Pair {
    /// An extent over many others takes no more room than there was.
    fn insert_wide(&mut self, range: (usize, usize), cell: (Position, Kind, bool)) {
        self.erase(range);
        if self.map.has_room() {
            self.insert(range, cell);
        }
    }
}

#[test]
fn past_the_limit_room_is_made() {
    let mut map = ExtentMap::new(4);
    for at in 0..1_000 {
        map.make_room();
        let (start, end) = (Lba(2 * at), Lba(2 * at + 1));
        let position = Position::new(Ordinal(at), 0);
        map.insert(Extent { start, end, position, kind: Kind::Lost, long: false });
    }
    map.check_invariants();
    assert_eq!((map.len(), map.lost_len(), map.has_room()), (1_000, 1_000, false));
    map.make_room_for(100);
    assert!(map.has_room_for(100) && !map.has_room_for(101));
}

#[test]
fn what_does_not_fit_says_what_it_needs_and_takes_no_more_than_that() {
    for (guests, lost) in
        [(0, 0), (24, 508), (25, 0), (24, 509), (3, 9_000), (9_000, 3), (5_000, 700)]
    {
        let mut map = ExtentMap::with_lost_room(24);
        for at in 0..guests + lost {
            map.make_room();
            let (start, end) = (Lba(2 * at), Lba(2 * at + 1));
            let kind = if at < guests { Kind::Zero } else { Kind::Lost };
            let position = Position::new(Ordinal(at), 0);
            map.insert(Extent { start, end, position, kind, long: false });
        }
        let room = map.fitting(24);
        let fits = |room: usize| room >= guests as usize && room + lost_room(room) >= map.len();
        assert!(fits(room) && (room == 24 || !fits(room - 1)), "{guests} + {lost}: {room}");
        let before: Vec<Extent> = map.iter().copied().collect();
        let map = map.refit(room);
        map.check_invariants();
        assert_eq!(map.iter().copied().collect::<Vec<_>>(), before);
        assert_eq!(map.held_bytes(), ExtentMap::memory_bytes(room + lost_room(room)));
    }
}

#[test]
fn a_block_is_cut_out_of_billions() {
    let mut map = ExtentMap::new(4);
    let position = Position::new(Ordinal(1), 0);
    let (kind, long) = (Kind::Zero, true);
    map.insert(Extent { start: Lba(0), end: Lba(u64::MAX), position, kind, long });
    map.cut(Lba(1 << 40));
    map.cut(Lba(u64::MAX - 1));
    map.cut(Lba(0));
    map.check_invariants();
    let found: Vec<(u64, u64)> = map.iter().map(|it| (it.start.0, it.end.0)).collect();
    assert_eq!(found, [(1, 1 << 40), ((1 << 40) + 1, u64::MAX - 1)]);
}
