// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a start is to serve: every volume that is asked for or recorded, and whether it can be served from the device that was found
//! for it (`searching`), before anything is changed of any.

use super::Daemon;
use super::look::Looked;
use super::stale::Others;
use crate::address::Address;
use crate::args::{IfChanged, ServeArgs, VolumeSpec};
use crate::late::Patience;
use crate::state_dir::{Known, Why};
use crate::upgrade;
use crate::upgrade::OtherDisk;
use anyhow::{Error, Result};
use forebay::io::FileDevice;
use forebay::shard::OpenError;
use forebay_core::format::superblock::Volume;
use forebay_core::units::VolumeIndex;
use std::path::PathBuf;

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

    /// What is waited for, with its role.
    pub(super) fn device(&self) -> Option<(PathBuf, String)> {
        Some((self.address().ok()?.path.clone(), role(&self.name)))
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
    pub(super) fn is_known(&self) -> bool {
        // The program before says what it is.
        self.recorded.is_some() || upgrade::is_executed()
    }

    pub(super) fn may_be_missing(&self, args: &ServeArgs) -> bool {
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

/// A volume that nothing stands against.
pub(super) enum Ready<'a> {
    /// The program before had it.
    HandedOver(PathBuf, FileDevice),
    Recorded(Looked),
    New(&'a VolumeSpec, Looked),
}

impl Ready<'_> {
    pub(super) fn known(&self) -> Known {
        match self {
            Ready::HandedOver(path, _) => Known::of(path),
            Ready::Recorded(looked) | Ready::New(_, looked) => looked.known.clone(),
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

    /// Whether it can be served from what was found. `taken`: the devices of others.
    pub(super) fn check_found<'a>(
        &self,
        planned: &Planned<'a>,
        looked: Looked,
        taken: &[(String, Known)],
    ) -> Result<Ready<'a>> {
        let wanted = &planned.wanted;
        self.check_not_taken(&looked, taken)?;
        match (planned.spec, &planned.recorded) {
            (Some(spec), None) => {
                self.check_new(spec, wanted.without_cache, &looked, taken)?;
                Ok(Ready::New(spec, looked))
            }
            _ => {
                self.check_recorded(planned.index()?, wanted, &looked, taken)?;
                Ok(Ready::Recorded(looked))
            }
        }
    }
}

pub(super) fn role(volume: &str) -> String {
    format!("backing device of {volume}")
}
