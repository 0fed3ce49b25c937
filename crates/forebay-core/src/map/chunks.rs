// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A sorted list of extents in chunks of a fixed pool: the storage of [`super::extent::ExtentMap`].
//!
//! A directory names the chunks in the order of their extents. Finding is two binary searches;
//! inserting and removing move the rest of one chunk. A full chunk is split; if the pool has no
//! chunk left, all extents are spread evenly first, which is sure to leave some.
//!
//! # Invariants
//!
//! - **E1** Extents are not empty, do not overlap and ascend, within chunks and from one to the next.
//! - **E2** A chunk in the directory holds at least one extent, and the directory knows where the
//!   first one starts.
//! - **E3** Every chunk of the pool is either in the directory, once, or free.
//! - **E4** No memory is taken but in `new` and `grow`.
//!
//! # Limits
//!
//! Made for so many extents, it has chunks for them all at seven eighths of their room, and a
//! sixteenth more. A spread leaves every chunk the same room and the sixteenth free, so that there
//! are insertions in proportion to the chunks until the next one, at the limit and in a worst order.
//!
//! # Not here
//!
//! What it means that one extent covers another: `extent`.

use super::extent::Extent;
use crate::format::entry::Kind;
use crate::memory::vec_bytes;
use crate::units::Lba;
use alloc::vec::Vec;

/// Extents in a chunk: two kibibytes.
const CHUNK: usize = 64;
/// Extents in a chunk after a spread, at most.
const FILL: usize = CHUNK / 8 * 7;

/// A place in the list: before the extent there, or at the end. Inserting and removing void it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    node: usize,
    offset: usize,
}

/// A chunk in the directory.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// Of its first extent.
    start: Lba,
    chunk: u32,
    count: u32,
}

/// The list.
#[derive(Debug)]
pub(super) struct Chunks {
    extents: Vec<Extent>,
    directory: Vec<Node>,
    free: Vec<u32>,
    /// Chunks that a spread leaves free.
    kept_free: usize,
    len: usize,
    lost: usize,
}

impl Chunks {
    /// An empty list with room for `room` extents.
    pub(super) fn new(room: usize) -> Chunks {
        let mut list = Chunks {
            extents: Vec::new(),
            directory: Vec::new(),
            free: Vec::new(),
            kept_free: 0,
            len: 0,
            lost: 0,
        };
        list.grow(room);
        list
    }

    /// Chunks for so many extents, and what a spread leaves free of them.
    fn chunk_count(room: usize) -> (usize, usize) {
        let free = room / (16 * CHUNK) + 2;
        (room.div_ceil(FILL) + free, free)
    }

    /// Bytes of memory of a list with this room.
    pub(super) fn memory_bytes(room: usize) -> u64 {
        let chunk = CHUNK * size_of::<Extent>() + size_of::<Node>() + size_of::<u32>();
        (Chunks::chunk_count(room).0 * chunk) as u64
    }

    /// Bytes of memory it takes.
    pub(super) fn held_bytes(&self) -> u64 {
        vec_bytes(&self.extents) + vec_bytes(&self.directory) + vec_bytes(&self.free)
    }

    /// Takes memory for more (at recovery).
    pub(super) fn grow(&mut self, room: usize) {
        let (new, free) = Chunks::chunk_count(room);
        let old = self.extents.len() / CHUNK;
        if new <= old {
            return;
        }
        self.kept_free = free;
        self.extents.reserve_exact(new * CHUNK - self.extents.len());
        self.extents.resize(new * CHUNK, Extent::VOID);
        self.directory.reserve_exact(new - self.directory.len());
        self.free.reserve_exact(new - self.free.len());
        self.free.extend((old as u32..new as u32).rev());
    }

    /// Extents there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Extents there are of lost blocks.
    pub(super) fn lost(&self) -> usize {
        self.lost
    }

    /// The first extent that ends behind `lba`.
    pub(super) fn seek(&self, lba: Lba) -> At {
        let node = self.directory.partition_point(|node| node.start <= lba).saturating_sub(1);
        if node == self.directory.len() {
            return At { node, offset: 0 };
        }
        let offset = self.chunk(node).partition_point(|extent| extent.end <= lba);
        self.normal(At { node, offset })
    }

    /// The extent there; none: it is the end.
    pub(super) fn get(&self, at: At) -> Option<&Extent> {
        (at.node < self.directory.len()).then(|| &self.chunk(at.node)[at.offset])
    }

    /// The place behind an extent.
    pub(super) fn next(&self, at: At) -> At {
        self.normal(At { offset: at.offset + 1, ..at })
    }

    /// The place of the extent before; none: there is none.
    pub(super) fn before(&self, at: At) -> Option<At> {
        match at.offset {
            0 => {
                let node = at.node.checked_sub(1)?;
                Some(At { node, offset: self.chunk(node).len() - 1 })
            }
            offset => Some(At { offset: offset - 1, ..at }),
        }
    }

    /// All from a place on, in order.
    pub(super) fn iter_from(&self, at: At) -> impl Iterator<Item = &Extent> {
        let rest = at.node + 1..self.directory.len().max(at.node + 1);
        let first = if at.node < self.directory.len() { self.chunk(at.node) } else { &[] };
        first[at.offset..].iter().chain(rest.flat_map(|node| self.chunk(node)))
    }

    /// Changes the bounds of the extent there, which keeps its place in the order.
    pub(super) fn set_bounds(&mut self, at: At, start: Lba, end: Lba) {
        let extent = &mut self.chunk_mut(at.node)[at.offset];
        (extent.start, extent.end) = (start, end);
        if at.offset == 0 {
            self.directory[at.node].start = start; // E2
        }
    }

    /// Puts an extent where nothing is; `at` is what a seek of its start found.
    pub(super) fn insert(&mut self, at: At, extent: Extent) {
        self.len += 1;
        self.lost += usize::from(extent.kind == Kind::Lost);
        if self.directory.is_empty() {
            let chunk = self.free.pop().expect("there is room");
            self.extents[chunk as usize * CHUNK] = extent;
            self.directory.push(Node { start: extent.start, chunk, count: 1 });
            return;
        }
        let mut at = self.behind(at);
        if self.chunk(at.node).len() == CHUNK {
            if self.free.is_empty() {
                self.spread();
                at = self.behind(self.seek(extent.start));
            }
            if self.chunk(at.node).len() == CHUNK {
                at = self.split(at);
            }
        }
        let node = &mut self.directory[at.node];
        let (base, count) = (node.chunk as usize * CHUNK, node.count as usize);
        node.count += 1;
        if at.offset == 0 {
            node.start = extent.start; // E2
        }
        let place = base + at.offset;
        self.extents.copy_within(place..base + count, place + 1);
        self.extents[place] = extent;
    }

    /// Removes what is between two places.
    pub(super) fn remove(&mut self, from: At, to: At) {
        if from.node == to.node {
            return self.remove_within(from.node, from.offset, to.offset);
        }
        if to.offset > 0 {
            self.remove_within(to.node, 0, to.offset);
        }
        let keeps = from.offset > 0;
        for node in from.node..to.node {
            let first = if node == from.node { from.offset } else { 0 };
            self.count_off(node, first, self.chunk(node).len());
        }
        if keeps {
            self.directory[from.node].count = from.offset as u32;
        }
        for node in self.directory.drain(from.node + usize::from(keeps)..to.node) {
            self.free.push(node.chunk); // E3
        }
    }

    /// Drops what `keep` does not want, keeping the order.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Extent) -> bool) {
        let mut nodes = 0;
        (self.len, self.lost) = (0, 0);
        for at in 0..self.directory.len() {
            let Node { chunk, count, .. } = self.directory[at];
            let base = chunk as usize * CHUNK;
            let mut kept = base;
            for from in base..base + count as usize {
                let extent = self.extents[from];
                if keep(&extent) {
                    self.extents[kept] = extent;
                    kept += 1;
                    self.lost += usize::from(extent.kind == Kind::Lost);
                }
            }
            if kept == base {
                self.free.push(chunk); // E3
                continue;
            }
            self.len += kept - base;
            let start = self.extents[base].start;
            self.directory[nodes] = Node { start, chunk, count: (kept - base) as u32 };
            nodes += 1;
        }
        self.directory.truncate(nodes);
    }

    fn chunk(&self, node: usize) -> &[Extent] {
        let Node { chunk, count, .. } = self.directory[node];
        &self.extents[chunk as usize * CHUNK..][..count as usize]
    }

    fn chunk_mut(&mut self, node: usize) -> &mut [Extent] {
        let Node { chunk, count, .. } = self.directory[node];
        &mut self.extents[chunk as usize * CHUNK..][..count as usize]
    }

    /// The end of a chunk is the beginning of the next.
    fn normal(&self, at: At) -> At {
        let end = at.offset == self.directory[at.node].count as usize;
        if end { At { node: at.node + 1, offset: 0 } } else { at }
    }

    /// The beginning of a chunk as the end of the one before, where an extent may be put too.
    fn behind(&self, at: At) -> At {
        match at.node.checked_sub(1) {
            Some(node) if at.offset == 0 => At { node, offset: self.chunk(node).len() },
            _ => at,
        }
    }

    /// These extents of a chunk go.
    fn count_off(&mut self, node: usize, from: usize, to: usize) {
        self.len -= to - from;
        if self.lost > 0 {
            let lost = |extent: &&Extent| extent.kind == Kind::Lost;
            self.lost -= self.chunk(node)[from..to].iter().filter(lost).count();
        }
    }

    /// Removes some of a chunk that keeps others.
    fn remove_within(&mut self, node: usize, from: usize, to: usize) {
        if from == to {
            return;
        }
        self.count_off(node, from, to);
        let Node { chunk, count, .. } = self.directory[node];
        let base = chunk as usize * CHUNK;
        self.extents.copy_within(base + to..base + count as usize, base + from);
        self.directory[node].count -= (to - from) as u32;
        self.directory[node].start = self.extents[base].start; // E2
    }

    /// Makes two chunks of a full one; returns where `at` is then. There is a free chunk.
    fn split(&mut self, at: At) -> At {
        let chunk = self.free.pop().expect("the caller looked");
        // Whoever appends leaves full chunks behind.
        let appends = at.node + 1 == self.directory.len() && at.offset == CHUNK;
        let half = if appends { CHUNK } else { CHUNK / 2 };
        let from = self.directory[at.node].chunk as usize * CHUNK;
        let to = chunk as usize * CHUNK;
        self.extents.copy_within(from + half..from + CHUNK, to);
        self.directory[at.node].count = half as u32;
        let count = (CHUNK - half) as u32;
        self.directory.insert(at.node + 1, Node { start: self.extents[to].start, chunk, count });
        match at.offset.checked_sub(half) {
            Some(offset) if offset > 0 || appends => At { node: at.node + 1, offset },
            _ => at,
        }
    }

    /// Leaves the same number of extents in all chunks, and some chunks free.
    fn spread(&mut self) {
        let base = |list: &Chunks, node: usize| list.directory[node].chunk as usize * CHUNK;
        // First to the front: what is written was read before, since no chunk holds more.
        let mut packed = 0;
        for node in 0..self.directory.len() {
            let from = base(self, node);
            for at in from..from + self.directory[node].count as usize {
                let to = base(self, packed / CHUNK) + packed % CHUNK;
                self.extents[to] = self.extents[at];
                packed += 1;
            }
        }
        let most = self.extents.len() / CHUNK - self.kept_free;
        let fill = packed.div_ceil(most);
        debug_assert!(fill <= FILL);
        let nodes = packed.div_ceil(fill);
        while self.directory.len() > nodes {
            self.free.extend(self.directory.pop().map(|node| node.chunk));
        }
        while self.directory.len() < nodes {
            let chunk = self.free.pop().expect("the pool has chunks for all it may hold");
            self.directory.push(Node { start: Lba(0), chunk, count: 0 });
        }
        // Then apart, from the last on: what is written lies behind what is still to be read.
        for at in (0..packed).rev() {
            let to = base(self, at / fill) + at % fill;
            self.extents[to] = self.extents[base(self, at / CHUNK) + at % CHUNK];
        }
        for node in 0..nodes {
            let start = self.extents[base(self, node)].start;
            let count = fill.min(packed - node * fill) as u32;
            let chunk = self.directory[node].chunk;
            self.directory[node] = Node { start, chunk, count };
        }
    }

    /// Looks at every invariant.
    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let mut last = Lba(0);
        let mut seen = alloc::vec![false; self.extents.len() / CHUNK];
        let (mut len, mut lost) = (0, 0);
        for (at, node) in self.directory.iter().enumerate() {
            assert!((1..=CHUNK).contains(&(node.count as usize)), "E2: chunk {at}");
            assert_eq!(node.start, self.chunk(at)[0].start, "E2: chunk {at}");
            for extent in self.chunk(at) {
                assert!(extent.start < extent.end && last <= extent.start, "E1: {extent:?}");
                last = extent.end;
                len += 1;
                lost += usize::from(extent.kind == Kind::Lost);
            }
        }
        let used = self.directory.iter().map(|node| node.chunk);
        for chunk in used.chain(self.free.iter().copied()) {
            assert!(!core::mem::replace(&mut seen[chunk as usize], true), "E3: chunk {chunk}");
        }
        assert!(seen.iter().all(|seen| *seen), "E3: a chunk is nowhere");
        assert_eq!((len, lost), (self.len, self.lost));
    }
}
