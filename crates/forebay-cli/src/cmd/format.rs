// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay format`: makes a new, empty cache.

mod content;

use crate::args::FormatArgs;
use crate::state_dir::StateDir;
use crate::units::size;
use crate::{backing, config, memory, quoted};
use anyhow::{Context, Result, bail};
use forebay::cache;
use forebay::io::{Device, DeviceKind, FileDevice};
use forebay::shard::{CACHE_SOURCE, uuid_text, wall_now};
use forebay_core::engine::Config;
use forebay_core::format::superblock::Superblock;
use forebay_core::limits::CACHE_BYTES_MIN;
use rustix::fs::{SeekFrom, ftruncate, seek};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

pub fn run(args: &FormatArgs) -> Result<ExitCode> {
    let is_made = make_file(args)?;
    let done = format(args);
    if done.is_err() && is_made {
        // What was wrong is what matters.
        let _ = std::fs::remove_file(&args.cache);
    }
    done
}

fn format(args: &FormatArgs) -> Result<ExitCode> {
    let path = args.cache.display();
    let device = backing::open_exclusive(&args.cache, CACHE_SOURCE, None)?;
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
    let owners = content::Owners::of(args)?;
    let device = content::check(args, device, unknown, state_dir.as_ref())?;
    take_room(args, &device, size_bytes)?;
    // Nothing stands against it any more.
    owners.pass()?;
    let superblock = cache::format(&device, size_bytes, args.segment_size, wall_now())?;
    print_result(args, &superblock)?;
    if let Some(before) = before {
        super::forget::release(&before, None, state_dir.as_ref())?;
    }
    Ok(ExitCode::SUCCESS)
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
        return Err(error).with_context(|| format!("{path}: there is no room for it"));
    }
    Ok(())
}

/// A file that is not there yet is made, all of its room taken; says whether it was.
fn make_file(args: &FormatArgs) -> Result<bool> {
    if args.cache.exists() {
        return Ok(false);
    }
    let path = args.cache.display();
    let Some(size) = args.size else {
        bail!("{path}: does not exist; give --size to make a file of that size");
    };
    // It will hold what guests have written, which not everybody may read.
    let file = File::options().write(true).create_new(true).mode(0o600).open(&args.cache);
    let file = file.with_context(|| format!("{path}: cannot be made"))?;
    if let Err(error) = forebay::host::allocate(&file, size) {
        // Nothing is left of a file that has no room.
        let _ = std::fs::remove_file(&args.cache);
        return Err(error).with_context(|| format!("{path}: there is no room for it"));
    }
    Ok(true)
}

/// What an opening after a crash took on the machine of `bench/results/opening.jsonl` (two processors): 0.28, 0.32, 0.37 and 5.8 s at
/// 1, 4, 16 and 1024 GiB. It is linear but for the first half second.
fn opening_seconds(size_bytes: u64) -> f64 {
    0.29 + 0.0054 * (size_bytes as f64 / f64::from(1 << 30))
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
        "  {:>9}  at most, with any number of volumes and devices (`--memory` bounds all but the map)",
        size(memory::most(superblock, &config, crate::args::MEMORY_DEFAULT))
    );
    out!(
        "opening after a crash: about {:.1} s where it reads 2 GB/s; longer behind many small writes with a flush after each",
        opening_seconds(usable)
    );
    let cache = quoted::shell(&args.cache);
    out!("next: forebay serve --cache {cache} --volume NAME=BACKING");
    Ok(())
}
