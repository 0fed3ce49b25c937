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
//! | live    | live    | the process executes another program, which goes on with the connections (D5) |
//! | live    | waiting | the process ends, killed or without a release: a connection is dead |
//! | waiting | live    | the thread `attach`, of the next process or of this one, which tries it until it is done ([`RENEW_AGAIN`]) |
//! | live    | none    | the thread `detach`, when nobody holds the device; or `nbd-client -d` |
//! | waiting | failing | nobody came for [`super::DEAD_CONNECTION`]                        |
//! | failing | live    | as from waiting; what failed meanwhile is not done                |

use super::CONNECTION_COUNT_MAX;
use super::carried::{CarriedDevice, Expected};
use super::control::{Control, DEVICES, NbdDeviceError, Shape, find_in, number_of, path_of};
use super::front_end::{Arrival, NbdDeviceFrontEnd, Slot};
use crate::attach::{Attachments, DeviceVolume, Geometry, Report, Reports, Teller};
use crate::attach::{detach_each, once, spawn, spawn_apart};
use crate::nbd::connection::is_hung_up;
use crate::nbd::export::{Agreed, Export, Features, LogicalBlock, Session};
use crate::passage::Passage;
use forebay::io::Bell;
use forebay::shard::uuid_text;
use forebay_core::units::VolumeIndex;
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How long a killed process may keep its end of a connection.
const DYING: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Between the end of a connection and its replacement, so that what ends them all is no storm.
const RENEW_AFTER: Duration = Duration::from_millis(100);
/// Between a replacement that failed and the next try.
const RENEW_AGAIN: Duration = Duration::from_secs(1);
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

/// A volume, in the words of D1.
fn name_of(uuid: &[u8; 16]) -> String {
    format!("forebay-{}", uuid_text(uuid))
}

/// The device of a volume that waits for the next process, or is served by one. The driver is not asked, so it is not loaded for that.
pub fn left(uuid: &[u8; 16]) -> Result<Option<PathBuf>, NbdDeviceError> {
    Ok(find_in(Path::new(DEVICES), &name_of(uuid))?.map(path_of))
}

fn shape(volume: &DeviceVolume, connections: usize, session: &Session) -> Shape {
    let logical_block = session.logical_block.bytes().into();
    Shape {
        volume: name_of(&volume.uuid),
        connections,
        geometry: Geometry { size_bytes: session.size_bytes, logical_block },
        flags: session.transmission_flags(),
    }
}

/// What the thread is to do.
pub(super) enum Order {
    /// A connection has ended that nobody here wanted to end.
    Lost(usize),
    /// Detach these, and end: [`Order::End`] is sent by this when that is done. Connections that are lost meanwhile are replaced.
    Release(Vec<PathBuf>, Sender<Order>),
    /// They are detached, or given up.
    End,
    /// Detach this one if nobody holds it.
    TryRelease(PathBuf),
    /// The volume of this one has grown.
    Resize(PathBuf, u64),
}

/// A volume and its device.
struct Device {
    volume: VolumeIndex,
    shape: Shape,
    /// It was told that it is there.
    is_told: bool,
    /// Its connections come from the program before (D5).
    is_expected: bool,
    /// When it is given connections in place of those that are gone.
    renew_at: Option<Instant>,
    /// That failed, and was told.
    is_failing: bool,
    /// We disconnect it ourselves: nothing is lost by that.
    is_ended: Arc<AtomicBool>,
}

impl Device {
    fn new(volume: VolumeIndex, shape: Shape, is_expected: bool) -> Device {
        let (is_told, is_failing, is_ended) = (false, false, Arc::default());
        Device { volume, shape, is_told, is_expected, renew_at: None, is_failing, is_ended }
    }
}

/// The devices.
pub struct NbdAttachments {
    orders: Sender<Order>,
    is_given_up: Arc<AtomicBool>,
}

/// By which devices' connections leave for the next program, and come from the one before.
pub fn passage() -> Passage {
    Passage::of::<CarriedDevice>()
}

/// Begins to make a device of each volume, or to take over the one that it has: that ends when the
/// front end is part of a running server. Those that are made have so many connections; those that are expected will come by the passage.
pub fn begin(
    control: Control,
    volumes: &[DeviceVolume],
    connections: usize,
    passage: Rc<Passage>,
    expected: &Expected,
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
        let is_expected = expected.has(volume.uuid);
        devices.push(Device::new(volume.index, shape, is_expected));
        slots.push(Slot { volume: volume.index, session, connections: Vec::new(), is_expected });
    }
    let (rings, ordered_by) = (Arc::clone(&bell), orders.clone());
    let front_end = NbdDeviceFrontEnd::new(slots, rings, arrivals, ordered_by, passage)?;
    let is_given_up = Arc::<AtomicBool>::default();
    let attachments = NbdAttachments { orders, is_given_up: Arc::clone(&is_given_up) };
    let worker = Worker { control, devices, arrive, bell, teller, is_given_up };
    spawn("attach", move || worker.work(&ordered))?;
    Ok((attachments, front_end, reports))
}

impl Attachments for NbdAttachments {
    fn release(&mut self, devices: Vec<PathBuf>) -> io::Result<()> {
        let order = Order::Release(devices, self.orders.clone());
        self.orders.send(order).map_err(|_| io::Error::other("it has ended"))
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
            let report = match self.attach(slot) {
                Ok((device, warning)) => self.attached(slot, device, warning),
                Err(error) => self.not_attached(slot, error),
            };
            self.teller.tell(report);
        }
        self.teller.tell(Report::Ready);
        // Ends with the daemon, or with what it orders.
        while let Some(order) = self.next(ordered) {
            match order {
                Order::Lost(slot) => {
                    self.devices[slot].is_expected = false;
                    self.devices[slot].renew_at = Some(Instant::now() + RENEW_AFTER);
                }
                Order::Release(devices, orders) => {
                    let is_given_up = Arc::clone(&self.is_given_up);
                    let begun = self.detach(&devices, is_given_up, move |teller, result| {
                        teller.tell(Report::Gone(result.map_err(io::Error::other)));
                        // Else the loop has ended before, and this thread's other end with it.
                        let _ = orders.send(Order::End);
                    });
                    if let Err(error) = begun {
                        return self.teller.tell(Report::Gone(Err(error)));
                    }
                }
                Order::End => return,
                Order::TryRelease(device) => {
                    let known = device.clone();
                    let begun =
                        self.detach(std::slice::from_ref(&known), once(), |teller, result| {
                            if let Err(error) = result {
                                teller.tell(Report::Kept { device, error: error.into() });
                            }
                        });
                    if let Err(error) = begun {
                        self.teller.tell(Report::Kept { device: known, error: error.into() });
                    }
                }
                Order::Resize(device, size_bytes) => self.resize(&device, size_bytes),
            }
        }
    }

    /// The next order; until it comes devices are given connections when it is time. None: nobody orders any more.
    fn next(&mut self, ordered: &Receiver<Order>) -> Option<Order> {
        // Bounded by the daemon's life.
        loop {
            let wait = |(slot, it): (usize, &Device)| Some((it.renew_at?, slot));
            let first = self.devices.iter().enumerate().filter_map(wait).min();
            let Some((at, slot)) = first else { return ordered.recv().ok() };
            match ordered.recv_timeout(at.saturating_duration_since(Instant::now())) {
                Ok(order) => return Some(order),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.renew(slot),
            }
        }
    }

    fn attached(&mut self, slot: usize, device: PathBuf, warning: Option<String>) -> Report {
        let it = &mut self.devices[slot];
        it.is_told = true;
        Report::Attached { volume: it.volume, device, warning }
    }

    /// What waits for its connections since a process before is tried again, unless it is none that we could serve.
    fn not_attached(&mut self, slot: usize, error: NbdDeviceError) -> Report {
        let volume = self.devices[slot].volume;
        let differs = matches!(error, NbdDeviceError::Differs { .. });
        let is_none = matches!(self.control.find(&self.devices[slot].shape), Ok(None));
        if differs || is_none {
            return Report::Failed { volume, error: error.into() };
        }
        self.try_again(slot);
        Report::NotRenewed { volume, error: error.into() }
    }

    /// Says whether it had failed before.
    fn try_again(&mut self, slot: usize) -> bool {
        let it = &mut self.devices[slot];
        it.renew_at = Some(Instant::now() + RENEW_AGAIN);
        std::mem::replace(&mut it.is_failing, true)
    }

    /// Makes the device or takes it over, and says what a user should know of it.
    fn attach(&mut self, slot: usize) -> Result<(PathBuf, Option<String>), NbdDeviceError> {
        let shape = self.devices[slot].shape.clone();
        if let Some(number) = self.control.find(&shape)? {
            return self.take_over_first(slot, number, DYING);
        }
        let (ours, kernels) = pairs(shape.connections)?;
        let number = self.control.connect(&shape, &kernels)?;
        drop(kernels);
        if self.control.connections_of(number, &shape).is_none() {
            // What cannot be found again could be neither taken over nor ended (D1).
            let _ = self.control.disconnect(number);
            return Err(NbdDeviceError::Nameless { device: path_of(number).display().to_string() });
        }
        self.serve(slot, ours);
        self.control.tune(number, shape.connections);
        find_partitions(number);
        Ok((path_of(number), None))
    }

    /// What a process before has left.
    fn take_over_first(
        &mut self,
        slot: usize,
        number: u32,
        patience: Duration,
    ) -> Result<(PathBuf, Option<String>), NbdDeviceError> {
        let shape = self.devices[slot].shape.clone();
        let is_small = self.control.check_alike(number, &shape)?;
        if std::mem::take(&mut self.devices[slot].is_expected) {
            // Before it changes anything the kernel waits for answers, which nobody gives yet.
            let text = "it is smaller than its volume; `forebay resize` makes it larger";
            return Ok((path_of(number), is_small.then(|| text.to_owned())));
        }
        let connections = self.take_over(slot, number, patience)?;
        self.control.tune(number, connections);
        let resized = if is_small { self.control.resize(number, &shape) } else { Ok(()) };
        Ok((path_of(number), resized.err().map(|error| error.to_string())))
    }

    /// Makes a device as large as its volume, which has grown.
    fn resize(&mut self, device: &Path, size_bytes: u64) {
        let Some(number) = number_of(device) else { return };
        let Some(it) = self.find(number) else { return };
        let it = &mut self.devices[it];
        let block = it.shape.geometry.logical_block;
        it.shape.geometry.size_bytes = size_bytes / block * block;
        let (volume, shape) = (it.volume, it.shape.clone());
        self.teller.tell(match self.control.resize(number, &shape) {
            Ok(()) => Report::Resized { volume },
            Err(error) => Report::NotResized { volume, error: error.into() },
        });
    }

    /// Which of ours it is, if it is.
    fn find(&self, number: u32) -> Option<usize> {
        let is_it = |it: &Device| self.control.connections_of(number, &it.shape).is_some();
        self.devices.iter().position(is_it)
    }

    /// Gives a device new connections in place of those that are dead or dying: as many as it was made with, which it says. What is
    /// dying has so long for it.
    fn take_over(
        &mut self,
        slot: usize,
        number: u32,
        patience: Duration,
    ) -> Result<usize, NbdDeviceError> {
        let shape = self.devices[slot].shape.clone();
        let count = self.control.connections_of(number, &shape).unwrap_or(1);
        let (begun, mut standing) = (Instant::now(), Vec::new());
        // Bounded by the patience.
        loop {
            let (ours, kernels) = pairs(count - standing.len())?;
            self.control.reconnect(number, (&shape, count), &kernels)?;
            drop(kernels);
            standing.extend(ours.into_iter().filter(|it| !is_hung_up(it)));
            if standing.len() == count {
                self.serve(slot, standing);
                return Ok(count);
            }
            if begun.elapsed() >= patience {
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

    /// The connections have ended: by `nbd-client -d`, because something was not understood, or by a request that took long; or
    /// they could not be had before.
    fn renew(&mut self, slot: usize) {
        let it = &mut self.devices[slot];
        it.renew_at = None;
        let (volume, is_told, is_failing) = (it.volume, it.is_told, it.is_failing);
        if it.is_ended.load(Ordering::Acquire) {
            return;
        }
        // Others wait for their orders meanwhile, so this is done once.
        let patience = if is_failing { Duration::ZERO } else { DYING };
        let result = match self.control.find(&self.devices[slot].shape) {
            Ok(None) => return self.teller.tell(Report::Disconnected { volume }),
            Ok(Some(number)) if is_told => self
                .take_over(slot, number, patience)
                .map(|_| Report::Renewed { volume, device: path_of(number) }),
            Ok(Some(number)) => self
                .take_over_first(slot, number, patience)
                .map(|(device, warning)| self.attached(slot, device, warning)),
            Err(error) => Err(error),
        };
        match result {
            Ok(report) => {
                self.devices[slot].is_failing = false;
                self.teller.tell(report);
            }
            Err(error) => {
                if !self.try_again(slot) {
                    self.teller.tell(Report::NotRenewed { volume, error: error.into() });
                }
            }
        }
    }

    /// Ends devices on a thread of their own, which tells `ended` what became of it.
    fn detach(
        &self,
        devices: &[PathBuf],
        is_given_up: Arc<AtomicBool>,
        ended: impl FnOnce(&Teller, Result<(), NbdDeviceError>) + Send + 'static,
    ) -> io::Result<()> {
        // What was disconnected since is not ours any more.
        let ours = |device: &PathBuf| {
            let number = number_of(device)?;
            Some((number, Arc::clone(&self.devices[self.find(number)?].is_ended)))
        };
        let numbers: Vec<(u32, Arc<AtomicBool>)> = devices.iter().filter_map(ours).collect();
        let teller = self.teller.clone();
        let bell = teller.bell();
        spawn_apart("detach", &[bell.as_fd()], move || {
            let path = |it: &(u32, _)| path_of(it.0);
            let refused = |device, source| NbdDeviceError::Command {
                device,
                attempted: "closed by others",
                source,
            };
            let result = Control::open().and_then(|mut control| {
                detach_each(numbers, path, (&teller, &is_given_up), refused, |device, claim| {
                    let (number, is_ended) = device;
                    is_ended.store(true, Ordering::Release);
                    control.disconnect(*number).inspect_err(|_| {
                        is_ended.store(false, Ordering::Release);
                    })?;
                    drop(claim);
                    Ok(())
                })
            });
            ended(&teller, result);
        })
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
    use super::super::kernel::{Driver, kernel};
    use super::*;
    use std::sync::Mutex;
    use std::thread::JoinHandle;

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

    /// A worker with a volume whose device a process before has left, and a kernel of which it is.
    struct Rig {
        driver: Arc<Mutex<Driver>>,
        orders: Sender<Order>,
        arrivals: Receiver<Arrival>,
        reports: Reports,
        told: Vec<String>,
        devices: PathBuf,
        worker: JoinHandle<()>,
    }

    fn rig(name: &str, refusals: usize) -> Rig {
        rig_of(name, refusals, false)
    }

    /// The program before has left it its connections, or not.
    fn rig_of(name: &str, refusals: usize, is_expected: bool) -> Rig {
        let volume = volume(1 << 20, 512);
        let shape = shape(&volume, 1, &session(&volume, 1));
        let devices =
            std::env::temp_dir().join(format!("forebay-nbd-{name}-{}", std::process::id()));
        let device = devices.join("nbd3");
        std::fs::create_dir_all(device.join("queue")).unwrap();
        for (name, text) in [
            ("backend", shape.volume.as_str()),
            ("size", "2048"),
            ("queue/logical_block_size", "512"),
        ] {
            std::fs::write(device.join(name), text).unwrap();
        }
        let (socket, driver) = kernel(10);
        driver.lock().unwrap().refusals = refusals;
        let mut control = Control::on(socket).unwrap();
        control.devices.clone_from(&devices);
        let bell = Arc::new(Bell::new().unwrap());
        let (teller, reports) = Teller::new(Arc::clone(&bell));
        let (arrive, arrivals) = channel();
        let (orders, ordered) = channel();
        let all = vec![Device::new(volume.index, shape, is_expected)];
        let is_given_up = Arc::default();
        let worker = Worker { control, devices: all, arrive, bell, teller, is_given_up };
        let worker = std::thread::spawn(move || worker.work(&ordered));
        Rig { driver, orders, arrivals, reports, told: Vec::new(), devices, worker }
    }

    impl Rig {
        /// The names of what it tells, until one is that.
        fn told_until(&mut self, last: &str) -> Vec<String> {
            forebay_testing::wait_for(last, || {
                for report in self.reports.take() {
                    let text = format!("{report:?}");
                    let name = text.split(|it: char| !it.is_alphabetic()).next();
                    self.told.extend(name.map(str::to_owned));
                }
                self.told.iter().any(|it| it == last)
            });
            std::mem::take(&mut self.told)
        }

        /// Nobody orders any more.
        fn end(self) {
            drop(self.orders);
            self.worker.join().unwrap();
            std::fs::remove_dir_all(self.devices).unwrap();
        }
    }

    /// One failure, as for want of a descriptor, and nobody tried it again: ten minutes later the kernel failed all that had waited.
    #[test]
    fn connections_that_cannot_be_had_are_tried_again_until_they_are() {
        let mut rig = rig("again", 0);
        assert_eq!(rig.told_until("Ready"), ["Attached", "Ready"]);
        let Arrival { slot, sockets } = rig.arrivals.try_recv().unwrap();
        assert_eq!((slot, sockets.len()), (0, 1));
        drop(sockets);
        rig.driver.lock().unwrap().refusals = 2;
        rig.orders.send(Order::Lost(0)).unwrap();
        assert_eq!(rig.told_until("Renewed"), ["NotRenewed", "Renewed"], "told once");
        assert_eq!(rig.driver.lock().unwrap().command_count, 4);
        let Arrival { sockets, .. } = rig.arrivals.try_recv().unwrap();
        assert!(!is_hung_up(&sockets[0]), "the kernel has the other end");
        rig.end();
    }

    #[test]
    fn a_device_that_cannot_be_taken_over_at_once_is_in_the_end() {
        let mut rig = rig("left", 1);
        assert_eq!(rig.told_until("Attached"), ["NotRenewed", "Ready", "Attached"]);
        assert_eq!(rig.arrivals.try_recv().unwrap().sockets.len(), 1);
        rig.end();
    }

    /// A device that goes on with its connections is given no others, until it loses those (D5). The thread waited for the kernel, which
    /// waited until all was answered before it changed the device's queue, and nobody answered before the thread was done.
    #[test]
    fn what_comes_from_the_program_before_is_neither_taken_over_nor_changed() {
        let mut rig = rig_of("comes", 0, true);
        assert_eq!(rig.told_until("Ready"), ["Attached", "Ready"]);
        assert_eq!(rig.driver.lock().unwrap().command_count, 0);
        assert!(rig.arrivals.try_recv().is_err());
        let queue = rig.devices.join("nbd3/queue/io_timeout");
        assert!(!queue.exists(), "it is as it was");
        rig.orders.send(Order::Lost(0)).unwrap();
        assert_eq!(rig.told_until("Renewed"), ["Renewed"]);
        assert_eq!(rig.arrivals.try_recv().unwrap().sockets.len(), 1);
        rig.end();
    }

    #[test]
    fn what_is_gone_is_tried_no_more() {
        let mut rig = rig("gone", usize::MAX);
        assert_eq!(rig.told_until("Ready"), ["NotRenewed", "Ready"]);
        std::fs::remove_dir_all(rig.devices.join("nbd3")).unwrap();
        assert_eq!(rig.told_until("Disconnected"), ["Disconnected"]);
        assert!(rig.arrivals.try_recv().is_err());
        rig.end();
    }

    /// Where it cannot be found out whether a device is there, as for want of a descriptor, it was taken for gone.
    #[test]
    fn what_cannot_be_looked_at_is_not_gone() {
        let mut rig = rig("unread", 0);
        rig.told_until("Ready");
        let (backend, aside) = (rig.devices.join("nbd3/backend"), rig.devices.join("aside"));
        std::fs::rename(&backend, &aside).unwrap();
        std::fs::create_dir(&backend).unwrap();
        rig.orders.send(Order::Lost(0)).unwrap();
        assert_eq!(rig.told_until("NotRenewed"), ["NotRenewed"]);
        std::fs::remove_dir(&backend).unwrap();
        std::fs::rename(&aside, &backend).unwrap();
        assert_eq!(rig.told_until("Renewed"), ["Renewed"]);
        rig.end();
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
