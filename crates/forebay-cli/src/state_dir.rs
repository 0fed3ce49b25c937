// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state directory: what this machine knows of caches and their backing devices, outside of both.
//!
//! A record, one small file for each volume of each cache, says which backing device belongs to it, so that who serves
//! that without the cache learns of it; and it has the *mark* that the cache is stale for the volume (`op/stale` of the
//! engine): that the backing device was written without it.
//!
//! # Invariants
//!
//! - **N1** A record is durable before its volume is served; if it cannot be, `status` tells it as a problem. Behind a hand-over
//!   its generation, where nothing else has changed, is raised while the volume is served (`cmd/serve/noting.rs`). A mark is durable before anything
//!   is written that makes it true, without exception.
//! - **N2** A record that cannot be read may have a mark in it: the volume is not served. Nor is any where the directory
//!   is there and cannot be looked at.
//! - **N3** A mark counts for the attach generation that it names. A cache that has dropped what it held of the volume
//!   has a higher one, durably, before the mark is taken away.
//! - **N4** A record says `dirty: false` only where all of the volume was on its backing device, for good, when it was
//!   last served.
//! - **N5** Whoever writes a record, but to remove it, has its backing device locked, and the threads of one process write one after the
//!   other: nobody's mark is overwritten.

use crate::hide::Backing;
use crate::{quoted, small_file};
use anyhow::{Context, Result};
use forebay::host::identity::{Fingerprint, Serial};
use forebay::host::machine::{Host, Target};
use forebay::shard::wall_now;
use forebay_core::format::superblock::Volume;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where it is, if neither the command line nor the user's own directories say otherwise.
pub const ENVIRONMENT: &str = "FOREBAY_STATE_DIR";

/// Why a cache is stale for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// It failed while nothing was dirty, and writes passed it.
    CacheFailed,
    /// The backing device was served without it.
    ServedWithout,
    /// The backing device was changed by others, and what was dirty was kept.
    Changed,
    /// The cache is an older state of itself.
    OlderCache,
}

impl Why {
    /// In words, after "the backing device".
    pub fn text(self) -> &'static str {
        match self {
            Why::CacheFailed => "was written when the cache had failed",
            Why::ServedWithout => "was served without this cache",
            Why::Changed => "was changed by others",
            Why::OlderCache => "was served with a later state of this cache",
        }
    }
}

/// The cache is stale for the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// For what the cache holds of this attach generation, and of older ones.
    pub attach_generation: u32,
    /// Milliseconds since 1970; 0: nobody knows.
    pub since: u64,
    pub why: Why,
    /// What was dirty is kept: the operator has decided, of the backing device as it was then.
    #[serde(default)]
    pub is_kept: bool,
}

impl Mark {
    /// From now on.
    pub fn new(attach_generation: u32, why: Why) -> Mark {
        Mark { attach_generation, since: wall_now(), why, is_kept: false }
    }
}

/// A volume of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Uuids.
    pub cache: String,
    pub volume: String,
    /// For people.
    pub name: String,
    pub cache_path: String,
    pub attach_generation: u32,
    pub backing: Known,
    /// The cache may hold what the backing device does not (N4).
    pub dirty: bool,
    pub stale: Option<Mark>,
    /// When it was left at the last clean stop, in milliseconds since 1970; none while it is served.
    #[serde(default)]
    pub left_at: Option<u64>,
    /// When its backing file was written last, as it was then left, in nanoseconds since 1970; none while it is served, and of a block device.
    #[serde(default)]
    pub written_at: Option<u64>,
    /// What the cache's superblock then said of when that was: with another, an opening that did not know of this record has written to it. None while it is served.
    #[serde(default)]
    pub backing_as_of: Option<u64>,
    /// The cache's generation when it was served; 0: a program from before has not told.
    #[serde(default)]
    pub generation: u32,
    /// That of its superblock at the last clean stop; 0 while it is served.
    #[serde(default)]
    pub sequence: u64,
}

impl Record {
    /// The mark, if it counts for a volume with this attach generation (N3).
    pub fn mark_for(&self, attach_generation: u32) -> Option<Mark> {
        self.stale.filter(|mark| attach_generation <= mark.attach_generation)
    }

    /// Whether the volume was not served since that was written down, as far as its cache knows (M4 of `cmd/serve/stale.rs`).
    pub fn is_as_left(&self, recorded: &Volume) -> bool {
        let found = Fingerprint::decode(&recorded.fingerprint);
        // A program from before has not told.
        let is_same = self.backing_as_of.is_none_or(|left| left == recorded.backing_as_of);
        is_same && found.is_ok_and(|found| found.has_content())
    }

    /// Whether that says the same, but for the generation.
    pub fn is_but_generation(&self, known: &Record) -> bool {
        Record { generation: known.generation, ..self.clone() } == *known
    }

    fn file_name(&self) -> String {
        file_name(&self.cache, &self.volume)
    }
}

fn file_name(cache: &str, volume: &str) -> String {
    format!("{cache}.{volume}")
}

/// A backing device as it is known again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    pub path: PathBuf,
    /// Of a file: it may get another name, and another file its inode.
    serial: Option<String>,
    /// Of a block device that has an identity.
    device: Option<Backing>,
}

impl Known {
    /// As it is found now. A loop device is the file that it shows: the next one with its number may show another.
    pub fn of(path: &Path) -> Known {
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let path = shown_by_loop(&path).unwrap_or(path);
        let target = Target::of(&path).ok().filter(|it| matches!(it, Target::File { .. }));
        let serial = target.map(|it| Serial::of(&Host::default(), &it).to_string());
        Known { serial, device: Backing::found(&path), path }
    }

    /// Whether it is known by more than its name.
    pub fn has_identity(&self) -> bool {
        self.serial.is_some() || self.device.as_ref().is_some_and(Backing::has_identity)
    }

    /// Whether that one is the same. A block device without an identity is known by its name alone.
    pub fn is_same(&self, found: &Known) -> bool {
        match (&self.device, &found.device) {
            (Some(known), Some(found)) if known.has_identity() && found.has_identity() => {
                known.is_same_device(found)
            }
            _ if self.serial.is_some() => self.serial == found.serial,
            _ => self.path == found.path && found.serial.is_none(),
        }
    }
}

fn shown_by_loop(path: &Path) -> Option<PathBuf> {
    let host = Host::default();
    let node = host.node_at_path(path)?;
    let mut loops = host.loops().into_iter();
    let found = loops.find(|it| it.node.number == node.number && it.offset_bytes == 0)?;
    found.backing_file.is_file().then_some(found.backing_file)
}

/// The directory.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
    /// One at a time (N5).
    writes: Arc<Mutex<()>>,
}

impl StateDir {
    /// The one that was given, or the usual one: made if it is not there. The inner error: there is none and cannot be, so
    /// nothing was ever written down in it. One that is there and cannot be looked at is the outer error (N2).
    pub fn open(given: Option<&Path>) -> Result<Result<StateDir, String>> {
        let Some(path) = given.map(Path::to_owned).or_else(usual) else {
            let text = "there is no state directory: neither HOME nor XDG_STATE_HOME is set; give --state-dir";
            return Ok(Err(text.into()));
        };
        let failed = || format!("{}: cannot be the state directory", path.display());
        let mut builder = std::fs::DirBuilder::new();
        let mut make = || builder.recursive(true).mode(0o700).create(&path);
        // To make what is there already is to wait for its file system all the same.
        let made = if path.is_dir() { Ok(()) } else { make().with_context(failed) };
        if let Err(error) = made {
            return if may_be_there(&path) { Err(error) } else { Ok(Err(format!("{error:#}"))) };
        }
        // Known to be there after a power cut, too. Where a record is in it this was done.
        let is_new = std::fs::read_dir(&path).is_ok_and(|mut it| it.next().is_none());
        if let Some(above) = path.parent().filter(|_| is_new) {
            let _ = std::fs::File::open(above).and_then(|it| it.sync_all());
        }
        Ok(Ok(StateDir::at(path)))
    }

    /// Those that are there, of the usual one and these.
    pub fn there(more: impl Iterator<Item = PathBuf>) -> Vec<StateDir> {
        let mut found: Vec<PathBuf> = usual().into_iter().chain(more).collect();
        found.sort_unstable();
        found.dedup();
        found.into_iter().filter(|path| may_be_there(path)).map(StateDir::at).collect()
    }

    fn at(path: PathBuf) -> StateDir {
        StateDir { path, writes: Arc::default() }
    }

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        // Files are whole or not there, whoever broke off.
        self.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a command has to be told of it, with a space before: nothing where it would look there by itself, whatever is in its environment.
    pub fn option(&self) -> String {
        let found = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        match usual_of(|name| name != ENVIRONMENT) == Some(found.clone()) {
            true => String::new(),
            false => format!(" --state-dir {}", quoted::shell(&found)),
        }
    }

    /// What is known of a volume (N2).
    pub fn read(&self, cache: &str, volume: &str) -> Result<Option<Record>> {
        read(&self.path.join(file_name(cache, volume)))
    }

    /// The volumes that a backing device is known to belong to.
    pub fn of_backing(&self, path: &Path) -> Result<Vec<Record>> {
        let found = Known::of(path);
        let mut records = self.all()?;
        records.retain(|record| record.backing.is_same(&found));
        Ok(records)
    }

    /// All that is known.
    pub fn all(&self) -> Result<Vec<Record>> {
        let failed = || format!("{}: cannot be read", self.path.display());
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&self.path).with_context(failed)? {
            let entry = entry.with_context(failed)?;
            // What is being written is nothing yet; `lost+found` is no record.
            let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
            if is_hidden || entry.file_type().with_context(failed)?.is_dir() {
                continue;
            }
            records.extend(read(&entry.path())?);
        }
        Ok(records)
    }

    /// Writes a record, for good: whole or not at all.
    pub fn write(&self, record: &Record) -> Result<()> {
        let _guard = self.one_at_a_time();
        self.write_alone(record)
    }

    /// Raises the generation of a record, whatever else it says by now; one that was removed stays away.
    pub fn raise_generation(&self, cache: &str, volume: &str, generation: u32) -> Result<()> {
        let _guard = self.one_at_a_time();
        match self.read(cache, volume)? {
            Some(known) if known.generation < generation => {
                self.write_alone(&Record { generation, ..known })
            }
            _ => Ok(()),
        }
    }

    fn write_alone(&self, record: &Record) -> Result<()> {
        let path = self.path.join(record.file_name());
        let failed = || format!("{}: cannot be written", path.display());
        if read(&path).is_ok_and(|known| known.as_ref() == Some(record)) {
            // Whoever wrote it may have died before its name was durable (N1).
            return small_file::sync_folder(&self.path).with_context(failed);
        }
        let text = serde_json::to_string_pretty(record)?;
        small_file::replace(&self.path, &record.file_name(), &text).with_context(failed)
    }

    /// A volume is no cache's any more.
    pub fn remove(&self, cache: &str, volume: &str) -> Result<()> {
        let _guard = self.one_at_a_time();
        let path = self.path.join(file_name(cache, volume));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).with_context(|| format!("{}: cannot be removed", path.display()))
            }
            _ => Ok(()),
        }
    }
}

fn read(path: &Path) -> Result<Option<Record>> {
    let failed = |advice: &str| {
        let shown = path.display();
        format!("{shown}: cannot be read, and may say that a cache is stale; {advice}")
    };
    let bad = || failed("mend or remove it");
    match small_file::read(path) {
        Ok(text) => serde_json::from_str(&text).with_context(bad).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => Err(error).with_context(bad),
        // What it says may be well.
        Err(error) => Err(error)
            .with_context(|| failed("do not remove it, and see to what keeps it from being read")),
    }
}

fn may_be_there(path: &Path) -> bool {
    let none = [ErrorKind::NotFound, ErrorKind::NotADirectory];
    path.symlink_metadata().map_or_else(|error| !none.contains(&error.kind()), |_| true)
}

fn usual() -> Option<PathBuf> {
    usual_of(|_| true)
}

/// As far as these variables say where it is.
fn usual_of(is_heeded: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    let of = |name: &str| {
        let path = std::env::var_os(name).filter(|_| is_heeded(name)).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    chosen(is_root, of)
}

fn chosen(is_root: bool, of: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let own = || {
        let home = || Some(of("HOME")?.join(".local/state"));
        Some(of("XDG_STATE_HOME").or_else(home)?.join("forebay"))
    };
    of(ENVIRONMENT).or_else(|| if is_root { Some("/var/lib/forebay".into()) } else { own() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    fn open(path: &Path) -> StateDir {
        StateDir::open(Some(path)).unwrap().unwrap()
    }

    fn record(backing: &Path) -> Record {
        Record {
            cache: "c".into(),
            volume: "v".into(),
            name: "data".into(),
            cache_path: "/dev/nvme".into(),
            attach_generation: 7,
            backing: Known::of(backing),
            dirty: true,
            stale: None,
            left_at: None,
            written_at: None,
            backing_as_of: None,
            generation: 3,
            sequence: 9,
        }
    }

    #[test]
    fn a_record_is_found_by_its_volume_and_by_its_backing_device() {
        let path = scratch("state-found");
        let dir = open(&path);
        let disk = path.with_extension("disk");
        std::fs::write(&disk, "x").unwrap();
        assert_eq!(dir.read("c", "v").unwrap(), None);
        let known = record(&disk);
        dir.write(&known).unwrap();
        assert_eq!(dir.read("c", "v").unwrap(), Some(known.clone()));
        assert_eq!(dir.of_backing(&disk).unwrap(), [known]);
        // It is the same by another name.
        let moved = disk.with_extension("moved");
        std::fs::rename(&disk, &moved).unwrap();
        assert_eq!(dir.of_backing(&moved).unwrap().len(), 1);
        // Another file with its name, which may have its inode.
        std::fs::remove_file(&moved).unwrap();
        std::fs::write(&disk, "y").unwrap();
        assert_eq!(dir.of_backing(&disk).unwrap(), []);
        dir.write(&record(&disk)).unwrap();
        std::fs::write(disk.with_extension("other"), "y").unwrap();
        std::fs::rename(disk.with_extension("other"), &disk).unwrap();
        assert_eq!(dir.of_backing(&disk).unwrap(), []);
        dir.remove("c", "v").unwrap();
        dir.remove("c", "v").unwrap();
        assert_eq!(dir.read("c", "v").unwrap(), None);
        std::fs::remove_file(&disk).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_mark_counts_until_the_cache_has_dropped_what_it_held() {
        let mut record = record(Path::new("/"));
        assert_eq!(record.mark_for(7), None);
        let mark = Mark { attach_generation: 7, since: 1, why: Why::CacheFailed, is_kept: false };
        record.stale = Some(mark);
        assert_eq!([6, 7, 8].map(|it| record.mark_for(it)), [Some(mark), Some(mark), None]);
    }

    #[test]
    fn a_directory_that_is_there_and_cannot_be_used_is_not_none() {
        let path = scratch("state-file");
        std::fs::write(&path, "").unwrap();
        assert!(StateDir::open(Some(&path)).is_err(), "it is a file");
        assert!(
            StateDir::open(Some(&path.join("below"))).unwrap().is_err(),
            "nothing can be there"
        );
        std::fs::remove_file(&path).unwrap();
    }

    /// A mark that was made meanwhile was lost with it.
    #[test]
    fn a_generation_is_raised_in_what_a_record_says_by_then() {
        let path = scratch("state-generation");
        let dir = open(&path);
        let known = record(Path::new("/"));
        dir.raise_generation("c", "v", 5).unwrap();
        assert_eq!(dir.read("c", "v").unwrap(), None, "it was removed");
        let stale = Some(Mark::new(7, Why::CacheFailed));
        dir.write(&Record { stale, dirty: false, ..known.clone() }).unwrap();
        dir.raise_generation("c", "v", 5).unwrap();
        let raised = Record { stale, dirty: false, generation: 5, ..known.clone() };
        assert_eq!(dir.read("c", "v").unwrap(), Some(raised.clone()));
        dir.raise_generation("c", "v", 4).unwrap();
        assert_eq!(dir.read("c", "v").unwrap(), Some(raised.clone()), "it is the later one");
        assert!(!known.is_but_generation(&raised));
        assert!(Record { generation: 9, ..raised.clone() }.is_but_generation(&raised));
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// The directory may be a file system's own.
    #[test]
    fn a_directory_is_no_record() {
        let path = scratch("state-lost-found");
        let dir = open(&path);
        std::fs::create_dir(path.join("lost+found")).unwrap();
        assert_eq!(dir.of_backing(Path::new("/")).unwrap(), []);
        std::fs::remove_dir_all(&path).unwrap();
    }

    /// What is torn, or of a newer forebay, may be a mark.
    #[test]
    fn what_cannot_be_read_is_an_error() {
        let path = scratch("state-rubbish");
        let dir = open(&path);
        std::fs::write(path.join("c.v"), "{").unwrap();
        let told = |error: anyhow::Error| format!("{error:#}");
        assert!(told(dir.read("c", "v").unwrap_err()).contains("; mend or remove it: "));
        assert!(dir.of_backing(Path::new("/")).is_err());
        // Of what it says nothing is known then: to remove it was the advice.
        std::os::unix::fs::symlink("c.w", path.join("c.w")).unwrap();
        let error = told(dir.read("c", "w").unwrap_err());
        assert!(error.contains("do not remove it") && !error.contains("mend or"), "{error}");
        std::fs::remove_file(path.join("c.w")).unwrap();
        // What was being written when the power failed is nothing yet.
        std::fs::rename(path.join("c.v"), path.join(".c.v.new")).unwrap();
        assert_eq!(dir.read("c", "v").unwrap(), None);
        assert_eq!(dir.of_backing(Path::new("/")).unwrap(), []);
        dir.write(&record(Path::new("/"))).unwrap();
        assert_eq!(dir.of_backing(Path::new("/")).unwrap().len(), 1);
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn the_directory_is_where_users_expect_it() {
        let of = |set: &'static [(&str, &str)]| {
            move |name: &str| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| PathBuf::from(value))
            }
        };
        assert_eq!(chosen(true, of(&[("HOME", "/h")])), Some("/var/lib/forebay".into()));
        assert_eq!(chosen(false, of(&[("HOME", "/h")])), Some("/h/.local/state/forebay".into()));
        assert_eq!(
            chosen(false, of(&[("HOME", "/h"), ("XDG_STATE_HOME", "/x")])),
            Some("/x/forebay".into())
        );
        assert_eq!(chosen(true, of(&[(ENVIRONMENT, "/e")])), Some("/e".into()));
        assert_eq!(chosen(false, of(&[])), None);
    }
}
