// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest's bytes that the kernel holds: it gives them to who reads them from a file of its own, or has them as a buffer of the ring.

use crate::io::{Registered, Span, sys};
use std::os::fd::RawFd;

/// Where the bytes of a request are, or go to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bytes {
    /// Memory for them. A write's are there; of a read it is whole blocks, and receives the first byte at `offset % 4096`.
    pub span: Option<Span>,
    /// A write's bytes are not there yet: they are copied from here when they are wanted.
    pub elsewhere: Option<Elsewhere>,
    /// They are a buffer of the ring as well, exactly as long as the request: if the backing device takes it nobody need copy them
    /// (`shard/straight.rs`). It is one until the request is answered.
    pub registered: Option<Registered>,
}

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
