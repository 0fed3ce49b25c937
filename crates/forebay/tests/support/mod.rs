// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shard with volumes and a guest that has many requests under way, for tests of the runtime.

#![allow(dead_code, unused_imports, unreachable_pub, clippy::unwrap_used)]

use forebay::cache;
use forebay::host::runtime_dir::{Places, RuntimeDir};
use forebay::io::{Arena, Device, ReactorKind, Span};
use forebay::shard::{Answer, NewVolume, Shard, ShardOptions, uuid_text};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
use forebay_testing::PATIENCE;
pub use forebay_testing::{Dir, Random};
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub const BLOCK: u64 = 4096;
pub const SEGMENT_BYTES: u32 = 512 << 10;

/// Memory of this process alone: acknowledged when written.
pub fn options(kind: ReactorKind, config: Config) -> ShardOptions {
    ShardOptions { reactor: kind, config, shared: false, places: Places::found() }
}

/// Buffers that outlive the process: acknowledged when placed. A clean close removes them.
pub fn shared_options(kind: ReactorKind, config: Config) -> ShardOptions {
    ShardOptions { reactor: kind, config, shared: true, places: Places::found() }
}

/// A shard, and memory for requests.
pub struct Rig {
    pub shard: Shard,
    pub memory: Arena,
    foreign: Vec<(u64, i32)>,
    answers: Vec<Answer>,
    _buffers: Buffers,
}

/// Shared memory that a test which fails before its clean close would leave behind.
struct Buffers(PathBuf);

impl Drop for Buffers {
    fn drop(&mut self) {
        // After a clean close it is gone already.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Rig {
    /// Formats the cache device and opens it.
    pub fn new(cache: Box<dyn Device>, options: &ShardOptions, memory: usize) -> Rig {
        let size = cache.info().size_bytes;
        let superblock = cache::format(cache.as_ref(), size, SEGMENT_BYTES, 1).unwrap();
        let name = format!("{}.buffers", uuid_text(&superblock.uuid));
        let dir = RuntimeDir::open().unwrap();
        let dir = dir.shared_dir(&options.places).unwrap().unwrap_or(dir);
        Rig {
            _buffers: Buffers(dir.path().join(name)),
            shard: Shard::open(cache, options).unwrap(),
            memory: Arena::anonymous(memory).unwrap(),
            foreign: Vec::with_capacity(4096),
            answers: Vec::with_capacity(4096),
        }
    }

    /// Adds a volume and serves it.
    pub fn add(&mut self, name: &str, mode: Mode, backing: Box<dyn Device>) -> VolumeIndex {
        let index = self.shard.free_index().unwrap();
        let volume = NewVolume {
            name: name.into(),
            size_bytes: backing.info().size_bytes,
            logical_block: 512,
            mode,
            path: name.into(),
            fingerprint: [0; 64],
        };
        self.shard.add(index, &volume).unwrap();
        self.shard.serve(index, backing);
        index
    }

    pub fn span(&self, slot: usize, length: usize) -> Span {
        self.memory.span(slot * length, length)
    }

    /// One turn; gives the answers to `take`.
    pub fn turn(&mut self, wait: Duration, mut take: impl FnMut(Answer)) {
        self.shard.turn(Some(wait), &mut self.foreign).unwrap();
        self.shard.take_answers(&mut self.answers);
        self.answers.drain(..).for_each(&mut take);
    }

    /// One request, to its end.
    pub fn request(
        &mut self,
        volume: VolumeIndex,
        op: Op,
        offset: u64,
        length: u64,
        span: Option<Span>,
    ) -> Result<(), RequestError> {
        self.shard.submit(volume, op, offset, length, span, u64::MAX).unwrap();
        let begun = Instant::now();
        let mut result = None;
        while result.is_none() {
            assert!(begun.elapsed() < PATIENCE, "{op:?} is not answered");
            self.turn(Duration::from_millis(100), |answer| result = Some(answer.result));
        }
        result.unwrap()
    }

    pub fn wait(&mut self, what: &str, mut condition: impl FnMut(&Shard) -> bool) {
        let begun = Instant::now();
        while !condition(&self.shard) {
            assert!(begun.elapsed() < PATIENCE, "{what} does not come true");
            self.turn(Duration::from_millis(10), |_| {});
        }
    }
}
