// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An allocator that counts what each thread allocates.
//!
//! A test program that wants it says `#[global_allocator] static ALLOCATOR: Counting = Counting;`.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static TRAP: Cell<bool> = const { Cell::new(false) };
}

/// Begins to count on this thread; the first allocation is shown with where it comes from.
pub fn begin() -> u64 {
    TRAP.with(|trap| trap.set(true));
    COUNT.with(Cell::get)
}

/// How much this thread has allocated since the beginning that gave this number.
pub fn end(begun: u64) -> u64 {
    TRAP.with(|trap| trap.set(false));
    COUNT.with(Cell::get) - begun
}

fn count() {
    COUNT.with(|count| count.set(count.get() + 1));
    if TRAP.with(|trap| trap.replace(false)) {
        let before = COUNT.with(Cell::get);
        eprintln!("allocated at:\n{}", std::backtrace::Backtrace::force_capture());
        COUNT.with(|count| count.set(before));
    }
}

/// The system's allocator, counted.
#[derive(Debug)]
pub struct Counting;

// SAFETY: everything is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
