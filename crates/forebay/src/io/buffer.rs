// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that devices read into and write from.
//!
//! An [`Arena`] is one run of page-aligned memory. A [`Span`] names a part of it in a form that
//! can be handed to the kernel or to another thread and outlives any borrow.
//!
//! # Invariants
//!
//! - **B1** The addresses of a span are mapped, readable and writable as long as the process
//!   lives. Dropping an arena gives its memory back but keeps the addresses: an operation that is
//!   still under way then meets memory that nobody reads.
//! - **B2** While an operation on a span is under way its bytes belong to the device: for a write
//!   nobody changes them, for a read nobody looks. The submitter keeps this.
//!
//! B1 makes a span safe to pass around. B2 is what the borrow checker cannot see, so the accessors
//! that lend out references are `unsafe`, and those that copy, inside the call, are not.
//!
//! # Limits
//!
//! Arenas are made at start and kept; the addresses of a dropped one are not used again.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use super::{stream, sys};
use crate::{checksum, ingest};
use forebay_core::units::BLOCK_SIZE;

pub(super) const PAGE_BYTES: usize = 4096;
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A part of an arena's memory: an address and a length, as the kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory is mapped for ever (B1) and B2 says who may touch it at any time, on
// whatever thread.
unsafe impl Send for Span {}
// SAFETY: as above; a shared span gives nothing that a copy of it does not.
unsafe impl Sync for Span {}

impl Span {
    /// Memory that is not an arena's.
    ///
    /// # Safety
    ///
    /// The memory stays mapped, readable and writable (B1) until the last copy of the span, and
    /// of any span cut from it, is gone and no operation on one is under way.
    pub const unsafe fn new(pointer: NonNull<u8>, length: usize) -> Span {
        Span { pointer, length }
    }

    /// First address.
    pub const fn pointer(self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Length in bytes.
    pub const fn len(self) -> usize {
        self.length
    }

    /// Whether it has no bytes.
    pub const fn is_empty(self) -> bool {
        self.length == 0
    }

    /// `length` bytes of it from `offset` on.
    ///
    /// # Panics
    ///
    /// If they are not all inside.
    #[must_use]
    #[inline]
    pub fn part(self, offset: usize, length: usize) -> Span {
        assert!(offset <= self.length);
        assert!(length <= self.length - offset);
        // SAFETY: `offset` is within the span, which is one mapping.
        let pointer = unsafe { self.pointer.add(offset) };
        Span { pointer, length }
    }

    /// What is left behind its first `offset` bytes.
    #[must_use]
    pub fn skip(self, offset: usize) -> Span {
        self.part(offset, self.length.saturating_sub(offset))
    }

    /// Copies `bytes` to its front. No operation on it may be under way (B2).
    #[inline]
    pub fn copy_in(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: mapped (B1) and long enough; `copy` allows `bytes` to lie in the same memory.
        unsafe { self.pointer().copy_from(bytes.as_ptr(), bytes.len()) };
    }

    /// Copies its front to `bytes`. No read into it may be under way (B2).
    pub fn copy_out(self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: mapped (B1) and long enough; `copy` allows `bytes` to lie in the same memory.
        unsafe { self.pointer().copy_to(bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Copies all of `source`, which is not longer, to its front.
    #[inline]
    pub fn copy_from(self, source: Span) {
        assert!(source.length <= self.length);
        // SAFETY: both mapped (B1) and long enough; `copy` allows an overlap.
        unsafe { self.pointer().copy_from(source.pointer(), source.length) };
    }

    /// Copies all of `source`, which is not longer, to its front, past this processor's caches.
    #[inline]
    pub fn stream_from(self, source: Span) {
        assert!(source.length <= self.length);
        // SAFETY: both mapped (B1) and long enough.
        unsafe { stream::copy(self.pointer(), source.pointer(), source.length) };
    }

    /// Makes it all zeros.
    pub fn fill_zero(self) {
        // SAFETY: mapped (B1) and that long.
        unsafe { self.pointer().write_bytes(0, self.length) };
    }

    /// Whether it is all zeros.
    pub fn is_zero(self) -> bool {
        // SAFETY: the reference ends with the call, and no other code of this thread runs inside.
        ingest::is_zero(unsafe { self.as_slice() })
    }

    /// CRC32C of its bytes.
    pub fn crc32c(self) -> u32 {
        // SAFETY: the reference ends with the call, and no other code of this thread runs inside.
        ingest::crc32c(unsafe { self.as_slice() })
    }

    /// The checksum that a block's entry holds, without its seed.
    ///
    /// # Panics
    ///
    /// If it is not as long as a block.
    #[inline]
    pub fn block_checksum(self) -> u32 {
        assert_eq!(self.length, BLOCK_SIZE);
        // SAFETY: mapped (B1) and that long, and no other code of this thread runs meanwhile.
        unsafe { checksum::block(self.pointer()) }
    }

    /// Copies a block from another place, and gives its checksum as [`Span::block_checksum`] does.
    ///
    /// # Panics
    ///
    /// If one of them is not as long as a block, or they overlap.
    #[inline]
    pub fn copy_block(self, source: Span) -> u32 {
        self.assert_blocks_apart(source);
        // SAFETY: both mapped (B1), that long and apart, and no other code of this thread runs meanwhile.
        unsafe { checksum::copy_block(self.pointer(), source.pointer()) }
    }

    /// The same for who copies many and looks at none of them soon: past the caches. Other processors, and devices, see it only
    /// behind [`stream::fence`].
    ///
    /// # Panics
    ///
    /// As [`Span::copy_block`].
    #[inline]
    pub(crate) fn stream_block(self, source: Span) -> u32 {
        self.assert_blocks_apart(source);
        // SAFETY: as above.
        unsafe { checksum::stream_block(self.pointer(), source.pointer()) }
    }

    #[inline]
    fn assert_blocks_apart(self, source: Span) {
        assert_eq!((self.length, source.length), (BLOCK_SIZE, BLOCK_SIZE));
        let apart = self.pointer.as_ptr().addr().abs_diff(source.pointer.as_ptr().addr());
        assert!(apart >= BLOCK_SIZE);
    }

    /// Copies `bytes` to its front and gives their CRC32C.
    pub fn copy_in_checksum(self, bytes: &[u8]) -> u32 {
        self.copy_in(bytes);
        self.part(0, bytes.len()).crc32c()
    }

    /// Its bytes.
    ///
    /// # Safety
    ///
    /// While the reference lives nothing changes the bytes: no read into them is under way (B2)
    /// and no other copy of the span is written through.
    pub const unsafe fn as_slice<'a>(self) -> &'a [u8] {
        // SAFETY: mapped (B1), zeroed by the kernel at first, unchanging by the caller's word.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.length) }
    }

    /// Its bytes, to be changed.
    ///
    /// # Safety
    ///
    /// While the reference lives it is the only way to the bytes: no operation on them is under
    /// way (B2) and no other copy of the span is used.
    pub const unsafe fn as_mut_slice<'a>(self) -> &'a mut [u8] {
        // SAFETY: mapped (B1), zeroed by the kernel at first, exclusive by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.length) }
    }
}

/// A run of page-aligned memory, taken at start.
#[derive(Debug)]
pub struct Arena {
    all: Span,
    huge: bool,
}

impl Arena {
    /// Zeroed memory of this process, in memory when this returns, with huge pages where the
    /// kernel gives them. The length is rounded up to whole pages.
    pub fn anonymous(length: usize) -> io::Result<Arena> {
        let arena = Arena::reserved(length)?;
        arena.prefault()?;
        Ok(arena)
    }

    /// As [`Arena::anonymous`], but pages are taken when they are first touched.
    pub fn reserved(length: usize) -> io::Result<Arena> {
        let length = whole_pages(length)?;
        let align = if length >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let all = mapped(sys::map(None, length, align)?, length)?;
        let huge = align == HUGE_PAGE_BYTES && sys::advise(all, libc::MADV_HUGEPAGE);
        Ok(Arena { all, huge })
    }

    /// The first `length` bytes of a file that several processes map, one after the other: a file
    /// on tmpfs or a memfd. A shorter file is made longer; what it holds is kept. The room is
    /// taken at once, so that a full tmpfs is an error here and not a signal later. Nobody may cut
    /// the file short while it is mapped. In huge pages where the kernel puts them together.
    pub fn shared_file(file: &File, length: usize) -> io::Result<Arena> {
        let length = whole_pages(length)?;
        match sys::checked(sys::fallocate(
            std::os::fd::AsRawFd::as_raw_fd(file),
            0,
            0,
            length as u64,
        )) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                if file.metadata()?.len() < length as u64 {
                    file.set_len(length as u64)?;
                }
            }
            Err(error) => return Err(error),
        }
        let align = if length >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let all = mapped(sys::map(Some(file.as_fd()), length, align)?, length)?;
        let mut arena = Arena { all, huge: false };
        arena.prefault()?;
        // What lies on tmpfs is in small pages nearly everywhere (`shmem_enabled`, `huge=`). Since Linux
        // 6.1 they are put together for who asks; the content stays.
        arena.huge = align == HUGE_PAGE_BYTES && sys::advise(all, libc::MADV_COLLAPSE);
        Ok(arena)
    }

    /// Takes every page now.
    fn prefault(&self) -> io::Result<()> {
        if sys::advise(self.all, libc::MADV_POPULATE_WRITE) {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
        // Linux before 5.14: touch each page by hand.
        for page in (0..self.all.len()).step_by(PAGE_BYTES) {
            let place = self.all.part(page, 1).pointer();
            // SAFETY: mapped (B1), and nobody else knows the memory yet.
            let byte = unsafe { place.read_volatile() };
            // SAFETY: as above; what was read is put back.
            unsafe { place.write_volatile(byte) };
        }
        Ok(())
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether it has no bytes; it always has.
    pub const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether the kernel was willing to back it with huge pages.
    pub const fn huge(&self) -> bool {
        self.huge
    }

    /// All of it.
    pub const fn whole(&self) -> Span {
        self.all
    }

    /// `length` bytes from `offset` on.
    ///
    /// # Panics
    ///
    /// If they are not all inside.
    #[inline]
    pub fn span(&self, offset: usize, length: usize) -> Span {
        self.all.part(offset, length)
    }

    /// Bytes `offset` to `offset + length`.
    ///
    /// # Safety
    ///
    /// As [`Span::as_slice`].
    pub unsafe fn slice(&self, offset: usize, length: usize) -> &[u8] {
        // SAFETY: the caller's word.
        unsafe { self.span(offset, length).as_slice() }
    }

    /// Bytes `offset` to `offset + length`, to be changed.
    ///
    /// # Safety
    ///
    /// As [`Span::as_mut_slice`].
    pub unsafe fn slice_mut(&mut self, offset: usize, length: usize) -> &mut [u8] {
        // SAFETY: the caller's word.
        unsafe { self.span(offset, length).as_mut_slice() }
    }

    /// Gives the pages of private memory back; they read as zeros afterwards. Only whole pages:
    /// false, and nothing done, for anything else.
    pub(crate) fn forget(&self, offset: usize, length: usize) -> bool {
        offset.is_multiple_of(PAGE_BYTES)
            && length.is_multiple_of(PAGE_BYTES)
            && sys::advise(self.span(offset, length), libc::MADV_DONTNEED)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        sys::unmap_but_keep_addresses(self.all.pointer(), self.all.len()); // B1
    }
}

fn whole_pages(length: usize) -> io::Result<usize> {
    match length.checked_next_multiple_of(PAGE_BYTES) {
        Some(length) if length > 0 => Ok(length),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "an arena of no or too many bytes")),
    }
}

fn mapped(pointer: *mut u8, length: usize) -> io::Result<Span> {
    let pointer = NonNull::new(pointer).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: the kernel has just mapped it, and nothing ever unmaps it (B1).
    Ok(unsafe { Span::new(pointer, length) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    fn memfd() -> File {
        // SAFETY: a name and a flag.
        let fd = unsafe { libc::memfd_create(c"forebay-test".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the kernel has just given us this descriptor.
        unsafe { File::from_raw_fd(fd) }
    }

    #[test]
    fn memory_is_zeroed_and_aligned() {
        for length in [1, 4096, 4097, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 4096] {
            let arena = Arena::anonymous(length).unwrap();
            assert_eq!(arena.len(), length.next_multiple_of(PAGE_BYTES));
            let align = if length >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
            assert_eq!(arena.whole().pointer() as usize % align, 0);
            assert!(arena.whole().is_zero());
        }
        assert!(Arena::anonymous(0).is_err());
        assert!(Arena::anonymous(usize::MAX).is_err());
    }

    #[test]
    fn copies_go_where_they_should() {
        let arena = Arena::anonymous(8192).unwrap();
        let span = arena.span(4096, 16);
        assert_eq!(span.copy_in_checksum(b"123456789"), 0xE306_9283);
        let mut bytes = [1; 12];
        arena.span(4094, 12).copy_out(&mut bytes);
        assert_eq!(&bytes, b"\0\x00123456789\0");
        arena.span(0, 16).copy_from(span);
        assert!(!arena.span(0, 16).is_zero());
        span.fill_zero();
        assert!(arena.span(4096, 4096).is_zero());
        assert_eq!(arena.span(0, 9).crc32c(), 0xE306_9283);
        assert_eq!(arena.span(0, 16).skip(9).len(), 7);
        assert!(arena.forget(0, 4096));
        assert!(!arena.forget(1, 4096));
        assert!(arena.whole().is_zero());
    }

    #[test]
    #[should_panic(expected = "length <= self.length - offset")]
    fn a_span_stays_inside() {
        let arena = Arena::reserved(4096).unwrap();
        let _ = arena.span(1, 4096);
    }

    #[test]
    fn a_block_is_copied_with_its_checksum() {
        let arena = Arena::anonymous(3 * BLOCK_SIZE).unwrap();
        let (from, to) = (arena.span(0, BLOCK_SIZE), arena.span(BLOCK_SIZE + 7, BLOCK_SIZE));
        from.copy_in(b"something");
        assert_eq!(to.copy_block(from), from.block_checksum());
        assert_eq!(to.crc32c(), from.crc32c());
        assert_eq!(arena.span(BLOCK_SIZE, 7).crc32c(), arena.span(3 * BLOCK_SIZE - 7, 7).crc32c());
    }

    #[test]
    #[should_panic(expected = "apart >= BLOCK_SIZE")]
    fn a_block_is_not_copied_onto_itself() {
        let arena = Arena::anonymous(2 * BLOCK_SIZE).unwrap();
        let _ = arena.span(1, BLOCK_SIZE).copy_block(arena.span(0, BLOCK_SIZE));
    }

    #[test]
    fn a_dropped_arena_keeps_its_addresses() {
        let arena = Arena::anonymous(4096).unwrap();
        let span = arena.whole();
        span.copy_in(b"old");
        drop(arena);
        assert!(span.is_zero());
        span.copy_in(b"late");
        assert!(!span.is_zero());
    }

    #[test]
    fn a_large_shared_file_keeps_what_it_holds() {
        let file = memfd();
        let length = 3 * HUGE_PAGE_BYTES + 4096;
        file.set_len(length as u64).unwrap();
        let places = [0, HUGE_PAGE_BYTES - 1, 2 * HUGE_PAGE_BYTES + 7, length - 1];
        for place in places {
            std::os::unix::fs::FileExt::write_all_at(&file, &[9], place as u64).unwrap();
        }
        let arena = Arena::shared_file(&file, length).unwrap();
        for place in places {
            assert_eq!(arena.span(place, 1).crc32c(), ingest::crc32c(&[9]), "{place}");
        }
        arena.span(HUGE_PAGE_BYTES, 5).copy_in(b"alive");
        let mut bytes = [0; 5];
        let at = HUGE_PAGE_BYTES as u64;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, at).unwrap();
        assert_eq!(&bytes, b"alive");
    }

    #[test]
    fn a_shared_file_is_seen_by_the_next_mapping() {
        let file = memfd();
        let first = Arena::shared_file(&file, 10_000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 12_288);
        first.span(9_000, 5).copy_in(b"alive");
        drop(first);
        let second = Arena::shared_file(&file, 4096 * 3).unwrap();
        let mut bytes = [0; 5];
        second.span(9_000, 5).copy_out(&mut bytes);
        assert_eq!(&bytes, b"alive");
    }
}
