// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay udev`: what udev's rule asks of a device. One `KEY=value` a line, nothing for a device that is none of
//! ours; always a success, for an error here must not keep a device from others.

use crate::args::UdevArgs;
use crate::{hide, names};
use anyhow::Result;
use forebay::host::machine::Host;
use std::process::ExitCode;

pub fn run(args: &UdevArgs) -> Result<ExitCode> {
    let found = hide::node_of(&Host::default(), &args.name);
    let Some(node) = found else { return Ok(ExitCode::SUCCESS) };
    if let Some(name) = names::of(&node) {
        out!("FOREBAY_VOLUME={}\nFOREBAY_CACHE={}", name.volume, name.cache);
        return Ok(ExitCode::SUCCESS);
    }
    // udev gives what it has found out in the environment.
    let partuuid = std::env::var("ID_PART_ENTRY_UUID").ok();
    if let Some((backing, is_part)) = hide::of(&node, partuuid) {
        let links: Vec<&str> =
            args.links.iter().map(String::as_str).filter(|link| stays(link, is_part)).collect();
        out!("FOREBAY_BACKING_OF={}\nFOREBAY_CACHE={}", backing.volume, backing.cache);
        out!("FOREBAY_LINKS={}", links.join(" "));
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a link of a backing device is its own, and not one that the volume has, too. The partitions of a
/// disk are on its volume; a partition that is a backing device itself keeps its identity.
fn stays(link: &str, is_part: bool) -> bool {
    let link = link.strip_prefix("/dev/").unwrap_or(link);
    let is_in = |places: &[&str]| places.iter().any(|place| link.starts_with(place));
    let of_table = ["disk/by-partuuid/", "disk/by-partlabel/"];
    let goes = is_in(&hide::OF_CONTENT) || (is_part && is_in(&of_table));
    !goes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_the_content_go_and_those_of_the_device_stay() {
        for link in [
            "/dev/disk/by-id/wwn-1-part2",
            "disk/by-path/pci-0",
            "/dev/disk/by-partuuid/1-2",
            "/dev/disk/by-id/md-uuid-1:2",
            "md/data",
        ] {
            assert!(stays(link, false), "{link}");
        }
        for link in ["/dev/disk/by-uuid/1-2", "disk/by-label/home", "/dev/disk/by-id/lvm-pv-uuid-x"]
        {
            assert!(!stays(link, false), "{link}");
        }
        assert!(!stays("/dev/disk/by-partuuid/1-2", true));
        assert!(!stays("/dev/disk/by-partlabel/home", true));
        assert!(stays("/dev/disk/by-id/wwn-1-part2", true));
    }
}
