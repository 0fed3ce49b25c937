// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P4: whenever a watermark has become durable, the backing device holds the guest's writes up to
//! exactly that sequence, in the order in which they entered the log, and nothing newer.
//!
//! Every block is compared twice: as the device reads, and as it would read after a power cut that
//! undoes all it can. What was discarded last may hold anything, and so may a block whose newest
//! version was damaged on the cache device. A block that the device refused may hold anything older
//! as long as the log holds it again behind the watermark, parked or changed, and no longer.
//!
//! After the order was changed a batch that was begun before may be built again with an earlier end: strict ends it where
//! the guest flushed. Until the watermark has passed what was placed before the change a sector may hold anything
//! that was placed for it by then (`docs/faults.md`).

use crate::block::{Block, Tags};
use forebay_core::format::entry::Kind;
use forebay_core::units::Sequence;
use std::collections::VecDeque;
use std::rc::Rc;

/// A change of some blocks, with its place in the log.
#[derive(Clone, Debug)]
pub struct Change {
    /// Its place.
    pub sequence: Sequence,
    /// Data, parked, zero or discard; everything else changes nothing.
    pub kind: Kind,
    /// The blocks, as the model counts them.
    pub cells: Vec<usize>,
    /// For data and parked data.
    pub content: Option<Rc<Block>>,
    /// Everything up to it was covered by a flush that the guest had heard of when this was placed.
    pub floor: Sequence,
}

/// What the guest's writes up to the durable watermark make of a block.
#[derive(Clone, Debug)]
struct State {
    /// None: anything.
    tags: Option<Tags>,
    since: Sequence,
    /// Versions up to this one were damaged.
    damaged: Sequence,
    /// The device refused versions up to this one.
    refused: Sequence,
    /// The last entry for it.
    newest: Sequence,
    /// The last that parked it.
    parked: Sequence,
    /// What it is since then is what a parked block held.
    was_parked: bool,
    /// What it is since then went around the log.
    went_around: bool,
    /// And a flush of the device came since.
    around_flushed: bool,
    /// What it was before something went around the log that is under way.
    before: Option<Tags>,
}

/// A volume's log as the guest filled it.
#[derive(Clone, Debug)]
pub struct Prefix {
    states: Vec<State>,
    through: Sequence,
    changes: VecDeque<Rc<Change>>,
    last: Sequence,
    overwritten: u64,
    written: u64,
}

impl Prefix {
    /// An empty log over what the backing device holds; none: that is not settled, as where a block was discarded
    /// whose last write was lost.
    pub fn new(found: impl Iterator<Item = Option<Tags>>) -> Prefix {
        Prefix {
            states: found.map(State::new).collect(),
            through: Sequence(0),
            changes: VecDeque::new(),
            last: Sequence(0),
            overwritten: 0,
            written: 0,
        }
    }

    /// The backing device is larger: these sectors of a block are the volume's as well.
    pub fn grown(&mut self, cell: usize, content: &Block, mask: u8) {
        if cell == self.states.len() {
            return self.states.push(State::new(Some(*content.tags())));
        }
        let state = &mut self.states[cell];
        for tags in state.tags.iter_mut().chain(&mut state.before) {
            for at in (0..tags.len()).filter(|at| mask & 1 << at != 0) {
                tags[at] = content.tags()[at];
            }
        }
    }

    /// A change entered the log.
    pub fn placed(&mut self, change: Change) {
        assert!(change.sequence > self.last, "sequences rise");
        self.last = change.sequence;
        self.overwritten += self.note(&change);
        self.changes.push_back(Rc::new(change));
    }

    /// Notes what is newest of the blocks of a change; says how many of them were parked.
    fn note(&mut self, change: &Change) -> u64 {
        let Change { sequence, kind, .. } = *change;
        if !kind.is_dirty() {
            return 0;
        }
        let mut overwritten = 0;
        for cell in &change.cells {
            let state = &mut self.states[*cell];
            let parked = state.parked > self.through && state.parked == state.newest;
            overwritten += u64::from(parked && kind != Kind::Parked);
            state.newest = sequence;
            if kind == Kind::Parked {
                state.parked = sequence;
            }
        }
        overwritten
    }

    /// Something that goes around the log is under way to a block or, with its sectors and content, is there.
    /// It came when nothing was dirty: it is newer than all that was placed.
    pub fn around(&mut self, cell: usize, done: Option<(u8, &Rc<Block>)>) {
        let since = Sequence(self.last.0 + 1);
        let state = &mut self.states[cell];
        let Some((mask, content)) = done else {
            state.before = state.tags.take();
            return;
        };
        let under = state.before.take();
        let merge = |under: Tags| {
            std::array::from_fn(
                |at| if mask & 1 << at != 0 { content.tags()[at] } else { under[at] },
            )
        };
        state.tags = if mask == u8::MAX { Some(*content.tags()) } else { under.map(merge) };
        (state.since, state.was_parked, state.went_around) = (since, false, true);
        state.around_flushed = false;
    }

    /// What went around the log may be gone, also where more of it is under way to a part of the block.
    pub fn around_unsure(&mut self) {
        for state in self.states.iter_mut().filter(|state| state.went_around) {
            (state.tags, state.before) = (None, None);
        }
    }

    /// What went around the log so far was flushed.
    pub fn around_flushed(&mut self) {
        for state in &mut self.states {
            state.around_flushed = state.went_around;
        }
    }

    /// Whether what a block is went around the log and may not be flushed.
    pub fn is_unflushed(&self, cell: usize) -> bool {
        let state = &self.states[cell];
        state.went_around && !state.around_flushed
    }

    /// The device did not take a block.
    pub fn refused(&mut self, cell: usize) {
        self.states[cell].refused = self.last;
    }

    /// How many parked blocks were overwritten, and how many written at last.
    pub fn take_parked_counts(&mut self) -> (u64, u64) {
        (core::mem::take(&mut self.overwritten), core::mem::take(&mut self.written))
    }

    /// The machine stopped: the log ends at `through`.
    pub fn cut(&mut self, through: Sequence) {
        self.around_unsure();
        while self.changes.back().is_some_and(|change| change.sequence > through) {
            self.changes.pop_back();
        }
        for state in &mut self.states {
            (state.newest, state.parked) = (Sequence(0), Sequence(0));
        }
        let changes = std::mem::take(&mut self.changes);
        for change in &changes {
            self.note(change);
        }
        self.changes = changes;
    }

    /// All versions of a block that are in the log may be damaged.
    pub fn damaged(&mut self, cell: usize) {
        self.states[cell].damaged = self.last;
    }

    /// The same at a later watermark; none: it is not later.
    pub fn advanced(&self, watermark: Sequence) -> Option<Prefix> {
        (watermark > self.through).then(|| {
            let mut prefix = self.clone();
            prefix.advance(watermark);
            prefix
        })
    }

    /// Moves on to a watermark; says whether it is another one.
    pub fn advance(&mut self, watermark: Sequence) -> bool {
        if watermark <= self.through {
            return false;
        }
        self.through = watermark;
        while self.changes.front().is_some_and(|change| change.sequence <= watermark) {
            let change = self.changes.pop_front().expect("looked");
            let tags = match change.kind {
                Kind::Data | Kind::Parked => change.content.as_ref().map(|content| *content.tags()),
                Kind::Zero => Some(Block::zero().tags().to_owned()),
                Kind::Discard => None,
                _ => continue,
            };
            for cell in change.cells.iter().copied() {
                let last = self.states[cell].newest == change.sequence;
                self.written += u64::from(change.kind == Kind::Parked && last);
                self.states[cell].was_parked = change.kind == Kind::Parked;
                self.states[cell].went_around = false;
                (self.states[cell].tags, self.states[cell].since) = (tags, change.sequence);
            }
        }
        true
    }

    /// Compares a block with what it must be.
    pub fn compare(&self, cell: usize, content: &Block, mask: u8) -> Result<(), String> {
        let state = &self.states[cell];
        let Some(tags) = state.tags.filter(|_| state.since > state.damaged) else { return Ok(()) };
        let behind = state.newest > self.through;
        if behind && state.is_excused() {
            return Ok(());
        }
        let found = content.tags();
        let other = |at: &usize| mask & 1 << at != 0 && tags[*at] != found[*at];
        match (0..tags.len()).find(other) {
            None => Ok(()),
            Some(at) => Err(format!(
                "the watermark {:?} is durable, but sector {at} of cell {cell} is {:x} {:?}, not {:x} \
                 (of {:?})",
                self.through,
                found[at],
                crate::block::origin(content, at),
                tags[at],
                state.since
            )),
        }
    }

    /// The same while the watermark is before `since`, where the order was changed last: a sector may hold what
    /// was placed for it up to there as well.
    pub fn compare_changed(
        &self,
        cell: usize,
        content: &Block,
        mask: u8,
        since: Sequence,
    ) -> Result<(), String> {
        let newer = |change: &Change| change.sequence <= since;
        self.compare(cell, content, mask)
            .or_else(|_| self.compare_newer(cell, content, mask, newer))
    }

    /// The same after the cache was lost in the middle of a batch that holds nothing of two flush epochs: a
    /// sector may hold anything that was placed for it since, as long as all that was flushed when it was is there, or
    /// up to `since`, where the order was changed last.
    pub fn compare_strict(
        &self,
        cell: usize,
        content: &Block,
        mask: u8,
        since: Sequence,
    ) -> Result<(), String> {
        // What was damaged is never written.
        let stays = |cell: &usize, change: &Change| self.states[*cell].damaged < change.sequence;
        let missing = self.changes.iter().find(|change| {
            change.kind.is_dirty() && change.cells.iter().any(|cell| stays(cell, change))
        });
        let allowed = |change: &Change| {
            change.sequence <= since || missing.is_none_or(|first| change.floor < first.sequence)
        };
        self.compare_newer(cell, content, mask, allowed)
    }

    /// Compares a block with what it must be, or what changes of it behind the watermark that are `allowed` make of it.
    fn compare_newer(
        &self,
        cell: usize,
        content: &Block,
        mask: u8,
        allowed: impl Fn(&Change) -> bool,
    ) -> Result<(), String> {
        let state = &self.states[cell];
        let Some(tags) = state.tags.filter(|_| state.since > state.damaged) else { return Ok(()) };
        if state.is_excused() {
            return Ok(());
        }
        let found = content.tags();
        let other = |at: &usize| mask & 1 << at != 0 && tags[*at] != found[*at];
        if !(0..tags.len()).any(|at| other(&at)) {
            return Ok(());
        }
        let of_cell = |change: &&Rc<Change>| change.cells.contains(&cell);
        let newer: Vec<&Rc<Change>> =
            self.changes.iter().filter(of_cell).filter(|change| allowed(change)).collect();
        if newer.iter().any(|change| change.kind == Kind::Discard) {
            return Ok(());
        }
        for at in (0..tags.len()).filter(other) {
            let holds = |change: &&Rc<Change>| match change.kind {
                Kind::Zero => found[at] == 0,
                Kind::Data | Kind::Parked => {
                    change.content.as_ref().is_some_and(|content| content.tags()[at] == found[at])
                }
                _ => false,
            };
            if !newer.iter().any(holds) {
                let all = self.changes.iter().filter(of_cell);
                let all: Vec<_> =
                    all.map(|change| (change.sequence, change.kind, change.floor)).collect();
                return Err(format!(
                    "on the backing device all up to {:?}: sector {at} of cell {cell} is {:x} {:?}, not {:x} \
                     (of {:?}), nor what may be there before; {all:?}",
                    self.through,
                    found[at],
                    crate::block::origin(content, at),
                    tags[at],
                    state.since,
                ));
            }
        }
        Ok(())
    }
}

impl State {
    /// Nothing was placed for it.
    fn new(tags: Option<Tags>) -> State {
        let none = Sequence(0);
        State {
            tags,
            since: Sequence(1),
            damaged: none,
            refused: none,
            newest: none,
            parked: none,
            was_parked: false,
            went_around: false,
            around_flushed: false,
            before: None,
        }
    }

    fn is_excused(&self) -> bool {
        self.refused >= self.since || self.was_parked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::guest_block;

    /// Seed 759: a write around the log was not flushed, half of the same block was under way around the log when that flush
    /// failed, and then the device had the other half as it was before both.
    #[test]
    fn half_a_block_around_the_log_says_nothing_of_what_a_failed_flush_dropped() {
        let [old, dropped, half] = [1, 2, 3].map(|version| guest_block(0, 0, version, false));
        let mut prefix = Prefix::new([Some(*old.tags())].into_iter());
        prefix.around(0, None);
        prefix.around(0, Some((u8::MAX, &dropped)));
        assert!(prefix.compare(0, &old, u8::MAX).is_err());
        prefix.around(0, None);
        prefix.around_unsure();
        prefix.around(0, Some((0xf0, &half)));
        for found in [&old, &dropped] {
            assert_eq!(prefix.compare(0, found, 0x0f), Ok(()));
        }
    }
}
