// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine's connection on its way to the next program that this process executes: what there is of it beside its
//! descriptors, as bytes.
//!
//! # Invariants
//!
//! - **C1** Only what is at rest is carried (`Device::rests`): nothing of it is with the engine or with the reactor. So each
//!   chain is in one place. It was given back: the used ring has it, and the region does not note it any more. Or it was not
//!   taken: the available ring has it, at `next_available` or behind. Or an earlier daemon had it in flight and this one has
//!   not begun it: the region notes it, and it is in `left`. A message of which only a part came, or which waits for rest
//!   (D1 of `device.rs`), is in `message`. A kick that comes meanwhile stays in its eventfd.
//! - **C2** One program at a time has a connection: whoever hands it over touches neither its socket nor the guest's memory
//!   again, and whoever takes it does so when nothing brings back the program before (G6 of the program's `upgrade.rs`).
//! - **C3** A machine goes on exactly as it and its guest's driver were told, or the connection ends: the configuration space
//!   is the same, byte for byte, and what was agreed on is offered still. A volume that has grown meanwhile grows afterwards, as any.
//! - **C4** The bytes are believed nothing: a checksum, a bound before memory is taken for anything; then descriptors,
//!   memory, queues and region are judged as if the front end had just said them.
//!
//! # As bytes
//!
//! `crate::carried` has the file. A record is what [`Record::encode`] puts down. Its descriptors, so far as there are such:
//! the socket, the back end's own socket, the files of the memory, the region's, then for each queue kick, call and error,
//! and in the end those that came with `message`.
//!
//! # Crash
//!
//! As at any time: the machine's process sees the connection end and connects again; the region notes what is in flight
//! (I1 of `inflight.rs`), which is no more than `left`.
//!
//! # Not here
//!
//! Bringing a machine to rest and setting one going: `device/carry.rs`. The file, and the descriptors: `crate::carried`.

use super::blk::{CONFIG_BYTES, Disk, SECTOR, feature};
use super::inflight::QUEUE_COUNT_MAX;
use super::queue::{Rings as Places, SIZE_MAX};
use super::wire::{
    BODY_BYTES_MAX, FD_COUNT_MAX, HEADER_BYTES, Inflight, Region, VringAddr, protocol,
};
use crate::bytes::Reader;
use crate::carried::{CarriedError, Record, put};

/// A path or a name is not longer.
const TEXT_BYTES_MAX: usize = 4096;

/// Bits of the number that says what there is of a machine,
mod state {
    pub(super) const WRITEBACK: u16 = 1 << 0;
    pub(super) const BACK_END: u16 = 1 << 1;
    pub(super) const MEMORY: u16 = 1 << 2;
    pub(super) const REGION: u16 = 1 << 3;
    pub(super) const ALL: u16 = (1 << 4) - 1;
}

/// and of one of its queues.
mod queue_state {
    pub(super) const ENABLED: u16 = 1 << 0;
    pub(super) const BROKEN: u16 = 1 << 1;
    pub(super) const KICK: u16 = 1 << 2;
    pub(super) const CALL: u16 = 1 << 3;
    pub(super) const ERROR: u16 = 1 << 4;
    pub(super) const ADDRESSES: u16 = 1 << 5;
    pub(super) const RUNNING: u16 = 1 << 6;
    pub(super) const EVENT_IDX: u16 = 1 << 7;
    pub(super) const ALL: u16 = (1 << 8) - 1;
}

/// A queue that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Where its rings are: as it was started, whatever was said of them since.
    pub places: Places,
    /// So was this.
    pub event_idx: bool,
    /// What is taken next.
    pub next_available: u16,
    /// What is used next.
    pub next_used: u16,
    /// Heads that an earlier daemon had in flight and that are to be begun, oldest first.
    pub left: Vec<u16>,
}

/// All that is known of one queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// Descriptors, for its next start.
    pub size: u16,
    /// Where that begins.
    pub base: u16,
    /// Where its rings are then.
    pub addresses: Option<VringAddr>,
    /// It may be taken from.
    pub is_enabled: bool,
    /// It is left alone.
    pub is_broken: bool,
    /// How its guest wakes us.
    pub has_kick: bool,
    /// How it is interrupted.
    pub has_call: bool,
    /// How it is told that it is broken.
    pub has_error: bool,
    /// If it runs.
    pub running: Option<Running>,
}

/// A machine at rest (C1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The volume's lasting name.
    pub volume: [u8; 16],
    /// Where it came in.
    pub socket: String,
    /// What the guest was told: the disk's name,
    pub name: String,
    /// and its configuration space.
    pub config: [u8; CONFIG_BYTES],
    /// What was agreed on: of virtio,
    pub features: u64,
    /// and of the protocol.
    pub protocol: u64,
    /// The guest has a write cache.
    pub writeback: bool,
    /// There is a back end's own socket.
    pub has_back_end: bool,
    /// The guest's memory, if it is known.
    pub memory: Option<Vec<Region>>,
    /// The region for what is in flight.
    pub region: Option<Inflight>,
    /// Counts what was taken.
    pub counter: u64,
    /// Its queues.
    pub rings: Vec<Ring>,
    /// Received of a message that is not obeyed yet.
    pub message: Vec<u8>,
    /// Descriptors that came with it.
    pub message_fds: usize,
}

impl Record for Carried {
    const KIND: &'static str = "virtual machine";
    /// `FBVHOSTM`.
    const MAGIC: u64 = 0x4642_5648_4f53_544d;
    const VERSION: u32 = 1;
    /// Queues with all that may be left of each, and what else there is.
    const BYTES_MAX: usize = QUEUE_COUNT_MAX as usize * (256 + 2 * SIZE_MAX as usize) + (64 << 10);

    fn descriptor_count(&self) -> usize {
        let events = self.rings.iter().flat_map(|it| [it.has_kick, it.has_call, it.has_error]);
        let single = [true, self.has_back_end, self.region.is_some()];
        let flags = single.into_iter().chain(events).filter(|is_there| *is_there).count();
        flags + self.memory.as_ref().map_or(0, Vec::len) + self.message_fds
    }

    fn encode(&self) -> Vec<u8> {
        let state = [
            (self.writeback, state::WRITEBACK),
            (self.has_back_end, state::BACK_END),
            (self.memory.is_some(), state::MEMORY),
            (self.region.is_some(), state::REGION),
        ];
        let mut out = self.volume.to_vec();
        put(&mut out, self.socket.as_bytes());
        put(&mut out, self.name.as_bytes());
        out.extend(self.config);
        out.extend(self.features.to_be_bytes());
        out.extend(self.protocol.to_be_bytes());
        out.extend(bits(&state).to_be_bytes());
        out.extend(self.counter.to_be_bytes());
        if let Some(memory) = &self.memory {
            out.extend((memory.len() as u16).to_be_bytes());
            let numbers = memory.iter().flat_map(|it| [it.guest, it.size, it.user, it.offset]);
            out.extend(numbers.flat_map(u64::to_be_bytes));
        }
        if let Some(region) = &self.region {
            out.extend([region.size, region.offset].iter().flat_map(|it| it.to_be_bytes()));
            let counts = [region.queue_count, region.queue_size];
            out.extend(counts.iter().flat_map(|it| it.to_be_bytes()));
        }
        out.extend((self.rings.len() as u16).to_be_bytes());
        self.rings.iter().for_each(|ring| ring.encode(&mut out));
        put(&mut out, &self.message);
        out.extend((self.message_fds as u16).to_be_bytes());
        out
    }

    /// C4.
    fn decode(bytes: &[u8]) -> Result<Carried, CarriedError> {
        let mut reader = Reader::new(bytes);
        let volume = reader.bytes(16).ok_or(CarriedError::Cut)?;
        let (socket, name) = (text(&mut reader)?, text(&mut reader)?);
        let config = reader.bytes(CONFIG_BYTES).ok_or(CarriedError::Cut)?;
        let [features, protocol] = numbers(&mut reader)?;
        let state = reader.u16().ok_or(CarriedError::Cut)?;
        if state & !state::ALL != 0 {
            return Err(CarriedError::Field("state"));
        }
        let is = |bit: u16| state & bit != 0;
        let [counter] = numbers(&mut reader)?;
        let memory = if is(state::MEMORY) { Some(memory(&mut reader)?) } else { None };
        let region = if is(state::REGION) { Some(region(&mut reader)?) } else { None };
        let count = reader.u16().ok_or(CarriedError::Cut)?;
        if count > QUEUE_COUNT_MAX {
            return Err(CarriedError::Field("number of queues"));
        }
        let rings = (0..u32::from(count)).map(|queue| Ring::decode(queue, &mut reader));
        let rings = rings.collect::<Result<_, _>>()?;
        let message = reader.string().ok_or(CarriedError::Cut)?;
        let message_fds = usize::from(reader.u16().ok_or(CarriedError::Cut)?);
        if message.len() > HEADER_BYTES + BODY_BYTES_MAX || message_fds > FD_COUNT_MAX {
            return Err(CarriedError::Field("message"));
        }
        let carried = Carried {
            volume: volume.try_into().map_err(|_| CarriedError::Cut)?,
            socket,
            name,
            config: config.try_into().map_err(|_| CarriedError::Cut)?,
            features,
            protocol,
            writeback: is(state::WRITEBACK),
            has_back_end: is(state::BACK_END),
            memory,
            region,
            counter,
            rings,
            message: message.to_vec(),
            message_fds,
        };
        if reader.rest().is_empty() { Ok(carried) } else { Err(CarriedError::Cut) }
    }
}

impl Carried {
    /// The disk as the guest was told, if what is served now can be that (C3).
    pub(super) fn disk(&self, served: &Disk) -> Result<Disk, CarriedError> {
        let sectors = self.config.first_chunk().map_or(0, |it| u64::from_le_bytes(*it));
        let size_bytes = sectors.checked_mul(SECTOR).ok_or(CarriedError::Field("size"))?;
        if self.name != served.name {
            return Err(CarriedError::Served("the volume has another name now"));
        }
        if size_bytes > served.size_bytes {
            return Err(CarriedError::Served("the volume is smaller now"));
        }
        let disk = Disk::new(&self.name, size_bytes, served.logical_block);
        if disk.config(QUEUE_COUNT_MAX, self.writeback) != self.config {
            return Err(CarriedError::Served("its guest was told of another disk"));
        }
        if self.features & !feature::ALL != 0 || self.protocol & !protocol::ALL != 0 {
            return Err(CarriedError::Served("what was agreed on is not offered now"));
        }
        Ok(disk)
    }
}

impl Ring {
    fn encode(&self, out: &mut Vec<u8>) {
        let has_event_idx = self.running.as_ref().is_some_and(|it| it.event_idx);
        let state = [
            (self.is_enabled, queue_state::ENABLED),
            (self.is_broken, queue_state::BROKEN),
            (self.has_kick, queue_state::KICK),
            (self.has_call, queue_state::CALL),
            (self.has_error, queue_state::ERROR),
            (self.addresses.is_some(), queue_state::ADDRESSES),
            (self.running.is_some(), queue_state::RUNNING),
            (has_event_idx, queue_state::EVENT_IDX),
        ];
        out.extend([bits(&state), self.size, self.base].iter().flat_map(|it| it.to_be_bytes()));
        if let Some(it) = &self.addresses {
            out.extend(it.flags.to_be_bytes());
            let places = [it.descriptors, it.used, it.available];
            out.extend(places.iter().flat_map(|it| it.to_be_bytes()));
        }
        if let Some(Running { places: it, next_available, next_used, left, .. }) = &self.running {
            let places = [it.descriptors, it.available, it.used];
            out.extend(places.iter().flat_map(|it| it.to_be_bytes()));
            let counts = [it.size, *next_available, *next_used, left.len() as u16];
            out.extend(counts.iter().chain(left).flat_map(|it| it.to_be_bytes()));
        }
    }

    fn decode(queue: u32, reader: &mut Reader<'_>) -> Result<Ring, CarriedError> {
        let [state, size, base] = short_numbers(reader)?;
        let is = |bit: u16| state & bit != 0;
        let is_size = size == 0 || size.is_power_of_two() && size <= SIZE_MAX;
        // K3 of `rings.rs`.
        let may_run = is(queue_state::KICK) && is(queue_state::ADDRESSES);
        let is_sound = state & !queue_state::ALL == 0
            && (may_run || !is(queue_state::RUNNING))
            && (is(queue_state::RUNNING) || !is(queue_state::EVENT_IDX));
        if !is_size || !is_sound {
            return Err(CarriedError::Field("queue"));
        }
        let mut ring = Ring {
            size,
            base,
            addresses: None,
            is_enabled: is(queue_state::ENABLED),
            is_broken: is(queue_state::BROKEN),
            has_kick: is(queue_state::KICK),
            has_call: is(queue_state::CALL),
            has_error: is(queue_state::ERROR),
            running: None,
        };
        if is(queue_state::ADDRESSES) {
            let flags = reader.u32().ok_or(CarriedError::Cut)?;
            let [descriptors, used, available] = numbers(reader)?;
            ring.addresses = Some(VringAddr { queue, flags, descriptors, used, available });
        }
        if is(queue_state::RUNNING) {
            let [descriptors, available, used] = numbers(reader)?;
            let [size, next_available, next_used, count] = short_numbers(reader)?;
            if count > size {
                return Err(CarriedError::Field("queue"));
            }
            let left = (0..count).map(|_| reader.u16().ok_or(CarriedError::Cut));
            ring.running = Some(Running {
                places: Places { size, descriptors, available, used },
                event_idx: is(queue_state::EVENT_IDX),
                next_available,
                next_used,
                left: left.collect::<Result<_, _>>()?,
            });
        }
        Ok(ring)
    }
}

fn bits(all: &[(bool, u16)]) -> u16 {
    all.iter().filter(|(is, _)| *is).fold(0, |bits, (_, bit)| bits | bit)
}

fn text(reader: &mut Reader<'_>) -> Result<String, CarriedError> {
    let bytes = reader.string().ok_or(CarriedError::Cut)?;
    let text = String::from_utf8(bytes.to_vec()).ok();
    text.filter(|text| text.len() <= TEXT_BYTES_MAX).ok_or(CarriedError::Field("name"))
}

fn numbers<const N: usize>(reader: &mut Reader<'_>) -> Result<[u64; N], CarriedError> {
    let mut all = [0; N];
    for number in &mut all {
        *number = reader.u64().ok_or(CarriedError::Cut)?;
    }
    Ok(all)
}

fn short_numbers<const N: usize>(reader: &mut Reader<'_>) -> Result<[u16; N], CarriedError> {
    let mut all = [0; N];
    for number in &mut all {
        *number = reader.u16().ok_or(CarriedError::Cut)?;
    }
    Ok(all)
}

fn memory(reader: &mut Reader<'_>) -> Result<Vec<Region>, CarriedError> {
    let count = reader.u16().ok_or(CarriedError::Cut)?;
    if usize::from(count) > FD_COUNT_MAX {
        return Err(CarriedError::Field("memory"));
    }
    let region = |_| {
        let [guest, size, user, offset] = numbers(reader)?;
        Ok(Region { guest, size, user, offset })
    };
    (0..count).map(region).collect()
}

fn region(reader: &mut Reader<'_>) -> Result<Inflight, CarriedError> {
    let [size, offset] = numbers(reader)?;
    let [queue_count, queue_size] = short_numbers(reader)?;
    Ok(Inflight { size, offset, queue_count, queue_size })
}

#[cfg(test)]
mod tests;
