// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's view of its kernel block devices: what to say of them, and when they are gone.

use super::left::LeftDevice;
use super::{Begun, Kind};
use crate::names;
use anyhow::{Context, Result};
use forebay::host::loop_device::Holder;
use forebay::host::machine::Host;
use forebay_core::units::VolumeIndex;
use forebay_serve::attach::{Attachments, Report, Reports};
use std::error::Error;
use std::path::{Path, PathBuf};

/// What is attached.
pub struct Attached {
    kind: Kind,
    attachments: Box<dyn Attachments>,
    reports: Reports,
    /// The identity of the cache.
    cache: String,
    /// Of its volumes: those that have left are not there any more.
    names: Vec<(VolumeIndex, String)>,
    problems: Vec<String>,
    /// A process keeps them for the next daemon.
    is_kept: bool,
    /// It has died.
    is_keeper_gone: bool,
    /// What its loop devices are over, as the kernel names it.
    files: Vec<(VolumeIndex, String)>,
    /// Who said why not when one device was to be detached.
    refusal: Option<String>,
    /// Of a volume on its way out, or the last that has gone: it is no problem that its device goes.
    leaving: Option<VolumeIndex>,
    /// Of a volume that has grown: what became of its device, once that is known.
    resizing: Option<(VolumeIndex, Option<String>)>,
    is_ready: bool,
    is_quiesced: bool,
    is_released: bool,
    is_gone: bool,
}

impl Attached {
    pub(super) fn new(
        kind: Kind,
        begun: Begun,
        cache: &str,
        names: Vec<(VolumeIndex, String)>,
    ) -> Attached {
        let Begun { attachments, reports, problems } = begun;
        let cache = cache.to_owned();
        let is_kept = kind == Kind::Fuse && attachments.outlive();
        Attached {
            kind,
            attachments,
            reports,
            cache,
            names,
            problems,
            is_kept,
            is_keeper_gone: false,
            files: Vec::new(),
            refusal: None,
            leaving: None,
            resizing: None,
            is_ready: false,
            is_quiesced: true,
            is_released: false,
            is_gone: false,
        }
    }

    /// Says what happened.
    pub fn tell_news(&mut self) {
        // Where there is no thread to be had now, it is tried again.
        let _ = self.attachments.look();
        for report in self.reports.take() {
            match report {
                Report::Attached { volume, device, warning } => {
                    self.forget_waiting(volume);
                    self.files.retain(|it| it.0 != volume);
                    self.files.extend(file_of_loop(&device).map(|file| (volume, file)));
                    announce!("{} {}", device.display(), self.name(volume));
                    if let Err(error) = names::record(&device, &self.cache, self.name(volume)) {
                        tracing::warn!(
                            "{}: gets no name in /dev/forebay: {error:#}",
                            device.display()
                        );
                    }
                    for other in names::of_others(&self.cache, self.name(volume)) {
                        tracing::warn!(
                            "{0}: {1} is a volume of another cache with this name: /dev/forebay/{0} leads to one of them; \
                             give them different names",
                            self.name(volume),
                            other.display()
                        );
                    }
                    tracing::info!("{}: attached as {}", self.name(volume), device.display());
                    if let Some(text) = warning {
                        tracing::warn!("{}: {text}", device.display());
                    }
                }
                Report::Failed { volume, error } => {
                    let text = format!("{}{}", self.not_attached(volume), chain(&*error));
                    tracing::warn!("{text}");
                    self.problems.push(text);
                }
                Report::Ready => self.is_ready = true,
                Report::Held { device, holders } if self.is_leaving(&device) => {
                    let device = device.display();
                    self.refusal = Some(format!("{device}: {}", holders_text(&holders)));
                }
                Report::Kept { device, error } => {
                    self.refusal = Some(format!("{}: {}", device.display(), chain(&*error)));
                }
                Report::Held { device, holders } => tracing::warn!(
                    "stop waits for {}: {}; a second signal ends it now",
                    device.display(),
                    holders_text(&holders)
                ),
                Report::Detached { device } => {
                    let is_its = |name: &str| self.names.iter().any(|it| it.1 == name);
                    names::erase(&device, &self.cache, is_its);
                    tracing::info!("{} is detached", device.display());
                }
                Report::Renewed { volume, device } => {
                    self.forget_waiting(volume);
                    let device = device.display();
                    tracing::warn!("{device}: its connection was lost; there is another one");
                }
                Report::NotRenewed { volume, error } => {
                    let text = format!("{}{}", self.waiting(volume), chain(&*error));
                    tracing::warn!("{text}");
                    self.problems.push(text);
                }
                Report::Resized { volume } => {
                    let device = self.reports.device(volume).unwrap_or(Path::new("")).display();
                    let text = format!("{device}: as large now");
                    tracing::info!("{text}");
                    self.resizing = Some((volume, Some(text)));
                }
                Report::NotResized { volume, error } => {
                    let text =
                        format!("{}: its device is smaller: {}", self.name(volume), chain(&*error));
                    tracing::warn!("{text}");
                    self.resizing = Some((volume, Some(text.clone())));
                    self.problems.push(text);
                }
                Report::Disconnected { volume } if self.leaving == Some(volume) => {}
                Report::Disconnected { volume } => {
                    self.forget_waiting(volume);
                    self.tell_lost(volume);
                }
                Report::Quiesced => self.is_quiesced = true,
                Report::Gone(result) => {
                    self.is_gone = true;
                    if let Err(error) = result {
                        tracing::warn!("what the devices need could not be removed: {error}");
                    }
                }
            }
        }
    }

    /// Somebody has taken a volume's device away.
    fn tell_lost(&mut self, volume: VolumeIndex) {
        let name = self.name(volume);
        let how = match self.kind {
            Kind::Ublk => "somebody has removed its block device".to_owned(),
            Kind::Fuse => format!(
                "somebody has detached its loop device; `forebay detach {name}`, then `forebay attach {name}=BACKING`, or another start, gives it \
                 one again"
            ),
            Kind::Nbd => "somebody has disconnected it".to_owned(),
        };
        let text = format!("{name}: {how}");
        tracing::warn!("{text}");
        self.problems.push(text);
    }

    /// Sees whether somebody has detached a loop device: its number may be another file's by now, whose mounts are not the volume's. The
    /// kernel says that from memory.
    pub fn watch_devices(&mut self) {
        if self.kind != Kind::Fuse || self.is_released {
            return;
        }
        let lost = self.files.iter().filter_map(|(volume, file)| {
            let device = self.reports.device(*volume).filter(|_| self.leaving != Some(*volume))?;
            let is_other = file_of_loop(device).as_ref() != Some(file);
            is_other.then(|| (*volume, device.to_owned()))
        });
        for (volume, device) in lost.collect::<Vec<_>>() {
            self.reports.forget(volume);
            names::erase(&device, &self.cache, |name| self.names.iter().any(|it| it.1 == name));
            self.tell_lost(volume);
        }
    }

    /// How it begins what is said of a volume that gets no device.
    fn not_attached(&self, volume: VolumeIndex) -> String {
        format!("{}: not attached: ", self.name(volume))
    }

    /// What is said of a volume that gets no device, if it gets none.
    pub fn failure(&self, volume: VolumeIndex) -> Option<&str> {
        let begins = self.not_attached(volume);
        self.problems.iter().find(|problem| problem.starts_with(&begins)).map(String::as_str)
    }

    /// How it begins what is said of a device that nobody serves for now.
    fn waiting(&self, volume: VolumeIndex) -> String {
        format!(
            "{}: its block device waits for another connection, which is tried each second: ",
            self.name(volume)
        )
    }

    fn forget_waiting(&mut self, volume: VolumeIndex) {
        let waiting = self.waiting(volume);
        self.problems.retain(|problem| !problem.starts_with(&waiting));
    }

    /// Whether it is to have a device for this volume, or has failed to.
    pub fn is_for(&self, volume: VolumeIndex) -> bool {
        self.names.iter().any(|it| it.0 == volume)
    }

    /// Each volume is attached or has failed.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// All devices are gone, or given up.
    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// Begins to have requests kept back until another process serves, where the kernel can do that.
    pub fn quiesce(&mut self) -> Result<()> {
        let is_told = self.attachments.quiesce().context("cannot start a thread")?;
        self.is_quiesced = !is_told;
        Ok(())
    }

    /// It is known that they are, as far as they can be.
    pub fn is_quiesced(&self) -> bool {
        self.is_quiesced
    }

    /// What is wrong.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        self.problems.iter().cloned().chain(self.keeper_problem())
    }

    /// Sees whether who keeps them for the next daemon has died, which is told once: another is begun with a new mount only.
    pub fn watch_keeper(&mut self) {
        // At their end it ends, too.
        let is_ending = self.is_released || self.leaving.is_some_and(|it| self.has_device(it));
        if self.is_kept && !self.is_keeper_gone && !is_ending && !self.outlive() {
            self.is_keeper_gone = true;
            self.keeper_problem().into_iter().for_each(|text| tracing::warn!("{text}"));
        }
    }

    fn keeper_problem(&self) -> Option<String> {
        let has_device = |it: &&(VolumeIndex, String)| self.has_device(it.0);
        let names: Vec<&str> =
            self.names.iter().filter(has_device).map(|it| it.1.as_str()).collect();
        if !self.is_keeper_gone || names.is_empty() {
            return None;
        }
        Some(format!(
            "{}: the process that keeps its block device for the next daemon has died: after a kill of this daemon what is mounted \
             there gets I/O errors (but where the service manager keeps it, too), and an upgrade is refused; unmount it, \
             `forebay stop`, and serve again",
            names.join(", ")
        ))
    }

    /// Begins to detach everything, once it is ready.
    pub fn release(&mut self) -> Result<()> {
        if self.is_ready && !self.is_released {
            let begun = self.attachments.release(self.reports.devices());
            begun.context("cannot start a thread")?;
            self.is_released = true;
        }
        Ok(())
    }

    /// A volume has left, and its device if it had one.
    pub fn forget(&mut self, volume: VolumeIndex) {
        let of_it = format!("{}: ", self.name(volume));
        let count = self.names.len();
        self.names.retain(|name| name.0 != volume);
        if self.names.len() < count {
            self.problems.retain(|problem| !problem.starts_with(&of_it));
        }
    }

    /// What its devices stood on ends with the last of its volumes.
    pub fn end_if_left(&mut self) {
        if self.is_ending() {
            // Where there is no thread to be had now, it is tried again.
            let _ = self.release();
        }
    }

    /// Whether it is on its way out, with the last of its volumes.
    pub fn is_ending(&self) -> bool {
        self.names.is_empty() && !self.is_gone
    }

    /// Whether it serves nothing any more and never will.
    pub fn is_over(&self) -> bool {
        self.names.is_empty() && self.is_gone
    }

    /// Begins to detach the device of one volume if nobody holds it; says whether it has one.
    pub fn try_release(&mut self, volume: VolumeIndex) -> Result<bool> {
        let Some(device) = self.reports.device(volume).map(Path::to_owned) else {
            return Ok(false);
        };
        self.attachments.try_release(device).context("cannot start a thread")?;
        (self.leaving, self.refusal) = (Some(volume), None);
        Ok(true)
    }

    /// Begins to make the device of a volume that has grown larger, if it has one.
    pub fn resize(&mut self, volume: VolumeIndex, size_bytes: u64) {
        let Some(device) = self.reports.device(volume).map(Path::to_owned) else { return };
        let begun = self.attachments.resize(device, volume, size_bytes);
        let failed = begun.err().map(|error| format!("{}: {error}", self.name(volume)));
        self.resizing = Some((volume, failed));
    }

    /// Whether it is not known yet what became of that.
    pub fn is_resizing(&self) -> bool {
        matches!(self.resizing, Some((_, None)))
    }

    /// What became of it.
    pub fn resized(&mut self, volume: VolumeIndex) -> Option<String> {
        let (_, text) = self.resizing.take_if(|it| it.0 == volume)?;
        Some(text.unwrap_or_else(|| format!("{}: the kernel does not answer", self.name(volume))))
    }

    /// Why the device could not be detached: it stays. Nobody waits for it any more.
    pub fn take_refusal(&mut self) -> Option<String> {
        let refusal = self.refusal.take();
        if refusal.is_some() {
            self.leaving = None;
        }
        refusal
    }

    /// Whether the volume has a device.
    pub fn has_device(&self, volume: VolumeIndex) -> bool {
        self.reports.device(volume).is_some()
    }

    /// Waits no more for those who hold devices.
    pub fn give_up(&self) {
        self.attachments.give_up();
    }

    /// Whether they wait for the next process when this one ends.
    pub fn outlive(&self) -> bool {
        self.attachments.outlive()
    }

    /// What they are made by.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// `/dev/loop3 (fuse), mounted at /mnt`.
    pub fn text(&self, volume: VolumeIndex) -> Option<String> {
        let device = self.reports.device(volume)?;
        let mut text = device_text(device, self.kind);
        if !self.outlive() {
            text += ", ends with the daemon";
        }
        Some(text)
    }

    /// Those that wait for the next program of this daemon.
    pub fn left(&self) -> impl Iterator<Item = LeftDevice> {
        self.names.iter().filter_map(|(volume, name)| {
            let device = self.reports.device(*volume)?.to_owned();
            Some(LeftDevice { kind: self.kind, device, volume: name.clone() })
        })
    }

    /// Whether it is the device of a volume on its way out. One that has gone has none.
    fn is_leaving(&self, device: &Path) -> bool {
        self.leaving.is_some_and(|volume| self.reports.device(volume) == Some(device))
    }

    fn name(&self, volume: VolumeIndex) -> &str {
        self.names.iter().find(|name| name.0 == volume).map_or("", |name| &name.1)
    }
}

/// What a loop device is over, if it is one that is over anything.
fn file_of_loop(device: &Path) -> Option<String> {
    let path = Path::new("/sys/block").join(device.file_name()?).join("loop/backing_file");
    let text = std::fs::read_to_string(path).ok()?;
    let text = text.trim_end_matches('\n');
    // So the kernel calls a file that it has to look for anew.
    Some(text.strip_suffix(" (deleted)").unwrap_or(text).to_owned())
}

/// `/dev/loop3 (fuse), mounted at /mnt`.
pub fn device_text(device: &Path, kind: Kind) -> String {
    let mut text = format!("{} ({})", device.display(), kind.name());
    for mount_point in mount_points(device) {
        text += &format!(", mounted at {}", mount_point.display());
    }
    text
}

/// Where the device and its partitions are mounted. Reads tables in memory only, no device.
fn mount_points(device: &Path) -> Vec<PathBuf> {
    let host = Host::default();
    let Some(node) = host.node_at_path(device) else { return Vec::new() };
    let mounts = host.mounts().unwrap_or_default();
    let nodes = std::iter::once(node.clone()).chain(node.partitions());
    let of = |node: forebay::host::machine::Node| host.mounts_of(&mounts, node.number);
    nodes.flat_map(of).map(|mount| mount.mount_point).collect()
}

/// `pid 123 (fsck), mounted at /mnt`.
pub fn holders_text(holders: &[Holder]) -> String {
    match holders {
        [] => "it is held open by something not visible here".into(),
        _ => holders.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// An error and what caused it.
pub fn chain(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use forebay::io::Bell;
    use forebay_serve::attach::Teller;
    use std::io;
    use std::sync::Arc;

    /// For want of a thread.
    struct Stuck;

    impl Attachments for Stuck {
        fn release(&mut self, _: Vec<PathBuf>) -> io::Result<()> {
            Err(io::ErrorKind::OutOfMemory.into())
        }

        fn try_release(&mut self, _: PathBuf) -> io::Result<()> {
            Err(io::ErrorKind::OutOfMemory.into())
        }

        fn resize(&mut self, _: PathBuf, _: VolumeIndex, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::OutOfMemory.into())
        }

        fn give_up(&self) {}
    }

    impl Attached {
        /// The device of a volume, which nothing can be done about.
        pub fn that_cannot_go(volume: VolumeIndex) -> Attached {
            let (teller, mut reports) = Teller::new(Arc::new(Bell::new().unwrap()));
            teller.tell(Report::Attached {
                volume,
                device: "/dev/none/nbd0".into(),
                warning: None,
            });
            reports.take();
            let begun = Begun { attachments: Box::new(Stuck), reports, problems: Vec::new() };
            Attached::new(Kind::Nbd, begun, "", vec![(volume, "v".into())])
        }
    }
}
