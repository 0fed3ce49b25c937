// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay forget`: takes a volume out of a cache.

use super::serve::DURABLE;
use crate::args::ForgetArgs;
use crate::attach::left;
use crate::older::Older;
use crate::state_dir::StateDir;
use crate::units::{count, size};
use crate::{backing, config, hide, quoted};
use anyhow::{Result, bail};
use forebay::cache;
use forebay::io::FileDevice;
use forebay::shard::{CACHE_SOURCE, Shard, ShardOptions, uuid_text};
use forebay_core::format::superblock::Superblock;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::process::ExitCode;

pub fn run(args: &ForgetArgs) -> Result<ExitCode> {
    let device = backing::open_exclusive(&args.cache, CACHE_SOURCE, None)?;
    let superblock = cache::read_superblock(&device)?.superblock;
    left::check_none(&superblock, Some(&args.name))?;
    let uuid = uuid_text(&superblock.uuid);
    let state_dir = config::state_dir_of(&args.cache, &uuid, args.state_dir.as_deref())?;
    let state_dir = StateDir::open(state_dir.as_deref())?.ok();
    Older::find(state_dir.as_ref(), &superblock)?.mark_all()?;
    let mut shard = Shard::open(Box::new(device), &ShardOptions::default())?;
    let before = shard.superblock().clone();
    let forgotten = forget(&mut shard, args, state_dir.as_ref());
    // Also if nothing came of it: the next start finds it as this one did.
    let closed = shard.close(DURABLE);
    let index = forgotten?;
    closed?;
    out!("{}: forgotten", args.name);
    release(&before, Some(index), state_dir.as_ref())?;
    Ok(ExitCode::SUCCESS)
}

fn forget(
    shard: &mut Shard,
    args: &ForgetArgs,
    state_dir: Option<&StateDir>,
) -> Result<VolumeIndex> {
    let Some(index) = shard.find(&args.name) else {
        let volumes = shard.superblock().volumes.iter().flatten();
        let names: Vec<&str> = volumes.map(|volume| volume.name.as_str()).collect();
        let has = match names.is_empty() {
            true => "it has none, so there is nothing to forget".into(),
            false => format!("it has: {}", names.join(", ")),
        };
        bail!("{}: no such volume in this cache; {has}", args.name);
    };
    if let Some(dirty) = dirty(shard, index) {
        if !args.lose_dirty {
            bail!("{}: {}", dirty.text, advice([&dirty], &args.cache, state_dir));
        }
        ask_for(&[dirty])?;
    }
    shard.forget(index)?;
    Ok(index)
}

/// Removes what this machine has written down of a volume that is not the cache's any more, or of all of them.
pub fn release(
    before: &Superblock,
    only: Option<VolumeIndex>,
    state_dir: Option<&StateDir>,
) -> Result<()> {
    let cache = uuid_text(&before.uuid);
    let mut done = Ok(());
    for (at, volume) in before.volumes.iter().enumerate() {
        let Some(volume) = volume else { continue };
        if only.is_none_or(|only| usize::from(only.0) == at) {
            // One that fails does not keep the other.
            let removed =
                state_dir.map_or(Ok(()), |dir| dir.remove(&cache, &uuid_text(&volume.uuid)));
            done = done.and(hide::erase(&cache, &volume.name)).and(removed);
        }
    }
    done
}

/// A volume that has data which is not on its backing device, or has lost such data.
pub struct Dirty {
    /// `name (3.1 GiB)`.
    pub text: String,
    /// A drain would bring something to its backing device.
    can_be_drained: bool,
}

fn dirty(shard: &Shard, index: VolumeIndex) -> Option<Dirty> {
    let status = shard.engine().status(index)?;
    let name = &shard.superblock().volumes[usize::from(index.0)].as_ref()?.name;
    let dirty = size(status.dirty_blocks * BLOCK_BYTES);
    let text = match status.lost_blocks_now {
        // The cache alone knows which: without it they would read as they were before.
        1.. => format!("{name} ({dirty}, {} lost)", count(status.lost_blocks_now, "block")),
        0 if status.dirty || status.frozen => format!("{name} ({dirty})"),
        0 => return None,
    };
    Some(Dirty { text, can_be_drained: status.dirty && !status.frozen })
}

/// What to do before these are given up.
pub fn advice<'a>(
    dirty: impl IntoIterator<Item = &'a Dirty>,
    cache: &Path,
    state_dir: Option<&StateDir>,
) -> String {
    match dirty.into_iter().any(|it| it.can_be_drained) {
        true => format!(
            "not all of it is on its backing device; run `forebay drain --cache {}{}` first, or give --lose-dirty",
            quoted::shell(cache),
            state_dir.map_or_else(String::new, StateDir::option)
        ),
        false => "only the cache knows what is lost of it, and a drain brings nothing back; write that again (a \
                  frozen volume takes nothing), or give --lose-dirty"
            .into(),
    }
}

/// The volumes of a cache that have data which is not on their backing devices, what a killed
/// process left in memory included.
pub fn dirty_volumes(device: FileDevice, state_dir: Option<&StateDir>) -> Result<Vec<Dirty>> {
    Older::find(state_dir, &cache::read_superblock(&device)?.superblock)?.mark_all()?;
    let shard = Shard::open(Box::new(device), &ShardOptions::default())?;
    let indexes = (0..shard.superblock().volumes.len() as u8).map(VolumeIndex);
    let dirty = indexes.filter_map(|index| dirty(&shard, index)).collect();
    shard.close(DURABLE)?;
    Ok(dirty)
}

/// They, in a row.
pub fn texts(dirty: &[Dirty]) -> String {
    dirty.iter().map(|it| it.text.as_str()).collect::<Vec<_>>().join(", ")
}

/// Asks to type the names of what is given up; without a terminal that is refused.
pub fn ask_for(dirty: &[Dirty]) -> Result<()> {
    if dirty.is_empty() {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        bail!(
            "giving up {} needs a terminal to confirm it; run it in one, without `<` and `|` before it (over ssh: `ssh -t`)",
            texts(dirty)
        );
    }
    for Dirty { text, .. } in dirty {
        let name = text.split(" (").next().unwrap_or_default();
        out_part!("{text} will be lost. Type its name to go on: ");
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line)?;
        if line.trim() != name {
            bail!("'{}' is not '{name}'; nothing was changed", line.trim());
        }
    }
    Ok(())
}
