// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The allocator of programs that hold large maps: what is large lies in huge pages.
//!
//! The map of a large cache is looked at in random places. In pages of 4 KiB each look costs a walk
//! of the page tables besides the cache miss, and a prefetch has to wait for that walk. The kernel
//! gives huge pages to those who ask (`madvise`), which the system's allocator does not.
//!
//! # Invariants
//!
//! - **H1** What is [`is_large`] is a mapping of its own, everything else the system allocator's; the
//!   layout alone says which, when it is taken and when it is given back.
//!
//! A program uses it by `#[global_allocator] static HEAP: Heap = Heap;`.
#![allow(unsafe_code)]

use super::buffer::{HUGE_PAGE_BYTES, PAGE_BYTES};
use super::sys;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::null_mut;

/// The system's allocator, but for what is large.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

fn is_large(layout: Layout) -> bool {
    layout.size() >= HUGE_PAGE_BYTES && layout.align() <= HUGE_PAGE_BYTES
}

thread_local! {
    /// The file whose memory the next large piece is, and -1: it is nobody's.
    static NEXT: Cell<RawFd> = const { Cell::new(-1) };
}

/// Has `make` take one large piece of memory, and that be what the file holds. Whether it was: not if the
/// program has another allocator, or what it took is not large.
pub(super) fn with_file<T>(file: BorrowedFd<'_>, make: impl FnOnce() -> T) -> (T, bool) {
    NEXT.set(file.as_raw_fd());
    let made = make();
    (made, NEXT.replace(-1) == -1)
}

/// Memory in huge pages, where the kernel gives them: zeroed, or what [`with_file`] says. Null if there is
/// none.
fn map_next(layout: Layout) -> *mut u8 {
    let fd = NEXT.replace(-1);
    if fd == -1 {
        return map(layout);
    }
    let Some(length) = layout.size().checked_next_multiple_of(PAGE_BYTES) else {
        return null_mut();
    };
    // SAFETY: the caller of `with_file` lends it for as long as `make` runs, which is now.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let Ok(pointer) = sys::map(Some(file), length, HUGE_PAGE_BYTES) else { return null_mut() };
    sys::advise_at(pointer, length, libc::MADV_HUGEPAGE);
    pointer
}

/// Zeroed memory in huge pages, where the kernel gives them; null if there is none.
fn map(layout: Layout) -> *mut u8 {
    let Some(length) = layout.size().checked_next_multiple_of(PAGE_BYTES) else {
        return null_mut();
    };
    let Ok(pointer) = sys::map(None, length, HUGE_PAGE_BYTES) else { return null_mut() };
    sys::advise_at(pointer, length, libc::MADV_HUGEPAGE);
    pointer
}

// SAFETY: memory is the system allocator's, or a fresh mapping of at least the layout's size, aligned
// to a huge page, which is as much as `is_large` lets a layout ask for; each goes back to where it
// came from (H1).
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_large(layout) {
            return map_next(layout);
        }
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_large(layout) {
            return map(layout);
        }
        // SAFETY: the caller's word.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_large(layout) {
            return sys::unmap(pointer, layout.size().next_multiple_of(PAGE_BYTES));
        }
        // SAFETY: the caller's word, and it is the system allocator's (H1).
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's word: the size is not zero and does not overflow with the alignment.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_large(layout) && !is_large(wanted) {
            // SAFETY: the caller's word, and it is the system allocator's (H1).
            return unsafe { System.realloc(pointer, layout, size) };
        }
        // SAFETY: `wanted` has a size that is not zero, by the caller's word.
        let new = unsafe { self.alloc(wanted) };
        if !new.is_null() {
            let bytes = layout.size().min(size);
            // SAFETY: both are at least that long, and the new one is nobody else's.
            unsafe { new.copy_from_nonoverlapping(pointer, bytes) };
            // SAFETY: the caller's word; it is not used any more.
            unsafe { self.dealloc(pointer, layout) };
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_every_size_is_zeroed_aligned_and_kept_when_it_grows_and_shrinks() {
        let sizes = [2, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 5, 9 << 20];
        for from in sizes {
            for to in sizes {
                for align in [1, 8, 4096, HUGE_PAGE_BYTES] {
                    let layout = Layout::from_size_align(from, align).expect("a layout");
                    // SAFETY: the size is not zero.
                    let first = unsafe { Heap.alloc_zeroed(layout) };
                    assert!(!first.is_null() && (first as usize).is_multiple_of(align));
                    let ends = [0, from - 1];
                    for at in ends {
                        // SAFETY: inside what was allocated.
                        let byte = unsafe { first.add(at) };
                        // SAFETY: as above, and nobody else knows it.
                        assert_eq!(unsafe { byte.replace(7) }, 0);
                    }
                    // SAFETY: allocated just above with that layout; the new size is not zero.
                    let second = unsafe { Heap.realloc(first, layout, to) };
                    assert!(!second.is_null() && (second as usize).is_multiple_of(align));
                    for at in ends.into_iter().filter(|at| *at < to) {
                        // SAFETY: inside what was allocated.
                        assert_eq!(unsafe { second.add(at).read() }, 7);
                    }
                    let layout = Layout::from_size_align(to, align).expect("a layout");
                    // SAFETY: allocated just above with that size and alignment.
                    unsafe { Heap.dealloc(second, layout) };
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_had_is_null() {
        let layout = Layout::from_size_align(isize::MAX as usize - 4096, 8).expect("a layout");
        // SAFETY: the size is not zero.
        assert!(unsafe { Heap.alloc(layout) }.is_null());
    }
}
