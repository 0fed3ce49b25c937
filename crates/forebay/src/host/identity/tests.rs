// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fingerprints of images made by hand, and of real file systems mounted on real loop devices.

use super::*;
use crate::host::loop_device::{LoopDevice, LoopOptions};
use forebay_testing::run;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

fn take(bytes: &[u8]) -> Fingerprint {
    let mut read = |offset: u64, buffer: &mut [u8]| {
        let end = offset as usize + buffer.len();
        buffer.copy_from_slice(&bytes[offset as usize..end]);
        Ok(())
    };
    let geometry = Geometry { size_bytes: bytes.len() as u64, logical_block: 512 };
    Fingerprint::take(&mut read, geometry, Serial::new("disk 1")).unwrap()
}

fn take_file(path: &Path) -> Fingerprint {
    let file = File::open(path).unwrap();
    let geometry = Geometry { size_bytes: file.metadata().unwrap().len(), logical_block: 512 };
    Fingerprint::take(&mut |at, bytes| file.read_exact_at(bytes, at), geometry, Serial::UNKNOWN)
        .unwrap()
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    bytes[offset..offset + value.len()].copy_from_slice(value);
}

#[test]
fn fingerprint_survives_its_encoding_byte_for_byte() {
    let mut image = vec![7; 4 << 20];
    put(&mut image, 1024 + 0x38, &[0x53, 0xef]);
    let fingerprint = take(&image);
    let bytes = fingerprint.encode();
    assert_eq!(Fingerprint::decode(&bytes).unwrap(), fingerprint);
    for offset in 0..FINGERPRINT_BYTES {
        let mut other = bytes;
        other[offset] ^= 1;
        match Fingerprint::decode(&other) {
            Ok(found) => assert_ne!(found, fingerprint),
            Err(error) => assert_eq!(error.offset, offset),
        }
    }
}

#[test]
fn each_difference_is_named_and_a_crash_excuses_content() {
    let image = vec![0; 4 << 20];
    let recorded = take(&image);
    assert_eq!(compare(&recorded, &recorded), Match::Same);

    let mut written = image.clone();
    written[5] = 1;
    let found = take(&written);
    assert_eq!(compare(&recorded, &found), Match::Changed { what: vec![Difference::Ends] });
    let recorded = recorded.without_content();
    assert_eq!(compare(&recorded, &found), Match::Same); // I2

    let shorter = take(&image[..3 << 20]);
    let size = Difference::Size { recorded: 4 << 20, found: 3 << 20 };
    assert_eq!(compare(&recorded, &shorter), Match::Changed { what: vec![size] });

    let other = Fingerprint { serial: Serial::new("disk 2"), ..recorded };
    let serial = Difference::Serial { recorded: recorded.serial, found: other.serial };
    assert_eq!(compare(&recorded, &other), Match::Changed { what: vec![serial] });
    let unknown = Fingerprint { serial: Serial::UNKNOWN, ..recorded };
    assert_eq!(compare(&unknown, &recorded), Match::Same);
    assert_ne!(compare(&recorded, &unknown), Match::Same);
}

/// I3: the first version summed with CRC32C and did not see an ext4 being mounted, since each
/// version of its superblock ends in its own CRC32C.
#[test]
fn block_sealed_with_its_own_crc32c_does_not_hide_a_change() {
    let sealed = |value: u8| {
        let mut image = vec![0; 4 << 20];
        image[1024] = value;
        // As ext4 does: from all ones, and not inverted at the end.
        let sum = !(checksum(CrcAlgorithm::Crc32Iscsi, &image[1024..2044]) as u32);
        put(&mut image, 2044, &sum.to_le_bytes());
        image
    };
    let (first, second) = (sealed(1), sealed(2));
    let blind = |image: &[u8]| checksum(CrcAlgorithm::Crc32Iscsi, image);
    assert_eq!(blind(&first), blind(&second), "the trap this test is about");
    assert_ne!(take(&first).ends_crc, take(&second).ends_crc);
}

#[test]
fn superblock_inside_a_partition_is_seen() {
    let mut image = vec![0; 16 << 20];
    // Partition 1 of an MBR, from sector 8192 (4 MiB), away from both ends.
    put(&mut image, 446, &[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 32, 0, 0, 0, 32, 0, 0]);
    put(&mut image, 510, &[0x55, 0xaa]);
    put(&mut image, (4 << 20) + 1024 + 0x38, &[0x53, 0xef]);
    let recorded = take(&image);
    assert_eq!(recorded.superblock_kinds, SuperblockKinds::EXT);
    image[(4 << 20) + 1024 + 0x34] = 1; // s_mnt_count
    let Match::Changed { what } = compare(&recorded, &take(&image)) else { panic!() };
    let kinds = SuperblockKinds::EXT;
    assert_eq!(what, [Difference::Superblock { recorded: kinds, found: kinds }]);
}

#[test]
fn lvm_and_md_changes_are_seen() {
    let mut image = vec![0; 8 << 20];
    put(&mut image, 512, b"LABELONE");
    image[512 + 20] = 32;
    put(&mut image, 512 + 24, b"LVM2 001");
    // One data area, a zero, one metadata area at 3 MiB, a zero.
    put(&mut image, 512 + 72, &(4u64 << 20).to_le_bytes());
    put(&mut image, 512 + 104, &(3u64 << 20).to_le_bytes());
    put(&mut image, 4096, &0xa92b_4efc_u32.to_le_bytes());
    image[4100] = 1;
    let recorded = take(&image);
    assert!(recorded.superblock_kinds.contains(SuperblockKinds::LVM));
    assert!(recorded.superblock_kinds.contains(SuperblockKinds::MD));
    assert_eq!(recorded.superblock_kinds.to_string(), "LVM+md");
    image[(3 << 20) + 40] = 1;
    let found = take(&image);
    assert_eq!(found.ends_crc, recorded.ends_crc);
    assert_ne!(found.superblock_crc, recorded.superblock_crc);
    image[4096 + 200] = 1; // events
    assert_ne!(take(&image).superblock_crc, found.superblock_crc);
}

#[test]
fn nonsense_superblocks_never_panic() {
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut image = vec![0; 3 << 20];
    for round in 0..300 {
        let head = &mut image[..8192];
        head.iter_mut().for_each(|byte| *byte = if round % 3 == 0 { 0xff } else { random() as u8 });
        put(&mut image, 512, if round % 2 == 0 { b"EFI PART" } else { b"LABELONE" });
        put(&mut image, 536, b"LVM2 001");
        put(&mut image, 510, &[0x55, 0xaa]);
        put(&mut image, 0, b"XFSB\0\0\x10\0");
        image[124] = (round % 40) as u8;
        take(&image);
    }
}

#[test]
fn long_serials_stay_apart() {
    let long = "t10.ATA     Samsung SSD 870 EVO 1TB                 S5Y1NG0N";
    let (a, b) = (Serial::new(&format!("{long}1")), Serial::new(&format!("{long}2")));
    assert_ne!(a, b);
    assert_eq!(a.to_string().len(), 32);
    assert!(a.to_string().starts_with("t10.ATA Samsung~"), "{a}");
    assert_eq!(Serial::new("  a \n b ").to_string(), "a b");
    assert!(Serial::new(" ").is_unknown());
}

#[test]
fn copied_file_is_another_file() {
    let root = std::env::temp_dir().join(format!("forebay-serial-{}", std::process::id()));
    fs::create_dir_all(&root).unwrap();
    let (first, second, third) = (root.join("a"), root.join("b"), root.join("c"));
    fs::write(&first, "x").unwrap();
    fs::copy(&first, &second).unwrap();
    let of = |path: &Path| Serial::of(&Host::default(), &Target::of(path).unwrap());
    assert_ne!(of(&first), of(&second));
    let before = of(&first);
    fs::rename(&first, &third).unwrap();
    assert_eq!(of(&third), before);
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn serial_is_read_where_each_driver_puts_it() {
    let root = std::env::temp_dir().join(format!("forebay-sysfs-{}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    let host = Host { proc: root.clone(), sys: root.clone() };
    for (number, name, attribute, value, expected) in [
        ("8:0", "sda", "device/wwid", "naa.5002538e40b1\n", "naa.5002538e40b1"),
        ("8:1", "sda/sda1", "partition", "1\n", "naa.5002538e40b1#1"),
        ("254:0", "vda", "serial", "disk-7\n", "disk-7"),
        ("259:0", "nvme0n1", "wwid", "eui.0025385b01\n", "eui.0025385b01"),
        ("253:0", "dm-0", "dm/uuid", "CRYPT-LUKS2-1\n", "CRYPT-LUKS2-1"),
        ("8:16", "sdb", "device/vpd_pg83", "\0\x03\0\x04abcd", "vpd:"),
        ("8:32", "sdc", "size", "1", "(none)"),
    ] {
        let directory = root.join("devices").join(name);
        fs::create_dir_all(directory.join(attribute).parent().unwrap()).unwrap();
        fs::write(directory.join("dev"), number).unwrap();
        fs::write(directory.join(attribute), value).unwrap();
        fs::create_dir_all(root.join("dev/block")).unwrap();
        std::os::unix::fs::symlink(&directory, root.join("dev/block").join(number)).unwrap();
        let target = Target::Block {
            path: "/x".into(),
            number: crate::host::machine::DeviceNumber::parse(number).unwrap(),
        };
        let found = Serial::of(&host, &target).to_string();
        assert!(found.starts_with(expected), "{name}: {found}");
    }
    fs::remove_dir_all(root).unwrap();
}

/// A real physical volume, then a volume group on it.
#[test]
fn real_lvm_metadata_change_is_seen() {
    let root = std::env::temp_dir().join(format!("forebay-lvm-{}", std::process::id()));
    fs::create_dir_all(&root).unwrap();
    let image = root.join("image");
    File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let options = LoopOptions { block_size: 512, autoclear: true, ..LoopOptions::default() };
    match LoopDevice::attach(&image, options) {
        Ok(device) => {
            let path = device.path().display().to_string();
            // Nothing of the machine's own LVM is read or written.
            let config = format!(
                "devices {{ dir=\"/dev\" scan=\"/dev\" filter=[\"a|^{path}$|\",\"r|.*|\"] \
                 use_devicesfile=0 }} backup {{ backup=0 archive=0 }} \
                 global {{ locking_dir=\"{}\" }} activation {{ udev_sync=0 }}",
                root.display()
            );
            if run("pvcreate", &["--config", &config, "-qq", &path]) {
                let created = take_file(&image);
                assert_eq!(created.superblock_kinds, SuperblockKinds::LVM);
                let name = format!("forebay_test_{}", std::process::id());
                if run("vgcreate", &["--config", &config, "-qq", &name, &path]) {
                    let kinds = SuperblockKinds::LVM;
                    let what = vec![
                        Difference::Ends,
                        Difference::Superblock { recorded: kinds, found: kinds },
                    ];
                    let found = compare(&created, &take_file(&image));
                    assert_eq!(found, Match::Changed { what });
                }
            }
            device.detach().unwrap();
        }
        Err(error) => forebay_testing::skip(&format!("identity: no loop device: {error}")),
    }
    fs::remove_dir_all(root).unwrap();
}

/// I1 with real file systems; ext4 and XFS even when no file is written.
#[test]
fn mount_that_writes_to_a_real_file_system_is_seen() {
    for (program, size, kind) in [
        ("mkfs.ext4", 64 << 20, SuperblockKinds::EXT),
        ("mkfs.xfs", 320 << 20, SuperblockKinds::XFS),
        ("mkfs.btrfs", 256 << 20, SuperblockKinds::BTRFS),
    ] {
        let root = std::env::temp_dir().join(format!("forebay-{program}-m-{}", std::process::id()));
        fs::create_dir_all(root.join("mnt")).unwrap();
        let image = root.join("image");
        File::create(&image).unwrap().set_len(size).unwrap();
        mounted_and_unmounted(program, &root, &image, kind);
        fs::remove_dir_all(root).unwrap();
    }
}

fn mounted_and_unmounted(program: &str, root: &Path, image: &Path, kind: SuperblockKinds) {
    if !run(program, &["-q", &image.display().to_string()]) {
        return;
    }
    let mut recorded = take_file(image);
    assert_eq!(recorded.superblock_kinds, kind);
    let options = LoopOptions { block_size: 512, autoclear: true, ..LoopOptions::default() };
    let device = match LoopDevice::attach(image, options) {
        Ok(device) => device,
        Err(error) => return forebay_testing::skip(&format!("identity: no loop device: {error}")),
    };
    let text = device.path().display().to_string();
    let mount_point = root.join("mnt").display().to_string();
    assert_eq!(compare(&recorded, &take_file(image)), Match::Same);
    if run("mount", &["-o", "ro", &text, &mount_point]) {
        assert!(run("umount", &[&mount_point]));
        let found = compare(&recorded, &take_file(image));
        println!("{program}: mounted read-only: {found:?}");
    }
    for round in 0..3 {
        if !run("mount", &[&text, &mount_point]) {
            break;
        }
        // btrfs writes nothing unless something is written, and then there is nothing to see.
        if kind == SuperblockKinds::BTRFS || round == 2 {
            fs::write(root.join("mnt/file"), format!("{round}")).unwrap();
        }
        assert!(run("umount", &[&mount_point]));
        let found = take_file(image);
        let Match::Changed { what } = compare(&recorded, &found) else {
            panic!("{program}: mount {round} was not seen")
        };
        println!("{program}: mount {round}: {what:?}");
        assert!(what.contains(&Difference::Superblock { recorded: kind, found: kind }), "{what:?}");
        assert!(what.contains(&Difference::Ends), "the superblock is in the first MiB: {what:?}");
        recorded = found;
    }
    device.detach().unwrap();
}

#[test]
fn ext_says_when_it_was_written_last() {
    let written = |bytes: &[u8]| {
        written_at(&mut |offset, buffer| {
            buffer.copy_from_slice(&bytes[offset as usize..][..buffer.len()]);
            Ok(())
        })
    };
    let mut bytes = vec![0; 4096];
    put(&mut bytes, 1024 + 0x30, &0x6543_2100_u32.to_le_bytes());
    assert_eq!(written(&bytes), None, "no file system");
    put(&mut bytes, 1024 + 0x38, &[0x53, 0xef]);
    assert_eq!(written(&bytes), Some(0x6543_2100));
    put(&mut bytes, 1024 + 0x274, &[1]);
    assert_eq!(written(&bytes), Some(0x1_6543_2100), "after 2106, too");
}
