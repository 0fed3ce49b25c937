// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine between two modelled disks, or one of them alone, and a clock that jumps.
//!
//! # Invariants
//!
//! - **E1** Time goes on only when neither disk nor engine has anything to do at this moment.
//! - **E2** A disk sees what the engine asks for, command by command; nothing is merged, split or left out
//!   on the way. Zeroing costs what writing costs, a discard nothing.

use forebay_core::blank::{self, Nothing, VOLUME};
use forebay_core::control::VolumeStatus;
use forebay_core::effect::{Effect, Token};
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::SUPERBLOCK_SIZE;
use forebay_core::format::superblock::{Mode, NewCache, Order, Superblock, Volume};
use forebay_core::limits::BACKGROUND_BLOCKS;
use forebay_core::policy::slices::Sharing;
use forebay_core::request::{Op, Request};
use forebay_core::stats::Stats;
use forebay_core::units::{BLOCK_BYTES, BLOCK_SIZE, Lba, SegmentId, Tick, VolumeIndex};
use forebay_disk::{Command, Disk, Done, Kind, Model, Nanos};
use std::collections::{HashMap, VecDeque};

/// Longest request that the engine is given; front ends split what is longer.
pub const REQUEST_BYTES: u64 = 1 << 20;
/// The superblock's own commands.
const NAMING: u64 = 1 << 40;
/// Bytes of each of their writes, and how many there are of a copy, its flush included: as the shard does it.
const NAMING_BYTES: usize = BACKGROUND_BLOCKS as usize * BLOCK_SIZE;
const NAMING_STEPS: usize = SUPERBLOCK_SIZE / NAMING_BYTES + 1;

/// What a machine is made of.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The backing device.
    pub backing: Model,
    /// Of a volume.
    pub volume_bytes: u64,
    /// Volumes, one behind the other on the disk.
    pub volumes: u8,
    /// The engine knows that they are on one disk.
    pub one_disk: bool,
    /// The cache device and its size; none for the bare backing device.
    pub cache: Option<(Model, u64)>,
    /// Of the volume.
    pub mode: Mode,
    /// Of the volume.
    pub order: Order,
    /// Of guests, against write-back.
    pub weight: u8,
    /// Microseconds that 99 of 100 reads may take; 0: none is set.
    pub p99_target: u32,
    /// Of the engine.
    pub config: Config,
}

/// The engine and what it has under way.
struct Cached {
    engine: Engine,
    disk: Box<dyn Disk>,
    /// Of the superblock: its token and the commands of it that were done.
    naming: Option<(Token, usize)>,
    /// Blocks that all scrubs but the last have read.
    scrubbed: u64,
    first_segment: u64,
    segment_bytes: u64,
}

/// A machine.
pub struct Machine {
    now: Nanos,
    cached: Option<Cached>,
    backing: Box<dyn Disk>,
    volume_bytes: u64,
    /// Requests that the engine had no room for.
    busy: VecDeque<Request>,
    free_tags: Vec<u32>,
    tag_count: u32,
    /// What write-back asks for waits here.
    held: Option<Vec<Command>>,
    /// Ranges of requests under way, for those that go around the log.
    ranges: HashMap<u32, (u64, u64)>,
    done: Vec<Done>,
    answered: Vec<u32>,
}

impl Machine {
    /// A machine with an empty cache.
    pub fn new(setup: &Setup) -> Machine {
        let cached = setup.cache.map(|(model, size_bytes)| Cached::new(setup, model, size_bytes));
        Machine {
            now: 0,
            cached,
            backing: setup.backing.disk(),
            volume_bytes: setup.volume_bytes,
            busy: VecDeque::new(),
            free_tags: Vec::new(),
            tag_count: 0,
            held: None,
            ranges: HashMap::new(),
            done: Vec::new(),
            answered: Vec::new(),
        }
    }

    /// The time.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// What the engine counted; nothing for a bare disk.
    pub fn stats(&self) -> Stats {
        self.status().map_or_else(Stats::default, |status| status.stats)
    }

    /// How the backing device is shared; None for a bare disk.
    pub fn sharing(&self) -> Option<Sharing> {
        self.status().map(|status| status.sharing)
    }

    /// Bytes that are not on the backing device yet.
    pub fn dirty_bytes(&self) -> u64 {
        self.status().map_or(0, |status| status.dirty_blocks * BLOCK_BYTES)
    }

    /// Since when something is not on the backing device; none if everything is.
    pub fn dirty_since(&self) -> Option<Nanos> {
        Some(self.status()?.dirty_since?.0)
    }

    /// Blocks that were placed and are not durable on the cache device, copies of what was read included.
    pub fn undurable_blocks(&self) -> u64 {
        self.status().map_or(0, |status| status.placed.0 - status.durable.0)
    }
    fn status(&self) -> Option<VolumeStatus> {
        self.cached.as_ref()?.engine.status(VOLUME)
    }

    /// Gives a request of at most [`REQUEST_BYTES`]; its name comes out of [`Machine::step`]. Offsets go on from volume to
    /// volume.
    pub fn submit(&mut self, op: Op, offset: u64, length: u64) -> u32 {
        let tag = self.free_tags.pop().unwrap_or_else(|| {
            self.tag_count += 1;
            self.tag_count - 1
        });
        self.ranges.insert(tag, (offset, length));
        let volume = (offset / self.volume_bytes) as u8;
        let within = offset - u64::from(volume) * self.volume_bytes;
        let volume = VolumeIndex(volume);
        let request = Request { volume, op, offset: within, length, tag };
        match &mut self.cached {
            None => {
                let kind = match op {
                    Op::Read => Kind::Read,
                    Op::Flush => Kind::Flush,
                    _ => Kind::Write,
                };
                let command = Command { id: u64::from(tag), kind, offset, bytes: length };
                self.backing.submit(self.now, command);
            }
            Some(_) => self.busy.push_back(request),
        }
        tag
    }

    /// Goes on to the next moment at which requests are answered; gives their names. None: nothing is
    /// under way.
    pub fn step(&mut self, until: Nanos) -> Option<&[u32]> {
        self.answered.clear();
        loop {
            self.act();
            if !self.answered.is_empty() {
                for tag in &self.answered {
                    self.free_tags.push(*tag);
                    self.ranges.remove(tag);
                }
                return Some(&self.answered);
            }
            // E1
            let next = self.next().filter(|next| *next <= until)?;
            assert!(next >= self.now, "time goes back");
            self.now = next;
            self.advance();
        }
    }

    /// Lets time pass without requests.
    pub fn idle(&mut self, until: Nanos) {
        let answers = self.step(until).is_some();
        assert!(!answers, "nothing was asked");
        self.now = until;
    }

    /// Goes on to the next moment at which requests are answered, or to `until`; gives their names.
    pub fn wait(&mut self, until: Nanos) -> &[u32] {
        if self.step(until).is_none() {
            self.now = self.now.max(until);
        }
        &self.answered
    }

    /// Requests that are not answered.
    pub fn under_way(&self) -> usize {
        self.ranges.len()
    }

    /// From now on nothing is written back: the backing device does not do it, until [`Machine::let_go`].
    pub fn hold(&mut self) {
        self.held.get_or_insert_default();
    }

    /// What was held is asked for.
    pub fn let_go(&mut self) {
        for command in self.held.take().into_iter().flatten() {
            self.backing.submit(self.now, command);
        }
    }

    /// From now on the volume has another order.
    pub fn set_order(&mut self, order: Order) {
        if let Some(cached) = &mut self.cached {
            cached.engine.set_order(VOLUME, order, &mut Nothing);
        }
    }

    /// Begins a scrub of the cache, if none is running.
    pub fn scrub(&mut self) {
        if let Some(cached) = &mut self.cached {
            let before = cached.engine.scrub_report().verified_blocks;
            if cached.engine.scrub(None, &mut Nothing).is_ok() {
                cached.scrubbed += before;
            }
        }
    }

    /// Blocks that were read for scrubs.
    pub fn scrubbed_blocks(&self) -> u64 {
        let scrubbed = |it: &Cached| it.scrubbed + it.engine.scrub_report().verified_blocks;
        self.cached.as_ref().map_or(0, scrubbed)
    }

    /// Wants a checkpoint, if none is being written.
    pub fn want_checkpoint(&mut self) {
        if let Some(cached) = self.cached.as_mut().filter(|it| it.engine.is_checkpointed()) {
            cached.engine.want_checkpoint();
        }
    }

    /// Whether one is being written.
    pub fn is_checkpointing(&self) -> bool {
        self.cached.as_ref().is_some_and(|it| !it.engine.is_checkpointed())
    }

    /// Checkpoints so far.
    pub fn checkpoint_count(&self) -> u64 {
        self.cached.as_ref().map_or(0, |it| it.engine.checkpoint_count())
    }

    /// Ends what a drain began.
    pub fn undrain(&mut self) {
        if let Some(cached) = &mut self.cached {
            cached.engine.set_mode(VOLUME, Mode::WriteBack, &mut Nothing);
        }
    }

    /// From now on everything is written back. The volume stays drained.
    pub fn begin_to_drain(&mut self) {
        if let Some(cached) = &mut self.cached {
            cached.engine.drain(VOLUME, &mut Nothing);
        }
    }

    /// Writes everything back; gives how long it took. The volume stays drained.
    pub fn drain(&mut self) -> Nanos {
        let begun = self.now;
        self.begin_to_drain();
        while self.cached.as_ref().is_some_and(|it| !it.engine.is_clean(VOLUME)) {
            self.act();
            self.now = self.next().expect("something is under way until it is clean");
            self.advance();
        }
        self.now - begun
    }

    fn next(&self) -> Option<Nanos> {
        let engine = self.cached.as_ref().and_then(|it| it.engine.deadline());
        let cache = self.cached.as_ref().and_then(|it| it.disk.next());
        let engine = engine.map(|tick| tick.0.max(self.now));
        [engine, cache, self.backing.next()].into_iter().flatten().min()
    }

    /// What is done by now is told.
    fn advance(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        self.backing.advance(self.now, &mut done);
        match &mut self.cached {
            None => self.answered.extend(done.iter().map(|done| done.id as u32)),
            Some(cached) => {
                cached.engine.clock(Tick(self.now), self.now / 1_000_000);
                for Done { id, .. } in done.drain(..) {
                    cached.engine.completed(Token(id as u32), Ok(()), &mut Nothing);
                }
                cached.disk.advance(self.now, &mut done);
                for Done { id, .. } in done.drain(..) {
                    cached.done(self.now, id);
                }
                cached.engine.tick(Tick(self.now), self.now / 1_000_000, &mut Nothing);
            }
        }
        self.done = done;
    }

    /// What the engine wants is begun.
    fn act(&mut self) {
        let Some(cached) = &mut self.cached else { return };
        while let Some(request) = self.busy.front() {
            if cached.engine.submit(*request, &mut Nothing).is_err() {
                break;
            }
            self.busy.pop_front();
        }
        let base = self.volume_bytes / BLOCK_BYTES;
        let place = |volume: VolumeIndex, lba: Lba| lba + u64::from(volume.0) * base;
        while let Some(effect) = cached.engine.next_effect() {
            let bytes = |blocks: u16| u64::from(blocks) * BLOCK_BYTES;
            let (token, kind, offset, bytes) = match effect {
                Effect::Answer { tag, result } => {
                    assert_eq!(result, Ok(()), "no device fails here");
                    self.answered.push(tag);
                    continue;
                }
                Effect::MarkStale { .. } => unreachable!("no device fails here"),
                Effect::WriteSuperblock { token, .. } => {
                    cached.naming = Some((token, 0));
                    cached.name(self.now);
                    continue;
                }
                Effect::DiscardBacking { token, .. } => {
                    cached.engine.completed(token, Ok(()), &mut Nothing);
                    continue;
                }
                Effect::WriteCache { token, segment, block, blocks, .. } => {
                    let at = cached.address(segment, block);
                    cached.command(self.now, token, Kind::Write, at, bytes(blocks));
                    continue;
                }
                Effect::ReadCache { token, segment, block, blocks, .. } => {
                    let at = cached.address(segment, block);
                    cached.command(self.now, token, Kind::Read, at, bytes(blocks));
                    continue;
                }
                Effect::WriteArea { token, address, blocks, .. } => {
                    cached.command(self.now, token, Kind::Write, address, bytes(blocks));
                    continue;
                }
                Effect::FlushCache { token } => {
                    cached.command(self.now, token, Kind::Flush, 0, 0);
                    continue;
                }
                Effect::ReadBacking { token, volume, lba, blocks, .. } => {
                    (token, Kind::Read, place(volume, lba), bytes(blocks))
                }
                Effect::WriteBacking { token, volume, lba, blocks, .. } => {
                    (token, Kind::Write, place(volume, lba), bytes(blocks))
                }
                Effect::ZeroBacking { token, volume, lba, blocks } => {
                    (token, Kind::Write, place(volume, lba), blocks * BLOCK_BYTES)
                }
                Effect::FlushBacking { token, .. } => (token, Kind::Flush, Lba(0), 0),
                Effect::WriteAround { token, tag, .. } => {
                    let (offset, length) = self.ranges[&tag];
                    let command = Command {
                        id: u64::from(token.0),
                        kind: Kind::Write,
                        offset,
                        bytes: length,
                    };
                    self.backing.submit(self.now, command);
                    continue;
                }
            };
            let offset = if kind == Kind::Flush { 0 } else { offset.bytes() };
            let command = Command { id: u64::from(token.0), kind, offset, bytes };
            match self.held.as_mut().filter(|_| kind == Kind::Write) {
                Some(held) => held.push(command),
                None => self.backing.submit(self.now, command),
            }
        }
    }
}

impl Cached {
    fn new(setup: &Setup, model: Model, size_bytes: u64) -> Cached {
        let new = NewCache {
            uuid: [7; 16],
            key: 0x1234_5678_9ABC_DEF0,
            size_bytes,
            segment_bytes: 512 << 10,
            now: 1,
        };
        let superblock = Superblock::format(&new).expect("a cache of a usual size");
        let Setup { mode, order, weight, p99_target, .. } = *setup;
        let empty = Volume::empty([8; 16], "v", setup.volume_bytes);
        let volume = Volume { mode, order, weight, p99_target, ..empty };
        let mut engine = blank::engine(&superblock, setup.config, &volume);
        for at in 1..setup.volumes {
            let (index, name) = (VolumeIndex(at), format!("v{at}"));
            engine.attach(index, &Volume { uuid: [8 + at; 16], name, ..volume.clone() });
            if setup.one_disk {
                engine.share_disk(index, VOLUME);
            }
            engine.serve(index, true);
        }
        let (first_segment, segment_bytes) =
            (superblock.first_segment, u64::from(superblock.segment_bytes));
        Cached {
            engine,
            disk: model.disk(),
            naming: None,
            scrubbed: 0,
            first_segment,
            segment_bytes,
        }
    }

    fn address(&self, segment: SegmentId, block: u16) -> u64 {
        let segment = u64::from(segment.0) * self.segment_bytes;
        self.first_segment + segment + u64::from(block) * BLOCK_BYTES
    }

    fn command(&mut self, now: Nanos, token: Token, kind: Kind, offset: u64, bytes: u64) {
        self.disk.submit(now, Command { id: u64::from(token.0), kind, offset, bytes });
    }

    /// The next command of writing the superblock: a copy in parts, a flush, the other copy, a flush.
    fn name(&mut self, now: Nanos) {
        let Some((_, step)) = self.naming else { return };
        let (kind, bytes) = match step % NAMING_STEPS + 1 {
            NAMING_STEPS => (Kind::Flush, 0),
            _ => (Kind::Write, NAMING_BYTES as u64),
        };
        self.disk.submit(now, Command { id: NAMING, kind, offset: 0, bytes });
    }

    fn done(&mut self, now: Nanos, id: u64) {
        if id != NAMING {
            return self.engine.completed(Token(id as u32), Ok(()), &mut Nothing);
        }
        let Some((token, step)) = &mut self.naming else { return };
        *step += 1;
        if *step < 2 * NAMING_STEPS {
            return self.name(now);
        }
        let token = *token;
        self.naming = None;
        self.engine.completed(token, Ok(()), &mut Nothing);
    }
}
