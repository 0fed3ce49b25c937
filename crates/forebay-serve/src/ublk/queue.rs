// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The one queue of a device: the table in which the kernel describes requests, and their bytes.
//!
//! Bytes are copied by reads and writes of the driver's file (user copy), those of a write when the engine has a place for them; or by the
//! kernel, between a request and the buffer of its tag: then they are there when a fetch ends, and are taken from there with the answer. With user
//! copy the kernel may lend them besides: from the end of a fetch to the answer they are a buffer of the ring, between which and a device it moves them
//! without a copy.
#![allow(unsafe_code)]

use super::wire::{self, DESCRIPTOR_BYTES, Descriptor};
use crate::lend::lend;
use forebay::elsewhere::Elsewhere;
use forebay::io::{Arena, Registered, Span};
use forebay_core::units::BLOCK_BYTES;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;

const BLOCK: usize = BLOCK_BYTES as usize;

/// The driver's file, and its table.
pub(super) struct Queue {
    file: File,
    table: NonNull<u8>,
    depth: u16,
    /// For each tag, as long as the longest request and a block. None: user copy.
    buffers: Option<Arena>,
    /// The first tag's place in the ring's table, if requests are lent.
    lent_from: Option<u16>,
}

// SAFETY: the table is the kernel's memory, mapped as long as the queue lives and only read.
unsafe impl Send for Queue {}

impl Queue {
    /// `buffer_bytes`: the longest request, if the kernel is to copy it.
    pub(super) fn map(file: File, depth: u16, buffer_bytes: Option<u32>) -> io::Result<Queue> {
        let each = |bytes: u32| (bytes as usize).next_multiple_of(BLOCK) + BLOCK;
        let reserve = |bytes| Arena::reserved(usize::from(depth) * each(bytes));
        let buffers = buffer_bytes.map(reserve).transpose()?;
        let (length, flags) = (wire::table_bytes(depth), MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping where the kernel likes it touches nothing of ours.
        let table =
            unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, flags, &file, 0)? };
        let table = NonNull::new(table.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Queue { file, table, depth, buffers, lent_from: None })
    }

    /// With requests lent, each at the place of its tag from there on.
    pub(super) fn lent_from(mut self, place: u16) -> Queue {
        self.lent_from = Some(place);
        self
    }

    /// What a tag's fetch has for the address of its entry.
    pub(super) fn fetch_address(&self, tag: u16) -> u64 {
        self.lent_from.map_or(0, |first| wire::lent_at(first + tag))
    }

    /// A tag's request of so many bytes as a buffer of the ring, if it has become one.
    pub(super) fn lent(
        &self,
        tag: u16,
        descriptor: &Descriptor,
        length: u64,
    ) -> Option<Registered> {
        let first = self.lent_from.filter(|_| descriptor.is_lent)?;
        Some(Registered::new(first + tag, u32::try_from(length).ok()?))
    }

    /// They are never given back.
    pub(super) fn leave_buffers(&mut self) {
        std::mem::forget(self.buffers.take());
    }

    /// The buffer of a tag, if the kernel copies.
    pub(super) fn buffer(&self, tag: u16) -> Option<Span> {
        let buffers = self.buffers.as_ref()?;
        let each = buffers.len() / usize::from(self.depth);
        Some(buffers.span(usize::from(tag) * each, each))
    }

    /// Where the kernel copies a tag's bytes; 0: nowhere.
    pub(super) fn address(&self, tag: u16) -> u64 {
        self.buffer(tag).map_or(0, |span| span.pointer() as u64)
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

    /// Where the bytes of a write are to be had, unless they are in the tag's buffer.
    pub(super) fn elsewhere(&self, tag: u16) -> Option<Elsewhere> {
        let is_here = self.buffers.is_some();
        (!is_here).then(|| Elsewhere { file: self.fd(), offset: at(tag) })
    }

    /// Gives all bytes of a read, or moves them to where the kernel takes them. The engine has answered.
    pub(super) fn give_bytes(&self, tag: u16, span: Span) -> Result<(), Errno> {
        if let Some(buffer) = self.buffer(tag) {
            // A read that does not begin with a block lies behind the front.
            if buffer.pointer() != span.pointer() {
                buffer.copy_from(span);
            }
            return Ok(());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A table that says nothing: any file is as good.
    fn queue(buffer_bytes: Option<u32>) -> Queue {
        let path = std::env::temp_dir().join(format!("forebay-queue-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).unwrap();
        let table = File::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        Queue::map(table, 3, buffer_bytes).unwrap()
    }

    #[test]
    fn with_user_copy_no_tag_has_a_buffer() {
        let queue = queue(None);
        assert_eq!((queue.address(0), queue.address(2)), (0, 0));
        let elsewhere = queue.elsewhere(2).unwrap();
        assert_eq!((elsewhere.file, elsewhere.offset), (queue.fd(), at(2)));
    }

    #[test]
    fn a_request_is_a_buffer_where_the_kernel_lends_it() {
        let lent = |queue: &Queue, is_lent| {
            let operation = wire::Operation::Read;
            let descriptor =
                Descriptor { operation, is_fua: false, is_lent, sector: 0, sectors: 8 };
            queue.lent(2, &descriptor, 4096)
        };
        let without = queue(None);
        assert_eq!((without.fetch_address(2), lent(&without, true)), (0, None));
        let queue = queue(None).lent_from(192);
        assert_eq!(queue.fetch_address(2), wire::lent_at(194));
        assert_eq!(lent(&queue, true), Some(Registered::new(194, 4096)));
        assert_eq!(lent(&queue, false), None);
    }

    /// The kernel takes them from the address that it knows, whatever the place of the read in its block.
    #[test]
    fn what_was_read_is_moved_to_the_front_of_its_tag_s_buffer() {
        let queue = queue(Some(8192));
        let buffer = queue.buffer(1).unwrap();
        assert_eq!(buffer.len(), 8192 + 4096);
        assert_eq!(queue.address(2) - queue.address(1), 8192 + 4096);
        let read = buffer.part(512, 8192);
        read.copy_in(&[7; 8192]);
        read.part(8191, 1).copy_in(&[9]);
        queue.give_bytes(1, read).unwrap();
        let mut bytes = [0; 8192];
        buffer.copy_out(&mut bytes);
        assert!(bytes[..8191].iter().all(|byte| *byte == 7) && bytes[8191] == 9);
        assert_eq!(queue.elsewhere(1), None);
        assert_eq!(queue.address(1), buffer.pointer() as u64);
    }
}
