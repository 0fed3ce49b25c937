// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine: the only owner of state.
//!
//! Requests come in by [`Engine::submit`], completions by [`Engine::complete`], time by
//! [`Engine::tick`]. After each of them the state is put in order ([`Engine::settle`]): start what
//! may start, close what is full, answer what may be answered. What it wants done is taken with
//! [`Engine::next_effect`].

use crate::effect::{Effect, Fault, Token};
use crate::format::record::Identity;
use crate::format::superblock::Superblock;
use crate::limits::{
    REQUEST_BLOCKS_MAX, REQUEST_COUNT_MAX, TOKEN_COUNT_MAX, TOKENS_KEPT, VOLUME_COUNT_MAX,
};
use crate::log::checkpoint::Checkpointer;
use crate::log::recovery::Recovered;
use crate::log::resize::Resizing;
use crate::log::segment::Segments;
use crate::log::tickets::Tickets;
use crate::map::index::Index;
use crate::map::slots::Slots;
use crate::mutant::Mutants;
use crate::op::ahead::Ahead;
use crate::op::around::Around;
use crate::op::miss::{SHARED_MAX, Shared};
use crate::payload::Payload;
use crate::policy::ahead::StreamId;
use crate::policy::bypass::Reason;
use crate::policy::flushes::Flushes;
use crate::policy::history::History;
use crate::policy::lane::Lane;
use crate::policy::scrub::Scrub;
use crate::policy::streams::Streams;
use crate::request::{Op, Request, RequestError};
use crate::slab::Slab;
use crate::units::{BLOCK_BYTES, BufferId, Lba, SegmentId, Sequence, Tick, VolumeIndex};
use crate::volume::Volume;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// When a plain write is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledge {
    /// When it is placed: the buffers outlive the process.
    Placed,
    /// When the cache device has it: there is no memory that outlives the process.
    Written,
    /// When it is durable.
    Durable,
}

/// What can be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Segment-sized buffers, at most 256: an opening that goes by a checkpoint looks no further than so many segments that were not used.
    pub buffer_count: u16,
    /// When a plain write is answered.
    pub acknowledge: Acknowledge,
    /// An open record is closed this many nanoseconds after its first entry.
    pub close_after: u64,
    /// What is placed is durable this many nanoseconds later.
    pub durable_after: u64,
    /// And after this many bytes.
    pub durable_bytes: u64,
    /// Blocks of the write-back window.
    pub window_blocks: u32,
    /// Batches there is memory for: with as many as there are volumes a backing device that is slow, or does
    /// not answer, holds back its own volume and no other.
    pub lane_count: u8,
    /// Blocks one batch may hold.
    pub batch_blocks_max: u32,
    /// Blocks that a batch of whoever served the cache before may have held.
    pub batch_blocks_most: u32,
    /// Writes in flight to one backing device.
    pub backing_in_flight: u16,
    /// Write-back starts when the oldest dirty data is this old, in nanoseconds.
    pub dirty_age: u64,
    /// Or when this share of the volume's segments is dirty, in percent.
    pub dirty_percent: u8,
    /// Pages of a checkpoint that are written at once.
    pub checkpoint_frames: u32,
    /// Extents one volume may hold.
    pub extent_count_max: u32,
    /// What guests read is copied into the log unless it belongs to a run of more blocks than this; 0:
    /// nothing is.
    pub fill_run_max: u32,
    /// Blocks of memory for what is read ahead of guests, of all volumes together; 0: nothing is.
    pub ahead_blocks: u32,
    /// Wait after a fault of a backing device before its batch is tried again, in nanoseconds.
    pub retry_after: u64,
    /// What cannot be read of the cache device is lost if that is still so after this time, in nanoseconds.
    pub lost_after: u64,
    /// With so few free segments, or fewer, a log's marks go into the superblock instead of a new
    /// segment.
    pub free_segments_kept: u32,
    /// A scrub reads so many bytes a second, at most.
    pub scrub_rate: u64,
    /// Deliberate faults.
    pub mutants: Mutants,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            buffer_count: 64,
            acknowledge: Acknowledge::Placed,
            close_after: 1_000_000_000,
            durable_after: 5_000_000_000,
            durable_bytes: 256 << 20,
            window_blocks: 4096,
            lane_count: 4,
            batch_blocks_max: 32 << 10,
            batch_blocks_most: 32 << 10,
            backing_in_flight: 32,
            dirty_age: 30_000_000_000,
            dirty_percent: 25,
            checkpoint_frames: crate::limits::CHECKPOINT_PAGES,
            extent_count_max: 16 << 10,
            fill_run_max: 256,
            ahead_blocks: 2048,
            retry_after: 1_000_000_000,
            lost_after: 30_000_000_000,
            free_segments_kept: 0,
            scrub_rate: 64 << 20,
            mutants: Mutants::default(),
        }
    }
}

/// The engine has no room for a request: offer it again after the next answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

/// A request inside the engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Active {
    pub(crate) request: Request,
    /// When.
    pub(crate) came: Tick,
    pub(crate) first: Lba,
    /// Blocks it touches.
    pub(crate) blocks: u64,
    /// Blocks placed (writes).
    pub(crate) placed: u64,
    /// Effects under way.
    pub(crate) remaining: u32,
    pub(crate) failed: Option<RequestError>,
    /// Last sequence it placed; while it goes around the log, what was placed when its turn came to.
    pub(crate) sequence: Sequence,
    pub(crate) edges_read: bool,
    /// Blocks of the run of writes that it ends.
    pub(crate) run: u64,
    /// That may be a run by chance (`policy/bypass`).
    pub(crate) chance: bool,
    pub(crate) around: Around,
    /// Why, if it goes around the log.
    pub(crate) reason: Reason,
    /// Its answer waits, or waited, for the backing device.
    pub(crate) backing_waited: bool,
    /// Of reads that miss something: the stream that they go on.
    pub(crate) stream: Option<StreamId>,
    /// Reads of the backing device that were begun for it alone.
    pub(crate) backing_reads: u32,
}

/// What an effect under way is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pending {
    Record { volume: VolumeIndex, segment: SegmentId },
    CacheFlush,
    Read(crate::op::read::Piece),
    Miss(crate::op::miss::Miss),
    Writeback(crate::policy::writeback::Work),
    Around { request: u32, since: Tick },
    AroundFlush { volume: VolumeIndex },
    Chance(crate::log::reclaim::Chance),
    Scrub(crate::policy::scrub::Work),
    CheckpointPages,
    CheckpointFlush,
    CheckpointName,
    Marks(crate::log::durable::Marks),
    FlushFailed,
    Stale { volume: VolumeIndex },
}

/// State of the cache device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheHealth {
    /// All is well.
    Healthy,
    /// A write or a flush of it failed: nothing is appended any more.
    Failed,
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) identity: Identity,
    pub(crate) open_generation: u32,
    pub(crate) now: Tick,
    pub(crate) wall: u64,
    pub(crate) geometry: Geometry,
    pub(crate) index: Index,
    pub(crate) slots: Slots,
    pub(crate) segments: Segments,
    pub(crate) segment_sequence: u64,
    /// Segments that will be in the pool when the tails of their logs are durable.
    pub(crate) retired: u32,
    pub(crate) tickets: Tickets,
    /// Reads of backing devices that others may wait for.
    pub(crate) shared: Vec<Shared>,
    pub(crate) history: History,
    /// Runs of reads.
    pub(crate) reads: Streams,
    pub(crate) ahead: Ahead,
    pub(crate) buffers: Vec<BufferId>,
    /// A log that had to go on found none.
    pub(crate) wants_buffer: bool,
    /// The volume that is put in order first: the first one whose log found none (P5 of `log::append`).
    pub(crate) first: VolumeIndex,
    pub(crate) volumes: Vec<Option<Box<Volume>>>,
    /// Above the highest place in use.
    pub(crate) volume_end: usize,
    pub(crate) requests: Slab<Active>,
    pub(crate) tokens: Slab<Pending>,
    /// Of these so many are left for reads across holes (H3 of `op::across`).
    pub(crate) across_tokens: usize,
    /// Effects reported so far.
    pub(crate) completions: u64,
    pub(crate) effects: VecDeque<Effect>,
    pub(crate) flush_running: bool,
    /// Of backing devices.
    pub(crate) flushes: Flushes,
    /// The superblock is being written.
    pub(crate) superblock_busy: bool,
    pub(crate) health: CacheHealth,
    /// No batch begins any more.
    pub(crate) stopping: bool,
    /// But for requests that are inside: no other comes.
    pub(crate) answers_the_rest: bool,
    /// Nobody hears of writes any more: none waits for a batch, or for the room that it would make.
    pub(crate) gives_up: bool,
    pub(crate) lanes: Vec<Lane>,
    /// Where a batch is sorted.
    pub(crate) sort_room: Vec<u64>,
    /// Somebody left one to who asked before (N2 of `policy::lane`), who may not need it; or one became free.
    pub(crate) lane_left: bool,
    /// Frames behind the window that no second chance is using.
    pub(crate) chance_frames: Vec<u32>,
    pub(crate) checkpoint: Checkpointer,
    /// Runs of writes.
    pub(crate) writes: Streams,
    pub(crate) scrub: Scrub,
    /// The cache is to have another size.
    pub(crate) resizing: Option<Resizing>,
}

/// Where segments lie.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Bytes from the device's start to segment 0.
    pub first_segment: u64,
    /// Blocks of a segment.
    pub segment_blocks: u16,
}

impl Geometry {
    /// Where a block of a segment lies, in bytes.
    #[inline]
    pub fn address(&self, segment: SegmentId, block: u16) -> u64 {
        self.first_segment
            + (u64::from(segment.0) * u64::from(self.segment_blocks) + u64::from(block))
                * BLOCK_BYTES
    }
}

impl Engine {
    /// An engine over what recovery found. `superblock` is the one written for this opening.
    pub fn new(superblock: &Superblock, recovered: Recovered, config: Config, now: Tick) -> Engine {
        assert!(usize::from(config.buffer_count) <= crate::log::recovery::UNUSED_RUN);
        let mut volumes = Vec::with_capacity(VOLUME_COUNT_MAX);
        volumes.resize_with(VOLUME_COUNT_MAX, || None);
        let mut engine = Engine {
            config,
            identity: superblock.identity(),
            open_generation: superblock.open_generation,
            now,
            wall: 0,
            geometry: Geometry {
                first_segment: superblock.first_segment,
                segment_blocks: superblock.segment_blocks(),
            },
            index: recovered.index,
            slots: recovered.slots,
            segments: recovered.segments,
            segment_sequence: recovered.segment_sequence,
            retired: 0,
            tickets: Tickets::new(),
            shared: Vec::with_capacity(SHARED_MAX),
            history: History::new(crate::log::image::slot_count(superblock)),
            reads: Streams::default(),
            ahead: Ahead::new(config.ahead_blocks),
            writes: Streams::default(),
            scrub: Scrub::default(),
            resizing: None,
            buffers: (0..config.buffer_count).rev().map(BufferId).collect(),
            wants_buffer: false,
            first: VolumeIndex(0),
            volumes,
            volume_end: 0,
            requests: Slab::new(REQUEST_COUNT_MAX),
            tokens: Slab::new(TOKEN_COUNT_MAX),
            across_tokens: 0,
            completions: 0,
            effects: VecDeque::with_capacity(2 * TOKEN_COUNT_MAX),
            flush_running: false,
            flushes: Flushes::new(),
            superblock_busy: false,
            health: CacheHealth::Healthy,
            stopping: false,
            answers_the_rest: false,
            gives_up: false,
            lane_left: false,
            lanes: (0..Lane::count(&config)).map(|_| Lane::new(&config)).collect(),
            sort_room: Vec::with_capacity(Lane::items(&config)),
            chance_frames: (0..crate::log::reclaim::CHANCE_COUNT_MAX as u32)
                .map(|frame| config.window_blocks + frame)
                .collect(),
            checkpoint: Checkpointer::new(superblock, recovered.slot_runs),
        };
        for (index, found) in recovered.volumes.into_iter().enumerate() {
            if let (Some(found), Some(Some(recorded))) = (found, superblock.volumes.get(index)) {
                let index_of = VolumeIndex(index as u8);
                let blocks = engine.geometry.segment_blocks;
                let volume = Volume::new(index_of, recorded, found, &engine.config, blocks, now);
                engine.volumes[index] = Some(Box::new(volume));
                engine.volume_end = index + 1;
                engine.note_clean(index_of);
            }
        }
        engine.reserves_settle();
        engine
    }

    /// What was chosen.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes a request. Its answer comes as an effect, at once or later.
    pub fn submit(&mut self, request: Request, payload: &mut impl Payload) -> Result<(), Busy> {
        if self.requests.room() == 0 || !self.has_token_room(REQUEST_BLOCKS_MAX) {
            return Err(Busy);
        }
        if self.write_plainly(&request, payload) {
            if !self.is_quiet_behind(request.volume) {
                self.settle(payload);
            }
            return Ok(());
        }
        match self.check(&request) {
            Err(error) => {
                self.effects.push_back(Effect::Answer { tag: request.tag, result: Err(error) });
            }
            Ok(()) => self.accept(request, payload),
        }
        // A read that comes makes nothing possible that was not before, unless copies of what was read ahead are placed, nor does a plain write that
        // finds its place in the open record.
        let quiet = match request.op {
            Op::Read => !self.ahead.take_filled(),
            Op::Write { fua: false } => self.write_quietly(request.volume, payload),
            _ => false,
        };
        if !quiet {
            self.settle(payload);
        }
        Ok(())
    }

    /// Tokens there are for what guests ask for, beside what is left for reads across holes (H3 of `op::across`).
    pub(crate) fn token_room(&self) -> usize {
        self.tokens.room().saturating_sub(self.across_tokens)
    }

    /// Whether guests may ask for so much more: some are left for those who take one without looking.
    pub(crate) fn has_token_room(&self, count: usize) -> bool {
        self.token_room() >= count + TOKENS_KEPT
    }

    /// The boundary: below it nobody asks again whether a request is in range.
    fn check(&self, request: &Request) -> Result<(), RequestError> {
        let volume = self.volume_ref(request.volume).ok_or(RequestError::NoVolume)?;
        if !volume.serving {
            return Err(RequestError::NoVolume);
        }
        let end = request.offset.checked_add(request.length).ok_or(RequestError::Invalid)?;
        let aligned = request.offset.is_multiple_of(512) && request.length.is_multiple_of(512);
        if end > volume.size_bytes || !aligned {
            return Err(RequestError::Invalid);
        }
        let data = matches!(request.op, Op::Read | Op::Fetch | Op::Write { .. });
        if data && request.length > crate::limits::REQUEST_BYTES_MAX {
            return Err(RequestError::Invalid);
        }
        if request.op != Op::Flush && request.length == 0 {
            return Err(RequestError::Invalid);
        }
        Ok(())
    }

    fn accept(&mut self, request: Request, payload: &mut impl Payload) {
        let first = Lba(request.offset / BLOCK_BYTES);
        let end = (request.offset + request.length).div_ceil(BLOCK_BYTES);
        let at = self.requests.insert(Active {
            request,
            came: self.now,
            first,
            blocks: end - first.0,
            placed: 0,
            remaining: 0,
            failed: None,
            sequence: Sequence(0),
            edges_read: false,
            run: 0,
            chance: false,
            around: Around::No,
            reason: Reason::Mode,
            backing_waited: false,
            stream: None,
            backing_reads: 0,
        });
        match request.op {
            Op::Read => self.read_accept(at, payload),
            Op::Fetch => self.fetch_accept(at, payload),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard => self.write_accept(at),
            Op::Flush => self.flush_accept(at),
        }
    }

    /// Reports what became of an effect.
    pub fn complete(
        &mut self,
        token: Token,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        self.completed(token, result, payload);
        self.settle(payload);
    }

    /// As [`Engine::complete`], one of several at once: [`Engine::tick`] follows and puts the
    /// state in order for all of them.
    pub fn completed(
        &mut self,
        token: Token,
        result: Result<(), Fault>,
        payload: &mut impl Payload,
    ) {
        let pending = self.tokens.remove(token.0).expect("each token is reported once");
        self.completions += 1;
        match pending {
            Pending::Record { volume, segment } => {
                self.record_written(token, volume, segment, result, payload);
            }
            Pending::CacheFlush => self.cache_flushed(result),
            Pending::Read(piece) => self.read_complete(piece, result, payload),
            Pending::Miss(miss) => self.miss_complete(token, miss, result, payload),
            Pending::Writeback(work) => self.writeback_complete(work, result, payload),
            Pending::Around { request, since } => {
                self.around_complete(request, since, result, payload);
            }
            Pending::AroundFlush { volume } => self.around_flushed(volume, result, payload),
            Pending::CheckpointPages => self.checkpoint_written(result),
            Pending::CheckpointFlush => self.checkpoint_flushed(result),
            Pending::CheckpointName => self.checkpoint_named(result),
            Pending::Marks(marks) => self.marks_noted(marks, result),
            Pending::FlushFailed => self.flush_failure_noted(result),
            Pending::Stale { volume } => self.stale_marked(volume, result),
            Pending::Chance(chance) => self.chance_complete(chance, result, payload),
            Pending::Scrub(work) => self.scrub_complete(work, result, payload),
        }
    }

    /// Tells the time: `now` never goes back, `wall` is milliseconds since 1970. Before completions are
    /// reported, so that it is known what took how long.
    pub fn clock(&mut self, now: Tick, wall: u64) {
        assert!(now >= self.now, "time goes forward");
        (self.now, self.wall) = (now, wall);
    }

    /// As [`Engine::clock`], and what the time makes possible is done.
    pub fn tick(&mut self, now: Tick, wall: u64, payload: &mut impl Payload) {
        self.clock(now, wall);
        self.settle(payload);
    }

    /// The next thing to do.
    #[inline]
    pub fn next_effect(&mut self) -> Option<Effect> {
        let next = self.effects.pop_front();
        if next.is_none() {
            // The next ones come where the last ones were, which is in the processor's cache, and do not go round in all
            // the room there is.
            self.effects.clear();
        }
        next
    }

    /// When `tick` must be called at the latest, if nothing else happens.
    pub fn deadline(&self) -> Option<Tick> {
        let volumes = self.all_volumes().filter_map(|volume| self.volume_deadline(volume));
        volumes.chain(self.scrub_deadline()).min()
    }

    /// Puts the state in order: always the same steps, bounded by what is there to do.
    fn settle(&mut self, payload: &mut impl Payload) {
        self.volumes_settle(payload);
        let lane_left = core::mem::take(&mut self.lane_left);
        if self.head_ends_for_others(payload) || self.somebody_lacks() || lane_left {
            // Those before it do not know yet that there is a buffer (P4 of `log::append`), that they give (G4 of `policy::reserve`),
            // or that who asked for a lane before them has begun or cannot.
            self.volumes_settle(payload);
        }
        self.checkpoint_settle(payload);
        if self.resizing.is_some() {
            self.resize_settle(payload);
        }
        self.flush_settle();
        self.scrub_settle();
    }

    fn volumes_settle(&mut self, payload: &mut impl Payload) {
        let end = self.volume_end;
        for at in usize::from(self.first.0)..usize::from(self.first.0) + end {
            let index = if at < end { at } else { at - end };
            if self.volumes[index].is_none() {
                continue;
            }
            let volume = VolumeIndex(index as u8);
            self.delay_settle(volume);
            self.write_settle(volume, payload);
            self.growth_settle(volume, payload);
            self.slices_settle(volume, payload);
            self.writeback_settle(volume, payload);
            self.reclaim_settle(volume, payload);
            self.durable_settle(volume, payload);
            self.flush_failure_settle(volume);
        }
    }

    /// Every volume there is.
    pub(crate) fn all_volumes(&self) -> impl Iterator<Item = &Volume> + Clone {
        self.volumes[..self.volume_end].iter().filter_map(|volume| volume.as_deref())
    }

    #[inline]
    pub(crate) fn volume_ref(&self, volume: VolumeIndex) -> Option<&Volume> {
        self.volumes.get(usize::from(volume.0))?.as_deref()
    }

    #[inline]
    pub(crate) fn volume(&mut self, volume: VolumeIndex) -> &mut Volume {
        self.volumes[usize::from(volume.0)].as_deref_mut().expect("the volume exists")
    }

    #[inline]
    pub(crate) fn token(&mut self, pending: Pending) -> Token {
        Token(self.tokens.insert(pending))
    }

    /// Answers a request and forgets it.
    pub(crate) fn answer(&mut self, at: u32, result: Result<(), RequestError>) {
        let active = self.requests.remove(at).expect("a request is answered once");
        if let Some(stream) = active.stream {
            self.ahead.streams.end(stream);
        }
        if active.backing_waited {
            self.volume(active.request.volume).stats.backing_waits += 1;
        }
        self.effects.push_back(Effect::Answer { tag: active.request.tag, result });
    }

    /// Whether the volume's writes are answered only when they are on the backing device.
    #[inline]
    pub(crate) fn is_through(&self, volume: VolumeIndex) -> bool {
        self.volume_ref(volume).is_some_and(Volume::is_through)
    }
}

/// Frames that [`crate::payload::Place::Window`] may name: those that are worked with, and behind them what is read ahead.
pub fn window_frames(config: &Config) -> u32 {
    work_frames(config) + config.ahead_blocks
}

/// The window, the second chances' frames, a checkpoint's, the scrub's and, last, what lanes have behind the window.
pub(crate) fn work_frames(config: &Config) -> u32 {
    config.window_blocks
        + crate::log::reclaim::CHANCE_COUNT_MAX as u32
        + config.checkpoint_frames
        + crate::policy::scrub::FRAMES
        + Lane::small_frames(config)
}
