// SPDX-License-Identifier: Apache-2.0 OR MIT
//! More logs than there are segment buffers, and nearly more than there are segments. Each keeps one for its head until that is full, be its volume idle or not: with as many idle
//! volumes as buffers all others waited for ever, and so did what write-back has to note.

use crate::support;
use forebay_core::blank::Nothing;
use forebay_core::effect::{Effect, Token};
use forebay_core::engine::Engine;
use forebay_core::policy::reserve::SEGMENTS_EACH_MIN;
use forebay_core::request::{Op, Request};
use forebay_core::units::{BLOCK_BYTES, Tick, VolumeIndex};
use std::collections::VecDeque;

const MIB: u64 = 1 << 20;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLISECOND;

/// An engine whose devices do what they are asked, one by one.
struct Rig {
    engine: Engine,
    under_way: VecDeque<Token>,
    now: u64,
    answered: usize,
}

impl Rig {
    fn new(volumes: u8, buffers: u16) -> Rig {
        Rig::over(volumes, 1024 * MIB, 512 << 10, buffers)
    }

    fn over(volumes: u8, cache_bytes: u64, segment_bytes: u32, buffers: u16) -> Rig {
        let engine = support::engine(volumes, 64 * MIB, cache_bytes, segment_bytes, buffers);
        Rig { engine, under_way: VecDeque::new(), now: SECOND, answered: 0 }
    }

    /// Nothing else is asked for so long.
    fn run(&mut self, seconds: u64) {
        let end = self.now + seconds * SECOND;
        while self.now < end {
            while let Some(effect) = self.engine.next_effect() {
                if let Effect::Answer { result, .. } = effect {
                    result.unwrap();
                    self.answered += 1;
                }
                self.under_way.extend(effect.token());
            }
            let next = match self.under_way.pop_front() {
                Some(token) => {
                    self.engine.completed(token, Ok(()), &mut Nothing);
                    self.now + MILLISECOND
                }
                None => self.engine.deadline().map_or(self.now + SECOND, |at| at.0),
            };
            self.now = next.max(self.now + MILLISECOND);
            self.engine.tick(Tick(self.now), self.now / MILLISECOND, &mut Nothing);
        }
    }

    fn write(&mut self, volume: u8) {
        self.write_at(volume, 0, 1);
    }

    fn write_at(&mut self, volume: u8, block: u64, blocks: u64) {
        let (op, offset, length) =
            (Op::Write { fua: false }, block * BLOCK_BYTES, blocks * BLOCK_BYTES);
        let volume = VolumeIndex(volume);
        let request = Request { volume, op, offset, length, tag: u32::from(volume.0) };
        self.engine.submit(request, &mut Nothing).unwrap();
    }
}

#[test]
fn who_writes_finds_a_buffer_although_idle_volumes_have_all() {
    for (volumes, buffers) in [(8, 9), (8, 8), (9, 8), (20, 8), (60, 40), (3, 1)] {
        let mut rig = Rig::new(volumes, buffers);
        (0..volumes).for_each(|volume| rig.write(volume));
        rig.run(10);
        assert_eq!(rig.answered, usize::from(volumes), "{buffers} buffers");
    }
}

#[test]
fn a_drain_ends_although_idle_volumes_have_all_buffers() {
    for buffers in [9, 10, 11] {
        let mut rig = Rig::new(10, buffers);
        rig.write(9);
        rig.run(1);
        rig.engine.want_checkpoint();
        rig.run(3);
        (0..9).for_each(|volume| rig.write(volume));
        rig.run(2);
        rig.engine.drain(VolumeIndex(9), &mut Nothing);
        rig.run(600);
        assert!(rig.engine.is_clean(VolumeIndex(9)), "{buffers} buffers");
    }
}

/// One more in the same cache, and all of them had waited for each other with half of it free: the runtime refuses it.
#[test]
fn as_many_volumes_as_a_cache_may_have_all_go_on() {
    for (cache, segment_bytes) in [(64 * MIB, 512 << 10), (128 * MIB, 4 << 20)] {
        let segments = Rig::over(1, cache, segment_bytes, 64).engine.free_segments().1;
        let volumes = (segments / SEGMENTS_EACH_MIN) as u8;
        let mut rig = Rig::over(volumes, cache, segment_bytes, 64);
        for round in 0..100 {
            (0..volumes).for_each(|volume| rig.write_at(volume, round * 41, 16));
            let wanted = (round + 1) as usize * usize::from(volumes);
            let mut patience = 600;
            while rig.answered < wanted && patience > 0 {
                rig.run(1);
                patience -= 1;
            }
            assert_eq!(rig.answered, wanted, "{volumes} volumes, round {round}");
        }
    }
}
