// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From a request as the kernel describes it to what the engine is asked.

use super::wire::{Descriptor, Operation};
use forebay_core::limits::REQUEST_BYTES_MAX;
use forebay_core::request::{Op, RequestError};
use rustix::io::Errno;

const SECTOR_BYTES: u64 = 512;

/// What the engine is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Ask {
    /// What a request asks of a volume of that size.
    pub(super) fn of(descriptor: Descriptor, size_bytes: u64) -> Result<Ask, Errno> {
        let fua = descriptor.is_fua;
        let op = match descriptor.operation {
            Operation::Read => Op::Read,
            Operation::Write => Op::Write { fua },
            Operation::Flush => return Ok(Ask { op: Op::Flush, offset: 0, length: 0 }),
            Operation::Discard => Op::Discard,
            Operation::WriteZeroes => Op::WriteZeroes { fua },
            Operation::Unknown(_) => return Err(Errno::OPNOTSUPP),
        };
        let length = u64::from(descriptor.sectors) * SECTOR_BYTES;
        let offset = descriptor.sector.checked_mul(SECTOR_BYTES).ok_or(Errno::INVAL)?;
        let ask = Ask { op, offset, length };
        let end = offset.checked_add(length).ok_or(Errno::INVAL)?;
        let is_too_long = ask.carries_bytes() && length > REQUEST_BYTES_MAX;
        if length == 0 || end > size_bytes || is_too_long {
            return Err(Errno::INVAL);
        }
        Ok(ask)
    }

    /// Whether bytes go with it, one way or the other.
    pub(super) fn carries_bytes(&self) -> bool {
        matches!(self.op, Op::Read | Op::Write { .. })
    }

    /// The answer that says that all of it was done.
    pub(super) fn done(&self) -> i32 {
        // At most REQUEST_BYTES_MAX.
        if self.carries_bytes() { self.length as i32 } else { 0 }
    }
}

/// The answer that says why not.
pub(super) fn failed(error: RequestError) -> i32 {
    let errno = match error {
        RequestError::Io => Errno::IO,
        RequestError::Invalid => Errno::INVAL,
        RequestError::ReadOnly => Errno::ROFS,
        RequestError::NoVolume => Errno::NXIO,
        RequestError::Closing => Errno::SHUTDOWN,
    };
    -errno.raw_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 100 * 512;

    fn asked(operation: Operation, sector: u64, sectors: u32) -> Result<Ask, Errno> {
        Ask::of(Descriptor { operation, is_fua: true, is_lent: true, sector, sectors }, SIZE)
    }

    #[test]
    fn each_operation_is_asked_for_in_bytes() {
        let ask = |op| Ok(Ask { op, offset: 1024, length: 1536 });
        assert_eq!(asked(Operation::Read, 2, 3), ask(Op::Read));
        assert_eq!(asked(Operation::Write, 2, 3), ask(Op::Write { fua: true }));
        assert_eq!(asked(Operation::WriteZeroes, 2, 3), ask(Op::WriteZeroes { fua: true }));
        assert_eq!(asked(Operation::Discard, 2, 3), ask(Op::Discard));
        let flush = Ask { op: Op::Flush, offset: 0, length: 0 };
        assert_eq!(asked(Operation::Flush, u64::MAX, 0), Ok(flush));
        let operation = Operation::Write;
        let plain = Descriptor { operation, is_fua: false, is_lent: true, sector: 0, sectors: 1 };
        assert_eq!(Ask::of(plain, SIZE).map(|ask| ask.op), Ok(Op::Write { fua: false }));
    }

    #[test]
    fn what_is_not_inside_the_volume_is_refused() {
        let all = [Operation::Read, Operation::Write, Operation::Discard, Operation::WriteZeroes];
        for operation in all {
            assert!(asked(operation, 99, 1).is_ok());
            for (sector, sectors) in [(100, 1), (99, 2), (0, 0), (u64::MAX / 512 + 1, 1)] {
                assert_eq!(asked(operation, sector, sectors), Err(Errno::INVAL));
            }
            assert_eq!(asked(operation, u64::MAX / 512, u32::MAX), Err(Errno::INVAL));
        }
        assert_eq!(asked(Operation::Unknown(4), 0, 1), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn only_what_carries_bytes_has_a_longest_length() {
        let sectors = (REQUEST_BYTES_MAX / 512 + 1) as u32;
        let of = |operation| {
            let descriptor =
                Descriptor { operation, is_fua: false, is_lent: true, sector: 0, sectors };
            Ask::of(descriptor, u64::MAX)
        };
        assert_eq!(of(Operation::Read), Err(Errno::INVAL));
        assert_eq!(of(Operation::Write), Err(Errno::INVAL));
        assert!(of(Operation::Discard).is_ok());
        assert!(of(Operation::WriteZeroes).is_ok());
    }

    #[test]
    fn the_answer_tells_bytes_of_what_carries_them() {
        let done = |op| Ask { op, offset: 0, length: 4096 }.done();
        assert_eq!((done(Op::Read), done(Op::Write { fua: true })), (4096, 4096));
        assert_eq!((done(Op::Flush), done(Op::Discard)), (0, 0));
        assert_eq!((failed(RequestError::Io), failed(RequestError::ReadOnly)), (-5, -30));
    }
}
