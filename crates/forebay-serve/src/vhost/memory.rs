// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's memory, mapped, and reached by the guest's own addresses.
//!
//! # Invariants
//!
//! - **G1** Every address and length comes from the guest: what is not all inside is [`Unreached::Outside`],
//!   never a panic and never another's memory.
//! - **G2** The guest may change its memory at any time. So nothing here lends it out: bytes are
//!   copied, and only the copy is looked at, summed or believed.
//! - **G3** Whether its pages stay in memory is for whoever gave them to say: a daemon that locks its own (`host/protect.rs`) would lock
//!   each that it touches, and in time the whole guest.
//! - **G4** Memory that cannot be had any more, since its file was cut short or its file system is full, is [`Unreached::Lost`] from then on, and nobody
//!   else's loss (`gone.rs`).

pub use super::mapping::Unreached;

use super::mapping::Mapping;
use super::wire::Region;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use vm_memory::AtomicAccess;

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
    mapping: Mapping,
}

/// The memory of one guest.
#[derive(Debug)]
pub struct Memory {
    /// By guest address, apart from each other.
    regions: Vec<Mapped>,
}

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
            let mapping = Mapping::new(file, offset, size)?;
            mapping.unlock(); // G3
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
            let (offset, file) = mapping.file()?;
            table.push(Region { guest: *guest, size: mapping.size() as u64, user: *user, offset });
            files.push(file);
        }
        Ok((table, files))
    }

    /// The guest's address of a front end's.
    pub fn guest_of_user(&self, user: u64) -> Result<u64, Unreached> {
        let found = self.regions.iter().find_map(|region| {
            let at = user.checked_sub(region.user)?;
            (at < region.mapping.size() as u64).then(|| region.guest + at)
        });
        found.ok_or(Unreached::Outside)
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
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Unreached> {
        let mut done = 0;
        while done < bytes.len() {
            let next = address.checked_add(done as u64).ok_or(Unreached::Outside)?;
            let (mapping, at) = self.place(next)?;
            done += mapping.read(at, &mut bytes[done..])?;
        }
        Ok(())
    }

    /// Copies to the guest.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Unreached> {
        let mut done = 0;
        while done < bytes.len() {
            let next = address.checked_add(done as u64).ok_or(Unreached::Outside)?;
            let (mapping, at) = self.place(next)?;
            done += mapping.write(at, &bytes[done..])?;
        }
        Ok(())
    }

    /// Loads a number that the guest's processors may store at the same time.
    pub fn load<T: AtomicAccess>(&self, address: u64, order: Ordering) -> Result<T, Unreached> {
        let (mapping, at) = self.place(address)?;
        mapping.load(at, order)
    }

    /// Stores a number that the guest's processors may load at the same time.
    pub fn store<T: AtomicAccess>(
        &self,
        value: T,
        address: u64,
        order: Ordering,
    ) -> Result<(), Unreached> {
        let (mapping, at) = self.place(address)?;
        mapping.store(value, at, order)
    }

    /// Whether a part of it cannot be had any more.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    fn place(&self, address: u64) -> Result<(&Mapping, usize), Unreached> {
        let (region, at, _) = self.find(address)?;
        Ok((&region.mapping, at as usize))
    }

    /// The region of an address, where in it that is, and how many bytes are there.
    fn find(&self, address: u64) -> Result<(&Mapped, u64, u64), Unreached> {
        let region = self.regions.iter().rev().find(|region| region.guest <= address);
        let region = region.filter(|region| address < region.end()).ok_or(Unreached::Outside)?;
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
        assert_eq!(memory.write(0x3fff, &[1, 2]), Err(Unreached::Outside));
        assert_eq!(memory.read(u64::MAX, &mut back), Err(Unreached::Outside));
        assert_eq!(memory.load::<u16>(0x3fff, Ordering::Relaxed), Err(Unreached::Outside));
        assert_eq!(memory.load::<u16>(0x1001, Ordering::Relaxed), Err(Unreached::Outside));
        assert_eq!(memory.guest_of_user(0x7000_3004), Ok(0x3004));
        assert_eq!(memory.guest_of_user(0x7000_4000), Err(Unreached::Outside));
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
        let ours = Mapping::new(memfd(size), 0, size).expect("mapped");
        let memory = Memory::map(&table, vec![memfd(size)]).expect("mapped");
        let bytes = vec![7; size as usize];
        memory.write(0, &bytes).expect("inside");
        ours.write(0, &bytes).expect("inside");
        let at = |mapping: &Mapping| locked_kib(mapping.address() as u64);
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
