// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--listen vhost-user://`: which volume is the disk of which virtual machine.

use crate::args::{Listen, ServeArgs};
use crate::sockets::{self, Made};
use anyhow::{Result, bail};
use forebay_core::units::VolumeIndex;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

#[cfg(feature = "vhost")]
mod machines;
#[cfg(feature = "vhost")]
pub use machines::{Machines, SOCKET_COUNT_MAX, memory_parts};

#[cfg(not(feature = "vhost"))]
mod none;
#[cfg(not(feature = "vhost"))]
pub use none::{Machines, SOCKET_COUNT_MAX, memory_parts};

/// A socket for a virtual machine, with the name of its volume.
pub type Named = (PathBuf, String);

/// A socket for a virtual machine, and its volume.
#[cfg_attr(not(feature = "vhost"), allow(dead_code))]
#[derive(Debug)]
pub struct Wanted {
    pub path: PathBuf,
    pub listener: UnixListener,
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

/// The sockets for virtual machines, each with the name of its volume, and what stands against the others. `names`: of all
/// volumes there can be.
pub fn named(args: &ServeArgs, names: &[&str]) -> Result<(Vec<Named>, Vec<String>)> {
    if socket_count(args) > SOCKET_COUNT_MAX {
        bail!("--listen vhost-user: at most {SOCKET_COUNT_MAX} sockets");
    }
    let (mut named, mut problems) = (Vec::new(), Vec::new());
    for listen in &args.listen {
        let Listen::VhostUser { path, volume } = listen else { continue };
        let shown = path.display();
        match (volume, names) {
            (None, [only]) => named.push((path.clone(), (*only).to_owned())),
            (None, _) => problems.push(format!(
                "vhost-user://{shown}: which volume? give vhost-user://{shown}?volume=NAME ({})",
                names.join(", ")
            )),
            (Some(name), _) if names.contains(&name.as_str()) => {
                named.push((path.clone(), name.clone()));
            }
            (Some(name), _) => problems.push(format!(
                "vhost-user://{shown}?volume={name}: no such volume; there are: {}",
                names.join(", ")
            )),
        }
    }
    Ok((named, problems))
}

/// Binds those whose volumes are served; and the others.
pub fn bind(
    named: Vec<Named>,
    served: &[Volume],
    made: &mut Made,
) -> Result<(Vec<Wanted>, Vec<Named>)> {
    let (mut wanted, mut waiting) = (Vec::new(), Vec::new());
    for (path, name) in named {
        if let Some(volume) = served.iter().find(|volume| volume.name == name) {
            let listener = sockets::bind(&path, made)?;
            wanted.push(Wanted { path, listener, volume: volume.clone() });
        } else {
            waiting.push((path, name));
        }
    }
    Ok((wanted, waiting))
}

/// What stands against one whose volume is not served.
pub fn waiting_text(path: &Path, name: &str) -> String {
    format!("{name}: not listened for on {}: it is not served", path.display())
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
         node,memdev=mem -chardev socket,id={name},path={path},reconnect-ms=100 -device \
         vhost-user-blk-pci,chardev={name} (QEMU before 9.2: reconnect=1)"
    )
}
