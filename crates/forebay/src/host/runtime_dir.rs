// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where sockets, locks and shared memory of running caches are.
//!
//! `/run/forebay` for root, `$XDG_RUNTIME_DIR/forebay` for others, else `forebay-UID` in the
//! temporary directory. Whoever can write there can speak to our sockets, so it is ours alone or
//! it is refused.
//!
//! # Invariants
//!
//! - **D1** The directory is a directory and not a symbolic link, belongs to us, and has mode 0700
//!   or less.
//! - **D2** Nobody but us and root can put another in its place: each is true of the directory
//!   above it, or that one is sticky.
//! - **D3** A shared-memory file has its memory when [`RuntimeDir::create_shared`] returns: a full
//!   tmpfs is an error then and not SIGBUS later.
//! - **D4** A shared-memory file is locked as long as its process lives: another opening of its cache, of a copy of it then, does not
//!   take it away.
//! - **D5** What a process that is gone has left is looked for wherever one may have had its directory ([`LeftDirs`]), since the environment
//!   of the next need not be its. A directory or file there is believed if it is root's or our own (root believes the owner of the
//!   cache file as well, who could have written anything into that), others have no access, and it is no link.

use super::machine::{Host, read_trimmed};
use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer than anybody looks.
const LOOK: Duration = Duration::from_millis(10);
const LOCK_TRIES: u32 = 20;
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Why there is no directory we may use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeDirError {
    /// A call failed.
    #[error("{path}: cannot be {attempted}")]
    Io {
        /// On what.
        path: PathBuf,
        /// `created`, `opened` …
        attempted: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A symbolic link or not a directory.
    #[error("{path}: expected a directory of our own, found a link or a file; remove it")]
    NotDirectory {
        /// What.
        path: PathBuf,
    },
    /// Somebody else's.
    #[error("{path}: expected owner {expected}, found owner {found}; remove it or ask its owner")]
    Owner {
        /// What.
        path: PathBuf,
        /// Us.
        expected: u32,
        /// Them.
        found: u32,
    },
    /// Others can get in.
    #[error(
        "{path}: expected no access for others, found mode {mode:04o}; run `chmod 0700 {path}`"
    )]
    Mode {
        /// What.
        path: PathBuf,
        /// As found.
        mode: u32,
    },
    /// Others can replace it.
    #[error(
        "{path}: others may rename what is in it (owner {owner}, mode {mode:04o}), so nothing \
         there is safe; set XDG_RUNTIME_DIR"
    )]
    Above {
        /// The directory above ours.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its mode.
        mode: u32,
    },
    /// A process that is alive has it.
    #[error("{path}: another process has it")]
    Held {
        /// The file.
        path: PathBuf,
    },
    /// Not one name.
    #[error("{name:?}: expected a plain file name")]
    Name {
        /// As given.
        name: String,
    },
    /// The file system has not that much room.
    #[error("{path}: {expected_bytes} bytes of shared memory cannot be had; free some room there")]
    Room {
        /// The file.
        path: PathBuf,
        /// As asked for.
        expected_bytes: u64,
        /// Why.
        source: io::Error,
    },
}

/// What the choice of a directory depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// Who we are.
    pub user_id: u32,
    /// `/run`, used by root.
    pub run: PathBuf,
    /// `$XDG_RUNTIME_DIR`.
    pub xdg: Option<PathBuf>,
    /// The temporary directory.
    pub temporary: PathBuf,
    /// `/dev/shm`.
    pub shared: PathBuf,
}

impl Places {
    /// As this process finds them.
    pub fn found() -> Self {
        let xdg = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        Self {
            user_id: rustix::process::geteuid().as_raw(),
            run: PathBuf::from("/run"),
            xdg: xdg.filter(|path| path.is_absolute()),
            temporary: std::env::temp_dir(),
            shared: PathBuf::from("/dev/shm"),
        }
    }

    fn chosen(&self) -> PathBuf {
        match &self.xdg {
            _ if self.user_id == 0 => self.run.join("forebay"),
            Some(xdg) => xdg.join("forebay"),
            None => self.temporary.join(format!("forebay-{}", self.user_id)),
        }
    }
}

/// A directory that is ours alone.
#[derive(Debug)]
pub struct RuntimeDir {
    path: PathBuf,
    directory: OwnedFd,
    owner: u32,
}

/// Where a process may have left its memory: of this user, of root, of the cache file's owner.
#[derive(Debug, Default)]
pub struct LeftDirs {
    /// Those that are there and believed.
    pub dirs: Vec<RuntimeDir>,
    /// All that were looked for.
    pub looked: Vec<PathBuf>,
}

impl LeftDirs {
    /// Looks for all of them; makes none. `cache_owner`: whom the cache belongs to, if it is a file.
    pub fn find(places: &Places, cache_owner: Option<u32>) -> LeftDirs {
        let mut users = vec![places.user_id];
        users.extend(cache_owner.filter(|owner| places.user_id == 0 && *owner != 0));
        let mut looked = vec![places.chosen(), places.run.join("forebay")];
        looked.extend(places.xdg.iter().map(|xdg| xdg.join("forebay")));
        for user in &users {
            let own = format!("forebay-{user}");
            looked.push(places.run.join(format!("user/{user}/forebay")));
            looked.extend([&places.shared, &places.temporary].map(|place| place.join(&own)));
        }
        let mut found = LeftDirs::default();
        for path in looked {
            if found.looked.contains(&path) {
                continue;
            }
            let dir = RuntimeDir::open_there(&path);
            let is_believed = |dir: &RuntimeDir| dir.owner == 0 || users.contains(&dir.owner);
            found.dirs.extend(dir.ok().filter(is_believed));
            found.looked.push(path);
        }
        found
    }
}

impl RuntimeDir {
    /// Creates or checks the directory of this user.
    pub fn open() -> Result<Self, RuntimeDirError> {
        let places = Places::found();
        Self::open_private(&places.chosen(), places.user_id)
    }

    /// As [`RuntimeDir::open`], elsewhere.
    pub fn open_in(places: &Places) -> Result<Self, RuntimeDirError> {
        Self::open_private(&places.chosen(), places.user_id)
    }

    /// A directory on a memory file system for shared memory: this one when it is on one, else
    /// `forebay-UID` in `/dev/shm`; `None` when neither is.
    pub fn shared_dir(&self, places: &Places) -> Result<Option<Self>, RuntimeDirError> {
        if is_memory(&self.path, self.directory.as_fd())? {
            return Self::open_private(&self.path, places.user_id).map(Some);
        }
        let Ok(shared) = open_directory(&places.shared) else { return Ok(None) };
        if !is_memory(&places.shared, shared.as_fd())? {
            return Ok(None);
        }
        let path = places.shared.join(format!("forebay-{}", places.user_id));
        Self::open_private(&path, places.user_id).map(Some)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A new file of this size in it, mode 0600, all of its memory taken (D3), locked for as long as it is open. A file of that
    /// name that a process now gone left behind is replaced, and nobody else's (D4): of two who come at once one gets it.
    pub fn create_shared(&self, name: &str, size_bytes: u64) -> Result<File, RuntimeDirError> {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Err(RuntimeDirError::Name { name: name.to_owned() });
        }
        let path = self.path.join(name);
        let failed = |attempted| {
            let path = path.clone();
            move |error: Errno| RuntimeDirError::Io { path, attempted, source: error.into() }
        };
        let held = || RuntimeDirError::Held { path: path.clone() };
        let left = self.open_left(name, false).map_err(|source| RuntimeDirError::Io {
            path: path.clone(),
            attempted: "opened",
            source,
        })?;
        if let Some(left) = &left
            && !lock(left).map_err(failed("locked"))?
        {
            return Err(held());
        }
        match rustix::fs::unlinkat(&self.directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(failed("replaced")(error)),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) => return Err(held()),
            file => file.map_err(failed("created"))?,
        };
        if !lock(&file).map_err(failed("locked"))? {
            return Err(held());
        }
        let taken = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size_bytes);
        if let Err(error) = taken {
            // Nothing is left of a file that could not be had; that it was not removed hides
            // nothing, the error is returned either way.
            let _ = rustix::fs::unlinkat(&self.directory, name, AtFlags::empty());
            let source = error.into();
            return Err(RuntimeDirError::Room { path, expected_bytes: size_bytes, source });
        }
        Ok(File::from(file))
    }

    /// Whether a process that is alive has this shared file: it holds the lock that [`RuntimeDir::create_shared`] took.
    pub fn is_held(&self, name: &str) -> Result<bool, RuntimeDirError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.directory, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(io_failed(&self.path.join(name), "opened", error)),
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(Errno::WOULDBLOCK) => Ok(true),
            Err(error) => Err(io_failed(&self.path.join(name), "locked", error)),
        }
    }

    /// A file that a process has left here, if there is one that is believed (D5).
    pub fn open_left(&self, name: &str, writes: bool) -> io::Result<Option<File>> {
        let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.directory, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::LOOP) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let found = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        let is_believed = found.st_uid == 0 || found.st_uid == self.owner;
        Ok((is_file && is_believed).then(|| File::from(file)))
    }

    /// Removes what was left here and is of no use any more.
    pub fn remove_left(&self, name: &str) {
        // Its memory is what it takes; nobody believes it again.
        let _ = rustix::fs::unlinkat(&self.directory, name, AtFlags::empty());
    }

    /// One that is there, whoever's it is.
    fn open_there(path: &Path) -> Result<Self, RuntimeDirError> {
        let directory = open_directory(path)?;
        let failed = |error| io_failed(path, "examined", error);
        let owner = rustix::fs::fstat(&directory).map_err(failed)?.st_uid;
        Self::checked(path, directory, owner)
    }

    fn open_private(path: &Path, user_id: u32) -> Result<Self, RuntimeDirError> {
        if let Some(above) = path.parent() {
            check_above(above, user_id)?; // D2, before anything is made there
        }
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(io_failed(path, "created", error)),
        }
        Self::checked(path, open_directory(path)?, user_id)
    }

    /// D1, D2; and from here on by its descriptor.
    fn checked(path: &Path, directory: OwnedFd, user_id: u32) -> Result<Self, RuntimeDirError> {
        if let Some(above) = path.parent() {
            check_above(above, user_id)?;
        }
        let found =
            rustix::fs::fstat(&directory).map_err(|error| io_failed(path, "examined", error))?;
        if found.st_uid != user_id {
            let (expected, found) = (user_id, found.st_uid);
            return Err(RuntimeDirError::Owner { path: path.into(), expected, found });
        }
        let mode = found.st_mode & 0o7777;
        if mode & 0o077 != 0 {
            return Err(RuntimeDirError::Mode { path: path.into(), mode });
        }
        Ok(Self { path: path.into(), directory, owner: user_id })
    }
}

/// This boot's identity: what was in memory file systems under another is gone.
pub fn boot_id(host: &Host) -> Option<String> {
    read_trimmed(&host.proc.join("sys/kernel/random/boot_id"))
}

/// How long the machine has been running.
pub fn uptime(host: &Host) -> Option<Duration> {
    let text = read_trimmed(&host.proc.join("uptime"))?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

fn check_above(path: &Path, user_id: u32) -> Result<(), RuntimeDirError> {
    let found = rustix::fs::stat(path).map_err(|error| io_failed(path, "examined", error))?;
    let mode = found.st_mode & 0o7777;
    let is_owned = found.st_uid == 0 || found.st_uid == user_id;
    let is_closed = mode & 0o022 == 0 || mode & 0o1000 != 0;
    if is_owned && is_closed {
        Ok(())
    } else {
        Err(RuntimeDirError::Above { path: path.into(), owner: found.st_uid, mode })
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, RuntimeDirError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(directory) => Ok(directory),
        Err(Errno::LOOP | Errno::NOTDIR) => {
            Err(RuntimeDirError::NotDirectory { path: path.into() })
        }
        Err(error) => Err(io_failed(path, "opened", error)),
    }
}

fn is_memory(path: &Path, directory: impl AsFd) -> Result<bool, RuntimeDirError> {
    let found =
        rustix::fs::fstatfs(directory).map_err(|error| io_failed(path, "examined", error))?;
    // The type is signed on some machines; the magic is its low 32 bits.
    let magic = (found.f_type as u64) & 0xffff_ffff;
    Ok(magic == TMPFS_MAGIC || magic == RAMFS_MAGIC)
}

fn io_failed(path: &Path, attempted: &'static str, error: Errno) -> RuntimeDirError {
    RuntimeDirError::Io { path: path.into(), attempted, source: error.into() }
}

/// Locks a file for as long as it is open; says whether that can be had. Who only looks whether it is held has it for a moment.
fn lock(file: &impl AsFd) -> rustix::io::Result<bool> {
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOOK),
            other => return other.map(|()| true),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn places(name: &str) -> Places {
        let root = std::env::temp_dir().join(format!("forebay-dir-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for part in ["run", "xdg", "tmp", "shm"] {
            fs::create_dir_all(root.join(part)).unwrap();
            fs::set_permissions(root.join(part), fs::Permissions::from_mode(0o755)).unwrap();
        }
        Places {
            user_id: rustix::process::geteuid().as_raw(),
            run: root.join("run"),
            xdg: Some(root.join("xdg")),
            temporary: root.join("tmp"),
            shared: root.join("shm"),
        }
    }

    fn clean(places: &Places) {
        fs::remove_dir_all(places.run.parent().unwrap()).unwrap();
    }

    #[test]
    fn directory_is_made_private_and_found_again() {
        let places = places("made");
        let first = RuntimeDir::open_in(&places).unwrap();
        assert_eq!(fs::metadata(first.path()).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(RuntimeDir::open_in(&places).unwrap().path(), first.path());
        clean(&places);
    }

    #[test]
    fn user_without_xdg_gets_a_directory_with_its_number() {
        let mut places = places("number");
        places.xdg = None;
        places.user_id = 4711;
        assert_eq!(places.chosen(), places.temporary.join("forebay-4711"));
        clean(&places);
    }

    #[test]
    fn open_linked_or_foreign_directory_is_refused() {
        let places = places("refused");
        let path = places.chosen();
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let error = RuntimeDir::open_in(&places).unwrap_err();
        assert!(matches!(error, RuntimeDirError::Mode { mode: 0o750, .. }));

        fs::remove_dir(&path).unwrap();
        symlink(&places.temporary, &path).unwrap();
        let error = RuntimeDir::open_in(&places).unwrap_err();
        assert!(matches!(error, RuntimeDirError::NotDirectory { .. }), "{error}");
        fs::remove_file(&path).unwrap();

        fs::write(&path, "").unwrap();
        let error = RuntimeDir::open_in(&places).unwrap_err();
        assert!(matches!(error, RuntimeDirError::NotDirectory { .. }), "{error}");
        fs::remove_file(&path).unwrap();

        let error = RuntimeDir::open_private(&path, places.user_id + 1).unwrap_err();
        let expected = places.user_id + 1;
        assert!(
            matches!(error, RuntimeDirError::Owner { expected: e, .. } if e == expected)
                || matches!(error, RuntimeDirError::Above { .. }),
            "{error}"
        );
        clean(&places);
    }

    #[test]
    fn place_that_others_can_rename_in_is_refused_unless_sticky() {
        let places = places("above");
        let above = places.chosen().parent().unwrap().to_owned();
        fs::set_permissions(&above, fs::Permissions::from_mode(0o777)).unwrap();
        let error = RuntimeDir::open_in(&places).unwrap_err();
        assert!(matches!(error, RuntimeDirError::Above { mode: 0o777, .. }));
        fs::set_permissions(&above, fs::Permissions::from_mode(0o1777)).unwrap();
        RuntimeDir::open_in(&places).unwrap();
        clean(&places);
    }

    #[test]
    fn what_was_left_is_found_wherever_it_may_be_and_no_link_is_followed() {
        let mut places = places("left");
        let there = RuntimeDir::open_in(&places).unwrap();
        fs::write(there.path().join("file"), "left").unwrap();
        symlink("file", there.path().join("link")).unwrap();
        let (xdg, user) = (places.xdg.clone(), places.user_id);
        let holds = |places: &Places, name: &str| {
            let left = LeftDirs::find(places, None);
            left.dirs.iter().any(|dir| dir.open_left(name, true).unwrap().is_some())
        };
        assert!(holds(&places, "file") && !holds(&places, "link") && !holds(&places, "none"));
        // Another environment, which is told where else it may be.
        places.xdg = None;
        let looked = LeftDirs::find(&places, None).looked;
        assert!(looked.contains(&places.shared.join(format!("forebay-{user}"))), "{looked:?}");
        let usual = places.run.join(format!("user/{user}"));
        fs::create_dir_all(&usual).unwrap();
        let away = usual.join("forebay");
        fs::rename(there.path(), &away).unwrap();
        assert!(holds(&places, "file"));
        // Where others may write nothing is believed.
        fs::set_permissions(&away, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(!holds(&places, "file"));
        fs::set_permissions(&away, fs::Permissions::from_mode(0o700)).unwrap();
        symlink(&away, xdg.unwrap().join("forebay")).unwrap();
        fs::rename(&away, usual.join("aside")).unwrap();
        assert!(!holds(&places, "file"));
        clean(&places);
    }

    #[test]
    fn shared_memory_is_on_a_memory_file_system_or_nowhere() {
        let mut places = places("shared");
        let directory = RuntimeDir::open_in(&places).unwrap();
        if is_memory(directory.path(), &directory.directory).unwrap() {
            forebay_testing::skip("runtime_dir: the temporary directory is a memory file system");
        } else {
            assert!(directory.shared_dir(&places).unwrap().is_none());
        }
        places.shared = PathBuf::from("/dev/shm");
        match directory.shared_dir(&places).unwrap() {
            None => forebay_testing::skip("runtime_dir: /dev/shm is not a memory file system"),
            Some(shared) => {
                let file = shared.create_shared("forebay-test", 1 << 20).unwrap();
                let found = file.metadata().unwrap();
                assert_eq!((found.len(), found.mode() & 0o7777), (1 << 20, 0o600));
                assert!(found.blocks() * 512 >= 1 << 20, "memory not taken");
                let error = shared.create_shared("forebay-test", 1 << 20).unwrap_err();
                assert!(matches!(error, RuntimeDirError::Held { .. }), "{error}");
                let named = fs::metadata(shared.path().join("forebay-test")).unwrap();
                assert_eq!(named.ino(), found.ino(), "it was taken away from whoever has it");
                drop(file);
                let file = shared.create_shared("forebay-test", 1 << 20).unwrap();
                assert_ne!(file.metadata().unwrap().ino(), found.ino());
                let error = shared.create_shared("forebay-big", 1 << 50).unwrap_err();
                assert!(matches!(error, RuntimeDirError::Room { .. }), "{error}");
                assert!(!shared.path().join("forebay-big").exists());
                fs::remove_file(shared.path().join("forebay-test")).unwrap();
                // Fails, rightly, when a running forebay has something there.
                let _ = fs::remove_dir(shared.path());
            }
        }
        for name in ["", ".", "..", "a/b", "a\0b"] {
            let error = directory.create_shared(name, 1).unwrap_err();
            assert!(matches!(error, RuntimeDirError::Name { .. }));
        }
        clean(&places);
    }

    #[test]
    fn boot_has_an_identity() {
        match boot_id(&Host::default()) {
            Some(found) => assert_eq!(found.len(), 36),
            None => forebay_testing::skip("runtime_dir: no procfs"),
        }
    }
}
