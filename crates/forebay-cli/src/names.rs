// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which kernel block device is which volume: written down for udev's rule, which makes
//! `/dev/forebay/NAME` of it (`forebay udev`), and for the next daemon, where a driver cannot be asked whose a device is.
//!
//! # Invariants
//!
//! - **A1** A record is of one life of a device: it has the kernel's number of that (`diskseq`), so that
//!   what a killed daemon left behind names nothing once the device is another. Where the kernel has none (before
//!   Linux 5.15) no device has a name.
//! - **A2** A device that cannot be written down is attached all the same; it only has no name.

use anyhow::{Context, Result};
use forebay::host::machine::{Host, Node};
use forebay::host::runtime_dir::{Places, RuntimeDir};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A volume that is a kernel device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// The identity of its cache.
    pub cache: String,
    pub volume: String,
    diskseq: Option<String>,
}

/// Writes down which volume a device is, and has udev look at it again.
pub fn record(device: &Path, cache: &str, volume: &str) -> Result<()> {
    let Some(node) = Host::default().node_at_path(device) else { return Ok(()) };
    let diskseq = node.attribute("diskseq");
    let diskseq = diskseq.context("Linux tells one life of a device from the next from 5.15 on")?;
    let directory = RuntimeDir::open()?.path().join(DIRECTORY);
    std::fs::create_dir_all(&directory)?;
    let name = Name { cache: cache.into(), volume: volume.into(), diskseq: Some(diskseq) };
    let path = directory.join(&node.name);
    std::fs::write(&path, serde_json::to_string(&name)?)
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    look_again(&node);
    Ok(())
}

/// The device is none of these volumes any more. Another one may have it by now.
pub fn erase(device: &Path, cache: &str, is_its: impl Fn(&str) -> bool) {
    let Some(name) = device.file_name() else { return };
    erase_in(&directory(&Places::found().run).join(name), cache, is_its);
}

fn erase_in(record: &Path, cache: &str, is_its: impl Fn(&str) -> bool) {
    if read(record).is_some_and(|name| name.cache == cache && is_its(&name.volume)) {
        // What cannot be erased is void by A1.
        let _ = std::fs::remove_file(record);
    }
}

fn read(record: &Path) -> Option<Name> {
    serde_json::from_str(&std::fs::read_to_string(record).ok()?).ok()
}

/// The volume that a device, or the disk it is a partition of, is.
pub fn of(node: &Node) -> Option<Name> {
    of_in(&directory(&Places::found().run), node)
}

fn of_in(directory: &Path, node: &Node) -> Option<Name> {
    let whole = node.parent().unwrap_or_else(|| node.clone());
    let name = read(&directory.join(&whole.name))?;
    // A1: what nobody knows is not the same.
    let life = whole.attribute("diskseq")?;
    (name.diskseq.as_ref() == Some(&life)).then_some(name)
}

/// The devices by which other caches have a volume of this name: `/dev/forebay/NAME` leads to one of them.
pub fn of_others(cache: &str, volume: &str) -> Vec<PathBuf> {
    others_in(&directory(&Places::found().run), &Host::default(), cache, volume)
}

fn others_in(directory: &Path, host: &Host, cache: &str, volume: &str) -> Vec<PathBuf> {
    let names = live_in(directory, host, "");
    let others = names.filter(|(name, _)| name.cache != cache && name.volume == volume);
    others.map(|(_, device)| device).collect()
}

/// The devices that are volumes of a cache, each with its volume's name, of those whose own names begin so.
#[cfg_attr(not(feature = "ublk"), allow(dead_code))]
pub fn all_of(cache: &str, begin: &str) -> Vec<(String, PathBuf)> {
    all_in(&directory(&Places::found().run), &Host::default(), cache, begin)
}

fn all_in(directory: &Path, host: &Host, cache: &str, begin: &str) -> Vec<(String, PathBuf)> {
    let its_own = live_in(directory, host, begin).filter(|(name, _)| name.cache == cache);
    its_own.map(|(name, device)| (name.volume, device)).collect()
}

/// What is written down and holds still (A1).
fn live_in<'a>(
    directory: &'a Path,
    host: &'a Host,
    begin: &'a str,
) -> impl Iterator<Item = (Name, PathBuf)> + use<'a> {
    // Where nothing was written down nothing can be read.
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let file = entry.file_name();
        let node = host.node_named(file.to_str().filter(|file| file.starts_with(begin))?)?;
        Some((of_in(directory, &node)?, Path::new("/dev").join(&node.name)))
    })
}

const DIRECTORY: &str = "devices";

/// Root's: no other user makes kernel devices.
fn directory(run: &Path) -> PathBuf {
    run.join("forebay").join(DIRECTORY)
}

/// Has udev apply its rules to a device, and to its partitions, once more, as it does at boot.
///
/// That is "add": LVM's rule looks into most devices at no other event. Those that are empty when they are added it looks into
/// when they change.
pub fn look_again(node: &Node) {
    for node in std::iter::once(node.clone()).chain(node.partitions()) {
        let is_empty_at_first = node.name.starts_with("loop") || node.name.starts_with("md");
        let is_whole = node.parent().is_none();
        let action = if is_empty_at_first && is_whole { "change" } else { "add" };
        // Without udev there is nobody to look.
        let _ = std::fs::write(node.directory.join("uevent"), action);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose only disk has one partition.
    fn machine(root: &Path, disk: &str) -> Host {
        let part = format!("{disk}p1");
        let directory = root.join("sys/devices").join(disk);
        std::fs::create_dir_all(directory.join(&part)).unwrap();
        std::fs::create_dir_all(root.join("sys/class/block")).unwrap();
        std::fs::write(directory.join("dev"), "7:7\n").unwrap();
        std::fs::write(directory.join("diskseq"), "12\n").unwrap();
        std::fs::write(directory.join(&part).join("dev"), "259:1\n").unwrap();
        std::fs::write(directory.join(&part).join("partition"), "1\n").unwrap();
        for (name, path) in [(disk, directory.clone()), (&part, directory.join(&part))] {
            std::os::unix::fs::symlink(path, root.join("sys/class/block").join(name)).unwrap();
        }
        Host { proc: root.join("proc"), sys: root.join("sys") }
    }

    fn room(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()))
    }

    /// LVM activates what is on a ublk or nbd device at "add" alone, and the kernel's own one comes before the device's name.
    #[test]
    fn lvm_is_told_of_a_device_by_the_event_that_it_heeds() {
        for (disk, whole, part) in [("ublkb3", "add", "add"), ("loop3", "change", "add")] {
            let root = room(disk);
            let host = machine(&root, disk);
            look_again(&host.node_named(disk).unwrap());
            let directory = root.join("sys/devices").join(disk);
            let told = |path: &Path| std::fs::read_to_string(path.join("uevent")).unwrap();
            assert_eq!(told(&directory), whole, "{disk}");
            assert_eq!(told(&directory.join(format!("{disk}p1"))), part, "{disk}");
            std::fs::remove_dir_all(root).unwrap();
        }
    }

    #[test]
    fn a_record_is_of_one_life_of_a_device_and_of_its_partitions() {
        let root = room("names");
        let host = machine(&root, "loop7");
        let disk = root.join("sys/devices/loop7");
        let name = Name { cache: "c".into(), volume: "v".into(), diskseq: Some("12".into()) };
        std::fs::write(root.join("loop7"), serde_json::to_string(&name).unwrap()).unwrap();
        let found = |name: &str| of_in(&root, &host.node_named(name).unwrap());
        assert_eq!(found("loop7"), Some(name.clone()));
        assert_eq!(found("loop7p1"), Some(name));
        std::fs::write(disk.join("diskseq"), "13\n").unwrap();
        assert_eq!(found("loop7"), None);
        // Before Linux 5.15: what a killed daemon left behind named the next program's loop device.
        std::fs::remove_file(disk.join("diskseq")).unwrap();
        assert_eq!(found("loop7"), None);
        let unknown = Name { cache: "c".into(), volume: "v".into(), diskseq: None };
        std::fs::write(root.join("loop7"), serde_json::to_string(&unknown).unwrap()).unwrap();
        assert_eq!((found("loop7"), found("loop7p1")), (None, None));
        std::fs::remove_dir_all(root).unwrap();
    }

    /// The kernel gives a number again at once: the name of who had it by then was gone.
    #[test]
    fn a_name_is_erased_by_whose_it_is() {
        let root = room("erase");
        std::fs::create_dir_all(&root).unwrap();
        let record = root.join("loop7");
        let name = Name { cache: "c".into(), volume: "v".into(), diskseq: Some("1".into()) };
        std::fs::write(&record, serde_json::to_string(&name).unwrap()).unwrap();
        erase_in(&record, "d", |volume| volume == "v");
        erase_in(&record, "c", |volume| volume == "w");
        assert!(record.exists());
        erase_in(&record, "c", |volume| volume == "v");
        assert!(!record.exists());
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_devices_of_a_cache_are_those_that_are_there_still() {
        let root = room("all");
        let host = machine(&root, "ublkb3");
        let write = |file: &str, cache: &str, diskseq: &str| {
            let (cache, diskseq) = (cache.to_owned(), Some(diskseq.to_owned()));
            let name = Name { cache, volume: "v".into(), diskseq };
            std::fs::write(root.join(file), serde_json::to_string(&name).unwrap()).unwrap();
        };
        let all = |cache: &str, begin: &str| all_in(&root, &host, cache, begin);
        assert_eq!(all("c", "ublkb"), []);
        write("ublkb3", "c", "12");
        write("ublkb4", "c", "12");
        assert_eq!(all("c", "ublkb"), [("v".to_owned(), "/dev/ublkb3".into())], "4 has gone");
        assert_eq!((all("d", "ublkb"), all("c", "loop")), (vec![], vec![]));
        let others = |cache: &str, volume: &str| others_in(&root, &host, cache, volume);
        assert_eq!(others("d", "v"), [PathBuf::from("/dev/ublkb3")]);
        assert_eq!((others("c", "v"), others("d", "w")), (vec![], vec![]));
        write("ublkb3", "c", "11");
        assert_eq!(all("c", "ublkb"), [], "another one has its number");
        assert_eq!(all_in(&root.join("none"), &host, "c", "ublkb"), []);
        std::fs::remove_dir_all(root).unwrap();
    }
}
