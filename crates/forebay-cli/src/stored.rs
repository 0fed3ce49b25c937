// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that the service manager keeps for the next start: the connections of FUSE to the kernel,
//! which end with their last descriptor, and the disks that wait for their cache (`late.rs`), which somebody could mount
//! otherwise until the next start. A keeper (`host/keeper.rs`) has connections as well, but what is left of
//! a failed service's processes is ended before the service is started again, and the keeper is one of them.
//!
//! The manager forgets a connection by itself when the mount is gone; a disk it has to be told to let go.

use forebay::host::inherited::given;
use forebay::host::notify::{NotifyError, barrier, store, unstore};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The manager may have more to do than to listen, at boot above all.
const BARRIER_LIMIT: Duration = Duration::from_secs(10);

static STORED: Mutex<Vec<(String, OwnedFd)>> = Mutex::new(Vec::new());

/// Takes what the manager has kept. To be called once, before anything else opens a file.
///
/// # Safety
///
/// It is.
#[allow(unsafe_code)]
pub unsafe fn take_all() {
    // SAFETY: the caller's word.
    add(unsafe { given() });
}

/// What is there besides: the program before had it.
pub fn add(more: Vec<(String, OwnedFd)>) {
    STORED.lock().unwrap_or_else(PoisonError::into_inner).extend(more);
}

/// All that nobody has taken: for the next program, since the manager gives it to a start alone.
pub fn take_rest() -> Vec<(String, OwnedFd)> {
    std::mem::take(&mut *STORED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The one of that name.
pub fn take(name: &str) -> Option<OwnedFd> {
    let mut stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = stored.iter().position(|(it, _)| it == name)?;
    Some(stored.swap_remove(at).1)
}

/// Whether there is one of that name.
#[cfg_attr(not(feature = "fuse"), allow(dead_code))]
pub fn has(name: &str) -> bool {
    let stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
    stored.iter().any(|(it, _)| it == name)
}

/// What the connection of a mount is called.
pub fn of_mount(place: &str) -> String {
    format!("fuse-{place}")
}

/// Closes what nobody wanted, but for what is of those names.
pub fn close_rest(later: &[String]) {
    let mut stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
    stored.retain(|(name, _)| later.contains(name));
}

/// Has the manager keep one; whether there is one and it does keep any, it does not say.
pub fn keep(name: &str, descriptor: BorrowedFd<'_>) {
    tell(store(name, descriptor));
}

/// As [`keep`], for a process that ends next: the manager takes nothing from one that has ended.
pub fn keep_all(name: &str, descriptors: &[impl AsFd]) {
    if descriptors.is_empty() {
        return;
    }
    descriptors.iter().for_each(|it| keep(name, it.as_fd()));
    tell(barrier(BARRIER_LIMIT));
}

/// Closes those of that name, here and in the manager, before it returns.
pub fn let_go(name: &str) {
    let mut found = false;
    while take(name).is_some() {
        found = true;
    }
    if found {
        tell(unstore(name).and_then(|_| barrier(BARRIER_LIMIT)));
    }
}

fn tell(told: Result<bool, NotifyError>) {
    if let Err(error) = told {
        tracing::warn!("the service manager does not keep descriptors: {error}");
    }
}
