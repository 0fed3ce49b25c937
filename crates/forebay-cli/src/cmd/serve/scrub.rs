// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Scrubs: begun by people or when it is time, told in the log and the status.

use super::Daemon;
use crate::status::ScrubStatus;
use crate::units::{count, size};
use anyhow::{Context, Result, bail};
use forebay_core::policy::scrub::{Outcome, Refused, Report};
use forebay_core::units::{BLOCK_BYTES, Lba, VolumeIndex};
use forebay_core::why::Place;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// Bad blocks that are kept by name, of all volumes.
const BAD_NAMED: usize = 64;

/// A block, and where it was found.
type Bad = (VolumeIndex, Lba, Place);

/// When the next one begins by itself, and what was seen of the last.
pub(super) struct Scrubs {
    every: Duration,
    due: Instant,
    seen: Report,
    /// Blocks that are bad on the cache device and that nothing else has, each with where it was found.
    bad: Vec<Bad>,
}

impl Scrubs {
    /// `every`: zero for never.
    pub(super) fn new(every: Duration) -> Scrubs {
        Scrubs { every, due: Instant::now() + every, seen: Report::default(), bad: Vec::new() }
    }
}

impl Daemon {
    /// Begins or ends a scrub.
    pub(super) fn scrub(&mut self, name: Option<&str>, stop: bool) -> Result<()> {
        if self.cache_path.is_none() {
            bail!(
                "there is no cache to be scrubbed: the volumes are served bare; `serve` with --cache has one"
            );
        }
        let shard = &mut self.server.shard;
        if stop {
            // With none running there is nothing left to do.
            shard.stop_scrub();
            self.watch_scrub();
            return Ok(());
        }
        let only = name.map(|name| self.served(name)).transpose()?;
        let shard = &mut self.server.shard;
        match shard.scrub(only) {
            Ok(()) => {}
            Err(Refused::Running) if shard.engine().scrub_report().only == only => {}
            Err(Refused::Running) => {
                bail!("a scrub of something else is running; `forebay scrub --stop` ends it");
            }
            Err(Refused::Failed) => {
                bail!("the cache device has failed; `forebay status` says what to do")
            }
            Err(Refused::NotServed) => bail!(self.not_served(name.context("all are asked for")?)),
        }
        self.watch_scrub();
        Ok(())
    }

    /// Begins one if it is time, and tells what has changed.
    pub(super) fn watch_scrub(&mut self) {
        let report = *self.server.shard.engine().scrub_report();
        if report.outcome == Outcome::Running {
            self.scrubs.due = Instant::now() + self.scrubs.every;
        }
        let is_due = !self.scrubs.every.is_zero() && Instant::now() >= self.scrubs.due;
        if is_due && self.cache_path.is_some() && report.outcome != Outcome::Running {
            self.scrubs.due = Instant::now() + self.scrubs.every;
            // If not now, then the next time.
            let _ = self.server.shard.scrub(None);
        }
        let report = *self.server.shard.engine().scrub_report();
        let before = std::mem::replace(&mut self.scrubs.seen, report);
        self.note_bad(&before, &report);
        let is_new = report.began_at != before.began_at || before.outcome != Outcome::Running;
        if report.outcome == before.outcome && !is_new || report == before {
            return self.tell_lost(&before, &report);
        }
        let status = self.scrub_status();
        let of = status.volume.as_ref().map_or(String::new(), |name| format!(" of {name}"));
        if is_new {
            info!("scrub{of} begins: {} to read", size(status.total_bytes));
        }
        self.tell_lost(&before, &report);
        let (read, found) = (size(status.verified_bytes), status.found());
        match report.outcome {
            Outcome::Never | Outcome::Running => {}
            Outcome::Completed if report.lost_blocks > 0 || report.bad_headers > 0 => {
                warn!("scrub{of} completed: {read} read, {found}");
            }
            Outcome::Completed => info!("scrub{of} completed: {read} read, {found}"),
            Outcome::Stopped => info!("scrub{of} stopped: {read} read, {found}"),
            Outcome::Failed => {
                error!("scrub{of} ended: the cache device failed; {read} read, {found}");
            }
        }
    }

    /// Those that it has found. A scrub that has come to its end says of all of its volumes which are bad.
    fn note_bad(&mut self, before: &Report, now: &Report) {
        if now == before && self.scrubs.bad.is_empty() {
            return;
        }
        let is_new = (now.outcome, now.began_at) != (before.outcome, before.began_at);
        let ends = is_new && now.outcome == Outcome::Completed;
        let mut bad = std::mem::take(&mut self.scrubs.bad);
        for (index, lba) in now.lost.iter().flatten().copied() {
            bad.extend(self.new_bad(&bad, index, lba));
        }
        let found = |index: VolumeIndex, lba: Lba| {
            let of_it = now.only.is_none_or(|only| only == index);
            !ends || !of_it || now.lost.iter().flatten().any(|it| *it == (index, lba))
        };
        bad.retain(|(index, lba, place)| {
            self.dirty_place(*index, *lba) == Some(*place) && found(*index, *lba)
        });
        self.scrubs.bad = bad;
    }

    /// One that a guest's read has found.
    pub(super) fn note_bad_read(&mut self, index: VolumeIndex, lba: Lba) {
        if self.scrubs.bad.len() < BAD_NAMED {
            let new = self.new_bad(&self.scrubs.bad, index, lba);
            self.scrubs.bad.extend(new);
        }
    }

    /// A block that is bad, with where it was found, if that is not noted and its backing device has not got it.
    fn new_bad(&self, noted: &[Bad], index: VolumeIndex, lba: Lba) -> Option<Bad> {
        let is_noted = noted.iter().any(|it| (it.0, it.1) == (index, lba));
        Some((index, lba, self.dirty_place(index, lba).filter(|_| !is_noted)?))
    }

    /// Where a block is that its backing device has not got.
    fn dirty_place(&self, index: VolumeIndex, lba: Lba) -> Option<Place> {
        let why = self.server.shard.engine().why(index, lba)?;
        why.dirty.then_some(why.place)
    }

    /// What is said of each volume that has such blocks, as long as they are neither written again nor lost for good, which its health says.
    pub(super) fn bad_blocks(&self) -> Vec<String> {
        let bad = &self.scrubs.bad;
        let of = |index: VolumeIndex| {
            let mut its = bad
                .iter()
                .filter(|it| it.0 == index && self.dirty_place(index, it.1) == Some(it.2));
            let first = its.next()?.1;
            Some(format!(
                "{}: at least {} bad on the cache device that nothing else has, one at byte {}: reads of such fail until they are written again",
                self.volume_name(index),
                count(1 + its.count() as u64, "block"),
                first.bytes()
            ))
        };
        self.volumes.iter().filter_map(|served| of(served.index)).collect()
    }

    /// Each lost block is named as long as there is room for its name.
    fn tell_lost(&self, before: &Report, now: &Report) {
        let known =
            if now.began_at == before.began_at { before.lost.iter().flatten().count() } else { 0 };
        for (volume, lba) in now.lost.iter().flatten().skip(known) {
            warn!("{}: {}", self.volume_name(*volume), bad_block_text(*lba));
        }
    }

    fn volume_name(&self, index: VolumeIndex) -> String {
        self.recorded(index).map_or_else(|| "a volume that left".into(), |it| it.name.clone())
    }

    pub(super) fn scrub_status(&self) -> ScrubStatus {
        let report = self.server.shard.engine().scrub_report();
        let state = match report.outcome {
            Outcome::Never => "never",
            Outcome::Running => "running",
            Outcome::Completed => "completed",
            Outcome::Stopped => "stopped",
            Outcome::Failed => "failed",
        };
        let lost = report.lost.iter().flatten();
        ScrubStatus {
            state: state.into(),
            volume: report.only.map(|index| self.volume_name(index)),
            began_at: report.began_at,
            ended_at: report.ended_at,
            total_bytes: report.total_blocks * BLOCK_BYTES,
            verified_bytes: report.verified_blocks * BLOCK_BYTES,
            healed_blocks: report.healed_blocks,
            lost_blocks: report.lost_blocks,
            lost: lost
                .map(|(index, lba)| format!("{} {}", self.volume_name(*index), lba.0))
                .collect(),
            unneeded_blocks: report.unneeded_blocks,
            bad_headers: report.bad_headers,
            saved_headers: report.saved_headers,
        }
    }
}

/// What is said of a dirty block.
pub(super) fn bad_block_text(lba: Lba) -> String {
    format!(
        "block {} (byte {}) is bad on the cache device, and nothing else has it: reads of it fail; if it still is when it is \
         written back it is lost",
        lba.0,
        lba.bytes()
    )
}
