// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The mounted directory: one file for each volume, as large as the volume.
//!
//! # Not here
//!
//! Anything that takes time: that is handed over ([`super::crossing`]).

use super::crossing::{Ask, Back, Crossing};
use forebay_core::request::Op;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The longest read and write.
pub(super) const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Requests the kernel lets be under way at once.
const BACKGROUND_COUNT: u16 = 256;
/// Nothing about a file changes while it is mounted.
const FOR_LONG: Duration = Duration::from_secs(24 * 3600);
const SECTOR_BYTES: u64 = 512;
const O_DSYNC: i32 = 0o10000;
const KEEP_SIZE: i32 = 0x01;
const PUNCH_HOLE: i32 = 0x02;
const ZERO_RANGE: i32 = 0x10;
const FIRST_FILE: u64 = INodeNo::ROOT.0 + 1;

/// A volume that is shown.
#[derive(Clone, Debug)]
pub struct FuseVolume {
    /// Its index.
    pub index: VolumeIndex,
    /// The name of its file.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Whether what is discarded reads as zeros. The loop driver asks for a hole for discards and
    /// for zeroing alike, so if this is false, holes are zeroed and discards are not offered.
    pub discards_to_zero: bool,
}

pub(super) struct Files {
    volumes: Vec<FuseVolume>,
    crossing: Arc<Crossing>,
    since: SystemTime,
}

impl Files {
    pub(super) fn new(volumes: Vec<FuseVolume>, crossing: Arc<Crossing>) -> Files {
        Files { volumes, crossing, since: SystemTime::now() }
    }

    fn volume(&self, ino: INodeNo) -> Option<&FuseVolume> {
        self.volumes.get(usize::try_from(ino.0.checked_sub(FIRST_FILE)?).ok()?)
    }

    fn attributes(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match self.volume(ino) {
            Some(volume) => (FileType::RegularFile, 0o600, volume.size_bytes),
            None if ino == INodeNo::ROOT => (FileType::Directory, 0o700, 0),
            None => return None,
        };
        Some(FileAttr {
            ino,
            size,
            blocks: size / SECTOR_BYTES,
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK_BYTES as u32,
            flags: 0,
        })
    }

    fn hand_over(&self, volume: &FuseVolume, op: Op, range: (u64, u64), reply: ReplyEmpty) {
        if !self.crossing.enter() {
            return reply.error(Errno::ENOTCONN);
        }
        let (offset, length) = range;
        let back = Back::Empty(reply);
        self.crossing.push(Ask { volume: volume.index, op, offset, length, memory: None, back });
    }
}

/// Whether a range can be handed to the engine.
fn fits(volume: &FuseVolume, offset: u64, length: u64) -> bool {
    let end = offset.checked_add(length);
    end.is_some_and(|end| end <= volume.size_bytes)
        && offset.is_multiple_of(SECTOR_BYTES)
        && length.is_multiple_of(SECTOR_BYTES)
}

fn fallocate_op(volume: &FuseVolume, mode: i32, offset: u64, length: u64) -> Option<Op> {
    let whole = offset.is_multiple_of(BLOCK_BYTES) && length.is_multiple_of(BLOCK_BYTES);
    match mode & !KEEP_SIZE {
        PUNCH_HOLE if volume.discards_to_zero && whole => Some(Op::Discard),
        PUNCH_HOLE | ZERO_RANGE => Some(Op::WriteZeroes { fua: false }),
        _ => None,
    }
}

impl Filesystem for Files {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |_| io::Error::from(io::ErrorKind::Unsupported);
        config.set_max_write(TRANSFER_BYTES_MAX).map_err(refused)?;
        config.set_max_background(BACKGROUND_COUNT).map_err(|_| refused(0))?;
        // Without it the loop device waits for each request; an old kernel does.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let at = self.volumes.iter().position(|volume| OsStr::new(&volume.name) == name);
        let attributes = at
            .filter(|_| parent == INodeNo::ROOT)
            .and_then(|at| self.attributes(INodeNo(FIRST_FILE + at as u64)));
        match attributes {
            Some(attributes) => reply.entry(&FOR_LONG, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Some(attributes) => reply.attr(&FOR_LONG, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        file: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let now = self.volume(ino).map(|volume| volume.size_bytes);
        if size.is_some() && size != now {
            return reply.error(Errno::EPERM);
        }
        self.getattr(request, ino, file, reply);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(volume) = self.volume(ino) else { return reply.error(Errno::ENOENT) };
        let end = offset.saturating_add(u64::from(size.min(TRANSFER_BYTES_MAX)));
        let end = end.min(volume.size_bytes);
        if offset >= end {
            return reply.data(&[]);
        }
        let from = offset / SECTOR_BYTES * SECTOR_BYTES;
        let to = end.next_multiple_of(SECTOR_BYTES);
        let first = from / BLOCK_BYTES;
        let blocks = to.div_ceil(BLOCK_BYTES) - first;
        let Some(memory) = self.crossing.enter_with(blocks as usize) else {
            return reply.error(Errno::ENOTCONN);
        };
        let skip = (offset - first * BLOCK_BYTES) as usize;
        self.crossing.push(Ask {
            volume: volume.index,
            op: Op::Read,
            offset: from,
            length: to - from,
            memory: Some(memory),
            back: Back::Bytes(reply, skip, (end - offset) as usize),
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(volume) = self.volume(ino) else { return reply.error(Errno::ENOENT) };
        let length = bytes.len() as u64;
        if length == 0 || !fits(volume, offset, length) {
            return reply.error(Errno::EINVAL);
        }
        let blocks = length.div_ceil(BLOCK_BYTES);
        let Some(memory) = self.crossing.enter_with(blocks as usize) else {
            return reply.error(Errno::ENOTCONN);
        };
        memory.1.copy_in(bytes);
        self.crossing.push(Ask {
            volume: volume.index,
            op: Op::Write { fua: flags.0 & O_DSYNC != 0 },
            offset,
            length,
            memory: Some((memory.0, memory.1.part(0, bytes.len()))),
            back: Back::Written(reply, length as u32),
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // A close promises nothing.
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.volume(ino) {
            Some(volume) => self.hand_over(volume, Op::Flush, (0, 0), reply),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let own = [".", ".."].map(|name| (INodeNo::ROOT, FileType::Directory, name));
        let files = self.volumes.iter().enumerate().map(|(at, volume)| {
            (INodeNo(FIRST_FILE + at as u64), FileType::RegularFile, volume.name.as_str())
        });
        let entries = (1..).zip(own.into_iter().chain(files)).skip(offset as usize);
        for (next, (ino, kind, name)) in entries {
            if reply.add(ino, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(volume) = self.volume(ino) else { return reply.error(Errno::ENOENT) };
        if length == 0 || !fits(volume, offset, length) {
            return reply.error(Errno::EINVAL);
        }
        match fallocate_op(volume, mode, offset, length) {
            Some(op) => self.hand_over(volume, op, (offset, length), reply),
            None => reply.error(Errno::EOPNOTSUPP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(discards_to_zero: bool) -> FuseVolume {
        let size_bytes = 10 * BLOCK_BYTES + 512;
        let index = VolumeIndex(0);
        FuseVolume { index, name: "v".into(), size_bytes, logical_block: 512, discards_to_zero }
    }

    #[test]
    fn range_that_leaves_the_volume_or_a_sector_does_not_fit() {
        let volume = volume(true);
        assert!(fits(&volume, 0, volume.size_bytes));
        assert!(fits(&volume, volume.size_bytes - 512, 512));
        assert!(!fits(&volume, volume.size_bytes - 512, 1024));
        assert!(!fits(&volume, u64::MAX - 511, 512));
        assert!(!fits(&volume, 1, 512));
        assert!(!fits(&volume, 0, 513));
    }

    #[test]
    fn hole_is_a_discard_only_where_that_reads_as_zeros() {
        let zero = Some(Op::WriteZeroes { fua: false });
        assert_eq!(fallocate_op(&volume(true), PUNCH_HOLE | KEEP_SIZE, 0, 8192), Some(Op::Discard));
        assert_eq!(fallocate_op(&volume(true), PUNCH_HOLE | KEEP_SIZE, 512, 4096), zero);
        assert_eq!(fallocate_op(&volume(false), PUNCH_HOLE | KEEP_SIZE, 0, 8192), zero);
        assert_eq!(fallocate_op(&volume(true), ZERO_RANGE, 0, 8192), zero);
        assert_eq!(fallocate_op(&volume(true), 0, 0, 8192), None);
    }
}
