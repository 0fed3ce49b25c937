// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache that is older than it was when it was served last: a copy that was made before, or a snapshot that was put back. What it
//! holds may have been written back since, and written again: it is for such a volume what a stale one is (M2 of `stale`).
//!
//! Each opening raises the cache's generation. What is written down of a volume tells by which one it was served last.

use crate::args::ServeArgs;
use crate::state_dir::{Mark, StateDir, Why};
use crate::units::clock;
use anyhow::{Result, bail};
use forebay::shard::{Opening, uuid_text};
use forebay_core::format::superblock::{Superblock, Volume};
use forebay_core::units::VolumeIndex;

/// Volumes that were served by a later generation, by uuid; and until when.
#[derive(Default)]
pub(super) struct Older(Vec<(String, u64)>);

impl Older {
    /// As the cache is found, before it is opened.
    pub(super) fn find(dir: Option<&StateDir>, superblock: &Superblock) -> Result<Older> {
        let mut older = Older::default();
        let Some(dir) = dir else { return Ok(older) };
        let cache = uuid_text(&superblock.uuid);
        for volume in superblock.volumes.iter().flatten() {
            let uuid = uuid_text(&volume.uuid);
            let known = dir.read(&cache, &uuid)?;
            if let Some(known) = known.filter(|it| it.generation > superblock.open_generation) {
                older.0.push((uuid, known.left_at.unwrap_or(superblock.written_at)));
            }
        }
        Ok(older)
    }

    /// Refuses it where something dirty is in it that nobody has decided on. Nothing is changed yet: another opening would look like the
    /// later one.
    pub(super) fn check(
        &self,
        superblock: &Superblock,
        opening: &Opening,
        args: &ServeArgs,
    ) -> Result<()> {
        for (at, volume) in superblock.volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            let (name, is_dirty) = (&volume.name, opening.is_dirty(VolumeIndex(at as u8)));
            let Some(mark) = self.mark(volume).filter(|_| is_dirty) else { continue };
            if args.if_changed(name).is_none() {
                bail!(
                    "this cache is older than it was when {name} was served last ({}): a copy, or a snapshot that was put back? What is \
                     dirty in it may be older than what is on the backing device; serve the later one, or give --if-changed \
                     {name}=keep-dirty or {name}=lose-dirty",
                    clock(mark.since)
                );
            }
        }
        Ok(())
    }

    /// The mark that it has for a volume.
    pub(super) fn mark(&self, recorded: &Volume) -> Option<Mark> {
        let uuid = uuid_text(&recorded.uuid);
        let (_, since) = *self.0.iter().find(|it| it.0 == uuid)?;
        let attach_generation = recorded.attach_generation;
        Some(Mark { attach_generation, since, why: Why::OlderCache, is_kept: false })
    }

    /// A volume is served, and written down by this generation.
    pub(super) fn is_noted(&mut self, volume: &str) {
        self.0.retain(|it| it.0 != volume);
    }
}
