// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The head of a log: placing entries, closing records, opening segments.
//!
//! # Invariants
//!
//! - **P1** The index changes when an entry is placed, in the order of sequences.
//! - **P2** An entry is whole in the buffer, its checksum included, before anyone is answered.
//! - **P3** Guest data leaves each log [`SEGMENTS_RESERVED`] segments of the pool, and each other volume what it has reserved
//!   (`policy::reserve`).
//! - **P4** Whoever may have a segment gets a buffer for it: if the heads of other logs have all, the one that was begun first ends. The last
//!   one is not taken by who may have nothing to put there: an empty head cannot be ended.
//! - **P5** Who found no buffer goes before who had one: the first of them is put in order first.
//!
//! # Crash
//!
//! An open record lies in the buffer as a header without a checksum, the number of its entries
//! being raised after each entry is there. After a crash of the process alone, recovery closes it
//! (`recovery::redo`). After a power cut it never was.

use crate::effect::{Effect, Token};
use crate::engine::{CacheHealth, Engine, Pending};
use crate::format::entry::{Entry, Kind};
use crate::format::record::{self, AT_ENTRIES, AT_ENTRY_COUNT, AT_FLUSH_EPOCH, Header, Link};
use crate::limits::{BACKGROUND_BLOCKS, SEGMENTS_RESERVED};
use crate::log::chain::{Head, InFlight, OpenRecord, RECORDS_IN_FLIGHT_MAX};
use crate::log::segment::State;
use crate::map::extent::{Extent, Position};
use crate::map::slots::{Heading, Held};
use crate::mutant::Mutant;
use crate::payload::{Payload, Place, Placed};
use crate::units::{BLOCK_BYTES, BufferId, Lba, Ordinal, SegmentId, Sequence, VolumeIndex};
use crate::volume::{PendingExtent, Volume};

/// Blocks of a write of a record that nobody waits for and that holds nothing but copies.
const PART_BLOCKS: u16 = BACKGROUND_BLOCKS as u16;
/// Of one that somebody waits for, and that is longer for the copies in it.
const MIXED_PART_BLOCKS: u16 = 16;

/// Blocks of the next write of a record of which so many are left: guests' reads wait behind each.
fn part(left: u16, copies: bool, hurries: bool) -> u16 {
    match (hurries, copies) {
        (false, _) => left.min(PART_BLOCKS),
        (true, true) => left.min(MIXED_PART_BLOCKS),
        (true, false) => left,
    }
}

/// Extents over at most this many blocks take older data out of the index at once.
pub(crate) const EAGER_BLOCKS: u32 = 512;

impl Engine {
    /// Makes room for one more entry of a guest with `slots` (0 or 1) blocks; says whether there is.
    pub(crate) fn room(
        &mut self,
        volume: VolumeIndex,
        slots: u16,
        payload: &mut impl Payload,
    ) -> bool {
        self.room_of(volume, slots, true, payload)
    }

    /// The same for what no guest asks for: no writer pays for it (H2 of `policy::delay`).
    pub(crate) fn own_room(
        &mut self,
        volume: VolumeIndex,
        slots: u16,
        payload: &mut impl Payload,
    ) -> bool {
        let before = self.log_head(volume);
        let found = self.room_of(volume, slots, false, payload);
        let taken = self.log_head(volume) - before + u64::from(if found { slots } else { 0 });
        self.volume(volume).delay.spare(taken);
        found
    }

    /// The same for a note: writers pay for it, unless refused blocks may be what it is of (H2).
    pub(crate) fn note_room(&mut self, volume: VolumeIndex, payload: &mut impl Payload) -> bool {
        match self.volume(volume).parked.is_empty() {
            true => self.room_of(volume, 0, false, payload),
            false => self.own_room(volume, 0, payload),
        }
    }

    fn room_of(
        &mut self,
        volume: VolumeIndex,
        slots: u16,
        guest: bool,
        payload: &mut impl Payload,
    ) -> bool {
        if self.health == CacheHealth::Failed {
            return false;
        }
        if guest && self.volume(volume).log.head.is_some_and(|head| head.reserve) {
            if !self.guest_may_take(volume) {
                self.volume(volume).refused = true;
                return false;
            }
            self.volume(volume).log.head.as_mut().expect("looked").reserve = false;
        }
        let blocks = self.geometry.segment_blocks;
        let log = &self.volume(volume).log;
        if log.has_room(slots, blocks) {
            return true;
        }
        if log.head.is_some() && log.open.is_some() {
            self.close_record(volume, payload);
        }
        let few_tokens = self.tokens.room() < 64;
        let log = &self.volume(volume).log;
        if log.in_flight.len() >= RECORDS_IN_FLIGHT_MAX || few_tokens {
            return false;
        }
        // A record that could hold nothing but its header is not worth its block.
        if log.head.is_some_and(|head| head.next_block + 1 + slots.max(1) > blocks) {
            self.seal_segment(volume, payload);
        }
        if self.volume(volume).log.head.is_none() && !self.open_segment(volume, guest, payload) {
            return false;
        }
        self.open_record(volume, payload);
        true
    }

    /// Room for an extent: in the map, in the list that write-back reads, in a record.
    pub(crate) fn extent_room(&mut self, volume: VolumeIndex, payload: &mut impl Payload) -> bool {
        self.has_extent_room(volume) && self.room(volume, 0, payload)
    }

    /// The same but for the record.
    pub(crate) fn has_extent_room(&mut self, volume: VolumeIndex) -> bool {
        let limit = self.config.extent_count_max as usize;
        let state = self.volume(volume);
        if state.log.durable.watermark >= state.log.watermark {
            state.noting_extents = 0;
        }
        let pending = state.pending_extents.len() + state.noting_extents;
        let room = state.extents.has_guest_room() && pending < limit;
        if !room {
            state.starved = true;
            state.extents_full = !state.extents.has_guest_room();
        }
        room
    }

    /// Where the next block goes; there is room.
    #[inline]
    pub(crate) fn next_slot(&mut self, volume: VolumeIndex) -> (BufferId, u16) {
        let head = self.volume(volume).log.head.expect("there is room");
        (head.buffer, head.next_block)
    }

    /// Places the block that lies in the next slot (P1, P2).
    pub(crate) fn place_data(
        &mut self,
        volume: VolumeIndex,
        lba: Lba,
        crc: u32,
        kind: Kind,
        payload: &mut impl Payload,
    ) {
        let head = self.volume(volume).log.head.expect("there is room");
        let seed = self.seed(head.segment, head.next_block);
        let crc = seed.apply(crc);
        let slot = self.segments.slot(head.segment, head.next_block);
        self.slots.hold(slot, Held { lba, crc, fill: kind == Kind::Fill });
        if !self.config.mutants.is(Mutant::IndexNotUpdated) || !lba.0.is_multiple_of(7) {
            self.index.insert(volume, lba, slot);
        }
        let log = &mut self.volume(volume).log;
        let block = log.open.expect("there is room").block;
        let entry = Entry { kind, lba, count: 1, crc, slot: head.next_block - block };
        log.head.as_mut().expect("there is room").next_block += 1;
        let sequence = self.place_entry(volume, entry, payload);
        if kind == Kind::Parked {
            let now = self.now;
            let state = self.volume(volume);
            let since = state.dirty_since().unwrap_or(now);
            state.parked.insert(lba, since);
            state.log.dirtied = sequence;
            state.log.dirty_blocks += 1;
            state.stats.parked_blocks += 1;
        } else if kind == Kind::Data {
            let state = self.volume(volume);
            if !state.parked.is_empty() {
                state.parked.remove(lba, lba + 1);
            }
            let lost = |extent: &Extent| extent.kind == Kind::Lost;
            if state.extents.lost_len() > 0 && state.extents.get(lba).is_some_and(lost) {
                // It is over anyway; without room it is seen to be when its segment is emptied.
                state.extents.try_cut(lba);
            }
            state.log.dirtied = sequence;
            state.log.dirty_blocks += 1;
            state.stats.written_blocks += 1;
        }
    }

    /// Places an extent of at most 2^32 - 1 blocks.
    pub(crate) fn place_extent(
        &mut self,
        volume: VolumeIndex,
        kind: Kind,
        lba: Lba,
        count: u32,
        payload: &mut impl Payload,
    ) {
        if count <= EAGER_BLOCKS {
            for offset in 0..u64::from(count) {
                if let Some(slot) = self.index.get(volume, lba + offset) {
                    self.index.remove(volume, lba + offset, slot);
                }
            }
        }
        let state = self.volume(volume);
        let head = state.log.head.expect("there is room");
        let segment = head.segment;
        let entry = Entry { kind, lba, count, crc: 0, slot: 0 };
        let sequence = self.place_entry(volume, entry, payload);
        let ordinal = self.segments.get(segment).ordinal;
        let position = Position::new(ordinal, head.next_block);
        let state = self.volume(volume);
        let end = lba + u64::from(count);
        let long = count > EAGER_BLOCKS;
        state.extents.insert(Extent { start: lba, end, position, kind, long });
        if !state.parked.is_empty() {
            state.parked.remove(lba, end);
        }
        if matches!(kind, Kind::Zero | Kind::Discard) {
            state.log.dirtied = sequence;
        }
        if kind != Kind::Lost {
            let pending = PendingExtent { sequence, position, kind, lba, count };
            state.pending_extents.push_back(pending);
        }
    }

    /// Puts an entry into the open record, and voids the tickets for its blocks.
    #[inline]
    fn place_entry(
        &mut self,
        volume: VolumeIndex,
        entry: Entry,
        payload: &mut impl Payload,
    ) -> Sequence {
        let (now, marks) = (self.now, !self.config.mutants.is(Mutant::LostItemUnmarked));
        if entry.kind != Kind::Fill {
            self.tickets.void(volume, entry.lba, entry.count.into());
        }
        let log = &mut self.volume(volume).log;
        let head = log.head.expect("there is room");
        let open = log.open.as_mut().expect("there is room");
        if open.entries == 0 {
            open.since = now;
            if open.epoch != log.flush_epoch {
                // Whoever closes it after a crash must say so, too.
                open.epoch = log.flush_epoch;
                let offset = (u64::from(open.block) * BLOCK_BYTES) as u32;
                let epoch = open.epoch.to_le_bytes();
                payload.put(head.buffer, offset + AT_FLUSH_EPOCH as u32, &epoch);
            }
        }
        let index = open.entries;
        open.entries += 1;
        open.copies |= entry.kind == Kind::Fill;
        let (block, entries) = (open.block, open.entries);
        let sequence = Sequence(open.sequence.0 + u64::from(entries));
        log.next_sequence = Sequence(sequence.0 + 1);
        log.placed = sequence;
        let at = Place::Buffer { buffer: head.buffer, block: block + entry.slot };
        let Entry { kind, lba, count, .. } = entry;
        payload.placed(&Placed { volume, sequence, kind, lba, count, at });
        log.items.add(&entry, marks);
        let (at, bytes) = record::put_entry(&mut log.header, index, &entry);
        let offset = (u64::from(block) * BLOCK_BYTES) as u32;
        payload.put(head.buffer, offset + at as u32, &bytes);
        payload.put(head.buffer, offset + AT_ENTRY_COUNT as u32, &entries.to_le_bytes());
        sequence
    }

    /// Begins a record at the head's next block; its header is in the buffer, but for a checksum.
    fn open_record(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let now = self.now;
        let log = &mut self.volume(volume).log;
        assert!(log.open.is_none());
        let head = log.head.as_mut().expect("a segment is open");
        let block = head.next_block;
        head.next_block += 1;
        let (buffer, sequence) = (head.buffer, log.next_sequence);
        let epoch = log.flush_epoch;
        log.open =
            Some(OpenRecord { block, sequence, entries: 0, copies: false, since: now, epoch });
        log.next_sequence = Sequence(sequence.0 + 1);
        log.items.clear();
        log.header.fill(0);
        record::put_items(&mut log.header, log.previous_items.as_slice());
        self.encode_header(volume);
        let log = &self.volume(volume).log;
        let offset = (u64::from(block) * BLOCK_BYTES) as u32;
        // The magic comes last: a header that is there in part is no header.
        payload.put(buffer, offset + 8, &log.header[8..]);
        payload.put(buffer, offset, &log.header[..8]);
    }

    /// Encodes the open record's header as things stand.
    fn encode_header(&mut self, volume: VolumeIndex) -> Header {
        let (identity, wall) = (self.identity, self.wall);
        let open_generation = self.open_generation;
        let attach_generation = self.volume(volume).attach_generation;
        let log = &self.volume(volume).log;
        let head = log.head.expect("a segment is open");
        let open = log.open.expect("a record is open");
        let segment = *self.segments.get(head.segment);
        let (previous_segment, previous_segment_used) = self.previous_of(volume);
        let address = self.geometry.address(head.segment, open.block);
        let log = &mut self.volume(volume).log;
        let header = Header {
            sequence: open.sequence,
            previous: log.last,
            open_generation,
            volume: volume.0.into(),
            attach_generation,
            segment_sequence: segment.sequence,
            ordinal: segment.ordinal,
            previous_segment,
            previous_segment_used,
            blocks: head.next_block - open.block,
            entry_count: open.entries,
            item_count: log.previous_items.as_slice().len() as u16,
            durable_through: log.durable.through,
            tail: log.tail,
            watermark: log.watermark,
            flush_epoch: open.epoch,
            written_at: wall,
            backing_as_of: log.backing_as_of,
        };
        header.encode(&mut log.header, address, identity.uuid);
        header
    }

    /// The segment before the head, and how much of it belongs to the log.
    fn previous_of(&mut self, volume: VolumeIndex) -> (SegmentId, u16) {
        match self.volume(volume).log.before_head {
            Some(id) => (id, self.segments.get(id).used),
            None => (SegmentId(u32::MAX), 0),
        }
    }

    /// Completes the open record and has it written.
    pub(crate) fn close_record(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let log = &mut self.volume(volume).log;
        if let Some(open) = log.open.as_mut().filter(|open| open.entries == 0) {
            open.epoch = log.flush_epoch;
        }
        let header = self.encode_header(volume);
        let identity = self.identity;
        let log = &self.volume(volume).log;
        let (head, open) = (log.head.expect("open"), log.open.expect("open"));
        let address = self.geometry.address(head.segment, open.block);
        let log = &mut self.volume(volume).log;
        let checksum = record::seal(&mut log.header, address, &identity);
        let offset = (u64::from(open.block) * BLOCK_BYTES) as u32;
        if head.next_block < self.geometry.segment_blocks {
            // Whatever the buffer held in an earlier life is not the next header.
            let next = (u64::from(head.next_block) * BLOCK_BYTES) as u32;
            payload.put(head.buffer, next, &[0; 8]);
        }
        let log = &mut self.volume(volume).log;
        // Entries and items are there already.
        payload.put(head.buffer, offset, &log.header[..AT_ENTRIES]);
        log.last =
            Link { sequence: header.sequence, checksum, segment: head.segment, block: open.block };
        log.open = None;
        log.closed = header.last_sequence();
        if core::mem::take(&mut log.note_wanted) {
            // Here and nowhere else: a record may be closed for being full before anyone asks.
            log.want(log.closed);
        }
        log.closed_bytes += u64::from(header.blocks) * BLOCK_BYTES;
        core::mem::swap(&mut log.items, &mut log.previous_items);
        let begins_epoch = core::mem::replace(&mut log.record_epoch, open.epoch) != open.epoch;
        let position = Position::new(header.ordinal, head.next_block);
        let marks = log.marks(&header, position, open.since);
        let token = self.token(Pending::Record { volume, segment: head.segment });
        // Copies of what was read are in no hurry, and guests' reads are.
        let log = &self.volume(volume).log;
        let hurries = log.dirtied >= header.sequence || log.wanted >= header.sequence;
        let blocks = part(header.blocks, open.copies, hurries);
        let rest = (open.block + blocks, header.blocks - blocks);
        let state = self.volume(volume);
        state.log.in_flight.push_back(InFlight {
            token,
            rest,
            copies: open.copies,
            marks,
            written: false,
        });
        state.stats.records += 1;
        state.stats.cache_blocks_written += u64::from(header.blocks);
        self.checkpoint.note_record(header.blocks);
        let segment = self.segments.get_mut(head.segment);
        segment.writes += 1;
        segment.used = head.next_block;
        segment.last_sequence = header.last_sequence();
        let heading = Heading {
            blocks: header.blocks,
            entries: header.entry_count,
            sequence_offset: (header.sequence.0 - segment.first_sequence.0) as u32,
            begins_epoch,
        };
        self.slots.head(self.segments.slot(head.segment, open.block), heading);
        self.effects.push_back(Effect::WriteCache {
            token,
            buffer: head.buffer,
            segment: head.segment,
            block: open.block,
            blocks,
        });
    }

    /// A part of a record is written: the next one is. Says whether anything was left.
    pub(crate) fn write_rest(&mut self, volume: VolumeIndex, id: SegmentId, done: Token) -> bool {
        let Engine { volumes, tokens, .. } = self;
        let log = &mut volumes[usize::from(volume.0)].as_deref_mut().expect("it exists").log;
        let wanted = log.wanted;
        let mut waiting = log.in_flight.iter_mut().filter(|record| !record.written);
        let Some(record) = waiting.find(|it| it.token == done && it.rest.1 > 0) else {
            return false;
        };
        let (block, left) = record.rest;
        let hurries = wanted >= record.marks.through;
        let blocks = part(left, record.copies, hurries);
        let token = Token(tokens.insert(Pending::Record { volume, segment: id }));
        (record.token, record.rest) = (token, (block + blocks, left - blocks));
        let segment = self.segments.get_mut(id);
        segment.writes += 1;
        let buffer = segment.buffer.expect("it is kept while something of it is to be written");
        self.effects.push_back(Effect::WriteCache { token, buffer, segment: id, block, blocks });
        true
    }

    /// Takes a segment from the pool for the head of a log.
    fn open_segment(
        &mut self,
        volume: VolumeIndex,
        guest: bool,
        payload: &mut impl Payload,
    ) -> bool {
        let reserve = !self.guest_may_take(volume);
        if guest && reserve {
            self.volume(volume).refused = true;
            return false;
        }
        if self.buffers.is_empty() {
            if self.segments.free_count() > 0 && !core::mem::replace(&mut self.wants_buffer, true) {
                self.first = volume; // P5
            }
            return false;
        }
        let Some(id) = self.segments.take_free() else { return false };
        let buffer = self.buffers.pop().expect("looked");
        let sequence = self.segment_sequence;
        self.segment_sequence += 1;
        let state = self.volume(volume);
        state.from_kept += u64::from(reserve);
        let log = &mut state.log;
        let ordinal = log.next_ordinal;
        log.next_ordinal = Ordinal(ordinal.0 + 1);
        let first_sequence = log.next_sequence;
        let before = log.newest.replace(id);
        log.before_head = before;
        log.segment_count += 1;
        log.oldest.get_or_insert(id);
        log.tail_segment.get_or_insert(id);
        log.head = Some(Head { segment: id, buffer, next_block: 0, reserve });
        if let Some(before) = before {
            self.segments.get_mut(before).next = Some(id);
        }
        let segment = self.segments.get_mut(id);
        segment.become_state(State::Open);
        segment.volume = volume;
        segment.sequence = sequence;
        segment.ordinal = ordinal;
        segment.first_sequence = first_sequence;
        segment.last_sequence = first_sequence;
        segment.next = None;
        segment.used = 0;
        segment.buffer = Some(buffer);
        segment.was_read = false;
        self.note_clean(volume);
        payload.put(buffer, 0, &[0; 8]);
        payload.buffer_begin(buffer, id);
        true
    }

    /// Whether a parked block finds a place: in the head or, as long as two segments of the reserve
    /// are left for each log, in a new one.
    pub(crate) fn may_park(&self, volume: VolumeIndex) -> bool {
        let head = self.volume_ref(volume).and_then(|state| state.log.head);
        let count = self.all_volumes().count() as u32;
        // It may need a header, too.
        head.is_some_and(|head| head.next_block + 2 <= self.geometry.segment_blocks)
            || self.segments.free_count() > (SEGMENTS_RESERVED - 1) * count
    }

    /// Ends the record and the segment of a log, which goes on in another one. A segment that holds nothing yet is that other one already.
    pub(crate) fn end_segment(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        if self.volume(volume).log.open.is_some_and(|open| open.entries > 0) {
            self.close_record(volume, payload);
        }
        let head = self.volume(volume).log.head;
        if head.is_some_and(|head| self.segments.get(head.segment).used > 0) {
            // A record without an entry is given up, its sequence with it: recovery takes a gap
            // for a record that is missing.
            let log = &mut self.volume(volume).log;
            if let Some(open) = log.open.take() {
                log.next_sequence = open.sequence;
            }
            self.seal_segment(volume, payload);
        }
    }

    /// A log found no buffer, and none comes back by itself: each is that of some log's head, which is full when its volume has written
    /// that much. The head that was begun first ends here (P4). Says whether others may go on at once.
    pub(crate) fn head_ends_for_others(&mut self, payload: &mut impl Payload) -> bool {
        if !core::mem::take(&mut self.wants_buffer)
            || !self.buffers.is_empty()
            || self.health == CacheHealth::Failed
            || self.config.mutants.is(Mutant::IdleHeadsStay)
        {
            return false;
        }
        let heads = self.all_volumes().filter(|it| it.log.head.is_some()).count();
        if heads < usize::from(self.config.buffer_count) {
            return false;
        }
        let begun = |volume: &Volume| {
            let log = &volume.log;
            let segment = self.segments.get(log.head?.segment);
            let holds = segment.used > 0 || log.open.is_some_and(|open| open.entries > 0);
            let may_end = log.in_flight.len() < RECORDS_IN_FLIGHT_MAX && self.tokens.room() > 0;
            (holds && may_end).then_some((segment.sequence, volume.index))
        };
        let Some((_, first)) = self.all_volumes().filter_map(begun).min() else { return false };
        self.end_segment(first, payload);
        !self.buffers.is_empty()
    }

    /// Ends the head: nothing more goes into it.
    pub(crate) fn seal_segment(&mut self, volume: VolumeIndex, payload: &mut impl Payload) {
        let log = &mut self.volume(volume).log;
        assert!(log.open.is_none(), "the record is closed first");
        let head = log.head.take().expect("a segment is open");
        self.segments.get_mut(head.segment).become_state(State::Sealed);
        self.release_buffer(head.segment, payload);
    }

    /// Gives a sealed segment's buffer back once the cache device has everything.
    pub(crate) fn release_buffer(&mut self, id: SegmentId, payload: &mut impl Payload) {
        let segment = self.segments.get_mut(id);
        if segment.state != State::Sealed || segment.writes > 0 {
            return;
        }
        if let Some(buffer) = segment.buffer.take() {
            payload.buffer_end(buffer);
            self.buffers.push(buffer);
        }
    }
}
