// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whatever devices answer, and however much at once, the engine goes on.

use crate::support;
use forebay_core::blank::{Nothing, VOLUME};
use forebay_core::effect::{Effect, Fault, Token};
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::Mode;
use forebay_core::limits::{TOKEN_COUNT_MAX, VOLUME_COUNT_MAX};
use forebay_core::payload::Place;
use forebay_core::request::{Op, Request, RequestError};
use forebay_core::units::{BLOCK_BYTES, Tick, VolumeIndex};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;
const MIB_BLOCKS: u64 = MIB / BLOCK_BYTES;

/// An engine whose devices answer when they are told to.
struct Rig {
    engine: Engine,
    under_way: Vec<(Token, Effect)>,
    answers: BTreeMap<u32, Result<(), RequestError>>,
    tag: u32,
    now: u64,
    /// Milliseconds.
    wall_ahead: u64,
}

impl Rig {
    fn new(volumes: u8) -> Rig {
        Rig::with_lanes(volumes, volumes)
    }

    /// With memory for so many batches.
    fn with_lanes(volumes: u8, lane_count: u8) -> Rig {
        let config = Config { buffer_count: 16, lane_count, ..Config::default() };
        Rig::over(support::chosen(volumes, 256 * MIB, 256 * MIB, 512 << 10, config))
    }

    fn over(engine: Engine) -> Rig {
        Rig {
            engine,
            under_way: Vec::new(),
            answers: BTreeMap::new(),
            tag: 0,
            now: 0,
            wall_ahead: 0,
        }
    }

    /// One volume, with so many of its first MiB in the cache and on the backing device.
    fn with_copies(mibs: u64) -> Rig {
        let mut rig = Rig::new(1);
        rig.write_all(0, mibs);
        // The buffers of the first ones are used again.
        rig.write_all(40, 16);
        rig.drain();
        rig.answered();
        rig
    }

    /// Says whether there was room for it.
    fn asks(&mut self, volume: VolumeIndex, op: Op, offset: u64, length: u64) -> bool {
        let request = Request { volume, op, offset, length, tag: self.tag };
        let taken = self.engine.submit(request, &mut Nothing).is_ok();
        self.tag += u32::from(taken);
        self.take();
        taken
    }

    fn take(&mut self) {
        while let Some(effect) = self.engine.next_effect() {
            match (effect, effect.token()) {
                (Effect::Answer { tag, result }, _) => {
                    assert_eq!(self.answers.insert(tag, result), None, "it is answered once");
                }
                (effect, Some(token)) => self.under_way.push((token, effect)),
                (_, None) => unreachable!("all else is reported back"),
            }
        }
        assert!(self.under_way.len() <= TOKEN_COUNT_MAX);
    }

    /// In one turn, devices have done all that `which` says, with this result. Says how much that was.
    fn turn(&mut self, which: impl Fn(&Effect) -> bool, result: Result<(), Fault>) -> usize {
        let (done, left) = self.under_way.drain(..).partition(|(_, effect)| which(effect));
        let done: Vec<(Token, Effect)> = done;
        self.under_way = left;
        for (token, _) in &done {
            self.engine.completed(*token, result, &mut Nothing);
        }
        self.tick();
        done.len()
    }

    fn tick(&mut self) {
        self.wait(100_000);
    }

    fn wait(&mut self, nanos: u64) {
        self.now += nanos;
        let wall = self.wall_ahead + self.now / 1_000_000;
        self.engine.tick(Tick(self.now), wall, &mut Nothing);
        self.take();
    }

    /// Devices do all that they are asked.
    fn settle(&mut self) {
        while self.turn(|_| true, Ok(())) > 0 {}
    }

    /// How many were answered well, and how many not, since the last time.
    fn answered(&mut self) -> (usize, usize) {
        let all = std::mem::take(&mut self.answers);
        let good = all.values().filter(|result| result.is_ok()).count();
        (good, all.len() - good)
    }

    fn write_all(&mut self, from: u64, mibs: u64) {
        for at in from..from + mibs {
            while !self.asks(VOLUME, Op::Write { fua: false }, at * MIB, MIB) {
                self.settle();
            }
            self.settle();
        }
    }

    fn drain(&mut self) {
        self.engine.drain(VOLUME, &mut Nothing);
        self.take();
        self.settle();
        assert!(self.engine.is_clean(VOLUME));
    }
}

fn reads_cache(effect: &Effect) -> bool {
    matches!(effect, Effect::ReadCache { .. })
}

/// A cache device dies under a deep queue of long reads. Each block of each of them was read again at once, by an effect of its own,
/// of which there are 8192: the engine ended itself. What the backing device has is read from there.
#[test]
fn a_cache_device_that_dies_under_many_long_reads_is_survived() {
    let mut rig = Rig::with_copies(32);
    let mut reads = 0;
    while reads < 80 {
        assert!(rig.asks(VOLUME, Op::Read, reads % 32 * MIB, MIB), "there is room for so few");
        reads += 1;
    }
    assert!(rig.under_way.iter().filter(|it| reads_cache(&it.1)).count() >= 80);
    while !rig.under_way.is_empty() {
        rig.turn(reads_cache, Err(Fault));
        rig.turn(|effect| !reads_cache(effect), Ok(()));
    }
    assert_eq!(rig.answered(), (80, 0));
    let repaired = rig.engine.status(VOLUME).unwrap().stats.repaired_blocks;
    assert!(repaired >= 32 * MIB_BLOCKS, "{repaired}");
}

/// The same where the backing device takes its time: what was bad in a row is read in a row, so it does not come to so many
/// effects, either.
#[test]
fn a_backing_device_that_is_slow_meanwhile_is_asked_for_few_long_reads() {
    let mut rig = Rig::with_copies(32);
    for at in 0..80 {
        assert!(rig.asks(VOLUME, Op::Read, at % 32 * MIB, MIB));
    }
    while rig.turn(reads_cache, Err(Fault)) > 0 {}
    let misses = rig.under_way.iter().filter(|it| matches!(it.1, Effect::ReadBacking { .. }));
    assert!(misses.count() <= 3 * 80);
    rig.settle();
    assert_eq!(rig.answered(), (80, 0));
}

/// One block in the middle of a long read cannot be read: the others are, and it alone comes from the backing device.
#[test]
fn one_block_that_cannot_be_read_is_repaired_alone() {
    let mut rig = Rig::with_copies(2);
    assert!(rig.asks(VOLUME, Op::Read, 0, MIB));
    let first = rig.under_way.iter().find_map(|(_, effect)| match *effect {
        Effect::ReadCache { segment, block, blocks, .. } if blocks > 60 => {
            Some((segment, block + 50))
        }
        _ => None,
    });
    let (bad_segment, bad) = first.expect("most of it lies in a row");
    let holds_bad = |effect: &Effect| match *effect {
        Effect::ReadCache { segment, block, blocks, .. } => {
            segment == bad_segment && (block..block + blocks).contains(&bad)
        }
        _ => false,
    };
    let mut backing = 0;
    while !rig.under_way.is_empty() {
        rig.turn(holds_bad, Err(Fault));
        for (_, effect) in &rig.under_way {
            if let Effect::ReadBacking { blocks, .. } = effect {
                backing += u64::from(*blocks);
            }
        }
        rig.turn(|effect| !holds_bad(effect), Ok(()));
    }
    assert_eq!(rig.answered(), (1, 0));
    assert_eq!((backing, rig.engine.status(VOLUME).unwrap().stats.repaired_blocks), (1, 1));
}

/// Hundreds of writes wait behind one that nobody can place yet, each of which has its first and last block read when its turn comes.
/// Meanwhile reads take all the effects that there are: then all of the writes had their turn at once, and the engine ended
/// itself.
#[test]
fn writes_of_parts_of_blocks_wait_for_room_to_read_the_rest() {
    let mut rig = Rig::new(6);
    let volumes: Vec<VolumeIndex> = (1..6).map(VolumeIndex).collect();
    // Every second block is in the cache: a read of them all is so many effects.
    for at in (0..16 * MIB_BLOCKS).step_by(2) {
        rig.asks(VOLUME, Op::Write { fua: false }, at * BLOCK_BYTES, BLOCK_BYTES);
        rig.settle();
    }
    rig.write_all(40, 16);
    rig.answered();
    for volume in &volumes {
        rig.asks(*volume, Op::Write { fua: false }, 5000 * BLOCK_BYTES, BLOCK_BYTES);
    }
    rig.settle();
    rig.answered();
    let mut writes = 0;
    for volume in &volumes {
        for at in 0..256 {
            // The first two have a block in common.
            let first = if at == 0 { 1 } else { 4 * at - 3 };
            let (offset, length) = (first * BLOCK_BYTES + 512, 2 * BLOCK_BYTES);
            assert!(rig.asks(*volume, Op::Write { fua: false }, offset, length));
            writes += 1;
        }
    }
    let mut reads = 0;
    while rig.asks(VOLUME, Op::Read, reads % 16 * MIB, MIB) {
        reads += 1;
    }
    assert!(reads >= 20, "{reads}");
    // The blocks that the first ones wait for have come, and nothing else.
    rig.turn(
        |effect| matches!(effect, Effect::ReadBacking { volume, .. } if *volume != VOLUME),
        Ok(()),
    );
    rig.settle();
    assert_eq!(rig.answered(), (writes + reads as usize, 0));
}

/// The same of writes that go around the log, of which each has to be told of its entry first.
#[test]
fn writes_around_the_log_wait_for_room_as_well() {
    let mut rig = Rig::new(6);
    let volumes: Vec<VolumeIndex> = (1..6).map(VolumeIndex).collect();
    for at in (0..16 * MIB_BLOCKS).step_by(2) {
        rig.asks(VOLUME, Op::Write { fua: false }, at * BLOCK_BYTES, BLOCK_BYTES);
        rig.settle();
    }
    for volume in &volumes {
        rig.asks(*volume, Op::Write { fua: false }, 0, MIB);
        rig.settle();
        rig.engine.drain(*volume, &mut Nothing);
        rig.take();
        rig.settle();
        assert!(rig.engine.is_clean(*volume));
        rig.engine.set_mode(*volume, Mode::WriteAround, &mut Nothing);
        rig.take();
        rig.settle();
    }
    rig.write_all(40, 16);
    rig.answered();
    let mut writes = 0;
    for volume in &volumes {
        for at in 0..250 {
            let taken = rig.asks(*volume, Op::Write { fua: false }, at * BLOCK_BYTES, BLOCK_BYTES);
            assert!(taken);
            writes += 1;
        }
    }
    rig.turn(|effect| matches!(effect, Effect::WriteCache { .. }), Ok(()));
    let mut reads = 0;
    while rig.asks(VOLUME, Op::Read, reads % 16 * MIB, MIB) {
        reads += 1;
    }
    assert!(reads >= 20, "{reads}");
    // Their entries become durable at once.
    rig.turn(|effect| matches!(effect, Effect::FlushCache { .. }), Ok(()));
    rig.settle();
    assert_eq!(rig.answered(), (writes + reads as usize, 0));
}

/// A volume that is on its backing device has a write on its way around the log, whose entry is not durable yet, and a flush that
/// waits for that, when the cache device fails. Both answered errors, though nothing of the volume needs the cache: a journal
/// ends at that. The write waits until the cache is marked stale, as all do that come later.
#[test]
fn what_needs_nothing_of_a_cache_that_fails_under_it_goes_on() {
    for marked in [Ok(()), Err(Fault)] {
        let mut rig = Rig::new(1);
        rig.write_all(0, 1);
        rig.drain();
        rig.engine.set_mode(VOLUME, Mode::WriteAround, &mut Nothing);
        rig.take();
        rig.settle();
        rig.answered();
        assert!(rig.asks(VOLUME, Op::Write { fua: false }, 0, BLOCK_BYTES));
        assert!(rig.asks(VOLUME, Op::Flush, 0, 0));
        assert_eq!(rig.turn(|effect| matches!(effect, Effect::WriteCache { .. }), Err(Fault)), 1);
        assert_eq!(rig.answered(), (1, 0), "nothing is missing on the backing device");
        assert_eq!(rig.turn(|effect| matches!(effect, Effect::MarkStale { .. }), marked), 1);
        let around = |effect: &Effect| matches!(effect, Effect::WriteAround { .. });
        assert_eq!(rig.turn(around, Ok(())), usize::from(marked.is_ok()));
        assert_eq!(rig.answered(), if marked.is_ok() { (1, 0) } else { (0, 1) });
    }
}

/// But what only the cache has is missing, and whoever waits for it hears so.
#[test]
fn what_is_dirty_when_the_cache_fails_is_missing() {
    let mut rig = Rig::new(1);
    assert!(rig.asks(VOLUME, Op::Write { fua: true }, 0, BLOCK_BYTES));
    assert!(rig.asks(VOLUME, Op::Flush, 0, 0));
    rig.turn(|effect| matches!(effect, Effect::WriteCache { .. }), Err(Fault));
    assert_eq!(rig.answered(), (0, 2));
}

/// A reader waits for write-back's turn on a slow disk to end. The cache device fails, and then what write-back had under way. No
/// time was due then, and the reader waited until somebody else asked for something.
#[test]
fn a_reader_has_its_turn_when_cache_and_write_back_fail_together() {
    let mut rig = Rig::new(1);
    rig.write_all(0, 16);
    for at in 0..32 {
        assert!(rig.asks(VOLUME, Op::Read, (100 + at) * MIB, BLOCK_BYTES));
        rig.wait(20_000_000);
        rig.settle();
    }
    assert!(rig.engine.status(VOLUME).unwrap().sharing.sliced);
    rig.answered();
    rig.engine.drain(VOLUME, &mut Nothing);
    rig.take();
    let writes = |effect: &Effect| matches!(effect, Effect::WriteBacking { .. });
    while !rig.under_way.iter().any(|it| writes(&it.1)) {
        rig.turn(|effect| !writes(effect), Ok(()));
        rig.wait(1_000_000);
    }
    assert!(rig.asks(VOLUME, Op::Read, 200 * MIB, BLOCK_BYTES));
    rig.asks(VOLUME, Op::Write { fua: true }, 220 * MIB, BLOCK_BYTES);
    while rig.turn(|effect| !writes(effect), Err(Fault)) > 0 {}
    for (token, effect) in std::mem::take(&mut rig.under_way) {
        assert!(writes(&effect));
        rig.engine.completed(token, Err(Fault), &mut Nothing);
    }
    rig.take();
    assert_eq!(rig.answered(), (0, 1), "the write has failed, the read waits");
    while rig.under_way.is_empty() {
        let due = rig.engine.deadline().expect("a reader waits for a turn");
        rig.wait(due.0.saturating_sub(rig.now).max(1));
    }
    rig.settle();
    assert_eq!(rig.answered(), (1, 0));
}

fn writes_back(rig: &Rig, volume: VolumeIndex) -> bool {
    let writes = |effect: &Effect| matches!(effect, Effect::WriteBacking { volume: it, .. } if *it == volume);
    rig.under_way.iter().any(|(_, effect)| writes(effect))
}

/// What the backing devices of the first so many volumes are asked to write is not.
fn all_but(silent: u8) -> impl Fn(&Effect) -> bool + Copy {
    move |effect| !matches!(effect, Effect::WriteBacking { volume, .. } if volume.0 < silent)
}

/// Of so many volumes each has something that is to be written back, and all of it is durable.
fn all_dirty(rig: &mut Rig, volumes: u8) {
    for volume in (0..volumes).map(VolumeIndex) {
        assert!(rig.asks(volume, Op::Write { fua: true }, 0, MIB));
        rig.settle();
    }
    rig.answered();
}

const SECOND: u64 = 1_000_000_000;

/// Six backing devices take what they are asked to write and never answer. Four of them had the memory of all batches there are,
/// and nobody else was written back any more: not what was to be detached, nor what writers waited for. Later it was after ten
/// seconds, each of which a guest waited whose volume is written through.
#[test]
fn backing_devices_that_do_not_answer_hold_back_their_own_volumes_alone() {
    let mut rig = Rig::new(8);
    let (dead, sound) = ((0..6).map(VolumeIndex), [VolumeIndex(6), VolumeIndex(7)]);
    all_dirty(&mut rig, 8);
    for volume in 0..8 {
        rig.engine.drain(VolumeIndex(volume), &mut Nothing);
        rig.take();
        while rig.turn(all_but(6), Ok(())) > 0 {}
    }
    assert!(dead.clone().all(|volume| writes_back(&rig, volume)));
    assert!(sound.iter().all(|volume| rig.engine.is_clean(*volume)), "somebody waits for them");
    // They are back.
    rig.settle();
    assert!(dead.into_iter().all(|volume| rig.engine.is_clean(volume)));
}

/// The same of volumes that nobody waits for: they are patient for a second. A device that goes on, but slowly, stood in the way
/// for as long as its batch took.
#[test]
fn who_is_written_back_for_his_age_waits_a_second_for_slow_devices() {
    let mut rig = Rig::new(8);
    all_dirty(&mut rig, 8);
    rig.wait(30 * SECOND);
    let began = rig.now;
    while rig.turn(all_but(6), Ok(())) > 0 {}
    let busy = |rig: &Rig| (0..8).filter(|at| writes_back(rig, VolumeIndex(*at))).count();
    assert_eq!(busy(&rig), 4, "the window has so many parts");
    let due = rig.engine.deadline().expect("it is looked at them again").0;
    assert!(due <= began + SECOND);
    rig.wait(due - rig.now);
    while rig.turn(all_but(6), Ok(())) > 0 {}
    assert_eq!(busy(&rig), 6);
    assert!([6, 7].iter().all(|at| rig.engine.is_clean(VolumeIndex(*at))));
}

/// A volume came to another whose batch had all of the window, and waited until that was done.
#[test]
fn a_batch_that_has_all_of_the_window_keeps_no_volume_that_comes_from_being_written_back() {
    let mut rig = Rig::with_lanes(1, 2);
    all_dirty(&mut rig, 1);
    rig.engine.drain(VOLUME, &mut Nothing);
    rig.take();
    while rig.turn(all_but(1), Ok(())) > 0 {}
    assert!(writes_back(&rig, VOLUME));
    let second = VolumeIndex(1);
    let recorded = forebay_core::format::superblock::Volume::empty([9; 16], "second", 256 * MIB);
    rig.engine.attach(second, &recorded);
    rig.engine.serve(second, true);
    assert!(rig.asks(second, Op::Write { fua: true }, 0, MIB));
    while rig.turn(all_but(1), Ok(())) > 0 {}
    rig.engine.drain(second, &mut Nothing);
    rig.take();
    while rig.turn(all_but(1), Ok(())) > 0 {}
    assert!(rig.engine.is_clean(second));
    rig.settle();
    assert!(rig.engine.is_clean(VOLUME));
}

/// Six volumes are written all the time, and there is memory for four batches. Those that were looked at first had it again and again,
/// the last two never.
#[test]
fn who_asked_first_for_the_memory_of_a_batch_has_it_first() {
    let mut rig = Rig::with_lanes(6, 4);
    for volume in (0..6).map(VolumeIndex) {
        rig.engine.set_mode(volume, Mode::WriteThrough, &mut Nothing);
        rig.take();
        rig.settle();
    }
    for round in 0..2000 {
        for volume in 0..6 {
            // A guest of each has something to write whenever it has been answered.
            let at = u64::from(volume) + 6 * (round % 40);
            rig.asks(VolumeIndex(volume), Op::Write { fua: false }, at * BLOCK_BYTES, BLOCK_BYTES);
        }
        while rig.turn(all_but(6), Ok(())) > 0 {}
        // One batch ends after the other.
        let (token, _) = rig.under_way.remove(0);
        rig.engine.completed(token, Ok(()), &mut Nothing);
        rig.tick();
    }
    let batches = |at| rig.engine.status(VolumeIndex(at)).unwrap().stats.batches;
    let all: Vec<u64> = (0..6).map(batches).collect();
    let (least, most) = (all.iter().min().unwrap(), all.iter().max().unwrap());
    assert!(*least > 8 && most - least <= 2, "{all:?}");
}

/// Guests ask for all they may, and all backing devices there can be are written to at once, or what is to be written comes back bad
/// from the cache device, each block of which is read once more. The engine ended itself.
fn all_batches_at_once(step: u64, result: Result<(), Fault>) {
    let count = VOLUME_COUNT_MAX as u8;
    let config = Config { buffer_count: 16, lane_count: count, ..Config::default() };
    let engine = support::chosen(count, 256 * MIB, 512 * MIB, 512 << 10, config);
    let mut rig = Rig::over(engine);
    // No two adjacent blocks lie together: a read of them all is so many effects.
    let scattered = |parity| (parity..16 * MIB_BLOCKS).step_by(2);
    for at in scattered(0).chain(scattered(1)) {
        rig.asks(VOLUME, Op::Write { fua: false }, at * BLOCK_BYTES, BLOCK_BYTES);
        rig.settle();
    }
    rig.write_all(40, 16);
    rig.drain();
    for volume in (1..count).map(VolumeIndex) {
        for at in 0..100 {
            let offset = step * at * BLOCK_BYTES;
            assert!(rig.asks(volume, Op::Write { fua: false }, offset, BLOCK_BYTES));
        }
        rig.asks(volume, Op::Flush, 0, 0);
        rig.settle();
    }
    rig.answered();
    for volume in (1..count).map(VolumeIndex) {
        rig.engine.drain(volume, &mut Nothing);
        rig.take();
    }
    let mut reads = 0;
    while rig.asks(VOLUME, Op::Read, reads % 16 * MIB, MIB) {
        reads += 1;
    }
    assert!(rig.under_way.len() > 6000, "{}", rig.under_way.len());
    let of_batches =
        |effect: &Effect| matches!(effect, Effect::ReadCache { to: Place::Window { .. }, .. });
    for _ in 0..20 {
        rig.turn(of_batches, result);
    }
    rig.settle();
    // What was bad is looked at once more, and is good.
    for _ in 0..20 {
        rig.wait(10 * SECOND);
        rig.settle();
    }
    assert_eq!(rig.answered(), (reads as usize, 0));
    assert!((0..count).all(|at| rig.engine.is_clean(VolumeIndex(at))));
    assert!(
        (0..count).all(|at| rig.engine.status(VolumeIndex(at)).unwrap().stats.lost_blocks == 0)
    );
}

#[test]
fn as_many_writes_of_batches_as_there_can_be_leave_room_for_what_must_be_done() {
    all_batches_at_once(2, Ok(()));
}

#[test]
fn as_many_bad_reads_of_batches_as_there_can_be_leave_room_as_well() {
    all_batches_at_once(1, Err(Fault));
}

/// Each buffer that came back went to the volume that was looked at first, which had much to write; another one's guest waited for as
/// long as that took.
#[test]
fn who_found_no_buffer_goes_before_who_has_one() {
    for [streams, little] in [[VOLUME, VolumeIndex(1)], [VolumeIndex(1), VOLUME]] {
        let mut rig = Rig::new(2);
        for at in 0..64 {
            assert!(rig.asks(streams, Op::Write { fua: false }, at * MIB, MIB));
        }
        assert!(rig.asks(little, Op::Write { fua: false }, 0, BLOCK_BYTES));
        let tag = rig.tag - 1;
        let mut turns = 0;
        while !rig.answers.contains_key(&tag) {
            // The cache device does one thing after the other.
            let mut one = rig.under_way.drain(..1);
            let (token, _) = one.next().expect("something is under way");
            drop(one);
            rig.engine.completed(token, Ok(()), &mut Nothing);
            rig.tick();
            turns += 1;
        }
        assert!(turns <= 8, "{turns}");
        rig.settle();
        assert_eq!(rig.answered(), (65, 0));
    }
}

fn flushes(volume: VolumeIndex) -> impl Fn(&Effect) -> bool {
    move |effect| matches!(effect, Effect::FlushBacking { volume: it, .. } if *it == volume)
}

/// A batch of each of two volumes has come to its flush; of the flushes those are given that are under way.
fn two_to_be_flushed(rig: &mut Rig) -> Vec<VolumeIndex> {
    let both = [VOLUME, VolumeIndex(1)];
    for volume in both {
        assert!(rig.asks(volume, Op::Write { fua: false }, 0, MIB / 4));
        rig.engine.drain(volume, &mut Nothing);
        rig.take();
    }
    while rig.turn(|effect| !matches!(effect, Effect::FlushBacking { .. }), Ok(())) > 0 {}
    let under_way = |volume: &VolumeIndex| rig.under_way.iter().any(|it| flushes(*volume)(&it.1));
    both.into_iter().filter(under_way).collect()
}

/// A disk drops what it has not made durable when it fails to, of both its partitions, and says so to the flush that it was asked
/// for by one of them. The batch of the other was flushed beside or behind that: answered well, it was taken for done, and
/// its blocks left the log.
#[test]
fn a_flush_that_fails_on_one_partition_is_heard_on_the_other() {
    let mut rig = Rig::new(2);
    let other = VolumeIndex(1);
    for volume in [VOLUME, other] {
        rig.engine.flushes_disk(volume);
    }
    rig.engine.share_disk(other, VOLUME);
    assert_eq!(two_to_be_flushed(&mut rig), [VOLUME], "one after the other");
    assert_eq!(rig.turn(flushes(VOLUME), Err(Fault)), 1);
    assert_eq!(rig.turn(flushes(other), Ok(())), 1, "its turn has come");
    rig.settle();
    assert!(!rig.engine.is_clean(other), "what it flushed may be gone");
    rig.wait(2_000_000_000);
    rig.settle();
    assert!([VOLUME, other].iter().all(|volume| rig.engine.is_clean(*volume)));
    assert_eq!(rig.engine.status(other).unwrap().stats.backing_writes, 2, "it was written again");
}

/// One volume has something around its log that is not flushed; a flush of the other's device fails. Says whether the first one's guest is told. If it
/// `leaves` it is not served meanwhile.
fn is_told(shares: bool, leaves: bool) -> bool {
    let mut rig = Rig::new(2);
    let other = VolumeIndex(1);
    rig.engine.flushes_disk(VOLUME);
    if shares {
        rig.engine.share_disk(other, VOLUME);
    }
    rig.engine.set_mode(other, Mode::WriteAround, &mut Nothing);
    rig.take();
    rig.settle();
    assert!(rig.asks(other, Op::Write { fua: false }, 0, BLOCK_BYTES));
    rig.settle();
    assert_eq!(rig.answered(), (1, 0));
    rig.engine.serve(other, !leaves);
    assert!(rig.asks(VOLUME, Op::Write { fua: false }, 0, BLOCK_BYTES));
    rig.engine.drain(VOLUME, &mut Nothing);
    rig.take();
    while rig.turn(|effect| !matches!(effect, Effect::FlushBacking { .. }), Ok(())) > 0 {}
    assert_eq!(rig.turn(flushes(VOLUME), Err(Fault)), 1);
    rig.answered();
    rig.engine.serve(other, true);
    assert!(rig.asks(other, Op::Flush, 0, 0));
    rig.settle();
    rig.answered() == (0, 1)
}

/// What went around the log on another partition may be lost, and its guest is told; on another disk it is not. A volume that is being
/// detached is not one whose disk nobody knows.
#[test]
fn what_went_around_the_log_on_another_partition_is_told_to_be_lost() {
    for leaves in [false, true] {
        assert!(is_told(true, leaves));
        assert!(!is_told(false, leaves));
    }
}

/// A file may fail to be flushed for what its file system has of it alone. Others on the disk are flushed beside it, and go on.
#[test]
fn a_flush_that_fails_on_a_file_is_its_own() {
    let mut rig = Rig::new(2);
    let other = VolumeIndex(1);
    rig.engine.share_disk(other, VOLUME);
    assert_eq!(two_to_be_flushed(&mut rig), [VOLUME, other]);
    assert_eq!(rig.turn(flushes(VOLUME), Err(Fault)), 1);
    rig.settle();
    assert!(rig.engine.is_clean(other) && !rig.engine.is_clean(VOLUME));
}

/// A batch under way, and behind it a write that waits for the backing device.
fn waits_behind_a_batch(rig: &mut Rig, offset: u64) {
    while !rig.under_way.iter().any(|(_, it)| matches!(it, Effect::WriteBacking { .. })) {
        rig.turn(|_| true, Ok(()));
    }
    assert!(rig.asks(VOLUME, Op::Write { fua: false }, offset, BLOCK_BYTES));
}

/// Its volume takes writes as it did again, and nothing asked for a batch before what is dirty was old: half a minute.
#[test]
fn who_waits_for_the_backing_device_does_so_no_longer_for_another_mode() {
    let mut rig = Rig::new(1);
    rig.engine.set_mode(VOLUME, Mode::WriteThrough, &mut Nothing);
    rig.take();
    rig.settle();
    assert!(rig.asks(VOLUME, Op::Write { fua: false }, 0, BLOCK_BYTES));
    waits_behind_a_batch(&mut rig, MIB);
    rig.engine.set_mode(VOLUME, Mode::WriteBack, &mut Nothing);
    rig.take();
    rig.settle();
    let begun = rig.now;
    while rig.answers.len() < 2 {
        rig.wait(100_000_000);
        rig.settle();
    }
    assert!(rig.now - begun < 5_000_000_000, "{} ms", (rig.now - begun) / 1_000_000);
}

/// No batch begins for it any more, so a stop waited for it a whole minute, and was then no clean one.
#[test]
fn a_stop_does_not_wait_for_who_waits_for_the_backing_device() {
    let mut rig = Rig::new(1);
    rig.write_all(0, 4);
    rig.answered();
    rig.engine.drain(VOLUME, &mut Nothing);
    rig.take();
    waits_behind_a_batch(&mut rig, 100 * MIB);
    rig.engine.stop_writeback();
    rig.engine.sync(&mut Nothing);
    rig.engine.give_up_writes(&mut Nothing);
    rig.take();
    // Nor is one taken that comes now.
    assert!(rig.asks(VOLUME, Op::Write { fua: false }, 101 * MIB, BLOCK_BYTES));
    rig.settle();
    assert!(rig.engine.is_quiet());
    let given_up = rig.answers.values().filter(|it| **it == Err(RequestError::Closing));
    assert_eq!(given_up.count(), 2, "{:?}", rig.answers);
}

/// Its last block was locked until the process ended, and all writes of the volume waited behind the first to touch it.
#[test]
fn a_growth_that_cannot_be_recorded_holds_up_nobody() {
    for dirty in [false, true] {
        let config = Config { buffer_count: 16, lane_count: 1, ..Config::default() };
        let size = 64 * MIB + 512;
        let mut rig = Rig::over(support::chosen(1, size, 256 * MIB, 512 << 10, config));
        if dirty {
            assert!(rig.asks(VOLUME, Op::Write { fua: true }, 0, BLOCK_BYTES));
            rig.settle();
        }
        rig.answered();
        rig.engine.begin_to_grow(VOLUME, 64 * MIB + 4096, &mut Nothing);
        rig.take();
        rig.settle();
        assert!(rig.engine.may_grow_to(VOLUME).is_some());
        rig.engine.cache_has_failed();
        rig.tick();
        rig.settle();
        assert!(rig.asks(VOLUME, Op::Write { fua: false }, 64 * MIB, 512));
        assert!(rig.asks(VOLUME, Op::Write { fua: false }, 8 * MIB, BLOCK_BYTES));
        for _ in 0..100 {
            rig.wait(1_000_000_000);
            rig.settle();
        }
        assert_eq!(rig.answers.len(), 2, "dirty {dirty}: {:?}", rig.answers);
    }
}

/// It is appended again at each try, so that what the log has of it is never old: `status` said that nothing was older than a minute,
/// however long the backing device had refused it.
#[test]
fn what_the_backing_device_refuses_ages() {
    let mut rig = Rig::new(1);
    rig.write_all(0, 1);
    let refused = |effect: &Effect| match effect {
        Effect::WriteBacking { lba, blocks, .. } => lba.0 <= 7 && 7 < lba.0 + u64::from(*blocks),
        _ => false,
    };
    let age = |rig: &Rig| {
        let since = rig.engine.status(VOLUME).and_then(|it| it.dirty_since).expect("it is dirty");
        (rig.now - since.0) / 1_000_000_000
    };
    for second in 0..1000 {
        while rig.turn(refused, Err(Fault)) + rig.turn(|effect| !refused(effect), Ok(())) > 0 {}
        rig.wait(1_000_000_000);
        assert!(age(&rig) + 2 >= second, "{} s after {second}", age(&rig));
    }
    assert_eq!(rig.engine.status(VOLUME).map(|it| it.parked_blocks), Some(1));
    while rig.engine.status(VOLUME).is_some_and(|it| it.parked_blocks > 0) {
        rig.settle();
        rig.wait(1_000_000_000);
    }
    rig.settle();
    assert!(rig.engine.is_clean(VOLUME));
    // What comes later is not as old.
    rig.write_all(0, 1);
    assert!(age(&rig) < 2, "{} s", age(&rig));
}

/// All of it was written, and the write failed because what it replaced is lost: for ever, and a drain never ended well.
#[test]
fn a_lost_last_block_that_ends_within_it_is_written_again() {
    let end = 8 * MIB + 512;
    let config = Config { buffer_count: 16, ..Config::default() };
    let lost = || {
        let mut rig = Rig::over(support::chosen(1, end, 256 * MIB, 512 << 10, config));
        assert!(rig.asks(VOLUME, Op::Write { fua: false }, 8 * MIB, 512));
        rig.settle();
        rig.write_all(0, 2);
        rig.answered();
        rig.engine.drain(VOLUME, &mut Nothing);
        rig.take();
        // Nothing but signs of life can be read of the cache device.
        let lost =
            |effect: &Effect| matches!(effect, Effect::ReadCache { to: Place::Window { .. }, .. });
        for _ in 0..200 {
            while rig.turn(lost, Err(Fault)) > 0 {}
            rig.turn(|effect| !lost(effect), Ok(()));
            rig.wait(1_000_000_000);
        }
        assert!(rig.engine.status(VOLUME).unwrap().lost_blocks_now > 0);
        rig.engine.set_mode(VOLUME, Mode::WriteBack, &mut Nothing);
        rig.settle();
        rig
    };
    for (op, offset) in [
        (Op::Write { fua: false }, 8 * MIB),
        (Op::WriteZeroes { fua: false }, 8 * MIB),
        (Op::Write { fua: true }, 8 * MIB - 4096),
    ] {
        let mut rig = lost();
        let before = rig.engine.status(VOLUME).unwrap().lost_blocks_now;
        // Not all that there is of it.
        assert!(rig.asks(VOLUME, Op::Write { fua: false }, 4096, 512));
        rig.settle();
        assert_eq!(rig.answered(), (0, 1));
        assert!(rig.asks(VOLUME, op, offset, end - offset));
        rig.settle();
        assert_eq!(rig.answered(), (1, 0), "{op:?}");
        assert_eq!(rig.engine.status(VOLUME).unwrap().lost_blocks_now, before - 1);
    }
}

/// One that came a moment later went around the log.
#[test]
fn a_write_of_part_of_a_block_goes_on_past_a_cache_that_fails_under_it() {
    for under_way in [false, true] {
        let mut rig = Rig::with_copies(4);
        rig.engine.set_mode(VOLUME, Mode::WriteBack, &mut Nothing);
        rig.settle();
        // A copy of what is read is to be written to the cache device.
        assert!(rig.asks(VOLUME, Op::Read, 100 * MIB, 4096));
        rig.settle();
        rig.answered();
        rig.wait(1_100_000_000);
        let write = Op::Write { fua: false };
        if under_way {
            assert!(rig.asks(VOLUME, write, 120 * MIB, 512));
        }
        assert!(rig.turn(|effect| matches!(effect, Effect::WriteCache { .. }), Err(Fault)) > 0);
        if !under_way {
            assert!(rig.asks(VOLUME, write, 120 * MIB, 512));
        }
        rig.settle();
        assert_eq!(rig.answered(), (1, 0), "under way when it failed: {under_way}");
    }
}

/// A clock that was wrong once said for years that the backing device has everything.
#[test]
fn what_the_backing_device_is_of_follows_the_clock_back() {
    let mut rig = Rig::new(1);
    let year = 365 * 24 * 3_600_000;
    let as_of = |rig: &Rig| rig.engine.status(VOLUME).unwrap().backing_as_of;
    rig.wall_ahead = year;
    rig.write_all(0, 2);
    rig.drain();
    assert!(as_of(&rig) >= year);
    rig.wall_ahead = 0;
    rig.write_all(0, 2);
    rig.settle();
    rig.wait(1_000_000_000);
    rig.settle();
    assert!(rig.engine.is_clean(VOLUME) && as_of(&rig) < year, "{}", as_of(&rig));
}
