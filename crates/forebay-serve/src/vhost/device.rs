// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One connected front end (QEMU): what it says, and the disk that its guest has through us.
//!
//! # Invariants
//!
//! - **D1** Rings and memory change only at rest: no request is under way and no kick is waited for.
//!   A message that changes them waits, and what follows it, until that is so; no chain is taken
//!   meanwhile, and those that were taken are given back.
//! - **D2** Once the connection has ended the guest's memory is not touched. What was in flight
//!   stays noted in the region, and is taken first by whoever is connected next; that is only when
//!   nothing of this device is under way.
//! - **D3** A device is gone only when the reactor and the engine have answered all that it asked.
//! - **D4** Bad words of the front end end the connection; bad words of the guest break one queue
//!   or fail one request.
//! - **D5** The loop sleeps only if nothing can be done: a kick, a message or an answer wakes it.
//! - **D6** If the guest's memory, or the region, cannot be had any more the connection ends before the loop sleeps: nothing that was read since is
//!   believed. The front end may connect again.

pub(super) mod carry;

use super::blk::{self, CONFIG_BYTES, Disk, WRITEBACK_AT, feature};
use super::channel::{Channel, Received, send};
use super::inflight::{InflightError, QUEUE_COUNT_MAX, Region};
use super::memory::{Memory as Guest, Unreached};
use super::queue::{QueueError, SIZE_MAX};
use super::requests::{self, Around, Requests};
use super::rings::{self, Event, Rings};
use super::wire::{self, CONFIG_BYTES_MAX, ConfigPart, Header, Message, protocol};
use crate::frontend::Place;
use crate::nbd::pool::Pool;
use forebay::io::{ReactorOp, user_data};
use forebay::shard::{Answer, Shard};
use forebay_core::units::VolumeIndex;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Chains of a device that are taken in one turn.
const CHAIN_COUNT_MAX: usize = 64;
/// Messages of a front end that are heard in one turn.
const MESSAGE_COUNT_MAX: usize = 64;

/// What an operation of a device is for: the low byte of its number.
pub(super) const SOCKET: u64 = 1;
pub(super) const KICK: u64 = 2;
pub(super) const WAKE: u64 = 3;

/// How a device names its operations to reactor and engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    pub(super) place: Place,
    pub(super) device: u32,
}

impl Names {
    fn reactor(self, queue: usize, what: u64) -> u64 {
        let number = u64::from(self.device) << 16 | (queue as u64) << 8 | what;
        user_data(self.place.source(), number)
    }

    fn engine(self) -> u64 {
        self.place.cookie(u64::from(self.device) << 16)
    }
}

/// Why a connection was ended, or a message not obeyed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Wire(#[from] wire::WireError),
    #[error(transparent)]
    Memory(#[from] super::memory::MemoryError),
    #[error(transparent)]
    Inflight(#[from] InflightError),
    #[error("queue {0}: {1}")]
    Queue(u32, QueueError),
    #[error("there are at most {QUEUE_COUNT_MAX} queues; queue {0} was named")]
    QueueNumber(u32),
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("a kick, call or error descriptor is missing or no eventfd")]
    Event,
    #[error("the configuration cannot be set there")]
    Config,
    #[error("it takes no answers")]
    Deaf,
    #[error(transparent)]
    Lost(Unreached),
}

impl Refusal {
    /// What was said is understood, and the next message will be.
    fn leaves_it_open(&self) -> bool {
        !matches!(self, Refusal::Wire(_) | Refusal::Deaf | Refusal::Lost(_))
    }
}

/// Whether a message has its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answered {
    Fully,
    /// An acknowledgement may be wanted.
    Not,
}

/// What is to be told.
pub(super) struct Told {
    pub(super) text: String,
    pub(super) is_bad: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Open,
    /// Finishes what was taken, then ends.
    Stopping,
    /// Finishes what was taken, then rests, for the next program.
    Leaving,
    /// The guest's memory is not touched any more.
    Over,
}

pub(super) struct Device {
    names: Names,
    disk: Disk,
    volume: VolumeIndex,
    channel: Channel,
    life: Life,
    features: u64,
    protocol: u64,
    writeback: bool,
    /// The front end has read the size that there is now, or was told that it is another. QEMU reads it only when it is started:
    /// when it connects again it knows the one of before.
    knows_size: bool,
    rings: Rings,
    requests: Requests,
    /// The back end's own way to the front end.
    back_end: Option<OwnedFd>,
    /// A message waits for rest. (D1)
    is_resting: bool,
    /// The reactor was asked for a message, or for another turn.
    is_listening: bool,
    is_waking: bool,
    /// Refused messages that were told of.
    refusals: u32,
    pub(super) news: Vec<Told>,
}

impl Device {
    pub(super) fn new(channel: Channel, names: Names, disk: Disk, volume: VolumeIndex) -> Device {
        Device {
            names,
            disk,
            volume,
            channel,
            life: Life::Open,
            features: 0,
            protocol: 0,
            writeback: true,
            knows_size: false,
            rings: Rings::default(),
            requests: Requests::new(),
            back_end: None,
            is_resting: false,
            is_listening: false,
            is_waking: false,
            refusals: 0,
            news: Vec::new(),
        }
    }

    /// Bytes of memory that one takes.
    pub(super) const fn memory_bytes() -> u64 {
        size_of::<Device>() as u64 + requests::memory_bytes() + rings::memory_bytes()
    }

    /// The volume's size, if it is another now. (It is asked for in each turn.)
    pub(super) fn resize(&mut self, size_bytes: u64) {
        if self.disk.resize(size_bytes) {
            self.knows_size = false;
            self.tell(format!("is {size_bytes} bytes now"), false);
        }
    }

    /// Tells the guest of the size, whose queues run: QEMU does not listen before.
    fn tell_size(&mut self) {
        if let Some(socket) = self.back_end.as_ref().filter(|_| !self.knows_size) {
            // One who has much else to read is told in a later turn; one who cannot be told any more, never.
            let told = send(socket.as_fd(), &wire::config_changed(), None);
            self.knows_size = told != Err(Errno::AGAIN);
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.life != Life::Over
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.channel.socket()
    }

    /// Nothing of it is under way. (D3)
    pub(super) fn is_gone(&self) -> bool {
        self.life == Life::Over && !self.is_listening && !self.is_waking && self.is_at_rest()
    }

    fn is_at_rest(&self) -> bool {
        self.requests.is_empty() && self.rings.vrings.iter().all(|vring| !vring.is_polled)
    }

    fn tell(&mut self, text: String, is_bad: bool) {
        self.news.push(Told { text, is_bad });
    }

    pub(super) fn start(&mut self, shard: &mut Shard, pool: &mut Pool) {
        self.receive(shard, pool);
    }

    /// The reactor has answered an operation.
    pub(super) fn event(
        &mut self,
        queue: usize,
        what: u64,
        result: i32,
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        match what {
            SOCKET => {
                self.is_listening = false;
                self.receive(shard, pool);
            }
            KICK => self.kicked(queue, result, shard),
            _ => self.is_waking = false,
        }
    }

    fn kicked(&mut self, queue: usize, result: i32, shard: &mut Shard) {
        let Some(vring) = self.rings.vrings.get_mut(queue) else { return };
        vring.is_polled = false;
        if result < 0 || self.life == Life::Over {
            // Cancelled, and looked at again when there is no rest any more. Or the end came in the same turn (D2).
            return;
        }
        if let Some(kick) = &vring.kick {
            kick.clear();
        }
        self.rings.look_at(queue);
        self.wait_for_kicks(shard);
    }

    /// Looks whether the connection has ended, though nobody has said that there is something.
    pub(super) fn hear_end(&mut self, shard: &mut Shard, pool: &mut Pool) {
        let is_heard = matches!(self.life, Life::Open | Life::Leaving);
        if is_heard && self.channel.has_ended() {
            self.end(None, shard, pool);
        }
    }

    /// Hears what the front end says.
    pub(super) fn receive(&mut self, shard: &mut Shard, pool: &mut Pool) {
        for _ in 0..MESSAGE_COUNT_MAX {
            if self.is_resting || self.is_listening || self.life != Life::Open {
                return;
            }
            match self.channel.receive() {
                Received::Message(header) => self.hear(header, shard, pool),
                Received::Nothing => break,
                Received::Ended => return self.end(None, shard, pool),
                Received::Bad(error) => return self.end(Some(error.into()), shard, pool),
            }
        }
        if self.is_resting || self.is_listening || self.life != Life::Open {
            return;
        }
        self.is_listening = true;
        let fd = self.channel.fd();
        shard.reactor.submit(ReactorOp::PollIn { fd }, self.names.reactor(0, SOCKET));
        self.wait_for_kicks(shard);
    }

    /// Waits for a kick of each queue that runs, and looks at it once.
    fn wait_for_kicks(&mut self, shard: &mut Shard) {
        if self.is_resting || self.life != Life::Open {
            return;
        }
        for at in 0..self.rings.vrings.len() {
            let vring = &mut self.rings.vrings[at];
            let Some(kick) = vring.kick.as_ref().filter(|_| vring.is_waited_for()) else {
                continue;
            };
            let fd = kick.fd();
            vring.is_polled = true;
            shard.reactor.submit(ReactorOp::PollIn { fd }, self.names.reactor(at, KICK));
            self.rings.look_at(at);
        }
    }

    fn hear(&mut self, header: Header, shard: &mut Shard, pool: &mut Pool) {
        let body = self.channel.body().to_owned();
        let message = wire::decode(header.request, &body, self.channel.fd_count());
        if message.is_ok_and(|message| message.needs_rest()) && !self.is_at_rest() {
            return self.rest(shard); // D1
        }
        let fds = self.channel.take_fds();
        self.channel.next();
        let done = match message {
            Ok(message) => self.obey(header.request, message, fds),
            Err(error) => Err(error.into()),
        };
        let is_lost = self.rings.is_lost();
        let done = if is_lost { Err(Refusal::Lost(Unreached::Lost)) } else { done }; // D6
        let acknowledges = header.needs_reply && self.protocol & protocol::REPLY_ACK != 0;
        let done = match done {
            Ok(Answered::Fully) => return,
            Ok(Answered::Not) if acknowledges => self.say(header.request, &[0; 8], None),
            Err(refusal) if acknowledges && refusal.leaves_it_open() => {
                let nack = self.say(header.request, &1u64.to_le_bytes(), None);
                self.refused(&refusal);
                nack
            }
            Ok(Answered::Not) => Ok(()),
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = done {
            self.end(Some(refusal), shard, pool); // D4
        }
    }

    /// Tells the first few.
    fn refused(&mut self, refusal: &Refusal) {
        self.refusals += 1;
        if self.refusals <= 8 {
            self.tell(format!("a message was refused: {refusal}"), true);
        }
    }

    fn rest(&mut self, shard: &mut Shard) {
        self.is_resting = true;
        self.leave_kicks(shard);
    }

    fn leave_kicks(&mut self, shard: &mut Shard) {
        for (at, vring) in self.rings.vrings.iter().enumerate() {
            if vring.is_polled {
                shard.reactor.cancel(self.names.reactor(at, KICK));
            }
        }
    }

    /// Does what a message wants.
    fn obey(
        &mut self,
        request: u32,
        message: Message<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Answered, Refusal> {
        let number = match message {
            Message::GetFeatures => feature::ALL,
            Message::GetProtocolFeatures => protocol::ALL,
            Message::GetQueueNum => u64::from(QUEUE_COUNT_MAX),
            Message::GetVringBase { queue } => {
                let at = self.number(queue)?;
                u64::from(self.rings.stop(at)) << 32 | u64::from(queue)
            }
            Message::GetConfig(part) => {
                self.knows_size |= part.offset == 0 && part.size >= 8;
                self.say(request, &self.config(part), None)?;
                return Ok(Answered::Fully);
            }
            Message::GetInflightFd(wanted) => {
                let (told, file) = Region::make(&wanted)?;
                self.say(request, &told.encode(), Some(file))?;
                return Ok(Answered::Fully);
            }
            message => return self.set(message, fds).map(|()| Answered::Not),
        };
        self.say(request, &number.to_le_bytes(), None)?;
        Ok(Answered::Fully)
    }

    fn say(&self, request: u32, body: &[u8], fd: Option<OwnedFd>) -> Result<(), Refusal> {
        let fd = fd.as_ref().map(AsFd::as_fd);
        self.channel.reply(request, body, fd).map_err(|_| Refusal::Deaf)
    }

    fn set(&mut self, message: Message<'_>, mut fds: Vec<OwnedFd>) -> Result<(), Refusal> {
        let fd = fds.pop();
        match message {
            Message::SetFeatures(features) => {
                if features & !feature::ALL != 0 {
                    return Err(Refusal::Features(features));
                }
                self.features = features;
                self.rings.event_idx = features & feature::EVENT_IDX != 0;
            }
            Message::SetProtocolFeatures(features) => {
                if features & !protocol::ALL != 0 {
                    return Err(Refusal::Features(features));
                }
                self.protocol = features;
            }
            Message::SetMemTable { regions, count } => {
                fds.extend(fd);
                self.rings.memory = Some(Guest::map(&regions[..count], fds)?);
                for at in 0..self.rings.vrings.len() {
                    if !self.rings.vrings[at].is_running() {
                        self.start_queue(at)?;
                    }
                }
            }
            Message::SetVringNum { queue, size } => {
                if !size.is_power_of_two() || size > u32::from(SIZE_MAX) {
                    return Err(Refusal::Queue(queue, QueueError::Size(size)));
                }
                self.vring(queue)?.size = size as u16;
            }
            Message::SetVringAddr(addresses) => {
                let vring = self.vring(addresses.queue)?;
                vring.addresses = Some(addresses);
                self.start_queue(addresses.queue as usize)?;
            }
            Message::SetVringBase { queue, base } => self.vring(queue)?.base = base as u16,
            Message::SetVringKick { queue, .. } => {
                // Without a descriptor it would have to be polled.
                let kick = fd.and_then(Event::new).ok_or(Refusal::Event)?;
                let needs_enabling = self.features & feature::PROTOCOL != 0;
                let vring = self.vring(u32::from(queue))?;
                vring.kick = Some(kick);
                vring.is_enabled |= !needs_enabling;
                self.start_queue(usize::from(queue))?;
            }
            Message::SetVringCall { queue, .. } => {
                let call = fd.map(|fd| Event::new(fd).ok_or(Refusal::Event)).transpose()?;
                let at = self.number(u32::from(queue))?;
                self.rings.set_call(at, call);
            }
            Message::SetVringErr { queue, .. } => {
                let error = fd.map(|fd| Event::new(fd).ok_or(Refusal::Event)).transpose()?;
                self.vring(u32::from(queue))?.error = error;
            }
            Message::SetVringEnable { queue, enable } => self.vring(queue)?.is_enabled = enable,
            Message::SetBackendReqFd => self.back_end = fd,
            Message::SetConfig { part, bytes, .. } => self.set_config(part, bytes)?,
            Message::SetInflightFd(told) => {
                let region = Region::take(&told, fd.ok_or(Refusal::Event)?)?;
                // What the guest chose outlives us there; nobody else remembers it.
                self.writeback &= !region.is_write_through();
                region.set_write_through(!self.writeback);
                self.rings.region = Some(region);
            }
            _ => {}
        }
        Ok(())
    }

    fn number(&mut self, queue: u32) -> Result<usize, Refusal> {
        self.vring(queue).map(|_| queue as usize)
    }

    fn vring(&mut self, queue: u32) -> Result<&mut rings::Vring, Refusal> {
        self.rings.vring(queue).ok_or(Refusal::QueueNumber(queue))
    }

    fn start_queue(&mut self, at: usize) -> Result<(), Refusal> {
        self.rings.start(at).map_err(|error| {
            self.rings.broken(at);
            Refusal::Queue(at as u32, error)
        })
    }

    /// A part of the configuration space, as it is answered.
    fn config(&self, part: ConfigPart) -> Vec<u8> {
        let mut space = [0; 2 * CONFIG_BYTES_MAX];
        let config = self.disk.config(QUEUE_COUNT_MAX, self.writeback);
        space[..CONFIG_BYTES].copy_from_slice(&config);
        let (offset, size) = (part.offset as usize, part.size as usize);
        let mut body = [part.offset.to_le_bytes(), part.size.to_le_bytes(), [0; 4]].concat();
        body.extend_from_slice(&space[offset..offset + size]);
        body
    }

    fn set_config(&mut self, part: ConfigPart, bytes: &[u8]) -> Result<(), Refusal> {
        let (WRITEBACK_AT, [value @ (0 | 1)]) = (part.offset, bytes) else {
            return Err(Refusal::Config);
        };
        self.writeback = *value == 1;
        if let Some(region) = &self.rings.region {
            region.set_write_through(!self.writeback);
        }
        Ok(())
    }

    /// A write is durable before its answer.
    fn writes_through(&self) -> bool {
        // A driver that knows of flushes has a write cache, unless it chose none.
        self.features & feature::FLUSH == 0 || !self.writeback
    }

    fn split<'a>(
        &'a mut self,
        shard: &'a mut Shard,
        pool: &'a mut Pool,
    ) -> (&'a mut Requests, Around<'a>) {
        let writes_through = self.writes_through();
        let around = Around {
            rings: &mut self.rings,
            disk: &self.disk,
            volume: self.volume,
            cookie: self.names.engine(),
            device: self.names.device,
            writes_through,
            shard,
            pool,
        };
        (&mut self.requests, around)
    }

    /// The engine has answered.
    pub(super) fn answered(
        &mut self,
        at: usize,
        answer: Answer,
        shard: &mut Shard,
        pool: &mut Pool,
    ) {
        let is_over = self.life == Life::Over;
        let (requests, mut around) = self.split(shard, pool);
        requests.answered(at, answer.result, &mut around, is_over);
    }

    /// Once in each turn of the loop.
    pub(super) fn turn(&mut self, shard: &mut Shard, pool: &mut Pool) {
        if self.is_resting && self.is_at_rest() && self.life == Life::Open {
            self.is_resting = false;
            self.receive(shard, pool);
        }
        self.take(shard, pool);
        if self.life == Life::Open && self.rings.listens() {
            self.tell_size();
        }
        if self.life != Life::Over {
            self.rings.signal();
        }
        if self.life != Life::Over && self.rings.is_lost() {
            self.end(Some(Refusal::Lost(Unreached::Lost)), shard, pool); // D6
        }
        if self.life == Life::Stopping && self.requests.is_empty() {
            self.end(None, shard, pool);
        }
    }

    fn take(&mut self, shard: &mut Shard, pool: &mut Pool) {
        let is_open = self.life == Life::Open && !self.is_resting;
        let count = if is_open { CHAIN_COUNT_MAX } else { 0 };
        if self.life == Life::Over {
            return;
        }
        let (requests, mut around) = self.split(shard, pool);
        let took = requests.run(&mut around, count);
        match took {
            Ok(took) if took == count && is_open => self.wake(shard),
            Ok(_) | Err((_, QueueError::Lost)) => {}
            Err((queue, error)) => {
                self.rings.broken(queue);
                self.tell(format!("queue {queue} is left alone: {error}"), true);
                self.wake(shard);
            }
        }
    }

    /// There is more to take: the next turn is to come at once. (D5)
    fn wake(&mut self, shard: &mut Shard) {
        if !self.is_waking {
            self.is_waking = true;
            shard.reactor.submit(ReactorOp::Nop, self.names.reactor(0, WAKE));
        }
    }

    /// Takes no more, and ends when all that was taken is given back.
    pub(super) fn stop(&mut self, shard: &mut Shard) {
        if self.life == Life::Open {
            self.life = Life::Stopping;
            self.leave_kicks(shard);
        }
    }

    fn end(&mut self, why: Option<Refusal>, shard: &mut Shard, pool: &mut Pool) {
        match why {
            Some(why) => self.tell(format!("the connection was ended: {why}"), true),
            None => self.tell("disconnected".into(), false),
        }
        self.life = Life::Over;
        self.is_resting = false;
        if self.is_listening {
            shard.reactor.cancel(self.names.reactor(0, SOCKET));
        }
        self.leave_kicks(shard);
        let (requests, mut around) = self.split(shard, pool);
        requests.give_up(&mut around); // D2
    }
}

const _: () = assert!(blk::CONFIG_BYTES <= CONFIG_BYTES_MAX);
const _: () = assert!(requests::REQUEST_COUNT_MAX <= 1 << 16);
const _: () = assert!(QUEUE_COUNT_MAX <= 1 << 8);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shards::shard;
    use crate::vhost::wire::{Inflight, VringAddr};
    use forebay::io::ReactorKind;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::Ordering;

    /// QEMU reads the size when it is started, not when it connects again, and hears of another only while the queues run: a guest
    /// whose disk grew meanwhile never had it.
    #[test]
    fn a_size_that_the_front_end_has_not_read_is_told_once() {
        let (front, ours) = UnixStream::pair().expect("a pair of sockets");
        let (mut heard, back_end) = UnixStream::pair().expect("a pair of sockets");
        heard.set_nonblocking(true).expect("it is a socket");
        let mut told = || {
            let mut message = [0; wire::HEADER_BYTES];
            let is_told = heard.read_exact(&mut message).is_ok();
            assert!(!is_told || message == [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
            is_told
        };
        let names = Names { place: Place(0), device: 0 };
        let disk = Disk::new("v", 1 << 20, 512);
        let channel = Channel::new(ours.into());
        let mut device = Device::new(channel, names, disk, VolumeIndex(0));
        device.set(Message::SetBackendReqFd, vec![back_end.into()]).expect("taken");
        // It connected again.
        device.tell_size();
        assert!(told());
        device.resize(1 << 20);
        device.tell_size();
        assert!(!told() && device.news.is_empty());
        device.resize((2 << 20) + 100);
        assert!(!device.rings.listens() && !told(), "its queues do not run");
        device.tell_size();
        assert!(told() && device.news.len() == 1);
        let config = device.config(ConfigPart { offset: 0, size: 8 });
        assert_eq!(config[12..], 4096u64.to_le_bytes());
        // It reads the size by itself.
        device.resize(3 << 20);
        let part = ConfigPart { offset: 0, size: 60 };
        device.obey(24, Message::GetConfig(part), Vec::new()).expect("there is an answer");
        device.tell_size();
        assert!(!told());
        drop(front);
    }

    const USED: u64 = 0x3000;

    /// A device whose guest has one queue that runs, as a front end says it.
    fn with_queue() -> (UnixStream, Device) {
        let (front, ours) = UnixStream::pair().expect("a pair of sockets");
        let names = Names { place: Place(0), device: 0 };
        let disk = Disk::new("v", 1 << 20, 512);
        let mut device = Device::new(Channel::new(ours.into()), names, disk, VolumeIndex(0));
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, 0x4000).expect("room");
        let mut regions = [wire::Region::default(); wire::FD_COUNT_MAX];
        regions[0].size = 0x4000;
        let table = Message::SetMemTable { regions, count: 1 };
        device.set(table, vec![file]).expect("mapped");
        add_queue(&mut device, 0).expect("it runs");
        (front, device)
    }

    fn add_queue(device: &mut Device, queue: u32) -> Result<(), Refusal> {
        device.set(Message::SetVringNum { queue, size: 8 }, Vec::new())?;
        let addresses =
            VringAddr { queue, flags: 0, descriptors: 0x1000, available: 0x2000, used: USED };
        device.set(Message::SetVringAddr(addresses), Vec::new())?;
        let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let message = Message::SetVringKick { queue: queue as u8, has_fd: true };
        device.set(message, vec![kick])
    }

    /// D2: the end of a connection and a kick may come in one turn, and the guest's memory may be another daemon's by then.
    #[test]
    fn a_kick_behind_the_end_touches_nothing() {
        for life in [Life::Open, Life::Over] {
            let (_front, mut device) = with_queue();
            let (mut shard, _) = shard(ReactorKind::Threads, 1 << 20);
            device.life = life;
            // The reactor has answered the poll of before.
            device.rings.vrings[0].is_polled = true;
            device.kicked(0, 1, &mut shard);
            let memory = device.rings.memory.as_ref().expect("mapped");
            let wants_no_kicks = memory.load::<u16>(USED, Ordering::Relaxed).expect("inside") == 1;
            assert_eq!(wants_no_kicks, life == Life::Open);
            assert_eq!(device.is_at_rest(), life == Life::Over);
        }
    }

    /// It was told to have a size of no power of two, which it had.
    #[test]
    fn a_queue_that_the_region_has_no_room_for_is_told_so() {
        let (_front, mut device) = with_queue();
        let wanted = Inflight { queue_count: 1, queue_size: 8, ..Inflight::default() };
        let (told, file) = Region::make(&wanted).expect("a region");
        device.set(Message::SetInflightFd(told), vec![file]).expect("ours");
        let refused = add_queue(&mut device, 1).expect_err("it is one more");
        let text = "queue 1: the region for what is in flight has no room for it with 8 entries";
        assert_eq!(refused.to_string(), text);
    }
}
