// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every short history, every point at which the machine can stop in it, everything it can leave.
//!
//! A history is a sequence of *steps*: a write, a FUA write, a write-zeroes or a discard of one of
//! three blocks or of a pair, a read of that pair (which copies into the log what is not there), a flush, a batch of write-back, a checkpoint. One guest takes them one after
//! another on a small cache. The machine stops after each thing that happens in the last step
//! (what happens in the steps before it is the last step of a shorter history): the process alone,
//! between its calls or at each of its stores, or the power. Of the device writes that were not
//! flushed or were under way any set may survive (their first block, which is a record's header,
//! and the others each for themselves): all sets are tried if there are at most 256, else 256 by
//! chance.
//!
//! After each stop the cache is opened, which also recovers it twice and compares, and every block
//! is read and compared with the model; then the power fails once more, and what was read must
//! still be there. What has been seen before, by its hash, is not looked at again.
//!
//! # Not here
//!
//! Torn blocks, several requests at once, full caches, faults: what the seeds are for.

use crate::device::Discard;
use crate::fate::{Choices, Fate};
use crate::model::Stop;
use crate::random::{Random, mix};
use crate::run::{drain, read_all};
use crate::setup::{Island, SEGMENTS, Setup, VolumeSetup, format};
use crate::world::{Failure, Outcome, World};
use forebay_core::engine::{Acknowledge, Config};
use forebay_core::format::superblock::{Mode, Order};
use forebay_core::mutant::Mutants;
use forebay_core::policy::reserve::Reserve;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::collections::HashSet;

/// Ways to lose writes that are tried at one point, at most.
const ALTERNATIVES_MAX: u64 = 1 << 8;
/// Nothing but a batch of write-back comes before this much time, in nanoseconds.
const NEVER: u64 = 1 << 60;
/// Dirty data waits so long for write-back, in nanoseconds.
const AGE: u64 = 1 << 40;

/// One step of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A request: what, its first block, its blocks.
    Ask(Op, u64, u64),
    /// Dirty data has waited long enough.
    WriteBack,
    /// The map is written.
    Checkpoint,
}

/// Every step there is.
pub fn steps() -> Vec<Step> {
    let ops = [
        Op::Write { fua: false },
        Op::Write { fua: true },
        Op::WriteZeroes { fua: false },
        Op::Discard,
    ];
    let places = [(0, 1), (1, 1), (2, 1), (0, 2)];
    let mut steps: Vec<Step> = ops
        .into_iter()
        .flat_map(|op| places.map(|(first, blocks)| Step::Ask(op, first, blocks)))
        .collect();
    let read = Step::Ask(Op::Read, 0, 2);
    steps.extend([read, Step::Ask(Op::Flush, 0, 0), Step::WriteBack, Step::Checkpoint]);
    steps
}

/// How far to go.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// Steps of the longest histories.
    pub length: usize,
    /// Of the longest histories only one in so many, by chance.
    pub one_in: u64,
    /// Steps of the longest histories in which the process dies at each of its stores.
    pub stores_length: usize,
    /// How the volume takes writes.
    pub mode: Mode,
    /// A deliberate fault.
    pub mutants: Mutants,
}

/// What was gone through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Histories.
    pub histories: u64,
    /// Points at which the machine stopped.
    pub points: u64,
    /// What it left at these.
    pub left: u64,
    /// Of that, what was different from all before: each was opened, read and compared.
    pub states: u64,
}

/// Goes through all histories of a scope.
pub fn explore(scope: Scope) -> Result<Count, Failure> {
    let mut explorer =
        Explorer { scope, steps: steps(), seen: HashSet::new(), count: Count::default() };
    for length in 1..=scope.length {
        let mut history = vec![0; length];
        loop {
            let number = history.iter().fold(0, |number, step| number * 31 + *step as u64);
            if length < scope.length || mix(number).is_multiple_of(scope.one_in.max(1)) {
                explorer.history(&history)?;
            }
            // The next history of this length.
            let Some(at) = history.iter().rposition(|step| step + 1 < explorer.steps.len()) else {
                break;
            };
            history[at] += 1;
            history[at + 1..].fill(0);
        }
    }
    Ok(explorer.count)
}

struct Explorer {
    scope: Scope,
    steps: Vec<Step>,
    seen: HashSet<u64>,
    count: Count,
}

impl Explorer {
    fn history(&mut self, history: &[usize]) -> Outcome {
        let steps: Vec<Step> = history.iter().map(|step| self.steps[*step]).collect();
        let (last, before) = steps.split_last().expect("a history has a step");
        self.count.histories += 1;
        let outcome = self.whole(before, *last);
        outcome.map_err(|failure| Failure(format!("{steps:?}: {}", failure.0)))
    }

    fn whole(&mut self, before: &[Step], last: Step) -> Outcome {
        let mut world = self.prepare(before)?;
        let stores = world.memory.stores;
        begin(&mut world, last)?;
        self.stopped_here(&world)?;
        while world.has_events() {
            world.step()?;
            self.stopped_here(&world)?;
        }
        if !world.asked.is_empty() {
            return Err(Failure(format!("not answered: {:?}", world.asked)));
        }
        let stores = world.memory.stores - stores;
        if before.len() >= self.scope.stores_length {
            return Ok(());
        }
        for store in 0..stores {
            let mut world = self.prepare(before)?;
            world.memory.fuse = Some(store);
            begin(&mut world, last)?;
            while !world.memory.dead && world.has_events() {
                world.step()?;
            }
            assert!(world.memory.dead, "the same history has the same stores");
            self.stopped_by(&world, Stop::Process)?;
        }
        Ok(())
    }

    /// A machine that has taken these steps.
    fn prepare(&self, steps: &[Step]) -> Result<World, Failure> {
        let mut world = World::new(setup(self.scope), Random::new(1));
        world.format();
        world.open(None)?;
        finish(&mut world)?;
        for step in steps {
            begin(&mut world, *step)?;
            finish(&mut world)?;
        }
        Ok(world)
    }

    fn stopped_here(&mut self, world: &World) -> Outcome {
        self.stopped_by(world, Stop::Process)?;
        self.stopped_by(world, Stop::Power)
    }

    /// The machine stops now: everything that it can leave is looked at.
    fn stopped_by(&mut self, world: &World, stop: Stop) -> Outcome {
        self.count.points += 1;
        let mut choices = Choices::default();
        let mut left = ALTERNATIVES_MAX;
        loop {
            let mut world = world.fork();
            world.stop_by(stop, &mut Fate::Chosen(&mut choices));
            self.left(world, stop)?;
            if left == ALTERNATIVES_MAX && choices.alternatives() > ALTERNATIVES_MAX {
                choices = Choices::sample(Random::new(self.count.points));
            }
            left -= 1;
            if left == 0 || !choices.advance() {
                return Ok(());
            }
        }
    }

    fn left(&mut self, mut world: World, stop: Stop) -> Outcome {
        self.count.left += 1;
        let memory = if stop == Stop::Process { world.memory.digest() } else { 1 };
        if !self.seen.insert(mix(world.digest() ^ memory)) {
            return Ok(());
        }
        self.count.states += 1;
        let outcome = look(&mut world, stop);
        outcome.map_err(|failure| Failure(format!("stopped by {stop:?}: {}", failure.0)))
    }
}

/// Opens what a stop left and compares; then once more, after a power cut.
fn look(world: &mut World, stop: Stop) -> Outcome {
    world.open(Some(stop))?;
    read_all(world)?;
    let mut nothing = Choices::default();
    world.stop_by(Stop::Power, &mut Fate::Chosen(&mut nothing));
    world.open(Some(Stop::Power))?;
    read_all(world)?;
    drain(world)
}

fn begin(world: &mut World, step: Step) -> Outcome {
    match step {
        Step::Ask(op, first, blocks) => {
            let taken = world.ask(0, op, first * BLOCK_BYTES, blocks * BLOCK_BYTES)?;
            assert!(taken, "there is room for one request");
        }
        Step::WriteBack => {
            let engine = world.engine.as_ref().expect("there is a process");
            if engine.status(VolumeIndex(0)).is_some_and(|status| status.dirty) {
                world.step()?;
            }
        }
        Step::Checkpoint => {
            world.engine.as_mut().expect("there is a process").want_checkpoint();
            world.put_in_order()?;
        }
    }
    Ok(())
}

fn finish(world: &mut World) -> Outcome {
    while world.has_events() {
        world.step()?;
    }
    Ok(())
}

/// A cache of 16 segments in front of three blocks. Nothing happens that no step asks for.
pub fn setup(scope: Scope) -> Setup {
    let volume = VolumeSetup {
        order: Order::Batch,
        cutoff: 0,
        weight: 1,
        p99_target: 0,
        reserve: Reserve::Share,
        size_bytes: 3 * BLOCK_BYTES,
        islands: vec![Island { start: 0, blocks: 3 }],
        mode: scope.mode,
        discard: Discard::Mixed,
        slow: 1,
    };
    let superblock = format(16, 64 << 10, std::slice::from_ref(&volume), 5);
    let config = Config {
        buffer_count: 4,
        acknowledge: Acknowledge::Placed,
        close_after: NEVER,
        durable_after: NEVER,
        durable_bytes: NEVER,
        window_blocks: 16,
        lane_count: 4,
        batch_blocks_max: 16,
        batch_blocks_most: 16,
        backing_in_flight: 4,
        dirty_age: AGE,
        checkpoint_frames: 32,
        dirty_percent: 100,
        extent_count_max: 24,
        fill_run_max: 4,
        ahead_blocks: 0,
        retry_after: AGE,
        lost_after: 0,
        free_segments_kept: 0,
        scrub_rate: NEVER,
        mutants: scope.mutants,
    };
    Setup {
        config,
        superblock,
        segments: SEGMENTS,
        volumes: vec![volume],
        operations: 0,
        depth: 1,
        stops: Vec::new(),
        late_copy: true,
        unaligned: 0,
        flush: 0,
        range: 0,
        zeros: 0,
        hot: 0,
        overwritten: 0,
        reread: 0,
        chased: 0,
        size: 1,
        pause: 0,
        rot: 0,
        backing_fault: 0,
        cache_fault: 0,
        flush_fault: 0,
        gone: 0,
        write_through: false,
        mute: 0,
        apart: 0,
        operator: 0,
        scrub: 0,
        late_volume: false,
        one_disk: false,
        files: 0,
        dies: None,
        bad: None,
        slow_cache: 1,
        late: 0,
        turn: 0,
        spare: 0,
        steady: true,
        comes_again: false,
        batches_vary: false,
        watched: false,
        tell: false,
    }
}
