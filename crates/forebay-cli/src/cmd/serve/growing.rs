// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay resize`: a volume becomes as large as its backing device is now.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | asked | grown | a last block that was there in part is on the backing device; the superblock says the new size |
//! | grown | told | the front ends have seen it: the kernel may send requests beyond the old end |
//! | told | done | the kernel has made the block device larger, or cannot |

use super::volumes::check_size;
use super::{Daemon, Served};
use crate::control::Reply;
use crate::units::{count, size};
use anyhow::{Context, Result, bail};
use forebay::io::DeviceKind;
use forebay_core::units::{BLOCK_BYTES, Sequence, VolumeIndex};
use forebay_disk::Model;
use std::time::{Duration, Instant};
use tracing::{info, warn};

const SECTOR_BYTES: u64 = 512;
/// How long nothing may be written back that the last block waits for, and then how long the kernel may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A volume that grows.
pub(super) struct Growing {
    /// Who waits for the answer.
    client: usize,
    index: VolumeIndex,
    name: String,
    before: u64,
    /// On the backing device so far.
    watermark: Option<Sequence>,
    /// When that moved last, or the step began.
    since: Instant,
    step: Step,
}

impl Growing {
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

#[derive(Clone, Copy)]
enum Step {
    Asked,
    Grown,
    Told,
}

impl Daemon {
    /// Looks whether a volume can grow, and begins. The answer comes when it has.
    pub(super) fn begin_to_grow(&mut self, name: &str, client: usize) -> Result<()> {
        if let Some(other) = &self.growing {
            bail!("{}: is being made larger; one at a time", other.name);
        }
        self.check_stays().with_context(|| format!("{name}: stays as large as it is"))?;
        if self.leaving.as_ref().is_some_and(|it| it.is(name)) {
            bail!("{name}: stays as large as it is: it is being detached");
        }
        let index = self.served(name)?;
        let shard = &mut self.server.shard;
        let measured = shard.measure(index);
        let before = shard.engine().volume_bytes(index).context("it is served")?;
        let served = self.volumes.iter().find(|served| served.index == index);
        let backing = served.context("it is served")?.backing.display().to_string();
        let measured = measured.with_context(|| format!("{backing}: cannot be measured"))?;
        let after = self.usable(index, measured, before);
        if after < before {
            bail!(self.shrunk(index, name, &backing, (before, after)));
        }
        let has_device = self.attached.iter().any(|attached| attached.has_device(index));
        if after == before && has_device {
            // It may have stayed smaller.
            let (name, since, watermark) = (name.to_owned(), Instant::now(), None);
            let step = Step::Grown;
            self.growing = Some(Growing { client, index, name, before, watermark, since, step });
            return Ok(());
        }
        if after == before {
            let lines = vec![format!("{name}: has {before} bytes, as {backing} has")];
            self.desk.borrow_mut().answers.push_back((client, Reply::Told { lines }));
            return Ok(());
        }
        check_size(&backing, after)?;
        self.check_records(name)?;
        let shard = &mut self.server.shard;
        // One that was ready, and could not be recorded then, is tried again.
        if shard.engine().growth(index).is_none() {
            shard.begin_to_grow(index, after);
        }
        let (name, since) = (name.to_owned(), Instant::now());
        let (watermark, step) = (None, Step::Asked);
        self.growing = Some(Growing { client, index, name, before, watermark, since, step });
        Ok(())
    }

    /// Why a volume does not shrink, and what to do.
    fn shrunk(
        &self,
        index: VolumeIndex,
        name: &str,
        backing: &str,
        (before, after): (u64, u64),
    ) -> String {
        let status = self.server.shard.engine().status(index);
        let missing = size(before - after);
        let dirty = match status.filter(|status| status.dirty) {
            Some(status) => format!(
                "; {} of the volume are not on it yet, and what of that lies there never can be",
                size(status.dirty_blocks * BLOCK_BYTES)
            ),
            None => String::new(),
        };
        format!(
            "{name}: a volume does not shrink: {backing} has {after} bytes, and the volume {before}, so its last \
             {missing} are gone{dirty}; make {backing} as large as before, or, if nothing there is needed: `forebay \
             detach {name}`, then `forebay attach {name}={backing}`"
        )
    }

    /// Goes on with a volume that grows.
    pub(super) fn grow(&mut self) {
        let Some(growing) = &mut self.growing else { return };
        let watermark = self.server.shard.engine().durable_watermark(growing.index);
        if std::mem::replace(&mut growing.watermark, watermark) != watermark {
            growing.since = Instant::now();
        }
        let (index, step, late) = (growing.index, growing.step, growing.since.elapsed() > PATIENCE);
        let done = match step {
            Step::Asked => match self.try_to_grow(index, late) {
                Ok(true) => return self.go_on(Step::Grown),
                Ok(false) => return,
                Err(text) => Err(text),
            },
            Step::Grown => {
                // A turn of the front ends has come since.
                let bytes = self.server.shard.engine().volume_bytes(index).unwrap_or(0);
                for attached in &mut self.attached {
                    attached.resize(index, bytes);
                }
                return self.go_on(Step::Told);
            }
            Step::Told if late || !self.attached.iter().any(|it| it.is_resizing()) => Ok(()),
            Step::Told => return,
        };
        let Some(growing) = self.growing.take() else { return };
        let reply = match done {
            Ok(()) => Reply::Told { lines: self.grown(&growing) },
            Err(text) => {
                let text = format!("{}: not made larger: {text}", growing.name);
                warn!("{text}");
                Reply::Error { text }
            }
        };
        self.desk.borrow_mut().answers.push_back((growing.client, reply));
    }

    fn go_on(&mut self, step: Step) {
        if let Some(growing) = &mut self.growing {
            (growing.step, growing.since) = (step, Instant::now());
        }
    }

    /// Says whether the volume is larger now.
    fn try_to_grow(&mut self, index: VolumeIndex, late: bool) -> Result<bool, String> {
        let shard = &mut self.server.shard;
        if shard.grow(index).map_err(|error| error.to_string())? {
            self.export_again(index);
            return Ok(true);
        }
        if shard.engine().growth(index).is_none() {
            return Err("the cache device has failed".into());
        }
        if late && shard.cancel_growth(index) {
            return Err(
                "its last block, which is there in part, cannot be written back, or is lost; `forebay status` \
                 tells more"
                    .into(),
            );
        }
        Ok(false)
    }

    /// NBD clients that come from now on see the new size.
    fn export_again(&mut self, index: VolumeIndex) {
        let Some(at) = self.volumes.iter().position(|served| served.index == index) else { return };
        self.exports.borrow_mut().retain(|export| export.1 != index);
        if let Err(error) = self.export(at) {
            self.problem(format!("{error:#}"));
        }
        let larger = larger(&self.volumes[at]);
        self.problems.retain(|problem| !problem.starts_with(&larger));
        let (backing, recorded) = (self.volumes[at].backing.clone(), self.recorded(index).cloned());
        if let Some(recorded) = recorded.filter(|_| self.cache_path.is_some()) {
            self.hide_from_others(&recorded, &backing);
        }
    }

    /// It is larger: what a user should know.
    fn grown(&mut self, growing: &Growing) -> Vec<String> {
        let Growing { index, name, before, .. } = growing;
        let after = self.server.shard.engine().volume_bytes(*index).unwrap_or(0);
        let mut lines = Vec::new();
        if after == *before {
            let served = self.volumes.iter().find(|served| served.index == *index);
            let backing = served.map_or_else(String::new, |it| it.backing.display().to_string());
            lines.push(format!("{name}: has {before} bytes, as {backing} has"));
        } else {
            info!("{name}: has {after} bytes now, {before} before");
            if let Some(at) = self.volumes.iter().position(|served| served.index == *index) {
                self.tell_beyond_model(at);
            }
            lines.push(format!("{name}: {} now, {} before", size(after), size(*before)));
        }
        for attached in &mut self.attached {
            lines.extend(attached.resized(*index));
        }
        let clients = self.nbd_clients.as_ref().map_or(0, |it| it[usize::from(index.0)].get());
        if clients > 0 {
            let clients = count(clients.into(), "NBD client");
            lines.push(format!("{name}: {clients} will see it after connecting again"));
        }
        let machines = self.machines.iter().flat_map(|it| it.of(*index));
        lines.extend(machines.map(|(path, is_connected)| match is_connected {
            true => format!("{path}: the virtual machine was told"),
            false => format!("{path}: a virtual machine hears of it when it connects"),
        }));
        lines
    }

    /// The daemon is being stopped: nothing grows any more.
    pub(super) fn stop_growing(&mut self) {
        let Some(growing) = self.growing.take() else { return };
        self.server.shard.cancel_growth(growing.index);
        let text = match growing.step {
            Step::Asked => "not made larger: the daemon is being stopped",
            Step::Grown | Step::Told => {
                "its block device may not be larger yet: the daemon is being stopped"
            }
        };
        let text = format!("{}: {text}", growing.name);
        self.desk.borrow_mut().answers.push_back((growing.client, Reply::Error { text }));
    }

    /// Looks whether the backing device of a volume has become larger while it was served. A block device says so at once; a file may
    /// be where asking takes as long as a network lets it, and whoever made it longer knows.
    pub(super) fn look_for_growth(&mut self, at: usize) {
        let served = &self.volumes[at];
        let (index, larger) = (served.index, larger(served));
        let shard = &mut self.server.shard;
        let is_block =
            shard.backing(index).is_some_and(|device| device.info().kind == DeviceKind::Block);
        let is_told = self.problems.iter().any(|problem| problem.starts_with(&larger));
        let grows = self.growing.as_ref().is_some_and(|growing| growing.index == index);
        // One that cannot be asked fails at what guests ask for, and that is told.
        if is_block && !is_told && !grows && shard.measure(index).is_ok() {
            self.tell_larger(at);
        }
    }

    /// What a volume can have of so many bytes: whole blocks of its own, and no less than it has if that is there.
    fn usable(&self, index: VolumeIndex, bytes: u64, before: u64) -> u64 {
        let block = self.recorded(index).map_or(SECTOR_BYTES, |it| u64::from(it.logical_block));
        let whole = bytes / block * block;
        if bytes >= before { whole.max(before) } else { whole }
    }

    /// Says so if the backing device of a volume has become larger.
    pub(super) fn tell_larger(&mut self, at: usize) {
        let served = &self.volumes[at];
        let shard = &self.server.shard;
        let bytes = shard.backing(served.index).map_or(0, |device| device.info().size_bytes);
        let before = shard.engine().volume_bytes(served.index).unwrap_or(bytes);
        let after = self.usable(served.index, bytes, before);
        if after > before {
            let (larger, name) = (larger(served), &served.name);
            self.problem(format!(
                "{larger}: {after} bytes, and the volume has {before}; `forebay resize {name}` makes it as large"
            ));
        }
    }

    /// Says so if a volume goes on behind the end of the disk whose times it has.
    pub(super) fn tell_beyond_model(&self, at: usize) {
        let Served { index, name, address, .. } = &self.volumes[at];
        let has = self.server.shard.engine().volume_bytes(*index).unwrap_or(0);
        if let Some(end) = address.model().and_then(Model::size_bytes).filter(|end| *end < has) {
            warn!(
                "{name}: has {}, and the simulated disk {}: what is behind its end takes the times of its last sector, which are too short; \
                 give it a device of {end} bytes at most to measure by",
                size(has),
                size(end)
            );
        }
    }
}

fn larger(served: &Served) -> String {
    format!("{}: {} has become larger", served.name, served.backing.display())
}
