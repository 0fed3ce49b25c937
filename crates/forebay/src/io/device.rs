// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices: everything that stores bytes.
//!
//! A [`Device`] takes operations from the loop and answers each exactly once with a
//! [`Completion`]. It never blocks in the loop. What it needs of the kernel goes through the
//! [`Reactor`], marked with the device's *source*, so that the loop can bring the result back.
//!
//! # Invariants
//!
//! - **D1** Every operation submitted is answered exactly once, by [`Device::event`] or
//!   [`Device::poll`].
//! - **D2** A flush covers the writes (zeroing and discards as well) answered before it was
//!   submitted, and no other.
//! - **D3** [`Device::submit`] answers nothing itself, so a caller may submit from inside its
//!   handling of an answer.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::buffer::Span;
use super::reactor::Reactor;
use super::registered::Registered;

/// What a device can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read a span's length.
    Read {
        /// Where the bytes go.
        span: Span,
        /// First byte on the device.
        offset: u64,
    },
    /// Write a span's length.
    Write {
        /// Where the bytes are.
        span: Span,
        /// First byte on the device.
        offset: u64,
    },
    /// Read a buffer's length to it. For a device that says that it takes such ([`Device::takes_registered`]).
    ReadRegistered {
        /// Where the bytes go.
        buffer: Registered,
        /// First byte on the device.
        offset: u64,
    },
    /// Write a buffer's length from it; as [`Operation::ReadRegistered`].
    WriteRegistered {
        /// Where the bytes are.
        buffer: Registered,
        /// First byte on the device.
        offset: u64,
    },
    /// Make what was answered before durable (D2).
    Flush,
    /// The range is not needed: it holds zeros or what it held. Never refused for lack of support.
    Discard {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
    /// Make the range read as zeros.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// How many.
        length: u64,
    },
}

/// An [`Operation`] without its place: what faults, limits and statistics are given for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OperationKind {
    /// [`Operation::Read`].
    Read,
    /// [`Operation::Write`].
    Write,
    /// [`Operation::Flush`].
    Flush,
    /// [`Operation::Discard`].
    Discard,
    /// [`Operation::WriteZeroes`].
    WriteZeroes,
}

impl OperationKind {
    /// All of them; a kind's place here is its [`OperationKind::index`].
    pub const ALL: [OperationKind; 5] = [
        OperationKind::Read,
        OperationKind::Write,
        OperationKind::Flush,
        OperationKind::Discard,
        OperationKind::WriteZeroes,
    ];

    /// Place in a table with one row for each kind.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name for metrics and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            OperationKind::Read => "read",
            OperationKind::Write => "write",
            OperationKind::Flush => "flush",
            OperationKind::Discard => "discard",
            OperationKind::WriteZeroes => "write-zeroes",
        }
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<OperationKind> {
        OperationKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl Operation {
    /// What it is.
    pub const fn kind(&self) -> OperationKind {
        match self {
            Operation::Read { .. } | Operation::ReadRegistered { .. } => OperationKind::Read,
            Operation::Write { .. } | Operation::WriteRegistered { .. } => OperationKind::Write,
            Operation::Flush => OperationKind::Flush,
            Operation::Discard { .. } => OperationKind::Discard,
            Operation::WriteZeroes { .. } => OperationKind::WriteZeroes,
        }
    }

    /// First byte; 0 for a flush.
    pub const fn offset(&self) -> u64 {
        match *self {
            Operation::Read { offset, .. }
            | Operation::Write { offset, .. }
            | Operation::ReadRegistered { offset, .. }
            | Operation::WriteRegistered { offset, .. }
            | Operation::Discard { offset, .. }
            | Operation::WriteZeroes { offset, .. } => offset,
            Operation::Flush => 0,
        }
    }

    /// How many bytes of the device it concerns; 0 for a flush.
    pub const fn length(&self) -> u64 {
        match *self {
            Operation::Discard { length, .. } | Operation::WriteZeroes { length, .. } => length,
            _ => self.transfer(),
        }
    }

    /// How many bytes are carried to or from the device.
    pub const fn transfer(&self) -> u64 {
        match *self {
            Operation::Read { span, .. } | Operation::Write { span, .. } => span.len() as u64,
            Operation::ReadRegistered { buffer, .. }
            | Operation::WriteRegistered { buffer, .. } => buffer.len() as u64,
            _ => 0,
        }
    }
}

/// Why a device failed an operation: an errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", io::Error::from_raw_os_error(*.errno))]
pub struct DeviceError {
    /// The errno, positive.
    pub errno: i32,
}

impl DeviceError {
    /// The device failed.
    pub const IO: DeviceError = DeviceError { errno: libc::EIO };
    /// The range is not on the device.
    pub const RANGE: DeviceError = DeviceError { errno: libc::EINVAL };
    /// The device takes no such operation.
    pub const UNSUPPORTED: DeviceError = DeviceError { errno: libc::EOPNOTSUPP };
    /// The device is open for reading only.
    pub const READ_ONLY: DeviceError = DeviceError { errno: libc::EROFS };

    /// The error with this errno.
    pub const fn new(errno: i32) -> DeviceError {
        DeviceError { errno }
    }
}

impl From<DeviceError> for io::Error {
    fn from(error: DeviceError) -> io::Error {
        io::Error::from_raw_os_error(error.errno)
    }
}

/// The one answer to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As submitted.
    pub token: u64,
    /// All of it, or why not; after an error any part of a read or write may have happened.
    pub result: Result<(), DeviceError>,
}

/// What kind of thing a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A regular file.
    File,
    /// A block device.
    Block,
    /// Memory of this process.
    Memory,
}

/// What a device is and promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Path, or another name a person knows it by.
    pub name: String,
    /// Size, as found when it was opened or measured.
    pub size_bytes: u64,
    /// The unit of reading and writing: 512 or 4096.
    pub logical_block: u32,
    /// What it is.
    pub kind: DeviceKind,
    /// A write may be lost in a power cut until a flush.
    pub volatile_cache: bool,
    /// A discard may give room back.
    pub discards: bool,
    /// The page cache is not used, except for what is not aligned.
    pub direct: bool,
    /// It refuses writes.
    pub read_only: bool,
}

impl DeviceInfo {
    /// Whether the range is on the device.
    pub const fn holds(&self, offset: u64, length: u64) -> bool {
        offset <= self.size_bytes && length <= self.size_bytes - offset
    }

    /// The check at the boundary: range, and writes to a device that takes none.
    pub(crate) fn check(&self, operation: &Operation) -> Result<(), DeviceError> {
        if !self.holds(operation.offset(), operation.length()) {
            return Err(DeviceError::RANGE);
        }
        match operation.kind() {
            OperationKind::Read | OperationKind::Flush => Ok(()),
            _ if self.read_only => Err(DeviceError::READ_ONLY),
            _ => Ok(()),
        }
    }
}

/// Something that stores bytes. One thread drives it; it may be made on another.
pub trait Device: Send {
    /// What it is and promises.
    fn info(&self) -> &DeviceInfo;

    /// Whether it takes operations on buffers whose bytes nobody in this process can look at, and that their owner may change while they
    /// are written.
    fn takes_registered(&self) -> bool {
        false
    }

    /// Takes an operation. The memory of its span belongs to the device until the answer.
    fn submit(&mut self, reactor: &mut Reactor, operation: Operation, token: u64, now: Instant);

    /// Takes a result from the reactor whose user data has this device's source ([`source_of`]).
    fn event(
        &mut self,
        reactor: &mut Reactor,
        user_data: u64,
        result: i32,
        now: Instant,
        done: &mut Vec<Completion>,
    );

    /// Answers what is ready without the reactor, and starts what was held back until `now`. To
    /// be called once in each turn of the loop.
    fn poll(&mut self, reactor: &mut Reactor, now: Instant, done: &mut Vec<Completion>);

    /// When [`Device::poll`] has something to do at the latest; in the past if it has already.
    fn deadline(&self) -> Option<Instant>;

    /// Reads all of `bytes`, blocking. For use outside the loop: opening, formatting, checking.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes`, blocking. For use outside the loop.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes everything written durable, blocking. For use outside the loop.
    fn sync(&self) -> io::Result<()>;

    /// Asks how large it is now. If that is more than before, [`Device::info`] says so from now on; what is less
    /// stays there, to fail when it is used.
    fn measure(&mut self) -> io::Result<u64> {
        Ok(self.info().size_bytes)
    }

    /// It was seen to end there, before [`DeviceInfo::size_bytes`] says, or (`None`) not to any more. Behind that nothing is read or written from now on:
    /// a write would make a file long again, with zeros in the place of what is missing.
    fn note_end(&mut self, end: Option<u64>) {
        let _ = end;
    }

    /// Makes it so many bytes long, with all of its room taken; durable is that after a flush. Only a file can be made longer or shorter.
    fn set_size(&mut self, size_bytes: u64) -> io::Result<()> {
        let _ = size_bytes;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The open file that does its I/O and has its lock, if it is one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

const INDEX_BITS: u32 = 48;

/// User data that the loop routes to `source`.
pub const fn user_data(source: u16, index: u64) -> u64 {
    assert!(index < 1 << INDEX_BITS);
    ((source as u64) << INDEX_BITS) | index
}

/// Where a reactor's result belongs.
pub const fn source_of(user_data: u64) -> u16 {
    (user_data >> INDEX_BITS) as u16
}

/// A device's own part of the user data.
pub(crate) const fn index_of(user_data: u64) -> u64 {
    user_data & ((1 << INDEX_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_names_source_and_index() {
        let both = user_data(0xffff, (1 << 48) - 1);
        assert_eq!((source_of(both), index_of(both)), (0xffff, (1 << 48) - 1));
        assert_eq!(source_of(user_data(3, 9)), 3);
    }

    #[test]
    fn kinds_have_names_and_places() {
        for (index, kind) in OperationKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), index);
            assert_eq!(OperationKind::from_name(kind.name()), Some(kind));
        }
        assert_eq!(OperationKind::from_name("trim"), None);
    }

    #[test]
    fn an_error_says_what_its_errno_means() {
        assert!(DeviceError::IO.to_string().contains("Input/output error"));
        assert_eq!(io::Error::from(DeviceError::IO).raw_os_error(), Some(libc::EIO));
    }
}
