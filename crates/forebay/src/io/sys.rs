// SPDX-License-Identifier: Apache-2.0 OR MIT
//! System calls, one small function each, that answer as io_uring does: a result that is not
//! negative, or minus an errno.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::buffer::Span;

/// The kernel transfers at most this much in one call; asking for no more keeps results in an i32.
pub(crate) const TRANSFER_BYTES_MAX: usize = 1 << 30;

/// Turns a call's return value into "result or minus errno".
fn answer(result: i64) -> i32 {
    if result < 0 {
        -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        i32::try_from(result).unwrap_or(i32::MAX)
    }
}

/// Turns "result or minus errno" into a `Result`.
pub(crate) fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
}

/// An offset as the kernel takes it, or the errno for one it cannot take.
fn signed(offset: u64) -> Result<i64, i32> {
    i64::try_from(offset).map_err(|_| -libc::EINVAL)
}

/// Reads into `span` from `offset` on.
pub(crate) fn pread(fd: RawFd, span: Span, offset: u64) -> i32 {
    let offset = match signed(offset) {
        Ok(offset) => offset,
        Err(result) => return result,
    };
    let length = span.len().min(TRANSFER_BYTES_MAX);
    // SAFETY: a span is mapped memory of its length (B1), so the kernel writes nowhere else.
    answer(unsafe { libc::pread64(fd, span.pointer().cast(), length, offset) } as i64)
}

/// Writes `span` from `offset` on.
pub(crate) fn pwrite(fd: RawFd, span: Span, offset: u64) -> i32 {
    let offset = match signed(offset) {
        Ok(offset) => offset,
        Err(result) => return result,
    };
    let length = span.len().min(TRANSFER_BYTES_MAX);
    // SAFETY: a span is mapped memory of its length (B1).
    answer(unsafe { libc::pwrite64(fd, span.pointer().cast(), length, offset) } as i64)
}

/// Reads bytes that are a slice; as [`pread`].
pub(crate) fn pread_slice(fd: RawFd, bytes: &mut [u8], offset: u64) -> i32 {
    let offset = match signed(offset) {
        Ok(offset) => offset,
        Err(result) => return result,
    };
    let length = bytes.len().min(TRANSFER_BYTES_MAX);
    // SAFETY: the kernel writes at most `length` bytes into the exclusively borrowed slice.
    answer(unsafe { libc::pread64(fd, bytes.as_mut_ptr().cast(), length, offset) } as i64)
}

/// Writes bytes that are a slice; as [`pwrite`].
pub(crate) fn pwrite_slice(fd: RawFd, bytes: &[u8], offset: u64) -> i32 {
    let offset = match signed(offset) {
        Ok(offset) => offset,
        Err(result) => return result,
    };
    let length = bytes.len().min(TRANSFER_BYTES_MAX);
    // SAFETY: the kernel reads at most `length` bytes of the borrowed slice.
    answer(unsafe { libc::pwrite64(fd, bytes.as_ptr().cast(), length, offset) } as i64)
}

/// fdatasync or fsync.
pub(crate) fn fsync(fd: RawFd, datasync: bool) -> i32 {
    // SAFETY: takes a number only; a bad one is answered EBADF.
    answer(i64::from(unsafe { if datasync { libc::fdatasync(fd) } else { libc::fsync(fd) } }))
}

/// What was being written before, what is not yet, and all of it to its end.
pub(crate) const WRITE_OUT: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE
    | libc::SYNC_FILE_RANGE_WRITE
    | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// sync_file_range, all of it.
pub(crate) fn write_out(fd: RawFd, offset: u64, length: u32) -> i32 {
    let offset = match signed(offset) {
        Ok(offset) => offset,
        Err(result) => return result,
    };
    // SAFETY: takes numbers only.
    answer(i64::from(unsafe { libc::sync_file_range(fd, offset, i64::from(length), WRITE_OUT) }))
}

/// fallocate with a mode.
pub(crate) fn fallocate(fd: RawFd, mode: i32, offset: u64, length: u64) -> i32 {
    let (offset, length) = match (signed(offset), signed(length)) {
        (Ok(offset), Ok(length)) => (offset, length),
        (Err(result), _) | (_, Err(result)) => return result,
    };
    // SAFETY: takes numbers only.
    answer(i64::from(unsafe { libc::fallocate64(fd, mode, offset, length) }))
}

/// Receives without blocking.
pub(crate) fn recv(fd: RawFd, span: Span) -> i32 {
    let length = span.len().min(TRANSFER_BYTES_MAX);
    // SAFETY: a span is mapped memory of its length (B1).
    answer(unsafe { libc::recv(fd, span.pointer().cast(), length, libc::MSG_DONTWAIT) } as i64)
}

/// Sends without blocking, and without a signal if the peer is gone.
pub(crate) fn send(fd: RawFd, span: Span) -> i32 {
    let length = span.len().min(TRANSFER_BYTES_MAX);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: a span is mapped memory of its length (B1).
    answer(unsafe { libc::send(fd, span.pointer().cast(), length, flags) } as i64)
}

/// Accepts a connection; the new descriptor is non-blocking and closed on exec.
pub(crate) fn accept(fd: RawFd) -> i32 {
    let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel is given no place for an address.
    let result = unsafe { libc::accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), flags) };
    answer(i64::from(result))
}

/// Takes a descriptor that an accept, ours or the ring's, has just given.
pub(crate) fn accepted(fd: RawFd) -> OwnedFd {
    // SAFETY: called once for each accept's result, before anybody else sees it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Makes a descriptor non-blocking.
pub(crate) fn set_nonblocking(fd: RawFd) -> i32 {
    // SAFETY: takes numbers only.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 || flags & libc::O_NONBLOCK != 0 {
        return answer(i64::from(flags)).min(0);
    }
    // SAFETY: takes numbers only.
    answer(i64::from(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }))
}

/// Takes O_DIRECT off an open file.
pub(crate) fn clear_direct(fd: RawFd) -> i32 {
    // SAFETY: takes numbers only.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return answer(i64::from(flags));
    }
    // SAFETY: takes numbers only.
    answer(i64::from(unsafe { libc::fcntl(fd, libc::F_SETFL, flags & !libc::O_DIRECT) }))
}

/// Waits until one of `fds` is ready; `None` waits without an end.
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> i32 {
    let timespec = timeout.map(|timeout| libc::timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    let pointer = timespec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: `fds` is exclusively borrowed and `count` long; `pointer` is null or `timespec`.
    answer(i64::from(unsafe { libc::ppoll(fds.as_mut_ptr(), count, pointer, std::ptr::null()) }))
}

/// Keeps signals away from this thread, so that they interrupt the loop and not a worker.
pub(crate) fn block_signals() {
    // SAFETY: a sigset_t is plain bits for which zero is a value.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is exclusively borrowed.
    unsafe { libc::sigfillset(&raw mut set) };
    // SAFETY: `set` is filled; the old mask is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) };
}

/// An eventfd that counts from zero.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    checked(answer(i64::from(fd)))?;
    // SAFETY: the kernel has just given us this descriptor, nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to an eventfd.
pub(crate) fn eventfd_ring(fd: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: eight bytes of a live array. Only a full counter fails, and that rings as well.
    unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// Sets an eventfd to zero.
pub(crate) fn eventfd_clear(fd: BorrowedFd<'_>) {
    let mut count = [0u8; 8];
    // SAFETY: eight bytes of a live array. An empty counter is answered EAGAIN, which is fine.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
}

/// Takes the exclusive flock of a descriptor, or answers EWOULDBLOCK.
pub(crate) fn lock_exclusive(fd: BorrowedFd<'_>) -> i32 {
    // SAFETY: takes numbers only.
    answer(i64::from(unsafe { libc::flock(fd.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }))
}

/// Locks a file for readers, unless somebody has it alone.
pub(crate) fn lock_shared(fd: BorrowedFd<'_>) -> i32 {
    // SAFETY: takes numbers only.
    answer(i64::from(unsafe { libc::flock(fd.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) }))
}

/// The byte that says of an open file that it may write, as [`mark_writing`] locks it: one that nothing else is known to lock, below what 32 bits
/// hold. It need not be there.
const WRITING_BYTE: libc::off_t = 0x666F_7265;

fn writing_lock(kind: c_int) -> libc::flock {
    // SAFETY: a lock is plain numbers for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = WRITING_BYTE;
    lock.l_len = 1;
    lock
}

/// Marks an open file as one that may write, until the kernel has let go of it: whatever was begun through it has it, and the mark stands. It
/// is beside `flock`, and many may have it.
pub(crate) fn mark_writing(fd: BorrowedFd<'_>) -> i32 {
    let lock = writing_lock(libc::F_RDLCK);
    // SAFETY: the request reads one lock.
    answer(i64::from(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }))
}

/// Whether another open file of the same file is marked so.
pub(crate) fn is_marked_writing(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut lock = writing_lock(libc::F_WRLCK);
    // SAFETY: the request writes one lock to the pointer.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    checked(answer(i64::from(result)))?;
    // What others lock besides is theirs.
    let is_mark = lock.l_pid == -1 && (lock.l_start, lock.l_len) == (WRITING_BYTE, 1);
    Ok(i32::from(lock.l_type) == libc::F_RDLCK && is_mark)
}

/// Size of a block device in bytes.
pub(crate) fn block_size_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    /// `_IOR(0x12, 114, size_t)`, which libc does not name.
    const BLKGETSIZE64: u64 = 0x8000_1272 | ((size_of::<usize>() as u64) << 16);
    let mut size = 0u64;
    // SAFETY: the request writes one u64 to the pointer.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64 as libc::Ioctl, &raw mut size) };
    checked(answer(i64::from(result)))?;
    Ok(size)
}

/// Logical block size of a block device.
pub(crate) fn block_logical(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut size: c_int = 0;
    // SAFETY: the request writes one int to the pointer.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKSSZGET, &raw mut size) };
    checked(answer(i64::from(result)))?;
    u32::try_from(size).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Whether a block device takes no writes. It can be opened for them all the same.
pub(crate) fn block_is_read_only(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // `_IO(0x12, 94)`, which libc lacks, beside `_IO(0x12, 104)`.
    const BLKROGET: libc::Ioctl = libc::BLKSSZGET - 10;
    let mut found: c_int = 0;
    // SAFETY: the request writes one int to the pointer.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKROGET, &raw mut found) };
    checked(answer(i64::from(result)))?;
    Ok(found != 0)
}

/// What O_DIRECT wants of memory and of offsets, if the kernel says so (since 6.1). An offset
/// alignment of zero means that the file does not take O_DIRECT.
pub(crate) fn direct_alignment(fd: BorrowedFd<'_>) -> Option<(u32, u32)> {
    // SAFETY: a statx is plain numbers for which zero is a value.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH;
    // SAFETY: the path is an empty C string and `status` is exclusively borrowed.
    let result = unsafe {
        libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_DIOALIGN, &raw mut status)
    };
    if result < 0 || status.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    Some((status.stx_dio_mem_align, status.stx_dio_offset_align))
}

/// Anonymous memory, or a shared mapping of `fd`; page-aligned, and to `align` if that is more.
pub(crate) fn map(fd: Option<BorrowedFd<'_>>, length: usize, align: usize) -> io::Result<*mut u8> {
    let failed = |pointer: *mut libc::c_void| pointer == libc::MAP_FAILED;
    let reserve = length.checked_add(align).ok_or(io::ErrorKind::InvalidInput)?;
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping where the kernel likes it touches nothing of ours.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), reserve, libc::PROT_NONE, private, -1, 0) };
    if failed(base) {
        return Err(io::Error::last_os_error());
    }
    let skipped = base.cast::<u8>().align_offset(align.max(1));
    let start = base.cast::<u8>().wrapping_add(skipped);
    let (flags, raw) = match fd {
        Some(fd) => (libc::MAP_SHARED | libc::MAP_FIXED, fd.as_raw_fd()),
        None => (private | libc::MAP_FIXED, -1),
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: replaces a part of the mapping made above, which nobody else knows.
    let mapped = unsafe { libc::mmap(start.cast(), length, protection, flags, raw, 0) };
    if failed(mapped) {
        let error = io::Error::last_os_error();
        // SAFETY: the mapping made above, which nobody else knows.
        unsafe { libc::munmap(base, reserve) };
        return Err(error);
    }
    if skipped > 0 {
        // SAFETY: the part before `start` of the mapping made above.
        unsafe { libc::munmap(base, skipped) };
    }
    let tail = start.wrapping_add(length);
    let tail_bytes = reserve - skipped - length;
    if tail_bytes > 0 {
        // SAFETY: the part behind the memory, page-aligned because `length` and `start` are.
        unsafe { libc::munmap(tail.cast(), tail_bytes) };
    }
    Ok(start)
}

/// Puts fresh, untouched memory in the place of a mapping: what it held is given back, and its
/// addresses stay valid.
pub(crate) fn unmap_but_keep_addresses(pointer: *mut u8, length: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: replaces a mapping of our own. Where that fails the old one stays, which is valid.
    unsafe { libc::mmap(pointer.cast(), length, protection, flags, -1, 0) };
}

/// Gives a mapping of [`map`] back. Nobody uses it any more.
pub(crate) fn unmap(pointer: *mut u8, length: usize) {
    // SAFETY: a mapping of our own, whose owner gives it up.
    unsafe { libc::munmap(pointer.cast(), length) };
}

/// madvise, best effort: true if the kernel did it.
pub(crate) fn advise(span: Span, advice: c_int) -> bool {
    advise_at(span.pointer(), span.len(), advice)
}

/// As [`advise`], for a mapping of our own that is no span.
pub(crate) fn advise_at(pointer: *mut u8, length: usize, advice: c_int) -> bool {
    // SAFETY: mapped memory, a span's (B1) or a caller's own, and the advice used here (huge pages,
    // populate, and for private memory "not needed") leaves it mapped.
    unsafe { libc::madvise(pointer.cast(), length, advice) == 0 }
}
