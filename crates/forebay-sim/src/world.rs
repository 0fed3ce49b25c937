// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulated machine: engine, devices, memory, clock, and the guest's view of its disks.
//!
//! What the engine wants done is put on a heap of events, each with a random latency (`flight`). When its time has come
//! the device does it (`happen`) and the engine is told (`turn`); what the guest is told is compared with the model at once. Which
//! operations come, and when the machine stops, is decided in `run`.

use crate::again::Unanswered;
use crate::block::NumberMap;
use crate::checkers::around_keeps_order::Around;
use crate::checkers::lost_stays_lost::Lost;
use crate::checkers::memory_is_bounded::Bound;
use crate::checkers::reservations_are_kept::Reservations;
use crate::checkers::rests_on_what_is_durable::Durable;
use crate::device::{Device, Discard};
use crate::flight::{Done, Flight};
use crate::guest::Asked;
use crate::marks::Marks;
use crate::memory::Memory;
use crate::random::{Random, mix};
use crate::setup::Setup;
use crate::volume::Volume;
use forebay_core::engine::{Engine, window_frames};
use forebay_core::format::superblock::Superblock;
use forebay_core::policy::scrub::Report;
use forebay_core::units::{BLOCK_BYTES, Ordinal, SegmentId, Sequence, VolumeIndex};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

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
    /// Those that no process has answered, and none has now.
    pub unanswered: Vec<Unanswered>,
    /// The process ends: some of what it still answers nobody hears.
    pub(crate) is_ending: bool,
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
    /// It does nothing at all until the next opening.
    pub cache_gone: bool,
    /// Until then nothing can be read of it ...
    pub mute_until: u64,
    /// What it is asked for to see whether it is there can be read.
    pub mute_in_part: bool,
    /// ... and this was the last moment at which somebody tried.
    pub unread_at: u64,
    /// A flush of it failed, and what it should have covered is gone, or goes.
    pub cache_dropped: bool,
    /// The process that died last had a flush of it under way, or it had failed: nobody knows what it has dropped.
    pub cache_unsure: bool,
    /// How often the last opening wrote one block again.
    pub rewritten_most: u32,
    /// Of each volume, the last sequence that was on no backing device when the machine stopped.
    pub ended: Vec<Sequence>,
    /// Its next flush fails and drops all that it should have covered, of which that of segments shows: at once, or later.
    pub flush_fails_next: Option<bool>,
    /// Its next write or flush fails.
    pub cache_fails_next: bool,
    /// What a device did last.
    pub done: Option<Done>,
    /// Writes that each backing device had done when this turn began: what it did since is not answered yet.
    pub turn_began: Vec<u64>,
    /// What was lost of each volume when the machine stopped last.
    pub(crate) lost: Vec<Lost>,
    /// What goes around the log of each volume; empty: nobody watches.
    pub(crate) around: Vec<Around>,
    /// A copy of the superblock was written while the other was not durable.
    pub(crate) lone_copy: Option<String>,
    /// How much memory the process may take.
    pub bound: Bound,
    pub(crate) reservations: Reservations,
    /// What the cache device has durably, of what came since it was opened.
    pub(crate) durable: Durable,
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
    /// A volume that waits for its backing device while others are served.
    pub late: Option<usize>,
    /// Bytes that the cache is to have.
    pub(crate) resizing: Option<u64>,
    /// What moments are aimed at (`aim`): a volume of which the last opening found blocks lost; whose marks were written into the
    /// superblock just now, and whether the power failed then once; a block that is being healed.
    pub(crate) found_lost: Option<usize>,
    pub(crate) marked: Option<VolumeIndex>,
    pub(crate) cut_at_marks: bool,
    pub(crate) healing: Option<(usize, u64)>,
    /// The cache device has just been flushed.
    pub(crate) flushed: bool,
    /// What was read ahead last: volume, first block, the one behind.
    pub(crate) ahead: Option<(usize, u64, u64)>,
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
        let mut cache = Device::new(blocks, Discard::Stays);
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
            let attached = !(setup.late_volume && index + 1 == setup.volumes.len());
            volumes.push(Volume::new(index as u8, volume, attached, &mut random));
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
            unanswered: Vec::new(),
            is_ending: false,
            trace: 0,
            copied: NumberMap::default(),
            scrubbed: Report::default(),
            bad_headers: Vec::new(),
            faults_over: false,
            cache_failed: false,
            cache_gone: false,
            mute_until: 0,
            mute_in_part: true,
            unread_at: 0,
            cache_dropped: false,
            cache_unsure: false,
            rewritten_most: 0,
            flush_fails_next: None,
            ended: Vec::new(),
            cache_fails_next: false,
            done: None,
            turn_began: Vec::new(),
            lost: Vec::new(),
            around: Vec::new(),
            lone_copy: None,
            bound,
            reservations: Reservations::default(),
            durable: Durable::default(),
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
            late: None,
            found_lost: None,
            marked: None,
            cut_at_marks: false,
            healing: None,
            flushed: false,
            ahead: None,
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
            unanswered: self.unanswered.clone(),
            is_ending: self.is_ending,
            bad_headers: self.bad_headers.clone(),
            trace: self.trace,
            copied: self.copied.clone(),
            scrubbed: Report::default(),
            faults_over: self.faults_over,
            cache_failed: self.cache_failed,
            cache_gone: self.cache_gone,
            mute_until: self.mute_until,
            mute_in_part: self.mute_in_part,
            unread_at: self.unread_at,
            cache_dropped: self.cache_dropped,
            cache_unsure: self.cache_unsure,
            rewritten_most: self.rewritten_most,
            flush_fails_next: self.flush_fails_next,
            ended: self.ended.clone(),
            cache_fails_next: self.cache_fails_next,
            done: self.done,
            turn_began: self.turn_began.clone(),
            lost: self.lost.clone(),
            around: Vec::new(),
            lone_copy: None,
            bound: self.bound.clone(),
            reservations: Reservations::default(),
            durable: Durable::default(),
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
            late: self.late,
            found_lost: None,
            marked: None,
            cut_at_marks: false,
            healing: None,
            flushed: false,
            ahead: None,
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

    /// Those, and the one that waits for its backing device.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = usize> {
        self.attached().into_iter().chain(self.late)
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

    /// Where a block of a segment lies, in blocks of the cache device.
    pub fn cache_block(&self, segment: SegmentId, block: u16) -> u64 {
        self.superblock.address(segment, block) / BLOCK_BYTES
    }
}
