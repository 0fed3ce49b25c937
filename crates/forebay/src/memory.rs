// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory the engine works on: segment buffers that outlive the process, the write-back
//! window, and what requests bring along.
//!
//! # Invariants
//!
//! - **M1** What is stored in a segment buffer is seen by whoever maps the same file later, in the
//!   order it was stored: a killed process loses nothing it has answered.
//! - **M2** The file belongs to one boot, one cache and one opening of it: any other leaves it be.
//! - **M3** What of long writes is stored past the caches other processors and devices see behind a fence: before anything that
//!   follows from it leaves the shard, an answer or a device write. Whoever comes after a killed process comes after its
//!   processor has switched to another, which drains what had been stored.

use crate::elsewhere::Elsewhere;
use crate::ingest;
use crate::io::{Arena, Registered, Span};
use forebay_core::format::record::{Identity, Known};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::log::recovery::LogEnd;
use forebay_core::payload::{Ingested, Payload, Place};
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, BufferId, SegmentId, Sequence, VolumeIndex};
use std::fs::File;
use std::io;
use std::sync::atomic::{Ordering, compiler_fence};

const MAGIC: &[u8; 8] = b"FBSHARED";
const VERSION: u32 = 1;
/// The blocks of a request as long as that are stored past the caches: so many fill those that are near.
const STREAMED_BYTES_MIN: u64 = 64 << 10;
const TABLE_AT: usize = 4096;
const BOOT_ID_BYTES: usize = 36;
/// Not compared: whether the cache device failed ...
const CACHE_FAILED_AT: usize = 76;
/// ... whether a flush of it is under way ...
const FLUSHING_AT: usize = 77;
/// ... which opening began last from what is here, or is the one that it was made for ...
const OPENING_AT: usize = 84;
/// ... of which volumes' backing devices a flush failed ...
const FAILED_FLUSHES_AT: usize = 88;
/// ... and, for each volume, up to where its log had come when a flush of the cache device was begun, or failed.
const ENDS_AT: usize = 96;
const END_BYTES: usize = 16;
const _: () = assert!(ENDS_AT + VOLUME_COUNT_MAX * END_BYTES <= TABLE_AT);

/// Which opening of which cache in which boot a shared file belongs to (M2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedIdentity {
    /// The kernel's boot id.
    pub boot_id: String,
    /// The cache's uuid.
    pub uuid: [u8; 16],
    /// The opening of the cache.
    pub open_generation: u32,
    /// Bytes of a segment.
    pub segment_bytes: u32,
}

impl SharedIdentity {
    fn encode(&self, buffer_count: u16) -> [u8; 84] {
        let mut bytes = [0; 84];
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.segment_bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&u32::from(buffer_count).to_le_bytes());
        bytes[20..24].copy_from_slice(&self.open_generation.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.uuid);
        let boot = self.boot_id.as_bytes();
        let length = boot.len().min(BOOT_ID_BYTES);
        bytes[40..40 + length].copy_from_slice(&boot[..length]);
        bytes[..8].copy_from_slice(MAGIC);
        bytes
    }
}

/// Bytes of the shared file for so many buffers.
pub fn shared_bytes(segment_bytes: u32, buffer_count: u16) -> usize {
    buffers_at(buffer_count) + usize::from(buffer_count) * segment_bytes as usize
}

fn buffers_at(buffer_count: u16) -> usize {
    TABLE_AT + (usize::from(buffer_count) * 4).next_multiple_of(4096)
}

/// A segment, and the bytes that a process left in the buffer that held it.
pub type LeftBehind = (SegmentId, Vec<u8>);

/// What a process that is gone left.
#[derive(Debug)]
pub struct Left {
    /// In its buffers.
    pub segments: Vec<LeftBehind>,
    /// The cache device had failed: it may have lost what was not flushed, as when the power fails.
    pub cache_failed: bool,
    /// So it may have if a flush of it was under way: nobody has heard how that ended.
    pub flushing: bool,
    /// Up to where each volume's log had come when the last flush was begun, or failed.
    pub ends: Vec<LogEnd>,
    /// Volumes, a bit for each, of whose backing devices a flush failed.
    pub failed_flushes: u64,
}

impl Left {
    /// Whether nothing but the process has come to an end: the cache device has all that it was given.
    pub fn died_alone(&self) -> bool {
        !self.cache_failed && !self.flushing
    }
}

/// What a process that is gone left in its buffers; `None` if the file is not of this cache's last
/// opening in this boot, so that power may have failed since.
pub fn left_behind(file: &File, identity: &SharedIdentity) -> io::Result<Option<Left>> {
    left(file, identity, true)
}

/// The same without what its buffers hold.
pub fn left_notes(file: &File, identity: &SharedIdentity) -> io::Result<Option<Left>> {
    left(file, identity, false)
}

fn left(file: &File, identity: &SharedIdentity, buffers: bool) -> io::Result<Option<Left>> {
    use std::os::unix::fs::FileExt;
    let mut head = [0; 84];
    if file.metadata()?.len() < TABLE_AT as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut head, 0)?;
    let cache_failed = std::mem::take(&mut head[CACHE_FAILED_AT]) != 0;
    let flushing = std::mem::take(&mut head[FLUSHING_AT]) != 0;
    let count = u32::from_le_bytes([head[16], head[17], head[18], head[19]]);
    let Ok(count) = u16::try_from(count) else { return Ok(None) };
    if head != identity.encode(count)
        || file.metadata()?.len() < shared_bytes(identity.segment_bytes, count) as u64
    {
        return Ok(None);
    }
    let mut table = vec![0; usize::from(count) * 4];
    file.read_exact_at(&mut table, TABLE_AT as u64)?;
    let mut segments = Vec::new();
    for (buffer, entry) in table.chunks_exact(4).enumerate() {
        let segment = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        if segment > 0 && buffers {
            let mut bytes = vec![0; identity.segment_bytes as usize];
            let at = buffers_at(count) + buffer * identity.segment_bytes as usize;
            file.read_exact_at(&mut bytes, at as u64)?;
            segments.push((SegmentId(segment - 1), bytes));
        }
    }
    let mut failed = [0; 8];
    file.read_exact_at(&mut failed, FAILED_FLUSHES_AT as u64)?;
    let mut ends = [[0; END_BYTES]; VOLUME_COUNT_MAX];
    file.read_exact_at(ends.as_flattened_mut(), ENDS_AT as u64)?;
    let failed_flushes = u64::from_le_bytes(failed);
    let ends = ends.iter().map(end_of).collect();
    Ok(Some(Left { segments, cache_failed, flushing, failed_flushes, ends }))
}

fn end_of(bytes: &[u8; END_BYTES]) -> LogEnd {
    let [through @ .., a, b, c, d, _, _, _, _] = *bytes;
    LogEnd {
        through: Sequence(u64::from_le_bytes(through)),
        attach_generation: u32::from_le_bytes([a, b, c, d]),
    }
}

fn end_bytes(end: &LogEnd) -> [u8; END_BYTES] {
    let mut bytes = [0; END_BYTES];
    bytes[..8].copy_from_slice(&end.through.0.to_le_bytes());
    bytes[8..12].copy_from_slice(&end.attach_generation.to_le_bytes());
    bytes
}

/// The cache device is being flushed for what a process left, or was.
pub(crate) fn note_flushing_at_opening(file: &File, is_under_way: bool) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.write_all_at(&[u8::from(is_under_way)], FLUSHING_AT as u64)
}

/// How far the logs came that a process left.
pub(crate) fn note_ends_at_opening(file: &File, ends: &[LogEnd]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    for (at, end) in ends.iter().enumerate().take(VOLUME_COUNT_MAX) {
        file.write_all_at(&end_bytes(end), (ENDS_AT + at * END_BYTES) as u64)?;
    }
    Ok(())
}

/// The cache device has failed while what a process left was put in order: whoever tries again is told, and how far the logs came.
pub(crate) fn note_failed_at_opening(file: &File, ends: &[LogEnd]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    note_ends_at_opening(file, ends)?;
    file.write_all_at(&[1], CACHE_FAILED_AT as u64)
}

/// The next opening begins. If it ends before it has memory of its own it has answered nothing, and who comes then is told so
/// ([`began_last`]).
pub(crate) fn note_opening(file: &File, generation: u32) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.write_all_at(&generation.to_le_bytes(), OPENING_AT as u64)
}

/// The opening that began last from this file, or for which it was made; 0: none.
pub(crate) fn began_last(file: &File) -> u32 {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; 4];
    match file.read_exact_at(&mut bytes, OPENING_AT as u64) {
        Ok(()) => u32::from_le_bytes(bytes),
        Err(_) => 0,
    }
}

/// What a request brings along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestMemory {
    /// A write: its bytes. A read: whole blocks, the first byte at `offset % 4096`.
    pub(crate) span: Option<Span>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// A write's bytes are not in its span yet.
    pub(crate) elsewhere: Option<Elsewhere>,
    /// What of it the backing device is asked for may go between that and this buffer.
    pub(crate) registered: Option<Registered>,
    /// All that was read of it went there: nothing is in its span.
    pub(crate) is_straight: bool,
}

impl RequestMemory {
    /// A request without bytes.
    pub(crate) const NONE: RequestMemory = RequestMemory {
        span: None,
        offset: 0,
        length: 0,
        elsewhere: None,
        registered: None,
        is_straight: false,
    };
}

/// The engine's view of memory.
#[derive(Debug)]
pub struct Memory {
    shared: Arena,
    buffers_at: usize,
    segment_bytes: usize,
    failed_flushes: u64,
    window: Arena,
    edges: Arena,
    merge: Arena,
    nowhere: Arena,
    pub(crate) requests: Vec<RequestMemory>,
    /// Blocks were stored past the caches, and nobody may rely on them yet (M3).
    streamed: bool,
    /// Blocks whose checksum was asked for.
    pub(crate) summed: u64,
}

impl Memory {
    /// Memory for one engine. With a file the buffers outlive the process.
    pub fn new(
        shared: Option<(&File, &SharedIdentity)>,
        segment_bytes: u32,
        buffer_count: u16,
        window_frames: u32,
        request_count: usize,
    ) -> io::Result<Memory> {
        let bytes = shared_bytes(segment_bytes, buffer_count);
        let arena = match shared {
            Some((file, _)) => Arena::shared_file(file, bytes)?,
            None => Arena::anonymous(bytes)?,
        };
        if let Some((_, identity)) = shared {
            arena.span(TABLE_AT, buffers_at(buffer_count) - TABLE_AT).fill_zero();
            let end = ENDS_AT + VOLUME_COUNT_MAX * END_BYTES;
            arena.span(CACHE_FAILED_AT, end - CACHE_FAILED_AT).fill_zero();
            let head = identity.encode(buffer_count);
            arena.span(8, head.len() - 8).copy_in(&head[8..]);
            compiler_fence(Ordering::Release);
            arena.span(0, 8).copy_in(&head[..8]);
        }
        Ok(Memory {
            shared: arena,
            buffers_at: buffers_at(buffer_count),
            segment_bytes: segment_bytes as usize,
            failed_flushes: 0,
            window: Arena::anonymous(window_frames as usize * BLOCK_SIZE)?,
            edges: Arena::reserved(request_count * 2 * BLOCK_SIZE)?,
            merge: Arena::anonymous(BLOCK_SIZE)?,
            nowhere: Arena::anonymous(BLOCK_SIZE)?,
            requests: vec![RequestMemory::NONE; request_count],
            streamed: false,
            summed: 0,
        })
    }

    /// The cache device has failed: whoever finds this memory is told, and up to where each log had come.
    pub(crate) fn note_cache_failed(&self, ends: impl Iterator<Item = (VolumeIndex, LogEnd)>) {
        self.note_ends(ends);
        self.shared.span(CACHE_FAILED_AT, 1).copy_in(&[1]);
        compiler_fence(Ordering::Release);
    }

    /// A flush of the cache device begins. Whoever finds this memory is told, unless [`Memory::note_flushed`] comes before.
    pub(crate) fn note_flushing(&self, ends: impl Iterator<Item = (VolumeIndex, LogEnd)>) {
        self.note_ends(ends);
        self.shared.span(FLUSHING_AT, 1).copy_in(&[1]);
        compiler_fence(Ordering::Release);
    }

    /// It has ended, and if it failed that is noted.
    pub(crate) fn note_flushed(&self) {
        compiler_fence(Ordering::Release);
        self.shared.span(FLUSHING_AT, 1).copy_in(&[0]);
    }

    /// Up to where each log has come, where that is not sure to last.
    pub(crate) fn note_ends(&self, ends: impl Iterator<Item = (VolumeIndex, LogEnd)>) {
        for (volume, end) in ends {
            let at = ENDS_AT + usize::from(volume.0) * END_BYTES;
            self.shared.span(at, END_BYTES).copy_in(&end_bytes(&end));
        }
        compiler_fence(Ordering::Release);
    }

    /// The arenas that devices read and write, to be registered with the reactor.
    pub fn arenas(&self) -> [&Arena; 2] {
        [&self.shared, &self.window]
    }

    /// The memory of `blocks` blocks at a place.
    #[inline]
    pub fn span(&self, place: Place, blocks: u16) -> Span {
        let length = usize::from(blocks) * BLOCK_SIZE;
        match place {
            Place::Buffer { buffer, block } => {
                let at = self.buffers_at + usize::from(buffer.0) * self.segment_bytes;
                self.shared.span(at + usize::from(block) * BLOCK_SIZE, length)
            }
            Place::Request { tag, block } => {
                let span = self.requests[tag as usize].span.expect("a read brings memory");
                span.part(usize::from(block) * BLOCK_SIZE, length)
            }
            Place::Edge { tag, edge } => {
                self.edges.span((tag as usize * 2 + usize::from(edge)) * BLOCK_SIZE, length)
            }
            Place::Window { frame } => self.window.span(frame as usize * BLOCK_SIZE, length),
            Place::Nowhere => self.nowhere.span(0, length),
        }
    }

    /// What was stored so far comes before whatever follows (M3).
    #[inline]
    pub(crate) fn fence(&mut self) {
        if std::mem::take(&mut self.streamed) {
            crate::io::fence();
        }
    }

    /// Has a write's bytes in its span; says whether they are there.
    pub(crate) fn fetch(&mut self, tag: u32) -> bool {
        let request = &mut self.requests[tag as usize];
        let Some(elsewhere) = request.elsewhere else { return true };
        let span = request.span.expect("a write brings memory").part(0, request.length as usize);
        let is_there = elsewhere.copy_to(span);
        if is_there {
            request.elsewhere = None;
        }
        is_there
    }

    /// Takes in a block that is all of its request, straight to where it is to be: the kernel makes the one copy.
    fn ingest_from(&self, elsewhere: Elsewhere, target: Span) -> Ingested {
        if !elsewhere.copy_to(target) {
            return Ingested::Failed;
        }
        match target.is_zero() {
            true => Ingested::Zero,
            false => Ingested::Stored { crc: target.block_checksum() },
        }
    }

    /// A block that a request covers in part: what was there before, and the request's bytes.
    fn merge(&mut self, tag: u32, block: u64) -> Span {
        let request = self.requests[tag as usize];
        let whole = self.merge.span(0, BLOCK_SIZE);
        let edge = Place::Edge { tag, edge: u8::from(block > 0) };
        whole.copy_from(self.span(edge, 1));
        let start = (request.offset / BLOCK_BYTES + block) * BLOCK_BYTES;
        let from = request.offset.max(start);
        let to = (request.offset + request.length).min(start + BLOCK_BYTES);
        let part = whole.part((from - start) as usize, (to - from) as usize);
        match request.span {
            Some(span) => {
                part.copy_from(span.part((from - request.offset) as usize, (to - from) as usize));
            }
            None => part.fill_zero(),
        }
        whole
    }
}

impl Payload for Memory {
    fn ingest(&mut self, tag: u32, block: u64, buffer: BufferId, at: u16) -> Ingested {
        let request = self.requests[tag as usize];
        let first = request.offset % BLOCK_BYTES;
        let start = (block * BLOCK_BYTES).wrapping_sub(first);
        let whole = block * BLOCK_BYTES >= first && start + BLOCK_BYTES <= request.length;
        match request.elsewhere {
            Some(elsewhere) if whole && request.length == BLOCK_BYTES => {
                return self
                    .ingest_from(elsewhere, self.span(Place::Buffer { buffer, block: at }, 1));
            }
            // What is longer is copied with one call.
            Some(_) if !self.fetch(tag) => return Ingested::Failed,
            _ => {}
        }
        let source = match request.span {
            Some(span) if whole => span.part(start as usize, BLOCK_SIZE),
            _ => self.merge(tag, block),
        };
        if source.is_zero() {
            return Ingested::Zero;
        }
        let target = self.span(Place::Buffer { buffer, block: at }, 1);
        let is_long = request.length >= STREAMED_BYTES_MIN;
        self.streamed |= is_long;
        let crc = if is_long { target.stream_block(source) } else { target.copy_block(source) };
        Ingested::Stored { crc }
    }

    fn is_apart(&self, place: Place) -> bool {
        let Place::Request { tag, .. } = place else { return false };
        self.requests[tag as usize].registered.is_some()
    }

    fn checksum(&mut self, place: Place) -> u32 {
        self.summed += 1;
        self.span(place, 1).block_checksum()
    }

    fn is_header(&mut self, place: Place, known: &Known, identity: &Identity) -> bool {
        let mut bytes = [0; BLOCK_SIZE];
        self.span(place, 1).copy_out(&mut bytes);
        known.is(&mut bytes, identity)
    }

    fn copy(&mut self, from: Place, to: Place, blocks: u16) {
        self.span(to, blocks).copy_from(self.span(from, blocks));
    }

    fn zero(&mut self, place: Place, blocks: u16) {
        self.span(place, blocks).fill_zero();
    }

    #[inline]
    fn put(&mut self, buffer: BufferId, offset: u32, bytes: &[u8]) {
        let at = self.buffers_at + usize::from(buffer.0) * self.segment_bytes + offset as usize;
        // x86 and the kernel's own barriers at a process's end keep stores in program order for
        // whoever looks later; the fence keeps the compiler from changing that order (M1).
        compiler_fence(Ordering::Release);
        self.shared.span(at, bytes.len()).copy_in(bytes);
        compiler_fence(Ordering::Release);
    }

    fn store(&mut self, place: Place, bytes: &[u8]) {
        self.span(place, 1).copy_in(bytes);
    }

    #[inline]
    fn prefetch<T>(&mut self, soon: &T) {
        ingest::prefetch(soon);
    }

    fn buffer_begin(&mut self, buffer: BufferId, segment: SegmentId) {
        compiler_fence(Ordering::Release);
        let at = TABLE_AT + usize::from(buffer.0) * 4;
        self.shared.span(at, 4).copy_in(&(segment.0 + 1).to_le_bytes());
        compiler_fence(Ordering::Release);
    }

    fn flush_failed(&mut self, volume: VolumeIndex) {
        self.failed_flushes |= 1 << volume.0;
        compiler_fence(Ordering::Release);
        self.shared.span(FAILED_FLUSHES_AT, 8).copy_in(&self.failed_flushes.to_le_bytes());
        compiler_fence(Ordering::Release);
    }

    fn buffer_end(&mut self, buffer: BufferId) {
        compiler_fence(Ordering::Release);
        let at = TABLE_AT + usize::from(buffer.0) * 4;
        self.shared.span(at, 4).fill_zero();
        compiler_fence(Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_finds_what_this_one_left() {
        let path = std::env::temp_dir().join(format!("forebay-left-{}", std::process::id()));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let identity = SharedIdentity {
            boot_id: "this one".into(),
            uuid: [3; 16],
            open_generation: 7,
            segment_bytes: 64 << 10,
        };
        file.set_len(shared_bytes(identity.segment_bytes, 4) as u64).unwrap();
        let memory = || Memory::new(Some((&file, &identity)), identity.segment_bytes, 4, 1, 1);
        let mut first = memory().unwrap();
        first.buffer_begin(BufferId(2), SegmentId(0));
        first.put(BufferId(2), 4096, b"payload");
        for volume in [1, 59] {
            first.flush_failed(VolumeIndex(volume));
        }
        let end = |through| LogEnd { attach_generation: 3, through: Sequence(through) };
        first.note_flushing([(VolumeIndex(2), end(77))].into_iter());
        let left = left_behind(&file, &identity).unwrap().unwrap();
        assert_eq!((left.flushing, left.cache_failed, left.ends[2]), (true, false, end(77)));
        first.note_cache_failed([(VolumeIndex(59), end(1 << 60))].into_iter());
        first.note_flushed();
        drop(first);
        let left = left_behind(&file, &identity).unwrap().unwrap();
        assert_eq!((left.flushing, left.cache_failed), (false, true));
        assert_eq!((left.ends[2], left.ends[59]), (end(77), end(1 << 60)));
        assert_eq!(left.failed_flushes, 1 << 1 | 1 << 59);
        let [(SegmentId(0), bytes)] = &left.segments[..] else { panic!("one buffer was in use") };
        assert!(bytes[4096..].starts_with(b"payload"));
        let later = SharedIdentity { open_generation: 8, ..identity.clone() };
        assert!(left_behind(&file, &later).unwrap().is_none());
        // Who comes next begins with nothing.
        drop(memory().unwrap());
        let left = left_behind(&file, &identity).unwrap().unwrap();
        assert_eq!((left.failed_flushes, left.segments.len()), (0, 0));
        assert!(!left.cache_failed && left.ends.iter().all(|end| *end == LogEnd::default()));
    }
}
