// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A bell: how another thread ends a wait of the loop.
//!
//! The loop keeps a [`ReactorOp::PollIn`](super::ReactorOp::PollIn) on the bell; when it is
//! answered the loop clears the bell first, then looks at what there is, then listens again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use super::sys;

/// Rung by any thread, heard by the loop.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// A silent bell.
    pub fn new() -> io::Result<Bell> {
        sys::eventfd().map(Bell)
    }

    /// Rings until it is cleared; never blocks.
    pub fn ring(&self) {
        sys::eventfd_ring(self.0.as_fd());
    }

    /// Makes it silent.
    pub fn clear(&self) {
        sys::eventfd_clear(self.0.as_fd());
    }

    /// What the loop listens to.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
