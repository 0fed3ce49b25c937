// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Turns: the next thing happens, the engine is told and puts itself in order, and what it wants done is taken.

use crate::checkers::{sequences_have_no_gap, time_alone};
use crate::flight::{Done, Flight};
use crate::world::{Failure, Outcome, World};
use forebay_core::effect::{Effect, Fault, Token};
use forebay_core::engine::{CacheHealth, Engine};
use forebay_core::format::record::Header;
use forebay_core::mutant::Mutant;
use forebay_core::payload::Place;
use forebay_core::stats::Refusal;
use forebay_core::units::{SegmentId, Tick, VolumeIndex};
use std::cmp::Reverse;

impl World {
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
        time_alone::check(self, at).map_err(Failure)?;
        self.now = self.now.max(at);
        self.done = None;
        self.turn_began = self.volumes.iter().map(|it| it.device.flush_begin()).collect();
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
        if result.is_err() && engine.health() == CacheHealth::Failed {
            self.note_ends();
        }
        let Effect::ReadBacking { volume, lba, blocks, .. } = effect else { return };
        let engine = self.engine.as_ref().expect("there is a process");
        if raced(engine, volume) > before {
            let gone = (0..blocks).all(|at| !engine.is_in_log(volume, lba + u64::from(at)));
            self.marks.hit(match gone {
                true => "raced with what is not in the log any more",
                false => "raced with what is in the log",
            });
        }
    }

    /// As the runtime does where the next process finds it.
    pub(crate) fn note_ends(&mut self) {
        let engine = self.engine.as_ref().expect("there is a process");
        self.memory.note_ends(engine.log_ends());
    }

    /// The next effect is done.
    fn next_happens(&mut self) -> (Effect, Token, Result<(), Fault>) {
        let Reverse((_, order)) = self.events.pop().expect("looked");
        let flight = self.flights.remove(&order).expect("an event has its flight");
        self.note(order);
        let result = self.happen(&flight);
        self.done = Done::of(&flight.effect).or(self.done);
        self.note_done(&flight.effect);
        self.flushed |= result.is_ok() && matches!(flight.effect, Effect::FlushCache { .. });
        if result.is_ok() {
            self.durable.done(&flight.effect);
        }
        self.tell(|| format!("done {:?} {result:?}", flight.token));
        (flight.effect, flight.token, result)
    }

    /// Takes what the engine wants done.
    pub fn drain_effects(&mut self) -> Outcome {
        self.take_placed()?;
        if self.memory.dead {
            return Ok(());
        }
        let once = self.setup.config.mutants.is(Mutant::EndNotedOnce);
        if !once && self.flights.values().any(Flight::flushes_cache) {
            self.note_ends();
        }
        self.check_watermarks()?;
        self.check_around()?;
        self.check_failures()?;
        self.check_lost_cache()?;
        let engine = self.engine.as_ref().expect("there is a process");
        self.memory.lives.check(|volume| engine.durable_watermark(volume)).map_err(Failure)?;
        self.bound.check(engine, &self.memory).map_err(Failure)?;
        let volumes = self.volumes.len();
        self.reservations.check(engine, volumes, &mut self.marks).map_err(Failure)?;
        self.watch();
        self.watch_scrub();
        if std::mem::take(&mut self.flushed) {
            self.suppose_now_and_then()?;
        }
        while let Some(effect) = self.engine.as_mut().expect("there is a process").next_effect() {
            if let Effect::Answer { tag, result } = effect {
                self.answered(tag, result)?;
                continue;
            }
            let engine = self.engine.as_ref().expect("there is a process");
            let lives = |volume: u16, attach_generation: u32| {
                engine.log_ends().any(|(index, end)| {
                    u16::from(index.0) == volume && end.attach_generation == attach_generation
                })
            };
            if let Effect::WriteCache { buffer, block, segment, .. } = effect
                && self.begins_record(segment, block)
            {
                let bytes = self.memory.get(Place::Buffer { buffer, block });
                let header = Header::fields(bytes.bytes());
                let volume = &mut self.volumes[usize::from(header.volume)];
                sequences_have_no_gap::check(&mut volume.closed, &header).map_err(Failure)?;
                self.durable.record((segment, block), &header, lives).map_err(Failure)?;
            }
            self.durable.issued(&effect, self.setup.watched, lives).map_err(Failure)?;
            self.watch_around(&effect)?;
            self.issue(effect);
        }
        Ok(())
    }

    /// Whether a block that the engine writes is a record's header, and not within a record that is written
    /// in parts.
    fn begins_record(&self, segment: SegmentId, block: u16) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.is_heading(segment, block))
    }
}
