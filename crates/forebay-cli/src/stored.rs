// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that the service manager keeps for the next start: the connections of FUSE to the kernel,
//! which end with their last descriptor. A keeper (`host/keeper.rs`) has them as well, but what is left of
//! a failed service's processes is ended before the service is started again, and the keeper is one of them.
//!
//! The manager forgets a connection by itself when the mount is gone.

use forebay::host::inherited::given;
use forebay::host::notify::store;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

static STORED: Mutex<Vec<(String, OwnedFd)>> = Mutex::new(Vec::new());

/// Takes what the manager has kept. To be called once, before anything else opens a file.
pub fn take_all() {
    *STORED.lock().unwrap_or_else(PoisonError::into_inner) = given();
}

/// The one of that name.
pub fn take(name: &str) -> Option<OwnedFd> {
    let mut stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = stored.iter().position(|(it, _)| it == name)?;
    Some(stored.swap_remove(at).1)
}

/// Closes what nobody wanted.
pub fn close_rest() {
    STORED.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Has the manager keep one; whether there is one and it does keep any, it does not say.
pub fn keep(name: &str, descriptor: BorrowedFd<'_>) {
    if let Err(error) = store(name, descriptor) {
        tracing::warn!("the service manager does not keep a descriptor: {error}");
    }
}
