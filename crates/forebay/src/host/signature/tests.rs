// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images made by hand, images made by the real tools, and nonsense.

use super::*;
use forebay_testing::Random;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const SIZE: u64 = 16 << 20;

struct Image(Vec<u8>);

impl Image {
    fn new() -> Self {
        Self(vec![0; SIZE as usize])
    }

    fn put(mut self, offset: u64, bytes: &[u8]) -> Self {
        let offset = offset as usize;
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }

    fn probe(&self) -> Vec<Signature> {
        probe_bytes(&self.0).unwrap()
    }

    fn only(&self) -> Signature {
        let found = self.probe();
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap()
    }

    fn only_kind(&self) -> Kind {
        self.only().kind
    }
}

fn probe_bytes(bytes: &[u8]) -> Result<Vec<Signature>, ProbeError> {
    let mut read = |offset: u64, buffer: &mut [u8]| {
        let size = bytes.len() as u64;
        let length = buffer.len() as u64;
        assert!(offset.is_multiple_of(4096), "N3");
        assert!(length.is_multiple_of(4096) || offset + length == size, "N3");
        buffer.copy_from_slice(&bytes[offset as usize..(offset + length) as usize]);
        Ok(())
    };
    probe(&mut read, bytes.len() as u64)
}

const ID: [u8; 16] = [
    0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88,
];
const ID_TEXT: &str = "12345678-9abc-def0-1122-334455667788";

#[test]
fn blank_device_has_none_whatever_its_size() {
    for size in [0, 1, 511, 512, 4095, 4096, 5000, 65536, 70_000, (1 << 20) + 512, SIZE as usize] {
        assert_eq!(probe_bytes(&vec![0; size]).unwrap(), []);
        // N1
        probe_bytes(&vec![0xff; size]).unwrap();
    }
}

#[test]
fn unreadable_device_is_an_error_and_not_blank() {
    let mut read = |offset: u64, _: &mut [u8]| {
        if offset == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
    };
    let error = probe(&mut read, SIZE).unwrap_err();
    assert_eq!(error.offset, SIZE - (1 << 20));
}

#[test]
fn forebay_is_known_by_its_first_bytes() {
    let found = Image::new().put(0, b"FOREBAYS").put(32, &ID).only();
    assert_eq!((found.kind, found.offset), (Kind::Forebay, 0));
    assert_eq!(found.uuid.as_deref(), Some(ID_TEXT));
}

#[test]
fn ext_generations_are_told_apart_by_features() {
    let base = || {
        Image::new().put(1024 + 0x38, &[0x53, 0xef]).put(1024 + 0x68, &ID).put(1024 + 0x78, b"root")
    };
    let found = base().only();
    assert_eq!(found.kind, Kind::Ext2);
    assert_eq!(found.label.as_deref(), Some("root"));
    assert_eq!(found.uuid.as_deref(), Some(ID_TEXT));
    assert_eq!(base().put(1024 + 0x5c, &[4]).only_kind(), Kind::Ext3);
    assert_eq!(base().put(1024 + 0x60, &[0x42]).only_kind(), Kind::Ext4);
    assert_eq!(base().put(1024 + 0x60, &[0x8]).only_kind(), Kind::ExtJournal);
}

#[test]
fn plain_marks_are_found_with_label_and_uuid() {
    let found = Image::new().put(0, b"XFSB").put(32, &ID).put(108, b"fast").only();
    assert_eq!((found.kind, found.label.as_deref()), (Kind::Xfs, Some("fast")));
    assert_eq!(found.uuid.as_deref(), Some(ID_TEXT));
    let image = Image::new().put(0x1_0040, b"_BHRfS_M").put(0x1_0020, &ID).put(0x1_012b, b"pool");
    let found = image.only();
    assert_eq!((found.kind, found.label.as_deref()), (Kind::Btrfs, Some("pool")));
    for mark in MARKS.iter().filter(|mark| mark.kind != Kind::Nilfs2) {
        assert_eq!(Image::new().put(mark.offset, mark.magic).only_kind(), mark.kind);
    }
    let nilfs = Image::new().put(1024, &[2, 0, 0, 0]).put(1030, &[0x34, 0x34]);
    assert_eq!(nilfs.only_kind(), Kind::Nilfs2);
    assert_eq!(Image::new().put(1030, &[0x34, 0x34]).probe(), []);
}

#[test]
fn fat_is_not_taken_for_a_partition_table() {
    let boot = || {
        Image::new()
            .put(0, &[0xeb, 0x3c, 0x90])
            .put(11, &[0, 2, 4, 1, 0, 2])
            .put(21, &[0xf8, 16])
            .put(510, &[0x55, 0xaa])
    };
    let fat_16 = boot().put(54, b"FAT16   ").put(39, &[0x78, 0x56, 0x34, 0x12]).put(43, b"STICK");
    let found = fat_16.only();
    assert_eq!((found.kind, found.label.as_deref()), (Kind::Fat, Some("STICK")));
    assert_eq!(found.uuid.as_deref(), Some("1234-5678"));
    let fat_32 = boot().put(22, &[0, 0]).put(82, b"FAT32   ").put(71, b"NO NAME    ");
    assert_eq!((fat_32.only().kind, fat_32.only().label), (Kind::Fat, None));
}

#[test]
fn partition_tables_need_something_in_them() {
    assert_eq!(Image::new().put(510, &[0x55, 0xaa]).probe(), []);
    let entry = [0x80, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0];
    let found = Image::new().put(510, &[0x55, 0xaa]).put(462, &entry).only();
    assert_eq!((found.kind, found.uuid), (Kind::Mbr, None));
    for offset in [512, 4096, SIZE - 512, SIZE - 4096] {
        let found = Image::new().put(offset, b"EFI PART").only();
        assert_eq!((found.kind, found.offset), (Kind::Gpt, offset));
    }
}

#[test]
fn zfs_is_found_by_any_of_its_four_labels_in_both_byte_orders() {
    let label = 256 << 10;
    for (index, start) in [0, label, SIZE - 2 * label, SIZE - label].into_iter().enumerate() {
        let magic = 0x00ba_b10c_u64;
        let bytes = if index % 2 == 0 { magic.to_le_bytes() } else { magic.to_be_bytes() };
        let list = b"\0\0\0\x04name\0\0\0\x09\0\0\0\x01\0\0\0\x04tank\0\0\0\x28\0\0\0\x28\
            \0\0\0\x09pool_guid\0\0\0\0\0\0\x08\0\0\0\x01\0\0\0\0\0\0\0\x2a";
        let image = Image::new().put(start + (128 << 10) + 7 * 1024, &bytes);
        let found = image.put(start + (16 << 10), list).only();
        assert_eq!((found.kind, found.label.as_deref()), (Kind::Zfs, Some("tank")));
        assert_eq!(found.uuid.as_deref(), Some("42"));
    }
}

#[test]
fn lvm_label_is_found_in_each_of_four_sectors() {
    for offset in [0, 512, 1024, 1536] {
        let found = Image::new()
            .put(offset, b"LABELONE")
            .put(offset + 20, &[32])
            .put(offset + 24, b"LVM2 001")
            .put(offset + 32, b"abcdefghijklmnopqrstuvwxyz012345")
            .only();
        assert_eq!((found.kind, found.offset), (Kind::LvmPhysicalVolume, offset));
        assert_eq!(found.uuid.as_deref(), Some("abcdef-ghij-klmn-opqr-stuv-wxyz-012345"));
    }
}

#[test]
fn luks_is_found_by_either_header() {
    let uuid = ID_TEXT.as_bytes();
    let first = Image::new().put(0, b"LUKS\xba\xbe\0\x01").put(168, uuid).only();
    assert_eq!((first.kind, first.uuid.as_deref()), (Kind::Luks1, Some(ID_TEXT)));
    let second = Image::new().put(0, b"LUKS\xba\xbe\0\x02").put(24, b"safe").only();
    assert_eq!((second.kind, second.label.as_deref()), (Kind::Luks2, Some("safe")));
    for offset in LUKS2_SECOND_HEADER_OFFSETS {
        let found = Image::new().put(offset, b"SKUL\xba\xbe\0\x02").only();
        assert_eq!((found.kind, found.offset), (Kind::Luks2, offset));
    }
}

#[test]
fn md_superblocks_of_all_versions_are_found() {
    let magic = MD_MAGIC.to_le_bytes();
    let modern = [magic, [1, 0, 0, 0]].concat();
    for offset in [SIZE - 8192, 0, 4096] {
        let image =
            Image::new().put(offset, &modern).put(offset + 16, &ID).put(offset + 32, b"h:0");
        let found = image.only();
        assert_eq!((found.kind, found.offset), (Kind::MdRaid, offset));
        assert_eq!(found.label.as_deref(), Some("h:0"));
    }
    assert_eq!(Image::new().put(SIZE - 65536, &magic).only_kind(), Kind::MdRaid);
    let swapped = MD_MAGIC.to_be_bytes();
    assert_eq!(Image::new().put(SIZE - 65536, &swapped).only_kind(), Kind::MdRaid);
    // Version 0.90 rounds the size down to 64 KiB first.
    let mut odd = Image::new().put(SIZE - 131072, &magic);
    odd.0.truncate(SIZE as usize - 4096);
    assert_eq!(odd.only().offset, SIZE - 131072);
}

#[test]
fn swap_is_found_for_every_page_size() {
    for page in [4096, 8192, 16384, 32768, 65536] {
        assert_eq!(Image::new().put(page - 10, b"SWAPSPACE2").only_kind(), Kind::Swap);
        assert_eq!(Image::new().put(page - 10, b"S1SUSPEND\0").only_kind(), Kind::SwapSuspend);
    }
}

#[test]
fn other_marks_at_their_places() {
    let f2fs = Image::new().put(1024, &0xf2f5_2010_u32.to_le_bytes()).put(1024 + 124, b"d\0a\0");
    assert_eq!((f2fs.only().kind, f2fs.only().label.as_deref()), (Kind::F2fs, Some("da")));
    let disc = Image::new().put(32769, b"CD001").put(32768 + 40, b"LIVE  ");
    assert_eq!((disc.only().kind, disc.only().label.as_deref()), (Kind::Iso9660, Some("LIVE")));
    assert_eq!(Image::new().put(32768 + 4097, b"NSR03").only_kind(), Kind::Udf);
    let intel = Image::new().put(SIZE - 1024, b"Intel Raid ISM Cfg Sig. 1.0");
    assert_eq!(intel.only_kind(), Kind::IntelRaid);
}

#[test]
fn label_cannot_send_control_characters_to_a_terminal() {
    let found = Image::new().put(0, b"XFSB").put(108, b"a\x1b[2Jb\xff").only();
    assert_eq!(found.label.as_deref(), Some("a[2Jb\u{fffd}"));
}

/// Every mark at once, then random bytes over it: nothing may panic (N1).
#[test]
fn damaged_images_never_panic() {
    let mut random = Random(1);
    let mut image = vec![0; 2 << 20];
    for round in 0..200 {
        for mark in MARKS {
            let at = mark.offset as usize;
            image[at..at + mark.magic.len()].copy_from_slice(mark.magic);
        }
        for (offset, magic) in [
            (512, &b"LABELONE"[..]),
            (536, b"LVM2 001"),
            (0, b"LUKS\xba\xbe"),
            (4096, b"EFI PART"),
            (1080, b"\x53\xef"),
            (510, b"\x55\xaa"),
            (131072, b"\x0c\xb1\xba\0\0\0\0\0"),
            (0, if round % 2 == 0 { &b"XFSB"[..] } else { b"\xfc\x4e\x2b\xa9\x01\0\0\0" }),
        ] {
            image[offset..offset + magic.len()].copy_from_slice(magic);
        }
        for _ in 0..400 {
            let at = random.below(8192) as usize;
            image[at] = random.next() as u8;
        }
        let size = image.len() - random.below(9000) as usize;
        probe_bytes(&image[..size]).unwrap();
    }
}

/// Runs a real tool on a new file; `None`, with the reason printed, when it is not installed.
fn made_by(program: &str, size: u64, arguments: &[&str]) -> Option<(PathBuf, Vec<Signature>)> {
    let name = format!("forebay-{program}-{}-{}", arguments.concat().len(), std::process::id());
    let path = std::env::temp_dir().join(name);
    File::create(&path).unwrap().set_len(size).unwrap();
    let search = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let result = Command::new(program)
        .env("PATH", search)
        .args(arguments)
        .arg(&path)
        .stdin(Stdio::null())
        .output();
    let output = match result {
        Ok(output) => output,
        Err(error) => {
            forebay_testing::skip(&format!("signature: {program}: {error}"));
            std::fs::remove_file(path).unwrap();
            return None;
        }
    };
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    let file = File::open(&path).unwrap();
    let found = probe(&mut |offset, bytes| file.read_exact_at(bytes, offset), size).unwrap();
    std::fs::remove_file(&path).unwrap();
    Some((path, found))
}

/// Program, size, arguments; kind and label expected.
type Case = (&'static str, u64, &'static [&'static str], Kind, Option<&'static str>);

#[test]
fn images_of_the_real_tools_are_recognised() {
    let cases: [Case; 9] = [
        ("mkfs.ext4", 16 << 20, &["-q", "-L", "four", "-U", ID_TEXT], Kind::Ext4, Some("four")),
        ("mkfs.ext3", 16 << 20, &["-q", "-L", "three", "-U", ID_TEXT], Kind::Ext3, Some("three")),
        ("mkfs.ext2", 16 << 20, &["-q", "-U", ID_TEXT], Kind::Ext2, None),
        (
            "mkfs.xfs",
            320 << 20,
            &["-q", "-L", "ex", "-m", "uuid=12345678-9abc-def0-1122-334455667788"],
            Kind::Xfs,
            Some("ex"),
        ),
        ("mkfs.btrfs", 128 << 20, &["-q", "-L", "bee", "-U", ID_TEXT], Kind::Btrfs, Some("bee")),
        ("mkswap", 16 << 20, &["-L", "sw", "-U", ID_TEXT], Kind::Swap, Some("sw")),
        ("mkfs.vfat", 16 << 20, &["-n", "STICK"], Kind::Fat, Some("STICK")),
        ("mkfs.f2fs", 64 << 20, &["-q", "-l", "flash"], Kind::F2fs, Some("flash")),
        ("mkfs.exfat", 16 << 20, &[], Kind::Exfat, None),
    ];
    for (program, size, arguments, kind, label) in cases {
        let Some((_, found)) = made_by(program, size, arguments) else { continue };
        println!("{program}: {}", found[0]);
        assert!(found.iter().all(|signature| signature.kind == kind), "{found:?}");
        assert_eq!(found[0].label.as_deref(), label);
        if arguments.contains(&ID_TEXT) {
            assert_eq!(found[0].uuid.as_deref(), Some(ID_TEXT));
        }
    }
}

#[test]
fn partition_table_of_sgdisk_is_found_at_both_ends() {
    let arguments = ["-n", "1:2048:0", "-U", ID_TEXT];
    let Some((_, found)) = made_by("sgdisk", 16 << 20, &arguments) else { return };
    let gpt: Vec<_> = found.iter().filter(|signature| signature.kind == Kind::Gpt).collect();
    assert_eq!(gpt.iter().map(|found| found.offset).collect::<Vec<_>>(), [512, SIZE - 512]);
    assert!(gpt.iter().all(|found| found.uuid.as_deref() == Some(ID_TEXT)));
    assert!(found.iter().any(|found| found.kind == Kind::Mbr), "the protective one: {found:?}");
}
