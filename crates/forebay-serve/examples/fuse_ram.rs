// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file in memory, mounted as volumes are: what FUSE and loop cost without forebay.
//!
//! `fuse_ram DIRECTORY BYTES` mounts it as `DIRECTORY/vol` until standard input ends.

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyWrite, Request, Session, WriteFlags,
};
use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

const FILE: INodeNo = INodeNo(2);
const FOR_LONG: Duration = Duration::from_secs(24 * 3600);

struct Ram(Mutex<Vec<u8>>, u64);

impl Ram {
    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let is_file = ino == FILE;
        let since = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino,
            size: if is_file { self.1 } else { 0 },
            blocks: self.1 / 512,
            atime: since,
            mtime: since,
            ctime: since,
            crtime: since,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            perm: if is_file { 0o600 } else { 0o700 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Ram {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(256);
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("vol") => reply.entry(&FOR_LONG, &self.attributes(FILE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_LONG, &self.attributes(ino));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let bytes = self.0.lock().expect("nobody panics");
        let end = (offset + u64::from(size)).min(self.1) as usize;
        reply.data(bytes.get(offset as usize..end).unwrap_or_default());
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut bytes = self.0.lock().expect("nobody panics");
        match bytes.get_mut(offset as usize..offset as usize + data.len()) {
            Some(place) => place.copy_from_slice(data),
            None => return reply.error(Errno::EINVAL),
        }
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}

fn main() -> io::Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(directory), Some(size)) = (args.next(), args.next().and_then(|it| it.parse().ok()))
    else {
        return Err(io::Error::other("expected DIRECTORY BYTES"));
    };
    // Touched now, so that no write pays for its page.
    let ram = Ram(Mutex::new(vec![1; size as usize]), size);
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("fuse_ram".into()),
        MountOption::NoAtime,
        MountOption::CUSTOM("max_read=1048576".into()),
    ];
    let session = Session::new(ram, Path::new(&directory), &config)?.spawn()?;
    println!("ready");
    let _ = io::stdin().read_to_end(&mut Vec::new());
    session.umount_and_join()
}
