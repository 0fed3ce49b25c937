// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay attach`: a volume comes while others are served.

use super::Daemon;
use super::volumes::Wanted;
use crate::address::Address;
use crate::args::{parse_if_changed, parse_volume};
use crate::late::Patience;
use crate::units::count;
use anyhow::{Context, Error, Result, bail};

impl Daemon {
    /// Serves one more volume, and says what a user should know of it.
    pub(super) fn come(
        &mut self,
        volume: &str,
        if_changed: Option<&str>,
        without_cache: bool,
    ) -> Result<Vec<String>> {
        let name = volume.split_once('=').map_or(volume, |(name, _)| name);
        if self.volumes.iter().any(|served| served.name == name) {
            bail!("{name}: is served already");
        }
        if self.is_ending {
            bail!("{name}: not attached: the daemon is being stopped");
        }
        let choice = |choice: &str| parse_if_changed(&format!("{name}={choice}"));
        let if_changed = if_changed.map(choice).transpose().map_err(Error::msg)?;
        let if_changed = if_changed.map(|choice| choice.1);
        let spec = volume.contains('=').then(|| parse_volume(volume)).transpose();
        match (spec.map_err(Error::msg)?, self.server.shard.find(name)) {
            // It waited for its backing device.
            (Some(spec), Some(index)) => {
                self.reserve_as_asked(std::slice::from_ref(&spec))?;
                let (address, logical_block) = (&spec.backing, spec.logical_block);
                let wanted = Wanted { address, logical_block, if_changed, without_cache };
                self.attach(index, &wanted, &Patience::none())?;
                self.set_as_asked(index, &spec, spec.mode)?;
            }
            (Some(spec), None) => {
                self.find_room()?;
                self.add(&spec, without_cache, &Patience::none())?;
            }
            (None, Some(index)) => {
                let known = self.recorded(index).context("it is recorded")?.clone();
                let address = Address::parse(&known.path).map_err(Error::msg)?;
                let logical_block = Some(known.logical_block);
                let wanted = Wanted { address: &address, logical_block, if_changed, without_cache };
                self.attach(index, &wanted, &Patience::none())?;
            }
            (None, None) => bail!("{name}: no such volume in this cache; give {name}=BACKING"),
        }
        // What it waited for is there.
        let waited = format!("{name}: waits for its backing device: ");
        self.problems.retain(|problem| !problem.starts_with(&waited));
        let at = self.volumes.len() - 1;
        self.export(at)?;
        let mut lines = self.addresses(name);
        lines.extend(self.come_with_device(at));
        Ok(lines)
    }

    /// It is served, with or without a block device.
    fn come_with_device(&mut self, at: usize) -> Option<String> {
        let (kind, index) = (self.devices?, self.volumes[at].index);
        match self.attach_device(index, kind) {
            Ok(()) => self.attached.iter().find_map(|it| it.text(index)),
            Err(error) => {
                let name = &self.volumes[at].name;
                let text = format!("{name}: not attached by {}: {error:#}", kind.name());
                self.problem(text.clone());
                Some(text)
            }
        }
    }

    fn find_room(&self) -> Result<()> {
        let recorded = self.server.shard.superblock().volumes.iter().flatten().count();
        if recorded >= self.room {
            bail!(
                "memory was taken for {} when the daemon began, and there are as many; serve again with the \
                 new one",
                count(self.room as u64, "volume")
            );
        }
        Ok(())
    }
}
