// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `forebay format` would erase, and who may want it.
//!
//! # Invariants
//!
//! - **E1** What is erased was named before, and asked for: by `--force`, and by `--lose-dirty` as well where it may be all that is left of a
//!   volume's data.
//! - **E2** A disk that a cache holds something of is not formatted before that cache is marked stale, durably (M1 of `serve/stale`).

use crate::args::FormatArgs;
use crate::attach::left;
use crate::cmd::forget;
use crate::state_dir::{Mark, Record, StateDir, Why};
use crate::units::size;
use crate::{backing, config, quoted};
use anyhow::{Context, Result, bail};
use forebay::cache;
use forebay::host::machine::Host;
use forebay::host::signature::{self, Kind};
use forebay::io::{Device, FileDevice};
use forebay::shard::CACHE_SOURCE;
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use std::path::Path;

/// Caches that the device is known to belong to, as a volume's backing device.
#[derive(Default)]
pub struct Owners(Vec<(StateDir, Record)>);

impl Owners {
    /// Refuses it where that was not asked for: the disk may lack what makes a file system of it, which the cache has.
    pub fn of(args: &FormatArgs) -> Result<Owners> {
        let path = args.cache.display();
        let mut owners = Vec::new();
        let dirs = config::state_dirs(args.state_dir.as_deref())
            .with_context(|| format!("{path}: whose it is is not known"))?;
        for dir in StateDir::there(dirs.into_iter()) {
            let known = match dir.of_backing(&args.cache) {
                Err(error) if error.downcast_ref().is_some_and(config::is_not_ours) => continue,
                known => known?,
            };
            owners.extend(known.into_iter().map(|record| (dir.clone(), record)));
        }
        // What was given up before is not asked about again.
        owners.retain(|(_, it)| it.mark_for(it.attach_generation).is_none_or(|mark| mark.is_kept));
        for (dir, record) in &owners {
            let Record { name, cache, cache_path, dirty, .. } = record;
            if args.force && (args.lose_dirty || !dirty) {
                continue;
            }
            let at = quoted::shell(Path::new(cache_path));
            let (newer, drained, options) = match dirty {
                true => (
                    ", which may hold newer data",
                    format!("`forebay drain --cache {at} {name}{}` and then ", dir.option()),
                    "--force and --lose-dirty",
                ),
                false => ("", String::new(), "--force"),
            };
            bail!(
                "{path}: belongs to volume {name} of the cache {cache} ({cache_path}){newer}: {drained}`forebay forget --cache \
                 {at} {name}{}` takes it out of that; or give {options} to erase it all the same",
                dir.option()
            );
        }
        Ok(Owners(owners))
    }

    /// They are stale from now on (E2). The device is locked (N5 of `state_dir`).
    pub fn pass(self) -> Result<()> {
        for (dir, mut record) in self.0 {
            record.stale = Some(Mark::new(record.attach_generation, Why::Changed));
            dir.write(&record)?;
        }
        Ok(())
    }
}

/// Refuses to erase what somebody may want. `unknown`: why there is no cache that can be read.
pub fn check(
    args: &FormatArgs,
    device: FileDevice,
    unknown: Option<String>,
    state_dir: Option<&StateDir>,
) -> Result<FileDevice> {
    let path = args.cache.display();
    let size_bytes = device.info().size_bytes;
    let mut read = |offset: u64, bytes: &mut [u8]| device.read_at(offset, bytes);
    let found = signature::probe(&mut read, size_bytes)
        .with_context(|| format!("{path}: cannot be read, so what is on it is unknown"))?;
    let model = Host::default().model_of(&args.cache).map_or(String::new(), |it| format!("{it}, "));
    out!("{path}: {model}{}", size(size_bytes));
    for signature in &found {
        out!("  holds {signature}");
    }
    if let Some(why) = unknown {
        if !found.is_empty() && !args.force {
            bail!("{path}: would erase what is listed above; give --force if that is meant");
        }
        if !args.force && has_data(&device).with_context(|| format!("{path}: cannot be read"))? {
            bail!(
                "{path}: is a file with something in it that is no forebay cache; give --force if it may be erased"
            );
        }
        if found.iter().any(|it| it.kind == Kind::Forebay) && !args.lose_dirty {
            bail!(
                "{path}: is a forebay cache that cannot be read, and may have data that is not on its backing devices: {why}; \
                 give --lose-dirty as well to erase it all the same"
            );
        }
        return Ok(device);
    }
    if !args.force {
        bail!("{path}: is a forebay cache already; give --force to erase it");
    }
    left::check_none(&cache::read_superblock(&device)?.superblock, None)?;
    let dirty = forget::dirty_volumes(device, state_dir)?;
    if !dirty.is_empty() && !args.lose_dirty {
        bail!(
            "{path}: has what its backing devices lack: {}: {}",
            forget::texts(&dirty),
            forget::advice(&dirty, &args.cache, state_dir)
        );
    }
    forget::ask_for(&dirty)?;
    backing::open_exclusive(&args.cache, CACHE_SOURCE, None)
}

/// Whether a file, not a device, has a byte in it that is not zero. Holes are not read.
fn has_data(device: &FileDevice) -> Result<bool> {
    let Some(file) = device.descriptor() else { return Ok(false) };
    if FileType::from_raw_mode(fstat(file)?.st_mode) != FileType::RegularFile {
        return Ok(false);
    }
    let size_bytes = device.info().size_bytes;
    let mut bytes = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        at = match seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < size_bytes => data,
            // A file system without holes.
            Err(rustix::io::Errno::INVAL) => at,
            Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        if at >= size_bytes {
            return Ok(false);
        }
        let length = bytes.len().min((size_bytes - at) as usize);
        device.read_at(at, &mut bytes[..length])?;
        if bytes[..length].iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
        at += length as u64;
    }
}
