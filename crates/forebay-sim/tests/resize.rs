// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A cache gets another size, and the power fails between any two of the steps: one of the two superblocks is found,
//! whatever is left of what was not flushed.

use forebay_core::format::pair::{Pair, ReadCopy, Step, leftover, steps};
use forebay_core::format::size_again;
use forebay_core::format::superblock::{SUPERBLOCK_SIZE, Superblock};
use forebay_core::mutant::{Mutant, Mutants};
use forebay_sim::random::Random;
use forebay_sim::setup::{Setup, format};

const SECTOR: usize = 512;

/// What is durable, and what was written since.
#[derive(Clone)]
struct Disk {
    durable: Vec<u8>,
    written: Vec<(u64, Vec<u8>)>,
    /// What lies there cannot be read.
    unreadable: Option<u64>,
}

impl ReadCopy for Disk {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> bool {
        let end = address + bytes.len() as u64;
        if self.unreadable.is_some_and(|at| (address..end).contains(&at)) {
            return false;
        }
        bytes.copy_from_slice(&self.durable[address as usize..][..bytes.len()]);
        true
    }
}

impl Disk {
    /// Of the write at `at` all sectors are left that `left` wants.
    fn survive(&mut self, at: usize, left: impl Fn(usize) -> bool) {
        let (address, bytes) = self.written[at].clone();
        for (number, sector) in bytes.chunks(SECTOR).enumerate().filter(|(number, _)| left(*number))
        {
            let from = address as usize + number * SECTOR;
            self.durable[from..from + SECTOR].copy_from_slice(sector);
        }
    }

    fn step(&mut self, step: Step, next: &Superblock) {
        match step {
            Step::Write(address) => self.written.push((address, next.encode(address))),
            Step::Wipe(address) => self.written.push((address, vec![0; 4096])),
            Step::Flush => {
                (0..self.written.len()).for_each(|at| self.survive(at, |_| true));
                self.written.clear();
            }
        }
    }
}

/// A cache, and the same with other segments and something new of a volume, which is not in the first sector.
fn sizes(smaller: bool) -> (Superblock, Superblock) {
    let setup = Setup::new(&mut Random::new(1), Mutants::default());
    let mut from = format(24, 64 << 10, &setup.volumes, 5);
    let more = from.size_bytes + (8 << 20);
    if smaller {
        from = from.resized(more).expect("it is larger");
    }
    let size_bytes = if smaller { more - (6 << 20) } else { more };
    let mut to = from.resized(size_bytes).expect("it can be");
    to.sequence += 1;
    to.volumes[0].as_mut().expect("there is one").flush_epoch += 1;
    (from, to)
}

/// One of the two superblocks is found, and so is its second copy.
fn is_found(
    from: &Superblock,
    to: &Superblock,
    device_bytes: u64,
    left: &mut Disk,
) -> Result<(), &'static str> {
    let pair = Pair::read(device_bytes, left, Mutants::default());
    let newest = pair.newest().ok_or("none is found")?;
    if newest != from && newest != to {
        return Err("another one is found");
    }
    // The next power cut finds one, too, before anything is repaired.
    let own = Superblock::addresses(newest.size_bytes)[1];
    match pair.first.is_err() && pair.second_at != own {
        true => Err("the second copy is elsewhere"),
        false => Ok(()),
    }
}

/// Stops behind each of the steps, with each part of what was not flushed; says what went wrong.
fn stop_everywhere(smaller: bool, mutants: Mutants) -> Result<(), String> {
    let (from, to) = sizes(smaller);
    let device_bytes = from.size_bytes.max(to.size_bytes);
    let mut disk =
        Disk { durable: vec![0; device_bytes as usize], written: Vec::new(), unreadable: None };
    for address in Superblock::addresses(from.size_bytes) {
        disk.step(Step::Write(address), &from);
    }
    disk.step(Step::Flush, &from);
    let steps = steps(&from, &to, mutants);
    for (number, step) in steps.iter().enumerate() {
        disk.step(*step, &to);
        for fate in 0..1 << (2 * disk.written.len()) {
            let mut left = disk.clone();
            for at in 0..disk.written.len() {
                left.survive(at, |sector| match fate >> (2 * at) & 3 {
                    0 => false,
                    1 => sector == 0,
                    2 => sector != 0,
                    _ => true,
                });
            }
            // And one block of the first copy, or none, cannot be read.
            for unreadable in [None].into_iter().chain((0..16).map(|at| Some(at * 4096))) {
                left.unreadable = unreadable;
                is_found(&from, &to, device_bytes, &mut left)
                    .map_err(|text| format!("step {number}, {fate}, {unreadable:?}: {text}"))?;
            }
        }
    }
    if leftover(&to, device_bytes, &mut disk).is_some() {
        return Err("a copy of the other size is left".into());
    }
    Ok(())
}

#[test]
fn one_of_two_superblocks_is_found_wherever_the_power_fails() {
    for smaller in [false, true] {
        stop_everywhere(smaller, Mutants::default()).unwrap();
    }
}

/// Each rule is needed: without it some power cut leaves no superblock, or one that is not to be found later.
#[test]
fn each_step_is_needed() {
    let found = |mutant| {
        [false, true].map(|smaller| stop_everywhere(smaller, Mutants::with(mutant)).is_err())
    };
    assert_eq!(found(Mutant::ResizeFirstCopyFirst), [true, false], "the old end is looked at");
    assert_eq!(found(Mutant::ResizeSecondCopyUnflushed), [true, false]);
    assert_eq!(found(Mutant::ResizeCopyLeft), [false, true]);
}

/// A cache has grown, and the copy of its old size is left where that ended. The first block of the first copy cannot be read, and one bit of
/// the size in the last block has rotted: it is the old size now. Says which superblock is found, the old one or the new one.
fn found_by_a_rotten_size(mutants: Mutants) -> Option<u64> {
    let (from, to) = sizes(false);
    let mut disk =
        Disk { durable: vec![0; to.size_bytes as usize], written: Vec::new(), unreadable: Some(0) };
    for address in Superblock::addresses(from.size_bytes) {
        disk.step(Step::Write(address), &from);
    }
    steps(&from, &to, Mutants::default()).into_iter().for_each(|step| disk.step(step, &to));
    let again = &mut disk.durable[SUPERBLOCK_SIZE - size_again::SIZE..][..8];
    assert_eq!(again, to.size_bytes.to_le_bytes());
    assert_eq!((from.size_bytes ^ to.size_bytes).count_ones(), 1);
    again.copy_from_slice(&from.size_bytes.to_le_bytes());
    let pair = Pair::read(to.size_bytes, &mut disk, mutants);
    pair.newest().map(|newest| newest.sequence - from.sequence)
}

#[test]
fn a_size_that_has_rotted_leads_to_no_copy_of_another_size() {
    assert_eq!(found_by_a_rotten_size(Mutants::default()), Some(1));
    let loose = found_by_a_rotten_size(Mutants::with(Mutant::SkipSizeChecksum));
    assert_eq!(loose, Some(0), "else this shows nothing");
}
