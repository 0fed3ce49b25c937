// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices that are not there yet: at boot they come in any order, and late.

use crate::asking::Asking;
use crate::signals::Signals;
use crate::stored;
use anyhow::{Error, Result, anyhow, bail};
use forebay::host::machine::Host;
use forebay::host::named::{Named, NamedError};
use forebay::host::notify::sd_notify;
use rustix::fs::{Mode, OFlags};
use std::fmt::Display;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What to do about one that is not there.
const CONNECT: &str =
    "connect it, or name another (`lsblk -po NAME,SIZE,UUID,PARTUUID` lists what is there)";

/// How often a path is looked for.
const PATH_RETRY: Duration = Duration::from_millis(200);
/// How often an identity is: every device is read for it.
const UUID_RETRY: Duration = Duration::from_secs(2);

/// How long a device may take, to be looked for or looked at, before others are not held up for it any more.
pub const ANSWER_MAX: Duration = Duration::from_secs(1);
/// How long something may take before it is said what is waited for, and how often it is said.
const TELL_AFTER: Duration = Duration::from_secs(2);
const TELL_EVERY: Duration = Duration::from_secs(30);

/// What the service manager calls the disks that it holds for the next start.
const HELD: &str = "waits-for-its-cache";

/// How long all missing devices together are waited for.
#[derive(Clone)]
pub struct Patience {
    timeout: Duration,
    /// The same where nobody is kept waiting by it.
    late: Duration,
    begun: Instant,
    signals: Option<Signals>,
}

impl Patience {
    /// A signal ends the wait.
    pub fn new(timeout: Duration, signals: Option<Signals>) -> Patience {
        Patience { timeout, late: timeout, begun: Instant::now(), signals }
    }

    /// Guests wait already: nothing is waited for but what may come while they are served.
    pub fn while_guests_wait(self) -> Patience {
        Patience { timeout: Duration::ZERO, ..self }
    }

    /// Waits for nothing.
    pub fn none() -> Patience {
        Patience::new(Duration::ZERO, None)
    }

    /// A signal has come.
    pub fn is_over(&self) -> bool {
        self.signals.as_ref().is_some_and(Signals::came)
    }

    /// How long what may come while others are served is waited for, from the same moment on.
    pub fn late(&self) -> (Instant, Duration) {
        (self.begun, self.late)
    }

    /// Whether there is time left for devices that are not there, each with its role. It is said once that they are waited for.
    pub fn lasts_for(&self, devices: &[(PathBuf, String)], told: &mut bool) -> bool {
        if devices.is_empty() || self.begun.elapsed() >= self.timeout || self.is_over() {
            return false;
        }
        if !std::mem::replace(told, true) {
            devices.iter().for_each(|(name, role)| self.tell(&name.display(), role));
        }
        true
    }

    /// Waits until they are to be looked for again.
    pub fn pause_for(&self, devices: &[(PathBuf, String)]) {
        let retry = retry(devices.iter().map(|it| it.0.as_path()));
        self.pause(retry.min(self.timeout.max(PATH_RETRY)));
    }

    fn tell(&self, named: &dyn Display, role: &str) {
        let text = format!("waits for {named}, the {role}, up to {:?}", self.timeout);
        tracing::warn!("{text}: it is not there");
        // Without a service manager there is nobody to tell.
        let _ = sd_notify(&format!("STATUS={text}"));
    }

    fn pause(&self, retry: Duration) {
        match &self.signals {
            Some(signals) => signals.wait(retry),
            None => std::thread::sleep(retry),
        }
    }

    /// What is said of a device that has not come.
    pub fn missing(&self, name: &Path, role: &str) -> Error {
        match self.timeout.is_zero() {
            true => anyhow!("{}: the {role} is not there; {CONNECT}", name.display()),
            false => missing(&name.display(), role, self.begun),
        }
    }

    /// Where the device of this name is. `role` says whose it is, for whoever waits.
    pub fn find(&self, name: &Path, role: &str) -> Result<PathBuf> {
        self.find_holding(name, role, &[])
    }

    /// The same of one about which nothing is recorded that a copy would be told by ([`find_new`]).
    pub fn find_new(&self, name: &Path, role: &str) -> Result<PathBuf> {
        self.search(name, role, &[], find_surely)
    }

    /// The same, by who looks for it.
    pub fn find_by(
        &self,
        name: &Path,
        role: &str,
        look: impl Fn(&Path) -> Result<Option<PathBuf>>,
    ) -> Result<PathBuf> {
        self.search(name, role, &[], |_| look(name))
    }

    /// As [`find`](Self::find), and nobody can mount the devices of `others` meanwhile: those behind a cache
    /// that is missing have an old state. If it is not found, a service manager has them until the next start.
    pub fn find_holding(&self, name: &Path, role: &str, others: &[&Path]) -> Result<PathBuf> {
        self.search(name, role, others, find_now)
    }

    fn search(
        &self,
        name: &Path,
        role: &str,
        others: &[&Path],
        look: impl Fn(&Named) -> Result<Option<PathBuf>>,
    ) -> Result<PathBuf> {
        let named = Named::parse(name)?;
        let names = others.iter().copied().chain([name]);
        let others: Vec<Named> = others.iter().filter_map(|it| Named::parse(it).ok()).collect();
        let mut held: Vec<Hold> = others.into_iter().map(Hold::new).collect();
        let retry = retry(names).min(self.timeout);
        let mut told = false;
        loop {
            if let Some(found) = look(&named)? {
                stored::let_go(HELD);
                return Ok(found);
            }
            held.iter_mut().for_each(Hold::attempt);
            // Also if the time went by while the cache was opened.
            if !told && !self.timeout.is_zero() {
                told = true;
                self.tell(&named, role);
            }
            if self.begun.elapsed() >= self.timeout || self.is_over() {
                break;
            }
            self.pause(retry);
        }
        if let (Named::Path(path), false) = (&named, told) {
            // Opening it says what is wrong with it.
            return Ok(path.clone());
        }
        if !self.is_over() {
            // What the manager holds already could not be held here, and stays with it.
            let held: Vec<File> = held.into_iter().filter_map(Hold::end).collect();
            stored::keep_all(HELD, &held);
        }
        if !told {
            bail!("{named}: the {role} is not there: no device carries that identity; {CONNECT}");
        }
        Err(missing(&named, role, self.begun))
    }
}

/// Does what nothing can be served without, and says that it is waited for if that takes long. Nothing else can be done about a device that does
/// not answer; a signal ends the process, if there is one to hear of. Who is stuck in the kernel hears none, and the first thread is the one
/// that is told: another opens it.
pub fn telling<T: Send + 'static>(
    what: &str,
    signals: Option<&Signals>,
    wait: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let thread = Asking::begin("open", wait)?;
    let (begun, mut next) = (Instant::now(), TELL_AFTER);
    while !thread.wait(PATH_RETRY) {
        let waited = begun.elapsed();
        if waited >= TELL_AFTER && signals.is_some_and(Signals::came) {
            tracing::warn!("{what}: a signal came while it was being opened");
            // It is as after a kill, and its thread cannot be ended otherwise.
            std::process::exit(0);
        }
        if waited < next {
            continue;
        }
        next = waited + TELL_EVERY;
        let text = format!(
            "waits for {what}, for {waited:.0?} so far: it does not answer; nothing can be served without it. `dmesg` may say why"
        );
        tracing::warn!("{text}");
        // Without a service manager there is nobody to tell.
        let _ = sd_notify(&format!("STATUS={text}"));
    }
    Ok(thread.end().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// What is said of a device that was waited for in vain.
pub fn missing(named: &dyn Display, role: &str, since: Instant) -> Error {
    anyhow!(
        "{named}: the {role} is not there; it was waited for, for {:.0?}. Is it plugged in, and \
         named right? See `ls -l /dev/disk/by-*`",
        since.elapsed()
    )
}

/// Whether each of them is there, or is named in a way that only an error can be made of. Devices are read once for all.
pub fn may_be_there(names: &[PathBuf]) -> Vec<bool> {
    let parsed: Result<Vec<Named>, _> = names.iter().map(|name| Named::parse(name)).collect();
    let Ok(parsed) = parsed else {
        return match names {
            [_] => vec![true],
            _ => names.iter().flat_map(|name| may_be_there(std::slice::from_ref(name))).collect(),
        };
    };
    let found = Named::find_each_surely(&parsed, &Host::default());
    found.into_iter().map(|found| !matches!(found, Ok(None))).collect()
}

/// Whether every device is read for that name.
pub fn is_identity(name: &Path) -> bool {
    matches!(Named::parse(name), Ok(Named::Uuid(_)))
}

/// Where it is now, if it is.
pub fn find(name: &Path) -> Result<Option<PathBuf>> {
    find_now(&Named::parse(name)?)
}

/// The same, and an error if a device that does not answer may be the other of two copies: nobody may choose between them but the user.
pub fn find_new(name: &Path) -> Result<Option<PathBuf>> {
    find_surely(&Named::parse(name)?)
}

/// How often one of these names is looked for.
pub fn retry<'a>(mut names: impl Iterator<Item = &'a Path>) -> Duration {
    match names.any(is_identity) {
        true => UUID_RETRY,
        false => PATH_RETRY,
    }
}

fn find_surely(named: &Named) -> Result<Option<PathBuf>> {
    Ok(named.find_surely(&Host::default())?)
}

fn find_now(named: &Named) -> Result<Option<PathBuf>> {
    match named.find_surely(&Host::default()) {
        Err(NamedError::Unsure { name, found, silent }) => {
            tracing::warn!(
                "{name}: {} carries it; {} may as well, but does not answer (`dmesg` may say why)",
                found.display(),
                silent.display()
            );
            Ok(Some(found))
        }
        found => Ok(found?),
    }
}

/// A device that is to be held, by a thread: one that does not answer keeps nothing else waiting.
struct Hold {
    named: Named,
    file: Option<File>,
    opens: Option<Asking<Option<File>>>,
}

impl Hold {
    fn new(named: Named) -> Hold {
        Hold { named, file: None, opens: None }
    }

    /// Opens it, if it can be had. One that does not answer is waited for once.
    fn attempt(&mut self) {
        if self.file.is_some() {
            return;
        }
        if self.opens.is_none() {
            let named = self.named.clone();
            self.opens = Asking::begin("hold", move || hold(&named)).ok();
            self.opens.iter().for_each(|it| _ = it.wait(ANSWER_MAX));
        }
        self.take();
    }

    fn take(&mut self) {
        let ended = self.opens.take_if(|it| it.is_over());
        self.file = self.file.take().or_else(|| ended?.end().ok().flatten());
    }

    /// The device, if it could be had.
    fn end(mut self) -> Option<File> {
        self.take();
        self.file
    }
}

/// A block device that is there and that nobody has; nothing is read or written.
fn hold(named: &Named) -> Option<File> {
    let path = find_now(named).ok()??;
    if !std::fs::metadata(&path).ok()?.file_type().is_block_device() {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    // Who has it already is told when the cache is there.
    let file = rustix::fs::open(path, flags, Mode::empty());
    Some(File::from(file.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_device_is_waited_for_and_a_missing_one_named() {
        let path = std::env::temp_dir().join(format!("forebay-late-{}", std::process::id()));
        let patience = Patience::new(Duration::from_secs(30), None);
        let maker = std::thread::spawn({
            let path = path.clone();
            move || {
                std::thread::sleep(Duration::from_millis(300));
                std::fs::write(path, "").unwrap();
            }
        });
        assert_eq!(patience.find(&path, "cache device").unwrap(), path);
        maker.join().unwrap();
        std::fs::remove_file(&path).unwrap();

        let patience = Patience::new(Duration::from_millis(1), None);
        let error = patience.find(&path, "cache device").unwrap_err().to_string();
        assert!(error.contains("the cache device is not there; it was waited for"), "{error}");
        // What came before it may have taken all the time.
        std::thread::sleep(Duration::from_millis(2));
        let error = patience.find(&path, "backing device").unwrap_err().to_string();
        assert!(error.contains("the backing device is not there; it was waited for"), "{error}");
        // A signal ends it at once, whatever the time.
        let patience = Patience::new(Duration::from_secs(3600), Some(Signals::raised()));
        assert!(patience.find(Path::new("PARTUUID=none"), "cache device").is_err());
        assert_eq!(Patience::none().find(&path, "cache device").unwrap(), path);
    }
}
