// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay detach`: a volume leaves while others are served.
//!
//! # States
//!
//! | from   | to     | when |
//! |--------|--------|------|
//! | served | device | all of it is on its backing device, nobody is connected to it |
//! | device | rest   | nobody held its block device, and that is gone; else it is served as before |
//! | rest   | gone   | nothing of it is under way; the superblock does not name it any more |

use super::Daemon;
use super::fate::Fate;
use super::upgrading::name_of;
use crate::args::Listen;
use crate::cmd::detach::in_use;
use crate::control::Reply;
use crate::hide;
use crate::units::size;
use anyhow::{Context, Result, bail};
use forebay::shard::uuid_text;
use forebay_core::control::VolumeStatus;
use forebay_core::engine::CacheHealth;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long what is under way may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A volume on its way out.
pub(super) struct Leaving {
    /// Who waits for the answer.
    client: usize,
    index: VolumeIndex,
    name: String,
    begun: Instant,
}

impl Leaving {
    pub(super) fn is(&self, name: &str) -> bool {
        self.name == name
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// What stands against it that blocks are lost.
fn lost(status: &VolumeStatus) -> String {
    format!(
        "{} of its newest data are lost, and only the cache knows which: reads fail there until it is written again; \
         without the cache they would give old data",
        size(status.lost_blocks_now * BLOCK_BYTES)
    )
}

impl Daemon {
    /// Looks whether a volume may go, and begins. The answer comes when it is gone.
    pub(super) fn begin_to_leave(&mut self, name: &str, client: usize) -> Result<()> {
        if let Some(other) = &self.leaving {
            bail!("{}: is being detached; one at a time", other.name);
        }
        self.check_stays().with_context(|| format!("{name}: not detached"))?;
        if self.growing.is_some() {
            bail!(
                "{name}: not detached while a volume is made larger; try again when it is (`forebay status`)"
            );
        }
        let index = self.find_leaving(name)?;
        self.look_at_files();
        let has_cache = self.cache_path.is_some();
        let removed = self.fate_of(index).filter(|it| it.is_removed());
        if let Some(text) = removed.and_then(|it| it.gone_text(name, has_cache)) {
            bail!("{name}: not detached: {text}");
        }
        // Where that cannot begin the volume is served as before.
        for attached in &mut self.attached {
            attached.try_release(index).with_context(|| format!("{name}: not detached"))?;
        }
        self.exports.borrow_mut().retain(|export| export.1 != index);
        info!("{name}: is being detached");
        let name = name.to_owned();
        self.leaving = Some(Leaving { client, index, name, begun: Instant::now() });
        Ok(())
    }

    /// The volume, if nothing stands against its going.
    fn find_leaving(&self, name: &str) -> Result<VolumeIndex> {
        let shard = &self.server.shard;
        let Some(served) = self.volumes.iter().find(|served| served.name == name) else {
            if shard.find(name).is_some() {
                bail!(
                    "{name}: waits for its backing device; `forebay forget` takes it out of a cache that \
                     nobody serves"
                );
            }
            bail!(self.not_served(name));
        };
        let index = served.index;
        if shard.engine().health() == CacheHealth::Failed {
            bail!(
                "{name}: the cache device has failed, so nothing can be taken out of it; `forebay status` says what to do"
            );
        }
        if let Some(status) = shard.engine().status(index) {
            if status.frozen {
                bail!(
                    "{name}: is frozen: dirty data is lost and cannot be named; stop the daemon, and give it up \
                     with `forebay forget --lose-dirty`"
                );
            }
            if status.dirty {
                let dirty = size(status.dirty_blocks * BLOCK_BYTES);
                let backing = served.backing.display();
                bail!("{name}: {dirty} are not on {backing} yet; drain it first");
            }
            if status.lost_blocks_now > 0 {
                bail!("{name}: {}", lost(&status));
            }
        }
        // Also one that was not listened at, since the volume came later: the next start would look for it.
        let machine = self.listen.iter().find_map(|listen| match listen {
            Listen::VhostUser { path, volume: Some(named) } if named == name => {
                Some(path.display().to_string())
            }
            _ => None,
        });
        let mut bound = self.machines.iter().flat_map(|it| it.of(index));
        let machine = machine.or_else(|| bound.next().map(|it| it.0));
        let clients = self.nbd_clients.as_ref().map_or(0, |it| it[usize::from(index.0)].get());
        if let Some(text) = in_use(name, clients, machine.as_deref()) {
            bail!(text);
        }
        Ok(index)
    }

    /// Goes on with a volume that is on its way out.
    pub(super) fn leave(&mut self) {
        let Some(Leaving { client, index, begun, .. }) = self.leaving else { return };
        let refusal = match self.notes.check() {
            // To remove what is noted of it would be to wait for them, with all guests.
            Ok(()) if !self.notes.are_written() => {
                self.leaving.iter_mut().for_each(|leaving| leaving.begun = Instant::now());
                return;
            }
            Ok(()) => self.attached.iter_mut().find_map(|attached| attached.take_refusal()),
            Err(error) => Some(error.to_string()),
        };
        let reply = match refusal {
            Some(text) => Err(text),
            None if self.attached.iter().any(|attached| attached.has_device(index)) => return,
            None => match self.server.shard.detach(index) {
                Ok(true) => Ok(self.left(index)),
                Ok(false) => match self.lost_of(index) {
                    // Its last batch has found them.
                    Some(text) => Err(text),
                    None if begun.elapsed() < PATIENCE => return,
                    None => Err("what is under way does not end".into()),
                },
                Err(error) => Err(error.to_string()),
            },
        };
        let leaving = self.leaving.take();
        let reply = match reply {
            Ok(lines) => Reply::Told { lines },
            Err(text) => {
                let name = leaving.map(|it| it.name).unwrap_or_default();
                let text = format!("{name}: not detached: {text}");
                warn!("{text}");
                self.stay(index);
                Reply::Error { text }
            }
        };
        self.desk.borrow_mut().answers.push_back((client, reply));
    }

    /// What is lost of a volume, if anything is.
    fn lost_of(&self, index: VolumeIndex) -> Option<String> {
        let status = self.server.shard.engine().status(index)?;
        (status.lost_blocks_now > 0).then(|| lost(&status))
    }

    /// The daemon has stopped: its block device is gone with the others'.
    pub(super) fn stop_leaving(&mut self) {
        let Some(Leaving { client, name, .. }) = self.leaving.take() else { return };
        let text = format!("{name}: not detached: the daemon is being stopped");
        self.desk.borrow_mut().answers.push_back((client, Reply::Error { text }));
    }

    /// It is served as before, but perhaps without its block device.
    fn stay(&mut self, index: VolumeIndex) {
        self.server.shard.serve_again(index);
        let Some(at) = self.volumes.iter().position(|served| served.index == index) else { return };
        if let Err(error) = self.export(at) {
            self.problem(format!("{error:#}"));
        }
    }

    /// It is gone: what a user should know.
    fn left(&mut self, index: VolumeIndex) -> Vec<String> {
        let Some(at) = self.volumes.iter().position(|served| served.index == index) else {
            return Vec::new();
        };
        let served = self.volumes.remove(at);
        self.attached.iter_mut().for_each(|attached| attached.forget(index));
        self.forget_known(&served.uuid);
        self.watch_left(at);
        self.came.retain(|text| name_of(text) != served.name);
        self.gone.push(served.name.clone());
        let its_own = format!("{}: ", served.name);
        self.problems.retain(|problem| !problem.starts_with(&its_own));
        let (name, backing) = (served.name, served.backing.display());
        info!("{name}: is detached");
        let not_plain = served.fate.as_ref().and_then(Fate::not_plain);
        let mut lines = vec![match not_plain {
            None => format!("{name}: detached; {backing} is the plain disk"),
            Some(text) => format!("{name}: detached, but {text}"),
        }];
        let cache = uuid_text(&self.server.shard.superblock().uuid);
        if let Err(error) = hide::erase(&cache, &name) {
            lines.push(format!("{error:#}"));
        }
        if self.config_file.is_some() {
            let file = "the next start attaches it again if it is in the configuration";
            lines.push(format!("{name}: {file}"));
        }
        lines
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use crate::attach::Attached;
    use crate::cmd::serve::opening::Opened;
    use crate::late::Patience;
    use clap::Parser;

    /// Its block device could not begin to go, and NBD clients did not find it any more, though it had not left.
    #[test]
    fn a_volume_that_cannot_begin_to_leave_is_served_as_before() {
        let dir = std::env::temp_dir().join(format!("forebay-leaving-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::File::create(dir.join("disk")).unwrap().set_len(1 << 20).unwrap();
        let volume = format!("v={}", dir.join("disk").display());
        let state = dir.join("state").display().to_string();
        let words = ["forebay", "serve", "--attach", "none", "--volume", &volume];
        let args = Args::parse_from(words.into_iter().chain(["--state-dir", &state]));
        let Command::Serve(args) = args.command else { panic!("it was a serve") };
        let mut daemon = Daemon::open(Opened::open(None).unwrap(), &args, None).unwrap();
        daemon.add_volumes(&args, &Patience::none()).unwrap();
        daemon.export(0).unwrap();
        daemon.attached.push(Attached::that_cannot_go(daemon.volumes[0].index));
        let error = daemon.begin_to_leave("v", 0).unwrap_err();
        assert_eq!(format!("{error:#}"), "v: not detached: cannot start a thread: out of memory");
        assert!(daemon.leaving.is_none());
        assert_eq!(daemon.exports.borrow().len(), 1);
        daemon.close(Duration::ZERO).unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }
}
