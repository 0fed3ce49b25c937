// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shard: one engine, its devices, and the loop that feeds the one and runs the others.
//!
//! It does, it does not decide. One thread drives it. Whoever owns the loop calls
//! [`Shard::turn`] again and again; requests go in by [`Shard::submit`], answers come out of
//! [`Shard::take_answers`], and what the reactor reports for others (sockets) is handed on.

mod clock;
mod ending;
mod flushes;
mod naming;
pub(crate) mod opening;
mod settings;
mod sizes;
mod straight;
mod volumes;

pub use opening::Opening;

use self::clock::{Begun, Clock, Coming, took};
use self::flushes::Flushes;
use self::naming::{NAMING_TOKEN, Naming};
use crate::cache::CacheError;
use crate::elsewhere::Bytes;
use crate::host::machine::{DeviceNumber, Host};
use crate::host::runtime_dir::{Places, boot_id};
use crate::io::{
    Arena, BUFFERS_EACH, Completion, DRIVERS_BUFFERS_AT, Device, DeviceError, Operation, Reactor,
    ReactorKind, Span, Stats, source_of,
};
use crate::latency::{Latency, LatencySummary};
use crate::memory::{Memory, SharedIdentity};
use forebay_core::effect::{Effect, Fault, Token};
use forebay_core::engine::{CacheHealth, Config, Engine};
use forebay_core::format::superblock::{Mode, PATH_MAX, Superblock};
use forebay_core::limits::{REQUEST_COUNT_MAX, VOLUME_COUNT_MAX};
use forebay_core::log::recovery::Damage;
use forebay_core::payload::Place;
use forebay_core::policy::reserve::{Reserve, SEGMENTS_EACH_MIN};
use forebay_core::policy::scrub::Refused;
use forebay_core::request::{Op, Request, RequestError};
use forebay_core::units::{BLOCK_BYTES, Tick, VolumeIndex};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Reactor source of the cache device; backing devices follow, one for each volume index.
pub const CACHE_SOURCE: u16 = 1;
/// First reactor source that is not a device's.
pub const FREE_SOURCE: u16 = 100;

/// Requests of front ends that may be inside at once, then [`Busy`]: each has room for two blocks
/// that it covers in part.
pub const REQUESTS_INSIDE_MAX: usize = 1024;
const _: () = assert!(REQUESTS_INSIDE_MAX <= REQUEST_COUNT_MAX);

/// The reactor source of a volume's backing device.
pub const fn backing_source(volume: VolumeIndex) -> u16 {
    CACHE_SOURCE + 1 + volume.0 as u16
}

const _: () = assert!(CACHE_SOURCE as usize + 1 + VOLUME_COUNT_MAX < FREE_SOURCE as usize);

/// The first place in the ring's table for buffers of a driver that serves a volume.
pub const fn drivers_buffers_of(volume: VolumeIndex) -> u16 {
    DRIVERS_BUFFERS_AT + volume.0 as u16 * BUFFERS_EACH
}

/// How a shard is opened.
#[derive(Clone, Debug)]
pub struct ShardOptions {
    /// Which way devices are driven.
    pub reactor: ReactorKind,
    /// What the engine may choose.
    pub config: Config,
    /// Keep buffers where they outlive the process, if there is such a place.
    pub shared: bool,
    /// Where that is looked for.
    pub places: Places,
    /// Whoever drives the shard can write down that a cache is stale ([`Shard::take_stale`]); else a failed cache is not
    /// passed.
    pub marks_stale: bool,
    /// Keep the map where [`Shard::hand_over`] need not copy it. Such memory is not given back before the
    /// process ends or the shard is gone.
    pub lasting: bool,
}

impl Default for ShardOptions {
    fn default() -> ShardOptions {
        ShardOptions {
            reactor: ReactorKind::Auto,
            config: Config::default(),
            shared: true,
            places: Places::found(),
            marks_stale: false,
            lasting: false,
        }
    }
}

/// Why a shard cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The cache device.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Memory, the reactor, the runtime directory.
    #[error("{what}: {why}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why not. It is said above, so it is no source, which would be told once more.
        why: io::Error,
    },
    /// A process has the memory of this cache's last opening: it serves it.
    #[error(
        "the cache {uuid} is being served from another device, of which this one is a copy: what that process has answered \
         and not written yet would be lost with it; stop it first, and do not serve the two by turns"
    )]
    Copy {
        /// Of the cache.
        uuid: String,
    },
    /// Of another volume than a superblock can hold.
    #[error(
        "a volume of {size_bytes} bytes at a path of {path_bytes} cannot be recorded: less than 2 PiB, and a path of at most {PATH_MAX} bytes, can"
    )]
    Unrecordable {
        /// How large it is.
        size_bytes: u64,
        /// How long its path.
        path_bytes: usize,
    },
    /// All places are taken.
    #[error("a cache holds at most {VOLUME_COUNT_MAX} volumes; `forebay forget` one")]
    TooManyVolumes,
    /// Volumes have had the rest of the places in this opening.
    #[error(
        "all {VOLUME_COUNT_MAX} places of a cache are taken, {} of them by what was detached since it was opened: those are free again \
         after `forebay upgrade`, or another start",
        VOLUME_COUNT_MAX - recorded
    )]
    PlacesInUse {
        /// Volumes that are recorded.
        recorded: usize,
    },
    /// The cache is too small for so many volumes.
    #[error(
        "a cache of {segments} segments of {} KiB holds at most {} volumes, and this would be {volumes}: `forebay resize --cache-size` makes it \
         larger; or `forebay format` one with smaller segments",
        segment_bytes >> 10,
        segments / SEGMENTS_EACH_MIN
    )]
    TooSmallForVolumes {
        /// With the new one.
        volumes: u32,
        /// Of the cache.
        segments: u32,
        /// Of each.
        segment_bytes: u32,
    },
    /// Volumes would have more of the cache reserved than there is.
    #[error(
        "with that, {} MiB of the cache would be reserved for its volumes, and {} MiB can be: \
         lower the reserve of one (`forebay status` says what each has)",
        wanted_bytes >> 20,
        usable_bytes >> 20
    )]
    Overbooked {
        /// What reservations would come to.
        wanted_bytes: u64,
        /// What can be reserved.
        usable_bytes: u64,
    },
}

fn system(what: &'static str) -> impl Fn(io::Error) -> OpenError {
    move |why| OpenError::System { what, why }
}

/// What opening found.
#[derive(Clone, Debug, Default)]
pub struct Opened {
    /// Segments that a killed process left in memory and that were written.
    pub redone_segments: usize,
    /// The cache device had failed before: it may have lost what was not flushed.
    pub cache_failed: bool,
    /// Volumes whose log ends before the place where it is known to have ended: their flushes fail until the guest was told and the
    /// cache is opened again.
    pub dropped_ends: usize,
    /// Bytes of the logs' ends that were written again: they were there, and may not have been durable.
    pub rewritten_bytes: u64,
    /// What was damaged.
    pub damage: Vec<Damage>,
    /// The last stop was a clean one.
    pub clean: bool,
    /// A checkpoint was used: only what came after it was read.
    pub from_checkpoint: bool,
    /// The superblock's other copy was bad, and is repaired.
    pub repaired_superblock: bool,
    /// How long it took.
    pub took: Duration,
    /// Nothing was read: the program before handed it over.
    pub handed_over: bool,
    /// Why what was handed over was not taken.
    pub not_taken: Option<String>,
    /// The opening before ended before it had memory for what it would have answered, as it had noted.
    pub never_served: bool,
    /// Where memory that a process had in this boot was looked for and not found; empty: nothing is missing.
    pub not_left: Vec<PathBuf>,
}

/// An answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// As submitted.
    pub cookie: u64,
    /// What became of it.
    pub result: Result<(), RequestError>,
    /// What was read went straight to its buffer of the ring: nothing is in its span.
    pub is_straight: bool,
}

/// The engine has no room: offer the request again after the next answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

/// One engine and its devices.
///
/// **R4** They are dropped as they stand here: memory that was given back reads as zeros (B1 of `io/buffer`), so it goes when the
/// reactor has no disk operation any more (R3 of `io/reactor`) and no device is left that would begin one.
pub struct Shard {
    engine: Engine,
    /// The reactor; a front end may submit with a source of its own.
    pub reactor: Reactor,
    cache: Box<dyn Device>,
    backings: Vec<Option<Box<dyn Device>>>,
    memory: Memory,
    /// On which disks they are, where that is known.
    disks: [Option<DeviceNumber>; VOLUME_COUNT_MAX],
    superblock: Superblock,
    shared_path: Option<PathBuf>,
    /// It is held for as long as this is (D4 of `host/runtime_dir`).
    _shared: Option<File>,
    free_tags: Vec<u32>,
    cookies: Vec<u64>,
    begun: Vec<Begun>,
    coming: Coming,
    latencies: Vec<Option<[Latency; 2]>>,
    /// Tags of requests that are done; they are free when the answers are taken.
    answers: Vec<(u32, Result<(), RequestError>)>,
    done: Vec<Completion>,
    naming: Option<Naming>,
    flushes: Flushes,
    /// That the cache device has failed is in the memory that outlives the process.
    failure_noted: bool,
    marks_stale: bool,
    /// Marks that are wanted, and that nobody has begun to write.
    stale_wanted: Vec<StaleWanted>,
    /// What came for others while a naming was waited for.
    kept: Vec<(u64, i32)>,
    turns_again: bool,
    /// Places that volumes have had in this opening: front ends may still use the old names.
    had: [bool; VOLUME_COUNT_MAX],
    naming_memory: Arena,
    naming_bytes: Vec<u8>,
    started: Instant,
    opened: Opened,
    /// Where the index's cells and the slots' rows lie, if they last.
    files: [Option<File>; 2],
    /// They are to last.
    lasting: bool,
    /// Bytes that the cache is to have.
    resizing: Option<u64>,
}

/// That of flushes of the cache device.
const FLUSH_TOKEN: u64 = 1 << 41;
/// The cache is to be marked stale for a volume: for good, and outside of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleWanted {
    /// Which volume.
    pub volume: VolumeIndex,
    token: Token,
}

/// Whose turn of the loop one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    /// Of everybody: answers are taken behind it.
    All,
    /// The shard's own, in the midst of something that waits.
    Itself,
}

/// Blocks whose checksum is made for what devices have done, in one turn; what is left is the next one's. A device may answer all
/// it has at one time, and has nothing to do until a guest hears of its reads and asks for more.
const SUMMED_BLOCKS: u64 = 128;

impl Shard {
    /// Opens a cache: redoes what a killed process left in memory, recovers the log, raises the
    /// generation. No volume is served yet. If the log holds more extents than `options` have room for,
    /// more is taken ([`Opening`]).
    pub fn open(cache: Box<dyn Device>, options: &ShardOptions) -> Result<Shard, OpenError> {
        Opening::begin(cache, options)?.finish()
    }

    /// Bytes of memory that a shard takes, and those of its devices' [`Stats`], by part; see
    /// [`Engine::memory_parts`].
    pub fn memory_parts(
        segment_count: u32,
        segment_blocks: u16,
        volume_count: usize,
        config: &Config,
    ) -> Vec<(&'static str, u64)> {
        let parts = Engine::memory_parts(segment_count, segment_blocks, volume_count, config);
        let edges = (REQUESTS_INSIDE_MAX * 2) as u64 * BLOCK_BYTES;
        let volumes = volume_count as u64;
        let latencies =
            volumes * 2 * Latency::memory_bytes() + (volumes + 1) * Stats::memory_bytes();
        parts.into_iter().chain([("unaligned edges", edges), ("latencies", latencies)]).collect()
    }

    /// What opening found.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// The engine, to be asked.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The superblock of this opening.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The cache device, to be asked.
    pub fn cache(&self) -> &dyn Device {
        self.cache.as_ref()
    }

    /// A volume's backing device, to be asked.
    pub fn backing(&self, volume: VolumeIndex) -> Option<&dyn Device> {
        self.backings.get(usize::from(volume.0))?.as_deref()
    }

    /// Whether acknowledged writes survive the process.
    pub fn is_shared(&self) -> bool {
        self.shared_path.is_some()
    }

    /// The engine's time.
    pub fn now(&self) -> Tick {
        Tick(self.started.elapsed().as_nanos() as u64)
    }

    /// Notes that the cache device has failed where the next process finds it: before anybody is told.
    fn note_failure(&mut self) {
        if self.engine.health() == CacheHealth::Failed && !self.failure_noted {
            self.failure_noted = true;
            self.memory.note_cache_failed(self.engine.log_ends());
        }
    }

    /// A turn in the middle of something else: what came for others is kept for the next one.
    fn turn_for_itself(&mut self, timeout: Option<Duration>) -> Result<(), OpenError> {
        let mut kept = std::mem::take(&mut self.kept);
        let waited = self.turn_on(timeout, For::Itself, &mut kept);
        self.kept = kept;
        waited.map_err(system("wait for the devices"))
    }

    /// A request for what is there comes soon: the place in the map where it begins is fetched meanwhile. For who has
    /// several requests at hand, or a request whose bytes he has to fetch first; it changes nothing.
    #[inline]
    pub fn expect(&mut self, volume: VolumeIndex, offset: u64) {
        self.engine.expect(volume, offset, &mut self.memory);
    }

    /// Hands a request to the engine. A write's span holds its bytes; a read's holds whole blocks
    /// and receives the first byte at `offset % 4096`. The span is the engine's until the answer.
    pub fn submit(
        &mut self,
        volume: VolumeIndex,
        op: Op,
        offset: u64,
        length: u64,
        span: Option<Span>,
        cookie: u64,
    ) -> Result<(), Busy> {
        self.submit_from(volume, op, offset, length, Bytes { span, ..Bytes::default() }, cookie)
    }

    /// The same, with a write's bytes elsewhere: they are copied when they are wanted, to the span if not straight to the log. A write
    /// whose bytes cannot be had then fails. Or with a buffer of the ring besides, so that they need not be copied.
    pub fn submit_from(
        &mut self,
        volume: VolumeIndex,
        op: Op,
        offset: u64,
        length: u64,
        bytes: Bytes,
        cookie: u64,
    ) -> Result<(), Busy> {
        let tag = self.free_tags.pop().ok_or(Busy)?;
        let memory = self.memory_of(volume, (op, offset, length), bytes);
        self.memory.requests[tag as usize] = memory;
        self.cookies[tag as usize] = cookie;
        self.begun[tag as usize] = Begun { at: self.coming.now(), volume, op };
        let request = Request { volume, op, offset, length, tag };
        if self.engine.submit(request, &mut self.memory).is_err() {
            self.free_tags.push(tag);
            return Err(Busy);
        }
        self.run_effects();
        Ok(())
    }

    /// Answers since the last call. Here the time of a request ends: one look at the clock for all of
    /// them, when whoever asked hears of it.
    pub fn take_answers(&mut self, into: &mut Vec<Answer>) {
        if self.answers.is_empty() {
            return;
        }
        let now = Instant::now();
        // What came together took as long, and is recorded together.
        let mut alike: Option<(Begun, u64)> = None;
        for (tag, result) in self.answers.drain(..) {
            let begun = self.begun[tag as usize];
            match &mut alike {
                Some((first, count)) if *first == begun => *count += 1,
                _ => {
                    if let Some((before, count)) = alike.replace((begun, 1)) {
                        took(&mut self.latencies, before, now, count);
                    }
                }
            }
            let is_straight = self.memory.requests[tag as usize].is_straight;
            into.push(Answer { cookie: self.cookies[tag as usize], result, is_straight });
            self.free_tags.push(tag);
        }
        if let Some((begun, count)) = alike {
            took(&mut self.latencies, begun, now, count);
        }
    }

    /// Whether answers wait to be taken.
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// The next turn waits for nothing: somebody has more to do than one turn is for.
    pub fn turn_again(&mut self) {
        self.turns_again = true;
    }

    /// One turn of the loop: waits at most `timeout` (`None`: for as long as it takes) for
    /// something to happen, does it, and hands on what is not a device's.
    pub fn turn(
        &mut self,
        timeout: Option<Duration>,
        foreign: &mut Vec<(u64, i32)>,
    ) -> io::Result<()> {
        let timeout = if self.kept.is_empty() { timeout } else { Some(Duration::ZERO) };
        foreign.append(&mut self.kept);
        self.turn_on(timeout, For::All, foreign)
    }

    fn turn_on(
        &mut self,
        timeout: Option<Duration>,
        whom: For,
        foreign: &mut Vec<(u64, i32)>,
    ) -> io::Result<()> {
        self.run_effects();
        // Nobody else does anything in a turn of the shard's own: answers lie there until it is over, and so do wishes to go on.
        let others_go_on = match whom {
            For::Itself => false,
            For::All => std::mem::take(&mut self.turns_again) || !self.answers.is_empty(),
        };
        // What could not be asked of any device is done already.
        let is_idle = self.done.is_empty() && !others_go_on;
        let timeout = if is_idle { self.timeout(timeout) } else { Duration::ZERO.into() };
        let first = foreign.len();
        self.reactor.wait(timeout, foreign)?;
        self.coming.end();
        let now = Instant::now();
        let mut kept = first;
        for at in first..foreign.len() {
            let (user_data, result) = foreign[at];
            let source = source_of(user_data);
            match self.device_of(source) {
                Some(device) => {
                    // Split borrows: the device, the reactor and the list are three fields.
                    let (device, reactor, done) = device;
                    device.event(reactor, user_data, result, now, done);
                }
                None => {
                    foreign[kept] = foreign[at];
                    kept += 1;
                }
            }
        }
        foreign.truncate(kept);
        let wall = wall_now();
        let tick = Tick(now.saturating_duration_since(self.started).as_nanos() as u64);
        self.engine.clock(tick, wall);
        self.poll_devices(now);
        self.engine.tick(tick, wall, &mut self.memory);
        self.note_failure();
        self.run_effects();
        Ok(())
    }

    fn timeout(&self, asked: Option<Duration>) -> Option<Duration> {
        let now = Instant::now();
        let engine = self.engine.deadline().map(|tick| {
            (self.started + Duration::from_nanos(tick.0)).saturating_duration_since(now)
        });
        let devices = std::iter::once(self.cache.as_ref())
            .chain(self.backings.iter().flatten().map(AsRef::as_ref))
            .filter_map(Device::deadline)
            .map(|at| at.saturating_duration_since(now))
            .min();
        [asked, engine, devices].into_iter().flatten().min()
    }

    #[allow(clippy::type_complexity)]
    fn device_of(
        &mut self,
        source: u16,
    ) -> Option<(&mut dyn Device, &mut Reactor, &mut Vec<Completion>)> {
        let device: &mut dyn Device = match source {
            CACHE_SOURCE => self.cache.as_mut(),
            _ => {
                let at = usize::from(source.checked_sub(CACHE_SOURCE + 1)?);
                self.backings.get_mut(at)?.as_deref_mut()?
            }
        };
        Some((device, &mut self.reactor, &mut self.done))
    }

    /// Reports what the devices have done, as much as one turn is for; the engine's tick comes after it.
    fn poll_devices(&mut self, now: Instant) {
        self.cache.poll(&mut self.reactor, now, &mut self.done);
        for device in self.backings.iter_mut().flatten() {
            device.poll(&mut self.reactor, now, &mut self.done);
        }
        let mut done = std::mem::take(&mut self.done);
        let (end, mut taken) = (self.memory.summed + SUMMED_BLOCKS, 0);
        while taken < done.len() && self.memory.summed < end {
            self.complete(done[taken]);
            taken += 1;
        }
        done.drain(..taken);
        self.done = done;
    }

    fn complete(&mut self, completion: Completion) {
        let result = completion.result.map_err(|DeviceError { .. }| Fault);
        if completion.token != FLUSH_TOKEN {
            return self.completed(completion.token, result);
        }
        while let Some(token) = self.flushes.heard(result) {
            self.completed(token, result);
        }
        self.memory.note_flushed();
        self.begin_flush(Instant::now());
    }

    fn completed(&mut self, token: u64, result: Result<(), Fault>) {
        if token == NAMING_TOKEN {
            self.named_step(result);
        } else {
            self.engine.completed(Token(token as u32), result, &mut self.memory);
        }
        self.note_failure();
    }

    fn ask_flush(&mut self, token: u64, now: Instant) {
        if self.flushes.ask(token) {
            self.flush_now(now);
        }
    }

    fn begin_flush(&mut self, now: Instant) {
        if self.flushes.begin() {
            self.flush_now(now);
        }
    }

    fn flush_now(&mut self, now: Instant) {
        self.memory.note_flushing(self.engine.log_ends());
        self.cache.submit(&mut self.reactor, Operation::Flush, FLUSH_TOKEN, now);
    }

    /// Does what the engine wants done.
    fn run_effects(&mut self) {
        self.memory.fence();
        if self.flushes.is_running() {
            // What was placed since it began follows what it may drop (V10 of `log::recovery`).
            self.memory.note_ends(self.engine.log_ends());
        }
        let mut clock = Clock(None);
        while let Some(effect) = self.engine.next_effect() {
            self.run(effect, &mut clock);
        }
    }

    fn run(&mut self, effect: Effect, clock: &mut Clock) {
        match effect {
            Effect::WriteCache { token, buffer, segment, block, blocks } => {
                let span = self.memory.span(Place::Buffer { buffer, block }, blocks);
                let offset = self.superblock.address(segment, block);
                self.ask_cache(Operation::Write { span, offset }, token, clock.now());
            }
            Effect::ReadCache { token, segment, block, blocks, to } => {
                let span = self.memory.span(to, blocks);
                let offset = self.superblock.address(segment, block);
                self.ask_cache(Operation::Read { span, offset }, token, clock.now());
            }
            Effect::WriteArea { token, address, blocks, from } => {
                let span = self.memory.span(from, blocks);
                self.ask_cache(Operation::Write { span, offset: address }, token, clock.now());
            }
            Effect::WriteSuperblock { token, change } => {
                self.change_superblock(token, change, clock.now())
            }
            Effect::FlushCache { token } => self.ask_flush(u64::from(token.0), clock.now()),
            Effect::ReadBacking { token, volume, lba, blocks, to } => {
                if let Some(buffer) = self.read_straight(to, blocks) {
                    let operation = Operation::ReadRegistered { buffer, offset: lba.bytes() };
                    return self.ask_backing(volume, operation, token, clock.now());
                }
                let span = self.memory.span(to, blocks);
                let bytes = self.bytes_there(volume, lba.bytes(), u64::from(blocks) * BLOCK_BYTES);
                // What lies past the end reads as zeros.
                span.skip(bytes as usize).fill_zero();
                let span = span.part(0, bytes as usize);
                let offset = lba.bytes();
                self.ask_backing(volume, Operation::Read { span, offset }, token, clock.now());
            }
            Effect::WriteBacking { token, volume, lba, blocks, from } => {
                let span = self.memory.span(from, blocks);
                let bytes = self.bytes_there(volume, lba.bytes(), u64::from(blocks) * BLOCK_BYTES);
                let span = span.part(0, bytes as usize);
                let offset = lba.bytes();
                self.ask_backing(volume, Operation::Write { span, offset }, token, clock.now());
            }
            Effect::WriteAround { token, volume, tag } => match self.write_around(tag) {
                Ok(operation) => self.ask_backing(volume, operation, token, clock.now()),
                Err(error) => {
                    let result = Err(error);
                    self.done.push(Completion { token: u64::from(token.0), result });
                }
            },
            Effect::ZeroBacking { token, volume, lba, blocks } => {
                let length = self.bytes_there(volume, lba.bytes(), blocks * BLOCK_BYTES);
                let offset = lba.bytes();
                self.ask_backing(
                    volume,
                    Operation::WriteZeroes { offset, length },
                    token,
                    clock.now(),
                );
            }
            Effect::DiscardBacking { token, volume, lba, blocks } => {
                let length = self.bytes_there(volume, lba.bytes(), blocks * BLOCK_BYTES);
                let offset = lba.bytes();
                self.ask_backing(volume, Operation::Discard { offset, length }, token, clock.now());
            }
            Effect::FlushBacking { token, volume } => {
                self.ask_backing(volume, Operation::Flush, token, clock.now());
            }
            Effect::MarkStale { token, volume } if self.marks_stale => {
                self.stale_wanted.push(StaleWanted { volume, token });
            }
            Effect::MarkStale { token, .. } => {
                let result = Err(DeviceError::IO);
                self.done.push(Completion { token: u64::from(token.0), result });
            }
            Effect::Answer { tag, result } => {
                // No more is touched here: what `submit` has just written lies behind a block that is still
                // on its way to memory.
                self.answers.push((tag, result));
            }
        }
    }

    /// A volume of which the failed cache is to be marked stale. [`Shard::stale_marked`] says what came of it.
    pub fn take_stale(&mut self) -> Option<StaleWanted> {
        self.stale_wanted.pop()
    }

    /// The cache is marked stale for a volume, durably, or cannot be.
    pub fn stale_marked(&mut self, wanted: StaleWanted, durable: bool) {
        let result = if durable { Ok(()) } else { Err(Fault) };
        self.engine.complete(wanted.token, result, &mut self.memory);
        self.run_effects();
    }

    /// How long requests to a volume took: reads, then writes.
    pub fn latencies(&self, volume: VolumeIndex) -> [LatencySummary; 2] {
        match self.latencies.get(usize::from(volume.0)) {
            Some(Some(both)) => both.each_ref().map(Latency::summary),
            _ => [LatencySummary::default(); 2],
        }
    }

    fn bytes_there(&self, volume: VolumeIndex, offset: u64, length: u64) -> u64 {
        let size = self.engine.volume_bytes(volume).unwrap_or(0);
        length.min(size.saturating_sub(offset))
    }

    fn ask_cache(&mut self, operation: Operation, token: Token, now: Instant) {
        self.cache.submit(&mut self.reactor, operation, u64::from(token.0), now);
    }

    fn ask_backing(
        &mut self,
        volume: VolumeIndex,
        operation: Operation,
        token: Token,
        now: Instant,
    ) {
        match self.backings[usize::from(volume.0)].as_deref_mut() {
            Some(device) => device.submit(&mut self.reactor, operation, u64::from(token.0), now),
            None => {
                let result = Err(DeviceError::IO);
                self.done.push(Completion { token: u64::from(token.0), result });
            }
        }
    }

    /// Writes a volume back and keeps it clean.
    pub fn drain(&mut self, volume: VolumeIndex) {
        self.engine.drain(volume, &mut self.memory);
        self.run_effects();
    }

    /// Begins to read what the cache holds of a volume, or of all, and heals what is bad.
    pub fn scrub(&mut self, only: Option<VolumeIndex>) -> Result<(), Refused> {
        let begun = self.engine.scrub(only, &mut self.memory);
        self.run_effects();
        begun
    }

    /// Ends that.
    pub fn stop_scrub(&mut self) {
        self.engine.stop_scrub();
    }

    /// What a range reads as without looking at data. Gives how many blocks were looked at.
    pub fn zero_runs(
        &mut self,
        volume: VolumeIndex,
        first: forebay_core::units::Lba,
        blocks: u64,
        run: impl FnMut(u64, bool) -> bool,
    ) -> u64 {
        self.engine.zero_runs(volume, first, blocks, run)
    }
}

/// What a new volume is recorded with.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// How it takes writes.
    pub mode: Mode,
    /// What it has of the cache for itself.
    pub reserve: Reserve,
    /// Where the backing device is.
    pub path: String,
    /// Its identity.
    pub fingerprint: [u8; 64],
}

/// Wall clock, milliseconds since 1970.
pub fn wall_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// A uuid as people write it.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The name of a cache's file in shared memory.
pub(crate) fn shared_name(superblock: &Superblock) -> String {
    format!("{}.buffers", uuid_text(&superblock.uuid))
}

/// What that file begins with, if it is of the last opening.
pub(crate) fn shared_identity(superblock: &Superblock) -> SharedIdentity {
    SharedIdentity {
        boot_id: boot_id(&Host::default()).unwrap_or_default(),
        uuid: superblock.uuid,
        open_generation: superblock.open_generation,
        segment_bytes: superblock.segment_bytes,
    }
}
