// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's side of the machine: it asks, it is told, and both are compared with the model.

use crate::block::{Block, guest_block};
use crate::memory::RequestMemory;
use crate::model::Write;
use crate::world::{Failure, Outcome, World};
use forebay_core::engine::Acknowledge;
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, Request, RequestError};
use forebay_core::units::{BLOCK_BYTES, SegmentId, Sequence, VolumeIndex};
use std::rc::Rc;

/// A request of the guest.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The request.
    pub request: Request,
    /// When it was made.
    pub made: u64,
    /// The same on the clock.
    pub since: u64,
    /// What was placed before it.
    placed: Sequence,
    /// Mode changes of its volume before it.
    mode_changes: u64,
    /// How often it was given.
    pub(crate) times: u32,
    /// First block that is changed or read, in the model's terms.
    pub(crate) first: u64,
    pub(crate) end: u64,
    /// It was asked of the backing device.
    pub(crate) goes_around: bool,
}

impl World {
    /// A new block for a place.
    pub fn content(&mut self, volume: usize, lba: u64) -> Rc<Block> {
        self.version += 1;
        let cell = self.volumes[volume].cell(lba).expect("the guest goes there");
        if self.random.one_in(self.setup.zeros) {
            return Block::zero();
        }
        if !self.setup.steady && self.random.one_in(40) {
            // A copy of a block of the log, as of a guest that backs up this very cache device.
            let block = self.any_block();
            self.marks.hit("block of the log written by a guest");
            return self.copy_of_cache(block);
        }
        let sealed = self.random.one_in(8);
        guest_block(volume as u8, cell as u64, self.version, sealed)
    }

    /// A block of the cache device.
    fn copy_of_cache(&mut self, block: u64) -> Rc<Block> {
        let copy = self.cache.read(block);
        self.copied.insert(copy.tags()[0], ());
        copy
    }

    /// A copy of a segment of this very cache, from its first block on.
    fn copy_of_segment(&mut self, first: u64, end: u64) -> Vec<Rc<Block>> {
        self.marks.hit("segment of the log written by a guest");
        let segment = self.random.below(self.superblock.segment_count.into()) as u32;
        let count = u64::from(self.superblock.segment_blocks());
        let from = self.cache_block(SegmentId(segment), 0);
        let mut blocks = Vec::new();
        for lba in first..end {
            blocks.push(self.copy_of_cache(from + (lba - first) % count));
        }
        blocks
    }

    /// The guest asks for something; says whether the engine took it.
    pub fn ask(
        &mut self,
        volume: usize,
        op: Op,
        offset: u64,
        length: u64,
    ) -> Result<bool, Failure> {
        let tag = self.next_tag;
        let request = Request { volume: VolumeIndex(volume as u8), op, offset, length, tag };
        let first = offset / BLOCK_BYTES;
        let end = (offset + length).div_ceil(BLOCK_BYTES);
        let sectors = |byte: u64| (byte % BLOCK_BYTES / 512) as u32;
        let first_mask = u8::MAX << sectors(offset);
        let last = sectors(offset + length);
        let last_mask = if last == 0 { u8::MAX } else { (1u16 << last) as u8 - 1 };
        let data = matches!(op, Op::Read | Op::Fetch | Op::Write { .. });
        let mut blocks = Vec::new();
        let steady = self.setup.steady;
        if matches!(op, Op::Write { .. }) && !steady && end - first > 2 && self.random.one_in(20) {
            blocks = self.copy_of_segment(first, end);
        } else if data {
            for lba in first..end {
                let write = matches!(op, Op::Write { .. });
                blocks.push(if write { self.content(volume, lba) } else { Block::zero() });
            }
        }
        let apart = op == Op::Read && self.chance(0xA9A7).one_in(self.setup.apart);
        let memory = RequestMemory::new(blocks, end - first, (first_mask, last_mask));
        self.give(request, memory.apart(apart), 1)
    }

    /// A request is given to the engine, for the first time or again; says whether that took it.
    pub(crate) fn give(
        &mut self,
        request: Request,
        memory: RequestMemory,
        times: u32,
    ) -> Result<bool, Failure> {
        let Request { op, offset, length, tag, .. } = request;
        let volume = usize::from(request.volume.0);
        let (first, end) = (offset / BLOCK_BYTES, (offset + length).div_ceil(BLOCK_BYTES));
        self.memory.begin(tag, memory);
        let made = self.moment();
        let (since, mode_changes) = (self.now, self.volumes[volume].mode_changes);
        let engine = self.engine.as_ref().expect("there is a process");
        let placed = engine.placed(request.volume);
        let mut asked = Asked {
            request,
            made,
            since,
            placed,
            mode_changes,
            times,
            first,
            end,
            goes_around: false,
        };
        if op == Op::Discard {
            let state = &self.volumes[volume];
            let whole = offset + length == state.size_bytes;
            asked.first = offset.div_ceil(BLOCK_BYTES);
            asked.end = if whole { state.blocks() } else { (offset + length) / BLOCK_BYTES };
            asked.end = asked.end.max(asked.first);
        }
        let engine = self.engine.as_mut().expect("there is a process");
        if engine.submit(request, &mut self.memory).is_err() {
            self.memory.end(tag);
            self.marks.hit("busy");
            return Ok(false);
        }
        self.next_tag += 1;
        self.tell(|| format!("ask {request:?} at {made}"));
        self.note(u64::from(tag) << 32 ^ offset ^ length << 20);
        self.model_made(&asked);
        self.asked.insert(tag.into(), asked);
        self.drain_effects()?;
        Ok(true)
    }

    /// Calls `each` with the blocks of a range that the guest uses: cell, block.
    pub(crate) fn cells(&self, volume: usize, first: u64, end: u64) -> Vec<(usize, u64)> {
        let mut cells = Vec::new();
        let mut base = 0;
        for island in &self.volumes[volume].islands {
            let from = first.max(island.start);
            let to = end.min(island.start + island.blocks);
            for lba in from..to.max(from) {
                cells.push(((base + lba - island.start) as usize, lba));
            }
            base += island.blocks;
        }
        cells
    }

    fn model_made(&mut self, asked: &Asked) {
        let op = asked.request.op;
        if matches!(op, Op::Read | Op::Fetch | Op::Flush) {
            return;
        }
        let volume = usize::from(asked.request.volume.0);
        let reading = |asked: &&Asked| asked.request.op == Op::Read;
        let reads = self.asked.values().filter(reading);
        let done = reads.map(|asked| asked.made).min().unwrap_or(asked.made);
        let fua = matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true });
        let durable = self.setup.config.acknowledge == Acknowledge::Durable;
        let torn = self.volumes[volume].model.around;
        for (cell, lba) in self.cells(volume, asked.first, asked.end) {
            let memory = self.memory.request(asked.request.tag);
            let content = match op {
                Op::Write { .. } => Rc::clone(&memory.blocks[(lba - asked.first) as usize]),
                _ => Block::zero(),
            };
            let mask = match op {
                Op::Discard => u8::MAX,
                _ => memory.mask(lba - asked.first),
            };
            let mask = mask & self.volumes[volume].mask(lba);
            let write = Write {
                mask,
                made: asked.made,
                fua: fua || durable,
                discard: op == Op::Discard,
                torn,
            };
            self.volumes[volume].model.made(cell, &content, write, done);
        }
    }

    /// The guest is told.
    pub(crate) fn answered(&mut self, tag: u32, result: Result<(), RequestError>) -> Outcome {
        let memory = self.memory.end(tag);
        let asked = self.asked.remove(&tag.into()).expect("it was asked");
        let given_up = result == Err(RequestError::Closing);
        if given_up && !self.is_ending {
            return Err(Failure("a request was given up though guests hear of it".into()));
        }
        if given_up {
            self.marks.hit("given up by a stop");
        }
        if given_up && !self.setup.comes_again {
            return Ok(());
        }
        if given_up || self.hears_not() {
            self.unheard(&asked, memory);
            return Ok(());
        }
        self.note(u64::from(tag) ^ u64::from(result.is_err()) << 40);
        let now = self.moment();
        self.tell(|| format!("answer {tag} {result:?} at {now}"));
        let volume = usize::from(asked.request.volume.0);
        match (asked.request.op, result) {
            (_, Err(error)) => {
                if asked.request.op == Op::Flush {
                    self.volumes[volume].untold = None;
                }
                let zeros =
                    memory.blocks.iter().any(|block| block.tags().iter().all(|tag| *tag == 0));
                self.failed(&asked, zeros, error, now)?;
            }
            (Op::Flush, Ok(())) => {
                if self.volumes[volume].untold.is_some_and(|since| since < asked.made) {
                    let text = "a flush was answered well over writes that the device has dropped";
                    return Err(Failure(text.into()));
                }
                self.volumes[volume].model.flushed(asked.made);
                let floor = &mut self.volumes[volume].floor;
                *floor = asked.placed.max(*floor);
            }
            (Op::Read, Ok(())) => {
                for (cell, lba) in self.cells(volume, asked.first, asked.end) {
                    let at = lba - asked.first;
                    let all = self.volumes[volume].mask(lba);
                    let masks = (memory.mask(at) & all, all);
                    let content = &memory.blocks[at as usize];
                    self.volumes[volume]
                        .model
                        .read(cell, content, masks, asked.made, now)
                        .map_err(|text| {
                            Failure(format!(
                                "block {lba} (cell {cell}): {text}\n    read {asked:?}"
                            ))
                        })?;
                }
            }
            (Op::Fetch, Ok(())) => self.marks.hit("range fetched"),
            (op, Ok(())) => {
                if matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true }) {
                    let floor = &mut self.volumes[volume].floor;
                    *floor = asked.placed.max(*floor);
                }
                let through = self.is_through(&asked);
                for (cell, _) in self.cells(volume, asked.first, asked.end) {
                    let model = &mut self.volumes[volume].model;
                    if through {
                        model.answered_durable(cell, asked.made, now);
                    } else {
                        model.answered(cell, asked.made, now, true);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a write was answered on a volume that answers only what is on the backing device.
    fn is_through(&self, asked: &Asked) -> bool {
        let state = &self.volumes[usize::from(asked.request.volume.0)];
        // What goes around the log is answered when the device has it, flushed or not.
        let whole = state.mode == Mode::WriteThrough && !state.model.around;
        whole && state.mode_changes == asked.mode_changes
    }

    /// A request failed (one with zeros, or not): it may, if its device failed meanwhile or a block of it was damaged.
    fn failed(&mut self, asked: &Asked, zeros: bool, error: RequestError, now: u64) -> Outcome {
        let index = usize::from(asked.request.volume.0);
        let cells = self.cells(index, asked.first, asked.end);
        let state = &mut self.volumes[index];
        let damaged = cells.iter().any(|(cell, _)| state.model.is_lost(*cell, asked.made));
        // Reads still find what the memory and the device hold.
        // Past a failed cache it is as if there were none.
        let passes = state.passing_since.is_some_and(|since| asked.made > since);
        let reads = matches!(asked.request.op, Op::Read | Op::Fetch);
        let refused = self.cache_failed && !reads && !passes;
        let fua = matches!(
            asked.request.op,
            Op::Flush | Op::Write { fua: true } | Op::WriteZeroes { fua: true }
        );
        let durable = self.setup.config.acknowledge == Acknowledge::Durable;
        let latched = state.flush_failed && (fua || durable);
        let failing = state.device.failed || state.failed_at >= asked.made || latched;
        let change = !reads && asked.request.op != Op::Flush;
        let engine = self.engine.as_ref().expect("there is a process");
        let status = engine.status(asked.request.volume);
        let full = change && status.is_some_and(|status| status.parked_full);
        if full {
            self.marks.hit("refused while too much is parked");
        }
        // It may have been so only until what was answered with it.
        // Who writes zeros or goes around the log needs an extent for it.
        let extent = change
            && (!matches!(asked.request.op, Op::Write { .. }) || zeros || state.model.around);
        let crowded = status.is_some_and(|status| {
            change && status.lost_full || extent && status.lost_blocks_now > 0
        });
        // What was dropped is bad on the cache device, and the device has failed.
        let dropped = self.cache_dropped && reads;
        let unread = asked.request.op != Op::Flush && self.unread_at >= asked.made;
        let gone = self.cache_gone || unread;
        let expected = failing || damaged || refused || full || crowded || dropped || gone;
        if error != RequestError::Io || !expected {
            let lost: Vec<_> =
                cells.iter().filter(|c| state.model.is_lost(c.0, u64::MAX)).collect();
            return Err(Failure(format!(
                "{:?} failed: {error:?}; damaged {lost:?}",
                asked.request
            )));
        }
        if change {
            for (cell, _) in cells {
                state.model.answered(cell, asked.made, now, false);
            }
            if asked.goes_around {
                // It gets no entry any more.
                self.around_fails(index, (asked.first, asked.end));
            }
        }
        Ok(())
    }
}
