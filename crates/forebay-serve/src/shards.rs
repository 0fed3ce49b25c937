// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shards for tests of front ends: all of it in memory.

use forebay::cache::format;
use forebay::io::{Completion, Device, Layer, MemoryDevice, Operation, Reactor, ReactorKind};
use forebay::shard::{NewVolume, Shard, ShardOptions};
use forebay_core::format::superblock::Mode;
use forebay_core::units::VolumeIndex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const CACHE_BYTES: u64 = 128 << 20;

/// With a volume of so many bytes.
pub(crate) fn shard(reactor: ReactorKind, size_bytes: u64) -> (Shard, VolumeIndex) {
    let mut shard = empty(reactor);
    let backing = Box::new(MemoryDevice::new(size_bytes, 512).unwrap());
    let index = serve(&mut shard, Mode::WriteBack, backing);
    (shard, index)
}

/// Without any.
pub(crate) fn empty(reactor: ReactorKind) -> Shard {
    of(CACHE_BYTES, ShardOptions { reactor, ..ShardOptions::default() })
}

/// The same, with a cache of so many bytes.
pub(crate) fn of(cache_bytes: u64, options: ShardOptions) -> Shard {
    let device = MemoryDevice::new(cache_bytes, 4096).unwrap();
    format(&device, cache_bytes, 512 << 10, 1).unwrap();
    Shard::open(Box::new(device), &ShardOptions { shared: false, ..options }).unwrap()
}

/// One more volume, on this device.
pub(crate) fn serve(shard: &mut Shard, mode: Mode, backing: Box<dyn Device>) -> VolumeIndex {
    let index = shard.free_index().unwrap();
    let new = NewVolume {
        name: format!("v{}", index.0),
        size_bytes: backing.info().size_bytes,
        logical_block: 512,
        mode,
        reserve: Default::default(),
        path: "memory".into(),
        fingerprint: [0; 64],
    };
    shard.add(index, &new).unwrap();
    shard.serve(index, backing);
    index
}

/// While it is shut, writes wait.
#[derive(Clone, Default)]
pub(crate) struct Gate {
    is_open: Arc<AtomicBool>,
    /// Bytes that do.
    waiting: Arc<AtomicU64>,
}

impl Gate {
    /// A device behind it.
    pub(crate) fn device(&self, size_bytes: u64) -> Box<dyn Device> {
        let below = MemoryDevice::new(size_bytes, 512).unwrap();
        Box::new(Gated { below, gate: self.clone(), held: Vec::new() })
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) fn open(&self, is_open: bool) {
        self.is_open.store(is_open, Ordering::Relaxed);
    }
}

struct Gated {
    below: MemoryDevice,
    gate: Gate,
    held: Vec<(Operation, u64)>,
}

impl Layer for Gated {
    fn below(&self) -> &dyn Device {
        &self.below
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        &mut self.below
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        if let Operation::Write { span, .. } = operation {
            self.gate.waiting.fetch_add(span.len() as u64, Ordering::Relaxed);
            self.held.push((operation, token));
        } else {
            self.below.submit(reactor, operation, token, now);
        }
    }

    fn due(&self) -> Option<Instant> {
        let is_due = self.gate.is_open.load(Ordering::Relaxed) && !self.held.is_empty();
        is_due.then(Instant::now)
    }

    /// The payload is read now, and not before.
    fn turn(&mut self, reactor: &mut Reactor, now: Instant, _: &mut Vec<Completion>) {
        if self.gate.is_open.load(Ordering::Relaxed) {
            self.gate.waiting.store(0, Ordering::Relaxed);
            for (operation, token) in self.held.drain(..) {
                self.below.submit(reactor, operation, token, now);
            }
        }
    }
}
