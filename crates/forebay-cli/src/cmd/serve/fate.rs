// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What becomes of the files that are served, while they are: removed, replaced, moved, or cut.
//!
//! All of that can be done to a file that is open and locked. What is written to one that has no name any more ends with the process; and a write behind
//! the end of one that was cut makes it long again, with zeros in the place of what is missing. So they are looked at every [`EVERY`].
//!
//! # Invariants
//!
//! - **L1** To look is to ask a file system that may not answer (a network's): a thread does it, one for each file, and no other is begun before it
//!   has answered. The serving thread waits for it only where an operator asks for something that rests on it, for [`ANSWER_MAX`] at most in all.
//! - **L2** No descriptor is made for that: it would have the file's lock (F3 of `io/file.rs`) for longer than the device is there. The
//!   thread looks at the open file by its name in `/proc`, and what is another file by then is nothing.
//! - **L3** Of a file that was cut the least end that was seen counts, until it is as long as its volume again: somebody's write may have made it longer.
//!   That of a cache counts to the end of the program: its log makes it long again, and not whole.
//!
//! # Not here
//!
//! Block devices: the kernel keeps what is open, and what is cut there fails by itself.

use super::Daemon;
use crate::asking::Asking;
use crate::quoted;
use anyhow::{Result, bail};
use forebay::io::{Device, DeviceKind};
use forebay_core::units::VolumeIndex;
use rustix::fs::fstat;
use std::ffi::OsStr;
use std::fs::{Metadata, metadata, read_link};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::Builder;
use std::time::{Duration, Instant};
use tracing::{info, warn};

pub(super) const EVERY: Duration = Duration::from_secs(2);
/// How long all files are waited for that have answered until now (L1).
const ANSWER_MAX: Duration = Duration::from_millis(250);
const STACK_BYTES: usize = 128 << 10;

/// Where a file is that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// Its path leads there.
    Here,
    /// It has another name: this one, if that is known.
    Moved(Option<PathBuf>),
    /// It has none; another file may have its path.
    Removed { is_replaced: bool },
}

struct Seen {
    place: Place,
    size_bytes: u64,
}

/// A file that is served, and what is known to have become of it.
pub(super) struct Fate {
    path: PathBuf,
    open: RawFd,
    device: u64,
    inode: u64,
    look: Option<Asking<Option<Seen>>>,
    /// How long its volume was when that was begun: it may have grown since, after its file.
    whole: u64,
    place: Place,
    /// Its least end, and how long its volume was then (L3).
    cut: Option<(u64, u64)>,
}

impl Fate {
    /// Of one that was just opened; `None` if it is no file.
    pub(super) fn of(device: &dyn Device, path: &Path) -> Option<Fate> {
        let open = device.descriptor().filter(|_| device.info().kind == DeviceKind::File)?;
        let status = fstat(open).ok()?;
        Some(Fate {
            path: std::path::absolute(path).ok()?,
            open: open.as_raw_fd(),
            device: status.st_dev,
            inode: status.st_ino,
            look: None,
            whole: 0,
            place: Place::Here,
            cut: None,
        })
    }

    fn is_it(&self, found: &Metadata) -> bool {
        (found.dev(), found.ino()) == (self.device, self.inode)
    }

    /// Begins to look, unless the last one has not answered. Says whether it has begun.
    fn begin(&mut self, whole: u64) -> bool {
        if self.look.is_some() {
            return false;
        }
        self.whole = whole;
        let it = Fate { path: self.path.clone(), look: None, place: Place::Here, ..*self };
        let thread = Builder::new().name("file".into()).stack_size(STACK_BYTES);
        // Where there is no thread to be had the next look may see more.
        self.look = Asking::begin_as(thread, move || it.seen()).ok();
        self.look.is_some()
    }

    /// For a thread (L1, L2).
    fn seen(&self) -> Option<Seen> {
        let open = format!("/proc/self/fd/{}", self.open);
        let found = metadata(&open).ok().filter(|found| self.is_it(found))?;
        let is_replaced = match metadata(&self.path) {
            Ok(named) if self.is_it(&named) => None,
            Ok(_) => Some(true),
            Err(why) if matches!(why.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Some(false)
            }
            // Nobody knows.
            Err(_) => None,
        };
        let place = match is_replaced {
            None => Place::Here,
            Some(is_replaced) => {
                let now = read_link(&open).ok();
                let ends = |it: &PathBuf| it.file_name().is_some_and(is_kept_name);
                match found.nlink() == 0 || now.as_ref().is_some_and(ends) {
                    true => Place::Removed { is_replaced },
                    // Another link to it has a name that nobody says here; a mount may hide the one that it has.
                    false => Place::Moved(now.filter(|now| {
                        *now != self.path && metadata(now).is_ok_and(|it| self.is_it(&it))
                    })),
                }
            }
        };
        Some(Seen { place, size_bytes: found.size() })
    }

    /// What was seen, if a look is over; waits so long for it.
    fn news(&mut self, limit: Duration) -> Option<Seen> {
        let look = self.look.take_if(|look| look.wait(limit))?;
        look.end().ok().flatten()
    }

    /// L3.
    fn least_end(&self, seen: &Seen) -> u64 {
        self.cut.map_or(u64::MAX, |(end, _)| end).min(seen.size_bytes)
    }

    pub(super) fn is_removed(&self) -> bool {
        matches!(self.place, Place::Removed { .. })
    }

    /// What is wrong with its place.
    fn misplaced(&self) -> Option<String> {
        let path = self.path.display();
        match &self.place {
            Place::Here => None,
            Place::Moved(Some(now)) => Some(format!(
                "{path} does not lead any more to the file that is served, which is {} now",
                now.display()
            )),
            Place::Moved(None) => Some(format!(
                "{path} does not lead any more to the file that is served: that has another name (`find -inum {}` on its file system tells it), \
                 or is hidden by a mount",
                self.inode
            )),
            Place::Removed { is_replaced: false } => {
                Some(format!("{path} has been removed while it is served"))
            }
            Place::Removed { is_replaced: true } => Some(format!(
                "{path} has been replaced by another file while it is served; what is served has no name any more"
            )),
        }
    }

    /// That of a volume's file, and what to do.
    pub(super) fn gone_text(&self, name: &str, has_cache: bool) -> Option<String> {
        let (path, misplaced) = (self.path.display(), self.misplaced()?);
        Some(match &self.place {
            // The path may be a link, so that nobody can say what to move.
            Place::Moved(_) => format!(
                "{misplaced}; the next start looks for it there: before that let {path} lead to it again"
            ),
            _ => {
                let drain = if has_cache { format!(", `forebay drain {name}`") } else { "".into() };
                format!(
                    "{misplaced}: all that the volume has ends with the daemon; before that stop what uses it{drain}, and save it: \
                     `cp --sparse=always /proc/{}/fd/{} NEW`",
                    std::process::id(),
                    self.open
                )
            }
        })
    }

    /// Why what has left, or is drained, is not the plain disk at its path.
    pub(super) fn not_plain(&self) -> Option<String> {
        self.cut_short().or_else(|| self.misplaced())
    }

    /// That it was cut.
    pub(super) fn cut_short(&self) -> Option<String> {
        let ((end, whole), path) = (self.cut?, self.path.display());
        Some(format!(
            "{path} has been cut to {end} bytes while it is served, and the volume has {whole}: what lay behind is gone"
        ))
    }

    /// The same, and what to do.
    pub(super) fn cut_text(&self) -> Option<String> {
        let ((_, whole), shell) = (self.cut?, quoted::shell(&self.path));
        Some(format!(
            "{}; requests there fail, and what is dirty there stays in the cache; put back what is missing from a copy, or make it as long \
             again where zeros may be in its place (`truncate -s {whole} {shell}`)",
            self.cut_short()?
        ))
    }

    /// Both.
    pub(super) fn text(&self, name: &str, has_cache: bool) -> Option<String> {
        let texts: Vec<String> =
            self.gone_text(name, has_cache).into_iter().chain(self.cut_text()).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    /// The same of the file of the cache.
    pub(super) fn cache_text(&self) -> Option<String> {
        let cut = self.cut.map(|(end, whole)| {
            format!(
                "{} was cut to {end} bytes while it was served, and the cache has {whole}: what lay behind is gone; `forebay scrub` reads the rest \
                 again from the backing devices, and names what was dirty",
                self.path.display()
            )
        });
        let texts: Vec<String> = self.cache_misplaced_text().into_iter().chain(cut).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    fn cache_misplaced_text(&self) -> Option<String> {
        let misplaced = self.misplaced()?;
        Some(match &self.place {
            Place::Moved(_) => {
                format!(
                    "{misplaced}; let it lead there again, or name it otherwise at the next start"
                )
            }
            _ => format!(
                "{misplaced}: what is not on the backing devices ends with the daemon; before that `forebay drain`, or `forebay stop \
                 --drain`, writes it back"
            ),
        })
    }

    /// In place of what to do with a cache that is not where it was.
    fn cache_ended_text(&self) -> Option<String> {
        let misplaced = self.misplaced()?;
        Some(match &self.place {
            Place::Moved(_) => {
                format!("{misplaced}: drain that one (`forebay drain --cache`)")
            }
            _ => format!("{misplaced}: what is not on the backing devices is gone"),
        })
    }

    /// What a stop says that has ended, of what nobody has any more.
    pub(super) fn ended_text(&self, name: &str) -> Option<String> {
        let misplaced = self.misplaced().filter(|_| self.is_removed())?;
        Some(format!("{name}: {misplaced}: what the volume had is gone"))
    }
}

impl Daemon {
    /// Hears what was seen.
    pub(super) fn hear_of_files(&mut self) {
        self.heed_files(|_| Duration::ZERO);
    }

    /// Looks at all files now, as somebody asks for what rests on them (L1).
    pub(super) fn look_at_files(&mut self) {
        self.hear_of_files();
        let begun = self.begin_looks();
        let since = Instant::now();
        self.heed_files(|fate| match begun.contains(&fate.open) {
            true => ANSWER_MAX.saturating_sub(since.elapsed()),
            false => Duration::ZERO,
        });
    }

    /// Of all that are not being looked at. Gives those.
    pub(super) fn begin_looks(&mut self) -> Vec<RawFd> {
        let engine = self.server.shard.engine();
        let volumes = self
            .volumes
            .iter_mut()
            .filter_map(|served| Some((served.fate.as_mut()?, engine.volume_bytes(served.index)?)));
        let cache_bytes = self.server.shard.superblock().size_bytes;
        let all = volumes.chain(self.cache_fate.as_mut().map(|fate| (fate, cache_bytes)));
        all.filter_map(|(fate, whole)| fate.begin(whole).then_some(fate.open)).collect()
    }

    fn heed_files(&mut self, limit: impl Fn(&Fate) -> Duration) {
        for at in 0..self.volumes.len() {
            let fate = self.volumes[at].fate.as_mut();
            if let Some(seen) = fate.and_then(|fate| fate.news(limit(fate))) {
                self.heed_volume(at, seen);
            }
        }
        let Some(fate) = &mut self.cache_fate else { return };
        let before = fate.cache_text();
        if let Some(seen) = fate.news(limit(fate)) {
            // It may have been made smaller meanwhile, and its file is cut after that.
            let bytes = self.server.shard.superblock().size_bytes.min(fate.whole);
            if seen.size_bytes < bytes {
                fate.cut = Some((fate.least_end(&seen), bytes));
            }
            fate.place = seen.place;
            tell(before, fate.cache_text(), &fate.path);
        }
    }

    fn heed_volume(&mut self, at: usize, seen: Seen) {
        let has_cache = self.cache_path.is_some();
        let shard = &mut self.server.shard;
        let served = &mut self.volumes[at];
        let Some(bytes) = shard.engine().volume_bytes(served.index) else { return };
        let Some(fate) = &mut served.fate else { return };
        let text = |fate: &Fate| {
            fate.text(&served.name, has_cache).map(|text| format!("{}: {text}", served.name))
        };
        let before = text(fate);
        let bytes = bytes.min(fate.whole);
        fate.cut = (seen.size_bytes < bytes).then(|| (fate.least_end(&seen), bytes));
        fate.place = seen.place;
        shard.note_end(served.index, fate.cut.map(|(end, _)| end));
        tell(before, text(fate), &fate.path);
    }

    /// What has become of a volume's file.
    pub(super) fn fate_of(&self, index: VolumeIndex) -> Option<&Fate> {
        self.volumes.iter().find(|served| served.index == index)?.fate.as_ref()
    }

    /// What a stop says of a cache that is not where it was, and whether it is nowhere.
    pub(super) fn cache_gone(&self) -> Option<(String, bool)> {
        let fate = self.cache_fate.as_ref()?;
        Some((fate.cache_ended_text()?, fate.is_removed()))
    }

    /// Refuses to become another program, which would take the end of a file that was cut for its own.
    pub(super) fn check_cut(&mut self) -> Result<()> {
        self.look_at_files();
        match self.volumes.iter().find_map(|served| served.fate.as_ref()?.cut_short()) {
            Some(text) => bail!("{text}; not before it is as long again"),
            None => Ok(()),
        }
    }

    /// Refuses an end with which something would be gone, as far as files can tell that. Else what is to be known of them.
    pub(super) fn check_end(&mut self) -> Result<Vec<String>> {
        self.look_at_files();
        let mut lines = Vec::new();
        let has_cache = self.cache_path.is_some();
        for served in &self.volumes {
            let Some(fate) = &served.fate else { continue };
            let Some(text) = fate.text(&served.name, has_cache) else { continue };
            if fate.is_removed() {
                bail!("the daemon was not stopped: {}: {text}; {}", served.name, all_the_same());
            }
            lines.push(format!("{}: {text}", served.name));
        }
        let engine = self.server.shard.engine();
        let recorded = (0..self.server.shard.superblock().volumes.len() as u8).map(VolumeIndex);
        let is_dirty = recorded.filter_map(|index| engine.status(index)).any(|status| status.dirty);
        if let Some(fate) = &self.cache_fate
            && let Some(text) = fate.cache_text()
        {
            if fate.is_removed() && is_dirty {
                bail!("the daemon was not stopped: {text}; {}", all_the_same());
            }
            if is_dirty {
                lines.push(text);
            }
        }
        Ok(lines)
    }
}

/// What file systems without files that have no name (NFS, FUSE) call a removed one until it is closed.
fn is_kept_name(name: &OsStr) -> bool {
    [".nfs", ".fuse_hidden"].iter().any(|it| name.as_encoded_bytes().starts_with(it.as_bytes()))
}

fn all_the_same() -> String {
    format!("`kill {}` ends it all the same", std::process::id())
}

/// Tells the log what has changed.
fn tell(before: Option<String>, now: Option<String>, path: &Path) {
    match now {
        now if now == before => {}
        Some(text) => warn!("{text}"),
        None => info!("{} is there, and as long as it has to be, again", path.display()),
    }
}
