// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's view of vhost-user: where it listens, who is connected, what is to be told.

use super::{Volume, Wanted, qemu_line};
use crate::log::Limiter;
use crate::{sockets, upgrade};
use anyhow::{Context, Result};
use forebay_core::units::VolumeIndex;
use forebay_serve::passage::Passage;
use forebay_serve::server::Server;
use forebay_serve::vhost::blk::Disk;
pub use forebay_serve::vhost::front_end::SOCKET_COUNT_MAX;
use forebay_serve::vhost::front_end::{self, News, Socket, VhostFrontEnd, Watch};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

/// Bytes of memory by part, if there are sockets.
pub fn memory_parts(sockets: usize) -> Vec<(&'static str, u64)> {
    let parts = front_end::memory_parts(sockets);
    if sockets > 0 { parts.to_vec() } else { Vec::new() }
}

/// Who comes and goes does so as often as it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Comes,
    Goes,
    Else,
}

impl Wanted {
    fn into_socket(self) -> Socket {
        let Wanted { listener, volume, .. } = self;
        let disk = Disk::new(&volume.name, volume.size_bytes, volume.logical_block);
        Socket { listener, volume: volume.index, disk }
    }
}

/// The sockets, and who is connected.
pub struct Machines {
    sockets: Vec<(PathBuf, VolumeIndex, String)>,
    kept: Vec<(String, OwnedFd)>,
    watch: Rc<Watch>,
    passage: Rc<Passage>,
    /// By socket, whether it is not as it should be, and what it is about.
    limiter: Limiter<(usize, bool, What)>,
}

impl Machines {
    /// Listens.
    pub fn begin(server: &mut Server, wanted: Vec<Wanted>) -> Result<Machines> {
        let (mut listening, mut sockets) = (Vec::new(), Vec::new());
        for wanted in wanted {
            sockets.push((wanted.path.clone(), wanted.volume.index, wanted.volume.name.clone()));
            listening.push(wanted.into_socket());
        }
        let kept = listening.iter().filter_map(|it| sockets::kept_unix(&it.listener)).collect();
        let front_end = VhostFrontEnd::new(listening).context("cannot take memory")?;
        let (watch, passage) = (front_end.watch(), front_end.passage());
        if upgrade::has_machines() {
            passage.expect();
        }
        server.add(Box::new(front_end))?;
        Ok(Machines { sockets, kept, watch, passage, limiter: Limiter::new() })
    }

    /// Listens on one more, from the next turn of the loop on.
    pub fn listen(&mut self, wanted: Wanted) {
        self.kept.extend(sockets::kept_unix(&wanted.listener));
        let Volume { index, name, .. } = &wanted.volume;
        self.sockets.push((wanted.path.clone(), *index, name.clone()));
        self.watch.coming.borrow_mut().push(wanted.into_socket());
    }

    /// Where they come in, for the next program.
    pub fn kept(&mut self) -> Vec<(String, OwnedFd)> {
        std::mem::take(&mut self.kept)
    }

    /// By which they come from the program before, and go to the next.
    pub fn passage(&self) -> Rc<Passage> {
        Rc::clone(&self.passage)
    }

    /// What QEMU is to be given for each, with its volume.
    pub fn qemu_lines(&self) -> impl Iterator<Item = (VolumeIndex, String)> {
        self.sockets.iter().map(|(path, volume, name)| (*volume, qemu_line(path, name)))
    }

    /// Says what happened.
    pub fn tell_news(&mut self) {
        let now = Instant::now();
        for News { socket, text, is_bad } in self.watch.news.borrow_mut().drain(..) {
            let (path, _, name) = &self.sockets[socket];
            let text = format!("{name}: vhost-user {}: {text}", path.display());
            let what = match &text {
                text if text.ends_with(" connected") => What::Comes,
                text if text.ends_with(" disconnected") => What::Goes,
                _ => What::Else,
            };
            if let Some(line) = self.limiter.tell((socket, is_bad, what), text, 1, now) {
                tell(is_bad, &line);
            }
        }
        for ((_, is_bad, _), line) in self.limiter.due(now) {
            tell(is_bad, &line);
        }
    }

    /// The sockets of a volume, and whether a machine is connected to each.
    pub fn of(&self, volume: VolumeIndex) -> Vec<(String, bool)> {
        let is_connected = self.watch.is_connected.borrow();
        let its = self.sockets.iter().enumerate().filter(|(_, it)| it.1 == volume);
        // It may be heard of in the next turn.
        let is = |at: usize| is_connected.get(at).is_some_and(|it| *it);
        its.map(|(at, (path, _, _))| (path.display().to_string(), is(at))).collect()
    }
}

fn tell(is_bad: bool, line: &str) {
    match is_bad {
        true => tracing::warn!("{line}"),
        false => tracing::info!("{line}"),
    }
}
