// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P4: whenever a watermark has become durable, the backing device holds the guest's writes up to
//! exactly that sequence, in the order in which they entered the log, and nothing newer.
//!
//! Every block is compared twice: as the device reads, and as it would read after a power cut that
//! undoes all it can. What was discarded last may hold anything, and so may a block whose newest
//! version was damaged on the cache device.

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
    /// Data, zero or discard; everything else changes nothing.
    pub kind: Kind,
    /// The blocks, as the model counts them.
    pub cells: Vec<usize>,
    /// For data.
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
}

/// A volume's log as the guest filled it.
#[derive(Clone, Debug)]
pub struct Prefix {
    states: Vec<State>,
    through: Sequence,
    changes: VecDeque<Change>,
    last: Sequence,
}

impl Prefix {
    /// An empty log over what the backing device holds.
    pub fn new(found: impl Iterator<Item = Tags>) -> Prefix {
        let state = |tags| State { tags: Some(tags), since: Sequence(1), damaged: Sequence(0) };
        Prefix {
            states: found.map(state).collect(),
            through: Sequence(0),
            changes: VecDeque::new(),
            last: Sequence(0),
        }
    }

    /// A change entered the log.
    pub fn placed(&mut self, change: Change) {
        assert!(change.sequence > self.last, "sequences rise");
        self.last = change.sequence;
        self.changes.push_back(change);
    }

    /// The machine stopped: the log ends at `through`.
    pub fn cut(&mut self, through: Sequence) {
        while self.changes.back().is_some_and(|change| change.sequence > through) {
            self.changes.pop_back();
        }
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
                Kind::Data => change.content.as_ref().map(|content| *content.tags()),
                Kind::Zero => Some(Block::zero().tags().to_owned()),
                Kind::Discard => None,
                _ => continue,
            };
            for cell in change.cells {
                (self.states[cell].tags, self.states[cell].since) = (tags, change.sequence);
            }
        }
        true
    }

    /// Compares a block with what it must be.
    pub fn compare(&self, cell: usize, content: &Block, mask: u8) -> Result<(), String> {
        let state = &self.states[cell];
        let Some(tags) = state.tags.filter(|_| state.since > state.damaged) else { return Ok(()) };
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
