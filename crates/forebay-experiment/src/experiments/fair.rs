// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Nobody starves: random readers against random writers, the cache blown out.
//!
//! Readers at depth 1, 4 and 16 and 32 writers, each of 4 KiB but in [`sized`], over four times the cache, which is full of dirty
//! data when the measurement begins. x is a side's rate over its rate alone; F = 2·min(x_r, x_w) is 1 if each gets
//! half, U = x_r + x_w is 1 if nothing is lost by sharing. Some of what is read is in the cache because it was written, so x_r
//! is also counted by the reads that the backing device answers. The same workers on the bare disk show what is to be mended.

use super::{SECOND, bare, cached, unordered};
use crate::load::{WRITE, Worker, run};
use crate::machine::{Machine, Setup};
use forebay_core::policy::slices::Sharing;
use forebay_core::request::Op;
use forebay_disk::Model;
use forebay_disk::cloud::Spec as Cloud;
use forebay_disk::model::{BARRACUDA_7200_12, GP3};

pub(super) const CACHE_BYTES: u64 = 256 << 20;
const SPAN: u64 = 4 * CACHE_BYTES;
/// Measured for this long, after so long.
pub(super) const WARM: u64 = 120 * SECOND;
/// After so long where what is read is copied: one reader of a disk who has it alone takes that long to fill the cache.
const WARM_WITH_COPIES: u64 = 480 * SECOND;
pub(super) const MEASURED: u64 = 240 * SECOND;
pub(super) const WRITERS: usize = 32;

/// Reads and writes a second.
#[derive(Clone, Copy, Debug)]
pub struct Sides {
    /// Alone.
    pub alone: [f64; 2],
    /// Together.
    pub together: [f64; 2],
}

impl Sides {
    /// Shares of reads and writes.
    pub fn shares(&self) -> [f64; 2] {
        [self.together[0] / self.alone[0], self.together[1] / self.alone[1]]
    }

    /// F.
    pub fn fairness(&self) -> f64 {
        let [reads, writes] = self.shares();
        2.0 * reads.min(writes)
    }

    /// U.
    pub fn efficiency(&self) -> f64 {
        self.shares().iter().sum()
    }

    /// The columns of a table.
    pub fn rates(&self) -> String {
        let Sides { alone: [r, w], together: [both_r, both_w] } = self;
        format!("{r:8.1} {w:9.1} {both_r:8.1} {both_w:9.1}")
    }
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Readers.
    pub readers: usize,
    /// What is read is copied into the cache, as it is by default.
    pub copies: bool,
    /// Of guests, against write-back.
    pub weight: u8,
    /// Milliseconds that 99 of 100 reads of the backing device may take; 0: none is set.
    pub target: u32,
    /// Reads and writes.
    pub sides: Sides,
    /// Reads of the backing device a second, alone and together.
    pub missed: [f64; 2],
    /// Half of the reads take no longer, together, in milliseconds.
    pub read_p50: f64,
    /// Of reads, alone and together, in milliseconds.
    pub read_p99: [f64; 2],
    /// The longest of them.
    pub read_longest: [f64; 2],
    /// Of writes, together, in milliseconds.
    pub write_p99: f64,
    /// Seconds of the device that guests and write-back had while the other waited.
    pub had: [f64; 2],
    /// Milliseconds of a slice, at the end.
    pub slice: f64,
    /// Of the reads that a target counts, the part that was late.
    pub late: f64,
}

impl Row {
    /// x_r of the reads that the device answers.
    pub fn device_share(&self) -> f64 {
        self.missed[1] / self.missed[0]
    }

    /// F and U by the reads that the device answers.
    pub fn by_device(&self) -> [f64; 2] {
        let (reads, writes) = (self.device_share(), self.sides.shares()[1]);
        [2.0 * reads.min(writes), reads + writes]
    }

    /// What of the device reads have over what writes have.
    pub fn by_rate(&self) -> f64 {
        self.device_share() / self.sides.shares()[1]
    }

    /// The same by time.
    pub fn by_time(&self) -> f64 {
        self.had[0] / self.had[1]
    }
}

/// A run.
#[derive(Clone, Copy, Debug)]
struct Run {
    rates: [f64; 2],
    missed: f64,
    read_p50: f64,
    p99: [f64; 2],
    longest: f64,
    sharing: [Sharing; 2],
}

/// What a read and a write ask for, in bytes.
const SMALL: [u64; 2] = [4096; 2];

/// What workers warm up with, and what is measured. They ask for other places: what was read while all warmed up would else be read again
/// in the same order, and be in the cache if it was copied.
#[derive(Clone, Copy)]
enum Turn {
    Measured = 0,
    Warm = 1,
}

fn all([readers, writers]: [usize; 2], [read, write]: [u64; 2], turn: Turn) -> Vec<Worker> {
    let workers = |class: usize, op, count, bytes| {
        let seed = move |at| (turn as usize * 1_000_000 + class * 1_000 + at) as u64;
        (0..count).map(move |at| Worker::random(class, op, SPAN, bytes, seed(at)))
    };
    let idle = Worker { class: 1, next: Box::new(|| None) };
    let reads = workers(0, Op::Read, readers, read);
    reads.chain(workers(1, WRITE, writers, write)).chain([idle]).collect()
}

fn setup(backing: Model, copies: bool, weight: u8, target: u32) -> Setup {
    let mut setup = cached(backing, SPAN, CACHE_BYTES);
    if !copies {
        // Readers who find more and more in the cache do not share the disk.
        setup.config.fill_run_max = 0;
    }
    (setup.weight, setup.p99_target) = (weight, target * 1_000);
    setup
}

fn measure(setup: &Setup, workers: [usize; 2], bytes: [u64; 2]) -> Run {
    let mut machine = Machine::new(setup);
    let copies = setup.config.fill_run_max > 0;
    let warm = if copies { WARM_WITH_COPIES } else { WARM };
    run(&mut machine, all(workers, bytes, Turn::Warm), warm);
    let sharing = |machine: &Machine| machine.sharing().expect("there is a cache");
    let (before, missed) = (sharing(&machine), machine.stats().miss_blocks);
    let tally = run(&mut machine, all(workers, bytes, Turn::Measured), warm + MEASURED);
    let p99 = [0, 1].map(|class| tally.classes[class].percentile(0.99));
    let read_p50 = tally.classes[0].percentile(0.5);
    let missed = (machine.stats().miss_blocks - missed) as f64 / (MEASURED / SECOND) as f64;
    let rates = [tally.rate(0), tally.rate(1)];
    let longest = tally.classes[0].percentile(1.0);
    Run { rates, missed, read_p50, p99, longest, sharing: [before, sharing(&machine)] }
}

/// What a side has alone.
struct Alone {
    backing: Model,
    copies: bool,
    readers: usize,
    bytes: [u64; 2],
    reads: Run,
    writes: f64,
}

impl Alone {
    fn row(&self, weight: u8, target: u32) -> Row {
        let Alone { backing, copies, readers, bytes, reads, writes } = self;
        let setup = setup(*backing, *copies, weight, target);
        let run = measure(&setup, [*readers, WRITERS], *bytes);
        let [before, after] = run.sharing;
        let had = |side| (after.had[side] - before.had[side]) as f64 / 1e9;
        let counted = |sharing: Sharing| sharing.target.map_or((0, 0), |it| (it.reads, it.late));
        let ((reads_before, late_before), (reads_after, late_after)) =
            (counted(before), counted(after));
        let [read_p99, write_p99] = run.p99;
        Row {
            readers: *readers,
            copies: *copies,
            weight,
            target,
            sides: Sides { alone: [reads.rates[0], *writes], together: run.rates },
            missed: [reads.missed, run.missed],
            read_p50: run.read_p50,
            read_p99: [reads.p99[0], read_p99],
            read_longest: [reads.longest, run.longest],
            write_p99,
            had: [had(0), had(1)],
            slice: after.slice as f64 / 1e6,
            late: (late_after - late_before) as f64 / (reads_after - reads_before).max(1) as f64,
        }
    }
}

fn alone(backing: Model, copies: bool, readers: &[usize], bytes: [u64; 2]) -> Vec<Alone> {
    let setup = setup(backing, copies, 1, 0);
    let writes = measure(&setup, [0, WRITERS], bytes).rates[1];
    let alone = |readers: &usize| {
        let reads = measure(&setup, [*readers, 0], bytes);
        Alone { backing, copies, readers: *readers, bytes, reads, writes }
    };
    readers.iter().map(alone).collect()
}

/// Two disks, and a volume behind a network; the same with answers that are quick as long as it is not asked for
/// more than it gives; the newer disk without a queue.
pub fn disks() -> [(&'static str, Model); 5] {
    let quick = Cloud { median: 300_000, p99: 1_000_000, ..GP3 };
    let quick = ("gp3, quick", Model::Cloud(quick));
    let [gp3, old, new] = super::disks();
    [old, new, gp3, quick, ("no queue", unordered(BARRACUDA_7200_12))]
}

/// Of these, those that are asked about weights and about targets, in milliseconds.
pub fn shared() -> [(&'static str, Model, [u32; 3]); 3] {
    let [old, new, gp3, ..] = disks();
    [(old.0, old.1, [50, 100, 200]), (new.0, new.1, [50, 100, 200]), (gp3.0, gp3.1, [10, 20, 40])]
}

/// The table of a disk.
pub fn table(backing: Model, copies: bool) -> Vec<Row> {
    alone(backing, copies, &[1, 4, 16], SMALL).iter().map(|alone| alone.row(1, 0)).collect()
}

/// The same workers on the bare disk.
#[derive(Clone, Copy, Debug)]
pub struct Bare {
    /// Readers.
    pub readers: usize,
    /// Reads and writes.
    pub sides: Sides,
    /// Of reads, together, in milliseconds: half of them take no longer, 99 of 100.
    pub read_latencies: [f64; 2],
}

/// The table of a bare disk.
pub fn bare_table(backing: Model) -> Vec<Bare> {
    let measure = |readers, writers| {
        let mut machine = Machine::new(&bare(backing, SPAN));
        run(&mut machine, all([readers, writers], SMALL, Turn::Warm), WARM);
        run(&mut machine, all([readers, writers], SMALL, Turn::Measured), WARM + MEASURED)
    };
    let writes = measure(0, WRITERS).rate(1);
    let row = |readers| {
        let reads = measure(readers, 0).rate(0);
        let both = measure(readers, WRITERS);
        let sides = Sides { alone: [reads, writes], together: [both.rate(0), both.rate(1)] };
        let read_latencies = [0.5, 0.99].map(|share| both.classes[0].percentile(share));
        Bare { readers, sides, read_latencies }
    };
    [1, 4, 16].map(row).into()
}

/// The table of a volume behind a network, whose operations and whose bytes a second are bounded each by itself: by how much a read and a
/// write ask for.
pub fn sized() -> Vec<([u64; 2], Row)> {
    let sizes = [SMALL, [4 << 10, 256 << 10], [256 << 10, 4 << 10], [256 << 10; 2]];
    let rows = |bytes| {
        let alone = alone(Model::Cloud(GP3), false, &[4, 16], bytes);
        alone.into_iter().map(move |alone| (bytes, alone.row(1, 0)))
    };
    sizes.into_iter().flat_map(rows).collect()
}

/// One row of it.
pub fn sized_row(bytes: [u64; 2], readers: usize) -> Row {
    alone(Model::Cloud(GP3), false, &[readers], bytes)[0].row(1, 0)
}

/// One row: so many readers, a weight of guests and a target for reads, in milliseconds.
pub fn row(backing: Model, readers: usize, weight: u8, target: u32) -> Row {
    alone(backing, false, &[readers], SMALL)[0].row(weight, target)
}

/// One row, with what is read copied into the cache.
pub fn row_with_copies(backing: Model, readers: usize) -> Row {
    alone(backing, true, &[readers], SMALL)[0].row(1, 0)
}

/// The table of a disk by weights.
pub fn weighted(backing: Model) -> Vec<Row> {
    let rows = |alone: &Alone| [1, 3, 8].map(|weight| alone.row(weight, 0));
    alone(backing, false, &[4, 16], SMALL).iter().flat_map(rows).collect()
}

/// The table of a disk by targets for reads.
pub fn targeted(backing: Model, targets: &[u32]) -> Vec<Row> {
    let rows = |alone: &Alone| targets.iter().map(|it| alone.row(1, *it)).collect::<Vec<Row>>();
    alone(backing, false, &[1, 4, 16], SMALL).iter().flat_map(rows).collect()
}
