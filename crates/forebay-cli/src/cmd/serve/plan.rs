// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a start is to serve: every volume that is asked for or recorded, with its backing device open and looked at, before
//! anything is changed of any.

use super::Daemon;
use super::look::{Looked, logical_block};
use super::stale::Others;
use crate::address::Address;
use crate::args::{IfChanged, ServeArgs, VolumeSpec};
use crate::attach::Kind;
use crate::attach::left::LeftDevice;
use crate::late::{self, Patience};
use crate::state_dir::Why;
use crate::upgrade::OtherDisk;
use crate::{backing, upgrade};
use anyhow::{Error, Result};
use forebay::io::FileDevice;
use forebay::shard::{OpenError, backing_source};
use forebay_core::format::superblock::Volume;
use forebay_core::units::VolumeIndex;
use std::path::{Path, PathBuf};

/// A volume that is to be served.
pub(super) struct Planned<'a> {
    pub(super) name: String,
    /// None: there is no place for one more.
    index: Option<VolumeIndex>,
    /// As it is asked for.
    pub(super) spec: Option<&'a VolumeSpec>,
    /// As it is known; none: it is new.
    pub(super) recorded: Option<Volume>,
    address: Result<Address, String>,
    pub(super) wanted: Wanted,
}

impl Planned<'_> {
    pub(super) fn index(&self) -> Result<VolumeIndex, OpenError> {
        self.index.ok_or(OpenError::TooManyVolumes)
    }

    pub(super) fn address(&self) -> Result<&Address> {
        self.address.as_ref().map_err(|text| Error::msg(text.clone()))
    }

    /// What is said of its backing device if that has not come.
    pub(super) fn missing(&self, patience: &Patience) -> Error {
        match self.address() {
            Ok(address) => patience.missing(&address.path, &role(&self.name)),
            Err(error) => error,
        }
    }

    /// A file says what is to be; what of it can be is served, as is what was recorded. Who types a volume means it, at a
    /// start; what the program before served, or waited for, does not end the next one.
    pub(super) fn may_wait(&self, args: &ServeArgs, error: &Error) -> bool {
        // Then the program before goes on, whose path may be another.
        let must_go_on = upgrade::is_tried() && error.is::<OtherDisk>();
        !must_go_on && self.may_be_missing(args)
    }

    /// A copy of its disk would be told from it.
    fn is_known(&self) -> bool {
        // The program before says what it is.
        self.recorded.is_some() || upgrade::is_executed()
    }

    fn find(&self, path: &Path) -> Result<Option<PathBuf>> {
        if self.is_known() { late::find(path) } else { late::find_new(path) }
    }

    fn may_be_missing(&self, args: &ServeArgs) -> bool {
        let is_meant = self.spec.is_some() && !args.is_from_file();
        !is_meant || upgrade::is_executed()
    }
}

/// What was said of a recorded volume.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) if_changed: Option<IfChanged>,
    pub(super) without_cache: bool,
}

/// Where a backing device is: every device may be read for that, so it is looked for once.
pub(super) enum Sought {
    Found(PathBuf),
    /// It is not there, and others are served meanwhile.
    Late,
    /// It is waited for, or it is an error that it is not there.
    Needed,
}

/// A volume that nothing stands against.
pub(super) enum Ready<'a> {
    /// The program before had it.
    HandedOver(PathBuf, FileDevice),
    Recorded(Looked),
    New(&'a VolumeSpec, Looked),
}

impl Ready<'_> {
    pub(super) fn path(&self) -> &Path {
        match self {
            Ready::HandedOver(path, _) => path,
            Ready::Recorded(looked) | Ready::New(_, looked) => &looked.path,
        }
    }
}

/// How a recorded volume is to be served.
pub(super) struct Verdict {
    pub(super) others: Others,
    pub(super) change: Change,
}

/// What has become of a backing device, and what becomes of its volume's log.
pub(super) enum Change {
    None,
    /// Dirty data is kept, which is to be written down unless it is.
    Kept {
        what: String,
        note: Option<Why>,
    },
    Dropped {
        what: String,
    },
}

impl Daemon {
    /// Every volume: those asked for, and then those recorded.
    pub(super) fn plan<'a>(&self, args: &'a ServeArgs) -> Vec<Planned<'a>> {
        let shard = &self.server.shard;
        let mut free = shard.free_indexes();
        let wanted = |name: &str| Wanted {
            if_changed: args.if_changed(name),
            without_cache: args.is_without_cache(name),
        };
        let mut planned = Vec::new();
        for spec in &args.volumes {
            let known = shard.find(&spec.name);
            planned.push(Planned {
                name: spec.name.clone(),
                index: known.or_else(|| free.next()),
                spec: Some(spec),
                recorded: known.and_then(|index| self.recorded(index).cloned()),
                address: Ok(spec.backing.clone()),
                wanted: wanted(&spec.name),
            });
        }
        for (at, volume) in shard.superblock().volumes.iter().enumerate() {
            let Some(volume) = volume else { continue };
            if planned.iter().any(|it| it.name == volume.name) {
                continue;
            }
            planned.push(Planned {
                name: volume.name.clone(),
                index: Some(VolumeIndex(at as u8)),
                spec: None,
                recorded: Some(volume.clone()),
                address: Address::parse(&volume.path),
                wanted: wanted(&volume.name),
            });
        }
        planned
    }

    /// Looks for its backing device where others may be served meanwhile. Devices by FUSE + loop that a daemon before has left may
    /// be together in one mount: they go on together.
    pub(super) fn seek(
        &self,
        planned: &Planned<'_>,
        args: &ServeArgs,
        patience: &Patience,
    ) -> Sought {
        let is_fuse = |it: &LeftDevice| it.kind == Kind::Fuse && it.volume == planned.name;
        let is_left = !upgrade::is_executed() && self.left.iter().any(is_fuse);
        let may_come = planned.may_be_missing(args) && !is_left && !patience.late().1.is_zero();
        match planned.address() {
            Ok(address) if may_come => match planned.find(&address.path) {
                Ok(Some(path)) => Sought::Found(path),
                Ok(None) => Sought::Late,
                Err(_) => Sought::Needed,
            },
            _ => Sought::Needed,
        }
    }

    /// Opens its backing device and looks at it. `found`: where that is, if it was looked for. `taken`: those of others.
    pub(super) fn prepare<'a>(
        &self,
        planned: &Planned<'a>,
        found: Option<PathBuf>,
        taken: &[(String, PathBuf)],
        patience: &Patience,
    ) -> Result<Ready<'a>> {
        let Planned { name, wanted, recorded, .. } = planned;
        let index = planned.index()?;
        let asked = planned.spec.and_then(|spec| spec.logical_block);
        let logical_block = logical_block(name, asked, recorded.as_ref())?;
        let find = || {
            let (path, role) = (&planned.address()?.path, role(name));
            match planned.is_known() {
                true => patience.find(path, &role),
                false => patience.find_new(path, &role),
            }
        };
        let path = &found.map_or_else(find, Ok)?;
        if planned.recorded.is_some() {
            let source = backing_source(index);
            let left = backing::take_left(name, path, source, logical_block)?;
            if let Some(device) = left
                && self.server.shard.opened().handed_over
            {
                return Ok(Ready::HandedOver(path.clone(), device));
            }
            // It is looked at as ever.
        } else {
            upgrade::check_disk(name, path)?;
        }
        let looked = self.look(index, logical_block, planned.recorded.clone(), taken).at(path)?;
        match (planned.spec, &planned.recorded) {
            (Some(spec), None) => {
                self.check_new(spec, wanted.without_cache, &looked, taken)?;
                Ok(Ready::New(spec, looked))
            }
            _ => {
                self.check_recorded(index, wanted, &looked, taken)?;
                Ok(Ready::Recorded(looked))
            }
        }
    }
}

pub(super) fn role(volume: &str) -> String {
    format!("backing device of {volume}")
}
