// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loads of one kind of command, so many at a time, and how long they took.

use forebay_disk::{Command, Disk, Done, Kind, Model, Nanos};

/// In which order commands come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Order {
    /// Uniformly random, each place at most once.
    Random,
    /// The same places, ascending.
    Sorted,
    /// One behind the other.
    Sequential,
}

/// A load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    /// Of each command.
    pub(crate) kind: Kind,
    /// Of each command.
    pub(crate) bytes: u64,
    /// Commands at a time.
    pub(crate) depth: usize,
    /// In which order.
    pub(crate) order: Order,
    /// Commands in all.
    pub(crate) count: u64,
    /// Bytes of the disk that are used; None is all of it.
    pub(crate) span: Option<u64>,
    /// Where they begin, of the disk's size, from 0 to 1.
    pub(crate) at: u64,
}

/// What it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Took {
    /// Commands.
    pub(crate) count: u64,
    /// Bytes.
    pub(crate) bytes: u64,
    /// In all.
    pub(crate) nanos: Nanos,
}

impl Took {
    /// Commands a second.
    pub(crate) fn per_second(&self) -> f64 {
        self.count as f64 * 1e9 / self.nanos as f64
    }

    /// Megabytes (10⁶) a second.
    pub(crate) fn megabytes(&self) -> f64 {
        self.bytes as f64 * 1e3 / self.nanos as f64
    }

    /// Milliseconds a command.
    pub(crate) fn millis(&self) -> f64 {
        self.nanos as f64 / 1e6 / self.count as f64
    }
}

/// Bytes of a model's disk.
pub(crate) fn size_bytes(model: Model) -> u64 {
    match model {
        Model::Hdd(spec) => forebay_disk::hdd::Hdd::new(spec).size_bytes(),
        _ => 256 << 30,
    }
}

/// Runs a load on a disk of its own.
pub(crate) fn closed_loop(model: Model, pattern: Pattern) -> Took {
    let span = pattern.span.unwrap_or(size_bytes(model));
    let mut places = Vec::new();
    let mut random = 88_172_645_463_325_252u64;
    for at in 0..pattern.count {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let place = match pattern.order {
            Order::Sequential => at,
            _ => random % (span / pattern.bytes),
        };
        places.push(pattern.at + place * pattern.bytes);
    }
    if pattern.order == Order::Sorted {
        places.sort_unstable();
        places.dedup();
    }
    run(model.disk().as_mut(), pattern, &places)
}

/// Runs a load of these places.
pub(crate) fn run(disk: &mut dyn Disk, pattern: Pattern, places: &[u64]) -> Took {
    let Pattern { kind, bytes, depth, .. } = pattern;
    let mut now = 0;
    let mut done: Vec<Done> = Vec::new();
    let (mut next, mut under_way) = (0, 0);
    while next < places.len() || under_way > 0 {
        while under_way < depth && next < places.len() {
            disk.submit(now, Command { id: next as u64, kind, offset: places[next], bytes });
            next += 1;
            under_way += 1;
        }
        now = disk.next().expect("something is under way");
        done.clear();
        disk.advance(now, &mut done);
        under_way -= done.len();
    }
    let flush = Command { id: u64::MAX, kind: Kind::Flush, offset: 0, bytes: 0 };
    if kind == Kind::Write {
        disk.submit(now, flush);
        done.clear();
        while done.is_empty() {
            now = disk.next().expect("the flush is under way");
            disk.advance(now, &mut done);
        }
    }
    Took { count: places.len() as u64, bytes: places.len() as u64 * bytes, nanos: now }
}

/// How long each of so many commands takes that come at this distance, sorted.
pub(crate) fn services(model: Model, kind: Kind, count: u64, distance: Nanos) -> Vec<Nanos> {
    let mut disk = model.disk();
    let mut done: Vec<Done> = Vec::new();
    for id in 0..count {
        disk.advance(id * distance, &mut done);
        disk.submit(id * distance, Command { id, kind, offset: id * 4096, bytes: 4096 });
    }
    disk.advance(Nanos::MAX, &mut done);
    let mut took: Vec<Nanos> = done.iter().map(|done| done.at - done.id * distance).collect();
    took.sort_unstable();
    took
}

/// Random writes of 4 KiB a second by one that has each flushed before the next.
pub(crate) fn flushed_writes(model: Model) -> f64 {
    let mut disk = model.disk();
    let (mut now, mut done) = (0, Vec::new());
    let count = 500;
    for at in 0..count {
        for (id, kind, bytes) in [(2 * at, Kind::Write, 4096), (2 * at + 1, Kind::Flush, 0)] {
            let offset = at * 7_919 % 1_000_000 * bytes;
            disk.submit(now, Command { id, kind, offset, bytes });
            while done.len() as u64 <= id {
                now = disk.next().expect("it is under way");
                disk.advance(now, &mut done);
            }
        }
    }
    count as f64 * 1e9 / now as f64
}
