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
//! - **W3** A device that does not answer holds up its own volume alone: a thread looks for each, and one for all that are sought by what is on them:
//!   that passes over what does not answer (N4 of `host/named.rs`), and reads each device once for all. One that is stuck cannot be ended, nor can a
//!   program be executed as long as it is (`Daemon::check_upgrade`); it is known until it is over, whatever becomes of its volume.
//!
//! # States
//!
//! | from | to | when |
//! |---|---|---|
//! | awaited | coming | its device is there, and no other volume comes or goes on |
//! | coming | served, or waits | as by `forebay attach`; it is awaited no more |
//! | awaited | waits | `--device-timeout` is over: the next start sees to it, or `forebay attach` |

use super::Daemon;
use super::coming::{Coming, Silent};
use super::plan::{Planned, Wanted, role};
use crate::asking::Asking;
use crate::late::{self, ANSWER_MAX, Patience};
use crate::status::waits_text;
use crate::{hide, upgrade};
use forebay::host::named;
use forebay::host::notify::sd_notify;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// More than a look takes.
const STACK_BYTES: usize = 256 << 10;

/// Those that are awaited.
#[derive(Default)]
pub(super) struct Awaited {
    volumes: Vec<AwaitedVolume>,
    /// Since when, and for how long.
    patience: Option<(Instant, Duration)>,
    /// Who looks for them, and for some that are awaited no more; at most one for each path (W3).
    seekers: Vec<Seeker>,
}

/// A thread that looks whether devices are there.
struct Seeker {
    paths: Vec<PathBuf>,
    since: Instant,
    /// Whether each is.
    thread: Asking<Vec<bool>>,
}

impl Seeker {
    fn is_stuck(&self) -> bool {
        self.since.elapsed() >= ANSWER_MAX && !self.thread.is_over()
    }
}

struct AwaitedVolume {
    name: String,
    path: PathBuf,
    wanted: Wanted,
    /// It was seen.
    is_there: bool,
    sought: Option<Instant>,
}

impl Awaited {
    /// How long the loop may wait, if that is shorter than ever.
    pub(super) fn turn(&self) -> Option<Duration> {
        (!self.volumes.is_empty()).then(|| self.retry())
    }

    /// Somebody looks for them just now, and may be expected to answer.
    pub(super) fn is_seeking(&self) -> bool {
        self.seekers.iter().any(|it| !it.thread.is_over() && !it.is_stuck())
    }

    /// Somebody has come to a device that does not answer.
    pub(super) fn is_stuck(&self) -> bool {
        self.seekers.iter().any(Seeker::is_stuck)
    }

    /// Those that do not answer.
    fn stuck(&self) -> impl Iterator<Item = PathBuf> {
        self.seekers.iter().filter(|it| it.is_stuck()).flat_map(|it| it.paths.iter().cloned())
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

    /// Hears which of them are there.
    fn hear(&mut self) {
        let ended = self.seekers.extract_if(.., |it| it.thread.is_over());
        for Seeker { paths, thread, .. } in ended {
            // Of one that broke off nothing is known.
            let are_there = thread.end().unwrap_or_default();
            for (path, is_there) in paths.into_iter().zip(are_there) {
                let its = self.volumes.iter_mut().filter(|volume| volume.path == path);
                its.for_each(|volume| volume.is_there = is_there);
            }
        }
    }

    /// Of those that are there the first, so who may answer yet is waited for.
    fn take_first(&mut self) -> Option<AwaitedVolume> {
        let at = self.volumes.iter().position(|it| it.is_there)?;
        (!self.is_seeking()).then(|| self.volumes.remove(at))
    }

    /// All, and since when they were waited for, if that is over. While one is there it is to come first: nobody may say of it that it is not.
    fn take_missing(&mut self) -> Option<(Vec<AwaitedVolume>, Instant)> {
        let (since, limit) = self.patience?;
        let is_over = since.elapsed() >= limit && !self.volumes.iter().any(|it| it.is_there);
        is_over.then(|| (std::mem::take(&mut self.volumes), since))
    }

    /// Looks for them, now and then.
    fn seek(&mut self) {
        if self.volumes.iter().any(|it| it.is_there) {
            return; // It comes first.
        }
        let (mut by_path, mut by_identity) = (Vec::new(), Vec::new());
        for volume in &mut self.volumes {
            let path = &volume.path;
            let retry = late::retry(std::iter::once(path.as_path()));
            let is_due = volume.sought.is_none_or(|at| at.elapsed() >= retry);
            if !is_due || self.seekers.iter().any(|it| it.paths.contains(path)) {
                continue;
            }
            volume.sought = Some(Instant::now());
            let sought = if late::is_identity(path) { &mut by_identity } else { &mut by_path };
            // Two that wait for one device are both told by who looks for it.
            if !sought.contains(path) {
                sought.push(path.clone());
            }
        }
        let each = by_path.into_iter().map(|path| vec![path]);
        for paths in each.chain((!by_identity.is_empty()).then_some(by_identity)) {
            let seek = {
                let paths = paths.clone();
                move || late::may_be_there(&paths)
            };
            // Devices are read for it (W1). If there is no thread the next one is tried.
            let thread = Builder::new().name("seek".into()).stack_size(STACK_BYTES);
            let seeker = |thread| Seeker { paths, since: Instant::now(), thread };
            self.seekers.extend(Asking::begin_as(thread, seek).ok().map(seeker));
        }
    }
}

impl Daemon {
    /// Others are served until the backing device of this one comes.
    pub(super) fn await_device(&mut self, planned: &Planned<'_>, patience: &Patience) {
        let Ok(address) = planned.address() else { return };
        let (name, path) = (planned.name.clone(), address.path.clone());
        self.await_path(name, path, planned.wanted, patience.late());
    }

    pub(super) fn await_path(
        &mut self,
        name: String,
        path: PathBuf,
        wanted: Wanted,
        (since, limit): (Instant, Duration),
    ) {
        let why = format!(
            "{}, the {}, up to {limit:?}: it is not there; the others are served meanwhile",
            path.display(),
            role(&name)
        );
        self.waits_for(&name, &why);
        self.awaited.patience = Some((since, limit));
        self.awaited.volumes.push(AwaitedVolume {
            name,
            path,
            wanted,
            is_there: false,
            sought: None,
        });
    }

    /// Goes on with those that are awaited.
    pub(super) fn come_late(&mut self) {
        self.awaited.hear();
        if self.awaited.volumes.is_empty() {
            return;
        }
        // A program is executed when all threads of the one before have ended.
        if self.check_stays().is_ok() && self.trial.is_none() {
            self.awaited.seek();
        }
        if self.check_stays().is_ok() && self.coming.is_none() {
            if let Some(AwaitedVolume { name, wanted, .. }) = self.awaited.take_first() {
                if let Err(error) = self.begin_to_come(&name, wanted, None) {
                    self.comes_not(&name, &format!("{error:#}"));
                }
            } else if let Some((volumes, since)) = self.awaited.take_missing() {
                for AwaitedVolume { name, path, .. } in volumes {
                    let error = late::missing(&path.display(), &role(&name), since);
                    self.comes_not(&name, &format!("{error:#}"));
                }
            }
            self.tell_ready();
        }
    }

    /// A volume that was awaited waits until somebody sees to it.
    pub(super) fn comes_not(&mut self, name: &str, why: &str) {
        self.waits_for(name, why);
        self.tell_manager();
    }

    /// What is said of a volume that waits, in place of what was.
    pub(super) fn waits_for(&mut self, name: &str, why: &str) {
        self.waits_no_more(name);
        self.problem(waits_text(name) + why);
    }

    pub(super) fn waits_no_more(&mut self, name: &str) {
        let waits = waits_text(name);
        self.problems.retain(|problem| !problem.starts_with(&waits));
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

    /// Devices that a thread waits for which nobody can end.
    pub(super) fn silent_devices(&self) -> Vec<PathBuf> {
        let by_path = |path: &PathBuf| !late::is_identity(path);
        // Those that were read for an identity are known themselves.
        let read = named::silent().into_iter().map(|name| Path::new("/dev").join(name));
        let looked = self.coming.iter().chain(&self.slow).filter_map(Coming::silent_device);
        let looked = looked.chain(self.silent.iter().filter_map(Silent::device));
        let found = self.awaited.stuck().chain(looked).filter(by_path).chain(read);
        found.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn may_be_ready(&self) -> bool {
        let coming = self.coming.iter().chain(&self.slow).filter(|it| it.is_late());
        let coming = coming.map(Coming::name);
        let mut awaited = self.awaited.volumes.iter().map(|it| it.name.as_str()).chain(coming);
        let cache = self.cache_uuid();
        let waits_itself = self.devices.is_some() && self.listen.is_empty();
        // The program before was.
        upgrade::is_executed()
            || awaited.all(|name| waits_itself && hide::is_recorded(&cache, name))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn awaited(name: &str) -> AwaitedVolume {
        let wanted = Wanted { if_changed: None, without_cache: false };
        let path = format!("/dev/{name}").into();
        AwaitedVolume { name: name.into(), path, wanted, is_there: false, sought: None }
    }

    fn seeker(name: &str, seek: impl FnOnce() -> bool + Send + 'static) -> Seeker {
        // It is not taken for stuck, however slow the machine.
        let since = Instant::now() + Duration::from_secs(3600);
        let paths = vec![format!("/dev/{name}").into()];
        Seeker { paths, since, thread: Asking::begin("seek", || vec![seek()]).unwrap() }
    }

    /// Each of those that are known by what is on them had all disks read for it.
    #[test]
    fn who_looks_for_one_identity_looks_for_all() {
        let of = |path: String| AwaitedVolume { path: path.into(), ..awaited("x") };
        let uuids = (0..20).map(|number| of(format!("UUID=none-such-{number}")));
        let volumes: Vec<_> = uuids.chain([of("/nonexistent/x".into()), of("/".into())]).collect();
        let mut all = Awaited { volumes, patience: None, seekers: Vec::new() };
        all.seek();
        assert_eq!(all.seekers.iter().map(|it| it.paths.len()).collect::<Vec<_>>(), [1, 1, 20]);
        all.seek();
        assert_eq!(all.seekers.len(), 3, "they are being looked for");
        while !all.seekers.is_empty() {
            all.hear();
            std::thread::yield_now();
        }
        let there = all.volumes.iter().filter(|it| it.is_there).map(|it| it.path.as_path());
        assert_eq!(there.collect::<Vec<_>>(), [std::path::Path::new("/")]);
    }

    /// It was told that it is not there, and its guest went without.
    #[test]
    fn one_that_is_there_is_not_given_up_while_another_is_looked_for() {
        let volumes = vec![awaited("b"), awaited("c")];
        let patience = Some((Instant::now(), Duration::ZERO));
        let mut all = Awaited { volumes, patience, seekers: Vec::new() };
        let (answer, answers) = channel::<bool>();
        all.seekers.push(seeker("b", || true));
        while !all.seekers[0].thread.is_over() {
            std::thread::yield_now();
        }
        all.seekers.push(seeker("c", move || answers.recv().unwrap()));
        all.hear();
        assert!(all.take_first().is_none(), "c may be there as well");
        assert!(all.take_missing().is_none(), "b is there");
        answer.send(false).unwrap();
        while !all.seekers[0].thread.is_over() {
            std::thread::yield_now();
        }
        all.hear();
        assert_eq!(all.take_first().unwrap().name, "b");
        let missing = all.take_missing().unwrap().0;
        assert_eq!(missing.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["c"]);
    }
}
