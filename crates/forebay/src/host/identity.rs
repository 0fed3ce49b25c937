// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Is this the device we closed, and has nobody written to it since?
//!
//! A cache holds blocks newer than those of its backing device. If the backing device was mounted
//! without the cache in between, those blocks are no longer newer but wrong. At a clean close a
//! [`Fingerprint`] of the backing device is recorded, at the next opening it is taken again, and
//! [`compare`] says what differs. Before we write to it, what it holds is left out of what is recorded
//! ([`Fingerprint::without_content`]).
//!
//! # Invariants
//!
//! - **I1** A mount that wrote anything to a file system that we know changed its fingerprint.
//!   (A mount of ext4 or XFS always writes, of XFS even when read-only; of btrfs only when a file
//!   changes.) Reading the device never does.
//! - **I2** Of a device that we were serving when we crashed only size, block size and serial are compared: it then
//!   rightly has blocks that no fingerprint ever saw. One that we were not serving is compared as ever: it may
//!   have been refused for what is to be seen again.
//! - **I3** The checksum is one that no file system seals its blocks with. CRC32C would be blind:
//!   two versions of an ext4 superblock, each ending in its own CRC32C, differ by a multiple of
//!   the polynomial, so a CRC32C over both is the same. (LVM and GPT do that with the other CRC32.)
//!
//! # What it sees of a superblock
//!
//! On the whole device and on each GPT or primary MBR partition of it:
//!
//! | of | fields |
//! |---|---|
//! | ext2/3/4 | free blocks and inodes, s_mtime, s_wtime, s_mnt_count, s_state, s_lastcheck, incompatible features (needs recovery), s_last_orphan, s_kbytes_written |
//! | XFS | the sector of the superblock; where the head of the log is and the 512 bytes before it (every mount writes records there) |
//! | btrfs | generation, root, chunk root and its generation, log root and its transaction |
//! | LVM | each metadata area's header, which has offset, size and checksum of the newest metadata |
//! | md | time, events, resync position and checksum of the superblock |
//!
//! # Limits
//!
//! `docs/faults.md` says the same to users.
//! Not seen: writes by programs to the device itself away from its ends and superblocks; file
//! systems inside LVM volumes, LUKS, md arrays, logical MBR partitions and files of virtual
//! machines; an external XFS log; a writer that puts everything back. A serial tells apart two
//! devices only as well as their makers do, and many virtual disks have none.

use super::machine::{Host, Mount, Node, Target};
use super::signature::{
    Ends, ProbeError, ReadAt, field, is_md, md_offsets, read_aligned, u16_le, u32_be, u32_le,
    u64_be, u64_le,
};
use crc_fast::{CrcAlgorithm, Digest, checksum};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

/// Bytes of an encoded fingerprint.
pub const FINGERPRINT_BYTES: usize = 64;
/// Partitions looked into.
const PARTITION_COUNT_MAX: usize = 128;

/// Which device it is, as its maker or the kernel says: up to 32 bytes of text, zeros after.
/// All zeros: unknown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Serial([u8; 32]);

impl Serial {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self([0; 32]);

    /// From any text. Runs of white space become one space; what is longer than 32 bytes keeps its
    /// first 15, a `~`, and a 64-bit checksum of all of it.
    pub fn new(text: &str) -> Self {
        let plain = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let bytes = if plain.len() <= 32 {
            plain.into_bytes()
        } else {
            let sum = checksum(CRC, plain.as_bytes());
            let mut bytes = plain.into_bytes();
            bytes.truncate(15);
            bytes.extend_from_slice(format!("~{sum:016x}").as_bytes());
            bytes
        };
        let mut serial = [0; 32];
        for (to, from) in serial.iter_mut().zip(bytes) {
            *to = from;
        }
        Self(serial)
    }

    /// Of this device or file, from sysfs or `stat`; [`Serial::UNKNOWN`] when there is none.
    ///
    /// A partition has the serial of its disk and its own number; a device-mapper or md device the
    /// identity of its map; a loop device that of its file. A file has its inode and time of
    /// birth, which survive a reboot as its file system's device number does not; a copy of it is
    /// another file. Where there is no time of birth, the device number stands in.
    pub fn of(host: &Host, target: &Target) -> Self {
        match target {
            Target::Block { number, .. } => host
                .node(*number)
                .and_then(|node| serial_of_node(host, &node))
                .map_or(Self::UNKNOWN, |text| Self::new(&text)),
            Target::File { .. } => Self::new(&serial_of_file(target)),
        }
    }

    /// Nothing is known.
    pub fn is_unknown(&self) -> bool {
        *self == Self::UNKNOWN
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_unknown() {
            return out.write_str("(none)");
        }
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let text = String::from_utf8_lossy(self.0.get(..end).unwrap_or_default());
        text.chars().filter(|c| !c.is_control()).try_for_each(|c| write!(out, "{c}"))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Serial({self})")
    }
}

/// Kinds of superblock that went into a fingerprint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SuperblockKinds(u8);

impl SuperblockKinds {
    /// ext2, ext3, ext4.
    pub const EXT: Self = Self(1);
    /// XFS.
    pub const XFS: Self = Self(2);
    /// btrfs.
    pub const BTRFS: Self = Self(4);
    /// An LVM physical volume.
    pub const LVM: Self = Self(8);
    /// A member of an md array.
    pub const MD: Self = Self(16);

    const NAMES: [(Self, &'static str); 5] = [
        (Self::EXT, "ext"),
        (Self::XFS, "XFS"),
        (Self::BTRFS, "btrfs"),
        (Self::LVM, "LVM"),
        (Self::MD, "md"),
    ];

    /// True when all of `other` is in this.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Display for SuperblockKinds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = Self::NAMES
            .iter()
            .filter(|(kind, _)| self.contains(*kind))
            .map(|(_, name)| *name)
            .collect();
        out.write_str(if names.is_empty() { "no known" } else { "" })?;
        out.write_str(&names.join("+"))
    }
}

/// What is recorded of a backing device at a clean close.
///
/// While it is served, this is recorded without what it holds: the CRCs are 0.
///
/// Encoded, little-endian: size 0..8, logical block 8..12, kinds of superblock 12, zeros 13..16,
/// CRC of the ends 16..24, CRC of the superblocks 24..32, serial 32..64. What carries it has its
/// own checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Of the device or file.
    pub size_bytes: u64,
    /// Of the device; of a file what is assumed.
    pub logical_block: u32,
    /// Which device it is.
    pub serial: Serial,
    /// CRC-64/NVME of the first MiB and the last; of everything, twice, when there is no more. 0: what the device
    /// holds is not known.
    pub ends_crc: u64,
    /// CRC-64/NVME of the fields in the module's table; 0 when there are none.
    pub superblock_crc: u64,
    /// Whose fields these are.
    pub superblock_kinds: SuperblockKinds,
}

/// Bytes that are no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "fingerprint byte {offset}: expected 0, found {found}; a newer forebay may have written it"
)]
pub struct FingerprintError {
    /// Which byte.
    pub offset: usize,
    /// As found.
    pub found: u8,
}

/// Which device this is, apart from its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Of the device or file.
    pub size_bytes: u64,
    /// Bytes of its logical block.
    pub logical_block: u32,
}

impl Fingerprint {
    /// Reads the ends and the superblocks of a device.
    pub fn take(
        read: &mut ReadAt<'_>,
        geometry: Geometry,
        serial: Serial,
    ) -> Result<Self, ProbeError> {
        let Geometry { size_bytes, logical_block } = geometry;
        let ends = Ends::read(read, size_bytes)?;
        let mut sum = Digest::new(CRC);
        sum.update(&ends.head);
        sum.update(&ends.tail);
        let ends_crc = sum.finalize();

        let mut fields = Fields { read, size_bytes, kinds: 0, sum: Digest::new(CRC) };
        fields.region(Region { offset: 0, length: size_bytes })?;
        for region in partitions(&ends.head, geometry) {
            fields.region(region)?;
        }
        Ok(Self {
            size_bytes,
            logical_block,
            serial,
            ends_crc,
            superblock_crc: if fields.kinds == 0 { 0 } else { fields.sum.finalize() },
            superblock_kinds: SuperblockKinds(fields.kinds),
        })
    }

    /// Of a device that is about to be written: which it is, and not what it holds.
    #[must_use]
    pub fn without_content(self) -> Self {
        Self { ends_crc: 0, superblock_crc: 0, ..self }
    }

    /// Whether it says what the device holds: it was not served since that was noted.
    pub fn has_content(&self) -> bool {
        self.ends_crc != 0
    }

    /// As it is recorded.
    pub fn encode(&self) -> [u8; FINGERPRINT_BYTES] {
        let mut bytes = [0; FINGERPRINT_BYTES];
        bytes[..8].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.logical_block.to_le_bytes());
        bytes[12] = self.superblock_kinds.0;
        bytes[16..24].copy_from_slice(&self.ends_crc.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.superblock_crc.to_le_bytes());
        bytes[32..].copy_from_slice(&self.serial.0);
        bytes
    }

    /// From what was recorded.
    pub fn decode(bytes: &[u8; FINGERPRINT_BYTES]) -> Result<Self, FingerprintError> {
        for (offset, found) in bytes.iter().copied().enumerate().take(16).skip(13) {
            if found != 0 {
                return Err(FingerprintError { offset, found });
            }
        }
        Ok(Self {
            size_bytes: u64_le(bytes, 0),
            logical_block: u32_le(bytes, 8),
            ends_crc: u64_le(bytes, 16),
            superblock_crc: u64_le(bytes, 24),
            superblock_kinds: SuperblockKinds(bytes[12]),
            serial: Serial(field(bytes, 32)),
        })
    }
}

/// The superblock of ext2, ext3 or ext4 in the first bytes of a device.
fn ext_superblock(head: &[u8]) -> Option<&[u8]> {
    head.get(1024..2048).filter(|superblock| u16_le(superblock, 0x38) == 0xef53)
}

/// When a device was written last, in seconds since 1970, if it says so: ext2, ext3 and ext4 do (s_wtime).
pub fn written_at(read: &mut ReadAt<'_>) -> Option<u64> {
    let mut head = [0; 4096];
    read(0, &mut head).ok()?;
    let superblock = ext_superblock(&head)?;
    let seconds = u64::from(u32_le(superblock, 0x30)) | u64::from(superblock[0x274]) << 32;
    (seconds > 0).then_some(seconds)
}

/// What [`compare`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// As far as can be seen.
    Same,
    /// Not the device that was closed, or not as it was.
    Changed {
        /// In these points; at least one.
        what: Vec<Difference>,
    },
}

/// One point in which two fingerprints differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// Another size.
    Size {
        /// At the close.
        recorded: u64,
        /// Now.
        found: u64,
    },
    /// Another logical block.
    LogicalBlock {
        /// At the close.
        recorded: u32,
        /// Now.
        found: u32,
    },
    /// Another device.
    Serial {
        /// At the close.
        recorded: Serial,
        /// Now.
        found: Serial,
    },
    /// Something was written to the first or last MiB.
    Ends,
    /// A superblock was written: something was mounted, made or changed.
    Superblock {
        /// Kinds at the close.
        recorded: SuperblockKinds,
        /// Kinds now.
        found: SuperblockKinds,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { recorded, found } => {
                write!(out, "size: expected {recorded} bytes, found {found}")
            }
            Self::LogicalBlock { recorded, found } => {
                write!(out, "logical block: expected {recorded} bytes, found {found}")
            }
            Self::Serial { recorded, found } => {
                write!(out, "identity: expected {recorded}, found {found}")
            }
            Self::Ends => out.write_str("its first or last MiB was written to"),
            Self::Superblock { recorded, found } if recorded == found => {
                write!(out, "its {found} superblock changed: it was mounted or altered")
            }
            Self::Superblock { recorded, found } => {
                write!(out, "superblocks: expected {recorded}, found {found}")
            }
        }
    }
}

/// Compares what was recorded with what is there. A serial unknown at the close is not compared;
/// one that cannot be found any more is a difference.
pub fn compare(recorded: &Fingerprint, found: &Fingerprint) -> Match {
    let mut what = Vec::new();
    if recorded.size_bytes != found.size_bytes {
        what.push(Difference::Size { recorded: recorded.size_bytes, found: found.size_bytes });
    }
    if recorded.logical_block != found.logical_block {
        let (recorded, found) = (recorded.logical_block, found.logical_block);
        what.push(Difference::LogicalBlock { recorded, found });
    }
    if recorded.serial != found.serial && !recorded.serial.is_unknown() {
        what.push(Difference::Serial { recorded: recorded.serial, found: found.serial });
    }
    // I2
    if recorded.has_content() {
        if recorded.ends_crc != found.ends_crc {
            what.push(Difference::Ends);
        }
        if recorded.superblock_crc != found.superblock_crc
            || recorded.superblock_kinds != found.superblock_kinds
        {
            let (recorded, found) = (recorded.superblock_kinds, found.superblock_kinds);
            what.push(Difference::Superblock { recorded, found });
        }
    }
    if what.is_empty() { Match::Same } else { Match::Changed { what } }
}

/// I3
const CRC: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// A device or a partition of it, in bytes of the device.
#[derive(Clone, Copy)]
struct Region {
    offset: u64,
    length: u64,
}

/// The running checksum over the superblocks of a device.
struct Fields<'a, 'b> {
    read: &'a mut ReadAt<'b>,
    size_bytes: u64,
    kinds: u8,
    sum: Digest,
}

impl Fields<'_, '_> {
    fn region(&mut self, region: Region) -> Result<(), ProbeError> {
        // One read for all that is near the beginning: ext at 1 KiB, btrfs at 64 KiB.
        let near = region.length.min(72 << 10).min(self.size_bytes.saturating_sub(region.offset));
        let near = usize::try_from(near).expect("at most 72 KiB");
        let Some(head) = self.bytes(region, 0, near)? else { return Ok(()) };
        self.ext(&head);
        self.xfs(region, &head)?;
        self.btrfs(&head);
        self.lvm(region, &head)?;
        self.md(region)
    }

    fn bytes(
        &mut self,
        region: Region,
        offset: u64,
        length: usize,
    ) -> Result<Option<Vec<u8>>, ProbeError> {
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= region.length);
        let Some(offset) = region.offset.checked_add(offset).filter(|_| inside) else {
            return Ok(None);
        };
        read_aligned(self.read, self.size_bytes, offset, length)
    }

    fn add(&mut self, kind: SuperblockKinds, bytes: &[u8]) {
        self.kinds |= kind.0;
        self.sum.update(&[kind.0]);
        self.sum.update(bytes);
    }

    fn ext(&mut self, head: &[u8]) {
        let Some(superblock) = ext_superblock(head) else { return };
        let mut fields = Vec::with_capacity(64);
        fields.extend(field::<8>(superblock, 0x0c)); // free blocks, free inodes
        fields.extend(field::<8>(superblock, 0x2c)); // s_mtime, s_wtime
        fields.extend(field::<2>(superblock, 0x34)); // s_mnt_count
        fields.extend(field::<2>(superblock, 0x3a)); // s_state
        fields.extend(field::<4>(superblock, 0x40)); // s_lastcheck
        fields.extend(field::<4>(superblock, 0x60)); // incompatible features
        fields.extend(field::<4>(superblock, 0xe8)); // s_last_orphan
        fields.extend(field::<4>(superblock, 0x158)); // free blocks, upper half
        fields.extend(field::<8>(superblock, 0x178)); // s_kbytes_written
        fields.extend(field::<6>(superblock, 0x274)); // upper bytes of the times
        self.add(SuperblockKinds::EXT, &fields);
    }

    fn xfs(&mut self, region: Region, head: &[u8]) -> Result<(), ProbeError> {
        let Some(superblock) = head.get(..512).filter(|block| block.starts_with(b"XFSB")) else {
            return Ok(());
        };
        self.add(SuperblockKinds::XFS, superblock);
        let Some(log) = xfs_log(superblock) else { return Ok(()) };
        let head = self.xfs_log_head(region, log)?;
        self.add(SuperblockKinds::XFS, &head.to_le_bytes());
        let before = head.checked_sub(1).unwrap_or(log.length / 512 - 1);
        if let Some(last) = self.bytes(region, log.offset + before * 512, 512)? {
            self.add(SuperblockKinds::XFS, &last);
        }
        Ok(())
    }

    /// The first 512-byte block of the log whose cycle is not that of the first block: where the
    /// next record goes. After a crash there may be several such; any of them will do here, since
    /// the search depends on nothing but the log.
    fn xfs_log_head(&mut self, region: Region, log: Region) -> Result<u64, ProbeError> {
        let Some(first) = self.xfs_cycle(region, log, 0)? else { return Ok(0) };
        let (mut low, mut high) = (0, log.length / 512);
        // Halves a 64-bit number: at most 64 rounds.
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.xfs_cycle(region, log, middle)? == Some(first) {
                low = middle;
            } else {
                high = middle;
            }
        }
        Ok(if high == log.length / 512 { 0 } else { high })
    }

    fn xfs_cycle(
        &mut self,
        region: Region,
        log: Region,
        block: u64,
    ) -> Result<Option<u32>, ProbeError> {
        let found = self.bytes(region, log.offset + block * 512, 8)?;
        // A record's header begins with its magic, and then has the cycle.
        Ok(found.map(|bytes| match u32_be(&bytes, 0) {
            0xfeed_babe => u32_be(&bytes, 4),
            cycle => cycle,
        }))
    }

    fn btrfs(&mut self, head: &[u8]) {
        let Some(superblock) = head.get(0x1_0000..0x1_1000) else { return };
        if &field::<8>(superblock, 0x40) == b"_BHRfS_M" {
            // generation, root, chunk root, log root, log root transaction
            self.add(SuperblockKinds::BTRFS, &field::<0x28>(superblock, 0x48));
            // generation of the chunk root
            self.add(SuperblockKinds::BTRFS, &field::<8>(superblock, 0xa4));
        }
    }

    fn lvm(&mut self, region: Region, head: &[u8]) -> Result<(), ProbeError> {
        let is_label = |sector: &&[u8]| {
            sector.starts_with(b"LABELONE") && &field::<8>(sector, 24) == b"LVM2 001"
        };
        let Some(label) = head.chunks_exact(512).take(4).find(is_label) else { return Ok(()) };
        self.add(SuperblockKinds::LVM, label);
        // Header, then data areas up to a zero, then metadata areas up to a zero.
        let header = u32_le(label, 20) as usize;
        let mut at = header.saturating_add(40);
        let mut lists_passed = 0;
        while lists_passed < 2 && at.saturating_add(16) <= label.len() {
            let offset = u64_le(label, at);
            at += 16;
            if offset == 0 {
                lists_passed += 1;
            } else if lists_passed == 1
                && let Some(area) = self.bytes(region, offset, 512)?
            {
                self.add(SuperblockKinds::LVM, &area);
            }
        }
        Ok(())
    }

    fn md(&mut self, region: Region) -> Result<(), ProbeError> {
        for (index, offset) in md_offsets(region.length).into_iter().enumerate() {
            let Some(offset) = offset else { continue };
            let Some(superblock) = self.bytes(region, offset, 256)? else { continue };
            if !is_md(&superblock, index) {
                continue;
            }
            // 0.90: time, state, disks, checksum, events. 1.x: time, events, resync, checksum.
            let start = if index == 0 { 128 } else { 192 };
            self.add(SuperblockKinds::MD, &field::<48>(&superblock, start));
        }
        Ok(())
    }
}

/// Where the log of an XFS is, from its superblock; `None` for an external one or nonsense.
fn xfs_log(superblock: &[u8]) -> Option<Region> {
    let block_bytes = u64::from(u32_be(superblock, 4));
    let start = u64_be(superblock, 48);
    let group_shift = u32::from(*superblock.get(124)?);
    let group_blocks = u64::from(u32_be(superblock, 84));
    let log_blocks = u64::from(u32_be(superblock, 96));
    let is_sane = block_bytes.is_power_of_two()
        && (512..=65536).contains(&block_bytes)
        && group_shift < 32
        && start != 0
        && log_blocks != 0;
    if !is_sane {
        return None;
    }
    let group = start >> group_shift;
    let within = start & ((1 << group_shift) - 1);
    let block = group.checked_mul(group_blocks)?.checked_add(within)?;
    let offset = block.checked_mul(block_bytes)?;
    let length = log_blocks * block_bytes;
    offset.checked_add(length)?;
    Some(Region { offset, length })
}

/// The partitions of a GPT, or else the primary ones of an MBR.
fn partitions(head: &[u8], geometry: Geometry) -> Vec<Region> {
    for block_bytes in [512, 4096] {
        let Some(header) = head.get(block_bytes..block_bytes + 92) else { continue };
        if header.starts_with(b"EFI PART") {
            return gpt_partitions(head, header, block_bytes as u64);
        }
    }
    if field::<2>(head, 510) != [0x55, 0xaa] {
        return Vec::new();
    }
    let block_bytes = u64::from(geometry.logical_block.clamp(512, 4096));
    (0..4)
        .map(|index| field::<16>(head, 446 + index * 16))
        // An extended partition and the cover of a GPT have no superblock of their own.
        .filter(|entry| !matches!(entry[4], 0 | 0x05 | 0x0f | 0x85 | 0xee))
        .filter(|entry| matches!(entry[0], 0 | 0x80))
        .map(|entry| Region {
            offset: u64::from(u32_le(&entry, 8)) * block_bytes,
            length: u64::from(u32_le(&entry, 12)) * block_bytes,
        })
        .filter(|region| region.offset != 0 && region.length != 0)
        .collect()
}

fn gpt_partitions(head: &[u8], header: &[u8], block_bytes: u64) -> Vec<Region> {
    let entry_bytes = u32_le(header, 84) as usize;
    let count = (u32_le(header, 80) as usize).min(PARTITION_COUNT_MAX);
    let first = u64_le(header, 72).checked_mul(block_bytes).map(usize::try_from);
    let (Some(Ok(first)), 128..=4096) = (first, entry_bytes) else { return Vec::new() };
    let region = |index: usize| {
        let start = first.checked_add(index * entry_bytes)?;
        let entry = head.get(start..start.checked_add(128)?)?;
        let (first, last) = (u64_le(entry, 32), u64_le(entry, 40));
        if field::<16>(entry, 0) == [0; 16] || first == 0 || last < first {
            return None;
        }
        let offset = first.checked_mul(block_bytes)?;
        let length = (last - first).checked_add(1)?.checked_mul(block_bytes)?;
        Some(Region { offset, length })
    };
    (0..count).filter_map(region).collect()
}

fn serial_of_node(host: &Host, node: &Node) -> Option<String> {
    if let Some(parent) = node.parent() {
        let number = node.attribute("partition")?;
        return Some(format!("{}#{number}", serial_of_node_whole(host, &parent)?));
    }
    serial_of_node_whole(host, node)
}

fn serial_of_node_whole(host: &Host, node: &Node) -> Option<String> {
    for name in ["dm/uuid", "md/uuid", "wwid", "device/wwid"] {
        if let Some(found) = node.attribute(name) {
            return Some(found);
        }
    }
    if let Some(found) =
        vital_page(node, "device/vpd_pg83").or_else(|| vital_page(node, "device/vpd_pg80"))
    {
        return Some(found);
    }
    for name in ["serial", "device/serial", "device/cid"] {
        if let Some(found) = node.attribute(name) {
            return Some(found);
        }
    }
    let binding = host.loops().into_iter().find(|binding| binding.node.number == node.number)?;
    // To look at one of ours is to ask the daemon behind it, which may be who looks, or be dead.
    let is_ours = |mount: &Mount| {
        mount.mount_source == "forebay" && binding.backing_file.starts_with(&mount.mount_point)
    };
    if host.mounts().is_ok_and(|mounts| mounts.iter().any(is_ours)) {
        return None;
    }
    let file = Target::of(&binding.backing_file).ok()?;
    Some(format!("{}+{}", serial_of_file(&file), binding.offset_bytes))
}

/// A SCSI page of vital product data, as a checksum: it is binary and has no one form.
fn vital_page(node: &Node, name: &str) -> Option<String> {
    let bytes = std::fs::read(node.directory.join(name)).ok()?;
    let body = bytes.get(4..).filter(|body| !body.is_empty())?;
    Some(format!("vpd:{:016x}", checksum(CRC, body)))
}

fn serial_of_file(target: &Target) -> String {
    let Target::File { path, on, inode } = target else { return String::new() };
    let born = std::fs::metadata(path)
        .ok()
        .filter(|found| found.ino() == *inode)
        .and_then(|found| found.created().ok())
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    match born {
        Some(born) => format!("{inode}@{}.{:09}", born.as_secs(), born.subsec_nanos()),
        None => format!("{on}:{inode}"),
    }
}

#[cfg(test)]
mod tests;
