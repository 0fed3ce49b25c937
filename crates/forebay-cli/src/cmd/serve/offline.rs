// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Draining a cache that nobody serves.

use super::opening::Opened;
use super::{DURABLE, Daemon};
use crate::args::{Args, Command, ServeArgs};
use crate::backing::Held;
use crate::cmd::drain::{Progress, serve_first};
use crate::config;
use crate::late::Patience;
use crate::quoted;
use anyhow::{Result, anyhow, bail};
use clap::Parser;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// What the kernel calls a process of this program.
const OWN_NAME: &str = "forebay";

/// `forebay drain --cache`: opens the cache, drains, and closes it; nobody is served.
pub fn drain_offline(
    cache: &Path,
    name: Option<&str>,
    state_dir: Option<&Path>,
) -> Result<ExitCode> {
    let opened =
        Opened::open(Some(cache.to_owned())).map_err(|error| match error.downcast_ref() {
            Some(Held { holder, .. }) if holder.name == OWN_NAME => anyhow!(
                "{}: is being served by {holder}; `forebay drain` without --cache drains it",
                cache.display()
            ),
            _ => error,
        })?;
    let state_dir = config::state_dir_of(cache, &opened.uuid(), state_dir)?;
    let mut given =
        vec!["forebay".into(), "serve".into(), "--cache".into(), cache.as_os_str().to_owned()];
    if let Some(path) = &state_dir {
        given.extend(["--state-dir".into(), path.as_os_str().to_owned()]);
    }
    let Command::Serve(args) = Args::parse_from(given).command else {
        unreachable!("the words above are a serve");
    };
    opened.check_none_left()?;
    let mut daemon = Daemon::open(opened, &args, None)?;
    let drained = daemon.drain_to_the_end(&args, cache, name);
    // However that went, the next start finds the cache closed.
    let closed = daemon.close(DURABLE);
    drained?;
    closed?;
    Ok(ExitCode::SUCCESS)
}

impl Daemon {
    fn drain_to_the_end(
        &mut self,
        args: &ServeArgs,
        cache: &Path,
        name: Option<&str>,
    ) -> Result<()> {
        self.add_volumes(args, &Patience::none())?;
        if let Some(name) = name.filter(|name| self.volumes.iter().all(|it| it.name != *name)) {
            if self.server.shard.find(name).is_some() {
                bail!(
                    "{name}: cannot be drained; the log above says why; {}",
                    serve_first(cache, name)
                );
            }
            bail!(
                "{name}: no such volume in this cache; `forebay inspect {} volumes` lists them",
                quoted::shell(cache)
            );
        }
        self.drain(name)?;
        let mut progress = Progress::of_cache(cache);
        while !progress.show(&self.status(), name)? {
            self.server.turn(Some(Duration::from_millis(100)))?;
        }
        Ok(())
    }
}
