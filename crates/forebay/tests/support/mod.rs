// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shard with volumes and a guest that has many requests under way, for tests of the runtime.

#![allow(dead_code, unused_imports, unreachable_pub, clippy::unwrap_used)]

pub mod image;

use forebay::cache;
use forebay::host::machine::DeviceNumber;
use forebay::host::runtime_dir::RuntimeDir;
use forebay::io::{
    Arena, Completion, Device, DeviceInfo, DeviceKind, Operation, Reactor, ReactorKind, Span,
};
use forebay::shard::{Answer, NewVolume, Shard, ShardOptions, uuid_text};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::VolumeIndex;
pub use forebay_testing::{Dir, PATIENCE, Random};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub const BLOCK: u64 = 4096;
pub const SEGMENT_BYTES: u32 = 512 << 10;

/// Memory of this process alone: acknowledged when written.
pub fn options(kind: ReactorKind, config: Config) -> ShardOptions {
    ShardOptions { reactor: kind, config, shared: false, ..ShardOptions::default() }
}

/// Buffers that outlive the process: acknowledged when placed. A clean close removes them.
pub fn shared_options(kind: ReactorKind, config: Config) -> ShardOptions {
    ShardOptions { reactor: kind, config, shared: true, ..ShardOptions::default() }
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
        cache::format(cache.as_ref(), size, SEGMENT_BYTES, 1).unwrap();
        Rig::open(cache, options, memory)
    }

    /// Opens a cache that was formatted before.
    pub fn open(cache: Box<dyn Device>, options: &ShardOptions, memory: usize) -> Rig {
        let shard = Shard::open(cache, options).unwrap();
        let name = format!("{}.buffers", uuid_text(&shard.superblock().uuid));
        let dir = RuntimeDir::open().unwrap();
        let dir = dir.shared_dir(&options.places).unwrap().unwrap_or(dir);
        Rig {
            _buffers: Buffers(dir.path().join(name)),
            shard,
            memory: Arena::anonymous(memory).unwrap(),
            foreign: Vec::with_capacity(4096),
            answers: Vec::with_capacity(4096),
        }
    }

    /// Adds a volume and serves it.
    pub fn add(&mut self, name: &str, mode: Mode, backing: Box<dyn Device>) -> VolumeIndex {
        self.add_on(name, mode, backing, None)
    }

    /// The same on a disk that others may be on.
    pub fn add_on(
        &mut self,
        name: &str,
        mode: Mode,
        backing: Box<dyn Device>,
        disk: Option<DeviceNumber>,
    ) -> VolumeIndex {
        let index = self.shard.free_index().unwrap();
        let volume = NewVolume {
            name: name.into(),
            size_bytes: backing.info().size_bytes,
            logical_block: 512,
            mode,
            reserve: Default::default(),
            path: name.into(),
            fingerprint: [0; 64],
        };
        self.shard.add(index, &volume).unwrap();
        self.shard.serve_on(index, backing, disk);
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

    /// Where its shared memory is.
    pub fn buffers(&self) -> PathBuf {
        self._buffers.0.clone()
    }

    /// Closes the cache, with everything durable.
    pub fn close(self) {
        assert!(self.shard.close(PATIENCE).unwrap());
    }

    pub fn wait(&mut self, what: &str, mut condition: impl FnMut(&Shard) -> bool) {
        let begun = Instant::now();
        while !condition(&self.shard) {
            assert!(begun.elapsed() < PATIENCE, "{what} does not come true");
            self.turn(Duration::from_millis(10), |_| {});
        }
    }
}

/// A disk of any size that holds zeros and forgets what it is told.
pub struct Void {
    info: DeviceInfo,
    done: Vec<Completion>,
    since: Option<Instant>,
}

impl Void {
    pub fn new(size_bytes: u64) -> Void {
        let info = DeviceInfo {
            name: "void".into(),
            size_bytes,
            logical_block: 512,
            kind: DeviceKind::Memory,
            volatile_cache: false,
            discards: true,
            direct: true,
            read_only: false,
        };
        Void { info, done: Vec::new(), since: None }
    }

    /// It says that it is this.
    pub fn of(self, kind: DeviceKind) -> Void {
        Void { info: DeviceInfo { kind, ..self.info }, ..self }
    }
}

impl Device for Void {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        assert!(self.info.holds(operation.offset(), operation.length()), "{operation:?}");
        if let Operation::Read { span, .. } = operation {
            span.fill_zero();
        }
        self.done.push(Completion { token, result: Ok(()) });
        self.since.get_or_insert(now);
    }

    fn event(&mut self, _: &mut Reactor, _: u64, _: i32, _: Instant, _: &mut Vec<Completion>) {}

    fn poll(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
        self.since = None;
        done.append(&mut self.done);
    }

    fn deadline(&self) -> Option<Instant> {
        self.since
    }

    fn read_at(&self, _: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
