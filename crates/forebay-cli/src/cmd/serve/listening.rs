// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where others come in: bound before any volume is changed, and listened to when all are served.
//!
//! # Invariants
//!
//! - **L1** Every address can be had before a volume is recorded or a cache is marked stale: a start that nobody could reach changes
//!   nothing.
//! - **L2** A start that fails leaves no socket behind that it has made.

use super::Daemon;
use crate::args::{Listen, ServeArgs};
use crate::sockets::{self, Made};
use crate::{metrics, vhost};
use anyhow::Result;
use forebay::host::runtime_dir::RuntimeDir;
use forebay::shard::uuid_text;
use forebay_serve::nbd::listen::Listener;
use std::path::PathBuf;

/// Sockets, bound.
pub(super) struct Listening {
    pub(super) nbd: Vec<Listener>,
    pub(super) machines: Vec<vhost::Bound>,
    pub(super) metrics: Option<metrics::Listener>,
    /// Where it will be: who asks how things are is told that nobody is there as long as nobody could answer.
    pub(super) control: PathBuf,
    pub(super) made: Made,
}

impl Daemon {
    pub(super) fn bind(&self, args: &ServeArgs) -> Result<Listening> {
        let recorded = self.server.shard.superblock().volumes.iter().flatten();
        let asked = args.volumes.iter().map(|spec| spec.name.as_str());
        let mut names: Vec<&str> = recorded.map(|it| it.name.as_str()).chain(asked).collect();
        names.sort_unstable();
        names.dedup();
        let mut made = Made::default();
        let machines = vhost::bind(args, &names, &mut made)?;
        let nbd = |listen: &Listen| sockets::listen(listen, &mut made).transpose();
        let nbd = args.listen.iter().filter_map(nbd).collect::<Result<_>>()?;
        let metrics = args.metrics.as_ref();
        let metrics = metrics.map(|at| metrics::Listener::bind(at, &mut made)).transpose()?;
        let control = match &args.control {
            Some(path) => path.clone(),
            None => {
                let uuid = uuid_text(&self.server.shard.superblock().uuid);
                RuntimeDir::open()?.path().join(format!("{uuid}.sock"))
            }
        };
        sockets::check(&control)?;
        Ok(Listening { nbd, machines, metrics, control, made })
    }
}
