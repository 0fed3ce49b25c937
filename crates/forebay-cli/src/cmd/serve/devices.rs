// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Kernel block devices: made while the loop runs, and given up before it ends.

use super::coming::Silent;
use super::{Daemon, SHORT_TURN, Served, TURN};
use crate::asking::Asking;
use crate::attach::{Attached, Kind, Prepared, Wanted};
use crate::signals::Signals;
use crate::{stored, upgrade};
use anyhow::{Context, Result, bail};
use forebay::shard::uuid_text;
use forebay_core::format::superblock::Volume;
use forebay_core::units::VolumeIndex;
use std::path::Path;
use std::time::{Duration, Instant};
use tracing::warn;

/// How long a driver may take to make a device, or to let go of one whose process is ending: it is given a minute for that itself.
const PREPARE_MAX: Duration = Duration::from_secs(90);
/// How long the first turn waits for a driver: in an upgrade, in which guests wait, it is soon done.
const FIRST_TURN: Duration = Duration::from_micros(100);
/// How long an upgrade waits for the kernel to keep requests back.
const QUIESCE_MAX: Duration = Duration::from_secs(5);
/// How long a stop that waits no more for holders waits for what is under way.
pub(super) const GIVE_UP_MAX: Duration = Duration::from_secs(5);

impl Daemon {
    /// Makes a block device of each volume, or takes those over that a daemon before has left. The program before goes on if that cannot
    /// be done with one of its own (G2).
    pub(super) fn attach_devices(&mut self, kind: Kind) -> Result<()> {
        let wanted = self.volumes.iter().filter_map(|served| self.wanted(served)).collect();
        let cache = uuid_text(&self.server.shard.superblock().uuid);
        for (place, wanted) in kind.groups(&cache, wanted)? {
            self.attach_group(kind, &place, wanted)?;
        }
        match self.left.iter().find_map(|it| self.failure(&it.volume)) {
            Some(text) if upgrade::is_tried() => bail!("{text}"),
            _ => Ok(()),
        }
    }

    /// Why a volume has got no device, if it has none.
    fn failure(&self, name: &str) -> Option<&str> {
        let index = self.volumes.iter().find(|served| served.name == name)?.index;
        self.attached.iter().find_map(|attached| attached.failure(index))
    }

    /// They wait for the program that goes on.
    pub(super) fn leave_devices(&mut self) {
        if let Err(error) = self.quiesce_devices() {
            warn!("{error:#}");
        }
        self.attached.clear();
    }

    /// Makes one of a volume that has come while the others were served.
    pub(super) fn attach_device(&mut self, index: VolumeIndex, kind: Kind) -> Result<()> {
        let served = self.volumes.iter().find(|served| served.index == index);
        let wanted = served.and_then(|served| self.wanted(served)).context("it is served")?;
        let cache = uuid_text(&self.server.shard.superblock().uuid);
        let place = kind.place(&cache, wanted.index, &wanted.name, &wanted.uuid)?;
        self.attach_group(kind, &place, vec![wanted])
    }

    /// What the service manager has given for volumes that wait for their disks, by its names: their devices go on when they come.
    pub(super) fn stored_for_later(&self) -> Vec<String> {
        let superblock = self.server.shard.superblock();
        let cache = uuid_text(&superblock.uuid);
        let waits = |recorded: &Volume| {
            let index = self.server.shard.find(&recorded.name)?;
            let is_served = self.volumes.iter().any(|served| served.index == index);
            let place = Kind::Fuse.place(&cache, index, &recorded.name, &recorded.uuid);
            // In one that it shares nobody is served, if it has not been taken.
            (!is_served).then(|| place.unwrap_or_else(|_| cache.clone()))
        };
        let places = superblock.volumes.iter().flatten().filter_map(waits);
        places.map(|place| stored::of_mount(&place)).collect()
    }

    fn wanted(&self, served: &Served) -> Option<Wanted> {
        let shard = &self.server.shard;
        let recorded = self.recorded(served.index)?;
        Some(Wanted {
            index: served.index,
            uuid: self.lasting_uuid(served, recorded),
            name: served.name.clone(),
            size_bytes: recorded.size_bytes,
            logical_block: recorded.logical_block,
            backing: served.backing.clone(),
            discards: shard.backing(served.index).is_some_and(|it| it.info().discards),
            may_go_straight: shard.may_go_straight(served.index),
        })
    }

    /// Those who are served already wait for no driver, and the kernel reads the devices meanwhile, so the loop runs.
    fn attach_group(&mut self, kind: Kind, place: &str, wanted: Vec<Wanted>) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let prepared = self.prepare_devices(kind, place.to_owned(), wanted)?;
        let cache = uuid_text(&self.server.shard.superblock().uuid);
        let mut attached = prepared.begin(&mut self.server, &cache, &self.nbd_devices)?;
        while !attached.is_ready() && !self.is_signalled() {
            self.turn_for_devices(TURN)?;
            attached.tell_news();
        }
        self.attached.push(attached);
        Ok(())
    }

    fn prepare_devices(
        &mut self,
        kind: Kind,
        place: String,
        wanted: Vec<Wanted>,
    ) -> Result<Prepared> {
        let thread = Asking::begin("prepare", move || kind.prepare(&place, wanted))?;
        let (begun, mut wait) = (Instant::now(), FIRST_TURN);
        while !thread.is_over() {
            let limit = if self.is_signalled() { GIVE_UP_MAX } else { PREPARE_MAX };
            if begun.elapsed() >= limit {
                // What it makes yet is left, as by a process that is killed.
                self.silent.push(Silent::new(None, thread));
                bail!("the driver does not answer");
            }
            self.turn_for_devices(wait)?;
            wait = SHORT_TURN.min(wait * 2);
        }
        thread.result()
    }

    /// A turn of the loop for guests, who may have their devices already: of a daemon before, or of other volumes.
    fn turn_for_devices(&mut self, wait: Duration) -> Result<()> {
        self.server.turn(Some(wait))?;
        self.tell_alive();
        self.mark_stale();
        Ok(())
    }

    /// From now on the kernel keeps requests for the next program, where it can: then nothing is under way when that takes over.
    pub(super) fn quiesce_devices(&mut self) -> Result<()> {
        self.attached.iter_mut().try_for_each(Attached::quiesce)?;
        let begun = Instant::now();
        while !self.attached.iter().all(Attached::is_quiesced) && begun.elapsed() < QUIESCE_MAX {
            self.turn(SHORT_TURN)?;
        }
        Ok(())
    }

    /// What each volume is known by in the next process as well.
    pub(super) fn lasting_uuids(&self) -> Vec<(VolumeIndex, [u8; 16])> {
        let lasting = |served: &Served| {
            Some((served.index, self.lasting_uuid(served, self.recorded(served.index)?)))
        };
        self.volumes.iter().filter_map(lasting).collect()
    }

    /// What a volume is known by in the next process as well. One that is served bare is recorded
    /// nowhere, so it is known by its backing device's path.
    fn lasting_uuid(&self, served: &Served, recorded: &Volume) -> [u8; 16] {
        if self.cache_path.is_some() {
            return recorded.uuid;
        }
        uuid_of_bare(&served.backing)
    }

    /// Detaches the block devices when nobody holds them any more, and serves until then. A
    /// second signal or stop, or the end of `limit`, ends the wait.
    pub(super) fn release_devices(&mut self, limit: Duration) -> Result<()> {
        let begun = Instant::now();
        // From here on a signal is the second one.
        self.signals.iter().for_each(Signals::forget);
        let mut given_up = None;
        while !self.attached.iter().all(Attached::is_gone) {
            self.attached.iter_mut().try_for_each(Attached::release)?;
            self.turn(Duration::from_millis(100))?;
            let again = self.answer_questions().is_some() || self.is_signalled();
            match given_up {
                None if again || begun.elapsed() > limit => {
                    if !again {
                        warn!(
                            "block devices are still held after {limit:?} (--stop-timeout): the stop ends"
                        );
                    }
                    given_up = Some(Instant::now());
                    self.attached.iter().for_each(Attached::give_up);
                }
                Some(at) if at.elapsed() > GIVE_UP_MAX => break,
                _ => {}
            }
        }
        Ok(())
    }
}

/// What a volume is known by that is recorded nowhere.
pub(super) fn uuid_of_bare(backing: &Path) -> [u8; 16] {
    // FNV-1a.
    let bytes = backing.as_os_str().as_encoded_bytes();
    let hash = bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3)
    });
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&hash.to_le_bytes());
    uuid
}
