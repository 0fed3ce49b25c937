// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a seed chooses before anything runs: sizes, settings, what goes wrong and when.

use crate::device::Discard;
use crate::random::Random;
use forebay_core::engine::{Acknowledge, Config};
use forebay_core::format::superblock::{Mode, NewCache, Order, Superblock, Volume, WEIGHT_MAX};
use forebay_core::mutant::Mutants;
use forebay_core::policy::reserve::{Reserve, SEGMENTS_EACH_MIN, resolve};

/// Segments of a cache, at first and after it was resized.
pub const SEGMENTS: (u32, u32) = (18, 32);
/// Of one that has many: the map and the table of slots take several writes of a checkpoint each, and an opening looks at more headers
/// than it reads at once.
pub const MANY_SEGMENTS: (u32, u32) = (270, 900);
/// Volumes, where there are many.
pub const CROWD: (u64, u64) = (8, 20);

const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;
/// Operations of a guest in every run.
pub const OPERATIONS: u64 = 5_000;

/// Orders, by how often they are chosen.
pub const ORDERS: [Order; 6] =
    [Order::Batch, Order::Batch, Order::Strict, Order::Strict, Order::Relaxed, Order::Relaxed];
/// Cutoffs, in blocks.
pub const CUTOFFS: [u32; 7] = [0, 0, 0, 1, 4, 16, 64];

/// Blocks of a batch, at most.
pub const BATCHES: [u32; 4] = [16, 40, 100, 512];

/// Blocks of memory for what is read ahead.
pub const AHEAD: [u32; 3] = [128, 256, 1024];

/// Weights of guests.
pub const WEIGHTS: [u8; 4] = [1, 1, 3, WEIGHT_MAX];
/// Microseconds that 99 of 100 reads may take.
pub const TARGETS: [u32; 4] = [0, 0, 2_000, 50_000];

/// What of the cache a volume has for itself.
pub const RESERVES: [Reserve; 8] = [
    Reserve::Share,
    Reserve::Share,
    Reserve::Percent(0),
    Reserve::Percent(20),
    Reserve::Percent(45),
    Reserve::Percent(70),
    Reserve::Blocks(40),
    Reserve::Blocks(100),
];

/// A stretch of a volume that the guest uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Island {
    /// First block.
    pub start: u64,
    /// Blocks.
    pub blocks: u64,
}

/// A volume.
#[derive(Clone, Debug)]
pub struct VolumeSetup {
    /// Its size: a multiple of 512.
    pub size_bytes: u64,
    /// Where the guest goes.
    pub islands: Vec<Island>,
    /// How it takes writes at first.
    pub mode: Mode,
    /// What a lost cache leaves, at first.
    pub order: Order,
    /// Blocks of a run of writes that may go around the log, at first; 0: none.
    pub cutoff: u32,
    /// Of guests, against write-back, at first.
    pub weight: u8,
    /// Microseconds that 99 of 100 reads may take, at first; 0: none is set.
    pub p99_target: u32,
    /// What it has of the cache, whatever the others do, at first.
    pub reserve: Reserve,
    /// What its backing device does with discards.
    pub discard: Discard,
    /// It takes so many times as long.
    pub slow: u64,
}

/// Blocks of a backing device that refuse to be written.
#[derive(Clone, Copy, Debug)]
pub struct Bad {
    /// Whose.
    pub volume: usize,
    /// How many, at most.
    pub blocks: u64,
    /// Operations before they go bad.
    pub from: u64,
    /// Operations before they are well again.
    pub to: u64,
    /// Which.
    pub seed: u64,
}

impl Bad {
    /// One volume in four runs has some. By a chance of its own: the others' are what they were.
    fn new(volumes: u64, operations: u64, key: u64) -> Option<Bad> {
        let mut random = Random::new(key ^ 0xBAD);
        let volume = random.below(volumes) as usize;
        let blocks = *random.pick(&[1, 1, 2, 5, 40]);
        let from = random.below(operations);
        let to = from + random.below(operations);
        let seed = random.next();
        random.one_in(4).then_some(Bad { volume, blocks, from, to, seed })
    }
}

/// All that is chosen before the start.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The engine's settings.
    pub config: Config,
    /// The cache, as formatted.
    pub superblock: Superblock,
    /// The segments that it may come to have.
    pub segments: (u32, u32),
    /// The volumes.
    pub volumes: Vec<VolumeSetup>,
    /// Guest operations.
    pub operations: u64,
    /// Requests the guest has under way at most.
    pub depth: u64,
    /// Crashes and stops, by number of operations before them.
    pub stops: Vec<u64>,
    /// Devices take the bytes of a write when it is done, not when it is issued.
    pub late_copy: bool,
    /// One write in so many is unaligned; zero: none.
    pub unaligned: u64,
    /// One operation in so many is a flush.
    pub flush: u64,
    /// One in so many is a discard or write-zeroes.
    pub range: u64,
    /// One written block in so many is all zeros.
    pub zeros: u64,
    /// Of writes, percent go to the hot blocks.
    pub hot: u64,
    /// Of dirty blocks, percent are overwritten before write-back comes to them: the guest goes back
    /// to them for as long as there were fewer.
    pub overwritten: u64,
    /// Of reads, percent go where the last one went.
    pub reread: u64,
    /// Of writes, percent go where the last read went.
    pub chased: u64,
    /// Most blocks of an ordinary request.
    pub size: u64,
    /// One moment in so many the guest pauses.
    pub pause: u64,
    /// One moment in so many a block of the cache device rots, or cannot be read; zero: none.
    pub rot: u64,
    /// One request in so many to a backing device fails; zero: none.
    pub backing_fault: u64,
    /// One write or flush of the cache device in so many fails; zero: none.
    pub cache_fault: u64,
    /// One flush of the cache device in so many fails, and drops what it should have covered; zero: none.
    pub flush_fault: u64,
    /// One moment in so many the cache device goes away for a while; zero: none.
    pub gone: u64,
    /// No device has a volatile cache: the kernel answers flushes of one that is gone.
    pub write_through: bool,
    /// One moment in so many it cannot be read for a while; zero: none.
    pub mute: u64,
    /// Of one read in so many what backing devices have goes where nobody can look; zero: of none.
    pub apart: u64,
    /// One moment in so many the operator does something; zero: none.
    pub operator: u64,
    /// One moment in so many a scrub begins, or is told to end; zero: none.
    pub scrub: u64,
    /// The last volume joins the cache in mid-run.
    pub late_volume: bool,
    /// A volume whose backing device fails for good, after so many operations.
    pub dies: Option<(usize, u64)>,
    /// Of a volume so many blocks go bad after so many operations, and are well again after more.
    pub bad: Option<Bad>,
    /// The backing devices are parts of one disk.
    pub one_disk: bool,
    /// Of these, the ones that are files on it, one bit each: a flush of such a one is of that alone.
    pub files: u64,
    /// The cache device takes so many times as long.
    pub slow_cache: u64,
    /// One answer in so many comes very late; zero: none.
    pub late: u64,
    /// Blocks by which the cache device is larger than the cache.
    pub spare: u64,
    /// The process takes what is done in turns, each so long at most, in nanoseconds; zero: one
    /// by one.
    pub turn: u64,
    /// Devices take the same time for everything, and nothing stops an opening.
    pub steady: bool,
    /// What a process leaves unanswered comes again to the next one.
    pub comes_again: bool,
    /// Each opening has another room for batches.
    pub batches_vary: bool,
    /// What a power cut seldom shows is compared each time it is done; not where a test tells what it shows.
    pub watched: bool,
    /// Every step is printed.
    pub tell: bool,
}

/// The superblock of a cache of just so many segments of 64 KiB.
pub fn format(segments: u32, segment_bytes: u32, volumes: &[VolumeSetup], key: u64) -> Superblock {
    let mut size_bytes = u64::from(segments) * u64::from(segment_bytes);
    let mut superblock = loop {
        let new = NewCache { uuid: [7; 16], key, size_bytes, segment_bytes, now: 1 };
        match Superblock::format(&new) {
            Ok(superblock) if superblock.segment_count >= segments => break superblock,
            _ => size_bytes += 64 << 10,
        }
    };
    for (index, volume) in volumes.iter().enumerate() {
        superblock.volumes[index] = Some(Volume {
            mode: volume.mode,
            order: volume.order,
            cutoff: volume.cutoff,
            weight: volume.weight,
            p99_target: volume.p99_target,
            reserve: volume.reserve,
            ..Volume::empty([index as u8 + 1; 16], &format!("volume{index}"), volume.size_bytes)
        });
    }
    superblock
}

impl Setup {
    /// Whether the cache device does what it is asked to, and nothing rots.
    pub fn cache_is_sound(&self) -> bool {
        self.rot == 0 && self.cache_fault == 0 && self.flush_fault == 0
    }

    /// With segments of so many bytes, as long ones as `format` makes them: a full record has 127 blocks then, a segment of the usual 64 KiB
    /// has 15. Requests, batches and volumes are larger as well, so that they are filled. All else is as the seed has chosen it.
    pub fn enlarge(&mut self, segment_bytes: u32) {
        let Superblock { key, segment_count, .. } = self.superblock;
        let mut random = Random::new(key ^ 0x5E6);
        self.widen(&mut random, (60, 3_000), &[4, 64, 130, 256], &[40, 512, 2_000]);
        let blocks = (segment_bytes / 4096) as u16;
        let reserves = self.volumes.iter().map(|volume| volume.reserve);
        if resolve(segment_count, blocks, reserves).check().is_err() {
            self.volumes.iter_mut().for_each(|volume| volume.reserve = Reserve::Share);
        }
        // A record is closed when somebody waits for it, when it is old, or full.
        (self.depth, self.flush) = (self.depth.max(16), self.flush.max(40));
        self.config.close_after *= 10;
        self.config.durable_after *= 4;
        self.config.durable_bytes *= 4;
        self.superblock = format(segment_count, segment_bytes, &self.volumes, key);
    }

    /// With many segments, and as much for the guest to go to. All else is as the seed has chosen it.
    pub fn multiply(&mut self) {
        let Superblock { key, segment_bytes, .. } = self.superblock;
        let mut random = Random::new(key ^ 0x3A2F);
        self.segments = MANY_SEGMENTS;
        let segment_count = random.between(MANY_SEGMENTS.0.into(), MANY_SEGMENTS.1.into()) as u32;
        let blocks = u64::from(segment_count) * u64::from(segment_bytes) / 4096;
        self.widen(&mut random, (blocks / 8, blocks), &[16, 64, 256], &[512, 2_000]);
        self.superblock = format(segment_count, segment_bytes, &self.volumes, key);
    }

    /// With many volumes, and hardly more segments and buffers than they need. All else is as the seed has chosen it.
    pub fn crowd(&mut self) {
        let Superblock { key, segment_bytes, .. } = self.superblock;
        let mut random = Random::new(key ^ 0xC40D);
        let count = random.between(CROWD.0, CROWD.1);
        for at in self.volumes.len() as u64..count {
            let mut volume = volume(at, &mut random);
            volume.order = *random.pick(&ORDERS);
            volume.cutoff = *random.pick(&CUTOFFS);
            volume.weight = *random.pick(&WEIGHTS);
            self.volumes.push(volume);
        }
        // One more may come while it is served.
        let least = (count as u32 + 1) * SEGMENTS_EACH_MIN;
        self.segments = (least, 2 * least);
        let segment_count = random.between(least.into(), 2 * u64::from(least)) as u32;
        reserve(&mut self.volumes, segment_count, &mut random);
        self.config.buffer_count = random.between(count / 2, count + 8) as u16;
        self.superblock = format(segment_count, segment_bytes, &self.volumes, key);
    }

    /// Volumes of so many blocks, but for those whose islands lie far apart; most blocks of a request, and of a batch.
    fn widen(
        &mut self,
        random: &mut Random,
        blocks: (u64, u64),
        requests: &[u64],
        batches: &[u32],
    ) {
        for volume in &mut self.volumes {
            if let [island] = &mut volume.islands[..] {
                let tail = volume.size_bytes % 4096;
                volume.size_bytes = random.between(blocks.0, blocks.1) * 4096 + tail;
                island.blocks = volume.size_bytes.div_ceil(4096);
            }
        }
        self.size = *random.pick(requests);
        self.config.batch_blocks_max = *random.pick(batches);
        self.config.batch_blocks_most = self.config.batch_blocks_max;
        self.batches_vary = false;
    }

    /// What this seed chooses.
    pub fn new(random: &mut Random, mutants: Mutants) -> Setup {
        let count = random.between(2, 3);
        let mut volumes: Vec<VolumeSetup> = (0..count).map(|at| volume(at, random)).collect();
        let dies =
            random.one_in(6).then(|| (random.below(count) as usize, random.between(1, OPERATIONS)));
        // One at least in which something is dirty for a while, and whose device stays.
        let dying = dies.map_or(0, |(index, _)| index);
        volumes[(dying + 1) % count as usize].mode = Mode::WriteBack;
        let segments = random.between(SEGMENTS.0.into(), SEGMENTS.1.into()) as u32;
        let key = random.next();
        // By a chance of its own: all else is what it was.
        let mut orders = Random::new(key ^ 0x0DE5);
        for volume in &mut volumes {
            volume.order = *orders.pick(&ORDERS);
            volume.cutoff = *orders.pick(&CUTOFFS);
        }
        let mut shares = Random::new(key ^ 0x5_4A8E);
        for volume in &mut volumes {
            volume.weight = *shares.pick(&WEIGHTS);
            volume.p99_target = *shares.pick(&TARGETS);
        }
        reserve(&mut volumes, segments, &mut Random::new(key ^ 0x4E5E));
        let superblock = format(segments, 64 << 10, &volumes, key);
        let acknowledge = match random.below(10) {
            0 => Acknowledge::Written,
            1 => Acknowledge::Durable,
            _ => Acknowledge::Placed,
        };
        let depth = *random.pick(&[1, 4, 16, 32, 64]);
        // Where few requests are under way at once, it takes longer until a block is written again.
        let patience = match depth {
            1 => 60,
            4 => 20,
            _ => 1,
        };
        let mut config = Config {
            buffer_count: random.between(6, 16) as u16,
            acknowledge,
            close_after: random.between(50, 5_000) * MICRO,
            durable_after: random.between(1, 30) * MILLI,
            durable_bytes: random.between(64 << 10, 1 << 20),
            window_blocks: *random.pick(&[32, 64, 256, 512]),
            lane_count: *Random::new(key ^ 0x1A4E).pick(&[1, 2, 4]),
            batch_blocks_max: *random.pick(&BATCHES),
            batch_blocks_most: 0,
            backing_in_flight: random.between(1, 32) as u16,
            dirty_age: *random.pick(&[5, 50, 200, 1_000]) * MILLI * patience,
            checkpoint_frames: *random.pick(&[1, 2, 5, 32]),
            dirty_percent: random.between(10, 80) as u8,
            extent_count_max: *random.pick(&[24, 48, 256, 1024]),
            retry_after: random.between(1, 10) * MILLI,
            lost_after: *Random::new(key ^ 0x105).pick(&[0, 1, 5, 20]) * MILLI,
            free_segments_kept: *random.pick(&[0, 0, 4, 1_000]),
            fill_run_max: fill_run_max(superblock.key),
            ahead_blocks: *Random::new(key ^ 0xA4EA).pick(&AHEAD),
            scrub_rate: scrubs(superblock.key).1,
            mutants,
        };
        let batches_vary = Random::new(key ^ 0xBA7C).one_in(3);
        config.batch_blocks_most = match batches_vary {
            true => BATCHES[3],
            false => config.batch_blocks_max,
        };
        // Fewer than there are logs, or no more: heads end for others. By a chance of its own.
        let mut few = Random::new(key ^ 0xB0F5);
        if few.one_in(8) {
            config.buffer_count = few.between(count - 1, count) as u16;
        }
        let operations = OPERATIONS;
        let stop_count = random.between(4, 7);
        let mut stops: Vec<u64> =
            (0..stop_count).map(|_| random.between(1, operations - 1)).collect();
        stops.sort_unstable();
        let operator = *random.pick(&[0, 100, 400]);
        let (reread, chased) = rereads(superblock.key);
        let bad = Bad::new(count, operations, superblock.key);
        Setup {
            config,
            superblock,
            segments: SEGMENTS,
            volumes,
            operations,
            depth,
            stops,
            late_copy: random.one_in(2),
            unaligned: *random.pick(&[2, 4, 10, 50]),
            flush: *random.pick(&[4, 12, 40, 200]),
            range: *random.pick(&[5, 12, 40]),
            zeros: *random.pick(&[3, 10, 50]),
            hot: *random.pick(&[30, 90, 98]),
            overwritten: *random.pick(&[58, 62, 70]),
            reread,
            chased,
            size: *random.pick(&[1, 2, 4, 8, 16]),
            pause: *random.pick(&[10, 100, 1000]),
            rot: if random.one_in(4) { 500 } else { 0 },
            backing_fault: if random.one_in(4) { 60 } else { 0 },
            cache_fault: if random.one_in(6) { 2_000 } else { 0 },
            flush_fault: *Random::new(key ^ 0xF1A5).pick(&[0, 0, 0, 0, 100, 600]),
            gone: *Random::new(key ^ 0x60E).pick(&[0, 0, 0, 3_000]),
            write_through: Random::new(key ^ 0x377).one_in(2),
            mute: *Random::new(key ^ 0x3074).pick(&[0, 0, 1_000]),
            apart: *Random::new(key ^ 0xA9A7).pick(&[0, 0, 2, 8]),
            operator,
            scrub: scrubs(key).0,
            late_volume: operator > 0 && random.one_in(3),
            one_disk: Random::new(key ^ 0xD15C).one_in(3),
            // What fails for good would fail for all.
            files: Random::new(key ^ 0xF11E).next() & Random::new(key ^ 0xF11F).next()
                | dies.map_or(0, |(index, _)| 1 << index),
            dies,
            bad,
            slow_cache: *random.pick(&[1, 1, 1, 1, 1, 10]),
            late: *random.pick(&[0, 0, 500]),
            spare: *Random::new(key ^ 0x1A46).pick(&[0, 0, 1, 16, 300]),
            turn: *random.pick(&[0, 30, 200, 1_000]) * MICRO,
            steady: false,
            comes_again: false,
            batches_vary,
            watched: true,
            tell: false,
        }
    }
}

/// What volumes have of the cache, if there is room for it.
fn reserve(volumes: &mut [VolumeSetup], segments: u32, random: &mut Random) {
    for volume in &mut *volumes {
        volume.reserve = *random.pick(&RESERVES);
    }
    let reserves = volumes.iter().map(|volume| volume.reserve);
    if resolve(segments, 16, reserves).check().is_err() {
        volumes.iter_mut().for_each(|volume| volume.reserve = Reserve::Share);
    }
}

/// From which length on reads are a run. By a chance of its own: the others' are what they were.
fn fill_run_max(key: u64) -> u32 {
    *Random::new(key ^ 0xF111).pick(&[20, 64, 256])
}

/// How often the cache is scrubbed, and how many bytes a second at most.
fn scrubs(key: u64) -> (u64, u64) {
    let mut random = Random::new(key ^ 0x5C2B);
    (*random.pick(&[0, 100, 400]), *random.pick(&[4 << 20, 100 << 20, u64::MAX]))
}

/// How often a guest goes back to what it read.
fn rereads(key: u64) -> (u64, u64) {
    let mut random = Random::new(key ^ 0x4EAD);
    (*random.pick(&[10, 40, 80]), *random.pick(&[0, 10, 30]))
}

fn volume(at: u64, random: &mut Random) -> VolumeSetup {
    let mode = match random.below(8) {
        0 | 1 => Mode::WriteThrough,
        2 => Mode::WriteAround,
        _ => Mode::WriteBack,
    };
    let discard = *random.pick(&[Discard::Zeros, Discard::Stays, Discard::Mixed]);
    let (size_bytes, islands) = if at == 1 {
        // A large one: what counts lies far apart.
        let end = 1 << 33;
        let length = random.between(20, 80);
        let starts = [0, (1 << 20) + 7, end - length];
        let islands = starts.map(|start| Island { start, blocks: length });
        (end * 4096, islands.to_vec())
    } else {
        let blocks = random.between(60, 300);
        let tail = random.below(8) * 512;
        let size_bytes = blocks * 4096 + tail;
        (size_bytes, vec![Island { start: 0, blocks: size_bytes.div_ceil(4096) }])
    };
    let slow = *random.pick(&[1, 1, 1, 1, 1, 10]);
    let (order, cutoff, weight, p99_target) = (Order::Batch, 0, 1, 0);
    VolumeSetup {
        size_bytes,
        islands,
        mode,
        order,
        cutoff,
        weight,
        p99_target,
        reserve: Reserve::Share,
        discard,
        slow,
    }
}
