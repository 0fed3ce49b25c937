// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A start looks for the backing device of each volume, and at it.
//!
//! # Invariants
//!
//! - **B1** A device that does not answer when it is looked at holds up its own volume alone, and others for [`ANSWER_ALL_MAX`] at most, all such
//!   devices together, and each that comes behind that for [`ANSWER_MAX`]: a thread looks for each and at it. One that is stuck cannot be ended, so it goes on as that of a volume that comes
//!   (`coming`), and no other looks at that device meanwhile.
//! - **B2** What only has no other way is waited for longer: where nobody would be served meanwhile, and where the start fails
//!   without it. What the program before had, or a daemon before left in a mount, is waited for without end: its guests wait for it.
//! - **B3** Nothing is changed by it: no thread of these writes to a device, and none is served but by the loop's thread, which looks
//!   again whether another volume has the device by then (`look`).

use super::Daemon;
use super::coming::{Coming, PATIENCE, Silent};
use super::look::{Looked, logical_block};
use super::plan::{Planned, Ready, role};
use crate::args::ServeArgs;
use crate::asking::Asking;
use crate::attach::Kind;
use crate::attach::left::LeftDevice;
use crate::late::{self, ANSWER_MAX, Patience};
use crate::state_dir::Known;
use crate::{backing, upgrade};
use anyhow::{Error, Result, anyhow};
use forebay::host::notify::sd_notify;
use forebay::io::FileDevice;
use forebay::shard::backing_source;
use forebay_core::policy::reserve::Reserve;
use forebay_core::units::VolumeIndex;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a start waits for devices that do not answer before it serves the others, and a stop before it ends: longer than a lock is waited for, and than a
/// disk that stood still takes to turn.
pub(super) const ANSWER_ALL_MAX: Duration = Duration::from_secs(12);
/// How often somebody who waits looks whether he is to go on waiting.
const LOOK: Duration = Duration::from_millis(100);

/// What a search has come to.
#[expect(clippy::large_enum_variant, reason = "there is one for each volume, at a start")]
pub(super) enum Found {
    /// The program before had it.
    HandedOver(PathBuf, FileDevice),
    Looked(Looked),
    /// It is not there, and others are served meanwhile.
    Late,
}

/// A backing device that is looked for, and at.
pub(super) struct Search<'a> {
    planned: Planned<'a>,
    looking: Looking,
    /// Its guests wait for it, in the kernel.
    is_held: bool,
}

/// Somebody looks.
struct Looking {
    begun: Instant,
    asked: Arc<Asked>,
    thread: Asking<Result<Found>>,
}

/// Since when the device is asked, if it is: it may not be there.
#[derive(Default)]
struct Asked(Mutex<Option<Instant>>);

impl Asked {
    fn set(&self, is_asked: bool) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *since = is_asked.then(|| since.unwrap_or_else(Instant::now));
    }

    fn elapsed(&self) -> Duration {
        let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl<'a> Search<'a> {
    fn is_over(&self) -> bool {
        self.looking.thread.is_over()
    }

    fn silent_for(&self) -> Duration {
        self.looking.asked.elapsed()
    }

    /// It is not waited for any more, whatever waits for it.
    fn is_given_up(&self, patience: &Patience) -> bool {
        self.silent_for() >= PATIENCE || patience.is_over()
    }

    /// Waits until it is over, or the device has not answered for so long. Whether it is.
    fn wait(&self, limit: Option<Duration>, patience: &Patience) -> bool {
        let mut told = false;
        while !self.looking.thread.wait(LOOK) {
            let silent = self.silent_for();
            if silent >= ANSWER_MAX && !told {
                told = true;
                self.tell(limit);
            }
            let is_over = |limit| silent >= limit || silent >= ANSWER_MAX && patience.is_over();
            if limit.is_some_and(is_over) {
                return self.is_over();
            }
        }
        true
    }

    fn tell(&self, limit: Option<Duration>) {
        let up_to = limit.map_or(String::new(), |limit| format!(", up to {limit:.0?}"));
        let text = format!("waits for {}{up_to}: {NO_ANSWER}", self.what());
        tracing::warn!("{text}");
        // Without a service manager there is nobody to tell.
        let _ = sd_notify(&format!("STATUS={text}"));
    }

    /// `/dev/sdb, the backing device of data`.
    fn what(&self) -> String {
        let role = role(&self.planned.name);
        match self.planned.address() {
            Ok(address) => format!("{}, the {role}", address.path.display()),
            Err(_) => format!("the {role}"),
        }
    }

    /// What is said if it is waited for no more.
    fn silence(&self) -> Error {
        anyhow!(
            "{}: {NO_ANSWER}; it was waited for, for {:.0?}",
            self.what(),
            self.looking.begun.elapsed()
        )
    }

    /// What it has come to; it is over.
    fn end(self) -> (Planned<'a>, Result<Found>) {
        (self.planned, self.looking.thread.result())
    }
}

const NO_ANSWER: &str = "it does not answer (`dmesg` may say why)";

/// What came of all searches.
#[derive(Default)]
pub(super) struct Searched<'a> {
    pub(super) ready: Vec<(Planned<'a>, Ready<'a>)>,
    /// Their devices.
    taken: Vec<(String, Known)>,
    /// What those that are new are to have of the cache.
    new: Vec<Reserve>,
    /// What is not there, while others may be served.
    pub(super) late: Vec<Planned<'a>>,
    /// What does not answer.
    pub(super) silent: Vec<Search<'a>>,
}

/// How long devices that do not answer are waited for before others are served.
struct Silence(Duration);

impl Silence {
    fn new() -> Silence {
        Silence(ANSWER_ALL_MAX)
    }

    /// Waits for a search, as long as it may hold up others. Whether it is over.
    fn wait(&mut self, search: &Search<'_>, args: &ServeArgs, patience: &Patience) -> bool {
        let planned = &search.planned;
        let limit = match () {
            () if search.is_held || upgrade::had_disk(&planned.name) => None,
            () if planned.may_be_missing(args) => Some(self.0.max(ANSWER_MAX)),
            () => Some(PATIENCE),
        };
        let is_over = search.wait(limit, patience);
        self.0 = self.0.saturating_sub(search.silent_for());
        is_over
    }
}

impl Daemon {
    /// Looks for all of them, until one can be served, or none will be.
    pub(super) fn search_all<'a>(
        &mut self,
        args: &'a ServeArgs,
        patience: &Patience,
        reserves: &[(VolumeIndex, Reserve)],
    ) -> Result<Searched<'a>> {
        let (mut planned, mut all) = (self.plan(args), Searched::default());
        let (mut silence, mut told) = (Silence::new(), false);
        loop {
            // One after the other: the second on a disk is told of the first.
            for planned in planned.drain(..) {
                let looking = match self.begin_to_look(&planned, args, &all.taken, patience) {
                    Ok(looking) => looking,
                    Err(error) => {
                        self.judge(planned, Err(error), args, reserves, &mut all)?;
                        continue;
                    }
                };
                let is_held = self.is_left_in_a_mount(&planned);
                let search = Search { planned, looking, is_held };
                if silence.wait(&search, args, patience) {
                    let (planned, found) = search.end();
                    self.judge(planned, found, args, reserves, &mut all)?;
                } else {
                    all.silent.push(search);
                }
            }
            let over: Vec<_> = all.silent.extract_if(.., |it| it.is_over()).collect();
            for (planned, found) in over.into_iter().map(Search::end) {
                self.judge(planned, found, args, reserves, &mut all)?;
            }
            let late: Vec<_> = all.late.iter().filter_map(Planned::device).collect();
            let waits = all.silent.iter().any(|it| !it.is_given_up(patience));
            if !all.ready.is_empty() || !(patience.lasts_for(&late, &mut told) || waits) {
                return Ok(all);
            }
            match late.is_empty() {
                true => std::thread::sleep(LOOK),
                false => patience.pause_for(&late),
            }
            std::mem::swap(&mut planned, &mut all.late);
        }
    }

    /// Whether it can be served from what was found.
    fn judge<'a>(
        &mut self,
        planned: Planned<'a>,
        found: Result<Found>,
        args: &ServeArgs,
        reserves: &[(VolumeIndex, Reserve)],
        all: &mut Searched<'a>,
    ) -> Result<()> {
        let found = match found {
            Ok(Found::Late) => {
                all.late.push(planned);
                return Ok(());
            }
            Ok(Found::HandedOver(path, device)) => Ok(Ready::HandedOver(path, device)),
            Ok(Found::Looked(looked)) => self.check_found(&planned, looked, &all.taken),
            Err(error) => Err(error),
        };
        match found.and_then(|it| self.check_room_for(it, reserves, &mut all.new)) {
            Ok(found) => {
                all.taken.push((planned.name.clone(), found.known()));
                all.ready.push((planned, found));
            }
            Err(error) if planned.may_wait(args, &error) => self.waits(&planned, &error),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Begins to look for its backing device, and to open it and look at it. `taken`: those of others.
    fn begin_to_look(
        &self,
        planned: &Planned<'_>,
        args: &ServeArgs,
        taken: &[(String, Known)],
        patience: &Patience,
    ) -> Result<Looking> {
        let index = planned.index()?;
        let asked = planned.spec.and_then(|spec| spec.logical_block);
        let logical_block = logical_block(&planned.name, asked, planned.recorded.as_ref())?;
        let look = self.look(index, logical_block, planned.recorded.clone(), taken);
        let may_come = self.may_come(planned, args, patience);
        let (name, path) = (planned.name.clone(), planned.address()?.path.clone());
        let (is_known, is_recorded) = (planned.is_known(), planned.recorded.is_some());
        let handed_over = self.server.shard.opened().handed_over;
        let patience = patience.clone();
        let asked = Arc::<Asked>::default();
        let thread = Asking::begin("look", {
            let asked = Arc::clone(&asked);
            move || {
                let find = |path: &Path| {
                    // To look for an identity is to read every disk, each for so long (N4 of `host/named.rs`): nobody says whose silence that is.
                    asked.set(!late::is_identity(path));
                    let found = if is_known { late::find } else { late::find_new }(path)?;
                    asked.set(found.is_some());
                    Ok(found)
                };
                let path = match may_come {
                    true => {
                        let Some(path) = find(&path)? else { return Ok(Found::Late) };
                        path
                    }
                    false => patience.find_by(&path, &role(&name), find)?,
                };
                asked.set(true);
                if is_recorded {
                    let left =
                        backing::take_left(&name, &path, backing_source(index), logical_block)?;
                    if let Some(device) = left
                        && handed_over
                    {
                        return Ok(Found::HandedOver(path, device));
                    }
                    // It is looked at as ever.
                } else {
                    upgrade::check_disk(&name, &path)?;
                }
                look.at(&path).map(Found::Looked)
            }
        })?;
        Ok(Looking { begun: Instant::now(), asked, thread })
    }

    /// Devices by FUSE + loop that a daemon before has left may be together in one mount: they go on together.
    fn is_left_in_a_mount(&self, planned: &Planned<'_>) -> bool {
        let is_fuse = |it: &LeftDevice| it.kind == Kind::Fuse && it.volume == planned.name;
        !upgrade::is_executed() && self.left.iter().any(is_fuse)
    }

    /// Whether others may be served while it is not there.
    fn may_come(&self, planned: &Planned<'_>, args: &ServeArgs, patience: &Patience) -> bool {
        let is_left = self.is_left_in_a_mount(planned);
        planned.may_be_missing(args) && !is_left && !patience.late().1.is_zero()
    }

    /// Others are served, and it is when its device answers (B1).
    pub(super) fn comes_slowly(
        &mut self,
        search: Search<'_>,
        args: &ServeArgs,
        patience: &Patience,
    ) -> Result<()> {
        let silence = search.silence();
        // Only who serves goes on with what comes.
        if self.signals.is_none() || !search.planned.may_wait(args, &silence) {
            return self.gives_up(search, args);
        }
        let Search { planned, looking: Looking { thread, .. }, .. } = search;
        self.waits_for(&planned.name, &format!("{silence:#}; the others are served meanwhile"));
        self.slow.push(Coming::slow(planned, patience.late(), thread)?);
        Ok(())
    }

    /// It waits until somebody sees to it, or the start fails.
    pub(super) fn gives_up(&mut self, search: Search<'_>, args: &ServeArgs) -> Result<()> {
        let silence = search.silence();
        let Search { planned, looking: Looking { thread, .. }, .. } = search;
        let device = planned.address().map(|it| it.path.clone()).ok();
        self.silent.push(Silent::new(device, thread));
        if !planned.may_wait(args, &silence) {
            return Err(silence);
        }
        self.waits_for(&planned.name, &format!("{silence:#}"));
        Ok(())
    }
}
