// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest wrote and did not flush is on the cache device a second later, and durable five seconds later.

use crate::support;
use forebay_core::blank::{Nothing, VOLUME};
use forebay_core::effect::{Effect, Token};
use forebay_core::engine::Engine;
use forebay_core::request::{Op, Request};
use forebay_core::units::{BLOCK_BYTES, Sequence, Tick};
use std::collections::{BTreeMap, VecDeque};

const MIB: u64 = 1 << 20;
const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;
/// What devices take.
const WRITE_NANOS: u64 = MILLISECOND;
const FLUSH_NANOS: u64 = 20 * MILLISECOND;

/// An engine, its clock, and devices that take their time. Nobody but a guest that writes asks for anything: time goes on to
/// what is due next, as the engine names it.
struct Rig {
    engine: Engine,
    under_way: BTreeMap<(u64, u32), (Token, Effect)>,
    now: u64,
    number: u32,
    /// When each write was placed, and which it was.
    placed: VecDeque<(Sequence, u64)>,
    /// When the oldest one was that is in no record on its way.
    unwritten: Option<u64>,
    /// Longest that a write was not given to the device, and not durable.
    unwritten_most: u64,
    undurable_most: u64,
    flushes: u32,
}

impl Rig {
    fn new() -> Rig {
        Rig {
            engine: support::engine(1, 256 * MIB, 256 * MIB, 512 << 10, 16),
            under_way: BTreeMap::new(),
            now: SECOND,
            number: 0,
            placed: VecDeque::new(),
            unwritten: None,
            unwritten_most: 0,
            undurable_most: 0,
            flushes: 0,
        }
    }

    fn write(&mut self) {
        self.tick();
        let offset = u64::from(self.number) % 1000 * BLOCK_BYTES;
        let op = Op::Write { fua: false };
        let request = Request { volume: VOLUME, op, offset, length: BLOCK_BYTES, tag: self.number };
        self.number += 1;
        self.engine.submit(request, &mut Nothing).unwrap();
        self.unwritten.get_or_insert(self.now);
        self.placed.push_back((self.engine.status(VOLUME).unwrap().placed, self.now));
        self.take();
    }

    fn tick(&mut self) {
        self.engine.tick(Tick(self.now), self.now / MILLISECOND, &mut Nothing);
        self.take();
    }

    fn take(&mut self) {
        while let Some(effect) = self.engine.next_effect() {
            let Some(token) = effect.token() else { continue };
            let takes = match effect {
                Effect::WriteCache { .. } => {
                    let oldest = self.unwritten.take().unwrap_or(self.now);
                    self.unwritten_most = self.unwritten_most.max(self.now - oldest);
                    WRITE_NANOS
                }
                Effect::FlushCache { .. } => {
                    self.flushes += 1;
                    FLUSH_NANOS
                }
                _ => WRITE_NANOS,
            };
            self.number += 1;
            self.under_way.insert((self.now + takes, self.number), (token, effect));
        }
    }

    /// Time goes on, and devices answer, up to then.
    fn until(&mut self, end: u64) {
        loop {
            let due = self.engine.deadline().map_or(u64::MAX, |due| due.0.max(self.now));
            let done = self.under_way.first_key_value().map_or(u64::MAX, |it| it.0.0);
            if due.min(done) > end {
                self.now = end;
                return;
            }
            self.now = due.min(done);
            if done <= self.now {
                let (_, (token, _)) = self.under_way.pop_first().unwrap();
                self.engine.completed(token, Ok(()), &mut Nothing);
            }
            self.tick();
            let durable = self.engine.status(VOLUME).unwrap().durable;
            while let Some((_, since)) = self.placed.pop_front_if(|it| it.0 <= durable) {
                self.undurable_most = self.undurable_most.max(self.now - since);
            }
        }
    }
}

#[test]
fn one_write_is_written_within_a_second_and_durable_within_five() {
    let mut rig = Rig::new();
    rig.write();
    rig.until(SECOND + SECOND - 1);
    assert!(rig.under_way.is_empty(), "more may come to the same record");
    rig.until(SECOND + SECOND);
    assert_eq!(rig.under_way.len(), 1, "it is on its way");
    rig.until(SECOND + 5 * SECOND - 1);
    assert_eq!(rig.flushes, 0, "a guest may still ask for it");
    rig.until(30 * SECOND);
    assert!(rig.placed.is_empty());
    assert!(rig.undurable_most <= 5 * SECOND + FLUSH_NANOS, "{}", rig.undurable_most);
    assert_eq!(rig.flushes, 1);
}

/// With a write every now and then there was always a record that had just been closed, and the time was counted from it: the first of
/// them became durable when there were enough bytes, which may be never.
#[test]
fn of_a_trickle_of_writes_each_is_written_and_durable_in_time() {
    for pause in [50, 300, 700, 1_100, 2_500] {
        let mut rig = Rig::new();
        while rig.now < 120 * SECOND {
            rig.write();
            rig.until(rig.now + pause * MILLISECOND);
        }
        rig.until(rig.now + 10 * SECOND);
        assert!(rig.placed.is_empty(), "{pause} ms");
        assert!(rig.unwritten_most <= SECOND, "{pause} ms: {}", rig.unwritten_most);
        let most = rig.undurable_most;
        assert!(most <= 5 * SECOND + 2 * FLUSH_NANOS + WRITE_NANOS, "{pause} ms: {most}");
        assert!(rig.flushes <= 30, "{pause} ms: {} flushes in 130 s", rig.flushes);
    }
}
