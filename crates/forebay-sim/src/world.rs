// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulated machine: engine, devices, memory, clock, and the guest's view of its disks.
//!
//! What the engine wants done is put on a heap of events, each with a random latency; what the
//! guest is told is compared with the model at once. Which operations come, and when the machine
//! stops, is decided in `run`.

use crate::block::{Block, NumberMap, SECTORS, guest_block};
use crate::checkers::memory_is_bounded::Bound;
use crate::checkers::reservations_are_kept::Reservations;
use crate::checkers::sequences_have_no_gap;
use crate::checkers::watermark_is_prefix::{Change, Prefix};
use crate::device::{Device, Piece, Unflushed};
use crate::guest::Asked;
use crate::marks::Marks;
use crate::memory::{Memory, behind};
use crate::model::Model;
use crate::random::{Random, mix};
use crate::setup::Setup;
use crate::volume::Volume;
use forebay_core::effect::{Effect, Fault, SuperblockChange, Token};
use forebay_core::engine::{Engine, window_frames};
use forebay_core::format::entry::Kind;
use forebay_core::format::record::Header;
use forebay_core::format::superblock::{Order, Superblock};
use forebay_core::payload::Place;
use forebay_core::policy::scrub::Report;
use forebay_core::policy::writeback::Stage;
use forebay_core::request::Op;
use forebay_core::stats::Refusal;
use forebay_core::units::{BLOCK_BYTES, Lba, Ordinal, SegmentId, Sequence, Tick, VolumeIndex};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// Something that will happen.
#[derive(Clone, Debug)]
pub(crate) struct Flight {
    pub(crate) token: Token,
    pub(crate) effect: Effect,
    /// Bytes of a write, if it has taken them.
    pub(crate) pieces: Option<Vec<Piece>>,
    /// What a flush will cover.
    pub(crate) through: u64,
}

/// What a device has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// Records are written.
    Record,
    /// The first record of a segment is written: what was in its place is gone.
    First,
    /// The cache device is flushed.
    Flush,
    /// Pages of a checkpoint are written.
    Pages,
    /// The superblock is written.
    Superblock,
    /// Something is on a backing device.
    Backing,
    /// A backing device is flushed.
    BackingFlush,
    /// The cache is marked stale.
    Mark,
}

impl Done {
    /// All but the most frequent.
    pub const RARE: [Done; 6] = [
        Done::First,
        Done::Flush,
        Done::Pages,
        Done::Superblock,
        Done::Backing,
        Done::BackingFlush,
    ];

    fn of(effect: &Effect) -> Option<Done> {
        match effect {
            Effect::WriteCache { block: 0, .. } => Some(Done::First),
            Effect::WriteCache { .. } => Some(Done::Record),
            Effect::FlushCache { .. } => Some(Done::Flush),
            Effect::WriteArea { .. } => Some(Done::Pages),
            Effect::WriteSuperblock { .. } => Some(Done::Superblock),
            Effect::WriteBacking { .. }
            | Effect::WriteAround { .. }
            | Effect::ZeroBacking { .. }
            | Effect::DiscardBacking { .. } => Some(Done::Backing),
            Effect::FlushBacking { .. } => Some(Done::BackingFlush),
            Effect::MarkStale { .. } => Some(Done::Mark),
            Effect::ReadCache { .. } | Effect::ReadBacking { .. } | Effect::Answer { .. } => None,
        }
    }
}

/// What went wrong.
#[derive(Clone, Debug)]
pub struct Failure(pub String);

/// Shorthand.
pub type Outcome = Result<(), Failure>;

/// The machine.
#[derive(Debug)]
pub struct World {
    /// What was chosen before.
    pub setup: Rc<Setup>,
    /// Chance.
    pub random: Random,
    /// What was come past.
    pub marks: Marks,
    /// The cache device.
    pub cache: Device,
    /// The volumes.
    pub volumes: Vec<Volume>,
    /// The superblock of this opening.
    pub superblock: Superblock,
    /// Memory of the process.
    pub memory: Memory,
    /// The engine, while there is a process.
    pub engine: Option<Engine>,
    /// Nanoseconds.
    pub now: u64,
    /// Requests under way, by tag.
    pub asked: NumberMap<Asked>,
    /// A hash of everything that happened.
    pub trace: u64,
    pub(crate) copied: NumberMap<()>,
    /// What the last scrub has come to.
    pub(crate) scrubbed: Report,
    /// Headers that went bad: of which volume, its attach generation, and where in its log.
    pub bad_headers: Vec<(u16, u32, Ordinal)>,
    /// Nothing fails any more.
    pub faults_over: bool,
    /// The cache device failed a write or a flush in this opening.
    pub cache_failed: bool,
    /// Its next write or flush fails.
    pub cache_fails_next: bool,
    /// What a device did last.
    pub done: Option<Done>,
    /// How much memory the process may take.
    pub bound: Bound,
    pub(crate) reservations: Reservations,
    /// The guest does nothing but write what it wrote last, as long as it overwrites too little.
    pub insists: bool,
    /// Everything clean is dropped at the next opening.
    pub evicts: bool,
    /// Something rotted that only the death of the process alone calls durable: the power does not
    /// fail before the next opening is over (`docs/faults.md`).
    pub powered: bool,
    pub(crate) moment: u64,
    pub(crate) version: u64,
    pub(crate) events: BinaryHeap<Reverse<(u64, u64)>>,
    pub(crate) flights: NumberMap<Flight>,
    pub(crate) order: u64,
    pub(crate) next_tag: u32,
    /// Bytes that the cache is to have.
    pub(crate) resizing: Option<u64>,
    /// What moments are aimed at (`aim`): a volume of which the last opening found blocks lost; whose marks were written into the
    /// superblock just now, and whether the power failed then once; a block that is being healed.
    pub(crate) found_lost: Option<usize>,
    pub(crate) marked: Option<VolumeIndex>,
    pub(crate) cut_at_marks: bool,
    pub(crate) healing: Option<(usize, u64)>,
    /// The checkpoint of which the superblock of another size may have taken a page: the machine stopped before it counted.
    pub(crate) overwritten_checkpoint: u64,
}

impl World {
    /// A machine with a fresh cache and backing devices that hold something.
    pub fn new(setup: Setup, mut random: Random) -> World {
        let mut superblock = setup.superblock.clone();
        if setup.late_volume {
            superblock.volumes[setup.volumes.len() - 1] = None;
        }
        let blocks = superblock.size_bytes / BLOCK_BYTES + setup.spare;
        let mut cache = Device::new(blocks, crate::device::Discard::Stays);
        cache.slow = setup.slow_cache;
        let frames = window_frames(&setup.config);
        let memory = Memory::new(
            setup.config.buffer_count,
            superblock.segment_blocks(),
            frames,
            Random::new(random.next()),
        );
        let mut volumes = Vec::new();
        for (index, volume) in setup.volumes.iter().enumerate() {
            let mut made = Volume {
                device: Device::new(volume.size_bytes.div_ceil(BLOCK_BYTES), volume.discard),
                model: Model::new(index as u8, 0),
                islands: volume.islands.clone(),
                size_bytes: volume.size_bytes,
                growing: None,
                failed_at: 0,
                mode: volume.mode,
                order: volume.order,
                cutoff: volume.cutoff,
                shares: (volume.weight, volume.p99_target),
                reserve: volume.reserve,
                floor: Sequence(0),
                order_since: Sequence(0),
                mode_changes: 0,
                revived_at: 0,
                stale: None,
                clean_forgotten: false,
                passing_since: None,
                attached: !(setup.late_volume && index + 1 == setup.volumes.len()),
                flush_failed: false,
                around_writes: Vec::new(),
                untold: None,
                around_used: false,
                forgotten: false,
                prefix: None,
                dirty: Vec::new(),
                closed: None,
                written: None,
                read: None,
                seen: None,
            };
            made.dirty = vec![false; made.cells()];
            made.model = Model::new(index as u8, made.cells());
            for cell in 0..made.cells() {
                if random.one_in(3) {
                    continue;
                }
                let lba = made.lba(cell);
                let mask = made.mask(lba);
                let content = guest_block(index as u8, cell as u64, 0, false);
                let content = Block::merge(&Block::zero(), &content, mask);
                made.model.found(cell, &content);
                made.device.write(vec![(lba, u8::MAX, content)]);
            }
            made.device.slow = volume.slow;
            let through = made.device.flush_begin();
            made.device.flush_end(through);
            let cells = 0..made.cells();
            let found = cells.map(|cell| Some(*made.device.durable(made.lba(cell)).tags()));
            made.prefix = Some(Prefix::new(found));
            if made.may_bypass() {
                made.bypasses();
            }
            volumes.push(made);
        }
        let bound = Bound::new(&superblock, setup.volumes.len(), &setup.config);
        World {
            setup: Rc::new(setup),
            random,
            marks: Marks::default(),
            cache,
            volumes,
            superblock,
            memory,
            engine: None,
            now: 0,
            asked: NumberMap::default(),
            trace: 0,
            copied: NumberMap::default(),
            scrubbed: Report::default(),
            bad_headers: Vec::new(),
            faults_over: false,
            cache_failed: false,
            cache_fails_next: false,
            done: None,
            bound,
            reservations: Reservations::default(),
            insists: false,
            evicts: false,
            powered: false,
            moment: 1,
            version: 1,
            events: BinaryHeap::new(),
            flights: NumberMap::default(),
            order: 0,
            next_tag: 0,
            resizing: None,
            found_lost: None,
            marked: None,
            cut_at_marks: false,
            healing: None,
            overwritten_checkpoint: 0,
        }
    }

    /// The same machine once more, without its process: what it could leave if it stopped now.
    pub fn fork(&self) -> World {
        World {
            setup: Rc::clone(&self.setup),
            random: self.random.clone(),
            marks: Marks::default(),
            cache: self.cache.clone(),
            volumes: self.volumes.clone(),
            superblock: self.superblock.clone(),
            memory: self.memory.clone(),
            engine: None,
            now: self.now,
            asked: self.asked.clone(),
            bad_headers: self.bad_headers.clone(),
            trace: self.trace,
            copied: self.copied.clone(),
            scrubbed: Report::default(),
            faults_over: self.faults_over,
            cache_failed: self.cache_failed,
            cache_fails_next: self.cache_fails_next,
            done: self.done,
            bound: self.bound.clone(),
            reservations: Reservations::default(),
            insists: self.insists,
            evicts: self.evicts,
            powered: self.powered,
            moment: self.moment,
            version: self.version,
            events: self.events.clone(),
            flights: self.flights.clone(),
            order: self.order,
            next_tag: self.next_tag,
            resizing: self.resizing,
            found_lost: None,
            marked: None,
            cut_at_marks: false,
            healing: None,
            overwritten_checkpoint: self.overwritten_checkpoint,
        }
    }

    /// A hash of everything a new process would find, and of what the guest may expect.
    pub fn digest(&self) -> u64 {
        let volumes = self.volumes.iter().map(|volume| (&volume.device, volume.model.digest()));
        volumes.fold(mix(self.cache.digest()), |hash, (device, model)| {
            mix(hash ^ device.digest()).wrapping_add(model)
        })
    }

    /// The volumes that the cache knows.
    pub fn attached(&self) -> Vec<usize> {
        (0..self.volumes.len()).filter(|index| self.volumes[*index].attached).collect()
    }

    /// Moments so far.
    pub fn moments(&self) -> u64 {
        self.moment
    }

    /// A moment after every other.
    pub fn moment(&mut self) -> u64 {
        self.moment += 1;
        self.moment
    }

    /// Says what happens, if the run is to be told.
    pub fn tell(&self, what: impl FnOnce() -> String) {
        if self.setup.tell {
            println!("{:>12} {}", self.now, what());
        }
    }

    pub(crate) fn note(&mut self, what: u64) {
        self.trace = mix(self.trace ^ what.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(what);
    }

    /// Tells the checkers what was placed.
    pub(crate) fn take_placed(&mut self) {
        for (entry, content) in std::mem::take(&mut self.memory.placed) {
            let volume = usize::from(entry.volume.0);
            let end = entry.lba.0 + u64::from(entry.count);
            let cells: Vec<usize> =
                self.cells(volume, entry.lba.0, end).iter().map(|cell| cell.0).collect();
            let (sequence, kind) = (entry.sequence, entry.kind);
            if kind == Kind::Parked {
                self.tell(|| format!("parked {entry:?}"));
                self.marks.hit("block parked");
            }
            self.count_overwritten(volume, kind, &cells);
            let floor = self.volumes[volume].floor;
            if let Some(prefix) = &mut self.volumes[volume].prefix {
                prefix.placed(Change { sequence, kind, cells, content, floor });
            }
        }
    }

    /// Of data that guests wrote, how much was superseded before write-back came to it.
    fn count_overwritten(&mut self, volume: usize, kind: Kind, cells: &[usize]) {
        if !matches!(kind, Kind::Data | Kind::Zero | Kind::Discard) {
            return;
        }
        for cell in cells {
            let dirty =
                std::mem::replace(&mut self.volumes[volume].dirty[*cell], kind == Kind::Data);
            if dirty {
                self.marks.hit("dirty block overwritten");
            }
            if kind == Kind::Data {
                self.marks.hit("dirty block");
            }
        }
    }

    /// Where a watermark has become durable, the backing device is compared with the log up to it.
    fn check_watermarks(&mut self) -> Outcome {
        for index in 0..self.volumes.len() {
            let engine = self.engine.as_ref().expect("there is a process");
            let watermark = engine.durable_watermark(VolumeIndex(index as u8));
            let state = &mut self.volumes[index];
            let (Some(prefix), Some(watermark)) = (&mut state.prefix, watermark) else { continue };
            if !prefix.advance(watermark) {
                continue;
            }
            let state = &self.volumes[index];
            let (strict, since) = (state.order == Order::Strict, state.order_since);
            self.marks.hit("watermark checked");
            if since > watermark {
                self.marks.hit("watermark checked before what another order placed");
            }
            let prefix = state.prefix.as_ref().expect("looked");
            for cell in 0..state.cells() {
                let lba = state.lba(cell);
                let mask = state.mask(lba);
                // One that a crash broke off may have gone further.
                let compare = |content: &Block| match strict {
                    true => prefix.compare_strict(cell, content, mask, since),
                    false if since > watermark => {
                        prefix.compare_changed(cell, content, mask, since)
                    }
                    false => prefix.compare(cell, content, mask),
                };
                compare(&state.device.read(lba)).map_err(Failure)?;
                if !prefix.is_unflushed(cell) {
                    compare(&state.device.durable(lba)).map_err(Failure)?;
                }
            }
        }
        Ok(())
    }

    /// Takes what the engine wants done.
    pub fn drain_effects(&mut self) -> Outcome {
        self.take_placed();
        if self.memory.dead {
            return Ok(());
        }
        self.check_watermarks()?;
        self.check_lost_cache()?;
        let engine = self.engine.as_ref().expect("there is a process");
        self.memory.lives.check(|volume| engine.durable_watermark(volume)).map_err(Failure)?;
        self.bound.check(engine, &self.memory).map_err(Failure)?;
        let volumes = self.volumes.len();
        self.reservations.check(engine, volumes, &mut self.marks).map_err(Failure)?;
        self.watch();
        self.watch_scrub();
        while let Some(effect) = self.engine.as_mut().expect("there is a process").next_effect() {
            if let Effect::Answer { tag, result } = effect {
                self.answered(tag, result)?;
                continue;
            }
            if let Effect::WriteCache { buffer, block, segment, .. } = effect
                && self.begins_record(segment, block)
            {
                let bytes = self.memory.get(Place::Buffer { buffer, block });
                let header = Header::fields(bytes.bytes());
                let volume = &mut self.volumes[usize::from(header.volume)];
                sequences_have_no_gap::check(&mut volume.closed, &header).map_err(Failure)?;
            }
            self.issue(effect);
        }
        Ok(())
    }

    /// Whether a block that the engine writes is a record's header, and not within a record that is written
    /// in parts.
    fn begins_record(&self, segment: SegmentId, block: u16) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.is_heading(segment, block))
    }

    /// A write around the log is issued, or done with these bytes.
    fn goes_around(&mut self, index: usize, tag: u32, done: Option<&[Piece]>) {
        let asked = &self.asked[&u64::from(tag)];
        let cells = self.cells(index, asked.first, asked.end);
        let Some(prefix) = &mut self.volumes[index].prefix else { return };
        for (cell, lba) in cells {
            let piece = done.map(|pieces| pieces.iter().find(|piece| piece.0 == lba));
            prefix.around(cell, piece.flatten().map(|piece| (piece.1, &piece.2)));
        }
    }

    /// Marks where write-back of each volume has come to, and what became of the cache device.
    fn watch(&mut self) {
        let engine = self.engine.as_ref().expect("there is a process");
        for index in 0..self.volumes.len() {
            let Some(status) = engine.status(VolumeIndex(index as u8)) else { continue };
            let seen = (status.writeback, status.drained, status.frozen);
            let before = self.volumes[index].seen.replace(seen);
            if before == Some(seen) {
                continue;
            }
            // A7: a batch of this order begins behind a flush of what went around the log.
            let begins = status.writeback == Stage::Writing
                && !matches!(before, Some((Stage::Writing | Stage::Flushing, ..)));
            if let Some(prefix) = &mut self.volumes[index].prefix
                && begins
                && status.order == Order::Batch
                && !status.flush_failed
            {
                prefix.around_flushed();
            }
            self.marks.hit(match status.writeback {
                Stage::Idle => "write-back idle",
                Stage::Writing => "write-back writing",
                Stage::Flushing => "write-back flushing",
                Stage::Noting => "write-back noting",
                Stage::Waiting { .. } => "write-back waiting",
            });
            if status.drained {
                self.marks.hit("volume drained");
            }
            if status.frozen {
                self.marks.hit("volume frozen");
            }
        }
    }

    fn issue(&mut self, effect: Effect) {
        self.tell(|| format!("issue {effect:?}"));
        self.note_issued(&effect);
        if let Effect::WriteBacking { volume, lba, blocks, .. } = effect {
            let volume = usize::from(volume.0);
            for (cell, _) in self.cells(volume, lba.0, lba.0 + u64::from(blocks)) {
                self.volumes[volume].dirty[cell] = false;
            }
        }
        if let Effect::WriteAround { volume, tag, .. } = effect {
            self.goes_around(usize::from(volume.0), tag, None);
        }
        let micro = 1_000;
        let (token, latency) = match effect {
            Effect::WriteCache { token, .. } | Effect::WriteArea { token, .. } => {
                (token, self.random.between(20, 400) * micro)
            }
            Effect::WriteSuperblock { token, .. } => (token, self.random.between(200, 900) * micro),
            Effect::ReadCache { token, .. } => (token, self.random.between(30, 300) * micro),
            Effect::FlushCache { token } => (token, self.random.between(50, 1_000) * micro),
            Effect::ReadBacking { token, .. }
            | Effect::WriteBacking { token, .. }
            | Effect::WriteAround { token, .. } => (token, self.random.between(100, 5_000) * micro),
            Effect::ZeroBacking { token, .. } | Effect::DiscardBacking { token, .. } => {
                (token, self.random.between(100, 3_000) * micro)
            }
            Effect::FlushBacking { token, .. } => (token, self.random.between(500, 8_000) * micro),
            Effect::MarkStale { token, .. } => (token, self.random.between(500, 30_000) * micro),
            Effect::Answer { .. } => unreachable!("answers are told at once"),
        };
        let latency =
            if self.setup.steady { 100 * micro } else { latency * self.slowness(&effect) };
        let mut flight = Flight { token, effect, pieces: None, through: 0 };
        match effect {
            Effect::FlushCache { .. } | Effect::WriteSuperblock { .. } => {
                flight.through = self.cache.flush_begin();
            }
            Effect::FlushBacking { volume, .. } => {
                flight.through = self.volumes[usize::from(volume.0)].device.flush_begin();
            }
            Effect::ReadBacking { volume, lba, blocks, .. } => {
                // What a device reads it may have read long before it says so.
                let early = !self.setup.steady && self.random.one_in(2);
                let index = usize::from(volume.0);
                flight.pieces = early.then(|| self.read_backing(index, lba, blocks));
            }
            _ if !self.setup.late_copy => flight.pieces = self.pieces(&effect),
            _ => {}
        }
        self.order += 1;
        self.events.push(Reverse((self.now + latency, self.order)));
        self.flights.insert(self.order, flight);
    }

    /// A device may be slow, or one answer late, behind many that were asked for later.
    fn slowness(&mut self, effect: &Effect) -> u64 {
        let backing = match *effect {
            Effect::ReadBacking { volume, .. }
            | Effect::WriteBacking { volume, .. }
            | Effect::WriteAround { volume, .. }
            | Effect::ZeroBacking { volume, .. }
            | Effect::DiscardBacking { volume, .. }
            | Effect::FlushBacking { volume, .. } => Some(volume),
            _ => None,
        };
        let (device, name) = match backing {
            Some(volume) => (&self.volumes[usize::from(volume.0)].device, "slow backing device"),
            None => (&self.cache, "slow cache device"),
        };
        let slow = device.slow;
        if slow > 1 {
            self.marks.hit(name);
        }
        if !self.random.one_in(self.setup.late) {
            return slow;
        }
        self.marks.hit("late answer");
        slow * 100
    }

    /// The bytes of a write, as they are now.
    pub(crate) fn pieces(&mut self, effect: &Effect) -> Option<Vec<Piece>> {
        match *effect {
            Effect::WriteCache { buffer, segment, block, blocks, .. } => {
                let address = self.superblock.address(segment, block) / BLOCK_BYTES;
                let from = Place::Buffer { buffer, block };
                Some(
                    (0..blocks)
                        .map(|at| {
                            (address + u64::from(at), u8::MAX, self.memory.get(behind(from, at)))
                        })
                        .collect(),
                )
            }
            Effect::WriteArea { address, blocks, from, .. } => {
                let first = address / BLOCK_BYTES;
                let mut content = |at| self.memory.get(behind(from, at));
                Some((0..blocks).map(|at| (first + u64::from(at), u8::MAX, content(at))).collect())
            }
            Effect::WriteBacking { volume, lba, blocks, from, .. } => {
                let index = usize::from(volume.0);
                Some(
                    (0..blocks)
                        .map(|at| {
                            let lba = lba.0 + u64::from(at);
                            let mask = self.volumes[index].mask(lba);
                            (lba, mask, self.memory.get(behind(from, at)))
                        })
                        .collect(),
                )
            }
            Effect::WriteAround { tag, .. } if !self.zeroes(tag) => {
                let first = self.asked[&u64::from(tag)].request.offset / BLOCK_BYTES;
                let memory = self.memory.request(tag);
                Some(
                    (0..memory.count)
                        .map(|at| {
                            (first + at, memory.mask(at), Rc::clone(&memory.blocks[at as usize]))
                        })
                        .collect(),
                )
            }
            _ => None,
        }
    }

    /// When the next thing happens, if anything.
    pub fn next_event(&self) -> Option<u64> {
        let event = self.events.peek().map(|Reverse((at, _))| *at);
        let engine = self.engine.as_ref().expect("there is a process");
        let deadline = engine.deadline().map(|at| at.0.max(self.now + 1));
        [event, deadline].into_iter().flatten().min()
    }

    /// Tells the engine the time, and does what it wants done.
    pub fn put_in_order(&mut self) -> Outcome {
        let engine = self.engine.as_mut().expect("there is a process");
        engine.tick(Tick(self.now), self.now / 1_000_000, &mut self.memory);
        self.drain_effects()
    }

    /// Whether a device is at work.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Lets the next thing happen; says whether there was one.
    pub fn step(&mut self) -> Result<bool, Failure> {
        let grows = self.go_on_growing()?;
        let alone = self.next_event().is_none();
        let resizes = self.go_on_resizing(alone)?;
        let Some(at) = self.next_event() else { return Ok(grows || resizes) };
        self.now = self.now.max(at);
        self.done = None;
        if self.setup.turn > 0 {
            self.turn()?;
            return Ok(true);
        }
        let due = self.is_due();
        self.put_in_order()?;
        if due && !self.memory.dead {
            self.next_completes(true);
            self.drain_effects()?;
        }
        Ok(true)
    }

    /// As the runtime does: it has waited, or was busy with something else, and then takes all that
    /// was done meanwhile before it puts the engine in order once.
    fn turn(&mut self) -> Outcome {
        self.now += self.random.below(self.setup.turn);
        let engine = self.engine.as_mut().expect("there is a process");
        engine.clock(Tick(self.now), self.now / 1_000_000);
        let mut count = 0;
        while self.is_due() && !self.memory.dead {
            self.next_completes(false);
            count += 1;
        }
        if count > 1 {
            self.marks.hit("several completions in a turn");
        }
        self.put_in_order()
    }

    fn is_due(&self) -> bool {
        self.events.peek().is_some_and(|Reverse((when, _))| *when <= self.now)
    }

    /// The next effect is done, and the engine is told; it puts itself in order if `settle`.
    fn next_completes(&mut self, settle: bool) {
        let (effect, token, result) = self.next_happens();
        let engine = self.engine.as_mut().expect("there is a process");
        let raced = |engine: &Engine, volume: VolumeIndex| {
            let raced = Refusal::Raced as usize;
            engine.status(volume).map_or(0, |status| status.stats.fills_refused[raced])
        };
        let before = match effect {
            Effect::ReadBacking { volume, .. } => raced(engine, volume),
            _ => 0,
        };
        match settle {
            true => engine.complete(token, result, &mut self.memory),
            false => engine.completed(token, result, &mut self.memory),
        }
        let Effect::ReadBacking { volume, lba, blocks, .. } = effect else { return };
        if raced(engine, volume) > before {
            let gone = (0..blocks).all(|at| !engine.is_in_log(volume, lba + u64::from(at)));
            self.marks.hit(match gone {
                true => "raced with what is not in the log any more",
                false => "raced with what is in the log",
            });
        }
    }

    /// The next effect is done.
    fn next_happens(&mut self) -> (Effect, Token, Result<(), Fault>) {
        let Reverse((_, order)) = self.events.pop().expect("looked");
        let flight = self.flights.remove(&order).expect("an event has its flight");
        self.note(order);
        let result = self.happen(&flight);
        self.done = Done::of(&flight.effect).or(self.done);
        self.note_done(&flight.effect);
        self.tell(|| format!("done {:?} {result:?}", flight.token));
        (flight.effect, flight.token, result)
    }

    /// Whether a backing device fails to do this.
    fn backing_fails(&mut self, volume: VolumeIndex, name: &'static str) -> bool {
        let failed = self.volumes[usize::from(volume.0)].device.failed;
        if !failed && (self.faults_over || !self.random.one_in(self.setup.backing_fault)) {
            return false;
        }
        self.marks.hit(name);
        let now = self.moment();
        self.volumes[usize::from(volume.0)].failed_at = now;
        true
    }

    /// Whether a backing device fails to change these blocks, all of them or one.
    fn write_fails(&mut self, volume: VolumeIndex, range: (u64, u64)) -> bool {
        let index = usize::from(volume.0);
        let refused = !self.faults_over && self.volumes[index].device.refuses(range.0, range.1);
        if refused {
            self.marks.hit("block refused");
            self.volumes[index].failed_at = self.moment();
        }
        let fails = refused || self.backing_fails(volume, "backing write failed");
        if fails {
            for (cell, _) in self.cells(index, range.0, range.1) {
                if let Some(prefix) = &mut self.volumes[index].prefix {
                    prefix.refused(cell);
                }
            }
        }
        fails
    }

    /// Whether the cache device fails to do this: from then on the engine appends nothing.
    fn cache_fails(&mut self, name: &'static str) -> bool {
        let clean = std::mem::take(&mut self.cache_fails_next);
        let fails = !self.faults_over && (clean || self.random.one_in(self.setup.cache_fault));
        if fails {
            if clean {
                self.marks.hit("clean cache failed");
            }
            self.marks.hit(name);
            self.cache_failed = true;
            // What the log holds nothing of may go around it now.
            self.volumes.iter_mut().for_each(Volume::bypasses);
        }
        fails
    }

    /// A device does what it was asked to.
    pub(crate) fn happen(&mut self, flight: &Flight) -> Result<(), Fault> {
        let effect = flight.effect;
        if self.random.one_in(self.setup.rot) && !self.faults_over {
            self.rot();
        }
        match effect {
            Effect::WriteSuperblock { change, .. } => {
                self.change_superblock(change, 4, flight.through);
            }
            Effect::WriteCache { .. } | Effect::WriteArea { .. } => {
                let pieces = flight.pieces.clone().or_else(|| self.pieces(&effect));
                let mut pieces = pieces.expect("a write has bytes");
                let fails = self.cache_fails("cache write failed");
                if fails {
                    pieces.truncate(self.random.below(pieces.len() as u64 + 1) as usize);
                }
                self.cache.write(pieces);
                if fails {
                    return Err(Fault);
                }
            }
            Effect::ReadCache { segment, block, blocks, to, .. } => {
                for at in 0..blocks {
                    let address = self.cache_block(segment, block + at);
                    if self.cache.is_unreadable(address) {
                        return Err(Fault);
                    }
                    let content = self.cache.read(address);
                    self.memory.set(behind(to, at), content);
                }
            }
            Effect::FlushCache { .. } => {
                if self.cache_fails("cache flush failed") {
                    return Err(Fault);
                }
                self.cache.flush_end(flight.through);
            }
            Effect::ReadBacking { volume, lba, blocks, to, .. } => {
                if self.backing_fails(volume, "backing read failed") {
                    return Err(Fault);
                }
                let early = flight.pieces.clone();
                let read =
                    early.unwrap_or_else(|| self.read_backing(usize::from(volume.0), lba, blocks));
                for (at, (_, _, content)) in (0..).zip(read) {
                    self.memory.set(behind(to, at), content);
                }
            }
            Effect::WriteAround { volume, tag, .. } if self.zeroes(tag) => {
                let Asked { first, end, .. } = self.asked[&u64::from(tag)];
                if self.write_fails(volume, (first, end)) {
                    return Err(Fault);
                }
                self.zero_around(usize::from(volume.0), tag);
            }
            Effect::WriteBacking { volume, .. } | Effect::WriteAround { volume, .. } => {
                let pieces = flight.pieces.clone().or_else(|| self.pieces(&effect));
                let mut pieces = pieces.expect("a write has bytes");
                let range = (pieces[0].0, pieces[0].0 + pieces.len() as u64);
                let fails = self.write_fails(volume, range);
                if fails {
                    // Some of it may be there all the same.
                    pieces.truncate(self.random.below(pieces.len() as u64 + 1) as usize);
                    let device = &self.volumes[usize::from(volume.0)].device;
                    pieces.retain(|piece| !device.refuses(piece.0, piece.0 + 1));
                }
                self.volumes[usize::from(volume.0)].device.write(pieces.clone());
                if fails {
                    return Err(Fault);
                }
                if let Effect::WriteAround { tag, .. } = effect {
                    self.goes_around(usize::from(volume.0), tag, Some(&pieces));
                    let state = &mut self.volumes[usize::from(volume.0)];
                    state.around_writes.push(state.device.flush_begin());
                }
            }
            Effect::ZeroBacking { volume, lba, blocks, .. }
            | Effect::DiscardBacking { volume, lba, blocks, .. }
                if self.write_fails(volume, (lba.0, lba.0 + blocks)) =>
            {
                return Err(Fault);
            }
            Effect::ZeroBacking { volume, lba, blocks, .. } => {
                self.marks.hit("backing zeroed");
                self.zero_backing(usize::from(volume.0), lba, blocks);
            }
            Effect::DiscardBacking { volume, lba, blocks, .. } => {
                self.marks.hit("backing discarded");
                let volume = &mut self.volumes[usize::from(volume.0)];
                let end = (lba.0 + blocks).min(volume.blocks());
                let mask = volume.mask(end - 1);
                volume.device.discard(lba.0, end, mask, &mut self.random);
            }
            Effect::FlushBacking { volume, .. } => {
                let fails = self.backing_fails(volume, "backing flush failed");
                if fails {
                    self.backing_flush_failed(usize::from(volume.0), flight.through);
                    return Err(Fault);
                }
                self.volumes[usize::from(volume.0)].flushed(flight.through);
            }
            Effect::MarkStale { volume, .. } => return self.mark_stale(usize::from(volume.0)),
            Effect::Answer { .. } => unreachable!("answers are told at once"),
        }
        Ok(())
    }

    /// A flush of a backing device failed, that should have covered its writes up to this number.
    pub(crate) fn backing_flush_failed(&mut self, index: usize, through: u64) {
        let now = self.moment();
        let state = &mut self.volumes[index];
        state.flush_failed |= state.around_used;
        if let Some(prefix) = &mut state.prefix {
            prefix.around_unsure();
        }
        let fate = state.device.flush_failed(through, &mut self.random);
        if fate == Unflushed::Kept {
            return;
        }
        state.forgotten = true;
        let before = state.around_writes.len();
        state.around_writes.retain(|number| *number > through);
        if state.around_writes.len() < before {
            self.marks.hit("writes around the log dropped");
            state.untold = Some(now);
        }
        if fate == Unflushed::Gone {
            self.marks.hit("unflushed writes dropped");
            state.unflushed_dropped();
        }
    }

    /// Writes both copies of the superblock, each flushed.
    pub fn write_superblock(&mut self) {
        self.superblock.sequence += 1;
        let through = self.cache.flush_begin();
        self.write_superblock_in_part(4, through);
    }

    /// Writes the superblock with something new in it: one copy, a flush, the other, a flush; only
    /// the first `steps` of these. The flushes make durable what they must, no more: what was complete
    /// (`through`) when all that began.
    pub(crate) fn change_superblock(&mut self, change: SuperblockChange, steps: u64, through: u64) {
        change.apply(&mut self.superblock);
        self.write_superblock_in_part(steps, through);
        if steps == 4 {
            self.marks.hit(match change {
                SuperblockChange::Checkpoint { .. } => "checkpoint named",
                SuperblockChange::Marks { .. } => "marks in the superblock",
                SuperblockChange::FlushFailed { .. } => "failed flush in the superblock",
            });
        }
    }

    pub(crate) fn write_superblock_in_part(&mut self, steps: u64, through: u64) {
        let copies = Superblock::addresses(self.superblock.size_bytes);
        for (copy, address) in copies.into_iter().enumerate() {
            if steps > 2 * copy as u64 {
                let bytes = self.superblock.encode(address);
                let pieces = crate::opening::pieces(address, &bytes);
                if steps > 2 * copy as u64 + 1 {
                    self.cache.flush_end(through);
                    self.cache.write_durably(pieces);
                } else {
                    self.cache.write(pieces);
                }
            }
        }
    }

    pub(crate) fn zero_backing(&mut self, index: usize, lba: Lba, blocks: u64) {
        let volume = &mut self.volumes[index];
        let end = (lba.0 + blocks).min(volume.blocks());
        let mask = volume.mask(end - 1);
        volume.device.zero(lba.0, end, mask);
    }

    /// Whether what goes around the log is a write-zeroes: it goes past a failed cache.
    pub(crate) fn zeroes(&self, tag: u32) -> bool {
        matches!(self.asked[&u64::from(tag)].request.op, Op::WriteZeroes { .. })
    }

    /// It is done, sector by sector at its ends.
    pub(crate) fn zero_around(&mut self, index: usize, tag: u32) {
        let Asked { first, end, .. } = self.asked[&u64::from(tag)];
        let memory = self.memory.request(tag);
        let ends = [
            (first, memory.mask(0), Block::zero()),
            (end - 1, memory.mask(end - 1 - first), Block::zero()),
        ];
        self.marks.hit("zeroed past a failed cache");
        let device = &mut self.volumes[index].device;
        device.write(ends.to_vec());
        if first + 1 < end - 1 {
            device.zero(first + 1, end - 1, u8::MAX);
        }
    }

    fn read_backing(&self, index: usize, lba: Lba, blocks: u16) -> Vec<Piece> {
        let volume = &self.volumes[index];
        let read = |lba: u64| {
            if lba >= volume.blocks() {
                return Block::zero();
            }
            Block::merge(&Block::zero(), &volume.device.read(lba), volume.mask(lba))
        };
        (0..u64::from(blocks)).map(|at| (lba.0 + at, u8::MAX, read(lba.0 + at))).collect()
    }

    /// Where a block of a segment lies, in blocks of the cache device.
    pub fn cache_block(&self, segment: SegmentId, block: u16) -> u64 {
        self.superblock.address(segment, block) / BLOCK_BYTES
    }
}

const _: () = assert!(SECTORS == 8);
