// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where others come in: looked at before any volume is changed, and listened to when all are served.
//!
//! # Invariants
//!
//! - **L1** Every address could be had before a volume is recorded or a cache is marked stale: a start that nobody could reach changes
//!   nothing.
//! - **L2** Nobody is let in before he could be answered: who finds nobody comes again, and who waits for an answer may hold up a whole
//!   machine.
//! - **L3** A start that fails leaves no socket behind that it has made.

use super::Daemon;
use crate::args::{Listen, MetricsAddress, ServeArgs};
use crate::sockets::Probe;
use crate::vhost;
use anyhow::Result;
use forebay::host::runtime_dir::RuntimeDir;
use forebay::shard::uuid_text;
use std::path::PathBuf;

impl Daemon {
    /// Refuses addresses that cannot be had (L1). Gives the control socket's.
    pub(super) fn check_addresses(&self, args: &ServeArgs) -> Result<PathBuf> {
        vhost::named(args, &self.names(args))?;
        // All of them at once: one that is given twice is busy.
        let mut probe = Probe::default();
        for listen in &args.listen {
            match listen {
                Listen::Unix(path) | Listen::VhostUser { path, .. } => probe.unix(path)?,
                Listen::Tcp(address) => probe.tcp(address, &format!("nbd://{address}"))?,
            }
        }
        match &args.metrics {
            Some(MetricsAddress::Unix(path)) => probe.unix(path)?,
            Some(MetricsAddress::Tcp(address)) => {
                probe.tcp(address, &format!("--metrics {address}"))?;
            }
            None => {}
        }
        let control = match &args.control {
            Some(path) => path.clone(),
            None => {
                let uuid = uuid_text(&self.server.shard.superblock().uuid);
                RuntimeDir::open()?.path().join(format!("{uuid}.sock"))
            }
        };
        probe.unix(&control)?;
        Ok(control)
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
