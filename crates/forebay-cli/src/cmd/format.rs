// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay format`: makes a new, empty cache.

mod content;
mod new_file;

use crate::args::FormatArgs;
use crate::state_dir::StateDir;
use crate::units::{count, size};
use crate::{backing, config, memory, quoted};
use anyhow::{Result, bail};
use forebay::cache::{self, CacheError};
use forebay::io::{Device, DeviceKind, FileDevice};
use forebay::shard::{CACHE_SOURCE, uuid_text, wall_now};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Superblock;
use forebay_core::limits::CACHE_BYTES_MIN;
use new_file::NewFile;
use rustix::fs::{SeekFrom, fstatfs, ftruncate, seek};
use rustix::io::Errno;
use std::process::ExitCode;
use tracing::warn;

pub fn run(args: &FormatArgs) -> Result<ExitCode> {
    if args.cache.exists() {
        return format(args, None);
    }
    format(args, Some(&NewFile::make(args)?))
}

fn format(args: &FormatArgs, new: Option<&NewFile>) -> Result<ExitCode> {
    let path = args.cache.display();
    let device = match new {
        Some(new) => new.device()?,
        None => backing::open_exclusive(&args.cache, CACHE_SOURCE, None)?,
    };
    let info = device.info().clone();
    let size_bytes = args.size.unwrap_or(info.size_bytes);
    if size_bytes > info.size_bytes {
        bail!(
            "{path}: holds {}, less than --size asks for; give a smaller one or leave it out",
            size(info.size_bytes)
        );
    }
    if size_bytes < CACHE_BYTES_MIN {
        bail!("{path}: holds {}; a cache needs at least 64 MiB", size(size_bytes));
    }
    let found = cache::read_superblock(&device).map(|found| found.superblock);
    let unknown = found.as_ref().err().map(ToString::to_string);
    let before = found.ok();
    let state_dir = match &before {
        Some(before) => {
            let (uuid, given) = (uuid_text(&before.uuid), args.state_dir.as_deref());
            let path = config::state_dir_of(&args.cache, &uuid, given)?;
            StateDir::open(path.as_deref())?.ok()
        }
        None => None,
    };
    let owners = match new {
        Some(_) => content::Owners::default(),
        None => content::Owners::of(args)?,
    };
    let device = content::check(args, device, unknown, state_dir.as_ref())?;
    cache::check_size(&device, size_bytes, args.segment_size)
        .map_err(|error| named(args, error))?;
    take_room(args, &device, size_bytes)?;
    if is_in_ram(&device) {
        warn!("{path}: is in RAM: what is in it is gone when the machine stops");
    }
    // Nothing stands against it any more.
    owners.pass()?;
    let superblock = cache::format(&device, size_bytes, args.segment_size, wall_now())?;
    new.map_or(Ok(()), |new| new.show(&args.cache))?;
    print_result(args, &superblock)?;
    if let Some(before) = before {
        super::forget::release(&before, None, state_dir.as_ref())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Of a new file nobody knows the name that it has as yet.
fn named(args: &FormatArgs, error: CacheError) -> CacheError {
    match error {
        CacheError::TooSmall { found, needed, .. } => {
            CacheError::TooSmall { device: args.cache.display().to_string(), found, needed }
        }
        other => other,
    }
}

/// A file may have holes, which would be filled when guests write: then there may be no room left.
fn take_room(args: &FormatArgs, device: &FileDevice, size_bytes: u64) -> Result<()> {
    let Some(file) = device.descriptor().filter(|_| device.info().kind == DeviceKind::File) else {
        return Ok(());
    };
    if let Err(error) = forebay::host::allocate(file, size_bytes) {
        if seek(file, SeekFrom::Data(0)) == Err(Errno::NXIO) {
            // A file of holes, as it was, gives back what there was of room.
            let length = device.info().size_bytes;
            let _ = ftruncate(file, 0).and_then(|()| ftruncate(file, length));
        }
        let path = args.cache.display();
        bail!(
            "{path}: there is no room for it: {error}; make room on its file system (`df -h` shows it), or use another"
        );
    }
    Ok(())
}

/// Whether a file is on a tmpfs (devtmpfs is one), or a ramfs.
fn is_in_ram(device: &FileDevice) -> bool {
    let file = device.descriptor().filter(|_| device.info().kind == DeviceKind::File);
    let found = file.and_then(|file| fstatfs(file).ok());
    found.is_some_and(|found| [0x0102_1994, 0x8584_58f6].contains(&(found.f_type as u32)))
}

/// What an opening after a crash took on the machine of `bench/results/opening.jsonl` (two processors, 6706e10): 0.42, 0.49, 0.52
/// and 4.99 s at 1, 4, 16 and 1024 GiB. It is linear but for the first half second.
fn opening_seconds(size_bytes: u64) -> f64 {
    0.45 + 0.00443 * (size_bytes as f64 / f64::from(1 << 30))
}

fn print_result(args: &FormatArgs, superblock: &Superblock) -> Result<()> {
    let path = args.cache.display();
    let config = memory::fit(
        &Config::default(),
        0,
        superblock,
        memory::Counts::volumes(1),
        crate::args::MEMORY_DEFAULT,
    )?;
    let parts = memory::parts(superblock, memory::Counts::volumes(1), &config);
    let usable = u64::from(superblock.segment_count) * u64::from(superblock.segment_bytes);
    out!("cache {} of {} made on {path}", uuid_text(&superblock.uuid), size(usable));
    out!("memory that `serve` will take with one volume:");
    let mut total = 0;
    for (name, bytes) in parts {
        out!("  {:>9}  {name}", size(bytes));
        total += bytes;
    }
    out!("  {:>9}  in all", size(total));
    out!(
        "  {:>9}  at most, with up to {}, whatever they are attached by (`--memory` bounds all but the map; more volumes may need more)",
        size(memory::most(superblock, &config, crate::args::MEMORY_DEFAULT)),
        count(memory::volumes_max(superblock, crate::args::MEMORY_DEFAULT), "volume")
    );
    out!(
        "opening after a crash: about {:.1} s where it reads 2 GB/s; longer behind many small writes with a flush after each",
        opening_seconds(usable)
    );
    let cache = quoted::shell(&args.cache);
    out!("next: forebay serve --cache {cache} --volume NAME=BACKING");
    Ok(())
}
