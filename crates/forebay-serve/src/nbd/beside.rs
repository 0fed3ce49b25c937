// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory for the payload of block devices: that of their kind, which all of a loop share, and beside it of what NBD clients share.
//!
//! That of a kind is small, and enough for what is answered at once. Where the backing device answers, a disk has more under way than fits there:
//! then what is next goes to memory of NBD clients, as far as they leave it (M5 of `pool.rs`), as the writes of an NBD connection do.
//!
//! # Invariants
//!
//! - **B1** A device whose requests find room waits for nobody: of the memory of its kind it can have a request's worth (M4 of `pool.rs`), whatever NBD
//!   clients have. So what is taken beside is never waited for, and none is taken while answers are there that will give some back.
//! - **B2** What is beside is with the engine or its device until it is given back, or with a request that the engine has no room for just now, so that it
//!   comes back by itself (M2).

use super::pool::{Pool, Run, Shared};
use forebay::io::Span;
use forebay_core::limits::VOLUME_COUNT_MAX;
use std::cell::RefCell;

thread_local! {
    static LENT: RefCell<Option<Shared<Pool>>> = const { RefCell::new(None) };
}

/// From now on front ends of this loop may have of it.
pub(crate) fn lend(pool: &Shared<Pool>) {
    LENT.set(Some(Shared::clone(pool)));
}

/// What one front end takes of.
pub(crate) struct Memory {
    of_kind: Shared<Pool>,
    beside: Option<Shared<Pool>>,
    /// Blocks that each owner has beside.
    has: [usize; VOLUME_COUNT_MAX],
}

impl Memory {
    /// That of a kind, and what is lent now.
    pub(crate) fn new(of_kind: Shared<Pool>) -> Memory {
        let beside = LENT.with_borrow(Clone::clone);
        Memory { of_kind, beside, has: [0; VOLUME_COUNT_MAX] }
    }

    /// Takes a run for an owner, of the memory of the kind.
    pub(crate) fn take_share(&self, owner: u32, count: usize) -> Option<(Run, Span)> {
        self.of_kind.borrow_mut().take_share(owner, count)
    }

    /// The same of what is beside (B1).
    pub(crate) fn take_beside(&mut self, owner: u32, count: usize) -> Option<(Run, Span)> {
        let has = &mut self.has[owner as usize];
        let taken = self.beside.as_ref()?.borrow_mut().take_extra(*has, count)?;
        *has += count;
        Some(taken)
    }

    /// Takes one of what is beside whose pages are there.
    #[cfg(feature = "fuse")]
    pub(crate) fn take_present_beside(&mut self, owner: u32, count: usize) -> Option<(Run, Span)> {
        let (run, span) = self.take_beside(owner, count)?;
        if let Some(beside) = &self.beside {
            beside.borrow_mut().make_present(run);
        }
        Some((run, span))
    }

    /// Gives the end of an owner's run back and keeps its first `count` blocks.
    #[cfg(feature = "fuse")]
    pub(crate) fn cut(&mut self, owner: u32, run: Run, count: usize) -> Run {
        let cut = self.pool_of(run).borrow_mut().cut(run, count);
        if run.is_extra() {
            self.has[owner as usize] -= run.count() - count;
        }
        cut
    }

    /// Of a run in what is kept back: as long a one elsewhere in the memory of the kind, if there is room (M4).
    #[cfg(feature = "fuse")]
    pub(crate) fn take_instead(&self, run: Run) -> Option<(Run, Span)> {
        (!run.is_extra()).then(|| self.of_kind.borrow_mut().take_instead(run)).flatten()
    }

    /// Gives an owner's run back.
    pub(crate) fn give(&mut self, owner: u32, run: Run) {
        if run.is_extra() {
            self.has[owner as usize] -= run.count();
        }
        self.pool_of(run).borrow_mut().give(run);
    }

    fn pool_of(&self, run: Run) -> &Shared<Pool> {
        match &self.beside {
            Some(beside) if run.is_extra() => beside,
            _ => &self.of_kind,
        }
    }

    #[cfg(all(test, feature = "ublk"))]
    pub(crate) fn of_kind(&self) -> &Shared<Pool> {
        &self.of_kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    const BLOCK: usize = 4096;

    fn pool(blocks: usize, kept: usize) -> Shared<Pool> {
        Rc::new(RefCell::new(Pool::new(blocks * BLOCK).expect("memory").among(4, kept)))
    }

    /// B1.
    #[test]
    fn who_has_none_finds_room_whatever_others_have_beside() {
        let clients = pool(600, 0);
        lend(&clients);
        let mut memory = Memory::new(pool(60, 16));
        let mut taken = Vec::new();
        for owner in [0, 1] {
            while let Some((run, _)) = memory.take_share(owner, 16) {
                taken.push((owner, run));
            }
            while let Some((run, _)) = memory.take_beside(owner, 16) {
                taken.push((owner, run));
            }
        }
        let beside = |owner: u32, taken: &[(u32, Run)]| {
            taken.iter().filter(|it| it.0 == owner && it.1.is_extra()).count()
        };
        assert_eq!((beside(0, &taken), beside(1, &taken)), (12, 4), "{taken:?}");
        assert!(clients.borrow().free_count() >= 300);
        for (owner, run) in taken.drain(..) {
            memory.give(owner, run);
        }
        assert_eq!(memory.has, [0; VOLUME_COUNT_MAX]);
        assert_eq!(
            (clients.borrow().free_count(), memory.of_kind.borrow().free_count()),
            (600, 60)
        );
    }

    #[test]
    fn where_nothing_is_lent_nothing_is_beside() {
        assert!(Memory::new(pool(60, 16)).take_beside(0, 1).is_none());
    }
}
