// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache that is older than it was when it was served last: a copy that was made before, or a snapshot that was put back. What it
//! holds may have been written back since, and written again.
//!
//! Each opening raises the cache's generation, each write of its superblock a sequence, and each time that a volume's data is given up its attach
//! generation. What is written down of a volume tells what they were when it was served last. An opening makes an older cache look
//! younger: so before that the volume is marked as stale ([`Why::OlderCache`]), and what counts from then on is the mark.

use crate::args::{IfChanged, ServeArgs};
use crate::state_dir::{Mark, Record, StateDir, Why};
use crate::units::clock;
use anyhow::{Result, bail};
use forebay::shard::{Opening, uuid_text};
use forebay_core::format::superblock::{Superblock, Volume};
use forebay_core::units::VolumeIndex;

/// Volumes of which a later state was served.
#[derive(Default)]
pub struct Older<'a> {
    dir: Option<&'a StateDir>,
    /// The generation of the volume's data in this one, and what is written down.
    volumes: Vec<(VolumeIndex, u32, Record)>,
}

impl<'a> Older<'a> {
    /// As the cache is found, before it is opened.
    pub fn find(dir: Option<&'a StateDir>, superblock: &Superblock) -> Result<Older<'a>> {
        let Some(found) = dir else { return Ok(Older::default()) };
        let (cache, mut volumes) = (uuid_text(&superblock.uuid), Vec::new());
        for (at, volume) in superblock.volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            let known = found.read(&cache, &uuid_text(&volume.uuid))?;
            if let Some(known) = known.filter(|known| is_later(known, superblock, volume)) {
                volumes.push((VolumeIndex(at as u8), volume.attach_generation, known));
            }
        }
        Ok(Older { dir, volumes })
    }

    /// Refuses it where something dirty is in it that nobody has decided on. Else it is the one that counts from now on: what is decided is
    /// marked, and the later one will be older.
    pub fn decide(&self, opening: &mut Opening, args: &ServeArgs) -> Result<()> {
        let dirty = |index: &VolumeIndex| opening.is_dirty(*index);
        for (index, _, Record { name, left_at, .. }) in &self.volumes {
            if dirty(index) && args.if_changed(name).is_none() {
                let at = left_at.map_or_else(String::new, |at| format!(" until {}", clock(at)));
                bail!(
                    "this cache is older than it was when {name} was served last{at}: a copy, or a snapshot that was put back? What is \
                     dirty in it may be older than what is on the backing device; take the later one, or `forebay serve` it with \
                     --if-changed {name}=keep-dirty or {name}=lose-dirty"
                );
            }
        }
        self.mark(|index, name| {
            dirty(&index) && args.if_changed(name) == Some(IfChanged::KeepDirty)
        })?;
        self.volumes.iter().for_each(|(_, _, known)| opening.count_from(known.generation));
        Ok(())
    }

    /// Marks all of them. Whoever opens it and serves nobody keeps nothing.
    pub fn mark_all(&self) -> Result<()> {
        self.mark(|_, _| false)
    }

    fn mark(&self, is_kept: impl Fn(VolumeIndex, &str) -> bool) -> Result<()> {
        let Some(dir) = self.dir else { return Ok(()) };
        for (index, attach_generation, known) in &self.volumes {
            let mark = Mark {
                attach_generation: *attach_generation,
                since: known.left_at.unwrap_or(0),
                why: Why::OlderCache,
                is_kept: is_kept(*index, &known.name),
            };
            let stale = Some(mark);
            dir.write(&Record { stale, dirty: true, generation: 0, sequence: 0, ..known.clone() })?;
        }
        Ok(())
    }
}

fn is_later(known: &Record, superblock: &Superblock, volume: &Volume) -> bool {
    let (generation, sequence) = (superblock.open_generation, superblock.sequence);
    // A mark that was made for that counts, and not that it was.
    let is_known = known.generation > 0;
    is_known
        && ((known.generation, known.sequence) > (generation, sequence)
            || known.attach_generation > volume.attach_generation)
}
