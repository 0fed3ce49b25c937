// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The next program is tried before anything is given up for it: as a child of this one, so where the daemon is and by the rules that hold for
//! it, on a thread of its own, while guests are served.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | asked | goes on | a rehearsal of its start ended well (`crate::trial`), its disks are those that there were, and nothing stands against an upgrade then |
//! | asked | refused | something did before, or does; it failed, or did not end in time; a disk does not answer |

use super::coming::Silent;
use super::{Daemon, Upgrading};
use crate::args::ServeArgs;
use crate::asking::Asking;
use crate::control::Reply;
use crate::status::GOES_ON;
use crate::trial;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long it may take: the rehearsal is bounded itself, and devices that are asked for a UUID are.
const TRIAL_MAX: Duration = trial::LIMIT.saturating_mul(3);

/// A program on trial.
pub(super) struct Trial {
    /// Who waits for the answer.
    client: usize,
    executable: PathBuf,
    /// How it lays out the map, if it has said so.
    layout: Option<String>,
    begun: Instant,
    /// What is served from what, as it was then.
    backings: Vec<(String, PathBuf)>,
    tries: Asking<Result<Option<ServeArgs>>>,
}

impl Daemon {
    /// Looks whether this daemon can go on as that program, and begins to try it. The answer comes when that is over.
    pub(super) fn begin_trial(
        &mut self,
        executable: PathBuf,
        layout: Option<String>,
        limit: Option<Duration>,
        client: usize,
    ) -> Result<()> {
        if let Some(other) = &self.trial {
            bail!(
                "{}: is being tried for another upgrade; one at a time",
                other.executable.display()
            );
        }
        if self.upgrading.is_some() {
            bail!("the daemon goes on as another program already");
        }
        self.check_upgrade(&executable)?;
        self.check_cut()?;
        let (words, disks) = (self.words_for_next(), self.disks_now());
        let limit = limit.map_or(trial::LIMIT, |limit| limit.min(trial::LIMIT));
        let (tried, backings) = (executable.clone(), disks.backings.clone());
        let tries = Asking::begin("trial", move || {
            trial::rehearse(&tried, &words, limit)?;
            disks.check()
        })?;
        info!("tries {}", executable.display());
        let begun = Instant::now();
        self.trial = Some(Trial { client, executable, layout, begun, backings, tries });
        Ok(())
    }

    /// Goes on as what has been tried.
    pub(super) fn end_trial(&mut self) {
        // What has begun is waited for; none begins meanwhile.
        let is_busy = self.awaited.is_seeking() || self.notes.are_being_written();
        let is_over = |it: &mut Trial| match it.tries.is_over() {
            true => !is_busy,
            false => it.begun.elapsed() >= TRIAL_MAX,
        };
        let Some(trial) = self.trial.take_if(is_over) else { return };
        let client = trial.client;
        let reply = match self.begin_upgrade(trial) {
            Ok(()) => Reply::Done,
            Err(error) => {
                let text = format!("{error:#}");
                warn!("not upgraded: {text}");
                Reply::Error { text }
            }
        };
        self.desk.borrow_mut().answers.push_back((client, reply));
    }

    /// Nobody waits for it any more. It touches nothing, and ends by itself if its disks answer.
    pub(super) fn stop_trial(&mut self) {
        let Some(trial) = self.trial.take() else { return };
        let text = "not upgraded: the daemon is being stopped".into();
        self.desk.borrow_mut().answers.push_back((trial.client, Reply::Error { text }));
    }

    fn begin_upgrade(&mut self, trial: Trial) -> Result<()> {
        let Trial { executable, layout, backings, tries, .. } = trial;
        if !tries.is_over() {
            self.silent.push(Silent::new(None, tries));
            bail!(
                "the daemon goes on as it is: a disk that the next program is to have does not answer"
            );
        }
        let next = tries.result().context("the daemon goes on as it is")?;
        // Much may have happened meanwhile.
        self.check_upgrade(&executable)?;
        if !self.notes.are_written() {
            bail!("what is known of volumes is being written down; ask again");
        }
        if self.backings() != backings {
            bail!("volumes have come or gone while it was tried; ask again");
        }
        next.map_or(Ok(()), |next| self.check_next(&next))?;
        let against = self.against_hand_over(layout);
        if against.is_none() {
            self.server.shard.prepare_hand_over();
        }
        if let Some(passage) = &self.passage {
            passage.hold();
        }
        self.activity = GOES_ON;
        self.upgrading = Some(Upgrading { executable, since: Instant::now(), against });
        Ok(())
    }
}
