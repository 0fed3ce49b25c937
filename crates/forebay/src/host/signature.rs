// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is on a device already: file systems, volume managers, partition tables, swap, ourselves.
//!
//! [`probe`] reads the first and last MiB (and three more places for LUKS2) and decodes what it
//! finds. It decides nothing: that a device with a signature is not overwritten unasked is the
//! caller's business.
//!
//! # Invariants
//!
//! - **N1** Bytes from a device never panic and never allocate by their own say-so.
//! - **N2** What cannot be read is an error, never a blank device.
//! - **N3** Reads begin at multiples of 4096 and are multiples of 4096 long, except at the end of
//!   a device whose size is not; so they suit direct I/O.
//!
//! # Limits
//!
//! A device without a known signature is not thereby empty: databases on raw devices, plain
//! dm-crypt and file systems of other systems leave no mark we know.

use std::fmt;
use std::io;

/// Bytes looked at from each end.
const END_BYTES: u64 = 1 << 20;
/// Reads are multiples of this.
const READ_ALIGN: u64 = 4096;
/// Where LUKS2 may keep its second header, when the first was overwritten.
const LUKS2_SECOND_HEADER_OFFSETS: [u64; 9] =
    [0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000, 0x20_0000, 0x40_0000];

/// How this module reads a device: fill the whole buffer from this offset, or fail.
pub type ReadAt<'a> = dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a;

/// What kind of content a signature stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // Each is a name a reader knows or can look up.
pub enum Kind {
    Forebay,
    Ext2,
    Ext3,
    Ext4,
    ExtJournal,
    Xfs,
    Btrfs,
    Fat,
    Exfat,
    Ntfs,
    Zfs,
    LvmPhysicalVolume,
    Luks1,
    Luks2,
    MdRaid,
    IntelRaid,
    Swap,
    SwapSuspend,
    Gpt,
    Mbr,
    Bcache,
    Bcachefs,
    F2fs,
    Iso9660,
    Udf,
    Squashfs,
    Erofs,
    Apfs,
    HfsPlus,
    Bitlocker,
    Refs,
    Reiserfs,
    Jfs,
    Gfs2,
    Nilfs2,
    DmIntegrity,
    DmCache,
    DmThin,
    Vdo,
    Stratis,
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Forebay => "forebay cache",
            Self::Ext2 => "ext2",
            Self::Ext3 => "ext3",
            Self::Ext4 => "ext4",
            Self::ExtJournal => "external ext journal",
            Self::Xfs => "XFS",
            Self::Btrfs => "btrfs",
            Self::Fat => "FAT",
            Self::Exfat => "exFAT",
            Self::Ntfs => "NTFS",
            Self::Zfs => "ZFS",
            Self::LvmPhysicalVolume => "LVM physical volume",
            Self::Luks1 => "LUKS1",
            Self::Luks2 => "LUKS2",
            Self::MdRaid => "md RAID member",
            Self::IntelRaid => "Intel RAID member",
            Self::Swap => "swap",
            Self::SwapSuspend => "hibernation image",
            Self::Gpt => "GPT partition table",
            Self::Mbr => "MBR partition table",
            Self::Bcache => "bcache",
            Self::Bcachefs => "bcachefs",
            Self::F2fs => "F2FS",
            Self::Iso9660 => "ISO 9660",
            Self::Udf => "UDF",
            Self::Squashfs => "squashfs",
            Self::Erofs => "EROFS",
            Self::Apfs => "APFS",
            Self::HfsPlus => "HFS+",
            Self::Bitlocker => "BitLocker",
            Self::Refs => "ReFS",
            Self::Reiserfs => "ReiserFS",
            Self::Jfs => "JFS",
            Self::Gfs2 => "GFS2",
            Self::Nilfs2 => "NILFS2",
            Self::DmIntegrity => "dm-integrity",
            Self::DmCache => "dm-cache metadata",
            Self::DmThin => "dm-thin metadata",
            Self::Vdo => "VDO",
            Self::Stratis => "Stratis pool member",
        })
    }
}

/// One mark found on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Of what.
    pub kind: Kind,
    /// The name its owner gave it.
    pub label: Option<String>,
    /// The identity its maker gave it, in the usual notation.
    pub uuid: Option<String>,
    /// Where the mark is.
    pub offset: u64,
}

impl fmt::Display for Signature {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.kind)?;
        if let Some(label) = &self.label {
            write!(out, " \"{label}\"")?;
        }
        if let Some(uuid) = &self.uuid {
            write!(out, " {uuid}")?;
        }
        write!(out, " (at byte {})", self.offset)
    }
}

/// A device could not be read, so it is unknown what is on it.
#[derive(Debug, thiserror::Error)]
#[error("{length} bytes at {offset} cannot be read, so it is unknown what is on the device")]
pub struct ProbeError {
    /// Where.
    pub offset: u64,
    /// How much.
    pub length: usize,
    /// Why.
    pub source: io::Error,
}

/// Every known signature on a device of this size, in order of offset; none is not a promise that
/// the device is empty.
pub fn probe(read: &mut ReadAt<'_>, size_bytes: u64) -> Result<Vec<Signature>, ProbeError> {
    let ends = Ends::read(read, size_bytes)?;
    let mut found = Vec::new();
    marks(&ends, &mut found);
    ext(&ends, &mut found);
    xfs(&ends, &mut found);
    boot_sector(&ends, &mut found);
    zfs(&ends, &mut found);
    lvm(&ends, &mut found);
    md(&ends, &mut found);
    swap(&ends, &mut found);
    gpt(&ends, &mut found);
    f2fs(&ends, &mut found);
    optical(&ends, &mut found);
    luks(&ends, read, &mut found)?;
    found.sort_by_key(|signature| (signature.offset, signature.kind));
    Ok(found)
}

/// The first and the last MiB of a device; the same bytes twice when it is small.
pub(super) struct Ends {
    pub(super) size_bytes: u64,
    pub(super) head: Vec<u8>,
    pub(super) tail: Vec<u8>,
    tail_offset: u64,
}

impl Ends {
    pub(super) fn read(read: &mut ReadAt<'_>, size_bytes: u64) -> Result<Self, ProbeError> {
        let head = read_range(read, 0, END_BYTES.min(size_bytes))?;
        // Down to a multiple, so a few bytes more than a MiB when the size is odd.
        let tail_offset = size_bytes.saturating_sub(END_BYTES) / READ_ALIGN * READ_ALIGN;
        let tail = read_range(read, tail_offset, size_bytes - tail_offset)?;
        Ok(Self { size_bytes, head, tail, tail_offset })
    }

    /// These bytes, when both ends together hold them.
    fn at(&self, offset: u64, length: usize) -> Option<&[u8]> {
        slice(&self.head, offset, length)
            .or_else(|| slice(&self.tail, offset.checked_sub(self.tail_offset)?, length))
    }

    fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        self.at(offset, bytes.len()) == Some(bytes)
    }
}

fn slice(bytes: &[u8], offset: u64, length: usize) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(length)?)
}

/// Reads `length` bytes, which the caller has bounded.
pub(super) fn read_range(
    read: &mut ReadAt<'_>,
    offset: u64,
    length: u64,
) -> Result<Vec<u8>, ProbeError> {
    let length = usize::try_from(length).expect("callers ask for at most a few MiB");
    let mut bytes = vec![0; length];
    if length > 0 {
        read(offset, &mut bytes).map_err(|source| ProbeError { offset, length, source })?;
    }
    Ok(bytes)
}

/// Reads the 4096-byte blocks that hold a range and returns just the range (N3); `None` when the
/// device ends before it does.
pub(super) fn read_aligned(
    read: &mut ReadAt<'_>,
    size_bytes: u64,
    offset: u64,
    length: usize,
) -> Result<Option<Vec<u8>>, ProbeError> {
    let Some(end) = offset.checked_add(length as u64).filter(|end| *end <= size_bytes) else {
        return Ok(None);
    };
    let start = offset / READ_ALIGN * READ_ALIGN;
    let stop = end.next_multiple_of(READ_ALIGN).min(size_bytes);
    let bytes = read_range(read, start, stop - start)?;
    Ok(slice(&bytes, offset - start, length).map(<[u8]>::to_vec))
}

/// A field of `N` bytes at `offset` of `bytes`; zeros where there is none.
pub(super) fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let found = offset.checked_add(N).and_then(|end| bytes.get(offset..end));
    found.and_then(|found| found.try_into().ok()).unwrap_or([0; N])
}

pub(super) fn u16_le(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(field(bytes, offset))
}

pub(super) fn u32_le(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(field(bytes, offset))
}

pub(super) fn u64_le(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(field(bytes, offset))
}

pub(super) fn u32_be(bytes: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(field(bytes, offset))
}

pub(super) fn u64_be(bytes: &[u8], offset: usize) -> u64 {
    u64::from_be_bytes(field(bytes, offset))
}

/// Printable text up to the first zero; `None` when nothing is left.
fn text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let found = String::from_utf8_lossy(bytes.get(..end)?);
    let found: String = found.chars().filter(|c| !c.is_control()).collect();
    let found = found.trim();
    if found.is_empty() { None } else { Some(found.to_owned()) }
}

fn text_utf16(bytes: &[u8]) -> Option<String> {
    let units: Vec<u16> =
        bytes.chunks_exact(2).map(|pair| u16_le(pair, 0)).take_while(|unit| *unit != 0).collect();
    text(String::from_utf16_lossy(&units).as_bytes())
}

/// `8-4-4-4-12`; `None` when all zeros.
fn uuid(bytes: [u8; 16]) -> Option<String> {
    if bytes == [0; 16] {
        return None;
    }
    let mut found = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            found.push('-');
        }
        found.push_str(&format!("{byte:02x}"));
    }
    Some(found)
}

fn uuid_at(bytes: &[u8], offset: usize) -> Option<String> {
    uuid(field(bytes, offset))
}

/// A mark that is nothing but bytes in a place.
struct Mark {
    kind: Kind,
    offset: u64,
    magic: &'static [u8],
    uuid_offset: Option<u64>,
    label: Option<(u64, usize)>,
}

const fn mark(kind: Kind, offset: u64, magic: &'static [u8]) -> Mark {
    Mark { kind, offset, magic, uuid_offset: None, label: None }
}

const MARKS: &[Mark] = &[
    Mark { kind: Kind::Forebay, offset: 0, magic: b"FOREBAYS", uuid_offset: Some(32), label: None },
    Mark {
        kind: Kind::Btrfs,
        offset: 0x1_0040,
        magic: b"_BHRfS_M",
        uuid_offset: Some(0x1_0020),
        label: Some((0x1_012b, 256)),
    },
    Mark {
        kind: Kind::Bcache,
        offset: 4096 + 24,
        magic: b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
        uuid_offset: Some(4096 + 40),
        label: Some((4096 + 72, 32)),
    },
    mark(
        Kind::Bcachefs,
        4096 + 24,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
    ),
    mark(Kind::Exfat, 3, b"EXFAT   "),
    mark(Kind::Ntfs, 3, b"NTFS    "),
    mark(Kind::Bitlocker, 3, b"-FVE-FS-"),
    mark(Kind::Refs, 3, b"ReFS\0\0\0\0"),
    mark(Kind::Squashfs, 0, b"hsqs"),
    mark(Kind::Erofs, 1024, b"\xe2\xe1\xf5\xe0"),
    mark(Kind::Apfs, 32, b"NXSB"),
    mark(Kind::HfsPlus, 1024, b"H+\0\x04"),
    mark(Kind::HfsPlus, 1024, b"HX\0\x05"),
    mark(Kind::Reiserfs, 65536 + 52, b"ReIsErFs"),
    mark(Kind::Reiserfs, 65536 + 52, b"ReIsEr2Fs"),
    mark(Kind::Reiserfs, 65536 + 52, b"ReIsEr3Fs"),
    mark(Kind::Jfs, 32768, b"JFS1"),
    mark(Kind::Gfs2, 65536, b"\x01\x16\x19\x70\x00\x00\x00\x01"),
    mark(Kind::Nilfs2, 1024 + 6, b"\x34\x34"),
    mark(Kind::DmIntegrity, 0, b"integrt\0"),
    // Little-endian 06142003 and 27022010, after checksum, flags, block number and UUID.
    mark(Kind::DmCache, 32, b"\x33\xb8\x5d\x00\x00\x00\x00\x00"),
    mark(Kind::DmThin, 32, b"\xba\x52\x9c\x01\x00\x00\x00\x00"),
    mark(Kind::Vdo, 0, b"dmvdo001"),
    mark(Kind::Stratis, 512 + 4, b"!Stra0tis\x86\xff\x02^\x41rh"),
];

fn marks(ends: &Ends, found: &mut Vec<Signature>) {
    for mark in MARKS.iter().filter(|mark| ends.holds(mark.offset, mark.magic)) {
        // NILFS2's mark is only two bytes; its revision (2) and size of superblock go with it.
        if mark.kind == Kind::Nilfs2 && ends.at(1024, 4).is_none_or(|head| u32_le(head, 0) != 2) {
            continue;
        }
        let uuid = mark.uuid_offset.and_then(|offset| ends.at(offset, 16));
        let label = mark.label.and_then(|(offset, length)| ends.at(offset, length));
        found.push(Signature {
            kind: mark.kind,
            label: label.and_then(text),
            uuid: uuid.and_then(|bytes| uuid_at(bytes, 0)),
            offset: mark.offset,
        });
    }
    let intel = ends.size_bytes / 512 * 512;
    if let Some(offset) = intel.checked_sub(1024)
        && ends.holds(offset, b"Intel Raid ISM Cfg Sig. ")
    {
        found.push(Signature { kind: Kind::IntelRaid, label: None, uuid: None, offset });
    }
}

fn ext(ends: &Ends, found: &mut Vec<Signature>) {
    let Some(superblock) = ends.at(1024, 1024) else { return };
    if u16_le(superblock, 0x38) != 0xef53 {
        return;
    }
    let compatible = u32_le(superblock, 0x5c);
    let incompatible = u32_le(superblock, 0x60);
    let read_only = u32_le(superblock, 0x64);
    // ext3 knows filetype, recover, journal_dev, meta_bg; and sparse_super, large_file, btree_dir.
    let kind = if incompatible & 0x8 != 0 {
        Kind::ExtJournal
    } else if incompatible & !0x1e != 0 || read_only & !0x7 != 0 {
        Kind::Ext4
    } else if compatible & 0x4 != 0 {
        Kind::Ext3
    } else {
        Kind::Ext2
    };
    let label = text(&field::<16>(superblock, 0x78));
    found.push(Signature { kind, label, uuid: uuid_at(superblock, 0x68), offset: 1024 + 0x38 });
}

fn xfs(ends: &Ends, found: &mut Vec<Signature>) {
    let Some(superblock) = ends.at(0, 512).filter(|block| block.starts_with(b"XFSB")) else {
        return;
    };
    let label = text(&field::<12>(superblock, 108));
    found.push(Signature { kind: Kind::Xfs, label, uuid: uuid_at(superblock, 32), offset: 0 });
}

/// FAT and the MBR share the first sector and the last two bytes of it.
fn boot_sector(ends: &Ends, found: &mut Vec<Signature>) {
    let Some(sector) = ends.at(0, 512) else { return };
    for signature in found.iter_mut() {
        match signature.kind {
            Kind::Exfat => signature.uuid = Some(serial_text(u32_le(sector, 100))),
            Kind::Ntfs => signature.uuid = Some(format!("{:016X}", u64_le(sector, 72))),
            _ => {}
        }
    }
    if let Some(fat) = fat(sector) {
        found.push(fat);
        return;
    }
    if field::<2>(sector, 510) != [0x55, 0xaa] {
        return;
    }
    let entries: Vec<[u8; 16]> =
        (0..4).map(|index| field::<16>(sector, 446 + index * 16)).collect();
    // Boot code where entries would be rarely has four such first bytes.
    let is_sane = entries.iter().all(|entry| matches!(entry[0], 0 | 0x80));
    let is_used = entries.iter().any(|entry| entry[4] != 0 && u32_le(entry, 12) != 0);
    if is_sane && is_used {
        let disk = u32_le(sector, 440);
        let uuid = if disk == 0 { None } else { Some(format!("{disk:08x}")) };
        found.push(Signature { kind: Kind::Mbr, label: None, uuid, offset: 510 });
    }
}

fn fat(sector: &[u8]) -> Option<Signature> {
    let is_jump = matches!(sector.first()?, 0xeb | 0xe9);
    let sector_bytes = u16_le(sector, 11);
    let cluster_sectors = *sector.get(13)?;
    let table_count = *sector.get(16)?;
    let media = *sector.get(21)?;
    let is_shape = is_jump
        && matches!(sector_bytes, 512 | 1024 | 2048 | 4096)
        && cluster_sectors.is_power_of_two()
        && u16_le(sector, 14) != 0
        && matches!(table_count, 1 | 2)
        && (media == 0xf0 || media >= 0xf8);
    let is_named_16 = matches!(&field::<5>(sector, 54), b"FAT12" | b"FAT16");
    let is_named_32 = &field::<5>(sector, 82) == b"FAT32";
    if !(is_shape && (is_named_16 || is_named_32 || field::<2>(sector, 510) == [0x55, 0xaa])) {
        return None;
    }
    let is_32 = u16_le(sector, 22) == 0 && !is_named_16;
    let (serial, label) = if is_32 { (67, 71) } else { (39, 43) };
    let label = text(&field::<11>(sector, label)).filter(|label| label != "NO NAME");
    let uuid = Some(serial_text(u32_le(sector, serial)));
    Some(Signature { kind: Kind::Fat, label, uuid, offset: if is_32 { 82 } else { 54 } })
}

fn serial_text(serial: u32) -> String {
    format!("{:04X}-{:04X}", serial >> 16, serial & 0xffff)
}

fn zfs(ends: &Ends, found: &mut Vec<Signature>) {
    const LABEL: u64 = 256 << 10;
    let size = ends.size_bytes / LABEL * LABEL;
    if size < 4 * LABEL {
        return;
    }
    for start in [0, LABEL, size - 2 * LABEL, size - LABEL] {
        let Some(ring) = ends.at(start + (128 << 10), 128 << 10) else { continue };
        let is_uberblock =
            |block: &[u8]| u64_le(block, 0) == 0x00ba_b10c || u64_be(block, 0) == 0x00ba_b10c;
        let Some(index) = ring.chunks_exact(1024).position(is_uberblock) else { continue };
        let list = ends.at(start + (16 << 10), 112 << 10).unwrap_or_default();
        let label = nvlist_value(list, b"name", 9).and_then(|value| {
            let length = u32_be(value, 0).min(256) as usize;
            text(value.get(4..4 + length)?)
        });
        let uuid = nvlist_value(list, b"pool_guid", 8).map(|value| u64_be(value, 0).to_string());
        let offset = start + (128 << 10) + index as u64 * 1024;
        found.push(Signature { kind: Kind::Zfs, label, uuid, offset });
    }
}

/// The value of a pair in an XDR name-value list, found by its name and type; good enough for the
/// two we show.
fn nvlist_value<'a>(list: &'a [u8], name: &[u8], kind: u32) -> Option<&'a [u8]> {
    let mut pattern = (name.len() as u32).to_be_bytes().to_vec();
    pattern.extend_from_slice(name);
    pattern.resize(pattern.len().next_multiple_of(4), 0);
    pattern.extend_from_slice(&kind.to_be_bytes());
    pattern.extend_from_slice(&1u32.to_be_bytes());
    let at = list.windows(pattern.len()).position(|window| window == pattern.as_slice())?;
    list.get(at + pattern.len()..)
}

fn lvm(ends: &Ends, found: &mut Vec<Signature>) {
    for offset in (0..4).map(|sector| sector * 512) {
        let Some(sector) = ends.at(offset, 512) else { return };
        if sector.starts_with(b"LABELONE") && &field::<8>(sector, 24) == b"LVM2 001" {
            let uuid = text(&field::<32>(sector, u32_le(sector, 20) as usize));
            found.push(Signature {
                kind: Kind::LvmPhysicalVolume,
                label: None,
                uuid: uuid.filter(|text| text.is_ascii()).map(|text| lvm_uuid(&text)),
                offset,
            });
        }
    }
}

/// `6-4-4-4-4-4-6`, as LVM prints its identities.
fn lvm_uuid(plain: &str) -> String {
    let mut found = String::with_capacity(38);
    for (index, c) in plain.chars().enumerate() {
        if matches!(index, 6 | 10 | 14 | 18 | 22 | 26) {
            found.push('-');
        }
        found.push(c);
    }
    found
}

const MD_MAGIC: u32 = 0xa92b_4efc;

/// Where md may keep its superblock on a device of this size: 0.90, 1.0, 1.1, 1.2.
pub(super) fn md_offsets(size_bytes: u64) -> [Option<u64>; 4] {
    let old = (size_bytes / 65536 * 65536).checked_sub(65536);
    let at_end = (size_bytes / 512).checked_sub(16).map(|sector| sector / 8 * 8 * 512);
    [old, at_end, Some(0), Some(4096)]
}

/// True when these 256 bytes are an md superblock found at place `index` of [`md_offsets`].
pub(super) fn is_md(superblock: &[u8], index: usize) -> bool {
    if index == 0 {
        // Version 0.90 is in the byte order of the machine that made it.
        return (u32_le(superblock, 0) == MD_MAGIC && u32_le(superblock, 4) == 0)
            || (u32_be(superblock, 0) == MD_MAGIC && u32_be(superblock, 4) == 0);
    }
    u32_le(superblock, 0) == MD_MAGIC && u32_le(superblock, 4) == 1
}

fn md(ends: &Ends, found: &mut Vec<Signature>) {
    for (index, offset) in md_offsets(ends.size_bytes).into_iter().enumerate() {
        let Some(offset) = offset else { continue };
        let Some(superblock) = ends.at(offset, 256).filter(|block| is_md(block, index)) else {
            continue;
        };
        let (uuid, label) = if index == 0 {
            let mut id = [0; 16];
            id[..4].copy_from_slice(&field::<4>(superblock, 20));
            id[4..].copy_from_slice(&field::<12>(superblock, 52));
            (uuid(id), None)
        } else {
            (uuid_at(superblock, 16), text(&field::<32>(superblock, 32)))
        };
        found.push(Signature { kind: Kind::MdRaid, label, uuid, offset });
    }
}

fn swap(ends: &Ends, found: &mut Vec<Signature>) {
    for page in [4096, 8192, 16384, 32768, 65536] {
        let offset = page - 10;
        let Some(magic) = ends.at(offset, 10) else { return };
        let kind = match magic {
            b"SWAPSPACE2" | b"SWAP-SPACE" => Kind::Swap,
            b"LINHIB0001" => Kind::SwapSuspend,
            _ if [&b"S1SUSPEND"[..], b"S2SUSPEND", b"ULSUSPEND"]
                .iter()
                .any(|mark| magic.starts_with(mark)) =>
            {
                Kind::SwapSuspend
            }
            _ => continue,
        };
        let header = ends.at(1024, 64).unwrap_or_default();
        let label = text(&field::<16>(header, 28));
        found.push(Signature { kind, label, uuid: uuid_at(header, 12), offset });
    }
}

fn gpt(ends: &Ends, found: &mut Vec<Signature>) {
    for block_bytes in [512, 4096] {
        let last = (ends.size_bytes / block_bytes).checked_sub(1).map(|lba| lba * block_bytes);
        for offset in [Some(block_bytes), last].into_iter().flatten() {
            let Some(header) = ends.at(offset, 92).filter(|block| block.starts_with(b"EFI PART"))
            else {
                continue;
            };
            if found.iter().any(|known| known.kind == Kind::Gpt && known.offset == offset) {
                continue;
            }
            found.push(Signature {
                kind: Kind::Gpt,
                label: None,
                uuid: uuid(guid(field(header, 56))),
                offset,
            });
        }
    }
}

/// The first three groups of a GUID are little-endian on disk.
fn guid(mut bytes: [u8; 16]) -> [u8; 16] {
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}

fn f2fs(ends: &Ends, found: &mut Vec<Signature>) {
    for offset in [1024, 4096 + 1024] {
        let Some(superblock) = ends.at(offset, 124 + 128) else { return };
        if u32_le(superblock, 0) == 0xf2f5_2010 {
            let label = text_utf16(superblock.get(124..).unwrap_or_default());
            let uuid = uuid_at(superblock, 108);
            found.push(Signature { kind: Kind::F2fs, label, uuid, offset });
        }
    }
}

fn optical(ends: &Ends, found: &mut Vec<Signature>) {
    for offset in (0..16).map(|sector| 32768 + sector * 2048) {
        let Some(sector) = ends.at(offset, 128) else { return };
        match &field::<5>(sector, 1) {
            b"CD001" if offset == 32768 => {
                let label = text(&field::<32>(sector, 40));
                found.push(Signature {
                    kind: Kind::Iso9660,
                    label,
                    uuid: None,
                    offset: offset + 1,
                });
            }
            b"NSR02" | b"NSR03" => {
                found.push(Signature {
                    kind: Kind::Udf,
                    label: None,
                    uuid: None,
                    offset: offset + 1,
                });
            }
            _ => {}
        }
    }
}

fn luks(ends: &Ends, read: &mut ReadAt<'_>, found: &mut Vec<Signature>) -> Result<(), ProbeError> {
    let mut first = false;
    if let Some(header) = ends.at(0, 512).filter(|block| block.starts_with(b"LUKS\xba\xbe")) {
        first = true;
        let kind = if field::<2>(header, 6) == [0, 1] { Kind::Luks1 } else { Kind::Luks2 };
        let label = if kind == Kind::Luks2 { text(&field::<48>(header, 24)) } else { None };
        found.push(Signature { kind, label, uuid: text(&field::<40>(header, 168)), offset: 0 });
    }
    // Only the second header is left when something small was written over the first.
    for offset in LUKS2_SECOND_HEADER_OFFSETS.into_iter().filter(|_| !first) {
        let header = match ends.at(offset, 512) {
            Some(header) => header.to_vec(),
            None => read_aligned(read, ends.size_bytes, offset, 512)?.unwrap_or_default(),
        };
        if header.starts_with(b"SKUL\xba\xbe") {
            let label = text(&field::<48>(&header, 24));
            let uuid = text(&field::<40>(&header, 168));
            found.push(Signature { kind: Kind::Luks2, label, uuid, offset });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
