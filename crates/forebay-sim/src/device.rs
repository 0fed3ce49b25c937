// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A simulated device: what it promises is what is told of it here and in `docs/faults.md`.
//!
//! # Invariants
//!
//! - A sector of 512 bytes is whole or not written; a block of 4,096 bytes may be torn.
//! - A completed flush makes durable what was complete when the flush was issued.
//! - At a power cut, of all that was not flushed any part survives, in any combination.
//! - A killed process takes none of its writes back.
//! - A flush that fails says so once. Of what it should have covered any part may be durable, any wait for the next flush, and any be
//!   dropped: no later flush covers that. What is dropped reads as before it was written, at once, or as written until it is
//!   evicted or the power fails.

use crate::block::{Block, NumberMap};
use crate::fate::Fate;
use crate::marks::Marks;
use crate::random::{Random, mix};
use std::rc::Rc;

/// A block, which of its sectors, and what they become.
pub type Piece = (u64, u8, Rc<Block>);

/// What a flush that failed leaves of the writes that it should have covered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unflushed {
    /// The next flush takes care of them.
    Kept,
    /// No flush takes care of them; they are read until the power fails.
    Forgotten,
    /// They read as before they were written.
    Gone,
}

/// A write that a power cut may still undo.
#[derive(Clone, Debug)]
struct Pending {
    /// Writes up to this number were complete when it was.
    number: u64,
    pieces: Vec<Piece>,
}

/// What a device does with a discarded range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// It reads as zeros.
    Zeros,
    /// It reads as before.
    Stays,
    /// Each block as it likes: zeros, as before, or as it was when last flushed.
    Mixed,
}

/// How much of what was not flushed a power cut leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Survival {
    Nothing,
    Everything,
    Prefix,
    Subset,
    Torn,
}

/// A device.
#[derive(Clone, Debug)]
pub struct Device {
    blocks: u64,
    current: NumberMap<Rc<Block>>,
    durable: NumberMap<Rc<Block>>,
    /// What each block held before its newest write.
    before: NumberMap<Rc<Block>>,
    unflushed: Vec<Pending>,
    /// Blocks that read as no flush will make them.
    dropped: NumberMap<()>,
    number: u64,
    discard: Discard,
    /// Blocks that cannot be read until they are written.
    unreadable: NumberMap<()>,
    /// A block that cannot be read for a while, or until it is written, and was not flushed.
    shy: Option<u64>,
    /// Blocks whose every write is refused.
    bad: NumberMap<()>,
    /// What it came past.
    pub marks: Marks,
    /// It fails whatever it is asked to do.
    pub failed: bool,
    /// It takes so many times as long.
    pub slow: u64,
}

impl Device {
    /// A device of so many blocks, all zeros.
    pub fn new(blocks: u64, discard: Discard) -> Device {
        Device {
            blocks,
            current: NumberMap::default(),
            durable: NumberMap::default(),
            before: NumberMap::default(),
            unflushed: Vec::new(),
            dropped: NumberMap::default(),
            number: 0,
            discard,
            unreadable: NumberMap::default(),
            shy: None,
            bad: NumberMap::default(),
            marks: Marks::default(),
            failed: false,
            slow: 1,
        }
    }

    /// Blocks it has.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Whether a power cut can leave nothing else of a block than what is durable.
    pub fn is_settled(&self, block: u64) -> bool {
        let pieces = self.unflushed.iter().flat_map(|write| &write.pieces);
        let durable = self.durable(block);
        pieces.filter(|piece| piece.0 == block).all(|piece| piece.2.bytes() == durable.bytes())
    }

    /// It has so many blocks from now on, and some of them hold something already.
    pub fn grow(&mut self, blocks: u64, found: Vec<Piece>) {
        assert!(blocks >= self.blocks);
        self.blocks = blocks;
        for (block, mask, content) in found {
            put(&mut self.current, block, mask, &content);
            put(&mut self.durable, block, mask, &content);
        }
    }

    /// What a block reads as.
    pub fn read(&self, block: u64) -> Rc<Block> {
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        self.current.get(&block).cloned().unwrap_or_else(Block::zero)
    }

    /// What a block would read as after a power cut, if nothing survived that was not flushed.
    pub fn durable(&self, block: u64) -> Rc<Block> {
        self.durable.get(&block).cloned().unwrap_or_else(Block::zero)
    }

    /// What a block held before it was written last.
    pub fn before(&self, block: u64) -> Rc<Block> {
        self.before.get(&block).cloned().unwrap_or_else(Block::zero)
    }

    /// Whether a block cannot be read.
    pub fn is_unreadable(&self, block: u64) -> bool {
        self.unreadable.contains_key(&block) || self.shy == Some(block)
    }

    /// From now on a block cannot be read, until it is written.
    pub fn make_unreadable(&mut self, block: u64) {
        self.unreadable.insert(block, ());
    }

    /// What could not be read can be again, unchanged; says whether there was anything.
    pub fn read_again(&mut self) -> bool {
        let any = !self.unreadable.is_empty();
        self.unreadable.clear();
        any
    }

    /// From now on writes of a block are refused.
    pub fn go_bad(&mut self, block: u64) {
        self.bad.insert(block, ());
    }

    /// Every block takes writes again; says whether there was one that did not.
    pub fn heal(&mut self) -> bool {
        let any = !self.bad.is_empty();
        self.bad.clear();
        any
    }

    /// Whether any of these blocks refuses to be written.
    pub fn refuses(&self, start: u64, end: u64) -> bool {
        self.bad.keys().any(|block| (start..end).contains(block))
    }

    /// Blocks that were written and not flushed, from `first` on.
    pub fn unflushed_blocks(&self, first: u64) -> Vec<u64> {
        let pieces = self.unflushed.iter().flat_map(|write| &write.pieces);
        pieces.map(|piece| piece.0).filter(|block| *block >= first).collect()
    }

    /// A block cannot be read, or can again, if there was such a one.
    pub fn make_shy(&mut self, block: Option<u64>) {
        self.shy = block;
    }

    /// Changes what the medium holds behind everybody's back.
    pub fn rot(&mut self, block: u64, to: Rc<Block>) {
        put(&mut self.current, block, u8::MAX, &to);
        put(&mut self.durable, block, u8::MAX, &to);
        self.dropped.remove(&block);
        for write in &mut self.unflushed {
            write.pieces.retain(|piece| piece.0 != block);
        }
    }

    /// A write is complete.
    pub fn write(&mut self, pieces: Vec<Piece>) {
        self.number += 1;
        for (block, mask, content) in &pieces {
            assert!(*block < self.blocks, "block {block} of {}", self.blocks);
            self.unreadable.remove(block);
            self.shy = self.shy.filter(|shy| shy != block);
            let before = self.read(*block);
            self.before.insert(*block, before);
            put(&mut self.current, *block, *mask, content);
            if *mask == u8::MAX {
                self.dropped.remove(block);
            }
        }
        self.unflushed.push(Pending { number: self.number, pieces });
    }

    /// A write is complete, and so is a flush that covers it.
    pub fn write_durably(&mut self, pieces: Vec<Piece>) {
        self.write(pieces);
        for (block, mask, content) in self.unflushed.pop().iter().flat_map(|write| &write.pieces) {
            put(&mut self.durable, *block, *mask, content);
        }
    }

    /// A range reads as zeros from now on; `last_mask` says which sectors of its last block.
    pub fn zero(&mut self, start: u64, end: u64, last_mask: u8) {
        let blocks = self.stored(start, end);
        let mask = |block: u64| if block + 1 == end { last_mask } else { u8::MAX };
        let pieces = blocks.into_iter().map(|at| (at, mask(at), Block::zero())).collect();
        self.write(pieces);
    }

    /// A range is not needed any more; `last_mask` says which sectors of its last block.
    pub fn discard(&mut self, start: u64, end: u64, last_mask: u8, random: &mut Random) {
        let mask = |block: u64| if block + 1 == end { last_mask } else { u8::MAX };
        let mut pieces = Vec::new();
        for block in self.stored(start, end) {
            let choice = match self.discard {
                Discard::Zeros => 0,
                Discard::Stays => 1,
                Discard::Mixed => random.below(3),
            };
            match choice {
                0 => pieces.push((block, mask(block), Block::zero())),
                1 => {}
                _ => pieces.push((block, mask(block), self.durable(block))),
            }
        }
        self.write(pieces);
    }

    fn stored(&self, start: u64, end: u64) -> Vec<u64> {
        let mut blocks: Vec<u64> = if end - start < 64 {
            (start..end).filter(|block| self.current.contains_key(block)).collect()
        } else {
            let within = |block: &&u64| (start..end).contains(*block);
            self.current.keys().filter(within).copied().collect()
        };
        blocks.sort_unstable();
        blocks
    }

    /// What a flush issued now will cover.
    pub fn flush_begin(&self) -> u64 {
        self.number
    }

    /// A flush is complete.
    pub fn flush_end(&mut self, through: u64) {
        let mut kept = Vec::new();
        for write in self.unflushed.drain(..) {
            if write.number > through {
                kept.push(write);
                continue;
            }
            for (block, mask, content) in &write.pieces {
                put(&mut self.durable, *block, *mask, content);
            }
        }
        self.unflushed = kept;
    }

    /// A flush failed: what became of that which it should have covered.
    pub fn flush_failed(&mut self, through: u64, random: &mut Random) -> Unflushed {
        let fate = *random.pick(&[Unflushed::Kept, Unflushed::Forgotten, Unflushed::Gone]);
        self.marks.hit(match fate {
            Unflushed::Kept => "flush failed: kept for the next",
            Unflushed::Forgotten => "flush failed: forgotten",
            Unflushed::Gone => "flush failed: gone",
        });
        if fate == Unflushed::Kept {
            return fate;
        }
        let all = std::mem::take(&mut self.unflushed);
        let (dropped, kept): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|write| write.number <= through);
        self.unflushed = kept;
        if fate == Unflushed::Forgotten {
            return fate;
        }
        for (block, ..) in dropped.iter().flat_map(|write| &write.pieces) {
            match self.durable.get(block) {
                Some(before) => self.current.insert(*block, Rc::clone(before)),
                None => self.current.remove(block),
            };
        }
        for (block, mask, content) in self.unflushed.iter().flat_map(|write| &write.pieces) {
            put(&mut self.current, *block, *mask, content);
        }
        fate
    }

    /// A flush failed: of each block of each write that it should have covered it is decided what becomes of it. Says whether
    /// anything was dropped.
    pub fn flush_drops(&mut self, through: u64, random: &mut Random) -> bool {
        let often = *random.pick(&[1, 2, 8]);
        let by_block = random.one_in(2);
        let mut touched: Vec<u64> = Vec::new();
        for mut write in std::mem::take(&mut self.unflushed) {
            if write.number > through {
                self.unflushed.push(write);
                continue;
            }
            touched.extend(write.pieces.iter().map(|piece| piece.0));
            let choose = |random: &mut Random| match random.below(often) {
                0 => 0,
                _ => random.between(1, 3),
            };
            let mut choice = choose(random);
            let mut kept = Vec::new();
            for piece in write.pieces.drain(..) {
                if by_block {
                    choice = choose(random);
                }
                match choice {
                    0 => {}
                    1 => put(&mut self.durable, piece.0, piece.1, &piece.2),
                    2 => put(&mut self.durable, piece.0, piece.1 & random.next() as u8, &piece.2),
                    _ => kept.push(piece),
                }
            }
            if !kept.is_empty() {
                self.unflushed.push(Pending { number: write.number, pieces: kept });
            }
        }
        let waits = |block: &u64| {
            self.unflushed.iter().flat_map(|write| &write.pieces).any(|piece| piece.0 == *block)
        };
        touched.retain(|block| {
            self.read(*block).tags() != self.durable(*block).tags() && !waits(block)
        });
        touched.sort_unstable();
        touched.dedup();
        let shows = random.below(4);
        for block in &touched {
            self.dropped.insert(*block, ());
            if shows == 0 || shows == 1 && random.one_in(2) {
                self.evict(*block);
            }
        }
        self.marks.hit(match (touched.is_empty(), shows) {
            (true, _) => "cache flush failed: nothing dropped",
            (_, 0) => "cache flush failed: dropped at once",
            (_, 1) => "cache flush failed: some of what is dropped shows later",
            _ => "cache flush failed: what is dropped shows later",
        });
        !touched.is_empty()
    }

    /// A flush failed, and all that it should have covered is dropped. It reads as it was written. Says whether there was anything.
    pub fn flush_drops_all(&mut self, through: u64) -> bool {
        let all = std::mem::take(&mut self.unflushed);
        let (covered, kept): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|write| write.number <= through);
        self.unflushed = kept;
        let blocks = covered.iter().flat_map(|write| &write.pieces).map(|piece| piece.0);
        self.dropped.extend(blocks.map(|block| (block, ())));
        !self.dropped.is_empty()
    }

    /// Of what was dropped, the blocks of a range.
    pub fn dropped_in(&self, first: u64, end: u64) -> Vec<u64> {
        let mut all: Vec<u64> =
            self.dropped.keys().copied().filter(|block| (first..end).contains(block)).collect();
        all.sort_unstable();
        all
    }

    /// What was dropped of a block shows.
    pub fn evict(&mut self, block: u64) {
        if self.dropped.remove(&block).is_some() {
            match self.durable.get(&block) {
                Some(before) => self.current.insert(block, Rc::clone(before)),
                None => self.current.remove(&block),
            };
        }
    }

    /// The power fails. `in_flight` are writes that were not complete.
    pub fn power_cut(&mut self, in_flight: Vec<Vec<Piece>>, fate: &mut Fate, random: &mut Random) {
        self.survive_cut(in_flight, fate, random);
        self.current = self.durable.clone();
        self.dropped.clear();
    }

    /// What would be durable if the power failed now.
    pub fn cut(&self, in_flight: Vec<Vec<Piece>>, fate: &mut Fate, random: &mut Random) -> Device {
        let mut left = Device::new(self.blocks, self.discard);
        (left.durable, left.unflushed) = (self.durable.clone(), self.unflushed.clone());
        left.survive_cut(in_flight, fate, random);
        left
    }

    fn survive_cut(&mut self, in_flight: Vec<Vec<Piece>>, fate: &mut Fate, random: &mut Random) {
        let mut writes: Vec<Vec<Piece>> =
            self.unflushed.drain(..).map(|write| write.pieces).collect();
        writes.extend(in_flight);
        match fate {
            Fate::Chance => self.survive_by_chance(&writes, random),
            Fate::Chosen(choices) => {
                for pieces in &writes {
                    // Its first block (a record's header) and the others each for themselves.
                    let (first, others) = pieces.split_at(pieces.len().min(1));
                    for part in [first, others] {
                        if !part.is_empty() && choices.below(2) == 1 {
                            self.survive(part);
                        }
                    }
                }
            }
        }
    }

    fn survive_by_chance(&mut self, writes: &[Vec<Piece>], random: &mut Random) {
        use Survival::{Everything, Nothing, Prefix, Subset, Torn};
        let survival = *random.pick(&[Nothing, Everything, Prefix, Subset, Subset, Torn, Torn]);
        if !writes.is_empty() {
            self.marks.hit(match survival {
                Nothing => "unflushed writes: none survives",
                Everything => "unflushed writes: all survive",
                Prefix => "unflushed writes: the first survive",
                Subset => "unflushed writes: any survive",
                Torn => "unflushed writes: torn",
            });
        }
        let prefix = random.below(writes.len() as u64 + 1) as usize;
        for (at, pieces) in writes.iter().enumerate() {
            let keep = match survival {
                Nothing => false,
                Everything => true,
                Prefix => at < prefix,
                Subset | Torn => random.one_in(2),
            };
            let torn = survival == Torn && random.one_in(2) || survival == Prefix && at == prefix;
            if torn {
                self.survive_in_part(pieces, random);
            } else if keep {
                self.survive(pieces);
            }
        }
    }

    fn survive(&mut self, pieces: &[Piece]) {
        for (block, mask, content) in pieces {
            put(&mut self.durable, *block, *mask, content);
        }
    }

    /// Some sectors of a write survive: a prefix, or any.
    fn survive_in_part(&mut self, pieces: &[Piece], random: &mut Random) {
        let prefix = random.one_in(2).then(|| random.below(8 * pieces.len() as u64 + 1));
        for (at, (block, mask, content)) in pieces.iter().enumerate() {
            let kept = match prefix {
                Some(sectors) => match sectors.saturating_sub(8 * at as u64) {
                    0 => 0,
                    count if count >= 8 => u8::MAX,
                    count => (1 << count) - 1,
                },
                None => match random.below(4) {
                    0 => 0,
                    1 => u8::MAX,
                    _ => random.next() as u8,
                },
            };
            if kept != 0 && kept != u8::MAX {
                self.marks.hit("block torn between sectors");
            }
            put(&mut self.durable, *block, mask & kept, content);
        }
    }

    /// The process was killed: of its writes in flight each is done, or not, or in part.
    pub fn process_killed(
        &mut self,
        in_flight: Vec<Vec<Piece>>,
        fate: &mut Fate,
        random: &mut Random,
    ) {
        for pieces in in_flight {
            let what = match fate {
                Fate::Chance => random.below(4),
                Fate::Chosen(choices) => 2 * choices.below(2), // none of it, or all
            };
            self.marks.hit(match what {
                0 => "write in flight at a death: nothing of it",
                1 => "write in flight at a death: in part",
                _ => "write in flight at a death: all of it",
            });
            match what {
                0 => {}
                1 => {
                    let kept = |piece: Piece, random: &mut Random| {
                        (piece.0, piece.1 & random.next() as u8, piece.2)
                    };
                    let pieces = pieces.into_iter().map(|piece| kept(piece, random)).collect();
                    self.write(pieces);
                }
                _ => self.write(pieces),
            }
        }
    }

    /// A hash of all it holds, and of what a power cut would leave.
    pub fn digest(&self) -> u64 {
        let held = |map: &NumberMap<Rc<Block>>| {
            let block = |(at, block): (&u64, &Rc<Block>)| {
                block.tags().iter().fold(mix(*at), |hash, tag| mix(hash ^ tag))
            };
            map.iter().map(block).fold(0u64, u64::wrapping_add)
        };
        mix(held(&self.current)) ^ held(&self.durable) ^ self.dropped.len() as u64
    }

    /// Writes that are not flushed.
    pub fn unflushed_count(&self) -> usize {
        self.unflushed.len()
    }
}

fn put(map: &mut NumberMap<Rc<Block>>, block: u64, mask: u8, content: &Rc<Block>) {
    if mask == 0 {
        return;
    }
    if mask == u8::MAX {
        map.insert(block, Rc::clone(content));
        return;
    }
    let before = map.get(&block).cloned().unwrap_or_else(Block::zero);
    map.insert(block, Block::merge(&before, content, mask));
}
