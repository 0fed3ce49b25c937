// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one queue of a device: the table in which the kernel describes requests, and their bytes.
#![allow(unsafe_code)]

use super::wire::{self, DESCRIPTOR_BYTES, Descriptor};
use crate::lend::{lend, lend_to_fill};
use forebay::io::Span;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;

/// The driver's file, and its table.
pub(super) struct Queue {
    file: File,
    table: NonNull<u8>,
    depth: u16,
}

// SAFETY: the table is the kernel's memory, mapped as long as the queue lives and only read.
unsafe impl Send for Queue {}

impl Queue {
    pub(super) fn map(file: File, depth: u16) -> io::Result<Queue> {
        let (length, flags) = (wire::table_bytes(depth), MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping where the kernel likes it touches nothing of ours.
        let table =
            unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, flags, &file, 0)? };
        let table = NonNull::new(table.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Queue { file, table, depth })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(super) fn depth(&self) -> u16 {
        self.depth
    }

    /// What a tag's request is, after its fetch has ended well.
    pub(super) fn descriptor(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth);
        let place = self.table.as_ptr().cast_const().cast::<[u8; DESCRIPTOR_BYTES]>();
        // SAFETY: the table has `depth` descriptors, and the kernel changes that of a tag only while
        // a fetch of it is under way.
        Descriptor::decode(&unsafe { place.add(usize::from(tag)).read_volatile() })
    }

    /// Fetches all bytes of a write. Nobody else has the span.
    pub(super) fn fetch_bytes(&self, tag: u16, span: Span) -> Result<(), Errno> {
        let count = lend_to_fill(span, |bytes| rustix::io::pread(&self.file, bytes, at(tag)))?;
        if count == span.len() { Ok(()) } else { Err(Errno::IO) }
    }

    /// Gives all bytes of a read. The engine has answered.
    pub(super) fn give_bytes(&self, tag: u16, span: Span) -> Result<(), Errno> {
        let count = lend(span, |bytes| rustix::io::pwrite(&self.file, bytes, at(tag)))?;
        if count == span.len() { Ok(()) } else { Err(Errno::IO) }
    }
}

fn at(tag: u16) -> u64 {
    wire::bytes_at(tag)
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a reference into it.
        let unmapped = unsafe { munmap(self.table.as_ptr().cast(), wire::table_bytes(self.depth)) };
        debug_assert!(unmapped.is_ok());
    }
}
