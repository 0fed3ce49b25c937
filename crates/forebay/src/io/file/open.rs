// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening a file or block device: kind, size, alignment, and the lock.

use rustix::fs::{OFlags, Timespec, Timestamps, UTIME_OMIT};
use std::collections::VecDeque;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::bounce::Bounces;
use super::{FileDevice, PUNCH, ZeroWay};
use crate::advice::of_path;
use crate::io::buffer::Arena;
use crate::io::device::{DeviceInfo, DeviceKind};
use crate::io::slab::{ROOM, Slab};
use crate::io::sys;

/// How to open a file or block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Refuse writes.
    pub read_only: bool,
    /// Go around the page cache where the file allows it.
    pub direct: bool,
    /// The unit of reading and writing to present, 512 or 4096; a block device's own, and 512 for
    /// a file, if not given.
    pub logical_block: Option<u32>,
    /// Nobody else may have it open for this: O_EXCL for block devices, flock for files, which
    /// those who only read share.
    pub exclusive: bool,
    /// Marks the reactor's results that belong to this device.
    pub source: u16,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            read_only: false,
            direct: true,
            logical_block: None,
            exclusive: true,
            source: 0,
        }
    }
}

/// Why a file or block device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Somebody else has it.
    #[error("{}: is in use by another process; stop that one; `lsof {}` names it",
        path.display(), path.display())]
    Busy {
        /// Which.
        path: PathBuf,
    },
    /// Nobody has it, but what was begun with it before may still be written.
    #[error("{}: something was being written to it, by a process that has let go of it since, and the device has not answered: that could be \
             written over what comes now; `dmesg` may say why. It can be had again when it has answered", path.display())]
    Unanswered {
        /// Which.
        path: PathBuf,
    },
    /// It is neither a regular file nor a block device.
    #[error("{}: is neither a regular file nor a block device; `lsblk -p` lists the disks that are there", path.display())]
    Kind {
        /// Which.
        path: PathBuf,
    },
    /// It takes no writes.
    #[error("{}: is a read-only block device, so nothing could ever be written to it; `blockdev --setrw {}` changes that where the \
             disk itself takes writes", path.display(), path.display())]
    ReadOnly {
        /// Which.
        path: PathBuf,
    },
    /// It takes writes in the order of their places only.
    #[error("{}: is a host-managed zoned disk, which takes no writes but at the end of what a zone has; use another, or one that has the \
             zones managed (dm-zoned)", path.display())]
    Zoned {
        /// Which.
        path: PathBuf,
    },
    /// Its logical block is larger than the one asked for, or not one we know.
    #[error("{}: has logical blocks of {found} bytes, not {wanted}; 512 and 4096 are known",
        path.display())]
    LogicalBlock {
        /// Which.
        path: PathBuf,
        /// What it has.
        found: u32,
        /// What was asked for.
        wanted: u32,
    },
    /// The system refused something.
    #[error("{}: cannot {what} it: {why}; {}", path.display(), of_path(why))]
    System {
        /// Which.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why not. It is said above, so it is no source, which would be told once more.
        why: io::Error,
    },
}

impl FileError {
    /// Whether it may be had in a moment, or later.
    pub fn is_busy(&self) -> bool {
        matches!(self, FileError::Busy { .. } | FileError::Unanswered { .. })
    }
}

impl FileDevice {
    /// Opens a file or block device that exists.
    pub fn open(path: &Path, options: &FileOptions) -> Result<FileDevice, FileError> {
        Opened::attempt(path, options)?.device(path, options)
    }
}

impl FileDevice {
    /// A device whose open file, lock and all, came from elsewhere. `path` names it.
    pub fn over(file: File, path: &Path, options: &FileOptions) -> Result<FileDevice, FileError> {
        let status = file.metadata().map_err(system(path, "examine"))?;
        let flags = rustix::fs::fcntl_getfl(&file).map_err(io::Error::from);
        let flags = flags.map_err(system(path, "examine"))?;
        let direct = options.direct && flags.contains(OFlags::DIRECT);
        Opened { file, direct, status }.device(path, options)
    }
}

/// An open file with its lock.
struct Opened {
    file: File,
    direct: bool,
    status: Metadata,
}

impl Opened {
    fn attempt(path: &Path, options: &FileOptions) -> Result<Opened, FileError> {
        let found = std::fs::metadata(path).map_err(system(path, "find"))?;
        let block = found.file_type().is_block_device();
        if !block && !found.is_file() {
            return Err(FileError::Kind { path: path.to_owned() });
        }
        let claim = if block && options.exclusive { libc::O_EXCL } else { 0 };
        let open = |direct: i32| {
            let mut how = OpenOptions::new();
            how.read(true).write(!options.read_only).custom_flags(claim | direct).open(path)
        };
        let (file, direct) = match open(if options.direct { libc::O_DIRECT } else { 0 }) {
            Err(error) if options.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                (open(0), false) // the file system does not know O_DIRECT
            }
            other => (other, options.direct),
        };
        let busy = || FileError::Busy { path: path.to_owned() };
        let file = match file {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(busy()),
            other => other.map_err(system(path, "open"))?,
        };
        if options.exclusive && !block {
            // Readers may be several.
            let lock = if options.read_only { sys::lock_shared } else { sys::lock_exclusive };
            match lock(file.as_fd()) {
                result if result == -libc::EWOULDBLOCK => return Err(busy()),
                result => sys::checked(result).map_err(system(path, "lock"))?,
            };
        }
        // Who marks it has it for itself (F3), so nobody does from here on.
        if options.exclusive && sys::is_marked_writing(file.as_fd()).unwrap_or(false) {
            return Err(FileError::Unanswered { path: path.to_owned() });
        }
        let status = file.metadata().map_err(system(path, "examine"))?;
        // Replaced between looking, opening and locking: what we hold is not what the path names.
        let named = std::fs::metadata(path).map_err(system(path, "find"))?;
        if (status.dev(), status.ino()) != (named.dev(), named.ino()) {
            return Err(busy());
        }
        if block && !options.read_only {
            // The kernel opens it and refuses each write.
            if sys::block_is_read_only(file.as_fd()).map_err(system(path, "examine"))? {
                return Err(FileError::ReadOnly { path: path.to_owned() });
            }
            if queue_says(status.rdev(), "zoned").is_some_and(|text| is_host_managed(&text)) {
                return Err(FileError::Zoned { path: path.to_owned() });
            }
        }
        Ok(Opened { file, direct, status })
    }

    fn device(self, path: &Path, options: &FileOptions) -> Result<FileDevice, FileError> {
        let Opened { file, direct, status } = self;
        let block = status.file_type().is_block_device();
        let kind = if block { DeviceKind::Block } else { DeviceKind::File };
        let size_bytes = size_of_file(&file, kind).map_err(system(path, "measure"))?;
        let hardware = match kind {
            DeviceKind::Block => {
                sys::block_logical(file.as_fd()).map_err(system(path, "examine"))?
            }
            _ => 512,
        };
        let logical_block = options.logical_block.unwrap_or(hardware);
        if logical_block < hardware || !matches!(logical_block, 512 | 4096) {
            let path = path.to_owned();
            return Err(FileError::LogicalBlock { path, found: hardware, wanted: logical_block });
        }
        let alignment = if direct { alignment(&file, hardware) } else { None };
        let buffered = match alignment {
            Some(_) => Some(reopened(&file, path, options).map_err(system(path, "reopen"))?),
            None => None,
        };
        if let Some(second) = buffered.as_ref().filter(|_| options.exclusive && !options.read_only)
        {
            // Some network file systems know one kind of lock, which the other open file has: it is done without there.
            let _ = sys::mark_writing(second.as_fd()); // F3
        }
        if direct && alignment.is_none() {
            // The lock stays with the open file, so O_DIRECT is taken off instead of opening anew.
            sys::checked(sys::clear_direct(file.as_raw_fd())).map_err(system(path, "open"))?;
        }
        let (memory_align, offset_align) = alignment.unwrap_or((1, 1));
        let may_write = !options.read_only;
        let (volatile_cache, discards) = if block {
            block_promises(status.rdev())
        } else {
            (true, may_write && takes_holes(&file))
        };
        let info = DeviceInfo {
            name: path.display().to_string(),
            size_bytes,
            logical_block,
            kind,
            volatile_cache,
            discards: discards && may_write,
            direct: alignment.is_some(),
            read_only: options.read_only,
        };
        let device = FileDevice {
            info,
            main: file,
            buffered,
            offset_align: u64::from(offset_align),
            memory_align: memory_align as usize,
            takes_changing: takes_changing(if block { status.rdev() } else { status.dev() }),
            source: options.source,
            flights: Slab::new(),
            waiting: VecDeque::with_capacity(ROOM),
            writers: 0,
            write_bytes: 0,
            alone: false,
            ready: Vec::with_capacity(ROOM),
            since: None,
            zero_way: ZeroWay::Range,
            asks_discards: discards || !block,
            zeros: None,
            bounces: Bounces::new(),
            is_ours: options.exclusive && !options.read_only,
            cut: None,
        };
        device.drop_cached();
        Ok(device)
    }
}

/// Whether a file takes holes: it is asked for one behind its end, where nothing of it is.
fn takes_holes(file: &File) -> bool {
    let Ok(before) = file.metadata() else { return false };
    let end = before.len().next_multiple_of(4096);
    let takes = sys::checked(sys::fallocate(file.as_raw_fd(), PUNCH, end, 4096)).is_ok();
    if takes {
        // The kernel takes it for a write. When others wrote it last is asked for when it is not as it was left, and by backups.
        let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let written = Timespec { tv_sec: before.mtime(), tv_nsec: before.mtime_nsec() as _ };
        let times = Timestamps { last_access: omit, last_modification: written };
        let _ = rustix::fs::futimens(file, &times);
    }
    takes
}

/// How large it is now.
pub(super) fn size_of_file(file: &File, kind: DeviceKind) -> io::Result<u64> {
    match kind {
        DeviceKind::Block => sys::block_size_bytes(file.as_fd()),
        _ => Ok(file.metadata()?.len()),
    }
}

/// What O_DIRECT wants of memory and of offsets; `None` if it works for no alignment we know.
fn alignment(file: &File, hardware: u32) -> Option<(u32, u32)> {
    if let Some((memory, offset)) = sys::direct_alignment(file.as_fd()) {
        return (offset > 0).then(|| (memory.max(1), offset.max(1)));
    }
    // The kernel does not say: try. Memory is then asked to be as aligned as offsets.
    let arena = Arena::reserved(4096).ok()?;
    [512, 4096].into_iter().filter(|unit| *unit >= hardware).find_map(|unit| {
        let result = sys::pread(file.as_raw_fd(), arena.span(0, unit as usize), 0);
        (result != -libc::EINVAL).then_some((unit, unit))
    })
}

/// The same file again, without O_DIRECT.
fn reopened(file: &File, path: &Path, options: &FileOptions) -> io::Result<File> {
    let mut how = OpenOptions::new();
    how.read(true).write(!options.read_only);
    if let Ok(again) = how.open(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        return Ok(again);
    }
    let again = how.open(path)?; // no /proc here
    let (one, two) = (file.metadata()?, again.metadata()?);
    if (one.dev(), one.ino()) == (two.dev(), two.ino()) {
        Ok(again)
    } else {
        Err(io::Error::from_raw_os_error(libc::ESTALE))
    }
}

/// Whether bytes may change while they are written to a block device, or to a file of the file system on it (F4). Of file systems without a
/// block device of their own (btrfs, ZFS, what is in memory or elsewhere) nobody can tell.
fn takes_changing(device: u64) -> bool {
    queue_says(device, "stable_writes").is_some_and(|text| text.trim() == "0")
}

/// What the kernel says of a block device's queue.
fn queue_says(device: u64, name: &str) -> Option<String> {
    let base = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    // A partition's queue is its disk's.
    let own = std::fs::read_to_string(format!("{base}/queue/{name}"));
    own.or_else(|_| std::fs::read_to_string(format!("{base}/../queue/{name}"))).ok()
}

/// What a queue says of its zones, if its disk refuses what is written out of their order.
fn is_host_managed(zoned: &str) -> bool {
    zoned.trim() == "host-managed"
}

/// Whether a block device has a cache that a power cut empties, and whether it takes discards. A
/// device that says nothing is believed to have the first and not the second.
fn block_promises(device: u64) -> (bool, bool) {
    let says = |name| queue_says(device, name);
    let through = says("write_cache").is_some_and(|text| text.trim() == "write through");
    let discards = says("discard_max_bytes").is_some_and(|text| text.trim() != "0");
    (!through, discards)
}

fn system(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |why| FileError::System { path, what, why }
}
