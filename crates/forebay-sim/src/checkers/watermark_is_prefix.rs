// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P4: whenever a watermark has become durable, the backing device holds the guest's writes up to
//! exactly that sequence, in the order in which they entered the log, and nothing newer.
//!
//! Every block is compared twice: as the device reads, and as it would read after a power cut that
//! undoes all it can. What was discarded last may hold anything, and so may a block whose newest
//! version was damaged on the cache device. A block that the device refused may hold anything older
//! as long as the log holds it again behind the watermark, parked or changed, and no longer.

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
}

/// A volume's log as the guest filled it.
#[derive(Clone, Debug)]
pub struct Prefix {
    states: Vec<State>,
    through: Sequence,
    changes: VecDeque<Change>,
    last: Sequence,
    overwritten: u64,
    written: u64,
}

impl Prefix {
    /// An empty log over what the backing device holds.
    pub fn new(found: impl Iterator<Item = Tags>) -> Prefix {
        let none = Sequence(0);
        let state = |tags| State {
            tags: Some(tags),
            since: Sequence(1),
            damaged: none,
            refused: none,
            newest: none,
            parked: none,
            was_parked: false,
        };
        Prefix {
            states: found.map(state).collect(),
            through: Sequence(0),
            changes: VecDeque::new(),
            last: Sequence(0),
            overwritten: 0,
            written: 0,
        }
    }

    /// A change entered the log.
    pub fn placed(&mut self, change: Change) {
        assert!(change.sequence > self.last, "sequences rise");
        self.last = change.sequence;
        self.overwritten += self.note(&change);
        self.changes.push_back(change);
    }

    /// Notes what is newest of the blocks of a change; says how many of them were parked.
    fn note(&mut self, change: &Change) -> u64 {
        let Change { sequence, kind, .. } = *change;
        if !matches!(kind, Kind::Data | Kind::Parked | Kind::Zero | Kind::Discard) {
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
            for cell in change.cells {
                let last = self.states[cell].newest == change.sequence;
                self.written += u64::from(change.kind == Kind::Parked && last);
                self.states[cell].was_parked = change.kind == Kind::Parked;
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
        let excused = state.refused >= state.since || state.was_parked;
        if behind && excused {
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
}
