// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The file that `forebay format` makes for a cache that is not there yet.
//!
//! # Invariants
//!
//! - **L1** A file of the cache's name is there only with a whole cache in it: it is made under another name. Who is ended on the way may leave
//!   that one, which the next `format` of the same cache replaces.

use crate::args::FormatArgs;
use crate::signals::Signals;
use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Behind the cache's name.
const SUFFIX: &str = ".forebay-format";

/// It is removed unless it was given its name.
pub struct NewFile {
    path: PathBuf,
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
        let mut path = args.cache.clone().into_os_string();
        path.push(SUFFIX);
        let (path, signals) = (PathBuf::from(path), Signals::catch()?);
        let failed = || format!("{cache}: cannot be made");
        if path.symlink_metadata().is_ok_and(|it| it.is_file()) {
            // Of one that was ended, unless somebody has it.
            let left = File::open(&path).with_context(failed)?;
            lock(&left, &args.cache)?;
            std::fs::remove_file(&path).with_context(failed)?;
        }
        // It will hold what guests have written, which not everybody may read.
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.with_context(failed)?;
        let new = NewFile { path, signals };
        // Nobody takes it for left.
        lock(&file, &args.cache)?;
        let done = forebay::host::allocate(&file, size);
        // What was interrupted has room all the same.
        new.check_signals(&args.cache)?;
        done.with_context(|| format!("{cache}: there is no room for it"))?;
        Ok(new)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It is whole, and gets its name, for good (L1).
    pub fn show(&self, cache: &Path) -> Result<()> {
        self.check_signals(cache)?;
        let failed = || format!("{}: cannot be made", cache.display());
        match renameat_with(CWD, &self.path, CWD, cache, RenameFlags::NOREPLACE) {
            // The file system knows no such thing.
            Err(Errno::INVAL) if !cache.exists() => std::fs::rename(&self.path, cache),
            done => done.map_err(Into::into),
        }
        .with_context(failed)?;
        let above = std::path::absolute(cache).with_context(failed)?;
        let above = above.parent().map_or(Ok(()), |above| File::open(above)?.sync_all());
        above.with_context(failed)
    }

    fn check_signals(&self, cache: &Path) -> Result<()> {
        if self.signals.came() {
            bail!("{}: is not made: a signal ended it", cache.display());
        }
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // What was wrong is what matters. One that was named is not there.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn lock(file: &File, cache: &Path) -> Result<()> {
    let cache = cache.display();
    flock(file, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("{cache}: is being made by another process; wait for that one"))
}

/// Whether a device is meant. There, a file would be in RAM, and hardly anybody wants one, but in /dev/shm.
fn is_device_name(path: &Path) -> bool {
    let Ok(path) = std::path::absolute(path) else { return false };
    let above = path.parent().unwrap_or(&path);
    let above = std::fs::canonicalize(above).unwrap_or_else(|_| above.to_owned());
    above.starts_with("/dev") && !above.starts_with("/dev/shm")
}
