// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers of the ring that drivers fill with memory of the kernel's: the process names them, and never sees a byte of them.
//!
//! # Invariants
//!
//! - **G1** A buffer stands for the same bytes for as long as the driver's request is under way, which is until the process answers it: so
//!   operations on it end before that.
//! - **G2** The places of drivers are behind those of the process's own memory ([`super::Reactor::register_arena`]), so neither can be
//!   taken for the other.
//!
//! A place that nothing was put into, or what lets no bytes go that way (a read from what is to be written), is an error of the operation.

use forebay_core::limits::VOLUME_COUNT_MAX;

/// The first place of the ring's table that is a driver's, ...
pub const DRIVERS_BUFFERS_AT: u16 = 64;
/// ... and how many there are: for each volume as many as a device of it has requests under way. A place costs the kernel 8 bytes.
pub(super) const DRIVERS_BUFFERS: u16 = VOLUME_COUNT_MAX as u16 * BUFFERS_EACH;
/// Places of each volume's.
pub const BUFFERS_EACH: u16 = 128;
/// As many as the kernel lets a table have.
const TABLE_MAX: u16 = 1 << 14;
const _: () = assert!(DRIVERS_BUFFERS_AT + DRIVERS_BUFFERS <= TABLE_MAX);

/// Bytes of such a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    place: u16,
    from: u32,
    length: u32,
}

impl Registered {
    /// All bytes of the buffer at a place of the ring's table.
    pub const fn new(place: u16, length: u32) -> Registered {
        Registered { place, from: 0, length }
    }

    /// Where it is in the ring's table.
    pub const fn place(self) -> u16 {
        self.place
    }

    /// Where in the buffer they begin.
    pub const fn from(self) -> u32 {
        self.from
    }

    /// How many they are.
    pub const fn len(self) -> u32 {
        self.length
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.length == 0
    }

    /// `length` bytes of it from `offset` on.
    ///
    /// # Panics
    ///
    /// If they are not all inside.
    #[must_use]
    pub const fn part(self, offset: u32, length: u32) -> Registered {
        assert!(offset <= self.length && length <= self.length - offset);
        Registered { place: self.place, from: self.from + offset, length }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_part_is_counted_from_the_buffer_s_begin() {
        let whole = Registered::new(70, 8192);
        let part = whole.part(512, 4096).part(1024, 3072);
        assert_eq!((part.place(), part.from(), part.len()), (70, 1536, 3072));
        assert_eq!(whole.part(8192, 0).len(), 0);
    }

    #[test]
    #[should_panic(expected = "offset <= self.length")]
    fn a_part_lies_inside() {
        let _ = Registered::new(70, 4096).part(512, 4096);
    }
}
