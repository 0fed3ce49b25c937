// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's netlink family: connecting, taking over and disconnecting devices; and what sysfs
//! says of them.
//!
//! Commands may block (K1 in [`crate::attach`]).

use super::wire::{self, Attributes, Message};
use super::{CONNECTION_COUNT_MAX, DEAD_CONNECTION, LOOK_MS, LOOK_SEVERAL_MS, REQUEST_KIB_MAX};
use crate::attach::Geometry;
use crate::native::{u16_at, u32_at};
use rustix::io::Errno;
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Where the kernel says what devices there are.
pub(super) const DEVICES: &str = "/sys/block";
const SECTOR_BYTES: u64 = 512;
/// Datagrams of an answer; there are two.
const DATAGRAM_COUNT_MAX: usize = 64;

/// Why a device cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NbdDeviceError {
    /// There is no driver.
    #[error("the kernel has no driver `nbd` loaded; `modprobe nbd` adds it")]
    NoDriver,
    /// The driver does not keep whose a device is.
    #[error(
        "the kernel's driver `nbd` cannot tell whose a device is, so none could be taken over or ended; \
         Linux 5.14 can"
    )]
    Old,
    /// Generic netlink cannot be used.
    #[error("the kernel's netlink cannot be {attempted}")]
    Netlink {
        /// `opened`, `asked` …
        attempted: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A command was refused.
    #[error("{device}: cannot be {attempted}")]
    Command {
        /// `/dev/nbd3`, or what there is no device of yet.
        device: String,
        /// `connected`, `taken over` …
        attempted: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Sysfs does not say whose it is.
    #[error("{device}: cannot be recognised by /sys/block; is sysfs mounted at /sys?")]
    Nameless {
        /// `/dev/nbd3`.
        device: String,
    },
    /// Its connection stands.
    #[error("{device}: is still served by another process; stop that one first")]
    Served {
        /// `/dev/nbd3`.
        device: String,
    },
    /// It is of the same volume, yet not alike.
    #[error(
        "{device}: was made for {found}, the volume has {expected}; \
         close it and run `nbd-client -d {device}`, and the next start makes it new"
    )]
    Differs {
        /// `/dev/nbd3`.
        device: String,
        /// What it is.
        found: Geometry,
        /// What the volume asks for.
        expected: Geometry,
    },
}

/// What a device is made for.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// The volume, in the words of D1.
    pub(super) volume: String,
    /// Connections that it is made with; one that there is has as many as it was made with.
    pub(super) connections: usize,
    pub(super) geometry: Geometry,
    /// What it can do, as in a handshake.
    pub(super) flags: u16,
}

impl Shape {
    /// As the kernel keeps it with the device (D1). One connection is not named.
    pub(super) fn identifier(&self, connections: usize) -> String {
        match connections {
            1 => self.volume.clone(),
            several => format!("{}/{several}", self.volume),
        }
    }
}

/// With how many connections the device that has this identifier was made, if it is one of the volume.
fn connections_of(volume: &str, identifier: &str) -> Option<usize> {
    let rest = identifier.strip_prefix(volume)?;
    match rest.strip_prefix('/') {
        Some(count) => count.parse().ok().filter(|it| (2..=CONNECTION_COUNT_MAX).contains(it)),
        None => rest.is_empty().then_some(1),
    }
}

/// `/dev/nbd3`.
pub(super) fn path_of(number: u32) -> PathBuf {
    format!("/dev/nbd{number}").into()
}

/// The 3 of `/dev/nbd3`.
pub(super) fn number_of(device: &Path) -> Option<u32> {
    device.to_str()?.strip_prefix("/dev/nbd")?.parse().ok()
}

/// What is there, or what is not.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(it) => Ok(Some(it)),
        // A device that goes has its files for a moment still.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

fn differs(device: PathBuf, found: Geometry, expected: Geometry) -> Result<(), NbdDeviceError> {
    if found.may_serve(expected) {
        return Ok(());
    }
    let device = device.display().to_string();
    Err(NbdDeviceError::Differs { device, found, expected })
}

fn attribute_path(devices: &Path, number: u32, name: &str) -> PathBuf {
    devices.join(format!("nbd{number}/{name}"))
}

fn attribute(devices: &Path, number: u32, name: &str) -> io::Result<Option<String>> {
    let text = if_there(fs::read_to_string(attribute_path(devices, number, name)))?;
    Ok(text.map(|text| text.trim_end().to_owned()))
}

/// The device that was made for a volume. What cannot be read now is no sign that there is none.
pub(super) fn find_in(devices: &Path, volume: &str) -> Result<Option<u32>, NbdDeviceError> {
    let unread = |source| {
        let device = devices.display().to_string();
        NbdDeviceError::Command { device, attempted: "read", source }
    };
    for entry in if_there(fs::read_dir(devices)).map_err(unread)?.into_iter().flatten() {
        let name = entry.map_err(unread)?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("nbd")?.parse().ok());
        let Some(number) = number else { continue };
        let identifier = attribute(devices, number, "backend").map_err(unread)?;
        if identifier.is_some_and(|it| connections_of(volume, &it).is_some()) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// The driver's netlink family, and where it says what there is.
pub struct Control {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
    /// `/sys/block`.
    pub(super) devices: PathBuf,
}

impl Control {
    /// Opens netlink and looks for the driver.
    pub fn open() -> Result<Control, NbdDeviceError> {
        let failed = |attempted| {
            move |source: Errno| NbdDeviceError::Netlink { attempted, source: source.into() }
        };
        let (domain, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = socket_with(domain, kind, SocketFlags::CLOEXEC, Some(GENERIC))
            .map_err(failed("opened"))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0)).map_err(failed("opened"))?;
        Control::on(socket)
    }

    /// Looks for the driver, and whether it knows all that a device is given (D1).
    pub(super) fn on(socket: OwnedFd) -> Result<Control, NbdDeviceError> {
        let (family, devices) = (wire::CONTROL, PathBuf::from(DEVICES));
        let mut control = Control { socket, family, sequence: 0, devices };
        let mut family = |wanted| {
            let name = Attributes::default().text(wire::FAMILY_NAME, "nbd");
            match control.ask(wire::GET_FAMILY, name, wanted) {
                Err(Errno::NOENT) => Err(NbdDeviceError::NoDriver),
                other => other.map_err(|source| NbdDeviceError::Netlink {
                    attempted: "asked",
                    source: source.into(),
                }),
            }
        };
        let id = family(wire::FAMILY_ID)?.ok_or(NbdDeviceError::NoDriver)?;
        let known = family(wire::FAMILY_ATTRIBUTE_MAX)?.and_then(|bytes| u32_at(&bytes, 0));
        if known.unwrap_or(0) < u32::from(wire::BACKEND_IDENTIFIER) {
            return Err(NbdDeviceError::Old);
        }
        control.family = u16_at(&id, 0).unwrap_or(0);
        Ok(control)
    }

    fn attribute(&self, number: u32, name: &str) -> io::Result<Option<String>> {
        attribute(&self.devices, number, name)
    }

    /// If a device is connected and was made for a volume: by how many connections.
    pub(super) fn connections_of(&self, number: u32, shape: &Shape) -> Option<usize> {
        connections_of(&shape.volume, &self.attribute(number, "backend").ok()??)
    }

    /// The device that was made for a volume.
    pub(super) fn find(&self, shape: &Shape) -> Result<Option<u32>, NbdDeviceError> {
        find_in(&self.devices, &shape.volume)
    }

    /// A device that is taken over stays as it was made, or grows with its volume. Says whether it is to grow.
    pub(super) fn check_alike(&self, number: u32, shape: &Shape) -> Result<bool, NbdDeviceError> {
        let unread = |source| {
            let device = path_of(number).display().to_string();
            NbdDeviceError::Command { device, attempted: "asked what it is like", source }
        };
        let of = |name| -> Result<u64, NbdDeviceError> {
            let text = self.attribute(number, name).map_err(unread)?;
            Ok(text.and_then(|text| text.parse().ok()).unwrap_or(0))
        };
        let size_bytes = of("size")? * SECTOR_BYTES;
        let logical_block = of("queue/logical_block_size")?;
        differs(path_of(number), Geometry { size_bytes, logical_block }, shape.geometry)?;
        Ok(size_bytes < shape.geometry.size_bytes)
    }

    /// Best effort. The engine sorts what it writes back, so there is nothing for a scheduler to do, and
    /// a request is one of the engine's. The kernel waits until all requests are answered before it changes one of these.
    pub(super) fn tune(&self, number: u32, connections: usize) {
        let look_ms = if connections == 1 { LOOK_MS } else { LOOK_SEVERAL_MS }; // D4
        for (name, value) in [
            ("queue/io_timeout", look_ms.to_string()),
            ("queue/max_sectors_kb", REQUEST_KIB_MAX.to_string()),
            ("queue/scheduler", "none".into()),
        ] {
            let found = self.attribute(number, name).ok().flatten().unwrap_or_default();
            // The one that is chosen is in brackets.
            if found != value && !found.contains(&format!("[{value}]")) {
                let _ = fs::write(attribute_path(&self.devices, number, name), value);
            }
        }
    }

    /// Makes a device that is served by the other ends of these sockets; says its number.
    pub(super) fn connect(
        &mut self,
        shape: &Shape,
        sockets: &[OwnedFd],
    ) -> Result<u32, NbdDeviceError> {
        let attributes = Attributes::default()
            .u64(wire::SIZE_BYTES, shape.geometry.size_bytes)
            .u64(wire::BLOCK_SIZE_BYTES, shape.geometry.logical_block)
            .u64(wire::SERVER_FLAGS, shape.flags.into())
            .u64(wire::TIMEOUT_SECONDS, 0) // D2
            .u64(wire::DEAD_CONNECTION_SECONDS, DEAD_CONNECTION.as_secs())
            .text(wire::BACKEND_IDENTIFIER, &shape.identifier(sockets.len()))
            .sockets(sockets.iter().map(AsRawFd::as_raw_fd));
        let refused = |source: io::Error| NbdDeviceError::Command {
            device: "a new /dev/nbdN".into(),
            attempted: "connected",
            source,
        };
        let index = self.ask(wire::CONNECT, attributes, wire::INDEX);
        let index = index.map_err(|error| refused(error.into()))?;
        let number = index.and_then(|bytes| u32_at(&bytes, 0));
        number.ok_or_else(|| refused(io::Error::other("the kernel did not say which it is")))
    }

    /// Gives a device, made with so many connections, others for those that are dead. The kernel says that it was done even if
    /// old ones stand; then the other ends of as many `sockets` see the end.
    pub(super) fn reconnect(
        &mut self,
        number: u32,
        (shape, connections): (&Shape, usize),
        sockets: &[OwnedFd],
    ) -> Result<(), NbdDeviceError> {
        let attributes = Attributes::default()
            .u32(wire::INDEX, number)
            .u64(wire::DEAD_CONNECTION_SECONDS, DEAD_CONNECTION.as_secs())
            .text(wire::BACKEND_IDENTIFIER, &shape.identifier(connections))
            .sockets(sockets.iter().map(AsRawFd::as_raw_fd));
        self.command(wire::RECONFIGURE, number, attributes, "taken over")
    }

    /// Makes a device as large as its shape says, while it is used.
    pub(super) fn resize(&mut self, number: u32, shape: &Shape) -> Result<(), NbdDeviceError> {
        let connections = self.connections_of(number, shape).unwrap_or(1);
        let attributes = Attributes::default()
            .u32(wire::INDEX, number)
            .u64(wire::SIZE_BYTES, shape.geometry.size_bytes)
            .text(wire::BACKEND_IDENTIFIER, &shape.identifier(connections));
        self.command(wire::RECONFIGURE, number, attributes, "made larger")
    }

    /// Ends a device; what is not answered fails.
    pub(super) fn disconnect(&mut self, number: u32) -> Result<(), NbdDeviceError> {
        let attributes = Attributes::default().u32(wire::INDEX, number);
        self.command(wire::DISCONNECT, number, attributes, "disconnected")
    }

    fn command(
        &mut self,
        command: u8,
        number: u32,
        attributes: Attributes,
        attempted: &'static str,
    ) -> Result<(), NbdDeviceError> {
        self.ask(command, attributes, 0).map(drop).map_err(|error| NbdDeviceError::Command {
            device: path_of(number).display().to_string(),
            attempted,
            source: error.into(),
        })
    }

    /// Asks, and waits for the end of the answer; gives the attribute that is wanted of it.
    fn ask(
        &mut self,
        command: u8,
        attributes: Attributes,
        wanted: u16,
    ) -> rustix::io::Result<Option<Vec<u8>>> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = wire::request(self.family, command, self.sequence, attributes);
        send(&self.socket, &request, SendFlags::empty())?;
        let mut found = None;
        let mut bytes = vec![0; 16 << 10];
        for _ in 0..DATAGRAM_COUNT_MAX {
            let (length, _) = recv(&self.socket, bytes.as_mut_slice(), RecvFlags::empty())?;
            for message in wire::messages(&bytes[..length]) {
                match message {
                    Message::End { sequence, errno: 0 } if sequence == self.sequence => {
                        return Ok(found);
                    }
                    Message::End { sequence, errno } if sequence == self.sequence => {
                        return Err(Errno::from_raw_os_error(errno));
                    }
                    Message::Answer { sequence, attributes } if sequence == self.sequence => {
                        found = wire::value(attributes, wanted).map(<[u8]>::to_vec);
                    }
                    _ => {}
                }
            }
        }
        Err(Errno::BADMSG)
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel::kernel;
    use super::*;

    #[test]
    fn a_device_that_is_larger_or_of_another_block_is_not_taken_over() {
        let device = || path_of(3);
        let of = |size_bytes, logical_block| Geometry { size_bytes, logical_block };
        assert!(differs(device(), of(1 << 30, 512), of(1 << 30, 512)).is_ok());
        assert!(differs(device(), of(1 << 29, 512), of(1 << 30, 512)).is_ok(), "it has grown");
        assert!(differs(device(), of(1 << 31, 512), of(1 << 30, 512)).is_err());
        let error = differs(device(), of(1 << 30, 4096), of(1 << 30, 512)).unwrap_err();
        assert!(error.to_string().contains("nbd-client -d /dev/nbd3"), "{error}");
    }

    /// A device has as many connections as it was made with, whatever the next daemon is told.
    #[test]
    fn an_identifier_names_the_volume_and_the_connections() {
        let geometry = Geometry { size_bytes: 1 << 30, logical_block: 512 };
        let shape = Shape { volume: "forebay-a".into(), connections: 1, geometry, flags: 1 };
        for count in 1..=CONNECTION_COUNT_MAX {
            assert_eq!(connections_of("forebay-a", &shape.identifier(count)), Some(count));
        }
        assert_eq!(shape.identifier(1), "forebay-a", "as it was before there could be several");
        for other in ["forebay-b", "forebay-ab", "forebay-a/", "forebay-a/1", "forebay-a/99", ""] {
            assert_eq!(connections_of("forebay-a", other), None, "{other}");
        }
    }

    #[test]
    fn numbers_are_those_of_whole_devices() {
        assert_eq!(number_of(&path_of(12)), Some(12));
        assert_eq!(number_of(Path::new("/dev/nbd0p1")), None);
        assert_eq!(number_of(Path::new("/dev/loop3")), None);
    }

    /// The kernel's own answers: families that every kernel has, and that none has.
    #[test]
    fn netlink_is_asked_and_answers() {
        match Control::open() {
            Ok(control) => assert!(control.family > wire::CONTROL),
            Err(NbdDeviceError::NoDriver) => {
                forebay_testing::skip("nbd control: no nbd driver; that was understood");
            }
            Err(error) => panic!("{error}: {:?}", std::error::Error::source(&error)),
        }
    }

    /// Before Linux 5.14 a device could be made, and then neither be taken over by the next process nor be ended by this one: an upgrade left a mounted
    /// one dead, and a stop said that it had ended what stayed connected.
    #[test]
    fn a_driver_that_does_not_keep_whose_a_device_is_is_refused() {
        assert_eq!(Control::on(kernel(10).0).unwrap().family, 30);
        assert_eq!(Control::on(kernel(12).0).unwrap().family, 30, "of the future");
        let error = Control::on(kernel(9).0).err().unwrap();
        assert!(error.to_string().contains("Linux 5.14"), "{error}");
    }
}
