// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where others come in: looked at before any volume is changed, and listened to when all that are there are served.
//!
//! # Invariants
//!
//! - **L1** Every address could be had before a volume is recorded or a cache is marked stale: a start that nobody could reach changes
//!   nothing.
//! - **L2** Nobody is let in before he could be answered: who finds nobody comes again, and who waits for an answer may hold up a whole
//!   machine.
//! - **L3** A start that fails leaves no socket behind that it has made.

use super::{Daemon, unix_sockets};
use crate::args::{Listen, MetricsAddress, ServeArgs};
use crate::sockets::Probe;
use crate::vhost;
use anyhow::{Result, bail};
use forebay::host::runtime_dir::RuntimeDir;
use forebay::shard::uuid_text;
use std::path::{Path, PathBuf};

/// Addresses that are chosen by what the cache says.
pub(super) struct Addresses {
    pub(super) control: PathBuf,
    pub(super) machines: Vec<vhost::Named>,
    /// What stands against other sockets for virtual machines.
    pub(super) problems: Vec<String>,
}

impl Daemon {
    /// Refuses addresses that cannot be had (L1).
    pub(super) fn check_addresses(&self, args: &ServeArgs) -> Result<Addresses> {
        let (machines, problems) = vhost::named(args, &self.names(args))?;
        if let Some(text) = problems.first().filter(|_| args.is_typed()) {
            bail!("{text}");
        }
        let control = match &args.control {
            Some(path) => path.clone(),
            None => {
                let uuid = uuid_text(&self.server.shard.superblock().uuid);
                RuntimeDir::open()?.path().join(format!("{uuid}.sock"))
            }
        };
        check_once(args, &control)?;
        let mut probe = Probe::default();
        unix_sockets(args).try_for_each(|path| probe.unix(&path))?;
        for listen in &args.listen {
            if let Listen::Tcp(address) = listen {
                probe.tcp(address, &format!("nbd://{address}"))?;
            }
        }
        if let Some(MetricsAddress::Tcp(address)) = &args.metrics {
            probe.tcp(address, &format!("--metrics {address}"))?;
        }
        probe.unix(&control)?;
        Ok(Addresses { control, machines, problems })
    }

    /// Of all volumes that are recorded or asked for.
    pub(super) fn names<'a>(&'a self, args: &'a ServeArgs) -> Vec<&'a str> {
        let recorded = self.server.shard.superblock().volumes.iter().flatten();
        let asked = args.volumes.iter().map(|spec| spec.name.as_str());
        let mut names: Vec<&str> = recorded.map(|it| it.name.as_str()).chain(asked).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// Refuses an address that two are to have: the second would find the first there, and take it for another daemon's.
fn check_once(args: &ServeArgs, control: &Path) -> Result<()> {
    let endpoints = args.endpoints(Some(control));
    for (at, (option, endpoint)) in endpoints.iter().enumerate() {
        if let Some((before, _)) = endpoints[..at].iter().find(|it| it.1 == *endpoint) {
            bail!("{endpoint}: is given twice, by --{before} and --{option}; each needs its own");
        }
    }
    Ok(())
}
