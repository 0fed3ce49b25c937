// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two copies of the superblock: where they are found, and how the second one moves when the
//! cache becomes larger or smaller.
//!
//! The first copy says how large the cache is, and so where the second lies. It may be torn. A
//! sector of 512 bytes is whole or not written, the size lies in the first one, and no change but
//! that of the size itself gives that sector another size: so a torn copy still tells where the
//! other is. So does one that has rotted, but where the size itself has: then the other is found only at the
//! device's end.
//!
//! # Invariants
//!
//! - **R1** The second copy of the new size is durable before the first copy is written, and the one of the old
//!   size is whole until the first copy of the new size is durable: whichever size the first sector
//!   says, the second copy that belongs to it is there.
//! - **R2** Nothing but the copies is written to what one of the two sizes does not use before both copies
//!   are durable.
//! - **R3** At the end of the device no copy of another size is left that could be taken for the
//!   second one if the first cannot be read at all.

use super::FormatError;
use super::bytes::get_u64;
use super::superblock::{AT_SIZE_BYTES, MAGIC, SUPERBLOCK_SIZE, Superblock};
use crate::mutant::{Mutant, Mutants};
use alloc::vec::Vec;

/// Reads a copy's bytes at an address; says whether that could be done.
pub trait ReadCopy {
    /// Reads all of `bytes`.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool;
}

/// Both copies as found.
#[derive(Debug)]
pub struct Pair {
    /// The first.
    pub first: Result<Superblock, FormatError>,
    /// Where the second is, or should be.
    pub second_at: u64,
    /// The second.
    pub second: Result<Superblock, FormatError>,
}

impl Pair {
    /// Reads both from a device of so many bytes.
    pub fn read(device_bytes: u64, reader: &mut impl ReadCopy) -> Pair {
        let mut bytes = alloc::vec![0; SUPERBLOCK_SIZE];
        let is_read = reader.read(0, &mut bytes);
        // It is decoded in place: what the sector says is looked at before.
        let (magic, said) = (get_u64(&bytes, 0), get_u64(&bytes, AT_SIZE_BYTES));
        let first = match is_read {
            true => Superblock::decode(&mut bytes, 0),
            false => Err(FormatError::Unreadable),
        };
        let said = Some(said).filter(|size| is_read && fits(*size, device_bytes));
        let device_at = Superblock::addresses(device_bytes)[1];
        let second_at = |size: u64| Superblock::addresses(size)[1];
        // What a sector says that has rotted comes last.
        let at = said.filter(|_| magic == MAGIC || first.is_ok()).map_or(device_at, second_at);
        let others = [Some(device_at), said.map(second_at)];
        let mut second_at = at;
        let mut second = read_second(at, reader);
        for other in others.into_iter().flatten().filter(|other| *other != at) {
            if first.is_ok() || second.is_ok() {
                break;
            }
            let found = read_second(other, reader);
            if found.is_ok() {
                (second_at, second) = (other, found);
            }
        }
        if let (Ok(first), Ok(other)) = (&first, &second)
            && first.uuid != other.uuid
        {
            second = Err(FormatError::Uuid);
        }
        Pair { first, second_at, second }
    }

    /// The newest good one.
    pub fn newest(&self) -> Option<&Superblock> {
        match (&self.first, &self.second) {
            (Ok(first), Ok(second)) if first.sequence >= second.sequence => Some(first),
            (_, Ok(good)) | (Ok(good), Err(_)) => Some(good),
            (Err(_), Err(_)) => None,
        }
    }
}

/// Where at the end of a device lies a copy of this cache that belongs to another size of it, if there is one
/// (R3).
pub fn leftover(
    superblock: &Superblock,
    device_bytes: u64,
    reader: &mut impl ReadCopy,
) -> Option<u64> {
    let at = Superblock::addresses(device_bytes)[1];
    let own = Superblock::addresses(superblock.size_bytes)[1];
    // Within it, what is there is the guests'.
    if at < own + SUPERBLOCK_SIZE as u64 {
        return None;
    }
    let found = read_second(at, reader);
    found.is_ok_and(|found| found.uuid == superblock.uuid).then_some(at)
}

/// A copy that says itself that it belongs there.
fn read_second(address: u64, reader: &mut impl ReadCopy) -> Result<Superblock, FormatError> {
    let mut bytes = alloc::vec![0; SUPERBLOCK_SIZE];
    if !reader.read(address, &mut bytes) {
        return Err(FormatError::Unreadable);
    }
    let found = Superblock::decode(&mut bytes, address)?;
    match Superblock::addresses(found.size_bytes)[1] == address {
        true => Ok(found),
        false => Err(FormatError::Value { field: "size_bytes", found: found.size_bytes }),
    }
}

fn fits(size_bytes: u64, device_bytes: u64) -> bool {
    (2 * SUPERBLOCK_SIZE as u64..=device_bytes).contains(&size_bytes)
}

/// What is done, one after the other, to make a cache another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The new superblock's copy for this place is written.
    Write(u64),
    /// What was written is made durable.
    Flush,
    /// The copy in this place is made none: zeros in its first block.
    Wipe(u64),
}

/// The steps from one size to another (R1, R3). The device has room for both.
pub fn steps(from: &Superblock, to: &Superblock, mutants: Mutants) -> Vec<Step> {
    let old = Superblock::addresses(from.size_bytes)[1];
    let new = Superblock::addresses(to.size_bytes)[1];
    assert!(old.abs_diff(new) >= SUPERBLOCK_SIZE as u64, "one copy would be over the other");
    let mut steps = alloc::vec![Step::Write(new), Step::Flush, Step::Write(0), Step::Flush];
    if mutants.is(Mutant::ResizeFirstCopyFirst) {
        steps.swap(0, 2);
    }
    if mutants.is(Mutant::ResizeSecondCopyUnflushed) {
        steps.remove(1);
    }
    if new < old && !mutants.is(Mutant::ResizeCopyLeft) {
        steps.extend([Step::Wipe(old), Step::Flush]);
    }
    steps
}
