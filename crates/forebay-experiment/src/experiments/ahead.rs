// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What reading ahead gives to guests that ask for one thing at a time, and what it costs others.
//!
//! Nothing is in the cache. Each load is given to the bare device, to forebay as it is, and to forebay without read-ahead.

use super::{MIB, SECOND, bare, cached};
use crate::load::{Ask, Worker, run, shared};
use crate::machine::{Machine, Setup};
use forebay_core::request::Op;
use forebay_disk::{Model, Nanos};

/// Of the file that is read.
const FILE: u64 = 256 * MIB;
/// Of the volume: what lies behind the file is read by others.
const VOLUME: u64 = 8 << 30;

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From its beginning to its end.
    Forward,
    /// From its end to its beginning.
    Backward,
    /// Every seventeenth record, then from the start again, one further.
    Stride,
}

/// All of them.
pub const WAYS: [Way; 3] = [Way::Forward, Way::Backward, Way::Stride];
/// Bytes of a record.
pub const RECORDS: [u64; 3] = [4 << 10, 64 << 10, MIB];

/// Bare, forebay, forebay without read-ahead.
fn setups(model: Model) -> [Setup; 3] {
    let through = cached(model, VOLUME, 64 * MIB);
    let mut without = through;
    without.config.ahead_blocks = 0;
    [bare(model, VOLUME), through, without]
}

fn asks(way: Way, record: u64, file: u64) -> Vec<Ask> {
    let count = file / record;
    let order: Vec<u64> = match way {
        Way::Forward => (0..count).collect(),
        Way::Backward => (0..count).rev().collect(),
        Way::Stride => (0..17).flat_map(|from| (from..count).step_by(17)).collect(),
    };
    let ask = |at: u64| Ask { op: Op::Read, offset: at * record, length: record };
    order.into_iter().map(ask).collect()
}

/// MiB a second of one who reads a file in records: bare, forebay, forebay without read-ahead.
pub fn rates(model: Model, way: Way, record: u64) -> [f64; 3] {
    // What a small record says of a device it says soon.
    let file = FILE.min(record * 8192);
    setups(model).map(|setup| {
        let mut machine = Machine::new(&setup);
        let tally = run(&mut machine, shared(0, 1, asks(way, record, file)), Nanos::MAX);
        file as f64 / MIB as f64 / tally.seconds()
    })
}

/// One who reads a file, and one beside him who reads blocks of the rest at random.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// MiB a second of the one.
    pub rate: f64,
    /// Reads a second of the other.
    pub random: f64,
    /// What 99 of 100 of these took, in ms.
    pub p99: f64,
}

/// The same with somebody beside him, for as long.
pub fn beside(model: Model, way: Way, record: u64) -> [Beside; 3] {
    setups(model).map(|setup| {
        let mut machine = Machine::new(&setup);
        let mut along = asks(way, record, 2048 * MIB).into_iter().cycle();
        let one = Worker { class: 0, next: Box::new(move || along.next()) };
        let mut random = Worker::random(1, Op::Read, VOLUME / 2, 4096, 7);
        let other = Worker {
            class: 1,
            next: Box::new(move || {
                let ask = (random.next)()?;
                Some(Ask { offset: ask.offset + VOLUME / 2, ..ask })
            }),
        };
        let until = machine.now() + 20 * SECOND;
        let tally = run(&mut machine, vec![one, other], until);
        let rate = tally.classes[0].bytes as f64 / MIB as f64 / tally.seconds();
        Beside { rate, random: tally.rate(1), p99: tally.classes[1].percentile(0.99) }
    })
}
