// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The generation of a cache in what is written down of its volumes (`state_dir`): raised by a thread where nothing else has changed.
//!
//! The state directory is on the machine's own disk, which may be slow and busy, as behind the very installation of the program that a
//! daemon goes on as: guests do not wait for that. What a record says without it is true; a cache that was copied between
//! the two, and is put back, would not be seen to be older.

use super::Daemon;
use crate::asking::Asking;
use crate::state_dir::{Record, StateDir};
use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// A state directory that takes longer does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// What of the records is to be raised, and is being raised.
#[derive(Default)]
pub(super) struct Notes {
    /// Volumes, by their names and their uuids.
    due: Vec<(String, String)>,
    writes: Option<(Asking<Result<()>>, Instant)>,
}

impl Notes {
    /// Who executes another program would wait for it.
    pub(super) fn are_written(&self) -> bool {
        self.due.is_empty() && self.writes.is_none()
    }

    /// An error where that takes too long.
    pub(super) fn check(&self) -> Result<()> {
        match &self.writes {
            Some((_, begun)) if begun.elapsed() >= ANSWER_MAX => bail!(
                "the state directory (--state-dir) does not answer; `dmesg` may say why: upgrade when it has, or use `forebay stop`"
            ),
            _ => Ok(()),
        }
    }
}

impl Daemon {
    /// Whether a record is there that says all this but for the generation, for good; then that is raised later.
    pub(super) fn note_later(&mut self, dir: &StateDir, record: &Record) -> Result<bool> {
        let known = dir.read(&record.cache, &record.volume)?;
        if !known.is_some_and(|known| record.is_but_generation(&known)) {
            return Ok(false);
        }
        if !self.server.shard.opened().handed_over {
            dir.settle()?;
        }
        self.notes.due.push((record.name.clone(), record.volume.clone()));
        Ok(true)
    }

    /// Goes on with it, now that nobody waits to be served.
    pub(super) fn write_notes(&mut self) {
        if let Some((thread, _)) = self.notes.writes.take_if(|it| it.0.is_over())
            && let Err(error) = thread.result()
        {
            self.problem(format!("{error:#}"));
        }
        let Some(dir) = self.state_dir.clone().filter(|_| self.notes.writes.is_none()) else {
            return;
        };
        let due = std::mem::take(&mut self.notes.due);
        if due.is_empty() {
            return;
        }
        let (cache, generation) = (self.cache_uuid(), self.generation());
        let writes = Asking::begin("notes", move || {
            due.into_iter().try_for_each(|(name, volume)| {
                let raised = dir.raise_generation(&cache, &volume, generation);
                raised.map_err(|error| error.context(name))
            })
        });
        match writes {
            Ok(thread) => self.notes.writes = Some((thread, Instant::now())),
            Err(error) => self.problem(format!("the state directory is not written: {error:#}")),
        }
    }

    /// That of the cache, which each opening raises.
    pub(super) fn generation(&self) -> u32 {
        self.server.shard.superblock().open_generation
    }
}
