// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the cache device does behind everybody's back: rot, latent errors, lost and misdirected
//! writes, of blocks that guests wrote and of record headers.
//!
//! # Rules
//!
//! - Only what is durable is touched: that a device forgets the rest is what power cuts are for.
//! - Only what a later durable record calls durable is touched, or what a process left that died
//!   alone. What no record calls so yet looks
//!   torn once it is bad, and nobody can tell (`docs/faults.md`).
//! - Of a log at most one header is bad at a time, and never if the next record, which says what
//!   the bad one held, may itself be taken back by a power cut.

use crate::block::{Block, guest_block, origin};
use crate::random::{Random, mix};
use crate::world::World;
use forebay_core::format::entry::{Entry, Kind};
use forebay_core::format::record::{self, Header};
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Ordinal, SegmentId, Sequence, VolumeIndex};
use std::rc::Rc;

/// A record on the cache device.
struct Record {
    /// The header's block on the device.
    at: u64,
    segment: SegmentId,
    header: Header,
    entries: Vec<Entry>,
}

impl World {
    /// Something on the cache device goes bad, if chance finds something that may.
    pub(crate) fn rot(&mut self) {
        if self.random.one_in(4) { self.rot_record(false) } else { self.rot_block() }
    }

    /// Before the machine stops: what the next opening will read goes bad.
    pub(crate) fn rot_before_stop(&mut self) {
        if self.setup.rot == 0 {
            return;
        }
        for _ in 0..self.random.below(8) {
            self.rot_record(true);
        }
    }

    /// Before a scrub: much of what it will read goes bad.
    pub(crate) fn rot_before_scrub(&mut self) {
        if self.setup.rot == 0 || self.faults_over {
            return;
        }
        for _ in 0..self.random.below(12) {
            self.rot();
        }
    }

    /// The process died alone: of what it wrote nothing is torn, so what is bad is rot, whether a
    /// record calls it durable or not. That is so until the next opening is over.
    pub(crate) fn rot_after_death(&mut self) {
        if self.setup.rot == 0 || self.random.one_in(2) {
            return;
        }
        let records = self.records();
        let unnamed = |record: &&Record| {
            record.header.last_sequence() > self.named(&records, record.header.volume)
        };
        let blocks = |record: &Record| record.at + 1..record.at + u64::from(record.header.blocks);
        let unnamed: Vec<u64> = records.iter().filter(unnamed).flat_map(blocks).collect();
        self.powered = true;
        for _ in 0..self.random.between(1, 8) {
            if self.random.one_in(3) {
                self.rot_record(false);
            } else if unnamed.is_empty() || self.random.one_in(3) {
                self.rot_block();
            } else {
                let block = *self.random.pick(&unnamed);
                self.rot_this(block);
            }
        }
    }

    fn rot_block(&mut self) {
        let block = self.any_block();
        self.rot_this(block);
    }

    /// Any block of the segments.
    pub(crate) fn any_block(&mut self) -> u64 {
        let first = self.superblock.first_segment / BLOCK_BYTES;
        let slots =
            u64::from(self.superblock.segment_count) * u64::from(self.superblock.segment_blocks());
        first + self.random.below(slots)
    }

    fn rot_this(&mut self, block: u64) {
        let content = self.cache.read(block);
        let Some((volume, cell, _)) = origin(&content, 0) else { return };
        // Other bytes may look like a guest's tag; there is no such block then.
        let known = self.volumes.get(usize::from(volume));
        if known.is_none_or(|known| cell as usize >= known.cells()) {
            return;
        }
        let durable = self.powered || Rc::ptr_eq(&content, &self.cache.durable(block));
        // Of a copy nobody knows by looking whose block it is.
        let copied = self.copied.contains_key(&content.tags()[0]);
        let whole = origin(&content, 7).is_some_and(|last| (last.0, last.1) == (volume, cell));
        if !durable || copied || !whole {
            return;
        }
        let records = self.records();
        let mine = |record: &&Record| {
            (record.at..record.at + u64::from(record.header.blocks)).contains(&block)
        };
        let Some(record) = records.iter().find(mine) else { return };
        if record.header.last_sequence() > self.named(&records, record.header.volume) {
            return;
        }
        if self.powered {
            self.marks.hit("rot after a death");
        }
        let now = self.moment();
        let state = &mut self.volumes[usize::from(volume)];
        state.model.may_be_lost(cell as usize, now);
        if let Some(prefix) = &mut state.prefix {
            prefix.damaged(cell as usize);
        }
        if self.random.one_in(2) {
            self.marks.hit("cache block unreadable");
            self.cache.make_unreadable(block);
            return;
        }
        self.marks.hit("cache block rotted");
        let mut bytes = *content.bytes();
        match self.random.below(4) {
            0 => bytes[self.random.below(4096) as usize] ^= 1 << self.random.below(8),
            1 => bytes.fill(0),
            // An older version: the write that should have replaced it was lost.
            2 => bytes = *guest_block(volume, cell, 0, false).bytes(),
            // Another block: a write went astray.
            _ => {
                let other = self.any_block();
                bytes = *self.cache.read(other).bytes();
            }
        }
        self.cache.rot(block, Block::new(bytes));
    }

    /// The header of a record goes bad, or all of the record: one that is not yet on the backing
    /// device, if `dirty`.
    fn rot_record(&mut self, dirty: bool) {
        let records = self.records();
        let watermark = |volume: u16| {
            let status = self.engine.as_ref()?.status(VolumeIndex(volume as u8))?;
            Some(status.watermark)
        };
        let watermarks: Vec<_> = (0..self.volumes.len() as u16).map(watermark).collect();
        let wanted: Vec<&Record> = (records.iter())
            .filter(|record| {
                let watermark = watermarks.get(usize::from(record.header.volume));
                let is_dirty = watermark.is_some_and(|it| Some(record.header.sequence) > *it);
                is_dirty || !dirty
            })
            .collect();
        if wanted.is_empty() {
            return;
        }
        let record = *self.random.pick(&wanted);
        let volume = record.header.volume;
        let named = self.named(&records, volume);
        // The next record, which says what this one held, is safe.
        let told = records.iter().any(|next| {
            next.header.volume == volume
                && next.header.previous.sequence == record.header.sequence
                && next.header.last_sequence() <= named
        });
        // What was bad is missing in the log until the tail has passed it, even if its segment is
        // used for something else by then.
        let attached = record.header.attach_generation;
        let mine = |other: &&Record| {
            let header = &other.header;
            (header.volume, header.attach_generation) == (volume, attached)
                && header.last_sequence() <= named
        };
        let tail = records.iter().filter(mine).map(|other| other.header.tail).max();
        let alone = self.bad_headers.iter().all(|(of, generation, ordinal)| {
            (*of, *generation) != (volume, attached) || Some(*ordinal) < tail
        });
        // Of the newest segment nobody but its own headers tells. If the write of its first record
        // is lost, there is a valid one of an earlier life in its place (`docs/faults.md`).
        let newest =
            records.iter().filter(mine).all(|other| other.header.ordinal <= record.header.ordinal);
        if !told || !alone {
            return;
        }
        let (at, blocks) = (record.at, u64::from(record.header.blocks));
        let from = self.random.pick(&records).at;
        let others: Vec<u64> =
            records.iter().filter(|it| it.segment == record.segment).map(|it| it.at).collect();
        let beside = *self.random.pick(&others);
        let life = (record.segment, record.header.segment_sequence);
        let only = records
            .iter()
            .all(|it| it.at == at || (it.segment, it.header.segment_sequence) != life);
        let mut header = *self.cache.read(at).bytes();
        let mut whole = false;
        let name = match self.random.below(6) {
            0 => {
                header[self.random.below(4096) as usize] ^= 1 << self.random.below(8);
                "header rotted"
            }
            1 => {
                header.fill(0);
                "header rotted"
            }
            // Another header of the same segment, valid but for its address; or any.
            2 => {
                header = *self.cache.read(beside).bytes();
                "header written astray"
            }
            3 => {
                header = *self.cache.read(from).bytes();
                "header written astray"
            }
            4 => {
                whole = true;
                "record written astray"
            }
            // Nor is there, if it was the only one of the segment, anybody to tell where a cut had ended the
            // segment before (`docs/faults.md`).
            _ if newest || only && self.is_void_there(record) => return,
            _ => {
                whole = true;
                "write lost"
            }
        };
        if header == *self.cache.read(at).bytes() && !whole || whole && self.is_written_over(record)
        {
            return;
        }
        let mut random = Random::new(mix(self.order ^ self.trace ^ 0x4EAE));
        let name = match name {
            "header rotted" if random.one_in(2) => "header unreadable",
            name => name,
        };
        self.marks.hit(name);
        let (segment, ordinal, block) = (record.segment, record.header.ordinal, at % 16);
        self.tell(|| format!("{name}: volume {volume} {segment:?} {ordinal:?}, block {block}"));
        let now = self.moment();
        let state = usize::from(volume);
        let entries: Vec<Entry> = record.entries.clone();
        for entry in entries {
            let end = entry.lba.0 + u64::from(entry.count);
            for (cell, _) in self.cells(state, entry.lba.0, end) {
                // What is on the backing device is not lost with its copy.
                if matches!(entry.kind, Kind::Fill | Kind::Bypassed) {
                    self.marks.hit(match entry.kind {
                        Kind::Fill => "header of a fill rotted",
                        _ => "header of what went around the log rotted",
                    });
                    self.volumes[state].model.copy_damaged(cell);
                    continue;
                }
                // It is already.
                if entry.kind == Kind::Lost {
                    self.marks.hit("header that names a lost block rotted");
                }
                self.volumes[state].model.may_be_lost(cell, now);
                if let Some(prefix) = &mut self.volumes[state].prefix {
                    prefix.damaged(cell);
                }
            }
        }
        if name == "header unreadable" {
            self.cache.make_unreadable(at);
        }
        let changed = match whole {
            true => blocks,
            false => u64::from(name != "header unreadable"),
        };
        for block in 0..changed {
            let content = match name {
                "write lost" => self.cache.before(at + block),
                "record written astray" => self.cache.read(from + block),
                _ => Block::new(header),
            };
            self.cache.rot(at + block, content);
        }
        // Those of a log that was given up before do not count for this one, nor this one for them.
        self.bad_headers.retain(|(of, generation, _)| (*of, *generation) != (volume, attached));
        self.bad_headers.push((volume, attached, ordinal));
    }

    /// Whether a lost write would leave a record that a cut made void, with this one's ordinal.
    fn is_void_there(&self, record: &Record) -> bool {
        let mut bytes: [u8; BLOCK_SIZE] = *self.cache.before(record.at).bytes();
        let identity = self.superblock.identity();
        record::decode(&mut bytes, record.at * BLOCK_BYTES, &identity).is_ok_and(|header| {
            (header.volume, header.ordinal) == (record.header.volume, record.header.ordinal)
        })
    }

    /// Whether one of a younger life of its segment is already behind its header, which is not yet written over.
    fn is_written_over(&self, record: &Record) -> bool {
        let identity = self.superblock.identity();
        (record.at + 1..record.at + u64::from(record.header.blocks)).any(|at| {
            let mut bytes: [u8; BLOCK_SIZE] = *self.cache.read(at).bytes();
            record::decode(&mut bytes, at * BLOCK_BYTES, &identity).is_ok()
        })
    }

    /// The records that are on the device for sure, of all segments.
    fn records(&self) -> Vec<Record> {
        let (blocks, identity) = (self.superblock.segment_blocks(), self.superblock.identity());
        let mut all = Vec::new();
        for segment in (0..self.superblock.segment_count).map(SegmentId) {
            // What looks like a header within a record a guest wrote: a copy of what was there once.
            let mut end = 0;
            for block in 0..blocks {
                if block < end {
                    continue;
                }
                let address = self.superblock.address(segment, block);
                let at = address / BLOCK_BYTES;
                let content = self.cache.read(at);
                if !content.bytes().starts_with(b"FBRECORD") {
                    continue;
                }
                let durable = Rc::ptr_eq(&content, &self.cache.durable(at)) || self.powered;
                if !durable || self.cache.is_unreadable(at) {
                    continue;
                }
                let mut bytes: [u8; BLOCK_SIZE] = *content.bytes();
                let Ok(header) = record::decode(&mut bytes, address, &identity) else { continue };
                end = block + header.blocks;
                let entries = (0..header.entry_count).map(|entry| record::entry(&bytes, entry));
                all.push(Record { at, segment, header, entries: entries.flatten().collect() });
            }
        }
        all
    }

    /// The newest sequence of a log that something on the device calls durable, and still does after a power cut: what lies behind a record
    /// that it takes back is not found.
    fn named(&self, records: &[Record], volume: u16) -> Sequence {
        if self.powered {
            return Sequence(u64::MAX);
        }
        let Some(recorded) = self.superblock.volumes[usize::from(volume)].as_ref() else {
            return Sequence::default();
        };
        let attached = recorded.attach_generation;
        let mut mine: Vec<&Header> = (records.iter().map(|record| &record.header))
            .filter(|header| (header.volume, header.attach_generation) == (volume, attached))
            .collect();
        mine.sort_unstable_by_key(|header| header.sequence);
        let tail = mine.iter().map(|header| header.tail).max().unwrap_or_default();
        let (mut named, mut before) = (recorded.head.through, recorded.head.link.sequence);
        let mut first = true;
        let opening = self.superblock.open_generation;
        for header in mine.iter().filter(|header| header.open_generation == opening) {
            if header.ordinal < tail {
                continue;
            }
            let is_bad = |ordinal: Ordinal| self.bad_headers.contains(&(volume, attached, ordinal));
            let linked = header.previous.sequence <= before
                // Or what was before it is reclaimed, or bad, not taken back.
                || first && header.ordinal == tail
                || is_bad(header.ordinal)
                || is_bad(Ordinal(header.ordinal.0.saturating_sub(1)));
            if !linked {
                break;
            }
            named = named.max(header.durable_through);
            (before, first) = (header.sequence, false);
        }
        named
    }
}
