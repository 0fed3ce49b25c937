// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine between two devices that take no time: what it keeps, and what it writes for that.

use forebay_core::blank::{self, Nothing, VOLUME};
use forebay_core::control::VolumeStatus;
use forebay_core::effect::Effect;
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::{NewCache, Superblock, Volume};
use forebay_core::limits::SEGMENTS_RESERVED;
use forebay_core::policy::reserve::Reserve;
use forebay_core::request::{Op, Request};
use forebay_core::stats::Stats;
use forebay_core::units::{Tick, VolumeIndex};

const SEGMENT_BYTES: u32 = 64 << 10;
/// Blocks of a segment that are not its header.
const SEGMENT_BLOCKS: u64 = SEGMENT_BYTES as u64 / 4096 - 1;

/// A volume beside the one.
pub const SECOND: VolumeIndex = VolumeIndex(1);

/// An engine.
pub struct Instant {
    engine: Engine,
    tag: u32,
}

impl Instant {
    /// With a cache whose log holds so many blocks, what is always kept free not counted.
    pub fn new(blocks: u64, volume_bytes: u64) -> Instant {
        Instant::with_first(blocks, Volume::empty([8; 16], "v", volume_bytes))
    }

    /// The same with two volumes, of which the first has something for itself.
    pub fn of_two(blocks: u64, volume_bytes: u64, reserve: Reserve) -> Instant {
        let volume = Volume { reserve, ..Volume::empty([8; 16], "v", volume_bytes) };
        let mut instant = Instant::with_first(blocks, volume);
        instant.engine.attach(SECOND, &Volume::empty([9; 16], "w", volume_bytes));
        instant.engine.serve(SECOND, true);
        instant
    }

    fn with_first(blocks: u64, volume: Volume) -> Instant {
        let used = blocks.div_ceil(SEGMENT_BLOCKS);
        // The reserve, the margin of the pool, and what reclaim works ahead.
        let kept = u64::from(SEGMENTS_RESERVED) + (used / 32).max(3) + (used / 128).max(2);
        let config = Config { buffer_count: 8, ..Config::default() };
        Instant { engine: blank::engine(&format(used + kept), config, &volume), tag: 0 }
    }

    /// One request at a time, each answered before the next.
    pub fn ask(&mut self, now: u64, op: Op, offset: u64, length: u64) {
        self.ask_of(VOLUME, now, op, offset, length);
    }

    /// The same of any volume.
    pub fn ask_of(&mut self, volume: VolumeIndex, now: u64, op: Op, offset: u64, length: u64) {
        self.engine.tick(Tick(now), now / 1_000_000, &mut Nothing);
        self.settle();
        self.tag = self.tag.wrapping_add(1);
        let request = Request { volume, op, offset, length, tag: self.tag };
        self.engine.submit(request, &mut Nothing).expect("one request finds room");
        assert!(self.settle(), "nothing takes time, so there is an answer");
    }

    /// What the engine counted.
    pub fn stats(&self) -> Stats {
        self.status_of(VOLUME).stats
    }

    /// How a volume is.
    pub fn status_of(&self, volume: VolumeIndex) -> VolumeStatus {
        self.engine.status(volume).expect("it is attached")
    }

    /// Segments of the cache.
    pub fn segments(&self) -> u32 {
        self.engine.free_segments().1
    }

    /// Does all there is to do; says whether a request was answered.
    fn settle(&mut self) -> bool {
        let mut answered = false;
        while let Some(effect) = self.engine.next_effect() {
            if let Effect::Answer { result, .. } = effect {
                assert_eq!(result, Ok(()), "no device fails here");
                answered = true;
            }
            if let Some(token) = effect.token() {
                self.engine.complete(token, Ok(()), &mut Nothing);
            }
        }
        answered
    }
}

/// A cache of so many segments.
fn format(segments: u64) -> Superblock {
    let mut size_bytes = segments * u64::from(SEGMENT_BYTES);
    loop {
        let new =
            NewCache { uuid: [7; 16], key: 5, size_bytes, segment_bytes: SEGMENT_BYTES, now: 1 };
        match Superblock::format(&new) {
            Ok(superblock) if u64::from(superblock.segment_count) >= segments => return superblock,
            _ => size_bytes += u64::from(SEGMENT_BYTES),
        }
    }
}
