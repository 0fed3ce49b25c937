// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's control device: making, starting, taking over and ending devices.
//!
//! Every command here may block, some until the loop has served requests (K1 in [`crate::attach`]).

use super::ring::Ring;
use super::wire::{self, ANY_DEVICE, DeviceInfo, Parameters, State, feature};
use crate::attach::Geometry;
use forebay_core::limits::REQUEST_BYTES_MAX;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CONTROL: &str = "/dev/ublk-control";
const DEVICES: &str = "/sys/class/ublk-char";
/// What a device must be able to do, by name.
const NEEDED: [(u64, &str); 3] = [
    (feature::USER_RECOVERY, "user recovery"),
    (feature::USER_RECOVERY_REISSUE, "user recovery with reissue"),
    (feature::COMMAND_ENCODING, "encoded commands"),
];
/// The same for one of a user without privileges, which the driver lets have no recovery and no user copy.
const NEEDED_UNPRIVILEGED: [(u64, &str); 2] = [
    (feature::COMMAND_ENCODING, "encoded commands"),
    (feature::UNPRIVILEGED, "devices of users without privileges"),
];
/// What is used where it is there.
const WELCOME: u64 = feature::USER_COPY | feature::QUIESCE;
/// What the driver must have to lend requests (U5).
const LENDING: u64 = feature::AUTO_BUFFERS | feature::BUFFERS_OFF_DAEMON | feature::USER_COPY;
/// How long a command may take that waits for requests to be served.
const LONG: Duration = Duration::from_secs(60);
/// How long the kernel waits for a request to be answered before it keeps back others.
const QUIESCING_MS: u64 = 1000;
/// How long the kernel may take to notice that a device's process is gone.
const DYING: Duration = Duration::from_secs(60);
/// How long udev may take to make a device's file what its rules say.
const OPENING: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Why a device cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UblkError {
    /// The control device cannot be used.
    #[error("{CONTROL}: cannot be used")]
    Control(#[source] io::Error),
    /// The driver is too old.
    #[error("the kernel's ublk driver lacks {0}; Linux 6.5 has it")]
    Lacks(&'static str),
    /// The driver cannot change the size of a device that is used.
    #[error(
        "{device}: keeps its size, since the kernel's ublk driver cannot change that (Linux 6.16 can); \
         close it, then stop and serve again"
    )]
    KeepsSize {
        /// `/dev/ublkb3`.
        device: String,
    },
    /// A command was refused.
    #[error("{device}: cannot be {attempted}")]
    Command {
        /// `/dev/ublkb3`, or what there is no device of yet.
        device: String,
        /// `started`, `taken over` …
        attempted: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The process before still has it.
    #[error("{device}: is still served by process {process}; stop that one first")]
    Served {
        /// `/dev/ublkb3`.
        device: String,
        /// Its process.
        process: i32,
    },
    /// It is of the same volume, yet not alike.
    #[error(
        "{device}: was made for {found}, the volume has {expected}; \
         close it; a reboot takes it away, and so does ublksrv's `ublk del`, and the next start makes it new"
    )]
    Differs {
        /// `/dev/ublkb3`.
        device: String,
        /// What it is.
        found: Geometry,
        /// What the volume asks for.
        expected: Geometry,
    },
}

/// `/dev/ublkb3`, the block device.
pub(super) fn block_path(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

/// `/dev/ublkc3`, the driver's file by which it is served.
pub(super) fn serving_path(number: u32) -> PathBuf {
    format!("/dev/ublkc{number}").into()
}

/// The control device, open.
pub struct Control {
    ring: Ring,
    /// What devices are made with.
    features: u64,
    /// Whether they can be made so that requests are lent.
    can_lend: bool,
}

impl Control {
    /// Opens it. What the driver must be able to do is asked for.
    pub fn open() -> Result<Control, UblkError> {
        let is_root = rustix::process::geteuid().is_root();
        let open = || -> io::Result<Ring> {
            Ring::new(OpenOptions::new().read(true).write(true).open(CONTROL)?, !is_root)
        };
        let ring = open().map_err(UblkError::Control)?;
        let mut control = Control { ring, features: 0, can_lend: false };
        let features = control.features().map_err(|error| match error.raw_os_error() {
            // Before GET_FEATURES there was nothing else that we need either.
            Some(_) => UblkError::Lacks("the command that tells what it can do"),
            None => UblkError::Control(error),
        })?;
        let needed = if is_root { &NEEDED[..] } else { &NEEDED_UNPRIVILEGED };
        for (bit, name) in needed {
            if features & bit == 0 {
                return Err(UblkError::Lacks(name));
            }
            control.features |= bit;
        }
        if is_root {
            control.features |= features & WELCOME;
            control.can_lend = features & LENDING == LENDING;
        }
        Ok(control)
    }

    /// The longest request of a device that is made.
    pub(super) fn request_bytes_max(&self) -> u64 {
        let has_user_copy = self.features & feature::USER_COPY != 0;
        if has_user_copy { REQUEST_BYTES_MAX } else { super::BUFFER_BYTES_MAX }
    }

    /// Whether devices that are made wait for the next process when this one ends.
    pub(super) fn outlive(&self) -> bool {
        self.features & feature::USER_RECOVERY != 0
    }

    fn features(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.ring.exchange(wire::GET_FEATURES, ANY_DEVICE, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Makes a device, to be started. `lends`: its requests are lent, if they can be.
    pub(super) fn add(
        &mut self,
        mark: u64,
        parameters: &Parameters,
        lends: bool,
    ) -> Result<DeviceInfo, UblkError> {
        let lending = if lends && self.can_lend { feature::AUTO_BUFFERS } else { 0 };
        let info = DeviceInfo {
            queue_depth: super::QUEUE_DEPTH,
            state: State::Dead,
            request_bytes_max: parameters.request_sectors_max * 512,
            number: ANY_DEVICE,
            process: -1,
            features: self.features | lending,
            mark,
        };
        let mut bytes = info.encode();
        let failed = |source| {
            let device = "a ublk device".into();
            UblkError::Command { device, attempted: "made", source }
        };
        match self.ring.exchange(wire::ADD_DEVICE, ANY_DEVICE, &mut bytes) {
            // A driver may lend only what is not copied as well.
            Err(error) if lending != 0 && error.kind() == io::ErrorKind::InvalidInput => {
                return self.add(mark, parameters, false);
            }
            other => other.map_err(failed)?,
        }
        let made = DeviceInfo::decode(&bytes);
        let made = made.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        if self.features & feature::UNPRIVILEGED != 0 {
            // Before it has its file, no user may say anything of a device; if it never gets that, nor may it delete the device.
            await_file(made.number)?;
        }
        let set = self.ring.exchange(wire::SET_PARAMETERS, made.number, &mut parameters.encode());
        if made.features & self.features != self.features || set.is_err() {
            // Without a start it is nobody's; the error is what matters.
            let _ = self.delete(made.number);
            set.map_err(failed)?;
            return Err(UblkError::Lacks("what it says that it can do"));
        }
        Ok(made)
    }

    /// The devices of this machine with that mark.
    pub(super) fn find(&mut self, mark: u64) -> Result<Option<DeviceInfo>, UblkError> {
        for number in numbers().map_err(UblkError::Control)? {
            // One that has just gone is none.
            if let Ok(Some(info)) = self.info(number)
                && info.mark == mark
            {
                return Ok(Some(info));
            }
        }
        Ok(None)
    }

    /// Whether the device of that number has that mark still: somebody may have removed ours, and another have its number now.
    pub(super) fn has(&mut self, number: u32, mark: u64) -> bool {
        matches!(self.info(number), Ok(Some(info)) if info.mark == mark)
    }

    /// Whether a device is stopped, or was never started.
    pub(super) fn is_dead(&mut self, number: u32) -> bool {
        matches!(self.info(number), Ok(Some(info)) if info.state == State::Dead)
    }

    fn info(&mut self, number: u32) -> io::Result<Option<DeviceInfo>> {
        let mut bytes = [0; wire::DEVICE_INFO_BYTES];
        self.ring.exchange(wire::GET_DEVICE_INFO, number, &mut bytes)?;
        Ok(DeviceInfo::decode(&bytes))
    }

    pub(super) fn parameters(&mut self, number: u32) -> Result<Parameters, UblkError> {
        let mut bytes = Parameters::blank();
        self.ring
            .exchange(wire::GET_PARAMETERS, number, &mut bytes)
            .map_err(refused(number, "asked what it is like"))?;
        Ok(Parameters::decode(&bytes))
    }

    /// Begins to take over a device whose process is gone, or is going.
    pub(super) fn start_recovery(&mut self, found: &DeviceInfo) -> Result<(), UblkError> {
        let (number, begun) = (found.number, Instant::now());
        // Bounded by DYING: the kernel ends a killed process's ring after the process.
        loop {
            let info = self.info(number).map_err(refused(number, "asked how it is"))?;
            let state = info.map_or(State::Dead, |info| info.state);
            let process = info.map_or(-1, |info| info.process);
            if state == State::Quiesced {
                match self.ring.command(wire::START_RECOVERY, number, 0, LONG) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
                    other => return other.map_err(refused(number, "taken over")),
                }
            } else if is_other_and_alive(process) {
                let device = block_path(number).display().to_string();
                return Err(UblkError::Served { device, process });
            }
            if begun.elapsed() >= DYING {
                let late = io::Error::from(io::ErrorKind::TimedOut);
                return Err(refused(number, "taken over")(late));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Ends a take-over: every tag was fetched, or will be in a moment.
    pub(super) fn end_recovery(&mut self, number: u32) -> Result<(), UblkError> {
        self.long(wire::END_RECOVERY, number, "taken over")
    }

    /// Shows the block device: every tag was fetched, or will be in a moment. Partitions are read,
    /// so the loop has to run.
    pub(super) fn start(&mut self, number: u32) -> Result<(), UblkError> {
        self.long(wire::START_DEVICE, number, "started")
    }

    /// Takes the block device away. Requests under way are served, others fail.
    pub(super) fn stop(&mut self, number: u32) -> Result<(), UblkError> {
        self.long(wire::STOP_DEVICE, number, "stopped")
    }

    /// Removes a device that nobody serves or holds.
    pub(super) fn delete(&mut self, number: u32) -> Result<(), UblkError> {
        self.long(wire::DELETE_DEVICE, number, "removed")
    }

    /// Changes the size of a device.
    pub(super) fn resize(&mut self, number: u32, sectors: u64) -> Result<(), UblkError> {
        let features = self.features().map_err(UblkError::Control)?;
        if features & feature::UPDATE_SIZE == 0 {
            let device = block_path(number).display().to_string();
            return Err(UblkError::KeepsSize { device });
        }
        self.ring
            .command(wire::UPDATE_SIZE, number, sectors, LONG)
            .map_err(refused(number, "made larger"))
    }

    /// Has the kernel keep a device's requests back, and give back what was fetched, until it is taken over. Where it cannot, nothing
    /// happens.
    pub(super) fn quiesce(&mut self, number: u32) {
        if self.features & feature::QUIESCE != 0 {
            // It was made by a program that did not ask for that, or is as busy as can be.
            let _ = self.ring.command(wire::QUIESCE_DEVICE, number, QUIESCING_MS, LONG);
        }
    }

    fn long(
        &mut self,
        command: u32,
        number: u32,
        attempted: &'static str,
    ) -> Result<(), UblkError> {
        let process = u64::from(std::process::id());
        self.ring.command(command, number, process, LONG).map_err(refused(number, attempted))
    }
}

fn refused(number: u32, attempted: &'static str) -> impl FnOnce(io::Error) -> UblkError {
    let device = block_path(number).display().to_string();
    move |source| UblkError::Command { device, attempted, source }
}

/// Whether it is a process that is there, not this one and not ending.
fn is_other_and_alive(process: i32) -> bool {
    let Ok(number) = u32::try_from(process) else { return false };
    if number == 0 || number == std::process::id() {
        return false;
    }
    // The state follows the name, which is in brackets and may hold anything.
    let Ok(stat) = fs::read_to_string(format!("/proc/{number}/stat")) else { return false };
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    !matches!(state, None | Some('Z' | 'X' | 'x'))
}

fn numbers() -> io::Result<Vec<u32>> {
    let entries = match fs::read_dir(DEVICES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("ublkc"));
        numbers.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    Ok(numbers)
}

/// Waits until the driver's file of a device is there, and may be opened: udev gives it to its user.
fn await_file(number: u32) -> Result<(), UblkError> {
    use rustix::fs::{Access, access};
    let begun = Instant::now();
    // Bounded by OPENING.
    loop {
        match access(serving_path(number), Access::READ_OK | Access::WRITE_OK) {
            Err(_) if begun.elapsed() < OPENING => std::thread::sleep(LOOK_AGAIN),
            other => {
                let its = "given to its user, by a rule of udev for /dev/ublkcN and /dev/ublkbN";
                return other.map_err(|error| refused(number, its)(error.into()));
            }
        }
    }
}

/// Opens the driver's file of a device; its node may come a moment after the device.
pub(super) fn open_serving(number: u32) -> Result<File, UblkError> {
    let begun = Instant::now();
    // Bounded by a second.
    loop {
        let path: &Path = &serving_path(number);
        match OpenOptions::new().read(true).write(true).open(path) {
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    && begun.elapsed() < Duration::from_secs(1) =>
            {
                std::thread::sleep(LOOK_AGAIN);
            }
            other => return other.map_err(refused(number, "opened to be served")),
        }
    }
}
