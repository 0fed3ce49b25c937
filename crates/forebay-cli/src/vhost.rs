// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--listen vhost-user://`: which volume is the disk of which virtual machine.

use crate::args::{Listen, ServeArgs};
use anyhow::{Result, bail};
use forebay_core::units::VolumeIndex;
use std::path::{Path, PathBuf};

#[cfg(feature = "vhost")]
mod machines;
#[cfg(feature = "vhost")]
pub use machines::{Machines, memory_parts};

#[cfg(not(feature = "vhost"))]
mod none;
#[cfg(not(feature = "vhost"))]
pub use none::{Machines, memory_parts};

/// A socket for a virtual machine, and its volume.
#[cfg_attr(not(feature = "vhost"), allow(dead_code))]
#[derive(Clone, Debug)]
pub struct Wanted {
    pub path: PathBuf,
    pub volume: Volume,
}

/// A volume that is served.
#[cfg_attr(not(feature = "vhost"), allow(dead_code))]
#[derive(Clone, Debug)]
pub struct Volume {
    pub index: VolumeIndex,
    pub name: String,
    pub size_bytes: u64,
    pub logical_block: u32,
}

/// The sockets for virtual machines, each with the volume that was asked for; and what stands
/// against others.
pub fn wanted(
    args: &ServeArgs,
    served: &[Volume],
    recorded: &[String],
) -> Result<(Vec<Wanted>, Vec<String>)> {
    let (mut wanted, mut problems) = (Vec::new(), Vec::new());
    for listen in &args.listen {
        let Listen::VhostUser { path, volume } = listen else { continue };
        let shown = path.display();
        let volume = match (volume, served) {
            (None, [only]) if recorded.len() == 1 => only.clone(),
            (None, _) => bail!(
                "vhost-user://{shown}: which volume? give vhost-user://{shown}?volume=NAME ({})",
                recorded.join(", ")
            ),
            (Some(name), _) => match served.iter().find(|volume| volume.name == *name) {
                Some(volume) => volume.clone(),
                None if recorded.contains(name)
                    || args.volumes.iter().any(|it| it.name == *name) =>
                {
                    problems.push(format!("{name}: not listened for on {shown}: it is not served"));
                    continue;
                }
                None => bail!(
                    "vhost-user://{shown}?volume={name}: no such volume is served; these are: {}",
                    served.iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ")
                ),
            },
        };
        wanted.push(Wanted { path: path.clone(), volume });
    }
    Ok((wanted, problems))
}

/// How many sockets for virtual machines there are to be.
pub fn socket_count(args: &ServeArgs) -> usize {
    let is_one = |listen: &&Listen| matches!(listen, Listen::VhostUser { .. });
    args.listen.iter().filter(is_one).count()
}

/// What QEMU is to be given.
#[cfg_attr(not(feature = "vhost"), allow(dead_code))]
fn qemu_line(path: &Path, name: &str) -> String {
    // A comma ends a value there, two are one.
    let path = path.display().to_string().replace(',', ",,");
    format!(
        "vhost-user {name}: -object memory-backend-memfd,id=mem,size=SIZE,share=on -numa \
         node,memdev=mem -chardev socket,id={name},path={path},reconnect=1 -device \
         vhost-user-blk-pci,chardev={name}"
    )
}
