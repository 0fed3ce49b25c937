// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What was read for a client that does not receive is put aside when others want the memory, and is read again when the
//! client goes on.
//!
//! # Invariants
//!
//! - **A1** What was read and waits for its client to receive has memory of reads for [`ASIDE_AFTER`] while another connection
//!   waits for some, and no longer. So who does not receive holds up nobody: neither by much nor for long.
//! - **A2** What is put aside comes back piece by piece, in its place among what is to be sent, as the client receives; until all
//!   of it has, the connection begins no other read. So what it has asked for stays bounded by the memory that there was for
//!   it, a client that is slow goes on with a piece at a time, and nobody is closed for being slow.
//! - **A3** A read that nobody has the answer of may be done again: each block of it is of one moment between request and end
//!   of the reply, as ever (`output.rs` keeps what is left of a block that was begun). If it cannot be read again, when its
//!   head may be on its way, nothing but the end of the connection says so.
//! - **A4** Who has none and has waited for so long, and for the longest, is first (M3 of `pool.rs`).

use super::{COMMAND_COUNT_MAX, Connection, PIECE_BYTES, Phase, SEND};
use crate::nbd::output::{Aside, Found};
use crate::nbd::pool::Pool;
use forebay::shard::Shard;
use forebay_core::request::{Op, RequestError};
use forebay_core::units::{BLOCK_BYTES, Tick};
use std::time::Duration;

/// What waits for its client may have memory for so long while others want it (A1). A client that takes 0.5 MB a second has received
/// a piece of what was put aside by then. Tests do not wait.
const ASIDE_AFTER: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 500 });
/// The number of what is read again, which is no command's.
pub(super) const AGAIN: usize = COMMAND_COUNT_MAX;

fn is_old(since: Tick, now: Tick) -> bool {
    now.0.saturating_sub(since.0) >= ASIDE_AFTER.as_nanos() as u64
}

#[cfg(test)]
thread_local! {
    /// How often something was put aside.
    pub(super) static MARK: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

impl Connection {
    /// It wants memory of reads that others have.
    pub(in crate::nbd) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Since when, if that is too long and it has none (A4).
    pub(in crate::nbd) fn overdue_since(&self, now: Tick, pool: &Pool) -> Option<Tick> {
        let has_some = pool.has_some(self.names.owner);
        self.waiting_since.filter(|since| !has_some && is_old(*since, now))
    }

    pub(super) fn note_waiting(&mut self, shard: &Shard) {
        if self.is_waiting {
            self.waiting_since.get_or_insert_with(|| shard.now());
        } else {
            self.waiting_since = None;
        }
    }

    /// It ended because what was put aside could not be read again; the export's name.
    pub(in crate::nbd) fn unreadable(&self) -> Option<&str> {
        match &self.phase {
            Phase::Transmission { session, .. } if self.is_unreadable => Some(&session.export_name),
            _ => None,
        }
    }

    /// Others wait: what has waited for the client for long is put aside (A1). Says whether memory came free.
    pub(in crate::nbd) fn give_way(
        &mut self,
        now: Tick,
        shard: &mut Shard,
        pool: &mut Pool,
    ) -> bool {
        if self.is_broken || !self.output.found_since().is_some_and(|since| is_old(since, now)) {
            return false;
        }
        let free_before = pool.free_count();
        #[cfg(test)]
        MARK.with(|it| it.set(it.get() + 1));
        if self.output.put_aside(pool) {
            // It is called off, and put aside as far as it was not sent; again in each turn, as the reactor may not have it yet.
            (self.is_recalled, self.was_recalled) = (true, true);
            shard.reactor.cancel(self.names.reactor(SEND));
        }
        pool.free_count() > free_before
    }

    /// Reads the next piece of what was put aside, when its turn has come (A2).
    pub(super) fn read_again(&mut self, shard: &mut Shard, pool: &mut Pool) {
        let Phase::Transmission { volume, .. } = self.phase else { return };
        let Some(Aside { at, length }) = self.output.front_aside() else { return };
        if self.again.is_some() || self.is_resting {
            return;
        }
        let (skip, owner) = (at % BLOCK_BYTES, self.names.owner);
        let length = length.min(PIECE_BYTES - skip);
        let blocks = (skip + length).div_ceil(BLOCK_BYTES) as usize;
        let Some((run, span)) = pool.take_share(owner, blocks) else {
            self.is_waiting |= pool.others_have(owner, blocks);
            return;
        };
        let cookie = self.names.engine(AGAIN, 0);
        if shard.submit(volume, Op::Read, at, length, Some(span), cookie).is_err() {
            return pool.give(run);
        }
        self.again = Some((run, span, length));
        self.waiting_since = None;
    }

    /// What was put aside is there again, or cannot be read.
    pub(super) fn answered_again(
        &mut self,
        result: Result<(), RequestError>,
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        let (run, span, length) = self.again.take().expect("under way");
        match self.output.front_aside() {
            Some(Aside { at, .. }) if result.is_ok() && !self.is_broken => {
                let span = span.part((at % BLOCK_BYTES) as usize, length as usize);
                self.output.found_again(Found { span, run, at, since: shard.now() });
            }
            _ => {
                pool.give(run);
                if !self.is_broken {
                    self.is_unreadable = true; // A3
                    self.broken(shard, pool);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
