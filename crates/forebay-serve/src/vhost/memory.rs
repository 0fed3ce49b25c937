// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's memory, mapped, and reached by the guest's own addresses.
//!
//! # Invariants
//!
//! - **G1** Every address and length comes from the guest: what is not all inside is [`Outside`],
//!   never a panic and never another's memory.
//! - **G2** The guest may change its memory at any time. So nothing here lends it out: bytes are
//!   copied, and only the copy is looked at, summed or believed.
//! - **G3** Whether its pages stay in memory is for whoever gave them to say: a daemon that locks its own (`host/protect.rs`) would lock
//!   each that it touches, and in time the whole guest.
//!
//! # Limits
//!
//! Whoever gave us the memory could cut its file short while it is mapped, and the next touch would
//! end the daemon. The guest itself cannot; the front end could also just send a signal.

#![allow(unsafe_code)]

use super::wire::Region;
use rustix::fs::{fstat, fstatfs};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{AtomicAccess, Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// The range is not all in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an address outside the guest's memory")]
pub struct Outside;

/// Why memory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The kernel, or a file that is too short.
    #[error("the guest's memory cannot be mapped: {0}; it must be a shared file or memfd")]
    Map(#[from] io::Error),
    /// Two regions, or a region and the end of addresses.
    #[error("the regions of the guest's memory overlap")]
    Overlap,
}

#[derive(Debug)]
struct Mapped {
    guest: u64,
    user: u64,
    mapping: MmapRegion<()>,
}

/// The memory of one guest.
#[derive(Debug)]
pub struct Memory {
    /// By guest address, apart from each other.
    regions: Vec<Mapped>,
}

/// File systems that are memory: no page of theirs is waited for (but for swap).
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x9584_58f6, 0x8584_58f6];

/// A shared mapping of a part of a file, all of which is there now. A page of a file on a disk may be waited for: that may be one of ours, and
/// who waits is who serves all.
pub(super) fn map(file: OwnedFd, offset: u64, size: u64) -> io::Result<MmapRegion<()>> {
    let kind = fstatfs(&file)?.f_type as u64 & 0xffff_ffff;
    if !IN_MEMORY.contains(&kind) {
        return Err(io::Error::other("it is a file on a disk; memory-backend-memfd has none"));
    }
    let there = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
    let end = offset.checked_add(size).filter(|end| *end <= there);
    let (Some(_), Ok(size)) = (end, usize::try_from(size)) else {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter"));
    };
    MmapRegionBuilder::<()>::new(size)
        .with_file_offset(FileOffset::new(File::from(file), offset))
        .with_mmap_prot(PROT_READ_WRITE)
        .with_mmap_flags(MAP_SHARED)
        .build()
        .map_err(io::Error::other)
}

/// A mapping is locked from its beginning where all that comes is to be (G3).
fn unlock(mapping: &MmapRegion<()>) {
    // One that stays locked is as good, and takes the host's memory.
    // SAFETY: the range is this mapping, which is there, and no byte of it changes.
    let _ = unsafe { rustix::mm::munlock(mapping.as_ptr().cast(), mapping.size()) };
}

/// Where in its file a mapping begins, and another descriptor of that.
pub(super) fn file_of(mapping: &MmapRegion<()>) -> io::Result<(u64, OwnedFd)> {
    let file = mapping.file_offset().ok_or(io::ErrorKind::NotFound)?;
    Ok((file.start(), file.file().try_clone()?.into()))
}

const PROT_READ_WRITE: i32 = 3;
const MAP_SHARED: i32 = 1;

impl Memory {
    /// Maps regions, each of its file.
    pub fn map(table: &[Region], files: Vec<OwnedFd>) -> Result<Memory, MemoryError> {
        let mut regions = Vec::with_capacity(table.len());
        for (region, file) in table.iter().zip(files) {
            let Region { guest, size, user, offset } = *region;
            let ends = [guest.checked_add(size), user.checked_add(size), offset.checked_add(size)];
            if ends.contains(&None) {
                return Err(MemoryError::Overlap);
            }
            let mapping = map(file, offset, size)?;
            unlock(&mapping);
            regions.push(Mapped { guest, user, mapping });
        }
        regions.sort_by_key(|region| region.guest);
        let touch = |pair: &[Mapped]| pair[0].end() > pair[1].guest;
        if regions.windows(2).any(touch) {
            return Err(MemoryError::Overlap);
        }
        Ok(Memory { regions })
    }

    /// What it was mapped by, and other descriptors of its files.
    pub fn table(&self) -> io::Result<(Vec<Region>, Vec<OwnedFd>)> {
        let mut files = Vec::with_capacity(self.regions.len());
        let mut table = Vec::with_capacity(self.regions.len());
        for Mapped { guest, user, mapping } in &self.regions {
            let (offset, file) = file_of(mapping)?;
            table.push(Region { guest: *guest, size: mapping.size() as u64, user: *user, offset });
            files.push(file);
        }
        Ok((table, files))
    }

    /// The guest's address of a front end's.
    pub fn guest_of_user(&self, user: u64) -> Result<u64, Outside> {
        let found = self.regions.iter().find_map(|region| {
            let at = user.checked_sub(region.user)?;
            (at < region.mapping.size() as u64).then(|| region.guest + at)
        });
        found.ok_or(Outside)
    }

    /// Whether a range is all there.
    pub fn holds(&self, address: u64, length: u64) -> bool {
        let mut left = length;
        let mut at = address;
        // Bounded: each round ends in another region.
        while left > 0 {
            let Ok((_, _, there)) = self.find(at) else { return false };
            let taken = there.min(left);
            left -= taken;
            at += taken;
        }
        true
    }

    /// Copies from the guest.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Outside> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &mut bytes[done..];
            let slice = self.slice(address.checked_add(done as u64).ok_or(Outside)?, rest.len())?;
            done += slice.copy_to(rest);
        }
        Ok(())
    }

    /// Copies to the guest.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Outside> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let slice = self.slice(address.checked_add(done as u64).ok_or(Outside)?, rest.len())?;
            let there = slice.len();
            slice.copy_from(&rest[..there]);
            done += there;
        }
        Ok(())
    }

    /// Loads a number that the guest's processors may store at the same time.
    pub fn load<T: AtomicAccess>(&self, address: u64, order: Ordering) -> Result<T, Outside> {
        self.slice(address, size_of::<T>())?.load(0, order).map_err(|_| Outside)
    }

    /// Stores a number that the guest's processors may load at the same time.
    pub fn store<T: AtomicAccess>(
        &self,
        value: T,
        address: u64,
        order: Ordering,
    ) -> Result<(), Outside> {
        self.slice(address, size_of::<T>())?.store(value, 0, order).map_err(|_| Outside)
    }

    /// What is there of a range, in the region that it begins in: at least a byte.
    fn slice(&self, address: u64, length: usize) -> Result<VolatileSlice<'_>, Outside> {
        let (region, at, there) = self.find(address)?;
        let length = there.min(length as u64) as usize;
        region.mapping.get_slice(at as usize, length).map_err(|_| Outside)
    }

    /// The region of an address, where in it that is, and how many bytes are there.
    fn find(&self, address: u64) -> Result<(&Mapped, u64, u64), Outside> {
        let region = self.regions.iter().rev().find(|region| region.guest <= address);
        let region = region.filter(|region| address < region.end()).ok_or(Outside)?;
        Ok((region, address - region.guest, region.end() - address))
    }
}

impl Mapped {
    fn end(&self) -> u64 {
        // Does not overflow: looked at before it was mapped.
        self.guest + self.mapping.size() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::MlockAllFlags;

    fn memfd(bytes: u64) -> OwnedFd {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, bytes).expect("room");
        fd
    }

    fn region(guest: u64, size: u64) -> Region {
        Region { guest, size, user: guest ^ 0x7000_0000, offset: 0 }
    }

    #[test]
    fn a_range_may_cross_into_the_next_region_and_no_further() {
        let table = [region(0x3000, 0x1000), region(0x1000, 0x2000)];
        let memory = Memory::map(&table, vec![memfd(0x1000), memfd(0x2000)]).expect("mapped");
        let bytes: Vec<u8> = (0..200).collect();
        memory.write(0x2fa0, &bytes).expect("inside");
        let mut back = [0; 200];
        memory.read(0x2fa0, &mut back).expect("inside");
        assert_eq!(bytes, back);
        assert!(memory.holds(0x1000, 0x3000));
        assert!(!memory.holds(0x1000, 0x3001));
        assert!(!memory.holds(0xfff, 2));
        assert!(!memory.holds(0x1000, u64::MAX));
        assert_eq!(memory.write(0x3fff, &[1, 2]), Err(Outside));
        assert_eq!(memory.read(u64::MAX, &mut back), Err(Outside));
        assert_eq!(memory.load::<u16>(0x3fff, Ordering::Relaxed), Err(Outside));
        assert_eq!(memory.load::<u16>(0x1001, Ordering::Relaxed), Err(Outside));
        assert_eq!(memory.guest_of_user(0x7000_3004), Ok(0x3004));
        assert_eq!(memory.guest_of_user(0x7000_4000), Err(Outside));
    }

    /// Kilobytes of the mapping at an address that are locked.
    fn locked_kib(address: u64) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("procfs");
        let mut lines = maps.lines().skip_while(|line| {
            let start = line.split('-').next().and_then(|it| u64::from_str_radix(it, 16).ok());
            start != Some(address)
        });
        let locked = lines.find_map(|line| line.strip_prefix("Locked:")).expect("it is mapped");
        locked.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// A daemon with block devices locks its memory, and with it locked what it touched of each guest's: the host could not swap
    /// them any more.
    #[test]
    fn pages_of_a_guest_that_are_touched_are_not_locked() {
        if !rustix::process::geteuid().is_root() {
            return forebay_testing::skip("vhost memory: only root may lock as much as it likes");
        }
        let size = 64 << 10;
        let later = MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
        rustix::mm::mlockall(later).expect("root may");
        let table = [region(0, size)];
        let ours = map(memfd(size), 0, size).expect("mapped");
        let memory = Memory::map(&table, vec![memfd(size)]).expect("mapped");
        let bytes = vec![7; size as usize];
        memory.write(0, &bytes).expect("inside");
        ours.get_slice(0, bytes.len()).expect("inside").copy_from(&bytes);
        let at = |mapping: &MmapRegion<()>| locked_kib(mapping.as_ptr() as u64);
        let found = (at(&ours), at(&memory.regions[0].mapping));
        rustix::mm::munlockall().expect("root may");
        assert_eq!(found, (64, 0), "what is not a guest's, and what is");
    }

    #[test]
    fn regions_that_overlap_or_are_not_there_are_refused() {
        let two = |first, second| {
            Memory::map(&[first, second], vec![memfd(0x2000), memfd(0x2000)]).map(|_| ())
        };
        let overlap = two(region(0x1000, 0x2000), region(0x2000, 0x1000));
        assert!(matches!(overlap, Err(MemoryError::Overlap)));
        let wraps = two(region(0x1000, 0x1000), region(u64::MAX - 4095, 0x2000));
        assert!(matches!(wraps, Err(MemoryError::Overlap)));
        let longer_than_its_file = two(region(0x1000, 0x1000), region(0x4000, 0x3000));
        assert!(matches!(longer_than_its_file, Err(MemoryError::Map(_))));
        let empty = two(region(0x1000, 0x1000), region(0x4000, 0));
        assert!(matches!(empty, Err(MemoryError::Map(_))));
        assert!(two(region(0x1000, 0x1000), region(0x2000, 0x1000)).is_ok());
    }
}
