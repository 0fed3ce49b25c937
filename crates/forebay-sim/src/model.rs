// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The disk as the guest may believe it to be: small enough to be believed.
//!
//! # Terms
//!
//! A *value* is what one write (or discard, or the disk as it was found) put into some sectors of
//! a block. Moments are numbers that rise: when a request was made, when it was answered.
//!
//! A value is *superseded* by another over the same sector if the other's request was made after
//! the first was answered, and the other *counts*: for a read, if it was answered before the read
//! was made; after a killed process, if it was answered at all; after a power cut, if it was
//! durable (a FUA write, or covered by a FLUSH that was made after its answer).
//!
//! # The rules
//!
//! - A sector reads as a value that nothing supersedes. A failed write may have happened or not.
//! - A discarded sector reads as zeros or as anything the guest once wrote there, until written.
//! - After a crash the values that are left are alternatives, and the first read decides: from
//!   then on it is that one (P1: it sticks).
//! - The blocks of the log are whole: what a power cut leaves of a block is never a part of a
//!   write beside something older (unless the write went around the log).

use crate::block::{Block, NumberMap, SECTORS, Tags, origin};
use crate::random::mix;
use std::rc::Rc;

/// One value.
#[derive(Clone, Debug)]
struct Value {
    tags: Tags,
    mask: u8,
    made: u64,
    answered: Option<u64>,
    /// Durable from its answer on, or by now.
    fua: bool,
    failed: bool,
    discard: bool,
    /// It may be torn within the block.
    torn: bool,
    /// Crashes before it.
    epoch: u32,
    /// It may be what a crash left.
    survivor: bool,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    values: Vec<Value>,
    /// Damaged then: reads may fail.
    lost: Option<u64>,
    /// A fill of it was damaged at any time.
    copy_damaged: bool,
}

/// Which block of which request a value is of.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Sectors it covers.
    pub mask: u8,
    /// When its request was made; no two have the same.
    pub made: u64,
    /// Durable from its answer on.
    pub fua: bool,
    /// It is a discard.
    pub discard: bool,
    /// It may be torn within the block.
    pub torn: bool,
}

/// How the machine stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The process was killed: nothing acknowledged is lost.
    Process,
    /// The power failed: what no flush covered may be lost.
    Power,
}

/// A disk.
#[derive(Clone, Debug)]
pub struct Model {
    volume: u8,
    cells: Vec<Cell>,
    /// Writes answered up to this moment are covered by a flush.
    flushed: u64,
    epoch: u32,
    /// Writes may go around the log: a killed process leaves them as durable as they were.
    pub around: bool,
    /// What was written that does not tell its place: block and tag, mixed.
    odd: NumberMap<()>,
}

impl Model {
    /// A disk of so many blocks, all zeros.
    pub fn new(volume: u8, blocks: usize) -> Model {
        let value = Value {
            tags: [0; SECTORS],
            mask: u8::MAX,
            made: 0,
            answered: Some(0),
            fua: true,
            failed: false,
            discard: false,
            torn: false,
            epoch: 0,
            survivor: true,
        };
        let cell = Cell { values: vec![value], lost: None, copy_damaged: false };
        Model {
            volume,
            cells: vec![cell; blocks],
            flushed: 0,
            epoch: 0,
            around: false,
            odd: NumberMap::default(),
        }
    }

    /// The disk is larger: of a block these sectors are part of it as well, and hold this. The last block may have
    /// been there in part, all others are new.
    pub fn grown(&mut self, block: usize, content: &Block, mask: u8) {
        if block == self.cells.len() {
            self.cells.extend(Model::new(self.volume, 1).cells);
            return self.found(block, content);
        }
        let values = &mut self.cells[block].values;
        values.iter_mut().for_each(|value| value.mask &= !mask);
        let whole = Model::new(self.volume, 1).cells.remove(0).values.remove(0);
        values.insert(0, Value { tags: *content.tags(), mask, torn: true, ..whole });
    }

    /// What a block held before anything was written.
    pub fn found(&mut self, block: usize, content: &Block) {
        self.cells[block].values[0].tags = *content.tags();
    }

    /// A request that changes a block was made. `done` is before every read that still runs.
    pub fn made(&mut self, block: usize, content: &Block, write: Write, done: u64) {
        let (flushed, epoch) = (self.flushed, self.epoch);
        let cell = &mut self.cells[block];
        if cell.values.len() >= 4 {
            let all = cell.values.clone();
            cell.values.retain(|value| {
                let by = |other: &&Value| {
                    value.yields_to(other)
                        && other.is_durable(flushed)
                        && other.answered.is_some_and(|at| at < done)
                };
                let covered = all.iter().filter(by).fold(0, |mask, other| mask | other.mask);
                value.mask & !covered != 0
            });
        }
        let Write { mask, made, fua, discard, torn } = write;
        for (sector, tag) in content.tags().iter().enumerate() {
            if *tag != 0 && !is_home(content, sector, self.volume, block) {
                self.odd.insert(odd(block, sector, *tag), ());
            }
        }
        cell.values.push(Value {
            tags: *content.tags(),
            mask,
            made,
            answered: None,
            fua,
            failed: false,
            discard,
            torn,
            epoch,
            survivor: false,
        });
    }

    /// The device forgot what went around the log and was not flushed.
    pub fn unflushed_dropped(&mut self) {
        let flushed = self.flushed;
        for value in self.cells.iter_mut().flat_map(|cell| &mut cell.values) {
            value.failed |= value.answered.is_some() && !value.is_durable(flushed);
        }
    }

    /// It was answered, and what was answered well is durable from now on.
    pub fn answered_durable(&mut self, block: usize, made: u64, now: u64) {
        self.answered(block, made, now, true);
        let mut values = self.cells[block].values.iter_mut();
        if let Some(value) = values.find(|value| value.made == made) {
            value.fua = true;
        }
    }

    /// It was answered.
    pub fn answered(&mut self, block: usize, made: u64, now: u64, good: bool) {
        let cell = &mut self.cells[block];
        let value = cell.values.iter_mut().find(|value| value.made == made && value.mask != 0);
        let value = value.expect("what is not answered is kept");
        value.answered = Some(now);
        value.failed = !good;
    }

    /// A flush that was made at this moment was answered.
    pub fn flushed(&mut self, made: u64) {
        self.flushed = self.flushed.max(made);
    }

    /// A version of this block is damaged: reads may fail, until it is written as a whole and that
    /// is durable.
    pub fn may_be_lost(&mut self, block: usize, now: u64) {
        self.cells[block].lost = Some(now);
    }

    /// A copy of what the backing device has of this block is damaged: nothing is lost.
    pub fn copy_damaged(&mut self, block: usize) {
        self.cells[block].copy_damaged = true;
    }

    /// Whether any version of this block was ever damaged.
    pub fn was_damaged(&self, block: usize) -> bool {
        self.cells[block].lost.is_some() || self.cells[block].copy_damaged
    }

    /// Whether a request for a block that was made at `made` may fail.
    pub fn is_lost(&self, block: usize, made: u64) -> bool {
        let cell = &self.cells[block];
        let Some(lost) = cell.lost else { return false };
        let whole = |value: &Value| {
            // What a crash left is no new write, even if it was decided later what that is.
            !value.survivor
                && value.mask == u8::MAX
                && !value.discard
                && value.made > lost
                && value.answered.is_some_and(|at| at < made)
        };
        !cell.values.iter().any(|value| whole(value) && value.is_durable(self.flushed))
    }

    /// Writes may go around the log from now on; those too that were made before and wait.
    pub fn goes_around(&mut self) {
        if self.around {
            return;
        }
        self.around = true;
        for value in self.cells.iter_mut().flat_map(|cell| &mut cell.values) {
            value.torn |= value.answered.is_none();
        }
    }

    /// The machine stopped: only what could be left is left.
    pub fn stopped(&mut self, stop: Stop, now: u64) {
        let flushed = self.flushed;
        if stop == Stop::Process && self.around {
            // Nothing becomes durable by it; what was not answered may have happened or not.
            for value in self.cells.iter_mut().flat_map(|cell| &mut cell.values) {
                value.failed |= value.answered.is_none();
                value.answered.get_or_insert(now);
            }
            self.epoch += 1;
            return;
        }
        for cell in &mut self.cells {
            let cured = |value: &&Value| {
                let stays = match stop {
                    Stop::Process => value.counts(),
                    Stop::Power => value.is_durable(flushed),
                };
                stays && value.mask == u8::MAX && !value.discard && Some(value.made) > cell.lost
            };
            if cell.lost.is_some() {
                // What would have replaced the damaged version may be gone, or it stays for good.
                let stays = cell.values.iter().any(|value| cured(&value));
                cell.lost = (!stays).then_some(now);
            }
            let all = cell.values.clone();
            cell.values.retain(|value| {
                let by = |other: &&Value| {
                    value.yields_to(other)
                        && match stop {
                            Stop::Process => other.counts(),
                            Stop::Power => other.is_durable(flushed),
                        }
                };
                let covered = all.iter().filter(by).fold(0, |mask, other| mask | other.mask);
                value.mask & !covered != 0
            });
            for value in &mut cell.values {
                value.answered.get_or_insert(now);
                value.survivor = true;
                value.fua = true;
            }
        }
        self.flushed = now;
        self.epoch += 1;
    }

    /// Whether a read made at `made` of some sectors, of all that the disk has of the block, may give this; if so and the block had
    /// alternatives since a crash, they are decided when all was read.
    pub fn read(
        &mut self,
        block: usize,
        content: &Rc<Block>,
        (mask, all): (u8, u8),
        made: u64,
        now: u64,
    ) -> Result<(), String> {
        let cell = &mut self.cells[block];
        let tags = content.tags();
        let may_be = |sector: usize, value: &Value| {
            let once = || {
                is_home(content, sector, self.volume, block)
                    || self.odd.contains_key(&odd(block, sector, tags[sector]))
            };
            value.holds(sector, tags[sector], once)
                && !cell.values.iter().any(|other| {
                    other.mask & 1 << sector != 0
                        && value.yields_to(other)
                        && other.counts()
                        && other.answered.is_some_and(|at| at < made)
                })
        };
        let mut by = [None; SECTORS];
        for sector in (0..SECTORS).filter(|sector| mask & 1 << sector != 0) {
            by[sector] = cell.values.iter().rev().find(|value| may_be(sector, value));
            if by[sector].is_none() {
                return Err(self.explain(block, sector, content));
            }
        }
        // The blocks of the log are whole: beside what a write put there is nothing older.
        let torn_beside = |value: &Value| {
            let of_log = value.survivor && !value.torn && !value.discard;
            (0..SECTORS).filter(|_| of_log).find(|other| {
                let older = by[*other].filter(|_| value.mask & 1 << other != 0);
                value.tags[*other] != tags[*other]
                    && older.is_some_and(|older| {
                        older.epoch == value.epoch && older.is_before(value) && !older.torn
                    })
            })
        };
        for sector in (0..SECTORS).filter(|sector| by[*sector].is_some() && tags[*sector] != 0) {
            // A guest may have written the same twice: then it is any of these.
            let mut whole = false;
            let mut torn = None;
            for value in cell.values.iter().filter(|value| may_be(sector, value)) {
                let beside = torn_beside(value);
                (whole, torn) = (whole || beside.is_none(), torn.or(beside));
            }
            if let Some(other) = torn.filter(|_| !whole) {
                return Err(format!(
                    "sectors {sector} and {other} of block {block} are of different writes: the \
                    block is torn"
                ));
            }
        }
        let unsettled = cell.values.len() > 1
            && cell.values.iter().all(|value| value.survivor && !value.discard);
        if unsettled && mask == all {
            let mut value = cell.values[0].clone();
            (value.tags, value.mask, value.torn) = (*tags, u8::MAX, false);
            (value.made, value.answered, value.failed) = (now, Some(now), false);
            cell.values = vec![value];
            // A read mends nothing.
            cell.lost = cell.lost.map(|_| now);
        }
        Ok(())
    }

    /// A hash of what may be read.
    pub fn digest(&self) -> u64 {
        let mut hash = mix(self.flushed) ^ u64::from(self.epoch);
        for value in self.cells.iter().flat_map(|cell| &cell.values) {
            let flags = u64::from(value.mask) << 8
                | u64::from(value.fua) << 4
                | u64::from(value.failed) << 3
                | u64::from(value.discard) << 2
                | u64::from(value.survivor) << 1;
            let answered = value.answered.unwrap_or(u64::MAX);
            for word in [flags, value.made, answered].iter().chain(&value.tags) {
                hash = mix(hash ^ word);
            }
            hash = mix(hash);
        }
        hash
    }

    fn explain(&self, block: usize, sector: usize, content: &Block) -> String {
        let cell = &self.cells[block];
        let mut text = format!(
            "volume {} block {block} sector {sector} reads {:x} {:?}; flushed {}, epoch {}, values:",
            self.volume,
            content.tags()[sector],
            origin(content, sector),
            self.flushed,
            self.epoch
        );
        for value in cell.values.iter().filter(|value| value.mask & 1 << sector != 0) {
            let kind = if value.discard { "discard" } else { "write" };
            text += &format!(
                "\n    {kind} {:x} mask {:02x} made {} answered {:?} fua {} failed {} epoch {}",
                value.tags[sector],
                value.mask,
                value.made,
                value.answered,
                value.fua,
                value.failed,
                value.epoch
            );
        }
        text
    }
}

impl Value {
    fn is_before(&self, other: &Value) -> bool {
        self.answered.is_some_and(|answered| other.made > answered)
    }

    /// What a crash left are alternatives; of them none supersedes another.
    fn yields_to(&self, other: &Value) -> bool {
        !(self.survivor && other.survivor) && self.is_before(other)
    }

    fn counts(&self) -> bool {
        self.answered.is_some() && !self.failed
    }

    fn is_durable(&self, flushed: u64) -> bool {
        self.counts() && (self.fua || self.answered.is_some_and(|answered| answered < flushed))
    }

    fn holds(&self, sector: usize, tag: u64, once: impl FnOnce() -> bool) -> bool {
        if self.mask & 1 << sector == 0 {
            return false;
        }
        if self.discard { tag == 0 || once() } else { self.tags[sector] == tag }
    }
}

/// Whether a sector says that a guest wrote it here.
fn is_home(content: &Block, sector: usize, volume: u8, block: usize) -> bool {
    origin(content, sector).is_some_and(|(of, at, _)| of == volume && at == block as u64)
}

fn odd(block: usize, sector: usize, tag: u64) -> u64 {
    mix(tag ^ ((block * SECTORS + sector) as u64) << 20)
}
