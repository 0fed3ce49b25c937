// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The floors: what the tables must show, said once, for `forebay-experiment --check` and for the tests.
//!
//! A floor that is known to be missed has beside it what was seen: no less than that is let pass, and it is told.

use crate::experiments::flushes::Flushes;
use crate::experiments::records::Load;
use crate::experiments::records::Start::{self, Brim, BrimOfFile};
use crate::experiments::{
    cliff, drained, fair, flushes, misses, parts, quiet, reads, records, write_cache,
};

/// Tests of a file that are known to have less than 0.98 of the bare disk's rate, all of the cache dirty and no batch ended yet, and what was seen
/// (why: docs/decisions/0032).
struct Known {
    disk: &'static str,
    depth: usize,
    start: Start,
    kib: u64,
    tests: &'static [&'static str],
    seen: f64,
}

impl Known {
    fn is(&self, name: &str, load: Load, test: &str) -> bool {
        let asked = (load.depth, load.start, load.record_bytes >> 10);
        name.starts_with(self.disk)
            && asked == (self.depth, self.start, self.kib)
            && self.tests.contains(&test)
    }
}

const IN_ORDER: &[&str] = &["write", "rewrite", "fwrite", "frewrite"];
const FORWARD: &[&str] = &["read", "reread", "fread", "freread"];

const fn known(
    (disk, depth): (&'static str, usize),
    (start, kib): (Start, u64),
    tests: &'static [&'static str],
    seen: f64,
) -> Known {
    Known { disk, depth, start, kib, tests, seen }
}

const KNOWN: [Known; 9] = [
    known(("st3500641as", 32), (Brim, 16 << 10), &["record rewrite"], 0.967),
    known(("st3500641as", 32), (BrimOfFile, 4), IN_ORDER, 0.546),
    known(("st3500641as", 32), (BrimOfFile, 16 << 10), &["random write"], 0.975),
    known(("st3500641as", 32), (BrimOfFile, 16 << 10), &["record rewrite"], 0.966),
    known(("7200.12", 1), (Brim, 1 << 10), &["random write"], 0.978),
    known(("7200.12", 1), (BrimOfFile, 1 << 10), FORWARD, 0.948),
    known(("7200.12", 1), (BrimOfFile, 1 << 10), &["random write"], 0.975),
    known(("7200.12", 32), (BrimOfFile, 4), IN_ORDER, 0.497),
    known(("7200.12", 32), (BrimOfFile, 1 << 10), &["random write"], 0.933),
];

/// What was looked at, and what is less than it must be.
#[derive(Clone, Debug, Default)]
pub struct Floors {
    /// Numbers that were looked at.
    pub count: usize,
    /// What misses its floor.
    pub missed: Vec<String>,
    /// What misses its floor and is known to.
    pub known: Vec<String>,
}

impl Floors {
    /// `have` is no less than `floor`.
    pub fn least(&mut self, what: &str, have: f64, floor: f64) {
        self.least_known(what, have, floor, floor);
    }

    /// `have` is no more than `bound`.
    pub fn most(&mut self, what: &str, have: f64, bound: f64) {
        self.most_known(what, have, bound, bound);
    }

    /// `have` is no less than `floor`, or no less than what was `seen`.
    pub fn least_known(&mut self, what: &str, have: f64, floor: f64, seen: f64) {
        self.count += 1;
        // What is not a number misses every floor.
        if have >= floor {
            return;
        }
        let text = format!("{what}: {have:.3}, at least {floor} is asked");
        if have >= seen { self.known.push(text) } else { self.missed.push(text) }
    }

    /// `have` is no more than `bound`, or no more than what was `seen`.
    pub fn most_known(&mut self, what: &str, have: f64, bound: f64, seen: f64) {
        self.count += 1;
        if have <= bound {
            return;
        }
        let text = format!("{what}: {have:.3}, at most {bound} is asked");
        if have <= seen { self.known.push(text) } else { self.missed.push(text) }
    }

    /// For tests: nothing is missed.
    ///
    /// # Panics
    /// If something is.
    pub fn hold(&self) {
        assert!(self.count > 0, "nothing was looked at");
        assert!(self.missed.is_empty(), "{:#?}", self.missed);
    }

    /// A file that is written and read in records.
    pub fn records(&mut self, name: &str, load: Load, histories: &[records::History; 2]) {
        let [bare, through] = histories;
        let name = format!("{name}, records of {} KiB", load.record_bytes >> 10);
        for (test, rate) in records::TESTS.into_iter().zip(records::rates(histories)) {
            if load.relaxed {
                let seen = KNOWN.iter().find(|known| known.is(&name, load, test));
                let seen = seen.map_or(0.98, |known| known.seen);
                self.least_known(&format!("{name}, {test}"), rate, 0.98, seen);
            } else if test == "record rewrite" {
                self.least(&format!("{name}, {test}"), rate, 2.0);
            }
        }
        if load.start == records::Start::AsItIs {
            let whole = through.total() / bare.total();
            self.most(&format!("{name}, the whole history"), whole, 1.02);
        }
    }

    /// Random writes that are drained: the disk one at a time and with its queue, forebay.
    pub fn drained(&mut self, rows: &[drained::Row; 3]) {
        let [one, queued, forebay] = rows;
        let name = format!("{}, 64 MiB over {}", forebay.disk, forebay.span);
        let small = forebay.span == "64 MiB";
        if small {
            self.most(&format!("{name}, seconds to drain"), forebay.drained, 2.5);
        }
        let [alone, deep] = if small { [30.0, 9.0] } else { [2.5, 1.5] };
        let over = |row: &drained::Row| row.total() / forebay.total();
        self.least(&format!("{name}, over one at a time"), over(one), alone);
        self.least(&format!("{name}, over a queue of 32"), over(queued), deep);
    }

    /// Random writes to the file of twice the cache, drained: the disk one at a time and with its queue, forebay the same two.
    pub fn file_drained(&mut self, rows: &[drained::Row; 4]) {
        let [one, queued, through_one, through] = rows;
        let name = format!("{}, random writes of 4 KiB to a file, drained", one.disk);
        for (depth, row) in [(1, through_one), (32, through)] {
            let over = |bare: &drained::Row| bare.total() / row.total();
            self.least(&format!("{name}, {depth} at a time, over one at a time"), over(one), 2.5);
            self.least(&format!("{name}, {depth} at a time, over NCQ-32"), over(queued), 1.5);
        }
    }

    /// Writes to a disk with its write cache off or on, from an empty cache: never slower, live and drained (P6).
    pub fn write_cache(&mut self, disk: &str, row: &write_cache::Row) {
        let write_cache::Row { depth, write_cache, .. } = row;
        let cache = if *write_cache { "on" } else { "off" };
        let name = format!("{disk}, write cache {cache}, {}, {depth} at a time", row.load.name());
        for (order, (rate, whole)) in
            ["batch", "relaxed"].into_iter().zip(row.rates().into_iter().zip(row.wholes()))
        {
            self.least(&format!("{name}, {order}"), rate, 0.98);
            self.most(&format!("{name}, {order}, the whole history"), whole, 1.02);
        }
    }

    /// Readers against writers.
    pub fn fair(&mut self, disk: &str, row: &fair::Row) {
        let copies = if row.copies { ", with copies" } else { "" };
        let name = format!("{disk}, {} readers{copies}", row.readers);
        let cloud = disk.starts_with("gp3");
        let fairness = if cloud { 0.9 } else { 0.8 };
        self.least(&format!("{name}, F"), row.sides.fairness(), fairness);
        // The disk's queue is empty at the end of each slice of 16 readers. Without copies what they read of the log hides that.
        let low = row.copies && row.readers == 16 && disk == "st3500641as";
        let seen = if low { 0.83 } else { 0.85 };
        self.least_known(&format!("{name}, U"), row.sides.efficiency(), 0.85, seen);
        let [shared, used] = row.by_device();
        self.least(&format!("{name}, F by the device's reads"), shared, fairness);
        self.least(&format!("{name}, U by the device's reads"), used, 0.85);
        let bound = if row.readers == 16 { 650.0 } else { 350.0 };
        self.most(&format!("{name}, reads' p99 in ms"), row.read_p99[1], bound);
        // What a deadline would be: one that the device's own queue holds is 500 ms, too.
        self.most(&format!("{name}, the longest read in ms"), row.read_longest[1], 500.0);
    }

    /// Readers against writers on a volume behind a network, by what they ask for in bytes.
    pub fn sized(&mut self, [read, write]: [u64; 2], row: &fair::Row) {
        let sizes = format!("reads of {} KiB, writes of {} KiB", read >> 10, write >> 10);
        let name = format!("gp3, {} readers, {sizes}", row.readers);
        self.least(&format!("{name}, F"), row.sides.fairness(), 0.9);
        self.least(&format!("{name}, U"), row.sides.efficiency(), 0.85);
    }

    /// A guest that flushes: bare, batch, strict, relaxed.
    pub fn flushes(&mut self, disk: &str, often: Flushes, rows: &[flushes::Row; 4]) {
        let [bare, batch, strict, relaxed] = rows;
        let name = format!("{disk}, flushes: {}", often.name());
        for (order, row) in [("batch", batch), ("relaxed", relaxed)] {
            let rate = row.acknowledged / bare.acknowledged;
            self.least(&format!("{name}, {order}"), rate, 1.0);
        }
        // A batch for each flush of the guest, a flush of the disk for each batch (why: docs/decisions/0018).
        let seen = match (often, disk.starts_with("gp3")) {
            (Flushes::EachWrite, true) => 0.22,
            (Flushes::EachWrite | Flushes::Each(100), false) => 0.43,
            (Flushes::Each(10), false) => 0.95,
            _ => 0.98,
        };
        let rate = strict.acknowledged / bare.acknowledged;
        self.least_known(&format!("{name}, strict"), rate, 0.98, seen);
    }

    /// A cache that is full for long: bare, batch, relaxed.
    pub fn cliff(&mut self, name: &str, courses: &[cliff::Course; 3]) {
        let [bare, batch, relaxed] = courses;
        for (order, course) in [("batch", batch), ("relaxed", relaxed)] {
            let least = course.least() as f64 / bare.rate();
            self.least(&format!("{name}, {order}, the worst second"), least, 0.9);
        }
    }

    /// Misses beside LRU.
    pub fn misses(&mut self, row: &misses::Row) {
        let seen = match (row.workload.as_str(), row.percent) {
            ("zipf 0.9, 30 % writes", 5) => 1.02,
            ("zipf 0.9, 30 % writes", 10) => 1.06,
            ("zipf 0.9, 30 % writes", 20) => 1.145,
            // A hundredth of what is touched is too little for any choice: all are the same there.
            (name, 1) if name == "trace" || name.starts_with("made up") => 1.002,
            _ => 1.0,
        };
        let name = format!("{}, {} %, misses over LRU's", row.workload, row.percent);
        self.most_known(&name, row.over_lru(), 1.0, seen);
        // Where more than that is missed for want of choice, not of room.
        let seen = if row.workload == "zipf 0.9, 30 % writes" { 1.003 } else { seen };
        self.most_known(&format!("{name} in a log"), row.over_logged(), 1.0, seen);
    }

    /// What guests of the cache notice of work in the background.
    pub fn quiet(&mut self, name: &str, rows: &[quiet::Row]) {
        for row in &rows[1..] {
            for (class, latencies) in row.latencies.iter().enumerate() {
                let quiet = rows[0].latencies[class][2];
                if quiet > 0.0 {
                    let what = ["reads", "writes", "durable writes"][class];
                    let name = format!("{name}, {}, p99.9 of {what}", row.doing.name());
                    self.most(&name, latencies[2] / quiet, 2.0);
                }
            }
        }
    }

    /// Long reads of what is in the cache in part.
    pub fn parts(&mut self, row: &parts::Row) {
        let parts::Row { disk, record, percent, depth, .. } = row;
        let name =
            format!("{disk}, {} KiB, {percent} % in the cache, {depth} at a time", record >> 10);
        // What is in the holes is read after the rest: a tenth of a millisecond more where nothing else is read meanwhile.
        let alone = *disk == "gp3" && *record == 64 << 10 && *depth == 1;
        self.least_known(&name, row.ratio(), 0.98, if alone { 0.9 } else { 0.98 });
    }

    /// Reads of what is in the cache, and of what is not.
    pub fn reads(&mut self, row: &reads::Row) {
        let name = format!("{}, {}, {} at a time", row.disk, row.cache, row.depth);
        self.least(&format!("{name}, warm"), row.warm[1] / row.warm[0], 0.9);
        self.least(&format!("{name}, not cached"), row.cold[1] / row.cold[0], 0.98);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_below_its_floor_is_missed_unless_it_is_known() {
        let mut floors = Floors::default();
        floors.least("a", 1.0, 1.0);
        floors.most("b", 1.0, 1.0);
        assert!(floors.missed.is_empty());
        floors.least("c", 0.999, 1.0);
        floors.most("d", 1.001, 1.0);
        floors.least("e", f64::NAN, 1.0);
        assert_eq!(floors.missed.len(), 3);
        floors.least_known("f", 0.95, 1.0, 0.9);
        floors.most_known("g", 1.05, 1.0, 1.1);
        assert_eq!((floors.missed.len(), floors.known.len()), (3, 2));
        floors.least_known("h", 0.89, 1.0, 0.9);
        assert_eq!((floors.missed.len(), floors.count), (4, 8));
    }

    #[test]
    fn a_cell_that_is_known_to_miss_lets_no_other_pass() {
        let even = records::History { seconds: [1.0; 13], drained: 0.0 };
        let missed = |name, depth, test: &str, rate: f64| {
            let load = Load {
                start: BrimOfFile,
                depth,
                file_bytes: 512 << 20,
                record_bytes: 1 << 20,
                relaxed: true,
            };
            let mut slow = even.clone();
            let at = records::TESTS.iter().position(|it| *it == test).unwrap();
            slow.seconds[at] = 1.0 / rate;
            let mut floors = Floors::default();
            floors.records(name, load, &[even.clone(), slow]);
            (floors.known.len(), floors.missed.len())
        };
        assert_eq!(missed("7200.12, 32 at a time", 32, "random write", 0.934), (1, 0));
        assert_eq!(missed("7200.12, 32 at a time", 32, "random write", 0.932), (0, 1));
        assert_eq!(missed("7200.12, 32 at a time", 32, "rewrite", 0.97), (0, 1));
        assert_eq!(missed("7200.12, 1 at a time", 1, "random write", 0.934), (0, 1));
        assert_eq!(missed("st3500641as, 32 at a time", 32, "random write", 0.97), (0, 1));
    }
}
