// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernel's NBD devices of volumes: made, or taken over from a process that is gone, and ended.
//!
//! # States
//!
//! As the kernel has them.
//!
//! | from    | to      | by                                                                |
//! |---------|---------|-------------------------------------------------------------------|
//! | none    | live    | the thread `attach`: connected                                    |
//! | live    | waiting | the process ends, killed or without a release: a connection is dead |
//! | waiting | live    | the thread `attach`, of the next process or of this one           |
//! | live    | none    | the thread `detach`, when nobody holds the device; or `nbd-client -d` |
//! | waiting | failing | nobody came for [`super::DEAD_CONNECTION`]                        |

use super::CONNECTION_COUNT_MAX;
use super::control::{
    Control, NbdDeviceError, Shape, check_alike, connections_of, find, number_of,
};
use super::control::{path_of, tune};
use super::front_end::{Arrival, NbdDeviceFrontEnd, Slot};
use crate::attach::{Attachments, DeviceVolume, Geometry, Report, Reports, Teller};
use crate::attach::{detach_each, once, spawn, spawn_apart};
use crate::nbd::connection::is_hung_up;
use crate::nbd::export::{Agreed, Export, Features, LogicalBlock, Session};
use forebay::io::Bell;
use forebay::shard::uuid_text;
use forebay_core::units::VolumeIndex;
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long a killed process may keep its end of a connection.
const DYING: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Between the end of a connection and its replacement, so that what ends them all is no storm.
const RENEW_AFTER: Duration = Duration::from_millis(100);
/// What a socket may hold: a long request or two.
const SOCKET_BYTES: usize = 2 << 20;
/// What the kernel's client makes use of.
const FEATURES: Features =
    Features { flush: true, fua: true, trim: true, write_zeroes: true, ..Features::NONE };

pub(super) fn session(volume: &DeviceVolume, connections: usize) -> Session {
    let logical_block = match volume.logical_block {
        4096 => LogicalBlock::Bytes4096,
        _ => LogicalBlock::Bytes512,
    };
    let export = Export {
        name: String::new(),
        size_bytes: volume.size_bytes,
        logical_block,
        read_only: false,
        description: String::new(),
        // A flush on one covers what was answered on all of them (D4).
        features: Features { multi_conn: connections > 1, ..FEATURES },
    };
    Session::new(0, &export, Agreed::default())
}

fn shape(volume: &DeviceVolume, connections: usize, session: &Session) -> Shape {
    let logical_block = session.logical_block.bytes().into();
    Shape {
        volume: format!("forebay-{}", uuid_text(&volume.uuid)),
        connections,
        geometry: Geometry { size_bytes: session.size_bytes, logical_block },
        flags: session.transmission_flags(),
    }
}

/// What the thread is to do.
pub(super) enum Order {
    /// A connection has ended that nobody here wanted to end.
    Lost(usize),
    /// Detach these, and end.
    Release(Vec<PathBuf>),
    /// Detach this one if nobody holds it.
    TryRelease(PathBuf),
    /// The volume of this one has grown.
    Resize(PathBuf, u64),
}

/// A volume and its device.
struct Device {
    volume: VolumeIndex,
    shape: Shape,
}

/// The devices.
pub struct NbdAttachments {
    orders: Sender<Order>,
    is_given_up: Arc<AtomicBool>,
}

/// Begins to make a device of each volume, or to take over the one that it has: that ends when the
/// front end is part of a running server. Those that are made have so many connections.
pub fn begin(
    control: Control,
    volumes: &[DeviceVolume],
    connections: usize,
) -> io::Result<(NbdAttachments, NbdDeviceFrontEnd, Reports)> {
    assert!((1..=CONNECTION_COUNT_MAX).contains(&connections));
    let bell = Arc::new(Bell::new()?);
    let (teller, reports) = Teller::new(Arc::clone(&bell));
    let (arrive, arrivals) = channel();
    let (orders, ordered) = channel();
    let (mut slots, mut devices) = (Vec::new(), Vec::new());
    for volume in volumes {
        let session = session(volume, connections);
        let shape = shape(volume, connections, &session);
        devices.push(Device { volume: volume.index, shape });
        slots.push(Slot { volume: volume.index, session, connections: Vec::new() });
    }
    let front_end = NbdDeviceFrontEnd::new(slots, Arc::clone(&bell), arrivals, orders.clone())?;
    let is_given_up = Arc::<AtomicBool>::default();
    let attachments = NbdAttachments { orders, is_given_up: Arc::clone(&is_given_up) };
    let worker = Worker { control, devices, arrive, bell, teller, is_given_up };
    spawn("attach", move || worker.work(&ordered))?;
    Ok((attachments, front_end, reports))
}

impl Attachments for NbdAttachments {
    fn release(&mut self, devices: Vec<PathBuf>) -> io::Result<()> {
        self.orders.send(Order::Release(devices)).map_err(|_| io::Error::other("it has ended"))
    }

    fn try_release(&mut self, device: PathBuf) -> io::Result<()> {
        let order = Order::TryRelease(device);
        self.orders.send(order).map_err(|_| io::Error::other("it has ended"))
    }

    fn resize(&mut self, device: PathBuf, _: VolumeIndex, size_bytes: u64) -> io::Result<()> {
        let order = Order::Resize(device, size_bytes);
        self.orders.send(order).map_err(|_| io::Error::other("it has ended"))
    }

    /// The devices stay, and wait for the next process.
    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    fn outlive(&self) -> bool {
        true
    }
}

/// The thread `attach`.
struct Worker {
    control: Control,
    devices: Vec<Device>,
    arrive: Sender<Arrival>,
    bell: Arc<Bell>,
    teller: Teller,
    is_given_up: Arc<AtomicBool>,
}

impl Worker {
    fn work(mut self, ordered: &Receiver<Order>) {
        for slot in 0..self.devices.len() {
            let volume = self.devices[slot].volume;
            let report = match self.attach(slot) {
                Ok((device, warning)) => Report::Attached { volume, device, warning },
                Err(error) => Report::Failed { volume, error: error.into() },
            };
            self.teller.tell(report);
        }
        self.teller.tell(Report::Ready);
        // Ends with the daemon, or with what it orders.
        while let Ok(order) = ordered.recv() {
            match order {
                Order::Lost(slot) => self.renew(slot),
                Order::Release(devices) => {
                    let is_given_up = Arc::clone(&self.is_given_up);
                    return self.detach(&devices, is_given_up, |teller, result| {
                        teller.tell(Report::Gone(result.map_err(io::Error::other)));
                    });
                }
                Order::TryRelease(device) => {
                    let known = device.clone();
                    self.detach(&[known], once(), |teller, result| {
                        if let Err(error) = result {
                            teller.tell(Report::Kept { device, error: error.into() });
                        }
                    });
                }
                Order::Resize(device, size_bytes) => self.resize(&device, size_bytes),
            }
        }
    }

    /// Makes the device or takes it over, and says what a user should know of it.
    fn attach(&mut self, slot: usize) -> Result<(PathBuf, Option<String>), NbdDeviceError> {
        let shape = self.devices[slot].shape.clone();
        if let Some(number) = find(&shape) {
            let is_small = check_alike(number, &shape)?;
            let connections = self.take_over(slot, number)?;
            tune(number, connections);
            let resized = if is_small { self.control.resize(number, &shape) } else { Ok(()) };
            return Ok((path_of(number), resized.err().map(|error| error.to_string())));
        }
        let (ours, kernels) = pairs(shape.connections)?;
        let number = self.control.connect(&shape, &kernels)?;
        drop(kernels);
        if connections_of(number, &shape).is_none() {
            // What cannot be found again could be neither taken over nor ended (D1).
            let _ = self.control.disconnect(number);
            return Err(NbdDeviceError::Nameless { device: path_of(number).display().to_string() });
        }
        self.serve(slot, ours);
        tune(number, shape.connections);
        find_partitions(number);
        Ok((path_of(number), None))
    }

    /// Makes a device as large as its volume, which has grown.
    fn resize(&mut self, device: &Path, size_bytes: u64) {
        let Some(number) = number_of(device) else { return };
        let is_it = |it: &&mut Device| connections_of(number, &it.shape).is_some();
        let Some(it) = self.devices.iter_mut().find(is_it) else { return };
        let block = it.shape.geometry.logical_block;
        it.shape.geometry.size_bytes = size_bytes / block * block;
        let (volume, shape) = (it.volume, it.shape.clone());
        self.teller.tell(match self.control.resize(number, &shape) {
            Ok(()) => Report::Resized { volume },
            Err(error) => Report::NotResized { volume, error: error.into() },
        });
    }

    /// Gives a device new connections in place of those that are dead or dying: as many as it was made with, which it says.
    fn take_over(&mut self, slot: usize, number: u32) -> Result<usize, NbdDeviceError> {
        let shape = self.devices[slot].shape.clone();
        let count = connections_of(number, &shape).unwrap_or(1);
        let (begun, mut standing) = (Instant::now(), Vec::new());
        // Bounded by DYING.
        loop {
            let (ours, kernels) = pairs(count - standing.len())?;
            self.control.reconnect(number, (&shape, count), &kernels)?;
            drop(kernels);
            standing.extend(ours.into_iter().filter(|it| !is_hung_up(it)));
            if standing.len() == count {
                self.serve(slot, standing);
                return Ok(count);
            }
            if begun.elapsed() >= DYING {
                let device = path_of(number).display().to_string();
                return Err(NbdDeviceError::Served { device });
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn serve(&self, slot: usize, sockets: Vec<OwnedFd>) {
        // A loop that does not listen any more ends the process in a moment.
        let _ = self.arrive.send(Arrival { slot, sockets });
        self.bell.ring();
    }

    /// The connections have ended: by `nbd-client -d`, because something was not understood, or by a request that took long.
    fn renew(&mut self, slot: usize) {
        std::thread::sleep(RENEW_AFTER);
        let Device { volume, shape } = &self.devices[slot];
        let volume = *volume;
        let Some(number) = find(shape) else {
            return self.teller.tell(Report::Disconnected { volume });
        };
        let result = self.take_over(slot, number);
        self.teller.tell(match result {
            Ok(_) => Report::Renewed { device: path_of(number) },
            Err(error) => Report::Failed { volume, error: error.into() },
        });
    }

    /// Ends devices on a thread of their own, which tells `ended` what became of it.
    fn detach(
        &self,
        devices: &[PathBuf],
        is_given_up: Arc<AtomicBool>,
        ended: impl FnOnce(&Teller, Result<(), NbdDeviceError>) + Send + 'static,
    ) {
        let is_ours =
            |number: u32| self.devices.iter().any(|it| connections_of(number, &it.shape).is_some());
        // What was disconnected since is not ours any more.
        let numbers: Vec<u32> =
            devices.iter().filter_map(|it| number_of(it)).filter(|it| is_ours(*it)).collect();
        let (teller, failed) = (self.teller.clone(), self.teller.clone());
        let bell = failed.bell();
        let work = move || {
            let path = |it: &u32| path_of(*it);
            let refused = |device, source| NbdDeviceError::Command {
                device,
                attempted: "closed by others",
                source,
            };
            let result = Control::open().and_then(|mut control| {
                detach_each(numbers, path, (&teller, &is_given_up), refused, |number, claim| {
                    control.disconnect(*number)?;
                    drop(claim);
                    Ok(())
                })
            });
            ended(&teller, result);
        };
        if let Err(error) = spawn_apart("detach", &[bell.as_fd()], work) {
            failed.tell(Report::Gone(Err(error)));
        }
    }
}

/// Our ends and the kernel's.
fn pairs(count: usize) -> Result<(Vec<OwnedFd>, Vec<OwnedFd>), NbdDeviceError> {
    let make = || -> rustix::io::Result<(OwnedFd, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, kernels) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        for end in [&ours, &kernels] {
            // Without it long requests take more turns.
            let _ = set_socket_send_buffer_size_force(end, SOCKET_BYTES);
        }
        Ok((ours, kernels))
    };
    let made: rustix::io::Result<_> = (0..count).map(|_| make()).collect();
    made.map_err(|error| NbdDeviceError::Command {
        device: "a pair of sockets".into(),
        attempted: "made",
        source: error.into(),
    })
}

/// The kernel looks for partitions when a device is opened for the first time.
fn find_partitions(number: u32) {
    let open = move || drop(File::open(path_of(number)));
    // Best effort: the next who opens it finds them.
    if let Ok(thread) = forebay::host::apart::spawn("partitions", &[], open) {
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(size_bytes: u64, logical_block: u32) -> DeviceVolume {
        DeviceVolume {
            index: VolumeIndex(0),
            uuid: [7; 16],
            size_bytes,
            logical_block,
            lends: false,
        }
    }

    #[test]
    fn a_device_is_as_large_as_whole_logical_blocks_and_offers_what_is_served() {
        let size = 10 * 4096 + 512;
        let several = |block, connections| {
            let session = session(&volume(size, block), connections);
            shape(&volume(size, block), connections, &session)
        };
        let shape = |block| several(block, 1);
        let of = |size_bytes, logical_block| Geometry { size_bytes, logical_block };
        assert_eq!(shape(512).geometry, of(size, 512));
        assert_eq!(shape(4096).geometry, of(size - 512, 4096));
        // HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES.
        assert_eq!(shape(512).flags, 0b110_1101);
        // CAN_MULTI_CONN as well: without it the kernel refuses several.
        assert_eq!(several(512, 2).flags, 0b1_0110_1101);
        assert_eq!(shape(512).volume, "forebay-07070707-0707-0707-0707-070707070707");
    }

    /// What is still to be read of it does not hide that (D4).
    #[test]
    fn a_socket_hangs_up_when_its_other_end_does() {
        let (ours, kernels) = pairs(3).unwrap();
        rustix::io::write(&kernels[1], b"a request").unwrap();
        assert!(!ours.iter().any(is_hung_up));
        rustix::net::shutdown(&kernels[1], rustix::net::Shutdown::Both).unwrap();
        assert!(is_hung_up(&ours[1]) && !is_hung_up(&ours[0]));
        let mut bytes = [0; 16];
        assert_eq!(rustix::io::read(&ours[1], &mut bytes).unwrap(), 9);
        drop(kernels);
        assert!(ours.iter().all(is_hung_up));
    }
}
