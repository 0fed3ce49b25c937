// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What forebay's choice of blocks is compared with: exact LRU, FIFO and S3-FIFO over blocks, as the literature has
//! them. Each takes whatever is touched, read or written.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// A cache of blocks.
pub trait Cache {
    /// A block is read or written; says whether it was there.
    fn touch(&mut self, block: u64) -> bool;
}

/// What was touched longest ago goes: of what nobody writes, [`LoggedLru`] is that.
#[derive(Debug)]
pub struct Lru(LoggedLru);

impl Lru {
    /// With room for so many blocks.
    pub fn new(capacity: usize) -> Lru {
        Lru(LoggedLru::new(capacity))
    }
}

impl Cache for Lru {
    fn touch(&mut self, block: u64) -> bool {
        self.0.touch(block, false)
    }
}

/// LRU of what a log holds: a block that is written again is there twice, and the older version keeps its room until its time comes.
/// That a read moves a block to the other end, no log can do for nothing.
#[derive(Debug)]
pub struct LoggedLru {
    capacity: usize,
    now: u64,
    newest: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl LoggedLru {
    /// With room for so many versions.
    pub fn new(capacity: usize) -> LoggedLru {
        LoggedLru { capacity, now: 0, newest: HashMap::new(), order: BTreeMap::new() }
    }

    /// A block is read or written; says whether it was there.
    pub fn touch(&mut self, block: u64, write: bool) -> bool {
        self.now += 1;
        let before = self.newest.insert(block, self.now);
        if let Some(before) = before.filter(|_| !write) {
            self.order.remove(&before);
        }
        self.order.insert(self.now, block);
        if self.order.len() > self.capacity
            && let Some((at, oldest)) = self.order.pop_first()
            && self.newest[&oldest] == at
        {
            self.newest.remove(&oldest);
        }
        before.is_some()
    }
}

/// What came first goes.
#[derive(Debug)]
pub struct Fifo {
    capacity: usize,
    held: HashSet<u64>,
    queue: VecDeque<u64>,
}

impl Fifo {
    /// With room for so many blocks.
    pub fn new(capacity: usize) -> Fifo {
        Fifo { capacity, held: HashSet::new(), queue: VecDeque::new() }
    }
}

impl Cache for Fifo {
    fn touch(&mut self, block: u64) -> bool {
        if !self.held.insert(block) {
            return true;
        }
        self.queue.push_back(block);
        if self.queue.len() > self.capacity
            && let Some(oldest) = self.queue.pop_front()
        {
            self.held.remove(&oldest);
        }
        false
    }
}

/// S3-FIFO (SOSP 2023): a small queue for what is new, a main queue for what was touched in it at least twice, and
/// a ghost of what was not.
#[derive(Debug)]
pub struct S3Fifo {
    capacity: usize,
    /// Touches since it was queued, up to 3.
    held: HashMap<u64, u8>,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghost: VecDeque<u64>,
    ghosts: HashMap<u64, u32>,
}

impl S3Fifo {
    /// With room for so many blocks.
    pub fn new(capacity: usize) -> S3Fifo {
        S3Fifo {
            capacity,
            held: HashMap::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: VecDeque::new(),
            ghosts: HashMap::new(),
        }
    }

    fn evict(&mut self) {
        if self.small.len() <= self.capacity / 10 && !self.main.is_empty() {
            return self.evict_main();
        }
        while let Some(block) = self.small.pop_front() {
            if self.held[&block] > 1 {
                self.held.insert(block, 0);
                self.main.push_back(block);
                if self.main.len() > self.capacity * 9 / 10 {
                    return self.evict_main();
                }
            } else {
                self.held.remove(&block);
                return self.remember(block);
            }
        }
    }

    fn evict_main(&mut self) {
        while let Some(block) = self.main.pop_front() {
            let touches = self.held[&block];
            if touches == 0 {
                self.held.remove(&block);
                return;
            }
            self.held.insert(block, touches - 1);
            self.main.push_back(block);
        }
    }

    fn remember(&mut self, block: u64) {
        self.ghost.push_back(block);
        *self.ghosts.entry(block).or_default() += 1;
        if self.ghost.len() > self.capacity * 9 / 10
            && let Some(oldest) = self.ghost.pop_front()
            && let Some(count) = self.ghosts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.ghosts.remove(&oldest);
            }
        }
    }
}

impl Cache for S3Fifo {
    fn touch(&mut self, block: u64) -> bool {
        if let Some(touches) = self.held.get_mut(&block) {
            *touches = (*touches + 1).min(3);
            return true;
        }
        while self.held.len() >= self.capacity {
            self.evict();
        }
        self.held.insert(block, 0);
        match self.ghosts.contains_key(&block) {
            true => self.main.push_back(block),
            false => self.small.push_back(block),
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(cache: &mut dyn Cache, blocks: impl IntoIterator<Item = u64>) -> Vec<bool> {
        blocks.into_iter().map(|block| cache.touch(block)).collect()
    }

    #[test]
    fn lru_keeps_what_was_touched_last() {
        let mut cache = Lru::new(2);
        assert_eq!(hits(&mut cache, [1, 2, 1, 3, 1, 2]), [false, false, true, false, true, false]);
    }

    #[test]
    fn an_older_version_keeps_its_room_until_its_time_comes() {
        let (mut logged, mut lru) = (LoggedLru::new(3), Lru::new(3));
        let asks = [(1, true), (2, false), (2, true), (3, false), (1, false), (2, false)];
        let hits = asks.map(|(block, write)| (logged.touch(block, write), lru.touch(block)));
        // With the older version of 2 there is no room for 1.
        assert_eq!(hits.map(|hit| hit.0), [false, false, true, false, false, true]);
        assert_eq!(hits.map(|hit| hit.1), [false, false, true, false, true, true]);
    }

    #[test]
    fn fifo_keeps_what_came_last() {
        let mut cache = Fifo::new(2);
        assert_eq!(hits(&mut cache, [1, 2, 1, 3, 1]), [false, false, true, false, false]);
    }

    /// What is touched again and again survives a scan, where LRU loses it.
    #[test]
    fn s3_fifo_resists_a_scan() {
        let (mut s3, mut lru) = (S3Fifo::new(100), Lru::new(100));
        for cache in [&mut s3 as &mut dyn Cache, &mut lru] {
            (0..8).for_each(|_| drop(hits(cache, 0..50)));
            hits(cache, 1000..2000);
        }
        let kept = |cache: &mut dyn Cache| hits(cache, 0..50).iter().filter(|hit| **hit).count();
        assert_eq!((kept(&mut s3), kept(&mut lru)), (50, 0));
        assert!(s3.held.len() <= 100 && s3.ghost.len() <= 100);
    }
}
