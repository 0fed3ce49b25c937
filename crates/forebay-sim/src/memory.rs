// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulated runtime's memory: segment buffers that outlive the process, requests, window.
//!
//! A killed process dies at one of its stores (`fuse`): that store may be done in part, nothing
//! after it is done at all.

use crate::block::{Block, NumberMap};
use crate::checkers::dirty_is_never_evicted::Lives;
use crate::random::{Random, mix};
use forebay_core::format::entry::Kind;
use forebay_core::format::record::{Identity, Known};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::log::recovery::LogEnd;
use forebay_core::payload::{Ingested, Payload, Place, Placed};
use forebay_core::units::{BLOCK_SIZE, BufferId, SegmentId, VolumeIndex};
use std::rc::Rc;

/// What one block of a segment buffer holds.
#[derive(Clone, Debug)]
enum Cell {
    Whole(Rc<Block>),
    Bytes(Box<[u8; BLOCK_SIZE]>),
}

/// A segment buffer.
#[derive(Clone, Debug)]
struct Buffer {
    cells: Vec<Cell>,
    segment: Option<SegmentId>,
}

/// A request's memory.
#[derive(Clone, Debug)]
pub struct RequestMemory {
    /// Its blocks: of the first and last only the sectors of their masks are the request's. A
    /// request to write zeros has none.
    pub blocks: Vec<Rc<Block>>,
    /// How many it touches.
    pub count: u64,
    /// Sectors of the first block that belong to the request.
    pub first_mask: u8,
    /// Sectors of the last block that belong to the request.
    pub last_mask: u8,
    edges: [Option<Rc<Block>>; 2],
    /// What backing devices read to it goes where nobody can look; and which of its blocks came so.
    apart: bool,
    unseen: Vec<u16>,
}

impl RequestMemory {
    /// Memory of a request that covers these sectors of its first and last block.
    pub fn new(blocks: Vec<Rc<Block>>, count: u64, masks: (u8, u8)) -> RequestMemory {
        let (first_mask, last_mask) = masks;
        let (edges, apart, unseen) = ([None, None], false, Vec::new());
        RequestMemory { blocks, count, first_mask, last_mask, edges, apart, unseen }
    }

    /// The same, and what backing devices read to it goes where nobody can look.
    pub fn apart(self, apart: bool) -> RequestMemory {
        RequestMemory { apart, ..self }
    }

    /// Sectors of a block that belong to the request.
    pub fn mask(&self, block: u64) -> u8 {
        let first = if block == 0 { self.first_mask } else { u8::MAX };
        let last = if block + 1 == self.count { self.last_mask } else { u8::MAX };
        first & last
    }
}

/// All of it.
#[derive(Clone, Debug)]
pub struct Memory {
    buffers: Vec<Buffer>,
    requests: NumberMap<RequestMemory>,
    window: Vec<Rc<Block>>,
    /// Volumes, a bit for each, of whose backing devices a flush failed.
    pub failed_flushes: u64,
    /// Up to where each volume's log had come when a flush of the cache device was begun, or failed.
    pub ends: Vec<LogEnd>,
    /// Stores so far.
    pub stores: u64,
    /// Stores until the process dies.
    pub fuse: Option<u64>,
    /// It died.
    pub dead: bool,
    /// Entries that were placed, with their data.
    pub placed: Vec<(Placed, Option<Rc<Block>>)>,
    /// What the segments of this opening got.
    pub lives: Lives,
    random: Random,
}

impl Memory {
    /// Memory for so many buffers of so many blocks, and window frames.
    pub fn new(buffers: u16, blocks: u16, frames: u32, random: Random) -> Memory {
        let buffer =
            || Buffer { cells: vec![Cell::Whole(Block::zero()); blocks.into()], segment: None };
        Memory {
            buffers: (0..buffers).map(|_| buffer()).collect(),
            requests: NumberMap::default(),
            window: vec![Block::zero(); frames as usize],
            failed_flushes: 0,
            ends: vec![LogEnd::default(); VOLUME_COUNT_MAX],
            stores: 0,
            fuse: None,
            dead: false,
            placed: Vec::new(),
            lives: Lives::default(),
            random,
        }
    }

    /// A new process over the same segment buffers (or none of them, after a power cut).
    pub fn restart(&mut self, frames: u32) {
        (self.lives, self.failed_flushes) = (Lives::default(), 0);
        self.ends.fill(LogEnd::default());
        for buffer in &mut self.buffers {
            buffer.segment = None;
        }
        self.requests.clear();
        self.window = vec![Block::zero(); frames as usize];
        self.fuse = None;
        self.dead = false;
    }

    /// Of a segment buffer nothing is left: all were written, and given back.
    pub fn forget_buffers(&mut self) {
        self.buffers.iter_mut().for_each(|buffer| buffer.segment = None);
    }

    /// A flush of the cache device begins, or has failed.
    pub fn note_ends(&mut self, ends: impl Iterator<Item = (VolumeIndex, LogEnd)>) {
        if !self.dead {
            ends.for_each(|(volume, end)| self.ends[usize::from(volume.0)] = end);
        }
    }

    /// The buffers that hold a segment, and their bytes.
    pub fn held(&mut self) -> Vec<(SegmentId, Vec<u8>)> {
        let mut held = Vec::new();
        for buffer in &self.buffers {
            let Some(segment) = buffer.segment else { continue };
            let mut bytes = Vec::with_capacity(buffer.cells.len() * BLOCK_SIZE);
            for cell in &buffer.cells {
                match cell {
                    Cell::Whole(block) => bytes.extend_from_slice(block.bytes()),
                    Cell::Bytes(block) => bytes.extend_from_slice(&block[..]),
                }
            }
            held.push((segment, bytes));
        }
        held
    }

    /// Blocks of all segment buffers, and of the window.
    pub fn blocks(&self) -> (u64, u64) {
        let buffers = self.buffers.iter().map(|buffer| buffer.cells.len() as u64).sum();
        (buffers, self.window.len() as u64)
    }

    /// A hash of what a killed process leaves.
    pub fn digest(&self) -> u64 {
        let mut hash = 0;
        for buffer in &self.buffers {
            let Some(segment) = buffer.segment else { continue };
            hash = mix(hash ^ u64::from(segment.0));
            for cell in &buffer.cells {
                let whole = match cell {
                    Cell::Whole(block) => Rc::clone(block),
                    Cell::Bytes(bytes) => Block::new(**bytes),
                };
                hash = whole.tags().iter().fold(hash, |hash, tag| mix(hash ^ tag));
            }
        }
        hash
    }

    /// A request's memory.
    pub fn request(&mut self, tag: u32) -> &mut RequestMemory {
        self.requests.get_mut(&tag.into()).expect("the request has memory")
    }

    /// Gives a request memory.
    pub fn begin(&mut self, tag: u32, memory: RequestMemory) {
        let before = self.requests.insert(tag.into(), memory);
        assert!(before.is_none(), "a tag is used by one request at a time");
    }

    /// Takes a request's memory back.
    pub fn end(&mut self, tag: u32) -> RequestMemory {
        self.requests.remove(&tag.into()).expect("the request has memory")
    }

    /// The block at a place.
    pub fn get(&mut self, place: Place) -> Rc<Block> {
        match place {
            Place::Buffer { buffer, block } => {
                let cell = &mut self.buffers[usize::from(buffer.0)].cells[usize::from(block)];
                if let Cell::Bytes(bytes) = cell {
                    *cell = Cell::Whole(Block::new(**bytes));
                }
                let Cell::Whole(block) = cell else { unreachable!("just made whole") };
                Rc::clone(block)
            }
            Place::Request { tag, block } => {
                let request = self.request(tag);
                assert!(!request.unseen.contains(&block), "nobody can look there");
                Rc::clone(&request.blocks[usize::from(block)])
            }
            Place::Edge { tag, edge } => {
                let edge = &self.request(tag).edges[usize::from(edge)];
                Rc::clone(edge.as_ref().expect("the edge was read"))
            }
            Place::Window { frame } => Rc::clone(&self.window[frame as usize]),
            Place::Nowhere => unreachable!("nobody looks there"),
        }
    }

    /// Sets the block at a place.
    pub fn set(&mut self, place: Place, content: Rc<Block>) {
        match place {
            Place::Buffer { buffer, block } => {
                self.buffers[usize::from(buffer.0)].cells[usize::from(block)] =
                    Cell::Whole(content);
            }
            Place::Request { tag, block } => {
                let request = self.request(tag);
                request.unseen.retain(|unseen| *unseen != block);
                request.blocks[usize::from(block)] = content;
            }
            Place::Edge { tag, edge } => {
                self.request(tag).edges[usize::from(edge)] = Some(content);
            }
            Place::Window { frame } => self.window[frame as usize] = content,
            Place::Nowhere => {}
        }
    }

    /// The same, of what a backing device has read. Says whether that is where nobody can look.
    pub fn set_read(&mut self, place: Place, content: Rc<Block>) -> bool {
        self.set(place, content);
        let is_apart = self.is_apart(place);
        if let Place::Request { tag, block } = place
            && is_apart
        {
            self.request(tag).unseen.push(block);
        }
        is_apart
    }

    /// Whether a store may be done; the last one before the process dies says `false` first.
    fn alive(&mut self) -> bool {
        self.stores += 1;
        if let Some(left) = &mut self.fuse {
            if *left == 0 {
                self.dead = true;
            } else {
                *left -= 1;
            }
        }
        !self.dead
    }
}

/// The place `blocks` blocks behind.
pub fn behind(place: Place, blocks: u16) -> Place {
    match place {
        Place::Buffer { buffer, block } => Place::Buffer { buffer, block: block + blocks },
        Place::Request { tag, block } => Place::Request { tag, block: block + blocks },
        Place::Window { frame } => Place::Window { frame: frame + u32::from(blocks) },
        Place::Edge { tag, edge } => {
            assert_eq!(blocks, 0, "an edge is one block");
            Place::Edge { tag, edge }
        }
        Place::Nowhere => {
            assert_eq!(blocks, 0, "nowhere is one block");
            Place::Nowhere
        }
    }
}

impl Payload for Memory {
    fn ingest(&mut self, tag: u32, block: u64, buffer: BufferId, at: u16) -> Ingested {
        let request = self.requests.get(&tag.into()).expect("the request has memory");
        let mut content = request.blocks.get(block as usize).cloned().unwrap_or_else(Block::zero);
        let mask = request.mask(block);
        if mask != u8::MAX {
            // A request within one block has one edge, its first.
            let edge = usize::from(block != 0);
            let under = request.edges[edge].as_ref().expect("the edge was read");
            content = Block::merge(under, &content, mask);
        }
        if content.is_zero() {
            return Ingested::Zero;
        }
        let crc = content.checksum();
        if self.alive() {
            self.set(Place::Buffer { buffer, block: at }, content);
        }
        Ingested::Stored { crc }
    }

    fn checksum(&mut self, place: Place) -> u32 {
        self.get(place).checksum()
    }

    fn is_header(&mut self, place: Place, known: &Known, identity: &Identity) -> bool {
        known.is(&mut self.get(place).bytes().clone(), identity)
    }

    fn copy(&mut self, from: Place, to: Place, blocks: u16) {
        if matches!(to, Place::Buffer { .. }) && !self.alive() {
            return;
        }
        for at in 0..blocks {
            let content = self.get(behind(from, at));
            self.set(behind(to, at), content);
        }
    }

    fn zero(&mut self, place: Place, blocks: u16) {
        for at in 0..blocks {
            self.set(behind(place, at), Block::zero());
        }
    }

    fn put(&mut self, buffer: BufferId, offset: u32, bytes: &[u8]) {
        let was_dead = self.dead;
        let torn = !self.alive();
        if was_dead {
            return;
        }
        let (block, from) = (offset as usize / BLOCK_SIZE, offset as usize % BLOCK_SIZE);
        assert!(from + bytes.len() <= BLOCK_SIZE, "metadata stays within a block");
        let cell = &mut self.buffers[usize::from(buffer.0)].cells[block];
        if let Cell::Whole(whole) = cell {
            *cell = Cell::Bytes(Box::new(*whole.bytes()));
        }
        let Cell::Bytes(target) = cell else { unreachable!("just made bytes") };
        if !torn {
            target[from..from + bytes.len()].copy_from_slice(bytes);
            return;
        }
        // Words of eight bytes are whole; which of them are there is chance.
        let style = self.random.below(3);
        let cut = self.random.below(bytes.len() as u64 + 1) as usize;
        let mut at = 0;
        while at < bytes.len() {
            let end = ((from + at) / 8 * 8 + 8 - from).min(bytes.len());
            let there = match style {
                0 => false,
                1 => at < cut,
                _ => self.random.one_in(2),
            };
            if there {
                target[from + at..from + end].copy_from_slice(&bytes[at..end]);
            }
            at = end;
        }
    }

    fn store(&mut self, place: Place, bytes: &[u8]) {
        let block: &[u8; BLOCK_SIZE] = bytes.try_into().expect("a place is one block");
        self.set(place, crate::block::Block::new(*block));
    }

    fn buffer_begin(&mut self, buffer: BufferId, segment: SegmentId) {
        if self.alive() {
            let state = &mut self.buffers[usize::from(buffer.0)];
            assert!(state.segment.is_none(), "a buffer holds one segment");
            state.segment = Some(segment);
            self.lives.begin(segment);
        }
    }

    fn flush_failed(&mut self, volume: VolumeIndex) {
        if self.alive() {
            self.failed_flushes |= 1 << volume.0;
        }
    }

    fn is_apart(&self, place: Place) -> bool {
        let Place::Request { tag, .. } = place else { return false };
        self.requests.get(&tag.into()).is_some_and(|request| request.apart)
    }

    fn placed(&mut self, entry: &Placed) {
        if !self.dead {
            let dirty = matches!(entry.kind, Kind::Data | Kind::Parked);
            let content = dirty.then(|| self.get(entry.at));
            if let (true, Place::Buffer { buffer, .. }) = (dirty, entry.at) {
                let segment = self.buffers[usize::from(buffer.0)].segment;
                let segment = segment.expect("what is placed lies in a segment");
                self.lives.placed(segment, entry.volume, entry.sequence);
            }
            self.placed.push((*entry, content));
        }
    }

    fn buffer_end(&mut self, buffer: BufferId) {
        if self.alive() {
            let state = &mut self.buffers[usize::from(buffer.0)];
            assert!(state.segment.is_some(), "it held a segment");
            state.segment = None;
        }
    }
}
