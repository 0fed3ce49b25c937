// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening a backing device and looking at it: whatever has to wait for that device before it is served.
//!
//! Nothing of it needs the daemon, so that a device which comes while others are served is looked at by a thread
//! (`coming`): a lock may be waited for, and the device may be slow or never answer.

use super::Daemon;
use crate::backing;
use crate::names;
use crate::quoted;
use crate::state_dir::Known;
use crate::upgrade::OtherDisk;
use anyhow::{Result, bail};
use forebay::host::identity::Fingerprint;
use forebay::host::machine::{Host, Node, Target};
use forebay::host::named::Named;
use forebay::io::{Device, FileDevice};
use forebay::shard::{backing_source, uuid_text};
use forebay_core::format::superblock::Volume;
use forebay_core::units::VolumeIndex;
use std::path::{Path, PathBuf};

/// How many devices one may be made of.
const BENEATH_MAX: usize = 256;

/// What is to be looked for.
pub(super) struct Look {
    source: u16,
    logical_block: Option<u32>,
    /// Of a volume that is known.
    recorded: Option<Volume>,
    cache: Option<PathBuf>,
    /// Of the cache.
    identity: String,
    served: Vec<(String, Known)>,
}

/// A backing device that is ours, and what it is.
pub(super) struct Looked {
    pub(super) path: PathBuf,
    pub(super) known: Known,
    pub(super) device: FileDevice,
    pub(super) found: Fingerprint,
}

/// Bytes of a logical block, if it is known what they are to be. A volume keeps those that it had first: what is on it was made for them.
pub(super) fn logical_block(
    name: &str,
    asked: Option<u32>,
    recorded: Option<&Volume>,
) -> Result<Option<u32>, OtherDisk> {
    let known = recorded.map(|recorded| recorded.logical_block);
    match (asked, known) {
        (Some(asked), Some(known)) if asked != known => Err(OtherDisk(format!(
            "{name}: logical_block={asked}: it has blocks of {known} bytes, which what is on it was made for; leave it out, or \
             drain and forget the volume first"
        ))),
        _ => Ok(known.or(asked)),
    }
}

/// What to do with a volume whose backing device is not where it was.
pub(super) fn by_another_name(name: &str, path: &Path) -> String {
    let found =
        Named::parse(path).is_ok_and(|it| it.find(&Host::default()).is_ok_and(|it| it.is_some()));
    match found {
        true => String::new(),
        false => format!(
            "; if it has another name now, `forebay serve --volume {name}=BACKING` (or `forebay attach {name}=BACKING`) serves it"
        ),
    }
}

impl Daemon {
    /// `taken`: backing devices of volumes that are not served yet.
    pub(super) fn look(
        &self,
        index: VolumeIndex,
        logical_block: Option<u32>,
        recorded: Option<Volume>,
        taken: &[(String, Known)],
    ) -> Look {
        // Nobody asks their devices, which may not answer.
        let served = self.volumes.iter().map(|it| (it.name.clone(), it.known.clone()));
        let served = served.chain(taken.iter().cloned());
        Look {
            source: backing_source(index),
            logical_block,
            recorded,
            cache: self.cache_path.clone(),
            identity: uuid_text(&self.server.shard.superblock().uuid),
            served: served.collect(),
        }
    }

    /// Whether another volume has the device by now: nobody knew that when it was looked at. `taken`: as above.
    pub(super) fn check_not_taken(&self, looked: &Looked, taken: &[(String, Known)]) -> Result<()> {
        let served = self.volumes.iter().map(|it| (&it.name, &it.known));
        check_apart(
            &looked.path,
            &looked.known,
            served.chain(taken.iter().map(|it| (&it.0, &it.1))),
        )
    }
}

impl Look {
    pub(super) fn at(&self, path: &Path) -> Result<Looked> {
        self.check_not_ours(path)?;
        if let Some(cache) = &self.cache {
            backing::check_apart(cache, path)?;
        }
        let known = Known::of(path);
        check_apart(path, &known, self.served.iter().map(|it| (&it.0, &it.1)))?;
        let device = backing::open_exclusive(path, self.source, self.logical_block)?;
        let size_bytes = device.info().size_bytes;
        let found = match &self.recorded {
            Some(recorded) if size_bytes < recorded.size_bytes => bail!(
                "{}: holds {size_bytes} bytes, but volume {} has {}; it was cut, or is another disk",
                path.display(),
                recorded.name,
                recorded.size_bytes
            ),
            Some(recorded) => backing::fingerprint_as_recorded(&device, path, recorded)?,
            None if size_bytes < u64::from(device.info().logical_block) => {
                let what = match size_bytes {
                    0 => "is empty".to_owned(),
                    _ => format!("has {size_bytes} B, less than a block"),
                };
                bail!(
                    "{0}: {what}, so there is nothing to be a volume of; name another, or give it a size (`truncate -s 8G {1}`)",
                    path.display(),
                    quoted::shell(path)
                )
            }
            None => backing::fingerprint(&device, path)?,
        };
        Ok(Looked { path: path.to_owned(), known, device, found })
    }

    /// Nobody answers for what this daemon serves, or is to go on with, while it waits itself.
    fn check_not_ours(&self, path: &Path) -> Result<()> {
        let host = Host::default();
        let Ok(Target::Block { number, .. }) = Target::of(path) else { return Ok(()) };
        let mut unseen: Vec<Node> = host.node(number).into_iter().collect();
        for _ in 0..BENEATH_MAX {
            let Some(node) = unseen.pop() else { break };
            if let Some(name) = names::of(&node).filter(|name| name.cache == self.identity) {
                bail!(
                    "{}: leads to volume {} of this cache, not to what is behind it; name the backing device itself, by its path in /dev/disk/by-id",
                    path.display(),
                    name.volume
                );
            }
            unseen.extend(node.slaves());
            unseen.extend(node.parent());
        }
        Ok(())
    }
}

/// Two volumes on one device would each know nothing of what the other writes.
fn check_apart<'a>(
    path: &Path,
    found: &Known,
    mut others: impl Iterator<Item = (&'a String, &'a Known)>,
) -> Result<()> {
    match others.find(|it| it.1.is_same(found)) {
        Some((other, _)) => {
            bail!(
                "{}: is the backing device of volume {other}; a device can be behind one volume only, name another",
                path.display()
            )
        }
        None => Ok(()),
    }
}
