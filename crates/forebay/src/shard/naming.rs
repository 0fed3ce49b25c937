// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The superblock is written: for the engine beside all else (*naming*), and for who waits for it.

use super::{OpenError, Shard, system, wall_now};
use crate::cache;
use crate::io::{Device, Operation};
use forebay_core::effect::{Fault, SuperblockChange, Token};
use forebay_core::engine::CacheHealth;
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::limits::BACKGROUND_BLOCKS;
use forebay_core::units::BLOCK_SIZE;
use std::io;
use std::time::Instant;

/// The device token of the superblock's own writes.
pub(super) const NAMING_TOKEN: u64 = 1 << 40;
/// Bytes of one of them.
const NAMING_BYTES: usize = BACKGROUND_BLOCKS as usize * BLOCK_SIZE;
/// A copy in parts, and a flush.
const NAMING_STEPS: usize = SUPERBLOCK_SIZE / NAMING_BYTES + 1;
const _: () = assert!(SUPERBLOCK_SIZE.is_multiple_of(NAMING_BYTES));

/// A checkpoint that is being named.
#[derive(Clone, Copy, Debug)]
pub(super) struct Naming {
    token: Token,
    /// [`NAMING_STEPS`] for each copy.
    step: usize,
}

impl Shard {
    /// Writes the superblock with something new in it: one copy, a flush, the other, a flush. Each copy in parts, one after
    /// the other: guests' reads wait behind them.
    pub(super) fn change_superblock(
        &mut self,
        token: Token,
        change: SuperblockChange,
        now: Instant,
    ) {
        change.apply(&mut self.superblock);
        self.superblock.written_at = wall_now();
        let addresses = Superblock::addresses(self.superblock.size_bytes);
        for (copy, address) in addresses.into_iter().enumerate() {
            self.superblock.encode_into(address, &mut self.naming_bytes);
            let span = self.naming_memory.span(copy * SUPERBLOCK_SIZE, SUPERBLOCK_SIZE);
            span.copy_in(&self.naming_bytes);
        }
        self.naming = Some(Naming { token, step: 0 });
        self.name_step(now);
    }

    pub(super) fn name_step(&mut self, now: Instant) {
        let Some(naming) = self.naming else { return };
        let addresses = Superblock::addresses(self.superblock.size_bytes);
        let (copy, part) = (naming.step / NAMING_STEPS, naming.step % NAMING_STEPS);
        let operation = match part * NAMING_BYTES {
            SUPERBLOCK_SIZE => return self.ask_flush(NAMING_TOKEN, now),
            from => {
                let span = self.naming_memory.span(copy * SUPERBLOCK_SIZE + from, NAMING_BYTES);
                Operation::Write { span, offset: addresses[copy] + from as u64 }
            }
        };
        self.cache.submit(&mut self.reactor, operation, NAMING_TOKEN, now);
    }

    pub(super) fn named_step(&mut self, result: Result<(), Fault>) {
        let Some(naming) = &mut self.naming else { return };
        naming.step += 1;
        if result.is_err() || naming.step == 2 * NAMING_STEPS {
            let token = naming.token;
            self.naming = None;
            return self.engine.completed(token, result, &mut self.memory);
        }
        self.name_step(Instant::now());
    }

    /// Both copies, one after the other, and not while a naming writes them: what it has in hand is older, and
    /// would be there in the end.
    pub(super) fn write_superblock(&mut self) -> Result<(), OpenError> {
        self.end_flushes()?;
        if self.engine.health() == CacheHealth::Failed {
            // One copy may not be durable, though it can be read: the other is not to be replaced (R5 of `format/pair`).
            return Err(system("write the superblock")(io::Error::other(
                "the cache device has failed; it is written to when it is opened again",
            )));
        }
        self.superblock.sequence += 1;
        self.superblock.written_at = wall_now();
        Ok(self.flush_alone(cache::write_superblock)?)
    }

    /// Until nothing of the superblock is under way, and no flush of the cache device (D5 in `log/durable.rs`).
    pub(super) fn end_flushes(&mut self) -> Result<(), OpenError> {
        while self.naming.is_some() || !self.flushes.is_idle() {
            self.turn_for_itself(None)?;
        }
        Ok(())
    }

    /// Does something that flushes the cache device, and is waited for. No flush is under way ([`Shard::end_flushes`]).
    pub(super) fn flush_alone<E>(
        &mut self,
        write: impl FnOnce(&dyn Device, &Superblock) -> Result<(), E>,
    ) -> Result<(), E> {
        self.memory.note_flushing(self.engine.log_ends());
        let written = write(self.cache.as_ref(), &self.superblock);
        if written.is_err() {
            // Like any write or flush of the cache device (D3 in `log/durable.rs`).
            self.engine.cache_has_failed();
            self.note_failure();
        }
        self.memory.note_flushed();
        written
    }
}
