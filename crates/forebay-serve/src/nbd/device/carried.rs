// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The connections of a kernel NBD device on their way to the next program that this process executes (D5).
//!
//! # As bytes
//!
//! `crate::carried` has the file. A record is a device: how many connections it has (4 bytes), then each as
//! [`crate::nbd::carried`] puts it down, behind its length. A descriptor for each, in that order: its socket.
//!
//! # Not here
//!
//! When that may be: [`super::front_end`].

use super::CONNECTION_COUNT_MAX;
use crate::bytes::Reader;
use crate::carried::{CarriedError, Handed, Record, put};
use crate::nbd::carried::Carried;

/// A device's connections, all of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarriedDevice(Vec<Carried>);

impl CarriedDevice {
    /// Of all connections that a device has.
    pub(super) fn new(connections: Vec<Carried>) -> Option<CarriedDevice> {
        let volume = connections.first()?.volume;
        let is_one = connections.iter().all(|it| it.volume == volume);
        let is_good = is_one && connections.len() <= CONNECTION_COUNT_MAX;
        is_good.then_some(CarriedDevice(connections))
    }

    /// What the volume is known by for ever.
    pub(super) fn volume(&self) -> [u8; 16] {
        self.0[0].volume
    }

    pub(super) fn connections(&self) -> &[Carried] {
        &self.0
    }
}

impl Record for CarriedDevice {
    const KIND: &'static str = "kernel NBD device";
    /// `FBNBDDEV`.
    const MAGIC: u64 = 0x4642_4e42_4444_4556;
    /// Its own, and that of what is in it.
    const VERSION: u32 = 1 << 16 | Carried::VERSION;
    const BYTES_MAX: usize = 4 + CONNECTION_COUNT_MAX * (4 + Carried::BYTES_MAX);

    /// Their sockets.
    fn descriptor_count(&self) -> usize {
        self.0.len()
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = (self.0.len() as u32).to_be_bytes().to_vec();
        self.0.iter().for_each(|it| put(&mut out, &it.encode()));
        out
    }

    fn decode(bytes: &[u8]) -> Result<CarriedDevice, CarriedError> {
        let mut reader = Reader::new(bytes);
        let count = reader.u32().ok_or(CarriedError::Cut)? as usize;
        if !(1..=CONNECTION_COUNT_MAX).contains(&count) {
            return Err(CarriedError::Field("number of connections"));
        }
        let mut connection = || Carried::decode(reader.string().ok_or(CarriedError::Cut)?);
        let connections = (0..count).map(|_| connection()).collect::<Result<_, _>>()?;
        if !reader.rest().is_empty() {
            return Err(CarriedError::Cut);
        }
        CarriedDevice::new(connections).ok_or(CarriedError::Field("volume"))
    }
}

/// The volumes whose devices come with their connections.
#[derive(Debug, PartialEq, Eq)]
pub enum Expected {
    /// These, by what they are known by for ever.
    These(Vec<[u8; 16]>),
    /// What comes cannot be read. Whose connections these are that stand nobody can tell; when they are closed all are taken over.
    Any,
}

impl Expected {
    /// What was left.
    pub fn of(left: &Handed) -> Expected {
        let mut volumes = Vec::new();
        let look = left.look(|device: CarriedDevice| volumes.push(device.volume()));
        look.map_or(Expected::Any, |()| Expected::These(volumes))
    }

    pub(super) fn has(&self, volume: [u8; 16]) -> bool {
        match self {
            Expected::These(volumes) => volumes.contains(&volume),
            Expected::Any => true,
        }
    }
}

impl Default for Expected {
    fn default() -> Expected {
        Expected::These(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carried::file_header;
    use crate::carried::rules::{
        has_no_byte_that_may_be_another_or_missing, is_taken_as_it_was_put_down,
    };
    use crate::nbd::connection::carry::tests::fresh;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::unix::fs::FileExt;

    fn of(volume: u8, inputs: &[&[u8]]) -> CarriedDevice {
        let connection =
            |input: &&[u8]| Carried { volume: [volume; 16], input: input.to_vec(), ..fresh() };
        CarriedDevice::new(inputs.iter().map(connection).collect()).unwrap()
    }

    #[test]
    fn what_is_put_down_is_what_is_taken() {
        is_taken_as_it_was_put_down(&of(7, &[b"half of a request"]));
        is_taken_as_it_was_put_down(&of(7, &[b"a", b"", b"bc", b"d"]));
        has_no_byte_that_may_be_another_or_missing(&of(7, &[b"a", b""]));
    }

    #[test]
    fn none_more_than_there_can_be_and_those_of_another_volume_are_refused() {
        let refused = |connections: &[Carried]| {
            let bytes = CarriedDevice(connections.to_vec()).encode();
            CarriedDevice::decode(&bytes).unwrap_err().to_string()
        };
        let number = "what was left of it holds no possible number of connections";
        assert_eq!(refused(&[]), number);
        assert_eq!(refused(&vec![fresh(); CONNECTION_COUNT_MAX + 1]), number);
        let other = Carried { volume: [8; 16], ..fresh() };
        let text = "what was left of it holds no possible volume";
        assert_eq!(refused(&[fresh(), other]), text);
    }

    /// What cannot be read was taken for nothing. But it stands, so that each device was tried to be taken over in vain for 10 s, one after
    /// the other, before any guest was served.
    #[test]
    fn the_volumes_are_known_beforehand_or_it_may_be_any() {
        let handed = || {
            let mut handed = Handed::new(&file_header::<CarriedDevice>()).unwrap();
            for volume in [3, 1] {
                let sockets = (0..2).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
                handed.add(sockets, &of(volume, &[b"a", b"b"])).unwrap();
            }
            handed
        };
        assert_eq!(Expected::of(&handed()), Expected::These(vec![[3; 16], [1; 16]]));
        let end = handed().message.metadata().unwrap().len();
        // The version, the first record, the last byte.
        for at in [11, 40, end - 1] {
            let spoilt = handed();
            spoilt.message.write_all_at(&[0xEE], at).unwrap();
            assert_eq!(Expected::of(&spoilt), Expected::Any, "{at}");
        }
        assert!(Expected::Any.has([9; 16]) && !Expected::default().has([9; 16]));
    }
}
