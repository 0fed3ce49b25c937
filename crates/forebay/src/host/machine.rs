// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The machine as `/proc` and `/sys` tell it: block devices and how they are stacked, mounts, swap.
//!
//! Where the two trees are is a parameter, so that tests describe a machine by building them.
//! This module knows what there is; whether that forbids something is decided in `guard`.
//!
//! # Limits
//!
//! What other mount namespaces have mounted is not in `/proc/self/mountinfo`. The exclusive open
//! in `guard` is what finds those. A process that has left its namespace ([`super::namespace`]) asks process 1.

use crate::advice::of_path;
use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Devices followed in one walk up or down a stack; more is a loop or nonsense.
const WALK_COUNT_MAX: usize = 4096;
/// Devices over one another that are followed down to a disk.
const BENEATH_MAX: usize = 16;

/// Where the machine is described: `/proc` and `/sys`, or a test's imitation of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The root of procfs.
    pub proc: PathBuf,
    /// The root of sysfs.
    pub sys: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc"), sys: PathBuf::from("/sys") }
    }
}

/// The number of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The driver's number.
    pub major: u32,
    /// The device's number within the driver.
    pub minor: u32,
}

impl DeviceNumber {
    /// From a `dev_t` as `stat` returns it.
    pub fn from_raw(raw: u64) -> Self {
        Self { major: rustix::fs::major(raw), minor: rustix::fs::minor(raw) }
    }

    /// From `8:1`.
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.major, self.minor)
    }
}

/// What a path leads to, as far as storage goes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A block device.
    Block {
        /// As given.
        path: PathBuf,
        /// Its number.
        number: DeviceNumber,
    },
    /// A regular file.
    File {
        /// As given.
        path: PathBuf,
        /// The file system it is on.
        on: DeviceNumber,
        /// Its inode there.
        inode: u64,
    },
}

/// Why a path is not something to store blocks on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The path cannot be looked at.
    #[error("{path}: cannot be examined: {why}; {}", of_path(why))]
    Stat {
        /// As given.
        path: PathBuf,
        /// Why. It is said above, so it is no source, which would be told once more.
        why: io::Error,
    },
    /// A directory, socket, character device …
    #[error(
        "{path}: expected a block device or a regular file, found a {found}; `lsblk -p` lists the disks that are there"
    )]
    NotStorage {
        /// As given.
        path: PathBuf,
        /// What it is instead.
        found: &'static str,
    },
}

impl Target {
    /// Looks at `path`, following symbolic links.
    pub fn of(path: &Path) -> Result<Self, TargetError> {
        let found =
            fs::metadata(path).map_err(|why| TargetError::Stat { path: path.to_owned(), why })?;
        let kind = found.file_type();
        let path = path.to_owned();
        if kind.is_block_device() {
            Ok(Self::Block { path, number: DeviceNumber::from_raw(found.rdev()) })
        } else if kind.is_file() {
            let on = DeviceNumber::from_raw(found.dev());
            Ok(Self::File { path, on, inode: found.ino() })
        } else {
            let found = if kind.is_dir() {
                "directory"
            } else if kind.is_char_device() {
                "character device"
            } else if kind.is_socket() {
                "socket"
            } else {
                "pipe"
            };
            Err(TargetError::NotStorage { path, found })
        }
    }

    /// As given.
    pub fn path(&self) -> &Path {
        match self {
            Self::Block { path, .. } | Self::File { path, .. } => path,
        }
    }

    /// The same device or the same file, whatever the paths.
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Block { number: a, .. }, Self::Block { number: b, .. }) => a == b,
            (Self::File { on: a, inode: i, .. }, Self::File { on: b, inode: j, .. }) => {
                a == b && i == j
            }
            _ => false,
        }
    }
}

/// A block device as sysfs has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Node {
    /// The kernel's name, `sda1`.
    pub name: String,
    /// Its number.
    pub number: DeviceNumber,
    /// Its directory in sysfs, symbolic links resolved.
    pub directory: PathBuf,
}

impl Node {
    /// True when it is a partition of another device.
    pub fn is_partition(&self) -> bool {
        self.directory.join("partition").exists()
    }

    /// The whole disk this is a partition of.
    pub fn parent(&self) -> Option<Node> {
        if !self.is_partition() {
            return None;
        }
        Node::at(self.directory.parent()?)
    }

    /// Its partitions.
    pub fn partitions(&self) -> Vec<Node> {
        let mut found: Vec<Node> = entries(&self.directory)
            .into_iter()
            .filter(|path| path.join("partition").exists())
            .filter_map(|path| Node::at(&path))
            .collect();
        found.sort();
        found
    }

    /// Devices made of this one, directly (md, dm, bcache …).
    pub fn holders(&self) -> Vec<Node> {
        self.linked("holders")
    }

    /// Devices this one is made of, directly.
    pub fn slaves(&self) -> Vec<Node> {
        self.linked("slaves")
    }

    /// What it is made of, if that is one device and stays so: an array or a multipath device with one leg may get another.
    fn made_of_one(&self) -> Option<Node> {
        let is_multipath = self.attribute("dm/uuid").is_some_and(|it| it.starts_with("mpath-"));
        if is_multipath || self.directory.join("md").exists() {
            return None;
        }
        let mut slaves = self.slaves();
        if slaves.len() == 1 { slaves.pop() } else { None }
    }

    /// One attribute, trimmed; `None` when it is absent, unreadable or empty.
    pub fn attribute(&self, name: &str) -> Option<String> {
        read_trimmed(&self.directory.join(name))
    }

    /// Vendor, where the driver tells it, and model.
    fn model(&self) -> Option<String> {
        let model = self.attribute("device/model")?;
        // "ATA" is how it is connected.
        let vendor = self.attribute("device/vendor");
        let vendor =
            vendor.filter(|it| it != "ATA" && !it.starts_with("0x") && !model.starts_with(it));
        Some(vendor.map_or(model.clone(), |vendor| format!("{vendor} {model}")))
    }

    /// The path in `/dev` a person would use: `/dev/mapper/vg-home` rather than `/dev/dm-0`.
    pub fn path(&self) -> PathBuf {
        match self.attribute("dm/name") {
            Some(name) => Path::new("/dev/mapper").join(name),
            None => Path::new("/dev").join(self.name.replace('!', "/")),
        }
    }

    /// [`path`](Self::path), with what the device is made by.
    pub fn described(&self) -> String {
        let path = self.path();
        let path = path.display();
        if self.attribute("dm/name").is_some() {
            let maker = self.attribute("dm/uuid").unwrap_or_default();
            let maker = match maker.split('-').next() {
                Some("LVM") => "LVM volume",
                Some("CRYPT") => "crypt device",
                Some("mpath") => "multipath device",
                _ => "device-mapper device",
            };
            return format!("{maker} {path}");
        }
        if let Some(level) = self.attribute("md/level") {
            return format!("md array {path} ({level})");
        }
        path.to_string()
    }

    fn at(directory: &Path) -> Option<Node> {
        let directory = fs::canonicalize(directory).ok()?;
        let number = DeviceNumber::parse(&fs::read_to_string(directory.join("dev")).ok()?)?;
        let name = directory.file_name()?.to_string_lossy().into_owned();
        Some(Node { name, number, directory })
    }

    fn linked(&self, kind: &str) -> Vec<Node> {
        let mut found: Vec<Node> = entries(&self.directory.join(kind))
            .into_iter()
            .filter_map(|path| Node::at(&path))
            .collect();
        found.sort();
        found
    }
}

/// One line of `mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// What `stat` says of files there (btrfs subvolumes differ).
    pub number: DeviceNumber,
    /// Where.
    pub mount_point: PathBuf,
    /// `ext4`, `xfs` …
    pub kind: String,
    /// What was mounted, as the mounter named it.
    pub mount_source: String,
}

/// One line of `/proc/swaps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The device or file.
    pub path: PathBuf,
    /// True for a device, false for a file.
    pub is_partition: bool,
}

/// One active loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopBinding {
    /// The loop device.
    pub node: Node,
    /// The file behind it, as the kernel names it.
    pub backing_file: PathBuf,
    /// Where in the file the device begins.
    pub offset_bytes: u64,
}

impl Host {
    /// The device with this number; `None` when sysfs has none such.
    pub fn node(&self, number: DeviceNumber) -> Option<Node> {
        Node::at(&self.sys.join("dev/block").join(number.to_string()))
    }

    /// The device with this name in `/sys/class/block`.
    pub fn node_named(&self, name: &str) -> Option<Node> {
        if name.is_empty() || name.contains('/') {
            return None;
        }
        Node::at(&self.sys.join("class/block").join(name))
    }

    /// The device a path such as `/dev/sda1` or `/dev/mapper/x` names.
    pub fn node_at_path(&self, path: &Path) -> Option<Node> {
        if let Ok(rest) = path.strip_prefix("/dev") {
            let name = rest.to_string_lossy().replace('/', "!");
            if let Some(node) = self.node_named(&name) {
                return Some(node);
            }
        }
        match Target::of(path).ok()? {
            Target::Block { number, .. } => self.node(number),
            Target::File { .. } => None,
        }
    }

    /// What a person calls the disk that a block device is on, as its maker has it; `None` for files and what has no name.
    pub fn model_of(&self, path: &Path) -> Option<String> {
        let Target::Block { number, .. } = Target::of(path).ok()? else { return None };
        let node = self.node(number)?;
        node.parent().unwrap_or(node).model()
    }

    /// The whole disk that a path's bytes are on: of a partition the disk it is of, of a file where its file system is, of what is
    /// made of one device (a logical volume, dm-crypt) where that is. What is made of several (dm, md) is a disk by itself, and so is
    /// a file system without a device.
    pub fn disk_of(&self, path: &Path) -> Option<DeviceNumber> {
        let number = match Target::of(path).ok()? {
            Target::Block { number, .. } => number,
            Target::File { on, .. } => on,
        };
        let Some(mut node) = self.node(number) else { return Some(number) };
        for _ in 0..BENEATH_MAX {
            let Some(beneath) = node.parent().or_else(|| node.made_of_one()) else { break };
            node = beneath;
        }
        Some(node.number)
    }

    /// Everything mounted in our mount namespace, oldest first.
    pub fn mounts(&self) -> io::Result<Vec<Mount>> {
        let mut text = fs::read(self.proc.join("self/mountinfo"))?;
        if self.has_left_mounts()? {
            if !self.is_among_mounts_of_first()? {
                return Err(io::Error::other("process 1 does not have our mounts any more"));
            }
            text = fs::read(self.proc.join("1/mountinfo"))?;
        }
        Ok(text.split(|byte| *byte == b'\n').filter_map(mount_parse).collect())
    }

    /// Whether none of the mounts that paths go over is in this process's namespace: `/proc` is one of them, so there is no
    /// other way to see none.
    pub(super) fn has_left_mounts(&self) -> io::Result<bool> {
        let is_described = self.proc.join("1/mountinfo").exists();
        Ok(is_described && fs::read(self.proc.join("self/mountinfo"))?.is_empty())
    }

    /// Whether the mount that this process's root is on is one of process 1's.
    pub(super) fn is_among_mounts_of_first(&self) -> io::Result<bool> {
        use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
        let root = statx(CWD, "/", AtFlags::empty(), StatxFlags::MNT_ID)?;
        if root.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
            return Ok(false);
        }
        let text = fs::read(self.proc.join("1/mountinfo"))?;
        let wanted = root.stx_mnt_id.to_string();
        let is_it =
            |line: &[u8]| line.split(|byte| *byte == b' ').next() == Some(wanted.as_bytes());
        Ok(text.split(|byte| *byte == b'\n').any(is_it))
    }

    /// Every swap area in use.
    pub fn swaps(&self) -> io::Result<Vec<Swap>> {
        let text = match fs::read(self.proc.join("swaps")) {
            Ok(text) => text,
            // A kernel without swap has no such file, and so no swap.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        Ok(text.split(|byte| *byte == b'\n').skip(1).filter_map(swap_parse).collect())
    }

    /// Every block device, partitions too.
    pub fn nodes(&self) -> Vec<Node> {
        entries(&self.sys.join("class/block")).iter().filter_map(|path| Node::at(path)).collect()
    }

    /// Every loop device that has a file.
    pub fn loops(&self) -> Vec<LoopBinding> {
        let mut found = Vec::new();
        for path in entries(&self.sys.join("block")) {
            let Some(file) = read_trimmed(&path.join("loop/backing_file")) else { continue };
            let Some(node) = Node::at(&path) else { continue };
            let offset_bytes =
                node.attribute("loop/offset").and_then(|text| text.parse().ok()).unwrap_or(0);
            found.push(LoopBinding { node, backing_file: PathBuf::from(file), offset_bytes });
        }
        found.sort_by_key(|binding| binding.node.number);
        found
    }

    /// The mounted btrfs file systems: each with the devices it is spread over.
    pub fn btrfs_members(&self) -> Vec<Vec<Node>> {
        entries(&self.sys.join("fs/btrfs"))
            .into_iter()
            .map(|path| {
                entries(&path.join("devices"))
                    .into_iter()
                    .filter_map(|device| self.node_named(&device.file_name()?.to_string_lossy()))
                    .collect::<Vec<_>>()
            })
            .filter(|members| !members.is_empty())
            .collect()
    }

    /// The devices a mount lives on: none for tmpfs and NFS, several for btrfs on many disks.
    pub fn mount_devices(&self, mount: &Mount) -> Vec<Node> {
        let mut found = BTreeSet::new();
        if mount.number.major != 0 {
            found.extend(self.node(mount.number));
        } else {
            // bcachefs names all its devices, with colons between.
            let named = mount.mount_source.split(':').filter(|part| part.starts_with('/'));
            found.extend(named.filter_map(|part| self.node_at_path(Path::new(part))));
        }
        if mount.kind == "btrfs" {
            for members in self.btrfs_members() {
                if members.iter().any(|member| found.contains(member)) {
                    found.extend(members);
                }
            }
        }
        found.into_iter().collect()
    }

    /// The mounts that live on exactly this device (not on its partitions or holders).
    pub fn mounts_of(&self, mounts: &[Mount], number: DeviceNumber) -> Vec<Mount> {
        let uses = |mount: &&Mount| {
            mount.number == number
                || (mount.number.major == 0
                    && self.mount_devices(mount).iter().any(|node| node.number == number))
        };
        mounts.iter().filter(uses).cloned().collect()
    }

    /// The mount a file is on: by device number, else by the longest mount point above its path
    /// (a btrfs subvolume has a device number that is in no mount table).
    pub fn mount_of_file(&self, mounts: &[Mount], on: DeviceNumber, path: &Path) -> Option<Mount> {
        if let Some(mount) = mounts.iter().find(|mount| mount.number == on) {
            return Some(mount.clone());
        }
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        mounts
            .iter()
            .filter(|mount| path.starts_with(&mount.mount_point))
            // Of two mounts at one place the later hides the earlier; max_by_key keeps the last.
            .max_by_key(|mount| mount.mount_point.components().count())
            .cloned()
    }

    /// Everything `start` rests on, nearest first, `start` not included: the disk of a partition,
    /// the members of an array, the file of a loop device, the device of a file's file system.
    pub fn beneath(&self, start: &Target) -> io::Result<Vec<Beneath>> {
        let mounts = self.mounts()?;
        let loops = self.loops();
        let mut found: Vec<Beneath> = Vec::new();
        let mut next = 0;
        let mut current = start.clone();
        loop {
            for below in self.beneath_directly(&current, &mounts, &loops) {
                let known = found.iter().any(|other| other.target.is_same(&below.target));
                if !known && !below.target.is_same(start) && found.len() < WALK_COUNT_MAX {
                    found.push(below);
                }
            }
            let Some(below) = found.get(next) else { return Ok(found) };
            current = below.target.clone();
            next += 1;
        }
    }

    fn beneath_directly(
        &self,
        target: &Target,
        mounts: &[Mount],
        loops: &[LoopBinding],
    ) -> Vec<Beneath> {
        let block = |node: Node, through: Link| Beneath {
            target: Target::Block { path: node.path(), number: node.number },
            through,
        };
        match target {
            Target::Block { number, .. } => {
                let Some(node) = self.node(*number) else { return Vec::new() };
                let mut found = Vec::new();
                found.extend(node.parent().map(|parent| block(parent, Link::PartitionOf)));
                found.extend(node.slaves().into_iter().map(|slave| block(slave, Link::MadeOf)));
                for binding in loops.iter().filter(|binding| binding.node.number == *number) {
                    let file = Target::of(&binding.backing_file).ok();
                    found.extend(file.map(|target| Beneath { target, through: Link::LoopOf }));
                }
                found
            }
            Target::File { path, on, .. } => {
                let Some(mount) = self.mount_of_file(mounts, *on, path) else { return Vec::new() };
                self.mount_devices(&mount)
                    .into_iter()
                    .map(|node| block(node, Link::FileOn(mount.mount_point.clone())))
                    .collect()
            }
        }
    }
}

/// Something that a device or file rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beneath {
    /// What it is.
    pub target: Target,
    /// How what is above it rests on it.
    pub through: Link,
}

/// How one thing rests on another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// A partition of it.
    PartitionOf,
    /// An array, a volume, a mapping over it.
    MadeOf,
    /// A loop device over this file.
    LoopOf,
    /// A file on the file system mounted here from it.
    FileOn(PathBuf),
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(listing) = fs::read_dir(directory) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        listing.filter_map(Result::ok).map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// A small text file, trimmed; `None` when absent, unreadable or empty.
pub(super) fn read_trimmed(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes).trim_matches(['\0', '\n', ' ', '\t']).to_owned();
    if text.is_empty() { None } else { Some(text) }
}

/// Undoes the `\040` of procfs.
fn unescape(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) =
            (first, tail)
        {
            plain.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
            rest = after;
        } else {
            plain.push(*first);
            rest = tail;
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(plain))
}

fn mount_parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let number = DeviceNumber::parse(std::str::from_utf8(fields.nth(2)?).ok()?)?;
    let mount_point = unescape(fields.nth(1)?);
    // Optional fields end at a lone hyphen.
    fields.by_ref().find(|field| *field == b"-")?;
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let mount_source = unescape(fields.next()?).to_string_lossy().into_owned();
    Some(Mount { number, mount_point, kind, mount_source })
}

fn swap_parse(line: &[u8]) -> Option<Swap> {
    let mut fields = line.split(|byte| byte.is_ascii_whitespace()).filter(|part| !part.is_empty());
    let path = unescape(fields.next()?);
    let is_partition = fields.next()? == b"partition";
    Some(Swap { path, is_partition })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_line_with_optional_fields_and_a_space_in_its_path() {
        let line =
            b"36 35 98:0 /mnt1 /mnt/my\\040disk rw,noatime master:1 shared:2 - ext3 /dev/root rw";
        let mount = mount_parse(line).unwrap();
        assert_eq!(mount.number, DeviceNumber { major: 98, minor: 0 });
        assert_eq!(mount.mount_point, Path::new("/mnt/my disk"));
        assert_eq!((mount.kind.as_str(), mount.mount_source.as_str()), ("ext3", "/dev/root"));
    }

    #[test]
    fn nonsense_lines_are_left_out() {
        for line in [&b""[..], b"1 2", b"1 2 x:y / /", b"1 2 3:4 / /a rw no end", b"\\04"] {
            assert_eq!(mount_parse(line), None);
        }
        assert_eq!(unescape(b"a\\04").as_os_str(), "a\\04");
        assert_eq!(unescape(b"\\134").as_os_str(), "\\");
    }

    #[test]
    fn a_file_is_on_the_disk_that_its_file_systems_partition_is_of() {
        let root = std::env::temp_dir().join(format!("forebay-disk-of-{}", std::process::id()));
        let partition = root.join("sys/devices/vda/vda1");
        fs::create_dir_all(&partition).unwrap();
        fs::create_dir_all(root.join("sys/dev/block")).unwrap();
        let host = Host { proc: root.join("proc"), sys: root.join("sys") };
        let file = root.join("file");
        fs::write(&file, "").unwrap();
        let number = DeviceNumber::from_raw(fs::metadata(&file).unwrap().dev());
        assert_eq!(host.disk_of(&file), Some(number), "a file system without a device");
        fs::write(root.join("sys/devices/vda/dev"), "254:0").unwrap();
        fs::write(partition.join("dev"), number.to_string()).unwrap();
        let link = root.join("sys/dev/block").join(number.to_string());
        std::os::unix::fs::symlink(&partition, &link).unwrap();
        assert_eq!(host.disk_of(&file), Some(number), "a whole disk");
        fs::write(partition.join("partition"), "1").unwrap();
        assert_eq!(host.disk_of(&file), Some(DeviceNumber { major: 254, minor: 0 }));
        assert_eq!(host.disk_of(&root.join("none")), None);
        // Of a logical volume: where it lies, unless that is in two places.
        let on = |name: &str| {
            let path = root.join("sys/devices").join(name);
            fs::create_dir_all(path.join("slaves")).unwrap();
            fs::write(path.join("dev"), number.to_string()).unwrap();
            path
        };
        fs::write(partition.join("dev"), "254:1").unwrap();
        let volume = on("dm-0");
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink(&volume, &link).unwrap();
        assert_eq!(host.disk_of(&file), Some(number));
        std::os::unix::fs::symlink(&partition, volume.join("slaves/vda1")).unwrap();
        assert_eq!(host.disk_of(&file), Some(DeviceNumber { major: 254, minor: 0 }));
        std::os::unix::fs::symlink(root.join("sys/devices/vda"), volume.join("slaves/vda"))
            .unwrap();
        assert_eq!(host.disk_of(&file), Some(number));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_disk_is_called_by_its_vendor_and_model() {
        let root = std::env::temp_dir().join(format!("forebay-model-{}", std::process::id()));
        fs::create_dir_all(root.join("device")).unwrap();
        fs::write(root.join("dev"), "8:0").unwrap();
        let node = Node::at(&root).unwrap();
        assert_eq!(node.model(), None);
        fs::write(root.join("device/model"), "Samsung SSD 840 \n").unwrap();
        assert_eq!(node.model().as_deref(), Some("Samsung SSD 840"));
        for (vendor, model) in [
            ("ATA     ", "Samsung SSD 840"),
            ("Samsung ", "Samsung SSD 840"),
            ("0x1af4", "Samsung SSD 840"),
            ("QEMU    ", "QEMU Samsung SSD 840"),
        ] {
            fs::write(root.join("device/vendor"), vendor).unwrap();
            assert_eq!(node.model().as_deref(), Some(model), "{vendor}");
        }
        fs::remove_dir_all(&root).unwrap();
    }
}
