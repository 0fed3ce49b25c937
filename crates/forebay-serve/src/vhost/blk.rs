// SPDX-License-Identifier: Apache-2.0 OR MIT
//! virtio-blk: what a disk says of itself, and what a request asks for. Pure.
//!
//! # Invariants
//!
//! - **V1** Whatever passes [`Disk::judge`] or [`Disk::range`] lies within the disk and on its
//!   logical blocks. Sectors of 512 bytes end here.
//! - **V2** Any bytes are answered with a request or with a status.

/// Feature bits.
pub mod feature {
    #![allow(missing_docs)]
    pub const SEG_MAX: u64 = 1 << 2;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Of vhost-user: there are protocol features.
    pub const PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
    /// What we offer.
    pub const ALL: u64 = SEG_MAX
        | BLK_SIZE
        | FLUSH
        | TOPOLOGY
        | CONFIG_WCE
        | MQ
        | DISCARD
        | WRITE_ZEROES
        | INDIRECT
        | EVENT_IDX
        | PROTOCOL
        | VERSION_1;
}

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// Bytes of a request's head.
pub const HEADER_BYTES: u64 = 16;
/// Bytes of a range of a discard.
pub const RANGE_BYTES: u64 = 16;
/// Ranges of a discard or write-zeroes at most.
pub const RANGE_COUNT_MAX: usize = 16;
/// Data segments of a request at most; with head and status they fit a queue of 128.
pub const SEGMENT_COUNT_MAX: u32 = 126;
/// Sectors of a range at most: a multiple of every block size.
const RANGE_SECTORS_MAX: u32 = u32::MAX - 7;
/// Bytes of the identity.
pub const ID_BYTES: usize = 20;
/// Bytes of the configuration space.
pub const CONFIG_BYTES: usize = 60;
/// Where in it the driver says whether there is a write cache.
pub const WRITEBACK_AT: u32 = 32;
/// What is not cached is written in blocks of this size.
const PHYSICAL_BLOCK: u32 = 4096;

/// The last byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Not done, or not all.
    IoError = 1,
    /// Not understood.
    Unsupported = 2,
}

/// Bytes of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Fill what may be written.
    Read(Range),
    /// Take what may be read.
    Write(Range),
    /// What was answered is durable.
    Flush,
    /// Say who the disk is.
    GetId,
    /// So many ranges follow.
    Discard(usize),
    /// So many ranges follow.
    WriteZeroes(usize),
}

/// A disk as a guest sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name: the volume's.
    pub name: String,
    /// Bytes, a multiple of the logical block.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub logical_block: u32,
}

impl Disk {
    /// A disk of so many whole blocks.
    pub fn new(name: &str, size_bytes: u64, logical_block: u32) -> Disk {
        let logical_block = if logical_block == 4096 { 4096 } else { 512 };
        let mut disk = Disk { name: name.to_owned(), size_bytes: 0, logical_block };
        disk.resize(size_bytes);
        disk
    }

    /// Sets the size; says whether it is another.
    pub fn resize(&mut self, size_bytes: u64) -> bool {
        let whole = size_bytes - size_bytes % u64::from(self.logical_block);
        std::mem::replace(&mut self.size_bytes, whole) != whole
    }

    /// The configuration space.
    pub fn config(&self, queue_count: u16, writeback: bool) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        let blocks = PHYSICAL_BLOCK / self.logical_block;
        put(0, &(self.size_bytes / SECTOR).to_le_bytes());
        put(12, &SEGMENT_COUNT_MAX.to_le_bytes());
        put(20, &self.logical_block.to_le_bytes());
        put(24, &[blocks.trailing_zeros() as u8, 0]);
        put(26, &(blocks as u16).to_le_bytes());
        put(WRITEBACK_AT as usize, &[u8::from(writeback)]);
        put(34, &queue_count.to_le_bytes());
        put(36, &RANGE_SECTORS_MAX.to_le_bytes());
        put(40, &(RANGE_COUNT_MAX as u32).to_le_bytes());
        put(44, &(self.logical_block / SECTOR as u32).to_le_bytes());
        put(48, &RANGE_SECTORS_MAX.to_le_bytes());
        put(52, &(RANGE_COUNT_MAX as u32).to_le_bytes());
        put(56, &[1]);
        bytes
    }

    /// The identity, filled up with zeros.
    pub fn id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(self.name.bytes()) {
            *to = from;
        }
        id
    }

    /// What a head asks for, with so many bytes of data to read and to write behind it.
    pub fn judge(
        &self,
        head: &[u8; HEADER_BYTES as usize],
        readable: u64,
        writable: u64,
    ) -> Result<Ask, Status> {
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight"));
        let (kind, sector) = (word(0) as u32, word(8));
        match kind {
            0 => Ok(Ask::Read(self.range(sector, writable)?)),
            1 => Ok(Ask::Write(self.range(sector, readable)?)),
            4 => Ok(Ask::Flush),
            8 if writable >= ID_BYTES as u64 => Ok(Ask::GetId),
            8 => Err(Status::IoError),
            11 | 13 => {
                let count = (readable / RANGE_BYTES) as usize;
                if !readable.is_multiple_of(RANGE_BYTES) || !(1..=RANGE_COUNT_MAX).contains(&count)
                {
                    return Err(Status::IoError);
                }
                Ok(if kind == 11 { Ask::Discard(count) } else { Ask::WriteZeroes(count) })
            }
            _ => Err(Status::Unsupported),
        }
    }

    /// A range as it follows a discard or write-zeroes; `zeroes` says which.
    pub fn decode_range(
        &self,
        bytes: &[u8; RANGE_BYTES as usize],
        zeroes: bool,
    ) -> Result<Range, Status> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        let (sector, count, flags) = (word(0), word(8) as u32, (word(8) >> 32) as u32);
        // A write-zeroes may allow to unmap, which we do as we like; all else is of the future.
        if flags & !u32::from(zeroes) != 0 {
            return Err(Status::Unsupported);
        }
        self.range(sector, u64::from(count) * SECTOR)
    }

    fn range(&self, sector: u64, length: u64) -> Result<Range, Status> {
        let offset = sector.checked_mul(SECTOR).ok_or(Status::IoError)?;
        let end = offset.checked_add(length).ok_or(Status::IoError)?;
        let block = u64::from(self.logical_block);
        let is_aligned = offset.is_multiple_of(block) && length.is_multiple_of(block);
        if length == 0 || !is_aligned || end > self.size_bytes {
            return Err(Status::IoError); // V1
        }
        Ok(Range { offset, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(kind: u32, sector: u64) -> [u8; 16] {
        let mut head = [0; 16];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[8..].copy_from_slice(&sector.to_le_bytes());
        head
    }

    #[test]
    fn requests_lie_within_the_disk_and_on_its_blocks() {
        let disk = Disk::new("v", (1 << 20) + 4095, 4096);
        assert_eq!(disk.size_bytes, 1 << 20);
        let read = |sector, bytes| disk.judge(&head(0, sector), 0, bytes);
        assert_eq!(read(8, 8192), Ok(Ask::Read(Range { offset: 4096, length: 8192 })));
        assert_eq!(read(2040, 4096).map(|_| ()), Ok(()));
        for (sector, bytes) in [
            (2048, 4096),
            (2040, 8192),
            (1, 4096),
            (8, 512),
            (8, 0),
            (u64::MAX, 4096),
            (8, u64::MAX),
        ] {
            assert_eq!(read(sector, bytes), Err(Status::IoError), "{sector} {bytes}");
        }
        assert_eq!(disk.judge(&head(2, 0), 0, 0), Err(Status::Unsupported));
        assert_eq!(disk.judge(&head(8, 0), 0, 20), Ok(Ask::GetId));
        assert_eq!(disk.judge(&head(8, 0), 0, 19), Err(Status::IoError));
        assert_eq!(disk.judge(&head(13, 0), 32, 0), Ok(Ask::WriteZeroes(2)));
        assert_eq!(disk.judge(&head(11, 0), 17 * 16, 0), Err(Status::IoError));
        assert_eq!(disk.judge(&head(11, 0), 24, 0), Err(Status::IoError));
    }

    #[test]
    fn ranges_know_one_flag_and_only_of_write_zeroes() {
        let disk = Disk::new("v", 1 << 20, 512);
        let range = |count: u32, flags: u32| {
            let mut bytes = [0; 16];
            bytes[0] = 3;
            bytes[8..12].copy_from_slice(&count.to_le_bytes());
            bytes[12..].copy_from_slice(&flags.to_le_bytes());
            bytes
        };
        let wanted = Range { offset: 1536, length: 1024 };
        assert_eq!(disk.decode_range(&range(2, 0), false), Ok(wanted));
        assert_eq!(disk.decode_range(&range(2, 1), true), Ok(wanted));
        assert_eq!(disk.decode_range(&range(2, 1), false), Err(Status::Unsupported));
        assert_eq!(disk.decode_range(&range(2, 2), true), Err(Status::Unsupported));
        assert_eq!(disk.decode_range(&range(u32::MAX, 0), true), Err(Status::IoError));
    }

    #[test]
    fn the_configuration_says_what_is_kept() {
        let config = Disk::new("v", 1 << 20, 512).config(4, true);
        assert_eq!(config[..8], 2048u64.to_le_bytes());
        assert_eq!(config[20..24], 512u32.to_le_bytes());
        assert_eq!((config[24], config[32], config[34]), (3, 1, 4));
        assert_eq!(config[36..40], (u32::MAX - 7).to_le_bytes());
        assert_eq!(Disk::new("v", 1 << 20, 4096).config(1, false)[24..28], [0, 0, 1, 0]);
        assert_eq!(&Disk::new("a-volume-with-a-long-name", 0, 512).id(), b"a-volume-with-a-long");
    }
}
