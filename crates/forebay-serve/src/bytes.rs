// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Big-endian numbers off the front of a slice, and into a fixed array.
//!
//! Reading believes nothing and returns `None`; writing asserts, because what does not fit is a
//! bug here and never the doing of a peer.

/// Takes big-endian numbers off the front of a slice; `None` once it is too short.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// What has not been taken.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The next `count` bytes.
    pub(crate) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    /// The next two bytes.
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next four bytes.
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next eight bytes.
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A length of four bytes and as many bytes as it says.
    pub(crate) fn string(&mut self) -> Option<&'a [u8]> {
        let count = self.u32()?;
        self.bytes(usize::try_from(count).ok()?)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*taken)
    }
}

/// Fills a fixed array from the front. What we write is asserted: a part that does not fit, or a
/// gap at the end, is a bug here and never the doing of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writer<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Writer<N> {
    pub(crate) fn new() -> Self {
        Self { bytes: [0; N], used: 0 }
    }

    pub(crate) fn bytes(mut self, part: &[u8]) -> Self {
        let target = self.bytes.get_mut(self.used..self.used + part.len());
        target.expect("every part has its place in the array").copy_from_slice(part);
        self.used += part.len();
        self
    }

    pub(crate) fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_be_bytes())
    }

    pub(crate) fn finish(self) -> [u8; N] {
        assert!(self.used == N);
        self.bytes
    }

    /// What has been written so far, in an array that may be longer.
    pub(crate) fn finish_short(self) -> ([u8; N], usize) {
        (self.bytes, self.used)
    }
}
