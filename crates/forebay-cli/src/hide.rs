// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Backing devices that others must leave alone, written down for udev's rule (`forebay udev`).
//!
//! The file system on a backing device is also on the volume in front of it, newer. While the device
//! belongs to a cache, served or not, the rule keeps it from systemd, LVM, btrfs, md and desktops, and from
//! `/dev/disk/by-uuid`, so that what is mounted is the volume or nothing.
//!
//! # Invariants
//!
//! - **K1** A record is there from the first time a volume is served until `forebay forget`, a `format` of its cache, or until another cache
//!   that is served with its device has passed it.
//! - **K2** A device is known by its serial number, or by its partition's identity, and its size, which may have
//!   grown: never by a name that another may have after the next boot.
//! - **K3** Records are in `/etc`: the rule must know them before `/var` is mounted.
//! - **K4** What cannot be written down is a warning; the volume is served all the same.

use crate::names::look_again;
use crate::small_file;
use anyhow::{Context, Result, bail};
use forebay::host::identity::Serial;
use forebay::host::machine::{Host, Node, Target};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Names that udev makes of what is on a device: they lead to its volume as soon as that has it, too. Below `/dev`, each up to what is
/// on it.
pub const OF_CONTENT: [&str; 3] = ["disk/by-uuid/", "disk/by-label/", "disk/by-id/lvm-pv-uuid-"];

const DIRECTORY: &str = "/etc/forebay/backings";
/// Where udev has what its rules made of a device.
const UDEV_DATA: &str = "/run/udev/data";

/// Where the package has the rule, and where an operator would put it.
const RULES: [&str; 2] =
    ["/usr/lib/udev/rules.d/61-forebay.rules", "/etc/udev/rules.d/61-forebay.rules"];

/// A backing device of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backing {
    /// The identity of the cache.
    pub cache: String,
    pub volume: String,
    size_bytes: u64,
    serial: Option<String>,
    partuuid: Option<String>,
}

impl Backing {
    /// As it can be known by again (K2).
    fn of(host: &Host, node: &Node, partuuid: Option<String>) -> Backing {
        let sectors = node.attribute("size").and_then(|text| text.parse::<u64>().ok());
        let target = Target::Block { path: node.path(), number: node.number };
        let serial = Serial::of(host, &target);
        Backing {
            cache: String::new(),
            volume: String::new(),
            size_bytes: sectors.unwrap_or(0) * 512,
            serial: (!serial.is_unknown()).then(|| serial.to_string()),
            partuuid,
        }
    }

    /// The device at a path, if it is one.
    pub fn found(path: &Path) -> Option<Backing> {
        let host = Host::default();
        let node = block_node(&host, path)?;
        Some(Backing::of(&host, &node, partuuid(&node)))
    }

    /// Whether it can be known again.
    pub fn has_identity(&self) -> bool {
        self.serial.is_some() || self.partuuid.is_some()
    }

    /// Whether that device is the one written down here. It may have grown since.
    pub fn is_same_device(&self, other: &Backing) -> bool {
        let same = |a: &Option<String>, b: &Option<String>| a.is_some() && a == b;
        self.size_bytes <= other.size_bytes
            && (same(&self.serial, &other.serial) || same(&self.partuuid, &other.partuuid))
    }

    fn file_name(&self) -> String {
        format!("{}.{}", self.cache, self.volume)
    }
}

/// Writes down that a device belongs to a volume, if there is a rule to ask for it, and has udev
/// look at it again. Files need no hiding.
pub fn record(device: &Path, cache: &str, volume: &str) -> Result<()> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !RULES.iter().any(|rule| Path::new(rule).exists()) {
        return Ok(());
    }
    let host = Host::default();
    let Some(node) = block_node(&host, device) else { return Ok(()) };
    let mut backing = Backing::of(&host, &node, partuuid(&node));
    (backing.cache, backing.volume) = (cache.into(), volume.into());
    if !backing.has_identity() {
        bail!(
            "{}: has neither a serial number nor a partition's identity, so that udev cannot know it \
             again: it is not hidden from others, take care that nobody mounts it",
            device.display()
        );
    }
    record_in(Path::new(DIRECTORY), Path::new(UDEV_DATA), &node, &backing)
}

fn record_in(directory: &Path, udev_data: &Path, node: &Node, backing: &Backing) -> Result<()> {
    // Without the rule, as while the package was removed, udev has looked at it in vain.
    if write(directory, backing)? || !is_hidden(udev_data, node) {
        look_again(node);
    }
    Ok(())
}

/// Whether udev has made of the device what its rule says.
fn is_hidden(udev_data: &Path, node: &Node) -> bool {
    let text = std::fs::read_to_string(udev_data.join(format!("b{}", node.number)));
    text.is_ok_and(|text| text.lines().any(|line| line.starts_with("E:FOREBAY_BACKING_OF=")))
}

/// Whether udev hides the device of a volume as soon as that comes.
pub fn is_recorded(cache: &str, volume: &str) -> bool {
    let has_rule = RULES.iter().any(|rule| Path::new(rule).exists());
    has_rule && Path::new(DIRECTORY).join(format!("{cache}.{volume}")).exists()
}

/// A volume is forgotten: its device is everybody's again.
pub fn erase(cache: &str, volume: &str) -> Result<()> {
    let path = Path::new(DIRECTORY).join(format!("{cache}.{volume}"));
    let Some(backing) = read(&path) else { return Ok(()) };
    std::fs::remove_file(&path)
        .with_context(|| format!("{}: cannot be removed; udev hides the device", path.display()))?;
    let host = Host::default();
    for node in host.nodes() {
        if backing.is_same_device(&Backing::of(&host, &node, partuuid(&node))) {
            look_again(&node);
        }
    }
    Ok(())
}

/// Another cache is served with the device, and has passed this one's volume, which hides it no more: that cache may never come again, and
/// nobody could forget it there.
pub fn pass(device: &Path, cache: &str, volume: &str) -> Result<()> {
    let known = read(&Path::new(DIRECTORY).join(format!("{cache}.{volume}")));
    // The volume may be on another device since.
    let found = known.zip(Backing::found(device));
    match found.is_some_and(|(known, found)| known.is_same_device(&found)) {
        true => erase(cache, volume),
        false => Ok(()),
    }
}

/// The device that udev calls so (`$name` of a rule): with `/` where the kernel's name of it has `!`.
pub fn node_of(host: &Host, name: &str) -> Option<Node> {
    host.node_named(&name.replace('/', "!"))
}

/// Whose backing device this is; true with it: the device is a partition of the backing device.
pub fn of(node: &Node, partuuid: Option<String>) -> Option<(Backing, bool)> {
    of_in(Path::new(DIRECTORY), &Host::default(), node, partuuid)
}

fn of_in(
    directory: &Path,
    host: &Host,
    node: &Node,
    partuuid: Option<String>,
) -> Option<(Backing, bool)> {
    let own = Backing::of(host, node, partuuid);
    let parent = node.parent().map(|parent| Backing::of(host, &parent, None));
    let mut of_disk = None;
    for entry in std::fs::read_dir(directory).ok()?.flatten() {
        // What was being written when the power failed is nothing, and nobody takes it away.
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Some(known) = read(&entry.path()) else { continue };
        if known.is_same_device(&own) {
            return Some((known, false));
        }
        if parent.as_ref().is_some_and(|parent| known.is_same_device(parent)) {
            of_disk = Some((known, true));
        }
    }
    of_disk
}

fn read(path: &Path) -> Option<Backing> {
    serde_json::from_str(&small_file::read(path).ok()?).ok()
}

/// Says whether anything is new.
fn write(directory: &Path, backing: &Backing) -> Result<bool> {
    let path = directory.join(backing.file_name());
    if read(&path).as_ref() == Some(backing) {
        return Ok(false);
    }
    let failed = || format!("{}: cannot be written", path.display());
    std::fs::create_dir_all(directory).with_context(failed)?;
    let text = serde_json::to_string_pretty(backing)?;
    // It is read at every boot.
    small_file::replace(directory, &backing.file_name(), &text).with_context(failed)?;
    Ok(true)
}

fn block_node(host: &Host, device: &Path) -> Option<Node> {
    match Target::of(device).ok()? {
        Target::Block { number, .. } => host.node(number),
        Target::File { .. } => None,
    }
}

/// By the links that udev makes.
fn partuuid(node: &Node) -> Option<String> {
    link_to(node, "/dev/disk/by-partuuid")?.file_name()?.to_str().map(str::to_owned)
}

/// A name of the device that another does not get at the next boot.
pub fn lasting_name(device: &Path) -> PathBuf {
    let node = block_node(&Host::default(), device);
    let find = |node: &Node| {
        ["/dev/disk/by-id", "/dev/disk/by-partuuid"].iter().find_map(|it| link_to(node, it))
    };
    node.as_ref().and_then(find).unwrap_or_else(|| device.to_owned())
}

fn link_to(node: &Node, directory: &str) -> Option<PathBuf> {
    let mut links: Vec<PathBuf> =
        std::fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path()).collect();
    links.sort();
    let wanted = Path::new("/dev").join(node.name.replace('!', "/"));
    links.into_iter().find(|link| std::fs::canonicalize(link).is_ok_and(|path| path == wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine {
        root: PathBuf,
        host: Host,
    }

    impl Machine {
        /// A disk `vda` of 8 sectors with a serial number, and its partition `vda1` of 4.
        fn new(name: &str) -> Machine {
            let root = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            let host = Host { proc: root.join("proc"), sys: root.join("sys") };
            let machine = Machine { root, host };
            machine.attribute("vda", "dev", "254:0");
            machine.attribute("vda", "size", "8");
            machine.attribute("vda", "serial", "S1");
            machine.attribute("vda/vda1", "dev", "254:1");
            machine.attribute("vda/vda1", "size", "4");
            machine.attribute("vda/vda1", "partition", "1");
            machine
        }

        fn attribute(&self, device: &str, name: &str, value: &str) {
            let directory = self.root.join("sys/devices").join(device);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(name), value).unwrap();
            let link = |place: &str, name: &str| {
                let place = self.root.join("sys").join(place);
                std::fs::create_dir_all(&place).unwrap();
                let _ = std::os::unix::fs::symlink(&directory, place.join(name));
            };
            link("class/block", device.rsplit('/').next().unwrap());
            if name == "dev" {
                link("dev/block", value);
            }
        }

        fn of(&self, name: &str, partuuid: Option<&str>) -> Option<(String, bool)> {
            let node = node_of(&self.host, name).unwrap();
            let found = of_in(&self.root.join("etc"), &self.host, &node, partuuid.map(Into::into));
            found.map(|(backing, is_part)| (backing.volume, is_part))
        }

        fn hide(&self, name: &str, partuuid: Option<&str>, volume: &str) -> bool {
            let node = self.host.node_named(name).unwrap();
            let mut backing = Backing::of(&self.host, &node, partuuid.map(Into::into));
            (backing.cache, backing.volume) = ("c".into(), volume.into());
            write(&self.root.join("etc"), &backing).unwrap()
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.root);
        }
    }

    #[test]
    fn a_disk_is_hidden_with_its_partitions_and_a_partition_alone() {
        let machine = Machine::new("hide-disk");
        assert_eq!(machine.of("vda", None), None);
        assert!(machine.hide("vda", None, "disk"));
        assert!(!machine.hide("vda", None, "disk"), "nothing new");
        assert_eq!(machine.of("vda", None), Some(("disk".into(), false)));
        assert_eq!(machine.of("vda1", None), Some(("disk".into(), true)));

        let machine = Machine::new("hide-part");
        machine.hide("vda1", None, "part");
        assert_eq!(machine.of("vda", None), None);
        assert_eq!(machine.of("vda1", None), Some(("part".into(), false)));
    }

    /// The package was removed and installed again: the record was there, and udev had forgotten.
    #[test]
    fn udev_looks_again_until_it_hides_the_device() {
        let machine = Machine::new("hide-again");
        let (etc, data) = (machine.root.join("etc"), machine.root.join("udev"));
        std::fs::create_dir(&data).unwrap();
        let node = machine.host.node_named("vda").unwrap();
        let mut backing = Backing::of(&machine.host, &node, None);
        (backing.cache, backing.volume) = ("c".into(), "disk".into());
        let looks_again = || {
            let _ = std::fs::remove_file(node.directory.join("uevent"));
            record_in(&etc, &data, &node, &backing).unwrap();
            node.directory.join("uevent").exists()
        };
        assert!(looks_again(), "it is new");
        std::fs::write(data.join("b254:0"), "S:disk/by-id/x\nE:FOREBAY_BACKING_OF=disk\n").unwrap();
        assert!(!looks_again());
        std::fs::write(data.join("b254:0"), "S:disk/by-id/x\nE:ID_FS_TYPE=ext4\n").unwrap();
        assert!(looks_again(), "udev shows it");
    }

    #[test]
    fn another_device_is_not_hidden() {
        let machine = Machine::new("hide-other");
        machine.hide("vda", None, "disk");
        machine.attribute("vda", "serial", "S2");
        assert_eq!(machine.of("vda", None), None);
        machine.attribute("vda", "serial", "S1");
        machine.attribute("vda", "size", "7");
        assert_eq!(machine.of("vda", None), None);
        machine.attribute("vda", "size", "9");
        assert_eq!(machine.of("vda", None), Some(("disk".into(), false)), "it has grown");
    }

    #[test]
    fn a_partition_without_a_serial_number_is_known_by_its_identity() {
        let machine = Machine::new("hide-identity");
        std::fs::remove_file(machine.root.join("sys/devices/vda/serial")).unwrap();
        machine.hide("vda1", Some("1-2"), "part");
        assert_eq!(machine.of("vda1", Some("1-2")), Some(("part".into(), false)));
        assert_eq!(machine.of("vda1", Some("1-3")), None);
        assert_eq!(machine.of("vda1", None), None, "two unknowns are not the same");
    }

    /// udev's rule asked for `cciss/c0d0`, and was told that there is no such device.
    #[test]
    fn a_device_with_a_slash_in_its_name_is_hidden() {
        let machine = Machine::new("hide-slash");
        for (attribute, value) in [("dev", "104:0"), ("size", "16"), ("serial", "S9")] {
            machine.attribute("cciss!c0d0", attribute, value);
        }
        machine.attribute("cciss!c0d0/cciss!c0d0p1", "dev", "104:1");
        machine.attribute("cciss!c0d0/cciss!c0d0p1", "size", "8");
        machine.attribute("cciss!c0d0/cciss!c0d0p1", "partition", "1");
        machine.hide("cciss!c0d0", None, "disk");
        assert_eq!(machine.of("cciss/c0d0", None), Some(("disk".into(), false)));
        assert_eq!(machine.of("cciss/c0d0p1", None), Some(("disk".into(), true)));
        for name in ["", "/", "..", "../cciss!c0d0", "cciss/c0d1"] {
            assert!(node_of(&machine.host, name).is_none(), "{name}");
        }
    }

    #[test]
    fn rubbish_in_the_directory_hides_nothing() {
        let machine = Machine::new("hide-rubbish");
        machine.hide("vda", None, "disk");
        std::fs::write(machine.root.join("etc/x"), "{").unwrap();
        std::fs::rename(machine.root.join("etc/c.disk"), machine.root.join("etc/.c.disk.new"))
            .unwrap();
        assert_eq!(machine.of("vda", None), None);
        std::fs::write(machine.root.join("etc/c.disk"), [0xff, 0]).unwrap();
        assert_eq!(machine.of("vda", None), None);
    }
}
