// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay forget`: takes a volume out of a cache.

use crate::args::ForgetArgs;
use crate::state_dir::StateDir;
use crate::units::size;
use crate::{backing, hide};
use anyhow::{Result, bail};
use forebay::io::FileDevice;
use forebay::shard::{CACHE_SOURCE, Shard, ShardOptions, uuid_text};
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

const CLOSE_LIMIT: Duration = Duration::from_secs(60);

pub fn run(args: &ForgetArgs) -> Result<ExitCode> {
    let device = backing::open_exclusive(&args.cache, CACHE_SOURCE, None)?;
    let mut shard = Shard::open(Box::new(device), &ShardOptions::default())?;
    let Some(index) = shard.find(&args.name) else {
        let volumes = shard.superblock().volumes.iter().flatten();
        let names: Vec<&str> = volumes.map(|volume| volume.name.as_str()).collect();
        bail!("{}: no such volume in this cache; it has: {}", args.name, names.join(", "));
    };
    if let Some(dirty) = dirty_text(&shard, index) {
        if !args.lose_dirty {
            bail!(
                "{dirty}: not all of it is on its backing device; run `forebay drain --cache {}` \
                 first, or give --lose-dirty",
                args.cache.display()
            );
        }
        ask_for(&[dirty])?;
    }
    let volume = shard.superblock().volumes[usize::from(index.0)].as_ref();
    let volume = volume.map(|volume| uuid_text(&volume.uuid)).unwrap_or_default();
    shard.forget(index)?;
    let cache = uuid_text(&shard.superblock().uuid);
    shard.close(CLOSE_LIMIT)?;
    hide::erase(&cache, &args.name)?;
    StateDir::open(args.state_dir.as_deref())?.remove(&cache, &volume)?;
    println!("{}: forgotten", args.name);
    Ok(ExitCode::SUCCESS)
}

/// `name (3.1 GiB)` if the volume has data that is not on its backing device, or has lost such data.
fn dirty_text(shard: &Shard, index: VolumeIndex) -> Option<String> {
    let status = shard.engine().status(index).filter(|status| status.dirty || status.frozen)?;
    let name = shard.superblock().volumes[usize::from(index.0)].as_ref()?.name.clone();
    Some(format!("{name} ({})", size(status.dirty_blocks * BLOCK_BYTES)))
}

/// The volumes of a cache that have data which is not on their backing devices, what a killed
/// process left in memory included.
pub fn dirty_volumes(device: FileDevice) -> Result<Vec<String>> {
    let shard = Shard::open(Box::new(device), &ShardOptions::default())?;
    let indexes = (0..shard.superblock().volumes.len() as u8).map(VolumeIndex);
    let dirty = indexes.filter_map(|index| dirty_text(&shard, index)).collect();
    shard.close(CLOSE_LIMIT)?;
    Ok(dirty)
}

/// Asks to type the names of what is given up; without a terminal that is refused.
pub fn ask_for(dirty: &[String]) -> Result<()> {
    if dirty.is_empty() {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        bail!("giving up {} needs a terminal to confirm it", dirty.join(", "));
    }
    for text in dirty {
        let name = text.split(" (").next().unwrap_or_default();
        print!("{text} will be lost. Type its name to go on: ");
        std::io::stdout().flush()?;
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line)?;
        if line.trim() != name {
            bail!("'{}' is not '{name}'; nothing was changed", line.trim());
        }
    }
    Ok(())
}
