// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--attach`: which kernel block device is made of each volume, and why not another.

mod attached;
#[cfg(feature = "fuse")]
mod fuse;
mod nbd;
#[cfg(feature = "ublk")]
mod ublk;

pub use attached::Attached;

use crate::args::Attach;
use anyhow::{Result, bail};
use forebay_core::units::VolumeIndex;
use forebay_serve::attach::{Attachments, DeviceVolume, Reports};
use forebay_serve::server::Server;
use std::path::PathBuf;

/// A volume to be attached.
#[cfg_attr(not(all(feature = "fuse", feature = "ublk")), allow(dead_code))]
pub struct Wanted {
    pub index: VolumeIndex,
    pub uuid: [u8; 16],
    pub name: String,
    pub size_bytes: u64,
    pub logical_block: u32,
    pub backing: PathBuf,
    /// Whether the backing device takes discards.
    pub discards: bool,
    /// Whether requests may go straight to the backing device, by nobody's memory but their own.
    pub may_go_straight: bool,
}

impl Wanted {
    fn device_volume(&self) -> DeviceVolume {
        DeviceVolume {
            index: self.index,
            uuid: self.uuid,
            size_bytes: self.size_bytes,
            logical_block: self.logical_block,
            lends: self.may_go_straight,
        }
    }
}

/// What makes the devices, and what went wrong with those of a daemon before.
#[cfg_attr(not(any(feature = "fuse", feature = "ublk")), allow(dead_code))]
struct Begun {
    attachments: Box<dyn Attachments>,
    reports: Reports,
    problems: Vec<String>,
}

/// What block devices are made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ublk,
    Nbd,
    Fuse,
}

impl Kind {
    /// The best first.
    const ALL: [Kind; 3] = [Kind::Ublk, Kind::Nbd, Kind::Fuse];

    /// As it is called in `--attach`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ublk => "ublk",
            Kind::Nbd => "nbd",
            Kind::Fuse => "fuse",
        }
    }

    /// Bytes of memory that its devices take, by part.
    pub fn memory_parts(self) -> Vec<(&'static str, u64)> {
        match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => forebay_serve::ublk::memory_parts().into(),
            // Address space, of which little becomes memory; see P9 in docs/promises.md.
            Kind::Nbd => Vec::new(),
            #[cfg(feature = "fuse")]
            Kind::Fuse => forebay_serve::fuse::front_end::memory_parts().into(),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            _ => Vec::new(),
        }
    }

    /// Why it cannot be had here.
    fn obstacle(self) -> Option<String> {
        match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => ublk::obstacle(),
            Kind::Nbd => nbd::obstacle(),
            #[cfg(feature = "fuse")]
            Kind::Fuse => fuse::obstacle(),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            kind => Some(format!("this program was built without the feature `{}`", kind.name())),
        }
    }

    /// Those that have a place of their own from a daemon before, and the others.
    pub fn split(self, cache: &str, wanted: Vec<Wanted>) -> Result<(Vec<Wanted>, Vec<Wanted>)> {
        #[cfg(feature = "fuse")]
        if self == Kind::Fuse {
            return fuse::split(cache, wanted);
        }
        let _ = cache;
        Ok((Vec::new(), wanted))
    }

    /// Begins to make a device of each volume. `place` is unlike that of others that are not ended.
    /// Of NBD it has so many `connections`.
    pub fn begin(
        self,
        server: &mut Server,
        (cache, place): (&str, &str),
        wanted: Vec<Wanted>,
        connections: usize,
    ) -> Result<Attached> {
        let names = wanted.iter().map(|volume| (volume.index, volume.name.clone())).collect();
        let begun: Result<Begun> = match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => ublk::begin(server, &wanted),
            Kind::Nbd => nbd::begin(server, &wanted, connections),
            #[cfg(feature = "fuse")]
            Kind::Fuse => fuse::begin(server, place, wanted),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            _ => Err(missing(server, place)),
        };
        let begun = begun?;
        for text in &begun.problems {
            tracing::warn!("{text}");
        }
        Ok(Attached::new(self, begun, cache, names))
    }
}

#[cfg(not(all(feature = "fuse", feature = "ublk")))]
fn missing(_: &mut Server, _: &str) -> anyhow::Error {
    anyhow::anyhow!("this program was built without it")
}

/// `forebay keep`: holds what the kernel closes with the last descriptor.
pub fn keep() -> Result<()> {
    #[cfg(feature = "fuse")]
    return fuse::keep();
    #[cfg(not(feature = "fuse"))]
    bail!("this program was built without the feature `fuse`")
}

/// What the devices are made by, if by anything. Says so, and what stands against the others.
pub fn choose(wanted: Attach) -> Result<Option<Kind>> {
    let asked = match wanted {
        Attach::None => return Ok(None),
        Attach::Auto => None,
        Attach::Ublk => Some(Kind::Ublk),
        Attach::Nbd => Some(Kind::Nbd),
        Attach::Fuse => Some(Kind::Fuse),
    };
    // Nobody else is given by `auto` what ends with the daemon.
    let is_unprivileged = forebay::host::runtime_dir::Places::found().user_id != 0;
    if is_unprivileged && asked != Some(Kind::Ublk) {
        let why = "not root; run by root it would add a block device per volume";
        return refused(asked, why);
    }
    if let Some(kind) = asked {
        return match kind.obstacle() {
            None => Ok(Some(kind)),
            Some(why) => refused(asked, &why),
        };
    }
    let mut why_not = Vec::new();
    for kind in Kind::ALL {
        match kind.obstacle() {
            Some(why) => why_not.push(format!("{}: {why}", kind.name())),
            None => {
                let but = if why_not.is_empty() {
                    String::new()
                } else {
                    format!("; {}", why_not.join("; "))
                };
                tracing::info!("attaches volumes by {}{but}", kind.name());
                return Ok(Some(kind));
            }
        }
    }
    refused(None, &why_not.join("; "))
}

fn refused(asked: Option<Kind>, why: &str) -> Result<Option<Kind>> {
    match asked {
        Some(kind) => bail!("--attach {}: {why}", kind.name()),
        None => {
            tracing::info!("attaches no volume, serves NBD only: {why}");
            Ok(None)
        }
    }
}

/// This thread and those that it makes allocate without waiting for I/O; if that cannot be had, [`protect`] says so.
pub fn protect_thread() {
    let _ = forebay::host::protect::io_flusher();
}

/// Holds nobody's mounts from now on, where devices of that kind are served. Before the first thread.
pub fn leave_mounts(kind: Kind) {
    // What FUSE mounts must be seen.
    if kind != Kind::Fuse
        && let Err(error) = forebay::host::namespace::leave_mounts()
    {
        tracing::info!("keeps its mount namespace: {error}");
    }
}

/// What keeps a process alive that the kernel waits for. Before the first thread of those that serve.
pub fn protect() {
    let failed = forebay::host::protect::protect();
    let failed: Vec<String> =
        failed.iter().map(|failed| format!("{failed} ({})", failed.source)).collect();
    if !failed.is_empty() {
        tracing::warn!("when memory is short: {}", failed.join("; "));
    }
}
