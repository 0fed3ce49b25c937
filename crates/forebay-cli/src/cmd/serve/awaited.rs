// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Volumes whose backing devices are not there yet, while others are served.
//!
//! # Invariants
//!
//! - **W1** No guest waits for them: a thread looks for them, and what it finds comes as by `forebay attach` (`coming`), which looks at all
//!   that a start looks at.
//! - **W2** Whoever is started behind this daemon finds what he would have found if it had waited. So `ready` is said when all have come, or are
//!   waited for no more; earlier only where nobody but mounts of block devices can be meant, which wait for those themselves, and nobody can
//!   take the disk behind one for the volume.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | awaited | coming | its device is there, and no other volume comes or goes on |
//! | coming | served, or waits | as by `forebay attach`; it is awaited no more |
//! | awaited | waits | `--device-timeout` is over: the next start sees to it, or `forebay attach` |

use super::Daemon;
use super::coming::Coming;
use super::plan::{Planned, Wanted, role};
use crate::late::{self, Patience};
use crate::status::waits_text;
use crate::{hide, upgrade};
use forebay::host::notify::sd_notify;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a look for them may take before a device is taken for one that does not answer.
const SEEK_MAX: Duration = Duration::from_secs(1);

/// Those that are awaited.
#[derive(Default)]
pub(super) struct Awaited {
    volumes: Vec<AwaitedVolume>,
    /// Since when, and for how long.
    patience: Option<(Instant, Duration)>,
    /// Who looks for them.
    seeker: Option<(Instant, JoinHandle<Vec<PathBuf>>)>,
    sought: Option<Instant>,
}

struct AwaitedVolume {
    name: String,
    path: PathBuf,
    wanted: Wanted,
    /// It was seen.
    is_there: bool,
}

impl Awaited {
    /// How long the loop may wait, if that is shorter than ever.
    pub(super) fn turn(&self) -> Option<Duration> {
        (!self.volumes.is_empty()).then(|| self.retry())
    }

    /// Somebody looks for them just now.
    pub(super) fn is_seeking(&self) -> bool {
        self.seeker.as_ref().is_some_and(|(_, thread)| !thread.is_finished())
    }

    /// He has come to a device that does not answer.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_seeking() && self.seeker.as_ref().is_some_and(|it| it.0.elapsed() >= SEEK_MAX)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.volumes.iter().any(|it| it.name == name)
    }

    /// It is seen to otherwise.
    pub(super) fn forget(&mut self, name: &str) {
        self.volumes.retain(|it| it.name != name);
    }

    /// Nothing comes any more.
    pub(super) fn clear(&mut self) {
        self.volumes.clear();
    }

    fn retry(&self) -> Duration {
        late::retry(self.volumes.iter().map(|it| it.path.as_path()))
    }

    /// Which of them are there, now and then.
    fn seek(&mut self) {
        if let Some((_, thread)) = self.seeker.take_if(|it| it.1.is_finished()) {
            let there = thread.join().unwrap_or_default();
            for volume in &mut self.volumes {
                volume.is_there = there.contains(&volume.path);
            }
        }
        let is_due = self.sought.is_none_or(|at| at.elapsed() >= self.retry());
        if self.seeker.is_some() || !is_due {
            return;
        }
        self.sought = Some(Instant::now());
        let mut paths: Vec<PathBuf> = self.volumes.iter().map(|it| it.path.clone()).collect();
        let seek = move || {
            paths.retain(|path| late::may_be_there(path));
            paths
        };
        // Devices are read for it (W1). If there is no thread the next one is tried.
        let thread = std::thread::Builder::new().name("seek".into()).spawn(seek).ok();
        self.seeker = thread.map(|thread| (Instant::now(), thread));
    }
}

impl Daemon {
    /// Others are served until the backing device of this one comes.
    pub(super) fn await_device(&mut self, planned: &Planned<'_>, patience: &Patience) {
        let Ok(address) = planned.address() else { return };
        let (name, path) = (planned.name.clone(), address.path.clone());
        let (since, limit) = patience.late();
        self.problem(format!(
            "{}{}, the {}, up to {limit:?}: it is not there; the others are served meanwhile",
            waits_text(&name),
            path.display(),
            role(&name)
        ));
        self.awaited.patience = Some((since, limit));
        let wanted = planned.wanted;
        self.awaited.volumes.push(AwaitedVolume { name, path, wanted, is_there: false });
    }

    /// Goes on with those that are awaited.
    pub(super) fn come_late(&mut self) {
        if self.awaited.volumes.is_empty() {
            return;
        }
        // A program is executed when all threads of the one before have ended.
        if self.check_stays().is_ok() {
            self.awaited.seek();
        }
        let patience = self.awaited.patience.filter(|(since, limit)| since.elapsed() >= *limit);
        if self.check_stays().is_ok() && self.coming.is_none() {
            let volumes = &mut self.awaited.volumes;
            if let Some(at) = volumes.iter().position(|it| it.is_there) {
                let AwaitedVolume { name, wanted, .. } = volumes.remove(at);
                if let Err(error) = self.begin_to_come(&name, wanted, None) {
                    self.comes_not(&name, &format!("{error:#}"));
                }
            } else if let Some((since, _)) = patience {
                for AwaitedVolume { name, path, .. } in std::mem::take(volumes) {
                    let error = late::missing(&path.display(), &role(&name), since);
                    self.comes_not(&name, &format!("{error:#}"));
                }
            }
            self.tell_ready();
        }
    }

    /// A volume that was awaited waits until somebody sees to it.
    pub(super) fn comes_not(&mut self, name: &str, why: &str) {
        let waits = waits_text(name);
        self.problems.retain(|problem| !problem.starts_with(&waits));
        self.problem(waits + why);
        self.tell_manager();
    }

    /// Says that it serves, once, when those may begin who have waited for that (W2).
    pub(super) fn tell_ready(&mut self) {
        if self.is_ready || !self.may_be_ready() {
            return;
        }
        self.is_ready = true;
        announce!("ready");
        // Without a service manager there is nobody to tell.
        let _ = sd_notify("READY=1");
    }

    fn may_be_ready(&self) -> bool {
        let coming = self.coming.as_ref().filter(|it| it.is_late()).map(Coming::name);
        let mut awaited = self.awaited.volumes.iter().map(|it| it.name.as_str()).chain(coming);
        let cache = self.cache_uuid();
        let waits_itself = self.devices.is_some() && self.listen.is_empty();
        // The program before was.
        upgrade::is_executed()
            || awaited.all(|name| waits_itself && hide::is_recorded(&cache, name))
    }
}
