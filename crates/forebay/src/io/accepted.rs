// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections that were accepted and not fetched yet, and those for which the process has no descriptor.
//!
//! # Invariants
//!
//! - **T1** A connection that nobody can have is taken and closed: its client sees the end. Left where it is it would be tried again at
//!   once, and for ever, by a loop that has others to serve.
//! - **T2** Nobody is waited for: the kernel asks for a descriptor before it looks whether somebody has come.
//! - **T3** T1 takes a spare descriptor, which another thread may get hold of while it is given up. Without it an accept is tried again after
//!   [`PAUSE`], and what the next descriptor is had for is the spare.

use super::reactor::ReactorOp;
use super::sys;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Until an accept is tried again for which there is no descriptor, nor a spare one.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Whether that is so.
pub(crate) fn is_to_pause(op: ReactorOp, result: i32) -> bool {
    matches!(op, ReactorOp::Accept { .. }) && is_full(result)
}

const fn is_full(result: i32) -> bool {
    result == -libc::EMFILE || result == -libc::ENFILE
}

/// Connections.
#[derive(Debug)]
pub(crate) struct Accepted {
    waiting: Vec<OwnedFd>,
    /// Given up for a moment, so that one more can be taken.
    spare: Option<OwnedFd>,
    sent_away: u64,
}

impl Accepted {
    pub(crate) fn new() -> Accepted {
        Accepted { waiting: Vec::new(), spare: sys::eventfd().ok(), sent_away: 0 }
    }

    /// What an accept gave; what its operation has come to. `-EAGAIN`: it goes on waiting.
    pub(crate) fn take(&mut self, listener: RawFd, result: i32) -> i32 {
        match result {
            0.. => {
                let connection = sys::accepted(result);
                self.refill();
                if self.spare.is_none() {
                    // There was one descriptor (T3).
                    drop(connection);
                    self.sent_away += 1;
                    self.refill();
                    return -libc::ECONNABORTED;
                }
                self.waiting.push(connection);
                result
            }
            _ if is_full(result) => self.send_away(listener).unwrap_or(result),
            _ => result,
        }
    }

    fn refill(&mut self) {
        if self.spare.is_none() {
            self.spare = sys::eventfd().ok();
        }
    }

    /// The one that came first, if one has (T1, T2). None: not even that can be done.
    fn send_away(&mut self, listener: RawFd) -> Option<i32> {
        if sys::set_nonblocking(listener) != 0 {
            return None;
        }
        self.spare = None;
        let result = sys::accept(listener);
        if result >= 0 {
            drop(sys::accepted(result));
            self.sent_away += 1;
        }
        self.refill();
        match -result {
            // Who asks again does so in another turn of the loop: others are served in between.
            ..=0 => Some(-libc::ECONNABORTED),
            libc::EAGAIN | libc::EINTR | libc::ECONNABORTED => Some(-libc::EAGAIN),
            _ => None,
        }
    }

    /// The connection of that number.
    pub(crate) fn fetch(&mut self, number: i32) -> Option<OwnedFd> {
        let place = self.waiting.iter().position(|it| it.as_raw_fd() == number)?;
        Some(self.waiting.swap_remove(place))
    }

    /// As if another thread had got hold of it.
    #[cfg(test)]
    pub(crate) fn lose_spare(&mut self) {
        self.spare = None;
    }

    /// How many were sent away so far.
    pub(crate) fn sent_away(&self) -> u64 {
        self.sent_away
    }
}
