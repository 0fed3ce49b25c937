// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A hard disk: an arm that seeks, platters that turn, a queue that is served by least positioning time.
//!
//! A command costs a seek of `a + b·√d + c·d` over `d` cylinders (or a switch of heads), for writes the
//! time to settle, the wait until its first sector comes by, and the passing of its sectors. Among the
//! commands in the queue the one that the head reaches first is next (SPTF), unless the oldest has waited too
//! long. What it costs the electronics to take a command shows only when the disk is idle.
//!
//! With the write cache on, writes are answered when they are in the disk's memory and go to the medium in
//! the order of least positioning time as well: while no read waits, or when the memory is full. A flush is a
//! drain window, as ATA has it: nothing that came after it begins, everything before it ends, the memory is
//! emptied, then it is answered.
//!
//! After a read the head reads on while nothing else is to be done; a sequential reader with one command
//! at a time therefore loses no turn.
//!
//! The form of the seek time: C. Ruemmler, J. Wilkes, "An introduction to disk drive modeling", IEEE
//! Computer 27(3), 1994.

mod geometry;

use crate::{Command, Disk, Done, Kind, Nanos};
pub use geometry::{Geometry, Place, SECTOR_BYTES};

/// What a disk is like. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Of one turn.
    pub turn: Nanos,
    /// Tracks of a cylinder.
    pub heads: u64,
    /// Tracks of a surface.
    pub cylinders: u64,
    /// Sectors of 512 bytes of the outermost track.
    pub sectors_outer: u64,
    /// And of the innermost.
    pub sectors_inner: u64,
    /// Seek over `d` cylinders: `a + b·√d + c·d`.
    pub seek: [f64; 3],
    /// From one head to another.
    pub head_switch: Nanos,
    /// For a command that comes to an idle disk.
    pub overhead: Nanos,
    /// What writes add to a short seek, and to one of more than [`Spec::settle_far_cylinders`].
    pub settle: [f64; 2],
    /// From here on a seek is a long one.
    pub settle_far_cylinders: u64,
    /// Commands among which the disk chooses.
    pub queue_depth: usize,
    /// A command that is older goes first.
    pub age_max: Nanos,
    /// Writes that the disk's memory holds; 0 turns the write cache off.
    pub cache_count: usize,
    /// Bytes of the disk's memory.
    pub memory_bytes: u64,
    /// Bytes a second between the disk's memory and the host.
    pub link_rate: u64,
}

/// A command in the queue or in the write cache.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    command: Command,
    since: Nanos,
    sector: u64,
    count: u64,
}

impl Waiting {
    fn end(&self) -> u64 {
        self.sector + self.count
    }
}

/// What the arm is doing.
#[derive(Clone, Copy, Debug)]
struct Active {
    waiting: Waiting,
    ends: Nanos,
    /// It was answered when it entered the cache.
    is_answered: bool,
}

/// Reading on behind a read.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    /// What is in memory begins here.
    first: u64,
    /// The head was here ...
    from: u64,
    /// ... at this time.
    since: Nanos,
}

/// A hard disk.
#[derive(Debug)]
pub struct Hdd {
    spec: Spec,
    geometry: Geometry,
    /// In the order in which they came.
    queue: Vec<Waiting>,
    /// Writes that were answered, in the order in which they came.
    cache: Vec<Waiting>,
    cache_bytes: u64,
    active: Option<Active>,
    /// Where the head is.
    cylinder: u64,
    track: u64,
    /// Sector behind the last that passed.
    behind: u64,
    /// The arm is free from here on.
    free: Nanos,
    /// The link is.
    link_free: Nanos,
    ahead: Option<Ahead>,
    /// Answers that are known before their time.
    answers: Vec<Done>,
}

impl Hdd {
    /// A disk at rest.
    pub fn new(spec: Spec) -> Hdd {
        Hdd {
            geometry: Geometry::new(&spec),
            spec,
            queue: Vec::new(),
            cache: Vec::new(),
            cache_bytes: 0,
            active: None,
            cylinder: 0,
            track: 0,
            behind: 0,
            free: 0,
            link_free: 0,
            ahead: None,
            answers: Vec::new(),
        }
    }

    /// Its bytes.
    pub fn size_bytes(&self) -> u64 {
        self.geometry.sector_count() * SECTOR_BYTES
    }

    /// Nanoseconds from `now` until the first sector of `waiting` comes by.
    fn positioning(&self, now: Nanos, waiting: &Waiting) -> f64 {
        let place = self.geometry.place(waiting.sector);
        let distance = place.cylinder.abs_diff(self.cylinder);
        let mut moving = if distance > 0 {
            let [a, b, c] = self.spec.seek;
            let d = distance as f64;
            a + b * d.sqrt() + c * d
        } else if place.track != self.track {
            self.spec.head_switch as f64
        } else {
            0.0
        };
        if distance > 0 && waiting.command.kind == Kind::Write && waiting.sector != self.behind {
            let far = self.spec.settle_far_cylinders;
            let part = distance.min(far) as f64 / far as f64;
            let [short, long] = self.spec.settle;
            moving += short + (long - short) * part;
        }
        let turn = self.spec.turn as f64;
        let there = (now as f64 + moving) / turn;
        let angle = there - (there as u64) as f64;
        let mut wait = self.geometry.angle(place) - angle;
        if wait < 0.0 {
            wait += 1.0;
        }
        // The sector that is just under the head: no turn is lost to rounding.
        if wait > 1.0 - 1e-4 {
            wait = 0.0;
        }
        moving + wait * turn
    }

    /// The end of the commands that may be served: the queue's depth, or the first flush.
    fn window(&self) -> usize {
        let depth = self.queue.len().min(self.spec.queue_depth);
        let flush = self.queue[..depth].iter().position(|it| it.command.kind == Kind::Flush);
        flush.unwrap_or(depth)
    }

    /// Takes writes into the disk's memory while there is room.
    fn admit(&mut self, now: Nanos) {
        let mut at = 0;
        while at < self.window() && self.spec.cache_count > 0 {
            let waiting = self.queue[at];
            let bytes = waiting.command.bytes;
            let has_room = self.cache.is_empty()
                || self.cache.len() < self.spec.cache_count
                    && self.cache_bytes + bytes <= self.spec.memory_bytes;
            if waiting.command.kind != Kind::Write || !has_room {
                at += 1;
                continue;
            }
            self.queue.remove(at);
            self.cache_bytes += bytes;
            self.cache.push(waiting);
            let answered = self.through_link(now.max(waiting.since), bytes);
            self.answers.push(Done { id: waiting.command.id, at: answered });
        }
    }

    /// When `bytes` that are there at `from` have passed the link.
    fn through_link(&mut self, from: Nanos, bytes: u64) -> Nanos {
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.spec.link_rate);
        self.link_free = self.link_free.max(from) + takes as Nanos;
        self.link_free + self.spec.overhead
    }

    /// How far the head has read on until `now`.
    fn read_on(&self, ahead: Ahead, now: Nanos) -> u64 {
        let passed = self.geometry.passed(ahead.from, now.saturating_sub(ahead.since) as f64);
        ahead.from + passed.min(self.spec.memory_bytes / 2 / SECTOR_BYTES)
    }

    /// Begins the next command, if the arm is free and there is one.
    fn begin(&mut self, now: Nanos) {
        while self.active.is_none() {
            self.admit(now);
            if !self.serve_from_memory(now) && !self.flushed(now) {
                return self.choose(now);
            }
        }
    }

    /// Ends a flush that everything else waits for, if the memory is empty. True if so.
    fn flushed(&mut self, now: Nanos) -> bool {
        let is_next = self.queue.first().is_some_and(|it| it.command.kind == Kind::Flush);
        if !is_next || !self.cache.is_empty() {
            return false;
        }
        let flush = self.queue.remove(0);
        let at = now.max(flush.since) + self.spec.overhead;
        self.answers.push(Done { id: flush.command.id, at });
        true
    }

    /// Takes what the head reaches first. What is in the disk's memory waits while reads do, unless a write
    /// waits for room there.
    fn choose(&mut self, now: Nanos) {
        let is_cached = self.spec.cache_count > 0;
        let for_arm = |it: &Waiting| !is_cached || it.command.kind == Kind::Read;
        let window = &self.queue[..self.window()];
        let is_old = |it: &Waiting| now.saturating_sub(it.since) > self.spec.age_max;
        let mut best: Option<(f64, bool, usize)> = None;
        let mut offer = |cost: f64, cached: bool, at: usize| {
            if best.is_none_or(|best| cost < best.0) {
                best = Some((cost, cached, at));
            }
        };
        if let Some(at) = window.iter().position(|it| for_arm(it) && is_old(it)) {
            offer(0.0, false, at);
        } else {
            for (at, waiting) in window.iter().enumerate().filter(|(_, it)| for_arm(it)) {
                offer(self.positioning(now, waiting), false, at);
            }
            if !window.iter().any(for_arm) || !window.iter().all(for_arm) {
                for (at, waiting) in self.cache.iter().enumerate() {
                    offer(self.positioning(now, waiting), true, at);
                }
            }
        }
        let Some((_, cached, at)) = best else { return };
        let waiting = if cached { self.cache[at] } else { self.queue.remove(at) };
        // The electronics take a command while another is served; only an idle disk shows it.
        let start = now.max(self.free);
        let start = if cached { start } else { start.max(waiting.since + self.spec.overhead) };
        let cost = self.positioning(start, &waiting);
        let pass = self.geometry.transfer(waiting.sector, waiting.count);
        let ends = start + (cost + pass) as Nanos;
        self.ahead = None;
        self.active = Some(Active { waiting, ends, is_answered: cached });
    }

    /// Serves one read from the disk's memory, if one can be. True if so.
    fn serve_from_memory(&mut self, now: Nanos) -> bool {
        for at in 0..self.window() {
            let waiting = self.queue[at];
            if waiting.command.kind != Kind::Read {
                continue;
            }
            let within = |it: &Waiting| it.sector <= waiting.sector && it.end() >= waiting.end();
            if self.cache.iter().any(within) {
                self.queue.remove(at);
                let done = self.through_link(now.max(waiting.since), waiting.command.bytes);
                self.answers.push(Done { id: waiting.command.id, at: done });
                return true;
            }
            let Some(ahead) = self.ahead else { continue };
            let start = now.max(waiting.since + self.spec.overhead);
            let reached = self.read_on(ahead, start);
            if waiting.sector < ahead.first || waiting.sector > reached {
                continue;
            }
            self.queue.remove(at);
            if waiting.end() <= reached {
                let done = self.through_link(start, waiting.command.bytes);
                self.answers.push(Done { id: waiting.command.id, at: done });
                return true;
            }
            // The head is on its way there.
            let on_medium = self.geometry.transfer(ahead.from, waiting.end() - ahead.from) as Nanos;
            let ends = start.max(ahead.since + on_medium);
            self.active = Some(Active { waiting, ends, is_answered: false });
            return true;
        }
        false
    }

    /// The arm has done what it was doing.
    fn end(&mut self, active: Active, done: &mut Vec<Done>) {
        let Active { waiting, ends, is_answered } = active;
        let last = self.geometry.place(waiting.end() - 1);
        (self.cylinder, self.track) = (last.cylinder, last.track);
        self.behind = waiting.end();
        self.free = ends;
        if is_answered {
            let same =
                |it: &Waiting| it.command.id == waiting.command.id && it.since == waiting.since;
            if let Some(at) = self.cache.iter().position(same) {
                self.cache.remove(at);
                self.cache_bytes -= waiting.command.bytes;
            }
        } else {
            done.push(Done { id: waiting.command.id, at: ends });
        }
        if waiting.command.kind == Kind::Read {
            self.ahead = Some(Ahead { first: waiting.sector, from: waiting.end(), since: ends });
        }
    }
}

impl Disk for Hdd {
    fn submit(&mut self, now: Nanos, command: Command) {
        let sector = command.offset / SECTOR_BYTES;
        let end = (command.offset + command.bytes).div_ceil(SECTOR_BYTES);
        let count = (end - sector).max(1);
        self.queue.push(Waiting { command, since: now, sector, count });
        if self.active.is_none() {
            self.begin(now.max(self.free));
        } else {
            self.admit(now);
        }
    }

    fn next(&self) -> Option<Nanos> {
        let answers = self.answers.iter().map(|done| done.at);
        answers.chain(self.active.map(|active| active.ends)).min()
    }

    fn advance(&mut self, now: Nanos, done: &mut Vec<Done>) {
        let from = done.len();
        while let Some(active) = self.active.filter(|active| active.ends <= now) {
            self.active = None;
            self.end(active, done);
            self.begin(active.ends);
        }
        let mut at = 0;
        while at < self.answers.len() {
            if self.answers[at].at <= now {
                done.push(self.answers.swap_remove(at));
            } else {
                at += 1;
            }
        }
        done[from..].sort_by_key(|done| done.at);
    }
}
