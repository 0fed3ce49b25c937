// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where a cache that nobody serves has its state directory: what `serve` would be told by the file that names the cache.
//!
//! # Invariants
//!
//! - **F1** What is done with a cache by its path alone heeds the directory that its daemon writes to: the mark may be there that the
//!   cache is stale. A file that may name the cache and cannot be understood is refused, never passed over.

use super::{file, paths, read};
use crate::small_file;
use anyhow::{Context, Result, bail};
use forebay::host::machine::Host;
use forebay::host::named::Named;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const ADVICE: &str = "mend the file, or give --state-dir";

/// The directory that was given, or that of the files which name the cache (F1); none: the usual one.
pub fn state_dir_of(cache: &Path, uuid: &str, given: Option<&Path>) -> Result<Option<PathBuf>> {
    if let Some(given) = given {
        return Ok(Some(given.to_owned()));
    }
    let paths = match paths() {
        Err(error) if error.downcast_ref().is_some_and(is_not_ours) => return Ok(None),
        paths => paths.context("whether a file names the cache is not known; give --state-dir")?,
    };
    let is_it = |name: &Path| is_named(name, cache, uuid);
    let mut found = BTreeSet::new();
    for path in &paths {
        found.extend(of_file(path, is_it)?);
    }
    if found.len() > 1 {
        let text = |dir: &Option<PathBuf>| match dir {
            Some(dir) => dir.display().to_string(),
            None => "the usual one".into(),
        };
        let dirs: Vec<String> = found.iter().map(text).collect();
        bail!(
            "{}: files in {} name it with different state directories: {}; say which one holds, by --state-dir",
            cache.display(),
            super::DIRECTORY,
            dirs.join(", ")
        );
    }
    Ok(found.into_iter().flatten().next())
}

/// The directory that was given, or those of all files: for who asks whose a device is (F1).
pub fn state_dirs(given: Option<&Path>) -> Result<Vec<PathBuf>> {
    if let Some(given) = given {
        return Ok(vec![given.to_owned()]);
    }
    let paths = match paths() {
        Err(error) if error.downcast_ref().is_some_and(is_not_ours) => return Ok(Vec::new()),
        paths => paths.context("give --state-dir")?,
    };
    let mut found = Vec::new();
    for path in &paths {
        found.extend(of_file(path, |_| true)?.flatten());
    }
    Ok(found)
}

/// A file or directory that root alone may read is of a daemon of root's, whose devices are not this user's.
pub fn is_not_ours(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root()
}

/// What a file says of the directory, if it names the cache.
fn of_file(path: &Path, is_it: impl Fn(&Path) -> bool) -> Result<Option<Option<PathBuf>>> {
    let config = match read(path) {
        Ok(config) => config,
        Err(error) => {
            // Whatever else is wrong with it, it may say that it is another's.
            let text = small_file::read(path);
            let named = match &text {
                Ok(text) => file::cache_in(text),
                // Gone meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                Err(error) if is_not_ours(error) => return Ok(None),
                Err(_) => None,
            };
            if named.is_some_and(|named| !is_it(Path::new(&named))) {
                return Ok(None);
            }
            let text =
                format!("this file may say where the cache has its state directory; {ADVICE}");
            return Err(error.context(text));
        }
    };
    let is_named = config.path_of("cache").is_some_and(|named| is_it(&named));
    Ok(is_named.then(|| config.path_of("state-dir")))
}

/// Whether this name leads to the cache, which is there.
fn is_named(name: &Path, cache: &Path, uuid: &str) -> bool {
    let found = match Named::parse(name) {
        Ok(Named::Uuid(named)) => return named == uuid,
        Ok(named) => named.find(&Host::default()).ok().flatten(),
        // Of a kind that leads nowhere.
        Err(_) => None,
    };
    found.is_some_and(|found| is_same(&found, cache))
}

/// The same file, or the same device by whatever node.
fn is_same(one: &Path, other: &Path) -> bool {
    let (Ok(one), Ok(other)) = (one.metadata(), other.metadata()) else { return false };
    match one.file_type().is_block_device() && other.file_type().is_block_device() {
        true => one.rdev() == other.rdev(),
        false => (one.dev(), one.ino()) == (other.dev(), other.ino()),
    }
}
