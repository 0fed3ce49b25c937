// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests for a machine: workers that each keep one request under way, as programs do that wait for
//! their answer.

use crate::machine::{Machine, REQUEST_BYTES};
use crate::random::Random;
use crate::tally::Tally;
use forebay_core::request::Op;
use forebay_disk::Nanos;
use std::collections::{HashMap, VecDeque};

/// Plain writes.
pub const WRITE: Op = Op::Write { fua: false };

/// What a worker asks for next.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// What to do.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// How many; more than [`REQUEST_BYTES`] are several requests at once, answered with the last.
    pub length: u64,
}

/// One that asks, waits, and asks again.
pub struct Worker {
    /// Under which its requests are counted.
    pub class: usize,
    /// What comes next; None when it is through.
    pub next: Box<dyn FnMut() -> Option<Ask>>,
}

impl Worker {
    /// One that goes through `asks`.
    pub fn through(class: usize, asks: impl Iterator<Item = Ask> + 'static) -> Worker {
        let mut asks = asks;
        Worker { class, next: Box::new(move || asks.next()) }
    }

    /// One that asks for random places of `span` bytes for ever.
    pub fn random(class: usize, op: Op, span: u64, length: u64, seed: u64) -> Worker {
        let mut random = Random::new(seed);
        let place = move || Some(Ask { op, offset: random.below(span / length) * length, length });
        Worker { class, next: Box::new(place) }
    }
}

/// As many workers that share one list, each taking what comes next.
pub fn shared(class: usize, depth: usize, asks: Vec<Ask>) -> Vec<Worker> {
    let list = std::rc::Rc::new(std::cell::RefCell::new(asks.into_iter()));
    let worker = |_| {
        let list = std::rc::Rc::clone(&list);
        Worker { class, next: Box::new(move || list.borrow_mut().next()) }
    };
    (0..depth).map(worker).collect()
}

/// What of a worker is under way.
struct Flight {
    worker: usize,
    since: Nanos,
    bytes: u64,
    parts: u32,
}

/// Runs workers until all are through, or until a time; what is under way then is waited for and not counted.
pub fn run(machine: &mut Machine, workers: Vec<Worker>, until: Nanos) -> Tally {
    run_at(machine, workers, until, 0)
}

/// As [`run`], but no worker asks before its turn: turns come at even distances, and who finds one past takes it.
pub fn run_at(
    machine: &mut Machine,
    mut workers: Vec<Worker>,
    until: Nanos,
    distance: Nanos,
) -> Tally {
    let begun = machine.now();
    let mut turn = begun;
    let classes = workers.iter().map(|worker| worker.class + 1).max().unwrap_or(0);
    let mut tally = Tally::new(begun, classes);
    let mut flights: HashMap<usize, Flight> = HashMap::new();
    let mut owners: HashMap<u32, usize> = HashMap::new();
    let mut ready: VecDeque<usize> = (0..workers.len()).collect();
    loop {
        while turn <= machine.now()
            && let Some(worker) = ready.pop_front()
        {
            let Some(ask) = (workers[worker].next)() else { continue };
            let mut parts = 0;
            let mut at = 0;
            while at < ask.length || parts == 0 {
                let length = (ask.length - at).min(REQUEST_BYTES);
                let tag = machine.submit(ask.op, ask.offset + at, length);
                owners.insert(tag, worker);
                (parts, at) = (parts + 1, at + length);
            }
            let flight = Flight { worker, since: machine.now(), bytes: ask.length, parts };
            flights.insert(worker, flight);
            turn += distance;
        }
        if flights.is_empty() && (ready.is_empty() || turn > until) {
            break;
        }
        let next = if ready.is_empty() { Nanos::MAX } else { turn };
        let Some(answered) = machine.step(next).map(<[u32]>::to_vec) else {
            assert!(!ready.is_empty(), "requests are under way");
            machine.idle(turn);
            continue;
        };
        let now = machine.now();
        for tag in answered {
            let worker = owners.remove(&tag).expect("it was asked for");
            let flight = flights.get_mut(&worker).expect("it is under way");
            flight.parts -= 1;
            if flight.parts > 0 {
                continue;
            }
            let flight = flights.remove(&worker).expect("it is under way");
            if now <= until {
                tally.add(workers[flight.worker].class, flight.bytes, flight.since, now);
                ready.push_back(worker);
            }
        }
    }
    tally.end(machine.now().min(until));
    tally
}
