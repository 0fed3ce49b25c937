// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The second copy of the superblock is found whatever one fault does to the first, on a device that is larger than the
//! cache.

use forebay_core::format::FormatError;
use forebay_core::format::pair::{Pair, ReadCopy};
use forebay_core::format::superblock::{
    AT_SIZE_BYTES, NewCache, SUPERBLOCK_SIZE, Superblock, Volume,
};
use forebay_core::limits::VOLUME_COUNT_MAX;
use forebay_core::mutant::Mutants;

const BLOCK: usize = 4096;
const DEVICE_BYTES: u64 = 300 << 20;

/// A device of which only the copies count.
struct Disk {
    copies: Vec<(u64, Vec<u8>)>,
    /// Bytes that cannot be read.
    unreadable: std::ops::Range<u64>,
}

impl Disk {
    fn new(superblock: &Superblock) -> Disk {
        let addresses = Superblock::addresses(superblock.size_bytes);
        let copies = addresses.map(|address| (address, superblock.encode(address)));
        Disk { copies: copies.to_vec(), unreadable: 0..0 }
    }

    fn first(&mut self) -> &mut [u8] {
        &mut self.copies[0].1
    }
}

impl ReadCopy for Disk {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        let end = address + bytes.len() as u64;
        if self.unreadable.start < end && address < self.unreadable.end {
            return false;
        }
        bytes.fill(0);
        for (at, copy) in &self.copies {
            let (from, to) = ((*at).max(address), (at + copy.len() as u64).min(end));
            if from < to {
                let source = &copy[(from - at) as usize..(to - at) as usize];
                bytes[(from - address) as usize..(to - address) as usize].copy_from_slice(source);
            }
        }
        true
    }
}

fn superblock(size_bytes: u64) -> Superblock {
    let new = NewCache { uuid: [9; 16], key: 5, size_bytes, segment_bytes: 1 << 18, now: 1 };
    let mut superblock = Superblock::format(&new).unwrap();
    for index in [0, VOLUME_COUNT_MAX - 1] {
        superblock.volumes[index] = Some(Volume::empty([index as u8 + 1; 16], "disk", 1 << 30));
    }
    superblock
}

/// The first copy is bad, and the second one counts.
fn assert_second(disk: &mut Disk, superblock: &Superblock, what: &dyn std::fmt::Display) {
    let pair = Pair::read(DEVICE_BYTES, disk, Mutants::default());
    assert!(pair.first.is_err(), "{what}");
    assert_eq!(pair.second_at, Superblock::addresses(superblock.size_bytes)[1], "{what}");
    assert_eq!(pair.newest(), Some(superblock), "{what}");
}

#[test]
fn whichever_byte_of_the_first_copy_rots_the_second_is_found() {
    let superblock = superblock(64 << 20);
    let mut disk = Disk::new(&superblock);
    for at in 0..SUPERBLOCK_SIZE {
        disk.first()[at] ^= 1 << (at % 8);
        assert_second(&mut disk, &superblock, &format_args!("byte {at}"));
        disk.first()[at] ^= 1 << (at % 8);
    }
    // Every bit of what says where the second is.
    for place in [AT_SIZE_BYTES, SUPERBLOCK_SIZE - 16] {
        for bit in 0..96 {
            disk.first()[place + bit / 8] ^= 1 << (bit % 8);
            assert_second(&mut disk, &superblock, &format_args!("bit {bit} from {place} on"));
            disk.first()[place + bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn whichever_block_of_the_first_copy_is_gone_the_second_is_found() {
    let superblock = superblock(64 << 20);
    for size in [512, BLOCK] {
        for at in (0..SUPERBLOCK_SIZE).step_by(size) {
            let mut disk = Disk::new(&superblock);
            disk.unreadable = at as u64..(at + size) as u64;
            let what = format_args!("{size} bytes at {at}").to_string();
            assert_second(&mut disk, &superblock, &what);
            for fill in [0xFF, 0, 0xA5] {
                let mut disk = Disk::new(&superblock);
                let before = disk.first().to_vec();
                disk.first()[at..at + size].fill(fill);
                if disk.first() != before {
                    assert_second(&mut disk, &superblock, &what);
                }
            }
        }
    }
}

/// Grown from 64 to 192 MiB, its second copy of before still there: one bit of the size is enough to point to it, and
/// it says where the logs ended then.
#[test]
fn a_rotten_size_that_points_to_an_old_copy_is_not_believed() {
    let old = superblock(64 << 20);
    let mut grown = old.resized(192 << 20).unwrap();
    grown.sequence += 1;
    let mut disk = Disk::new(&grown);
    let left = Superblock::addresses(old.size_bytes)[1];
    disk.copies.push((left, old.encode(left)));
    disk.first()[AT_SIZE_BYTES + 3] ^= 8;
    assert_second(&mut disk, &grown, &"the size's bit 27");
}

/// A cache that was made before the size was there again is read as it was.
#[test]
fn a_cache_that_does_not_say_it_again_is_read() {
    let mut superblock = superblock(64 << 20);
    superblock.says_size_again = false;
    let mut disk = Disk::new(&superblock);
    assert_eq!(Pair::read(DEVICE_BYTES, &mut disk, Mutants::default()).newest(), Some(&superblock));
    disk.first()[5000] ^= 1;
    assert_second(&mut disk, &superblock, &"a byte that says nothing of the size");
    disk.first()[AT_SIZE_BYTES + 3] ^= 1;
    assert_eq!(Pair::read(DEVICE_BYTES, &mut disk, Mutants::default()).newest(), None);
    // Where the device ends with the cache that is no harm.
    assert_eq!(Pair::read(64 << 20, &mut disk, Mutants::default()).newest(), Some(&superblock));
}

/// What lies where another's size points to is no copy of this cache.
#[test]
fn without_any_copy_it_is_told_where_one_should_be() {
    let superblock = superblock(64 << 20);
    let mut disk = Disk::new(&superblock);
    disk.copies.truncate(1);
    disk.unreadable = 0..512;
    let pair = Pair::read(DEVICE_BYTES, &mut disk, Mutants::default());
    assert_eq!(pair.first, Err(FormatError::Unreadable));
    assert_eq!(pair.second_at, Superblock::addresses(superblock.size_bytes)[1]);
    assert!(pair.second.is_err() && pair.newest().is_none());
}
