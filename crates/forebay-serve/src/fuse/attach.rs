// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loop devices over the mounted files, made and ended by a thread of their own (K1).

use super::mount::{FuseMount, FuseVolume};
use crate::attach::{Attachments, Claim, Report, Reports, Teller, Told, claim, spawn_apart};
use forebay::host::loop_device::{self, LoopDevice, LoopError, LoopOptions};
use forebay::host::machine::{Host, LoopBinding};
use forebay_core::units::VolumeIndex;
use std::error::Error;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How long, and how often at most, one waits for who holds a device and is not to be seen.
const MOMENT: Duration = Duration::from_millis(50);
const MOMENTS: u32 = 40;

/// How often it is looked whether a device is still held.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Between two such looks, how often those who hold it are sought; that reads all of `/proc`.
const SEEK_EACH: u32 = 20;

/// The devices of a mount.
pub struct FuseAttachments {
    mount: Arc<Mutex<Option<FuseMount>>>,
    /// When a thread apart has ended it: what it has open in this process is closed by this one.
    ended: Arc<Mutex<Option<FuseMount>>>,
    teller: Teller,
    is_given_up: Arc<AtomicBool>,
}

impl FuseAttachments {
    /// Begins to attach a device to each file. The server must be running, since the kernel reads
    /// partition tables at once.
    pub fn begin(mount: FuseMount) -> io::Result<(FuseAttachments, Reports)> {
        let (teller, reports) = Teller::new(mount.bell());
        let wanted: Vec<(FuseVolume, PathBuf)> =
            mount.volumes().iter().map(|volume| (volume.clone(), mount.file(volume))).collect();
        let attachments = FuseAttachments {
            mount: Arc::new(Mutex::new(Some(mount))),
            ended: Arc::default(),
            teller: teller.clone(),
            is_given_up: Arc::default(),
        };
        let is_given_up = Arc::clone(&attachments.is_given_up);
        let bell = teller.bell();
        spawn_apart("attach", &[bell.as_fd()], move || {
            for (volume, file) in wanted {
                if !is_given_up.load(Ordering::Relaxed) {
                    teller.tell(attach(&volume, &file));
                }
            }
            teller.tell(Report::Ready);
        })?;
        Ok((attachments, reports))
    }
}

impl Attachments for FuseAttachments {
    /// The mount goes after the devices.
    fn release(&mut self, devices: Vec<PathBuf>) -> io::Result<()> {
        let (mount, ended) = (Arc::clone(&self.mount), Arc::downgrade(&self.ended));
        let teller = self.teller.clone();
        let is_given_up = Arc::clone(&self.is_given_up);
        let bell = teller.bell();
        let held = self.mount.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = held.as_ref().and_then(FuseMount::lease);
        let kept: Vec<_> = lease.into_iter().chain([bell.as_fd()]).collect();
        spawn_apart("detach", &kept, move || {
            release(devices, (&mount, &ended), &teller, &is_given_up);
        })
    }

    /// The mount goes with the last of its devices.
    fn try_release(&mut self, device: PathBuf) -> io::Result<()> {
        let (mount, ended) = (Arc::downgrade(&self.mount), Arc::downgrade(&self.ended));
        let teller = self.teller.clone();
        let bell = teller.bell();
        let held = self.mount.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = held.as_ref().map(|mount| mount.directory().to_owned());
        let lease = held.as_ref().and_then(FuseMount::lease);
        let kept: Vec<_> = lease.into_iter().chain([bell.as_fd()]).collect();
        spawn_apart("detach", &kept, move || {
            let is_ours = directory.as_ref().is_some_and(|directory| is_over(directory, &device));
            let report = if is_ours { try_detach(device) } else { Report::Detached { device } };
            let is_last = directory.is_some_and(|directory| !has_devices(&directory));
            if matches!(report, Report::Detached { .. })
                && is_last
                && let Some(gone) = end_for_owner(&mount, &ended)
            {
                teller.tell(Report::Gone(gone));
            }
            // Who waits for that finds the mount gone.
            teller.tell(report);
        })
    }

    fn resize(&mut self, device: PathBuf, volume: VolumeIndex, _: u64) -> io::Result<()> {
        let teller = self.teller.clone();
        let bell = teller.bell();
        spawn_apart("resize", &[bell.as_fd()], move || {
            teller.tell(match loop_device::refresh_size(&device) {
                Ok(()) => Report::Resized { volume },
                Err(error) => Report::NotResized { volume, error: error.into() },
            });
        })
    }

    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    fn outlive(&self) -> bool {
        let mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner);
        // Of one that has ended nothing ends with the process.
        mount.as_ref().is_none_or(FuseMount::is_kept)
    }
}

/// Attaches a device, or finds the one that a daemon before has attached.
fn attach(volume: &FuseVolume, file: &Path) -> Report {
    if let Some(device) = attached_before(volume, file) {
        return match device {
            Ok(device) => {
                limit(&device);
                Report::Attached { volume: volume.index, device, warning: None }
            }
            Err(error) => Report::Failed { volume: volume.index, error },
        };
    }
    let options = LoopOptions {
        direct_io: true,
        partition_scan: true,
        block_size: volume.logical_block,
        ..LoopOptions::default()
    };
    match LoopDevice::attach(file, options) {
        Ok(device) => {
            limit(device.path());
            let twice = "direct I/O is refused, so each block is in memory twice";
            let warning = (!device.is_direct()).then(|| twice.to_owned());
            // The device is closed here: K2.
            Report::Attached { volume: volume.index, device: device.path().into(), warning }
        }
        Err(error) => Report::Failed { volume: volume.index, error: Box::new(error) },
    }
}

/// The device over a file that is a volume's. Its number says so: the name may have been another
/// volume's before.
fn attached_before(
    volume: &FuseVolume,
    file: &Path,
) -> Option<Result<PathBuf, Box<dyn Error + Send + Sync>>> {
    let loops = Host::default().loops();
    let found = loops.into_iter().find(|found| found.backing_file == file)?;
    let device = Path::new("/dev").join(&found.node.name);
    let sectors = found.node.attribute("size").and_then(|text| text.parse::<u64>().ok());
    Some(match loop_device::backing_inode(&device) {
        Err(error) => Err(error.into()),
        // The volume may have grown.
        Ok(inode)
            if inode == volume.node()
                && sectors.is_some()
                && sectors <= Some(volume.size_bytes / 512) =>
        {
            let is_small = sectors < Some(volume.size_bytes / 512);
            let resized = if is_small { loop_device::refresh_size(&device) } else { Ok(()) };
            let kept = resized.and_then(|()| loop_device::stay_attached(&device));
            kept.map(|()| device).map_err(Into::into)
        }
        Ok(_) => {
            let device = device.display();
            Err(format!(
                "{device} is over what this volume was before; close it, then stop and serve again"
            )
            .into())
        }
    })
}

/// Best effort: a request is one FUSE request.
fn limit(device: &Path) {
    let Some(name) = device.file_name() else { return };
    let queue = Path::new("/sys/block").join(name).join("queue");
    let _ = fs::write(queue.join("max_sectors_kb"), "1024");
}

/// Ends the mount, if nobody else does, and leaves what it has open to the one who has it open. Nobody is kept waiting for the
/// lock meanwhile: the kernel may ask the loop for something.
fn end_for_owner(
    mount: &Weak<Mutex<Option<FuseMount>>>,
    ended: &Weak<Mutex<Option<FuseMount>>>,
) -> Option<io::Result<()>> {
    let (mount, ended) = (mount.upgrade()?, ended.upgrade()?);
    let taken = mount.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    let result = taken.end();
    leave_to_owner(taken, &ended);
    Some(result)
}

fn leave_to_owner(taken: FuseMount, ended: &Mutex<Option<FuseMount>>) {
    *ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(taken);
}

/// Whether any device is over one of our files.
fn has_devices(directory: &Path) -> bool {
    Host::default().loops().iter().any(|found| found.backing_file.starts_with(directory))
}

/// Whether a device is over one of our files. If not, somebody has detached it, and who has it now is not asked to close it.
fn is_over(directory: &Path, device: &Path) -> bool {
    let is_it = |found: &LoopBinding| Path::new("/dev").join(&found.node.name) == device;
    Host::default()
        .loops()
        .iter()
        .any(|found| is_it(found) && found.backing_file.starts_with(directory))
}

/// The claim ends before the device does: who takes it in between keeps it until they close it. Whoever looks what is on a device has it
/// open for a moment, and is gone when one looks who that was: that is waited for.
fn try_detach(device: PathBuf) -> Report {
    for looks_left in (0..MOMENTS).rev() {
        match claim(&device) {
            Ok(Claim::Ours(claimed)) => {
                drop(claimed);
                break;
            }
            Ok(Claim::Held(holders)) if holders.is_empty() && looks_left > 0 => {
                std::thread::sleep(MOMENT);
            }
            Ok(Claim::Held(holders)) => return Report::Held { device, holders },
            Err(error) => return Report::Kept { device, error: error.into() },
        }
    }
    match loop_device::detach(&device) {
        Ok(()) => Report::Detached { device },
        Err(LoopError::StillHeld { holders, .. }) => Report::Held { device, holders },
        Err(error) => Report::Kept { device, error: error.into() },
    }
}

fn release(
    mut devices: Vec<PathBuf>,
    (mount, ended): (&Mutex<Option<FuseMount>>, &Weak<Mutex<Option<FuseMount>>>),
    teller: &Teller,
    is_given_up: &AtomicBool,
) {
    let Some(mount) = mount.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    let host = Host::default();
    let still = |device: &Path| is_over(mount.directory(), device);
    let mut told = Told::default();
    for device in devices.iter().filter(|device| still(device)) {
        if let Err(LoopError::StillHeld { holders, .. }) = loop_device::detach(device) {
            told.tell(device, holders, teller);
        }
    }
    // Bounded by the holders' patience and the daemon's.
    for look in 1u32.. {
        devices.retain(|device| {
            if still(device) {
                return true;
            }
            teller.tell(Report::Detached { device: device.clone() });
            false
        });
        if devices.is_empty() {
            let result = mount.end();
            // Its owner may be gone, with the process in a moment.
            if let Some(ended) = ended.upgrade() {
                leave_to_owner(mount, &ended);
            }
            return teller.tell(Report::Gone(result));
        }
        if is_given_up.load(Ordering::Relaxed) {
            return teller.tell(Report::Gone(mount.abandon()));
        }
        if look.is_multiple_of(SEEK_EACH) {
            for device in &devices {
                tell_holders(&host, device, &mut told, teller);
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn tell_holders(host: &Host, device: &Path, told: &mut Told, teller: &Teller) {
    let Some(node) = host.node_at_path(device) else { return };
    told.tell(device, loop_device::holders(host, node.number), teller);
}
