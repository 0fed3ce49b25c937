// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The two copies of the superblock: where they are found, and how the second one moves when the
//! cache becomes larger or smaller.
//!
//! The first copy says how large the cache is, and so where the second lies: in its first block and again in its
//! last ([`super::size_again`]). It may be torn. A sector of 512 bytes is whole or not written, each of the two sizes
//! lies in one, and no change but that of the size itself gives these sectors another: so a torn copy still tells where
//! the other is. So does one of which a block cannot be read or has rotted. Only what takes both away leaves nothing but the
//! device's end to look at.
//!
//! # Invariants
//!
//! - **R1** The second copy of the new size is durable before the first copy is written, and the one of the old
//!   size is whole until the first copy of the new size is durable: whichever size is said in one of the two places, the
//!   second copy that belongs to it is there.
//! - **R2** Nothing but the copies is written to what one of the two sizes does not use before both copies
//!   are durable.
//! - **R3** At the end of the device no copy of another size is left that could be taken for the
//!   second one if the first cannot be read at all.
//! - **R4** Whatever becomes of one block of the first copy, the second is found. A stale one of another size, that a
//!   rotten size may point to, does not pass for it.
//! - **R5** A copy is replaced only while the other is durable. That it can be read says nothing: a flush of it may have failed.
//!   So the newest is written again, and flushed, before the older is made equal to it; and of two equal ones, of which the first was
//!   durable before the second was written, the second before the first is replaced by a newer one. Nor does that a copy of another size
//!   is left: whoever was to take it away may have been killed before the first copy was durable, and what a power cut makes of that
//!   may be torn so that it still says the other size, twice.

use super::FormatError;
use super::bytes::{AT_CHECKSUM, get_u64, put};
use super::size_again;
use super::superblock::{AT_SIZE_BYTES, MAGIC, SUPERBLOCK_SIZE, Superblock};
use crate::mutant::{Mutant, Mutants};
use crate::units::BLOCK_SIZE;
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
    pub fn read(device_bytes: u64, reader: &mut impl ReadCopy, mutants: Mutants) -> Pair {
        let mut bytes = alloc::vec![0; SUPERBLOCK_SIZE];
        let is_read = reader.read(0, &mut bytes);
        if !is_read {
            // One sector is enough for that: the others may be read.
            for at in [0, SUPERBLOCK_SIZE - BLOCK_SIZE] {
                let block = &mut bytes[at..at + BLOCK_SIZE];
                if !reader.read(at as u64, block) {
                    block.fill(0);
                }
            }
        }
        // It is decoded in place: what it says is looked at before.
        let is_ours = get_u64(&bytes, 0) == MAGIC;
        let fitting = |size: &u64| fits(*size, device_bytes);
        let said = Some(get_u64(&bytes, AT_SIZE_BYTES)).filter(fitting);
        let again = size_again::read(&bytes, mutants).filter(fitting);
        let first = match is_read {
            true => decode(&mut bytes, 0, mutants),
            false => Err(FormatError::Unreadable),
        };
        let (second_at, mut second) = if first.is_ok() {
            let at = second_address(said.unwrap_or(device_bytes));
            (at, read_second(at, reader, mutants))
        } else {
            // What a block says that has rotted comes last.
            let inside = [said.filter(|_| is_ours), again];
            find_second(inside, [Some(device_bytes), said], reader, mutants)
        };
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

/// The second copy of a pair whose first one is bad: the newest that the first one says itself (R4), or else one that
/// lies elsewhere. Without any it should be in the first of these places.
fn find_second(
    inside: [Option<u64>; 2],
    elsewhere: [Option<u64>; 2],
    reader: &mut impl ReadCopy,
    mutants: Mutants,
) -> (u64, Result<Superblock, FormatError>) {
    let mut best: Option<(u64, Result<Superblock, FormatError>)> = None;
    for places in [inside, elsewhere] {
        for at in places.into_iter().flatten().map(second_address) {
            let found = read_second(at, reader, mutants);
            let is_better = match (&best, &found) {
                (None, _) | (Some((_, Err(_))), Ok(_)) => true,
                (Some((_, Ok(best))), Ok(found)) => {
                    found.uuid == best.uuid && found.sequence > best.sequence
                }
                (Some(_), Err(_)) => false,
            };
            if is_better {
                best = Some((at, found));
            }
        }
        if matches!(best, Some((_, Ok(_)))) {
            break;
        }
    }
    best.expect("the device has an end")
}

fn second_address(size_bytes: u64) -> u64 {
    Superblock::addresses(size_bytes)[1]
}

/// Where a copy would lie at the end of a device, if that is behind this cache.
pub fn end_behind(superblock: &Superblock, device_bytes: u64) -> Option<u64> {
    let at = second_address(device_bytes);
    let own = second_address(superblock.size_bytes);
    // Within it, what is there is the guests'.
    (at >= own + SUPERBLOCK_SIZE as u64).then_some(at)
}

/// Where at the end of a device lies a copy of this cache that belongs to another size of it, if there is one
/// (R3).
pub fn leftover(
    superblock: &Superblock,
    device_bytes: u64,
    reader: &mut impl ReadCopy,
) -> Option<u64> {
    let at = end_behind(superblock, device_bytes)?;
    let found = read_second(at, reader, Mutants::default());
    found.is_ok_and(|found| found.uuid == superblock.uuid).then_some(at)
}

/// A copy that says itself that it belongs there.
fn read_second(
    address: u64,
    reader: &mut impl ReadCopy,
    mutants: Mutants,
) -> Result<Superblock, FormatError> {
    let mut bytes = alloc::vec![0; SUPERBLOCK_SIZE];
    if !reader.read(address, &mut bytes) {
        return Err(FormatError::Unreadable);
    }
    let found = decode(&mut bytes, address, mutants)?;
    match second_address(found.size_bytes) == address {
        true => Ok(found),
        false => Err(FormatError::Value { field: "size_bytes", found: found.size_bytes }),
    }
}

fn decode(bytes: &mut [u8], address: u64, mutants: Mutants) -> Result<Superblock, FormatError> {
    match Superblock::decode(bytes, address) {
        Err(FormatError::Checksum { expected, .. })
            if mutants.is(Mutant::SkipSuperblockChecksum) =>
        {
            put(bytes, AT_CHECKSUM, &expected.to_le_bytes());
            Superblock::decode(bytes, address)
        }
        other => other,
    }
}

fn fits(size_bytes: u64, device_bytes: u64) -> bool {
    (2 * SUPERBLOCK_SIZE as u64..=device_bytes).contains(&size_bytes)
}

/// What is done, one after the other, to the copies of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The new superblock's copy for this place is written.
    Write(u64),
    /// What was written is made durable.
    Flush,
    /// The copy in this place is made none: zeros in its first block.
    Wipe(u64),
}

/// The steps that make the pair whole again before anything else is written: both copies are as the newest, which is good in so many
/// of the places (`good`), and the one of another size that is left is none (R3, R5). None, if nothing is wrong.
pub fn repairs(
    newest: &Superblock,
    good: [bool; 2],
    leftover: Option<u64>,
    mutants: Mutants,
) -> Vec<Step> {
    let mut steps = Vec::new();
    let trusted = leftover.is_none() || mutants.is(Mutant::LeftoverFirst);
    if good != [true; 2] || !trusted {
        let mut places = Superblock::addresses(newest.size_bytes);
        if !good[0] {
            places.reverse();
        }
        steps.extend(places.into_iter().flat_map(|at| [Step::Write(at), Step::Flush]));
    }
    steps.extend(leftover.into_iter().flat_map(|at| [Step::Wipe(at), Step::Flush]));
    steps
}

/// The steps from one size to another (R1, R3). The device has room for both.
pub fn steps(from: &Superblock, to: &Superblock, mutants: Mutants) -> Vec<Step> {
    let old = second_address(from.size_bytes);
    let new = second_address(to.size_bytes);
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
