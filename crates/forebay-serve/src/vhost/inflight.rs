// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is in flight, kept where it outlives this process: a region of memory that the front end
//! holds and gives to the next daemon.
//!
//! The layout of each queue's part is that of the vhost-user document (`QueueRegionSplit`). Behind
//! the queues comes a tail of our own, for what the guest has set and nobody else remembers.
//!
//! # Invariants
//!
//! - **I1** A head is noted with [`Region::begin`] before anything is done for it, and forgotten
//!   with [`Region::end`] after the used ring has it. So after a kill a head is noted exactly if
//!   the used ring lacks it, but for the one between the two: the used ring's index tells.
//! - **I2** A kill stops our stores at one of them, in the order they stand here: each is a release.
//! - **I3** Sizes and places come from the message, and are compared with what we would have made;
//!   the file is sealed against being cut short.
//! - **I4** There is room for the longest queue, whatever was asked for: QEMU 10 asks by its option `queue-size` (128), and its
//!   guests have queues of up to 1024. A region that was made for what was asked, by a program from before, is taken as well.
//! - **I5** Memory that cannot be had any more reads as nothing in flight, and keeps nothing: what is found, and what is noted, counts only
//!   when [`Region::check`] has said so behind that.

use super::mapping::{Mapping, Unreached};
use super::queue::SIZE_MAX;
use super::wire::Inflight;
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use vm_memory::AtomicAccess;

/// Queues at most.
pub const QUEUE_COUNT_MAX: u16 = 128;
const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const TAIL_BYTES: usize = 64;
const VERSION: u16 = 1;
/// In a queue's part.
const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const LAST_BATCH_AT: usize = 12;
const USED_AT: usize = 14;
/// In an entry.
const IN_FLIGHT_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;
/// In the tail: 1 if the guest has chosen to have no write cache.
const WRITE_THROUGH_AT: usize = 0;

/// Why a region is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InflightError {
    /// Not as we make them.
    #[error("a region for what is in flight is of another size, or not sealed")]
    NotOurs,
    /// For more queues, or longer ones, than there may be.
    #[error("a region for {0} queues of {1} is wanted; at most 128 of 1024 are served")]
    Large(u16, u16),
    /// Its content.
    #[error("a region for what is in flight holds another version or size")]
    Content,
    /// The kernel.
    #[error("a region for what is in flight cannot be had: {0}")]
    System(#[from] io::Error),
}

/// The region.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
    queue_count: u16,
    /// Of the longest queue that there is room for.
    queue_size: u16,
}

fn stride(queue_size: u16) -> usize {
    (HEAD_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(64)
}

fn bytes(queue_count: u16, queue_size: u16) -> u64 {
    (stride(queue_size) * usize::from(queue_count) + TAIL_BYTES) as u64
}

fn check(wanted: &Inflight) -> Result<(), InflightError> {
    let Inflight { queue_count, queue_size, .. } = *wanted;
    let counts = 1..=QUEUE_COUNT_MAX;
    if !counts.contains(&queue_count) || !(1..=SIZE_MAX).contains(&queue_size) {
        return Err(InflightError::Large(queue_count, queue_size));
    }
    Ok(())
}

impl Region {
    /// Makes a region, to be given to the front end: what it is, and its file (I4).
    pub fn make(wanted: &Inflight) -> Result<(Inflight, OwnedFd), InflightError> {
        check(wanted)?;
        let size = bytes(wanted.queue_count, SIZE_MAX);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("forebay-inflight", flags).map_err(io::Error::from)?;
        ftruncate(&file, size).map_err(io::Error::from)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(io::Error::from)?;
        Ok((Inflight { size, offset: 0, ..*wanted }, file))
    }

    /// Takes a region that a daemon, this or an earlier one, has made.
    pub fn take(told: &Inflight, file: OwnedFd) -> Result<Region, InflightError> {
        check(told)?;
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|it| it.contains(SealFlags::SHRINK));
        let Inflight { queue_count, .. } = *told;
        let is_for = |queue_size: &u16| told.size == bytes(queue_count, *queue_size);
        let queue_size = [SIZE_MAX, told.queue_size].into_iter().find(is_for).filter(|_| is_sealed);
        let queue_size = queue_size.ok_or(InflightError::NotOurs)?;
        let mapping = Mapping::new(file, told.offset, told.size)?;
        let region = Region { mapping, queue_count, queue_size };
        for queue in 0..queue_count {
            let content = [region.get::<u16>(queue, VERSION_AT), region.get(queue, SIZE_AT)];
            match content {
                [0, _] => {
                    region.set(queue, SIZE_AT, queue_size);
                    region.set(queue, VERSION_AT, VERSION);
                }
                [VERSION, size] if size == queue_size => {}
                _ => return Err(InflightError::Content),
            }
        }
        region.check().map_err(io::Error::other)?;
        Ok(region)
    }

    /// What it is, and another descriptor of its file.
    pub fn told(&self) -> io::Result<(Inflight, OwnedFd)> {
        let (offset, file) = self.mapping.file()?;
        let Region { mapping, queue_count, queue_size } = self;
        let size = mapping.size() as u64;
        let (queue_count, queue_size) = (*queue_count, *queue_size);
        Ok((Inflight { size, offset, queue_count, queue_size }, file))
    }

    /// Whether it has room for a queue.
    pub fn holds(&self, queue: u16, size: u16) -> bool {
        queue < self.queue_count && size <= self.queue_size
    }

    /// Whether all that was noted and found until now was (I5).
    pub fn check(&self) -> Result<(), Unreached> {
        if self.mapping.is_lost() { Err(Unreached::Lost) } else { Ok(()) }
    }

    /// What a queue had in flight when the last daemon ended, oldest first, and the counter to go
    /// on with. `used` is the used ring's index.
    pub fn resume(&self, queue: u16, used: u16) -> Result<(Vec<u16>, u64), Unreached> {
        let batch = used.wrapping_sub(self.get(queue, USED_AT));
        // The used ring has a last batch that may still be noted here (I1). Bounded: more than
        // there are entries is another ring's index.
        if batch > 0 && batch <= self.queue_size {
            let mut head = self.get::<u16>(queue, LAST_BATCH_AT);
            for _ in 0..batch {
                if head >= self.queue_size {
                    break;
                }
                self.set(queue, entry(head) + IN_FLIGHT_AT, 0u8);
                head = self.get(queue, entry(head) + NEXT_AT);
            }
        }
        self.set(queue, USED_AT, used);
        let mut found: Vec<(u64, u16)> = (0..self.queue_size)
            .filter(|head| self.get::<u8>(queue, entry(*head) + IN_FLIGHT_AT) != 0)
            .map(|head| (self.get(queue, entry(head) + COUNTER_AT), head))
            .collect();
        found.sort_unstable();
        let counter = found.last().map_or(0, |last| last.0.wrapping_add(1));
        self.check()?; // I5
        Ok((found.into_iter().map(|it| it.1).collect(), counter))
    }

    /// A head is in flight from now on.
    pub fn begin(&self, queue: u16, head: u16, counter: u64) {
        self.set(queue, entry(head) + COUNTER_AT, counter);
        self.set(queue, entry(head) + IN_FLIGHT_AT, 1u8);
    }

    /// A head is about to be put into the used ring.
    pub fn using(&self, queue: u16, head: u16) {
        let last = self.get::<u16>(queue, LAST_BATCH_AT);
        self.set(queue, entry(head) + NEXT_AT, last);
        self.set(queue, LAST_BATCH_AT, head);
    }

    /// The used ring has the head; its index is `used` now.
    pub fn end(&self, queue: u16, head: u16, used: u16) {
        self.set(queue, entry(head) + IN_FLIGHT_AT, 0u8);
        self.set(queue, USED_AT, used);
    }

    /// Whether the guest has chosen to have no write cache.
    pub fn is_write_through(&self) -> bool {
        self.load::<u8>(self.tail() + WRITE_THROUGH_AT) == 1
    }

    /// Notes what the guest has chosen.
    pub fn set_write_through(&self, chosen: bool) {
        self.store(u8::from(chosen), self.tail() + WRITE_THROUGH_AT);
    }

    fn tail(&self) -> usize {
        stride(self.queue_size) * usize::from(self.queue_count)
    }

    fn at(&self, queue: u16, offset: usize) -> usize {
        stride(self.queue_size) * usize::from(queue) + offset
    }

    fn get<T: AtomicAccess + Default>(&self, queue: u16, offset: usize) -> T {
        self.load(self.at(queue, offset))
    }

    fn set<T: AtomicAccess>(&self, queue: u16, offset: usize, value: T) {
        self.store(value, self.at(queue, offset));
    }

    fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        // Always inside, and no word of it counts if it is lost (I5).
        self.mapping.load(at, Ordering::Acquire).unwrap_or_default()
    }

    fn store<T: AtomicAccess>(&self, value: T, at: usize) {
        let stored = self.mapping.store(value, at, Ordering::Release);
        debug_assert!(stored != Err(Unreached::Outside), "inside the region");
    }
}

const fn entry(head: u16) -> usize {
    HEAD_BYTES + ENTRY_BYTES * head as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Inflight = Inflight { size: 0, offset: 0, queue_count: 2, queue_size: 8 };

    fn twice() -> (Region, impl Fn() -> Region) {
        let (told, file) = Region::make(&WANTED).expect("a region");
        let again = move || Region::take(&told, file.try_clone().expect("a copy")).expect("ours");
        (again(), again)
    }

    #[test]
    fn what_was_in_flight_comes_back_in_its_order() {
        let (region, again) = twice();
        for (counter, head) in [(7, 3), (8, 0), (9, 5)] {
            region.begin(1, head, counter);
        }
        region.using(1, 0);
        region.end(1, 0, 1);
        assert_eq!(again().resume(1, 1), Ok((vec![3, 5], 10)));
        assert_eq!(again().resume(0, 0), Ok((vec![], 0)));
    }

    /// All places at which the daemon can be killed while it answers one head.
    #[test]
    fn a_kill_at_any_store_neither_answers_twice_nor_forgets() {
        for stop_after in 0..5 {
            let (region, again) = twice();
            region.begin(0, 2, 1);
            region.begin(0, 6, 2);
            region.using(0, 6);
            region.end(0, 6, u16::MAX);
            let mut used = u16::MAX;
            region.begin(0, 4, 3);
            if stop_after >= 1 {
                region.set(0, entry(4) + NEXT_AT, 6u16);
            }
            if stop_after >= 2 {
                region.set(0, LAST_BATCH_AT, 4u16);
            }
            if stop_after >= 3 {
                used = 0;
            }
            if stop_after >= 4 {
                region.set(0, entry(4) + IN_FLIGHT_AT, 0u8);
            }
            let left = if stop_after < 3 { vec![2, 4] } else { vec![2] };
            assert_eq!(
                again().resume(0, used).expect("there").0,
                left,
                "killed after store {stop_after}"
            );
            assert_eq!(again().resume(0, used).expect("there").0, left, "and once more");
        }
    }

    #[test]
    fn a_region_of_another_make_is_refused() {
        let (told, file) = Region::make(&WANTED).expect("a region");
        let take = |told: &Inflight| Region::take(told, file.try_clone().expect("a copy"));
        assert!(take(&told).is_ok());
        let larger = Inflight { size: told.size + 64, ..told };
        assert!(matches!(take(&larger), Err(InflightError::NotOurs)));
        let elsewhere = Inflight { offset: 4096, ..told };
        assert!(take(&elsewhere).is_err());
        let absurd = Inflight { queue_count: 129, ..WANTED };
        assert!(matches!(Region::make(&absurd), Err(InflightError::Large(129, 8))));
        let plain = memfd_create("plain", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&plain, told.size).expect("room");
        assert!(matches!(Region::take(&told, plain), Err(InflightError::NotOurs)));
        take(&told).expect("ours").set(1, SIZE_AT, 4u16);
        assert!(matches!(take(&told), Err(InflightError::Content)));
    }

    /// QEMU 10 asks for queues of 128, and its guests have some of 1024.
    #[test]
    fn there_is_room_for_the_longest_queue_whatever_was_asked_for() {
        let (region, again) = twice();
        assert!(region.holds(1, SIZE_MAX) && !region.holds(2, 8));
        region.begin(0, SIZE_MAX - 1, 5);
        region.begin(1, 0, 6);
        region.begin(1, SIZE_MAX - 1, 7);
        assert_eq!(again().resume(0, 0), Ok((vec![SIZE_MAX - 1], 6)));
        assert_eq!(again().resume(1, 0), Ok((vec![0, SIZE_MAX - 1], 8)));
        // As the next program is told of it.
        let (told, file) = region.told().expect("its file");
        assert!(Region::take(&told, file).expect("ours").holds(1, SIZE_MAX));
    }

    #[test]
    fn a_region_from_before_for_what_was_asked_is_taken() {
        let size = bytes(2, 8);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("before", flags).expect("a memfd");
        ftruncate(&file, size).expect("room");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
        let region = Region::take(&Inflight { size, ..WANTED }, file).expect("ours");
        assert!(region.holds(1, 8) && !region.holds(1, 16));
    }

    #[test]
    fn damaged_content_stays_within_the_region() {
        let (region, again) = twice();
        region.begin(0, 1, u64::MAX);
        region.set(0, LAST_BATCH_AT, 0xFFFFu16);
        assert_eq!(again().resume(0, 3).expect("there").0, [1]);
        region.set(0, LAST_BATCH_AT, 1u16);
        region.set(0, entry(1) + NEXT_AT, 1u16);
        assert_eq!(again().resume(0, 9).expect("there").0, [] as [u16; 0]);
    }

    /// It would be taken for one with nothing in flight, and a guest's requests would never be answered.
    #[test]
    fn a_region_that_cannot_be_had_is_not_taken_for_an_empty_one() {
        let size = bytes(2, SIZE_MAX);
        let file = memfd_create("lost", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, size).expect("room");
        // One that is sealed may be on a page that rots.
        let again = file.try_clone().expect("a copy");
        let mapping = Mapping::new(again, 0, size).expect("mapped");
        let region = Region { mapping, queue_count: 2, queue_size: SIZE_MAX };
        region.begin(0, 3, 1);
        assert_eq!(region.resume(0, 0), Ok((vec![3], 2)));
        ftruncate(&file, 0).expect("cut short");
        assert_eq!(region.resume(0, 0), Err(Unreached::Lost));
        assert_eq!(region.check(), Err(Unreached::Lost));
    }
}
