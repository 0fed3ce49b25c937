// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A process hands its cache over to the next one, or dies before that takes it.

use crate::checkers::checkpoint_is_derived;
use crate::model::Stop;
use crate::opening::pieces;
use crate::run::{WAIT_MAX, stuck};
use crate::world::{Failure, Outcome, World};
use forebay_core::format::superblock::Superblock;
use forebay_core::log::handover::{Tables, take_over};
use forebay_core::log::recovery::{Recovered, Writer, reopen};
use forebay_core::units::VolumeIndex;

/// Ends what is under way, as the runtime does. Requests that are inside end as well; what they are answered towards the end may
/// not be heard.
pub fn hand_over(world: &mut World) -> Outcome {
    world.faults_over = true;
    let outcome = hand_over_whole(world);
    (world.faults_over, world.is_ending) = (false, false);
    outcome
}

fn hand_over_whole(world: &mut World) -> Outcome {
    world.cancel_resize()?;
    world.engine().prepare_hand_over();
    world.drain_effects()?;
    await_it(world, |world| world.engine().is_prepared())?;
    world.is_ending = true;
    world.answer_the_rest()?;
    world.end_logs()?;
    let ended = await_it(world, |world| {
        if world.engine().is_quiet() && !world.engine().may_hand_over() && !world.cache_failed {
            let _ = world.end_logs();
        }
        world.engine().may_hand_over() || world.cache_failed
    });
    if ended.is_err() && !world.asked.is_empty() {
        // Some wait for a backing device that refuses what a batch writes. It ends as if it were killed.
        return die_with_requests(world);
    }
    ended?;
    if world.cache_failed {
        // Whoever hands it over would stop instead, and whoever is next recovers.
        return Ok(());
    }
    let on_device = world.superblock.clone();
    let message = world.engine().hand_over(&on_device);
    let (cells, rows) = world.engine().tables();
    let tables = Tables { cells: cells.to_vec(), rows: rows.to_vec() };
    // It dies before anybody takes it; or what is taken is not what was given.
    if world.random.one_in(4) {
        let stop = if world.random.one_in(2) { Stop::Process } else { Stop::Power };
        world.marks.hit("handed over and not taken");
        world.stop(stop);
        return world.open(Some(stop));
    }
    let config = world.setup.config;
    let take = |superblock: &Superblock, message: &[u8]| {
        let room = config.extent_count_max;
        take_over(superblock, message, tables.clone(), room, config.mutants)
    };
    let mut bad = message.clone();
    let at = world.random.below(bad.len() as u64) as usize;
    bad[at] ^= 1 << world.random.below(8);
    if take(&on_device, &bad).is_some() || take(&on_device, &message[..at]).is_some() {
        return Err(Failure("a damaged message was believed".into()));
    }
    let Some((noted, recovered)) = take(&on_device, &message) else {
        if world.setup.rot > 0 {
            // A segment of which nothing can be read is in no log: its place is missing, and the log is read instead.
            world.marks.hit("handed over with a segment missing");
            world.stop(Stop::Process);
            return world.open(Some(Stop::Process));
        }
        return Err(Failure("what was handed over was not taken".into()));
    };
    world.marks.hit("handed over");
    compare(world, &on_device, &recovered)?;
    world.count();
    let failed = |index: &usize| {
        let status = world.engine.as_ref()?.status(VolumeIndex(*index as u8))?;
        status.flush_failed.then_some(*index)
    };
    let failed: Vec<usize> = world.attached().iter().filter_map(failed).collect();
    world.engine = None;
    let next = reopen(&noted, &recovered, config.mutants);
    let again = world.recover(&next, Writer::MayHaveLostPower);
    if world.setup.rot == 0 {
        checkpoint_is_derived::compare(&world.volumes, &recovered, &again).map_err(Failure)?;
    }
    for address in Superblock::addresses(next.size_bytes) {
        world.cache.write(pieces(address, &next.encode(address)));
        let through = world.cache.flush_begin();
        world.cache.flush_end(through);
    }
    if take(&next, &message).is_some() {
        return Err(Failure("what was handed over was taken twice".into()));
    }
    world.superblock = next;
    world.models_stopped(Stop::Process, false);
    world.note_untold(false);
    if failed.into_iter().any(|index| !world.volumes[index].flush_failed) {
        return Err(Failure("a failed flush was forgotten when the cache was handed over".into()));
    }
    world.is_ending = false;
    world.choose_again(Some(Stop::Process), false);
    world.start(recovered)?;
    if world.random.one_in(2) {
        checkpoint(world)?;
    }
    Ok(())
}

/// A process that is to end waits no longer for the requests inside.
fn die_with_requests(world: &mut World) -> Outcome {
    world.marks.hit("ended with requests inside");
    (world.faults_over, world.is_ending) = (false, false);
    world.stop(Stop::Process);
    world.open(Some(Stop::Process))
}

/// The next checkpoint holds what the one before the hand-over does not.
fn checkpoint(world: &mut World) -> Outcome {
    let engine = world.engine.as_mut().expect("there is a process");
    engine.want_checkpoint();
    engine.sync(&mut world.memory);
    world.drain_effects()?;
    await_it(world, |world| world.engine().is_checkpointed())?;
    if world.cache_failed {
        return Ok(());
    }
    let (superblock, writer) = (world.superblock.clone(), Writer::MayHaveLostPower);
    let recovered = world.recover(&superblock, writer);
    world.same_without_checkpoint(&superblock, &recovered, writer)
}

fn await_it(world: &mut World, mut done: impl FnMut(&mut World) -> bool) -> Outcome {
    let begun = world.now;
    while !done(world) {
        if !world.step()? || world.now - begun > WAIT_MAX {
            return Err(Failure(format!("a hand-over does not end: {}", stuck(world).0)));
        }
    }
    Ok(())
}

/// What is handed over is what the log would give.
fn compare(world: &mut World, superblock: &Superblock, handed: &Recovered) -> Outcome {
    if !world.setup.cache_is_sound() {
        return Ok(());
    }
    let log = world.recover(superblock, Writer::MayHaveLostPower);
    checkpoint_is_derived::compare(&world.volumes, handed, &log).map_err(Failure)?;
    for index in 0..world.volumes.len() {
        let of = VolumeIndex(index as u8);
        let told = |it: &Recovered| (it.dirty_blocks(of), it.records(of), it.is_frozen(of));
        if told(handed) != told(&log) {
            return Err(Failure(format!(
                "handed over, {of:?} has (dirty, records, frozen) {:?}, by the log {:?}",
                told(handed),
                told(&log)
            )));
        }
    }
    Ok(())
}

impl World {
    fn engine(&mut self) -> &mut forebay_core::engine::Engine {
        self.engine.as_mut().expect("there is a process")
    }

    fn answer_the_rest(&mut self) -> Outcome {
        let engine = self.engine.as_mut().expect("there is a process");
        engine.answer_the_rest(&mut self.memory);
        self.drain_effects()
    }

    fn end_logs(&mut self) -> Outcome {
        let engine = self.engine.as_mut().expect("there is a process");
        engine.end_logs(&mut self.memory);
        self.drain_effects()
    }
}
