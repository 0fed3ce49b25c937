// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices of volumes, whatever makes them: what became of each, and their end.
//!
//! # Invariants
//!
//! - **K1** Nothing on the loop's thread waits for the kernel to finish something on one of these
//!   devices: attaching and detaching are done by a thread of their own, which reports ([`Teller`]).
//! - **K3** What waits until something is read from or written to one of them is done by a thread that
//!   has none of our files open ([`apart`]): the process can be killed meanwhile and the next one begin.

use forebay::host::apart;
use forebay::host::loop_device::{self, Holder};
use forebay::host::machine::Host;
use forebay::io::Bell;
use forebay_core::units::VolumeIndex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// How often it is looked whether a device is still held; that reads all of `/proc`.
const LOOK_FOR_HOLDERS: Duration = Duration::from_millis(500);

/// A volume that is to have a device whose driver asks us for each request.
#[derive(Clone, Debug)]
pub struct DeviceVolume {
    /// Its index.
    pub index: VolumeIndex,
    /// What it is known by for ever.
    pub uuid: [u8; 16],
    /// Its size.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// It would be of use to have the kernel's own pages of each request, where the driver lends them.
    pub lends: bool,
}

/// What of a device must be as it was made when the next process takes it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Its size.
    pub size_bytes: u64,
    /// Its logical block.
    pub logical_block: u64,
}

impl Geometry {
    /// Whether a device that was made so can be that of a volume that is so now: the volume may have grown.
    pub(crate) fn may_serve(self, volume: Geometry) -> bool {
        self.logical_block == volume.logical_block && self.size_bytes <= volume.size_bytes
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes in blocks of {}", self.size_bytes, self.logical_block)
    }
}

/// What became of a device.
#[derive(Debug)]
pub enum Report {
    /// There it is.
    Attached {
        /// Of which volume.
        volume: VolumeIndex,
        /// `/dev/loop3`.
        device: PathBuf,
        /// What a user should know of it, such as what it could not be given.
        warning: Option<String>,
    },
    /// It could not be made.
    Failed {
        /// Of which volume.
        volume: VolumeIndex,
        /// Why.
        error: Box<dyn Error + Send + Sync>,
    },
    /// Each volume is attached or failed.
    Ready,
    /// It is to be detached, and is held open.
    Held {
        /// `/dev/loop3`.
        device: PathBuf,
        /// By whom, as far as it can be seen.
        holders: Vec<Holder>,
    },
    /// It is detached.
    Detached {
        /// `/dev/loop3`.
        device: PathBuf,
    },
    /// The connection that it is served by was lost, and there is another one.
    Renewed {
        /// Of which volume.
        volume: VolumeIndex,
        /// `/dev/nbd3`.
        device: PathBuf,
    },
    /// That connection was lost, or the process's before, and there is no other yet. It is tried again until it is
    /// [`Report::Renewed`], [`Report::Attached`] or [`Report::Disconnected`].
    NotRenewed {
        /// Of which volume.
        volume: VolumeIndex,
        /// Why.
        error: Box<dyn Error + Send + Sync>,
    },
    /// It is as large as its volume now.
    Resized {
        /// Of which volume.
        volume: VolumeIndex,
    },
    /// It is smaller than its volume, and stays so for now.
    NotResized {
        /// Of which volume.
        volume: VolumeIndex,
        /// Why.
        error: Box<dyn Error + Send + Sync>,
    },
    /// Somebody else has taken the device away.
    Disconnected {
        /// Of which volume.
        volume: VolumeIndex,
    },
    /// It was to be detached if nobody held it, and could not be.
    Kept {
        /// `/dev/loop3`.
        device: PathBuf,
        /// Why.
        error: Box<dyn Error + Send + Sync>,
    },
    /// No requests come any more to those for which that could be had.
    Quiesced,
    /// All are gone, or what could not be removed.
    Gone(io::Result<()>),
}

/// Tells the daemon from another thread; the bell ends a wait of its loop.
#[derive(Clone)]
pub struct Teller {
    reports: SyncSender<Report>,
    bell: Arc<Bell>,
}

impl Teller {
    /// A teller, and where its reports come out.
    pub fn new(bell: Arc<Bell>) -> (Teller, Reports) {
        let (sender, receiver) = sync_channel(1024);
        (Teller { reports: sender, bell }, Reports { receiver, devices: Vec::new() })
    }

    /// The bell it rings.
    pub(crate) fn bell(&self) -> Arc<Bell> {
        Arc::clone(&self.bell)
    }

    /// Tells it.
    pub fn tell(&self, report: Report) {
        // A daemon that does not listen any more ends the process in a moment.
        let _ = self.reports.send(report);
        self.bell.ring();
    }
}

/// Who has a device.
pub(crate) enum Claim {
    /// Nobody but us, and everything that was written to it was handed to the loop and answered, well or not.
    Ours(File),
    /// These do.
    Held(Vec<Holder>),
}

/// Opens a block device for us alone. On a thread apart (K3).
pub(crate) fn claim(device: &Path) -> io::Result<Claim> {
    let host = Host::default();
    let holders = match host.node_at_path(device) {
        Some(node) => loop_device::holders(&host, node.number),
        None => Vec::new(),
    };
    if !holders.is_empty() {
        return Ok(Claim::Held(holders));
    }
    // Mounted in another namespace, or part of something: the kernel knows.
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(device, flags, Mode::empty()) {
        Ok(claim) => {
            // What is refused now, as when the cache device is lost, is not saved by keeping the device: whoever wrote it
            // has closed it, and the next to open it would wait for a daemon that is gone. The failure itself is
            // in the log, and in `status`.
            let _ = rustix::fs::fsync(&claim);
            Ok(Claim::Ours(File::from(claim)))
        }
        Err(Errno::BUSY) => Ok(Claim::Held(Vec::new())),
        Err(error) => Err(error.into()),
    }
}

/// Who was told to hold a device, so that each change is told once.
#[derive(Default)]
pub(crate) struct Told(Vec<(PathBuf, Vec<Holder>)>);

impl Told {
    /// Tells who holds the device, unless that was the last that was told of it.
    pub(crate) fn tell(&mut self, device: &Path, holders: Vec<Holder>, teller: &Teller) {
        match self.0.iter_mut().find(|entry| entry.0 == device) {
            Some(entry) if entry.1 == holders => return,
            Some(entry) => entry.1.clone_from(&holders),
            None => self.0.push((device.into(), holders.clone())),
        }
        teller.tell(Report::Held { device: device.into(), holders });
    }
}

/// Ends each device when nobody holds it. Those that are given up stay, and wait for the next
/// process; one that cannot be ended keeps no other, and its error is given. On a thread apart (K3).
pub(crate) fn detach_each<D, E>(
    mut devices: Vec<D>,
    path_of: impl Fn(&D) -> PathBuf,
    (teller, is_given_up): (&Teller, &AtomicBool),
    refused: impl Fn(String, io::Error) -> E,
    mut end: impl FnMut(&D, File) -> Result<(), E>,
) -> Result<(), E> {
    let (mut told, mut ended) = (Told::default(), Ok(()));
    // Bounded by the holders' patience and the daemon's.
    loop {
        let mut left = Vec::new();
        for device in devices {
            let path = path_of(&device);
            let done = match claim(&path) {
                Ok(Claim::Ours(claim)) => end(&device, claim),
                Ok(Claim::Held(holders)) => {
                    told.tell(&path, holders, teller);
                    left.push(device);
                    continue;
                }
                Err(error) => Err(refused(path.display().to_string(), error)),
            };
            if done.is_ok() {
                teller.tell(Report::Detached { device: path });
            }
            ended = ended.and(done);
        }
        devices = left;
        if devices.is_empty() || is_given_up.load(Ordering::Relaxed) {
            return ended;
        }
        std::thread::sleep(LOOK_FOR_HOLDERS);
    }
}

/// What a thread that only tries once takes for the end of patience.
pub(crate) fn once() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(true))
}

/// Starts a thread.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(work).map(drop)
}

/// Starts a thread that has none of our files open but what it tells by (K3).
pub(crate) fn spawn_apart(
    name: &str,
    kept: &[BorrowedFd<'_>],
    work: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    apart::spawn(name, kept, work).map(drop)
}

/// What was told, and the devices that there are by it.
pub struct Reports {
    receiver: Receiver<Report>,
    devices: Vec<(VolumeIndex, PathBuf)>,
}

impl Reports {
    /// What happened since the last call.
    pub fn take(&mut self) -> Vec<Report> {
        let reports: Vec<Report> = self.receiver.try_iter().collect();
        for report in &reports {
            match report {
                Report::Attached { volume, device, .. } => {
                    self.devices.push((*volume, device.clone()));
                }
                Report::Detached { device } => self.devices.retain(|it| it.1 != *device),
                Report::Disconnected { volume } => self.devices.retain(|it| it.0 != *volume),
                _ => {}
            }
        }
        reports
    }

    /// The device of a volume.
    pub fn device(&self, volume: VolumeIndex) -> Option<&Path> {
        self.devices.iter().find(|device| device.0 == volume).map(|device| device.1.as_path())
    }

    /// The device of a volume is another's, or nobody's, by now.
    pub fn forget(&mut self, volume: VolumeIndex) {
        self.devices.retain(|it| it.0 != volume);
    }

    /// All of them.
    pub fn devices(&self) -> Vec<PathBuf> {
        self.devices.iter().map(|device| device.1.clone()).collect()
    }
}

/// What makes devices. Each kind has its own way to begin; the server runs from then on until
/// [`Report::Gone`].
pub trait Attachments {
    /// Begins to detach `devices`, each when its last holder closes it, and what they stand on.
    fn release(&mut self, devices: Vec<PathBuf>) -> io::Result<()>;

    /// Begins to detach one device if nobody holds it, and reports [`Report::Detached`], else
    /// [`Report::Held`] or [`Report::Kept`].
    fn try_release(&mut self, device: PathBuf) -> io::Result<()>;

    /// Begins to make the device of a volume that has grown as large as that, and reports [`Report::Resized`] or
    /// [`Report::NotResized`]. The front end knows the new size.
    fn resize(&mut self, device: PathBuf, volume: VolumeIndex, size_bytes: u64) -> io::Result<()>;

    /// Begins to have the kernel keep requests back until the next process takes the devices over, where it can; what is under way
    /// is answered still. Says whether [`Report::Quiesced`] will come.
    fn quiesce(&mut self) -> io::Result<bool> {
        Ok(false)
    }

    /// Looks whether others have taken a device away, and reports [`Report::Disconnected`] and [`Report::Detached`] when it is known. Waits for
    /// nothing.
    fn look(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Ends the wait for those who hold devices: what becomes of these when the process ends says
    /// [`Attachments::outlive`].
    fn give_up(&self);

    /// Whether the devices wait for the next process when this one ends; else those who use them get
    /// errors.
    fn outlive(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first one could not be opened, since it was gone: the others stayed, and nobody served them any more.
    #[test]
    fn a_device_that_cannot_be_ended_keeps_no_other() {
        let path = std::env::temp_dir().join(format!("forebay-detach-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let devices = vec![path.with_extension("gone"), path.clone(), path.clone()];
        let (teller, mut reports) = Teller::new(Arc::new(Bell::new().unwrap()));
        let mut ended = 0;
        let result = detach_each(
            devices,
            PathBuf::clone,
            (&teller, &once()),
            |_, error| error.kind(),
            |_, _| {
                ended += 1;
                if ended == 1 { Err(io::ErrorKind::Other) } else { Ok(()) }
            },
        );
        assert_eq!(result, Err(io::ErrorKind::NotFound), "the first error");
        assert_eq!(ended, 2);
        let reports = reports.take();
        let [Report::Detached { device }] = reports.as_slice() else { panic!("{reports:?}") };
        assert_eq!(*device, path);
        std::fs::remove_file(path).unwrap();
    }
}
