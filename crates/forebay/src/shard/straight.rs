// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes that go straight between a guest's memory, which is a buffer of the ring ([`Registered`]), and a backing device.
//!
//! # Invariants
//!
//! - **B1** Nothing goes straight unless the whole request is one operation on the backing device: a write around the log, or a read of which
//!   the log holds no block. All else is copied, at the moment when it is found out: a write's bytes can still be had
//!   ([`crate::elsewhere`]), and a read's are in its span.
//! - **B2** A read goes straight only where nothing is made of what is read: no copy for the cache, and nobody waits for it (F5 of
//!   `op/miss.rs`).
//! - **B3** A device is asked for it only if it says that it takes such buffers ([`Device::takes_registered`]).

use super::Shard;
use crate::elsewhere::Bytes;
use crate::io::{Device, DeviceError, Operation, Registered};
use crate::memory::RequestMemory;
use forebay_core::format::superblock::Mode;
use forebay_core::payload::Place;
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};

impl Shard {
    /// Whether it is worth while to have a volume's requests as buffers of the ring: its writes go around the log, and its backing device takes
    /// such buffers. They may come in any case.
    pub fn may_go_straight(&self, volume: VolumeIndex) -> bool {
        let recorded = self.superblock.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        let goes_around = recorded.is_some_and(|volume| volume.mode == Mode::WriteAround);
        self.reactor.has_drivers_buffers() && goes_around && self.takes_registered(volume)
    }

    fn takes_registered(&self, volume: VolumeIndex) -> bool {
        self.backing(volume).is_some_and(Device::takes_registered) // B3
    }

    /// What a request brings along.
    pub(super) fn memory_of(
        &self,
        volume: VolumeIndex,
        (op, offset, length): (Op, u64, u64),
        bytes: Bytes,
    ) -> RequestMemory {
        let Bytes { span, elsewhere, registered } = bytes;
        let may = || match op {
            Op::Write { .. } => true,
            Op::Read => {
                let is_whole = (offset | length).is_multiple_of(BLOCK_BYTES); // B1
                let config = self.engine.config();
                is_whole && config.fill_run_max == 0 && config.ahead_blocks == 0 // B2
            }
            _ => false,
        };
        let registered = registered.filter(|buffer| {
            u64::from(buffer.len()) == length && may() && self.takes_registered(volume)
        });
        RequestMemory { span, offset, length, elsewhere, registered, is_straight: false }
    }

    /// The buffer for a read of all of a request (B1), if it has one.
    pub(super) fn read_straight(&mut self, to: Place, blocks: u16) -> Option<Registered> {
        let Place::Request { tag, block: 0 } = to else { return None };
        let request = &mut self.memory.requests[tag as usize];
        let is_all = u64::from(blocks) * BLOCK_BYTES == request.length;
        let buffer = request.registered.filter(|_| is_all)?;
        request.is_straight = true;
        Some(buffer)
    }

    /// What a write around the log asks of the backing device.
    pub(super) fn write_around(&mut self, tag: u32) -> Result<Operation, DeviceError> {
        let request = self.memory.requests[tag as usize];
        let RequestMemory { span, offset, length, registered, .. } = request;
        match (registered, span) {
            (Some(buffer), _) => Ok(Operation::WriteRegistered { buffer, offset }),
            (None, None) => Ok(Operation::WriteZeroes { offset, length }),
            (None, Some(_)) if !self.memory.fetch(tag) => Err(DeviceError::IO),
            (None, Some(span)) => {
                Ok(Operation::Write { span: span.part(0, length as usize), offset })
            }
        }
    }
}
