// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is stored of a range: answered at once, from the map, so no device holds back who asks. A question that takes 28 bytes looks
//! at many thousand places of the map, and an input holds thousands: a turn answers some, and everybody has the next one sooner.

use super::{Connection, Phase, Pool};
use crate::nbd::reply::{StatusExtent, StatusReply};
use crate::nbd::transmission::Command;
use forebay::shard::Shard;
use forebay_core::units::{BLOCK_BYTES, Lba};

/// So many blocks are looked at in a turn, and at most one question more: some milliseconds.
const LOOKED_MAX: u64 = 1 << 16;

impl Connection {
    /// The rest of its questions wait for the next turn.
    pub(super) fn has_looked_enough(&self) -> bool {
        self.looked >= LOOKED_MAX
    }

    pub(super) fn block_status(&mut self, command: &Command, shard: &mut Shard, pool: &mut Pool) {
        let Phase::Transmission { volume, .. } = self.phase else { return };
        let mut bytes = pool.take_bytes();
        let mut reply = StatusReply::start(command, &mut bytes);
        let first = command.offset / BLOCK_BYTES;
        let end = (command.offset + u64::from(command.length)).div_ceil(BLOCK_BYTES);
        let mut skip = command.offset % BLOCK_BYTES;
        self.looked += shard.zero_runs(volume, Lba(first), end - first, |blocks, zero| {
            let length = (blocks * BLOCK_BYTES - skip).min(u64::from(u32::MAX)) as u32;
            skip = 0;
            // A hole that reads as zeros, or data.
            reply.push(StatusExtent { length, flags: if zero { 3 } else { 0 } })
        });
        reply.finish();
        let is_taken = self.output.push(&bytes);
        pool.give_bytes(bytes);
        if !is_taken {
            self.broken(shard, pool);
        }
    }
}
