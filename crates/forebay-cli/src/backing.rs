// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening devices the way a careful person would: nobody else may be using them, and a backing
//! device must be the one that was recorded.

use crate::address::Address;
use crate::upgrade;
use anyhow::{Context, Result, anyhow, bail};
use forebay::host::guard::{self, GuardError};
use forebay::host::holder::{Holder, LOCK_WAIT, Refused, when_free};
use forebay::host::identity::{self, Fingerprint, Geometry, Match, Serial, compare};
use forebay::host::machine::{Host, Target};
use forebay::io::{
    Device, FileDevice, FileError, FileOptions, SimulatedDevice, Stats, StatsDevice,
};
use forebay_core::format::superblock::Volume;
use rustix::fs::FileType;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The open file that the program before had of a volume's device, or of the cache ([`upgrade::CACHE`]), if it was left. Nobody
/// else can have had it meanwhile: it is the same disk. A path that leads to another one is refused, left or not.
pub fn take_left(
    volume: &str,
    path: &Path,
    source: u16,
    logical_block: Option<u32>,
) -> Result<Option<FileDevice>> {
    upgrade::check_disk(volume, path)?;
    // One that is gone is not served any more.
    let Some(file) = path.exists().then(|| upgrade::take_device(volume)).flatten() else {
        return Ok(None);
    };
    let options = FileOptions { exclusive: true, source, logical_block, ..FileOptions::default() };
    Ok(Some(FileDevice::over(file, path, &options)?))
}

/// A living process has it.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    pub holder: Holder,
}

impl fmt::Display for Held {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Held { path, holder } = self;
        let path = path.display();
        match holder.pid {
            // What `late` has it keep.
            1 => write!(
                out,
                "{path}: {holder} keeps it for a service that waits for its cache; `systemctl stop forebay@NAME`, or use another"
            ),
            _ => write!(out, "{path}: is in use by {holder}; stop that one, or use another"),
        }
    }
}

impl std::error::Error for Held {}

/// Opens a device or file for us alone. Who lives and has it is named at once; who is ending is
/// waited for.
pub fn open_exclusive(path: &Path, source: u16, logical_block: Option<u32>) -> Result<FileDevice> {
    let options = FileOptions { exclusive: true, source, logical_block, ..FileOptions::default() };
    let wait = LOCK_WAIT.as_secs();
    let tell = || {
        tracing::warn!(
            "{}: waits up to {wait} s for a process that is ending to let go of it",
            path.display(),
        );
    };
    when_free(path, is_busy, tell, || attempt(path, &options)).map_err(|refused| match refused {
        Refused::Held(holder) => {
            anyhow!(Held { path: path.to_owned(), holder })
        }
        Refused::Busy(error) => anyhow!("{error}; it was waited for, for {wait} s"),
        Refused::Other(error) => error,
    })
}

fn attempt(path: &Path, options: &FileOptions) -> Result<FileDevice> {
    guard::check_free(path)?;
    Ok(FileDevice::open(path, options)?)
}

fn is_busy(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(FileError::is_busy)
        || matches!(error.downcast_ref(), Some(GuardError::Busy { .. }))
}

/// A device with its statistics.
pub fn counted(device: Box<dyn Device>) -> (Box<dyn Device>, Stats) {
    let stats = Stats::new();
    (Box::new(StatsDevice::new(device, stats.clone())), stats)
}

/// A device with the times of its address.
pub fn timed(device: FileDevice, address: &Address) -> Box<dyn Device> {
    match address.model() {
        Some(model) => Box::new(SimulatedDevice::new(Box::new(device), model)),
        None => Box::new(device),
    }
}

/// Refuses a backing device that rests on the cache device, or the other way round.
pub fn check_apart(cache: &Path, backing: &Path) -> Result<()> {
    if let Some(relation) = guard::related(cache, backing)? {
        bail!(
            "{} and {}: {relation}; a cache in front of itself would lose both, use another device",
            cache.display(),
            backing.display()
        );
    }
    Ok(())
}

/// Who a device is, and what its ends and superblocks hold.
pub fn fingerprint(device: &dyn Device, path: &Path) -> Result<Fingerprint> {
    fingerprint_up_to(device, path, device.info().size_bytes)
}

/// The same, and [`file_written_at`], to be had by another thread: the device may not answer. It reads through the open file that has the lock, so that lasts.
pub fn fingerprint_apart(
    device: &dyn Device,
    path: &Path,
) -> Result<impl FnOnce() -> Result<(Fingerprint, Option<u64>)> + Send + use<>> {
    let (info, path) = (device.info(), path.to_owned());
    let file = device.descriptor().context("it is no file")?.try_clone_to_owned()?;
    let (size_bytes, logical_block) = (info.size_bytes, Some(info.logical_block));
    let options =
        FileOptions { read_only: true, exclusive: false, logical_block, ..FileOptions::default() };
    Ok(move || {
        let written_at = file_written_at(file.as_fd());
        let device = FileDevice::over(file.into(), &path, &options)?;
        Ok((fingerprint_up_to(&device, &path, size_bytes)?, written_at))
    })
}

/// When a file was written last, in nanoseconds since 1970; none of a block device.
pub fn file_written_at(file: BorrowedFd<'_>) -> Option<u64> {
    let found = rustix::fs::fstat(file).ok()?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    let seconds = u64::try_from(found.st_mtime).ok().filter(|_| is_file)?;
    Some(seconds * 1_000_000_000 + found.st_mtime_nsec as u64)
}

/// The same, to be compared with what was recorded of it: a device that has become larger is looked at as far as it
/// went then.
pub fn fingerprint_as_recorded(
    device: &dyn Device,
    path: &Path,
    recorded: &Volume,
) -> Result<Fingerprint> {
    let now = device.info().size_bytes;
    let then = Fingerprint::decode(&recorded.fingerprint).map_or(now, |known| known.size_bytes);
    fingerprint_up_to(device, path, then.min(now))
}

fn fingerprint_up_to(device: &dyn Device, path: &Path, size_bytes: u64) -> Result<Fingerprint> {
    let geometry = Geometry { size_bytes, logical_block: device.info().logical_block };
    let host = Host::default();
    let serial = Target::of(path).map_or(Serial::UNKNOWN, |target| Serial::of(&host, &target));
    let mut read = |offset: u64, bytes: &mut [u8]| device.read_at(offset, bytes);
    Fingerprint::take(&mut read, geometry, serial)
        .with_context(|| format!("{}: cannot be read to recognise it later", path.display()))
}

/// When it was written last, in milliseconds since 1970, where it says so: a file, or ext2, ext3 and ext4 on a whole device.
pub fn written_at(device: &dyn Device, path: &Path) -> Option<u64> {
    let seconds = match Target::of(path) {
        Ok(Target::Block { .. }) => {
            identity::written_at(&mut |offset, bytes| device.read_at(offset, bytes))?
        }
        _ => u64::try_from(std::fs::metadata(path).ok()?.mtime()).ok()?,
    };
    Some(seconds * 1000)
}

/// Compares a backing device with what was recorded of it.
pub fn compare_recorded(recorded: &Volume, found: &Fingerprint) -> Match {
    match Fingerprint::decode(&recorded.fingerprint) {
        Ok(mut known) => {
            // A program from before may have noted those of the disk: nobody but us says what they are.
            if found.logical_block == recorded.logical_block {
                known.logical_block = recorded.logical_block;
            }
            compare(&known, found)
        }
        // Recorded by a newer version, or never: nothing to compare with.
        Err(_) => Match::Same,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "Stop that one" was said of process 1.
    #[test]
    fn nobody_is_told_to_stop_the_service_manager() {
        let says = |pid| {
            let holder = Holder { pid, name: "it".into() };
            Held { path: "/dev/sdb".into(), holder }.to_string()
        };
        assert!(says(1).contains("`systemctl stop forebay@NAME`"), "{}", says(1));
        assert!(says(2).ends_with("process 2 (it); stop that one, or use another"), "{}", says(2));
    }
}
