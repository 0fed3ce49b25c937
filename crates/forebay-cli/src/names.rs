// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which kernel block device is which volume: written down for udev's rule, which makes
//! `/dev/forebay/NAME` of it (`forebay udev`).
//!
//! # Invariants
//!
//! - **A1** A record is of one life of a device: it has the kernel's number of that (`diskseq`), so that
//!   what a killed daemon left behind names nothing once the device is another.
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
    let directory = RuntimeDir::open()?.path().join(DIRECTORY);
    std::fs::create_dir_all(&directory)?;
    let diskseq = node.attribute("diskseq");
    let name = Name { cache: cache.into(), volume: volume.into(), diskseq };
    let path = directory.join(&node.name);
    std::fs::write(&path, serde_json::to_string(&name)?)
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    look_again(&node);
    Ok(())
}

/// The device is no volume any more.
pub fn erase(device: &Path) {
    let Some(name) = device.file_name() else { return };
    // What is not there needs no erasing; what cannot be erased is void by A1.
    let _ = std::fs::remove_file(directory(&Places::found().run).join(name));
}

/// The volume that a device, or the disk it is a partition of, is.
pub fn of(node: &Node) -> Option<Name> {
    of_in(&directory(&Places::found().run), node)
}

fn of_in(directory: &Path, node: &Node) -> Option<Name> {
    let whole = node.parent().unwrap_or_else(|| node.clone());
    let text = std::fs::read_to_string(directory.join(&whole.name)).ok()?;
    let name: Name = serde_json::from_str(&text).ok()?;
    (name.diskseq == whole.attribute("diskseq")).then_some(name) // A1
}

const DIRECTORY: &str = "devices";

/// Root's: no other user makes kernel devices.
fn directory(run: &Path) -> PathBuf {
    run.join("forebay").join(DIRECTORY)
}

/// Has udev apply its rules to a device, and to its partitions, once more.
pub fn look_again(node: &Node) {
    for node in std::iter::once(node.clone()).chain(node.partitions()) {
        // Without udev there is nobody to look.
        let _ = std::fs::write(node.directory.join("uevent"), "change");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_of_one_life_of_a_device_and_of_its_partitions() {
        let root = std::env::temp_dir().join(format!("forebay-names-{}", std::process::id()));
        let disk = root.join("sys/devices/loop7");
        std::fs::create_dir_all(disk.join("loop7p1")).unwrap();
        std::fs::create_dir_all(root.join("sys/class/block")).unwrap();
        std::fs::write(disk.join("dev"), "7:7\n").unwrap();
        std::fs::write(disk.join("diskseq"), "12\n").unwrap();
        std::fs::write(disk.join("loop7p1/dev"), "259:1\n").unwrap();
        std::fs::write(disk.join("loop7p1/partition"), "1\n").unwrap();
        for (name, path) in [("loop7", "loop7"), ("loop7p1", "loop7/loop7p1")] {
            let link = root.join("sys/class/block").join(name);
            std::os::unix::fs::symlink(root.join("sys/devices").join(path), link).unwrap();
        }
        let host = Host { proc: root.join("proc"), sys: root.join("sys") };
        let name = Name { cache: "c".into(), volume: "v".into(), diskseq: Some("12".into()) };
        std::fs::write(root.join("loop7"), serde_json::to_string(&name).unwrap()).unwrap();
        let found = |name: &str| of_in(&root, &host.node_named(name).unwrap());
        assert_eq!(found("loop7"), Some(name.clone()));
        assert_eq!(found("loop7p1"), Some(name));
        std::fs::write(disk.join("diskseq"), "13\n").unwrap();
        assert_eq!(found("loop7"), None);
        std::fs::remove_dir_all(root).unwrap();
    }
}
