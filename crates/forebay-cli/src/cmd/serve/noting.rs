// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is written down of volumes (`state_dir`, and `hide` for udev) while guests are served: by a thread.
//!
//! The state directory is on the machine's own disk, which may be slow and busy, as behind the very installation of the program that a
//! daemon goes on as: guests do not wait for that. Of a volume that comes, it is written before that is served, and guests of others are
//! served meanwhile. Behind a hand-over the generation of the cache is raised in all records when guests are served again. What a record says
//! without it is true. If the machine dies before it is raised, a copy of the cache as the program before had it, put back then, is not
//! seen to be older.

use super::{Daemon, SHORT_TURN};
use crate::asking::Asking;
use crate::state_dir::Record;
use anyhow::{Result, bail};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A state directory that takes longer for one record does not answer.
const RECORD_MAX: Duration = Duration::from_secs(10);
const SILENT: &str =
    "the state directory (--state-dir), or /etc/forebay, does not answer; `dmesg` may say why";

/// What of the records is to be raised, and is being raised.
#[derive(Default)]
pub(super) struct Notes {
    /// Volumes, by their names and their uuids.
    due: Vec<(String, String)>,
    writes: Option<(Asking<Result<()>>, Progress)>,
}

/// When the last record was begun.
#[derive(Clone)]
struct Progress(Arc<Mutex<Instant>>);

impl Progress {
    fn begins() -> Progress {
        Progress(Arc::new(Mutex::new(Instant::now())))
    }

    fn at(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn goes_on(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

impl Notes {
    /// What the program that has handed the cache over wrote says the same, but for the generation: that is raised later.
    pub(super) fn later(&mut self, record: &Record) {
        self.due.push((record.name.clone(), record.volume.clone()));
    }

    /// Who executes another program would wait for it, and who writes a record.
    pub(super) fn are_written(&self) -> bool {
        self.due.is_empty() && self.writes.is_none()
    }

    /// Whether it is soon done.
    pub(super) fn are_being_written(&self) -> bool {
        !self.are_written() && !self.is_silent()
    }

    fn is_silent(&self) -> bool {
        let writes = self.writes.as_ref();
        writes.is_some_and(|(thread, last)| !thread.is_over() && last.at().elapsed() >= RECORD_MAX)
    }

    /// An error where it does not come to an end: what waits for it would wait with all guests.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_silent() {
            bail!("{SILENT}; ask again when it has");
        }
        Ok(())
    }
}

impl Daemon {
    /// Goes on with it, when nobody waits to be served, and no program before that might go on.
    pub(super) fn write_notes(&mut self) {
        self.end_notes();
        if self.notes.is_silent() && self.problems.iter().all(|problem| problem != SILENT) {
            self.problem(SILENT.to_owned());
        }
        if !self.is_ready || self.notes.due.is_empty() || self.notes.writes.is_some() {
            return;
        }
        let Some(dir) = self.state_dir.clone() else { return };
        let due = std::mem::take(&mut self.notes.due);
        let (cache, generation) = (self.cache_uuid(), self.generation());
        let progress = Progress::begins();
        let goes_on = progress.clone();
        let writes = Asking::begin("notes", move || {
            let raise = |(name, volume): (String, String)| {
                goes_on.goes_on();
                let raised = dir.raise_generation(&cache, &volume, generation);
                raised.map_err(|error| error.context(name))
            };
            // One that cannot be written keeps no other from it.
            due.into_iter().map(raise).collect::<Vec<_>>().into_iter().collect()
        });
        match writes {
            Ok(thread) => self.notes.writes = Some((thread, progress)),
            Err(error) => self.problem(format!("the state directory is not written: {error:#}")),
        }
    }

    fn end_notes(&mut self) {
        let Some((thread, _)) = self.notes.writes.take_if(|it| it.0.is_over()) else { return };
        self.problems.retain(|problem| !problem.ends_with(SILENT));
        if let Err(error) = thread.result() {
            self.problem(format!("{error:#}"));
        }
    }

    /// Has something written down before a volume is served, and serves the others meanwhile. An error where that takes too long: it may
    /// still come to be written.
    pub(super) fn write_down(
        &mut self,
        write: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if !self.is_serving {
            return write();
        }
        while self.notes.writes.is_some() {
            self.serve_meanwhile()?;
            self.end_notes();
        }
        self.notes.writes = Some((Asking::begin("notes", write)?, Progress::begins()));
        loop {
            if let Some((thread, _)) = self.notes.writes.take_if(|it| it.0.is_over()) {
                return thread.result();
            }
            self.serve_meanwhile()?;
        }
    }

    fn serve_meanwhile(&mut self) -> Result<()> {
        if self.notes.is_silent() {
            bail!(SILENT);
        }
        self.server.turn(Some(SHORT_TURN))?;
        self.tell_alive();
        Ok(())
    }

    /// That of the cache, which each opening raises.
    pub(super) fn generation(&self) -> u32 {
        self.server.shard.superblock().open_generation
    }
}
