// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A part of a file that others gave us, mapped.
//!
//! # Invariants
//!
//! - **M1** Nothing is lent out: bytes are copied, numbers are loaded and stored at once.
//! - **M2** What is not all inside is [`Unreached::Outside`]. What was copied from a mapping that is lost is [`Unreached::Lost`], since it may be no
//!   byte of theirs (X3 of `gone.rs`); so is all that comes behind that.

#![allow(unsafe_code)]

use super::gone::Place;
use rustix::fs::{fstat, fstatfs};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{AtomicAccess, Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// Why a range is not reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreached {
    /// It is not all in the guest's memory.
    #[error("an address outside the guest's memory")]
    Outside,
    /// It was there.
    #[error(
        "the guest's memory cannot be had: is its file system full, or was its file cut short?"
    )]
    Lost,
}

/// A shared mapping.
#[derive(Debug)]
pub(super) struct Mapping {
    // Given back first (X1).
    place: Place,
    region: MmapRegion<()>,
}

/// File systems that are memory: no page of theirs is waited for (but for swap).
const IN_MEMORY: [u64; 3] = [0x0102_1994, HUGE_PAGES, 0x8584_58f6];
const HUGE_PAGES: u64 = 0x9584_58f6;
const PROT_READ_WRITE: i32 = 3;
const MAP_SHARED: i32 = 1;

impl Mapping {
    /// Of a part of a file, all of which is there now. A page of a file on a disk may be waited for: that may be one of ours, and who waits is
    /// who serves all.
    pub(super) fn new(file: OwnedFd, offset: u64, size: u64) -> io::Result<Mapping> {
        let system = fstatfs(&file)?;
        let kind = system.f_type as u64 & 0xffff_ffff;
        if !IN_MEMORY.contains(&kind) {
            return Err(io::Error::other("it is a file on a disk; memory-backend-memfd has none"));
        }
        let there = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        let end = offset.checked_add(size).filter(|end| *end <= there);
        let (Some(_), Ok(size)) = (end, usize::try_from(size)) else {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter"));
        };
        let region = MmapRegionBuilder::<()>::new(size)
            .with_file_offset(FileOffset::new(File::from(file), offset))
            .with_mmap_prot(PROT_READ_WRITE)
            .with_mmap_flags(MAP_SHARED)
            .build()
            .map_err(io::Error::other)?;
        // The kernel has mapped whole pages.
        let page = if kind == HUGE_PAGES { system.f_bsize as usize } else { 1 };
        let place = Place::take(region.as_ptr(), size.next_multiple_of(page.max(1)))?;
        Ok(Mapping { place, region })
    }

    /// Lets its pages be swapped, whatever the rest of the process does.
    pub(super) fn unlock(&self) {
        // One that stays locked is as good, and takes the host's memory.
        // SAFETY: the range is this mapping, which is there, and no byte of it changes.
        let _ = unsafe { rustix::mm::munlock(self.region.as_ptr().cast(), self.region.size()) };
    }

    pub(super) fn size(&self) -> usize {
        self.region.size()
    }

    /// Where in its file it begins, and another descriptor of that.
    pub(super) fn file(&self) -> io::Result<(u64, OwnedFd)> {
        let file = self.region.file_offset().ok_or(io::ErrorKind::NotFound)?;
        Ok((file.start(), file.file().try_clone()?.into()))
    }

    /// Whether it cannot be had any more.
    pub(super) fn is_lost(&self) -> bool {
        self.place.is_lost()
    }

    /// Copies from it, as much as is there; the number of bytes.
    pub(super) fn read(&self, at: usize, bytes: &mut [u8]) -> Result<usize, Unreached> {
        let slice = self.slice(at, bytes.len())?;
        let copied = slice.copy_to(bytes);
        self.unless_lost(copied)
    }

    /// Copies to it, as much as there is room for; the number of bytes.
    pub(super) fn write(&self, at: usize, bytes: &[u8]) -> Result<usize, Unreached> {
        let slice = self.slice(at, bytes.len())?;
        slice.copy_from(&bytes[..slice.len()]);
        self.unless_lost(slice.len())
    }

    /// Loads a number that others may store at the same time.
    pub(super) fn load<T: AtomicAccess>(&self, at: usize, order: Ordering) -> Result<T, Unreached> {
        let slice = self.slice(at, size_of::<T>())?;
        let loaded = slice.load(0, order).map_err(|_| Unreached::Outside)?;
        self.unless_lost(loaded)
    }

    /// Stores a number that others may load at the same time.
    pub(super) fn store<T: AtomicAccess>(
        &self,
        value: T,
        at: usize,
        order: Ordering,
    ) -> Result<(), Unreached> {
        let slice = self.slice(at, size_of::<T>())?;
        slice.store(value, 0, order).map_err(|_| Unreached::Outside)?;
        self.unless_lost(())
    }

    fn unless_lost<T>(&self, done: T) -> Result<T, Unreached> {
        if self.is_lost() { Err(Unreached::Lost) } else { Ok(done) } // M2
    }

    /// What is there of a range: at least a byte.
    fn slice(&self, at: usize, length: usize) -> Result<VolatileSlice<'_>, Unreached> {
        let there = self.size().checked_sub(at).filter(|there| *there > 0);
        let length = there.ok_or(Unreached::Outside)?.min(length);
        self.region.get_slice(at, length).map_err(|_| Unreached::Outside)
    }
}

#[cfg(test)]
impl Mapping {
    pub(super) fn address(&self) -> usize {
        self.region.as_ptr() as usize
    }
}

#[cfg(test)]
mod tests;
