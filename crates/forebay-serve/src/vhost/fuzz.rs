// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bodies for fuzzing: any bytes in, and a panic only where a promise was broken.

use super::blk::{self, Ask, Disk, HEADER_BYTES, RANGE_BYTES, RANGE_COUNT_MAX, Range};
use super::carried::Carried;
use super::device::carry::taken_and_left;
use super::inflight::{QUEUE_COUNT_MAX, Region};
use super::memory::Memory;
use super::queue::{Chain, DESCRIPTOR_COUNT_MAX, Queue, Rings, SIZE_MAX};
use super::wire::{self, FD_COUNT_MAX, HEADER_BYTES as HEAD, Header, Inflight, Message};
use crate::carried::{Record, check_file, record_header};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::OwnedFd;

/// A front end that says anything: what comes through keeps M1 and M2 of `wire.rs`.
pub fn fuzz_messages(bytes: &[u8]) {
    let mut rest = bytes;
    // Each turn takes a head, so the input bounds the loop.
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD>() {
        let Ok(header) = Header::decode(head) else { return };
        let Some((body, behind)) = behind.split_at_checked(header.size) else { return };
        for fd_count in 0..=FD_COUNT_MAX {
            let Ok(message) = wire::decode(header.request, body, fd_count) else { continue };
            match message {
                Message::SetMemTable { count, .. } => assert_eq!(count, fd_count),
                Message::GetConfig(part) | Message::SetConfig { part, .. } => {
                    assert!(part.size as usize <= wire::CONFIG_BYTES_MAX);
                    assert!(part.offset as usize <= wire::CONFIG_BYTES_MAX);
                }
                _ => assert!(fd_count <= 1),
            }
        }
        rest = behind;
    }
}

const GUEST_BYTES: u64 = 64 << 10;

fn memfd(bytes: u64) -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, bytes).expect("room");
    file
}

/// A guest whose memory holds anything: its queue is taken from until it is empty or broken.
pub fn fuzz_queue(bytes: &[u8]) {
    let Some((choice, content)) = bytes.split_first_chunk::<8>() else { return };
    let size = 1u16 << (choice[0] % 7);
    let table = wire::Region { guest: 4096, size: GUEST_BYTES, user: 0, offset: 0 };
    let memory = Memory::map(&[table], vec![memfd(GUEST_BYTES)]).expect("mapped");
    let filled = content.len().min(GUEST_BYTES as usize);
    memory.write(4096, &content[..filled]).expect("inside");
    let at = |byte: u8| 4096 + u64::from(byte) * 16;
    let places =
        Rings { size, descriptors: at(choice[1]), available: at(choice[2]), used: at(choice[3]) };
    let Ok(mut queue) = Queue::new(&memory, places, choice[4] & 1 == 1) else { return };
    queue.set_next_available(u16::from_le_bytes([choice[5], choice[6]]));
    let disk = Disk::new("fuzz", 1 << 20, if choice[7] & 1 == 1 { 4096 } else { 512 });
    let mut chain = Chain::with_room();
    // No more is offered at once than there is room for.
    for _ in 0..2 * size {
        let Ok(Some(head)) = queue.take(&memory) else { break };
        assert!(head < size);
        if queue.chain(&memory, head, &mut chain).is_err() {
            break;
        }
        judge(&memory, &disk, &chain);
        if queue.put_used(&memory, head, 1).is_err() {
            break;
        }
        let _ = queue.wants_interrupt(&memory);
    }
    let _ = queue.wake(&memory);
    let _ = queue.sleep(&memory);
}

fn judge(memory: &Memory, disk: &Disk, chain: &Chain) {
    let (readable, writable) = (chain.length(false), chain.length(true));
    assert!(readable + writable <= u64::from(u32::MAX));
    assert!(chain.segment_count() <= DESCRIPTOR_COUNT_MAX);
    let mut head = [0; HEADER_BYTES as usize];
    let (Some(data), Some(room)) = (readable.checked_sub(HEADER_BYTES), writable.checked_sub(1))
    else {
        return;
    };
    if chain.read(memory, 0, &mut head).is_err() {
        return;
    }
    match disk.judge(&head, data, room) {
        Ok(Ask::Read(range)) => {
            check(disk, range);
            let _ = chain.write(memory, 0, &vec![0xa5; range.length as usize]);
        }
        Ok(Ask::Write(range)) => {
            check(disk, range);
            let _ = chain.read(memory, HEADER_BYTES, &mut vec![0; range.length as usize]);
        }
        Ok(Ask::Discard(count) | Ask::WriteZeroes(count)) => {
            assert!(count <= RANGE_COUNT_MAX);
            let mut bytes = [0; RANGE_BYTES as usize];
            let _ = chain.read(memory, HEADER_BYTES, &mut bytes);
            for zeroes in [true, false] {
                if let Ok(range) = disk.decode_range(&bytes, zeroes) {
                    check(disk, range);
                }
            }
        }
        Ok(Ask::Flush | Ask::GetId) | Err(_) => {}
    }
    let _ = chain.write(memory, writable - 1, &[0]);
}

/// V1 of `blk.rs`.
fn check(disk: &Disk, range: Range) {
    let block = u64::from(disk.logical_block);
    assert!(range.length > 0 && range.offset + range.length <= disk.size_bytes);
    assert!(range.offset.is_multiple_of(block) && range.length.is_multiple_of(block));
}

/// A region that holds anything: what comes back are heads of its queue, each once.
pub fn fuzz_inflight(bytes: &[u8]) {
    let _ = is_taken(bytes);
}

/// Whether it is a region at all.
fn is_taken(bytes: &[u8]) -> bool {
    let Some((choice, content)) = bytes.split_first_chunk::<4>() else { return false };
    let queue_size = u16::from(choice[0] % 64) + 1;
    let wanted = Inflight { queue_count: 2, queue_size, ..Inflight::default() };
    let (told, file) = Region::make(&wanted).expect("a region");
    let length = content.len().min(told.size as usize);
    rustix::io::pwrite(&file, &content[..length], 0).expect("room");
    let Ok(region) = Region::take(&told, file) else { return false };
    for queue in 0..2 {
        let used = u16::from_le_bytes([choice[1], choice[2]]);
        let (mut heads, _) = region.resume(queue, used).expect("it is there");
        let count = heads.len();
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), count);
        // There is room for the longest queue (I4); `Queue::begin` refuses what is none of its own.
        assert!(heads.iter().all(|head| *head < SIZE_MAX));
        let again = region.resume(queue, used).expect("it is there");
        assert_eq!(again.0.len(), count, "again it is the same");
    }
    true
}

/// Any bytes for a machine that the program before left: what can be taken is put down in the same bytes, and goes on as it was
/// told or not at all (C3, C4 of `carried.rs`); left again at once it is the same.
pub fn fuzz_carried(bytes: &[u8]) {
    let _ = (check_file::<Carried>(bytes), record_header::<Carried>(bytes));
    let Ok(carried) = Carried::decode(bytes) else { return };
    assert_eq!(carried.encode(), bytes);
    let Some(descriptors) = descriptors(&carried) else { return };
    assert_eq!(descriptors.len(), carried.descriptor_count());
    let served = Disk::new("fuzz", 1 << 20, 512);
    let Ok(again) = taken_and_left(descriptors, &served, &carried) else { return };
    let told = Disk { size_bytes: told_bytes(&carried), ..served };
    assert_eq!(told.config(QUEUE_COUNT_MAX, carried.writeback), carried.config);
    assert_eq!(carried.features & !blk::feature::ALL, 0);
    for running in again.rings.iter().filter_map(|ring| ring.running.as_ref()) {
        assert!(running.left.iter().all(|head| *head < running.places.size));
    }
    assert_eq!(again, sorted(carried));
}

fn told_bytes(carried: &Carried) -> u64 {
    carried.config.first_chunk().map_or(0, |it| u64::from_le_bytes(*it)) * blk::SECTOR
}

/// Its memory is by the guest's address, and its region is for the queues that there is room for (I4 of `inflight.rs`).
fn sorted(mut carried: Carried) -> Carried {
    if let Some(memory) = &mut carried.memory {
        memory.sort_by_key(|region| region.guest);
    }
    if let Some(told) = &mut carried.region
        && Region::make(told).is_ok_and(|(made, _)| made.size == told.size)
    {
        told.queue_size = SIZE_MAX;
    }
    carried
}

/// Of the kinds that it says it has.
fn descriptors(carried: &Carried) -> Option<Vec<OwnedFd>> {
    let event = || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    let mut all = vec![event()];
    all.extend(carried.has_back_end.then(event));
    all.extend(carried.memory.iter().flatten().map(|_| memfd(GUEST_BYTES)));
    if let Some(told) = &carried.region {
        all.push(Region::make(told).ok()?.1);
    }
    let events = carried.rings.iter().flat_map(|it| [it.has_kick, it.has_call, it.has_error]);
    all.extend(events.filter(|is_there| *is_there).map(|_| event()));
    all.extend((0..carried.message_fds).map(|_| event()));
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::super::carried::{Ring, Running};
    use super::super::wire::{VringAddr, protocol, request};
    use super::*;
    use forebay_testing::Random;

    const ROUNDS: u64 = 4000;

    fn noise(random: &mut Random, length: usize) -> Vec<u8> {
        (0..length).map(|_| random.next() as u8).collect()
    }

    #[test]
    fn any_bytes_leave_the_messages_standing() {
        let mut understood = 0;
        for seed in 0..ROUNDS {
            let mut random = Random(seed);
            let mut bytes = Vec::new();
            for _ in 0..8 {
                let request = random.below(40) as u32;
                let size = [0, 8, 40, 24, 13, 72, 264][random.below(7) as usize];
                bytes.extend(Header { request, needs_reply: seed % 2 == 0, size }.encode());
                let mut body = noise(&mut random, size);
                // Numbers are small more often than not.
                for byte in &mut body {
                    *byte &= if random.below(4) == 0 { 0xff } else { 0 };
                }
                understood += u32::from(wire::decode(request, &body, 0).is_ok());
                bytes.extend(body);
            }
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
            fuzz_messages(&bytes);
            fuzz_messages(&noise(&mut random, 64));
        }
        assert!(understood > 1000, "most of it was noise: {understood}");
    }

    /// A sound queue at a known place, then damaged in a few bytes.
    #[test]
    fn any_guest_leaves_the_queue_standing() {
        for seed in 0..ROUNDS {
            let mut random = Random(seed);
            // A table of 64 descriptors at 4096, the rings behind it.
            let mut bytes = vec![6, 0, 64, 80, seed as u8, 0, 0, (seed >> 1) as u8];
            let mut guest = vec![0; 8192];
            for number in 0..64usize {
                let place = number * 16;
                let address = 4096 + 4096 + random.below(60) * 64;
                let flags = [1, 1, 3, 2, 0, 4][random.below(6) as usize];
                guest[place..place + 8].copy_from_slice(&address.to_le_bytes());
                let length = [16u32, 1, 512, 4096, 64][random.below(5) as usize];
                guest[place + 8..place + 12].copy_from_slice(&length.to_le_bytes());
                guest[place + 12] = flags;
                guest[place + 14] = (number as u8 + 1) % 64;
            }
            guest[1026] = random.below(64) as u8;
            for head in 0..64 {
                guest[1028 + head * 2] = random.below(64) as u8;
            }
            for head in 0..60 {
                let kind = [0u8, 1, 4, 8, 11, 13, 99][random.below(7) as usize];
                guest[4096 + head * 64] = kind;
                guest[4096 + head * 64 + 8] = random.below(64) as u8;
            }
            for _ in 0..random.below(6) {
                let at = random.below(guest.len() as u64) as usize;
                guest[at] = random.next() as u8;
            }
            bytes.extend(guest);
            fuzz_queue(&bytes);
            let noise = noise(&mut random, 512);
            fuzz_queue(&noise);
            fuzz_inflight(&noise);
        }
    }

    #[test]
    fn any_region_leaves_the_heads_within_their_queue() {
        for seed in 0..ROUNDS {
            let mut random = Random(seed);
            let mut bytes = vec![7, random.below(12) as u8, 0, 0];
            // For the longest queue, whatever was asked for (I4 of `inflight.rs`).
            let stride = (16 + 16 * usize::from(SIZE_MAX)).next_multiple_of(64);
            let mut content = vec![0; 2 * stride + 64];
            let word = |at: &mut [u8], value: u16| at[..2].copy_from_slice(&value.to_le_bytes());
            // At either end of the queue, and behind it.
            let near = |number: u64| number as u16 + if number < 6 { 0 } else { SIZE_MAX - 10 };
            for queue in 0..2 {
                let part = &mut content[queue * stride..][..16 + 16 * usize::from(SIZE_MAX)];
                word(&mut part[8..], 1);
                word(&mut part[10..], SIZE_MAX);
                word(&mut part[12..], near(random.below(12)));
                word(&mut part[14..], random.below(12) as u16);
                for head in (0..6).chain(SIZE_MAX - 6..SIZE_MAX).map(usize::from) {
                    part[16 + head * 16] = random.below(2) as u8;
                    word(&mut part[16 + head * 16 + 6..], near(random.below(12)));
                    part[16 + head * 16 + 8] = random.below(20) as u8;
                }
            }
            bytes.extend(content);
            assert!(is_taken(&bytes), "seed {seed}: no region, so nothing was looked at");
        }
    }

    /// A machine somewhere between its coming in and its work.
    fn valid_carried(random: &mut Random) -> Carried {
        let mut some = |most: u64| random.below(most);
        let writeback = some(2) == 0;
        let region = |guest: u64| wire::Region {
            guest,
            size: GUEST_BYTES / 2,
            user: guest + (1 << 40),
            offset: GUEST_BYTES / 2,
        };
        // By address or not.
        let memory = if some(2) == 0 { [4096, 1 << 20] } else { [1 << 20, 4096] };
        let has_memory = some(4) > 0;
        let wanted = Inflight { queue_count: 4, queue_size: 64, ..Inflight::default() };
        let told = Region::make(&wanted).expect("a region").0;
        let rings = (0..some(4) as u32).map(|queue| {
            let size = 1 << some(7);
            let runs = has_memory && some(2) == 0;
            let at = 4096 + some(8) * 1024;
            let places = Rings { size, descriptors: at, available: at + 8192, used: at + 16384 };
            let left = (0..size.min(some(4) as u16)).rev().collect();
            let addresses = VringAddr { queue, flags: 0, descriptors: at, used: 1, available: 2 };
            Ring {
                size: [0, size][some(2) as usize],
                base: some(1 << 16) as u16,
                addresses: (runs || some(2) == 0).then_some(addresses),
                is_enabled: some(2) == 0,
                is_broken: some(4) == 0,
                has_kick: runs || some(2) == 0,
                has_call: some(2) == 0,
                has_error: some(2) == 0,
                running: runs.then_some(Running {
                    places,
                    event_idx: some(2) == 0,
                    next_available: some(1 << 16) as u16,
                    next_used: some(1 << 16) as u16,
                    left,
                }),
            }
        });
        let rings = rings.collect();
        let header = Header { request: request::SET_FEATURES, needs_reply: true, size: 8 };
        let message = [&header.encode()[..], &[0; 8]].concat();
        let received = some(message.len() as u64 + 1) as usize;
        Carried {
            volume: [some(256) as u8; 16],
            socket: "/run/vm".into(),
            name: "fuzz".into(),
            config: Disk::new("fuzz", 1 << 20, 512).config(QUEUE_COUNT_MAX, writeback),
            features: blk::feature::ALL & some(u64::MAX),
            protocol: protocol::ALL & some(u64::MAX),
            writeback,
            has_back_end: some(2) == 0,
            memory: has_memory.then(|| memory.map(region).to_vec()),
            region: (some(2) == 0).then_some(told),
            counter: some(u64::MAX),
            rings,
            message: message[..received].to_vec(),
            message_fds: some(3) as usize,
        }
    }

    #[test]
    fn any_bytes_leave_what_is_carried_standing() {
        let (mut taken, mut decoded) = (0, 0);
        let served = Disk::new("fuzz", 1 << 20, 512);
        for seed in 0..ROUNDS {
            let mut random = Random(seed);
            let carried = valid_carried(&mut random);
            let mut bytes = carried.encode();
            assert_eq!(Carried::decode(&bytes).expect("valid"), carried);
            let again = taken_and_left(descriptors(&carried).expect("some"), &served, &carried);
            assert_eq!(again.expect("as it was"), sorted(carried));
            fuzz_carried(&bytes);
            for _ in 0..4 {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << random.below(8);
                if let Ok(other) = Carried::decode(&bytes) {
                    decoded += 1;
                    let its = descriptors(&other);
                    let again = its.map(|its| taken_and_left(its, &served, &other));
                    taken += u32::from(again.is_some_and(|again| again.is_ok()));
                }
                fuzz_carried(&bytes);
            }
            fuzz_carried(&noise(&mut random, 300));
        }
        println!("of {} changed ones {decoded} were understood, {taken} taken", 4 * ROUNDS);
        assert!(decoded > 1000 && taken > 100);
    }
}
