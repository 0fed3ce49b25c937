// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The volumes: each gets its backing device if that is the one it was.

use super::look::Looked;
use super::rates::Rates;
use super::{Daemon, Served};
use crate::address::Address;
use crate::args::{IfChanged, ServeArgs, Setting, VolumeSpec, mode_name, parse_setting};
use crate::attach::Kind;
use crate::late::Patience;
use crate::state_dir::Why;
use crate::units::{clock, size};
use crate::upgrade::OtherDisk;
use crate::{backing, hide, upgrade};
use anyhow::{Context, Error, Result, bail};
use forebay::host::identity::{Fingerprint, Match, SuperblockKinds};
use forebay::host::named::Named;
use forebay::io::Device;
use forebay::shard::{NewVolume, backing_source, uuid_text};
use forebay_core::format::superblock::{Mode, Volume};
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::VolumeIndex;
use std::path::Path;
use tracing::{info, warn};

impl Daemon {
    /// Gives every recorded volume its backing device, and adds what is new.
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
        self.reserve_as_asked(&args.volumes)?;
        for spec in &args.volumes {
            let Some(index) = self.server.shard.find(&spec.name) else {
                match self.add(spec, args.is_without_cache(&spec.name), patience) {
                    Ok(()) => {}
                    Err(error) if may_wait(args, &spec.name, &error) => {
                        self.waits(&spec.name, &error)
                    }
                    Err(error) => return Err(error),
                }
                continue;
            };
            let wanted = Wanted {
                address: &spec.backing,
                logical_block: spec.logical_block,
                if_changed: args.if_changed(&spec.name),
                without_cache: args.is_without_cache(&spec.name),
            };
            match self.attach(index, &wanted, patience) {
                Ok(()) => self.set_as_asked(index, spec, spec.mode)?,
                Err(error) if may_wait(args, &spec.name, &error) => self.waits(&spec.name, &error),
                Err(error) => return Err(error),
            }
        }
        let recorded = self.server.shard.superblock().volumes.clone();
        for (at, volume) in recorded.iter().enumerate() {
            let index = VolumeIndex(at as u8);
            let Some(volume) = volume else { continue };
            if args.volumes.iter().any(|spec| spec.name == volume.name) {
                continue;
            }
            let attached = Address::parse(&volume.path).map_err(anyhow::Error::msg);
            let attached = attached.and_then(|address| {
                let wanted = Wanted {
                    address: &address,
                    logical_block: Some(volume.logical_block),
                    if_changed: args.if_changed(&volume.name),
                    without_cache: args.is_without_cache(&volume.name),
                };
                self.attach(index, &wanted, patience)
            });
            match attached {
                Ok(()) => {}
                Err(error) if must_go_on(&error) => return Err(error),
                Err(error) => self.waits(&volume.name, &error),
            }
        }
        Ok(())
    }

    pub(super) fn set_as_asked(
        &mut self,
        index: VolumeIndex,
        spec: &VolumeSpec,
        mode: Option<Mode>,
    ) -> Result<()> {
        let settings = [
            mode.map(Setting::Mode),
            spec.order.map(Setting::Order),
            spec.cutoff.map(Setting::Cutoff),
            spec.weight.map(Setting::Weight),
            spec.p99_target.map(Setting::P99Target),
            self.reserve_of(spec).map(Setting::Reserve),
        ];
        settings.into_iter().flatten().try_for_each(|setting| self.set_one(index, setting))
    }

    /// What recorded volumes are to have of the cache, all at once: some have more only because others have less.
    pub(super) fn reserve_as_asked(&mut self, specs: &[VolumeSpec]) -> Result<()> {
        let shard = &self.server.shard;
        let asked: Vec<_> = specs
            .iter()
            .filter_map(|spec| Some((shard.find(&spec.name)?, self.reserve_of(spec)?)))
            .collect();
        if !asked.is_empty() {
            self.server.shard.set_reserves(&asked)?;
        }
        Ok(())
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

    /// Changes settings of a volume that is served.
    pub(super) fn set(&mut self, name: &str, settings: &[String]) -> Result<()> {
        let index = self.served(name)?;
        let parsed: Result<Vec<Setting>, String> =
            settings.iter().map(|text| parse_setting(text)).collect();
        if self.cache_path.is_none() {
            bail!("{name}: is served bare: without a cache there is nothing to set");
        }
        let parsed = parsed.map_err(anyhow::Error::msg)?;
        let mut asked: Vec<_> = parsed.into_iter().zip(settings).collect();
        // There may be no room for it: then nothing is changed.
        asked.sort_by_key(|(setting, _)| !matches!(setting, Setting::Reserve(_)));
        for (setting, text) in asked {
            self.set_one(index, setting)?;
            info!("{name}: set {text}");
        }
        Ok(())
    }

    pub(super) fn served(&self, name: &str) -> Result<VolumeIndex> {
        let served = self.volumes.iter().find(|served| served.name == name);
        served.map(|served| served.index).with_context(|| self.not_served(name))
    }

    fn waits(&mut self, name: &str, error: &anyhow::Error) {
        self.problem(format!("{name}: waits for its backing device: {error:#}"));
    }

    /// Serves a recorded volume, if its backing device is the one it was.
    pub(super) fn attach(
        &mut self,
        index: VolumeIndex,
        wanted: &Wanted<'_>,
        patience: &Patience,
    ) -> Result<()> {
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        let path = &patience.find(&wanted.address.path, &role(&recorded.name))?;
        let source = backing_source(index);
        let left = backing::take_left(&recorded.name, path, source, wanted.logical_block)?;
        if let Some(device) = left {
            if self.server.shard.opened().handed_over {
                return self.serve_volume(index, wanted.address, path, device, None);
            }
            // It is looked at as ever.
            drop(device);
        }
        let looked = self.look(index, wanted.logical_block, Some(recorded)).at(path)?;
        self.attach_looked(index, wanted, looked)
    }

    /// Serves a recorded volume whose backing device is open, if that is the one it was.
    pub(super) fn attach_looked(
        &mut self,
        index: VolumeIndex,
        wanted: &Wanted<'_>,
        looked: Looked,
    ) -> Result<()> {
        let recorded = self.recorded(index).context("the volume is recorded")?.clone();
        let Looked { path, device, found } = looked;
        let (path, name) = (&path, &recorded.name);
        let others = self.others(path, name, wanted.without_cache)?;
        let state = self.server.shard.engine().status(index);
        let dirty = state.is_some_and(|status| status.dirty);
        let mark = self.mark_of(&recorded)?;
        let changed = match backing::compare_recorded(&recorded, &found) {
            Match::Changed { what } => what.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        };
        // Nobody has changed it since that was decided (M3 of `stale.rs`).
        let is_kept = mark.is_some_and(|mark| mark.is_kept) && changed.is_empty();
        let if_changed = wanted.if_changed.or(is_kept.then_some(IfChanged::KeepDirty));
        let marked = mark.map(|mark| format!("it {} since {}", mark.why.text(), clock(mark.since)));
        let what: Vec<String> = marked.into_iter().chain(changed).collect();
        let what = (!what.is_empty()).then(|| what.join(", "));
        if let Some(what) = &what
            && dirty
            && if_changed.is_none()
        {
            bail!(
                "{}: was changed by others since forebay stopped ({what}), and the cache holds \
                 newer data for volume {name}; give --if-changed {name}=keep-dirty or \
                 {name}=lose-dirty (`forebay attach`: keep-dirty or lose-dirty alone)",
                path.display(),
            );
        }
        self.pass(others, path, name)?;
        match (what, if_changed) {
            (None, _) => {}
            (Some(what), Some(IfChanged::KeepDirty)) if dirty => {
                warn!(
                    "{name}: backing device changed ({what}); dirty data is kept, and nothing else"
                );
                // The log has the rest still: whoever opens it before it is drained drops that again.
                if !is_kept {
                    let why = mark.map_or(Why::Changed, |mark| mark.why);
                    self.note_kept(&recorded, path, why)?;
                }
                self.server.shard.forget_clean(index);
            }
            (Some(what), _) => {
                warn!("{name}: backing device changed ({what}); starts empty");
                self.server.shard.forget_data(index)?;
            }
        }
        self.serve_volume(index, wanted.address, path, device, Some(found))
    }

    pub(super) fn add(
        &mut self,
        spec: &VolumeSpec,
        without_cache: bool,
        patience: &Patience,
    ) -> Result<()> {
        let index = self.server.shard.free_index()?;
        let path = patience.find(&spec.backing.path, &role(&spec.name))?;
        upgrade::check_disk(&spec.name, &path)?;
        let looked = self.look(index, spec.logical_block, None).at(&path)?;
        self.add_looked(index, spec, without_cache, looked)
    }

    /// A new volume, whose backing device is open.
    pub(super) fn add_looked(
        &mut self,
        index: VolumeIndex,
        spec: &VolumeSpec,
        without_cache: bool,
        looked: Looked,
    ) -> Result<()> {
        let Looked { path: backing, device, found } = looked;
        let backing = &backing;
        let others = self.others(backing, &spec.name, without_cache)?;
        let info = device.info().clone();
        let size_bytes = info.size_bytes / 512 * 512;
        spec.backing.path.to_str().context("the backing device's path is not UTF-8")?;
        let volume = NewVolume {
            name: spec.name.clone(),
            size_bytes,
            logical_block: info.logical_block,
            mode: self.mode_of(spec)?,
            reserve: self.reserve_of(spec).unwrap_or_default(),
            path: lasting(&spec.backing)?.to_string(),
            fingerprint: found.without_content().encode(),
        };
        self.server.shard.check_new(&volume)?;
        self.pass(others, backing, &spec.name)?;
        self.server.shard.add(index, &volume)?;
        self.set_as_asked(index, spec, None)?;
        self.serve_volume(index, &spec.backing, backing, device, Some(found))
    }

    /// Without a cache there is one mode only.
    fn mode_of(&self, spec: &VolumeSpec) -> Result<Mode> {
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
        let is_text = address.path.to_str().is_some();
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
            self.hide_from_others(&recorded, path);
            self.note_known(&recorded, path);
        }
        self.server.shard.serve_on(index, device, address.disk(path));
        let rates = Rates::default();
        let backing = std::path::absolute(path)?;
        let uuid = uuid_text(&recorded.uuid);
        self.volumes.push(Served { index, name: recorded.name, uuid, backing, stats, rates });
        let others = self.disk_mates(index);
        if !others.is_empty() {
            info!(
                "{}: shares its disk with {}",
                self.volumes[self.volumes.len() - 1].name,
                others.join(", ")
            );
        }
        self.tell_larger(self.volumes.len() - 1);
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
    pub(super) fn hide_from_others(&self, recorded: &Volume, device: &Path) {
        let cache = uuid_text(&self.server.shard.superblock().uuid);
        if let Err(error) = hide::record(device, &cache, &recorded.name) {
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

/// A file says what is to be; what of it can be is served. Who types a volume means it, unless it was served until just now.
fn may_wait(args: &ServeArgs, volume: &str, error: &Error) -> bool {
    !must_go_on(error) && (args.is_from_file() || upgrade::was_served(volume))
}

/// Then the program before goes on, whose path may be another.
fn must_go_on(error: &Error) -> bool {
    upgrade::is_tried() && error.is::<OtherDisk>()
}

/// A backing device as it is asked for.
pub(super) struct Wanted<'a> {
    pub(super) address: &'a Address,
    pub(super) logical_block: Option<u32>,
    pub(super) if_changed: Option<IfChanged>,
    pub(super) without_cache: bool,
}

/// As it was at the last clean close.
fn is_physical_volume(recorded: &Volume) -> bool {
    Fingerprint::decode(&recorded.fingerprint)
        .is_ok_and(|known| known.superblock_kinds.contains(SuperblockKinds::LVM))
}

pub(super) fn role(volume: &str) -> String {
    format!("backing device of {volume}")
}

/// What is recorded, to be found by next time: an identity as it is, a path from the root.
fn lasting(address: &Address) -> Result<Address> {
    match Named::parse(&address.path)? {
        Named::Path(_) => Ok(address.absolute()?),
        _ => Ok(address.clone()),
    }
}
