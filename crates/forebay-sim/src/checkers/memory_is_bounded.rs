// SPDX-License-Identifier: Apache-2.0 OR MIT
//! P9: of no part of its memory does an engine ever hold more than was told before it was made.

use crate::memory::Memory;
use forebay_core::engine::{Config, Engine};
use forebay_core::format::superblock::Superblock;
use forebay_core::units::BLOCK_BYTES;

/// What is told of a cache before it is opened.
#[derive(Clone, Debug)]
pub struct Bound {
    parts: [(&'static str, u64); 11],
}

impl Bound {
    /// As `serve` prints it.
    pub fn new(superblock: &Superblock, volumes: usize, config: &Config) -> Bound {
        let (count, blocks) = (superblock.segment_count, superblock.segment_blocks());
        Bound { parts: Engine::memory_parts(count, blocks, volumes, config) }
    }

    /// Compares what is held with it, part by part: all that a list has room for counts, used or
    /// not. The runtime's buffers and window are counted in blocks.
    pub fn check(&self, engine: &Engine, memory: &Memory) -> Result<(), String> {
        let told = |name| self.parts.iter().find(|part| part.0 == name).map_or(0, |part| part.1);
        let (buffers, frames) = memory.blocks();
        // What is read ahead lies behind the window.
        let ahead = u64::from(engine.config().ahead_blocks) * BLOCK_BYTES;
        let own = [
            ("segment buffers", buffers * BLOCK_BYTES),
            ("write-back window", frames * BLOCK_BYTES - ahead),
            ("read-ahead", ahead),
        ];
        for (name, held) in engine.memory_held().into_iter().chain(own) {
            let told = told(name);
            if held > told {
                return Err(format!("memory: {name} takes {held} bytes, {told} were told"));
            }
        }
        Ok(())
    }
}
