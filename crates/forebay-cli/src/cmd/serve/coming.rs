// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `forebay attach`, and backing devices that come late (`awaited`): a volume comes while others are served.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | asked | served | a thread has opened and looked at its backing device (`look`), which guests do not wait for |
//! | asked | slow | its start has waited for it, and its device has not answered yet: others come meanwhile |
//! | looked for | slow | a start has looked at its device, which did not answer (`searching`): others are served meanwhile |
//! | asked, slow | refused | it is not the one it was, or somebody has it, or it does not answer |
//! | slow | served | as above |
//! | served | served | it is asked for again, and lacks a socket that it is to have, or a block device whose preparation failed: that is tried again |
//!
//! A block device that failed after its preparation is not tried again, for what it stood on ends by a thread of its own: the next start does that.
//!
//! A thread whose device does not answer cannot be ended. It keeps that device until it does; there are
//! [`SILENT_MAX`] of them at most.

use super::look::{by_another_name, logical_block};
use super::plan::{Planned, Wanted, role};
use super::searching::Found;
use super::upgrading::name_of;
use super::{Daemon, Served};
use crate::address::Address;
use crate::args::{Listen, VolumeSpec, parse_if_changed, parse_volume};
use crate::asking::Asking;
use crate::control::Reply;
use crate::late::{ANSWER_MAX, Patience};
use crate::sockets::Made;
use crate::units::count;
use crate::vhost;
use anyhow::{Context, Error, Result, anyhow, bail};
use forebay::shard::OpenError;
use forebay_core::units::VolumeIndex;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a backing device may take to be opened and looked at: longer than a lock is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Devices that were to be attached and do not answer, before no more are.
const SILENT_MAX: usize = 8;

/// A volume on its way in.
pub(super) struct Coming {
    /// Who waits for the answer; none: it was awaited.
    client: Option<usize>,
    name: String,
    index: VolumeIndex,
    address: Address,
    wanted: Wanted,
    /// As it is asked for, now or at the start; none: as it is recorded.
    spec: Option<VolumeSpec>,
    /// What was said of it now, beyond its name.
    said: Option<String>,
    begun: Instant,
    /// How it is waited for if it turns out not to be there.
    late: Option<(Instant, Duration)>,
    looks: Asking<Result<Found>>,
}

/// A thread that waits for a device, or for a driver, and cannot be ended.
pub(super) struct Silent {
    device: Option<PathBuf>,
    /// A user asked for it.
    is_asked: bool,
    is_over: Box<dyn Fn() -> bool + Send>,
}

impl Silent {
    pub(super) fn new<T: Send + 'static>(device: Option<PathBuf>, thread: Asking<T>) -> Silent {
        Silent { device, is_asked: false, is_over: Box::new(thread.let_go()) }
    }

    pub(super) fn is_over(&self) -> bool {
        (self.is_over)()
    }

    /// The device, if it has not answered yet.
    pub(super) fn device(&self) -> Option<PathBuf> {
        self.device.clone().filter(|_| !self.is_over())
    }
}

impl Coming {
    /// One that a start has begun to look at. `late`: since when it is waited for if it is not there, and how long.
    pub(super) fn slow(
        planned: Planned<'_>,
        late: (Instant, Duration),
        looks: Asking<Result<Found>>,
    ) -> Result<Coming> {
        let (index, address) = (planned.index()?, planned.address()?.clone());
        let Planned { name, wanted, spec, .. } = planned;
        let (client, spec, said) = (None, spec.cloned(), None);
        let (begun, late) = (Instant::now(), Some(late));
        Ok(Coming { client, name, index, address, wanted, spec, said, begun, late, looks })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its start has waited for it.
    pub(super) fn is_late(&self) -> bool {
        self.client.is_none()
    }

    /// Its device, if that has not answered for as long as one may take.
    pub(super) fn silent_device(&self) -> Option<PathBuf> {
        let is_silent = !self.looks.is_over() && self.begun.elapsed() >= ANSWER_MAX;
        is_silent.then(|| self.address.path.clone())
    }

    fn is_due(&self) -> bool {
        self.looks.is_over() || self.begun.elapsed() >= PATIENCE
    }
}

impl Daemon {
    /// Somebody asks for a volume. The answer comes when it is served.
    pub(super) fn attach(
        &mut self,
        volume: &str,
        if_changed: Option<&str>,
        without_cache: bool,
        client: usize,
    ) -> Result<()> {
        let choice = |choice: &str| parse_if_changed(&format!("{}={choice}", name_of(volume)));
        let if_changed = if_changed.map(choice).transpose().map_err(Error::msg)?;
        let if_changed = if_changed.map(|choice| choice.1);
        if let Some(at) = self.volumes.iter().position(|served| served.name == volume) {
            let lines = self.complete(at)?;
            self.desk.borrow_mut().answers.push_back((client, Reply::Told { lines }));
            return Ok(());
        }
        self.begin_to_come(volume, Wanted { if_changed, without_cache }, Some(client))
    }

    /// Looks whether a volume may come, and begins.
    pub(super) fn begin_to_come(
        &mut self,
        volume: &str,
        wanted: Wanted,
        client: Option<usize>,
    ) -> Result<()> {
        let name = name_of(volume);
        if self.volumes.iter().any(|served| served.name == name) {
            bail!(
                "{name}: is served already; `forebay detach {name}` lets it go, or choose another name"
            );
        }
        let slow = self.slow.iter().find(|other| other.name == name);
        if let Some(other) = self.coming.as_ref().or(slow) {
            bail!("{}: is being attached; one at a time", other.name);
        }
        self.check_stays().with_context(|| format!("{name}: not attached"))?;
        let silent = self.silent.iter().filter(|it| it.is_asked).count();
        if client.is_some() && silent >= SILENT_MAX {
            bail!(
                "{name}: not attached: {} were to be attached and do not answer; `dmesg` may say what is wrong with them",
                count(silent as u64, "backing device")
            );
        }
        let said = volume.contains('=').then(|| volume.to_owned());
        let spec = match &said {
            Some(text) => Some(parse_volume(text).map_err(Error::msg)?),
            None => self.asked.iter().find(|spec| spec.name == name).cloned(),
        };
        let recorded = self.server.shard.find(name);
        let recorded = recorded.and_then(|index| Some((index, self.recorded(index)?.clone())));
        let asked = spec.as_ref().and_then(|spec| spec.logical_block);
        let logical_block = logical_block(name, asked, recorded.as_ref().map(|it| &it.1))?;
        let address = match (&spec, &recorded) {
            (Some(spec), _) => spec.backing.clone(),
            (None, Some((_, known))) => Address::parse(&known.path).map_err(Error::msg)?,
            (None, None) => bail!("{name}: no such volume in this cache; give {name}=BACKING"),
        };
        let (index, recorded) = match recorded {
            // It waited for its backing device.
            Some((index, known)) => (index, Some(known)),
            None => {
                self.check_sockets(name)?;
                self.find_room()?;
                let is_free = |index: &VolumeIndex| self.slow.iter().all(|it| it.index != *index);
                let mut free = self.server.shard.free_indexes().filter(is_free);
                (free.next().ok_or(OpenError::TooManyVolumes)?, None)
            }
        };
        let is_known = recorded.is_some();
        let look = self.look(index, logical_block, recorded, &[]);
        let (named, role, shown) = (address.path.clone(), role(name), name.to_owned());
        // Where it was given, that is what to look at.
        let is_recorded = said.is_none();
        let looks = Asking::begin("look", move || {
            let patience = Patience::none();
            let found = match is_known {
                true => patience.find(&named, &role),
                false => patience.find_new(&named, &role),
            };
            let found = found.and_then(|path| look.at(&path)).map(Found::Looked);
            // Devices are read for it.
            let advice = || match is_recorded {
                true => by_another_name(&shown, &named),
                false => String::new(),
            };
            found.map_err(|error| anyhow!("{error:#}{}", advice()))
        })?;
        let (name, begun, late) = (name.to_owned(), Instant::now(), None);
        self.coming =
            Some(Coming { client, name, index, address, wanted, spec, said, begun, late, looks });
        Ok(())
    }

    /// Goes on with volumes that are on their way in.
    pub(super) fn come(&mut self) {
        // What they have found in the end is nobody's.
        self.silent.retain(|it| !it.is_over());
        // It would wait for them, with all guests.
        while self.notes.are_written()
            && let Some(coming) = self.take_due()
        {
            self.end_coming(coming);
        }
        // Who waits for an answer has asked for one thing at a time.
        let is_slow = |it: &mut Coming| it.is_late() && it.begun.elapsed() >= ANSWER_MAX;
        self.slow.extend(self.coming.take_if(is_slow));
    }

    fn take_due(&mut self) -> Option<Coming> {
        let slow = self.slow.iter().position(Coming::is_due);
        let coming = self.coming.take_if(|it| it.is_due());
        coming.or_else(|| slow.map(|at| self.slow.remove(at)))
    }

    fn end_coming(&mut self, coming: Coming) {
        let (client, name) = (coming.client, coming.name.clone());
        let reply = match (self.serve_coming(coming), client) {
            (Ok(_), None) => {
                let served = self.volumes.iter().filter(|served| served.name == name);
                for line in served.flat_map(|served| self.lines(served)) {
                    announce!("{line}");
                }
                None
            }
            (Err(error), None) => {
                self.comes_not(&name, &format!("{error:#}"));
                None
            }
            (Ok(lines), Some(client)) => Some((client, Reply::Told { lines })),
            (Err(error), Some(client)) => {
                Some((client, Reply::Error { text: format!("{error:#}") }))
            }
        };
        self.desk.borrow_mut().answers.extend(reply);
        self.tell_ready();
    }

    /// Nothing comes any more.
    pub(super) fn stop_coming(&mut self, why: &str) {
        self.slow.clear();
        let Some(coming) = self.coming.take() else { return };
        let text = format!("{}: not attached: {why}", coming.name);
        let reply = coming.client.map(|client| (client, Reply::Error { text }));
        self.desk.borrow_mut().answers.extend(reply);
    }

    /// Serves one more volume, and says what a user should know of it.
    fn serve_coming(&mut self, coming: Coming) -> Result<Vec<String>> {
        let Coming { client, name, index, address, wanted, spec, said, late, looks, .. } = coming;
        if !looks.is_over() {
            let silent = Silent::new(Some(address.path.clone()), looks);
            self.silent.push(Silent { is_asked: client.is_some(), ..silent });
            bail!("{name}: not attached: {} does not answer", address.path.display());
        }
        let looked = match (looks.result()?, late) {
            (Found::Looked(looked), _) => looked,
            // It was silent, and is not there: it may still come.
            (_, Some(late)) => {
                self.await_path(name, address.path, wanted, late);
                return Ok(Vec::new());
            }
            (_, None) => bail!("{}: the {} is not there", address.path.display(), role(&name)),
        };
        self.check_stays().with_context(|| format!("{name}: not attached"))?;
        self.check_not_taken(&looked, &[])?;
        match spec {
            Some(spec) if self.server.shard.find(&name).is_none() => {
                let others = self.check_new(&spec, wanted.without_cache, &looked, &[])?;
                self.add_checked(index, &spec, looked, others)?;
                self.set_as_asked(index, &spec, true)?;
            }
            spec => {
                let verdict = self.check_recorded(index, &wanted, &looked, &[])?;
                match self.reserve_as_asked(spec.as_slice()) {
                    Err(error) if said.is_some() => return Err(error),
                    // As at a start.
                    Err(error) => self.reserves_kept(&error),
                    Ok(()) => {}
                }
                self.serve_checked(index, &address, looked, verdict)?;
                if let Some(spec) = spec {
                    self.set_as_asked(index, &spec, false)?;
                }
            }
        }
        self.came.retain(|text| name_of(text) != name);
        self.gone.retain(|gone| *gone != name);
        self.came.extend(said);
        // What it waited for is there.
        self.waits_no_more(&name);
        self.awaited.forget(&name);
        let at = self.volumes.len() - 1;
        self.export(at)?;
        let sockets = self.come_with_sockets(&name);
        let mut lines = self.lines(&self.volumes[at]);
        lines.extend(sockets.err());
        lines.extend(self.come_with_device(at).unwrap_or_else(Some));
        self.tell_manager();
        Ok(lines)
    }

    /// A volume that is served is given what it was to have and could not when it came.
    fn complete(&mut self, at: usize) -> Result<Vec<String>> {
        let Served { index, name, .. } = &self.volumes[at];
        let (index, name) = (*index, name.clone());
        if self.leaving.as_ref().is_some_and(|it| it.is(&name)) {
            bail!("{name}: is being detached");
        }
        let has_device = || self.attached.iter().any(|it| it.is_for(index));
        let lacks_device = self.devices.is_some() && !has_device();
        let lacks_socket = self.machines_waiting.iter().any(|it| it.1 == name);
        if !lacks_device && !lacks_socket {
            bail!("{name}: is served already");
        }
        self.check_stays().with_context(|| format!("{name}: not attached"))?;
        let heard = if lacks_socket { self.come_with_sockets(&name) } else { Ok(()) };
        let device = if lacks_device { self.come_with_device(at) } else { Ok(None) };
        self.tell_manager();
        let mut lines = self.lines(&self.volumes[at]);
        lines.extend(device.map_err(Error::msg)?);
        heard.map_err(Error::msg)?;
        Ok(lines)
    }

    /// Virtual machines find it where they were to find it at the start. Gives what is said of it if they do not.
    fn come_with_sockets(&mut self, name: &str) -> Result<(), String> {
        let (its, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.machines_waiting).into_iter().partition(|it| it.1 == name);
        self.machines_waiting = others;
        let texts: Vec<String> = its.iter().map(|it| vhost::waiting_text(&it.0, name)).collect();
        let not_heard = format!("{name}: not listened for: ");
        self.problems
            .retain(|problem| !texts.contains(problem) && !problem.starts_with(&not_heard));
        if its.is_empty() {
            return Ok(());
        }
        let mut made = Made::default();
        let heard = self.listen_for_machines(its.clone(), &mut made);
        // Who comes now is not to wait for the next turn.
        match heard.and_then(|()| Ok(self.server.turn(Some(Duration::ZERO))?)) {
            Ok(()) => {
                made.keep();
                Ok(())
            }
            Err(error) => {
                self.machines_waiting.extend(its);
                let text = format!("{not_heard}{error:#}");
                self.problem(text.clone());
                Err(text)
            }
        }
    }

    /// It is served, with or without a block device. Gives what is said of it.
    fn come_with_device(&mut self, at: usize) -> Result<Option<String>, String> {
        let Some(kind) = self.devices else { return Ok(None) };
        let (index, name) = (self.volumes[at].index, &self.volumes[at].name);
        let not_attached = format!("{name}: not attached by {}: ", kind.name());
        self.problems.retain(|problem| !problem.starts_with(&not_attached));
        match self.attach_device(index, kind) {
            Ok(()) => Ok(self.attached.iter().find_map(|it| it.text(index))),
            Err(error) => {
                let text = format!("{not_attached}{error:#}");
                self.problem(text.clone());
                Err(text)
            }
        }
    }

    /// A socket that names no volume is that of the only one there is: the next start would not know whose it is.
    fn check_sockets(&self, name: &str) -> Result<()> {
        let nameless = self.listen.iter().find_map(|listen| match listen {
            Listen::VhostUser { path, volume: None } => Some(path.display()),
            _ => None,
        });
        let recorded = self.server.shard.superblock().volumes.iter().flatten().next();
        match (nameless, recorded) {
            // Asked for already: that changes nothing.
            _ if self.asked.iter().any(|spec| spec.name == name) => Ok(()),
            (Some(path), Some(only)) => bail!(
                "{name}: not attached: vhost-user://{path} names no volume, and the next start would not know which of the two is meant; \
                 serve again with vhost-user://{path}?volume={}",
                only.name
            ),
            _ => Ok(()),
        }
    }

    fn find_room(&self) -> Result<()> {
        let recorded = self.server.shard.superblock().volumes.iter().flatten().count();
        let is_new = |it: &&Coming| self.server.shard.find(&it.name).is_none();
        let coming = self.slow.iter().filter(is_new).count();
        if recorded + coming >= self.room {
            bail!(
                "memory was taken for {} when the daemon began, and there are as many; serve again with the \
                 new one",
                count(self.room as u64, "volume")
            );
        }
        Ok(())
    }
}
