// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The other side, for tests: a virtual machine whose guest drives a disk. It blocks.
//!
//! A [`Machine`] is what outlives a daemon: memory, queues, and the region for what is in flight. A
//! [`Link`] is its connection to one.

use super::memory::Memory;
use super::wire::{self, FD_COUNT_MAX, HEADER_BYTES, Header, Inflight, Region, protocol, request};
use super::{blk, channel};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::{self, ErrorKind, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Bytes of data that a request has room for.
pub const DATA_BYTES: usize = 64 << 10;
/// Descriptors of a request.
const DESCRIPTORS: u16 = 4;
/// Where a guest's memory begins, for itself and for the machine's process.
const GUEST_AT: u64 = 0x1_0000;
const USER_AT: u64 = 0x7f00_0000_0000;
/// Bytes of a request: a page for head, status and indirect table, then its data.
const SLOT_BYTES: u64 = 4096 + DATA_BYTES as u64;
const RING_BYTES: u64 = 64 << 10;
const STATUS_AT: u64 = 64;
const TABLE_AT: u64 = 1024;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Kinds of requests.
pub mod kind {
    #![allow(missing_docs)]
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// Data of a request.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// For the disk.
    Out(&'a [u8]),
    /// Room for so many bytes of it.
    In(usize),
}

/// A request that was given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// Which.
    pub slot: u16,
    /// 0: done.
    pub status: u8,
    /// Bytes that the device says it wrote.
    pub length: u32,
    /// What was read.
    pub bytes: Vec<u8>,
}

/// One queue of a guest.
#[derive(Debug)]
struct Ring {
    /// First address.
    at: u64,
    size: u16,
    next_available: u16,
    last_used: u16,
    kick: OwnedFd,
    call: OwnedFd,
    /// By slot: room for data, if it is under way.
    under_way: Vec<Option<usize>>,
}

/// A virtual machine.
#[derive(Debug)]
pub struct Machine {
    file: OwnedFd,
    region: Region,
    /// The guest's view.
    pub memory: Memory,
    rings: Vec<Ring>,
    /// What its driver understands.
    pub features: u64,
    /// Requests are one indirect descriptor.
    pub is_indirect: bool,
    in_flight: Option<(Inflight, OwnedFd)>,
    /// Interrupts that were taken.
    pub interrupts: u64,
}

fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Machine {
    /// A machine with so many queues, each of `size` descriptors.
    pub fn new(queues: u16, size: u16) -> io::Result<Machine> {
        let bytes = u64::from(queues) * (RING_BYTES + SLOT_BYTES * u64::from(size / DESCRIPTORS));
        let file = memfd_create("machine", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes)?;
        let region = Region { guest: GUEST_AT, size: bytes, user: USER_AT, offset: 0 };
        let memory = Memory::map(&[region], vec![file.try_clone()?]).map_err(io::Error::other)?;
        let mut rings = Vec::new();
        for queue in 0..u64::from(queues) {
            rings.push(Ring {
                at: GUEST_AT + queue * bytes / u64::from(queues),
                size,
                next_available: 0,
                last_used: 0,
                kick: event()?,
                call: event()?,
                under_way: vec![None; usize::from(size / DESCRIPTORS)],
            });
        }
        let features = blk::feature::ALL;
        let (is_indirect, in_flight, interrupts) = (false, None, 0);
        Ok(Machine { file, region, memory, rings, features, is_indirect, in_flight, interrupts })
    }

    /// Cuts the file of its memory short behind an address, or makes it whole again with zeros. What is cut off is not to be touched by the
    /// guest until then.
    pub fn cut(&self, behind: Option<u64>) -> io::Result<()> {
        let bytes = behind.map_or(self.region.size, |end| end - GUEST_AT);
        Ok(ftruncate(&self.file, bytes)?)
    }

    /// Connects as QEMU does, and starts the queues.
    pub fn connect(&mut self, path: &Path, patience: Duration) -> io::Result<Link> {
        let mut link = Link::new(path, patience)?;
        self.agree(&mut link)?;
        self.start(&mut link)?;
        Ok(link)
    }

    /// Agrees on what both understand.
    pub fn agree(&self, link: &mut Link) -> io::Result<()> {
        let offered = link.number(request::GET_FEATURES)?;
        if self.features & !offered != 0 {
            return Err(io::Error::other("a feature is not offered"));
        }
        let agreed = link.number(request::GET_PROTOCOL_FEATURES)? & protocol::ALL;
        link.say(request::SET_PROTOCOL_FEATURES, &agreed.to_le_bytes(), &[])?;
        link.say(request::SET_OWNER, &[], &[])
    }

    /// Gives memory and queues, as at the start of the guest's driver.
    pub fn start(&mut self, link: &mut Link) -> io::Result<()> {
        self.prepare(link)?;
        self.enable(link)
    }

    /// The same, but for that the queues may be taken from.
    pub fn prepare(&mut self, link: &mut Link) -> io::Result<()> {
        link.say(request::SET_FEATURES, &self.features.to_le_bytes(), &[])?;
        let size = self.rings.first().map_or(0, |ring| ring.size);
        if self.in_flight.is_none() {
            let queue_count = self.rings.len() as u16;
            // For shorter ones than there are, as QEMU 10 does.
            let queue_size = size.div_ceil(8);
            let wanted = Inflight { queue_count, queue_size, ..Inflight::default() };
            self.in_flight = Some(link.region(&wanted)?);
        }
        if let Some((told, file)) = &self.in_flight {
            link.say(request::SET_INFLIGHT_FD, &told.encode(), &[file])?;
        }
        let it = self.region;
        let mut table = 1u64.to_le_bytes().to_vec();
        for number in [it.guest, it.size, it.user, it.offset] {
            table.extend(number.to_le_bytes());
        }
        link.say(request::SET_MEM_TABLE, &table, &[&self.file])?;
        for queue in 0..self.rings.len() {
            self.start_queue(queue, link)?;
        }
        Ok(())
    }

    /// The queues may be taken from.
    pub fn enable(&self, link: &mut Link) -> io::Result<()> {
        for queue in 0..self.rings.len() {
            link.say(request::SET_VRING_ENABLE, &state(queue, 1), &[])?;
        }
        Ok(())
    }

    fn start_queue(&self, queue: usize, link: &mut Link) -> io::Result<()> {
        let ring = &self.rings[queue];
        link.say(request::SET_VRING_NUM, &state(queue, u32::from(ring.size)), &[])?;
        link.say(request::SET_VRING_BASE, &state(queue, u32::from(ring.last_used)), &[])?;
        let user = ring.at - GUEST_AT + USER_AT;
        let mut addresses = state(queue, 0).to_vec();
        for part in [0, ring.used_at() - ring.at, ring.available_at() - ring.at] {
            addresses.extend((user + part).to_le_bytes());
        }
        addresses.extend([0; 8]);
        link.say(request::SET_VRING_ADDR, &addresses, &[])?;
        link.say(request::SET_VRING_KICK, &(queue as u64).to_le_bytes(), &[&ring.kick])?;
        link.say(request::SET_VRING_CALL, &(queue as u64).to_le_bytes(), &[&ring.call])
    }

    /// The guest's driver begins anew: its queues are empty, and nothing is in flight.
    pub fn reset(&mut self) {
        self.in_flight = None;
        for queue in 0..self.rings.len() {
            let ring = &mut self.rings[queue];
            (ring.next_available, ring.last_used) = (0, 0);
            ring.under_way.fill(None);
            let at = ring.at;
            self.put(at, &[0; RING_BYTES as usize]);
        }
    }

    /// What a queue's used ring is read at next.
    pub fn next_used(&self, queue: usize) -> u16 {
        self.rings[queue].last_used
    }

    /// Slots of a queue that nothing is under way in.
    pub fn free(&self, queue: usize) -> Vec<u16> {
        let all = self.rings[queue].under_way.iter().enumerate();
        all.filter(|(_, it)| it.is_none()).map(|(slot, _)| slot as u16).collect()
    }

    /// Offers a request in a free slot, and kicks if the device wants that.
    ///
    /// # Panics
    ///
    /// If the slot is not free, or the data too long.
    pub fn offer(&mut self, queue: usize, slot: u16, kind: u32, sector: u64, data: Data<'_>) {
        let at = self.slot_at(queue, slot) + 4096;
        let (length, is_written) = match data {
            Data::Out(bytes) => {
                assert!(bytes.len() <= DATA_BYTES);
                self.put(at, bytes);
                (bytes.len(), false)
            }
            Data::In(length) => (length, true),
        };
        self.offer_at(queue, slot, (kind, sector), (at, length), is_written);
    }

    /// As [`Machine::offer`], of a kind at a sector, with data anywhere in the guest's memory.
    pub fn offer_at(
        &mut self,
        queue: usize,
        slot: u16,
        (kind, sector): (u32, u64),
        (data, length): (u64, usize),
        is_written: bool,
    ) {
        let at = self.slot_at(queue, slot);
        let mut head = [0; 16];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(at, &head);
        self.put(at + STATUS_AT, &[0xff]);
        let flags = if is_written { WRITE } else { 0 };
        let half = (length / 2) as u32;
        let rest = length as u32 - half;
        let parts = [
            (at, 16, 0),
            (data, half, flags),
            (data + u64::from(half), rest, flags),
            (at + STATUS_AT, 1, WRITE),
        ];
        let parts: Vec<_> = parts.into_iter().filter(|part| part.1 > 0).collect();
        let ring = &mut self.rings[queue];
        let under_way = &mut ring.under_way[usize::from(slot)];
        assert!(under_way.is_none());
        *under_way = Some(if is_written { length.min(DATA_BYTES) } else { 0 });
        let table = ring.at;
        let first = slot * DESCRIPTORS;
        if self.is_indirect {
            self.put_chain(at + TABLE_AT, 0, &parts);
            let bytes = parts.len() as u32 * 16;
            self.put_descriptor(table, first, (at + TABLE_AT, bytes, INDIRECT), 0);
        } else {
            self.put_chain(table, first, &parts);
        }
        self.offer_head(queue, first);
    }

    fn put_chain(&self, table: u64, first: u16, parts: &[(u64, u32, u16)]) {
        for (number, part) in (first..).zip(parts) {
            let is_last = usize::from(number - first) + 1 == parts.len();
            let flags = part.2 | if is_last { 0 } else { NEXT };
            self.put_descriptor(table, number, (part.0, part.1, flags), number + 1);
        }
    }

    /// Writes a descriptor: address, length and flags, and the next one's number.
    pub fn put_descriptor(&self, table: u64, number: u16, it: (u64, u32, u16), next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&it.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&it.1.to_le_bytes());
        bytes[12..14].copy_from_slice(&it.2.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.put(table + u64::from(number) * 16, &bytes);
    }

    /// Where a queue's table of descriptors is.
    pub fn table_at(&self, queue: usize) -> u64 {
        self.rings[queue].at
    }

    /// Where a slot's memory is: its head; its data 4096 bytes later.
    pub fn slot_at(&self, queue: usize, slot: u16) -> u64 {
        self.rings[queue].at + RING_BYTES + u64::from(slot) * SLOT_BYTES
    }

    /// Makes a head available, whatever it is, and kicks if the device wants that.
    pub fn offer_head(&mut self, queue: usize, head: u16) {
        let event_idx = self.features & blk::feature::EVENT_IDX != 0;
        let ring = &mut self.rings[queue];
        let place = u64::from(ring.next_available % ring.size);
        let at = ring.available_at() + 4 + place * 2;
        let _ = self.memory.store(head, at, Ordering::Relaxed);
        let before = ring.next_available;
        ring.next_available = before.wrapping_add(1);
        let _ = self.memory.store(ring.next_available, ring.available_at() + 2, Ordering::Release);
        fence(Ordering::SeqCst);
        let wants_kick = if event_idx {
            let at = ring.used_at() + 4 + u64::from(ring.size) * 8;
            self.memory.load::<u16>(at, Ordering::Relaxed) == Ok(before)
        } else {
            self.memory.load::<u16>(ring.used_at(), Ordering::Relaxed) == Ok(0)
        };
        if wants_kick {
            let _ = rustix::io::write(&ring.kick, &1u64.to_ne_bytes());
        }
    }

    /// Kicks although nobody asked for it.
    pub fn kick(&self, queue: usize) {
        let _ = rustix::io::write(&self.rings[queue].kick, &1u64.to_ne_bytes());
    }

    /// What a queue's used ring has next. An answer to nothing is an error.
    pub fn used(&mut self, queue: usize) -> Result<Option<Done>, String> {
        let at = self.rings[queue].used_at();
        let end =
            self.memory.load::<u16>(at + 2, Ordering::Acquire).map_err(|it| it.to_string())?;
        let ring = &mut self.rings[queue];
        if end == ring.last_used {
            return Ok(None);
        }
        let mut element = [0; 8];
        let place = u64::from(ring.last_used % ring.size);
        self.memory.read(at + 4 + place * 8, &mut element).map_err(|it| it.to_string())?;
        ring.last_used = ring.last_used.wrapping_add(1);
        let word = u64::from_le_bytes(element);
        let (head, length) = (word as u32, (word >> 32) as u32);
        let slot = (head / u32::from(DESCRIPTORS)) as u16;
        let room = ring.under_way.get_mut(usize::from(slot)).and_then(Option::take);
        let room = room.ok_or_else(|| format!("head {head} is answered, but is not under way"))?;
        let mut status = [0];
        let slot_at = self.slot_at(queue, slot);
        self.memory.read(slot_at + STATUS_AT, &mut status).map_err(|it| it.to_string())?;
        let mut bytes = vec![0; room];
        self.memory.read(slot_at + 4096, &mut bytes).map_err(|it| it.to_string())?;
        Ok(Some(Done { slot, status: status[0], length, bytes }))
    }

    /// Asks for an interrupt at the next answer, and waits for it; false: none came.
    pub fn wait(&mut self, queue: usize, patience: Duration) -> bool {
        let ring = &self.rings[queue];
        if self.features & blk::feature::EVENT_IDX != 0 {
            let at = ring.available_at() + 4 + u64::from(ring.size) * 2;
            let _ = self.memory.store(ring.last_used, at, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        if self.memory.load::<u16>(ring.used_at() + 2, Ordering::Acquire) != Ok(ring.last_used) {
            return true;
        }
        let patience = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        let mut polled = [PollFd::new(&ring.call, PollFlags::IN)];
        let came = poll(&mut polled, Some(&patience)).is_ok_and(|count| count > 0);
        self.take_interrupts(queue);
        came
    }

    /// Counts the interrupts that a queue has had, whether they were waited for or not.
    pub fn take_interrupts(&mut self, queue: usize) {
        let mut count = [0; 8];
        // Nothing is read if there was none.
        if rustix::io::read(&self.rings[queue].call, &mut count) == Ok(8) {
            self.interrupts += u64::from_ne_bytes(count);
        }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        assert!(self.memory.write(at, bytes).is_ok(), "the guest's own memory");
    }
}

impl Ring {
    fn available_at(&self) -> u64 {
        self.at + u64::from(self.size) * 16
    }

    fn used_at(&self) -> u64 {
        (self.available_at() + 6 + u64::from(self.size) * 2).next_multiple_of(4)
    }
}

fn state(queue: usize, number: u32) -> [u8; 8] {
    (u64::from(number) << 32 | queue as u64).to_le_bytes()
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Link {
    /// The socket.
    pub socket: UnixStream,
}

impl Drop for Link {
    /// A process that is begun just now has it open as well, for a moment.
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl Link {
    /// Connects, and says nothing yet.
    pub fn new(path: &Path, patience: Duration) -> io::Result<Link> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(patience))?;
        socket.set_write_timeout(Some(patience))?;
        Ok(Link { socket })
    }

    /// Says something, and waits for its acknowledgement if it has no other answer.
    pub fn say(&mut self, request: u32, body: &[u8], fds: &[&OwnedFd]) -> io::Result<()> {
        // Acknowledgements are agreed on before they are wanted.
        let needs_reply = ![request::SET_PROTOCOL_FEATURES].contains(&request);
        self.send(request, needs_reply, body, fds)?;
        if !needs_reply {
            return Ok(());
        }
        let (answer, _) = self.answer(request)?;
        match answer.as_slice() {
            [0, 0, 0, 0, 0, 0, 0, 0] => Ok(()),
            _ => Err(io::Error::other(format!("message {request} is refused"))),
        }
    }

    /// Sends a message.
    pub fn send(
        &mut self,
        request: u32,
        needs_reply: bool,
        body: &[u8],
        fds: &[&OwnedFd],
    ) -> io::Result<()> {
        let header = Header { request, needs_reply, size: body.len() };
        let bytes = [&header.encode()[..], body].concat();
        let fd = fds.first().map(|fd| fd.as_fd());
        Ok(channel::send(self.socket.as_fd(), &bytes, fd)?)
    }

    /// The answer to a request, and a descriptor.
    pub fn answer(&mut self, wanted: u32) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut head = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_COUNT_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut part = [IoSliceMut::new(&mut head)];
        let got = recvmsg(&self.socket, &mut part, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        let mut fd = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fd = fds.last();
            }
        }
        if got == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.socket.read_exact(&mut head[got..])?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
        let (request, flags, size) = (word(0), word(4), word(8) as usize);
        if request != wanted || flags != 5 || size > 4096 {
            return Err(io::Error::other(format!("answer {request}, {flags:#x}, {size} bytes")));
        }
        let mut body = vec![0; size];
        self.socket.read_exact(&mut body)?;
        Ok((body, fd))
    }

    /// Asks for a number.
    pub fn number(&mut self, request: u32) -> io::Result<u64> {
        self.send(request, false, &[], &[])?;
        let (body, _) = self.answer(request)?;
        let number = body.try_into().map_err(|_| io::Error::other("no number"))?;
        Ok(u64::from_le_bytes(number))
    }

    /// Stops a queue: where it would go on.
    pub fn stop_queue(&mut self, queue: usize) -> io::Result<u16> {
        self.send(request::GET_VRING_BASE, false, &state(queue, 0), &[])?;
        let (body, _) = self.answer(request::GET_VRING_BASE)?;
        match body.as_slice() {
            [_, _, _, _, low, high, 0, 0] => Ok(u16::from_le_bytes([*low, *high])),
            _ => Err(io::Error::other("no base")),
        }
    }

    /// Asks for a part of the configuration space.
    pub fn config(&mut self, offset: u32, size: u32) -> io::Result<Vec<u8>> {
        let mut body = [offset, size, 0].map(u32::to_le_bytes).concat();
        body.resize(12 + size as usize, 0);
        self.send(request::GET_CONFIG, false, &body, &[])?;
        Ok(self.answer(request::GET_CONFIG)?.0.split_off(12))
    }

    /// Chooses a write cache or none.
    pub fn set_writeback(&mut self, writeback: bool) -> io::Result<()> {
        let mut body = [blk::WRITEBACK_AT, 1, 0].map(u32::to_le_bytes).concat();
        body.push(u8::from(writeback));
        self.say(request::SET_CONFIG, &body, &[])
    }

    fn region(&mut self, wanted: &Inflight) -> io::Result<(Inflight, OwnedFd)> {
        self.send(request::GET_INFLIGHT_FD, false, &wanted.encode(), &[])?;
        let (body, fd) = self.answer(request::GET_INFLIGHT_FD)?;
        let told = wire::decode(request::GET_INFLIGHT_FD, &body, 0);
        match (told, fd) {
            (Ok(wire::Message::GetInflightFd(told)), Some(fd)) => Ok((told, fd)),
            _ => Err(io::Error::other("no region")),
        }
    }
}
