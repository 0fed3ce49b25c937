// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest's bytes that the kernel holds, and gives to who reads them from a file of its own.

use crate::io::{Span, sys};
use std::os::fd::RawFd;

/// Where the bytes of a write are that did not come with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elsewhere {
    /// Reads of this file give them, as often as somebody asks. It is open until the request is answered.
    pub file: RawFd,
    /// From here on.
    pub offset: u64,
}

impl Elsewhere {
    /// Copies them to `span`, all of it; says whether they were there.
    pub(crate) fn copy_to(&self, span: Span) -> bool {
        sys::pread(self.file, span, self.offset) == span.len() as i32
    }
}
