// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that the program before left open when it executed this one, or that the service manager gives.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The descriptor of that number, if one is open.
///
/// # Safety
///
/// Nothing in this program owns a descriptor of that number: it was open when the program began, or is not open at all, and this is not
/// asked for it again. So it is asked before anything else opens a file.
pub unsafe fn inherited(number: RawFd) -> Option<OwnedFd> {
    // 0 to 2 have owners of their own.
    if number <= 2 {
        return None;
    }
    // SAFETY: used for a question only, which a number that is not open answers with an error.
    let asked = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_getfd(asked).ok()?;
    // SAFETY: it is open, and nobody else in this program knows it (the caller's word).
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The first descriptor that a service manager gives.
const GIVEN_FIRST: RawFd = 3;
const GIVEN_MAX: RawFd = 1024;

/// What the service manager gives this process, by name (`LISTEN_FDS`).
///
/// # Safety
///
/// As of [`inherited`], for all that the manager gives.
pub unsafe fn given() -> Vec<(String, OwnedFd)> {
    let number = |name| std::env::var(name).ok()?.parse::<i64>().ok();
    if number("LISTEN_PID") != Some(i64::from(std::process::id())) {
        return Vec::new();
    }
    let count = number("LISTEN_FDS").unwrap_or(0).clamp(0, GIVEN_MAX.into()) as RawFd;
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let all = (GIVEN_FIRST..GIVEN_FIRST + count).filter_map(|number| {
        let name = names.next().unwrap_or_default().to_owned();
        // SAFETY: the caller's word.
        let descriptor = unsafe { inherited(number) }?;
        // Not for the programs that this one starts.
        rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC).ok()?;
        Some((name, descriptor))
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::IntoRawFd;

    #[test]
    fn what_is_open_is_taken_and_what_is_not_is_not() {
        let left = std::fs::File::open("/proc/self/comm").expect("this process").into_raw_fd();
        let mut text = String::new();
        // SAFETY: its owner has just given it up.
        let taken = unsafe { inherited(left) }.expect("it is open");
        std::fs::File::from(taken).read_to_string(&mut text).expect("readable");
        assert!(!text.is_empty());
        for number in [-1, 0, 2, RawFd::MAX] {
            // SAFETY: no descriptor comes of it.
            assert!(unsafe { inherited(number) }.is_none());
        }
    }
}
