// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Loop devices: a file made a block device, and who holds one.
//!
//! A loop device outlives the program that attaches it, so dropping a [`LoopDevice`] does not
//! detach it; [`LoopDevice::detach`] does, and `autoclear` does so at the last close.
//!
//! # Not here
//!
//! Whether a held device is refused: `guard`. The ioctls: `sys`.

use super::machine::{DeviceNumber, Host, LoopBinding, Mount, Node, Target};
use super::sys;
use crate::io::sys::block_size_bytes;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Times another program may take the free device between our asking for it and using it.
const ATTACH_ATTEMPT_COUNT_MAX: usize = 64;
/// Processes and open files looked at for one question.
const OPENER_SCAN_COUNT_MAX: usize = 1 << 20;
/// How long `udev` or devtmpfs may take to make the device node.
const NODE_WAIT_MAX: Duration = Duration::from_secs(5);

/// How a file is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopOptions {
    /// No writes through the device.
    pub read_only: bool,
    /// Around the page cache, where the file system allows it.
    pub direct_io: bool,
    /// The kernel looks for partitions, `loop0p1`.
    pub partition_scan: bool,
    /// Detached when the last opener closes it.
    pub autoclear: bool,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
}

impl Default for LoopOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            direct_io: true,
            partition_scan: false,
            autoclear: false,
            block_size: 4096,
        }
    }
}

/// Why a file could not be attached or a device not detached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoopError {
    /// Something could not be opened.
    #[error("{path}: cannot be opened{}", if *.is_control { "; is the loop driver loaded (`modprobe loop`) and are we root?" } else { "" })]
    Open {
        /// What.
        path: PathBuf,
        /// True for `/dev/loop-control`.
        is_control: bool,
        /// Why.
        source: io::Error,
    },
    /// Neither 512 nor 4096.
    #[error("{path}: block size {found}: expected 512 or 4096")]
    BlockSize {
        /// The file.
        path: PathBuf,
        /// As asked for.
        found: u32,
    },
    /// The kernel has no free device to give.
    #[error("no free loop device could be had for {path} in {attempt_count} attempts")]
    NoneFree {
        /// The file.
        path: PathBuf,
        /// How often it was tried.
        attempt_count: usize,
        /// The last refusal.
        source: io::Error,
    },
    /// The kernel refused the file.
    #[error("{path}: could not be attached to {device}")]
    Attach {
        /// The file.
        path: PathBuf,
        /// The loop device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The device could not be detached.
    #[error("{device}: could not be detached; is it attached, and not in use?")]
    Detach {
        /// The loop device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It could not be made as large as its file.
    #[error("{device}: could not be made as large as its file; is it attached?")]
    Resize {
        /// The loop device.
        device: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is kept open; the kernel detaches it when that ends.
    #[error("{device}: still held ({}); it is detached when that ends", holders_text(.holders))]
    StillHeld {
        /// The loop device.
        device: PathBuf,
        /// By what, as far as it can be seen.
        holders: Vec<Holder>,
    },
}

/// An attached loop device, open.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    file: File,
    is_direct: bool,
}

impl LoopDevice {
    /// Attaches `file` to a free loop device.
    pub fn attach(file: &Path, options: LoopOptions) -> Result<Self, LoopError> {
        if options.block_size != 512 && options.block_size != 4096 {
            return Err(LoopError::BlockSize { path: file.into(), found: options.block_size });
        }
        let backing = open(file, !options.read_only, false)?;
        let control = open(Path::new("/dev/loop-control"), true, true)?;
        let mut last = io::Error::from_raw_os_error(libc::EBUSY);
        let mut attempt_count = 0;
        while attempt_count < ATTACH_ATTEMPT_COUNT_MAX {
            attempt_count += 1;
            let number = match sys::loop_free_number(control.as_fd()) {
                Ok(number) => number,
                Err(source) => {
                    last = source;
                    break;
                }
            };
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open_node(&path, !options.read_only)?;
            match attach_to(&device, &backing, file, options) {
                Ok(()) => {
                    let status = sys::loop_status(device.as_fd());
                    let is_direct =
                        status.is_ok_and(|status| status.flags & sys::LO_FLAGS_DIRECT_IO != 0);
                    return Ok(Self { path, file: device, is_direct });
                }
                // Somebody took it between the two calls: ask again.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => last = error,
                Err(source) => {
                    return Err(LoopError::Attach { path: file.into(), device: path, source });
                }
            }
        }
        Err(LoopError::NoneFree { path: file.into(), attempt_count, source: last })
    }

    /// `/dev/loop3`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open device. With `autoclear` it stays attached only while this, or another, is open.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether the kernel goes around the page cache; asking for it is not enough everywhere.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Gives the file back.
    pub fn detach(self) -> Result<(), LoopError> {
        let Self { path, file, .. } = self;
        let result = sys::loop_clear(file.as_fd());
        drop(file);
        detach_finish(path, result)
    }
}

/// Detaches the loop device at `device`, whoever attached it.
pub fn detach(device: &Path) -> Result<(), LoopError> {
    let file = open(device, false, false)?;
    let result = sys::loop_clear(file.as_fd());
    drop(file);
    detach_finish(device.into(), result)
}

/// Takes back what [`detach`] began on a device that was held: it stays when that ends.
pub fn stay_attached(device: &Path) -> Result<(), LoopError> {
    let file = open(device, true, false)?;
    let stay = || {
        let mut status = sys::loop_status(file.as_fd())?;
        if status.flags & sys::LO_FLAGS_AUTOCLEAR == 0 {
            return Ok(());
        }
        status.flags &= !sys::LO_FLAGS_AUTOCLEAR;
        sys::loop_set_status(file.as_fd(), &status)
    };
    stay().map_err(|source| LoopError::Open { path: device.into(), is_control: false, source })
}

/// Makes the loop device at `device` as large as the file is now that it is over. Waits for whoever serves that file.
pub fn refresh_size(device: &Path) -> Result<(), LoopError> {
    let failed = |source: io::Error| LoopError::Resize { device: device.into(), source };
    let name = device.file_name().unwrap_or_default();
    let bound = Host::default().loops().into_iter().find(|it| *it.node.name == *name);
    let bound = bound.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
    // The driver goes by what the kernel remembers of the file: asked so, it looks.
    let flags = rustix::fs::AtFlags::STATX_FORCE_SYNC;
    let size = rustix::fs::StatxFlags::SIZE;
    let file = open(device, true, false)?;
    // FUSE does not keep what it was told while requests to the same file were answered meanwhile.
    for _ in 0..RESIZE_TRIES {
        let asked = rustix::fs::statx(rustix::fs::CWD, &bound.backing_file, flags, size);
        let bytes = asked.map_err(|error| failed(error.into()))?.stx_size;
        sys::loop_set_capacity(file.as_fd()).map_err(failed)?;
        let wanted = bytes.saturating_sub(bound.offset_bytes) / 512 * 512;
        if block_size_bytes(file.as_fd()).map_err(failed)? >= wanted {
            return Ok(());
        }
        std::thread::sleep(RESIZE_PAUSE);
    }
    Err(failed(io::Error::other("it stays smaller than the volume; `forebay resize` tries again")))
}

/// So often, with so long between, a device is asked to be as large as its file.
const RESIZE_TRIES: usize = 100;
const RESIZE_PAUSE: Duration = Duration::from_millis(20);

/// The number of the file (`stat` calls it inode) that a loop device is over.
pub fn backing_inode(device: &Path) -> Result<u64, LoopError> {
    let file = open(device, false, false)?;
    let status = sys::loop_status(file.as_fd());
    let status = status.map_err(|source| LoopError::Open {
        path: device.into(),
        is_control: false,
        source,
    })?;
    Ok(status.inode)
}

/// The active loop devices whose file is the one at `path`.
pub fn attached_to(host: &Host, path: &Path) -> Vec<LoopBinding> {
    let target = Target::of(path).ok();
    let is_it = |binding: &LoopBinding| {
        target.as_ref().map_or_else(
            || binding.backing_file == path,
            |target| same_file(target, &binding.backing_file),
        )
    };
    host.loops().into_iter().filter(is_it).collect()
}

/// What holds a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// It, or a partition of it, is mounted.
    Mount {
        /// Where.
        mount_point: PathBuf,
        /// The file system.
        kind: String,
    },
    /// An array, volume or mapping is made of it or of a partition of it.
    Device {
        /// As a person would name it.
        described: String,
    },
    /// A program has it open.
    Process {
        /// Its number.
        process_id: u32,
        /// Its name.
        command: String,
    },
}

impl std::fmt::Display for Holder {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mount { mount_point, kind } => {
                write!(out, "mounted at {} ({kind})", mount_point.display())
            }
            Self::Device { described } => write!(out, "part of {described}"),
            Self::Process { process_id, command } => {
                write!(out, "open in process {process_id} ({command})")
            }
        }
    }
}

/// Mounts, devices and processes that hold this block device or a partition of it. Best effort:
/// other mount namespaces, and processes we may not look into, are not seen.
pub fn holders(host: &Host, number: DeviceNumber) -> Vec<Holder> {
    let mounts = host.mounts().unwrap_or_default();
    let nodes: Vec<Node> = host
        .node(number)
        .map(|node| std::iter::once(node.clone()).chain(node.partitions()).collect())
        .unwrap_or_default();
    let mut found = Vec::new();
    for node in &nodes {
        for Mount { mount_point, kind, .. } in host.mounts_of(&mounts, node.number) {
            found.push(Holder::Mount { mount_point, kind });
        }
        let holders = node.holders().into_iter();
        found.extend(holders.map(|holder| Holder::Device { described: holder.described() }));
    }
    let targets: Vec<Target> = nodes
        .iter()
        .map(|node| Target::Block { path: PathBuf::new(), number: node.number })
        .collect();
    found.extend(openers_of_any(host, &targets));
    found
}

/// The processes, ours left out, that have this device or file open. Best effort: without root
/// only our own user's are seen.
pub fn openers(host: &Host, target: &Target) -> Vec<Holder> {
    openers_of_any(host, std::slice::from_ref(target))
}

/// Whether `path`, as the kernel names a file, is `target`.
pub(super) fn same_file(target: &Target, path: &Path) -> bool {
    // A path seen from another mount namespace, or of a deleted file, cannot be looked up; then
    // the name is all there is.
    Target::of(path).map_or_else(|_| target.path() == path, |found| found.is_same(target))
}

fn openers_of_any(host: &Host, targets: &[Target]) -> Vec<Holder> {
    let own = std::process::id();
    let mut found = Vec::new();
    let mut scanned = 0;
    let Ok(processes) = fs::read_dir(&host.proc) else { return found };
    for process in processes.filter_map(Result::ok) {
        let name = process.file_name();
        let Some(process_id) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if process_id == own {
            continue;
        }
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        for file in files.filter_map(Result::ok) {
            scanned += 1;
            if scanned > OPENER_SCAN_COUNT_MAX {
                return found;
            }
            if targets.iter().any(|target| leads_to(&file.path(), target)) {
                let command = super::machine::read_trimmed(&process.path().join("comm"));
                found.push(Holder::Process { process_id, command: command.unwrap_or_default() });
                break;
            }
        }
    }
    found
}

/// `stat` through the magic link, so that a path that was renamed since does not mislead.
fn leads_to(link: &Path, target: &Target) -> bool {
    let Ok(found) = fs::metadata(link) else { return false };
    match target {
        Target::Block { number, .. } => {
            found.file_type().is_block_device() && DeviceNumber::from_raw(found.rdev()) == *number
        }
        Target::File { on, inode, .. } => {
            found.ino() == *inode && DeviceNumber::from_raw(found.dev()) == *on
        }
    }
}

fn attach_to(device: &File, backing: &File, path: &Path, options: LoopOptions) -> io::Result<()> {
    let mut info = sys::LoopInfo::ZERO;
    for (wanted, flag) in [
        (options.read_only, sys::LO_FLAGS_READ_ONLY),
        (options.direct_io, sys::LO_FLAGS_DIRECT_IO),
        (options.partition_scan, sys::LO_FLAGS_PARTSCAN),
        (options.autoclear, sys::LO_FLAGS_AUTOCLEAR),
    ] {
        if wanted {
            info.flags |= flag;
        }
    }
    let full = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    // The last byte stays zero; the name is only for people, sysfs has the whole path.
    for (to, from) in info.file_name.iter_mut().take(63).zip(full.as_os_str().as_bytes()) {
        *to = *from;
    }
    let configured =
        sys::loop_configure(device.as_fd(), backing.as_fd(), options.block_size, &info);
    match configured.as_ref().map_err(io::Error::raw_os_error) {
        // Before Linux 5.8 the ioctl is unknown.
        Err(Some(libc::ENOTTY | libc::EINVAL | libc::ENOSYS)) => {
            attach_in_steps(device, backing, &info, options)
        }
        _ => configured,
    }
}

fn attach_in_steps(
    device: &File,
    backing: &File,
    info: &sys::LoopInfo,
    options: LoopOptions,
) -> io::Result<()> {
    sys::loop_set_fd(device.as_fd(), backing.as_fd())?;
    let finish = || {
        // Block size first: direct I/O is refused while it is below what the file needs.
        sys::loop_set_block_size(device.as_fd(), options.block_size)?;
        sys::loop_set_status(device.as_fd(), info)?;
        if options.direct_io {
            // Best effort, as in LOOP_CONFIGURE; `is_direct` tells.
            let _ = sys::loop_set_direct_io(device.as_fd(), true);
        }
        Ok(())
    };
    finish().inspect_err(|_| {
        let _ = sys::loop_clear(device.as_fd());
    })
}

/// The kernel answers a detach of a device in use with success and waits for the last close.
fn detach_finish(device: PathBuf, result: io::Result<()>) -> Result<(), LoopError> {
    if let Err(source) = result {
        return Err(LoopError::Detach { device, source });
    }
    let host = Host::default();
    let Some(node) = host.node_at_path(&device) else { return Ok(()) };
    let began = Instant::now();
    let mut pause = Duration::from_micros(100);
    // A udev rule may have it open for a moment after the change.
    while node.attribute("loop/backing_file").is_some() {
        if began.elapsed() > NODE_WAIT_MAX / 5 {
            let holders = holders(&host, node.number);
            return Err(LoopError::StillHeld { device, holders });
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    Ok(())
}

fn open(path: &Path, write: bool, is_control: bool) -> Result<File, LoopError> {
    OpenOptions::new().read(true).write(write).open(path).map_err(|source| LoopError::Open {
        path: path.into(),
        is_control,
        source,
    })
}

/// Opens a node that the kernel may just have been asked to make.
fn open_node(path: &Path, write: bool) -> Result<File, LoopError> {
    let began = Instant::now();
    loop {
        match open(path, write, false) {
            Err(LoopError::Open { source, .. })
                if source.kind() == io::ErrorKind::NotFound && began.elapsed() < NODE_WAIT_MAX =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

fn holders_text(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return String::from("by something not visible here");
    }
    holders.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// A loop device over a new file, detached at the end; `None`, with the reason printed, where
    /// the machine cannot.
    pub(crate) fn attached(name: &str, options: LoopOptions) -> Option<(PathBuf, LoopDevice)> {
        let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        file.set_len(32 << 20).unwrap();
        match LoopDevice::attach(&path, options) {
            Ok(device) => Some((path, device)),
            Err(error) => {
                forebay_testing::skip(&format!(
                    "loop_device: no loop device: {error}: {:?}",
                    std::error::Error::source(&error)
                ));
                fs::remove_file(&path).unwrap();
                None
            }
        }
    }

    #[test]
    fn attached_file_is_found_by_path_and_gone_after_detach() {
        let options = LoopOptions { direct_io: false, ..LoopOptions::default() };
        let Some((path, device)) = attached("attach", options) else { return };
        let host = Host::default();
        device.file().write_all_at(b"through", 4096).unwrap();
        device.file().sync_all().unwrap();
        let mut seen = [0; 7];
        File::open(&path).unwrap().read_exact_at(&mut seen, 4096).unwrap();
        assert_eq!(&seen, b"through");
        let found = attached_to(&host, &path);
        assert_eq!(found.len(), 1);
        assert_eq!(Path::new("/dev").join(&found[0].node.name), device.path());
        assert_eq!(found[0].node.attribute("queue/logical_block_size").unwrap(), "4096");
        device.detach().unwrap();
        assert_eq!(attached_to(&host, &path), []);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn other_process_is_named_when_a_detach_must_wait() {
        let Some((path, device)) = attached("held", LoopOptions::default()) else { return };
        let Target::Block { number, .. } = Target::of(device.path()).unwrap() else { panic!() };
        let input = File::open(device.path()).unwrap();
        let mut child = std::process::Command::new("cat")
            .stdin(input)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Its output is never read, so it keeps the device open until we end it.
        let held = holders(&Host::default(), number);
        let by_child = |holder: &Holder| matches!(holder, Holder::Process { process_id, .. } if *process_id == child.id());
        assert!(held.iter().any(by_child), "{held:?}");
        let error = device.detach().unwrap_err();
        assert!(matches!(&error, LoopError::StillHeld { holders, .. } if !holders.is_empty()));
        child.kill().unwrap();
        child.wait().unwrap();
        let began = Instant::now();
        while !attached_to(&Host::default(), &path).is_empty() {
            assert!(began.elapsed() < Duration::from_secs(10), "autoclear did not happen");
            std::thread::yield_now();
        }
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn odd_block_size_is_refused() {
        let options = LoopOptions { block_size: 1000, ..LoopOptions::default() };
        let error = LoopDevice::attach(Path::new("/nonexistent"), options).unwrap_err();
        assert!(matches!(error, LoopError::BlockSize { found: 1000, .. }));
    }

    #[test]
    fn fallback_in_steps_attaches_too() {
        let path = std::env::temp_dir().join(format!("forebay-steps-{}", std::process::id()));
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let backing = open(&path, true, false).unwrap();
        let made = open(Path::new("/dev/loop-control"), true, true)
            .ok()
            .and_then(|control| sys::loop_free_number(control.as_fd()).ok());
        if let Some(number) = made {
            let device = open_node(&PathBuf::from(format!("/dev/loop{number}")), true).unwrap();
            let options = LoopOptions { block_size: 512, ..LoopOptions::default() };
            match attach_in_steps(&device, &backing, &sys::LoopInfo::ZERO, options) {
                Ok(()) => {
                    assert_eq!(attached_to(&Host::default(), &path).len(), 1);
                    sys::loop_clear(device.as_fd()).unwrap();
                }
                Err(error) => forebay_testing::skip(&format!(
                    "loop_device: loop{number} was taken meanwhile: {error}"
                )),
            }
        } else {
            forebay_testing::skip("loop_device: no loop-control");
        }
        fs::remove_file(path).unwrap();
    }
}
