// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backing devices that grow while the guest works: whatever they hold beyond the old end is the volume's then, to
//! the sector, wherever the machine stops on the way.

use crate::block::{Block, guest_block};
use crate::device::Piece;
use crate::random::{Random, mix};
use crate::world::{Failure, Outcome, World};
use forebay_core::op::grow::Growth;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};

/// A volume whose backing device has more bytes than it.
#[derive(Clone, Debug)]
pub struct Growing {
    size_bytes: u64,
    /// What lies beyond the old end: block, its sectors that do, content.
    found: Vec<Piece>,
}

/// Blocks that a device grows by at most.
const BLOCKS_MAX: u64 = 8;

impl World {
    /// A backing device has more bytes from now on, and the engine is told.
    pub fn begin_to_grow(&mut self, index: usize) -> Outcome {
        let volume = &self.volumes[index];
        let last = volume.blocks() - 1;
        let old = volume.size_bytes;
        let room = old.next_multiple_of(BLOCK_BYTES) - old;
        let more = match self.random.below(3) {
            // Within the last block.
            0 if room > 512 => 512 * self.random.between(1, room / 512 - 1),
            1 if room > 0 => room,
            _ => 512 * self.random.between(1, BLOCKS_MAX * 8),
        };
        let size_bytes = old + more;
        let mut grown = volume.clone();
        grown.size_bytes = size_bytes;
        let mut found = Vec::new();
        for (at, lba) in (last..grown.blocks()).enumerate() {
            let before = if lba == last { volume.mask(lba) } else { 0 };
            let mask = grown.mask(lba) & !before;
            let cell = volume.cells() + at - 1;
            let content = guest_block(index as u8, cell as u64, 0, false);
            let content = if self.random.one_in(4) { Block::zero() } else { content };
            found.push((lba, mask, content));
        }
        found.retain(|piece| piece.1 != 0);
        let volume = &mut self.volumes[index];
        volume.device.grow(grown.blocks().max(volume.device.blocks()), found.clone());
        volume.growing = Some(Growing { size_bytes, found });
        self.marks.hit("device grown in mid-run");
        let engine = self.engine.as_mut().expect("there is a process");
        engine.begin_to_grow(VolumeIndex(index as u8), size_bytes, &mut self.memory);
        self.drain_effects()
    }

    /// The superblock says the new size of what is ready to grow; a little later the engine is told so. Says whether
    /// something was done.
    pub(crate) fn go_on_growing(&mut self) -> Result<bool, Failure> {
        // Nothing else happens.
        let alone = self.next_event().is_none();
        let mut any = false;
        for index in 0..self.volumes.len() {
            let at = VolumeIndex(index as u8);
            let Some(growing) = &self.volumes[index].growing else { continue };
            let size_bytes = growing.size_bytes;
            // By a chance of its own.
            let mut random = Random::new(mix(self.order ^ self.trace ^ 0x6120));
            let growth = self.engine.as_ref().and_then(|engine| engine.growth(at));
            match growth {
                None => self.volumes[index].growing = None,
                Some(Growth::Ready) if self.memory.dead => {}
                Some(Growth::Ready) if !self.says_size(index, size_bytes) => {
                    if self.cache_failed {
                        self.cancel_growth(index)?;
                    } else if alone || random.one_in(30) {
                        any = true;
                        self.note_size(index, size_bytes);
                        self.write_superblock();
                    }
                }
                Some(Growth::Ready) if alone || random.one_in(30) => {
                    any = true;
                    let engine = self.engine.as_mut().expect("there is a process");
                    engine.grow(at, &mut self.memory);
                    self.has_grown(index);
                    self.drain_effects()?;
                }
                Some(_) if random.one_in(400) && !self.says_size(index, size_bytes) => {
                    self.marks.hit("growth cancelled");
                    self.cancel_growth(index)?;
                }
                Some(_) => {}
            }
        }
        Ok(any)
    }

    /// A volume stays as large as it is, if it was to grow.
    pub(crate) fn cancel_growth(&mut self, index: usize) -> Outcome {
        let Some(size_bytes) = self.volumes[index].growing.as_ref().map(|it| it.size_bytes) else {
            return Ok(());
        };
        if self.says_size(index, size_bytes) {
            // Too late: it was only not told yet.
            let engine = self.engine.as_mut().expect("there is a process");
            engine.grow(VolumeIndex(index as u8), &mut self.memory);
            self.has_grown(index);
        } else {
            self.volumes[index].growing = None;
            let engine = self.engine.as_mut().expect("there is a process");
            engine.cancel_growth(VolumeIndex(index as u8), &mut self.memory);
        }
        self.drain_effects()
    }

    /// The machine stops while the superblock may be being written with a new size in it.
    /// Says whether it was: of two changes of the superblock the second waits for the first.
    pub(crate) fn stop_growing(&mut self, random: &mut Random) -> bool {
        if self.cache_failed {
            // One copy may not be durable: nobody replaces the other (R5 of `format::pair`).
            return false;
        }
        if self.memory.dead {
            // It died within a call of the engine, and sizes are written between two. What that call made ready nobody has heard,
            // no checker either.
            return false;
        }
        for index in 0..self.volumes.len() {
            let Some(size_bytes) = self.volumes[index].growing.as_ref().map(|it| it.size_bytes)
            else {
                continue;
            };
            let at = VolumeIndex(index as u8);
            let is_ready =
                self.engine.as_ref().is_some_and(|it| it.growth(at) == Some(Growth::Ready));
            if is_ready && !self.says_size(index, size_bytes) && random.one_in(2) {
                self.marks.hit("stopped while a size was written");
                self.note_size(index, size_bytes);
                self.superblock.sequence += 1;
                let through = self.cache.flush_begin();
                self.write_superblock_in_part(random.below(5), through);
                return true;
            }
        }
        false
    }

    /// The machine was started again: what the superblock says is the size.
    pub(crate) fn open_grown(&mut self) {
        for index in 0..self.volumes.len() {
            let Some(growing) = &self.volumes[index].growing else { continue };
            if self.says_size(index, growing.size_bytes) {
                self.marks.hit("larger after an opening");
                self.has_grown(index);
            }
            self.volumes[index].growing = None;
        }
    }

    fn says_size(&self, index: usize, size_bytes: u64) -> bool {
        let recorded = &self.superblock.volumes[index];
        recorded.as_ref().is_some_and(|volume| volume.size_bytes == size_bytes)
    }

    fn note_size(&mut self, index: usize, size_bytes: u64) {
        if let Some(recorded) = &mut self.superblock.volumes[index] {
            recorded.size_bytes = size_bytes;
        }
    }

    /// The guest may go to the new end.
    fn has_grown(&mut self, index: usize) {
        let volume = &mut self.volumes[index];
        let Growing { size_bytes, found } = volume.growing.take().expect("it grew");
        self.marks.hit(match volume.size_bytes.is_multiple_of(BLOCK_BYTES) {
            true => "volume grown: whole blocks",
            false => "volume grown: last block in part",
        });
        let blocks = size_bytes.div_ceil(BLOCK_BYTES) - volume.blocks();
        volume.size_bytes = size_bytes;
        volume.islands.last_mut().expect("there is one").blocks += blocks;
        volume.dirty.resize(volume.cells(), false);
        for (lba, mask, content) in found {
            let cell = volume.cell(lba).expect("it is at the end of an island");
            let content = Block::merge(&Block::zero(), &content, mask);
            volume.model.grown(cell, &content, mask);
            if let Some(prefix) = &mut volume.prefix {
                prefix.grown(cell, &content, mask);
            }
        }
    }
}
