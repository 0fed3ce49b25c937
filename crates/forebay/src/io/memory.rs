// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device that is memory: for tests, benchmarks, and as a cache that need not survive.
//!
//! Operations are queued and done in the order of submission by the next poll, by copying: what is written goes past
//! the processor's caches, as a disk would fetch it.

use forebay_core::limits::TOKEN_COUNT_MAX;
use std::io;
use std::time::Instant;

use super::buffer::Arena;
use super::device::{Completion, Device, DeviceError, DeviceInfo, DeviceKind, Operation};
use super::reactor::Reactor;

/// From here on zeroing gives pages back instead of writing zeros.
const FORGET_BYTES_MIN: u64 = 64 << 10;
const PAGE_BYTES: u64 = 4096;

/// Memory as a device.
#[derive(Debug)]
pub struct MemoryDevice {
    info: DeviceInfo,
    memory: Arena,
    queue: Vec<(Operation, u64)>,
    since: Option<Instant>,
}

impl MemoryDevice {
    /// Zeroed memory of `size_bytes`; pages are taken when they are first written.
    pub fn new(size_bytes: u64, logical_block: u32) -> io::Result<MemoryDevice> {
        assert!(matches!(logical_block, 512 | 4096));
        let length = usize::try_from(size_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let info = DeviceInfo {
            name: String::from("memory"),
            size_bytes,
            logical_block,
            kind: DeviceKind::Memory,
            volatile_cache: false,
            discards: true,
            direct: true,
            read_only: false,
        };
        let memory = Arena::reserved(length)?;
        // Nothing is allocated once requests flow.
        let queue = Vec::with_capacity(TOKEN_COUNT_MAX);
        Ok(MemoryDevice { info, memory, queue, since: None })
    }

    fn perform(&self, operation: Operation) -> Result<(), DeviceError> {
        self.info.check(&operation)?;
        let offset = operation.offset() as usize;
        match operation {
            Operation::Read { span, .. } => {
                span.copy_from(self.memory.span(offset, span.len()));
            }
            Operation::Write { span, .. } => {
                // It is read again much later, or never: the guest's buffers stay in the near cache.
                self.memory.span(offset, span.len()).stream_from(span);
            }
            Operation::ReadRegistered { .. } | Operation::WriteRegistered { .. } => {
                return Err(DeviceError::UNSUPPORTED);
            }
            Operation::Flush => {}
            Operation::Discard { offset, length } | Operation::WriteZeroes { offset, length } => {
                self.zero(offset, length);
            }
        }
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64) {
        let end = offset + length;
        let first = offset.next_multiple_of(PAGE_BYTES).min(end);
        let last = (end - end % PAGE_BYTES).max(first);
        let forgets = last - first >= FORGET_BYTES_MIN
            && self.memory.forget(first as usize, (last - first) as usize);
        let middle = if forgets { (first, last) } else { (end, end) };
        self.memory.span(offset as usize, (middle.0 - offset) as usize).fill_zero();
        self.memory.span(middle.1 as usize, (end - middle.1) as usize).fill_zero();
    }
}

impl Device for MemoryDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, _: &mut Reactor, operation: Operation, token: u64, now: Instant) {
        self.queue.push((operation, token));
        self.since.get_or_insert(now);
    }

    fn event(&mut self, _: &mut Reactor, _: u64, _: i32, _: Instant, _: &mut Vec<Completion>) {
        unreachable!("memory asks nothing of the reactor");
    }

    fn poll(&mut self, _: &mut Reactor, _: Instant, done: &mut Vec<Completion>) {
        self.since = None;
        for index in 0..self.queue.len() {
            let (operation, token) = self.queue[index];
            done.push(Completion { token, result: self.perform(operation) });
        }
        self.queue.clear();
    }

    fn deadline(&self) -> Option<Instant> {
        self.since
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        if !self.info.holds(offset, bytes.len() as u64) {
            return Err(DeviceError::RANGE.into());
        }
        self.memory.span(offset as usize, bytes.len()).copy_out(bytes);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if !self.info.holds(offset, bytes.len() as u64) {
            return Err(DeviceError::RANGE.into());
        }
        self.memory.span(offset as usize, bytes.len()).copy_in(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::ReactorKind;

    #[test]
    fn operations_are_done_in_order_by_the_next_poll() {
        for kind in [ReactorKind::Threads, ReactorKind::Auto] {
            let mut reactor = Reactor::new(kind, 8).unwrap();
            let mut device = MemoryDevice::new(1 << 20, 512).unwrap();
            let buffers = Arena::anonymous(1 << 20).unwrap();
            let (source, target) = (buffers.span(0, 4096), buffers.span(4096, 4096));
            source.copy_in(&[5; 4096]);
            let now = Instant::now();
            let operations = [
                Operation::Write { span: source, offset: 512 },
                Operation::Flush,
                Operation::Read { span: target, offset: 0 },
                Operation::Read { span: target, offset: (1 << 20) - 4095 },
            ];
            assert_eq!(device.deadline(), None);
            for (token, operation) in operations.into_iter().enumerate() {
                device.submit(&mut reactor, operation, token as u64, now);
            }
            assert_eq!(device.deadline(), Some(now));
            let mut done = Vec::new();
            device.poll(&mut reactor, now, &mut done);
            assert_eq!(device.deadline(), None);
            assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [0, 1, 2, 3]);
            assert_eq!(done[3].result, Err(DeviceError::RANGE));
            assert!(done[..3].iter().all(|done| done.result.is_ok()));
            assert!(target.part(0, 512).is_zero());
            assert_eq!(target.skip(512).crc32c(), source.part(0, 3584).crc32c());
        }
    }

    #[test]
    fn zeroing_small_and_large_ranges_leaves_their_neighbours() {
        let device = MemoryDevice::new(1 << 20, 512).unwrap();
        for (offset, length) in
            [(0, 1 << 20), (1, 5), (4095, 2), (4096, 4096), (100, 300_000), (4096, 65_536), (5, 0)]
        {
            device.write_at(0, &vec![7; 1 << 20]).unwrap();
            device.perform(Operation::Discard { offset, length }).unwrap();
            let mut bytes = vec![0; 1 << 20];
            device.read_at(0, &mut bytes).unwrap();
            let zeroed = |place: usize| (offset..offset + length).contains(&(place as u64));
            let good = bytes.iter().enumerate().all(|(i, byte)| (*byte == 0) == zeroed(i));
            assert!(good, "{length} at {offset}");
        }
        assert!(device.read_at(1 << 20, &mut [0]).is_err());
        assert!(device.write_at(u64::MAX, &[0]).is_err());
    }
}
