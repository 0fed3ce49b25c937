// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache as large as one likes, made by the engine itself: every header, checkpoint page and
//! superblock is the product's own, but guests' blocks are left out. They are holes of the file,
//! which read as zeros, and zeros is what the engine was told they are made of.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use forebay::cache;
use forebay::io::{Device, FileDevice, FileOptions};
use forebay_core::effect::{Effect, Fault};
use forebay_core::engine::{Config, Engine, window_frames};
use forebay_core::format::bytes::block_checksum;
use forebay_core::format::checkpoint::Layout;
use forebay_core::format::record::{Identity, Known};
use forebay_core::format::superblock::{Superblock, Volume};
use forebay_core::log::recovery::{self, CacheReader, Writer};
use forebay_core::payload::{Ingested, Payload, Place};
use forebay_core::request::{Op, Request};
use forebay_core::units::{BufferId, SegmentId, Tick, VolumeIndex};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const BLOCK: usize = 4096;
const SEGMENT_BYTES: usize = 512 << 10;
/// What one request writes: as many entries as blocks.
const REQUEST_BLOCKS: u64 = 256;
const VOLUME: VolumeIndex = VolumeIndex(0);

/// Segment buffers and the window; blocks of guests are not held.
struct Bytes {
    buffers: Vec<u8>,
    window: Vec<u8>,
    zeros: u32,
}

impl Bytes {
    fn buffer(&mut self, buffer: BufferId, offset: usize, length: usize) -> &mut [u8] {
        &mut self.buffers[usize::from(buffer.0) * SEGMENT_BYTES + offset..][..length]
    }
}

impl Payload for Bytes {
    fn ingest(&mut self, _: u32, _: u64, _: BufferId, _: u16) -> Ingested {
        Ingested::Stored { crc: self.zeros }
    }

    fn checksum(&mut self, _: Place) -> u32 {
        self.zeros
    }

    fn is_header(&mut self, _: Place, _: &Known, _: &Identity) -> bool {
        unreachable!("nothing is scrubbed");
    }

    fn copy(&mut self, _: Place, _: Place, _: u16) {
        unreachable!("nothing is read or written back");
    }

    fn zero(&mut self, _: Place, _: u16) {
        unreachable!("nothing is read");
    }

    fn put(&mut self, buffer: BufferId, offset: u32, bytes: &[u8]) {
        self.buffer(buffer, offset as usize, bytes.len()).copy_from_slice(bytes);
    }

    fn store(&mut self, place: Place, bytes: &[u8]) {
        let Place::Window { frame } = place else { unreachable!("a page of a checkpoint") };
        self.window[frame as usize * BLOCK..][..bytes.len()].copy_from_slice(bytes);
    }

    fn buffer_begin(&mut self, _: BufferId, _: SegmentId) {}

    fn buffer_end(&mut self, _: BufferId) {}
}

struct Reader<'a>(&'a dyn Device);

impl CacheReader for Reader<'_> {
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        self.0.read_at(offset, bytes).map_err(|_| Fault)
    }
}

/// An engine that fills a cache.
pub struct Filler {
    engine: Engine,
    superblock: Superblock,
    device: FileDevice,
    file: File,
    bytes: Bytes,
    now: u64,
    next: u64,
    answered: u64,
    chunks: u64,
    /// What goes to the file: nothing before the checkpoint that is to be opened from.
    real: bool,
    /// Pages of the checkpoint under way.
    pages: u64,
    /// Give up after so many.
    pages_max: u64,
    crashed: bool,
}

impl Filler {
    pub fn new(path: &Path, size_bytes: u64) -> Filler {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.unwrap();
        file.set_len(size_bytes).unwrap();
        let options = FileOptions { direct: false, ..FileOptions::default() };
        let device = FileDevice::open(path, &options).unwrap();
        let now = forebay::shard::wall_now();
        let superblock = cache::format(&device, size_bytes, SEGMENT_BYTES as u32, now).unwrap();
        // Nothing is written back: all of it is dirty.
        let never = u64::MAX / 4;
        let config = Config { dirty_percent: 100, dirty_age: never, ..Config::default() };
        let found = recovery::recover(
            &superblock,
            &mut Reader(&device),
            config.extent_count_max,
            Writer::MayHaveLostPower,
            config.mutants,
        );
        let mut superblock = recovery::reopen(&superblock, &found, config.mutants);
        let mut engine = Engine::new(&superblock, found, config, Tick(0));
        let volume = Volume {
            attach_generation: superblock.sequence as u32 + 1,
            ..Volume::empty([8; 16], "v", 4 * size_bytes)
        };
        superblock.volumes[0] = Some(volume.clone());
        superblock.sequence += 1;
        cache::write_superblock(&device, &superblock).unwrap();
        engine.attach(VOLUME, &volume);
        engine.serve(VOLUME, true);
        let bytes = Bytes {
            buffers: vec![0; usize::from(config.buffer_count) * SEGMENT_BYTES],
            window: vec![0; window_frames(&config) as usize * BLOCK],
            zeros: block_checksum(&[0; BLOCK]),
        };
        let chunks = 4 * size_bytes / (REQUEST_BLOCKS * BLOCK as u64);
        Filler {
            engine,
            superblock,
            device,
            file,
            bytes,
            now: 0,
            next: 0,
            answered: 0,
            chunks,
            real: false,
            pages: 0,
            pages_max: u64::MAX,
            crashed: false,
        }
    }

    pub fn entries(&self) -> u64 {
        self.engine.status(VOLUME).unwrap().stats.written_blocks
    }

    fn slots(&self) -> u64 {
        u64::from(self.superblock.segment_count) * u64::from(self.superblock.segment_blocks())
    }

    /// Fills `percent` of the cache, has a checkpoint made and named, and writes the tail: until
    /// the next checkpoint is due, and that one has been half written. Then it stops as a killed
    /// process stops. Returns entries before the checkpoint and behind it.
    pub fn fill(mut self, percent: u64) -> (u64, u64) {
        let wanted = self.slots() * percent / 100;
        while self.entries() < wanted {
            self.write();
        }
        while !self.engine.is_checkpointed() {
            self.write();
        }
        self.real = true;
        let before = self.engine.checkpoint_count();
        self.engine.want_checkpoint();
        while self.engine.checkpoint_count() == before {
            self.write();
        }
        let filled = self.entries();
        self.pages_max = self.pages / 2;
        self.pages = 0;
        while !self.crashed {
            self.write();
        }
        (filled, self.entries() - filled)
    }

    /// The next megabyte, anywhere.
    fn write(&mut self) {
        self.next += 1;
        // The multiplier is odd and the count a power of two, or nearly: few places come twice.
        let chunk = (u128::from(self.next) * 0x9E37_79B1 % u128::from(self.chunks)) as u64;
        let length = REQUEST_BLOCKS * BLOCK as u64;
        let op = Op::Write { fua: false };
        let request = Request { volume: VOLUME, op, offset: chunk * length, length, tag: 0 };
        self.engine.submit(request, &mut self.bytes).unwrap();
        self.effects();
        loop {
            self.now += 100_000;
            self.engine.tick(Tick(self.now), 1, &mut self.bytes);
            self.effects();
            // It may have to wait, since so much is dirty.
            if self.answered == self.next || self.crashed {
                return;
            }
        }
    }

    /// Whether pages of slots lie there.
    fn is_slots(&self, address: u64) -> bool {
        let Superblock { segment_count, checkpoint_bytes, .. } = self.superblock;
        let layout = Layout::of(segment_count, self.superblock.segment_blocks());
        let area = self.superblock.checkpoint_at;
        let page = ((address - area) % checkpoint_bytes / BLOCK as u64) as u32;
        (layout.slot_page(0)..layout.segment_page()).contains(&page)
    }

    fn effects(&mut self) {
        while let Some(effect) = self.engine.next_effect() {
            let token = match effect {
                Effect::Answer { result, .. } => {
                    assert_eq!(result, Ok(()));
                    self.answered += 1;
                    continue;
                }
                // Write-back of a cache that is more than half dirty: its blocks never come.
                Effect::ReadCache { .. } => continue,
                Effect::WriteCache { token, buffer, segment, block, .. } => {
                    if self.real {
                        let header = self.bytes.buffer(buffer, usize::from(block) * BLOCK, BLOCK);
                        let address = self.superblock.address(segment, block);
                        self.file.write_all_at(header, address).unwrap();
                    }
                    token
                }
                Effect::WriteArea { token, address, blocks, from } => {
                    let Place::Window { frame } = from else { unreachable!("of the window") };
                    self.pages += u64::from(blocks);
                    // Runs of slots stay where an earlier checkpoint wrote them.
                    if self.real || self.is_slots(address) {
                        let length = usize::from(blocks) * BLOCK;
                        let pages = &self.bytes.window[frame as usize * BLOCK..][..length];
                        self.file.write_all_at(pages, address).unwrap();
                    }
                    if self.pages > self.pages_max {
                        self.crashed = true;
                        return;
                    }
                    token
                }
                Effect::WriteSuperblock { token, change } => {
                    if self.real {
                        change.apply(&mut self.superblock);
                        cache::write_superblock(&self.device, &self.superblock).unwrap();
                    } else {
                        self.pages = 0;
                    }
                    token
                }
                Effect::FlushCache { token } => token,
                other => unreachable!("{other:?}"),
            };
            self.engine.complete(token, Ok(()), &mut self.bytes);
        }
    }
}
