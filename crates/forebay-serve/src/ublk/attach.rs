// SPDX-License-Identifier: Apache-2.0 OR MIT
//! ublk devices of volumes: made, or taken over from a process that is gone, and ended.
//!
//! # States
//!
//! As the kernel has them.
//!
//! | from     | to       | by                                                          |
//! |----------|----------|-------------------------------------------------------------|
//! | none     | dead     | [`prepare`]: added, and its parameters set                  |
//! | dead     | live     | the thread `attach`, while the loop fetches                 |
//! | live     | quiesced | the process ends: killed, or without a release              |
//! | quiesced | live     | [`prepare`] of the next process, then its thread `attach`   |
//! | live     | dead     | the thread `detach`, when nobody holds the block device     |
//! | dead     | none     | the same, when the front end has let go of it               |
//! | live     | none     | others, and maybe the thread `gone` on the last bit of the way |

use super::control::{Control, UblkError, block_path, open_serving};
use super::front_end::{Device, UblkFrontEnd};
use super::queue::Queue;
use super::wire::{DeviceInfo, Parameters, State, feature};
use crate::attach::{Attachments, DeviceVolume, Geometry, Report, Reports, Teller};
use crate::attach::{detach_each, once, spawn, spawn_apart};
use forebay::io::Bell;
use forebay::shard::drivers_buffers_of;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const SECTOR_BYTES: u64 = 512;
/// Longest discard and longest zeroing, as the kernel splits them for most disks.
const RANGE_SECTORS_MAX: u32 = u32::MAX / SECTOR_BYTES as u32;
/// How long others may take to remove a device that they have stopped.
const REMOVING: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long the front end may take to let go of a stopped device.
const LET_GO: Duration = Duration::from_secs(60);

/// What the kernel keeps with a volume's device (U2): never 0, which others have.
fn mark(uuid: &[u8; 16]) -> u64 {
    let (high, low) = uuid.split_at(8);
    let fold = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    (fold(high) ^ fold(low)).max(1)
}

fn parameters(volume: &DeviceVolume, request_bytes_max: u64) -> Parameters {
    let block = u64::from(volume.logical_block);
    Parameters {
        sectors: volume.size_bytes / block * block / SECTOR_BYTES,
        logical_shift: volume.logical_block.trailing_zeros() as u8,
        physical_shift: BLOCK_BYTES.trailing_zeros() as u8,
        io_min_shift: BLOCK_BYTES.trailing_zeros() as u8,
        io_opt_shift: request_bytes_max.trailing_zeros() as u8,
        request_sectors_max: (request_bytes_max / SECTOR_BYTES) as u32,
        range_sectors_max: RANGE_SECTORS_MAX,
        discard_granularity: BLOCK_BYTES as u32,
    }
}

/// A device whose fetches are about to begin.
struct Prepared {
    volume: VolumeIndex,
    number: u32,
    depth: u16,
    /// As it was made, if it is taken over.
    taken_over: Option<Parameters>,
    sectors: u64,
    outlives: bool,
}

/// A device that is served.
#[derive(Clone)]
struct Served {
    volume: VolumeIndex,
    number: u32,
    /// What it is known by: others have the number when it is gone.
    mark: u64,
    logical_block: u32,
    /// The front end has closed it.
    is_let_go: Arc<AtomicBool>,
    /// That is known, or meant: this process ends it, or has its requests kept back for the next.
    is_ending: Arc<AtomicBool>,
}

/// The devices.
pub struct UblkAttachments {
    served: Arc<Mutex<Vec<Served>>>,
    teller: Teller,
    is_given_up: Arc<AtomicBool>,
    outlive: bool,
}

type Made = Result<(Prepared, Queue), UblkError>;

/// Devices that are made, or are being taken over, and that nobody serves yet.
pub struct Ready {
    control: Control,
    devices: Vec<(DeviceVolume, Made)>,
}

/// Makes a device of each volume, or takes the one over that it has. That may wait for the driver, and for a process that is ending; not on the
/// loop's thread (K1).
pub fn prepare(mut control: Control, volumes: Vec<DeviceVolume>) -> Ready {
    let one = |volume: DeviceVolume| {
        let prepared = prepare_one(&mut control, &volume);
        (volume, prepared)
    };
    let devices = volumes.into_iter().map(one).collect();
    Ready { control, devices }
}

/// Begins to start them: that ends when the front end is part of a running server.
pub fn begin(ready: Ready) -> io::Result<(UblkAttachments, UblkFrontEnd, Reports)> {
    let bell = Arc::new(Bell::new()?);
    let (teller, reports) = Teller::new(Arc::clone(&bell));
    let (mut prepared, mut served, mut devices) = (Vec::new(), Vec::new(), Vec::new());
    let Ready { mut control, devices: made } = ready;
    for (volume, made) in made {
        match made {
            Ok((it, queue)) => {
                let (device, is_let_go) = Device::new(queue, volume.index);
                devices.push(device);
                let logical_block = volume.logical_block;
                let mark = mark(&volume.uuid);
                let (volume, number, is_ending) = (volume.index, it.number, Arc::default());
                served.push(Served { volume, number, mark, logical_block, is_let_go, is_ending });
                prepared.push(it);
            }
            Err(error) => {
                let (volume, error) = (volume.index, error.into());
                teller.tell(Report::Failed { volume, error });
            }
        }
    }
    let front_end = UblkFrontEnd::new(devices, bell)?;
    let outlive = control.outlive();
    let (served, is_given_up) = (Arc::new(Mutex::new(served)), Arc::default());
    let attachments = UblkAttachments { served, teller: teller.clone(), is_given_up, outlive };
    spawn("attach", move || {
        for device in prepared {
            teller.tell(attach(&mut control, &device));
        }
        teller.tell(Report::Ready);
    })?;
    Ok((attachments, front_end, reports))
}

/// The device of a volume that waits for the next process, or is served by one. One that was never started is none.
pub fn left(control: &mut Control, uuid: &[u8; 16]) -> Result<Option<PathBuf>, UblkError> {
    let found = control.find(mark(uuid))?.filter(|found| found.state != State::Dead);
    Ok(found.map(|found| block_path(found.number)))
}

fn prepare_one(control: &mut Control, volume: &DeviceVolume) -> Made {
    let found = match control.find(mark(&volume.uuid))? {
        // Made, and never started: its process was killed in between.
        Some(DeviceInfo { state: State::Dead, number, .. }) => {
            control.delete(number)?;
            None
        }
        found => found,
    };
    let parameters = parameters(volume, control.request_bytes_max());
    let (made, taken_over) = match found {
        None => (control.add(mark(&volume.uuid), &parameters, volume.lends)?, None),
        Some(found) => {
            let before = control.parameters(found.number)?;
            check_alike(found.number, before, parameters)?;
            control.start_recovery(&found)?;
            (found, Some(before))
        }
    };
    let (number, depth) = (made.number, made.queue_depth);
    let has_user_copy = made.features & feature::USER_COPY != 0;
    let buffer_bytes = (!has_user_copy).then_some(made.request_bytes_max);
    let lends = made.features & feature::AUTO_BUFFERS != 0;
    let queue = open_serving(number).and_then(|file| {
        let queue = Queue::map(file, depth, buffer_bytes).map_err(|source| {
            let device = block_path(number).display().to_string();
            UblkError::Command { device, attempted: "mapped", source }
        })?;
        // A device that was made by another process may lend what this one would not have asked for (U5).
        Ok(if lends { queue.lent_from(drivers_buffers_of(volume.index)) } else { queue })
    });
    if queue.is_err() && taken_over.is_none() {
        // Nobody has it; the error is what matters.
        let _ = control.delete(number);
    }
    let (volume, sectors) = (volume.index, parameters.sectors);
    let outlives = made.features & feature::USER_RECOVERY != 0;
    Ok((Prepared { volume, number, depth, taken_over, sectors, outlives }, queue?))
}

/// A device that is taken over stays as it was made, or grows with its volume.
fn check_alike(number: u32, found: Parameters, expected: Parameters) -> Result<(), UblkError> {
    let geometry = |it: Parameters| Geometry {
        size_bytes: it.sectors * SECTOR_BYTES,
        logical_block: 1 << it.logical_shift.min(63),
    };
    let (found, expected) = (geometry(found), geometry(expected));
    if found.may_serve(expected) {
        return Ok(());
    }
    let device = block_path(number).display().to_string();
    Err(UblkError::Differs { device, found, expected })
}

fn attach(control: &mut Control, device: &Prepared) -> Report {
    let &Prepared { volume, number, depth, taken_over, sectors, outlives } = device;
    let started = match taken_over {
        Some(_) => control.end_recovery(number),
        None => control.start(number),
    };
    match started {
        Ok(()) => {
            tune(number, depth);
            let is_small = taken_over.is_some_and(|before| before.sectors < sectors);
            let resized = if is_small { control.resize(number, sectors) } else { Ok(()) };
            let ends = "ends with this process: the driver gives recovery to root alone";
            let warning = resized.err().map(|error| error.to_string());
            let warning = warning.or_else(|| (!outlives).then(|| ends.into()));
            Report::Attached { volume, device: block_path(number), warning }
        }
        Err(error) => {
            if taken_over.is_none() {
                // It is of no use; the error is what matters.
                let _ = control.delete(number);
            }
            Report::Failed { volume, error: error.into() }
        }
    }
}

/// Best effort. The engine sorts what it writes back, so there is nothing for a scheduler to do. And
/// one tag is always left to the kernel: until Linux 6.15 it sees by those that a process is gone.
fn tune(number: u32, depth: u16) {
    let queue = PathBuf::from(format!("/sys/block/ublkb{number}/queue"));
    let _ = fs::write(queue.join("scheduler"), "none");
    let _ = fs::write(queue.join("nr_requests"), (depth - 1).to_string());
}

/// For a moment each time, so that the loop's thread may.
fn lock(served: &Mutex<Vec<Served>>) -> MutexGuard<'_, Vec<Served>> {
    served.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UblkAttachments {
    /// Ends devices on a thread of their own, which tells `ended` what became of it.
    fn detach(
        &self,
        devices: &[PathBuf],
        is_given_up: Arc<AtomicBool>,
        ended: impl FnOnce(&Teller, Result<(), UblkError>) + Send + 'static,
    ) -> io::Result<()> {
        let is_one = |it: &&Served| devices.contains(&block_path(it.number));
        let all = Arc::clone(&self.served);
        let served: Vec<Served> = lock(&all).iter().filter(is_one).cloned().collect();
        let teller = self.teller.clone();
        let bell = teller.bell();
        spawn_apart("detach", &[bell.as_fd()], move || {
            let path = |it: &Served| block_path(it.number);
            let refused = |device, source| UblkError::Command {
                device,
                attempted: "closed by others",
                source,
            };
            let result = Control::open().and_then(|mut control| {
                let is_there = |it: &Served| control.has(it.number, it.mark);
                let (served, gone): (Vec<_>, Vec<_>) = served.into_iter().partition(is_there);
                for device in gone {
                    // Others have removed it: its file is gone, or is another's.
                    lock(&all).retain(|it| (it.number, it.mark) != (device.number, device.mark));
                    teller.tell(Report::Detached { device: path(&device) });
                }
                detach_each(served, path, (&teller, &is_given_up), refused, |device, claim| {
                    end(&mut control, device, claim)?;
                    lock(&all).retain(|it| (it.number, it.mark) != (device.number, device.mark));
                    Ok(())
                })
            });
            ended(&teller, result);
        })
    }
}

impl Attachments for UblkAttachments {
    fn release(&mut self, devices: Vec<PathBuf>) -> io::Result<()> {
        self.detach(&devices, Arc::clone(&self.is_given_up), |teller, result| {
            teller.tell(Report::Gone(result.map_err(io::Error::other)));
        })
    }

    fn try_release(&mut self, device: PathBuf) -> io::Result<()> {
        let known = device.clone();
        self.detach(&[known], once(), |teller, result| {
            if let Err(error) = result {
                teller.tell(Report::Kept { device, error: error.into() });
            }
        })
    }

    fn resize(&mut self, device: PathBuf, volume: VolumeIndex, size_bytes: u64) -> io::Result<()> {
        let served = lock(&self.served).iter().find(|it| block_path(it.number) == device).cloned();
        let Some(Served { number, logical_block, .. }) = served else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let teller = self.teller.clone();
        let block = u64::from(logical_block);
        let sectors = size_bytes / block * block / SECTOR_BYTES;
        spawn("resize", move || {
            let resized = Control::open().and_then(|mut it| it.resize(number, sectors));
            teller.tell(match resized {
                Ok(()) => Report::Resized { volume },
                Err(error) => Report::NotResized { volume, error: error.into() },
            });
        })
    }

    fn quiesce(&mut self) -> io::Result<bool> {
        let served = lock(&self.served).clone();
        served.iter().for_each(|it| it.is_ending.store(true, Ordering::Relaxed));
        let teller = self.teller.clone();
        spawn("quiesce", move || {
            // One that cannot be kept back is taken over all the same: its requests come again.
            if let Ok(mut control) = Control::open() {
                for Served { number, mark, .. } in served {
                    if control.has(number, mark) {
                        control.quiesce(number);
                    }
                }
            }
            teller.tell(Report::Quiesced);
        })?;
        Ok(true)
    }

    fn look(&mut self) -> io::Result<()> {
        let is_gone = |it: &&Served| {
            it.is_let_go.load(Ordering::Acquire) && !it.is_ending.load(Ordering::Relaxed)
        };
        let gone: Vec<Served> = lock(&self.served).iter().filter(is_gone).cloned().collect();
        if gone.is_empty() {
            return Ok(());
        }
        let (all, teller, its) = (Arc::clone(&self.served), self.teller.clone(), gone.clone());
        spawn("gone", move || {
            for device in its.into_iter().filter(is_removed) {
                lock(&all).retain(|it| (it.number, it.mark) != (device.number, device.mark));
                teller.tell(Report::Disconnected { volume: device.volume });
                teller.tell(Report::Detached { device: block_path(device.number) });
            }
        })?;
        gone.iter().for_each(|it| it.is_ending.store(true, Ordering::Relaxed));
        Ok(())
    }

    fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    fn outlive(&self) -> bool {
        self.outlive
    }
}

/// Whether others have removed a device that was let go of; what they have stopped and left is removed. One that waits for another process stays.
fn is_removed(device: &Served) -> bool {
    // The driver may have gone with it.
    let Ok(mut control) = Control::open() else { return true };
    let begun = Instant::now();
    while control.has(device.number, device.mark) {
        if begun.elapsed() >= REMOVING {
            return control.is_dead(device.number) && control.delete(device.number).is_ok();
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    true
}

fn end(control: &mut Control, device: &Served, claim: File) -> Result<(), UblkError> {
    if !control.has(device.number, device.mark) {
        return Ok(());
    }
    device.is_ending.store(true, Ordering::Relaxed);
    // It stays then, and others may remove it.
    control
        .stop(device.number)
        .inspect_err(|_| device.is_ending.store(false, Ordering::Relaxed))?;
    drop(claim);
    let begun = Instant::now();
    while !device.is_let_go.load(Ordering::Acquire) && begun.elapsed() < LET_GO {
        std::thread::sleep(Duration::from_millis(1));
    }
    control.delete(device.number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn volume(size_bytes: u64, logical_block: u32) -> DeviceVolume {
        DeviceVolume {
            index: VolumeIndex(0),
            uuid: [0; 16],
            size_bytes,
            logical_block,
            lends: false,
        }
    }

    fn of(volume: &DeviceVolume) -> Parameters {
        parameters(volume, 1 << 20)
    }

    #[test]
    fn a_device_is_as_large_as_whole_logical_blocks_of_its_volume() {
        let size = 10 * 4096 + 512;
        assert_eq!(of(&volume(size, 512)).sectors, 81);
        assert_eq!(of(&volume(size, 4096)).sectors, 80);
        let found = of(&volume(size, 4096));
        assert_eq!((found.logical_shift, found.physical_shift), (12, 12));
        assert_eq!(of(&volume(size, 512)).logical_shift, 9);
        assert_eq!(found.request_sectors_max, 2048);
    }

    /// It was found when the volume was detached, and until then `status` told of a device that was not there.
    #[test]
    fn a_device_that_others_have_removed_is_told_once() {
        let (teller, mut reports) = Teller::new(Arc::new(Bell::new().unwrap()));
        // No machine has so many.
        let device = |number: u32| Served {
            volume: VolumeIndex(number as u8),
            number: (1 << 30) + number,
            mark: 1,
            logical_block: 512,
            is_let_go: Arc::default(),
            is_ending: Arc::default(),
        };
        let served: Vec<Served> = (0..3).map(device).collect();
        for it in &served {
            let (volume, device) = (it.volume, block_path(it.number));
            teller.tell(Report::Attached { volume, device, warning: None });
        }
        let (served, is_given_up) = (Arc::new(Mutex::new(served)), Arc::default());
        let mut all = UblkAttachments { served, teller, is_given_up, outlive: true };
        all.look().unwrap();
        assert_eq!(reports.take().len(), 3, "all are served");
        // One is gone, and one is let go of since this process ends it.
        let known = lock(&all.served).clone();
        known[0].is_let_go.store(true, Ordering::Release);
        known[2].is_ending.store(true, Ordering::Relaxed);
        known[2].is_let_go.store(true, Ordering::Release);
        let mut told = Vec::new();
        forebay_testing::wait_for("it is told", || {
            all.look().unwrap();
            told.extend(reports.take());
            told.len() >= 2
        });
        all.look().unwrap();
        told.extend(reports.take());
        let path = block_path(1 << 30);
        let [Report::Disconnected { volume }, Report::Detached { device }] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!((*volume, device), (VolumeIndex(0), &path));
        assert!(reports.device(VolumeIndex(0)).is_none() && reports.devices().len() == 2);
        assert_eq!(lock(&all.served).len(), 2);
    }

    #[test]
    fn marks_of_different_volumes_differ_and_none_is_zero() {
        let with = |at: usize| {
            let mut uuid = [0; 16];
            uuid[at] = 1;
            mark(&uuid)
        };
        assert_eq!(mark(&[0; 16]), 1);
        assert_eq!(with(0), 1 << 56);
        assert_eq!(with(14), 1 << 8);
        assert_ne!(with(3), with(4));
    }

    #[test]
    fn a_device_that_is_larger_or_of_another_block_is_not_taken_over() {
        let expected = of(&volume(1 << 30, 512));
        let differs = |it: &DeviceVolume| check_alike(3, of(it), expected).is_err();
        assert!(!differs(&volume(1 << 30, 512)));
        assert!(!differs(&volume(1 << 29, 512)), "the volume has grown");
        assert!(differs(&volume(1 << 31, 512)));
        assert!(differs(&volume(1 << 30, 4096)));
        let text = check_alike(3, of(&volume(1 << 31, 4096)), expected).unwrap_err();
        assert!(text.to_string().contains("/dev/ublkb3"), "{text}");
    }
}
