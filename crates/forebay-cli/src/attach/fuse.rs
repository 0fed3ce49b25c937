// SPDX-License-Identifier: Apache-2.0 OR MIT
//! FUSE and loop: whether they can be used here, what is left of a killed daemon, and the beginning.

use super::attached::{chain, holders_text};
use super::{Begun, Rest, Wanted};
use crate::stored;
use anyhow::{Context, Result, bail};
use forebay::host::keeper;
use forebay::host::loop_device::{Holder, LoopError};
use forebay::host::machine::Host;
use forebay::host::runtime_dir::RuntimeDir;
use forebay::shard::uuid_text;
use forebay_core::units::VolumeIndex;
use forebay_serve::fuse::attach::FuseAttachments;
use forebay_serve::fuse::mount::{FuseMount, FuseVolume, Kept, clear_stale, is_unmounted};
use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why it cannot be had.
pub fn obstacle() -> Option<String> {
    if !Path::new("/dev/fuse").exists() {
        return Some("/dev/fuse is missing; `modprobe fuse` adds it".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("/dev/loop-control is missing; `modprobe loop` adds it".into());
    }
    None
}

/// Where the devices of these volumes wait, or are made. The kernel gives a mount's requests one after the other, so a volume that
/// waits would keep those behind it from being read: but for one, which is in the cache's, each has a mount of its own; unless a daemon
/// before has left several in the cache's. That is left to whoever waits there, be it for a disk that is late: who takes a mount
/// over answers for all that is in it.
pub fn groups(cache: &str, wanted: Vec<Wanted>) -> Result<Vec<(String, Vec<Wanted>)>> {
    Ok(Found::now(cache)?.groups(cache, wanted))
}

/// Where the device of one volume waits, or is made while others are served.
pub fn place(cache: &str, index: VolumeIndex, name: &str, uuid: &[u8; 16]) -> Result<String> {
    let found = Found::now(cache)?;
    let place = found.place(cache, index, name, uuid);
    let own = file_name(name, index);
    if place == cache && found.together.iter().any(|file| *file != *own) {
        bail!(
            "{name}: its block device is in one mount with those of others: stop, and serve them all again"
        );
    }
    Ok(place)
}

/// What there is of a cache, by names alone: who asks a mount anything waits until it is served.
struct Found {
    names: Vec<OsString>,
    /// Of the files in the cache's mount, those with a device.
    together: Vec<OsString>,
}

impl Found {
    fn now(cache: &str) -> Result<Found> {
        let runtime = RuntimeDir::open()?;
        let entries = std::fs::read_dir(runtime.path())?.flatten();
        let mount = runtime.path().join(format!("{cache}.fuse"));
        let loops = Host::default().loops();
        let of_it = loops.iter().filter_map(|it| it.backing_file.strip_prefix(&mount).ok());
        Ok(Found {
            names: entries.map(|entry| entry.file_name()).collect(),
            together: of_it.map(|file| file.as_os_str().to_owned()).collect(),
        })
    }

    fn groups(&self, cache: &str, wanted: Vec<Wanted>) -> Vec<(String, Vec<Wanted>)> {
        let (mut together, mut apart): (Vec<_>, Vec<_>) = wanted
            .into_iter()
            .partition(|it| self.place(cache, it.index, &it.name, &it.uuid) == cache);
        if together.is_empty() && self.together.is_empty() {
            let is_new = |it: &Wanted| !self.is_mount(&own_place(cache, &it.uuid));
            together.extend(apart.iter().position(is_new).map(|at| apart.remove(at)));
        }
        let apart = apart.into_iter().map(|it| (own_place(cache, &it.uuid), vec![it]));
        std::iter::once((cache.to_owned(), together)).chain(apart).collect()
    }

    fn is_mount(&self, place: &str) -> bool {
        self.names.iter().any(|it| *it == *format!("{place}.fuse"))
    }

    fn place(&self, cache: &str, index: VolumeIndex, name: &str, uuid: &[u8; 16]) -> String {
        let (own, file) = (own_place(cache, uuid), file_name(name, index));
        let is_there = !self.is_mount(&own) && self.together.iter().any(|it| *it == *file);
        if is_there { cache.to_owned() } else { own }
    }
}

fn own_place(cache: &str, uuid: &[u8; 16]) -> String {
    format!("{cache}.{}", uuid_text(uuid))
}

/// The devices over a cache's mounts whose connections are kept for the next daemon. Others give errors only.
pub fn left(cache: &str) -> Result<Vec<(String, PathBuf)>> {
    let runtime = RuntimeDir::open()?;
    let mut left = Vec::new();
    for found in Host::default().loops() {
        let file = &found.backing_file;
        let (Some(directory), Some(name)) = (file.parent(), file.file_name()) else { continue };
        let place = directory.strip_prefix(runtime.path()).ok().and_then(Path::to_str);
        let Some(place) = place.and_then(|place| place.strip_suffix(".fuse")) else { continue };
        let rest = place.strip_prefix(cache);
        let is_ours = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        if is_ours && is_kept(runtime.path(), place) {
            let device = Path::new("/dev").join(&found.node.name);
            left.push((name.to_string_lossy().into_owned(), device));
        }
    }
    Ok(left)
}

/// Whether the connection of a mount is kept by anybody. Its keeper takes a caller who goes for a daemon that was killed.
fn is_kept(runtime: &Path, place: &str) -> bool {
    let keeper = runtime.join(format!("{place}.keeper"));
    stored::has(&stored::of_mount(place)) || UnixStream::connect(keeper).is_ok()
}

/// Goes on with what a killed daemon left; or clears it away, mounts, and begins to attach.
pub fn prepare(place: &str, wanted: Vec<Wanted>) -> Result<Rest> {
    let runtime = RuntimeDir::open()?;
    let directory = runtime.path().join(format!("{place}.fuse"));
    let keeper = runtime.path().join(format!("{place}.keeper"));
    let shown = directory.display();
    let volumes: Vec<FuseVolume> = wanted.into_iter().map(file).collect();
    let name = stored::of_mount(place);
    let store = |descriptor: BorrowedFd<'_>| stored::keep(&name, descriptor);
    let before = Kept { keeper: &keeper, program: keeper_program(), stored: stored::take(&name) };
    let found = FuseMount::take_over(&directory, volumes.clone(), before, &store)
        .with_context(|| format!("{shown}: cannot be taken over"))?;
    let mut problems = Vec::new();
    let waiting = match found {
        Some(taken) => {
            tracing::info!("goes on with the devices of the daemon before");
            taken
        }
        None => {
            let held = clear_stale(&directory)
                .with_context(|| format!("{shown}: cannot be cleared away"))?;
            problems.extend(held.iter().map(stale_text));
            let (waiting, unkept) =
                FuseMount::mount(&directory, volumes, &keeper, keeper_program(), &store)
                    .with_context(|| format!("{shown}: cannot be mounted on"))?;
            if let Some(why) = unkept {
                tracing::warn!("the block devices will not outlive this process: {why}");
            }
            waiting
        }
    };
    Ok(Box::new(move |server, _| {
        let (mount, front_end) = waiting.front_end().context("cannot start")?;
        server.add(Box::new(front_end))?;
        let begun = FuseAttachments::begin(mount).context("cannot start a thread")?;
        let (attachments, reports) = begun;
        Ok(Begun { attachments: Box::new(attachments), reports, problems })
    }))
}

/// This program, as a keeper.
fn keeper_program() -> Command {
    let mut program = Command::new("/proc/self/exe");
    program.arg0("forebay").arg("keep");
    program
}

/// `forebay keep`: the keeper, until there is nothing more to hold.
pub fn keep() -> Result<()> {
    // What the daemon was given by those who started it is not for the keeper, either.
    forebay::host::apart::leave_files().context("files cannot be closed")?;
    // Whoever ends the daemon's session or its group does not mean the keeper.
    let _ = rustix::process::setsid();
    let stdio = (
        std::io::stdin().as_fd().try_clone_to_owned()?,
        std::io::stdout().as_fd().try_clone_to_owned()?,
    );
    let (kept, listener) = (stdio.0, UnixListener::from(stdio.1));
    let path = listener.local_addr().ok().and_then(|it| it.as_pathname().map(Path::to_owned));
    let path = path.context("the standard output is no listening socket")?;
    let ended_by = keeper::keep(&kept, &listener, keeper::KEEP, is_unmounted)?;
    std::fs::remove_file(path)?;
    drop(ended_by);
    Ok(())
}

fn file(wanted: Wanted) -> FuseVolume {
    let discards = wanted.discards && has_holes(&wanted.backing);
    FuseVolume {
        index: wanted.index,
        uuid: wanted.uuid,
        name: file_name(&wanted.name, wanted.index),
        size_bytes: wanted.size_bytes,
        logical_block: wanted.logical_block,
        discards,
    }
}

/// A file cannot be called `.` or `..`.
fn file_name(name: &str, index: VolumeIndex) -> String {
    let is_dots = name.bytes().all(|byte| byte == b'.');
    if is_dots { format!("volume-{}", index.0) } else { name.to_owned() }
}

/// A file has if it takes discards. A block device has if the kernel can have it zero ranges by itself: only then does it take a hole.
fn has_holes(backing: &Path) -> bool {
    let host = Host::default();
    let Some(node) = host.node_at_path(backing) else { return true };
    let zeroes = "queue/write_zeroes_max_bytes";
    let found = node.attribute(zeroes).or_else(|| node.parent()?.attribute(zeroes));
    found.is_some_and(|bytes| bytes != "0")
}

fn stale_text(error: &LoopError) -> String {
    let LoopError::StillHeld { device, holders } = error else { return chain(error) };
    let mounts: Vec<String> = holders
        .iter()
        .filter_map(|holder| match holder {
            Holder::Mount { mount_point, .. } => Some(format!("umount {}", mount_point.display())),
            _ => None,
        })
        .collect();
    let device = device.display();
    if mounts.is_empty() {
        return format!(
            "{device} of the daemon before gives errors only; close it: {}",
            holders_text(holders)
        );
    }
    format!(
        "{device} of the daemon before gives errors only; run `{}`, then mount the new device",
        mounts.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_volume_but_one_has_a_mount_of_its_own_and_what_a_daemon_has_left_stays() {
        let volume = |number: u8| Wanted {
            index: VolumeIndex(number),
            uuid: [number; 16],
            name: format!("v{number}"),
            size_bytes: 0,
            logical_block: 512,
            backing: "".into(),
            discards: false,
            may_go_straight: false,
        };
        let own = |number: u8| format!("c.{}.fuse", uuid_text(&[number; 16]));
        let split = |mounts: &[String], together: &[&str]| {
            let names = mounts.iter().map(OsString::from).collect();
            let found = Found { names, together: together.iter().map(OsString::from).collect() };
            let groups = found.groups("c", (0..3).map(volume).collect());
            let mut groups = groups
                .into_iter()
                .map(|(place, all)| (place, all.iter().map(|it| it.index.0).collect::<Vec<_>>()));
            let first = groups.next().unwrap_or_default();
            assert_eq!(first.0, "c");
            (groups.flat_map(|it| it.1).collect::<Vec<_>>(), first.1)
        };
        assert_eq!(split(&[], &[]), (vec![1, 2], vec![0]));
        let all = ["c.fuse".into(), own(1), own(2)];
        assert_eq!(split(&all, &["v0"]), (vec![1, 2], vec![0]));
        assert_eq!(split(&all, &["late"]), (vec![0, 1, 2], vec![]), "it is another's");
        let common = ["c.fuse".into()];
        assert_eq!(split(&common, &["v0", "v1", "v2"]), (vec![], vec![0, 1, 2]), "they were");
        assert_eq!(split(&common, &["v1"]), (vec![0, 2], vec![1]));
        assert_eq!(split(&common, &[]), (vec![1, 2], vec![0]), "it had no device yet");
        assert_eq!(split(&[own(0), own(2)], &[]), (vec![0, 2], vec![1]), "the first was detached");
    }
}
