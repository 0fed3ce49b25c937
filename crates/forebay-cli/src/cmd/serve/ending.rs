// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end: everything durable, and what is not on which disk.

use super::Daemon;
use crate::backing;
use crate::units::{clock, size};
use anyhow::{Context, Result, bail};
use forebay_core::units::BLOCK_BYTES;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::{info, warn};

impl Daemon {
    /// Whether this daemon can go on as that program.
    pub(super) fn check_upgrade(&self, executable: &Path) -> Result<()> {
        let shown = executable.display();
        let found = executable.metadata().with_context(|| format!("{shown}: cannot be read"))?;
        let may_run = found.permissions().mode() & 0o111 != 0;
        if !(executable.is_absolute() && found.is_file() && may_run) {
            bail!("{shown}: expected the absolute path of a program");
        }
        match self.attached.iter().find(|attached| !attached.outlive()) {
            Some(attached) => bail!(
                "block devices by {} end with the process (those of --attach ublk do not); use \
                 `forebay stop`, and serve with the new program",
                attached.kind().name()
            ),
            None => Ok(()),
        }
    }

    /// Stops taking work, makes everything durable, and says what is not on which disk.
    pub(super) fn end(
        mut self,
        limit: Duration,
        control: &Path,
        sockets: impl Iterator<Item = PathBuf>,
    ) -> Result<()> {
        // The one who asked to stop hears that it was understood.
        self.server.turn(Some(Duration::ZERO))?;
        self.watch_ends();
        self.close(limit)?;
        for path in sockets.chain([control.to_owned()]) {
            // A socket that somebody else has removed is gone, too.
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    pub(super) fn close(self, limit: Duration) -> Result<()> {
        let cache = self.cache_text();
        let Daemon { server, volumes, .. } = self;
        let mut shard = server.stop(Duration::from_secs(5))?;
        // Only then is a fingerprint of what a backing device goes on with: a batch may have been under way.
        let quiet = shard.quiesce(limit)?;
        for served in &volumes {
            if let Some(device) = shard.backing(served.index) {
                let found = backing::fingerprint(device, &served.backing)?.encode();
                shard.note(served.index, |volume| volume.fingerprint = found);
            }
        }
        let left: Vec<String> = volumes
            .iter()
            .filter_map(|served| {
                let status = shard.engine().status(served.index).filter(|it| it.dirty)?;
                let backing = served.backing.display();
                Some(format!(
                    "{}: {} not yet on {backing}, whose content is of {}. Do not mount {backing}. \
                     To get it plain: forebay drain --cache {cache}",
                    served.name,
                    size(status.dirty_blocks * BLOCK_BYTES),
                    clock(status.backing_as_of)
                ))
            })
            .collect();
        let clean = quiet && shard.finish()?;
        for text in left {
            warn!("{text}");
        }
        if clean {
            info!("stopped: everything is durable");
        } else {
            warn!("not everything could be made durable; the next start recovers it");
        }
        Ok(())
    }
}
