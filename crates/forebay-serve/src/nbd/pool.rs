// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory for requests: one arena for all connections or devices, given out in runs of blocks.
//!
//! # Invariants
//!
//! - **M1** Who has some takes no more than leaves as much free as he has then ([`Pool::take_share`]): of several who all
//!   want as much as they can get, something is left for one more. Who has none may have what there is.
//! - **M2** No owner keeps it for as long as he likes. What is with devices comes back by itself; what waits for a client to
//!   receive is put aside when others want it (A1 of `connection/aside.rs`).
//! - **M3** No owner who has none waits for as long as others like. While he is first ([`Pool::put_first`]) they have the last
//!   blocks alone, and he gets the longest read's worth in one run once what they had before has come back; and who has
//!   some takes no more, so that what comes back is for all who wait.
//! - **M4** Of a pool that keeps blocks back ([`Pool::among`]) these are for who has none, and only if there is no room behind them. So
//!   what is with a device that does not answer keeps nobody else from one request of any length, however scattered it lies; and who
//!   has some may take twice as much as he leaves.
//! - **M5** What is taken beside requests ([`Pool::take_extra`]), by who can go on without, is of the second half alone, and no more than twice
//!   what it leaves there to others; nobody takes more of it while somebody has waited too long (M3). So however much of that is with a device
//!   that does not answer, the first half is there for reads.

use super::reply::STATUS_REPLY_BYTES_MAX;
use super::wire::TRANSFER_BYTES_MAX;
use forebay::io::{Arena, Span};
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::thread::LocalKey;

const BLOCK: usize = 4096;

/// Blocks of the longest read.
const LONGEST_COUNT: usize = TRANSFER_BYTES_MAX as usize / BLOCK + 1;
/// Of what is nobody's share.
const NOBODY: u32 = u32::MAX;
/// Of what was taken beside requests (M5).
const EXTRA: u32 = u32::MAX - 1;

/// A run of blocks that was given out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    first: usize,
    count: usize,
    owner: u32,
}

#[cfg(any(feature = "fuse", feature = "ublk"))]
impl Run {
    /// It was taken beside requests (M5).
    pub(crate) fn is_extra(self) -> bool {
        self.owner == EXTRA
    }

    /// How many blocks it has.
    pub(crate) fn count(self) -> usize {
        self.count
    }
}

/// An arena and which of its blocks are given out.
#[derive(Debug)]
pub(crate) struct Pool {
    arena: Arena,
    taken: Vec<bool>,
    free_count: usize,
    next: usize,
    /// Blocks that each owner has.
    held: Vec<usize>,
    /// Blocks that were taken beside requests (M5).
    extra_count: usize,
    /// The first so many are for who has none (M4).
    kept: usize,
    /// Who has waited too long: others take of the end alone, of what the longest read leaves free (M3).
    first: Option<u32>,
    /// Somebody has, as far as is known.
    is_short: bool,
    /// For what is put together before it is sent, by one owner at a time.
    bytes: Vec<u8>,
    /// Blocks whose pages are known to be there.
    #[cfg(feature = "fuse")]
    present: Vec<bool>,
}

impl Pool {
    pub(crate) fn new(bytes: usize) -> io::Result<Pool> {
        Ok(Pool::of(Arena::reserved(bytes)?))
    }

    /// One that so many owners share.
    pub(crate) fn shared(bytes: usize, owner_count: usize) -> io::Result<Pool> {
        let held = vec![0; owner_count];
        Ok(Pool { held, bytes: Vec::with_capacity(STATUS_REPLY_BYTES_MAX), ..Pool::new(bytes)? })
    }

    /// The same pool with so many owners, who share it, and blocks that it keeps back (M4).
    pub(crate) fn among(self, owner_count: usize, kept: usize) -> Pool {
        assert!(kept <= self.taken.len());
        Pool { held: vec![0; owner_count], kept, ..self }
    }

    /// Room for a reply that is put together, empty; to be given back.
    pub(crate) fn take_bytes(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn give_bytes(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        self.bytes = bytes;
    }

    /// Takes a run for an owner, if that leaves enough for others (M1).
    pub(crate) fn take_share(&mut self, owner: u32, count: usize) -> Option<(Run, Span)> {
        let held = self.held[owner as usize];
        if !self.is_fair(held, count, self.free_count) || self.is_short && held > 0 {
            return None;
        }
        let is_open = self.first.is_none_or(|first| first == owner);
        let from = if is_open { self.kept } else { LONGEST_COUNT };
        let mut taken = self.take_behind(from, count);
        if taken.is_none() && is_open && held == 0 && self.kept > 0 {
            taken = self.take_behind(0, count);
        }
        let (run, span) = taken?;
        self.held[owner as usize] += count;
        self.first = self.first.filter(|first| *first != owner);
        Some((Run { owner, ..run }, span))
    }

    /// Takes a run for who has so many blocks like it, and can go on without (M5).
    pub(crate) fn take_extra(&mut self, has: usize, count: usize) -> Option<(Run, Span)> {
        let half = self.taken.len().div_ceil(2);
        let left = (self.taken.len() - half).checked_sub(self.extra_count + count)?;
        if self.is_short || has + count > 2 * left {
            return None;
        }
        let (run, span) = self.take_behind(half, count)?;
        self.extra_count += count;
        Some((Run { owner: EXTRA, ..run }, span))
    }

    /// The pages of a run, which nobody else has, are there from now on.
    #[cfg(feature = "fuse")]
    pub(crate) fn make_present(&mut self, run: Run) {
        for at in run.first..run.first + run.count {
            if !std::mem::replace(&mut self.present[at], true) {
                self.arena.span(at * BLOCK, BLOCK).copy_in(&[0]);
            }
        }
    }

    /// Of a run in what is kept back: as long a one elsewhere for its owner, if there is room (M4).
    #[cfg(any(test, feature = "fuse"))]
    pub(crate) fn take_instead(&mut self, run: Run) -> Option<(Run, Span)> {
        if run.first >= self.kept {
            return None;
        }
        let (new, span) = self.take_behind(self.kept, run.count)?;
        self.held[run.owner as usize] += run.count;
        Some((Run { owner: run.owner, ..new }, span))
    }

    /// Who of those who have none has waited too long, and for the longest (M3); says whether that changes anything.
    pub(crate) fn put_first(&mut self, first: Option<u32>) -> bool {
        let before = (self.first, self.is_short);
        (self.first, self.is_short) = (first, first.is_some());
        before != (self.first, self.is_short)
    }

    /// Whether an owner has any.
    pub(crate) fn has_some(&self, owner: u32) -> bool {
        self.held[owner as usize] > 0
    }

    /// Blocks that nobody has.
    pub(crate) fn free_count(&self) -> usize {
        self.free_count
    }

    /// Whether an owner could take so many if nobody else had any.
    pub(crate) fn others_have(&self, owner: u32, count: usize) -> bool {
        let held = self.held[owner as usize];
        self.is_fair(held, count, self.taken.len() - held)
    }

    /// The same, of what leaves half of the memory to those who cannot do without.
    pub(crate) fn take_spare(&mut self, owner: u32, count: usize) -> Option<(Run, Span)> {
        let is_open = self.first.is_none_or(|first| first == owner); // M3
        (is_open && self.free_count >= self.taken.len() / 2 + count)
            .then(|| self.take(count))
            .flatten()
    }

    /// A pool whose memory is there from the start.
    #[cfg(feature = "fuse")]
    pub(crate) fn present(bytes: usize) -> io::Result<Pool> {
        Ok(Pool::of(Arena::anonymous(bytes)?))
    }

    fn of(arena: Arena) -> Pool {
        let taken = vec![false; arena.len() / BLOCK];
        Pool {
            arena,
            free_count: taken.len(),
            #[cfg(feature = "fuse")]
            present: vec![false; taken.len()],
            taken,
            next: 0,
            held: Vec::new(),
            extra_count: 0,
            kept: 0,
            first: None,
            is_short: false,
            bytes: Vec::new(),
        }
    }

    /// Takes a run of blocks; `None`: there is none that long now.
    fn take(&mut self, count: usize) -> Option<(Run, Span)> {
        self.take_behind(0, count)
    }

    fn take_behind(&mut self, from: usize, count: usize) -> Option<(Run, Span)> {
        let end = self.taken.len();
        let from_next = self.search(self.next.max(from), end, count);
        let first = from_next.or_else(|| self.search(from, end, count))?;
        self.taken[first..first + count].fill(true);
        self.free_count -= count;
        self.next = first + count;
        let run = Run { first, count, owner: NOBODY };
        Some((run, self.arena.span(first * BLOCK, count * BLOCK)))
    }

    /// Gives the end of a run back and keeps its first `count` blocks.
    #[cfg(any(test, feature = "fuse"))]
    pub(crate) fn cut(&mut self, run: Run, count: usize) -> Run {
        assert!(count <= run.count);
        self.give(Run { first: run.first + count, count: run.count - count, ..run });
        Run { count, ..run }
    }

    /// Gives a run back. Its place is looked at first by the next that takes: it is still in the
    /// processor's cache.
    pub(crate) fn give(&mut self, run: Run) {
        let blocks = &mut self.taken[run.first..run.first + run.count];
        assert!(blocks.iter().all(|taken| *taken), "a run is given back once");
        blocks.fill(false);
        self.free_count += run.count;
        match run.owner {
            NOBODY => {}
            EXTRA => self.extra_count -= run.count,
            owner => self.held[owner as usize] -= run.count,
        }
        self.next = self.next.min(run.first);
    }

    /// Whether who has `held` may have `count` more of `free` (M1; M4, where others have something else besides).
    fn is_fair(&self, held: usize, count: usize, free: usize) -> bool {
        let times = if self.kept > 0 { 2 } else { 1 };
        count <= free && (held == 0 || held + count <= times * (free - count))
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

/// What all front ends of a kind and a loop share, so that those that come and go take no more of it.
pub(crate) type Shared<T> = Rc<RefCell<T>>;

/// Where a kind has it. It stays as long as the loop, which is a thread: who came after the last of them would take addresses that
/// nobody had before (B1 of `io/buffer.rs`).
pub(crate) type Kept<T> = RefCell<Option<Shared<T>>>;

/// That of this thread.
pub(crate) fn shared_by_loop<T>(
    kept: &'static LocalKey<Kept<T>>,
    make: impl FnOnce() -> io::Result<T>,
) -> io::Result<Shared<T>> {
    kept.with_borrow_mut(|kept| match kept {
        Some(shared) => Ok(Rc::clone(shared)),
        None => Ok(Rc::clone(kept.insert(Rc::new(RefCell::new(make()?))))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// M1.
    #[test]
    fn those_who_take_what_they_can_get_leave_something() {
        const COUNT: u32 = 8;
        let mut pool = Pool::shared(512 * BLOCK, 1 + COUNT as usize).expect("memory");
        let mut taken = Vec::new();
        let alone = (0..).map_while(|_| pool.take_share(0, 1)).inspect(|it| taken.push(it.0));
        assert_eq!(alone.count(), 256, "one has half of it");
        taken.drain(..).for_each(|run| pool.give(run));
        for _ in 0..512 {
            taken.extend((0..COUNT).filter_map(|owner| pool.take_share(owner, 1)).map(|it| it.0));
        }
        let share = 512 / (COUNT as usize + 1);
        assert!(taken.len() <= COUNT as usize * (share + 1), "{} are taken", taken.len());
        assert!(pool.others_have(0, 1), "alone he would have more");
        taken.push(pool.take_share(COUNT, 40).expect("it is there for one more").0);
        taken.drain(..).for_each(|run| pool.give(run));
        assert!(pool.take_share(0, 472).is_some(), "who has none may have what there is");
        assert!(!pool.others_have(0, 40), "it is his own");
        assert!(pool.take_share(1, 41).is_none() && pool.take_share(1, 40).is_some());
    }

    /// M3.
    #[test]
    fn who_is_first_waits_for_what_others_had_before_alone() {
        let mut pool = Pool::shared(LONGEST_COUNT * BLOCK + 511 * BLOCK, 3).expect("memory");
        let (before, _) = pool.take_share(1, 1).expect("room");
        assert!(pool.take_share(0, LONGEST_COUNT).is_some(), "behind it");
        let mut pool = Pool::shared(LONGEST_COUNT * BLOCK + 511 * BLOCK, 3).expect("memory");
        let runs = [1, 2].map(|owner| pool.take_share(owner, 300).expect("room").0);
        assert!(pool.take_share(0, LONGEST_COUNT).is_none());
        assert!(pool.put_first(Some(0)));
        assert!(pool.take_share(1, 1).is_none(), "he has some");
        pool.give(runs[0]);
        let (small, _) = pool.take_share(1, 300).expect("room at the end");
        assert!(small.first >= LONGEST_COUNT && before.first == 0);
        assert!(pool.take_share(2, 300).is_none(), "there alone");
        pool.give(runs[1]);
        let (long, _) = pool.take_share(0, LONGEST_COUNT).expect("all but the end");
        pool.give(long);
        assert!(pool.take_share(1, 1).is_none(), "others may have waited as well");
        assert!(pool.put_first(None));
        assert!(pool.take_share(1, 1).is_some());
    }

    /// M4. A device that does not answer had most of it, a block here and a block there.
    #[test]
    fn who_has_none_finds_a_long_run_however_scattered_the_rest_is() {
        let mut pool = Pool::new(80 * BLOCK).expect("memory").among(3, 16);
        let silent = |pool: &mut Pool| pool.take_share(0, 1).map(|it| it.0);
        let runs: Vec<Run> = std::iter::from_fn(|| silent(&mut pool)).collect();
        assert_eq!(runs.len(), 53, "two thirds of it");
        assert!(runs.iter().all(|run| run.first >= 16), "nothing of what is kept");
        for run in runs.iter().skip(1).step_by(2) {
            pool.give(*run);
        }
        let (long, _) = pool.take_share(1, 16).expect("what is kept");
        assert!(pool.take_share(1, 1).is_some_and(|it| it.0.first >= 16), "he has some");
        assert!(pool.take_instead(long).is_none(), "scattered still");
        assert!(pool.take_share(2, 16).is_none() && pool.take_share(2, 1).is_some());
        pool.give(long);
        assert!(pool.take_share(1, 16).is_none(), "he has some");
    }

    /// M5.
    #[test]
    fn what_is_taken_beside_requests_leaves_half_to_them_and_some_to_others() {
        let mut pool = Pool::shared(200 * BLOCK, 2).expect("memory");
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for taken in [&mut one, &mut other] {
            while let Some((run, _)) = pool.take_extra(10 * taken.len(), 10) {
                taken.push(run);
            }
        }
        assert_eq!((one.len(), other.len()), (6, 2), "{one:?} {other:?}");
        assert!(one.iter().chain(&other).all(|run| run.first >= 100));
        let (long, _) = pool.take_share(1, 100).expect("the first half");
        pool.give(other.remove(0));
        assert!(pool.put_first(Some(0)));
        assert!(pool.take_extra(10, 10).is_none(), "he waits");
        assert!(pool.put_first(None));
        assert!(pool.take_extra(10, 10).is_some_and(|it| {
            pool.give(it.0);
            true
        }));
        one.drain(..).chain(other.drain(..)).chain([long]).for_each(|run| pool.give(run));
        assert_eq!((pool.free_count(), pool.extra_count), (200, 0));
        assert!(pool.take_extra(0, 67).is_none() && pool.take_extra(0, 66).is_some());
    }

    #[test]
    fn half_of_it_is_not_spare() {
        let mut pool = Pool::new(16 * BLOCK).expect("memory");
        let (run, _) = pool.take_spare(0, 8).expect("room");
        assert!(pool.take_spare(0, 1).is_none());
        assert!(pool.take(8).is_some(), "it is there for others");
        pool.give(run);
        assert!(pool.take_spare(0, 1).is_none(), "whoever has the rest");
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
