// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A shard that is given up while its devices have writes: their bytes stay until no device has one.

use crate::support::{self, BLOCK, PATIENCE, Rig};
use forebay::io::{Device, Layer, MemoryDevice, Operation, Reactor, ReactorKind, Span};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Mode;
use forebay_core::request::Op;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What of the last write was in memory, when it came and when the device ended.
#[derive(Default)]
struct Seen {
    begun: Vec<u8>,
    ended: Vec<u8>,
}

/// A device that takes writes and does not answer them; as one that is slow, it looks at their bytes late.
struct Slow {
    inner: MemoryDevice,
    write: Option<Span>,
    seen: Arc<Mutex<Seen>>,
}

fn bytes_of(span: Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.copy_out(&mut bytes);
    bytes
}

impl Layer for Slow {
    fn below(&self) -> &dyn Device {
        &self.inner
    }

    fn below_mut(&mut self) -> &mut dyn Device {
        &mut self.inner
    }

    fn pass(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        match operation {
            Operation::Write { span, .. } => {
                self.seen.lock().unwrap().begun = bytes_of(span);
                self.write = Some(span);
            }
            other => self.inner.submit(reactor, other, token, now),
        }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        if let Some(span) = self.write {
            self.seen.lock().unwrap().ended = bytes_of(span);
        }
    }
}

/// `is_cache`: the device that is slow is the cache's, and has a record; otherwise the volume's, and has a batch's write.
fn given_up(is_cache: bool) -> Arc<Mutex<Seen>> {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let memory = || MemoryDevice::new(64 << 20, 4096).unwrap();
    let slow = || Slow { inner: memory(), write: None, seen: seen.clone() };
    let [cache, backing]: [Box<dyn Device>; 2] = match is_cache {
        true => [Box::new(slow()), Box::new(memory())],
        false => [Box::new(memory()), Box::new(slow())],
    };
    let options = support::shared_options(ReactorKind::Auto, Config::default());
    let mut rig = Rig::new(cache, &options, BLOCK as usize);
    let volume = rig.add("v", Mode::WriteBack, backing);
    rig.memory.whole().copy_in(&[7; BLOCK as usize]);
    let write = Op::Write { fua: false };
    rig.request(volume, write, 0, BLOCK, Some(rig.memory.whole())).unwrap();
    match is_cache {
        true => rig.shard.submit(volume, Op::Flush, 0, 0, None, 1).unwrap(),
        false => rig.shard.drain(volume),
    }
    let begun = Instant::now();
    while seen.lock().unwrap().begun.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "nothing is written");
        rig.turn(Duration::from_millis(10), |_| ());
    }
    drop(rig);
    seen
}

#[test]
fn memory_is_given_back_when_no_device_has_a_write() {
    for is_cache in [true, false] {
        let seen = given_up(is_cache);
        let seen = seen.lock().unwrap();
        assert!(seen.begun.windows(BLOCK as usize).any(|bytes| bytes == [7; BLOCK as usize]));
        assert!(seen.ended == seen.begun, "the cache's device: {is_cache}");
    }
}
