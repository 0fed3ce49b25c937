// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of others that cannot be had any more, while it is mapped here: the kernel sends SIGBUS to whoever touches it.
//!
//! A guest's memory is a file. On a tmpfs or hugetlbfs that is full, the first touch of a page that nobody had yet finds no room; a file may be
//! cut short; and a page may rot in the machine's memory. None of that may end the daemon, which serves others.
//!
//! # Invariants
//!
//! - **X1** A mapping is in the table from before its first touch until before it is unmapped. So what the handler looks for stays as it is
//!   while it looks.
//! - **X2** What cannot be had is replaced as a whole, for good, by memory of no one: a part of huge pages could not be, and half a guest is
//!   none. It is marked as lost before that.
//! - **X3** Whoever touches a mapping asks behind that whether it is lost, and believes nothing that was copied if it is.
//! - **X4** The handler calls nothing but the kernel, takes no lock, and leaves `errno` as it was.
//! - **X5** Any other SIGBUS ends the process as before.

#![allow(unsafe_code)]

use libc::{c_int, c_void, siginfo_t};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, compiler_fence, fence};
use std::sync::{Mutex, PoisonError};

/// Mappings at most: each machine has nine, and twice so many while its memory changes.
const PLACE_COUNT_MAX: usize = 2048;

/// One mapping, or none: then it has no length.
struct Entry {
    /// Odd while the rest of it changes.
    version: AtomicUsize,
    start: AtomicUsize,
    length: AtomicUsize,
    is_lost: AtomicBool,
}

static PLACES: [Entry; PLACE_COUNT_MAX] = [const { Entry::new() }; PLACE_COUNT_MAX];
/// Held by whoever changes the table; the handler is there if it holds true.
static CHANGES: Mutex<bool> = Mutex::new(false);

/// A mapping's place in the table, until it is dropped.
#[derive(Debug)]
pub(super) struct Place(usize);

impl Place {
    /// Of a mapping that nobody has touched yet. (X1)
    pub(super) fn take(start: *mut u8, length: usize) -> io::Result<Place> {
        let mut is_handled = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_handled {
            handle()?;
            *is_handled = true;
        }
        let is_free = |entry: &Entry| entry.length.load(Ordering::SeqCst) == 0;
        let free = PLACES.iter().position(is_free);
        let free = free.ok_or_else(|| io::Error::other("too much memory of guests is mapped"))?;
        PLACES[free].set(start as usize, length);
        Ok(Place(free))
    }

    /// Whether what was touched until now may have been no one's. (X3)
    pub(super) fn is_lost(&self) -> bool {
        // The handler runs in the midst of this thread, or has run in another before that had the substitute.
        compiler_fence(Ordering::SeqCst);
        fence(Ordering::Acquire);
        PLACES[self.0].is_lost.load(Ordering::Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        PLACES[self.0].set(0, 0);
    }
}

impl Entry {
    const fn new() -> Entry {
        let (version, start, length) =
            (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        Entry { version, start, length, is_lost: AtomicBool::new(false) }
    }

    fn set(&self, start: usize, length: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.length.store(length, Ordering::SeqCst);
        self.is_lost.store(false, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Where it is, if an address is in it. One that changes is not what somebody touches (X1).
    fn around(&self, address: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let start = self.start.load(Ordering::SeqCst);
        let length = self.length.load(Ordering::SeqCst);
        let is_there = address.wrapping_sub(start) < length;
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (is_there && is_whole).then_some((start, length))
    }
}

fn handle() -> io::Result<()> {
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = bus_error;
    // SAFETY: all zeros is an action; its handler is of the kind that SA_SIGINFO says, and lasts as long as the program.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// X4: nothing here allocates, locks or panics.
extern "C" fn bus_error(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives what it knows of the signal, which has an address if the kernel itself sends it (a code above zero). `errno` is this
    // thread's own.
    let (address, errno) = unsafe {
        let is_kernels = (*info).si_code > 0;
        (is_kernels.then(|| (*info).si_addr() as usize), *libc::__errno_location())
    };
    if !address.is_some_and(replace) {
        // SAFETY: both may be called here. The signal comes when this returns, and ends the process.
        unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            libc::raise(libc::SIGBUS);
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces the mapping that an address is in; false: there is none, or nothing to replace it by.
fn replace(address: usize) -> bool {
    let found = PLACES
        .iter()
        .find_map(|entry| entry.around(address).map(|(at, length)| (entry, at, length)));
    let Some((entry, start, length)) = found else { return false };
    entry.is_lost.store(true, Ordering::SeqCst); // X2
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is a mapping of this table and nothing else (X1), which no reference points into: it is copied from and to by
    // volatile accesses only.
    let done = unsafe { libc::mmap(start as *mut c_void, length, protection, flags, -1, 0) };
    done != libc::MAP_FAILED
}
