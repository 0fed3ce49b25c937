// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests who stay connected, on their way to the next program that this process executes: a file in memory that holds a
//! record of what there is of each, and their descriptors.
//!
//! What a record says, and when one may be made, is each protocol's own: `nbd/carried.rs`, `nbd/device/carried.rs`, `vhost/carried.rs`.
//!
//! # As bytes
//!
//! Big-endian. The file: [`Record::MAGIC`], [`Record::VERSION`], then for each guest the length of its record (4 bytes), the
//! record's CRC32C (4 bytes), the record. Lists and texts in it begin with their length (4 bytes). Another meaning of any of
//! it is another [`Record::VERSION`]. The descriptors come in the order of the records, so many for each as it says.
//!
//! # Limits
//!
//! [`DESCRIPTOR_COUNT_MAX`], since their numbers go along in the environment, which has room for 128 KiB in one place.

use crate::bytes::Reader;
use forebay_core::format::bytes::crc32c;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Descriptors at most, of all guests of a kind. A queue of a virtual machine has three, and QEMU makes one for each processor: that is 60
/// machines of 64.
pub const DESCRIPTOR_COUNT_MAX: usize = 12288;
/// Bytes before the first record, and before each.
pub(crate) const FILE_HEADER_BYTES: usize = 12;
pub(crate) const RECORD_HEADER_BYTES: usize = 8;

/// Why guests, or one, cannot be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CarriedError {
    /// The file cannot be read, or a descriptor cannot be used.
    #[error("what was left of it cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The file is no such file.
    #[error("what was left of it begins with {0:#018x}, not as {1}s do")]
    Magic(u64, &'static str),
    /// The program before puts it down in another way.
    #[error("the program before leaves {kind}s in version {found}, this one takes version {own}")]
    Version {
        /// What they are.
        kind: &'static str,
        /// As it says.
        found: u32,
        /// What this program takes.
        own: u32,
    },
    /// A record is longer than one can be, or than the file.
    #[error("what was left of it would be {0} bytes long")]
    Length(u64),
    /// A record is not what was put down.
    #[error("what was left of it has another checksum")]
    Checksum,
    /// A record ends early, or does not end.
    #[error("what was left of it has no end where it should")]
    Cut,
    /// There are fewer descriptors than records name.
    #[error("descriptors of it are missing")]
    Descriptors,
    /// A field holds what it cannot hold.
    #[error("what was left of it holds no possible {0}")]
    Field(&'static str),
    /// What is served now is not what the guest was told.
    #[error("{0}")]
    Served(&'static str),
}

/// What there is of a guest beside its descriptors.
pub trait Record: Sized {
    /// What one is, for people.
    const KIND: &'static str;
    /// How a file of them begins.
    const MAGIC: u64;
    /// What the bytes mean.
    const VERSION: u32;
    /// Bytes of one at most.
    const BYTES_MAX: usize;

    /// As bytes.
    fn encode(&self) -> Vec<u8>;

    /// What bytes say. Nothing in it is longer than they are.
    fn decode(bytes: &[u8]) -> Result<Self, CarriedError>;

    /// So many descriptors are its own.
    fn descriptor_count(&self) -> usize;
}

/// Guests on their way.
#[derive(Debug)]
pub struct Handed {
    /// What there is of each.
    pub message: File,
    /// How many they are.
    pub count: usize,
    /// Their descriptors, in the same order.
    pub descriptors: Vec<OwnedFd>,
}

impl Handed {
    /// None yet.
    pub(crate) fn new(header: &[u8]) -> io::Result<Handed> {
        let message = File::from(memfd_create("forebay-guests", MemfdFlags::CLOEXEC)?);
        message.write_all_at(header, 0)?;
        Ok(Handed { message, count: 0, descriptors: Vec::new() })
    }

    pub(crate) fn add<R: Record>(
        &mut self,
        descriptors: Vec<OwnedFd>,
        record: &R,
    ) -> io::Result<()> {
        assert!(descriptors.len() == record.descriptor_count());
        if self.descriptors.len() + descriptors.len() > DESCRIPTOR_COUNT_MAX {
            return Err(io::Error::other("it has too many descriptors"));
        }
        let end = self.message.metadata()?.len();
        let written = self.message.write_all_at(&framed(record), end);
        if let Err(error) = written {
            // A half of it has no descriptors, and the next begins where it began.
            self.message.set_len(end)?;
            return Err(error);
        }
        self.descriptors.extend(descriptors);
        self.count += 1;
        Ok(())
    }

    /// All of them, one after the other. After an error none comes: where the next begins is not known.
    pub(crate) fn take<R: Record>(
        self,
        mut each: impl FnMut(Vec<OwnedFd>, R),
    ) -> Result<(), (usize, CarriedError)> {
        let Handed { message, count, descriptors } = self;
        let mut descriptors = descriptors.into_iter();
        records(&message, count, |record: R| {
            let wanted = record.descriptor_count();
            let its: Vec<_> = descriptors.by_ref().take(wanted).collect();
            if its.len() < wanted {
                return Err(CarriedError::Descriptors);
            }
            each(its, record);
            Ok(())
        })
    }

    /// What there is of each, before it is taken.
    pub(crate) fn look<R: Record>(&self, mut each: impl FnMut(R)) -> Result<(), CarriedError> {
        let look = |record| {
            each(record);
            Ok(())
        };
        records(&self.message, self.count, look).map_err(|(_, error)| error)
    }
}

/// Goes through a file. An error, with how many are behind it, is the end.
fn records<R: Record>(
    message: &File,
    count: usize,
    mut each: impl FnMut(R) -> Result<(), CarriedError>,
) -> Result<(), (usize, CarriedError)> {
    let mut header = [0; FILE_HEADER_BYTES];
    let begun = message.read_exact_at(&mut header, 0).map_err(CarriedError::from);
    begun.and_then(|()| check_file::<R>(&header)).map_err(|error| (count, error))?;
    let mut at = FILE_HEADER_BYTES as u64;
    for number in 0..count {
        let failed = |error| (count - number, error);
        let (record, end) = record::<R>(message, at).map_err(failed)?;
        at = end;
        each(record).map_err(failed)?;
    }
    Ok(())
}

/// The record there, and where it ends.
fn record<R: Record>(message: &File, at: u64) -> Result<(R, u64), CarriedError> {
    let mut header = [0; RECORD_HEADER_BYTES];
    message.read_exact_at(&mut header, at)?;
    let (length, checksum) = record_header::<R>(&header)?;
    let (from, bytes) = (at + RECORD_HEADER_BYTES as u64, length as u64);
    if from + bytes > message.metadata()?.len() {
        return Err(CarriedError::Length(bytes));
    }
    let mut record = vec![0; length];
    message.read_exact_at(&mut record, from)?;
    Ok((checked(&record, checksum)?, from + bytes))
}

/// A record with what is before it.
pub(crate) fn framed<R: Record>(record: &R) -> Vec<u8> {
    let bytes = record.encode();
    assert!(bytes.len() <= R::BYTES_MAX);
    let header = [(bytes.len() as u32).to_be_bytes(), crc32c(&bytes).to_be_bytes()];
    [&header.concat()[..], &bytes].concat()
}

/// How a file of them begins.
pub(crate) fn file_header<R: Record>() -> [u8; FILE_HEADER_BYTES] {
    let mut bytes = [0; FILE_HEADER_BYTES];
    bytes[..8].copy_from_slice(&R::MAGIC.to_be_bytes());
    bytes[8..].copy_from_slice(&R::VERSION.to_be_bytes());
    bytes
}

/// Whether a file begins as one of them.
pub(crate) fn check_file<R: Record>(header: &[u8]) -> Result<(), CarriedError> {
    let mut reader = Reader::new(header);
    let magic = reader.u64().ok_or(CarriedError::Cut)?;
    let found = reader.u32().ok_or(CarriedError::Cut)?;
    if magic != R::MAGIC {
        return Err(CarriedError::Magic(magic, R::KIND));
    }
    if found != R::VERSION {
        return Err(CarriedError::Version { kind: R::KIND, found, own: R::VERSION });
    }
    Ok(())
}

/// The length and the checksum of a record, from what is before it.
pub(crate) fn record_header<R: Record>(header: &[u8]) -> Result<(usize, u32), CarriedError> {
    let mut reader = Reader::new(header);
    let length = reader.u32().ok_or(CarriedError::Cut)?;
    let checksum = reader.u32().ok_or(CarriedError::Cut)?;
    if length as usize > R::BYTES_MAX {
        return Err(CarriedError::Length(length.into()));
    }
    Ok((length as usize, checksum))
}

/// A record whose bytes are those that were put down.
pub(crate) fn checked<R: Record>(record: &[u8], checksum: u32) -> Result<R, CarriedError> {
    if crc32c(record) != checksum {
        return Err(CarriedError::Checksum);
    }
    R::decode(record)
}

/// A length and so many bytes.
pub(crate) fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_be_bytes());
    out.extend(bytes);
}

/// What is so of every kind of record.
#[cfg(test)]
pub(crate) mod rules {
    use super::*;
    use std::fmt::Debug;

    pub(crate) fn is_taken_as_it_was_put_down<R: Record + PartialEq + Debug>(record: &R) {
        let bytes = framed(record);
        let (length, checksum) = record_header::<R>(&bytes).unwrap();
        assert_eq!(length, bytes.len() - RECORD_HEADER_BYTES);
        let taken: R = checked(&bytes[RECORD_HEADER_BYTES..], checksum).unwrap();
        assert_eq!(taken, *record);
    }

    pub(crate) fn has_no_byte_that_may_be_another_or_missing<R: Record + PartialEq + Debug>(
        record: &R,
    ) {
        let bytes = record.encode();
        let checksum = crc32c(&bytes);
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                let taken = checked::<R>(&changed, checksum);
                assert!(matches!(taken, Err(CarriedError::Checksum)), "{at}");
                // Without it nothing worse happens than that it is another guest.
                if let Ok(other) = R::decode(&changed) {
                    assert_eq!(other.encode(), changed, "{at}");
                    assert_ne!(other, *record, "{at}");
                }
            }
            assert!(matches!(R::decode(&bytes[..at]), Err(CarriedError::Cut)), "{at}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(R::decode(&longer), Err(CarriedError::Cut)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    /// A guest with so many descriptors.
    #[derive(Debug, PartialEq)]
    struct Guest(u32);

    impl Record for Guest {
        const KIND: &'static str = "guest";
        const MAGIC: u64 = 7;
        const VERSION: u32 = 3;
        const BYTES_MAX: usize = 4;

        fn encode(&self) -> Vec<u8> {
            self.0.to_be_bytes().to_vec()
        }

        fn decode(bytes: &[u8]) -> Result<Guest, CarriedError> {
            Reader::new(bytes).u32().map(Guest).ok_or(CarriedError::Cut)
        }

        fn descriptor_count(&self) -> usize {
            self.0 as usize
        }
    }

    fn fds(count: u32) -> Vec<OwnedFd> {
        (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect()
    }

    fn handed(counts: &[u32]) -> Handed {
        let mut handed = Handed::new(&file_header::<Guest>()).unwrap();
        for count in counts {
            handed.add(fds(*count), &Guest(*count)).unwrap();
        }
        handed
    }

    #[test]
    fn each_comes_with_its_own_descriptors() {
        let mut found = Vec::new();
        handed(&[2, 0, 3])
            .take(|fds, Guest(count)| {
                assert_eq!(fds.len(), count as usize);
                found.push(count);
            })
            .unwrap();
        assert_eq!(found, [2, 0, 3]);
    }

    #[test]
    fn after_what_cannot_be_read_nobody_comes() {
        let spoilt = |at: u64, byte: u8| {
            let handed = handed(&[1, 2, 1]);
            handed.message.write_all_at(&[byte], at).unwrap();
            let mut came = 0;
            let (count, error) = handed.take(|_, _: Guest| came += 1).unwrap_err();
            assert_eq!(came + count, 3);
            (came, error.to_string())
        };
        assert_eq!(
            spoilt(7, 9),
            (0, "what was left of it begins with 0x0000000000000009, not as guests do".into())
        );
        let version = "the program before leaves guests in version 2, this one takes version 3";
        assert_eq!(spoilt(11, 2), (0, version.into()));
        // The second record: its length, checksum and content.
        assert_eq!(spoilt(24 + 3, 5), (1, "what was left of it would be 5 bytes long".into()));
        for at in [24 + 4, 24 + 8] {
            assert_eq!(spoilt(at, 0xee), (1, "what was left of it has another checksum".into()));
        }
        let cut = handed(&[1, 2, 1]);
        cut.message.set_len(12 + 12 + 10).unwrap();
        assert!(matches!(cut.take(|_, _: Guest| {}), Err((2, CarriedError::Length(4)))));
        let mut fewer = handed(&[1, 2, 1]);
        fewer.descriptors.truncate(2);
        assert!(matches!(fewer.take(|_, _: Guest| {}), Err((2, CarriedError::Descriptors))));
    }

    /// What has no place is not put down at all.
    #[test]
    fn one_with_too_many_descriptors_is_refused_and_the_next_goes_along() {
        let mut handed = handed(&[1]);
        handed.descriptors.resize_with(DESCRIPTOR_COUNT_MAX - 1, || fds(1).remove(0));
        handed.add(fds(2), &Guest(2)).unwrap_err();
        handed.add(fds(1), &Guest(1)).unwrap();
        assert_eq!((handed.count, handed.descriptors.len()), (2, DESCRIPTOR_COUNT_MAX));
    }
}
