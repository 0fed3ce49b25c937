// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file that `forebay format` makes for a cache that is not there yet.
//!
//! # Invariants
//!
//! - **L1** A file of the cache's name is there only with a whole cache in it: it is made under another name. Who is ended on the way may leave
//!   that one, which the next `format` of the same cache replaces.
//! - **L2** What has that other name is removed, or given the cache's, only by who has it locked and has found it to be that then. The lock of who
//!   makes it lasts from its beginning until it has the cache's name. So of those who make one cache at once one does.

use crate::args::FormatArgs;
use crate::quoted;
use crate::signals::Signals;
use anyhow::{Context, Result, anyhow, bail};
use forebay::io::{FileDevice, FileOptions};
use forebay::shard::CACHE_SOURCE;
use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags};
use rustix::fs::{fcntl_getfl, fcntl_setfl, flock, fstat, lstat, renameat_with};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Behind the cache's name.
const SUFFIX: &str = ".forebay-format";
/// So often what others have left, or are just removing, is found in the way.
const TRIES: usize = 10;

/// It is removed unless it was given its name.
pub struct NewFile {
    path: PathBuf,
    /// Locked (L2).
    file: File,
    /// It takes time to take room, and to give it back.
    signals: Signals,
}

impl NewFile {
    /// All of its room is taken.
    pub fn make(args: &FormatArgs) -> Result<NewFile> {
        let cache = args.cache.display();
        if is_device_name(&args.cache) {
            bail!("{cache}: no such device; `ls -l /dev/disk/by-id` shows those there are");
        }
        let Some(size) = args.size else {
            bail!("{cache}: does not exist; give --size to make a file of that size");
        };
        if let Ok(target) = args.cache.read_link() {
            let target = quoted::shell(&args.cache.parent().unwrap_or(Path::new("")).join(target));
            bail!(
                "{cache}: is a link that leads to nothing; format {target} itself, or choose another name"
            );
        }
        let mut path = args.cache.clone().into_os_string();
        path.push(SUFFIX);
        let (path, signals) = (PathBuf::from(path), Signals::catch()?);
        let file = locked(&path, &args.cache)?;
        let new = NewFile { path, file, signals };
        let done = forebay::host::allocate(&new.file, size);
        // What was interrupted has room all the same.
        new.check_signals(&args.cache)?;
        done.map_err(|why| {
            anyhow!("{cache}: there is no room for it: {why}; give a smaller --size, or make room (`df -h` shows it)")
        })?;
        Ok(new)
    }

    /// As a device, with the lock that it has (L2).
    pub fn device(&self) -> Result<FileDevice> {
        // Where the file system knows no such thing it is done without.
        let _ = fcntl_getfl(&self.file)
            .and_then(|flags| fcntl_setfl(&self.file, flags | OFlags::DIRECT));
        let options =
            FileOptions { exclusive: true, source: CACHE_SOURCE, ..FileOptions::default() };
        Ok(FileDevice::over(self.file.try_clone()?, &self.path, &options)?)
    }

    /// It is whole, and gets its name, for good (L1).
    pub fn show(&self, cache: &Path) -> Result<()> {
        self.check_signals(cache)?;
        let failed = || format!("{}: cannot be made", cache.display());
        match renameat_with(CWD, &self.path, CWD, cache, RenameFlags::NOREPLACE) {
            // The file system knows no such thing.
            Err(Errno::INVAL) if !cache.exists() => std::fs::rename(&self.path, cache),
            Err(Errno::EXIST) => {
                bail!(
                    "{}: was made by another process meanwhile; choose another name",
                    cache.display()
                )
            }
            done => done.map_err(Into::into),
        }
        .with_context(failed)?;
        let above = std::path::absolute(cache).with_context(failed)?;
        let above = above.parent().map_or(Ok(()), |above| File::open(above)?.sync_all());
        above.with_context(failed)
    }

    fn check_signals(&self, cache: &Path) -> Result<()> {
        if self.signals.came() {
            bail!("{}: is not made: a signal ended it; nothing is left of it", cache.display());
        }
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // What was wrong is what matters. One that was named is not there, and what is may be another's.
        if leads_to(&self.path, &self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What to do about a name that cannot be had.
fn directory_advice(why: &io::Error, cache: &Path) -> String {
    match (why.kind(), std::path::absolute(cache).ok().as_deref().and_then(Path::parent)) {
        (ErrorKind::NotFound, Some(directory)) => {
            format!("`mkdir -p {}` makes its directory", quoted::shell(directory))
        }
        (ErrorKind::PermissionDenied, Some(directory)) => format!(
            "choose a directory that you may write to ({} is none), or run it as root (sudo)",
            quoted::shell(directory)
        ),
        _ => "choose another path".into(),
    }
}

/// A new file of that name, locked.
fn locked(path: &Path, cache: &Path) -> Result<File> {
    let failed = || format!("{}: cannot be made", cache.display());
    for _ in 0..TRIES {
        // It will hold what guests have written, which not everybody may read; and nobody else has it open.
        let new = File::options().read(true).write(true).create_new(true).mode(0o600).open(path);
        match new {
            Ok(file) => {
                lock(&file, cache)?;
                // Somebody may have taken it for left before it was locked.
                if !leads_to(path, &file) {
                    bail!(being_made(cache));
                }
                return Ok(file);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists && is_file(path) => {
                // Of one that was ended, unless somebody has it.
                match File::open(path) {
                    Ok(left) => {
                        lock(&left, cache)?;
                        if leads_to(path, &left) {
                            std::fs::remove_file(path).with_context(failed)?;
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(error).with_context(failed),
                }
            }
            // It was there just now.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && !is_there(path) => {}
            Err(error) => bail!("{}: {error}; {}", failed(), directory_advice(&error, cache)),
        }
    }
    bail!(being_made(cache))
}

fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|it| it.is_file())
}

fn leads_to(path: &Path, file: &File) -> bool {
    let of = |it: rustix::fs::Stat| (it.st_dev, it.st_ino);
    matches!((lstat(path), fstat(file)), (Ok(named), Ok(open)) if of(named) == of(open))
}

fn lock(file: &File, cache: &Path) -> Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive).with_context(|| being_made(cache))
}

fn being_made(cache: &Path) -> String {
    format!("{}: is being made by another process; wait for that one", cache.display())
}

/// Whether a device is meant. There, a file would be in RAM, and hardly anybody wants one, but in /dev/shm.
fn is_device_name(path: &Path) -> bool {
    let Ok(path) = std::path::absolute(path) else { return false };
    let above = path.parent().unwrap_or(&path);
    let above = std::fs::canonicalize(above).unwrap_or_else(|_| above.to_owned());
    above.starts_with("/dev") && !above.starts_with("/dev/shm")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::args::{Args, Command};
    use clap::Parser;

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let dir = format!("forebay-new-file-{name}-{}", std::process::id());
            let dir = std::env::temp_dir().join(dir);
            std::fs::create_dir_all(&dir).unwrap();
            Place(dir)
        }

        fn args(&self) -> FormatArgs {
            let cache = self.0.join("cache").display().to_string();
            let args = Args::parse_from(["forebay", "format", &cache, "--size", "64M"]);
            let Command::Format(args) = args.command else { panic!("it was a format") };
            args
        }

        fn other_name(&self) -> PathBuf {
            self.0.join("cache.forebay-format")
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn refused(args: &FormatArgs) -> String {
        NewFile::make(args).err().unwrap().to_string()
    }

    /// It was locked only while its room was taken: another `format` removed it then, and this one formatted that one's file, or found none.
    #[test]
    fn of_two_who_make_one_cache_the_first_does() {
        let place = Place::new("two");
        let args = place.args();
        let first = NewFile::make(&args).unwrap();
        let why = format!("{}: is being made by another process", args.cache.display());
        assert!(refused(&args).starts_with(&why));
        let device = first.device().unwrap();
        assert!(refused(&args).starts_with(&why), "as a device, too");
        first.show(&args.cache).unwrap();
        assert!(leads_to(&args.cache, &first.file));
        drop(device);
        // One that had not seen it there yet.
        let second = NewFile::make(&args).unwrap();
        drop(first);
        assert!(leads_to(&second.path, &second.file), "it is none of the first");
        let late = second.show(&args.cache).unwrap_err().to_string();
        assert!(late.contains("cache: was made by another process meanwhile; "), "{late}");
        drop(second);
        assert!(args.cache.exists() && !place.other_name().exists());
    }

    #[test]
    fn what_was_left_is_replaced_and_a_link_is_not_followed() {
        let place = Place::new("left");
        let args = place.args();
        std::fs::write(place.other_name(), "of one that was ended").unwrap();
        let left = File::open(place.other_name()).unwrap();
        let new = NewFile::make(&args).unwrap();
        assert!(!leads_to(&new.path, &left));
        drop(new);
        assert!(!place.other_name().exists());
        std::fs::write(place.0.join("other"), "another's").unwrap();
        std::os::unix::fs::symlink(place.0.join("other"), place.other_name()).unwrap();
        assert!(refused(&args).contains("cache: cannot be made: File exists"));
        assert_eq!(std::fs::read(place.0.join("other")).unwrap(), b"another's");
    }
}
