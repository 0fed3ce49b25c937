// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Without the feature `vhost` no socket is ever asked for.

use super::Wanted;
use anyhow::{Result, bail};
use forebay_core::units::VolumeIndex;
use forebay_serve::passage::Passage;
use forebay_serve::server::Server;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::rc::Rc;

pub const SOCKET_COUNT_MAX: usize = 0;

pub fn memory_parts(_: usize) -> Vec<(&'static str, u64)> {
    Vec::new()
}

/// Never there.
pub struct Machines(Infallible);

impl Machines {
    pub fn begin(_: &mut Server, _: Vec<Wanted>) -> Result<Machines> {
        bail!("this program was built without the feature `vhost`")
    }

    pub fn listen(&mut self, _: Wanted) {
        match self.0 {}
    }

    pub fn qemu_lines(&self) -> impl Iterator<Item = (VolumeIndex, String)> {
        match self.0 {}
        #[allow(unreachable_code)]
        std::iter::empty()
    }

    pub fn kept(&mut self) -> Vec<(String, OwnedFd)> {
        match self.0 {}
    }

    pub fn passage(&self) -> Rc<Passage> {
        match self.0 {}
    }

    pub fn tell_news(&mut self) {
        match self.0 {}
    }

    pub fn of(&self, _: VolumeIndex) -> Vec<(String, bool)> {
        match self.0 {}
    }
}
