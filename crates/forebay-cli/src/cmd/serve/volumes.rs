// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The volumes: each gets its backing device if that is the one it was.

use super::fate::Fate;
use super::look::{Looked, by_another_name};
use super::plan::{Change, Planned, Ready, Verdict, Wanted};
use super::rates::Rates;
use super::searching::Searched;
use super::stale::Others;
use super::{Daemon, Mark, Served};
use crate::address::Address;
use crate::args::{IfChanged, ServeArgs, Setting, VolumeSpec, mode_name, parse_setting};
use crate::attach::{Kind, left};
use crate::cmd::set::until_next_start;
use crate::late::Patience;
use crate::state_dir::{Known, Why};
use crate::units::{clock, size};
use crate::upgrade;
use crate::{backing, hide};
use anyhow::{Context, Result, bail};
use forebay::host::identity::{Fingerprint, Match, SuperblockKinds};
use forebay::host::named::Named;
use forebay::io::Device;
use forebay::shard::{NewVolume, uuid_text};
use forebay_core::format::superblock::{Mode, PATH_MAX, Volume};
use forebay_core::limits::VOLUME_BYTES_MAX;
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::{BLOCK_BYTES, VolumeIndex};
use std::fmt::Display;
use std::path::Path;
use tracing::{info, warn};

/// How it is told that what is asked for was not set.
const RESERVES_KEPT: &str = "volumes keep what they had reserved of the cache";

impl Daemon {
    /// Gives every recorded volume its backing device, and adds what is new. All that can be wrong is looked for before anything is
    /// changed: a start that fails is as if it had not been.
    pub(super) fn add_volumes(&mut self, args: &ServeArgs, patience: &Patience) -> Result<()> {
        let known = |name: &String| self.server.shard.find(name).is_some();
        if let Some((name, _)) = args.if_changed.iter().find(|(name, _)| !known(name)) {
            bail!("--if-changed {name}: no such volume in this cache; nothing was changed");
        }
        let asked = |name: &String| args.volumes.iter().any(|spec| spec.name == *name);
        if let Some(name) = args.without_cache.iter().find(|name| !known(name) && !asked(name)) {
            bail!(
                "--without-cache {name}: no such volume is asked for or in this cache; nothing was changed"
            );
        }
        let reserves = self.reserves_that_fit(args)?;
        let Searched { ready, late, silent, .. } = self.search_all(args, patience, &reserves)?;
        for planned in late {
            match ready.is_empty() {
                false => self.await_device(&planned, patience),
                // Nobody would be served meanwhile.
                true => self.waits(&planned, &planned.missing(patience)),
            }
        }
        for search in silent {
            match ready.is_empty() {
                false => self.comes_slowly(search, args, patience)?,
                true => self.gives_up(search, args)?,
            }
        }
        self.set_reserves(&reserves)?;
        for (planned, found) in ready {
            match self.serve_planned(&planned, found) {
                Ok(()) => {}
                Err(error) if planned.may_wait(args, &error) => {
                    self.waits(&planned, &error);
                    continue;
                }
                Err(error) => return Err(error),
            }
            if let Some(spec) = planned.spec {
                self.set_as_asked(planned.index()?, spec, planned.recorded.is_none())?;
            }
        }
        Ok(())
    }

    /// What is new has room besides what is asked for and `new`, which it is then part of.
    pub(super) fn check_room_for<'a>(
        &self,
        found: Ready<'a>,
        reserves: &[(VolumeIndex, Reserve)],
        new: &mut Vec<Reserve>,
    ) -> Result<Ready<'a>> {
        if let Ready::New(spec, _) = found {
            new.push(self.reserve_of(spec).unwrap_or_default());
            if let Err(error) = self.server.shard.check_room(reserves, new) {
                new.pop();
                return Err(error.into());
            }
        }
        Ok(found)
    }

    fn serve_planned(&mut self, planned: &Planned<'_>, ready: Ready<'_>) -> Result<()> {
        let (index, address, wanted) = (planned.index()?, planned.address()?, &planned.wanted);
        // What was found is judged again: those before it may have marked the cache stale for it.
        match ready {
            Ready::New(spec, looked) => {
                let others = self.check_new(spec, wanted.without_cache, &looked, &[])?;
                self.add_checked(index, spec, looked, others)
            }
            Ready::HandedOver(path, device) => {
                self.serve_volume(index, address, &path, device, None)
            }
            Ready::Recorded(looked) => {
                let verdict = self.check_recorded(index, wanted, &looked, &[])?;
                self.serve_checked(index, address, looked, verdict)
            }
        }
    }

    /// What recorded volumes are asked to have of the cache. What a file says, or was said to the program before, does not end this one
    /// where there is no room for it: then they keep what is recorded.
    fn reserves_that_fit(&mut self, args: &ServeArgs) -> Result<Vec<(VolumeIndex, Reserve)>> {
        let reserves = self.reserves_asked(&args.volumes);
        match self.server.shard.check_room(&reserves, &[]) {
            Ok(()) => Ok(reserves),
            Err(error) if args.is_typed() => Err(error.into()),
            Err(error) => {
                self.reserves_kept(&error.into());
                Ok(Vec::new())
            }
        }
    }

    /// What they have stays as it is recorded.
    pub(super) fn reserves_kept(&mut self, error: &anyhow::Error) {
        self.problem(format!("{RESERVES_KEPT}, since what is asked for has no room: {error:#}"));
    }

    /// Sets what is asked for, but for what is set already: what volumes have of the cache, all at once. The mode of one that is
    /// drained ends that; but not behind an upgrade, at which nobody asks for anything that was not asked before.
    pub(super) fn set_as_asked(
        &mut self,
        index: VolumeIndex,
        spec: &VolumeSpec,
        is_new: bool,
    ) -> Result<()> {
        let recorded = self.recorded(index).cloned();
        let is_set = |setting: &Setting| match setting {
            Setting::Reserve(_) => true,
            Setting::Mode(mode) => {
                let has = recorded.as_ref().is_some_and(|it| it.mode == *mode);
                is_new || has && upgrade::is_executed()
            }
            _ => false,
        };
        let left: Vec<Setting> = spec.settings().filter(|it| !is_set(it)).collect();
        for setting in left {
            if let (Setting::Mode(mode), Some(Volume { name, drained: true, .. })) =
                (setting, &recorded)
            {
                info!("{name}: is to be {} now, so it is drained no more", mode_name(mode));
            }
            self.set_one(index, setting)?;
        }
        Ok(())
    }

    /// What recorded volumes are to have of the cache, all at once: some have more only because others have less.
    pub(super) fn reserve_as_asked(&mut self, specs: &[VolumeSpec]) -> Result<()> {
        self.set_reserves(&self.reserves_asked(specs))
    }

    fn set_reserves(&mut self, asked: &[(VolumeIndex, Reserve)]) -> Result<()> {
        if !asked.is_empty() {
            self.server.shard.set_reserves(asked)?;
        }
        Ok(())
    }

    /// Of volumes that are recorded.
    pub(super) fn reserves_asked(&self, specs: &[VolumeSpec]) -> Vec<(VolumeIndex, Reserve)> {
        let of =
            |spec: &VolumeSpec| Some((self.server.shard.find(&spec.name)?, self.reserve_of(spec)?));
        specs.iter().filter_map(of).collect()
    }

    /// Without a cache there is nothing to have of it.
    fn reserve_of(&self, spec: &VolumeSpec) -> Option<Reserve> {
        spec.reserve.filter(|_| self.cache_path.is_some())
    }

    /// Changes a setting, now and in the superblock.
    fn set_one(&mut self, index: VolumeIndex, setting: Setting) -> Result<()> {
        let shard = &mut self.server.shard;
        match setting {
            Setting::Mode(mode) => shard.set_mode(index, mode)?,
            Setting::Order(order) => shard.set_order(index, order)?,
            Setting::Cutoff(cutoff) => shard.set_cutoff(index, cutoff)?,
            Setting::Weight(weight) => shard.set_weight(index, weight)?,
            Setting::P99Target(micros) => shard.set_p99_target(index, micros)?,
            Setting::Reserve(reserve) => shard.set_reserves(&[(index, reserve)])?,
        }
        Ok(())
    }

    /// Changes settings of a volume that is served. Gives what of them the next start undoes.
    pub(super) fn set(&mut self, name: &str, settings: &[String]) -> Result<Vec<String>> {
        let index = self.served(name)?;
        let parsed: Result<Vec<Setting>, String> =
            settings.iter().map(|text| parse_setting(text)).collect();
        if self.cache_path.is_none() {
            bail!(
                "{name}: is served bare, and without a cache there is nothing to set; `serve` with --cache has one"
            );
        }
        let parsed = parsed.map_err(anyhow::Error::msg)?;
        let mut asked: Vec<_> = parsed.into_iter().zip(settings).collect();
        // There may be no room for it: then nothing is changed.
        asked.sort_by_key(|(setting, _)| !matches!(setting, Setting::Reserve(_)));
        let mut undone = Vec::new();
        for (setting, text) in asked {
            self.set_one(index, setting)?;
            info!("{name}: set {text}");
            let asked = self.reserves_asked(&self.asked);
            let has_room = || self.server.shard.check_room(&asked, &[]).is_ok();
            if matches!(setting, Setting::Reserve(_)) && has_room() {
                self.problems.retain(|problem| !problem.starts_with(RESERVES_KEPT));
            }
            if self.asked.iter().any(|spec| spec.name == name && spec.is_against(setting)) {
                let by = match &self.config_file {
                    Some(path) => path.display().to_string(),
                    None => "--volume of this daemon".into(),
                };
                undone.push(until_next_start(name, text, &by));
            }
        }
        Ok(undone)
    }

    pub(super) fn served(&self, name: &str) -> Result<VolumeIndex> {
        let served = self.volumes.iter().find(|served| served.name == name);
        served.map(|served| served.index).with_context(|| self.not_served(name))
    }

    pub(super) fn waits(&mut self, planned: &Planned<'_>, error: &anyhow::Error) {
        let name = &planned.name;
        let advice = planned.address().map_or(String::new(), |it| by_another_name(name, &it.path));
        self.waits_for(name, &format!("{error:#}{advice}"));
    }

    /// Whether a recorded volume can be served from a backing device that is open: if that is the one it was, or was said to count.
    /// Changes nothing.
    pub(super) fn check_recorded(
        &self,
        index: VolumeIndex,
        wanted: &Wanted,
        looked: &Looked,
        taken: &[(String, Known)],
    ) -> Result<Verdict> {
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        let (path, name) = (&looked.path, &recorded.name);
        let others = self.others(path, name, wanted.without_cache, taken)?;
        let state = self.server.shard.engine().status(index);
        let dirty = state.is_some_and(|status| status.dirty);
        let known = self.known_of(&uuid_text(&recorded.uuid))?;
        let mark = known.as_ref().and_then(|known| known.mark_for(recorded.attach_generation));
        let mut changed: Vec<String> = match backing::compare_recorded(&recorded, &looked.found) {
            Match::Changed { what } => what.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        };
        let is_written = |known| Self::is_written_since(&recorded, known, &looked.device);
        if changed.is_empty() && known.as_ref().is_some_and(is_written) {
            changed.push("the file was written to".into());
        }
        // Whether anything is dirty or not.
        if !changed.is_empty()
            && self.left.iter().any(|it| it.volume == *name)
            && let Some(left) = left::of_volume(self.server.shard.superblock(), name)?
        {
            left.check_change(&changed.join(", "), wanted.if_changed)?;
        }
        // Nobody has changed it since that was decided (M3 of `stale.rs`).
        let is_kept = mark.is_some_and(|mark| mark.is_kept) && changed.is_empty();
        let if_changed = wanted.if_changed.or(is_kept.then_some(IfChanged::KeepDirty));
        let marked = mark.map(|mark| match mark.since {
            0 => format!("it {}", mark.why.text()),
            since => format!("it {} since {}", mark.why.text(), clock(since)),
        });
        let what: Vec<String> = marked.into_iter().chain(changed).collect();
        let what = (!what.is_empty()).then(|| what.join(", "));
        if let Some(what) = &what
            && dirty
            && if_changed.is_none()
        {
            let left = known.and_then(|known| known.left_at);
            let left = left.map(|at| format!("; left at {}", clock(at)));
            let written = backing::written_at(&looked.device, path)
                .map(|at| format!("; written last at {}", clock(at)));
            let times = [left, written].into_iter().flatten().collect::<String>();
            bail!(
                "{}: was changed by others since forebay stopped ({what}{times}), and the cache holds \
                 newer data for volume {name}; give --if-changed {name}=keep-dirty or \
                 {name}=lose-dirty (`forebay attach`: keep-dirty or lose-dirty alone)",
                path.display(),
            );
        }
        let change = match (what, if_changed) {
            (None, _) => Change::None,
            (Some(what), Some(IfChanged::KeepDirty)) if dirty => {
                if !is_kept {
                    self.check_notes(name)?;
                }
                let why = mark.map_or(Why::Changed, |mark| mark.why);
                Change::Kept { what, note: (!is_kept).then_some(why) }
            }
            (Some(what), _) => Change::Dropped { what },
        };
        Ok(Verdict { others, change })
    }

    /// Serves it.
    pub(super) fn serve_checked(
        &mut self,
        index: VolumeIndex,
        address: &Address,
        looked: Looked,
        Verdict { others, change }: Verdict,
    ) -> Result<()> {
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        let Looked { path, device, found, .. } = looked;
        let (path, name) = (&path, &recorded.name);
        let passed = self.pass(others, path, name)?;
        match change {
            Change::None => {}
            Change::Kept { what, note } => {
                warn!(
                    "{name}: backing device changed ({what}); dirty data is kept, and nothing else"
                );
                // The log has the rest still: whoever opens it before it is drained drops that again.
                if let Some(why) = note {
                    self.note_kept(&recorded, path, why)?;
                }
                self.server.shard.forget_clean(index);
            }
            Change::Dropped { what } => {
                let status = self.server.shard.engine().status(index).filter(|it| it.dirty);
                let given_up = status.map_or_else(String::new, |status| {
                    let dirty = size(status.dirty_blocks * BLOCK_BYTES);
                    format!(", and {dirty} that were not yet on it are given up")
                });
                let was = match lasting(address)?.to_string() == recorded.path {
                    true => String::new(),
                    false => format!("; it was {}", recorded.path),
                };
                warn!("{name}: backing device changed ({what}{was}); starts empty{given_up}");
                self.server.shard.forget_data(index)?;
            }
        }
        self.serve_volume(index, address, path, device, Some(found))?;
        self.unhide(passed, path);
        Ok(())
    }

    /// Whether a backing device that is open can be that of a new volume. Changes nothing.
    pub(super) fn check_new(
        &self,
        spec: &VolumeSpec,
        without_cache: bool,
        looked: &Looked,
        taken: &[(String, Known)],
    ) -> Result<Others> {
        let others = self.others(&looked.path, &spec.name, without_cache, taken)?;
        self.mode_of(spec)?;
        spec.backing.path.to_str().context("the backing device's path is not UTF-8")?;
        let path = looked.path.display();
        check_size(&path, looked.device.info().size_bytes)?;
        let length = lasting(&spec.backing)?.to_string().len();
        if length > PATH_MAX {
            bail!(
                "{path}: its path has {length} bytes, and a cache keeps {PATH_MAX} of one; give a link that has less"
            );
        }
        Ok(others)
    }

    /// Records a new volume, and serves it.
    pub(super) fn add_checked(
        &mut self,
        index: VolumeIndex,
        spec: &VolumeSpec,
        looked: Looked,
        others: Others,
    ) -> Result<()> {
        let Looked { path: backing, device, found, .. } = looked;
        let backing = &backing;
        let info = device.info().clone();
        let left = info.size_bytes % u64::from(info.logical_block);
        if left > 0 {
            warn!(
                "{}: the last {left} bytes of {} are no whole block of {} and are not part of the volume",
                spec.name,
                backing.display(),
                info.logical_block
            );
        }
        let volume = NewVolume {
            name: spec.name.clone(),
            size_bytes: info.size_bytes - left,
            logical_block: info.logical_block,
            mode: self.mode_of(spec)?,
            reserve: self.reserve_of(spec).unwrap_or_default(),
            path: lasting(&spec.backing)?.to_string(),
            fingerprint: found.without_content().encode(),
        };
        self.server.shard.check_room(&[], &[volume.reserve])?;
        let passed = self.pass(others, backing, &spec.name)?;
        self.server.shard.add(index, &volume)?;
        self.serve_volume(index, &spec.backing, backing, device, Some(found))?;
        self.unhide(passed, backing);
        Ok(())
    }

    /// Without a cache there is one mode only, and nothing else to be set.
    fn mode_of(&self, spec: &VolumeSpec) -> Result<Mode> {
        let is_of_cache = |it: &Setting| !matches!(it, Setting::Mode(_));
        let set = spec.settings().find(is_of_cache).filter(|_| self.cache_path.is_none());
        if let Some(key) = set.map(|it| it.key()) {
            let name = &spec.name;
            bail!(
                "{name}: {key} needs a cache; give --cache, or leave it out to serve the device bare"
            );
        }
        match (&self.cache_path, spec.mode) {
            (Some(_), mode) => Ok(mode.unwrap_or(Mode::WriteBack)),
            (None, None | Some(Mode::WriteAround)) => Ok(Mode::WriteAround),
            (None, Some(mode)) => bail!(
                "{}: mode={} needs a cache; give --cache, or leave the mode out to serve the device bare",
                spec.name,
                mode_name(mode)
            ),
        }
    }

    /// `found`: what the device is, unless that is recorded by the program before.
    fn serve_volume(
        &mut self,
        index: VolumeIndex,
        address: &Address,
        path: &Path,
        mut device: forebay::io::FileDevice,
        found: Option<Fingerprint>,
    ) -> Result<()> {
        if self.devices == Some(Kind::Fuse) {
            // Discards come as zeros there.
            device.zero_by_holes();
        }
        let (device, stats) = backing::counted(backing::timed(device, address));
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        let text = lasting(address)?.to_string();
        // Else what is recorded stays: it is a hint.
        let is_text = address.path.to_str().is_some() && text.len() <= PATH_MAX;
        let as_found = Volume {
            path: if is_text { text.clone() } else { recorded.path.clone() },
            // Before anything is written to it (I2 of `host/identity.rs`).
            fingerprint: found.map_or(recorded.fingerprint, |it| it.without_content().encode()),
            ..recorded.clone()
        };
        if as_found != recorded {
            self.server.shard.record(index, |volume| *volume = as_found)?;
        }
        if self.server.shard.engine().is_frozen(index) {
            let text = format!(
                "{}: is frozen: dirty data is lost and cannot be named; see `forebay check`, and give it up \
                 with `forebay forget --lose-dirty`",
                recorded.name
            );
            self.problem(text);
        }
        let how = if self.cache_path.is_some() { "in front of" } else { "bare, on" };
        info!("{}: served: {} {how} {text}", recorded.name, size(recorded.size_bytes));
        if self.cache_path.is_some() {
            self.note_known(&recorded, path);
            self.hide_from_others(&recorded, path);
        }
        self.server.shard.serve_on(index, device, address.disk(path));
        let rates = Rates::default();
        let backing = std::path::absolute(path)?;
        let uuid = uuid_text(&recorded.uuid);
        let (name, address) = (recorded.name, address.clone());
        let fate = self.server.shard.backing(index).and_then(|device| Fate::of(device, path));
        let drained_at = Mark::default();
        let known = Known::of(path);
        let mut served =
            Served { index, name, uuid, backing, known, address, stats, rates, drained_at, fate };
        served.drains(self.server.shard.engine());
        self.volumes.push(served);
        let others = self.disk_mates(index);
        if !others.is_empty() {
            info!(
                "{}: shares its disk with {}",
                self.volumes[self.volumes.len() - 1].name,
                others.join(", ")
            );
        }
        self.tell_larger(self.volumes.len() - 1);
        self.tell_beyond_model(self.volumes.len() - 1);
        Ok(())
    }
}

impl Daemon {
    /// The volumes that are on the same disk as one.
    pub(super) fn disk_mates(&self, index: VolumeIndex) -> Vec<String> {
        let others = self.server.shard.on_same_disk(index);
        others.filter_map(|other| Some(self.recorded(other)?.name.clone())).collect()
    }

    /// What is on the backing device is on the volume, newer.
    pub(super) fn hide_from_others(&mut self, recorded: &Volume, device: &Path) {
        let (backing, cache, name) = (device.to_owned(), self.cache_uuid(), recorded.name.clone());
        let hidden = self.write_down(move || hide::record(&backing, &cache, &name));
        if let Err(error) = hidden {
            warn!("{}: {error:#}", recorded.name);
        }
        if is_physical_volume(recorded) {
            info!(
                "{}: is a physical volume; to keep LVM's own scans off what is behind it, lvm.conf: devices {{ \
                 global_filter = [ \"r|^{}$|\" ] }}",
                recorded.name,
                hide::lasting_name(device).display()
            );
        }
    }
}

/// As it was at the last clean close.
fn is_physical_volume(recorded: &Volume) -> bool {
    Fingerprint::decode(&recorded.fingerprint)
        .is_ok_and(|known| known.superblock_kinds.contains(SuperblockKinds::LVM))
}

/// Whether a volume may be as large as its backing device.
pub(super) fn check_size(backing: &impl Display, bytes: u64) -> Result<()> {
    if bytes > VOLUME_BYTES_MAX {
        bail!("{backing}: has {}; a volume has less than 2 PiB", size(bytes));
    }
    Ok(())
}

/// What is recorded, to be found by next time: an identity as it is, a path from the root.
fn lasting(address: &Address) -> Result<Address> {
    match Named::parse(&address.path)? {
        Named::Path(_) => Ok(address.absolute()?),
        _ => Ok(address.clone()),
    }
}
