// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loop devices over the mounted files, made and ended by a thread of their own (K1).

use super::mount::{FuseMount, FuseVolume};
use crate::attach::{Attachments, Report, Reports, Teller, spawn};
use forebay::host::loop_device::{self, Holder, LoopDevice, LoopError, LoopOptions};
use forebay::host::machine::Host;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often it is looked whether a device is still held.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Between two such looks, how often those who hold it are sought; that reads all of `/proc`.
const SEEK_EACH: u32 = 20;

/// The devices of a mount.
pub struct FuseAttachments {
    mount: Arc<Mutex<Option<FuseMount>>>,
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
            teller: teller.clone(),
            is_given_up: Arc::default(),
        };
        let is_given_up = Arc::clone(&attachments.is_given_up);
        spawn("attach", move || {
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
        let (mount, teller) = (Arc::clone(&self.mount), self.teller.clone());
        let is_given_up = Arc::clone(&self.is_given_up);
        spawn("detach", move || {
            release(devices, &mount, &teller, &is_given_up);
        })
    }

    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }
}

fn attach(volume: &FuseVolume, file: &Path) -> Report {
    let options = LoopOptions {
        direct_io: true,
        partition_scan: true,
        block_size: volume.logical_block,
        ..LoopOptions::default()
    };
    match LoopDevice::attach(file, options) {
        Ok(device) => {
            limit(device.path(), volume);
            let twice = "direct I/O is refused, so each block is in memory twice";
            let warning = (!device.is_direct()).then(|| twice.to_owned());
            // The device is closed here: K2.
            Report::Attached { volume: volume.index, device: device.path().into(), warning }
        }
        Err(error) => Report::Failed { volume: volume.index, error: Box::new(error) },
    }
}

/// Best effort: a request is one FUSE request, and discards are offered only if they are kept.
fn limit(device: &Path, volume: &FuseVolume) {
    let Some(name) = device.file_name() else { return };
    let queue = Path::new("/sys/block").join(name).join("queue");
    let _ = fs::write(queue.join("max_sectors_kb"), "1024");
    if !volume.discards_to_zero {
        let _ = fs::write(queue.join("discard_max_bytes"), "0");
    }
}

fn release(
    mut devices: Vec<PathBuf>,
    mount: &Mutex<Option<FuseMount>>,
    teller: &Teller,
    is_given_up: &AtomicBool,
) {
    let Some(mount) = mount.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    let host = Host::default();
    let still = |device: &Path| {
        host.loops().iter().any(|found| {
            Path::new("/dev").join(&found.node.name) == device && mount.holds(&found.backing_file)
        })
    };
    let mut told: Vec<(PathBuf, Vec<Holder>)> = Vec::new();
    devices.retain(|device| match loop_device::detach(device) {
        Err(LoopError::StillHeld { holders, .. }) => {
            told.push((device.clone(), holders.clone()));
            teller.tell(Report::Held { device: device.clone(), holders });
            true
        }
        // Detached, by us or by somebody before.
        _ if !still(device) => {
            teller.tell(Report::Detached { device: device.clone() });
            false
        }
        _ => true,
    });
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
            return teller.tell(Report::Gone(mount.end()));
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

fn tell_holders(
    host: &Host,
    device: &Path,
    told: &mut Vec<(PathBuf, Vec<Holder>)>,
    teller: &Teller,
) {
    let Some(node) = host.node_at_path(device) else { return };
    let holders = loop_device::holders(host, node.number);
    match told.iter_mut().find(|entry| entry.0 == device) {
        Some(entry) if entry.1 == holders => return,
        Some(entry) => entry.1.clone_from(&holders),
        None => told.push((device.into(), holders.clone())),
    }
    teller.tell(Report::Held { device: device.into(), holders });
}
