// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Going on as another program: the daemon brings its cache to rest, leaves its block devices to the
//! kernel, and executes the program, which goes on with what is left to it: the map in memory, the
//! devices' open files with their locks, the sockets that clients come in by, and the connections of NBD clients, of
//! kernel NBD devices and of virtual machines. If that cannot be of the map, the daemon closes the cache, and the new program opens it; the
//! connections go on all the same.
//!
//! # Invariants
//!
//! - **G1** Only what survives is left: a daemon with devices that do not outlive their process
//!   refuses (`Daemon::check_upgrade`).
//! - **G2** The program before stays open until the new one serves, and is executed again if that cannot
//!   serve, whatever has become of its file. It opens the cache as after a kill. One that cannot have a block device that the program before
//!   had does not serve.
//! - **G3** The map is left only to a program that says the same [`layout`]; whether it fits the cache, the
//!   library decides (`forebay::handover`).
//! - **G4** What is left is for this process (its number tells), is taken first of all, and is not open in
//!   any program that is executed later, but for what G6 leaves again.
//! - **G5** The thread that executes the next program has no ring: who serves has ended before (`cmd::serve::run`).
//! - **G6** Of guests' connections nothing is touched between the program that brings them to rest and the one that
//!   serves: they are taken when nothing brings back the program before (`cmd::serve::serve`), and left to it again
//!   whenever that goes on (C1, C2 of `nbd/carried.rs` and `vhost/carried.rs`, D5 of `nbd/device/mod.rs`). So no request is done twice or lost over either.
//! - **G7** As long as the process lives a volume has the disk that it had: which that is goes along by the volume's name, and a path
//!   that leads elsewhere by now is refused, by the next program and by the one before when it goes on.
//! - **G8** The program before goes on with the settings that it had, whatever its file says by then.
//! - **G9** A signal that comes when nobody looks any more goes along: the program that serves next, whichever that is, ends as if it had come
//!   then.
//! - **G10** What the service manager has given for volumes that wait for their disks goes along, to the next program and back: the manager
//!   gives it to a start alone.
//! - **G11** The next program serves what this one does, whatever this one was told at its start: what has left since is not named again, and
//!   what has come is (`Daemon::keep_words`).
//!
//! # Crash
//!
//! As everywhere: the next start recovers. What was left goes with the process.

use crate::signals::Signals;
use crate::{sockets, stored};
use anyhow::{Context, Error, Result, anyhow};
use forebay::handover::Handed;
use forebay::host::inherited::inherited;
use forebay_serve::carried;
use forebay_serve::nbd::device::carried::Expected;
use rustix::fs::{FileType, Mode, OFlags, Stat, major, minor};
use rustix::io::FdFlags;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Tells the new program where the one before it is (G2).
const BEFORE: &str = "FOREBAY_UPGRADED_FROM";
/// Tells the program before why it goes on.
const WHY_NOT: &str = "FOREBAY_NOT_UPGRADED";
/// Tells the new program what is left to it.
const LEFT: &str = "FOREBAY_LEFT";
/// Tells the new program why the map is not.
const NOT_LEFT: &str = "FOREBAY_NOT_LEFT";
const OPEN_FILES: &str = "/proc/self/fd/";
/// In the text that says that the program before goes on.
pub const FELL_BACK: &str = "was not upgraded";
/// What the program before had read from its file (G8).
const SETTINGS: &str = "FOREBAY_SETTINGS_BEFORE";
/// A signal has come on the way (G9).
const SIGNALLED: &str = "FOREBAY_SIGNALLED";
/// How numbers below are passed on.
const VERSION: u32 = 2;

/// What two programs must have alike for one to leave its map to the other (G3).
pub fn layout() -> String {
    format!("{VERSION}.{}", forebay::handover::layout())
}

/// What is left to the next program.
#[derive(Default)]
pub struct Left {
    pub cache: Option<Handed>,
    /// Open files of devices.
    pub devices: Vec<OwnedFd>,
    /// Where clients come in, by address.
    pub sockets: Vec<(String, OwnedFd)>,
    pub guests: Guests,
    /// What each volume was served from, and the cache.
    pub disks: Vec<Disk>,
    /// What `stored.rs` has, by name (G10).
    pub stored: Vec<(String, OwnedFd)>,
}

/// The cache's name among [`Left::disks`].
pub const CACHE: &str = "";

/// A path leads to another disk than the volume had, or it is to be one with other blocks (G7).
#[derive(Debug)]
pub struct OtherDisk(pub String);

impl std::fmt::Display for OtherDisk {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for OtherDisk {}

/// What a volume is served from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Disk {
    volume: String,
    /// Of a block device its number, of a file where it is.
    is_block: bool,
    numbers: [u64; 2],
    /// For people.
    shown: String,
}

impl Disk {
    /// The open file of a volume's device.
    pub fn of(volume: &str, open: BorrowedFd<'_>) -> Option<Disk> {
        let (is_block, numbers) = numbers_of(&rustix::fs::fstat(open).ok()?);
        let path = std::fs::read_link(format!("{OPEN_FILES}{}", open.as_raw_fd())).ok()?;
        Some(Disk { volume: volume.into(), is_block, numbers, shown: path.display().to_string() })
    }

    /// Refuses a path that leads to another disk. One that leads nowhere is for whoever opens it.
    pub fn check(&self, path: &Path) -> Result<(), OtherDisk> {
        let Ok(found) = rustix::fs::stat(path) else { return Ok(()) };
        if numbers_of(&found) == (self.is_block, self.numbers) {
            return Ok(());
        }
        let now = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
        Err(OtherDisk(format!(
            "{}: {} is {} now, and {} is served from {}; an upgrade changes no disk: name that one again, or stop the \
             daemon and start it anew",
            self.who(),
            path.display(),
            now.display(),
            self.it(),
            self.shown
        )))
    }

    /// The same, and it has to lead there.
    pub fn check_found(&self, path: &Path) -> Result<(), OtherDisk> {
        match rustix::fs::stat(path) {
            Ok(_) => self.check(path),
            Err(error) => Err(OtherDisk(format!(
                "{}: {} cannot be examined ({error}), and {} is served from {}; the next program looks for it there: let that name lead to \
                 it again",
                self.who(),
                path.display(),
                self.it(),
                self.shown
            ))),
        }
    }

    /// The same, unless the machine has the disk no more.
    pub fn check_stays(&self, path: &Path) -> Result<(), OtherDisk> {
        let [number, _] = self.numbers;
        let known = format!("/sys/dev/block/{}:{}", major(number), minor(number));
        match self.is_block && !Path::new(&known).exists() {
            true => Ok(()),
            false => self.check_found(path),
        }
    }

    pub fn is_of(&self, volume: &str) -> bool {
        self.volume == volume
    }

    fn who(&self) -> &str {
        if self.volume == CACHE { "the cache" } else { &self.volume }
    }

    fn it(&self) -> &str {
        if self.volume == CACHE { "it" } else { "the volume" }
    }
}

fn numbers_of(found: &Stat) -> (bool, [u64; 2]) {
    match FileType::from_raw_mode(found.st_mode) {
        FileType::BlockDevice => (true, [found.st_rdev, 0]),
        _ => (false, [found.st_dev, found.st_ino]),
    }
}

/// Those who stay connected.
#[derive(Default)]
pub struct Guests {
    /// NBD clients.
    pub connections: Option<carried::Handed>,
    /// Virtual machines.
    pub machines: Option<carried::Handed>,
    /// Kernel NBD devices.
    pub nbd_devices: Option<carried::Handed>,
}

/// The same as numbers. A program of before connections, machines or devices went on takes a map beside them, closes what it cannot
/// name, and takes nothing where there is nothing that it can.
#[derive(Serialize, Deserialize)]
struct Numbers {
    process: u32,
    #[serde(flatten)]
    map: Option<MapNumbers>,
    connections: Option<GuestNumbers>,
    machines: Option<GuestNumbers>,
    nbd_devices: Option<GuestNumbers>,
    #[serde(default)]
    disks: Vec<Disk>,
    #[serde(default)]
    stored: Vec<NamedNumber>,
}

#[derive(Serialize, Deserialize)]
struct MapNumbers {
    message: RawFd,
    tables: [RawFd; 2],
    lasts: [bool; 2],
    devices: Vec<RawFd>,
    sockets: Vec<NamedNumber>,
    /// Which files these are (S1 of `sockets.rs`).
    #[serde(default)]
    socket_files: Vec<(PathBuf, [u64; 2])>,
}

type NamedNumber = (String, RawFd);

#[derive(Serialize, Deserialize)]
struct GuestNumbers {
    record: RawFd,
    sockets: Vec<RawFd>,
    /// How many they are; a socket each, if nothing is said.
    count: Option<usize>,
}

/// What was left to this program and not yet taken.
static TO_TAKE: Mutex<Option<Left>> = Mutex::new(None);
/// What was served when this program was executed (G7).
static DISKS: Mutex<Vec<Disk>> = Mutex::new(Vec::new());
/// What this program has read from its file (G8).
static HAD: Mutex<Option<Vec<String>>> = Mutex::new(None);
/// The command line of the next program, and of this one if it goes on, where that is not this one's own.
static WORDS: Mutex<Option<Vec<OsString>>> = Mutex::new(None);
/// What tells of signals (G9).
static SIGNALS: Mutex<Option<Signals>> = Mutex::new(None);

fn to_take<T>(take: impl FnOnce(&mut Left) -> Option<T>) -> Option<T> {
    take(TO_TAKE.lock().unwrap_or_else(PoisonError::into_inner).as_mut()?)
}

/// The map, if it was left.
pub fn take_cache() -> Option<Handed> {
    to_take(|left| left.cache.take())
}

fn disk(volume: &str) -> Option<Disk> {
    let disks = DISKS.lock().unwrap_or_else(PoisonError::into_inner);
    disks.iter().find(|disk| disk.volume == volume).cloned()
}

/// Refuses a path that leads to another disk than the volume had in the program before (G7).
pub fn check_disk(volume: &str, path: &Path) -> Result<(), OtherDisk> {
    disk(volume).map_or(Ok(()), |disk| disk.check(path))
}

/// Whether the program before served that volume.
pub fn had_disk(volume: &str) -> bool {
    disk(volume).is_some()
}

/// From now on volumes come and go as ever.
pub fn forget_disks() {
    DISKS.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Whether the program before goes on if this one cannot serve.
pub fn is_tried() -> bool {
    std::env::var_os(BEFORE).is_some() && std::env::var_os(WHY_NOT).is_none()
}

/// Whether this program was executed by another, the next one or the one before.
pub fn is_executed() -> bool {
    std::env::var_os(BEFORE).is_some() || std::env::var_os(WHY_NOT).is_some()
}

/// The settings of a program that goes on (G8).
pub fn settings_before() -> Option<Vec<String>> {
    std::env::var_os(WHY_NOT)?;
    serde_json::from_str(&std::env::var(SETTINGS).ok()?).ok()
}

/// What this program has read from its file.
pub fn keep_settings(words: Vec<String>) {
    *HAD.lock().unwrap_or_else(PoisonError::into_inner) = Some(words);
}

/// Volumes have come and gone since they were read.
pub fn change_settings(change: impl FnOnce(&[String]) -> Vec<String>) {
    let mut had = HAD.lock().unwrap_or_else(PoisonError::into_inner);
    *had = had.take().map(|words| change(&words));
}

/// The command line that programs are executed with.
pub fn words() -> Vec<OsString> {
    let kept = WORDS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    kept.unwrap_or_else(|| std::env::args_os().collect())
}

/// The same from now on.
pub fn keep_words(words: Vec<OsString>) {
    *WORDS.lock().unwrap_or_else(PoisonError::into_inner) = Some(words);
}

/// Those that come from now on go along (G9).
pub fn carry_signals(signals: Signals) {
    *SIGNALS.lock().unwrap_or_else(PoisonError::into_inner) = Some(signals);
}

/// Whether one came to a program on the way to this one.
pub fn is_signalled() -> bool {
    is_executed() && std::env::var_os(SIGNALLED).is_some()
}

/// The open file of a volume's device, or the cache's, if it was left; nobody else can have had it meanwhile. To be checked
/// before ([`check_disk`]).
pub fn take_device(volume: &str) -> Option<File> {
    let disk = disk(volume)?;
    let numbers = (disk.is_block, disk.numbers);
    to_take(|left| {
        let is_it = |fd: &OwnedFd| rustix::fs::fstat(fd).is_ok_and(|it| numbers_of(&it) == numbers);
        let at = left.devices.iter().position(is_it)?;
        Some(File::from(left.devices.swap_remove(at)))
    })
}

/// The listening socket of an address, if it was left.
pub fn take_socket(address: &str) -> Option<OwnedFd> {
    to_take(|left| {
        let at = left.sockets.iter().position(|(it, _)| it == address)?;
        Some(left.sockets.swap_remove(at).1)
    })
}

/// Whether it is there to be taken.
pub fn has_socket(address: &str) -> bool {
    to_take(|left| left.sockets.iter().any(|(it, _)| it == address).then_some(())).is_some()
}

/// Whether virtual machines were left.
#[cfg(feature = "vhost")]
pub fn has_machines() -> bool {
    to_take(|left| left.guests.machines.is_some().then_some(())).is_some()
}

/// Whose kernel NBD devices stay connected.
pub fn expected_nbd_devices() -> Expected {
    to_take(|left| left.guests.nbd_devices.as_ref().map(Expected::of)).unwrap_or_default()
}

/// Those who stay connected. To be asked when nothing brings back the program before (G6).
pub fn take_guests() -> Guests {
    to_take(|left| Some(std::mem::take(&mut left.guests))).unwrap_or_default()
}

/// Closes what nobody wanted, but for what the program before may go on with (G6).
pub fn close_left() {
    to_take(|left| {
        let guests = std::mem::take(&mut left.guests);
        // Nobody listens there any more. A socket that is no file has an address that begins with its protocol.
        for (path, _) in left.sockets.iter().filter(|it| it.0.starts_with('/')) {
            sockets::remove(Path::new(path));
        }
        *left = Left { guests, ..Left::default() };
        Some(())
    });
}

impl Guests {
    fn all(&self) -> impl Iterator<Item = &carried::Handed> {
        self.connections.iter().chain(&self.machines).chain(&self.nbd_devices)
    }
}

impl Left {
    /// What the program before left, as numbers say: all of it or nothing.
    ///
    /// # Safety
    ///
    /// Nothing in this program owns a descriptor of one of them.
    #[allow(unsafe_code)]
    unsafe fn of(numbers: Numbers) -> Option<Left> {
        let one = |number: RawFd| {
            // SAFETY: the caller's word, and the program before has named each once.
            let fd = unsafe { inherited(number) }?;
            rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).ok()?; // G4
            Some(fd)
        };
        let mut left = Left { disks: numbers.disks, ..Left::default() };
        let named = |numbers: Vec<NamedNumber>| {
            let taken = numbers.into_iter().map(|(name, number)| Some((name, one(number)?)));
            taken.collect::<Option<Vec<_>>>()
        };
        left.stored = named(numbers.stored)?;
        if let Some(map) = numbers.map {
            for number in map.devices {
                left.devices.push(one(number)?);
            }
            left.sockets = named(map.sockets)?;
            sockets::were_bound(map.socket_files);
            let [cells, rows] = map.tables;
            let files = [one(map.message)?, one(cells)?, one(rows)?].map(File::from);
            // SAFETY: the program before has become this one, and its memory is gone.
            left.cache = Some(unsafe { Handed::of(files, map.lasts) });
        }
        let guests = |numbers: Option<GuestNumbers>| {
            let Some(GuestNumbers { record, sockets, count }) = numbers else { return Some(None) };
            let count = count.unwrap_or(sockets.len());
            let message = File::from(one(record)?);
            let descriptors = sockets.into_iter().map(one).collect::<Option<_>>()?;
            Some(Some(carried::Handed { message, count, descriptors }))
        };
        left.guests.connections = guests(numbers.connections)?;
        left.guests.machines = guests(numbers.machines)?;
        left.guests.nbd_devices = guests(numbers.nbd_devices)?;
        Some(left)
    }

    fn numbers(&self) -> Vec<RawFd> {
        let cache = self.cache.iter().flat_map(Handed::files);
        let records = self.guests.all().map(|it| &it.message);
        let connected = self.guests.all().flat_map(|it| &it.descriptors);
        let named = self.sockets.iter().chain(&self.stored);
        let sockets = named.map(|(_, fd)| fd).chain(connected);
        let owned = self.devices.iter().chain(sockets).map(AsRawFd::as_raw_fd);
        cache.chain(records).map(AsRawFd::as_raw_fd).chain(owned).collect()
    }

    /// Keeps all of it open in the next program, and says where.
    fn keep(&self) -> Result<Option<String>> {
        let keep = |fd: &dyn AsFd| {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
            Ok::<_, Error>(fd.as_fd().as_raw_fd())
        };
        let keep_all = |fds: &[OwnedFd]| fds.iter().map(|fd| keep(fd)).collect::<Result<Vec<_>>>();
        let keep_named = |all: &[(String, OwnedFd)]| {
            let number = |(name, fd): &(String, OwnedFd)| Ok((name.clone(), keep(fd)?));
            all.iter().map(number).collect::<Result<Vec<NamedNumber>>>()
        };
        let map = |cache: &Handed| {
            let [message, cells, rows] = cache.files();
            Ok::<_, Error>(MapNumbers {
                message: keep(message)?,
                tables: [keep(cells)?, keep(rows)?],
                lasts: cache.lasts(),
                devices: keep_all(&self.devices)?,
                sockets: keep_named(&self.sockets)?,
                socket_files: sockets::bound(),
            })
        };
        let guests = |handed: &Option<carried::Handed>| {
            let Some(handed) = handed else { return Ok(None) };
            let (record, sockets) = (keep(&handed.message)?, keep_all(&handed.descriptors)?);
            Ok::<_, Error>(Some(GuestNumbers { record, sockets, count: Some(handed.count) }))
        };
        let map = self.cache.as_ref().map(map).transpose()?;
        let connections = guests(&self.guests.connections)?;
        let machines = guests(&self.guests.machines)?;
        let nbd_devices = guests(&self.guests.nbd_devices)?;
        let (disks, stored) = (self.disks.clone(), keep_named(&self.stored)?);
        let no_guests = self.guests.all().next().is_none();
        if map.is_none() && no_guests && disks.is_empty() && stored.is_empty() {
            return Ok(None);
        }
        let process = std::process::id();
        let numbers = Numbers { process, map, connections, machines, nbd_devices, disks, stored };
        Ok(Some(serde_json::to_string(&numbers)?))
    }
}

/// Executes the new program with this one's arguments ([`words`]), and leaves it what there is, or says why the map is
/// not. Gives why not, if neither it nor this program can be executed.
pub fn execute(
    executable: &Path,
    mut left: Left,
    why_no_map: Option<String>,
) -> Result<Infallible> {
    // Not closed when the program is executed, and there even if its file has been replaced.
    let this = rustix::fs::open("/proc/self/exe", OFlags::RDONLY, Mode::empty())
        .context("/proc/self/exe: cannot be opened")?;
    let before = format!("{OPEN_FILES}{}", this.as_raw_fd());
    let mut command = again(executable);
    command.env(BEFORE, &before);
    let settings = HAD.lock().unwrap_or_else(PoisonError::into_inner).take();
    match settings.map(|words| serde_json::to_string(&words)).transpose()? {
        Some(settings) => command.env(SETTINGS, settings),
        None => command.env_remove(SETTINGS),
    };
    left.stored = stored::take_rest();
    match left.keep() {
        Ok(Some(numbers)) => command.env(LEFT, numbers),
        Ok(None) => &mut command,
        Err(error) => command.env(NOT_LEFT, format!("{error:#}")),
    };
    if let Some(why) = why_no_map {
        command.env(NOT_LEFT, why);
    }
    let error = command.exec();
    let guests = std::mem::take(&mut left.guests);
    *DISKS.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(&mut left.disks);
    stored::add(std::mem::take(&mut left.stored));
    // They would be open in the program before, and lock it out.
    drop(left);
    let error = anyhow!(error).context(format!("{}: cannot be executed", executable.display()));
    go_back(&before, &error, guests)
}

/// The program that executed this one, until this one serves.
pub struct Before(OwnedFd);

impl Before {
    /// If there was one, and what it left.
    ///
    /// # Safety
    ///
    /// It is asked once, first of all: nobody else of this program has opened a file.
    #[allow(unsafe_code)]
    pub unsafe fn left() -> Option<Before> {
        let program = std::env::var(BEFORE).ok();
        let program = program.and_then(|text| text.strip_prefix(OPEN_FILES)?.parse().ok());
        // SAFETY: the caller's word.
        let program = program.and_then(|number| unsafe { inherited(number) });
        let numbers = std::env::var(LEFT).ok();
        let numbers = numbers.and_then(|text| serde_json::from_str::<Numbers>(&text).ok());
        let ours = numbers.filter(|numbers| numbers.process == std::process::id()); // G4
        if let Some(numbers) = ours {
            // Also if nothing of the rest can be taken.
            *DISKS.lock().unwrap_or_else(PoisonError::into_inner) = numbers.disks.clone();
            // SAFETY: the caller's word.
            let left = unsafe { Left::of(numbers) };
            *TO_TAKE.lock().unwrap_or_else(PoisonError::into_inner) = left;
        }
        if program.is_some() || std::env::var_os(WHY_NOT).is_some() {
            let mut known = to_take(|left| Some(left.numbers())).unwrap_or_default();
            known.extend(program.iter().map(AsRawFd::as_raw_fd));
            // SAFETY: the caller's word; what was taken just now is all that there is.
            unsafe { close_all_but(&known) };
        }
        stored::add(to_take(|left| Some(std::mem::take(&mut left.stored))).unwrap_or_default());
        program.map(Before)
    }

    /// It goes on, for this program cannot serve. Gives why not, if that fails.
    pub fn go_on(&self, error: &Error) -> Error {
        let before = format!("{OPEN_FILES}{}", self.0.as_raw_fd());
        match go_back(&before, error, take_guests()) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }
}

/// Closes what the program before left and nobody can name: it may be locked (G4).
///
/// # Safety
///
/// All that this program itself owns is known.
#[allow(unsafe_code)]
unsafe fn close_all_but(known: &[RawFd]) {
    let Ok(open) = std::fs::read_dir(OPEN_FILES) else { return };
    let numbers: Vec<RawFd> =
        open.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|number| !known.contains(number)) {
        // SAFETY: the caller's word; the directory is closed by now.
        drop(unsafe { inherited(number) });
    }
}

fn go_back(before: &str, error: &Error, guests: Guests) -> Result<Infallible> {
    err!("forebay: the upgrade failed, the program before goes on: {error:#}");
    let mut command = again(Path::new(before));
    command.env(WHY_NOT, format!("{error:#}")).env_remove(BEFORE);
    let disks = DISKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let left = Left { guests, disks, stored: stored::take_rest(), ..Left::default() };
    // Without them it goes on as well: they are closed then.
    if let Ok(Some(numbers)) = left.keep() {
        command.env(LEFT, numbers);
    }
    let failed = command.exec();
    Err(anyhow!(failed).context("the program before cannot be executed either"))
}

fn again(executable: &Path) -> Command {
    let mut command = Command::new(executable);
    command.args(words().into_iter().skip(1));
    command.env_remove(LEFT).env_remove(NOT_LEFT).env_remove(WHY_NOT);
    // What the service manager gave was taken, and its numbers are others' by now.
    command.env_remove("LISTEN_PID").env_remove("LISTEN_FDS").env_remove("LISTEN_FDNAMES");
    // Last of all: one that comes behind this ends the next program as long as that does not catch it, as a kill.
    let signals = SIGNALS.lock().unwrap_or_else(PoisonError::into_inner);
    match is_signalled() || signals.as_ref().is_some_and(Signals::came) {
        true => command.env(SIGNALLED, "1"),
        false => command.env_remove(SIGNALLED),
    };
    command
}

/// Why this program goes on instead of a newer one, if so.
pub fn why_not() -> Option<String> {
    let why = std::env::var(WHY_NOT).ok()?;
    Some(format!("this program {FELL_BACK}: {why}"))
}

/// Why the map was not left to this program, if it was executed by another.
pub fn why_not_left() -> Option<String> {
    std::env::var(NOT_LEFT).ok()
}
