// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine is brought to rest, leaves for the next program, and is set going there (C1–C4 of `carried.rs`).

use super::{Device, Life, Names, SOCKET};
use crate::carried::{CarriedError, Record};
use crate::frontend::Place;
use crate::vhost::blk::{Disk, feature};
use crate::vhost::carried::Carried;
use crate::vhost::channel::Channel;
use crate::vhost::inflight::{QUEUE_COUNT_MAX, Region};
use crate::vhost::memory::Memory as Guest;
use crate::vhost::rings::Rings;
use forebay::shard::Shard;
use forebay_core::units::VolumeIndex;
use std::io;
use std::os::fd::OwnedFd;

impl Device {
    /// Brings it to rest: it hears nothing and takes no chain, and those that were taken are given back. Called in each turn
    /// until it is at rest, since a cancellation may come too early.
    pub(in crate::vhost) fn leave(&mut self, shard: &mut Shard) {
        if self.life == Life::Open {
            self.life = Life::Leaving;
        }
        if self.life == Life::Leaving {
            if self.is_listening {
                shard.reactor.cancel(self.names.reactor(0, SOCKET));
            }
            self.leave_kicks(shard);
        }
    }

    /// Nothing of it is with the engine or the reactor, nor will be (C1).
    pub(in crate::vhost) fn rests(&self) -> bool {
        let is_quiet = !self.is_listening && !self.is_waking;
        self.life == Life::Leaving && is_quiet && self.is_at_rest()
    }

    /// Its descriptors, and what else there is of it.
    pub(in crate::vhost) fn into_carried(
        mut self,
        volume: [u8; 16],
        socket: &str,
    ) -> io::Result<(Vec<OwnedFd>, Carried)> {
        assert!(self.rests()); // C1
        let (connection, message, its) = self.channel.into_parts();
        let mut descriptors = vec![connection];
        let has_back_end = self.back_end.is_some();
        descriptors.extend(self.back_end);
        let memory = match &self.rings.memory {
            Some(memory) => {
                let (table, files) = memory.table()?;
                descriptors.extend(files);
                Some(table)
            }
            None => None,
        };
        let region = match &self.rings.region {
            Some(region) => {
                let (told, file) = region.told()?;
                descriptors.push(file);
                Some(told)
            }
            None => None,
        };
        let rings = self.rings.leave(&mut descriptors);
        let message_fds = its.len();
        descriptors.extend(its);
        let carried = Carried {
            volume,
            socket: socket.to_owned(),
            config: self.disk.config(QUEUE_COUNT_MAX, self.writeback),
            name: self.disk.name,
            features: self.features,
            protocol: self.protocol,
            writeback: self.writeback,
            has_back_end,
            memory,
            region,
            counter: self.rings.counter,
            rings,
            message,
            message_fds,
        };
        Ok((descriptors, carried))
    }

    /// One that the program before has left.
    pub(in crate::vhost) fn of_carried(
        descriptors: Vec<OwnedFd>,
        names: Names,
        (served, volume): (&Disk, VolumeIndex),
        carried: &Carried,
    ) -> Result<Device, CarriedError> {
        let disk = carried.disk(served)?; // C3
        let mut rest = descriptors.into_iter();
        let mut next = || rest.next().ok_or(CarriedError::Descriptors);
        let socket = next()?;
        let back_end = if carried.has_back_end { Some(next()?) } else { None };
        let mut rings = Rings::default();
        rings.event_idx = carried.features & feature::EVENT_IDX != 0;
        rings.counter = carried.counter;
        if let Some(table) = &carried.memory {
            let files = table.iter().map(|_| next()).collect::<Result<_, _>>()?;
            rings.memory = Some(Guest::map(table, files).map_err(io::Error::other)?);
        }
        if let Some(told) = &carried.region {
            rings.region = Some(Region::take(told, next()?).map_err(io::Error::other)?);
        }
        rings.go_on(&carried.rings, &mut next)?;
        let its = (0..carried.message_fds).map(|_| next()).collect::<Result<_, _>>()?;
        let channel = Channel::of_parts(socket, &carried.message, its);
        let channel = channel.ok_or(CarriedError::Field("message"))?;
        let mut device = Device::new(channel, names, disk, volume);
        device.features = carried.features;
        device.protocol = carried.protocol;
        device.writeback = carried.writeback;
        device.rings = rings;
        device.back_end = back_end;
        Ok(device)
    }
}

/// For fuzzing: taken, and left again at once.
pub(in crate::vhost) fn taken_and_left(
    descriptors: Vec<OwnedFd>,
    served: &Disk,
    carried: &Carried,
) -> Result<Carried, CarriedError> {
    let names = Names { place: Place(0), device: 0 };
    let mut device = Device::of_carried(descriptors, names, (served, VolumeIndex(0)), carried)?;
    device.life = Life::Leaving;
    let (descriptors, again) = device.into_carried(carried.volume, &carried.socket)?;
    assert_eq!(descriptors.len(), again.descriptor_count());
    Ok(again)
}

#[cfg(test)]
mod tests;
