// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who holds a device or file that is locked, and whether that process lives or is ending.
//!
//! A process that was killed holds its locks until its last I/O is done, and what a ring of io_uring
//! had open is let go of only after the process is gone
//! ([liburing 1627](https://github.com/axboe/liburing/issues/1627)): that is worth waiting for. One
//! that lives is not.

use super::machine::Host;
use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a process that is ending, or has just ended, is waited for.
pub const LOCK_WAIT: Duration = Duration::from_secs(10);

/// How often it is tried again meanwhile.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// From here on whoever waits is told why.
const SILENT: Duration = Duration::from_millis(200);

/// `PF_EXITING` of the kernel's `sched.h`: the process is on its way out.
const EXITING: u64 = 4;

/// Signal 9 in the masks of `/proc/PID/status`.
const KILL: u64 = 1 << 8;

/// A process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its id.
    pub pid: u32,
    /// Its name, cut to 15 characters by the kernel.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "process {} ({})", self.pid, self.name)
    }
}

/// Why a device could not be had.
#[derive(Debug)]
pub enum Refused<E> {
    /// This process has it, and lives.
    Held(Holder),
    /// It is busy after [`LOCK_WAIT`].
    Busy(E),
    /// Another reason.
    Other(E),
}

/// Opens what is at a path by `attempt`. Who lives and has it is named at once; who is ending is
/// waited for, which `tell` says when it takes longer than one notices.
pub fn when_free<T, E>(
    path: &Path,
    is_busy: impl Fn(&E) -> bool,
    tell: impl FnOnce(),
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, Refused<E>> {
    let begun = Instant::now();
    let mut tell = Some(tell);
    loop {
        let error = match attempt() {
            Err(error) if is_busy(&error) => error,
            other => return other.map_err(Refused::Other),
        };
        if let Some(holder) = Host::default().living_holder(path) {
            return Err(Refused::Held(holder));
        }
        let waited = begun.elapsed();
        if waited >= LOCK_WAIT {
            return Err(Refused::Busy(error));
        }
        if waited >= SILENT
            && let Some(tell) = tell.take()
        {
            tell();
        }
        std::thread::sleep(LOCK_RETRY);
    }
}

impl Host {
    /// The living process that has locked a file, or has a block device open; `None`: there is
    /// none, or it cannot be seen from here.
    pub fn living_holder(&self, path: &Path) -> Option<Holder> {
        let wanted = std::fs::metadata(path).ok()?;
        let own = std::process::id();
        let found = if wanted.file_type().is_block_device() {
            self.openers(&wanted)
        } else {
            self.lockers(&wanted)
        };
        found.into_iter().filter(|pid| *pid != own).find_map(|pid| self.living(pid))
    }

    /// Who has locked a file, by the kernel's table: `1: FLOCK ADVISORY WRITE 123 fe:00:4711 0 EOF`.
    fn lockers(&self, wanted: &Metadata) -> Vec<u32> {
        let device = wanted.dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let named = format!("{major:02x}:{minor:02x}:{}", wanted.ino());
        let table = std::fs::read_to_string(self.proc.join("locks")).unwrap_or_default();
        let lockers = table.lines().filter_map(|line| {
            let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK").skip(3);
            let (pid, file) = (words.next()?, words.next()?);
            (file == named).then(|| pid.parse().ok())?
        });
        lockers.collect()
    }

    /// Who has a block device open, as far as we may look.
    fn openers(&self, wanted: &Metadata) -> Vec<u32> {
        let is_it = |path: PathBuf| {
            std::fs::metadata(path).is_ok_and(|found| {
                found.file_type().is_block_device() && found.rdev() == wanted.rdev()
            })
        };
        let numbers = std::fs::read_dir(&self.proc).into_iter().flatten().flatten();
        let pids = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| {
            let open = std::fs::read_dir(self.proc.join(format!("{pid}/fd")));
            open.into_iter().flatten().flatten().any(|entry| is_it(entry.path()))
        })
        .collect()
    }

    /// The process, unless it is gone or going: `123 (name) S … flags …`.
    pub fn living(&self, pid: u32) -> Option<Holder> {
        let stat = std::fs::read_to_string(self.proc.join(format!("{pid}/stat"))).ok()?;
        let (head, tail) = stat.rsplit_once(") ")?;
        let name = head.split_once(" (")?.1.to_owned();
        let words: Vec<&str> = tail.split(' ').collect();
        let flags: u64 = words.get(6)?.parse().ok()?;
        let is_going = matches!(*words.first()?, "Z" | "X") || flags & EXITING != 0;
        (!is_going && !self.is_killed(pid)).then_some(Holder { pid, name })
    }

    /// Whether a process has been killed and only not come to know of it, as on a busy machine.
    fn is_killed(&self, pid: u32) -> bool {
        let status = std::fs::read_to_string(self.proc.join(format!("{pid}/status")));
        status.unwrap_or_default().lines().any(|line| {
            let pending = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
            let signals = pending.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
            signals.is_some_and(|signals| signals & KILL != 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    struct Machine {
        dir: PathBuf,
        file: PathBuf,
    }

    impl Machine {
        fn new(name: &str, stat: &str) -> Machine {
            let dir = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir_all(dir.join("4000123")).unwrap();
            let file = dir.join("file");
            let of = File::create(&file).unwrap().metadata().unwrap();
            let device = of.dev();
            let (major, minor) = (libc::major(device), libc::minor(device));
            let named = format!("{major:02x}:{minor:02x}:{}", of.ino());
            let locks = format!(
                "1: POSIX  ADVISORY  WRITE 77 {named} 0 EOF\n\
                 2: FLOCK  ADVISORY  WRITE 78 {named}9 0 EOF\n\
                 3: FLOCK  ADVISORY  WRITE 4000123 {named} 0 EOF\n"
            );
            std::fs::write(dir.join("locks"), locks).unwrap();
            std::fs::write(dir.join("4000123/stat"), stat).unwrap();
            Machine { dir, file }
        }

        fn holder(&self) -> Option<Holder> {
            let host = Host { proc: self.dir.clone(), sys: self.dir.clone() };
            host.living_holder(&self.file)
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    /// The lock of a process that is gone may be there for a moment. It looks as one of our own does: there is
    /// no other process that lives and has it.
    #[test]
    fn a_lock_without_a_living_holder_is_waited_for() {
        let machine = Machine::new("moment", "");
        let locked = || {
            let file = File::open(&machine.file).unwrap();
            rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
                .map(|()| file)
        };
        let first = locked().unwrap();
        let mut left = Some(first);
        let mut tries = 0;
        let attempt = || {
            tries += 1;
            if tries == 3 {
                // It is let go of now. It is not locked again: another test's child may have it, too, until its own program begins.
                return Ok(left.take().unwrap());
            }
            locked()
        };
        let is_busy = |error: &rustix::io::Errno| *error == rustix::io::Errno::WOULDBLOCK;
        when_free(&machine.file, is_busy, || {}, attempt).unwrap();
        assert_eq!(tries, 3);
    }

    #[test]
    fn a_living_holder_is_named_and_an_ending_one_is_not() {
        let living = Machine::new("living", "4000123 (a (b) c) S 1 2 2 0 -1 4194560 9 9\n");
        let holder = living.holder().unwrap();
        assert_eq!((holder.pid, holder.name.as_str()), (4_000_123, "a (b) c"));
        for (at, stat) in ["Z 1 2 2 0 -1 4194560 9", "D 1 2 2 0 -1 4194564 9"].iter().enumerate() {
            let machine = Machine::new(&format!("ending{at}"), &format!("4000123 (a) {stat} 9\n"));
            assert_eq!(machine.holder(), None, "{stat}");
        }
        let gone = Machine::new("gone", "");
        assert_eq!(gone.holder(), None);
        for (line, is_living) in
            [("SigPnd:\t0000000000000100", false), ("ShdPnd:\t0000000000004000", true)]
        {
            let status = format!("Threads:\t1\n{line}\nSigBlk:\t0000000000000100\n");
            std::fs::write(living.dir.join("4000123/status"), status).unwrap();
            assert_eq!(living.holder().is_some(), is_living, "{line}");
        }
    }
}
