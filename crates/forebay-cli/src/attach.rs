// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--attach`: which kernel block device is made of each volume, and why not another.

mod attached;
#[cfg(feature = "fuse")]
mod fuse;
pub mod left;
mod nbd;
#[cfg(feature = "ublk")]
mod ublk;

pub use attached::Attached;
pub use nbd::NbdDevices;

use crate::args::Attach;
use anyhow::{Result, bail};
use forebay::shard::uuid_text;
use forebay_core::units::VolumeIndex;
use forebay_serve::attach::{Attachments, DeviceVolume, Reports};
use forebay_serve::server::Server;
use left::{Known, LeftDevice};
use std::path::PathBuf;

/// A volume to be attached.
#[cfg_attr(not(all(feature = "fuse", feature = "ublk")), allow(dead_code))]
pub struct Wanted {
    pub index: VolumeIndex,
    pub uuid: [u8; 16],
    pub name: String,
    pub size_bytes: u64,
    pub logical_block: u32,
    pub backing: PathBuf,
    /// Whether the backing device takes discards.
    pub discards: bool,
    /// Whether requests may go straight to the backing device, by nobody's memory but their own.
    pub may_go_straight: bool,
}

impl Wanted {
    fn device_volume(&self) -> DeviceVolume {
        DeviceVolume {
            index: self.index,
            uuid: self.uuid,
            size_bytes: self.size_bytes,
            logical_block: self.logical_block,
            lends: self.may_go_straight,
        }
    }
}

/// What makes the devices, and what went wrong with those of a daemon before.
#[cfg_attr(not(any(feature = "fuse", feature = "ublk")), allow(dead_code))]
struct Begun {
    attachments: Box<dyn Attachments>,
    reports: Reports,
    problems: Vec<String>,
}

/// What is done on the loop's thread when a kind's devices are prepared.
type Rest = Box<dyn FnOnce(&mut Server, &NbdDevices) -> Result<Begun> + Send>;

/// Devices that are made, or are being taken over, and that nobody serves yet.
pub struct Prepared {
    kind: Kind,
    names: Vec<(VolumeIndex, String)>,
    rest: Rest,
}

impl Prepared {
    /// Begins to serve them, for the volumes of this cache.
    pub fn begin(
        self,
        server: &mut Server,
        cache: &str,
        nbd_devices: &NbdDevices,
    ) -> Result<Attached> {
        let begun = (self.rest)(server, nbd_devices)?;
        for text in &begun.problems {
            tracing::warn!("{text}");
        }
        Ok(Attached::new(self.kind, begun, cache, self.names))
    }
}

/// What block devices are made by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ublk,
    Nbd,
    Fuse,
}

impl Kind {
    /// The best first.
    pub const ALL: [Kind; 3] = [Kind::Ublk, Kind::Nbd, Kind::Fuse];

    /// As it is called in `--attach`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ublk => "ublk",
            Kind::Nbd => "nbd",
            Kind::Fuse => "fuse",
        }
    }

    /// The one that is asked for, if it is one.
    pub fn asked(wanted: Attach) -> Option<Kind> {
        match wanted {
            Attach::None | Attach::Auto => None,
            Attach::Ublk => Some(Kind::Ublk),
            Attach::Nbd => Some(Kind::Nbd),
            Attach::Fuse => Some(Kind::Fuse),
        }
    }

    /// Bytes of memory that its devices take, by part.
    pub fn memory_parts(self) -> Vec<(&'static str, u64)> {
        match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => forebay_serve::ublk::memory_parts().into(),
            // Address space, of which little becomes memory; see P9 in docs/promises.md.
            Kind::Nbd => Vec::new(),
            #[cfg(feature = "fuse")]
            Kind::Fuse => forebay_serve::fuse::front_end::memory_parts().into(),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            _ => Vec::new(),
        }
    }

    /// Why it cannot be had here.
    fn obstacle(self) -> Option<String> {
        match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => ublk::obstacle(),
            Kind::Nbd => nbd::obstacle(),
            #[cfg(feature = "fuse")]
            Kind::Fuse => fuse::obstacle(),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            kind => Some(format!("this program was built without the feature `{}`", kind.name())),
        }
    }

    /// The devices of volumes that wait for the next daemon, each with its volume's name.
    fn left(self, cache: &str, volumes: &[Known]) -> Result<Vec<(String, PathBuf)>> {
        let _ = cache;
        match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => ublk::left(cache, volumes),
            Kind::Nbd => nbd::left(volumes),
            #[cfg(feature = "fuse")]
            Kind::Fuse => fuse::left(cache),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            _ => Ok(Vec::new()),
        }
    }

    /// Where devices of these volumes are made, those of a place together.
    pub fn groups(self, cache: &str, wanted: Vec<Wanted>) -> Result<Vec<(String, Vec<Wanted>)>> {
        #[cfg(feature = "fuse")]
        if self == Kind::Fuse {
            return fuse::groups(cache, wanted);
        }
        Ok(vec![(cache.to_owned(), wanted)])
    }

    /// Where the device of one volume waits, or is made while others are served.
    pub fn place(
        self,
        cache: &str,
        index: VolumeIndex,
        name: &str,
        uuid: &[u8; 16],
    ) -> Result<String> {
        #[cfg(feature = "fuse")]
        if self == Kind::Fuse {
            return fuse::place(cache, index, name, uuid);
        }
        let _ = (index, name);
        Ok(format!("{cache}.{}", uuid_text(uuid)))
    }

    /// Begins to make a device of each volume. `place` is unlike that of others that are not ended. It may have to wait for a driver, or for
    /// a process that ends.
    pub fn prepare(self, place: &str, wanted: Vec<Wanted>) -> Result<Prepared> {
        let names = wanted.iter().map(|volume| (volume.index, volume.name.clone())).collect();
        let _ = place;
        let rest: Result<Rest> = match self {
            #[cfg(feature = "ublk")]
            Kind::Ublk => ublk::prepare(&wanted),
            Kind::Nbd => nbd::prepare(&wanted),
            #[cfg(feature = "fuse")]
            Kind::Fuse => fuse::prepare(place, wanted),
            #[cfg(not(all(feature = "fuse", feature = "ublk")))]
            _ => Err(anyhow::anyhow!("this program was built without it")),
        };
        Ok(Prepared { kind: self, names, rest: rest? })
    }
}

/// `forebay keep`: holds what the kernel closes with the last descriptor.
pub fn keep() -> Result<()> {
    #[cfg(feature = "fuse")]
    return fuse::keep();
    #[cfg(not(feature = "fuse"))]
    bail!("this program was built without the feature `fuse`")
}

/// What the devices of a cache are made by, if by anything, and those of it that there are. Says so, and what stands against the others.
pub fn choose(
    wanted: Attach,
    cache: &str,
    volumes: &[Known],
) -> Result<(Option<Kind>, Vec<LeftDevice>)> {
    let is_root = forebay::host::runtime_dir::Places::found().user_id == 0;
    let mut left = left::find(cache, volumes)?;
    let (kind, says) = chosen(wanted, is_root, &left, Kind::obstacle)?;
    if let Some(says) = says {
        tracing::info!("{says}");
    }
    for other in left.iter().filter(|it| Some(it.kind) != kind) {
        tracing::warn!("{other}, which nobody serves any more");
    }
    left.retain(|it| Some(it.kind) == kind);
    Ok((kind, left))
}

/// What is chosen and what is said of it, where these devices wait and these obstacles are.
fn chosen(
    wanted: Attach,
    is_root: bool,
    left: &[LeftDevice],
    obstacle: impl Fn(Kind) -> Option<String>,
) -> Result<(Option<Kind>, Option<String>)> {
    let kept = left::kept(wanted, left)?;
    if wanted == Attach::None {
        return Ok((None, None));
    }
    let asked = Kind::asked(wanted);
    // Nobody else is given by `auto` what ends with the daemon.
    if !is_root && asked != Some(Kind::Ublk) {
        return refused(asked, "not root; run by root it would add a block device per volume");
    }
    if let Some(kind) = asked {
        return obstacle(kind).map_or(Ok((asked, None)), |why| refused(asked, &why));
    }
    if let (Some(kind), Some(first)) = (kept, left.first()) {
        if let Some(why) = obstacle(kind) {
            bail!("{first}, which cannot be served: {why}");
        }
        let says = format!("attaches volumes by {}, as the daemon before has", kind.name());
        return Ok((kept, Some(says)));
    }
    let mut why_not = Vec::new();
    for kind in Kind::ALL {
        let Some(why) = obstacle(kind) else {
            why_not.insert(0, format!("attaches volumes by {}", kind.name()));
            return Ok((Some(kind), Some(why_not.join("; "))));
        };
        why_not.push(format!("{}: {why}", kind.name()));
    }
    refused(None, &why_not.join("; "))
}

fn refused(asked: Option<Kind>, why: &str) -> Result<(Option<Kind>, Option<String>)> {
    match asked {
        Some(kind) => bail!("--attach {}: {why}", kind.name()),
        None => Ok((None, Some(format!("attaches no volume, serves NBD only: {why}")))),
    }
}

/// This thread and those that it makes allocate without waiting for I/O; if that cannot be had, [`protect`] says so.
pub fn protect_thread() {
    let _ = forebay::host::protect::io_flusher();
}

/// Holds nobody's mounts from now on, where devices of that kind are served. Before the first thread.
pub fn leave_mounts(kind: Kind) {
    // What FUSE mounts must be seen.
    if kind != Kind::Fuse
        && let Err(error) = forebay::host::namespace::leave_mounts()
    {
        tracing::info!("keeps its mount namespace: {error}");
    }
}

/// What keeps a process alive that the kernel waits for. Before the first thread of those that serve.
pub fn protect() {
    let failed = forebay::host::protect::protect();
    let failed: Vec<String> =
        failed.iter().map(|failed| format!("{failed} ({})", failed.source)).collect();
    if !failed.is_empty() {
        tracing::warn!("when memory is short: {}", failed.join("; "));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// What is chosen and said where only these can be had.
    fn of(wanted: Attach, is_root: bool, had: &[Kind]) -> Result<(Option<Kind>, String), String> {
        after(&[], wanted, is_root, had)
    }

    /// The same where a daemon before has left devices of these kinds.
    fn after(
        left: &[Kind],
        wanted: Attach,
        is_root: bool,
        had: &[Kind],
    ) -> Result<(Option<Kind>, String), String> {
        let device = |kind: &Kind| LeftDevice {
            kind: *kind,
            device: format!("/dev/none/{}0", kind.name()).into(),
            volume: "v".into(),
        };
        let left: Vec<LeftDevice> = left.iter().map(device).collect();
        let why = |kind: Kind| (!had.contains(&kind)).then(|| format!("no {}.ko", kind.name()));
        let chosen = chosen(wanted, is_root, &left, why);
        chosen.map(|it| (it.0, it.1.unwrap_or_default())).map_err(|error| error.to_string())
    }

    #[test]
    fn auto_takes_the_best_and_says_why_not_a_better_one() {
        let cases = [
            (&Kind::ALL[..], Some(Kind::Ublk), "attaches volumes by ublk"),
            (&Kind::ALL[1..], Some(Kind::Nbd), "attaches volumes by nbd; ublk: no ublk.ko"),
            (
                &Kind::ALL[2..],
                Some(Kind::Fuse),
                "attaches volumes by fuse; ublk: no ublk.ko; nbd: no nbd.ko",
            ),
            (
                &[],
                None,
                "attaches no volume, serves NBD only: ublk: no ublk.ko; nbd: no nbd.ko; fuse: no fuse.ko",
            ),
        ];
        for (had, kind, says) in cases {
            assert_eq!(of(Attach::Auto, true, had), Ok((kind, says.to_owned())));
        }
    }

    /// Nor is anything looked for that root alone may have.
    #[test]
    fn who_is_not_root_is_told_what_root_would_add() {
        let why = "not root; run by root it would add a block device per volume";
        let says = format!("attaches no volume, serves NBD only: {why}");
        assert_eq!(of(Attach::Auto, false, &Kind::ALL), Ok((None, says)));
        for (wanted, name) in [(Attach::Nbd, "nbd"), (Attach::Fuse, "fuse")] {
            assert_eq!(of(wanted, false, &Kind::ALL), Err(format!("--attach {name}: {why}")));
        }
        let ublk = of(Attach::Ublk, false, &Kind::ALL);
        assert_eq!(ublk, Ok((Some(Kind::Ublk), String::new())));
    }

    /// A better kind could be had by the next start, or another was asked for by then: it made new devices, and nobody served those that were
    /// mounted.
    #[test]
    fn what_is_left_goes_on_by_its_own_kind_or_nothing_does() {
        let (nbd, all) = (&[Kind::Nbd][..], &Kind::ALL[..]);
        let says = "attaches volumes by nbd, as the daemon before has".to_owned();
        assert_eq!(after(nbd, Attach::Auto, true, all), Ok((Some(Kind::Nbd), says)));
        assert_eq!(after(nbd, Attach::Nbd, true, all), Ok((Some(Kind::Nbd), String::new())));
        let has = "volume v has /dev/none/nbd0 (nbd)";
        let why = "which nobody would serve any more; leave attach at nbd until a stop has taken that device away";
        for (wanted, name) in
            [(Attach::Ublk, "ublk"), (Attach::Fuse, "fuse"), (Attach::None, "none")]
        {
            let refused = Err(format!("--attach {name}: {has}, {why}"));
            assert_eq!(after(nbd, wanted, true, all), refused);
        }
        let gone = Err(format!("{has}, which cannot be served: no nbd.ko"));
        assert_eq!(after(nbd, Attach::Auto, true, &[Kind::Ublk]), gone);
    }

    #[test]
    fn what_is_left_of_several_kinds_is_for_the_user_to_choose_from() {
        let left = [Kind::Ublk, Kind::Nbd];
        let refused = after(&left, Attach::Auto, true, &Kind::ALL).unwrap_err();
        let both = "volume v has /dev/none/ublk0 (ublk), and volume v has /dev/none/nbd0 (nbd): ";
        assert!(refused.starts_with(both) && refused.contains("--attach"), "{refused}");
        for (wanted, kind) in [(Attach::Ublk, Kind::Ublk), (Attach::Nbd, Kind::Nbd)] {
            assert_eq!(after(&left, wanted, true, &Kind::ALL), Ok((Some(kind), String::new())));
        }
        assert!(after(&left, Attach::Fuse, true, &Kind::ALL).is_err());
    }

    #[test]
    fn what_was_asked_for_is_taken_or_refused_and_nothing_else() {
        let all =
            [(Attach::Ublk, Kind::Ublk), (Attach::Nbd, Kind::Nbd), (Attach::Fuse, Kind::Fuse)];
        for (wanted, kind) in all {
            assert_eq!(of(wanted, true, &Kind::ALL), Ok((Some(kind), String::new())));
            let others: Vec<Kind> = Kind::ALL.into_iter().filter(|it| *it != kind).collect();
            let why = format!("--attach {0}: no {0}.ko", kind.name());
            assert_eq!(of(wanted, true, &others), Err(why));
        }
        assert_eq!(of(Attach::None, true, &Kind::ALL), Ok((None, String::new())));
    }
}
