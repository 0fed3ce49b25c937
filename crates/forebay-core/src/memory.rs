// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How much memory an engine takes: told before it is taken, and measured while it runs (P9).
//!
//! # Invariants
//!
//! - **M1** Of each part the engine never holds more than was told before it was made.

use crate::effect::Effect;
use crate::engine::{Active, Config, Engine, Pending, work_frames};
use crate::limits::{REQUEST_COUNT_MAX, TOKEN_COUNT_MAX, VOLUME_COUNT_MAX};
use crate::log::checkpoint::Checkpointer;
use crate::log::reclaim::CHANCE_COUNT_MAX;
use crate::log::segment::Segments;
use crate::log::tickets::Tickets;
use crate::map::index::Index;
use crate::map::slots::Slots;
use crate::op::ahead::Ahead;
use crate::op::miss::{SHARED_MAX, Shared};
use crate::policy::flushes::Flushes;
use crate::policy::history::History;
use crate::policy::lane::Lane;
use crate::policy::streams::Streams;
use crate::slab::Slab;
use crate::units::BLOCK_BYTES;
use crate::volume::Volume;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Bytes a list has room for.
pub(crate) fn vec_bytes<T>(list: &Vec<T>) -> u64 {
    (list.capacity() * size_of::<T>()) as u64
}

/// Bytes a queue has room for.
pub(crate) fn queue_bytes<T>(queue: &VecDeque<T>) -> u64 {
    (queue.capacity() * size_of::<T>()) as u64
}

impl Engine {
    /// Bytes of memory the engine takes for a cache of `segment_count` segments of
    /// `segment_blocks` blocks with `volume_count` volumes: the parts, by name.
    pub fn memory_parts(
        segment_count: u32,
        segment_blocks: u16,
        volume_count: usize,
        config: &Config,
    ) -> [(&'static str, u64); 11] {
        let slots = u64::from(segment_count) * u64::from(segment_blocks);
        let volumes = volume_count as u64;
        let requests = Slab::<Active>::memory_bytes(REQUEST_COUNT_MAX)
            + Slab::<Pending>::memory_bytes(TOKEN_COUNT_MAX)
            + (2 * TOKEN_COUNT_MAX * size_of::<Effect>()) as u64
            + (VOLUME_COUNT_MAX * size_of::<usize>()) as u64
            + u64::from(config.buffer_count) * 2
            + (CHANCE_COUNT_MAX * size_of::<u32>()) as u64
            + (SHARED_MAX * size_of::<Shared>()) as u64
            + Tickets::memory_bytes()
            + Flushes::memory_bytes()
            + Ahead::memory_bytes(config.ahead_blocks)
            + 2 * Streams::memory_bytes();
        [
            ("index", Index::memory_bytes(slots)),
            ("slots and checksums", Slots::memory_bytes(slots)),
            ("segments", Segments::memory_bytes(segment_count)),
            ("history of misses", History::memory_bytes(slots)),
            ("volumes", volumes * Volume::memory_bytes(config)),
            ("write-back window", u64::from(work_frames(config)) * BLOCK_BYTES),
            ("read-ahead", u64::from(config.ahead_blocks) * BLOCK_BYTES),
            ("batches", Lane::memory_bytes(config)),
            (
                "segment buffers",
                u64::from(config.buffer_count) * u64::from(segment_blocks) * BLOCK_BYTES,
            ),
            ("checkpoint stream", Checkpointer::memory_bytes(segment_count, segment_blocks)),
            ("requests and effects", requests),
        ]
    }

    /// What it holds now of the parts that are its own, by the same names: a list that grew would
    /// show here (M1).
    pub fn memory_held(&self) -> [(&'static str, u64); 8] {
        let volumes = self.volumes.iter().flatten();
        let requests = self.requests.held_bytes()
            + self.tokens.held_bytes()
            + queue_bytes(&self.effects)
            + vec_bytes(&self.volumes)
            + vec_bytes(&self.buffers)
            + vec_bytes(&self.chance_frames)
            + vec_bytes(&self.shared)
            + Tickets::memory_bytes()
            + self.flushes.held_bytes()
            + self.ahead.held_bytes()
            + 2 * Streams::memory_bytes();
        let batches =
            self.lanes.iter().map(Lane::held_bytes).sum::<u64>() + vec_bytes(&self.sort_room);
        [
            ("index", self.index.held_bytes()),
            ("slots and checksums", self.slots.held_bytes()),
            ("segments", self.segments.held_bytes()),
            ("history of misses", self.history.held_bytes()),
            ("volumes", volumes.map(|volume| volume.held_bytes()).sum()),
            ("batches", batches),
            ("checkpoint stream", self.checkpoint.held_bytes()),
            ("requests and effects", requests),
        ]
    }
}
