// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory for what is read: one arena for all connections, given out in runs of blocks.

use forebay::io::{Arena, Span};
use std::io;

const BLOCK: usize = 4096;

/// A run of blocks that was given out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    first: usize,
    count: usize,
}

/// An arena and which of its blocks are given out.
#[derive(Debug)]
pub(crate) struct Pool {
    arena: Arena,
    taken: Vec<bool>,
    next: usize,
}

impl Pool {
    pub(crate) fn new(bytes: usize) -> io::Result<Pool> {
        Ok(Pool::of(Arena::reserved(bytes)?))
    }

    /// The same, of what leaves half of the memory to those who cannot do without.
    pub(crate) fn take_spare(&mut self, count: usize) -> Option<(Run, Span)> {
        let free = self.taken.iter().filter(|taken| !**taken).count();
        (free >= self.taken.len() / 2 + count).then(|| self.take(count)).flatten()
    }

    /// A pool whose memory is there from the start.
    #[cfg(feature = "fuse")]
    pub(crate) fn present(bytes: usize) -> io::Result<Pool> {
        Ok(Pool::of(Arena::anonymous(bytes)?))
    }

    fn of(arena: Arena) -> Pool {
        let taken = vec![false; arena.len() / BLOCK];
        Pool { arena, taken, next: 0 }
    }

    /// Takes a run of blocks; `None`: there is none that long now.
    pub(crate) fn take(&mut self, count: usize) -> Option<(Run, Span)> {
        let end = self.taken.len();
        let from_next = self.search(self.next, end, count);
        let first = from_next.or_else(|| self.search(0, end, count))?;
        self.taken[first..first + count].fill(true);
        self.next = first + count;
        Some((Run { first, count }, self.arena.span(first * BLOCK, count * BLOCK)))
    }

    /// Gives the end of a run back and keeps its first `count` blocks.
    #[cfg(any(test, feature = "fuse"))]
    pub(crate) fn cut(&mut self, run: Run, count: usize) -> Run {
        assert!(count <= run.count);
        self.give(Run { first: run.first + count, count: run.count - count });
        Run { first: run.first, count }
    }

    /// Gives a run back. Its place is looked at first by the next that takes: it is still in the
    /// processor's cache.
    pub(crate) fn give(&mut self, run: Run) {
        let blocks = &mut self.taken[run.first..run.first + run.count];
        assert!(blocks.iter().all(|taken| *taken), "a run is given back once");
        blocks.fill(false);
        self.next = self.next.min(run.first);
    }

    fn search(&self, from: usize, end: usize, count: usize) -> Option<usize> {
        let mut first = from;
        while first + count <= end {
            match self.taken[first..first + count].iter().rposition(|taken| *taken) {
                None => return Some(first),
                Some(at) => first += at + 1,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_it_is_not_spare() {
        let mut pool = Pool::new(16 * BLOCK).expect("memory");
        let (run, _) = pool.take_spare(8).expect("room");
        assert!(pool.take_spare(1).is_none());
        assert!(pool.take(8).is_some(), "it is there for others");
        pool.give(run);
        assert!(pool.take_spare(1).is_none(), "whoever has the rest");
    }

    #[test]
    fn runs_do_not_overlap_and_come_back() {
        let mut pool = Pool::new(16 * BLOCK).expect("memory");
        let (first, a) = pool.take(6).expect("room");
        let (second, b) = pool.take(6).expect("room");
        assert!(pool.take(6).is_none());
        assert_ne!(a.pointer(), b.pointer());
        pool.give(first);
        let (third, c) = pool.take(6).expect("room again");
        assert_eq!(a.pointer(), c.pointer());
        pool.give(second);
        let third = pool.cut(third, 2);
        let (fourth, d) = pool.take(4).expect("what was cut off");
        assert_eq!(d.pointer(), a.part(2 * BLOCK, BLOCK).pointer());
        pool.give(third);
        pool.give(fourth);
        assert!(pool.take(16).is_some());
    }
}
