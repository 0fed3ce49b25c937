// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay removal`: what stands against taking the program off this machine, one line each. The package asks before it is
//! removed (`packaging/debian/prerm`).
//!
//! Without the program nobody answers who has a volume open, and udev's rule is gone that keeps from everybody a backing device
//! which lacks what only the cache has.

use crate::args::RemovalArgs;
use crate::config::{self, Config};
use crate::state_dir::StateDir;
use crate::status::{Status, VolumeStatus};
use crate::units::{count, size};
use crate::{control, quoted};
use anyhow::Result;
use forebay::host::loop_device::{Holder, holders};
use forebay::host::machine::Host;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const FSTAB: &str = "/etc/fstab";

pub fn run(args: &RemovalArgs) -> Result<ExitCode> {
    let (mut against, mut served) = (Vec::new(), BTreeSet::new());
    let mut configs: Vec<Config> = Vec::new();
    for path in config::paths()? {
        match config::read(&path) {
            Ok(config) => configs.push(config),
            // Its state directory and its daemon's socket may be where nobody looks.
            Err(error) => against.push(format!(
                "{}: what it serves is not known: mend or remove it: {error:#}",
                path.display()
            )),
        }
    }
    let of_files = |option| configs.iter().filter_map(move |config| config.path_of(option));
    let sockets: BTreeSet<PathBuf> = match &args.control {
        Some(socket) => {
            control::is_listened_at(socket).then(|| socket.clone()).into_iter().collect()
        }
        None => control::listening(of_files("control"))?,
    };
    for status in control::status_of_each(sockets) {
        match status {
            Ok(status) => {
                against.extend(status.volumes.iter().flat_map(|it| of_volume(&status, it)));
                served.insert(status.cache.uuid);
            }
            Err(error) => against.push(format!("{error:#}")),
        }
    }
    // Of caches that nobody serves.
    for dir in StateDir::there(of_files("state-dir")) {
        for record in dir.all()? {
            // One that was passed on purpose is given up already, whatever it has.
            let passed = record.mark_for(record.attach_generation).is_some_and(|it| !it.is_kept);
            if record.dirty && !passed && !served.contains(&record.cache) {
                against.push(format!(
                    "{}: its cache, {}, may hold what is not yet on {}; forebay drain --cache {}{}",
                    record.name,
                    record.cache_path,
                    record.backing.path.display(),
                    quoted::shell(Path::new(&record.cache_path)),
                    dir.option()
                ));
            }
        }
    }
    // None, where there is none.
    let fstab = std::fs::read_to_string(FSTAB).unwrap_or_default();
    against.extend(needed_by(&fstab));
    against.iter().for_each(|line| out!("{line}"));
    Ok(if against.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The mounts without which a boot ends in emergency mode, and which require a unit that goes.
fn needed_by(fstab: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in fstab.lines().filter(|line| !line.trim_start().starts_with('#')) {
        let mut fields = line.split_whitespace().skip(1);
        let (Some(place), Some(options)) = (fields.next(), fields.nth(1)) else { continue };
        let options: Vec<&str> = options.split(',').collect();
        if options.contains(&"nofail") || options.contains(&"noauto") {
            continue;
        }
        let units = options.iter().filter_map(|it| it.strip_prefix("x-systemd.requires="));
        let ours = |unit: &&str| unit.starts_with("forebay@") || unit.starts_with("forebay-ready@");
        found.extend(units.filter(ours).map(|unit| {
            format!(
                "{place}: requires {unit} in {FSTAB}, without which the next boot would end in emergency mode; take that out of its line, \
                 or add nofail"
            )
        }));
    }
    found
}

/// What stands against it of a volume that is served, or waits for its disk.
fn of_volume(status: &Status, volume: &VolumeStatus) -> Vec<String> {
    let VolumeStatus { name, backing, .. } = volume;
    let mut against = Vec::new();
    if volume.dirty {
        let dirty = size(volume.dirty_bytes);
        against.push(format!("{name}: {dirty} not yet on {backing}; forebay drain {name}"));
    } else if volume.state == "frozen" || volume.lost_blocks_now > 0 {
        let forget = "`forebay forget --lose-dirty` gives it up";
        against.push(format!(
            "{name}: {backing} alone lacks what the cache knows to be lost; {forget}"
        ));
    }
    for (number, what) in
        [(volume.nbd_clients, "NBD client"), (volume.vhost_user_clients, "virtual machine")]
    {
        if number > 0 {
            let users = count(u64::from(number), what);
            against.push(format!("{name}: has {users}; end them first"));
        }
    }
    for text in &volume.attached {
        let device = text.split(' ').next().unwrap_or(text);
        let users = users_of(Path::new(device), status.pid);
        if !users.is_empty() {
            against.push(format!("{name}: {device}: {}; end that first", users.join(", ")));
        }
    }
    against
}

/// Who has a block device, but for the daemon that it is of.
fn users_of(device: &Path, daemon: u32) -> Vec<String> {
    let host = Host::default();
    let Some(node) = host.node_at_path(device) else { return Vec::new() };
    let is_other = |holder: &Holder| !matches!(holder, Holder::Process { process_id, .. } if *process_id == daemon);
    let found = holders(&host, node.number).into_iter().filter(is_other);
    let mut found: Vec<String> = found.map(|it| it.to_string()).collect();
    // Mounted in another namespace, or of what cannot be seen: the kernel knows.
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    if found.is_empty() && rustix::fs::open(device, flags, Mode::empty()).is_err() {
        found.push("in use".into());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next boot ended in emergency mode.
    #[test]
    fn what_a_boot_needs_of_the_package_is_told() {
        let told = needed_by(
            "# UUID=0 /a xfs x-systemd.requires=forebay-ready@a.service 0 2\n\
             UUID=1 /b xfs x-systemd.requires=forebay-ready@b.service,nofail 0 2\n\
             UUID=2 /c xfs noauto,x-systemd.requires=forebay-ready@c.service 0 2\n\
             UUID=3\t/d xfs defaults,x-systemd.requires=forebay-ready@d.service 0 2\n\
             UUID=4 /e xfs x-systemd.requires=forebay@e.service\n\
             UUID=5 /f xfs x-systemd.requires=other.service 0 2\n\n/dev/sda1 /\n",
        );
        let begins = ["/d: requires forebay-ready@d.service in ", "/e: requires forebay@e.service"];
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told.iter().zip(begins).all(|(told, begin)| told.starts_with(begin)), "{told:?}");
    }
}
