// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The ioctls of the loop driver, with the kernel's own structures, and a thread's own table of files. Nothing
//! else is unsafe here.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

const LOOP_SET_FD: u64 = 0x4C00;
const LOOP_CLR_FD: u64 = 0x4C01;
const LOOP_SET_CAPACITY: u64 = 0x4C07;
const LOOP_SET_STATUS64: u64 = 0x4C04;
const LOOP_GET_STATUS64: u64 = 0x4C05;
const LOOP_SET_DIRECT_IO: u64 = 0x4C08;
const LOOP_SET_BLOCK_SIZE: u64 = 0x4C09;
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;

/// `lo_flags` of `struct loop_info64`.
pub(super) const LO_FLAGS_READ_ONLY: u32 = 1;
pub(super) const LO_FLAGS_AUTOCLEAR: u32 = 4;
pub(super) const LO_FLAGS_PARTSCAN: u32 = 8;
pub(super) const LO_FLAGS_DIRECT_IO: u32 = 16;

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LoopInfo {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) rdevice: u64,
    pub(super) offset: u64,
    pub(super) size_limit: u64,
    pub(super) number: u32,
    pub(super) encrypt_type: u32,
    pub(super) encrypt_key_size: u32,
    pub(super) flags: u32,
    pub(super) file_name: [u8; 64],
    pub(super) crypt_name: [u8; 64],
    pub(super) encrypt_key: [u8; 32],
    pub(super) init: [u64; 2],
}

impl LoopInfo {
    pub(super) const ZERO: Self = Self {
        device: 0,
        inode: 0,
        rdevice: 0,
        offset: 0,
        size_limit: 0,
        number: 0,
        encrypt_type: 0,
        encrypt_key_size: 0,
        flags: 0,
        file_name: [0; 64],
        crypt_name: [0; 64],
        encrypt_key: [0; 32],
        init: [0; 2],
    };
}

/// `struct loop_config` of `linux/loop.h`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232);
const _: () = assert!(size_of::<LoopConfig>() == 304);

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn ioctl_value(fd: BorrowedFd<'_>, request: u64, value: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: every request passed here takes its argument by value, so the kernel touches no
    // memory of ours; `fd` is open for as long as it is borrowed.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request as libc::Ioctl, value) })
}

/// The number of a free loop device, made if need be.
pub(super) fn loop_free_number(control: BorrowedFd<'_>) -> io::Result<u32> {
    let number = ioctl_value(control, LOOP_CTL_GET_FREE, 0)?;
    Ok(number.cast_unsigned())
}

/// Everything in one call (Linux 5.8 and later).
pub(super) fn loop_configure(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    block_size: u32,
    info: &LoopInfo,
) -> io::Result<()> {
    let config = LoopConfig {
        fd: file.as_raw_fd().cast_unsigned(),
        block_size,
        info: *info,
        reserved: [0; 8],
    };
    // SAFETY: LOOP_CONFIGURE reads one `struct loop_config`; `config` is one (size asserted above)
    // and lives until the call returns.
    let result = unsafe {
        libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as libc::Ioctl, &raw const config)
    };
    checked(result).map(drop)
}

/// The first half of the way before Linux 5.8.
pub(super) fn loop_set_fd(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<()> {
    let value = libc::c_ulong::from(file.as_fd().as_raw_fd().cast_unsigned());
    ioctl_value(device, LOOP_SET_FD, value).map(drop)
}

/// The second half of the way before Linux 5.8.
pub(super) fn loop_set_status(device: BorrowedFd<'_>, info: &LoopInfo) -> io::Result<()> {
    // SAFETY: LOOP_SET_STATUS64 reads one `struct loop_info64`; `info` is one (size asserted
    // above) and is borrowed until the call returns.
    let result = unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            LOOP_SET_STATUS64 as libc::Ioctl,
            std::ptr::from_ref::<LoopInfo>(info),
        )
    };
    checked(result).map(drop)
}

/// What the driver says of an attached device; `ENXIO` when it is not attached.
pub(super) fn loop_status(device: BorrowedFd<'_>) -> io::Result<LoopInfo> {
    let mut info = LoopInfo::ZERO;
    // SAFETY: LOOP_GET_STATUS64 writes one `struct loop_info64`; `info` is one (size asserted
    // above), borrowed alone, and any bytes are a valid value of it.
    let result =
        unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64 as libc::Ioctl, &raw mut info) };
    checked(result)?;
    Ok(info)
}

/// Turns direct I/O of the backing file on or off.
pub(super) fn loop_set_direct_io(device: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    ioctl_value(device, LOOP_SET_DIRECT_IO, libc::c_ulong::from(on)).map(drop)
}

/// Sets the logical block size.
pub(super) fn loop_set_block_size(device: BorrowedFd<'_>, block_size: u32) -> io::Result<()> {
    ioctl_value(device, LOOP_SET_BLOCK_SIZE, libc::c_ulong::from(block_size)).map(drop)
}

/// Takes the file away from the device, now or when the last opener closes it.
pub(super) fn loop_clear(device: BorrowedFd<'_>) -> io::Result<()> {
    ioctl_value(device, LOOP_CLR_FD, 0).map(drop)
}

/// Has the driver ask how large the device's file is.
pub(super) fn loop_set_capacity(device: BorrowedFd<'_>) -> io::Result<()> {
    ioctl_value(device, LOOP_SET_CAPACITY, 0).map(drop)
}

/// Gives this thread a mount namespace of its own, with copies of all mounts.
pub(super) fn unshare_mounts() -> io::Result<()> {
    // SAFETY: takes no memory.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) }).map(drop)
}

/// Gives this thread a table of open files of its own, and closes in it all but the standard ones
/// and `kept`.
pub(super) fn leave_files(mut kept: Vec<RawFd>) -> io::Result<()> {
    // SAFETY: takes no memory. The other threads keep their table; what this thread's code may do
    // with descriptors afterwards is said at `apart::spawn`.
    checked(unsafe { libc::unshare(libc::CLONE_FILES) })?;
    kept.retain(|fd| *fd > 2);
    kept.sort_unstable();
    let mut first = 3;
    for end in kept.into_iter().map(i64::from).chain([i64::from(u32::MAX) + 1]) {
        if first < end {
            // SAFETY: takes no memory, and the table is this thread's alone.
            let result = unsafe { libc::syscall(libc::SYS_close_range, first, end - 1, 0) };
            checked(result as libc::c_int)?;
        }
        first = end + 1;
    }
    Ok(())
}
