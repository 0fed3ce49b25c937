// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices named by what is on them: `UUID=…`, `PARTUUID=…`, or a path.
//!
//! `UUID=` is the identity that a file system, a volume group's member or a cache carries. It is
//! read from the devices themselves, for the links in `/dev/disk/by-uuid` lead to the volume once
//! a device is behind one.
//!
//! # Invariants
//!
//! - **N1** A name that two devices answer to is refused: one of them is a copy, and to choose is
//!   to guess.
//! - **N2** Devices are only read, and what cannot be read is passed over: it cannot be used either. They are not read by way of their page
//!   cache, where others would find what was there before a write (F5 of `io/file.rs`).
//! - **N3** An identity is looked for on disks, their partitions and what is made of them, not on loop, nbd and ublk devices, nor on what is
//!   made of those: they may be volumes, which show what their backing devices have, or have lost the program that answers for them. That
//!   may be the one that looks: it would wait for itself.
//! - **N4** A device that does not answer is waited for once, for [`READ_MAX`], and passed over as long as it does not: a thread reads each,
//!   and one that is stuck cannot be ended ([`silent`]). What is found meanwhile may have a copy there, which is told ([`Named::find_surely`]).

use super::machine::{Host, Node};
use super::signature;
use crate::io::{Device, FileDevice, FileOptions};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a device may take to be read: a disk that stood still takes some ten seconds to turn.
const READ_MAX: Duration = Duration::from_secs(30);
/// More than reading takes.
const STACK_BYTES: usize = 256 << 10;

/// Those that have not answered in time, by the kernel's names, and who waits for them.
static SILENT: Mutex<Vec<(String, JoinHandle<()>)>> = Mutex::new(Vec::new());

/// How somebody names a device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// Where it is.
    Path(PathBuf),
    /// The identity of what is on it, in lower case.
    Uuid(String),
    /// The identity of the partition, in lower case.
    PartUuid(String),
}

/// Why a name leads nowhere.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamedError {
    /// Of a kind that is not known.
    #[error("{name}: expected UUID=…, PARTUUID=… or a path; labels are not unique enough")]
    Kind {
        /// As given.
        name: String,
    },
    /// N1
    #[error(
        "{name}: {first} and {second} both carry it; name the right one by its path in /dev/disk/by-id"
    )]
    Ambiguous {
        /// As given.
        name: Named,
        /// One of them.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// N4
    #[error(
        "{name}: {} carries it, and {} may carry it as well, but does not answer (`dmesg` may say why); if the former is the right one, name it by its path in /dev/disk/by-id",
        found.display(),
        silent.display()
    )]
    Unsure {
        /// As given.
        name: Named,
        /// The only one that answers and carries it.
        found: PathBuf,
        /// One that does not answer.
        silent: PathBuf,
    },
    /// Nobody could look there, so it is not known where it is.
    #[error(
        "{name}: {} cannot be looked at: no thread can be started: {why}; allow more of them (`TasksMax=` of the service, `ulimit -u`), or free memory",
        device.display()
    )]
    NoThread {
        /// As given.
        name: Named,
        /// What was to be read.
        device: PathBuf,
        /// What the system says.
        why: io::Error,
    },
}

/// What reading a device for an identity gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Carries,
    CarriesNot,
    /// None (N4).
    Silent,
}

/// What reading a device has shown.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// The identities on it.
    Uuids(Vec<String>),
    /// Nothing (N4).
    Silent,
}

impl Seen {
    fn of(&self, uuid: &str) -> Answer {
        match self {
            Seen::Silent => Answer::Silent,
            Seen::Uuids(all) if all.iter().any(|it| it.eq_ignore_ascii_case(uuid)) => {
                Answer::Carries
            }
            Seen::Uuids(_) => Answer::CarriesNot,
        }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(out, "{}", path.display()),
            Self::Uuid(uuid) => write!(out, "UUID={uuid}"),
            Self::PartUuid(uuid) => write!(out, "PARTUUID={uuid}"),
        }
    }
}

impl Named {
    /// As on a command line or in `fstab`.
    pub fn parse(name: &Path) -> Result<Named, NamedError> {
        let text = name.to_str().filter(|text| !text.contains('/')).unwrap_or_default();
        match text.split_once('=') {
            Some(("UUID", uuid)) => Ok(Self::Uuid(uuid.to_ascii_lowercase())),
            Some(("PARTUUID", uuid)) => Ok(Self::PartUuid(uuid.to_ascii_lowercase())),
            Some(("LABEL" | "PARTLABEL" | "ID", _)) => {
                Err(NamedError::Kind { name: text.to_owned() })
            }
            _ => Ok(Self::Path(name.to_owned())),
        }
    }

    /// Where it is now; `None`: nowhere.
    pub fn find(&self, host: &Host) -> Result<Option<PathBuf>, NamedError> {
        match self.find_surely(host) {
            Err(NamedError::Unsure { found, .. }) => Ok(Some(found)),
            answer => answer,
        }
    }

    /// The same where nobody may choose for the user: it is an error if a device that does not answer may carry it as well.
    pub fn find_surely(&self, host: &Host) -> Result<Option<PathBuf>, NamedError> {
        let uuid = match self {
            Self::Path(path) => return Ok(path.exists().then(|| path.clone())),
            Self::PartUuid(uuid) => {
                let link = Path::new("/dev/disk/by-partuuid").join(uuid);
                return Ok(link.exists().then_some(link));
            }
            Self::Uuid(uuid) => uuid,
        };
        // Who finds two need look no further.
        self.only(host.nodes().iter().map(|node| (node.path(), look(node).map(|it| it.of(uuid)))))
    }

    /// The same of several. Devices are read once, for all that are named by what is on them.
    pub fn find_each_surely(
        names: &[Named],
        host: &Host,
    ) -> Vec<Result<Option<PathBuf>, NamedError>> {
        let is_uuid = |name: &Named| matches!(name, Named::Uuid(_));
        let nodes = if names.iter().any(is_uuid) { host.nodes() } else { Vec::new() };
        let seen: Vec<_> = nodes.iter().map(|node| (node.path(), look(node))).collect();
        let find = |name: &Named| match name {
            Named::Uuid(uuid) => name.among(uuid, &seen),
            _ => name.find_surely(host),
        };
        names.iter().map(find).collect()
    }

    /// The only device that carries it, of those that were read.
    fn among(
        &self,
        uuid: &str,
        seen: &[(PathBuf, io::Result<Seen>)],
    ) -> Result<Option<PathBuf>, NamedError> {
        self.only(seen.iter().map(|(path, seen)| {
            let again = |why: &io::Error| io::Error::new(why.kind(), why.to_string());
            (path.clone(), seen.as_ref().map(|it| it.of(uuid)).map_err(again))
        }))
    }

    /// The only device that carries it.
    fn only(
        &self,
        answers: impl Iterator<Item = (PathBuf, io::Result<Answer>)>,
    ) -> Result<Option<PathBuf>, NamedError> {
        let (mut found, mut silent) = (None, None);
        for (path, answer) in answers {
            let name = || self.clone();
            match (answer, found.take()) {
                (Err(why), _) => {
                    return Err(NamedError::NoThread { name: name(), device: path, why });
                }
                (Ok(Answer::Carries), Some(first)) => {
                    return Err(NamedError::Ambiguous { name: name(), first, second: path });
                }
                (Ok(Answer::Carries), None) => found = Some(path),
                (Ok(Answer::CarriesNot), before) => found = before,
                (Ok(Answer::Silent), before) => (found, silent) = (before, Some(path)),
            }
        }
        match (found, silent) {
            (Some(found), Some(silent)) => {
                Err(NamedError::Unsure { name: self.clone(), found, silent })
            }
            (found, _) => Ok(found),
        }
    }
}

/// Devices that a program, or memory, is behind.
const SERVED: [&str; 6] = ["loop", "nbd", "ublkb", "ram", "zram", "fd"];

/// How many devices one may be made of.
const BENEATH_MAX: usize = 256;

/// Whether it is one of [`SERVED`], or made of one, or cannot be told.
fn is_served(node: &Node) -> bool {
    let mut unseen = vec![node.clone()];
    for _ in 0..BENEATH_MAX {
        let Some(node) = unseen.pop() else { return false };
        if SERVED.iter().any(|prefix| node.name.starts_with(prefix)) {
            return true;
        }
        unseen.extend(node.parent());
        unseen.extend(node.slaves());
    }
    true
}

/// Which identities are on the device.
fn look(node: &Node) -> io::Result<Seen> {
    if node.attribute("size").is_none_or(|text| text == "0") || is_served(node) {
        return Ok(Seen::Uuids(Vec::new())); // N3
    }
    let path = node.path();
    within(&node.name, READ_MAX, STACK_BYTES, move || {
        let how = FileOptions { read_only: true, exclusive: false, ..FileOptions::default() };
        FileDevice::open(&path, &how).map_or_else(|_| Vec::new(), |device| uuids_on(&device)) // N2
    })
}

/// What is found on a device, if it answers (N4).
fn within(
    name: &str,
    limit: Duration,
    stack_bytes: usize,
    read: impl FnOnce() -> Vec<String> + Send + 'static,
) -> io::Result<Seen> {
    if silent().iter().any(|silent| silent == name) {
        return Ok(Seen::Silent);
    }
    let (sender, receiver) = channel();
    let thread = std::thread::Builder::new().name("read".into()).stack_size(stack_bytes);
    let thread = thread.spawn(move || {
        // Where nobody waits any more nobody hears it.
        let _ = sender.send(read());
    })?;
    match receiver.recv_timeout(limit) {
        Ok(uuids) => {
            let _ = thread.join();
            Ok(Seen::Uuids(uuids))
        }
        Err(_) => {
            SILENT.lock().unwrap_or_else(PoisonError::into_inner).push((name.to_owned(), thread));
            Ok(Seen::Silent)
        }
    }
}

/// Devices that were read for an identity and have not answered, by the kernel's names. A thread waits for each of them, and so would a
/// program that this process executes.
pub fn silent() -> Vec<String> {
    let mut silent = SILENT.lock().unwrap_or_else(PoisonError::into_inner);
    silent.retain(|(_, thread)| !thread.is_finished());
    silent.iter().map(|(name, _)| name.clone()).collect()
}

fn uuids_on(device: &FileDevice) -> Vec<String> {
    let mut read = |offset: u64, bytes: &mut [u8]| device.read_at(offset, bytes);
    let size_bytes = device.info().size_bytes;
    let found = signature::probe(&mut read, size_bytes).unwrap_or_default();
    found.into_iter().filter_map(|it| it.uuid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        let of = |text: &str| Named::parse(Path::new(text));
        assert_eq!(of("UUID=AB-1").unwrap(), Named::Uuid("ab-1".into()));
        assert_eq!(of("PARTUUID=AB").unwrap(), Named::PartUuid("ab".into()));
        for path in ["/dev/sda", "a=b", "./UUID=x", "/x/UUID=y", "uuid=z"] {
            assert_eq!(of(path).unwrap(), Named::Path(path.into()), "{path}");
        }
        assert!(of("LABEL=home").unwrap_err().to_string().contains("expected UUID="));
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        let host = Host { proc: "/nonexistent".into(), sys: "/nonexistent".into() };
        let find = |text: &str| Named::parse(Path::new(text)).unwrap().find(&host).unwrap();
        assert_eq!(find("/nonexistent/x"), None);
        assert_eq!(find("UUID=0"), None);
        assert_eq!(find("PARTUUID=none-such"), None);
        assert_eq!(find("/dev/null"), Some("/dev/null".into()));
    }

    /// A daemon that was killed, or upgraded, under a logical volume on its volume looked there for its cache
    /// and waited for itself.
    #[test]
    fn what_is_made_of_a_volume_is_not_looked_at() {
        use std::fs::{create_dir_all, write};
        let root = std::env::temp_dir().join(format!("forebay-made-of-{}", std::process::id()));
        let host = Host { proc: root.clone(), sys: root.join("sys") };
        let class = host.sys.join("class/block");
        let devices = host.sys.join("devices");
        create_dir_all(&class).unwrap();
        let stack = [
            ("sda", "8:0", None),
            ("ublkb1", "259:1", None),
            ("dm-0", "253:0", Some("ublkb1")),
            ("dm-1", "253:1", Some("sda")),
            ("md0", "9:0", Some("dm-0")),
        ];
        for (name, number, beneath) in stack {
            create_dir_all(devices.join(name).join("slaves")).unwrap();
            write(devices.join(name).join("dev"), number).unwrap();
            std::os::unix::fs::symlink(devices.join(name), class.join(name)).unwrap();
            if let Some(beneath) = beneath {
                let link = devices.join(name).join("slaves").join(beneath);
                std::os::unix::fs::symlink(devices.join(beneath), link).unwrap();
            }
        }
        create_dir_all(devices.join("md0/md0p1")).unwrap();
        write(devices.join("md0/md0p1/dev"), "259:2").unwrap();
        write(devices.join("md0/md0p1/partition"), "1").unwrap();
        std::os::unix::fs::symlink(devices.join("md0/md0p1"), class.join("md0p1")).unwrap();
        let mut served = host.nodes();
        served.retain(is_served);
        let mut names: Vec<&str> = served.iter().map(|node| node.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["dm-0", "md0", "md0p1", "ublkb1"]);
        std::fs::remove_dir_all(root).unwrap();
    }

    /// All searches waited for it without end.
    #[test]
    fn a_device_that_does_not_answer_is_waited_for_once() {
        let (answer, answers) = channel::<()>();
        let read = move || answers.recv().is_ok();
        let of = |name: &str, limit, read: Box<dyn FnOnce() -> bool + Send>| {
            let read = move || if read() { vec!["AB".to_owned()] } else { Vec::new() };
            within(name, limit, STACK_BYTES, read).unwrap().of("ab")
        };
        assert_eq!(of("hangs", Duration::from_millis(10), Box::new(read)), Answer::Silent);
        assert_eq!(silent(), ["hangs"]);
        let long = Duration::from_secs(3600);
        assert_eq!(
            of("hangs", long, Box::new(|| panic!("it is read again while it does not answer"))),
            Answer::Silent
        );
        assert_eq!(of("other", long, Box::new(|| true)), Answer::Carries);
        answer.send(()).unwrap();
        while !silent().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(of("hangs", long, Box::new(|| true)), Answer::Carries);
        assert_eq!(of("hangs", long, Box::new(|| false)), Answer::CarriesNot);
        assert_eq!(silent(), [""; 0]);
    }

    /// It was said that no device carries it.
    #[test]
    fn what_nobody_could_look_for_is_not_known_to_be_nowhere() {
        // No machine has as much memory.
        let unread = within("sda", Duration::ZERO, usize::MAX / 4, || unreachable!());
        let uuid = Named::Uuid("ab".into());
        let said = uuid.among("ab", &[("/dev/sda".into(), unread)]).unwrap_err().to_string();
        assert!(said.starts_with("UUID=ab: /dev/sda cannot be looked at: no thread"), "{said}");
    }

    /// The other of two copies was taken without a word.
    #[test]
    fn a_device_that_does_not_answer_may_be_the_other_of_two() {
        use Answer::{Carries, CarriesNot, Silent};
        let of = |answers: &[Answer]| {
            let paths = ["/dev/a", "/dev/b", "/dev/c"].map(PathBuf::from);
            let answers = answers.iter().map(|answer| Ok(*answer));
            Named::Uuid("ab".into()).only(paths.into_iter().zip(answers))
        };
        assert_eq!(of(&[CarriesNot, Silent]).unwrap(), None);
        assert_eq!(of(&[CarriesNot, Carries, CarriesNot]).unwrap(), Some("/dev/b".into()));
        for (answers, silent) in
            [([Carries, CarriesNot, Silent], "c"), ([Silent, CarriesNot, Carries], "a")]
        {
            let said = of(&answers).unwrap_err().to_string();
            let silent = format!("/dev/{silent} may carry it as well, but does not answer");
            assert!(said.contains(&silent) && said.contains("/dev/disk/by-id"), "{said}");
        }
        let said = of(&[Carries, Silent, Carries]).unwrap_err().to_string();
        assert!(said.contains("/dev/a and /dev/c both carry it"), "{said}");
    }

    /// All devices were read for each name.
    #[test]
    fn what_was_read_once_answers_for_several_names() {
        let of = |uuids: &[&str]| Ok(Seen::Uuids(uuids.iter().map(|it| (*it).into()).collect()));
        let seen = [
            ("/dev/a".into(), of(&["AB", "cd"])),
            ("/dev/b".into(), of(&["ef"])),
            ("/dev/c".into(), of(&[])),
            ("/dev/d".into(), of(&["EF"])),
        ];
        let find = |uuid: &str| Named::Uuid(uuid.into()).among(uuid, &seen);
        assert_eq!(find("ab").unwrap(), Some("/dev/a".into()));
        assert_eq!(find("cd").unwrap(), Some("/dev/a".into()));
        assert_eq!(find("00").unwrap(), None);
        assert!(find("ef").unwrap_err().to_string().contains("/dev/b and /dev/d both carry it"));
        let host = Host { proc: "/nonexistent".into(), sys: "/nonexistent".into() };
        let names = ["UUID=0", "/dev/null", "PARTUUID=none-such", "/nonexistent/x"];
        let names = names.map(|name| Named::parse(Path::new(name)).unwrap());
        let found = Named::find_each_surely(&names, &host).into_iter().map(Result::unwrap);
        assert_eq!(found.collect::<Vec<_>>(), [None, Some("/dev/null".into()), None, None]);
    }

    #[test]
    fn an_identity_is_read_from_the_device() {
        let path = std::env::temp_dir().join(format!("forebay-named-{}", std::process::id()));
        let mut bytes = vec![0; 1 << 20];
        bytes[..8].copy_from_slice(b"FOREBAYS");
        bytes[32..48].copy_from_slice(&[0xab; 16]);
        std::fs::write(&path, &bytes).unwrap();
        let how = FileOptions { read_only: true, exclusive: false, ..FileOptions::default() };
        let device = FileDevice::open(&path, &how).unwrap();
        let uuid = "abababab-abab-abab-abab-abababababab";
        assert_eq!(uuids_on(&device), [uuid]);
        std::fs::remove_file(path).unwrap();
    }
}
