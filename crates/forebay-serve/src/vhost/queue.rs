// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A split virtqueue: chains of descriptors in, used ones out.
//!
//! Written here and not taken from the crate `virtio-queue`, see `docs/decisions/`.
//!
//! # Invariants
//!
//! - **Q1** All that the guest can write is read once, into a copy, and judged there.
//! - **Q2** A chain ends where it says, within bounds, or it is an error; nothing is read as a
//!   shorter chain than it is.
//! - **Q3** A head is under way once: one that is offered again before it was used is an error.
//! - **Q4** Before the loop may sleep, the guest is told to kick, and looked at once more.

use super::memory::{Memory, Unreached};
use std::sync::atomic::{Ordering, fence};

/// The longest queue.
pub const SIZE_MAX: u16 = 1024;
/// Descriptors of a chain at most: what `seg_max` allows, twice.
pub const DESCRIPTOR_COUNT_MAX: usize = 256;
/// Entries of an indirect table at most.
const INDIRECT_COUNT_MAX: u32 = 1024;

const DESCRIPTOR_BYTES: u64 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// In the available ring: interrupts are not wanted.
const NO_INTERRUPT: u16 = 1;
/// In the used ring: kicks are not wanted.
const NO_NOTIFY: u16 = 1;

/// Why a queue is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The ring itself.
    #[error("its rings lie outside the guest's memory or are misaligned")]
    Rings,
    /// A power of two up to [`SIZE_MAX`].
    #[error("its size of {0} is no power of two up to 1024")]
    Size(u32),
    /// More is offered than there is room for.
    #[error("it offers more than it has")]
    Available,
    /// A descriptor's number.
    #[error("a descriptor has a number out of range")]
    Number,
    /// Offered twice.
    #[error("a chain is offered again before it was used")]
    HeadTwice,
    /// Or a loop.
    #[error("a chain is too long, or is a loop")]
    Long,
    /// Of no length, or more than 4 GiB in all.
    #[error("a chain has a descriptor without bytes, or more than 4 GiB")]
    Length,
    /// Bytes to be read behind bytes to be written.
    #[error("a chain has bytes to read behind bytes to write")]
    Order,
    /// Nested, empty, too long, followed by others, or outside the guest's memory.
    #[error("a chain has a bad indirect table")]
    Indirect,
    /// Nowhere to put the status.
    #[error("a chain has no byte for its status")]
    NoStatus,
    /// It is longer than any that was to be noted, or one more.
    #[error("the region for what is in flight has no room for it with {0} entries")]
    Noted(u16),
    /// Not the queue's fault.
    #[error("{}", Unreached::Lost)]
    Lost,
}

impl From<Unreached> for QueueError {
    fn from(why: Unreached) -> QueueError {
        match why {
            Unreached::Outside => QueueError::Rings,
            Unreached::Lost => QueueError::Lost,
        }
    }
}

/// Where a queue's rings are, as the guest's addresses, and its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// Descriptors.
    pub size: u16,
    /// The table of descriptors.
    pub descriptors: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring.
    pub used: u64,
}

/// A run of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where.
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// What one chain names: bytes to read, then bytes to write.
#[derive(Debug, Default)]
pub struct Chain {
    segments: Vec<Segment>,
    /// So many of them are to be read.
    readable: usize,
}

impl Chain {
    /// An empty one with room for the longest.
    pub fn with_room() -> Chain {
        Chain { segments: Vec::with_capacity(DESCRIPTOR_COUNT_MAX), readable: 0 }
    }

    fn clear(&mut self) {
        self.segments.clear();
        self.readable = 0;
    }

    fn part(&self, writable: bool) -> &[Segment] {
        let (readable, written) = self.segments.split_at(self.readable);
        if writable { written } else { readable }
    }

    /// Runs of memory, to be read and to be written.
    pub fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Bytes that may be read, or written.
    pub fn length(&self, writable: bool) -> u64 {
        self.part(writable).iter().map(|segment| u64::from(segment.length)).sum()
    }

    /// Copies from what may be read, from its byte `offset` on.
    pub fn read(&self, memory: &Memory, offset: u64, bytes: &mut [u8]) -> Result<(), Unreached> {
        walk(self.part(false), offset, bytes.len(), |address, from, to| {
            memory.read(address, &mut bytes[from..to])
        })
    }

    /// Copies to what may be written, from its byte `offset` on.
    pub fn write(&self, memory: &Memory, offset: u64, bytes: &[u8]) -> Result<(), Unreached> {
        walk(self.part(true), offset, bytes.len(), |address, from, to| {
            memory.write(address, &bytes[from..to])
        })
    }
}

fn walk(
    segments: &[Segment],
    offset: u64,
    length: usize,
    mut each: impl FnMut(u64, usize, usize) -> Result<(), Unreached>,
) -> Result<(), Unreached> {
    let (mut skip, mut done) = (offset, 0);
    for segment in segments {
        let there = u64::from(segment.length);
        if skip >= there {
            skip -= there;
            continue;
        }
        let taken = ((there - skip) as usize).min(length - done);
        each(segment.address.checked_add(skip).ok_or(Unreached::Outside)?, done, done + taken)?;
        (skip, done) = (0, done + taken);
        if done == length {
            return Ok(());
        }
    }
    if done == length { Ok(()) } else { Err(Unreached::Outside) }
}

/// A queue that runs.
#[derive(Debug)]
pub struct Queue {
    rings: Rings,
    event_idx: bool,
    next_available: u16,
    next_used: u16,
    /// Used when the guest was asked last whether it wants to know; `None`: it must be told.
    signalled: Option<u16>,
    /// By head: offered and not used yet.
    under_way: Vec<bool>,
}

impl Queue {
    /// A queue at the used ring's own place, with nothing under way.
    pub fn new(memory: &Memory, rings: Rings, event_idx: bool) -> Result<Queue, QueueError> {
        let Rings { size, descriptors, available, used } = rings;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(QueueError::Size(u32::from(size)));
        }
        let entries = u64::from(size);
        let is_there = descriptors.is_multiple_of(16)
            && available.is_multiple_of(2)
            && used.is_multiple_of(4)
            && memory.holds(descriptors, entries * DESCRIPTOR_BYTES)
            && memory.holds(available, 6 + entries * 2)
            && memory.holds(used, 6 + entries * 8);
        if !is_there {
            return Err(QueueError::Rings);
        }
        let next_used = memory.load::<u16>(used + 2, Ordering::Acquire)?;
        let under_way = vec![false; usize::from(size)];
        let next_available = next_used;
        Ok(Queue { rings, event_idx, next_available, next_used, signalled: None, under_way })
    }

    /// A queue that another program had, with nothing under way, where that would have gone on.
    pub fn go_on(
        memory: &Memory,
        rings: Rings,
        event_idx: bool,
        [next_available, next_used]: [u16; 2],
    ) -> Result<Queue, QueueError> {
        let queue = Queue::new(memory, rings, event_idx)?;
        Ok(Queue { next_available, next_used, ..queue })
    }

    /// Where it is, and whether it has event indexes.
    pub fn places(&self) -> (Rings, bool) {
        (self.rings, self.event_idx)
    }

    /// Descriptors.
    pub fn size(&self) -> u16 {
        self.rings.size
    }

    /// What is taken next.
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Goes on from there.
    pub fn set_next_available(&mut self, at: u16) {
        self.next_available = at;
    }

    /// What is used next.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Takes the next chain that is offered: its head. It is under way from now on.
    pub fn take(&mut self, memory: &Memory) -> Result<Option<u16>, QueueError> {
        let offered = self.offered(memory)?;
        if offered == 0 {
            return Ok(None);
        }
        let place = u64::from(self.next_available % self.rings.size);
        let at = self.rings.available + 4 + place * 2;
        let head = memory.load::<u16>(at, Ordering::Relaxed)?;
        self.begin(head)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Notes a head as under way.
    pub fn begin(&mut self, head: u16) -> Result<(), QueueError> {
        match self.under_way.get_mut(usize::from(head)) {
            None => Err(QueueError::Number),
            Some(true) => Err(QueueError::HeadTwice), // Q3
            Some(under_way) => {
                *under_way = true;
                Ok(())
            }
        }
    }

    fn offered(&self, memory: &Memory) -> Result<u16, QueueError> {
        let end = memory.load::<u16>(self.rings.available + 2, Ordering::Acquire)?;
        let offered = end.wrapping_sub(self.next_available);
        if offered > self.rings.size { Err(QueueError::Available) } else { Ok(offered) }
    }

    /// What a head's chain names.
    pub fn chain(&self, memory: &Memory, head: u16, chain: &mut Chain) -> Result<(), QueueError> {
        chain.clear();
        let (mut table, mut count) = (self.rings.descriptors, u32::from(self.rings.size));
        let (mut number, mut is_indirect, mut seen) = (u32::from(head), false, 0);
        let mut sum = 0u32;
        // Bounded: each round counts, and one round begins the count anew.
        loop {
            if number >= count {
                return Err(QueueError::Number);
            }
            if seen == count {
                return Err(QueueError::Long);
            }
            seen += 1;
            let it = Descriptor::read(memory, table, number).map_err(|error| match error {
                QueueError::Rings if is_indirect => QueueError::Indirect,
                error => error,
            })?;
            if it.flags & INDIRECT != 0 {
                let entries = it.length / DESCRIPTOR_BYTES as u32;
                let is_whole = it.length.is_multiple_of(DESCRIPTOR_BYTES as u32);
                let is_sound = is_whole && (1..=INDIRECT_COUNT_MAX).contains(&entries);
                if is_indirect || it.flags & NEXT != 0 || !is_sound {
                    return Err(QueueError::Indirect);
                }
                (table, count, number, is_indirect, seen) = (it.address, entries, 0, true, 0);
                continue;
            }
            sum = sum.checked_add(it.length).filter(|_| it.length > 0).ok_or(QueueError::Length)?;
            if chain.segments.len() == DESCRIPTOR_COUNT_MAX {
                return Err(QueueError::Long);
            }
            let is_writable = it.flags & WRITE != 0;
            if !is_writable && chain.segments.len() > chain.readable {
                return Err(QueueError::Order);
            }
            chain.readable += usize::from(!is_writable);
            chain.segments.push(Segment { address: it.address, length: it.length });
            if it.flags & NEXT == 0 {
                return Ok(());
            }
            number = u32::from(it.next);
        }
    }

    /// Gives a chain back, with the number of bytes that were written to it.
    pub fn put_used(&mut self, memory: &Memory, head: u16, length: u32) -> Result<(), QueueError> {
        let place = u64::from(self.next_used % self.rings.size);
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&length.to_le_bytes());
        memory.write(self.rings.used + 4 + place * 8, &element)?;
        self.next_used = self.next_used.wrapping_add(1);
        memory.store(self.next_used, self.rings.used + 2, Ordering::Release)?;
        if let Some(under_way) = self.under_way.get_mut(usize::from(head)) {
            *under_way = false;
        }
        Ok(())
    }

    /// Whether the guest is to be interrupted for what was used since this was asked last.
    pub fn wants_interrupt(&mut self, memory: &Memory) -> Result<bool, QueueError> {
        // What was used is there before the guest's wish is read.
        fence(Ordering::SeqCst);
        let before = self.signalled.replace(self.next_used);
        let Some(before) = before else { return Ok(true) };
        if self.event_idx {
            let at = self.rings.available + 4 + u64::from(self.rings.size) * 2;
            let event = memory.load::<u16>(at, Ordering::Relaxed)?;
            let since_event = self.next_used.wrapping_sub(event).wrapping_sub(1);
            return Ok(since_event < self.next_used.wrapping_sub(before));
        }
        let flags = memory.load::<u16>(self.rings.available, Ordering::Relaxed)?;
        Ok(flags & NO_INTERRUPT == 0 && before != self.next_used)
    }

    /// Asks for a kick at the next chain; false: there is one already. (Q4)
    pub fn sleep(&mut self, memory: &Memory) -> Result<bool, QueueError> {
        if self.event_idx {
            let at = self.rings.used + 4 + u64::from(self.rings.size) * 8;
            memory.store(self.next_available, at, Ordering::Relaxed)?;
        } else {
            memory.store(0u16, self.rings.used, Ordering::Relaxed)?;
        }
        // The wish is there before it is looked once more.
        fence(Ordering::SeqCst);
        Ok(self.offered(memory)? == 0)
    }

    /// Asks for no kicks: the loop looks by itself.
    pub fn wake(&mut self, memory: &Memory) -> Result<(), QueueError> {
        if !self.event_idx {
            memory.store(NO_NOTIFY, self.rings.used, Ordering::Relaxed)?;
        }
        Ok(())
    }
}

struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn read(memory: &Memory, table: u64, number: u32) -> Result<Descriptor, QueueError> {
        let at =
            table.checked_add(u64::from(number) * DESCRIPTOR_BYTES).ok_or(QueueError::Rings)?;
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        memory.read(at, &mut bytes)?; // Q1
        let word = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
        Ok(Descriptor {
            address: u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")),
            length: word as u32,
            flags: (word >> 32) as u16,
            next: (word >> 48) as u16,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::Region;
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    const SIZE: u16 = 8;
    const AVAILABLE: u64 = 0x1000;
    const RINGS: Rings =
        Rings { size: SIZE, descriptors: 0x2000, available: AVAILABLE, used: 0x3000 };
    /// Where indexes are when it begins: also so that they wrap.
    const PLACES: [u16; 5] = [0, 100, 0x7ffc, 0xfffb, 0xffff];

    fn memory() -> Memory {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, 0x4000).expect("room");
        let region = Region { guest: 0, size: 0x4000, user: 0, offset: 0 };
        Memory::map(&[region], vec![file]).expect("mapped")
    }

    /// A queue that was told of everything up to there.
    fn queue(memory: &Memory, event_idx: bool, place: u16) -> Queue {
        let mut queue = Queue::new(memory, RINGS, event_idx).expect("sound");
        queue.next_used = place;
        assert_eq!(queue.wants_interrupt(memory), Ok(true), "the first time it must be told");
        queue
    }

    fn use_some(queue: &mut Queue, memory: &Memory, count: u16) {
        (0..count).for_each(|_| queue.put_used(memory, 0, 0).expect("inside"));
    }

    /// The guest says at which index it wants to hear: when that is used, and neither before nor again.
    #[test]
    fn with_event_indexes_an_interrupt_comes_when_the_one_that_was_asked_for_is_used() {
        let memory = memory();
        let event_at = AVAILABLE + 4 + u64::from(SIZE) * 2;
        for place in PLACES {
            for (ahead, count) in (-9..=9i16).flat_map(|it| (0..=SIZE).map(move |n| (it, n))) {
                let mut queue = queue(&memory, true, place);
                let event = place.wrapping_add_signed(ahead);
                memory.store(event, event_at, Ordering::Relaxed).expect("inside");
                use_some(&mut queue, &memory, count);
                let is_used = (0..count).any(|it| place.wrapping_add(it) == event);
                let what = format!("from {place}, {count} used, {event} asked for");
                assert_eq!(queue.wants_interrupt(&memory), Ok(is_used), "{what}");
                assert_eq!(queue.wants_interrupt(&memory), Ok(false), "again: {what}");
            }
        }
    }

    #[test]
    fn without_event_indexes_an_interrupt_comes_for_what_was_used_unless_none_are_wanted() {
        let memory = memory();
        for (place, count) in PLACES.into_iter().flat_map(|it| (0..=SIZE).map(move |n| (it, n))) {
            for flags in [0, NO_INTERRUPT] {
                let mut queue = queue(&memory, false, place);
                memory.store(flags, AVAILABLE, Ordering::Relaxed).expect("inside");
                use_some(&mut queue, &memory, count);
                let is_wanted = count > 0 && flags == 0;
                let what = format!("from {place}, {count} used, flags {flags}");
                assert_eq!(queue.wants_interrupt(&memory), Ok(is_wanted), "{what}");
                assert_eq!(queue.wants_interrupt(&memory), Ok(false), "again: {what}");
            }
        }
    }
}
